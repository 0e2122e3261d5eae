//! The program from outside: exit codes and output, which scripts rely on.

use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

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
    for (arguments, expected, word) in [
        (&["stats", "--admin", &free][..], 1, free.as_str()),
        (&["conns", "--admin", &free], 1, "nobody listens"),
        (&["decode", "/nonexistent.pcap"], 1, "/nonexistent.pcap"),
        (&["decode", &config], 1, "neither a pcap nor a pcapng"),
        (&["run", "-c", &config], 2, "bind"),
        (&["check", "-c", &config], 2, "bind"),
        (&["stats", "-c", &config], 2, "bind"),
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
