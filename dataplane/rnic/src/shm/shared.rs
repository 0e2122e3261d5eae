//! What the halves of a NIC and its worker share.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crossbeam_queue::SegQueue;
use rustix::event::{EventfdFlags, eventfd};
use smcr_memory::Region;
use smcr_proto::{Gid, Qpn, Rkey};

use super::directory::Directory;
use super::ring::Ring;
use super::wire::Name;
use crate::{Domain, Event};

/// What the halves of a NIC and its worker share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) directory: Directory,
    pub(super) gid: Gid,
    jobs: SegQueue<Job>,
    /// An eventfd that wakes the worker.
    work: OwnedFd,
    /// How many halves are left.
    halves: AtomicUsize,
    /// The NIC has gone from its directory.
    gone: AtomicBool,
    domains_opened: AtomicU32,
    /// Numbers of queue pairs, and keys, that are in use. The pollers do not lock it.
    taken: Mutex<Taken>,
    parts: Vec<Part>,
}

#[derive(Debug, Default)]
struct Taken {
    numbers: HashSet<u32>,
    keys: HashSet<u32>,
}

/// What is heard by one pair of halves.
#[derive(Debug)]
pub(super) struct Part {
    /// Some queue pair may have news, or the NIC has gone.
    has_news: AtomicBool,
    /// Queue pairs that have news, each once. It may name some that are no more, or not adopted
    /// yet.
    told: SegQueue<Qpn>,
    /// An eventfd that wakes the fabric.
    wakeup: OwnedFd,
    events: SegQueue<Event>,
    /// An eventfd that is readable while there are events.
    reports: OwnedFd,
}

/// What the worker is asked to do.
#[derive(Debug)]
pub(super) enum Job {
    /// Let peers of the domain have the region, if they ask for it.
    Register { rkey: Rkey, domain: Domain, region: Region, address: u64 },
    /// Let nobody have it any more, and tell those who do.
    Deregister(Rkey),
    /// Connect a queue pair.
    Connect { own: Name, domain: Domain, peer: Name, part: usize, inbox: Arc<Inbox> },
    /// Ask the peer of a queue pair for a region.
    Ask(Qpn, Rkey),
    /// A queue pair is no more.
    Leave(Qpn),
    /// Unmap these: it may take long.
    Unmap(Vec<Region>),
    /// The same for the rings of a queue pair, whose bell is to be closed.
    Forget(Box<Ring>),
}

/// What the worker has to say about a queue pair.
#[derive(Debug)]
pub(super) enum News {
    /// It is connected.
    Connected(Box<Ring>),
    /// There is nobody to connect it to.
    Unreachable,
    /// The peer lets us have a region.
    Granted { rkey: Rkey, address: u64, region: Region },
    /// The peer does not, and takes nothing from us any more.
    Refused,
    /// A region must not be written any more.
    Revoked(Rkey),
    /// The peer has broken the rules.
    Misbehaved,
    /// The peer is not there any more.
    Gone,
}

/// The news of one queue pair.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    news: SegQueue<News>,
    /// Its poller has been told that there are some.
    is_told: AtomicBool,
}

impl Inbox {
    /// Leaves news. Returns whether the poller must be told.
    fn leave(&self, news: News) -> bool {
        self.news.push(news);
        !self.is_told.swap(true, Ordering::AcqRel)
    }

    /// To be called before the first of the news is taken.
    pub(super) fn open(&self) {
        self.is_told.swap(false, Ordering::AcqRel);
    }

    /// Takes the next one.
    pub(super) fn take(&self) -> Option<News> {
        self.news.pop()
    }
}

impl Shared {
    pub(super) fn new(directory: Directory, gid: Gid, parts: u32) -> io::Result<Self> {
        let part = |_| {
            Ok(Part {
                has_news: AtomicBool::new(false),
                told: SegQueue::new(),
                wakeup: new_eventfd()?,
                events: SegQueue::new(),
                reports: new_eventfd()?,
            })
        };
        let parts: Vec<_> = (0..parts).map(part).collect::<io::Result<_>>()?;
        Ok(Self {
            directory,
            gid,
            jobs: SegQueue::new(),
            work: new_eventfd()?,
            halves: AtomicUsize::new(2 * parts.len()),
            gone: AtomicBool::new(false),
            domains_opened: AtomicU32::new(0),
            taken: Mutex::default(),
            parts,
        })
    }

    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Leaves a job for the worker. Does not block.
    pub(super) fn ask(&self, job: Job) {
        self.jobs.push(job);
        signal(&self.work);
    }

    /// Takes the next job.
    pub(super) fn take_job(&self) -> Option<Job> {
        self.jobs.pop()
    }

