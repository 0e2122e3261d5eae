//! Level-triggered epoll with tokens: what `serve` and `load` wait on.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::failure::{Doing as _, Result};

/// Descriptors, each with the token its owner knows it by.
pub(crate) struct Readiness {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

/// What a descriptor is watched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    Read,
    Write,
}

impl Interest {
    fn flags(self) -> epoll::EventFlags {
        match self {
            Self::Read => epoll::EventFlags::IN,
            Self::Write => epoll::EventFlags::OUT,
        }
    }
}

impl Readiness {
    /// Watches nothing yet.
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
    /// When the kernel refuses, for want of memory.
    pub(crate) fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), interest.flags())
            .doing(|| "epoll_ctl".into())
    }

    /// Changes what a watched `fd` is watched for.
    ///
    /// # Errors
    ///
    /// When `fd` is not watched.
    pub(crate) fn change(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<()> {
        epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(token), interest.flags())
            .doing(|| "epoll_ctl".into())
    }

    /// Waits, at most `timeout`, and puts the tokens of what is ready or broken into `ready`.
    ///
    /// # Errors
    ///
    /// None that a caller can cause; a signal is no error.
    pub(crate) fn wait(&mut self, timeout: Duration, ready: &mut Vec<u64>) -> Result<()> {
        ready.clear();
        self.events.clear();
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).expect("timeouts are seconds, not ages"),
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
