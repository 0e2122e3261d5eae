//! Link groups: queue pairs, memory and the machine of `smcr-proto`, over all RNICs.
//!
//! Nothing here knows a socket, a clock or a configuration file: time and NIC come in as arguments,
//! commands go out through [`Pollers`], and what the owner must know waits in
//! [`poll_event`](Groups::poll_event). The gateway runs it over its reactor, a simulator over a
//! virtual clock.
//!
//! ```text
//!   Groups ── which groups there are, and when each must be looked at
//!     │ input
//!   GroupMut ── one group, while something happens to it
//!     ├─ Group ── its links, its memory, its connections, its machine
//!     └─ Shared ── RNICs, pollers, budget, counts, events
//! ```
//! Whatever happens to a group goes through `Groups::input`: it changes the group and feeds its
//! machine, then does once what the machine demands, then looks whether the group is over. A group
//! cannot reach `Groups`, so nothing in there begins an input of its own.
//!
//! A group lives as long as its machine says. When that terminates, the connections on it are
//! failed, the queue pairs are retired, and once all of them and all elements are back, its memory
//! is withdrawn.
//!
//! - [`group`] is one link group and its links, `shared` what all of them share, and `group_mut`
//!   both together;
//! - `first_contact` begins a group;
//! - `machine` does what the machine of a group demands; `links` opens and loses the links beyond
//!   the first, `moves` finds their connections another place, and `left` remembers which;
//! - `claims` is whom we believe what about a group, `throttle` how often that is logged;
//! - `choice` is which group and which port a new connection gets;
//! - `proof` is whether a link still carries;
//! - `due` is when which group must be looked at;
//! - [`members`] is which connection holds what of a group, `offers` what its peer has for it;
//! - `memory` grows and shrinks what a group has of it;
//! - [`stock`] is RMBs and their elements, [`slots`] the slots of connections;
//! - `operate` is what operators do to them, `leaving_ports` what another configuration does;
//! - [`ports`] is what groups stand on.

mod choice;
mod claims;
mod first_contact;
pub mod group;
mod group_mut;
mod leaving_ports;
mod left;
mod links;
mod machine;
pub mod members;
mod memory;
mod moves;
mod offers;
mod operate;
pub mod ports;
mod proof;
mod shared;
pub mod slots;
pub mod stock;
mod throttle;

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use smcr_engine::LinkId;
use smcr_engine::limits::CONNECTIONS_MAX;
use smcr_proto::Instant;
use smcr_proto::link::Cause;
use smcr_proto::wire::llc::DeleteReason;
use smcr_rnic::Rnic;

use crate::deadlines::Deadlines;
pub use choice::Unnamed;
pub use group::{Group, GroupId, Link, Member, Peer, Phase};
use group_mut::GroupMut;
pub use members::{Ends, Joined, Refusal};
pub use offers::{BadOffer, Taken};
pub use ports::{Lan, Pollers, Port, PortId, QpOf};
pub use proof::Proof;
use shared::Shared;
pub use shared::{Counts, Event, Settings};
use slots::Slots;
pub use throttle::Throttle;

/// All link groups of a process.
pub struct Groups<N: Rnic, P: Pollers<QpOf<N>>> {
    groups: BTreeMap<GroupId, Group<N::Opening>>,
    groups_made: u32,
    /// When which group must be looked at.
    due: Deadlines<GroupId>,
    /// The groups that each address founded, oldest first.
    founded_by: HashMap<IpAddr, Vec<GroupId>>,
    /// The group of the connection in each slot.
    members: Box<[Option<GroupId>]>,
    slots: Slots,
    shared: Shared<N, P>,
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// No groups yet.
    ///
    /// `entropy` is what the names of connections are drawn from. Must not be predictable.
    pub fn new(
        settings: Settings,
        ports: Vec<Port<N>>,
        pollers: P,
        entropy: Box<dyn FnMut() -> u32 + Send>,
    ) -> Self {
        Self {
            groups: BTreeMap::new(),
            groups_made: 0,
            due: Deadlines::default(),
            founded_by: HashMap::new(),
            members: vec![None; CONNECTIONS_MAX].into(),
            slots: Slots::new(entropy),
            shared: Shared::new(settings, ports, pollers),
        }
    }

    /// The operator has decided anew. Groups that exist keep what they began with.
    pub fn change(&mut self, settings: Settings) {
        self.shared.change(settings);
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
        self.shared.counts
    }

