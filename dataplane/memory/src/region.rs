//! A mapping that stays as long as anything that was carved from it.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use smcr_os::Mapping;

use crate::contested::Contested;

/// Page-aligned memory that NICs may read and write. Clones share it; the last one unmaps it.
///
/// Whoever registered the memory with a NIC holds a clone until the NIC has forgotten it, so that
/// the memory cannot disappear during a write.
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

    /// Copies `bytes` to `at` bytes into the region. Others may write there at the same time:
    /// see the module `contested`.
    ///
    /// # Panics
    ///
    /// If the range leaves the region. Callers have checked what peers sent; this is our bug.
    pub fn copy_in(&self, at: usize, bytes: &[u8]) {
        self.contested(at, bytes.len()).store(bytes);
    }

    /// Copies `out.len()` bytes that start `at` bytes into the region. Others may write there at
    /// the same time.
    ///
    /// # Panics
    ///
    /// If the range leaves the region.
    pub fn copy_out(&self, at: usize, out: &mut [u8]) {
        self.contested(at, out.len()).load(out);
    }

    /// Sets `len` bytes from `at` to zero. Others may write there at the same time.
    ///
    /// # Panics
    ///
    /// If the range leaves the region.
    pub fn zero(&self, at: usize, len: usize) {
        self.contested(at, len).clear();
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

    /// The `len` bytes from `at`, for one copy.
    fn contested(&self, at: usize, len: usize) -> Contested<'_> {
        let start = self.pointer(at, len);
        // SAFETY: `Contested::new` asks for
        // - WHOLE: `pointer` checked the range; MAPPED of `Mapping` covers it and, because it
        //   speaks of whole pages, also the words at its ends, as long as `self` lives;
        // - ATOMIC: no reference to the mapping exists (ALIEN), all addresses of it come from
        //   `pointer`, and Rust code goes through this method; the others end at system calls.
        unsafe { Contested::new(start, len) }
    }

    /// The address `at` bytes into the region, from which `len` bytes belong to it.
    pub(crate) fn pointer(&self, at: usize, len: usize) -> NonNull<u8> {
        assert!(at <= self.len() && len <= self.len() - at, "{at}+{len} of {}", self.len());
        // SAFETY: `add` asks to stay within the allocation: the assertion and MAPPED.
        unsafe { self.mapping.base().add(at) }
    }
}

#[cfg(test)]
mod tests;
