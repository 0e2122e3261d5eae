//! `smcgate doctor`: can this host run the gateway, and what would make it better.
//!
//! Each finding tries the thing itself where that is harmless, because what a host claims and what
//! it allows are different. Nothing is changed.

mod copies;
pub mod peer;
mod priority;

use std::fs;
use std::io::Write as _;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use serde::Serialize;
use smcr_engine::spacing::{self, Copies};
use smcr_memory::Region;
use smcr_os::interface::preferred_address;
use smcr_os::packet::{Carries, PacketSocket};
use smcr_rnic::roce;
use smcr_rnic::roce::dpdk::{Pages, is_privileged};
use smcr_rnic::verbs;

use crate::config::CongestionControl;
use crate::confine;
use crate::cores::{self, Board};
use crate::device::Devices;
use crate::intercept::connects::Connects;
use crate::intercept::rules;
use crate::listener::OWN_MARK;
use crate::loopback::Loopback;
use crate::rdma;
use crate::smc_option::SmcOption;

/// Examines this host and prints one line per finding, or one JSON document.
///
/// Succeeds if the gateway can run here, be it slowly or over TCP only.
pub fn run(json: bool) -> ExitCode {
    let findings = examine();
    let healthy = findings.iter().all(|finding| finding.level != Level::Fail);
    let text = if json {
        let diagnosis = Diagnosis { schema: 1, healthy, findings: &findings };
        serde_json::to_string_pretty(&diagnosis).expect("strings and flags only") + "\n"
    } else {
        findings.iter().map(|finding| finding.line() + "\n").collect()
    };
    // A reader that has seen enough, such as `head`, is no reason to fail.
    let _ = std::io::stdout().write_all(text.as_bytes());
    if healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Level {
    /// As it should be.
    Ok,
    /// The gateway runs, but slower, smaller or over TCP only.
    Warn,
    /// The gateway cannot run.
    Fail,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// A stable name, for scripts.
    pub name: &'static str,
    /// How much it matters.
    pub level: Level,
    /// What was found, in a sentence.
    pub found: String,
    /// What to do about it; empty if nothing.
    pub advice: String,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Diagnosis<'a> {
    schema: u32,
    healthy: bool,
    findings: &'a [Finding],
}

impl Finding {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, level: Level::Ok, found: found.into(), advice: String::new() }
    }

    fn warn(name: &'static str, found: impl Into<String>, advice: &str) -> Self {
        Self { name, level: Level::Warn, found: found.into(), advice: advice.to_owned() }
    }

    fn fail(name: &'static str, found: impl Into<String>, advice: &str) -> Self {
        Self { name, level: Level::Fail, found: found.into(), advice: advice.to_owned() }
    }

    fn line(&self) -> String {
        let level = match self.level {
            Level::Ok => "OK",
            Level::Warn => "WARN",
            Level::Fail => "FAIL",
        };
        let arrow = if self.advice.is_empty() { "" } else { "; " };
        format!("{level:<4}  {:<12}  {}{arrow}{}", self.name, self.found, self.advice)
    }
}

/// All findings about this host, in the order in which one would ask.
pub fn examine() -> Vec<Finding> {
    let modules = fs::read_to_string("/proc/modules").unwrap_or_default();
    let rmem_max = fs::read_to_string("/proc/sys/net/core/rmem_max").unwrap_or_default();
    let descriptors = getrlimit(Resource::Nofile);
    let rdma_devices = rdma::devices();
    let has_no_limit =
        capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    vec![
        tcp_option(),
        interception(Connects::load_for_all(OWN_MARK).map(drop), rules::show().map(drop)),
        loopback(&Loopback::choose(CongestionControl::Auto)),
        kernel_smc(&modules),
        devices(),
        hardware(&rdma_devices, verbs::available().map_err(|why| why.to_string())),
        ports_of_dpdk(roce::dpdk::version().map_err(|why| why.to_string()), is_privileged()),
        packet_sockets(try_packet_socket()),
        roce_port(&modules),
        shared_memory(Region::shared(4_096).map(drop)),
        udp_offload(),
        receive_buffer(&rmem_max),
        cores(
            std::thread::available_parallelism().map_or(1, usize::from),
            cores::free(&Board::of_this_machine()).len(),
        ),
        priority::finding(&priority::Tried::on_this_host()),
        copies::finding(Copies::measure(), spacing::try_it()),
        descriptor_limit(descriptors.current, descriptors.maximum),
        memory_lock(getrlimit(Resource::Memlock).current, &rdma_devices, has_no_limit),
        confinement(confine::possible()),
    ]
}

