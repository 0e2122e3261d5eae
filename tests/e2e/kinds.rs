//! Gateways whose RNICs are of other kinds: the same job by another door.

use std::fmt::Display;
use std::fs;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use crate::capture::Capture;
use crate::clock::wait_until;
use crate::failure::assert_echo;
use crate::gateway::{Gateway, Pair, Setup, local};
use crate::hosts::{Host, Hosts, accept};
use crate::process::run;
use crate::transfer::transfer_by;

const PORT: u16 = 7010;
const BYTES: u64 = 64 << 20;
/// Of a host that reserves huge pages, none are taken.
const NO_HUGE: &str = "eal = [\"--no-huge\"]";
/// How long tshark may take.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a gateway may take to notice that a port is up or down.
const NOTICE_LIMIT: Duration = Duration::from_secs(10);

/// Two ports of DPDK that shared memory joins: no kernel in the path of the data.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_dpdk_over_shared_memory() {
    let hosts = Hosts::new("smoke_dpdk_over_shared_memory");
    let (near, far) = memif(&hosts, [4608; 2]);
    let pair = Pair::start_these(&hosts, near, far);
    for gateway in [&pair.a, &pair.b] {
        wait_for_state(gateway, "up");
    }
    transfer_by(local(PORT).into(), &hosts, &pair, BYTES);
}

/// The driver mixes up frames that need several buffers. Each end announces the MTU that fits its
/// own, and both keep to the smaller one.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn the_ends_of_shared_memory_may_have_different_buffers() {
    let hosts = Hosts::new("the_ends_of_shared_memory_may_have_different_buffers");
    for buffers in [[2048, 4608], [4608, 2048]] {
        let (near, far) = memif(&hosts, buffers);
        let pair = Pair::start_these(&hosts, near, far);
        wait_for_state(&pair.a, "up");
        transfer_by(local(PORT).into(), &hosts, &pair, BYTES);
    }
}

/// Where the host reserves huge pages, ports use them, and so does the memory that peers write to.
/// When all are taken, there is other memory.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn memory_for_ports_is_of_huge_pages() {
    const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
    struct Reservation(String);
    impl Drop for Reservation {
        fn drop(&mut self) {
            fs::write(RESERVED, &self.0).expect("it was there before");
        }
    }
    let hosts = Hosts::new("memory_for_ports_is_of_huge_pages");
    let _reservation = Reservation(fs::read_to_string(RESERVED).expect("this is Linux"));
    for (pages, expected) in [(600, true), (0, false)] {
        fs::write(RESERVED, pages.to_string()).expect("root may");
        let (near, far) = memif_with(&hosts, [4608; 2], "");
        let pair = Pair::start_these(&hosts, near, far);
        wait_for_state(&pair.a, "up");
        let listener = hosts.b.listen(local(PORT));
        // More than the first RMB has room for: those that follow are long.
        let streams = (0..60).map(|_| {
            let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
            let server = accept(&listener, NOTICE_LIMIT);
            assert_echo(&client, &server);
            (client, server)
        });
        let streams: Vec<_> = streams.collect();
        for gateway in [&pair.a, &pair.b] {
            let maps = fs::read_to_string(format!("/proc/{}/maps", gateway.process.id()))
                .expect("it lives");
            assert_eq!(maps.contains("/anon_hugepage"), expected, "{maps}");
        }
        pair.assert_all_smc(streams.len() as u64);
    }
}

/// Frames of a device whose addresses the kernel goes on using.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_packet_sockets() {
    let hosts = Hosts::new("smoke_packet_sockets");
    let [near, far] = [("gateway-a", &hosts.a), ("gateway-b", &hosts.b)]
        .map(|(name, host)| Setup::of_kind(name, ("soft0", "roce-packet"), host.device, ""));
    let (near, far) = listeners(&hosts, near, far);
    let pair = Pair::start_these(&hosts, near, far);
    transfer_by(local(PORT).into(), &hosts, &pair, BYTES);
}

