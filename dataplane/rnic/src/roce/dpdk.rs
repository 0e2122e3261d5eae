//! A wire over a port of DPDK: frames that no kernel sees.
//!
//! The port has an address of its own, which no network device of the host has. Frames, neighbours
//! and routes are ours, therefore (`frame`, `neighbours`). A port has one queue in each direction
//! and one poller: no NIC steers packets by queue pair number.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use dpdk::{BURST_MAX, Error, Figures, Link, Port, Wishes};
pub use dpdk::{Pages, interface_below, is_privileged, version};
use rustix::io::Errno;
use smcr_memory::Backing;
use smcr_proto::{Gid, Instant, MacAddress, Mtu};

use super::batch::{Ecn, Run, SEGMENTS_MAX, Sent, Train, Wire};
use super::frame::{self, Station, Way};
use super::neighbours::{self, Home, Neighbours};
use super::rnic::{HEADERS_MAX, sizes_for};
use super::udp::WINDOW_MAX;
use super::{Fabric, Parameters, Rnic, Share, UDP_PORT, join};

/// The configuration of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config<'a> {
    /// What EAL takes after `--vdev`, or a PCI address.
    pub device: &'a str,
    /// The address of the port, which no device of the host has.
    pub address: IpAddr,
    /// How many bits of it the addresses of its network have in common.
    pub prefix: u8,
    /// The VLAN of its network, at most 4094, if frames have tags.
    pub vlan: Option<NonZero<u16>>,
    /// The router to other networks.
    pub gateway: Option<IpAddr>,
    /// Further arguments of EAL.
    pub eal: &'a [String],
    /// The largest path MTU to announce; `None` for the largest that fits the MTU of the port. A
    /// port of hardware is set to an MTU for it.
    pub mtu_max: Option<Mtu>,
}

/// A port of DPDK as a wire.
#[derive(Debug)]
pub struct Dpdk {
    /// None after it was removed: whoever removes a device of hardware waits for us to close it.
    port: Option<Port>,
    neighbours: Neighbours,
    station: Station,
    /// The packets of the last burst.
    burst: Vec<Arrival>,
    /// How many packets of the first run that is offered next were sent already.
    begun: usize,
    /// Runs that cannot be sent, of those that are offered.
    refused: Vec<usize>,
    now: Instant,
    link: Link,
    link_seen: Option<Instant>,
}

/// A packet of the last burst.
#[derive(Debug)]
struct Arrival {
    frame: usize,
    packet: Range<usize>,
    source: SocketAddr,
    ecn: Ecn,
    identification: u16,
}

/// Opens a NIC on a port. The first call in a process starts DPDK.
///
/// # Errors
///
/// [`Error`]: there is no DPDK, no such port, it is busy, or there is no memory for it.
pub fn open(config: &Config<'_>) -> Result<(Rnic, Fabric<Dpdk>), Error> {
    let (setup, wire) = parts(config)?;
    Ok(join(setup, wire))
}

/// The parts of which [`open`] makes a NIC.
///
/// # Errors
///
/// As [`open`].
pub fn parts(config: &Config<'_>) -> Result<(Parameters, Dpdk), Error> {
    dpdk::start(config.eal)?;
    let wanted = config.mtu_max.and_then(Mtu::bytes).map(|payload| payload + HEADERS_MAX);
    let mtu = wanted.map(|bytes| u16::try_from(bytes).expect("at most 4176"));
    let group = match config.address {
        IpAddr::V4(_) => None,
        IpAddr::V6(own) => Some(neighbours::group_of(own).0.0),
    };
    let port = Port::open(config.device, Wishes { mtu, vlan: config.vlan, group })?;
    let path_mtu = u32::from(port.mtu());
    let (mtu, payload_max) =
        sizes_for(path_mtu, config.mtu_max).ok_or(Error::Misnamed("its MTU is below 336 bytes"))?;
    let mac = MacAddress(port.mac());
    let Config { address, prefix, gateway, .. } = *config;
    let home = Home { mac, address, prefix, gateway };
    let wants_huge = config.eal.iter().all(|argument| argument != "--no-huge");
    let backing = if wants_huge { Backing::Huge } else { Backing::Private };
    let setup = Parameters {
        port: crate::Port { gid: Gid::from_ip(config.address), mac, mtu },
        udp_port: UDP_PORT,
        backing,
        share: Share::ALL,
        payload_max,
        window_max: WINDOW_MAX / 2,
        entropy: Box::new(|| getrandom::u32().expect("the kernel gives random numbers")),
        path: Arc::new(move |_, target| match home.next_hop(target) {
            Some(_) => Ok(path_mtu),
            None => Err(Errno::NETUNREACH.into()),
        }),
    };
    Ok((setup, Dpdk::new(port, home)))
}

