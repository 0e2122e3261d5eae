//! What an operator may limit: bandwidth, new connections, and how long connections last.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::clock::{now, wait_until};
use crate::failure::assert_echo;
use crate::gateway::{Gateway, Pair, Setup, local, smcgate};
use crate::hosts::{Hosts, accept, set_limit};

const LIMITED: u16 = 7010;
const FREE: u16 = 7011;
const LIMIT: Duration = Duration::from_secs(15);
const BLOCK: usize = 64 << 10;
/// Bytes per second of a hundred megabits.
const MBIT_100: u64 = 12_500_000;

/// A connection through the gateways, both ends.
fn open(hosts: &Hosts, port: u16, listener: &TcpListener) -> (TcpStream, TcpStream) {
    let client = hosts.a.connect(local(port)).expect("the gateway listens");
    set_limit(&client, LIMIT);
    (client, accept(listener, LIMIT))
}

/// Writes for as long as the other end reads and nobody says that it is over.
fn pour(mut to: &TcpStream, over: &AtomicBool) {
    let block = vec![7; BLOCK];
    while !over.load(Relaxed) && to.write(&block).is_ok() {}
    to.shutdown(Shutdown::Write).expect("it is up");
}

/// Reads to the end, and counts.
fn drink(mut from: &TcpStream, count: &AtomicU64) {
    let mut block = vec![0; BLOCK];
    while let Ok(len @ 1..) = from.read(&mut block) {
        count.fetch_add(len as u64, Relaxed);
    }
}

/// Bytes per second that are counted within `time`.
fn rate(count: &AtomicU64, time: Duration) -> u64 {
    let (begun, before) = (now(), count.load(Relaxed));
    thread::sleep(time);
    let bytes = count.load(Relaxed) - before;
    let micros = u64::try_from((now() - begun).as_micros()).expect("a few seconds");
    bytes * 1_000_000 / micros
}

/// Calls `during` while bytes are poured from one end to the other; it is told their count.
fn while_pouring<T>(from: &TcpStream, to: &TcpStream, during: impl FnOnce(&AtomicU64) -> T) -> T {
    let (over, count) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| pour(from, &over));
        scope.spawn(|| drink(to, &count));
        // Buffers fill at first.
        thread::sleep(Duration::from_millis(500));
        let result = during(&count);
        over.store(true, Relaxed);
        result
    })
}

/// The median of the times of round trips.
fn round_trip(client: &TcpStream, server: &TcpStream) -> Duration {
    median(200, || {
        let begun = now();
        assert_echo(client, server);
        now() - begun
    })
}

/// The median of what `measure` returns in several runs.
fn median<T: Ord + Copy>(runs: usize, measure: impl FnMut() -> T) -> T {
    let mut results: Vec<_> = std::iter::repeat_with(measure).take(runs).collect();
    results.sort_unstable();
    results[runs / 2]
}

/// A machine that stands still for a moment loses what a limit grants, so most of several spans
/// must do.
fn assert_about(count: &AtomicU64, expected: u64, what: &str) {
    let within = expected * 9 / 10..=expected * 11 / 10;
    let rate = median(5, || rate(count, Duration::from_secs(1)));
    assert!(within.contains(&rate), "{what}: {rate} bytes/s instead of {expected}");
}