/// Neither IP nor UDP: RoCE v1, over which SMC-Rv1 was made to run.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_packet_sockets_with_roce_version_1() {
    let hosts = Hosts::new("smoke_packet_sockets_with_roce_version_1");
    let [near, far] = [("gateway-a", &hosts.a), ("gateway-b", &hosts.b)].map(|(name, host)| {
        Setup::of_kind(name, ("soft0", "roce-packet"), host.device, "version = 1\n")
    });
    let (near, far) = listeners(&hosts, near, far);
    let pair = Pair::start_these(&hosts, near, far);
    let capture = Capture::start(&hosts.a, hosts.a.device, &hosts.logs);
    transfer_by(local(PORT).into(), &hosts, &pair, BYTES);
    let file = capture.stop(&hosts.b, hosts.a.address);
    let mut tshark = Command::new("tshark");
    tshark.arg("-r").arg(&file).args(["-Y", "infiniband", "-T", "fields"]);
    tshark.args(["-e", "eth.type", "-e", "infiniband.grh.sgid", "-e", "frame.protocols"]);
    let shown = run(&hosts, &hosts.a, "tshark", LIMIT, &mut tshark).expect_success("tshark");
    let of_smc = shown.lines().filter(|line| line.starts_with("0x8915") && line.ends_with(":smc"));
    assert!(of_smc.count() > 10, "{}", &shown[..shown.len().min(2_000)]);
    assert!(!shown.contains("udp"), "nothing of it is RoCE v2");
    // SMC-Rv1 it is, without that the operator had to say so.
    let groups = pair.a.stats().link_groups;
    assert!(groups.iter().all(|group| group.version == 1) && !groups.is_empty());
}

/// Who has a packet socket and who has a UDP socket understand each other, and the one with the
/// packet socket does not tell the other that nobody is there.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn packet_sockets_and_udp_sockets_understand_each_other() {
    for kinds in [["roce-packet", "roce-udp"], ["roce-udp", "roce-packet"]] {
        let hosts = Hosts::new("packet_sockets_and_udp_sockets_understand_each_other");
        let near = Setup::of_kind("gateway-a", ("soft0", kinds[0]), hosts.a.device, "");
        let far = Setup::of_kind("gateway-b", ("soft0", kinds[1]), hosts.b.device, "");
        let (near, far) = listeners(&hosts, near, far);
        let pair = Pair::start_these(&hosts, near, far);
        transfer_by(local(PORT).into(), &hosts, &pair, BYTES);
    }
}

/// The same over a network device that the kernel uses too. The ports have addresses of their own.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_dpdk_over_a_network_device() {
    let hosts = Hosts::new("smoke_dpdk_over_a_network_device");
    let [near, far] = [(&hosts.a, 1), (&hosts.b, 2)].map(|(host, number)| {
        let device = format!("net_af_packet0,iface={}", host.device);
        setup(number, device)
    });
    let (near, far) = listeners(&hosts, near, far);
    let pair = Pair::start_these(&hosts, near, far);
    // The kernel takes up to a second to say that a new device has a carrier.
    for gateway in [&pair.a, &pair.b] {
        wait_for_state(gateway, "up");
    }
    transfer_by(local(PORT).into(), &hosts, &pair, BYTES);
}

/// Ports speak with all that the kernel sends and receives for, although it does not cut trains of
/// packets on this cable, and ports cannot receive one.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn ports_and_sockets_understand_each_other() {
    for (kind, is_first) in [("roce-packet", true), ("roce-packet", false), ("roce-udp", true)] {
        let hosts = Hosts::new("ports_and_sockets_understand_each_other");
        let setup = |name: &str, host: &Host, has_port: bool| {
            if !has_port {
                return Setup::of_kind(name, ("soft0", kind), host.device, "");
            }
            let device = format!("net_af_packet0,iface={}", host.device);
            let keys = "address = \"10.8.0.10/24\"\neal = [\"--no-huge\"]";
            Setup::of_kind(name, ("port0", "dpdk"), &device, keys)
        };
        let near = setup("gateway-a", &hosts.a, !is_first);
        let far = setup("gateway-b", &hosts.b, is_first);
        let (near, far) = listeners(&hosts, near, far);
        let pair = Pair::start_these(&hosts, near, far);
        for gateway in [&pair.a, &pair.b] {
            wait_for_state(gateway, "up");
        }
        transfer_by(local(PORT).into(), &hosts, &pair, BYTES);
    }
}

