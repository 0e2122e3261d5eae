//! Two hosts without IPv4, RNICs with two pollers, and RNICs whose devices fail.

use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use crate::capture::Capture;
use crate::clock::wait_until;
use crate::gateway::{Gateway, Pair, SETTLE_LIMIT, Setup, smcgate};
use crate::hosts::{Hosts, accept, set_limit};
use crate::pattern::{receive, send};
use crate::transfer::transfer_by;
use crate::wire::{handshakes, tshark};

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(20);
const A: Ipv6Addr = Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, 1);
const B: Ipv6Addr = Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, 2);
/// Where applications reach their gateway or server, on either host.
const NEAR: SocketAddr = SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::LOCALHOST), PORT);

/// Removes IPv4 from the cable between the hosts, and adds IPv6.
fn hosts(test: &str) -> Hosts {
    let hosts = Hosts::new(test);
    for (host, address) in [(&hosts.a, A), (&hosts.b, B)] {
        host.ip(&["-4", "address", "flush", "dev", host.device]);
        // Without duplicate address detection, which would take seconds.
        let address = format!("{address}/64");
        host.ip(&["address", "add", &address, "dev", host.device, "nodad"]);
    }
    hosts
}

/// A pair of gateways that meet over IPv6, with more keys of their RNICs and of `[smc]`.
fn pair<'h>(hosts: &'h Hosts, rnic: &str, smc: &str) -> Pair<'h> {
    let near = Setup::with_rnic("gateway-a", &hosts.a, rnic)
        .listener((NEAR, "tcp"), ((B, PORT), "smc"))
        .smc(smc);
    let far = Setup::with_rnic("gateway-b", &hosts.b, rnic)
        .listener(((B, PORT), "smc"), (NEAR, "tcp"))
        .smc(smc);
    Pair::start_these(hosts, near, far)
}

/// A data centre without IPv4 must have SMC-R too: the option, the rendezvous and RoCE. Other tools
/// check what goes over the wire.
// RFC 7609 3.5.1.2 #3: Proposal with subnet or prefixes
// RFC 7609 3.5.1.2 #8: match one of the IPv6 prefixes
// RFC 7609 A.2.2 #10: zero IPv4 subnet for IPv6
// RFC 7609 A.2.2 #13: IPv6 prefix takes 17 bytes
// RFC 7609 A.2.2 #14: Proposal length agrees with contents
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_ipv6_capture_shows_smc_r() {
    let hosts = hosts("smoke_ipv6_capture_shows_smc_r");
    for host in [&hosts.a, &hosts.b] {
        // Captures then show packets as a cable would carry them, not trains of packets.
        host.ip(&["link", "set", "dev", host.device, "gso_max_segs", "1"]);
    }
    // Only version 1 sends prefixes.
    let pair = pair(&hosts, "", "versions = [1, 2]\nkept_max = 0");
    let capture = Capture::start(&hosts.a, hosts.a.device, &hosts.logs);
    let listener = hosts.b.listen(NEAR);
    for seed in 0..2 {
        let mut client = hosts.a.connect(NEAR).expect("the gateway listens");
        set_limit(&client, LIMIT);
        let mut server = accept(&listener, LIMIT);
        let sent = send(&mut client, seed, 200_000).expect("the connection is up");
        drop(client);
        assert_eq!(receive(&mut server).expect("the connection is up"), sent);
    }
    pair.assert_all_smc(2);
    let file = capture.stop(&hosts.a, B);

    let handshakes = handshakes(&file);
    let offered = |syn_ack| handshakes.iter().filter(|&&(ack, smc)| ack == syn_ack && smc).count();
    assert!(offered(false) >= 2 && offered(true) >= 2, "SYN and SYN-ACK: {handshakes:?}");
    let seen = tshark(&hosts, "tshark-smc", &file, "smc");
    for message in ["Proposal", "Accept", "Confirm", "CDC Message"] {
        assert!(seen.contains(message), "no {message} in:\n{seen}");
    }
    let prefix = tshark(&hosts, "tshark-prefix", &file, "smc.proposal.ipv6.prefix.count == 1");
    assert!(prefix.contains("Proposal"), "{prefix}");
    let roce = tshark(&hosts, "tshark-roce", &file, "ipv6 && infiniband");
    assert!(roce.contains("RDMA Write"), "RoCEv2 over IPv6:\n{roce}");
    let malformed = tshark(&hosts, "tshark-malformed", &file, "_ws.malformed");
    assert!(malformed.trim().is_empty(), "{malformed}");
    let old = tshark(&hosts, "tshark-ipv4", &file, "ip");
    assert!(old.trim().is_empty(), "there is no IPv4 here: {old}");
    let file = file.to_str().expect("our own paths are text");
    let words = smcgate(&hosts, "decode", &["decode", file]).expect_success("smcgate decode");
    for message in ["CLC PROPOSAL", "LLC CONFIRM LINK", "WRITE ONLY", "CDC seq"] {
        assert!(words.contains(message), "no {message} in:\n{words}");
    }
}

