//! Verified transfers: many bytes on one connection, and few bytes on many connections.

use std::path::Path;
use std::time::Duration;

use crate::dialogue::{Dialogue, side_by_side};
use crate::hosts::Hosts;
use crate::rig::Rig;
use crate::testbed::{Pairing, Testbed};

const PORT: u16 = 7010;

/// Longest silence between first SYN and first data. Guests are slow, but they never wait for a
/// message that does not come: a side that does goes on only after two or three seconds.
const SILENCE_LIMIT: Duration = Duration::from_millis(1_500);

/// If two kernels fail here, the rig is broken, and its verdict on our gateway means nothing.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn bulk_from_linux_to_linux() {
    bulk(Pairing::LinuxToLinux);
}

/// Short connections share the link group of the first one. Each of them must use SMC-R.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn crowd_from_linux_to_linux() {
    crowd(Pairing::LinuxToLinux);
}

/// 64 MiB each way on one connection. The messages around it must be those that two kernels send,
/// and no side may have waited for a message in vain.
pub(crate) fn bulk(pairing: Pairing) {
    const BULK: &str = "67108864";
    let hosts = Hosts::new(&format!("bulk-{pairing:?}"));
    let rig = Rig::new(&hosts);
    let testbed = Testbed::open(&rig, &hosts, pairing, &[PORT]);
    let wire = rig.capture();

    let part = format!("send={BULK} shut drain");
    let (client, server) = testbed.play(PORT, 1, &part, &format!("drain send={BULK}"));

    for (sender, receiver) in [(&client, &server), (&server, &client)] {
        assert!(sender.event("sent ").starts_with(BULK), "{sender:?}");
        assert_eq!(receiver.event("received "), format!("{}, then end", sender.event("sent ")));
    }
    for kernel in testbed.kernels() {
        let links = kernel.tool(&["links"]);
        assert!(links.iter().any(|line| line.contains(" SINGLE ")), "{links:#?}");
    }
    testbed.assert_all_smc(1);
    testbed.assert_at_rest();
    let dialogue = Dialogue::of(&hosts, &rig.captured(wire));
    let golden =
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/interop/golden/first-contact.txt"));
    let kernels = std::fs::read_to_string(golden).expect("a golden transcript");
    println!("Linux to Linux, and {pairing:?}:\n{}", side_by_side(&kernels, &dialogue.to_string()));
    if pairing == Pairing::LinuxToLinux {
        dialogue.assert_is(golden);
    } else {
        // We keep our RMBs for the next connection, so we send no DELETE RKEY.
        dialogue.assert_opening_is(golden);
        dialogue.assert_nothing_else_later(golden);
    }
    let silence = dialogue.longest_silence();
    println!("longest silence of a first contact, {pairing:?}: {silence:?}");
    assert!(silence < SILENCE_LIMIT, "{silence:?}");
}

/// A hundred connections at once, and then a hundred more.
pub(crate) fn crowd(pairing: Pairing) {
    const TIMES: u32 = 100;
    let hosts = Hosts::new(&format!("crowd-{pairing:?}"));
    let rig = Rig::new(&hosts);
    let testbed = Testbed::open(&rig, &hosts, pairing, &[PORT]);
    for round in 1..=2 {
        let (client, server) = testbed.play(PORT, TIMES, "send=10000 shut drain", "echo");
        assert_eq!(client.event("sent "), server.event("echoed "));
        let echoed = format!("{}, then end", client.event("sent "));
        assert_eq!(client.event("received "), echoed);
        testbed.assert_all_smc(round * u64::from(TIMES));
    }
    testbed.assert_at_rest();
}
