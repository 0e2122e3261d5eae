//! What suites share: seeds and payloads.
//!
//! A run is repeated by its seed: `SMC_SEED=17 cargo test …` runs seed 17 alone, and
//! `SMC_SEEDS=2000` runs that many instead of the few that every test runs.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

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

/// Runs `one` for every seed, on all cores, and returns what it said in no particular order.
///
/// # Panics
///
/// If a run panics: with its seed, its words, and the command that repeats it as the test `name` of
/// the suite `suite`.
pub fn run_all<T: Send>(
    suite: &str,
    name: &str,
    seeds: Range<u64>,
    one: impl Fn(u64) -> T + Sync,
) -> Vec<T> {
    let next = AtomicU64::new(seeds.start);
    let (said, failed) = (Mutex::new(Vec::new()), Mutex::new(None));
    let worker = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            match catch_unwind(AssertUnwindSafe(|| one(seed))) {
                Ok(outcome) => locked(&said).push(outcome),
                Err(panic) => {
                    next.store(seeds.end, Ordering::Relaxed);
                    *locked(&failed) = Some((seed, words_of(&*panic)));
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(worker);
        }
    });
    if let Some((seed, words)) = locked(&failed).take() {
        panic!(
            "seed {seed}: {words}\n\
             again: SMC_SEED={seed} cargo test --release -p smcgate-tests --test {suite} {name}"
        );
    }
    said.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// What a panic said.
pub fn words_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref().copied()).unwrap_or("no words").to_owned()
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `len` bytes that no other seed yields: what was sent can be told from anything else.
pub fn payload(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Dice::new(seed).fill(&mut bytes);
    bytes
}
