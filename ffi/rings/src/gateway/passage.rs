//! The gateway's part in a [`Shortcut`]: it makes the memory, offers it to both programs, and sends
//! tokens. It reads and writes none of the bytes.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
use std::sync::{Arc, OnceLock, Weak};

use rustix::io::Errno;
use smcr_os::Mapping;

use super::Gateway;
use super::socket::is_hung_up;
use crate::layout::{RING_LEN, Word};
use crate::shortcut::{self, COPIES, Item, Shortcut, Side};

/// One end of a shortcut.
#[derive(Debug)]
pub(super) struct Passage {
    side: Side,
    shared: Arc<Shared>,
    /// The connection at the other end.
    other: Weak<Gateway>,
    /// How many bytes had come when the end of the application was judged last.
    judged: AtomicU32,
    /// Whether a poller checks it now and then.
    is_checked: AtomicBool,
}

/// What both ends have.
#[derive(Debug, Default)]
struct Shared {
    /// It is made when a program asks for it.
    memory: OnceLock<Mapping>,
    /// How many bytes the program of each side had put in at the last look: it may be gone first.
    totals: [AtomicU64; 2],
}

impl Passage {
    fn new(side: Side, shared: &Arc<Shared>, other: &Arc<Gateway>) -> Self {
        Self {
            side,
            shared: Arc::clone(shared),
            other: Arc::downgrade(other),
            judged: AtomicU32::new(0),
            is_checked: AtomicBool::new(false),
        }
    }

    /// The shortcut, once a program has asked for it.
    fn shortcut(&self) -> Option<Shortcut> {
        let base = self.shared.memory.get()?.base();
        // SAFETY: `new` asks for MAPPED: the mapping has that length, and lives as long as this
        // value, which nobody lends the result beyond; and for ALIEN, as the mapping does.
        Some(unsafe { Shortcut::new(base, self.side) })
    }
}

impl Gateway {
    /// Offers a shortcut to the programs of these two connections, which are both ends of one. Each
    /// asks for it when it has read or written `after` more times. Does nothing for those that have
    /// one.
    pub fn offer_shortcut(one: &Arc<Self>, other: &Arc<Self>, after: u32) {
        if one.passage.get().is_some() || other.passage.get().is_some() {
            return;
        }
        let shared = Arc::default();
        for (gateway, peer, side) in [(one, other, Side::First), (other, one, Side::Second)] {
            if gateway.passage.set(Passage::new(side, &shared, peer)).is_ok() {
                gateway.word(Word::UsesLeft).store(after, SeqCst);
                gateway.word(Word::Offered).store(side.number(), SeqCst);
            }
        }
        fence(SeqCst);
        // Its poller may have heard of that before.
        for (gateway, peer) in [(one, other), (other, one)] {
            if gateway.is_ending() {
                peer.word(Word::Abandoned).store(1, SeqCst);
            }
        }
    }

