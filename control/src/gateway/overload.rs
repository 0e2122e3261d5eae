//! What the control thread does when something has run out.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, getrlimit};
use smcr_proto::Instant;

/// A spare file descriptor, and when it was last logged that something has run out.
#[derive(Debug)]
pub(super) struct Overload {
    /// Closed for a moment when the process has no descriptor left.
    spare: Option<OwnedFd>,
    logged_at: Option<Instant>,
}

impl Overload {
    /// Opens the spare descriptor.
    pub(super) fn new() -> Self {
        Self { spare: spare(), logged_at: None }
    }

    /// Calls `act` while the spare descriptor is closed, so that `act` can open one. It must close
    /// what it opens.
    pub(super) fn with_spare<T>(&mut self, act: impl FnOnce() -> T) -> T {
        self.spare = None;
        let result = act();
        self.spare = spare();
        result
    }

    /// Logs what has run out, and the consequence for new connections of a listener.
    pub(super) fn log(&mut self, now: Instant, listener: &str, what: &str) {
        if self.logged_at.is_none_or(|at| now.since(at) >= LOG_EVERY) {
            self.logged_at = Some(now);
            tracing::warn!(listener, "out of {what}");
        }
    }
}

/// How many descriptors the process may have.
pub(super) fn descriptors_max() -> usize {
    let most = getrlimit(Resource::Nofile).current;
    most.and_then(|most| most.try_into().ok()).unwrap_or(usize::MAX)
}

fn spare() -> Option<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC).ok()
}

/// The shortest time between two of these log lines: a limit that is reached once is reached often.
const LOG_EVERY: Duration = Duration::from_secs(1);
