//! Which connection holds what of a group: a slot, an element, a place on a link.

use std::collections::BTreeMap;

use smcr_engine::handoff::PeerElement;
use smcr_engine::{Command, ConnectionId, Established, LinkId};
use smcr_memory::Rmbe;
use smcr_proto::Instant;
use smcr_proto::link_group::LinkGroup;
use smcr_proto::ring::Ring;
use smcr_proto::wire::clc::Offer;
use smcr_rnic::{Exhausted, Rnic};

use super::Groups;
use super::group::{GroupId, Phase};
use super::ports::{Pollers, PortId, QpOf};

/// What a rendezvous gets of a group.
#[derive(Debug)]
pub struct Joined {
    /// Its slot.
    pub connection: ConnectionId,
    /// Its element.
    pub rmbe: Rmbe,
    /// What to tell the peer. `first_contact` is for the caller to set.
    pub offer: Offer,
}

/// Why a connection cannot join a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No slot is free.
    NoSlot,
    /// No element is free, and there is no room for another RMB.
    NoMemory,
    /// The group carries nothing any more.
    NoLink,
}

/// A connection of a group.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// The group.
    pub group: GroupId,
    /// The link that it sends on.
    pub link: LinkId,
    /// The poller that has it, or will.
    pub port: PortId,
    /// The peer's element, once it is known.
    pub peer: Option<Offer>,
}

/// All connections of all groups.
#[derive(Debug, Default)]
pub(super) struct Members {
    by_connection: BTreeMap<ConnectionId, Member>,
}

impl Members {
    pub(super) fn at(&self, connection: ConnectionId) -> Option<&Member> {
        self.by_connection.get(&connection)
    }

    /// How many connections send on a link.
    pub(super) fn on(&self, link: LinkId) -> usize {
        self.by_connection.values().filter(|member| member.link == link).count()
    }
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// A connection of a group, unless it is over.
    pub fn member(&self, connection: ConnectionId) -> Option<&Member> {
        self.members.at(connection)
    }

    /// How many connections and rendezvous send on a link.
    pub fn members_on(&self, link: LinkId) -> usize {
        self.members.on(link)
    }

    /// Takes a slot and an element for a connection that will send on `link`, and makes the offer
    /// that names them.
    ///
    /// From then on the peer's messages may come.
    ///
    /// # Errors
    ///
    /// [`Refusal`], with nothing changed.
    pub fn join(&mut self, now: Instant, id: GroupId, link: LinkId) -> Result<Joined, Refusal> {
        let group = self.groups.get(&id).ok_or(Refusal::NoLink)?;
        let link = group.link(link).ok_or(Refusal::NoLink)?;
        let (port, ours, link) = (link.port, link.ours, link.id);
        let connection = self.slots.take().ok_or(Refusal::NoSlot)?;
        // RFC 7609 2.1-5, 4.1-1
        let Ok(rmbe) = self.take_element(now, id) else {
            self.slots.free(connection);
            return Err(Refusal::NoMemory);
        };
        let (rkey, rmb_address) =
            self.groups[&id].stock.key(&rmbe, port).expect("registered with every RNIC");
        self.members.by_connection.insert(connection, Member { group: id, link, port, peer: None });
        // From the moment the peer knows the token, its messages may come.
        // RFC 7609 3.5.2.4-4, 3.5.2.4-6
        self.pollers.command(port, Command::Expect { connection });
        // RFC 7609 3.5.1.2-11, A.2.3-3
        let offer = Offer {
            first_contact: false,
            peer_id: self.settings.peer_id,
            gid: ours.gid,
            mac: ours.mac,
            qpn: ours.qpn,
            rkey,
            rmbe_index: rmbe.index(),
            alert_token: connection.token(),
            rmbe_size: rmbe.size(),
            mtu: ours.mtu,
            rmb_address,
            psn: ours.psn,
        };
        Ok(Joined { connection, rmbe, offer })
    }

    /// The link that a new connection of a group should use.
    pub fn best_link(&self, id: GroupId) -> Option<LinkId> {
        self.groups.get(&id)?.links.first().map(|link| link.id)
    }

    /// Notes what the peer offered to a connection.
    pub fn learn_peer(&mut self, connection: ConnectionId, offer: &Offer) {
        let Some(member) = self.members.by_connection.get_mut(&connection) else { return };
        member.peer = Some(*offer);
        let group = member.group;
        if let Some(machine) = self.groups.get_mut(&group).and_then(|group| group.machine_mut())
            && machine.learn_rkey(offer.rkey, offer.rmb_address).is_err()
        {
            // The connection itself knows its key; only a DELETE RKEY for it will be denied.
            tracing::debug!(group = group.0, "the peer has more RMBs than can be remembered");
        }
    }

