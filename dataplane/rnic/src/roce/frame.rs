//! Ethernet frames that carry RoCE: IPv4 or IPv6, UDP, and the packet, or the packet behind a
//! global route header (GRH), which looks like that of IPv6. Addresses of the latter have port 0.
//!
//! ```text
//!   RoCE v2   | Ethernet 14 | IPv4 20 or IPv6 40 | UDP 8 | BTH … ICRC |
//!   RoCE v1   | Ethernet 14 | GRH 40 | BTH … ICRC |
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;

use smcr_proto::MacAddress;

use super::batch::{Ecn, PACKET_MAX, traffic_class};

/// A RoCEv2 packet in a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arrived {
    /// Who sent it.
    pub(crate) source: SocketAddr,
    /// Who gets it.
    pub(crate) target: SocketAddr,
    /// What its IP header says of congestion.
    pub(crate) ecn: Ecn,
    /// The identification in its IPv4 header; 0 over IPv6, which has none.
    pub(crate) identification: u16,
    /// Where the packet is in the frame.
    pub(crate) packet: Range<usize>,
}

/// One end of a frame's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Station {
    pub(crate) mac: MacAddress,
    pub(crate) address: SocketAddr,
}

/// The way of a frame, and what its IP header says of congestion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) from: Station,
    pub(crate) to: Station,
    /// Whether the sender reacts to marks.
    pub(crate) reacts: bool,
}

/// Reads a UDP datagram, or a packet of RoCE v1; none if the frame holds something else, or only a
/// part of one.
pub(crate) fn parse(frame: &[u8]) -> Option<Arrived> {
    let kind = u16::from_be_bytes(*frame.get(12..14)?.first_chunk()?);
    let ip = frame.get(ETHERNET_LEN..)?;
    let (source, target, (ecn, identification), header_len, datagram_len) = match kind {
        IPV4 => {
            let header = ip.first_chunk::<IPV4_LEN>()?;
            let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
            // A fragment, or the first of some.
            let in_parts = u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0;
            if header[0] != 0x45 || header[9] != UDP || in_parts || total > ip.len() {
                return None;
            }
            let address = |at: usize| -> Option<IpAddr> {
                Some(Ipv4Addr::from(*header[at..].first_chunk::<4>()?).into())
            };
            let identification = u16::from_be_bytes([header[4], header[5]]);
            let facts = (Ecn::of(header[1]), identification);
            (address(12)?, address(16)?, facts, IPV4_LEN, total.checked_sub(IPV4_LEN)?)
        }
        IPV6 => {
            let header = ip.first_chunk::<IPV6_LEN>()?;
            let payload = usize::from(u16::from_be_bytes([header[4], header[5]]));
            if header[0] >> 4 != 6 || header[6] != UDP || IPV6_LEN + payload > ip.len() {
                return None;
            }
            let address = |at: usize| -> Option<IpAddr> {
                Some(Ipv6Addr::from(*header[at..].first_chunk::<16>()?).into())
            };
            (address(8)?, address(24)?, (Ecn::of(header[1] >> 4), 0), IPV6_LEN, payload)
        }
        ROCE_V1 => return parse_v1(ip),
        _ => return None,
    };
    let udp = ip.get(header_len..header_len + datagram_len)?;
    let header = udp.first_chunk::<UDP_LEN>()?;
    let port = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    // What is behind the datagram is padding: short frames have some.
    let udp_len = usize::from(port(4));
    if udp_len > udp.len() || udp_len < UDP_LEN {
        return None;
    }
    let start = ETHERNET_LEN + header_len;
    Some(Arrived {
        source: SocketAddr::new(source, port(0)),
        target: SocketAddr::new(target, port(2)),
        ecn,
        identification,
        packet: start + UDP_LEN..start + udp_len,
    })
}

