//! REQUEST ADD LINK: a client asks its server for a further link.
//!
//! ```text
//!   0     4          24      25         28         28 + 16 n, at least 44
//!   | hdr | reserved | count | reserved | n * gid |
//! ```

use super::super::{REPLY, has_flag, header};
use super::records::{Record, Records};
use super::{LEN_MIN, Message, as_version_1, kind};
use crate::vocabulary::Gid;
use crate::wire::Malformed;

mod field {
    pub(super) const COUNT: usize = 24; // 4..24 and 25..28 are reserved
    pub(super) const GIDS: usize = 28;
}

/// A request. A server that agrees answers by ADD LINK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestAddLink<'a> {
    /// Whether this answers one, which deployed peers ignore.
    pub reply: bool,
    /// The ports of the client over which there could be a link.
    pub gids: Records<'a, Gid>,
}

impl<'a> RequestAddLink<'a> {
    /// Decodes one message, as long as it says it is.
    pub(super) fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let gids = Records::received(&bytes[field::GIDS..], bytes[field::COUNT]);
        Ok(Self {
            reply: has_flag(&as_version_1(bytes), REPLY),
            gids: gids.ok_or(Malformed::Extension)?,
        })
    }

    pub(super) fn encode<'b>(&self, into: &'b mut [u8]) -> &'b [u8] {
        let len = LEN_MIN.max(field::GIDS + self.gids.len() * Gid::LEN);
        let mut message = Message::like(&header(kind::REQUEST_ADD_LINK, self.reply, 0), len, into);
        message.bytes()[field::COUNT] = self.gids.count();
        self.gids.write_into(&mut message.bytes()[field::GIDS..]);
        message.finish()
    }
}
