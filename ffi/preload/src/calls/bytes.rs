//! Bytes are read and written.

use std::{mem, ptr, slice};

use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, size_t, sockaddr, socklen_t, ssize_t, timespec,
};

use crate::messages::Moved;
use crate::ringed::is_ringed;
use crate::table::{Flag, TABLE};
use crate::{adopt, messages, real, ringed, stream, sys};

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn read(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t {
    // SAFETY: the caller promises what `read` asks for.
    let plain = || unsafe { real::read(fd, buffer, length) };
    if TABLE.of(fd).is_plain() || stream::is_sandboxed(fd) || length == 0 {
        return plain();
    }
    // SAFETY: `recv` asks for the same buffer.
    stream::read(fd, length, |flags| unsafe { receive(fd, buffer, length, flags) }, plain)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __read_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    room: size_t,
) -> ssize_t {
    if length > room {
        // SAFETY: the caller promises what it asks for; this call ends the process.
        return unsafe { real::__read_chk(fd, buffer, length, room) };
    }
    // SAFETY: the caller promises the same of this buffer.
    unsafe { read(fd, buffer, length) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the caller promises what `readv` asks for.
    let plain = || unsafe { real::readv(fd, parts, count) };
    if TABLE.of(fd).is_plain() || stream::is_sandboxed(fd) || !(1..=PARTS_MAX).contains(&count) {
        return plain();
    }
    let mut message = message_of(parts, count);
    // SAFETY: the caller promises `count` buffers.
    let wanted = unsafe { bytes_in(&message) };
    // SAFETY: `recvmsg` asks for the same buffers, in a message.
    let switched = |flags| unsafe { receive_message(fd, &mut message, flags) };
    stream::read(fd, wanted, switched, plain)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recv(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller promises what `recv` asks for.
    let plain = || unsafe { real::recv(fd, buffer, length, flags) };
    if TABLE.of(fd).is_plain() {
        return plain();
    }
    // SAFETY: the caller promises the buffer.
    let switched = |more: c_int| unsafe { receive(fd, buffer, length, flags | more) };
    stream::read(fd, length, switched, plain)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __recv_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    if length > room {
        // SAFETY: the caller promises what it asks for; this call ends the process.
        return unsafe { real::__recv_chk(fd, buffer, length, room, flags) };
    }
    // SAFETY: the caller promises the same of this buffer.
    unsafe { recv(fd, buffer, length, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_length: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the caller promises what `recvfrom` asks for.
    let plain = || unsafe { real::recvfrom(fd, buffer, length, flags, from, from_length) };
    if TABLE.of(fd).is_plain() {
        return plain();
    }
    let switched = |more: c_int| {
        // SAFETY: the caller promises the buffer.
        let result = unsafe { receive(fd, buffer, length, flags | more) };
        if result >= 0 && !from_length.is_null() {
            // SAFETY: it is not null, so the caller promises that it can be written.
            unsafe { *from_length = 0 };
        }
        result
    };
    stream::read(fd, length, switched, plain)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __recvfrom_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    room: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_length: *mut socklen_t,
) -> ssize_t {
    if length > room {
        // SAFETY: the caller promises what it asks for; this call ends the process.
        return unsafe { real::__recvfrom_chk(fd, buffer, length, room, flags, from, from_length) };
    }
    // SAFETY: the caller promises the same of this buffer.
    unsafe { recvfrom(fd, buffer, length, flags, from, from_length) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller promises what `recvmsg` asks for.
    let plain = || unsafe { real::recvmsg(fd, message, flags) };
    if TABLE.of(fd).is_plain() {
        let result = plain();
        if result >= 0 {
            // SAFETY: the kernel has just filled it.
            adopt_from(unsafe { &*message });
        }
        return result;
    }
    // SAFETY: the caller promises a message.
    let mut ours = unsafe { *message };
    ours.msg_name = ptr::null_mut();
    ours.msg_namelen = 0;
    // SAFETY: the caller promises its buffers.
    let wanted = unsafe { bytes_in(&ours) };
    let switched = |more: c_int| {
        if flags & libc::MSG_ERRQUEUE != 0 {
            return sys::fail(libc::EAGAIN);
        }
        // SAFETY: it is the caller's message, without a name.
        let result = unsafe { receive_message(fd, &mut ours, flags | more) };
        if result >= 0 {
            ours.msg_name = ptr::null_mut();
            // SAFETY: the caller promises that it can be written.
            let theirs = unsafe { &mut *message };
            (theirs.msg_namelen, theirs.msg_flags) = (0, ours.msg_flags);
            theirs.msg_controllen = ours.msg_controllen;
        }
        result
    };
    stream::read(fd, wanted, switched, plain)
}

/// One message after the other, as the kernel does it.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if TABLE.of(fd).is_plain() || messages.is_null() {
        // SAFETY: the caller promises what `recvmmsg` asks for.
        return unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
    }
    let later = if flags & libc::MSG_WAITFORONE == 0 { 0 } else { libc::MSG_DONTWAIT };
    // SAFETY: the caller promises so many, and they are not null.
    let messages = unsafe { slice::from_raw_parts_mut(messages, count as usize) };
    messages::each(messages, |message, is_first| {
        let flags = flags & !libc::MSG_WAITFORONE | if is_first { 0 } else { later };
        // SAFETY: the caller promises its messages, of which this is one.
        let result = unsafe { recvmsg(fd, &raw mut message.msg_hdr, flags) };
        // The call tells of what came before. The next one tells of this.
        if result < 0 && !is_first && sys::errno() == libc::ECONNRESET {
            TABLE.raise(fd, Flag::ResetUntold);
        }
        Moved { result, goes_on: true }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t {
    // SAFETY: the caller promises what `write` asks for.
    let plain = || unsafe { real::write(fd, buffer, length) };
    if TABLE.of(fd).is_plain() || stream::is_sandboxed(fd) {
        return plain();
    }
    // SAFETY: `send` asks for the same buffer.
    stream::write(fd, 0, |flags| unsafe { transmit(fd, buffer, length, flags) }, plain)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the caller promises what `writev` asks for.
    let plain = || unsafe { real::writev(fd, parts, count) };
    if TABLE.of(fd).is_plain() || stream::is_sandboxed(fd) || !(1..=PARTS_MAX).contains(&count) {
        return plain();
    }
    let message = message_of(parts, count);
    // SAFETY: `sendmsg` asks for the same buffers, in a message.
    let switched = |flags| unsafe { transmit_message(fd, &message, flags) };
    stream::write(fd, 0, switched, plain)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn send(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller promises what `send` asks for.
    let real = |more: c_int| unsafe { real::send(fd, buffer, length, flags | more) };
    if TABLE.of(fd).is_plain() {
        return real(0);
    }
    // SAFETY: as above.
    let switched = |more: c_int| unsafe { transmit(fd, buffer, length, flags | more) };
    stream::write(fd, flags, switched, || real(0))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
    to: *const sockaddr,
    to_length: socklen_t,
) -> ssize_t {
    // SAFETY: the caller promises what `sendto` asks for.
    let plain = || unsafe { real::sendto(fd, buffer, length, flags, to, to_length) };
    if TABLE.of(fd).is_plain() || !(to.is_null() || stream::ignores_addresses(fd)) {
        return plain();
    }
    // SAFETY: the caller promises the buffer.
    let switched = |more: c_int| unsafe { transmit(fd, buffer, length, flags | more) };
    stream::write(fd, flags, switched, plain)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller promises what `sendmsg` asks for.
    let plain = || unsafe { real::sendmsg(fd, message, flags) };
    if TABLE.of(fd).is_plain() {
        return plain();
    }
    // SAFETY: the caller promises a message.
    let mut ours = unsafe { *message };
    if !ours.msg_name.is_null() && !stream::ignores_addresses(fd) {
        return plain();
    }
    (ours.msg_name, ours.msg_namelen) = (ptr::null_mut(), 0);
    // SAFETY: it is the caller's message, without a name.
    let switched = |more: c_int| unsafe { transmit_message(fd, &ours, flags | more) };
    stream::write(fd, flags, switched, plain)
}

/// One message after the other, as the kernel does it.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    if TABLE.of(fd).is_plain() || messages.is_null() {
        // SAFETY: the caller promises what `sendmmsg` asks for.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    }
    // SAFETY: the caller promises so many, and they are not null.
    let messages = unsafe { slice::from_raw_parts_mut(messages, count as usize) };
    messages::each(messages, |message, _| {
        // SAFETY: the caller promises its messages, of which this is one.
        let wanted = unsafe { bytes_in(&message.msg_hdr) };
        // SAFETY: as above.
        let result = unsafe { sendmsg(fd, &raw const message.msg_hdr, flags) };
        Moved { result, goes_on: usize::try_from(result).is_ok_and(|sent| sent >= wanted) }
    })
}

/// More parts the kernel does not take.
const PARTS_MAX: c_int = 1024;

/// Receives from a Unix socket, with the flags that only TCP knows.
///
/// # Safety
///
/// As `recv`; with MSG_TRUNC the buffer may be null.
unsafe fn receive(fd: c_int, buffer: *mut c_void, length: size_t, flags: c_int) -> ssize_t {
    // Its errors are not in a queue: a Unix socket would read bytes.
    if flags & libc::MSG_ERRQUEUE != 0 {
        return sys::fail(libc::EAGAIN);
    }
    if is_ringed(fd) {
        let part = iovec { iov_base: buffer, iov_len: length };
        // SAFETY: the caller promises the buffer.
        return unsafe { ringed::receive(fd, &[part], flags) };
    }
    if flags & libc::MSG_TRUNC != 0 && flags & libc::MSG_PEEK == 0 {
        return discard(fd, length, flags);
    }
    // SAFETY: the caller promises the buffer.
    unsafe { real::recv(fd, buffer, length, flags) }
}

/// The same into the parts of a message, which has no name.
///
/// # Safety
///
/// As `recvmsg`.
unsafe fn receive_message(fd: c_int, message: &mut msghdr, flags: c_int) -> ssize_t {
    if !is_ringed(fd) {
        // SAFETY: the caller promises it.
        return unsafe { real::recvmsg(fd, message, flags) };
    }
    (message.msg_flags, message.msg_controllen) = (0, 0);
    // SAFETY: the caller promises its parts.
    match unsafe { parts_of(message) } {
        // SAFETY: the caller promises their buffers.
        Some(parts) => unsafe { ringed::receive(fd, parts, flags) },
        None => sys::fail(libc::EMSGSIZE),
    }
}

/// Sends by a connection that is switched.
///
/// # Safety
///
/// As `send`.
unsafe fn transmit(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int) -> ssize_t {
    if is_ringed(fd) {
        let part = iovec { iov_base: buffer.cast_mut(), iov_len: length };
        // SAFETY: the caller promises the buffer, which is only read.
        return unsafe { ringed::send(fd, &[part], flags) };
    }
    // SAFETY: the caller promises it.
    unsafe { real::send(fd, buffer, length, flags) }
}

/// The same from the parts of a message, which has no name.
///
/// # Safety
///
/// As `sendmsg`.
unsafe fn transmit_message(fd: c_int, message: &msghdr, flags: c_int) -> ssize_t {
    if !is_ringed(fd) {
        // SAFETY: the caller promises it.
        return unsafe { real::sendmsg(fd, message, flags) };
    }
    // SAFETY: the caller promises its parts.
    match unsafe { parts_of(message) } {
        // SAFETY: the caller promises their buffers.
        Some(parts) => unsafe { ringed::send(fd, parts, flags) },
        None => sys::fail(libc::EMSGSIZE),
    }
}

/// The parts of a message; none if there are too many.
///
/// # Safety
///
/// The message has the parts that it names.
unsafe fn parts_of(message: &msghdr) -> Option<&[iovec]> {
    if message.msg_iov.is_null() || message.msg_iovlen == 0 {
        return Some(&[]);
    }
    let count = number(message.msg_iovlen);
    if c_int::try_from(count).is_ok_and(|count| count <= PARTS_MAX) {
        // SAFETY: the caller promises so many parts, and they are not null.
        return Some(unsafe { slice::from_raw_parts(message.msg_iov, count) });
    }
    None
}

/// Reads bytes and drops them, as TCP does with MSG_TRUNC. The buffer of the program may be null.
fn discard(fd: c_int, length: size_t, flags: c_int) -> ssize_t {
    let (flags, mut dropped) = (flags & !libc::MSG_TRUNC, 0_usize);
    let mut room = [0_u8; 4096];
    while dropped < length {
        let part = room.len().min(length - dropped);
        let later = if dropped == 0 { 0 } else { libc::MSG_DONTWAIT };
        // SAFETY: `recv` asks for a buffer of `part` bytes: `room` has as many and more.
        let result = unsafe { real::recv(fd, room.as_mut_ptr().cast(), part, flags | later) };
        match usize::try_from(result) {
            Ok(read) if read > 0 => dropped += read,
            Ok(_) | Err(_) if dropped == 0 => return result,
            Ok(_) | Err(_) => break,
        }
    }
    ssize_t::try_from(dropped).unwrap_or(ssize_t::MAX)
}

fn message_of(parts: *const iovec, count: c_int) -> msghdr {
    let mut message = {
        // SAFETY: all bits zero are a message: numbers, and null. Not every C library lets us name
        // all fields.
        unsafe { mem::zeroed::<msghdr>() }
    };
    message.msg_iov = parts.cast_mut();
    message.msg_iovlen = count.try_into().unwrap_or_default();
    message
}

/// A number of a message, which has another type in each C library.
fn number(number: impl TryInto<usize>) -> usize {
    number.try_into().unwrap_or(0)
}

/// How many bytes there are in the buffers of a message.
///
/// # Safety
///
/// The message has the buffers that it names.
unsafe fn bytes_in(message: &msghdr) -> usize {
    if message.msg_iov.is_null() {
        return 0;
    }
    // SAFETY: the caller promises so many buffers, and they are not null.
    let parts = unsafe { slice::from_raw_parts(message.msg_iov, number(message.msg_iovlen)) };
    parts.iter().fold(0, |sum, part| sum.saturating_add(part.iov_len))
}

/// Looks at the descriptors that came with a message.
fn adopt_from(message: &msghdr) {
    if message.msg_control.is_null() || message.msg_controllen == 0 {
        return;
    }
    let before = sys::errno();
    let length = number(message.msg_controllen);
    // SAFETY: the kernel has written so many bytes there.
    let control = unsafe { slice::from_raw_parts(message.msg_control.cast(), length) };
    adopt::rights(control).for_each(adopt::adopt);
    sys::set_errno(before);
}
