//! The connections of one poller, by slot. A token leads here without a search.

use std::collections::VecDeque;
use std::sync::Arc;

use smcr_memory::{Lease, Rmbe};
use smcr_proto::Instant;
use smcr_proto::connection::Connection;
use smcr_proto::wire::cdc::Cdc;

use crate::gauges::{Reading, Stage};
use crate::handoff::{ConnectionId, Ending, GroupId, LinkId, PeerElement};
use crate::limits::CONNECTIONS_MAX;
use crate::moves::Move;
use crate::relay::crossing::Sieve;

/// What a slot holds.
#[derive(Debug)]
pub(crate) enum Slot<S> {
    Free,
    /// The rendezvous is about to end; CDC messages that came first wait here.
    Expected {
        generation: u16,
        group: GroupId,
        parked: Vec<Cdc>,
    },
    Busy(Box<Relay<S>>),
}

/// A connection that is being relayed.
#[derive(Debug)]
pub(crate) struct Relay<S> {
    pub(crate) id: ConnectionId,
    /// The application's socket; gone once it was reset.
    pub(crate) near: Option<Socket<S>>,
    pub(crate) far: Far<S>,
    /// Why it ends, once something other than both applications decided so.
    pub(crate) ending: Option<Ending>,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    /// Times it changed its link.
    pub(crate) failovers: u32,
    pub(crate) queued: Queued,
}

impl<S> Relay<S> {
    /// How far it has come, for others to read.
    pub(crate) fn reading(&self) -> Reading {
        let stage = match &self.near {
            None => Stage::Closing,
            Some(near) if near.is_done() => Stage::Closing,
            Some(near) if near.eof || near.finished => Stage::HalfClosed,
            Some(_) => Stage::Active,
        };
        let Self { bytes_in, bytes_out, failovers, .. } = *self;
        Reading { bytes_in, bytes_out, failovers, stage }
    }
}

/// In which work lists a connection stands.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Queued {
    pub(crate) drain: bool,
    pub(crate) fill: bool,
    pub(crate) flush: bool,
}

/// The other side of a relay.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "relays are boxed: a fallback wastes two hundred bytes"
)]
pub(crate) enum Far<S> {
    Smc(Smc),
    Tcp(Tcp<S>),
}

impl<S> Far<S> {
    /// The link group that it belongs to, if it is SMC-R.
    pub(crate) fn group(&self) -> Option<GroupId> {
        match self {
            Self::Smc(smc) => Some(smc.group),
            Self::Tcp(_) => None,
        }
    }
}

/// SMC-R as the far side.
#[derive(Debug)]
pub(crate) struct Smc {
    pub(crate) link: LinkId,
    /// Whose links may speak of it.
    pub(crate) group: GroupId,
    pub(crate) connection: Connection,
    pub(crate) rmbe: Rmbe,
    pub(crate) peer: PeerElement,
    /// Requests posted and not completed: the slot cannot be reused before they are.
    pub(crate) outstanding: u32,
    /// Written, but not known to have been announced: what another link would have to repeat.
    pub(crate) retained: VecDeque<Retained>,
    /// Bytes to be written again, before anything new.
    pub(crate) replay: VecDeque<Piece>,
    /// Bytes that were, until the message that announces them is acknowledged. The send pool gets
    /// its part back at once: that message comes behind all of the replay, which may need more than
    /// the pool has.
    pub(crate) repeated: VecDeque<Piece>,
    /// Where it goes as soon as nothing is outstanding. It posts nothing until then.
    pub(crate) moving: Option<Arc<Move>>,
    /// The last message was flushed: the peer may not know what it said.
    pub(crate) unheard: bool,
    /// Messages of a peer that changed the link, and until when they wait for what came before.
    pub(crate) held: Option<Held>,
    /// The link is lost and nothing more will be said.
    pub(crate) condemned: bool,
    /// The peer changed the link: what it posted on the old one may come late.
    pub(crate) peer_moved: bool,
    /// We said D: no byte of ours follows.
    pub(crate) said_done: bool,
    /// We said C.
    pub(crate) said_closed: bool,
    /// The peer said that it writes no more: D or C.
    pub(crate) peer_done: bool,
    /// The peer said that it reads no more either: C.
    pub(crate) peer_closed: bool,
    /// Until when the end of its stream waits for bytes that it may still have.
    pub(crate) late_until: Option<Instant>,
}

/// Bytes that the NIC has written to the peer's element, `at` bytes behind its beginning, while
/// the message that announces them is on its way.
#[derive(Debug)]
pub(crate) struct Retained {
    pub(crate) at: u32,
    pub(crate) lease: Lease,
}

