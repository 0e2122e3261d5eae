//! The time in which a load is measured, and how long it waits for answers.
//!
//! When the time is over, a load sends nothing more and waits for what is in flight. If it left at
//! once, nobody would hear of the slowest answers, nor of those that never come.

use std::time::Duration;

use crate::clock::{now_ns, ns};
use crate::failure::{Failure, Result};
use crate::latency::Recorder;

/// What happens before this much time has passed is not recorded.
pub(super) const WARM_UP: Duration = Duration::from_millis(250);

/// No answer may take longer than this.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// How often a load looks for requests without an answer. Looking at thousands of connections after
/// each event would slow it.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The measured time of a load.
#[derive(Debug)]
pub(super) struct Window {
    from: u64,
    until: u64,
    look_at: u64,
}

impl Window {
    /// Begins the warm-up, which the measured time of `duration` follows.
    pub(super) fn begin(duration: Duration) -> Self {
        let from = now_ns() + ns(WARM_UP);
        Self { from, until: from + ns(duration), look_at: 0 }
    }

    /// Whether requests may be sent `at` this time. During the warm-up they may.
    pub(super) fn is_open(&self, at: u64) -> bool {
        at < self.until
    }

    /// Whether `at` is within the measured time.
    pub(super) fn measures(&self, at: u64) -> bool {
        (self.from..self.until).contains(&at)
    }

    /// When the warm-up ends.
    pub(super) fn from(&self) -> u64 {
        self.from
    }

    /// The length of the measured time.
    pub(super) fn elapsed_ns(&self) -> u64 {
        self.until - self.from
    }

    /// Whether to look for requests without an answer now. It is so once in [`LOOK_EVERY`].
    pub(super) fn must_look(&mut self, now: u64) -> bool {
        let is_time = now >= self.look_at;
        if is_time {
            self.look_at = now + ns(LOOK_EVERY);
        }
        is_time
    }

    /// Looks, once in [`LOOK_EVERY`], which connections have waited for longer than [`PATIENCE`].
    /// `sent_at` says of each when its request was sent; none if it has none.
    pub(super) fn late(&mut self, sent_at: &[Option<u64>]) -> Vec<usize> {
        let now = now_ns();
        if !self.must_look(now) {
            return Vec::new();
        }
        let is_late = |sent_at: &Option<u64>| sent_at.is_some_and(|sent_at| is_late(sent_at, now));
        (0..sent_at.len()).filter(|&index| is_late(&sent_at[index])).collect()
    }
}

/// Whether what was sent at `sent_at` should have been answered before `now`.
pub(super) fn is_late(sent_at: u64, now: u64) -> bool {
    now.saturating_sub(sent_at) > ns(PATIENCE)
}

/// Counts answers.
#[derive(Debug)]
pub(super) struct Tally {
    /// Of what was sent, or due, within the window, however late its answer came.
    pub(super) latencies: Recorder,
    /// Answers within the window: these are the throughput.
    pub(super) in_window: u64,
    /// All answers.
    pub(super) answered: u64,
    /// Connections that were given up, because there was no answer for [`PATIENCE`].
    pub(super) given_up: u64,
}

impl Tally {
    pub(super) fn new() -> Self {
        Self { latencies: Recorder::new(), in_window: 0, answered: 0, given_up: 0 }
    }

    /// Counts a connection that had no answer `now`, to what was sent or due at `asked_at`. Its
    /// wait is recorded, whenever it began: a path that starves some must not look as good as to
    /// those that it serves.
    pub(super) fn give_up(&mut self, asked_at: u64, now: u64) {
        self.given_up += 1;
        self.latencies.record(now.saturating_sub(asked_at));
    }

    /// Fails where figures would be meaningless.
    ///
    /// # Errors
    ///
    /// When nothing was answered on any of the `connections`.
    pub(super) fn check(&self, connections: u32) -> Result<()> {
        match (self.answered, self.given_up) {
            (0, given_up @ 1..) => Err(Failure::new(format!(
                "{given_up} of {connections} connections had no answer within {PATIENCE:?}"
            ))),
            _ => Ok(()),
        }
    }

    /// Counts an answer that came `now`, to what was sent or due at `asked_at`.
    pub(super) fn count(&mut self, window: &Window, asked_at: u64, now: u64) {
        self.answered += 1;
        if window.measures(asked_at) {
            self.latencies.record(now.saturating_sub(asked_at));
        }
        if window.measures(now) {
            self.in_window += 1;
        }
    }
}
