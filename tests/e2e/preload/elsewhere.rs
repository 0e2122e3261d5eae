//! Programs that are not like those of the other tests: that speak IPv6, live in a network
//! namespace of their own, may not use the gateway, or are to leave it alone.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::Command;
use std::thread;

use super::{LIMIT, Player, Preload, Site, carried, library};
use crate::clock::wait_until;
use crate::gateway::{SETTLE_LIMIT, local, program};
use crate::hosts::{Host, Hosts};
use crate::process::{Process, run, wait_for_listener};

const PORT: u16 = 7010;

/// The whole table over IPv6, by sockets and by rings.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_fidelity_by_ipv6() {
    let site = Site::new("preload_fidelity_by_ipv6");
    let Hosts { a, b, .. } = &site.hosts;
    let address = |last| Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, last);
    for (host, last) in [(a, 1), (b, 2)] {
        // Without duplicate address detection, which would take seconds.
        let address = format!("{}/64", address(last));
        host.ip(&["address", "add", &address, "dev", host.device, "nodad"]);
    }
    let at = |port| SocketAddr::from((address(2), port));
    let expected = site.play("tcp", &Player::plain(at(PORT)), &Player::plain(at(PORT)));
    assert!(!expected.0.contains("failed"), "{}", expected.0);
    let far = site.gateway(b).start(&site.hosts, b);
    let near = site.gateway(a).start(&site.hosts, a);
    let has_none = |line: &&str| !line.contains("\"urgent_");
    let calm = |text: &str| text.lines().filter(has_none).map(|it| format!("{it}\n")).collect();
    let calm: (String, String) = (calm(&expected.0), calm(&expected.1));
    let sockets = ("sockets", Player::preloaded(at(7021)), Player::preloaded(at(7021)), &expected);
    let rings = ("rings", Player::ringed(at(7023)), Player::ringed(at(7023)), &calm);
    thread::scope(|scope| {
        for (name, server, client, expected) in [sockets, rings] {
            let site = &site;
            scope.spawn(move || assert_eq!(&site.play(name, &server, &client), expected, "{name}"));
        }
    });
    let scenarios = u64::try_from(calm.0.lines().count()).expect("a few");
    for gateway in [&near, &far] {
        wait_until("all are counted", SETTLE_LIMIT, || carried(gateway).0 >= 2 * (scenarios - 1));
        assert!(gateway.stats().totals.rings >= scenarios - 1, "{:?}", gateway.stats().totals);
        gateway.holdings_at_rest();
    }
}

/// One gateway serves containers: the connection has the address, the mark, the device and the
/// network namespace of its program, and is SMC-R all the same.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_serves_other_namespaces() {
    let site = Site::new("preload_serves_other_namespaces");
    let Hosts { a, b, logs } = &site.hosts;
    let container = container_of(a);
    b.ip(&["route", "add", "10.7.0.0/24", "via", &a.address.to_string()]);
    let far = site.gateway(b).start(&site.hosts, b);
    let near = site.gateway(a).start(&site.hosts, a);
    let at = b.at(PORT).to_string();
    let words = ["python3", "-Bc", SERVER, &at];
    let _server = Process::start(b, logs, "server", &mut site.preloaded(b, &words));
    wait_for_listener(b, b.at(PORT));
    for (count, preload) in [(1, Preload::Sockets), (2, Preload::Rings)] {
        let name = format!("client-{preload:?}");
        let mut command = site.preloaded_by(a, preload, &["python3", "-Bc", CONTAINED, &at]);
        let said = run(&site.hosts, &container, &name, LIMIT, &mut command).expect_success(&name);
        assert_eq!(said, "10.7.0.2 7\nfrom 10.7.0.2\n");
        for gateway in [&near, &far] {
            wait_until("it is counted", SETTLE_LIMIT, || carried(gateway) == (count, 0));
        }
    }
    near.holdings_at_rest();
    far.holdings_at_rest();
}

