//! One queue pair, as the poller sees it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use smcr_memory::{Lease, Region};
use smcr_proto::{Instant, Qpn, Rkey};

use super::SENDS;
use super::fabric::Counters;
use super::ring::{Nonsense, Received, Ring, State};
use super::rnic::Qp;
use super::shared::{Inbox, Job, News, Ticket};
use crate::{Completion, Messages, QpError, QpId, Status, Work};

/// A queue pair that its poller has adopted.
///
/// It breaks in two steps: first there is a reason, and then, when everything that has come before
/// is reported, it is broken.
#[derive(Debug)]
pub(super) struct Pair {
    id: QpId,
    messages: Messages,
    /// Posted, and not carried out yet.
    queue: VecDeque<Work>,
    /// Requests whose completions the caller has not seen.
    pub(super) outstanding: usize,
    ring: Option<Box<Ring>>,
    /// The peer has written nonsense to the rings, so we read no more.
    is_deaf: bool,
    /// The regions of the peer that we may write.
    keys: Vec<Key>,
    /// What the first request in the queue waits for.
    stalled: Option<Obstacle>,
    /// What the peer has said of itself.
    peer: State,
    /// The peer will never answer, and did not say why.
    is_lost: bool,
    /// When we give up a peer that does not connect.
    give_up_at: Option<Instant>,
    /// Why it breaks.
    cause: Option<QpError>,
    is_broken: bool,
    inbox: Arc<Inbox>,
    ticket: Ticket,
}

/// A region of the peer.
#[derive(Debug)]
struct Key {
    rkey: Rkey,
    address: u64,
    region: Region,
}

/// What a request needs before it can be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Obstacle {
    /// The region of this key, for which the peer was asked.
    Region(Rkey),
    /// Room in the ring.
    Room,
    /// Nothing helps: the peer must refuse it.
    Forbidden,
}

impl Pair {
    pub(super) fn adopt(id: QpId, qp: Qp) -> Self {
        Self {
            id,
            messages: qp.messages,
            queue: VecDeque::with_capacity(SENDS),
            outstanding: 0,
            ring: None,
            is_deaf: false,
            keys: Vec::new(),
            stalled: None,
            peer: State::Fine,
            is_lost: false,
            give_up_at: None,
            cause: None,
            is_broken: false,
            inbox: qp.inbox,
            ticket: qp.ticket,
        }
    }

    pub(super) fn id(&self) -> QpId {
        self.id
    }

    pub(super) fn number(&self) -> Qpn {
        self.ticket.qpn
    }

    pub(super) fn ring(&self) -> Option<&Ring> {
        self.ring.as_deref()
    }

    pub(super) fn room(&self) -> usize {
        SENDS - self.outstanding
    }

    /// Why it breaks, or has broken.
    pub(super) fn cause(&self) -> Option<QpError> {
        self.cause
    }

    pub(super) fn post(&mut self, work: &mut Vec<Work>) {
        assert!(work.len() <= self.room(), "{} requests for {}", work.len(), self.room());
        self.outstanding += work.len();
        self.queue.extend(work.drain(..));
    }

    /// Takes in what the worker has said. Returns true if it has connected the queue pair.
    pub(super) fn hear(&mut self) -> bool {
        let mut has_connected = false;
        self.inbox.open();
        while let Some(news) = self.inbox.take() {
            match news {
                // Too late, or once more. The peer hears that we are not there.
                News::Connected(ring) if self.is_broken || self.is_lost => {
                    ring.say(State::Left);
                    self.ticket.shared.ask(Job::Forget(ring));
                }
                News::Connected(ring) => {
                    self.ring = Some(ring);
                    has_connected = true;
                }
                News::Unreachable => self.is_lost = true,
                News::Granted { rkey, address, region } => {
                    if self.stalled == Some(Obstacle::Region(rkey)) {
                        self.stalled = None;
                    }
                    self.keys.push(Key { rkey, address, region });
                }
                News::Refused => self.break_for(QpError::RemoteError),
                News::Revoked(rkey) => {
                    let revoked = self.keys.extract_if(.., |key| key.rkey == rkey);
                    let regions: Vec<_> = revoked.map(|key| key.region).collect();
                    if !regions.is_empty() {
                        self.ticket.shared.ask(Job::Unmap(regions));
                    }
                }
                News::Misbehaved => self.break_for(QpError::PeerMisbehaved),
                News::Gone => {
                    // Who leaves in order says so first.
                    self.look_at_peer();
                    if self.peer == State::Fine {
                        self.break_for(QpError::RetriesExceeded);
                    }
                    self.is_lost = true;
                }
            }
        }
        has_connected
    }