/// Reads a packet behind a global route header.
fn parse_v1(grh: &[u8]) -> Option<Arrived> {
    let header = grh.first_chunk::<IPV6_LEN>()?;
    let len = usize::from(u16::from_be_bytes([header[4], header[5]]));
    if header[0] >> 4 != 6 || header[6] != BTH || IPV6_LEN + len > grh.len() {
        return None;
    }
    let gid = |at: usize| -> Option<SocketAddr> {
        let octets = *header[at..].first_chunk::<16>()?;
        Some(SocketAddr::new(Ipv6Addr::from(octets).into(), 0))
    };
    let start = ETHERNET_LEN + IPV6_LEN;
    let (source, target) = (gid(8)?, gid(24)?);
    let ecn = Ecn::of(header[1] >> 4);
    Some(Arrived { source, target, ecn, identification: 0, packet: start..start + len })
}

/// Writes the frame that carries `packet`. Returns its length. With `leave_sum` the checksum of an
/// IPv4 header is left to the port.
///
/// # Panics
///
/// If `out` is too short, or the addresses are not of one family.
pub(super) fn write(
    out: &mut [u8],
    way: Way,
    identification: u16,
    packet: &[u8],
    leave_sum: bool,
) -> usize {
    let at = write_head(out, way, identification, packet, leave_sum);
    out[at..at + packet.len()].copy_from_slice(packet);
    at + packet.len()
}

/// Writes what is in front of `packet` in its frame, as [`write()`] does. Returns how long that is.
///
/// # Panics
///
/// As [`write()`].
pub(crate) fn write_head(
    out: &mut [u8],
    Way { from, to, reacts }: Way,
    identification: u16,
    packet: &[u8],
    leave_sum: bool,
) -> usize {
    out[..6].copy_from_slice(&to.mac.0);
    out[6..12].copy_from_slice(&from.mac.0);
    if to.address.port() == 0 {
        return write_grh(out, Way { from, to, reacts }, packet.len());
    }
    let udp_len = u16::try_from(UDP_LEN + packet.len()).expect("a packet is below 5,000 bytes");
    let udp_at = match (from.address.ip(), to.address.ip()) {
        (IpAddr::V4(source), IpAddr::V4(target)) => {
            out[12..14].copy_from_slice(&IPV4.to_be_bytes());
            let tos = traffic_class(reacts);
            let header = ipv4((source, target), tos, identification, udp_len, leave_sum);
            out[ETHERNET_LEN..ETHERNET_LEN + IPV4_LEN].copy_from_slice(&header);
            ETHERNET_LEN + IPV4_LEN
        }
        (IpAddr::V6(source), IpAddr::V6(target)) => {
            out[12..14].copy_from_slice(&IPV6.to_be_bytes());
            let header = &mut out[ETHERNET_LEN..ETHERNET_LEN + IPV6_LEN];
            header[..4].copy_from_slice(&[0x60, traffic_class(reacts) << 4, 0, 0]);
            header[4..6].copy_from_slice(&udp_len.to_be_bytes());
            header[6..8].copy_from_slice(&[UDP, HOPS]);
            header[8..24].copy_from_slice(&source.octets());
            header[24..40].copy_from_slice(&target.octets());
            ETHERNET_LEN + IPV6_LEN
        }
        _ => unreachable!("the addresses of a queue pair are of one family"),
    };
    let udp = &mut out[udp_at..udp_at + UDP_LEN];
    udp[..2].copy_from_slice(&from.address.port().to_be_bytes());
    udp[2..4].copy_from_slice(&to.address.port().to_be_bytes());
    udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
    udp[6..8].fill(0);
    // Over IPv4 the ICRC covers all of it. IPv6 has no checksum of its own, so that hosts drop
    // datagrams that have none either.
    if let (IpAddr::V6(source), IpAddr::V6(target)) = (from.address.ip(), to.address.ip()) {
        // The header has an even length, so the sums of both parts add up.
        let sum = checksum_over_ipv6(source, target, UDP, (udp, packet));
        // Zero means that there is none.
        let sum = if sum == 0 { u16::MAX } else { sum };
        udp[6..8].copy_from_slice(&sum.to_be_bytes());
    }
    udp_at + UDP_LEN
}

