//! How the two ends of a queue pair wake each other: by a connection that says nothing else.
//!
//! An end must not be able to make the other wait, so it may share nothing with it that has a state
//! or a lock of its own. An eventfd has a state for both ends, and a pipe has a lock: a peer that
//! moves what it hears to where there is no room keeps that lock for as long as it likes. Of a
//! connection of sockets, each process has its own end, and no copy of the other one.
//!
//! Descriptors can come by it, which may take long to close: they are left where they are.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendFlags, recv, recvmsg, send};

use super::doubtful::Doubtful;

/// One process's end.
#[derive(Debug)]
pub(super) struct Bell(Doubtful);

impl Bell {
    /// Wakes each other by this connection of packets, of which nobody has a copy.
    pub(super) fn over(connection: Doubtful) -> Self {
        Self(connection)
    }

    /// Readable when the peer has rung, or has gone.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Wakes the peer.
    pub(super) fn ring(&self) {
        // If there is no room, it has something to hear. If the peer has gone, it does not sleep.
        let _ = send(&self.0, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// Makes the descriptor unreadable, unless the peer has rung more than once. Returns false if
    /// it must not be heard any more, as the peer has gone, or has sent more than a sound.
    pub(super) fn silence(&self) -> bool {
        let mut sound = [0];
        // With no room for descriptors, the kernel says whether there are any. Only if we took the
        // packet, too, it would close them, while we wait.
        let look = recvmsg(
            &self.0,
            &mut [IoSliceMut::new(&mut sound)],
            &mut RecvAncillaryBuffer::default(),
            RecvFlags::PEEK | RecvFlags::DONTWAIT,
        );
        match look {
            Ok(seen) if seen.bytes == 0 || seen.flags.contains(ReturnFlags::CTRUNC) => false,
            // Nobody else takes packets, so it is the same one.
            Ok(_) => recv(&self.0, &mut sound, RecvFlags::DONTWAIT).is_ok(),
            Err(error) => error == Errno::AGAIN,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use rustix::pipe::{SpliceFlags, splice};

    use super::super::line::Line;
    use super::super::tests::{bells, now, readable, slow_to_close};
    use super::super::wire::Message;
    use super::*;

    #[test]
    fn each_end_hears_the_other_until_it_goes() {
        let [one, other] = bells();
        assert!(!readable(one.descriptor()) && !readable(other.descriptor()));
        one.ring();
        assert!(!readable(one.descriptor()) && readable(other.descriptor()));
        assert!(other.silence() && !readable(other.descriptor()));
        other.ring();
        other.ring();
        assert!(one.silence() && one.silence() && !readable(one.descriptor()));
        assert!(one.silence(), "there is nothing to hear");
        drop(other);
        assert!(readable(one.descriptor()) && !one.silence());
    }

    /// A peer never listens, or moves what it hears to where there is no room: of a pipe, it had
    /// the lock then. A poller that waited would stand still with all of its connections.
    #[test]
    fn a_peer_cannot_make_us_wait() {
        let [victim, peer] = bells();
        let (full, _other) = UnixStream::pair().unwrap();
        full.set_nonblocking(true).unwrap();
        while rustix::io::write(&full, &[0; 65_536]) != Err(Errno::AGAIN) {}
        full.set_nonblocking(false).unwrap();
        victim.ring();
        let (sender, done) = mpsc::channel();
        thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let hears = peer.descriptor();
                splice(hears, None, &full, None, 1, SpliceFlags::empty())
            });
            let start = now();
            while !waits.is_finished() && now().since(start) < Duration::from_millis(100) {
                thread::yield_now();
            }
            scope.spawn(move || {
                (0..20_000).for_each(|_| victim.ring());
                assert!(victim.silence(), "there is nothing to hear");
                drop(victim);
                sender.send(()).unwrap();
            });
            let in_time = done.recv_timeout(Duration::from_secs(10));
            full.shutdown(Shutdown::Both).unwrap();
            assert!(in_time.is_ok(), "it waits for its peer");
        });
    }

    /// What takes long to close must not be closed where pollers hear.
    #[test]
    fn descriptors_are_not_taken() {
        let [victim, peer] = bells();
        let ([slow, _kept], _listener) = slow_to_close(10);
        let line = Line { socket: peer.0, token: 0 };
        line.send(&Message::Welcome, &[slow.as_fd()]).unwrap();
        drop(slow);
        let start = now();
        assert!(readable(victim.descriptor()) && !victim.silence() && !victim.silence());
        drop(victim);
        assert!(now().since(start) < Duration::from_secs(5));
    }
}
