//! The one file that reads a clock.

use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};
use smcr_proto::Instant;

/// The monotonic clock, as nanoseconds since the process first asked.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// What `CLOCK_MONOTONIC` showed then, in nanoseconds.
    origin: u64,
}

impl Clock {
    /// A clock that starts at zero now. Threads that talk to each other share one.
    #[allow(clippy::new_without_default, reason = "two clocks of one process must not differ")]
    pub fn new() -> Self {
        Self { origin: monotonic() }
    }

    /// A clock that started that long ago, which must be so brief that the machine ran already.
    #[cfg(test)]
    pub(crate) fn started_before(ago: Duration) -> Self {
        let ago = u64::try_from(ago.as_nanos()).unwrap();
        Self { origin: monotonic().checked_sub(ago).expect("the machine has run for longer") }
    }

    /// Nanoseconds since the start of this clock.
    pub fn now(&self) -> Instant {
        Instant(monotonic().saturating_sub(self.origin))
    }

    /// What a calendar clock that is never set again would show at that time: the time since the
    /// beginning of 1970 (UTC), as the host's clock is set now.
    pub fn calendar_time(&self, at: Instant) -> Duration {
        let time = clock_gettime(ClockId::Realtime);
        let part = |part: i64| u64::try_from(part).unwrap_or_default();
        let now = part(time.tv_sec) * NANOS + part(time.tv_nsec);
        Duration::from_nanos((now + at.0).saturating_sub(self.now().0))
    }

    /// What `CLOCK_MONOTONIC` shows at that time, as the kernel's timers want it.
    pub(crate) fn kernel_time(&self, at: Instant) -> Timespec {
        let nanos = self.origin.saturating_add(at.0);
        let part = |nanos: u64| i64::try_from(nanos).expect("it is far below 2^63");
        Timespec { tv_sec: part(nanos / NANOS), tv_nsec: part(nanos % NANOS) }
    }
}

fn monotonic() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let part = |part: i64| u64::try_from(part).expect("it counts from the start of the machine");
    part(time.tv_sec) * NANOS + part(time.tv_nsec)
}

const NANOS: u64 = 1_000_000_000;
