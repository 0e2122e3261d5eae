//! The kernel moves bytes between descriptors.

use libc::{c_int, c_uint, loff_t, off_t, size_t, ssize_t};

use crate::table::TABLE;
use crate::{real, stream};

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
    stream::moving(from, to, length, real)
}
