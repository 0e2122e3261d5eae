//! One link group: the machine of `smcr-proto`, and what it stands on.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

pub use smcr_engine::GroupId;
use smcr_engine::handoff::Activity;
use smcr_engine::{ConnectionId, LinkId};
use smcr_memory::Rmbe;
use smcr_proto::handshake::Agreement;
use smcr_proto::link_group::{LinkGroup, Role, UNNUMBERED, Version};
use smcr_proto::wire::clc::Offer;
use smcr_proto::{Gid, Instant, LinkNumber, MacAddress, PeerId};
use smcr_rnic::{ConnectError, Domain, Messages, Opening, QpAddress};

use super::left::LeftLinks;
use super::ports::PortId;
use super::stock::Stock;
use crate::config::Peers;

/// Who is at the other end of a first contact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The peer. All zero in a Proposal that offers version 2 only, as Linux makes it.
    pub id: PeerId,
    /// Its port.
    pub gid: Gid,
    /// Its port.
    pub mac: MacAddress,
    /// Whether SMC-Rv2 is spoken with it.
    pub v2: bool,
    /// The address of its end of the TCP connection. The others are claims; this one is not.
    pub source: IpAddr,
}

impl Peer {
    /// Who made this offer.
    pub fn of(offer: &Offer, v2: bool, source: IpAddr) -> Self {
        Self { id: offer.peer_id, gid: offer.gid, mac: offer.mac, v2, source }
    }

    /// What queue pairs for it must take in: LLC of version 2 has long messages.
    pub(super) fn messages(&self) -> Messages {
        if self.v2 { Messages::Long } else { Messages::Short }
    }
}

/// The most connections of one group: as many as one RMB has elements. Deployed peers have the same
/// bound.
pub const MEMBERS_MAX: usize = 255;

/// A connection of a group.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// The link that it sends on.
    pub link: LinkId,
    /// The poller that has it, or will.
    pub port: PortId,
    /// The peer's element, once it is known.
    pub peer: Option<Offer>,
    /// The link on which `peer` is named: the one that it sends on. Where its RMB has no name on
    /// that link, because connections had left it before the peer announced the RMB, it is the one
    /// to which they went; and the order to leave keeps the name on the way.
    pub(super) named_on: LinkId,
    /// Its poller relays.
    pub(super) relayed: bool,
    /// It is to be reset.
    pub(super) aborted: bool,
    /// It has no stream: another one may follow, or not.
    pub(super) kept: bool,
    /// No other stream shall follow on it.
    pub(super) closing: bool,
    /// Another connection waits for its end.
    pub(super) awaited: bool,
}

/// One link group.
pub struct Group<O> {
    /// What pollers, logs and operators call it.
    pub id: GroupId,
    /// Our role in its first contact.
    pub role: Role,
    /// The peer.
    pub peer: Peer,
    /// What the rendezvous of the first contact came to, once the peer's end is known.
    pub agreement: Agreement,
    /// Where it is in its life.
    pub phase: Phase,
    /// What the operator has said about peers, as far as it holds for connections of the group.
    pub(super) admitted: Vec<Peers>,
    /// The peer said that it does not know the group: no connection joins it any more.
    pub(super) out_of_sync: bool,
    /// Its first link has been confirmed.
    pub(super) established: bool,
    /// Its links, oldest first, those that are being given up included.
    pub links: Vec<Link<O>>,
    /// Links that all connections were told to leave, among them some that are gone.
    pub(super) left: LeftLinks,
    /// Its RMBs.
    pub stock: Stock,
    /// Its connections, those whose rendezvous is going on included.
    pub members: BTreeMap<ConnectionId, Member>,
    /// Elements that a peer may still write, and until when they rest.
    pub(super) quarantine: VecDeque<(Instant, Rmbe)>,
    /// Its protection domain with each RNIC that it has links on.
    pub(super) domains: BTreeMap<PortId, Domain>,
}

