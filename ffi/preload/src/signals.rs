//! Signals while a thread looks instead of sleeping: they must end that as they end a sleep.
//!
//! To hold them back, and to see whether one has come, takes system calls, which would cost more
//! than a few looks do. So the first looks are made without, where they take no time: a signal that
//! comes then has its handler run as if it had come before the program began to wait.
//!
//! Otherwise they are held back. If one waits, they are let in for a moment, and the kernel says by
//! `ppoll` whether a handler has run in this thread: several threads may see the same signal wait,
//! and it ends the sleep of one of them.

use std::mem::MaybeUninit;
use std::ptr;

use libc::{c_int, sigset_t};

use crate::{patience, sys};

/// Sooner or later, all signals are held back from this thread as long as this lives.
pub(crate) struct Signals {
    held: Option<Held>,
    looks: u32,
}

/// All signals are held back from this thread as long as this lives.
struct Held {
    before: sigset_t,
}

/// A handler has run in this thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handled {
    /// Whether `recv` goes on after such a signal (SA_RESTART).
    pub(crate) restarts: bool,
}

impl Signals {
    /// For a thread that looks. `begins`: the program's call has done nothing so far.
    pub(crate) fn watch(begins: bool) -> Self {
        // Where others take the core for long, a signal would come in the first looks too often.
        let passes = begins && patience::is_calm();
        Self { held: (!passes).then(Held::new), looks: 0 }
    }

    /// Whether a signal has come that would have ended a sleep. Now and then it is looked for.
    pub(crate) fn has_one_come(&mut self) -> Option<Handled> {
        self.looks = self.looks.wrapping_add(1);
        if !self.looks.is_multiple_of(LOOKS) {
            return None;
        }
        self.held.get_or_insert_with(Held::new).let_in()
    }

    /// The same, at once.
    pub(crate) fn has_one_come_now(&self) -> Option<Handled> {
        self.held.as_ref().and_then(Held::let_in)
    }
}

impl Held {
    fn new() -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::zeroed());
        // SAFETY: `sigfillset` asks for a place for a set: a live local.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        for signal in SYNCHRONOUS {
            // SAFETY: `sigdelset` asks for a set, which was just filled, and a number.
            unsafe { libc::sigdelset(all.as_mut_ptr(), signal) };
        }
        // SAFETY: `pthread_sigmask` asks for a set, which was just filled, and a place for one.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
        // SAFETY: all bits zero are an empty set, if it was not written.
        Self { before: unsafe { before.assume_init() } }
    }

    /// Lets signals in for a moment.
    fn let_in(&self) -> Option<Handled> {
        // Asked before: a handler may change what becomes of the next signal.
        let restarts = self.do_waiting_restart()?;
        sys::let_signals_in(&self.before).then_some(Handled { restarts })
    }

    /// Whether `recv` goes on after the signals that wait, if any does.
    fn do_waiting_restart(&self) -> Option<bool> {
        let mut pending: sigset_t = {
            // SAFETY: all bits zero are an empty set.
            unsafe { MaybeUninit::zeroed().assume_init() }
        };
        // SAFETY: `sigpending` asks for a place for a set: a live local.
        unsafe { libc::sigpending(&raw mut pending) };
        let waits = |signal: &c_int| {
            // SAFETY: `sigismember` asks for a set and a number.
            let is_in = |set: &sigset_t| unsafe { libc::sigismember(set, *signal) } == 1;
            is_in(&pending) && !is_in(&self.before)
        };
        let mut waiting = (1..=LAST_SIGNAL).filter(waits).peekable();
        waiting.peek().is_some().then(|| waiting.all(does_restart))
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

/// Whether `recv` and `send` go on after any signal that this process handles.
pub(crate) fn do_all_restart() -> bool {
    (1..=LAST_SIGNAL).all(does_restart)
}

/// The same of one signal.
fn does_restart(signal: c_int) -> bool {
    // SAFETY: all bits zero are a `sigaction`: numbers, and no handler.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: `sigaction` asks for a number, and a place for what there is: a live local.
    let result = unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) };
    let is_handled = action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN;
    result != 0 || !is_handled || action.sa_flags & libc::SA_RESTART != 0
}

