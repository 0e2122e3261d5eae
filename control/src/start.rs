//! From a configuration to a running gateway: RNICs, pollers, listeners, threads.

pub(crate) mod ports;
mod remedy;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, mpsc};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use smcr_engine::clock::Clock;
use smcr_engine::mailbox::{Sender, Waker, mailbox};
use smcr_os::interface::preferred_address;
use smcr_proto::{MacAddress, PeerId};
use smcr_rnic::Rnic as _;
use smcr_rnic::any;

use self::ports::Opener;
use crate::access_log::{AccessLog, Reopener};
use crate::admin::{self, AdminThread};
use crate::capture::{self, Tapped};
use crate::config::{self, Cidr, Config, Protocol, RnicConfig};
use crate::confine::Confinement;
use crate::device::Devices;
use crate::entropy::random;
use crate::gateway::{Arrivals, Gateway, Lookups, Names, OpenRnics, Parts, PortParts};
use crate::intercept::{Interception, Led};
use crate::listener::{Common, Listener, who_has_it};
use crate::local::{Door, Doorway};
use crate::loopback::Loopback;
use crate::measure;
use crate::network::{Network, Place};
use crate::operate::OperateError;
use crate::pnet::PnetTable;
use crate::reload::{Prepared, addresses, socket};
use crate::service::Service;
use crate::smc_option::OptionSource;
use crate::status::Asker;
use crate::supervise;

/// The fabric of a NIC of any kind; none where there is no NIC.
pub(crate) type AnyFabric = Option<any::Fabric>;

/// Why the gateway did not start, or ended: one line.
#[derive(Debug)]
pub struct RunError {
    what: String,
    why: String,
    misconfigured: bool,
}

impl RunError {
    /// Whether the configuration asks for what this host cannot give, as a file that is wrong does.
    pub fn is_misconfigured(&self) -> bool {
        self.misconfigured
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.why)
    }
}

/// Says what failed, when the system says why.
fn context(what: &str) -> impl FnOnce(io::Error) -> RunError {
    move |why| RunError { what: what.to_owned(), why: why.to_string(), misconfigured: false }
}

/// The same of a port to listen at, and who may have it already.
fn at_port(what: &str) -> impl FnOnce(io::Error) -> RunError {
    move |why| {
        let hint = who_has_it(&why);
        RunError { why: format!("{why}{hint}"), ..context(what)(why) }
    }
}

/// Runs the gateway until SIGTERM or SIGINT, and then until its connections are over. `config` was
/// read from `file`, which is read again on SIGHUP.
///
/// # Errors
///
/// What could not be opened or bound, or which thread ended.
pub fn run(config: Config, file: &Path) -> Result<(), RunError> {
    raise_descriptor_limit();
    let service = Service::of_this_process();
    let clock = Clock::new();
    let option = OptionSource::choose(&config.smc, marks_sockets_of_others(&config, &service));
    tracing::info!("{option}");
    let devices = Devices::read().map_err(context("the network devices cannot be listed"))?;
    let waker = Waker::new().map_err(context("the control thread cannot be set up"))?;

    let loopback = Loopback::choose(config.local.congestion_control);
    tracing::info!("{loopback}");
    let common = Common::of(&config, &Arc::new(loopback), service.sockets());
    let Prepared { config, names, .. } = Prepared::of(config);
    let listeners = listen(&config, &names, &option, &common)?;
    let doorway = config.local.door.as_ref().map(bind_doorway).transpose()?;
    let interception = intercept(&listeners)?;
    let nics = choose_nics(&config, &devices, &names, Arrivals::Anywhere);
    // No other thread runs yet: what this one gives up, no other will have.
    let mut confinement = Confinement::begin(&config, file);
    let door = doorway.map(Door::open).transpose().map_err(context(DOOR_IS_SHUT))?;
    look_at_access_log(&config)?;
    measure::serve();
    let (tap, taps) = mpsc::channel();
    let mut opener = Opener::new(clock, waker.clone(), tap)?;
    let ports = opener.open_all(&config, &devices, &nics)?;
    let peer_id = identity(&ports);
    let network = watch_network(&config, devices, &ports)?;

    let (ask, questions) = mailbox(QUESTIONS_MAX, waker.clone());
    let asker = Asker::new(ask, Some(file.to_owned()));
    let admin = config.admin.listen.map(|listen| serve_operators(listen, &asker, clock, taps));
    let admin = admin.transpose()?;
    // A gateway that does not start creates no file.
    let access_log = AccessLog::new(clock, &config.access_log);
    let access_log = access_log.map_err(context("the access log cannot be set up"))?;
    let answers = mailbox(ANSWERS_MAX, waker.clone());
    let lookups = Lookups::new(config.dns.servers.clone(), answers);
    let (say_stop, stop) = mailbox(1, waker.clone());
    hear_signals(say_stop, asker, access_log.reopener())
        .map_err(context("the signal handlers cannot be set up"))?;

    confinement.seal();
    let parts = Parts {
        config,
        clock,
        option,
        peer_id,
        ports,
        network,
        nics,
        opener: Box::new(Opening { opener }),
        listeners,
        door,
        common,
        interception,
        service,
        confinement,
        lookups,
        access_log,
        waker,
        questions,
        stop,
    };
    let mut gateway = Gateway::new(parts).map_err(context("the gateway cannot be set up"))?;
    let outcome = gateway.run().map_err(context("the gateway ended"));
    if let Some(admin) = admin {
        admin.stop();
    }
    outcome
}

