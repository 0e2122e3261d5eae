//! What programs call, by the names of the C library.
//!
//! Each function translates between C and the modules that decide; nothing is decided here. Its
//! contract is that of the function of the same name, and its caller keeps it.

mod bytes;
mod closing;
mod moving;
mod opening;
mod options;
mod waiting;

use std::io::Write as _;

use crate::table::TABLE;
use crate::{adopt, real, settings};

/// The dynamic loader calls this before the program begins.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    real::find_all();
    TABLE.own();
    // SAFETY: `pthread_atfork` asks for functions that may be called in a child of `fork`: ours
    // stores a number. If there is no memory, the child finds its entries as its parent left them.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
    match settings::read() {
        Ok(()) => adopt::adopt_inherited(),
        // Nobody is left to tell if standard error is gone.
        Err(why) => drop(writeln!(std::io::stderr(), "smcgate: {why}; all sockets are left alone")),
    }
}

extern "C" fn after_fork() {
    TABLE.own();
}
