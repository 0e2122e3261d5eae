//! Two hosts with several RNICs each, and a caller that does what the groups want done.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::vec::Vec;

use super::*;
use crate::link_group::retry::SHORT_LIVED_MAX;
use crate::wire::llc::v2::LEN_MAX;

/// A message on its way.
#[derive(Clone, Debug)]
pub(super) struct Flying {
    pub(super) from: Role,
    pub(super) message: Llc,
    /// In version 2: what travels.
    bytes: Option<Vec<u8>>,
}

/// One of the hosts.
pub(super) struct Host {
    pub(super) group: LinkGroup,
    pub(super) role: Role,
    /// Its RNICs that are up, by the last byte of their addresses.
    pub(super) ports: BTreeSet<u8>,
    /// The queue pairs that exist, by link number, and their port.
    pub(super) queue_pairs: BTreeMap<LinkNumber, u8>,
    /// RMBs that are registered.
    pub(super) rmbs: BTreeSet<RmbIndex>,
    pub(super) told: Vec<Action>,
    /// Links that are to be vacated, and when that is done.
    pub(super) vacating: Vec<LinkNumber>,
    /// Whether links are vacated at once.
    pub(super) is_quick: bool,
    qpns: u32,
}

/// What one of our RMBs is called on a link.
pub(super) fn key(role: Role, rmb: RmbIndex, link: LinkNumber) -> (Rkey, u64) {
    let side = if role == Role::Server { 1 } else { 2 };
    let link = link.0.max(LINK.0);
    let rkey = Rkey(side << 24 | u32::from(rmb.0) << 8 | u32::from(link));
    (rkey, u64::from(rkey.0) << 12)
}

fn address(port: u8, qpn: u32) -> QpAddress {
    QpAddress {
        mac: MacAddress([2, 0, 0, 0, 0, port]),
        gid: Gid::from_ipv4([10, 0, 0, port]),
        qpn: Qpn(qpn),
        psn: Psn(qpn),
        mtu: Mtu::B1024,
    }
}

pub(super) fn port(number: u8) -> (Gid, MacAddress) {
    let address = address(number, 0);
    (address.gid, address.mac)
}

impl Host {
    fn new(group: LinkGroup, ports: &[u8], number: LinkNumber, first: u8) -> Self {
        let role = group.role();
        let mut host = Self {
            group,
            role,
            ports: ports.iter().copied().collect(),
            queue_pairs: BTreeMap::from([(number, first)]),
            rmbs: BTreeSet::from([RmbIndex(0)]),
            told: Vec::new(),
            vacating: Vec::new(),
            is_quick: true,
            qpns: u32::from(first) * 1000,
        };
        host.group.own_rmb(RmbIndex(0), &host.keys(RmbIndex(0)));
        host
    }

    /// What an RMB is called on all links.
    pub(super) fn keys(&self, rmb: RmbIndex) -> Vec<(LinkNumber, Rkey, u64)> {
        let on_link = |number: &LinkNumber| {
            let (rkey, address) = key(self.role, rmb, *number);
            (*number, rkey, address)
        };
        self.queue_pairs.keys().map(on_link).collect()
    }

    /// Whoever is told that a link failed can ask what the peer's RMBs are called elsewhere.
    fn assert_connections_can_move(&self, failed: LinkNumber) {
        if !self.told.contains(&Action::LinkConfirmed(failed)) {
            return;
        }
        let other = if self.role == Role::Server { Role::Client } else { Role::Server };
        let (rkey, _) = key(other, RmbIndex(0), failed);
        for to in self.up().into_iter().filter(|to| *to != failed) {
            let known = self.group.peer_rmb(failed, rkey, to);
            let changes: Vec<_> = self.group.peer_rmbs(failed, to).collect();
            assert_eq!(known, Some(key(other, RmbIndex(0), to)), "{failed:?} to {to:?}");
            assert!(changes.iter().any(|(old, new)| old.0 == rkey && Some(*new) == known));
        }
    }

