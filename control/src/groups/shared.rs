//! What all link groups of a process share: RNICs, pollers, memory, counts, and news for the owner.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use smcr_engine::LinkId;
use smcr_proto::link::Keepalive;
use smcr_proto::{Gid, Instant, MacAddress, PeerId, RmbeSize};
use smcr_rnic::Rnic;

use super::group::{Group, GroupId};
use super::ports::{Pollers, Port, PortId, QpOf};
use super::stock::Budget;
use super::throttle::Offences;

/// What an operator decides about link groups.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Who we are.
    pub peer_id: PeerId,
    /// Elements of an RMB.
    pub rmb_elements: u8,
    /// How small elements become while there are many connections.
    pub rmbe_size_min: RmbeSize,
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
    /// The first contact failed; `committed` if its connection could no longer be declined
    /// (RFC C.3).
    FirstContactFailed {
        /// The group.
        group: GroupId,
        /// The point of no return had been passed.
        committed: bool,
    },
    /// Whoever was told [`Refusal::NotYet`](super::Refusal::NotYet) may try again.
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
    /// Elements that rested before another connection got them, because the peer of the connection
    /// before had not said that it writes no more.
    pub elements_rested: u64,
    /// Links that went down while another link could take their connections.
    pub links_failed_over: u64,
    /// Links that went down while no other link could take their connections.
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
    /// Further links that were refused because the operator did not list the peer's port.
    pub links_not_listed: u64,
}

/// What all link groups share. It knows no group: methods that need one borrow it.
pub(super) struct Shared<N: Rnic, P: Pollers<QpOf<N>>> {
    pub(super) settings: Settings,
    pub(super) ports: Vec<Port<N>>,
    pub(super) pollers: P,
    /// Connections that each poller has or will have.
    loads: Vec<usize>,
    /// The first port on the LAN of each: to compare LANs by name, once for each group of a peer,
    /// took a sixth of the control thread's time when many connections came at once.
    lans: Vec<PortId>,
    /// Which group has which link.
    group_of_link: HashMap<LinkId, GroupId>,
    links_made: u32,
    /// Links on RNICs that are given up, whose end was asked for.
    pub(super) asked_to_leave: BTreeSet<LinkId>,
    pub(super) budget: Budget,
    pub(super) counts: Counts,
    pub(super) offences: Offences,
    pub(super) events: VecDeque<Event>,
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Shared<N, P> {
    pub(super) fn new(settings: Settings, ports: Vec<Port<N>>, pollers: P) -> Self {
        let mut shared = Self {
            settings,
            loads: Vec::with_capacity(ports.len()),
            lans: Vec::with_capacity(ports.len()),
            ports: Vec::with_capacity(ports.len()),
            pollers,
            group_of_link: HashMap::new(),
            links_made: 0,
            asked_to_leave: BTreeSet::new(),
            budget: Budget::new(settings.rmb_bytes),
            counts: Counts::default(),
            offences: Offences::default(),
            events: VecDeque::new(),
        };
        for port in ports {
            shared.add_port(port);
        }
        shared
    }

    /// The operator has decided anew. Groups that exist keep what they began with.
    pub(super) fn change(&mut self, settings: Settings) {
        self.budget.change(settings.rmb_bytes);
        self.settings = settings;
    }

    /// One more RNIC. Its poller is known already.
    pub(super) fn add_port(&mut self, port: Port<N>) -> PortId {
        let id = PortId(self.ports.len());
        let first = self.ports.iter().position(|other| other.lan == port.lan);
        self.lans.push(first.map_or(id, PortId));
        self.ports.push(port);
        self.loads.push(0);
        id
    }

    /// Puts a port on another LAN, before any group has a link there.
    #[cfg(test)]
    pub(super) fn put_on(&mut self, id: PortId, lan: super::Lan) {
        self.ports[id.0].lan = lan;
        let first = |port: &Port<N>| self.ports.iter().position(|other| other.lan == port.lan);
        self.lans = self.ports.iter().filter_map(first).map(PortId).collect();
    }

    /// Whether both ports are on one LAN.
    pub(super) fn share_lan(&self, one: PortId, other: PortId) -> bool {
        self.lans[one.0] == self.lans[other.0]
    }

    /// A name for a new link of a group on this port.
    pub(super) fn name_link(&mut self, group: GroupId, port: PortId) -> LinkId {
        self.links_made += 1;
        let link = LinkId(self.links_made);
        self.group_of_link.insert(link, group);
        self.ports[port.0].links += 1;
        link
    }

    /// The queue pair of a link is gone.
    pub(super) fn forget_link(&mut self, link: LinkId, port: PortId) {
        let known = self.group_of_link.remove(&link);
        assert!(known.is_some(), "a link is forgotten once");
        self.asked_to_leave.remove(&link);
        self.ports[port.0].links -= 1;
    }

    /// The group that has a link.
    pub(super) fn group_of_link(&self, link: LinkId) -> Option<GroupId> {
        self.group_of_link.get(&link).copied()
    }

    /// How many connections all pollers have or will have.
    pub(super) fn connections(&self) -> usize {
        self.loads.iter().sum()
    }

    /// How many connections a poller has or will have.
    pub(super) fn load(&self, port: PortId) -> usize {
        self.loads[port.0]
    }

    /// A connection joined a group, on a link of this port.
    pub(super) fn connection_came(&mut self, port: PortId) {
        self.loads[port.0] += 1;
    }

    /// A connection on a link of this port is over.
    pub(super) fn connection_went(&mut self, port: PortId) {
        self.loads[port.0] -= 1;
    }

    /// Where a further link of a group would go: to an RNIC on the same LAN, as the machine prefers
    /// them, and among equals to the least busy poller.
    pub(super) fn port_for_link(
        &self,
        group: &Group<N::Opening>,
        peer: Option<(Gid, MacAddress)>,
    ) -> Option<PortId> {
        let first = group.links.first()?.port;
        let candidate = |(index, port): (usize, &Port<N>)| {
            // RFC 7609 2 #2: keep a group in one VLAN
            // RFC 7609 5.2 #1: SMC-Rv1 only within layer 2
            let reaches = group.is_routed() || peer.is_none_or(|(peer, _)| port.reaches(peer));
            // An RNIC that came since the peers agreed may be one that takes no dense packets.
            let takes = port.packs_densely() || !group.is_dense();
            let near = self.share_lan(PortId(index), first);
            let fits = port.is_up() && near && reaches && takes;
            let address = port.address().filter(|_| fits)?;
            Some((self.load(PortId(index)), PortId(index), address))
        };
        let mut ports: Vec<_> = self.ports.iter().enumerate().filter_map(candidate).collect();
        ports.sort_unstable_by_key(|(load, port, _)| (*load, *port));
        let addresses = ports.iter().map(|(_, _, address)| *address);
        let place = group.machine()?.choose_port(addresses, peer)?;
        Some(ports[place].1)
    }

    /// Counts an address that claims another peer's group without being its founder.
    pub(super) fn foreign_claim(
        &mut self,
        now: Instant,
        group: GroupId,
        founder: IpAddr,
        source: IpAddr,
    ) {
        self.counts.foreign_claims += 1;
        if let Some(left_out) = self.offences.claims.pass(now) {
            tracing::warn!(
                group = group.0,
                %founder,
                %source,
                left_out,
                "another address claims to be the peer of this group; it does not join the group"
            );
        }
    }
}
