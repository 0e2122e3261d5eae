//! Who keeps the ports of connections that are over.
//!
//! Whoever ends a TCP connection first keeps its ports in TIME_WAIT for a minute. A gateway that
//! connects to its peer has some 28,000 of them: three hundred short connections per second for a
//! minute are too many if it is the one to end them.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddrV4, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use crate::clock::wait_until;
use crate::gateway::{Pair, SETTLE_LIMIT, local};
use crate::hosts::{CONNECT_LIMIT, Host, Hosts, accept, set_limit};

const PORT: u16 = 7010;
/// Connections in each order of closing.
const CONNECTIONS: u64 = 2_000;
/// How many may be cut short because a poller was not scheduled for two seconds.
const TOLERATED: usize = 20;
const LIMIT: Duration = Duration::from_secs(20);

/// Which side half-closes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    Client,
    Server,
    /// Neither waits for the other.
    Both,
}

/// In whatever order applications end their connections, the gateway that connects must have none
/// in TIME_WAIT towards its peer, and must not have to cut any short.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_the_gateway_that_connects_keeps_no_ports() {
    let hosts = Hosts::new("smoke_the_gateway_that_connects_keeps_no_ports");
    let pair = Pair::start(&hosts, &[PORT]);
    let listener = hosts.b.listen(local(PORT));
    for first in [First::Client, First::Server, First::Both] {
        short_connections(&hosts, &listener, first);
        wait_until("all of them are over", SETTLE_LIMIT, || {
            let active = pair.a.stats().active;
            (active.smc, active.farewells) == (0, 0)
        });
        let [a, b] = [&hosts.a, &hosts.b].map(|host| time_waits(host, hosts.b.at(PORT)));
        println!("{first:?} first: TIME_WAIT between the gateways: {a} at A, {b} at B");
        assert!(a <= TOLERATED, "{first:?} first: {a} ports of gateway A in TIME_WAIT");
    }
    pair.assert_all_smc(3 * CONNECTIONS);
    let cut_short = pair.a.stats().totals.tcp_cut_short;
    assert!(cut_short <= TOLERATED as u64, "{cut_short} TCP connections were reset");
}

/// Makes connections one after another, each with a question and an answer.
fn short_connections(hosts: &Hosts, listener: &TcpListener, first: First) {
    let ask = || {
        for id in 0..CONNECTIONS {
            let mut client = TcpStream::connect_timeout(&local(PORT).into(), CONNECT_LIMIT)
                .unwrap_or_else(|error| panic!("connection {id}: {error}"));
            set_limit(&client, LIMIT);
            client.write_all(&id.to_be_bytes()).expect("the connection is up");
            let mut answer = [0; 8];
            client.read_exact(&mut answer).expect("an answer");
            assert_eq!(u64::from_be_bytes(answer), id);
            if first == First::Server {
                assert_eq!(client.read(&mut [0]).expect("the end"), 0);
            }
            client.shutdown(Shutdown::Write).expect("the connection is up");
            assert_eq!(client.read(&mut [0]).expect("the end"), 0);
        }
    };
    let answer = || {
        for _ in 0..CONNECTIONS {
            let mut server = accept(listener, LIMIT);
            let mut asked = [0; 8];
            server.read_exact(&mut asked).expect("a question");
            server.write_all(&asked).expect("the client waits");
            if first == First::Client {
                assert_eq!(server.read(&mut [0]).expect("the end"), 0);
            }
            server.shutdown(Shutdown::Write).expect("the connection is up");
            assert_eq!(server.read(&mut [0]).expect("the end"), 0);
        }
    };
    thread::scope(|scope| {
        scope.spawn(answer);
        scope.spawn(|| hosts.a.enter(ask));
    });
}

/// How many connections with `gateway` are in TIME_WAIT on `host`.
fn time_waits(host: &Host, gateway: SocketAddrV4) -> usize {
    let address = u32::from_ne_bytes(gateway.ip().octets());
    let gateway = format!("{address:08X}:{:04X}", gateway.port());
    let sockets = host.enter(|| fs::read_to_string("/proc/thread-self/net/tcp"));
    let sockets = sockets.expect("/proc is mounted");
    let is_one = |line: &&str| {
        let fields: Vec<&str> = line.split_whitespace().take(4).collect();
        fields.len() == 4 && fields[1..3].contains(&gateway.as_str()) && fields[3] == TIME_WAIT
    };
    sockets.lines().skip(1).filter(is_one).count()
}

/// The state in `/proc/net/tcp`.
const TIME_WAIT: &str = "06";
