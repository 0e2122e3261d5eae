//! One end of a simulated queue pair: its send queue, its received messages and its completions.

use std::collections::VecDeque;

use smcr_proto::{Instant, Psn, Qpn};

use super::visibility::Hidden;
use crate::dice::Dice;
use crate::{
    Completion, Domain, LONG_MESSAGE_MAX, MESSAGE_LEN, Message, Messages, QpError, QpId, Status,
    Work,
};

/// The state of one end of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It has no peer yet.
    Opened,
    /// It can send, and receives once a fabric has adopted it.
    Connected { peer: Qpn },
    /// It sends and receives nothing any more, but its fabric has not released it.
    Broken,
    /// Its fabric released it. Only flushed completions remain to be reported.
    Released,
}

/// One end of a queue pair.
#[derive(Debug)]
pub(super) struct QueuePair {
    /// Index of its NIC in the network.
    pub(super) nic: usize,
    pub(super) domain: Domain,
    /// Which messages it accepts.
    messages: Messages,
    pub(super) psn: Psn,
    pub(super) stage: Stage,
    /// Its id at the fabric that adopted it.
    pub(super) id: Option<QpId>,
    /// Work requests that were posted but not transmitted yet.
    pub(super) posted: VecDeque<Work>,
    /// Work requests in flight, in the order in which they arrive.
    pub(super) in_flight: VecDeque<InFlight>,
    /// Work requests that the peer has executed, while the acknowledgement is in flight.
    pub(super) executed: VecDeque<Executed>,
    /// The peer does not answer, so the first request in flight does not arrive any more.
    pub(super) lost: bool,
    /// When the retries are exceeded, if the peer does not answer.
    pub(super) retries_end: Option<Instant>,
    /// When this end breaks, and why, if that is already certain.
    pub(super) breaks: Option<(Instant, QpError)>,
    /// Completions of the send queue that were not reported to the fabric yet, in order.
    pub(super) completions: VecDeque<Pending>,
    /// Messages that were received but not reported to the fabric yet.
    pub(super) inbox: VecDeque<Arrived>,
    pub(super) hidden: Hidden,
    /// How many requests were sent so far. This is also the number of the next one.
    pub(super) requests: u64,
}

/// A work request in flight.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) work: Work,
    pub(super) request: u64,
    pub(super) arrives: Instant,
}

/// A work request that the peer has executed.
#[derive(Debug)]
pub(super) struct Executed {
    pub(super) work: Work,
    pub(super) acknowledged: Instant,
}

/// A message that arrived.
#[derive(Debug)]
pub(super) struct Arrived {
    pub(super) message: Arrival,
    /// Its number among the requests of its sender. It announces all writes with lower numbers.
    pub(super) request: u64,
}

/// The bytes of a message that arrived.
#[derive(Debug)]
pub(super) enum Arrival {
    Short(Message),
    Long(Box<[u8]>),
}

/// A completion that was not reported to the fabric yet.
#[derive(Debug)]
pub(super) enum Pending {
    Ended { work: Work, status: Status },
    Broke(QpError),
}

/// An event of a queue pair. At the same instant, events happen in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    Breaks,
    RetriesEnd,
    RequestArrives,
    AcknowledgementArrives,
}

impl QueuePair {
    /// Depth of the send queue: work requests whose completions were not reported yet.
    pub(super) const DEPTH: usize = 384;
    /// Messages that may wait for the fabric. When there are more, the peer must retry later.
    pub(super) const INBOX_MAX: usize = 256;

    pub(super) fn new(nic: usize, domain: Domain, messages: Messages, psn: Psn) -> Self {
        Self {
            nic,
            domain,
            messages,
            psn,
            stage: Stage::Opened,
            id: None,
            posted: VecDeque::new(),
            in_flight: VecDeque::new(),
            executed: VecDeque::new(),
            lost: false,
            retries_end: None,
            breaks: None,
            completions: VecDeque::new(),
            inbox: VecDeque::new(),
            hidden: Hidden::default(),
            requests: 0,
        }
    }

    /// The peer, if this end is connected and not broken.
    pub(super) fn peer(&self) -> Option<Qpn> {
        match self.stage {
            Stage::Connected { peer } => Some(peer),
            Stage::Opened | Stage::Broken | Stage::Released => None,
        }
    }

    /// Whether it accepts a long message of `len` bytes.
    pub(super) fn takes_long(&self, len: usize) -> bool {
        match self.messages {
            Messages::Short => false,
            Messages::Long => (MESSAGE_LEN..=LONG_MESSAGE_MAX).contains(&len),
        }
    }

