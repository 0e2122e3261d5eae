//! Descriptors are closed and copied.

use libc::{FILE, c_int, c_uint, c_void};
use rustix::io::fcntl_getfd;

use crate::accept::copied;
use crate::settle::settle;
use crate::table::{DESCRIPTORS_MAX, Entry, TABLE};
use crate::{real, stream, sys};

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    if TABLE.of(fd) != Entry::OTHER {
        stream::before_close(fd);
    }
    // SAFETY: the caller promises that the descriptor is its own.
    unsafe { real::close(fd) }
}

/// The C library closes the descriptor itself, unseen.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fclose(file: *mut FILE) -> c_int {
    // SAFETY: the caller promises a stream.
    let fd = if file.is_null() { -1 } else { unsafe { libc::fileno(file) } };
    // What lies in the buffer of the stream is written first.
    if TABLE.of(fd) != Entry::OTHER {
        // SAFETY: as above.
        unsafe { libc::fflush(file) };
        stream::before_close(fd);
    }
    // SAFETY: the caller promises that the stream is its own.
    unsafe { real::fclose(file) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags == 0 {
        forget_from(first, last);
    }
    // SAFETY: the caller promises that the descriptors are its own.
    unsafe { real::close_range(first, last, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn closefrom(first: c_int) {
    let first = c_uint::try_from(first).unwrap_or(0);
    forget_from(first, c_uint::MAX);
    // SAFETY: the caller promises that the descriptors are its own.
    let result = unsafe { real::close_range(first, c_uint::MAX, 0) };
    if result != 0 {
        // A kernel before 5.9: one by one, as the C library does it.
        for fd in first..=LAST {
            // SAFETY: as above.
            unsafe { real::close(fd.cast_signed()) };
        }
    }
}

/// The last number that has an entry.
const LAST: c_uint = 65_535;
const _: () = assert!(LAST as usize == DESCRIPTORS_MAX - 1);

fn forget_from(first: c_uint, last: c_uint) {
    for fd in first..=last.min(LAST) {
        if TABLE.of(fd.cast_signed()) != Entry::OTHER {
            stream::before_close(fd.cast_signed());
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    settle(fd);
    // SAFETY: `dup` asks for a number only.
    let copy = unsafe { real::dup(fd) };
    copied(fd, copy);
    copy
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn dup2(fd: c_int, to: c_int) -> c_int {
    settle(fd);
    before_replacing(fd, to);
    // SAFETY: the caller promises that the descriptor that is replaced is its own.
    let copy = unsafe { real::dup2(fd, to) };
    if copy >= 0 && fd != to {
        copied(fd, to);
    }
    copy
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    settle(fd);
    before_replacing(fd, to);
    // SAFETY: the caller promises that the descriptor that is replaced is its own.
    let copy = unsafe { real::dup3(fd, to, flags) };
    if copy >= 0 {
        copied(fd, to);
    }
    copy
}

/// What has the number `to` is closed, unless there is nothing to put in its place.
fn before_replacing(fd: c_int, to: c_int) {
    if TABLE.of(to) != Entry::OTHER
        && fd != to
        && sys::borrow(fd).is_some_and(|fd| fcntl_getfd(fd).is_ok())
    {
        stream::before_end(to);
    }
}

/// In C it has two arguments, or three. On x86-64 and aarch64 the third one is where it always is;
/// if there is none, the C library does not look at it either.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: the caller promises what `fcntl` asks for.
    copying(fd, command, || unsafe { real::fcntl(fd, command, argument) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: the caller promises what `fcntl64` asks for.
    copying(fd, command, || unsafe { real::fcntl64(fd, command, argument) })
}

fn copying(fd: c_int, command: c_int, real: impl FnOnce() -> c_int) -> c_int {
    if command != libc::F_DUPFD && command != libc::F_DUPFD_CLOEXEC {
        return real();
    }
    settle(fd);
    let copy = real();
    copied(fd, copy);
    copy
}
