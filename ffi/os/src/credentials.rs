//! Who is at the other end of a Unix socket.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// A process, as it was when it connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Its number; zero if it lives in a namespace of processes that this one cannot see.
    pub pid: u32,
    /// The user it runs as.
    pub uid: u32,
    /// The group it runs as.
    pub gid: u32,
}

/// Who has connected to a Unix socket that was accepted.
///
/// # Errors
///
/// As `getsockopt(2)`.
pub fn of_peer(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).expect("12 fits");
    // SAFETY: `getsockopt` asks for
    // - an open descriptor: `BorrowedFd`;
    // - a place for `length` bytes, and one for the length: live exclusive locals, the first of
    //   exactly that size, for which all bytes are valid.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let pid = u32::try_from(found.pid).unwrap_or(0);
    Ok(Credentials { pid, uid: found.uid, gid: found.gid })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn we_are_at_both_ends() {
        let (one, _other) = UnixStream::pair().unwrap();
        let found = of_peer(one.as_fd()).unwrap();
        assert_eq!(
            (found.pid, found.uid),
            (std::process::id(), rustix::process::getuid().as_raw())
        );
    }
}
