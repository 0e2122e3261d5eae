//! The invariant CRC, which protects the fields that must not change in flight (IBTA Annex A17,
//! 7.8.1).
//!
//! CRC-32 over eight bytes of ones, the IP and UDP headers and BTH with the fields that routers may
//! change set to ones, and the rest of the packet. It covers the identification of the IPv4 header,
//! which a UDP socket neither sets nor shows:
//!
//! - **Sending** from an unconnected socket with path MTU discovery on, the kernel sets DF and the
//!   identification 0, and segment i of a GSO send gets i. So the sender knows it in advance.
//! - **Receiving**, other NICs choose identifications of their own. A CRC is linear, so the
//!   difference between the two CRCs tells which identification would make the packet's CRC right
//!   ([`Flow::identify`]).
//!
//! Of 65,536 damaged packets, such a search accepts one. It is needed for the packets of
//! `rdma_rxe` and of hardware, whose identifications go up or are random; their order tells little,
//! because other streams of that host count along. For these packets 16 bits must do, together with
//! the checksums of each cable that they cross (they have no UDP checksum): what gets through is
//! damage that a router or a host did, once in 65,536 times.
//!
//! A gateway counts from 0 in each run, up to 63. A socket receives its packets in trains that
//! begin anywhere in a run, so there the search is needed too, but most of its results cannot be.
//! Once a peer has shown that it counts ([`Identifications`]), only small ones are believed. Then
//! one of 2^25 damaged packets is accepted, and of those that the kernel's UDP checksum, which
//! gateways send, has missed.

use std::net::{IpAddr, SocketAddr};

use super::wire::{BTH_LEN, ICRC_LEN};

/// The headers in front of the packets from one address to another, as the ICRC sees them.
///
/// A CRC is linear: what a field adds to it depends on nothing but the value of the field and the
/// number of bytes behind it. So the CRC over these headers is computed once, with zeros in the
/// fields that differ from packet to packet, and tables ([`Field`]) tell what those add.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flow {
    /// The CRC over eight bytes of ones, IP and UDP, with lengths and identification zero.
    headers: u32,
    /// How long these headers are.
    len: usize,
    kind: Kind,
}

/// What is in front of the BTH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// IPv4 and UDP.
    Ipv4,
    /// IPv6 and UDP.
    Ipv6,
    /// The global route header (GRH) of RoCE v1.
    Grh,
}

/// The result of an ICRC check when the identification is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is right, for this identification.
    Right(u16),
    /// It is wrong for all identifications.
    Wrong,
}

/// What a peer's packets have shown about their identifications.
///
/// A peer that counts from 0 never leaves that rule, because it follows from how it sends. If it
/// does anyway, we have misjudged it, and never require the rule again: so a peer whose packets
/// are good loses no more than [`Self::STRANGE_MAX`] of them in the life of a queue pair. Nobody
/// who sends in its name can make it lose more.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Identifications {
    /// Zeros since the last large one.
    zeros: u8,
    /// Large ones since the peer has shown that it counts from 0.
    strange: u8,
}

impl Identifications {
    /// Notes a packet that has the expected identification. Such a packet has passed the check of
    /// all 32 bits.
    pub(super) fn note(&mut self, identification: u16) {
        if identification == 0 {
            self.zeros = self.zeros.saturating_add(1);
        }
    }

    /// Whether to believe a packet whose identification was found by search.
    pub(super) fn admit(&mut self, identification: u16) -> bool {
        if identification < Self::COUNTED_MAX {
            self.note(identification);
            return true;
        }
        if self.zeros >= Self::ZEROS_MIN && self.strange < Self::STRANGE_MAX {
            self.strange += 1;
            return false;
        }
        self.zeros = 0;
        true
    }

    /// Identifications below this one are small: no kernel sends longer runs.
    const COUNTED_MAX: u16 = 128;
    /// So many zeros without a large one between them show that the peer counts from 0. A counter
    /// that goes up has 65,535 others between two zeros.
    const ZEROS_MIN: u8 = 8;
    /// After so many large ones we have misjudged the peer.
    const STRANGE_MAX: u8 = 4;
}

