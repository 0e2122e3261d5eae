//! CLC Proposal: who we are, and which subnets we share (RFC A.2.2).
//!
//! ```text
//!   0     8         16    32    38       40             40 + offset
//!   | hdr | peer id | gid | mac | offset | skip `offset` | prefix area | extension | eye |
//!
//!   0         4             5          7       8                    8 + 17 n
//!   | network | prefix bits | reserved | count | n * (prefix, bits) |         prefix area
//! ```
//! The RFC leaves the gap for later versions. Since 5.10 Linux always sends a gap of 40 bytes, with
//! a header that says version 2: it holds fields of SMC-D and SMC-Rv2. The low bits of the version
//! byte then say which versions are offered, and a Proposal without SMC-Rv1 has no prefix area. In
//! version 1 we send the same gap, all zero: it is the form that all deployed servers have met.

use core::ops::Range;

use super::{EYECATCHER, EYECATCHER_SMC_D, EncodedFrame, TRAILER_LEN, VERSION, kind, version};
use crate::vocabulary::{Gid, MacAddress, PeerId};
use crate::wire::{Malformed, array, put, u16_at};

/// Length of a Proposal without gap and prefixes in bytes: the shortest one.
// RFC 7609 A.2.2 #2: accept Proposal of 52 bytes
pub const LEN: usize = 52;

/// Bytes between the offset and the prefix area in what we send, all zero.
const GAP: u16 = 40;

/// Length of the longest Proposal that we send in bytes.
pub const LEN_MAX: usize = LEN + GAP as usize + PREFIXES_MAX * prefix_field::LEN;

/// The most IPv6 prefixes a Proposal carries.
// RFC 7609 A.2.2 #11: at most eight IPv6 prefixes
pub const PREFIXES_MAX: usize = 8;

mod field {
    use super::Range;

    pub(super) const VERSION_AND_FLAGS: usize = 7;
    // RFC 7609 A.2.2 #4: peer id, GID, MAC in Proposal
    pub(super) const PEER_ID: Range<usize> = 8..16;
    pub(super) const GID: Range<usize> = 16..32;
    pub(super) const MAC: Range<usize> = 32..38;
    pub(super) const OFFSET: Range<usize> = 38..40;
    /// Where the prefix area is when `OFFSET` is zero.
    pub(super) const PREFIX_AREA: usize = 40;
}

mod area_field {
    use super::{Range, TRAILER_LEN, field};

    // RFC 7609 A.2.2 #8: IPv4 subnet and its length
    pub(super) const NETWORK: Range<usize> = 0..4;
    // RFC 7609 A.2 #2: ignore reserved CLC fields
    pub(super) const PREFIX_BITS: usize = 4; // 5..7 is reserved
    pub(super) const COUNT: usize = 7;
    pub(super) const PREFIXES: usize = 8;
    const _: () = assert!(field::PREFIX_AREA + PREFIXES + TRAILER_LEN == super::LEN);
}

mod prefix_field {
    use super::Range;

    // RFC 7609 A.2.2 #13: IPv6 prefix takes 17 bytes
    pub(super) const PREFIX: Range<usize> = 0..16;
    pub(super) const BITS: usize = 16;
    pub(super) const LEN: usize = BITS + 1;
}

/// The two lowest bits of the version byte: what of version 1 is offered.
const OFFERED: u8 = 0x03;
const OFFERED_SMC_R: u8 = 0;
const OFFERED_BOTH: u8 = 3;

/// A network of the proposing host: its number and the length of its mask in bits.
///
/// The RFC's figure says "subnet mask". Its prose means the network number, and that is what all
/// deployed stacks send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ipv4Subnet {
    /// Address AND mask.
    pub network: [u8; 4],
    /// Bits of the mask.
    pub prefix_bits: u8,
}

/// An IPv6 prefix of the proposing host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ipv6Prefix {
    /// The prefix, bits beyond its length zero.
    pub prefix: [u8; 16],
    /// Its length in bits.
    pub prefix_bits: u8,
}

/// What the TCP client proposes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// The client.
    pub peer_id: PeerId,
    /// The RNIC port the client will use.
    pub gid: Gid,
    /// Its Ethernet address.
    pub mac: MacAddress,
    /// The client's IPv4 subnet; all zero when the connection is IPv6.
    pub subnet: Ipv4Subnet,
    /// The client's IPv6 prefixes; the first `prefix_count` count.
    pub prefixes: [Ipv6Prefix; PREFIXES_MAX],
    /// How many of `prefixes` are meant.
    pub prefix_count: u8,
    /// Whether the client offers SMC-Rv1 at all. A Proposal of a Linux peer may offer only SMC-Rv2
    /// or SMC-D; its v1 part then is void.
    pub offers_smc_r_v1: bool,
}

