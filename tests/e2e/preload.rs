//! Unmodified programs with the preload library: no hop over local TCP.
//!
//! ```text
//!   host a                                                     host b
//!   client ─Unix socket─ gateway A ══ SMC-R ══ gateway B ─Unix socket─ server
//! ```
//!
//! One end may as well be a program that reaches its gateway over TCP, as everywhere else, or there
//! may be no gateway. Whatever carries them, programs must see what they see over TCP.

mod churn;
mod elsewhere;
mod kinds;
mod programs;
mod within;

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::clock::wait_until;
use crate::gateway::{Gateway, SETTLE_LIMIT, Setup, local, program};
use crate::hosts::{Host, Hosts, accept};
use crate::process::{Process, run, wait_for_listener};

const LIMIT: Duration = Duration::from_secs(60);

/// Two hosts, each with a place for the socket of its gateway.
struct Site {
    hosts: Hosts,
    /// Not with the logs: the path of a socket is short.
    doors: TempDir,
}

impl Site {
    fn new(test: &str) -> Self {
        Self { hosts: Hosts::new(test), doors: tempfile::tempdir().expect("/tmp is writable") }
    }

    /// Where the gateway of this host listens for programs.
    fn door(&self, host: &Host) -> PathBuf {
        self.doors.path().join(host.device)
    }

    /// A gateway that serves programs of this host, and has no listener.
    fn gateway(&self, host: &Host) -> Setup {
        let name = format!("gateway-{}", host.device);
        let door = self.door(host);
        Setup::new(&name, host).table(&format!("\n[local]\nsocket = \"{}\"\n", door.display()))
    }

    /// A command with the library preloaded, as an operator runs it.
    fn preloaded(&self, host: &Host, words: &[&str]) -> Command {
        self.preloaded_by(host, Preload::Sockets, words)
    }

    fn preloaded_by(&self, host: &Host, preload: Preload, words: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.args(["exec", "--socket"]).arg(self.door(host));
        match preload {
            Preload::Sockets => {}
            Preload::Rings => drop(command.arg("--rings")),
            Preload::Sleeping => drop(command.args(["--rings", "--spin", "0"])),
            Preload::Spinning => drop(command.args(["--rings", "--spin", "100"])),
        }
        command.arg("--library").arg(library()).arg("--").args(words);
        command
    }

    /// The same command, with the library or without.
    fn command(&self, host: &Host, preload: Option<Preload>, words: &[&str]) -> Command {
        if let Some(preload) = preload {
            return self.preloaded_by(host, preload, words);
        }
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        command
    }

    /// Plays the table with a server at `bind` and a client that connects to `to`; returns what the
    /// client has seen, and what the server.
    fn play(&self, name: &str, server: &Player<'_>, client: &Player<'_>) -> (String, String) {
        let folder = self.hosts.logs.join(name);
        fs::create_dir_all(&folder).expect("the directory is ours");
        let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("e2e/preload/table.py");
        let command = |host, role, player: &Player<'_>| {
            let (ip, port) = (player.at.ip().to_string(), player.at.port().to_string());
            let (table, folder) = (table.to_str(), folder.to_str());
            let (table, folder) = (table.expect("text"), folder.expect("text"));
            let words = ["python3", "-B", table, role, folder, &ip, &port];
            let mut command = self.command(host, player.preload, &words);
            command.env("AS", player.asks_for);
            let is_urgent = |it: &&Player<'_>| it.preload.is_none_or(|it| it == Preload::Sockets);
            let are_urgent = [server, client].iter().all(is_urgent);
            command.env("URGENT", if are_urgent { "1" } else { "" });
            command
        };
        let Hosts { a, b, logs } = &self.hosts;
        let name_of = |role| format!("{name}-{role}");
        let mut command_b = command(b, "server", server);
        let mut process = Process::start(b, logs, &name_of("server"), &mut command_b);
        wait_for_listener(b, server.at);
        let near = if client.is_neighbour { b } else { a };
        let mut command_a = command(near, "client", client);
        let seen = run(&self.hosts, near, &name_of("client"), LIMIT, &mut command_a);
        assert!(process.wait(LIMIT).success(), "{}\n{}", process.log(), seen.stderr);
        let said = fs::read_to_string(logs.join(format!("{}.out", name_of("server"))));
        (seen.expect_success(name), said.expect("it has an output"))
    }
}

/// How the bytes of a program with the library go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Preload {
    Sockets,
    /// By rings, at which threads look before they sleep where they find that worth it.
    Rings,
    /// They never do.
    Sleeping,
    /// They always do.
    Spinning,
}

