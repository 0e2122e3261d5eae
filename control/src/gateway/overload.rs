//! What the control thread does when something has run out.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use smcr_proto::Instant;

/// A spare descriptor, and when it was last said that something has run out.
#[derive(Debug)]
pub(super) struct Overload {
    /// Given up for a moment when there are no more.
    spare: Option<OwnedFd>,
    logged_at: Option<Instant>,
}

impl Overload {
    /// Takes a descriptor to spare.
    pub(super) fn new() -> Self {
        Self { spare: spare(), logged_at: None }
    }

    /// Does something for which there is no descriptor left. It must close what it opens.
    pub(super) fn with_spare<T>(&mut self, act: impl FnOnce() -> T) -> T {
        self.spare = None;
        let result = act();
        self.spare = spare();
        result
    }

    /// Says what has run out, and what follows for new connections of a listener.
    pub(super) fn log(&mut self, now: Instant, listener: &str, what: &str) {
        if self.logged_at.is_none_or(|at| now.since(at) >= LOG_EVERY) {
            self.logged_at = Some(now);
            tracing::warn!(listener, "out of {what}");
        }
    }
}

fn spare() -> Option<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC).ok()
}

/// A limit that is reached is reached often; once in a while is enough to know.
const LOG_EVERY: Duration = Duration::from_secs(1);
