//! What the two halves of a NIC share: two queues and a count, never a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_queue::ArrayQueue;
use smcr_memory::Region;
use smcr_proto::{Qpn, Rkey};

use super::{KEYS_MAX, QUEUE_PAIRS_MAX};
use crate::Domain;

/// Between the control thread's half and the poller's.
#[derive(Debug)]
pub(super) struct Shared {
    /// Control thread to poller. Never full: a key counts in `keys` until the poller has removed
    /// it, and each key has two entries at most.
    key_changes: ArrayQueue<KeyChange>,
    /// Keys that the poller knows or will know.
    keys: AtomicUsize,
    /// Numbers of queue pairs that are gone. Never full: each number is given out once until it
    /// comes back, and at most `QUEUE_PAIRS_MAX` are out.
    retired: ArrayQueue<Qpn>,
}

/// What happens to a key.
#[derive(Debug)]
pub(super) enum KeyChange {
    /// It opens a region.
    Open {
        /// The key.
        rkey: Rkey,
        /// Whose queue pairs may use it.
        domain: Domain,
        /// What it opens.
        region: Region,
        /// What the peer is told to be the address of its first byte.
        address: u64,
    },
    /// It opens nothing any more.
    Close(Rkey),
}

impl Shared {
    /// Nothing yet.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            key_changes: ArrayQueue::new(2 * KEYS_MAX),
            keys: AtomicUsize::new(0),
            retired: ArrayQueue::new(QUEUE_PAIRS_MAX as usize),
        })
    }

    /// Counts one more key, unless there are too many. Only the control thread adds, so the count
    /// can only fall in between.
    pub(super) fn count_key(&self) -> bool {
        let free = self.keys.load(Ordering::Acquire) < KEYS_MAX;
        if free {
            self.keys.fetch_add(1, Ordering::AcqRel);
        }
        free
    }

    /// The poller has removed a key.
    pub(super) fn uncount_key(&self) {
        let before = self.keys.fetch_sub(1, Ordering::AcqRel);
        assert!(before > 0);
    }

    /// Tells the poller.
    pub(super) fn push(&self, change: KeyChange) {
        assert!(self.key_changes.push(change).is_ok(), "two entries for each counted key fit");
    }

    /// What the control thread told.
    pub(super) fn pop(&self) -> Option<KeyChange> {
        self.key_changes.pop()
    }

    /// A number that can be given out again.
    pub(super) fn pop_retired(&self) -> Option<Qpn> {
        self.retired.pop()
    }
}

/// The number of a queue pair, ours until this is dropped, on whichever thread.
#[derive(Debug)]
pub(super) struct Ticket {
    qpn: Qpn,
    shared: Arc<Shared>,
}

impl Ticket {
    /// The control thread gives out `qpn`, which is not out.
    pub(super) fn new(qpn: Qpn, shared: &Arc<Shared>) -> Self {
        Self { qpn, shared: Arc::clone(shared) }
    }

    /// The number.
    pub(super) fn qpn(&self) -> Qpn {
        self.qpn
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        assert!(self.shared.retired.push(self.qpn).is_ok(), "as many fit as are given out");
    }
}
