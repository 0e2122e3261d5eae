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
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use libc::{c_int, c_ulong};

use crate::table::TABLE;
use crate::{adopt, real, ringed, settings, sys, watch};

/// The dynamic loader calls this before the program begins.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    real::find_all();
    TABLE.own();
    // SAFETY: `dlsym` asks for a handle, and RTLD_DEFAULT is one, and for a name that ends with
    // zero.
    let filter = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"seccomp_load".as_ptr()) };
    HAS_LIBSECCOMP.store(!filter.is_null(), Relaxed);
    // SAFETY: `pthread_atfork` asks for functions that may be called in a child of `fork`: ours
    // stores a number. If there is no memory, the child finds its entries as its parent left them.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
    match settings::read() {
        Ok(()) => adopt::adopt_inherited(),
        // Nobody is left to tell if standard error is gone.
        Err(why) => drop(writeln!(std::io::stderr(), "smcgate: {why}; all sockets are left alone")),
    }
}

/// Once a process has a filter for system calls (seccomp), we make none that it does not make
/// itself, where we can do without: the filter may end the process for it. (`sshd` does that before
/// it knows who its client is.) libseccomp makes the system call itself, but says here before that
/// it wants no new privileges.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn prctl(
    option: c_int,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
) -> c_int {
    let begins = option == libc::PR_SET_SECCOMP
        || option == libc::PR_SET_NO_NEW_PRIVS && HAS_LIBSECCOMP.load(Relaxed);
    let is_owner = begins && TABLE.is_owner();
    // SAFETY: the caller promises what `prctl` asks for.
    let result = unsafe { real::prctl(option, second, third, fourth, fifth) };
    if is_owner && result == 0 {
        sys::enter_sandbox();
    }
    result
}

static HAS_LIBSECCOMP: AtomicBool = AtomicBool::new(false);

extern "C" fn after_fork() {
    TABLE.own();
    ringed::after_fork();
    watch::after_fork();
}
