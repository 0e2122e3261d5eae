//! Who keeps ports in TIME_WAIT where one end of SMC-R is a kernel.

use std::time::Duration;

use crate::clock::wait_until;
use crate::gateway::SETTLE_LIMIT;
use crate::hosts::Hosts;
use crate::place::Place;
use crate::rig::Rig;
use crate::testbed::{Pairing, Testbed};

const PORT: u16 = 7010;
/// Connections at once, in each order of closing.
const TIMES: u32 = 100;
/// Client, server, and who closes first.
const ORDERS: [(&str, &str, &str); 3] = [
    ("send=100 shut drain", "echo", "client"),
    ("send=100 drain", "receive=100 send=100", "server"),
    ("send=100 receive=100", "receive=100 send=100", "both"),
];

/// A gateway has no more ports towards a Linux server than towards another gateway, and must not
/// leave them in TIME_WAIT either. The test prints what kernels keep, but does not judge it: two
/// kernels do the same.
pub(crate) fn the_gateway_keeps_no_ports(pairing: Pairing) {
    let hosts = Hosts::new(&format!("time-wait-{pairing:?}"));
    let rig = Rig::new(&hosts);
    let testbed = Testbed::open(&rig, &hosts, pairing, &[PORT]);
    let gateway = testbed.gateway.as_ref().expect("a pairing with a gateway");
    for (client, server, first) in ORDERS {
        testbed.play(PORT, TIMES, client, server);
        wait_until("nothing is left of them", SETTLE_LIMIT, || {
            let active = gateway.stats().active;
            (active.smc, active.farewells) == (0, 0)
        });
        // The FIN that answers ours may still be on its way.
        std::thread::sleep(Duration::from_millis(200));
        let kernel = testbed.kernels()[0];
        let [ours, theirs] = [(&rig.host, kernel), (kernel, &rig.host)]
            .map(|(place, other)| time_waits(place, other));
        println!("{pairing:?}, {first} first: TIME_WAIT: {ours} at the gateway, {theirs} at Linux");
        if pairing == Pairing::GatewayToLinux {
            assert_eq!(ours, 0, "{first} first: ports of the gateway in TIME_WAIT");
        }
    }
    assert_eq!(gateway.stats().totals.tcp_cut_short, 0, "Linux ends TCP in time");
    testbed.assert_all_smc(3 * u64::from(TIMES));
    testbed.assert_at_rest();
}

/// How many connections with `other` are in TIME_WAIT at `place`.
fn time_waits(place: &Place<'_>, other: &Place<'_>) -> usize {
    let other = other.at(0).ip().to_string();
    place.run(&["ss", "-Htan", "state", "time-wait", "dst", &other]).lines().count()
}
