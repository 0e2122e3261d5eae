//! The messages as they travel.
//!
//! Every codec keeps the same contract: the frame layer has checked type and length, so `decode`
//! takes an array and cannot run off its end; reserved bits are zero when sent and ignored when
//! received; `decode(encode(x)) == x`. All integers are big-endian.
//!
//! The messages of SMC-Rv2 that differ stand in [`clc::v2`] and [`llc::v2`]. They have no fixed
//! length: `decode` takes a slice, and a list that does not fit into it is [`Malformed`].

use core::ops::Range;

/// Names the points of an open space of numbers that a peer may extend.
///
/// The type is a newtype of `u32`. It gains a constant per point, `name`, and a `Debug` that
/// prints the name where there is one and the number in hex where there is none.
macro_rules! code_points {
    ($space:ident { $($(#[doc = $doc:literal])+ $name:ident = $code:literal,)+ }) => {
        impl $space {
            $($(#[doc = $doc])+ pub const $name: Self = Self($code);)+

            /// Every code that has a name.
            pub const ALL: &'static [Self] = &[$(Self::$name,)+];

            /// The name of this code, if it is one we know.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($code => Some(stringify!($name)),)+
                    _ => None,
                }
            }
        }

        impl core::fmt::Debug for $space {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, concat!(stringify!($space), "({:#010x})"), self.0),
                }
            }
        }
    };
}

pub mod cdc;
pub mod clc;
mod few;
pub mod llc;

pub use few::Few;

/// Why bytes are not a message.
///
/// After a malformed CLC message the TCP stream cannot be trusted and is closed (RFC C.6). A
/// malformed LLC or CDC message breaks the link, except [`Malformed::Ignorable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Malformed {
    /// A CLC message does not begin with the eye catcher.
    Eyecatcher,
    /// A CLC message does not end with the eye catcher.
    Trailer,
    /// A message of this type cannot have this length.
    Length,
    /// A CLC or LLC message of an unknown type that must not be ignored.
    UnknownType(u8),
    /// An LLC message of an unknown type that the RFC tells us to discard (A.3). It is no error.
    Ignorable(u8),
    /// A CLC message of a version of SMC that we did not offer.
    Version(u8),
    /// The prefix area of a Proposal does not fit into it, or has more than eight prefixes.
    PrefixArea,
    /// The extension of SMC-Rv2 does not fit into the CLC or LLC message that should contain it, or
    /// lists more than it may.
    Extension,
    /// An RMB element index of zero: the first element is 1.
    RmbeIndex,
    /// A DELETE RKEY of more than eight keys.
    RkeyCount,
}

/// The bytes of one field as an array.
///
/// # Panics
///
/// If the field is not `N` bytes long or lies outside: fields are constants, so this is our bug.
fn array<const N: usize>(bytes: &[u8], field: Range<usize>) -> [u8; N] {
    bytes[field].try_into().expect("a field is as long as its type")
}

fn u16_at(bytes: &[u8], field: Range<usize>) -> u16 {
    u16::from_be_bytes(array(bytes, field))
}

fn u24_at(bytes: &[u8], field: Range<usize>) -> u32 {
    let [a, b, c] = array(bytes, field);
    u32::from_be_bytes([0, a, b, c])
}

fn u32_at(bytes: &[u8], field: Range<usize>) -> u32 {
    u32::from_be_bytes(array(bytes, field))
}

fn u64_at(bytes: &[u8], field: Range<usize>) -> u64 {
    u64::from_be_bytes(array(bytes, field))
}

/// The bits of `flag` if it is to be set, otherwise zero.
const fn flag_if(set: bool, flag: u8) -> u8 {
    if set { flag } else { 0 }
}

/// Writes one field.
///
/// # Panics
///
/// If `value` is not as long as the field: fields are constants, so this is our bug.
fn put(bytes: &mut [u8], field: Range<usize>, value: &[u8]) {
    bytes[field].copy_from_slice(value);
}

/// Writes a 24-bit field.
///
/// # Panics
///
/// If `value` needs more than 24 bits: it came from our own RNIC.
fn put_u24(bytes: &mut [u8], field: Range<usize>, value: u32) {
    let [high, low @ ..] = value.to_be_bytes();
    assert_eq!(high, 0, "QPNs and PSNs have 24 bits");
    put(bytes, field, &low);
}

#[cfg(test)]
pub(crate) mod tests;
