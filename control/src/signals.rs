//! SIGTERM and SIGINT.

use std::io;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Calls `stop` each time the process is asked to end, on a thread of its own.
///
/// # Errors
///
/// When the handlers cannot be installed or the thread not started.
pub fn on_stop(stop: impl Fn() + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for _ in signals.forever() {
            stop();
        }
    })?;
    Ok(())
}
