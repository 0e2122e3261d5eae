//! Where SMC-R cannot be: the application works over TCP, and both sides say why.

use crate::clock::wait_until;
use crate::gateway::{Gateway, SETTLE_LIMIT, Setup};
use crate::hosts::Hosts;
use crate::place::{Socket, unanimous};
use crate::rig::{EID, Rig};

/// The gateway's, at which a guest's client arrives, and that of the server behind it.
const PORT: u16 = 7010;
const BEHIND: u16 = 7011;

/// A gateway that speaks SMC-Rv1 alone and a kernel that, over rxe, speaks v2 alone.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn linux_client_without_a_common_version() {
    let hosts = Hosts::new("linux_client_without_a_common_version");
    let rig = Rig::new(&hosts);
    rig.one.speak_smc(EID);
    let gateway = before_server(&hosts);

    let seen = echo_through(&rig);
    println!("guest: {seen}; gateway: {:?}", gateway.stats().fallbacks);
}

fn before_server(hosts: &Hosts) -> Gateway<'_> {
    let host = &hosts.a;
    Setup::new("gateway", host)
        .listener((host.at(PORT), "smc"), (host.at(BEHIND), "tcp"))
        .start(hosts, host)
}

/// A guest's client through the gateway to a TCP server: the mode that the guest's kernel shows.
fn echo_through(rig: &Rig<'_>) -> String {
    let server = rig.host.accept(Socket::Tcp, BEHIND, 1, "echo");
    let part = "mode send=300000 shut drain";
    let client = rig.one.connect(Socket::Smc, rig.host.at(PORT), 1, part);
    let client = unanimous(&client, 1);
    let echoed = format!("{}, then end", client.event("sent "));
    assert_eq!(client.event("received "), echoed);
    unanimous(&server.outcomes(), 1).event("echoed ");
    client.event("mode ").to_owned()
}
