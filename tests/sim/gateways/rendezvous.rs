//! CLC in memory: what two gateways say to each other, by TCP, before a connection is SMC-R.
//!
//! Offers travel in order and arrive when the world lets them; in between, anything may happen.
//! What cannot be agreed on is not relayed over TCP here, but reset: that path has tests elsewhere.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use smcgate::groups::{Event, GroupId, Joined, Peer, PortId, Refusal, Taken, Unnamed};
use smcr_engine::ConnectionId;
use smcr_engine::streams::Streams;
use smcr_memory::Rmbe;
use smcr_proto::handshake::Agreement;
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::Offer;
use smcr_proto::{Instant, RmbeSize};
use smcr_rnic::Rnic;

use super::gateway::{Gateway, peer_id};
use super::mutants::Mutant;
use crate::tcp::{Sockets, Stream};

/// One rendezvous.
pub(crate) struct Rendezvous {
    /// The connection it is for.
    pub(crate) number: usize,
    /// Client first, like everything that comes in twos here.
    sides: [Party; 2],
    /// Under way, and who it is for.
    messages: VecDeque<(usize, Message)>,
    deadline: Instant,
    /// Until when it waits for the end of a connection that has the element it was offered.
    held_until: Option<Instant>,
    /// What the gateways speak.
    agreement: Agreement,
    /// Which of the peers that the client plays.
    peer: u16,
}

/// One side of it.
struct Party {
    /// Which gateway.
    host: usize,
    /// By which of its RNICs.
    port: PortId,
    stream: Option<Stream>,
    joined: Option<Joined>,
    /// The group it waits for, to be told whether the first contact succeeded.
    founding: Option<GroupId>,
    /// Its name, once it has one.
    id: Option<ConnectionId>,
}

#[derive(Debug)]
enum Message {
    Proposal,
    Accept(Offer),
    Confirm(Offer),
    Decline {
        out_of_sync: bool,
    },
    /// TCP was reset.
    Reset,
}

/// The two gateways of a world.
pub(crate) type Hosts = [Gateway; 2];

impl Rendezvous {
    /// An application of host `client` connects; the two sockets are those of the gateways.
    pub(crate) fn new(
        now: Instant,
        number: usize,
        client: usize,
        ports: [PortId; 2],
        agreement: Agreement,
        [near, far]: [Stream; 2],
    ) -> Self {
        let party = |host, port, stream| Party {
            host,
            port,
            stream: Some(stream),
            joined: None,
            founding: None,
            id: None,
        };
        Self {
            number,
            sides: [party(client, ports[0], near), party(1 - client, ports[1], far)],
            messages: VecDeque::from([(SERVER, Message::Proposal)]),
            deadline: now + HANDSHAKE_TIMEOUT,
            held_until: None,
            agreement,
            peer: 0,
        }
    }

    /// The client plays this peer, which has an address of its own.
    pub(crate) fn of_peer(self, peer: u16) -> Self {
        Self { peer, ..self }
    }

    /// Nothing is left to be said or waited for.
    pub(crate) fn is_over(&self) -> bool {
        self.messages.is_empty() && self.sides.iter().all(|side| side.stream.is_none())
    }

    /// When it fails, unless it is over by then.
    pub(crate) fn deadline(&self) -> Instant {
        self.held_until.unwrap_or(self.deadline).min(self.deadline)
    }

    /// Delivers the next message, or ends it when its time is over. Returns whether anything moved.
    pub(crate) fn advance(&mut self, now: Instant, hosts: &mut Hosts) -> bool {
        if now >= self.deadline && !self.is_over() {
            for side in [CLIENT, SERVER] {
                self.fail(now, hosts, side, true);
            }
            self.messages.clear();
            return true;
        }
        let Some((side, message)) = self.messages.pop_front() else { return false };
        if hosts[self.sides[side].host].asleep {
            self.messages.push_front((side, message));
            return false;
        }
        let closed = self.sides[side].stream.is_none();
        match message {
            // Nobody is there to read it.
            Message::Proposal | Message::Accept(_) | Message::Confirm(_) if closed => {}
            Message::Proposal => return self.proposed(now, hosts),
            Message::Accept(offer) => return self.accepted(now, hosts, &offer),
            Message::Confirm(offer) => return self.confirmed(now, hosts, &offer),
            Message::Decline { out_of_sync } => {
                let group = self.group(hosts, side);
                if let Some(group) = group.filter(|_| out_of_sync) {
                    let source = self.address(self.sides[1 - side].host);
                    let groups = &mut hosts[self.sides[side].host].groups;
                    groups.called_out_of_sync(now, group, source);
                }
                self.fail(now, hosts, side, false);
            }
            Message::Reset => self.reset(now, hosts, side),
        }
        true
    }