    /// What the application maps if it wants the shortcut that it was offered. One thread at a time
    /// asks for it.
    ///
    /// # Errors
    ///
    /// If none was offered, or the process is out of descriptors or memory.
    ///
    /// # Panics
    ///
    /// Never: it was made to be shared.
    pub fn shortcut_memory(&self) -> io::Result<BorrowedFd<'_>> {
        let memory = &self.passage.get().ok_or(Errno::NOENT)?.shared.memory;
        if memory.get().is_none() {
            // If another thread was faster, there is one.
            let _ = memory.set(Mapping::shared(shortcut::LEN)?);
        }
        let mapping = memory.get().expect("it was just made");
        Ok(mapping.descriptor().expect("it was made to be shared"))
    }

    /// Whether a shortcut was offered.
    pub fn is_offered_shortcut(&self) -> bool {
        self.passage.get().is_some()
    }

    /// Whether a program may use a shortcut.
    pub fn has_shortcut(&self) -> bool {
        self.shortcut().is_some()
    }

    fn shortcut(&self) -> Option<Shortcut> {
        self.passage.get()?.shortcut()
    }

    /// Whether a program may use its shortcut, and nobody has asked this before: for the poller
    /// that checks shortcuts now and then.
    pub fn is_new_to_checks(&self) -> bool {
        self.has_shortcut()
            && self.passage.get().is_some_and(|it| !it.is_checked.swap(true, Relaxed))
    }

    /// The poller does not check it any more.
    pub fn is_new_again_to_checks(&self) {
        if let Some(passage) = self.passage.get() {
            passage.is_checked.store(false, Relaxed);
        }
    }

    /// The connection at the other end of its shortcut, as long as that is there.
    pub fn other_end(&self) -> Option<Arc<Self>> {
        self.passage.get()?.other.upgrade()
    }

    /// How many bytes the applications of this end and of the other one say that they have put into
    /// their shortcut.
    pub fn short_totals(&self) -> (u64, u64) {
        let Some(passage) = self.passage.get() else { return (0, 0) };
        if let Some(other) = passage.other.upgrade() {
            other.note_total();
        }
        (self.note_total(), passage.shared.totals[passage.side.other() as usize].load(Relaxed))
    }

    /// Keeps what the application says that it has put in, for the other end.
    pub(super) fn note_total(&self) -> u64 {
        let Some(passage) = self.passage.get() else { return 0 };
        // Between the two stores of an application it is four gigabytes less.
        let rounds = self.word(Word::ShortRounds).load(SeqCst);
        let head = self.word(Word::ShortHead).load(SeqCst);
        let total = u64::from(rounds) << 32 | u64::from(head);
        passage.shared.totals[passage.side as usize].store(total, Relaxed);
        total
    }

    /// How many bytes in the shortcut the application has not taken.
    fn short_untaken(&self) -> u32 {
        let tail = self.word(Word::ShortTail).load(SeqCst);
        self.shortcut().map_or(0, |shortcut| shortcut.unread(tail))
    }

    /// Whether there are some.
    pub(super) fn has_short_untaken(&self) -> bool {
        self.short_untaken() > 0
    }

    /// How many of them it can read: all that come before are with it.
    pub(super) fn short_unread(&self) -> u32 {
        let is_there = |it: &Shortcut| it.begins_behind(self.head.load(Relaxed));
        self.shortcut().filter(is_there).map_or(0, |_| self.short_untaken())
    }

    /// Whether much waits in the shortcut for the other application.
    pub(super) fn is_short_full(&self) -> bool {
        let head = self.word(Word::ShortHead).load(SeqCst);
        self.shortcut().is_some_and(|shortcut| shortcut.unread_by_other(head) > RING_LEN / 2)
    }

    /// Whether bytes that have come by the shortcut can be read, and nothing tells of them.
    pub(super) fn lacks_token(&self) -> bool {
        let is_zero = |word| self.word(word).load(SeqCst) == 0;
        is_zero(Word::Token) && is_zero(Word::Spinning) && self.short_unread() > 0
    }

    /// Sees to it that the other program knows what it must of this one, of which a thread may have
    /// been killed.
    pub fn agree(&self) {
        for (word, item) in COPIES {
            self.tell_other(word, item);
        }
    }

    /// Tells the other program what a word of this one is. This one may change it all the time.
    pub(super) fn tell_other(&self, word: Word, item: Item) {
        if let Some(shortcut) = self.shortcut() {
            shortcut.publish(self.word(word), item, TOLD_MAX);
        }
    }

    /// Something was left in the socket because the shortcut is full: its program waits for room.
    pub(super) fn note_blocked(&self) {
        if let Some(shortcut) = self.shortcut().filter(|_| self.is_short_full()) {
            shortcut.own(Item::Blocked).store(1, SeqCst);
        }
    }

    /// Nobody waits for room if there is some, and nothing makes the socket unwritable.
    pub(super) fn settle_room(&self) {
        let Some(shortcut) = self.shortcut() else { return };
        let blocked = shortcut.own(Item::Blocked);
        if self.is_short_full() || blocked.load(SeqCst) == 0 {
            return;
        }
        blocked.store(0, SeqCst);
        fence(SeqCst);
        // It may have become full just now, and its program waits for us.
        if self.is_short_full() {
            blocked.store(1, SeqCst);
        }
    }

    /// Whether [`serve`](Self::serve) has something to do because of the shortcut.
    pub(super) fn is_to_serve(&self) -> bool {
        let Some(passage) = self.passage.get() else { return false };
        let Some(shortcut) = passage.shortcut() else { return false };
        let judged = &passage.judged;
        let head = || shortcut.other(Item::Head).load(SeqCst);
        let is_to_judge =
            || self.is_ending() && self.short_untaken() > 0 && head() != judged.load(Relaxed);
        let has_room = || shortcut.own(Item::Blocked).load(SeqCst) != 0 && !self.is_short_full();
        self.lacks_token() || self.must_drain() || has_room() || is_to_judge()
    }

    /// Whether bytes of the shortcut will never be read: the application is gone. TCP resets the
    /// connection then.
    pub fn has_lost_bytes(&self, socket: BorrowedFd<'_>) -> bool {
        let Some(passage) = self.passage.get().filter(|_| self.is_ending()) else { return false };
        let Some(shortcut) = passage.shortcut() else { return false };
        passage.judged.store(shortcut.other(Item::Head).load(SeqCst), Relaxed);
        self.short_untaken() > 0 && is_hung_up(socket)
    }

    /// The socket has ended: from now on the other application tells us of all that it writes.
    pub(super) fn say_abandoned(&self) {
        fence(SeqCst);
        if let Some(other) = self.other_end() {
            other.word(Word::Abandoned).store(1, SeqCst);
            fence(SeqCst);
        }
    }
}

/// So many values of a word are told at once. A check tells what was left out.
const TOLD_MAX: u32 = 3;
