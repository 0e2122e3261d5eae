//! Memory by which the programs at both ends of a connection pass its bytes without the gateway.
//!
//! Where both ends are programs of one gateway, all that it would do is copy from the rings of one
//! to those of the other. So it makes a shortcut: a ring each way, which both programs map, and
//! nobody else. The gateway only wakes whoever sleeps, and sees how each end ends.
//!
//! It offers the shortcut in the memory that it shares with each program (`offered`). A program
//! that has used its connection for a while asks for it, maps it, and says so there (`joined`: all
//! processes that have the connection must map it now) and in the shortcut (`ready`). As soon as
//! the other one is ready, a program may turn: behind all that it has written to the gateway, its
//! bytes go by the shortcut (`turned`). In the shortcut it says where it has turned (`start`,
//! `open`), and the other one, when it has read from the gateway up to there, goes on here. So each
//! direction turns by itself, at any time, and no byte passes another.
//!
//! Each of the two sides has these words in the shortcut:
//!
//! | word | meaning |
//! |---|---|
//! | `head` | how many bytes it has put in |
//! | `tail` | how many bytes of the other one it has taken |
//! | `watched`, `token` | it needs no token: copies of `spinning` and `token` in its own memory |
//! | `blocked` | its ring was full, and it waits for room |
//! | `ready` | it has mapped the shortcut, and reads from it |
//! | `open`, `start` | it writes here, what comes behind so many bytes of those by the gateway |
//!
//! The other program can write there whatever it likes, so nothing there is believed: each one's
//! own indexes are in the memory that it shares with the gateway only (`short_head`, `short_tail`),
//! and what it finds here is cut to what fits the ring. What a hostile program at the other end can
//! do that a TCP peer cannot: it can change or take back bytes that were looked at (MSG_PEEK) or
//! promised (`poll`) and not read yet. So by default a shortcut is offered to programs of one user
//! only.

use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::layout::{HEADER_LEN, RING_LEN, Run, Word, runs_of};

/// A shortcut that is mapped, as one of its two sides.
///
/// # Invariants
///
/// - **MAPPED** `base` begins a page, and `LEN` bytes behind it stay valid for reads and writes
///   as long as anybody uses this value or a copy of it.
/// - **ALIEN** Nobody has a reference to any of the bytes, but to atomic words of the header.
#[derive(Clone, Copy, Debug)]
pub struct Shortcut {
    base: NonNull<u8>,
    side: Side,
}

/// One of the two programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    First,
    Second,
}

/// A word of a side, by its place. What changes with each message, what the other side looks at
/// while it waits, and what hardly ever changes, are on different cache lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    Head = 0,
    Tail = 16,
    Watched = 17,
    Token = 18,
    Ready = 32,
    Open = 33,
    Start = 34,
    Blocked = 35,
}

// SAFETY: the value is an address; the mapping belongs to the process, and all accesses to its
// words are atomic.
unsafe impl Send for Shortcut {}
// SAFETY: as above.
unsafe impl Sync for Shortcut {}

impl Side {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }

    /// How a gateway names it to its program. Zero is none.
    pub(crate) fn number(self) -> u32 {
        self as u32 + 1
    }

    fn numbered(number: u32) -> Option<Self> {
        [Self::First, Self::Second].into_iter().find(|side| side.number() == number)
    }
}