/// A backup gets a hundred megabits, in either direction; who works beside it on another listener
/// neither has that limit nor notices the backup. A reload changes the limit of what is running.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_limited_stream_beside_others() {
    let hosts = Hosts::new("a_limited_stream_beside_others");
    let near = |limit: &str| {
        Setup::new("gateway-a", &hosts.a)
            .towards(hosts.b.address, FREE)
            .towards(hosts.b.address, LIMITED)
            .table(&format!("bandwidth_max = \"{limit}\"\n"))
    };
    let far = Pair::server_side(&hosts, &[LIMITED, FREE]);
    let pair = Pair::start_these(&hosts, near("100Mbit"), far);
    let listeners = [LIMITED, FREE].map(|port| hosts.b.listen(local(port)));
    let (client, server) = open(&hosts, FREE, &listeners[1]);
    let alone = round_trip(&client, &server);
    for to_server in [true, false] {
        let (stream, far) = open(&hosts, LIMITED, &listeners[0]);
        let (from, to) = if to_server { (&stream, &far) } else { (&far, &stream) };
        while_pouring(from, to, |count| {
            assert_about(count, MBIT_100, "a limited stream");
            let beside = median(5, || round_trip(&client, &server));
            let most = 4 * alone + Duration::from_millis(1);
            assert!(beside < most, "{beside:?} beside a limited stream, {alone:?} alone");
            if to_server {
                reload(&hosts, &pair.a, &near("200Mbit"), ("/listener/1/bandwidth_max", "200Mbit"));
                assert_about(count, 2 * MBIT_100, "after a reload");
                reload(&hosts, &pair.a, &near("100Mbit"), ("/listener/1/bandwidth_max", "100Mbit"));
            }
        });
    }
    let free = while_pouring(&client, &server, |count| {
        median(5, || rate(count, Duration::from_millis(200)))
    });
    assert!(free > 3 * MBIT_100, "{free} bytes/s without a limit");
    pair.assert_all_smc(3);
    assert!(pair.a.stats().counter("paced") > 100);
    assert_eq!(pair.b.stats().counter("paced"), 0);
}

/// Puts another configuration of gateway A in force, which shows `value` at `key`.
fn reload(hosts: &Hosts, a: &Gateway<'_>, setup: &Setup, (key, value): (&str, &str)) {
    fs::write(hosts.logs.join("gateway-a.toml"), setup.text()).expect("the directory is ours");
    smcgate(hosts, "reload", &["reload"]).expect_success("reload");
    let config: Value = serde_json::from_str(&a.get("/config")).expect("JSON");
    assert_eq!(config.pointer(key).and_then(Value::as_str), Some(value));
}

/// What `/stats` of the gateway says of its first listener.
fn listener_stats(a: &Gateway<'_>, keys: &[&str]) -> Vec<u64> {
    let stats: Value = serde_json::from_str(&a.get("/stats")).expect("JSON");
    let of = |key: &&str| stats["listeners"][0][*key].as_u64().expect("a number");
    keys.iter().map(of).collect()
}

/// A listener that has as many connections as it may have: one more comes in over TCP, waits for
/// the end of another, or is refused, as the operator says at that moment; and who asks learns why.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn what_exceeds_a_limit() {
    let hosts = Hosts::new("what_exceeds_a_limit");
    let near = |over: &str| {
        let keys = format!("connections_max = 1\nover_limit = \"{over}\"\nwait_timeout = \"9s\"\n");
        Setup::new("gateway-a", &hosts.a).towards(hosts.b.address, LIMITED).table(&keys)
    };
    let far = Pair::server_side(&hosts, &[LIMITED]);
    let Pair { a, b } = Pair::start_these(&hosts, near("tcp"), far);
    let listener = hosts.b.listen(local(LIMITED));
    let first = open(&hosts, LIMITED, &listener);
    assert_echo(&first.0, &first.1);
    let over = open(&hosts, LIMITED, &listener);
    assert_echo(&over.0, &over.1);
    let stats = a.stats();
    assert_eq!((stats.totals.connections_smc, stats.totals.connections_tcp), (1, 1));
    assert_eq!((stats.fallbacks[0].code, &*stats.fallbacks[0].name), (0x0300_0002, "OVER_LIMIT"));

    let key = "/listener/0/over_limit";
    reload(&hosts, &a, &near("wait"), (key, "wait"));
    let waiting = hosts.a.connect(local(LIMITED)).expect("the gateway listens");
    set_limit(&waiting, LIMIT);
    wait_until("it waits", LIMIT, || listener_stats(&a, &["waiting"]) == [1]);
    assert_echo(&over.0, &over.1);
    drop(first);
    let server = accept(&listener, LIMIT);
    assert_echo(&waiting, &server);

    reload(&hosts, &a, &near("refuse"), (key, "refuse"));
    // It may be refused before the connect has been seen to succeed.
    let refused = hosts.a.connect(local(LIMITED)).and_then(|mut refused| {
        set_limit(&refused, LIMIT);
        refused.read(&mut [0])
    });
    let error = refused.expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    let counts = ["waited", "over_limit_tcp", "refused_connections", "refused", "active"];
    assert_eq!(listener_stats(&a, &counts), [1, 1, 1, 1, 2]);
    let metric =
        "listener_refused_by_limit_total{listener=\"port-7010\",limit=\"connections_max\"}";
    assert!(a.get("/metrics").contains(&format!("smcgate_{metric} 1\n")));
    assert_eq!(b.stats().totals.connections_smc, 2);
}

