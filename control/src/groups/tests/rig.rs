//! Two hosts with simulated RNICs, joined by their LLC messages: no poller, no socket.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use smcr_engine::handoff::KeyChange;
use smcr_engine::{Command, ConnectionId, LinkId, LlcBytes};
use smcr_proto::handshake::Agreement;
use smcr_proto::link::Keepalive;
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_proto::wire::llc::Llc;
use smcr_proto::{Gid, Instant, MacAddress, Mtu, PeerId, Qpn, Rkey, RmbeSize};

use smcr_rnic::sim::{self, Network, Odds};

use super::super::*;
use crate::config::Peers;

/// What stands for a socket.
pub(super) type Stream = ();
/// The queue pair of a simulated RNIC.
pub(super) type Qp = QpOf<sim::Rnic>;

/// What stands for the pollers of a host: remembers what they were told.
#[derive(Default)]
pub(super) struct Told {
    commands: VecDeque<(PortId, Command<Qp, Stream>)>,
}

impl Pollers<Qp> for Told {
    type Stream = Stream;

    fn command(&mut self, port: PortId, command: Command<Qp, Stream>) {
        self.commands.push_back((port, command));
    }

    fn expect(&mut self, _port: PortId, _connection: ConnectionId, _group: GroupId) {}

    fn forget(&mut self, port: PortId, connection: ConnectionId) {
        self.command(port, Command::Forget { connection });
    }
}

/// One host.
pub(super) struct Host {
    pub(super) groups: Groups<sim::Rnic, Told>,
    pub(super) events: Vec<Event>,
    /// Links whose connections were failed.
    pub(super) failed: Vec<LinkId>,
    /// Connections that were aborted.
    pub(super) aborted: Vec<ConnectionId>,
    /// Connections that were to be closed, and at which port.
    pub(super) closing: Vec<(PortId, ConnectionId)>,
    /// Elements of connections that were handed over.
    pub(super) relayed: Vec<(ConnectionId, smcr_memory::Rmbe)>,
    /// Its pollers are slow to move connections, until [`Self::catch_up`].
    pub(super) moves_later: bool,
    later: Vec<MoveOrder>,
    /// Where the connections of links have gone, for those that come late.
    routes: HashMap<LinkId, (LinkId, Vec<KeyChange>)>,
}

/// From which link, to which, what RMBs are called there, and which connections.
type MoveOrder = (LinkId, LinkId, Vec<KeyChange>, Option<Vec<ConnectionId>>);

/// Two hosts in one network: a client and a server.
pub(super) struct Pair {
    pub(super) now: Instant,
    /// Whom each host admits as the peer of groups that follow: the client, the server.
    pub(super) admitted: [Peers; 2],
    pub(super) client: Host,
    pub(super) server: Host,
    pub(super) network: Network,
}

impl Pair {
    /// Hosts with so many RNICs, calm ones.
    pub(super) fn new(client_nics: u8, server_nics: u8) -> Self {
        let network = Network::new(1, Odds::CALM);
        let client = Host::new(&network, 1, client_nics);
        let server = Host::new(&network, 2, server_nics);
        Self { now: Instant(1_000_000_000), admitted: Default::default(), client, server, network }
    }

    /// A first contact over the first RNIC of each host, and everything that follows from it.
    /// Returns the group of the client, that of the server, and the connection on each side.
    pub(super) fn first_contact(&mut self) -> (Contact, Contact) {
        self.first_contact_with(Agreement::V1)
    }

    /// The same, with another agreement than version 1.
    pub(super) fn first_contact_with(&mut self, agreement: Agreement) -> (Contact, Contact) {
        let contacts = self.begin_contact(agreement);
        self.settle();
        contacts
    }

    /// A first contact up to where both queue pairs are connected.
    pub(super) fn begin_contact(&mut self, agreement: Agreement) -> (Contact, Contact) {
        let peer = Peer {
            id: PEER_IDS[0],
            gid: gid(1, 0),
            mac: mac(1, 0),
            v2: false,
            source: ADDRESSES[0],
        };
        let server = self.server.groups.open(self.now, PortId(0), Role::Server, peer).unwrap();
        assert!(self.server.groups.admit(server, &self.admitted[1]));
        let link = self.server.groups.best_link(server).unwrap();
        let accept = self.server.groups.join(self.now, server, link, SIZE).unwrap();

        let peer = Peer::of(&accept.offer, false, ADDRESSES[1]);
        let client = self.client.groups.open(self.now, PortId(0), Role::Client, peer).unwrap();
        assert!(self.client.groups.admit(client, &self.admitted[0]));
        let link = self.client.groups.best_link(client).unwrap();
        let confirm = self.client.groups.join(self.now, client, link, SIZE).unwrap();
        self.client.groups.connect(self.now, client, &accept.offer, agreement, None).unwrap();
        self.client.groups.accept_offer(self.now, confirm.connection, &accept.offer).unwrap();

        self.server.groups.connect(self.now, server, &confirm.offer, agreement, None).unwrap();
        self.server.groups.accept_offer(self.now, accept.connection, &confirm.offer).unwrap();
        (Contact { group: client, joined: confirm }, Contact { group: server, joined: accept })
    }