    /// The numbers of the links that may carry connections.
    pub(super) fn up(&self) -> BTreeSet<LinkNumber> {
        let up = |view: &LinkView| self.group.is_link_up(view.number);
        self.group.links().filter(up).map(|view| view.number).collect()
    }

    /// The port that a further link goes through.
    fn choose(&self, peer: Option<(Gid, MacAddress)>) -> Option<u8> {
        let ports: Vec<u8> = self.ports.iter().copied().collect();
        let chosen = self.group.choose_port(ports.iter().map(|number| port(*number)), peer)?;
        Some(ports[chosen])
    }

    fn open(&mut self, now: Instant, number: LinkNumber, peer: Option<(Gid, MacAddress)>) {
        let Some(port) = self.choose(peer) else {
            self.group.link_refused(now, number, NoQueuePair::NoAlternatePath);
            return;
        };
        self.qpns += 1;
        self.queue_pairs.insert(number, port);
        let named = |rmb: &RmbIndex| {
            let (rkey, address) = key(self.role, *rmb, number);
            (*rmb, rkey, address)
        };
        let keys: Vec<_> = self.rmbs.iter().map(named).collect();
        let user_id = LinkUserId(self.qpns);
        self.group.link_opened(now, number, address(port, self.qpns), user_id, &keys);
    }

    /// Does what the group wants; the messages it has to send.
    pub(super) fn act(&mut self, now: Instant) -> Option<(LinkNumber, Llc)> {
        while let Some(action) = self.group.poll_action() {
            match action {
                Action::Send(link, message) => return Some((link, message)),
                Action::LinkNumbered(number) => {
                    let first = self.queue_pairs.remove(&UNNUMBERED).unwrap();
                    self.queue_pairs.insert(number, first);
                }
                Action::OpenLink { number, peer } => self.open(now, number, peer),
                Action::ConnectLink { number, .. } => self.group.link_connected(now, number),
                Action::VacateLink(number) => {
                    self.vacating.push(number);
                    if self.is_quick {
                        self.vacate(now);
                    }
                }
                Action::LinkFailed(number, _) => {
                    assert!(self.queue_pairs.remove(&number).is_some(), "{number:?} fails once");
                    self.assert_connections_can_move(number);
                }
                Action::RmbDeleted(rmb) | Action::RmbRefused(rmb) => {
                    assert!(self.rmbs.remove(&rmb), "{rmb:?} goes once");
                }
                Action::Terminate(_) => {
                    assert!(self.group.is_terminated());
                    self.queue_pairs.clear();
                }
                Action::LinkConfirmed(_)
                | Action::LinkProven(_)
                | Action::RmbConfirmed(_)
                | Action::RkeysDeleted(_) => {}
            }
            self.told.push(action);
        }
        None
    }

    /// In version 2: what travels.
    fn bytes(&self, on: LinkNumber, message: &Llc) -> Option<Vec<u8>> {
        let mut bytes = [0; LEN_MAX];
        let bytes = self.group.encode(on, message, &mut bytes);
        (self.group.version() != Version::V1).then(|| bytes.to_vec())
    }

    pub(super) fn vacate(&mut self, now: Instant) {
        for number in std::mem::take(&mut self.vacating) {
            self.group.link_vacated(now, number);
        }
    }
}

/// Both hosts and what lies between them.
pub(super) struct Hosts {
    pub(super) now: Instant,
    pub(super) server: Host,
    pub(super) client: Host,
    /// Messages on each link, oldest first. What is sent on a link arrives in order.
    pub(super) wires: BTreeMap<(Role2, LinkNumber), VecDeque<Flying>>,
    /// Links that carry nothing any more.
    pub(super) cut: BTreeSet<LinkNumber>,
    /// Everything that arrived.
    pub(super) seen: Vec<(Role, LinkNumber, Llc)>,
}

/// A role that can be a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role2 {
    Server,
    Client,
}

impl From<Role> for Role2 {
    fn from(role: Role) -> Self {
        match role {
            Role::Server => Self::Server,
            Role::Client => Self::Client,
        }
    }
}

impl Hosts {
    /// The first contact is about to begin. Ports of the server are below 100.
    pub(super) fn new(server_ports: &[u8], client_ports: &[u8], max_links: u8) -> Self {
        Self::speaking(Version::V1, server_ports, client_ports, max_links)
    }

