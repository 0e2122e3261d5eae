//! `smcgate bench`: the harness, which is a program of its own, so that gateways need not carry it.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::{env, io};

/// Becomes the harness.
///
/// # Errors
///
/// With one line, if it is neither in the folder of this program nor in one of `PATH`.
pub fn become_harness(arguments: &[OsString]) -> Result<Infallible, String> {
    let beside = env::current_exe().ok().map(|myself| myself.with_file_name(HARNESS));
    let harness = beside.filter(|path| path.exists());
    let harness = harness.as_deref().unwrap_or(Path::new(HARNESS));
    let error = Command::new(harness).args(arguments).exec();
    Err(if error.kind() == io::ErrorKind::NotFound {
        format!(
            "{HARNESS} is neither beside this program nor in PATH: build it with \
             'cargo build --release -p {HARNESS}', or install it"
        )
    } else {
        format!("{}: {error}", harness.display())
    })
}

const HARNESS: &str = "smcgate-perf";

#[cfg(test)]
mod tests {
    use super::*;

    /// Test programs are in a folder without a harness.
    #[test]
    fn without_a_harness_it_says_how_to_get_it() {
        let why = become_harness(&["--version".into()]).unwrap_err();
        assert!(why.contains("cargo build --release -p smcgate-perf"), "{why}");
    }
}
