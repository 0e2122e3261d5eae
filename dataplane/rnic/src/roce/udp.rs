//! A wire over a UDP socket of the kernel, with segmentation (GSO) and coalescing (GRO).
//!
//! The socket is bound to the port's address and never connected. For such a socket the kernel sets
//! DF and the identifications 0, 1, 2, …, which the ICRC covers (see `icrc`). IPv6 has no
//! identifications.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use smcr_memory::Backing;
use smcr_os::interface::{self, Interface};
use smcr_os::udp::{Departing, ReceiveRing, Steering, UdpSocket, Unsent};
use smcr_proto::{Gid, Instant, MacAddress, Mtu};

use super::batch::{Ecn, Run, SEGMENTS_MAX, Sent, Train, Wire, traffic_class};
use super::rnic::sizes_for;
use super::{Fabric, Parameters, Rnic, Share, UDP_PORT, join, join_all};
use crate::Port;

/// The network device and the address of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place<'a> {
    /// This network device, with its first IPv4 address, or its best IPv6 address if it has none.
    Device(&'a str),
    /// The network device that has this address.
    Address(IpAddr),
}

/// The configuration of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config<'a> {
    /// Its device and address.
    pub place: Place<'a>,
    /// The UDP port, here and at every peer. It is [`UDP_PORT`] unless both ends agreed otherwise.
    pub port: u16,
    /// The largest path MTU to announce; `None` for the largest that fits the MTU of the device.
    pub mtu_max: Option<Mtu>,
}

impl<'a> Config<'a> {
    /// The default configuration on `place`, with the UDP port of RoCEv2.
    pub fn on(place: Place<'a>) -> Self {
        Self { place, port: UDP_PORT, mtu_max: None }
    }
}

/// A UDP socket as a wire.
#[derive(Debug)]
pub struct Udp {
    socket: UdpSocket,
    ring: ReceiveRing,
    appetite: Appetite,
    segments_max: usize,
}

/// How many trains to ask the socket for. To find that there is no other costs the kernel a look in
/// vain, so where trains come one by one, as the messages of a single connection do, we ask for
/// one.
#[derive(Debug, Default)]
struct Appetite {
    /// How many trains came alone, one after another.
    singles: u32,
    came_at: Instant,
}

impl Appetite {
    fn most(&self) -> usize {
        if self.singles < SINGLES_MIN { RECEIVE_BUFFERS } else { 1 }
    }

    fn learn(&mut self, now: Instant, trains: usize) {
        let apart = now.since(self.came_at) > APART;
        match trains {
            0 => return,
            1 if apart => self.singles = self.singles.saturating_add(1),
            _ => self.singles = 0,
        }
        self.came_at = now;
    }
}

/// Opens a NIC on a network device.
///
/// # Errors
///
/// When there is no such device or address, when the device has no IP address or too small an MTU,
/// and when the UDP port is taken: by another gateway, or by the kernel's `rdma_rxe`.
pub fn open(config: &Config<'_>) -> io::Result<(Rnic, Fabric<Udp>)> {
    let mut parts = parts(config, 1)?;
    let (setup, wire) = parts.pop().expect("as many parts as were asked for");
    Ok(join(setup, wire))
}

/// Opens a NIC with `count` fabrics, each for a poller of its own. Peers see one NIC.
///
/// # Errors
///
/// As [`open`], and when the kernel cannot steer datagrams.
///
/// # Panics
///
/// If `count` is not 1 to 256.
pub fn open_shared(config: &Config<'_>, count: u32) -> io::Result<Vec<(Rnic, Fabric<Udp>)>> {
    join_all(parts(config, count)?)
}

/// The parts of which [`open_shared`] makes a NIC.
///
/// # Errors
///
/// As [`open_shared`].
///
/// # Panics
///
/// If `count` is not 1 to 256.
pub fn parts(config: &Config<'_>, count: u32) -> io::Result<Vec<(Parameters, Udp)>> {
    assert!((1..=256).contains(&count));
    let interface = find(config)?;
    if count == 1 {
        let socket = UdpSocket::bind(interface.at(config.port), BUFFER_LEN)?;
        let setup = setup(config, &interface, &socket, Share::ALL)?;
        return Ok(vec![(setup, Udp::new(socket))]);
    }
    let steering = Steering { byte_at: QPN_LAST_BYTE, shares: count };
    let sockets = UdpSocket::bind_shares(interface.at(config.port), BUFFER_LEN, steering)?;
    let part = |(socket, index): (UdpSocket, u32)| {
        let setup = setup(config, &interface, &socket, Share { index, count })?;
        Ok((setup, Udp::new(socket)))
    };
    sockets.into_iter().zip(0..).map(part).collect()
}

fn find(config: &Config<'_>) -> io::Result<Interface> {
    match config.place {
        Place::Device(name) => Interface::named(name),
        Place::Address(address) => Interface::with_address(address),
    }
}

fn setup(
    config: &Config<'_>,
    interface: &Interface,
    socket: &UdpSocket,
    share: Share,
) -> io::Result<Parameters> {
    let (mtu, payload_max) = sizes_for(interface.mtu, config.mtu_max).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "the MTU of the device is below 336 bytes")
    })?;
    let buffer = socket.receive_buffer()?;
    Ok(Parameters {
        port: Port { gid: Gid::from_ip(interface.address), mac: MacAddress(interface.mac), mtu },
        udp_port: config.port,
        backing: Backing::Private,
        share,
        payload_max,
        // We assume that the peer's socket buffer is as large as ours. It holds more overhead than
        // payload, and packets of more than one queue pair.
        window_max: u32::try_from(buffer / 4).unwrap_or(WINDOW_MAX).min(WINDOW_MAX),
        entropy: Box::new(|| getrandom::u32().expect("the kernel gives random numbers")),
        path: Arc::new(interface::path_mtu),
    })
}

