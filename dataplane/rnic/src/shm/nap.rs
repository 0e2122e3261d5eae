//! How the two ends of a queue pair agree on who must be woken.
//!
//! Each end has a word in shared memory. Before it sleeps, or stops looking at this queue pair, it
//! says there what it waits for. Whoever has something of that kind for it takes the word back to
//! zero, and wakes it.

use super::sync::{AtomicUsize, Ordering, fence};

/// Waits for news: messages, or another state of the peer.
pub(super) const NEWS: usize = 1;
/// Waits for room in the ring to the peer.
pub(super) const ROOM: usize = 2;

/// Says that the owner of `word` is about to sleep until there is something of `wanted`. It must
/// then call [`before_last_look`], look once more whether there is, and sleep only if not.
pub(super) fn announce(word: &AtomicUsize, wanted: usize) {
    word.store(wanted, Ordering::Relaxed);
}

/// Stands between all announcements of a thread and its last look at what it has announced to
/// sleep over; that in `must_wake` between what there is to see and the look at the announcement.
/// So one of the two sees the other.
pub(super) fn before_last_look() {
    fence(Ordering::SeqCst);
}

/// Whether the owner of `word` must be woken because there now is something of kind `what`. If so,
/// the caller wakes it: nobody else will. Between the two steps the owner may have said that it
/// waits for something else. Then it is woken in vain, as it would not be woken for that any more.
pub(super) fn must_wake(word: &AtomicUsize, what: usize) -> bool {
    fence(Ordering::SeqCst);
    word.load(Ordering::Relaxed) & what != 0 && word.swap(0, Ordering::Relaxed) != 0
}

/// The owner of `word` is awake.
pub(super) fn awake(word: &AtomicUsize) {
    word.store(0, Ordering::Relaxed);
}