    /// It breaks, when everything that has come is reported. The first cause counts.
    pub(super) fn break_for(&mut self, cause: QpError) {
        self.cause = self.cause.or(Some(cause));
    }

    /// Reports messages that have come, as many as fit.
    pub(super) fn receive(&mut self, out: &mut Vec<Completion>, counters: &mut Counters) {
        // Before the messages: what the peer says of itself it says after them.
        self.look_at_peer();
        if self.is_deaf || self.is_broken {
            return;
        }
        let Some(ring) = &mut self.ring else { return };
        while out.len() < out.capacity() {
            let completion = match ring.pop() {
                Ok(None) => break,
                Ok(Some(Received::Short(message))) => Completion::Received { qp: self.id, message },
                Ok(Some(Received::Long(message))) if self.messages == Messages::Long => {
                    Completion::ReceivedLong { qp: self.id, message }
                }
                Ok(Some(Received::Long(_))) | Err(Nonsense) => return self.stop_listening(),
            };
            counters.messages_in += 1;
            out.push(completion);
        }
        ring.give_back();
    }

    /// What the peer has written to the rings cannot be followed any further.
    fn stop_listening(&mut self) {
        self.is_deaf = true;
        self.break_for(QpError::PeerMisbehaved);
    }

    /// Looks at what the peer says of itself.
    fn look_at_peer(&mut self) {
        let Some(ring) = &self.ring else { return };
        match ring.state_of_peer() {
            Ok(state) => self.peer = state,
            Err(Nonsense) => self.stop_listening(),
        }
        match self.peer {
            State::Fine | State::Left => {}
            State::Refused => self.break_for(QpError::RemoteError),
            State::Violated => self.break_for(QpError::PeerMisbehaved),
        }
    }

    /// Breaks it, if there is a reason and nothing else is left to report. Returns true if it is
    /// broken from now on.
    pub(super) fn settle(&mut self, now: Instant, ready: &mut VecDeque<Completion>) -> bool {
        if self.is_broken {
            self.flush(ready);
            return false;
        }
        let is_alone = self.is_lost
            || self.peer == State::Left
            || (self.ring.is_none() && self.give_up_at.is_some_and(|at| at <= now));
        // As over a wire, who is alone notices it when he has something to say.
        if is_alone && !self.queue.is_empty() {
            self.break_for(QpError::RetriesExceeded);
        }
        let Some(cause) = self.cause else { return false };
        if !self.is_deaf
            && let Some(ring) = &mut self.ring
        {
            // What comes from now on came too late: it must not keep us from saying that it broke.
            match ring.seal().and_then(|()| ring.has_message()) {
                // The next turn has room for it.
                Ok(true) => return false,
                Ok(false) => {}
                Err(Nonsense) => self.is_deaf = true,
            }
        }
        self.is_broken = true;
        self.say(match cause {
            QpError::RemoteError => State::Violated,
            QpError::PeerMisbehaved => State::Refused,
            QpError::RetriesExceeded | QpError::PortDown => State::Left,
        });
        ready.push_back(Completion::Broke { qp: self.id, cause });
        self.flush(ready);
        true
    }

    fn say(&self, state: State) {
        if let Some(ring) = &self.ring {
            ring.say(state);
        }
    }

    fn flush(&mut self, ready: &mut VecDeque<Completion>) {
        while let Some(work) = self.queue.pop_front() {
            ready.push_back(self.ended(work, Status::Flushed));
        }
    }

    /// Leaves the peer, and reports everything that was not carried out as flushed.
    pub(super) fn leave(mut self, ready: &mut VecDeque<Completion>) {
        if !self.is_broken {
            self.say(State::Left);
        }
        self.flush(ready);
        let regions = self.keys.drain(..).map(|key| key.region).collect();
        self.ticket.shared.ask(Job::Unmap(regions));
        self.ring.take().into_iter().for_each(|ring| self.ticket.shared.ask(Job::Forget(ring)));
    }

    /// Carries out what was posted, as far as possible.
    pub(super) fn carry_out(
        &mut self,
        now: Instant,
        ready: &mut VecDeque<Completion>,
        counters: &mut Counters,
    ) {
        if self.queue.is_empty() {
            return;
        }
        if self.ring.is_none() {
            self.give_up_at.get_or_insert(now + CONNECT_PATIENCE);
            return;
        }
        self.look_at_peer();
        if self.cause.is_some() || self.peer != State::Fine {
            return;
        }
        let mut bytes = 0;
        while bytes < BYTES_PER_TURN
            && let Some(work) = self.queue.pop_front()
        {
            match self.try_to(&work, counters) {
                Ok(len) => bytes += len,
                Err(obstacle) => {
                    self.queue.push_front(work);
                    self.stall(obstacle);
                    break;
                }
            }
            self.stalled = None;
            ready.push_back(self.ended(work, Status::Done));
        }
        if let Some(ring) = &mut self.ring {
            ring.tell();
        }
    }

