//! The priority of a thread whose core others need, too.
//!
//! A thread that sleeps most of the time is scheduled as soon as it wakes, whatever else runs, as
//! long as the scheduler still owes it time. One that carries a stream, or many requests, uses up
//! what it is owed; then it competes for its core like any other, and so do the application, the
//! other gateway and the other application. Whoever of them waits longest decides how fast a stream
//! flows, while the windows between them last for a tenth of a slice, and each time a request meets
//! one that waits it is answered milliseconds late. So a thread that carries anything beside busy
//! programs raises its priority.
//!
//! How much a nice value weighs depends on who else is there: next to nothing against programs of
//! other sessions or cgroups, which get their shares first. So a thread whose load gains by that
//! (few connections, or large pieces) also becomes real-time: it runs before all ordinary threads
//! when it has something to do. It stays so only as long as it sleeps for some of the time.
//!
//! Short connections gain by the opposite: others do most of the work
//! ([`Idle::gathers`](crate::idle::Idle::gathers)). With them a thread stays at its nice value, and
//! lets whoever runs go on when it wakes up (`SCHED_BATCH`). A crowd that leaves no time
//! (`crowd`) gains by that as well, but the thread's nice value is raised as with any other load.
//!
//! It gives all this back when it has had nothing to carry for a tenth of a second, and what makes
//! it run sooner also when its core is not contended, as far as it knows. That includes the time in
//! which it tries to return to its core.
//!
//! (Only streams raised it once, and by five steps of `nice`: a thread that preempts the
//! application that has just woken it gains nothing for the next request. But it gains for the
//! slowest. Beside two busy loops of the usual priority, three rounds of four had a 99th percentile
//! of 1 to 3 ms for a request and its answer. With five steps for every load it was as many rounds,
//! with eight none, and with ten the percentile was 0.2 ms. It has a cost: batches become smaller,
//! so 32 requests at a time are answered slower with nineteen steps than with ten, and 12
//! to 15 % fewer short connections are made with ten than with none.)

use std::io;
use std::time::Duration;

use rustix::process::{Resource, getpriority_process, getrlimit, setpriority_process};
use smcr_os::scheduling::{self, Class};
use smcr_proto::Instant;

/// The priority of the calling thread, and what it depends on.
#[derive(Debug)]
pub struct Priority {
    /// As a value of `nice`, what the thread began with, and what it is raised to.
    usual: i32,
    high: i32,
    /// What a thread without privilege may raise it to.
    permitted: i32,
    /// How many bytes had moved at the last look.
    seen: u64,
    /// When bytes last moved, if that was a moment ago.
    moved_at: Option<Instant>,
    raised: bool,
    /// Whether it may become real-time, or a batch thread, as far as it knows.
    may_be_realtime: bool,
    may_be_batch: bool,
    class: Class,
}

/// What a load gains by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gain {
    /// By running before all ordinary threads.
    Haste,
    /// By letting others go on.
    Patience,
    /// By letting others go on, if its nice value is raised.
    Batches,
    /// By neither.
    Neither,
}

impl Priority {
    /// That of the calling thread, to be raised by `boost` steps of `nice`, and to become real-time
    /// if it `may_be_realtime`. What class somebody else has chosen for it stays.
    pub fn of_this_thread(boost: u8, may_be_realtime: bool) -> Self {
        let usual = getpriority_process(None).expect("a thread that asks for its own is there");
        let high = (usual - i32::from(boost)).max(HIGHEST);
        let permitted = permitted(getrlimit(Resource::Nice).current);
        let ordinary = scheduling::is_ordinary();
        Self {
            usual,
            high,
            permitted,
            seen: 0,
            moved_at: None,
            raised: false,
            may_be_realtime: may_be_realtime && ordinary,
            may_be_batch: ordinary,
            class: Class::Ordinary,
        }
    }

    /// Whether its nice value is raised.
    pub fn is_raised(&self) -> bool {
        self.raised
    }

    /// Whether it is real-time.
    pub fn is_realtime(&self) -> bool {
        self.class == Class::RealTime
    }

    /// Whether it lets others go on when it wakes up.
    pub fn is_batch(&self) -> bool {
        self.class == Class::Batch
    }

    /// Whether it may become real-time, as far as it knows.
    pub fn may_be_realtime(&self) -> bool {
        self.may_be_realtime
    }

    /// When [`after_turn`](Self::after_turn) must be called again at the latest: a thread that
    /// sleeps must not keep its priority until something wakes it.
    pub fn deadline(&self) -> Option<Instant> {
        self.moved_at.filter(|_| self.raised || self.class != Class::Ordinary).map(|at| at + QUIET)
    }

