//! Two connected NICs of some backend, and a witness that checks whatever their fabrics report.
//!
//! The witness checks what must hold at any time: requests end once and in posting order, none is
//! done after one was flushed, nothing is received after `Broke`. The tests in `promises` check the
//! rest.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::time::Duration;

use smcr_memory::{Lease, Region, SendPool};
use smcr_proto::{Instant, Rkey};
use smcr_rnic::dice::Dice;
use smcr_rnic::{
    Completion, Domain, Fabric, Message, Messages, Opening, QpError, QpId, Registration, Rnic,
    Status, Tag, Work,
};

/// What a backend must provide to be tested. Ten lines each; see the root of this suite.
pub(crate) trait Harness: Sized {
    /// Its NICs.
    type Rnic: Rnic<Opening: Opening<Qp: Send>>;
    /// Its fabrics, which take the queue pairs of its NICs.
    type Fabric: Fabric<Qp = <<Self::Rnic as Rnic>::Opening as Opening>::Qp>;

    /// Whether it carries a long write in parts, each of which is allowed or refused separately.
    const CUTS_WRITES: bool;

    /// Whether both ends agree on dense packets.
    const DENSE: bool = false;

    /// Whether an end that breaks may lose what it had acknowledged. Promise 3 allows this.
    const LOSES_ON_BREAK: bool = false;

    /// Whether a released queue pair still answers until another thread has come to destroy it.
    const RELEASES_LATER: bool = false;

    /// Two NICs that reach each other.
    fn new(seed: u64) -> (Self, [Nic<Self>; 2]);

    /// The current time.
    fn now(&self) -> Instant;

    /// Called when there is nothing to do. Lets time pass until `until`, the earliest instant that
    /// a fabric named, or until the network has something.
    fn wait(&mut self, until: Option<Instant>);
}

/// Both halves of a NIC.
pub(crate) type Nic<H> = (<H as Harness>::Rnic, <H as Harness>::Fabric);

/// The two sides: client and server, or whatever a test uses them for.
pub(crate) type SideIndex = usize;

/// Two NICs, and what they have reported.
pub(crate) struct Rig<H: Harness> {
    pub(crate) sides: [Side<H>; 2],
    /// Goes after the NICs: it may hold what they need.
    pub(crate) harness: H,
    pub(crate) dice: Dice,
    /// When something last moved, and the turns since then.
    moved: Instant,
    idle_turns: u32,
}

/// One NIC, its send memory, and its witness.
pub(crate) struct Side<H: Harness> {
    pub(crate) rnic: H::Rnic,
    pub(crate) fabric: H::Fabric,
    pub(crate) pool: SendPool,
    pub(crate) ends: BTreeMap<QpId, End>,
    out: Vec<Completion>,
    /// Long messages that came in.
    pub(crate) long: Vec<(QpId, Box<[u8]>)>,
    next_tag: u64,
}

/// What is known about one end of a queue pair.
#[derive(Debug, Default)]
pub(crate) struct End {
    /// Posted and not ended, oldest first; true for writes.
    posted: VecDeque<(Tag, bool)>,
    pub(crate) done: u64,
    pub(crate) flushed: u64,
    pub(crate) received: u64,
    pub(crate) broke: Option<QpError>,
    pub(crate) released: bool,
}

/// A region that the peer may write.
pub(crate) struct Window {
    pub(crate) region: Region,
    pub(crate) registration: Registration,
}

impl Window {
    /// The key, as the peer is told it.
    pub(crate) fn rkey(&self) -> Rkey {
        self.registration.rkey
    }

    /// The address `at` bytes into the region, as the peer is told it.
    pub(crate) fn address(&self, at: usize) -> u64 {
        self.registration.address + at as u64
    }

    /// `len` bytes from `at`.
    pub(crate) fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.region.copy_out(at, &mut out);
        out
    }
}

impl<H: Harness> Rig<H> {
    pub(crate) fn new(seed: u64) -> Self {
        let (harness, nics) = H::new(seed);
        let sides = nics.map(|(mut rnic, fabric)| {
            let memory = Region::new(CHUNKS * CHUNK_BYTES as usize).unwrap();
            rnic.send_from(&memory).unwrap();
            Side {
                rnic,
                fabric,
                pool: SendPool::new(memory, CHUNK_BYTES),
                ends: BTreeMap::new(),
                out: Vec::with_capacity(64),
                long: Vec::new(),
                next_tag: 0,
            }
        });
        let moved = harness.now();
        Self { harness, sides, dice: Dice::new(seed), moved, idle_turns: 0 }
    }

