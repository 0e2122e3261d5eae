//! What is written about connections that are over.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::clock::{wait_for, wait_until};
use crate::gateway::{Gateway, Pair, Setup, local, smcgate};
use crate::hosts::{Hosts, accept, set_limit};

const PORT: u16 = 7010;
/// Nobody listens there.
const NOBODY: u16 = 7011;
const LIMIT: Duration = Duration::from_secs(15);

/// A table `[access_log]` that writes to this path.
fn table(to: &str, path: &Path, more: &str) -> String {
    format!("[access_log]\nto = \"{to}\"\npath = \"{}\"\n{more}\n", path.display())
}

/// A client on host a asks, a server on host b answers with `answer`, and the client ends first.
fn exchange(hosts: &Hosts, port: u16, answer: &[u8]) {
    let listener = hosts.b.listen(local(port));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut server = accept(&listener, LIMIT);
            server.read_exact(&mut [0; 5]).expect("a question");
            server.write_all(answer).expect("the client reads");
            assert_eq!(server.read(&mut [0]).expect("the end"), 0);
        });
        let mut client = hosts.a.connect(local(port)).expect("the gateway listens");
        set_limit(&client, LIMIT);
        client.write_all(b"hello").expect("the server reads");
        client.read_exact(&mut vec![0; answer.len()]).expect("an answer");
        client.shutdown(std::net::Shutdown::Write).expect("it is open");
        assert_eq!(client.read(&mut [0]).expect("the end"), 0);
    });
}

/// A connection to this port is reset.
fn refused(hosts: &Hosts, port: u16) {
    let outcome = hosts.a.connect(local(port)).and_then(|mut client| {
        set_limit(&client, LIMIT);
        client.read(&mut [0])
    });
    let error = outcome.expect_err("nobody is there");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// The lines of a log, as soon as there are so many.
fn lines(path: &Path, count: usize) -> Vec<Value> {
    let text = wait_for("so many lines", LIMIT, || {
        let text = fs::read_to_string(path).unwrap_or_default();
        (text.lines().count() >= count).then_some(text)
    });
    text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

fn total(gateway: &Gateway<'_>, name: &str) -> u64 {
    let stats: Value = serde_json::from_str(&gateway.get("/stats")).expect("JSON");
    stats["totals"][name].as_u64().expect("a number")
}

/// An operator reads afterwards who was connected, by what, for how long, and why it ended; the
/// gateways at both ends say the same. A rotation loses no line.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn each_connection_has_a_line_that_says_how_it_went() {
    let hosts = Hosts::new("each_connection_has_a_line_that_says_how_it_went");
    let [near, far] = ["near.log", "far.log"].map(|name| hosts.logs.join(name));
    for path in [&near, &far] {
        drop(fs::remove_file(path));
    }
    // The server's host has no gateway in front of NOBODY, and does not speak SMC-R there.
    let a = Pair::client_side(&hosts, &[PORT]).towards(hosts.b.address, NOBODY);
    let a = a.table(&table("file", &near, ""));
    let b = Pair::server_side(&hosts, &[PORT]).table(&table("file", &far, ""));
    let pair = Pair::start_these(&hosts, a, b);

    exchange(&hosts, PORT, b"0123456789");
    let [smc, seen_by_b] = [&near, &far].map(|path| lines(path, 1).remove(0));
    assert_eq!((&smc["transport"], &smc["end"]), (&"smc-r".into(), &"closed".into()), "{smc}");
    assert_eq!((&smc["by"], &smc["listener"]), (&"client".into(), &"port-7010".into()), "{smc}");
    assert_eq!((&smc["bytes_in"], &smc["bytes_out"]), (&5.into(), &10.into()), "{smc}");
    assert!(smc["link_group"].is_u64() && smc["reason"].is_null(), "{smc}");
    assert_eq!(smc["target"], "10.8.0.2:7010");
    let time = |line: &Value, name: &str| line[name].as_f64().expect(name);
    let times = ["setup_ms", "first_byte_ms", "duration_ms"].map(|name| time(&smc, name));
    assert!(times[0] > 0.0 && times.is_sorted(), "{smc}");
    // The server's gateway has the server beside it, so it reads what that one says.
    assert_eq!((&seen_by_b["bytes_in"], &seen_by_b["by"]), (&10.into(), &"client".into()));
    assert!(time(&seen_by_b, "first_byte_ms") > 0.0, "{seen_by_b}");

    // Without a server: refused. With one that has no SMC-R: TCP, and why.
    refused(&hosts, NOBODY);
    let moved = hosts.logs.join("near.log.1");
    let vain = lines(&near, 2).remove(1);
    assert_eq!((&vain["end"], &vain["by"]), (&"upstream-refused".into(), &"server".into()));
    assert_eq!((&vain["transport"], &vain["target"]), (&Value::Null, &"10.8.0.2:7011".into()));

    fs::rename(&near, &moved).expect("it is there");
    pair.a.process.signal(Signal::USR1);
    wait_for("the file is opened again", LIMIT, || near.exists().then_some(()));
    server_without_gateway(&hosts);
    let tcp = lines(&near, 1).remove(0);
    assert_eq!((&tcp["transport"], &tcp["reason"]), (&"tcp".into(), &"NO_SMC_OPTION".into()));
    assert_eq!((&tcp["code"], &tcp["end"]), (&"0x03010000".into(), &"reset".into()), "{tcp}");
    assert_eq!((&tcp["by"], &tcp["bytes_out"]), (&"server".into(), &3.into()), "{tcp}");
    assert_eq!(lines(&moved, 2).len(), 2, "what was moved is left alone");
    // It is counted when it is written, so after it can be read.
    wait_until("all are counted", LIMIT, || total(&pair.a, "access_log_written") == 3);
    assert_eq!(total(&pair.a, "access_log_dropped"), 0);
}

/// A server that says three bytes, and resets the connection.
fn server_without_gateway(hosts: &Hosts) {
    let listener = hosts.b.listen(hosts.b.at(NOBODY));
    let mut client = hosts.a.connect(local(NOBODY)).expect("the gateway listens");
    set_limit(&client, LIMIT);
    let mut server = accept(&listener, LIMIT);
    server.write_all(b"abc").expect("it is open");
    client.read_exact(&mut [0; 3]).expect("three bytes");
    let server = socket2::Socket::from(server);
    server.set_linger(Some(Duration::ZERO)).expect("it is open");
    drop(server);
    let error = client.read(&mut [0]).expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// A file system of so many KiB, unmounted when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: PathBuf, kib: u32) -> Self {
        fs::create_dir_all(&at).expect("the folder is ours");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={kib}k"), "none"]).arg(&at);
        assert!(mount.status().expect("mount is there").success());
        Self(at)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("--lazy").arg(&self.0).status());
    }
}

