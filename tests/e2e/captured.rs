//! `smcgate capture`, as Wireshark understands it.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use crate::clock::wait_until;
use crate::gateway::{Pair, Setup, local, program, smcgate};
use crate::hosts::{Hosts, accept, set_limit};
use crate::process::{Process, run};
use crate::transfer::transfer_both_ways;

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(15);

/// A capture on host a that goes on until it is stopped.
struct Capturing {
    client: Process,
    file: PathBuf,
}

impl Capturing {
    fn start(hosts: &Hosts, more: &[&str]) -> Self {
        let file = hosts.logs.join("rdma.pcapng");
        let mut command = Command::new(program());
        command.arg("capture").arg("-w").arg(&file).args(more);
        let client = Process::start(&hosts.a, &hosts.logs, "capture", &mut command);
        // The interfaces are in the file when all taps are open.
        wait_until("the capture begins", LIMIT, || {
            std::fs::metadata(&file).is_ok_and(|file| file.len() > 60)
        });
        Self { client, file }
    }

    /// Ends it as Ctrl-C does. Returns what it says, and its file.
    fn stop(mut self) -> (String, PathBuf) {
        self.client.signal(Signal::INT);
        let status = self.client.wait(LIMIT);
        assert!(status.success(), "{status}: {}", self.client.log());
        (self.client.log(), self.file)
    }
}

/// The values of `fields` in the frames that match `filter`, a line for each, as tshark sees them.
fn tshark(hosts: &Hosts, file: &Path, filter: &str, fields: &[&str]) -> Vec<String> {
    let mut command = Command::new("tshark");
    command.arg("-r").arg(file).args(["-Y", filter, "-T", "fields", "-E", "separator=,"]);
    fields.iter().for_each(|field| {
        command.args(["-e", field]);
    });
    let name = format!("tshark-{}", filter.split(' ').next().unwrap_or_default());
    let text = run(hosts, &hosts.a, &name, LIMIT * 4, &mut command).expect_success("tshark");
    text.lines().map(str::to_owned).collect()
}

/// One exchange through a pair of gateways.
fn exchange(hosts: &Hosts) {
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    set_limit(&client, LIMIT);
    let mut server = accept(&listener, LIMIT);
    (&client).write_all(QUESTION).expect("the connection is up");
    let mut heard = [0; QUESTION.len()];
    server.read_exact(&mut heard).expect("the connection is up");
    assert_eq!(heard, *QUESTION);
    server.write_all(REPLY).expect("the connection is up");
    let mut heard = [0; REPLY.len()];
    (&client).read_exact(&mut heard).expect("the connection is up");
}

/// Whoever looks for what went wrong sees link management, cursors and data of both directions, at
/// the right time of day.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_capture_shows_what_went_over_rdma() {
    let hosts = Hosts::new("smoke_a_capture_shows_what_went_over_rdma");
    let _pair = Pair::start(&hosts, &[PORT]);
    let capturing = Capturing::start(&hosts, &[]);
    exchange(&hosts);
    let (said, file) = capturing.stop();
    assert!(said.contains("frames captured, 0 dropped"), "{said}");
    let psn = "infiniband.bth.psn";
    let fields = ["ip.src", "ip.dst", "frame.interface_name", "data.data", psn, "frame.protocols"];
    let shown = tshark(&hosts, &file, "infiniband", &fields);
    let (a, b) = (hosts.a.address.to_string(), hosts.b.address.to_string());
    for (from, to, bytes) in [(&a, &b, QUESTION), (&b, &a, REPLY)] {
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let of_data = |line: &&String| line.starts_with(&format!("{from},{to},soft0,{digits}"));
        // Beside busy programs, it may be sent again before the far end has said that it has come.
        let psn_of = |line: &String| line.rsplit(',').nth(1).map(str::to_owned);
        let psns: BTreeSet<_> = shown.iter().filter(of_data).map(psn_of).collect();
        assert_eq!(psns.len(), 1, "{shown:#?}");
        let of_smc = |line: &&String| {
            line.starts_with(&format!("{from},{to},soft0,")) && line.ends_with(":smc")
        };
        assert!(shown.iter().filter(of_smc).count() >= 1, "{shown:#?}");
    }
    assert_eq!(tshark(&hosts, &file, MALFORMED, &["frame.number"]), [""; 0]);
    let times = tshark(&hosts, &file, "frame", &["frame.time_epoch"]);
    let last: f64 = times.last().expect("there are frames").parse().expect("seconds");
    let written = std::fs::metadata(&file).and_then(|file| file.modified()).expect("it is there");
    let written = written.duration_since(std::time::UNIX_EPOCH).expect("it is past 1970");
    assert!((written.as_secs_f64() - last).abs() < 5.0, "{last} {written:?}");
    // Our own tool understands it too.
    let file = file.display().to_string();
    let decoded = smcgate(&hosts, "decode", &["decode", "--messages", &file]);
    let decoded = decoded.expect_success("smcgate decode");
    assert!(decoded.contains("CONFIRM LINK") && decoded.contains("CDC"), "{decoded}");
}

