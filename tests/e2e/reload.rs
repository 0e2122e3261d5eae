//! Configurations that change under load, and listeners that are drained.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};
use rustix::process::Signal;
use serde_json::Value;

use crate::clock::wait_until;
use crate::failure::{assert_echo, is_refusal};
use crate::gateway::{Gateway, Pair, Setup, local, smcgate};
use crate::hosts::{Hosts, accept, set_limit};
use crate::pattern::Pattern;

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(15);
const CONNECTIONS: usize = 200;
/// Threads that each keep their share of the connections busy.
const WORKERS: usize = 4;
const BLOCK: usize = 2048;

/// The configuration of gateway A on a host, the `turn`th of many: listeners come and go, move and
/// change, and so do limits.
fn of_turn(turn: u16) -> String {
    let far = |port: u16| format!("10.8.0.2:{port}");
    let mut text = format!(
        "log = \"{}\"\n[admin]\nlisten = \"127.0.0.1:9180\"\n\
         [[rnic]]\nname = \"soft0\"\ndevice = \"va\"\n\
         [limits]\nconnections_max = {}\nhandshakes_max = {}\n",
        if turn.is_multiple_of(2) { "debug" } else { "info" },
        1000 + turn,
        16 + turn,
    );
    // The second RNIC comes and goes; connections move there and back.
    if turn % 4 >= 2 {
        text += "[[rnic]]\nname = \"soft1\"\ndevice = \"wa\"\n";
    }
    let mut listener = |name: &str, port: u16, more: &str| {
        text += &format!(
            "[[listener]]\nname = \"{name}\"\nbind = \"127.0.0.1:{port}\"\nconnect = \"smc\"\n\
             upstream = \"{}\"\n{more}\n",
            far(PORT)
        );
    };
    listener("main", PORT, &format!("idle_timeout = \"{}s\"\nbacklog = {}", 60 + turn, 64 + turn));
    // One that comes and goes, one that moves, and one whose name changes but not its address.
    if turn % 2 == 1 {
        listener("sometimes", PORT + 1, "");
    }
    listener("moving", PORT + 10 + turn % 3, "tcp_nodelay = false");
    listener(&format!("named-{}", turn % 4), PORT + 2, "");
    text
}

/// The lines of its table `[smc]`.
fn smc_of_turn(turn: u16) -> String {
    format!("eids = [\"SITE-{}\"]\ntest_link_idle = \"{}s\"\n", turn % 3, 5 + turn)
}

/// What a wrong configuration is, and what is said of it.
const WRONG: [(&str, &str, i32); 5] = [
    ("[[listener]\n", "not TOML", 2),
    ("colour = \"blue\"\n", "colour", 2),
    (
        "[[listener]]\nname = \"x\"\nbind = \"127.0.0.1:7999\"\nupstream = \"nowhere\"\n",
        "nowhere",
        2,
    ),
    (
        "[[listener]]\nname = \"x\"\nbind = \"192.0.2.7:7999\"\nupstream = \"10.8.0.2:1\"\n",
        "192.0.2.7",
        1,
    ),
    (
        "[[listener]]\nname = \"x\"\nbind = \"127.0.0.1:7999\"\nupstream = \"original-dst\"\n\
         intercept = \"ebpf\"\nintercept_ports = [7]\nintercept_cgroups = [\"/no/such/group\"]\n",
        "has given up what it takes for intercept = \"ebpf\"; restart it",
        1,
    ),
];

/// An operator adds a listener on a Monday morning: none of the two hundred who work notices, and
/// neither do they when the new configuration is nonsense.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn connections_survive_reloads() {
    let hosts = Hosts::with_two_paths("connections_survive_reloads");
    let far = Pair::server_side(&hosts, &[PORT]).rnic("soft1", hosts.b.second());
    let b = far.start(&hosts, &hosts.b);
    let mut a =
        Setup::of_text("gateway-a", &of_turn(0)).smc(&smc_of_turn(0)).start(&hosts, &hosts.a);
    let listener = hosts.b.listen(local(PORT));
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let _end = End { stop: &stop, listener: &listener };
        scope.spawn(|| {
            while let Ok((server, _)) = listener.accept() {
                scope.spawn(move || echo(server));
            }
        });
        let connect = |_| {
            let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
            set_limit(&client, LIMIT);
            client
        };
        let mut clients: Vec<TcpStream> = (0..CONNECTIONS).map(connect).collect();
        while !clients.is_empty() {
            let share = clients.split_off(clients.len() - CONNECTIONS / WORKERS);
            let (stop, rounds) = (&stop, &rounds);
            scope.spawn(move || keep_busy(share, stop, rounds));
        }
        for turn in 1..=20 {
            let before = rounds.load(Relaxed);
            reload(&hosts, &mut a, turn);
            let rnics = if turn % 4 >= 2 { 2 } else { 1 };
            wait_until("RNICs come and go", LIMIT, || {
                let stats = a.stats();
                let links: Vec<_> = stats.link_groups.iter().map(|it| it.links.len()).collect();
                stats.rnics.len() == rnics && links.contains(&rnics)
            });
            wait_until("bytes move again", LIMIT, || rounds.load(Relaxed) > before + 1);
            probe(&hosts, turn);
            if let Some(wrong) = wrong_of(turn) {
                refuse(&hosts, &a, wrong);
            }
        }
    });
    let totals = a.stats().totals;
    let (smc, moved) = (totals.connections_smc, totals.connections_moved);
    assert!(smc >= CONNECTIONS as u64 && moved > 0, "{smc} SMC-R, {moved} moved");
    let config: Value = serde_json::from_str(&a.get("/config")).expect("JSON");
    assert_eq!(config["limits"]["connections_max"], 1020);
    assert!(a.process.ended().is_none());
    drop(b);
}

