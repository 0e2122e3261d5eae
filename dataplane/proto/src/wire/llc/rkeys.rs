//! CONFIRM RKEY, its continuation, and DELETE RKEY (RFC A.3.5 to A.3.7).
//!
//! ```text
//!   0     4             5      9         17     18     22        30     31     35        43    44
//!   | hdr | other links | rkey | address | link | rkey | address | link | rkey | address | rsv |
//!
//!   0     4           5      6      10        18     19     23        31     32     36        44
//!   | hdr | remaining | link | rkey | address | link | rkey | address | link | rkey | address |
//!
//!   0     4       5            6          8      12       40         44
//!   | hdr | count | error mask | reserved | rkey | 7 more | reserved |
//! ```

use core::ops::Range;

use super::{LEN, has_flag, header, kind};
use crate::vocabulary::{LinkNumber, Rkey};
use crate::wire::{Malformed, flag_if, put, u32_at, u64_at};

mod confirm_field {
    use super::{LEN, Range, on_link_field};

    // RFC 7609 A.3.5 #4: byte 4 counts other links
    pub(super) const OTHER_LINKS: usize = 4;
    // RFC 7609 A.3.5 #5: RKey at byte 5, address at 9
    pub(super) const RKEY: Range<usize> = 5..9;
    pub(super) const ADDRESS: Range<usize> = 9..17;
    // RFC 7609 A.3.5 #6: two more RTokens from byte 17
    pub(super) const OTHERS: [usize; 2] = [17, 30]; // 43 is reserved
    const _: () = assert!(OTHERS[0] + on_link_field::LEN == OTHERS[1]);
    const _: () = assert!(OTHERS[1] + on_link_field::LEN + 1 == LEN);
}

mod continuation_field {
    use super::{LEN, on_link_field};

    pub(super) const REMAINING: usize = 4;
    // RFC 7609 A.3.6 #3: at most three RTokens per message
    pub(super) const OTHERS: [usize; 3] = [5, 18, 31];
    const _: () = assert!(OTHERS[0] + 2 * on_link_field::LEN == OTHERS[2]);
    const _: () = assert!(OTHERS[2] + on_link_field::LEN == LEN);
}

mod on_link_field {
    use super::Range;

    pub(super) const LINK: usize = 0;
    pub(super) const RKEY: Range<usize> = 1..5;
    pub(super) const ADDRESS: Range<usize> = 5..13;
    pub(super) const LEN: usize = ADDRESS.end;
}

mod delete_field {
    use super::{LEN, Range};

    pub(super) const COUNT: usize = 4;
    pub(super) const ERROR_MASK: usize = 5; // 6..8 is reserved
    // RFC 7609 A.3.7 #5: deleted RKeys from byte 8
    pub(super) const RKEYS: [Range<usize>; super::RKEYS_MAX] =
        [8..12, 12..16, 16..20, 20..24, 24..28, 28..32, 32..36, 36..40];
    pub(super) const RESERVED: Range<usize> = 40..44;
    const _: () = assert!(RKEYS[7].end == RESERVED.start && RESERVED.end == LEN);
}

// RFC 7609 A.3.5 #2: negative flag of CONFIRM RKEY
// RFC 7609 A.3.6 #5: negative flag of CONFIRM RKEY CONTINUATION
// RFC 7609 A.3.7 #2: negative flag of DELETE RKEY
pub(super) const NEGATIVE: u8 = 0x20;
// RFC 7609 A.3.5 #3: retry flag of CONFIRM RKEY
const RETRY: u8 = 0x10;

/// The most keys one DELETE RKEY carries.
pub const RKEYS_MAX: usize = 8;

/// The RToken of an RMB on one of the other links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RkeyOnLink {
    /// The link.
    pub link: LinkNumber,
    /// The key there.
    pub rkey: Rkey,
    /// The address there.
    pub address: u64,
}

impl RkeyOnLink {
    fn decode(bytes: &[u8]) -> Self {
        Self {
            link: LinkNumber(bytes[on_link_field::LINK]),
            rkey: Rkey(u32_at(bytes, on_link_field::RKEY)),
            address: u64_at(bytes, on_link_field::ADDRESS),
        }
    }

    fn encode_into(self, bytes: &mut [u8]) {
        bytes[on_link_field::LINK] = self.link.0;
        put(bytes, on_link_field::RKEY, &self.rkey.0.to_be_bytes());
        put(bytes, on_link_field::ADDRESS, &self.address.to_be_bytes());
    }
}

