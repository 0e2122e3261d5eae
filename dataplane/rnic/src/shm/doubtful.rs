//! Descriptors that may take long to close.
//!
//! A peer can give us any descriptor, such as that of a TCP connection that lingers when it is
//! closed; and to close a socket is to close the descriptors in what nobody has read from it. So
//! whatever comes from a peer, and each connection to one, is closed by a thread that has nothing
//! else to do. A peer that makes that thread wait costs us descriptors, but nobody waits with it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;

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
        static CLOSER: OnceLock<Option<Sender<OwnedFd>>> = OnceLock::new();
        let closer = CLOSER.get_or_init(|| {
            let (closer, doubtful) = channel::<OwnedFd>();
            let thread = thread::Builder::new().name("shm-close".into());
            thread.spawn(move || doubtful.iter().for_each(drop)).ok().map(|_| closer)
        });
        let Some(descriptor) = self.0.take() else { return };
        match closer {
            // The thread never ends.
            Some(closer) => drop(closer.send(descriptor)),
            // Without a thread, somebody has to do it.
            None => drop(descriptor),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use rustix::io::Errno;
    use rustix::net::sockopt::set_socket_linger;

    use super::super::tests::now;
    use super::*;

    /// Whoever closes this waits for ten seconds for a peer that does not read.
    #[test]
    fn nobody_waits_for_a_connection_that_lingers() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let lingering = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        lingering.set_nonblocking(true).unwrap();
        while rustix::io::write(&lingering, &[0; 65_536]) != Err(Errno::AGAIN) {}
        set_socket_linger(&lingering, Some(Duration::from_secs(10))).unwrap();
        lingering.set_nonblocking(false).unwrap();
        let start = now();
        drop(Doubtful::from(OwnedFd::from(lingering)));
        assert!(now().since(start) < Duration::from_secs(5));
    }
}
