//! A path that carries less than the devices at its ends: jumbo frames at both, and two routers
//! with an ordinary cable between them.

use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::clock::wait_until;
use crate::gateway::{Gateway, Pair, Setup, local};
use crate::hosts::{Host, Hosts, accept, set_limit};
use crate::pattern::{Pattern, StreamDigest, receive};
use crate::transfer::transfer_by;

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(30);
const A: Ipv4Addr = Ipv4Addr::new(10, 21, 0, 1);
const B: Ipv4Addr = Ipv4Addr::new(10, 22, 0, 2);

/// Whether hosts hear from routers that a packet is too large for the next cable.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Icmp {
    Told,
    Dropped,
}

/// `a ═9000═ router ─ MTU ─ router ═9000═ b`
struct Narrow {
    hosts: Hosts,
    routers: [Host; 2],
}

impl Narrow {
    fn new(test: &str, mtu: u32, icmp: Icmp) -> Self {
        let hosts = Hosts::new(test);
        let router = |name: &str| {
            let name = format!("{}-{name}", hosts.a.name);
            Host::new(&name, "middle", Ipv4Addr::UNSPECIFIED)
        };
        let routers = [router("near"), router("far")];
        let sides = [(&hosts.a, "ra", A, "10.20.0.1"), (&hosts.b, "rb", B, "10.20.0.2")];
        let [near, far] = &routers;
        near.ip(&["link", "add", "middle", "type", "veth", "peer", "name", "other"]);
        near.ip(&["link", "set", "other", "netns", &far.name, "name", "middle"]);
        for ((host, cable, address, own), router) in sides.into_iter().zip(&routers) {
            let [x, y, ..] = address.octets();
            host.ip(&["link", "add", cable, "mtu", "9000", "type", "veth", "peer", "name", "edge"]);
            host.ip(&["link", "set", "edge", "netns", &router.name]);
            host.ip(&["address", "add", &format!("{address}/24"), "dev", cable]);
            host.ip(&["link", "set", cable, "up"]);
            router.ip(&["address", "add", &format!("{x}.{y}.0.254/24"), "dev", "edge"]);
            router.ip(&["address", "add", &format!("{own}/24"), "dev", "middle"]);
            router.ip(&["link", "set", "edge", "mtu", "9000", "up"]);
            router.ip(&["link", "set", "middle", "up"]);
            let forward = || fs::write("/proc/sys/net/ipv4/ip_forward", "1");
            router.enter(forward).expect("we are root");
            host.ip(&["route", "add", "10.16.0.0/12", "via", &format!("{x}.{y}.0.254")]);
            if icmp == Icmp::Dropped {
                router.enter(drop_complaints);
            }
        }
        near.ip(&["route", "add", "10.22.0.0/24", "via", "10.20.0.2"]);
        far.ip(&["route", "add", "10.21.0.0/24", "via", "10.20.0.1"]);
        let narrow = Self { hosts, routers };
        narrow.set_mtu(mtu);
        narrow
    }

    /// Sets the size of the largest IP packet that the cable between the routers takes.
    fn set_mtu(&self, mtu: u32) {
        for router in &self.routers {
            router.ip(&["link", "set", "middle", "mtu", &mtu.to_string()]);
        }
    }

    fn start(&self) -> Pair<'_> {
        let near = Setup::on_device("gateway-a", "ra", "").towards(B, PORT);
        let far = Setup::on_device("gateway-b", "rb", "")
            .listener(((B, PORT), "smc"), (local(PORT), "tcp"));
        Pair::start_these(&self.hosts, near, far)
    }
}

/// Stops a router from reporting what it drops.
fn drop_complaints() {
    let rules = "table ip mute { chain out { type filter hook output priority 0; \
                 icmp type destination-unreachable drop; }; }";
    let status = Command::new("nft").arg(rules).status().expect("scripts/setup installs nft");
    assert!(status.success(), "{status}");
}

