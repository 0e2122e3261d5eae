//! `readv` and `writev` on memory to which no Rust reference may exist.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// A run of bytes, by address.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The first byte. Dangling if `len` is zero.
    pub base: NonNull<u8>,
    /// The number of bytes.
    pub len: usize,
}

impl Piece {
    /// No bytes.
    pub const EMPTY: Self = Self { base: NonNull::dangling(), len: 0 };
}

/// Memory that system calls may fill or empty: at most two runs, in order.
///
/// # Safety
///
/// While the value lives, each piece is valid for reads and writes of its length, and so are the
/// aligned words in which it begins and ends. No Rust reference to any of these bytes exists but to
/// atomic words. Others may write the bytes meanwhile:
/// a system call is no access of Rust code, and races with none.
pub unsafe trait Foreign {
    /// The runs, in order. An empty one may come anywhere.
    fn pieces(&self) -> [Piece; 2];
}

/// Reads from `file` into `target`. Returns how many bytes were read: zero at the end of the
/// stream.
///
/// # Errors
///
/// As `readv(2)`; `target` is then unchanged. Interruption by a signal is reported, not retried.
pub fn readv(file: BorrowedFd<'_>, target: &impl Foreign) -> io::Result<usize> {
    let vectors = vectors(target);
    // SAFETY: `readv` asks for
    // - an open descriptor: `BorrowedFd`;
    // - two iovecs valid for the call: `vectors` is a live local;
    // - that each names memory valid for writes that nobody has references to: `Foreign`.
    let count = unsafe { libc::readv(file.as_raw_fd(), vectors.as_ptr(), 2) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Writes `source` to `file`. Returns how many bytes were written.
///
/// # Errors
///
/// As `writev(2)`. Interruption by a signal is reported, not retried.
pub fn writev(file: BorrowedFd<'_>, source: &impl Foreign) -> io::Result<usize> {
    let vectors = vectors(source);
    // SAFETY: `writev` asks for
    // - an open descriptor: `BorrowedFd`;
    // - two iovecs valid for the call: `vectors` is a live local;
    // - that each names memory valid for reads: `Foreign`.
    let count = unsafe { libc::writev(file.as_raw_fd(), vectors.as_ptr(), 2) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

fn vectors(memory: &impl Foreign) -> [libc::iovec; 2] {
    memory
        .pieces()
        .map(|piece| libc::iovec { iov_base: piece.base.as_ptr().cast(), iov_len: piece.len })
}
