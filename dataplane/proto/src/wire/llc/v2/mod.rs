//! LLC of SMC-Rv2, as Linux speaks it: longer messages, fewer of them.
//!
//! ```text
//!   0        1        3       4                            length
//!   | 2|type | length | flags | what the type says          |
//! ```
//! The high half of the type is the version. The length has 16 bits in the *sender's* byte order. A
//! receiver finds out which order that is: only one of the two readings fits the bytes that have
//! arrived. We send it in little-endian order. Messages have at least 44 bytes and at most 8 KiB.
//! One message lists everything for which version 1 needs continuations. Messages that version 2
//! does not change keep their types. CDC messages are those of version 1.

use super::{
    ConfirmRkey, ConfirmRkeyContinuation, DeleteLink, TestLink, field, kind as elder_kind,
};
use crate::wire::Malformed;

mod add_link;
mod confirm_link;
mod delete_rkey;
mod records;
mod request_add_link;

pub use add_link::{AddLinkExtension, AddLinkV2};
pub use confirm_link::ConfirmLinkV2;
pub use delete_rkey::DeleteRkeyV2;
pub use records::{Record, Records};
pub use request_add_link::RequestAddLink;

/// Length of the shortest LLC message in bytes, and of those that version 2 does not change.
pub const LEN_MIN: usize = super::LEN;

/// Length of the longest LLC message in bytes: every receive buffer of a link has that room.
pub const LEN_MAX: usize = 8192;

/// The high half of every type.
const VERSION: u8 = 0x20;

/// The bits of a type that are the version.
const VERSION_MASK: u8 = 0xf0;

mod kind {
    /// The one message that version 1 does not have.
    pub(super) const REQUEST_ADD_LINK: u8 = 5;
}

/// One LLC message of version 2, request or reply. Lists borrow the received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlcV2<'a> {
    /// Proves that a new link carries messages both ways.
    ConfirmLink(ConfirmLinkV2),
    /// Offers one more link, and tells the rkeys of all RMBs there.
    AddLink(AddLinkV2<'a>),
    /// Asks for one more link.
    RequestAddLink(RequestAddLink<'a>),
    /// Ends a link, or all of them.
    DeleteLink(DeleteLink),
    /// Tells the rkeys of a new RMB on all links.
    ConfirmRkey(ConfirmRkey),
    /// Tells more of these rkeys. Peers that have two links, and sometimes a third as Linux has,
    /// never need it.
    ConfirmRkeyContinuation(ConfirmRkeyContinuation),
    /// Deletes RMBs.
    DeleteRkey(DeleteRkeyV2<'a>),
    /// Asks for a sign of life.
    TestLink(TestLink),
}

impl<'a> LlcV2<'a> {
    /// Decodes one received message that is not a CDC message. What is behind it is ignored.
    ///
    /// # Errors
    ///
    /// - [`Malformed::Ignorable`] for an unknown type that its sender allows us to discard.
    /// - [`Malformed::UnknownType`] for any other, those of SMC-Rv1 and CDC included.
    /// - [`Malformed::Length`] if less has arrived than the message says, or less than 44 bytes.
    /// - [`Malformed::RkeyCount`] or [`Malformed::Extension`] if it lists more than it contains.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let received = bytes.first().copied().ok_or(Malformed::Length)?;
        if received & super::UNKNOWN_TYPE_MASK == super::DISCARD {
            return Err(Malformed::Ignorable(received));
        }
        if received & VERSION_MASK != VERSION {
            return Err(Malformed::UnknownType(received));
        }
        let bytes = &bytes[..announced_len(bytes)?];
        match received & !VERSION_MASK {
            elder_kind::CONFIRM_LINK => Ok(Self::ConfirmLink(ConfirmLinkV2::decode(bytes))),
            elder_kind::ADD_LINK => AddLinkV2::decode(bytes).map(Self::AddLink),
            kind::REQUEST_ADD_LINK => RequestAddLink::decode(bytes).map(Self::RequestAddLink),
            elder_kind::DELETE_LINK => {
                Ok(Self::DeleteLink(DeleteLink::decode(&as_version_1(bytes))))
            }
            elder_kind::CONFIRM_RKEY => {
                Ok(Self::ConfirmRkey(ConfirmRkey::decode(&as_version_1(bytes))))
            }
            elder_kind::CONFIRM_RKEY_CONTINUATION => {
                let elder = ConfirmRkeyContinuation::decode(&as_version_1(bytes));
                Ok(Self::ConfirmRkeyContinuation(elder))
            }
            elder_kind::DELETE_RKEY => DeleteRkeyV2::decode(bytes).map(Self::DeleteRkey),
            elder_kind::TEST_LINK => Ok(Self::TestLink(TestLink::decode(&as_version_1(bytes)))),
            _ => Err(Malformed::UnknownType(received)),
        }
    }

    /// Writes the message to the beginning of `into`, and returns what was written: the bytes to
    /// send.
    ///
    /// # Panics
    ///
    /// If `into` is shorter than the message; [`LEN_MAX`] is enough for any. If a field holds more
    /// than its bits, a list more than 255 items, an ADD LINK a reason, or no keys although it is
    /// no rejection. Such values are ours; decoding never makes one.
    pub fn encode<'b>(&self, into: &'b mut [u8]) -> &'b [u8] {
        let elder = match self {
            Self::ConfirmLink(message) => return message.encode(into),
            Self::AddLink(message) => return message.encode(into),
            Self::RequestAddLink(message) => return message.encode(into),
            Self::DeleteRkey(message) => return message.encode(into),
            Self::DeleteLink(message) => message.encode(),
            Self::ConfirmRkey(message) => message.encode(),
            Self::ConfirmRkeyContinuation(message) => message.encode(),
            Self::TestLink(message) => message.encode(),
        };
        Message::like(&elder, elder.len(), into).finish()
    }

    /// Whether this answers a message of ours.
    pub const fn is_reply(&self) -> bool {
        match self {
            Self::ConfirmLink(message) => message.link.reply,
            Self::AddLink(message) => message.link.reply,
            Self::RequestAddLink(message) => message.reply,
            Self::DeleteLink(message) => message.reply,
            Self::ConfirmRkey(message) => message.reply,
            Self::ConfirmRkeyContinuation(message) => message.reply,
            Self::DeleteRkey(DeleteRkeyV2::Request(_)) => false,
            Self::DeleteRkey(DeleteRkeyV2::Reply { .. }) => true,
            Self::TestLink(message) => message.reply,
        }
    }
}

