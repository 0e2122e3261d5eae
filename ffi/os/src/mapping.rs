//! Anonymous memory mapped by the kernel: page-aligned, zeroed, never moved.

use std::io;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Anonymous private memory, mapped for the life of the value.
///
/// # Invariants
///
/// - **MAPPED** `base` begins a page, and is valid for reads and writes of `len` bytes, rounded up
///   to whole pages, until `Drop`.
/// - **ALIEN** No Rust reference to the bytes exists, but for those to atomic words while one of
///   them is accessed: the memory is written by NICs and system calls, and read by copy.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the value is an address and a length; mappings belong to the process, not to a thread,
// and whoever dereferences the address answers for races (see ALIEN).
unsafe impl Send for Mapping {}
// SAFETY: as above; no method gives out references to the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, all zero. The kernel allocates each page when it is first touched.
    ///
    /// # Errors
    ///
    /// When the kernel refuses. Nothing is mapped then.
    ///
    /// # Panics
    ///
    /// If `len` is zero.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        assert!(len > 0);
        // SAFETY: `mmap` asks that the address range be ours to replace: a null hint with no
        // MAP_FIXED lets the kernel choose an unused one. It maps whole pages.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let base = NonNull::new(base.cast()).expect("the kernel maps page zero only on request");
        Ok(Self { base, len })
    }

    /// The first byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Frees the pages that lie completely in `at..at + len`; they read as zero afterwards. Returns
    /// the range that was freed, in bytes from `base`.
    ///
    /// # Errors
    ///
    /// As `madvise(2)`, for example on a kernel with larger pages. Nothing is freed then.
    ///
    /// # Panics
    ///
    /// If the range exceeds the mapping.
    pub fn discard(&self, at: usize, len: usize) -> io::Result<std::ops::Range<usize>> {
        assert!(at <= self.len && len <= self.len - at);
        let start = at.next_multiple_of(PAGE);
        let end = (at + len) / PAGE * PAGE;
        if start >= end {
            return Ok(at..at);
        }
        // SAFETY: `start <= len` by the assertion and the test above, so by MAPPED the result
        // stays within the allocation.
        let base = unsafe { self.base.as_ptr().add(start) };
        // SAFETY: `madvise(DONTNEED)` asks for a page-aligned range of a mapping that nobody has
        // references into: `start` is a multiple of the page size counted from a page-aligned
        // base, MAPPED covers the range, ALIEN excludes references.
        unsafe { madvise(base.cast(), end - start, Advice::LinuxDontNeed) }?;
        Ok(start..end)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `munmap` asks for a range that is ours and no longer used: MAPPED says it is
        // ours, and ALIEN that no reference survives; addresses given to NICs are withdrawn
        // before, since whoever registered the memory holds the owner of this value.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        assert!(unmapped.is_ok(), "a mapping we made can be unmapped");
    }
}

/// Size of a page on every platform we build for.
const PAGE: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discard_rounds_inwards_and_frees_nothing_of_less_than_a_page() {
        let mapping = Mapping::anonymous(4 * PAGE).unwrap();
        assert_eq!(mapping.discard(1, 3 * PAGE).unwrap(), PAGE..3 * PAGE);
        assert_eq!(mapping.discard(100, 1000).unwrap(), 100..100);
        assert_eq!(mapping.discard(0, 4 * PAGE).unwrap(), 0..4 * PAGE);
    }
}
