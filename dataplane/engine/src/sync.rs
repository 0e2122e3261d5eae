//! The primitives with which threads of this crate meet.
//!
//! `mailbox`, `counters`, `gauges` and `owners` take them from here and from nowhere else, so that
//! `tests/loom` can put models of them in their place, and try every order of events.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};
pub(crate) use smcr_rnic::queue::Queue;

/// What a sleeping thread waits for, as epoll wants it.
pub(crate) type Descriptor<'a> = BorrowedFd<'a>;

/// Ends the sleep of a thread: an eventfd, readable from a ring to the next count.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?))
    }

    pub(crate) fn descriptor(&self) -> Descriptor<'_> {
        self.0.as_fd()
    }

    pub(crate) fn ring(&self) {
        // Fails only where the count would overflow, which 2^64 rings would take.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// How often it was rung since it was last counted.
    pub(crate) fn count(&self) -> u64 {
        let mut count = [0; 8];
        // Fails where nobody has rung.
        match rustix::io::read(&self.0, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }
}
