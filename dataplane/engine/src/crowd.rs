//! Whether a poller carries a crowd that takes all that the cores give.
//!
//! Where others need its core, a thread runs before them whenever it has something to do
//! ([`Priority`](crate::priority::Priority)): so few connections are answered soon. With hundreds
//! at work at the same time it then interrupts an application each time that this has written
//! something, carries that alone, and sleeps again; and what each of these turns costs all others
//! is more than what it gains for one. If there is always something to do, that answers nobody
//! sooner, and fewer in all. So such a thread keeps its nice value raised, which gets it its core
//! for long enough, but lets whoever runs go on when it wakes up. (On two cores, with both gateways
//! and their applications, 1,000 connections with a request of 64 bytes each: 30.5 thousand per
//! second instead of 19.2, and with 4,096 bytes 19.9 instead of 11.0. Beside two busy loops, 512
//! connections: 24.0 instead of 15.5. If any load had such a thread, then 128 connections there
//! had 15.7 instead of 16.3, and 32 had 4.9 instead of 17.7.)
//!
//! A crowd that leaves the cores some time is different: beside two busy loops, 512 connections
//! with 4,000 requests per second in all were answered in 0.2 ms, and in 5.7 ms if the thread let
//! others go on. So what counts, too, is for how much of the time the thread sleeps with nothing to
//! do: not for how much it has a core, because it may have to wait for that.

use std::time::Duration;

use smcr_proto::Instant;

/// The connections at work in one window of time, and what those before were.
#[derive(Debug, Default)]
pub(crate) struct Crowd {
    since: Instant,
    /// A bit for each group of 64 slots, if something has moved for one of these. In a table of
    /// thousands, few connections are of one group: of 192 in a row none are, and 213 of which one
    /// knows nothing are of 192 groups.
    slots: [u64; BITS / 64],
    /// How many windows of this span have ended, all with many at work, and when the span began.
    windows: u32,
    began: Instant,
    /// How long the thread had been awake then, if that is known.
    awake: Option<Duration>,
    is: bool,
}

impl Crowd {
    /// Something moved for the connection in this slot.
    pub(crate) fn note(&mut self, slot: u16) {
        let bit = group_of::<BITS>(slot);
        self.slots[bit / 64] |= 1 << (bit % 64);
    }

    /// Whether many are at work, and the thread hardly ever sleeps. `awake` says for how long it
    /// has not, so far: it was on a core, or waited for one; nothing if nobody counts that, or it
    /// is awake for other reasons, because its core is free. To be asked after each turn of the
    /// poller.
    pub(crate) fn is_there(
        &mut self,
        now: Instant,
        awake: impl FnOnce() -> Option<Duration>,
    ) -> bool {
        let window = now.since(self.since);
        if window >= WINDOW {
            let count: u32 = self.slots.iter().map(|bits| bits.count_ones()).sum();
            // After a pause, those at work in it were so one after another.
            let many = if self.is { MANY * 2 / 3 } else { MANY };
            if count >= many && window < 2 * WINDOW {
                self.windows += 1;
                self.ends_span(now, awake);
            } else {
                *self = Self::default();
            }
            (self.since, self.slots) = (now, [0; BITS / 64]);
        }
        self.is
    }

    /// Decides, and begins a span, if one has ended or its beginning is not known.
    fn ends_span(&mut self, now: Instant, awake: impl FnOnce() -> Option<Duration>) {
        if self.windows == SPAN || self.awake.is_none() {
            let awake = awake();
            let least = now.since(self.began) * if self.is { STAYS } else { COMES } / 100;
            let in_it = awake.zip(self.awake).map(|(now, then)| now.saturating_sub(then));
            self.is = in_it.is_some_and(|time| time >= least);
            (self.windows, self.began, self.awake) = (0, now, awake);
        }
    }
}

/// In which of so many groups a slot is, a power of two. Pollers may have every second slot, or
/// every sixteenth: a factor of 2^16 divided by the golden ratio spreads them all.
pub(crate) fn group_of<const GROUPS: usize>(slot: u16) -> usize {
    usize::from(slot.wrapping_mul(0x9e37) >> (16 - GROUPS.ilog2()))
}

