//! RNICs whose device is taken away while they carry data: the connections go on by another one.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use crate::clock::wait_until;
use crate::failure::assert_echo;
use crate::gateway::{Gateway, Pair, Setup, local, smcgate};
use crate::hosts::{Host, Hosts, accept, set_limit};
use crate::pattern::{Pattern, StreamDigest, receive};

const PORT: u16 = 7010;
/// What flows before the device goes, and what must flow afterwards.
const BYTES: u64 = 64 << 20;
const LIMIT: Duration = Duration::from_secs(20);

#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_the_device_of_a_soft_rnic_is_deleted_under_load() {
    let hosts = Hosts::with_two_paths("smoke_the_device_of_a_soft_rnic_is_deleted_under_load");
    vanishes(&hosts, |name, host, _| Setup::of_kind(name, ("first", "roce-udp"), host.device, ""));
}

#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_the_device_of_a_packet_socket_is_deleted_under_load() {
    let hosts = Hosts::with_two_paths("smoke_the_device_of_a_packet_socket_is_deleted_under_load");
    vanishes(&hosts, |name, host, _| {
        Setup::of_kind(name, ("first", "roce-packet"), host.device, "")
    });
}

#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_the_device_below_a_port_of_dpdk_is_deleted_under_load() {
    let test = "smoke_the_device_below_a_port_of_dpdk_is_deleted_under_load";
    vanishes(&Hosts::with_two_paths(test), |name, host, number| {
        let device = format!("net_af_packet0,iface={}", host.device);
        let keys = format!("address = \"10.10.0.{number}/24\"\neal = [\"--no-huge\"]");
        Setup::of_kind(name, ("first", "dpdk"), &device, &keys)
    });
}

/// A group whose peers share memory has no other link: its streams are reset, rather than ended
/// as if they were whole, and new connections go by the network.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_shared_memory_is_unplugged_under_load() {
    let hosts = Hosts::new("smoke_shared_memory_is_unplugged_under_load");
    let directory = hosts.logs.join("shm");
    fs::create_dir_all(&directory).expect("target/ is writable");
    let device = directory.display().to_string();
    let first = |name: &str| Setup::of_kind(name, ("first", "shm"), &device, "");
    let near = first("gateway-a").rnic("second", hosts.a.device);
    let far = first("gateway-b").rnic("second", hosts.b.device);
    let near = near.towards(hosts.b.address, PORT);
    let pair = Pair::start_these(&hosts, near, far.before(&hosts.b, PORT));
    let listener = hosts.b.listen(local(PORT));
    let connect = || {
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        set_limit(&client, LIMIT);
        (client, accept(&listener, LIMIT))
    };
    let (client, server) = connect();
    let sent = AtomicU64::new(0);
    thread::scope(|scope| {
        let sender = scope.spawn(|| send_until_reset(&client, &sent));
        let receiver = scope.spawn(|| receive(&mut &server));
        wait_until("the stream flows", LIMIT, || sent.load(Relaxed) > BYTES);
        // What stands for the plug of an RNIC is its socket.
        for socket in fs::read_dir(&directory).expect("it is there").flatten() {
            fs::remove_file(socket.path()).expect("it is ours");
        }
        for error in [sender.join().expect("ends"), receiver.join().expect("ends").unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        }
    });
    for gateway in [&pair.a, &pair.b] {
        wait_until("it has noticed", LIMIT, || states(gateway) == ["down", "up"]);
    }
    let (client, server) = connect();
    assert_echo(&client, &server);
    pair.assert_all_smc(2);
}

/// Its other end notices only that nothing comes any more.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_port_of_dpdk_is_stopped_under_load() {
    let hosts = Hosts::with_two_paths("smoke_a_port_of_dpdk_is_stopped_under_load");
    let socket = hosts.logs.join("memif.sock");
    let first = |name: &str, _: &Host, number| {
        let role = if number == 1 { "client" } else { "server" };
        let socket = format!("socket={},socket-abstract=no,bsize=4608", socket.display());
        let keys = format!("address = \"10.10.0.{number}/24\"\neal = [\"--no-huge\"]");
        let device = format!("net_memif0,role={role},{socket}");
        Setup::of_kind(name, ("first", "dpdk"), &device, &keys)
    };
    let unplug = |_: &Pair<'_>| {
        assert!(smcgate(&hosts, "down", &["rnic", "down", "first"]).status.success());
    };
    is_unplugged(&hosts, first, unplug, ["down", "up"]);
}

