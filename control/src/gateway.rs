//! The control thread: everything slow, in one place, driven by one epoll.

mod accept;
mod answers;
mod compare;
mod departures;
mod doors;
mod drain;
mod effects;
mod former;
mod introductions;
mod kept;
mod local;
mod missing;
mod over_limit;
mod overload;
mod poller_rows;
mod reload;
mod rnics;
mod settings;
mod stop;
mod upstreams;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use smcr_engine::clock::Clock;
use smcr_engine::mailbox::{Receiver, Waker};
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_proto::{Instant, PeerId};
use smcr_rnic::Rnic;

use crate::access_log::AccessLog;
use crate::config::{Config, RnicConfig, RnicKind};
use crate::confine::Confinement;
use crate::entropy;
use crate::farewells::Farewells;
use crate::groups::{self, Groups, PortId, QpOf};
use crate::idle::{self, IdleWatch};
use crate::intercept::Interception;
use crate::listener::{Common, Listener};
use crate::local::Door;
use crate::network::Network;
use crate::placement::PollerHandle;
use crate::reactor::{Event, Reactor, Token};
use crate::rendezvous::Endpoint;
use crate::service::Service;
use crate::sessions::Sessions;
use crate::smc_option::OptionSource;
use crate::status::{Question, Traffic};
use compare::Speeds;
use doors::Doors;
use former::Former;
use introductions::Introductions;
use kept::Streams;
use local::Local;
use missing::Missing;
use overload::{Overload, descriptors_max};
use rnics::Nic;
pub use rnics::{Arrivals, Names, OpenRnics};
use settings::{group_settings, settings};
use upstreams::Checks;
pub use upstreams::Lookups;

/// An RNIC and its poller. Without an RNIC it relays TCP only.
pub struct PortParts<N: Rnic> {
    /// What the operator calls it.
    pub name: String,
    /// What kind of NIC it is.
    pub kind: RnicKind,
    /// The network device below it.
    pub device: String,
    /// The LAN that it is on.
    pub lan: groups::Lan,
    /// The network it is in.
    pub subnet: Ipv4Subnet,
    /// The NIC.
    pub rnic: Option<N>,
    /// Its poller.
    pub poller: PollerHandle<QpOf<N>>,
    /// What the NIC counts.
    pub traffic: Arc<Traffic>,
}

/// What the gateway knows of a port beside its link groups.
pub struct PortInfo {
    /// What kind of NIC it is.
    pub kind: RnicKind,
    /// The network device below it.
    pub device: String,
    /// What the NIC counts.
    pub traffic: Arc<Traffic>,
}

/// The link groups of a gateway.
pub type GatewayGroups<N> = Groups<N, Vec<PollerHandle<QpOf<N>>>>;

/// Everything the control thread knows.
pub struct Gateway<N: Rnic> {
    config: Config,
    clock: Clock,
    reactor: Reactor,
    option: OptionSource,
    /// What the gateway knows of its ports, beside what link groups do.
    ports: Vec<PortInfo>,
    /// The RNICs that those belong to.
    nics: Vec<Nic>,
    opener: Box<dyn OpenRnics<N>>,
    /// What says that others are missing.
    missing: Missing,
    /// When RNICs that are given up are looked at again.
    look_at_rnics: Instant,
    /// Devices, and which port connections of each go through.
    network: Network,
    listeners: Vec<Listener>,
    /// What those have counted that are gone.
    former: Former,
    /// What they have in common.
    common: Common,
    /// Who we are.
    peer_id: PeerId,
    /// How connections that are meant for others come to them.
    interception: Interception,
    service: Service,
    /// What this process has given up.
    confinement: Confinement,
    /// What names of upstreams mean.
    lookups: Lookups,
    checks: Checks,
    /// Whether SMC-R is faster than TCP.
    speeds: Speeds,
    /// Listeners of a measurement.
    doors: Option<Doors>,
    /// Local programs that have the preload library.
    local: Option<Local>,
    /// Connections of proxies that have not said yet for whom they are.
    introductions: Introductions,
    /// The sockets of all connections.
    sessions: Sessions,
    /// All rendezvous, and the link groups.
    endpoint: Endpoint<N, Vec<PollerHandle<QpOf<N>>>>,
    /// TCP connections beside SMC-R connections that are over.
    farewells: Farewells,
    /// SMC-R connections that carry one stream after another.
    streams: Streams,
    idle: IdleWatch,
    access_log: AccessLog,
    /// Which configuration is in force, as [`Prepared::order`](crate::reload::Prepared) counts.
    reloaded: u64,
    overload: Overload,
    /// How many descriptors the process may have.
    descriptors: usize,
    mail: Mail,
    /// Since when new connections are refused, and until when the others may finish.
    draining: Option<Instant>,
    started: Instant,
}

