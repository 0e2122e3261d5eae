//! What a peer offers to a connection: on which link, in which RMB, and whether it is free.

use smcr_engine::handoff::KeyChange;
use smcr_engine::{ConnectionId, LinkId};
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::Offer;
use smcr_proto::{Instant, LinkNumber, Rkey};
use smcr_rnic::Rnic;

use super::Groups;
use super::group::{Group, LinkState, Member};
use super::group_mut::GroupMut;
use super::ports::{Pollers, QpOf};

/// What became of a peer's offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The connection writes that element.
    Noted,
    /// Another connection still has it. It has probably ended for the peer, and is about to end
    /// here: try again after [`ElementsChanged`](super::Event::ElementsChanged), or
    /// [insist](super::Groups::insist_on_offer).
    Awaited,
}

/// What is wrong with a peer's offer in a later contact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadOffer {
    /// It names no active link of the group.
    NoSuchLink,
    /// The peer has more RMBs than can be remembered.
    TooManyRmbs,
    /// It names an RMB that the peer did not make known on the link that we write on.
    UnknownRmb,
    /// Its element is larger than any that we write to.
    TooLarge,
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// Takes in what the peer offered to a connection: the element that we will write.
    ///
    /// A peer gives an element to the next connection when both sides have closed the one before.
    /// It may know that sooner than we do: its offer comes by TCP, and what we lack is an
    /// acknowledgement, or the word of our poller.
    ///
    /// # Errors
    ///
    /// [`BadOffer`]: the rendezvous failed, and the caller says [`leave`](Self::leave).
    pub fn accept_offer(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        offer: &Offer,
    ) -> Result<Taken, BadOffer> {
        let id = self.members[usize::from(connection.slot)].ok_or(BadOffer::NoSuchLink)?;
        let taken = self.input(now, id, |group| group.accept_offer(connection, offer));
        taken.expect("a group outlives its connections")
    }

    /// The same for an offer that has waited long enough: a connection that still has the element
    /// is aborted, because the peer has forgotten it.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn insist_on_offer(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        offer: &Offer,
    ) -> Result<(), BadOffer> {
        let id = self.members[usize::from(connection.slot)].ok_or(BadOffer::NoSuchLink)?;
        let taken = self.input(now, id, |group| group.insist_on_offer(connection, offer));
        taken.expect("a group outlives its connections")
    }
}

impl<N: Rnic, P: Pollers<QpOf<N>>> GroupMut<'_, N, P> {
    fn accept_offer(&mut self, connection: ConnectionId, offer: &Offer) -> Result<Taken, BadOffer> {
        let (offer, holder) = self.weigh_offer(connection, offer)?;
        if let Some(holder) = holder {
            self.member_mut(holder).awaited = true;
            self.shared.counts.offers_held += 1;
            return Ok(Taken::Awaited);
        }
        self.note_offer(connection, offer);
        Ok(Taken::Noted)
    }

    fn insist_on_offer(&mut self, connection: ConnectionId, offer: &Offer) -> Result<(), BadOffer> {
        let (offer, holder) = self.weigh_offer(connection, offer)?;
        self.note_offer(connection, offer);
        if let Some(holder) = holder {
            let group = self.group.id.0;
            tracing::warn!(group, slot = holder.slot, "reset: the peer offers its element again");
            self.shared.counts.conflicts += 1;
            // RFC 7609 4.4.2 #3: abort user of an offered element
            // RFC 7609 4.4.2 #6: new connection goes on after conflict
            self.abort(holder);
        }
        Ok(())
    }

    fn note_offer(&mut self, connection: ConnectionId, (offer, named_on): (Offer, LinkId)) {
        let member = self.member_mut(connection);
        (member.peer, member.named_on) = (Some(offer), named_on);
    }

    /// The offer as the connection is to know it, with the link on which its RMB is named, and who
    /// has the element now.
    fn weigh_offer(
        &mut self,
        connection: ConnectionId,
        offer: &Offer,
    ) -> Result<((Offer, LinkId), Option<ConnectionId>), BadOffer> {
        let group = &mut *self.group;
        if offer.rmbe_size.bytes() > ELEMENT_BYTES_MAX {
            return Err(BadOffer::TooLarge);
        }
        // A link that connections are leaving is active still, and so is one that only the peer has
        // seen confirmed: what tells the other side may be on its way by RDMA, and who is refused
        // here loses the connection.
        // RFC 7609 3.5.2.3 #2: check that Confirm names active link
        // RFC 7609 3.5.2.3 #3: client may choose another link
        let on = group.named_by(offer).ok_or(BadOffer::NoSuchLink)?;
        if let Some(number) = group.link(on).map(|link| link.number)
            && let Some(machine) = group.machine_mut()
        {
            let learned = machine.learn_rkey(number, offer.rkey, offer.rmb_address);
            learned.map_err(|_| BadOffer::TooManyRmbs)?;
        }
        // The link that the connection was to send on may have been left since. Others are on other
        // links, and all of them can be compared where those of that link have gone.
        let own = group.members[&connection].link;
        let here = group.left.way_from(own).unwrap_or(own);
        let seen = group.seen_from(offer, on, here).ok_or(BadOffer::UnknownRmb)?;
        // RFC 7609 3.5.2.2 #4: check that server's element is free
        // RFC 7609 3.5.2.3 #1: check that client's element is free
        let holder = group.holder_of(&seen, here).filter(|old| *old != connection);
        // It keeps its link all the same: the poller of that link has what the peer has said to the
        // connection already, and sends it after those that have left.
        let named = group.named_for(own, &seen, here).ok_or(BadOffer::UnknownRmb)?;
        Ok((named, holder))
    }
}

