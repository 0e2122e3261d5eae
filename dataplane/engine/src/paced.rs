//! Connections that have carried as much as they may, and wait until they may carry more.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use smcr_proto::Instant;

use crate::allowance::{Allowance, Way};
use crate::names::ConnectionId;

/// Those that wait, in the order of their turns.
///
/// Whoever waits for its own bucket has a time. Those that share a bucket wait in line: only the
/// first one has a time, and the next one follows when that has used what it wanted. So a crowd
/// that shares a bucket is not woken for what one of them will take.
///
/// Connections that end, or leave the poller, stay here until their turn, and are passed over.
#[derive(Debug, Default)]
pub(crate) struct Paced {
    alone: BinaryHeap<Reverse<(Instant, u16, u16, Way)>>,
    lines: Vec<Line>,
    /// The line that is looked at first.
    turn: usize,
}

/// Those that share a bucket.
#[derive(Debug)]
struct Line {
    allowance: Arc<Allowance>,
    way: Way,
    queue: VecDeque<ConnectionId>,
    /// When the first one may carry something, at the earliest.
    at: Instant,
}

impl Line {
    fn is_of(&self, allowance: &Arc<Allowance>, way: Way) -> bool {
        self.way == way && Arc::ptr_eq(&self.allowance, allowance)
    }
}

impl Paced {
    /// How many entries there are.
    pub(crate) fn len(&self) -> usize {
        self.alone.len() + self.lines.iter().map(|line| line.queue.len()).sum::<usize>()
    }

    /// When the next one has its turn, at the earliest.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let alone = self.alone.peek().map(|Reverse((at, ..))| *at);
        let lines = self.lines.iter().filter(|line| !line.queue.is_empty());
        lines.map(|line| line.at).chain(alone).min()
    }

    /// Waits for a time.
    pub(crate) fn wait_until(&mut self, at: Instant, id: ConnectionId, way: Way) {
        self.alone.push(Reverse((at, id.slot, id.generation, way)));
    }

    /// Whether somebody waits for this bucket.
    pub(crate) fn has_line(&self, allowance: &Arc<Allowance>, way: Way) -> bool {
        self.lines.iter().any(|line| line.is_of(allowance, way) && !line.queue.is_empty())
    }

    /// Waits for a bucket that others may wait for, too; not before `at`.
    pub(crate) fn join_line(
        &mut self,
        at: Instant,
        id: ConnectionId,
        way: Way,
        allowance: &Arc<Allowance>,
    ) {
        let own = self.lines.iter().position(|line| line.is_of(allowance, way));
        let index = own.unwrap_or_else(|| self.open_line(allowance, way));
        let line = &mut self.lines[index];
        if line.queue.is_empty() {
            line.at = at;
        }
        line.queue.push_back(id);
    }

    /// A line for a bucket: one whose bucket nobody waits for any more keeps its memory.
    fn open_line(&mut self, allowance: &Arc<Allowance>, way: Way) -> usize {
        let allowance = Arc::clone(allowance);
        let free = self.lines.iter().position(|line| line.queue.is_empty());
        match free {
            Some(index) => {
                let line = &mut self.lines[index];
                (line.allowance, line.way) = (allowance, way);
                index
            }
            None => {
                self.lines.push(Line { allowance, way, queue: VecDeque::new(), at: Instant(0) });
                self.lines.len() - 1
            }
        }
    }

    /// The next one whose turn it is.
    pub(crate) fn next(&mut self, now: Instant) -> Option<(ConnectionId, Way)> {
        if let Some(Reverse((at, slot, generation, way))) = self.alone.peek().copied()
            && at <= now
        {
            self.alone.pop();
            return Some((ConnectionId { slot, generation }, way));
        }
        for _ in 0..self.lines.len() {
            self.turn = (self.turn + 1) % self.lines.len();
            let line = &mut self.lines[self.turn];
            if line.queue.is_empty() || line.at > now {
                continue;
            }
            match line.allowance.grant(now, line.way) {
                Ok(_) => return line.queue.pop_front().map(|id| (id, line.way)),
                Err(at) => line.at = at,
            }
        }
        None
    }

    /// Keeps only those that still wait.
    pub(crate) fn retain(&mut self, mut waits: impl FnMut(ConnectionId, Way) -> bool) {
        self.alone.retain(|Reverse((_, slot, generation, way))| {
            waits(ConnectionId { slot: *slot, generation: *generation }, *way)
        });
        for line in &mut self.lines {
            line.queue.retain(|id| waits(*id, line.way));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(slot: u16) -> ConnectionId {
        ConnectionId { slot, generation: 1 }
    }

    fn at(micros: u64) -> Instant {
        Instant(micros * 1_000)
    }

    #[test]
    fn who_waits_alone_has_its_turn_at_its_time() {
        let mut paced = Paced::default();
        assert_eq!((paced.next_deadline(), paced.next(at(9))), (None, None));
        paced.wait_until(at(7), id(1), Way::In);
        paced.wait_until(at(5), id(2), Way::Out);
        assert_eq!((paced.next_deadline(), paced.next(at(4))), (Some(at(5)), None));
        assert_eq!(paced.next(at(9)), Some((id(2), Way::Out)));
        assert_eq!(paced.next(at(9)), Some((id(1), Way::In)));
        assert_eq!((paced.next(at(9)), paced.len()), (None, 0));
    }

    /// Of those that share a bucket, one has its turn, and the next one when there is more.
    #[test]
    fn who_shares_a_bucket_waits_in_line() {
        let allowance = Arc::new(Allowance::default());
        allowance.set(1_000_000, 0);
        let other = Arc::new(Allowance::default());
        let mut paced = Paced::default();
        let now = at(100_000);
        allowance.charge(now, Way::In, 60_000);
        let later = allowance.grant(now, Way::In).unwrap_err();
        for slot in 1..=3 {
            paced.join_line(later, id(slot), Way::In, &allowance);
        }
        assert!(paced.has_line(&allowance, Way::In));
        assert!(!paced.has_line(&allowance, Way::Out) && !paced.has_line(&other, Way::In));
        assert_eq!((paced.next(now), paced.next_deadline()), (None, Some(later)));
        for slot in 1..=3 {
            let now = paced.next_deadline().unwrap();
            assert_eq!(paced.next(now), Some((id(slot), Way::In)));
            allowance.charge(now, Way::In, 4_000);
            assert_eq!(paced.next(now), None, "the first one has taken all");
        }
        // The line serves another bucket now.
        paced.join_line(later, id(9), Way::Out, &other);
        assert_eq!((paced.lines.len(), paced.next(later)), (1, Some((id(9), Way::Out))));
    }

    #[test]
    fn lines_have_their_turn_one_after_the_other() {
        let all = [(), (), ()].map(|()| Arc::new(Allowance::default()));
        let mut paced = Paced::default();
        for slot in 0..6 {
            paced.join_line(at(1), id(slot), Way::Out, &all[usize::from(slot) % 3]);
        }
        let order: Vec<u16> =
            std::iter::from_fn(|| paced.next(at(1))).map(|it| it.0.slot).collect();
        assert_eq!(order, [1, 2, 0, 4, 5, 3]);
        for slot in 0..6 {
            paced.join_line(at(1), id(slot), Way::Out, &all[0]);
            paced.wait_until(at(1), id(slot), Way::In);
        }
        paced.retain(|id, way| id.slot == 2 && way == Way::Out);
        assert_eq!((paced.len(), paced.next(at(1))), (1, Some((id(2), Way::Out))));
    }
}
