//! ADD LINK of version 2: that of version 1, and all RKeys. There is no continuation.
//!
//! ```text
//!   0                   44       45         46           62         70      72       72 + 16 n
//!   | as in version 1   | direct | reserved | target gid | reserved | count | n * rkey |
//! ```
//! A rejection ends at byte 44. It carries no reason, because the length stands where version 1 has
//! the reason. `count` has 16 bits in the sender's byte order and never exceeds 255, so one of its
//! bytes is zero, and the other one is the count.

use core::ops::Range;

use super::super::add_link::{AddLink, RkeyPair};
use super::records::{Record, Records};
use super::{LEN_MIN, Message, as_version_1};
use crate::vocabulary::Gid;
use crate::wire::{Malformed, array, flag_if, put};

mod field {
    use super::{LEN_MIN, Range};

    pub(super) const FLAGS: usize = 44; // 45 is reserved
    pub(super) const TARGET: Range<usize> = 46..62; // 62..70 is reserved
    pub(super) const COUNT: Range<usize> = 70..72;
    pub(super) const RKEYS: usize = 72;
    const _: () = assert!(FLAGS == LEN_MIN && COUNT.end == RKEYS);
}

/// No router is between the ports of the new link.
const DIRECT: u8 = 0x80;

/// Request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddLinkV2<'a> {
    /// The fields of version 1; `reason` is zero.
    pub link: AddLink,
    /// None in a rejection.
    pub extension: Option<AddLinkExtension<'a>>,
}

/// The fields that version 2 adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddLinkExtension<'a> {
    /// Whether no router is between the ports of the new link.
    pub direct: bool,
    /// The client's port that the server suggests. Linux repeats the sender's own port here.
    pub target: Gid,
    /// Every RMB of the sender: its key on the link that carries this message, and on the new one.
    pub rkeys: Records<'a, RkeyPair>,
}

impl<'a> AddLinkV2<'a> {
    /// Decodes one message, as long as it says it is.
    pub(super) fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let link = AddLink::decode(&as_version_1(bytes));
        if bytes.len() < field::RKEYS {
            // Only a rejection has no rkeys.
            return match link.rejected {
                true => Ok(Self { link, extension: None }),
                false => Err(Malformed::Extension),
            };
        }
        let count = match array(bytes, field::COUNT) {
            [count, 0] | [0, count] => count,
            [_, _] => return Err(Malformed::RkeyCount),
        };
        let rkeys = Records::received(&bytes[field::RKEYS..], count);
        let extension = AddLinkExtension {
            direct: bytes[field::FLAGS] & DIRECT != 0,
            target: Gid(array(bytes, field::TARGET)),
            rkeys: rkeys.ok_or(Malformed::RkeyCount)?,
        };
        Ok(Self { link, extension: Some(extension) })
    }

    pub(super) fn encode<'b>(&self, into: &'b mut [u8]) -> &'b [u8] {
        assert_eq!(self.link.reason, 0, "the length has its place");
        assert!(self.link.rejected || self.extension.is_some(), "a new link needs its keys");
        let elder = self.link.encode();
        let Some(extension) = &self.extension else {
            return Message::like(&elder, elder.len(), into).finish();
        };
        let len = field::RKEYS + extension.rkeys.len() * RkeyPair::LEN;
        let mut message = Message::like(&elder, len, into);
        let bytes = message.bytes();
        bytes[field::FLAGS] = flag_if(extension.direct, DIRECT);
        put(bytes, field::TARGET, &extension.target.0);
        put(bytes, field::COUNT, &[extension.rkeys.count(), 0]);
        extension.rkeys.write_into(&mut bytes[field::RKEYS..]);
        message.finish()
    }
}
