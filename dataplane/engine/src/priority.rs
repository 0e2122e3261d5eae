//! The priority of a thread whose core others need, too.
//!
//! A thread that sleeps most of the time is scheduled as soon as it wakes, whatever else runs: that
//! serves short messages well, and a higher priority would only let it interrupt the application
//! that has just woken it. A thread that carries a stream competes for its core like any other, and
//! so do the application, the other gateway and the other application: the stream flows as fast as
//! the one of them that waits longest, while the windows between them last for a tenth of a slice.
//! So a thread that carries a stream beside busy programs raises its priority.

use std::io;

use rustix::process::{getpriority_process, setpriority_process};

/// The priority of the calling thread, and what it depends on.
#[derive(Debug)]
pub struct Priority {
    /// As a value of `nice`, what the thread began with, and what it is raised to.
    usual: i32,
    high: i32,
    /// How many bytes had moved at the last look.
    seen: u64,
    /// How many bytes a turn moves, on average over the last turns that moved any.
    average: u64,
    raised: bool,
}

impl Priority {
    /// That of the calling thread, to be raised by `boost` steps of `nice`.
    pub fn of_this_thread(boost: u8) -> Self {
        let usual = getpriority_process(None).expect("a thread that asks for its own is there");
        let high = (usual - i32::from(boost)).max(HIGHEST);
        Self { usual, high, seen: 0, average: 0, raised: false }
    }

    /// Whether it is raised.
    pub fn is_raised(&self) -> bool {
        self.raised
    }

    /// A turn is over. `bytes` have moved in all turns so far, and `contended` tells whether others
    /// need the core. Returns what became of the attempt to change the priority, if that was due.
    pub fn after_turn(&mut self, bytes: u64, contended: bool) -> Option<io::Result<()>> {
        let raised = self.judge(bytes, contended);
        if raised == self.raised || self.high == self.usual {
            return None;
        }
        self.raised = raised;
        let nice = if raised { self.high } else { self.usual };
        Some(setpriority_process(None, nice).map_err(Into::into))
    }

    fn judge(&mut self, bytes: u64, contended: bool) -> bool {
        let moved = bytes.wrapping_sub(std::mem::replace(&mut self.seen, bytes));
        if moved > 0 {
            self.average = (self.average * 7 + moved) / 8;
        }
        contended && self.average >= if self.raised { STREAM / 4 } else { STREAM }
    }
}

/// A thread that moves so many bytes in a turn carries a stream.
const STREAM: u64 = 32_768;
/// The highest priority there is.
const HIGHEST: i32 = -20;

#[cfg(test)]
mod tests {
    use super::*;

    /// Turns of `each` bytes, and whether the priority is to be raised after the last of them.
    fn carry(priority: &mut Priority, turns: u64, each: u64, contended: bool) -> bool {
        for _ in 0..turns {
            let bytes = priority.seen + each;
            priority.raised = priority.judge(bytes, contended);
        }
        priority.raised
    }

    #[test]
    fn only_streams_beside_busy_programs_raise_it() {
        let fresh = || Priority { usual: 0, high: -5, seen: 0, average: 0, raised: false };
        assert!(!carry(&mut fresh(), 1000, 64, true), "a request and its answer");
        assert!(!carry(&mut fresh(), 1000, 32 * 64, true), "32 of them");
        assert!(!carry(&mut fresh(), 1000, 131_072, false), "the core is free");
        let mut priority = fresh();
        assert!(carry(&mut priority, 1000, 131_072, true));
        assert!(carry(&mut priority, 1000, 0, true), "turns that move nothing do not count");
        assert!(carry(&mut priority, 3, 64, true), "a few small ones neither");
        assert!(!carry(&mut priority, 20, 64, true));
        carry(&mut priority, 1000, 131_072, true);
        assert!(!carry(&mut priority, 1, 131_072, false), "the others are gone");
    }

    /// Whoever may not raise it (this test, if it is not root) goes on as before.
    #[test]
    fn it_is_raised_and_put_back() {
        std::thread::spawn(|| {
            let usual = getpriority_process(None).unwrap();
            let mut priority = Priority::of_this_thread(3);
            priority.average = 1 << 20;
            let outcome = priority.after_turn(1 << 20, true).expect("it is due");
            let raised = usual - 3 * i32::from(outcome.is_ok());
            assert_eq!(getpriority_process(None).unwrap(), raised.max(HIGHEST));
            assert!(priority.after_turn(1 << 20, true).is_none(), "it is raised already");
            let _ = priority.after_turn(1 << 20, false).expect("it is due");
            assert_eq!(getpriority_process(None).unwrap(), usual);
        })
        .join()
        .unwrap();
    }
}