impl Shortcut {
    /// Maps what a gateway has offered, as the side with this number.
    ///
    /// # Errors
    ///
    /// If it is no shortcut, or the kernel refuses. Nothing is mapped then.
    pub fn map(memfd: BorrowedFd<'_>, number: u32) -> rustix::io::Result<Self> {
        let side = Side::numbered(number).ok_or(Errno::INVAL)?;
        // Of memory that can shrink, an access may end the process.
        if !fcntl_get_seals(memfd)?.contains(SealFlags::SHRINK)
            || usize::try_from(fstat(memfd)?.st_size) != Ok(LEN)
        {
            return Err(Errno::INVAL);
        }
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: `mmap` asks that the address range be ours to replace: a null hint with no
        // MAP_FIXED lets the kernel choose an unused one.
        let base = unsafe { mmap(ptr::null_mut(), LEN, protection, flags, memfd, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(Errno::INVAL)?;
        // SAFETY: `new` asks for MAPPED: it was just mapped, with as many bytes; and for ALIEN:
        // nobody has a reference to it.
        Ok(unsafe { Self::new(base, side) })
    }

    /// The memory at `base`, as one of its sides.
    ///
    /// # Safety
    ///
    /// The caller grants MAPPED and ALIEN.
    pub(crate) unsafe fn new(base: NonNull<u8>, side: Side) -> Self {
        Self { base, side }
    }

    /// Where it is mapped, and which side it is, in one number that is not zero: [`at`](Self::at)
    /// makes the same value of it.
    pub fn place(&self) -> usize {
        // It begins a page, so the lowest bits are free.
        self.base.as_ptr() as usize | self.side as usize
    }

    /// The value whose [`place`](Self::place) this is; none of zero.
    ///
    /// # Safety
    ///
    /// It was mapped by [`map`](Self::map), in this process or one that has forked it, and is not
    /// unmapped as long as the result is used.
    pub unsafe fn at(place: usize) -> Option<Self> {
        let side = if place & 1 == 0 { Side::First } else { Side::Second };
        let base = NonNull::new((place & !1) as *mut u8)?;
        // SAFETY: `new` asks for MAPPED and ALIEN, which the caller promises.
        Some(unsafe { Self::new(base, side) })
    }

    /// Unmaps it.
    ///
    /// # Safety
    ///
    /// Nobody uses it in this process, now or later.
    pub unsafe fn unmap(self) {
        // SAFETY: `munmap` asks for a range that is ours and no longer used: the caller promises.
        // What was mapped can be unmapped. If not, it stays.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), LEN) };
    }

    /// A word of this side.
    pub(crate) fn own(&self, item: Item) -> &AtomicU32 {
        self.word(self.side, item)
    }

    /// A word of the other side.
    pub(crate) fn other(&self, item: Item) -> &AtomicU32 {
        self.word(self.side.other(), item)
    }

    /// The room that the other side has left of our ring, when `head` bytes were put in.
    pub(crate) fn room(&self, head: u32) -> u32 {
        RING_LEN - self.unread_by_other(head)
    }

    /// How many of `head` bytes the other side has not taken.
    pub(crate) fn unread_by_other(&self, head: u32) -> u32 {
        filled(head, self.other(Item::Tail).load(SeqCst))
    }

    /// How many bytes have come that we have not taken, if we have taken `tail`.
    pub(crate) fn unread(&self, tail: u32) -> u32 {
        filled(self.other(Item::Head).load(SeqCst), tail)
    }

    /// Whether the other side writes here, and so many bytes by the gateway are all that come
    /// before.
    pub(crate) fn begins_behind(&self, relayed: u32) -> bool {
        self.other(Item::Open).load(SeqCst) != 0 && self.other(Item::Start).load(SeqCst) == relayed
    }

    /// Whether the other side need not be told that something has come: somebody looks, or a token
    /// is on the way.
    pub(crate) fn is_other_attentive(&self) -> bool {
        let is = |item| self.other(item).load(SeqCst) != 0;
        is(Item::Watched) || is(Item::Token)
    }

    /// Bytes of our ring, from `index` on.
    pub(crate) fn runs_out(&self, index: u32, count: u32) -> [Run; 2] {
        runs_of((self.ring(self.side), RING_LEN), index, count)
    }

    /// Bytes of the other side's ring, from `index` on.
    pub(crate) fn runs_in(&self, index: u32, count: u32) -> [Run; 2] {
        runs_of((self.ring(self.side.other()), RING_LEN), index, count)
    }

    fn ring(&self, side: Side) -> *mut u8 {
        self.base.as_ptr().wrapping_add(HEADER_LEN + side as usize * RING_LEN as usize)
    }

    /// Tells the other side what a word of ours is. Several threads, and the gateway, may do so at
    /// once, and the last value remains if nobody gives up: at most so many values are told.
    /// Returns whether it was something else before.
    pub(crate) fn publish(&self, word: &AtomicU32, item: Item, most: u32) -> bool {
        let (copy, mut has_changed) = (self.own(item), false);
        for _ in 0..most {
            let value = word.load(SeqCst);
            has_changed |= copy.swap(value, SeqCst) != value;
            if word.load(SeqCst) == value {
                break;
            }
        }
        has_changed
    }

    fn word(&self, side: Side, item: Item) -> &AtomicU32 {
        let offset = side as usize * SIDE_LEN + item as usize * size_of::<u32>();
        let address = self.base.as_ptr().wrapping_add(offset).cast::<u32>();
        // SAFETY: `from_ptr` asks for
        // - an aligned address: `base` begins a page, and the offset is a multiple of a word;
        // - memory that is valid while the reference lives: MAPPED, and it is within the header;
        // - no access that is not atomic: ALIEN. Another process is no code of this program.
        unsafe { AtomicU32::from_ptr(address) }
    }
}

/// How many bytes are in a ring. If the other side has scribbled, no more than fit.
fn filled(head: u32, tail: u32) -> u32 {
    head.wrapping_sub(tail).min(RING_LEN)
}

/// What the other program knows of one, and of which word of its own that is a copy.
pub(crate) const COPIES: [(Word, Item); 3] =
    [(Word::ShortTail, Item::Tail), (Word::Spinning, Item::Watched), (Word::Token, Item::Token)];
/// The length of all.
pub(crate) const LEN: usize = HEADER_LEN + 2 * RING_LEN as usize;
/// What each side has of the header.
const SIDE_LEN: usize = 256;

const _: () = assert!(2 * SIDE_LEN <= HEADER_LEN);
