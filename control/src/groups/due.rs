//! When which link group must be looked at.

use std::collections::{BTreeMap, BTreeSet};

use smcr_engine::GroupId;
use smcr_proto::Instant;

/// One time for each group that waits for something.
#[derive(Debug, Default)]
pub(super) struct Due {
    queue: BTreeSet<(Instant, GroupId)>,
    times: BTreeMap<GroupId, Instant>,
}

impl Due {
    /// A group must be looked at then, and not at the time that was said before.
    pub(super) fn set(&mut self, id: GroupId, at: Option<Instant>) {
        let before = match at {
            Some(at) => self.times.insert(id, at),
            None => self.times.remove(&id),
        };
        if before == at {
            return;
        }
        if let Some(before) = before {
            self.queue.remove(&(before, id));
        }
        if let Some(at) = at {
            self.queue.insert((at, id));
        }
    }

    /// The earliest time of all.
    pub(super) fn first(&self) -> Option<Instant> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// Those whose time has come.
    pub(super) fn until(&self, now: Instant) -> impl Iterator<Item = GroupId> {
        self.queue.iter().take_while(move |(at, _)| *at <= now).map(|(_, id)| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A time that was put off must not wake anybody, and one that was brought forward must.
    #[test]
    fn the_last_time_that_was_said_counts() {
        let mut due = Due::default();
        let until = |due: &Due, at| due.until(Instant(at)).collect::<Vec<_>>();
        due.set(GroupId(1), Some(Instant(30)));
        due.set(GroupId(2), Some(Instant(20)));
        due.set(GroupId(3), Some(Instant(20)));
        assert_eq!((due.first(), until(&due, 19)), (Some(Instant(20)), vec![]));
        due.set(GroupId(1), Some(Instant(10)));
        due.set(GroupId(2), Some(Instant(40)));
        due.set(GroupId(3), None);
        assert_eq!((due.first(), until(&due, 39)), (Some(Instant(10)), vec![GroupId(1)]));
        due.set(GroupId(1), None);
        assert_eq!(until(&due, 100), [GroupId(2)]);
        due.set(GroupId(2), None);
        assert_eq!((due.first(), due.times.len()), (None, 0));
    }
}
