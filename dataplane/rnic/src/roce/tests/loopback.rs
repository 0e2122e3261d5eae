//! Tests of two NICs over real UDP sockets.

use std::net::Ipv4Addr;
use std::thread;

use smcr_memory::Backing;
use smcr_os::udp::UdpSocket;

use super::*;
use crate::roce::udp::{self, Config, Place, Udp};

/// One end, driven by a thread of its own on the real clock.
struct End {
    rnic: Rnic,
    fabric: Fabric<Udp>,
    qp: QpId,
    memory: Region,
    registration: Registration,
    pool: SendPool,
    out: Vec<Completion>,
}

/// Two ends, on loopback addresses that no other test uses.
fn ends(network: u8) -> [End; 2] {
    let mut parts = [1, 2].map(|host| {
        let place = Place::Address(Ipv4Addr::new(127, 10, network, host).into());
        let (mut rnic, fabric) = udp::open(&Config::on(place)).unwrap();
        let domain = rnic.open_domain().unwrap();
        let memory = Region::new(MEMORY).unwrap();
        let registration = rnic.register(domain, &memory).unwrap();
        let opening = rnic.open(domain).unwrap();
        let pool = SendPool::new(Region::new(64 * 65_536).unwrap(), 65_536);
        let out = Vec::with_capacity(64);
        let end = End { rnic, fabric, qp: QpId(0), memory, registration, pool, out };
        (end, Some(opening))
    });
    let addresses = parts.each_ref().map(|(_, opening)| opening.as_ref().unwrap().address());
    for (index, (end, opening)) in parts.iter_mut().enumerate() {
        let qp = opening.take().unwrap().connect(addresses[1 - index]).unwrap();
        end.qp = end.fabric.adopt(now(), qp);
    }
    parts.map(|(end, _)| end)
}

#[allow(clippy::disallowed_methods, reason = "the wire is real, and so is its time")]
fn now() -> Instant {
    use std::sync::LazyLock;
    static START: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
    Instant(u64::try_from(START.elapsed().as_nanos()).unwrap())
}

impl End {
    /// Runs one turn; returns the messages that were received.
    fn turn(&mut self) -> Vec<Message> {
        let now = now();
        let mut messages = Vec::new();
        self.fabric.poll(now, &mut self.out);
        for completion in self.out.drain(..) {
            match completion {
                Completion::Wrote { lease, status, .. } => {
                    assert_eq!(status, Status::Done);
                    self.pool.take_back(lease);
                }
                Completion::Sent { status, .. } => assert_eq!(status, Status::Done),
                Completion::Received { message, .. } => messages.push(message),
                Completion::ReceivedLong { message, .. } => panic!("{message:?}"),
                Completion::Broke { cause, .. } => panic!("{cause:?} {:?}", self.fabric.counters()),
            }
        }
        self.fabric.transmit(now);
        messages
    }

    /// Posts a write of `bytes`, if the pool and the queue pair have room.
    fn write(&mut self, rkey: Rkey, address: u64, bytes: &[u8]) -> bool {
        if self.fabric.room(self.qp) < 2 {
            return false;
        }
        let filled = self.pool.fill(u32::try_from(bytes.len()).unwrap(), |room| {
            if room.len() < bytes.len() {
                return Err(());
            }
            room.copy_in(bytes);
            Ok(bytes.len())
        });
        let Some(Ok(filled)) = filled else { return false };
        let lease = filled.unwrap();
        let work = Work::Write { lease, rkey, address, tag: Tag(0) };
        self.fabric.post(self.qp, &mut vec![work]);
        true
    }

    fn send(&mut self, message: Message) {
        self.fabric.post(self.qp, &mut vec![Work::Send { message, tag: Tag(0) }]);
    }
}

#[test]
fn bytes_and_messages_pass_through_the_kernel() {
    let [mut a, mut b] = ends(1);
    assert_eq!(a.rnic.port().gid, Gid::from_ipv4([127, 10, 1, 1]));
    let bytes = pattern(60_001, 5);
    assert!(a.write(b.registration.rkey, b.registration.address + 3, &bytes));
    a.send([8; 44]);
    let mut received = Vec::new();
    while received.is_empty() || a.pool.leases_out() > 0 {
        a.turn();
        received.extend(b.turn());
    }
    assert_eq!(received, [[8; 44]]);
    let mut out = vec![0; bytes.len()];
    b.memory.copy_out(3, &mut out);
    assert!(out == bytes);
    let counters = b.fabric.counters();
    assert_eq!((counters.icrc_errors, counters.malformed, counters.unknown_qp), (0, 0, 0));
}

