//! Memory mapped by the kernel: page-aligned, zeroed at first, never moved. It is private, or other
//! processes share it by its descriptor.
//!
//! What a descriptor of another process leads to is not trusted. An access to a page that is gone
//! ends the process with SIGBUS, so the kernel must guarantee that no page can go: only a memfd
//! that is sealed against shrinking is mapped, and none of huge pages, which can run out.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate,
    memfd_create,
};
use rustix::io::{Errno, pread};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// Memory that is mapped for the life of the value.
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
    /// Of memory that is shared: what other processes map.
    file: Option<OwnedFd>,
    is_huge: bool,
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
        Ok(Self { base, len, file: None, is_huge: false })
    }

    /// The same in huge pages, which need fewer entries of the CPU's page caches. They are taken at
    /// once, so that none can be missing later, and none is given back before the value is dropped.
    ///
    /// # Errors
    ///
    /// When the host has not reserved enough of them, or none at all.
    ///
    /// # Panics
    ///
    /// If `len` is zero.
    pub fn huge(len: usize) -> io::Result<Self> {
        assert!(len > 0);
        let mapped = len.checked_next_multiple_of(HUGE_PAGE).ok_or(Errno::NOMEM)?;
        // SAFETY: as in `anonymous`.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB,
            )
        }?;
        let base = NonNull::new(base.cast()).expect("the kernel maps page zero only on request");
        Ok(Self { base, len, file: None, is_huge: true })
    }

    /// Maps `len` bytes, all zero, that other processes can map by their
    /// [`descriptor`](Self::descriptor). The kernel allocates each page when somebody touches it.
    ///
    /// # Errors
    ///
    /// When the kernel refuses. Nothing is mapped then.
    ///
    /// # Panics
    ///
    /// If `len` is zero.
    pub fn shared(len: usize) -> io::Result<Self> {
        assert!(len > 0);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("smcgate", flags)?;
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        Self::of_file(file, len)
    }

    /// Maps the memory that another process has made with [`shared`](Self::shared), all of it.
    ///
    /// # Errors
    ///
    /// When the descriptor is of something else, or of more than `len_max` bytes, or when the
    /// kernel refuses. Nothing is mapped then.
    pub fn of_peer(file: BorrowedFd<'_>, len_max: usize) -> io::Result<Self> {
        // The seals come first: of a file that another process serves, even its size may take as
        // long to learn as that process likes.
        let seals = fcntl_get_seals(file)?;
        if !seals.contains(SealFlags::SHRINK) || fstatfs(file)?.f_type != TMPFS {
            return Err(Errno::INVAL.into());
        }
        let len = usize::try_from(fstat(file)?.st_size).map_err(|_| Errno::INVAL)?;
        if len == 0 || len > len_max {
            return Err(Errno::FBIG.into());
        }
        Self::of_file(file.try_clone_to_owned()?, len)
    }

    /// Maps the first `len` bytes of a memfd, which has as many and keeps them.
    fn of_file(file: OwnedFd, len: usize) -> io::Result<Self> {
        // SAFETY: `mmap` asks that the address range be ours to replace: a null hint with no
        // MAP_FIXED lets the kernel choose an unused one. It maps whole pages.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).expect("the kernel maps page zero only on request");
        Ok(Self { base, len, file: Some(file), is_huge: false })
    }

    /// By which other processes map this memory, if it is shared. Whoever has it can read and write
    /// all of it for as long as they like.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
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

    /// Frees the pages that lie completely in `at..at + len`, unless they are huge or shared; they
    /// read as zero afterwards. Returns the range that was freed, in bytes from `base`. Where the
    /// kernel's pages are larger than ours, it frees nothing.
    ///
    /// To free pages of a file takes a lock of the file. Whoever shares it can hold that for as
    /// long as they like: they write to it from memory whose pages do not come.
    ///
    /// # Errors
    ///
    /// As `madvise(2)`. Nothing is freed then.
    ///
    /// # Panics
    ///
    /// If the range exceeds the mapping.
    pub fn discard(&self, at: usize, len: usize) -> io::Result<std::ops::Range<usize>> {
        assert!(at <= self.len && len <= self.len - at);
        let start = at.next_multiple_of(PAGE);
        let end = (at + len) / PAGE * PAGE;
        // Huge pages that were given back might be missing when they are touched again.
        if start >= end || self.is_huge || self.file.is_some() || !pages_are_ours() {
            return Ok(at..at);
        }
        // SAFETY: `start <= len` by the assertion and the test above, so by MAPPED the result
        // stays within the allocation.
        let base = unsafe { self.base.as_ptr().add(start) };
        // SAFETY: `madvise` asks, for this advice, for a page-aligned range of a mapping that
        // nobody has references into: `start` is a multiple of the page size counted from a
        // page-aligned base, MAPPED covers the range, ALIEN excludes references.
        unsafe { madvise(base.cast(), end - start, Advice::LinuxDontNeed) }?;
        Ok(start..end)
    }

    /// Copies what is in shared memory, from `at` bytes on, to `out`. Where the kernel has not
    /// allocated a page it reads as zero, and none is allocated, as an access would do. It takes no
    /// lock that others who share the memory can hold.
    ///
    /// # Errors
    ///
    /// As `pread(2)`, or if less is there, or if the memory is not shared.
    pub fn peek(&self, at: usize, out: &mut [u8]) -> io::Result<()> {
        let file = self.file.as_ref().ok_or(Errno::BADF)?;
        let len = out.len();
        let count = pread(file, out, at as u64)?;
        if count == len { Ok(()) } else { Err(Errno::NODATA.into()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // The kernel unmaps huge pages as a whole only.
        let mapped = if self.is_huge { self.len.next_multiple_of(HUGE_PAGE) } else { self.len };
        // SAFETY: `munmap` asks for a range that is ours and no longer used: MAPPED says it is
        // ours, and ALIEN that no reference survives; addresses given to NICs are withdrawn
        // before, since whoever registered the memory holds the owner of this value.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), mapped) };
        assert!(unmapped.is_ok(), "a mapping we made can be unmapped");
    }
}

/// Whether the kernel's pages have the size of ours. It frees whole pages of its own, even if it is
/// asked for a part of the last one, and a neighbour may need the rest of it.
fn pages_are_ours() -> bool {
    static ARE_OURS: OnceLock<bool> = OnceLock::new();
    *ARE_OURS.get_or_init(|| {
        // SAFETY: `sysconf` asks for nothing; it returns a number.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(size) == Ok(PAGE)
    })
}

/// The size of pages that we reckon with.
const PAGE: usize = 4096;
/// Size of the smallest huge pages.
pub const HUGE_PAGE: usize = 2 << 20;
/// What nobody can change any more: the size, and these seals.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// What the kernel calls the file system of a memfd without huge pages.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn discard_rounds_inwards_and_frees_nothing_of_less_than_a_page() {
        let mapping = Mapping::anonymous(4 * PAGE).unwrap();
        assert_eq!(mapping.discard(1, 3 * PAGE).unwrap(), PAGE..3 * PAGE);
        assert_eq!(mapping.discard(100, 1000).unwrap(), 100..100);
        assert_eq!(mapping.discard(0, 4 * PAGE).unwrap(), 0..4 * PAGE);
    }

    /// Of the host's huge pages, if it has reserved some, or none: what the kernel gives is what it
    /// took, and nothing stays.
    #[test]
    fn huge_pages_are_taken_as_a_whole_or_refused() {
        let free = || {
            let all = std::fs::read_to_string("/proc/meminfo").unwrap();
            let line = all.lines().find(|line| line.starts_with("HugePages_Free:")).unwrap();
            line.split_ascii_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
        };
        match Mapping::huge(HUGE_PAGE + 1) {
            Ok(mapping) => {
                assert_eq!(mapping.len(), HUGE_PAGE + 1);
                assert_eq!(mapping.discard(0, HUGE_PAGE).unwrap(), 0..0);
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
                assert!(free() < 2);
            }
        }
        assert!(Mapping::huge(usize::MAX).is_err());
    }

    fn of_peer(file: &impl AsFd) -> io::Result<Mapping> {
        Mapping::of_peer(file.as_fd(), 1 << 20)
    }

    #[test]
    fn shared_memory_is_mapped_by_whoever_has_its_descriptor() {
        let own = Mapping::shared(3 * PAGE - 1).unwrap();
        let file = own.descriptor().unwrap();
        assert_eq!(of_peer(&file).unwrap().len(), 3 * PAGE - 1);
        assert!(ftruncate(file, 1).is_err(), "it must not shrink");
        assert!(ftruncate(file, 1 << 20).is_err(), "nor grow");
        assert!(fcntl_add_seals(file, SealFlags::FUTURE_WRITE).is_err(), "nor be sealed further");
        assert!(Mapping::of_peer(file, PAGE).is_err(), "too long");
        assert!(Mapping::anonymous(PAGE).unwrap().descriptor().is_none());
    }

    /// A peer could truncate such a file while we write to it, and the kernel would end us.
    #[test]
    fn memory_that_may_go_away_is_not_mapped() {
        let unsealed = memfd_create("a", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, 4_096).unwrap();
        assert!(of_peer(&unsealed).is_err());
        fcntl_add_seals(&unsealed, SealFlags::GROW).unwrap();
        assert!(of_peer(&unsealed).is_err());
        fcntl_add_seals(&unsealed, SealFlags::SHRINK).unwrap();
        assert!(of_peer(&unsealed).is_ok());
        let empty = memfd_create("b", MemfdFlags::ALLOW_SEALING).unwrap();
        fcntl_add_seals(&empty, SEALS).unwrap();
        assert!(of_peer(&empty).is_err(), "nothing to map");
        let huge = memfd_create("c", MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB).unwrap();
        fcntl_add_seals(&huge, SEALS).unwrap();
        assert!(of_peer(&huge).is_err(), "huge pages may run out");
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(of_peer(&reader).is_err(), "no memory at all");
    }

    /// A page that comes when the descriptor is closed; none if we may not do such a thing.
    fn absent_page() -> Option<(OwnedFd, Mapping)> {
        let page = Mapping::anonymous(PAGE).unwrap();
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: `userfaultfd` asks for flags.
        let faults = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let faults = i32::try_from(faults).ok().filter(|descriptor| *descriptor >= 0)?;
        // SAFETY: it is open, and nobody else's.
        let faults = unsafe { OwnedFd::from_raw_fd(faults) };
        // UFFDIO_API: version, features, and what the kernel answers.
        let mut version = [0xaa_u64, 0, 0];
        // SAFETY: it asks for a live exclusive array of these three.
        let greeted = unsafe { libc::ioctl(faults.as_raw_fd(), 0xc018_aa3f, &mut version) };
        // UFFDIO_REGISTER: start, length, missing pages, and what the kernel answers.
        let mut range = [page.base().as_ptr() as u64, PAGE as u64, 1, 0];
        // SAFETY: it asks for a live exclusive array of these four.
        let registered = unsafe { libc::ioctl(faults.as_raw_fd(), 0xc020_aa00, &mut range) };
        (greeted == 0 && registered == 0).then_some((faults, page))
    }

    /// A peer writes to memory that it shares with us, from a page that does not come: it has the
    /// lock of the file.
    #[test]
    fn who_shares_memory_cannot_make_us_wait() {
        let Some((faults, page)) = absent_page() else {
            return println!("not tried: it takes the right to delay faults of the kernel");
        };
        let own = Mapping::shared(4 * PAGE).unwrap();
        let file = own.descriptor().unwrap().try_clone_to_owned().unwrap();
        let writer = thread::spawn(move || {
            // SAFETY: it asks for a page that can be read: MAPPED.
            unsafe { libc::pwrite(file.as_raw_fd(), page.base().as_ptr().cast(), PAGE, 0) }
        });
        let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
        let holds = poll(&mut [PollFd::new(&faults, PollFlags::IN)], Some(&patience));
        assert_eq!(holds, Ok(1));
        let (sender, done) = mpsc::channel();
        let us = thread::spawn(move || {
            let freed = own.discard(0, 4 * PAGE).unwrap();
            own.peek(0, &mut [1; PAGE]).unwrap();
            sender.send(()).unwrap();
            freed
        });
        let in_time = done.recv_timeout(Duration::from_secs(5)).is_ok();
        drop(faults);
        assert_eq!(writer.join().unwrap(), PAGE.cast_signed());
        let freed = us.join().unwrap();
        assert!(in_time, "it waits for the peer");
        assert!(freed.is_empty());
    }

    /// Memory of which nothing was used must not come into being when it is looked at.
    #[test]
    fn a_look_at_shared_memory_allocates_nothing() {
        let own = Mapping::shared(4 * PAGE).unwrap();
        let file = own.descriptor().unwrap();
        rustix::io::pwrite(file, &[7; PAGE], PAGE as u64).unwrap();
        let before = fstat(file).unwrap().st_blocks;
        let mut out = [1; 4 * PAGE];
        own.peek(0, &mut out).unwrap();
        assert!(out[PAGE..2 * PAGE].iter().all(|byte| *byte == 7));
        assert!(out[..PAGE].iter().chain(&out[2 * PAGE..]).all(|byte| *byte == 0));
        assert_eq!(fstat(file).unwrap().st_blocks, before);
        assert!(own.peek(1, &mut out).is_err(), "it ends before");
        assert!(Mapping::anonymous(PAGE).unwrap().peek(0, &mut out).is_err());
    }
}