    /// The same, in any version.
    pub(super) fn speaking(
        version: Version,
        server_ports: &[u8],
        client_ports: &[u8],
        max_links: u8,
    ) -> Self {
        let (a, x) = (server_ports[0], client_ports[0]);
        let side = |ours: u8, theirs: u8| Setup {
            ours: address(ours, u32::from(ours)),
            theirs: address(theirs, u32::from(theirs)),
            version,
            max_links,
            retry_link: SECOND * 20,
            confirm_wait: None,
            ..setup(8, 64)
        };
        let mut server = LinkGroup::new_server(T0, side(a, x), LINK);
        let mut client = LinkGroup::new_client(T0, side(x, a));
        // As Accept and Confirm have told.
        let (rkey, address) = key(Role::Client, RmbIndex(0), UNNUMBERED);
        server.learn_rkey(LINK, rkey, address).unwrap();
        let (rkey, address) = key(Role::Server, RmbIndex(0), LINK);
        client.learn_rkey(UNNUMBERED, rkey, address).unwrap();
        server.link_connected(T0, LINK);
        // Links that fail are replaced by timer, so that a test sees one thing after the other.
        server.short_lived = SHORT_LIVED_MAX;
        Self {
            now: T0,
            server: Host::new(server, server_ports, LINK, a),
            client: Host::new(client, client_ports, UNNUMBERED, x),
            wires: BTreeMap::new(),
            cut: BTreeSet::new(),
            seen: Vec::new(),
        }
    }

    pub(super) fn established(server: &[u8], client: &[u8], max_links: u8) -> Self {
        Self::established_in(Version::V1, server, client, max_links)
    }

    pub(super) fn established_in(
        version: Version,
        server: &[u8],
        client: &[u8],
        max_links: u8,
    ) -> Self {
        let mut hosts = Self::speaking(version, server, client, max_links);
        hosts.run();
        assert!(hosts.server.group.is_established() && hosts.client.group.is_established());
        hosts.server.told.clear();
        hosts.client.told.clear();
        hosts.seen.clear();
        hosts
    }

    pub(super) fn host(&mut self, role: Role) -> &mut Host {
        match role {
            Role::Server => &mut self.server,
            Role::Client => &mut self.client,
        }
    }

    /// Lets both callers work; what is to be sent is on its way then.
    pub(super) fn act(&mut self) {
        for role in [Role::Server, Role::Client] {
            let now = self.now;
            while let Some((link, message)) = self.host(role).act(now) {
                let bytes = self.host(role).bytes(link, &message);
                if !self.cut.contains(&link) {
                    let wire = self.wires.entry((role.into(), link)).or_default();
                    wire.push_back(Flying { from: role, message, bytes });
                }
            }
        }
    }

    /// Delivers the oldest message of one wire.
    pub(super) fn deliver(&mut self, wire: (Role2, LinkNumber)) {
        let Some(flying) = self.wires.get_mut(&wire).and_then(VecDeque::pop_front) else { return };
        self.wires.retain(|_, wire| !wire.is_empty());
        let to = match flying.from {
            Role::Server => Role::Client,
            Role::Client => Role::Server,
        };
        let now = self.now;
        let mut link = wire.1;
        if to == Role::Client && self.client.queue_pairs.contains_key(&UNNUMBERED) {
            link = UNNUMBERED;
        }
        self.seen.push((flying.from, wire.1, flying.message));
        let bytes = flying.bytes.unwrap_or_else(|| flying.message.encode().to_vec());
        if self.host(to).queue_pairs.contains_key(&link) {
            let outcome = self.host(to).group.handle_bytes(now, link, &bytes);
            assert_eq!(outcome, Ok(()), "{to:?} on {link:?}: {:?}", flying.message);
        }
    }

    /// Hands a message to one side, as if the other had sent it over that link.
    pub(super) fn tell(&mut self, to: Role, link: LinkNumber, message: Llc) {
        let now = self.now;
        let outcome = self.host(to).group.handle_bytes(now, link, &message.encode());
        assert_eq!(outcome, Ok(()), "{message:?}");
        self.act();
    }

