//! The thread that makes the calls which may take long.
//!
//! To connect, the kernel looks for the peer's Ethernet address: a second and more, if nobody has
//! it. To fail or destroy a queue pair, the driver waits for the device. Neither poller nor control
//! thread may wait for these, so they leave jobs here. Jobs are done in the order they came.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::thread;

use crossbeam_queue::SegQueue;
use rdma_core::{Peer, QueuePair};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

/// What the worker is asked to do. Each job brings its own hold on the queue pair.
#[derive(Debug)]
pub(super) enum Job {
    /// Connect it, and say how that went.
    Connect { pair: Arc<QueuePair>, peer: Peer, progress: Arc<Progress> },
    /// Bring it to the state ERR.
    Fail(Arc<QueuePair>),
    /// Destroy it. The giver keeps no hold on it.
    Destroy(Arc<QueuePair>),
}

/// How far the worker has come with a connection.
#[derive(Debug, Default)]
pub(super) struct Progress(AtomicU8);

/// The states of [`Progress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not done yet.
    Connecting,
    /// The queue pair is in RTS.
    Connected,
    /// The peer could not be reached.
    Unreachable,
}

/// What the halves of a NIC and its worker share.
#[derive(Debug)]
pub(super) struct Shared {
    jobs: SegQueue<Job>,
    /// An eventfd that wakes the worker.
    work: OwnedFd,
    /// The worker has done something that the fabric has not looked at.
    news: AtomicBool,
    /// An eventfd that wakes the fabric.
    wakeup: OwnedFd,
    /// How many of the two halves are left.
    halves: AtomicU32,
}

impl Progress {
    pub(super) fn stage(&self) -> Stage {
        match self.0.load(Ordering::Acquire) {
            0 => Stage::Connecting,
            1 => Stage::Connected,
            _ => Stage::Unreachable,
        }
    }
}

impl Shared {
    /// Starts a worker. It ends when both halves have left.
    pub(super) fn start() -> io::Result<Arc<Self>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let shared = Arc::new(Self {
            jobs: SegQueue::new(),
            work: eventfd(0, flags)?,
            news: AtomicBool::new(false),
            wakeup: eventfd(0, flags)?,
            halves: AtomicU32::new(2),
        });
        let own = Arc::clone(&shared);
        thread::Builder::new().name("verbs".into()).spawn(move || own.work())?;
        Ok(shared)
    }

    /// Leaves a job. Does not block.
    pub(super) fn ask(&self, job: Job) {
        self.jobs.push(job);
        signal(&self.work);
    }

    /// Whether the worker has done something since the last call.
    pub(super) fn take_news(&self) -> bool {
        if !self.news.load(Ordering::Acquire) {
            return false;
        }
        // Nothing to read is no error: the worker is about to write, and a later call reads it.
        let _ = rustix::io::read(&self.wakeup, &mut [0; 8]);
        self.news.swap(false, Ordering::AcqRel)
    }

    /// Whether [`take_news`](Self::take_news) would return true.
    pub(super) fn has_news(&self) -> bool {
        self.news.load(Ordering::Acquire)
    }

    /// Readable when there is news.
    pub(super) fn wakeup(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }

    /// One of the halves is dropped.
    pub(super) fn leave(&self) {
        self.halves.fetch_sub(1, Ordering::AcqRel);
        signal(&self.work);
    }

    fn work(&self) {
        loop {
            while let Some(job) = self.jobs.pop() {
                carry_out(job);
                self.news.store(true, Ordering::Release);
                signal(&self.wakeup);
            }
            if self.halves.load(Ordering::Acquire) == 0 {
                return;
            }
            let mut work = [PollFd::new(&self.work, PollFlags::IN)];
            // An interrupted call is made again: there is no job then.
            let _ = poll(&mut work, None);
            let _ = rustix::io::read(&self.work, &mut [0; 8]);
        }
    }
}

fn carry_out(job: Job) {
    match job {
        Job::Connect { pair, peer, progress } => {
            let stage = if pair.connect(&peer).is_ok() { 1 } else { 2 };
            progress.0.store(stage, Ordering::Release);
        }
        Job::Fail(pair) => {
            // Only a dead device refuses, and then nothing is sent either.
            let _ = pair.fail();
        }
        Job::Destroy(pair) => drop(pair),
    }
}

fn signal(eventfd: &OwnedFd) {
    // The write fails only if the counter is full. Then it is readable already.
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}
