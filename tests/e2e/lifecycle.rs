//! What operators do to gateways, and what hosts deny them.

use std::fs;
use std::io::{ErrorKind, Read as _};
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::clock::wait_until;
use crate::failure::{assert_echo, is_refusal};
use crate::gateway::{Pair, SETTLE_LIMIT, Setup, local, program, smcgate};
use crate::hosts::{Hosts, accept, set_limit};
use crate::pattern::{receive, send};
use crate::process::run;

const PORT: u16 = 7010;
/// The diagnosis code of a CLC Decline for want of memory.
const OUT_OF_MEMORY: u32 = 0x0101_0000;
const LIMIT: Duration = Duration::from_secs(15);

/// `check` and `run` must find a typing error, and name its file and key.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_bad_configuration() {
    let hosts = Hosts::new("smoke_bad_configuration");
    let listener = "[[listener]]\nname = \"x\"\nbind = \"127.0.0.1:7001\"\naccept = \"tcp\"\n\
                    connect = \"smc\"\nupstream = \"10.8.0.2:7002\"\n";
    let cases = [
        ("no-such-key", format!("{listener}uptsream = \"10.8.0.2:1\"\n"), "uptsream"),
        ("no-address", listener.replace("127.0.0.1:7001", "localhorst"), "bind"),
        ("no-such-word", listener.replace("\"tcp\"", "\"udp\""), "accept"),
        ("twice", format!("{listener}{}", listener.replace("7001", "7003")), "name"),
        ("not-toml", "[[listener]\n".to_owned(), "1"),
        ("empty", String::new(), "listener"),
    ];
    for (name, config, key) in cases {
        let path = hosts.logs.join(format!("{name}.toml"));
        fs::write(&path, config).expect("the directory is ours");
        let file = path.to_str().expect("our own paths are text");
        for verb in ["check", "run"] {
            let finished = smcgate(&hosts, &format!("{name}-{verb}"), &[verb, "-c", file]);
            let said = &finished.stderr;
            assert_eq!(finished.status.code(), Some(2), "{name} {verb}: {said}");
            assert_eq!(said.trim_end().lines().count(), 1, "{name} {verb}, one line: {said}");
            let named = said.contains(&format!("{name}.toml"));
            assert!(named && said.contains(key), "{name} {verb} names file and {key}: {said}");
        }
    }
    let missing = smcgate(&hosts, "missing", &["run", "-c", "/nonexistent/smcgate.toml"]);
    assert_eq!(missing.status.code(), Some(2), "{}", missing.stderr);
    assert!(missing.stderr.contains("/nonexistent/smcgate.toml"), "{}", missing.stderr);
}

/// A gateway that gets SIGTERM must let its users finish.
// RFC 7609 4.8.3 #1: end connections on graceful shutdown
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_terminate_drains() {
    const BYTES: u64 = 32 << 20;
    let hosts = Hosts::new("smoke_terminate_drains");
    let mut pair = Pair::start(&hosts, &[PORT]);
    let listener = hosts.b.listen(local(PORT));
    let mut client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    set_limit(&client, LIMIT);
    let mut server = accept(&listener, LIMIT);
    assert_echo(&client, &server);
    // A connection attempt below may succeed before the gateway stops, and must then be accepted.
    drop(listener);

    thread::scope(|scope| {
        let arrived = scope.spawn(move || receive(&mut server));
        let first = send(&mut client, 1, BYTES).expect("the connection is up");
        pair.a.process.signal(Signal::TERM);
        wait_until("new connections are refused", LIMIT, || {
            hosts.a.connect(local(PORT)).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused)
        });
        assert!(pair.a.process.ended().is_none(), "left while a connection was in use");
        let second = send(&mut client, 2, BYTES).expect("the connection is still up");
        drop(client);
        let arrived = arrived.join().expect("receiving").expect("an end, not a reset");
        assert_eq!(arrived.bytes, first.bytes + second.bytes);
    });
    let status = pair.a.process.wait(LIMIT);
    assert_eq!(status.code(), Some(0), "{}", pair.a.process.log());
    // It ends its link groups, so that peers need not wait half a minute to notice its end.
    wait_until("gateway B gives up the link group", Duration::from_secs(15), || {
        pair.b.stats().link_groups.is_empty()
    });
}

