//! RNICs and the pollers on them: opened at the start, and later when the configuration changes.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;

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
use smcr_proto::Mtu;
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_rnic::any;
use smcr_rnic::{Exhausted, Fabric as _, Rnic as _};

use super::remedy::remedy;
use super::{AnyFabric, RunError, context};
use crate::capture::Tapped;
use crate::config::{Config, DpdkPort, IdlePolicy, RnicConfig, RnicKind, VerbsPort};
use crate::cores::{self, Assignment, Board, Reason};
use crate::device::{self, Devices};
use crate::gateway::PortParts;
use crate::groups::Lan;
use crate::placement::{PollerHandle, Seat, Seats};
use crate::status::Traffic;

/// An RNIC that is open, or its place where there is none.
pub(super) struct Opened {
    nic: RnicConfig,
    rnic: Option<any::Nic>,
    fabric: AnyFabric,
}

/// Opens RNICs and starts their pollers.
pub(crate) struct Opener {
    clock: Clock,
    control: Waker,
    /// What the process may use.
    affinity: Affinity,
    seats: Seats,
    /// Where captures are taken.
    taps: mpsc::Sender<Tapped>,
}

impl Opener {
    /// Pollers will report to whom `control` wakes, and their taps go to `taps`.
    ///
    /// # Errors
    ///
    /// When the kernel does not say which cores we may use.
    pub(crate) fn new(
        clock: Clock,
        control: Waker,
        taps: mpsc::Sender<Tapped>,
    ) -> Result<Self, RunError> {
        let affinity = Affinity::of_this_thread().map_err(context("the cores cannot be read"))?;
        Ok(Self { clock, control, affinity, seats: Seats::new(), taps })
    }

    /// Opens the NICs and starts their pollers; at least one, for TCP.
    ///
    /// # Errors
    ///
    /// What cannot be opened or started.
    pub(super) fn open_all(
        &mut self,
        config: &Config,
        devices: &Devices,
        nics: &[RnicConfig],
    ) -> Result<Vec<PortParts<any::Nic>>, RunError> {
        let mut opened = Vec::new();
        let eal = eal_arguments(nics);
        for nic in nics {
            match open(nic, &eal, devices) {
                Ok(parts) => opened.extend(parts),
                Err(Obstacle { why, .. }) if config.rnics.is_empty() => {
                    tracing::warn!(%why, "no RNIC can open here: TCP only");
                }
                Err(Obstacle { why, may_pass }) => {
                    let what = format!("rnic {} on {}", nic.name, nic.device);
                    // Whoever starts us may try again until the device is there.
                    return Err(RunError { what, why, misconfigured: !may_pass });
                }
            }
        }
        if opened.is_empty() {
            let nic = RnicConfig::soft("none", "");
            opened.push(Opened { nic, rnic: None, fabric: None });
        }
        self.start(config, devices, opened)
    }

    /// Opens one more NIC, which `config` has, and starts its pollers.
    ///
    /// # Errors
    ///
    /// Why not, in one line; then nothing is left of it.
    pub(crate) fn open_one(
        &mut self,
        config: &Config,
        devices: &Devices,
        nic: &RnicConfig,
    ) -> Result<Vec<PortParts<any::Nic>>, String> {
        let what = || format!("rnic {} on {}", nic.name, nic.device);
        let opened = open(nic, &eal_arguments(std::slice::from_ref(nic)), devices);
        let opened = opened.map_err(|Obstacle { why, .. }| format!("{}: {why}", what()))?;
        self.start(config, devices, opened).map_err(|error| format!("{}: {error}", what()))
    }

    fn start(
        &mut self,
        config: &Config,
        devices: &Devices,
        opened: Vec<Opened>,
    ) -> Result<Vec<PortParts<any::Nic>>, RunError> {
        let wanted: Vec<_> = opened.iter().map(|one| one.nic.core).collect();
        let allowed: Vec<_> = self.affinity.cores().collect();
        let cores = cores::assign(&config.poll, &wanted, &allowed, &Board::of_this_machine());
        let mut ports: Vec<PortParts<any::Nic>> = Vec::new();
        for (one, assignment) in opened.into_iter().zip(cores) {
            match self.start_one(config, devices, one, assignment) {
                Ok(port) => ports.push(port),
                Err(error) => {
                    ports.iter_mut().for_each(|port| port.poller.stop());
                    return Err(error);
                }
            }
        }
        Ok(ports)
    }

