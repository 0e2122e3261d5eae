//! The state that the two halves of a NIC share: queues, a counter and a bell, but no lock.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use smcr_memory::Placer;
use smcr_os::carrier::Link;
use smcr_proto::{Gid, Qpn, Rkey};

use super::{KEYS_MAX, QUEUE_PAIRS_MAX};
use crate::queue::Queue;
use crate::{Domain, Suspicion};

/// Connects the control thread's half and the poller's half.
#[derive(Debug)]
pub(super) struct Shared {
    /// Key changes, from the control thread to the poller. The queue never overflows: a key is
    /// counted in `keys` until the poller has removed it, and has two entries at most.
    key_changes: Queue<KeyUpdate>,
    /// How many keys the poller has, including those whose opening is still queued.
    keys: AtomicUsize,
    /// Numbers of destroyed queue pairs, from the poller to the control thread. The queue never
    /// overflows: at most `QUEUE_PAIRS_MAX` numbers are in use, and each is returned once.
    retired: Queue<Qpn>,
    /// Which queue pairs somebody attacks, from the poller to the control thread. When it is full,
    /// the next report of the same queue pair has the sum.
    suspicions: Queue<Suspicion>,
    /// The state of the wire when the poller last looked: the position of it in `LINKS`.
    link: AtomicUsize,
    bell: Bell,
}

/// How the poller says to the control thread that there is an event.
#[derive(Debug)]
struct Bell {
    /// How often it rang.
    rings: AtomicU64,
    /// Readable since then. Where there are no descriptors left, events wait until they are asked
    /// for.
    descriptor: Option<OwnedFd>,
}

impl Bell {
    fn ring(&self) {
        if let Some(descriptor) = &self.descriptor {
            // It is full only if nobody listens.
            let _ = rustix::io::write(descriptor, &1_u64.to_ne_bytes());
        }
        // Counted after that: whoever has heard the last ring leaves nothing to read behind.
        self.rings.fetch_add(1, Ordering::Release);
    }

    /// Makes the descriptor silent, unless all that rang was heard before. That is far more common,
    /// and costs no system call.
    fn hear(&self, heard: &mut u64) {
        let rings = self.rings.load(Ordering::Acquire);
        if std::mem::replace(heard, rings) != rings
            && let Some(descriptor) = &self.descriptor
        {
            let _ = rustix::io::read(descriptor, &mut [0_u8; 8]);
        }
    }
}

/// A change to the poller's table of keys.
#[derive(Debug)]
pub(super) enum KeyUpdate {
    /// A region was registered.
    Open {
        /// Its key.
        rkey: Rkey,
        /// The domain whose queue pairs may use the key.
        domain: Domain,
        /// Writes to the region.
        placer: Placer,
        /// What the peer is told to be the address of its first byte.
        address: u64,
    },
    /// The region of this key was deregistered.
    Close(Rkey),
}

impl Shared {
    /// Creates empty queues.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            key_changes: Queue::new(2 * KEYS_MAX),
            keys: AtomicUsize::new(0),
            retired: Queue::new(QUEUE_PAIRS_MAX as usize),
            suspicions: Queue::new(SUSPICIONS_MAX),
            link: AtomicUsize::new(0),
            bell: Bell {
                rings: AtomicU64::new(0),
                descriptor: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).ok(),
            },
        })
    }

    /// Counts one more key. Returns false if there are too many. Only the control thread adds keys,
    /// so the count cannot rise between the check and the addition.
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

    /// Queues a change for the poller.
    pub(super) fn push(&self, change: KeyUpdate) {
        assert!(self.key_changes.push(change).is_ok(), "two entries for each counted key fit");
    }

    /// Takes the next change that the control thread queued.
    pub(super) fn pop(&self) -> Option<KeyUpdate> {
        self.key_changes.pop()
    }

    /// Takes a number that can be assigned again.
    pub(super) fn pop_retired(&self) -> Option<Qpn> {
        self.retired.pop()
    }

    /// Says whether the wire can carry packets now. Called by the poller.
    pub(super) fn note_link(&self, link: Link) {
        if self.link() != link {
            let place = LINKS.iter().position(|one| *one == link).expect("all are listed");
            self.link.store(place, Ordering::Release);
            self.bell.ring();
        }
    }

    /// The state of the wire, as far as the poller has noticed.
    pub(super) fn link(&self) -> Link {
        LINKS[self.link.load(Ordering::Acquire)]
    }

    /// Readable while there may be a report, or news of the wire.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.bell.descriptor.as_ref().map(AsFd::as_fd)
    }

    /// The control thread is about to look at everything that the poller may have said. `heard` is
    /// its own: how often the bell had rung when it looked last.
    pub(super) fn hear(&self, heard: &mut u64) {
        self.bell.hear(heard);
    }

    /// Takes the next report that a queue pair is attacked.
    pub(super) fn pop_suspicion(&self) -> Option<Suspicion> {
        self.suspicions.pop()
    }
}

/// Reserves the number of a queue pair. Dropping it, on either thread, makes the number free again.
#[derive(Debug)]
pub(super) struct Ticket {
    qpn: Qpn,
    shared: Arc<Shared>,
}

impl Ticket {
    /// Reserves `qpn`, which must be free. Only the control thread does this.
    pub(super) fn new(qpn: Qpn, shared: &Arc<Shared>) -> Self {
        Self { qpn, shared: Arc::clone(shared) }
    }

    /// The number.
    pub(super) fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// Tells the control thread that `packets` packets came from the address of `peer`, which that
    /// peer cannot have sent. Returns false if there is no room.
    pub(super) fn suspect(&self, peer: Gid, packets: u64) -> bool {
        let suspicion = Suspicion { qpn: self.qpn, peer, packets };
        let told = self.shared.suspicions.push(suspicion).is_ok();
        self.shared.bell.ring();
        told
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        assert!(self.shared.retired.push(self.qpn).is_ok(), "all numbers in use fit");
    }
}

/// The most reports that wait for the control thread.
const SUSPICIONS_MAX: usize = 64;
/// The states of a wire.
const LINKS: [Link; 3] = [Link::Up, Link::Down, Link::Gone];
