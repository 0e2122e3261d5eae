//! The program reads.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use std::sync::atomic::{AtomicU32, fence};

use libc::iovec;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use rustix::thread::sched_yield;

use super::Application;
use crate::layout::{Ring, Run, Word};
use crate::shortcut::Item;
use crate::transfer::{Direction, Part, copy_between, length};

impl Application {
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
        let copy = |runs: &[Run]| {
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
        copy: impl Fn(&[Run]),
    ) -> usize {
        let (tails, short_tails) = (self.word(Word::ReceiveTail), self.word(Word::ShortTail));
        let mut corrections = 0;
        let taken = loop {
            let tail = tails.load(SeqCst);
            let head = self.word(Word::ReceiveHead).load(Acquire);
            let filled = self.filled(Ring::Receive, head, tail);
            let count = u32::try_from(most).map_or(filled, |most| most.min(filled));
            let relayed = self.segment.runs(Ring::Receive, tail, count);
            let short_tail = short_tails.load(SeqCst);
            // Behind all that comes by the gateway.
            let shortcut = if count == filled { self.shortcut } else { None };
            let shortcut = shortcut.filter(|it| it.begins_behind(tail.wrapping_add(count)));
            let mut behind = 0;
            if let Some(shortcut) = shortcut {
                let (left, unread) = (most - count as usize, shortcut.unread(short_tail));
                behind = u32::try_from(left).map_or(unread, |left| left.min(unread));
                let [third, fourth] = shortcut.runs_in(short_tail, behind);
                copy(&[relayed[0], relayed[1], third, fourth]);
            } else {
                copy(&relayed);
            }
            // The other program can make it wrong again and again.
            if count + behind == 0 && corrections < CORRECTIONS_MAX && self.agree() {
                corrections += 1;
                continue;
            }
            if peek || count + behind == 0 {
                break count + behind;
            }
            // Whoever was faster has taken these bytes.
            let moves = |tails: &AtomicU32, tail: u32, count| {
                let next = tail.wrapping_add(count);
                count == 0 || tails.compare_exchange(tail, next, SeqCst, SeqCst).is_ok()
            };
            if !moves(tails, tail, count) {
                continue;
            }
            if moves(short_tails, short_tail, behind) {
                self.publish(Word::ShortTail, Item::Tail);
                break count + behind;
            }
            if count > 0 {
                break count;
            }
        };
        if taken > 0 && !peek {
            self.after_read(socket);
        }
        taken as usize
    }

    /// Sees to it that the socket is readable if bytes are left, and only then, and that a gateway
    /// that waits for room hears of it, or another program that does.
    fn after_read(&self, socket: BorrowedFd<'_>) {
        fence(SeqCst);
        let readable = self.readable();
        let has_room = readable <= self.segment.len_of(Ring::Receive) / 2;
        if has_room && (self.word(Word::Blocked).load(SeqCst) != 0 || self.is_other_blocked()) {
            self.kick_if_asleep(socket);
        }
        if readable == 0 {
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
        self.publish(Word::Token, Item::Token);
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
}

/// So often it is put right what the other program knows, before a read that finds nothing.
const CORRECTIONS_MAX: u32 = 3;
/// How often to look for a token that the gateway has promised.
const TOKEN_LOOKS: u32 = 64;
