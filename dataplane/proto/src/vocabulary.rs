//! The nouns of the RFC, each a type of its own so that two of them cannot be swapped.

use core::fmt;

/// A queue pair number: 24 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Qpn(pub u32);

/// A packet sequence number: 24 bits, modulo 2^24.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Psn(pub u32);

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

    /// The payload of a full packet in bytes, if the code is a known one.
    pub const fn bytes(self) -> Option<u32> {
        match self.0 {
            1..=5 => Some(128 << self.0),
            _ => None,
        }
    }
}

/// The size of an RMB element in its 4-bit wire notation: 16 KiB times a power of two (RFC A.2.3).
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

    /// The length of the element in bytes, from 16 KiB to 512 MiB.
    pub const fn bytes(self) -> u32 {
        16_384 << self.0
    }
}
