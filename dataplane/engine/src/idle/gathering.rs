//! A thread that lets others go on.
//!
//! Short connections are mostly the work of others: control threads, applications, the kernel. A
//! poller that carries many of them and waits for its core now and then competes with those who
//! bring it work, and interrupts them thousands of times a second. So it gathers work meanwhile: it
//! sleeps as soon as there is none, the scheduler places it, and when it wakes up, whoever runs
//! goes on for a while ([`Priority`](crate::priority::Priority)). (On two cores, with both
//! gateways, their applications and 32 connections at a time, 18 % more connections were made by
//! that, and pollers slept 0.9 times for each of them instead of four times. 8 to 128 connections
//! that stay, with a request each, were answered 5 to 12 % slower.)

use std::time::Duration;

use smcr_proto::Instant;

/// Whether the thread gathers.
#[derive(Debug, Default)]
pub(super) struct Gathering {
    /// Whether the load is such that this is worth it.
    pub(super) worth_it: bool,
    /// Until when the thread gathers, if it does not wait for its core again.
    until: Instant,
}

impl Gathering {
    /// Notes at `now` that the thread waits for its core for `waits` percent of the time, and says
    /// whether it gathers.
    pub(super) fn look(&mut self, now: Instant, waits: u8) -> bool {
        if self.worth_it && waits >= COMPETES {
            self.until = now + GATHERS_FOR;
        }
        self.goes_on(now)
    }

    /// Whether it gathers at `now`.
    pub(super) fn goes_on(&self, now: Instant) -> bool {
        self.worth_it && now < self.until
    }
}

/// It does if it waits for so much of the time, in percent.
pub(super) const COMPETES: u8 = 10;
/// And for so long afterwards.
pub(super) const GATHERS_FOR: Duration = Duration::from_millis(100);
