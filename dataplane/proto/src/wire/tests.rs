//! What the tests of all codecs share.

use core::ops::Range;
use std::vec::Vec;

use proptest::prelude::*;

use crate::vocabulary::{Gid, MacAddress, Mtu, PeerId, Psn, Qpn};

/// The bytes of a hex dump, blanks ignored, padded with zeros to `N`.
pub(crate) fn hex<const N: usize>(dump: &str) -> [u8; N] {
    let digits: Vec<u8> = dump
        .chars()
        .filter(|c| !c.is_whitespace())
        .map(|c| u8::try_from(c.to_digit(16).unwrap()).unwrap())
        .collect();
    assert!(digits.len().is_multiple_of(2) && digits.len() <= 2 * N);
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = (pair[0] << 4) | pair[1];
    }
    bytes
}

/// A message with these bits set, and no other.
pub(crate) fn bits<const N: usize>(set: &[(Range<usize>, u8)]) -> [u8; N] {
    let mut bytes = [0; N];
    for (field, value) in set {
        bytes[field.clone()].fill(*value);
    }
    bytes
}

/// Checks that the meaning of a message depends on every bit but `reserved`, and on none of those.
pub(crate) fn assert_reserved<T: PartialEq + core::fmt::Debug, const N: usize>(
    message: &[u8; N],
    reserved: &[u8; N],
    decode: impl Fn(&[u8; N]) -> T,
) {
    let meaning = decode(message);
    let mut ignored = [0; N];
    for byte in 0..N {
        for bit in 0..8 {
            let mut changed = *message;
            changed[byte] ^= 1 << bit;
            if decode(&changed) == meaning {
                ignored[byte] |= 1 << bit;
            }
        }
    }
    assert_eq!(&ignored, reserved);
    let mut changed = *message;
    changed.iter_mut().zip(reserved).for_each(|(byte, mask)| *byte ^= mask);
    assert_eq!(decode(&changed), meaning);
}

pub(crate) fn any_peer_id() -> impl Strategy<Value = PeerId> {
    any::<[u8; 8]>().prop_map(PeerId)
}

pub(crate) fn any_mac() -> impl Strategy<Value = MacAddress> {
    any::<[u8; 6]>().prop_map(MacAddress)
}

pub(crate) fn any_gid() -> impl Strategy<Value = Gid> {
    any::<[u8; 16]>().prop_map(Gid)
}

pub(crate) fn any_qpn() -> impl Strategy<Value = Qpn> {
    (0..1_u32 << 24).prop_map(Qpn)
}

pub(crate) fn any_psn() -> impl Strategy<Value = Psn> {
    (0..1_u32 << 24).prop_map(Psn)
}

pub(crate) fn any_mtu() -> impl Strategy<Value = Mtu> {
    (0..16_u8).prop_map(Mtu)
}
