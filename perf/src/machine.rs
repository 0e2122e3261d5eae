//! Describes the machine of a measurement, as far as that explains the figures.

use std::fs;
use std::io;
use std::ops::Add;
use std::path::Path;
use std::process::Command;
use std::thread;

use serde::{Deserialize, Serialize};

/// Ticks per second of every time in `/proc`: `USER_HZ`, which Linux fixes for its interface.
const TICKS_PER_S: f64 = 100.0;

/// Where and when a run was made. This is the first line of every result file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// UTC, ISO 8601.
    pub(crate) date: String,
    /// The commit of the gateways that were measured, `-dirty` if files had changed; empty where it
    /// is unknown. In files from before December 2026, that of the folder in which the harness ran.
    pub(crate) commit: String,
    /// The commit that it is compared with; empty where there is none, or nobody said.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) commit_before: String,
    /// What the gateway prints as its version; empty without gateways, and in older files.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) version: String,
    /// The same of the one that it is compared with.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) version_before: String,
    pub(crate) cpu_model: String,
    pub(crate) cores: usize,
    pub(crate) memory_bytes: u64,
    /// Release of the running kernel.
    pub(crate) kernel: String,
    /// The host's default TCP congestion control.
    pub(crate) congestion_control: String,
    /// MTU of the veth pair.
    pub(crate) mtu_bytes: u32,
    /// The versions of HAProxy and nginx.
    pub(crate) programs: Vec<String>,
    /// Settings of the kernel in both namespaces, as `NAME = VALUE`.
    #[serde(default)]
    pub(crate) settings: Vec<String>,
}

impl Machine {
    /// Describes this machine, but no gateway. Values that cannot be found are empty or zero, since
    /// they only explain the figures.
    pub(crate) fn describe(date: Option<String>, mtu_bytes: u32, settings: Vec<String>) -> Self {
        let date = date.unwrap_or_else(|| first_line("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]));
        // HAProxy prints its release date and web site behind the version.
        let version = |line: String| line.split(" - ").next().unwrap_or_default().to_owned();
        let programs = [first_line("haproxy", &["-v"]), first_line("nginx", &["-v"])].map(version);
        Self {
            date,
            commit: String::new(),
            commit_before: String::new(),
            version: String::new(),
            version_before: String::new(),
            cpu_model: labelled("/proc/cpuinfo", "model name"),
            cores: thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: kilobytes("/proc/meminfo", "MemTotal"),
            kernel: read("/proc/sys/kernel/osrelease"),
            congestion_control: read("/proc/sys/net/ipv4/tcp_congestion_control"),
            mtu_bytes,
            programs: programs.into_iter().filter(|line| !line.is_empty()).collect(),
            settings,
        }
    }
}

/// What `binary` prints as its version; empty if it is not there.
pub(crate) fn version(binary: &Path) -> String {
    first_line(&binary.to_string_lossy(), &["--version"])
}

/// The commit of the repository in whose folder `target` the `binary` lies, as cargo puts it there.
/// Of any other binary nobody knows what it was built of: the answer is empty.
pub(crate) fn commit_of(binary: &Path) -> String {
    let binary = fs::canonicalize(binary).unwrap_or_default();
    // ROOT/target/release/smcgate
    let mut folders = binary.ancestors().skip(2);
    let (Some(target), Some(root)) = (folders.next(), folders.next()) else {
        return String::new();
    };
    if !target.ends_with("target") || !root.join(".git").exists() {
        return String::new();
    }
    let describe = ["describe", "--always", "--dirty", "--abbrev=12"];
    first_line("git", &[&["-C", &root.to_string_lossy()], &describe[..]].concat())
}

/// CPU seconds that the whole machine has spent since boot: user, system and interrupts, not idle.
pub(crate) fn machine_cpu_s() -> f64 {
    let stat = read("/proc/stat");
    let ticks = |line: &str| {
        let fields: Vec<f64> = line.split_whitespace().skip(1).flat_map(str::parse).collect();
        // user nice system idle iowait irq softirq
        [0, 1, 2, 5, 6].iter().filter_map(|&index| fields.get(index)).sum::<f64>()
    };
    stat.lines().next().map_or(0.0, ticks) / TICKS_PER_S
}

/// CPU seconds that process `pid` has spent, user and system. Zero if it has ended.
pub(crate) fn process_cpu_s(pid: u32) -> f64 {
    process_ticks(&read(&format!("/proc/{pid}/stat"))) / TICKS_PER_S
}

/// The largest resident size that process `pid` had since [`forget_peak_rss`], in bytes. Zero if it
/// has ended.
pub(crate) fn peak_rss_bytes(pid: u32) -> u64 {
    kilobytes(&format!("/proc/{pid}/status"), "VmHWM")
}

/// The resident size of process `pid`, in bytes. Zero if it has ended.
pub(crate) fn rss_bytes(pid: u32) -> u64 {
    kilobytes(&format!("/proc/{pid}/status"), "VmRSS")
}

/// Has the peak of process `pid` begin with its present size.
///
/// # Errors
///
/// When the process has ended, or is not ours to ask.
pub(crate) fn forget_peak_rss(pid: u32) -> io::Result<()> {
    fs::write(format!("/proc/{pid}/clear_refs"), "5")
}

/// How often threads left their cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Switches {
    /// Because they had nothing to do: each is followed by a wake-up.
    pub(crate) sleeps: u64,
    /// Because the scheduler preferred another one, or because they offered their core to it.
    pub(crate) preemptions: u64,
}

/// The switches of all threads that process `pid` has now. Zero if it has ended.
pub(crate) fn switches(pid: u32) -> Switches {
    let mut sum = Switches::default();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let status = thread.path().join("status");
        let count = |label| labelled(&status.to_string_lossy(), label).parse().unwrap_or(0);
        sum.sleeps += count("voluntary_ctxt_switches");
        sum.preemptions += count("nonvoluntary_ctxt_switches");
    }
    sum
}

