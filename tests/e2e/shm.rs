//! Gateways on one host, in networks of their own, that share memory.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::clock::{now, wait_until};
use crate::failure::assert_echo;
use crate::gateway::{Gateway, Pair, Setup, local, smcgate};
use crate::hosts::{Hosts, accept, set_limit};
use crate::transfer::transfer_both_ways;

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(15);

/// The directory in which the gateways of a test meet.
fn directory(hosts: &Hosts) -> PathBuf {
    let directory = hosts.logs.join("shm");
    fs::create_dir_all(&directory).expect("target/ is writable");
    directory
}

/// The pair of gateways that all tests have, but for the kind of their RNICs and its device.
fn setups(hosts: &Hosts) -> [Setup; 2] {
    let directory = directory(hosts).display().to_string();
    let setup = |name| Setup::of_kind(name, ("local", "shm"), &directory, "");
    let near = setup("gateway-a").towards(hosts.b.address, PORT);
    [near, setup("gateway-b").before(&hosts.b, PORT)]
}

fn pair(hosts: &Hosts) -> Pair<'_> {
    let [near, far] = setups(hosts);
    Pair::start_these(hosts, near, far)
}

/// Containers of one host have networks of their own, and their gateways need none of them.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_shared_memory_between_two_networks() {
    let hosts = Hosts::new("smoke_shared_memory_between_two_networks");
    let pair = pair(&hosts);
    transfer_both_ways(&hosts, &pair, 256 << 20);
    for gateway in [&pair.a, &pair.b] {
        let stats = gateway.stats();
        assert_eq!((stats.link_groups.len(), stats.rnics.len()), (1, 1));
    }
    let before = pair.a.holdings_at_rest();
    for _ in 0..100 {
        transfer_both_ways(&hosts, &pair, 100_000);
    }
    pair.a.holdings_back_to(&before);
}

/// A gateway that is killed cannot say that it goes. Whoever waits for it must not wait long, and
/// the next one must be found although the socket of the first is still there.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_gateway_that_is_killed_is_noticed_and_replaced() {
    let hosts = Hosts::new("a_gateway_that_is_killed_is_noticed_and_replaced");
    let mut pair = pair(&hosts);
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    set_limit(&client, LIMIT);
    let mut server = accept(&listener, LIMIT);
    (&client).write_all(b"ping").expect("the connection is up");
    server.read_exact(&mut [0; 4]).expect("the connection is up");

    pair.b.process.signal(Signal::KILL);
    let killed = now();
    let heard = (&client).read(&mut [0]);
    assert!(now() - killed < Duration::from_secs(12));
    let kind = heard.as_ref().map_err(std::io::Error::kind).copied();
    assert!(matches!(kind, Err(ErrorKind::ConnectionReset)), "{heard:?}");
    drop((client, server));

    let [_, far] = setups(&hosts);
    drop(pair.b);
    pair.b = far.start(&hosts, &hosts.b);
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    set_limit(&client, LIMIT);
    let mut server = accept(&listener, LIMIT);
    (&client).write_all(b"pong").expect("the connection is up");
    server.read_exact(&mut [0; 4]).expect("the connection is up");
    let stats = pair.a.stats();
    assert_eq!((stats.totals.connections_smc, stats.totals.connections_tcp), (2, 0));
    thread::sleep(Duration::from_millis(100));
    let sockets = fs::read_dir(directory(&hosts)).expect("it is ours").count();
    assert_eq!(sockets, 2, "that of the dead was removed");
}

/// What the RNICs of a gateway have sent, by their names.
fn sent(gateway: &Gateway<'_>) -> Vec<(String, bool)> {
    let rnics = gateway.stats().rnics;
    rnics.into_iter().map(|rnic| (rnic.name, rnic.packets_out > 0)).collect()
}

/// Gateways with an RNIC for the network and one for this host: whoever is near is reached by
/// memory, from the first connection on, and nobody has to say who that is.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_peer_on_this_host_is_noticed() {
    let hosts = Hosts::new("smoke_a_peer_on_this_host_is_noticed");
    let directory = directory(&hosts).display().to_string();
    for version in [1, 2] {
        let with_memory = |setup: Setup| {
            let setup = setup.rnic_of_kind(("local", "shm"), &directory);
            setup.smc(&format!("versions = [{version}]"))
        };
        let pair = Pair::start_these(
            &hosts,
            with_memory(Pair::client_side(&hosts, &[PORT])),
            with_memory(Pair::server_side(&hosts, &[PORT])),
        );
        for _ in 0..3 {
            transfer_both_ways(&hosts, &pair, 1 << 20);
        }
        let expected = [("soft0".to_owned(), false), ("local".to_owned(), true)];
        for gateway in [&pair.a, &pair.b] {
            wait_until("messages are counted on memory only", LIMIT, || sent(gateway) == expected);
            let [group] = &gateway.stats().link_groups[..] else { panic!("one group") };
            assert_eq!((group.version, group.links.len()), (version, 1));
        }
    }
}

