//! One gateway: production link groups and production pollers, one per simulated RNIC.
//!
//! What is missing of a gateway is what has sockets of the kernel: listeners, the reactor, CLC over
//! TCP. The world around it does that part in memory.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use smcgate::groups::{Event, Groups, Lan, Pollers, Port, PortId, Settings};
use smcr_engine::counters::Counters;
use smcr_engine::gauges::Gauges;
use smcr_engine::handoff::{Ending, Owners};
use smcr_engine::limits::{COMMANDS_MAX, CONNECTIONS_MAX, LETTERS_MAX, SEND_CHUNK_BYTES};
use smcr_engine::mailbox::{Receiver, Sender, Waker, mailbox};
use smcr_engine::poller::{CommandOf, Ends};
use smcr_engine::{Command, ConnectionId, Established, GroupId, Poller, Report};
use smcr_memory::Region;
use smcr_proto::link::Keepalive;
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_proto::{Gid, Instant, MacAddress, Mtu, PeerId, RmbeSize};
use smcr_rnic::Rnic as _;
use smcr_rnic::dice::Dice;
use smcr_rnic::sim::{self, Network};

use super::mutants::Mutant;
use super::streams::Sessions;
use crate::tcp::{Sockets, Stream};

/// How large things are at a gateway.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    pub(crate) rnics: u8,
    pub(crate) max_links: u8,
    pub(crate) rmbe: RmbeSize,
    pub(crate) elements: u8,
    pub(crate) rmb_bytes: u64,
    pub(crate) send_chunks: usize,
    pub(crate) socket_bytes: usize,
    pub(crate) reports: usize,
}

/// What one poller says and hears, and what its thread would do about sleeping.
pub(crate) struct Thread {
    pub(crate) poller: Poller<sim::Fabric, Sockets>,
    sockets: Sockets,
    pub(crate) counters: Arc<Counters>,
    pub(crate) pending: Receiver<Report<Stream>>,
    /// Wakes it, where it sleeps.
    waker: Waker,
    sleeps: bool,
}

/// The way from link groups to pollers.
pub(crate) struct Mailboxes {
    pollers: Vec<Mailbox>,
    owners: Arc<Owners>,
    /// Pollers are told that all links and connections are of one group.
    pub(crate) mixes_groups: bool,
    /// Pollers are not told that connections of a failed link go on over another one.
    pub(crate) never_moves: bool,
}

struct Mailbox {
    commands: Sender<CommandOf<sim::Fabric, Sockets>>,
    /// What found the queue full.
    delayed: VecDeque<CommandOf<sim::Fabric, Sockets>>,
}

impl Pollers<sim::Qp> for Mailboxes {
    type Stream = Stream;

    fn expect(&mut self, port: PortId, connection: ConnectionId, group: GroupId) {
        let poller = u8::try_from(port.0).expect("few ports");
        let group = if self.mixes_groups { GroupId(1) } else { group };
        self.owners.set(connection, group, poller);
    }

    fn forget(&mut self, port: PortId, connection: ConnectionId) {
        self.owners.clear(connection);
        self.command(port, Command::Forget { connection });
    }

    fn command(&mut self, port: PortId, mut command: Command<sim::Qp, Stream>) {
        if self.mixes_groups {
            mix_groups(&mut command);
        }
        if self.never_moves
            && let Command::MoveConnections { from, only: None, .. } = &command
        {
            command = Command::FailConnections { link: *from };
        }
        let mailbox = &mut self.pollers[port.0];
        mailbox.delayed.push_back(command);
        mailbox.catch_up();
    }
}

/// Makes a command one of a gateway that has one group for everything.
fn mix_groups(command: &mut Command<sim::Qp, Stream>) {
    if let Command::AddLink { group, .. } = command {
        *group = GroupId(1);
    } else if let Command::Relay { established, .. } = command
        && let Established::Smc { group, .. } = &mut **established
    {
        *group = GroupId(1);
    }
}

