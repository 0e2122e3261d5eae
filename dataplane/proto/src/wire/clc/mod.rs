//! CLC: the rendezvous over the TCP stream, before application data (RFC 3.2, A.2).
//!
//! ```text
//!   0            4      5        7               8         length - 4   length
//!   | eye catcher | type | length | version|flags | message | eye catcher |
//! ```
//! Messages are not a layer of their own: they stand in the byte stream of the TCP connection, and
//! behind the last one the application's bytes follow. [`Framer`] cuts messages out of the stream
//! and gives back what is not one.

use core::ops::Range;

use crate::wire::{Malformed, put, u16_at};

pub mod accept;
mod crossing;
pub mod decline;
mod framer;
pub mod proposal;
pub mod v2;

pub use accept::Offer;
pub use crossing::Crossing;
pub use decline::{Decline, Diagnosis};
pub use framer::{FRAME_MAX, Framer};
pub use proposal::{Ipv4Subnet, Ipv6Prefix, Proposal};
pub use v2::{DeclineV2, OfferV2, ProposalV2};

/// "SMCR" in EBCDIC: begins and ends every CLC message, and is the value of the TCP option.
// RFC 7609 A.2 #3: eye catchers around CLC messages
pub const EYECATCHER: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xd9];

/// "SMCD": may begin and end the Proposal of a client that offers only SMC-D, so that it can be
/// declined.
const EYECATCHER_SMC_D: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xc4];

/// The version of SMC-R that RFC 7609 defines.
// RFC 7609 A.2.2 #3: Proposal carries version 1
pub const VERSION: u8 = 1;

/// Length of the header in bytes.
pub const HEADER_LEN: usize = 8;

/// Length of the eye catcher in bytes.
const TRAILER_LEN: usize = EYECATCHER.len();

/// The longest message we send: a Proposal of version 2 with all its prefixes and EIDs.
const ENCODED_MAX: usize = v2::PROPOSAL_LEN_MAX;

mod field {
    use super::{HEADER_LEN, Range};

    pub(super) const EYECATCHER: Range<usize> = 0..4;
    pub(super) const TYPE: usize = 4;
    pub(super) const LENGTH: Range<usize> = 5..7;
    pub(super) const VERSION_AND_FLAGS: usize = 7;
    const _: () = assert!(VERSION_AND_FLAGS + 1 == HEADER_LEN);
}

mod kind {
    // RFC 7609 A.2.2 #1: Proposal has type 1
    pub(super) const PROPOSAL: u8 = 1;
    // RFC 7609 A.2.3 #1: Accept: type 2, 68 bytes
    pub(super) const ACCEPT: u8 = 2;
    // RFC 7609 A.2.4 #1: Confirm: type 3, as Accept
    pub(super) const CONFIRM: u8 = 3;
    // RFC 7609 A.2.5 #1: Decline: type 4, 28 bytes
    pub(super) const DECLINE: u8 = 4;
}

/// The one flag bit that two messages share: first contact (F) in Accept and Confirm, out of sync
/// (S) in Decline.
const FLAG: u8 = 0x08;

/// One CLC message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The client says who it is.
    Proposal(Proposal),
    /// The server offers a queue pair and an RMB element.
    Accept(Offer),
    /// The client answers with its own.
    Confirm(Offer),
    /// Either says no.
    Decline(Decline),
    /// A client that knows of version 2 says who it is, and what it offers of either version.
    ProposalV2(ProposalV2),
    /// A server chooses version 2.
    AcceptV2(OfferV2),
    /// The client answers.
    ConfirmV2(OfferV2),
    /// Either says no, to a peer that knows of version 2.
    DeclineV2(DeclineV2),
}

impl Frame {
    /// Decodes one message that [`Framer`] has cut out: exactly as long as its header says.
    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let header = Header::decode(bytes)?;
        assert_eq!(bytes.len(), header.length, "the framer cuts by this length");
        let is_v1 = version(bytes) == VERSION;
        match header.kind {
            Kind::Proposal if is_v1 => Proposal::decode(bytes).map(Self::Proposal),
            Kind::Proposal => ProposalV2::decode(bytes).map(Self::ProposalV2),
            Kind::Accept if is_v1 => Offer::decode(&exact(bytes)?).map(Self::Accept),
            Kind::Accept => OfferV2::decode(bytes, kind::ACCEPT).map(Self::AcceptV2),
            Kind::Confirm if is_v1 => Offer::decode(&exact(bytes)?).map(Self::Confirm),
            Kind::Confirm => OfferV2::decode(bytes, kind::CONFIRM).map(Self::ConfirmV2),
            // The length tells, whatever the header says: every version has used either.
            Kind::Decline if bytes.len() == decline::LEN => {
                Decline::decode(bytes).map(Self::Decline)
            }
            Kind::Decline => DeclineV2::decode(bytes).map(Self::DeclineV2),
        }
    }

    /// The message as it travels.
    ///
    /// # Panics
    ///
    /// If a field holds what no field can: QPN or PSN over 24 bits, an MTU over four, an element
    /// index of zero, a ninth prefix, a Proposal that does not offer SMC-R, an extension where none
    /// belongs. Such values are ours.
    pub fn encode(&self) -> EncodedFrame {
        match self {
            Self::Proposal(proposal) => proposal.encode(),
            Self::Accept(offer) => offer.encode(kind::ACCEPT),
            Self::Confirm(offer) => offer.encode(kind::CONFIRM),
            Self::Decline(decline) => decline.encode(),
            Self::ProposalV2(proposal) => proposal.encode(),
            Self::AcceptV2(offer) => offer.encode(kind::ACCEPT),
            Self::ConfirmV2(offer) => offer.encode(kind::CONFIRM),
            Self::DeclineV2(decline) => decline.encode(),
        }
    }
}

