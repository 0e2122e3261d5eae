//! The one file of the harness that reads a clock.

use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::failure::Result;

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

/// Tries until it succeeds, with a `pause` after each failure.
///
/// # Errors
///
/// The last failure, if that is after `until`.
pub(crate) fn try_until<T>(
    until: u64,
    pause: Duration,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    loop {
        match attempt() {
            Err(_) if now_ns() < until => thread::sleep(pause),
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Failure;

    /// A gateway that is busy for a moment must not end a run of hours.
    #[test]
    fn one_failure_is_not_the_end() {
        let mut answers =
            [Err(Failure::new("503")), Err(Failure::new("4 left")), Ok(7)].into_iter();
        let answer = try_until(u64::MAX, Duration::ZERO, || answers.next().unwrap());
        assert_eq!(answer.unwrap(), 7);
    }

    /// Who waits in vain must be told for what.
    #[test]
    fn the_last_failure_is_named() {
        let mut count = 0;
        let until = now_ns() + ns(Duration::from_millis(20));
        let failure = try_until::<()>(until, Duration::ZERO, || {
            count += 1;
            Err(Failure::new(count.to_string()))
        });
        assert_eq!(failure.unwrap_err().to_string(), count.to_string());
        assert!(now_ns() >= until);
    }
}
