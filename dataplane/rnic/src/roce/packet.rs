//! A wire over a packet socket: frames of a network device of the kernel, beside the kernel.
//!
//! It has the address that the device has. The kernel goes on using that, and answers for it; it
//! does not take part in RoCE, so this works where something else has the UDP port, such as the
//! soft RNIC of Linux. We find neighbours ourselves (`neighbours`), and write the headers of each
//! train (`frame`); the kernel, or the NIC, cuts the train into packets.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self as unix, UnixDatagram};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::system::uname;
use smcr_memory::Backing;
use smcr_os::carrier::{Link, NetDevice};
use smcr_os::interface::{self, preferred_address};
use smcr_os::netdev::{NetworkDevice, network_devices};
use smcr_os::offload::join_receives;
use smcr_os::packet::{Carries, Departing, FrameRing, PacketSocket, drop_all};
use smcr_os::udp::Unsent;
use smcr_proto::{Gid, Instant, MacAddress, Mtu};

use super::batch::{Ecn, Run, SEGMENTS_MAX, Sent, Train, Wire};
use super::frame::{self, Station, Way};
use super::neighbours::{Home, Neighbours};
use super::rnic::sizes_for;
use super::udp::WINDOW_MAX;
use super::{Fabric, Parameters, Rnic, Share, UDP_PORT, join};

/// The configuration of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config<'a> {
    /// The name of the device.
    pub device: &'a str,
    /// Which of its addresses to use; `None` for the preferred one. RoCE v1 needs none.
    pub address: Option<IpAddr>,
    /// Which RoCE to speak.
    pub version: Version,
    /// The largest path MTU to announce; `None` for the largest that fits the MTU of the device.
    pub mtu_max: Option<Mtu>,
}

/// The versions of RoCE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// Right above Ethernet, within one network. The port's GID follows from its MAC address, and
    /// so do those of peers.
    V1,
    /// Over UDP and IP.
    #[default]
    V2,
}

/// A packet socket as a wire.
#[derive(Debug)]
pub struct Packet {
    socket: PacketSocket,
    ring: FrameRing,
    device: NetDevice,
    /// Who asks for the MAC addresses of peers; nobody if their GIDs tell.
    neighbours: Option<Neighbours>,
    station: Station,
    /// The packets of the last burst.
    burst: Vec<Arrival>,
    /// The headers of the runs that are sent next.
    headers: [Headers; SEND_BURST],
    segments_max: usize,
    now: Instant,
    link: Link,
    link_seen: Option<Instant>,
    /// Takes what comes to the UDP port, and drops it. Without it the kernel would answer that
    /// nobody is there. None if somebody else has the port.
    _sink: Option<UdpSocket>,
    /// Nobody else of this network namespace has it.
    _claim: UnixDatagram,
}

/// A train of the last burst.
#[derive(Debug)]
struct Arrival {
    frame: usize,
    packets: Range<usize>,
    segment_len: usize,
    source: SocketAddr,
    ecn: Ecn,
    identification: u16,
}

/// The headers of a train.
#[derive(Clone, Copy, Debug)]
struct Headers {
    bytes: [u8; HEADERS_MAX],
    len: usize,
}

/// Opens a NIC on a device.
///
/// # Errors
///
/// There is no such Ethernet device, it does not have the address, somebody else has a NIC there,
/// or the privilege for packet sockets is missing (`CAP_NET_RAW`).
pub fn open(config: &Config<'_>) -> io::Result<(Rnic, Fabric<Packet>)> {
    let (setup, wire) = parts(config)?;
    Ok(join(setup, wire))
}

