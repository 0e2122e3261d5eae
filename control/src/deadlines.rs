//! Deadlines of many that wait, each for something of its own.

use std::collections::{BTreeMap, BTreeSet};

use smcr_proto::Instant;

/// At most one deadline for each key.
#[derive(Debug)]
pub(crate) struct Deadlines<K> {
    queue: BTreeSet<(Instant, K)>,
    of: BTreeMap<K, Instant>,
}

impl<K: Copy + Ord> Deadlines<K> {
    /// Sets the deadline of `key`, in place of the one before; none if it waits for nothing.
    pub(crate) fn set(&mut self, key: K, at: Option<Instant>) {
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
    pub(crate) fn first(&self) -> Option<Instant> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// The keys whose deadlines have passed, earliest first. A deadline stays until it is
    /// [`set`](Self::set) anew.
    pub(crate) fn until(&self, now: Instant) -> Vec<K> {
        self.queue.iter().take_while(|(at, _)| *at <= now).map(|(_, key)| *key).collect()
    }
}

impl<K> Default for Deadlines<K> {
    fn default() -> Self {
        Self { queue: BTreeSet::new(), of: BTreeMap::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A time that was put off must not wake anybody, and one that was brought forward must.
    #[test]
    fn the_last_time_that_was_said_counts() {
        let mut deadlines = Deadlines::default();
        let until = |deadlines: &Deadlines<u32>, at| deadlines.until(Instant(at));
        deadlines.set(1, Some(Instant(30)));
        deadlines.set(2, Some(Instant(20)));
        deadlines.set(3, Some(Instant(20)));
        assert_eq!((deadlines.first(), until(&deadlines, 19)), (Some(Instant(20)), vec![]));
        assert_eq!(until(&deadlines, 30), [2, 3, 1]);
        deadlines.set(1, Some(Instant(10)));
        deadlines.set(2, Some(Instant(40)));
        deadlines.set(3, None);
        assert_eq!((deadlines.first(), until(&deadlines, 39)), (Some(Instant(10)), vec![1]));
        deadlines.set(1, None);
        assert_eq!(until(&deadlines, 100), [2]);
        deadlines.set(2, None);
        assert_eq!((deadlines.first(), deadlines.of.len()), (None, 0));
    }
}
