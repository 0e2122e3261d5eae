//! Congestion control of connections with applications on this host.
//!
//! Loopback loses nothing and has no queue that could grow, so there is nothing to control. What
//! paces packets, as `bbr` does, costs a timer for each of them: a fifth of the throughput of a
//! stream at each end. Our own sockets use another one. An application's socket is its own affair,
//! but its end of a connection with us decides how fast it can send; so where the host's choice is
//! `bbr`, a small eBPF program gives such sockets another one as the connection is established
//! (`bpf/loopback.bpf.c`). It lives as long as this process. Where eBPF is refused, applications
//! are paced.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use libbpf_rs::{Link, MapCore, MapFlags, MapHandle};
use rustix::net::{AddressFamily, SocketType, socket, sockopt};
use smcr_os::tcp::network_cookie;

use crate::config::CongestionControl;
use crate::ebpf::{self, cgroup};

/// What this gateway does about congestion control on loopback.
#[derive(Debug)]
pub enum Loopback {
    /// Nothing: the operator said so.
    Host,
    /// It chooses for its own sockets; for those of applications it need not, or cannot, for this
    /// reason.
    Own(Option<String>),
    /// It chooses for both ends.
    Both(Program),
}

impl Loopback {
    /// Chooses what the configuration asks for and the host allows.
    pub fn choose(wanted: CongestionControl) -> Self {
        let of_host = fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
        match wanted {
            CongestionControl::Host => Self::Host,
            CongestionControl::Auto if !of_host.is_ok_and(|name| name.starts_with(PACES)) => {
                Self::Own(None)
            }
            CongestionControl::Auto => match Program::load() {
                Ok(program) => Self::Both(program),
                Err(why) => Self::Own(Some(why)),
            },
        }
    }

    /// Prepares a socket that listens for applications at `bind`, before it listens. Connections
    /// that it accepts inherit that if `bind` is a loopback address.
    pub(crate) fn suit_listener(&self, socket: &OwnedFd, bind: SocketAddr) {
        match self {
            Self::Host => return,
            Self::Own(_) => {}
            // What is not noted is paced.
            Self::Both(program) => drop(program.note_listener(bind.port())),
        }
        self.suit_accepted(socket, bind.ip());
    }

    /// Prepares a connection of an application at `source`.
    pub(crate) fn suit_accepted(&self, socket: &OwnedFd, source: IpAddr) {
        match self {
            Self::Own(_) | Self::Both(_) if source.to_canonical().is_loopback() => {
                // Each kernel has it. If a host forbids it to us, its own choice remains.
                let _ = sockopt::set_tcp_congestion(socket, PLAIN);
            }
            Self::Host | Self::Own(_) | Self::Both(_) => {}
        }
    }

    /// Prepares a socket that is about to connect to an application at `target`.
    pub(crate) fn suit_client(&self, socket: &OwnedFd, target: IpAddr) {
        match self {
            // The program chooses for both ends, then.
            Self::Both(program)
                if target.to_canonical().is_loopback() && program.mark(socket).is_ok() => {}
            Self::Host | Self::Own(_) | Self::Both(_) => self.suit_accepted(socket, target),
        }
    }
}

impl fmt::Display for Loopback {
    /// One sentence for the log and for `doctor`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("connections on loopback have the host's congestion control"),
            Self::Own(None) => f.write_str("connections on loopback are not paced"),
            Self::Own(Some(why)) => {
                write!(f, "applications are paced by the host's bbr on loopback, too: {why}")
            }
            Self::Both(_) => f.write_str(
                "connections of applications with this gateway are not paced on loopback (eBPF)",
            ),
        }
    }
}

/// The loaded program. Dropping it detaches the program; established connections do not notice.
pub struct Program {
    sockets: MapHandle,
    listeners: MapHandle,
    /// Holds the program in the cgroup.
    _link: Link,
}

impl Program {
    /// Loads the program and attaches it to the root of the cgroups that we can see, where the
    /// applications are.
    fn load() -> Result<Self, String> {
        let any = socket(AddressFamily::INET, SocketType::STREAM, None);
        let network = any.map_err(io::Error::from).and_then(|any| network_cookie(any.as_fd()));
        let network = network.map_err(|error| error.to_string())?;
        let cgroup = cgroup::Root::open()?;
        let refused = |error: libbpf_rs::Error| error.to_string();
        let mut object = ebpf::open(PROGRAM).map_err(refused)?;
        let constants =
            object.maps_mut().find(|map| map.name().to_string_lossy().ends_with(".rodata"));
        let mut constants = constants.expect("the program has constants");
        let constants = constants.initial_value_mut().expect("they have values");
        constants[..8].copy_from_slice(&network.to_ne_bytes());
        let object = object.load().map_err(refused)?;
        let map = |name| ebpf::map(&object, name).map_err(refused);
        let (sockets, listeners) = (map("sockets")?, map("listeners")?);
        let link = ebpf::attach(&object, &cgroup).map_err(refused)?;
        Ok(Self { sockets, listeners, _link: link })
    }

    fn note_listener(&self, port: u16) -> io::Result<()> {
        let key = u32::from(port).to_ne_bytes();
        self.listeners.update(&key, &[1], MapFlags::ANY).map_err(io::Error::other)
    }

    fn mark(&self, socket: &OwnedFd) -> io::Result<()> {
        ebpf::mark(&self.sockets, socket.as_fd(), OURS)
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").finish_non_exhaustive()
    }
}

/// Compiled by `build.rs`.
const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/loopback.o"));
/// What the program is told of a socket of ours. It looks only whether it was told anything.
const OURS: u32 = 1;
/// How the names of those begin that pace packets. `bpf/loopback.bpf.c` has the same.
const PACES: &str = "bbr";
/// The plainest, which lets a window grow for as long as nothing is lost. `bpf/loopback.bpf.c` has
/// the same.
const PLAIN: &str = "reno";

#[cfg(test)]
mod tests;
