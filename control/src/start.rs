//! From a configuration to a running gateway: RNICs, pollers, listeners, threads.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use smcr_engine::affinity::Affinity;
use smcr_engine::clock::Clock;
use smcr_engine::counters::Counters;
use smcr_engine::gauges::Gauges;
use smcr_engine::idle::{Idle, Policy};
use smcr_engine::kernel::Kernel;
use smcr_engine::limits::REPORTS_MAX;
use smcr_engine::mailbox::{Waker, mailbox};
use smcr_engine::poller::Ends;
use smcr_engine::priority::Priority;
use smcr_memory::Region;
use smcr_os::interface::preferred_address;
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_proto::{MacAddress, Mtu, PeerId};
use smcr_rnic::any;
use smcr_rnic::{Exhausted, Fabric as _, Rnic as _};

use crate::admin;
use crate::capture::{self, Tapped};
use crate::config::{
    self, Cidr, Config, DpdkPort, IdlePolicy, Protocol, RnicConfig, RnicKind, VerbsPort,
};
use crate::cores::{self, Assignment, Board, Reason};
use crate::device::{self, Devices};
use crate::entropy::random;
use crate::gateway::{Gateway, Parts, PortParts};
use crate::groups::Lan;
use crate::intercept::Interception;
use crate::listener::Listener;
use crate::loopback::Loopback;
use crate::network::{Network, Place};
use crate::placement::{PollerHandle, Seat, seats};
use crate::pnet::PnetTable;
use crate::smc_option::OptionSource;
use crate::status::{Asker, Traffic};

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