    /// The ports, by index.
    pub fn ports(&self) -> &[Port<N>] {
        &self.shared.ports
    }

    /// The pollers.
    pub fn pollers(&self) -> &P {
        &self.shared.pollers
    }

    /// The pollers, for what link groups have no part in.
    pub fn pollers_mut(&mut self) -> &mut P {
        &mut self.shared.pollers
    }

    /// The slots of all connections, those that stay TCP included.
    pub fn slots_mut(&mut self) -> &mut Slots {
        &mut self.slots
    }

    /// Every group, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (GroupId, &Group<N::Opening>)> {
        self.groups.iter().map(|(id, group)| (*id, group))
    }

    /// The groups that this address founded, oldest first.
    fn founded_by(&self, source: IpAddr) -> impl Iterator<Item = (GroupId, &Group<N::Opening>)> {
        let ids = self.founded_by.get(&source).into_iter().flatten();
        ids.map(|id| (*id, &self.groups[id]))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The group, unless it is gone.
    pub fn at(&self, id: GroupId) -> Option<&Group<N::Opening>> {
        self.groups.get(&id)
    }

    /// What the peer calls a link.
    pub fn number_of(&self, link: LinkId) -> Option<u8> {
        self.locate(link).map(|(_, number)| number.0)
    }

    /// What the owner must know, oldest first. Drain it after every input.
    #[must_use]
    pub fn poll_event(&mut self) -> Option<Event> {
        self.shared.events.pop_front()
    }

    /// Somebody has reason to believe that the peer of this group is dead: ask it, on every link.
    /// It has as long to answer as at any other time: a Linux program that half-closes looks the
    /// same.
    pub fn probe(&mut self, now: Instant, id: GroupId) {
        self.input(now, id, |group| group.probe(now));
    }

    /// Ends a group by an operator's or our own decision.
    pub fn shut_down(&mut self, now: Instant, id: GroupId, reason: DeleteReason) {
        self.input(now, id, |group| group.feed(|machine| machine.shutdown(now, reason)));
    }

    /// A group whose first contact is going on is not wanted any more. If its link is up already,
    /// the peer may believe in it, and is told.
    pub fn give_up(&mut self, now: Instant, id: GroupId) {
        self.shut_down(now, id, DeleteReason::PROGRAM);
        self.input(now, id, |group| {
            if !group.group.is_over() {
                group.end(Cause::DeletedByUs);
            }
        });
    }

    /// Does what is due.
    pub fn expire(&mut self, now: Instant) {
        let due = self.due.until(now);
        for id in due {
            let found = self.input(now, id, |group| {
                group.end_quarantine(now);
                group.withdraw_idle(now);
                group.expire(now);
            });
            found.expect("what is due is a group that exists");
        }
    }

    /// When [`expire`](Self::expire) must be called, at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.due.first()
    }

    /// Lets `input` happen to a group, then does all that follows from it. None if the group is
    /// gone.
    fn input<R>(
        &mut self,
        now: Instant,
        id: GroupId,
        input: impl FnOnce(&mut GroupMut<'_, N, P>) -> R,
    ) -> Option<R> {
        let mut group = self.group_mut(id)?;
        let result = input(&mut group);
        group.run(now);
        if group.is_finished(now) {
            self.remove(id);
        }
        // A thousand groups must not be asked each time that anything happens.
        self.due.set(id, self.groups.get(&id).and_then(Group::deadline));
        Some(result)
    }

    /// Borrows a group, for `input` and for changes that do not involve its state machine.
    fn group_mut(&mut self, id: GroupId) -> Option<GroupMut<'_, N, P>> {
        let group = self.groups.get_mut(&id)?;
        Some(GroupMut { group, shared: &mut self.shared })
    }

    /// Withdraws the memory of a group that is over, and of which nothing is in use.
    fn remove(&mut self, id: GroupId) {
        let mut group = self.groups.remove(&id).expect("it was just looked at");
        let founder = group.peer.source;
        let founded = self.founded_by.get_mut(&founder).expect("it has founded this one");
        founded.retain(|other| *other != id);
        if founded.is_empty() {
            self.founded_by.remove(&founder);
        }
        for (port, domain) in group.domains {
            let rnic = self.shared.ports[port.0].rnic.as_mut();
            let rnic = rnic.expect("a domain is one of an RNIC");
            group.stock.withdraw(port, rnic);
            rnic.close_domain(domain);
        }
        group.stock.close(&mut self.shared.budget);
    }
}

#[cfg(test)]
mod tests;
