//! The socket of a connection with rings, as the gateway has it: kicks come by it, and tokens go.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::fence;

use libc::c_int;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionread};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::Gateway;
use crate::layout::{FILLER_LEN, Ring, Word};
use crate::shortcut::Item;

impl Gateway {
    /// Makes the application's socket readable.
    ///
    /// # Errors
    ///
    /// If the socket is broken.
    pub(super) fn send_token(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        if self.word(Word::Token).swap(1, SeqCst) == 0 {
            // Before it is sent: whoever takes it says that there is none.
            self.tell_other(Word::Token, Item::Token);
            match send(socket, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                // If the socket is full of them, it is readable.
                Ok(_) | Err(Errno::AGAIN) => {}
                // There is no memory for it. What it would tell of is in the ring already, so the
                // write has not failed; it is sent when somebody looks at the rings by himself.
                Err(Errno::NOBUFS | Errno::NOMEM) => {
                    self.word(Word::Token).store(0, SeqCst);
                    self.tell_other(Word::Token, Item::Token);
                    self.misses.store(true, Relaxed);
                }
                // The program has shut down reading: it is readable, too, and reads what comes.
                Err(Errno::PIPE) if !is_hung_up(socket) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// The socket has reported something: a kick, filler, or the end. Returns whether somebody who
    /// waits for room may go on.
    ///
    /// Somebody must look at the rings by himself before, and read: a kick that is taken here comes
    /// no more.
    pub fn hear(&self, socket: BorrowedFd<'_>, is_ending: bool) -> bool {
        if is_ending {
            self.ending.store(true, Relaxed);
            self.say_abandoned();
        }
        // What comes now may be filler, and the program is to wait until half of the ring is free.
        // But kicks need room, too: where there is much, it may find out again that it is full.
        let half = self.segment.len_of(Ring::Send) / 2;
        let is_full = self.readable().is_ok_and(|filled| filled > half) || self.is_short_full();
        let left = self.left.fetch_add(1, Relaxed);
        if !is_full || left >= LEFT_MAX || has_more_than_filler(socket) {
            self.drain(socket);
        } else {
            self.note_blocked();
        }
        self.serve(socket);
        is_ending || !self.waits.load(Relaxed) || self.finds_room()
    }

    /// Whether there is room again, and the socket may be unwritable: then somebody must look at
    /// the rings by himself, and [`drain`](Self::drain).
    pub fn must_drain(&self) -> bool {
        let filled = self.seen.load(Relaxed).wrapping_sub(self.tail.load(Relaxed));
        let is_full = || filled > self.segment.len_of(Ring::Send) / 2 || self.is_short_full();
        self.left.load(Relaxed) > 0 && !is_full()
    }

    /// Whether the socket has reported its end, or an error.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Relaxed)
    }

    /// Sends a token if the application wants one, or if it lacks one and nobody watches the ring.
    pub fn serve(&self, socket: BorrowedFd<'_>) {
        let wants = self.word(Word::WantsToken);
        let mut is_wanted = wants.load(SeqCst) != 0;
        if is_wanted {
            wants.store(0, SeqCst);
            fence(SeqCst);
        }
        self.settle_room();
        if self.lacks_token() {
            is_wanted = true;
            // What the other program knows of that may be old.
            self.tell_other(Word::Spinning, Item::Watched);
        }
        let is_missed = self.misses.swap(false, Relaxed) || !self.is_awake();
        if !self.has_unread() || !(is_wanted || is_missed) {
            return;
        }
        // Who was killed after he had taken the token, and before he said so, has taken it.
        if is_missed {
            if self.has_token() && is_taken(socket) {
                self.word(Word::Token).store(0, SeqCst);
                self.tell_other(Word::Token, Item::Token);
            }
            // Whoever watches has not looked for long: he may be gone.
            self.word(Word::Spinning).store(0, SeqCst);
            self.tell_other(Word::Spinning, Item::Watched);
        }
        // A socket that is broken reports that itself.
        let _ = self.send_token(socket);
    }

    /// Whether the application is gone, and has left bytes unread: TCP resets the connection then.
    pub fn has_dropped_bytes(&self, socket: BorrowedFd<'_>) -> bool {
        let is_any = || self.unread() != Ok(0) || self.has_short_untaken();
        self.ending.load(Relaxed) && is_any() && is_hung_up(socket)
    }

    /// Whether the socket has ended. Takes what lies in it.
    pub(super) fn has_ended(&self, socket: BorrowedFd<'_>) -> bool {
        self.is_ending() && self.drain(socket)
    }

    /// Takes kicks and filler out of the socket. Returns whether it has ended behind them.
    ///
    /// Somebody must look at the rings by himself from before: a kick that is taken comes no more.
    pub fn drain(&self, socket: BorrowedFd<'_>) -> bool {
        self.left.store(0, Relaxed);
        let mut room = [0; 4096];
        for _ in 0..DRAINS_MAX {
            match recv(socket, &mut room[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return true,
                Ok((len, _)) => {
                    if room[..len].iter().any(|byte| *byte != 0) {
                        self.has_strayed.store(true, Relaxed);
                    }
                    if len < room.len() && !self.is_ending() {
                        return false;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                // The kernel says that a token was left unread. Whether bytes were, we know better.
                Err(_) => return true,
            }
        }
        // An application that sends as fast as we read is no sensible one.
        false
    }
}

pub(super) fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::empty())];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&at_once)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

/// Whether more lies in the socket than makes it unwritable, besides a few kicks.
fn has_more_than_filler(socket: BorrowedFd<'_>) -> bool {
    ioctl_fionread(socket).is_ok_and(|bytes| bytes > (FILLER_LEN + FILLER_LEN / 2) as u64)
}

/// Whether what was sent by a socket was received.
fn is_taken(socket: BorrowedFd<'_>) -> bool {
    let mut unread: c_int = 0;
    // SAFETY: `ioctl` asks for a place for a number with TIOCOUTQ, which is SIOCOUTQ: a live local.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
    result == 0 && unread == 0
}

/// So often something may come by the socket and be left there. Filler and as many kicks fit.
const LEFT_MAX: u32 = 8;
/// So often the socket is read at once: its buffer has less.
const DRAINS_MAX: u32 = 16;
