//! A connection whose bytes go by rings, for tests.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};

use libc::{c_int, iovec};
use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socketpair};
use smcgate_door::Name;
use smcgate_rings::{Application, Gateway};
use smcr_os::Foreign as _;

use crate::ringed::{receive, send};
use crate::sys;
use crate::table::TABLE;

/// A connection whose bytes go by rings, and the gateway's half of it.
pub(crate) struct Pair {
    pub(crate) ours: OwnedFd,
    pub(crate) near: OwnedFd,
    pub(crate) gateway: Gateway,
}

impl Pair {
    pub(crate) fn new(connection: u64) -> Self {
        let (ours, near) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        let address = "127.0.0.1:1".parse().unwrap();
        let connection = u64::from(std::process::id()) << 32 | 1 << 31 | connection;
        let name = Name { connection, local: address, peer: address, rings: true };
        bind(&ours, &SocketAddrUnix::new_abstract_name(&name.encode()[1..]).unwrap()).unwrap();
        Gateway::prepare(ours.as_fd()).unwrap();
        let gateway = Gateway::create().unwrap();
        gateway.wake_up();
        let rings = Application::map(gateway.memory()).unwrap();
        TABLE.set_ringed(ours.as_raw_fd(), Some(rings), connection);
        Self { ours, near, gateway }
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.ours.as_raw_fd()
    }

    pub(crate) fn comes(&self, bytes: &[u8]) {
        let put = self.gateway.write(self.near.as_fd(), |span| {
            let mut done = 0;
            for piece in span.pieces() {
                let len = piece.len.min(bytes.len() - done);
                // SAFETY: the piece has so many bytes, and so has the slice.
                unsafe { piece.base.as_ptr().copy_from(bytes[done..].as_ptr(), len) };
                done += len;
            }
            done
        });
        assert_eq!(put.unwrap(), bytes.len());
    }

    /// What the gateway takes.
    pub(crate) fn goes(&self, most: usize) -> usize {
        let read = self.gateway.read(self.near.as_fd(), most, |span| span.len()).unwrap();
        self.gateway.hear(self.near.as_fd(), false);
        read
    }

    pub(crate) fn reads(&self, length: usize, flags: c_int) -> Result<Vec<u8>, c_int> {
        let mut bytes = vec![0_u8; length];
        let (first, second) = bytes.split_at_mut(length / 3);
        let parts = [first, second]
            .map(|part| iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() });
        // SAFETY: the parts are live exclusive slices.
        let result = unsafe { receive(self.fd(), &parts, flags) };
        let count = usize::try_from(result).map_err(|_| sys::errno())?;
        bytes.truncate(count);
        Ok(bytes)
    }

    pub(crate) fn writes(&self, bytes: &[u8], flags: c_int) -> Result<usize, c_int> {
        let (first, second) = bytes.split_at(bytes.len() / 3);
        let parts = [first, second]
            .map(|part| iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() });
        // SAFETY: the parts are live slices.
        let result = unsafe { send(self.fd(), &parts, flags) };
        usize::try_from(result).map_err(|_| sys::errno())
    }

    pub(crate) fn is(&self, events: PollFlags) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.ours, events)];
        let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&at_once)).unwrap();
        fds[0].revents().contains(events)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        TABLE.forget(self.fd());
    }
}