impl Dpdk {
    fn new(mut port: Port, home: Home) -> Self {
        let link = port.link();
        let address = SocketAddr::new(home.address, UDP_PORT);
        Self {
            port: Some(port),
            neighbours: Neighbours::new(home),
            station: Station { mac: home.mac, address },
            burst: Vec::with_capacity(BURST_MAX),
            begun: 0,
            refused: Vec::new(),
            now: Instant::default(),
            link,
            link_seen: None,
        }
    }

    /// What the port has counted.
    pub fn figures(&mut self) -> Figures {
        self.port.as_mut().map(Port::figures).unwrap_or_default()
    }

    /// Looks whether the port can carry packets, if that was long ago.
    fn watch(&mut self, now: Instant) {
        self.now = now;
        if self.link_seen.is_none_or(|seen| now.since(seen) >= LINK_INTERVAL) {
            self.link_seen = Some(now);
            let link = self.port.as_mut().map_or(Link::Gone, Port::link);
            let before = std::mem::replace(&mut self.link, link);
            if link == Link::Up && before != Link::Up {
                self.neighbours.doubt_all();
            }
        }
    }

    /// Sends what neighbours were asked or answered. What the port does not take is lost.
    fn send_discovery(&mut self) {
        let Some(port) = &mut self.port else { return };
        while let Some(frame) = self.neighbours.poll_frame() {
            if port.vacate(1) == 1 && port.room(0).len() >= frame.len() {
                port.room(0)[..frame.len()].copy_from_slice(&frame);
                let len = u32::try_from(frame.len()).expect("a short frame");
                port.transmit(&[len], false);
            }
        }
    }

    /// Sends one burst of the packets from `at` on: a run, and a packet of it. Returns the first
    /// packet that it did not send, and whether the port is full.
    fn send_burst(&mut self, bytes: &[u8], runs: &[Run], mut at: (usize, usize)) -> Progress {
        let port = self.port.as_mut().expect("its link is up");
        let room = port.vacate(BURST_MAX);
        let leave_sum = port.sums_ipv4() && self.station.address.is_ipv4();
        let (mut lens, mut starts, mut count) = ([0; BURST_MAX], [at; BURST_MAX], 0);
        while count < room && at.0 < runs.len() {
            let run = &runs[at.0];
            let Some(mac) = self.neighbours.find(self.now, run.target.ip()) else {
                self.refused.push(at.0);
                at = (at.0 + 1, 0);
                continue;
            };
            let packets = bytes[run.range.clone()].chunks(run.segment_len).enumerate();
            for (index, packet) in packets.skip(at.1).take(room - count) {
                let identification = u16::try_from(index).expect("a run is short");
                let to = Station { mac, address: run.target };
                let way = Way { from: self.station, to, reacts: run.reacts };
                let out = port.room(count);
                let len = frame::write(out, way, identification, packet, leave_sum);
                lens[count] = u32::try_from(len).expect("a frame is short");
                starts[count] = (at.0, index);
                count += 1;
                at = if index + 1 == run.segments { (at.0 + 1, 0) } else { (at.0, index + 1) };
            }
        }
        let taken = port.transmit(&lens[..count], leave_sum);
        if taken < count {
            return Progress { at: starts[taken], full: true };
        }
        Progress { at, full: room == 0 }
    }
}

/// How far a burst has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Progress {
    at: (usize, usize),
    full: bool,
}

impl Wire for Dpdk {
    fn receive(&mut self, now: Instant) -> usize {
        self.watch(now);
        self.burst.clear();
        self.port.take_if(|_| self.link == Link::Gone);
        let Some(port) = &mut self.port else { return 0 };
        for index in 0..port.receive() {
            let frame = port.frame(index);
            if frame.get(..6) != Some(&self.station.mac.0[..]) {
                // To all, or to a group: a question perhaps. Some ports show all frames there are.
                self.neighbours.handle(now, frame);
                continue;
            }
            match frame::parse(frame) {
                Some(arrived) if arrived.target == self.station.address => {
                    self.burst.push(Arrival {
                        frame: index,
                        packet: arrived.packet,
                        source: arrived.source,
                        ecn: arrived.ecn,
                        identification: arrived.identification,
                    });
                }
                Some(_) => {}
                None => self.neighbours.handle(now, frame),
            }
        }
        self.send_discovery();
        self.burst.len()
    }

