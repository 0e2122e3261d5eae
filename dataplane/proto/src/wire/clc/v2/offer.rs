//! CLC Accept and Confirm of version 2: those of version 1, the EID, and extensions.
//!
//! ```text
//!   0                   64    96         104             104 + 36 or 52
//!   | as in version 1 | eid | reserved | first contact | gid list      | eye |
//!
//!   0       1          4           4 + 16 n
//!   | count | reserved | n * gid |                            gid list
//! ```
//! The extension is there on first contact, the list only in the Confirm of one: the ports over
//! which the server may build further links.

use core::ops::Range;

use super::super::{EYECATCHER, EncodedFrame, FLAG, Offer, TRAILER_LEN, accept, kind};
use super::first_contact::{FirstContact, LEN_MAX as FIRST_CONTACT_LEN_MAX};
use super::{Eid, VERSION};
use crate::vocabulary::Gid;
use crate::wire::few::Few;
use crate::wire::{Malformed, array, flag_if, put};

/// Length of the message of a subsequent contact in bytes: the shortest.
pub(in crate::wire::clc) const LEN_MIN: usize = 108;

/// Length of the longest message that we send in bytes.
const LEN_MAX: usize = LEN_MIN + FIRST_CONTACT_LEN_MAX + list_field::GIDS + GIDS_MAX * GID_LEN;

/// The most ports of a client that we keep. If a client names more, the others are ignored.
pub const GIDS_MAX: usize = 8;

/// The RoCEv2 ports of a client, the one of the first link among them.
pub type Gids = Few<Gid, GIDS_MAX>;

mod field {
    use super::{LEN_MIN, Range, TRAILER_LEN};

    pub(super) const EID: Range<usize> = 64..96; // 96..104 is reserved
    pub(super) const EXTENSION: usize = 104;
    const _: () = assert!(EXTENSION + TRAILER_LEN == LEN_MIN);
}

mod list_field {
    pub(super) const COUNT: usize = 0; // 1..4 is reserved
    pub(super) const GIDS: usize = 4;
}

/// Length of a GID in bytes.
const GID_LEN: usize = 16;

const _: () = assert!(LEN_MAX <= super::PROPOSAL_LEN_MAX, "encoded frames have that room");

/// One side's queue pair and RMB element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferV2 {
    /// What version 1 would say.
    pub offer: Offer,
    /// The EID that server and client have in common; the server chose it.
    pub eid: Eid,
    /// There if, and only if, `offer.first_contact`.
    pub first_contact: Option<FirstContact>,
    /// In the Confirm of a first contact: the client's ports. Empty elsewhere.
    pub gids: Gids,
}

impl OfferV2 {
    /// Decodes one framed message. The frame layer has checked that it has [`LEN_MIN`] bytes.
    pub(in crate::wire::clc) fn decode(bytes: &[u8], kind: u8) -> Result<Self, Malformed> {
        let (body, trailer) = bytes.split_at(bytes.len() - TRAILER_LEN);
        if trailer != EYECATCHER {
            return Err(Malformed::Trailer);
        }
        let offer = Offer::decode_fields(body)?;
        let mut message = Self {
            offer,
            eid: Eid(array(body, field::EID)),
            first_contact: None,
            gids: Gids::new(),
        };
        if offer.first_contact {
            let (first_contact, rest) = FirstContact::decode(&body[field::EXTENSION..])?;
            message.first_contact = Some(first_contact);
            if kind == kind::CONFIRM {
                message.gids = decode_gids(rest)?;
            }
        }
        Ok(message)
    }

    /// As Accept or as Confirm.
    ///
    /// # Panics
    ///
    /// If the extension and the flag contradict each other, or there is a list of GIDs where none
    /// belongs.
    pub(in crate::wire::clc) fn encode(&self, kind: u8) -> EncodedFrame {
        let offer = &self.offer;
        assert_eq!(offer.first_contact, self.first_contact.is_some(), "the flag tells of it");
        let gids = self.gids.as_slice();
        let has_list = offer.first_contact && kind == kind::CONFIRM;
        assert!(has_list || gids.is_empty(), "only the Confirm of a first contact has a list");
        let extension_len = self.first_contact.map_or(0, |first_contact| first_contact.len());
        let list_len = if has_list { list_field::GIDS + gids.len() * GID_LEN } else { 0 };
        let len = LEN_MIN + extension_len + list_len;
        let flags = flag_if(offer.first_contact, FLAG);
        let mut frame = EncodedFrame::of_version(VERSION, kind, len, flags);
        let bytes = &mut frame.bytes;
        accept::put_fields(bytes, offer);
        put(bytes, field::EID, &self.eid.0);
        if let Some(first_contact) = &self.first_contact {
            first_contact.encode_into(&mut bytes[field::EXTENSION..]);
        }
        if has_list {
            let list = &mut bytes[field::EXTENSION + extension_len..];
            list[list_field::COUNT] = u8::try_from(gids.len()).expect("there are at most eight");
            let slots = list[list_field::GIDS..].chunks_exact_mut(GID_LEN);
            slots.zip(gids).for_each(|(slot, gid)| slot.copy_from_slice(&gid.0));
        }
        frame
    }
}

fn decode_gids(bytes: &[u8]) -> Result<Gids, Malformed> {
    let (head, tail) = bytes.split_at_checked(list_field::GIDS).ok_or(Malformed::Extension)?;
    let count = usize::from(head[list_field::COUNT]);
    let list = tail.get(..count * GID_LEN).ok_or(Malformed::Extension)?;
    let gids = list.chunks_exact(GID_LEN).map(|bytes| Gid(array(bytes, 0..GID_LEN)));
    Ok(Gids::from_items(gids.take(GIDS_MAX)).expect("no more are taken"))
}
