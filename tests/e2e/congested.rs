//! Routers that mark packets instead of dropping them.

use std::process::Command;

use crate::gateway::{Gateway, Pair};
use crate::hosts::Hosts;
use crate::transfer::transfer_both_ways;

const PORT: u16 = 7010;

/// Marks a tenth of what arrives and may be marked, as a router with a long queue does.
fn mark_some() {
    let rules = "table ip congested { chain arrives { type filter hook prerouting priority 0; \
                 udp dport 4791 ip ecn ect0 numgen random mod 10 == 0 counter ip ecn set ce; }; }";
    let status = Command::new("nft").arg(rules).status().expect("scripts/setup installs nft");
    assert!(status.success(), "{status}");
}

fn notices(gateway: &Gateway<'_>) -> [u64; 2] {
    let rnics = gateway.stats().rnics;
    [rnics.iter().map(|it| it.cnps_in).sum(), rnics.iter().map(|it| it.cnps_out).sum()]
}

/// Who is not told of a full queue fills it until packets are lost.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_gateways_tell_each_other_of_congestion() {
    let hosts = Hosts::new("smoke_gateways_tell_each_other_of_congestion");
    let pair = Pair::start(&hosts, &[PORT]);
    transfer_both_ways(&hosts, &pair, 16 << 20);
    assert_eq!([notices(&pair.a), notices(&pair.b)], [[0; 2]; 2], "nobody marks packets");
    hosts.b.enter(mark_some);
    transfer_both_ways(&hosts, &pair, 64 << 20);
    assert!(notices(&pair.a)[0] > 0 && notices(&pair.b)[1] > 0);
    assert_eq!((notices(&pair.a)[1], notices(&pair.b)[0]), (0, 0), "the other way is free");
    pair.assert_all_smc(2);
}
