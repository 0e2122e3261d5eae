//! Linux to Linux: what two kernels do is the yardstick for ours.

use std::path::Path;

use crate::dialogue::Dialogue;
use crate::hosts::Hosts;
use crate::place::{Socket, unanimous};
use crate::rig::{EID, Rig};

const PORT: u16 = 7010;

/// If two kernels cannot do it here, the rig is broken, and nothing it says of ours counts. What
/// they say to each other is written down, because ours must say the same.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn verified_bulk_over_smc_r() {
    const BULK: &str = "67108864";
    let hosts = Hosts::new("verified_bulk_over_smc_r");
    let rig = Rig::new(&hosts);
    rig.one.speak_smc(EID);
    rig.two.speak_smc(EID);
    let wire = rig.capture();

    let part = format!("mode receive={BULK} shut drain");
    let server = rig.two.accept(Socket::Smc, PORT, 1, &part);
    let part = format!("mode send={BULK} drain");
    let client = rig.one.connect(Socket::Smc, rig.two.at(PORT), 1, &part);
    let server = server.outcomes();

    let (client, server) = (unanimous(&client, 1), unanimous(&server, 1));
    assert_eq!((client.event("mode "), server.event("mode ")), ("SMCR", "SMCR"));
    assert!(client.event("sent ").starts_with(BULK));
    assert_eq!(client.event("sent "), server.event("received "));
    assert!(client.event("received 0 ").ends_with("then end"), "{client:?}");
    let links = rig.one.tool(&["links"]);
    assert!(links.iter().any(|line| line.starts_with("group client SINGLE")), "{links:#?}");
    rig.assert_quiet_kernels();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/golden/first-contact.txt");
    Dialogue::of(&hosts, &wire.stop()).assert_is(Path::new(golden));
}

/// Short connections share the link group of the first; each must still be one of SMC-R.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn short_connections_over_smc_r() {
    const TIMES: u32 = 50;
    let hosts = Hosts::new("short_connections_over_smc_r");
    let rig = Rig::new(&hosts);
    rig.one.speak_smc(EID);
    rig.two.speak_smc(EID);

    let server = rig.two.accept(Socket::Smc, PORT, TIMES, "mode echo");
    let part = "mode send=10000 shut drain";
    let client = rig.one.connect(Socket::Smc, rig.two.at(PORT), TIMES, part);
    let server = server.outcomes();

    let (client, server) = (unanimous(&client, TIMES), unanimous(&server, TIMES));
    assert_eq!((client.event("mode "), server.event("mode ")), ("SMCR", "SMCR"));
    let echoed = format!("{}, then end", client.event("sent "));
    assert_eq!(client.event("received "), echoed);
    let counts = rig.two.tool(&["counts"]);
    assert!(counts.contains(&format!("server-v2 {TIMES}")), "{counts:#?}");
    rig.assert_quiet_kernels();
}
