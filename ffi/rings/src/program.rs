//! A program's half in the process of the gateway, for those who try what a program may do.

use std::io;
use std::os::fd::BorrowedFd;

use crate::{Application, Gateway, Held, Shortcut};

/// The rings of one connection as its program has them, unmapped when dropped.
#[derive(Debug)]
pub struct Program {
    /// Nobody gets it, or a copy of it.
    rings: Application,
    shortcut: Option<Shortcut>,
}

impl Program {
    /// Maps the rings of a connection.
    ///
    /// # Errors
    ///
    /// If the kernel refuses.
    pub fn of(gateway: &Gateway) -> io::Result<Self> {
        Ok(Self { rings: Application::map(gateway.memory())?, shortcut: None })
    }

    /// Maps the shortcut that the connection was offered, as the side with this number, and joins.
    ///
    /// # Errors
    ///
    /// If there is none, or the kernel refuses.
    ///
    /// # Panics
    ///
    /// If it has one already.
    pub fn join(
        &mut self,
        gateway: &Gateway,
        socket: BorrowedFd<'_>,
        number: u32,
    ) -> io::Result<()> {
        assert!(self.shortcut.is_none());
        self.shortcut = Some(Shortcut::map(gateway.shortcut_memory()?, number)?);
        self.rings = self.rings.with(self.shortcut);
        self.rings.join(socket);
        Ok(())
    }

    /// As [`Application::read_slice`].
    pub fn read(&self, socket: BorrowedFd<'_>, room: &mut [u8]) -> usize {
        self.rings.read_slice(socket, room)
    }

    /// As [`Application::write_slice`].
    ///
    /// # Errors
    ///
    /// The same.
    pub fn write(&self, socket: BorrowedFd<'_>, bytes: &[u8], thread: u32) -> Result<usize, Held> {
        self.rings.write_slice(socket, bytes, thread)
    }

    /// As [`Application::make_unwritable`].
    pub fn make_unwritable(&self, socket: BorrowedFd<'_>) -> bool {
        self.rings.make_unwritable(socket)
    }

    /// As [`Application::readable`].
    pub fn readable(&self) -> u32 {
        self.rings.readable()
    }

    /// As [`Application::room`].
    pub fn room(&self) -> u32 {
        self.rings.room()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: `unmap` asks that nobody uses the rings, now or later: nobody else has them.
        unsafe { self.rings.unmap() };
        if let Some(shortcut) = self.shortcut {
            // SAFETY: the same of the shortcut.
            unsafe { shortcut.unmap() };
        }
    }
}
