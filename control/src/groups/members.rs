//! Which connection holds what of a group: a slot, an element, a place on a link.

use std::sync::Arc;
use std::time::Duration;

use smcr_engine::handoff::{Allowance, PeerElement};
use smcr_engine::{Command, ConnectionId, Established, LinkId};
use smcr_memory::Rmbe;
use smcr_proto::connection::Streams;
use smcr_proto::handshake::Agreement;
use smcr_proto::link_group::{LinkGroup, Role};
use smcr_proto::ring::Ring;
use smcr_proto::wire::clc::Offer;
use smcr_proto::wire::llc::DeleteReason;
use smcr_proto::{AlertToken, Gid, Instant, Qpn, RmbeSize};
use smcr_rnic::Rnic;

use super::Groups;
use super::group::{Group, GroupId, Member};
use super::group_mut::GroupMut;
use super::ports::{Pollers, PortId, QpOf};
use super::proof::Proof;
use super::shared::Event;

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

/// What names one end of an SMC-R connection to everybody who can reach its RNIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct End {
    gid: Gid,
    qpn: Qpn,
    token: AlertToken,
}

/// Both ends of an SMC-R connection, and the poller that has ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ends {
    port: PortId,
    ours: End,
    theirs: End,
}

impl Ends {
    /// Between two queue pairs of one RNIC, each with a token.
    #[cfg(test)]
    pub fn between(port: PortId, ours: (u32, u32), theirs: (u32, u32)) -> Self {
        let end = |(qpn, token)| {
            let (gid, qpn, token) = (Gid::default(), Qpn(qpn), AlertToken(token));
            End { gid, qpn, token }
        };
        Self { port, ours: end(ours), theirs: end(theirs) }
    }

    /// The same connection as it looks from the other end, if that has the same poller.
    pub fn turned(self) -> Self {
        Self { ours: self.theirs, theirs: self.ours, ..self }
    }
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

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// A connection of a group, unless it is over.
    pub fn member(&self, connection: ConnectionId) -> Option<&Member> {
        let id = self.members[usize::from(connection.slot)]?;
        self.at(id).expect("a group outlives its connections").members.get(&connection)
    }

    /// Both ends of a connection whose rendezvous has succeeded: where its packets go, and where
    /// those come from that are its peer's.
    pub fn ends(&self, connection: ConnectionId) -> Option<Ends> {
        let member = self.member(connection)?;
        let group = self.at(self.members[usize::from(connection.slot)]?)?;
        let (ours, theirs) = (group.link(member.link)?.ours, member.peer?);
        let ours = End { gid: ours.gid, qpn: ours.qpn, token: connection.token() };
        let theirs = End { gid: theirs.gid, qpn: theirs.qpn, token: theirs.alert_token };
        Some(Ends { port: member.port, ours, theirs })
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
        if let Err(refusal) = self.at(id).ok_or(Refusal::NoLink)?.has_room_on(link) {
            let may_wait = refusal == Refusal::NoMemory
                && self.input(now, id, |group| group.take_back_kept()) == Some(true);
            return Err(if may_wait { Refusal::NotYet } else { refusal });
        }
        let connection = self.slots.take().ok_or(Refusal::NoSlot)?;
        let joined = self.input(now, id, |group| group.join(now, connection, link, size));
        match joined.expect("it was just looked at") {
            Ok(joined) => {
                self.members[usize::from(connection.slot)] = Some(id);
                Ok(joined)
            }
            Err(refusal) => {
                self.slots.free(connection);
                Err(refusal)
            }
        }
    }

    /// The link that a new connection of a group should use: the one with the fewest.
    pub fn best_link(&self, id: GroupId) -> Option<LinkId> {
        let group = self.at(id)?;
        let usable = group.links.iter().filter(|link| group.is_usable(link));
        // RFC 7609 2.2 #2: spread connections over active links
        // RFC 7609 2.3 #1: treat all active links alike
        // RFC 7609 2.3 #2: each side chooses its own link
        // RFC 7609 3.5.2.1 #6: server may choose another link
        group.least_used(usable)
    }

    /// The rendezvous succeeded: the poller takes over, and carries bytes as fast as `allowance`
    /// says; one stream after another, if our side can do that and the peers have agreed on it.
    ///
    /// # Panics
    ///
    /// If the connection did not join, or its peer is not known.
    pub fn hand_over(
        &mut self,
        connection: ConnectionId,
        near: P::Stream,
        rmbe: Rmbe,
        allowance: Option<Arc<Allowance>>,
        many_streams: bool,
    ) {
        let mut group = self.group_of(connection).expect("it joined");
        group.hand_over(connection, near, rmbe, allowance, many_streams);
    }

