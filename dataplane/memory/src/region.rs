//! A mapping that outlives whatever is carved from it.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use smcr_os::Mapping;

/// Page-aligned memory that NICs may read and write. Clones share it; the last one unmaps it.
///
/// Whoever told a NIC the address holds a clone until the NIC has forgotten it, so the memory can
/// not disappear under a write.
#[derive(Clone, Debug)]
pub struct Region {
    mapping: Arc<Mapping>,
}

impl Region {
    /// Maps a region of `len` bytes, all zero.
    ///
    /// # Errors
    ///
    /// When the kernel has no memory to map.
    pub fn new(len: usize) -> io::Result<Self> {
        Ok(Self { mapping: Arc::new(Mapping::anonymous(len)?) })
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// The address of the first byte, as peers are told it.
    pub fn address(&self) -> u64 {
        self.mapping.base().as_ptr() as u64
    }

    /// Copies `bytes` to `at` bytes into the region.
    ///
    /// # Panics
    ///
    /// If the range leaves the region. Callers have checked what peers sent; this is our bug.
    pub fn copy_in(&self, at: usize, bytes: &[u8]) {
        let target = self.pointer(at, bytes.len());
        // SAFETY: `copy_nonoverlapping` asks for
        // - a source valid for reads: `bytes` is a live slice;
        // - a target valid for writes of that length: `pointer` checked the range, and MAPPED of
        //   `Mapping` covers it as long as `self` lives;
        // - no overlap: no reference to the mapping exists (ALIEN), so `bytes` lies elsewhere.
        // Another thread may read or write the same bytes: they are only ever accessed by raw
        // copies and system calls, whose outcome for contested bytes is unspecified data.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.as_ptr(), bytes.len()) };
    }

    /// Copies `out.len()` bytes that start `at` bytes into the region.
    ///
    /// # Panics
    ///
    /// If the range leaves the region.
    pub fn copy_out(&self, at: usize, out: &mut [u8]) {
        let source = self.pointer(at, out.len());
        // SAFETY: `copy_nonoverlapping` asks for
        // - a source valid for reads of that length: `pointer` checked the range, and MAPPED of
        //   `Mapping` covers it;
        // - a target valid for writes: `out` is a live exclusive slice;
        // - no overlap: no reference to the mapping exists (ALIEN), so `out` lies elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), out.as_mut_ptr(), out.len()) };
    }

    /// Sets `len` bytes from `at` to zero.
    ///
    /// # Panics
    ///
    /// If the range leaves the region.
    pub fn zero(&self, at: usize, len: usize) {
        let target = self.pointer(at, len);
        // SAFETY: `write_bytes` asks for a target valid for writes of `len` bytes: `pointer`
        // checked the range, MAPPED covers it, and ALIEN excludes references to it.
        unsafe { std::ptr::write_bytes(target.as_ptr(), 0, len) };
    }

    /// Gives whole pages of the range back to the kernel and zeroes the rest of it.
    ///
    /// Not for memory that hardware has pinned: such a NIC would go on writing to the pages it
    /// knows, which are then no longer these.
    ///
    /// # Panics
    ///
    /// If the range leaves the region.
    pub fn discard(&self, at: usize, len: usize) {
        match self.mapping.discard(at, len) {
            Ok(gone) if !gone.is_empty() => {
                self.zero(at, gone.start - at);
                self.zero(gone.end, at + len - gone.end);
            }
            Ok(_) | Err(_) => self.zero(at, len),
        }
    }

    /// The address `at` bytes into the region, from which `len` bytes belong to it.
    pub(crate) fn pointer(&self, at: usize, len: usize) -> NonNull<u8> {
        assert!(at <= self.len() && len <= self.len() - at, "{at}+{len} of {}", self.len());
        // SAFETY: `add` asks to stay within the allocation: the assertion and MAPPED.
        unsafe { self.mapping.base().add(at) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_comes_out_and_discarded_bytes_are_zero() {
        let region = Region::new(16_384).unwrap();
        region.copy_in(0, &[7; 16_384]);
        region.discard(100, 9_000);
        let mut out = vec![1; 16_384];
        region.copy_out(0, &mut out);
        assert!(out[..100].iter().all(|byte| *byte == 7));
        assert!(out[100..9_100].iter().all(|byte| *byte == 0));
        assert!(out[9_100..].iter().all(|byte| *byte == 7));
    }

    #[test]
    #[should_panic(expected = "1+16384 of 16384")]
    fn a_range_that_leaves_the_region_is_our_bug() {
        Region::new(16_384).unwrap().copy_in(1, &[0; 16_384]);
    }
}
