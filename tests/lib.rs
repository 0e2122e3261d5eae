//! What suites share: seeds and payloads.
//!
//! A run is repeated by its seed: `SMC_SEED=17 cargo test …` runs seed 17 alone, and
//! `SMC_SEEDS=2000` runs that many instead of the few that every test runs.

use std::ops::Range;

use smcr_rnic::dice::Dice;

/// The seeds to run: the one the environment names, or as many as it asks for, or `few`.
///
/// # Panics
///
/// If `SMC_SEED` or `SMC_SEEDS` is set to something that is not a number.
pub fn seeds(few: u64) -> Range<u64> {
    let number = |name: &str| {
        let text = std::env::var(name).ok()?;
        Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
    };
    match (number("SMC_SEED"), number("SMC_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, Some(many)) => 0..many,
        (None, None) => 0..few,
    }
}

/// `len` bytes that no other seed yields: what was sent can be told from anything else.
pub fn payload(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Dice::new(seed).fill(&mut bytes);
    bytes
}
