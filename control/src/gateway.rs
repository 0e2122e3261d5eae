//! The control thread: everything slow, in one place, driven by one epoll.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::system::uname;
use smcr_engine::clock::Clock;
use smcr_engine::limits::CONNECTIONS_MAX;
use smcr_engine::mailbox::{Receiver, Waker};
use smcr_proto::handshake::{Policy, PolicyV2};
use smcr_proto::link::Keepalive;
use smcr_proto::wire::clc::Diagnosis;
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_proto::wire::clc::v2::{HostName, RELEASE};
use smcr_proto::{Instant, PeerId};
use smcr_rnic::Rnic;

use crate::config::{Config, RnicKind};
use crate::farewells::Farewells;
use crate::groups::{self, GroupId, Groups, PortId, QpOf, Settings, Throttle};
use crate::host_memory;
use crate::listener::Listener;
use crate::network::Network;
use crate::paths::Paths;
use crate::placement::Poller;
use crate::places::Places;
use crate::reactor::{Event, Key, Reactor, Token};
use crate::rendezvous::ANSWER_WITHIN;
use crate::sessions::{Founding, Session};
use crate::slab::Slab;
use crate::smc_option::OptionSource;
use crate::sources::Silent;
use crate::start::random;
use crate::status::{Question, Traffic};