/// The poller sleeps on this descriptor. If it were not readable, messages would wait for the next
/// timer.
#[test]
fn the_event_descriptor_is_readable_when_a_message_is_there() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let [mut a, mut b] = ends(2);
    while b.fabric.prepare_sleep(now()).is_some() {
        b.turn();
    }
    a.send([1; 44]);
    a.turn();
    let descriptor = b.fabric.event_descriptor().unwrap();
    let patience = Timespec { tv_sec: 5, tv_nsec: 0 };
    let mut events = [PollFd::new(&descriptor, PollFlags::IN)];
    assert_eq!(poll(&mut events, Some(&patience)).unwrap(), 1);
    assert_eq!(b.turn(), [[1; 44]]);
}

/// An operator whose network drops large packets can limit their size.
#[test]
fn packets_are_no_larger_than_the_operator_allows() {
    let place = Place::Address(Ipv4Addr::new(127, 10, 5, 1).into());
    let mtu_max = Some(Mtu::B1024);
    let (rnic, _fabric) = udp::open(&Config { mtu_max, ..Config::on(place) }).unwrap();
    assert_eq!(rnic.port().mtu, Mtu::B1024);
}

#[test]
fn one_address_carries_one_nic() {
    let place = Place::Address(Ipv4Addr::new(127, 10, 3, 1).into());
    let _first = udp::open(&Config::on(place)).unwrap();
    let second = udp::open(&Config::on(place)).unwrap_err();
    assert_eq!(second.kind(), io::ErrorKind::AddrInUse);
    let missing = udp::open(&Config::on(Place::Device("no-such-device"))).unwrap_err();
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);
}

/// The kernel coalesces packets of several queue pairs, which then all arrive at one poller. The
/// other pollers must get theirs, and wake up for them. Here the steering is wrong for each packet.
#[test]
fn packets_received_by_another_fabric_are_forwarded() {
    let [here, elsewhere, there] =
        [1, 2, 3].map(|host| SocketAddr::from(([127, 10, 6, host], UDP_PORT)));
    let part = |index: u8, socket: SocketAddr| {
        let setup = Parameters {
            backing: Backing::Private,
            port: Port { gid: Gid::from_ip(here.ip()), mac: MacAddress([2; 6]), mtu: Mtu::B1024 },
            udp_port: UDP_PORT,
            share: Share { index: index.into(), count: 2 },
            payload_max: 4096,
            window_max: 1 << 20,
            entropy: Box::new(|| getrandom::u32().unwrap()),
            path: Arc::new(|_, _| Ok(1500)),
        };
        (setup, Udp::new(UdpSocket::bind(socket, 1 << 20).unwrap()))
    };
    let parts = vec![part(0, here), part(1, elsewhere)];
    let [mut first, mut second] = <[_; 2]>::try_from(join_all(parts).unwrap()).unwrap();
    let (mut far, mut fabric) = udp::open(&Config::on(Place::Address(there.ip()))).unwrap();

    let (near_domain, far_domain) = (second.0.open_domain().unwrap(), far.open_domain().unwrap());
    let (near, far) = (second.0.open(near_domain).unwrap(), far.open(far_domain).unwrap());
    let (near_address, far_address) = (near.address(), far.address());
    assert_eq!(near_address.qpn.0 % 2, 1, "it belongs to the second share");
    let near = second.1.adopt(now(), near.connect(far_address).unwrap());
    let qp = fabric.adopt(now(), far.connect(near_address).unwrap());
    let region = Region::new(4096).unwrap();
    let target = second.0.register(near_domain, &region).unwrap();
    let mut pool = SendPool::new(Region::new(4096).unwrap(), 4096);
    let filled = pool.fill(15, |room| {
        room.copy_in(&[9; 15]);
        Ok::<_, ()>(15)
    });
    let lease = filled.unwrap().unwrap().unwrap();
    let write = Work::Write { lease, rkey: target.rkey, address: target.address + 3, tag: Tag(0) };
    fabric.post(qp, &mut vec![write, Work::Send { message: [7; 44], tag: Tag(1) }]);
    fabric.transmit(now());

    let mut out = Vec::with_capacity(4);
    while first.1.counters().strays < 2 {
        first.1.poll(now(), &mut out);
    }
    assert!(out.is_empty());
    let descriptor = second.1.event_descriptor().unwrap();
    let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut events = [rustix::event::PollFd::new(&descriptor, rustix::event::PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut events, Some(&at_once)).unwrap(), 1, "it is woken");
    second.1.poll(now(), &mut out);
    let [Completion::Received { qp, message }] = out[..] else { panic!("{out:?}") };
    assert_eq!((qp, message), (near, [7; 44]));
    let mut bytes = [0; 19];
    region.copy_out(0, &mut bytes);
    assert_eq!(bytes[..], [&[0; 3][..], &[9; 15], &[0]].concat(), "before the message");
}

