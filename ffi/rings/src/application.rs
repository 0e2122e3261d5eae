//! The application's half: used by the preload library, in any thread, in signal handlers, and in
//! several processes at once. Without a heap.
//!
//! Whoever reads copies first and then publishes how far he has come, by a compare-exchange: if
//! somebody else was faster, he begins again. That needs no lock. Whoever writes has one.

use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use std::sync::atomic::{AtomicU32, fence};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use rustix::net::{SendFlags, send};

use crate::layout::{HEADER_LEN, RING_LEN, RING_LEN_MAX, Ring, Segment, Word, read_preamble};
use crate::shortcut::{Item, Shortcut};

mod reading;
mod turning;
mod writing;

/// The rings of one connection, mapped in this process.
///
/// It is an address only, and can be copied; nothing is done when it is dropped.
///
/// Each call that gets a socket may send a byte by it or take one from it. It must be that of the
/// connection: numbers are closed and used again behind the library's back, so look at
/// [`is_closed`](Self::is_closed) before.
#[derive(Clone, Copy, Debug)]
pub struct Application {
    segment: Segment,
    /// Where bytes go without the gateway, if this process has mapped that.
    shortcut: Option<Shortcut>,
}

// SAFETY: the value is an address and two lengths; the mapping belongs to the process, and all
// accesses to its words are atomic.
unsafe impl Send for Application {}
// SAFETY: as above.
unsafe impl Sync for Application {}

