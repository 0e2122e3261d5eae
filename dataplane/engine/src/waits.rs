//! How long a thread has waited for a core.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::str;
use std::time::Duration;

/// The time that the scheduler has kept a thread from its core because others had it.
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
        let mut line = [0; 80];
        let read = |file: &File| file.read_at(&mut line, 0).ok();
        let len = self.schedstat.as_ref().and_then(read).unwrap_or_default();
        let waited = str::from_utf8(&line[..len]).ok().and_then(|line| line.split(' ').nth(1));
        Duration::from_nanos(waited.and_then(|nanos| nanos.parse().ok()).unwrap_or_default())
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
        assert_eq!(Waits::told_by(None).so_far(), Duration::ZERO);
        for (line, nanos) in [("", 0), ("12 34 56\n", 34), ("12", 0), ("12 x 56\n", 0)] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(line.as_bytes()).unwrap();
            let waits = Waits::told_by(Some(file));
            assert_eq!(waits.so_far(), Duration::from_nanos(nanos), "{line:?}");
        }
    }
}