impl Udp {
    /// Creates a wire over a bound socket.
    pub fn new(socket: UdpSocket) -> Self {
        let ring = ReceiveRing::new(RECEIVE_BUFFERS);
        Self { socket, ring, appetite: Appetite::default(), segments_max: SEGMENTS_MAX }
    }

    /// Sends the first packet of `run` alone. Returns whether the kernel accepted it.
    fn sends_alone(&self, bytes: &[u8], run: &Run) -> bool {
        let packet = &bytes[run.range.clone()][..run.segment_len];
        let alone = Departing {
            target: run.target,
            bytes: packet,
            segment_len: run.segment_len,
            traffic_class: traffic_class(run.reacts),
        };
        self.socket.send([alone].into_iter()).is_ok()
    }
}

impl Wire for Udp {
    fn receive(&mut self, now: Instant) -> usize {
        // If an error persists, no packets arrive, and the queue pairs break by timeout.
        let trains = self.ring.receive(&self.socket, self.appetite.most()).unwrap_or(0);
        self.appetite.learn(now, trains);
        trains
    }

    fn train(&self, index: usize) -> Train<'_> {
        let arrived = self.ring.arrived(index);
        Train {
            source: arrived.source,
            bytes: arrived.bytes,
            segment_len: arrived.segment_len,
            ecn: Ecn::of(arrived.traffic_class),
            identification: None,
        }
    }

    fn send(&mut self, _: Instant, bytes: &[u8], runs: &[Run]) -> Sent {
        let mut sent = Sent::default();
        while sent.runs < runs.len() {
            let departing = runs[sent.runs..].iter().map(|run| Departing {
                target: run.target,
                bytes: &bytes[run.range.clone()],
                segment_len: run.segment_len,
                traffic_class: traffic_class(run.reacts),
            });
            match self.socket.send(departing) {
                Ok(count) => sent.runs += count,
                Err(Unsent::Full) => break,
                Err(Unsent::Unable) => {
                    // Either the device cannot split this run, or its address is gone. Sending one
                    // packet alone tells which. The ICRCs of this run are wrong for packets that
                    // leave one by one, so the run is lost; later ones are built for that.
                    let run = &runs[sent.runs];
                    if run.segments > 1 && self.sends_alone(bytes, run) {
                        self.segments_max = 1;
                    }
                    sent.runs += 1;
                    sent.refused += 1;
                }
                Err(Unsent::Unreachable) => {
                    sent.runs += 1;
                    sent.refused += 1;
                }
            }
        }
        sent
    }

    fn segments_max(&self) -> usize {
        self.segments_max
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }
}

/// The offset in a BTH of the last byte of the destination queue pair number.
const QPN_LAST_BYTE: u32 = 7;
/// The most datagrams, or trains of them, that one system call receives.
const RECEIVE_BUFFERS: usize = 8;
/// The buffer size that we request for each direction of the socket.
const BUFFER_LEN: usize = 8 << 20;
/// After so many trains alone, the next one is expected to come alone.
const SINGLES_MIN: u32 = 8;
/// A train that comes sooner after another one may have been there already, so it did not come
/// alone. For what it costs to find the next one, a turn later, it does not matter beyond this.
const APART: Duration = Duration::from_micros(20);
/// The most bytes that one queue pair may have in flight.
pub(super) const WINDOW_MAX: u32 = 1 << 20;

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use smcr_proto::Qpn;

    use super::super::batch::RUN_LEN_MAX;
    use super::*;

    /// The messages of one connection come one by one; those of many, and bulk, come in crowds.
    #[test]
    fn who_finds_single_trains_asks_for_one() {
        let (mut appetite, mut now) = (Appetite::default(), Instant(1_000_000_000));
        let mut come = |trains, after: Duration| {
            now = now + after;
            appetite.learn(now, trains);
            appetite.most()
        };
        for round in 1..=2 * SINGLES_MIN {
            assert_eq!(come(0, APART / 4), if round > SINGLES_MIN { 1 } else { RECEIVE_BUFFERS });
            assert_eq!(come(1, APART), if round >= SINGLES_MIN { 1 } else { RECEIVE_BUFFERS });
        }
        assert_eq!(come(1, APART), RECEIVE_BUFFERS, "soon after another one");
        for _ in 0..SINGLES_MIN {
            come(1, APART * 2);
        }
        assert_eq!(come(0, APART * 2), 1);
        assert_eq!(come(2, APART * 2), RECEIVE_BUFFERS);
    }

    /// A run that the kernel cuts before the device costs as much as all its packets, at both ends.
    #[test]
    fn the_longest_run_arrives_as_one_train() {
        let [here, there] = [1, 2].map(|host| SocketAddr::from(([127, 10, 9, host], UDP_PORT)));
        let [mut near, mut far] =
            [here, there].map(|at| Udp::new(UdpSocket::bind(at, BUFFER_LEN).unwrap()));
        let bytes = vec![7; RUN_LEN_MAX];
        let segment_len: usize = 1_440;
        let segments = RUN_LEN_MAX.div_ceil(segment_len);
        let range = 0..RUN_LEN_MAX;
        let number = Qpn(7);
        let run = Run { target: there, number, reacts: true, range, segment_len, segments };
        assert_eq!(near.send(Instant(1), &bytes, &[run]), Sent { runs: 1, refused: 0 });
        let trains = std::iter::repeat_with(|| far.receive(Instant(1))).find(|trains| *trains > 0);
        assert_eq!(trains, Some(1));
        assert_eq!(
            (far.train(0).bytes.len(), far.train(0).segment_len),
            (RUN_LEN_MAX, segment_len)
        );
    }
}
