//! A mapping that stays as long as anything that was carved from it.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use smcr_os::{Exposed, Extent, HUGE_PAGE, Mapping};

use crate::contested::Contested;
use crate::occupants::Occupants;

/// Page-aligned memory that NICs may read and write. Clones share it; the last one unmaps it.
///
/// Whoever registered the memory with a NIC holds a clone until the NIC has forgotten it, so that
/// the memory cannot disappear during a write.
#[derive(Clone, Debug)]
pub struct Region {
    memory: Arc<Memory>,
}

/// What a region is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Backing of this process, which come into being as they are touched.
    Private,
    /// Backing that other processes can map.
    Shared,
    /// Huge pages, for regions that are at least as long as one, if the host has reserved enough;
    /// else as [`Private`](Self::Private).
    Huge,
}

/// The memory that all clones of a region share.
#[derive(Debug)]
struct Memory {
    mapping: Mapping,
    occupants: Occupants,
    /// How many bytes placers have placed in each piece of [`PIECE`] bytes, modulo 2^32; none if
    /// there never was a placer. A write that begins in one piece and ends in the next counts for
    /// the first.
    placed: OnceLock<Arc<[AtomicU32]>>,
}

/// A region whose pages stay where they are as long as this exists. Hardware asks for it: a NIC
/// translates addresses to pages once, when memory is registered, and then goes on using those
/// pages.
#[must_use = "the region is pinned until this is dropped"]
#[derive(Debug)]
pub struct Pinned(Region);

impl Pinned {
    /// The region.
    pub fn region(&self) -> &Region {
        &self.0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.0.memory.occupants.unpin();
    }
}

/// Carries out the writes of peers in a region: what a NIC in software has of memory that was
/// registered with it. It counts the bytes that it places. One thread uses it, so that it places
/// nothing while it gives pages back.
#[must_use = "until this is dropped, nobody else gives pages of the region back"]
#[derive(Debug)]
pub struct Placer {
    region: Region,
    /// Those of the region.
    placed: Arc<[AtomicU32]>,
}

/// What is left to do about bytes that one [`Placer`] has placed: to store the last of them, and to
/// count them.
///
/// Where bytes end within a word, those before it are stored as whole words, and those in it wait
/// for the next ones, which mostly follow: else the word would have to be merged with what is there
/// (`contested`), and once more when these come.
#[must_use = "bytes are lost if this is dropped before it is finished"]
#[derive(Debug, Default)]
pub struct Unfinished {
    /// Where what was placed last ends.
    end: usize,
    /// The bytes before that, from the beginning of their word, that are not stored, and how many
    /// they are. The first is the lowest.
    tail: u64,
    tail_len: usize,
    /// The piece that is counted, and the bytes since the last count.
    piece: usize,
    bytes: u32,
}

impl Unfinished {
    /// Whether nothing is left to do.
    pub fn is_finished(&self) -> bool {
        self.tail_len == 0 && self.bytes == 0
    }
}

impl Placer {
    /// The region.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Copies `bytes`, at least one, to `at` bytes into the region, and counts them.
    ///
    /// # Panics
    ///
    /// If the range leaves the region. Callers have checked what peers sent; this is our bug.
    pub fn place(&self, at: usize, bytes: &[u8]) {
        let mut unfinished = Unfinished::default();
        self.place_on(&mut unfinished, at, bytes);
        self.finish(&mut unfinished);
    }

    /// Places as [`place`](Self::place) does, and leaves to [`finish`](Self::finish) what costs
    /// more than the copy if it is done for each packet of a train: merging a word with what is
    /// there, and counting, wait until what was stored before has left the processor's store
    /// buffer.
    ///
    /// # Panics
    ///
    /// As [`place`](Self::place).
    pub fn place_on(&self, unfinished: &mut Unfinished, at: usize, bytes: &[u8]) {
        let end = at + bytes.len();
        assert!(end <= self.region.len(), "{at}+{} of {}", bytes.len(), self.region.len());
        if unfinished.end != at {
            self.store_tail(unfinished);
        }
        if unfinished.piece != at / PIECE {
            self.count(unfinished);
            unfinished.piece = at / PIECE;
        }
        unfinished.bytes += u32::try_from(bytes.len()).expect("a packet's payload");
        unfinished.end = end;
        let rest =
            if unfinished.tail_len > 0 { self.complete_tail(unfinished, bytes) } else { bytes };
        // What begins inside the word in which it ends is stored at once.
        let tail_len = if end % WORD <= rest.len() { end % WORD } else { 0 };
        if !rest.is_empty() {
            let whole = &rest[..rest.len() - tail_len];
            self.region.copy_in(end - rest.len(), whole);
            unfinished.tail = last_of(rest, tail_len);
            unfinished.tail_len = tail_len;
        }
    }

    /// Finishes what was placed: the bytes are there, and counted, as if they had been placed one
    /// by one.
    pub fn finish(&self, unfinished: &mut Unfinished) {
        self.store_tail(unfinished);
        self.count(unfinished);
    }

