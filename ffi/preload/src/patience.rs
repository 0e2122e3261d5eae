//! How long a thread looks at its rings before it sleeps.
//!
//! To sleep and to be woken costs the program and the gateway some ten microseconds each. A thread
//! that looks instead spares them, if something comes soon; if not, it has wasted its core. So it
//! looks for a while if its last wait was so short that looking would have ended it, and sleeps at
//! once if not, as KVM does before it halts a virtual CPU (`halt_poll_ns`). Between two looks it
//! offers its core to others (`sched_yield`). The gateway and the far end need it, and give it back
//! within microseconds. Programs that have nothing to do with us keep it for a slice of the
//! scheduler, which is milliseconds. After such a loss the thread sleeps for a while as it always
//! did: who sleeps is put on a core at once when he is woken.

use std::cell::Cell;
use std::time::Duration;

#[cfg(not(test))]
use crate::{settings::settings, sys};

/// What a thread has learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Patience {
    /// How long it looks.
    span: Duration,
    /// Before this time it does not look: others need the core.
    until: Duration,
    /// How long it did not look after the last loss.
    retreat: Duration,
    /// How many offers have ended quickly since.
    quick: u32,
}

thread_local! {
    static PATIENCE: Cell<Patience> = const { Cell::new(Patience::new()) };
    #[cfg(test)]
    static FIXED: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// How long the calling thread is to look at `now` before it sleeps; zero if not at all.
pub(crate) fn span(now: Duration) -> Duration {
    fixed().unwrap_or_else(|| PATIENCE.get().span_at(now))
}

/// It has waited for so long, looking or asleep, until something came.
pub(crate) fn learn_found(time: Duration) {
    change(|patience| patience.learn_found(time));
}

/// It has waited for so long, and something else has ended that, such as a time-out or a signal.
pub(crate) fn learn_ended(time: Duration) {
    if time > SPAN_MAX {
        learn_found(time);
    }
}

/// It has offered its core, between these times.
pub(crate) fn learn_offer(before: Duration, after: Duration) {
    change(|patience| patience.learn_offer(before, after));
}

/// Whether nobody has had the core for long of late.
pub(crate) fn is_calm() -> bool {
    PATIENCE.get().quick >= OFFERS_TO_TRUST
}

/// What is to be done whatever is learned.
fn fixed() -> Option<Duration> {
    #[cfg(test)]
    return FIXED.get();
    #[cfg(not(test))]
    match settings() {
        // It makes no system call that it can do without.
        _ if sys::is_sandboxed() => Some(Duration::ZERO),
        Some(settings) => settings.spin,
        None => Some(Duration::ZERO),
    }
}

#[cfg(test)]
pub(crate) fn fix(time: Duration) {
    FIXED.set(Some(time));
}

/// It has offered its core often, and lost it never.
#[cfg(test)]
pub(crate) fn calm() {
    PATIENCE.set(Patience { quick: OFFERS_TO_TRUST, ..Patience::new() });
}

/// It is to do what it has learned.
#[cfg(test)]
pub(crate) fn free() {
    FIXED.set(None);
    PATIENCE.set(Patience::new());
}

/// A signal handler that waits in between may be forgotten: nothing depends on it.
fn change(change: impl FnOnce(&mut Patience)) {
    let mut patience = PATIENCE.get();
    change(&mut patience);
    PATIENCE.set(patience);
}

impl Patience {
    const fn new() -> Self {
        Self { span: Duration::ZERO, until: Duration::ZERO, retreat: Duration::ZERO, quick: 0 }
    }

    fn span_at(&self, now: Duration) -> Duration {
        if now < self.until { Duration::ZERO } else { self.span }
    }

    fn learn_found(&mut self, time: Duration) {
        self.span = if time <= SPAN_MAX { SPAN_MAX } else { Duration::ZERO };
    }

    fn learn_offer(&mut self, before: Duration, after: Duration) {
        let taken = after.saturating_sub(before);
        if taken < LOSS {
            self.quick = self.quick.saturating_add(1);
            return;
        }
        let has_been_well = self.quick >= OFFERS_TO_TRUST;
        let retreat = if has_been_well { RETREAT_MIN } else { self.retreat * 2 };
        // Who is stopped, because it has used up what it may, is stopped for longer.
        self.retreat = retreat.clamp(RETREAT_MIN, RETREAT_MAX).max(taken * LOSS_SHARE);
        self.until = after + self.retreat;
        self.quick = 0;
    }
}

/// How long a thread looks: longer than a round trip beside others takes on the networks that we
/// measured.
const SPAN_MAX: Duration = Duration::from_micros(100);
/// An offer of the core that takes so long has gone to strangers.
const LOSS: Duration = Duration::from_millis(1);
/// For how long a thread does not look after a loss.
const RETREAT_MIN: Duration = Duration::from_millis(10);
const RETREAT_MAX: Duration = Duration::from_secs(1);
/// And never for less than so many times what it has lost.
const LOSS_SHARE: u32 = 30;
/// After so many offers without a loss, the next retreat is a short one again.
const OFFERS_TO_TRUST: u32 = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    /// What the last wait was worth decides.
    #[test]
    fn a_thread_looks_as_long_as_that_is_worth_it() {
        let mut patience = Patience::new();
        assert_eq!(patience.span_at(us(0)), us(0), "nothing is known");
        for (waited, span) in [(20, 100), (100, 100), (101, 0), (5_000, 0), (99, 100)] {
            patience.learn_found(us(waited));
            assert_eq!(patience.span_at(us(0)), us(span), "after {waited} us");
        }
        learn_found(us(5));
        learn_ended(us(5));
        assert_eq!(span(us(0)), us(100), "a wait that a signal ended says nothing");
        learn_ended(us(5_000));
        assert_eq!(span(us(0)), us(0), "but that it was long");
    }

    /// Whoever takes the core for long is no part of this, and takes it again.
    #[test]
    fn a_thread_that_loses_its_core_sleeps_for_a_while() {
        let mut patience = Patience::new();
        patience.learn_found(us(1));
        let mut now = us(1_000_000);
        for (quick, lost_us, retreat_us) in [
            (1, 999, 0),
            (OFFERS_TO_TRUST, 1_000, 30_000),
            (OFFERS_TO_TRUST - 1, 1_000, 60_000),
            (0, 1_000, 120_000),
            // A second later, but it has not offered its core much meanwhile.
            (3, 4_000, 240_000),
            (OFFERS_TO_TRUST, 3_000, 90_000),
            (OFFERS_TO_TRUST, 80_000, 2_400_000),
        ] {
            (0..quick).for_each(|_| patience.learn_offer(now, now + us(1)));
            let before = now + us(1_000_000);
            now = before + us(lost_us);
            patience.learn_offer(before, now);
            assert_eq!(patience.span_at(now).is_zero(), retreat_us > 0, "{lost_us}");
            now += us(retreat_us);
            assert_eq!(patience.span_at(now), us(100), "after {retreat_us} us");
            assert!(retreat_us == 0 || patience.span_at(now - us(1)).is_zero());
        }
        for _ in 0..9 {
            patience.learn_offer(now, now + us(3_000));
            now = patience.until;
        }
        assert_eq!(patience.retreat, RETREAT_MAX);
    }
}