    /// What a gateway learned of its groups.
    pub(crate) fn heed(&mut self, now: Instant, hosts: &mut Hosts, host: usize, event: Event) {
        let (group, good) = match event {
            Event::Established(group) => (group, true),
            Event::FirstContactFailed { group, .. } | Event::Ended(group) => (group, false),
            // Whoever waits for elements tries again whenever it is asked.
            Event::ElementsChanged(_) => return,
        };
        for side in [CLIENT, SERVER] {
            if self.sides[side].host != host || self.sides[side].founding != Some(group) {
                continue;
            }
            if good {
                self.sides[side].founding = None;
                self.hand_over(hosts, side);
            } else {
                self.fail(now, hosts, side, true);
            }
        }
    }

    /// Where each side is, and what it is called there once a poller has it.
    pub(crate) fn names(&self) -> [(usize, Option<ConnectionId>); 2] {
        self.sides.each_ref().map(|party| (party.host, party.id))
    }

    /// The application behind this side is gone before the rendezvous has ended.
    pub(crate) fn break_off(&mut self, now: Instant, hosts: &mut Hosts, side: usize) {
        if !hosts[self.sides[side].host].asleep {
            self.fail(now, hosts, side, true);
        }
    }

    /// The gateway at the other end has reset TCP.
    pub(crate) fn tcp_was_reset(&mut self, now: Instant, hosts: &mut Hosts, side: usize) {
        self.fail(now, hosts, side, false);
    }

    fn say(&mut self, to: usize, message: Message) {
        self.messages.push_back((to, message));
    }

    fn group(&self, hosts: &Hosts, side: usize) -> Option<GroupId> {
        let party = &self.sides[side];
        let connection = party.joined.as_ref()?.connection;
        let mut groups = hosts[party.host].groups.iter();
        groups.find(|(_, group)| group.members.contains_key(&connection)).map(|(id, _)| id)
    }

    /// The server's answer to a Proposal. Returns whether it could be given.
    fn proposed(&mut self, now: Instant, hosts: &mut Hosts) -> bool {
        let (client, port) = (self.sides[CLIENT].host, self.sides[CLIENT].port);
        let theirs = hosts[client].groups.ports()[port.0].rnic.as_ref().expect("all have one");
        let theirs = theirs.port();
        let id = peer_id(if client == 0 { 1 } else { 2 });
        let source = self.address(client);
        let peer = Peer { id, gid: theirs.gid, mac: theirs.mac, v2: self.is_v2(), source };
        let port = self.sides[SERVER].port;
        let size = self.element_size(hosts, SERVER);
        let groups = &mut hosts[self.sides[SERVER].host].groups;
        let joined = if let Some(group) = groups.joinable(port, peer) {
            match groups.best_link(group) {
                Some(link) => groups.join(now, group, link, size),
                None => Err(Refusal::NoLink),
            }
        } else if groups.founding(port, peer).is_some() {
            Err(Refusal::NotYet)
        } else {
            self.found(now, hosts, SERVER, Role::Server, peer)
        };
        match joined {
            Err(Refusal::NotYet) => {
                self.messages.push_front((SERVER, Message::Proposal));
                return false;
            }
            Ok(joined) => {
                assert_zero(&joined.rmbe);
                let first_contact = self.sides[SERVER].founding.is_some();
                self.say(CLIENT, Message::Accept(Offer { first_contact, ..joined.offer }));
                self.sides[SERVER].joined = Some(joined);
            }
            Err(refusal @ (Refusal::NoSlot | Refusal::NoMemory | Refusal::NoLink)) => {
                self.note(hosts, SERVER, refusal);
                self.decline(now, hosts, SERVER, false);
            }
        }
        true
    }