/// Writes the global route header of RoCE v1, behind the addresses of Ethernet.
fn write_grh(out: &mut [u8], Way { from, to, reacts }: Way, packet_len: usize) -> usize {
    let gid = |address: IpAddr| match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    };
    out[12..14].copy_from_slice(&ROCE_V1.to_be_bytes());
    let header = &mut out[ETHERNET_LEN..ETHERNET_LEN + IPV6_LEN];
    header[..4].copy_from_slice(&[0x60, traffic_class(reacts) << 4, 0, 0]);
    let len = u16::try_from(packet_len).expect("a packet is below 5,000 bytes");
    header[4..6].copy_from_slice(&len.to_be_bytes());
    header[6..8].copy_from_slice(&[BTH, HOPS]);
    header[8..24].copy_from_slice(&gid(from.address.ip()));
    header[24..40].copy_from_slice(&gid(to.address.ip()));
    ETHERNET_LEN + IPV6_LEN
}

/// Writes the headers in front of a train of packets of `payload_len` bytes in all, as if they were
/// one. Returns their length. The checksum of UDP is left to the kernel: the field has that of the
/// pseudo-header only.
///
/// # Panics
///
/// If `out` is too short, or the addresses are not of one family.
pub(super) fn write_headers(out: &mut [u8], way: Way, payload_len: usize) -> usize {
    let len = write(out, way, 0, &[], false);
    let (ip, udp) = out[ETHERNET_LEN..len].split_at_mut(len - ETHERNET_LEN - UDP_LEN);
    let udp_len = u16::try_from(UDP_LEN + payload_len).expect("a train is below 64 KiB");
    udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
    let addresses = match (way.from.address, way.to.address) {
        (SocketAddr::V4(from), SocketAddr::V4(to)) => {
            let tos = traffic_class(way.reacts);
            ip.copy_from_slice(&ipv4((*from.ip(), *to.ip()), tos, 0, udp_len, false));
            &ip[12..20]
        }
        _ => {
            ip[4..6].copy_from_slice(&udp_len.to_be_bytes());
            &ip[8..40]
        }
    };
    let pseudo = folded(sum(addresses) + u64::from(UDP) + u64::from(udp_len));
    udp[6..8].copy_from_slice(&pseudo.to_be_bytes());
    len
}

fn ipv4(
    (source, target): (Ipv4Addr, Ipv4Addr),
    tos: u8,
    identification: u16,
    udp_len: u16,
    leave_sum: bool,
) -> [u8; IPV4_LEN] {
    let mut header = [0; IPV4_LEN];
    let total = udp_len + 20;
    header[0] = 0x45;
    header[1] = tos;
    header[2..4].copy_from_slice(&total.to_be_bytes());
    header[4..6].copy_from_slice(&identification.to_be_bytes());
    // Do not fragment: the ICRC covers this bit.
    header[6] = 0x40;
    header[8..10].copy_from_slice(&[HOPS, UDP]);
    header[12..16].copy_from_slice(&source.octets());
    header[16..20].copy_from_slice(&target.octets());
    if !leave_sum {
        let sum = !folded(sum(&header));
        header[10..12].copy_from_slice(&sum.to_be_bytes());
    }
    header
}

/// The checksum of what an IPv6 packet carries: over its addresses, length and kind, and the bytes,
/// in two parts of which the first has an even length. The field of the checksum itself must be
/// zero.
pub(super) fn checksum_over_ipv6(
    source: Ipv6Addr,
    target: Ipv6Addr,
    kind: u8,
    (head, rest): (&[u8], &[u8]),
) -> u16 {
    let addresses = sum(&source.octets()) + sum(&target.octets()) + u64::from(kind);
    let len = head.len() + rest.len();
    !folded(addresses + len as u64 + sum(head) + sum(rest))
}