/// An end of a port goes away and comes back: the other one notices, and uses the port again.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn the_other_end_of_a_port_goes_and_comes_back() {
    let hosts = Hosts::new("the_other_end_of_a_port_goes_and_comes_back");
    let setups = || memif(&hosts, [4608; 2]);
    // The client's end is first: it waits for the server.
    let mut a = setups().0.start(&hosts, &hosts.a);
    wait_for_state(&a, "down");
    let mut b = setups().1.start(&hosts, &hosts.b);
    wait_for_state(&b, "up");
    kill(&mut a);
    wait_for_state(&b, "down");
    a = setups().0.start(&hosts, &hosts.a);
    wait_for_state(&b, "up");
    kill(&mut b);
    wait_for_state(&a, "down");
    b = setups().1.start(&hosts, &hosts.b);
    for gateway in [&a, &b] {
        wait_for_state(gateway, "up");
    }
    transfer_by(local(PORT).into(), &hosts, &Pair { a, b }, BYTES);
}

fn kill(gateway: &mut Gateway<'_>) {
    gateway.process.signal(Signal::KILL);
    gateway.process.wait(NOTICE_LIMIT);
}

/// What an operator gets wrong is one line that names the device, and exit code 2.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_port_that_is_not_there_is_one_line() {
    let hosts = Hosts::new("smoke_a_port_that_is_not_there_is_one_line");
    for (number, (device, cause)) in [
        ("net_af_packet0,iface=nowhere7", "its network device cannot be found"),
        ("net_nonsense0,iface=va", "no driver takes it"),
        ("0000:ff:1f.7", "no driver takes it"),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("gateway-{number}");
        let keys = "address = \"10.10.0.1/24\"\neal = [\"--no-huge\"]";
        let setup = Setup::of_kind(&name, ("port0", "dpdk"), device, keys);
        let (code, log) = setup.towards(hosts.b.address, PORT).start_in_vain(&hosts, &hosts.a);
        assert_eq!(code, Some(2), "{device}: {log}");
        let line = log.lines().last().expect("it says why");
        let begin = format!("smcgate: rnic port0 on {device}: ");
        assert!(line.starts_with(&begin) && line.contains(cause), "{line}");
    }
}

/// One binary works with libibverbs and without it, and says which.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_without_libibverbs_only_rnics_are_missing() {
    let hosts = Hosts::new("smoke_without_libibverbs_only_rnics_are_missing");
    let soft = Setup::new("gateway-a", &hosts.a).under(&WITHOUT_LIBIBVERBS);
    drop(soft.towards(hosts.b.address, PORT).start(&hosts, &hosts.a));
    let hard = Setup::of_kind("gateway-b", ("hw0", "verbs"), "mlx5_0", "");
    let hard = hard.under(&WITHOUT_LIBIBVERBS).towards(hosts.b.address, PORT);
    let (code, log) = hard.start_in_vain(&hosts, &hosts.a);
    assert_eq!(code, Some(2), "{log}");
    let line = log.lines().last().expect("it says why");
    let begin = "smcgate: rnic hw0 on mlx5_0: RDMA device mlx5_0: libibverbs cannot be used: ";
    assert!(line.starts_with(begin) && line.contains("libibverbs.so.1"), "{line}");
}

