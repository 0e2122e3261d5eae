//! The options of a TCP socket that no crate below us knows: keeping and reading the SYN.

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
/// Empty if there is none: the listener did not save it, or it has been read before. Whoever asks
/// waits until the kernel has finished the segment it is working on for this socket.
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

/// Two headers of at most 60 bytes each, and room for IPv6 extension headers.
const SYN_BYTES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

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
}
