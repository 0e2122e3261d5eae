//! Descriptors that come by Unix sockets.

use std::io;
use std::os::fd::BorrowedFd;

use crate::option;

/// Refuses descriptors that somebody sends to `socket`: the sender is told `EPERM`.
///
/// Otherwise whoever reads the bytes beside them closes the descriptors, and a descriptor may take
/// as long to close as its sender likes.
///
/// # Errors
///
/// As `setsockopt(2)`; before Linux 6.16, `ENOPROTOOPT`.
pub fn refuse(socket: BorrowedFd<'_>) -> io::Result<()> {
    option::set(socket, libc::SOL_SOCKET, SO_PASSRIGHTS, 0)
}

/// From `asm-generic/socket.h`; the `libc` crate has no name for it yet.
const SO_PASSRIGHTS: libc::c_int = 83;