    /// The current time.
    pub(crate) fn now(&self) -> Instant {
        self.harness.now()
    }

    /// A domain on each side.
    pub(crate) fn domains(&mut self) -> [Domain; 2] {
        self.sides.each_mut().map(|side| side.rnic.open_domain().unwrap())
    }

    /// A connected queue pair, as either side names it.
    pub(crate) fn connect(&mut self, domains: [Domain; 2]) -> [QpId; 2] {
        self.connect_for(domains, Messages::Short)
    }

    /// The same, with a choice of the messages that the second side takes.
    pub(crate) fn connect_for(&mut self, domains: [Domain; 2], messages: Messages) -> [QpId; 2] {
        let now = self.harness.now();
        let [a, b] = &mut self.sides;
        let mut first = a.rnic.open(domains[0]).unwrap();
        let mut second = b.rnic.open_for(domains[1], messages).unwrap();
        let (address_a, address_b) = (first.address(), second.address());
        if H::DENSE {
            first.pack_densely();
            second.pack_densely();
        }
        let qps = [first.connect(address_b).unwrap(), second.connect(address_a).unwrap()];
        let [qp_a, qp_b] = qps;
        [a.adopt(now, qp_a), b.adopt(now, qp_b)]
    }

    /// A region on `side` that peers of `domain` may write.
    pub(crate) fn window(&mut self, side: SideIndex, domain: Domain, len: usize) -> Window {
        let backing = self.sides[side].rnic.backing();
        let region = Region::backed_by(backing, len).unwrap();
        let registration = self.sides[side].rnic.register(domain, &region).unwrap();
        Window { region, registration }
    }

    /// Breaks one end.
    pub(crate) fn fail(&mut self, side: SideIndex, qp: QpId) {
        let now = self.harness.now();
        self.sides[side].fabric.fail(now, qp);
    }

    /// Releases one end.
    pub(crate) fn release(&mut self, side: SideIndex, qp: QpId) {
        let now = self.harness.now();
        self.sides[side].fabric.release(now, qp);
        self.sides[side].end(qp).released = true;
    }

    /// One turn of both pollers, in random order. Returns what was received, by side.
    ///
    /// When neither poller has anything to do, time passes.
    ///
    /// # Panics
    ///
    /// If nothing has moved for a long time: promise 6 forbids stalls.
    #[must_use = "what was received is told once"]
    pub(crate) fn turn(&mut self) -> Vec<(SideIndex, QpId, Message)> {
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
        let now = self.harness.now();
        if moved {
            (self.moved, self.idle_turns) = (now, 0);
        } else {
            self.idle_turns += 1;
            let idle = now.since(self.moved);
            assert!(
                idle < PATIENCE && self.idle_turns < IDLE_TURNS_MAX,
                "stalled for {idle:?}: {:#?}",
                self.sides.each_ref().map(|side| &side.ends)
            );
            let [a, b] = &mut self.sides;
            let until = [a.fabric.prepare_sleep(now), b.fabric.prepare_sleep(now)];
            self.harness.wait(until.into_iter().flatten().min());
        }
        received
    }

    /// Takes turns until `done`. Returns what was received.
    pub(crate) fn run_until(
        &mut self,
        mut done: impl FnMut(&mut Self) -> bool,
    ) -> Vec<(SideIndex, QpId, Message)> {
        let mut received = Vec::new();
        while !done(self) {
            received.extend(self.turn());
        }
        received
    }

    /// Takes turns for as long as `time`.
    pub(crate) fn run_for(&mut self, time: Duration) -> Vec<(SideIndex, QpId, Message)> {
        let end = self.harness.now() + time;
        let mut received = Vec::new();
        while self.harness.now() < end {
            received.extend(self.turn());
            (self.moved, self.idle_turns) = (self.harness.now(), 0);
        }
        received
    }

    /// Takes turns until everything posted on `side` has ended and all leases are home.
    pub(crate) fn settle(&mut self, side: SideIndex) -> Vec<(SideIndex, QpId, Message)> {
        self.run_until(|rig| rig.sides[side].outstanding() == 0)
    }
}