fn tcp_option() -> Finding {
    let name = "option";
    match SmcOption::load(false) {
        Ok(_) => Finding::ok(name, "TCP option 254 can be put on SYNs by eBPF"),
        Err(unavailable) => Finding::warn(name, unavailable.to_string(), ""),
    }
}

/// Which ways there are to lead connections to listeners.
fn interception(by_ebpf: Result<(), String>, by_nftables: Result<(), String>) -> Finding {
    let name = "intercept";
    let advice = "run as root or with CAP_BPF and CAP_NET_ADMIN";
    match (by_ebpf, by_nftables) {
        (Ok(()), Ok(())) => Finding::ok(name, "ebpf, redirect and tproxy are possible"),
        (Ok(()), Err(why)) => Finding::warn(name, format!("ebpf only: {why}"), advice),
        (Err(why), Ok(())) => Finding::warn(name, format!("no ebpf: {why}"), advice),
        (Err(ebpf), Err(other)) => {
            Finding::warn(name, format!("nothing is possible: {ebpf}; {other}"), advice)
        }
    }
}

fn loopback(chosen: &Loopback) -> Finding {
    let name = "loopback";
    match chosen {
        Loopback::Own(Some(_)) => Finding::warn(name, chosen.to_string(), "run as root"),
        Loopback::Host | Loopback::Own(None) | Loopback::Both(_) => {
            Finding::ok(name, chosen.to_string())
        }
    }
}

fn kernel_smc(modules: &str) -> Finding {
    let name = "kernel-smc";
    if has_module(modules, "smc") {
        return Finding::ok(name, "the kernel's own smc module is loaded, which does no harm");
    }
    Finding::ok(name, "the kernel's own smc module is not loaded; the gateway does not need it")
}

fn devices() -> Finding {
    let name = "devices";
    let devices = match Devices::read() {
        Ok(devices) => devices,
        Err(error) => {
            let found = format!("network devices cannot be listed ({error})");
            return Finding::fail(name, found, "raise the descriptor limit");
        }
    };
    let usable: Vec<_> = devices
        .all()
        .iter()
        .filter(|device| device.running && device.name != "lo")
        .filter_map(|device| {
            let address = preferred_address(device)?;
            let (_, bits) = device.addresses.iter().find(|(own, _)| *own == address)?;
            Some(format!("{} ({address}/{bits}, mtu {})", device.name, device.mtu))
        })
        .collect();
    if usable.is_empty() {
        let found = "no device except loopback is up and has a carrier and an address";
        return Finding::warn(name, found, "give one an address: the soft RNIC needs it");
    }
    Finding::ok(name, format!("a soft RNIC can stand on {}", usable.join(", ")))
}

/// Which RNICs there are, and whether they can be used.
fn hardware(devices: &[String], library: Result<(), String>) -> Finding {
    let name = "hardware";
    let names = devices.join(", ");
    match (devices.is_empty(), library) {
        (true, Ok(())) => Finding::ok(name, "no RDMA device, so RNICs are made in software"),
        (true, Err(why)) => {
            let found = format!("no RDMA device, so RNICs are made in software; {why}");
            Finding::ok(name, found)
        }
        (false, Ok(())) => {
            Finding::ok(name, format!("RDMA devices {names} can be used: kind = \"verbs\""))
        }
        (false, Err(why)) => {
            let found = format!("RDMA devices {names} cannot be used: {why}");
            Finding::warn(name, found, "install libibverbs1 and ibverbs-providers")
        }
    }
}

/// Whether RNICs of kind `dpdk` are possible, with what this version of DPDK found.
fn ports_of_dpdk(version: Result<&str, String>, privileged: bool) -> Finding {
    let version = match version {
        Ok(version) => version,
        Err(why) => return Finding::ok("dpdk", format!("RNICs cannot be ports of DPDK: {why}")),
    };
    let pages = match Pages::of_host() {
        Pages::Huge(free) => format!("in huge pages, of which {free} are free"),
        Pages::Small => "in ordinary pages, as there are no huge ones (vm.nr_hugepages)".to_owned(),
    };
    let reach = match privileged {
        true => "of any driver",
        false => "of net_memif only: others need root",
    };
    Finding::ok("dpdk", format!("RNICs can be ports of {version}, {reach}, {pages}"))
}

