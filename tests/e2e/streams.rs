//! Short connections between two gateways, of which most have no rendezvous of their own.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::clock::wait_until;
use crate::failure::is_refusal;
use crate::gateway::{Pair, SETTLE_LIMIT, local, smcgate};
use crate::hosts::{Host, Hosts, accept, set_limit};
use crate::pattern::{StreamDigest, receive, send};

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(15);

/// Asks a server for something and hears the answer, each with bytes of its own.
fn converse(host: &Host, id: u64, len: u64) {
    let mut client = host.connect(local(PORT)).expect("the gateway listens");
    set_limit(&client, LIMIT);
    client.write_all(&id.to_be_bytes()).expect("the connection is up");
    send(&mut client, 2 * id, len).expect("the connection is up");
    client.shutdown(Shutdown::Write).expect("the connection is up");
    let mut heard = [0; 8];
    client.read_exact(&mut heard).expect("an answer");
    assert_eq!(u64::from_be_bytes(heard), id, "it is the answer to another question");
    assert_eq!(receive(&mut client).expect("the rest of it"), expected(2 * id + 1, len));
}

/// Answers one question.
fn answer(mut server: TcpStream) {
    set_limit(&server, LIMIT);
    let mut asked = [0; 8];
    // Some only look whether somebody is there.
    if server.read_exact(&mut asked).is_err() {
        return;
    }
    let id = u64::from_be_bytes(asked);
    let heard = receive(&mut server).expect("the rest of it");
    assert_eq!(heard, expected(2 * id, heard.bytes), "bytes of another connection");
    server.write_all(&asked).expect("the client waits");
    send(&mut server, 2 * id + 1, heard.bytes).expect("the client waits");
}

/// What comes if the pattern of `seed` was sent.
fn expected(seed: u64, len: u64) -> StreamDigest {
    send(&mut std::io::sink(), seed, len).expect("a sink takes all")
}

/// Answers questions until it is told to stop, each by a thread of its own.
fn serve(listener: &TcpListener, stop: &AtomicBool) {
    thread::scope(|scope| {
        loop {
            let (server, _) = listener.accept().expect("it listens");
            if stop.load(Relaxed) {
                return;
            }
            scope.spawn(|| answer(server));
        }
    });
}

/// Runs `work` while a server on host b answers.
fn with_server(hosts: &Hosts, work: impl FnOnce()) {
    let listener = hosts.b.listen(local(PORT));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| serve(&listener, &stop));
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stop.store(true, Relaxed);
        drop(hosts.b.connect(local(PORT)));
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
}

/// A browser's worth of short connections: one rendezvous, and each has its own bytes. When it is
/// quiet, nothing is kept for long.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_short_connections_share_a_rendezvous() {
    let hosts = Hosts::new("smoke_short_connections_share_a_rendezvous");
    let pair = Pair::start(&hosts, &[PORT]);
    with_server(&hosts, || {
        // Where nobody has another, one after another; else as many as there are at once.
        for id in 0..300 {
            converse(&hosts.a, id, [0, 1, 5_000][usize::try_from(id % 3).unwrap()]);
        }
        let alone = pair.a.stats().totals.streams_followed;
        assert!(alone > 250, "{alone} of 300");
        thread::scope(|scope| {
            for worker in 1..9 {
                let host = &hosts.a;
                scope.spawn(move || {
                    (0..100).for_each(|id| converse(host, 1_000 * worker + id, 1 + id * 97));
                });
            }
        });
    });
    pair.assert_all_smc(1_100);
    for gateway in [&pair.a, &pair.b] {
        let stats = gateway.stats();
        assert!(stats.totals.streams_followed > 800, "{:?}", stats.totals);
        assert!(stats.active.kept <= 16, "{:?}", stats.active);
    }
    for gateway in [&pair.a, &pair.b] {
        wait_until("nothing is kept any more", SETTLE_LIMIT, || gateway.stats().active.kept == 0);
        gateway.holdings_at_rest();
    }
}

/// Whoever wants a rendezvous for each connection has it; one of both is enough.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn nothing_is_kept_where_one_gateway_keeps_nothing() {
    for wants in [0, 1] {
        let hosts = Hosts::new(&format!("nothing_is_kept_{wants}"));
        let setups = [Pair::client_side(&hosts, &[PORT]), Pair::server_side(&hosts, &[PORT])];
        let mut setups = setups.map(Some);
        let stubborn = setups[wants].take().expect("it is there");
        setups[wants] = Some(stubborn.smc("kept_max = 0"));
        let [near, far] = setups.map(|setup| setup.expect("it is there"));
        let pair = Pair::start_these(&hosts, near, far);
        with_server(&hosts, || (0..20).for_each(|id| converse(&hosts.a, id, 100)));
        pair.assert_all_smc(20);
        for gateway in [&pair.a, &pair.b] {
            let stats = gateway.stats();
            assert_eq!((stats.totals.streams_followed, stats.active.kept), (0, 0));
        }
    }
}