/// One side of the table.
struct Player<'a> {
    preload: Option<Preload>,
    at: SocketAddr,
    /// What kind of socket it asks for.
    asks_for: &'a str,
    /// The client is on the server's host.
    is_neighbour: bool,
}

impl Player<'_> {
    fn plain(at: impl Into<SocketAddr>) -> Self {
        Player { preload: None, at: at.into(), asks_for: "", is_neighbour: false }
    }

    fn preloaded(at: impl Into<SocketAddr>) -> Self {
        Player { preload: Some(Preload::Sockets), ..Self::plain(at) }
    }

    fn ringed(at: impl Into<SocketAddr>) -> Self {
        Player { preload: Some(Preload::Sleeping), ..Self::plain(at) }
    }

    fn spinning(at: impl Into<SocketAddr>) -> Self {
        Player { preload: Some(Preload::Spinning), ..Self::plain(at) }
    }
}

/// The library under test: beside the gateway.
fn library() -> PathBuf {
    let library = program().with_file_name("libsmcgate_preload.so");
    let path = library.display();
    assert!(library.exists(), "{path} is missing: cargo build -p smcgate-preload");
    library
}

/// Connections that a gateway has carried over SMC-R, and over TCP.
fn carried(gateway: &Gateway<'_>) -> (u64, u64) {
    let totals = gateway.stats().totals;
    (totals.connections_smc, totals.connections_tcp)
}

/// Half-closes, resets, urgent bytes, polling, options, forks: each as over TCP, wherever the
/// library is.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_preload_fidelity() {
    const PORT: u16 = 7010;
    let site = Site::new("smoke_preload_fidelity");
    let Hosts { a, b, .. } = &site.hosts;
    let expected = site.play("tcp", &Player::plain(b.at(PORT)), &Player::plain(b.at(PORT)));
    let scenarios = u64::try_from(expected.0.lines().count()).expect("a few");
    assert!(scenarios > 25 && !expected.0.contains("failed"), "{}", expected.0);
    assert!(!expected.1.contains("failed"), "{}", expected.1);

    let far = site.gateway(b).before(b, 7011).before(b, 7013).before(b, 7015);
    let far = far.start(&site.hosts, b);
    let near = site.gateway(a).towards(b.address, 7021).towards(b.address, 7023);
    let near = near.towards(b.address, 7025).start(&site.hosts, a);
    // Nobody listens on the port behind each of these.
    let both = |asks_for| Player { asks_for, ..Player::preloaded(b.at(7031)) };
    let ways = [
        ("client", Player::plain(local(7011)), Player::preloaded(b.at(7011))),
        ("server", Player::preloaded(b.at(7021)), Player::plain(local(7021))),
        ("both", both("AF_SMC"), both("IPPROTO_SMC")),
    ];
    let ringed = [
        ("rings-client", Player::plain(local(7013)), Player::ringed(b.at(7013))),
        ("rings-server", Player::ringed(b.at(7023)), Player::plain(local(7023))),
        ("rings-both", Player::ringed(b.at(7033)), Player::ringed(b.at(7033))),
    ];
    let spinning = [
        ("spin-client", Player::plain(local(7015)), Player::spinning(b.at(7015))),
        ("spin-server", Player::spinning(b.at(7025)), Player::plain(local(7025))),
        ("spin-both", Player::spinning(b.at(7035)), Player::spinning(b.at(7035))),
    ];
    let play = |(name, server, client), expected: &(String, String)| {
        let seen = site.play(name, &server, &client);
        assert_eq!(seen.0, expected.0, "client; preloaded: {name}");
        assert_eq!(seen.1, expected.1, "server; preloaded: {name}");
    };
    thread::scope(|scope| ways.map(|way| scope.spawn(|| play(way, &expected))).map(drop));
    // By rings, an urgent byte is one like all others.
    let has_none = |line: &&str| !line.contains("\"urgent_");
    let calm = |text: &str| text.lines().filter(has_none).map(|it| format!("{it}\n")).collect();
    let calm: (String, String) = (calm(&expected.0), calm(&expected.1));
    for ways in [ringed, spinning] {
        thread::scope(|scope| ways.map(|way| scope.spawn(|| play(way, &calm))).map(drop));
    }
    for gateway in [&near, &far] {
        // All but the one that nobody accepts.
        let wanted = 3 * (scenarios - 1) + 6 * (scenarios - 3);
        wait_until("all are counted", SETTLE_LIMIT, || carried(gateway).0 >= wanted);
        // Each gateway has a program with rings in two of three ways.
        let by_rings = 4 * (scenarios - 3);
        assert!(gateway.stats().totals.rings >= by_rings, "{:?}", gateway.stats().totals);
    }
    // The same library, and a server without any gateway: every connection is the kernel's own.
    let (smc, _) = carried(&near);
    let seen = site.play("left", &Player::plain(b.at(7041)), &Player::preloaded(b.at(7041)));
    assert_eq!(seen, expected);
    assert_eq!(carried(&near).0, smc);
    near.holdings_at_rest();
    far.holdings_at_rest();
}

