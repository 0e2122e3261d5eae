//! Which connection holds what of a group: a slot, an element, a place on a link.

use std::time::Duration;

use smcr_engine::handoff::PeerElement;
use smcr_engine::limits::CONNECTIONS_MAX;
use smcr_engine::{Command, ConnectionId, Established, LinkId};
use smcr_memory::Rmbe;
use smcr_proto::link_group::LinkGroup;
use smcr_proto::ring::Ring;
use smcr_proto::wire::clc::Offer;
use smcr_proto::{Instant, LinkNumber, RmbeSize};
use smcr_rnic::Rnic;

use super::group::{Group, GroupId, LinkState, Phase};
use super::ports::{Pollers, PortId, QpOf};
use super::{Event, Groups};

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
    /// No element is free, but the peer is being told of another RMB: try again after
    /// [`Event::ElementsChanged`].
    NotYet,
    /// The group carries nothing any more.
    NoLink,
}

/// What became of a peer's offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The connection writes that element.
    Noted,
    /// Another connection still has it. It has probably ended for the peer, and is about to end
    /// here: try again after [`Event::ElementsChanged`], or
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

/// A connection of a group.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// The link that it sends on.
    pub link: LinkId,
    /// The poller that has it, or will.
    pub port: PortId,
    /// The peer's element, once it is known, as the link sees it.
    pub peer: Option<Offer>,
    /// Its poller relays.
    pub(super) relayed: bool,
    /// It is to be reset.
    pub(super) aborted: bool,
    /// Another connection waits for its end.
    awaited: bool,
}

/// Which slot belongs to which group, and how many connections each poller has or will have.
#[derive(Debug)]
pub(super) struct Members {
    group_of: Box<[Option<GroupId>]>,
    loads: Vec<usize>,
}

impl Members {
    pub(super) fn new(ports: usize) -> Self {
        Self { group_of: vec![None; CONNECTIONS_MAX].into(), loads: vec![0; ports] }
    }

    /// A connection goes from one poller to another.
    pub(super) fn moved(&mut self, from: PortId, to: PortId) {
        self.loads[from.0] -= 1;
        self.loads[to.0] += 1;
    }

    pub(super) fn group_of(&self, connection: ConnectionId) -> Option<GroupId> {
        self.group_of[usize::from(connection.slot)]
    }
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// A connection of a group, unless it is over.
    pub fn member(&self, connection: ConnectionId) -> Option<&Member> {
        let group = self.members.group_of(connection)?;
        self.groups.get(&group)?.members.get(&connection)
    }

    /// Takes a slot and an element of this size for a connection that will send on `link`, and
    /// makes the offer that names them.
    ///
    /// From then on the peer's messages may come.
    ///
    /// # Errors
    ///
    /// [`Refusal`], with nothing changed.
    pub fn join(
        &mut self,
        now: Instant,
        id: GroupId,
        link: LinkId,
        size: RmbeSize,
    ) -> Result<Joined, Refusal> {
        let group = self.groups.get(&id).ok_or(Refusal::NoLink)?;
        let link = group.link(link).ok_or(Refusal::NoLink)?;
        if group.members.len() >= group.members_max() {
            return Err(Refusal::NoMemory);
        }
        let (port, ours, link) = (link.port, link.ours, link.id);
        let connection = self.slots.take().ok_or(Refusal::NoSlot)?;
        // RFC 7609 2.1-5, 4.1-1
        let rmbe = match self.take_element(now, id, size) {
            Ok(rmbe) => rmbe,
            Err(refusal) => {
                self.slots.free(connection);
                return Err(refusal);
            }
        };
        let (rkey, rmb_address) =
            self.groups[&id].stock.key(&rmbe, port).expect("registered with every RNIC");
        self.members.group_of[usize::from(connection.slot)] = Some(id);
        self.members.loads[port.0] += 1;
        if let Some(group) = self.groups.get_mut(&id) {
            group.members.insert(
                connection,
                Member { link, port, peer: None, relayed: false, aborted: false, awaited: false },
            );
        }
        self.count_members(now, id);
        // From the moment the peer knows the token, its messages may come.
        // RFC 7609 3.5.2.4-4, 3.5.2.4-6
        self.pollers.command(port, Command::Expect { connection, group: id });
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

    /// How many connections a poller has or will have.
    pub(super) fn members_of(&self, port: PortId) -> usize {
        self.members.loads[port.0]
    }

    /// The link that a new connection of a group should use: the one with the fewest.
    pub fn best_link(&self, id: GroupId) -> Option<LinkId> {
        let group = self.groups.get(&id)?;
        let usable = group.links.iter().filter(|link| group.is_usable(link));
        // RFC 7609 2.2-2, 2.3-1, 2.3-2, 3.5.2.1-6
        usable.min_by_key(|link| (group.members_on(link.id), link.number)).map(|link| link.id)
    }

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
        let (id, offer, holder) = self.weigh_offer(connection, offer)?;
        let group = self.groups.get_mut(&id).ok_or(BadOffer::NoSuchLink)?;
        if let Some(old) = holder.and_then(|old| group.members.get_mut(&old)) {
            old.awaited = true;
            self.counts.offers_held += 1;
            return Ok(Taken::Awaited);
        }
        self.note_offer(now, id, connection, offer);
        Ok(Taken::Noted)
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
        let (id, offer, holder) = self.weigh_offer(connection, offer)?;
        self.note_offer(now, id, connection, offer);
        if let Some(old) = holder {
            tracing::warn!(
                group = id.0,
                slot = old.slot,
                "reset: the peer offers its element again"
            );
            self.counts.conflicts += 1;
            // RFC 7609 4.4.2-3, 4.4.2-6
            self.abort(old);
        }
        Ok(())
    }