/// The server is restarted: its clients are refused meanwhile, as they would be without gateways,
/// and served again afterwards.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_server_that_refuses_is_seen_by_clients_that_share_a_rendezvous() {
    let hosts = Hosts::new("a_server_that_refuses");
    let pair = Pair::start(&hosts, &[PORT]);
    for round in 0..3 {
        with_server(&hosts, || (0..20).for_each(|id| converse(&hosts.a, id, 100)));
        for _ in 0..10 {
            // It may be reset before `connect` returns.
            let heard = hosts.a.connect(local(PORT)).and_then(|mut client| {
                set_limit(&client, LIMIT);
                client.read(&mut [0])
            });
            let error = heard.expect_err("nobody answers");
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "round {round}");
        }
    }
    for gateway in [&pair.a, &pair.b] {
        gateway.holdings_at_rest();
    }
}

/// A server that speaks first, or hangs up at once, and a client that says nothing.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_server_may_speak_first_to_clients_that_share_a_rendezvous() {
    let hosts = Hosts::new("a_server_may_speak_first");
    let pair = Pair::start(&hosts, &[PORT]);
    let listener = hosts.b.listen(local(PORT));
    for turn in 0_u32..60 {
        let mut client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        set_limit(&client, LIMIT);
        let mut server = accept(&listener, LIMIT);
        match turn % 3 {
            0 => {
                server.write_all(b"220 ready").expect("the connection is up");
                let mut heard = [0; 9];
                client.read_exact(&mut heard).expect("a greeting");
                client.write_all(b"QUIT").expect("the connection is up");
                server.read_exact(&mut heard[..4]).expect("a farewell");
                drop(server);
                assert_eq!(client.read(&mut heard).expect("the end"), 0);
            }
            1 => {
                drop(server);
                assert_eq!(client.read(&mut [0]).expect("the end"), 0);
            }
            _ => {
                drop(client);
                assert_eq!(server.read(&mut [0]).expect("the end"), 0);
            }
        }
    }
    pair.assert_all_smc(60);
    assert!(pair.a.stats().totals.streams_followed > 30, "{:?}", pair.a.stats().totals);
}

/// Gateway B is killed, or drained, while connections are kept: who comes next is refused at once,
/// and served when it is back.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn what_is_kept_ends_with_the_gateway() {
    let hosts = Hosts::new("what_is_kept_ends_with_the_gateway");
    let mut pair = Pair::start(&hosts, &[PORT]);
    for signal in [Signal::KILL, Signal::TERM] {
        with_server(&hosts, || {
            (0..20).for_each(|id| converse(&hosts.a, id, 100));
            pair.b.process.signal(signal);
            pair.b.process.wait(LIMIT);
            for _ in 0..10 {
                let refused = hosts.a.connect(local(PORT)).and_then(|mut client| {
                    set_limit(&client, LIMIT);
                    client.read(&mut [0])
                });
                assert!(refused.as_ref().is_err_and(is_refusal), "{refused:?}");
            }
            pair.b = Pair::server_side(&hosts, &[PORT]).start(&hosts, &hosts.b);
            wait_until("it works again", LIMIT, || {
                let client = hosts.a.connect(local(PORT));
                client.is_ok_and(|mut client| {
                    set_limit(&client, Duration::from_millis(200));
                    let waits = [ErrorKind::WouldBlock, ErrorKind::TimedOut];
                    client.read(&mut [0]).is_err_and(|error| waits.contains(&error.kind()))
                })
            });
            (0..20).for_each(|id| converse(&hosts.a, id, 100));
        });
    }
    wait_until("gateway A keeps nothing", SETTLE_LIMIT, || pair.a.stats().active.kept == 0);
}

/// Cables are pulled and put back while short connections come and go: none is lost.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn short_connections_survive_links_that_come_and_go() {
    let hosts = Hosts::with_two_paths("short_connections_survive_links");
    let near = Pair::client_side(&hosts, &[PORT]).rnic("soft1", hosts.a.second());
    let far = Pair::server_side(&hosts, &[PORT]).rnic("soft1", hosts.b.second());
    let pair = Pair::start_these(&hosts, near, far);
    let stop = AtomicBool::new(false);
    with_server(&hosts, || {
        thread::scope(|scope| {
            let (host, stop) = (&hosts.a, &stop);
            let clients: Vec<_> = (1..5_u64)
                .map(|worker| {
                    scope.spawn(move || {
                        let ids = (1_000_000 * worker..).take_while(|_| !stop.load(Relaxed));
                        ids.map(|id| converse(host, id, id % 3_000)).count()
                    })
                })
                .collect();
            for turn in 0..6 {
                thread::sleep(Duration::from_millis(700));
                // The first path carries the TCP connections, too.
                smcgate(&hosts, "down", &["rnic", "down", "soft1"]).expect_success("down");
                thread::sleep(Duration::from_millis(if turn % 2 == 0 { 50 } else { 700 }));
                smcgate(&hosts, "up", &["rnic", "up", "soft1"]).expect_success("up");
            }
            stop.store(true, Relaxed);
            let served: usize = clients.into_iter().map(|it| it.join().expect("served")).sum();
            println!("{served} connections");
        });
    });
    let totals = pair.a.stats().totals;
    assert!(totals.streams_followed > 500 && totals.connections_moved > 0, "{totals:?}");
}
