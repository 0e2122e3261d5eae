//! Two RNICs per side: a link group with two links, and what happens when one goes.

use std::path::Path;
use std::time::Duration;

use crate::clock::wait_until;
use crate::dialogue::{Dialogue, assert_golden};
use crate::hosts::Hosts;
use crate::place::{Place, Socket};
use crate::rig::Rig;
use crate::testbed::{Pairing, Testbed};

const PORT: u16 = 7010;
/// A kernel answers only when it has given up an RNIC that is gone, so we wait longer than that.
const LIMIT: Duration = Duration::from_secs(90);

/// A kernel that loses an RNIC moves its connections to the other RNIC, and no byte is lost. This
/// is the yardstick for our gateway.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn loss_of_an_rnic_from_linux_to_linux() {
    losses(Pairing::LinuxToLinux);
}

/// Each side loses the RNIC of one link and gets it back, while bytes trickle.
///
/// At full speed Linux stalls here: rxe retransmits for ever to an RNIC that is gone, and SMC waits
/// until this ends. Therefore the sender trickles, and the reader seldom sends a message.
pub(crate) fn losses(pairing: Pairing) {
    const BYTES: u32 = 800_000;
    let hosts = Hosts::new(&format!("losses-{pairing:?}"));
    let rig = Rig::new(&hosts);
    rig.host.plug_second(true);
    let second = |setup: crate::gateway::Setup| setup.rnic("soft1", "wh");
    let testbed = Testbed::open_as(&rig, &hosts, pairing, &[PORT], second);
    for kernel in testbed.kernels() {
        kernel.run(&["ip", "link", "set", "eth1", "up"]);
        kernel.add_rdma("rxe1", "eth1");
    }
    let wire = rig.capture();
    let server = testbed.accept(PORT, 1, &format!("receive={BYTES} shut drain"));
    let client = testbed.start_connect(PORT, 1, &format!("trickle={BYTES} drain"));

    // We watch the state of this kernel; the other side is a kernel or our gateway.
    let kernel = testbed.kernels()[0];
    let other =
        if std::ptr::eq(kernel, testbed.client()) { testbed.server() } else { testbed.client() };
    wait_for_group(kernel, "SYMMETRIC");
    kernel.run(&["rdma", "link", "delete", "rxe0"]);
    wait_for_group(kernel, "ASYMMETRIC-LOCAL");
    kernel.create_rdma("rxe0", "eth0");
    wait_for_group(kernel, "SYMMETRIC");

    other.plug_second(false);
    wait_for_group(kernel, "ASYMMETRIC-PEER");
    other.plug_second(true);
    wait_for_group(kernel, "SYMMETRIC");

    let (client, server) = testbed.outcomes(client, server, 1);
    assert!(client.event("sent ").starts_with(&BYTES.to_string()));
    assert_eq!(client.event("sent "), server.event("received "));
    testbed.assert_all_smc(1);
    testbed.assert_at_rest();
    assert_said(&Dialogue::of(&hosts, &rig.captured(wire)), pairing);
}

/// Asserts that both sides sent the messages that two kernels send.
fn assert_said(dialogue: &Dialogue, pairing: Pairing) {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/golden/two-links.txt");
    if pairing == Pairing::LinuxToLinux {
        assert_golden(Path::new(golden), &dialogue.opening());
    }
    dialogue.assert_opening_is(Path::new(golden));
    match pairing {
        Pairing::LinuxToLinux | Pairing::LinuxToGateway => dialogue.assert_later_said(&[
            // The client loses its RNIC.
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
        ]),
        Pairing::GatewayToLinux => dialogue.assert_later_said(&[
            // The server loses its RNIC, and offers an asymmetric link over the remaining one.
            "server: LLC DELETE LINK v2 [orderly] link 1",
            "client: LLC DELETE LINK v2 [reply orderly] link 1",
            "server: LLC ADD LINK v2 link 3",
            "client: LLC ADD LINK v2 [reply] link 3",
            "client: LLC CONFIRM LINK v2 [reply no-eyecatcher] link 3 max-links 2",
            // It is back.
            "server: LLC ADD LINK v2 link 4",
            "client: LLC ADD LINK v2 [reply] link 4",
            "server: LLC DELETE LINK v2 [orderly] link 3",
            "client: LLC DELETE LINK v2 [reply orderly] link 3",
        ]),
    }
}

/// Waits until the link group of this guest is of this kind and has two links.
fn wait_for_group(guest: &Place<'_>, kind: &str) {
    wait_until(&format!("{kind} in the guest"), LIMIT, || {
        let lines = guest.tool(&["links"]);
        let links = lines.iter().filter(|line| line.starts_with("link "));
        lines.iter().any(|line| line.split(' ').nth(2) == Some(kind)) && links.count() == 2
    });
}

impl Place<'_> {
    /// Gives this machine its second RNIC, or takes it away.
    fn plug_second(&self, plugged: bool) {
        match (self.socket(), plugged) {
            (Socket::Smc, true) => self.create_rdma("rxe1", "eth1"),
            (Socket::Smc, false) => drop(self.run(&["rdma", "link", "delete", "rxe1"])),
            // The kernel removes the routes of a device that goes down.
            (Socket::Tcp, true) => drop(self.run(&["sh", "-ec", SECOND_UP])),
            (Socket::Tcp, false) => drop(self.run(&["ip", "link", "set", "wh", "down"])),
        }
    }
}

const SECOND_UP: &str = "\
    ip link set wh up\n\
    ip route replace 10.9.0.0/24 dev wh table 23\n";
