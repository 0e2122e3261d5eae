//! Removes namespaces and the temporary folder when the harness ends, however it ends.
//!
//! A second process, in a process group of its own, waits for the end of a pipe whose other end
//! the harness holds. A return, an interrupt and SIGKILL all close that pipe, so there is one way
//! to clean up and it needs no signal handler.

use std::fs;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::failure::{Doing as _, Result};

/// The process that cleans up. Dropping this has it do so, and waits until it has.
#[derive(Debug)]
pub(crate) struct Janitor {
    child: Child,
}

impl Janitor {
    /// Hires a janitor for what is about to be made: `folder` and network `namespaces`.
    ///
    /// # Errors
    ///
    /// When the process cannot be started.
    pub(crate) fn hire(myself: &str, folder: &Path, namespaces: &[String; 2]) -> Result<Self> {
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

/// The janitor's whole life: waits for the end of standard input, then removes everything.
///
/// What is not there any more, or never was, is no error.
pub(crate) fn clean(folder: &Path, namespaces: &[String]) {
    std::io::stdin().read_to_end(&mut Vec::new()).ok();
    for name in namespaces {
        Command::new("ip").args(["netns", "del", name]).output().ok();
    }
    fs::remove_dir_all(folder).ok();
}
