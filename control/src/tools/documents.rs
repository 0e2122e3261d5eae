//! `smcgate schema`, `completions` and `man`: what packages ship, made from what the program knows.

use std::io::{self, Write};
use std::path::Path;

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::cli::Cli;
use crate::config::Config;

/// Writes a JSON schema of the configuration.
///
/// # Errors
///
/// When `out` takes no more.
pub fn schema(out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{:#}", Config::schema())
}

/// Writes a script that completes command lines in `shell`.
///
/// # Errors
///
/// When `out` takes no more.
pub fn completions(shell: Shell, out: &mut impl Write) -> io::Result<()> {
    // The generator panics where it cannot write, as into a pipe that nobody reads.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), NAME, &mut script);
    out.write_all(&script)
}

/// Writes a manual page for the program, and one for each of its commands, into `directory`.
///
/// # Errors
///
/// Into which directory nothing could be written, and why.
pub fn man(directory: &Path) -> io::Result<()> {
    clap_mangen::generate_to(Cli::command(), directory).map_err(|error| {
        let why = format!("no manual pages in {}: {error}", directory.display());
        io::Error::new(error.kind(), why)
    })
}

const NAME: &str = "smcgate";

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Operators find each command by its page, and each page has what `--help` has.
    #[test]
    fn each_command_has_a_page() {
        let directory = tempfile::tempdir().unwrap();
        man(directory.path()).unwrap();
        let read = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap();
        assert!(read("smcgate.1").contains("check"));
        assert!(
            read("smcgate-rnic-down.1").contains("\\-\\-orderly"),
            "{}",
            read("smcgate-rnic-down.1")
        );
        let pages = fs::read_dir(directory.path()).unwrap().count();
        assert!(pages > Cli::command().get_subcommands().count(), "{pages}");
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = man(Path::new("/no/such")).unwrap_err().to_string();
        assert!(error.starts_with("no manual pages in /no/such: No such file"), "{error}");
    }

    #[test]
    fn shells_learn_the_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            completions(shell, &mut script).unwrap();
            let script = String::from_utf8(script).unwrap();
            assert!(script.contains("close-idle-over"), "{shell}");
        }
    }
}