    /// The link groups of the client or of the server.
    pub(super) fn groups_of(&mut self, side: &str) -> &mut Groups<sim::Rnic, Told> {
        if side == "client" { &mut self.client.groups } else { &mut self.server.groups }
    }

    /// Lets both hosts talk until neither has anything to say.
    pub(super) fn settle(&mut self) {
        while self.talk() {}
    }

    /// Lets each host hear what the other has said. Returns whether that was anything.
    pub(super) fn talk(&mut self) -> bool {
        let to_server = self.client.obey(self.now);
        let to_client = self.server.obey(self.now);
        let was_quiet = to_server.is_empty() && to_client.is_empty();
        for (from, message) in to_server {
            self.server.hear(self.now, from, message.as_bytes());
        }
        for (from, message) in to_client {
            self.client.hear(self.now, from, message.as_bytes());
        }
        !was_quiet
    }

    /// Lets time pass while nothing arrives: what is said meanwhile is under way still.
    pub(super) fn stall(&mut self, time: Duration) {
        self.now = self.now + time;
        self.client.groups.expire(self.now);
        self.server.groups.expire(self.now);
    }

    /// Lets time pass in steps of 100 ms.
    pub(super) fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now = until.min(self.now + Duration::from_millis(100));
            self.client.groups.expire(self.now);
            self.server.groups.expire(self.now);
            self.settle();
        }
    }
}

/// One side of a rendezvous that succeeded.
pub(super) struct Contact {
    pub(super) group: GroupId,
    pub(super) joined: Joined,
}

impl Host {
    fn new(network: &Network, host: u8, nics: u8) -> Self {
        let ports = (0..nics).map(|index| {
            let port =
                smcr_rnic::Port { gid: gid(host, index), mac: mac(host, index), mtu: Mtu::B1024 };
            let rnic = Some(network.rnic(port).0);
            Port::new(format!("r{index}"), Lan::default(), Ipv4Subnet::default(), rnic)
        });
        let settings = Settings {
            peer_id: PEER_IDS[usize::from(host) - 1],
            rmb_elements: 4,
            rmbe_size_min: RmbeSize::default(),
            rmb_bytes: 1 << 26,
            keepalive: Keepalive {
                idle: Some(Duration::from_secs(30)),
                reply_wait: Duration::from_secs(2),
            },
            idle_group_server: Duration::from_secs(600),
            idle_group_client: Duration::from_secs(610),
            max_links: 8,
        };
        Self {
            groups: Groups::new(settings, ports.collect(), Told::default(), Box::new(|| 7)),
            events: Vec::new(),
            failed: Vec::new(),
            aborted: Vec::new(),
            closing: Vec::new(),
            relayed: Vec::new(),
            moves_later: false,
            later: Vec::new(),
            routes: HashMap::new(),
        }
    }

    /// The poller comes to the moves that it was slow to make.
    pub(super) fn catch_up(&mut self, now: Instant) {
        self.moves_later = false;
        for (from, to, keys, only) in std::mem::take(&mut self.later) {
            self.move_members(now, from, to, &keys, only);
        }
    }