/// Where SMC-R is assumed, the far gateway awaits a CLC message on each connection, also on those
/// for which there will be no SMC-R. They were reset.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn what_exceeds_a_limit_is_tcp_where_smc_r_is_assumed() {
    let hosts = Hosts::new("what_exceeds_a_limit_is_tcp_where_smc_r_is_assumed");
    let keys = "connections_max = 1\nover_limit = \"tcp\"\n";
    let near = Setup::new("gateway-a", &hosts.a).towards(hosts.b.address, LIMITED).table(keys);
    let far = Pair::server_side(&hosts, &[LIMITED]).assume(hosts.a.address);
    let Pair { a, b } = Pair::start_these(&hosts, near.assume(hosts.b.address), far);
    let listener = hosts.b.listen(local(LIMITED));
    let first = open(&hosts, LIMITED, &listener);
    assert_echo(&first.0, &first.1);
    let over = open(&hosts, LIMITED, &listener);
    assert_echo(&over.0, &over.1);
    for stats in [a.stats(), b.stats()] {
        assert_eq!((stats.totals.connections_smc, stats.totals.connections_tcp), (1, 1));
        assert_eq!(&*stats.fallbacks[0].name, "OVER_LIMIT");
    }
}

/// A client that connects in a loop has its rate, over SMC-R too; connections of which half is
/// left, and old ones, end at both applications.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn rates_and_ages() {
    let hosts = Hosts::new("rates_and_ages");
    let near = Setup::new("gateway-a", &hosts.a)
        .towards(hosts.b.address, LIMITED)
        .table("rate_per_source = 1\nrate_per_source_burst = 4\nage_max = \"3s\"\n")
        .table("half_closed_timeout = \"1s\"\n");
    let far = Pair::server_side(&hosts, &[LIMITED]);
    let Pair { a, b: _b } = Pair::start_these(&hosts, near, far);
    let listener = hosts.b.listen(local(LIMITED));
    let mut open = [(), ()].map(|()| open(&hosts, LIMITED, &listener));
    let crowd: Vec<_> = (0..10).map(|_| hosts.a.connect(local(LIMITED))).collect();
    wait_until("all were accepted", LIMIT, || listener_stats(&a, &["accepted"]) == [12]);
    let refused = listener_stats(&a, &["refused_source_rate"])[0];
    assert!((6..=8).contains(&refused), "four at once, and one more in each second: {refused}");
    drop(crowd);
    open[0].0.shutdown(Shutdown::Write).expect("it is up");
    assert_eq!(open[0].1.read(&mut [0]).expect("the end"), 0);
    assert_echo(&open[1].0, &open[1].1);
    let total = |key: &str| {
        let stats: Value = serde_json::from_str(&a.get("/stats")).expect("JSON");
        stats["totals"][key].as_u64().expect("a number")
    };
    for (ends, counter) in open.iter_mut().zip(["half_closed_closed", "aged_closed"]) {
        // Those of the crowd that came in are half closed, too.
        wait_until("it ends", LIMIT, || total(counter) >= 1);
        let error = ends.0.read(&mut [0]).expect_err("a reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{counter}");
        // The reset is on its way to the far gateway.
        if counter == "aged_closed" {
            let error = ends.1.read(&mut [0]).expect_err("a reset");
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        } else {
            // Reading says only that the half is left.
            wait_until("the server learns it", LIMIT, || ends.1.write_all(&[0]).is_err());
        }
    }
}
