//! System calls that `rustix` does not have, and `errno`.
//!
//! Nothing here goes through the names of the C library, some of which are ours. `rustix` does not
//! either: it makes system calls itself, and so leaves `errno` alone.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use libc::{c_int, c_long, c_void, socklen_t};
use rustix::io::Errno;
use rustix::thread::{NanosleepRelativeResult, nanosleep};
use rustix::time::{ClockId, Timespec, clock_gettime};

/// A descriptor of the program, if the number can be one. It need not be open: then every system
/// call says so.
pub(crate) fn borrow(fd: RawFd) -> Option<BorrowedFd<'static>> {
    if fd < 0 {
        return None;
    }
    // SAFETY: `borrow_raw` asks for
    // - a number other than -1: checked above;
    // - that it stays open: it is the program's, which may close it as it may while any function
    //   of the C library uses it. Nothing but system calls is done with it.
    Some(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// A descriptor of ours, which is closed when it is dropped.
///
/// `OwnedFd` would close it by the name `close`, which is ours here, and beyond it a place where a
/// thread may be cancelled.
#[derive(Debug)]
pub(crate) struct Own(ManuallyDrop<OwnedFd>);

impl Own {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(ManuallyDrop::new(fd))
    }
}

impl AsFd for Own {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: `close` asks for a descriptor that nobody uses after it: we own it, and it is
        // dropped now, this way and no other.
        unsafe { rustix::io::close(self.0.as_raw_fd()) };
    }
}

/// The `errno` of this thread.
pub(crate) fn errno() -> c_int {
    // SAFETY: `__errno_location` asks for nothing.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the place is valid as long as the thread lives, and only this thread uses it.
    unsafe { *place }
}

/// Sets the `errno` of this thread.
pub(crate) fn set_errno(value: c_int) {
    // SAFETY: `__errno_location` asks for nothing.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the place is valid as long as the thread lives, and only this thread uses it.
    unsafe { *place = value };
}

/// What a function of the C library returns after a failure.
pub(crate) fn fail<T: From<i8>>(errno: c_int) -> T {
    set_errno(errno);
    T::from(-1)
}

/// Reads a socket option into `value`. Returns how long it is.
pub(crate) fn socket_option(
    fd: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: &mut [u8],
) -> Result<usize, Errno> {
    let mut length = socklen_t::try_from(value.len()).map_err(|_| Errno::INVAL)?;
    let before = errno();
    // SAFETY: `getsockopt` asks for
    // - a place of `length` bytes for the value: `value` is a live exclusive slice of that length;
    // - a place for the length: `length` is a live local.
    let result = unsafe {
        libc::syscall(
            libc::SYS_getsockopt,
            c_long::from(fd.as_raw_fd()),
            c_long::from(level),
            c_long::from(name),
            value.as_mut_ptr(),
            &raw mut length,
        )
    };
    outcome(result, before).map(|_| length as usize)
}

/// Sets a socket option.
pub(crate) fn set_socket_option(
    fd: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: &[u8],
) -> Result<(), Errno> {
    let before = errno();
    // SAFETY: `setsockopt` asks for a value that can be read: `value` is a live slice.
    let result = unsafe {
        libc::syscall(
            libc::SYS_setsockopt,
            c_long::from(fd.as_raw_fd()),
            c_long::from(level),
            c_long::from(name),
            value.as_ptr(),
            value.len(),
        )
    };
    outcome(result, before).map(drop)
}

/// Gives `socket` the number `fd` in addition, in place of what is there.
pub(crate) fn put_at(socket: BorrowedFd<'_>, fd: RawFd, close_on_exec: bool) -> Result<(), Errno> {
    let flags = if close_on_exec { libc::O_CLOEXEC } else { 0 };
    let before = errno();
    // SAFETY: `dup3` asks for two numbers and flags. What was at `fd` is the program's socket,
    // which it has let us replace.
    let result = unsafe {
        libc::syscall(
            libc::SYS_dup3,
            c_long::from(socket.as_raw_fd()),
            c_long::from(fd),
            c_long::from(flags),
        )
    };
    outcome(result, before).map(drop)
}