    /// Which element an offer means, as the link of the connection sees it, and who has it.
    fn weigh_offer(
        &mut self,
        connection: ConnectionId,
        offer: &Offer,
    ) -> Result<(GroupId, Offer, Option<ConnectionId>), BadOffer> {
        let id = self.members.group_of(connection).ok_or(BadOffer::NoSuchLink)?;
        let group = self.groups.get_mut(&id).ok_or(BadOffer::NoSuchLink)?;
        if offer.rmbe_size.bytes() > ELEMENT_BYTES_MAX {
            return Err(BadOffer::TooLarge);
        }
        // A link that connections are leaving is active still, and so is one that only the peer has
        // seen confirmed: what tells the other side may be on its way by RDMA, and who is refused
        // here loses the connection.
        // RFC 7609 3.5.2.3-2, 3.5.2.3-3
        let on = group.links.iter().find(|link| link.leads_to(offer));
        let on = on.filter(|link| !matches!(link.state, LinkState::Retiring));
        let on = on.ok_or(BadOffer::NoSuchLink)?;
        let on = on.number;
        let own = group.members.get(&connection).and_then(|member| group.link(member.link));
        let own = own.map_or(on, |link| link.number);
        if let Some(machine) = group.machine_mut() {
            let learned = machine.learn_rkey(on, offer.rkey, offer.rmb_address);
            learned.map_err(|_| BadOffer::TooManyRmbs)?;
        }
        let offer = seen_from(group, offer, on, own).ok_or(BadOffer::UnknownRmb)?;
        // RFC 7609 3.5.2.2-4, 3.5.2.3-1
        let holder = holder_of(group, &offer, own).filter(|old| *old != connection);
        Ok((id, offer, holder))
    }

    fn note_offer(&mut self, now: Instant, id: GroupId, connection: ConnectionId, offer: Offer) {
        let group = self.groups.get_mut(&id);
        if let Some(member) = group.and_then(|group| group.members.get_mut(&connection)) {
            member.peer = Some(offer);
        }
        self.count_members(now, id);
    }

    /// The rendezvous succeeded: the poller takes over.
    ///
    /// # Panics
    ///
    /// If the connection did not join, or its peer is not known.
    pub fn hand_over(&mut self, connection: ConnectionId, near: P::Stream, rmbe: Rmbe) {
        let id = self.members.group_of(connection).expect("it joined");
        let group = self.groups.get(&id).expect("a group outlives the elements that are out");
        let member = group.members.get(&connection).expect("it joined");
        let offer = member.peer.expect("what is done was offered from both sides");
        let eye_catcher = group.machine().is_some_and(LinkGroup::peer_eye_catcher);
        // RFC 7609 2.1-1
        let peer = PeerElement {
            rkey: offer.rkey,
            address: offer.rmbe_address(),
            // RFC 7609 2.1-11
            ring: Ring::of_element(offer.rmbe_size, eye_catcher),
            token: offer.alert_token,
        };
        let ending = matches!(group.phase, Phase::Ending);
        // RFC 7609 3-4
        let (link, port) = (member.link, member.port);
        if let Some(member) =
            self.groups.get_mut(&id).and_then(|group| group.members.get_mut(&connection))
        {
            member.relayed = true;
        }
        self.renew_move(id, link);
        let established = Box::new(Established::Smc { near, link, group: id, rmbe, peer });
        self.pollers.command(port, Command::Relay { connection, established });
        if ending {
            // The group ended while the last message was on its way.
            self.pollers.command(port, Command::FailConnections { link });
        }
    }

