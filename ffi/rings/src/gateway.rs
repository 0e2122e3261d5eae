//! The gateway's half: one poller at a time uses it. What the application does to the memory at the
//! same time makes it see other bytes, or [`Broken`], and nothing worse.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};

use rustix::io::Errno;
use rustix::net::sockopt;
use smcr_os::Mapping;

use crate::layout::{RING_LEN, Ring, SOCKET_BUFFER, Segment, Word};
use crate::span::Span;

/// The rings of one connection.
///
/// Its own state is in atomics only so that it can be shared between the stream and a list of those
/// that are looked at; one thread at a time uses them.
#[derive(Debug)]
pub struct Gateway {
    segment: Segment,
    /// Keeps the memory.
    mapping: Mapping,
    /// How many bytes we have taken from the send ring.
    tail: AtomicU32,
    /// How many of its bytes we know of.
    seen: AtomicU32,
    /// How many bytes we have put into the receive ring.
    head: AtomicU32,
    /// How many of them the application has taken, as far as we know.
    freed: AtomicU32,
    /// Whether the receive ring was full, and we wait for room.
    waits: AtomicBool,
    /// Whether we know that the application sends no more.
    knows_end: AtomicBool,
    /// Whether the socket has reported its end, or an error.
    ending: AtomicBool,
    /// Whether we look at the rings by ourselves.
    awake: AtomicBool,
    /// How often we were asleep.
    sleeps: AtomicU32,
    /// How often something has come by the socket and was left there: more than half of the send
    /// ring was full, so the socket may stay unwritable.
    left: AtomicU32,
    /// Whether bytes of a stream have come by the socket, from a process without rings.
    has_strayed: AtomicBool,
    /// What the poller calls the stream.
    key: AtomicU64,
    is_closed: AtomicBool,
    /// Whether whoever watches the ring, or has taken the token, is missed.
    misses: AtomicBool,
    /// The poller that watches the socket; zero is none.
    poller: AtomicU32,
    /// How its program and that of another connection pass bytes without us, if they may.
    passage: OnceLock<Passage>,
}

// SAFETY: the segment is an address of the mapping, which belongs to the process and not to a
// thread; all accesses to its words are atomic.
unsafe impl Send for Gateway {}
// SAFETY: as above, and all other state is atomic.
unsafe impl Sync for Gateway {}

/// The application has written what no application would: its stream is beyond help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// What is new of the rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct News {
    /// There are more bytes than before, or the end.
    pub readable: bool,
    /// There is room that was waited for.
    pub writable: bool,
    /// The application wants a token, or something else that [`serve`](Gateway::serve) does.
    pub wants_token: bool,
}

impl Gateway {
    /// Makes the rings of a connection. The gateway is asleep at first.
    ///
    /// # Errors
    ///
    /// If the process is out of descriptors or memory.
    ///
    /// # Panics
    ///
    /// Never: the lengths are ours.
    pub fn create() -> io::Result<Self> {
        let len = Segment::len_with(RING_LEN, RING_LEN).expect("it is a power of two");
        let mapping = Mapping::shared(len)?;
        // SAFETY: `new` asks for MAPPED: the mapping has that length and lives as long as this
        // value; for ALIEN, as the mapping does; and for lengths that `len_with` has checked.
        let segment = unsafe { Segment::new(mapping.base(), RING_LEN, RING_LEN) };
        segment.write_preamble();
        segment.word(Word::Asleep).store(1, SeqCst);
        let zero = || AtomicU32::new(0);
        Ok(Self {
            segment,
            mapping,
            tail: zero(),
            seen: zero(),
            head: zero(),
            freed: zero(),
            waits: AtomicBool::new(false),
            knows_end: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            awake: AtomicBool::new(false),
            sleeps: AtomicU32::new(1),
            left: zero(),
            has_strayed: AtomicBool::new(false),
            key: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            misses: AtomicBool::new(false),
            poller: zero(),
            passage: OnceLock::new(),
        })
    }

