//! Two gateways with the rendezvous of production, and perhaps a third host that is hostile.
//!
//! ```text
//!   application ─ TCP ─ gateway ─────── TCP, CLC ─────── gateway ─ TCP ─ application
//!                       Endpoint ═════ RNICs, links ═════ Endpoint
//!                           └──── TCP, CLC, links ──── intruder
//! ```
//!
//! - [`node`] is one gateway, [`pipe`] is TCP between two hosts;
//! - [`call`] is one connection of two applications;
//! - [`trouble`] is made between them, and [`blame`] knows what it is to blame for;
//! - [`perform`] does what an endpoint asks for, as the control thread of a gateway does;
//! - [`intruder`] is the hostile host;
//! - [`swarm`] acts on them at random, and [`judge`] judges the result from outside;
//! - [`mutants`] shows that the judge would notice.

mod blame;
mod call;
mod intruder;
mod judge;
mod mutants;
mod node;
mod perform;
mod pipe;
mod swarm;
mod trouble;

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use smcgate::groups::PortId;
use smcgate::rendezvous::{Stage, Told};
use smcgate::slab::Key;
use smcr_engine::Report;
use smcr_engine::handoff::Ending;
use smcr_proto::Instant;
use smcr_proto::wire::clc::Frame;
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::{Network, Odds};

use self::blame::Blame;
use self::call::{Call, Program, Way};
use self::intruder::Intruder;
use self::mutants::Planted;
use self::node::{HANDSHAKES_MAX, Node, Speaks};
use self::pipe::Segment;
use crate::application::{Application, Heard};
use crate::gateways::gateway::Sizes;
use crate::gateways::reach::Met;
use crate::habits::Down;
use crate::hasty::Tokens;
use crate::tcp::{self, Stream};

/// Everything.
pub(crate) struct World {
    pub(crate) network: Network,
    pub(crate) nodes: [Node; 2],
    pub(crate) calls: Vec<Call>,
    pub(crate) now: Instant,
    pub(crate) intruder: Option<Intruder>,
    /// What the gateways have said in CLC to each other.
    pub(crate) overheard: Vec<Frame>,
    /// What trouble was made.
    pub(crate) blame: Blame,
    /// What was met of limits.
    pub(crate) met: Met,
    /// What either gateway of a connection calls it, for those who listen to its links.
    pub(crate) tokens: Tokens,
    /// A fault of both gateways.
    pub(crate) planted: Option<Planted>,
    /// What TCP does.
    dice: Dice,
    /// The longest that a segment takes.
    slow: Duration,
    /// Whether the upstream of a server may refuse.
    pub(crate) refuses: bool,
    /// How likely a host gets a policy of IPsec for a connection, at about the time of its
    /// rendezvous; decided by these dice.
    protects: (Chance, Dice),
    socket_bytes: usize,
    /// Ports that are down.
    pub(crate) down: Down,
    /// Looks around since time last passed.
    steps: u64,
}

/// What a world is made of.
pub(crate) struct Parts {
    pub(crate) odds: Odds,
    pub(crate) sizes: [Sizes; 2],
    pub(crate) speaks: [Speaks; 2],
    pub(crate) slow: Duration,
    /// What gateways take for the address of the intruder's server.
    pub(crate) intruder: [IpAddr; 2],
}

impl World {
    pub(crate) fn new(seed: u64, parts: &Parts) -> Self {
        let network = Network::new(seed, parts.odds.clone());
        let nodes = [0, 1].map(|host: usize| {
            let number = u8::try_from(host + 1).expect("two hosts");
            let servers = node::servers_of(host, parts.intruder[host]);
            Node::new(&network, number, &parts.sizes[host], parts.speaks[host], servers)
        });
        Self {
            network,
            nodes,
            calls: Vec::new(),
            now: Instant(1_000_000_000),
            intruder: None,
            overheard: Vec::new(),
            blame: Blame::default(),
            met: Met::default(),
            tokens: Tokens::default(),
            planted: None,
            dice: Dice::new(seed ^ 0x7463_7000),
            slow: parts.slow,
            refuses: false,
            protects: protection(seed),
            socket_bytes: parts.sizes[0].socket_bytes,
            down: Down::default(),
            steps: 0,
        }
    }

