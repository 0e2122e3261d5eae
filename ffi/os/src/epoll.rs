//! An epoll by the functions of libc.
//!
//! Other crates make the system calls themselves, which a preload library does not see. Whoever is
//! to be measured with one waits by this.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// A set of watched descriptors, level-triggered, each with a token of its owner.
#[derive(Debug)]
pub struct Epoll {
    descriptor: OwnedFd,
    events: [libc::epoll_event; EVENTS_MAX],
}

/// What a descriptor is watched for, beside errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watched {
    /// That it can be read.
    pub readable: bool,
    /// That it can be written.
    pub writable: bool,
}

impl Epoll {
    /// An empty set.
    ///
    /// # Errors
    ///
    /// When the process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        // SAFETY: `epoll_create1` asks for nothing but a valid flag.
        let descriptor = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `from_raw_fd` asks for an open descriptor that nobody else owns: it is new.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Ok(Self { descriptor, events: [libc::epoll_event { events: 0, u64: 0 }; EVENTS_MAX] })
    }

    /// Watches `fd` until it is closed; its events carry `token`.
    ///
    /// # Errors
    ///
    /// As `epoll_ctl(2)`.
    pub fn add(&self, fd: impl AsFd, token: u64, watched: Watched) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd.as_fd(), token, watched)
    }

    /// Changes what a watched `fd` is watched for.
    ///
    /// # Errors
    ///
    /// As `epoll_ctl(2)`.
    pub fn change(&self, fd: impl AsFd, token: u64, watched: Watched) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd.as_fd(), token, watched)
    }

    fn control(
        &self,
        operation: i32,
        fd: BorrowedFd<'_>,
        token: u64,
        watched: Watched,
    ) -> io::Result<()> {
        let flag = |wanted: bool, flag: i32| if wanted { flag.cast_unsigned() } else { 0 };
        let events = flag(watched.readable, libc::EPOLLIN) | flag(watched.writable, libc::EPOLLOUT);
        let mut event = libc::epoll_event { events, u64: token };
        // SAFETY: `epoll_ctl` asks for open descriptors, which are borrowed, and for an event that
        // can be read, which is a live local.
        let result = unsafe {
            libc::epoll_ctl(self.descriptor.as_raw_fd(), operation, fd.as_raw_fd(), &mut event)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Waits, at most `timeout`, and hands over the tokens of ready or broken descriptors.
    ///
    /// # Errors
    ///
    /// As `epoll_wait(2)`.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<impl Iterator<Item = u64> + '_> {
        let timeout = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
        let room = i32::try_from(EVENTS_MAX).expect("a few hundred");
        // SAFETY: `epoll_wait` asks for an open descriptor, which is ours, and for room for so many
        // events, which `events` has.
        let found = unsafe {
            libc::epoll_wait(self.descriptor.as_raw_fd(), self.events.as_mut_ptr(), room, timeout)
        };
        let found = usize::try_from(found).map_err(|_| io::Error::last_os_error())?;
        Ok(self.events[..found].iter().map(|event| event.u64))
    }
}

const EVENTS_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_is_ready_is_told() {
        let (mut one, other) = UnixStream::pair().unwrap();
        let mut epoll = Epoll::new().unwrap();
        let read = Watched { readable: true, writable: false };
        epoll.add(&other, 7, read).unwrap();
        assert_eq!(epoll.wait(Duration::ZERO).unwrap().count(), 0);
        one.write_all(b"x").unwrap();
        assert_eq!(epoll.wait(Duration::from_secs(5)).unwrap().collect::<Vec<_>>(), [7]);
        let write = Watched { readable: false, writable: true };
        epoll.change(&other, 8, write).unwrap();
        assert_eq!(epoll.wait(Duration::from_secs(5)).unwrap().collect::<Vec<_>>(), [8]);
        assert!(epoll.add(&other, 9, read).is_err());
    }
}
