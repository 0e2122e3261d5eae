//! Descriptors that may take long to close.
//!
//! A peer can give us any descriptor, such as that of a TCP connection that lingers when it is
//! closed, or of a file that the peer itself serves; and to close a socket is to close the
//! descriptors in what nobody has read from it. So whatever comes from a peer, and each connection
//! to one, is closed by a thread that has nothing else to do.
//!
//! A peer can make such a thread wait for ever. So each process that we have to do with has threads
//! of its own, one for our connections to it and one for what it has sent, and nobody else waits
//! with it. A process for which much waits to be closed is not heard any more. It can still
//! connect, and each connection with something unread takes a descriptor, so there is a limit for
//! all of them together, beyond which nobody new is let in.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::net::sockopt::set_socket_linger;
use rustix::net::{Shutdown, shutdown};
use smcr_os::credentials;

/// A descriptor that may take long to close.
#[derive(Debug)]
pub(super) struct Doubtful {
    descriptor: Option<OwnedFd>,
    source: Source,
    kind: Kind,
}

/// The process that a descriptor comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Source {
    pub(super) user: u32,
    /// Zero for all that we cannot see, because they live in other containers.
    process: u32,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A connection to the source.
    Connection,
    /// What the source has sent.
    Gift,
}

impl From<OwnedFd> for Doubtful {
    /// A connection to a peer.
    fn from(socket: OwnedFd) -> Self {
        let source = Source::at_the_end_of(socket.as_fd());
        Self { descriptor: Some(socket), source, kind: Kind::Connection }
    }
}

impl Doubtful {
    /// What has come by a connection.
    pub(super) fn by(connection: &Self, descriptor: OwnedFd) -> Self {
        Self { descriptor: Some(descriptor), source: connection.source, kind: Kind::Gift }
    }

    /// Where it comes from.
    pub(super) fn source(&self) -> Source {
        self.source
    }

    /// As if it came from another process.
    #[cfg(test)]
    pub(super) fn of(self, source: Source) -> Self {
        let mut it = self;
        it.source = source;
        it
    }
}

impl AsFd for Doubtful {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_ref().expect("it is there until it is dropped").as_fd()
    }
}

impl Drop for Doubtful {
    fn drop(&mut self) {
        let Some(descriptor) = self.descriptor.take() else { return };
        match self.kind {
            Kind::Connection => {
                // The peer need not wait for our thread to hear that this is all.
                let _ = shutdown(&descriptor, Shutdown::Both);
                CONNECTIONS.close(self.source, descriptor);
            }
            Kind::Gift => GIFTS.close(self.source, descriptor),
        }
    }
}

impl Source {
    #[cfg(test)]
    pub(super) fn new(user: u32, process: u32) -> Self {
        Self { user, process }
    }

    fn at_the_end_of(socket: BorrowedFd<'_>) -> Self {
        let found = credentials::of_peer(socket);
        found.map_or(ANYBODY, |found| Self { user: found.uid, process: found.pid })
    }

    /// Whether so much of it waits to be closed that there must not be more.
    pub(super) fn has_too_much(self) -> bool {
        CONNECTIONS.waiting_of(self) + GIFTS.waiting_of(self) > OF_A_SOURCE_MAX
    }
}

/// Whether so much waits to be closed that nobody new must be let in.
pub(super) fn too_many_wait() -> bool {
    CONNECTIONS.waiting() + GIFTS.waiting() > WAITING_MAX
}

/// What is to be closed, by the source that may make us wait.
#[derive(Debug)]
struct Closers(Mutex<BTreeMap<Source, Queue>>);

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<OwnedFd>,
    has_thread: bool,
}

impl Closers {
    const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    fn close(&'static self, source: Source, descriptor: OwnedFd) {
        let mut queues = self.lock();
        let source = home(&queues, source);
        let queue = queues.entry(source).or_default();
        queue.waiting.push_back(descriptor);
        if std::mem::replace(&mut queue.has_thread, true) {
            return;
        }
        drop(queues);
        let thread = thread::Builder::new().name("shm-close".into()).stack_size(STACK_BYTES);
        if thread.spawn(move || self.serve(source)).is_err() {
            // The next descriptor of this source tries again.
            self.lock().entry(source).or_default().has_thread = false;
        }
    }