    /// An application of `client` connects to one behind `server`, by these ports of the gateways.
    /// Returns its number.
    pub(crate) fn connect(&mut self, client: usize, server: usize, ports: [PortId; 2]) -> usize {
        let number = self.calls.len();
        let seed = 2 * number as u64;
        let mut streams = [None, None];
        let hosts = [client, server];
        let honest = !hosts.contains(&INTRUDER);
        let programs = [0, 1].map(|side| {
            if hosts[side] == INTRUDER {
                return Program::None;
            }
            let (program, stream) = tcp::connection(self.socket_bytes);
            streams[side] = Some(stream);
            let [ours, theirs] = [seed + side as u64, seed + 1 - side as u64];
            match honest {
                true => Program::Honest(Application::new(program, ours, theirs)),
                false => Program::Sink(program),
            }
        });
        let mut call = Call::new(self.now, hosts, ports, programs, streams);
        call.sides.iter_mut().for_each(|side| side.protected_from = self.next_policy());
        self.calls.push(call);
        if client == INTRUDER {
            let at = self.now + self.dice.duration(&(Duration::ZERO..=self.slow));
            self.calls[number].dial.arrives = Some(at);
            self.calls[number].dial.offers = true;
        } else {
            self.arrive(number);
        }
        number
    }

    /// When a host gets a policy by which IPsec protects a connection that begins now.
    fn next_policy(&mut self) -> Option<Instant> {
        let (chance, dice) = &mut self.protects;
        // Before the Proposal, or before any of the messages that follow it.
        let wait = dice.duration(&(Duration::ZERO..=4 * self.slow));
        let wait = if dice.roll(Chance::percent(30)) { Duration::ZERO } else { wait };
        dice.roll(*chance).then_some(self.now + wait)
    }

    /// The side of a call that is at this host.
    fn side_of(&self, number: usize, host: usize) -> usize {
        usize::from(self.calls[number].hosts[CLIENT] != host)
    }

    /// Sends to the other side of a call.
    pub(crate) fn send(&mut self, number: usize, side: usize, segment: Segment) {
        let Self { calls, dice, now, slow, .. } = self;
        calls[number].lanes[side].send(*now, *slow, dice, segment);
    }

    /// One look around by everybody. Returns whether anything moved.
    pub(crate) fn step(&mut self) -> bool {
        self.steps += 1;
        assert!(self.steps < STEPS_MAX, "busy for ever");
        let mut moved = self.programs();
        for node in &mut self.nodes {
            moved |= node.turn_pollers(self.now);
        }
        moved |= self.carry();
        for host in 0..2 {
            moved |= self.control(host);
        }
        moved |= self.visit(Intruder::turn);
        // Whether somebody was woken costs system calls.
        moved || self.nodes.iter().any(Node::is_woken)
    }

    /// Lets the intruder do something, if there is one.
    pub(crate) fn visit(&mut self, what: impl Fn(&mut Intruder, &mut Self) -> bool) -> bool {
        let Some(mut intruder) = self.intruder.take() else { return false };
        let moved = what(&mut intruder, self);
        self.intruder = Some(intruder);
        moved
    }

    /// One look around by all applications.
    pub(crate) fn programs(&mut self) -> bool {
        let mut moved = false;
        for call in &mut self.calls {
            for program in &mut call.programs {
                moved |= program.act();
            }
            let mut honest = call.programs.iter().filter_map(Program::honest);
            if honest.any(|application| application.heard() == Heard::Reset) {
                call.note_break(self.now);
            }
        }
        moved
    }

    /// What TCP between the hosts does by itself: segments arrive, connections come up, and pollers
    /// that relay TCP get and give their bytes.
    pub(crate) fn carry(&mut self) -> bool {
        let mut moved = false;
        for number in 0..self.calls.len() {
            if self.calls[number].is_over() {
                continue;
            }
            if self.planted == Some(Planted::ForgetsLinks) {
                self.forget_links(number);
            }
            self.note_outlived_link(number);
            moved |= self.calls[number].deliver(self.now);
            moved |= self.dialled(number);
            for side in [CLIENT, SERVER] {
                while let Some(segment) = self.calls[number].pump(side) {
                    self.send(number, side, segment);
                    moved = true;
                }
            }
        }
        moved
    }

    /// The control thread of a gateway takes in what pollers said, does what is due, and reads what
    /// came by TCP.
    pub(crate) fn control(&mut self, host: usize) -> bool {
        self.note_failed_links();
        if let Some(since) = self.nodes[host].asleep {
            self.blame.note_standstill(self.now, since);
            return false;
        }
        let mut moved = false;
        while let Some(report) = self.nodes[host].next_report() {
            moved = true;
            self.report(host, report);
        }
        let node = &mut self.nodes[host];
        if node.endpoint.poll_timeout().is_some_and(|deadline| deadline <= self.now) {
            moved = true;
            node.endpoint.handle_timeout(self.now);
        }
        let readdressed = node.endpoint.groups_mut().hear_rnics(self.now);
        assert!(readdressed.is_empty(), "simulated ports keep their addresses");
        self.drain(host);
        self.note_crowd(host);
        for number in 0..self.calls.len() {
            if self.calls[number].is_over() {
                continue;
            }
            if let Some(side) = self.calls[number].hosts.iter().position(|one| *one == host) {
                moved |= self.read(number, side);
            }
        }
        moved
    }

