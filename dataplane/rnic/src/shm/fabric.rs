//! The poller's half of a NIC in shared memory.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{Timespec, epoll};
use smcr_proto::Instant;

use super::pair::Pair;
use super::rnic::Qp;
use super::shared::{Part, Shared};
use crate::{Completion, QpError, QpId, Work};

/// The poller's half of a NIC in shared memory.
#[derive(Debug)]
pub struct Fabric {
    shared: Arc<Shared>,
    part: usize,
    /// An epoll descriptor, readable when a peer or the worker has woken us.
    events: OwnedFd,
    pairs: BTreeMap<u32, Pair>,
    next_id: u32,
    /// Whose turn it is to report first.
    first: u32,
    ready: VecDeque<Completion>,
    /// Peers and worker wake us.
    is_armed: bool,
    is_unplugged: bool,
    counters: Counters,
}

/// What a fabric counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages received.
    pub messages_in: u64,
    /// Messages sent.
    pub messages_out: u64,
    /// Writes to memory of peers.
    pub writes_out: u64,
    /// Queue pairs that broke because the peer had broken the rules.
    pub misbehaved: u64,
}

impl Fabric {
    pub(super) fn new(shared: &Arc<Shared>, part: usize) -> io::Result<Self> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wakeup = shared.parts()[part].wakeup();
        epoll::add(&events, wakeup, epoll::EventData::new_u64(WORKER), epoll::EventFlags::IN)?;
        Ok(Self {
            shared: Arc::clone(shared),
            part,
            events,
            pairs: BTreeMap::new(),
            next_id: 0,
            first: 0,
            ready: VecDeque::new(),
            is_armed: false,
            is_unplugged: false,
            counters: Counters::default(),
        })
    }

    /// The counters of this fabric.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    #[cfg(test)]
    pub(super) fn is_connected(&self, qp: QpId) -> bool {
        self.pairs[&qp.0].ring().is_some()
    }

    fn part(&self) -> &Part {
        &self.shared.parts()[self.part]
    }

    fn pair(&mut self, qp: QpId) -> &mut Pair {
        self.pairs.get_mut(&qp.0).expect("the caller uses queue pairs that it has adopted")
    }

    /// Silences those who have woken us, and says that nobody need do so any more.
    fn disarm(&mut self) {
        self.is_armed = false;
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut room = [const { MaybeUninit::uninit() }; WOKEN_AT_ONCE];
        // Without an answer it stays readable, and the next turn asks again.
        let woken = epoll::wait(&self.events, &mut room[..], Some(&now));
        let woken: &[epoll::Event] = woken.as_ref().map_or(&[], |(woken, _)| woken);
        for event in woken {
            let token = event.data.u64();
            if token == WORKER {
                self.shared.parts()[self.part].silence();
                continue;
            }
            let pair = u32::try_from(token).ok().and_then(|id| self.pairs.get(&id));
            let ring = pair.and_then(Pair::ring).expect("it is removed with its pair");
            if !ring.silence() {
                ignore(&self.events, ring.bell());
            }
        }
        self.pairs.values().filter_map(Pair::ring).for_each(|ring| ring.awake());
    }

    /// Takes in what the worker has said.
    fn hear_worker(&mut self) {
        if !self.part().take_news() {
            return;
        }
        if self.shared.is_gone() && !self.is_unplugged {
            self.is_unplugged = true;
            self.pairs.values_mut().for_each(|pair| pair.break_for(QpError::PortDown));
        }
        for (id, pair) in &mut self.pairs {
            hear(&self.events, *id, pair);
        }
    }

    /// Looks at one queue pair.
    fn look_at(&mut self, id: u32, now: Instant, out: &mut Vec<Completion>) {
        let pair = self.pairs.get_mut(&id).expect("one of the queue pairs");
        pair.receive(out, &mut self.counters);
        if pair.settle(now, &mut self.ready) {
            let misbehaved = Some(QpError::PeerMisbehaved) == pair.cause();
            self.counters.misbehaved += u64::from(misbehaved);
            pair.ring().into_iter().for_each(|ring| ignore(&self.events, ring.bell()));
        }
    }

    /// Reports what is ready, as much as fits.
    fn report(&mut self, out: &mut Vec<Completion>) {
        while out.len() < out.capacity()
            && let Some(completion) = self.ready.pop_front()
        {
            let (qp, is_request) = match &completion {
                Completion::Wrote { qp, .. } | Completion::Sent { qp, .. } => (*qp, true),
                Completion::Received { qp, .. }
                | Completion::ReceivedLong { qp, .. }
                | Completion::Broke { qp, .. } => (*qp, false),
            };
            match self.pairs.get_mut(&qp.0) {
                Some(pair) => pair.outstanding -= usize::from(is_request),
                // Who has released it need not hear that it broke before.
                None if !is_request => continue,
                None => {}
            }
            out.push(completion);
        }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.shared.leave();
    }
}