/// Whether sockets that others have made are to offer or answer SMC-R: the program at our own
/// cgroup does not see them.
fn marks_sockets_of_others(config: &Config, service: &Service) -> bool {
    let passed = |it: &config::Listener| service.sockets().at(it.bind).is_some();
    let is_marked = |it: &config::Listener| it.accept == Protocol::Smc && passed(it);
    config.local.door.is_some() || config.listeners.iter().any(is_marked)
}

/// Makes sure that the configuration names a place for the access log, if one is wanted. What may
/// pass is in nobody's way: lines are dropped until then.
fn look_at_access_log(config: &Config) -> Result<(), RunError> {
    AccessLog::mistake(&config.access_log).map_or(Ok(()), |why| {
        let what = "the access log cannot be written".to_owned();
        Err(RunError { what, why, misconfigured: true })
    })
}

/// Answers operators at `listen`, and those who capture.
fn serve_operators(
    listen: SocketAddr,
    asker: &Asker,
    clock: Clock,
    taps: mpsc::Receiver<Tapped>,
) -> Result<AdminThread, RunError> {
    let admin = admin::spawn(listen, Arc::new(asker.clone()));
    let admin = admin.map_err(at_port(&format!("admin.listen {listen}")))?;
    if let Err(error) = capture::spawn(admin.address(), clock, taps) {
        tracing::warn!(%error, "nobody can capture here");
    }
    if !admin.address().ip().is_loopback() {
        tracing::warn!(listen = %admin.address(), "{}", admin::IS_PUBLIC);
    }
    Ok(admin)
}

/// Opens RNICs while the gateway runs.
struct Opening {
    opener: Opener,
}

impl OpenRnics<any::Nic> for Opening {
    fn wanted(&self, config: &Config, names: &Names, by: Arrivals<'_>) -> Vec<RnicConfig> {
        match Devices::read() {
            Ok(devices) => choose_nics(config, &devices, names, by),
            Err(_) => config.rnics.clone(),
        }
    }

    fn open(
        &mut self,
        config: &Config,
        nic: &RnicConfig,
    ) -> Result<Vec<PortParts<any::Nic>>, String> {
        let devices = Devices::read().map_err(|error| error.to_string())?;
        self.opener.open_one(config, &devices, nic)
    }
}

/// Does what signals ask for, and whoever knows this process.
fn hear_signals(say_stop: Sender<()>, asker: Asker, reopener: Reopener) -> io::Result<()> {
    let stop = move || {
        // A second signal finds the queue full: one is enough.
        let _ = say_stop.send(());
    };
    let asked = asker.clone();
    if let Err(error) = socket::serve(move || asked.reload()) {
        tracing::warn!(%error, "smcgate reload --pid will find nobody here");
    }
    let reload = move || reload_aside(asker.clone());
    crate::signals::on_orders(stop, reload, move || reopener.reopen())
}

/// Reads the configuration again, on a thread of its own: names may take time to resolve.
fn reload_aside(asker: Asker) {
    let reload = move || {
        supervise::may_panic();
        // The control thread logs what it was asked; here is what it was never asked.
        if let Err(why @ (OperateError::Wrong(_) | OperateError::Silent)) = asker.reload() {
            tracing::warn!(%why, "the configuration stays as it was");
        }
    };
    if let Err(error) = std::thread::Builder::new().name("reload".to_owned()).spawn(reload) {
        tracing::warn!(%error, "the configuration stays as it was");
    }
}

