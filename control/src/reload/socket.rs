//! `smcgate reload --pid`: a gateway that is told to read its configuration again by whoever knows
//! its process, as systemd does.
//!
//! The admin endpoint may be elsewhere than the new configuration says, or nowhere. Each gateway
//! listens at a Unix socket without a file, whose name is the number of its process. The kernel
//! says who is at the other end, so nobody can pretend to be the gateway, and only root and its own
//! user can tell it anything.
//!
//! ```text
//!   smcgate reload ── connects ──────────────► gateway
//!   smcgate reload ◄─ Report, a line of JSON ─ gateway, when the reload is over
//! ```

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use crate::operate::OperateError;
use crate::supervise;

/// What was done, in words, or why nothing was.
type Outcome = Result<Vec<String>, OperateError>;

/// What came of it.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Report {
    /// What was done, in words.
    notes: Vec<String>,
    /// Why nothing was done; none if it was.
    error: Option<String>,
    /// The configuration is wrong.
    is_wrong: bool,
}

/// Why a gateway has not read its configuration again. Displays on one line.
#[derive(Debug)]
pub struct ReloadError {
    pid: u32,
    why: String,
    is_wrong: bool,
}

impl ReloadError {
    /// Whether what the operator wrote is wrong, rather than that it did not work.
    pub fn is_wrong(&self) -> bool {
        self.is_wrong
    }
}

impl fmt::Display for ReloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gateway with process {}: {}", self.pid, self.why)
    }
}

impl std::error::Error for ReloadError {}

/// Calls `reload` for each who asks for it, on a thread of its own, as long as the process lives.
///
/// # Errors
///
/// When the name is taken, or no thread can be started.
pub fn serve(reload: impl Fn() -> Outcome + Send + 'static) -> io::Result<()> {
    let listener = UnixListener::bind_addr(&name_of(std::process::id()))?;
    supervise::spawn("reload-asked", move || {
        loop {
            match listener.accept() {
                // Whoever has gone hears nothing, and needs not.
                Ok((client, _)) => drop(answer(client, &reload)),
                // No descriptor is left, say.
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    })?;
    Ok(())
}

fn answer(mut client: UnixStream, reload: impl Fn() -> Outcome) -> io::Result<()> {
    let asks = socket_peercred(&client)?;
    let report = match asks.uid.is_root() || asks.uid == geteuid() {
        false => {
            Report { error: Some("only root and its own user may".to_owned()), ..Report::default() }
        }
        true => match reload() {
            Ok(notes) => Report { notes, ..Report::default() },
            Err(error) => Report {
                is_wrong: matches!(error, OperateError::Wrong(_)),
                error: Some(error.to_string()),
                ..Report::default()
            },
        },
    };
    client.set_write_timeout(Some(PATIENCE))?;
    client.write_all(&serde_json::to_vec(&report)?)
}

/// Has the gateway that is process `pid` read its configuration again. Returns what has changed, in
/// words.
///
/// # Errors
///
/// [`ReloadError`].
pub fn ask(pid: u32) -> Result<Vec<String>, ReloadError> {
    let fail = |why: String| ReloadError { pid, why, is_wrong: false };
    let report =
        report_of(pid).map_err(|error| match error.kind() == io::ErrorKind::ConnectionRefused {
            true => fail(
                "no such process listens here; is it a gateway of this network namespace?"
                    .to_owned(),
            ),
            false => fail(error.to_string()),
        })?;
    match report.error {
        None => Ok(report.notes),
        Some(why) => Err(ReloadError { is_wrong: report.is_wrong, ..fail(why) }),
    }
}

fn report_of(pid: u32) -> io::Result<Report> {
    let mut gateway = UnixStream::connect_addr(&name_of(pid))?;
    let listens = socket_peercred(&gateway)?.pid.as_raw_nonzero().get();
    if u32::try_from(listens) != Ok(pid) {
        return Err(io::Error::other("another process listens in its place"));
    }
    gateway.set_read_timeout(Some(PATIENCE))?;
    let mut text = String::new();
    gateway.read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}

fn name_of(pid: u32) -> SocketAddr {
    SocketAddr::from_abstract_name(format!("smcgate reload {pid}")).expect("the name is short")
}

/// Names may take long to resolve.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// systemd learns whether a reload has worked from the exit code, and operators why not.
    #[test]
    fn whoever_asks_learns_what_came_of_it() {
        let own = std::process::id();
        let times = AtomicU32::new(0);
        serve(move || match times.fetch_add(1, Ordering::Relaxed) {
            0 => Ok(vec!["listener a: added".to_owned()]),
            1 => Err(OperateError::Wrong("a.toml:1".to_owned())),
            _ => Err(OperateError::Refused("it stops".to_owned())),
        })
        .unwrap();
        assert_eq!(ask(own).unwrap(), ["listener a: added"]);
        for (is_wrong, why) in [(true, "a.toml:1"), (false, "it stops")] {
            let error = ask(own).unwrap_err();
            assert_eq!((error.is_wrong(), error.why.as_str()), (is_wrong, why));
        }
    }

    /// Somebody who takes the name of a process must not be taken for it.
    #[test]
    fn nobody_answers_for_another_process() {
        let _other = UnixListener::bind_addr(&name_of(1)).unwrap();
        assert!(ask(1).unwrap_err().why.contains("another process"));
        assert!(ask(u32::MAX).unwrap_err().why.contains("no such process"));
    }
}
