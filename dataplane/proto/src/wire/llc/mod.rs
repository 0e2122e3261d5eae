//! LLC: management of links and rkeys over the queue pair, 44 bytes each (RFC 3.3, A.3).
//!
//! ```text
//!   0      1    2          3       4                            44
//!   | type | 44 | reserved | flags | what the type says        |
//! ```
//! The high bit of the flags says that the message is a reply. The low half of the reserved byte
//! carries the reason of a rejected ADD LINK.

use crate::wire::{Malformed, flag_if};

pub mod add_link;
pub mod confirm_link;
pub mod delete_link;
pub mod rkeys;
pub mod test_link;
pub mod v2;

pub use add_link::{AddLink, AddLinkContinuation, RkeyPair};
pub use confirm_link::ConfirmLink;
pub use delete_link::{DeleteLink, DeleteReason};
pub use rkeys::{ConfirmRkey, ConfirmRkeyContinuation, DeleteRkey, RkeyOnLink};
pub use test_link::TestLink;
pub use v2::LlcV2;

/// Length of every LLC and CDC message of SMC-Rv1, in bytes.
// RFC 7609 A.3 #1: LLC messages filled with zeros
// RFC 7609 3.3 #1: LLC messages are SENDs of 44 bytes
// RFC 7609 3.4 #1: CDC messages are SENDs of 44 bytes
pub const LEN: usize = 44;

mod field {
    pub(super) const TYPE: usize = 0;
    pub(super) const LENGTH: usize = 1;
    pub(super) const FLAGS: usize = 3;
}

/// Set in every reply.
// RFC 7609 A.3 #2: one flag marks LLC replies
const REPLY: u8 = 0x80;

/// Two bits of a type say what to do with a message of unknown type; this value says to discard it
/// (RFC A.3).
const UNKNOWN_TYPE_MASK: u8 = 0xc0;
const DISCARD: u8 = 0x80;

mod kind {
    // RFC 7609 A.3.1 #1: CONFIRM LINK: type 1, reply flag
    pub(super) const CONFIRM_LINK: u8 = 1;
    // RFC 7609 A.3.2 #2: ADD LINK: type 2, reply flag
    pub(super) const ADD_LINK: u8 = 2;
    // RFC 7609 A.3.3 #1: ADD LINK CONTINUATION: type 3, reply flag
    pub(super) const ADD_LINK_CONTINUATION: u8 = 3;
    // RFC 7609 A.3.4 #1: DELETE LINK: type 4, reply flag
    pub(super) const DELETE_LINK: u8 = 4;
    // RFC 7609 A.3.5 #1: CONFIRM RKEY: type 6, reply flag
    pub(super) const CONFIRM_RKEY: u8 = 6;
    // RFC 7609 A.3.8 #1: TEST LINK: type 7, reply flag
    pub(super) const TEST_LINK: u8 = 7;
    // RFC 7609 A.3.6 #1: CONFIRM RKEY CONTINUATION: type 8, reply flag
    pub(super) const CONFIRM_RKEY_CONTINUATION: u8 = 8;
    // RFC 7609 A.3.7 #1: DELETE RKEY: type 9, reply flag
    pub(super) const DELETE_RKEY: u8 = 9;
}

/// One LLC message, request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Llc {
    /// Proves that a new link carries messages both ways.
    ConfirmLink(ConfirmLink),
    /// Offers one more link, or asks for one.
    AddLink(AddLink),
    /// Tells the rkeys of RMBs on the new link.
    AddLinkContinuation(AddLinkContinuation),
    /// Ends a link, or all of them.
    DeleteLink(DeleteLink),
    /// Tells the rkeys of a new RMB on all links.
    ConfirmRkey(ConfirmRkey),
    /// Tells more of these rkeys.
    ConfirmRkeyContinuation(ConfirmRkeyContinuation),
    /// Deletes RMBs.
    DeleteRkey(DeleteRkey),
    /// Asks for a sign of life.
    TestLink(TestLink),
}