    /// The rendezvous failed: gives back what it held.
    ///
    /// The peer may have believed that it had succeeded, and write. So the element rests for a
    /// while before another connection gets it.
    pub fn leave(&mut self, now: Instant, connection: ConnectionId, mut rmbe: Rmbe) {
        let Some((id, member)) = self.forget(connection) else { return };
        self.pollers.command(member.port, Command::Forget { connection });
        self.slots.free(connection);
        rmbe.touch(rmbe.capacity());
        if let Some(group) = self.groups.get_mut(&id) {
            // RFC 7609 3.5.4-2, 4.4.2-2
            group.quarantine.push_back((now + QUARANTINE, rmbe));
        }
        self.count_members(now, id);
        self.end_if_disowned(now, id);
        self.bury(now, id);
    }

    /// A connection is over; its slot is free again. So is its element, if the connection was
    /// `settled`: if not, the peer may write it until it learns of the end by TCP.
    pub fn closed(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        rmbe: Option<Rmbe>,
        settled: bool,
    ) {
        let forgotten = self.forget(connection);
        self.slots.free(connection);
        if let (Some((id, _)), Some(mut rmbe)) = (forgotten, rmbe) {
            if let Some(group) = self.groups.get_mut(&id) {
                if settled {
                    // RFC 7609 4.4.2-1
                    group.stock.give_back(now, rmbe, &mut self.budget);
                } else {
                    self.counts.elements_rested += 1;
                    rmbe.touch(rmbe.capacity());
                    // RFC 7609 4.4.2-2
                    group.quarantine.push_back((now + QUARANTINE, rmbe));
                }
            }
            self.count_members(now, id);
            self.end_if_disowned(now, id);
            self.bury(now, id);
        }
    }

    /// Resets a connection on both sides.
    pub fn abort(&mut self, connection: ConnectionId) {
        let group = self.members.group_of(connection).and_then(|id| self.groups.get_mut(&id));
        if let Some(member) = group.and_then(|group| group.members.get_mut(&connection)) {
            member.aborted = true;
            let port = member.port;
            self.pollers.command(port, Command::Abort { connection });
        }
    }

    fn forget(&mut self, connection: ConnectionId) -> Option<(GroupId, Member)> {
        let id = self.members.group_of[usize::from(connection.slot)].take()?;
        let member = self.groups.get_mut(&id)?.members.remove(&connection)?;
        if member.awaited {
            self.events.push_back(Event::ElementsChanged(id));
        }
        self.members.loads[member.port.0] -= 1;
        Some((id, member))
    }

    fn count_members(&mut self, now: Instant, id: GroupId) {
        let Some(group) = self.groups.get(&id) else { return };
        let count = u32::try_from(group.members.len()).expect("few per group");
        self.with_machine(now, id, |machine| machine.connections_changed(now, count));
    }
}

/// An offer that names one link, as another link sees it.
fn seen_from<O>(
    group: &Group<O>,
    offer: &Offer,
    on: LinkNumber,
    from: LinkNumber,
) -> Option<Offer> {
    if on == from {
        return Some(*offer);
    }
    let (rkey, rmb_address) = group.machine()?.peer_rmb(on, offer.rkey, from)?;
    Some(Offer { rkey, rmb_address, ..*offer })
}

/// The connection that writes the element of this offer, which `on` sees so.
fn holder_of<O>(group: &Group<O>, offer: &Offer, on: LinkNumber) -> Option<ConnectionId> {
    let holds = |member: &Member| {
        let Some(peer) = member.peer.filter(|peer| peer.rmbe_index == offer.rmbe_index) else {
            return false;
        };
        let link = group.link(member.link).map_or(on, |link| link.number);
        // Two RMBs may have one key: they are told apart by their addresses.
        let same = |peer: Offer| (peer.rkey, peer.rmb_address) == (offer.rkey, offer.rmb_address);
        seen_from(group, &peer, link, on).is_some_and(same)
    };
    group.members.iter().find(|(_, member)| holds(member)).map(|(id, _)| *id)
}

/// The largest element of a peer that we write to. The RFC knows 512 KiB, and what a peer says to
/// have costs it nothing; how much may be on its way to it follows from that.
const ELEMENT_BYTES_MAX: u32 = 64 << 20;
/// How long an element rests that its peer may believe to have. Longer than any rendezvous, and
/// than TCP needs to carry a reset to whoever is still there.
const QUARANTINE: Duration = Duration::from_secs(30);