    /// Where a host is in TCP.
    fn address(&self, host: usize) -> IpAddr {
        let [high, low] = self.peer.to_be_bytes();
        let client = self.sides[CLIENT].host == host;
        let [first, second, ..] = CLIENTS.octets();
        if client { [first, second, high, low].into() } else { SERVERS }
    }

    fn is_v2(&self) -> bool {
        self.agreement != Agreement::V1
    }

    /// The size of the element on one side.
    fn element_size(&self, hosts: &Hosts, side: usize) -> RmbeSize {
        hosts[self.sides[side].host].element_sizes[self.number % 2]
    }

    /// A group for a first contact, and an element in it.
    fn found(
        &mut self,
        now: Instant,
        hosts: &mut Hosts,
        side: usize,
        role: Role,
        peer: Peer,
    ) -> Result<Joined, Refusal> {
        let size = self.element_size(hosts, side);
        let groups = &mut hosts[self.sides[side].host].groups;
        let group = groups.open(now, self.sides[side].port, role, peer);
        let group = group.map_err(|_| Refusal::NoMemory)?;
        let link = groups.best_link(group).expect("a new group has a link");
        let joined = groups.join(now, group, link, size);
        match joined {
            Ok(_) => self.sides[side].founding = Some(group),
            Err(_) => groups.give_up(now, group),
        }
        // A group that is given up will never have more.
        joined.map_err(|_| Refusal::NoMemory)
    }

    /// The client's answer to an Accept. Returns whether it could be given.
    fn accepted(&mut self, now: Instant, hosts: &mut Hosts, offer: &Offer) -> bool {
        let host = self.sides[CLIENT].host;
        if let Some(ours) = self.sides[CLIENT].joined.as_ref().map(|joined| joined.offer) {
            return self.joined(now, hosts, offer, ours);
        }
        let joined = if offer.first_contact {
            self.found(
                now,
                hosts,
                CLIENT,
                Role::Client,
                Peer::of(offer, self.is_v2(), self.address(1 - host)),
            )
        } else {
            let size = self.element_size(hosts, CLIENT);
            let groups = &mut hosts[host].groups;
            match groups.named_by(
                now,
                offer,
                self.is_v2(),
                self.address(1 - host),
                self.sides[CLIENT].port,
            ) {
                Ok((group, link)) => groups.join(now, group, link, size),
                Err(unnamed) => {
                    self.decline(now, hosts, CLIENT, unnamed == Unnamed::OutOfSync);
                    return true;
                }
            }
        };
        let joined = match joined {
            Ok(joined) => joined,
            Err(Refusal::NotYet) => {
                self.messages.push_front((CLIENT, Message::Accept(*offer)));
                return false;
            }
            Err(refusal @ (Refusal::NoSlot | Refusal::NoMemory | Refusal::NoLink)) => {
                self.note(hosts, CLIENT, refusal);
                self.decline(now, hosts, CLIENT, false);
                return true;
            }
        };
        assert_zero(&joined.rmbe);
        let ours = joined.offer;
        self.sides[CLIENT].joined = Some(joined);
        self.joined(now, hosts, offer, ours)
    }

    /// The client has an element. Returns whether it could confirm.
    fn joined(&mut self, now: Instant, hosts: &mut Hosts, offer: &Offer, ours: Offer) -> bool {
        let founding = self.sides[CLIENT].founding;
        match self.take_in(now, hosts, CLIENT, offer) {
            Ok(Taken::Noted) => {}
            Ok(Taken::Awaited) => {
                self.messages.push_front((CLIENT, Message::Accept(*offer)));
                return false;
            }
            Err(()) => {
                self.decline(now, hosts, CLIENT, false);
                return true;
            }
        }
        let confirm = Offer { first_contact: offer.first_contact, ..ours };
        self.say(SERVER, Message::Confirm(confirm));
        if founding.is_none() {
            self.hand_over(hosts, CLIENT);
        }
        true
    }

    /// The server hears what the client confirms. Returns whether it could use it.
    fn confirmed(&mut self, now: Instant, hosts: &mut Hosts, offer: &Offer) -> bool {
        let founding = self.sides[SERVER].founding;
        match (self.take_in(now, hosts, SERVER, offer), founding) {
            (Ok(Taken::Noted), Some(_)) => {}
            (Ok(Taken::Noted), None) => self.hand_over(hosts, SERVER),
            (Ok(Taken::Awaited), _) => {
                self.messages.push_front((SERVER, Message::Confirm(*offer)));
                return false;
            }
            (Err(()), Some(_)) => self.decline(now, hosts, SERVER, false),
            (Err(()), None) => self.fail(now, hosts, SERVER, true),
        }
        true
    }