fn exact(bytes: &[u8]) -> Result<[u8; accept::LEN], Malformed> {
    bytes.try_into().map_err(|_| Malformed::Length)
}

#[derive(Clone, Copy)]
enum Kind {
    Proposal,
    Accept,
    Confirm,
    Decline,
}

/// What the first eight bytes say, once they make sense together.
struct Header {
    kind: Kind,
    length: usize,
}

impl Header {
    /// Decodes the first eight of `bytes`.
    ///
    /// The version comes before the length: a message of another version is longer, and the caller
    /// must hear of the version.
    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        // RFC 7609 A.2 #4: check both CLC eye catchers
        // RFC 7609 C.6 #3: malformed CLC is a protocol error
        let smc_r = bytes[field::EYECATCHER] == EYECATCHER;
        let smc_d = bytes[field::EYECATCHER] == EYECATCHER_SMC_D;
        let kind = match bytes[field::TYPE] {
            _ if !smc_r && !smc_d => return Err(Malformed::Eyecatcher),
            kind::PROPOSAL => Kind::Proposal,
            _ if !smc_r => return Err(Malformed::Eyecatcher),
            kind::ACCEPT => Kind::Accept,
            kind::CONFIRM => Kind::Confirm,
            kind::DECLINE => Kind::Decline,
            unknown => return Err(Malformed::UnknownType(unknown)),
        };
        // RFC 7609 A.2 #5: use the lower version
        // Whoever proposes, or declines, does so before versions are agreed: newer ones pass.
        let version = version(bytes);
        let version_fits = match kind {
            Kind::Proposal | Kind::Decline => version >= VERSION,
            Kind::Accept | Kind::Confirm => version == VERSION || version == v2::VERSION,
        };
        if !version_fits {
            return Err(Malformed::Version(version));
        }
        let length = usize::from(u16_at(bytes, field::LENGTH));
        let length_fits = match kind {
            Kind::Proposal => (proposal::LEN..=FRAME_MAX).contains(&length),
            Kind::Accept | Kind::Confirm if version == VERSION => length == accept::LEN,
            Kind::Accept | Kind::Confirm => (v2::OFFER_LEN_MIN..=FRAME_MAX).contains(&length),
            Kind::Decline => length == decline::LEN || length == v2::DECLINE_LEN,
        };
        if !length_fits {
            return Err(Malformed::Length);
        }
        Ok(Self { kind, length })
    }
}

/// The version of a message: the high half of the byte.
fn version(bytes: &[u8]) -> u8 {
    bytes[field::VERSION_AND_FLAGS] >> 4
}

/// A message ready for the TCP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedFrame {
    bytes: [u8; ENCODED_MAX],
    len: usize,
}

impl EncodedFrame {
    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// A message of `len` bytes with header and trailer, and zeros between them.
    ///
    /// # Panics
    ///
    /// If it is too long: no message of ours is.
    #[expect(clippy::cast_possible_truncation, reason = "asserted to be below ENCODED_MAX")]
    fn of_version(version: u8, kind: u8, len: usize, flags: u8) -> Self {
        assert!((HEADER_LEN + TRAILER_LEN..=ENCODED_MAX).contains(&len), "{len} bytes");
        // RFC 7609 A.2 #1: send reserved CLC fields as zero
        let mut bytes = [0; ENCODED_MAX];
        put(&mut bytes, field::EYECATCHER, &EYECATCHER);
        bytes[field::TYPE] = kind;
        put(&mut bytes, field::LENGTH, &(len as u16).to_be_bytes());
        bytes[field::VERSION_AND_FLAGS] = (version << 4) | flags;
        put(&mut bytes, len - TRAILER_LEN..len, &EYECATCHER);
        Self { bytes, len }
    }
}

const _: () = assert!(ENCODED_MAX <= FRAME_MAX && FRAME_MAX <= u16::MAX as usize);

#[cfg(test)]
mod tests;
