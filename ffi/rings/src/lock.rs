//! The lock of whoever writes, between threads of the application, which may be of several
//! processes.
//!
//! It is held while bytes are copied, and never while somebody waits. But a process can be killed
//! or stopped meanwhile, a signal handler can run in the very thread that has the lock, and can
//! leave what it has interrupted for good (`siglongjmp`). Two copies at the same place would mix
//! two streams. So the lock is taken away from the dead only; whoever cannot have it is told, at
//! once or after a long while.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libc::{c_int, c_long};
use rustix::fs::stat;
use rustix::thread::{Timespec, gettid, nanosleep, sched_yield};

/// The lock is held as long as this lives.
#[must_use = "it is released when it is dropped"]
#[derive(Debug)]
pub(crate) struct Lock<'a> {
    word: &'a AtomicU32,
    thread: u32,
}

/// Why the lock cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// This thread has it: we are in a signal handler that has interrupted it. It goes on when the
    /// handler is through.
    ByThisThread,
    /// Nobody will give it back: of what the holder has copied, nobody knows how much is there.
    ForEver,
    /// It can be had, but the bytes go by a [`Shortcut`](crate::Shortcut), which this process has
    /// not mapped.
    Unmapped,
}

impl<'a> Lock<'a> {
    /// Waits until nobody else has it. `thread` is the number of this thread, with that of its
    /// namespace in the upper bits.
    ///
    /// # Errors
    ///
    /// If that would take for ever.
    pub(crate) fn take(word: &'a AtomicU32, thread: u32) -> Result<Self, Held> {
        for look in 1_u32.. {
            match word.compare_exchange(0, thread, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                Err(holder) if holder == thread => return Err(interrupted()),
                Err(holder) if look.is_multiple_of(LOOKS) => {
                    let is_near = holder >> THREAD_BITS == thread >> THREAD_BITS;
                    if is_near && !is_alive(holder) {
                        // If another thread is faster, we go on waiting for that one.
                        let _ =
                            word.compare_exchange(holder, 0, Ordering::Acquire, Ordering::Relaxed);
                    } else if look >= LOOKS_MAX {
                        return Err(Held::ForEver);
                    } else {
                        pause();
                    }
                }
                Err(_) => sched_yield(),
            }
        }
        INTERRUPTED.with(|count| count.set(0));
        Ok(Self { word, thread })
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        let _ = self.word.compare_exchange(self.thread, 0, Ordering::Release, Ordering::Relaxed);
    }
}

thread_local! {
    /// How often in a row this thread has found that it has a lock already.
    static INTERRUPTED: Cell<u32> = const { Cell::new(0) };
}

/// This thread has the lock. If it asks again and again, either a signal handler waits for what it
/// has interrupted, or that was left for good.
fn interrupted() -> Held {
    INTERRUPTED.with(|count| {
        count.set(count.get() + 1);
        if count.get() < INTERRUPTED_MAX {
            return Held::ByThisThread;
        }
        count.set(0);
        Held::ForEver
    })
}

/// The number of this thread, for [`Application::write`](crate::Application::write): that of
/// another namespace has other upper bits. Never zero, and worth keeping.
pub fn thread() -> u32 {
    // Without the file system, all are taken for one namespace.
    let namespace = stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino % NAMESPACES);
    let namespace = u32::try_from(namespace).unwrap_or(0);
    namespace << THREAD_BITS | gettid().as_raw_nonzero().get().cast_unsigned()
}

/// Whether there is a thread with this number in our namespace.
fn is_alive(thread: u32) -> bool {
    let number = (thread & ((1 << THREAD_BITS) - 1)).cast_signed();
    // SAFETY: `__errno_location` asks for nothing.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the place is valid as long as the thread lives, and only this thread uses it.
    let before = unsafe { *place };
    let (number, no_signal) = (c_long::from(number), c_long::from(0));
    // SAFETY: `tkill` asks for numbers only.
    let result = unsafe { libc::syscall(libc::SYS_tkill, number, no_signal) };
    // SAFETY: as above.
    let error: c_int = unsafe { *place };
    // SAFETY: as above.
    unsafe { *place = before };
    result == 0 || error != libc::ESRCH
}

/// Lets the holder run, also where threads of this priority never would.
fn pause() {
    let time = Timespec { tv_sec: 0, tv_nsec: PAUSE.subsec_nanos().into() };
    // A signal ends it early, which does no harm.
    let _ = nanosleep(&time);
}

/// The number of a thread has so many bits (`PID_MAX_LIMIT` of Linux).
const THREAD_BITS: u32 = 22;
/// So many namespaces have numbers of their own.
const NAMESPACES: u64 = 1 << (32 - THREAD_BITS);
/// So often we look before we ask whether the holder lives, and sleep.
const LOOKS: u32 = 256;
/// For so long.
const PAUSE: Duration = Duration::from_millis(1);
/// So often we look at most: for half a minute. A copy takes a few microseconds.
const LOOKS_MAX: u32 = 30_000 * LOOKS;
/// So often a thread may find in a row that it has the lock.
const INTERRUPTED_MAX: u32 = 1000;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn take(word: &AtomicU32, thread: u32) -> Result<Lock<'_>, Held> {
        Lock::take(word, thread)
    }

    #[test]
    fn one_thread_at_a_time() {
        let (word, count) = (AtomicU32::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let _lock = take(&word, thread()).unwrap();
                        let seen = count.load(Ordering::Relaxed);
                        count.store(seen + 1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!((count.into_inner(), word.into_inner()), (8_000, 0));
    }

    /// A worker that was killed while it wrote would keep all others from writing.
    #[test]
    fn the_dead_lose_it() {
        let word = AtomicU32::new(0);
        let dead = std::thread::spawn(thread).join().unwrap();
        word.store(dead, Ordering::Relaxed);
        drop(take(&word, thread()).unwrap());
        assert_eq!(word.load(Ordering::Relaxed), 0);
    }

    /// In another namespace a thread may live that has no number here.
    #[test]
    fn nobody_judges_threads_of_another_namespace() {
        let word = AtomicU32::new(0);
        let dead = std::thread::spawn(thread).join().unwrap();
        let foreign = dead ^ 1 << THREAD_BITS;
        word.store(foreign, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| take(&word, thread()).map(drop));
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(word.load(Ordering::Relaxed), foreign);
            word.store(0, Ordering::Relaxed);
            assert_eq!(waiter.join().unwrap(), Ok(()));
        });
    }

    /// What it has interrupted goes on where it was: nobody else may write there meanwhile. And if
    /// it never goes on, nobody may wait for it for ever.
    #[test]
    fn a_signal_handler_does_not_get_what_its_thread_has() {
        let word = AtomicU32::new(0);
        let outer = take(&word, 7).unwrap();
        for _ in 1..INTERRUPTED_MAX {
            assert_eq!(take(&word, 7).unwrap_err(), Held::ByThisThread);
        }
        assert_eq!(take(&word, 7).unwrap_err(), Held::ForEver);
        assert_eq!(take(&word, 7).unwrap_err(), Held::ByThisThread);
        drop(outer);
        drop(take(&word, 7).unwrap());
        assert_eq!(word.load(Ordering::Relaxed), 0);
    }
}
