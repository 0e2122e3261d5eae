//! What operators, network devices and RNICs do to links: delete, add, down, up.

use smcr_engine::LinkId;
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_proto::wire::llc::DeleteReason;
use smcr_proto::{Gid, Instant};
use smcr_rnic::{Event, Rnic};

use super::Groups;
use super::group::{Group, GroupId, Phase};
use super::ports::{Pollers, PortId, QpOf};
use crate::operate::OperateError;

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// Deletes a link; with the last one its group ends.
    ///
    /// # Errors
    ///
    /// If there is no such link.
    pub fn delete_link(
        &mut self,
        now: Instant,
        link: LinkId,
        orderly: bool,
    ) -> Result<(), OperateError> {
        let unknown = || OperateError::Unknown(format!("link {}", link.0));
        let (id, number) = self.locate(link).ok_or_else(unknown)?;
        // RFC 7609 3.5.4 #5: ask server on operator's command
        self.input(now, id, |group| {
            group.feed(|machine| {
                machine.delete_link(now, number, DeleteReason::OPERATOR, orderly);
            });
        });
        Ok(())
    }

    /// Asks for another link in a group.
    ///
    /// # Errors
    ///
    /// If there is no such group, or no RNIC that it could be on.
    pub fn add_link(&mut self, now: Instant, id: GroupId) -> Result<(), OperateError> {
        let unknown = || OperateError::Unknown(format!("link group {}", id.0));
        let group = self.at(id).ok_or_else(unknown)?;
        let port = self.shared.port_for_link(group, None);
        let Some(port) = port.and_then(|port| self.ports()[port.0].address()) else {
            return Err(OperateError::Refused("no RNIC is left for another link".to_owned()));
        };
        self.input(now, id, |group| group.feed(|machine| machine.want_link(now, port)));
        Ok(())
    }

    /// An RNIC is not to be used: its links go down, in order or at once.
    ///
    /// # Errors
    ///
    /// If there is none of this name.
    pub fn rnic_down(
        &mut self,
        now: Instant,
        name: &str,
        orderly: bool,
    ) -> Result<(), OperateError> {
        for port in self.ports_named(name)? {
            self.shared.ports[port.0].wanted = false;
            tracing::warn!(rnic = name, orderly, "an RNIC is taken out of use");
            self.vacate_port(now, port, orderly);
        }
        Ok(())
    }

    /// An RNIC can be used again: groups get links on it.
    ///
    /// # Errors
    ///
    /// If there is none of this name.
    pub fn rnic_up(&mut self, now: Instant, name: &str) -> Result<(), OperateError> {
        for port in self.ports_named(name)? {
            self.shared.ports[port.0].wanted = true;
            tracing::info!(rnic = name, "an RNIC is back in use");
            self.offer_port(now, port);
        }
        Ok(())
    }

    /// The network of a port came or went. A port without an RNIC has none, and nothing is said.
    pub fn carrier_changed(&mut self, now: Instant, port: PortId, carrier: bool) {
        let entry = &mut self.shared.ports[port.0];
        if entry.rnic.is_none() || std::mem::replace(&mut entry.carrier, carrier) == carrier {
            return;
        }
        let rnic = &entry.name;
        if carrier {
            tracing::info!(rnic, "the network of an RNIC is back");
            self.offer_port(now, port);
        } else {
            tracing::warn!(rnic, "the network of an RNIC is gone");
            self.vacate_port(now, port, false);
        }
    }

    /// Acts on what RNICs have said since the last call. Returns the ports that have another
    /// address now; the caller says in which [subnet](Self::readdressed).
    #[must_use]
    pub fn hear_rnics(&mut self, now: Instant) -> Vec<PortId> {
        let mut readdressed = Vec::new();
        for port in (0..self.shared.ports.len()).map(PortId) {
            while let Some(event) = self.shared.ports[port.0].next_event() {
                match event {
                    Event::Suspicion(suspicion) => {
                        self.shared.ports[port.0].log_suspicion(suspicion);
                    }
                    Event::Up => self.life_changed(now, port, true, "an RNIC works again"),
                    Event::Down => self.life_changed(now, port, false, "an RNIC does not work"),
                    Event::Gone => {
                        let what = "an RNIC is gone: it is used again after a restart only";
                        self.life_changed(now, port, false, what);
                    }
                    Event::Readdressed => readdressed.push(port),
                }
            }
        }
        readdressed
    }

    /// A port has another address now, in this subnet. Its links reach nobody any more.
    pub fn readdressed(&mut self, now: Instant, port: PortId, subnet: Ipv4Subnet) {
        let entry = &mut self.shared.ports[port.0];
        entry.subnet = subnet;
        let (rnic, address) = (&entry.name, entry.address().map(|(gid, _)| gid.to_ip()));
        tracing::warn!(rnic, ?address, "an RNIC has another address");
        self.vacate_port(now, port, false);
        self.offer_port(now, port);
    }

    /// An RNIC has said whether it works.
    fn life_changed(&mut self, now: Instant, port: PortId, alive: bool, what: &str) {
        let entry = &mut self.shared.ports[port.0];
        if std::mem::replace(&mut entry.alive, alive) == alive {
            return;
        }
        let rnic = &entry.name;
        if alive {
            tracing::info!(rnic, "{what}");
            self.offer_port(now, port);
        } else {
            tracing::warn!(rnic, "{what}");
            self.vacate_port(now, port, false);
        }
    }

    fn ports_named(&self, name: &str) -> Result<Vec<PortId>, OperateError> {
        let named = self.ports().iter().enumerate().filter(|(_, port)| port.name == name);
        let found: Vec<_> = named.map(|(index, _)| PortId(index)).collect();
        if found.is_empty() {
            return Err(OperateError::Unknown(format!("RNIC named {name}")));
        }
        Ok(found)
    }

    /// Tells every group that could use a port that it is there.
    pub(super) fn offer_port(&mut self, now: Instant, port: PortId) {
        let entry = &self.shared.ports[port.0];
        // A port without an RNIC has no address, and serves TCP only. Of one that is back, the
        // operator may still want no use, or its network may be gone.
        let Some(address) = entry.address().filter(|_| entry.is_up()) else { return };
        for id in self.groups_that_could_use(port, address.0) {
            self.input(now, id, |group| group.feed(|machine| machine.want_link(now, address)));
        }
    }

    /// Lets groups forget addresses of ports that are not in use: they ask for no links there.
    pub(super) fn forget_ports(&mut self) {
        let up = self.ports().iter().filter(|port| port.is_up());
        let addresses: Vec<_> = up.filter_map(|port| port.address()).collect();
        let machines = self.groups.values_mut().filter_map(Group::machine_mut);
        machines.for_each(|machine| machine.forget_ports(|known| addresses.contains(&known)));
    }

    /// Deletes every link on a port.
    fn vacate_port(&mut self, now: Instant, port: PortId, orderly: bool) {
        self.forget_ports();
        let links = |group: &Group<N::Opening>| -> Vec<_> {
            let here = group.links.iter().filter(|link| link.port == port && link.is_alive());
            here.map(|link| link.number).collect()
        };
        let affected: Vec<_> = self.iter().map(|(id, group)| (id, links(group))).collect();
        for (id, numbers) in affected.into_iter().filter(|(_, numbers)| !numbers.is_empty()) {
            if matches!(self.groups[&id].phase, Phase::Opening) {
                self.give_up(now, id);
                continue;
            }
            self.input(now, id, |group| {
                group.feed(|machine| {
                    for number in numbers {
                        if orderly {
                            machine.delete_link(now, number, DeleteReason::OPERATOR, true);
                        } else {
                            machine.link_broke(now, number);
                        }
                    }
                });
            });
        }
    }

    /// Groups on the same LAN as a port, without a link on its RNIC, which has the address `gid`.
    // RFC 7609 3.5.5.1.1 #5: offer RNIC only on its LAN
    fn groups_that_could_use(&self, port: PortId, gid: Gid) -> Vec<GroupId> {
        let could = |group: &Group<N::Opening>| {
            let mut alive = group.links.iter().filter(|link| link.is_alive());
            group.machine().is_some()
                && group.links.first().is_some_and(|link| self.shared.share_lan(link.port, port))
                && alive.all(|link| link.ours.gid != gid)
        };
        self.iter().filter(|(_, group)| could(group)).map(|(id, _)| id).collect()
    }
}