    /// Whether a connection that is kept may carry another stream of ours: the peer's RNIC has
    /// acknowledged something on its link in the last `age`.
    pub fn may_go_on(&self, now: Instant, age: Duration, connection: ConnectionId) -> bool {
        let (Some(id), Some(member)) =
            (self.members[usize::from(connection.slot)], self.member(connection))
        else {
            return false;
        };
        !member.aborted
            && !member.closing
            && self.proof_of(now, age, id, member.link) == Proof::Given
    }

    /// Gives a connection the socket of its next stream.
    ///
    /// # Panics
    ///
    /// If it is over.
    pub fn next_stream(
        &mut self,
        connection: ConnectionId,
        near: P::Stream,
        allowance: Option<Arc<Allowance>>,
    ) {
        let mut group = self.group_of(connection).expect("what is kept is there");
        let member = group.member_mut(connection);
        (member.kept, member.closing) = (false, false);
        let port = member.port;
        group.command(port, Command::NextStream { connection, near, allowance });
    }

    /// A connection has no stream now: whoever lacks an element may take it.
    pub fn note_kept(&mut self, connection: ConnectionId) {
        if let Some(mut group) = self.group_of(connection) {
            group.member_mut(connection).kept = true;
        }
    }

    /// No other stream shall follow on a connection. It may be over already.
    pub fn close_kept(&mut self, connection: ConnectionId) {
        if let Some(mut group) = self.group_of(connection) {
            let member = group.member_mut(connection);
            member.closing = true;
            let port = member.port;
            group.command(port, Command::CloseKept { connection });
        }
    }

    /// The rendezvous failed: gives back what it held.
    ///
    /// The peer may have believed that it had succeeded, and write. So the element rests for a
    /// while before another connection gets it.
    ///
    /// # Panics
    ///
    /// If the connection did not join.
    pub fn leave(&mut self, now: Instant, connection: ConnectionId, rmbe: Rmbe) {
        let id = self.members[usize::from(connection.slot)].take().expect("it joined");
        self.slots.free(connection);
        let left = self.input(now, id, |group| {
            let port = group.forget(connection).port;
            group.shared.pollers.forget(port, connection);
            // RFC 7609 3.5.4 #2: reuse element when both are done
            // RFC 7609 4.4.2 #2: reuse element after a timeout
            group.rest(now, rmbe);
            group.one_less(now);
        });
        left.expect("a group outlives its connections");
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
        self.slots.free(connection);
        // A connection that stayed TCP has a slot and nothing else.
        let Some(id) = self.members[usize::from(connection.slot)].take() else { return };
        let rmbe = rmbe.expect("a connection of a group has an element");
        let closed = self.input(now, id, |it| {
            it.forget(connection);
            if settled {
                // RFC 7609 4.4.2 #1: reuse only after both say done
                it.group.stock.give_back(now, rmbe, &mut it.shared.budget);
            } else {
                it.shared.counts.elements_rested += 1;
                // RFC 7609 4.4.2 #2: reuse element after a timeout
                it.rest(now, rmbe);
            }
            it.one_less(now);
        });
        closed.expect("a group outlives its connections");
    }

    /// Resets a connection on both sides.
    pub fn abort(&mut self, connection: ConnectionId) {
        // It may have stayed TCP, or be over already.
        if let Some(mut group) = self.group_of(connection) {
            group.abort(connection);
        }
    }

    /// The group of a connection. None if it stayed TCP, or is over.
    pub(super) fn group_of(&mut self, connection: ConnectionId) -> Option<GroupMut<'_, N, P>> {
        let id = self.members[usize::from(connection.slot)]?;
        let group = self.group_mut(id).expect("a group outlives its connections");
        group.group.members.contains_key(&connection).then_some(group)
    }
}