/// Runs the gateway until SIGTERM or SIGINT, and then until its connections are over.
///
/// # Errors
///
/// What could not be opened or bound, or which thread ended.
pub fn run(config: Config) -> Result<(), RunError> {
    raise_descriptor_limit();
    let clock = Clock::new();
    let option = OptionSource::choose(&config.smc);
    tracing::info!("{option}");
    let devices = Devices::read().map_err(context("the network devices cannot be listed"))?;
    let waker = Waker::new().map_err(context("the control thread cannot be set up"))?;

    let listeners = listen(&config, &option)?;
    let interception = Interception::begin(&config, &listeners).map_err(|why| RunError {
        what: "interception".to_owned(),
        why,
        misconfigured: true,
    })?;
    let nics = choose_nics(&config, &devices, &listeners);
    let (ports, taps) = open_ports(&config, &devices, &nics, clock, &waker)?;
    let mark = ports.iter().find_map(|port| port.rnic.as_ref()?.mark());
    let macs = ports.iter().filter_map(|port| port.rnic.as_ref()?.port().mac.into());
    let peer_id = mark.map_or_else(|| peer_id(macs), PeerId);
    let mut network = Network::new(devices, PnetTable::new(&config), places(&ports));
    // What changed between the first look and the watch would never be heard of.
    network.refresh().map_err(context("the network devices cannot be watched"))?;

    let (ask, questions) = mailbox(QUESTIONS_MAX, waker.clone());
    let admin = match config.admin.listen {
        Some(address) => Some(
            admin::spawn(address, Arc::new(Asker(ask)))
                .map_err(context(&format!("admin.listen {address}")))?,
        ),
        None => None,
    };
    if let Some(admin) = &admin
        && let Err(error) = capture::spawn(admin.address(), clock, taps)
    {
        tracing::warn!(%error, "nobody can capture here");
    }
    if let Some(admin) = admin.as_ref().filter(|admin| !admin.address().ip().is_loopback()) {
        tracing::warn!(listen = %admin.address(), "{}", admin::IS_PUBLIC);
    }
    let (say_stop, stop) = mailbox(1, waker.clone());
    crate::signals::on_stop(move || {
        // A second signal finds the queue full: one is enough.
        let _ = say_stop.send(());
    })
    .map_err(context("the signal handlers cannot be set up"))?;

    for listener in &listeners {
        let (bind, upstream) = (listener.config.bind, listener.goes_to());
        tracing::info!(listener = listener.config.name, %bind, upstream, "listening");
    }
    let parts = Parts {
        config,
        clock,
        option,
        peer_id,
        ports,
        network,
        listeners,
        interception,
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

/// Binds all listeners.
fn listen(config: &Config, option: &OptionSource) -> Result<Vec<Listener>, RunError> {
    let loopback = Loopback::choose(config.local.congestion_control);
    tracing::info!("{loopback}");
    let loopback = Arc::new(loopback);
    let marks = config.listeners.iter().any(config::Listener::needs_mark);
    let open = |listener: &config::Listener| {
        let what = format!("listener {} at {}", listener.name, listener.bind);
        let opened = Listener::open(listener, option, &loopback, (marks, config.smc.tcp_keepalive));
        opened.map_err(context(&what))
    };
    config.listeners.iter().map(open).collect()
}

/// The NICs to open: those the operator listed, or those that the listeners need.
fn choose_nics(config: &Config, devices: &Devices, listeners: &[Listener]) -> Vec<RnicConfig> {
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
    for listener in listeners.iter().filter(|listener| listener.speaks_smc()) {
        if listener.config.connect == Protocol::Smc {
            for place in places_behind(listener) {
                if let Ok((device, _)) = devices.towards(place) {
                    add(&device.name);
                }
            }
        }
        let bind = listener.config.bind.ip();
        if listener.config.accept == Protocol::Smc {
            match devices.owner_of(bind) {
                Some(device) => add(&device.name),
                // Bound to all addresses: peers may come by any device that has one.
                None => devices
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
fn places_behind(listener: &Listener) -> Vec<IpAddr> {
    match (listener.upstream, &listener.config.intercept) {
        (Some(upstream), _) => vec![upstream.ip()],
        (None, Some(intercept)) if !intercept.networks.is_empty() => {
            intercept.networks.iter().map(Cidr::base).collect()
        }
        // The default routes: any address far away will do.
        (None, _) => {
            vec![IpAddr::from([192, 0, 2, 1]), IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1])]
        }
    }
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

/// Opens the NICs and starts their pollers; at least one, for TCP. Returns the taps of the NICs,
/// too.
fn open_ports(
    config: &Config,
    devices: &Devices,
    nics: &[RnicConfig],
    clock: Clock,
    waker: &Waker,
) -> Result<(Vec<PortParts<any::Nic>>, Vec<Tapped>), RunError> {
    let mut opened = Vec::new();
    let eal = eal_arguments(nics);
    for nic in nics {
        match any::open(&spec(nic, &eal)) {
            Ok(parts) => {
                let (kind, device, pollers) = (nic.kind.name(), &nic.device, parts.len());
                tracing::info!(rnic = nic.name, kind, device, pollers, "RNIC open");
                let parts = parts.into_iter().enumerate();
                opened.extend(parts.map(|(index, (rnic, fabric))| {
                    // The operator's core is for the first; the others are chosen.
                    let core = nic.core.filter(|_| index == 0);
                    (RnicConfig { core, ..nic.clone() }, Some(rnic), Some(fabric))
                }));
            }
            Err(error) if config.rnics.is_empty() => {
                let (kind, device) = (nic.kind.name(), &nic.device);
                tracing::warn!(kind, device, %error, "no RNIC can open here: TCP only");
            }
            Err(error) => {
                let what = format!("rnic {} on {}", nic.name, nic.device);
                return Err(RunError { what, why: error.to_string(), misconfigured: true });
            }
        }
    }
    if opened.is_empty() {
        opened.push((RnicConfig::soft("none", ""), None, None));
    }
    let seats = seats(opened.len()).map_err(context("no mailboxes for the pollers"))?;
    let affinity = Affinity::of_this_thread().map_err(context("the cores cannot be read"))?;
    let wanted: Vec<_> = opened.iter().map(|(nic, _, _)| nic.core).collect();
    let allowed: Vec<_> = affinity.cores().collect();
    let cores = cores::assign(&config.poll, &wanted, &allowed, &Board::of_this_machine());
    let mut taps = Vec::new();
    let ports = opened
        .into_iter()
        .zip(cores)
        .zip(seats)
        .map(|(((nic, mut rnic, mut fabric), assignment), seat)| {
            if let (Some(rnic), Some(fabric)) = (&rnic, &mut fabric) {
                let tracer = fabric.tracer(rnic.port().mac);
                let description = format!("{} on {}", nic.kind.name(), nic.device);
                taps.push(Tapped { rnic: nic.name.clone(), description, tracer });
            }
            let run_on = (assignment, &affinity);
            let address = rnic.as_ref().map(|rnic| rnic.port().gid.to_ip());
            let subnet = address.map(|address| subnet(&nic, address, devices)).unwrap_or_default();
            let traffic = Arc::new(Traffic::default());
            let memory = send_memory(config, rnic.as_mut())?;
            let part = (fabric, memory);
            let poller = start_poller(config, run_on, part, clock, waker, &traffic, seat)
                .map_err(context("a poller cannot be started"))?;
            let vlan = nic.network_device().and_then(device::vlan);
            let RnicConfig { name, kind, device, pnet, .. } = nic;
            let directory = (kind == RnicKind::Shm).then(|| device.clone());
            let lan = Lan { pnet, vlan, directory };
            Ok(PortParts { name, kind, device, lan, subnet, rnic, poller, traffic })
        })
        .collect::<Result<_, _>>()?;
    Ok((ports, taps))
}

/// The IPv4 subnet of an RNIC at `address`; all zero where it has none.
fn subnet(nic: &RnicConfig, address: IpAddr, devices: &Devices) -> Ipv4Subnet {
    match &nic.kind {
        RnicKind::RoceUdp { .. } | RnicKind::RocePacket { .. } | RnicKind::Verbs(_) => {
            let device = nic.network_device().and_then(|name| devices.named(name));
            device.map(|device| device::subnets(device, address).ipv4).unwrap_or_default()
        }
        RnicKind::Shm => Ipv4Subnet::default(),
        RnicKind::Dpdk(port) => device::subnet_of(address, port.prefix_bits),
    }
}

/// What all ports of DPDK say to EAL, which starts once. Ports that say the same say it once.
fn eal_arguments(nics: &[RnicConfig]) -> Vec<String> {
    let mut lists: Vec<&[String]> = Vec::new();
    for nic in nics {
        if let RnicKind::Dpdk(port) = &nic.kind
            && !lists.contains(&&port.eal[..])
        {
            lists.push(&port.eal);
        }
    }
    lists.concat()
}

/// What to open for `nic`.
fn spec<'a>(nic: &'a RnicConfig, eal: &'a [String]) -> any::Spec<'a> {
    any::Spec {
        kind: match nic.kind {
            RnicKind::RoceUdp { address } => any::Kind::RoceUdp { address },
            RnicKind::RocePacket { address, version } => any::Kind::RocePacket { address, version },
            RnicKind::Dpdk(DpdkPort { address, prefix_bits: prefix, vlan, gateway, .. }) => {
                any::Kind::Dpdk { address, prefix, vlan, gateway, eal }
            }
            RnicKind::Shm => any::Kind::Shm,
            RnicKind::Verbs(VerbsPort { number: port, gid_index, .. }) => {
                any::Kind::Verbs { port, gid_index }
            }
        },
        device: &nic.device,
        pollers: nic.pollers,
        mtu_max: nic.mtu.and_then(Mtu::from_bytes),
    }
}

/// What a poller sends from, known to its NIC.
fn send_memory(config: &Config, rnic: Option<&mut any::Nic>) -> Result<Region, RunError> {
    let len = usize::try_from(config.smc.send_pool).unwrap_or(usize::MAX);
    let memory = Region::new(len).map_err(context("smc.send_pool"))?;
    if let Some(rnic) = rnic {
        rnic.send_from(&memory).map_err(|Exhausted| RunError {
            what: "smc.send_pool".to_owned(),
            why: "the RNIC cannot register as much memory".to_owned(),
            misconfigured: true,
        })?;
    }
    Ok(memory)
}

/// Tells the operator where poller `index` runs, and why.
fn say_where(assignment: &Assignment, index: u8) {
    let Assignment { core, reason, .. } = assignment;
    match (core, reason) {
        (Some(core), Reason::Shared) => tracing::warn!(poller = index, core, %reason, "pinned"),
        (Some(core), _) => tracing::info!(poller = index, core, %reason, "pinned"),
        (None, _) => tracing::info!(poller = index, %reason, "not pinned to a core"),
    }
}

/// Starts a polling thread.
pub(crate) fn start_poller(
    config: &Config,
    (assignment, affinity): (Assignment, &Affinity),
    (fabric, memory): (AnyFabric, Region),
    clock: Clock,
    control: &Waker,
    traffic: &Arc<Traffic>,
    seat: Seat<any::Qp>,
) -> io::Result<PollerHandle<any::Qp>> {
    let (report, reports) = mailbox(REPORTS_MAX, control.clone());
    let counters = Arc::new(Counters::default());
    let gauges = Arc::new(Gauges::new());
    let policy = match config.poll.policy {
        IdlePolicy::Spin => Policy::Spin,
        IdlePolicy::Adaptive => Policy::Adaptive,
        IdlePolicy::Block => Policy::Block,
    };
    let (idle, boost) = (Idle::new(policy, config.poll.spin), config.poll.boost);
    let traffic = Arc::clone(traffic);
    let (line, seat_index) = (seat.line(), seat.index);
    let ends = Ends {
        commands: seat.obey,
        letters: seat.letters,
        waker: seat.waker,
        reports: report,
        neighbours: seat.neighbours,
        index: seat.index,
        owners: seat.owners,
        counters: Arc::clone(&counters),
        gauges: Arc::clone(&gauges),
        observe: Box::new(move |fabric: &AnyFabric| publish(fabric, &traffic)),
    };
    say_where(&assignment, seat_index);
    let affinity = affinity.with_core(assignment.core);
    let name = assignment.core.map_or_else(|| "poller".to_owned(), |core| format!("poller-{core}"));
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        if affinity.has_core() {
            match affinity.pin() {
                Ok(()) => ends.counters.pinned.set(1),
                Err(error) => tracing::warn!(%error, "a poller cannot be pinned to its core"),
            }
        }
        match Kernel::new(ends.waker.descriptor(), fabric.event_descriptor(), clock) {
            Ok(kernel) => {
                let priority = Priority::of_this_thread(boost);
                let mut poller = smcr_engine::Poller::new(fabric, kernel, ends, memory);
                poller.run(idle, &affinity, priority);
            }
            Err(error) => tracing::error!(%error, "a poller cannot set up epoll and does not run"),
        }
    })?;
    Ok(PollerHandle::new(assignment, (counters, gauges), reports, line, thread))
}

/// Copies what the fabric counts to where others can read it.
fn publish(fabric: &AnyFabric, traffic: &Traffic) {
    // A poller without an RNIC relays TCP only.
    let Some(fabric) = fabric else { return };
    let figures = fabric.figures();
    for (published, counted) in [
        (&traffic.packets_in, figures.packets_in),
        (&traffic.packets_out, figures.packets_out),
        (&traffic.retransmits, figures.retransmits),
        (&traffic.path_raised, figures.path_raised),
        (&traffic.path_lowered, figures.path_lowered),
        (&traffic.cnps_in, figures.cnps_in),
        (&traffic.cnps_out, figures.cnps_out),
        (&traffic.icrc_errors, figures.icrc_errors),
        (&traffic.psn_errors, figures.psn_errors),
        (&traffic.unknown_qp, figures.unknown_qp),
        (&traffic.rkey_errors, figures.rkey_errors),
    ] {
        published.store(counted, Ordering::Relaxed);
    }
}

/// Where the ports are.
fn places(ports: &[PortParts<any::Nic>]) -> Vec<Place> {
    let place = |port: &PortParts<any::Nic>| Place {
        rnic: port.name.clone(),
        // A GID of RoCE v1 is not among the addresses of the device. The NIC says itself when it is
        // down.
        device: port
            .kind
            .network_device(&port.device)
            .filter(|_| !port.kind.carries_roce_v1())
            .map(str::to_owned),
        address: port.rnic.as_ref().map(|rnic| rnic.port().gid.to_ip()),
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

/// Questions of the admin thread in flight. It asks one at a time.
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

    fn port(name: &str, address: &str, eal: &[&str]) -> RnicConfig {
        let port = DpdkPort {
            address: address.parse().unwrap(),
            prefix_bits: 24,
            vlan: None,
            gateway: None,
            eal: eal.iter().map(|&argument| argument.to_owned()).collect(),
        };
        RnicConfig { kind: RnicKind::Dpdk(port), ..RnicConfig::soft(name, name) }
    }

    /// The kernel knows no device that could tell the subnet of a port of DPDK.
    #[test]
    fn a_port_without_a_network_device_is_in_its_own_subnet() {
        let devices = Devices::read().unwrap();
        let subnet_of =
            |nic: &RnicConfig, address: &str| subnet(nic, address.parse().unwrap(), &devices);
        let expected = Ipv4Subnet { network: [10, 8, 0, 0], prefix_bits: 24 };
        assert_eq!(subnet_of(&port("p0", "10.8.0.1", &[]), "10.8.0.1"), expected);
        assert_eq!(subnet_of(&port("p0", "fd00::1", &[]), "fd00::1"), Ipv4Subnet::default());
        let expected = Ipv4Subnet { network: [127, 0, 0, 0], prefix_bits: 8 };
        assert_eq!(subnet_of(&RnicConfig::soft("s", "lo"), "127.0.0.1"), expected);
    }

    /// EAL starts once in a process. Most operators write the same arguments at each port.
    #[test]
    fn the_arguments_of_all_ports_are_given_to_eal_at_once() {
        let same = ["--no-huge", "-m", "64"];
        let nics = [
            port("p0", "10.8.0.1", &same),
            RnicConfig::soft("s", "lo"),
            port("p1", "10.8.0.2", &same),
            port("p2", "10.8.0.3", &["--log-level=8"]),
        ];
        assert_eq!(eal_arguments(&nics), ["--no-huge", "-m", "64", "--log-level=8"]);
    }
}
