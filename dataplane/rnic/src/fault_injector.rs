//! Wraps any backend and injects faults: it delays completions and breaks queue pairs, as a seed
//! dictates.
//!
//! It stays within the contract of [`Fabric`], so all code that uses a fabric must survive it. To
//! break a queue pair it receives everything that was acknowledged to the peer, perhaps drops the
//! last messages of it (promise 3), and releases the inner queue pair. From then on it reports the
//! completions itself: those that ended before, then `Broke`, then all others as flushed.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;

use smcr_memory::Rmbe;
use smcr_proto::Instant;

use crate::dice::{Chance, Dice};
use crate::{Completion, Fabric, QpError, QpId, Signs, Status, Work};

/// How likely each fault is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Odds {
    /// How likely a post breaks its queue pair.
    pub break_on_post: Chance,
    /// How likely a poll takes no completions from the inner fabric.
    pub hold_back_on_poll: Chance,
    /// How likely a queue pair that breaks loses messages that arrived but were not reported yet.
    pub lose_on_break: Chance,
}

/// Wraps a fabric. Queue pairs keep the ids that the inner fabric gave them.
#[derive(Debug)]
pub struct FaultInjector<F> {
    inner: F,
    dice: Dice,
    odds: Odds,
    pairs: BTreeMap<QpId, Pair>,
    /// Completions to report, before any that the inner fabric still holds.
    pending: VecDeque<Completion>,
    /// Buffer for one poll of the inner fabric. Its capacity bounds what that poll takes.
    taken: Vec<Completion>,
}

/// A queue pair as the caller sees it.
#[derive(Debug)]
struct Pair {
    /// The depth of its send queue.
    depth: usize,
    /// Work requests that the inner fabric has not completed yet.
    inside: usize,
    state: State,
}

#[derive(Debug)]
enum State {
    Working,
    /// We break it at the next `transmit`.
    BreakPending,
    /// The inner queue pair broke by itself, or the caller failed or released it. We pass its
    /// completions on.
    Gone,
    /// We broke it and released the inner queue pair.
    Broken {
        /// We have reported `Broke`.
        reported: bool,
        /// Flushed completions of work requests posted since. They follow those that the inner
        /// fabric still holds.
        later: VecDeque<Completion>,
    },
}

impl<F: Fabric> FaultInjector<F> {
    /// Wraps `inner`. `seed` and `odds` determine the faults.
    pub fn new(inner: F, seed: u64, odds: Odds) -> Self {
        Self {
            inner,
            dice: Dice::new(seed),
            odds,
            pairs: BTreeMap::new(),
            pending: VecDeque::new(),
            taken: Vec::with_capacity(TAKEN_MAX),
        }
    }

    /// Breaks a queue pair at the next `transmit`. Does nothing to one that is broken.
    ///
    /// # Panics
    ///
    /// If `qp` is not adopted.
    pub fn break_qp(&mut self, qp: QpId) {
        let pair = self.pairs.get_mut(&qp).expect("an adopted queue pair");
        match pair.state {
            State::Working => pair.state = State::BreakPending,
            State::BreakPending | State::Gone | State::Broken { .. } => {}
        }
    }

    /// The wrapped fabric.
    pub fn inner(&self) -> &F {
        &self.inner
    }

    fn pair(&self, qp: QpId) -> &Pair {
        self.pairs.get(&qp).expect("an adopted queue pair")
    }

    /// Polls the inner fabric once.
    fn take(&mut self, now: Instant) {
        self.inner.poll(now, &mut self.taken);
        for completion in self.taken.drain(..) {
            route(&mut self.pairs, &mut self.pending, completion);
        }
    }

    /// Breaks the queue pairs whose break is pending. Messages that were acknowledged to the peer
    /// must have been received, so it first polls until the inner fabric has nothing left. If that
    /// takes too many polls, the break waits for the next turn.
    fn break_pending(&mut self, now: Instant) {
        if !self.pairs.values().any(|pair| matches!(pair.state, State::BreakPending)) {
            return;
        }
        let mut polls = 0;
        while self.inner.prepare_sleep(now).is_some_and(|at| at <= now) {
            if polls == POLLS_MAX {
                return;
            }
            polls += 1;
            self.take(now);
        }
        let Self { inner, pairs, pending, dice, odds, .. } = self;
        for (qp, pair) in pairs {
            if matches!(pair.state, State::BreakPending) {
                if dice.roll(odds.lose_on_break) {
                    lose_some(*qp, pending, dice);
                }
                inner.release(now, *qp);
                pair.state = State::Broken { reported: false, later: VecDeque::new() };
                pair.settle(*qp, pending);
            }
        }
    }
}

impl Pair {
    /// Once the inner fabric holds nothing more, reports `Broke` if that was not done before, and
    /// then the work requests posted since as flushed.
    fn settle(&mut self, qp: QpId, pending: &mut VecDeque<Completion>) {
        if let State::Broken { reported, later } = &mut self.state
            && self.inside == 0
        {
            if !*reported {
                *reported = true;
                pending.push_back(Completion::Broke { qp, cause: QpError::RetriesExceeded });
            }
            pending.append(later);
        }
    }

    fn completed(&mut self, qp: QpId, status: Status, pending: &mut VecDeque<Completion>) {
        assert!(self.inside > 0, "{qp:?} completed more than was posted");
        self.inside -= 1;
        if let State::Broken { reported, .. } = &mut self.state
            && status == Status::Flushed
            && !*reported
        {
            *reported = true;
            pending.push_back(Completion::Broke { qp, cause: QpError::RetriesExceeded });
        }
    }
}

