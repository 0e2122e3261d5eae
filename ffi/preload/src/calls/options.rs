//! Names and options of sockets, and shutting them down.

use std::slice;

use libc::{Ioctl, c_int, c_void, sockaddr, socklen_t};
use smcgate_door::Name;

use crate::address::Raw;
use crate::ringed::is_ringed;
use crate::settle::settle;
use crate::table::{Flag, Kind, TABLE};
use crate::{attach, end, name, options, real, ringed, stream, sys};

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn getsockname(
    fd: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    match switched(fd) {
        // SAFETY: the caller promises what `getsockname` asks for.
        Some(name) => unsafe { tell(&Raw::of(name.local), address, length) },
        // SAFETY: as above.
        None => unsafe { real::getsockname(fd, address, length) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn getpeername(
    fd: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    match switched(fd) {
        // SAFETY: the caller promises what `getpeername` asks for.
        Some(name) => unsafe { tell(&Raw::of(name.peer), address, length) },
        // SAFETY: as above.
        None => unsafe { real::getpeername(fd, address, length) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller promises what `getsockopt` asks for.
    let real = || unsafe { real::getsockopt(fd, level, option, value, length) };
    let is_error = (level, option) == (libc::SOL_SOCKET, libc::SO_ERROR);
    let entry = TABLE.of(fd);
    if entry.is_plain() && !entry.has(Flag::ResetUntold) || value.is_null() || length.is_null() {
        return real();
    }
    let name = switched(fd);
    // SAFETY: it is not null, so the caller promises that it can be read.
    let room = unsafe { *length };
    if room.cast_signed() < 0 {
        return sys::fail(libc::EINVAL);
    }
    // SAFETY: the caller promises so many bytes at a place that is not null. They count for
    // nothing until they are written.
    let place = unsafe { slice::from_raw_parts_mut(value.cast::<u8>(), room as usize) };
    let state = || sys::borrow(fd).map_or(end::CLOSE, |it| end::state(it, TABLE.of(fd)));
    let was_reset = || TABLE.take(fd, Flag::ResetUntold) || stream::was_reset(fd);
    let answer = if is_error && was_reset() {
        let error = libc::ECONNRESET.to_ne_bytes();
        let count = place.len().min(error.len());
        place[..count].copy_from_slice(&error[..count]);
        Some(Ok(count))
    } else {
        name.and_then(|name| match own(fd, level, option) {
            Some(value) => Some(Ok(options::put(place, value))),
            None => options::read(name, TABLE.options(fd), (level, option), place, state),
        })
    };
    match answer {
        None => real(),
        Some(Err(error)) => sys::fail(error.raw_os_error()),
        Some(Ok(count)) => {
            // SAFETY: it is not null, so the caller promises that it can be written.
            unsafe { *length = socklen_t::try_from(count).unwrap_or(room) };
            0
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    // SAFETY: the caller promises what `setsockopt` asks for.
    let real = || unsafe { real::setsockopt(fd, level, option, value, length) };
    if TABLE.of(fd).is_plain() || value.is_null() {
        return real();
    }
    let Some(name) = switched(fd) else { return real() };
    // SAFETY: it is not null, so the caller promises so many bytes.
    let bytes = unsafe { slice::from_raw_parts(value.cast(), length as usize) };
    if level == libc::SOL_SOCKET && is_ringed(fd) {
        if ringed::set_buffer(fd, option, bytes) {
            return 0;
        }
        if option == libc::SO_RCVLOWAT {
            let result = real();
            ringed::note_low_water(fd);
            return result;
        }
    }
    if let Some(flag) = end::instead_of(level, option) {
        let Some(number) = bytes.first_chunk() else { return sys::fail(libc::EINVAL) };
        TABLE.change(fd, flag, c_int::from_ne_bytes(*number) != 0);
        return 0;
    }
    match options::write(name, TABLE.options(fd), (level, option), bytes) {
        None => real(),
        Some(Err(error)) => sys::fail(error.raw_os_error()),
        Some(Ok(options)) => {
            TABLE.set_options(fd, options);
            0
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn shutdown(fd: c_int, how: c_int) -> c_int {
    // SAFETY: `shutdown` asks for numbers only.
    stream::shutdown(fd, how, || unsafe { real::shutdown(fd, how) })
}

/// What the program has set, where that of the socket is ours: the size of a buffer, or a number
/// that is zero or one.
fn own(fd: c_int, level: c_int, option: c_int) -> Option<c_int> {
    if let Some(flag) = end::instead_of(level, option) {
        return Some(c_int::from(TABLE.of(fd).has(flag)));
    }
    (level == libc::SOL_SOCKET && is_ringed(fd)).then(|| ringed::buffer(fd, option)).flatten()
}

/// In C it has two arguments, or three, which stands where it always does.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ioctl(fd: c_int, request: Ioctl, argument: *mut c_void) -> c_int {
    // SAFETY: the caller promises what `ioctl` asks for.
    let real = || unsafe { real::ioctl(fd, request, argument) };
    // The C library of Linux has it as a number of 32 bits or of 64, of which these use 16.
    let (is_unread, is_unsent) = (request == libc::FIONREAD, request == libc::TIOCOUTQ);
    if !(is_unread || is_unsent) || TABLE.of(fd).is_plain() || argument.is_null() {
        return real();
    }
    settle(fd);
    if !is_ringed(fd) {
        return real();
    }
    match attach::rings_of(fd) {
        Ok((used, _)) => {
            let count = if is_unread { used.rings.readable() } else { used.rings.unsent() };
            // SAFETY: it is not null, so the caller promises that a number can be written.
            unsafe { *argument.cast() = count };
            0
        }
        Err(libc::ENOTSOCK) => real(),
        Err(_) => {
            // SAFETY: as above.
            unsafe { *argument.cast() = 0_u32 };
            0
        }
    }
}

/// Which connection this is, if it is switched by now.
fn switched(fd: c_int) -> Option<Name> {
    settle(fd);
    if TABLE.of(fd).kind() != Kind::Switched {
        return None;
    }
    let name = sys::borrow(fd).and_then(name::of);
    if name.is_none() {
        TABLE.forget(fd);
    }
    name
}

/// Writes an address as the kernel does: as much as there is room for, and its whole length.
///
/// # Safety
///
/// If they are not null, `length` can be written, and `address` has so many bytes.
unsafe fn tell(raw: &Raw, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    if address.is_null() || length.is_null() {
        return sys::fail(libc::EFAULT);
    }
    // SAFETY: it is not null, so the caller promises that it can be read.
    let room = unsafe { *length };
    if room.cast_signed() < 0 {
        return sys::fail(libc::EINVAL);
    }
    let count = raw.bytes().len().min(room as usize);
    // SAFETY: the caller promises `room` bytes, and `count` is not more.
    let place = unsafe { slice::from_raw_parts_mut(address.cast::<u8>(), count) };
    place.copy_from_slice(&raw.bytes()[..count]);
    // SAFETY: it is not null, so the caller promises that it can be written.
    unsafe { *length = socklen_t::try_from(raw.bytes().len()).unwrap_or(0) };
    0
}
