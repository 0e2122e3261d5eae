//! One gateway: production pollers, each over a simulated NIC, and a little control thread.
//!
//! The stand-in does what `control` does with reports and commands, and nothing about rendezvous:
//! connections are established because a test says so.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use smcr_engine::allowance::Allowance;
use smcr_engine::counters::Counters;
use smcr_engine::gauges::Gauges;
use smcr_engine::handoff::{Activity, Ending, KeyChange, Owners, PeerElement, Tally};
use smcr_engine::limits::{COMMANDS_MAX, LETTERS_MAX, SEND_CHUNK_BYTES};
use smcr_engine::mailbox::{Receiver, Sender, Waker, mailbox};
use smcr_engine::poller::{CommandOf, Ends};
use smcr_engine::{Command, ConnectionId, Established, GroupId, LinkId, LlcBytes, Poller, Report};
use smcr_memory::{Region, Rmb, Rmbe};
use smcr_proto::ring::Ring;
use smcr_proto::{AlertToken, Gid, Instant, MacAddress, Mtu, Rkey, RmbeSize};
use smcr_rnic::sim::{self, Network};
use smcr_rnic::{Domain, Message, Opening, Port, QpAddress, Registration, Rnic};

use crate::tcp::{Sockets, Stream};

/// How large things are.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    pub(crate) rmbe: RmbeSize,
    pub(crate) send_chunks: usize,
    pub(crate) socket_bytes: usize,
    pub(crate) reports: usize,
    pub(crate) elements: usize,
    /// RNICs per host, each with a poller.
    pub(crate) rnics: u8,
    /// What the other pollers can tell a poller before it listens.
    pub(crate) letters: usize,
}

impl Sizes {
    pub(crate) const USUAL: Self = Self {
        rmbe: RmbeSize::from_notation(0),
        send_chunks: 16,
        socket_bytes: 40_000,
        reports: 8_192,
        elements: 255,
        rnics: 1,
        letters: LETTERS_MAX,
    };

    fn ring(&self) -> Ring {
        Ring::new(self.rmbe.bytes())
    }
}

/// How a connection ended, as its poller reported it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closed {
    pub(crate) ending: Ending,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
}

/// A slot, its element, and what the peer is told about them.
pub(crate) struct Element {
    pub(crate) id: ConnectionId,
    pub(crate) rmbe: Rmbe,
    pub(crate) described: PeerElement,
}

/// An RNIC and its poller.
struct Place {
    poller: Poller<sim::Fabric, Sockets>,
    sockets: Sockets,
    counters: Arc<Counters>,
    rnic: sim::Rnic,
    domain: Domain,
    registration: Registration,
    commands: Sender<CommandOf<sim::Fabric, Sockets>>,
    pending: Receiver<Report<Stream>>,
    /// Ends the sleep of the poller.
    waker: Waker,
    awake: bool,
}

/// A link as the control thread knows it.
#[derive(Clone, Copy, Debug)]
struct Link {
    place: usize,
    /// How the peer's RMB is addressed through it, if there is another link to compare with.
    theirs: Option<(Rkey, u64)>,
}

/// One gateway.
pub(crate) struct Host {
    /// Of the first poller.
    pub(crate) sockets: Sockets,
    /// Of the first poller.
    pub(crate) counters: Arc<Counters>,
    pub(crate) closed: BTreeMap<ConnectionId, Closed>,
    /// How streams ended, by their number on the connection.
    pub(crate) ends: BTreeMap<(ConnectionId, u32), Closed>,
    /// How many streams of a connection have ended in good order.
    pub(crate) ended: BTreeMap<ConnectionId, u32>,
    /// Connections that have no stream now.
    pub(crate) kept: BTreeSet<ConnectionId>,
    /// Those on which the peer has begun one.
    pub(crate) begun: Vec<ConnectionId>,
    /// Streams that came too late; and whether it is worth to try again.
    pub(crate) refused: Vec<(ConnectionId, Stream, bool)>,
    pub(crate) llc: Vec<(LinkId, LlcBytes)>,
    pub(crate) broken: BTreeSet<LinkId>,
    pub(crate) vacated: BTreeSet<LinkId>,
    pub(crate) retired: BTreeSet<LinkId>,
    /// Links whose connections were given up.
    pub(crate) failed: BTreeSet<LinkId>,
    /// The link each connection was last reported to have moved to.
    pub(crate) moved: BTreeMap<ConnectionId, LinkId>,
    /// Connections of a link that breaks go on over the oldest link that works; or the newest.
    pub(crate) prefers_newest: bool,
    /// How fast new connections may carry bytes.
    pub(crate) allowance: Option<Arc<Allowance>>,
    /// The control thread reads no reports.
    pub(crate) control_asleep: bool,
    places: Vec<Place>,
    links: BTreeMap<LinkId, Link>,
    owners: Arc<Owners>,
    sizes: Sizes,
    rmb: Rmb,
    free: VecDeque<ConnectionId>,
    /// The link group of all links between the hosts of a test.
    group: GroupId,
    /// Wakes the control thread, which sleeps until then.
    waker: Waker,
    waits_for_reports: bool,
}