/// Bytes that belong `at` bytes behind the beginning of the peer's element.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) at: u32,
    pub(crate) bytes: Vec<u8>,
    /// So many of them were written already.
    pub(crate) done: usize,
}

/// A message that came before others that must be taken in first, failover validation above all,
/// and what came behind it.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) messages: Vec<Cdc>,
    pub(crate) until: Instant,
}

/// A second socket as the far side.
#[derive(Debug)]
pub(crate) struct Tcp<S> {
    pub(crate) socket: Socket<S>,
    /// Read from the near socket, not yet taken by the far one.
    pub(crate) outbound: Backlog,
    /// Read from the far socket, not yet taken by the near one.
    pub(crate) inbound: Backlog,
    /// Bytes of both that are part of the poller's sum.
    pub(crate) held: usize,
    /// Looks at what comes first from the far socket, as long as that may be a Decline.
    pub(crate) sieve: Option<Sieve>,
}

/// Bytes that the target socket did not take. Empty, and without memory, in the common case.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    pub(crate) bytes: Vec<u8>,
    pub(crate) written: usize,
    /// It is one byte, and urgent.
    pub(crate) urgent: bool,
}

impl Backlog {
    /// Bytes that the rendezvous read beyond its own, to be written first.
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, written: 0, urgent: false }
    }
}

/// A TCP socket and what is known of it from edge-triggered events.
#[derive(Debug)]
pub(crate) struct Socket<S> {
    pub(crate) stream: S,
    /// A read may bring something.
    pub(crate) readable: bool,
    /// A write may take something.
    pub(crate) writable: bool,
    /// The end or an error is in sight: a short read does not mean that nothing follows.
    pub(crate) ending: bool,
    /// It is broken; a read tells so when the bytes before the error are read.
    pub(crate) failed: bool,
    /// An urgent byte has come and was not read yet.
    pub(crate) urgent: bool,
    /// A read took all it had room for: what is next came with no event that we know of.
    pub(crate) unseen: bool,
    /// The application sends no more: FIN was read.
    pub(crate) eof: bool,
    /// We sent FIN.
    pub(crate) finished: bool,
}

impl<S> Socket<S> {
    pub(crate) fn new(stream: S) -> Self {
        // Writable until the kernel says otherwise; readable when it says so, which it does at
        // once if bytes are waiting.
        Self {
            stream,
            readable: false,
            writable: true,
            ending: false,
            failed: false,
            urgent: false,
            unseen: false,
            eof: false,
            finished: false,
        }
    }

    /// Both directions have ended.
    pub(crate) fn is_done(&self) -> bool {
        self.eof && self.finished
    }
}

/// The table. Its slots are chosen by the control thread.
#[derive(Debug)]
pub(crate) struct Connections<S> {
    slots: Box<[Slot<S>]>,
    busy: usize,
}

impl<S> Connections<S> {
    pub(crate) fn new() -> Self {
        let slots = std::iter::repeat_with(|| Slot::Free).take(CONNECTIONS_MAX).collect();
        Self { slots, busy: 0 }
    }

    pub(crate) fn busy(&self) -> usize {
        self.busy
    }

    /// Begins to keep CDC messages for `id`.
    pub(crate) fn expect(&mut self, id: ConnectionId, group: GroupId) {
        let slot = &mut self.slots[usize::from(id.slot)];
        assert!(matches!(slot, Slot::Free), "the control thread knows which slots are free");
        *slot = Slot::Expected { generation: id.generation, group, parked: Vec::new() };
    }

    /// Stops expecting `id`.
    pub(crate) fn forget(&mut self, id: ConnectionId) {
        let slot = &mut self.slots[usize::from(id.slot)];
        if matches!(slot, Slot::Expected { generation, .. } if *generation == id.generation) {
            *slot = Slot::Free;
        }
    }

    /// Puts a relay in its slot, and returns what was kept for it.
    pub(crate) fn insert(&mut self, relay: Relay<S>) -> Vec<Cdc> {
        let slot = &mut self.slots[usize::from(relay.id.slot)];
        let generation = relay.id.generation;
        self.busy += 1;
        match std::mem::replace(slot, Slot::Busy(Box::new(relay))) {
            Slot::Free => Vec::new(),
            Slot::Expected { generation: expected, parked, .. } => {
                assert_eq!(expected, generation);
                parked
            }
            Slot::Busy(_) => panic!("the control thread knows which slots are free"),
        }
    }

