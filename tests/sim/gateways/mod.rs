//! Two gateways as production builds them, link groups included, under one seed.
//!
//! ```text
//!   application ─ TCP ─ gateway ═══ one to three links ═══ gateway ─ TCP ─ application
//!                       Groups, a poller per RNIC          Groups, a poller per RNIC
//! ```
//!
//! - [`gateway`] is one of them; [`rendezvous`] is CLC between them, in memory;
//! - [`streams`] are connections that carry one stream after another;
//! - [`swarm`] does whatever comes to its mind to them, and judges from outside;
//! - [`wire`] hears what is said about links, [`reach`] what was met of it, [`costs`] what trouble
//!   may cost;
//! - [`elements`] are scenarios of who may write an element;
//! - [`crowd`] is one gateway with a thousand peers;
//! - [`mutants`] shows that the judges would notice.

mod costs;
mod crowd;
mod elements;
pub(crate) mod gateway;
mod mutants;
pub(crate) mod reach;
mod rendezvous;
pub(crate) mod streams;
mod swarm;
mod wire;

use std::time::Duration;

use smcgate::groups::{Event, PortId};
use smcr_engine::ConnectionId;
use smcr_engine::handoff::Ending;
use smcr_proto::handshake::Agreement;
use smcr_proto::{Gid, Instant};
use smcr_rnic::sim::{Network, Odds};

use self::gateway::{Gateway, Sizes};
use self::rendezvous::{Hosts, Rendezvous};
use self::streams::Waiting;
use self::wire::Wire;
use crate::PAUSE_STEPS;
use crate::application::Application;
use crate::hasty::Tokens;

/// One connection: two applications, client first, and where their gateways have it.
pub(crate) struct Connected {
    pub(crate) applications: [Application; 2],
    /// Which gateway, and what it calls the connection once its poller has it.
    pub(crate) names: [(usize, Option<ConnectionId>); 2],
    /// How it ended there, as far as it has.
    ended: [Option<Ending>; 2],
}

impl Connected {
    /// Both applications read what is left, and have nothing more to say.
    pub(crate) fn say_goodbye(&mut self) {
        for one in &mut self.applications {
            one.wake();
            one.finish();
        }
    }
}

/// Everything.
pub(crate) struct World {
    pub(crate) network: Network,
    pub(crate) hosts: Hosts,
    pub(crate) connections: Vec<Connected>,
    pub(crate) now: Instant,
    /// First contacts that succeeded and failed, and groups that ended.
    pub(crate) contacts: [u64; 3],
    /// What the gateways speak.
    pub(crate) agreement: Agreement,
    rendezvous: Vec<Rendezvous>,
    /// TCP connections beside SMC-R that were reset: when this side of that connection notices.
    resets: Vec<(Instant, usize, usize)>,
    sizes: Sizes,
    /// Looks around since time last passed.
    steps: u64,
    /// What is said about links.
    pub(crate) wire: Wire,
    /// What the two gateways of a connection call it: what each hears leads to what the other does.
    pub(crate) tokens: Tokens,
    waiting: Waiting,
}

impl World {
    pub(crate) fn new(seed: u64, odds: Odds, sizes: [Sizes; 2]) -> Self {
        let network = Network::new(seed, odds);
        let [first, second] = &sizes;
        let hosts = [Gateway::new(&network, 1, first), Gateway::new(&network, 2, second)];
        let [sizes, _] = sizes;
        let wire = Wire::new(&network, seed);
        Self {
            network,
            hosts,
            connections: Vec::new(),
            now: Instant(1_000_000_000),
            contacts: [0; 3],
            agreement: Agreement::V1,
            rendezvous: Vec::new(),
            resets: Vec::new(),
            sizes,
            steps: 0,
            wire,
            tokens: Tokens::default(),
            waiting: Waiting::default(),
        }
    }

