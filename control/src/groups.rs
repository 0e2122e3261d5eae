//! Link groups: queue pairs, memory and the machine of `smcr-proto`, over all RNICs.
//!
//! Nothing here knows a socket, a clock or a configuration file: time and NIC come in as arguments,
//! commands go out through [`Pollers`], and what the owner must know waits in
//! [`poll_event`](Groups::poll_event). The gateway runs it over its reactor, a simulator over a
//! virtual clock.
//!
//! A group lives as long as its machine says. When that terminates, the connections on it are
//! failed, the queue pairs are retired, and once everything is home its memory is withdrawn.
//!
//! - [`group`] is one link group and its links;
//! - `first_contact` begins a group;
//! - `machine` does what the machine of a group demands; `links` opens and loses the links beyond
//!   the first, `moves` finds their connections another place;
//! - `claims` is whom we believe what about a group;
//! - `choice` is which group and which port a new connection gets;
//! - `proof` is whether a link still carries;
//! - `due` is when which group must be looked at;
//! - [`members`] is which connection holds what of a group;
//! - `memory` grows and shrinks what a group has of it;
//! - [`stock`] is RMBs and their elements, [`slots`] the slots of connections;
//! - `operate` is what operators do to them;
//! - [`ports`] is what groups stand on.

mod choice;
mod claims;
mod due;
mod first_contact;
pub mod group;
mod links;
mod machine;
pub mod members;
mod memory;
mod moves;
mod operate;
pub mod ports;
mod proof;
pub mod slots;
pub mod stock;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use smcr_engine::{Command, LinkId};
use smcr_proto::link::{Cause, Keepalive};
use smcr_proto::wire::llc::DeleteReason;
use smcr_proto::{Instant, LinkNumber, PeerId};
use smcr_rnic::Rnic;

pub use choice::Unnamed;
use claims::Offences;
pub use claims::Throttle;
use due::Due;
use group::LinkState;
pub use group::{Group, GroupId, Link, Peer, Phase};
use members::Members;
pub use members::{BadOffer, Joined, Member, Refusal, Taken};
pub use ports::{Lan, Pollers, Port, PortId, QpOf};
use slots::Slots;
use stock::Budget;

/// What an operator decides about link groups.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Who we are.
    pub peer_id: PeerId,
    /// Elements of an RMB.
    pub rmb_elements: u8,
    /// Bytes that all RMBs together may take.
    pub rmb_bytes: u64,
    /// When links are probed.
    pub keepalive: Keepalive,
    /// How long a group without connections stays where we are the server.
    pub idle_group_server: Duration,
    /// The same where we are the client.
    pub idle_group_client: Duration,
    /// The most links of a group.
    pub max_links: u8,
}

/// What the owner must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The first contact of this group succeeded: connections may join.
    Established(GroupId),
    /// The first contact failed; if `committed`, when its connection could no longer be declined
    /// (RFC C.3).
    FirstContactFailed {
        /// The group.
        group: GroupId,
        /// The point of no return was behind.
        committed: bool,
    },
    /// Whoever was told [`Refusal::NotYet`] may try again.
    ElementsChanged(GroupId),
    /// The group is over. Its connections end one by one.
    Ended(GroupId),
}

/// What happened to link groups, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections that were aborted because the peer gave their element to another.
    pub conflicts: u64,
    /// Offers that waited for the end of the connection that had their element.
    pub offers_held: u64,
    /// Elements that rested before another connection got them, because the peer of the one before
    /// had not said that it writes no more.
    pub elements_rested: u64,
    /// Links that went down with another one there to take their connections.
    pub links_failed_over: u64,
    /// Links that went down without one.
    pub links_lost: u64,
    /// Groups that ended for any other reason than that they were idle.
    pub groups_lost: u64,
    /// Connections that went on over another link.
    pub connections_moved: u64,
    /// Times that another address than the founder's claimed to be the peer of a group.
    pub foreign_claims: u64,
    /// Times that a peer said that it does not know its group.
    pub out_of_sync: u64,
    /// Times that a client had too many link groups that carry no connection: one of them ended, or
    /// another did not begin.
    pub crowded_sources: u64,
    /// Further links that were refused because the peer's port is none that the operator listed.
    pub links_not_listed: u64,
}

/// All link groups of a process.
pub struct Groups<N: Rnic, P: Pollers<QpOf<N>>> {
    settings: Settings,
    ports: Vec<Port<N>>,
    pollers: P,
    groups: BTreeMap<GroupId, Group<N::Opening>>,
    /// When which group must be looked at.
    due: Due,
    /// The groups that each address founded, oldest first.
    founded_by: HashMap<IpAddr, Vec<GroupId>>,
    /// Which group has which link.
    group_of_link: HashMap<LinkId, GroupId>,
    groups_made: u32,
    links_made: u32,
    members: Members,
    counts: Counts,
    offences: Offences,
    slots: Slots,
    budget: Budget,
    events: VecDeque<Event>,
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
        let members = Members::new(ports.len());
        Self {
            settings,
            ports,
            pollers,
            groups: BTreeMap::new(),
            due: Due::default(),
            founded_by: HashMap::new(),
            group_of_link: HashMap::new(),
            groups_made: 0,
            links_made: 0,
            members,
            counts: Counts::default(),
            offences: Offences::default(),
            slots: Slots::new(entropy),
            budget: Budget::new(settings.rmb_bytes),
            events: VecDeque::new(),
        }
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The ports, by index.
    pub fn ports(&self) -> &[Port<N>] {
        &self.ports
    }

