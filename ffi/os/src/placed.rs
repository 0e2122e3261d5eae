//! Buffers that begin at a chosen offset in a page.
//!
//! Some CPUs copy slowly to where the offset in the page is 1 to 31 bytes above that of the source
//! (`spacing` in `smcr-engine` says more). What the kernel keeps of packets begins shortly before a
//! page, or behind its start as much as headers take: 64 to 330 bytes, by the device's driver.

use std::ops::{Deref, DerefMut};

/// Bytes that begin at a chosen offset in a page.
#[derive(Debug)]
pub struct Placed {
    /// With room for any offset.
    bytes: Box<[u8]>,
    start: usize,
    len: usize,
}

impl Placed {
    /// `len` zeroes that begin `offset` bytes behind a page.
    ///
    /// # Panics
    ///
    /// If `offset` is not below 4096.
    pub fn new(len: usize, offset: usize) -> Self {
        assert!(offset < PAGE, "an offset of {offset} in a page of {PAGE}");
        let bytes: Box<[u8]> = vec![0; len + 2 * PAGE].into();
        let page = bytes.as_ptr().addr().wrapping_neg() % PAGE;
        Self { bytes, start: page + offset, len }
    }

    /// One that the kernel copies packets to: its offset is above those that it copies from.
    pub fn for_received(len: usize) -> Self {
        Self::new(len, APART)
    }

    /// One that the kernel copies packets from: its offset is below those that it copies to. What
    /// is behind the first `headers` bytes begins at a multiple of 512: where packets are so long
    /// that this puts those of all others at multiples of 32, they are copied there, and checksums
    /// of them computed, faster than elsewhere.
    ///
    /// # Panics
    ///
    /// If `headers` is more than 512.
    pub fn for_sent(len: usize, headers: usize) -> Self {
        assert!(headers <= APART, "{headers} bytes of headers");
        Self::new(len, PAGE - APART - headers)
    }
}

impl Deref for Placed {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len]
    }
}

impl DerefMut for Placed {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.len]
    }
}

const PAGE: usize = 4_096;
/// Above all those offsets, and copies to 256 to 512 bytes above are the fastest of all.
const APART: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_where_it_was_asked_for_and_as_long() {
        for offset in [0, 1, 16, 512, 4_095] {
            let mut placed = Placed::new(10_000, offset);
            assert_eq!(placed.as_ptr().addr() % PAGE, offset);
            assert_eq!(*placed, [0; 10_000]);
            placed.fill(7);
            let moved = Box::new(placed);
            assert_eq!(moved.as_ptr().addr() % PAGE, offset, "after a move");
            assert_eq!(**moved, [7; 10_000]);
        }
        assert!(Placed::new(0, 4_095).is_empty());
        let sent = Placed::for_sent(2_000, 28);
        assert_eq!(sent[28..].as_ptr().addr() % APART, 0);
    }
}
