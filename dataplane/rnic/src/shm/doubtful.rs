//! Descriptors that may take long to close.
//!
//! A peer can give us any descriptor, such as that of a TCP connection that lingers when it is
//! closed; and to close a socket is to close the descriptors in what nobody has read from it. So
//! whatever comes from a peer, and each connection to one, is closed by a thread that has nothing
//! else to do. A peer that makes that thread wait costs us descriptors, but nobody waits with it;
//! and where many wait to be closed, nobody new is let in.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, LazyLock};
use std::thread;

use rustix::net::sockopt::set_socket_linger;

/// A descriptor that may take long to close.
#[derive(Debug)]
pub(super) struct Doubtful(Option<OwnedFd>);

impl From<OwnedFd> for Doubtful {
    fn from(descriptor: OwnedFd) -> Self {
        Self(Some(descriptor))
    }
}

impl AsFd for Doubtful {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("it is there until it is dropped").as_fd()
    }
}

impl Drop for Doubtful {
    fn drop(&mut self) {
        if let Some(descriptor) = self.0.take() {
            CLOSER.close(descriptor);
        }
    }
}

/// Whether so many descriptors wait to be closed that there must not be more of them.
pub(super) fn too_many_wait() -> bool {
    CLOSER.too_many_wait()
}

/// The thread that closes them.
struct Closer {
    /// None if there is no thread.
    descriptors: Option<Sender<OwnedFd>>,
    /// How many it has not closed yet.
    waiting: Arc<AtomicUsize>,
}

impl Closer {
    fn start() -> Self {
        let (sender, doubtful) = channel::<OwnedFd>();
        let waiting = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&waiting);
        let close = move || {
            for descriptor in doubtful {
                // A peer can say how long this lasts, and others wait behind it.
                let _ = set_socket_linger(&descriptor, None);
                drop(descriptor);
                left.fetch_sub(1, Ordering::Relaxed);
            }
        };
        let thread = thread::Builder::new().name("shm-close".into()).spawn(close);
        Self { descriptors: thread.ok().map(|_| sender), waiting }
    }

    fn close(&self, descriptor: OwnedFd) {
        match &self.descriptors {
            // The thread does not end before us.
            Some(descriptors) => {
                self.waiting.fetch_add(1, Ordering::Relaxed);
                drop(descriptors.send(descriptor));
            }
            // Somebody has to do it.
            None => drop(descriptor),
        }
    }

    fn too_many_wait(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > WAITING_MAX
    }
}

static CLOSER: LazyLock<Closer> = LazyLock::new(Closer::start);

/// More than come at once when the peers of a NIC leave, and few of those that a process may have.
const WAITING_MAX: usize = 4_096;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{now, slow_to_close};
    use super::*;

    #[test]
    fn nobody_waits_for_a_connection_that_lingers() {
        let ([ours, theirs], _listener) = slow_to_close(10);
        let start = now();
        let closer = Closer::start();
        closer.close(OwnedFd::from(ours));
        assert!(now().since(start) < Duration::from_secs(5));
        // The others wait for it; who brings more and more must not use up all that there are.
        closer.waiting.fetch_add(WAITING_MAX - 1, Ordering::Relaxed);
        assert!(!closer.too_many_wait());
        closer.close(OwnedFd::from(theirs));
        assert!(closer.too_many_wait());
    }
}