/// Ends the load when it is dropped, also by a test that fails.
struct End<'a> {
    stop: &'a AtomicBool,
    listener: &'a TcpListener,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        // Ends the thread that accepts; what it has accepted ends with its clients.
        shutdown(self.listener, Shutdown::Read).expect("it listens");
    }
}

/// The wrong configuration that is tried after a turn: after each fourth.
fn wrong_of(turn: u16) -> Option<&'static (&'static str, &'static str, i32)> {
    WRONG.get(usize::from(turn / 4).checked_sub(1)?).filter(|_| turn.is_multiple_of(4))
}

/// Sends back what comes.
fn echo(mut server: TcpStream) {
    let mut buffer = [0; BLOCK];
    while let Ok(len @ 1..) = server.read(&mut buffer) {
        server.write_all(&buffer[..len]).expect("the client reads");
    }
}

/// Sends blocks on each connection, and reads them back, until told to stop.
fn keep_busy(mut clients: Vec<TcpStream>, stop: &AtomicBool, rounds: &AtomicU64) {
    let seeded = (0..).zip(clients.iter()).map(|(seed, _)| Pattern::new(seed));
    let mut patterns: Vec<_> = seeded.collect();
    let (mut said, mut heard) = ([0; BLOCK], [0; BLOCK]);
    while !stop.load(Relaxed) {
        for (client, pattern) in clients.iter_mut().zip(&mut patterns) {
            pattern.fill(&mut said);
            client.write_all(&said).expect("the connection is up");
            client.read_exact(&mut heard).expect("the connection is up");
            assert!(said == heard, "other bytes came back");
        }
        rounds.fetch_add(1, Relaxed);
    }
}

/// Puts the configuration of a turn in force: by command, or by signal.
fn reload(hosts: &Hosts, a: &mut Gateway<'_>, turn: u16) {
    let path = hosts.logs.join("gateway-a.toml");
    let text = format!("{}[smc]\n{}", of_turn(turn), smc_of_turn(turn));
    fs::write(path, text).expect("the directory is ours");
    if turn.is_multiple_of(3) {
        a.process.signal(Signal::HUP);
    } else {
        let said = smcgate(hosts, "reload", &["reload"]).expect_success("reload");
        assert!(said.contains("listener moving: changed"), "{said}");
    }
    wait_until("it is in force", LIMIT, || {
        let config: Value = serde_json::from_str(&a.get("/config")).expect("JSON");
        config["limits"]["connections_max"] == 1000 + turn
    });
}

/// Every listener of a turn serves, and no other does.
fn probe(hosts: &Hosts, turn: u16) {
    let there = [Some(PORT), (turn % 2 == 1).then_some(PORT + 1), Some(PORT + 10 + turn % 3)];
    for port in [PORT, PORT + 1, PORT + 2, PORT + 10, PORT + 11, PORT + 12] {
        let expected = there.contains(&Some(port)) || port == PORT + 2;
        match hosts.a.connect(local(port)) {
            Ok(mut client) if expected => {
                set_limit(&client, LIMIT);
                client.write_all(b"probe").expect("it is up");
                client.read_exact(&mut [0; 5]).expect("it is up");
            }
            Err(error) if !expected => assert_eq!(error.kind(), ErrorKind::ConnectionRefused),
            other => panic!("port {port} in turn {turn}: {other:?}, expected {expected}"),
        }
    }
}