    fn report(&mut self, host: usize, report: Report<Stream>) {
        let node = &mut self.nodes[host];
        let closed = match node.endpoint.reported(self.now, report) {
            None => return self.drain(host),
            Some(Told::Closed(closed)) => closed,
            Some(
                Told::StreamEnded { .. } | Told::StreamBegun { .. } | Told::StreamRefused { .. },
            ) => panic!("connections have one stream"),
        };
        drop(closed.streams);
        let (connection, ending) = (closed.connection, closed.ending);
        assert_eq!(node.closed.insert(connection, ending), None, "closed twice");
        self.drain(host);
        let number = self.calls.iter().rposition(|call| {
            call.hosts
                .iter()
                .zip(&call.sides)
                .any(|(one, side)| *one == host && side.connection == Some(connection))
        });
        let number = number.expect("what ended was a connection");
        let side = self.side_of(number, host);
        let graceful = ending == Ending::Graceful;
        self.calls[number].last = self.now;
        if !graceful {
            self.calls[number].note_break(self.now);
        }
        if matches!(self.calls[number].sides[side].way, Way::Smc) {
            let segment = if graceful { Segment::End } else { Segment::Reset };
            self.calls[number].sides[side].way = Way::Over;
            self.send(number, side, segment);
        }
    }

    /// Moves the clock to the next thing that happens before `until`. Returns whether there is one.
    pub(crate) fn pass_time(&mut self, until: Instant) -> bool {
        let now = self.now;
        let nodes = self.nodes.iter_mut().filter_map(|node| node.next_deadline(now)).min();
        let asleep = self.nodes.each_ref().map(Node::is_asleep);
        let calls = self.calls.iter().filter_map(|call| call.next(asleep)).min();
        let next = [self.network.next_event(), nodes, calls].into_iter().flatten().min();
        let Some(at) = next.filter(|at| *at <= until) else { return false };
        if at > self.now {
            self.now = at;
            self.steps = 0;
        }
        true
    }

    /// Lets everything happen that happens within `duration`.
    pub(crate) fn run_for(&mut self, duration: Duration) {
        let until = self.now + duration;
        while self.step() || self.pass_time(until) {}
        self.now = self.now.max(until);
    }

    /// The longest that a connection may wait for its rendezvous where nothing breaks.
    pub(crate) fn patience(&self) -> Duration {
        PATIENCE + 40 * self.slow
    }

    /// How the connection ended at the gateway of this side, if a poller had it and it ended.
    pub(crate) fn ending(&self, number: usize, side: usize) -> Option<Ending> {
        let call = &self.calls[number];
        self.nodes[call.hosts[side]].closed.get(&call.sides[side].connection?).copied()
    }

    /// Notes whether anybody waits for a place among the rendezvous.
    fn note_crowd(&mut self, host: usize) {
        let endpoint = &self.nodes[host].endpoint;
        let waits = |number| endpoint.stage(key(number)) == Some(Stage::Waiting);
        if endpoint.len() > HANDSHAKES_MAX && (0..self.calls.len()).any(waits) {
            self.met.note("a rendezvous waits for a place");
        }
    }
}

/// How likely a host gets a policy of IPsec for a connection under this seed, and the dice that
/// decide it: others than those for everything else, so that the same happens beside it.
fn protection(seed: u64) -> (Chance, Dice) {
    let mut dice = Dice::new(seed ^ 0x6970_7365_6300);
    let chances = [Chance::NEVER, Chance::NEVER, Chance::percent(2), Chance::percent(20)];
    (chances[dice.index(4)], dice)
}

/// The key of a call, at either gateway.
fn key(number: usize) -> Key {
    Key { index: u32::try_from(number).expect("few calls"), generation: 1 }
}

/// Where a gateway is in TCP.
fn address_of(host: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 98, 0, u8::try_from(host + 1).expect("few hosts")))
}

/// Index of the side that connects.
const CLIENT: usize = 0;
/// Index of the side that accepts.
const SERVER: usize = 1;
/// The number of the host that is no gateway.
pub(crate) const INTRUDER: usize = 2;
/// As long as a gateway waits for an answer to its SYN.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// As long as a gateway lets a rendezvous last.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longer than a rendezvous takes where nothing breaks, beside what TCP takes.
const PATIENCE: Duration = Duration::from_secs(2);
/// More looks around than anything needs without time passing.
const STEPS_MAX: u64 = 100_000;