impl Application {
    /// Maps what came with a `Switch`.
    ///
    /// # Errors
    ///
    /// If it is no memory of this kind, or the kernel refuses. Nothing is mapped then.
    pub fn map(memfd: BorrowedFd<'_>) -> rustix::io::Result<Self> {
        // Of memory that can shrink, an access may end the process.
        if !fcntl_get_seals(memfd)?.contains(SealFlags::SHRINK) {
            return Err(Errno::INVAL);
        }
        let size = usize::try_from(fstat(memfd)?.st_size).map_err(|_| Errno::INVAL)?;
        if !(HEADER_LEN..=HEADER_LEN + 2 * RING_LEN_MAX as usize).contains(&size) {
            return Err(Errno::INVAL);
        }
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: `mmap` asks that the address range be ours to replace: a null hint with no
        // MAP_FIXED lets the kernel choose an unused one.
        let base = unsafe { mmap(ptr::null_mut(), size, protection, flags, memfd, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(Errno::INVAL)?;
        // SAFETY: it asks for a page at `base`, which was just mapped.
        let lengths = unsafe { read_preamble(base) };
        match lengths {
            Some((send, receive)) if Segment::len_with(send, receive) == Some(size) => {
                // SAFETY: `new` asks for MAPPED: it was just mapped, with as many bytes; for ALIEN:
                // nobody has a reference to it; and for lengths that `len_with` has checked.
                let segment = unsafe { Segment::new(base, send, receive) };
                Ok(Self { segment, shortcut: None })
            }
            Some(_) | None => {
                // SAFETY: `munmap` asks for a range that is ours and no longer used.
                unsafe { munmap(base.as_ptr().cast(), size) }?;
                Err(Errno::INVAL)
            }
        }
    }

    /// Whether this process has room for one more mapping. It may be used up meanwhile.
    pub fn fits() -> bool {
        let size = HEADER_LEN + 2 * RING_LEN as usize;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: `mmap_anonymous` asks that the address range be ours to replace: a null hint with
        // no MAP_FIXED lets the kernel choose an unused one.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), size, protection, flags) };
        // SAFETY: `munmap` asks for a range that is ours, and that nobody uses.
        base.is_ok_and(|base| unsafe { munmap(base, size) }.is_ok())
    }

    /// Where it is mapped, and how long its rings are: [`at`](Self::at) makes the same value of
    /// these. The address is never zero.
    pub fn place(&self) -> (usize, u64) {
        (self.segment.base().as_ptr() as usize, self.segment.lengths())
    }

    /// The value whose [`place`](Self::place) this is. Lengths are not read from the memory again:
    /// another process of the program may have changed them there.
    ///
    /// # Safety
    ///
    /// It was mapped by [`map`](Self::map), in this process or one that has forked it, and is not
    /// unmapped as long as the result is used.
    pub unsafe fn at((address, lengths): (usize, u64)) -> Option<Self> {
        let base = NonNull::new(address as *mut u8)?;
        let [send, receive] = [lengths >> 32, lengths & u64::from(u32::MAX)]
            .map(|length| u32::try_from(length).unwrap_or(0));
        Segment::len_with(send, receive)?;
        // SAFETY: `new` asks for MAPPED and ALIEN, which the caller promises, and for lengths that
        // `len_with` has checked.
        let segment = unsafe { Segment::new(base, send, receive) };
        Some(Self { segment, shortcut: None })
    }

    /// Unmaps it, but no shortcut.
    ///
    /// # Safety
    ///
    /// Nobody uses it in this process, now or later.
    pub unsafe fn unmap(self) {
        let base = self.segment.base().as_ptr().cast();
        // SAFETY: `munmap` asks for a range that is ours and no longer used: the caller promises.
        // What was mapped can be unmapped. If not, it stays.
        let _ = unsafe { munmap(base, self.segment.len()) };
    }

    /// How many bytes can be read now. FIONREAD says this.
    pub fn readable(&self) -> u32 {
        let tail = self.word(Word::ReceiveTail).load(SeqCst);
        let relayed = self.filled(Ring::Receive, self.word(Word::ReceiveHead).load(SeqCst), tail);
        match self.shortcut.filter(|it| it.begins_behind(tail.wrapping_add(relayed))) {
            Some(shortcut) => relayed + shortcut.unread(self.word(Word::ShortTail).load(SeqCst)),
            None => relayed,
        }
    }

    /// How many bytes the gateway has not taken yet. SIOCOUTQ says this. What is in a shortcut is
    /// with the other program already.
    pub fn unsent(&self) -> u32 {
        let head = self.word(Word::SendHead).load(SeqCst);
        self.filled(Ring::Send, head, self.word(Word::SendTail).load(SeqCst))
    }

    /// How many bytes can be written now.
    pub fn room(&self) -> u32 {
        match self.short_unsent() {
            Some(unsent) => RING_LEN - unsent,
            None => self.segment.len_of(Ring::Send) - self.unsent(),
        }
    }

    /// Whether the connection is over for the gateway. Then the number of the socket may be
    /// something else by now, and the kernel must be asked. Bytes that came before can be read.
    pub fn is_closed(&self) -> bool {
        self.word(Word::Closed).load(Acquire) != 0
    }

    /// Whether the program has shut down writing: a write fails with EPIPE.
    pub fn is_finished(&self) -> bool {
        self.word(Word::Finished).load(Acquire) != 0
    }

    /// Waits for bytes without sleeping: looks, and between two looks calls `offer`, which may give
    /// the core to others, until that returns false. Returns whether there are some, or something
    /// else has happened that the caller must look at.
    pub fn spin(&self, mut offer: impl FnMut() -> bool) -> bool {
        self.watch();
        let mut found = self.has_news();
        while !found && offer() {
            found = self.has_news();
        }
        self.cease_to_watch();
        found || self.has_news()
    }

    /// Whether there are bytes, or something else that the caller must look at.
    pub fn has_news(&self) -> bool {
        self.readable() > 0 || self.has_end() || self.lacks_shortcut()
    }

    /// Whether the gateway sends no more. The socket says so, too.
    pub fn has_end(&self) -> bool {
        let is = |word| self.word(word).load(SeqCst) != 0;
        is(Word::Ended) || is(Word::Closed)
    }

    /// How many bytes have come so far, modulo 2³².
    pub fn arrived(&self) -> u32 {
        let short = self.shortcut.map_or(0, |shortcut| shortcut.other(Item::Head).load(SeqCst));
        self.word(Word::ReceiveHead).load(SeqCst).wrapping_add(short)
    }

    /// From now on somebody looks at the ring again and again, and the socket need say nothing.
    pub fn watch(&self) {
        self.word(Word::Spinning).fetch_add(1, SeqCst);
        self.publish(Word::Spinning, Item::Watched);
        fence(SeqCst);
    }

    /// Whether anybody watches, as far as the gateway knows.
    pub fn is_watched(&self) -> bool {
        self.word(Word::Spinning).load(SeqCst) != 0
    }

    /// He looks no more. What has come before must be looked for once more.
    pub fn cease_to_watch(&self) {
        // The gateway may have set it to zero, because it has missed whoever watches.
        let less = |watchers: u32| Some(watchers.saturating_sub(1));
        // The closure always returns something, so this cannot fail.
        self.word(Word::Spinning).fetch_update(SeqCst, SeqCst, less).ok();
        self.publish(Word::Spinning, Item::Watched);
        fence(SeqCst);
    }

    /// Wakes the gateway, unless it looks at the rings anyway.
    fn kick_if_asleep(&self, socket: BorrowedFd<'_>) {
        let asleep = self.word(Word::Asleep);
        let sleep = asleep.load(SeqCst);
        if sleep == 0 || self.is_closed() {
            return;
        }
        if send(socket, &[0], QUIET).is_ok() {
            // Nobody else need kick, as long as it is this sleep: each has another number.
            let _ = asleep.compare_exchange(sleep, 0, SeqCst, SeqCst);
        }
    }

    pub(crate) fn word(&self, word: Word) -> &AtomicU32 {
        self.segment.word(word)
    }

    /// How many bytes are in a ring. If another process has scribbled, no more than fit.
    fn filled(&self, ring: Ring, head: u32, tail: u32) -> u32 {
        head.wrapping_sub(tail).min(self.segment.len_of(ring))
    }
}

/// What does not wait, and raises no signal.
const QUIET: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);
