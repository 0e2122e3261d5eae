//! Time as the caller tells it.

use core::ops::Add;
use core::time::Duration;

/// Nanoseconds since an origin that the caller chooses and never changes.
///
/// The machines of this crate never read a clock; whoever drives them passes `now`, and `now` never
/// decreases. A `u64` of nanoseconds lasts 584 years.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

impl Instant {
    /// The time that has passed since `earlier`, or zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, rest: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(rest.as_nanos()).unwrap_or(u64::MAX)))
    }
}
