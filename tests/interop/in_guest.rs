//! Gateways of ours that run in a guest, and what they carry.

use std::net::SocketAddrV4;
use std::time::Duration;

use crate::clock::wait_until;
use crate::gateway::program;
use crate::place::{Application, Place, unanimous};
use crate::process::Process;
use crate::rig::EID;

/// Starts a gateway in a guest, with these RNICs and listeners, and waits until it listens.
pub(crate) fn start(guest: &Place<'_>, rnics: &str, listeners: &[String]) -> Process {
    let config = format!("{rnics}\n[smc]\neids = [\"{EID}\"]\n{}", listeners.concat());
    guest.run(&["sh", "-ec", PREPARE, &config]);
    let program = program();
    let program = program.to_str().expect("a path of ours is UTF-8");
    let process = guest.start(&[program, "--log", "debug", "run", "-c", "/tmp/gate.toml"]);
    let listening = || process.log().matches(" listening ").count() == listeners.len();
    wait_until("the gateway in the guest listens", START_LIMIT, listening);
    process
}

/// An RNIC on a device. `kind` may be left out, as "", where the device is an RDMA device.
pub(crate) fn rnic(kind: &str, device: &str) -> String {
    let key = if kind.is_empty() { String::new() } else { format!("kind = \"{kind}\"\n") };
    format!("[[rnic]]\nname = \"{device}\"\n{key}device = \"{device}\"\n")
}

/// A listener that accepts `smc` or `tcp` and connects by the other.
pub(crate) fn listener(accept: &str, bind: SocketAddrV4, upstream: SocketAddrV4) -> String {
    let connect = if accept == "smc" { "tcp" } else { "smc" };
    format!(
        "\n[[listener]]\nname = \"to-{upstream}\"\nbind = \"{bind}\"\naccept = \"{accept}\"\n\
         connect = \"{connect}\"\nupstream = \"{upstream}\"\n"
    )
}

/// Waits until both ends have sent and received everything, and compares what they saw.
pub(crate) fn carried(client: Application, server: Application) {
    let (client, server) = (client.outcomes(), server.outcomes());
    let (client, server) = (unanimous(&client, 1), unanimous(&server, 1));
    for (sender, receiver) in [(client, server), (server, client)] {
        assert_eq!(receiver.event("received "), format!("{}, then end", sender.event("sent ")));
    }
}

/// The port of applications.
pub(crate) const PORT: u16 = 7010;
/// The port of connections in the other direction.
pub(crate) const BACK: u16 = 7020;
/// What both ends of a connection do: 16 MiB each way.
pub(crate) const CLIENT: &str = "send=16777216 shut drain";
pub(crate) const SERVER: &str = "drain send=16777216";

/// Writes a configuration, which is `$0`. The eBPF program of a gateway needs a cgroup.
const PREPARE: &str = "\
    printf '%s' \"$0\" >/tmp/gate.toml\n\
    grep -q ' /sys/fs/cgroup cgroup2 ' /proc/mounts ||\n\
        mount -t cgroup2 cgroup2 /sys/fs/cgroup\n";
/// A guest is slow.
const START_LIMIT: Duration = Duration::from_secs(60);