    /// An application of `client` connects to one of the other host, by these RNICs.
    pub(crate) fn connect(&mut self, client: usize, ports: [PortId; 2]) -> usize {
        self.connect_as(0, client, ports)
    }

    /// As [`connect`](Self::connect), where the gateway of the client plays many peers.
    pub(crate) fn connect_as(&mut self, peer: u16, client: usize, ports: [PortId; 2]) -> usize {
        let (number, applications, sockets) = self.applications_for_next();
        let rendezvous = Rendezvous::new(self.now, number, client, ports, self.agreement, sockets);
        let rendezvous = rendezvous.of_peer(peer);
        let names = rendezvous.names();
        self.connections.push(Connected { applications, names, ended: [None; 2] });
        self.rendezvous.push(rendezvous);
        number
    }

    /// Delivers the next message of one rendezvous, or of all.
    pub(crate) fn talk(&mut self, which: impl Fn(usize) -> bool) -> bool {
        let mut moved = false;
        for (index, one) in self.rendezvous.iter_mut().enumerate() {
            if which(index) || one.deadline() <= self.now {
                moved |= one.advance(self.now, &mut self.hosts);
            }
        }
        self.heed() | moved
    }

    /// The application at one side of a rendezvous that goes on is gone.
    pub(crate) fn break_off(&mut self, index: usize, side: usize) {
        self.rendezvous[index].break_off(self.now, &mut self.hosts, side);
        self.heed();
    }

    /// Rendezvous that go on.
    pub(crate) fn talks(&self) -> usize {
        self.rendezvous.len()
    }

    /// Tells everybody what became of groups.
    fn heed(&mut self) -> bool {
        let mut moved = false;
        for host in 0..2 {
            while let Some(event) = self.next_event_of(host) {
                moved = true;
                match event {
                    Event::Established(_) => self.contacts[0] += 1,
                    Event::FirstContactFailed { .. } => self.contacts[1] += 1,
                    Event::Ended(_) => self.contacts[2] += 1,
                    Event::ElementsChanged(_) => {}
                }
                for one in &mut self.rendezvous {
                    one.heed(self.now, &mut self.hosts, host, event);
                }
            }
        }
        for index in 0..self.rendezvous.len() {
            let (number, names) = (self.rendezvous[index].number, self.rendezvous[index].names());
            self.note_names(number, names);
            if let [(here, Some(ours)), (there, Some(theirs))] = names {
                let ears = [(here, ours.token()), (there, theirs.token())];
                let mut tokens = self.tokens.lock().expect("nobody panics with it");
                tokens.extend([(ears[0], ears[1]), (ears[1], ears[0])]);
            }
        }
        self.rendezvous.retain(|one| !one.is_over());
        moved | self.heed_streams()
    }

    fn next_event_of(&mut self, host: usize) -> Option<Event> {
        let gateway = &mut self.hosts[host];
        gateway.events.pop_front().or_else(|| gateway.groups.poll_event())
    }

    /// One look around by everybody. Returns whether anything moved.
    pub(crate) fn step(&mut self) -> bool {
        self.steps += 1;
        assert!(self.steps < STEPS_MAX, "busy for ever");
        let mut moved = self.applications();
        for host in &mut self.hosts {
            moved |= host.turn(self.now);
        }
        moved |= self.talk(|_| true);
        moved |= self.reset_tcp();
        self.wire.follow(&self.hosts);
        self.wire.note_losses(self.network.lossy_pairs());
        // Who waits for memory makes its gateway ask the peer for some, and has not moved.
        moved || self.hosts.iter().any(Gateway::is_woken)
    }

