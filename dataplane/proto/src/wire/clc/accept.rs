//! CLC Accept and Confirm: one queue pair, one RMB element (RFC A.2.3, A.2.4).
//!
//! ```text
//!   0     8         16    32    38    41     45    46      50    51  52      60  61    64    68
//!   | hdr | peer id | gid | mac | qpn | rkey | idx | token | s|m | r | vaddr | r | psn | eye |
//! ```
//! `s|m` packs the size of the RMB elements and the path MTU, one half byte each.

use core::ops::Range;

use super::{EYECATCHER, EncodedFrame, FLAG, TRAILER_LEN, VERSION, field as header_field};
use crate::vocabulary::{AlertToken, Gid, MacAddress, Mtu, PeerId, Psn, Qpn, Rkey, RmbeSize};
use crate::wire::{Malformed, array, flag_if, put, put_u24, u24_at, u32_at, u64_at};

/// Length of the message in bytes.
// RFC 7609 A.2.3 #1: Accept: type 2, 68 bytes
// RFC 7609 A.2.4 #1: Confirm: type 3, as Accept
pub const LEN: usize = 68;

mod field {
    use super::{LEN, Range, TRAILER_LEN};

    pub(super) const PEER_ID: Range<usize> = 8..16;
    pub(super) const GID: Range<usize> = 16..32;
    pub(super) const MAC: Range<usize> = 32..38;
    // RFC 7609 A.2.3 #4: QP number at byte 38
    pub(super) const QPN: Range<usize> = 38..41;
    // RFC 7609 A.2.3 #5: RKey at byte 41
    pub(super) const RKEY: Range<usize> = 41..45;
    // RFC 7609 A.2.3 #6: element index at byte 45
    pub(super) const RMBE_INDEX: usize = 45;
    // RFC 7609 A.2.3 #7: alert token at byte 46
    pub(super) const ALERT_TOKEN: Range<usize> = 46..50;
    // RFC 7609 A.2.3 #8: element size in byte 50
    // RFC 7609 A.2.3 #10: MTU in byte 50
    // RFC 7609 A.2 #2: ignore reserved CLC fields
    pub(super) const SIZE_AND_MTU: usize = 50; // 51 is reserved
    // RFC 7609 A.2.3 #14: RMB address at byte 52
    pub(super) const RMB_ADDRESS: Range<usize> = 52..60; // 60 is reserved
    // RFC 7609 A.2.3 #15: initial PSN at byte 61
    pub(super) const PSN: Range<usize> = 61..64;
    pub(super) const TRAILER: Range<usize> = 64..68;
    const _: () = assert!(TRAILER.end == LEN && TRAILER.start + TRAILER_LEN == LEN);
}

/// The low half of a byte.
const NIBBLE: u8 = 0x0f;

/// One side's queue pair and RMB element. The bodies of Accept and Confirm are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// F: a new link group begins with this connection. Old clients leave it clear in Confirm.
    pub first_contact: bool,
    /// Who offers.
    pub peer_id: PeerId,
    /// Its RNIC port.
    pub gid: Gid,
    /// The port's Ethernet address.
    pub mac: MacAddress,
    /// Its queue pair.
    pub qpn: Qpn,
    /// Opens its RMB.
    pub rkey: Rkey,
    /// Which element of the RMB; the first is 1.
    pub rmbe_index: u8,
    /// What it wants to see in CDC messages.
    pub alert_token: AlertToken,
    /// Size of each element of the RMB.
    pub rmbe_size: RmbeSize,
    /// The largest path MTU its port can use.
    pub mtu: Mtu,
    /// Where the RMB (not the element) begins.
    pub rmb_address: u64,
    /// The first PSN it will send.
    pub psn: Psn,
}

impl Offer {
    /// Where the element begins.
    ///
    /// Wraps where a peer names an address that its own RNIC will refuse.
    ///
    /// # Panics
    ///
    /// If the index is zero. Decoding never makes one.
    pub fn rmbe_address(&self) -> u64 {
        // RFC 7609 2.1 #10: compute element address from index
        let index = self.rmbe_index.checked_sub(1).expect("the first element is 1");
        let offset = u64::from(self.rmbe_size.bytes()) * u64::from(index);
        self.rmb_address.wrapping_add(offset)
    }

    pub(super) fn decode(bytes: &[u8; LEN]) -> Result<Self, Malformed> {
        // RFC 7609 A.2 #4: check both CLC eye catchers
        if bytes[field::TRAILER] != EYECATCHER {
            return Err(Malformed::Trailer);
        }
        Self::decode_fields(bytes)
    }

    /// Decodes all but the trailer, which is elsewhere in version 2.
    pub(super) fn decode_fields(bytes: &[u8]) -> Result<Self, Malformed> {
        // RFC 7609 2.1 #9: element index from 1 to 255
        if bytes[field::RMBE_INDEX] == 0 {
            return Err(Malformed::RmbeIndex);
        }
        Ok(Self {
            // RFC 7609 A.2.3 #2: F means first contact
            first_contact: bytes[header_field::VERSION_AND_FLAGS] & FLAG != 0,
            peer_id: PeerId(array(bytes, field::PEER_ID)),
            gid: Gid(array(bytes, field::GID)),
            mac: MacAddress(array(bytes, field::MAC)),
            qpn: Qpn(u24_at(bytes, field::QPN)),
            rkey: Rkey(u32_at(bytes, field::RKEY)),
            rmbe_index: bytes[field::RMBE_INDEX],
            alert_token: AlertToken(u32_at(bytes, field::ALERT_TOKEN)),
            rmbe_size: RmbeSize::from_notation(bytes[field::SIZE_AND_MTU] >> 4),
            mtu: Mtu(bytes[field::SIZE_AND_MTU] & NIBBLE),
            rmb_address: u64_at(bytes, field::RMB_ADDRESS),
            psn: Psn(u24_at(bytes, field::PSN)),
        })
    }

    /// As Accept or as Confirm.
    pub(super) fn encode(&self, kind: u8) -> EncodedFrame {
        let flags = flag_if(self.first_contact, FLAG);
        let mut frame = EncodedFrame::of_version(VERSION, kind, LEN, flags);
        put_fields(&mut frame.bytes, self);
        frame
    }
}

/// Writes what both versions have: everything between header and trailer.
pub(super) fn put_fields(bytes: &mut [u8], offer: &Offer) {
    assert!(offer.rmbe_index > 0, "the first element is 1");
    assert!(offer.mtu.0 <= NIBBLE, "an MTU has four bits");
    // RFC 7609 A.2.1 #1: peer id in every CLC message
    // RFC 7609 A.2.4 #3: Confirm with client's RMB values
    put(bytes, field::PEER_ID, &offer.peer_id.0);
    put(bytes, field::GID, &offer.gid.0);
    put(bytes, field::MAC, &offer.mac.0);
    put_u24(bytes, field::QPN, offer.qpn.0);
    put(bytes, field::RKEY, &offer.rkey.0.to_be_bytes());
    bytes[field::RMBE_INDEX] = offer.rmbe_index;
    put(bytes, field::ALERT_TOKEN, &offer.alert_token.0.to_be_bytes());
    bytes[field::SIZE_AND_MTU] = (offer.rmbe_size.notation() << 4) | offer.mtu.0;
    put(bytes, field::RMB_ADDRESS, &offer.rmb_address.to_be_bytes());
    put_u24(bytes, field::PSN, offer.psn.0);
}