impl<O> Group<O> {
    /// The link that an offer names. For a server it may be one that is being given up, or gone, if
    /// its connections have gone to one that works: the client was committed to SMC-R before it
    /// could know. A client declines instead, and the connection stays TCP.
    // RFC 7609 C.1 #7: existing group: later failure breaks TCP
    fn named_by(&self, offer: &Offer) -> Option<LinkId> {
        // The youngest, because a peer may use the number of a queue pair again.
        let mut active = self.links.iter().rev();
        let active =
            active.find(|link| !matches!(link.state, LinkState::Retiring) && link.leads_to(offer));
        let left = || {
            let left = self.left.named_by(offer).filter(|_| self.role == Role::Server)?;
            self.link(left.to).filter(|to| self.is_usable(to)).map(|_| left.link)
        };
        active.map(|link| link.id).or_else(left)
    }

    /// The name by which a connection on the link `own` knows an RMB that is `seen` on `here`,
    /// where those that left `own` have gone; and the link on which the RMB has that name. None if
    /// a poller that follows the name from `own` would come to another RMB.
    fn named_for(&self, own: LinkId, seen: &Offer, here: LinkId) -> Option<(Offer, LinkId)> {
        if own == here {
            return Some((*seen, own));
        }
        let (offer, on) = match self.seen_from(seen, here, own) {
            Some(offer) => (offer, own),
            // The peer announced the RMB when connections had left that link.
            None if self.seen_from(seen, own, here).is_none() => (*seen, here),
            None => return None,
        };
        let misled = |member: &Member| {
            let peer = member.peer.filter(|peer| name(peer) == name(&offer));
            let peer = peer.filter(|_| member.link == own && member.named_on != on);
            let there = peer.and_then(|peer| self.seen_from(&peer, member.named_on, here));
            peer.is_some() && there.is_none_or(|there| name(&there) != name(seen))
        };
        (!self.members.values().any(misled)).then_some((offer, on))
    }

