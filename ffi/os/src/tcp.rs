//! TCP socket calls that the crates we depend on do not have: saving and reading the SYN, and
//! finding the urgent byte; and what a socket needs that speaks for others.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::option;

/// Makes the kernel keep the SYN of every connection that `listener` accepts from now on.
///
/// # Errors
///
/// As `setsockopt(2)`.
pub fn save_syn(listener: BorrowedFd<'_>) -> io::Result<()> {
    option::set(listener, libc::IPPROTO_TCP, libc::TCP_SAVE_SYN, 1)
}

/// The SYN that opened an accepted connection: IP header, TCP header and options.
///
/// Empty if the listener did not save it, or if it was read before. The call may wait until the
/// kernel has processed the segment that it is working on for this socket.
///
/// # Errors
///
/// As `getsockopt(2)`.
pub fn saved_syn(connection: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut syn = vec![0_u8; SYN_BYTES_MAX];
    let mut len = libc::socklen_t::try_from(syn.len()).expect("a few hundred bytes");
    // SAFETY: `getsockopt` asks for
    // - an open descriptor: `BorrowedFd`;
    // - a pointer valid for `len` writes: `syn` is a live exclusive vector of that length;
    // - a place to store the length: `len` is a live local.
    let result = unsafe {
        libc::getsockopt(
            connection.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_SAVED_SYN,
            syn.as_mut_ptr().cast(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    syn.truncate(len as usize);
    Ok(syn)
}

/// The largest segment that a connection sends now, in bytes (TCP_MAXSEG).
///
/// # Errors
///
/// As `getsockopt(2)`.
pub fn largest_segment(connection: BorrowedFd<'_>) -> io::Result<u32> {
    option::get(connection, libc::IPPROTO_TCP, libc::TCP_MAXSEG).map(i32::cast_unsigned)
}

/// Marks the packets of a socket, for firewalls, routing rules and eBPF programs (SO_MARK).
///
/// # Errors
///
/// As `setsockopt(2)`; without CAP_NET_ADMIN or CAP_NET_RAW it is not permitted.
pub fn set_mark(socket: BorrowedFd<'_>, mark: u32) -> io::Result<()> {
    option::set(socket, libc::SOL_SOCKET, libc::SO_MARK, mark.cast_signed())
}

/// Lets a socket have addresses that are not of this host: a listener accepts connections to them,
/// and others can be bound to them (IP_TRANSPARENT).
///
/// # Errors
///
/// As `setsockopt(2)`; without CAP_NET_ADMIN or CAP_NET_RAW it is not permitted.
pub fn set_transparent(socket: BorrowedFd<'_>, is_ipv6: bool) -> io::Result<()> {
    // A socket of IPv6 may carry IPv4, too. The kernel keeps one flag for both.
    match is_ipv6 {
        false => option::set(socket, libc::SOL_IP, libc::IP_TRANSPARENT, 1),
        true => option::set(socket, libc::SOL_IPV6, libc::IPV6_TRANSPARENT, 1),
    }
}

/// The number by which eBPF programs know the network namespace of a socket.
///
/// # Errors
///
/// As `getsockopt(2)`: the kernel is older than 5.14.
pub fn network_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut cookie: u64 = 0;
    let mut len = libc::socklen_t::try_from(size_of::<u64>()).expect("8 fits");
    // SAFETY: `getsockopt` asks for
    // - an open descriptor: `BorrowedFd`;
    // - a pointer valid for `len` writes: `cookie` is a live exclusive local of that size;
    // - a place to store the length: `len` is a live local.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

/// Whether the next byte that a read of `connection` would return is the urgent one.
///
/// The answer is final once `FIONREAD` shows that this byte has arrived, because the segment that
/// brought it also said whether it is urgent. The socket needs `SO_OOBINLINE`; without it, a read
/// skips the urgent byte.
///
/// # Errors
///
/// As `ioctl(2)`.
pub fn is_at_mark(connection: BorrowedFd<'_>) -> io::Result<bool> {
    let mut at_mark: libc::c_int = 0;
    // SAFETY: `ioctl(SIOCATMARK)` asks for
    // - an open descriptor: `BorrowedFd`;
    // - a place for one integer: `at_mark` is a live exclusive local.
    let result = unsafe { libc::ioctl(connection.as_raw_fd(), SIOCATMARK, &raw mut at_mark) };
    if result == 0 { Ok(at_mark != 0) } else { Err(io::Error::last_os_error()) }
}

/// From `linux/sockios.h`, the same on every architecture.
const SIOCATMARK: libc::Ioctl = 0x8905;

/// Two headers of at most 60 bytes each, and room for IPv6 extension headers.
const SYN_BYTES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use rustix::net::{SendFlags, send, sockopt};

    use super::*;

    #[test]
    fn the_syn_is_there_once_if_the_listener_saves_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let _before = TcpStream::connect(address).unwrap();
        let (before, _) = listener.accept().unwrap();
        assert_eq!(saved_syn(before.as_fd()).unwrap(), []);

        save_syn(listener.as_fd()).unwrap();
        let _after = TcpStream::connect(address).unwrap();
        let (after, _) = listener.accept().unwrap();
        let syn = saved_syn(after.as_fd()).unwrap();
        assert_eq!(syn[0] >> 4, 4, "an IPv4 header");
        assert_eq!(syn[22..24], address.port().to_be_bytes(), "to our port");
        assert_eq!(saved_syn(after.as_fd()).unwrap(), [], "read once");
    }

    /// The position of the urgent byte must be exact. If it were off by one byte, `telnet` would
    /// discard a key that the user typed.
    #[test]
    fn the_mark_is_where_the_urgent_byte_is() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut near, _) = listener.accept().unwrap();
        sockopt::set_socket_oobinline(&near, true).unwrap();
        send(&far, b"ab", SendFlags::empty()).unwrap();
        send(&far, b"!", SendFlags::OOB).unwrap();
        send(&far, b"c", SendFlags::empty()).unwrap();
        let mut room = [0; 2];
        near.read_exact(&mut room).unwrap();
        for (byte, at_mark) in [(b'!', true), (b'c', false)] {
            assert_eq!(is_at_mark(near.as_fd()).unwrap(), at_mark);
            near.read_exact(&mut room[..1]).unwrap();
            assert_eq!(room[0], byte);
        }
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(is_at_mark(file.as_fd()).is_err());
    }
}
