//! The whole conversation between the control thread and one polling thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smcr_memory::Rmbe;
use smcr_proto::ring::Ring;
use smcr_proto::wire::cdc::Cdc;
use smcr_proto::{AlertToken, Instant, Rkey};
use smcr_rnic::{Cause, Message};

use crate::moves::Migrant;
pub use crate::owners::{Owner, Owners};

/// A link, as both threads call it. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u32);

/// A link group, as both threads call it. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u32);

/// A connection: a slot, unique in the process, and a number that the slot never has twice in a
/// row. A connection keeps its name when it moves from poller to poller.
///
/// The alert token that peers put in CDC messages is the same thing in one number, so that a late
/// message does not reach the next user of the slot. The control thread draws generations at
/// random: from its own tokens a peer cannot tell those of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId {
    /// Index in the table of whichever poller has it.
    pub slot: u16,
    /// Drawn at random for each use of the slot; never 0, so that no token is.
    pub generation: u16,
}

impl ConnectionId {
    /// The token for peers.
    pub fn token(self) -> AlertToken {
        AlertToken(u32::from(self.generation) << 16 | u32::from(self.slot))
    }

    /// The connection that a token names.
    pub fn from_token(token: AlertToken) -> Self {
        let [high, low] = [token.0 >> 16, token.0 & 0xffff]
            .map(|half| u16::try_from(half).expect("half of a word"));
        Self { slot: low, generation: high }
    }
}

/// How an RMB of the peer is addressed through one link and through another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyChange {
    /// Its key on the link that is left.
    pub old: Rkey,
    /// Its address there.
    pub old_base: u64,
    /// Its key on the link that is taken.
    pub new: Rkey,
    /// Its address there.
    pub new_base: u64,
}

/// When a link last brought anything, and when something last arrived. Written by the poller, read
/// by the control thread, so that keepalive costs the data path one store.
#[derive(Debug, Default)]
pub struct Activity {
    heard: AtomicU64,
    proven: AtomicU64,
}

impl Activity {
    /// Notes that something came.
    pub fn note(&self, now: Instant) {
        self.heard.store(now.0, Ordering::Relaxed);
    }

    /// When something last came.
    pub fn last(&self) -> Instant {
        Instant(self.heard.load(Ordering::Relaxed))
    }

    /// Notes that the peer's NIC has acknowledged a message: the link carries in both directions.
    pub fn prove(&self, now: Instant) {
        self.proven.store(now.0, Ordering::Relaxed);
    }

    /// When it last did.
    pub fn proven(&self) -> Instant {
        Instant(self.proven.load(Ordering::Relaxed))
    }
}

/// Stands for an LLC message that was reported, as long as that is in the queue: so a poller knows
/// how many the control thread has not come to yet.
#[derive(Clone, Debug, Default)]
pub struct Unheard(Arc<()>);

impl Unheard {
    /// How many others stand for messages of the same link.
    pub(crate) fn others(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }
}

/// An LLC message, as it travels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LlcBytes {
    /// As most are.
    Short(Message),
    /// A longer one of SMC-Rv2. Rare, so it may cost an allocation.
    Long(Box<[u8]>),
}

impl LlcBytes {
    /// The message with these bytes; none is shorter than [`MESSAGE_LEN`](smcr_rnic::MESSAGE_LEN).
    pub fn new(bytes: &[u8]) -> Self {
        bytes.try_into().map_or_else(|_| Self::Long(bytes.into()), Self::Short)
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Short(message) => message,
            Self::Long(message) => message,
        }
    }
}

impl From<Message> for LlcBytes {
    fn from(message: Message) -> Self {
        Self::Short(message)
    }
}

/// Control thread to poller. What a variant carries is moved, never shared.
#[derive(Debug)]
pub enum Command<Qp, Stream> {
    /// Take over this queue pair.
    AddLink {
        /// Its name from now on.
        link: LinkId,
        /// Whose link it is: only connections of this group are spoken of on it.
        group: GroupId,
        /// The queue pair, in RTS.
        qp: Qp,
        /// Where to note that something came.
        activity: Arc<Activity>,
    },
    /// Post this LLC message, in order with the CDC messages of its link.
    SendLlc {
        /// Which link. For a long message, one whose queue pair was opened for such.
        link: LinkId,
        /// The message.
        message: LlcBytes,
    },
    /// End every connection on this link without a word to the peer, and reset their sockets.
    FailConnections {
        /// Which link.
        link: LinkId,
    },
    /// Give the queue pair up once what it brought is taken in, then answer
    /// [`Report::LinkRetired`].
    RetireLink {
        /// Which link.
        link: LinkId,
    },
    /// CDC messages for this connection may come before its rendezvous has ended: keep them.
    Expect {
        /// Which connection.
        connection: ConnectionId,
        /// The only link group whose links may bring them.
        group: GroupId,
    },
    /// The rendezvous failed: expect nothing any more.
    Forget {
        /// Which connection.
        connection: ConnectionId,
    },
    /// Relay.
    Relay {
        /// Its name; answered by one [`Report::Closed`].
        connection: ConnectionId,
        /// What to relay between.
        established: Box<Established<Stream>>,
    },
    /// Reset this connection on both sides.
    Abort {
        /// Which connection.
        connection: ConnectionId,
    },
    /// The link is down, whatever its queue pair believes: let what is outstanding end now. Nothing
    /// is reported of it.
    FailLink {
        /// Which link.
        link: LinkId,
    },
    /// Continue connections of one link on another (RFC 4.6): each waits for its outstanding
    /// requests to end, well or not, then moves, and is answered by [`Report::Moved`] from the
    /// poller that has it then. One whose element has no key on the new link is reset.
    MoveConnections {
        /// The link to leave; broken or alive.
        from: LinkId,
        /// The link to take, of which its poller has been told.
        to: LinkId,
        /// The index of that poller.
        to_poller: u8,
        /// The RMBs of the peer as both links see them.
        keys: Vec<KeyChange>,
        /// Only these. `None` is all there are and all that still come, and vacates `from` for
        /// good: answered by one [`Report::LinkVacated`].
        only: Option<Vec<ConnectionId>>,
    },
    /// From poller to poller: this connection is yours now.
    Adopt(Box<Migrant<Stream>>),
    /// From poller to poller: a CDC message for a connection of yours, of a link of mine.
    Deliver {
        /// The link group of that link, and so of the connection.
        group: GroupId,
        /// The message; its token names the connection.
        message: Cdc,
    },
    /// Finish the turn and end the thread.
    Stop,
}

