//! Which connection gets which slot: one table for all pollers, so that a connection keeps its slot
//! and its alert token when it moves from one poller to another.

use std::collections::VecDeque;

use smcr_engine::ConnectionId;
use smcr_engine::limits::CONNECTIONS_MAX;

/// The slots of this process, and how often each was used.
#[derive(Debug)]
pub struct Slots {
    /// Oldest first, so that a token comes back as late as possible.
    free: VecDeque<ConnectionId>,
}

impl Slots {
    /// All of them, unused.
    pub fn new() -> Self {
        let slot = |slot| u16::try_from(slot).expect("CONNECTIONS_MAX fits");
        let free =
            (0..CONNECTIONS_MAX).map(|index| ConnectionId { slot: slot(index), generation: 1 });
        Self { free: free.collect() }
    }

    /// A slot for a new connection.
    pub fn take(&mut self) -> Option<ConnectionId> {
        self.free.pop_front()
    }

    /// The connection in this slot is over.
    ///
    /// # Panics
    ///
    /// If more come back than were taken.
    pub fn free(&mut self, connection: ConnectionId) {
        // Zero is left out, so that no token is zero.
        let generation = connection.generation.checked_add(1).unwrap_or(1);
        self.free.push_back(ConnectionId { generation, ..connection });
        assert!(self.free.len() <= CONNECTIONS_MAX);
    }
}

impl Default for Slots {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A late message of a connection that is over must not reach the next one.
    #[test]
    fn a_token_is_never_used_twice_in_a_row_and_never_zero() {
        let mut slots = Slots::new();
        let first = slots.take().unwrap();
        assert_ne!(first.token().0, 0);
        slots.free(first);
        for _ in 1..CONNECTIONS_MAX {
            let other = slots.take().unwrap();
            assert_ne!(other.slot, first.slot);
        }
        let again = slots.take().unwrap();
        assert_eq!((again.slot, again.generation), (first.slot, 2));
        assert!(slots.take().is_none());
        slots.free(ConnectionId { slot: 0, generation: u16::MAX });
        assert_eq!(slots.take().unwrap().generation, 1);
    }
}