/// Runs a program where an empty file has taken the place of the library, if that is installed.
const WITHOUT_LIBIBVERBS: [&str; 5] = [
    "unshare",
    "--mount",
    "sh",
    "-ec",
    "for file in $(ldconfig -p | sed -n 's/.*libibverbs[.]so[.]1 .*=> //p'); do\n\
         mount --bind /dev/null \"$file\"\n\
     done\n\
     exec \"$0\" \"$@\"",
];

/// Two gateways on one port would each receive a part of its packets.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_the_second_gateway_on_a_port_ends_with_one_line() {
    let hosts = Hosts::new("smoke_the_second_gateway_on_a_port_ends_with_one_line");
    let device = format!("net_af_packet0,iface={}", hosts.a.device);
    let first = setup(1, &device).towards(hosts.b.address, PORT).start(&hosts, &hosts.a);
    let second = setup(2, &device).towards(hosts.b.address, PORT + 1);
    let (code, log) = second.start_in_vain(&hosts, &hosts.a);
    assert_eq!(code, Some(1), "the first one may end: {log}");
    let line = log.lines().last().expect("it says why");
    let begin = format!("smcgate: rnic port0 on {device}: the port is busy: another process");
    assert!(line.starts_with(&begin), "{line}");
    drop(first);
}

/// The same for packet sockets, which would both receive all of them.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_the_second_gateway_on_a_device_ends_with_one_line() {
    let hosts = Hosts::new("smoke_the_second_gateway_on_a_device_ends_with_one_line");
    let setup = |name: &str, port| {
        let setup = Setup::of_kind(name, ("soft0", "roce-packet"), hosts.a.device, "");
        setup.towards(hosts.b.address, port)
    };
    let first = setup("gateway-a", PORT).start(&hosts, &hosts.a);
    let (code, log) = setup("gateway-b", PORT + 1).start_in_vain(&hosts, &hosts.a);
    assert_eq!(code, Some(1), "the first one may end: {log}");
    let line = log.lines().last().expect("it says why");
    let begin = "smcgate: rnic soft0 on va: ";
    assert!(line.starts_with(begin) && line.contains("another RNIC of this kind"), "{line}");
    drop(first);
    // What a killed process had is free again.
    setup("gateway-b", PORT + 1).start(&hosts, &hosts.a);
}

/// Both gateways of [`Pair`], joined by shared memory, with buffers of these lengths.
fn memif(hosts: &Hosts, buffers: [u32; 2]) -> (Setup, Setup) {
    memif_with(hosts, buffers, NO_HUGE)
}

fn memif_with(hosts: &Hosts, buffers: [u32; 2], keys: &str) -> (Setup, Setup) {
    let socket = hosts.logs.join("memif.sock");
    let socket = format!("socket={},socket-abstract=no", socket.display());
    let [near, far] = buffers.map(|len| format!("{socket},bsize={len}"));
    let near = setup_with(1, format!("net_memif0,role=client,{near}"), keys);
    let far = setup_with(2, format!("net_memif0,role=server,{far}"), keys);
    listeners(hosts, near, far)
}

fn setup(number: u8, device: impl Display) -> Setup {
    setup_with(number, device, NO_HUGE)
}

fn setup_with(number: u8, device: impl Display, keys: &str) -> Setup {
    let name = if number == 1 { "gateway-a" } else { "gateway-b" };
    let keys = format!("address = \"10.10.0.{number}/24\"\n{keys}");
    Setup::of_kind(name, ("port0", "dpdk"), &device.to_string(), &keys)
}

fn listeners(hosts: &Hosts, near: Setup, far: Setup) -> (Setup, Setup) {
    (near.towards(hosts.b.address, PORT), far.before(&hosts.b, PORT))
}

fn wait_for_state(gateway: &Gateway<'_>, state: &str) {
    wait_until(&format!("the RNIC is {state}"), NOTICE_LIMIT, || {
        gateway.stats().rnics.iter().all(|rnic| rnic.state == state)
    });
}
