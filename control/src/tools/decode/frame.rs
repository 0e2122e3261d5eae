//! Finds the TCP segment or the RoCE packet in a captured frame.
//!
//! Lengths in headers are trusted only as far as there are bytes. Frames that carry neither TCP nor
//! RoCE, and later fragments, give `None`: a capture is full of other traffic.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The packet in a frame that is of interest to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet<'a> {
    pub(super) source: IpAddr,
    pub(super) target: IpAddr,
    pub(super) content: Content<'a>,
}

/// The layer above IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content<'a> {
    Tcp(Segment<'a>),
    Roce(Datagram<'a>),
}

/// One TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment<'a> {
    pub(super) source_port: u16,
    pub(super) target_port: u16,
    pub(super) sequence: u32,
    pub(super) flags: u8,
    pub(super) options: &'a [u8],
    pub(super) payload: &'a [u8],
}

impl Segment<'_> {
    pub(super) const FIN: u8 = 0x01;
    pub(super) const SYN: u8 = 0x02;
    pub(super) const RST: u8 = 0x04;
    pub(super) const ACK: u8 = 0x10;

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// A RoCE datagram from the base transport header on. It holds several packets of one length if the
/// capture was taken above segmentation offload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Datagram<'a> {
    pub(super) bytes: &'a [u8],
    /// The length it had on the wire; more than `bytes` if the capture cut it.
    pub(super) wire_bytes: usize,
}

/// Link types of capture files, by their registered numbers.
mod link_type {
    pub(super) const NULL: u32 = 0;
    pub(super) const ETHERNET: u32 = 1;
    pub(super) const RAW_BSD: u32 = 12;
    pub(super) const RAW: u32 = 101;
    pub(super) const LINUX_COOKED: u32 = 113;
    pub(super) const IPV4: u32 = 228;
    pub(super) const IPV6: u32 = 229;
    pub(super) const LINUX_COOKED_2: u32 = 276;
}

mod ethertype {
    pub(super) const IPV4: u16 = 0x0800;
    pub(super) const VLAN: u16 = 0x8100;
    pub(super) const IPV6: u16 = 0x86dd;
    pub(super) const PROVIDER_VLAN: u16 = 0x88a8;
    pub(super) const ROCE_V1: u16 = 0x8915;
}

mod protocol {
    pub(super) const HOP_BY_HOP: u8 = 0;
    pub(super) const TCP: u8 = 6;
    pub(super) const UDP: u8 = 17;
    pub(super) const ROUTING: u8 = 43;
    pub(super) const FRAGMENT: u8 = 44;
    pub(super) const DESTINATION: u8 = 60;
}

/// The UDP port of RoCEv2.
const ROCE_PORT: u16 = 4791;
/// The most IPv6 extension headers that are followed.
const EXTENSIONS_MAX: usize = 8;

/// Whether frames of this link type can be read at all.
pub(super) fn is_known(link: u32) -> bool {
    use link_type::*;
    matches!(link, NULL | ETHERNET | RAW_BSD | RAW | LINUX_COOKED | IPV4 | IPV6 | LINUX_COOKED_2)
}

/// The packet in a frame of the given link type, if it is of interest to us.
pub(super) fn dissect(link: u32, frame: &[u8]) -> Option<Packet<'_>> {
    match link {
        link_type::ETHERNET => typed(u16_at(frame, 12)?, frame.get(14..)?),
        link_type::LINUX_COOKED => typed(u16_at(frame, 14)?, frame.get(16..)?),
        link_type::LINUX_COOKED_2 => typed(u16_at(frame, 0)?, frame.get(20..)?),
        link_type::NULL => ip(frame.get(4..)?),
        link_type::RAW_BSD | link_type::RAW | link_type::IPV4 | link_type::IPV6 => ip(frame),
        _ => None,
    }
}