/// A connection as the rendezvous leaves it.
#[derive(Debug)]
pub enum Established<Stream> {
    /// One socket and SMC-R.
    Smc {
        /// The application's socket.
        near: Stream,
        /// The link to send on.
        link: LinkId,
        /// Its link group.
        group: GroupId,
        /// Our element, zeroed.
        rmbe: Rmbe,
        /// The peer's element.
        peer: PeerElement,
    },
    /// Two sockets.
    Tcp {
        /// The socket that we accepted.
        near: Stream,
        /// The socket that we connected.
        far: Stream,
        /// Read from `near` during the rendezvous, but meant for the application behind `far`.
        from_near: Vec<u8>,
        /// Read from `far`, meant for `near`.
        from_far: Vec<u8>,
        /// We declined on `far`, whose peer may have done so, too, before it heard: a Decline that
        /// comes first, in `from_far` or later, is for nobody.
        declined: bool,
    },
}

/// The element of the peer that we write.
#[derive(Clone, Copy, Debug)]
pub struct PeerElement {
    /// Opens it.
    pub rkey: Rkey,
    /// Its first byte (of the element, not of the RMB).
    pub address: u64,
    /// Its shape: how long it is, and whether an eye catcher stands at its beginning.
    pub ring: Ring,
    /// What the peer wants to see in our CDC messages.
    pub token: AlertToken,
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Both sides finished and said so.
    Graceful,
    /// One of the two applications, or its host, reset it.
    ResetByApplication,
    /// The SMC-R peer reset it.
    ResetByPeer,
    /// Its link broke and there was no other.
    LinkLost,
    /// What its NIC had acknowledged to the peer never came: found when the peer changed the link.
    DataLost,
    /// The SMC-R peer broke the protocol.
    PeerMisbehaved,
    /// The peer did not answer our close in time.
    Stalled,
    /// The control thread asked for it.
    Aborted,
}

/// Poller to control thread.
#[derive(Debug)]
pub enum Report<Stream> {
    /// An LLC message came.
    LlcReceived {
        /// On which link.
        link: LinkId,
        /// The message.
        message: LlcBytes,
        /// Gone with the report.
        unheard: Unheard,
    },
    /// The queue pair of this link broke. Its connections stand still until the control thread
    /// says what becomes of them.
    LinkBroke {
        /// Which link.
        link: LinkId,
        /// Why.
        cause: Cause,
    },
    /// The answer to [`Command::RetireLink`]: the queue pair is gone.
    LinkRetired {
        /// Which link.
        link: LinkId,
    },
    /// This poller has the connection now, and sends on this link.
    Moved {
        /// Which connection.
        connection: ConnectionId,
        /// The link it continues on.
        link: LinkId,
        /// What the RMB of the peer's element is called there.
        rkey: Rkey,
        /// Where the peer's element is there.
        address: u64,
    },
    /// No connection of this poller sends on the link any more, after
    /// [`Command::MoveConnections`].
    LinkVacated {
        /// Which link.
        link: LinkId,
    },
    /// A connection ended, and its slot is free.
    Closed {
        /// Which connection.
        connection: ConnectionId,
        /// How.
        ending: Ending,
        /// Read from the near side, in bytes.
        bytes_in: u64,
        /// Written to the near side, in bytes.
        bytes_out: u64,
        /// Our element, if it was an SMC-R connection.
        rmbe: Option<Rmbe>,
        /// Whether nobody writes that element any more: the peer said so, and nothing that it
        /// posted before can still be under way.
        settled: bool,
        /// The sockets, to be closed where that may take its time.
        streams: [Option<Stream>; 2],
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_its_connection() {
        let connection = ConnectionId { slot: 0x1234, generation: 0xfedc };
        assert_eq!(connection.token(), AlertToken(0xfedc_1234));
        assert_eq!(ConnectionId::from_token(connection.token()), connection);
    }
}