    /// What one side has on its way, link by link, oldest first.
    pub(super) fn flying(&self, from: Role) -> Vec<(LinkNumber, Llc)> {
        let of = |((role, link), wire): (&(Role2, LinkNumber), &VecDeque<Flying>)| {
            let (mine, link) = (*role == from.into(), *link);
            let messages: Vec<_> = wire.iter().map(|flying| (link, flying.message)).collect();
            if mine { messages } else { Vec::new() }
        };
        self.wires.iter().flat_map(of).collect()
    }

    /// Delivers messages, oldest of the first link first, until one of this kind is on its way.
    pub(super) fn run_until(&mut self, wanted: impl Fn(Role, &Llc) -> bool) {
        self.act();
        loop {
            let found = self.wires.values().flatten().any(|one| wanted(one.from, &one.message));
            if found {
                return;
            }
            let wire = *self.wires.keys().next().expect("it comes in the end");
            self.deliver(wire);
            self.act();
        }
    }

    /// Nothing of what is on its way arrives.
    pub(super) fn lose(&mut self, from: Role) {
        self.wires.retain(|(role, _), _| *role != from.into());
    }

    /// Time passes for both, and they act; nothing is delivered.
    pub(super) fn tick(&mut self, time: Duration) {
        self.now = self.now + time;
        let now = self.now;
        for role in [Role::Server, Role::Client] {
            self.host(role).group.handle_timeout(now);
        }
        self.act();
    }

    /// Lets time pass at once in which data flows on all links that are not cut, and whatever is
    /// due at its end happen; messages stay on their way.
    pub(super) fn work_for(&mut self, time: Duration) {
        self.now = self.now + time;
        for role in [Role::Server, Role::Client] {
            self.work_until_now(role);
            let now = self.now;
            self.host(role).group.handle_timeout(now);
        }
        self.act();
    }

    /// One host has heard data on all links that are not cut.
    pub(super) fn work_until_now(&mut self, role: Role) {
        let (now, cut) = (self.now, self.cut.clone());
        for link in self.host(role).up().difference(&cut) {
            self.host(role).group.traffic(now, *link);
        }
    }

    /// Delivers messages until nobody has anything to do.
    pub(super) fn run(&mut self) {
        self.act();
        while let Some(wire) = self.wires.keys().next().copied() {
            self.deliver(wire);
            self.act();
        }
    }

    /// Lets time pass, second by second.
    pub(super) fn sleep(&mut self, seconds: u32) {
        for _ in 0..seconds {
            self.now = self.now + SECOND;
            let now = self.now;
            for role in [Role::Server, Role::Client] {
                self.host(role).group.handle_timeout(now);
            }
            self.run();
        }
    }

    /// A cable is pulled: nothing passes on these links, and both NICs notice.
    pub(super) fn break_link(&mut self, link: LinkNumber) {
        for role in [Role::Server, Role::Client] {
            self.break_link_at(role, link);
        }
    }

    /// Nothing passes on these links, and one NIC notices.
    pub(super) fn break_link_at(&mut self, role: Role, link: LinkNumber) {
        self.cut.insert(link);
        self.wires.retain(|(_, number), _| *number != link);
        let now = self.now;
        self.host(role).group.link_broke(now, link);
    }

    /// Both sides know by which name each RMB of the other goes on every link.
    pub(super) fn assert_rkeys_agree(&self) {
        for (owner, other) in [(&self.server, &self.client), (&self.client, &self.server)] {
            let links = owner.up();
            for rmb in &owner.rmbs {
                for from in &links {
                    for to in &links {
                        let (rkey, _) = key(owner.role, *rmb, *from);
                        let known = other.group.peer_rmb(*from, rkey, *to);
                        let actual = key(owner.role, *rmb, *to);
                        assert_eq!(
                            known,
                            Some(actual),
                            "{rmb:?} of {:?}, {from:?} to {to:?}",
                            owner.role
                        );
                    }
                }
            }
        }
    }
}