    /// The rendezvous succeeded: the poller takes over.
    ///
    /// # Panics
    ///
    /// If the connection did not join, or its peer is not known.
    pub fn hand_over(&mut self, connection: ConnectionId, near: P::Stream, rmbe: Rmbe) {
        let member = self.members.at(connection).expect("it joined");
        let offer = member.peer.expect("what is done was offered from both sides");
        let Some(group) = self.groups.get(&member.group) else {
            panic!("a group outlives the elements that are out");
        };
        let eye_catcher = group.machine().is_some_and(LinkGroup::peer_eye_catcher);
        // RFC 7609 2.1-1
        let peer = PeerElement {
            rkey: offer.rkey,
            address: offer.rmbe_address(),
            // RFC 7609 2.1-11
            ring: Ring::of_element(offer.rmbe_size, eye_catcher),
            token: offer.alert_token,
        };
        // RFC 7609 3-4
        let (link, port) = (member.link, member.port);
        let established = Box::new(Established::Smc { near, link, rmbe, peer });
        self.pollers.command(port, Command::Relay { connection, established });
        if matches!(group.phase, Phase::Ending) {
            // The group ended while the last message was on its way.
            self.pollers.command(port, Command::FailConnections { link });
        }
    }

    /// The rendezvous failed: gives back what it held.
    pub fn leave(&mut self, now: Instant, connection: ConnectionId, rmbe: Option<Rmbe>) {
        let Some(member) = self.members.by_connection.remove(&connection) else { return };
        self.pollers.command(member.port, Command::Forget { connection });
        self.slots.free(connection);
        if let Some(mut rmbe) = rmbe {
            // The peer may have believed that the rendezvous had succeeded, and written.
            rmbe.touch(rmbe.capacity());
            self.give_back(now, member.group, rmbe);
        }
    }

    /// A connection is over; its slot is free again.
    pub fn closed(&mut self, now: Instant, connection: ConnectionId, rmbe: Option<Rmbe>) {
        self.slots.free(connection);
        if let Some(member) = self.members.by_connection.remove(&connection)
            && let Some(rmbe) = rmbe
        {
            self.give_back(now, member.group, rmbe);
        }
    }

    /// Resets a connection on both sides.
    pub fn abort(&mut self, connection: ConnectionId) {
        if let Some(member) = self.members.at(connection) {
            self.pollers.command(member.port, Command::Abort { connection });
        }
    }

    fn take_element(&mut self, now: Instant, id: GroupId) -> Result<Rmbe, Exhausted> {
        let group = self.groups.get_mut(&id).ok_or(Exhausted)?;
        let rmbe = match group.stock.take() {
            Some(rmbe) => rmbe,
            None => {
                self.grow(id)?;
                let group = self.groups.get_mut(&id).ok_or(Exhausted)?;
                group.stock.take().expect("the stock has just grown")
            }
        };
        let group = self.groups.get_mut(&id).ok_or(Exhausted)?;
        group.users += 1;
        self.count_users(now, id);
        Ok(rmbe)
    }

    /// Another RMB, registered with every RNIC of the group.
    fn grow(&mut self, id: GroupId) -> Result<(), Exhausted> {
        let group = self.groups.get_mut(&id).ok_or(Exhausted)?;
        group.stock.grow(&mut self.budget)?;
        for (port, domain) in group.domains.clone() {
            let rnic = self.ports[port.0].rnic.as_mut().ok_or(Exhausted)?;
            if group.stock.register(port, domain, rnic).is_err() {
                for (port, registration) in group.stock.shrink(&mut self.budget) {
                    if let Some(rnic) = self.ports[port.0].rnic.as_mut() {
                        rnic.deregister(registration);
                    }
                }
                return Err(Exhausted);
            }
        }
        Ok(())
    }

    /// Takes an element back; the last one of a group that is over ends it.
    fn give_back(&mut self, now: Instant, id: GroupId, rmbe: Rmbe) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        group.stock.give_back(rmbe);
        group.users -= 1;
        self.count_users(now, id);
        self.bury(now, id);
    }

    fn count_users(&mut self, now: Instant, id: GroupId) {
        let users = self.groups[&id].users;
        self.with_machine(now, id, |machine| machine.connections_changed(now, users));
    }
}
