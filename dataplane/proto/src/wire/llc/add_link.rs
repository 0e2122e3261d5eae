//! ADD LINK and its continuation (RFC A.3.2, A.3.3).
//!
//! ```text
//!   0     2        3       4     10    12    28    31     32      33    36         44
//!   | hdr | reason | flags | mac | rsv | gid | qpn | link | r|mtu | psn | reserved |
//! ```
//! `reason` and `mtu` are low halves of their bytes. The RFC's figure has no padding between MAC
//! and GID. All deployed stacks put two bytes there, and so do we.
//!
//! ```text
//!   0     4      5           6          8      12    16        24     28    32        40    44
//!   | hdr | link | remaining | reserved | rkey | new | address | rkey | new | address | rsv |
//! ```

use core::ops::Range;

use super::{LEN, field as header_field, has_flag, header, kind};
use crate::vocabulary::{Gid, LinkNumber, MacAddress, Mtu, Psn, Qpn, Rkey};
use crate::wire::{array, flag_if, put, put_u24, u24_at, u32_at, u64_at};

mod field {
    use super::{LEN, Range, header_field};

    // RFC 7609 A.3.2 #4: rejection reason in byte 2
    pub(super) const REASON: usize = 2;
    pub(super) const MAC: Range<usize> = 4..10; // 10..12 is reserved
    pub(super) const GID: Range<usize> = 12..28;
    // RFC 7609 A.3.2 #7: ADD LINK with MAC, GID, QP
    pub(super) const QPN: Range<usize> = 28..31;
    pub(super) const LINK: usize = 31;
    pub(super) const MTU: usize = 32;
    // RFC 7609 A.3.2 #10: ADD LINK with initial PSN
    pub(super) const PSN: Range<usize> = 33..36;
    pub(super) const RESERVED: Range<usize> = 36..44;
    const _: () = assert!(REASON + 1 == header_field::FLAGS && RESERVED.end == LEN);
}

mod continuation_field {
    use super::{LEN, Range};

    // RFC 7609 A.3.3 #6: new link's number at byte 4
    pub(super) const LINK: usize = 4;
    pub(super) const REMAINING: usize = 5; // 6..8 is reserved
    // RFC 7609 A.3.3 #9: at most two pairs per message
    pub(super) const PAIRS: [usize; 2] = [8, 24];
    pub(super) const RESERVED: Range<usize> = 40..44;
    const _: () = assert!(PAIRS[1] + super::pair_field::LEN == RESERVED.start);
    const _: () = assert!(PAIRS[0] + super::pair_field::LEN == PAIRS[1] && RESERVED.end == LEN);
}

mod pair_field {
    use super::Range;

    pub(super) const EXISTING: Range<usize> = 0..4;
    pub(super) const NEW: Range<usize> = 4..8;
    pub(super) const ADDRESS: Range<usize> = 8..16;
    pub(super) const LEN: usize = ADDRESS.end;
}

/// The low half of a byte, where reason and MTU live.
const NIBBLE: u8 = 0x0f;

// RFC 7609 A.3.2 #3: Z marks a rejection
const REJECTED: u8 = 0x40;

/// Request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddLink {
    /// Whether this answers one.
    pub reply: bool,
    /// In a reply: no link will be added, for `reason`.
    pub rejected: bool,
    /// Why it was rejected; see [`REASON_NO_ALTERNATE_PATH`]. Four bits.
    pub reason: u8,
    /// The sender's port for the new link.
    pub mac: MacAddress,
    /// The sender's port for the new link.
    pub gid: Gid,
    /// Its queue pair.
    pub qpn: Qpn,
    /// Chosen by the server.
    pub link: LinkNumber,
    /// The largest path MTU of the sender's port.
    pub mtu: Mtu,
    /// The first PSN the sender will use.
    pub psn: Psn,
}

