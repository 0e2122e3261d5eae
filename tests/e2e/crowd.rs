//! Thousands of connections, at once and one after another, and what is left of them.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;
use std::{fs, panic, thread};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;

use crate::clock::wait_until;
use crate::gateway::{Gateway, Pair, SETTLE_LIMIT, local};
use crate::hosts::{CONNECT_LIMIT, Hosts, accept, set_limit};
use crate::pattern::Pattern;

const PORT: u16 = 7010;
const CONCURRENT: u64 = 2_000;
/// How many clients, and servers, open short connections at the same time.
const WORKERS: u64 = 32;
/// Short connections of each: 20,000 in all.
const SHORT_EACH: u64 = 625;
/// Long enough to notice bytes of another connection.
const MESSAGE_BYTES: usize = 512;
/// How long one answer may take while all other connections ask, too.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// A gateway that serves a site for a month must not hold more on its last day than on its first.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn crowds_come_and_go() {
    let hosts = Hosts::new("crowds_come_and_go");
    let pair = Pair::start(&hosts, &[PORT]);
    let listener = hosts.b.listen(local(PORT));

    // To serve the first crowd, both gateways allocate memory that they then keep.
    crowd(&hosts, &listener, CONCURRENT, || assert_active(&pair, CONCURRENT));
    queue(&hosts, &listener, SHORT_EACH / 10);
    let before = [&pair.a, &pair.b].map(|gateway| gateway.holdings_at_rest());

    crowd(&hosts, &listener, CONCURRENT, || assert_active(&pair, CONCURRENT));
    queue(&hosts, &listener, SHORT_EACH);
    for (gateway, before) in [&pair.a, &pair.b].into_iter().zip(&before) {
        gateway.holdings_back_to(before);
    }
    pair.assert_all_smc(2 * CONCURRENT + WORKERS * (SHORT_EACH + SHORT_EACH / 10));
}

/// The same with fewer connections: after fifty of them, nothing but their count may be left.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_crowd() {
    let hosts = Hosts::new("smoke_crowd");
    let pair = Pair::start(&hosts, &[PORT]);
    let listener = hosts.b.listen(local(PORT));
    crowd(&hosts, &listener, 50, || assert_active(&pair, 50));
    queue(&hosts, &listener, 2);
    let before = [&pair.a, &pair.b].map(|gateway| gateway.holdings_at_rest());
    crowd(&hosts, &listener, 50, || assert_active(&pair, 50));
    queue(&hosts, &listener, 20);
    for (gateway, before) in [&pair.a, &pair.b].into_iter().zip(&before) {
        gateway.holdings_back_to(before);
    }
    pair.assert_all_smc(2 * 50 + WORKERS * (2 + 20));
}

/// Within a second as many connections begin as a gateway serves at all, which is more than it lets
/// negotiate at once. Each must become SMC-R, because a connection that begins as TCP stays TCP.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn bursts_become_smc_r() {
    for count in [6_000, 9_000] {
        let hosts = Hosts::new("bursts_become_smc_r");
        let pair = Pair::start(&hosts, &[PORT]);
        let listener = hosts.b.listen(local(PORT));
        burst(&hosts, &listener, count, || {
            assert_active(&pair, count);
            // Their elements have less than half the addresses of as many of full size.
            for gateway in [&pair.a, &pair.b] {
                let memory = gateway.stats().memory;
                assert!(memory.rmb_bytes < count * 131_072, "{} bytes", memory.rmb_bytes);
            }
        });
        pair.assert_all_smc(count);
    }
}

/// Opens `count` connections as fast as one thread can, all in use at the same time.
fn burst(hosts: &Hosts, listener: &TcpListener, count: u64, while_all_are_open: impl FnOnce()) {
    let open = || -> Vec<TcpStream> {
        let open_one = |id: u64| {
            let mut client = TcpStream::connect_timeout(&local(PORT).into(), CONNECT_LIMIT)
                .unwrap_or_else(|error| panic!("connection {id}: {error}"));
            client.write_all(&id.to_be_bytes()).expect("the connection is up");
            client
        };
        (0..count).map(open_one).collect()
    };
    let (mut clients, _servers) = thread::scope(|scope| {
        let clients = scope.spawn(|| hosts.a.enter(open));
        let serve = |_| {
            let mut server = accept(listener, ANSWER_LIMIT);
            let mut asked = [0; 8];
            server.read_exact(&mut asked).expect("a number in time");
            server.write_all(&asked).expect("the client waits");
            server
        };
        let servers: Vec<_> = (0..count).map(serve).collect();
        (clients.join().expect("every connection was opened"), servers)
    });
    for (id, client) in (0..count).zip(&mut clients) {
        set_limit(client, ANSWER_LIMIT);
        let mut answer = [0; 8];
        client.read_exact(&mut answer).expect("an answer in time");
        assert_eq!(u64::from_be_bytes(answer), id);
    }
    while_all_are_open();
}