/// A disk that is full costs lines and no connection. As soon as there is room, lines are written
/// again, and none of them is torn.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_full_disk_costs_lines_and_no_connection() {
    let hosts = Hosts::new("a_full_disk_costs_lines_and_no_connection");
    let disk = SmallDisk::mount(hosts.logs.join("disk"), 16);
    let path = disk.0.join("access.log");
    let setup = Setup::new("gateway-a", &hosts.a);
    let setup = setup.listener((local(PORT), "tcp"), (local(PORT + 1), "tcp"));
    let gateway = setup.table(&table("file", &path, "")).start(&hosts, &hosts.a);
    let listener = hosts.a.listen(local(PORT + 1));
    let talk = || {
        let mut client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        set_limit(&client, LIMIT);
        let mut server = accept(&listener, LIMIT);
        client.write_all(b"x").expect("it is open");
        server.read_exact(&mut [0]).expect("a byte comes through");
    };
    (0..100).for_each(|_| talk());
    let dropped = wait_for("all are counted", LIMIT, || {
        let [written, dropped] =
            ["access_log_written", "access_log_dropped"].map(|name| total(&gateway, name));
        (written + dropped == 100).then_some(dropped)
    });
    assert!(dropped > 0, "16 KiB are not enough for a hundred lines");
    let whole = lines(&path, 1);
    assert_eq!(whole.len() as u64, 100 - dropped, "and none is torn");
    assert!(gateway.process.log().contains("lines of the access log are dropped"));
    let metrics = gateway.get("/metrics");
    assert!(metrics.contains(&format!("smcgate_access_log_dropped_total {dropped}\n")));
    // Somebody makes room.
    fs::write(&path, "").expect("it is there");
    talk();
    assert_eq!(lines(&path, 1).len(), 1);
}

