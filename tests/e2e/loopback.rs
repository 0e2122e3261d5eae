//! Congestion control of applications on the hosts of gateways.

use std::fs;
use std::net::TcpStream;
use std::time::Duration;

use rustix::net::sockopt;

use crate::failure::assert_echo;
use crate::gateway::{Pair, local};
use crate::hosts::{Host, Hosts, accept};

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(15);
const OF_HOST: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

fn set_host_choice(host: &Host, name: &str) {
    host.enter(|| fs::write(OF_HOST, name)).expect("this kernel has it");
}

fn of(socket: &TcpStream) -> String {
    sockopt::tcp_congestion(socket).expect("a TCP socket has one")
}

/// Where the host paces, applications at both ends of gateways are spared that; and only there,
/// only if the operator did not forbid it, and not those that speak with somebody else.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn applications_are_not_paced_towards_gateways() {
    for (of_host, config, expected) in [
        ("bbr", "", "reno"),
        ("bbr", "[local]\ncongestion_control = \"host\"\n", "bbr"),
        ("reno", "", "reno"),
    ] {
        let hosts = Hosts::new("applications_are_not_paced_towards_gateways");
        set_host_choice(&hosts.a, of_host);
        set_host_choice(&hosts.b, of_host);
        let near = Pair::client_side(&hosts, &[PORT]).table(config);
        let far = Pair::server_side(&hosts, &[PORT]).table(config);
        let pair = Pair::start_these(&hosts, near, far);
        let listener = hosts.b.listen(local(PORT));
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        let server = accept(&listener, LIMIT);
        assert_eq!([of(&client), of(&server)], [expected, expected], "{config}");
        let stranger = hosts.b.connect(local(PORT)).expect("the application listens");
        let served = accept(&listener, LIMIT);
        assert_eq!([of(&stranger), of(&served)], [of_host, of_host], "{config}");
        assert_echo(&client, &server);
        pair.assert_all_smc(1);
    }
}