    /// What a token names, unless the slot has moved on.
    pub(crate) fn lookup(&mut self, id: ConnectionId) -> Option<&mut Slot<S>> {
        // RFC 7609 2-3
        let slot = self.slots.get_mut(usize::from(id.slot))?;
        let generation = match slot {
            Slot::Free => return None,
            Slot::Expected { generation, .. } => *generation,
            Slot::Busy(relay) => relay.id.generation,
        };
        (generation == id.generation).then_some(slot)
    }

    /// The relay that `id` names.
    pub(crate) fn relay(&mut self, id: ConnectionId) -> Option<&mut Relay<S>> {
        match self.lookup(id)? {
            Slot::Busy(relay) => Some(relay),
            Slot::Free | Slot::Expected { .. } => None,
        }
    }

    /// The relay in `slot`.
    pub(crate) fn at(&mut self, slot: u16) -> Option<&mut Relay<S>> {
        match &mut self.slots[usize::from(slot)] {
            Slot::Busy(relay) => Some(relay),
            Slot::Free | Slot::Expected { .. } => None,
        }
    }

    /// Takes the relay out of `slot`.
    pub(crate) fn remove(&mut self, slot: u16) -> Option<Relay<S>> {
        let slot = &mut self.slots[usize::from(slot)];
        match std::mem::replace(slot, Slot::Free) {
            Slot::Busy(relay) => {
                self.busy -= 1;
                Some(*relay)
            }
            other @ (Slot::Free | Slot::Expected { .. }) => {
                *slot = other;
                None
            }
        }
    }

    /// Every slot with a relay in it.
    pub(crate) fn slots(&self) -> impl Iterator<Item = u16> {
        let busy = self.slots.iter().enumerate().filter(|(_, slot)| matches!(slot, Slot::Busy(_)));
        busy.map(|(index, _)| u16::try_from(index).expect("CONNECTIONS_MAX fits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relay(id: ConnectionId) -> Relay<()> {
        let (outbound, inbound) = (Backlog::default(), Backlog::default());
        Relay {
            id,
            near: None,
            far: Far::Tcp(Tcp { socket: Socket::new(()), outbound, inbound, held: 0, sieve: None }),
            ending: None,
            bytes_in: 0,
            bytes_out: 0,
            failovers: 0,
            queued: Queued::default(),
        }
    }

    /// A message that comes late must not be taken for one of the next connection in the slot.
    // RFC 7609 4.7.1-3
    #[test]
    fn only_the_present_user_of_a_slot_is_found() {
        let mut connections = Connections::new();
        let [first, second] = [1, 2].map(|generation| ConnectionId { slot: 5, generation });
        assert!(connections.lookup(first).is_none());
        connections.insert(relay(first));
        assert!(connections.relay(first).is_some() && connections.relay(second).is_none());
        assert!(connections.remove(5).is_some_and(|relay| relay.id == first));
        connections.expect(second, GroupId(1));
        assert!(connections.lookup(first).is_none() && connections.lookup(second).is_some());
        assert!(connections.relay(second).is_none() && connections.remove(5).is_none());
        assert!(connections.lookup(ConnectionId { slot: u16::MAX, generation: 1 }).is_none());
    }

    /// What came before the rendezvous had ended belongs to the connection that was expected; a
    /// failed rendezvous frees the slot, and nobody else's.
    // RFC 7609 3.5.2.4-5
    #[test]
    fn an_expected_connection_gets_what_was_kept_for_it() {
        let mut connections = Connections::new();
        let [first, second] = [1, 2].map(|generation| ConnectionId { slot: 5, generation });
        connections.expect(first, GroupId(1));
        connections.forget(second);
        let Some(Slot::Expected { parked, .. }) = connections.lookup(first) else { panic!() };
        parked.push(Cdc { sequence: 9, ..Cdc::default() });
        assert_eq!(connections.insert(relay(first)), [Cdc { sequence: 9, ..Cdc::default() }]);
        assert_eq!((connections.busy(), connections.slots().collect()), (1, vec![5]));
        connections.forget(first);
        assert_eq!(connections.busy(), 1);
        connections.remove(5);
        connections.expect(second, GroupId(1));
        connections.forget(second);
        assert!(connections.lookup(second).is_none());
        assert_eq!(connections.insert(relay(first)), []);
    }

    #[test]
    #[should_panic(expected = "knows which slots are free")]
    fn a_slot_that_is_given_twice_is_our_bug() {
        let mut connections = Connections::new();
        let id = ConnectionId { slot: 5, generation: 1 };
        connections.insert(relay(id));
        connections.insert(relay(id));
    }
}
