//! `smcgate intercept`: the rules that lead connections to listeners, installed, removed and shown.
//!
//! A gateway installs them itself when it starts, and removes them when it ends. This is for
//! looking at them before, and for what a gateway that was killed has left.

use std::io::Write as _;

use crate::cli::InterceptCommand;
use crate::config::{Config, InterceptWay};
use crate::intercept::claim::{Claim, NoClaim};
use crate::intercept::rules::{self, Rules};

/// Carries `command` out, and prints what it is told to.
///
/// # Errors
///
/// The exit code, and why it did not work, in one line.
pub fn run(command: &InterceptCommand) -> Result<(), (u8, String)> {
    let failed = |why| (1, why);
    match command {
        InterceptCommand::Add { file, dry_run, force } => {
            let config = Config::load(&file.config).map_err(|error| (2, error.to_string()))?;
            let mut text = String::new();
            for listener in &config.listeners {
                let at_connect = |way| way == InterceptWay::Ebpf;
                if listener.intercept.as_ref().is_some_and(|it| at_connect(it.way)) {
                    text.push_str("# listener ");
                    text.push_str(&listener.name);
                    text.push_str(": by eBPF, which the gateway loads, and which ends with it\n");
                }
            }
            match Rules::of(&config.listeners) {
                None => text.push_str("# no rules are needed\n"),
                Some(rules) if *dry_run => text.push_str(&rules.commands()),
                Some(rules) => {
                    let _alone = alone(*force)?;
                    rules.install().map_err(failed)?;
                }
            }
            print(&text);
        }
        InterceptCommand::Remove { dry_run: true, .. } => print(&rules::removal()),
        InterceptCommand::Remove { dry_run: false, force } => {
            let _alone = alone(*force)?;
            rules::remove().map_err(failed)?;
        }
        InterceptCommand::Show => print(&rules::show().map_err(failed)?),
    }
    Ok(())
}

/// Makes sure that the rules are no living gateway's: without them, its connections would end. No
/// gateway begins to intercept while the result is there.
fn alone(force: bool) -> Result<Option<Claim>, (u8, String)> {
    if force {
        return Ok(None);
    }
    Claim::take().map(Some).map_err(|why| match why {
        NoClaim::Taken(_) => {
            let what = "its rules are left alone: stop it, and it removes them itself, or say \
                        --force";
            (2, format!("{why}; {what}"))
        }
        NoClaim::Failed(_) => (1, why.to_string()),
    })
}

fn print(text: &str) {
    // A reader that has seen enough is no reason to fail.
    let _ = std::io::stdout().write_all(text.as_bytes());
}