/// Payload of the packets of the only link, in bytes.
fn payload(gateway: &Gateway<'_>) -> Vec<u32> {
    let groups = gateway.stats().link_groups;
    groups.iter().flat_map(|group| &group.links).map(|link| link.payload).collect()
}

/// How often packets on their way had to be cut smaller.
fn times_cut(gateway: &Gateway<'_>) -> u64 {
    gateway.stats().rnics.iter().map(|it| it.path_lowered).sum()
}

fn transfer_over_a_narrow_path(test: &str, icmp: Icmp) {
    let narrow = Narrow::new(test, 1500, icmp);
    let pair = narrow.start();
    transfer_by(local(PORT).into(), &narrow.hosts, &pair, 64 << 20);
    for gateway in [&pair.a, &pair.b] {
        // On a busy machine the answer to a probe may come too late; then a smaller size is used.
        let payload = payload(gateway);
        let fits = matches!(payload[..], [1024..=1420]);
        assert!(fits, "{payload:?} where 1500 bytes pass");
        println!("{payload:?}, {} times cut anew", times_cut(gateway));
    }
}

/// TCP works over such a path, so SMC-R must work over it too.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_routers_that_say_what_is_too_large() {
    transfer_over_a_narrow_path("smoke_routers_that_say_what_is_too_large", Icmp::Told);
}

/// Many networks drop the reports of routers, so that large packets disappear silently.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_routers_that_say_nothing() {
    transfer_over_a_narrow_path("smoke_routers_that_say_nothing", Icmp::Dropped);
}

/// A route that changes under a stream may cost it a moment, but no byte and not the connection.
/// When the route gets better, larger packets must be used again.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_path_that_shrinks_and_grows_under_a_stream() {
    let test = "smoke_a_path_that_shrinks_and_grows_under_a_stream";
    let narrow = Narrow::new(test, 9000, Icmp::Dropped);
    let pair = narrow.start();
    let hosts = &narrow.hosts;
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    set_limit(&client, LIMIT);
    let server = accept(&listener, LIMIT);
    let stop = AtomicBool::new(false);
    let both_have = |wanted: u32| {
        let what = format!("packets of {wanted} bytes");
        wait_until(&what, LIMIT, || [&pair.a, &pair.b].map(payload) == [[wanted], [wanted]]);
    };
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        let ends = [(&client, 1), (&server, 2)];
        let stop = &stop;
        let sending = ends.map(|(end, seed)| scope.spawn(move || send_pattern(end, seed, stop)));
        let receiving = ends.map(|(mut end, _)| scope.spawn(move || receive(&mut end)));
        both_have(4096);
        narrow.set_mtu(1500);
        both_have(1420);
        narrow.set_mtu(9000);
        both_have(4096);
        stop.store(true, Ordering::Relaxed);
        let sent = sending.map(|thread| thread.join().expect("the stream goes on"));
        let [at_client, at_server] =
            receiving.map(|thread| thread.join().expect("no panic").expect("the stream goes on"));
        assert!(sent.iter().all(|digest| digest.bytes > 0));
        assert_eq!(sent, [at_server, at_client]);
    });
    pair.assert_all_smc(1);
    for gateway in [&pair.a, &pair.b] {
        assert!(times_cut(gateway) > 0, "packets were on their way when the path shrank");
    }
}

/// Ends the streams also when the test fails, because the test waits for its threads.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sends a pattern until told to stop, then ends the stream.
fn send_pattern(mut end: &TcpStream, seed: u64, stop: &AtomicBool) -> StreamDigest {
    let mut pattern = Pattern::new(seed);
    let mut buffer = vec![0; 64 << 10];
    while !stop.load(Ordering::Relaxed) {
        pattern.fill(&mut buffer);
        end.write_all(&buffer).expect("the stream goes on");
    }
    end.shutdown(Shutdown::Write).expect("the connection is up");
    pattern.digest()
}
