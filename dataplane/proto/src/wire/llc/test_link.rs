//! TEST LINK: asks for a sign of life (RFC A.3.8).
//!
//! ```text
//!   0     4           20         44
//!   | hdr | user data | reserved |
//! ```

use core::ops::Range;

use super::{LEN, has_flag, header, kind};
use crate::wire::{array, put};

mod field {
    use super::{LEN, Range};

    pub(super) const USER_DATA: Range<usize> = 4..20;
    pub(super) const RESERVED: Range<usize> = 20..44;
    const _: () = assert!(USER_DATA.end == RESERVED.start && RESERVED.end == LEN);
}

/// Request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestLink {
    /// Whether this answers one.
    pub reply: bool,
    /// Echoed by the peer.
    pub user_data: [u8; 16],
}

impl TestLink {
    pub(super) fn decode(bytes: &[u8; LEN]) -> Self {
        Self { reply: has_flag(bytes, super::REPLY), user_data: array(bytes, field::USER_DATA) }
    }

    pub(super) fn encode(&self) -> [u8; LEN] {
        let mut bytes = header(kind::TEST_LINK, self.reply, 0);
        put(&mut bytes, field::USER_DATA, &self.user_data);
        bytes
    }
}