/// A wrong configuration is refused, and says why; what is in force stays.
fn refuse(hosts: &Hosts, a: &Gateway<'_>, (more, why, code): &(&str, &str, i32)) {
    let path = hosts.logs.join("gateway-a.toml");
    let (good, before) = (fs::read_to_string(&path).expect("our own"), a.get("/config"));
    // Keys of the top level come before all tables.
    let wrong =
        if more.starts_with('[') { format!("{good}{more}") } else { format!("{more}{good}") };
    fs::write(&path, wrong).expect("the directory is ours");
    let finished = smcgate(hosts, "refused", &["reload"]);
    assert_eq!(finished.status.code(), Some(*code), "{more}: {}", finished.stderr);
    assert!(finished.stderr.contains(why), "{more}: {}", finished.stderr);
    assert_eq!(a.get("/config"), before, "{more}");
    assert!(hosts.a.connect(local(7999)).is_err(), "{more}");
}

/// Connections of a drained listener go on until they are idle; load balancers hear of it; and it
/// comes back.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_drained_listener_comes_back() {
    let hosts = Hosts::new("a_drained_listener_comes_back");
    let pair = Pair::start(&hosts, &[PORT, PORT + 1]);
    let other = local(PORT + 1);
    let listeners = [hosts.b.listen(local(PORT)), hosts.b.listen(other)];
    let open = |at: SocketAddrV4, listener| {
        let client = hosts.a.connect(at).expect("the gateway listens");
        set_limit(&client, LIMIT);
        let server = accept(listener, LIMIT);
        assert_echo(&client, &server);
        (client, server)
    };
    let (client, server) = open(local(PORT), &listeners[0]);
    let readyz = |query: &str| {
        let at = format!("/readyz{query}");
        crate::http::get(&hosts.a, local(9180), &at).expect("the gateway answers").0
    };
    let name = "port-7010";
    let said = smcgate(&hosts, "drain", &["drain", "--listener", name]).expect_success("drain");
    assert!(said.contains("port-7010: drained; 1 connections go on"), "{said}");
    let error = hosts.a.connect(local(PORT)).expect_err("it is drained");
    assert!(is_refusal(&error), "{error}");
    assert_echo(&client, &server);
    let (elsewhere, _server) = open(other, &listeners[1]);
    assert_eq!([readyz(""), readyz("?listener=port-7010")], [200, 503]);
    // The one on which nothing moves is closed; the other listener is not concerned.
    let words = ["drain", "--listener", name, "--close-idle-over", "1"];
    smcgate(&hosts, "close", &words).expect_success("drain");
    let error = (&client).read(&mut [0]).expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    smcgate(&hosts, "drain-all", &["drain"]).expect_success("drain");
    assert_eq!([readyz(""), readyz("?listener=port-7011")], [503, 503]);
    smcgate(&hosts, "undrain", &["undrain"]).expect_success("undrain");
    assert_eq!([readyz(""), readyz("?listener=port-7010")], [200, 200]);
    open(local(PORT), &listeners[0]);
    set_limit(&elsewhere, LIMIT);
    assert_echo(&elsewhere, &_server);
    let unknown = smcgate(&hosts, "unknown", &["drain", "--listener", "nobody"]);
    assert_eq!(unknown.status.code(), Some(1), "{}", unknown.stderr);
    assert!(unknown.stderr.contains("there is no listener nobody"), "{}", unknown.stderr);
    drop(pair);
}

/// What an operator has asked of a listener ends with it, and not with the one that takes its
/// place; and an RNIC that is back in the configuration before it was closed stays, also if
/// something about it is different, which has to wait for a restart.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn what_comes_back_is_what_was_wanted() {
    let hosts = Hosts::with_two_paths("what_comes_back_is_what_was_wanted");
    let far = Pair::server_side(&hosts, &[PORT, PORT + 1]).rnic("soft1", hosts.b.second());
    let _b = far.start(&hosts, &hosts.b);
    let near = |ports: &[u16], second: &str| Pair::client_side(&hosts, ports).table(second);
    let second = "[[rnic]]\nname = \"soft1\"\ndevice = \"wa\"\n";
    let other = format!("{second}mtu = 1024\n");
    let a = near(&[PORT, PORT + 1], second).start(&hosts, &hosts.a);
    let put = |ports: &[u16], second: &str| {
        fs::write(hosts.logs.join("gateway-a.toml"), near(ports, second).text()).expect("ours");
        smcgate(&hosts, "reload", &["reload"]).expect_success("reload")
    };
    let listener = hosts.b.listen(local(PORT + 1));
    let stays = hosts.b.listen(local(PORT));
    let open = |port: u16, listener: &TcpListener| {
        let client = hosts.a.connect(local(port)).expect("the gateway listens");
        set_limit(&client, LIMIT);
        let server = accept(listener, LIMIT);
        assert_echo(&client, &server);
        (client, server)
    };
    let (client, server) = open(PORT, &stays);
    let links = || a.stats().link_groups.iter().map(|group| group.links.len()).sum::<usize>();
    wait_until("both RNICs are used", LIMIT, || links() == 2);
    let drain = ["drain", "--listener", "port-7011", "--close-idle-over", "1"];
    smcgate(&hosts, "drain", &drain).expect_success("drain");
    // The second listener goes, and so does the second RNIC, which is closed a second later.
    put(&[PORT], "");
    let said = put(&[PORT, PORT + 1], &other);
    assert!(said.contains("rnic soft1: what is different takes effect after a restart"), "{said}");
    let (idle, idle_server) = open(PORT + 1, &listener);
    thread::sleep(Duration::from_millis(3500));
    assert_echo(&idle, &idle_server);
    assert_echo(&client, &server);
    assert_eq!(a.stats().rnics.len(), 2);
    wait_until("both RNICs are used again", LIMIT, || links() == 2);
}