/// Bytes must arrive unchanged also where the kernel cuts and joins packets.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_ipv6_transfer_both_ways() {
    let hosts = hosts("smoke_ipv6_transfer_both_ways");
    transfer_by(NEAR, &hosts, &pair(&hosts, "", ""), 64 << 20);
}

/// A listener on [::] serves both families, each by its own rule, although the RNIC has one
/// address: a v4-mapped client is in the IPv4 subnet, and has no prefixes to show.
// RFC 7609 3.5.1.2 #7: match IPv4 subnet with an interface
// RFC 7609 3.5.1.2 #8: match one of the IPv6 prefixes
// RFC 7609 A.2.2 #12: no IPv6 prefixes for IPv4
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_listener_for_both_families_has_smc_r_over_both() {
    let hosts = Hosts::new("smoke_a_listener_for_both_families_has_smc_r_over_both");
    for (host, address) in [(&hosts.a, "fd08::1/64"), (&hosts.b, "fd08::2/64")] {
        host.ip(&["address", "add", address, "dev", host.device, "nodad"]);
    }
    let other = SocketAddr::new(NEAR.ip(), PORT + 1);
    let near = Setup::with_rnic("gateway-a", &hosts.a, "address = \"fd08::1\"")
        .listener((NEAR, "tcp"), (hosts.b.at(PORT), "smc"))
        .listener((other, "tcp"), ((B, PORT), "smc"))
        .smc("versions = [1]");
    let far = Setup::with_rnic("gateway-b", &hosts.b, "address = \"fd08::2\"")
        .listener(((Ipv6Addr::UNSPECIFIED, PORT), "smc"), (other, "tcp"))
        .smc("versions = [1]");
    let pair = Pair::start_these(&hosts, near, far);
    let listener = hosts.b.listen(other);
    for (near, seed) in [(NEAR, 1), (other, 2)] {
        let mut client = hosts.a.connect(near).expect("the gateway listens");
        set_limit(&client, LIMIT);
        let mut server = accept(&listener, LIMIT);
        let sent = send(&mut client, seed, 100_000).expect("the connection is up");
        drop(client);
        assert_eq!(receive(&mut server).expect("the connection is up"), sent);
    }
    pair.assert_all_smc(2);
}

/// A second core must help, and peers must see one RNIC: many connections use two link groups, each
/// on its own poller, at one address.
// RFC 7609 3.5.3 #1: allow parallel link groups
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_two_pollers_of_one_rnic_share_the_connections() {
    let hosts = hosts("smoke_two_pollers_of_one_rnic_share_the_connections");
    let pair = pair(&hosts, "pollers = 2", "");
    let listener = hosts.b.listen(NEAR);
    let mut open = Vec::new();
    for seed in 0..16 {
        let mut client = hosts.a.connect(NEAR).expect("the gateway listens");
        set_limit(&client, LIMIT);
        let mut server = accept(&listener, LIMIT);
        let sent = std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let sent = send(&mut client, seed, 1 << 20).expect("the connection is up");
                client.shutdown(std::net::Shutdown::Write).expect("the connection is up");
                sent
            });
            let received = receive(&mut server).expect("the connection is up");
            (sending.join().expect("sending"), received)
        });
        assert_eq!(sent.0, sent.1, "connection {seed}");
        open.push((client, server));
    }
    pair.assert_all_smc(16);
    for gateway in [&pair.a, &pair.b] {
        let stats = gateway.stats();
        assert_eq!(stats.rnics.len(), 1, "one RNIC: {:?}", stats.rnics);
        assert_eq!(stats.link_groups.len(), 2, "one for each poller: {:?}", stats.link_groups);
    }
}

