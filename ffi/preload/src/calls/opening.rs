//! Sockets are made, connected, and accepted.

use std::slice;

use libc::{c_int, sockaddr, socklen_t};

use crate::accept::{self, Welcome};
use crate::epoll::REGISTRATIONS;
use crate::settings::settings;
use crate::table::{Kind, TABLE};
use crate::{address, connect, real, sys};

/// Sockets of family AF_SMC, which is what Linux calls SMC-R.
const AF_SMC: c_int = 43;
/// The protocol of AF_SMC over IPv6.
const SMCPROTO_SMC6: c_int = 1;
/// The other way to ask for a socket of SMC-R.
const IPPROTO_SMC: c_int = 256;
/// The part of a type that is no flag.
const TYPE_MASK: c_int = 0xf;

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: `socket` asks for numbers only.
    let mut fd = unsafe { real::socket(domain, kind, protocol) };
    let tcp = settings().and_then(|_| tcp_instead(domain, kind, protocol));
    if let (-1, Some(family)) = (fd, tcp) {
        // SAFETY: `socket` asks for numbers only.
        fd = unsafe { real::socket(family, kind, libc::IPPROTO_TCP) };
    }
    let family = tcp.unwrap_or(domain);
    let is_tcp = (family == libc::AF_INET || family == libc::AF_INET6)
        && kind & TYPE_MASK == libc::SOCK_STREAM
        && (tcp.is_some() || protocol == 0 || protocol == libc::IPPROTO_TCP);
    REGISTRATIONS.clear(fd);
    if is_tcp && settings().is_some() {
        TABLE.set(fd, Kind::Fresh);
    } else {
        TABLE.forget(fd);
    }
    fd
}

/// The family of a TCP socket that stands for a socket of SMC-R where the kernel has none.
fn tcp_instead(domain: c_int, kind: c_int, protocol: c_int) -> Option<c_int> {
    match (domain, protocol) {
        _ if kind & TYPE_MASK != libc::SOCK_STREAM => None,
        (AF_SMC, 0) => Some(libc::AF_INET),
        (AF_SMC, SMCPROTO_SMC6) => Some(libc::AF_INET6),
        (libc::AF_INET | libc::AF_INET6, IPPROTO_SMC) => Some(domain),
        _ => None,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn connect(fd: c_int, to: *const sockaddr, length: socklen_t) -> c_int {
    let peer = if to.is_null() {
        None
    } else {
        // SAFETY: the caller promises an address of `length` bytes.
        address::decode(unsafe { slice::from_raw_parts(to.cast(), length as usize) })
    };
    // SAFETY: the caller promises what `connect` asks for.
    connect::connect(fd, peer, || unsafe { real::connect(fd, to, length) })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn listen(fd: c_int, backlog: c_int) -> c_int {
    accept::listen(fd);
    // SAFETY: `listen` asks for numbers only.
    unsafe { real::listen(fd, backlog) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn accept(
    fd: c_int,
    from: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    // SAFETY: the caller promises what `accept` asks for, and `accept4` asks for the same.
    unsafe { accept4(fd, from, length, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn accept4(
    fd: c_int,
    from: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let room = if length.is_null() {
        0
    } else {
        // SAFETY: it is not null, so the caller promises that it can be read.
        unsafe { *length }
    };
    loop {
        accept::before_accept(fd);
        // SAFETY: the caller promises what `accept4` asks for.
        let accepted = unsafe { real::accept4(fd, from, length, flags) };
        if accepted < 0 || accept::welcome(fd, accepted) == Welcome::Keep {
            return accepted;
        }
        // SAFETY: the number is that of a socket which nobody knows of yet.
        if unsafe { real::close(accepted) } != 0 {
            return sys::fail(libc::ECONNABORTED);
        }
        if !length.is_null() {
            // SAFETY: it is not null, so the caller promises that it can be written.
            unsafe { *length = room };
        }
    }
}