/// A system call each time would cost as much as the look itself. So many looks are made without
/// any.
const LOOKS: u32 = 32;
const LAST_SIGNAL: c_int = 64;
/// Those that an instruction raises: the process would end, were they held back.
const SYNCHRONOUS: [c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::{self, RecvTimeoutError};

    use super::*;

    static HANDLED: AtomicU32 = AtomicU32::new(0);

    extern "C" fn handle(_: c_int) {
        HANDLED.fetch_add(1, Ordering::Relaxed);
    }

    /// How often the handler has run.
    fn handled() -> u32 {
        HANDLED.load(Ordering::Relaxed)
    }

    extern "C" fn ignore(_: c_int) {}

    /// Has the handler run for the signal, with these flags.
    fn set_handler(signal: c_int, handler: extern "C" fn(c_int), flags: c_int) {
        // SAFETY: all bits zero are a `sigaction`: numbers, and no handler.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        (action.sa_sigaction, action.sa_flags) = (handler as libc::sighandler_t, flags);
        // SAFETY: `sigaction` asks for a number and an action: its function may be called at any
        // time.
        let result = unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) };
        assert_eq!(result, 0);
    }

    /// Does it, while a signal comes again and again for this thread that has a handler, with these
    /// flags.
    pub(crate) fn interrupted<T>(flags: c_int, act: impl FnOnce() -> T) -> T {
        let signal = libc::SIGRTMIN() + 1 + c_int::from(flags & libc::SA_RESTART != 0);
        set_handler(signal, ignore, flags);
        // SAFETY: `pthread_self` asks for nothing.
        let thread = unsafe { libc::pthread_self() };
        let (over, is_over) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let pause = std::time::Duration::from_millis(5);
                while is_over.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                    // SAFETY: `pthread_kill` asks for a thread that runs: it waits for us.
                    unsafe { libc::pthread_kill(thread, signal) };
                }
            });
            let result = act();
            drop(over);
            result
        })
    }

    fn raise(signal: c_int) {
        // SAFETY: `raise` asks for a number.
        unsafe { libc::raise(signal) };
    }

    #[test]
    fn a_signal_that_comes_meanwhile_is_noticed() {
        set_handler(libc::SIGUSR1, handle, libc::SA_RESTART);
        set_handler(libc::SIGUSR2, handle, libc::SA_RESETHAND);
        patience::calm();
        let restarts = |restarts| Some(Handled { restarts });
        let mut signals = Signals::watch(true);
        raise(libc::SIGUSR1);
        assert_eq!(handled(), 1, "the first looks hold nothing back");
        assert!((0..LOOKS).all(|_| signals.has_one_come().is_none()));
        // Nobody cares for this one.
        raise(libc::SIGCHLD);
        assert!((0..LOOKS).all(|_| signals.has_one_come().is_none()));
        raise(libc::SIGUSR1);
        assert!((1..LOOKS).all(|_| signals.has_one_come().is_none()) && handled() == 1);
        assert_eq!((signals.has_one_come(), handled()), (restarts(true), 2));
        assert_eq!(signals.has_one_come_now(), None);
        raise(libc::SIGUSR2);
        assert_eq!((signals.has_one_come_now(), handled()), (restarts(false), 3));

        let mut nested = Signals::watch(true);
        assert!((0..LOOKS).all(|_| nested.has_one_come().is_none()));
        raise(libc::SIGUSR1);
        assert!((0..LOOKS).all(|_| nested.has_one_come().is_none()), "held back before");
        drop(nested);
        assert_eq!(handled(), 3);
        drop(signals);
        assert_eq!(handled(), 4);
    }

    /// A program can tell when a signal has come, if its call had done something before, or if
    /// others have the core for long.
    #[test]
    fn later_looks_let_no_signal_pass() {
        set_handler(libc::SIGRTMIN(), ignore, 0);
        patience::free();
        for begins in [false, true] {
            let signals = Signals::watch(begins);
            raise(libc::SIGRTMIN());
            assert_eq!(signals.has_one_come_now(), Some(Handled { restarts: false }));
            patience::calm();
            assert!(Signals::watch(false).held.is_some());
            patience::free();
        }
    }
}
