//! A page of an RMB, as the pollers that place bytes in it see it: it holds one byte.

use crate::occupants::Occupants;
use crate::sync::{AtomicU32, Ordering};

/// The page, and who uses it.
#[derive(Debug, Default)]
pub struct Page {
    occupants: Occupants,
    byte: AtomicU32,
    placed: AtomicU32,
}

impl Page {
    /// With one placer, which is the caller.
    pub fn new() -> Self {
        let page = Self::default();
        page.occupants.admit();
        page
    }

    /// One more placer comes.
    pub fn admit(&self) {
        self.occupants.admit();
    }

    /// A placer goes.
    pub fn dismiss(&self) {
        self.occupants.dismiss();
    }

    /// A NIC comes that writes to the page itself.
    pub fn pin(&self) {
        self.occupants.pin();
    }

    /// A placer places the byte that a peer has sent.
    pub fn place(&self, byte: u32) {
        self.write(byte);
        self.placed.fetch_add(1, Ordering::Relaxed);
    }

    /// The peer writes the byte by a NIC that has pinned the page.
    pub fn write(&self, byte: u32) {
        self.byte.store(byte, Ordering::Relaxed);
    }

    /// A placer gives the page back, if `expected` bytes were placed and nobody else writes.
    /// Whoever reads it then gets zero.
    pub fn relinquish(&self, expected: u32) -> bool {
        self.occupants.alone(|| {
            let gone = self.placed.load(Ordering::Relaxed) == expected;
            if gone {
                self.write(0);
            }
            gone
        })
    }

    /// The byte.
    pub fn read(&self) -> u32 {
        self.byte.load(Ordering::Relaxed)
    }
}