    /// What the application maps.
    ///
    /// # Panics
    ///
    /// Never: it was made to be shared.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.mapping.descriptor().expect("it was made to be shared")
    }

    /// Prepares the application's socket: its buffer has room for kicks, and little filler makes it
    /// unwritable.
    ///
    /// # Errors
    ///
    /// If it is no socket.
    pub fn prepare(app: BorrowedFd<'_>) -> io::Result<()> {
        Ok(sockopt::set_socket_send_buffer_size(app, SOCKET_BUFFER / 2)?)
    }

    /// A poller with this number watches the socket from now on, and calls the stream `key`.
    pub fn set_key(&self, poller: u32, key: u64) {
        self.poller.store(poller, Relaxed);
        self.key.store(key, Relaxed);
        // Whoever watches it from now on has seen nothing.
        self.seen.store(self.tail.load(Relaxed), Relaxed);
        self.knows_end.store(false, Relaxed);
    }

    /// The poller watches it no longer.
    pub fn forget_key(&self) {
        self.poller.store(0, Relaxed);
    }

    /// Whether the poller with this number watches the socket.
    pub fn is_watched_by(&self, poller: u32) -> bool {
        self.poller.load(Relaxed) == poller
    }

    /// What the poller calls the stream.
    pub fn key(&self) -> u64 {
        self.key.load(Relaxed)
    }

    /// How many bytes can be read.
    ///
    /// # Errors
    ///
    /// If the application has broken its index.
    pub fn readable(&self) -> Result<u32, Broken> {
        let head = self.word(Word::SendHead).load(Acquire);
        let tail = self.tail.load(Relaxed);
        let (filled, known) = (head.wrapping_sub(tail), self.seen.load(Relaxed).wrapping_sub(tail));
        let is_broken = filled > self.segment.len_of(Ring::Send) || filled < known;
        if is_broken || self.has_strayed.load(Relaxed) {
            return Err(Broken);
        }
        self.seen.store(head, Relaxed);
        Ok(filled)
    }

    /// How many bytes the application has not taken yet.
    ///
    /// # Errors
    ///
    /// If the application has broken its index.
    pub fn unread(&self) -> Result<u32, Broken> {
        let tail = self.word(Word::ReceiveTail).load(Acquire);
        let head = self.head.load(Relaxed);
        let filled = head.wrapping_sub(tail);
        if filled > head.wrapping_sub(self.freed.load(Relaxed)) {
            return Err(Broken);
        }
        self.freed.store(tail, Relaxed);
        Ok(filled)
    }

    /// Reads at most `most` bytes: `copy` gets them, and says how many it has taken. Zero is the
    /// end of the stream, if `most` is not.
    ///
    /// Where [`is_ending`](Self::is_ending), somebody must look at the rings by himself before. And
    /// if [`must_drain`](Self::must_drain) afterwards, do that.
    ///
    /// # Errors
    ///
    /// `WouldBlock`; `ConnectionReset` if the application is gone and has left bytes unread;
    /// `InvalidData` if it has broken its index; or that of `copy`.
    pub fn read(
        &self,
        socket: BorrowedFd<'_>,
        most: usize,
        copy: impl FnOnce(&Span<'_>) -> usize,
    ) -> io::Result<usize> {
        let mut filled = self.readable()?;
        if filled == 0 {
            let is_over = self.is_finished() || self.has_ended(socket);
            // Bytes may have come before the end.
            filled = self.readable()?;
            if filled == 0 {
                return if is_over { self.end(socket) } else { Err(Errno::AGAIN.into()) };
            }
        }
        let count = u32::try_from(most).map_or(filled, |most| most.min(filled));
        let tail = self.tail.load(Relaxed);
        let taken = copy(&self.span(Ring::Send, tail, count));
        let taken = u32::try_from(taken).unwrap_or(count).min(count);
        let tail = tail.wrapping_add(taken);
        self.tail.store(tail, Relaxed);
        self.word(Word::SendTail).store(tail, SeqCst);
        Ok(taken as usize)
    }

    /// The application sends no more: that is the end of its stream, unless it has gone away with
    /// bytes unread.
    fn end(&self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        self.knows_end.store(true, Relaxed);
        if self.has_dropped_bytes(socket) { Err(Errno::CONNRESET.into()) } else { Ok(0) }
    }

    /// Writes: `copy` gets the room, and says how much of it it has filled.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if there is no room; `InvalidData` if the application has broken its index; or
    /// what became of the socket.
    pub fn write(
        &self,
        socket: BorrowedFd<'_>,
        copy: impl FnOnce(&Span<'_>) -> usize,
    ) -> io::Result<usize> {
        let mut room = self.room()?;
        if room == 0 {
            self.wait_for_room();
            room = self.room()?;
            if room == 0 {
                return Err(Errno::AGAIN.into());
            }
        }
        let head = self.head.load(Relaxed);
        let put = copy(&self.span(Ring::Receive, head, room));
        let put = u32::try_from(put).unwrap_or(room).min(room);
        let head = head.wrapping_add(put);
        self.head.store(head, Relaxed);
        self.word(Word::ReceiveHead).store(head, SeqCst);
        if put == room {
            self.wait_for_room();
        } else {
            fence(SeqCst);
        }
        // Whoever watches the ring needs nothing else.
        if self.word(Word::Spinning).load(SeqCst) == 0 {
            self.send_token(socket)?;
        }
        Ok(put as usize)
    }

    fn room(&self) -> Result<u32, Broken> {
        Ok(self.segment.len_of(Ring::Receive) - self.unread()?)
    }

    /// The application is to say when there is room again.
    fn wait_for_room(&self) {
        self.waits.store(true, Relaxed);
        self.word(Word::Blocked).store(1, SeqCst);
        fence(SeqCst);
    }

    /// What is new since the last look. Makes no system call.
    pub fn look(&self) -> News {
        let seen = self.seen.load(Relaxed);
        let has_bytes = match self.readable() {
            Ok(_) => self.seen.load(Relaxed) != seen,
            // The read says so. It is news once.
            Err(Broken) => !self.knows_end.swap(true, Relaxed),
        };
        let has_end = self.is_finished() && !self.knows_end.swap(true, Relaxed);
        News {
            readable: has_bytes || has_end,
            writable: self.finds_room(),
            wants_token: self.word(Word::WantsToken).load(Acquire) != 0 || self.is_to_serve(),
        }
    }

    /// Whether there is room for which somebody waits. He waits no longer then.
    fn finds_room(&self) -> bool {
        if !self.waits.load(Relaxed) {
            return false;
        }
        // A write says that the index is broken.
        let half = self.segment.len_of(Ring::Receive) / 2;
        if self.unread().is_ok_and(|unread| unread > half) {
            return false;
        }
        self.waits.store(false, Relaxed);
        self.word(Word::Blocked).store(0, SeqCst);
        true
    }

    /// Whether the application has said that it sends no more.
    pub fn is_finished(&self) -> bool {
        self.word(Word::Finished).load(Acquire) != 0
    }

    /// From now on a change must be followed by a kick. Fence after it, and [`look`](Self::look).
    pub fn fall_asleep(&self) {
        let sleep = self.sleeps.load(Relaxed).wrapping_add(1).max(1);
        self.sleeps.store(sleep, Relaxed);
        self.awake.store(false, Relaxed);
        self.word(Word::Asleep).store(sleep, SeqCst);
    }

    /// From now on somebody looks, and no kick is needed.
    pub fn wake_up(&self) {
        self.awake.store(true, Relaxed);
        self.word(Word::Asleep).store(0, SeqCst);
    }

    /// Whether somebody looks.
    pub fn is_awake(&self) -> bool {
        self.awake.load(Relaxed)
    }

    /// Whether the application has not taken all bytes. Its socket may say nothing of them, if a
    /// thread that watched the ring, or took the token, was killed: [`serve`](Self::serve) sees to
    /// that.
    pub fn has_unread(&self) -> bool {
        self.unread().is_ok_and(|unread| unread > 0) || self.short_unread() > 0
    }

    fn has_token(&self) -> bool {
        self.word(Word::Token).load(SeqCst) != 0
    }

    /// Where the bytes begin that the application has not taken, if there are some.
    pub fn unread_at(&self) -> Option<u32> {
        let is_any = self.has_unread();
        let short = self.word(Word::ShortTail).load(Relaxed);
        is_any.then(|| self.freed.load(Relaxed).wrapping_add(short))
    }

    /// Whoever watches the ring does not read. The next [`serve`](Self::serve) sends a token.
    pub fn miss(&self) {
        self.misses.store(true, Relaxed);
    }

    /// Says that no more bytes come. The socket must say so, too, behind them.
    pub fn finish(&self) {
        self.word(Word::Ended).store(1, SeqCst);
    }

    /// The connection is over, and its socket is about to be closed. Of kicks that nobody has read
    /// the kernel would make a reset.
    pub fn close(&self, socket: BorrowedFd<'_>) {
        self.mark_closed();
        self.word(Word::Asleep).store(0, SeqCst);
        fence(SeqCst);
        self.drain(socket);
    }

    /// The connection is over, and it does not matter how the program sees that.
    pub fn mark_closed(&self) {
        self.is_closed.store(true, Relaxed);
        self.note_total();
        self.word(Word::Closed).store(1, SeqCst);
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Relaxed)
    }

    fn span(&self, ring: Ring, index: u32, count: u32) -> Span<'_> {
        Span::new(self.segment.runs(ring, index, count))
    }

    fn word(&self, word: Word) -> &AtomicU32 {
        self.segment.word(word)
    }
}

impl News {
    /// Whether there is anything new.
    pub fn is_any(self) -> bool {
        self.readable || self.writable || self.wants_token
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the application has broken an index of its rings")
    }
}

impl std::error::Error for Broken {}

impl From<Broken> for io::Error {
    fn from(_: Broken) -> Self {
        // Without a heap: it happens on a thread that moves bytes.
        io::ErrorKind::InvalidData.into()
    }
}

mod passage;
mod socket;

use self::passage::Passage;

#[cfg(test)]
mod tests;
