//! Programs of one host, with one gateway: by rings they pass their bytes without it.

use std::fs;
use std::thread;

use rustix::process::Signal;

use super::churn::Servers;
use super::programs::{PROGRAMS, prepare, script};
use super::{LIMIT, Player, Preload, Site, carried};
use crate::clock::wait_until;
use crate::gateway::{SETTLE_LIMIT, Setup, local};
use crate::hosts::Hosts;
use crate::process::{Process, run, wait_for_listener};

impl Site {
    /// A gateway whose programs leave it out as soon as they may.
    fn gateway_to_leave_out(&self) -> Setup {
        self.gateway(&self.hosts.b).table("shortcuts = \"always\"\nshortcut_after = 0\n")
    }
}

/// Half-closes, resets, polling, options, forks: each as over TCP, although the two programs pass
/// their bytes by themselves.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_preload_fidelity_within_a_host() {
    let site = Site::new("smoke_preload_fidelity_within_a_host");
    let b = &site.hosts.b;
    let neighbours = |preload, port| {
        let player = |is_neighbour| Player { preload, is_neighbour, ..Player::plain(b.at(port)) };
        (player(false), player(true))
    };
    let (server, client) = neighbours(None, 7010);
    let expected = site.play("tcp", &server, &client);
    assert!(!expected.0.contains("failed"), "{}", expected.0);
    let has_none = |line: &&str| !line.contains("\"urgent_");
    let calm = |text: &str| text.lines().filter(has_none).map(|it| format!("{it}\n")).collect();
    let calm: (String, String) = (calm(&expected.0), calm(&expected.1));
    let scenarios = u64::try_from(calm.0.lines().count()).expect("a few");
    let gateway = site.gateway_to_leave_out().start(&site.hosts, b);
    let kinds = [
        ("sleeping", Preload::Sleeping, 7011),
        ("rings", Preload::Rings, 7013),
        ("spinning", Preload::Spinning, 7015),
    ];
    let play = |(name, preload, port)| {
        let (server, client) = neighbours(Some(preload), port);
        let seen = site.play(name, &server, &client);
        assert_eq!(seen.0, calm.0, "client: {name}");
        assert_eq!(seen.1, calm.1, "server: {name}");
    };
    thread::scope(|scope| kinds.map(|kind| scope.spawn(move || play(kind))).map(drop));
    wait_until("all are counted", SETTLE_LIMIT, || carried(&gateway).0 >= 6 * (scenarios - 1));
    gateway.holdings_at_rest();
    let (totals, active) = (gateway.stats().totals, gateway.stats().active);
    assert!(totals.shortcuts > scenarios, "{totals:?}");
    assert_eq!((active.rings, active.shortcuts), (0, 0));
    let listeners = gateway.stats().listeners;
    let door = site.door(b).display().to_string();
    let rows: Vec<_> = listeners.iter().map(|it| (&*it.name, &*it.bind)).collect();
    assert_eq!(rows, [("local-connect", &*door), ("local-accept", &*door)]);
}

/// Programs that everybody has say the same as over TCP.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_programs_within_a_host() {
    let site = Site::new("preload_programs_within_a_host");
    let Hosts { b, logs, .. } = &site.hosts;
    prepare(&site);
    let gateway = site.gateway_to_leave_out().start(&site.hosts, b);
    for program in PROGRAMS.iter().filter(|program| program.name != "ssh") {
        let start = |preload: Option<Preload>| {
            let at = if preload.is_some() { b.at(program.port) } else { local(program.port) };
            let name = format!("{}-{preload:?}", program.name);
            let preload = preload.map(|preload| (b, preload));
            let mut command = script(&site, program.server, preload, at, &name);
            let process = Process::start(b, logs, &name, &mut command);
            wait_for_listener(b, at);
            process
        };
        let servers = [start(None), start(Some(Preload::Rings))];
        let ask = |preload: Option<Preload>, at| {
            let name = format!("{}-client-{preload:?}", program.name);
            let preload = preload.map(|preload| (b, preload));
            let mut command = script(&site, program.client, preload, at, &name);
            run(&site.hosts, b, &name, LIMIT, &mut command).expect_success(&name)
        };
        let expected = ask(None, local(program.port));
        let before = gateway.stats().totals;
        assert_eq!(ask(Some(Preload::Rings), b.at(program.port)), expected, "{}", program.name);
        // Both ends of each are connections of this gateway.
        let wanted = before.connections_smc + 2 * program.connections;
        wait_until(program.name, SETTLE_LIMIT, || carried(&gateway).0 >= wanted);
        let after = gateway.stats().totals;
        assert!(after.shortcuts > before.shortcuts, "{}: {after:?}", program.name);
        assert_eq!(after.connections_tcp, before.connections_tcp, "{}", program.name);
        drop(servers);
    }
    gateway.holdings_at_rest();
}