/// Has all listeners listen.
fn listen(
    config: &Config,
    names: &Names,
    option: &OptionSource,
    common: &Common,
) -> Result<Vec<Listener>, RunError> {
    let open = |listener: &config::Listener| {
        let what = format!("listener {} at {}", listener.name, listener.bind);
        let listens = common.listen_at_start(listener, option);
        let (socket, waiting) = listens.map_err(at_port(&what))?;
        let mut opened = Listener::new(listener.clone(), common.clone(), Some(socket));
        opened.accepted = waiting.len() as u64;
        opened.arrived = waiting;
        for (name, addresses) in names {
            opened.pool.resolved(name, addresses);
        }
        Ok(opened)
    };
    let listeners: Result<Vec<_>, RunError> = config.listeners.iter().map(open).collect();
    let mut listeners = listeners?;
    for (address, _) in common.passed().iter() {
        if config.listeners.iter().all(|listener| listener.bind != address) {
            tracing::warn!(%address, "a socket was passed that no listener has; it refuses all");
        }
    }
    let local = config.local_listeners().into_iter();
    listeners.extend(local.map(|listener| Listener::local(listener, common.clone())));
    Ok(listeners)
}

/// Binds the socket at which local programs come in.
fn bind_doorway(config: &config::Door) -> Result<Doorway, RunError> {
    let what = format!("local.socket {}", config.socket.display());
    let doorway = Doorway::bind(config).map_err(|why| {
        let missing = why.kind() == io::ErrorKind::NotFound;
        let hint = if missing { "; the folder of the socket must exist" } else { "" };
        RunError { why: format!("{why}{hint}"), ..context(&what)(why) }
    })?;
    tracing::info!(socket = %config.socket.display(), "programs with the preload library come in");
    Ok(doorway)
}

/// Leads connections to those listeners that want it.
fn intercept(listeners: &[Listener]) -> Result<Interception, RunError> {
    let led: Vec<_> = (0..).zip(listeners).filter_map(led).collect();
    Interception::begin(&led).map_err(|why| RunError {
        what: "interception".to_owned(),
        // Whoever starts us may try again when another process has ended.
        misconfigured: !why.may_pass(),
        why: why.to_string(),
    })
}

/// A listener as connections are led to it.
fn led((index, listener): (u16, &Listener)) -> Option<Led<'_>> {
    let socket = listener.socket.as_ref()?.as_fd();
    Some(Led { index, config: &listener.config, socket })
}

/// The NICs to open: those the operator listed, or those that the listeners need.
pub(crate) fn choose_nics(
    config: &Config,
    devices: &Devices,
    names: &Names,
    by: Arrivals<'_>,
) -> Vec<RnicConfig> {
    if !config.rnics.is_empty() {
        return config.rnics.clone();
    }
    let table = PnetTable::new(config);
    let mut nics: Vec<RnicConfig> = Vec::new();
    let mut add = |device: &str| {
        let nic = table.rnic_for(device);
        if nics.iter().all(|other| other.name != nic.name) {
            nics.push(nic);
        }
    };
    if let Arrivals::At(addresses) = by {
        let far = addresses.iter().filter(|ip| !ip.to_canonical().is_loopback());
        far.filter_map(|ip| devices.owner_of(*ip)).for_each(|device| add(&device.name));
    }
    for listener in config.listeners.iter().chain(&config.local_listeners()) {
        if listener.connect == Protocol::Smc {
            for place in places_behind(listener, names) {
                if let Ok((device, _)) = devices.towards(place) {
                    add(&device.name);
                }
            }
        }
        let bind = listener.bind.ip();
        if listener.accept == Protocol::Smc {
            match (devices.owner_of(bind), by) {
                (Some(device), _) => add(&device.name),
                (None, Arrivals::At(_)) => {}
                // Bound to all addresses: peers may come by any device that has one.
                (None, Arrivals::Anywhere) => devices
                    .all()
                    .iter()
                    .filter(|device| preferred_address(device).is_some_and(|ip| !ip.is_loopback()))
                    .for_each(|device| add(&device.name)),
            }
        }
    }
    nics
}

/// Addresses to which connections of `listener` go: one for each route that they may take, as far
/// as the configuration tells.
fn places_behind(listener: &config::Listener, names: &Names) -> Vec<IpAddr> {
    match &listener.intercept {
        _ if !listener.upstream.is_original_dst() => {
            addresses(names, listener).iter().map(SocketAddr::ip).collect()
        }
        Some(intercept) if !intercept.networks.is_empty() => {
            intercept.networks.iter().map(Cidr::base).collect()
        }
        // The default routes: any address far away will do.
        Some(_) | None => {
            vec![IpAddr::from([192, 0, 2, 1]), IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1])]
        }
    }
}

/// What the network is, and from now on becomes.
fn watch_network(
    config: &Config,
    devices: Devices,
    ports: &[PortParts<any::Nic>],
) -> Result<Network, RunError> {
    let mut network = Network::new(devices, PnetTable::new(config), places(ports));
    // What changed between the first look and the watch would never be heard of.
    network.refresh().map_err(context("the network devices cannot be watched"))?;
    network.need_policies(config);
    Ok(network)
}

