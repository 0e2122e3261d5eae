//! A gateway that stands still: its peer must notice, although its host and TCP do not.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::clock::{Deadline, now, wait_until};
use crate::failure::assert_echo;
use crate::gateway::{Pair, SETTLE_LIMIT, local};
use crate::hosts::{Hosts, accept, set_limit};

const PORT: u16 = 7010;
const CONNECTIONS: usize = 8;

/// How long a link may be silent, as configured below. The last echo was a little earlier.
const IDLE: Duration = Duration::from_millis(1500);

/// After so long everything is acknowledged.
const QUIET: Duration = Duration::from_millis(200);

/// When it must have noticed: silence and the wait for an answer take 3 s, and a machine that runs
/// other tests may be late.
const NOTICE_LIMIT: Duration = Duration::from_secs(12);

/// A debugger, a suspended virtual machine or swapping can stop a gateway, and TCP notices nothing
/// for hours. The peer must reset the connections that hang, say why, and leave others alone. When
/// the gateway goes on, it must find out by itself that its connections are gone, reset its own
/// applications, and serve new ones over SMC-R.
// RFC 7609 2.1 #17: state flags only in CDC messages
// RFC 7609 4.5.3 #1: probe idle link by TEST LINK
// RFC 7609 4.5.3 #5: reset connections without another link
// RFC 7609 4.8.3 #2: detect dead peer by its links
// RFC 7609 C.7.1 #23: unanswered TEST LINK fails link
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_stopped_gateway() {
    let hosts = Hosts::new("smoke_stopped_gateway");
    let eager = ["test_link_idle = \"2s\"", "test_link_timeout = \"1s\""];
    let with = |setup: crate::gateway::Setup| eager.iter().fold(setup, |s, line| s.smc(line));
    let pair = Pair::start_these(
        &hosts,
        with(Pair::client_side(&hosts, &[PORT])),
        with(Pair::server_side(&hosts, &[PORT])),
    );
    let listener = hosts.b.listen(local(PORT));
    let connect = || {
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        let server = accept(&listener, NOTICE_LIMIT);
        assert_echo(&client, &server);
        (client, server)
    };
    let (clients, servers): (Vec<_>, Vec<_>) = (0..CONNECTIONS).map(|_| connect()).unzip();

    // What is not acknowledged when the gateway stops is noticed by the queue pair.
    thread::sleep(QUIET);
    pair.b.process.signal(Signal::STOP);
    let stopped = now();
    let before = Deadline::after(IDLE);
    for client in &clients {
        assert_reset(client, NOTICE_LIMIT);
    }
    assert!(before.passed(), "reset {:?} after the stop, without a question", now() - stopped);
    assert!(now() - stopped < NOTICE_LIMIT, "noticed after {:?}", now() - stopped);
    wait_until("gateway A has let go", SETTLE_LIMIT, || pair.a.stats().active.smc == 0);
    let said = pair.a.process.log();
    assert!(said.contains("TestTimedOut"), "the reason is in the log: {said}");

    pair.b.process.signal(Signal::CONT);
    for server in &servers {
        assert_reset(server, SETTLE_LIMIT);
    }
    wait_until("gateway B has let go", SETTLE_LIMIT, || pair.b.stats().active.smc == 0);
    let again: Vec<_> = (0..CONNECTIONS).map(|_| connect()).collect();
    pair.assert_all_smc(2 * CONNECTIONS as u64);
    drop((again, clients, servers));
    for gateway in [&pair.a, &pair.b] {
        gateway.holdings_at_rest();
    }
}

/// Waits for the reset of an idle connection.
fn assert_reset(mut stream: &TcpStream, limit: Duration) {
    set_limit(stream, limit);
    let error = stream.read(&mut [0]).expect_err("a reset, not an end or an answer");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}