/// The parts of which [`open`] makes a NIC.
///
/// # Errors
///
/// As [`open`].
pub fn parts(config: &Config<'_>) -> io::Result<(Parameters, Packet)> {
    let wrong = |kind, why: &str| io::Error::new(kind, why);
    if !joins_trains(&uname().release().to_string_lossy()) {
        return Err(wrong(io::ErrorKind::Unsupported, "packet sockets need Linux 6.2 for trains"));
    }
    let all = network_devices()?;
    let device = all.into_iter().find(|device| device.name == config.device);
    let device =
        device.ok_or_else(|| wrong(io::ErrorKind::NotFound, "there is no such network device"))?;
    let mac = device.mac.filter(|mac| *mac != [0; 6]);
    let mac = mac.ok_or_else(|| wrong(io::ErrorKind::InvalidInput, "it is no Ethernet device"))?;
    if config.version == Version::V1 {
        return parts_v1(config, &device, MacAddress(mac));
    }
    let address = config.address.or_else(|| preferred_address(&device));
    let prefix = |address| device.addresses.iter().find(|(own, _)| *own == address);
    let Some(&(address, prefix)) = address.and_then(prefix) else {
        let why = match config.address {
            Some(address) => format!("the device does not have the address {address}"),
            None => "the device has no address".to_owned(),
        };
        return Err(wrong(io::ErrorKind::AddrNotAvailable, &why));
    };
    let (mtu, payload_max) = sizes_for(device.mtu, config.mtu_max).ok_or_else(|| {
        wrong(io::ErrorKind::InvalidInput, "the MTU of the device is below 336 bytes")
    })?;
    let gateway = gateway(&device.name, address);
    let home = Home { mac: MacAddress(mac), address, prefix, gateway };
    let socket = PacketSocket::open(device.index, Carries::Udp(UDP_PORT), BUFFER_LEN)?;
    let buffer = socket.receive_buffer()?;
    let setup = Parameters {
        port: crate::Port { gid: Gid::from_ip(address), mac: home.mac, mtu },
        udp_port: UDP_PORT,
        backing: Backing::Private,
        share: Share::ALL,
        payload_max,
        window_max: u32::try_from(buffer / 4).unwrap_or(WINDOW_MAX).min(WINDOW_MAX),
        entropy: Box::new(|| getrandom::u32().expect("the kernel gives random numbers")),
        path: Arc::new(move |here, target| match home.next_hop(target) {
            Some(_) => interface::path_mtu(here, target),
            None => Err(Errno::NETUNREACH.into()),
        }),
    };
    let station = Station { mac: home.mac, address: SocketAddr::new(home.address, UDP_PORT) };
    let sink = sink(home.address, device.index)?;
    let neighbours = Some(Neighbours::beside_kernel(home));
    Ok((setup, Packet::new((socket, sink), &device, station, neighbours)?))
}

/// The parts of a NIC that speaks RoCE v1.
fn parts_v1(
    config: &Config<'_>,
    device: &NetworkDevice,
    mac: MacAddress,
) -> io::Result<(Parameters, Packet)> {
    let (mtu, payload_max) = sizes_for(device.mtu, config.mtu_max).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "the MTU of the device is below 336 bytes")
    })?;
    let socket = PacketSocket::open(device.index, Carries::Type(ROCE_V1), BUFFER_LEN)?;
    let buffer = socket.receive_buffer()?;
    let (gid, path_mtu) = (gid_of(mac), device.mtu);
    let setup = Parameters {
        port: crate::Port { gid, mac, mtu },
        udp_port: 0,
        backing: Backing::Private,
        share: Share::ALL,
        payload_max,
        window_max: u32::try_from(buffer / 4).unwrap_or(WINDOW_MAX).min(WINDOW_MAX),
        entropy: Box::new(|| getrandom::u32().expect("the kernel gives random numbers")),
        // No router is on the way, so the device tells all there is to know.
        path: Arc::new(move |_, target| match mac_of(target) {
            Some(_) => Ok(path_mtu),
            None => Err(Errno::NETUNREACH.into()),
        }),
    };
    let station = Station { mac, address: SocketAddr::new(gid.to_ip(), 0) };
    Ok((setup, Packet::new((socket, None), device, station, None)?))
}

