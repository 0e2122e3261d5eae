//! What a group shows of itself.

use super::group_link::{GroupLink, end_of, port_of};
use super::rmbs::{Row, Token};
use super::{LinkGroup, LinkView, Phase, Role};
use crate::time::Instant;
use crate::vocabulary::{Gid, LinkNumber, MacAddress, PeerId, Qpn, Rkey};

/// How the RNICs of both hosts are joined (RFC 2.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Symmetry {
    /// One link is up, or none.
    Single,
    /// Each link has RNICs of its own on both hosts.
    Symmetric,
    /// Two links share an RNIC of ours.
    AsymmetricLocal,
    /// Two links share an RNIC of the peer.
    AsymmetricPeer,
}

impl LinkGroup {
    /// Which side we are.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The peer.
    pub fn peer_id(&self) -> PeerId {
        self.setup.peer_id
    }

    /// Whether connections may join.
    pub fn is_established(&self) -> bool {
        self.phase == Phase::Established
    }

    /// Whether the group is over.
    pub fn is_terminated(&self) -> bool {
        self.phase == Phase::Terminated
    }

    /// Whether the first contact has passed the point of no return: if the link fails now, the
    /// first connection is reset and not declined.
    ///
    /// # Specification
    ///
    /// RFC 7609, C.3. We count from sending ADD LINK, and not from its completion, which the caller
    /// does not report.
    pub fn is_committed(&self) -> bool {
        self.committed
    }

    /// Whether the peer would still read a Decline: we have not passed the point of no return, and
    /// a client has not waited for so long that it may have begun to use the link by itself.
    pub fn may_decline(&self, now: Instant) -> bool {
        !self.committed && self.client_goes_on.is_none_or(|at| now < at)
    }

    /// Whether the peer's RMB elements begin with an eye catcher. Known once a link is confirmed.
    pub fn peer_eye_catcher(&self) -> bool {
        self.peer_eye_catcher
    }

    /// How many messages were ignored because no exchange under way expects them.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The most symmetric links that both sides agreed on.
    pub fn max_links(&self) -> u8 {
        self.max_links
    }

    /// The links of the group. A link that is down is among them until the peer knows.
    pub fn links(&self) -> impl Iterator<Item = LinkView> {
        self.group_links().map(GroupLink::view)
    }

    /// Whether a link of this group leads to that queue pair of the peer, or one of the last that
    /// were deleted did. A server may name such a link before it knows that it is gone.
    pub fn has_led_to(&self, end: (Gid, MacAddress, Qpn)) -> bool {
        let links = self.group_links().map(|group_link| end_of(group_link.theirs));
        links.chain(self.past.iter().flatten().copied()).any(|known| known == end)
    }

    /// Whether connections may use this link: it is up, and not to be deleted.
    pub fn is_link_up(&self, number: LinkNumber) -> bool {
        self.find(number).is_some_and(GroupLink::is_of_use)
    }

    /// How the RNICs of both hosts are joined by the links that are up.
    pub fn symmetry(&self) -> Symmetry {
        let up = || self.group_links().filter(|group_link| group_link.link.is_up());
        let shares = |same: fn(&GroupLink, &GroupLink) -> bool| {
            up().any(|one| up().any(|other| one.number != other.number && same(one, other)))
        };
        if up().count() < 2 {
            Symmetry::Single
        } else if shares(|one, other| one.is_from(port_of(other.ours))) {
            Symmetry::AsymmetricLocal
        } else if shares(|one, other| one.is_to(port_of(other.theirs))) {
            Symmetry::AsymmetricPeer
        } else {
            Symmetry::Symmetric
        }
    }

    /// The RToken on link `to` of the peer's RMB that has this rkey and address on link `on`.
    pub fn peer_rmb_at(
        &self,
        on: LinkNumber,
        (rkey, address): (Rkey, u64),
        to: LinkNumber,
    ) -> Option<(Rkey, u64)> {
        let (on, to) = (self.place_of(on)?, self.place_of(to)?);
        let token = self.peer_rmbs.translate(on, Token { rkey, address }, to)?;
        Some((token.rkey, token.address))
    }

    /// Whether it is known what RMBs are called on a link. Of one that has failed it is, until all
    /// actions are taken.
    pub fn knows_rmbs_on(&self, number: LinkNumber) -> bool {
        self.place_of(number).is_some()
    }

    /// The RTokens of all RMBs of the peer that two links can reach: on the first link, and on the
    /// second one. `from` may have failed, until all actions are taken.
    pub fn peer_rmbs(
        &self,
        from: LinkNumber,
        to: LinkNumber,
    ) -> impl Iterator<Item = ((Rkey, u64), (Rkey, u64))> {
        let places = self.place_of(from).zip(self.place_of(to));
        let both = move |row: &Row| {
            let (from, to) = places?;
            let (old, new) = (row.at(from)?, row.at(to)?);
            Some(((old.rkey, old.address), (new.rkey, new.address)))
        };
        self.peer_rmbs.rows.iter().filter_map(both)
    }
}
