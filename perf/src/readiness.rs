//! Level-triggered epoll with tokens, on which `serve` and `load` wait. It is libc's, which a
//! preload library sees.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use smcr_os::epoll::{Epoll, Watched};

use crate::failure::{Doing as _, Result};

/// A set of watched descriptors, each with a token of its owner.
pub(crate) struct Readiness {
    epoll: Epoll,
}

/// The events for which a descriptor is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    Read,
    Write,
    Both,
}

impl Interest {
    fn watched(self) -> Watched {
        match self {
            Self::Read => Watched { readable: true, writable: false },
            Self::Write => Watched { readable: false, writable: true },
            Self::Both => Watched { readable: true, writable: true },
        }
    }
}

impl Readiness {
    /// Creates an empty set.
    ///
    /// # Errors
    ///
    /// When the process is out of descriptors.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { epoll: Epoll::new().doing(|| "epoll_create".into())? })
    }

    /// Watches `fd` until it is closed; its events carry `token`.
    ///
    /// # Errors
    ///
    /// When the kernel has no memory for it.
    pub(crate) fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<()> {
        self.epoll.add(fd, token, interest.watched()).doing(|| "epoll_ctl".into())
    }

    /// Changes the events for which a watched `fd` is watched.
    ///
    /// # Errors
    ///
    /// When `fd` is not watched.
    pub(crate) fn change(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<()> {
        self.epoll.change(fd, token, interest.watched()).doing(|| "epoll_ctl".into())
    }

    /// Waits, at most `timeout`, and puts the tokens of ready or broken descriptors into `ready`.
    ///
    /// # Errors
    ///
    /// As `epoll_wait(2)`, which does not happen here. A signal is no error.
    pub(crate) fn wait(&mut self, timeout: Duration, ready: &mut Vec<u64>) -> Result<()> {
        ready.clear();
        match self.epoll.wait(timeout) {
            Ok(found) => ready.extend(found),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error).doing(|| "epoll_wait".into()),
        }
        Ok(())
    }
}
