//! Seeds and payloads, which several suites share.
//!
//! A run is repeated by its seed: `SMC_SEED=17 cargo test …` runs seed 17 alone, `SMC_SEEDS=2000`
//! runs that many instead of the few that every test runs, and `SMC_FROM=90000` begins there.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use smcr_rnic::dice::Dice;

/// The seeds to run: the one that `SMC_SEED` names, or else `SMC_SEEDS` of them (default: `few`),
/// beginning with `SMC_FROM`.
///
/// # Panics
///
/// If `SMC_SEED`, `SMC_SEEDS` or `SMC_FROM` is set to something that is not a number.
pub fn seeds(few: u64) -> Range<u64> {
    let number = |name: &str| {
        let text = std::env::var(name).ok()?;
        Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
    };
    chosen(few, number("SMC_SEED"), number("SMC_SEEDS"), number("SMC_FROM"))
}

fn chosen(few: u64, one: Option<u64>, many: Option<u64>, from: Option<u64>) -> Range<u64> {
    let from = from.unwrap_or(0);
    match one {
        Some(seed) => seed..seed + 1,
        None => from..from + many.unwrap_or(few),
    }
}

/// Runs `one` for every seed, on all cores, and returns the results in no particular order. All
/// seeds run, even if some fail.
///
/// # Panics
///
/// If runs panic. The message has their seeds, their messages, and the commands that repeat them as
/// the test `name` of the suite `suite`.
pub fn run_all<T: Send>(
    suite: &str,
    name: &str,
    seeds: Range<u64>,
    one: impl Fn(u64) -> T + Sync,
) -> Vec<T> {
    let (next, count) = (AtomicU64::new(seeds.start), seeds.end - seeds.start);
    let (said, failed) = (Mutex::new(Vec::new()), Mutex::new(BTreeMap::new()));
    let worker = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            match catch_unwind(AssertUnwindSafe(|| one(seed))) {
                Ok(outcome) => locked(&said).push(outcome),
                Err(panic) => drop(locked(&failed).insert(seed, words_of(&*panic))),
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(worker);
        }
    });
    let failed = std::mem::take(&mut *locked(&failed));
    assert!(failed.is_empty(), "{}", complaint(suite, name, count, &failed));
    said.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// The message about seeds that failed.
fn complaint(suite: &str, name: &str, count: u64, failed: &BTreeMap<u64, String>) -> String {
    let again = format!("cargo test --workspace --test {suite} {name}");
    let mut text = format!("{} of {count} seeds failed", failed.len());
    for (seed, words) in failed {
        text += &format!("\nseed {seed}: {words}\n  again: SMC_SEED={seed} {again}");
    }
    text
}

/// The message of a panic.
pub fn words_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref().copied()).unwrap_or("no words").to_owned()
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `len` bytes that no other seed yields, so that they cannot be taken for other bytes.
pub fn payload(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Dice::new(seed).fill(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CI runs other seeds today than yesterday, and a single seed can be run alone.
    #[test]
    fn seeds_are_those_that_the_environment_names() {
        assert_eq!(chosen(60, None, None, None), 0..60);
        assert_eq!(chosen(60, None, Some(10), None), 0..10);
        assert_eq!(chosen(60, None, Some(10), Some(500)), 500..510);
        assert_eq!(chosen(60, None, None, Some(500)), 500..560);
        assert_eq!(chosen(60, Some(7), Some(10), Some(500)), 7..8);
    }

    /// Someone who mends one failing seed wants to know of the others.
    #[test]
    fn a_failing_seed_does_not_end_the_run() {
        let ran = Mutex::new(Vec::new());
        let all = AssertUnwindSafe(|| {
            run_all("sim", "some", 10..20, |seed| {
                locked(&ran).push(seed);
                assert!(![12, 17].contains(&seed), "no good");
            })
        });
        let words = words_of(&*catch_unwind(all).unwrap_err());
        assert_eq!(locked(&ran).len(), 10);
        assert!(words.starts_with("2 of 10 seeds failed"), "{words}");
        assert!(words.contains("seed 12: no good") && words.contains("SMC_SEED=17 "), "{words}");
    }
}