impl Host {
    pub(crate) fn new(network: &Network, number: u8, sizes: Sizes) -> Self {
        let region = Region::new(sizes.elements * sizes.rmbe.bytes() as usize).unwrap();
        let rmb = Rmb::carve(region, sizes.rmbe);
        let control = Waker::new().unwrap();
        let owners = Arc::new(Owners::new());
        let wakers = (0..sizes.rnics).map(|_| Waker::new().unwrap());
        let mailboxes: Vec<_> = wakers
            .map(|waker| {
                let letters = mailbox(sizes.letters, waker.clone());
                (mailbox(COMMANDS_MAX, waker.clone()), letters, waker)
            })
            .collect();
        let letters_to = mailboxes.iter().map(|(_, letters, _)| letters.0.clone());
        let neighbours = Arc::new(letters_to.collect());
        let places = (0..).zip(mailboxes).map(|(index, mailboxes)| {
            let ((commands, obeyed), (_, letters), waker) = mailboxes;
            let (reports, pending) = mailbox(sizes.reports, control.clone());
            let ends = Ends {
                commands: obeyed,
                letters,
                waker,
                reports,
                neighbours: Arc::clone(&neighbours),
                index,
                owners: Arc::clone(&owners),
                counters: Arc::new(Counters::default()),
                gauges: Arc::new(Gauges::new()),
                observe: Box::new(|_| {}),
            };
            Place::new(network, [index, number], &sizes, &rmb, ends, commands, pending)
        });
        let places: Vec<_> = places.collect();
        let slots = 0..u16::from(rmb.elements());
        Self {
            sockets: places[0].sockets.clone(),
            counters: Arc::clone(&places[0].counters),
            closed: BTreeMap::new(),
            ends: BTreeMap::new(),
            ended: BTreeMap::new(),
            kept: BTreeSet::new(),
            begun: Vec::new(),
            refused: Vec::new(),
            llc: Vec::new(),
            broken: BTreeSet::new(),
            vacated: BTreeSet::new(),
            retired: BTreeSet::new(),
            failed: BTreeSet::new(),
            moved: BTreeMap::new(),
            prefers_newest: false,
            allowance: None,
            control_asleep: false,
            places,
            links: BTreeMap::new(),
            owners,
            sizes,
            rmb,
            free: slots.map(|slot| ConnectionId { slot, generation: 1 }).collect(),
            group: GroupId(1),
            waker: control,
            waits_for_reports: false,
        }
    }

    /// Tells the first poller.
    pub(crate) fn command(&mut self, command: CommandOf<sim::Fabric, Sockets>) {
        self.command_to(0, command);
    }

    /// Tells this poller.
    pub(crate) fn command_to(&mut self, place: usize, command: CommandOf<sim::Fabric, Sockets>) {
        self.places[place].awake = true;
        assert!(self.places[place].commands.send(command).is_ok(), "tests command less than fits");
    }

    /// What a poller counts.
    pub(crate) fn counters_of(&self, place: usize) -> &Counters {
        &self.places[place].counters
    }

    /// What all pollers have counted of one thing.
    pub(crate) fn sum(&self, counter: impl Fn(&Counters) -> u64) -> u64 {
        self.places.iter().map(|place| counter(&place.counters)).sum()
    }

