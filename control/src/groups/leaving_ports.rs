//! RNICs that the configuration has no more, and those that it has anew.

use smcr_proto::link::State;
use smcr_proto::wire::llc::DeleteReason;
use smcr_proto::{Instant, LinkNumber};
use smcr_rnic::Rnic;

use super::Groups;
use super::group::{Group, GroupId};
use super::ports::{Pollers, Port, PortId, QpOf};

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// One more RNIC, whose poller is the last of [`pollers`](Self::pollers). Groups get links on
    /// it when its [carrier](Self::carrier_changed) comes.
    pub fn add_port(&mut self, port: Port<N>) -> PortId {
        self.shared.add_port(Port { carrier: false, ..port })
    }

    /// The configuration has a port no more. What goes over it moves elsewhere if it can, else goes
    /// on until it ends.
    pub fn retire_port(&mut self, now: Instant, port: PortId) {
        let entry = &mut self.shared.ports[port.0];
        tracing::info!(rnic = entry.name, "an RNIC is given up as soon as nothing needs it");
        (entry.retired, entry.wanted) = (true, false);
        self.forget_ports();
        for id in self.groups_on(port) {
            let Some(group) = self.at(id) else { continue };
            let elsewhere = self.shared.port_for_link(group, None);
            let address = elsewhere.and_then(|port| self.ports()[port.0].address());
            if let Some(address) = address {
                self.input(now, id, |group| group.feed(|machine| machine.want_link(now, address)));
            }
        }
        self.vacate_retired(now);
    }

    /// The configuration has a port again that was not closed yet.
    pub fn revive_port(&mut self, now: Instant, port: PortId) {
        let entry = &mut self.shared.ports[port.0];
        tracing::info!(rnic = entry.name, "an RNIC is kept after all");
        (entry.retired, entry.wanted) = (false, true);
        self.offer_port(now, port);
    }

    /// Takes links away from ports that are given up, as far as their groups have others, and ends
    /// groups there that have no connections.
    pub fn vacate_retired(&mut self, now: Instant) {
        let ports = (0..self.ports().len()).map(PortId);
        let retired = ports.filter(|port| {
            let port = &self.ports()[port.0];
            port.retired && !port.closed
        });
        for port in retired.collect::<Vec<_>>() {
            for id in self.groups_on(port) {
                self.vacate(now, id, port);
            }
        }
    }

    fn vacate(&mut self, now: Instant, id: GroupId, port: PortId) {
        let group = self.at(id).expect("it was listed just now");
        let alive = || group.links.iter().filter(|link| link.is_alive());
        // One that is still being added could not take connections.
        let stays =
            alive().any(|link| !self.ports()[link.port.0].retired && is_active(group, link.number));
        let here = alive().filter(|link| link.port == port);
        if group.is_established() && stays {
            let links: Vec<_> = here.map(|link| (link.id, link.number)).collect();
            for (link, number) in links {
                // Once is enough: who has to say it again does so.
                if self.shared.asked_to_leave.insert(link) {
                    self.input(now, id, |group| {
                        group.feed(|machine| {
                            machine.delete_link(now, number, DeleteReason::OPERATOR, true);
                        });
                    });
                }
            }
        } else if group.is_established() && group.members.is_empty() {
            self.shut_down(now, id, DeleteReason::OPERATOR);
        }
    }

    /// The ports that are given up, and that neither links nor connections need any more.
    pub fn retired_at_rest(&self) -> Vec<PortId> {
        let is_at_rest = |(index, port): &(usize, &Port<N>)| {
            let rests = port.links == 0 && self.shared.load(PortId(*index)) == 0;
            port.retired && !port.closed && rests
        };
        let ports = self.ports().iter().enumerate().filter(is_at_rest);
        ports.map(|(index, _)| PortId(index)).collect()
    }

    /// Closes a port whose poller has ended.
    pub fn close_port(&mut self, port: PortId) {
        let entry = &mut self.shared.ports[port.0];
        tracing::info!(rnic = entry.name, "an RNIC is closed");
        entry.closed = true;
        entry.rnic = None;
    }

    /// A port whose poller runs, for what needs no RNIC: one that stays, if there is one.
    ///
    /// # Panics
    ///
    /// If there is none: the last one is never closed.
    pub fn any_port(&self) -> PortId {
        let open = self.ports().iter().enumerate().filter(|(_, port)| !port.closed);
        let best = open.min_by_key(|(_, port)| port.retired);
        PortId(best.expect("the last poller is never closed").0)
    }

    /// The groups that have a link on a port.
    fn groups_on(&self, port: PortId) -> Vec<GroupId> {
        let here = self.iter().filter(|(_, group)| {
            group.links.iter().any(|link| link.port == port && link.is_alive())
        });
        here.map(|(id, _)| id).collect()
    }
}

/// Whether a link of a group can take connections.
fn is_active<O>(group: &Group<O>, number: LinkNumber) -> bool {
    let mut views = group.machine().into_iter().flat_map(|machine| machine.links());
    let state = views.find(|view| view.number == number).map(|view| view.state);
    matches!(state, Some(State::Active { .. }))
}