impl<H: Harness> Side<H> {
    pub(crate) fn adopt(&mut self, now: Instant, qp: <H::Fabric as Fabric>::Qp) -> QpId {
        let qp = self.fabric.adopt(now, qp);
        assert!(self.ends.insert(qp, End::default()).is_none(), "{qp:?} was used before");
        qp
    }

    pub(crate) fn end(&mut self, qp: QpId) -> &mut End {
        self.ends.get_mut(&qp).unwrap()
    }

    /// Requests that have not ended, on all queue pairs.
    pub(crate) fn outstanding(&self) -> usize {
        self.ends.values().map(|end| end.posted.len()).sum()
    }

    /// Lends `bytes` from the pool, in as many pieces as needed; all or nothing.
    pub(crate) fn lend(&mut self, bytes: &[u8]) -> Option<Vec<Lease>> {
        let (mut leases, mut done) = (Vec::new(), 0);
        while done < bytes.len() {
            let left = &bytes[done..];
            let filled = self.pool.fill(u32::try_from(left.len()).unwrap(), |room| {
                let len = room.len().min(left.len());
                room.copy_in(&left[..len]);
                Ok::<_, Infallible>(len)
            });
            let Some(Ok(filled)) = filled else {
                leases.into_iter().for_each(|lease| self.pool.take_back(lease));
                return None;
            };
            let lease = filled.unwrap();
            done += lease.len() as usize;
            leases.push(lease);
        }
        Some(leases)
    }

    /// Writes of `bytes` from `address` on, marked, if there is send memory.
    pub(crate) fn try_write(
        &mut self,
        bytes: &[u8],
        rkey: Rkey,
        address: u64,
    ) -> Option<Vec<Work>> {
        let mut at = address;
        let leases = self.lend(bytes)?.into_iter();
        let works = leases.map(|lease| {
            let address = at;
            at = at.wrapping_add(u64::from(lease.len()));
            Work::Write { lease, rkey, address, tag: self.tag() }
        });
        Some(works.collect())
    }

    /// One write of `bytes` to `address`, marked, from a pool that has room for it in one piece.
    pub(crate) fn write(&mut self, bytes: &[u8], rkey: Rkey, address: u64) -> Work {
        let mut writes = self.try_write(bytes, rkey, address).expect("send memory");
        assert_eq!(writes.len(), 1, "send memory in one piece");
        writes.remove(0)
    }

    /// A message of any length, marked.
    pub(crate) fn send_long(&mut self, message: Vec<u8>) -> Work {
        Work::SendLong { message: message.into(), tag: self.tag() }
    }

    /// A message, marked.
    pub(crate) fn send(&mut self, message: Message) -> Work {
        Work::Send { message, tag: self.tag() }
    }

    /// Takes back the memory of requests that were not posted.
    pub(crate) fn withdraw(&mut self, work: Vec<Work>) {
        for work in work {
            match work {
                Work::Write { lease, .. } => self.pool.take_back(lease),
                Work::Send { .. } | Work::SendLong { .. } => {}
            }
        }
    }

    /// Posts, and remembers what must end in which order.
    pub(crate) fn post(&mut self, qp: QpId, mut work: Vec<Work>) {
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
                    self.ends.get_mut(&qp).unwrap().heard();
                    received.push((qp, message));
                }
                Completion::ReceivedLong { qp, message } => {
                    self.ends.get_mut(&qp).unwrap().heard();
                    self.long.push((qp, message));
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
    /// Requests that have not ended.
    pub(crate) fn outstanding(&self) -> usize {
        self.posted.len()
    }

    fn heard(&mut self) {
        assert!(!self.released, "received after release");
        assert_eq!(self.broke, None, "received after Broke");
        self.received += 1;
    }

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
        Work::Send { tag, .. } | Work::SendLong { tag, .. } => (*tag, false),
    }
}

/// Largest single write of the suite, and the size of a chunk of send memory.
pub(crate) const CHUNK_BYTES: u32 = 65_536;
/// Chunks of send memory a side has.
const CHUNKS: usize = 256;
/// After this time without any completion, something has stalled.
const PATIENCE: Duration = Duration::from_secs(20);
/// The same in turns, for virtual clocks that may not move.
const IDLE_TURNS_MAX: u32 = 1_000_000;