/// Why a link is rejected: the client has no second RNIC for a link to the same port of the server.
// RFC 7609 A.3.2 #5: reason 1: no alternate path
pub const REASON_NO_ALTERNATE_PATH: u8 = 1;

/// Why a link is rejected: the MTU has a reserved value.
// RFC 7609 A.3.2 #6: reason 2: invalid MTU
pub const REASON_INVALID_MTU: u8 = 2;

impl AddLink {
    pub(super) fn decode(bytes: &[u8; LEN]) -> Self {
        Self {
            reply: has_flag(bytes, super::REPLY),
            rejected: has_flag(bytes, REJECTED),
            reason: bytes[field::REASON] & NIBBLE,
            mac: MacAddress(array(bytes, field::MAC)),
            gid: Gid(array(bytes, field::GID)),
            qpn: Qpn(u24_at(bytes, field::QPN)),
            link: LinkNumber(bytes[field::LINK]),
            mtu: Mtu(bytes[field::MTU] & NIBBLE),
            psn: Psn(u24_at(bytes, field::PSN)),
        }
    }

    pub(super) fn encode(&self) -> [u8; LEN] {
        assert!(self.reason <= NIBBLE && self.mtu.0 <= NIBBLE, "both have four bits");
        let mut bytes = header(kind::ADD_LINK, self.reply, flag_if(self.rejected, REJECTED));
        bytes[field::REASON] = self.reason;
        put(&mut bytes, field::MAC, &self.mac.0);
        put(&mut bytes, field::GID, &self.gid.0);
        put_u24(&mut bytes, field::QPN, self.qpn.0);
        bytes[field::LINK] = self.link.0;
        bytes[field::MTU] = self.mtu.0;
        put_u24(&mut bytes, field::PSN, self.psn.0);
        bytes
    }
}

/// One RMB: its rkey on an existing link, and its RToken on the new one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RkeyPair {
    /// Its key on the link that carries this message.
    pub existing: Rkey,
    /// Its key on the new link.
    pub new: Rkey,
    /// Its address on the new link.
    pub address: u64,
}

impl RkeyPair {
    pub(super) fn decode(bytes: &[u8]) -> Self {
        Self {
            existing: Rkey(u32_at(bytes, pair_field::EXISTING)),
            new: Rkey(u32_at(bytes, pair_field::NEW)),
            address: u64_at(bytes, pair_field::ADDRESS),
        }
    }

    pub(super) fn encode_into(self, bytes: &mut [u8]) {
        put(bytes, pair_field::EXISTING, &self.existing.0.to_be_bytes());
        put(bytes, pair_field::NEW, &self.new.0.to_be_bytes());
        put(bytes, pair_field::ADDRESS, &self.address.to_be_bytes());
    }
}

/// The keys that RMBs have on the new link, two at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddLinkContinuation {
    /// Whether this answers one.
    pub reply: bool,
    /// The new link.
    pub link: LinkNumber,
    /// Keys still to be sent, those of this message included.
    pub remaining: u8,
    /// The first `min(remaining, 2)` count.
    pub pairs: [RkeyPair; 2],
}

impl AddLinkContinuation {
    pub(super) fn decode(bytes: &[u8; LEN]) -> Self {
        Self {
            reply: has_flag(bytes, super::REPLY),
            link: LinkNumber(bytes[continuation_field::LINK]),
            remaining: bytes[continuation_field::REMAINING],
            pairs: continuation_field::PAIRS.map(|start| RkeyPair::decode(&bytes[start..])),
        }
    }

    pub(super) fn encode(&self) -> [u8; LEN] {
        let mut bytes = header(kind::ADD_LINK_CONTINUATION, self.reply, 0);
        bytes[continuation_field::LINK] = self.link.0;
        bytes[continuation_field::REMAINING] = self.remaining;
        for (start, pair) in continuation_field::PAIRS.into_iter().zip(self.pairs) {
            pair.encode_into(&mut bytes[start..]);
        }
        bytes
    }
}