    /// How many more work requests it accepts.
    pub(super) fn room(&self) -> usize {
        let ended = self.completions.iter();
        let ended = ended.filter(|pending| matches!(pending, Pending::Ended { .. })).count();
        let waiting = self.posted.len() + self.in_flight.len() + self.executed.len() + ended;
        Self::DEPTH - waiting
    }

    /// Queues a work request. A broken end flushes it at once.
    pub(super) fn post(&mut self, work: Work) {
        match self.stage {
            Stage::Connected { .. } => self.posted.push_back(work),
            Stage::Broken => {
                self.completions.push_back(Pending::Ended { work, status: Status::Flushed });
            }
            Stage::Opened | Stage::Released => unreachable!("only adopted ends accept work"),
        }
        assert!(self.completions.len() + self.posted.len() <= Self::DEPTH + 1);
    }

    /// The next event of this end, and when it is due.
    pub(super) fn next_event(&self) -> Option<(Instant, Event)> {
        let breaks = self.breaks.map(|(at, _)| (at, Event::Breaks));
        let retries_end = self.retries_end.map(|at| (at, Event::RetriesEnd));
        let arrival = self.in_flight.front().filter(|_| !self.lost);
        let arrival = arrival.map(|request| (request.arrives, Event::RequestArrives));
        let acknowledgement = self.executed.front();
        let acknowledgement =
            acknowledgement.map(|executed| (executed.acknowledged, Event::AcknowledgementArrives));
        [breaks, retries_end, arrival, acknowledgement].into_iter().flatten().min()
    }

    /// The acknowledgement of the oldest executed request arrives.
    pub(super) fn acknowledge(&mut self) {
        let executed = self.executed.pop_front();
        let Executed { work, .. } = executed.expect("only executed requests are acknowledged");
        self.completions.push_back(Pending::Ended { work, status: Status::Done });
    }

    /// Drops some of the last messages that arrived here, as if the NIC had failed before it
    /// reported them to the host. Returns how many.
    pub(super) fn lose_some(&mut self, dice: &mut Dice) -> usize {
        let kept = dice.index(self.inbox.len() + 1);
        self.inbox.drain(kept..).count()
    }

    /// Breaks this end. Messages that arrived before are still reported, before `Broke`. Written
    /// bytes that none of them announces become visible now or never.
    pub(super) fn break_now(&mut self, dice: &mut Dice, cause: QpError) {
        assert!(matches!(self.stage, Stage::Connected { .. }));
        if let Some(last) = self.inbox.back() {
            self.hidden.reveal_before(last.request);
        }
        self.hidden.settle(dice);
        self.completions.push_back(Pending::Broke(cause));
        self.stage = Stage::Broken;
        self.flush();
    }

    /// Its fabric releases it.
    pub(super) fn release(&mut self, dice: &mut Dice) {
        self.flush();
        self.completions.retain(|pending| matches!(pending, Pending::Ended { .. }));
        self.inbox.clear();
        self.hidden.settle(dice);
        self.stage = Stage::Released;
    }

    /// Whether it has something to report to its fabric.
    pub(super) fn has_completions(&self) -> bool {
        self.id.is_some() && !(self.completions.is_empty() && self.inbox.is_empty())
    }

    /// Takes the next completion, if there is one. Before a message is returned, the bytes that it
    /// announces become visible.
    pub(super) fn next_completion(&mut self, dice: &mut Dice) -> Option<Completion> {
        let qp = self.id?;
        // Nothing may be received after `Broke`, so the received messages come first.
        let broke = matches!(self.completions.front(), Some(Pending::Broke(_)));
        let inbox_first = !self.inbox.is_empty()
            && (self.completions.is_empty()
                || broke
                || dice.roll(crate::dice::Chance::percent(50)));
        if inbox_first {
            let Arrived { message, request } = self.inbox.pop_front()?;
            self.hidden.reveal_before(request);
            return Some(match message {
                Arrival::Short(message) => Completion::Received { qp, message },
                Arrival::Long(message) => Completion::ReceivedLong { qp, message },
            });
        }
        Some(match self.completions.pop_front()? {
            Pending::Broke(cause) => Completion::Broke { qp, cause },
            Pending::Ended { work: Work::Write { lease, tag, .. }, status } => {
                Completion::Wrote { qp, lease, tag, status }
            }
            Pending::Ended {
                work: Work::Send { tag, .. } | Work::SendLong { tag, .. },
                status,
            } => Completion::Sent { qp, tag, status },
        })
    }

    fn flush(&mut self) {
        let executed = self.executed.drain(..).map(|executed| executed.work);
        let in_flight = self.in_flight.drain(..).map(|request| request.work);
        let flushed = executed.chain(in_flight).chain(self.posted.drain(..));
        self.completions
            .extend(flushed.map(|work| Pending::Ended { work, status: Status::Flushed }));
        self.breaks = None;
        self.retries_end = None;
    }
}
