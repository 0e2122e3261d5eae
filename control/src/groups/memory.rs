//! The memory of a group: RMBs added ahead of need, elements that rest, RMBs that are idle.

use smcr_memory::Rmbe;
use smcr_proto::link_group::RmbIndex;
use smcr_proto::{Instant, LinkNumber, Rkey, RmbeSize};
use smcr_rnic::{Exhausted, Registration, Rnic};

use super::group::{Group, Link, Phase};
use super::group_mut::GroupMut;
use super::members::Refusal;
use super::ports::{Pollers, PortId, QpOf};
use super::shared::Event;
use super::stock::{Standing, size_for_one_more};

impl<N: Rnic, P: Pollers<QpOf<N>>> GroupMut<'_, N, P> {
    /// An element for a connection, no larger than `most`. If few are left, the next RMB is
    /// announced already.
    pub(super) fn take_element(&mut self, now: Instant, most: RmbeSize) -> Result<Rmbe, Refusal> {
        let least = self.shared.settings.rmbe_size_min.min(most);
        let wanted = size_for_one_more(self.shared.connections(), most, least);
        if matches!(self.group.phase, Phase::Opening) && self.group.stock.rmbs() == 0 {
            // The peer learns of it by CLC.
            self.try_sizes(wanted, least, |group, size| group.grow(now, Standing::Known, size))
                .map_err(|Exhausted| Refusal::NoMemory)?;
        }
        // Nobody waits for a size: what is there serves, and who comes later gets another.
        // RFC 7609 3.5.2.1 #4: take a free element that fits
        // RFC 7609 3.5.2.2 #5: client allocates its own element
        let (stock, budget) = (&mut self.group.stock, &mut self.shared.budget);
        let taken = stock.take_up(wanted..=most, budget);
        let taken = taken.or_else(|| stock.take_down(least..=wanted, budget));
        // A group that will be full soon needs no RMB for connections that it will not take in.
        let still_to_come = self.group.members_max().saturating_sub(self.group.members.len() + 1);
        let (stock, sizes) = (&self.group.stock, wanted..=most);
        let suffices = taken.is_some() && stock.free(&sizes) as usize >= still_to_come;
        let lacks = stock.runs_low(&sizes) || taken.is_none() && !stock.is_growing(&sizes);
        // Before the machine runs nobody can be told of another RMB.
        let is_told = self.group.machine().is_some();
        if is_told && lacks && !suffices {
            // Whoever has no element waits for whatever is under way.
            let _ = self.try_sizes(wanted, least, |group, size| {
                // Where there is memory for smaller ones only, not one RMB after another.
                let lacks = group.group.stock.runs_low(&(size..=size));
                if lacks { group.announce(now, size) } else { Ok(()) }
            });
        }
        let will_come = self.group.stock.is_growing(&(least..=most)) || !is_told;
        taken.ok_or(if will_come { Refusal::NotYet } else { Refusal::NoMemory })
    }

    /// Does something with an RMB of elements of the size `most`, or of half that, and so on, until
    /// there is memory for it.
    fn try_sizes<T>(
        &mut self,
        most: RmbeSize,
        least: RmbeSize,
        mut try_one: impl FnMut(&mut Self, RmbeSize) -> Result<T, Exhausted>,
    ) -> Result<T, Exhausted> {
        let mut size = most;
        loop {
            let has_room = self.shared.budget.has_room_for(size);
            match if has_room { try_one(self, size) } else { Err(Exhausted) } {
                Err(Exhausted) if size > least => size = size.half(),
                outcome => return outcome,
            }
        }
    }

    /// Another RMB, made known to the peer before anybody needs it.
    fn announce(&mut self, now: Instant, size: RmbeSize) -> Result<(), Exhausted> {
        let index = self.grow(now, Standing::Announced, size)?;
        let keys = keys_by_link(self.group, index);
        // RFC 7609 3.5.5.2 #1: register RMBs on all links
        // RFC 7609 3.5.5.2.1 #4: add RMBs ahead of need
        // RFC 7609 3.5.2.1 #7: CONFIRM RKEY before Accept
        // RFC 7609 3.5.2.2 #6: CONFIRM RKEY before Confirm
        self.feed(|machine| machine.announce_rmb(now, index, &keys));
        Ok(())
    }

    /// Tells the machine what the peer learns of our first RMB by CLC.
    pub(super) fn tell_own_rmb(&mut self) {
        let index = self.group.stock.first().expect("whoever connects first has an element");
        let keys = keys_by_link(self.group, index);
        self.feed(|machine| machine.own_rmb(index, &keys));
    }

    /// The peer knows an RMB: its elements can be offered.
    pub(super) fn rmb_confirmed(&mut self, index: RmbIndex) {
        self.group.stock.set_standing(index, Standing::Known);
        self.shared.events.push_back(Event::ElementsChanged(self.group.id));
    }

    /// The peer has no room for an RMB, or does not know it any more.
    pub(super) fn rmb_gone(&mut self, index: RmbIndex) {
        let keys = self.group.stock.discard(index, &mut self.shared.budget);
        self.deregister(keys);
        self.shared.events.push_back(Event::ElementsChanged(self.group.id));
    }

    /// Withdraws an RMB that has long been idle.
    pub(super) fn withdraw_idle(&mut self, now: Instant) {
        // Nearly always none is, for groups have other deadlines too.
        let Some(index) = self.group.stock.long_idle(now) else { return };
        self.group.stock.set_standing(index, Standing::Withdrawn);
        tracing::debug!(group = self.group.id.0, index = index.0, "an idle RMB is withdrawn");
        self.feed(|machine| machine.withdraw_rmb(now, index));
    }

    /// Gives elements back whose time of rest is over.
    pub(super) fn end_quarantine(&mut self, now: Instant) {
        while let Some((_, rmbe)) = self.group.quarantine.pop_front_if(|(until, _)| *until <= now) {
            self.group.stock.give_back(now, rmbe, &mut self.shared.budget);
        }
    }

    /// Gives elements back of a group without a queue pair: nobody can write them any more.
    pub(super) fn lift_quarantine(&mut self, now: Instant) {
        for (_, rmbe) in self.group.quarantine.drain(..) {
            self.group.stock.give_back(now, rmbe, &mut self.shared.budget);
        }
    }

    /// Another RMB, registered with every RNIC of the group.
    fn grow(
        &mut self,
        now: Instant,
        standing: Standing,
        size: RmbeSize,
    ) -> Result<RmbIndex, Exhausted> {
        let index = self.group.stock.grow(now, standing, size)?;
        for (port, domain) in &self.group.domains {
            let rnic = self.shared.ports[port.0].rnic.as_mut();
            let rnic = rnic.expect("a domain is one of an RNIC");
            // RFC 7609 2.1 #3: one RToken per RMB and link
            // RFC 7609 2.2 #4: same RMBs on all links
            let budget = &mut self.shared.budget;
            if self.group.stock.register(*port, *domain, rnic, budget).is_err() {
                let keys = self.group.stock.discard(index, budget);
                self.deregister(keys);
                return Err(Exhausted);
            }
        }
        Ok(index)
    }

    fn deregister(&mut self, keys: Vec<(PortId, Registration)>) {
        for (port, registration) in keys {
            let rnic = self.shared.ports[port.0].rnic.as_mut();
            rnic.expect("what is registered is registered with an RNIC").deregister(registration);
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