    /// Carries out one request, and returns how many bytes were copied.
    fn try_to(&mut self, work: &Work, counters: &mut Counters) -> Result<usize, Obstacle> {
        let message = match work {
            Work::Write { lease, rkey, address, .. } => {
                let len = self.place(lease, *rkey, *address)?;
                counters.writes_out += 1;
                return Ok(len);
            }
            Work::Send { message, .. } => &message[..],
            Work::SendLong { message, .. } => &message[..],
        };
        let ring = self.ring.as_mut().ok_or(Obstacle::Room)?;
        match ring.has_room(message.len()) {
            Ok(true) => ring.push(message),
            Ok(false) => return Err(Obstacle::Room),
            Err(Nonsense) => {
                self.stop_listening();
                return Err(Obstacle::Room);
            }
        }
        counters.messages_out += 1;
        Ok(message.len())
    }

    /// Copies the bytes of a write to where they belong.
    fn place(&self, lease: &Lease, rkey: Rkey, address: u64) -> Result<usize, Obstacle> {
        let key = self.keys.iter().find(|key| key.rkey == rkey);
        let key = key.ok_or(Obstacle::Region(rkey))?;
        let at = address.checked_sub(key.address).and_then(|at| usize::try_from(at).ok());
        let len = lease.len() as usize;
        let fits = |at: &usize| len <= key.region.len() && *at <= key.region.len() - len;
        let at = at.filter(fits).ok_or(Obstacle::Forbidden)?;
        lease.copy_to(&key.region, at);
        Ok(len)
    }

    fn stall(&mut self, obstacle: Obstacle) {
        match obstacle {
            Obstacle::Region(rkey) if self.stalled != Some(obstacle) => {
                self.ticket.shared.ask(Job::Ask(self.ticket.qpn, rkey));
            }
            Obstacle::Region(_) | Obstacle::Room => {}
            // The peer cannot see what we would have done, so we say it ourselves.
            Obstacle::Forbidden => self.break_for(QpError::RemoteError),
        }
        self.stalled = Some(obstacle);
    }

    /// Whether it has something to do, at once or later, although its peer says nothing.
    pub(super) fn is_busy(&self) -> bool {
        !self.queue.is_empty() || (self.cause.is_some() && !self.is_broken)
    }

    /// Whether there is something to do at once.
    pub(super) fn has_work(&self) -> bool {
        let can_go_on = self.ring.is_some() && self.stalled.is_none();
        let is_ending = self.is_lost || self.peer != State::Fine || self.is_broken;
        let breaks = self.cause.is_some() && !self.is_broken;
        breaks || (!self.queue.is_empty() && (can_go_on || is_ending))
    }

    /// When it must be looked at again, at the latest.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.give_up_at.filter(|_| self.ring.is_none() && !self.is_broken)
    }

    /// The ring, if what the peer says there matters.
    fn live_ring(&self) -> Option<&Ring> {
        self.ring().filter(|_| !self.is_broken)
    }

    /// Whether its peer can have news for us.
    pub(super) fn can_be_watched(&self) -> bool {
        self.live_ring().is_some()
    }

    /// Whether the peer has said something that we have not taken in, or made the room that we wait
    /// for.
    pub(super) fn has_news(&self) -> bool {
        self.live_ring().is_some_and(|ring| ring.has_news(self.waits_for_room(), self.peer))
    }

    /// Says that nobody looks any more unless the peer rings the bell: see `nap`.
    pub(super) fn announce_sleep(&self) {
        if let Some(ring) = self.live_ring() {
            ring.announce_sleep(self.waits_for_room());
        }
    }

    /// Says that we look by ourselves.
    pub(super) fn awake(&self) {
        if let Some(ring) = self.live_ring() {
            ring.awake();
        }
    }

    fn waits_for_room(&self) -> bool {
        self.stalled == Some(Obstacle::Room)
    }

    fn ended(&self, work: Work, status: Status) -> Completion {
        let qp = self.id;
        match work {
            Work::Write { lease, tag, .. } => Completion::Wrote { qp, lease, tag, status },
            Work::Send { tag, .. } | Work::SendLong { tag, .. } => {
                Completion::Sent { qp, tag, status }
            }
        }
    }
}

/// How long we wait for a peer that was told of the queue pair and does not connect.
const CONNECT_PATIENCE: Duration = Duration::from_secs(4);
/// The most bytes that are copied for one queue pair while others wait.
const BYTES_PER_TURN: usize = 4 << 20;
