//! A third host, hostile, at the doors of two gateways: it claims to be one of their peers.
//!
//! It makes Proposals in the name of another, accepts with the links of another, calls groups out
//! of sync, aborts and stays silent; on the links that it gets it does what a
//! [`Rogue`](crate::rogue::Rogue) does. It does not have the TCP address of anybody else.

use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::time::Duration;

use smcgate::groups::{GroupId, Groups, Joined, Peer, PortId, Taken};
use smcgate_tests::{run_all, seeds};
use smcr_proto::handshake::Agreement;
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::Offer;
use smcr_proto::{Instant, PeerId, Rkey};
use smcr_rnic::dice::Chance;
use smcr_rnic::sim::{self, Network, Odds};

use super::gateway::{Mailboxes, peer_id};
use super::rendezvous::{CLIENTS, Hosts, SERVERS};
use super::swarm::{Seen, Swarm};
use crate::rogue::{Attempts, GID, Known, MAC, Rogue, SIZE};

/// The hostile host.
pub(crate) struct Stranger {
    rogue: Rogue,
    /// Nobody can tell its TCP connections from those of others.
    blends_in: bool,
    agreement: Agreement,
    contacts: Vec<Contact>,
    /// Proposals, Accepts and Declines in the name of another.
    claims: u64,
}

/// A rendezvous that goes on.
struct Contact {
    /// With which gateway.
    host: usize,
    group: GroupId,
    joined: Joined,
    /// It begins a group.
    founds: bool,
}

type SimGroups = Groups<sim::Rnic, Mailboxes>;

impl Stranger {
    pub(crate) fn new(seed: u64, network: &Network, agreement: Agreement) -> Self {
        let rogue = Rogue::new(seed, network);
        Self { rogue, blends_in: false, agreement, contacts: Vec::new(), claims: 0 }
    }

    /// From now on nobody can tell its TCP connections from those of others.
    pub(super) fn come_from_where_others_are(&mut self) {
        self.blends_in = true;
    }

    /// Where its TCP connections come from, or lead to, where it plays this role.
    fn source(&self, role: Role) -> IpAddr {
        match role {
            _ if !self.blends_in => SOURCE,
            Role::Client => CLIENTS.into(),
            Role::Server => SERVERS,
        }
    }

    /// What arrived of what it has tried on its links.
    pub(super) fn attempts(&self) -> Attempts {
        self.rogue.attempts
    }

    /// Does one thing that it should not.
    pub(crate) fn act(&mut self, now: Instant, hosts: &mut Hosts) {
        match self.rogue.dice.below(20) {
            0 | 1 => self.propose(now, hosts),
            2 => self.accept(now, hosts),
            3 => self.call_out_of_sync(now, hosts),
            4 => self.let_go(now, hosts),
            _ => {
                let [one, other] = hosts;
                self.rogue.forge(&Known::of([&one.groups, &other.groups]));
            }
        }
    }

    /// Takes in what its queue pairs brought. Returns whether there was anything.
    pub(crate) fn turn(&mut self, now: Instant) -> bool {
        self.rogue.turn(now)
    }

    /// What it claims to be towards `victim`: now itself, now one of the others.
    fn claim(&mut self, hosts: &Hosts, victim: usize) -> Peer {
        let other = 1 - victim;
        let gids = &hosts[other].gids;
        let id = peer_id(u8::try_from(other + 1).expect("two hosts"));
        let id = [id, id, PeerId::default(), PeerId([6; 8])][self.rogue.dice.index(4)];
        let gid = [gids[self.rogue.dice.index(gids.len())], GID][self.rogue.dice.index(2)];
        let v2 = self.agreement != Agreement::V1;
        Peer { id, gid, mac: MAC, v2, source: self.source(Role::Client) }
    }

    /// Sends a Proposal, and whatever comes next.
    fn propose(&mut self, now: Instant, hosts: &mut Hosts) {
        let host = self.rogue.dice.index(2);
        let claim = self.claim(hosts, host);
        self.claims += u64::from(claim.id != PeerId([6; 8]) || claim.gid != GID);
        let port = PortId(self.rogue.dice.index(hosts[host].gids.len()));
        let groups = &mut hosts[host].groups;
        if let Some(group) = groups.joinable(port, claim) {
            self.intrude(now, groups, host, group);
        } else if groups.founding(port, claim).is_none() {
            self.found(now, groups, host, port, claim);
        }
    }

    /// Accepts the Proposal of a gateway by a link that it has with somebody else.
    fn accept(&mut self, now: Instant, hosts: &mut Hosts) {
        let host = self.rogue.dice.index(2);
        let groups = &mut hosts[host].groups;
        let ends = groups.iter().filter(|(_, group)| group.role == Role::Client);
        let ends = ends.flat_map(|(_, group)| group.members.values().filter_map(|one| one.peer));
        let ends: Vec<Offer> = ends.collect();
        if ends.is_empty() {
            return;
        }
        let named = ends[self.rogue.dice.index(ends.len())];
        let rkey = Rkey(named.rkey.0 ^ 1 << self.rogue.dice.below(32));
        let (v2, source) = (self.agreement != Agreement::V1, self.source(Role::Server));
        self.claims += 1;
        if let Ok((group, _)) =
            groups.named_by(now, &Offer { rkey, ..named }, v2, source, PortId(0))
        {
            self.intrude(now, groups, host, group);
        }
    }

