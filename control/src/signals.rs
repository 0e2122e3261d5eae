//! SIGTERM, SIGINT, SIGHUP and SIGUSR1: the process is asked to end, to read its configuration
//! again, or to open its access log again.

use std::io;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

/// Calls `stop` each time the process is asked to end, on a thread of its own.
///
/// The loss of its terminal (SIGHUP) counts as well, unless the process was started with that
/// signal ignored, as `nohup` does.
///
/// # Errors
///
/// When the handlers cannot be installed or the thread not started.
pub fn on_stop(stop: impl Fn() + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !is_ignored(&status, SIGHUP) {
        signals.add_signal(SIGHUP)?;
    }
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for _ in signals.forever() {
            stop();
        }
    })?;
    Ok(())
}

/// Calls `stop` each time the process is asked to end, `reload` each time it is asked to read its
/// configuration again, which the loss of its terminal looks like, and `reopen` each time it is
/// asked to open its access log again; on a thread of its own.
///
/// # Errors
///
/// When the handlers cannot be installed or the thread not started.
pub fn on_orders(
    stop: impl Fn() + Send + 'static,
    reload: impl Fn() + Send + 'static,
    reopen: impl Fn() + Send + 'static,
) -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1])?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            match signal {
                SIGHUP => reload(),
                SIGUSR1 => reopen(),
                _ => stop(),
            }
        }
    })?;
    Ok(())
}

/// Whether a process with this `/proc/PID/status` ignores a signal.
fn is_ignored(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `nohup smcgate run` must outlive its terminal.
    #[test]
    fn what_is_ignored_stays_so() {
        let status = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000001\nSigCgt:\t0\n";
        assert!(is_ignored(status, SIGHUP) && !is_ignored(status, SIGINT));
        assert!(!is_ignored("SigIgn:\t0000000000001000\n", SIGHUP));
        assert!(!is_ignored("", SIGHUP));
    }
}
