//! Which poller has which connection, for whoever is told of one.

use crate::limits::CONNECTIONS_MAX;
use crate::names::{ConnectionId, GroupId};
use crate::sync::{AtomicU64, Ordering};

/// Which connection has which slot, its link group, and which poller has it. So every poller can
/// tell who may speak of a connection, and whom to pass it on to.
///
/// The control thread writes an entry when it has said `Command::Expect`; a poller, when it has
/// obeyed `Command::Relay` or handed a connection to a neighbour.
#[derive(Debug)]
pub struct Owners(Box<[AtomicU64]>);

/// What is known of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The index of the poller.
    pub poller: u8,
    /// Which use of the slot this is about.
    pub generation: u16,
    /// Its link group; none for a connection that is not SMC-R.
    pub group: Option<GroupId>,
}

impl Owner {
    fn pack(self) -> u64 {
        let group = self.group.map_or(0, |group| group.0);
        u64::from(group) << 32 | u64::from(self.generation) << 8 | u64::from(self.poller)
    }

    /// Whether this is about `id`, and not about another use of its slot, or none.
    pub fn is_of(self, id: ConnectionId) -> bool {
        self.generation == id.generation && id.generation != 0
    }

    fn unpack(packed: u64) -> Self {
        let [group, rest] = [packed >> 32, packed & 0xffff_ffff]
            .map(|half| u32::try_from(half).expect("half of a word"));
        Self {
            poller: u8::try_from(rest & 0xff).expect("eight bits"),
            generation: u16::try_from(rest >> 8 & 0xffff).expect("sixteen bits"),
            group: (group != 0).then_some(GroupId(group)),
        }
    }
}

impl Owners {
    /// Every slot belongs to the first poller, and to no connection.
    #[allow(clippy::new_without_default, reason = "a large allocation deserves a call")]
    pub fn new() -> Self {
        Self(std::iter::repeat_with(AtomicU64::default).take(CONNECTIONS_MAX).collect())
    }

    /// Says which poller has this connection. Call it when that poller can know the connection:
    /// what is sent to it from now on comes behind the command that brings it.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn set(&self, connection: ConnectionId, group: Option<GroupId>, poller: u8) {
        let owner = Owner { poller, generation: connection.generation, group };
        self.0[usize::from(connection.slot)].store(owner.pack(), Ordering::Release);
    }

    /// What is known of this slot; none if there is no such slot.
    pub fn of(&self, slot: u16) -> Option<Owner> {
        self.0.get(usize::from(slot)).map(|owner| Owner::unpack(owner.load(Ordering::Acquire)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One word says all, so that no poller ever sees half of a change.
    #[test]
    fn an_owner_fits_into_a_word() {
        for group in [None, Some(GroupId(1)), Some(GroupId(u32::MAX))] {
            let owner = Owner { poller: 255, generation: 0xfedc, group };
            assert_eq!(Owner::unpack(owner.pack()), owner);
        }
        let owners = Owners::new();
        let connection = ConnectionId { slot: 7, generation: 9 };
        owners.set(connection, Some(GroupId(3)), 1);
        let known = Owner { poller: 1, generation: 9, group: Some(GroupId(3)) };
        assert_eq!((owners.of(7), owners.of(u16::MAX)), (Some(known), None));
        assert!(
            known.is_of(connection) && !known.is_of(ConnectionId { generation: 8, ..connection })
        );
        let unused = owners.of(8).expect("there is such a slot");
        assert!(!unused.is_of(ConnectionId { slot: 8, generation: 0 }), "a guess names nobody");
    }
}
