//! Socket options whose value is one integer.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{c_int, socklen_t};

/// The value of an option.
///
/// # Errors
///
/// As `getsockopt(2)`.
pub(crate) fn get(socket: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut len = INT_LEN;
    // SAFETY: `getsockopt` asks for
    // - an open descriptor: `BorrowedFd`;
    // - a place for `len` bytes of value, and one for the length: live exclusive locals, the first
    //   of exactly that size.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut len)
    };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// Sets an option.
///
/// # Errors
///
/// As `setsockopt(2)`.
pub(crate) fn set(
    socket: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: c_int,
) -> io::Result<()> {
    // SAFETY: `setsockopt` asks for
    // - an open descriptor: `BorrowedFd`;
    // - a pointer valid for `INT_LEN` reads: `value` is a live local of exactly that size.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), INT_LEN)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[allow(clippy::cast_possible_truncation, reason = "4")]
const INT_LEN: socklen_t = size_of::<c_int>() as socklen_t;

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn an_option_reads_back_and_an_unknown_one_is_refused() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        set(socket.as_fd(), libc::IPPROTO_IP, libc::IP_TTL, 7).unwrap();
        assert_eq!(get(socket.as_fd(), libc::IPPROTO_IP, libc::IP_TTL).unwrap(), 7);
        assert!(set(socket.as_fd(), libc::IPPROTO_IP, 9999, 7).is_err());
        assert!(get(socket.as_fd(), libc::IPPROTO_IP, 9999).is_err());
    }
}