/// The packet in a payload with an Ethernet type, behind any VLAN tags.
fn typed(mut ethertype: u16, mut rest: &[u8]) -> Option<Packet<'_>> {
    while matches!(ethertype, ethertype::VLAN | ethertype::PROVIDER_VLAN) {
        ethertype = u16_at(rest, 2)?;
        rest = rest.get(4..)?;
    }
    match ethertype {
        ethertype::IPV4 | ethertype::IPV6 => ip(rest),
        ethertype::ROCE_V1 => roce_v1(rest),
        _ => None,
    }
}

fn ip(packet: &[u8]) -> Option<Packet<'_>> {
    match packet.first()? >> 4 {
        4 => ipv4(packet),
        6 => ipv6(packet),
        _ => None,
    }
}

fn ipv4(packet: &[u8]) -> Option<Packet<'_>> {
    let header_bytes = usize::from(packet.first()? & 0x0f) * 4;
    if u16_at(packet, 6)? & 0x1fff != 0 {
        return None; // only the first fragment has ports
    }
    let total_bytes = match usize::from(u16_at(packet, 2)?) {
        0 => packet.len(), // the sending host left the field to its NIC
        total_bytes => total_bytes,
    };
    let source = Ipv4Addr::from(array::<4>(packet, 12)?).into();
    let target = Ipv4Addr::from(array::<4>(packet, 16)?).into();
    let rest = packet.get(header_bytes.max(20)..total_bytes.min(packet.len()))?;
    let content = content(*packet.get(9)?, rest)?;
    Some(Packet { source, target, content })
}

fn ipv6(packet: &[u8]) -> Option<Packet<'_>> {
    let source = Ipv6Addr::from(array::<16>(packet, 8)?).into();
    let target = Ipv6Addr::from(array::<16>(packet, 24)?).into();
    let end = match usize::from(u16_at(packet, 4)?) {
        0 => packet.len(),
        payload_bytes => (40 + payload_bytes).min(packet.len()),
    };
    let mut next = *packet.get(6)?;
    let mut rest = packet.get(40..end)?;
    for _ in 0..EXTENSIONS_MAX {
        let header_bytes = match next {
            protocol::HOP_BY_HOP | protocol::ROUTING | protocol::DESTINATION => {
                usize::from(*rest.get(1)?) * 8 + 8
            }
            protocol::FRAGMENT if u16_at(rest, 2)? & 0xfff8 == 0 => 8,
            _ => break,
        };
        next = *rest.first()?;
        rest = rest.get(header_bytes..)?;
    }
    Some(Packet { source, target, content: content(next, rest)? })
}

/// RoCE version 1: a global route header, laid out like that of IPv6, right above Ethernet.
fn roce_v1(packet: &[u8]) -> Option<Packet<'_>> {
    let wire_bytes = usize::from(u16_at(packet, 4)?);
    let rest = packet.get(40..)?;
    let bytes = &rest[..rest.len().min(wire_bytes)];
    Some(Packet {
        source: Ipv6Addr::from(array::<16>(packet, 8)?).into(),
        target: Ipv6Addr::from(array::<16>(packet, 24)?).into(),
        content: Content::Roce(Datagram { bytes, wire_bytes }),
    })
}

fn content(protocol: u8, rest: &[u8]) -> Option<Content<'_>> {
    match protocol {
        protocol::TCP => {
            let header_bytes = usize::from(rest.get(12)? >> 4) * 4;
            Some(Content::Tcp(Segment {
                source_port: u16_at(rest, 0)?,
                target_port: u16_at(rest, 2)?,
                sequence: u32::from_be_bytes(array(rest, 4)?),
                flags: *rest.get(13)?,
                options: rest.get(20..header_bytes)?,
                payload: rest.get(header_bytes..)?,
            }))
        }
        protocol::UDP if u16_at(rest, 2)? == ROCE_PORT => {
            let bytes = rest.get(8..)?;
            let wire_bytes = match usize::from(u16_at(rest, 4)?) {
                0 => bytes.len(),
                udp_bytes => udp_bytes.checked_sub(8)?,
            };
            let bytes = &bytes[..bytes.len().min(wire_bytes)];
            Some(Content::Roce(Datagram { bytes, wire_bytes }))
        }
        _ => None,
    }
}

