//! The connections of one poller, by slot. A token leads here without a search.

use crate::limits::CONNECTIONS_MAX;
use crate::names::ConnectionId;
use crate::parked::Parked;
use crate::relay::Relay;

/// What a slot holds.
#[derive(Debug)]
pub(crate) enum Slot<S> {
    Free,
    /// A connection will come, from the control thread or from a neighbour. CDC messages that came
    /// before it wait here.
    Expected {
        generation: u16,
        parked: Parked,
    },
    Busy(Box<Relay<S>>),
}

/// The table. Its slots are chosen by the control thread.
#[derive(Debug)]
pub(crate) struct Connections<S> {
    slots: Box<[Slot<S>]>,
    /// One bit for each slot, set while it is busy. Whoever looks for all connections reads these
    /// 2 KiB, and not all slots.
    busy_bits: Box<[u64]>,
    busy: usize,
}

impl<S> Connections<S> {
    pub(crate) fn new() -> Self {
        let slots = std::iter::repeat_with(|| Slot::Free).take(CONNECTIONS_MAX).collect();
        Self { slots, busy_bits: vec![0; CONNECTIONS_MAX.div_ceil(64)].into(), busy: 0 }
    }

    pub(crate) fn busy(&self) -> usize {
        self.busy
    }

    /// Where CDC messages about `id` wait, which will come.
    ///
    /// The control thread frees the slot of a connection that it expected in vain before it uses
    /// the slot again, but that news may come later than news of the next connection, which others
    /// bring: so the next connection takes the place of the one before.
    pub(crate) fn expect(&mut self, id: ConnectionId) -> &mut Parked {
        let slot = &mut self.slots[usize::from(id.slot)];
        let is_new = match slot {
            Slot::Expected { generation, .. } => *generation != id.generation,
            Slot::Free => true,
            Slot::Busy(_) => panic!("{ONE_AT_A_TIME}"),
        };
        if is_new {
            *slot = Slot::Expected { generation: id.generation, parked: Parked::default() };
        }
        match slot {
            Slot::Expected { parked, .. } => parked,
            Slot::Free | Slot::Busy(_) => panic!("it was just put there"),
        }
    }

    /// Stops expecting `id`.
    pub(crate) fn forget(&mut self, id: ConnectionId) {
        let slot = &mut self.slots[usize::from(id.slot)];
        if matches!(slot, Slot::Expected { generation, .. } if *generation == id.generation) {
            *slot = Slot::Free;
        }
    }

    /// Puts a relay in its slot, and returns what was kept for it.
    pub(crate) fn insert(&mut self, relay: Box<Relay<S>>) -> Parked {
        let slot = &mut self.slots[usize::from(relay.id.slot)];
        let generation = relay.id.generation;
        self.busy += 1;
        self.busy_bits[usize::from(relay.id.slot / 64)] |= 1 << (relay.id.slot % 64);
        match std::mem::replace(slot, Slot::Busy(relay)) {
            Slot::Expected { generation: expected, parked, .. } if expected == generation => parked,
            // The slot may stand for a connection that did not come: see `expect`.
            Slot::Free | Slot::Expected { .. } => Parked::default(),
            Slot::Busy(_) => panic!("{ONE_AT_A_TIME}"),
        }
    }

    /// What a token names, unless the slot has moved on.
    pub(crate) fn lookup(&mut self, id: ConnectionId) -> Option<&mut Slot<S>> {
        // RFC 7609 2 #3: carry many connections per link
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

    /// Takes the relay out of the slot with this number.
    pub(crate) fn remove(&mut self, number: u16) -> Option<Box<Relay<S>>> {
        let slot = &mut self.slots[usize::from(number)];
        match std::mem::replace(slot, Slot::Free) {
            Slot::Busy(relay) => {
                self.busy -= 1;
                self.busy_bits[usize::from(number / 64)] &= !(1 << (number % 64));
                Some(relay)
            }
            other @ (Slot::Free | Slot::Expected { .. }) => {
                *slot = other;
                None
            }
        }
    }

    /// Every slot with a relay in it.
    pub(crate) fn slots(&self) -> impl Iterator<Item = u16> {
        self.slots_from(0)
    }

    /// The same, from this slot on.
    pub(crate) fn slots_from(&self, first: u16) -> impl Iterator<Item = u16> {
        let words = (first / 64..).zip(self.busy_bits.iter().skip(usize::from(first / 64)));
        words.flat_map(move |(index, word)| {
            let before = if index == first / 64 { first % 64 } else { 0 };
            let left = Some(word & (u64::MAX << before)).filter(|word| *word != 0);
            let without_lowest = |word: &u64| Some(word & (word - 1)).filter(|word| *word != 0);
            let lowest = |word: u64| u16::try_from(word.trailing_zeros()).expect("at most 63");
            std::iter::successors(left, without_lowest).map(move |word| index * 64 + lowest(word))
        })
    }
}

/// Why a slot that a connection comes to has no other connection.
const ONE_AT_A_TIME: &str =
    "the control thread gives a slot again once it was told that it is free";

#[cfg(test)]
mod tests {
    use smcr_proto::wire::cdc::Cdc;