    /// Readable when there are jobs, or no halves any more.
    pub(super) fn work(&self) -> BorrowedFd<'_> {
        self.work.as_fd()
    }

    /// One of the halves is dropped.
    pub(super) fn leave(&self) {
        if self.halves.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.directory.remove(self.gid);
        }
        signal(&self.work);
    }

    /// Whether all halves were dropped.
    pub(super) fn is_left(&self) -> bool {
        self.halves.load(Ordering::Acquire) == 0
    }

    /// Whether the NIC has gone from its directory.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// The NIC has gone from its directory: tells everybody.
    pub(super) fn unplug(&self) {
        self.gone.store(true, Ordering::Release);
        for part in &self.parts {
            part.events.push(Event::Gone);
            signal(&part.reports);
            part.tell();
        }
    }

    /// The number of a new domain.
    pub(super) fn new_domain(&self) -> Domain {
        Domain(self.domains_opened.fetch_add(1, Ordering::Relaxed))
    }

    /// A number for a queue pair; `None` if there is no entropy.
    pub(super) fn new_number(&self) -> Option<Qpn> {
        let mut taken = self.taken();
        loop {
            let number = getrandom::u32().ok()? & QPN_MASK;
            if number >= QPN_FIRST && taken.numbers.insert(number) {
                return Some(Qpn(number));
            }
        }
    }

    /// The number can be used again.
    pub(super) fn free_number(&self, qpn: Qpn) {
        assert!(self.taken().numbers.remove(&qpn.0), "a queue pair ends once");
    }

    /// A key for a region; `None` if there is no entropy.
    pub(super) fn new_key(&self) -> Option<Rkey> {
        let mut taken = self.taken();
        loop {
            let key = getrandom::u32().ok()?;
            if taken.keys.insert(key) {
                return Some(Rkey(key));
            }
        }
    }

    /// The key can be used again.
    pub(super) fn free_key(&self, key: Rkey) {
        assert!(self.taken().keys.remove(&key.0), "a region is deregistered once");
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        // Whoever panicked with it left it whole.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Part {
    /// The worker says something to a queue pair. However much it says, there is one entry in
    /// `told`: a peer that gives it much to say must not keep others waiting.
    pub(super) fn tell_of(&self, qpn: Qpn, inbox: &Inbox, news: News) {
        if inbox.leave(news) {
            self.told.push(qpn);
            self.tell();
        }
    }

    /// There is something to hear.
    fn tell(&self) {
        self.has_news.store(true, Ordering::Release);
        signal(&self.wakeup);
    }

    /// Whether there may be news.
    pub(super) fn has_news(&self) -> bool {
        self.has_news.load(Ordering::Acquire)
    }

    /// Whether there may be news since the last call. If so, look whether the NIC has gone, and
    /// hear those whom [`Self::take_told`] names.
    pub(super) fn take_news(&self) -> bool {
        self.has_news() && self.has_news.swap(false, Ordering::AcqRel)
    }

    /// Takes the next queue pair that has news.
    pub(super) fn take_told(&self) -> Option<Qpn> {
        self.told.pop()
    }

    #[cfg(test)]
    pub(super) fn told(&self) -> usize {
        self.told.len()
    }

    /// Not all were taken.
    pub(super) fn leave_rest(&self) {
        self.has_news.store(true, Ordering::Release);
    }

    /// Makes the descriptor unreadable until there is more.
    pub(super) fn silence(&self) {
        // Nothing to read is no error: somebody was about to write, and has told us before.
        let _ = rustix::io::read(&self.wakeup, &mut [0; 8]);
    }

    /// Readable when there are news.
    pub(super) fn wakeup(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }

    /// Takes the next event of the port.
    pub(super) fn take_event(&self) -> Option<Event> {
        // Nothing to read is no error: the event may have been taken before its signal.
        let _ = rustix::io::read(&self.reports, &mut [0; 8]);
        let event = self.events.pop();
        if !self.events.is_empty() {
            signal(&self.reports);
        }
        event
    }

    /// Readable while there are events.
    pub(super) fn reports(&self) -> BorrowedFd<'_> {
        self.reports.as_fd()
    }
}

/// The number of a queue pair. Dropping it ends the queue pair, for the worker and the peer.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) qpn: Qpn,
    pub(super) shared: Arc<Shared>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.shared.ask(Job::Leave(self.qpn));
    }
}

fn new_eventfd() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn signal(eventfd: &OwnedFd) {
    // The write fails only if the counter is full. Then it is readable already.
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}

/// Numbers of queue pairs have 24 bits.
const QPN_MASK: u32 = 0x00ff_ffff;
/// Real NICs assign no smaller ones.
const QPN_FIRST: u32 = 16;
