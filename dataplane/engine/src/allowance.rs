//! How fast connections may carry bytes.
//!
//! A bucket is a time: until then, what was carried is paid for. If it has passed, the time since
//! is credit, up to a twentieth of a second. So the bucket that connections of several pollers
//! share is one number, and no thread waits for another. What two pollers carry at the same moment
//! is paid for afterwards: the rate is kept on average, and exceeded by a burst for each poller at
//! most.
//!
//! Of two pollers that wait for the same bucket, one is always a little faster, and would find it
//! full each time. So each poller keeps to its share as long as others wait as well.

use std::time::Duration;

use smcr_proto::Instant;

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    /// From the near socket.
    In,
    /// To the near socket.
    Out,
}

/// What the connections of a listener may carry in each direction, together and each.
#[derive(Debug, Default)]
pub struct Allowance {
    /// Bytes in a second; zero for as many as they like.
    together: AtomicU64,
    each: AtomicU64,
    /// The buckets of [`together`](Self::together), in nanoseconds.
    paid_until: [AtomicU64; 2],
    /// How many connections wait for each of them, at all pollers.
    waiting: [AtomicU32; 2],
}

impl Allowance {
    /// From now on all connections together may carry so many bytes in a second, and each so many;
    /// zero for as many as they like. Connections that exist notice within a second.
    pub fn set(&self, together: u64, each: u64) {
        self.together.store(together, Ordering::Relaxed);
        self.each.store(each, Ordering::Relaxed);
    }

    /// Whether there is a limit.
    pub(crate) fn is_limited(&self) -> bool {
        self.together.load(Ordering::Relaxed) | self.each.load(Ordering::Relaxed) != 0
    }

    /// What each connection may carry; none for as much as it likes.
    pub(crate) fn each(&self) -> Option<Rate> {
        Rate::of(self.each.load(Ordering::Relaxed))
    }

    /// What all connections together may carry now.
    ///
    /// # Errors
    ///
    /// When they may carry more, if that is nothing.
    pub(crate) fn grant(&self, now: Instant, way: Way) -> Result<u32, Instant> {
        let Some(rate) = self.together() else { return Ok(u32::MAX) };
        rate.grant(now, Instant(self.paid_until[way as usize].load(Ordering::Relaxed)))
    }

    /// A connection has carried so many bytes.
    pub(crate) fn charge(&self, now: Instant, way: Way, bytes: u64) {
        let Some(rate) = self.together() else { return };
        let paid_until = &self.paid_until[way as usize];
        // Another poller may come between the two: then both costs are added all the same.
        paid_until.fetch_max(oldest_credit(now).0, Ordering::Relaxed);
        paid_until.fetch_add(rate.cost(bytes), Ordering::Relaxed);
    }

    /// So many more connections wait.
    pub(crate) fn wait(&self, way: Way, more: u32) {
        self.waiting[way as usize].fetch_add(more, Ordering::Relaxed);
    }

    /// So many wait no more.
    pub(crate) fn wait_no_more(&self, way: Way, fewer: u32) {
        self.waiting[way as usize].fetch_sub(fewer, Ordering::Relaxed);
    }

    /// How many connections wait.
    pub(crate) fn waiting(&self, way: Way) -> u32 {
        self.waiting[way as usize].load(Ordering::Relaxed)
    }

    /// What all connections together may carry; none for as much as they like.
    pub(crate) fn together(&self) -> Option<Rate> {
        Rate::of(self.together.load(Ordering::Relaxed))
    }
}

/// Bytes in a second; not zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate(u64);

impl Rate {
    fn of(bytes_per_second: u64) -> Option<Self> {
        (bytes_per_second > 0).then_some(Self(bytes_per_second))
    }

    /// What may be carried now, if what was carried is paid for until `paid_until`.
    ///
    /// # Errors
    ///
    /// When more may be carried, if that is nothing.
    pub(crate) fn grant(self, now: Instant, paid_until: Instant) -> Result<u32, Instant> {
        if paid_until + self.least() > now {
            return Err(paid_until + PAUSE);
        }
        let credit = now.since(paid_until).min(BURST).as_nanos();
        let bytes = credit * u128::from(self.0) / SECOND;
        Ok(u32::try_from(bytes).unwrap_or(u32::MAX).max(GRANT_MIN))
    }

