//! Dormant connections hold little memory, and go on all the same.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::clock::wait_until;
use crate::gateway::{Pair, SETTLE_LIMIT, local};
use crate::hosts::{Hosts, accept, set_limit};
use crate::pattern::Pattern;

const PORT: u16 = 7010;
const CONNECTIONS: u64 = 30;
/// What each of them carries in each direction: somewhat less than one time round an element.
const BYTES: usize = 200_000;
/// The same for each gateway, in KiB.
const ALL_KIB: u64 = CONNECTIONS * BYTES as u64 / 1024;

/// Most connections of a host are dormant most of the time: what they have carried must not take
/// memory until they end. It is the peer's right to write on at any time.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_dormant_connections_give_their_memory_back() {
    let hosts = Hosts::new("smoke_dormant_connections_give_their_memory_back");
    let pair = Pair::start(&hosts, &[PORT]);
    let resident = || [&pair.a, &pair.b].map(|gateway| gateway.process.resident_kib());
    let listener = hosts.b.listen(local(PORT));
    let mut ends: Vec<_> = (0..CONNECTIONS)
        .map(|_| {
            let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
            let ends = [client, accept(&listener, SETTLE_LIMIT)];
            ends.iter().for_each(|end| set_limit(end, SETTLE_LIMIT));
            ends
        })
        .collect();
    for round in 0..3 {
        let before = given_back(&pair);
        let mut busy = [0; 2];
        for (seed, [client, server]) in (CONNECTIONS * round..).zip(&mut ends) {
            carry(client, server, seed);
            carry(server, client, seed);
            // On a slow host the first are dormant before the last have carried anything.
            busy = [0, 1].map(|at| busy[at].max(resident()[at]));
        }
        wait_until("both have given most of it back", SETTLE_LIMIT, || {
            let counted =
                given_back(&pair).into_iter().zip(before).map(|(now, before)| now - before);
            let gone = busy.iter().zip(resident()).map(|(busy, now)| busy.saturating_sub(now));
            counted.min().is_some_and(|least| least > ALL_KIB * 1024 * 3 / 4)
                && gone.min().is_some_and(|least| least > ALL_KIB / 2)
        });
    }
    pair.assert_all_smc(CONNECTIONS);
}

/// What each gateway says that it has given back, in bytes.
fn given_back(pair: &Pair<'_>) -> [u64; 2] {
    [&pair.a, &pair.b].map(|gateway| gateway.stats().counter("memory_given_back"))
}

/// Carries [`BYTES`] bytes that are those of no other seed, and compares them.
fn carry(source: &mut TcpStream, sink: &mut TcpStream, seed: u64) {
    let mut sent = vec![0; BYTES];
    Pattern::new(seed).fill(&mut sent);
    let mut received = vec![0; BYTES];
    std::thread::scope(|scope| {
        scope.spawn(|| source.write_all(&sent).expect("the connection is up"));
        sink.read_exact(&mut received).expect("all of it, in time");
    });
    assert!(received == sent, "bytes of seed {seed} are others now");
}
