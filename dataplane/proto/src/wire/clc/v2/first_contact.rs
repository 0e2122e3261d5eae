//! The first-contact extension (FCE) of Accept and Confirm: who the peer is and what it can do.
//!
//! ```text
//!   0        1            2      4           36          37          38         40       44     52
//!   | direct | os|release | rsvd | host name | max conns | max links | features | vendor | rsvd |
//! ```
//! A peer of release 0 stops behind its host name.

use core::fmt;
use core::ops::Range;

use crate::wire::{Malformed, array, flag_if, put, u16_at, u32_at};

/// Length of the extension of release 0 in bytes.
const LEN_RELEASE_0: usize = 36;

/// Length of the extension of every later release in bytes.
const LEN: usize = 52;

/// Length of the longest extension in bytes.
pub(super) const LEN_MAX: usize = LEN;

mod field {
    use super::{LEN, LEN_RELEASE_0, Range};

    pub(super) const FLAGS: usize = 0;
    pub(super) const OS_AND_RELEASE: usize = 1; // 2..4 is reserved
    pub(super) const HOST_NAME: Range<usize> = 4..36;
    pub(super) const MAX_CONNECTIONS: usize = 36;
    pub(super) const MAX_LINKS: usize = 37;
    pub(super) const FEATURES: Range<usize> = 38..40;
    pub(super) const VENDOR_OPTIONS: Range<usize> = 40..44;
    pub(super) const RESERVED: Range<usize> = 44..52;
    const _: () = assert!(HOST_NAME.end == LEN_RELEASE_0 && RESERVED.end == LEN);
}

/// No router is between the RNICs.
const DIRECT: u8 = 0x80;

/// What a peer runs, as four bits. The space is open.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct OsType(pub u8);

impl OsType {
    /// z/OS.
    pub const ZOS: Self = Self(1);
    /// Linux, and so we.
    pub const LINUX: Self = Self(2);
    /// AIX.
    pub const AIX: Self = Self(3);

    /// The name of the system, if it is one we know.
    pub const fn name(self) -> Option<&'static str> {
        match self.0 {
            1 => Some("z/OS"),
            2 => Some("Linux"),
            3 => Some("AIX"),
            _ => None,
        }
    }

    /// # Panics
    ///
    /// If it needs more than four bits. Decoding never makes such a value.
    pub(super) fn to_high_half(self) -> u8 {
        assert!(self.0 <= 0x0f, "four bits");
        self.0 << 4
    }
}

impl fmt::Display for OsType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "OS {}", self.0),
        }
    }
}

impl fmt::Debug for OsType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The name of the peer's host, padded with blanks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HostName(pub [u8; 32]);

impl HostName {
    /// The first 32 bytes of `name`.
    pub fn new(name: &str) -> Self {
        let mut bytes = [b' '; 32];
        bytes.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
        Self(bytes)
    }
}

/// No name.
impl Default for HostName {
    fn default() -> Self {
        Self::new("")
    }
}

/// Without what fills it up; what is not printable, escaped.
impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.0.iter().rposition(|byte| !b" \0".contains(byte)).map_or(0, |last| last + 1);
        self.0[..end].escape_ascii().fmt(f)
    }
}

impl fmt::Debug for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostName({self})")
    }
}

/// What a peer of release 1 or later says about itself, or agrees to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// The most connections in the link group.
    pub max_connections: u8,
    /// The most links in the link group.
    pub max_links: u8,
    /// Features, one bit each. Linux sets the lowest, for its own use with SMC-D.
    pub features: u16,
    /// Vendor's experimental options. Linux sends zero.
    pub vendor_options: VendorOptions,
}

/// Experimental options of whoever wrote the implementation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VendorOptions(pub u32);

impl VendorOptions {
    /// Ours: connections may carry one stream after another (see
    /// [`Streams`](crate::connection::Streams)).
    pub const MANY_STREAMS: Self = Self(OURS << 16 | 1);

    /// Ours: RNICs that implement RoCE in software may send each other packets that no others have
    /// (the dense packets of `smcr-rnic`).
    pub const DENSE_PACKETS: Self = Self(OURS << 16 | 2);

    /// These and those of `other`, which are both ours.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether these are ours, with at least what `other` has.
    pub const fn contain(self, other: Self) -> bool {
        self.0 >> 16 == OURS && self.0 & other.0 == other.0
    }
}

/// The upper half of our options, so that nobody else's are taken for them: "SG".
const OURS: u32 = 0x5347;

/// The extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstContact {
    /// Whether the RNICs are in one subnet; else packets go to the next hop of the route.
    pub direct: bool,
    /// What the peer runs.
    pub os: OsType,
    /// The release of SMC-Rv2, four bits: what the peer speaks, or has agreed to.
    pub release: u8,
    /// The peer's host.
    pub host_name: HostName,
    /// There if, and only if, the release is 1 or later.
    pub capabilities: Option<Capabilities>,
}

impl FirstContact {
    /// How long it is as it travels, in bytes.
    pub(super) const fn len(&self) -> usize {
        match self.capabilities {
            Some(_) => LEN,
            None => LEN_RELEASE_0,
        }
    }

    /// Decodes the extension at the beginning of `bytes`, and returns what follows it.
    pub(super) fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), Malformed> {
        if bytes.len() < LEN_RELEASE_0 {
            return Err(Malformed::Extension);
        }
        let release = bytes[field::OS_AND_RELEASE] & 0x0f;
        let capabilities = match release {
            0 => None,
            _ if bytes.len() < LEN => return Err(Malformed::Extension),
            _ => Some(Capabilities {
                max_connections: bytes[field::MAX_CONNECTIONS],
                max_links: bytes[field::MAX_LINKS],
                features: u16_at(bytes, field::FEATURES),
                vendor_options: VendorOptions(u32_at(bytes, field::VENDOR_OPTIONS)),
            }),
        };
        let first_contact = Self {
            direct: bytes[field::FLAGS] & DIRECT != 0,
            os: OsType(bytes[field::OS_AND_RELEASE] >> 4),
            release,
            host_name: HostName(array(bytes, field::HOST_NAME)),
            capabilities,
        };
        Ok((first_contact, &bytes[first_contact.len()..]))
    }

    /// Writes the extension to the beginning of `bytes`, which are zero.
    ///
    /// # Panics
    ///
    /// If release and capabilities do not fit together: they are ours.
    pub(super) fn encode_into(&self, bytes: &mut [u8]) {
        assert!(self.release <= 0x0f, "a release has four bits");
        assert_eq!(self.release > 0, self.capabilities.is_some(), "they came with release 1");
        bytes[field::FLAGS] = flag_if(self.direct, DIRECT);
        bytes[field::OS_AND_RELEASE] = self.os.to_high_half() | self.release;
        put(bytes, field::HOST_NAME, &self.host_name.0);
        if let Some(ours) = self.capabilities {
            bytes[field::MAX_CONNECTIONS] = ours.max_connections;
            bytes[field::MAX_LINKS] = ours.max_links;
            put(bytes, field::FEATURES, &ours.features.to_be_bytes());
            put(bytes, field::VENDOR_OPTIONS, &ours.vendor_options.0.to_be_bytes());
        }
    }
}