    /// Takes in the other side's offer, as far as its element is free.
    fn take_in(
        &mut self,
        now: Instant,
        hosts: &mut Hosts,
        side: usize,
        offer: &Offer,
    ) -> Result<Taken, ()> {
        let party = &self.sides[side];
        let connection = party.joined.as_ref().map(|joined| joined.connection).ok_or(())?;
        let groups = &mut hosts[party.host].groups;
        if let Some(group) = party.founding {
            groups.connect(now, group, offer, self.agreement, None).map_err(|_| ())?;
        }
        let taken = match self.held_until {
            Some(until) if until <= now => {
                groups.insist_on_offer(now, connection, offer).map(|()| Taken::Noted)
            }
            Some(_) | None => groups.accept_offer(now, connection, offer),
        };
        match taken {
            Ok(Taken::Awaited) => drop(self.held_until.get_or_insert(now + END_WAIT)),
            Ok(Taken::Noted) | Err(_) => self.held_until = None,
        }
        taken.map_err(|_| ())
    }

    fn note(&self, hosts: &mut Hosts, side: usize, refusal: Refusal) {
        hosts[self.sides[side].host].no_memory += u64::from(refusal == Refusal::NoMemory);
    }

    fn decline(&mut self, now: Instant, hosts: &mut Hosts, side: usize, out_of_sync: bool) {
        self.fail(now, hosts, side, false);
        self.say(1 - side, Message::Decline { out_of_sync });
    }

    fn hand_over(&mut self, hosts: &mut Hosts, side: usize) {
        let party = &mut self.sides[side];
        let Some(joined) = party.joined.take() else { return };
        let Some(stream) = party.stream.take() else { return };
        party.id = Some(joined.connection);
        let host = &mut hosts[party.host];
        host.sessions.opened(joined.connection, side == CLIENT);
        host.groups.hand_over(joined.connection, stream, joined.rmbe, None, true);
    }

    /// Gives back what one side holds, and tells its application, and perhaps the other side.
    fn fail(&mut self, now: Instant, hosts: &mut Hosts, side: usize, tells: bool) {
        let party = &mut self.sides[side];
        let Some(stream) = party.stream.take() else { return };
        let host = &mut hosts[party.host];
        if let Some(joined) = party.joined.take() {
            match host.mutant {
                Some(Mutant::ReuseEarly) => host.reuse_early(now, joined),
                Some(
                    Mutant::TrustAcknowledgements | Mutant::Hasty(_) | Mutant::IgnoreCollision,
                )
                | None => {
                    host.groups.leave(now, joined.connection, joined.rmbe);
                }
            }
        }
        let groups = &mut host.groups;
        if let Some(group) = party.founding.take() {
            groups.give_up(now, group);
        }
        Sockets::default().reset_on_close(&stream);
        if tells {
            self.say(1 - side, Message::Reset);
        }
    }

    /// The TCP connection beside an SMC-R connection was reset: so is that.
    fn reset(&mut self, now: Instant, hosts: &mut Hosts, side: usize) {
        self.fail(now, hosts, side, false);
        if let Some(id) = self.sides[side].id {
            hosts[self.sides[side].host].groups.abort(id);
        }
    }
}

/// Whoever gets an element gets it without a trace of those who had it before.
fn assert_zero(rmbe: &Rmbe) {
    let mut bytes = vec![0; rmbe.capacity() as usize];
    rmbe.copy_out(0, &mut bytes);
    let dirty = bytes.iter().position(|byte| *byte != 0);
    assert_eq!(dirty, None, "a new element is not zero");
}

/// The IP address of clients. Further peers that a client plays have the addresses after this one.
pub(super) const CLIENTS: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 0);
/// Where servers are.
pub(super) const SERVERS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 99, 0, 1));
/// Index of the side that connects.
pub(super) const CLIENT: usize = 0;
/// Index of the side that accepts.
pub(super) const SERVER: usize = 1;
/// As long as production waits for the end of a connection whose element is offered again.
const END_WAIT: Duration = Duration::from_millis(200);
/// As long as production lets a rendezvous last.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
