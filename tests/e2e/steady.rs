//! What a pair of gateways does not do while it only carries bytes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Scope};
use std::time::Duration;

use crate::gateway::{Gateway, Pair, Setup, local};
use crate::hosts::{Hosts, accept, set_limit};

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(15);
/// Connections with questions of 64 bytes, and with a stream each way.
const ASKING: usize = 15;
const STREAMING: usize = 1;
/// Whatever is done now and then is done several times in a span.
const SPAN: Duration = Duration::from_secs(2);
/// Queues may grow until they are as long as they get: one span in which nobody asks is enough.
const SPANS_MAX: usize = 3;
/// A span in which less is carried shows nothing.
const BYTES_MIN: u64 = 10_000_000;

/// Whoever asks for memory per message stalls when there is none, and is slow before.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_pollers_ask_for_no_memory_while_they_carry_bytes() {
    let hosts = Hosts::new("smoke_pollers_ask_for_no_memory_while_they_carry_bytes");
    carries_without_asking(&hosts, &Pair::start(&hosts, &[PORT]));
}

/// RNICs of other kinds bring in and complete by code of their own.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn pollers_ask_for_no_memory_whatever_their_rnics() {
    let hosts = Hosts::new("pollers_ask_for_no_memory_whatever_their_rnics");
    let folder = hosts.logs.join("shm");
    std::fs::create_dir(&folder).expect("the folder of logs is writable");
    let folder = folder.display().to_string();
    for (kind, device_a, device_b) in
        [("shm", &folder[..], &folder[..]), ("roce-packet", hosts.a.device, hosts.b.device)]
    {
        let setup = |name: &str, device: &str| Setup::of_kind(name, ("local", kind), device, "");
        let a = setup(&format!("{kind}-a"), device_a).towards(hosts.b.address, PORT);
        let b = setup(&format!("{kind}-b"), device_b).before(&hosts.b, PORT);
        carries_without_asking(&hosts, &Pair::start_these(&hosts, a, b));
    }
}

/// Questions and streams at once, through a pair of gateways that has just started.
#[track_caller]
fn carries_without_asking(hosts: &Hosts, pair: &Pair<'_>) {
    let listener = hosts.b.listen(local(PORT));
    let ends: Vec<_> = (0..ASKING + STREAMING)
        .map(|_| {
            let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
            set_limit(&client, LIMIT);
            client.set_nodelay(true).expect("an open socket");
            (client, accept(&listener, LIMIT))
        })
        .collect();
    let (over, carried) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for (at, (client, server)) in ends.iter().enumerate() {
            if at < ASKING {
                ask(scope, client, server, (&over, &carried));
            } else {
                stream(scope, client, server, (&over, &carried));
                stream(scope, server, client, (&over, &carried));
            }
        }
        let read = || ([&pair.a, &pair.b].map(allocations), carried.load(Ordering::Relaxed));
        let spans: Vec<_> = (0..SPANS_MAX)
            .map(|_| {
                let (before, carried_before) = read();
                thread::sleep(SPAN);
                let (after, carried) = read();
                let asked: u64 =
                    after.iter().zip(before).map(|(after, before)| after - before).sum();
                (asked, carried - carried_before)
            })
            .collect();
        over.store(true, Ordering::Relaxed);
        let is_steady = |(asked, bytes): &(u64, u64)| *asked == 0 && *bytes > BYTES_MIN;
        assert!(spans.iter().any(is_steady), "asked, while so many bytes were carried: {spans:?}");
    });
    pair.assert_all_smc(1);
}

/// How often the pollers of a gateway have asked for memory.
fn allocations(gateway: &Gateway<'_>) -> u64 {
    gateway.stats().counter("allocations")
}

/// Asks and answers until it is over.
fn ask<'s>(
    scope: &'s Scope<'s, '_>,
    mut client: &'s TcpStream,
    mut server: &'s TcpStream,
    (over, carried): (&'s AtomicBool, &'s AtomicU64),
) {
    scope.spawn(move || {
        let mut bytes = [7; 64];
        while !over.load(Ordering::Relaxed) {
            client.write_all(&bytes).expect("no reset");
            client.read_exact(&mut bytes).expect("an answer");
            carried.fetch_add(64, Ordering::Relaxed);
        }
        client.shutdown(std::net::Shutdown::Write).expect("no reset");
    });
    scope.spawn(move || {
        let mut bytes = [0; 64];
        while server.read_exact(&mut bytes).is_ok() {
            server.write_all(&bytes).expect("no reset");
        }
    });
}

/// Sends and receives until it is over.
fn stream<'s>(
    scope: &'s Scope<'s, '_>,
    mut source: &'s TcpStream,
    mut sink: &'s TcpStream,
    (over, carried): (&'s AtomicBool, &'s AtomicU64),
) {
    scope.spawn(move || {
        while !over.load(Ordering::Relaxed) {
            source.write_all(&[7; 65_536]).expect("no reset");
        }
        source.shutdown(std::net::Shutdown::Write).expect("no reset");
    });
    scope.spawn(move || {
        let mut bytes = vec![0; 65_536];
        while let len @ 1.. = sink.read(&mut bytes).expect("no reset") {
            carried.fetch_add(len as u64, Ordering::Relaxed);
        }
    });
}
