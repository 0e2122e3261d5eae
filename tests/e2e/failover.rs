//! Two paths between two hosts. Applications must not notice when one of them comes or goes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use crate::clock::{now, wait_until};
use crate::failure::assert_echo;
use crate::gateway::{Gateway, Pair, Setup, local};
use crate::hosts::{Host, Hosts, accept, set_limit};
use crate::pattern::{Pattern, receive};

/// Where the large transfer and the interactive connections go.
const PORT: u16 = 7010;
const INTERACTIVE: usize = 200;
/// Threads that serve these connections, on either side.
const HANDS: usize = 4;
const GIB: u64 = 1 << 30;
/// How often a path is taken away.
const FLIPS: usize = 50;
/// Longest pause of anything that goes on.
const STALL_LIMIT: Duration = Duration::from_secs(20);

/// Groups have several links because cables fail: here one cable is pulled and plugged in again,
/// then the other one, again and again, while 4 GiB flow and 200 users type. No connection may be
/// reset, and no byte may be wrong. Prints how long users waited per failover.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn paths_come_and_go_under_load() {
    let hosts = Hosts::with_two_paths("paths_come_and_go_under_load");
    let report = run_failovers(&hosts, FLIPS, 4 * GIB);
    println!("{report}");
}

/// The same, shorter.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_paths_come_and_go() {
    let hosts = Hosts::with_two_paths("smoke_paths_come_and_go");
    println!("{}", run_failovers(&hosts, 4, 256 << 20));
}

/// The network of the RNIC that connections use has failed, and that of another one on the same
/// physical network has not: new connections go over that, in the group that there is, and in one
/// that they found.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_another_rnic_stands_in_for_new_connections() {
    let hosts = Hosts::with_two_paths("smoke_another_rnic_stands_in");
    let listener = hosts.b.listen(local(PORT));
    let setup = |name: &str, host: &Host| {
        let pnet = format!("[[pnet]]\ndevice = \"{}\"\nrnic = \"soft0\"", host.device);
        Setup::on_device(name, host.second(), &pnet).rnic("soft1", host.device)
    };
    for founds in [false, true] {
        let near = setup("gateway-a", &hosts.a).towards(hosts.b.address, PORT);
        let far = setup("gateway-b", &hosts.b).before(&hosts.b, PORT);
        let pair = Pair::start_these(&hosts, near, far);
        let talk = || {
            let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
            let server = accept(&listener, STALL_LIMIT);
            set_limit(&client, STALL_LIMIT);
            set_limit(&server, STALL_LIMIT);
            assert_echo(&client, &server);
        };
        if !founds {
            talk();
            wait_until("both gateways have both links", STALL_LIMIT, || has_links(&pair, 2));
        }
        hosts.a.set_path(1, false);
        wait_until("the gateways have noticed", STALL_LIMIT, || {
            [&pair.a, &pair.b]
                .iter()
                .all(|one| one.stats().rnics.iter().any(|rnic| rnic.state == "down"))
        });
        (0..3).for_each(|_| talk());
        pair.assert_all_smc(3);
        hosts.a.set_path(1, true);
    }
}

/// Runs the load while a path goes and comes back `flips` times. Returns how long users waited.
fn run_failovers(hosts: &Hosts, flips: usize, bytes: u64) -> String {
    let pair = start(hosts);
    let listener = hosts.b.listen(local(PORT));
    let connect = || {
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        set_limit(&client, STALL_LIMIT);
        (client, accept(&listener, STALL_LIMIT))
    };
    let (bulk_client, bulk_server) = connect();
    let people: Vec<_> = (0..INTERACTIVE).map(|_| connect()).collect();
    wait_until("both gateways have both links", STALL_LIMIT, || has_links(&pair, 2));
    // The far application accepts while the rendezvous still goes on, and one that meets a path
    // that is gone may end in TCP. This is about connections that are on a link.
    let all = INTERACTIVE as u64 + 1;
    wait_until("all are relayed", STALL_LIMIT, || {
        let relayed = |gateway: &Gateway<'_>| gateway.stats().totals.connections_smc;
        [&pair.a, &pair.b].into_iter().all(|gateway| relayed(gateway) == all)
    });

    let load = Load::default();
    let pauses = thread::scope(|scope| {
        let sent = scope.spawn(|| load.send(&bulk_client, bytes));
        let received = scope.spawn(|| receive(&mut &bulk_server).expect("no reset"));
        for chunk in people.chunks(INTERACTIVE.div_ceil(HANDS)) {
            scope.spawn(|| load.talk(chunk));
            scope.spawn(|| echo(chunk));
        }
        let pauses =
            (0..flips).map(|flip| cut_and_restore(hosts, &pair, &load, flip % 2)).collect();
        load.over.store(true, Relaxed);
        let (sent, received) = (sent.join().expect("sending"), received.join().expect("received"));
        assert_eq!(sent, received);
        assert!(received.bytes >= bytes);
        pauses
    });
    pair.assert_all_smc(INTERACTIVE as u64 + 1);
    summary(pauses, load.answers.load(Relaxed))
}

