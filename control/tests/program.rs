//! The program from outside: exit codes and output, which scripts rely on.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

fn smcgate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_smcgate"))
        .args(arguments)
        .output()
        .expect("the program was built")
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("no signal ended it")
}

fn vector() -> String {
    let vector = "../tests/vectors/pcap/linux-6.12-v2-first-contact.pcap";
    Path::new(env!("CARGO_MANIFEST_DIR")).join(vector).display().to_string()
}

/// A failure is one line on standard error, and its code says whether to fix the call or the world.
#[test]
fn failures_are_one_line_and_a_code() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut config = tempfile::NamedTempFile::new().unwrap();
    config.write_all(b"[[listener]]\nname = \"x\"\nbind = \"nowhere\"\n").unwrap();
    let config = config.path().display().to_string();
    let port = free.rsplit(':').next().unwrap();
    let mut circle = tempfile::NamedTempFile::new().unwrap();
    writeln!(circle, "[[listener]]\nname = \"x\"\nbind = \"0.0.0.0:{}\"", port).unwrap();
    writeln!(circle, "upstream = \"127.0.0.1:{}\"", port).unwrap();
    let circle_path = circle.path().display().to_string();
    for (arguments, expected, word) in [
        (&["stats", "--admin", &free][..], 1, free.as_str()),
        (&["conns", "--admin", &free], 1, "nobody listens"),
        (&["decode", "/nonexistent.pcap"], 1, "/nonexistent.pcap"),
        (&["decode", &config], 1, "neither a pcap nor a pcapng"),
        (&["run", "-c", &config], 2, "bind"),
        (&["check", "-c", &config], 2, "bind"),
        (&["run", "-c", &circle_path], 2, ":4: listener.x.upstream"),
        (&["check", "-c", &circle_path], 2, ":4: listener.x.upstream"),
        (&["stats", "-c", &config], 2, "bind"),
        (&["top", "--admin", &free], 2, "needs a terminal"),
    ] {
        let output = smcgate(arguments);
        let stderr = String::from_utf8(output.stderr.clone()).unwrap();
        assert_eq!(code(&output), expected, "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{arguments:?}: {stderr}");
        assert!(stderr.contains(word), "{arguments:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

/// `--json` gives one object per line, `--messages` leaves out what is only RDMA.
#[test]
fn decode_prints_lines_or_json() {
    let text = smcgate(&["decode", "--messages", &vector()]);
    assert_eq!(code(&text), 0);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains(" CDC seq 1 ") && !text.contains(" ACK "), "{text}");

    let json = smcgate(&["decode", "--json", &vector()]);
    assert_eq!(code(&json), 0);
    let json = String::from_utf8(json.stdout).unwrap();
    let objects = json.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let cdc = objects.into_iter().find(|object| object["message"] == "CDC").unwrap();
    assert_eq!((&cdc["seq"], &cdc["producer"]), (&1.into(), &"0:37".into()));
}

/// A capture cut short shows what it has, and still fails: a script must not take it for all.
#[test]
fn a_damaged_capture_is_shown_and_fails() {
    let whole = std::fs::read(vector()).unwrap();
    let mut cut = tempfile::NamedTempFile::new().unwrap();
    cut.write_all(&whole[..whole.len() - 7]).unwrap();
    let output = smcgate(&["decode", &cut.path().display().to_string()]);
    assert_eq!(code(&output), 1);
    assert!(String::from_utf8(output.stdout).unwrap().contains("CLC PROPOSAL"));
    assert!(String::from_utf8(output.stderr).unwrap().contains("damaged behind frame 59"));
}

/// `smcgate decode FILE | head -1` is no failure.
#[test]
fn a_reader_that_stops_early_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_smcgate"))
        .args(["decode", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    child.stdin.take().unwrap().write_all(&std::fs::read(vector()).unwrap()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((code(&output), output.stderr), (0, Vec::new()));
}

/// A gateway with a connection that its application does not end, until the test does.
struct Busy {
    gateway: Child,
    application: TcpStream,
    server: TcpStream,
    _config: tempfile::NamedTempFile,
}

impl Busy {
    fn new() -> Self {
        let upstream = TcpListener::bind("127.0.0.1:0").expect("as on any host");
        let place = TcpListener::bind("127.0.0.1:0")
            .expect("as on any host")
            .local_addr()
            .expect("as on any host");
        let mut config = tempfile::NamedTempFile::new().expect("as on any host");
        let target = upstream.local_addr().expect("as on any host");
        writeln!(
            config,
            "drain_timeout = \"60s\"\n[admin]\nlisten = \"none\"\n[poll]\npolicy = \"block\"\n\
             pin = false\n[[listener]]\nname = \"it\"\nbind = \"{place}\"\nupstream = \"{target}\""
        )
        .expect("as on any host");
        // Whoever runs the tests may ignore SIGHUP (`nohup`), and then so would the gateway.
        let gateway = Command::new("env")
            .args(["--default-signal=HUP", env!("CARGO_BIN_EXE_smcgate")])
            .args(["run", "-c", &config.path().display().to_string()])
            .stderr(Stdio::null())
            .spawn()
            .expect("as on any host");
        let application = (0..500).find_map(|_| {
            std::thread::sleep(Duration::from_millis(20));
            TcpStream::connect(place).ok()
        });
        let mut application = application.expect("the gateway listens");
        application.set_read_timeout(Some(Duration::from_secs(10))).expect("as on any host");
        let (mut server, _) = upstream.accept().expect("as on any host");
        application.write_all(b"x").expect("as on any host");
        server.read_exact(&mut [0]).expect("as on any host");
        Self { gateway, application, server, _config: config }
    }

    fn signal(&self, signal: Signal) {
        let id = Pid::from_raw(i32::try_from(self.gateway.id()).expect("as on any host"))
            .expect("as on any host");
        kill_process(id, signal).expect("as on any host");
        std::thread::sleep(Duration::from_millis(400));
    }

    /// Whether it ends soon, and how.
    fn ends(&mut self) -> Option<i32> {
        (0..250).find_map(|_| {
            std::thread::sleep(Duration::from_millis(20));
            self.gateway
                .try_wait()
                .expect("as on any host")
                .map(|status| status.code().expect("no signal did it"))
        })
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.gateway.kill();
        let _ = self.gateway.wait();
    }
}

/// Who asks a second time does not want to wait for connections that may last for days. Only
/// SIGKILL was left, after which peers have to find out by themselves.
#[test]
fn a_second_signal_ends_what_the_first_waits_for() {
    let mut busy = Busy::new();
    busy.signal(Signal::TERM);
    assert_eq!(busy.gateway.try_wait().unwrap(), None, "its connection may finish");
    busy.signal(Signal::TERM);
    assert_eq!(busy.ends(), Some(0));
    assert!(busy.application.read(&mut [0]).is_err(), "it is reset");
}

/// A gateway whose terminal is closed was killed, and every connection with it. Now it goes on, and
/// has read its configuration again.
#[test]
fn a_gateway_that_loses_its_terminal_goes_on() {
    let mut busy = Busy::new();
    busy.signal(Signal::HUP);
    assert_eq!(busy.gateway.try_wait().unwrap(), None, "it goes on");
    busy.application.write_all(b"x").unwrap();
    busy.server.read_exact(&mut [0]).unwrap();
    busy.signal(Signal::TERM);
    busy.application.shutdown(Shutdown::Write).unwrap();
    busy.server.shutdown(Shutdown::Write).unwrap();
    assert_eq!(busy.ends(), Some(0));
}

/// A name may come to mean this host itself: the first connection must not take all descriptors of
/// the gateway, one connection of its own after the other.
#[test]
fn a_name_that_leads_back_to_its_listener_is_refused() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut config = tempfile::NamedTempFile::new().unwrap();
    let port = free.port();
    writeln!(
        config,
        "[admin]\nlisten = \"none\"\n[poll]\npolicy = \"block\"\npin = false\n[[listener]]\n\
         name = \"it\"\nbind = \"0.0.0.0:{port}\"\nupstream = \"localhost:{port}\""
    )
    .unwrap();
    let mut gateway = Command::new(env!("CARGO_BIN_EXE_smcgate"))
        .args(["run", "-c", &config.path().display().to_string()])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let application = (0..500).find_map(|_| {
        std::thread::sleep(Duration::from_millis(20));
        TcpStream::connect(free).ok()
    });
    let mut application = application.expect("the gateway listens");
    application.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let outcome = application.read(&mut [0]).map_err(|error| error.kind());
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", gateway.id())).unwrap().count();
    gateway.kill().unwrap();
    gateway.wait().unwrap();
    assert_eq!(outcome, Err(std::io::ErrorKind::ConnectionReset));
    assert!(descriptors < 100, "{descriptors}");
}

/// What an editor shows as wrong, or as right, must be so: a judge from elsewhere, with a reader of
/// TOML of its own, takes all configurations that we publish and refuses a slip of the pen.
#[test]
fn published_configurations_are_right_by_the_schema_and_by_the_reader() {
    const JUDGE: &str = "import json, jsonschema, sys, tomllib\n\
        schema = json.load(open(sys.argv[1]))\n\
        jsonschema.Draft202012Validator.check_schema(schema)\n\
        jsonschema.validate(tomllib.load(open(sys.argv[2], 'rb')), schema)\n";
    let directory = tempfile::tempdir().unwrap();
    let [schema, file] = ["schema.json", "a.toml"].map(|name| directory.path().join(name));
    std::fs::write(&schema, smcgate(&["schema"]).stdout).unwrap();
    let judge = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let arguments = ["-c", JUDGE].map(std::ffi::OsStr::new);
        let mut judge = Command::new("/usr/bin/python3");
        judge.args(arguments).arg(&schema).arg(&file).output().expect("python3 starts")
    };
    let read = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
        std::fs::read_to_string(path).expect(name)
    };
    let readme = read("README.md");
    let blocks = readme.split("```toml\n").skip(1);
    let blocks = blocks.map(|rest| rest.split("```").next().expect("it has a beginning"));
    let listener = "[[listener]]\nname = \"x\"\nbind = \"127.0.0.1:1\"\nupstream = \"x:1\"\n";
    let mut published: Vec<String> = blocks.map(str::to_owned).collect();
    // Parts of a configuration.
    for block in published.iter_mut().filter(|block| !block.contains("[[listener]]")) {
        block.push_str(listener);
    }
    published.push(read("packaging/debian/smcgate.toml"));
    let manifest = read("packaging/kubernetes/smcgate.yaml");
    let (_, inside) = manifest.split_once("  smcgate.toml: |\n").expect("it has one");
    let inside = inside.split("---").next().expect("it has a beginning");
    published.push(inside.lines().map(|line| format!("{}\n", line.trim_start())).collect());
    assert!(published.len() > 10, "{}", published.len());
    for text in &published {
        let verdict = judge(text);
        let said = String::from_utf8_lossy(&verdict.stderr);
        assert!(verdict.status.success(), "{text}\n{said}");
        let checked = smcgate(&["check", "-c", &file.display().to_string()]);
        let said = String::from_utf8_lossy(&checked.stderr);
        // Names and devices are not there, but nobody complains of the file.
        assert_ne!(code(&checked), 2, "{text}\n{said}");
    }
    for wrong in ["upstraem = \"y:1\"", "backlog = 0", "connect_timeout = 5", "accept = \"udp\""] {
        let verdict = judge(&format!("{listener}{wrong}\n"));
        assert!(!verdict.status.success(), "{wrong}");
        assert!(String::from_utf8_lossy(&verdict.stderr).contains("ValidationError"), "{wrong}");
    }
}
