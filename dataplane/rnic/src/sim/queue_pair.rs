//! One end of a simulated queue pair: what was asked of it, and what it has to say.

use std::collections::VecDeque;

use smcr_proto::{Instant, Psn, Qpn};

use super::visibility::Hidden;
use crate::dice::Dice;
use crate::{
    Cause, Completion, Domain, LONG_MESSAGE_MAX, MESSAGE_LEN, Message, Messages, QpId, Status, Work,
};

/// How far a queue pair has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It knows no peer yet.
    Opened,
    /// It can send, and receives once a fabric has adopted it.
    Connected { peer: Qpn },
    /// It carries nothing any more, but its fabric still has it.
    Broken,
    /// Its fabric gave it up; what is left to say is flushed completions.
    Released,
}

/// One end of a queue pair.
#[derive(Debug)]
pub(super) struct QueuePair {
    /// Index of its NIC in the network.
    pub(super) nic: usize,
    pub(super) domain: Domain,
    /// What it takes in.
    messages: Messages,
    pub(super) psn: Psn,
    pub(super) stage: Stage,
    /// What its fabric calls it, once adopted.
    pub(super) id: Option<QpId>,
    /// Posted, but not on the wire.
    pub(super) posted: VecDeque<Work>,
    /// On the wire, in order; the first arrives first.
    pub(super) flying: VecDeque<Flying>,
    /// Executed by the peer, with the acknowledgement on its way back.
    pub(super) executed: VecDeque<Executed>,
    /// The peer does not answer: the first request in flight is lost until we give up.
    pub(super) lost: bool,
    /// When we give up on a peer that does not answer.
    pub(super) gives_up: Option<Instant>,
    /// When it breaks, and why, if that is already certain.
    pub(super) breaks: Option<(Instant, Cause)>,
    /// To be told to the fabric, in order.
    pub(super) news: VecDeque<News>,
    /// Received, not yet told to the fabric.
    pub(super) inbox: VecDeque<Arrived>,
    pub(super) hidden: Hidden,
    /// Requests sent so far: the name of the next one.
    pub(super) requests: u64,
}

/// A request on the wire.
#[derive(Debug)]
pub(super) struct Flying {
    pub(super) work: Work,
    pub(super) request: u64,
    pub(super) arrives: Instant,
}

/// A request that the peer has executed.
#[derive(Debug)]
pub(super) struct Executed {
    pub(super) work: Work,
    pub(super) acknowledged: Instant,
}

/// A message that came in.
#[derive(Debug)]
pub(super) struct Arrived {
    pub(super) message: Arrival,
    /// Its place among the requests of its sender: it announces all earlier ones.
    pub(super) request: u64,
}

/// The bytes of a message that came in.
#[derive(Debug)]
pub(super) enum Arrival {
    Short(Message),
    Long(Box<[u8]>),
}

/// What a fabric must be told.
#[derive(Debug)]
pub(super) enum News {
    Ended { work: Work, status: Status },
    Broke(Cause),
}

/// What happens to a queue pair next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    Breaks,
    GivesUp,
    RequestArrives,
    AcknowledgementArrives,
}

