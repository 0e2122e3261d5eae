//! Trouble around any backend: completions held back and queue pairs broken, as a seed dictates.
//!
//! It stays within the contract of [`Fabric`], so whatever is built on a fabric must survive it. To
//! break a queue pair it takes in all that was acknowledged to the peer, perhaps loses the last of
//! it (promise 3), releases the inner queue pair, and answers for it from then on: what ended
//! before, `Broke`, then everything else flushed.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;

use smcr_proto::Instant;

use crate::dice::{Chance, Dice};
use crate::{Cause, Completion, Fabric, QpId, Status, Work};

/// How much trouble.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Odds {
    /// How likely a post breaks its queue pair.
    pub break_on_post: Chance,
    /// How likely a poll brings nothing new.
    pub hold_back_on_poll: Chance,
    /// How likely a queue pair that breaks takes along messages that came in and were not told.
    pub lose_on_break: Chance,
}

/// Wraps a fabric; the number of a queue pair is that of the inner one.
#[derive(Debug)]
pub struct FaultInjector<F> {
    inner: F,
    dice: Dice,
    odds: Odds,
    pairs: BTreeMap<QpId, Pair>,
    /// To be told, before anything that is still inside.
    news: VecDeque<Completion>,
    /// What came from inside, on its way through. Its capacity bounds what one poll takes.
    taken: Vec<Completion>,
}

/// A queue pair as the caller knows it.
#[derive(Debug)]
struct Pair {
    /// The room it had when it was new.
    depth: usize,
    /// Requests posted inside that have not ended yet.
    inside: usize,
    state: State,
}

#[derive(Debug)]
enum State {
    Working,
    /// Breaks at the next `transmit`.
    Doomed,
    /// Broken or released inside, by its own doing or the caller's. We pass on what it says.
    Gone,
    /// Broken by us, released inside.
    Broken {
        /// The caller knows.
        told: bool,
        /// What was posted since. It ends after all that is still inside.
        later: VecDeque<Completion>,
    },
}

impl<F: Fabric> FaultInjector<F> {
    /// Wraps `inner`, whose trouble follows from `seed` and `odds`.
    pub fn new(inner: F, seed: u64, odds: Odds) -> Self {
        Self {
            inner,
            dice: Dice::new(seed),
            odds,
            pairs: BTreeMap::new(),
            news: VecDeque::new(),
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
            State::Working => pair.state = State::Doomed,
            State::Doomed | State::Gone | State::Broken { .. } => {}
        }
    }

    /// The wrapped fabric.
    pub fn inner(&self) -> &F {
        &self.inner
    }

    fn pair(&self, qp: QpId) -> &Pair {
        self.pairs.get(&qp).expect("an adopted queue pair")
    }

    /// Takes what the inner fabric has to say, once.
    fn take(&mut self, now: Instant) {
        self.inner.poll(now, &mut self.taken);
        for completion in self.taken.drain(..) {
            route(&mut self.pairs, &mut self.news, completion);
        }
    }

    /// Breaks what is doomed. What a peer was told is done must have been received, so everything
    /// is taken in first; where that does not end, the queue pair lives on for now.
    fn carry_out(&mut self, now: Instant) {
        if !self.pairs.values().any(|pair| matches!(pair.state, State::Doomed)) {
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
        let Self { inner, pairs, news, dice, odds, .. } = self;
        for (qp, pair) in pairs {
            if matches!(pair.state, State::Doomed) {
                if dice.roll(odds.lose_on_break) {
                    lose_some(*qp, news, dice);
                }
                inner.release(now, *qp);
                pair.state = State::Broken { told: false, later: VecDeque::new() };
                pair.settle(*qp, news);
            }
        }
    }
}

impl Pair {
    /// Once nothing is left inside, `Broke` must have been told, and what was posted since ends.
    fn settle(&mut self, qp: QpId, news: &mut VecDeque<Completion>) {
        if let State::Broken { told, later } = &mut self.state
            && self.inside == 0
        {
            if !*told {
                *told = true;
                news.push_back(Completion::Broke { qp, cause: Cause::RetriesExceeded });
            }
            news.append(later);
        }
    }