    fn start_one(
        &mut self,
        config: &Config,
        devices: &Devices,
        Opened { nic, mut rnic, mut fabric }: Opened,
        assignment: Assignment,
    ) -> Result<PortParts<any::Nic>, RunError> {
        if let (Some(rnic), Some(fabric)) = (&rnic, &mut fabric) {
            let tracer = fabric.tracer(rnic.port().mac);
            let description = format!("{} on {}", nic.kind.name(), nic.device);
            // Where nobody can capture, nobody wants it.
            let _ = self.taps.send(Tapped { rnic: nic.name.clone(), description, tracer });
        }
        let seat = self.seats.take().map_err(context("no mailboxes for a poller"))?;
        let address = rnic.as_ref().map(|rnic| rnic.port().gid.to_ip());
        let subnet = address.map(|address| subnet(&nic, address, devices)).unwrap_or_default();
        let traffic = Arc::new(Traffic::default());
        let part = (fabric, send_memory(config, rnic.as_mut())?);
        let run_on = (assignment, &self.affinity);
        let poller = start_poller(config, run_on, part, self.clock, &self.control, &traffic, seat)
            .map_err(context("a poller cannot be started"))?;
        let vlan = nic.network_device().and_then(device::vlan);
        let RnicConfig { name, kind, device, pnet, .. } = nic;
        let directory = (kind == RnicKind::Shm).then(|| device.clone());
        let lan = Lan { pnet, vlan, directory };
        Ok(PortParts { name, kind, device, lan, subnet, rnic, poller, traffic })
    }
}

/// What keeps a NIC from being opened.
#[derive(Debug)]
pub(super) struct Obstacle {
    /// Why, and what to do, in one line.
    pub(super) why: String,
    /// It may be gone when somebody tries again, with the same configuration.
    may_pass: bool,
}

/// Opens a NIC: one part for each of its pollers.
///
/// # Errors
///
/// What is in the way.
pub(super) fn open(
    nic: &RnicConfig,
    eal: &[String],
    devices: &Devices,
) -> Result<Vec<Opened>, Obstacle> {
    let parts = any::open(&spec(nic, eal)).map_err(|error| Obstacle {
        why: format!("{error}{}", remedy(nic, devices, &error)),
        may_pass: error.may_pass(),
    })?;
    let (kind, device, pollers) = (nic.kind.name(), &nic.device, parts.len());
    tracing::info!(rnic = nic.name, kind, device, pollers, "RNIC open");
    let part = |(index, (rnic, fabric))| {
        // The operator's core is for the first; the others are chosen.
        let core = nic.core.filter(|_| index == 0);
        Opened { nic: RnicConfig { core, ..nic.clone() }, rnic: Some(rnic), fabric: Some(fabric) }
    };
    Ok(parts.into_iter().enumerate().map(part).collect())
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
            why: format!("the RNIC cannot register {len} bytes of memory{MAY_NOT_LOCK}"),
            misconfigured: true,
        })?;
    }
    Ok(memory)
}

/// What most often keeps an RNIC from registering memory, which is locked then.
const MAY_NOT_LOCK: &str = "; raise `ulimit -l` (LimitMEMLOCK of the service), give the gateway \
                            CAP_IPC_LOCK, or lower smc.send_pool";

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
    let mut idle = Idle::new(policy, config.poll.spin);
    if assignment.core.is_none() {
        idle = idle.without_core();
    }
    let boost = config.poll.boost;
    // A real-time thread must not wait for one that it keeps from running.
    let may_be_realtime = fabric.as_ref().is_none_or(any::Fabric::never_spins);
    let realtime = config.poll.realtime && may_be_realtime;
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
                let priority = Priority::of_this_thread(boost, realtime);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// systemd tries again what may pass, as a device that comes late, and nothing that takes
    /// another file.
    #[test]
    fn what_may_pass_by_itself_is_no_fault_of_the_configuration() {
        let devices = Devices::read().unwrap();
        let is_misconfigured = |rnic: &str| {
            let text = format!(
                "[[rnic]]\nname='x'\n{rnic}\n\
                 [[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n"
            );
            let config = Config::parse(&text, "a.toml").unwrap();
            let (tap, _taps) = mpsc::channel();
            let mut opener = Opener::new(Clock::new(), Waker::new().unwrap(), tap).unwrap();
            let opened = opener.open_all(&config, &devices, &config.rnics);
            opened.err().expect("it cannot be opened").is_misconfigured()
        };
        for late in [
            "device='nix0'",
            "kind='roce-packet'\ndevice='nix0'",
            "device='lo'\naddress='10.99.99.99'",
            "kind='shm'\ndevice='/nix/nix'",
        ] {
            assert!(!is_misconfigured(late), "{late}");
        }
        assert!(is_misconfigured("kind='roce-packet'\ndevice='lo'"), "it never has frames");
        assert!(is_misconfigured("kind='dpdk'\ndevice='nonsense'\naddress='10.9.0.1/24'"));
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
