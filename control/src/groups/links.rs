//! The links of a group beyond the first: opened, connected, left, given up; and what all links
//! stand on.

use std::sync::Arc;

use smcr_engine::{Command, LinkId};
use smcr_proto::link::Cause;
use smcr_proto::link_group::NoQueuePair;
use smcr_proto::{Gid, Instant, LinkNumber, LinkUserId, MacAddress, QpAddress};
use smcr_rnic::{Exhausted, Opening, Rnic};

use super::group::{Leaving, Link, LinkState, Phase};
use super::group_mut::GroupMut;
use super::machine::ActionOutcome;
use super::ports::{Pollers, PortId, QpOf};
use super::shared::Event;

impl<N: Rnic, P: Pollers<QpOf<N>>> GroupMut<'_, N, P> {
    /// The machine wants a queue pair for another link. `peer` is the server's port, where we are
    /// the client.
    pub(super) fn open_link(
        &mut self,
        now: Instant,
        number: LinkNumber,
        peer: Option<(Gid, MacAddress)>,
    ) -> ActionOutcome {
        let admitted = peer.is_none_or(|(gid, _)| self.admits(gid));
        let port = self.shared.port_for_link(self.group, peer).filter(|_| admitted);
        let opened = match port {
            None => Err(NoQueuePair::NoAlternatePath),
            Some(port) => {
                let opened = self.open_link_on(now, number, port);
                opened.map(|found| (found, port)).map_err(|Exhausted| NoQueuePair::Exhausted)
            }
        };
        match opened {
            Ok(((ours, link), port)) => {
                let keys = self.group.stock.keys_on(port);
                // RFC 7609 2.2.4 #3: unique link user id
                ActionOutcome::Opened { number, ours, user_id: LinkUserId(link.0), keys }
            }
            Err(refusal) => {
                let group = self.group.id.0;
                tracing::debug!(group, number = number.0, ?refusal, "no further link");
                ActionOutcome::Refused(number, refusal)
            }
        }
    }

    /// Opens a queue pair for a further link, with every RMB registered beside it.
    fn open_link_on(
        &mut self,
        now: Instant,
        number: LinkNumber,
        port: PortId,
    ) -> Result<(QpAddress, LinkId), Exhausted> {
        self.enter_port(port)?;
        let (domain, messages) = (self.group.domains[&port], self.group.peer.messages());
        let opened = self.shared.ports[port.0].for_link();
        let opened = opened.and_then(|rnic| rnic.open_for(domain, messages));
        let opening = match opened {
            Ok(opening) => opening,
            Err(exhausted) => {
                self.leave_port(port);
                return Err(exhausted);
            }
        };
        let ours = opening.address();
        let link = self.shared.name_link(self.group.id, port);
        self.group.add_link(Link::new(now, link, number, port, ours, opening));
        Ok((ours, link))
    }

    /// Whether a further link of the group may lead to that port. If not, it is counted.
    fn admits(&mut self, gid: Gid) -> bool {
        let admitted = self.group.admits(gid);
        self.shared.counts.links_not_listed += u64::from(!admitted);
        admitted
    }

    /// The peer's end of a further link is known.
    pub(super) fn connect_link(&mut self, number: LinkNumber, theirs: QpAddress) -> ActionOutcome {
        let admitted = self.admits(theirs.gid);
        let opening = |link: &Link<N::Opening>| {
            link.number == number && matches!(link.state, LinkState::Opening(_))
        };
        let place = self.group.links.iter().rposition(opening);
        let place = place.expect("the machine connects a link that it has had opened");
        let (name, port) = (self.group.links[place].id, self.group.links[place].port);
        let agreement = self.group.agreement;
        let connected = admitted.then(|| self.group.links[place].connect(theirs, &agreement));
        let Some(Ok(qp)) = connected else {
            self.drop_link(name);
            return ActionOutcome::Unreachable(number);
        };
        let activity = Arc::clone(&self.group.links[place].activity);
        self.command(port, Command::AddLink { link: name, group: self.group.id, qp, activity });
        ActionOutcome::Connected(number)
    }

    /// The link will be deleted in order: its connections go elsewhere first. If nothing else can
    /// carry them, what the machine does next ends them.
    pub(super) fn vacate_link(&mut self, number: LinkNumber) -> Option<ActionOutcome> {
        let link = self.group.numbered(number).map(|link| link.id);
        let moves = link.is_some_and(|link| self.move_all(link, Leaving::Orderly));
        (!moves).then_some(ActionOutcome::Vacated(number))
    }

    /// The link is down: its connections go on over another one, or end.
    pub(super) fn leave_link(&mut self, number: LinkNumber, cause: Cause) {
        // A link that could not be opened or connected is gone already.
        let Some(link) = self.group.numbered(number) else { return };
        let (name, port) = (link.id, link.port);
        // A server that has confirmed it sooner than we puts connections on it at once.
        let carries = link.confirmed || !self.group.relayed_on(name).is_empty();
        let link = self.group.numbered_mut(number).expect("it was just looked at");
        match &mut link.state {
            LinkState::Opening(_) => self.drop_link(name),
            // They are on their way already; the queue pair goes when the last is gone.
            LinkState::Leaving(leaving) => {
                *leaving = Leaving::Disorderly;
                self.command(port, Command::FailLink { link: name });
            }
            LinkState::Polled if carries => self.fail_over(name, cause),
            LinkState::Polled | LinkState::Vacated => self.retire(name),
            LinkState::Retiring => unreachable!("its number is no longer its own"),
        }
    }

    fn fail_over(&mut self, name: LinkId, cause: Cause) {
        let moved = self.move_all(name, Leaving::Disorderly);
        let link = self.group.link(name).expect("a link that connections leave stays until then");
        let port = link.port;
        let rnic = &self.shared.ports[port.0].name;
        let outcome = if moved { "its connections move" } else { "no other can take over" };
        tracing::warn!(
            group = self.group.id.0,
            link = name.0,
            number = link.number.0,
            rnic,
            gid = %link.ours.gid,
            ?cause,
            connections = self.group.members_on(name),
            "a link is down: {outcome}"
        );
        if moved {
            self.shared.counts.links_failed_over += 1;
            // What is outstanding ends now, instead of when retries are exceeded.
            self.command(port, Command::FailLink { link: name });
        } else {
            self.shared.counts.links_lost += 1;
            // RFC 7609 4.8.3 #3: reset connections without any link
            self.command(port, Command::FailConnections { link: name });
            self.retire(name);
        }
    }

    /// Tells the poller to give a queue pair up.
    pub(super) fn retire(&mut self, link: LinkId) {
        let found = self.group.link_mut(link).expect("a link is retired while its poller has it");
        found.state = LinkState::Retiring;
        let port = found.port;
        self.command(port, Command::RetireLink { link });
    }

    /// Forgets a link whose queue pair is gone, and what it stood on if it was the last there.
    pub(super) fn drop_link(&mut self, link: LinkId) {
        let index = self.group.links.iter().position(|other| other.id == link);
        let index = index.expect("a link is dropped once");
        let port = self.group.links.remove(index).port;
        self.shared.forget_link(link, port);
        self.leave_port(port);
    }

    /// The group is over: fails its connections and gives up its queue pairs.
    pub(super) fn end(&mut self, cause: Cause) {
        let group = &mut *self.group;
        let connections = group.members.len();
        tracing::info!(group = group.id.0, ?cause, connections, "link group ends");
        group.phase = Phase::Ending;
        if cause != Cause::Idle {
            self.shared.counts.groups_lost += 1;
        }
        let mut unopened = Vec::new();
        group.links.retain_mut(|link| {
            match std::mem::replace(&mut link.state, LinkState::Retiring) {
                LinkState::Opening(_) => {
                    unopened.push((link.id, link.port));
                    return false;
                }
                LinkState::Retiring => {}
                LinkState::Polled | LinkState::Leaving(_) | LinkState::Vacated => {
                    let pollers = &mut self.shared.pollers;
                    // RFC 7609 3.5.4 #9: end connections of deleted group
                    // RFC 7609 3.5.4 #12: reset connections when client ends group
                    // RFC 7609 4.8.3 #3: reset connections without any link
                    pollers.command(link.port, Command::FailConnections { link: link.id });
                    pollers.command(link.port, Command::RetireLink { link: link.id });
                }
            }
            true
        });
        for (link, port) in unopened {
            self.shared.forget_link(link, port);
            // The port may be closed before the group has gone.
            if self.group.domains.contains_key(&port) {
                self.leave_port(port);
            }
        }
        self.shared.events.push_back(Event::Ended(self.group.id));
    }

    /// Registers what the group has with an RNIC, in a domain of its own there.
    fn enter_port(&mut self, port: PortId) -> Result<(), Exhausted> {
        let rnic = self.shared.ports[port.0].rnic.as_mut();
        let rnic = rnic.expect("a port without an RNIC is chosen for no link");
        if self.group.domains.contains_key(&port) {
            return Ok(());
        }
        // RFC 7609 2.1 #6: one remote peer per RMB
        let domain = rnic.open_domain()?;
        self.group.domains.insert(port, domain);
        // RFC 7609 2.1 #3: one RToken per RMB and link
        // RFC 7609 2.2 #4: same RMBs on all links
        let budget = &mut self.shared.budget;
        if self.group.stock.register(port, domain, rnic, budget).is_err() {
            self.leave_port(port);
            return Err(Exhausted);
        }
        Ok(())
    }

    /// Withdraws the group from an RNIC on which it has no link left.
    pub(super) fn leave_port(&mut self, port: PortId) {
        if self.group.links.iter().any(|link| link.port == port) {
            return;
        }
        let domain = self.group.domains.remove(&port);
        let domain = domain.expect("a group has a domain wherever it has or opens a link");
        let rnic = self.shared.ports[port.0].rnic.as_mut();
        let rnic = rnic.expect("a domain is one of an RNIC");
        self.group.stock.withdraw(port, rnic);
        rnic.close_domain(domain);
    }
}