impl QueuePair {
    /// Requests one queue pair takes before the first of them has been reported as ended.
    pub(super) const DEPTH: usize = 384;
    /// Messages that wait for the fabric before the peer is told to come back later.
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
            flying: VecDeque::new(),
            executed: VecDeque::new(),
            lost: false,
            gives_up: None,
            breaks: None,
            news: VecDeque::new(),
            inbox: VecDeque::new(),
            hidden: Hidden::default(),
            requests: 0,
        }
    }

    /// The peer, while this end works.
    pub(super) fn peer(&self) -> Option<Qpn> {
        match self.stage {
            Stage::Connected { peer } => Some(peer),
            Stage::Opened | Stage::Broken | Stage::Released => None,
        }
    }

    /// Whether it takes in a message of `len` bytes that is longer than others.
    pub(super) fn takes_long(&self, len: usize) -> bool {
        match self.messages {
            Messages::Short => false,
            Messages::Long => (MESSAGE_LEN..=LONG_MESSAGE_MAX).contains(&len),
        }
    }

    /// How many more requests it takes.
    pub(super) fn room(&self) -> usize {
        let ended = self.news.iter().filter(|news| matches!(news, News::Ended { .. })).count();
        let waiting = self.posted.len() + self.flying.len() + self.executed.len() + ended;
        Self::DEPTH - waiting
    }

    /// Takes a request; a broken end answers it at once.
    pub(super) fn post(&mut self, work: Work) {
        match self.stage {
            Stage::Connected { .. } => self.posted.push_back(work),
            Stage::Broken => self.news.push_back(News::Ended { work, status: Status::Flushed }),
            Stage::Opened | Stage::Released => unreachable!("only adopted ends are posted to"),
        }
        assert!(self.news.len() + self.posted.len() <= Self::DEPTH + 1);
    }

    /// What happens to this end next, and when.
    pub(super) fn next_event(&self) -> Option<(Instant, Event)> {
        let breaks = self.breaks.map(|(at, _)| (at, Event::Breaks));
        let gives_up = self.gives_up.map(|at| (at, Event::GivesUp));
        let arrival = self.flying.front().filter(|_| !self.lost);
        let arrival = arrival.map(|flying| (flying.arrives, Event::RequestArrives));
        let acknowledgement = self.executed.front();
        let acknowledgement =
            acknowledgement.map(|executed| (executed.acknowledged, Event::AcknowledgementArrives));
        [breaks, gives_up, arrival, acknowledgement].into_iter().flatten().min()
    }

    /// The oldest acknowledgement is here.
    pub(super) fn acknowledge(&mut self) {
        let Executed { work, .. } = self.executed.pop_front().expect("an event of its own");
        self.news.push_back(News::Ended { work, status: Status::Done });
    }

    /// Forgets some of the last messages that arrived here, as if host and NIC had lost touch
    /// before. Returns how many.
    pub(super) fn lose_some(&mut self, dice: &mut Dice) -> usize {
        let kept = dice.index(self.inbox.len() + 1);
        self.inbox.drain(kept..).count()
    }

    /// Carries nothing from now on. What arrived before is still received, and told before; bytes
    /// that nothing announces appear now or never.
    pub(super) fn break_now(&mut self, dice: &mut Dice, cause: Cause) {
        assert!(matches!(self.stage, Stage::Connected { .. }));
        if let Some(last) = self.inbox.back() {
            self.hidden.reveal_before(last.request);
        }
        self.hidden.settle(dice);
        self.news.push_back(News::Broke(cause));
        self.stage = Stage::Broken;
        self.flush();
    }

    /// Its fabric has given it up.
    pub(super) fn release(&mut self, dice: &mut Dice) {
        self.flush();
        self.news.retain(|news| matches!(news, News::Ended { .. }));
        self.inbox.clear();
        self.hidden.settle(dice);
        self.stage = Stage::Released;
    }

    /// Whether the fabric could be told something now.
    pub(super) fn has_news(&self) -> bool {
        self.id.is_some() && !(self.news.is_empty() && self.inbox.is_empty())
    }

    /// Tells one thing, if there is any. What a message announces is visible from now on.
    pub(super) fn tell(&mut self, dice: &mut Dice) -> Option<Completion> {
        let qp = self.id?;
        // Nothing is received after `Broke`, so what was received comes first.
        let broke = matches!(self.news.front(), Some(News::Broke(_)));
        let inbox_first = !self.inbox.is_empty()
            && (self.news.is_empty() || broke || dice.roll(crate::dice::Chance::percent(50)));
        if inbox_first {
            let Arrived { message, request } = self.inbox.pop_front()?;
            self.hidden.reveal_before(request);
            return Some(match message {
                Arrival::Short(message) => Completion::Received { qp, message },
                Arrival::Long(message) => Completion::ReceivedLong { qp, message },
            });
        }
        Some(match self.news.pop_front()? {
            News::Broke(cause) => Completion::Broke { qp, cause },
            News::Ended { work: Work::Write { lease, tag, .. }, status } => {
                Completion::Wrote { qp, lease, tag, status }
            }
            News::Ended { work: Work::Send { tag, .. } | Work::SendLong { tag, .. }, status } => {
                Completion::Sent { qp, tag, status }
            }
        })
    }

    fn flush(&mut self) {
        let executed = self.executed.drain(..).map(|executed| executed.work);
        let flying = self.flying.drain(..).map(|flying| flying.work);
        let flushed = executed.chain(flying).chain(self.posted.drain(..));
        self.news.extend(flushed.map(|work| News::Ended { work, status: Status::Flushed }));
        self.breaks = None;
        self.gives_up = None;
    }
}
