//! CLC Proposal with a header of version 2: the fields of SMC-Rv1, if that is offered, and the
//! extension.
//!
//! ```text
//!   0     8         16    32    38       40      50       52         80
//!   | hdr | peer id | gid | mac | offset | SMC-D | v2 off | reserved | areas | eye |
//!
//!   0      1          2      3           4      6           8     24
//!   | eids | ism gids | rsvd | release|s | rsvd | SMC-D off | gid | ...          extension
//!
//!   24          25          26         28         40        40 + 32 n
//!   | max conns | max links | features | reserved | n * eid | SMC-D part |
//! ```
//! The areas: that of prefixes if SMC-Rv1 is offered, see [`Proposal`]; and the extension, which
//! begins `v2 off` bytes behind byte 52. What concerns SMC-D is skipped, the
//! system EID (bit `s`) with it.

use core::ops::Range;

use super::super::proposal::{self, Proposal};
use super::super::{EYECATCHER, EncodedFrame, TRAILER_LEN, field as header_field, kind};
use super::{EIDS_MAX, Eid, Eids, VERSION};
use crate::vocabulary::Gid;
use crate::wire::{Malformed, array, put, u16_at};

/// Length of the longest Proposal that we send in bytes.
pub(in crate::wire::clc) const LEN_MAX: usize =
    proposal::LEN_MAX + extension_field::EIDS + EIDS_MAX * EID_LEN;

/// Length of an EID in bytes.
const EID_LEN: usize = 32;

mod field {
    use super::Range;

    pub(super) const EXTENSION_OFFSET: Range<usize> = 50..52;
    /// Where the extension is when the offset is zero. Then there is none.
    pub(super) const OFFSET_BASE: usize = 52;
    /// Where the prefix area is, or the extension if there is no such area.
    pub(super) const AREAS: usize = 80;
}

mod extension_field {
    use super::Range;

    pub(super) const EID_COUNT: usize = 0; // 1 counts ISM devices, 2 is reserved
    pub(super) const RELEASE: usize = 3; // the high half; 4..8 is reserved or of SMC-D
    pub(super) const GID: Range<usize> = 8..24;
    pub(super) const MAX_CONNECTIONS: usize = 24;
    pub(super) const MAX_LINKS: usize = 25;
    pub(super) const FEATURES: Range<usize> = 26..28; // 28..40 is reserved
    pub(super) const EIDS: usize = 40;
}

/// What of version 2 is offered: bits 2 and 3 of the version byte.
const OFFERED: u8 = 0x0c;
const OFFERED_SMC_R: u8 = 0;
const OFFERED_NONE: u8 = 0x08;
const OFFERED_BOTH: u8 = 0x0c;

/// Where the version byte says that nothing of version 1 is offered.
const NO_VERSION_1: u8 = 0x02;

/// What a client tells for SMC-Rv2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProposalExtension {
    /// The newest release of version 2 that the client speaks: four bits.
    pub release: u8,
    /// The client's RoCEv2 port.
    pub gid: Gid,
    /// The most connections in a link group that it can have. Void in release 0, as what follows.
    pub max_connections: u8,
    /// The most links.
    pub max_links: u8,
    /// Features, one bit each.
    pub features: u16,
    /// The client's EIDs, the preferred one first.
    pub eids: Eids,
}

/// The Proposal of a client that knows version 2. It may offer either version, both or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProposalV2 {
    /// The fields of SMC-Rv1. If that is not offered, Linux leaves all of them zero.
    pub v1: Proposal,
    /// The fields of SMC-Rv2, if that is offered.
    pub v2: Option<ProposalExtension>,
}

