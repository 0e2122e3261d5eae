//! What to do after a turn: take the next one, offer the core to others first, or sleep.
//!
//! A sleeping thread costs nothing but is slow to wake: on the machines we measured, 70 µs where a
//! spinning one needs 4. A spinning thread answers at once but takes the core from whoever else
//! needs it. The adaptive policy does both: it goes on for a short while after work, and offers the
//! core after every turn, also after those that moved something. Where cores are free, an offer
//! costs half a microsecond. Where they are not, applications run between our turns as if we slept,
//! and what they produce meanwhile makes the next turn's batch larger. (Spinning less when offers
//! were taken up was tried: it doubled the latency of a single connection and halved the rate of a
//! single stream, because the thread then slept while its peer was busy on the same core.)

use std::time::Duration;

use smcr_proto::Instant;

/// How a poller idles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Never sleep, never offer the core: for cores that belong to the poller alone.
    Spin,
    /// Go on for a while, offering the core after every turn; then sleep.
    Adaptive,
    /// Sleep as soon as there is nothing to do.
    Block,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Take the next turn.
    Turn,
    /// Offer the core to others, then take the next turn.
    Yield,
    /// Sleep until something happens.
    Sleep,
}

/// The state of the policy.
#[derive(Debug)]
pub struct Idle {
    policy: Policy,
    spin: Duration,
    worked_at: Instant,
}

impl Idle {
    /// A policy that, if adaptive, goes on for `spin` after work.
    pub fn new(policy: Policy, spin: Duration) -> Self {
        Self { policy, spin, worked_at: Instant(0) }
    }

    /// A turn ended at `now`, and `moved` something or nothing.
    pub fn after_turn(&mut self, now: Instant, moved: bool) -> Advice {
        if moved {
            self.worked_at = now;
        }
        match self.policy {
            Policy::Spin => Advice::Turn,
            Policy::Block if moved => Advice::Turn,
            Policy::Block => Advice::Sleep,
            Policy::Adaptive if now.since(self.worked_at) < self.spin => Advice::Yield,
            Policy::Adaptive => Advice::Sleep,
        }
    }
}

/// An offer of the core that took longer was taken up: nobody to switch to costs a tenth of this.
pub const TAKEN_UP: Duration = Duration::from_micros(5);

#[cfg(test)]
mod tests {
    use super::*;

    const SPIN: Duration = Duration::from_micros(50);

    #[test]
    fn adaptive_offers_the_core_after_work_and_then_sleeps() {
        let mut idle = Idle::new(Policy::Adaptive, SPIN);
        let start = Instant(1_000_000);
        assert_eq!(idle.after_turn(start, true), Advice::Yield);
        assert_eq!(idle.after_turn(start + SPIN / 2, false), Advice::Yield);
        assert_eq!(idle.after_turn(start + SPIN, false), Advice::Sleep);
        assert_eq!(idle.after_turn(start + SPIN, true), Advice::Yield);
    }

    /// A process that nobody talks to must not use a core.
    #[test]
    fn adaptive_sleeps_from_the_start() {
        let mut idle = Idle::new(Policy::Adaptive, SPIN);
        assert_eq!(idle.after_turn(Instant(1_000_000), false), Advice::Sleep);
    }

    #[test]
    fn spin_never_sleeps_and_block_does_when_nothing_moved() {
        let late = Instant(u64::MAX / 2);
        assert_eq!(Idle::new(Policy::Spin, SPIN).after_turn(late, false), Advice::Turn);
        let mut block = Idle::new(Policy::Block, SPIN);
        assert_eq!(block.after_turn(Instant(1), true), Advice::Turn);
        assert_eq!(block.after_turn(Instant(2), false), Advice::Sleep);
    }
}