/// Run it by `cargo test --release -p smcr-rnic -- --ignored --nocapture roce_stream`.
///
/// Estimate for a stream: a run of 15 packets of 4 KiB costs 15 * (0.06 ICRC + 0.1 copy + 0.05) µs
/// and 3 µs of kernel on either side, so 61 KiB per 6.5 µs or 75 Gbit/s at best.
/// Estimate for a message: 4 µs round trip of the socket and 1 µs of ours on each side.
#[test]
#[ignore = "a measurement, not a test"]
fn roce_stream() {
    let [a, b] = stream(ends(4));
    ping_pong([a, b]);
}

/// One end writes as fast as it can, and sends a message after each write.
fn stream([mut a, mut b]: [End; 2]) -> [End; 2] {
    let (rkey, address) = (b.registration.rkey, b.registration.address);
    let chunk = pattern(60_000, 1);
    let receiver = thread::spawn(move || {
        let mut received = 0_u64;
        loop {
            for message in b.turn() {
                if message == LAST {
                    b.fabric.prepare_sleep(now());
                    return (b, received);
                }
                received += 1;
            }
        }
    });
    let start = now();
    let mut posted = 0_u64;
    while now().since(start) < Duration::from_secs(1) {
        let at = posted % 16 * 60_000;
        if a.write(rkey, address + at, &chunk) {
            a.send([1; 44]);
            posted += 1;
        }
        a.turn();
    }
    a.send(LAST);
    while a.pool.leases_out() > 0 {
        a.turn();
    }
    let took = now().since(start);
    let (b, received) = receiver.join().unwrap();
    assert_eq!(received, posted);
    let gigabits = posted as f64 * 60_000.0 * 8.0 / took.as_secs_f64() / 1e9;
    println!("stream of 60,000-byte writes, each announced: {gigabits:.1} Gbit/s");
    println!("  sender   {:?}\n  receiver {:?}", a.fabric.counters(), b.fabric.counters());
    [a, b]
}

/// Measures round trips. Each direction is a write and a message.
fn ping_pong([mut a, mut b]: [End; 2]) {
    let (rkey, address) = (b.registration.rkey, b.registration.address);
    let back = (a.registration.rkey, a.registration.address);
    let echo = thread::spawn(move || {
        loop {
            for message in b.turn() {
                if message == LAST {
                    return;
                }
                assert!(b.write(back.0, back.1, &[7; 64]));
                b.send(message);
            }
        }
    });
    let mut times = Vec::new();
    for _ in 0..50_000 {
        let start = now();
        assert!(a.write(rkey, address, &[3; 64]));
        a.send([1; 44]);
        while a.turn().is_empty() {}
        times.push(now().since(start));
    }
    a.send(LAST);
    while !echo.is_finished() {
        a.turn();
    }
    times.sort();
    let at = |percent: usize| times[times.len() * percent / 100];
    println!("64-byte write and message, and back: p50 {:?} p99 {:?}", at(50), at(99));
    println!("  {:?}", a.fabric.counters());
    echo.join().unwrap();
}

/// The message that ends a measurement.
const LAST: Message = [0xff; 44];
