//! One queue pair, as the poller sees it.

use std::collections::VecDeque;
use std::sync::Arc;

use rdma_core::{Body, Ended, Entry, Outcome, QueuePair, Refused, SendQueue};
use smcr_memory::{Lease, Region};

use super::rnic::{Berth, Protection, Qp};
use super::worker::{Job, Progress, Stage};
use super::{LONG_SENDS, SENDS};
use crate::{
    Completion, LONG_MESSAGE_MAX, MESSAGE_LEN, Message, Messages, QpError, QpId, Status, Work,
};

/// A queue pair that its poller has adopted.
#[derive(Debug)]
pub(super) struct Pair {
    id: QpId,
    sends: SendQueue<Lease>,
    /// Requests that wait for memory for a long message, and those behind them.
    waiting: VecDeque<Work>,
    /// Where in `memory` there is room for a long message to send.
    free: Vec<u32>,
    memory: Region,
    messages: Messages,
    /// Receive buffers that were read, and that the NIC does not have.
    used: Vec<u32>,
    progress: Arc<Progress>,
    phase: Phase,
    /// Where in `memory` there is room for a message of 44 bytes, if requests cannot carry them.
    free_short: Vec<u32>,
    /// Where in `memory` that room begins.
    short_base: u32,
    /// An entry said that a request of ours has not ended well. No later one has.
    has_flushed: bool,
    /// The worker was asked to fail it.
    is_failing: bool,
    /// Why our own requests failed.
    cause: Option<QpError>,
    /// The user has failed it.
    is_failed: bool,
    /// The fabric knows that there is something to post.
    pub(super) is_dirty: bool,
    /// `None` once the queue pair was given away.
    protection: Option<Arc<Protection>>,
    _berth: Berth,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The worker connects it. What is posted waits.
    Connecting,
    /// Sends and receives.
    Ready,
    /// `Broke` was reported.
    Broken,
}

/// What an entry means for the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Nothing more than was reported.
    Fine,
    /// It is in error, and whoever looked at all entries must report that it broke.
    Trouble,
    /// The peer misbehaves and the NIC does not mind: it must be failed, too.
    Misbehaved,
}

impl Pair {
    /// Gives the NIC all receive buffers: from now on the queue pair receives.
    pub(super) fn adopt(qp: Qp) -> Self {
        let plan = qp.pair.plan();
        let base = plan.receives * plan.stride;
        let long = u32::try_from(LONG_MESSAGE_MAX).expect("small");
        let short_base = base + LONG_SENDS * long;
        let carries_messages = qp.pair.inline() as usize >= MESSAGE_LEN;
        let shorts = if carries_messages { 0 } else { plan.sends };
        let mut pair = Self {
            id: QpId(qp.pair.token()),
            sends: SendQueue::new(qp.pair),
            free_short: (0..shorts).map(|slot| short_base + slot * SHORT_STRIDE).collect(),
            short_base,
            has_flushed: false,
            is_failing: false,
            waiting: VecDeque::new(),
            free: (0..LONG_SENDS).map(|slot| base + slot * long).collect(),
            memory: qp.memory,
            messages: qp.messages,
            used: (0..plan.receives).collect(),
            progress: qp.progress,
            phase: Phase::Connecting,
            cause: None,
            is_failed: false,
            is_dirty: false,
            protection: Some(qp.protection),
            _berth: qp.berth,
        };
        pair.return_buffers();
        pair
    }

    fn queue_pair(&self) -> Option<&Arc<QueuePair>> {
        self.sends.pair()
    }

    /// Whether the worker may still say something about its connection.
    pub(super) fn is_connecting(&self) -> bool {
        self.phase == Phase::Connecting
    }

    pub(super) fn is_broken(&self) -> bool {
        self.phase == Phase::Broken
    }

    pub(super) fn room(&self) -> usize {
        self.sends.room() - self.waiting.len()
    }

    pub(super) fn post(&mut self, work: &mut Vec<Work>) {
        assert!(work.len() <= self.room(), "{} requests for {}", work.len(), self.room());
        self.waiting.extend(work.drain(..));
        self.push_waiting();
    }