/// A stop has a limit: a connection that does not end is reset when `drain_timeout` is over.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn drain_has_an_end() {
    let hosts = Hosts::new("drain_has_an_end");
    let b = Pair::server_side(&hosts, &[PORT]).start(&hosts, &hosts.b);
    let mut a = Setup::new("gateway-a", &hosts.a)
        .drain_timeout("1s")
        .towards(hosts.b.address, PORT)
        .start(&hosts, &hosts.a);
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    let server = accept(&listener, LIMIT);
    assert_echo(&client, &server);
    a.process.signal(Signal::TERM);
    for (mut end, whose) in [(&client, "client"), (&server, "server")] {
        let error = std::io::Read::read(&mut end, &mut [0]).expect_err("a reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{whose}");
    }
    a.process.wait(LIMIT);
    drop((client, server));
    b.holdings_at_rest();
}

/// An operator's limit must hold, and connections within it must not be disturbed.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn connection_limit_turns_newcomers_away() {
    const MOST: u32 = 8;
    let hosts = Hosts::new("connection_limit_turns_newcomers_away");
    let near = Pair::client_side(&hosts, &[PORT]).connections_max(MOST);
    let pair = Pair::start_these(&hosts, near, Pair::server_side(&hosts, &[PORT]));
    let listener = hosts.b.listen(local(PORT));
    let served = (0..MOST).map(|_| {
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        (client, accept(&listener, LIMIT))
    });
    let served: Vec<_> = served.collect();
    for _ in 0..3 {
        if let Ok(newcomer) = hosts.a.connect(local(PORT)) {
            assert!(!gets_echo(&newcomer), "one too many");
        }
    }
    for (client, server) in &served {
        assert_echo(client, server);
    }
    drop(served);
    wait_until("room again", SETTLE_LIMIT, || pair.a.stats().active.smc == 0);
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    assert_echo(&client, &accept(&listener, LIMIT));
}

/// When the memory for elements is used up, new connections stay TCP and an operator can see why.
/// Connections that have an element must not be disturbed, and when they end, their elements serve
/// others.
// RFC 7609 C.1 #2: decline for RNIC, policy, subnet, resources
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn memory_limit_leaves_newcomers_on_tcp() {
    const FITTING: usize = 3;
    let hosts = Hosts::new("memory_limit_leaves_newcomers_on_tcp");
    let near = Pair::client_side(&hosts, &[PORT]);
    let far = Pair::server_side(&hosts, &[PORT]).smc("rmbe_size = 65536\nrmbe_size_min = 65536");
    let far = far.rmb_bytes(u32::try_from(FITTING).expect("small") * 65_536);
    let pair = Pair::start_these(&hosts, near, far);
    let listener = hosts.b.listen(local(PORT));
    let connect = || {
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        (accept(&listener, LIMIT), client)
    };
    let mut served: Vec<_> = (0..FITTING + 2).map(|_| connect()).collect();
    for (server, client) in &served {
        assert_echo(client, server);
    }
    let stats = pair.b.stats();
    assert_eq!((stats.totals.connections_smc, stats.totals.connections_tcp), (3, 2));
    let [fallback] = &stats.fallbacks[..] else { panic!("one reason: {:?}", stats.fallbacks) };
    assert_eq!((fallback.code, fallback.count), (OUT_OF_MEMORY, 2), "{}", fallback.name);
    served.clear();
    wait_until("room again", SETTLE_LIMIT, || pair.b.stats().active.smc == 0);
    let (server, client) = connect();
    assert_echo(&client, &server);
    assert_eq!(pair.b.stats().totals.connections_smc, 4);
}

/// When descriptors are used up, a gateway must refuse new connections instead of leaving them
/// hanging, and must not disturb those that it serves.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn descriptor_limit_turns_newcomers_away() {
    let hosts = Hosts::new("descriptor_limit_turns_newcomers_away");
    let _b = Pair::server_side(&hosts, &[PORT]).start(&hosts, &hosts.b);
    let a = Setup::new("gateway-a", &hosts.a)
        .towards(hosts.b.address, PORT)
        .under(&["prlimit", "--nofile=96:96"])
        .start(&hosts, &hosts.a);
    let listener = hosts.b.listen(local(PORT));
    thread::scope(|scope| {
        // The server echoes on each connection that arrives. It ends when none arrives any more.
        scope.spawn(|| serve_echoes(&listener));
        // One after the other; then all at once, so that many wait while descriptors run out.
        for at_once in [1, 150] {
            let mut served: Vec<TcpStream> = Vec::new();
            let mut turned_away = 0;
            while served.len() + turned_away < 150 {
                let crowd: Vec<_> = (0..at_once).map(|_| hosts.a.connect(local(PORT))).collect();
                for newcomer in crowd {
                    match newcomer {
                        Err(error) => {
                            assert!(is_refusal(&error), "{error}");
                            turned_away += 1;
                        }
                        Ok(client) if gets_echo(&client) => served.push(client),
                        Ok(_) => turned_away += 1,
                    }
                }
            }
            let counts = (served.len(), turned_away);
            assert!(counts.0 > 0 && counts.1 > 0, "{counts:?}, {at_once} at once");
            for client in &served {
                assert!(gets_echo(client), "a connection that was served before");
            }
            drop(served);
            wait_until("room again", SETTLE_LIMIT, || a.stats().active.smc == 0);
        }
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens again");
        assert!(gets_echo(&client), "a newcomer after the crowds");
    });
}

