//! One gateway: production rendezvous, link groups and pollers. What it lacks are sockets.

use std::collections::BTreeMap;

use smcgate::config::Peers;
use smcgate::groups::{Groups, PortId};
use smcgate::rendezvous::{Endpoint, Settings, Side, Terms};
use smcr_engine::counters::Counters;
use smcr_engine::handoff::Ending;
use smcr_engine::limits::CONNECTIONS_MAX;
use smcr_engine::{ConnectionId, Report};
use smcr_proto::handshake::PolicyV2;
use smcr_proto::wire::clc::v2::{Eid, HostName, RELEASE};
use smcr_proto::{Gid, Instant, Qpn};
use smcr_rnic::sim::{self, Network};

use super::{CONNECT_TIMEOUT, HANDSHAKE_TIMEOUT, address_of};
use crate::gateways::gateway::{Mailboxes, Platform, Sizes, Thread, gid, names, peer_id, settings};
use crate::tcp::Stream;

/// Which versions a gateway speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Speaks {
    pub(crate) v1: bool,
    pub(crate) v2: bool,
}

/// One gateway.
pub(crate) struct Node {
    /// Where its listeners of applications lead to, from the second on.
    pub(crate) servers: [std::net::IpAddr; 2],
    pub(crate) endpoint: Endpoint<sim::Rnic, Mailboxes>,
    pub(crate) gids: Vec<Gid>,
    /// The control thread does nothing, since then.
    pub(crate) asleep: Option<Instant>,
    /// How connections ended. Names are unique, so each ends once.
    pub(crate) closed: BTreeMap<ConnectionId, Ending>,
    threads: Vec<Thread>,
}

impl Node {
    /// `servers` are the addresses that its listeners of applications lead to, from the second on.
    pub(crate) fn new(
        network: &Network,
        host: u8,
        sizes: &Sizes,
        speaks: Speaks,
        servers: [std::net::IpAddr; 2],
    ) -> Self {
        let Platform { ports, mailboxes, threads } = Platform::new(network, host, sizes);
        let groups = Groups::new(settings(host, sizes), ports, mailboxes, names(host));
        let terms = |side| Terms {
            side,
            peers: Peers::default(),
            rmbe_size: sizes.rmbe,
            connect_timeout: CONNECT_TIMEOUT,
        };
        let listeners =
            std::iter::once(Side::Server).chain(servers.map(|_| Side::Client)).map(terms);
        let v2 = PolicyV2 {
            eids: Eid::with_ours(&[]).expect("ours fits"),
            release: RELEASE,
            max_connections: 255,
            max_links: sizes.max_links,
            host_name: HostName::new("sim"),
            many_streams: false,
            dense_packets: false,
        };
        let settings = Settings {
            peer_id: peer_id(host),
            v1: vec![speaks.v1; usize::from(sizes.rnics)],
            v2: speaks.v2.then_some(v2),
            is_assumed: false,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            handshakes_max: HANDSHAKES_MAX,
            silent_max: SILENT_MAX,
            listeners: listeners.collect(),
        };
        Self {
            servers,
            endpoint: Endpoint::new(settings, groups),
            gids: (0..sizes.rnics).map(|index| gid(host, index)).collect(),
            asleep: None,
            closed: BTreeMap::new(),
            threads,
        }
    }

    /// All pollers that have reason to be awake look around once. Returns whether anything moved.
    pub(crate) fn turn_pollers(&mut self, now: Instant) -> bool {
        (0..self.threads.len()).fold(false, |moved, index| self.turn_poller(index, now) | moved)
    }

    /// One poller looks around, if it has reason to be awake. Returns whether anything moved.
    pub(crate) fn turn_poller(&mut self, index: usize, now: Instant) -> bool {
        self.endpoint.groups_mut().pollers_mut().catch_up(index);
        self.threads[index].turn(now)
    }

    /// What a poller said, oldest first.
    pub(crate) fn next_report(&mut self) -> Option<Report<Stream>> {
        self.threads.iter().find_map(|thread| thread.pending.receive())
    }

    /// Whether a poller was woken and has not looked around yet.
    pub(crate) fn is_woken(&self) -> bool {
        self.threads.iter().any(Thread::is_woken)
    }

    /// When somebody must look around again, at the latest.
    pub(crate) fn next_deadline(&mut self, now: Instant) -> Option<Instant> {
        let pollers = self.threads.iter_mut();
        let pollers = pollers.filter_map(|thread| thread.poller.next_deadline(now)).min();
        let endpoint = if self.is_asleep() { None } else { self.endpoint.poll_timeout() };
        [pollers, endpoint].into_iter().flatten().min()
    }

    /// Whether the control thread does nothing.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep.is_some()
    }

    /// Whether it has a link whose other end is this one.
    pub(crate) fn knows_link(&self, theirs: Qpn) -> bool {
        let mut links = self.endpoint.groups().iter().flat_map(|(_, group)| &group.links);
        links.any(|link| link.theirs.is_some_and(|end| end.qpn == theirs))
    }

    /// The sum of one counter over all pollers.
    pub(crate) fn count(&self, counter: impl Fn(&Counters) -> u64) -> u64 {
        self.threads.iter().map(|thread| counter(&thread.counters)).sum()
    }

    /// The port with this address, if it is one of these.
    pub(crate) fn port_at(&self, gid: Gid) -> Option<PortId> {
        self.gids.iter().position(|own| *own == gid).map(PortId)
    }

    /// Panics unless all that was lent is home, and nothing is open that nobody needs.
    pub(crate) fn assert_nothing_is_left(&mut self, network: &Network) {
        for thread in &self.threads {
            assert_eq!(thread.poller.leases_out(), 0, "send leases");
            assert_eq!(thread.counters.connections.get(), 0, "connections");
        }
        assert_eq!(self.endpoint.len(), 0, "rendezvous");
        if let Some((id, group)) = self.endpoint.groups().iter().next() {
            let (all, out) = group.stock.elements();
            panic!(
                "{id:?} outlives its idle time: {:?}, {} members, {out} of {all} elements out",
                group.role,
                group.members.len(),
            );
        }
        for gid in &self.gids {
            assert_eq!(network.open_at(*gid), sim::Open::default(), "at {gid}");
        }
        let slots = self.endpoint.groups_mut().slots_mut();
        let slots = std::iter::from_fn(|| slots.take()).count();
        assert_eq!(slots, CONNECTIONS_MAX, "slots");
    }
}

/// Where a gateway's listeners lead: the first accepts SMC-R, these connect.
pub(crate) fn servers_of(host: usize, intruder: std::net::IpAddr) -> [std::net::IpAddr; 2] {
    [address_of(1 - host), intruder]
}

/// How many connections a gateway may have at once whose peers have sent no Proposal. A flood of
/// the intruder exceeds that; honest clients never do.
const SILENT_MAX: usize = 40;
/// How many rendezvous a gateway lets go on at once. A flood of Proposals takes all of them.
pub(crate) const HANDSHAKES_MAX: usize = 32;
/// How many connections one source may have at a gateway: more than an honest one has in a run.
pub(crate) const SOURCE_MAX: usize = 48;
