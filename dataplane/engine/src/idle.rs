//! What to do when a turn moved nothing: spin, yield, or sleep.
//!
//! A sleeping thread costs nothing but is slow to wake; a spinning one answers at once but takes
//! the core from whoever else needs it. The adaptive policy spins for a short while after work,
//! and gives the core away on every empty turn. When the core then comes back late, somebody
//! needed it, and the policy spins less; when it comes back at once for a long time, it spins more.

use std::time::Duration;

use smcr_proto::Instant;

/// How a poller idles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Never sleep.
    Spin,
    /// Spin for a while, as long as nobody else needs the core; then sleep.
    Adaptive,
    /// Sleep as soon as there is nothing to do.
    Block,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Take the next turn.
    Turn,
    /// Offer the core to others, say how long that took, then take the next turn.
    Yield,
    /// Sleep until something happens.
    Sleep,
}

/// The state of the policy.
#[derive(Debug)]
pub struct Idle {
    policy: Policy,
    spin: Duration,
    budget: Duration,
    worked_at: Instant,
    calm_yields: u32,
}

impl Idle {
    /// A policy that spins for at most `spin` after work.
    pub fn new(policy: Policy, spin: Duration) -> Self {
        Self { policy, spin, budget: spin, worked_at: Instant(0), calm_yields: 0 }
    }

    /// A turn ended at `now`, and `moved` something or nothing.
    pub fn after_turn(&mut self, now: Instant, moved: bool) -> Advice {
        if moved {
            self.worked_at = now;
            return Advice::Turn;
        }
        match self.policy {
            Policy::Spin => Advice::Turn,
            Policy::Block => Advice::Sleep,
            Policy::Adaptive if now.since(self.worked_at) < self.budget => Advice::Yield,
            Policy::Adaptive => Advice::Sleep,
        }
    }

    /// A yield took `took`. Returns whether somebody else had the core meanwhile.
    pub fn after_yield(&mut self, took: Duration) -> bool {
        if took > CONTENDED {
            self.calm_yields = 0;
            self.budget /= 2;
            if self.budget < SPIN_MIN {
                self.budget = SPIN_MIN;
            }
            return true;
        }
        self.calm_yields += 1;
        if self.calm_yields >= CALM_YIELDS {
            self.calm_yields = 0;
            self.budget = (self.budget + self.spin / 8).min(self.spin);
        }
        false
    }

    /// For how long after work the policy spins at present.
    pub fn budget(&self) -> Duration {
        self.budget
    }
}

/// A yield that nobody takes up costs a microsecond; a switch to another thread and back costs
/// more than this even if that thread does next to nothing.
const CONTENDED: Duration = Duration::from_micros(5);
/// Never less than one look around: a request that is already on its way is then answered without
/// a wake-up.
const SPIN_MIN: Duration = Duration::from_micros(2);
/// So many yields in a row that nobody took up make the policy bolder again.
const CALM_YIELDS: u32 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    const SPIN: Duration = Duration::from_micros(50);

    #[test]
    fn adaptive_spins_after_work_and_then_sleeps() {
        let mut idle = Idle::new(Policy::Adaptive, SPIN);
        let start = Instant(1_000_000);
        assert_eq!(idle.after_turn(start, true), Advice::Turn);
        assert_eq!(idle.after_turn(start + SPIN / 2, false), Advice::Yield);
        assert_eq!(idle.after_turn(start + SPIN, false), Advice::Sleep);
    }

    #[test]
    fn adaptive_yields_the_core_to_those_who_want_it_and_recovers() {
        let mut idle = Idle::new(Policy::Adaptive, SPIN);
        for _ in 0..10 {
            assert!(idle.after_yield(Duration::from_micros(30)));
        }
        assert_eq!(idle.budget(), SPIN_MIN);
        for _ in 0..10 * CALM_YIELDS {
            assert!(!idle.after_yield(Duration::from_nanos(600)));
        }
        assert_eq!(idle.budget(), SPIN);
    }

    #[test]
    fn spin_never_sleeps_and_block_always_does() {
        let late = Instant(u64::MAX / 2);
        assert_eq!(Idle::new(Policy::Spin, SPIN).after_turn(late, false), Advice::Turn);
        assert_eq!(Idle::new(Policy::Block, SPIN).after_turn(Instant(1), false), Advice::Sleep);
    }
}