/// Serves each connection in a thread until it ends; returns when none came for a while.
fn serve_echoes(listener: &std::net::TcpListener) {
    socket2::SockRef::from(listener).set_read_timeout(Some(LIMIT)).expect("an open socket");
    thread::scope(|scope| {
        while let Ok((stream, _)) = listener.accept() {
            scope.spawn(move || drop(std::io::copy(&mut &stream, &mut &stream)));
        }
    });
}

/// Whether a byte comes back.
///
/// # Panics
///
/// If neither the byte nor the end of the connection comes: the client was left hanging.
fn gets_echo(mut client: &TcpStream) -> bool {
    use std::io::{Read, Write};
    set_limit(client, Duration::from_secs(8));
    let mut byte = [0];
    match client.write_all(&[1]).and_then(|()| client.read(&mut byte)) {
        Ok(count) => count == 1,
        Err(error) => {
            assert_ne!(error.kind(), ErrorKind::WouldBlock, "left hanging");
            false
        }
    }
}

/// If eBPF is denied, the gateway must still relay over TCP, and say what it cannot do.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_without_privilege() {
    let hosts = Hosts::new("smoke_without_privilege");
    let _b = Pair::server_side(&hosts, &[PORT]).start(&hosts, &hosts.b);
    let a = Setup::new("gateway-a", &hosts.a)
        .towards(hosts.b.address, PORT)
        .under(&["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"])
        .start(&hosts, &hosts.a);
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    assert_echo(&client, &accept(&listener, LIMIT));
    let stats = a.stats();
    assert_eq!((stats.totals.connections_smc, stats.totals.connections_tcp), (0, 1));
    assert_eq!(stats.fallbacks.iter().map(|reason| reason.count).sum::<u64>(), 1);
    let said = a.process.log().to_lowercase();
    assert!(said.contains("ebpf") && said.contains("option"), "what is missing: {said}");
}

/// An operator who looks for a slow connection must see each one, and its transport.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_operators_see_connections() {
    let hosts = Hosts::new("smoke_operators_see_connections");
    let pair = Pair::start(&hosts, &[PORT]);
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    let server = accept(&listener, LIMIT);
    assert_echo(&client, &server);

    let app = client.local_addr().expect("an open socket").to_string();
    for query in ["/connections", "/connections?transport=smc-r", "/connections?listener=port-7010"]
    {
        let page: Value = serde_json::from_str(&pair.a.get(query)).expect("JSON");
        let [row] = &page["connections"].as_array().expect("rows")[..] else { panic!("{page}") };
        let seen = (&row["transport"], &row["listener"], &row["app"]);
        assert_eq!(seen, (&json!("smc-r"), &json!("port-7010"), &json!(app)), "{page}");
    }
    let none: Value =
        serde_json::from_str(&pair.a.get("/connections?transport=tcp")).expect("JSON");
    assert_eq!(none["connections"], json!([]));

    let metrics = pair.a.get("/metrics");
    assert!(metrics.contains("smcgate_poller_stage_seconds_bucket{"), "{metrics}");
    pair.a.get("/healthz");
    assert!(pair.a.get("/").contains("<html"), "a page for people");
    let table = smcgate(&hosts, "conns", &["conns"]).expect_success("smcgate conns");
    assert!(table.contains(&app), "{table}");
    let stats = smcgate(&hosts, "stats", &["stats", "--json"]).expect_success("smcgate stats");
    let stats: Value = serde_json::from_str(&stats).expect("--json prints JSON");
    assert_eq!(stats["active"]["smc"], json!(1));
    let group = &stats["link_groups"][0];
    assert_eq!((&group["role"], &group["connections"]), (&json!("client"), &json!(1)), "{stats}");
    let stage = |name: &str| stats["pollers"][0]["stages"][name]["p50_ns"].as_u64();
    for name in ["read_to_posted", "posted_to_acknowledged", "announced_to_written"] {
        assert!(stage(name).is_some_and(|nanos| (1..1_000_000_000).contains(&nanos)), "{stats}");
    }
}