/// The GID that each RoCE v1 port has: its MAC address as a link-local IPv6 address (RFC 4291, A).
fn gid_of(MacAddress([a, b, c, d, e, f]): MacAddress) -> Gid {
    Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

/// The MAC address of the port with such a GID; none if it is another one.
fn mac_of(gid: IpAddr) -> Option<MacAddress> {
    match Gid::from_ip(gid).0 {
        [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a, b, c, 0xff, 0xfe, d, e, f] => {
            let mac = MacAddress([a ^ 2, b, c, d, e, f]);
            // Not that of a group.
            (mac.0[0] & 1 == 0).then_some(mac)
        }
        _ => None,
    }
}

/// Whether packet sockets of a kernel of this release can receive trains of UDP. Before Linux 6.2
/// they lose them.
fn joins_trains(release: &str) -> bool {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    let mut next = || numbers.next().and_then(|number| number.parse::<u32>().ok()).unwrap_or(0);
    (next(), next()) >= (6, 2)
}

/// The router to other networks that the kernel uses on a device, for addresses of this family.
fn gateway(device: &str, address: IpAddr) -> Option<IpAddr> {
    match address {
        IpAddr::V4(_) => ipv4_gateway(&fs::read_to_string("/proc/net/route").ok()?, device),
        IpAddr::V6(_) => ipv6_gateway(&fs::read_to_string("/proc/net/ipv6_route").ok()?, device),
    }
}

/// The gateway of the default route over `device`, in a table like `/proc/net/route`.
fn ipv4_gateway(table: &str, device: &str) -> Option<IpAddr> {
    table.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (name, target, gateway) = (fields.next()?, fields.next()?, fields.next()?);
        // In the byte order of the machine.
        let gateway = u32::from_str_radix(gateway, 16).ok()?.to_ne_bytes();
        let is_default = name == device && target == "00000000" && gateway != [0; 4];
        is_default.then(|| Ipv4Addr::from(gateway).into())
    })
}

/// The same, in a table like `/proc/net/ipv6_route`.
fn ipv6_gateway(table: &str, device: &str) -> Option<IpAddr> {
    table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, target_bits, _, _, gateway, .., name] = fields[..] else { return None };
        let gateway = u128::from_str_radix(gateway, 16).ok()?;
        let is_default = name == device && target_bits == "00" && gateway != 0;
        is_default.then(|| Ipv6Addr::from(gateway).into())
    })
}