    fn train(&self, index: usize) -> Train<'_> {
        let arrival = &self.burst[index];
        let port = self.port.as_ref().expect("a burst came from it");
        let bytes = &port.frame(arrival.frame)[arrival.packet.clone()];
        Train {
            source: arrival.source,
            bytes,
            segment_len: bytes.len(),
            ecn: arrival.ecn,
            identification: Some(arrival.identification),
        }
    }

    fn send(&mut self, now: Instant, bytes: &[u8], runs: &[Run]) -> Sent {
        self.watch(now);
        if self.link != Link::Up {
            self.begun = 0;
            return Sent { runs: runs.len(), refused: runs.len() };
        }
        self.refused.clear();
        let mut at = (0, self.begun);
        while at.0 < runs.len() {
            let progress = self.send_burst(bytes, runs, at);
            at = progress.at;
            if progress.full {
                break;
            }
        }
        self.send_discovery();
        self.begun = at.1;
        let mut refused = std::mem::take(&mut self.refused);
        // A burst that the port did not take whole may have refused runs behind its end.
        refused.retain(|run| *run < at.0);
        let sent = Sent { runs: at.0, refused: refused.len() };
        self.refused = refused;
        sent
    }

    fn segments_max(&self) -> usize {
        SEGMENTS_MAX
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn nap(&self) -> Option<Duration> {
        Some(NAP)
    }

    fn link(&self) -> Link {
        self.link
    }
}