/// An RNIC and its poller. Without an RNIC it relays TCP only.
pub struct Port<N: Rnic> {
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
    pub poller: Poller<QpOf<N>>,
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
pub type GatewayGroups<N> = Groups<N, Vec<Poller<QpOf<N>>>>;

/// Everything the control thread knows.
pub struct Gateway<N: Rnic> {
    pub(crate) config: Config,
    pub(crate) clock: Clock,
    pub(crate) reactor: Reactor,
    pub(crate) option: OptionSource,
    pub(crate) peer_id: PeerId,
    host_name: HostName,
    pub(crate) ports: Vec<PortInfo>,
    /// Devices, and which port connections of each go through.
    pub(crate) network: Network,
    pub(crate) listeners: Vec<Listener>,
    pub(crate) sessions: Slab<Session>,
    /// Which rendezvous may go on, and which wait.
    pub(crate) places: Places,
    /// Peers that have not sent a Proposal yet.
    pub(crate) silent: Silent,
    /// Of these, such as had to go for others.
    pub(crate) silent_cut_short: u64,
    /// When connections are looked at next for being idle.
    pub(crate) idle_at: Instant,
    /// Connections that were reset for being idle.
    pub(crate) idle_closed: u64,
    /// How many sessions are rendezvous.
    pub(crate) shaking: usize,
    /// Which sessions are rendezvous, or were at the last tick.
    pub(crate) shaking_keys: Vec<Key>,
    /// When the rendezvous are looked at again.
    pub(crate) tick_at: Instant,
    pub(crate) groups: GatewayGroups<N>,
    /// Who waits for first contacts.
    pub(crate) foundings: HashMap<GroupId, Founding>,
    /// To whom RoCE did not get through.
    pub(crate) paths: Paths,
    /// Rendezvous that wait for a link to show that it carries.
    pub(crate) proving: Vec<Key>,
    /// Which session has which slot.
    pub(crate) session_of: Box<[Option<Key>]>,
    /// Why a rendezvous that is about to fall back does so.
    pub(crate) fallback_reasons: HashMap<Key, Diagnosis>,
    pub(crate) fallbacks: BTreeMap<Diagnosis, u64>,
    pub(crate) connections_smc: u64,
    pub(crate) connections_tcp: u64,
    pub(crate) handshakes_failed: u64,
    /// When an offer of a peer was last complained about.
    pub(crate) bad_offers: Throttle,
    /// When somebody who is not listed was last complained about.
    pub(crate) unlisted: Throttle,
    /// Bytes of connections that are over.
    pub(crate) bytes_closed: (u64, u64),
    /// SMC-R connections whose TCP connection has ended, oldest first; their peer may be dead.
    pub(crate) suspects: VecDeque<(Instant, Key)>,
    /// TCP connections beside SMC-R connections that are over.
    pub(crate) farewells: Farewells,
    /// A descriptor to give up when there are no more.
    pub(crate) reserve: Option<OwnedFd>,
    pub(crate) limit_logged_at: Option<Instant>,
    pub(crate) questions: Receiver<Question>,
    pub(crate) waker: Waker,
    pub(crate) stop: Receiver<()>,
    /// Since when new connections are refused, and until when the others may finish.
    pub(crate) draining: Option<Instant>,
    started: Instant,
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
    pub ports: Vec<Port<N>>,
    /// Where the ports are.
    pub network: Network,
    /// Listening sockets.
    pub listeners: Vec<Listener>,
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
        let reactor = Reactor::new()?;
        reactor.watch(parts.waker.descriptor(), Token::Waker)?;
        if let Some(changes) = parts.network.descriptor() {
            reactor.watch(changes, Token::Network)?;
        }
        for (index, listener) in parts.listeners.iter().enumerate() {
            let index = u16::try_from(index).map_err(|_| io::ErrorKind::InvalidInput)?;
            if let Some(socket) = &listener.socket {
                reactor.watch(socket, Token::Listener(index))?;
            }
        }
        let started = parts.clock.now();
        let places = places(&parts.config, &parts.listeners);
        let silent = Silent::new(parts.config.limits.silent_max as usize);
        let settings = settings(&parts.config, parts.peer_id);
        let (ports, groups) = join_ports(settings, parts.ports);
        let mut groups = groups;
        for index in (0..ports.len()).map(PortId) {
            groups.carrier_changed(started, index, parts.network.is_up(index));
        }
        Ok(Self {
            config: parts.config,
            clock: parts.clock,
            reactor,
            option: parts.option,
            peer_id: parts.peer_id,
            host_name: HostName::new(&uname().nodename().to_string_lossy()),
            ports,
            network: parts.network,
            listeners: parts.listeners,
            sessions: Slab::default(),
            places,
            silent,
            silent_cut_short: 0,
            idle_at: started,
            idle_closed: 0,
            shaking: 0,
            shaking_keys: Vec::new(),
            tick_at: started,
            groups,
            foundings: HashMap::new(),
            paths: Paths::default(),
            proving: Vec::new(),
            session_of: vec![None; CONNECTIONS_MAX].into(),
            fallback_reasons: HashMap::new(),
            fallbacks: BTreeMap::new(),
            connections_smc: 0,
            connections_tcp: 0,
            handshakes_failed: 0,
            bad_offers: Throttle::default(),
            unlisted: Throttle::default(),
            bytes_closed: (0, 0),
            suspects: VecDeque::new(),
            farewells: Farewells::default(),
            reserve: rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).ok(),
            limit_logged_at: None,
            questions: parts.questions,
            waker: parts.waker,
            stop: parts.stop,
            draining: None,
            started,
        })
    }

    /// Serves until told to stop, and then until the last connection is over or has no time left.
    ///
    /// # Errors
    ///
    /// When a poller died: nothing can be served without it.
    pub fn run(&mut self) -> io::Result<()> {
        let mut events = Vec::with_capacity(256);
        while !self.is_drained() {
            let limit = self.prepare_sleep();
            self.reactor.wait(limit, &mut events);
            self.waker.awake();
            let now = self.clock.now();
            for event in events.drain(..) {
                // What a peer says by TCP may rest on what it told a poller before.
                self.take_reports(now);
                self.dispatch(now, event);
                self.heed_groups(now);
            }
            self.take_reports(now);
            self.expire(now);
            self.heed_groups(now);
            self.admit(now);
            self.answer_questions(now);
            if self.groups.pollers().iter().any(Poller::is_dead) {
                return Err(io::Error::other("a polling thread ended; see the lines above"));
            }
        }
        self.close_down();
        Ok(())
    }

    /// How long the control thread may sleep; zero if something has come in meanwhile.
    fn prepare_sleep(&mut self) -> Option<Duration> {
        self.waker.about_to_sleep();
        // First of all: what is behind must get on however much comes in.
        let mut behind = false;
        for poller in self.groups.pollers_mut() {
            behind |= !poller.catch_up();
        }
        let quiet = self.questions.is_empty()
            && self.stop.is_empty()
            && self.groups.pollers().iter().all(|poller| poller.reports.is_empty());
        if !quiet {
            return Some(Duration::ZERO);
        }
        if behind {
            return Some(CATCH_UP_EVERY);
        }
        let now = self.clock.now();
        let groups = self.groups.poll_timeout().map(|deadline| deadline.since(now));
        let waits = self.shaking > 0
            || !self.suspects.is_empty()
            || !self.farewells.is_empty()
            || self.draining.is_some();
        let tick = if self.proving.is_empty() { TICK } else { TICK_OF_PROOF };
        let tick = waits.then_some(tick);
        // A deadline that has just passed must not make us spin: a millisecond is soon enough.
        [groups.map(|groups| groups.max(Duration::from_millis(1))), tick, Some(LIFE_SIGN)]
            .into_iter()
            .flatten()
            .min()
    }

    fn dispatch(&mut self, now: Instant, event: Event) {
        match event.token {
            Token::Listener(index) => self.accept(now, index),
            Token::Application(key) => self.connect_event(now, key),
            Token::Peer(key) => {
                if matches!(self.sessions.at(key), Some(Session::Shaking(_))) {
                    self.peer_event(now, key, event);
                }
                // The end may come with the last message of the rendezvous, and is told once.
                if event.ending {
                    self.tcp_ended(now, key);
                }
            }
            Token::Network => self.network_changed(now),
            Token::Waker => {}
        }
    }

    /// Looks after everything that waits for its time.
    fn expire(&mut self, now: Instant) {
        if self.tick_at <= now || !self.proving.is_empty() {
            self.tick_at = now + TICK;
            self.expire_rendezvous(now);
        }
        self.groups.expire(now);
        self.expire_suspects(now);
        self.expire_idle(now);
        self.farewells.expire(now);
        if self.stop.receive().is_some() {
            match self.draining {
                None => self.drain(now),
                // Whoever asks twice does not want to wait.
                Some(until) => self.draining = Some(until.min(now)),
            }
        }
        if self.draining.is_some_and(|until| until <= now) {
            self.abort_all();
        }
    }

    /// The port that a session's connection to the peer goes through.
    pub(crate) fn port_of(&self, key: Key) -> Option<PortId> {
        self.network.ports_for(self.local_of(key)?).first().copied()
    }

    /// The local address of a rendezvous.
    pub(crate) fn local_of(&self, key: Key) -> Option<IpAddr> {
        let Some(Session::Shaking(shaking)) = self.sessions.at(key) else { return None };
        let local = rustix::net::getsockname(&shaking.peer).ok()?;
        Some(SocketAddr::try_from(local).ok()?.ip())
    }

    /// Which versions are spoken over a port, and how.
    pub(crate) fn policy(&self, port: Option<PortId>) -> Policy {
        let smc = &self.config.smc;
        let v2 = PolicyV2 {
            eids: smc.eids,
            release: RELEASE,
            max_connections: CONNECTIONS_PER_GROUP,
            max_links: smcr_proto::limits::LINKS_PER_GROUP_MAX,
            host_name: self.host_name,
        };
        Policy {
            v1: port.is_some_and(|port| smc.versions.speaks_v1(self.ports[port.0].kind)),
            v2: smc.versions.speaks_v2().then_some(v2),
        }
    }

    /// Seconds since the gateway started.
    pub(crate) fn uptime_s(&self, now: Instant) -> u64 {
        now.since(self.started).as_secs()
    }
}

