//! Signals while a thread looks instead of sleeping: they must end that as they end a sleep.
//!
//! To hold them back, and to see whether one has come, takes system calls, which would cost more
//! than a few looks do. So the first looks are made without: a signal that comes then has its
//! handler run as if it had come before the program began to wait, which no program can tell.
//!
//! Later they are held back, but for moments in which the kernel says by `ppoll` whether the handler
//! of one has run in this thread. To ask which signals wait would not do: several threads may see
//! the same one, and it ends the sleep of one of them.

use std::mem::MaybeUninit;
use std::ptr;

use libc::sigset_t;

use crate::sys;

/// After the first looks, all signals are held back from this thread as long as this lives.
pub(crate) struct Signals {
    held: Option<Held>,
    looks: u32,
}

/// All signals are held back from this thread as long as this lives.
struct Held {
    before: sigset_t,
}

impl Signals {
    pub(crate) const fn watch() -> Self {
        Self { held: None, looks: 0 }
    }

    /// Whether a signal has come that would have ended a sleep. Now and then it is looked for.
    pub(crate) fn has_one_come(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        self.looks.is_multiple_of(LOOKS) && self.held.get_or_insert_with(Held::new).let_in()
    }

    /// The same, at once.
    pub(crate) fn has_one_come_now(&self) -> bool {
        self.held.as_ref().is_some_and(Held::let_in)
    }
}

impl Held {
    fn new() -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::zeroed());
        // SAFETY: `sigfillset` asks for a place for a set: a live local.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        // SAFETY: `pthread_sigmask` asks for a set, which was just filled, and a place for one.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
        // SAFETY: all bits zero are an empty set, if it was not written.
        Self { before: unsafe { before.assume_init() } }
    }

    /// Lets signals in for a moment. Returns whether the handler of one has run.
    fn let_in(&self) -> bool {
        sys::let_signals_in(&self.before)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: `pthread_sigmask` asks for a set: that which it has given before.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut());
        }
    }
}

/// A system call each time would cost as much as the look itself. So many looks are made without
/// any.
const LOOKS: u32 = 32;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use libc::c_int;

    use super::*;

    static HANDLED: AtomicU32 = AtomicU32::new(0);

    extern "C" fn handle(_: c_int) {
        HANDLED.fetch_add(1, Ordering::Relaxed);
    }

    /// How often the handler has run.
    fn handled() -> u32 {
        HANDLED.load(Ordering::Relaxed)
    }

    fn raise(signal: c_int) {
        // SAFETY: `raise` asks for a number.
        unsafe { libc::raise(signal) };
    }

    #[test]
    fn a_signal_that_comes_meanwhile_is_noticed() {
        let handler: extern "C" fn(c_int) = handle;
        for signal in [libc::SIGUSR1, libc::SIGUSR2] {
            // SAFETY: `signal` asks for a number, and a function that may be called at any time.
            unsafe { libc::signal(signal, handler as libc::sighandler_t) };
        }
        let mut signals = Signals::watch();
        raise(libc::SIGUSR1);
        assert_eq!(handled(), 1, "the first looks hold nothing back");
        assert!((0..LOOKS).all(|_| !signals.has_one_come()));
        // Nobody cares for this one.
        raise(libc::SIGCHLD);
        assert!((0..LOOKS).all(|_| !signals.has_one_come()));
        raise(libc::SIGUSR1);
        assert!((1..LOOKS).all(|_| !signals.has_one_come()) && handled() == 1);
        assert!(signals.has_one_come() && handled() == 2);
        assert!(!signals.has_one_come_now());
        raise(libc::SIGUSR1);
        assert!(signals.has_one_come_now() && handled() == 3);

        let mut nested = Signals::watch();
        assert!((0..LOOKS).all(|_| !nested.has_one_come()));
        raise(libc::SIGUSR2);
        assert!((0..LOOKS).all(|_| !nested.has_one_come()), "held back before");
        drop(nested);
        assert_eq!(handled(), 3);
        drop(signals);
        assert_eq!(handled(), 4);
    }
}