/// How often to look at the link.
const LINK_INTERVAL: Duration = Duration::from_millis(10);
/// How long a poller may sleep while packets may come.
const NAP: Duration = Duration::from_micros(100);

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec};
    use smcr_proto::Qpn;

    use super::*;
    use crate::{Event, Fabric as _, Rnic as _};

    fn nic(number: u8, gateway: Option<IpAddr>) -> (Rnic, Fabric<Dpdk>) {
        let role = if number % 2 == 1 { "server" } else { "client" };
        let socket = std::env::temp_dir().join(format!(
            "smcgate-wire-{}-{}",
            std::process::id(),
            number.div_ceil(2)
        ));
        let socket = socket.display();
        let device = format!("net_memif{number},role={role},socket={socket},socket-abstract=no");
        let address = IpAddr::from([10, 9, 0, number]);
        let (eal, mtu_max) = (&["--no-huge".to_owned()], None);
        open(&Config { device: &device, address, prefix: 24, gateway, eal, mtu_max, vlan: None })
            .unwrap()
    }

    /// Turns both wires until `done`, on a clock of their own.
    fn turn_until(now: &mut Instant, wires: &mut [Dpdk], done: impl Fn(&mut [Dpdk]) -> bool) {
        for _ in 0..2_000 {
            *now = *now + Duration::from_millis(5);
            for wire in &mut *wires {
                wire.receive(*now);
            }
            if done(wires) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("it never happened");
    }

    /// The ends find each other's Ethernet addresses, carry runs of any length whole, and see when
    /// the other end goes: what is offered then is lost, and blocks nobody.
    #[test]
    fn packets_go_to_the_next_hop_while_the_link_is_up() {
        let peer = IpAddr::from([10, 9, 0, 2]);
        let (here, a) = nic(1, None);
        let (there, b) = nic(2, Some([10, 9, 0, 1].into()));
        assert!(here.has_route(Gid::from_ip(peer)));
        let far = Gid::from_ip([10, 8, 0, 2].into());
        assert!(!here.has_route(far) && there.has_route(far));
        assert_eq!(here.port().mtu, Mtu::B1024, "the buffers of shared memory have 2,048 bytes");

        let mut now = Instant::default();
        let mut wires = [a.into_wire(), b.into_wire()];
        turn_until(&mut now, &mut wires, |wires| wires.iter().all(|wire| wire.link() == Link::Up));
        let bytes: Vec<u8> = (0..=u8::MAX).cycle().take(100 * 64).collect();
        let run = |segments: usize, target| Run {
            target: SocketAddr::new(target, UDP_PORT),
            number: Qpn(7),
            reacts: false,
            range: 0..100 * segments - 1,
            segment_len: 100,
            segments,
        };
        let stranger = IpAddr::from([10, 8, 0, 2]);
        let offered = [run(1, stranger), run(64, peer), run(1, stranger), run(9, peer)];
        let [from, _] = &mut wires;
        let sent = from.send(now, &bytes, &offered);
        assert_eq!((sent.runs, sent.refused), (4, 4), "nobody has told the peer's address yet");
        turn_until(&mut now, &mut wires, |wires| {
            wires[0].neighbours.find(Instant::default(), peer).is_some()
        });
        let [from, to] = &mut wires;
        let sent = from.send(now, &bytes, &offered);
        assert_eq!((sent.runs, sent.refused), (4, 2), "no way leads to the stranger");
        let mut found = Vec::new();
        while found.len() < 73 {
            for index in 0..to.receive(now) {
                let train = to.train(index);
                assert_eq!(train.source, from.station.address);
                found.push((train.identification.unwrap(), train.bytes.to_vec()));
            }
        }
        let expected = [64, 9].into_iter().flat_map(|count| {
            let packets = bytes[..100 * count - 1].chunks(100).zip(0..);
            packets.map(|(packet, index)| (index, packet.to_vec())).collect::<Vec<_>>()
        });
        assert!(found.iter().eq(&expected.collect::<Vec<_>>()));

        let [from, to] = wires;
        drop(to);
        let mut wires = [from];
        turn_until(&mut now, &mut wires, |wires| wires[0].link() != Link::Up);
        let sent = wires[0].send(now, &bytes, &offered);
        assert_eq!((sent.runs, sent.refused), (4, 4));
    }

    /// A peer that restarts has another Ethernet address. We sent to the old one for half a minute.
    #[test]
    fn a_peer_that_restarts_is_found_under_its_new_ethernet_address() {
        let peer = IpAddr::from([10, 9, 0, 8]);
        let (_here, a) = nic(7, None);
        let (there, b) = nic(8, None);
        let mut now = Instant::default();
        let mut wires = vec![a.into_wire(), b.into_wire()];
        let both_up = |wires: &mut [Dpdk]| wires.iter().all(|wire| wire.link() == Link::Up);
        turn_until(&mut now, &mut wires, both_up);
        let knows = |mac: MacAddress| {
            move |wires: &mut [Dpdk]| {
                let now = wires[0].now;
                wires[0].neighbours.find(now, peer) == Some(mac)
            }
        };
        turn_until(&mut now, &mut wires, knows(there.port().mac));
        drop(wires.pop());
        turn_until(&mut now, &mut wires, |wires| wires[0].link() != Link::Up);
        let (restarted, b) = nic(8, None);
        assert_ne!(restarted.port().mac, there.port().mac);
        wires.push(b.into_wire());
        turn_until(&mut now, &mut wires, knows(restarted.port().mac));
    }

    /// Whoever is not told that a port has lost its other end sends to nobody until retries end;
    /// and whoever is not told that it is back never uses it again.
    #[test]
    fn the_rnic_says_when_its_wire_goes_down_and_up() {
        let told = |here: &mut Rnic, fabrics: &mut [&mut Fabric<Dpdk>]| {
            for step in 0..2_000 {
                for fabric in &mut *fabrics {
                    fabric.poll(Instant(step * 5_000_000), &mut Vec::new());
                }
                let mut ready =
                    [PollFd::from_borrowed_fd(here.descriptor().unwrap(), PollFlags::IN)];
                let is_rung = rustix::event::poll(&mut ready, Some(&Timespec::default())) == Ok(1);
                if let Some(event) = here.event() {
                    assert!(is_rung, "the control thread would sleep on");
                    return event;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            panic!("nothing was said");
        };
        let (mut here, mut a) = nic(3, None);
        assert_eq!(told(&mut here, &mut [&mut a]), Event::Down, "there is nobody at the other end");
        let (_there, mut b) = nic(4, None);
        assert_eq!(told(&mut here, &mut [&mut a, &mut b]), Event::Up);
        assert_eq!(here.event(), None);
        drop(b);
        assert_eq!(told(&mut here, &mut [&mut a]), Event::Down);
    }

    /// A peer asks where the port is before the first queue pair, and the poller may be asleep.
    #[test]
    fn a_port_is_looked_after_before_the_first_queue_pair() {
        let (_here, mut fabric) = nic(5, None);
        fabric.poll(Instant(7), &mut Vec::new());
        let until = fabric.prepare_sleep(Instant(7)).expect("packets wake nobody");
        assert!(until.since(Instant(7)) <= Duration::from_millis(10));
    }
}