/// What others tell the control thread.
struct Mail {
    questions: Receiver<Question>,
    waker: Waker,
    stop: Receiver<()>,
}

/// What a gateway is made of.
pub struct Parts<N: Rnic> {
    /// What the operator wrote.
    pub config: Config,
    /// Shared with the pollers.
    pub clock: Clock,
    /// How peers are recognized.
    pub option: OptionSource,
    /// Who we are.
    pub peer_id: PeerId,
    /// RNICs and pollers.
    pub ports: Vec<PortParts<N>>,
    /// Where the ports are.
    pub network: Network,
    /// The RNICs that the operator wants, or that were chosen.
    pub nics: Vec<RnicConfig>,
    /// Opens more of them later.
    pub opener: Box<dyn OpenRnics<N>>,
    /// Listening sockets. Behind them, if there is a door, two without any: for programs that
    /// connect, and for those that accept.
    pub listeners: Vec<Listener>,
    /// Where local programs come in.
    pub door: Option<Door>,
    /// What they have in common.
    pub common: Common,
    /// How connections that are meant for others come to them.
    pub interception: Interception,
    /// Whoever started us.
    pub service: Service,
    /// What this process has given up.
    pub confinement: Confinement,
    /// What looks names of upstreams up.
    pub lookups: Lookups,
    /// Where connections that are over are written down.
    pub access_log: AccessLog,
    /// Wakes the control thread.
    pub waker: Waker,
    /// From the admin thread.
    pub questions: Receiver<Question>,
    /// Says that it is time to stop.
    pub stop: Receiver<()>,
}

impl<N: Rnic> Gateway<N> {
    /// Puts the parts together.
    ///
    /// # Errors
    ///
    /// When the process is out of descriptors.
    pub fn new(parts: Parts<N>) -> io::Result<Self> {
        let reactor = watch(&parts)?;
        let started = parts.clock.now();
        let kinds: Vec<_> = parts.ports.iter().map(|port| &port.kind).collect();
        let speaks = (&parts.option, &parts.listeners[..]);
        let settings = settings(&parts.config, parts.peer_id, &kinds, speaks);
        let nics = parts.nics.into_iter().filter_map(|nic| {
            let named = parts.ports.iter().enumerate().filter(|(_, port)| port.name == nic.name);
            let ports: Vec<_> = named.map(|(index, _)| PortId(index)).collect();
            (!ports.is_empty()).then(|| Nic::new(nic, ports))
        });
        let nics = nics.collect();
        let (ports, groups) = join_ports(group_settings(&parts.config, parts.peer_id), parts.ports);
        let limits = parts.listeners.iter().map(|one| idle::Limits::of(&one.config.bounds));
        let limits = limits.collect();
        let mut gateway = Self {
            config: parts.config,
            clock: parts.clock,
            reactor,
            option: parts.option,
            ports,
            nics,
            opener: parts.opener,
            missing: Missing::default(),
            look_at_rnics: started,
            network: parts.network,
            listeners: parts.listeners,
            former: Former::default(),
            common: parts.common,
            peer_id: parts.peer_id,
            interception: parts.interception,
            service: parts.service,
            confinement: parts.confinement,
            lookups: parts.lookups,
            checks: Checks::default(),
            speeds: Speeds::default(),
            doors: None,
            local: None,
            introductions: Introductions::default(),
            sessions: Sessions::default(),
            endpoint: Endpoint::new(settings, groups),
            farewells: Farewells::default(),
            streams: Streams::default(),
            idle: IdleWatch::new(started, limits),
            access_log: parts.access_log,
            reloaded: 0,
            overload: Overload::new(),
            descriptors: descriptors_max(),
            mail: Mail { questions: parts.questions, waker: parts.waker, stop: parts.stop },
            draining: None,
            started,
        };
        if let Some(door) = parts.door {
            gateway.serve_programs(door)?;
        }
        gateway.watch_names();
        gateway.mind_passed();
        for port in (0..gateway.ports.len()).map(PortId) {
            gateway.carrier_changed(started, port);
        }
        Ok(gateway)
    }

