//! When a thread that is not on its own core tries that again.

use std::time::Duration;

use smcr_proto::Instant;

use super::CALM;

/// When the own core is tried.
#[derive(Debug)]
pub(super) struct Homecoming {
    /// How long it must be well elsewhere before that.
    wait: Duration,
    /// Until when the last attempt, which failed, counts.
    kept_until: Instant,
}

impl Default for Homecoming {
    fn default() -> Self {
        Self { wait: WAIT_MIN, kept_until: Instant(0) }
    }
}

impl Homecoming {
    /// Whether to try it, when it has been well elsewhere since `since`.
    pub(super) fn is_due(&self, now: Instant, since: Instant) -> bool {
        now.since(since) > self.wait
    }

    /// Whether to try it when others, who kept it before, may have gone.
    pub(super) fn is_open(&self, now: Instant) -> bool {
        now >= self.kept_until
    }

    /// It was tried, and somebody keeps it.
    pub(super) fn failed(&mut self, now: Instant) {
        self.did_not_last();
        self.kept_until = now + self.wait;
    }

    /// It was left again, too soon.
    pub(super) fn did_not_last(&mut self) {
        self.wait = (self.wait * 2).min(WAIT_MAX);
    }

    /// It was left after it had been well there for long.
    pub(super) fn lasted(&mut self) {
        *self = Self::default();
    }
}

/// How long it must be well elsewhere at first.
pub(super) const WAIT_MIN: Duration = Duration::from_millis(250);
/// And after one attempt after another has failed, or what came of it has not lasted.
pub(super) const WAIT_MAX: Duration = CALM;