    /// A turn ended at `now`. `bytes` have moved in all turns so far, `contended` tells whether
    /// others need the core ([`Idle::is_contended`](crate::idle::Idle::is_contended)), and `gain`
    /// what the load gains by. Returns what became of the attempts to change the nice value and the
    /// class, if that was due.
    pub fn after_turn(
        &mut self,
        now: Instant,
        bytes: u64,
        contended: bool,
        gain: Gain,
    ) -> [Option<io::Result<()>>; 2] {
        self.look(now, bytes);
        let set_nice = |nice| setpriority_process(None, nice).map_err(Into::into);
        self.settle(contended, gain, set_nice, scheduling::set)
    }

    /// Changes what is due.
    fn settle(
        &mut self,
        contended: bool,
        gain: Gain,
        set_nice: impl FnOnce(i32) -> io::Result<()>,
        set_class: impl FnOnce(Class) -> io::Result<()>,
    ) -> [Option<io::Result<()>>; 2] {
        let carries = self.moved_at.is_some();
        let class = match gain {
            Gain::Haste if carries && contended => Class::RealTime,
            Gain::Patience if carries => Class::Batch,
            Gain::Batches if carries && contended => Class::Batch,
            Gain::Haste | Gain::Patience | Gain::Batches | Gain::Neither => Class::Ordinary,
        };
        let raised = carries && contended && gain != Gain::Patience;
        [self.change(raised, set_nice), self.set_class(class, set_class)]
    }

    /// Raises the nice value or gives it back, if that is not done already. A thread that may not
    /// raise it so far raises it as far as its limit permits. If it may not do that either, it does
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
            Err(_) if raised && (self.high + 1..self.usual).contains(&self.permitted) => {
                self.high = self.permitted;
            }
            Err(_) if raised => self.high = self.usual,
            // It stays raised until a later turn.
            Err(_) => {}
        }
        Some(outcome)
    }

    /// Becomes a thread of this class, if it is not and may; tries none again that was refused.
    fn set_class(
        &mut self,
        wanted: Class,
        set: impl FnOnce(Class) -> io::Result<()>,
    ) -> Option<io::Result<()>> {
        let may = match wanted {
            Class::RealTime => self.may_be_realtime,
            Class::Batch => self.may_be_batch,
            Class::Ordinary => true,
        };
        let wanted = if may { wanted } else { Class::Ordinary };
        if wanted == self.class {
            return None;
        }
        let outcome = set(wanted);
        match (&outcome, wanted) {
            (Ok(()), _) => self.class = wanted,
            (Err(_), Class::RealTime) => self.may_be_realtime = false,
            (Err(_), Class::Batch) => self.may_be_batch = false,
            // It stays what it is until a later turn.
            (Err(_), Class::Ordinary) => {}
        }
        Some(outcome)
    }

    /// Notes whether anything has moved.
    fn look(&mut self, now: Instant, bytes: u64) {
        if std::mem::replace(&mut self.seen, bytes) != bytes {
            self.moved_at = Some(now);
        }
        self.moved_at = self.moved_at.filter(|&at| now.since(at) < QUIET);
    }
}

/// What a thread without privilege may raise its priority to, by its RLIMIT_NICE: that counts from
/// 1 for the lowest priority to 40 for the highest.
fn permitted(limit: Option<u64>) -> i32 {
    limit.map_or(HIGHEST, |limit| 20 - i32::try_from(limit.min(40)).expect("40 at most"))
}

