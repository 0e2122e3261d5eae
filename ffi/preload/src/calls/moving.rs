//! The kernel moves bytes between descriptors.

use libc::{c_int, c_uint, loff_t, off_t, size_t, ssize_t};

use crate::ringed::is_ringed;
use crate::settle::settle;
use crate::table::TABLE;
use crate::{copying, real, stream, sys};

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendfile(
    to: c_int,
    from: c_int,
    offset: *mut off_t,
    length: size_t,
) -> ssize_t {
    // SAFETY: the caller promises what `sendfile` asks for.
    let real = || unsafe { real::sendfile(to, from, offset, length) };
    if TABLE.of(to).is_plain() && TABLE.of(from).is_plain() {
        return real();
    }
    if is_ringed_now(from) {
        // The kernel refuses sockets here, too.
        return sys::fail(libc::EINVAL);
    }
    if is_ringed_now(to) {
        // SAFETY: the caller promises that it is null, or can be read.
        let start = unsafe { offset.as_ref() }.copied();
        let (result, end) = copying::send_file(to, from, start, length);
        if let Some(end) = end {
            // SAFETY: there is an end only if it is not null, and the caller promises that it can
            // be written.
            unsafe { *offset = end };
        }
        return result;
    }
    // At the end of a file nothing is moved either: `from` is no stream.
    stream::moving(-1, to, length, real)
}

/// The same function, with offsets of 64 bits, which they have anyway.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendfile64(
    to: c_int,
    from: c_int,
    offset: *mut off_t,
    length: size_t,
) -> ssize_t {
    // SAFETY: the caller promises what `sendfile` asks for.
    unsafe { sendfile(to, from, offset, length) }
}
const _: () = assert!(size_of::<off_t>() == 8);

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_offset: *mut loff_t,
    to: c_int,
    to_offset: *mut loff_t,
    length: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the caller promises what `splice` asks for.
    let real = || unsafe { real::splice(from, from_offset, to, to_offset, length, flags) };
    if TABLE.of(to).is_plain() && TABLE.of(from).is_plain() {
        return real();
    }
    if is_ringed_now(from) || is_ringed_now(to) {
        let is_offset = |fd, offset: *mut loff_t| is_ringed(fd) && !offset.is_null();
        if is_offset(from, from_offset) || is_offset(to, to_offset) {
            return sys::fail(libc::ESPIPE);
        }
        return copying::splice(from, to, length, flags);
    }
    stream::moving(from, to, length, real)
}

/// Whether the bytes of this connection go by shared memory, once it is known.
fn is_ringed_now(fd: c_int) -> bool {
    settle(fd);
    is_ringed(fd)
}