/// Opens a packet socket, on the one device that every host has.
fn try_packet_socket() -> std::io::Result<()> {
    let devices = Devices::read()?;
    let device = devices.named("lo").ok_or(std::io::ErrorKind::NotFound)?;
    PacketSocket::open(device.index, Carries::Udp(ROCE_PORT), 0).map(drop)
}

/// Whether RNICs of kind `roce-packet` are possible.
fn packet_sockets(tried: std::io::Result<()>) -> Finding {
    let found = match tried {
        Ok(()) => "RNICs can be packet sockets: kind = \"roce-packet\"".to_owned(),
        Err(error) => format!("RNICs cannot be packet sockets ({error}); that needs CAP_NET_RAW"),
    };
    Finding::ok("packet", found)
}

fn roce_port(modules: &str) -> Finding {
    let name = "roce-port";
    match UdpSocket::bind((Ipv4Addr::UNSPECIFIED, ROCE_PORT)) {
        Ok(_) => Finding::ok(name, format!("UDP port {ROCE_PORT} is free")),
        Err(error) => {
            let found = format!("UDP port {ROCE_PORT} cannot be bound ({error})");
            let advice = if has_module(modules, "rdma_rxe") {
                "rdma_rxe is loaded and takes it: use kind = \"roce-packet\", or unload it"
            } else {
                "find its owner with `ss -ulpn`; it may be a gateway that is running"
            };
            Finding::warn(name, found, advice)
        }
    }
}

fn shared_memory(tried: std::io::Result<()>) -> Finding {
    let name = "shm";
    match tried {
        Ok(()) => Finding::ok(
            name,
            "gateways on this host can share memory: kind = \"shm\", with a directory as device",
        ),
        Err(error) => {
            let found =
                format!("memory cannot be shared ({error}), so kind = \"shm\" does not work");
            Finding::warn(name, found, "use Linux 4.14 or later, and allow memfd_create")
        }
    }
}

fn udp_offload() -> Finding {
    let name = "udp-offload";
    match send_a_train() {
        Ok(TRAIN_BYTES) => Finding::ok(name, "UDP GSO and GRO work"),
        Ok(received) => Finding::warn(
            name,
            format!(
                "a train of {TRAIN_BYTES} bytes arrives as datagrams of {received}: no UDP GRO"
            ),
            "use Linux 5.0 or later; without it a packet costs ten times as much",
        ),
        Err(error) => Finding::warn(
            name,
            format!("UDP GSO does not work ({error})"),
            "use Linux 5.0 or later; without it a packet costs ten times as much",
        ),
    }
}

/// Sends one train over loopback; returns how many bytes of it the first receive sees.
fn send_a_train() -> std::io::Result<usize> {
    let receiver = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    receiver.set_read_timeout(Some(Duration::from_secs(1)))?;
    smcr_os::offload::join_receives(receiver.as_fd())?;
    let sender = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    smcr_os::offload::split_sends(sender.as_fd(), 1024)?;
    sender.send_to(&[0; TRAIN_BYTES], receiver.local_addr()?)?;
    let mut datagram = [0; 2 * TRAIN_BYTES];
    receiver.recv(&mut datagram)
}

fn receive_buffer(rmem_max: &str) -> Finding {
    let name = "rmem-max";
    let advice = "run as root, which may exceed it, or `sysctl net.core.rmem_max=4194304`";
    match rmem_max.trim().parse::<u64>() {
        Ok(bytes) if bytes >= RECEIVE_BUFFER_BYTES => {
            Finding::ok(name, format!("receive buffers may have {bytes} bytes"))
        }
        Ok(bytes) => {
            let found = format!("receive buffers may have {bytes} bytes, so bursts may be lost");
            Finding::warn(name, found, advice)
        }
        Err(_) => Finding::warn(name, "net.core.rmem_max cannot be read", advice),
    }
}

fn cores(count: usize, free: usize) -> Finding {
    let name = "cores";
    if count > 1 && free == 0 {
        let found = format!("{count} cores, each held by a poller of a gateway that is running");
        let advice = "a further gateway cannot pin its pollers; set its poll.policy to \"block\"";
        return Finding::warn(name, found, advice);
    }
    if count > 1 {
        return Finding::ok(name, format!("{count} cores, {free} of them not held by any poller"));
    }
    let found = "one core, which pollers share with the applications";
    Finding::warn(name, found, "set poll.policy = \"block\"")
}