/// Somebody pulls a cable or removes an address. Connections that are made meanwhile must be TCP at
/// once, instead of waiting for a link that cannot come up. Afterwards they must be SMC-R again.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_an_rnic_whose_device_fails_is_not_used_until_it_is_back() {
    let hosts = hosts("smoke_an_rnic_whose_device_fails_is_not_used_until_it_is_back");
    // The RNICs are on a cable of their own, so that TCP goes on without them.
    for (host, address, peer) in [(&hosts.a, "fd09::1/64", "ra"), (&hosts.b, "fd09::2/64", "rb")] {
        if peer == "ra" {
            host.ip(&["link", "add", "ra", "type", "veth", "peer", "name", "rb"]);
            host.ip(&["link", "set", "rb", "netns", &hosts.b.name]);
        }
        host.ip(&["address", "add", address, "dev", peer, "nodad"]);
        host.ip(&["link", "set", peer, "up"]);
    }
    let near = Setup::on_device("gateway-a", "ra", "[[pnet]]\ndevice = \"va\"\nrnic = \"soft0\"")
        .listener((NEAR, "tcp"), ((B, PORT), "smc"));
    let far = Setup::on_device("gateway-b", "rb", "[[pnet]]\ndevice = \"vb\"\nrnic = \"soft0\"")
        .listener(((B, PORT), "smc"), (NEAR, "tcp"));
    let pair = Pair::start_these(&hosts, near, far);
    let listener = hosts.b.listen(NEAR);
    let exchange = |seed| {
        let mut client = hosts.a.connect(NEAR).expect("the gateway listens");
        set_limit(&client, LIMIT);
        let mut server = accept(&listener, LIMIT);
        let sent = send(&mut client, seed, 100_000).expect("the connection is up");
        drop(client);
        assert_eq!(receive(&mut server).expect("the connection is up"), sent);
    };
    let wait_for = |gateway: &Gateway<'_>, state: &str| {
        wait_until(&format!("the RNIC is {state}"), SETTLE_LIMIT, || {
            gateway.stats().rnics.iter().all(|rnic| rnic.state == state)
        });
    };
    let assert_counts = |smc, tcp| {
        let totals = pair.a.stats().totals;
        assert_eq!((totals.connections_smc, totals.connections_tcp), (smc, tcp));
    };
    exchange(1);
    assert_counts(1, 0);

    hosts.a.ip(&["link", "set", "ra", "down"]);
    wait_for(&pair.a, "down");
    wait_for(&pair.b, "down"); // Its end of the cable has no carrier.
    exchange(2);
    assert_counts(1, 1);
    hosts.a.ip(&["link", "set", "ra", "up"]);
    // The kernel forgets IPv6 addresses of devices that go down.
    hosts.a.ip(&["address", "replace", "fd09::1/64", "dev", "ra", "nodad"]);
    wait_for(&pair.a, "up");
    wait_for(&pair.b, "up");
    exchange(3);
    assert_counts(2, 1);

    hosts.b.ip(&["address", "del", "fd09::2/64", "dev", "rb"]);
    wait_for(&pair.b, "down");
    exchange(4);
    assert_counts(2, 2);
    hosts.b.ip(&["address", "add", "fd09::2/64", "dev", "rb", "nodad"]);
    wait_for(&pair.b, "up");
    wait_until("SMC-R is back", SETTLE_LIMIT, || {
        let before = pair.a.stats().totals.connections_smc;
        exchange(5);
        pair.a.stats().totals.connections_smc > before
    });
}
