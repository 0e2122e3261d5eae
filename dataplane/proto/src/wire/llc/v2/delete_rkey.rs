//! DELETE RKEY of version 2: up to 255 keys in one message.
//!
//! ```text
//!   0     4       5         6          8          8 + 4 n, at least 44
//!   | hdr | count | invalid | reserved | n * rkey |
//! ```
//! The reply repeats the count without the keys, and in place of a mask it counts those that were
//! unknown.

use super::super::rkeys::NEGATIVE;
use super::super::{REPLY, has_flag, header, kind as elder_kind};
use super::records::{Record, Records};
use super::{LEN_MIN, Message, as_version_1};
use crate::vocabulary::Rkey;
use crate::wire::{Malformed, flag_if};

mod field {
    pub(super) const COUNT: usize = 4;
    pub(super) const INVALID: usize = 5; // 6..8 is reserved
    pub(super) const RKEYS: usize = 8;
}

/// Which RMBs are deleted, or the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteRkeyV2<'a> {
    /// RMBs with these rkeys are deleted.
    Request(Records<'a, Rkey>),
    /// The receiver has forgotten them.
    Reply {
        /// Some key was unknown.
        negative: bool,
        /// How many keys the request had.
        count: u8,
        /// How many of them were unknown.
        invalid: u8,
    },
}

impl<'a> DeleteRkeyV2<'a> {
    /// Decodes one message, as long as it says it is.
    pub(super) fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let (elder, count) = (as_version_1(bytes), bytes[field::COUNT]);
        if has_flag(&elder, REPLY) {
            let negative = has_flag(&elder, NEGATIVE);
            return Ok(Self::Reply { negative, count, invalid: bytes[field::INVALID] });
        }
        let rkeys = Records::received(&bytes[field::RKEYS..], count);
        rkeys.ok_or(Malformed::RkeyCount).map(Self::Request)
    }

    pub(super) fn encode<'b>(&self, into: &'b mut [u8]) -> &'b [u8] {
        match self {
            Self::Request(rkeys) => {
                let len = LEN_MIN.max(field::RKEYS + rkeys.len() * Rkey::LEN);
                let elder = header(elder_kind::DELETE_RKEY, false, 0);
                let mut message = Message::like(&elder, len, into);
                message.bytes()[field::COUNT] = rkeys.count();
                rkeys.write_into(&mut message.bytes()[field::RKEYS..]);
                message.finish()
            }
            Self::Reply { negative, count, invalid } => {
                let flags = flag_if(*negative, NEGATIVE);
                let elder = header(elder_kind::DELETE_RKEY, true, flags);
                let mut message = Message::like(&elder, LEN_MIN, into);
                message.bytes()[field::COUNT] = *count;
                message.bytes()[field::INVALID] = *invalid;
                message.finish()
            }
        }
    }
}