    /// The least credit with which anything may be carried. Without it, whoever is next after one
    /// that has used up all credit would get little, and always the same one might be next.
    fn least(self) -> Duration {
        PAUSE.min(Duration::from_nanos(self.cost(GRANT_MIN.into())))
    }

    /// Until when it is paid for, after so many more bytes.
    pub(crate) fn charge(self, now: Instant, paid_until: Instant, bytes: u64) -> Instant {
        Instant(paid_until.max(oldest_credit(now)).0.saturating_add(self.cost(bytes)))
    }

    /// The part of `own` of `all` that share it.
    pub(crate) fn part(self, own: u32, all: u32) -> Self {
        let part = u128::from(self.0) * u128::from(own) / u128::from(all.max(1));
        Self(u64::try_from(part).unwrap_or(u64::MAX).max(1))
    }

    /// What may be carried in so much time, in thousand-millionths of bytes.
    fn earned(self, time: Duration) -> i128 {
        (time.as_nanos() * u128::from(self.0)).cast_signed()
    }

    /// The time in which so many bytes may be carried, in nanoseconds.
    fn cost(self, bytes: u64) -> u64 {
        let cost = (u128::from(bytes) * SECOND).div_ceil(u128::from(self.0));
        u64::try_from(cost).unwrap_or(u64::MAX)
    }
}

/// What the connections of one poller have carried of a bucket, beyond their part.
///
/// Their part changes as others come and go, so this remembers bytes and not a time.
#[derive(Debug, Default)]
pub(crate) struct Share {
    /// Thousand-millionths of bytes; less than zero where they have credit.
    owed: i128,
    charged_at: Instant,
}

impl Share {
    /// What they may carry now, if this is the rate of their part.
    ///
    /// # Errors
    ///
    /// When they may carry more, if that is nothing.
    pub(crate) fn grant(&self, now: Instant, part: Rate) -> Result<u32, Instant> {
        let owed = self.owed(now, part);
        let lacks = owed + part.earned(part.least());
        if lacks > 0 {
            let nanos = u64::try_from(lacks / i128::from(part.0)).unwrap_or(u64::MAX);
            return Err(Instant(now.0.saturating_add(nanos)).max(now + PAUSE));
        }
        let bytes = owed.unsigned_abs() / SECOND;
        Ok(u32::try_from(bytes).unwrap_or(u32::MAX).max(GRANT_MIN))
    }

    /// They have carried so many bytes.
    pub(crate) fn charge(&mut self, now: Instant, part: Rate, bytes: u64) {
        let cost = (u128::from(bytes) * SECOND).cast_signed();
        (self.owed, self.charged_at) = (self.owed(now, part).saturating_add(cost), now);
    }

    /// Whether it says nothing any more: nothing was carried for longer than credit is kept.
    pub(crate) fn is_old(&self, now: Instant) -> bool {
        self.charged_at + BURST <= now
    }

    fn owed(&self, now: Instant, part: Rate) -> i128 {
        let owed = self.owed.saturating_sub(part.earned(now.since(self.charged_at)));
        // Somebody else may have its turn first: where the limit is low, that takes time.
        let kept = (u128::from(2 * GRANT_MIN) * SECOND).cast_signed();
        owed.max(-part.earned(BURST).max(kept))
    }
}

/// Credit that is older than this is lost.
fn oldest_credit(now: Instant) -> Instant {
    Instant(now.0.saturating_sub(u64::try_from(BURST.as_nanos()).expect("it is short")))
}

