//! Removes namespaces and the temporary folder when the harness ends, however it ends.
//!
//! The janitor is a second process, in a process group of its own. It waits until a pipe ends whose
//! other end the harness holds. A return, an interrupt and SIGKILL all close that pipe, so there is
//! one way to clean up and it needs no signal handler.

use std::fs;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::failure::{Doing as _, Result};

/// The process that cleans up. Dropping this value makes it do so, and waits until it is done.
#[derive(Debug)]
pub(crate) struct Janitor {
    child: Child,
}

impl Janitor {
    /// Starts a janitor for `folder` and the network `namespaces`, before those are created.
    ///
    /// # Errors
    ///
    /// When the process cannot be started.
    pub(crate) fn start(myself: &str, folder: &Path, namespaces: &[String; 2]) -> Result<Self> {
        let mut command = Command::new(myself);
        command.arg("clean").arg(folder).args(namespaces);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
        let child = command.spawn().doing(|| format!("starting {command:?}"))?;
        Ok(Self { child })
    }
}

impl Drop for Janitor {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().ok();
    }
}

/// Runs in the janitor process: waits for the end of standard input, then removes everything.
///
/// It ignores things that do not exist.
pub(crate) fn clean(folder: &Path, namespaces: &[String]) {
    std::io::stdin().read_to_end(&mut Vec::new()).ok();
    for name in namespaces {
        Command::new("ip").args(["netns", "del", name]).output().ok();
    }
    fs::remove_dir_all(folder).ok();
}
