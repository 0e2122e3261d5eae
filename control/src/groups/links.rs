//! The links of a group beyond the first: opened, connected, lost.

use std::sync::Arc;

use smcr_engine::{Command, LinkId};
use smcr_proto::link::Cause;
use smcr_proto::link_group::Refusal;
use smcr_proto::{Gid, Instant, LinkNumber, LinkUserId, MacAddress};
use smcr_rnic::{ConnectError, Exhausted, Opening, QpAddress, Rnic};

use super::Groups;
use super::group::{GroupId, Leaving, Link, LinkState};
use super::ports::{Pollers, PortId, QpOf};

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// The machine wants a queue pair for another link. `peer` is the server's port, where we are
    /// the client.
    pub(super) fn open_link(
        &mut self,
        now: Instant,
        id: GroupId,
        number: LinkNumber,
        peer: Option<(Gid, MacAddress)>,
    ) {
        let admitted = peer.is_none_or(|(gid, _)| self.admits(id, gid));
        let opened = match self.choose_port(id, peer).filter(|_| admitted) {
            None => Err(Refusal::NoAlternatePath),
            Some(port) => {
                let opened = self.open_link_on(now, id, number, port);
                opened.map(|found| (found, port)).map_err(|Exhausted| Refusal::Exhausted)
            }
        };
        let ((ours, link), port) = match opened {
            Ok(opened) => opened,
            Err(refusal) => {
                tracing::debug!(group = id.0, number = number.0, ?refusal, "no further link");
                self.with_machine(now, id, |machine| machine.link_refused(now, number, refusal));
                return;
            }
        };
        let Some(group) = self.groups.get(&id) else { return };
        let keys = group.stock.keys_on(port);
        // RFC 7609 2.2.4-3
        let user_id = LinkUserId(link.0);
        self.with_machine(now, id, |machine| {
            machine.link_opened(now, number, ours, user_id, &keys);
        });
    }

    /// Where a further link of a group would go: to an RNIC on the same LAN, as the
    /// machine prefers them, and among equals to the least busy poller.
    pub(super) fn choose_port(
        &self,
        id: GroupId,
        peer: Option<(Gid, MacAddress)>,
    ) -> Option<PortId> {
        let group = self.groups.get(&id)?;
        let lan = &self.ports[group.links.first()?.port.0].lan;
        let candidate = |(index, port): (usize, &super::Port<N>)| {
            // RFC 7609 2-2, 5.2-1
            let reaches = group.is_routed() || peer.is_none_or(|(peer, _)| port.reaches(peer));
            let fits = port.is_up() && port.lan == *lan && reaches;
            let address = port.address().filter(|_| fits)?;
            Some((self.members_of(PortId(index)), PortId(index), address))
        };
        let mut ports: Vec<_> = self.ports.iter().enumerate().filter_map(candidate).collect();
        ports.sort_unstable_by_key(|(load, port, _)| (*load, *port));
        let addresses = ports.iter().map(|(_, _, address)| *address);
        let place = group.machine()?.choose_port(addresses, peer)?;
        Some(ports[place].1)
    }

    /// Opens a queue pair for a further link, with every RMB registered beside it.
    fn open_link_on(
        &mut self,
        now: Instant,
        id: GroupId,
        number: LinkNumber,
        port: PortId,
    ) -> Result<(QpAddress, LinkId), Exhausted> {
        self.enter_port(id, port)?;
        let group = self.groups.get_mut(&id).ok_or(Exhausted)?;
        let opened = self.ports[port.0].for_link();
        let opened =
            opened.and_then(|rnic| rnic.open_for(group.domains[&port], group.peer.messages()));
        let opening = match opened {
            Ok(opening) => opening,
            Err(exhausted) => {
                self.leave_port(id, port);
                return Err(exhausted);
            }
        };
        self.links_made += 1;
        let (link, ours) = (LinkId(self.links_made), opening.address());
        group.links.push(Link {
            id: link,
            number,
            port,
            ours,
            theirs: None,
            state: LinkState::Opening(opening),
            confirmed: false,
            activity: Arc::default(),
            heard: now,
        });
        self.note_link(link, id, port);
        Ok((ours, link))
    }

    /// Whether a further link of a group may lead to that port. If not, it is counted.
    fn admits(&mut self, id: GroupId, gid: Gid) -> bool {
        let admitted = self.groups.get(&id).is_some_and(|group| group.admits(gid));
        self.counts.links_not_listed += u64::from(!admitted);
        admitted
    }

    /// The peer's end of a further link is known.
    pub(super) fn connect_link(
        &mut self,
        now: Instant,
        id: GroupId,
        number: LinkNumber,
        theirs: QpAddress,
    ) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let opening = |link: &&mut Link<N::Opening>| {
            link.number == number && matches!(link.state, LinkState::Opening(_))
        };
        let Some(link) = group.links.iter_mut().find(opening) else { return };
        let (name, port) = (link.id, link.port);
        if !self.admits(id, theirs.gid) {
            self.drop_link(id, name);
            self.with_machine(now, id, |machine| machine.link_unreachable(now, number));
            return;
        }
        let Some(link) = self.groups.get_mut(&id).and_then(|group| group.link_mut(name)) else {
            unreachable!("it was just looked at")
        };
        let state = std::mem::replace(&mut link.state, LinkState::Retiring);
        let LinkState::Opening(opening) = state else { unreachable!("it was just looked at") };
        match opening.connect(theirs) {
            Ok(qp) => {
                link.state = LinkState::Polled;
                link.theirs = Some(theirs);
                let activity = Arc::clone(&link.activity);
                let command = Command::AddLink { link: name, group: id, qp, activity };
                self.pollers.command(port, command);
                self.with_machine(now, id, |machine| machine.link_connected(now, number));
            }
            Err(ConnectError::Exhausted | ConnectError::Unreachable) => {
                self.drop_link(id, name);
                self.with_machine(now, id, |machine| machine.link_unreachable(now, number));
            }
        }
    }

    /// The link will be deleted in order: its connections go elsewhere first.
    pub(super) fn vacate_link(&mut self, now: Instant, id: GroupId, number: LinkNumber) {
        let link = self.groups.get(&id).and_then(|group| Some(group.numbered(number)?.id));
        if link.is_some_and(|link| self.move_all(id, link, Leaving::Orderly)) {
            return;
        }
        // Nothing else can carry them: what the machine does next ends them.
        self.with_machine(now, id, |machine| machine.link_vacated(now, number));
    }

    /// The link is down: its connections go on over another one, or end.
    pub(super) fn link_failed(&mut self, id: GroupId, number: LinkNumber, cause: Cause) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(name) = group.numbered(number).map(|link| link.id) else { return };
        // A server that has confirmed it sooner than we puts connections on it at once.
        let carries = !group.relayed_on(name).is_empty();
        let Some(link) = group.link_mut(name) else { return };
        match &mut link.state {
            LinkState::Opening(_) => self.drop_link(id, name),
            // They are on their way already; the queue pair goes when the last is gone.
            LinkState::Leaving(leaving) => {
                *leaving = Leaving::Disorderly;
                let port = link.port;
                self.pollers.command(port, Command::FailLink { link: name });
            }
            LinkState::Vacated => self.retire(id, name),
            LinkState::Retiring => {}
            LinkState::Polled if !link.confirmed && !carries => self.retire(id, name),
            LinkState::Polled => self.fail_over(id, name, cause),
        }
    }

    fn fail_over(&mut self, id: GroupId, name: LinkId, cause: Cause) {
        let moved = self.move_all(id, name, Leaving::Disorderly);
        let Some(group) = self.groups.get(&id) else { return };
        let Some(link) = group.link(name) else { return };
        let port = link.port;
        let rnic = &self.ports[link.port.0].name;
        let outcome = if moved { "its connections move" } else { "no other can take over" };
        tracing::warn!(
            group = id.0,
            link = name.0,
            number = link.number.0,
            rnic,
            gid = %link.ours.gid,
            ?cause,
            connections = group.members_on(name),
            "a link is down: {outcome}"
        );
        if moved {
            self.counts.links_failed_over += 1;
            // What is outstanding ends now, instead of when retries are exceeded.
            self.pollers.command(port, Command::FailLink { link: name });
        } else {
            self.counts.links_lost += 1;
            // RFC 7609 4.8.3-3
            self.pollers.command(port, Command::FailConnections { link: name });
            self.retire(id, name);
        }
    }

    /// Tells the poller to give a queue pair up.
    pub(super) fn retire(&mut self, id: GroupId, link: LinkId) {
        let Some(found) = self.groups.get_mut(&id).and_then(|group| group.link_mut(link)) else {
            return;
        };
        found.state = LinkState::Retiring;
        let port = found.port;
        self.pollers.command(port, Command::RetireLink { link });
    }

    /// Forgets a link whose queue pair is gone, and what it stood on if it was the last there.
    pub(super) fn drop_link(&mut self, id: GroupId, link: LinkId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(index) = group.links.iter().position(|other| other.id == link) else { return };
        let port = group.links.remove(index).port;
        self.forget_link(link, port);
        self.leave_port(id, port);
    }

    /// A group has one more link.
    pub(super) fn note_link(&mut self, link: LinkId, id: GroupId, port: PortId) {
        self.group_of_link.insert(link, id);
        self.ports[port.0].links += 1;
    }

    /// A link is no more.
    pub(super) fn forget_link(&mut self, link: LinkId, port: PortId) {
        let known = self.group_of_link.remove(&link);
        assert!(known.is_some(), "a link is forgotten once");
        self.ports[port.0].links -= 1;
    }

    /// Registers what a group has with an RNIC, in a domain of its own there.
    fn enter_port(&mut self, id: GroupId, port: PortId) -> Result<(), Exhausted> {
        let group = self.groups.get_mut(&id).ok_or(Exhausted)?;
        let rnic = self.ports[port.0].rnic.as_mut().ok_or(Exhausted)?;
        if group.domains.contains_key(&port) {
            return Ok(());
        }
        // RFC 7609 2.1-6
        let domain = rnic.open_domain()?;
        group.domains.insert(port, domain);
        // RFC 7609 2.1-3, 2.2-4
        if group.stock.register(port, domain, rnic).is_err() {
            self.leave_port(id, port);
            return Err(Exhausted);
        }
        Ok(())
    }

    /// Withdraws a group from an RNIC on which it has no link left.
    pub(super) fn leave_port(&mut self, id: GroupId, port: PortId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if group.links.iter().any(|link| link.port == port) {
            return;
        }
        if let Some(rnic) = self.ports[port.0].rnic.as_mut()
            && let Some(domain) = group.domains.remove(&port)
        {
            group.stock.withdraw(port, rnic);
            rnic.close_domain(domain);
        }
    }
}
