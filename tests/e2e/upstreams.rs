//! Several servers behind one listener, by address and by name.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddrV4, TcpListener, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};
use rustix::process::Signal;
use serde_json::Value;

use crate::clock::wait_until;
use crate::gateway::{Gateway, Pair, Setup, local};
use crate::hosts::{Host, Hosts, set_limit};
use crate::process::Process;

const PORT: u16 = 7010;
const SERVER: u16 = 7500;
const LIMIT: Duration = Duration::from_secs(15);

/// A server that says who it is to everybody, and ends when it is dropped.
struct Server {
    listener: TcpListener,
    thread: Option<thread::JoinHandle<()>>,
}

impl Server {
    fn start(host: &Host, last: u8) -> Self {
        let at = SocketAddrV4::new([127, 0, 0, last].into(), SERVER);
        let listener = host.listen(at);
        let accepting = listener.try_clone().expect("a socket");
        let thread = thread::spawn(move || {
            while let Ok((mut client, _)) = accepting.accept() {
                // A check goes without a word.
                let _ = client.write_all(&[last]);
            }
        });
        Self { listener, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        shutdown(&self.listener, Shutdown::Read).expect("it listens");
        self.thread.take().expect("once").join().expect("it does not panic");
    }
}

/// The gateway of host a, all of whose servers are on the same host.
fn start<'h>(hosts: &'h Hosts, lines: &str) -> Gateway<'h> {
    let setup = Setup::new("gateway-a", &hosts.a).table(&format!(
        "[dns]\nservers = [\"127.0.0.1:5353\"]\n[[listener]]\nname = \"it\"\n\
         bind = \"{}\"\n{lines}\n",
        local(PORT)
    ));
    setup.start(hosts, &hosts.a)
}

fn by_address(lasts: &[u8]) -> String {
    let all: Vec<_> = lasts.iter().map(|last| format!("'127.0.0.{last}:{SERVER}'")).collect();
    format!("upstream = [{}]\n", all.join(", "))
}

/// Who serves a new connection; none if it is reset.
fn who(hosts: &Hosts) -> Option<u8> {
    let mut client = hosts.a.connect(local(PORT)).ok()?;
    set_limit(&client, LIMIT);
    let mut said = [0];
    match client.read(&mut said) {
        Ok(1) => Some(said[0]),
        Ok(_) => panic!("an end without a word"),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => None,
        Err(error) => panic!("{error}"),
    }
}

fn states(gateway: &Gateway<'_>) -> Vec<String> {
    let stats: Value = serde_json::from_str(&gateway.get("/stats")).expect("JSON");
    let upstreams = stats["listeners"][0]["upstreams"].as_array().expect("a list");
    upstreams.iter().map(|one| one["state"].as_str().expect("text").to_owned()).collect()
}

/// A server that is gone costs no connection: the next one is tried, it is left alone for a while,
/// and it is back when it is back. With none left, connections are refused at once.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn connections_go_to_servers_that_work() {
    let hosts = Hosts::new("connections_go_to_servers_that_work");
    let servers = [2, 3].map(|last| Server::start(&hosts.a, last));
    let lines = format!("{}eject_after = 2\neject_for = '500ms'", by_address(&[2, 3, 4]));
    let gateway = start(&hosts, &lines);
    let served: Vec<_> = (0..12).map(|_| who(&hosts).expect("a server is there")).collect();
    assert!(served.contains(&2) && served.contains(&3) && !served.contains(&4), "{served:?}");
    wait_until("the third is out", LIMIT, || {
        who(&hosts).expect("two servers are there");
        states(&gateway) == ["up", "up", "out"]
    });
    let third = Server::start(&hosts.a, 4);
    wait_until("the third is tried again", LIMIT, || who(&hosts) == Some(4));
    drop(third);
    let [first, second] = servers;
    drop((first, second));
    for _ in 0..8 {
        assert_eq!(who(&hosts), None);
    }
    let _back = Server::start(&hosts.a, 3);
    assert_eq!(who(&hosts), Some(3), "the last is never left alone");
}

/// A gateway in front of servers tries the next one for peers of SMC-R, too.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn peers_reach_servers_that_work() {
    let hosts = Hosts::new("peers_reach_servers_that_work");
    let _second = Server::start(&hosts.b, 3);
    let far = Setup::new("gateway-b", &hosts.b).table(&format!(
        "[[listener]]\nname = \"it\"\nbind = \"{}\"\naccept = \"smc\"\neject_after = 0\n{}\n",
        hosts.b.at(PORT),
        by_address(&[2, 3])
    ));
    let pair = Pair::start_these(&hosts, Pair::client_side(&hosts, &[PORT]), far);
    assert!((0..6).all(|_| who(&hosts) == Some(3)));
    pair.assert_all_smc(6);
}

