//! The one file that reads a clock.

use smcr_proto::Instant;

/// The monotonic clock, as nanoseconds since the process first asked.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: std::time::Instant,
}

impl Clock {
    /// A clock that starts at zero now. Threads that talk to each other share one.
    #[allow(clippy::new_without_default, reason = "two clocks of one process must not differ")]
    #[allow(clippy::disallowed_methods, reason = "this is the one file that reads a clock")]
    pub fn new() -> Self {
        Self { origin: std::time::Instant::now() }
    }

    /// Nanoseconds since the start of this clock.
    pub fn now(&self) -> Instant {
        let nanos = self.origin.elapsed().as_nanos();
        Instant(u64::try_from(nanos).expect("584 years have not passed"))
    }
}