/// Deletes the first cable between two gateways, whose first RNICs `first` makes, while a stream
/// flows.
fn vanishes(hosts: &Hosts, first: impl Fn(&str, &Host, u8) -> Setup) {
    let delete = |_: &Pair<'_>| hosts.a.ip(&["link", "delete", hosts.a.device]);
    is_unplugged(hosts, first, delete, ["down"; 2]);
}

/// Lets `unplug` take away what joins the first RNICs of two gateways, which `first` makes, while
/// a stream flows. The gateways must notice, which leaves these RNICs in the states `then`, live,
/// and lose no byte.
fn is_unplugged(
    hosts: &Hosts,
    first: impl Fn(&str, &Host, u8) -> Setup,
    unplug: impl FnOnce(&Pair<'_>),
    then: [&str; 2],
) {
    let near = first("gateway-a", &hosts.a, 1).rnic("second", hosts.a.second());
    let far = first("gateway-b", &hosts.b, 2).rnic("second", hosts.b.second());
    let near = near.towards(hosts.b.address, PORT);
    let pair = Pair::start_these(hosts, near, far.before(&hosts.b, PORT));
    for gateway in [&pair.a, &pair.b] {
        wait_until("its RNICs are up", LIMIT, || states(gateway) == ["up", "up"]);
    }
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    set_limit(&client, LIMIT);
    let server = accept(&listener, LIMIT);
    for gateway in [&pair.a, &pair.b] {
        wait_until("it has both links", LIMIT, || links(gateway) == 2);
    }
    let (sent, over) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let sender = scope.spawn(|| send(&client, &sent, &over));
        let receiver = scope.spawn(|| receive(&mut &server).expect("no reset"));
        wait_until("the stream flows", LIMIT, || sent.load(Relaxed) > BYTES);
        unplug(&pair);
        for (gateway, then) in [&pair.a, &pair.b].into_iter().zip(then) {
            wait_until("it has noticed", LIMIT, || {
                states(gateway) == [then, "up"] && links(gateway) == 1
            });
        }
        let before = sent.load(Relaxed);
        wait_until("the stream goes on", LIMIT, || sent.load(Relaxed) > before + BYTES);
        over.store(true, Relaxed);
        let received = receiver.join().expect("received");
        assert_eq!(sender.join().expect("sent"), received);
    });
    pair.assert_all_smc(1);
}

/// Sends until it cannot any more, and returns why.
fn send_until_reset(mut stream: &TcpStream, sent: &AtomicU64) -> io::Error {
    let mut pattern = Pattern::new(7);
    let mut buffer = vec![0; 128 * 1024];
    loop {
        pattern.fill(&mut buffer);
        if let Err(error) = stream.write_all(&buffer) {
            return error;
        }
        sent.fetch_add(buffer.len() as u64, Relaxed);
    }
}

/// Sends until it is over, and ends the stream.
fn send(mut stream: &TcpStream, sent: &AtomicU64, over: &AtomicBool) -> StreamDigest {
    let mut pattern = Pattern::new(7);
    let mut buffer = vec![0; 128 * 1024];
    while !over.load(Relaxed) {
        pattern.fill(&mut buffer);
        stream.write_all(&buffer).expect("no reset");
        sent.fetch_add(buffer.len() as u64, Relaxed);
    }
    stream.shutdown(Shutdown::Write).expect("no reset");
    pattern.digest()
}

/// The states of its RNICs.
fn states(gateway: &Gateway<'_>) -> Vec<String> {
    gateway.stats().rnics.into_iter().map(|rnic| rnic.state).collect()
}

/// How many of its links are active.
fn links(gateway: &Gateway<'_>) -> usize {
    let [group] = &gateway.stats().link_groups[..] else { return 0 };
    group.links.iter().filter(|link| link.state == "active").count()
}