/// A network namespace behind `host`, which forwards its packets.
fn container_of(host: &Host) -> Host {
    let address = Ipv4Addr::new(10, 7, 0, 2);
    let container = Host::new(&format!("{}-c", host.name), "vc", address);
    host.ip(&["link", "add", "vac", "type", "veth", "peer", "name", "vc"]);
    host.ip(&["link", "set", "vc", "netns", &container.name]);
    for (host, device, address) in [(host, "vac", "10.7.0.1/24"), (&container, "vc", "10.7.0.2/24")]
    {
        host.ip(&["address", "add", address, "dev", device]);
        host.ip(&["link", "set", device, "up"]);
    }
    container.ip(&["route", "add", "default", "via", "10.7.0.1"]);
    host.enter(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1")).expect("we are root");
    container
}

/// Tells each client where it comes from.
const SERVER: &str = r#"
import socket, sys
host, port = sys.argv[1].split(":")
listener = socket.create_server((host, int(port)))
while True:
    s, peer = listener.accept()
    assert s.recv(5) == b"hello"
    s.sendall(b"from " + peer[0].encode())
    s.close()
"#;

/// Connects as its operator wants it to, and says what its socket is like.
const CONTAINED: &str = r#"
import socket, sys
host, port = sys.argv[1].split(":")
s = socket.socket()
s.settimeout(20)
s.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 7)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"vc\0")
s.connect((host, int(port)))
mark = s.getsockopt(socket.SOL_SOCKET, socket.SO_MARK)
print(s.getsockname()[0], mark)
s.sendall(b"hello")
print(s.makefile().read())
"#;

/// Users who may not come in, and ports that are to be left alone, have TCP as ever.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn preload_leaves_alone_whom_it_is_not_for() {
    const USER: &str = "4711";
    let site = Site::new("preload_leaves_alone_whom_it_is_not_for");
    let Hosts { a, b, logs } = &site.hosts;
    let far = site.gateway(b).before(b, PORT).start(&site.hosts, b);
    let near = site.gateway(a).table(&format!("uids = [{USER}]\n")).start(&site.hosts, a);
    let behind = local(PORT).to_string();
    let mut command = Command::new("python3");
    let _server = Process::start(b, logs, "server", command.args(["-Bc", SERVER, &behind]));
    wait_for_listener(b, local(PORT));
    let at = b.at(PORT).to_string();
    let asks = |name: &str, options: &[&str], user: &str, becomes_smc: bool| {
        let before = carried(&near).0;
        let user = format!("--reuid={user}");
        let mut command = Command::new("setpriv");
        command.args([&user, "--regid=4711", "--clear-groups", "--"]).arg(program());
        command.args(["exec", "--socket"]).arg(site.door(a)).args(options);
        command.arg("--library").arg(library()).args(["--", "python3", "-Bc", CLIENT, &at]);
        let said = run(&site.hosts, a, name, LIMIT, &mut command).expect_success(name);
        assert!(said.starts_with("from "), "{name}: {said}");
        let wanted = before + u64::from(becomes_smc);
        wait_until(name, SETTLE_LIMIT, || carried(&near).0 >= wanted);
        assert_eq!(carried(&near).0, wanted, "{name}");
    };
    asks("welcome", &[], USER, true);
    asks("stranger", &[], "4712", false);
    asks("root", &[], "0", true);
    asks("port-left-alone", &["--not-ports", "7000-7020"], USER, false);
    asks("other-port", &["--not-ports", "7011"], USER, true);
    asks("port-named", &["--ports", "7010"], USER, true);
    asks("other-port-named", &["--ports", "7011"], USER, false);
    asks("network-left-alone", &["--not-networks", "10.8.0.0/24"], USER, false);
    asks("other-network-named", &["--networks", "10.9.0.0/24"], USER, false);
    asks("network-named", &["--networks", "10.8.0.0/24"], USER, true);
    near.holdings_at_rest();
    far.holdings_at_rest();
}

const CLIENT: &str = r#"
import socket, sys
host, port = sys.argv[1].split(":")
s = socket.create_connection((host, int(port)), 20)
s.sendall(b"hello")
print(s.makefile().read())
"#;
