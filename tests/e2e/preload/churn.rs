//! Connections of preloaded programs that come and go by the thousand, and what is left of them.

use std::path::Path;
use std::process::Command;

use super::{LIMIT, Preload, Site, carried};
use crate::clock::wait_until;
use crate::gateway::SETTLE_LIMIT;
use crate::hosts::{Host, Hosts};
use crate::process::{Process, run, wait_for_listener};

/// A server and its clients.
struct Crowd {
    /// How its server serves, and what its clients do; see `churn.py`.
    what: &'static str,
    port: u16,
    /// How many connections its clients make, or how many children.
    count: u32,
}

const CROWDS: [Crowd; 3] = [
    Crowd { what: "threads", port: 7010, count: 2002 },
    Crowd { what: "forks", port: 7011, count: 300 },
    Crowd { what: "crowd", port: 7012, count: 5000 },
];

/// The servers of all crowds, which live as long as this.
pub(super) struct Servers<'s> {
    site: &'s Site,
    preload: Option<Preload>,
    processes: Vec<Process>,
    /// The clients are on the host of the servers.
    pub(super) are_neighbours: bool,
}

impl<'s> Servers<'s> {
    pub(super) fn start(site: &'s Site, preload: Option<Preload>) -> Self {
        let Hosts { b, logs, .. } = &site.hosts;
        let start = |crowd: &Crowd| {
            let name = format!("{}-{preload:?}", crowd.what);
            let mut command = churn(site, b, preload, crowd.port, &[crowd.what], &[]);
            let process = Process::start(b, logs, &name, &mut command);
            wait_for_listener(b, b.at(crowd.port));
            process
        };
        let processes = CROWDS.iter().map(start).collect();
        Self { site, preload, processes, are_neighbours: false }
    }

    /// Lets the clients of all crowds come and go, one crowd after another. Returns what both sides
    /// have seen, and how many connections that was.
    pub(super) fn round(&self, number: u32) -> (Vec<String>, u64) {
        let Self { site, preload, .. } = *self;
        let (mut seen, mut connections) = (Vec::new(), 0);
        for Crowd { what, port, count } in CROWDS {
            let name = format!("client-{what}-{preload:?}-{number}");
            // One gateway has both ends of each, and six descriptors for them.
            let count = if self.are_neighbours { count.min(2500) } else { count };
            let count = count.to_string();
            let Hosts { a, b, .. } = &site.hosts;
            let a = if self.are_neighbours { b } else { a };
            let mut command = churn(site, a, preload, port, &["client"], &[what, &count]);
            let said = run(&site.hosts, a, &name, LIMIT, &mut command).expect_success(&name);
            let (saw, made) = said.trim().split_once('\n').expect("two lines");
            connections += made.parse::<u64>().expect("a number");
            seen.push(saw.to_owned());
        }
        (seen, connections)
    }

    /// How many descriptors each server has.
    pub(super) fn descriptors(&self) -> Vec<usize> {
        self.processes.iter().map(Process::descriptors).collect()
    }
}

/// Whatever connections end by, in threads, children and thousands at once, and whoever is killed:
/// programs see what they see over TCP, all of it is SMC-R, and nothing of it is left.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_churn_leaves_nothing() {
    come_and_go("preload_churn_leaves_nothing", Preload::Sockets);
}

/// The same by shared memory, of which nothing is left either.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_churn_by_rings_leaves_nothing() {
    come_and_go("preload_churn_by_rings_leaves_nothing", Preload::Rings);
}

fn come_and_go(test: &str, preload: Preload) {
    let site = Site::new(test);
    let Hosts { a, b, .. } = &site.hosts;
    let (expected, _) = Servers::start(&site, None).round(0);
    let far = site.gateway(b).start(&site.hosts, b);
    let near = site.gateway(a).start(&site.hosts, a);
    let servers = Servers::start(&site, Some(preload));
    let idle = servers.descriptors();
    let mut connections = 0;
    let mut round = |number| {
        let (seen, made) = servers.round(number);
        assert_eq!(seen, expected, "round {number}");
        connections += made;
        for gateway in [&near, &far] {
            let what = format!("{connections} connections over SMC-R");
            wait_until(&what, SETTLE_LIMIT, || carried(gateway).0 >= connections);
            assert_eq!(carried(gateway), (connections, 0), "{:?}", gateway.stats().fallbacks);
            let by_rings = if preload == Preload::Sockets { 0 } else { connections };
            assert_eq!(gateway.stats().totals.rings, by_rings);
        }
        wait_until("the servers have closed all", SETTLE_LIMIT, || servers.descriptors() == idle);
    };
    // To serve the first crowds, both gateways allocate memory that they then keep: some in the
    // first round, and some in the second, because its connections get other elements.
    round(1);
    round(2);
    let before = [&near, &far].map(|gateway| gateway.holdings_at_rest());
    round(3);
    for (gateway, before) in [&near, &far].into_iter().zip(&before) {
        wait_until("the memory of programs is given back", SETTLE_LIMIT, || {
            let kinds = gateway.process.descriptors_by_kind();
            !kinds.keys().any(|kind| kind.contains("memfd"))
        });
        let after = gateway.holdings_back_to(before);
        // Less than a kilobyte for each connection of a round.
        let bound = before.resident_kib + connections / 3;
        assert!(after.resident_kib <= bound, "{after:?} after {before:?}");
    }
}

/// `stress-ng` opens sockets to itself, sends by every call and with every option, and closes them.
/// On loopback a gateway can only be in the way, unless it has shared memory to offer.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_sockets_under_stress() {
    let site = Site::new("preload_sockets_under_stress");
    let a = &site.hosts.a;
    let stress = |name: &str, preload| {
        let words = ["stress-ng", "--sock", "2", "--timeout", "2s", "--verify", "--metrics-brief"];
        let mut command = site.command(a, preload, &words);
        let ran = run(&site.hosts, a, name, LIMIT, &mut command);
        let said = format!("{}{}", ran.stdout, ran.stderr);
        let is_bad = said.contains("fail:") || said.contains("error:");
        assert!(!is_bad && said.contains("successful run completed"), "{name}: {said}");
        ran.status.code()
    };
    let expected = stress("plain", None);
    let near = site.gateway(a).start(&site.hosts, a);
    let before = near.holdings_at_rest();
    assert_eq!(stress("left-alone", Some(Preload::Sockets)), expected);
    near.holdings_back_to(&before);
    assert_eq!(carried(&near), (0, 0), "{:?}", near.stats().fallbacks);
    drop(near);
    let memory = site.doors.path().to_str().expect("text");
    let near = site.gateway(a).rnic_of_kind(("memory", "shm"), memory).start(&site.hosts, a);
    assert_eq!(stress("first", Some(Preload::Sockets)), expected);
    let before = near.holdings_at_rest();
    assert_eq!(stress("second", Some(Preload::Sockets)), expected);
    assert_eq!(stress("rings", Some(Preload::Rings)), expected);
    near.holdings_back_to(&before);
    let (smc, tcp) = carried(&near);
    assert!(smc > 200 && tcp == 0, "{smc} SMC-R, {tcp} TCP: {:?}", near.stats().fallbacks);
}

/// `churn.py` at this port.
fn churn(
    site: &Site,
    host: &Host,
    preload: Option<Preload>,
    port: u16,
    role: &[&str],
    more: &[&str],
) -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("e2e/preload/churn.py");
    let script = script.to_str().expect("our own paths are text");
    let (ip, port) = (site.hosts.b.address.to_string(), port.to_string());
    site.command(host, preload, &[&["python3", "-B", script], role, &[&ip, &port], more].concat())
}
