//! On which core a poller runs that has none to itself: where the applications run that it serves.
//!
//! Where cores are contended ([`Idle`](crate::idle::Idle)), a poller with little to do sleeps most
//! of the time. Who is woken on the core of its waker runs there at once; on another core an
//! interrupt comes first, which costs a virtual machine tens of microseconds, and comes twice for a
//! request and its answer. The scheduler weighs the loads of cores, not interrupts, so it leaves
//! threads apart that have nothing to do at the same time.
//!
//! A poller that has much to do is left to the scheduler: it and its applications work at the same
//! time.
//!
//! Beside two busy loops at nice 5 (two cores, 14 rounds), a request and its answer took 31 µs so,
//! half of the rounds less than 29; without it, 89 in the same hour, and through a pair of HAProxy
//! 66. While the thread finds out whether others still need its core, it stays: with a core of the
//! scheduler's choice then, the next rounds found it elsewhere more often than not.

use std::time::Duration;

use smcr_proto::Instant;

/// What a poller knows of the core of its applications.
#[derive(Debug, Default)]
pub(crate) struct Nearness {
    /// When the present window began.
    since: Instant,
    /// The time awake and the sleeps in it.
    awake: Duration,
    sleeps: u32,
    woke_at: Instant,
    /// Whether the thread had no core to itself when it was last asked.
    in_retreat: bool,
    /// Where an application ran that has sent something in it.
    seen: Option<usize>,
    /// The core to which the thread is bound for its nearness.
    near: Option<usize>,
}

impl Nearness {
    /// The thread slept from `before` until `now`.
    pub(crate) fn slept(&mut self, before: Instant, now: Instant) {
        self.awake += before.since(self.woke_at);
        self.woke_at = now;
        self.sleeps += 1;
    }

    /// Whether [`note`](Self::note) should be called when there is something to note.
    pub(crate) fn asks(&self) -> bool {
        self.in_retreat && self.seen.is_none()
    }

    /// An application ran on this core when it sent something, if any has.
    pub(crate) fn note(&mut self, core: Option<usize>) {
        self.seen = self.seen.or(core);
    }

    /// Where to run from now on, if that has changed: on a core near the applications, or anywhere.
    /// `in_retreat` says that the thread has no core to itself.
    pub(crate) fn decide(&mut self, now: Instant, in_retreat: bool) -> Option<Option<usize>> {
        self.in_retreat = in_retreat;
        let window = now.since(self.since);
        if in_retreat && window < WINDOW || !in_retreat && self.near.is_none() {
            return None;
        }
        let is_light = self.sleeps >= SLEEPS_MIN && self.awake * LIGHT_SHARE < window;
        let before = self.near;
        self.near = match self.seen {
            Some(core) if in_retreat && is_light => Some(core),
            None if in_retreat && is_light => before,
            Some(_) | None => None,
        };
        (self.since, self.awake, self.sleeps, self.seen) = (now, Duration::ZERO, 0, None);
        (self.near != before).then_some(self.near)
    }
}

/// How often to decide.
const WINDOW: Duration = Duration::from_millis(10);
/// Fewer sleeps in a window than this show nothing.
const SLEEPS_MIN: u32 = 20;
/// A thread that is awake for less than one part in this many of the time has little to do.
const LIGHT_SHARE: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A poller that sleeps and wakes, and the time.
    struct Sleeper {
        nearness: Nearness,
        now: Instant,
    }

    impl Sleeper {
        fn new() -> Self {
            Self { nearness: Nearness::default(), now: Instant(1_000_000_000) }
        }

        /// A millisecond in which it sleeps ten times and is awake for `awake` in all, while an
        /// application sends from `core`.
        fn live(
            &mut self,
            awake: Duration,
            core: Option<usize>,
            in_retreat: bool,
        ) -> Vec<Decision> {
            let mut made = Vec::new();
            for _ in 0..10 {
                let before = self.now + awake / 10;
                self.now = self.now + MS / 10;
                self.nearness.slept(before, self.now);
                if self.nearness.asks() {
                    self.nearness.note(core);
                }
                made.extend(self.nearness.decide(self.now, in_retreat));
            }
            made
        }

        fn live_for(&mut self, ms: u32, awake: Duration, core: Option<usize>) -> Vec<Decision> {
            (0..ms).flat_map(|_| self.live(awake, core, true)).collect()
        }
    }

    type Decision = Option<usize>;

    #[test]
    fn a_thread_with_little_to_do_runs_where_its_applications_run() {
        let mut sleeper = Sleeper::new();
        assert_eq!(sleeper.live_for(50, MS / 4, Some(3)), [Some(3)]);
        // They have moved.
        assert_eq!(sleeper.live_for(50, MS / 4, Some(1)), [Some(1)]);
        // Only the peer has sent something: nobody has moved.
        assert_eq!(sleeper.live_for(50, MS / 4, None), []);
        assert_eq!(sleeper.live_for(50, MS * 3 / 4, Some(1)), [None], "much to do");
    }

    #[test]
    fn a_thread_that_others_leave_a_core_asks_nobody() {
        let mut sleeper = Sleeper::new();
        for _ in 0..50 {
            assert_eq!(sleeper.live(MS / 4, Some(3), false), []);
            assert!(!sleeper.nearness.asks());
        }
        assert_eq!(sleeper.live_for(50, MS / 4, Some(3)), [Some(3)]);
        assert_eq!(sleeper.live(MS / 4, Some(3), false), [None], "at once");
    }

    #[test]
    fn a_thread_that_nobody_wakes_is_where_the_scheduler_wants_it() {
        let mut sleeper = Sleeper::new();
        assert_eq!(sleeper.live_for(50, MS / 4, Some(3)), [Some(3)]);
        sleeper.now = sleeper.now + MS * 50;
        assert_eq!(sleeper.live_for(50, Duration::ZERO, None), [None]);
    }
}
