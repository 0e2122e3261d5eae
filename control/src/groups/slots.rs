//! Which connection gets which slot: one table for all pollers, so that a connection keeps its slot
//! and its alert token when it moves from one poller to another.

use std::collections::VecDeque;
use std::fmt;

use smcr_engine::ConnectionId;
use smcr_engine::limits::CONNECTIONS_MAX;

/// The slots of this process, and how each was last called.
pub struct Slots {
    /// Oldest first, so that a slot comes back as late as possible.
    free: VecDeque<ConnectionId>,
    /// Where generations come from.
    entropy: Box<dyn FnMut() -> u32 + Send>,
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slots").field("free", &self.free.len()).finish_non_exhaustive()
    }
}

impl Slots {
    /// All of them, unused. `entropy` must not be predictable: who knows one token of ours must
    /// not know the next.
    pub fn new(entropy: Box<dyn FnMut() -> u32 + Send>) -> Self {
        let slot = |slot| u16::try_from(slot).expect("CONNECTIONS_MAX fits");
        let free =
            (0..CONNECTIONS_MAX).map(|index| ConnectionId { slot: slot(index), generation: 0 });
        Self { free: free.collect(), entropy }
    }

    /// A slot for a new connection, under a name that it did not have last.
    pub fn take(&mut self) -> Option<ConnectionId> {
        let last = self.free.pop_front()?;
        let [high, low, ..] = (self.entropy)().to_ne_bytes();
        let mut generation = u16::from_ne_bytes([high, low]);
        // Zero is left out, so that no token is zero.
        while generation == 0 || generation == last.generation {
            generation = generation.wrapping_add(1);
        }
        Some(ConnectionId { generation, ..last })
    }

    /// The connection in this slot is over.
    ///
    /// # Panics
    ///
    /// If more come back than were taken.
    pub fn free(&mut self, connection: ConnectionId) {
        self.free.push_back(connection);
        assert!(self.free.len() <= CONNECTIONS_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A late message of a connection that is over must not reach the next one.
    #[test]
    fn a_token_is_never_used_twice_in_a_row_and_never_zero() {
        for stuck in [0, 1, 5, u32::MAX] {
            let mut slots = Slots::new(Box::new(move || stuck));
            let first = slots.take().unwrap();
            assert_ne!(first.generation, 0);
            slots.free(first);
            for _ in 1..CONNECTIONS_MAX {
                let other = slots.take().unwrap();
                assert_ne!(other.slot, first.slot);
            }
            let again = slots.take().unwrap();
            assert_eq!(again.slot, first.slot);
            assert!(again.generation != 0 && again.generation != first.generation);
            assert!(slots.take().is_none());
        }
    }

    /// A peer learns the tokens of its own connections. It must not learn those of others by that.
    #[test]
    fn tokens_follow_what_cannot_be_predicted() {
        let mut drawn = [0xdead_1234_u32, 0xbeef_5678].into_iter();
        let mut slots = Slots::new(Box::new(move || drawn.next().unwrap()));
        let generations = [(); 2].map(|()| slots.take().unwrap().generation);
        let [first, second] = [0xdead_1234_u32, 0xbeef_5678].map(|drawn| {
            let [high, low, ..] = drawn.to_ne_bytes();
            u16::from_ne_bytes([high, low])
        });
        assert_eq!(generations, [first, second]);
    }
}
