//! Programs that a test starts. Each has a time limit and a log, and ends with the test.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::clock::{Deadline, wait_until};
use crate::hosts::{Host, Hosts};

/// A program that runs beside the test, killed when dropped.
pub(crate) struct Process {
    child: Child,
    name: String,
    log: PathBuf,
}

/// Result of a program that has run to its end.
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Process {
    /// Starts `command` on `host`, with standard error in `NAME.log` and output in `NAME.out`.
    pub(crate) fn start(host: &Host, logs: &Path, name: &str, command: &mut Command) -> Self {
        let log = logs.join(format!("{name}.log"));
        let file = |path: &Path| {
            File::options().create(true).append(true).open(path).expect("the log is ours to write")
        };
        command.stdin(Stdio::null()).stdout(file(&log.with_extension("out"))).stderr(file(&log));
        let child = host
            .enter(|| command.spawn())
            .unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        Self { child, name: name.to_owned(), log }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Everything it has said on standard error so far, earlier runs of the same name included.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("opened when it was started")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(id.expect("the kernel gave it"), signal)
            .unwrap_or_else(|error| panic!("{} is gone: {error}", self.name));
    }

    /// Its exit status, if it has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is our child")
    }

    /// Waits until it has ended.
    ///
    /// # Panics
    ///
    /// If it still runs after `limit`. The message shows its log.
    pub(crate) fn wait(&mut self, limit: Duration) -> ExitStatus {
        let deadline = Deadline::after(limit);
        loop {
            if let Some(status) = self.ended() {
                return status;
            }
            assert!(!deadline.passed(), "{} still runs:\n{}", self.name, self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Number of descriptors it has open.
    pub(crate) fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.id())).expect("it runs").count()
    }

    /// How many descriptors of each kind it has open (`socket`, `anon_inode`, a path).
    pub(crate) fn descriptors_by_kind(&self) -> BTreeMap<String, usize> {
        let mut kinds = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{}/fd", self.id())).expect("it runs") {
            // One that was closed meanwhile is none.
            let Ok(what) = fs::read_link(entry.expect("it runs").path()) else { continue };
            let what = what.to_string_lossy();
            let kind = what.split_once(":[").map_or(&*what, |(kind, _)| kind);
            *kinds.entry(kind.to_owned()).or_default() += 1;
        }
        kinds
    }

    /// Resident memory, in KiB.
    pub(crate) fn resident_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it runs");
        line.trim().trim_end_matches(" kB").parse().expect("the kernel prints a number")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Finished {
    /// Standard output of a program that succeeded.
    ///
    /// # Panics
    ///
    /// If it failed. The message shows everything that it said.
    pub(crate) fn expect_success(self, what: &str) -> String {
        let Self { status, stdout, stderr } = self;
        assert!(status.success(), "{what}: {status}\n{stdout}\n{stderr}");
        stdout
    }
}

/// Runs `command` on `host` to its end, for at most `limit`.
pub(crate) fn run(
    hosts: &Hosts,
    host: &Host,
    name: &str,
    limit: Duration,
    command: &mut Command,
) -> Finished {
    let mut process = Process::start(host, &hosts.logs, name, command);
    let status = process.wait(limit);
    let stdout = fs::read_to_string(process.log.with_extension("out")).expect("just written");
    Finished { status, stdout, stderr: process.log() }
}

/// Waits until somebody on `host` listens on exactly this address, by a socket of IPv4 or of both.
pub(crate) fn wait_for_listener(host: &Host, at: impl Into<SocketAddr>) {
    let at = at.into();
    let word = |bytes: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(bytes));
    let name = |address: String| format!("{address}:{:04X}", at.port());
    let names = match at.ip() {
        IpAddr::V4(ip) => {
            let four = word(ip.octets());
            vec![name(four.clone()), name(format!("0000000000000000FFFF0000{four}"))]
        }
        IpAddr::V6(ip) => {
            let words = ip.octets();
            let words = words.chunks_exact(4).map(|it| word(it.try_into().expect("four")));
            vec![name(words.collect())]
        }
    };
    let read =
        || ["tcp", "tcp6"].map(|of| fs::read_to_string(format!("/proc/thread-self/net/{of}")));
    wait_until(&format!("a listener on {at}"), Duration::from_secs(10), || {
        host.enter(read).into_iter().any(|sockets| {
            sockets.expect("/proc is mounted").lines().skip(1).any(|line| {
                let mut fields = line.split_whitespace().skip(1);
                let (local, state) = (fields.next(), fields.nth(1));
                let is_it = local.is_some_and(|local| names.iter().any(|name| name == local));
                is_it && state == Some(LISTENING)
            })
        })
    });
}

/// The state in `/proc/net/tcp`.
const LISTENING: &str = "0A";
