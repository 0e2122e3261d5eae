//! `smcgate check -c FILE`: is the file right, and what would happen.
//!
//! Beyond the file itself this looks at the host (routes, devices, eBPF) and asks the resolver, but
//! binds nothing and sends nothing to a peer.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;

use smcr_engine::affinity::Affinity;
use smcr_os::netdev::NetworkDevice;
use smcr_rnic::roce::dpdk;
use smcr_rnic::verbs;

use crate::access_log::AccessLog;
use crate::admin::IS_PUBLIC;
use crate::config::{
    self, Config, Door, Limits, Listener, LogTarget, Peers, Protocol, RnicConfig, RnicKind,
    Upstream, Versions,
};
use crate::cores::{self, Board};
use crate::device::Devices;
use crate::host_memory;
use crate::pnet::PnetTable;
use crate::rdma;
use crate::smc_option::OptionSource;

/// Checks the file at `path` and prints what a gateway would do with it on this host.
///
/// Exits with 2 and one line on standard error if the file is wrong. Obstacles that may be gone
/// when the gateway starts, such as an address that is not there yet, are printed as warnings and
/// are no fault, unless `strict`: then the exit code is 1.
pub fn run(path: &Path, strict: bool) -> ExitCode {
    let config = match Config::load_at(path, &Devices::addresses_here()) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let devices = Devices::read().unwrap_or_default();
    let option = OptionSource::choose(&config.smc, config.local.door.is_some());
    let text = describe(&config, &devices, &option, (&Cores::here(), host_memory::limit()));
    // A reader that has seen enough, such as `head`, is no reason to fail.
    let _ = std::io::stdout().write_all(text.as_bytes());
    match text.matches("WARNING: ").count() {
        warnings @ 1.. if strict => {
            eprintln!("warnings, which --strict does not allow: {warnings}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Cores for pollers.
struct Cores {
    /// Those that this process may use.
    allowed: Vec<usize>,
    /// Those of them that no poller holds.
    free: Vec<usize>,
}

impl Cores {
    fn here() -> Self {
        let affinity = Affinity::of_this_thread();
        let allowed = affinity.iter().flat_map(Affinity::cores).collect();
        Self { allowed, free: cores::free(&Board::of_this_machine()) }
    }
}

/// What a gateway would do with `config`, in lines.
fn describe(
    config: &Config,
    devices: &Devices,
    option: &OptionSource,
    (cores, memory): (&Cores, Option<u64>),
) -> String {
    let (peers, limits) = (&config.smc.peers, &config.limits);
    let host = Host { devices, peers, limits, pnet: PnetTable::new(config), option };
    let mut text = format!("option: {option}\n");
    if let Some(address) = config.admin.listen {
        let _ = writeln!(text, "admin: http://{address}/");
        if !address.ip().is_loopback() {
            let _ = writeln!(text, "admin: WARNING: {IS_PUBLIC}");
        }
    }
    let _ = writeln!(text, "versions: {}", versions(config));
    let _ = writeln!(text, "peers: {}", config.smc.peers);
    let _ = writeln!(text, "pollers: {}", pollers(config, cores));
    let mib = config.limits.rmb_bytes(memory) >> 20;
    let _ = writeln!(text, "memory: up to {mib} MiB for the RMB elements of connections");
    if let Some(place) = log_place(&config.access_log) {
        let _ = writeln!(text, "access log: {place}");
    }
    if let Some(door) = &config.local.door {
        let _ = writeln!(text, "programs with the preload library: {}", door_place(door, option));
    }
    for rnic in &config.rnics {
        let _ = writeln!(text, "rnic {}: {}", rnic.name, place(rnic, devices));
    }
    for listener in &config.listeners {
        text.push_str(&host.listener(listener));
    }
    text
}

/// Where programs would come in, who may, and what is in their way.
fn door_place(door: &Door, option: &OptionSource) -> String {
    let Door { socket, uids, gids, .. } = door;
    let who = match (uids.is_empty(), gids.is_empty()) {
        (true, true) => "everybody".to_owned(),
        (_, _) => format!("root, users {uids:?}, groups {gids:?}"),
    };
    let problem = match (socket.parent().is_some_and(Path::is_dir), option) {
        (false, _) => ": WARNING: there is no such directory",
        (true, OptionSource::Ebpf(_)) => "",
        (true, OptionSource::Assume(_) | OptionSource::None(_)) => {
            ": WARNING: without eBPF, their connections stay TCP"
        }
    };
    format!("at {}, {who}{problem}", socket.display())
}

/// Where lines of the access log would go, and what is in their way.
fn log_place(log: &config::AccessLog) -> Option<String> {
    let (word, Some(path)) = log.to.parts() else { return None };
    let problem = match &log.to {
        LogTarget::None => None,
        LogTarget::File(_) => AccessLog::check(log).err().map(|obstacle| obstacle.to_string()),
        LogTarget::Journald(_) | LogTarget::Syslog(_) => {
            (!path.exists()).then(|| "nobody listens there".to_owned())
        }
    };
    let problem = problem.map_or_else(String::new, |why| format!(": WARNING: {why}"));
    Some(format!("to {word} {}{problem}", path.display()))
}

/// Where an RNIC would be, and what is in its way.
fn place(rnic: &RnicConfig, devices: &Devices) -> String {
    let device = &rnic.device;
    match &rnic.kind {
        RnicKind::RoceUdp { address } | RnicKind::RocePacket { address, .. } => {
            let there = devices.named(device);
            let has = |wanted: IpAddr| devices.owner_of(wanted) == there;
            let needs_mac = matches!(rnic.kind, RnicKind::RocePacket { .. });
            let state = match (state(there), address) {
                ("up", _) if needs_mac && !there.is_some_and(NetworkDevice::is_ethernet) => {
                    "WARNING: it is no Ethernet device".to_owned()
                }
                ("up", Some(wanted)) if !has(*wanted) => {
                    format!("WARNING: the device does not have the address {wanted}")
                }
                (state, _) => state.to_owned(),
            };
            format!("soft RNIC on {device}: {state}")
        }
        RnicKind::Dpdk(port) => {
            let interface = dpdk::interface_below(device).map(|name| state(devices.named(name)));
            let state = match (dpdk::version(), interface) {
                (Err(why), _) => format!("WARNING: {why}"),
                (Ok(version), None) => version.to_owned(),
                // Its own address is not one of the device.
                (Ok(version), Some("up" | "WARNING: the device has no address")) => {
                    version.to_owned()
                }
                (Ok(_), Some(state)) => state.to_owned(),
            };
            let network = format!("{}/{}", port.address, port.prefix_bits);
            format!("soft RNIC {network} on {device}, a port of DPDK: {state}")
        }
        RnicKind::Verbs(port) => {
            let network = port.network.as_deref();
            let state = match (verbs::available(), rdma::devices().contains(device), network) {
                (Err(why), ..) => format!("WARNING: {why}"),
                (Ok(()), false, _) => "WARNING: this host has no such RDMA device".to_owned(),
                (Ok(()), true, None) => "WARNING: no IPv4 address over UDP (RoCEv2)".to_owned(),
                (Ok(()), true, Some(network)) => {
                    format!("on {network}, {}", state(devices.named(network)))
                }
            };
            format!("RNIC {device}, port {}: {state}", port.number)
        }
        RnicKind::Shm => {
            let is_there = Path::new(device).is_dir();
            let state = if is_there { "there" } else { "WARNING: there is no such directory" };
            format!("shared memory in {device}: {state}")
        }
    }
}

/// The state of a network device.
fn state(device: Option<&NetworkDevice>) -> &'static str {
    match device {
        Some(device) if device.up && !device.running => "WARNING: the device has no carrier",
        Some(device) if device.up && device.addresses.is_empty() => {
            "WARNING: the device has no address"
        }
        Some(device) if device.up => "up",
        Some(_) => "WARNING: the device is down",
        None => "WARNING: there is no such device",
    }
}

/// How many pollers there would be, and on which cores.
fn pollers(config: &Config, Cores { allowed, free }: &Cores) -> String {
    // Without RNICs in the file there is one for each that the listeners need.
    let own = |rnic: &RnicConfig| {
        let core = rnic.core;
        (0..rnic.pollers).map(move |index| core.filter(|_| index == 0))
    };
    let mut wanted: Vec<Option<usize>> = config.rnics.iter().flat_map(own).collect();
    let count = if wanted.is_empty() { "1 or more".to_owned() } else { wanted.len().to_string() };
    if wanted.is_empty() {
        wanted.push(None);
    }
    if !config.poll.pin {
        return format!("{count}, not pinned: poll.pin is false");
    }
    let mut listed = config.poll.cores.iter().copied();
    let configured: Vec<_> =
        wanted.into_iter().map(|core| core.or_else(|| listed.next())).collect();
    let needed = configured.iter().filter(|core| core.is_none()).count();
    let free: Vec<_> = free.iter().filter(|core| !configured.contains(&Some(**core))).collect();
    let list =
        |cores: Vec<usize>| cores.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let mut text = count;
    let given: Vec<usize> = configured.into_iter().flatten().collect();
    if !given.is_empty() {
        let _ = write!(text, ", pinned to cores {} as configured", list(given.clone()));
    }
    let strange: Vec<_> = given.into_iter().filter(|core| !allowed.contains(core)).collect();
    if !strange.is_empty() {
        let (strange, allowed) = (list(strange), list(allowed.clone()));
        let _ = write!(text, ", WARNING: this process may not use {strange}, only {allowed}");
    }
    if needed > free.len() {
        // The gateway that has this file may be the one that holds them.
        let warning = if needed > allowed.len() { "WARNING: " } else { "" };
        let free = free.len();
        let _ = write!(text, ", {warning}{needed} not pinned: cores that no poller holds: {free}");
    } else if needed > 0 {
        let chosen = free.iter().rev().take(needed).map(|core| **core).collect();
        let _ = write!(text, ", pinned to cores that no other poller holds: {}", list(chosen));
    }
    text
}

/// Which SMC-R would be spoken, and with whom.
fn versions(config: &Config) -> String {
    let smc = &config.smc;
    let eids: Vec<_> = smc.eids.as_slice().iter().map(ToString::to_string).collect();
    let second = format!("SMC-Rv2 with whoever has an EID of {}", eids.join(", "));
    match smc.versions {
        Versions::Fitting => format!("{second}; SMC-Rv1 on RNICs with RoCE v1"),
        Versions::Listed { v1: true, v2: true } => format!("{second}; else SMC-Rv1"),
        Versions::Listed { v2: true, .. } => format!("{second}; no SMC-Rv1"),
        Versions::Listed { .. } => "SMC-Rv1; no SMC-Rv2".to_owned(),
    }
}

struct Host<'a> {
    devices: &'a Devices,
    peers: &'a Peers,
    limits: &'a Limits,
    pnet: PnetTable,
    option: &'a OptionSource,
}

impl Host<'_> {
    fn listener(&self, listener: &Listener) -> String {
        let mut text = format!(
            "listener {}: {} ({}) -> {} ({})\n",
            listener.name,
            listener.bind,
            word(listener.accept),
            listener.upstream,
            word(listener.connect),
        );
        let bind = listener.bind.ip();
        if !bind.is_unspecified() && self.devices.owner_of(bind).is_none() {
            let _ = writeln!(text, "  WARNING: {bind} is not an address of this host");
        }
        if listener.accept == Protocol::Smc {
            let _ = writeln!(text, "  accepts {}", self.accepting(bind));
        }
        if listener.peers != *self.peers {
            let _ = writeln!(text, "  peers: {}", listener.peers);
        }
        for limit in listener.bounds.in_words(self.limits) {
            let _ = writeln!(text, "  {limit}");
        }
        if let Some(intercept) = &listener.intercept {
            let _ = writeln!(text, "  intercepts {intercept}");
        }
        for upstream in &listener.upstream.all {
            text.push_str(&self.upstream(listener, upstream));
        }
        text
    }

    fn upstream(&self, listener: &Listener, upstream: &Upstream) -> String {
        let mut text = String::new();
        match upstream.resolve() {
            Ok(addresses) => {
                for address in addresses {
                    let how = match listener.peers.admit_source(address.ip()) {
                        false if listener.connect == Protocol::Smc => {
                            "over TCP only: it is not among the peers".to_owned()
                        }
                        true | false => self.connecting(listener.connect, address),
                    };
                    let _ = writeln!(text, "  connects to {address} {how}");
                }
            }
            Err(error) => {
                let _ = writeln!(text, "  WARNING: {upstream} cannot be resolved: {error}");
            }
        }
        text
    }

    fn accepting(&self, bind: IpAddr) -> String {
        match self.option {
            OptionSource::None(_) => "over TCP only".to_owned(),
            OptionSource::Ebpf(_) | OptionSource::Assume(_) if bind.is_unspecified() => {
                "over SMC-R on the RNIC of the device it arrives on if the peer has it, else TCP"
                    .to_owned()
            }
            OptionSource::Ebpf(_) | OptionSource::Assume(_) => {
                self.on_rnic(bind, "no device has this address")
            }
        }
    }

    fn connecting(&self, transport: Protocol, upstream: SocketAddr) -> String {
        let local = match self.devices.towards(upstream.ip()) {
            Ok((_, local)) => local,
            Err(error) => return format!("WARNING: there is no route now: {error}"),
        };
        match (transport, self.option) {
            (Protocol::Tcp, _) => "over TCP".to_owned(),
            (Protocol::Smc, OptionSource::None(_)) => "over TCP only".to_owned(),
            (Protocol::Smc, OptionSource::Assume(peers))
                if !peers.iter().any(|network| network.contains(upstream.ip())) =>
            {
                "over TCP only: it is not in smc.assume_peers".to_owned()
            }
            (Protocol::Smc, OptionSource::Ebpf(_) | OptionSource::Assume(_)) => {
                self.on_rnic(local, "no device is known for the route")
            }
        }
    }

    /// How connections go that have the address `local`; `otherwise` says why it is of no device.
    fn on_rnic(&self, local: IpAddr, otherwise: &str) -> String {
        let Some(device) = self.devices.owner_of(local) else {
            return format!("over TCP only: {otherwise}");
        };
        let rnic = self.pnet.rnic_for(&device.name);
        if self.pnet.lacks(&rnic) {
            return format!("over TCP only: none of the RNICs listed is for {}", device.name);
        }
        format!("over SMC-R on {} ({}) if the peer has it, else TCP", rnic.name, rnic.device)
    }
}

fn word(transport: Protocol) -> &'static str {
    match transport {
        Protocol::Tcp => "tcp",
        Protocol::Smc => "smc",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
        [admin]\nlisten='0.0.0.0:1'\n\
        [[rnic]]\nname='r0'\ndevice='nowhere7'\n\
        [[listener]]\nname='in'\nbind='127.0.0.1:7'\naccept='smc'\nupstream='127.0.0.1:8'\n\
        [[listener]]\nname='out'\nbind='192.0.2.1:9'\nconnect='smc'\nupstream='127.0.0.1:8'\n";

    /// Of a machine with four of them.
    fn cores(free: &[usize]) -> Cores {
        Cores { allowed: vec![0, 1, 2, 3], free: free.to_vec() }
    }

    fn lines(file: &str, option: &OptionSource) -> Vec<String> {
        let config = Config::parse(file, "gate.toml").unwrap();
        let host = (&cores(&[0, 1]), Some(1 << 30));
        let text = describe(&config, &Devices::read().unwrap(), option, host);
        text.lines().map(str::to_owned).collect()
    }

    /// Operators learn before the start which connections will be accelerated, and where.
    #[test]
    fn each_listener_says_what_it_would_do() {
        let option = OptionSource::Assume(vec!["127.0.0.0/8".parse().unwrap()]);
        let expected = [
            "option: SMC-R is assumed, without a TCP option, of the peers 127.0.0.0/8",
            "admin: http://0.0.0.0:1/",
            "admin: WARNING: whoever reaches this address reads all statistics, and can take \
             listeners, links and RNICs out of service",
            "versions: SMC-Rv2 with whoever has an EID of SMCGATE; SMC-Rv1 on RNICs with RoCE v1",
            "peers: whoever reaches us",
            "pollers: 1, pinned to cores that no other poller holds: 1",
            "memory: up to 512 MiB for the RMB elements of connections",
            "rnic r0: soft RNIC on nowhere7: WARNING: there is no such device",
            "listener in: 127.0.0.1:7 (smc) -> 127.0.0.1:8 (tcp)",
            "  accepts over TCP only: none of the RNICs listed is for lo",
            "  connects to 127.0.0.1:8 over TCP",
            "listener out: 192.0.2.1:9 (tcp) -> 127.0.0.1:8 (smc)",
            "  WARNING: 192.0.2.1 is not an address of this host",
            "  connects to 127.0.0.1:8 over TCP only: none of the RNICs listed is for lo",
        ];
        assert_eq!(lines(FILE, &option), expected);
    }

    /// Without any RNIC in the file there is one for each device; with one, there is only that.
    #[test]
    fn connections_go_over_rnics_that_there_are() {
        let option = OptionSource::Assume(vec!["127.0.0.0/8".parse().unwrap()]);
        let (before, rest) = FILE.split_once("[[rnic]]").unwrap();
        let (_, listeners) = rest.split_once("[[listener]]").unwrap();
        for (rnic, expected) in [
            ("", "soft-lo (lo)"),
            ("[[rnic]]\nname='r1'\ndevice='lo'\n", "r1 (lo)"),
            ("[[rnic]]\nname='r2'\nkind='shm'\ndevice='/'\n", "r2 (/)"),
        ] {
            let said = lines(&format!("{before}{rnic}[[listener]]{listeners}"), &option);
            let how = format!("over SMC-R on {expected} if the peer has it, else TCP");
            assert!(said.contains(&format!("  accepts {how}")), "{said:#?}");
            assert!(said.contains(&format!("  connects to 127.0.0.1:8 {how}")), "{said:#?}");
        }
    }

    /// A directory that is missing would end the gateway when it starts.
    #[test]
    fn the_directory_of_shared_memory_is_looked_at() {
        let shown = |directory: &str| {
            let rnic = format!("[[rnic]]\nname='local'\nkind='shm'\ndevice='{directory}'\n");
            let config = Config::parse(&format!("{FILE}{rnic}"), "gate.toml").unwrap();
            let option = OptionSource::None(String::new());
            describe(&config, &Devices::read().unwrap(), &option, (&cores(&[]), None))
        };
        assert!(shown("/").contains("rnic local: shared memory in /: there\n"));
        let missing = "rnic local: shared memory in /no/such: WARNING: there is no such directory";
        assert!(shown("/no/such").contains(missing));
    }

    /// Programs would go on over TCP, and nothing would say why.
    #[test]
    fn what_the_preload_library_needs_is_looked_at() {
        let shown = |folder: &str| {
            let config = format!("{FILE}[local]\nsocket='{folder}/door'\n");
            let option = OptionSource::None("no privilege".into());
            let said = lines(&config, &option);
            said.into_iter().find(|line| line.starts_with("programs")).unwrap()
        };
        let at = |place: &str, why: &str| {
            format!("programs with the preload library: at {place}/door, everybody: WARNING: {why}")
        };
        assert_eq!(shown("/tmp"), at("/tmp", "without eBPF, their connections stay TCP"));
        assert_eq!(shown("/no/such"), at("/no/such", "there is no such directory"));
    }

    /// A log that nobody can write is found out before the day when it is needed.
    #[test]
    fn the_place_of_the_access_log_is_looked_at() {
        let said = |lines: &str| {
            let text = format!("{FILE}[access_log]\n{lines}\n");
            log_place(&Config::parse(&text, "gate.toml").unwrap().access_log)
        };
        assert_eq!(said(""), None);
        assert_eq!(said("to='file'\npath='/tmp/a'").unwrap(), "to file /tmp/a");
        let missing = said("to='file'\npath='/no/such/a'").unwrap();
        assert_eq!(missing, "to file /no/such/a: WARNING: there is no such directory");
        let missing = said("to='syslog'\npath='/no/log'").unwrap();
        assert_eq!(missing, "to syslog /no/log: WARNING: nobody listens there");
    }

    #[test]
    fn without_the_option_everything_is_tcp_and_the_reason_is_first() {
        let lines = lines(FILE, &OptionSource::None("no privilege".into()));
        assert_eq!(lines[0], "option: every connection stays TCP: no privilege");
        assert_eq!(lines[9], "  accepts over TCP only");
        assert_eq!(lines[13], "  connects to 127.0.0.1:8 over TCP only");
        let stranger = OptionSource::Assume(vec!["10.0.0.0/8".parse().unwrap()]);
        let line = "  connects to 127.0.0.1:8 over TCP only: it is not in smc.assume_peers";
        assert_eq!(self::lines(FILE, &stranger)[13], line);
    }

    /// Who would be a peer is shown before the start, too, and which upstream would be none.
    #[test]
    fn lists_of_peers_are_shown() {
        let lists = "peers=['10.8.0.0/24']\ngids=['10.9.0.0/16']\n";
        let text = format!("{FILE}peers=['10.7.0.1']\n[smc]\n{lists}");
        let config = Config::parse(&text, "gate.toml").unwrap();
        let option = OptionSource::Assume(vec!["127.0.0.0/8".parse().unwrap()]);
        let shown = describe(&config, &Devices::read().unwrap(), &option, (&cores(&[0, 1]), None));
        for line in [
            "peers: 10.8.0.0/24; RNICs: 10.9.0.0/16",
            "  peers: 10.7.0.1/32; RNICs: 10.9.0.0/16",
            "  connects to 127.0.0.1:8 over TCP only: it is not among the peers",
        ] {
            assert!(shown.lines().any(|shown| shown == line), "{line}: {shown}");
        }
    }

    /// Two gateways on one core are slower than one; operators see it coming.
    #[test]
    fn pollers_without_a_core_of_their_own_are_pointed_out() {
        let config = |more: &str| Config::parse(&format!("{FILE}{more}"), "gate.toml").unwrap();
        let cases = [
            ("", &[0, 3][..], "1, pinned to cores that no other poller holds: 3"),
            ("", &[], "1, 1 not pinned: cores that no poller holds: 0"),
            (
                "[[rnic]]\nname='r1'\ndevice='d1'\npollers=4\n",
                &[1],
                "5, WARNING: 5 not pinned: cores that no poller holds: 1",
            ),
            ("[poll]\ncores=[2]", &[], "1, pinned to cores 2 as configured"),
            (
                "[poll]\ncores=[99]",
                &[0],
                "1, pinned to cores 99 as configured, WARNING: this process may not use 99, only \
                 0, 1, 2, 3",
            ),
            ("[poll]\npin=false", &[0], "1, not pinned: poll.pin is false"),
            (
                "[[rnic]]\nname='r1'\ndevice='d1'\npollers=2\ncore=3\n",
                &[1, 2, 3],
                "3, pinned to cores 3 as configured, pinned to cores that no other poller holds: \
                 2, 1",
            ),
        ];
        for (more, free, expected) in cases {
            assert_eq!(pollers(&config(more), &cores(free)), expected, "{more}");
        }
    }

    /// A port of DPDK has an address of its own, on a device that may have none.
    #[test]
    fn a_port_of_dpdk_is_shown_with_its_network() {
        let port = "[[rnic]]\nname='p0'\nkind='dpdk'\naddress='10.8.0.1/24'\ndevice=";
        let text = format!("{FILE}{port}'net_af_packet0,iface=nowhere7'\n");
        let config = Config::parse(&text, "gate.toml").unwrap();
        let shown = place(&config.rnics[1], &Devices::read().unwrap());
        let expected = "soft RNIC 10.8.0.1/24 on net_af_packet0,iface=nowhere7, a port of DPDK: \
                        WARNING: there is no such device";
        assert_eq!(shown, expected);
        let text = format!("{FILE}{port}'net_memif0'\n");
        let config = Config::parse(&text, "gate.toml").unwrap();
        let shown = place(&config.rnics[1], &Devices::read().unwrap());
        assert!(shown.starts_with("soft RNIC 10.8.0.1/24 on net_memif0, a port of DPDK: DPDK "));
        let text = describe(
            &config,
            &Devices::read().unwrap(),
            &OptionSource::None("".into()),
            (&cores(&[]), None),
        );
        assert!(text.contains("rnic p0: soft RNIC"), "{text}");
    }

    /// The gateway would end at once.
    #[test]
    fn an_address_of_no_device_is_pointed_out() {
        let shown = |address: &str| {
            let rnic = format!("[[rnic]]\nname='x'\ndevice='lo'\naddress='{address}'\n");
            let config = Config::parse(&format!("{FILE}{rnic}"), "gate.toml").unwrap();
            place(&config.rnics[1], &Devices::read().unwrap())
        };
        assert_eq!(shown("127.0.0.9"), "soft RNIC on lo: up");
        let expected = "soft RNIC on lo: WARNING: the device does not have the address 10.99.99.99";
        assert_eq!(shown("10.99.99.99"), expected);
        let expected = "soft RNIC on lo: WARNING: it is no Ethernet device";
        assert_eq!(shown("127.0.0.1'\nkind='roce-packet"), expected);
    }

    #[test]
    fn a_wrong_file_is_exit_code_2_and_a_warning_is_1_where_wanted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let ends = |strict: bool| format!("{:?}", run(file.path(), strict));
        let code = |code: u8| format!("{:?}", ExitCode::from(code));
        assert_eq!(ends(false), code(2));
        std::fs::write(file.path(), FILE).unwrap();
        assert_eq!((ends(false), ends(true)), (code(0), code(1)));
        let quiet = "[[listener]]\nname='a'\nbind='127.0.0.1:7'\nupstream='127.0.0.1:8'\n\
                     [poll]\npin=false\n";
        std::fs::write(file.path(), quiet).unwrap();
        assert_eq!(ends(true), code(0));
    }
}
