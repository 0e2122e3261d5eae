//! System calls that a process gives up (seccomp).

use std::io;

/// One instruction of a filter, as `linux/filter.h` has it.
pub type Instruction = libc::sock_filter;

/// Whether the kernel logs what a filter refuses, where it keeps such a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusals {
    /// It does.
    Logged,
    /// It does not: what the filter refuses is tried in good faith.
    Silent,
}

/// From now on the kernel asks `filter` about each system call of all threads of this process, and
/// all filters that were installed before.
///
/// # Errors
///
/// As `seccomp(2)`: the filter is not valid, the thread may still gain privileges, or a thread has
/// a filter that we do not share. Then nothing has changed.
pub fn filter_all_threads(filter: &[Instruction], refusals: Refusals) -> io::Result<()> {
    install(filter, libc::SECCOMP_FILTER_FLAG_TSYNC | flags(refusals))
}

/// The same for the thread that calls, and for those that it starts from now on.
///
/// # Errors
///
/// As [`filter_all_threads`].
pub fn filter_this_thread(filter: &[Instruction], refusals: Refusals) -> io::Result<()> {
    install(filter, flags(refusals))
}

fn flags(refusals: Refusals) -> libc::c_ulong {
    match refusals {
        Refusals::Logged => libc::SECCOMP_FILTER_FLAG_LOG,
        Refusals::Silent => 0,
    }
}

fn install(filter: &[Instruction], flags: libc::c_ulong) -> io::Result<()> {
    let len = u16::try_from(filter.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // The kernel reads the instructions, and C has no word for that.
    let program = libc::sock_fprog { len, filter: filter.as_ptr().cast_mut() };
    // SAFETY: `seccomp(SECCOMP_SET_MODE_FILTER)` asks for
    // - a pointer to a program: `program` is a live local;
    // - whose instructions can be read: they are `len` elements of a live slice.
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
    };
    match result {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        thread => Err(io::Error::other(format!("thread {thread} has a filter of its own"))),
    }
}
