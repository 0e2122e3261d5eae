//! The application's half: used by the preload library, in any thread, in signal handlers, and in
//! several processes at once. Without a heap.
//!
//! Whoever reads copies first and then publishes how far he has come, by a compare-exchange: if
//! somebody else was faster, he begins again. That needs no lock. Whoever writes has one.

use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use std::sync::atomic::{AtomicU32, fence};

use libc::iovec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::thread::sched_yield;

use crate::layout::{
    FILLER_LEN, HEADER_LEN, RING_LEN, RING_LEN_MAX, Ring, Run, Segment, Word, read_preamble,
};
use crate::lock::{Held, Lock};
use crate::transfer::{Direction, Part, copy_between, length};

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
                Ok(Self { segment: unsafe { Segment::new(base, send, receive) } })
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
        Some(Self { segment: unsafe { Segment::new(base, send, receive) } })
    }

    /// Unmaps it.
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
        self.filled(Ring::Receive, self.word(Word::ReceiveHead).load(SeqCst), tail)
    }

    /// How many bytes the gateway has not taken yet. SIOCOUTQ says this.
    pub fn unsent(&self) -> u32 {
        let head = self.word(Word::SendHead).load(SeqCst);
        self.filled(Ring::Send, head, self.word(Word::SendTail).load(SeqCst))
    }

    /// How many bytes can be written now.
    pub fn room(&self) -> u32 {
        self.segment.len_of(Ring::Send) - self.unsent()
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

    /// Reads into `parts`; `peek` leaves the bytes there. Returns how many bytes were read. Zero:
    /// there are none, and only the kernel knows whether more will come. Then receive one byte from
    /// the socket, with the flags of the program, so that it waits where the program waits:
    /// - a byte: call [`token_taken`](Self::token_taken) and read again;
    /// - the end of the stream, or an error: read once more, since bytes may have come before it;
    ///   if there are none, that is the outcome.
    ///
    /// # Safety
    ///
    /// The parts are valid for writes.
    pub unsafe fn read(&self, socket: BorrowedFd<'_>, parts: &[iovec], peek: bool) -> usize {
        let copy = |runs: &[Run; 2]| {
            let mut left = parts.iter().map(|part| Part::new(part.iov_base.cast(), part.iov_len));
            // SAFETY: the caller promises its parts; the runs are within the ring, and their bytes
            // were published.
            unsafe { copy_between(runs, &mut left, Direction::OutOfRing) };
        };
        self.take(socket, length(parts), peek, copy)
    }

    /// The same into a slice.
    pub fn read_slice(&self, socket: BorrowedFd<'_>, room: &mut [u8]) -> usize {
        let part = iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        // SAFETY: the part is a live exclusive slice.
        unsafe { self.read(socket, &[part], false) }
    }

    /// Drops at most `most` bytes, as TCP does for MSG_TRUNC. Otherwise as [`read`](Self::read).
    pub fn discard(&self, socket: BorrowedFd<'_>, most: usize) -> usize {
        self.take(socket, most, false, |_| {})
    }

    fn take(
        &self,
        socket: BorrowedFd<'_>,
        most: usize,
        peek: bool,
        copy: impl Fn(&[Run; 2]),
    ) -> usize {
        let tails = self.word(Word::ReceiveTail);
        let taken = loop {
            let tail = tails.load(SeqCst);
            let head = self.word(Word::ReceiveHead).load(Acquire);
            let filled = self.filled(Ring::Receive, head, tail);
            let count = u32::try_from(most).map_or(filled, |most| most.min(filled));
            copy(&self.segment.runs(Ring::Receive, tail, count));
            if peek || count == 0 {
                break count;
            }
            // Whoever was faster has taken these bytes.
            if tails.compare_exchange(tail, tail.wrapping_add(count), SeqCst, SeqCst).is_ok() {
                break count;
            }
        };
        if taken > 0 && !peek {
            self.after_read(socket);
        }
        taken as usize
    }

    /// Sees to it that the socket is readable if bytes are left, and only then, and that a gateway
    /// that waits for room hears of it.
    fn after_read(&self, socket: BorrowedFd<'_>) {
        fence(SeqCst);
        if self.word(Word::Blocked).load(SeqCst) != 0
            && self.readable() <= self.segment.len_of(Ring::Receive) / 2
        {
            self.kick_if_asleep(socket);
        }
        if self.readable() == 0 {
            self.take_token(socket);
        } else {
            self.keep_readable(socket);
        }
    }

    /// Takes the byte away that makes the socket readable, because the ring is empty.
    fn take_token(&self, socket: BorrowedFd<'_>) {
        for _ in 0..TOKEN_LOOKS {
            if self.word(Word::Token).load(SeqCst) == 0 {
                return;
            }
            match recv(socket, &mut [0_u8; 1][..], RecvFlags::DONTWAIT) {
                Ok((1.., _)) => {
                    self.token_taken();
                    if self.readable() > 0 {
                        self.want_token(socket);
                    }
                    return;
                }
                // The gateway has said that there is a token, and not sent it yet, or another
                // thread takes it. If the socket became readable for bytes that we have read, a
                // program would wait that is sure not to.
                Err(Errno::AGAIN) if self.readable() == 0 => sched_yield(),
                Err(Errno::INTR) => {}
                // The end of the stream, which the next read finds.
                Ok((0, _)) | Err(_) => return,
            }
        }
    }

    /// A byte was received from the socket: there is none any more.
    pub fn token_taken(&self) {
        self.word(Word::Token).store(0, SeqCst);
        // The caller looks at the ring now.
        fence(SeqCst);
    }

    /// Sees to it that the socket becomes readable again if bytes are left: after
    /// [`token_taken`](Self::token_taken), if they were not read.
    pub fn keep_readable(&self, socket: BorrowedFd<'_>) {
        let is_zero = |word| self.word(word).load(SeqCst) == 0;
        // Whoever watches needs no token.
        if self.readable() > 0 && is_zero(Word::Token) && is_zero(Word::Spinning) {
            self.want_token(socket);
        }
    }

    /// Asks the gateway for a token.
    fn want_token(&self, socket: BorrowedFd<'_>) {
        self.word(Word::WantsToken).store(1, SeqCst);
        self.kick_if_asleep(socket);
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
        self.readable() > 0 || self.has_end()
    }

    /// Whether the gateway sends no more. The socket says so, too.
    pub fn has_end(&self) -> bool {
        let is = |word| self.word(word).load(SeqCst) != 0;
        is(Word::Ended) || is(Word::Closed)
    }

    /// How many bytes have come so far, modulo 2³².
    pub fn arrived(&self) -> u32 {
        self.word(Word::ReceiveHead).load(SeqCst)
    }

    /// From now on somebody looks at the ring again and again, and the socket need say nothing.
    pub fn watch(&self) {
        self.word(Word::Spinning).fetch_add(1, SeqCst);
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
        fence(SeqCst);
    }

    /// Writes from `parts`. Returns how many bytes were taken: fewer than there are if the ring is
    /// full. Then call [`make_unwritable`](Self::make_unwritable). None are taken after
    /// [`finish`](Self::finish).
    ///
    /// `thread` is the number of this thread, see [`thread`](crate::thread).
    ///
    /// # Errors
    ///
    /// Somebody else is about to write, and does not go on. If that is for ever, the connection is
    /// of no use any more; the gateway is told, and resets it.
    ///
    /// # Safety
    ///
    /// The parts are valid for reads.
    pub unsafe fn write(
        &self,
        socket: BorrowedFd<'_>,
        parts: &[iovec],
        thread: u32,
    ) -> Result<usize, Held> {
        let most = length(parts);
        if self.is_finished() || most == 0 {
            return Ok(0);
        }
        let heads = self.word(Word::SendHead);
        let lock = match Lock::take(self.word(Word::Writing), thread) {
            Ok(lock) => lock,
            Err(held) => {
                if held == Held::ForEver {
                    self.give_up(socket);
                }
                return Err(held);
            }
        };
        let head = heads.load(SeqCst);
        let filled = self.filled(Ring::Send, head, self.word(Word::SendTail).load(Acquire));
        let room = self.segment.len_of(Ring::Send) - filled;
        let count = u32::try_from(most).map_or(room, |most| most.min(room));
        let mut left = parts.iter().map(|part| Part::new(part.iov_base.cast(), part.iov_len));
        let runs = self.segment.runs(Ring::Send, head, count);
        // SAFETY: the caller promises its parts; the runs are within the ring, and the gateway has
        // taken out what was there.
        unsafe { copy_between(&runs, &mut left, Direction::IntoRing) };
        heads.store(head.wrapping_add(count), SeqCst);
        drop(lock);
        if count > 0 {
            fence(SeqCst);
            self.kick_if_asleep(socket);
        }
        Ok(count as usize)
    }

    /// The same from a slice.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn write_slice(
        &self,
        socket: BorrowedFd<'_>,
        bytes: &[u8],
        thread: u32,
    ) -> Result<usize, Held> {
        let part = iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: the part is a live slice, and is only read.
        unsafe { self.write(socket, &[part], thread) }
    }

    /// The stream is beyond help.
    fn give_up(&self, socket: BorrowedFd<'_>) {
        // No kick looks like this. If the socket is gone, so is the stream.
        let _ = send(socket, &[STRAY], QUIET);
    }

    /// The ring is full, or has taken less than the program has written: lets the socket be
    /// unwritable until there is room. Returns false if there is room already: then write again.
    ///
    /// If true, a program that waits can wait in `poll` for POLLOUT. The end of the connection ends
    /// that, too.
    pub fn make_unwritable(&self, socket: BorrowedFd<'_>) -> bool {
        for _ in 0..FILLERS_MAX {
            if !is_writable(socket) {
                break;
            }
            // It fits, since the socket is writable. If the far end is gone, it is so for ever.
            if send(socket, &FILLER, QUIET).is_err() {
                break;
            }
        }
        // The gateway looks at the socket when it comes, and when half of the ring is free: at that
        // time it may have looked before, and what has just come is there for the next time.
        fence(SeqCst);
        self.room() == 0
    }

    /// The program sends no more: `shutdown` for writing. The kernel must not be told, since a kick
    /// needs the socket; the gateway is.
    pub fn finish(&self, socket: BorrowedFd<'_>) {
        self.word(Word::Finished).store(1, SeqCst);
        fence(SeqCst);
        self.kick_if_asleep(socket);
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

    fn word(&self, word: Word) -> &AtomicU32 {
        self.segment.word(word)
    }

    /// How many bytes are in a ring. If another process has scribbled, no more than fit.
    fn filled(&self, ring: Ring, head: u32, tail: u32) -> u32 {
        head.wrapping_sub(tail).min(self.segment.len_of(ring))
    }
}

fn is_writable(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    // Of a socket that is broken the caller's own poll says so.
    poll(&mut fds, Some(&at_once)).is_ok() && fds[0].revents() == PollFlags::OUT
}

/// What does not wait, and raises no signal.
const QUIET: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);
/// What no program with rings sends otherwise.
const STRAY: u8 = 1;
/// How often to look for a token that the gateway has promised.
const TOKEN_LOOKS: u32 = 64;
/// What makes a socket unwritable: more than a quarter of its buffer (`unix_writable`). The rest of
/// the buffer is for kicks.
static FILLER: [u8; FILLER_LEN] = [0; FILLER_LEN];
/// So often filler is sent at most: a gateway may take it out meanwhile.
const FILLERS_MAX: u32 = 3;