/// The time for which credit is kept: what a poller could not use while it had no core, it may use
/// afterwards.
const BURST: Duration = Duration::from_millis(50);
/// How long a connection waits after everything is paid for, so that the next read is worth it.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);
/// Whoever may carry anything may carry so much, and pays afterwards: a segment is not cut up.
const GRANT_MIN: u32 = 2_048;
const SECOND: u128 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Instant {
        Instant(micros * 1_000)
    }

    /// Whoever takes all that is granted as soon as it is, for two seconds. Returns the bytes.
    fn carried(
        grant: impl Fn(Instant) -> Result<u32, Instant>,
        mut charge: impl FnMut(Instant, u64),
        most: u32,
    ) -> u64 {
        let (mut now, mut sum) = (at(1_000_000), 0);
        while now < at(3_000_000) {
            match grant(now) {
                Ok(bytes) => {
                    let bytes = u64::from(bytes.min(most));
                    charge(now, bytes);
                    sum += bytes;
                }
                Err(later) => {
                    assert!(later > now);
                    now = later;
                }
            }
        }
        sum
    }

    #[test]
    fn the_rate_is_kept_whatever_is_read_at_once() {
        for rate in [8_000, 12_500_000, 1_250_000_000, 100_000_000_000] {
            for most in [1, 1_448, 131_072] {
                if rate / u64::from(most) > 1_000_000 {
                    continue;
                }
                let allowance = Allowance::default();
                allowance.set(rate, 0);
                let grant = |now| allowance.grant(now, Way::In);
                let sum = carried(grant, |now, bytes| allowance.charge(now, Way::In, bytes), most);
                let burst = rate / 20;
                let bounds = 2 * rate - rate / 50..=2 * rate + burst + u64::from(GRANT_MIN);
                assert!(bounds.contains(&sum), "{rate} {most}: {sum}");
                assert!(allowance.grant(at(1_000), Way::Out).is_ok(), "the other way is free");
            }
        }
    }

    #[test]
    fn credit_does_not_grow_for_ever() {
        let rate = Rate(1_000_000);
        assert_eq!(rate.grant(at(3_600_000_000), Instant(0)), Ok(50_000));
        let paid_until = rate.charge(at(3_600_000_000), Instant(0), 50_000);
        assert_eq!(paid_until, at(3_600_000_000));
        let soon = rate.grant(paid_until, paid_until).unwrap_err();
        assert_eq!((soon, rate.grant(soon, paid_until)), (at(3_600_001_000), Ok(GRANT_MIN)));
        let paid_until = rate.charge(paid_until, paid_until, 2_048);
        assert_eq!(rate.grant(at(3_600_000_000), paid_until), Err(at(3_600_003_048)));
    }

    /// Others come and go, and what a poller owes them is paid at the rate that it has then.
    #[test]
    fn a_share_is_paid_by_the_part_of_that_time() {
        let (rate, mut share) = (Rate(1_000_000), Share::default());
        assert_eq!(share.grant(at(1_000_000), rate.part(1, 2)), Ok(25_000));
        share.charge(at(1_000_000), rate.part(1, 2), 26_000);
        assert!(!share.is_old(at(1_049_999)) && share.is_old(at(1_050_000)));
        assert_eq!(share.grant(at(1_000_000), rate.part(1, 1_000)), Err(at(2_001_000)));
        assert_eq!(share.grant(at(1_000_000), rate.part(1, 2)), Err(at(1_003_000)));
        assert_eq!(share.grant(at(1_002_500), rate.part(1, 2)), Err(at(1_003_500)));
        assert_eq!(share.grant(at(1_003_000), rate.part(1, 2)), Ok(GRANT_MIN));
        assert_eq!(share.grant(at(1_032_000), rate.part(1, 2)), Ok(15_000));
        assert_eq!(Rate(7).part(1, 1_000).cost(1), Rate(1).cost(1), "it is never nothing");
    }

    #[test]
    fn without_a_limit_nothing_is_counted() {
        let allowance = Allowance::default();
        assert!(!allowance.is_limited() && allowance.each().is_none());
        allowance.charge(at(1), Way::Out, 1 << 40);
        assert_eq!(allowance.grant(at(1), Way::Out), Ok(u32::MAX));
        allowance.set(0, 7);
        assert!(allowance.is_limited() && allowance.each().is_some());
        assert_eq!(allowance.grant(at(1), Way::Out), Ok(u32::MAX));
    }
}
