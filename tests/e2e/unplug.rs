//! RNICs whose device is taken away while they carry data: the connections go on by another one.

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use crate::clock::wait_until;
use crate::gateway::{Gateway, Pair, Setup, local};
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

/// Deletes the first cable between two gateways, whose first RNICs `first` makes, while a stream
/// flows. They must notice, live, and lose no byte.
fn vanishes(hosts: &Hosts, first: impl Fn(&str, &Host, u8) -> Setup) {
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
        hosts.a.ip(&["link", "delete", hosts.a.device]);
        for gateway in [&pair.a, &pair.b] {
            wait_until("it has noticed", LIMIT, || {
                states(gateway) == ["down", "up"] && links(gateway) == 1
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