    /// Serves until told to stop, and then until the last connection is over or has no time left.
    ///
    /// # Errors
    ///
    /// When a poller died: nothing can be served without it.
    pub fn run(&mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(256);
        // From now on somebody answers who connects.
        let bound = self.listeners.iter().filter(|listener| listener.socket.is_some());
        for listener in bound {
            let (bind, upstream) = (listener.config.bind, &listener.config.upstream);
            tracing::info!(listener = listener.config.name, %bind, %upstream, "listening");
        }
        self.service.ready();
        while !self.is_drained() {
            let limit = self.prepare_sleep();
            self.reactor.wait(limit, &mut events);
            self.mail.waker.awake();
            for event in events.drain(..) {
                // Each event has a time of its own: rendezvous measure round trips by it.
                let now = self.clock.now();
                // What a peer says by TCP may rest on what it told a poller before.
                self.take_reports(now);
                self.dispatch(now, event);
                self.service.alive(now);
            }
            let now = self.clock.now();
            self.take_reports(now);
            self.begin_arrived();
            let now = self.clock.now();
            self.expire(now);
            self.answer_questions(now);
            self.service.alive(now);
            if self.endpoint.groups().pollers().iter().any(PollerHandle::is_dead) {
                return Err(io::Error::other("a polling thread ended; see the lines above"));
            }
        }
        self.close_down();
        Ok(())
    }

    /// How long the control thread may sleep; zero if something has come in meanwhile.
    fn prepare_sleep(&mut self) -> Option<Duration> {
        self.mail.waker.about_to_sleep();
        // First of all: what is behind must get on however much comes in.
        let mut behind = false;
        for poller in self.endpoint.groups_mut().pollers_mut() {
            behind |= !poller.catch_up();
        }
        let quiet = self.mail.questions.is_empty()
            && self.mail.stop.is_empty()
            && self.lookups.answers.1.is_empty()
            && self.arrived() == 0
            && self.endpoint.groups().pollers().iter().all(|poller| poller.reports.is_empty());
        if !quiet {
            return Some(Duration::ZERO);
        }
        if behind {
            return Some(CATCH_UP_EVERY);
        }
        let deadlines = [
            self.endpoint.poll_timeout(),
            self.sessions.poll_timeout(),
            self.introductions.poll_timeout(),
            self.next_admission(),
            self.next_check(),
            self.speeds.poll_timeout(),
            self.doors.as_ref().map(Doors::until),
            self.local.as_ref().and_then(Local::poll_timeout),
            self.farewells.poll_timeout(),
            self.streams.poll_timeout(self.config.smc.kept_for),
            self.idle.poll_timeout(),
            self.service.poll_timeout(),
            self.draining,
        ];
        let now = self.clock.now();
        let first = deadlines.into_iter().flatten().min().map(|deadline| deadline.since(now));
        // A deadline that has just passed must not make us spin: a millisecond is soon enough.
        let first = first.map(|first| first.max(Duration::from_millis(1)));
        Some(first.map_or(LIFE_SIGN, |first| first.min(LIFE_SIGN)))
    }

