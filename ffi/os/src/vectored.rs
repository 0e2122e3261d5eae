//! Sockets that fill or empty memory to which no Rust reference may exist.
//!
//! One run of bytes, the usual case, is received with `recv` and sent with `send`; two with `readv`
//! and `writev`. (With these for one run as well, a request and its answer took 2 % longer over two
//! gateways, and 32 at a time 2.5 %.)

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

/// Receives from a stream socket into `target`. Returns how many bytes were received: zero at the
/// end of the stream, or if `target` is empty.
///
/// # Errors
///
/// As `recv(2)`; `target` is then unchanged. Interruption by a signal is reported, not retried.
pub fn receive(socket: BorrowedFd<'_>, target: &impl Foreign) -> io::Result<usize> {
    let (descriptor, pieces) = (socket.as_raw_fd(), target.pieces());
    let count = match only(&pieces) {
        // SAFETY: `recv` asks for
        // - an open descriptor: `BorrowedFd`;
        // - memory valid for writes that nobody has references to: `Foreign`.
        Some(piece) => unsafe { libc::recv(descriptor, piece.base.as_ptr().cast(), piece.len, 0) },
        // SAFETY: `readv` asks for
        // - an open descriptor: `BorrowedFd`;
        // - two iovecs valid for the call: a temporary that lives until it returns;
        // - that each names memory valid for writes that nobody has references to: `Foreign`.
        None => unsafe { libc::readv(descriptor, vectors(&pieces).as_ptr(), 2) },
    };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Sends `source` over a stream socket. Returns how many bytes were sent.
///
/// # Errors
///
/// As `send(2)`. Interruption by a signal is reported, not retried.
pub fn send(socket: BorrowedFd<'_>, source: &impl Foreign) -> io::Result<usize> {
    let (descriptor, pieces) = (socket.as_raw_fd(), source.pieces());
    let flags = libc::MSG_NOSIGNAL;
    let count = match only(&pieces) {
        // SAFETY: `send` asks for
        // - an open descriptor: `BorrowedFd`;
        // - memory valid for reads: `Foreign`.
        Some(piece) => unsafe {
            libc::send(descriptor, piece.base.as_ptr().cast(), piece.len, flags)
        },
        // SAFETY: `writev` asks for
        // - an open descriptor: `BorrowedFd`;
        // - two iovecs valid for the call: a temporary that lives until it returns;
        // - that each names memory valid for reads: `Foreign`.
        None => unsafe { libc::writev(descriptor, vectors(&pieces).as_ptr(), 2) },
    };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// The one run that is not empty, if it is the first.
fn only(pieces: &[Piece; 2]) -> Option<Piece> {
    let [first, second] = *pieces;
    (first.len > 0 && second.len == 0).then_some(first)
}

fn vectors(pieces: &[Piece; 2]) -> [libc::iovec; 2] {
    pieces.map(|piece| libc::iovec { iov_base: piece.base.as_ptr().cast(), iov_len: piece.len })
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Two runs of live words, each of so many bytes.
    struct Runs(Vec<AtomicU64>, [usize; 2]);

    // SAFETY: `Foreign` asks for
    // - runs that are valid for reads and writes while the value lives, with the aligned words in
    //   which they begin and end: they are within whole words of the vector;
    // - that no reference to their bytes exists but to atomic words: the vector has no others.
    unsafe impl Foreign for Runs {
        fn pieces(&self) -> [Piece; 2] {
            let Self(words, [first, second]) = self;
            assert!(first + second <= size_of_val(&words[..]));
            let base = NonNull::<[AtomicU64]>::from(&words[..]).cast();
            // SAFETY: `add` asks to stay within one allocation: it was just compared.
            let next = unsafe { base.add(*first) };
            [Piece { base, len: *first }, Piece { base: next, len: *second }]
        }
    }

    impl Runs {
        /// Runs that hold these eight bytes.
        fn of(bytes: &[u8; 8], lens: [usize; 2]) -> Self {
            Self(vec![AtomicU64::new(u64::from_ne_bytes(*bytes))], lens)
        }

        fn bytes(&self) -> [u8; 8] {
            self.0[0].load(Ordering::Relaxed).to_ne_bytes()
        }
    }

    #[test]
    fn one_run_or_two_or_none() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        for lens in [[5, 0], [0, 5], [2, 3]] {
            let sent = send(ours.as_fd(), &Runs::of(b"abcde---", lens)).unwrap();
            let mut bytes = [0; 8];
            assert_eq!((sent, theirs.read(&mut bytes).unwrap()), (5, 5), "{lens:?}");
            assert_eq!(&bytes[..5], b"abcde", "{lens:?}");
            theirs.write_all(b"vwxyz").unwrap();
            let room = Runs::of(b"-----...", lens);
            assert_eq!(receive(ours.as_fd(), &room).unwrap(), 5, "{lens:?}");
            assert_eq!(room.bytes(), *b"vwxyz...", "{lens:?}");
        }
        assert_eq!(receive(ours.as_fd(), &Runs::of(b"--------", [0, 0])).unwrap(), 0);
    }

    #[test]
    fn an_end_and_a_refusal() {
        for lens in [[4, 0], [2, 2]] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            let room = Runs::of(b"abcd----", lens);
            let nothing = receive(ours.as_fd(), &room).unwrap_err();
            assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock, "{lens:?}");
            drop(theirs);
            assert_eq!(receive(ours.as_fd(), &room).unwrap(), 0, "{lens:?}");
            let refused = send(ours.as_fd(), &room).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::BrokenPipe, "{lens:?}");
        }
    }
}
