//! Two hosts without IPv4.

use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use crate::gateway::{Pair, Setup, smcgate};
use crate::hosts::{Hosts, accept, set_limit};
use crate::pattern::{receive, send};
use crate::transfer::transfer_by;
use crate::wire::{Capture, handshakes, tshark};

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(20);
const A: Ipv6Addr = Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, 1);
const B: Ipv6Addr = Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, 2);
/// Where applications and gateways meet, on either host.
const NEAR: SocketAddr = SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::LOCALHOST), PORT);

/// Takes IPv4 away from both hosts' wire, and gives them IPv6.
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
fn pair<'h>(hosts: &'h Hosts, rnic: &str) -> Pair<'h> {
    let near =
        Setup::with_rnic("gateway-a", &hosts.a, rnic).listener((NEAR, "tcp"), ((B, PORT), "smc"));
    let far =
        Setup::with_rnic("gateway-b", &hosts.b, rnic).listener(((B, PORT), "smc"), (NEAR, "tcp"));
    Pair::start_these(hosts, near, far)
}

/// A data centre without IPv4 has SMC-R too: the option, the rendezvous and RoCE, as others see it.
// RFC 7609 3.5.1.2-3, 3.5.1.2-8, A.2.2-10, A.2.2-13, A.2.2-14
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_ipv6_capture_shows_smc_r() {
    let hosts = hosts("smoke_ipv6_capture_shows_smc_r");
    for host in [&hosts.a, &hosts.b] {
        // Captures show packets as a wire would carry them, not trains of them.
        host.ip(&["link", "set", "dev", host.device, "gso_max_segs", "1"]);
    }
    let pair = pair(&hosts, "");
    let capture = Capture::start(&hosts);
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
    let file = capture.stop();

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

/// Bytes must be the same ones, also where packets are cut and joined by the kernel.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_ipv6_transfer_both_ways() {
    let hosts = hosts("smoke_ipv6_transfer_both_ways");
    transfer_by(NEAR, &hosts, &pair(&hosts, ""), 64 << 20);
}
