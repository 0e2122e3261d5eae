//! Which poller has which connection, for whoever receives a message about one.

use crate::limits::CONNECTIONS_MAX;
use crate::names::{ConnectionId, GroupId};
use crate::sync::{AtomicU64, Ordering};

/// Which connection uses which slot, its link group, and which poller has it. So every poller can
/// tell which peer may speak about a connection, and which neighbour gets the message.
///
/// Only the thread that has the connection writes its entry, and before it gives the connection
/// away:
///
/// - the control thread sets the entry before a peer can learn the token, and clears it when the
///   rendezvous fails;
/// - a poller sets the entry before it sends the connection to a neighbour, and clears it when the
///   connection ends.
///
/// So the writes of an entry happen one after the other, in the order in which the connection
/// changed hands. A poller that finds itself named, and does not have the connection, will get it.
#[derive(Debug)]
pub struct Owners(Box<[AtomicU64]>);

/// What is known of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The index of the poller that has the connection, or is the next to get it.
    pub poller: u8,
    /// Which use of the slot this is about.
    pub generation: u16,
    /// The link group of the connection.
    pub group: GroupId,
}

impl Owner {
    fn pack(self) -> u64 {
        u64::from(self.group.0) << 32 | u64::from(self.generation) << 8 | u64::from(self.poller)
    }

    /// `None` for an entry that was cleared, or never set: no connection has generation 0.
    fn unpack(packed: u64) -> Option<Self> {
        let [group, rest] = [packed >> 32, packed & 0xffff_ffff]
            .map(|half| u32::try_from(half).expect("half of a word"));
        let owner = Self {
            poller: u8::try_from(rest & 0xff).expect("eight bits"),
            generation: u16::try_from(rest >> 8 & 0xffff).expect("sixteen bits"),
            group: GroupId(group),
        };
        (owner.generation != 0).then_some(owner)
    }
}

impl Owners {
    /// No slot has a connection.
    #[allow(clippy::new_without_default, reason = "a large allocation deserves a call")]
    pub fn new() -> Self {
        Self(std::iter::repeat_with(AtomicU64::default).take(CONNECTIONS_MAX).collect())
    }

    /// Says which poller has this connection, or is the next to get it. Call it before that poller
    /// can get the connection: if the poller passes it on first, this write would overwrite the
    /// newer owner.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn set(&self, connection: ConnectionId, group: GroupId, poller: u8) {
        let owner = Owner { poller, generation: connection.generation, group };
        self.0[usize::from(connection.slot)].store(owner.pack(), Ordering::Release);
    }

    /// Says that this connection is over. Call it before the slot can serve another one.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn clear(&self, connection: ConnectionId) {
        self.0[usize::from(connection.slot)].store(0, Ordering::Release);
    }

    /// Who has this connection; `None` if nobody has: it is over, or never was.
    pub fn of(&self, connection: ConnectionId) -> Option<Owner> {
        let entry = self.0.get(usize::from(connection.slot))?;
        let owner = Owner::unpack(entry.load(Ordering::Acquire));
        owner.filter(|owner| owner.generation == connection.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One word says all, so that no poller ever sees half of a change.
    #[test]
    fn an_owner_fits_into_a_word() {
        for group in [GroupId(1), GroupId(u32::MAX)] {
            let owner = Owner { poller: 255, generation: 0xfedc, group };
            assert_eq!(Owner::unpack(owner.pack()), Some(owner));
        }
    }

    /// A peer may put any token in a message: also one of a connection that is over, or of none.
    // RFC 7609 4.7.1 #3: find connection by alert token
    #[test]
    fn only_the_present_connection_of_a_slot_has_an_owner() {
        let owners = Owners::new();
        let [none, first, second] =
            [0, 8, 9].map(|generation| ConnectionId { slot: 7, generation });
        assert_eq!([none, first].map(|id| owners.of(id)), [None, None]);
        owners.set(first, GroupId(3), 1);
        let known = Owner { poller: 1, generation: 8, group: GroupId(3) };
        assert_eq!([none, first, second].map(|id| owners.of(id)), [None, Some(known), None]);
        owners.clear(first);
        assert_eq!([none, first].map(|id| owners.of(id)), [None, None]);
        assert_eq!(owners.of(ConnectionId { slot: u16::MAX, generation: 8 }), None);
    }
}