/// Where a group is in its life.
pub enum Phase {
    /// The first queue pair waits for the address of the peer's.
    Opening,
    /// The machine runs.
    Running(Box<LinkGroup>),
    /// Over; elements or queue pairs are still out.
    Ending,
}

/// One link: a queue pair of ours, and what the control thread knows of it.
pub struct Link<O> {
    /// What pollers call it.
    pub id: LinkId,
    /// What the peer calls it. [`UNNUMBERED`] before it has a number, and after another link of the
    /// group got that number.
    pub number: LinkNumber,
    /// The RNIC and poller it lives on.
    pub port: PortId,
    /// Our end.
    pub ours: QpAddress,
    /// The peer's end, once it is known.
    pub theirs: Option<QpAddress>,
    pub(super) state: LinkState<O>,
    /// It has carried connections.
    pub(super) confirmed: bool,
    /// When it last brought something.
    pub(super) activity: Arc<Activity>,
    /// What the machine was last told of `activity`.
    pub(super) heard: Instant,
}

/// Where the queue pair of a link is.
pub(super) enum LinkState<O> {
    /// Here: it knows its own address only.
    Opening(O),
    /// With the poller.
    Polled,
    /// With the poller, which moves its connections elsewhere.
    Leaving(Leaving),
    /// With the poller; its connections are gone, and it is about to be deleted.
    Vacated,
    /// With the poller, which was told to give it up.
    Retiring,
}

/// Why connections leave a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// It will be deleted; the machine waits until they have left.
    Orderly,
    /// It is down.
    Disorderly,
}

impl<O> Link<O> {
    /// A link whose queue pair knows its own address only.
    pub(super) fn new(
        now: Instant,
        id: LinkId,
        number: LinkNumber,
        port: PortId,
        ours: QpAddress,
        opening: O,
    ) -> Self {
        Self {
            id,
            number,
            port,
            ours,
            theirs: None,
            state: LinkState::Opening(opening),
            confirmed: false,
            activity: Arc::default(),
            heard: now,
        }
    }

    /// Brings the queue pair to RTS. The caller hands it to the poller, or forgets the link.
    ///
    /// # Panics
    ///
    /// If it was brought there before.
    pub(super) fn connect(
        &mut self,
        theirs: QpAddress,
        agreement: &Agreement,
    ) -> Result<O::Qp, ConnectError>
    where
        O: Opening,
    {
        let state = std::mem::replace(&mut self.state, LinkState::Polled);
        let LinkState::Opening(mut opening) = state else { panic!("a link is connected once") };
        self.theirs = Some(theirs);
        if is_dense(agreement) {
            opening.pack_densely();
        }
        opening.connect(theirs)
    }

    /// Whether it was not given up.
    pub(super) fn is_alive(&self) -> bool {
        match &self.state {
            LinkState::Opening(_) | LinkState::Polled => true,
            LinkState::Leaving(_) | LinkState::Vacated | LinkState::Retiring => false,
        }
    }

    /// Whether the peer's end of the link is this one.
    // RFC 7609 2 #1: identify a link by both ends
    pub(super) fn leads_to(&self, offer: &Offer) -> bool {
        let end = (offer.gid, offer.mac, offer.qpn);
        self.theirs.is_some_and(|theirs| (theirs.gid, theirs.mac, theirs.qpn) == end)
    }
}

impl<O> Group<O> {
    /// A group with its first link, which stands on `domain`.
    pub(super) fn new(
        id: GroupId,
        role: Role,
        peer: Peer,
        link: Link<O>,
        domain: Domain,
        stock: Stock,
    ) -> Self {
        Self {
            id,
            role,
            peer,
            agreement: Agreement::V1,
            phase: Phase::Opening,
            admitted: Vec::new(),
            out_of_sync: false,
            established: false,
            domains: BTreeMap::from([(link.port, domain)]),
            links: vec![link],
            left: LeftLinks::default(),
            stock,
            members: BTreeMap::new(),
            quarantine: VecDeque::new(),
        }
    }