/// A new RMB: its rkey on this link and on the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmRkey {
    /// Whether this answers one.
    pub reply: bool,
    /// In a reply: the keys were not taken.
    pub negative: bool,
    /// In a negative reply: try again later.
    pub retry: bool,
    /// How many keys for other links there are, continuations included.
    pub other_links: u8,
    /// The key on the link that carries this message.
    pub rkey: Rkey,
    /// The address on that link.
    pub address: u64,
    /// Keys on other links; the first `min(other_links, 2)` count.
    pub others: [RkeyOnLink; 2],
}

impl ConfirmRkey {
    pub(super) fn decode(bytes: &[u8; LEN]) -> Self {
        Self {
            reply: has_flag(bytes, super::REPLY),
            negative: has_flag(bytes, NEGATIVE),
            retry: has_flag(bytes, RETRY),
            other_links: bytes[confirm_field::OTHER_LINKS],
            rkey: Rkey(u32_at(bytes, confirm_field::RKEY)),
            address: u64_at(bytes, confirm_field::ADDRESS),
            others: confirm_field::OTHERS.map(|start| RkeyOnLink::decode(&bytes[start..])),
        }
    }

    pub(super) fn encode(&self) -> [u8; LEN] {
        let flags = flag_if(self.negative, NEGATIVE) | flag_if(self.retry, RETRY);
        let mut bytes = header(kind::CONFIRM_RKEY, self.reply, flags);
        bytes[confirm_field::OTHER_LINKS] = self.other_links;
        put(&mut bytes, confirm_field::RKEY, &self.rkey.0.to_be_bytes());
        put(&mut bytes, confirm_field::ADDRESS, &self.address.to_be_bytes());
        for (start, other) in confirm_field::OTHERS.into_iter().zip(self.others) {
            other.encode_into(&mut bytes[start..]);
        }
        bytes
    }
}

/// More keys for other links, up to three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmRkeyContinuation {
    /// Whether this answers one.
    pub reply: bool,
    /// In a reply: the keys were not taken.
    pub negative: bool,
    /// Keys still to be sent, those of this message included.
    pub remaining: u8,
    /// The first `min(remaining, 3)` count.
    pub others: [RkeyOnLink; 3],
}

impl ConfirmRkeyContinuation {
    pub(super) fn decode(bytes: &[u8; LEN]) -> Self {
        Self {
            reply: has_flag(bytes, super::REPLY),
            negative: has_flag(bytes, NEGATIVE),
            remaining: bytes[continuation_field::REMAINING],
            others: continuation_field::OTHERS.map(|start| RkeyOnLink::decode(&bytes[start..])),
        }
    }

    pub(super) fn encode(&self) -> [u8; LEN] {
        let flags = flag_if(self.negative, NEGATIVE);
        let mut bytes = header(kind::CONFIRM_RKEY_CONTINUATION, self.reply, flags);
        bytes[continuation_field::REMAINING] = self.remaining;
        for (start, other) in continuation_field::OTHERS.into_iter().zip(self.others) {
            other.encode_into(&mut bytes[start..]);
        }
        bytes
    }
}

/// RMBs that are deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeleteRkey {
    /// Whether this answers one.
    pub reply: bool,
    /// In a reply: some key was unknown; `error_mask` says which.
    pub negative: bool,
    /// How many of `rkeys` are meant, at most eight.
    pub count: u8,
    /// In a reply: the high bit is the first key.
    pub error_mask: u8,
    /// The keys.
    pub rkeys: [Rkey; RKEYS_MAX],
}

impl DeleteRkey {
    pub(super) fn decode(bytes: &[u8; LEN]) -> Result<Self, Malformed> {
        let count = bytes[delete_field::COUNT];
        // RFC 7609 A.3.7 #3: byte 4 counts deleted RKeys
        if usize::from(count) > RKEYS_MAX {
            return Err(Malformed::RkeyCount);
        }
        Ok(Self {
            reply: has_flag(bytes, super::REPLY),
            negative: has_flag(bytes, NEGATIVE),
            count,
            error_mask: bytes[delete_field::ERROR_MASK],
            rkeys: delete_field::RKEYS.map(|field| Rkey(u32_at(bytes, field))),
        })
    }

    pub(super) fn encode(&self) -> [u8; LEN] {
        assert!(usize::from(self.count) <= RKEYS_MAX, "a ninth key needs a second message");
        let flags = flag_if(self.negative, NEGATIVE);
        let mut bytes = header(kind::DELETE_RKEY, self.reply, flags);
        bytes[delete_field::COUNT] = self.count;
        bytes[delete_field::ERROR_MASK] = self.error_mask;
        for (field, rkey) in delete_field::RKEYS.into_iter().zip(self.rkeys) {
            put(&mut bytes, field, &rkey.0.to_be_bytes());
        }
        bytes
    }
}
