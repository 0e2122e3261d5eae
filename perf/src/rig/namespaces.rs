//! Two hosts on this machine: network namespaces A and B, joined by a veth pair.
//!
//! `nsenter` starts programs in them, not `ip netns exec`: the latter mounts a new `/sys`, which
//! hides the cgroup hierarchy that a gateway attaches its eBPF program to. `setpriv` makes the
//! kernel end every program when the harness dies, however it dies.
//!
//! All settings of both namespaces are the kernel's defaults, because users have these, too.

use std::process::Command;

use crate::failure::{Doing as _, Failure, Result};

/// Address of namespace A on the veth pair.
pub(crate) const ADDRESS_A: &str = "10.8.0.1";
/// Address of namespace B on the veth pair.
pub(crate) const ADDRESS_B: &str = "10.8.0.2";
/// The network of both addresses.
const NETWORK: &str = "10.8.0.0/24";
/// Device of the pair in namespace A.
pub(crate) const DEVICE_A: &str = "va";
/// Device of the pair in namespace B.
pub(crate) const DEVICE_B: &str = "vb";

/// One of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    /// Where loads run.
    A,
    /// Where servers run.
    B,
}

/// Both namespaces. The janitor removes them.
#[derive(Debug)]
pub(crate) struct Namespaces {
    names: [String; 2],
    own_sessions: bool,
}

impl Namespaces {
    /// The names of namespaces A and B of this process.
    pub(crate) fn names() -> [String; 2] {
        ["a", "b"].map(|host| format!("smcperf-{}-{host}", std::process::id()))
    }

    /// Builds both, with packets of up to `mtu` bytes between them. With `own_sessions` each
    /// program will be the leader of a session.
    ///
    /// # Errors
    ///
    /// Without the privilege to make network namespaces.
    pub(crate) fn create(mtu: u32, own_sessions: bool) -> Result<Self> {
        let namespaces = Self { names: Self::names(), own_sessions };
        let [a, b] = &namespaces.names;
        ip(&["netns", "add", a])?;
        ip(&["netns", "add", b])?;
        ip(&[
            "-n", a, "link", "add", DEVICE_A, "type", "veth", "peer", "name", DEVICE_B, "netns", b,
        ])?;
        for (name, device, address) in [(a, DEVICE_A, ADDRESS_A), (b, DEVICE_B, ADDRESS_B)] {
            ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", device])?;
            ip(&["-n", name, "link", "set", device, "mtu", &mtu.to_string(), "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(namespaces)
    }

    /// A command that runs `argv` inside `host` and dies with the harness.
    pub(crate) fn command(&self, host: Host, argv: &[String]) -> Command {
        // It leads no process group yet, so it becomes what `setsid` runs, without a `fork`.
        let mut command = Command::new(if self.own_sessions { "setsid" } else { "setpriv" });
        command.args(self.own_sessions.then_some("setpriv"));
        command.args(["--pdeathsig", "KILL", "nsenter"]);
        command.arg(format!("--net=/run/netns/{}", self.name(host)));
        command.arg("--").args(argv);
        command
    }

    /// The output of `ss` for connections in TIME_WAIT in `host`.
    ///
    /// # Errors
    ///
    /// When `ss` is not installed.
    pub(crate) fn time_waits(&self, host: Host) -> Result<String> {
        let argv = ["ss", "-Htan", "state", "time-wait"].map(str::to_owned);
        succeed(&mut self.command(host, &argv))
    }

    /// Gives every later connection of both hosts the congestion control `algorithm`, or the
    /// host's default for `None`.
    ///
    /// It is set on routes, because a namespace's sysctl accepts only the algorithms that the host
    /// allows to everybody, and these often do not include cubic. Both ends of every connection
    /// take it from the route, also those of proxies.
    ///
    /// # Errors
    ///
    /// When the kernel has no such algorithm.
    pub(crate) fn use_congestion_control(&self, algorithm: Option<&str>) -> Result<()> {
        let choice = algorithm.map(|algorithm| format!("congctl {algorithm}")).unwrap_or_default();
        for (host, device, address) in
            [(Host::A, DEVICE_A, ADDRESS_A), (Host::B, DEVICE_B, ADDRESS_B)]
        {
            for route in routes(device, address) {
                let command = format!("-n {} route replace {route} {choice}", self.name(host));
                ip(&command.split_whitespace().collect::<Vec<_>>())?;
            }
        }
        Ok(())
    }

    /// MTU of the veth pair.
    ///
    /// # Errors
    ///
    /// When `ip` does not report it.
    pub(crate) fn mtu_bytes(&self) -> Result<u32> {
        let link = ip(&["-n", self.name(Host::A), "-o", "link", "show", DEVICE_A])?;
        let mut words = link.split_whitespace().skip_while(|word| *word != "mtu").skip(1);
        let mtu = words.next().and_then(|mtu| mtu.parse().ok());
        mtu.ok_or_else(|| Failure::new(format!("no MTU in {link:?}")))
    }

    /// The settings of the kernel that bear on figures, as `NAME = VALUE`: all as a new namespace
    /// has them, the same on both hosts and for every path.
    ///
    /// # Errors
    ///
    /// When there is no `sysctl`.
    pub(crate) fn settings(&self) -> Result<Vec<String>> {
        let argv = [&["sysctl", "--ignore"], SETTINGS].concat();
        let argv: Vec<String> = argv.into_iter().map(str::to_owned).collect();
        let text = succeed(&mut self.command(Host::A, &argv))?;
        let one_blank = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        Ok(text.lines().map(one_blank).collect())
    }

    fn name(&self, host: Host) -> &str {
        let [a, b] = &self.names;
        match host {
            Host::A => a,
            Host::B => b,
        }
    }
}

/// Every route by which a connection of a host may go, as the kernel has made it: to the other
/// host, on loopback, and to the host's own `address`.
fn routes(device: &str, address: &str) -> [String; 4] {
    let kernel = "proto kernel scope host src";
    [
        format!("{NETWORK} dev {device} proto kernel scope link src {address}"),
        format!("table local local 127.0.0.0/8 dev lo {kernel} 127.0.0.1"),
        format!("table local local 127.0.0.1 dev lo {kernel} 127.0.0.1"),
        format!("table local local {address} dev {device} {kernel} {address}"),
    ]
}

/// The settings that a result file names.
const SETTINGS: &[&str] = &[
    "net.ipv4.tcp_tw_reuse",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.core.somaxconn",
    "net.core.rmem_max",
    "kernel.sched_autogroup_enabled",
];

fn ip(arguments: &[&str]) -> Result<String> {
    succeed(Command::new("ip").args(arguments))
}

/// Runs a command to its end and returns its output.
fn succeed(command: &mut Command) -> Result<String> {
    let output = command.output().doing(|| format!("{command:?}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Failure::new(format!("{command:?}: {complaint}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On the path `host-direct` a load connects to the address of its own host. If that route were
    /// left out, STR-cubic there would have the host's default.
    #[test]
    fn the_own_address_has_a_route_to_change() {
        let own = "table local local 10.8.0.2 dev vb proto kernel scope host src 10.8.0.2";
        assert!(routes(DEVICE_B, ADDRESS_B).iter().any(|route| route == own));
    }
}