/// Checks find out who is down before any connection does, and who is up again.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn checks_find_servers_that_are_down() {
    let hosts = Hosts::new("checks_find_servers_that_are_down");
    let first = Server::start(&hosts.a, 2);
    let check = "check = { interval = '100ms', fall = 2, rise = 2 }\nbalance = 'source'";
    let gateway = start(&hosts, &format!("{}{check}", by_address(&[2, 3])));
    wait_until("the second is down", LIMIT, || states(&gateway) == ["up", "down"]);
    assert!((0..6).all(|_| who(&hosts) == Some(2)));
    drop(first);
    wait_until("both are down", LIMIT, || states(&gateway) == ["down", "down"]);
    assert_eq!(who(&hosts), None);
    let _second = Server::start(&hosts.a, 3);
    wait_until("the second is up", LIMIT, || states(&gateway) == ["down", "up"]);
    assert_eq!(who(&hosts), Some(3));
    assert_eq!(gateway.stats().active.tcp, 0);
}

/// A name that means nothing yet, then one server, then another: new connections follow what a
/// name server says.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_name_is_followed_to_where_it_moves() {
    let hosts = Hosts::new("a_name_is_followed_to_where_it_moves");
    let _servers = [2, 3].map(|last| Server::start(&hosts.a, last));
    let entries = hosts.logs.join("hosts");
    let name_server = NameServer::start(&hosts, &entries);
    let gateway = start(&hosts, &format!("upstream = 'db.smcgate.test:{SERVER}'"));
    assert_eq!(who(&hosts), None, "nobody knows the name");
    for (addresses, expected) in [(&[2][..], &[2][..]), (&[3], &[3]), (&[2, 3], &[2, 3])] {
        name_server.say(addresses);
        wait_until("connections follow", LIMIT, || {
            let served: Vec<_> = (0..4).filter_map(|_| who(&hosts)).collect();
            served.iter().all(|one| expected.contains(one))
                && expected.iter().all(|one| served.contains(one))
        });
    }
    // A name server that does not answer takes nothing away.
    drop(name_server);
    thread::sleep(Duration::from_millis(1_500));
    assert!(who(&hosts).is_some());
    assert_eq!(states(&gateway), ["up", "up"]);
}

/// A host gets other name servers, as a laptop does by DHCP or a VPN. The gateway asks them without
/// a restart, although it was confined before, and says once that nobody answered meanwhile.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn name_servers_of_the_host_may_change() {
    let hosts = Hosts::new("name_servers_of_the_host_may_change");
    let _servers = [2, 3].map(|last| Server::start(&hosts.a, last));
    let resolv_conf = hosts.logs.join("resolv.conf");
    let ask = |address: &str| {
        let text = format!("nameserver {address}\noptions timeout:1 attempts:1\n");
        fs::write(&resolv_conf, text).expect("the directory is ours");
    };
    let [before, after] = ["before", "after"].map(|name| hosts.logs.join(name));
    let name_server = NameServer::start_at(&hosts, ("127.0.0.1", 53), &before, &[2]);
    ask("127.0.0.1");
    let bind = format!("mount --bind {} /etc/resolv.conf && exec \"$@\"", resolv_conf.display());
    let gateway = Setup::new("gateway-a", &hosts.a)
        .table(&format!(
            "[[listener]]\nname = \"it\"\nbind = \"{}\"\n\
             upstream = 'db.smcgate.test:{SERVER}'\n",
            local(PORT)
        ))
        .under(&["unshare", "--mount", "sh", "-c", &bind, "sh"])
        .start(&hosts, &hosts.a);
    wait_until("the first server is known", LIMIT, || who(&hosts) == Some(2));
    let said = |what: &str| gateway.process.log().matches(what).count();
    drop(name_server);
    let slow = 3 * LIMIT;
    wait_until("nobody answers", slow, || said("still cannot be looked up") > 0);
    assert_eq!(said("cannot be looked up; its addresses"), 1);
    let _other = NameServer::start_at(&hosts, ("127.0.0.53", 53), &after, &[3]);
    ask("127.0.0.53");
    wait_until("the other name server is asked", LIMIT, || who(&hosts) == Some(3));
    assert_eq!(said("can be looked up again"), 1);
}

/// A gateway on host a that asks whom this file names, and whose upstreams are these names. A file
/// `hosts` beside it takes the place of that of this machine.
fn start_asking<'h>(hosts: &'h Hosts, resolv_conf: &Path, listeners: &str) -> Gateway<'h> {
    let mut bind = format!("mount --bind {} /etc/resolv.conf && ", resolv_conf.display());
    let names = resolv_conf.with_file_name("hosts");
    if names.exists() {
        bind += &format!("mount --bind {} /etc/hosts && ", names.display());
    }
    bind += "exec \"$@\"";
    let text = format!("[admin]\nlisten = \"127.0.0.1:9180\"\n{listeners}");
    let setup = Setup::of_text("gateway-a", &text);
    setup.under(&["unshare", "--mount", "sh", "-c", &bind, "sh"]).start(hosts, &hosts.a)
}

