//! The soft RNIC over UDP sockets of the kernel, from which packets get lost, come twice or
//! overtake each other before it sees them.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU8, Ordering};

use smcgate_tests::payload;
use smcr_proto::Instant;
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::roce::udp::{self, Config, Place, Udp};
use smcr_rnic::roce::{self, Ecn, Run, Sent, Train, Wire};
use smcr_rnic::{Fabric, MESSAGE_LEN};

use crate::RoceOverUdp;
use crate::rig::{CHUNK_BYTES, Harness, Rig};

/// Both ends lose `LOSS` packets in a million that they receive; as many as `OTHER` come twice, and
/// as many overtake the one before them.
pub(crate) struct FaultyUdp<const LOSS: u32, const OTHER: u32>;

/// A socket with faults.
pub(crate) struct Faulty {
    wire: Udp,
    dice: Dice,
    loss: Chance,
    other: Chance,
    /// The packets of the last burst that are left, as they are left.
    bytes: Vec<u8>,
    packets: Vec<(SocketAddr, Range<usize>)>,
}

impl Wire for Faulty {
    fn receive(&mut self, now: Instant) -> usize {
        self.bytes.clear();
        self.packets.clear();
        for train in 0..self.wire.receive(now) {
            let train = self.wire.train(train);
            for packet in train.bytes.chunks(train.segment_len) {
                if self.dice.roll(self.loss) {
                    continue;
                }
                let begin = self.bytes.len();
                self.bytes.extend_from_slice(packet);
                let left = (train.source, begin..self.bytes.len());
                let at = self.packets.len();
                if self.dice.roll(self.other) {
                    self.packets.push(left.clone());
                }
                let overtakes = self.dice.roll(self.other);
                self.packets.insert(if overtakes { at.saturating_sub(1) } else { at }, left);
            }
        }
        self.packets.len()
    }

    fn train(&self, index: usize) -> Train<'_> {
        let (source, range) = &self.packets[index];
        let bytes = &self.bytes[range.clone()];
        Train {
            source: *source,
            bytes,
            segment_len: bytes.len(),
            ecn: Ecn::NotCapable,
            identification: None,
        }
    }

    fn send(&mut self, now: Instant, bytes: &[u8], runs: &[Run]) -> Sent {
        self.wire.send(now, bytes, runs)
    }

    fn segments_max(&self) -> usize {
        self.wire.segments_max()
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.wire.event_descriptor()
    }
}

impl<const LOSS: u32, const OTHER: u32> Harness for FaultyUdp<LOSS, OTHER> {
    type Rnic = roce::Rnic;
    type Fabric = roce::Fabric<Faulty>;
    const CUTS_WRITES: bool = true;

    fn new(seed: u64) -> (Self, [(roce::Rnic, roce::Fabric<Faulty>); 2]) {
        // Tests run at the same time, and each needs addresses of its own.
        static NETWORKS: AtomicU8 = AtomicU8::new(0);
        let network = NETWORKS.fetch_add(1, Ordering::Relaxed);
        let nics = [1, 2].map(|host| {
            let place = Place::Address(Ipv4Addr::new(127, 21, network, host).into());
            let (setup, wire) = udp::parts(&Config::on(place), 1).unwrap().remove(0);
            let faulty = Faulty {
                wire,
                dice: Dice::new(seed ^ u64::from(host)),
                loss: Chance(LOSS),
                other: Chance(OTHER),
                bytes: Vec::new(),
                packets: Vec::new(),
            };
            roce::join(setup, faulty)
        });
        (Self, nics)
    }

    fn now(&self) -> Instant {
        RoceOverUdp.now()
    }

    fn wait(&mut self, until: Option<Instant>) {
        RoceOverUdp.wait(until);
    }
}

/// How fast a stream of writes is, by faults: printed, not judged, because it depends on the
/// machine. What is judged is that every byte arrives.
#[test]
fn faults_cost_throughput_and_no_bytes() {
    println!("lost | twice, and overtaking | Gbit/s | sent again, of a million");
    stream::<0, 0>();
    stream::<100, 0>();
    stream::<1_000, 0>();
    stream::<10_000, 0>();
    stream::<0, 100>();
    stream::<0, 10_000>();
    stream::<10_000, 10_000>();
}

/// Writes `STREAM_BYTES`, piece by piece, and prints a line.
fn stream<const LOSS: u32, const OTHER: u32>() {
    let mut rig = Rig::<FaultyUdp<LOSS, OTHER>>::new(7);
    let domains = rig.domains();
    let qps = rig.connect(domains);
    let window = rig.window(1, domains[1], SLOTS * CHUNK_BYTES as usize);
    let pieces: Vec<_> = (0..SLOTS as u64).map(|n| payload(n, CHUNK_BYTES as usize)).collect();
    let (mut sent, mut received, begun) = (0, 0, rig.now());
    while received < STREAM_BYTES / CHUNK_BYTES as usize {
        while sent - received < SLOTS && sent < STREAM_BYTES / CHUNK_BYTES as usize {
            let (side, slot) = (&mut rig.sides[0], sent % SLOTS);
            let at = window.address(slot * CHUNK_BYTES as usize);
            // The next time round, the same place gets other bytes.
            let piece = &pieces[(sent + sent / SLOTS) % SLOTS];
            let Some(mut work) = side.try_write(piece, window.rkey(), at) else { break };
            if side.fabric.room(qps[0]) <= work.len() {
                side.withdraw(work);
                break;
            }
            let mut message = [0; MESSAGE_LEN];
            message[..8].copy_from_slice(&(sent as u64).to_be_bytes());
            work.push(side.send(message));
            side.post(qps[0], work);
            sent += 1;
        }
        for (_, _, message) in rig.turn() {
            assert_eq!(message[..8], (received as u64).to_be_bytes(), "once and in order");
            let at = received % SLOTS * CHUNK_BYTES as usize;
            let expected = &pieces[(received + received / SLOTS) % SLOTS];
            assert!(window.bytes(at, CHUNK_BYTES as usize) == *expected, "piece {received}");
            received += 1;
        }
    }
    let elapsed = rig.now().since(begun).as_secs_f64();
    let gbit_per_s = STREAM_BYTES as f64 * 8.0 / elapsed / 1e9;
    let counters = rig.sides[0].fabric.counters();
    let again = 1e6 * counters.retransmits as f64 / counters.packets_out as f64;
    let percent = |ppm: u32| f64::from(ppm) / 1e4;
    println!("{:.2} % | {:.2} % | {gbit_per_s:.2} | {again:.0}", percent(LOSS), percent(OTHER));
    rig.settle(0);
}

/// How many pieces may be on their way.
const SLOTS: usize = 8;
const STREAM_BYTES: usize = 128 << 20;