fn start(hosts: &Hosts) -> Pair<'_> {
    let second = |setup: Setup, host: &Host| setup.rnic("soft1", host.second());
    Pair::start_these(
        hosts,
        second(Pair::client_side(hosts, &[PORT]), &hosts.a),
        second(Pair::server_side(hosts, &[PORT]), &hosts.b),
    )
}

/// Takes one path away, waits until the gateways have noticed and the load goes on, and gives it
/// back. Returns the longest time that any user waited for an answer.
fn cut_and_restore(hosts: &Hosts, pair: &Pair<'_>, load: &Load, path: usize) -> Duration {
    load.longest_pause_ns.store(0, Relaxed);
    hosts.a.set_path(path, false);
    wait_until("one link is left", STALL_LIMIT, || has_links(pair, 1));
    let answers = load.answers.load(Relaxed);
    wait_until("answers on the other path", STALL_LIMIT, || {
        load.answers.load(Relaxed) > answers + INTERACTIVE as u64 * 2
    });
    hosts.a.set_path(path, true);
    wait_until("both links are back", STALL_LIMIT, || has_links(pair, 2));
    Duration::from_nanos(load.longest_pause_ns.load(Relaxed))
}

/// State that the application threads share.
#[derive(Default)]
struct Load {
    over: AtomicBool,
    answers: AtomicU64,
    longest_pause_ns: AtomicU64,
}

impl Load {
    /// Sends at least `least` bytes, until the failovers are over. Then ends the stream.
    fn send(&self, mut stream: &TcpStream, least: u64) -> crate::pattern::StreamDigest {
        let mut pattern = Pattern::new(7);
        let mut buffer = vec![0; 128 * 1024];
        let mut bytes = 0;
        while bytes < least || !self.over.load(Relaxed) {
            pattern.fill(&mut buffer);
            stream.write_all(&buffer).expect("no reset");
            bytes += buffer.len() as u64;
        }
        stream.shutdown(std::net::Shutdown::Write).expect("no reset");
        pattern.digest()
    }

    /// Asks a question on each connection and compares the answers, until the failovers are over.
    fn talk(&self, connections: &[(TcpStream, TcpStream)]) {
        let mut question = [0; 64];
        let mut pattern = Pattern::new(connections.len() as u64);
        while !self.over.load(Relaxed) {
            pattern.fill(&mut question);
            for (client, _) in connections {
                (&mut &*client).write_all(&question).expect("no reset");
            }
            let asked = now();
            for (client, _) in connections {
                let mut answer = [0; 64];
                (&mut &*client).read_exact(&mut answer).expect("no reset");
                assert_eq!(answer, question);
                self.answers.fetch_add(1, Relaxed);
            }
            let waited = u64::try_from((now() - asked).as_nanos()).expect("short");
            self.longest_pause_ns.fetch_max(waited, Relaxed);
            thread::sleep(Duration::from_millis(5));
        }
        for (client, _) in connections {
            client.shutdown(std::net::Shutdown::Write).expect("no reset");
        }
    }
}

/// Answers one question of each connection in turn, until the first connection ends.
fn echo(connections: &[(TcpStream, TcpStream)]) {
    let mut question = [0; 64];
    loop {
        for (_, server) in connections {
            if (&mut &*server).read_exact(&mut question).is_err() {
                return;
            }
            (&mut &*server).write_all(&question).expect("no reset");
        }
    }
}

/// Whether both gateways have one group with this number of links that carry connections.
fn has_links(pair: &Pair<'_>, count: usize) -> bool {
    [&pair.a, &pair.b].into_iter().all(|gateway| links(gateway) == count)
}

fn links(gateway: &Gateway<'_>) -> usize {
    let [group] = &gateway.stats().link_groups[..] else { return 0 };
    group.links.iter().filter(|link| link.state == "active").count()
}

fn summary(mut pauses: Vec<Duration>, answers: u64) -> String {
    pauses.sort_unstable();
    let at = |share: usize| pauses[(pauses.len() - 1) * share / 100];
    format!(
        "{} failovers, {answers} answers; longest wait per failover: p50 {:?}, p90 {:?}, max {:?}",
        pauses.len(),
        at(50),
        at(90),
        at(100)
    )
}
