//! The thread that makes the calls which may take long.
//!
//! To fail or destroy a queue pair, the driver waits for the device. Neither poller nor control
//! thread may wait for it, so they leave jobs here. Jobs are done in the order they came. There are
//! at most two for each queue pair. To connect takes longer: see `connects`.
//!
//! The worker also listens to the device: to its events, and to the folder of its node. A driver
//! without hot removal, such as the soft RNIC of Linux, reports nothing when its device goes. The
//! kernel then only takes away the node, and waits until nobody has the device open.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::thread;

use crossbeam_queue::SegQueue;
use rdma_core::{AsyncEvent, Context, PortEvent, QueuePair};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::inotify;

use super::connects::{Connect, Connects};
use super::rnic::Protection;
use crate::{ConnectError, Event};

/// What the worker is asked to do. Each job brings its own hold on the queue pair.
#[derive(Debug)]
pub(super) enum Job {
    /// Bring it to the state ERR.
    Fail(Arc<QueuePair>),
    /// Destroy it, and give up its hold on its domain. The giver keeps no hold on it.
    Destroy(Arc<QueuePair>, Arc<Protection>),
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
    connects: Connects,
    /// Somebody else than the device has found that it is dead.
    condemned: AtomicBool,
    /// An eventfd that wakes the worker.
    work: OwnedFd,
    /// The worker has done something that the fabric has not looked at.
    news: AtomicBool,
    /// An eventfd that wakes the fabric.
    wakeup: OwnedFd,
    /// How many of the two halves are left.
    halves: AtomicU32,
    /// The device has gone. Everything of it must be given up.
    gone: AtomicBool,
    events: SegQueue<Event>,
    /// An eventfd that is readable while there are events.
    reports: OwnedFd,
}

impl Progress {
    /// Nobody wants the connection any more.
    pub(super) fn cancel(&self) {
        self.0.store(2, Ordering::Release);
    }

    pub(super) fn stage(&self) -> Stage {
        match self.0.load(Ordering::Acquire) {
            0 => Stage::Connecting,
            1 => Stage::Connected,
            _ => Stage::Unreachable,
        }
    }
}

impl Shared {
    /// Starts a worker, which reports what happens to port `port`. It ends when both halves have
    /// left.
    pub(super) fn start(context: &Arc<Context>, port: u8) -> io::Result<Arc<Self>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let shared = Arc::new(Self {
            jobs: SegQueue::new(),
            connects: Connects::default(),
            condemned: AtomicBool::new(false),
            work: eventfd(0, flags)?,
            news: AtomicBool::new(false),
            wakeup: eventfd(0, flags)?,
            halves: AtomicU32::new(2),
            gone: AtomicBool::new(false),
            events: SegQueue::new(),
            reports: eventfd(0, flags)?,
        });
        let own = Arc::clone(&shared);
        let (node, folder) = (context.node(), watch()?);
        let device = Watched { context: Arc::clone(context), port, node, folder };
        thread::Builder::new().name("verbs".into()).spawn(move || own.work(device))?;
        Ok(shared)
    }

    /// Leaves a job. Does not block.
    pub(super) fn ask(&self, job: Job) {
        self.jobs.push(job);
        signal(&self.work);
    }

    /// Leaves a queue pair to be connected.
    pub(super) fn connect(self: &Arc<Self>, connect: Connect) -> Result<(), ConnectError> {
        self.connects.ask(connect, self)
    }

    /// Connects the queue pair that has waited longest. Returns false if none waits.
    pub(super) fn connect_next(&self) -> bool {
        let Some(Connect { pair, peer, progress }) = self.connects.take() else { return false };
        let is_wanted = progress.stage() == Stage::Connecting;
        let stage = if is_wanted && pair.connect(&peer).is_ok() { 1 } else { 2 };
        // If it was released meanwhile, this destroys it.
        drop(pair);
        progress.0.store(stage, Ordering::Release);
        self.tell_fabric();
        true
    }

    /// The caller has found that the device is dead. The worker says so to all.
    pub(super) fn condemn(&self) {
        if !self.condemned.swap(true, Ordering::AcqRel) {
            signal(&self.work);
        }
    }

    /// Whether the worker has done something since the last call.
    pub(super) fn take_news(&self) -> bool {
        if !self.has_news() {
            return false;
        }
        self.forget_signal();
        self.news.swap(false, Ordering::AcqRel)
    }

    /// Makes the wakeup unreadable until the worker signals again. Whoever is about to sleep calls
    /// it, and then looks for news: the worker publishes news before it signals.
    pub(super) fn forget_signal(&self) {
        // Nothing to read is no error.
        let _ = rustix::io::read(&self.wakeup, &mut [0; 8]);
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

    /// Whether the device has gone.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
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

    fn tell_fabric(&self) {
        self.news.store(true, Ordering::Release);
        signal(&self.wakeup);
    }

    fn work(&self, device: Watched) {
        let mut device = Some(device);
        loop {
            while let Some(job) = self.jobs.pop() {
                carry_out(job);
                self.tell_fabric();
            }
            if self.halves.load(Ordering::Acquire) == 0 {
                return;
            }
            match &device {
                Some(watched) => watched.wait_beside(&self.work),
                None => {
                    // An interrupted call is made again: there is no job then.
                    let _ = poll(&mut [PollFd::new(&self.work, PollFlags::IN)], None);
                }
            }
            // Before we look at what it may be about: a signal that comes later is for later.
            let _ = rustix::io::read(&self.work, &mut [0; 8]);
            if let Some(watched) = &device {
                let (events, is_gone) = watched.look();
                let is_gone = is_gone || self.condemned.load(Ordering::Acquire);
                events.into_iter().for_each(|event| self.events.push(event));
                if is_gone {
                    self.gone.store(true, Ordering::Release);
                    self.events.push(Event::Gone);
                    self.tell_fabric();
                    device = None;
                }
                if !self.events.is_empty() {
                    signal(&self.reports);
                }
            }
        }
    }
}

