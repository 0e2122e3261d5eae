//! Connections that have carried as much as they may, and wait until they may carry more.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use smcr_proto::Instant;

use crate::allowance::{Allowance, Share, Way};
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
    alone: BinaryHeap<Reverse<(Instant, Waiter)>>,
    lines: Vec<Line>,
    /// The line that is looked at first.
    turn: usize,
    /// The last one that had its turn has waited alone.
    was_alone: bool,
}

/// One that waits, in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Waiter {
    pub(crate) id: ConnectionId,
    pub(crate) way: Way,
    /// How often it has left before: when it has left once more, it does not wait here any more,
    /// even if it has come back.
    pub(crate) stay: u16,
}

/// For what somebody has waited whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// For its own bucket.
    Alone,
    /// For one that it shares.
    InLine,
}

/// Those that share a bucket.
#[derive(Debug)]
struct Line {
    allowance: Arc<Allowance>,
    way: Way,
    queue: VecDeque<Waiter>,
    /// When the first one may carry something, at the earliest.
    at: Instant,
    /// What was carried here, where others wait at other pollers.
    share: Share,
}

impl Line {
    fn is_of(&self, allowance: &Arc<Allowance>, way: Way) -> bool {
        self.way == way && Arc::ptr_eq(&self.allowance, allowance)
    }

    /// How many wait here, and at all pollers.
    fn counts(&self) -> (u32, u32) {
        (length(&self.queue), self.allowance.waiting(self.way))
    }

    /// What may be carried now, if this line has so many of all that want to.
    fn grant(&self, now: Instant, (own, all): (u32, u32)) -> Result<u32, Instant> {
        let shared = self.allowance.grant(now, self.way);
        let Some(rate) = self.allowance.together() else { return shared };
        if own >= all {
            // Nobody waits elsewhere.
            return shared;
        }
        match (shared, self.share.grant(now, rate.part(own, all))) {
            (Ok(shared), Ok(part)) => Ok(shared.min(part)),
            (Err(first), Err(second)) => Err(first.max(second)),
            (Err(at), Ok(_)) | (Ok(_), Err(at)) => Err(at),
        }
    }

    /// Nobody can carry anything before `at`, unless others leave, or the limit changes.
    fn wait_until(&mut self, now: Instant, at: Instant) {
        self.at = at.min(now + LOOK_AGAIN);
    }

    fn pop(&mut self) -> Option<Waiter> {
        let first = self.queue.pop_front();
        self.allowance.wait_no_more(self.way, first.is_some().into());
        first
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.allowance.wait_no_more(self.way, length(&self.queue));
    }
}

impl Paced {
    /// How many entries there are.
    pub(crate) fn len(&self) -> usize {
        self.alone.len() + self.lines.iter().map(|line| line.queue.len()).sum::<usize>()
    }

