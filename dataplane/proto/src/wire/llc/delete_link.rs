//! DELETE LINK and its reasons (RFC A.3.4).
//!
//! ```text
//!   0     3       4      5        9          44
//!   | hdr | flags | link | reason | reserved |
//! ```

use core::ops::Range;

use super::{LEN, field as header_field, has_flag, header, kind};
use crate::vocabulary::LinkNumber;
use crate::wire::{flag_if, put, u32_at};

mod field {
    use super::{LEN, Range, header_field};

    pub(super) const LINK: usize = 4;
    // RFC 7609 A.3.4 #5: deletion reason at byte 5
    pub(super) const REASON: Range<usize> = 5..9;
    pub(super) const RESERVED: Range<usize> = 9..44;
    const _: () = assert!(LINK == header_field::FLAGS + 1 && RESERVED.end == LEN);
    const _: () = assert!(REASON.end == RESERVED.start);
}

// RFC 7609 A.3.4 #2: flag that deletes all links
const ALL: u8 = 0x40;
// RFC 7609 A.3.4 #3: flag that says orderly
// RFC 7609 2.3 #14: say whether deletion is orderly
const ORDERLY: u8 = 0x20;

/// Why a link is deleted. Peers may send other codes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeleteReason(pub u32);

code_points! {
    // RFC 7609 A.3.4 #6: five reasons for DELETE LINK
    DeleteReason {
        /// Request: the path to the peer is gone.
        LOST_PATH = 0x0001_0000,
        /// Request: an operator demanded it.
        OPERATOR = 0x0002_0000,
        /// Request: the implementation decided so, usually because the group was idle for long.
        PROGRAM = 0x0003_0000,
        /// Request: the receiver broke the LLC protocol.
        PROTOCOL_VIOLATION = 0x0004_0000,
        /// Request: a symmetric link has replaced this asymmetric one.
        ASYMMETRIC_NOT_NEEDED = 0x0005_0000,
        /// Reply: there is no such link.
        UNKNOWN_LINK = 0x0010_0000,
        /// Reply: there is no such link group. (Not in the RFC.)
        UNKNOWN_LINK_GROUP = 0x0020_0000,
    }
}

/// Request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeleteLink {
    /// Whether this answers one.
    pub reply: bool,
    /// All links of the group, not just `link`.
    pub all: bool,
    /// Outstanding work may finish first.
    pub orderly: bool,
    /// Which link.
    pub link: LinkNumber,
    /// Why.
    pub reason: DeleteReason,
}

impl DeleteLink {
    pub(super) fn decode(bytes: &[u8; LEN]) -> Self {
        Self {
            reply: has_flag(bytes, super::REPLY),
            all: has_flag(bytes, ALL),
            orderly: has_flag(bytes, ORDERLY),
            link: LinkNumber(bytes[field::LINK]),
            reason: DeleteReason(u32_at(bytes, field::REASON)),
        }
    }

    pub(super) fn encode(&self) -> [u8; LEN] {
        let flags = flag_if(self.all, ALL) | flag_if(self.orderly, ORDERLY);
        let mut bytes = header(kind::DELETE_LINK, self.reply, flags);
        bytes[field::LINK] = self.link.0;
        put(&mut bytes, field::REASON, &self.reason.0.to_be_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use std::format;

    use super::*;

    /// The log names the reasons we know, and keeps the number of those we do not.
    #[test]
    fn unknown_reasons_survive() {
        assert_eq!(format!("{:?}", DeleteReason::LOST_PATH), "LOST_PATH");
        assert_eq!(DeleteReason::UNKNOWN_LINK_GROUP.name(), Some("UNKNOWN_LINK_GROUP"));
        assert_eq!(format!("{:?}", DeleteReason(0x77)), "DeleteReason(0x00000077)");
        assert_eq!(DeleteReason(0).name(), None);
    }
}
