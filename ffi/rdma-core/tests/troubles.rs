//! What libibverbs may answer, over one whose devices are in this process.
#![allow(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_core::{
    Access, Body, Channel, CompletionQueue, Context, MemoryRegion, Peer, Plan, ProtectionDomain,
    QueuePair, SendQueue,
};
use rdma_core_fake::Trouble;
use smcr_os::{Exposed, Extent, Lent};

/// Memory that is never given back, and that counts who has let go of it.
struct Memory(Arc<AtomicU32>);

impl Memory {
    fn lend(count: &Arc<AtomicU32>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn extent() -> Extent {
    static BYTES: [AtomicU32; 1_024] = [const { AtomicU32::new(0) }; 1_024];
    Extent { address: BYTES.as_ptr() as u64, len: size_of_val(&BYTES) }
}

// SAFETY: the bytes are those of a static of atomics, which nobody accesses.
unsafe impl Lent for Memory {
    fn extent(&self) -> Extent {
        extent()
    }
}

// SAFETY: the bytes are those of a static of atomics, which nobody accesses.
unsafe impl Exposed for Memory {
    fn extent(&self) -> Extent {
        extent()
    }
}

/// An open device with what a queue pair needs.
struct Rig {
    device: String,
    completions: Arc<CompletionQueue>,
    domain: Arc<ProtectionDomain>,
    /// Memory that the NIC may have.
    held: Arc<AtomicU32>,
}

impl Rig {
    fn new(host: u8) -> Self {
        let device = rdma_core_fake::device([127, 32, 0, host]);
        let context = Context::open(rdma_core_fake::library(), &device).unwrap();
        let channel = Channel::new(&context).unwrap();
        let completions = CompletionQueue::new(&channel, 64).unwrap();
        let domain = ProtectionDomain::new(&context).unwrap();
        Self { device, completions, domain, held: Arc::default() }
    }

    fn memory(&self) -> MemoryRegion {
        let memory = Box::new(Memory::lend(&self.held));
        MemoryRegion::new(&self.domain, memory, Access::Local, extent().address).unwrap()
    }

    fn pair(&self) -> Arc<QueuePair> {
        QueuePair::new(&self.completions, &self.domain, self.memory(), 1, PLAN).unwrap()
    }

    fn held(&self) -> u32 {
        self.held.load(Ordering::Relaxed)
    }

    /// The send queue of a connected queue pair whose peer does not answer, with one write.
    fn writing(&self) -> SendQueue<Memory> {
        let pair = self.pair();
        pair.connect(&PEER).unwrap();
        let mut sends = SendQueue::new(pair);
        let lease = Memory::lend(&self.held);
        sends.push(Body::Write { lease, lkey: 0, rkey: 0, address: 0 }, 1);
        sends
    }
}

/// A driver that fails and names no request may have posted all. Memory that came back then was
/// filled anew while the NIC still read it.
#[test]
fn what_a_driver_may_have_posted_is_held() {
    let rig = Rig::new(1);
    let mut sends = rig.writing();
    rdma_core_fake::trouble(&rig.device, Trouble::DeniesPosts, true);
    assert!(sends.ring().is_err());
    assert!(sends.take_unposted().is_none(), "the NIC may read it");
    drop(sends.close());
    assert!(sends.take_orphan().is_some(), "nobody reads it after the queue pair has ended");
}

/// A kernel that has taken the device away lets nobody destroy anything, and has ended everything.
/// This ended the process.
#[test]
fn a_device_that_was_pulled_out_gives_memory_back() {
    let rig = Rig::new(2);
    let mut sends = rig.writing();
    sends.ring().unwrap();
    rdma_core_fake::trouble(&rig.device, Trouble::Gone, true);
    drop(sends.close());
    assert!(sends.is_destroyed());
    assert!(sends.take_orphan().is_some());
    assert_eq!(rig.held(), 0);
}

/// If the NIC may still have an object, its memory must never be used for anything else.
#[test]
fn memory_of_objects_that_cannot_be_destroyed_is_kept() {
    let rig = Rig::new(3);
    let (region, mut sends) = (rig.memory(), rig.writing());
    sends.ring().unwrap();
    rdma_core_fake::trouble(&rig.device, Trouble::CannotDestroy, true);
    drop(region);
    drop(sends.close());
    assert!(!sends.is_destroyed());
    assert!(sends.take_orphan().is_none());
    drop(sends);
    assert_eq!(rig.held(), 3, "two registrations and a lease");
}

/// Two send queues of one queue pair would each end the other's requests.
#[test]
fn a_queue_pair_has_one_send_queue() {
    let rig = Rig::new(4);
    let pair = rig.pair();
    let _first: SendQueue<Memory> = SendQueue::new(Arc::clone(&pair));
    let second = AssertUnwindSafe(|| drop(SendQueue::<Memory>::new(pair)));
    assert!(catch_unwind(second).is_err());
}

/// The driver of a device would follow pointers into the objects of another.
#[test]
fn objects_of_two_devices_do_not_mix() {
    let (one, other) = (Rig::new(5), Rig::new(6));
    let mixed = |completions: &Rig, memory: &Rig| {
        let (completions, memory) = (Arc::clone(&completions.completions), memory.memory());
        let domain = Arc::clone(&one.domain);
        let make = || drop(QueuePair::new(&completions, &domain, memory, 1, PLAN));
        catch_unwind(AssertUnwindSafe(make)).is_err()
    };
    assert!(mixed(&other, &one), "the completion queue of another device");
    assert!(mixed(&one, &other), "memory of another device");
    assert!(!mixed(&one, &one));
}

/// The drivers of Broadcom and Intel refused every queue pair: they carry fewer bytes.
#[test]
fn requests_carry_as_much_as_the_device_grants() {
    let rig = Rig::new(7);
    for (limit, granted) in [(256, 220), (100, 96), (50, 44), (43, 0)] {
        rdma_core_fake::limit_inline(&rig.device, limit);
        assert_eq!(rig.pair().inline(), granted, "of {limit}");
    }
}

/// What cannot be polled must be an error: it ended the process.
#[test]
fn a_queue_that_cannot_be_polled_is_dead() {
    let rig = Rig::new(8);
    let mut entries = Vec::new();
    assert_eq!(rig.completions.poll(&mut entries), Ok(0));
    rdma_core_fake::trouble(&rig.device, Trouble::CannotBePolled, true);
    assert_eq!(rig.completions.poll(&mut entries), Err(rdma_core::Dead));
    assert!(entries.is_empty());
}

const PLAN: Plan =
    Plan { sends: 8, receives: 8, receive_len: 44, stride: 64, inline: &[220, 96, 44, 0] };
const PEER: Peer = Peer {
    gid: [0; 16],
    number: 0x00ff_fffe,
    their_psn: 0,
    our_psn: 0,
    mtu: 3,
    port: 1,
    gid_index: 1,
    hop_limit: 64,
};
