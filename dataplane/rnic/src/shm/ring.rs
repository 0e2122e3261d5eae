//! The rings of a queue pair, one in each direction, as one of its ends sees them.
//!
//! ```text
//!   0     | what the caller writes: tail, head, state |
//!   64    | whether the caller sleeps                 |
//!   128   | the same two lines of the callee          |
//!   4096  | slots from the caller to the callee       |
//!   36864 | slots from the callee to the caller       |
//! ```
//!
//! A slot has 64 bytes. A message begins with a word that says its kind and length; a long one
//! takes as many slots as it needs. Tail and head count slots since the queue pair began. They are
//! read from shared memory once, checked, and then used from memory of our own: the peer may change
//! everything there at any time.
//!
//! **Visibility.** Who sends writes its bytes and then the tail, with release; who receives reads
//! the tail with acquire, and then the bytes. What was copied to regions before is ordered by the
//! same pair.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use smcr_memory::Region;

use super::bell::Bell;
use super::doubtful::Doubtful;
use super::nap;
use super::sync::{AtomicUsize, Ordering};
use crate::{LONG_MESSAGE_MAX, MESSAGE_LEN, Message};

/// One end of the rings of a queue pair.
#[derive(Debug)]
pub(super) struct Ring {
    memory: Region,
    /// 0 for the caller, 1 for the callee.
    side: usize,
    bell: Bell,
    /// Slots that we have filled, and those of them that the peer was told of.
    filled: usize,
    told: usize,
    /// Slots that the peer has emptied, as far as we know.
    emptied: usize,
    /// Slots that the peer has filled, as far as we know.
    theirs: usize,
    /// Those of them that we have read, and that the peer was told of.
    read: usize,
    returned: usize,
    /// What the peer fills from now on does not matter.
    is_sealed: bool,
}

/// What one end says of itself, in the order in which it gets worse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing is wrong.
    Fine = 0,
    /// It has gone, and does not say why.
    Left = 1,
    /// It was asked for something that it refuses.
    Refused = 2,
    /// It would have done something that the other end must refuse.
    Violated = 3,
}

/// A message that came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    Short(Message),
    Long(Box<[u8]>),
}

/// What the peer has written makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nonsense;

impl Ring {
    /// Memory for a new queue pair.
    pub(super) fn memory() -> io::Result<Region> {
        Region::shared(MEMORY_LEN)
    }

    /// Maps the memory of the rings that the caller has given us.
    ///
    /// # Errors
    ///
    /// If it is something else, or cannot be mapped.
    pub(super) fn given(descriptors: &[Doubtful]) -> io::Result<Region> {
        let [memory] = descriptors else { return Err(Errno::BADF.into()) };
        Self::memory_of_peer(memory.as_fd())
    }