    /// A gateway let it into a group that it had. It offers the element of another's connection as
    /// its own.
    fn intrude(&mut self, now: Instant, groups: &mut SimGroups, host: usize, group: GroupId) {
        let Some(link) = groups.best_link(group) else { return };
        let Ok(joined) = groups.join(now, group, link, SIZE) else { return };
        let connection = joined.connection;
        let offers = groups.at(group).expect("it was joined").members.values();
        let offers: Vec<Offer> = offers.filter_map(|one| one.peer).collect();
        if !offers.is_empty() {
            let offer = offers[self.rogue.dice.index(offers.len())];
            if groups.accept_offer(now, connection, &offer) == Ok(Taken::Awaited) {
                // It does not matter to it what becomes of that.
                let _ = groups.insist_on_offer(now, connection, &offer);
            }
        }
        self.contacts.push(Contact { host, group, joined, founds: false });
    }

    /// A first contact. It may stay silent from here on.
    fn found(
        &mut self,
        now: Instant,
        groups: &mut SimGroups,
        host: usize,
        port: PortId,
        claim: Peer,
    ) {
        let Ok(group) = groups.open(now, port, Role::Server, claim) else { return };
        let link = groups.best_link(group).expect("a new group has a link");
        let Ok(joined) = groups.join(now, group, link, SIZE) else {
            groups.give_up(now, group);
            return;
        };
        let accept = joined.offer;
        self.contacts.push(Contact { host, group, joined, founds: true });
        if self.rogue.dice.roll(Chance::percent(25)) {
            return;
        }
        let Some(opening) = self.rogue.open() else { return };
        let confirm = self.rogue.offer(claim.id, &opening);
        if groups.connect(now, group, &confirm, self.agreement).is_ok() {
            self.rogue.connect(now, (host, claim.v2), opening, &accept);
        }
    }

    /// Says that a gateway is out of sync, as the peer of any group.
    fn call_out_of_sync(&mut self, now: Instant, hosts: &mut Hosts) {
        let groups = &mut hosts[self.rogue.dice.index(2)].groups;
        let ids: Vec<_> = groups.iter().map(|(id, _)| id).collect();
        if !ids.is_empty() {
            self.claims += 1;
            let id = ids[self.rogue.dice.index(ids.len())];
            groups.called_out_of_sync(now, id, self.source(Role::Client));
        }
    }

    /// Aborts one of its rendezvous.
    fn let_go(&mut self, now: Instant, hosts: &mut Hosts) {
        if self.contacts.is_empty() {
            return;
        }
        let Contact { host, group, joined, founds } =
            self.contacts.swap_remove(self.rogue.dice.index(self.contacts.len()));
        let groups = &mut hosts[host].groups;
        groups.leave(now, joined.connection, joined.rmbe);
        if founds && groups.at(group).is_some_and(|group| group.is_founding()) {
            groups.give_up(now, group);
        }
    }

    /// It is gone.
    pub(crate) fn depart(&mut self, now: Instant, hosts: &mut Hosts) {
        while !self.contacts.is_empty() {
            self.let_go(now, hosts);
        }
        self.rogue.depart(now);
    }
}

/// Who has no TCP address but its own touches nobody: every connection of others gets its bytes
/// and ends as its applications ended it, and each attempt is counted.
// RFC 7609 4.7.1-3, 3.5.1.2-5, 3.5.2.1-2
#[test]
fn nobody_is_touched_in_the_swarm() {
    let Range { start, end } = seeds(60);
    let seeds = start..start + (end - start).min(SEEDS_MAX);
    let count = seeds.end - seeds.start;
    let name = "nobody_is_touched_in_the_swarm";
    let runs = run_all("sim", name, seeds, |seed| Swarm::visited(seed).run());
    let mut seen = Seen::default();
    runs.iter().for_each(|one| seen.add(one));
    println!("{seen:#?}");
    let attempts = [
        "a CDC message of a stranger",
        "an LLC message of a stranger",
        "a write of a stranger is refused",
        "a claim to be another",
        "a forged CDC message is counted",
    ];
    assert!(count < 60 || attempts.into_iter().all(|what| seen.has_met(what)), "{seen:#?}");
}

impl Swarm {
    /// A swarm in which nothing goes wrong, and a stranger is about.
    pub(super) fn visited(seed: u64) -> Self {
        let odds = Odds { straggle: Chance::NEVER, ..Odds::MALICIOUS };
        let mut swarm = Self::but_for(seed, odds, |sizes| sizes.rmb_bytes = PLENTY);
        let world = &mut swarm.world;
        world.stranger = Some(Stranger::new(seed, &world.network, world.agreement));
        swarm
    }

    /// The stranger goes, and everything that it has tried was counted.
    pub(super) fn see_stranger_off(&mut self) {
        let Some(mut stranger) = self.world.stranger.take() else { return };
        stranger.depart(self.world.now, &mut self.world.hosts);
        // What it said last is on its way.
        self.world.run_for(Duration::from_secs(1));
        let hosts = &self.world.hosts;
        let Attempts { cdc, llc, refused, written } = stranger.attempts();
        assert_eq!(written, 0, "memory that was offered to others was written");
        // What a link brought that is given up may go unheard; all else is counted.
        let foreign = hosts.iter().map(|host| host.count(|all| all.cdc_foreign.get()));
        self.seen.met.note_times("a forged CDC message is counted", foreign.sum());
        self.seen.met.note_times("a CDC message of a stranger", cdc);
        self.seen.met.note_times("an LLC message of a stranger", llc);
        self.seen.met.note_times("a write of a stranger is refused", refused);
        self.seen.met.note_times("a claim to be another", stranger.claims);
    }
}

/// Where its TCP connections come from.
const SOURCE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 97, 0, 66));
/// Bytes of RMBs that are enough for everybody, whatever a stranger takes.
const PLENTY: u64 = 1 << 28;
/// One stranger does in some dozen runs all that it can do; see also `rendezvous`, where it
/// speaks CLC.
const SEEDS_MAX: u64 = 60;