/// A port at which peers came is given to clients that know nothing of SMC-R, and back. The kernel
/// asks for the TCP option as it did when the socket began to listen: a peer would take a plain
/// listener for one that has SMC-R, and its messages reach the server.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_port_that_changes_sides_speaks_what_it_should() {
    let hosts = Hosts::new("a_port_that_changes_sides_speaks_what_it_should");
    let far = |accept: &str| {
        let listener = (hosts.b.at(PORT), accept);
        Setup::new("gateway-b", &hosts.b).listener(listener, (local(PORT), "tcp"))
    };
    let b = far("smc").start(&hosts, &hosts.b);
    let a = Pair::client_side(&hosts, &[PORT]).start(&hosts, &hosts.a);
    let listener = hosts.b.listen(local(PORT));
    let mut expected = [0, 0];
    for accept_by in ["smc", "tcp", "smc", "tcp"] {
        let file = hosts.logs.join("gateway-b.toml");
        fs::write(&file, far(accept_by).text()).expect("the folder is ours");
        b.process.signal(Signal::HUP);
        wait_until("it is in force", LIMIT, || {
            let config: Value = serde_json::from_str(&b.get("/config")).expect("JSON");
            config["listener"][0]["accept"] == accept_by
        });
        // What is kept of before would need no TCP connection.
        thread::sleep(Duration::from_millis(2500));
        for _ in 0..3 {
            let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
            set_limit(&client, LIMIT);
            assert_echo(&client, &accept(&listener, LIMIT));
        }
        let totals = a.stats().totals;
        let is_smc = usize::from(accept_by == "tcp");
        expected[is_smc] += 3;
        assert_eq!([totals.connections_smc, totals.connections_tcp], expected, "{accept_by}");
    }
}

/// systemd knows the process of a gateway, but not where the one that runs answers when the file
/// names another place. It must reach that one, and learn whether the reload has worked.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_gateway_is_told_to_reload_by_its_process() {
    let hosts = Hosts::new("a_gateway_is_told_to_reload_by_its_process");
    let setup = Setup::new("gateway-a", &hosts.a).towards(hosts.b.address, PORT);
    let text = setup.text();
    let gateway = setup.start(&hosts, &hosts.a);
    let file = hosts.logs.join("gateway-a.toml");
    let change = |text: &str| fs::write(&file, text).expect("the folder is ours");
    let pid = gateway.process.id().to_string();
    let by_pid = |name: &str| smcgate(&hosts, name, &["reload", "--pid", &pid]);

    let moved = text.replace("127.0.0.1:9180", "127.0.0.1:9181") + "[dns]\nservers = []\n";
    let more = "[[listener]]\nname = \"more\"\nbind = \"127.0.0.1:7099\"\n\
                upstream = \"10.8.0.2:7099\"\n";
    change(&format!("{moved}{more}"));
    let by_address = smcgate(&hosts, "by-address", &["reload", "-c", &file.display().to_string()]);
    assert_eq!(by_address.status.code(), Some(1), "{}", by_address.stderr);
    let said = by_pid("by-pid").expect_success("reload");
    assert!(said.contains("admin: takes effect after a restart"), "{said}");
    assert!(said.contains("listener more: added"), "{said}");
    change("nonsense");
    let wrong = by_pid("wrong");
    assert_eq!(wrong.status.code(), Some(2), "{}", wrong.stderr);
    assert!(wrong.stderr.contains("gateway-a.toml:1"), "{}", wrong.stderr);
    assert!(gateway.get("/config").contains("7099"), "what was before stays");
}