/// Whether the process has begun to give up system calls (seccomp): then those that it does not
/// make itself may be forbidden, and nothing is asked that can be left out.
pub(crate) fn is_sandboxed() -> bool {
    SANDBOXED.load(Relaxed)
}

/// The process begins to give up system calls.
pub(crate) fn enter_sandbox() {
    SANDBOXED.store(true, Relaxed);
}

static SANDBOXED: AtomicBool = AtomicBool::new(false);

/// Sends SIGPIPE to this thread, as the kernel does for a write to a broken connection.
pub(crate) fn raise_sigpipe() {
    let before = errno();
    let thread = c_long::from(rustix::thread::gettid().as_raw_nonzero().get());
    // SAFETY: `tgkill` asks for numbers only.
    let result = unsafe {
        libc::syscall(
            libc::SYS_tgkill,
            c_long::from(process_id()),
            thread,
            c_long::from(libc::SIGPIPE),
        )
    };
    // A thread may always signal itself.
    outcome(result, before).ok();
}

/// `epoll_wait` without waiting. No thread is cancelled in it.
pub(crate) fn epoll_now(epoll: RawFd, room: &mut [libc::epoll_event]) -> c_int {
    let count = c_int::try_from(room.len()).unwrap_or(c_int::MAX);
    let no_mask = std::ptr::null::<libc::sigset_t>();
    let (call, at_once, size) = (libc::SYS_epoll_pwait, 0, size_of::<u64>());
    // SAFETY: `epoll_pwait` asks for room for so many events: it is a live slice.
    let result =
        unsafe { libc::syscall(call, epoll, room.as_mut_ptr(), count, at_once, no_mask, size) };
    c_int::try_from(result).unwrap_or(-1)
}

/// Has the signals that are not in `mask` come in now. Returns whether the handler of one has run.
/// No thread is cancelled in it.
pub(crate) fn let_signals_in(mask: &libc::sigset_t) -> bool {
    let mut at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let (nobody, count) = (std::ptr::null_mut::<libc::pollfd>(), 0_usize);
    let before = errno();
    // SAFETY: `ppoll` asks for
    // - as many descriptors as it is told: none;
    // - a place for a time: a live local;
    // - a set of signals of the size that the kernel uses, which is less than that of the library.
    let result = unsafe {
        libc::syscall(
            libc::SYS_ppoll,
            nobody,
            count,
            &raw mut at_once,
            std::ptr::from_ref(mask),
            size_of::<u64>(),
        )
    };
    outcome(result, before) == Err(Errno::INTR)
}

/// The number of this process. Not remembered by anybody, so it is right after `vfork`, too.
pub(crate) fn process_id() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Seconds since an arbitrary start.
pub(crate) fn now() -> u32 {
    u32::try_from(clock_gettime(ClockId::MonotonicCoarse).tv_sec).unwrap_or(u32::MAX)
}

/// The same, as precise as it is.
pub(crate) fn now_precise() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Lets a millisecond pass, or less if a signal comes.
pub(crate) fn pause() {
    let pause = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    match nanosleep(&pause) {
        NanosleepRelativeResult::Ok
        | NanosleepRelativeResult::Interrupted(_)
        | NanosleepRelativeResult::Err(_) => {}
    }
}

/// Calls `each` for every number in the bits of a `select`.
///
/// # Safety
///
/// `set` is null, or has bits for the numbers below `count`.
pub(crate) unsafe fn each_in_set(set: *const c_void, count: c_int, mut each: impl FnMut(RawFd)) {
    if set.is_null() {
        return;
    }
    for fd in 0..count {
        let index = usize::try_from(fd).unwrap_or(0) / usize::BITS as usize;
        let word = set.cast::<usize>().wrapping_add(index);
        // SAFETY: the caller promises bits for all numbers below `count`, in words of a `long`.
        let word = unsafe { *word };
        if word >> (fd.cast_unsigned() % usize::BITS) & 1 != 0 {
            each(fd);
        }
    }
}

/// The result of a system call, with `errno` as it was before.
fn outcome(result: c_long, before: c_int) -> Result<c_long, Errno> {
    if result != -1 {
        return Ok(result);
    }
    let error = Errno::from_raw_os_error(errno());
    set_errno(before);
    Err(error)
}