    /// Maps the memory that the caller has made.
    pub(super) fn memory_of_peer(descriptor: BorrowedFd<'_>) -> io::Result<Region> {
        let memory = Region::of_peer(descriptor, MEMORY_LEN)?;
        if memory.len() == MEMORY_LEN { Ok(memory) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// One end of a new queue pair.
    ///
    /// # Panics
    ///
    /// If the memory is of another length.
    pub(super) fn new(memory: Region, is_caller: bool, bell: Bell) -> Self {
        assert_eq!(memory.len(), MEMORY_LEN);
        let side = usize::from(!is_caller);
        let (filled, told, emptied) = (0, 0, 0);
        let (theirs, read, returned) = (0, 0, 0);
        let is_sealed = false;
        Self { memory, side, bell, filled, told, emptied, theirs, read, returned, is_sealed }
    }

    /// How many more slots can be filled, as far as we know.
    fn room(&self) -> usize {
        SLOTS - self.filled.wrapping_sub(self.emptied)
    }

    /// Whether a message of `len` bytes fits. Looks at what the peer has emptied only if it must.
    pub(super) fn has_room(&mut self, len: usize) -> Result<bool, Nonsense> {
        let slots = slots_for(len);
        if self.room() >= slots {
            return Ok(true);
        }
        let emptied = self.word(1 - self.side, HEAD).load(Ordering::Acquire);
        // Slots that we have not even told the peer of cannot be empty.
        if self.told.wrapping_sub(emptied) > self.told.wrapping_sub(self.emptied) {
            return Err(Nonsense);
        }
        self.emptied = emptied;
        Ok(self.room() >= slots)
    }

    /// Fills slots with a message. The peer is told of it by the next `tell`.
    ///
    /// # Panics
    ///
    /// If there is no room, or if the message is longer than any.
    pub(super) fn push(&mut self, message: &[u8]) {
        let slots = slots_for(message.len());
        assert!(slots <= self.room() && message.len() <= LONG_MESSAGE_MAX);
        let start = self.filled % SLOTS * SLOT;
        let base = self.slots(self.side);
        self.memory.word(base + start).store(message.len(), Ordering::Relaxed);
        // The rest of the last word belongs to the message, too: it costs less to write all of it.
        let mut padded = [0; MESSAGE_LEN.next_multiple_of(WORD)];
        let bytes = if message.len() == MESSAGE_LEN {
            padded[..MESSAGE_LEN].copy_from_slice(message);
            &padded[..]
        } else {
            message
        };
        let at = (start + WORD) % BYTES;
        let (first, rest) = bytes.split_at(bytes.len().min(BYTES - at));
        self.memory.copy_in(base + at, first);
        self.memory.copy_in(base, rest);
        self.filled = self.filled.wrapping_add(slots);
    }

    /// Tells the peer of what was pushed, and wakes it if it sleeps.
    pub(super) fn tell(&mut self) {
        if self.told != self.filled {
            self.told = self.filled;
            self.word(self.side, TAIL).store(self.filled, Ordering::Release);
            self.wake_for(nap::NEWS);
        }
    }

    /// Takes the next message.
    pub(super) fn pop(&mut self) -> Result<Option<Received>, Nonsense> {
        if !self.has_message()? {
            return Ok(None);
        }
        let base = self.slots(1 - self.side);
        let start = self.read % SLOTS * SLOT;
        let len = self.memory.word(base + start).load(Ordering::Relaxed);
        let is_message = (MESSAGE_LEN..=LONG_MESSAGE_MAX).contains(&len);
        if !is_message || slots_for(len) > self.theirs.wrapping_sub(self.read) {
            return Err(Nonsense);
        }
        let at = (start + WORD) % BYTES;
        let take = |out: &mut [u8]| {
            let until_end = out.len().min(BYTES - at);
            let (first, rest) = out.split_at_mut(until_end);
            self.memory.copy_out(base + at, first);
            self.memory.copy_out(base, rest);
        };
        let message = if len == MESSAGE_LEN {
            let mut message = [0; MESSAGE_LEN];
            take(&mut message);
            Received::Short(message)
        } else {
            let mut message = vec![0; len];
            take(&mut message);
            Received::Long(message.into())
        };
        self.read = self.read.wrapping_add(slots_for(len));
        Ok(Some(message))
    }

    /// Whether a message has come.
    pub(super) fn has_message(&mut self) -> Result<bool, Nonsense> {
        if self.read == self.theirs && !self.is_sealed {
            self.look()?;
        }
        Ok(self.read != self.theirs)
    }

    /// What has come until now can still be taken, but nothing else.
    pub(super) fn seal(&mut self) -> Result<(), Nonsense> {
        if !std::mem::replace(&mut self.is_sealed, true) {
            self.look()?;
        }
        Ok(())
    }

    /// Looks how many slots the peer has filled.
    fn look(&mut self) -> Result<(), Nonsense> {
        let theirs = self.word(1 - self.side, TAIL).load(Ordering::Acquire);
        if theirs.wrapping_sub(self.returned) > SLOTS
            || theirs.wrapping_sub(self.read) > theirs.wrapping_sub(self.returned)
        {
            return Err(Nonsense);
        }
        self.theirs = theirs;
        Ok(())
    }

    /// Gives the slots that were read back to the peer, and wakes it if it waits for them.
    pub(super) fn give_back(&mut self) {
        if self.returned != self.read {
            self.returned = self.read;
            self.word(self.side, HEAD).store(self.read, Ordering::Release);
            self.wake_for(nap::ROOM);
        }
    }

    /// What the peer says of itself. Whatever it sent before it said so can be popped.
    pub(super) fn state_of_peer(&self) -> Result<State, Nonsense> {
        match self.word(1 - self.side, STATE).load(Ordering::Acquire) {
            0 => Ok(State::Fine),
            1 => Ok(State::Left),
            2 => Ok(State::Refused),
            3 => Ok(State::Violated),
            _ => Err(Nonsense),
        }
    }

    /// Says something of ourselves, and wakes the peer if it sleeps.
    pub(super) fn say(&self, state: State) {
        self.word(self.side, STATE).store(state as usize, Ordering::Release);
        self.wake_for(nap::NEWS);
    }

    /// Says that we are about to sleep: the peer rings the bell when there is something. Call
    /// [`nap::before_last_look`] and then `has_news` before sleeping.
    pub(super) fn announce_sleep(&self, wants_room: bool) {
        let wanted = if wants_room { nap::NEWS | nap::ROOM } else { nap::NEWS };
        nap::announce(self.sleep_word(self.side), wanted);
    }

    /// Whether something is there that we have not seen. `state` is what we know of the peer.
    pub(super) fn has_news(&self, wants_room: bool, state: State) -> bool {
        let theirs = |what| self.word(1 - self.side, what).load(Ordering::Acquire);
        theirs(TAIL) != self.read
            || theirs(STATE) != state as usize
            || (wants_room && theirs(HEAD) != self.emptied)
    }

    /// We are awake: the peer need not ring the bell.
    pub(super) fn awake(&self) {
        nap::awake(self.sleep_word(self.side));
    }

    /// Readable when the peer has woken us.
    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.descriptor()
    }

    /// Silences the bell. Returns false if it will never ring again, as the peer has gone.
    pub(super) fn silence(&self) -> bool {
        self.bell.silence()
    }

    fn wake_for(&self, what: usize) {
        if nap::must_wake(self.sleep_word(1 - self.side), what) {
            self.bell.ring();
        }
    }

    /// A word that one side writes.
    fn word(&self, side: usize, what: usize) -> &AtomicUsize {
        self.memory.word(side * 2 * LINE + what * WORD)
    }

    /// The word in which one side says that it sleeps, and the other that it need not any more.
    fn sleep_word(&self, side: usize) -> &AtomicUsize {
        self.memory.word(side * 2 * LINE + LINE)
    }

    /// Where the slots begin that one side fills.
    fn slots(&self, side: usize) -> usize {
        FIRST_SLOT + side * BYTES
    }
}

/// Slots that a message of `len` bytes takes.
const fn slots_for(len: usize) -> usize {
    (WORD + len).div_ceil(SLOT)
}

const TAIL: usize = 0;
const HEAD: usize = 1;
const STATE: usize = 2;
const WORD: usize = size_of::<usize>();
/// What processors share between them at once.
const LINE: usize = 64;
/// Bytes of a slot.
const SLOT: usize = 64;
/// Slots in each direction; a divisor of what a counter of them can hold.
const SLOTS: usize = 512;
const _: () = assert!(SLOTS.is_power_of_two() && slots_for(LONG_MESSAGE_MAX) <= SLOTS);
const _: () = assert!(slots_for(MESSAGE_LEN) == 1);
/// Bytes of the slots in each direction.
const BYTES: usize = SLOTS * SLOT;
const FIRST_SLOT: usize = 4_096;
const MEMORY_LEN: usize = FIRST_SLOT + 2 * BYTES;
