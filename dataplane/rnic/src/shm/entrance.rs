//! The socket to which peers connect.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::doubtful::{self, Doubtful};

/// The socket to which peers connect, in a set of descriptors that a worker watches.
pub(super) struct Entrance {
    listener: OwnedFd,
    token: u64,
    is_closed: bool,
}

impl Entrance {
    /// Adds a socket that listens to those that are watched.
    pub(super) fn new(
        listener: OwnedFd,
        epoll: BorrowedFd<'_>,
        token: u64,
    ) -> rustix::io::Result<Self> {
        let data = epoll::EventData::new_u64(token);
        epoll::add(epoll, &listener, data, epoll::EventFlags::IN)?;
        Ok(Self { listener, token, is_closed: false })
    }

    /// Nobody is let in until it opens again.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// The next one who calls. If no descriptors are left, the entrance closes: to look at once
    /// again would not help.
    pub(super) fn accept(&mut self, epoll: BorrowedFd<'_>) -> Option<Doubtful> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        while !doubtful::too_many_wait() {
            match accept_with(&self.listener, flags).map(Doubtful::from) {
                // There must not be more of what it may have us close.
                Ok(socket) if socket.source().has_too_much() => {}
                Ok(socket) => return Some(socket),
                // The next turn goes on.
                Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => return None,
                Err(_) => break,
            }
        }
        self.is_closed = true;
        self.watch(epoll, epoll::EventFlags::empty());
        None
    }

    /// Some time has passed.
    pub(super) fn open(&mut self, epoll: BorrowedFd<'_>) {
        if std::mem::take(&mut self.is_closed) {
            self.watch(epoll, epoll::EventFlags::IN);
        }
    }

    fn watch(&self, epoll: BorrowedFd<'_>, flags: epoll::EventFlags) {
        // It is watched as long as it is there; this changes only what for.
        let data = epoll::EventData::new_u64(self.token);
        let _ = epoll::modify(epoll, &self.listener, data, flags);
    }
}
