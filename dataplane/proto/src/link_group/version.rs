//! The messages of a link group in SMC-Rv1 and in SMC-Rv2.
//!
//! The machine works with the messages of version 1, and this module translates. In version 2
//!
//! - ADD LINK and its reply carry the rkeys, so that no ADD LINK CONTINUATION follows;
//! - a client that has another port sends REQUEST ADD LINK;
//! - DELETE RKEY lists up to 255 rkeys, and its reply counts those that were unknown.
//!
//! There is no RFC of version 2: we do what Linux does.

use super::confirm::LINKS_MAX_MIN;
use super::dispatch::ARRIVED;
use super::exchange::Exchange;
use super::{Action, LinkGroup, Role};
use crate::error::PeerMisbehaved;
use crate::limits::RMBS_PER_GROUP_MAX;
use crate::time::Instant;
use crate::vocabulary::{LinkNumber, Rkey};
use crate::wire::Malformed;
use crate::wire::llc::add_link::RkeyPair;
use crate::wire::llc::rkeys::RKEYS_MAX;
use crate::wire::llc::v2::{
    AddLinkExtension, AddLinkV2, ConfirmLinkV2, DeleteRkeyV2, LEN_MAX, LlcV2, Records,
    RequestAddLink,
};
use crate::wire::llc::{AddLink, DeleteLink, DeleteRkey, LEN, Llc};

/// What the peers of a group speak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// RFC 7609.
    #[default]
    V1,
    /// SMC-Rv2.
    V2 {
        /// The most connections in the group, as agreed; zero in release 0.
        max_connections: u8,
        /// Whether no router is between the ports.
        direct: bool,
    },
}

impl Version {
    /// The least that `max_links` may say. RFC 7609, 2.2.2, wants two.
    pub(super) const fn links_min(self) -> u8 {
        match self {
            Self::V1 => LINKS_MAX_MIN,
            Self::V2 { .. } => 1,
        }
    }
}

/// A message that came, of either version.
#[derive(Debug)]
pub(super) enum Received<'a> {
    V1(Llc),
    V2(LlcV2<'a>),
}

impl<'a> Received<'a> {
    /// Decodes a message in the version of the group. A message of the other version is an error.
    pub(super) fn decode(version: Version, bytes: &'a [u8]) -> Result<Self, Malformed> {
        match version {
            Version::V1 => {
                let bytes = bytes.first_chunk::<LEN>().ok_or(Malformed::Length)?;
                Llc::decode(bytes).map(Self::V1)
            }
            Version::V2 { .. } => LlcV2::decode(bytes).map(Self::V2),
        }
    }

    /// DELETE LINK for all links.
    pub(super) const fn ends_group(&self) -> bool {
        match self {
            Self::V1(Llc::DeleteLink(delete)) | Self::V2(LlcV2::DeleteLink(delete)) => {
                matches!(delete, DeleteLink { all: true, reply: false, .. })
            }
            Self::V1(_) | Self::V2(_) => false,
        }
    }
}

impl LinkGroup {
    /// What the peers speak.
    pub fn version(&self) -> Version {
        self.setup.version
    }

    pub(super) fn is_v2(&self) -> bool {
        self.setup.version != Version::V1
    }