fn descriptor_limit(current: Option<u64>, maximum: Option<u64>) -> Finding {
    let name = "descriptors";
    // The gateway raises its own limit as far as it may.
    let Some(limit) = maximum.or(current) else {
        return Finding::ok(name, "no limit on descriptors");
    };
    let connections = limit.saturating_sub(DESCRIPTORS_OF_OUR_OWN) / 2;
    let found = format!("{limit} descriptors, enough for {connections} connections");
    let advice = "raise `ulimit -Hn`, or LimitNOFILE of the service";
    match connections {
        0 => Finding::fail(name, found, advice),
        1..CONNECTIONS_WANTED => Finding::warn(name, found, advice),
        CONNECTIONS_WANTED.. => Finding::ok(name, found),
    }
}

/// Whether RNICs of kind `verbs` can register memory. `has_no_limit` says that this process has the
/// capability to lock more than the limit.
fn memory_lock(limit: Option<u64>, devices: &[String], has_no_limit: bool) -> Finding {
    let name = "memory-lock";
    match limit {
        None => Finding::ok(name, "no limit on locked memory"),
        Some(_) if has_no_limit => {
            Finding::ok(name, "no limit on locked memory for who has CAP_IPC_LOCK, as this process")
        }
        Some(bytes) if !devices.is_empty() && bytes < SEND_POOL_BYTES => {
            let found = format!(
                "{bytes} bytes may be locked; for RNICs of kind \"verbs\", smc.send_pool alone has \
                 {SEND_POOL_BYTES} for each link"
            );
            let advice = "raise `ulimit -l`, or LimitMEMLOCK of the service, or give the gateway \
                          CAP_IPC_LOCK";
            Finding::warn(name, found, advice)
        }
        Some(bytes) => {
            Finding::ok(name, format!("{bytes} bytes may be locked; RNICs in software lock none"))
        }
    }
}

