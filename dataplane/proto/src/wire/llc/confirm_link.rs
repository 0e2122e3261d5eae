//! CONFIRM LINK: proves that a new link carries messages both ways (RFC A.3.1).
//!
//! ```text
//!   0     3       4     10    26    29     30        34          35         44
//!   | hdr | flags | mac | gid | qpn | link | user id | max links | reserved |
//! ```
//! Of the flags, the RFC knows only the reply bit. Deployed stacks set the two lowest bits to say
//! that their RMB elements have no eye catcher, and decline a peer that sets neither.

use core::ops::Range;

use super::{LEN, field as header_field, has_flag, header, kind};
use crate::vocabulary::{Gid, LinkNumber, LinkUserId, MacAddress, Qpn};
use crate::wire::{array, flag_if, put, put_u24, u24_at, u32_at};

mod field {
    use super::{LEN, Range, header_field};

    // RFC 7609 A.3.1 #2: CONFIRM LINK: MAC, GID, QP number
    pub(super) const MAC: Range<usize> = 4..10;
    pub(super) const GID: Range<usize> = 10..26;
    pub(super) const QPN: Range<usize> = 26..29;
    // RFC 7609 A.3.1 #3: link number at byte 29
    pub(super) const LINK: usize = 29;
    // RFC 7609 A.3.1 #4: link user id at byte 30
    pub(super) const USER_ID: Range<usize> = 30..34;
    // RFC 7609 A.3.1 #5: link limit at byte 34
    pub(super) const MAX_LINKS: usize = 34;
    pub(super) const RESERVED: Range<usize> = 35..44;
    const _: () = assert!(MAC.start == header_field::FLAGS + 1 && RESERVED.end == LEN);
}

/// Either bit is enough; we set both, as all deployed stacks do.
const NO_EYECATCHER: u8 = 0x03;

/// Request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmLink {
    /// Whether this answers one.
    pub reply: bool,
    /// The sender's RMB elements begin with data, not with a four-byte eye catcher. All deployed
    /// stacks set these two flag bits, which the RFC calls reserved, and demand them.
    pub no_eyecatcher: bool,
    /// The sender's port.
    pub mac: MacAddress,
    /// The sender's port.
    pub gid: Gid,
    /// The sender's queue pair.
    pub qpn: Qpn,
    /// Chosen by the server, echoed by the client.
    pub link: LinkNumber,
    /// The sender's own name for the link.
    pub user_id: LinkUserId,
    /// The most links the sender wants in the group.
    pub max_links: u8,
}

impl ConfirmLink {
    pub(super) fn decode(bytes: &[u8; LEN]) -> Self {
        Self {
            reply: has_flag(bytes, super::REPLY),
            no_eyecatcher: has_flag(bytes, NO_EYECATCHER),
            mac: MacAddress(array(bytes, field::MAC)),
            gid: Gid(array(bytes, field::GID)),
            qpn: Qpn(u24_at(bytes, field::QPN)),
            link: LinkNumber(bytes[field::LINK]),
            user_id: LinkUserId(u32_at(bytes, field::USER_ID)),
            max_links: bytes[field::MAX_LINKS],
        }
    }

    pub(super) fn encode(&self) -> [u8; LEN] {
        let flags = flag_if(self.no_eyecatcher, NO_EYECATCHER);
        let mut bytes = header(kind::CONFIRM_LINK, self.reply, flags);
        put(&mut bytes, field::MAC, &self.mac.0);
        put(&mut bytes, field::GID, &self.gid.0);
        put_u24(&mut bytes, field::QPN, self.qpn.0);
        bytes[field::LINK] = self.link.0;
        put(&mut bytes, field::USER_ID, &self.user_id.0.to_be_bytes());
        bytes[field::MAX_LINKS] = self.max_links;
        bytes
    }
}
