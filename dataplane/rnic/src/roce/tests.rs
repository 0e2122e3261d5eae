//! Tests of two NICs on one lossy wire and a virtual clock, through the public traits only.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use smcr_memory::{Backing, Lease, Region, SendPool};
use smcr_proto::{Gid, Instant, MacAddress, Mtu, Qpn, Rkey};

use super::lossy::{Lossy, Network, Odds};
use super::*;
use crate::dice::{Chance, Dice};
use crate::{
    Completion, Domain, Fabric as _, Message, Opening as _, Port, QpAddress, QpError, QpId,
    Registration, Rnic as _, Status, Tag, Work,
};

mod dense;
mod fuzz;
mod loopback;
mod marked;
mod path;
mod scenarios;
mod sweep;
mod tapped;

/// One NIC with both of its halves and the objects that the tests use.
struct Node {
    rnic: Rnic,
    fabric: Fabric<Lossy>,
    address: QpAddress,
    domain: Domain,
    pool: SendPool,
    /// The region that the peer may write.
    memory: Region,
    registration: Registration,
    qp: QpId,
    out: Vec<Completion>,
    /// Completions of work requests, without their leases, which went back to the pool.
    done: Vec<(Tag, Status)>,
    received: Vec<Message>,
    broke: Vec<QpError>,
}

/// Two connected nodes.
struct Couple {
    network: Network,
    now: Instant,
    nodes: [Node; 2],
}

const TURN: Duration = Duration::from_micros(5);
const MEMORY: usize = 1 << 20;

fn address(node: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, node + 1], UDP_PORT))
}

/// The path MTU as a host of a test knows it.
type HostPath = fn(IpAddr, IpAddr) -> io::Result<u32>;

/// Creates a NIC whose random numbers all have `bits` set.
fn nic(network: &Network, node: u8, mtu: Mtu, bits: u32) -> (Rnic, Fabric<Lossy>) {
    nic_with(network, (node, bits), mtu, |_, _| Ok(9000))
}

/// Creates a NIC whose host reports `path` as the path MTU to peers.
fn nic_on(network: &Network, mtu: Mtu, path: HostPath) -> (Rnic, Fabric<Lossy>) {
    nic_with(network, (0, 0), mtu, path)
}

fn nic_with(
    network: &Network,
    (node, bits): (u8, u32),
    mtu: Mtu,
    path: HostPath,
) -> (Rnic, Fabric<Lossy>) {
    nic_of(network, (node, bits), (mtu, mtu.bytes().unwrap()), path)
}

/// Creates a NIC that announces a path MTU, and may send packets with so much payload to peers with
/// which dense packets are agreed on.
fn nic_of(
    network: &Network,
    (node, bits): (u8, u32),
    (mtu, payload_max): (Mtu, u32),
    path: HostPath,
) -> (Rnic, Fabric<Lossy>) {
    let SocketAddr::V4(at) = address(node) else { unreachable!() };
    let mut dice = Dice::new(u64::from(node) + 77);
    let port =
        Port { gid: Gid::from_ipv4(at.ip().octets()), mac: MacAddress([2, 0, 0, 0, 0, node]), mtu };
    let setup = Parameters {
        backing: Backing::Private,
        port,
        udp_port: UDP_PORT,
        share: Share::ALL,
        payload_max,
        window_max: 1 << 20,
        entropy: Box::new(move || u32::try_from(dice.next_u64() >> 32).unwrap() | bits),
        path: Arc::new(path),
    };
    join(setup, network.plug(address(node)))
}

impl Node {
    fn new(network: &Network, node: u8, mtu: Mtu) -> (Self, Opening) {
        // The first PSNs are just before the wrap, to test it.
        Self::of(nic(network, node, mtu, 0x00ff_ff00))
    }

    fn of((mut rnic, fabric): (Rnic, Fabric<Lossy>)) -> (Self, Opening) {
        let domain = rnic.open_domain().unwrap();
        let memory = Region::new(MEMORY).unwrap();
        let registration = rnic.register(domain, &memory).unwrap();
        let opening = rnic.open(domain).unwrap();
        let pool = SendPool::new(Region::new(4 * MEMORY).unwrap(), 65_536);
        let node = Self {
            rnic,
            fabric,
            address: opening.address(),
            domain,
            pool,
            memory,
            registration,
            qp: QpId(u32::MAX),
            out: Vec::with_capacity(64),
            done: Vec::new(),
            received: Vec::new(),
            broke: Vec::new(),
        };
        (node, opening)
    }

