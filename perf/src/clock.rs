//! The one file of the harness that reads a clock.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock. Comparable between processes of one boot.
pub(crate) fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).expect("the monotonic clock starts at boot");
    let nanoseconds = u64::try_from(time.tv_nsec).expect("nanoseconds are 0..1e9");
    seconds * 1_000_000_000 + nanoseconds
}

/// `duration` in nanoseconds, for addition to [`now_ns`].
pub(crate) fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("no measurement lasts 584 years")
}