/// What the gateway can give up once it has started.
fn confinement(possible: [(&'static str, Result<String, String>); 2]) -> Finding {
    let name = "confine";
    let (mut can, mut cannot) = (vec!["capabilities".to_owned()], Vec::new());
    for (_, outcome) in possible {
        match outcome {
            Ok(what) => can.push(what),
            Err(why) => cannot.push(why),
        }
    }
    let found = format!("a gateway confines itself by {}", can.join(", "));
    match cannot.is_empty() {
        true => Finding::ok(name, found),
        false => Finding::warn(name, format!("{found}; {}", cannot.join("; ")), "use Linux 5.13"),
    }
}

fn has_module(modules: &str, name: &str) -> bool {
    modules.lines().any(|line| line.split(' ').next() == Some(name))
}

/// RoCEv2's UDP port.
const ROCE_PORT: u16 = 4791;
/// Three datagrams of 1024 bytes.
const TRAIN_BYTES: usize = 3072;
/// What holds a burst of one window.
const RECEIVE_BUFFER_BYTES: u64 = 4 << 20;
/// Listeners, RNICs, epoll, eBPF, standard streams.
const DESCRIPTORS_OF_OUR_OWN: u64 = 64;
/// The default of `smc.send_pool`.
const SEND_POOL_BYTES: u64 = 32 << 20;
/// The default of `limits.connections_max`.
const CONNECTIONS_WANTED: u64 = 9000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_follow_what_is_found() {
        assert_eq!(descriptor_limit(Some(1024), Some(20_000)).level, Level::Ok);
        assert_eq!(descriptor_limit(Some(1024), Some(4096)).level, Level::Warn);
        assert_eq!(descriptor_limit(Some(16), Some(65)).level, Level::Fail);
        assert_eq!(descriptor_limit(None, None).level, Level::Ok);
        assert_eq!(receive_buffer("4194304\n").level, Level::Ok);
        assert_eq!(receive_buffer("212992\n").level, Level::Warn);
        assert_eq!(receive_buffer("").level, Level::Warn);
        assert_eq!((cores(1, 1).level, cores(2, 1).level), (Level::Warn, Level::Ok));
        let refused = Err(std::io::ErrorKind::Unsupported.into());
        assert_eq!(shared_memory(refused).level, Level::Warn);
    }

    #[test]
    fn what_packet_sockets_need_is_said() {
        assert!(packet_sockets(Ok(())).found.contains("roce-packet"));
        let refused = packet_sockets(Err(std::io::ErrorKind::PermissionDenied.into()));
        assert!(refused.level == Level::Ok && refused.found.contains("CAP_NET_RAW"), "{refused:?}");
    }

    /// An operator who wants interception learns here which way is left.
    #[test]
    fn what_interception_needs_is_said() {
        let no = |why: &str| Err(why.to_owned());
        assert_eq!(interception(Ok(()), Ok(())).level, Level::Ok);
        assert!(interception(Ok(()), no("no nft")).found.contains("ebpf only: no nft"));
        assert!(interception(no("no CAP_BPF"), Ok(())).found.contains("no ebpf: no CAP_BPF"));
        assert_eq!(interception(no("a"), no("b")).found, "nothing is possible: a; b");
    }

    /// A device that cannot be used is worth a warning; a host without one is not.
    #[test]
    fn what_rnics_need_is_said() {
        let devices = ["mlx5_0".to_owned()];
        let missing = || Err("libibverbs.so.1 is not there".to_owned());
        assert_eq!(hardware(&[], missing()).level, Level::Ok);
        let usable = hardware(&devices, Ok(()));
        assert!(usable.level == Level::Ok && usable.found.contains("mlx5_0"), "{usable:?}");
        let lost = hardware(&devices, missing());
        assert!(lost.level == Level::Warn && lost.found.contains("not there"), "{lost:?}");
    }

    /// With the usual limit an RNIC of hardware cannot be opened, and one in software can.
    #[test]
    fn too_little_memory_that_may_be_locked_is_said_where_there_are_rnics() {
        let devices = ["mlx5_0".to_owned()];
        let usual = Some(8 << 20);
        let finding = memory_lock(usual, &devices, false);
        assert!(finding.level == Level::Warn && finding.advice.contains("LimitMEMLOCK"));
        assert!(finding.found.contains("33554432"), "{finding:?}");
        assert_eq!(memory_lock(usual, &[], false).level, Level::Ok);
        assert_eq!(memory_lock(usual, &devices, true).level, Level::Ok);
        assert_eq!(memory_lock(Some(SEND_POOL_BYTES), &devices, false).level, Level::Ok);
        assert_eq!(memory_lock(None, &devices, false).level, Level::Ok);
    }

    /// Operators who write `kind = "dpdk"` learn here what is missing for it, and others no alarm.
    #[test]
    fn what_dpdk_needs_is_said() {
        let found = ports_of_dpdk(Err("its libraries are not there".to_owned()), true);
        let expected = "RNICs cannot be ports of DPDK: its libraries are not there";
        assert_eq!((found.level, &found.found[..]), (Level::Ok, expected));
        let found = ports_of_dpdk(Ok("DPDK 22.11"), false).found;
        assert!(
            found.starts_with("RNICs can be ports of DPDK 22.11, of net_memif only"),
            "{found}"
        );
        assert!(found.contains("pages"), "{found}");
    }

    /// The module smc_diag is not the module smc.
    #[test]
    fn modules_are_known_by_their_whole_name() {
        let modules = "smc_diag 16384 0 - Live 0x0\nrdma_rxe 1 0 - Live 0x0\n";
        assert!(has_module(modules, "rdma_rxe"));
        assert!(!has_module(modules, "smc"));
    }

    /// Scripts read the first word, people the rest of the line.
    #[test]
    fn a_line_says_what_was_found_and_what_to_do() {
        let line = cores(1, 1).line();
        assert_eq!(
            line,
            "WARN  cores         one core, which pollers share with the applications; set \
             poll.policy = \"block\""
        );
        let line = cores(2, 1).line();
        assert_eq!(line, "OK    cores         2 cores, 1 of them not held by any poller");
    }

    /// The machine that builds this can run it.
    #[test]
    fn this_host_is_examined_without_a_failure() {
        let findings = examine();
        assert!(findings.iter().all(|finding| finding.level != Level::Fail), "{findings:?}");
        let offload = findings.iter().find(|finding| finding.name == "udp-offload").unwrap();
        assert_eq!(offload.level, Level::Ok, "{offload:?}");
        assert!(findings.iter().any(|finding| finding.name == "priority"), "{findings:?}");
    }

    #[test]
    fn json_is_for_scripts() {
        let findings = [cores(1, 1)];
        let diagnosis = Diagnosis { schema: 1, healthy: true, findings: &findings };
        let json = serde_json::to_value(&diagnosis).unwrap();
        assert_eq!(json["findings"][0]["level"], "WARN");
        assert_eq!(json["findings"][0]["name"], "cores");
        assert_eq!((&json["schema"], &json["healthy"]), (&1.into(), &true.into()));
    }
}