/// `doctor`, the operator's first command on a new host, must say that it can run a gateway.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_doctor() {
    let hosts = Hosts::new("smoke_doctor");
    let mut command = Command::new(program());
    command.args(["doctor", "--json"]);
    let report = run(&hosts, &hosts.a, "doctor", LIMIT, &mut command).expect_success("doctor");
    let _: Value = serde_json::from_str(&report).expect("--json prints JSON");
    let words = smcgate(&hosts, "doctor-words", &["doctor"]).expect_success("doctor");
    assert!(words.to_lowercase().contains("option"), "{words}");
}

/// A `.socket` unit has listened for us until we came: those who wait are served, and those who
/// come later have SMC-R, although the socket was made by another service.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_socket_that_was_passed_answers_peers() {
    const PASS: &str = "import os,socket,sys,time
mounts=[l.split(' ')[4] for l in open('/proc/self/mountinfo') if ' - cgroup2 ' in l]
mount=mounts[0]
own=mount+open('/proc/self/cgroup').read().split('0::')[1].strip()
unit=mount+'/smcgate-e2e-socket-%d'%os.getpid()
os.mkdir(unit)
open(unit+'/cgroup.procs','w').write(str(os.getpid()))
s=socket.create_server(('10.8.0.2',7010))
open(own+'/cgroup.procs','w').write(str(os.getpid()))
os.rmdir(unit)
open(sys.argv[1],'w').write('bound')
while s.fileno()!=3: s=socket.socket(fileno=os.dup(s.fileno()))
os.set_inheritable(3,True)
while not os.path.exists(sys.argv[1]+'.go'): time.sleep(.01)
os.environ.update(LISTEN_FDS='1',LISTEN_PID=str(os.getpid()))
os.execvp(sys.argv[2],sys.argv[2:])";
    let hosts = Hosts::new("a_socket_that_was_passed_answers_peers");
    let a = Pair::client_side(&hosts, &[PORT]).start(&hosts, &hosts.a);
    let listener = hosts.b.listen(local(PORT));
    let bound = hosts.logs.join("bound");
    let path = bound.to_str().expect("our own paths are text");
    let far = Pair::server_side(&hosts, &[PORT]).under(&["python3", "-c", PASS, path]);
    thread::scope(|scope| {
        let early = scope.spawn(|| {
            wait_until("the socket is bound", LIMIT, || bound.exists());
            let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
            set_limit(&client, LIMIT);
            wait_until("it waits to be accepted", LIMIT, || a.stats().totals.connections_tcp == 1);
            fs::write(format!("{path}.go"), "").expect("the folder is ours");
            client
        });
        let b = far.start(&hosts, &hosts.b);
        let early = early.join().expect("it connects");
        assert_echo(&early, &accept(&listener, LIMIT));
        for _ in 0..3 {
            let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
            set_limit(&client, LIMIT);
            assert_echo(&client, &accept(&listener, LIMIT));
        }
        let totals = [a.stats().totals, b.stats().totals];
        let seen = totals.map(|it| [it.connections_smc, it.connections_tcp]);
        assert_eq!(seen, [[3, 1]; 2], "{}", b.process.log());
    });
}

/// Binds a socket of this address, passes it to the program that follows, and holds it as long as
/// that lives.
const PASS_AND_KEEP: &str = "import os,socket,sys,time
s=socket.create_server((sys.argv[1],7010))
us=os.getpid()
if os.fork()==0:
    while os.getppid()==us: time.sleep(.02)
    os._exit(0)
while s.fileno()!=3: s=socket.socket(fileno=os.dup(s.fileno()))
os.set_inheritable(3,True)
os.environ.update(LISTEN_FDS='1',LISTEN_PID=str(us))
os.execvp(sys.argv[2],sys.argv[2:])";