    /// Closes everything of a source.
    fn serve(&self, source: Source) {
        loop {
            let mut queues = self.lock();
            let next = queues.get_mut(&source).and_then(|queue| queue.waiting.pop_front());
            let Some(descriptor) = next else {
                queues.remove(&source);
                return;
            };
            drop(queues);
            // A peer can say how long this lasts.
            let _ = set_socket_linger(&descriptor, None);
            drop(descriptor);
        }
    }

    fn waiting(&self) -> usize {
        self.lock().values().map(|queue| queue.waiting.len()).sum()
    }

    fn waiting_of(&self, source: Source) -> usize {
        let queues = self.lock();
        queues.get(&home(&queues, source)).map_or(0, |queue| queue.waiting.len())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Source, Queue>> {
        // Whoever panicked with it left it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whose queue a descriptor is in. Nobody can have so many threads that others get none: beyond
/// some processes of a user, the others share one, and beyond some users, all others do.
fn home(queues: &BTreeMap<Source, Queue>, source: Source) -> Source {
    let all_of_user = Source { process: 0, ..source }..=Source { process: u32::MAX, ..source };
    let of_user = queues.range(all_of_user).count();
    let has_room = |it: &Source| {
        queues.contains_key(it)
            || (queues.len() < THREADS_MAX && (of_user < THREADS_OF_A_USER_MAX || it.process == 0))
    };
    [source, Source { process: 0, ..source }].into_iter().find(has_room).unwrap_or(ANYBODY)
}

static CONNECTIONS: Closers = Closers::new();
static GIFTS: Closers = Closers::new();

/// Stands for all of whom we know nothing. (The kernel gives no user this number.)
const ANYBODY: Source = Source { user: u32::MAX, process: 0 };
const THREADS_MAX: usize = 64;
const THREADS_OF_A_USER_MAX: usize = 16;
/// A thread that only closes needs little.
const STACK_BYTES: usize = 64 << 10;
/// More than come at once when the queue pairs of a process leave.
const OF_A_SOURCE_MAX: usize = 2_048;
/// More than come at once when the peers of a NIC leave, and few of those that a process may have.
const WAITING_MAX: usize = 4_096;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::pipe::pipe;

    use super::super::tests::{now, readable, slow_to_close};
    use super::*;

    static CLOSERS: Closers = Closers::new();

    /// What comes of one source is closed, also while another one makes us wait.
    #[test]
    fn nobody_waits_for_a_connection_that_lingers() {
        let [slow, quick] = [Source::new(1, 2), Source::new(1, 3)];
        let ([ours, _theirs], _listener) = slow_to_close(10);
        let start = now();
        CLOSERS.close(slow, OwnedFd::from(ours));
        let pipes = [slow, quick].map(|source| {
            let (reader, writer) = pipe().unwrap();
            CLOSERS.close(source, writer);
            reader
        });
        while !readable(pipes[1].as_fd()) || CLOSERS.waiting_of(slow) > 1 {
            assert!(now().since(start) < Duration::from_secs(5));
        }
        assert!(!readable(pipes[0].as_fd()), "it is behind the other one");
        assert_eq!([CLOSERS.waiting_of(slow), CLOSERS.waiting_of(quick)], [1, 0]);
        assert!(CLOSERS.waiting() == 1 && now().since(start) < Duration::from_secs(5));
    }

    /// Threads are few, whoever comes.
    #[test]
    fn those_who_are_many_share_a_thread() {
        let mut queues = BTreeMap::new();
        let all = |users: u32| (0..users).flat_map(|user| (1..100).map(move |it| (user, it)));
        for (user, process) in all(2) {
            queues.entry(home(&queues, Source::new(user, process))).or_default();
        }
        assert_eq!(queues.len(), 2 * (THREADS_OF_A_USER_MAX + 1));
        assert_eq!(home(&queues, Source::new(0, 99)), Source::new(0, 0));
        assert_eq!(home(&queues, Source::new(9, 99)), Source::new(9, 99));
        for (user, process) in all(200) {
            queues.entry(home(&queues, Source::new(user, process))).or_default();
        }
        assert_eq!(queues.len(), THREADS_MAX + 1);
        assert_eq!(home(&queues, Source::new(199, 1)), ANYBODY);
        assert_eq!(home(&queues, Source::new(0, 1)), Source::new(0, 1));
    }
}