/// A socket that drops what comes to the UDP port; none if somebody else has that port.
fn sink(address: IpAddr, index: u32) -> io::Result<Option<UdpSocket>> {
    let at = match address {
        IpAddr::V4(_) => SocketAddr::new(address, UDP_PORT),
        IpAddr::V6(address) => SocketAddrV6::new(address, UDP_PORT, 0, index).into(),
    };
    match UdpSocket::bind(at) {
        Ok(socket) => {
            // Else the kernel cuts each train for it first.
            join_receives(socket.as_fd())?;
            drop_all(socket.as_fd())?;
            Ok(Some(socket))
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
        Err(error) => Err(error),
    }
}

/// Claims an address of a device. Two NICs there would both receive all packets, and each would
/// refuse what is for the other.
fn claim(device: &str, address: SocketAddr) -> io::Result<UnixDatagram> {
    let name = unix::SocketAddr::from_abstract_name(format!("smcgate {device} {address}"))?;
    UnixDatagram::bind_addr(&name).map_err(|error| {
        if error.kind() != io::ErrorKind::AddrInUse {
            return error;
        }
        let why = format!("another RNIC of this kind has {} on {device}", address.ip());
        io::Error::new(io::ErrorKind::AddrInUse, why)
    })
}

impl Packet {
    fn new(
        (socket, sink): (PacketSocket, Option<UdpSocket>),
        device: &NetworkDevice,
        station: Station,
        neighbours: Option<Neighbours>,
    ) -> io::Result<Self> {
        let claim = claim(&device.name, station.address)?;
        let device = NetDevice::named(&device.name)?;
        let link = device.link();
        Ok(Self {
            socket,
            ring: FrameRing::new(RECEIVE_BUFFERS),
            device,
            // Only trains of UDP are cut on their way.
            segments_max: if neighbours.is_some() { SEGMENTS_MAX } else { 1 },
            neighbours,
            station,
            burst: Vec::with_capacity(RECEIVE_BUFFERS),
            headers: [Headers { bytes: [0; HEADERS_MAX], len: 0 }; SEND_BURST],
            now: Instant::default(),
            link,
            link_seen: None,
            _sink: sink,
            _claim: claim,
        })
    }

    /// Looks whether the device can carry packets, if that was long ago.
    fn watch(&mut self, now: Instant) {
        self.now = now;
        if self.link_seen.is_none_or(|seen| now.since(seen) >= LINK_INTERVAL) {
            self.link_seen = Some(now);
            let link = self.device.link();
            let before = std::mem::replace(&mut self.link, link);
            if link == Link::Up && before != Link::Up {
                self.neighbours.iter_mut().for_each(Neighbours::doubt_all);
            }
        }
    }

    /// Sends what neighbours were asked or answered. What the kernel does not take is lost.
    fn send_discovery(&mut self) {
        let Some(neighbours) = &mut self.neighbours else { return };
        while let Some(frame) = neighbours.poll_frame() {
            let whole = Departing { headers: &frame, bytes: &[], segment_len: None };
            let _ = self.socket.send([whole].into_iter());
        }
    }

    /// Writes the headers of the next runs whose next hop is known. Returns how many they are.
    fn address(&mut self, bytes: &[u8], runs: &[Run]) -> usize {
        let mut count = 0;
        for (run, headers) in runs.iter().zip(&mut self.headers) {
            let target = run.target.ip();
            let mac = match &mut self.neighbours {
                Some(neighbours) => neighbours.find(self.now, target),
                None => mac_of(target),
            };
            let Some(mac) = mac else { break };
            let to = Station { mac, address: run.target };
            let way = Way { from: self.station, to, reacts: run.reacts };
            headers.len = match &self.neighbours {
                Some(_) => frame::write_headers(&mut headers.bytes, way, run.range.len()),
                None => {
                    let packet = &bytes[run.range.clone()];
                    frame::write_head(&mut headers.bytes, way, 0, packet, false)
                }
            };
            count += 1;
        }
        count
    }

    /// Sends the first packet of `run` alone, whose headers were not written for that. Returns
    /// whether the kernel accepted it.
    fn sends_alone(&mut self, bytes: &[u8], run: &Run) -> bool {
        let range = run.range.start..run.range.start + run.segment_len;
        let alone = Run { range, segments: 1, ..run.clone() };
        if self.address(bytes, std::slice::from_ref(&alone)) == 0 {
            return false;
        }
        let is_udp = self.neighbours.is_some();
        self.socket.send(departing(bytes, &[alone], &self.headers, is_udp)).is_ok()
    }
}

fn departing<'a>(
    bytes: &'a [u8],
    runs: &'a [Run],
    headers: &'a [Headers],
    is_udp: bool,
) -> impl Iterator<Item = Departing<'a>> {
    runs.iter().zip(headers).map(move |(run, headers)| Departing {
        headers: &headers.bytes[..headers.len],
        bytes: &bytes[run.range.clone()],
        segment_len: is_udp.then_some(run.segment_len),
    })
}

impl Wire for Packet {
    fn receive(&mut self, now: Instant) -> usize {
        self.watch(now);
        self.burst.clear();
        // If an error persists, no packets arrive, and the queue pairs break by timeout.
        for index in 0..self.ring.receive(&self.socket).unwrap_or(0) {
            let frame = self.ring.arrived(index);
            let is_ours = frame.bytes.get(..6) == Some(&self.station.mac.0[..]);
            match frame::parse(frame.bytes).filter(|_| is_ours) {
                Some(arrived) if arrived.target == self.station.address => {
                    let len = arrived.packet.len();
                    let segment_len = frame.segment_len.unwrap_or(len).clamp(1, len.max(1));
                    self.burst.push(Arrival {
                        frame: index,
                        packets: arrived.packet,
                        segment_len,
                        source: arrived.source,
                        ecn: arrived.ecn,
                        identification: arrived.identification,
                    });
                }
                Some(_) => {}
                None => {
                    if let Some(neighbours) = &mut self.neighbours {
                        neighbours.handle(now, frame.bytes);
                    }
                }
            }
        }
        self.send_discovery();
        self.burst.len()
    }

