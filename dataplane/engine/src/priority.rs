//! The priority of a thread whose core others need, too.
//!
//! A thread that sleeps most of the time is scheduled as soon as it wakes, whatever else runs: that
//! serves short messages well, and a higher priority would only let it interrupt the application
//! that has just woken it. A thread that carries a stream competes for its core like any other, and
//! so do the application, the other gateway and the other application: the stream flows as fast as
//! the one of them that waits longest, while the windows between them last for a tenth of a slice.
//! So a thread that carries a stream beside busy programs raises its priority.
//!
//! It gives the priority back when it carries no stream any more, when it has had nothing to carry
//! for a tenth of a second, and when its core is not contended, as far as it knows. That includes
//! the time in which it tries to return to its core.

use std::io;
use std::time::Duration;

use rustix::process::{getpriority_process, setpriority_process};
use smcr_proto::Instant;

/// The priority of the calling thread, and what it depends on.
#[derive(Debug)]
pub struct Priority {
    /// As a value of `nice`, what the thread began with, and what it is raised to.
    usual: i32,
    high: i32,
    /// How many bytes had moved at the last look.
    seen: u64,
    /// How many bytes a turn moves, on average over the last turns that moved any. Zero after a
    /// while in which none did.
    average: u64,
    /// When bytes last moved.
    moved_at: Instant,
    raised: bool,
}

impl Priority {
    /// That of the calling thread, to be raised by `boost` steps of `nice`.
    pub fn of_this_thread(boost: u8) -> Self {
        let usual = getpriority_process(None).expect("a thread that asks for its own is there");
        let high = (usual - i32::from(boost)).max(HIGHEST);
        Self { usual, high, seen: 0, average: 0, moved_at: Instant(0), raised: false }
    }

    /// Whether it is raised.
    pub fn is_raised(&self) -> bool {
        self.raised
    }

    /// When [`after_turn`](Self::after_turn) must be called again at the latest: a thread that
    /// sleeps must not keep its priority until something wakes it.
    pub fn deadline(&self) -> Option<Instant> {
        self.raised.then(|| self.moved_at + QUIET)
    }

    /// A turn ended at `now`. `bytes` have moved in all turns so far, and `contended` tells whether
    /// others need the core ([`Idle::is_contended`](crate::idle::Idle::is_contended)). Returns what
    /// became of the attempt to change the priority, if that was due.
    pub fn after_turn(
        &mut self,
        now: Instant,
        bytes: u64,
        contended: bool,
    ) -> Option<io::Result<()>> {
        let raised = self.judge(now, bytes, contended);
        self.change(raised, |nice| setpriority_process(None, nice).map_err(Into::into))
    }

    /// Raises it or gives it back, if that is not done already. A thread that may not raise it does
    /// not try again: that seldom changes while a process runs, and each attempt is a system call.
    fn change(
        &mut self,
        raised: bool,
        set: impl FnOnce(i32) -> io::Result<()>,
    ) -> Option<io::Result<()>> {
        if raised == self.raised || self.high == self.usual {
            return None;
        }
        let outcome = set(if raised { self.high } else { self.usual });
        match outcome {
            Ok(()) => self.raised = raised,
            Err(_) if raised => self.high = self.usual,
            // It stays raised, and is given back another time.
            Err(_) => {}
        }
        Some(outcome)
    }

    fn judge(&mut self, now: Instant, bytes: u64, contended: bool) -> bool {
        let moved = bytes.wrapping_sub(std::mem::replace(&mut self.seen, bytes));
        if moved > 0 {
            self.average = (self.average * 7 + moved) / 8;
            self.moved_at = now;
        } else if now.since(self.moved_at) >= QUIET {
            self.average = 0;
        }
        contended && self.average >= if self.raised { STREAM / 4 } else { STREAM }
    }
}