/// How often to count: in a tenth of this, half of a crowd has had no turn.
const WINDOW: Duration = Duration::from_millis(100);
/// So many connections at work in a window are many, and two thirds of them once that has been so.
const MANY: u32 = 192;
/// After how many windows to decide. (After each of them it came and went: from one to the next,
/// the share of the time that the thread was awake for went up and down by a quarter.)
const SPAN: u32 = 4;
/// For how much of a span, in percent, a thread is awake in a crowd that takes all. While it
/// preempts others it was 62 to 83 (and 30 to 55 where cores had time left); while it lets them go
/// on, 76 to 94 (and 48 to 74), because it waits then. (A kernel that counts the time of interrupts
/// apart says less: then there are fewer crowds.)
const COMES: u32 = 60;
const STAYS: u32 = 75;
const BITS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    /// A poller in windows of 100 ms.
    #[derive(Default)]
    struct Carrying {
        crowd: Crowd,
        now: Instant,
        awake: Duration,
    }

    impl Carrying {
        /// One window more, in which each `stride`th slot has something to do, so many in all, and
        /// the thread is awake for so much of the time.
        fn window(&mut self, connections: u16, stride: u16, percent: u32) -> bool {
            self.last(connections, stride, percent, WINDOW)
        }

        fn last(&mut self, connections: u16, stride: u16, percent: u32, window: Duration) -> bool {
            (0..2 * connections).for_each(|at| self.crowd.note(at % connections * stride));
            let before = self.crowd.is;
            let unasked = || panic!("a window has not ended");
            if window / 2 < WINDOW {
                assert_eq!(self.crowd.is_there(self.now + window / 2, unasked), before);
            }
            (self.now, self.awake) = (self.now + window, self.awake + window * percent / 100);
            self.crowd.is_there(self.now, || Some(self.awake))
        }

        /// A span of such windows, in the middle of which nothing changes.
        fn span(&mut self, connections: u16, stride: u16, percents: [u32; SPAN as usize]) -> bool {
            let before = self.crowd.is;
            let said = percents.map(|percent| self.window(connections, stride, percent));
            assert_eq!(said[..said.len() - 1], [before; SPAN as usize - 1]);
            self.crowd.is
        }
    }

    #[test]
    fn many_who_leave_no_time_are_a_crowd() {
        let many = u16::try_from(MANY).unwrap();
        for (what, connections, stride, percent, is) in [
            ("thousands", 9000, 1, 100, true),
            ("hundreds", 256, 1, 75, true),
            ("those of one poller of sixteen", 256, 16, 75, true),
            ("as few as that", many, 1, COMES, true),
            ("fewer", many - 1, 1, 100, false),
            ("few", 32, 1, 100, false),
            ("time is left", 9000, 1, COMES - 1, false),
            ("none", 0, 1, 100, false),
        ] {
            let mut carrying = Carrying::default();
            // From here on it is known how long it was awake.
            assert!(!carrying.window(connections, stride, percent), "{what}");
            assert_eq!(carrying.span(connections, stride, [percent; 4]), is, "{what}");
            if is {
                // It has begun to wait, for more or less of the time.
                let (much, little) = (STAYS + 10, STAYS - 10);
                for (percents, stays) in [
                    ([STAYS; 4], true),
                    ([little, little, much, much], true),
                    ([much, much, little, little - 1], false),
                    ([COMES; 4], true),
                ] {
                    let said = carrying.span(connections, stride, percents);
                    assert_eq!(said, stays, "{what}: {percents:?}");
                }
                assert!(carrying.window(many * 2 / 3, 1, 100), "{what}: enough are left");
                assert!(!carrying.window(many * 2 / 3 - 1, 1, 100), "{what}: few are left");
                assert!(!carrying.window(connections, stride, 100));
                assert!(carrying.span(connections, stride, [100; 4]), "{what}: they are back");
            }
        }
    }

    /// A thousand who have something to do once in a while are no crowd, nor are they one at once
    /// when they all have.
    #[test]
    fn what_is_spread_over_a_long_time_does_not_count() {
        let mut carrying = Carrying::default();
        for _ in 0..6 {
            assert!(!carrying.last(1000, 1, 100, 2 * WINDOW));
        }
        assert!(!carrying.window(1000, 1, 100), "how long it was awake before is not known");
        assert!(carrying.span(1000, 1, [100; 4]));
        let longest = 2 * WINDOW - Duration::from_nanos(1);
        assert!([(); 4].iter().all(|()| carrying.last(1000, 1, 100, longest)));
        assert!(!carrying.last(1000, 1, 100, 2 * WINDOW));
    }

    /// What it was before it is known for how long it is awake, or after, says nothing.
    #[test]
    fn who_is_not_asked_is_no_crowd() {
        let mut carrying = Carrying::default();
        assert!(!carrying.window(1000, 1, 100));
        assert!(carrying.span(1000, 1, [100; 4]));
        for at in 1..=4 {
            (0..1000).for_each(|slot| carrying.crowd.note(slot));
            assert_eq!(carrying.crowd.is_there(carrying.now + WINDOW * at, || None), at < 4);
        }
        carrying.now = carrying.now + WINDOW * 4;
        assert!(!carrying.window(1000, 1, 50));
        assert!(!carrying.span(1000, 1, [50; 4]));
    }

    #[test]
    fn where_nobody_counts_there_is_none() {
        let mut crowd = Crowd::default();
        for at in 1..10 {
            (0..1000).for_each(|slot| crowd.note(slot));
            assert!(!crowd.is_there(Instant(0) + WINDOW * at, || None));
        }
    }
}