impl Proposal {
    /// The IPv6 prefixes that are meant.
    pub fn ipv6_prefixes(&self) -> &[Ipv6Prefix] {
        &self.prefixes[..usize::from(self.prefix_count)]
    }

    /// Decodes one framed message. The frame layer has checked its header, and that it is at least
    /// [`LEN`] bytes long.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let (body, trailer) = bytes.split_at(bytes.len() - TRAILER_LEN);
        if trailer != EYECATCHER && trailer != EYECATCHER_SMC_D {
            return Err(Malformed::Trailer);
        }
        let offered = bytes[field::VERSION_AND_FLAGS] & OFFERED;
        let mut proposal = Self {
            peer_id: PeerId(array(bytes, field::PEER_ID)),
            gid: Gid(array(bytes, field::GID)),
            mac: MacAddress(array(bytes, field::MAC)),
            subnet: Ipv4Subnet::default(),
            prefixes: [Ipv6Prefix::default(); PREFIXES_MAX],
            prefix_count: 0,
            offers_smc_r_v1: bytes.starts_with(&EYECATCHER)
                && (offered == OFFERED_SMC_R || offered == OFFERED_BOTH),
        };
        if proposal.offers_smc_r_v1 {
            // RFC 7609 A.2.2 #6: skip offset to find the subnet
            // RFC 7609 A.2.2 #7: refuse offset outside the message
            let area = field::PREFIX_AREA + usize::from(u16_at(bytes, field::OFFSET));
            let rest = proposal.read_prefix_area(body.get(area..).unwrap_or(&[]))?;
            // RFC 7609 A.2.2 #12: no IPv6 prefixes for IPv4
            // RFC 7609 A.2.2 #14: Proposal length agrees with contents
            // Version 1 has no extension.
            if version(bytes) == VERSION && !rest.is_empty() {
                return Err(Malformed::PrefixArea);
            }
        }
        Ok(proposal)
    }

    /// Reads the prefix area at the beginning of `bytes`, and returns what follows it.
    fn read_prefix_area<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], Malformed> {
        let (head, tail) =
            bytes.split_at_checked(area_field::PREFIXES).ok_or(Malformed::PrefixArea)?;
        self.subnet.network = array(head, area_field::NETWORK);
        self.subnet.prefix_bits = head[area_field::PREFIX_BITS];
        self.prefix_count = head[area_field::COUNT];
        let count = usize::from(self.prefix_count);
        let (list, rest) =
            tail.split_at_checked(count * prefix_field::LEN).ok_or(Malformed::PrefixArea)?;
        let prefixes = self.prefixes.get_mut(..count).ok_or(Malformed::PrefixArea)?;
        for (prefix, bytes) in prefixes.iter_mut().zip(list.chunks_exact(prefix_field::LEN)) {
            prefix.prefix = array(bytes, prefix_field::PREFIX);
            prefix.prefix_bits = bytes[prefix_field::BITS];
        }
        Ok(rest)
    }

    /// How long the prefix area is as it travels, in bytes.
    pub(super) fn prefix_area_len(&self) -> usize {
        area_field::PREFIXES + self.ipv6_prefixes().len() * prefix_field::LEN
    }

    pub(super) fn encode(&self) -> EncodedFrame {
        assert!(self.offers_smc_r_v1, "a Proposal of version 1 offers SMC-Rv1");
        let len = field::PREFIX_AREA + usize::from(GAP) + self.prefix_area_len() + TRAILER_LEN;
        let mut frame = EncodedFrame::of_version(VERSION, kind::PROPOSAL, len, 0);
        put_identity(&mut frame.bytes, self);
        put_prefix_area(&mut frame.bytes, self);
        frame
    }
}

/// Writes who proposes.
pub(super) fn put_identity(bytes: &mut [u8], proposal: &Proposal) {
    put(bytes, field::PEER_ID, &proposal.peer_id.0);
    put(bytes, field::GID, &proposal.gid.0);
    put(bytes, field::MAC, &proposal.mac.0);
}

/// Writes the prefix area and the offset that leads to it.
pub(super) fn put_prefix_area(bytes: &mut [u8], proposal: &Proposal) {
    put(bytes, field::OFFSET, &GAP.to_be_bytes());
    let area = &mut bytes[field::PREFIX_AREA + usize::from(GAP)..];
    put(area, area_field::NETWORK, &proposal.subnet.network);
    area[area_field::PREFIX_BITS] = proposal.subnet.prefix_bits;
    area[area_field::COUNT] = proposal.prefix_count;
    let list = area[area_field::PREFIXES..].chunks_exact_mut(prefix_field::LEN);
    for (bytes, prefix) in list.zip(proposal.ipv6_prefixes()) {
        put(bytes, prefix_field::PREFIX, &prefix.prefix);
        bytes[prefix_field::BITS] = prefix.prefix_bits;
    }
}