impl<N: Rnic, P: Pollers<QpOf<N>>> GroupMut<'_, N, P> {
    fn join(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        link: LinkId,
        size: RmbeSize,
    ) -> Result<Joined, Refusal> {
        // RFC 7609 2.1 #5: one element per connection and side
        // RFC 7609 4.1 #1: each side allocates an element
        let rmbe = match self.take_element(now, size) {
            Err(Refusal::NoMemory) if self.take_back_kept() => return Err(Refusal::NotYet),
            taken => taken?,
        };
        let on = self.group.link(link).expect("it was just looked at");
        let (port, ours) = (on.port, on.ours);
        let key = self.group.stock.key(&rmbe, port);
        let (rkey, rmb_address) = key.expect("an RMB is registered with every RNIC of its group");
        let member = Member {
            link,
            port,
            peer: None,
            named_on: link,
            relayed: false,
            aborted: false,
            kept: false,
            closing: false,
            awaited: false,
        };
        self.group.members.insert(connection, member);
        self.shared.connection_came(port);
        self.tell_members(now);
        // From the moment the peer knows the token, its messages may come.
        // RFC 7609 3.5.2.4 #4: server's element ready before Accept
        // RFC 7609 3.5.2.4 #6: client receives once Confirm is sent
        self.shared.pollers.expect(port, connection, self.group.id);
        // RFC 7609 3.5.1.2 #11: Accept names RNIC on shared subnet
        // RFC 7609 A.2.3 #3: GID and MAC of chosen RNIC
        let offer = Offer {
            first_contact: false,
            peer_id: self.shared.settings.peer_id,
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

    fn hand_over(
        &mut self,
        connection: ConnectionId,
        near: P::Stream,
        rmbe: Rmbe,
        allowance: Option<Arc<Allowance>>,
        many_streams: bool,
    ) {
        let streams = if many_streams { self.group.streams() } else { Streams::One };
        let machine = self.group.machine();
        let eye_catcher = machine.is_some_and(LinkGroup::peer_eye_catcher);
        let (id, ending) = (self.group.id, self.group.is_over());
        let member = self.member_mut(connection);
        let offer = member.peer.expect("what is done was offered from both sides");
        member.relayed = true;
        // RFC 7609 3 #4: send data by RDMA, not TCP
        let (link, port) = (member.link, member.port);
        // RFC 7609 2.1 #1: tell RKey and address together
        let peer = PeerElement {
            rkey: offer.rkey,
            address: offer.rmbe_address(),
            rmb_address: offer.rmb_address,
            // RFC 7609 2.1 #11: choose RMBs independently of the peer
            ring: Ring::of_element(offer.rmbe_size, eye_catcher),
            token: offer.alert_token,
        };
        self.renew_move(port, link);
        let established = Box::new(Established::Smc { near, link, group: id, rmbe, peer, streams });
        self.command(port, Command::Relay { connection, established, allowance });
        if ending {
            // The group ended while the last message was on its way.
            self.command(port, Command::FailConnections { link });
        }
    }

    /// Has a connection closed that is kept without a stream, so that its element and its place are
    /// free soon. Returns whether there is one, or was one just now.
    fn take_back_kept(&mut self) -> bool {
        let mut kept = self.group.members.iter_mut().filter(|(_, member)| member.kept);
        let Some((connection, member)) = kept.find(|(_, member)| !member.closing) else {
            return self.group.members.values().any(|member| member.kept && member.awaited);
        };
        (member.closing, member.awaited) = (true, true);
        let (connection, port) = (*connection, member.port);
        self.command(port, Command::CloseKept { connection });
        true
    }

    /// Resets a connection on both sides.
    pub(super) fn abort(&mut self, connection: ConnectionId) {
        let member = self.member_mut(connection);
        member.aborted = true;
        let port = member.port;
        self.command(port, Command::Abort { connection });
    }

    pub(super) fn member_mut(&mut self, connection: ConnectionId) -> &mut Member {
        self.group.members.get_mut(&connection).expect("it is a connection of this group")
    }

    /// A connection is no more.
    fn forget(&mut self, connection: ConnectionId) -> Member {
        let member = self.group.members.remove(&connection);
        let member = member.expect("a connection of a group is forgotten once");
        if member.awaited {
            self.shared.events.push_back(Event::ElementsChanged(self.group.id));
        }
        self.shared.connection_went(member.port);
        member
    }

    /// An element that the peer may still write: no connection gets it for a while.
    fn rest(&mut self, now: Instant, mut rmbe: Rmbe) {
        rmbe.touch_all();
        self.group.quarantine.push_back((now + QUARANTINE, rmbe));
    }

    /// The group has one connection less. If its peer does not know it, it ends with the last.
    fn one_less(&mut self, now: Instant) {
        self.tell_members(now);
        if self.group.out_of_sync && self.group.members.is_empty() {
            self.feed(|machine| machine.shutdown(now, DeleteReason::PROTOCOL_VIOLATION));
        }
    }

    /// Tells the machine how many connections there are.
    pub(super) fn tell_members(&mut self, now: Instant) {
        let count = u32::try_from(self.group.members.len()).expect("few per group");
        self.feed(|machine| machine.connections_changed(now, count));
    }
}

impl<O> Group<O> {
    /// How many streams connections may carry, and who begins them.
    fn streams(&self) -> Streams {
        let agreed = matches!(&self.agreement, Agreement::V2(terms) if terms.many_streams);
        match (agreed, self.role) {
            (false, _) => Streams::One,
            (true, Role::Client) => Streams::Begins,
            (true, Role::Server) => Streams::Follows,
        }
    }

    /// Whether one more connection can be on this link.
    fn has_room_on(&self, link: LinkId) -> Result<(), Refusal> {
        let is_there = self.link(link).is_some_and(|_| !self.is_over());
        match is_there {
            false => Err(Refusal::NoLink),
            true if self.members.len() < self.members_max() => Ok(()),
            true => Err(Refusal::NoMemory),
        }
    }
}

/// How long an element rests that its peer may believe to have. Longer than any rendezvous, and
/// than TCP needs to carry a reset to whoever is still there.
const QUARANTINE: Duration = Duration::from_secs(30);