    /// A gateway resets the TCP connection beside an SMC-R connection that did not end well. The
    /// other gateway notices after a while, unless it sleeps.
    fn reset_tcp(&mut self) -> bool {
        for host in 0..2 {
            for (id, ending) in std::mem::take(&mut self.hosts[host].ended) {
                if ending == Ending::Graceful {
                    continue;
                }
                let mut all = self.connections.iter().enumerate();
                let found = all.find_map(|(number, one)| {
                    let side = one.names.iter().position(|name| *name == (host, Some(id)))?;
                    Some((number, side))
                });
                let (number, side) = found.expect("what ended was a connection");
                self.resets.push((self.now + RESET_NOTICED, number, 1 - side));
            }
        }
        let due = |(at, number, side): &mut (Instant, usize, usize)| {
            *at <= self.now && !self.hosts[self.connections[*number].names[*side].0].asleep
        };
        let due: Vec<_> = self.resets.extract_if(.., due).collect();
        for (_, number, side) in &due {
            match self.connections[*number].names[*side] {
                (host, Some(id)) => self.hosts[host].groups.abort(id),
                (_, None) => {
                    let mut talks = self.rendezvous.iter_mut();
                    if let Some(one) = talks.find(|one| one.number == *number) {
                        one.tcp_was_reset(self.now, &mut self.hosts, *side);
                    }
                }
            }
        }
        !due.is_empty()
    }

    /// One look around by all applications.
    pub(crate) fn applications(&mut self) -> bool {
        let applications = self.connections.iter_mut().flat_map(|one| &mut one.applications);
        applications.fold(false, |moved, application| application.act() | moved)
    }

    /// Moves the clock to the next thing that happens before `until`. Returns whether there is one.
    pub(crate) fn pass_time(&mut self, until: Instant) -> bool {
        let now = self.now;
        let hosts = self.hosts.iter_mut().filter_map(|host| host.next_deadline(now)).min();
        let talks = self.rendezvous.iter().map(Rendezvous::deadline).min();
        let awake = |name: (usize, _)| !self.hosts[name.0].asleep;
        let resets = self
            .resets
            .iter()
            .filter(|(_, number, side)| awake(self.connections[*number].names[*side]));
        let resets = resets.map(|(at, ..)| *at).min();
        let next = [self.network.next_event(), hosts, talks, resets].into_iter().flatten().min();
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

    /// Lets happen what happens while nobody does anything new: for `duration`, or less if there is
    /// much to do.
    pub(crate) fn pause(&mut self, duration: Duration) {
        let until = self.now + duration;
        for _ in 0..PAUSE_STEPS {
            if !(self.step() | self.pass_time(until)) {
                break;
            }
        }
    }

    /// How the connection ended at the gateway of this side, if it was handed over and ended.
    pub(crate) fn ending(&self, number: usize, side: usize) -> Option<Ending> {
        let Connected { names, ended, .. } = &self.connections[number];
        let (host, id) = names[side];
        // What nobody has told the world yet is of the stream that the connection has now.
        let closed = || self.hosts[host].closed.get(&id?).copied();
        let is_last =
            || id.is_some_and(|id| self.waiting.current.get(&(host, id)) == Some(&number));
        ended[side].or_else(|| closed().filter(|_| is_last()))
    }

    /// Whether a poller has it, or had.
    pub(crate) fn was_handed_over(&self, number: usize, side: usize) -> bool {
        self.connections[number].names[side].1.is_some()
    }

    /// The gateway of a port hears of its network.
    pub(crate) fn carrier_changed(&mut self, gid: Gid, carrier: bool) {
        for host in &mut self.hosts {
            if let Some(index) = host.gids.iter().position(|own| *own == gid) {
                host.groups.carrier_changed(self.now, PortId(index), carrier);
            }
        }
    }

    /// All ports.
    pub(crate) fn gids(&self) -> Vec<Gid> {
        self.hosts.iter().flat_map(|host| host.gids.clone()).collect()
    }
}

/// How long a gateway takes to act on the end of the TCP connection beside SMC-R.
const RESET_NOTICED: Duration = Duration::from_millis(300);
/// More looks around than anything needs without time passing.
const STEPS_MAX: u64 = 1_000_000;
