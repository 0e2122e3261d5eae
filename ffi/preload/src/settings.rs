//! What the environment says, read once when the library is loaded.

use smcgate_rings::Application;
use std::ffi::OsString;
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::net::SocketAddrUnix;
use smcgate_door::Choice;

/// What the environment says.
pub(crate) struct Settings {
    /// Where the gateway listens.
    pub(crate) door: SocketAddrUnix,
    pub(crate) choice: Choice,
    pub(crate) debug: bool,
    /// Bytes go by shared memory, if the gateway offers that.
    pub(crate) rings: bool,
    /// So long a thread watches the rings before it sleeps; none: as long as that is worth it.
    pub(crate) spin: Option<Duration>,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// What the environment has said; none before the library is loaded, or if it said nonsense. Then
/// nothing is done about any socket.
pub(crate) fn settings() -> Option<&'static Settings> {
    SETTINGS.get()
}

/// Whether bytes shall go by shared memory.
pub(crate) fn wants_rings() -> bool {
    settings().is_some_and(|settings| settings.rings) && Application::fits()
}

/// Reads the environment.
///
/// # Errors
///
/// Which variable is wrong, and why. Then there are no settings.
pub(crate) fn read() -> Result<(), String> {
    let settings = parse(|name| std::env::var_os(name))?;
    SETTINGS.get_or_init(|| settings);
    Ok(())
}

fn parse(variable: impl Fn(&str) -> Option<OsString>) -> Result<Settings, String> {
    let door = variable(SOCKET).filter(|path| !path.is_empty()).unwrap_or(DEFAULT_SOCKET.into());
    let door = SocketAddrUnix::new(&door)
        .map_err(|_| format!("{SOCKET}: a path of a socket has at most 107 bytes"))?;
    let choice = Choice {
        ports: list(&variable, PORTS)?,
        networks: list(&variable, NETWORKS)?,
        not_ports: list(&variable, NOT_PORTS)?,
        not_networks: list(&variable, NOT_NETWORKS)?,
    };
    let flag = |name| variable(name).is_some_and(|value| !value.is_empty() && value != "0");
    let spin = variable(SPIN_US).filter(|value| !value.is_empty());
    let spin = spin.map(|value| value.to_string_lossy().parse()).transpose();
    let spin = spin.map_err(|why| format!("{SPIN_US}: {why}"))?;
    Ok(Settings {
        door,
        choice,
        debug: flag(DEBUG),
        rings: flag(RINGS),
        spin: spin.map(Duration::from_micros),
    })
}

fn list<T: FromStr<Err: fmt::Display> + Default>(
    variable: impl Fn(&str) -> Option<OsString>,
    name: &str,
) -> Result<T, String> {
    let Some(value) = variable(name) else { return Ok(T::default()) };
    value.to_string_lossy().parse().map_err(|why| format!("{name}: {why}"))
}

const DEFAULT_SOCKET: &str = "/run/smcgate/local.sock";
const SOCKET: &str = "SMCGATE_SOCKET";
const PORTS: &str = "SMCGATE_PORTS";
const NETWORKS: &str = "SMCGATE_NETWORKS";
const NOT_PORTS: &str = "SMCGATE_NOT_PORTS";
const NOT_NETWORKS: &str = "SMCGATE_NOT_NETWORKS";
const RINGS: &str = "SMCGATE_RINGS";
const SPIN_US: &str = "SMCGATE_SPIN_US";
const DEBUG: &str = "SMCGATE_DEBUG";

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_these(variables: &[(&str, &str)]) -> Result<Settings, String> {
        parse(|name| {
            let found = variables.iter().find(|(other, _)| *other == name);
            found.map(|(_, value)| value.into())
        })
    }

    #[test]
    fn an_empty_environment_means_the_defaults() {
        let none = [(SOCKET, ""), (PORTS, ""), (DEBUG, "0"), (RINGS, "0"), (SPIN_US, "")];
        for variables in [&[][..], &none] {
            let settings = parse_these(variables).unwrap();
            assert!(!settings.rings && settings.spin.is_none());
            assert_eq!(settings.door.path_bytes(), Some(DEFAULT_SOCKET.as_bytes()));
            assert!(settings.choice.takes("127.0.0.1:1".parse().unwrap()) && !settings.debug);
        }
    }

    #[test]
    fn what_is_said_counts() {
        let all =
            [(SOCKET, "/tmp/x"), (PORTS, "7010"), (NOT_NETWORKS, "127.0.0.0/8"), (DEBUG, "1")];
        let settings = parse_these(&[&all[..], &[(RINGS, "1"), (SPIN_US, "20")]].concat()).unwrap();
        assert!(settings.rings && settings.spin == Some(Duration::from_micros(20)));
        assert_eq!(settings.door.path_bytes(), Some(&b"/tmp/x"[..]));
        assert!(settings.choice.takes("10.8.0.2:7010".parse().unwrap()) && settings.debug);
        assert!(!settings.choice.takes("10.8.0.2:7011".parse().unwrap()));
        assert!(!settings.choice.takes("127.0.0.1:7010".parse().unwrap()));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let long = "x".repeat(200);
        for (name, value) in [
            (SOCKET, &*long),
            (PORTS, "http"),
            (NETWORKS, "10/8"),
            (NOT_PORTS, "0"),
            (SPIN_US, "-1"),
        ] {
            let why = parse_these(&[(name, value)]).err().expect("it is wrong");
            assert!(why.starts_with(name), "{why}");
        }
    }
}