/// Whoever is in another directory, or has none, is a peer like those on other hosts.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_peer_that_shares_no_memory_is_reached_by_the_network() {
    let hosts = Hosts::new("smoke_a_peer_that_shares_no_memory_is_reached_by_the_network");
    let here = directory(&hosts).display().to_string();
    let there = hosts.logs.join("other");
    fs::create_dir_all(&there).expect("target/ is writable");
    let there = there.display().to_string();
    for directories in [[Some(&here), None], [None, Some(&here)], [Some(&here), Some(&there)]] {
        let setups =
            [Pair::client_side(&hosts, &[PORT]), Pair::server_side(&hosts, &[PORT])].into_iter();
        let mut setups = setups.zip(directories).map(|(setup, directory)| match directory {
            Some(directory) => setup.rnic_of_kind(("local", "shm"), directory),
            None => setup,
        });
        let (near, far) = (setups.next().expect("two"), setups.next().expect("two"));
        let pair = Pair::start_these(&hosts, near, far);
        transfer_both_ways(&hosts, &pair, 1 << 20);
        for gateway in [&pair.a, &pair.b] {
            wait_until("packets are counted on the network only", LIMIT, || {
                sent(gateway).iter().all(|(name, any)| *any == (name == "soft0"))
            });
        }
    }
}

/// An RNIC that reaches nobody costs nothing but the acceleration.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_gateway_with_memory_only_is_plain_to_other_hosts() {
    let hosts = Hosts::new("smoke_a_gateway_with_memory_only_is_plain_to_other_hosts");
    let [near, far] = setups(&hosts);
    let listener = hosts.b.listen(local(PORT));
    let mut reasons = Vec::new();
    for (near, far) in
        [(near, Pair::server_side(&hosts, &[PORT])), (Pair::client_side(&hosts, &[PORT]), far)]
    {
        let pair = Pair::start_these(&hosts, near, far);
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        assert_echo(&client, &accept(&listener, LIMIT));
        drop(client);
        let stats = pair.a.stats();
        assert_eq!((stats.totals.connections_smc, stats.totals.connections_tcp), (0, 1));
        reasons.extend(stats.fallbacks.into_iter().map(|fallback| fallback.name));
    }
    assert_eq!(reasons, ["NO_ROUTE", "NO_ROUTE"]);
}

/// An operator takes shared memory out of use. The peer does not know that; it must use the network
/// soon, and memory again when that is back.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_memory_that_is_out_of_use_is_not_used() {
    let hosts = Hosts::new("smoke_memory_that_is_out_of_use_is_not_used");
    let directory = directory(&hosts).display().to_string();
    let with_memory = |setup: Setup| setup.rnic_of_kind(("local", "shm"), &directory);
    let pair = Pair::start_these(
        &hosts,
        with_memory(Pair::client_side(&hosts, &[PORT])),
        with_memory(Pair::server_side(&hosts, &[PORT])),
    );
    let listener = hosts.b.listen(local(PORT));
    // Which RNICs of gateway A have sent something while connections came.
    let used = || {
        let before = pair.a.stats().rnics;
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        assert_echo(&client, &accept(&listener, LIMIT));
        let after = pair.a.stats().rnics.into_iter().zip(before);
        let used = after.filter(|(after, before)| after.packets_out > before.packets_out);
        used.map(|(after, _)| after.name).collect::<Vec<_>>()
    };
    wait_until("connections use memory", LIMIT, || used() == ["local"]);
    for (name, expected) in [("down", "soft0"), ("up", "local")] {
        let words = ["rnic", name, "local"];
        assert!(smcgate(&hosts, name, &words).status.success());
        wait_until("connections use the other RNIC", LIMIT, || used() == [expected]);
    }
    assert_eq!(pair.a.stats().totals.handshakes_failed, 0);
}
