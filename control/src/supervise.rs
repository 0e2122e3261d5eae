//! Threads that may panic, and those that may not.
//!
//! A broken invariant on the control thread or on a poller ends the process: what it would do next
//! is nobody's intention. A fault in what serves operators, in the resolver or in a log ends no
//! connection: such a thread begins anew.

use std::cell::Cell;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

thread_local! {
    static MAY_PANIC: Cell<bool> = const { Cell::new(false) };
}

/// Panics since the start of the process.
static SURVIVED: AtomicU64 = AtomicU64::new(0);

/// From now on a panic ends the process, unless it is on a thread that [`may_panic`].
pub fn abort_on_panic() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        print(panic);
        // A thread that is ending has none any more, and ends the process.
        if !MAY_PANIC.try_with(Cell::get).unwrap_or(false) {
            process::abort();
        }
        SURVIVED.fetch_add(1, Ordering::Relaxed);
    }));
}

/// Runs `work` on a thread of its own until it returns. If it panics, it is called again after a
/// while.
///
/// # Errors
///
/// When the thread cannot be started.
pub fn spawn(
    name: &'static str,
    mut work: impl FnMut() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).spawn(move || {
        may_panic();
        let mut pause = PAUSE_MIN;
        // What a panic has left half done is of this thread alone: others see what it sent them.
        while panic::catch_unwind(AssertUnwindSafe(&mut work)).is_err() {
            tracing::error!(thread = name, again_after = ?pause, "a thread panicked");
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    })
}

/// Lets the calling thread panic without ending the process: somebody else hears of it, as a
/// runtime does of its tasks.
pub fn may_panic() {
    MAY_PANIC.set(true);
}

/// How many panics the process has survived.
pub fn survived() -> u64 {
    SURVIVED.load(Ordering::Relaxed)
}

const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use std::env;
    use std::process::Command;
    use std::sync::mpsc;

    use super::*;

    /// Operators find the endpoint again, and see that something was wrong with it.
    #[test]
    fn a_thread_that_panics_begins_anew() {
        let (say, said) = mpsc::channel();
        let mut times = 0;
        let thread = spawn("test", move || {
            times += 1;
            assert!(times > 2, "a fault");
            say.send(times).unwrap();
        });
        thread.unwrap().join().unwrap();
        assert_eq!(said.recv(), Ok(3));
    }

    /// The other half: this test starts itself again, as a process that panics.
    #[test]
    fn a_panic_elsewhere_ends_the_process() {
        for (part, survives) in [("supervised", true), ("poller", false)] {
            let mut again = Command::new(env::current_exe().unwrap());
            again.args(["--exact", "supervise::tests::panics", "--ignored", "--nocapture"]);
            let status = again.env("SMCGATE_PANICS", part).output().unwrap().status;
            assert_eq!(status.success(), survives, "{part}: {status}");
        }
    }

    #[test]
    #[ignore = "it panics if another test asks it to, in a process of its own"]
    fn panics() {
        let mut panicked = false;
        let panic_once = move || {
            let first = !std::mem::replace(&mut panicked, true);
            assert!(!first, "as I was asked to");
        };
        match env::var("SMCGATE_PANICS").as_deref() {
            Ok("supervised") => {
                abort_on_panic();
                spawn("test", panic_once).unwrap().join().unwrap();
                assert_eq!(survived(), 1);
            }
            Ok(_) => {
                abort_on_panic();
                thread::spawn(panic_once).join().unwrap_err();
            }
            Err(error) => assert_eq!(*error, env::VarError::NotPresent),
        }
    }
}
