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

use crate::settings::settings;

/// What a thread has learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Patience {
    /// How long it looks.
    span: Duration,
    /// Before this time it does not look: others need the core.
    until: Duration,
    /// How long it did not look after the last loss.
    retreat: Duration,
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
pub(crate) fn waited(time: Duration) {
    change(|patience| patience.waited(time));
}

/// It has offered its core, between these times.
pub(crate) fn offered(before: Duration, after: Duration) {
    change(|patience| patience.offered(before, after));
}

/// What is to be done whatever is learned.
fn fixed() -> Option<Duration> {
    #[cfg(test)]
    if let Some(fixed) = FIXED.get() {
        return Some(fixed);
    }
    settings().map_or(Some(Duration::ZERO), |settings| settings.spin)
}

#[cfg(test)]
pub(crate) fn fix(time: Duration) {
    FIXED.set(Some(time));
}

/// A signal handler that waits in between may be forgotten: nothing depends on it.
fn change(change: impl FnOnce(&mut Patience)) {
    let mut patience = PATIENCE.get();
    change(&mut patience);
    PATIENCE.set(patience);
}

impl Patience {
    const fn new() -> Self {
        Self { span: Duration::ZERO, until: Duration::ZERO, retreat: Duration::ZERO }
    }

    fn span_at(&self, now: Duration) -> Duration {
        if now < self.until { Duration::ZERO } else { self.span }
    }

    fn waited(&mut self, time: Duration) {
        self.span = if time <= SPAN_MAX { SPAN_MAX } else { Duration::ZERO };
    }

    fn offered(&mut self, before: Duration, after: Duration) {
        if after.saturating_sub(before) < LOSS {
            return;
        }
        let has_been_well = before.saturating_sub(self.until) > self.retreat * WELL_FOR;
        let retreat = if has_been_well { RETREAT_MIN } else { self.retreat * 2 };
        self.retreat = retreat.clamp(RETREAT_MIN, RETREAT_MAX);
        self.until = after + self.retreat;
    }
}

/// How long a thread looks: longer than a round trip beside others takes on the networks that we
/// measured.
const SPAN_MAX: Duration = Duration::from_micros(100);
/// An offer of the core that takes so long has gone to strangers.
const LOSS: Duration = Duration::from_millis(1);
/// For how long a thread does not look after a loss. Beside a busy loop it loses three milliseconds
/// for each of these.
const RETREAT_MIN: Duration = Duration::from_millis(10);
const RETREAT_MAX: Duration = Duration::from_secs(1);
/// After so many times of a retreat without a loss, the next one is a short one again.
const WELL_FOR: u32 = 4;

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
            patience.waited(us(waited));
            assert_eq!(patience.span_at(us(0)), us(span), "after {waited} us");
        }
    }

    /// Whoever takes the core for long is no part of this, and takes it again.
    #[test]
    fn a_thread_that_loses_its_core_sleeps_for_a_while() {
        let mut patience = Patience::new();
        patience.waited(us(1));
        let mut now = us(1_000_000);
        for (quiet_us, lost_us, retreat_us) in [
            (0, 999, 0),
            (0, 3_000, 10_000),
            (40_000, 1_000, 20_000),
            (0, 4_000, 40_000),
            (160_001, 3_000, 10_000),
        ] {
            let before = now + us(quiet_us);
            now = before + us(lost_us);
            patience.offered(before, now);
            assert_eq!(patience.span_at(now).is_zero(), retreat_us > 0);
            now += us(retreat_us);
            assert!(patience.span_at(now) == us(100), "after {retreat_us} us");
            if retreat_us > 0 {
                assert!(patience.span_at(now - us(1)).is_zero());
            }
        }
        for _ in 0..9 {
            patience.offered(now, now + us(3_000));
            now = patience.until;
        }
        assert_eq!(patience.retreat, RETREAT_MAX);
    }
}