impl ProposalV2 {
    /// Decodes one framed message. The frame layer has checked its header.
    pub(in crate::wire::clc) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let v1 = Proposal::decode(bytes)?;
        let offered = bytes[header_field::VERSION_AND_FLAGS] & OFFERED;
        let offers_smc_r =
            bytes.starts_with(&EYECATCHER) && (offered == OFFERED_SMC_R || offered == OFFERED_BOTH);
        let body = &bytes[..bytes.len() - TRAILER_LEN];
        // An offset of zero says that there is no extension; so does a message without that field.
        let has_offset = body.len() >= field::OFFSET_BASE;
        let offset = if has_offset { u16_at(body, field::EXTENSION_OFFSET) } else { 0 };
        if !offers_smc_r || offset == 0 {
            return Ok(Self { v1, v2: None });
        }
        let extension = body.get(field::OFFSET_BASE + usize::from(offset)..);
        let v2 = ProposalExtension::decode(extension.ok_or(Malformed::Extension)?)?;
        Ok(Self { v1, v2: Some(v2) })
    }

    /// # Panics
    ///
    /// If neither version is offered, or version 1 is not and has prefixes all the same.
    pub(in crate::wire::clc) fn encode(&self) -> EncodedFrame {
        let has_v1 = self.v1.offers_smc_r_v1;
        assert!(has_v1 || self.v2.is_some(), "a Proposal offers SMC-R");
        assert!(has_v1 || self.v1.ipv6_prefixes().is_empty(), "prefixes are of version 1");
        let area_len = if has_v1 { self.v1.prefix_area_len() } else { 0 };
        let extension_len = self.v2.map_or(0, |extension| extension.len());
        let len = field::AREAS + area_len + extension_len + TRAILER_LEN;
        let offered_v1 = if has_v1 { 0 } else { NO_VERSION_1 };
        let offered_v2 = if self.v2.is_some() { OFFERED_SMC_R } else { OFFERED_NONE };
        let flags = offered_v2 | offered_v1;
        let mut frame = EncodedFrame::of_version(VERSION, kind::PROPOSAL, len, flags);
        proposal::put_identity(&mut frame.bytes, &self.v1);
        if has_v1 {
            proposal::put_prefix_area(&mut frame.bytes, &self.v1);
        }
        if let Some(extension) = &self.v2 {
            let at = field::AREAS + area_len;
            let offset = u16::try_from(at - field::OFFSET_BASE).expect("a few prefixes");
            put(&mut frame.bytes, field::EXTENSION_OFFSET, &offset.to_be_bytes());
            extension.encode_into(&mut frame.bytes[at..]);
        }
        frame
    }
}

impl ProposalExtension {
    fn len(&self) -> usize {
        extension_field::EIDS + self.eids.as_slice().len() * EID_LEN
    }

    /// Decodes the extension at the beginning of `bytes`. What follows is of SMC-D.
    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let (head, tail) =
            bytes.split_at_checked(extension_field::EIDS).ok_or(Malformed::Extension)?;
        let count = usize::from(head[extension_field::EID_COUNT]);
        let list = tail.get(..count * EID_LEN).ok_or(Malformed::Extension)?;
        let eids = list.chunks_exact(EID_LEN).map(|bytes| Eid(array(bytes, 0..EID_LEN)));
        Ok(Self {
            release: head[extension_field::RELEASE] >> 4,
            gid: Gid(array(head, extension_field::GID)),
            max_connections: head[extension_field::MAX_CONNECTIONS],
            max_links: head[extension_field::MAX_LINKS],
            features: u16_at(head, extension_field::FEATURES),
            eids: Eids::from_items(eids).ok_or(Malformed::Extension)?,
        })
    }

    fn encode_into(&self, bytes: &mut [u8]) {
        assert!(self.release <= 0x0f, "a release has four bits");
        let eids = self.eids.as_slice();
        bytes[extension_field::EID_COUNT] = u8::try_from(eids.len()).expect("at most eight");
        bytes[extension_field::RELEASE] = self.release << 4;
        put(bytes, extension_field::GID, &self.gid.0);
        bytes[extension_field::MAX_CONNECTIONS] = self.max_connections;
        bytes[extension_field::MAX_LINKS] = self.max_links;
        put(bytes, extension_field::FEATURES, &self.features.to_be_bytes());
        let slots = bytes[extension_field::EIDS..].chunks_exact_mut(EID_LEN);
        slots.zip(eids).for_each(|(slot, eid)| slot.copy_from_slice(&eid.0));
    }
}
