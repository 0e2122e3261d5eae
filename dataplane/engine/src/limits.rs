//! Bounds of one poller, and the arithmetic that ties them together.

/// Connections one poller serves. Their slots are half of an alert token.
pub const CONNECTIONS_MAX: usize = 16_384;
/// Links one poller serves. A thousand peers with two RNICs each are ordinary.
pub const LINKS_PER_POLLER_MAX: usize = 4_096;
/// Commands in flight from the control thread.
pub const COMMANDS_MAX: usize = 4_096;
/// Letters in flight from the other pollers.
pub const LETTERS_MAX: usize = 4_096;
/// Reports in flight to the control thread.
pub const REPORTS_MAX: usize = 8_192;
/// Commands obeyed in one turn.
pub const OBEY_PER_TURN_MAX: usize = 64;
/// Completions taken from the NIC in one turn.
pub const REAP_PER_TURN_MAX: usize = 1_024;
/// Letters opened in one turn. Most are messages that another poller has taken from its NIC: with
/// fewer they could wait for longer than a failover waits for them.
pub const LETTERS_PER_TURN_MAX: usize = REAP_PER_TURN_MAX;
/// Socket events taken in one turn, at most.
pub const EVENTS_PER_TURN_MAX: usize = 256;
/// Socket events taken in one turn, unless more wait turn after turn.
pub const EVENTS_PER_TURN_MIN: usize = 8;
/// Shared memory of local programs that is looked at in every turn: one cache line or two for each.
pub const HOT_RINGS_MAX: usize = 64;
/// Connections that had to wait until they may carry more, and get their turn in one turn of the
/// poller.
pub const PACED_PER_TURN_MAX: usize = 64;
/// Bytes read from one socket in one turn.
pub const FILL_PER_TURN_MAX: u32 = 131_072;
/// The size of a send chunk. Chunks begin at different offsets in their pages, so that of a sender
/// whose bytes are where the kernel copies slowly to one of them (`spacing`), others get them fast.
pub const SEND_CHUNK_BYTES: u32 = FILL_PER_TURN_MAX + 192;
/// Bytes that sockets have not taken, of all connections over TCP, before less is read of each at a
/// time: readers that are slow must not take all memory.
pub const BACKLOG_BYTES_MAX: usize = 16 << 20;
/// Bytes read from one socket in one turn, for another socket, from then on.
pub const FILL_WHILE_CROWDED: usize = 8_192;
/// LLC messages of one link that wait for the control thread. Exchanges wait for their answers, so
/// that an honest peer has a handful under way; each may have 8 KiB.
pub const LLC_UNHEARD_MAX: usize = 64;
/// LLC messages of one link that the peer has not taken in, or that wait for room. As many answers
/// as a peer can ask for at once, and more than a gateway has to say by itself.
pub const LLC_OUTSTANDING_MAX: u32 = 256;
/// CDC messages kept for a connection that is not there yet, or until messages before them have
/// come, before the newest replaces the one before it.
pub const PARKED_MAX: usize = 16;
/// Failover validations about one connection that wait, for the same reasons or for a poller that
/// is behind. An honest peer sends one each time that it changes the link.
pub const VALIDATIONS_WAITING_MAX: usize = 16;
/// Requests that one flush of one connection needs: two pieces of the peer's ring and a CDC.
pub const WORK_PER_FLUSH: usize = 3;

const _: () = assert!(CONNECTIONS_MAX <= 1 << 16);
// Every connection may close in the turn in which every link breaks.
const _: () = assert!(REAP_PER_TURN_MAX >= WORK_PER_FLUSH);
