//! What an operator of the gateway can see about a kernel at the other end.

use std::time::Duration;

use crate::clock::wait_for;
use crate::gateway::smcgate;
use crate::hosts::Hosts;
use crate::rig::{EID, Rig};
use crate::testbed::{Pairing, Testbed};

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(30);

/// Asserts that `smcgate conns` and `/stats` name version and release, the EID that both have, the
/// peer's host and its operating system, as the kernel's first-contact extension tells them.
pub(crate) fn is_told_who_the_peer_is(pairing: Pairing) {
    let hosts = Hosts::new(&format!("operator-{pairing:?}"));
    let rig = Rig::new(&hosts);
    let testbed = Testbed::open(&rig, &hosts, pairing, &[PORT]);
    let server = testbed.accept(PORT, 1, "drain");
    let client = testbed.start_connect(PORT, 1, "send=1000 pause=4000");

    let host = match pairing {
        Pairing::LinuxToLinux | Pairing::LinuxToGateway => "guest1",
        Pairing::GatewayToLinux => "guest2",
    };
    let row = wait_for("smcgate conns shows a connection at work", LIMIT, || {
        let said = smcgate(&hosts, "conns", &["conns"]).expect_success("conns");
        said.lines().find(|line| line.contains(" active ")).map(str::to_owned)
    });
    let cells: Vec<&str> = row.split_whitespace().collect();
    let named = ["smc-r", "2.1", EID, host, "(Linux)"];
    let places = named.map(|word| cells.iter().position(|cell| *cell == word));
    assert!(places.is_sorted() && places[0].is_some(), "not {named:?} in this order: {row}");

    let gateway = testbed.gateway.as_ref().expect("there is one in every pairing but one");
    let stats: serde_json::Value =
        serde_json::from_str(&gateway.get("/stats")).expect("the schema of /stats");
    let group = &stats["link_groups"][0];
    let told = [&group["v2"]["eid"], &group["v2"]["peer_host"], &group["v2"]["peer_os"]];
    assert_eq!(told, [EID, host, "Linux"], "{group:#}");

    testbed.outcomes(client, server, 1);
    testbed.assert_all_smc(1);
    testbed.assert_at_rest();
}