impl Mailboxes {
    /// Says to a poller what it had no room for.
    pub(crate) fn catch_up(&mut self, poller: usize) {
        self.pollers[poller].catch_up();
    }
}

impl Mailbox {
    fn catch_up(&mut self) {
        while let Some(command) = self.delayed.pop_front() {
            if let Err(command) = self.commands.send(command) {
                self.delayed.push_front(command);
                return;
            }
        }
    }
}

/// One gateway.
pub(crate) struct Gateway {
    pub(crate) groups: Groups<sim::Rnic, Mailboxes>,
    /// How connections ended. Names are unique, so each ends once.
    pub(crate) closed: BTreeMap<ConnectionId, Ending>,
    /// The same, as far as nobody has looked at it.
    pub(crate) ended: Vec<(ConnectionId, Ending)>,
    /// What it knows of its SMC-R connections.
    pub(crate) sessions: Sessions,
    /// What link groups told that nobody has looked at.
    pub(crate) events: VecDeque<Event>,
    /// Connections that found no memory.
    pub(crate) no_memory: u64,
    /// The control thread does nothing.
    pub(crate) asleep: bool,
    /// Connections take turns with these.
    pub(crate) element_sizes: [RmbeSize; 2],
    pub(crate) gids: Vec<Gid>,
    /// The fault that was planted here.
    pub(crate) mutant: Option<Mutant>,
    threads: Vec<Thread>,
}

impl Gateway {
    pub(crate) fn new(network: &Network, host: u8, sizes: &Sizes) -> Self {
        let Platform { ports, mailboxes, threads } = Platform::new(network, host, sizes);
        let settings = settings(host, sizes);
        Self {
            groups: Groups::new(settings, ports, mailboxes, names(host)),
            closed: BTreeMap::new(),
            ended: Vec::new(),
            sessions: Sessions::default(),
            events: VecDeque::new(),
            no_memory: 0,
            asleep: false,
            element_sizes: [sizes.rmbe, RmbeSize::from_notation(0)],
            gids: (0..sizes.rnics).map(|index| gid(host, index)).collect(),
            mutant: None,
            threads,
        }
    }

    /// Everybody who has reason to be awake looks around once. Returns whether anything moved.
    pub(crate) fn turn(&mut self, now: Instant) -> bool {
        let mut moved = false;
        for index in 0..self.threads.len() {
            moved |= self.turn_poller(index, now);
        }
        moved | self.control(now)
    }

    /// Whether somebody was woken and has not looked around yet.
    pub(crate) fn is_woken(&self) -> bool {
        self.threads.iter().any(Thread::is_woken)
    }

    /// One poller looks around, if it has reason to be awake. Returns whether anything moved.
    pub(crate) fn turn_poller(&mut self, index: usize, now: Instant) -> bool {
        self.groups.pollers_mut().catch_up(index);
        self.threads[index].turn(now)
    }

    /// The control thread takes in what pollers said, and does what is due.
    pub(crate) fn control(&mut self, now: Instant) -> bool {
        if self.asleep {
            return false;
        }
        let mut moved = false;
        for index in 0..self.threads.len() {
            while let Some(report) = self.threads[index].pending.receive() {
                moved = true;
                self.reported(now, report);
            }
        }
        moved |= self.expire_kept(now);
        if self.groups.poll_timeout().is_some_and(|deadline| deadline <= now) {
            moved = true;
            self.groups.expire(now);
        }
        let readdressed = self.groups.hear_rnics(now);
        assert!(readdressed.is_empty(), "simulated ports keep their addresses");
        while let Some(event) = self.groups.poll_event() {
            moved = true;
            self.events.push_back(event);
        }
        moved
    }