    /// A queue pair of the first RNIC that must still learn its peer.
    pub(crate) fn open(&mut self) -> sim::Opening {
        self.open_at(0)
    }

    /// A queue pair of this RNIC that must still learn its peer.
    pub(crate) fn open_at(&mut self, place: usize) -> sim::Opening {
        let Place { rnic, domain, .. } = &mut self.places[place];
        rnic.open(*domain).unwrap()
    }

    /// A link of this RNIC.
    pub(crate) fn add_link_at(
        &mut self,
        place: usize,
        link: LinkId,
        opening: sim::Opening,
        peer: QpAddress,
        theirs: Option<(Rkey, u64)>,
    ) {
        let qp = opening.connect(peer).unwrap();
        self.links.insert(link, Link { place, theirs });
        let activity = Arc::new(Activity::default());
        self.command_to(place, Command::AddLink { link, group: self.group, qp, activity });
    }

    /// A link of this RNIC in a group of its own, with somebody who has no part in our connections.
    pub(crate) fn add_foreign_link_at(
        &mut self,
        place: usize,
        link: LinkId,
        opening: sim::Opening,
        peer: QpAddress,
    ) {
        let ours = std::mem::replace(&mut self.group, GroupId(1_000));
        self.add_link_at(place, link, opening, peer, None);
        self.group = ours;
    }

    /// How peers address our RMB through this RNIC.
    pub(crate) fn key_at(&self, place: usize) -> (Rkey, u64) {
        let registration = &self.places[place].registration;
        (registration.rkey, registration.address)
    }

    /// The poller of this link.
    fn place_of(&self, link: LinkId) -> usize {
        self.links.get(&link).map_or(0, |link| link.place)
    }

    /// Says that CDC messages for a connection may come, which the poller of this link will get.
    pub(crate) fn expect(&mut self, connection: ConnectionId, link: LinkId) {
        let place = self.place_of(link);
        self.owners.set(connection, self.group, u8::try_from(place).unwrap());
    }

    /// Moves connections to another link: all, or these.
    pub(crate) fn move_connections(
        &mut self,
        from: LinkId,
        to: LinkId,
        only: Option<Vec<ConnectionId>>,
    ) {
        let [old, new] = [from, to].map(|link| self.links[&link]);
        let keys = old.theirs.zip(new.theirs).map(|((old, old_base), (new, new_base))| KeyChange {
            old,
            old_base,
            new,
            new_base,
        });
        let keys = keys.into_iter().collect();
        let to_poller = u8::try_from(new.place).unwrap();
        let command = Command::MoveConnections { from, to, to_poller, keys, only };
        self.command_to(old.place, command);
    }

    /// Where connections of a lost link go on.
    fn way_out(&self, lost: LinkId) -> Option<LinkId> {
        let mut others = self.links.iter().filter(|(link, known)| {
            **link != lost
                && known.theirs.is_some()
                && !self.broken.contains(link)
                && !self.vacated.contains(link)
        });
        let way = if self.prefers_newest { others.next_back() } else { others.next() };
        way.map(|(link, _)| *link).filter(|_| self.links[&lost].theirs.is_some())
    }

    /// Moves connections away from a link that broke, or gives them up.
    fn link_broke(&mut self, link: LinkId) {
        self.broken.insert(link);
        if let Some(to) = self.way_out(link) {
            self.move_connections(link, to, None);
            return;
        }
        self.failed.insert(link);
        let place = self.place_of(link);
        self.command_to(place, Command::FailConnections { link });
        self.command_to(place, Command::RetireLink { link });
    }

    pub(crate) fn has_slot(&self) -> bool {
        !self.free.is_empty()
    }

    /// A slot for a connection. Slots are used again as soon as possible.
    pub(crate) fn take_slot(&mut self) -> Option<ConnectionId> {
        self.free.pop_front()
    }

    /// A slot and an element, and what the peer must know of them at the first RNIC.
    pub(crate) fn take_element(&mut self) -> Option<Element> {
        self.take_element_at(0)
    }

