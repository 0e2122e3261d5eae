//! The memory of a group: RMBs added ahead of need, elements that rest, RMBs that are idle.

use smcr_memory::Rmbe;
use smcr_proto::{Instant, LinkNumber, Rkey, RmbeSize};
use smcr_rnic::{Exhausted, Registration, Rnic};

use super::group::{Group, GroupId, Link, Phase};
use super::ports::{Pollers, PortId, QpOf};
use super::stock::Standing;
use super::{Event, Groups, Refusal};
use smcr_proto::link_group::RmbIndex;

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// An element for a connection. If few are left, the next RMB is announced already.
    pub(super) fn take_element(
        &mut self,
        now: Instant,
        id: GroupId,
        size: RmbeSize,
    ) -> Result<Rmbe, Refusal> {
        let group = self.groups.get_mut(&id).ok_or(Refusal::NoLink)?;
        if matches!(group.phase, Phase::Opening) && group.stock.rmbs() == 0 {
            // The peer learns of it by CLC.
            self.grow(now, id, Standing::Known, size).map_err(|Exhausted| Refusal::NoMemory)?;
        }
        let group = self.groups.get_mut(&id).ok_or(Refusal::NoLink)?;
        // RFC 7609 3.5.2.1-4, 3.5.2.2-5
        let taken = group.stock.take(size, &mut self.budget);
        let taken = taken.map_err(|Exhausted| Refusal::NoMemory)?;
        // A group that will be full soon needs no RMB for connections that it will not take in.
        let still_to_come = group.members_max().saturating_sub(group.members.len() + 1);
        let suffices = taken.is_some() && group.stock.free(size) as usize >= still_to_come;
        // Before the first link is connected the peer cannot be told of an RMB, and would never be.
        let tells = group.machine().is_some();
        if tells && group.stock.runs_low(size) && !suffices {
            let announced = self.announce(now, id, size);
            if taken.is_none() {
                announced.map_err(|Exhausted| Refusal::NoMemory)?;
            }
        }
        taken.ok_or(Refusal::NotYet)
    }

    /// Another RMB, made known to the peer before anybody needs it.
    fn announce(&mut self, now: Instant, id: GroupId, size: RmbeSize) -> Result<(), Exhausted> {
        let index = self.grow(now, id, Standing::Announced, size)?;
        let Some(group) = self.groups.get(&id) else { return Err(Exhausted) };
        let keys = keys_by_link(group, index);
        // RFC 7609 3.5.5.2-1, 3.5.5.2.1-4, 3.5.2.1-7, 3.5.2.2-6
        self.with_machine(now, id, |machine| machine.announce_rmb(now, index, &keys));
        Ok(())
    }

    /// Tells the machine what the peer learns of our first RMB by CLC.
    pub(super) fn tell_own_rmb(&mut self, now: Instant, id: GroupId) {
        let Some(group) = self.groups.get(&id) else { return };
        let Some(index) = group.stock.first() else { return };
        let keys = keys_by_link(group, index);
        self.with_machine(now, id, |machine| machine.own_rmb(index, &keys));
    }

    /// The peer knows an RMB: its elements can be offered.
    pub(super) fn rmb_confirmed(&mut self, id: GroupId, index: RmbIndex) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        group.stock.set_standing(index, Standing::Known);
        self.events.push_back(Event::ElementsChanged(id));
    }

    /// The peer has no room for an RMB, or does not know it any more.
    pub(super) fn rmb_gone(&mut self, id: GroupId, index: RmbIndex) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let keys = group.stock.discard(index);
        self.deregister(keys);
        self.events.push_back(Event::ElementsChanged(id));
    }

    /// Withdraws an RMB that has long been idle.
    pub(super) fn withdraw_idle(&mut self, now: Instant, id: GroupId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Some(index) = group.stock.long_idle(now) else { return };
        group.stock.set_standing(index, Standing::Withdrawn);
        tracing::debug!(group = id.0, index = index.0, "an idle RMB is withdrawn");
        self.with_machine(now, id, |machine| machine.withdraw_rmb(now, index));
    }

    /// Gives elements back whose time of rest is over.
    pub(super) fn end_quarantine(&mut self, now: Instant, id: GroupId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        while let Some((_, rmbe)) = group.quarantine.pop_front_if(|(until, _)| *until <= now) {
            group.stock.give_back(now, rmbe, &mut self.budget);
        }
    }

    /// Another RMB, registered with every RNIC of the group.
    fn grow(
        &mut self,
        now: Instant,
        id: GroupId,
        standing: Standing,
        size: RmbeSize,
    ) -> Result<RmbIndex, Exhausted> {
        let group = self.groups.get_mut(&id).ok_or(Exhausted)?;
        let index = group.stock.grow(now, standing, size)?;
        for (port, domain) in group.domains.clone() {
            let rnic = self.ports[port.0].rnic.as_mut().ok_or(Exhausted)?;
            // RFC 7609 2.1-3, 2.2-4
            if group.stock.register(port, domain, rnic).is_err() {
                let keys = group.stock.discard(index);
                self.deregister(keys);
                return Err(Exhausted);
            }
        }
        Ok(index)
    }

    fn deregister(&mut self, keys: Vec<(PortId, Registration)>) {
        for (port, registration) in keys {
            if let Some(rnic) = self.ports[port.0].rnic.as_mut() {
                rnic.deregister(registration);
            }
        }
    }
}

/// What an RMB is called on every link of a group.
fn keys_by_link<O>(group: &Group<O>, index: RmbIndex) -> Vec<(LinkNumber, Rkey, u64)> {
    let keys = group.stock.keys_of(index);
    let alive = group.links.iter().filter(|link| link.is_alive());
    let key_on = |link: &Link<O>| {
        let (_, rkey, address) = keys.iter().find(|(port, ..)| *port == link.port)?;
        Some((link.number, *rkey, *address))
    };
    alive.filter_map(key_on).collect()
}