impl Flow {
    /// The headers of packets from `source` to `target`, which are of one address family. Without
    /// UDP ports they are those of RoCE v1.
    pub(super) fn new(source: SocketAddr, target: SocketAddr) -> Self {
        let mut bytes = [0xff; HEADERS_MAX];
        let has_ports = target.port() != 0;
        let (udp_at, kind) = match (source.ip(), target.ip()) {
            (IpAddr::V4(source), IpAddr::V4(target)) => {
                let ip = &mut bytes[LRH_LEN..LRH_LEN + IPV4_LEN];
                // Version and header length. Type of service, TTL and checksum count as ones.
                ip[0] = 0x45;
                ip[2..6].fill(0);
                ip[6..8].copy_from_slice(&DONT_FRAGMENT.to_be_bytes());
                ip[9] = UDP;
                ip[12..16].copy_from_slice(&source.octets());
                ip[16..20].copy_from_slice(&target.octets());
                (LRH_LEN + IPV4_LEN, Kind::Ipv4)
            }
            (source, target) => {
                let ip = &mut bytes[LRH_LEN..LRH_LEN + IPV6_LEN];
                // Traffic class, flow label and hop limit count as ones.
                ip[0] = 0x6f;
                ip[4..6].fill(0);
                ip[6] = if has_ports { UDP } else { BTH };
                ip[8..24].copy_from_slice(&to_ipv6(source));
                ip[24..40].copy_from_slice(&to_ipv6(target));
                (LRH_LEN + IPV6_LEN, if has_ports { Kind::Ipv6 } else { Kind::Grh })
            }
        };
        if kind == Kind::Grh {
            return Self { headers: smcr_crc::update(0, &bytes[..udp_at]), len: udp_at, kind };
        }
        let len = udp_at + UDP_LEN;
        bytes[udp_at..udp_at + 2].copy_from_slice(&source.port().to_be_bytes());
        bytes[udp_at + 2..udp_at + 4].copy_from_slice(&target.port().to_be_bytes());
        // Behind the ports come the length and the checksum, which counts as ones.
        bytes[udp_at + 4..udp_at + 6].fill(0);
        Self { headers: smcr_crc::update(0, &bytes[..len]), len, kind }
    }

    /// Writes the ICRC into the last bytes of `packet`, which is sent with `identification`.
    ///
    /// # Panics
    ///
    /// If `packet` is shorter than BTH and ICRC.
    pub(super) fn seal(&self, identification: u16, packet: &mut [u8]) {
        let at = packet.len() - ICRC_LEN;
        let icrc = self.compute(identification, &packet[..at]);
        packet[at..].copy_from_slice(&icrc.to_le_bytes());
    }

    /// Checks the last bytes of `packet`, given the identification its IP header had.
    pub(super) fn is_intact(&self, identification: u16, packet: &[u8]) -> bool {
        self.difference(identification, packet) == 0
    }

    /// Checks the last bytes of `packet` when its IP header is unknown. `guess` is tried first.
    ///
    /// If the guess is wrong, 16 of the 32 CRC bits are used up to find the identification, and
    /// only the other 16 detect errors. IPv6 has no identification, so all 32 bits detect errors.
    pub(super) fn identify(&self, guess: u16, packet: &[u8]) -> Verdict {
        let difference = self.difference(guess, packet);
        if difference == 0 {
            return Verdict::Right(guess);
        }
        if self.kind != Kind::Ipv4 {
            return Verdict::Wrong;
        }
        // The two bytes of the identification, and all covered bytes behind them.
        let behind = self.len - (LRH_LEN + 4) + packet.len() - ICRC_LEN;
        let cause = multiply(difference, backwards(behind));
        match u16::try_from(cause) {
            // The reflected CRC register has the first byte in its lowest bits.
            Ok(cause) => Verdict::Right(guess ^ cause.swap_bytes()),
            Err(_) => Verdict::Wrong,
        }
    }

    /// The XOR of the computed and the received ICRC: zero if it is right.
    fn difference(&self, identification: u16, packet: &[u8]) -> u32 {
        let Some((covered, icrc)) = packet.split_last_chunk::<ICRC_LEN>() else { return !0 };
        if covered.len() < BTH_LEN {
            return !0;
        }
        self.compute(identification, covered) ^ u32::from_le_bytes(*icrc)
    }

