//! Where everything is in the shared memory.
//!
//! ```text
//!   0       4         8             12            16    64      4096        4096 + send length
//!   | magic | version | send length | receive len | ... | words | send ring | receive ring |
//! ```

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// The length of each ring that a gateway makes, in bytes.
pub const RING_LEN: u32 = 1 << 17;

/// The first bytes of the memory.
pub(crate) const MAGIC: u32 = u32::from_ne_bytes(*b"SMCr");
/// The version of this layout, and of what the words mean.
pub(crate) const VERSION: u32 = 1;
/// The bytes before the rings.
pub(crate) const HEADER_LEN: usize = 4096;
/// The buffer of an application's socket. A kick takes 768 bytes of it, and at more than a quarter
/// the socket is unwritable.
pub(crate) const SOCKET_BUFFER: usize = 32_768;
/// How much filler makes a socket unwritable.
pub(crate) const FILLER_LEN: usize = SOCKET_BUFFER / 4;
/// No ring is longer: differences of indexes must tell full from broken.
pub(crate) const RING_LEN_MAX: u32 = 1 << 24;
/// The least room that a word has, so that no two share a cache line.
const LINE: usize = 64;

/// A word of the header. The table of the crate says what they mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    SendHead = 1,
    SendTail,
    ReceiveHead,
    ReceiveTail,
    Token,
    WantsToken,
    Asleep,
    Blocked,
    Spinning,
    Finished,
    Ended,
    Closed,
    Writing,
    Offered,
    Joined,
    Turned,
    ShortHead,
    ShortRounds,
    ShortTail,
    Abandoned,
    UsesLeft,
    User,
}

/// Bytes of a ring that lie behind one another, by address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// The first byte. It must not be used if there are none.
    pub(crate) base: NonNull<u8>,
    /// How many there are.
    pub(crate) len: usize,
}

/// One of the two rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ring {
    /// From the application to the gateway.
    Send,
    /// From the gateway to the application.
    Receive,
}

/// Shared memory that is mapped.
///
/// # Invariants
///
/// - **MAPPED** `base` begins a page, and [`len`](Self::len) bytes behind it stay valid for reads
///   and writes as long as anybody uses this value or a copy of it.
/// - **ALIEN** Nobody has a reference to any of the bytes, but to atomic words of the header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    base: NonNull<u8>,
    send_len: u32,
    receive_len: u32,
}

impl Segment {
    /// The memory at `base`, with rings of these lengths.
    ///
    /// # Safety
    ///
    /// The caller grants MAPPED and ALIEN. Lengths are powers of two, at most [`RING_LEN_MAX`].
    pub(crate) unsafe fn new(base: NonNull<u8>, send_len: u32, receive_len: u32) -> Self {
        Self { base, send_len, receive_len }
    }

    /// The length of all, for rings of these lengths; none if there are no such rings.
    pub(crate) fn len_with(send_len: u32, receive_len: u32) -> Option<usize> {
        let is_good = |len: u32| len.is_power_of_two() && len <= RING_LEN_MAX;
        (is_good(send_len) && is_good(receive_len))
            .then_some(HEADER_LEN + send_len as usize + receive_len as usize)
    }

    /// The length of all.
    pub(crate) fn len(&self) -> usize {
        HEADER_LEN + self.send_len as usize + self.receive_len as usize
    }

    /// The lengths of both rings in one number.
    pub(crate) fn lengths(&self) -> u64 {
        u64::from(self.send_len) << 32 | u64::from(self.receive_len)
    }

    /// The first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// How long a ring is.
    pub(crate) fn len_of(&self, ring: Ring) -> u32 {
        match ring {
            Ring::Send => self.send_len,
            Ring::Receive => self.receive_len,
        }
    }

    /// Where a ring begins.
    pub(crate) fn start_of(&self, ring: Ring) -> usize {
        match ring {
            Ring::Send => HEADER_LEN,
            Ring::Receive => HEADER_LEN + self.send_len as usize,
        }
    }

    /// A word of the header.
    pub(crate) fn word(&self, word: Word) -> &AtomicU32 {
        self.at(word as usize * LINE)
    }

