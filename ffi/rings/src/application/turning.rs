//! The program turns to a shortcut. See [`Shortcut`].

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::fence;

use rustix::net::send;

use super::{Application, QUIET};
use crate::layout::Word;
use crate::lock::Held;
use crate::shortcut::{COPIES, Item, Shortcut};

impl Application {
    #[cfg(test)]
    pub(crate) fn shortcut(&self) -> Option<Shortcut> {
        self.shortcut
    }

    /// The same with a shortcut that was mapped for it in this process.
    #[must_use]
    pub fn with(self, shortcut: Option<Shortcut>) -> Self {
        Self { shortcut, ..self }
    }

    /// Notes that the process with this number has used the connection. Returns the number of this
    /// side if the gateway offers a shortcut, and the connection has been used so often that it is
    /// worth asking for. It is not if two processes use it: both would need the shortcut, and one
    /// of them may not reach the gateway.
    pub fn wants_shortcut(&self, process: impl FnOnce() -> u32) -> Option<u32> {
        let number = self.word(Word::Offered).load(Relaxed);
        if number == 0 || self.shortcut.is_some() {
            return None;
        }
        let left = self.word(Word::UsesLeft);
        if left.load(Relaxed) >= NEVER {
            return None;
        }
        let process = process();
        match self.word(Word::User).compare_exchange(0, process, Relaxed, Relaxed) {
            Err(other) if other != process => left.store(NEVER, Relaxed),
            Ok(_) | Err(_) if left.fetch_sub(1, Relaxed) == 0 => return Some(number),
            Ok(_) | Err(_) => {}
        }
        None
    }

    /// The gateway did not answer: the connection is used some more before it is asked again.
    pub fn put_off_shortcut(&self) {
        self.word(Word::UsesLeft).store(USES_BETWEEN, Relaxed);
    }

    /// The number of this side, if bytes may come by a shortcut that this process has not mapped.
    /// It must ask for it before it reads or writes.
    pub fn lacked_shortcut(&self) -> Option<u32> {
        self.lacks_shortcut().then(|| self.word(Word::Offered).load(Relaxed))
    }

    pub(super) fn lacks_shortcut(&self) -> bool {
        let is = |word| self.word(word).load(SeqCst) != 0;
        self.shortcut.is_none() && (is(Word::Joined) || is(Word::Turned))
    }

    /// This process has mapped the shortcut: from now on all processes that have the connection
    /// must map it before they read or write.
    pub fn begin_to_join(&self) {
        self.word(Word::Joined).store(1, SeqCst);
    }

    /// The shortcut that was mapped is in use. The gateway hears of it.
    pub fn join(&self, socket: BorrowedFd<'_>) {
        let Some(shortcut) = self.shortcut else { return };
        self.begin_to_join();
        self.agree();
        shortcut.own(Item::Ready).store(1, SeqCst);
        // Also if it is awake. If its socket is full, it hears of that.
        let _ = send(socket, &[0], QUIET);
    }

    /// Sees to it that the other program knows what it must. A thread that began before there was a
    /// shortcut may have changed it without a word. Returns whether it was wrong: then look again.
    pub(super) fn agree(&self) -> bool {
        let Some(shortcut) = self.shortcut else { return false };
        let is_wrong = |(word, item)| {
            let word = self.word(word);
            shortcut.own(item).load(SeqCst) != word.load(SeqCst)
                && shortcut.publish(word, item, u32::MAX)
        };
        let was_wrong = COPIES.map(is_wrong).contains(&true);
        if was_wrong {
            fence(SeqCst);
        }
        was_wrong
    }

    /// Where the next bytes go: by a shortcut, or else by the gateway. For whoever has the lock.
    ///
    /// # Errors
    ///
    /// If this process lacks the shortcut.
    pub(super) fn way_out(&self) -> Result<Option<Shortcut>, Held> {
        let Some(shortcut) = self.shortcut else {
            // Where somebody is about to turn, nothing may come in between.
            return if self.lacks_shortcut() { Err(Held::Unmapped) } else { Ok(None) };
        };
        let turned = self.word(Word::Turned);
        if turned.load(SeqCst) == 0 {
            if shortcut.other(Item::Ready).load(SeqCst) == 0 {
                return Ok(None);
            }
            // Whoever was killed in between has changed nothing that this does not do again.
            let start = self.word(Word::SendHead).load(SeqCst);
            shortcut.own(Item::Start).store(start, SeqCst);
            shortcut.own(Item::Open).store(1, SeqCst);
            turned.store(1, SeqCst);
        }
        Ok(Some(shortcut))
    }

    /// How many bytes in the shortcut nobody has taken; none if this program does not write there.
    pub(super) fn short_unsent(&self) -> Option<u32> {
        let shortcut = self.shortcut.filter(|_| self.word(Word::Turned).load(SeqCst) != 0)?;
        Some(shortcut.unread_by_other(self.word(Word::ShortHead).load(SeqCst)))
    }

    /// Bytes were written, by the shortcut or else by the gateway: wakes whoever is to read them.
    pub(super) fn tell_reader(&self, socket: BorrowedFd<'_>, way: Option<Shortcut>) {
        // Of a program that is gone, the gateway must hear that there are bytes for it.
        let is_attentive = |shortcut: Shortcut| shortcut.is_other_attentive();
        if way.is_some_and(is_attentive) && self.word(Word::Abandoned).load(SeqCst) == 0 {
            return;
        }
        self.kick_if_asleep(socket);
    }

    /// This program waits for room.
    pub(super) fn say_blocked(&self) {
        if let Some(shortcut) = self.shortcut.filter(|_| self.word(Word::Turned).load(SeqCst) != 0)
        {
            shortcut.own(Item::Blocked).store(1, SeqCst);
        }
    }

    /// Whether the other program waits for room.
    pub(super) fn is_other_blocked(&self) -> bool {
        self.shortcut.is_some_and(|shortcut| shortcut.other(Item::Blocked).load(SeqCst) != 0)
    }

    /// Tells the other program what a word of ours is.
    pub(super) fn publish(&self, word: Word, item: Item) {
        if let Some(shortcut) = self.shortcut {
            shortcut.publish(self.word(word), item, u32::MAX);
        }
    }
}

/// After so many uses a gateway is asked again that did not answer.
const USES_BETWEEN: u32 = 1_000_000;
/// So many uses are never left.
const NEVER: u32 = 1 << 31;
