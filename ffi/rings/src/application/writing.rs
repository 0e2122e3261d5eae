//! The program writes.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use std::sync::atomic::fence;

use libc::iovec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::send;

use super::{Application, QUIET};
use crate::layout::{FILLER_LEN, Ring, Word};
use crate::lock::{Held, Lock};
use crate::shortcut::Item;
use crate::transfer::{Direction, Part, copy_between, length};

impl Application {
    /// Writes from `parts`. Returns how many bytes were taken: fewer than there are if the ring is
    /// full. Then call [`make_unwritable`](Self::make_unwritable). None are taken after
    /// [`finish`](Self::finish).
    ///
    /// `thread` is the number of this thread, see [`thread`](crate::thread).
    ///
    /// # Errors
    ///
    /// Somebody else is about to write, and does not go on. If that is for ever, the connection is
    /// of no use any more; the gateway is told, and resets it. Or the bytes go by a shortcut that
    /// this process [`lacks`](Self::lacked_shortcut).
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
        let lock = match Lock::take(self.word(Word::Writing), thread) {
            Ok(lock) => lock,
            Err(held) => {
                if held == Held::ForEver {
                    self.give_up(socket);
                }
                return Err(held);
            }
        };
        let way = self.way_out()?;
        let (heads, room) = match way {
            Some(shortcut) => {
                let heads = self.word(Word::ShortHead);
                (heads, shortcut.room(heads.load(SeqCst)))
            }
            None => {
                let heads = self.word(Word::SendHead);
                let tail = self.word(Word::SendTail).load(Acquire);
                let filled = self.filled(Ring::Send, heads.load(SeqCst), tail);
                (heads, self.segment.len_of(Ring::Send) - filled)
            }
        };
        let head = heads.load(SeqCst);
        let count = u32::try_from(most).map_or(room, |most| most.min(room));
        let runs = match way {
            Some(shortcut) => shortcut.runs_out(head, count),
            None => self.segment.runs(Ring::Send, head, count),
        };
        let mut left = parts.iter().map(|part| Part::new(part.iov_base.cast(), part.iov_len));
        // SAFETY: the caller promises its parts; the runs are within the ring, and whoever reads
        // has taken out what was there.
        unsafe { copy_between(&runs, &mut left, Direction::IntoRing) };
        let next = head.wrapping_add(count);
        heads.store(next, SeqCst);
        if let Some(shortcut) = way {
            shortcut.own(Item::Head).store(next, SeqCst);
            if next < head {
                self.word(Word::ShortRounds).fetch_add(1, SeqCst);
            }
        }
        drop(lock);
        if count > 0 {
            fence(SeqCst);
            self.tell_reader(socket, way);
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
        self.say_blocked();
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
}

fn is_writable(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    // Of a socket that is broken the caller's own poll says so.
    poll(&mut fds, Some(&at_once)).is_ok() && fds[0].revents() == PollFlags::OUT
}

/// What no program with rings sends otherwise.
const STRAY: u8 = 1;
/// What makes a socket unwritable: more than a quarter of its buffer (`unix_writable`). The rest of
/// the buffer is for kicks.
static FILLER: [u8; FILLER_LEN] = [0; FILLER_LEN];
/// So often filler is sent at most: a gateway may take it out meanwhile.
const FILLERS_MAX: u32 = 3;