/// Where no packet exists, there is still something to look at.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_capture_shows_work_requests_in_shared_memory() {
    let hosts = Hosts::new("a_capture_shows_work_requests_in_shared_memory");
    let directory = hosts.logs.join("shm");
    std::fs::create_dir_all(&directory).expect("target/ is writable");
    let directory = directory.display().to_string();
    let setup = |name| Setup::of_kind(name, ("local", "shm"), &directory, "");
    let near = setup("gateway-a").towards(hosts.b.address, PORT);
    let _pair = Pair::start_these(&hosts, near, setup("gateway-b").before(&hosts.b, PORT));
    let capturing = Capturing::start(&hosts, &["--rnic", "local"]);
    exchange(&hosts);
    let (_, file) = capturing.stop();
    let shown = tshark(&hosts, &file, "infiniband", &["data.data", "frame.protocols"]);
    let digits: String = QUESTION.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(shown.iter().filter(|line| line.starts_with(&digits)).count(), 1, "{shown:#?}");
    assert!(shown.iter().filter(|line| line.ends_with(":smc")).count() >= 2, "{shown:#?}");
    assert_eq!(tshark(&hosts, &file, MALFORMED, &["frame.number"]), [""; 0]);
}

/// A capture of a stream at full speed may lack frames, but the stream may not wait, and lack no
/// byte. Others than root and the gateway's user see nothing.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_capture_delays_no_stream_and_is_not_for_everybody() {
    let hosts = Hosts::new("a_capture_delays_no_stream_and_is_not_for_everybody");
    let pair = Pair::start(&hosts, &[PORT]);
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--clear-groups"]).arg(program());
    command.args(["capture", "-w", "/dev/null"]);
    let mut stranger = Process::start(&hosts.a, &hosts.logs, "stranger", &mut command);
    assert_eq!(stranger.wait(LIMIT).code(), Some(1));
    assert!(stranger.log().contains("only root and user 0 may"), "{}", stranger.log());

    // It is stopped, and reads nothing.
    let capturing = Capturing::start(&hosts, &["--snaplen", "4000"]);
    capturing.client.signal(Signal::STOP);
    transfer_both_ways(&hosts, &pair, 64 << 20);
    capturing.client.signal(Signal::CONT);
    let (said, file) = capturing.stop();
    assert!(!said.contains(" 0 dropped"), "{said}");
    let frames = tshark(&hosts, &file, "frame", &["frame.number"]).len();
    assert!(said.contains(&format!("{frames} frames captured")), "{said}");
}

/// Wireshark 4.0 takes the link management of version 2 for something else.
const MALFORMED: &str = "_ws.malformed && (smc || data)";
const QUESTION: &[u8] = b"where do the bytes go when nobody looks?";
const REPLY: &[u8] = b"by RDMA, and nowhere else";