    fn dispatch(&mut self, now: Instant, event: Event) {
        match event.token {
            // They begin at the end of the round.
            Token::Listener(index) => drop(self.accept(now, index)),
            Token::Application(key) => self.connect_event(now, key, event),
            Token::Peer(key) => self.peer_event(now, key, event),
            Token::Introduction(key) => self.hear_header(now, key),
            Token::Check(key) => self.check_event(key, event),
            Token::Door => self.open_door_to_programs(now),
            Token::Program(key) => drop(self.hear_program(now, key)),
            Token::Network => self.network_changed(now),
            Token::Policies => self.policies_changed(),
            Token::Passed(number) => self.refuse_passed(number),
            // Looked after at the end of each round.
            Token::Waker | Token::Rnic => {}
        }
    }

    /// Looks after everything that waits for its time.
    fn expire(&mut self, now: Instant) {
        self.interception.look_again(now);
        self.endpoint.handle_timeout(now);
        self.hear_rnics(now);
        self.settle(now);
        self.expire_suspects(now);
        self.expire_introductions(now);
        self.expire_local(now);
        self.admit_waiting(now);
        self.hear_names();
        self.open_missing_rnics(now);
        self.check_upstreams(now);
        self.look_at_speeds(now);
        if self.doors.as_ref().is_some_and(|doors| doors.until() <= now) {
            self.close_doors(now);
        }
        self.expire_idle(now);
        self.farewells.expire(now);
        self.expire_kept(now);
        self.close_rnics(now);
        if self.mail.stop.receive().is_some() {
            match self.draining {
                None => self.drain(now),
                // Whoever asks twice does not want to wait.
                Some(until) => self.draining = Some(until.min(now)),
            }
        }
        if self.draining.is_some_and(|until| until <= now) {
            self.abort_all(now);
        }
    }

    /// Seconds since the gateway started.
    fn uptime_s(&self, now: Instant) -> u64 {
        now.since(self.started).as_secs()
    }
}

/// What the control thread wakes up for, from the beginning on.
fn watch<N: Rnic>(parts: &Parts<N>) -> io::Result<Reactor> {
    let reactor = Reactor::new()?;
    reactor.watch(parts.waker.descriptor(), Token::Waker)?;
    if let Some(changes) = parts.network.descriptor() {
        reactor.watch(changes, Token::Network)?;
    }
    if let Some(changes) = parts.network.policies.descriptor() {
        reactor.watch_edges(changes, Token::Policies)?;
    }
    for rnic in parts.ports.iter().filter_map(|port| port.rnic.as_ref()) {
        if let Some(events) = rnic.descriptor() {
            reactor.watch(events, Token::Rnic)?;
        }
    }
    for (index, listener) in parts.listeners.iter().enumerate() {
        let index = u16::try_from(index).map_err(|_| io::ErrorKind::InvalidInput)?;
        if let Some(socket) = &listener.socket {
            reactor.watch(socket, Token::Listener(index))?;
        }
    }
    Ok(reactor)
}

/// The link groups over these ports, and what else the gateway knows of them.
fn join_ports<N: Rnic>(
    settings: groups::Settings,
    ports: Vec<PortParts<N>>,
) -> (Vec<PortInfo>, GatewayGroups<N>) {
    let (mut infos, mut nics, mut pollers) = (Vec::new(), Vec::new(), Vec::new());
    for port in ports {
        infos.push(PortInfo { device: port.device, kind: port.kind, traffic: port.traffic });
        nics.push(groups::Port::new(port.name, port.lan, port.subnet, port.rnic));
        pollers.push(port.poller);
    }
    let entropy = entropy::numbers();
    (infos, Groups::new(settings, nics, pollers, Box::new(entropy)))
}

/// How soon a poller that is behind is offered commands again.
const CATCH_UP_EVERY: Duration = Duration::from_millis(1);
/// At the latest after this time we look whether our threads are alive.
const LIFE_SIGN: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