    /// Appends bytes to the tail, and stores it if it is a whole word then. Returns the others.
    fn complete_tail<'a>(&self, unfinished: &mut Unfinished, bytes: &'a [u8]) -> &'a [u8] {
        let Unfinished { tail, tail_len, end, .. } = unfinished;
        let (more, rest) = bytes.split_at(bytes.len().min(WORD - *tail_len));
        *tail |= first_of(bytes) << (8 * *tail_len);
        *tail_len += more.len();
        if *tail_len == WORD {
            self.region.copy_in(*end - rest.len() - WORD, &tail.to_le_bytes());
            *tail_len = 0;
        }
        rest
    }

    /// Stores the tail into the word of which it is the beginning.
    fn store_tail(&self, unfinished: &mut Unfinished) {
        let len = std::mem::take(&mut unfinished.tail_len);
        if len > 0 {
            self.region.copy_in(unfinished.end - len, &unfinished.tail.to_le_bytes()[..len]);
        }
    }

    fn count(&self, unfinished: &mut Unfinished) {
        let bytes = std::mem::take(&mut unfinished.bytes);
        if bytes > 0 {
            self.placed[unfinished.piece].fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Gives `pages` back to the host if exactly `expected` bytes, modulo 2^32, were ever placed in
    /// the `element` that they are of, and nobody else can place any, or has ever pinned it.
    /// Returns whether it did; the pages are zero then.
    ///
    /// # Panics
    ///
    /// If a range leaves the region.
    pub(crate) fn relinquish(
        &self,
        pages: Range<usize>,
        element: Range<usize>,
        expected: u32,
    ) -> bool {
        let Memory { mapping, occupants, .. } = &*self.region.memory;
        // Who shares the memory writes to it without us.
        mapping.descriptor().is_none()
            && occupants.alone(|| {
                self.region.placed(element.start, element.len()) == expected
                    && mapping.discard(pages.start, pages.len()).is_ok_and(|gone| gone == pages)
            })
    }
}

impl Drop for Placer {
    fn drop(&mut self) {
        self.region.memory.occupants.dismiss();
    }
}

impl Region {
    /// Maps a region of `len` bytes, all zero.
    ///
    /// # Errors
    ///
    /// When the kernel has no memory to map.
    pub fn new(len: usize) -> io::Result<Self> {
        Ok(Self::of(Mapping::anonymous(len)?))
    }

    /// Maps a region of `len` bytes, all zero, that processes on this host can share: by its
    /// [`descriptor`](Self::descriptor) they map it as a region of theirs.
    ///
    /// # Errors
    ///
    /// When the kernel has no memory or no descriptor left.
    pub fn shared(len: usize) -> io::Result<Self> {
        Ok(Self::of(Mapping::shared(len)?))
    }

    /// Maps a region of at least `len` bytes, all zero.
    ///
    /// # Errors
    ///
    /// When the kernel has no memory or no descriptor left.
    pub fn backed_by(backing: Backing, len: usize) -> io::Result<Self> {
        match backing {
            Backing::Private => Self::new(len),
            Backing::Shared => Self::shared(len),
            Backing::Huge if len < HUGE_PAGE => Self::new(len),
            Backing::Huge => Mapping::huge(len).map(Self::of).or_else(|_| Self::new(len)),
        }
    }

    /// Maps all of a region that a peer on this host shares. The peer may do with it whatever it
    /// likes, but it cannot make it shorter.
    ///
    /// # Errors
    ///
    /// When the descriptor is not of a shared region, or of one of more than `len_max` bytes, or
    /// when the kernel refuses.
    pub fn of_peer(descriptor: BorrowedFd<'_>, len_max: usize) -> io::Result<Self> {
        Ok(Self::of(Mapping::of_peer(descriptor, len_max)?))
    }

    fn of(mapping: Mapping) -> Self {
        let (occupants, placed) = (Occupants::default(), OnceLock::new());
        Self { memory: Arc::new(Memory { mapping, occupants, placed }) }
    }

    /// The descriptor of a region that is shared. A process that has it can read and write all of
    /// the region, for as long as it likes.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.memory.mapping.descriptor()
    }

    /// Keeps the pages of the region where they are until the result is dropped. The caller is the
    /// thread that calls [`discard`](Self::discard), too, so that neither happens during the other.
    /// It may wait while another thread gives pages back by a [`Placer`].
    pub fn pin(&self) -> Pinned {
        self.memory.occupants.pin();
        Pinned(self.clone())
    }

    /// One more who places the bytes of peers in this region. It may wait as [`pin`](Self::pin).
    pub fn placer(&self) -> Placer {
        self.memory.occupants.admit();
        let pieces = self.len().div_ceil(PIECE);
        let none = || std::iter::repeat_with(AtomicU32::default).take(pieces).collect();
        let placed = Arc::clone(self.memory.placed.get_or_init(none));
        Placer { region: self.clone(), placed }
    }

    /// How many bytes placers have placed in `len` bytes from `at`, modulo 2^32, if these begin and
    /// end with pieces.
    pub(crate) fn placed(&self, at: usize, len: usize) -> u32 {
        let Some(placed) = self.memory.placed.get() else { return 0 };
        let pieces = &placed[at / PIECE..(at + len).div_ceil(PIECE)];
        let counts = pieces.iter().map(|placed| placed.load(Ordering::Relaxed));
        counts.fold(0, u32::wrapping_add)
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.memory.mapping.len()
    }

    /// The address of the first byte, as peers are told it.
    pub fn address(&self) -> u64 {
        self.memory.mapping.base().as_ptr() as u64
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

    /// Copies `len` bytes that start `from` bytes into `source` to `at` bytes into this region.
    /// Others may write in both ranges at the same time.
    ///
    /// # Panics
    ///
    /// If a range leaves its region, or if they overlap.
    pub fn copy_from(&self, at: usize, source: &Self, from: usize, len: usize) {
        self.contested(at, len).copy(&source.contested(from, len));
    }

    /// The aligned word `at` bytes into the region, for those who agree with the others on what it
    /// means.
    ///
    /// # Panics
    ///
    /// If `at` is not a multiple of the size of a word, or if the word leaves the region.
    pub fn word(&self, at: usize) -> &AtomicUsize {
        let word = self.pointer(at, size_of::<usize>()).cast::<usize>();
        assert!(word.is_aligned(), "words begin at multiples of their size");
        // SAFETY: `from_ptr` asks for
        // - an aligned address: the assertion;
        // - memory valid for reads and writes as long as the reference lives: `pointer` checked the
        //   range, MAPPED of `Mapping` covers it as long as `self` lives;
        // - no races with accesses that are not atomic, or of another size: no plain reference
        //   exists (ALIEN), and Rust code accesses the region by whole words, here and in
        //   `Contested`.
        unsafe { AtomicUsize::from_ptr(word.as_ptr()) }
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

    /// Zeroes the range, and gives whole pages of it back to the kernel unless the region is
    /// [pinned](Self::pin) or [shared](Self::shared). A NIC that has pinned the pages would go on
    /// writing to them, and the CPU would read others, for ever zero. Of shared memory, a peer
    /// could make us wait for ever ([`Mapping::discard`]): the pages stay until the region goes,
    /// and others use them before it gets new ones.
    ///
    /// # Panics
    ///
    /// If the range leaves the region.
    pub fn discard(&self, at: usize, len: usize) {
        if self.memory.occupants.is_pinned() {
            self.zero(at, len);
            return;
        }
        if self.descriptor().is_some() {
            self.zero_pages(at, len);
            return;
        }
        match self.memory.mapping.discard(at, len) {
            Ok(gone) if !gone.is_empty() => {
                self.zero(at, gone.start - at);
                self.zero(gone.end, at + len - gone.end);
            }
            Ok(_) | Err(_) => self.zero(at, len),
        }
    }

    /// Zeroes what is not zero in a range of shared memory. An access to a page that is not there
    /// would make one.
    fn zero_pages(&self, at: usize, len: usize) {
        let mut found = [0; LOOKED_AT];
        let end = at + len;
        for from in (at..end).step_by(LOOKED_AT) {
            let found = &mut found[..LOOKED_AT.min(end - from)];
            let is_known = self.memory.mapping.peek(from, found).is_ok();
            for (page, bytes) in found.chunks(PAGE).enumerate() {
                if !is_known || *bytes != [0; PAGE][..bytes.len()] {
                    self.zero(from + page * PAGE, bytes.len());
                }
            }
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
        unsafe { self.memory.mapping.base().add(at) }
    }
}

// SAFETY: `Exposed` asks for bytes that stay mapped, and that no reference names: MAPPED and ALIEN
// of `Mapping`, which lives as long as its last clone. Only what is pinned is exposed: other pages
// may be replaced while a NIC writes to them.
unsafe impl Exposed for Pinned {
    fn extent(&self) -> Extent {
        Extent { address: self.0.address(), len: self.0.len() }
    }
}

/// The first bytes, up to a word of them, the first as the lowest. A word that is there is loaded
/// whole: what was put together in memory could not be loaded before it is stored.
fn first_of(bytes: &[u8]) -> u64 {
    match bytes.first_chunk() {
        Some(word) => u64::from_le_bytes(*word),
        None => bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
    }
}

/// The last `count` bytes, fewer than a word has, the first of them as the lowest.
fn last_of(bytes: &[u8], count: usize) -> u64 {
    match bytes.last_chunk() {
        Some(word) if count > 0 => u64::from_le_bytes(*word) >> (8 * (WORD - count)),
        Some(_) | None => first_of(&bytes[bytes.len() - count..]),
    }
}

const WORD: usize = size_of::<u64>();
/// The smallest RMB elements have as many bytes: what is placed in an element is the sum over its
/// pieces.
const PIECE: usize = 16_384;
/// The kernel gives memory in units of this size.
const PAGE: usize = 4_096;
/// Bytes of shared memory that are looked at by one system call.
const LOOKED_AT: usize = 8 * PAGE;

#[cfg(test)]
mod tests;