    /// The bytes of a message that [`Action::Send`] demands on the link `on`: 44, or in version 2
    /// up to [`LEN_MAX`]. Call it as soon as the action was taken, because ADD LINK lists the RMBs
    /// that there are now.
    pub fn encode<'b>(
        &self,
        on: LinkNumber,
        message: &Llc,
        into: &'b mut [u8; LEN_MAX],
    ) -> &'b [u8] {
        let Version::V2 { max_connections, direct } = self.setup.version else {
            into[..LEN].copy_from_slice(&message.encode());
            return &into[..LEN];
        };
        match message {
            Llc::ConfirmLink(link) => {
                let link = ConfirmLinkV2 { link: *link, max_connections };
                LlcV2::ConfirmLink(link).encode(into)
            }
            Llc::AddLink(link) if self.role == Role::Client && !link.reply => {
                let gids = Records::ours(core::slice::from_ref(&link.gid));
                LlcV2::RequestAddLink(RequestAddLink { reply: false, gids }).encode(into)
            }
            Llc::AddLink(link) => self.encode_add_link(on, link, direct, into),
            Llc::AddLinkContinuation(_) => unreachable!("rkeys travel in ADD LINK"),
            Llc::DeleteLink(message) => LlcV2::DeleteLink(*message).encode(into),
            Llc::ConfirmRkey(message) => LlcV2::ConfirmRkey(*message).encode(into),
            Llc::ConfirmRkeyContinuation(message) => {
                LlcV2::ConfirmRkeyContinuation(*message).encode(into)
            }
            Llc::DeleteRkey(message) => {
                let DeleteRkey { reply, negative, count, error_mask: invalid, rkeys } = message;
                let message = match reply {
                    true => DeleteRkeyV2::Reply {
                        negative: *negative,
                        count: *count,
                        invalid: *invalid,
                    },
                    false => DeleteRkeyV2::Request(Records::ours(&rkeys[..usize::from(*count)])),
                };
                LlcV2::DeleteRkey(message).encode(into)
            }
            Llc::TestLink(message) => LlcV2::TestLink(*message).encode(into),
        }
    }

    /// ADD LINK with all our RMBs that the peer is to know on the new link.
    fn encode_add_link<'b>(
        &self,
        on: LinkNumber,
        link: &AddLink,
        direct: bool,
        into: &'b mut [u8; LEN_MAX],
    ) -> &'b [u8] {
        let link = AddLink { reason: 0, ..*link };
        let mut pairs = [RkeyPair::default(); RMBS_PER_GROUP_MAX as usize];
        let mut count = 0;
        if let (Some(on), Some(new)) = (self.slot(on), self.slot(link.link)) {
            let mut told = self.our_rmbs.told_on(new);
            while let Some(rmb) = told.first() {
                told.remove(rmb);
                if let Some(pair) = self.our_rmbs.pair(rmb, on, new) {
                    pairs[count] = pair;
                    count += 1;
                }
            }
        }
        let rkeys = Records::ours(&pairs[..count]);
        let extension = AddLinkExtension { direct, target: link.gid, rkeys };
        let extension = Some(extension).filter(|_| !link.rejected);
        LlcV2::AddLink(AddLinkV2 { link, extension }).encode(into)
    }

    /// Notes that the ADD LINK which goes out now tells the peer our rkeys on the new link.
    pub(super) fn tell_all(&mut self, on: LinkNumber, number: LinkNumber) {
        // A server without a queue pair offers a link that does not exist.
        let (Some(on), Some(new)) = (self.slot(on), self.slot(number)) else { return };
        let mut left = self.rmbs_to_tell(on);
        while let Some(rmb) = left.first() {
            left.remove(rmb);
            if self.our_rmbs.pair(rmb, on, new).is_some() {
                self.our_rmbs.note_told(rmb, new);
            }
        }
    }

    pub(super) fn dispatch_any(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &Received<'_>,
    ) -> Result<(), PeerMisbehaved> {
        let message = match message {
            Received::V1(message) => return self.dispatch(now, on, message),
            Received::V2(message) => message,
        };
        match message {
            LlcV2::ConfirmLink(message) => self.dispatch(now, on, &Llc::ConfirmLink(message.link)),
            LlcV2::AddLink(message) => self.handle_add_link_v2(now, on, message),
            LlcV2::RequestAddLink(RequestAddLink { reply, .. }) => {
                // A server that refuses may reply or say nothing: its client does nothing either
                // way.
                match (self.role, reply) {
                    (Role::Server, false) => self.client_has_port(now),
                    (Role::Server, true) | (Role::Client, _) => self.dropped += 1,
                }
                Ok(())
            }
            LlcV2::DeleteLink(message) => self.dispatch(now, on, &Llc::DeleteLink(*message)),
            LlcV2::ConfirmRkey(message) => self.dispatch(now, on, &Llc::ConfirmRkey(*message)),
            LlcV2::ConfirmRkeyContinuation(message) => {
                self.dispatch(now, on, &Llc::ConfirmRkeyContinuation(*message))
            }
            LlcV2::DeleteRkey(message) => {
                self.handle_delete_rkey_v2(now, on, message);
                Ok(())
            }
            LlcV2::TestLink(message) => self.dispatch(now, on, &Llc::TestLink(*message)),
        }
    }

    /// Handles ADD LINK as in version 1, and learns its rkeys if the link is accepted.
    fn handle_add_link_v2(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &AddLinkV2<'_>,
    ) -> Result<(), PeerMisbehaved> {
        let number = message.link.link;
        self.handle_add_link(now, on, &message.link)?;
        // A rejection carries no rkeys.
        let Some(extension) = &message.extension else { return Ok(()) };
        let place = match (self.role, message.link.reply, self.exchange) {
            (Role::Client, false, Some(Exchange::Opening { number: taken, .. }))
                if taken == number =>
            {
                self.reserve_place()
            }
            (Role::Server, true, Some(Exchange::Connecting { number: taken, .. }))
                if taken == number =>
            {
                self.slot(number)
            }
            (Role::Client | Role::Server, _, _) => None,
        };
        if let (Some(on), Some(new)) = (self.slot(on), place) {
            for pair in extension.rkeys.iter() {
                self.learn_pair_at(on, new, &pair);
            }
        }
        Ok(())
    }

    /// Client: a place for the link that is offered.
    fn reserve_place(&mut self) -> Option<usize> {
        self.unreserve();
        self.reserved = self.free_place();
        self.reserved
    }

    /// The place for a link whose queue pair has just been opened.
    pub(super) fn take_place(&mut self) -> Option<usize> {
        self.reserved.take().or_else(|| self.free_place())
    }

    /// Client: the link that was offered will not be.
    pub(super) fn unreserve(&mut self) {
        if let Some(place) = self.reserved.take() {
            self.peer_rmbs.clear(place);
        }
    }

    /// Handles DELETE RKEY as in version 1, for more rkeys.
    fn handle_delete_rkey_v2(&mut self, now: Instant, on: LinkNumber, message: &DeleteRkeyV2<'_>) {
        let keys = match message {
            DeleteRkeyV2::Request(keys) => *keys,
            DeleteRkeyV2::Reply { negative, count, invalid } => {
                let (negative, count, error_mask) = (*negative, *count, *invalid);
                let rkeys = [Rkey(0); RKEYS_MAX];
                let reply = DeleteRkey { reply: true, negative, count, error_mask, rkeys };
                self.handle_delete_rkey(now, on, &reply);
                return;
            }
        };
        let slot = self.slot(on).expect(ARRIVED);
        let known = keys.iter().filter(|rkey| self.peer_rmbs.forget(slot, *rkey)).count();
        if known > 0 {
            self.actions.push(Action::RkeysDeleted(on));
        }
        let byte = |count: usize| u8::try_from(count).expect("a message lists at most 255");
        let (count, unknown) = (byte(keys.len()), byte(keys.len() - known));
        let reply = DeleteRkey {
            reply: true,
            negative: unknown > 0,
            count,
            error_mask: unknown,
            rkeys: [Rkey(0); RKEYS_MAX],
        };
        self.send(on, Llc::DeleteRkey(reply));
    }
}