/// A thread that moves so many bytes in a turn carries a stream.
const STREAM: u64 = 32_768;
/// A stream that has not moved for so long is over, or waits for somebody whom our priority does
/// not help. Its parts wait for each other for some slices of the scheduler, of 4 ms at most each.
const QUIET: Duration = Duration::from_millis(100);
/// The highest priority there is.
const HIGHEST: i32 = -20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idle::{Advice, Idle, Policy};

    const START: Instant = Instant(1_000_000_000);
    const TURN: Duration = Duration::from_micros(20);

    /// One whose last turn ended at [`START`]; `raised` and `average` are what it did until then.
    fn carrying(average: u64, raised: bool) -> Priority {
        Priority { usual: 0, high: -5, seen: 0, average, moved_at: START, raised }
    }

    /// Turns of `each` bytes, and whether the priority is to be raised after the last of them.
    fn carry(priority: &mut Priority, turns: u64, each: u64, contended: bool) -> bool {
        for _ in 0..turns {
            let (now, bytes) = (priority.moved_at + TURN, priority.seen + each);
            priority.raised = priority.judge(now, bytes, contended);
        }
        priority.raised
    }

    #[test]
    fn only_streams_beside_busy_programs_raise_it() {
        let fresh = || carrying(0, false);
        assert!(!carry(&mut fresh(), 1000, 64, true), "a request and its answer");
        assert!(!carry(&mut fresh(), 1000, 32 * 64, true), "32 of them");
        assert!(!carry(&mut fresh(), 1000, 131_072, false), "the core is free");
        let mut priority = fresh();
        assert!(carry(&mut priority, 1000, 131_072, true));
        assert!(carry(&mut priority, 3, 64, true), "a few small ones do not count");
        assert!(!carry(&mut priority, 20, 64, true));
        assert!(carry(&mut priority, 1000, 131_072, true));
    }

    /// One turn in each situation: what moved, how long nothing had, and who needs the core.
    #[test]
    fn each_situation_raises_it_or_gives_it_back() {
        const SMALL: u64 = STREAM / 4 - 1;
        let soon = QUIET - Duration::from_nanos(1);
        for (average, after, moved, contended, [from_usual, from_raised]) in [
            // It carries a stream.
            (STREAM, TURN, STREAM, true, [true, true]),
            (STREAM, soon, STREAM, true, [true, true]),
            (STREAM, QUIET, STREAM, true, [true, true]),
            // The stream has become thinner, or ends.
            (STREAM, TURN, 64, true, [false, true]),
            (SMALL, TURN, 64, true, [false, false]),
            // Nothing moves: for a moment, for a while, for a long time.
            (STREAM, TURN, 0, true, [true, true]),
            (STREAM, soon, 0, true, [true, true]),
            (STREAM, QUIET, 0, true, [false, false]),
            (STREAM, 1000 * QUIET, 0, true, [false, false]),
            (u64::MAX / 8, QUIET, 0, true, [false, false]),
            // Others do not need the core, or that is being found out.
            (STREAM, TURN, STREAM, false, [false, false]),
            (STREAM, TURN, 64, false, [false, false]),
            (STREAM, TURN, 0, false, [false, false]),
            (STREAM, QUIET, 0, false, [false, false]),
        ] {
            for (raised, expected) in [(false, from_usual), (true, from_raised)] {
                let mut priority = carrying(average, raised);
                let judged = priority.judge(START + after, moved, contended);
                let case = (average, after, moved, contended, raised);
                assert_eq!(judged, expected, "{case:?}");
            }
        }
    }

    /// A stream that begins again after a while must show first that it is one.
    #[test]
    fn a_quiet_thread_forgets_the_stream() {
        let mut priority = carrying(STREAM, true);
        assert_eq!(priority.deadline(), Some(START + QUIET), "it wakes to give it back");
        priority.raised = priority.judge(START + QUIET, 0, true);
        assert_eq!((priority.raised, priority.deadline()), (false, None));
        priority.raised = priority.judge(START + 2 * QUIET, 64, true);
        assert!(!priority.raised);
    }

    /// A poller that tries to return offers the core to others. With a raised priority it would get
    /// it back at once, take the core for free, and lose slices there.
    #[test]
    fn it_is_given_back_before_the_core_is_tried() {
        let mut idle = Idle::new(Policy::Adaptive, Duration::from_micros(50));
        let (mut now, mut bytes, mut priority) = (START, 0, carrying(2 * STREAM, false));
        let mut seen = Vec::new();
        for _ in 0..40_000 {
            now = now + TURN;
            bytes += 2 * STREAM;
            let advice = idle.after_turn(now, true);
            priority.raised = priority.judge(now, bytes, idle.is_contended());
            if seen.last() != Some(&(advice, priority.raised)) {
                seen.push((advice, priority.raised));
            }
            if advice == Advice::Yield {
                now = now + Duration::from_millis(4);
                idle.after_offer(now);
            }
        }
        let expected = [(Advice::Yield, false), (Advice::Sleep, true)];
        assert!(
            seen.len() >= 5 && seen.chunks(2).all(|pair| expected.starts_with(pair)),
            "{seen:?}"
        );
    }

    #[test]
    fn what_was_refused_is_not_raised_and_not_tried_again() {
        let denied = |_| Err(io::ErrorKind::PermissionDenied.into());
        let mut priority = carrying(STREAM, false);
        assert!(priority.change(true, denied).expect("it is due").is_err());
        assert_eq!((priority.is_raised(), priority.deadline()), (false, None), "nothing to undo");
        assert!(priority.change(true, |_| Ok(())).is_none(), "it was refused");
        assert!(priority.change(false, |_| Ok(())).is_none(), "it is as usual");
        // To give it back is never refused; if it were, it would be due as before.
        let mut priority = carrying(STREAM, true);
        assert!(priority.change(false, denied).expect("it is due").is_err());
        assert!(priority.is_raised());
        assert!(priority.change(false, |_| Ok(())).expect("it is due").is_ok());
        assert!(!priority.is_raised());
    }

    /// Whoever may not raise it (this test, if it is not root) goes on as before.
    #[test]
    fn it_is_raised_and_put_back() {
        std::thread::spawn(|| {
            let usual = getpriority_process(None).unwrap();
            let mut priority = Priority::of_this_thread(3);
            priority.average = 1 << 20;
            let outcome = priority.after_turn(START, 1 << 20, true).expect("it is due");
            let raised = usual - 3 * i32::from(outcome.is_ok());
            assert_eq!(getpriority_process(None).unwrap(), raised.max(HIGHEST));
            assert_eq!(priority.is_raised(), outcome.is_ok());
            assert!(priority.after_turn(START, 1 << 20, true).is_none(), "it is done");
            let given_back = priority.after_turn(START, 1 << 20, false);
            assert_eq!(given_back.is_some(), outcome.is_ok(), "if there is anything to give");
            assert_eq!(getpriority_process(None).unwrap(), usual);
        })
        .join()
        .unwrap();
    }
}
