//! How much memory programs have while a load runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::machine;

/// A thread that looks at the resident sizes of programs, ten times a second.
#[derive(Debug)]
pub(crate) struct Watch {
    is_over: Arc<AtomicBool>,
    watcher: JoinHandle<Vec<u64>>,
}

impl Watch {
    /// Begins to watch the programs with these process ids.
    pub(crate) fn begin(pids: Vec<u32>) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&is_over);
        let look = move || pids.iter().map(|pid| machine::rss_bytes(*pid)).sum();
        let watcher = thread::spawn(move || {
            let mut seen = Vec::new();
            while !until.load(Ordering::Relaxed) {
                seen.push(look());
                thread::sleep(EVERY);
            }
            seen
        });
        Self { is_over, watcher }
    }

    /// What all of them had together a second ago, before the connections of the load began to
    /// end; none if it was shorter.
    pub(crate) fn a_second_ago(self) -> Option<u64> {
        self.is_over.store(true, Ordering::Relaxed);
        let seen = self.watcher.join().expect("it only reads files");
        before_the_end(&seen)
    }
}

fn before_the_end(seen: &[u64]) -> Option<u64> {
    seen.len().checked_sub(PER_SECOND).map(|at| seen[at])
}

const EVERY: Duration = Duration::from_millis(100);
const PER_SECOND: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_a_second_ago_is_told() {
        assert_eq!(before_the_end(&[1; PER_SECOND - 1]), None);
        let seen: Vec<u64> = (1..=25).collect();
        assert_eq!(before_the_end(&seen), Some(16));
    }

    #[test]
    fn the_sizes_of_programs_are_added() {
        let pid = std::process::id();
        let watch = Watch::begin(vec![pid, pid]);
        thread::sleep(Duration::from_millis(1_500));
        assert!(watch.a_second_ago().unwrap() > 200_000);
    }
}
