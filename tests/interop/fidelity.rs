//! What two applications see of each other's closes, resets, pauses and urgent bytes over SMC-R
//! between kernels. This is the yardstick for our gateway.

use std::fmt::Write as _;
use std::path::Path;

use crate::dialogue::assert_golden;
use crate::hosts::Hosts;
use crate::place::{Outcome, Place, Socket, unanimous};
use crate::rig::Rig;
use crate::testbed::{Pairing, Testbed};

const PORT: u16 = 7010;

/// Name, client's part, server's part.
///
/// Pauses fix the order; they are long because guests are slow. Nothing is sent after the urgent
/// byte, because Linux then waits for the reader, and it depends on chance whether that ever ends.
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

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/golden/fidelity.txt");

/// A gateway that showed applications something else than Linux does would break programs that are
/// used to Linux. Where Linux's SMC-R differs from its own TCP, the golden file has the difference.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn streams_from_linux_to_linux() {
    let hosts = Hosts::new("streams-LinuxToLinux");
    let rig = Rig::new(&hosts);
    let testbed = Testbed::open(&rig, &hosts, Pairing::LinuxToLinux, &[PORT]);

    let mut found = String::new();
    for (name, client, server) in SCENARIOS {
        writeln!(found, "{name}").expect("writing to a string");
        let over_smc = testbed.play(PORT, 1, client, server);
        let over_tcp = play_over_tcp(&rig, client, server);
        for (side, smc, tcp) in
            [("client", &over_smc.0, &over_tcp.0), ("server", &over_smc.1, &over_tcp.1)]
        {
            let (smc, tcp) = (told(smc), told(tcp));
            writeln!(found, "    {side}: {smc}").expect("writing to a string");
            if smc != tcp {
                writeln!(found, "    {side} over TCP: {tcp}").expect("writing to a string");
            }
        }
    }
    testbed.assert_at_rest();
    assert_golden(Path::new(GOLDEN), &found);
}

/// Asserts that an application on a kernel's SMC-R sees through our gateway what it would see
/// through another kernel, and that an application on TCP sees the same, or what TCP would show it.
///
/// Prints whatever is not as between two kernels.
pub(crate) fn ends_as_between_kernels(pairing: Pairing) {
    let hosts = Hosts::new(&format!("streams-{pairing:?}"));
    let rig = Rig::new(&hosts);
    let testbed = Testbed::open(&rig, &hosts, pairing, &[PORT]);
    let golden = std::fs::read_to_string(GOLDEN).expect("a golden table");

    let mut wrong = String::new();
    for (name, client, server) in SCENARIOS {
        let seen = testbed.play(PORT, 1, client, server);
        for (side, place, seen) in
            [("client", testbed.client(), &seen.0), ("server", testbed.server(), &seen.1)]
        {
            let seen = told(seen);
            let between_kernels = written(&golden, name, &format!("{side}: "));
            let over_tcp = written(&golden, name, &format!("{side} over TCP: "));
            if between_kernels == Some(&*seen) {
                continue;
            }
            let line = format!("{name}, {side}: {seen}; between kernels: {between_kernels:?}\n");
            print!("{line}");
            if !is_tcp(place) || over_tcp != Some(&*seen) {
                wrong += &line;
            }
        }
    }
    assert!(wrong.is_empty(), "{pairing:?}:\n{wrong}");
    testbed.assert_all_smc(SCENARIOS.len() as u64);
    testbed.assert_at_rest();
}

fn is_tcp(place: &Place<'_>) -> bool {
    place.socket() == Socket::Tcp
}

/// What the golden file says about one side of a scenario.
fn written<'t>(table: &'t str, scenario: &str, side: &str) -> Option<&'t str> {
    let of_scenario = table.lines().skip_while(|&line| line != scenario).skip(1);
    of_scenario
        .take_while(|line| line.starts_with(' '))
        .find_map(|line| line.trim_start().strip_prefix(side))
}

fn play_over_tcp(rig: &Rig<'_>, client: &str, server: &str) -> (Outcome, Outcome) {
    let at = rig.two.at(PORT);
    let server = rig.two.accept(Socket::Tcp, at, 1, server);
    let client = rig.one.connect(Socket::Tcp, at, 1, client);
    (unanimous(&client, 1).clone(), unanimous(&server.outcomes(), 1).clone())
}

/// What was seen, with each digest cut to the part that tells them apart.
fn told(outcome: &Outcome) -> String {
    let shorter = |event: &String| match event.split_once(", SHA-256 ") {
        Some((bytes, digest)) => format!("{bytes} #{}{}", &digest[..8], &digest[64..]),
        None => event.clone(),
    };
    outcome.events.iter().map(shorter).collect::<Vec<_>>().join("; ")
}

/// An outcome that is looked up in the wrong place would be compared with the wrong one.
#[test]
fn a_table_is_read_scenario_by_scenario() {
    let table = "one\n    client: a\n    server: b\ntwo\n    client: c\n    client over TCP: d\n";
    assert_eq!(written(table, "one", "client: "), Some("a"));
    assert_eq!(written(table, "two", "client: "), Some("c"));
    assert_eq!(written(table, "two", "client over TCP: "), Some("d"));
    assert_eq!(written(table, "one", "client over TCP: "), None);
}