    /// When the next one has its turn, at the earliest.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let alone = self.alone.peek().map(|Reverse((at, _))| *at);
        let lines = self.lines.iter().filter(|line| !line.queue.is_empty());
        lines.map(|line| line.at).chain(alone).min()
    }

    /// Waits for a time.
    pub(crate) fn wait_until(&mut self, at: Instant, one: Waiter) {
        self.alone.push(Reverse((at, one)));
    }

    /// What somebody may carry now of a bucket that it shares. Where others wait here, it must have
    /// waited as well, and this must be its turn. Where others wait elsewhere, it gets no more than
    /// the share of this poller, of which a line keeps account.
    ///
    /// # Errors
    ///
    /// When it may carry more, if that is nothing.
    pub(crate) fn grant(
        &self,
        now: Instant,
        (allowance, way): (&Arc<Allowance>, Way),
        is_called: bool,
    ) -> Result<u32, Instant> {
        match self.lines.iter().find(|line| line.is_of(allowance, way)) {
            Some(line) if !is_called && !line.queue.is_empty() => Err(now),
            Some(line) => {
                let (own, all) = line.counts();
                line.grant(now, (own + 1, all + 1))
            }
            None if !is_called && allowance.waiting(way) > 0 => Err(now),
            None => allowance.grant(now, way),
        }
    }

    /// Somebody has carried so many bytes of a bucket that it shares.
    pub(crate) fn charge(
        &mut self,
        now: Instant,
        (allowance, way): (&Arc<Allowance>, Way),
        bytes: u64,
    ) {
        allowance.charge(now, way, bytes);
        let Some(rate) = allowance.together() else { return };
        // Without a line nobody has waited.
        if let Some(line) = self.lines.iter_mut().find(|line| line.is_of(allowance, way)) {
            let (own, all) = line.counts();
            line.share.charge(now, rate.part(own + 1, all + 1), bytes);
        }
    }

    /// Waits for a bucket that others may wait for, too; not before `at`. Whoever has waited
    /// already, and has found nothing, is the `first`.
    pub(crate) fn join_line(
        &mut self,
        (now, at): (Instant, Instant),
        one: Waiter,
        allowance: &Arc<Allowance>,
        first: bool,
    ) {
        let own = self.lines.iter().position(|line| line.is_of(allowance, one.way));
        let index = own.unwrap_or_else(|| self.open_line(now, allowance, one.way));
        let line = &mut self.lines[index];
        if line.queue.is_empty() {
            line.wait_until(now, at);
        }
        match first {
            true => line.queue.push_front(one),
            false => line.queue.push_back(one),
        }
        allowance.wait(one.way, 1);
    }

    /// A line for a bucket: one whose bucket nobody waits for any more keeps its memory.
    fn open_line(&mut self, now: Instant, allowance: &Arc<Allowance>, way: Way) -> usize {
        let is_free = |line: &Line| line.queue.is_empty() && line.share.is_old(now);
        let (allowance, share) = (Arc::clone(allowance), Share::default());
        match self.lines.iter().position(is_free) {
            Some(index) => {
                let line = &mut self.lines[index];
                (line.allowance, line.way, line.share) = (allowance, way, share);
                index
            }
            None => {
                let (queue, at) = (VecDeque::new(), Instant(0));
                self.lines.push(Line { allowance, way, queue, at, share });
                self.lines.len() - 1
            }
        }
    }

    /// The next one whose turn it is. Neither those that wait alone nor those in line can keep the
    /// others from theirs.
    pub(crate) fn next(&mut self, now: Instant) -> Option<(Waiter, Waited)> {
        let alone = |it: &mut Self| it.next_alone(now).map(|one| (one, Waited::Alone));
        let in_line = |it: &mut Self| it.next_in_line(now).map(|one| (one, Waited::InLine));
        let next = match self.was_alone {
            true => in_line(self).or_else(|| alone(self)),
            false => alone(self).or_else(|| in_line(self)),
        };
        self.was_alone = matches!(next, Some((_, Waited::Alone)));
        next
    }

    fn next_alone(&mut self, now: Instant) -> Option<Waiter> {
        let Reverse((at, one)) = *self.alone.peek()?;
        if at > now {
            return None;
        }
        self.alone.pop();
        Some(one)
    }

    fn next_in_line(&mut self, now: Instant) -> Option<Waiter> {
        for _ in 0..self.lines.len() {
            self.turn = (self.turn + 1) % self.lines.len();
            let line = &mut self.lines[self.turn];
            if line.queue.is_empty() || line.at > now {
                continue;
            }
            match line.grant(now, line.counts()) {
                Ok(_) => return line.pop(),
                Err(at) => line.wait_until(now, at),
            }
        }
        None
    }

    /// Keeps only those that still wait.
    pub(crate) fn retain(&mut self, mut waits: impl FnMut(Waiter) -> bool) {
        self.alone.retain(|Reverse((_, one))| waits(*one));
        for line in &mut self.lines {
            let before = length(&line.queue);
            line.queue.retain(|one| waits(*one));
            line.allowance.wait_no_more(line.way, before - length(&line.queue));
        }
    }
}

fn length(queue: &VecDeque<Waiter>) -> u32 {
    u32::try_from(queue.len()).expect("a few for each connection, at most")
}