    fn train(&self, index: usize) -> Train<'_> {
        let arrival = &self.burst[index];
        let frame = self.ring.arrived(arrival.frame);
        Train {
            source: arrival.source,
            bytes: &frame.bytes[arrival.packets.clone()],
            segment_len: arrival.segment_len,
            ecn: arrival.ecn,
            identification: Some(arrival.identification),
        }
    }

    fn send(&mut self, now: Instant, bytes: &[u8], runs: &[Run]) -> Sent {
        self.watch(now);
        if self.link != Link::Up {
            return Sent { runs: runs.len(), refused: runs.len() };
        }
        let mut sent = Sent::default();
        while sent.runs < runs.len() {
            let left = &runs[sent.runs..];
            let count = self.address(bytes, left);
            let is_udp = self.neighbours.is_some();
            let result = match count {
                0 => Err(Unsent::Unreachable),
                _ => self.socket.send(departing(bytes, &left[..count], &self.headers, is_udp)),
            };
            match result {
                Ok(count) => sent.runs += count,
                Err(Unsent::Full) => break,
                Err(Unsent::Unable) => {
                    // As over UDP: either the kernel cannot cut this run, or the device is gone.
                    if left[0].segments > 1 && self.sends_alone(bytes, &left[0]) {
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
        self.send_discovery();
        sent
    }

    fn segments_max(&self) -> usize {
        self.segments_max
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn link(&self) -> Link {
        self.link
    }
}

/// The Ethernet type of RoCE v1.
const ROCE_V1: u16 = 0x8915;
/// How often to look at the link.
const LINK_INTERVAL: Duration = Duration::from_millis(10);
/// The buffer size that we request for each direction of the socket.
const BUFFER_LEN: usize = 8 << 20;
/// The most frames that one system call receives.
const RECEIVE_BUFFERS: usize = 8;
/// The most runs that one system call sends.
const SEND_BURST: usize = 16;
/// Ethernet, IPv6 and UDP.
const HEADERS_MAX: usize = 62;

#[cfg(test)]
mod tests {
    use super::*;

    /// From a host with two devices.
    #[test]
    fn the_router_of_the_device_is_found() {
        let table = "\
            Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
            eth0\t00000000\t010A000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
            eth0\t000A000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
            eth1\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        assert_eq!(ipv4_gateway(table, "eth0"), Some([10, 0, 10, 1].into()));
        assert_eq!(ipv4_gateway(table, "eth1"), None);
        let table = "\
            fd000000000000000000000000000000 40 00000000000000000000000000000000 00 \
            00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth0\n\
            00000000000000000000000000000000 00 00000000000000000000000000000000 00 \
            fd0000000000000000000000000000fe 00000400 00000001 00000000 00000003     eth0\n";
        assert_eq!(ipv6_gateway(table, "eth0"), Some("fd00::fe".parse().unwrap()));
        assert_eq!(ipv6_gateway(table, "lo"), None);
    }

    /// As Linux makes the first entry of each port's GID table.
    #[test]
    fn a_gid_of_version_1_is_a_mac_address() {
        let mac = MacAddress([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
        let gid = gid_of(mac);
        assert_eq!(gid.to_ip(), "fe80::5054:ff:fe12:3456".parse::<IpAddr>().unwrap());
        assert_eq!(mac_of(gid.to_ip()), Some(mac));
        for other in ["fe80::1", "fd00::5054:ff:fe12:3456", "10.0.0.1", "fe80::300:ff:fe00:1"] {
            assert_eq!(mac_of(other.parse().unwrap()), None, "{other}");
        }
    }

    #[test]
    fn kernels_that_lose_trains_are_refused() {
        for (release, joins) in
            [("6.18.44-fc", true), ("6.2.0", true), ("6.1.0-37", false), ("7.0", true)]
        {
            assert_eq!(joins_trains(release), joins, "{release}");
        }
    }

    #[test]
    fn what_is_no_ethernet_device_is_refused() {
        for (device, why) in [("lo", "no Ethernet device"), ("nowhere7", "no such network device")]
        {
            for version in [Version::V1, Version::V2] {
                let config = Config { device, address: None, version, mtu_max: None };
                let error = open(&config).map(drop).unwrap_err().to_string();
                assert!(error.contains(why), "{device}: {error}");
            }
        }
    }
}