impl Llc {
    /// Decodes one received message that is not a CDC message.
    ///
    /// # Errors
    ///
    /// - [`Malformed::Ignorable`] for an unknown type that its sender allows us to discard.
    /// - [`Malformed::UnknownType`] for any other, those of SMC-Rv2 and CDC included.
    /// - [`Malformed::Length`] if the length field is not 44.
    /// - [`Malformed::RkeyCount`] if a DELETE RKEY counts more keys than it has room for.
    ///
    /// # Specification
    ///
    /// RFC 7609, A.3.
    pub fn decode(bytes: &[u8; LEN]) -> Result<Self, Malformed> {
        match bytes[field::TYPE] {
            kind::CONFIRM_LINK..=kind::DELETE_LINK | kind::CONFIRM_RKEY..=kind::DELETE_RKEY
                if bytes[field::LENGTH] != LENGTH =>
            {
                Err(Malformed::Length)
            }
            kind::CONFIRM_LINK => Ok(Self::ConfirmLink(ConfirmLink::decode(bytes))),
            kind::ADD_LINK => Ok(Self::AddLink(AddLink::decode(bytes))),
            kind::ADD_LINK_CONTINUATION => {
                Ok(Self::AddLinkContinuation(AddLinkContinuation::decode(bytes)))
            }
            kind::DELETE_LINK => Ok(Self::DeleteLink(DeleteLink::decode(bytes))),
            kind::CONFIRM_RKEY => Ok(Self::ConfirmRkey(ConfirmRkey::decode(bytes))),
            kind::CONFIRM_RKEY_CONTINUATION => {
                Ok(Self::ConfirmRkeyContinuation(ConfirmRkeyContinuation::decode(bytes)))
            }
            kind::DELETE_RKEY => DeleteRkey::decode(bytes).map(Self::DeleteRkey),
            kind::TEST_LINK => Ok(Self::TestLink(TestLink::decode(bytes))),
            // RFC 7609 A.3 #4: unknown opcode 10: drop silently
            unknown if unknown & UNKNOWN_TYPE_MASK == DISCARD => Err(Malformed::Ignorable(unknown)),
            // RFC 7609 A.3 #3: unknown opcode 00: protocol error
            unknown => Err(Malformed::UnknownType(unknown)),
        }
    }

    /// The message as it travels.
    ///
    /// # Panics
    ///
    /// If a field holds more than its bits: 24 for QPN and PSN, four for an MTU or a reason. Such
    /// values are ours; decoding never makes one.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        match self {
            Self::ConfirmLink(message) => message.encode(),
            Self::AddLink(message) => message.encode(),
            Self::AddLinkContinuation(message) => message.encode(),
            Self::DeleteLink(message) => message.encode(),
            Self::ConfirmRkey(message) => message.encode(),
            Self::ConfirmRkeyContinuation(message) => message.encode(),
            Self::DeleteRkey(message) => message.encode(),
            Self::TestLink(message) => message.encode(),
        }
    }

    /// Whether this answers a message of ours.
    pub const fn is_reply(&self) -> bool {
        match self {
            Self::ConfirmLink(message) => message.reply,
            Self::AddLink(message) => message.reply,
            Self::AddLinkContinuation(message) => message.reply,
            Self::DeleteLink(message) => message.reply,
            Self::ConfirmRkey(message) => message.reply,
            Self::ConfirmRkeyContinuation(message) => message.reply,
            Self::DeleteRkey(message) => message.reply,
            Self::TestLink(message) => message.reply,
        }
    }
}

/// An empty message of one type. `flags` come without the reply bit.
fn header(kind: u8, reply: bool, flags: u8) -> [u8; LEN] {
    assert_eq!(flags & REPLY, 0, "the reply bit has its own argument");
    let mut bytes = [0; LEN];
    bytes[field::TYPE] = kind;
    bytes[field::LENGTH] = LENGTH;
    bytes[field::FLAGS] = flags | flag_if(reply, REPLY);
    bytes
}

fn has_flag(bytes: &[u8; LEN], flag: u8) -> bool {
    bytes[field::FLAGS] & flag != 0
}

/// [`LEN`] as the length field has it.
#[expect(clippy::cast_possible_truncation, reason = "44 fits into a byte")]
const LENGTH: u8 = LEN as u8;

#[cfg(test)]
mod tests;
