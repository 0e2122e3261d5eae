//! CLC Proposal: who we are, and which subnets we share (RFC A.2.2).

use crate::vocabulary::{Gid, MacAddress, PeerId};

/// The most IPv6 prefixes a Proposal carries.
pub const PREFIXES_MAX: usize = 8;

/// A network of the proposing host: its number and the length of its mask in bits.
///
/// The RFC's figure says "subnet mask"; its prose and every deployed stack mean the network number.
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
