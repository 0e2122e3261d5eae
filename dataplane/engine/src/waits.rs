//! How long a thread has had a core, and waited for one.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::str;
use std::time::Duration;

/// The time that the scheduler has given a thread a core, and kept it from one because others had
/// it.
#[derive(Debug)]
pub(crate) struct Waits {
    /// What the kernel counts of a thread, on one line: nanoseconds on a core, nanoseconds in the
    /// queue for one, and how many times it was given one. None if this kernel does not count, or
    /// there is no `/proc`.
    schedstat: Option<File>,
}

impl Waits {
    /// Those of the calling thread.
    pub(crate) fn of_this_thread() -> Self {
        Self { schedstat: File::open("/proc/thread-self/schedstat").ok() }
    }

    /// All of them together, since the thread began; nothing if nobody counts them.
    pub(crate) fn so_far(&self) -> Duration {
        self.read().map(|[_, waited]| waited).unwrap_or_default()
    }

    /// How long the thread was not asleep, since it began: on a core, or waiting for one. None if
    /// nobody counts that. Some kernels leave out the time that interrupts take.
    pub(crate) fn awake(&self) -> Option<Duration> {
        self.read().map(|[ran, waited]| ran + waited)
    }

    /// How long the thread was on a core, and waited for one.
    fn read(&self) -> Option<[Duration; 2]> {
        let mut line = [0; 80];
        let len = self.schedstat.as_ref()?.read_at(&mut line, 0).ok()?;
        let mut words = str::from_utf8(&line[..len]).ok()?.split(' ');
        let mut nanos = || words.next()?.parse().ok().map(Duration::from_nanos);
        Some([nanos()?, nanos()?])
    }
}

#[cfg(test)]
impl Waits {
    /// Those that this file tells of.
    pub(crate) fn told_by(schedstat: Option<File>) -> Self {
        Self { schedstat }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::sync::Barrier;
    use std::thread;

    use super::*;
    use crate::affinity::Affinity;
    use crate::clock::Clock;

    /// Two threads that want one core wait for each other: in 200 ms, each for about 100.
    #[test]
    fn who_shares_a_core_waits_for_it() {
        let core = Affinity::of_this_thread().unwrap().cores().next().unwrap();
        let (clock, barrier) = (Clock::new(), Barrier::new(2));
        let worker = || {
            Affinity::of_this_thread().unwrap().move_to(core).unwrap();
            let waits = Waits::of_this_thread();
            barrier.wait();
            let before = (clock.now(), waits.so_far());
            while clock.now().since(before.0) < Duration::from_millis(200) {}
            let waited = waits.so_far() - before.1;
            assert!(waited <= clock.now().since(before.0), "{waited:?}");
            waited
        };
        let waited = thread::scope(|scope| {
            [scope.spawn(worker), scope.spawn(worker)].map(|thread| thread.join().unwrap())
        });
        let sum = waited[0] + waited[1];
        assert!(sum >= Duration::from_millis(100), "{waited:?}; does this kernel count?");
    }

    #[test]
    fn what_cannot_be_read_is_nothing() {
        let nobody = Waits::told_by(None);
        assert_eq!((nobody.so_far(), nobody.awake()), (Duration::ZERO, None));
        for (line, told) in [
            ("12 34 56\n", Some((34, 46))),
            ("", None),
            ("12", None),
            ("12 x 56\n", None),
            ("x 34 56\n", None),
        ] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(line.as_bytes()).unwrap();
            let waits = Waits::told_by(Some(file));
            let waited = told.map(|(waited, _)| waited).unwrap_or_default();
            assert_eq!(waits.so_far(), Duration::from_nanos(waited), "{line:?}");
            let awake = told.map(|(_, awake)| Duration::from_nanos(awake));
            assert_eq!(waits.awake(), awake, "{line:?}");
        }
    }
}
