//! One gateway with two hundred peers.
//!
//! Gateway A plays all of them: it has an address for each, and gateway B knows peers by address.
//! So there are two hundred link groups, with a queue pair each, at either gateway.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::time::Duration;

use crate::clock::wait_until;
use crate::gateway::{Pair, SETTLE_LIMIT, Setup, local};
use crate::hosts::{Hosts, accept, set_limit};

const PORT: u16 = 7010;
const PEERS: u8 = 200;
const LIMIT: Duration = Duration::from_secs(20);
/// Memory that a peer with one idle connection may take at either gateway, beside the connection
/// itself: its link group, its queue pair and RMB pages that were written.
const PEER_KIB_MAX: u64 = 100;
/// Connections of one peer that begin at once: more than its first RMB has elements.
const BURST: usize = 200;

/// The 66th peer of a gateway stayed TCP for good, at 74 MB of memory, because each link group
/// reserved what 255 connections need.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn two_hundred_peers_are_ordinary() {
    let hosts = Hosts::new("two_hundred_peers_are_ordinary");
    let mut near = Setup::new("gateway-a", &hosts.a);
    for peer in 1..=PEERS {
        let [ours, theirs] = [71, 70].map(|net| Ipv4Addr::new(10, net, 0, peer));
        hosts.a.ip(&["address", "add", &format!("{ours}/32"), "dev", hosts.a.device]);
        hosts.b.ip(&["address", "add", &format!("{theirs}/32"), "dev", hosts.b.device]);
        let source = ours.to_string();
        let target = theirs.to_string();
        hosts.a.ip(&["route", "add", &target, "dev", hosts.a.device, "src", &source]);
        hosts.b.ip(&["route", "add", &source, "dev", hosts.b.device, "src", &target]);
        near = near.listener((port_of(peer), "tcp"), (SocketAddrV4::new(theirs, PORT), "smc"));
    }
    let anywhere = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, PORT);
    let far = Setup::new("gateway-b", &hosts.b);
    let far = far.listener((anywhere, "smc"), (local(PORT + 1), "tcp"));
    let pair = Pair::start_these(&hosts, near, far);
    let listener = hosts.b.listen(local(PORT + 1));
    let connect = |peer| {
        let client = hosts.a.connect(port_of(peer)).expect("the gateway listens");
        set_limit(&client, LIMIT);
        let server = accept(&listener, LIMIT);
        assert_echo(&client, &server);
        (client, server)
    };
    // Some memory is taken once, with the first peer.
    let mut all = vec![connect(1)];
    let before = [&pair.a, &pair.b].map(|gateway| gateway.process.resident_kib());
    all.extend((2..=PEERS).map(connect));
    for (gateway, before) in [&pair.a, &pair.b].into_iter().zip(before) {
        let stats = gateway.stats();
        assert_eq!(stats.link_groups.len(), usize::from(PEERS));
        assert_eq!(stats.active.smc, u64::from(PEERS));
        let each = (gateway.process.resident_kib() - before) / u64::from(PEERS - 1);
        println!("{each} KiB for each peer");
        assert!(each <= PEER_KIB_MAX, "{each} KiB for each peer");
    }

    let burst: Vec<_> = (0..BURST).map(|_| hosts.a.connect(port_of(7))).collect();
    let clients: Vec<TcpStream> = burst.into_iter().map(Result::unwrap).collect();
    let servers: Vec<_> = clients.iter().map(|_| accept(&listener, LIMIT)).collect();
    for gateway in [&pair.a, &pair.b] {
        wait_until("the burst is SMC-R", SETTLE_LIMIT, || {
            gateway.stats().active.smc == u64::from(PEERS) + BURST as u64
        });
    }
    for (client, server) in &all {
        assert_echo(client, server);
    }
    pair.assert_all_smc(u64::from(PEERS) + BURST as u64);
    drop((all, clients, servers));
    for gateway in [&pair.a, &pair.b] {
        gateway.holdings_at_rest();
    }
}

/// Where applications connect to for this peer.
fn port_of(peer: u8) -> SocketAddr {
    local(7100 + u16::from(peer)).into()
}

fn assert_echo(mut client: &TcpStream, mut server: &TcpStream) {
    let mut heard = [0; 4];
    client.write_all(b"ping").expect("the connection is up");
    server.read_exact(&mut heard).expect("the connection is up");
    server.write_all(&heard).expect("the connection is up");
    client.read_exact(&mut heard).expect("the connection is up");
    assert_eq!(&heard, b"ping");
}
