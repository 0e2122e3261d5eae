//! Level-triggered epoll with tokens, on which `serve` and `load` wait.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::failure::{Doing as _, Result};

/// A set of watched descriptors, each with a token of its owner.
pub(crate) struct Readiness {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

/// The events for which a descriptor is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    Read,
    Write,
    Both,
}

impl Interest {
    fn flags(self) -> epoll::EventFlags {
        match self {
            Self::Read => epoll::EventFlags::IN,
            Self::Write => epoll::EventFlags::OUT,
            Self::Both => epoll::EventFlags::IN | epoll::EventFlags::OUT,
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
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).doing(|| "epoll_create".into())?;
        Ok(Self { epoll, events: Vec::with_capacity(256) })
    }

    /// Watches `fd` until it is closed; its events carry `token`.
    ///
    /// # Errors
    ///
    /// When the kernel has no memory for it.
    pub(crate) fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), interest.flags())
            .doing(|| "epoll_ctl".into())
    }

    /// Changes the events for which a watched `fd` is watched.
    ///
    /// # Errors
    ///
    /// When `fd` is not watched.
    pub(crate) fn change(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<()> {
        epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(token), interest.flags())
            .doing(|| "epoll_ctl".into())
    }

    /// Waits, at most `timeout`, and puts the tokens of ready or broken descriptors into `ready`.
    ///
    /// # Errors
    ///
    /// As `epoll_wait(2)`, which does not happen here. A signal is no error.
    pub(crate) fn wait(&mut self, timeout: Duration, ready: &mut Vec<u64>) -> Result<()> {
        ready.clear();
        self.events.clear();
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).expect("timeouts are a few seconds"),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).doing(|| "epoll_wait".into()),
        }
        ready.extend(self.events.iter().map(|event| event.data.u64()));
        Ok(())
    }
}
