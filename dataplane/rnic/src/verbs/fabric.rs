//! The poller's half of an RNIC.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rdma_core::{Channel, CompletionQueue, Dead, Entry};
use rustix::event::epoll;
use smcr_proto::Instant;

use super::pair::{Effect, Pair};
use super::rnic::Qp;
use super::worker::Shared;
use crate::{Completion, QpId, Work};

/// The poller's half of an RNIC.
#[derive(Debug)]
pub struct Fabric {
    /// `None` once the device has gone.
    channel: Option<Arc<Channel>>,
    shared: Arc<Shared>,
    /// An epoll descriptor, readable when the channel is, or the worker has news.
    events: OwnedFd,
    queues: Vec<Arc<CompletionQueue>>,
    /// By their tokens, which are their identifiers.
    pairs: HashMap<u32, Pair>,
    /// Those that the worker connects.
    connecting: Vec<u32>,
    /// Those that the worker destroys. Their entries mean nothing any more.
    leaving: Vec<Pair>,
    /// Those that are destroyed. They keep their place in the completion queue until their entries
    /// have been taken from it.
    gone: Vec<Pair>,
    /// Those with requests that were not posted.
    dirty: Vec<u32>,
    /// Those with entries that say they are in error.
    troubled: Vec<u32>,
    entries: Vec<Entry>,
    ready: VecDeque<Completion>,
    /// The channel becomes readable with the next entry.
    is_armed: bool,
    /// The last look at the completion queues may have left entries in them.
    has_backlog: bool,
}

