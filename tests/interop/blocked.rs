//! A network that carries TCP and no RoCE, with a kernel at the other end.
//!
//! After its fallback, a kernel hands whatever comes on TCP to its application, even our Decline. A
//! kernel that goes on with SMC-R no longer reads TCP. So we must decline in time.

use std::time::Duration;

use crate::clock::now;
use crate::fallback::echoed;
use crate::gateway::{Setup, local};
use crate::hosts::Hosts;
use crate::place::{Place, Socket};
use crate::rig::{EID, Rig};
use crate::testbed::Pairing;

const PORT: u16 = 7010;
const CLIENT: &str = "mode send=30000 shut drain";
const SERVER: &str = "mode echo";
/// Connections of each row, one after another. The first finds out that RoCE is blocked.
const CONNECTIONS: usize = 4;
/// How long the first connection may take: a kernel that waits for a message on the link does not
/// look at TCP for up to four seconds, and emulation is slow.
const FIRST_LIMIT: Duration = Duration::from_secs(12);

/// Which direction of RoCE the firewall drops, as seen from our gateway.
#[derive(Clone, Copy, Debug)]
enum Blocked {
    Both,
    Inwards,
    Outwards,
}

/// Plays all rows of one pairing: every byte must arrive, and no other.
pub(crate) fn stays_tcp(pairing: Pairing) {
    let hosts = Hosts::new(&format!("blocked-{pairing:?}"));
    for blocked in [Blocked::Both, Blocked::Inwards, Blocked::Outwards] {
        let rig = Rig::new(&hosts);
        let kernel = if pairing == Pairing::LinuxToGateway { &rig.one } else { &rig.two };
        kernel.speak_smc(EID);
        let deaf = match blocked {
            Blocked::Both => vec![kernel, &rig.host],
            Blocked::Inwards => vec![&rig.host],
            Blocked::Outwards => vec![kernel],
        };
        deaf.iter().for_each(|place| block(place));
        let took = converse(&rig, &hosts, pairing);
        println!("{pairing:?}, {blocked:?}: {took:?}");
        assert!(took.iter().all(|took| *took < FIRST_LIMIT), "{pairing:?}, {blocked:?}: {took:?}");
        for place in deaf {
            place.run(&["nft", "delete", "table", "inet", "cut"]);
        }
    }
}

/// How long each connection took, from the start of its client to its end.
fn converse(rig: &Rig<'_>, hosts: &Hosts, pairing: Pairing) -> Vec<Duration> {
    let host = &hosts.a;
    let setup = Setup::new("gateway", host).smc(&format!("eids = [\"{EID}\"]"));
    let gateway = match pairing {
        Pairing::LinuxToGateway | Pairing::LinuxToLinux => setup.before(host, PORT),
        Pairing::GatewayToLinux => setup.towards(*rig.two.at(PORT).ip(), PORT),
    };
    let _gateway = gateway.start(hosts, host);
    let one = |_| {
        let began = now();
        let (client, server) = match pairing {
            Pairing::LinuxToGateway | Pairing::LinuxToLinux => {
                let server = rig.host.accept(Socket::Tcp, local(PORT), 1, "echo");
                let client = rig.one.connect(Socket::Smc, host.at(PORT), 1, CLIENT);
                (client, server.outcomes())
            }
            Pairing::GatewayToLinux => {
                let server = rig.two.accept(Socket::Smc, rig.two.at(PORT), 1, SERVER);
                let client = rig.host.connect(Socket::Tcp, local(PORT), 1, "send=30000 shut drain");
                (client, server.outcomes())
            }
        };
        let modes = echoed(&client, &server);
        assert!(modes.iter().all(|mode| mode.starts_with("TCP")), "{modes:?}");
        now() - began
    };
    (0..CONNECTIONS).map(one).collect()
}

/// Makes a machine drop incoming RoCE packets.
fn block(place: &Place<'_>) {
    place.run(&["nft", "add table inet cut"]);
    place.run(&["nft", "add chain inet cut in { type filter hook input priority 0; }"]);
    place.run(&["nft", "add rule inet cut in udp dport 4791 drop"]);
}
