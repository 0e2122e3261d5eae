//! Two hosts whose RNICs are in different subnets, with a router between them.

use std::fs;
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::time::Duration;

use crate::clock::wait_until;
use crate::gateway::{Gateway, Pair, Setup, local};
use crate::hosts::{Host, Hosts, accept, set_limit};
use crate::pattern::{receive, send};
use crate::transfer::transfer_by;

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(20);
const A: Ipv4Addr = Ipv4Addr::new(10, 21, 0, 1);
const B: Ipv4Addr = Ipv4Addr::new(10, 22, 0, 2);
/// Decline: no route to the peer's RoCEv2 address.
const NO_ROUTE: u32 = 0x030e_0000;

/// Two hosts with a cable between them; each has a second cable to a router.
struct Routed {
    hosts: Hosts,
    _router: Host,
}

impl Routed {
    fn new(test: &str) -> Self {
        let hosts = Hosts::new(test);
        let router = Host::new(&format!("{}-router", hosts.a.name), "ua", Ipv4Addr::UNSPECIFIED);
        for (host, near, far, address) in [(&hosts.a, "ra", "ua", A), (&hosts.b, "rb", "ub", B)] {
            host.ip(&["link", "add", near, "type", "veth", "peer", "name", far]);
            host.ip(&["link", "set", far, "netns", &router.name]);
            let [x, y, ..] = address.octets();
            host.ip(&["address", "add", &format!("{address}/24"), "dev", near]);
            router.ip(&["address", "add", &format!("{x}.{y}.0.254/24"), "dev", far]);
            host.ip(&["link", "set", near, "up"]);
            router.ip(&["link", "set", far, "up"]);
        }
        router.enter(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1")).expect("we are root");
        Self { hosts, _router: router }
    }

    /// Gives a host the route to the other one's RNIC.
    fn show_way(&self, host: &Host) {
        let (to, by) = match host.name == self.hosts.a.name {
            true => ("10.22.0.0/24", "10.21.0.254"),
            false => ("10.21.0.0/24", "10.22.0.254"),
        };
        host.ip(&["route", "add", to, "via", by]);
    }
}

/// Hosts in another rack are in another subnet. SMC-Rv2 must work between them, where SMC-Rv1
/// cannot, and every byte must arrive.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_smc_r_crosses_a_router() {
    let routed = Routed::new("smoke_smc_r_crosses_a_router");
    let hosts = &routed.hosts;
    hosts.a.ip(&["link", "delete", hosts.a.device]);
    routed.show_way(&hosts.a);
    routed.show_way(&hosts.b);
    let near = Setup::on_device("gateway-a", "ra", "").towards(B, PORT);
    let far =
        Setup::on_device("gateway-b", "rb", "").listener(((B, PORT), "smc"), (local(PORT), "tcp"));
    let pair = Pair::start_these(hosts, near, far);
    transfer_by(local(PORT).into(), hosts, &pair, 64 << 20);
    assert_routed(&pair.a);
    assert_routed(&pair.b);
}

/// A second pair of RNICs, on the cable without a router, takes over when the path through the
/// router is cut, and the program must not notice. The second pair is in another subnet, so the
/// gateway must look for links in subnets other than that of the first.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_cable_takes_over_from_a_router() {
    let routed = Routed::new("smoke_a_cable_takes_over_from_a_router");
    let hosts = &routed.hosts;
    routed.show_way(&hosts.a);
    routed.show_way(&hosts.b);
    let near = Setup::on_device("gateway-a", "ra", "").rnic("soft1", "va").towards(B, PORT);
    let far = Setup::on_device("gateway-b", "rb", "")
        .rnic("soft1", "vb")
        .listener(((B, PORT), "smc"), (local(PORT), "tcp"));
    let pair = Pair::start_these(hosts, near, far);
    let listener = hosts.b.listen(local(PORT));
    let mut client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    set_limit(&client, LIMIT);
    let mut server = accept(&listener, LIMIT);
    let mut ask = || {
        let mut heard = [0; 4];
        client.write_all(b"ping").expect("the connection is up");
        server.read_exact(&mut heard).expect("the connection is up");
        server.write_all(&heard).expect("the connection is up");
        client.read_exact(&mut heard).expect("the connection is up");
        assert_eq!(&heard, b"ping");
    };
    ask();
    let has_links = |count| {
        [&pair.a, &pair.b].iter().all(|gateway| {
            let groups = gateway.stats().link_groups;
            let links = groups.iter().flat_map(|group| &group.links);
            links.filter(|link| link.state == "active").count() == count
        })
    };
    wait_until("both gateways have both links", LIMIT, || has_links(2));
    assert_routed(&pair.a);
    hosts.a.ip(&["link", "set", "ra", "down"]);
    ask();
    wait_until("one link is left", LIMIT, || has_links(1));
    ask();
    pair.assert_all_smc(1);
}

/// Without a route to the other host's RNIC, connections must stay TCP at once, and both operators
/// must see what is missing. As soon as there is a route, SMC-R must be used.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_without_a_route_connections_stay_tcp() {
    let routed = Routed::new("smoke_without_a_route_connections_stay_tcp");
    let hosts = &routed.hosts;
    routed.show_way(&hosts.b);
    let rnic = |cable: &str| format!("[[pnet]]\ndevice = \"{cable}\"\nrnic = \"soft0\"");
    let near = Setup::on_device("gateway-a", "ra", &rnic("va")).towards(hosts.b.address, PORT);
    let far = Setup::on_device("gateway-b", "rb", &rnic("vb")).before(&hosts.b, PORT);
    let pair = Pair::start_these(hosts, near, far);
    let listener = hosts.b.listen(local(PORT));
    let exchange = |seed| {
        let mut client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        set_limit(&client, LIMIT);
        let mut server = accept(&listener, LIMIT);
        let sent = send(&mut client, seed, 100_000).expect("the connection is up");
        drop(client);
        assert_eq!(receive(&mut server).expect("the connection is up"), sent);
    };
    exchange(1);
    for gateway in [&pair.a, &pair.b] {
        let stats = gateway.stats();
        assert_eq!((stats.totals.connections_smc, stats.totals.connections_tcp), (0, 1));
        let reasons: Vec<_> = stats.fallbacks.iter().map(|it| (it.code, it.count)).collect();
        assert_eq!(reasons, [(NO_ROUTE, 1)], "{:?}", stats.fallbacks);
    }

    routed.show_way(&hosts.a);
    exchange(2);
    for gateway in [&pair.a, &pair.b] {
        assert_eq!(gateway.stats().totals.connections_smc, 1);
        assert_routed(gateway);
    }
}

/// Asserts that there is one link group, of version 2, which knows of the router.
fn assert_routed(gateway: &Gateway<'_>) {
    let groups = gateway.stats().link_groups;
    let direct: Vec<_> = groups.iter().map(|it| it.v2.as_ref().map(|v2| v2.direct)).collect();
    assert_eq!(direct, [Some(false)], "{groups:?}");
    assert!(groups[0].links.iter().all(|link| link.state == "active"), "{groups:?}");
}