    /// A slot and an element, and what the peer must know of them at this RNIC.
    pub(crate) fn take_element_at(&mut self, place: usize) -> Option<Element> {
        let id = self.take_slot()?;
        let rmbe = self.rmb.take().expect("as many elements as slots");
        let described = self.describe(place, id.token(), &rmbe);
        Some(Element { id, rmbe, described })
    }

    /// The rendezvous failed after [`Self::take_element`].
    pub(crate) fn abandon(&mut self, id: ConnectionId, rmbe: Rmbe) {
        let place = usize::from(self.owners.of(id).unwrap().poller);
        self.owners.clear(id);
        self.command_to(place, Command::Forget { connection: id });
        self.give_back(id, Some(rmbe));
    }

    fn describe(&self, place: usize, token: AlertToken, element: &Rmbe) -> PeerElement {
        let offset = u64::from(element.index() - 1) * u64::from(element.capacity());
        let (rkey, rmb_address) = self.key_at(place);
        let (address, ring) = (rmb_address + offset, self.sizes.ring());
        PeerElement { rkey, address, rmb_address, ring, token }
    }

    pub(crate) fn relay(&mut self, connection: ConnectionId, established: Established<Stream>) {
        let place = match &established {
            Established::Smc { link, .. } => self.place_of(*link),
            Established::Tcp { .. } => 0,
        };
        let established = Box::new(established);
        let allowance = self.allowance.clone();
        self.command_to(place, Command::Relay { connection, established, allowance });
    }

    /// Says something about links, as the control thread does.
    pub(crate) fn send_llc(&mut self, link: LinkId, message: Message) {
        let place = self.place_of(link);
        self.command_to(place, Command::SendLlc { link, message: message.into() });
    }

    /// Lets every poller that has reason to be awake turn once, and the control thread read what
    /// was reported. Returns whether anything moved.
    pub(crate) fn turn(&mut self, now: Instant) -> bool {
        let mut moved = false;
        for place in &mut self.places {
            moved |= place.turn(now);
        }
        moved | self.control_turn()
    }

    /// Lets one poller alone turn once, whatever the others do.
    pub(crate) fn turn_at(&mut self, place: usize, now: Instant) -> bool {
        self.places[place].turn(now)
    }

    /// When some poller must turn again, at the latest.
    pub(crate) fn next_deadline(&mut self, now: Instant) -> Option<Instant> {
        self.places.iter_mut().filter_map(|place| place.poller.next_deadline(now)).min()
    }

    /// The control thread takes a turn if it was woken, and sleeps again.
    fn control_turn(&mut self) -> bool {
        if self.control_asleep {
            // Not at its queue: nobody can wake it, and it will look when it comes back.
            self.waker.awake();
            self.waits_for_reports = false;
            return false;
        }
        if self.waits_for_reports && !self.waker.has_woken() {
            return false;
        }
        self.waker.awake();
        let moved = self.control();
        self.waker.about_to_sleep();
        self.waits_for_reports = true;
        moved | self.control()
    }

    /// Takes in what the pollers reported, as the control thread does.
    fn control(&mut self) -> bool {
        let mut moved = false;
        for place in 0..self.places.len() {
            while let Some(report) = self.places[place].pending.receive() {
                moved = true;
                self.report(report);
            }
        }
        moved
    }

    fn report(&mut self, report: Report<Stream>) {
        match report {
            Report::LlcReceived { link, message, .. } => self.llc.push((link, message)),
            Report::LinkBroke { link, .. } => self.link_broke(link),
            Report::LinkVacated { link } => {
                assert!(self.vacated.insert(link), "vacated twice");
                let place = self.place_of(link);
                self.command_to(place, Command::RetireLink { link });
            }
            Report::Moved { connection, link, .. } => {
                self.moved.insert(connection, link);
            }
            Report::LinkRetired { link } => assert!(self.retired.insert(link)),
            Report::StreamEnded { connection, tally, near } => {
                drop(near);
                self.stream_ended(connection, Ending::Graceful, &tally);
                assert!(self.kept.insert(connection), "it had a stream");
            }
            Report::StreamBegun { connection } => {
                assert!(self.kept.remove(&connection), "it had none");
                self.begun.push(connection);
            }
            Report::StreamRefused { connection, near, moved } => {
                self.refused.push((connection, near, moved));
            }
            Report::Closed { connection, ending, tally, rmbe, streams, kept, .. } => {
                drop(streams);
                self.kept.remove(&connection);
                if !kept {
                    self.stream_ended(connection, ending, &tally);
                }
                let closed =
                    Closed { ending, bytes_in: tally.bytes_in, bytes_out: tally.bytes_out };
                assert_eq!(self.closed.insert(connection, closed), None, "closed twice");
                self.give_back(connection, rmbe);
            }
        }
    }

