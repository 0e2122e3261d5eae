//! What two applications see of each other's closes, resets, pauses and urgent bytes over the
//! kernels' SMC-R: the yardstick for our gateway between a Linux application and one of TCP.

use std::fmt::Write as _;
use std::path::Path;

use crate::dialogue::assert_golden;
use crate::hosts::Hosts;
use crate::place::{Outcome, Socket, unanimous};
use crate::rig::{EID, Rig};

const PORT: u16 = 7010;

/// Name, client's part, server's part.
///
/// Pauses make the order certain; they are long because guests are slow. Nothing is sent behind the
/// urgent byte: Linux then waits for its reader, and whether that ever ends is a matter of chance.
const SCENARIOS: [(&str, &str, &str); 8] = [
    ("client half-closes", "send=1000 shut drain", "drain send=500"),
    ("server half-closes", "drain send=500", "send=1000 shut drain"),
    ("server speaks first", "receive=500 send=100", "send=500 drain"),
    ("reader sleeps", "send=1000000 shut drain", "pause=1500 drain"),
    ("urgent byte", "send=500 urgent pause=1500", "receive=500 pause=500 take-urgent drain"),
    ("reader closes with data unread", "send=100000 pause=1500 drain", "receive=1000 pause=500"),
    ("writer lingers not", "send=1000 pause=1000 linger-zero", "drain"),
    ("reader lingers not", "send=1000 pause=1500 drain", "receive=500 pause=500 linger-zero"),
];

/// A gateway that shows an application something else than Linux does would break programs that
/// are used to it; where Linux' SMC-R differs from its own TCP, the difference is written down.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn streams_end_as_linux_ends_them() {
    let hosts = Hosts::new("streams_end_as_linux_ends_them");
    let rig = Rig::new(&hosts);
    rig.one.speak_smc(EID);
    rig.two.speak_smc(EID);

    let mut found = String::new();
    for (name, client, server) in SCENARIOS {
        writeln!(found, "{name}").expect("writing to a string");
        let over_smc = play(&rig, Socket::Smc, client, server);
        let over_tcp = play(&rig, Socket::Tcp, client, server);
        for (side, smc, tcp) in
            [("client", &over_smc.0, &over_tcp.0), ("server", &over_smc.1, &over_tcp.1)]
        {
            writeln!(found, "    {side}: {smc}").expect("writing to a string");
            if smc != tcp {
                writeln!(found, "    {side} over TCP: {tcp}").expect("writing to a string");
            }
        }
    }
    rig.assert_quiet_kernels();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/golden/fidelity.txt");
    assert_golden(Path::new(golden), &found);
}

/// Plays one scenario: what client and server saw.
fn play(rig: &Rig<'_>, socket: Socket, client: &str, server: &str) -> (String, String) {
    let server = rig.two.accept(socket, PORT, 1, server);
    let client = rig.one.connect(socket, rig.two.at(PORT), 1, client);
    (told(unanimous(&client, 1)), told(unanimous(&server.outcomes(), 1)))
}

/// What was seen, with no more of each digest than it takes to tell them apart.
fn told(outcome: &Outcome) -> String {
    let shorter = |event: &String| match event.split_once(", SHA-256 ") {
        Some((bytes, digest)) => format!("{bytes} #{}{}", &digest[..8], &digest[64..]),
        None => event.clone(),
    };
    outcome.events.iter().map(shorter).collect::<Vec<_>>().join("; ")
}
