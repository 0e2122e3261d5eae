//! One direction of traffic on a queue pair: writes of all sizes, messages that announce them, and
//! a reader that checks every byte.

use smcgate_tests::payload;
use smcr_rnic::dice::Dice;
use smcr_rnic::{Fabric, MESSAGE_LEN, Message, QpId};

use crate::rig::{CHUNK_BYTES, Harness, Rig, SideIndex, Window};

/// Messages of one sender, each preceded by the writes it announces.
pub(crate) struct Flow {
    pub(crate) sender: SideIndex,
    /// The queue pair, as sender and receiver name it.
    pub(crate) source: QpId,
    pub(crate) target: QpId,
    window: Window,
    seed: u64,
    sent: u64,
    pub(crate) received: u64,
    pub(crate) bytes: u64,
}

impl Flow {
    /// Traffic from `sender` on the queue pair whose ends are `qps`, into `window` of the other
    /// side, which must be [`WINDOW_BYTES`] long.
    pub(crate) fn new(seed: u64, sender: SideIndex, qps: [QpId; 2], window: Window) -> Self {
        assert_eq!(window.region.len(), WINDOW_BYTES);
        let [source, target] = [qps[sender], qps[1 - sender]];
        Self { sender, source, target, window, seed, sent: 0, received: 0, bytes: 0 }
    }

    /// Posts the next message and its writes, if there are slot, room and send memory for them.
    pub(crate) fn push<H: Harness>(&mut self, rig: &mut Rig<H>) -> bool {
        let side = &mut rig.sides[self.sender];
        let writes = plan(self.seed, self.sent);
        let full = self.sent - self.received == SLOTS;
        // A write may take two pieces of send memory, and the message one request.
        if full || side.fabric.room(self.source) <= 2 * writes.len() {
            return false;
        }
        let (rkey, base) = (self.window.rkey(), slot(self.sent));
        let mut work = Vec::new();
        for write in &writes {
            let bytes = payload(write.seed, write.len);
            match side.try_write(&bytes, rkey, self.window.address(base + write.at)) {
                Some(pieces) => work.extend(pieces),
                None => {
                    side.withdraw(work);
                    return false;
                }
            }
        }
        work.push(side.send(announcement(self.sent)));
        side.post(self.source, work);
        self.sent += 1;
        true
    }

    /// Receives a message: it must be the next one, and the writes that it announces must be there.
    pub(crate) fn pull(&mut self, message: Message) {
        assert_eq!(message, announcement(self.received), "messages come once and in order");
        let base = slot(self.received);
        for write in plan(self.seed, self.received) {
            let seen = self.window.bytes(base + write.at, write.len);
            let wrong = seen.iter().zip(payload(write.seed, write.len)).filter(|(a, b)| **a != *b);
            assert_eq!(wrong.count(), 0, "bytes of {} before message {}", write.len, self.received);
            self.bytes += write.len as u64;
        }
        self.received += 1;
    }

    /// Messages posted.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// Messages that were posted and not yet received.
    pub(crate) fn in_flight(&self) -> u64 {
        self.sent - self.received
    }
}

/// Runs the flows until each has carried `messages`, checking every byte.
pub(crate) fn run<H: Harness>(rig: &mut Rig<H>, flows: &mut [Flow], messages: u64) {
    while flows.iter().any(|flow| flow.received < messages) {
        // Any flow may be starved for a while, by chance.
        let chosen = rig.dice.index(flows.len());
        for flow in flows[chosen..].iter_mut().filter(|flow| flow.sent < messages) {
            while flow.sent < messages && flow.push(rig) {}
        }
        deliver(rig, flows);
    }
    (0..2).for_each(|side| assert!(rig.settle(side).is_empty(), "received more than was sent"));
}

/// One turn. Each message that it receives goes to its flow.
pub(crate) fn deliver<H: Harness>(rig: &mut Rig<H>, flows: &mut [Flow]) {
    for (side, qp, message) in rig.turn() {
        let mut flows = flows.iter_mut();
        let flow = flows.find(|flow| flow.sender != side && flow.target == qp);
        flow.expect("a message of some flow").pull(message);
    }
}

/// One write of a message.
struct Planned {
    at: usize,
    len: usize,
    seed: u64,
}

/// The writes that message `n` announces. Both sides know them from the seed alone.
fn plan(seed: u64, n: u64) -> Vec<Planned> {
    let mut dice = Dice::new(seed.wrapping_mul(1_000_003) ^ n);
    let mut at = 0;
    (0..dice.index(WRITES_MAX + 1))
        .map(|_| {
            let len = match dice.index(4) {
                0 => 1 + dice.index(8),
                1 => 1 + dice.index(5_000),
                2 => 1 + dice.index(CHUNK_BYTES as usize),
                _ => CHUNK_BYTES as usize,
            };
            let planned = Planned { at, len, seed: dice.next_u64() };
            at += len;
            planned
        })
        .collect()
}

fn announcement(n: u64) -> Message {
    let mut message = [0x5a; MESSAGE_LEN];
    message[..8].copy_from_slice(&n.to_be_bytes());
    message[36..].copy_from_slice(&(!n).to_be_bytes());
    message
}

fn slot(n: u64) -> usize {
    usize::try_from(n % SLOTS).unwrap() * WRITES_MAX * CHUNK_BYTES as usize
}

/// How many messages may have bytes that wait at the receiver.
const SLOTS: u64 = 4;
/// The most writes that one message announces.
const WRITES_MAX: usize = 4;
/// Size of the memory that a flow writes to.
pub(crate) const WINDOW_BYTES: usize = 4 * WRITES_MAX * CHUNK_BYTES as usize;