    fn ended(&mut self, qp: QpId, status: Status, news: &mut VecDeque<Completion>) {
        assert!(self.inside > 0, "{qp:?} completed more than was posted");
        self.inside -= 1;
        if let State::Broken { told, .. } = &mut self.state
            && status == Status::Flushed
            && !*told
        {
            *told = true;
            news.push_back(Completion::Broke { qp, cause: Cause::RetriesExceeded });
        }
    }
}

/// Forgets some of the last messages that `qp` has received and not told.
fn lose_some(qp: QpId, news: &mut VecDeque<Completion>, dice: &mut Dice) {
    let is_message =
        |one: &Completion| matches!(one, Completion::Received { qp: of, .. } if *of == qp);
    let mut kept = dice.index(news.iter().filter(|one| is_message(one)).count() + 1);
    news.retain(|one| {
        let message = is_message(one);
        let lost = message && kept == 0;
        kept -= usize::from(message && !lost);
        !lost
    });
}

/// Passes a completion on, with what it brings about.
fn route(
    pairs: &mut BTreeMap<QpId, Pair>,
    news: &mut VecDeque<Completion>,
    completion: Completion,
) {
    let (Completion::Wrote { qp, .. }
    | Completion::Sent { qp, .. }
    | Completion::Received { qp, .. }
    | Completion::ReceivedLong { qp, .. }
    | Completion::Broke { qp, .. }) = completion;
    let pair = pairs.get_mut(&qp).expect("the inner fabric speaks of what it was given");
    match &completion {
        Completion::Wrote { status, .. } | Completion::Sent { status, .. } => {
            pair.ended(qp, *status, news);
        }
        Completion::Received { .. } | Completion::ReceivedLong { .. } => {}
        Completion::Broke { .. } => pair.state = State::Gone,
    }
    news.push_back(completion);
    pair.settle(qp, news);
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
            State::Working | State::Doomed | State::Gone => self.inner.room(qp),
            State::Broken { later, .. } => pair.depth - pair.inside - later.len(),
        }
    }

    fn post(&mut self, qp: QpId, work: &mut Vec<Work>) {
        assert!(work.len() <= self.room(qp), "{} requests for {qp:?}", work.len());
        if self.dice.roll(self.odds.break_on_post) {
            self.break_qp(qp);
        }
        let pair = self.pairs.get_mut(&qp).expect("an adopted queue pair");
        match &mut pair.state {
            State::Working | State::Doomed | State::Gone => {
                pair.inside += work.len();
                self.inner.post(qp, work);
            }
            State::Broken { later, .. } => {
                later.extend(work.drain(..).map(|work| flushed(qp, work)));
                pair.settle(qp, &mut self.news);
            }
        }
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>) {
        if !self.dice.roll(self.odds.hold_back_on_poll) {
            self.take(now);
        }
        let room = (out.capacity() - out.len()).min(self.news.len());
        out.extend(self.news.drain(..room));
    }

    fn transmit(&mut self, now: Instant) {
        self.carry_out(now);
        self.inner.transmit(now);
    }

    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        let inner = self.inner.prepare_sleep(now);
        if self.news.is_empty() { inner } else { Some(now) }
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.event_descriptor()
    }

    fn fail(&mut self, now: Instant, qp: QpId) {
        let pair = self.pairs.get_mut(&qp).expect("an adopted queue pair");
        match pair.state {
            State::Working | State::Doomed | State::Gone => {
                self.inner.fail(now, qp);
                pair.state = State::Gone;
            }
            State::Broken { .. } => {}
        }
    }

    fn release(&mut self, now: Instant, qp: QpId) {
        let pair = self.pairs.get_mut(&qp).expect("an adopted queue pair");
        match &mut pair.state {
            State::Working | State::Doomed | State::Gone => {
                self.inner.release(now, qp);
                pair.state = State::Gone;
            }
            // The caller no longer cares that it broke, only that everything comes home.
            State::Broken { told, .. } => *told = true,
        }
        self.news.retain(|news| match news {
            Completion::Received { qp: of, .. }
            | Completion::ReceivedLong { qp: of, .. }
            | Completion::Broke { qp: of, .. } => *of != qp,
            Completion::Wrote { .. } | Completion::Sent { .. } => true,
        });
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

/// Completions taken from inside in one poll.
const TAKEN_MAX: usize = 64;
/// Polls after which an inner fabric that always has more to say is left alone.
const POLLS_MAX: u32 = 10_000;

#[cfg(test)]
mod tests;