impl Add for Switches {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            sleeps: self.sleeps + other.sleeps,
            preemptions: self.preemptions + other.preemptions,
        }
    }
}

/// `utime` and `stime` of a line of `/proc/PID/stat`, whose second field may contain blanks.
fn process_ticks(stat: &str) -> f64 {
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    after_name.split_whitespace().skip(11).take(2).flat_map(str::parse::<f64>).sum()
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// The value of the first line `label : value` of a file.
fn labelled(path: &str, label: &str) -> String {
    let text = read(path);
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(key, _)| key.trim() == label).map_or_else(String::new, |(_, v)| v.trim().into())
}

fn kilobytes(path: &str, label: &str) -> u64 {
    let value = labelled(path, label);
    value.strip_suffix("kB").and_then(|kb| kb.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// The first line that a program prints, on either stream; empty if it does not exist or fails.
fn first_line(program: &str, arguments: &[&str]) -> String {
    let Ok(output) = Command::new(program).args(arguments).output() else {
        return String::new();
    };
    if !output.status.success() {
        return String::new();
    }
    let text = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&text).lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures must not be published as those of a commit whose folder the harness happened to be
    /// started in.
    #[test]
    fn the_commit_is_that_of_the_binary() {
        let folder = std::env::temp_dir().join(format!("commit-{}", std::process::id()));
        let (here, elsewhere) =
            (folder.join("target/release/gate"), folder.join("target/compare/older/gate"));
        for binary in [&here, &elsewhere] {
            fs::create_dir_all(binary.parent().unwrap()).unwrap();
        }
        let script = "git init -q . && git config user.name n && git config user.email e@e.example \
            && git commit -q --allow-empty -m one && cp /bin/true target/release/gate \
            && cp /bin/true target/compare/older/gate && git rev-parse HEAD";
        let made = Command::new("sh").args(["-ec", script]).current_dir(&folder).output().unwrap();
        let commits = [&here, &elsewhere].map(|binary| commit_of(binary));
        fs::remove_dir_all(&folder).unwrap();
        let head = String::from_utf8(made.stdout).unwrap();
        assert!(commits[0].len() >= 12 && head.starts_with(&commits[0]), "{commits:?} {head}");
        assert_eq!(commits[1], "");
        assert_eq!(commit_of(&here), "", "it is no longer there");
    }

    /// Taking the wrong column would publish page faults as CPU time.
    #[test]
    fn finds_cpu_time_behind_a_name_with_blanks_and_brackets() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194304 900 0 3 0 151 49 1000 2000 20 0 3 0 1 2 3";
        assert!((process_ticks(stat) - 200.0).abs() < 1e-9);
        assert!(process_ticks("") < 1e-9);
    }

    /// Both figures of this very process must grow as it works.
    #[test]
    fn this_process_has_spent_time_and_memory() {
        let pid = std::process::id();
        let before = (machine_cpu_s(), process_cpu_s(pid));
        let mut sum = 0_u64;
        while process_cpu_s(pid) < before.1 + 0.03 {
            sum = (0..1_000_000_u64).fold(sum, |sum, n| std::hint::black_box(sum ^ n));
        }
        assert!(machine_cpu_s() >= before.0 + 0.01, "{sum}");
        assert!(peak_rss_bytes(pid) > 100_000);
    }

    /// A peak of the measurement before must not be that of the next one.
    #[test]
    fn a_peak_can_be_forgotten() {
        let pid = std::process::id();
        let bytes = 200 << 20;
        drop(std::hint::black_box(vec![1_u8; bytes]));
        let peak = peak_rss_bytes(pid);
        assert!(peak > bytes as u64, "{peak}");
        forget_peak_rss(pid).unwrap();
        let (now, later) = (rss_bytes(pid), peak_rss_bytes(pid));
        assert!(later < peak / 2 && now <= later + (1 << 20), "{peak}, then {now} and {later}");
    }

    /// Budgets are compared with these counts.
    #[test]
    fn sleeps_are_counted() {
        let script = "while :; do sleep 0.01; done";
        let mut sleeper = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let started = switches(sleeper.id());
        thread::sleep(std::time::Duration::from_millis(500));
        let after = switches(sleeper.id());
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        assert!(after.sleeps >= started.sleeps + 3, "{started:?}, then {after:?}");
        assert_eq!(switches(sleeper.id()), Switches::default(), "it has ended");
    }
}
