//! The deadlines of all rendezvous.

use std::collections::{BTreeMap, BTreeSet};

use smcr_proto::Instant;

use crate::slab::Key;

/// One deadline for each rendezvous that waits for something.
#[derive(Debug, Default)]
pub(super) struct Deadlines {
    queue: BTreeSet<(Instant, Key)>,
    of: BTreeMap<Key, Instant>,
}

impl Deadlines {
    /// Sets the deadline of `key`; none if it waits for nothing.
    pub(super) fn set(&mut self, key: Key, at: Option<Instant>) {
        let before = match at {
            Some(at) => self.of.insert(key, at),
            None => self.of.remove(&key),
        };
        if before == at {
            return;
        }
        if let Some(before) = before {
            self.queue.remove(&(before, key));
        }
        if let Some(at) = at {
            self.queue.insert((at, key));
        }
    }

    /// The earliest deadline.
    pub(super) fn first(&self) -> Option<Instant> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// The rendezvous whose deadlines have passed, earliest first. A deadline stays until it is
    /// [`set`](Self::set) anew.
    pub(super) fn until(&self, now: Instant) -> Vec<Key> {
        self.queue.iter().take_while(|(at, _)| *at <= now).map(|(_, key)| *key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_one_time() {
        let key = |index| Key { index, generation: 0 };
        let mut deadlines = Deadlines::default();
        deadlines.set(key(1), Some(Instant(30)));
        deadlines.set(key(2), Some(Instant(20)));
        deadlines.set(key(1), Some(Instant(10)));
        assert_eq!(deadlines.until(Instant(20)), [key(1), key(2)]);
        deadlines.set(key(1), None);
        assert_eq!((deadlines.first(), deadlines.until(Instant(19))), (Some(Instant(20)), vec![]));
        deadlines.set(key(2), None);
        assert_eq!((deadlines.first(), deadlines.of.len()), (None, 0));
    }
}