/// Whatever connections end by, in threads, children and thousands at once, and whoever is killed:
/// nothing is left.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_churn_within_a_host_leaves_nothing() {
    let site = Site::new("preload_churn_within_a_host_leaves_nothing");
    let b = &site.hosts.b;
    let servers = |preload| {
        let mut servers = Servers::start(&site, preload);
        servers.are_neighbours = true;
        servers
    };
    let (expected, _) = servers(None).round(0);
    let gateway = site.gateway_to_leave_out().start(&site.hosts, b);
    let servers = servers(Some(Preload::Rings));
    let idle = servers.descriptors();
    let mut connections = 0;
    let mut round = |number| {
        let (seen, made) = servers.round(number);
        assert_eq!(seen, expected, "round {number}");
        connections += 2 * made;
        let what = format!("{connections} connections over SMC-R");
        wait_until(&what, SETTLE_LIMIT, || carried(&gateway).0 >= connections);
        assert_eq!(carried(&gateway), (connections, 0), "{:?}", gateway.stats().fallbacks);
        wait_until("the servers have closed all", SETTLE_LIMIT, || servers.descriptors() == idle);
    };
    round(1);
    round(2);
    let before = gateway.holdings_at_rest();
    round(3);
    let after = gateway.holdings_back_to(&before);
    let bound = before.resident_kib + connections / 3;
    assert!(after.resident_kib <= bound, "{after:?} after {before:?}");
    assert!(gateway.stats().totals.shortcuts > 1000, "{:?}", gateway.stats().totals);
}

/// What a client sees whose server sends and is then killed, and what one sees whose gateway is.
/// The operator finds all bytes counted.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn whoever_is_killed_is_missed_within_a_host() {
    const PORT: u16 = 7010;
    const BYTES: u64 = 64 << 20;
    let site = Site::new("whoever_is_killed_is_missed_within_a_host");
    let Hosts { b, logs, .. } = &site.hosts;
    let gateway = site.gateway_to_leave_out().start(&site.hosts, b);
    let at = b.at(PORT).to_string();
    let words = ["python3", "-Bc", SERVER, &at];
    let start = || {
        let mut command = site.preloaded_by(b, Preload::Rings, &words);
        let server = Process::start(b, logs, "server", &mut command);
        wait_for_listener(b, b.at(PORT));
        server
    };
    let server = start();
    let before = gateway.stats().totals;
    let mut client = site.preloaded_by(b, Preload::Rings, &["python3", "-Bc", CLIENT, &at]);
    let mut talk = |name: &str, kill: &dyn Fn()| {
        let mut process = Process::start(b, logs, name, &mut client);
        let out = logs.join(format!("{name}.out"));
        let said = || fs::read_to_string(&out).expect("it has an output");
        wait_until("all has come", LIMIT, || said().contains("all has come"));
        kill();
        assert!(process.wait(LIMIT).success(), "{}", process.log());
        said()
    };
    let said = talk("of-server", &|| server.signal(Signal::KILL));
    // The client has sent what nobody has read.
    assert_eq!(said, "all has come\nConnectionResetError\n");
    wait_until("all bytes are counted", SETTLE_LIMIT, || {
        let totals = gateway.stats().totals;
        // They came from the server, and went to the client.
        totals.bytes_in >= before.bytes_in + BYTES && totals.bytes_out >= before.bytes_out + BYTES
    });
    gateway.holdings_at_rest();
    drop(server);
    let _server = start();
    let said = talk("of-gateway", &|| gateway.process.signal(Signal::KILL));
    assert_eq!(said, "all has come\nConnectionResetError\n");
}

/// Sends, reads a little, and waits.
const SERVER: &str = r#"
import socket, sys, time
host, port = sys.argv[1].split(":")
listener = socket.create_server((host, int(port)))
while True:
    s = listener.accept()[0]
    for _ in range(1 << 10):
        s.sendall(bytes(1 << 16))
    s.recv(1)
    time.sleep(60)
"#;

/// Reads it all, sends more than fits anywhere, and sees how it ends.
const CLIENT: &str = r#"
import socket, sys
host, port = sys.argv[1].split(":")
s = socket.create_connection((host, int(port)), 60)
left = 1 << 26
while left:
    left -= len(s.recv(min(left, 1 << 16)))
print("all has come", flush=True)
try:
    while True:
        s.sendall(bytes(1 << 16))
except OSError as error:
    print(type(error).__name__, flush=True)
"#;