    /// Moves requests to the send queue, up to the first that waits for memory.
    fn push_waiting(&mut self) {
        while let Some(work) = self.waiting.pop_front() {
            let (body, tag) = match work {
                Work::Write { lease, rkey, address, tag } => {
                    // Without queue pair nothing is posted.
                    let lkey = self.protection.as_ref().map_or(0, |all| all.pool.lkey());
                    (Body::Write { lease, lkey, rkey: rkey.0, address }, tag)
                }
                Work::Send { message, tag } => match self.free_short.pop() {
                    Some(at) => {
                        self.memory.copy_in(at as usize, &message);
                        let len = u32::try_from(MESSAGE_LEN).expect("small");
                        (Body::Own { at, len }, tag)
                    }
                    // There is room for as many as the send queue has, if requests carry none.
                    None => (Body::Message(message), tag),
                },
                Work::SendLong { message, tag } => {
                    let Some(at) = self.free.pop() else {
                        self.waiting.push_front(Work::SendLong { message, tag });
                        return;
                    };
                    self.memory.copy_in(at as usize, &message);
                    let len = u32::try_from(message.len()).expect("at most 8 KiB");
                    (Body::Own { at, len }, tag)
                }
            };
            self.sends.push(body, tag.0);
        }
    }

    /// Rings the doorbell for what was posted.
    pub(super) fn ring(&mut self) -> Result<(), Refused> {
        match self.phase {
            // What the NIC has not seen when the user fails the pair must not be sent any more.
            Phase::Ready if !self.is_failed => self.sends.ring(),
            Phase::Ready | Phase::Connecting | Phase::Broken => Ok(()),
        }
    }

    /// Whether requests wait for the doorbell that the fabric does not know of: those that have
    /// waited for memory.
    pub(super) fn must_ring(&self) -> bool {
        !self.is_dirty && self.phase == Phase::Ready && self.sends.has_unposted()
    }

    /// Looks at what the worker has done. Returns true if the peer cannot be reached.
    pub(super) fn hear_worker(&mut self) -> bool {
        assert!(self.is_connecting());
        match self.progress.stage() {
            Stage::Connecting => false,
            Stage::Connected => {
                self.phase = Phase::Ready;
                false
            }
            Stage::Unreachable => {
                self.cause = self.cause.or(Some(QpError::RetriesExceeded));
                true
            }
        }
    }

    /// Notes that the user has failed it.
    pub(super) fn note_failed(&mut self) {
        self.is_failed = true;
    }

    /// What the worker must do to fail it, unless it was asked before.
    pub(super) fn ask_to_fail(&mut self) -> Option<Job> {
        let pair = self.sends.pair().filter(|_| !self.is_failing)?;
        self.is_failing = true;
        Some(Job::Fail(Arc::clone(pair)))
    }

    /// Notes that the driver takes no requests.
    pub(super) fn note_refused(&mut self) {
        self.cause = self.cause.or(Some(QpError::PortDown));
    }

    /// Takes in an entry of the completion queue.
    pub(super) fn handle(&mut self, entry: Entry, out: &mut VecDeque<Completion>) -> Effect {
        if entry.is_receive() {
            return self.handle_receive(&entry, out);
        }
        if entry.outcome() == Outcome::Success && !self.has_flushed {
            self.sends.end(entry);
            self.give_back(out);
            return Effect::Fine;
        }
        // The NIC carries out requests in order, so all before the first that failed went well.
        if !self.has_flushed {
            self.sends.end_before(&entry);
            self.give_back(out);
            self.has_flushed = true;
        }
        let outcome = entry.outcome();
        self.sends.end(entry);
        let cause = match outcome {
            Outcome::Success | Outcome::Flushed => None,
            Outcome::Refused => Some(QpError::RemoteError),
            Outcome::Unanswered => Some(QpError::RetriesExceeded),
            // Our own NIC refuses what we ask for: a bug of ours, or the device is dying.
            Outcome::Local(_) => Some(QpError::PortDown),
        };
        self.cause = self.cause.or(cause);
        Effect::Trouble
    }

