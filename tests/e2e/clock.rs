//! The only file of the suite that reads a clock. Every wait has a limit.

use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A point in time after which waiting has failed.
#[derive(Clone, Copy)]
pub(crate) struct Deadline {
    at: Duration,
}

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Self {
        Self { at: now() + limit }
    }

    pub(crate) fn passed(self) -> bool {
        now() >= self.at
    }
}

/// Time since an arbitrary start, never going back.
pub(crate) fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).expect("monotonic time is positive");
    let nanoseconds = u32::try_from(time.tv_nsec).expect("below a thousand million");
    Duration::new(seconds, nanoseconds)
}

/// Asks every few milliseconds until the answer is something.
///
/// # Panics
///
/// If `limit` passes first. The message says what was waited for.
pub(crate) fn wait_for<T>(what: &str, limit: Duration, mut answer: impl FnMut() -> Option<T>) -> T {
    let deadline = Deadline::after(limit);
    loop {
        if let Some(found) = answer() {
            return found;
        }
        assert!(!deadline.passed(), "not within {limit:?}: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Like [`wait_for`], for a condition.
pub(crate) fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, limit, || condition().then_some(()));
}