/// The sum of big-endian words of 16 bits; a last single byte counts as the upper half of one.
fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    let words: u64 = words.iter().map(|word| u64::from(u32::from_be_bytes(*word))).sum();
    let (halves, last) = rest.as_chunks::<2>();
    let halves: u64 = halves.iter().map(|half| u64::from(u16::from_be_bytes(*half))).sum();
    // 65,536 is 1 modulo 65,535, so wider words have the same sum.
    words + halves + last.first().map_or(0, |&byte| u64::from(byte) << 8)
}

/// A sum in ones' complement.
fn folded(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).expect("it was folded")
}

pub(super) const ETHERNET_LEN: usize = 14;
const IPV4_LEN: usize = 20;
pub(super) const IPV6_LEN: usize = 40;
const UDP_LEN: usize = 8;
/// The most bytes in front of a packet.
pub(crate) const HEAD_MAX: usize = ETHERNET_LEN + IPV6_LEN + UDP_LEN;
/// The most bytes of a frame.
pub(crate) const FRAME_MAX: usize = HEAD_MAX + PACKET_MAX;
const IPV4: u16 = 0x0800;
pub(super) const IPV6: u16 = 0x86dd;
/// The Ethernet type of RoCE v1.
const ROCE_V1: u16 = 0x8915;
/// What follows a global route header.
const BTH: u8 = 0x1b;
const UDP: u8 = 17;
/// The most routers on the way.
const HOPS: u8 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn station(address: &str) -> Station {
        Station { mac: MacAddress([2, 0, 0, 0, 0, 9]), address: address.parse().unwrap() }
    }

    #[test]
    fn checksums_are_those_of_everybody() {
        // RFC 1071, 3: the bytes 00 01 f2 03 f4 f5 f6 f7 have the sum ddf2.
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(folded(sum(&bytes)), 0xddf2);
        assert_eq!(folded(sum(&bytes[..5])), folded(sum(&[0, 1, 0xf2, 3, 0xf4, 0])));
        let (source, target) = (Ipv4Addr::new(192, 168, 0, 1), Ipv4Addr::new(192, 168, 0, 199));
        let header = ipv4((source, target), 0, 0, 0x73 - 20, false);
        assert_eq!(header[10..12], [0xb8, 0x61]);
        assert_eq!(ipv4((source, target), 0, 0, 0x73 - 20, true)[10..12], [0, 0]);
    }

    #[test]
    fn what_is_written_is_read() {
        let packet: Vec<u8> = (0..61).collect();
        for (from, to) in [("10.0.0.1:4791", "10.0.0.2:4791"), ("[fd00::1]:7", "[fd00::2]:4791")] {
            let (from, to) = (station(from), station(to));
            let mut out = [0xee; 200];
            let way = Way { from, to, reacts: true };
            let len = write(&mut out, way, 5, &packet, false);
            let identification = if to.address.is_ipv4() { 5 } else { 0 };
            let expected = Arrived {
                source: from.address,
                target: to.address,
                ecn: Ecn::Capable,
                identification,
                packet: len - packet.len()..len,
            };
            assert_eq!(parse(&out[..len]), Some(expected.clone()));
            assert_eq!(parse(&out[..len + 9]), Some(expected), "padding");
            assert_eq!(out[len - packet.len()..len], packet);
            for short in 0..len {
                assert_eq!(parse(&out[..short]), None);
            }
        }
    }

    #[test]
    fn a_packet_of_version_1_has_a_global_route_header() {
        let (from, to) = (station("[fe80::1]:0"), station("[fe80::2]:0"));
        let way = Way { from, to, reacts: true };
        let packet: Vec<u8> = (0..61).collect();
        let mut out = [0xee; 200];
        let len = write(&mut out, way, 7, &packet, false);
        assert_eq!(len, 14 + 40 + 61);
        assert_eq!(out[12..22], [0x89, 0x15, 0x60, 0x20, 0, 0, 0, 61, 0x1b, 64]);
        let arrived = parse(&out[..len + 5]).expect("padding is not part of it");
        assert_eq!((arrived.source, arrived.target), (from.address, to.address));
        assert_eq!((arrived.ecn, &out[arrived.packet]), (Ecn::Capable, &packet[..]));
        for short in 0..len {
            assert_eq!(parse(&out[..short]), None);
        }
    }

    #[test]
    fn the_checksum_over_ipv6_makes_the_sum_all_ones() {
        let (from, to) = (station("[fd00::1]:4791"), station("[fd00::2]:4791"));
        let mut out = [0; 200];
        let len = write(&mut out, Way { from, to, reacts: false }, 0, &[1, 2, 3, 4, 5], false);
        let udp = &out[ETHERNET_LEN + IPV6_LEN..len];
        assert_ne!(udp[6..8], [0, 0]);
        let octets = |address: IpAddr| match address {
            IpAddr::V6(address) => address.octets(),
            IpAddr::V4(_) => unreachable!("both are IPv6"),
        };
        let addresses = sum(&octets(from.address.ip())) + sum(&octets(to.address.ip()));
        assert_eq!(folded(addresses + 17 + udp.len() as u64 + sum(udp)), 0xffff);
    }

    /// What the kernel completes must be what `write` would have made.
    #[test]
    fn headers_of_a_train_are_those_of_one_long_packet() {
        for (from, to) in [("10.0.0.1:4791", "10.0.0.2:4791"), ("[fd00::1]:7", "[fd00::2]:4791")] {
            let way = Way { from: station(from), to: station(to), reacts: true };
            let (mut headers, mut whole) = ([0; 100], [0; 300]);
            let packet: Vec<u8> = (0..200).collect();
            let len = write_headers(&mut headers, way, packet.len());
            let end = write(&mut whole, way, 0, &packet, false);
            assert_eq!(len + packet.len(), end);
            let sum_at = len - 2;
            assert_eq!(headers[..sum_at], whole[..sum_at]);
            let pseudo = u16::from_be_bytes([headers[sum_at], headers[sum_at + 1]]);
            whole[sum_at..len].copy_from_slice(&pseudo.to_be_bytes());
            let completed = !folded(sum(&whole[len - UDP_LEN..end]));
            assert_eq!(parse(&whole[..end]).map(|arrived| arrived.packet), Some(len..end));
            if let (IpAddr::V6(source), IpAddr::V6(target)) =
                (way.from.address.ip(), way.to.address.ip())
            {
                whole[sum_at..len].fill(0);
                let udp = &whole[len - UDP_LEN..end];
                assert_eq!(completed, checksum_over_ipv6(source, target, UDP, (udp, &[])));
            }
        }
    }

    #[test]
    fn fragments_and_other_protocols_are_not_ours() {
        let mut out = [0; 100];
        let (from, to) = (station("10.0.0.1:4791"), station("10.0.0.2:4791"));
        let len = write(&mut out, Way { from, to, reacts: false }, 0, &[7; 30], false);
        let with = |at: usize, byte: u8| {
            let mut frame = out[..len].to_vec();
            frame[at] = byte;
            parse(&frame)
        };
        assert!(parse(&out[..len]).is_some());
        assert_eq!(with(ETHERNET_LEN + 6, 0x20), None, "more fragments");
        assert_eq!(with(ETHERNET_LEN + 7, 1), None, "a fragment");
        assert_eq!(with(ETHERNET_LEN + 9, 6), None, "TCP");
        assert_eq!(with(ETHERNET_LEN, 0x46), None, "options, which the ICRC does not cover");
        assert_eq!(with(13, 6), None, "ARP");
        assert_eq!(with(ETHERNET_LEN + IPV4_LEN + 5, 7), None, "shorter than its header");
    }
}
