//! What others have of a thread's core in the offers that it makes.

use std::time::Duration;

/// What became of an offer of the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// Nobody wanted it.
    No,
    /// Somebody had something to do, and did it.
    Used,
    /// Somebody kept it for as long as the scheduler allowed.
    Lost,
}

/// What others had of our core lately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shares {
    /// In offers that were lost.
    pub(super) lost: Share,
    /// In those that were used.
    pub(super) used: Share,
}

/// Recent time in which we were awake, and how much of it others had in offers of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Share {
    awake: Duration,
    theirs: Duration,
    offers: u32,
}

/// What is too much: at least so many offers, which take as long as `each` on average, and one part
/// in so many of the time in which we are awake.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    pub(super) offers: u32,
    pub(super) each: Duration,
    pub(super) part: u32,
}

impl Shares {
    /// Adds time in which we were awake.
    pub(super) fn awake(&mut self, time: Duration) {
        self.lost.awake(time);
        self.used.awake(time);
    }
}

impl Share {
    /// Adds time in which we were awake.
    pub(super) fn awake(&mut self, time: Duration) {
        self.awake += time;
        if self.awake > MEMORY {
            self.awake /= 2;
            self.theirs /= 2;
            self.offers /= 2;
        }
    }

    /// Adds an offer that took `time`, in which we were awake as well. Returns whether this is too
    /// much by now.
    pub(super) fn add(&mut self, time: Duration, limit: Limit) -> bool {
        self.theirs += time;
        self.offers += 1;
        self.offers >= limit.offers
            && self.theirs >= limit.each * self.offers
            && self.theirs * limit.part > self.awake
    }
}

/// Time awake that is remembered: it is halved when it exceeds this.
pub(super) const MEMORY: Duration = Duration::from_millis(100);
