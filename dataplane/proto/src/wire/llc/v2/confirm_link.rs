//! CONFIRM LINK of version 2: that of version 1, and one byte more.
//!
//! ```text
//!   0                 35          36         44
//!   | as in version 1 | max conns | reserved |
//! ```

use super::super::ConfirmLink;
use super::{Message, as_version_1};

mod field {
    pub(super) const MAX_CONNECTIONS: usize = 35;
}

/// Request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmLinkV2 {
    /// The fields of version 1.
    pub link: ConfirmLink,
    /// The most connections in the group, as agreed at first contact. Zero in release 0.
    pub max_connections: u8,
}

impl ConfirmLinkV2 {
    /// Decodes one message, as long as it says it is.
    pub(super) fn decode(bytes: &[u8]) -> Self {
        Self {
            link: ConfirmLink::decode(&as_version_1(bytes)),
            max_connections: bytes[field::MAX_CONNECTIONS],
        }
    }

    pub(super) fn encode<'b>(&self, into: &'b mut [u8]) -> &'b [u8] {
        let elder = self.link.encode();
        let mut message = Message::like(&elder, elder.len(), into);
        message.bytes()[field::MAX_CONNECTIONS] = self.max_connections;
        message.finish()
    }
}