impl Fabric {
    pub(super) fn new(channel: &Arc<Channel>, shared: &Arc<Shared>) -> io::Result<Self> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for descriptor in [channel.descriptor(), shared.wakeup()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&events, descriptor, data, epoll::EventFlags::IN)?;
        }
        Ok(Self {
            channel: Some(Arc::clone(channel)),
            shared: Arc::clone(shared),
            events,
            queues: Vec::new(),
            pairs: HashMap::new(),
            connecting: Vec::new(),
            leaving: Vec::new(),
            gone: Vec::new(),
            dirty: Vec::new(),
            troubled: Vec::new(),
            entries: Vec::with_capacity(ENTRIES_PER_POLL),
            ready: VecDeque::new(),
            is_armed: false,
            has_backlog: false,
        })
    }

    fn pair(&mut self, qp: QpId) -> &mut Pair {
        self.pairs.get_mut(&qp.0).expect("the caller uses queue pairs that it has adopted")
    }

    /// Takes entries from the completion queues, and reports what they say.
    fn reap(&mut self) {
        self.collect();
        for entry in self.entries.drain(..) {
            let token = entry.token();
            // Entries of released queue pairs may come late.
            let Some(pair) = self.pairs.get_mut(&token) else { continue };
            match pair.handle(entry, &mut self.ready) {
                Effect::Fine => {}
                Effect::Trouble => self.troubled.push(token),
                Effect::Misbehaved => {
                    pair.ask_to_fail().into_iter().for_each(|job| self.shared.ask(job));
                    self.troubled.push(token);
                }
            }
            if pair.must_ring() {
                pair.is_dirty = true;
                self.dirty.push(token);
            }
        }
        // Only after all entries: an error of ours may stand behind the buffers it brought back.
        for token in self.troubled.drain(..) {
            let pair = self.pairs.get_mut(&token).expect("it got an entry just now");
            pair.break_down(&mut self.ready);
        }
        if !self.has_backlog {
            self.gone.clear();
        }
    }

    /// Takes entries from the completion queues, as many as one call looks at.
    fn collect(&mut self) {
        self.has_backlog = false;
        for queue in &self.queues {
            let mut count = 1;
            while count > 0 && self.entries.len() < ENTRIES_PER_POLL {
                count = queue.poll(&mut self.entries).unwrap_or_else(|Dead| {
                    self.shared.condemn();
                    0
                });
            }
            self.has_backlog |= count > 0;
        }
        // Another is first the next time, or one that is always full would hide the others.
        if self.has_backlog {
            self.queues.rotate_left(1);
        }
    }

    /// The device has gone: keeps nothing of it open, and breaks all queue pairs.
    fn give_up(&mut self) {
        for pair in self.pairs.values_mut() {
            pair.note_failed();
            pair.break_down(&mut self.ready);
            pair.close().into_iter().for_each(|job| self.shared.ask(job));
        }
        self.queues.clear();
        self.channel = None;
    }

    /// Looks at what the worker has done.
    fn hear_worker(&mut self) {
        if !self.shared.take_news() && self.channel.is_some() {
            return;
        }
        if self.shared.is_gone() {
            self.give_up();
        }
        let (pairs, ready) = (&mut self.pairs, &mut self.ready);
        let dirty = &mut self.dirty;
        self.connecting.retain(|token| {
            // It may have been released meanwhile.
            let Some(pair) = pairs.get_mut(token) else { return false };
            if !pair.is_connecting() {
                return false;
            }
            if pair.hear_worker() {
                pair.break_down(ready);
            }
            if !pair.is_connecting() && !pair.is_broken() {
                pair.is_dirty = true;
                dirty.push(*token);
            }
            pair.is_connecting()
        });
        if self.channel.is_none() {
            for pair in pairs.values_mut() {
                pair.flush_destroyed(ready);
            }
        }
        let destroyed = |pair: &mut Pair| pair.flush_destroyed(ready);
        self.gone.extend(self.leaving.extract_if(.., destroyed));
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
        let token = qp.pair.token();
        let queue = qp.pair.completions();
        let is_gone = self.channel.is_none();
        if !is_gone && !self.queues.iter().any(|known| Arc::ptr_eq(known, queue)) {
            self.queues.push(Arc::clone(queue));
            self.is_armed = false;
        }
        let mut pair = Pair::adopt(qp);
        if pair.hear_worker() {
            pair.break_down(&mut self.ready);
        }
        if pair.is_connecting() {
            self.connecting.push(token);
        }
        assert!(self.pairs.insert(token, pair).is_none(), "tokens are not used again");
        if is_gone {
            self.give_up();
        }
        QpId(token)
    }

    fn room(&self, qp: QpId) -> usize {
        self.pairs.get(&qp.0).expect("adopted").room()
    }

    fn post(&mut self, qp: QpId, work: &mut Vec<Work>) {
        let pair = self.pair(qp);
        pair.post(work);
        if !pair.is_dirty {
            pair.is_dirty = true;
            self.dirty.push(qp.0);
        }
    }

    fn poll(&mut self, _: Instant, out: &mut Vec<Completion>) {
        if self.is_armed && self.channel.as_ref().is_some_and(|channel| channel.drain() > 0) {
            self.is_armed = false;
        }
        if self.ready.len() < out.capacity() - out.len() {
            self.reap();
            self.hear_worker();
        }
        let count = self.ready.len().min(out.capacity() - out.len());
        out.extend(self.ready.drain(..count));
    }

    fn transmit(&mut self, _: Instant) {
        for token in self.dirty.drain(..) {
            // It may have been released meanwhile.
            let Some(pair) = self.pairs.get_mut(&token) else { continue };
            pair.is_dirty = false;
            if pair.is_broken() {
                pair.break_down(&mut self.ready);
            } else if pair.ring().is_err() {
                pair.note_refused();
                pair.break_down(&mut self.ready);
                pair.ask_to_fail().into_iter().for_each(|job| self.shared.ask(job));
            }
        }
    }

    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        if !self.is_armed {
            // A dead device does not arm, and has no entries either.
            self.queues.iter().for_each(|queue| drop(queue.arm()));
            self.is_armed = true;
            // What came before the channel was armed makes nothing readable.
            self.reap();
        }
        // Before the look at the news: a signal that comes later is for news that come later.
        self.shared.forget_signal();
        let has_work = !self.ready.is_empty() || !self.dirty.is_empty() || self.has_backlog;
        (has_work || self.shared.has_news()).then_some(now)
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.events.as_fd())
    }

    fn fail(&mut self, _: Instant, qp: QpId) {
        let pair = self.pair(qp);
        if pair.is_broken() {
            return;
        }
        pair.note_failed();
        let job = pair.ask_to_fail();
        job.into_iter().for_each(|job| self.shared.ask(job));
    }

    fn release(&mut self, _: Instant, qp: QpId) {
        let mut pair = self.pairs.remove(&qp.0).expect("a queue pair is released once");
        // If the device has gone, the worker has it already.
        pair.close().into_iter().for_each(|job| self.shared.ask(job));
        self.leaving.push(pair);
    }
}

/// The most entries that one call looks at.
const ENTRIES_PER_POLL: usize = 1_024;
