//! The poller's half of a NIC in shared memory.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{Timespec, epoll};
use smcr_proto::Instant;

use super::pair::Pair;
use super::pairs::Pairs;
use super::rnic::Qp;
use super::shared::{Part, Shared};
use crate::{Completion, QpError, QpId, Signs, Work};

/// The poller's half of a NIC in shared memory.
#[derive(Debug)]
pub struct Fabric {
    shared: Arc<Shared>,
    part: usize,
    /// An epoll descriptor, readable when a peer or the worker has woken us.
    events: OwnedFd,
    pairs: Pairs,
    ready: VecDeque<Completion>,
    /// All peers were told to wake us.
    is_armed: bool,
    /// What is known of `events`; none if the caller does not tell.
    signs: Option<Signs>,
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
            pairs: Pairs::default(),
            ready: VecDeque::new(),
            is_armed: false,
            signs: None,
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
        self.pairs.get(qp).is_some_and(|pair| pair.ring().is_some())
    }

    /// How many queue pairs have news of the worker.
    #[cfg(test)]
    pub(super) fn told(&self) -> usize {
        self.part().told()
    }

    /// How many queue pairs are looked at in every turn.
    #[cfg(test)]
    pub(super) fn watched(&self) -> usize {
        self.pairs.watched()
    }

    fn part(&self) -> &Part {
        &self.shared.parts()[self.part]
    }

    fn pair(&mut self, qp: QpId) -> &mut Pair {
        self.pairs.of(qp).expect("the caller uses queue pairs that it has adopted")
    }

    /// Silences those who have woken us, and watches them.
    fn hear_bells(&mut self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut room = [const { MaybeUninit::uninit() }; WOKEN_AT_ONCE];
        // Without an answer it stays readable, and the next turn asks again.
        let woken = epoll::wait(&self.events, &mut room[..], Some(&now));
        let woken: &[epoll::Event] = woken.as_ref().map_or(&[], |(woken, _)| woken);
        for event in woken {
            let token = event.data.u64();
            if token == WORKER {
                self.part().silence();
                continue;
            }
            let id = u32::try_from(token).map(QpId).expect("one of ours, or the worker's");
            let ring = self.pairs.get(id).and_then(Pair::ring).expect("it goes with its pair");
            if !ring.silence() {
                ignore(&self.events, ring.bell());
            }
            self.pairs.attend(id);
        }
    }

    /// Takes in what the worker has said.
    fn hear_worker(&mut self) {
        if !self.part().take_news() {
            return;
        }
        if self.shared.is_gone() && !self.is_unplugged {
            self.is_unplugged = true;
            for id in self.pairs.ids() {
                self.pair(id).break_for(QpError::PortDown);
                self.pairs.attend(id);
            }
        }
        for _ in 0..HEARD_PER_TURN_MAX {
            let Some(number) = self.part().take_told() else { return };
            // Who is not adopted yet hears it then.
            if let Some(id) = self.pairs.numbered(number) {
                self.hear(id);
            }
        }
        self.part().leave_rest();
    }

    /// Takes in what the worker has said to one queue pair.
    fn hear(&mut self, id: QpId) {
        let pair = self.pairs.of(id).expect("one of the queue pairs");
        if pair.hear()
            && let Some(ring) = pair.ring()
        {
            let data = epoll::EventData::new_u64(id.0.into());
            if epoll::add(&self.events, ring.bell(), data, epoll::EventFlags::IN).is_err() {
                // The peer could not wake us.
                pair.break_for(QpError::RetriesExceeded);
            }
        }
        self.pairs.attend(id);
    }

    /// Looks at those queue pairs that may have news.
    fn look(&mut self, now: Instant, out: &mut Vec<Completion>) {
        let Self { pairs, ready, counters, events, .. } = self;
        pairs.look(now, |pair| {
            pair.receive(out, counters);
            if pair.settle(now, ready) {
                let misbehaved = Some(QpError::PeerMisbehaved) == pair.cause();
                counters.misbehaved += u64::from(misbehaved);
                pair.ring().into_iter().for_each(|ring| ignore(events, ring.bell()));
            }
        });
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
            match self.pairs.of(qp) {
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
        let id = self.pairs.adopt(qp);
        if self.is_unplugged {
            self.pair(id).break_for(QpError::PortDown);
        }
        self.hear(id);
        id
    }

    fn room(&self, qp: QpId) -> usize {
        self.pairs.get(qp).expect("adopted").room()
    }

    fn post(&mut self, qp: QpId, work: &mut Vec<Work>) {
        self.pair(qp).post(work);
        self.pairs.attend(qp);
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>) {
        if std::mem::take(&mut self.is_armed) {
            self.pairs.awake();
        }
        if self.signs.is_none_or(|signs| signs == Signs::Maybe) {
            self.hear_bells();
            // Another `poll` of the same turn need not.
            self.signs = self.signs.and(Some(Signs::NotYet));
        }
        self.hear_worker();
        self.report(out);
        self.look(now, out);
        self.report(out);
    }

    fn note_signs(&mut self, signs: Signs) {
        self.signs = Some(signs);
    }

    fn transmit(&mut self, now: Instant) {
        let Self { pairs, ready, counters, .. } = self;
        pairs.work_off(now, |pair| pair.carry_out(now, ready, counters));
    }

    fn has_completions(&self) -> bool {
        !self.ready.is_empty()
    }

    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        self.is_armed = true;
        let deadline = self.pairs.prepare_sleep(now);
        let has_news = !self.ready.is_empty() || self.part().has_news();
        if has_news { Some(now) } else { deadline }
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.events.as_fd())
    }

    fn fail(&mut self, _: Instant, qp: QpId) {
        self.pair(qp).break_for(QpError::PortDown);
        self.pairs.attend(qp);
    }

    fn release(&mut self, _: Instant, qp: QpId) {
        let pair = self.pairs.remove(qp);
        pair.ring().into_iter().for_each(|ring| ignore(&self.events, ring.bell()));
        pair.leave(&mut self.ready);
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
/// To so many queue pairs the worker speaks in one turn, at most.
const HEARD_PER_TURN_MAX: usize = 64;
