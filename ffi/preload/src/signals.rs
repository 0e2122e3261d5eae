//! Signals while a thread looks instead of sleeping: they must end that as they end a sleep.
//!
//! To hold them back, and to see which have come, takes system calls, which would cost more than a
//! few looks do. So the first looks are made without: a signal that comes then has its handler run
//! as if it had come before the program began to wait, which no program can tell.

use std::mem::MaybeUninit;
use std::ptr;

use libc::{c_int, sigset_t};

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

    /// Whether one waits that would end a sleep. Now and then it is looked for.
    pub(crate) fn is_any_pending(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        self.looks.is_multiple_of(LOOKS) && self.held.get_or_insert_with(Held::new).has_pending()
    }

    /// The same, at once.
    pub(crate) fn is_pending_now(&self) -> bool {
        self.held.as_ref().is_some_and(Held::has_pending)
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

    fn has_pending(&self) -> bool {
        let mut pending: sigset_t = {
            // SAFETY: all bits zero are an empty set.
            unsafe { MaybeUninit::zeroed().assume_init() }
        };
        // SAFETY: `sigpending` asks for a place for a set: a live local.
        unsafe { libc::sigpending(&raw mut pending) };
        (1..=LAST_SIGNAL).any(|signal| {
            // SAFETY: `sigismember` asks for a set and a number.
            let is_in = |set: &sigset_t| unsafe { libc::sigismember(set, signal) } == 1;
            is_in(&pending) && !is_in(&self.before) && ends_sleep(signal)
        })
    }
}

/// Whether a signal ends a sleep: it has a handler, or ends or stops the process.
fn ends_sleep(signal: c_int) -> bool {
    // SAFETY: all bits zero are a `sigaction`: numbers, and no handler.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: `sigaction` asks for a number, and a place for what there is: a live local.
    unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) };
    match action.sa_sigaction {
        libc::SIG_IGN => false,
        libc::SIG_DFL => {
            ![libc::SIGCHLD, libc::SIGCONT, libc::SIGURG, libc::SIGWINCH].contains(&signal)
        }
        _ => true,
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
const LAST_SIGNAL: c_int = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_comes_meanwhile_is_noticed() {
        let mut signals = Signals::watch();
        assert!((0..LOOKS).all(|_| !signals.is_any_pending()));
        // SAFETY: `raise` asks for a number. Nobody cares for this one.
        unsafe { libc::raise(libc::SIGCHLD) };
        assert!((0..LOOKS).all(|_| !signals.is_any_pending()));
        // SAFETY: as above. It would end the process, but is held back now.
        unsafe { libc::raise(libc::SIGUSR1) };
        assert!((0..LOOKS).any(|_| signals.is_any_pending()));
        let mut set = MaybeUninit::uninit();
        // SAFETY: both ask for a place for a set: a live local.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        // SAFETY: as above; it is a set now.
        unsafe { libc::sigaddset(set.as_mut_ptr(), libc::SIGUSR1) };
        let mut taken = 0;
        // SAFETY: `sigwait` asks for a set, and a place for a number.
        assert_eq!(unsafe { libc::sigwait(set.as_ptr(), &raw mut taken) }, 0);
        assert_eq!(taken, libc::SIGUSR1);
        let mut nested = Signals::watch();
        assert!((0..LOOKS).all(|_| !nested.is_any_pending()));
        // SAFETY: as above.
        unsafe { libc::raise(libc::SIGUSR2) };
        assert!((0..LOOKS).all(|_| !nested.is_any_pending()), "held back before");
        // SAFETY: as above.
        unsafe { libc::sigaddset(set.as_mut_ptr(), libc::SIGUSR2) };
        // SAFETY: as above.
        assert_eq!(unsafe { libc::sigwait(set.as_ptr(), &raw mut taken) }, 0);
    }
}