    /// The ICRC over `covered`, the part of the packet in front of it.
    fn compute(&self, identification: u16, covered: &[u8]) -> u32 {
        let udp_len = u16::try_from(UDP_LEN + covered.len() + ICRC_LEN).unwrap_or(u16::MAX);
        let lengths_and_identification = match self.kind {
            Kind::Ipv4 => {
                let total = IPV4_TOTAL.adds(udp_len.saturating_add(20));
                total ^ IPV4_ID.adds(identification) ^ UDP_LENGTH.adds(udp_len)
            }
            Kind::Ipv6 => IPV6_PAYLOAD.adds(udp_len) ^ UDP_LENGTH.adds(udp_len),
            Kind::Grh => GRH_PAYLOAD.adds(udp_len.saturating_sub(8)),
        };
        // Congestion marks and reserved bits of the BTH count as ones.
        let marks = usize::from(covered[MARKS_AT] ^ 0xff);
        let headers = self.headers ^ lengths_and_identification ^ MARKS[marks];
        smcr_crc::update(headers, covered)
    }
}

/// What a field of two bytes adds to a CRC that ends some bytes behind it, by the values of these
/// bytes.
struct Field {
    high: [u32; 256],
    low: [u32; 256],
}

impl Field {
    /// The field at byte `at` of headers of `len` bytes.
    const fn at(at: usize, len: usize) -> Self {
        Self { high: added(len - at - 1), low: added(len - at - 2) }
    }

    fn adds(&self, value: u16) -> u32 {
        let [high, low] = value.to_be_bytes();
        self.high[usize::from(high)] ^ self.low[usize::from(low)]
    }
}

/// What each value of a byte adds to a CRC that ends `behind` bytes behind it.
const fn added(behind: usize) -> [u32; 256] {
    let mut table = [0; 256];
    let mut value: u32 = 0;
    while value < 256 {
        let mut crc = value;
        let mut bits = (behind + 1) * 8;
        while bits > 0 {
            crc = times_x(crc);
            bits -= 1;
        }
        table[value as usize] = crc;
        value += 1;
    }
    table
}

/// What must be added to a CRC so that it becomes what it would be if some bits of the byte
/// `ahead` bytes ahead were others, for each set of bits.
const fn made_up(ahead: usize) -> [u32; 256] {
    let back = backwards(ahead);
    let mut table = [0; 256];
    let mut bits: u32 = 0;
    while bits < 256 {
        table[bits as usize] = multiply(bits, back);
        bits += 1;
    }
    table
}

fn to_ipv6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// The product of two polynomials modulo the CRC-32 polynomial. The top bit is the coefficient of
/// x^0.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        if a >> bit & 1 != 0 {
            product ^= b;
        }
        b = times_x(b);
    }
    product
}

/// The product of a polynomial and x.
const fn times_x(a: u32) -> u32 {
    a >> 1 ^ if a & 1 != 0 { POLYNOMIAL } else { 0 }
}

/// The polynomial x^(-8 * bytes), which undoes appending `bytes` bytes of zeros.
const fn backwards(bytes: usize) -> u32 {
    let mut result = ONE;
    let mut factor = INVERSE_OF_X;
    let mut exponent = bytes * 8;
    while exponent != 0 {
        if exponent & 1 != 0 {
            result = multiply(result, factor);
        }
        factor = multiply(factor, factor);
        exponent >>= 1;
    }
    result
}

/// Stand-in for the header of the link layer.
const LRH_LEN: usize = 8;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
const UDP_LEN: usize = 8;
const HEADERS_MAX: usize = LRH_LEN + IPV6_LEN + UDP_LEN;
const UDP: u8 = 17;
/// What follows a global route header.
const BTH: u8 = 0x1b;
const DONT_FRAGMENT: u16 = 0x4000;
/// Where the BTH has congestion marks and reserved bits.
const MARKS_AT: usize = 4;
/// The CRC-32 polynomial, reflected.
const POLYNOMIAL: u32 = 0xedb8_8320;
const ONE: u32 = 0x8000_0000;
/// The inverse of x: their product is one.
const INVERSE_OF_X: u32 = (ONE ^ POLYNOMIAL) << 1 | 1;

static IPV4_TOTAL: Field = Field::at(2, IPV4_LEN + UDP_LEN);
static IPV4_ID: Field = Field::at(4, IPV4_LEN + UDP_LEN);
static IPV6_PAYLOAD: Field = Field::at(4, IPV6_LEN + UDP_LEN);
static GRH_PAYLOAD: Field = Field::at(4, IPV6_LEN);
static UDP_LENGTH: Field = Field::at(4, UDP_LEN);
static MARKS: [u32; 256] = made_up(MARKS_AT);