impl crate::Fabric for Fabric {
    type Qp = Qp;

    fn adopt(&mut self, _: Instant, qp: Qp) -> QpId {
        assert_eq!(qp.part, self.part, "a queue pair of this part of the NIC");
        let id = self.next_id;
        self.next_id += 1;
        let mut pair = Pair::adopt(QpId(id), qp);
        hear(&self.events, id, &mut pair);
        if self.is_unplugged {
            pair.break_for(QpError::PortDown);
        }
        self.pairs.insert(id, pair);
        QpId(id)
    }

    fn room(&self, qp: QpId) -> usize {
        self.pairs.get(&qp.0).expect("adopted").room()
    }

    fn post(&mut self, qp: QpId, work: &mut Vec<Work>) {
        self.pair(qp).post(work);
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>) {
        if self.is_armed {
            self.disarm();
        }
        self.hear_worker();
        self.report(out);
        // Each is the first in turn, so that those before it cannot use up the room for ever.
        let first = self.pairs.range(self.first..).map(|(id, _)| *id).next().unwrap_or(0);
        self.first = first.wrapping_add(1);
        let mut next = first;
        while let Some((id, _)) = self.pairs.range(next..).next() {
            next = *id + 1;
            self.look_at(next - 1, now, out);
        }
        let mut next = 0;
        while let Some((id, _)) = self.pairs.range(next..first).next() {
            next = *id + 1;
            self.look_at(next - 1, now, out);
        }
        self.report(out);
    }

    fn transmit(&mut self, now: Instant) {
        for pair in self.pairs.values_mut() {
            pair.carry_out(now, &mut self.ready, &mut self.counters);
        }
    }

    fn has_completions(&self) -> bool {
        !self.ready.is_empty()
    }

    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        self.is_armed = true;
        let mut has_news = !self.ready.is_empty() || self.part().has_news();
        let mut deadline = None;
        for pair in self.pairs.values() {
            has_news |= pair.announce_sleep() || pair.has_work();
            deadline = deadline.into_iter().chain(pair.deadline()).min();
        }
        if has_news { Some(now) } else { deadline }
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.events.as_fd())
    }

    fn fail(&mut self, _: Instant, qp: QpId) {
        self.pair(qp).break_for(QpError::PortDown);
    }

    fn release(&mut self, _: Instant, qp: QpId) {
        let pair = self.pairs.remove(&qp.0).expect("a queue pair is released once");
        pair.ring().into_iter().for_each(|ring| ignore(&self.events, ring.bell()));
        pair.leave(&mut self.ready);
    }
}

/// Takes in what the worker has said about one queue pair.
fn hear(events: &OwnedFd, id: u32, pair: &mut Pair) {
    if pair.hear()
        && let Some(ring) = pair.ring()
    {
        let data = epoll::EventData::new_u64(id.into());
        if epoll::add(events, ring.bell(), data, epoll::EventFlags::IN).is_err() {
            // The peer could not wake us.
            pair.break_for(QpError::RetriesExceeded);
        }
    }
}

/// Lets nobody wake us by this any more.
fn ignore(events: &OwnedFd, bell: BorrowedFd<'_>) {
    // It may have been removed before.
    let _ = epoll::delete(events, bell);
}

/// Stands for the worker among those who have woken us.
const WORKER: u64 = u64::MAX;
/// The most who are silenced at once. The others stay readable.
const WOKEN_AT_ONCE: usize = 64;