/// Whether received bytes are a message of version 2, as opposed to version 1 or CDC.
pub fn is_v2(bytes: &[u8]) -> bool {
    bytes.first().is_some_and(|received| received & VERSION_MASK == VERSION)
}

/// The length field of the message at the beginning of `bytes`, in whichever byte order it is.
///
/// # Errors
///
/// [`Malformed::Length`] if not all of it has arrived, or if it is below 44 bytes.
pub fn announced_len(bytes: &[u8]) -> Result<usize, Malformed> {
    let &[_, first, second, ..] = bytes else { return Err(Malformed::Length) };
    let readings = [u16::from_le_bytes([first, second]), u16::from_be_bytes([first, second])];
    let fits = |len: &usize| (LEN_MIN..=bytes.len()).contains(len);
    // Usually one reading is just what has arrived, and the other one is far longer.
    let readings = readings.map(usize::from);
    let exact = readings.into_iter().find(|len| *len == bytes.len() && fits(len));
    exact.or_else(|| readings.into_iter().find(fits)).ok_or(Malformed::Length)
}

/// The first bytes of a message as version 1 would have sent them.
///
/// # Panics
///
/// If there are less than 44: the length has been checked.
fn as_version_1(bytes: &[u8]) -> [u8; LEN_MIN] {
    let mut elder = *bytes.first_chunk::<LEN_MIN>().expect("no message is shorter");
    elder[field::TYPE] &= !VERSION_MASK;
    elder[field::LENGTH] = super::LENGTH;
    elder[field::LENGTH + 1] = 0;
    elder
}

/// A message that is being written.
struct Message<'b>(&'b mut [u8]);

impl<'b> Message<'b> {
    /// Begins with the bytes of the version 1 message `elder`, and has `len` bytes.
    fn like(elder: &[u8; LEN_MIN], len: usize, into: &'b mut [u8]) -> Self {
        assert!((LEN_MIN..=LEN_MAX).contains(&len), "{len} bytes");
        let bytes = &mut into[..len];
        bytes.fill(0);
        bytes[..LEN_MIN].copy_from_slice(elder);
        bytes[field::TYPE] |= VERSION;
        let announced = u16::try_from(len).expect("8 KiB fit").to_le_bytes();
        bytes[field::LENGTH..field::FLAGS].copy_from_slice(&announced);
        Self(bytes)
    }

    fn bytes(&mut self) -> &mut [u8] {
        self.0
    }

    fn finish(self) -> &'b [u8] {
        self.0
    }
}

#[cfg(test)]
mod tests;