    fn stream_ended(&mut self, connection: ConnectionId, ending: Ending, tally: &Tally) {
        let number = self.ended.entry(connection).or_default();
        let end = Closed { ending, bytes_in: tally.bytes_in, bytes_out: tally.bytes_out };
        assert_eq!(self.ends.insert((connection, *number), end), None, "ended twice");
        *number += 1;
    }

    /// Gives a connection its next stream, if it is not over.
    pub(crate) fn give_stream(&mut self, connection: ConnectionId, near: Stream) {
        let place = self.owners.of(connection).map_or(0, |owner| owner.poller.into());
        let allowance = self.allowance.clone();
        self.command_to(place, Command::NextStream { connection, near, allowance });
    }

    /// No other stream shall follow on these connections.
    pub(crate) fn close_kept(&mut self, connections: &[ConnectionId]) {
        for connection in connections.iter().copied() {
            let place = self.owners.of(connection).map_or(0, |owner| owner.poller.into());
            self.command_to(place, Command::CloseKept { connection });
        }
    }

    /// The slot, and its element if it had one, may serve others.
    fn give_back(&mut self, connection: ConnectionId, rmbe: Option<Rmbe>) {
        if let Some(rmbe) = rmbe {
            self.rmb.give_back(rmbe);
        }
        let generation = connection.generation.checked_add(1).unwrap_or(1);
        self.free.push_front(ConnectionId { generation, ..connection });
    }

    /// Panics unless everything that was lent is home and every slot is free.
    pub(crate) fn assert_nothing_is_left(&self) {
        for place in &self.places {
            assert_eq!(place.poller.leases_out(), 0, "send leases");
            assert_eq!(place.counters.connections.get(), 0);
        }
        assert_eq!(self.rmb.in_use(), 0, "RMB elements");
        assert_eq!(self.free.len(), usize::from(self.rmb.elements()), "slots");
    }
}

impl Place {
    fn new(
        network: &Network,
        [index, number]: [u8; 2],
        sizes: &Sizes,
        rmb: &Rmb,
        ends: Ends<sim::Fabric, Sockets>,
        commands: Sender<CommandOf<sim::Fabric, Sockets>>,
        pending: Receiver<Report<Stream>>,
    ) -> Self {
        let gid = Gid::from_ipv4([10, 9, index, number]);
        let mac = MacAddress([2, 0, 0, 0, index, number]);
        let (mut rnic, fabric) = network.rnic(Port { gid, mac, mtu: Mtu::B1024 });
        let memory = Region::new(sizes.send_chunks * SEND_CHUNK_BYTES as usize).unwrap();
        rnic.send_from(&memory).unwrap();
        let domain = rnic.open_domain().unwrap();
        let registration = rnic.register(domain, rmb.region()).unwrap();
        let sockets = Sockets::default();
        let (counters, waker) = (Arc::clone(&ends.counters), ends.waker.clone());
        let poller = Poller::new(fabric, sockets.clone(), ends, memory);
        Self {
            poller,
            sockets,
            counters,
            rnic,
            domain,
            registration,
            commands,
            pending,
            waker,
            awake: true,
        }
    }

    fn turn(&mut self, now: Instant) -> bool {
        let due = self.poller.next_deadline(now).is_some_and(|deadline| deadline <= now);
        let woken = self.awake || self.sockets.has_news() || self.waker.has_woken() || due;
        if woken {
            self.waker.awake();
            self.awake = self.poller.turn(now);
            if !self.awake {
                self.waker.about_to_sleep();
                self.awake = self.poller.has_commands();
            }
        }
        woken && self.awake
    }
}
