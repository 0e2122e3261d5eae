//! How the two ends of a queue pair wake each other: a pipe in each direction.
//!
//! An end must not be able to make the other wait, so it may share nothing with it that has a state
//! of its own. An eventfd has one for both ends. Of a pair of sockets, one process has made both;
//! and what comes by a socket can be a descriptor that takes long to close. Of a pipe, each process
//! opens its ends itself.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, open, readlink};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

/// The ends of both pipes that one process has.
#[derive(Debug)]
pub(super) struct Bell {
    /// Readable when the peer has rung.
    hear: OwnedFd,
    /// Where we ring.
    ring: OwnedFd,
}

impl Bell {
    /// New pipes: ours, and the ends for the peer, that by which it hears first.
    pub(super) fn pair() -> io::Result<(Self, [OwnedFd; 2])> {
        let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK;
        let (hear, theirs_to_ring) = pipe_with(flags)?;
        let (theirs_to_hear, ring) = pipe_with(flags)?;
        Ok((Self { hear, ring }, [theirs_to_hear, theirs_to_ring]))
    }

    /// What the peer has given us, opened once more, so that nobody else can change how we read and
    /// write.
    ///
    /// # Errors
    ///
    /// If it is something else, or a pipe of another user.
    pub(super) fn given([hear, ring]: [BorrowedFd<'_>; 2]) -> io::Result<Self> {
        let again = |descriptor: BorrowedFd<'_>, how| {
            let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
            // Of something else, even to open it might take as long as the peer likes.
            if !readlink(&path, Vec::new())?.to_bytes().starts_with(b"pipe:[") {
                return Err(Errno::INVAL);
            }
            open(&path, how | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
        };
        Ok(Self { hear: again(hear, OFlags::RDONLY)?, ring: again(ring, OFlags::WRONLY)? })
    }

    /// Readable when the peer has rung, or has gone.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.hear.as_fd()
    }

    /// Wakes the peer.
    pub(super) fn ring(&self) {
        // If the pipe is full, it is readable. If the peer has gone, it does not sleep.
        let _ = rustix::io::write(&self.ring, &[1]);
    }

    /// Makes the descriptor unreadable, unless the peer has rung very often. Returns false if it
    /// will never ring again, as it has gone.
    pub(super) fn silence(&self) -> bool {
        match rustix::io::read(&self.hear, &mut [0; 64]) {
            Ok(count) => count > 0,
            Err(error) => error == Errno::AGAIN,
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{fcntl_getfl, fcntl_setfl};

    use super::*;

    fn pair() -> (Bell, Bell, [OwnedFd; 2]) {
        let (own, theirs) = Bell::pair().unwrap();
        let peers = Bell::given([theirs[0].as_fd(), theirs[1].as_fd()]).unwrap();
        (own, peers, theirs)
    }

    #[test]
    fn each_end_hears_the_other_until_it_goes() {
        let (one, other, theirs) = pair();
        drop(theirs);
        let readable = super::super::tests::readable;
        assert!(!readable(one.descriptor()) && !readable(other.descriptor()));
        one.ring();
        assert!(!readable(one.descriptor()) && readable(other.descriptor()));
        assert!(other.silence() && !readable(other.descriptor()));
        other.ring();
        other.ring();
        assert!(one.silence() && one.silence() && !readable(one.descriptor()));
        drop(other);
        assert!(readable(one.descriptor()) && !one.silence());
    }

    /// A peer that has kept what it gave us makes it block, lets the pipe fill, and reads what we
    /// were to read: a poller that waited there would stand still with all of its connections.
    #[test]
    fn a_peer_cannot_make_us_wait() {
        let (_one, victim, theirs) = pair();
        for end in &theirs {
            let flags = fcntl_getfl(end).unwrap();
            fcntl_setfl(end, flags.difference(OFlags::NONBLOCK)).unwrap();
        }
        (0..200_000).for_each(|_| victim.ring());
        assert!(victim.silence(), "there is nothing to read");
    }

    #[test]
    fn what_is_no_pipe_is_refused() {
        let (_, theirs) = Bell::pair().unwrap();
        let (socket, _other) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::empty(),
            None,
        )
        .unwrap();
        let file = tempfile::tempfile().unwrap();
        for wrong in [socket.as_fd(), file.as_fd()] {
            assert!(Bell::given([theirs[0].as_fd(), wrong]).is_err());
            assert!(Bell::given([wrong, theirs[1].as_fd()]).is_err());
        }
    }
}