    fn lease(&mut self, bytes: &[u8]) -> Lease {
        let filled = self.pool.fill(u32::try_from(bytes.len()).unwrap(), |room| {
            room.copy_in(bytes);
            Ok::<_, ()>(bytes.len())
        });
        filled.expect("a chunk is free").unwrap().expect("not empty")
    }

    fn post(&mut self, work: Work) {
        self.fabric.post(self.qp, &mut vec![work]);
    }

    fn send(&mut self, message: Message, tag: u64) {
        self.post(Work::Send { message, tag: Tag(tag) });
    }

    fn take_in(&mut self, now: Instant) -> bool {
        self.fabric.poll(now, &mut self.out);
        let moved = !self.out.is_empty();
        for completion in self.out.drain(..) {
            match completion {
                Completion::Wrote { lease, tag, status, .. } => {
                    self.pool.take_back(lease);
                    self.done.push((tag, status));
                }
                Completion::Sent { tag, status, .. } => self.done.push((tag, status)),
                Completion::Received { message, .. } => self.received.push(message),
                Completion::ReceivedLong { message, .. } => panic!("{message:?}"),
                Completion::Broke { cause, .. } => self.broke.push(cause),
            }
        }
        moved
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.memory.copy_out(at, &mut out);
        out
    }
}

impl Couple {
    fn new(seed: u64, odds: Odds) -> Self {
        Self::with_mtu(seed, odds, Mtu::B1024)
    }

    fn with_mtu(seed: u64, odds: Odds, mtu: Mtu) -> Self {
        Self::with_mtus(seed, odds, [mtu; 2])
    }

    fn with_mtus(seed: u64, odds: Odds, mtus: [Mtu; 2]) -> Self {
        let network = Network::new(seed, odds);
        let (mut a, opening_a) = Node::new(&network, 0, mtus[0]);
        let (mut b, opening_b) = Node::new(&network, 1, mtus[1]);
        a.qp = a.fabric.adopt(Instant(0), opening_a.connect(b.address).unwrap());
        b.qp = b.fabric.adopt(Instant(0), opening_b.connect(a.address).unwrap());
        Self { network, now: Instant(0), nodes: [a, b] }
    }

    /// Node `from` writes into the memory of the other node, with that node's rkey.
    fn write(&mut self, from: usize, at: usize, bytes: &[u8], tag: u64) {
        let target = &self.nodes[1 - from].registration;
        let (rkey, address) = (target.rkey, target.address + at as u64);
        self.write_to(from, rkey, address, bytes, tag);
    }

    fn write_to(&mut self, from: usize, rkey: Rkey, address: u64, bytes: &[u8], tag: u64) {
        let lease = self.nodes[from].lease(bytes);
        self.nodes[from].post(Work::Write { lease, rkey, address, tag: Tag(tag) });
    }

    /// One turn of both pollers.
    fn turn(&mut self) {
        self.now = self.now + TURN;
        for node in &mut self.nodes {
            node.take_in(self.now);
            node.fabric.transmit(self.now);
        }
    }

    /// Runs turns until neither poller has a timer left, and sleeps in between.
    fn run_until_quiet(&mut self) {
        for _ in 0..400_000 {
            let before = self.packets_out();
            self.turn();
            let now = self.now;
            let wake = self.nodes.each_mut().map(|node| node.fabric.prepare_sleep(now));
            if self.packets_out() > before {
                // Delayed packets that have arrived wake their receiver, so it must not sleep.
                continue;
            }
            match wake.into_iter().flatten().min() {
                Some(at) => self.now = self.now.max(at),
                None => return,
            }
        }
        panic!("never quiet: {:?}", self.nodes.each_ref().map(|node| *node.fabric.counters()));
    }

    fn packets_out(&self) -> u64 {
        self.nodes.iter().map(|node| node.fabric.counters().packets_out).sum()
    }

    fn counters(&self, node: usize) -> Counters {
        *self.nodes[node].fabric.counters()
    }
}

/// Bytes that depend on their position, so that a test sees misplaced ones.
fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|n| u8::try_from(n % 251).unwrap().wrapping_mul(7).wrapping_add(salt)).collect()
}
