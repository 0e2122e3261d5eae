//! Two RNICs per guest: a link group with two links, and what happens when one goes.

use std::path::Path;
use std::time::Duration;

use crate::clock::wait_until;
use crate::dialogue::Dialogue;
use crate::hosts::Hosts;
use crate::place::{Place, Socket, unanimous};
use crate::rig::{EID, Rig};

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(30);

/// A kernel that loses an RNIC moves its connections to the other, and no byte is lost; ours must
/// do the same towards it.
///
/// At full speed Linux stalls here: rxe repeats for ever what it sent to an RNIC that has gone, and
/// SMC waits for it to end before it goes on. Hence a trickle, whose reader seldom speaks.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn connections_survive_the_loss_of_an_rnic() {
    const BYTES: u32 = 400_000;
    let hosts = Hosts::new("connections_survive_the_loss_of_an_rnic");
    let rig = Rig::new(&hosts);
    for guest in [&rig.one, &rig.two] {
        guest.speak_smc(EID);
        guest.run(&["ip", "link", "set", "eth1", "up"]);
        guest.add_rdma("rxe1", "eth1");
    }
    let wire = rig.capture();
    let server = rig.two.accept(Socket::Smc, PORT, 1, &format!("receive={BYTES} mode shut drain"));
    let part = format!("trickle={BYTES} mode drain");
    let client = rig.one.start_connect(Socket::Smc, rig.two.at(PORT), 1, &part);

    wait_for_group(&rig.one, "SYMMETRIC");
    rig.one.run(&["rdma", "link", "delete", "rxe0"]);
    wait_for_group(&rig.one, "ASYMMETRIC-LOCAL");
    let (client, server) = (client.outcomes(), server.outcomes());
    let (client, server) = (unanimous(&client, 1), unanimous(&server, 1));
    assert_eq!((client.event("mode "), server.event("mode ")), ("SMCR", "SMCR"));
    assert!(client.event("sent ").starts_with(&BYTES.to_string()));
    assert_eq!(client.event("sent "), server.event("received "));

    rig.one.create_rdma("rxe0", "eth0");
    wait_for_group(&rig.one, "SYMMETRIC");
    rig.assert_quiet_kernels();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/golden/two-links.txt");
    let dialogue = Dialogue::of(&hosts, &wire.stop());
    dialogue.assert_opening_is(Path::new(golden));
    dialogue.assert_later_said(&[
        // The RNIC goes.
        "client: LLC DELETE LINK v2 [orderly] link 1",
        "server: LLC DELETE LINK v2 [orderly] link 1",
        "client: LLC DELETE LINK v2 [reply orderly] link 1",
        "server: LLC ADD LINK v2 link 3",
        "client: LLC ADD LINK v2 [reply] link 3",
        "client: LLC CONFIRM LINK v2 [reply no-eyecatcher] link 3 max-links 2",
        // It is back.
        "client: LLC REQUEST ADD LINK v2",
        "server: LLC ADD LINK v2 link 4",
        "client: LLC ADD LINK v2 [reply] link 4",
        "client: LLC CONFIRM LINK v2 [reply no-eyecatcher] link 4 max-links 2",
        "server: LLC DELETE LINK v2 [orderly] link 3",
        "client: LLC DELETE LINK v2 [reply orderly] link 3",
    ]);
}

/// Waits until the one link group of this guest, as a client, is of this kind.
fn wait_for_group(guest: &Place<'_>, kind: &str) {
    let group = format!("group client {kind} ");
    wait_until(&format!("{group}in the guest"), LIMIT, || {
        guest.tool(&["links"]).iter().any(|line| line.starts_with(&group))
    });
}
