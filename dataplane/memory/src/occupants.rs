//! Who writes to the pages of a region, so that pages go only while nobody else can need them.
//!
//! Memory of a dormant connection can be given back to the host, but peers may write to it at
//! any time, and what they write must not be lost. So a region knows its occupants: how many
//! *placers* carry out the writes of peers in it, and how many NICs have *pinned* its pages to
//! write to them themselves. A placer that is the only occupant places nothing while it gives pages
//! back, and whoever comes meanwhile waits until it has done so. That is the control thread, which
//! registers memory. It waits as long as a short system call of a poller takes; longer, if the
//! poller is kept from its core just then.
//!
//! This is Dekker's algorithm. Each of the two first says what it is about to do, and then looks
//! for the other. As there is a fence between, at least one of them sees the other.

use crate::sync::{AtomicU32, Ordering, fence, yield_now};

/// The occupants of a region.
#[derive(Debug, Default)]
pub(crate) struct Occupants {
    pins: AtomicU32,
    /// How often it was pinned so far. Nobody counts the bytes that came while it was, so after
    /// that nobody can know that all of them were announced.
    pinned: AtomicU32,
    placers: AtomicU32,
    /// How many look, at this moment, whether they are alone, or act upon it.
    clearing: AtomicU32,
}

impl Occupants {
    /// One more NIC has pinned the pages. When this returns, no placer gives pages back any more.
    pub(crate) fn pin(&self) {
        enter(&self.pins);
        enter(&self.pinned);
        self.await_clearing();
    }

    /// A NIC has let go of the pages.
    pub(crate) fn unpin(&self) {
        // What it did with them happens before anybody gives them back.
        leave(&self.pins);
    }

    /// Whether a NIC has pinned the pages.
    pub(crate) fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::Acquire) > 0
    }

    /// One more placer. When this returns, no other placer takes itself for the only one.
    pub(crate) fn admit(&self) {
        enter(&self.placers);
        self.await_clearing();
    }

    /// A placer has placed its last byte.
    pub(crate) fn dismiss(&self) {
        leave(&self.placers);
    }

    /// Calls `clear` if the caller, which is a placer, is the only one, and nobody has ever pinned
    /// the pages. Nobody else comes meanwhile.
    pub(crate) fn alone(&self, clear: impl FnOnce() -> bool) -> bool {
        enter(&self.clearing);
        fence(Ordering::SeqCst);
        // Acquire: what a placer did that has left is seen now.
        let alone =
            self.placers.load(Ordering::Acquire) == 1 && self.pinned.load(Ordering::Acquire) == 0;
        let cleared = alone && clear();
        leave(&self.clearing);
        cleared
    }

    fn await_clearing(&self) {
        fence(Ordering::SeqCst);
        // Acquire: the pages are gone before the newcomer writes to new ones.
        while self.clearing.load(Ordering::Acquire) > 0 {
            yield_now();
        }
    }
}

fn enter(count: &AtomicU32) {
    let before = count.fetch_add(1, Ordering::Relaxed);
    assert!(before < u32::MAX, "few NICs share a region");
}

fn leave(count: &AtomicU32) {
    let before = count.fetch_sub(1, Ordering::Release);
    assert!(before > 0, "each is counted");
}