/// A gateway that is killed resets the connections that it carried. New ones are TCP at once, and
/// SMC-R when it is back; no program has to be restarted.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_outlives_its_gateway() {
    const PORT: u16 = 7010;
    let site = Site::new("preload_outlives_its_gateway");
    let Hosts { a, b, logs } = &site.hosts;
    let far = site.gateway(b).before(b, PORT).start(&site.hosts, b);
    let near = site.gateway(a).start(&site.hosts, a);
    let behind = b.listen(local(PORT));
    let at = b.at(PORT).to_string();
    let mut command = site.preloaded(a, &["python3", "-Bc", ASK, &at]);
    let talker = Process::start(a, logs, "talker", &mut command);
    let out = logs.join("talker.out");
    let said = |count| {
        let text = || fs::read_to_string(&out).expect("it has an output");
        wait_until("the client says more", LIMIT, || text().lines().count() >= count);
        text()
    };
    let mut stream = accept(&behind, LIMIT);
    stream.write_all(b"1").expect("it is connected");
    assert_eq!(said(1), "heard 1\n");
    assert_eq!(carried(&near), (1, 0));
    near.process.signal(Signal::KILL);
    let error = stream.read(&mut [0]).expect_err("it is reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(said(2).ends_with("ConnectionResetError\n"), "{}", said(2));
    // Nobody is there to ask.
    let mut stream = accept(&behind, LIMIT);
    stream.write_all(b"2").expect("it is connected");
    assert!(said(3).ends_with("heard 2\n"), "{}", said(3));
    assert_eq!(carried(&far), (1, 1));
    drop(near);
    let near = site.gateway(a).start(&site.hosts, a);
    stream.shutdown(std::net::Shutdown::Both).expect("it is connected");
    let mut stream = accept(&behind, LIMIT);
    stream.write_all(b"3").expect("it is connected");
    assert!(said(5).ends_with("end\nheard 3\n"), "{}", said(5));
    assert_eq!(carried(&near), (1, 0));
    drop(talker);
}

/// Connects, says what it hears until the connection is over, and connects again, a moment later:
/// for a second nobody looks for a gateway that was not there.
const ASK: &str = r#"
import socket, sys, time
host, port = sys.argv[1].split(":")
while True:
    s = socket.create_connection((host, int(port)), 20)
    try:
        while data := s.recv(10):
            print("heard", data.decode(), flush=True)
        print("end", flush=True)
        time.sleep(2)
    except OSError as error:
        print(type(error).__name__, flush=True)
    s.close()
"#;

/// The gateway of a server is killed while the server runs. Clients that offer SMC-R are served
/// over TCP, and over SMC-R when it is back; no message of a rendezvous reaches the server.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preloaded_server_outlives_its_gateway() {
    const PORT: u16 = 7010;
    let site = Site::new("preloaded_server_outlives_its_gateway");
    let Hosts { a, b, logs } = &site.hosts;
    let far = site.gateway(b).start(&site.hosts, b);
    let near = site.gateway(a).start(&site.hosts, a);
    let (ip, port) = (b.address.to_string(), PORT.to_string());
    let words = ["python3", "-m", "http.server", "-b", &ip, &port];
    let mut command = site.preloaded(b, &words);
    let server = Process::start(b, logs, "server", command.current_dir(site.doors.path()));
    wait_for_listener(b, b.at(PORT));
    let page = format!("http://{}/", b.at(PORT));
    let curl = ["curl", "--silent", "--show-error", "--fail", "--max-time", "20", &page];
    let ask = |name: &str| {
        run(&site.hosts, a, name, LIMIT, &mut site.preloaded(a, &curl)).expect_success(name);
    };
    ask("before");
    assert_eq!((carried(&near), carried(&far)), ((1, 0), (1, 0)));
    far.process.signal(Signal::KILL);
    drop(far);
    ask("without");
    let far = site.gateway(b).start(&site.hosts, b);
    // The library tells the new gateway of its listener when it accepts, every few seconds.
    wait_until("it is SMC-R again", LIMIT, || {
        ask("after");
        carried(&far).0 > 0
    });
    let said = server.log();
    assert!(said.lines().all(|line| line.contains("\"GET / HTTP/1.1\" 200")), "{said}");
}
