//! One table of what applications do with byte streams, played over three routes: TCP, a pair of
//! gateways, and one gateway that finds no SMC-R at the far end. All outcomes must be the same.

mod scenarios;
mod tape;
mod urgent;

use std::io::ErrorKind;
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use crate::gateway::{Pair, Setup, local};
use crate::hosts::{Hosts, accept};
use scenarios::{SCENARIOS, Scenario};
use tape::Tape;

/// Rows are played on all of these at once, one after another on each.
const PORTS: [u16; 4] = [7010, 7011, 7012, 7013];
/// What to add for connections that no gateway carries: gateway B listens on the others.
const TCP: u16 = 10;

/// What lies between the client on host a and the server on host b.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Tcp,
    Gateways,
    /// Gateway A alone: the far end is a plain server, so the connection stays TCP.
    Fallback,
}

/// What both applications saw, in the words of [`Tape`].
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    client: Vec<String>,
    server: Vec<String>,
}

/// Applications see the same half-closes, resets, back-pressure and bytes through a pair of
/// gateways as without: nobody has to know that they are there.
// RFC 7609 4.8.1 #25: shutdown for reading sends nothing
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_fidelity_over_smc_r() {
    let hosts = Hosts::new("smoke_fidelity_over_smc_r");
    let pair = Pair::start(&hosts, &PORTS);
    assert_same(&hosts, Route::Gateways);
    // One connection per scenario; the refused one may end before it is counted.
    pair.assert_all_smc(SCENARIOS.len() as u64 - 1);
}

/// If TCP itself leaves an outcome to chance, or if it depends on a time limit of ours, a gateway
/// cannot be blamed for it: such a row does not belong in the table.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_table_is_certain_over_tcp() {
    let hosts = Hosts::new("smoke_table_is_certain_over_tcp");
    assert_same(&hosts, Route::Tcp);
}

/// A gateway whose peers have no SMC-R must do no harm either.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn fidelity_over_fallback() {
    let hosts = Hosts::new("fidelity_over_fallback");
    let a = Setup::new("gateway-a", &hosts.a);
    let a = PORTS.iter().fold(a, |a, &port| a.towards(hosts.b.address, port));
    let a = a.start(&hosts, &hosts.a);
    assert_same(&hosts, Route::Fallback);
    let totals = a.stats().totals;
    assert_eq!(totals.connections_smc, 0);
    assert!(totals.connections_tcp >= SCENARIOS.len() as u64 - 1, "{totals:?}");
}

/// Plays the whole table over TCP and over `route`, and shows all differences at once.
fn assert_same(hosts: &Hosts, route: Route) {
    let rows = Mutex::new(SCENARIOS.iter());
    let next = || rows.lock().expect("nobody panics with it").next();
    let different = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for port in PORTS {
            let (next, different) = (&next, &different);
            scope.spawn(move || {
                while let Some(scenario) = next() {
                    if let Some(difference) = difference(hosts, route, port, scenario) {
                        // At once: a row that panics would hide it.
                        eprintln!("{difference}");
                        different.lock().expect("nobody panics with it").push(scenario.name);
                    }
                }
            });
        }
    });
    let different = different.into_inner().expect("nobody panics with it");
    assert!(different.is_empty(), "other outcomes than over TCP: {different:?}");
}

/// Plays one scenario over TCP and over `route`. Returns what to say if outcomes differ.
fn difference(hosts: &Hosts, route: Route, port: u16, scenario: &Scenario) -> Option<String> {
    let expected = play(hosts, Route::Tcp, port, scenario);
    let silent = expected.client.iter().chain(&expected.server).any(|event| is_silence(event));
    assert!(!silent, "{} waits in vain over TCP: {expected:#?}", scenario.name);
    let found = play(hosts, route, port, scenario);
    let name = scenario.name;
    (expected != found).then(|| format!("{name}: {expected:#?}\nbut {route:?} {found:#?}"))
}

/// Plays one scenario, each side in a thread of its own.
fn play(hosts: &Hosts, route: Route, port: u16, scenario: &Scenario) -> Outcome {
    let (bind, target) = match route {
        Route::Tcp => (hosts.b.at(port + TCP), hosts.b.at(port + TCP)),
        Route::Gateways => (local(port), local(port)),
        Route::Fallback => (hosts.b.at(port), local(port)),
    };
    let listener = scenario.server.map(|_| hosts.b.listen(bind));
    let (to_server, from_client) = mpsc::channel();
    let (to_client, from_server) = mpsc::channel();
    thread::scope(|scope| {
        let server = scope.spawn(move || {
            let (Some(listener), Some(part)) = (listener, scenario.server) else {
                return Vec::new();
            };
            let stream = accept(&listener, SILENCE_LIMIT);
            let mut tape = Tape::new(Ok(stream), to_client, from_client);
            part(&mut tape);
            tape.into_events()
        });
        let client = scope.spawn(move || {
            let mut tape = Tape::new(hosts.a.connect(target), to_server, from_server);
            (scenario.client)(&mut tape);
            tape.into_events()
        });
        let client = client.join().unwrap_or_else(|_| panic!("client of {}", scenario.name));
        let server = server.join().unwrap_or_else(|_| panic!("server of {}", scenario.name));
        Outcome { client, server }
    })
}

/// Whether a side gave up waiting.
fn is_silence(event: &str) -> bool {
    event.ends_with(&format!("failed: {}", ErrorKind::WouldBlock))
}

/// Longest silence in a scenario: what has not arrived by then will not arrive.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);