/// Who we are to peers.
fn identity(ports: &[PortParts<any::Nic>]) -> PeerId {
    let mark = ports.iter().find_map(|port| port.rnic.as_ref()?.mark());
    let macs = ports.iter().filter_map(|port| port.rnic.as_ref()?.port().mac.into());
    mark.map_or_else(|| peer_id(macs), PeerId)
}

/// Two random bytes and the MAC address of a NIC (RFC A.2.1). New at every start: a peer must not
/// take this process for the one before it. The mark of a NIC in shared memory has the same form.
fn peer_id(macs: impl IntoIterator<Item = MacAddress>) -> PeerId {
    let mac = macs.into_iter().find(|mac| mac.0 != [0; 6]);
    let mac = mac.map_or_else(random::<6>, |mac| mac.0);
    // RFC 7609 2.2.4 #5: one peer id per stack instance
    // RFC 7609 2.2.4 #6: new peer id after restart
    // RFC 7609 A.2.1 #2: peer id: instance and MAC
    // RFC 7609 A.2.1 #3: new instance number after restart
    let [a, b] = random();
    let [c, d, e, f, g, h] = mac;
    PeerId([a, b, c, d, e, f, g, h])
}

/// Where the ports are.
fn places(ports: &[PortParts<any::Nic>]) -> Vec<Place> {
    let place = |port: &PortParts<any::Nic>| {
        let address = port.rnic.as_ref().map(|rnic| rnic.port().gid.to_ip());
        Place::of(&port.name, (&port.kind, &port.device), address)
    };
    ports.iter().map(place).collect()
}

/// Two descriptors per connection: takes as many as the administrator allows.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if setrlimit(Resource::Nofile, raised).is_err() {
        tracing::warn!(limit = limit.current, "the descriptor limit could not be raised");
    }
}

const DOOR_IS_SHUT: &str = "local.socket cannot be served";
/// Answers of name servers that wait for the control thread.
const ANSWERS_MAX: usize = 64;
/// Questions in flight. The admin thread puts one at a time, and leaves those that take too long.
const QUESTIONS_MAX: usize = 16;

#[cfg(test)]
mod tests {

    use super::*;

    /// A peer that took a restarted gateway for the one before would write into memory that is
    /// gone; one that took two hosts for one would mix up their connections.
    // RFC 7609 2.2.4 #5: one peer id per stack instance
    // RFC 7609 2.2.4 #6: new peer id after restart
    // RFC 7609 A.2.1 #2: peer id: instance and MAC
    // RFC 7609 A.2.1 #3: new instance number after restart
    #[test]
    fn a_peer_id_names_a_nic_and_a_start() {
        let (lo, mac) = (MacAddress::default(), MacAddress([2, 0, 0, 0, 0, 7]));
        let names: Vec<[u8; 8]> = (0..4).map(|_| peer_id([lo]).0).collect();
        assert!(names.iter().any(|name| name[2..] != names[0][2..]), "no NIC, no fixed part");
        let names: Vec<[u8; 8]> = (0..4).map(|_| peer_id([lo, mac]).0).collect();
        assert!(names.iter().all(|name| name[2..] == mac.0));
        assert!(names.iter().any(|name| name[..2] != names[0][..2]), "{names:?}");
    }

    /// Devices of containers come and go where a gateway listens at all addresses. While it runs,
    /// only those get RNICs by which connections come, and the loopback device never does.
    #[test]
    fn a_gateway_that_runs_gives_rnics_to_devices_that_are_used() {
        let text = "[[listener]]\nname='a'\nbind='0.0.0.0:1'\nupstream='127.0.0.1:2'\n\
                    accept='smc'\n";
        let config = Config::parse(text, "a.toml").unwrap();
        let device = |name, address| crate::device::tests::device(name, &[(address, 24)]);
        let devices = [("lo", "127.0.0.1"), ("va", "10.8.0.1"), ("vb", "10.9.0.1")];
        let devices = Devices::from_iter(devices.map(|(name, address)| device(name, address)));
        let chosen = |by: Arrivals<'_>| {
            let nics = choose_nics(&config, &devices, &Names::new(), by);
            nics.into_iter().map(|nic| nic.name).collect::<Vec<_>>()
        };
        let at = |addresses: &[&str]| {
            chosen(Arrivals::At(&addresses.iter().map(|ip| ip.parse().unwrap()).collect()))
        };
        assert_eq!(chosen(Arrivals::Anywhere), ["soft-va", "soft-vb"]);
        assert_eq!(at(&[]), [""; 0]);
        assert_eq!(at(&["127.0.0.1", "10.9.0.1", "10.7.0.1"]), ["soft-vb"]);
    }
}