/// Drops some of the last messages that `qp` received and that were not reported yet.
fn lose_some(qp: QpId, pending: &mut VecDeque<Completion>, dice: &mut Dice) {
    let is_message =
        |one: &Completion| matches!(one, Completion::Received { qp: of, .. } if *of == qp);
    let mut kept = dice.index(pending.iter().filter(|one| is_message(one)).count() + 1);
    pending.retain(|one| {
        let message = is_message(one);
        let lost = message && kept == 0;
        kept -= usize::from(message && !lost);
        !lost
    });
}

/// Passes a completion on, followed by those that it causes.
fn route(
    pairs: &mut BTreeMap<QpId, Pair>,
    pending: &mut VecDeque<Completion>,
    completion: Completion,
) {
    let (Completion::Wrote { qp, .. }
    | Completion::Sent { qp, .. }
    | Completion::Received { qp, .. }
    | Completion::ReceivedLong { qp, .. }
    | Completion::Broke { qp, .. }) = completion;
    let pair = pairs.get_mut(&qp).expect("the inner fabric completes only adopted queue pairs");
    match &completion {
        Completion::Wrote { status, .. } | Completion::Sent { status, .. } => {
            pair.completed(qp, *status, pending);
        }
        Completion::Received { .. } | Completion::ReceivedLong { .. } => {}
        Completion::Broke { .. } => pair.state = State::Gone,
    }
    pending.push_back(completion);
    pair.settle(qp, pending);
}

impl<F: Fabric> Fabric for FaultInjector<F> {
    type Qp = F::Qp;

    fn adopt(&mut self, now: Instant, qp: F::Qp) -> QpId {
        let qp = self.inner.adopt(now, qp);
        let pair = Pair { depth: self.inner.room(qp), inside: 0, state: State::Working };
        self.pairs.insert(qp, pair);
        qp
    }

    fn room(&self, qp: QpId) -> usize {
        let pair = self.pair(qp);
        match &pair.state {
            State::Working | State::BreakPending | State::Gone => self.inner.room(qp),
            State::Broken { later, .. } => pair.depth - pair.inside - later.len(),
        }
    }

    fn post(&mut self, qp: QpId, work: &mut Vec<Work>) {
        assert!(work.len() <= self.room(qp), "{} work requests for {qp:?}", work.len());
        if self.dice.roll(self.odds.break_on_post) {
            self.break_qp(qp);
        }
        let pair = self.pairs.get_mut(&qp).expect("an adopted queue pair");
        match &mut pair.state {
            State::Working | State::BreakPending | State::Gone => {
                pair.inside += work.len();
                self.inner.post(qp, work);
            }
            State::Broken { later, .. } => {
                later.extend(work.drain(..).map(|work| flushed(qp, work)));
                pair.settle(qp, &mut self.pending);
            }
        }
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>) {
        if !self.dice.roll(self.odds.hold_back_on_poll) {
            self.take(now);
        }
        let room = (out.capacity() - out.len()).min(self.pending.len());
        out.extend(self.pending.drain(..room));
    }

    fn has_completions(&self) -> bool {
        !self.pending.is_empty() || self.inner.has_completions()
    }

    fn note_signs(&mut self, signs: Signs) {
        self.inner.note_signs(signs);
    }

    fn transmit(&mut self, now: Instant) {
        self.break_pending(now);
        self.inner.transmit(now);
    }

    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        let inner = self.inner.prepare_sleep(now);
        if self.pending.is_empty() { inner } else { Some(now) }
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.event_descriptor()
    }

    fn fail(&mut self, now: Instant, qp: QpId) {
        let pair = self.pairs.get_mut(&qp).expect("an adopted queue pair");
        match pair.state {
            State::Working | State::BreakPending | State::Gone => {
                self.inner.fail(now, qp);
                pair.state = State::Gone;
            }
            State::Broken { .. } => {}
        }
    }

    fn release(&mut self, now: Instant, qp: QpId) {
        let pair = self.pairs.get_mut(&qp).expect("an adopted queue pair");
        match &mut pair.state {
            State::Working | State::BreakPending | State::Gone => {
                self.inner.release(now, qp);
                pair.state = State::Gone;
            }
            // `Broke` need not be reported after a release; only the completions are.
            State::Broken { reported, .. } => *reported = true,
        }
        self.pending.retain(|completion| match completion {
            Completion::Received { qp: of, .. }
            | Completion::ReceivedLong { qp: of, .. }
            | Completion::Broke { qp: of, .. } => *of != qp,
            Completion::Wrote { .. } | Completion::Sent { .. } => true,
        });
    }

    fn relinquish(&mut self, element: &mut Rmbe, announced: u32) -> usize {
        self.inner.relinquish(element, announced)
    }
}

fn flushed(qp: QpId, work: Work) -> Completion {
    match work {
        Work::Write { lease, tag, .. } => {
            Completion::Wrote { qp, lease, tag, status: Status::Flushed }
        }
        Work::Send { tag, .. } | Work::SendLong { tag, .. } => {
            Completion::Sent { qp, tag, status: Status::Flushed }
        }
    }
}

/// Completions taken from the inner fabric in one poll.
const TAKEN_MAX: usize = 64;
/// Polls after which a break waits for the next turn, if the inner fabric always has more.
const POLLS_MAX: u32 = 10_000;

#[cfg(test)]
mod tests;
