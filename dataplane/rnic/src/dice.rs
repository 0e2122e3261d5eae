//! A seeded random number generator: the same seed gives the same faults.
//!
//! We have our own because the sequence must be stable: a seed that found a bug must find it again
//! after any update of any dependency. The quality of the randomness matters little here.

use std::ops::RangeInclusive;
use std::time::Duration;

/// How likely something is, in parts per million.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Chance(pub u32);

impl Chance {
    /// It never happens.
    pub const NEVER: Self = Self(0);
    /// It always happens.
    pub const ALWAYS: Self = Self(1_000_000);

    /// A chance of `percent` in a hundred.
    pub const fn percent(percent: u32) -> Self {
        Self(percent * 10_000)
    }
}

/// A deterministic generator of random numbers (`SplitMix64`).
#[derive(Clone, Debug)]
pub struct Dice {
    state: u64,
}

impl Dice {
    /// A generator whose sequence `seed` determines.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    ///
    /// # Panics
    ///
    /// If `end` is zero.
    pub fn below(&mut self, end: u64) -> u64 {
        assert!(end > 0);
        let product = u128::from(self.next_u64()) * u128::from(end);
        u64::try_from(product >> 64).expect("the upper half of a product of two u64")
    }

    /// An index into something of `len` parts.
    ///
    /// # Panics
    ///
    /// If `len` is zero.
    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("below a usize")
    }

    /// Whether something as likely as `chance` happens now.
    pub fn roll(&mut self, chance: Chance) -> bool {
        self.below(1_000_000) < u64::from(chance.0)
    }

    /// A duration within `range`, to the nanosecond.
    pub fn duration(&mut self, range: &RangeInclusive<Duration>) -> Duration {
        let spread = range.end().saturating_sub(*range.start()).as_nanos();
        let spread = u64::try_from(spread).unwrap_or(u64::MAX - 1);
        *range.start() + Duration::from_nanos(self.below(spread.saturating_add(1)))
    }

    /// Fills `out` with random bytes.
    pub fn fill(&mut self, out: &mut [u8]) {
        for chunk in out.chunks_mut(8) {
            let bytes = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A seed that a failing run printed must reproduce that run forever.
    #[test]
    fn the_sequence_of_a_seed_is_the_published_one() {
        let mut dice = Dice::new(1_234_567);
        assert_eq!(dice.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(dice.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn the_chances_never_and_always_are_exact() {
        let mut dice = Dice::new(7);
        assert!((0..10_000).all(|_| !dice.roll(Chance::NEVER) && dice.roll(Chance::ALWAYS)));
        let hits = (0..10_000).filter(|_| dice.roll(Chance::percent(30))).count();
        assert!((2_700..3_300).contains(&hits), "{hits}");
    }

    #[test]
    fn durations_reach_both_ends_of_their_range_and_never_leave_it() {
        let mut dice = Dice::new(7);
        let range = Duration::from_nanos(5)..=Duration::from_nanos(7);
        let mut seen = [false; 8];
        for _ in 0..1_000 {
            seen[usize::try_from(dice.duration(&range).as_nanos()).unwrap()] = true;
        }
        assert_eq!(seen, [false, false, false, false, false, true, true, true]);
    }
}
