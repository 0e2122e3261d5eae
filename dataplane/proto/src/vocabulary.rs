//! The nouns of the RFC, each a type of its own so that two of them cannot be swapped.

use core::fmt;
use core::net::IpAddr;

/// A queue pair number: 24 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Qpn(pub u32);

/// A packet sequence number: 24 bits, modulo 2^24.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Psn(pub u32);

/// Where one end of a queue pair lives: what the peer must be told about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpAddress {
    /// The port.
    pub gid: Gid,
    /// The port's Ethernet address.
    pub mac: MacAddress,
    /// The queue pair on that port.
    pub qpn: Qpn,
    /// The first PSN this end will send.
    pub psn: Psn,
    /// The largest path MTU this end can use. A connected pair uses the smaller of both.
    pub mtu: Mtu,
}

/// The key that opens a registered region to a peer's writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rkey(pub u32);

/// What the receiver of CDC messages wants to see in them, to find the connection (RFC A.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AlertToken(pub u32);

/// The number of a link within its link group, chosen by the server (RFC 2.2.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkNumber(pub u8);

/// A name for a link that means something to its owner only (RFC 2.2.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LinkUserId(pub u32);

/// A RoCE port address: an IPv6 address, or an IPv4 address in its mapped form.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// `::ffff:a.b.c.d`, the GID of a RoCEv2 port with that IPv4 address.
    pub const fn from_ipv4(address: [u8; 4]) -> Self {
        let [a, b, c, d] = address;
        Self([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d])
    }

    /// The IPv4 address inside, if this is a mapped one.
    pub fn to_ipv4(self) -> Option<[u8; 4]> {
        match self.0 {
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d] => Some([a, b, c, d]),
            _ => None,
        }
    }

    /// The GID of a RoCEv2 port with that address.
    pub const fn from_ip(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Self::from_ipv4(address.octets()),
            IpAddr::V6(address) => Self(address.octets()),
        }
    }

    /// The address of a RoCEv2 port with that GID.
    pub fn to_ip(self) -> IpAddr {
        core::net::Ipv6Addr::from(self.0).to_canonical()
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        core::net::Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

/// An Ethernet address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MacAddress(pub [u8; 6]);

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// Two bytes of the owner's choice and a MAC address: who a peer is (RFC A.2.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub [u8; 8]);

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The path MTU of a queue pair in its 4-bit wire notation (RFC A.2.3).
///
/// The space is open: a peer may send a code we do not know, for which there is no `bytes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mtu(pub u8);

impl Mtu {
    /// 256 bytes.
    pub const B256: Self = Self(1);
    /// 512 bytes.
    pub const B512: Self = Self(2);
    /// 1024 bytes.
    pub const B1024: Self = Self(3);
    /// 2048 bytes.
    pub const B2048: Self = Self(4);
    /// 4096 bytes.
    pub const B4096: Self = Self(5);

    /// The code for packets with exactly `bytes` of payload, if there is one.
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        (1..=5).map(Self).find(|mtu| mtu.bytes() == Some(bytes))
    }

    /// The payload of a full packet in bytes, if the code is a known one.
    pub const fn bytes(self) -> Option<u32> {
        match self.0 {
            // RFC 7609 A.2.3 #10: MTU in byte 50
            // RFC 7609 A.2.3 #13: MTU values 1 to 5 only
            1..=5 => Some(128 << self.0),
            _ => None,
        }
    }
}

/// The size of an RMB element in its 4-bit wire notation: 16 KiB times a power of two (RFC A.2.3).
///
/// The RFC ends at 512 KiB; newer Linux kernels use all of the notation, up to 512 MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RmbeSize(u8);

impl RmbeSize {
    /// 64 KiB, our default.
    pub const KIB_64: Self = Self(2);

    /// The size with this notation. Only the low four bits exist on the wire.
    pub const fn from_notation(notation: u8) -> Self {
        Self(notation & 0x0f)
    }

    /// The size that is exactly `bytes`, if it has a notation.
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        (0..=15).map(Self).find(|size| size.bytes() == bytes)
    }

    /// The 4-bit notation.
    pub const fn notation(self) -> u8 {
        self.0
    }

    /// Half of it, or the smallest size if this is that.
    pub const fn half(self) -> Self {
        Self(self.0.saturating_sub(1))
    }

    /// The length of the element in bytes, from 16 KiB to 512 MiB.
    pub const fn bytes(self) -> u32 {
        // RFC 7609 A.2.3 #8: element size in byte 50
        16_384 << self.0
    }
}

#[cfg(test)]
mod tests {
    use std::format;

    use super::*;

    /// An operator compares these with what `ip` and `rdma` print.
    #[test]
    fn addresses_print_as_usual() {
        let gid = Gid::from_ipv4([10, 9, 0, 1]);
        assert_eq!(format!("{gid}"), "::ffff:10.9.0.1");
        assert_eq!(format!("{gid:?}"), "Gid(::ffff:10.9.0.1)");
        let mac = MacAddress([0x52, 0x54, 0, 0, 0, 0x0a]);
        assert_eq!(format!("{mac}"), "52:54:00:00:00:0a");
        assert_eq!(format!("{}", PeerId([0x28, 0x3b, 0, 0, 0, 0, 0, 0xff])), "283b0000000000ff");
    }

    #[test]
    fn only_mapped_addresses_are_ipv4() {
        assert_eq!(Gid::from_ipv4([10, 9, 0, 1]).to_ipv4(), Some([10, 9, 0, 1]));
        let mut link_local = Gid::from_ipv4([10, 9, 0, 1]);
        link_local.0[0] = 0xfe;
        assert_eq!(link_local.to_ipv4(), None);
        assert_eq!(Gid::default().to_ipv4(), None);
    }

    /// A code that is off by one doubles every packet, and the peer drops them all.
    // RFC 7609 A.2.3 #10: MTU in byte 50
    // RFC 7609 A.2.3 #13: MTU values 1 to 5 only
    #[test]
    fn mtu_codes_are_those_of_the_rfc() {
        let known = [Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096];
        assert_eq!(known.map(|mtu| mtu.bytes().unwrap()), [256, 512, 1024, 2048, 4096]);
        assert_eq!(known.map(|mtu| mtu.0), [1, 2, 3, 4, 5]);
        assert_eq!([Mtu(0), Mtu(6), Mtu(15)].map(Mtu::bytes), [None; 3]);
        assert_eq!(known.map(|mtu| Mtu::from_bytes(mtu.bytes().unwrap()).unwrap()), known);
        assert_eq!([0, 128, 1500, 8192].map(Mtu::from_bytes), [None; 4]);
    }

    /// A size that is off by one lets the peer write into the next connection's element.
    // RFC 7609 A.2.3 #8: element size in byte 50
    #[test]
    fn element_sizes_are_those_of_the_rfc() {
        assert_eq!(RmbeSize::from_notation(0).bytes(), 16 << 10);
        assert_eq!(RmbeSize::KIB_64.bytes(), 64 << 10);
        assert_eq!(RmbeSize::from_notation(5).bytes(), 512 << 10);
        assert_eq!(RmbeSize::from_notation(15).bytes(), 512 << 20);
        for notation in 0..16 {
            let size = RmbeSize::from_notation(notation);
            assert_eq!(RmbeSize::from_bytes(size.bytes()), Some(size));
            assert_eq!(RmbeSize::from_bytes(size.bytes() + 1), None);
            assert_eq!(RmbeSize::from_notation(notation | 0xf0).notation(), notation);
        }
    }
}
