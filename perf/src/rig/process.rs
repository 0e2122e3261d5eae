//! A program that the harness starts, watches, measures and ends.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::clock::{now_ns, ns};
use crate::failure::{Doing as _, Failure, Result};
use crate::machine::{self, Switches};

/// How long a program may take to obey SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// A running program. Dropping it ends the program: SIGTERM, then SIGKILL.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    /// Both of its output streams go here.
    log: PathBuf,
}

impl Process {
    /// Starts `command`; its output goes to `<name>.log` in `folder`.
    ///
    /// # Errors
    ///
    /// When the program does not exist.
    pub(crate) fn start(name: &str, mut command: Command, folder: &Path) -> Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let out = File::create(&log).doing(|| format!("creating {}", log.display()))?;
        let err = out.try_clone().doing(|| format!("creating {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        let child = command.spawn().doing(|| format!("starting {command:?}"))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// Waits for the program's end and returns what it printed.
    ///
    /// # Errors
    ///
    /// When it fails, or still runs after `limit`; then it is ended.
    pub(crate) fn output_within(mut self, limit: Duration) -> Result<String> {
        match self.wait(limit)? {
            Some(status) if status.success() => self.printed(),
            Some(status) => Err(self.failure(&status.to_string())),
            None => Err(self.failure(&format!("not done after {} s", limit.as_secs()))),
        }
    }

    /// Checks that a program that should never end still runs.
    ///
    /// # Errors
    ///
    /// When it has ended. The message has the end of its log.
    pub(crate) fn check_alive(&mut self) -> Result<()> {
        match self.child.try_wait().doing(|| self.name.clone())? {
            None => Ok(()),
            Some(status) => Err(self.failure(&format!("ended: {status}"))),
        }
    }

    /// What it has printed so far.
    ///
    /// # Errors
    ///
    /// When that cannot be read.
    pub(crate) fn printed(&self) -> Result<String> {
        fs::read_to_string(&self.log).doing(|| format!("output of {}", self.name))
    }

    /// CPU seconds so far, user and system.
    pub(crate) fn cpu_s(&self) -> f64 {
        machine::process_cpu_s(self.child.id())
    }

    /// Largest resident size since [`Process::forget_peak_rss`].
    pub(crate) fn peak_rss_bytes(&self) -> u64 {
        machine::peak_rss_bytes(self.child.id())
    }

    /// Resident size now.
    pub(crate) fn rss_bytes(&self) -> u64 {
        machine::rss_bytes(self.child.id())
    }

    /// Has the peak begin with the present size.
    ///
    /// # Errors
    ///
    /// When the program has ended.
    pub(crate) fn forget_peak_rss(&self) -> Result<()> {
        machine::forget_peak_rss(self.child.id()).doing(|| format!("memory of {}", self.name))
    }

    /// How often its threads have left their cores.
    pub(crate) fn switches(&self) -> Switches {
        machine::switches(self.child.id())
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    fn wait(&mut self, limit: Duration) -> Result<Option<ExitStatus>> {
        let until = now_ns() + ns(limit);
        loop {
            if let Some(status) = self.child.try_wait().doing(|| self.name.clone())? {
                return Ok(Some(status));
            }
            if now_ns() >= until {
                return Ok(None);
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// The failure of this program: `what` happened, and the end of its log.
    fn failure(&self, what: &str) -> Failure {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(10)..].join("\n  ");
        Failure::new(format!("{}: {what}\n  {tail}", self.name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let pid = Pid::from_child(&self.child);
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        kill_process(pid, Signal::TERM).ok();
        if !matches!(self.wait(GRACE), Ok(Some(_))) {
            self.child.kill().ok();
            self.child.wait().ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(name: &str, script: &str) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let name = format!("test-{}-{name}", std::process::id());
        Process::start(&name, command, &std::env::temp_dir()).unwrap()
    }

    /// If a gateway crashes during a run, the run must fail at once with the end of its log.
    #[test]
    fn a_dead_program_is_reported_with_the_end_of_its_log() {
        let mut process = shell("dead", "echo starting; echo no such device >&2; exit 3");
        process.wait(Duration::from_secs(5)).unwrap();
        let failure = process.check_alive().unwrap_err().to_string();
        assert!(failure.contains("no such device"), "{failure}");
    }

    /// A load that hangs must not hang the harness, nor outlive it.
    #[test]
    fn a_hanging_program_is_ended() {
        let process = shell("hang", "exec sleep 60");
        let pid = process.child.id();
        let failure = process.output_within(Duration::from_millis(50)).unwrap_err().to_string();
        assert!(failure.contains("not done"), "{failure}");
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    /// A load prints its result, which must arrive completely.
    #[test]
    fn output_is_what_the_program_printed() {
        let output = shell("say", "echo one; echo two").output_within(Duration::from_secs(5));
        assert_eq!(output.unwrap(), "one\ntwo\n");
    }
}