    fn handle_receive(&mut self, entry: &Entry, out: &mut VecDeque<Completion>) -> Effect {
        if entry.outcome() != Outcome::Success {
            return Effect::Trouble;
        }
        if self.phase == Phase::Broken {
            return Effect::Fine;
        }
        let plan = self.queue_pair().expect("released pairs get no entries").plan();
        let at = entry.index() as usize * plan.stride as usize;
        let len = entry.len() as usize;
        let is_short = len == MESSAGE_LEN;
        if is_short {
            let mut message: Message = [0; MESSAGE_LEN];
            self.memory.copy_out(at, &mut message);
            out.push_back(Completion::Received { qp: self.id, message });
        } else if len > MESSAGE_LEN && self.messages == Messages::Long {
            let mut message = vec![0; len];
            self.memory.copy_out(at, &mut message);
            out.push_back(Completion::ReceivedLong { qp: self.id, message: message.into() });
        } else {
            return Effect::Misbehaved;
        }
        self.used.push(entry.index());
        if self.used.len() >= BUFFERS_AT_ONCE {
            self.return_buffers();
        }
        Effect::Fine
    }

    /// Gives the NIC the receive buffers that were read.
    fn return_buffers(&mut self) {
        let pair = self.sends.pair().expect("released pairs get no entries");
        for slots in self.used.chunks(BUFFERS_AT_ONCE) {
            // Only a dead device refuses, and then nothing comes either.
            let _ = pair.post_receives(slots);
        }
        self.used.clear();
    }

    /// Reports that it broke, and everything that has ended by that.
    pub(super) fn break_down(&mut self, out: &mut VecDeque<Completion>) {
        if self.phase != Phase::Broken {
            self.phase = Phase::Broken;
            // The NIC gave the buffers back, and no request of ours was wrong: the peer's was.
            let cause = self.cause.unwrap_or(QpError::PeerMisbehaved);
            let cause = if self.is_failed { QpError::PortDown } else { cause };
            out.push_back(Completion::Broke { qp: self.id, cause });
        }
        self.give_back(out);
    }

    /// Reports what has ended.
    fn give_back(&mut self, out: &mut VecDeque<Completion>) {
        while let Some(ended) = self.sends.take_ended() {
            let status = if self.is_broken() { Status::Flushed } else { Status::Done };
            self.report(ended, status, out);
        }
        self.push_waiting();
        while self.is_broken()
            && let Some(ended) = self.sends.take_unposted()
        {
            self.report(ended, Status::Flushed, out);
            self.push_waiting();
        }
    }

    /// Gives away the queue pair, to be destroyed; `None` if that was done before.
    pub(super) fn close(&mut self) -> Option<Job> {
        self.phase = Phase::Broken;
        self.progress.cancel();
        let protection = self.protection.take()?;
        Some(Job::Destroy(self.sends.close()?, protection))
    }

    /// Reports everything as flushed, once the queue pair is destroyed. Returns whether it is.
    pub(super) fn flush_destroyed(&mut self, out: &mut VecDeque<Completion>) -> bool {
        loop {
            let Some(ended) = self.sends.take_orphan() else { break };
            self.report(ended, Status::Flushed, out);
            self.push_waiting();
        }
        self.sends.is_empty() && self.sends.is_destroyed()
    }

    fn report(&mut self, ended: Ended<Lease>, status: Status, out: &mut VecDeque<Completion>) {
        let (qp, tag) = (self.id, crate::Tag(ended.tag));
        if let Some(at) = ended.own {
            let free = if at < self.short_base { &mut self.free } else { &mut self.free_short };
            free.push(at);
        }
        out.push_back(match ended.lease {
            Some(lease) => Completion::Wrote { qp, lease, tag, status },
            None => Completion::Sent { qp, tag, status },
        });
    }
}

/// Distance in bytes of two messages of 44 bytes in memory.
pub(super) const SHORT_STRIDE: u32 = 64;
/// Receive buffers go back to the NIC in lists of this length.
const BUFFERS_AT_ONCE: usize = 32;
const _: () = assert!(LONG_SENDS <= SENDS);
