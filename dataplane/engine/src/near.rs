//! What a stream is to the kernel: a socket, and perhaps rings by which its bytes go.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use smcgate_rings::Gateway;

/// A socket. Of a local program that shares memory with us, it carries no bytes: those go by the
/// rings, and the socket says when there are any.
#[derive(Debug)]
pub struct Near {
    socket: OwnedFd,
    /// It is a Unix socket, by which a program on this host has the connection.
    is_program: bool,
    rings: Option<Arc<Gateway>>,
}

impl Near {
    /// The Unix socket of a program on this host, whose bytes go by these rings if there are any.
    pub fn of_program(socket: OwnedFd, rings: Option<Arc<Gateway>>) -> Self {
        Self { socket, is_program: true, rings }
    }

    /// Whether it is the Unix socket of a program.
    pub(crate) fn is_program(&self) -> bool {
        self.is_program
    }

    /// Its rings, if it has some.
    pub(crate) fn rings(&self) -> Option<&Arc<Gateway>> {
        self.rings.as_ref()
    }
}

/// A TCP socket.
impl From<OwnedFd> for Near {
    fn from(socket: OwnedFd) -> Self {
        Self { socket, is_program: false, rings: None }
    }
}

impl AsFd for Near {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        // Before the socket is closed: who sees that it is, may look.
        if let Some(rings) = &self.rings {
            rings.close(self.socket.as_fd());
        }
    }
}