/// A device, and where to see that it goes.
struct Watched {
    context: Arc<Context>,
    /// The number of our port. The device may have others, which are not ours to report.
    port: u8,
    /// The file name of its node.
    node: String,
    /// An inotify descriptor for the folder of all nodes, if there is such a folder.
    folder: Option<OwnedFd>,
}

impl Watched {
    /// Waits until there is work, or something to [`look`](Self::look) at.
    fn wait_beside(&self, work: &OwnedFd) {
        let device = self.context.event_descriptor();
        let mut all = vec![PollFd::new(work, PollFlags::IN), PollFd::new(&device, PollFlags::IN)];
        all.extend(self.folder.iter().map(|folder| PollFd::new(folder, PollFlags::IN)));
        // An interrupted call is made again: there is nothing to see then.
        let _ = poll(&mut all, None);
    }

    /// What has happened to the port, and whether the device has gone.
    fn look(&self) -> (Vec<Event>, bool) {
        let (mut events, mut is_gone) = (Vec::new(), self.node_has_gone());
        while let Some(event) = self.context.event() {
            match event {
                AsyncEvent::Port(number, _) if number != self.port => {}
                AsyncEvent::Port(_, PortEvent::Active) => events.push(Event::Up),
                AsyncEvent::Port(_, PortEvent::Error) => events.push(Event::Down),
                AsyncEvent::Port(_, PortEvent::GidsChanged) => events.push(Event::Readdressed),
                AsyncEvent::DeviceFatal => is_gone = true,
                // Of single queue pairs: their entries say it, too.
                AsyncEvent::Other(_) => {}
            }
        }
        (events, is_gone)
    }

    fn node_has_gone(&self) -> bool {
        let Some(folder) = &self.folder else { return false };
        let mut room = [std::mem::MaybeUninit::uninit(); 1_024];
        let mut reader = inotify::Reader::new(folder, &mut room);
        let mut is_gone = false;
        while let Ok(event) = reader.next() {
            is_gone |=
                event.file_name().is_some_and(|name| name.to_bytes() == self.node.as_bytes());
        }
        is_gone
    }
}

/// Watches the folder of all nodes for those that go.
fn watch() -> io::Result<Option<OwnedFd>> {
    if !std::path::Path::new(NODES).exists() {
        return Ok(None);
    }
    let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
    let folder = inotify::init(flags)?;
    inotify::add_watch(&folder, NODES, inotify::WatchFlags::DELETE)?;
    Ok(Some(folder))
}

/// The folder of the nodes of all RDMA devices.
const NODES: &str = "/dev/infiniband";

fn carry_out(job: Job) {
    match job {
        Job::Fail(pair) => {
            // Only a dead device refuses, and then nothing is sent either.
            let _ = pair.fail();
        }
        Job::Destroy(pair, protection) => {
            drop(pair);
            drop(protection);
        }
    }
}

fn signal(eventfd: &OwnedFd) {
    // The write fails only if the counter is full. Then it is readable already.
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The worker publishes its news, the poller takes them, and then the worker signals. Nothing
    /// took such a signal, so the poller burnt a core until the next news.
    #[test]
    fn a_signal_for_news_that_were_taken_keeps_nobody_awake() {
        let device = rdma_core_fake::device([127, 31, 0, 1]);
        let context = Context::open(rdma_core_fake::library(), &device).unwrap();
        let shared = Shared::start(&context, 1).unwrap();
        shared.news.store(true, Ordering::Release);
        assert!(shared.take_news());
        signal(&shared.wakeup);

        shared.forget_signal();
        assert!(!shared.has_news());
        let at_once = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let wakeup = shared.wakeup();
        let readable = poll(&mut [PollFd::new(&wakeup, PollFlags::IN)], Some(&at_once)).unwrap();
        assert_eq!(readable, 0, "the poller would not sleep");

        // News that come after the look have a signal that comes after it.
        shared.tell_fabric();
        let readable = poll(&mut [PollFd::new(&wakeup, PollFlags::IN)], Some(&at_once)).unwrap();
        assert_eq!(readable, 1);
        shared.leave();
        shared.leave();
    }

    /// The poller found that the device is dead just after the worker had looked for that, and the
    /// worker then swallowed the signal: nobody was told, and the device stayed open.
    #[test]
    fn a_device_that_is_declared_dead_at_any_moment_is_given_up() {
        let device = rdma_core_fake::device([127, 31, 0, 2]);
        for round in 0..4_000 {
            let context = Context::open(rdma_core_fake::library(), &device).unwrap();
            let shared = Shared::start(&context, 1).unwrap();
            // The worker wakes up for an event. Each round waits longer before the declaration.
            rdma_core_fake::report(&device, PORT_ACTIVE);
            (0..round % 500 * 10).for_each(|_| std::hint::spin_loop());
            shared.condemn();
            for attempt in 0.. {
                if shared.is_gone() {
                    break;
                }
                assert!(attempt < 5_000, "nobody was told in round {round}");
                thread::sleep(std::time::Duration::from_micros(100));
            }
            shared.leave();
            shared.leave();
        }
    }

    /// The number that the headers of libibverbs give it.
    const PORT_ACTIVE: i32 = 9;
}
