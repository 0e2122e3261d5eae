//! Programs with the preload library on our host, whose peers are programs on a Linux kernel.

use crate::clock::wait_until;
use crate::gateway::{SETTLE_LIMIT, Setup};
use crate::hosts::Hosts;
use crate::place::{Application, Place, Socket, unanimous};
use crate::rig::{EID, Rig};

const PORT: u16 = 7010;
const CONNECTIONS: u32 = 5;

/// A client that knows only TCP, and a client and a server written for a kernel that has SMC-R.
/// With the library each is the peer of a kernel, and every byte goes by SMC-R.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn preloaded_programs_and_linux() {
    let hosts = Hosts::new("preloaded");
    let rig = Rig::new(&hosts);
    let doors = tempfile::tempdir().expect("/tmp is writable");
    let door = doors.path().join("door");
    let door = door.to_str().expect("text");
    let gateway = Setup::new("gateway", &hosts.a)
        .smc(&format!("eids = [\"{EID}\"]"))
        .table(&format!("\n[local]\nsocket = \"{door}\"\n"))
        .start(&hosts, &hosts.a);
    for guest in [&rig.one, &rig.two] {
        guest.speak_smc(EID);
    }
    let here = Place::preloaded(&hosts, door);
    for socket in [Socket::Tcp, Socket::Smc] {
        let at = rig.two.at(PORT);
        let server = rig.two.accept(Socket::Smc, at, CONNECTIONS, "mode drain send=1000000");
        let client = here.start_connect(socket, at, CONNECTIONS, "send=1000000 shut drain");
        carried(client, server);
    }
    assert_eq!(rig.two.counted("server-v2"), [2 * u64::from(CONNECTIONS), 0]);

    let at = rig.host.at(PORT);
    let server = here.accept(Socket::Smc, at, CONNECTIONS, "drain send=1000000");
    let part = "mode send=1000000 shut drain";
    carried(rig.one.start_connect(Socket::Smc, at, CONNECTIONS, part), server);
    assert_eq!(rig.one.counted("client-v2"), [u64::from(CONNECTIONS), 0]);

    let wanted = 3 * u64::from(CONNECTIONS);
    let counted = || gateway.stats().totals;
    wait_until("all are counted", SETTLE_LIMIT, || counted().connections_smc == wanted);
    assert_eq!(counted().connections_tcp, 0, "{:?}", gateway.stats().fallbacks);
    rig.assert_quiet_kernels();
    gateway.holdings_at_rest();
}

/// Waits until both ends have had all their connections, and compares what they saw.
fn carried(client: Application, server: Application) {
    let (client, server) = (client.outcomes(), server.outcomes());
    let (client, server) = (unanimous(&client, CONNECTIONS), unanimous(&server, CONNECTIONS));
    for (sender, receiver) in [(client, server), (server, client)] {
        assert_eq!(receiver.event("received "), format!("{}, then end", sender.event("sent ")));
    }
    let modes = [client, server].map(|end| end.events.iter().find(|it| it.starts_with("mode ")));
    assert!(modes.contains(&Some(&"mode SMCR".to_owned())), "{modes:?}");
}