/// Whoever has bound a socket for us holds it as well, so that a drain closes nothing: clients were
/// let in by the kernel and waited for ever, and the address was taken for the listener itself when
/// it was to come back.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_socket_that_was_passed_refuses_while_drained_and_comes_back() {
    let hosts = Hosts::new("a_socket_that_was_passed_refuses_while_drained_and_comes_back");
    let _b = Pair::server_side(&hosts, &[PORT, PORT + 1]).start(&hosts, &hosts.b);
    let near = |ports: &[u16]| Pair::client_side(&hosts, ports);
    let passed = near(&[PORT, PORT + 1]).under(&["python3", "-c", PASS_AND_KEEP, "127.0.0.1"]);
    let a = passed.start(&hosts, &hosts.a);
    let listener = hosts.b.listen(local(PORT));
    let is_served = || {
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        set_limit(&client, LIMIT);
        assert_echo(&client, &accept(&listener, LIMIT));
    };
    let is_refused = || {
        // The reset may come before the connection is known to be there.
        let client = hosts.a.connect(local(PORT));
        let read = client.and_then(|client| {
            set_limit(&client, LIMIT);
            (&client).read(&mut [0])
        });
        let error = read.expect_err("nobody serves it");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    };
    let put = |ports: &[u16]| {
        fs::write(hosts.logs.join("gateway-a.toml"), near(ports).text()).expect("ours");
        smcgate(&hosts, "reload", &["reload"]).expect_success("reload");
    };
    for _ in 0..2 {
        is_served();
        smcgate(&hosts, "drain", &["drain"]).expect_success("drain");
        is_refused();
        smcgate(&hosts, "undrain", &["undrain"]).expect_success("undrain");
        is_served();
        put(&[PORT + 1]);
        is_refused();
        put(&[PORT, PORT + 1]);
    }
    is_served();
    smcgate(&hosts, "drain", &["drain", "--listener", "port-7010"]).expect_success("drain");
    is_refused();
    drop(a);
}

/// A gateway that stops leaves a passed socket to its successor. What comes meanwhile must not be
/// told that SMC-R is spoken there: a peer sent its Proposal, which nobody answered, or which the
/// successor handed to the server as data.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_socket_that_was_passed_offers_nothing_while_the_gateway_stops() {
    let hosts = Hosts::new("a_socket_that_was_passed_offers_nothing_while_the_gateway_stops");
    let far = Pair::server_side(&hosts, &[PORT]);
    let far = far.under(&["python3", "-c", PASS_AND_KEEP, "10.8.0.2"]);
    let Pair { a, b } = Pair::start_these(&hosts, Pair::client_side(&hosts, &[PORT]), far);
    let listener = hosts.b.listen(local(PORT));
    let first = hosts.a.connect(local(PORT)).expect("the gateway listens");
    set_limit(&first, LIMIT);
    let server = accept(&listener, LIMIT);
    assert_echo(&first, &server);
    b.process.signal(Signal::TERM);
    wait_until("it stops", LIMIT, || b.process.log().contains("stopping"));
    let _late = hosts.a.connect(local(PORT)).expect("the gateway listens");
    wait_until("it is decided", LIMIT, || {
        let totals = a.stats().totals;
        totals.connections_tcp + totals.handshakes_failed > 0
    });
    let totals = a.stats().totals;
    assert_eq!((totals.connections_tcp, totals.handshakes_failed), (1, 0));
    assert_echo(&first, &server);
}

/// A socket that was passed and for which no listener is configured, which blocks, as those of
/// systemd do: the control thread waited there for a second connection, and did nothing else.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_socket_that_was_passed_for_nobody_refuses_and_holds_nobody_up() {
    let hosts = Hosts::new("a_socket_that_was_passed_for_nobody_refuses_and_holds_nobody_up");
    let _b = Pair::server_side(&hosts, &[PORT + 1]).start(&hosts, &hosts.b);
    let near = Pair::client_side(&hosts, &[PORT + 1]);
    let a = near.under(&["python3", "-c", PASS_AND_KEEP, "127.0.0.1"]).start(&hosts, &hosts.a);
    let listener = hosts.b.listen(local(PORT + 1));
    for _ in 0..3 {
        let client = hosts.a.connect(local(PORT));
        let read = client.and_then(|client| {
            set_limit(&client, LIMIT);
            (&client).read(&mut [0])
        });
        assert_eq!(read.expect_err("nobody serves it").kind(), ErrorKind::ConnectionReset);
        let client = hosts.a.connect(local(PORT + 1)).expect("the gateway listens");
        set_limit(&client, LIMIT);
        assert_echo(&client, &accept(&listener, LIMIT));
    }
    assert_eq!(a.stats().totals.connections_smc, 3);
}
