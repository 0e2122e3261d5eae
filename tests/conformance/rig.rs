//! Two connected NICs of some backend, and a witness to everything their fabrics say.
//!
//! The witness holds every backend to what can be checked at any time: requests end once and in
//! posting order, nothing is done after something was flushed, nothing is received after `Broke`.
//! The tests in `promises` ask for the rest.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use smcr_memory::{Lease, Region, SendPool};
use smcr_proto::{Instant, Rkey};
use smcr_rnic::dice::Dice;
use smcr_rnic::{
    Cause, Completion, Domain, Fabric, Message, Opening, QpId, Registration, Rnic, Status, Tag,
    Work,
};

/// What a backend must bring to be tested. Ten lines each; see the root of this suite.
pub trait Harness: Sized {
    /// Its NICs.
    type Rnic: Rnic<Opening: Opening<Qp: Send>>;
    /// Its fabrics, which take the queue pairs of its NICs.
    type Fabric: Fabric<Qp = <<Self::Rnic as Rnic>::Opening as Opening>::Qp>;

    /// Two NICs that reach each other.
    fn new(seed: u64) -> (Self, [(Self::Rnic, Self::Fabric); 2]);

    /// The present.
    fn now(&self) -> Instant;

    /// Nothing can be done: lets time pass until `until`, the earliest instant that a fabric named,
    /// or until the network has something.
    fn wait(&mut self, until: Option<Instant>);
}

/// Client or server, or whatever the test means by the first and the second.
pub type SideIndex = usize;

/// Two NICs and what they have said.
pub struct Rig<H: Harness> {
    harness: H,
    pub sides: [Side<H>; 2],
    pub dice: Dice,
}

/// One NIC, its send memory, and its witness.
pub struct Side<H: Harness> {
    pub rnic: H::Rnic,
    pub fabric: H::Fabric,
    pub pool: SendPool,
    pub ends: BTreeMap<QpId, End>,
    out: Vec<Completion>,
    next_tag: u64,
}

/// What is known about one end of a queue pair.
#[derive(Debug, Default)]
pub struct End {
    /// Posted and not ended, oldest first; true for writes.
    posted: VecDeque<(Tag, bool)>,
    pub done: u64,
    pub flushed: u64,
    pub received: u64,
    pub broke: Option<Cause>,
    pub released: bool,
}

/// A region that the peer may write.
pub struct Window {
    pub region: Region,
    pub registration: Registration,
}

impl Window {
    /// The key, as the peer is told it.
    pub fn rkey(&self) -> Rkey {
        self.registration.rkey
    }

    /// The address `at` bytes into the region, as the peer is told it.
    pub fn address(&self, at: usize) -> u64 {
        self.registration.address + at as u64
    }

    /// `len` bytes from `at`.
    pub fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.region.copy_out(at, &mut out);
        out
    }
}

impl<H: Harness> Rig<H> {
    pub fn new(seed: u64) -> Self {
        let (harness, nics) = H::new(seed);
        let sides = nics.map(|(rnic, fabric)| Side {
            rnic,
            fabric,
            pool: SendPool::new(Region::new(CHUNKS * CHUNK_BYTES as usize).unwrap(), CHUNK_BYTES),
            ends: BTreeMap::new(),
            out: Vec::with_capacity(64),
            next_tag: 0,
        });
        Self { harness, sides, dice: Dice::new(seed) }
    }

    /// The present.
    pub fn now(&self) -> Instant {
        self.harness.now()
    }

    /// A domain on each side.
    pub fn domains(&mut self) -> [Domain; 2] {
        self.sides.each_mut().map(|side| side.rnic.open_domain().unwrap())
    }

    /// A connected queue pair, as either side names it.
    pub fn connect(&mut self, domains: [Domain; 2]) -> [QpId; 2] {
        let now = self.harness.now();
        let [a, b] = &mut self.sides;
        let first = a.rnic.open(domains[0]).unwrap();
        let second = b.rnic.open(domains[1]).unwrap();
        let (address_a, address_b) = (first.address(), second.address());
        let qps = [first.connect(address_b).unwrap(), second.connect(address_a).unwrap()];
        let [qp_a, qp_b] = qps;
        [a.adopt(now, qp_a), b.adopt(now, qp_b)]
    }

    /// A region on `side` that peers of `domain` may write.
    pub fn window(&mut self, side: SideIndex, domain: Domain, len: usize) -> Window {
        let region = Region::new(len).unwrap();
        let registration = self.sides[side].rnic.register(domain, &region).unwrap();
        Window { region, registration }
    }

    /// Releases one end.
    pub fn release(&mut self, side: SideIndex, qp: QpId) {
        let now = self.harness.now();
        self.sides[side].fabric.release(now, qp);
        self.sides[side].end(qp).released = true;
    }

    /// One turn of both pollers, in random order. Returns what was received, by side.
    ///
    /// When neither poller has anything to do, time passes.
    #[must_use = "what was received is told once"]
    pub fn turn(&mut self) -> Vec<(SideIndex, QpId, Message)> {
        let first = self.dice.index(2);
        let (mut received, mut moved) = (Vec::new(), false);
        for side in [first, 1 - first] {
            if self.dice.index(4) == 0 {
                continue; // A poller may be late.
            }
            let now = self.harness.now();
            let messages = self.sides[side].poll(now, &mut moved);
            received.extend(messages.into_iter().map(|(qp, message)| (side, qp, message)));
            self.sides[side].fabric.transmit(now);
        }
        if !moved {
            let now = self.harness.now();
            let [a, b] = &mut self.sides;
            let until = [a.fabric.prepare_sleep(now), b.fabric.prepare_sleep(now)];
            self.harness.wait(until.into_iter().flatten().min());
        }
        received
    }