/// What the operator decided about link groups.
fn settings(config: &Config, peer_id: PeerId) -> Settings {
    let smc = &config.smc;
    Settings {
        peer_id,
        rmb_elements: u8::try_from(smc.rmb_elements).expect("the configuration was checked"),
        rmb_bytes: config.limits.rmb_bytes(host_memory::limit()),
        keepalive: Keepalive { idle: Some(smc.test_link_idle), reply_wait: smc.test_link_timeout },
        idle_group_server: smc.idle_group_server,
        idle_group_client: smc.idle_group_client,
        max_links: smcr_proto::limits::LINKS_PER_GROUP_MAX,
    }
}

/// Places for as many rendezvous as the operator allows.
fn places(config: &Config, listeners: &[Listener]) -> Places {
    let contenders = listeners.iter().filter(|listener| listener.speaks_smc()).count();
    let max = config.limits.handshakes_max as usize;
    let patience = config.smc.handshake_timeout.min(ANSWER_WITHIN);
    Places::new(max, listeners.len(), contenders, patience)
}

/// The link groups over these ports, and what else the gateway knows of them.
fn join_ports<N: Rnic>(
    settings: Settings,
    ports: Vec<Port<N>>,
) -> (Vec<PortInfo>, GatewayGroups<N>) {
    let (mut infos, mut nics, mut pollers) = (Vec::new(), Vec::new(), Vec::new());
    for port in ports {
        infos.push(PortInfo { device: port.device, kind: port.kind, traffic: port.traffic });
        nics.push(groups::Port::new(port.name, port.lan, port.subnet, port.rnic));
        pollers.push(port.poller);
    }
    let entropy = || u32::from_ne_bytes(random());
    (infos, Groups::new(settings, nics, pollers, Box::new(entropy)))
}

/// The most connections of a group: an RMB has no more elements.
const CONNECTIONS_PER_GROUP: u8 = 255;
/// How often waiting rendezvous are looked at. Their deadlines are seconds long.
const TICK: Duration = Duration::from_millis(50);
/// The same where one of them waits for a link to show that it carries, for milliseconds.
const TICK_OF_PROOF: Duration = Duration::from_millis(5);
/// How soon a poller that is behind is offered commands again.
const CATCH_UP_EVERY: Duration = Duration::from_millis(1);
/// At the latest after this time we look whether our threads are alive.
const LIFE_SIGN: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