/// What is in the way of the log for a while keeps no gateway from its start: systemd starts none
/// again whose configuration is wrong. And a gateway that does not start, or stays as it was,
/// leaves no file behind.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_log_that_nobody_takes_yet_keeps_no_gateway_from_its_work() {
    let hosts = Hosts::new("a_log_that_nobody_takes_yet_keeps_no_gateway_from_its_work");
    let setup = |name: &str, device: &str, path: &Path| {
        let setup = Setup::on_device(name, device, "");
        let setup = setup.listener((local(PORT), "tcp"), (local(NOBODY), "tcp"));
        setup.table(&table("file", path, ""))
    };
    let [pipe, log] = ["pipe", "log"].map(|name| hosts.logs.join(name));
    for path in [&pipe, &log] {
        drop(fs::remove_file(path));
    }
    let (code, said) = setup("in-vain", "nowhere7", &log).start_in_vain(&hosts, &hosts.a);
    assert_eq!(code, Some(1), "{said}");
    assert!(!log.exists(), "{said}");

    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, 0o600.into()).expect("the folder is ours");
    let gateway = setup("gateway-a", hosts.a.device, &pipe).start(&hosts, &hosts.a);
    refused(&hosts, PORT);
    wait_for("it is counted", LIMIT, || (total(&gateway, "access_log_dropped") == 1).then_some(()));
    let reader = fs::OpenOptions::new().read(true).write(true).open(&pipe).expect("it is there");
    refused(&hosts, PORT);
    wait_for("it is written", LIMIT, || (total(&gateway, "access_log_written") == 1).then_some(()));
    drop(reader);

    let elsewhere = tempfile::tempdir().expect("there is room");
    let elsewhere = elsewhere.path().join("log");
    let text = setup("gateway-a", hosts.a.device, &elsewhere).text();
    fs::write(hosts.logs.join("gateway-a.toml"), text).expect("the folder is ours");
    let reload = smcgate(&hosts, "reload", &["reload"]);
    assert_eq!(reload.status.code(), Some(1), "{}", reload.stderr);
    assert!(reload.stderr.contains("restart"), "{}", reload.stderr);
    assert!(!elsewhere.exists(), "{}", reload.stderr);
}

/// Syslog and the journal get what they expect, and a reload moves the log from one to the other.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn daemons_get_lines_and_a_reload_moves_the_log() {
    let hosts = Hosts::new("daemons_get_lines_and_a_reload_moves_the_log");
    // The path of a socket must be short.
    let folder = tempfile::tempdir().expect("there is room");
    let [log, journal] = ["syslog", "journal"].map(|name| folder.path().join(name));
    let daemons =
        [&log, &journal].map(|path| UnixDatagram::bind(path).expect("the folder is ours"));
    let start = |table: &str| {
        let text = format!(
            "[admin]\nlisten = \"127.0.0.1:9180\"\n[[listener]]\nname = \"it\"\n\
             bind = \"{}\"\nupstream = \"{}\"\n{table}",
            local(PORT),
            local(NOBODY)
        );
        Setup::of_text("gateway-a", &text)
    };
    let gateway = start(&table("syslog", &log, "format = \"it %{end}\"")).start(&hosts, &hosts.a);
    let heard = |daemon: &UnixDatagram| {
        daemon.set_read_timeout(Some(LIMIT)).expect("it is open");
        refused(&hosts, PORT);
        let mut bytes = [0; 4096];
        let len = daemon.recv(&mut bytes).expect("a message");
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    let message = heard(&daemons[0]);
    assert!(message.starts_with("<134>"), "{message}");
    assert!(message.ends_with("]: it upstream-refused"), "{message}");
    let file = hosts.logs.join("gateway-a.toml");
    let config = fs::read_to_string(&file).expect("just written");
    let moved = config.replace("\"syslog\"", "\"journald\"");
    let moved = moved.replace(log.to_str().expect("text"), journal.to_str().expect("text"));
    fs::write(&file, moved).expect("the folder is ours");
    let said = smcgate(&hosts, "reload", &["reload"]).expect_success("reload");
    assert!(said.contains("access_log: changed"), "{said}");
    let message = heard(&daemons[1]);
    assert!(message.starts_with("MESSAGE=it upstream-refused\nPRIORITY=6\n"), "{message}");
    assert!(message.contains("\nSMCGATE_LISTENER=it\n"), "{message}");
    // A place that cannot be opened leaves everything as it was.
    let wrong = config.replace("\"syslog\"", "\"file\"");
    let wrong = wrong.replace(log.to_str().expect("text"), "/no/such/folder/log");
    fs::write(&file, wrong).expect("the folder is ours");
    let said = smcgate(&hosts, "reload-wrong", &["reload"]);
    assert!(!said.status.success() && said.stderr.contains("/no/such/folder"), "{}", said.stderr);
    assert!(heard(&daemons[1]).contains("upstream-refused"));
    drop(gateway);
}