/// Short connections are mostly the work of control threads and applications. A poller that has no
/// core to itself meanwhile does not run before them, and is as before when they are over.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn pollers_with_short_connections_let_others_go_on() {
    let on_two_cores = || {
        let mut two = CpuSet::new();
        let all = sched_getaffinity(None).expect("the kernel's interface is large enough");
        (0..CpuSet::MAX_CPU)
            .filter(|&core| all.is_set(core))
            .take(2)
            .for_each(|core| two.set(core));
        sched_setaffinity(None, &two).expect("some of its own");
        let hosts = Hosts::new("pollers_with_short_connections_let_others_go_on");
        let pair = Pair::start(&hosts, &[PORT]);
        let listener = hosts.b.listen(local(PORT));
        thread::scope(|scope| {
            let load = scope.spawn(|| queue(&hosts, &listener, SHORT_EACH));
            wait_until("both pollers let others go on", SETTLE_LIMIT, || {
                assert!(!load.is_finished(), "neither while short connections came nor by now");
                [&pair.a, &pair.b].iter().all(|gateway| policy(gateway) == SCHED_BATCH)
            });
        });
        wait_until("they are as before", SETTLE_LIMIT, || {
            [&pair.a, &pair.b].iter().all(|gateway| policy(gateway) == SCHED_OTHER)
        });
        for gateway in [&pair.a, &pair.b] {
            let stats: Value = serde_json::from_str(&gateway.get("/stats")).expect("JSON");
            let counters = &stats["pollers"][0]["counters"];
            assert!(counters["gatherings"].as_u64() > Some(0), "{counters}");
            assert_eq!(counters["gathering"], 0);
        }
        pair.assert_all_smc(WORKERS * SHORT_EACH);
    };
    // The cores of a thread are those of what it starts.
    thread::scope(|scope| scope.spawn(on_two_cores).join())
        .unwrap_or_else(|cause| panic::resume_unwind(cause));
}

const SCHED_OTHER: u8 = 0;
const SCHED_BATCH: u8 = 3;

/// How the kernel schedules the gateway's poller: field 41 of its `stat`.
fn policy(gateway: &Gateway<'_>) -> u8 {
    let threads = format!("/proc/{}/task", gateway.process.id());
    let stat = fs::read_dir(threads)
        .expect("it runs")
        .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("stat")).ok())
        .find(|stat| stat.contains("(poller-"))
        .expect("it has a poller");
    let fields = stat.rsplit_once(')').expect("a name in brackets").1;
    let policy = fields.split_whitespace().nth(41 - 3).expect("the kernel is that new");
    policy.parse().expect("a small number")
}

fn assert_active(pair: &Pair<'_>, connections: u64) {
    for gateway in [&pair.a, &pair.b] {
        wait_until("all connections are over SMC-R", SETTLE_LIMIT, || {
            gateway.stats().active.smc == connections
        });
    }
}

/// Opens `count` connections, uses each while all others are open, and closes them all.
fn crowd(hosts: &Hosts, listener: &TcpListener, count: u64, while_all_are_open: impl FnOnce()) {
    let mut clients = Vec::new();
    let mut servers = Vec::new();
    for id in 0..count {
        let mut client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        set_limit(&client, ANSWER_LIMIT);
        client.write_all(&message(id)).expect("the connection is up");
        clients.push(client);
        servers.push(accept(listener, ANSWER_LIMIT));
    }
    // A gateway may connect upstream in another order than it has accepted.
    let mut ids = vec![];
    for server in &mut servers {
        let asked = read(server);
        let id = u64::from_be_bytes(*asked.first_chunk().expect("longer than that"));
        assert_eq!(asked, message(id), "bytes of connection {id}");
        server.write_all(&message(!id)).expect("the connection is up");
        ids.push(id);
    }
    ids.sort_unstable();
    assert!(ids.into_iter().eq(0..count), "each connection arrives once");
    for (id, client) in (0..).zip(&mut clients) {
        assert_eq!(read(client), message(!id), "answer of connection {id}");
    }
    while_all_are_open();
}

/// Opens `each` connections per worker one after another, each for one question and one answer.
fn queue(hosts: &Hosts, listener: &TcpListener, each: u64) {
    thread::scope(|scope| {
        for worker in 0..WORKERS {
            let listener = listener.try_clone().expect("an open socket");
            scope.spawn(move || {
                for _ in 0..each {
                    let mut server = accept(&listener, ANSWER_LIMIT);
                    let asked = read(&mut server);
                    server.write_all(&asked).expect("the client waits");
                }
            });
            scope.spawn(move || {
                hosts.a.enter(|| {
                    for id in worker * each..(worker + 1) * each {
                        ask(id);
                    }
                });
            });
        }
    });
}

/// One short connection, from the namespace of the calling thread.
fn ask(id: u64) {
    let mut client = TcpStream::connect_timeout(&local(PORT).into(), CONNECT_LIMIT)
        .unwrap_or_else(|error| panic!("connection {id}: {error}"));
    set_limit(&client, ANSWER_LIMIT);
    client.write_all(&message(id)).expect("the connection is up");
    assert_eq!(read(&mut client), message(id), "answer of connection {id}");
    let end = client.read(&mut [0]).expect("the server closes first");
    assert_eq!(end, 0, "nothing but the end after the answer");
}

fn read(stream: &mut TcpStream) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    stream.read_exact(&mut bytes).expect("a message in time");
    bytes
}

/// A message that no other connection sends: its number, then bytes that follow from it.
fn message(id: u64) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    Pattern::new(id).fill(&mut bytes);
    bytes[..8].copy_from_slice(&id.to_be_bytes());
    bytes
}