    /// Whether the peer may send dense packets over any of its links.
    pub(super) fn is_dense(&self) -> bool {
        is_dense(&self.agreement)
    }

    /// The machine, while it runs.
    pub fn machine(&self) -> Option<&LinkGroup> {
        match &self.phase {
            Phase::Running(machine) => Some(machine),
            Phase::Opening | Phase::Ending => None,
        }
    }

    /// The machine, while it runs.
    pub(super) fn machine_mut(&mut self) -> Option<&mut LinkGroup> {
        match &mut self.phase {
            Phase::Running(machine) => Some(machine),
            Phase::Opening | Phase::Ending => None,
        }
    }

    /// Whether this is the group of that peer: one who claims to be it, where it came from.
    pub(super) fn is_with(&self, peer: Peer) -> bool {
        self.peer.source == peer.source && self.claims(peer)
    }

    /// Whether that peer says that it is the one of this group. In version 2 peers are known by
    /// their ports, and by their names where they have said them.
    pub(super) fn claims(&self, peer: Peer) -> bool {
        if !peer.v2 {
            return !self.peer.v2 && self.peer.id == peer.id;
        }
        let mut ports = self.links.iter().filter_map(|link| link.theirs.map(|theirs| theirs.gid));
        let known = self.peer.gid == peer.gid || ports.any(|gid| gid == peer.gid);
        let anonymous = peer.id == PeerId::default() || self.peer.id == PeerId::default();
        self.peer.v2 && known && (anonymous || self.peer.id == peer.id)
    }

    /// Whether links may lead to this port.
    pub(super) fn admits(&self, gid: Gid) -> bool {
        self.admitted.iter().all(|peers| peers.admit_gid(gid))
    }

    /// When it must be looked at, at the latest.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let machine = self.machine().and_then(LinkGroup::poll_timeout);
        let rests = self.quarantine.front().map(|(until, _)| *until);
        [machine, rests, self.stock.idle_deadline()].into_iter().flatten().min()
    }

    /// The most connections of this group.
    pub(super) fn members_max(&self) -> usize {
        match self.agreement {
            Agreement::V2(terms) => MEMBERS_MAX.min(terms.max_connections.into()),
            Agreement::V1 => MEMBERS_MAX,
        }
        .min(self.stock.connections_max())
    }

    /// Whether a router may be between the ports of this group: never in version 1.
    pub(super) fn is_routed(&self) -> bool {
        let version = self.machine().map(LinkGroup::version);
        matches!(version, Some(Version::V2 { direct: false, .. }))
    }

    /// Whether connections may join.
    pub fn is_established(&self) -> bool {
        self.machine().is_some_and(LinkGroup::is_established)
    }

    /// Whether its first contact is going on.
    pub fn is_founding(&self) -> bool {
        match &self.phase {
            Phase::Opening => true,
            Phase::Running(machine) => !machine.is_established() && !machine.is_terminated(),
            Phase::Ending => false,
        }
    }

    /// Whether connections may be given to a link.
    pub(super) fn is_usable(&self, link: &Link<O>) -> bool {
        match &link.state {
            LinkState::Opening(_) => matches!(self.phase, Phase::Opening),
            LinkState::Polled => {
                self.machine().is_some_and(|machine| machine.is_link_up(link.number))
            }
            LinkState::Leaving(_) | LinkState::Vacated | LinkState::Retiring => false,
        }
    }

    /// How many connections send on a link.
    pub fn members_on(&self, link: LinkId) -> usize {
        self.members.values().filter(|member| member.link == link).count()
    }

    /// Of some links, the one with the fewest connections. They are not counted if there is only
    /// one link.
    pub(super) fn least_used<'a>(
        &self,
        mut links: impl Iterator<Item = &'a Link<O>>,
    ) -> Option<LinkId>
    where
        O: 'a,
    {
        let first = links.next()?;
        let Some(second) = links.next() else { return Some(first.id) };
        let all = [first, second].into_iter().chain(links);
        all.min_by_key(|link| (self.members_on(link.id), link.number)).map(|link| link.id)
    }

    /// The connections that send on a link, without those whose rendezvous is going on.
    pub(super) fn relayed_on(&self, link: LinkId) -> Vec<ConnectionId> {
        let here = self.members.iter().filter(|(_, member)| member.link == link && member.relayed);
        here.map(|(connection, _)| *connection).collect()
    }

    /// Whether it has ended. Elements or queue pairs may still be out.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Ending)
    }

    /// Whether nothing of it is in use: neither queue pairs nor elements.
    pub(super) fn is_unused(&self) -> bool {
        self.links.is_empty() && self.stock.elements().1 == 0
    }

    /// The link that pollers call `id`.
    pub(super) fn link(&self, id: LinkId) -> Option<&Link<O>> {
        self.links.iter().find(|link| link.id == id)
    }

    /// The link that pollers call `id`.
    pub(super) fn link_mut(&mut self, id: LinkId) -> Option<&mut Link<O>> {
        self.links.iter_mut().find(|link| link.id == id)
    }

    /// The link that the peer calls `number` and whose queue pair was not given up.
    pub(super) fn numbered(&self, number: LinkNumber) -> Option<&Link<O>> {
        let alive = |link: &&Link<O>| !matches!(link.state, LinkState::Retiring);
        self.links.iter().filter(alive).find(|link| link.number == number)
    }

    /// The same, to change it.
    pub(super) fn numbered_mut(&mut self, number: LinkNumber) -> Option<&mut Link<O>> {
        let alive = |link: &&mut Link<O>| !matches!(link.state, LinkState::Retiring);
        self.links.iter_mut().filter(alive).find(|link| link.number == number)
    }

    /// Adds a further link.
    ///
    /// A peer may use a number again as soon as both sides have deleted the link that had it. Our
    /// poller may have that link for some time after that, until its connections have left it and
    /// its last messages are delivered. So the old link loses its number: the machine must not take
    /// what is reported of the old link for news of the new one.
    pub(super) fn add_link(&mut self, link: Link<O>) {
        for old in self.links.iter_mut().filter(|old| old.number == link.number) {
            assert!(!old.is_alive(), "a number is used again when its link is being given up");
            old.number = UNNUMBERED;
        }
        self.links.push(link);
    }
}

