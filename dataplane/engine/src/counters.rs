//! What a poller counts. A reason on the data path is a counter, not a log line.

pub use crate::counter::Counter;
use crate::stages::Stages;

/// What a counter is called and what it means.
#[derive(Clone, Copy, Debug)]
pub struct Description {
    /// Its name, as a Rust and a Prometheus identifier.
    pub name: &'static str,
    /// What it counts since the start: `count` or `bytes`; or what it shows now: `now` or
    /// `bytes_now`.
    pub unit: &'static str,
    /// One sentence.
    pub help: &'static str,
}

macro_rules! counters {
    ($($(#[doc = $help:literal])+ $name:ident: $unit:ident,)+) => {
        /// The counters of one poller, in a page of their own so that readers disturb nobody.
        #[derive(Debug, Default)]
        #[repr(align(4096))]
        pub struct Counters {
            $($(#[doc = $help])+ pub $name: Counter,)+
            /// How long bytes stay in each stage of their way.
            pub stages: Stages,
        }

        /// Every counter, in the order of [`Counters::values`].
        pub const DESCRIPTIONS: &[Description] = &[
            $(Description {
                name: stringify!($name),
                unit: stringify!($unit),
                help: concat!($($help),+).trim_ascii(),
            },)+
        ];

        impl Counters {
            /// The numbers, in the order of [`DESCRIPTIONS`].
            pub fn values(&self) -> impl Iterator<Item = u64> {
                [$(self.$name.get(),)+].into_iter()
            }
        }
    };
}

counters! {
    /// Turns of the polling loop.
    turns: count,
    /// Turns in which nothing moved.
    turns_idle: count,
    /// Times the thread went to sleep.
    sleeps: count,
    /// Times the core was offered and somebody took it.
    yields_taken_up: count,
    /// Times the core was offered and somebody kept it for a millisecond or longer.
    yields_lost: count,
    /// Whether others keep the core so often that the thread sleeps and is placed by the scheduler.
    contended: now,
    /// Times others began to keep the core so often that the thread sleeps and is placed by the
    /// scheduler.
    contentions: count,
    /// Whether the thread refrains from offers of its core now, because others used them for long.
    refraining: now,
    /// Times the thread began to refrain from offers of its core, because others used them for
    /// long.
    refrainings: count,
    /// Whether the thread lets others go on now when it wakes up, because it carries short
    /// connections, most of whose work is theirs, or a crowd that always has something for it: 0
    /// or 1.
    gathering: now,
    /// Times the thread began to let others go on when it wakes up, because it carries short
    /// connections or a crowd.
    gatherings: count,
    /// Times the kernel refused to pin the thread to its core, or to let it go.
    place_refused: count,
    /// Whether the thread is pinned to its core now: 0 or 1.
    pinned: now,
    /// Whether the thread runs on the core of its applications now, having none to itself: 0 or 1.
    near: now,
    /// Whether the thread's priority is raised now, for what it carries beside busy programs: 0 or
    /// 1.
    priority_raised: now,
    /// Whether the thread is real-time now, because what it carries gains by that: 0 or 1.
    realtime: now,
    /// Times the kernel refused to change the thread's priority, to make it real-time, or a batch
    /// thread. One that may not tries each once, and once more if it may raise its priority less
    /// far.
    priority_refused: count,
    /// Times the thread has asked for memory. It does not while connections only carry bytes.
    allocations: count,
    /// Connections in the table now.
    connections: now,
    /// Connections relayed over SMC-R since the start.
    connections_smc: count,
    /// Connections relayed over TCP since the start.
    connections_tcp: count,
    /// Bytes read from near sockets.
    bytes_in: bytes,
    /// Bytes written to near sockets.
    bytes_out: bytes,
    /// Urgent bytes read from sockets.
    urgent_in: count,
    /// Urgent bytes written to sockets.
    urgent_out: count,
    /// Bytes written to peers' RMB elements.
    rdma_out: bytes,
    /// Bytes that peers have announced in our RMB elements.
    rdma_in: bytes,
    /// CDC messages sent.
    cdc_out: count,
    /// CDC messages received.
    cdc_in: count,
    /// Fills cut short because the peer's element was full.
    blocked_on_peer: count,
    /// Times that a connection had to wait until a send chunk was free.
    blocked_on_pool: count,
    /// Times that a connection had to wait because its link had its share of the send chunks.
    blocked_on_share: count,
    /// Times that a connection had to wait because the send queue of its link was full, and turns
    /// in which messages that were due had to.
    blocked_on_queue: count,
    /// Drains cut short because the near socket took no more.
    blocked_on_socket: count,
    /// Fills or drains put off because connections had carried as much as they may.
    paced: count,
    /// CDC messages whose token names no connection.
    cdc_unknown_token: count,
    /// CDC messages about connections of other link groups than the link that brought them.
    cdc_foreign: count,
    /// CDC messages that could not be decoded.
    cdc_malformed: count,
    /// CDC messages with impossible cursors or flags; their connections were reset.
    cdc_misbehaved: count,
    /// CDC messages kept for connections that a rendezvous or another poller was about to bring.
    cdc_parked: count,
    /// CDC messages replaced by newer ones because too many were kept already.
    cdc_parked_overflow: count,
    /// Connections reset by an application or its host.
    resets_application: count,
    /// Connections reset by the SMC-R peer.
    resets_peer: count,
    /// Connections reset because bytes that a NIC had acknowledged were lost.
    resets_data_lost: count,
    /// Times a connection left its link for another.
    failovers: count,
    /// Bytes written again on another link.
    bytes_replayed: bytes,
    /// Connections taken over from other pollers.
    connections_moved_in: count,
    /// Connections handed to other pollers.
    connections_moved_out: count,
    /// CDC messages passed on to the poller that has their connection.
    cdc_forwarded: count,
    /// CDC messages dropped because their peer said more than a poller that is behind can be told;
    /// their connections were aborted.
    cdc_flooded: count,
    /// CDC messages of a peer that changed the link, kept until what it sent before has come.
    cdc_held: count,
    /// Connections lost with their link.
    resets_link: count,
    /// Connections whose peer did not answer a close in time.
    closes_stalled: count,
    /// Links given up because their peers asked for more than they took in, or said more than could
    /// be heard.
    links_flooded: count,
    /// Reports that waited because the control thread was behind.
    reports_delayed: count,
    /// Memory of elements that dormant connections have given back to the host.
    memory_given_back: bytes,
    /// Send chunks in use, in bytes, at the last look.
    send_bytes_lent: bytes_now,
    /// Bytes of connections over TCP that a socket has not taken yet, at the last look.
    backlog_bytes: bytes_now,
    /// Sockets that could not be watched; their connections were reset.
    watch_failures: count,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_descriptions_go_together() {
        let counters = Counters::default();
        counters.turns.add(2);
        counters.turns.add(3);
        let by_name = |name| {
            let index = DESCRIPTIONS.iter().position(|one| one.name == name).unwrap();
            counters.values().nth(index).unwrap()
        };
        assert_eq!(by_name("turns"), 5);
        assert_eq!(by_name("watch_failures"), 0);
        assert_eq!(counters.values().count(), DESCRIPTIONS.len());
        assert!(DESCRIPTIONS.iter().all(|one| one.help.ends_with('.')));
    }
}