    use super::*;
    use crate::relay::Far;
    use crate::relay::pace::Pace;
    use crate::relay::tcp::Tcp;

    fn relay(id: ConnectionId) -> Box<Relay<()>> {
        let far = Far::Tcp(Tcp::new((), Vec::new(), Vec::new(), false));
        Box::new(Relay::new(id, (), far, Pace::new(None)))
    }

    /// A message that comes late must not be taken for one of the next connection in the slot.
    // RFC 7609 1.2 #1: alert token names one connection
    // RFC 7609 4.7.1 #3: find connection by alert token
    #[test]
    fn only_the_present_user_of_a_slot_is_found() {
        let mut connections = Connections::new();
        let [first, second] = [1, 2].map(|generation| ConnectionId { slot: 5, generation });
        assert!(connections.lookup(first).is_none());
        connections.insert(relay(first));
        assert!(connections.relay(first).is_some() && connections.relay(second).is_none());
        assert!(connections.remove(5).is_some_and(|relay| relay.id == first));
        connections.expect(second);
        assert!(connections.lookup(first).is_none() && connections.lookup(second).is_some());
        assert!(connections.relay(second).is_none() && connections.remove(5).is_none());
        assert!(connections.lookup(ConnectionId { slot: u16::MAX, generation: 1 }).is_none());
    }

    /// What came before the rendezvous had ended belongs to the connection that was expected; a
    /// failed rendezvous frees the slot, and nobody else's.
    // RFC 7609 3.5.2.4 #5: keep data that precedes Confirm
    #[test]
    fn an_expected_connection_gets_what_was_kept_for_it() {
        let mut connections = Connections::new();
        let [first, second] = [1, 2].map(|generation| ConnectionId { slot: 5, generation });
        let message = Cdc { sequence: 9, ..Cdc::default() };
        connections.expect(first).push(message.into());
        connections.forget(second);
        assert_eq!(connections.expect(first).first(), Some(&message));
        assert_eq!(connections.insert(relay(first)).first(), Some(&message));
        assert_eq!((connections.busy(), connections.slots().collect()), (1, vec![5]));
        connections.forget(first);
        assert_eq!(connections.busy(), 1);
        connections.remove(5);
        connections.expect(second);
        connections.forget(second);
        assert!(connections.lookup(second).is_none());
        assert_eq!(connections.insert(relay(first)).first(), None);
    }

    /// The sweep goes over all connections, in parts.
    #[test]
    fn busy_slots_are_found_in_order_from_each_slot_on() {
        let mut connections = Connections::new();
        let last = u16::try_from(CONNECTIONS_MAX - 1).unwrap();
        let busy = [0, 5, 63, 64, 127, 128, 4000, last];
        let name = |slot| ConnectionId { slot, generation: 1 };
        for slot in [9, 65].into_iter().chain(busy) {
            connections.insert(relay(name(slot)));
        }
        connections.expect(name(70));
        assert!(connections.remove(9).is_some() && connections.remove(65).is_some());
        assert!(connections.remove(9).is_none() && connections.remove(70).is_none());
        for first in busy.into_iter().flat_map(|slot| [slot.saturating_sub(1), slot, slot + 1]) {
            let expected: Vec<_> = busy.into_iter().filter(|slot| *slot >= first).collect();
            assert_eq!(connections.slots_from(first).collect::<Vec<_>>(), expected, "{first}");
        }
    }

    /// A gateway panicked where a rendezvous failed and a neighbour brought the next connection of
    /// the slot before the poller had heard of the failure.
    #[test]
    fn a_connection_that_does_not_come_makes_room_for_the_next() {
        let mut connections = Connections::new();
        let [first, second] = [1, 2].map(|generation| ConnectionId { slot: 5, generation });
        connections.expect(first).push(Cdc::default().into());
        assert_eq!(connections.expect(second).first(), None);
        connections.expect(first).push(Cdc::default().into());
        assert_eq!(connections.insert(relay(second)).first(), None);
        connections.forget(first);
        assert!(connections.relay(second).is_some());
    }

    #[test]
    #[should_panic(expected = "gives a slot again")]
    fn a_slot_that_is_given_twice_is_our_bug() {
        let mut connections = Connections::new();
        let id = ConnectionId { slot: 5, generation: 1 };
        connections.insert(relay(id));
        connections.insert(relay(id));
    }
}