    /// Writes what an application finds first.
    #[cfg(feature = "gateway")]
    pub(crate) fn write_preamble(&self) {
        let preamble = [MAGIC, VERSION, self.send_len, self.receive_len];
        for (place, value) in preamble.into_iter().enumerate() {
            self.at(place * size_of::<u32>()).store(value, Ordering::Relaxed);
        }
    }

    fn at(&self, offset: usize) -> &AtomicU32 {
        assert!(offset < HEADER_LEN && offset.is_multiple_of(size_of::<u32>()));
        let address = self.base.as_ptr().wrapping_add(offset).cast::<u32>();
        // SAFETY: `from_ptr` asks for
        // - an aligned address: `base` begins a page, and `offset` is a multiple of a word;
        // - memory that is valid while the reference lives: MAPPED, and it is within the header;
        // - no access that is not atomic: ALIEN. Another process is no code of this program.
        unsafe { AtomicU32::from_ptr(address) }
    }

    /// The `count` bytes of a ring that begin at `index`: up to its end, and from its start.
    ///
    /// # Panics
    ///
    /// If that is more than the ring has.
    pub(crate) fn runs(&self, ring: Ring, index: u32, count: u32) -> [Run; 2] {
        let start = self.base.as_ptr().wrapping_add(self.start_of(ring));
        runs_of((start, self.len_of(ring)), index, count)
    }
}

/// The `count` bytes that begin at `index`, of a ring that begins at an address and has a length, a
/// power of two: up to its end, and from its start.
///
/// # Panics
///
/// If that is more than the ring has.
pub(crate) fn runs_of((start, len): (*mut u8, u32), index: u32, count: u32) -> [Run; 2] {
    assert!(count <= len);
    let from = index & (len - 1);
    let first = count.min(len - from);
    let piece = |at: u32, len: u32| {
        // Within a mapping no address is zero.
        let base = NonNull::new(start.wrapping_add(at as usize)).unwrap_or(NonNull::dangling());
        Run { base, len: len as usize }
    };
    [piece(from, first), piece(0, count - first)]
}

/// What an application finds at the start of a memory: the lengths of its rings. None if it is not
/// one that we understand.
///
/// # Safety
///
/// A page is mapped at `base`, and stays so during the call.
pub(crate) unsafe fn read_preamble(base: NonNull<u8>) -> Option<(u32, u32)> {
    let [magic, version, send_len, receive_len] = [0, 1, 2, 3].map(|place: usize| {
        let address = base.as_ptr().cast::<u32>().wrapping_add(place);
        // SAFETY: `from_ptr` asks for what the caller promises of the page, and a page is aligned.
        unsafe { AtomicU32::from_ptr(address) }.load(Ordering::Relaxed)
    });
    (magic == MAGIC && version == VERSION).then_some((send_len, receive_len))
}

const _: () = assert!((Word::User as usize + 1) * LINE <= HEADER_LEN);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_wraps_at_the_end_of_its_ring() {
        let mut pages = vec![0_u8; HEADER_LEN + 24];
        let base = NonNull::new(pages.as_mut_ptr()).unwrap();
        // SAFETY: no byte of it is accessed; lengths are powers of two.
        let segment = unsafe { Segment::new(base, 16, 8) };
        let start = base.as_ptr() as usize;
        let place = |run: Run| (run.base.as_ptr() as usize - start, run.len);
        let runs = |ring, index, count| segment.runs(ring, index, count).map(place);
        assert_eq!(runs(Ring::Send, 0, 16), [(4096, 16), (4096, 0)]);
        assert_eq!(runs(Ring::Send, 30, 5), [(4110, 2), (4096, 3)]);
        assert_eq!(runs(Ring::Receive, u32::MAX, 8), [(4119, 1), (4112, 7)]);
        assert_eq!(segment.len(), 4096 + 24);
    }

    #[test]
    fn only_powers_of_two_are_rings() {
        assert_eq!(Segment::len_with(RING_LEN, 4096), Some(4096 + 131_072 + 4096));
        for (send, receive) in [(0, 4096), (4096, 0), (3, 4), (RING_LEN_MAX * 2, 1)] {
            assert_eq!(Segment::len_with(send, receive), None);
        }
    }
}