    /// Turns until `done`, and returns what was received.
    ///
    /// # Panics
    ///
    /// If that takes a minute of the harness' time: promise 6, no stall.
    pub fn run_until(
        &mut self,
        what: &str,
        mut done: impl FnMut(&mut Self) -> bool,
    ) -> Vec<(SideIndex, QpId, Message)> {
        let deadline = self.harness.now() + PATIENCE;
        let mut received = Vec::new();
        while !done(self) {
            received.extend(self.turn());
            assert!(self.harness.now() < deadline, "stalled: {what}");
        }
        received
    }

    /// Turns for as long as `time`.
    pub fn run_for(&mut self, time: Duration) -> Vec<(SideIndex, QpId, Message)> {
        let end = self.harness.now() + time;
        let mut received = Vec::new();
        while self.harness.now() < end {
            received.extend(self.turn());
            self.harness.wait(Some(end));
        }
        received
    }

    /// Turns until everything posted on `side` has ended and all leases are home.
    pub fn settle(&mut self, side: SideIndex) -> Vec<(SideIndex, QpId, Message)> {
        self.run_until("everything posted ends", |rig| rig.sides[side].outstanding() == 0)
    }
}

impl<H: Harness> Side<H> {
    pub fn adopt(&mut self, now: Instant, qp: <H::Fabric as Fabric>::Qp) -> QpId {
        let qp = self.fabric.adopt(now, qp);
        assert!(self.ends.insert(qp, End::default()).is_none(), "{qp:?} was used before");
        qp
    }

    pub fn end(&mut self, qp: QpId) -> &mut End {
        self.ends.get_mut(&qp).unwrap()
    }

    /// Requests that have not ended.
    pub fn outstanding(&self) -> usize {
        self.ends.values().map(|end| end.posted.len()).sum()
    }

    /// Lends `bytes` from the pool, if it has that much in one piece now.
    pub fn lend(&mut self, bytes: &[u8]) -> Option<Lease> {
        let max = u32::try_from(bytes.len()).unwrap();
        let filled = self.pool.fill(max, |room| {
            if room.len() < bytes.len() {
                return Err(());
            }
            room.copy_in(bytes);
            Ok(bytes.len())
        });
        filled?.ok()?.lease
    }

    /// A write, marked.
    pub fn write(&mut self, lease: Lease, rkey: Rkey, address: u64) -> Work {
        Work::Write { lease, rkey, address, tag: self.tag() }
    }

    /// A message, marked.
    pub fn send(&mut self, message: Message) -> Work {
        Work::Send { message, tag: self.tag() }
    }

    /// Posts, and remembers what must end in which order.
    pub fn post(&mut self, qp: QpId, mut work: Vec<Work>) {
        let room = self.fabric.room(qp);
        let marks: Vec<_> = work.iter().map(mark).collect();
        self.fabric.post(qp, &mut work);
        assert!(work.is_empty(), "post empties its argument");
        assert_eq!(self.fabric.room(qp), room - marks.len(), "what was posted takes room");
        self.end(qp).posted.extend(marks);
    }

    /// Polls once and judges every completion.
    fn poll(&mut self, now: Instant, moved: &mut bool) -> Vec<(QpId, Message)> {
        let capacity = self.out.capacity();
        self.fabric.poll(now, &mut self.out);
        assert_eq!(self.out.capacity(), capacity, "poll does not grow its argument");
        *moved |= !self.out.is_empty();
        let mut received = Vec::new();
        for completion in self.out.drain(..) {
            match completion {
                Completion::Wrote { qp, lease, tag, status } => {
                    self.pool.take_back(lease);
                    self.ends.get_mut(&qp).unwrap().ended((tag, true), status);
                }
                Completion::Sent { qp, tag, status } => {
                    self.ends.get_mut(&qp).unwrap().ended((tag, false), status);
                }
                Completion::Received { qp, message } => {
                    let end = self.ends.get_mut(&qp).unwrap();
                    assert!(!end.released, "received after release");
                    assert_eq!(end.broke, None, "received after Broke");
                    end.received += 1;
                    received.push((qp, message));
                }
                Completion::Broke { qp, cause } => {
                    let end = self.ends.get_mut(&qp).unwrap();
                    assert_eq!(end.broke, None, "Broke comes once");
                    assert_eq!(end.flushed, 0, "Broke comes before what was flushed");
                    end.broke = Some(cause);
                }
            }
        }
        received
    }

    fn tag(&mut self) -> Tag {
        self.next_tag += 1;
        Tag(self.next_tag)
    }
}

impl End {
    fn ended(&mut self, ended: (Tag, bool), status: Status) {
        assert_eq!(self.posted.pop_front(), Some(ended), "requests end once and in order");
        match status {
            Status::Done => {
                assert_eq!(self.flushed, 0, "nothing is done after something was flushed");
                self.done += 1;
            }
            Status::Flushed => {
                assert!(self.broke.is_some() || self.released, "flushed for no reason");
                self.flushed += 1;
            }
        }
    }
}

fn mark(work: &Work) -> (Tag, bool) {
    match work {
        Work::Write { tag, .. } => (*tag, true),
        Work::Send { tag, .. } => (*tag, false),
    }
}

/// Largest single write of the suite, and the size of a chunk of send memory.
pub const CHUNK_BYTES: u32 = 65_536;
/// Chunks of send memory a side has.
const CHUNKS: usize = 256;
/// After that long without an end something has stalled.
const PATIENCE: Duration = Duration::from_secs(60);