/// A line looks again after this time, at the latest: those at other pollers may have gone, and a
/// reload may have changed the limit.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    fn one(slot: u16, way: Way) -> Waiter {
        Waiter { id: ConnectionId { slot, generation: 1 }, way, stay: 0 }
    }

    fn at(micros: u64) -> Instant {
        Instant(micros * 1_000)
    }

    fn next(paced: &mut Paced, now: Instant) -> Option<Waiter> {
        paced.next(now).map(|(one, _)| one)
    }

    #[test]
    fn who_waits_alone_has_its_turn_at_its_time() {
        let mut paced = Paced::default();
        assert_eq!((paced.next_deadline(), paced.next(at(9))), (None, None));
        paced.wait_until(at(7), one(1, Way::In));
        paced.wait_until(at(5), one(2, Way::Out));
        assert_eq!((paced.next_deadline(), paced.next(at(4))), (Some(at(5)), None));
        assert_eq!(paced.next(at(9)), Some((one(2, Way::Out), Waited::Alone)));
        assert_eq!(paced.next(at(9)), Some((one(1, Way::In), Waited::Alone)));
        assert_eq!((paced.next(at(9)), paced.len()), (None, 0));
    }

    /// Of those that share a bucket, one has its turn, and the next one when there is more.
    #[test]
    fn who_shares_a_bucket_waits_in_line() {
        let [allowance, other] = [(); 2].map(|()| Arc::new(Allowance::default()));
        allowance.set(1_000_000, 0);
        let mut paced = Paced::default();
        let now = at(100_000);
        allowance.charge(now, Way::In, 60_000);
        let later = allowance.grant(now, Way::In).unwrap_err();
        for slot in 1..=3 {
            paced.join_line((now, later), one(slot, Way::In), &allowance, false);
        }
        let far = at(900_000);
        assert_eq!(paced.grant(far, (&allowance, Way::In), false), Err(far), "others wait");
        assert!(paced.grant(far, (&allowance, Way::In), true).is_ok());
        assert!(paced.grant(far, (&allowance, Way::Out), false).is_ok());
        assert!(paced.grant(far, (&other, Way::In), false).is_ok());
        assert_eq!((paced.next(now), paced.next_deadline()), (None, Some(later)));
        for slot in 1..=3 {
            let now = paced.next_deadline().unwrap();
            assert_eq!(paced.next(now), Some((one(slot, Way::In), Waited::InLine)));
            allowance.charge(now, Way::In, 4_000);
            assert_eq!(paced.next(now), None, "the first one has taken all");
        }
        // The line serves another bucket now.
        paced.join_line((later, later), one(9, Way::Out), &other, false);
        assert_eq!((paced.lines.len(), next(&mut paced, later)), (1, Some(one(9, Way::Out))));
    }

    #[test]
    fn lines_have_their_turn_one_after_the_other() {
        let all = [(), (), ()].map(|()| Arc::new(Allowance::default()));
        let (mut paced, now) = (Paced::default(), at(1));
        for slot in 0..6 {
            let bucket = &all[usize::from(slot) % 3];
            paced.join_line((now, now), one(slot, Way::Out), bucket, false);
        }
        let order: Vec<u16> =
            std::iter::from_fn(|| next(&mut paced, now)).map(|it| it.id.slot).collect();
        assert_eq!(order, [1, 2, 0, 4, 5, 3]);
        for slot in 0..6 {
            paced.join_line((now, now), one(slot, Way::Out), &all[0], false);
            paced.wait_until(now, one(slot, Way::In));
        }
        paced.join_line((now, now), one(6, Way::Out), &all[0], true);
        paced.retain(|it| it.way == Way::Out && [2, 6].contains(&it.id.slot));
        assert_eq!((paced.len(), all[0].waiting(Way::Out)), (2, 2));
        assert_eq!(next(&mut paced, now), Some(one(6, Way::Out)), "it goes on as the first");
        drop(paced);
        assert!(all.iter().all(|it| it.waiting(Way::Out) == 0), "who is gone does not wait");
    }

    /// Thousands of connections with a rate of their own are due in each turn: those of a listener
    /// with a limit for all had no turn any more.
    #[test]
    fn who_waits_alone_and_who_waits_in_line_alternate() {
        let (allowance, mut paced, now) = (Arc::default(), Paced::default(), at(1));
        for slot in 0..4 {
            paced.wait_until(now, one(slot, Way::In));
            paced.join_line((now, now), one(slot, Way::Out), &allowance, false);
        }
        let ways: Vec<Way> =
            std::iter::from_fn(|| next(&mut paced, now)).map(|it| it.way).collect();
        assert_eq!(ways, [Way::In, Way::Out].repeat(4));
    }
}