#[cfg(test)]
mod tests {
    use super::*;

    /// Packets of Linux `rdma_rxe` 6.12: source, target, identification, and UDP payload.
    const RXE: [(&str, &str, u16, &str); 4] = [
        (
            "10.99.0.2:54099",
            "10.99.0.1:4791",
            0x8dc2,
            "0a30ffff00000123800002040000000000002000000000070000000500070e151c000000aa5fefa7",
        ),
        ("10.99.0.2:54099", "10.99.0.1:4791", 0x8e4a, "1100ffff00000123000001001f00000105264dc8"),
        ("[fd99::2]:58177", "[fd99::1]:4791", 0, "1100ffff00000123000001001f00000124738cdb"),
        ("10.99.0.2:54681", "10.99.0.1:4791", 0xa583, "0490ffff000001238000020000070e00d756b881"),
    ];

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
            .collect()
    }

    fn flow(source: &str, target: &str) -> Flow {
        Flow::new(source.parse().unwrap(), target.parse().unwrap())
    }

    #[test]
    fn agrees_with_linux() {
        for (source, target, identification, packet) in RXE {
            let flow = flow(source, target);
            let packet = bytes(packet);
            assert!(flow.is_intact(identification, &packet), "{source} {packet:02x?}");
            let mut built = packet.clone();
            built.truncate(packet.len() - ICRC_LEN);
            built.extend([0; ICRC_LEN]);
            flow.seal(identification, &mut built);
            assert_eq!(built, packet);
        }
    }

    /// A UDP socket does not show the identifications that other NICs choose. Without this, all
    /// their packets would be dropped.
    #[test]
    fn finds_the_identification_of_linux_and_nothing_in_a_broken_packet() {
        for (source, target, identification, packet) in RXE {
            let flow = flow(source, target);
            let packet = bytes(packet);
            for guess in [0, 1, 0x1234] {
                let guess = if target.starts_with('[') { 0 } else { guess };
                assert_eq!(flow.identify(guess, &packet), Verdict::Right(identification));
            }
            let last = packet.len() - ICRC_LEN - 1;
            for (at, bit) in [(0, 1), (7, 0x80), (last, 4), (last + 2, 0x10)] {
                let mut broken = packet.clone();
                broken[at] ^= bit;
                assert_eq!(flow.identify(0, &broken), Verdict::Wrong, "byte {at}");
            }
        }
    }

    /// The ICRC as the specification tells it: headers and packet in one piece, with ones in place
    /// of what may change in flight.
    fn by_the_book(source: SocketAddr, target: SocketAddr, id: u16, covered: &[u8]) -> u32 {
        let udp_len = u16::try_from(8 + covered.len() + 4).unwrap();
        let mut bytes = vec![0xff; 8];
        match (source, target) {
            (SocketAddr::V4(source), SocketAddr::V4(target)) => {
                bytes.extend([0x45, 0xff]);
                bytes.extend((udp_len + 20).to_be_bytes());
                bytes.extend(id.to_be_bytes());
                bytes.extend([0x40, 0, 0xff, 17, 0xff, 0xff]);
                bytes.extend(source.ip().octets());
                bytes.extend(target.ip().octets());
            }
            _ => {
                bytes.extend([0x6f, 0xff, 0xff, 0xff]);
                bytes.extend(udp_len.to_be_bytes());
                bytes.extend([17, 0xff]);
                bytes.extend(to_ipv6(source.ip()));
                bytes.extend(to_ipv6(target.ip()));
            }
        }
        if target.port() == 0 {
            // The global route header has neither UDP behind it nor a length that counts that.
            bytes[12..14].copy_from_slice(&(udp_len - 8).to_be_bytes());
            bytes[14] = 0x1b;
        } else {
            for word in [source.port(), target.port(), udp_len, 0xffff] {
                bytes.extend(word.to_be_bytes());
            }
        }
        let marks_at = bytes.len() + MARKS_AT;
        bytes.extend(covered);
        bytes[marks_at] = 0xff;
        crc32fast::hash(&bytes)
    }

    /// The tables must not change what the ICRC is, for any field that they stand for.
    #[test]
    fn the_tables_agree_with_the_specification() {
        let mut dice = crate::dice::Dice::new(3);
        for round in 0..20_000 {
            let number = dice.next_u64();
            let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
            let ports = [u16::from_le_bytes([e, f]), u16::from_le_bytes([f, g])];
            let (source, target) = if h & 1 == 0 {
                (
                    SocketAddr::from(([10, a, b, c], ports[0])),
                    SocketAddr::from(([d, c, b, a], 4791)),
                )
            } else {
                let high = u16::from(a) << 8 | u16::from(d);
                let source = [0xfd00, high, 0, 0, 0, 0, 7, 1];
                let target = [0xfd00, 0, 0, ports[1], 0, 0, 0, 2];
                let to_port = if h & 2 == 0 { 4791 } else { 0 };
                (SocketAddr::from((source, ports[0])), SocketAddr::from((target, to_port)))
            };
            let len = BTH_LEN + usize::from(u16::from_le_bytes([c, d])) % 4130;
            let covered: Vec<u8> = (0..len).map(|_| dice.next_u64().to_le_bytes()[0]).collect();
            let id = u16::from_le_bytes([g, e]);
            let found = Flow::new(source, target).compute(id, &covered);
            assert_eq!(found, by_the_book(source, target, id, &covered), "round {round}");
        }
    }

    #[test]
    fn every_identification_is_found_at_every_length() {
        let flow = flow("10.0.0.1:4791", "10.0.0.2:4791");
        for len in [16, 20, 60, 1056, 4128] {
            let mut packet: Vec<_> = (0..len).map(|n| u8::try_from(n % 251).unwrap()).collect();
            for identification in [0, 1, 63, 0x8000, 0xffff] {
                flow.seal(identification, &mut packet);
                assert_eq!(flow.identify(5, &packet), Verdict::Right(identification));
                assert!(!flow.is_intact(identification ^ 1, &packet));
            }
        }
    }

    /// A gateway counts from 0. A damaged packet that would be right with another identification is
    /// not believed.
    #[test]
    fn who_counts_from_zero_is_held_to_it() {
        let mut gateway = Identifications::default();
        for run in [3, 64, 1, 1, 17, 64, 2, 5] {
            assert!(gateway.admit(40_000), "it has shown too little");
            gateway = Identifications::default();
            for _ in 0..Identifications::ZEROS_MIN {
                (0..run).for_each(|identification| gateway.note(identification));
                assert!(gateway.admit(run - 1), "a train that begins anywhere in a run");
            }
            for strange in [128, 40_000, 0xffff] {
                assert!(!gateway.admit(strange), "{strange}");
                assert!(gateway.admit(0) && gateway.admit(63) && gateway.admit(127));
            }
            gateway = Identifications::default();
        }
    }

    /// `rdma_rxe` and hardware count up, or send what is random. None of their packets may be lost.
    #[test]
    fn who_does_not_count_from_zero_may_send_anything() {
        let mut counting = Identifications::default();
        let mut random = Identifications::default();
        let mut dice = crate::dice::Dice::new(7);
        for count in 0..300_000_u32 {
            assert!(counting.admit(u16::try_from(count & 0xffff).unwrap()), "{count}");
            assert!(random.admit(u16::try_from(dice.next_u64() >> 48).unwrap()), "{count}");
        }
    }

    /// Somebody who sends zeros in the name of a peer, or a peer that changes its ways, must not
    /// stop a stream.
    #[test]
    fn a_peer_that_was_misjudged_loses_four_packets() {
        let mut peer = Identifications::default();
        let lost = (0..10_000).filter(|_| {
            (0..20).for_each(|_| peer.note(0));
            !peer.admit(40_000)
        });
        assert_eq!(lost.count(), usize::from(Identifications::STRANGE_MAX));
    }

    /// Routers change TTL, type of service and congestion marks. The packet must still be accepted.
    #[test]
    fn congestion_marks_may_change_in_flight() {
        let (source, target, identification, packet) = RXE[0];
        let mut packet = bytes(packet);
        packet[4] = 0xc0;
        assert!(flow(source, target).is_intact(identification, &packet));
    }

    #[test]
    fn hopelessly_short_packets_are_wrong() {
        let flow = flow("10.0.0.1:4791", "10.0.0.2:4791");
        for len in 0..BTH_LEN + ICRC_LEN {
            assert!(!flow.is_intact(0, &[0xff; 16][..len]));
            assert_eq!(flow.identify(0, &[0xff; 16][..len]), Verdict::Wrong);
        }
    }
}