    /// Does what pollers would, and returns the LLC messages that leave, each with the queue pair
    /// that it leaves by.
    fn obey(&mut self, now: Instant) -> Vec<(Qpn, LlcBytes)> {
        let mut leaving = Vec::new();
        while let Some((port, command)) = self.groups.pollers_mut().commands.pop_front() {
            match command {
                Command::SendLlc { link, message } => {
                    let mut links = self.groups.iter().flat_map(|(_, group)| &group.links);
                    let link = links.find(|one| one.id == link).expect("it was not retired");
                    leaving.push((link.ours.qpn, message));
                }
                Command::FailConnections { link } => self.failed.push(link),
                Command::RetireLink { link } => self.groups.link_retired(now, link),
                Command::Abort { connection } => {
                    self.aborted.push(connection);
                }
                Command::Relay { connection, established, .. } => match *established {
                    smcr_engine::Established::Smc { rmbe, link, .. } => {
                        self.relayed.push((connection, rmbe));
                        self.follow(connection, link);
                    }
                    smcr_engine::Established::Tcp { .. } => panic!("groups relay no TCP"),
                },
                Command::MoveConnections { from, to, keys, only, .. } if self.moves_later => {
                    self.later.push((from, to, keys, only));
                }
                Command::MoveConnections { from, to, keys, only, .. } => {
                    self.move_members(now, from, to, &keys, only);
                }
                Command::CloseKept { connection } => self.closing.push((port, connection)),
                Command::AddLink { .. }
                | Command::FailLink { .. }
                | Command::Forget { .. }
                | Command::NextStream { .. }
                | Command::Stop => {}
            }
        }
        while let Some(event) = self.groups.poll_event() {
            self.events.push(event);
        }
        leaving
    }

    /// Does what pollers would, and returns what is said on links.
    pub(super) fn says(&mut self, now: Instant) -> Vec<Llc> {
        let leaving = self.obey(now);
        let decode = |message: &LlcBytes| {
            let bytes = message.as_bytes().first_chunk().expect("44 bytes of version 1");
            Llc::decode(bytes).expect("we make no nonsense")
        };
        leaving.iter().map(|(_, message)| decode(message)).collect()
    }

    /// Takes a connection that comes late to where all others on its link have gone, over as many
    /// links as they have.
    fn follow(&mut self, connection: ConnectionId, mut link: LinkId) {
        let peer = self.groups.member(connection).expect("it is not over").peer;
        let peer = peer.expect("what is relayed has a peer");
        let (mut token, mut address) = ((peer.rkey, peer.rmb_address), peer.rmbe_address());
        while let Some((to, keys)) = self.routes.get(&link) {
            let key = key_of(keys, token, connection);
            address = address - key.old_base + key.new_base;
            (link, token) = (*to, (key.new, key.new_base));
            self.groups.connection_moved(connection, link, key.new, address);
        }
    }

    /// Moves connections as a poller would: at once, and those without a key not at all.
    fn move_members(
        &mut self,
        now: Instant,
        from: LinkId,
        to: LinkId,
        keys: &[KeyChange],
        only: Option<Vec<ConnectionId>>,
    ) {
        assert!(!keys.is_empty(), "whoever comes to the link later would be reset");
        let all: Vec<_> = self
            .groups
            .iter()
            .flat_map(|(_, group)| &group.members)
            .map(|(id, member)| (*id, *member))
            .collect();
        for (connection, member) in all {
            let chosen = only.as_ref().is_none_or(|only| only.contains(&connection));
            if !chosen || member.link != from || !member.relayed {
                continue;
            }
            let peer = member.peer.expect("what is relayed has a peer");
            let key = key_of(keys, (peer.rkey, peer.rmb_address), connection);
            let address = peer.rmbe_address() - key.old_base + key.new_base;
            self.groups.connection_moved(connection, to, key.new, address);
        }
        if only.is_none() {
            self.routes.insert(from, (to, keys.to_vec()));
            self.groups.link_vacated(now, from);
        }
    }

    /// Takes in a message of the peer's queue pair.
    fn hear(&mut self, now: Instant, from: Qpn, message: &[u8]) {
        let end = self.groups.iter().find_map(|(_, group)| {
            let mut links = group.links.iter();
            let end = links.find(|one| one.theirs.is_some_and(|theirs| theirs.qpn == from))?;
            Some(end.id)
        });
        if let Some(end) = end {
            self.groups.llc_received(now, end, message);
        }
    }
}

/// What the RMB with this rkey and address is called on another link.
fn key_of(keys: &[KeyChange], token: (Rkey, u64), connection: ConnectionId) -> KeyChange {
    let key = keys.iter().find(|key| (key.old, key.old_base) == token);
    *key.unwrap_or_else(|| panic!("{connection:?} would be reset"))
}

/// The port of a host.
pub(super) fn gid(host: u8, nic: u8) -> Gid {
    let mut gid = [host; 16];
    gid[15] = nic;
    Gid(gid)
}

fn mac(host: u8, nic: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, host, nic])
}

/// In TCP, of the client and of the server.
pub(super) const ADDRESSES: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2))];
/// Of the client and of the server.
const PEER_IDS: [PeerId; 2] = [PeerId([1; 8]), PeerId([2; 8])];

/// Of all elements.
pub(super) const SIZE: RmbeSize = RmbeSize::from_notation(0);