fn is_dense(agreement: &Agreement) -> bool {
    matches!(agreement, Agreement::V2(terms) if terms.dense_packets)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use smcr_proto::{Mtu, Psn, Qpn};

    use super::*;

    /// A peer gives a number to a new link as soon as it has forgotten the old one, while our
    /// connections are still leaving that. What is said of the number is meant for the new link.
    // RFC 7609 2.2.4 #2: use all link numbers before reuse
    #[test]
    fn a_number_that_is_used_again_means_the_new_link() {
        let peer = Peer {
            id: PeerId::default(),
            gid: Gid::default(),
            mac: MacAddress::default(),
            v2: false,
            source: Ipv4Addr::LOCALHOST.into(),
        };
        let link = |id| {
            let (gid, mac) = (peer.gid, peer.mac);
            let ours = QpAddress { gid, mac, qpn: Qpn(id), psn: Psn(0), mtu: Mtu::B1024 };
            Link::new(Instant(1), LinkId(id), LinkNumber(3), PortId(0), ours, ())
        };
        let mut old = link(1);
        old.state = LinkState::Leaving(Leaving::Disorderly);
        let stock = Stock::new(4);
        let mut group = Group::new(GroupId(1), Role::Client, peer, old, Domain(1), stock);
        group.add_link(link(2));
        assert_eq!(group.numbered(LinkNumber(3)).map(|link| link.id), Some(LinkId(2)));
        assert_eq!(group.numbered_mut(LinkNumber(3)).map(|link| link.id), Some(LinkId(2)));
        group.links[1].state = LinkState::Retiring;
        assert!(group.numbered(LinkNumber(3)).is_none(), "nor when the new one is given up");
    }
}