    fn reported(&mut self, now: Instant, report: Report<Stream>) {
        match report {
            Report::LlcReceived { link, message, .. } => {
                self.groups.llc_received(now, link, message.as_bytes());
            }
            Report::LinkBroke { link, cause } => self.groups.link_broke(now, link, cause),
            Report::LinkRetired { link } => self.groups.link_retired(now, link),
            Report::Moved { connection, link, rkey, address } => {
                self.groups.connection_moved(connection, link, rkey, address);
            }
            Report::LinkVacated { link } => self.groups.link_vacated(now, link),
            Report::StreamEnded { connection, near, .. } => {
                drop(near);
                self.stream_ended(now, connection);
            }
            Report::StreamBegun { connection } => self.stream_begun(connection),
            Report::StreamRefused { connection, near, moved } => {
                self.stream_refused(now, connection, near, moved);
            }
            Report::Closed { connection, ending, rmbe, settled, streams, kept, .. } => {
                drop(streams);
                assert_eq!(self.closed.insert(connection, ending), None, "closed twice");
                self.ended.push((connection, ending));
                self.session_closed(connection, ending, kept);
                self.groups.closed(now, connection, rmbe, settled);
            }
        }
    }

    /// When somebody must look around again, at the latest.
    pub(crate) fn next_deadline(&mut self, now: Instant) -> Option<Instant> {
        let pollers = self.threads.iter_mut();
        let pollers = pollers.filter_map(|thread| thread.poller.next_deadline(now)).min();
        if self.asleep {
            return pollers;
        }
        [pollers, self.groups.poll_timeout(), self.sessions.next_deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// The sum of one counter over all pollers.
    pub(crate) fn count(&self, counter: impl Fn(&Counters) -> u64) -> u64 {
        self.threads.iter().map(|thread| counter(&thread.counters)).sum()
    }

    /// Panics unless all that was lent is home, and nothing is open that nobody needs.
    pub(crate) fn assert_nothing_is_left(&mut self, network: &Network) {
        for thread in &self.threads {
            assert_eq!(thread.poller.leases_out(), 0, "send leases");
            assert_eq!(thread.counters.connections.get(), 0, "connections");
        }
        if let Some((id, group)) = self.groups.iter().next() {
            let links = group.links.iter().map(|link| (link.id, link.number));
            let (all, out) = group.stock.elements();
            panic!(
                "{id:?} outlives its idle time: {:?}, {} members, {out} of {all} elements out, \
                 links {:?}, founding {}, established {}",
                group.role,
                group.members.len(),
                links.collect::<Vec<_>>(),
                group.is_founding(),
                group.is_established(),
            );
        }
        for gid in &self.gids {
            assert_eq!(network.open_at(*gid), sim::Open::default(), "at {gid}");
        }
        let slots = std::iter::from_fn(|| self.groups.slots_mut().take()).count();
        assert_eq!(slots, CONNECTIONS_MAX, "slots");
    }
}

impl Thread {
    fn new(
        fabric: sim::Fabric,
        ends: Ends<sim::Fabric, Sockets>,
        pending: Receiver<Report<Stream>>,
        memory: Region,
    ) -> Self {
        let (counters, waker) = (Arc::clone(&ends.counters), ends.waker.clone());
        let sockets = Sockets::default();
        let poller = Poller::new(fabric, sockets.clone(), ends, memory);
        Self { poller, sockets, counters, pending, waker, sleeps: false }
    }

    /// Whether it was woken and has not looked around yet.
    pub(crate) fn is_woken(&self) -> bool {
        self.sleeps && self.waker.has_woken()
    }

    /// Looks around, if it has reason to be awake, and sleeps if it found nothing to do.
    pub(crate) fn turn(&mut self, now: Instant) -> bool {
        let due = self.poller.next_deadline(now).is_some_and(|deadline| deadline <= now);
        if self.sleeps && !due && !self.sockets.has_news() && !self.waker.has_woken() {
            return false;
        }
        self.waker.awake();
        let moved = self.poller.turn(now);
        self.sleeps = !moved;
        if self.sleeps {
            self.waker.about_to_sleep();
        }
        moved
    }
}

/// The RNICs of a gateway, the poller of each, and the ways to these.
pub(crate) struct Platform {
    pub(crate) ports: Vec<Port<sim::Rnic>>,
    pub(crate) mailboxes: Mailboxes,
    pub(crate) threads: Vec<Thread>,
}

impl Platform {
    pub(crate) fn new(network: &Network, host: u8, sizes: &Sizes) -> Self {
        let wakers: Vec<_> = (0..sizes.rnics).map(|_| Waker::new().unwrap()).collect();
        let queues = wakers.iter().map(|waker| mailbox(COMMANDS_MAX, waker.clone()));
        let (commands, obeyed): (Vec<_>, Vec<_>) = queues.unzip();
        let letters = wakers.iter().map(|waker| mailbox(LETTERS_MAX, waker.clone()));
        let (neighbours, letters): (Vec<_>, Vec<_>) = letters.unzip();
        let neighbours = Arc::new(neighbours.into_iter().collect());
        let owners = Arc::new(Owners::new());
        let (mut ports, mut threads) = (Vec::new(), Vec::new());
        let heard = wakers.into_iter().zip(obeyed).zip(letters);
        for (index, ((waker, obeyed), letters)) in (0..).zip(heard) {
            let port = smcr_rnic::Port {
                gid: gid(host, index),
                mac: MacAddress([2, 0, 0, 0, host, index]),
                mtu: Mtu::B1024,
            };
            let (mut rnic, fabric) = network.rnic(port);
            let memory = Region::new(sizes.send_chunks * SEND_CHUNK_BYTES as usize).unwrap();
            rnic.send_from(&memory).unwrap();
            // All reach all, so that there are asymmetric links, too.
            let subnet = Ipv4Subnet { network: [10, 0, 0, 0], prefix_bits: 8 };
            let name = format!("sim{index}");
            ports.push(Port::new(name, Lan::default(), subnet, Some(rnic)));
            let (reports, pending) = mailbox(sizes.reports, Waker::new().unwrap());
            let ends = Ends {
                commands: obeyed,
                letters,
                waker,
                reports,
                neighbours: Arc::clone(&neighbours),
                index,
                owners: Arc::clone(&owners),
                counters: Arc::default(),
                gauges: Arc::new(Gauges::new()),
                observe: Box::new(|_| {}),
            };
            threads.push(Thread::new(fabric, ends, pending, memory));
        }
        let delayed = VecDeque::new;
        let pollers = commands.into_iter().map(|commands| Mailbox { commands, delayed: delayed() });
        let mailboxes = Mailboxes {
            pollers: pollers.collect(),
            owners,
            mixes_groups: false,
            never_moves: false,
        };
        Self { ports, mailboxes, threads }
    }
}

/// What the operator of a gateway has decided.
pub(crate) fn settings(host: u8, sizes: &Sizes) -> Settings {
    Settings {
        peer_id: peer_id(host),
        rmb_elements: sizes.elements,
        rmbe_size_min: RmbeSize::default(),
        rmb_bytes: sizes.rmb_bytes,
        keepalive: Keepalive {
            idle: Some(Duration::from_secs(3)),
            reply_wait: Duration::from_secs(2),
        },
        idle_group_server: IDLE_GROUP,
        idle_group_client: IDLE_GROUP + Duration::from_secs(1),
        max_links: sizes.max_links,
    }
}

/// What the names of connections are drawn from.
pub(crate) fn names(host: u8) -> Box<dyn FnMut() -> u32 + Send> {
    let mut dice = Dice::new(host.into());
    Box::new(move || u32::try_from(dice.below(1 << 32)).expect("32 bits"))
}

/// Who a host is.
pub(crate) fn peer_id(host: u8) -> PeerId {
    PeerId([host, host, 2, 0, 0, 0, 0, host])
}

/// The port of a host.
pub(crate) fn gid(host: u8, rnic: u8) -> Gid {
    Gid::from_ipv4([10, rnic, 0, host])
}

/// How long a group without connections stays.
pub(crate) const IDLE_GROUP: Duration = Duration::from_secs(20);