    /// The pollers.
    pub fn pollers(&self) -> &P {
        &self.pollers
    }

    /// The pollers, for what link groups have no part in.
    pub fn pollers_mut(&mut self) -> &mut P {
        &mut self.pollers
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
        let group = self.groups.get(self.group_of_link.get(&link)?)?;
        Some(group.link(link)?.number.0)
    }

    /// What the owner must know, oldest first. Drain it after every input.
    #[must_use]
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Somebody has reason to believe that the peer of this group is dead: ask it, on every link.
    /// It has as long to answer as at any other time: a Linux program that half-closes looks the
    /// same.
    pub fn probe(&mut self, now: Instant, id: GroupId) {
        let Some(group) = self.groups.get(&id) else { return };
        let numbers: Vec<_> = group.links.iter().map(|link| link.number).collect();
        let wait = self.settings.keepalive.reply_wait;
        self.with_machine(now, id, |machine| {
            for number in numbers {
                machine.probe(now, number, wait);
            }
        });
    }

    /// Ends a group by an operator's or our own decision.
    pub fn shut_down(&mut self, now: Instant, id: GroupId, reason: DeleteReason) {
        self.with_machine(now, id, |machine| machine.shutdown(now, reason));
    }

    /// A group whose first contact is going on is not wanted any more. If its link is up already,
    /// the peer may believe in it, and is told.
    pub fn give_up(&mut self, now: Instant, id: GroupId) {
        self.shut_down(now, id, DeleteReason::PROGRAM);
        self.end(now, id, Cause::DeletedByUs);
    }

    /// Does what is due.
    pub fn expire(&mut self, now: Instant) {
        let due: Vec<GroupId> = self.due.until(now).collect();
        for id in due {
            self.end_quarantine(now, id);
            self.withdraw_idle(now, id);
            let news = self.take_news(id);
            self.with_machine(now, id, |machine| {
                for (number, heard) in news {
                    machine.traffic(heard, number);
                }
                if machine.poll_timeout().is_some_and(|deadline| deadline <= now) {
                    machine.handle_timeout(now);
                }
            });
            self.reschedule(id);
        }
    }

    /// When [`expire`](Self::expire) must be called, at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.due.first()
    }

    /// Notes when a group must be looked at next. Call it after whatever may have changed that: a
    /// thousand groups must not be asked each time that anything happens.
    fn reschedule(&mut self, id: GroupId) {
        self.due.set(id, self.groups.get(&id).and_then(Group::deadline));
    }

    /// Which links of a group brought something since the last call, and when.
    ///
    /// Pollers only note when something came; the machine hears of it where it matters.
    fn take_news(&mut self, id: GroupId) -> Vec<(LinkNumber, Instant)> {
        let Some(group) = self.groups.get_mut(&id) else { return Vec::new() };
        let mut news = Vec::new();
        for link in &mut group.links {
            let heard = link.activity.last();
            if heard > std::mem::replace(&mut link.heard, heard) {
                news.push((link.number, heard));
            }
        }
        news
    }

    /// The group is over: fails its connections and gives up its queue pairs.
    fn end(&mut self, now: Instant, id: GroupId, cause: Cause) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if matches!(group.phase, Phase::Ending) {
            return;
        }
        tracing::info!(group = id.0, ?cause, connections = group.members.len(), "link group ends");
        if cause != Cause::Idle {
            self.counts.groups_lost += 1;
        }
        group.phase = Phase::Ending;
        let pollers = &mut self.pollers;
        let mut unopened = Vec::new();
        group.links.retain_mut(|link| {
            match std::mem::replace(&mut link.state, LinkState::Retiring) {
                LinkState::Opening(_) => {
                    unopened.push((link.id, link.port));
                    return false;
                }
                LinkState::Retiring => {}
                LinkState::Polled | LinkState::Leaving(_) | LinkState::Vacated => {
                    // RFC 7609 3.5.4-9, 3.5.4-12, 4.8.3-3
                    pollers.command(link.port, Command::FailConnections { link: link.id });
                    pollers.command(link.port, Command::RetireLink { link: link.id });
                }
            }
            true
        });
        for (link, port) in unopened {
            self.forget_link(link, port);
        }
        self.events.push_back(Event::Ended(id));
        self.bury(now, id);
        self.reschedule(id);
    }

    /// Withdraws the memory of a group that is over, once nothing of it is in use.
    fn bury(&mut self, now: Instant, id: GroupId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if !matches!(group.phase, Phase::Ending) || !group.links.is_empty() {
            return;
        }
        // Without a queue pair nobody can write them any more.
        while let Some((_, rmbe)) = group.quarantine.pop_front() {
            group.stock.give_back(now, rmbe, &mut self.budget);
        }
        if group.elements_out() {
            return;
        }
        let Some(mut group) = self.groups.remove(&id) else { return };
        self.reschedule(id);
        let founder = group.peer.source;
        let founded = self.founded_by.get_mut(&founder).expect("it has founded this one");
        founded.retain(|other| *other != id);
        if founded.is_empty() {
            self.founded_by.remove(&founder);
        }
        for (port, domain) in group.domains {
            if let Some(rnic) = self.ports[port.0].rnic.as_mut() {
                group.stock.withdraw(port, rnic);
                rnic.close_domain(domain);
            }
        }
        group.stock.close();
    }
}

#[cfg(test)]
mod tests;