    /// What pollers must be told of connections on the link `from` whose RMBs are named as on
    /// another link: that they keep this name on their way to it, and what they are called on `to`.
    pub(super) fn kept_names(&self, from: LinkId, to: LinkId) -> Vec<KeyChange> {
        let kept = |member: &Member| {
            let peer = member.peer.filter(|_| member.link == from && member.named_on != from)?;
            let there = self.seen_from(&peer, member.named_on, to)?;
            let ((old, old_base), (new, new_base)) = (name(&peer), name(&there));
            Some(KeyChange { old, old_base, new, new_base })
        };
        let mut names = Vec::new();
        for name in self.members.values().filter_map(kept) {
            // All elements of an RMB share its name.
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// Whether the peer has an RMB for what this connection writes, as far as we know.
    pub(super) fn has_rmb_of(&self, member: &Member) -> bool {
        let found = || {
            let here = match self.known_as(member.named_on) {
                Some(_) => member.named_on,
                // Both sides have deleted the link, and the poller has not left it yet.
                None => self.left.way_from(member.named_on)?,
            };
            let number = self.known_as(here)?;
            let seen = self.seen_from(member.peer.as_ref()?, member.named_on, here)?;
            Some(self.machine()?.peer_rmb_at(number, name(&seen), number).is_some())
        };
        // A link that led nowhere resets its connections without our help.
        found().unwrap_or(true)
    }

    /// Translates an offer that names its RMB as it is called on the link `on`: the result names it
    /// as on `from`. What RMBs were called on a link that is gone is known from those who left it.
    fn seen_from(&self, offer: &Offer, on: LinkId, from: LinkId) -> Option<Offer> {
        if on == from {
            return Some(*offer);
        }
        let Some(number) = self.known_as(on) else {
            let (to, offer) = self.left.forth(offer, on)?;
            return self.seen_from(&offer, to, from);
        };
        let Some(other) = self.known_as(from) else {
            let to = self.left.way_from(from)?;
            return self.left.back(&self.seen_from(offer, on, to)?, from);
        };
        let (rkey, rmb_address) = self.machine()?.peer_rmb_at(number, name(offer), other)?;
        Some(Offer { rkey, rmb_address, ..*offer })
    }

    /// What the machine calls a link, if it knows what RMBs are called there.
    fn known_as(&self, link: LinkId) -> Option<LinkNumber> {
        let number = self.link(link)?.number;
        self.machine()?.knows_rmbs_on(number).then_some(number)
    }

    /// The connection that writes the element of this offer, which names its RMB as on `on`.
    fn holder_of(&self, offer: &Offer, on: LinkId) -> Option<ConnectionId> {
        let holds = |member: &Member| {
            let Some(peer) = member.peer.filter(|peer| peer.rmbe_index == offer.rmbe_index) else {
                return false;
            };
            // Two RMBs may have one key: they are told apart by their addresses.
            let same = |peer: Offer| name(&peer) == name(offer);
            self.seen_from(&peer, member.named_on, on).is_some_and(same)
        };
        self.members.iter().find(|(_, member)| holds(member)).map(|(id, _)| *id)
    }
}

/// The name of the RMB of an offer.
fn name(offer: &Offer) -> (Rkey, u64) {
    (offer.rkey, offer.rmb_address)
}

/// The largest element of a peer that we write to. The RFC knows 512 KiB, and what a peer says to
/// have costs it nothing; how much may be on its way to it follows from that.
const ELEMENT_BYTES_MAX: u32 = 64 << 20;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use smcr_proto::{AlertToken, Gid, MacAddress, Mtu, PeerId, Psn, Qpn, RmbeSize};
    use smcr_rnic::{Domain, QpAddress};

    use super::super::group::{GroupId, Link, Peer};
    use super::super::ports::PortId;
    use super::super::stock::Stock;
    use super::*;

    /// A peer gives the number of a queue pair to the next one, while our poller still has the link
    /// to the first. What it offers is meant for the second: its Confirm was refused, and the
    /// connection reset.
    // RFC 7609 2 #1: identify a link by both ends
    #[test]
    fn an_offer_names_the_youngest_link_to_its_queue_pair() {
        let (gid, mac) = (Gid::default(), MacAddress::default());
        let end = |qpn| QpAddress { gid, mac, qpn: Qpn(qpn), psn: Psn(0), mtu: Mtu::B1024 };
        let link = |id, state| {
            let mut link = Link::new(Instant(1), LinkId(id), LinkNumber(1), PortId(0), end(id), ());
            (link.theirs, link.state) = (Some(end(77)), state);
            link
        };
        let offer = Offer {
            first_contact: false,
            peer_id: PeerId::default(),
            gid,
            mac,
            qpn: Qpn(77),
            rkey: Rkey(1),
            rmbe_index: 1,
            alert_token: AlertToken(1),
            rmbe_size: RmbeSize::KIB_64,
            mtu: Mtu::B1024,
            rmb_address: 0,
            psn: Psn(0),
        };
        let source = Ipv4Addr::LOCALHOST.into();
        let peer = Peer { id: PeerId::default(), gid, mac, v2: false, source };
        for old in [LinkState::Retiring, LinkState::Vacated] {
            let old = link(1, old);
            let mut group =
                Group::new(GroupId(1), Role::Server, peer, old, Domain(1), Stock::new(4));
            group.add_link(link(2, LinkState::Polled));
            assert_eq!(group.named_by(&offer), Some(LinkId(2)));
            group.links[1].state = LinkState::Retiring;
            let first = matches!(group.links[0].state, LinkState::Vacated).then_some(LinkId(1));
            assert_eq!(group.named_by(&offer), first);
        }
    }
}