/// Where the name server takes questions and says nothing, the gateway starts all the same. Else
/// systemd would kill it for as long as that lasts, with all listeners that need no name.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_name_server_that_is_silent_does_not_keep_the_gateway_from_starting() {
    let hosts = Hosts::new("a_name_server_that_is_silent");
    let _server = Server::start(&hosts.a, 2);
    let silent = hosts.b.enter(|| UdpSocket::bind(hosts.b.at(53))).expect("a port of our own");
    let resolv_conf = hosts.logs.join("resolv.conf");
    fs::write(&resolv_conf, format!("nameserver {}\n", hosts.b.address)).expect("it is ours");
    let listener = |name: String, port: u16, upstream: &str| {
        let bind = local(port);
        format!("[[listener]]\nname = '{name}'\nbind = '{bind}'\nupstream = '{upstream}'\n")
    };
    let unknown = (1..=10).map(|number| {
        let upstream = format!("db{number}.smcgate.test:{SERVER}");
        listener(format!("it{number}"), PORT + number, &upstream)
    });
    // What the file of the host says needs no server, also if it says nothing of IPv6.
    fs::write(hosts.logs.join("hosts"), "127.0.0.2 known.smcgate.test\n").expect("it is ours");
    let known = listener("known".to_owned(), PORT, &format!("known.smcgate.test:{SERVER}"));
    let _gateway = start_asking(&hosts, &resolv_conf, &(known + &unknown.collect::<String>()));
    assert_eq!(who(&hosts), Some(2));
    silent.set_read_timeout(Some(LIMIT)).expect("an open socket");
    // The question is there, so it was the silence that was waited for.
    assert!(silent.recv(&mut [0; 512]).expect("a datagram") > 0);
}

/// DNS is there only later than the gateway, and no RNIC is listed, so at the start there is no
/// device to have one. The first connection that can be made is SMC-R.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_name_that_is_known_later_is_reached_by_smc() {
    let hosts = Hosts::new("a_name_that_is_known_later_is_reached_by_smc");
    let _server = Server::start(&hosts.b, 2);
    let entries = hosts.logs.join("hosts");
    let name_server = NameServer::start(&hosts, &entries);
    let far = Setup::new("gateway-b", &hosts.b).table(&format!(
        "[[listener]]\nname = \"it\"\nbind = \"{}\"\naccept = \"smc\"\n{}\n",
        hosts.b.at(PORT),
        by_address(&[2])
    ));
    let _far = far.start(&hosts, &hosts.b);
    let text = format!(
        "[admin]\nlisten = \"127.0.0.1:9180\"\n[dns]\nservers = [\"127.0.0.1:5353\"]\n\
         [[listener]]\nname = \"it\"\nbind = \"{}\"\nconnect = \"smc\"\n\
         upstream = \"db.smcgate.test:{PORT}\"\n",
        local(PORT)
    );
    let near = Setup::of_text("gateway-a", &text).start(&hosts, &hosts.a);
    assert_eq!(who(&hosts), None, "nobody knows the name");
    name_server.know(&format!("{} db.smcgate.test\n", hosts.b.address));
    wait_until("the name is known", LIMIT, || who(&hosts) == Some(2));
    let totals = near.stats().totals;
    assert_eq!((totals.connections_smc, totals.connections_tcp), (1, 0), "{}", near.process.log());
}

/// dnsmasq, with answers that are good for a second.
struct NameServer<'a> {
    process: Process,
    entries: &'a Path,
}

impl<'a> NameServer<'a> {
    fn start(hosts: &Hosts, entries: &'a Path) -> Self {
        Self::start_at(hosts, ("127.0.0.1", 5353), entries, &[])
    }

    /// One at another place, which says from the start that the name means these servers.
    fn start_at(
        hosts: &Hosts,
        (address, port): (&str, u16),
        entries: &'a Path,
        lasts: &[u8],
    ) -> Self {
        write_entries(entries, lasts);
        let mut command = Command::new("dnsmasq");
        command.args([
            "--keep-in-foreground",
            "--conf-file=/dev/null",
            "--user=root",
            "--pid-file",
        ]);
        command.args([&format!("--port={port}"), &format!("--listen-address={address}")]);
        command.arg("--bind-interfaces");
        command.args(["--no-resolv", "--no-hosts", "--local-ttl=1", "--neg-ttl=1"]);
        command.arg("--local=/smcgate.test/");
        command.arg(format!("--addn-hosts={}", entries.display()));
        let name = format!("dnsmasq-{address}");
        let process = Process::start(&hosts.a, &hosts.logs, &name, &mut command);
        Self { process, entries }
    }

    /// From now on the name means these servers.
    fn say(&self, lasts: &[u8]) {
        write_entries(self.entries, lasts);
        self.process.signal(Signal::HUP);
    }

    /// From now on it knows this, in the form of `/etc/hosts`.
    fn know(&self, text: &str) {
        fs::write(self.entries, text).expect("the directory is ours");
        self.process.signal(Signal::HUP);
    }
}

fn write_entries(entries: &Path, lasts: &[u8]) {
    let lines = lasts.iter().map(|last| format!("127.0.0.{last} db.smcgate.test\n"));
    fs::write(entries, lines.collect::<String>()).expect("the directory is ours");
}