/// `N` bytes from `at` on, if they are there.
pub(super) fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// A big-endian number from `at` on, if it is there.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A UDP datagram of twelve bytes for RoCE in an IPv4 packet.
    fn ipv4_roce() -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 17, 0, 0];
        packet.extend([10, 8, 0, 1, 10, 8, 0, 2]);
        packet.extend([0xc0, 0, 0x12, 0xb7, 0, 20, 0, 0]);
        packet.extend([0x11; 12]);
        packet
    }

    fn is_our_packet(packet: Packet<'_>) -> bool {
        let roce = Content::Roce(Datagram { bytes: &[0x11; 12], wire_bytes: 12 });
        let (source, target) = ("10.8.0.1".parse().unwrap(), "10.8.0.2".parse().unwrap());
        packet == Packet { source, target, content: roce }
    }

    /// A capture of device `any`, a VLAN or a tunnel shows the same packets as one of Ethernet.
    #[test]
    fn every_link_type_leads_to_the_same_packet() {
        let ip = ipv4_roce();
        let headed = |head: &[u8]| [head, &ip].concat();
        let ethernet = headed(&[&[0; 12][..], &[0x08, 0]].concat());
        let vlan = headed(&[&[0; 12][..], &[0x88, 0xa8, 0, 7, 0x81, 0, 0, 8, 0x08, 0]].concat());
        let cooked = headed(&[&[0; 14][..], &[0x08, 0]].concat());
        let cooked_2 = headed(&[&[0x08, 0][..], &[0; 18]].concat());
        for (link, frame) in [
            (link_type::ETHERNET, ethernet),
            (link_type::ETHERNET, vlan),
            (link_type::LINUX_COOKED, cooked),
            (link_type::LINUX_COOKED_2, cooked_2),
            (link_type::NULL, headed(&[2, 0, 0, 0])),
            (link_type::RAW, ip.clone()),
            (link_type::IPV4, ip.clone()),
        ] {
            assert!(is_known(link));
            assert!(is_our_packet(dissect(link, &frame).unwrap()), "link type {link}");
            // A frame that is cut anywhere gives a shorter packet or none, but never a panic.
            for cut in 0..frame.len() {
                dissect(link, &frame[..cut]);
            }
        }
    }

    /// Ethernet pads short frames; the padding must not become part of a message.
    #[test]
    fn padding_is_not_payload() {
        let mut padded = ipv4_roce();
        padded.extend([0xee; 6]);
        assert!(is_our_packet(dissect(link_type::RAW, &padded).unwrap()));
    }

    /// The payload of a later fragment must not be mistaken for ports.
    #[test]
    fn later_fragments_are_skipped() {
        let mut fragment = ipv4_roce();
        fragment[7] = 1;
        assert_eq!(dissect(link_type::RAW, &fragment), None);
    }

    #[test]
    fn ipv6_extension_headers_are_followed() {
        let mut packet = vec![0x60, 0, 0, 0, 0, 28, protocol::HOP_BY_HOP, 64];
        packet.extend([0xfd; 16]);
        packet.extend([0xfe; 16]);
        packet.extend([protocol::UDP, 0, 0, 0, 0, 0, 0, 0]);
        packet.extend([0xc0, 0, 0x12, 0xb7, 0, 20, 0, 0]);
        packet.extend([0x11; 12]);
        let packet = dissect(link_type::IPV6, &packet).unwrap();
        assert_eq!(packet.source, IpAddr::from([0xfd; 16]));
        let roce = Content::Roce(Datagram { bytes: &[0x11; 12], wire_bytes: 12 });
        assert_eq!(packet.content, roce);
    }
}
