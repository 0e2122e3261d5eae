//! SIGPIPE of programs that this one becomes.
//!
//! Rust ignores the signal in every program, and gives it back to those that it starts: they would
//! be ended by it even if whoever started us had it ignored, as service managers do.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Lets `command` begin with SIGPIPE as this program has begun.
pub fn hand_on(command: &mut Command) {
    if !WAS_IGNORED.load(Relaxed) {
        return;
    }
    let ignore = || {
        // SAFETY: `signal` asks for a signal and what to do with it, and may be called where only
        // functions may be that are safe in signal handlers.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
        Ok(())
    };
    // SAFETY: `pre_exec` asks for a closure that may run between `fork` and `exec`: it makes one
    // system call.
    unsafe { command.pre_exec(ignore) };
}

static WAS_IGNORED: AtomicBool = AtomicBool::new(false);

/// The dynamic loader calls this before Rust changes anything.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: zeros are a value of this type.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: `sigaction` asks for a place for what is there: `action` is a live local.
    let result = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action) };
    WAS_IGNORED.store(result == 0 && action.sa_sigaction == libc::SIG_IGN, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a program that `hand_on` has prepared ignores SIGPIPE, by what the kernel says.
    fn is_ignored(was_ignored: bool) -> bool {
        WAS_IGNORED.store(was_ignored, Relaxed);
        let mut command = Command::new("grep");
        command.args(["SigIgn", "/proc/self/status"]);
        hand_on(&mut command);
        let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let mask = said.trim_start_matches("SigIgn:").trim();
        u64::from_str_radix(mask, 16).unwrap() & (1 << (libc::SIGPIPE - 1)) != 0
    }

    #[test]
    fn a_program_ignores_the_signal_if_we_began_so() {
        assert!(is_ignored(true));
        assert!(!is_ignored(false));
    }
}
