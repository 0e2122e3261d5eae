//! TCP keepalive on the connection that stands idle beside SMC-R (RFC 4.5.3).

use std::fs;
use std::io::{ErrorKind, Read};
use std::time::Duration;

use crate::clock::wait_until;
use crate::failure::assert_echo;
use crate::gateway::{Pair, SETTLE_LIMIT, local};
use crate::hosts::{Host, Hosts, accept, set_limit};

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(15);

/// Drops host b's answers to the probes, but no RoCE packets.
const SILENCE: &[&str] = &["from", "10.8.0.2", "ipproto", "tcp", "sport", "7010", "priority", "1"];

/// A load balancer on the path forgets idle connections, and the TCP connection beside SMC-R is
/// always idle. Probes keep it alive, and no application ever sees them. If the probes are not
/// answered, the TCP connection is lost, and with it the SMC-R connection: both applications must
/// see a reset.
// RFC 7609 4.5.3 #6: leave TCP keepalive running
// RFC 7609 4.5.3 #7: configurable TCP keepalive interval
// RFC 7609 4.5.3 #8: acknowledge TCP keepalive probes
// RFC 7609 4.8 #1: end by SMC-R messages and TCP
// RFC 7609 4.8.2 #1: TCP reset aborts the connection
// RFC 7609 4.8.2 #11: peer's TCP reset without A aborts
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn tcp_keepalive_beside_smc_r() {
    let hosts = Hosts::new("tcp_keepalive_beside_smc_r");
    let eager = "tcp_keepalive = { idle = \"1s\", interval = \"1s\", count = 2 }";
    let near = Pair::client_side(&hosts, &[PORT]).smc(eager);
    let pair = Pair::start_these(&hosts, near, Pair::server_side(&hosts, &[PORT]));
    let listener = hosts.b.listen(local(PORT));
    let connect = || {
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        let server = accept(&listener, LIMIT);
        set_limit(&client, LIMIT);
        assert_echo(&client, &server);
        (client, server)
    };

    let (client, server) = connect();
    wait_until("three probes were sent", LIMIT, || probes_sent(&hosts.a) >= 3);
    assert_echo(&client, &server);
    assert_eq!(pair.a.stats().active.smc, 1, "an answered probe changes nothing");

    hosts.b.ip(&[&["rule", "add", "blackhole"], SILENCE].concat());
    for mut stream in [&client, &server] {
        let error = stream.read(&mut [0]).expect_err("a reset, not an end or an answer");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    for gateway in [&pair.a, &pair.b] {
        wait_until("it has let go", SETTLE_LIMIT, || gateway.stats().active.smc == 0);
    }

    hosts.b.ip(&[&["rule", "delete", "blackhole"], SILENCE].concat());
    let again = connect();
    pair.assert_all_smc(2);
    drop((again, client, server));
    for gateway in [&pair.a, &pair.b] {
        gateway.holdings_at_rest();
    }
}

/// TCP keepalive probes that the kernel of `host` has sent.
fn probes_sent(host: &Host) -> u64 {
    let table = host.enter(|| fs::read_to_string("/proc/thread-self/net/netstat"));
    let table = table.expect("/proc is mounted");
    let mut lines = table.lines().filter(|line| line.starts_with("TcpExt:"));
    let [names, values] = [lines.next(), lines.next()].map(|line| line.expect("two lines"));
    let mut pairs = names.split_whitespace().zip(values.split_whitespace());
    let (_, count) = pairs.find(|(name, _)| *name == "TCPKeepAlive").expect("since Linux 3.19");
    count.parse().expect("a number")
}
