//! What a stream is to the kernel: a socket, and perhaps rings by which its bytes go.

use std::cell::OnceCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smcgate_rings::Gateway;
use smcr_os::tcp::largest_segment;

/// A socket. Of a local program that shares memory with us, it carries no bytes: those go by the
/// rings, and the socket says when there are any.
#[derive(Debug)]
pub struct Near {
    /// There, until [`into_socket`](Self::into_socket) takes it.
    socket: Option<OwnedFd>,
    /// Of a Unix socket, by which a program on this host has the connection: how it is to end.
    program: Option<AtEnd>,
    rings: Option<Arc<Gateway>>,
    /// Whether it is a TCP connection to this host, once somebody has asked.
    loops_back: OnceCell<bool>,
}

/// How the connection of a program ends when nobody has the program's socket any more: as closed,
/// unless a program has said that it closes with SO_LINGER of zero. A Unix socket cannot say so.
///
/// Whoever hears it of the program and the poller that reads the socket share this. The poller
/// looks when it finds the socket closed, so what was said before it was closed counts, whichever
/// poller has the connection by then. A command to the poller could come behind the end.
#[derive(Clone, Debug, Default)]
pub struct AtEnd(Arc<AtomicBool>);

impl AtEnd {
    /// The end is a reset. To be called while the program's socket is open.
    pub fn reset(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it is.
    pub fn is_reset(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Near {
    /// The Unix socket of a program on this host, whose bytes go by these rings if there are any.
    pub fn of_program(socket: OwnedFd, at_end: AtEnd, rings: Option<Arc<Gateway>>) -> Self {
        let socket = Some(socket);
        Self { socket, program: Some(at_end), rings, loops_back: OnceCell::from(false) }
    }

    /// The socket alone. A program is told that nothing follows by its rings, if it has some.
    #[must_use]
    pub fn into_socket(mut self) -> OwnedFd {
        self.close_rings();
        self.socket.take().expect("it is taken once")
    }

    /// Who sees that the socket is closed, may look.
    fn close_rings(&mut self) {
        if let (Some(rings), Some(socket)) = (self.rings.take(), &self.socket) {
            rings.close(socket.as_fd());
        }
    }

    /// Whether it is the Unix socket of a program.
    pub(crate) fn is_program(&self) -> bool {
        self.program.is_some()
    }

    /// Whether it is that of a program whose end is to be a reset.
    pub(crate) fn resets_at_end(&self) -> bool {
        self.program.as_ref().is_some_and(AtEnd::is_reset)
    }

    /// Whether it is a TCP connection to a program on this host, so that this host's CPUs copy to
    /// the reader what is sent.
    pub(crate) fn loops_back(&self) -> bool {
        // Whatever its addresses, it goes by the loopback device. No other has such segments.
        *self.loops_back.get_or_init(|| {
            largest_segment(self.as_fd()).is_ok_and(|bytes| bytes >= LOOPBACK_SEGMENT_MIN)
        })
    }

    /// Its rings, if it has some.
    pub(crate) fn rings(&self) -> Option<&Arc<Gateway>> {
        self.rings.as_ref()
    }
}

/// A TCP socket.
impl From<OwnedFd> for Near {
    fn from(socket: OwnedFd) -> Self {
        Self { socket: Some(socket), program: None, rings: None, loops_back: OnceCell::new() }
    }
}

impl AsFd for Near {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_ref().expect("only its last user takes it").as_fd()
    }
}

/// Segments of loopback have 64 KiB, or half of that while the receiver's window is small; others
/// have 9,000 bytes at most.
const LOOPBACK_SEGMENT_MIN: u32 = 16_384;

impl Drop for Near {
    fn drop(&mut self) {
        self.close_rings();
    }
}