/// Who has moved nothing for so long is idle, or waits for somebody whom our priority does not
/// help. The parts of a connection wait for each other for some slices of the scheduler, of 4 ms at
/// most each.
const QUIET: Duration = Duration::from_millis(100);
/// The highest priority there is.
const HIGHEST: i32 = -20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idle::{Advice, Idle, Policy};

    const START: Instant = Instant(1_000_000_000);
    const TURN: Duration = Duration::from_micros(20);

    /// One that last moved something at [`START`].
    fn carrying(raised: bool) -> Priority {
        let moved_at = Some(START);
        let (usual, high, permitted) = (0, -10, 20);
        let (may_be_realtime, may_be_batch, class) = (true, true, Class::Ordinary);
        let seen = 0;
        Priority {
            usual,
            high,
            permitted,
            seen,
            moved_at,
            raised,
            may_be_realtime,
            may_be_batch,
            class,
        }
    }

    /// A turn after which every change that is due is made. Returns whether it is raised then.
    fn turn(priority: &mut Priority, now: Instant, bytes: u64, contended: bool) -> bool {
        priority.look(now, bytes);
        let _ = priority.settle(contended, Gain::Neither, |_| Ok(()), |_| Ok(()));
        priority.is_raised()
    }

    /// One turn in each situation: what moved, how long nothing had, and who needs the core.
    #[test]
    fn each_situation_raises_it_or_gives_it_back() {
        let soon = QUIET - Duration::from_nanos(1);
        for (after, moved, contended, raised) in [
            // It carries something, much or little.
            (TURN, 131_072, true, true),
            (TURN, 1, true, true),
            (QUIET, 1, true, true),
            (1000 * QUIET, 1, true, true),
            // Nothing moves: for a moment, for a while, for a long time.
            (TURN, 0, true, true),
            (soon, 0, true, true),
            (QUIET, 0, true, false),
            (1000 * QUIET, 0, true, false),
            // Others do not need the core, or that is being found out.
            (TURN, 131_072, false, false),
            (TURN, 0, false, false),
            (QUIET, 0, false, false),
        ] {
            for before in [false, true] {
                let is = turn(&mut carrying(before), START + after, moved, contended);
                assert_eq!(is, raised, "{:?}", (after, moved, contended, before));
            }
        }
    }

    #[test]
    fn a_thread_that_has_moved_nothing_yet_stays_as_it_is() {
        let mut priority = Priority { moved_at: None, ..carrying(false) };
        assert!(!turn(&mut priority, START, 0, true));
        assert!(turn(&mut priority, START, 1, true));
    }

    #[test]
    fn a_quiet_thread_wakes_to_give_it_back() {
        let mut priority = carrying(true);
        assert_eq!(priority.deadline(), Some(START + QUIET));
        turn(&mut priority, START + QUIET, 0, true);
        assert_eq!((priority.raised, priority.deadline()), (false, None));
        turn(&mut priority, START + 2 * QUIET, 64, true);
        assert_eq!((priority.raised, priority.deadline()), (true, Some(START + 3 * QUIET)));
    }

    /// A poller that tries to return offers the core to others. With a raised priority it would get
    /// it back at once, take the core for free, and lose slices there.
    #[test]
    fn it_is_given_back_before_the_core_is_tried() {
        let mut idle = Idle::new(Policy::Adaptive, Duration::from_micros(50));
        let (mut now, mut bytes, mut priority) = (START, 0, carrying(false));
        let mut seen = Vec::new();
        for _ in 0..40_000 {
            now = now + TURN;
            bytes += 64;
            let advice = idle.after_turn(now, true);
            turn(&mut priority, now, bytes, idle.is_contended());
            if seen.last() != Some(&(advice, priority.raised)) {
                seen.push((advice, priority.raised));
            }
            if advice == Advice::Yield {
                now = now + Duration::from_millis(4);
                idle.after_offer(now);
            }
        }
        let is_right = |&(advice, raised): &(Advice, bool)| raised == (advice == Advice::Sleep);
        assert!(seen.len() >= 5 && seen.iter().all(is_right), "{seen:?}");
    }

    #[test]
    fn what_was_refused_is_not_raised_and_not_tried_again() {
        let denied = |_| Err(io::ErrorKind::PermissionDenied.into());
        let mut priority = carrying(false);
        assert!(priority.change(true, denied).expect("it is due").is_err());
        assert_eq!((priority.is_raised(), priority.deadline()), (false, None), "nothing to undo");
        assert!(priority.change(true, |_| Ok(())).is_none(), "it was refused");
        assert!(priority.change(false, |_| Ok(())).is_none(), "it is as usual");
        // As far as it may.
        let mut priority = Priority { permitted: -3, ..carrying(false) };
        assert!(priority.change(true, denied).expect("it is due").is_err());
        let mut asked = Vec::new();
        let outcome = priority.change(true, |nice| {
            asked.push(nice);
            Ok(())
        });
        assert!(outcome.expect("it is due").is_ok() && priority.is_raised());
        assert_eq!(asked, [-3]);
        // Nor even that.
        let mut priority = Priority { permitted: -3, ..carrying(false) };
        assert!(priority.change(true, denied).expect("it is due").is_err());
        assert!(priority.change(true, denied).expect("it is due").is_err());
        assert!(priority.change(true, denied).is_none());
        for (limit, expected) in
            [(Some(0), 20), (Some(25), -5), (Some(40), -20), (Some(u64::MAX - 1), -20), (None, -20)]
        {
            assert_eq!(permitted(limit), expected, "{limit:?}");
        }
        // To give it back is never refused; if it were, it would be due as before.
        let mut priority = carrying(true);
        assert!(priority.change(false, denied).expect("it is due").is_err());
        assert!(priority.is_raised());
        assert!(priority.change(false, |_| Ok(())).expect("it is due").is_ok());
        assert!(!priority.is_raised());
    }

    /// Whatever ends it ends being of another class: calm, silence, and a load that gains nothing.
    #[test]
    fn it_is_of_another_class_only_while_that_helps() {
        use Class::{Batch, Ordinary, RealTime};
        use Gain::{Batches, Haste, Neither, Patience};
        let soon = START + TURN;
        for (now, contended, gain, expected) in [
            (soon, true, Haste, (true, RealTime)),
            (soon, true, Neither, (true, Ordinary)),
            (soon, true, Patience, (false, Batch)),
            (soon, true, Batches, (true, Batch)),
            (soon, false, Batches, (false, Ordinary)),
            (soon, false, Haste, (false, Ordinary)),
            (soon, false, Patience, (false, Batch)),
            (START + QUIET, true, Haste, (false, Ordinary)),
            (START + QUIET, true, Patience, (false, Ordinary)),
            (START + QUIET, true, Batches, (false, Ordinary)),
        ] {
            for class in [Ordinary, Batch, RealTime] {
                let mut priority = Priority { class, ..carrying(true) };
                priority.look(now, 0);
                let _ = priority.settle(contended, gain, |_| Ok(()), |_| Ok(()));
                let is = (priority.is_raised(), priority.class);
                assert_eq!(is, expected, "{:?}", (now, contended, gain, class));
            }
        }
    }

    #[test]
    fn it_is_of_a_class_only_as_long_as_it_may() {
        let denied = |_| Err(io::ErrorKind::PermissionDenied.into());
        for class in [Class::RealTime, Class::Batch] {
            let mut priority = Priority { moved_at: Some(START), ..carrying(false) };
            assert!(priority.set_class(Class::Ordinary, |_| Ok(())).is_none(), "it is");
            assert!(priority.set_class(class, |_| Ok(())).expect("it is due").is_ok());
            assert!(priority.set_class(class, |_| Ok(())).is_none(), "it is");
            assert!(priority.class == class && !priority.is_raised());
            assert_eq!(priority.deadline(), Some(START + QUIET), "something to give back");
            // That is never refused; if it were, it would be due as before.
            assert!(priority.set_class(Class::Ordinary, denied).expect("it is due").is_err());
            assert!(priority.set_class(Class::Ordinary, |_| Ok(())).expect("it is due").is_ok());
            assert_eq!((priority.class, priority.deadline()), (Class::Ordinary, None));
            assert!(priority.set_class(class, denied).expect("it is due").is_err());
            assert!(priority.set_class(class, |_| Ok(())).is_none(), "it was refused");
        }
        let never = Priority { may_be_realtime: false, may_be_batch: false, ..carrying(false) };
        for (class, from) in [(Class::RealTime, Class::Batch), (Class::Batch, Class::RealTime)] {
            let mut priority = Priority { class: from, ..never };
            assert!(priority.set_class(class, |_| Ok(())).expect("it is due").is_ok());
            assert_eq!(priority.class, Class::Ordinary, "instead of {class:?}");
        }
    }

    /// Whoever may not raise it (this test, if it is not root) goes on as before.
    #[test]
    fn it_is_raised_and_put_back() {
        std::thread::spawn(|| {
            let usual = getpriority_process(None).unwrap();
            let mut priority = Priority { permitted: 20, ..Priority::of_this_thread(3, true) };
            let [nice, policy] = priority.after_turn(START, 1 << 20, true, Gain::Haste);
            let (nice, policy) = (nice.expect("it is due"), policy.expect("it is due"));
            let raised = usual - 3 * i32::from(nice.is_ok());
            assert_eq!(getpriority_process(None).unwrap(), raised.max(HIGHEST));
            assert_eq!(priority.is_raised(), nice.is_ok());
            assert_eq!(priority.is_realtime(), policy.is_ok());
            let again = priority.after_turn(START, 1 << 20, true, Gain::Haste);
            assert!(again.iter().all(Option::is_none), "it is done");
            // A load that gains nothing leaves it raised.
            let [unchanged, back] = priority.after_turn(START, 1 << 20, true, Gain::Neither);
            assert_eq!((unchanged.is_some(), back.is_some()), (false, policy.is_ok()));
            assert_eq!(priority.is_raised(), nice.is_ok());
            let [given_back, unchanged] = priority.after_turn(START, 1 << 20, false, Gain::Haste);
            assert_eq!(given_back.is_some(), nice.is_ok(), "if there is anything to give");
            assert!(unchanged.is_none());
            assert_eq!(getpriority_process(None).unwrap(), usual);
        })
        .join()
        .unwrap();
    }
}
