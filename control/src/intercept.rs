//! Connections of applications that know nothing of this gateway, led to one of its listeners.
//!
//! Three ways, each for another place:
//!
//! - `"ebpf"`, for applications of this host: programs at `connect`, in a cgroup
//!   (`bpf/intercept.bpf.c`). For clients from outside, one where the kernel looks for a listener
//!   (`bpf/steer.bpf.c`). Nothing is left when the gateway is gone.
//! - `"redirect"`, for the same, and for hosts for which this one is a router: NAT of nftables.
//! - `"tproxy"`, for clients from outside, and hosts for which this one is a router: TPROXY of
//!   nftables and a routing rule. Addresses stay as they are.
//!
//! What is in the kernel for the last two ([`rules`]) stays there if the gateway dies, until it is
//! started again or somebody says `smcgate intercept remove`.

pub mod connects;
pub mod rules;
pub mod steering;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net;
use std::path::Path;

use rustix::net::sockopt;

use crate::config::{Config, Intercept, InterceptWay, Listener, Protocol};
use crate::ebpf::cgroup;
use crate::listener::{Listener as AtWork, OWN_MARK, local_address};
use connects::Connects;
use rules::Rules;
use steering::Steering;

/// What leads connections to the listeners of one gateway, as long as this is there.
#[derive(Default)]
pub struct Interception {
    /// By the number of their listener.
    connects: Vec<(u16, Connects)>,
    steering: Vec<Steering>,
    rules: Option<Rules>,
    /// Nobody else intercepts in this network namespace.
    _claim: Option<net::UnixListener>,
}

impl Interception {
    /// Begins to lead connections to `listeners`, which are those of `config`.
    ///
    /// # Errors
    ///
    /// Why not, in one line; then nothing is left behind.
    pub fn begin(config: &Config, listeners: &[AtWork]) -> Result<Self, String> {
        let rules = Rules::of(config);
        if rules.is_none() && config.listeners.iter().all(|one| one.intercept.is_none()) {
            return Ok(Self::default());
        }
        let claim = claim()?;
        let (mut connects, mut steering) = (Vec::new(), Vec::new());
        for (index, listener) in (0..).zip(listeners) {
            let Some(intercept) = &listener.config.intercept else { continue };
            match (intercept.way, listener.config.accept) {
                (InterceptWay::Ebpf, Protocol::Tcp) => {
                    connects.push((index, at_connect(&listener.config, intercept)?));
                }
                (InterceptWay::Ebpf, Protocol::Smc) => {
                    steering.push(at_lookup(listener, intercept)?);
                }
                (InterceptWay::Redirect | InterceptWay::Tproxy, _) => {}
            }
        }
        if let Some(rules) = &rules {
            rules.install()?;
        }
        Ok(Self { connects, steering, rules, _claim: Some(claim) })
    }

    /// Where the connection wanted to go that listener `index`, at `own_port`, has accepted from
    /// `source`; none if it was not intercepted.
    pub(crate) fn original_of(
        &self,
        index: u16,
        (way, own_port): (InterceptWay, u16),
        accepted: &OwnedFd,
        source: SocketAddr,
    ) -> Option<SocketAddr> {
        let here = local_address(accepted)?;
        let connects = self.connects.iter().find(|(listener, _)| *listener == index);
        match (way, connects) {
            (InterceptWay::Ebpf, Some((_, connects))) => connects.take_original(source),
            // Otherwise the connection was made to the listener itself.
            (InterceptWay::Redirect, _) => {
                before_nat(accepted, here).filter(|original| *original != canonical(here))
            }
            (InterceptWay::Tproxy | InterceptWay::Ebpf, _) => {
                Some(canonical(here)).filter(|original| original.port() != own_port)
            }
        }
    }

    /// We are about to connect from the address of a client.
    pub(crate) fn speaking_for(&self, from: SocketAddr) {
        for steering in &self.steering {
            steering.leave_alone(from);
        }
    }

    /// From now on new connections go where applications want them to. Those that were intercepted
    /// go on.
    pub fn cease(&mut self) {
        for (_, connects) in &mut self.connects {
            connects.release_all();
        }
        for steering in &mut self.steering {
            steering.release_all();
        }
        if let Some(rules) = &self.rules
            && let Err(why) = rules.cease()
        {
            tracing::warn!(why, "connections are still intercepted");
        }
    }
}

impl Drop for Interception {
    fn drop(&mut self) {
        if self.rules.is_some()
            && let Err(why) = rules::remove()
        {
            tracing::warn!(why, "rules of the interception are left; say smcgate intercept remove");
        }
    }
}

impl fmt::Debug for Interception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interception").field("rules", &self.rules).finish_non_exhaustive()
    }
}

/// Loads the programs that lead connections of applications to `listener`.
fn at_connect(listener: &Listener, intercept: &Intercept) -> Result<Connects, String> {
    let what = |why: String| impossible(listener, &why);
    let cgroups: Result<Vec<OwnedFd>, String> = match &intercept.cgroups[..] {
        [] => cgroup::open_root().map(|root| vec![root]),
        some => {
            some.iter().map(|path: &std::path::PathBuf| cgroup::open(Path::new(path))).collect()
        }
    };
    let mut connects = cgroups.and_then(|it| Connects::load(&it, OWN_MARK)).map_err(what)?;
    connects.lead(intercept, listener.bind).map_err(|error| what(error.to_string()))?;
    Ok(connects)
}

/// Loads the program that leads connections from outside to `listener`.
fn at_lookup(listener: &AtWork, intercept: &Intercept) -> Result<Steering, String> {
    let socket = listener.socket.as_ref().expect("the gateway has not begun to drain").as_fd();
    Steering::load(intercept, socket, listener.config.bind)
        .map_err(|why| impossible(&listener.config, &why))
}

fn impossible(listener: &Listener, why: &str) -> String {
    let name = &listener.name;
    format!(
        "listener {name}: intercept = \"ebpf\" is not possible here: {why}; run as root or with \
         CAP_BPF and CAP_NET_ADMIN, or write intercept = \"redirect\""
    )
}

/// Takes the right to intercept in this network namespace. It ends with this process.
fn claim() -> Result<net::UnixListener, String> {
    let why = |error: std::io::Error| {
        if error.kind() == std::io::ErrorKind::AddrInUse {
            return "another gateway intercepts connections in this network namespace; stop it \
                    first, or give one gateway all listeners"
                .to_owned();
        }
        format!("the right to intercept cannot be taken: {error}")
    };
    // Abstract names belong to a network namespace, and are free again when their owner is gone.
    let name = net::SocketAddr::from_abstract_name(CLAIM).map_err(why)?;
    net::UnixListener::bind_addr(&name).map_err(why)
}

/// Where a connection wanted to go before NAT led it to us.
fn before_nat(accepted: &OwnedFd, here: SocketAddr) -> Option<SocketAddr> {
    let accepted = accepted.as_fd();
    match canonical(here) {
        SocketAddr::V4(_) => sockopt::ip_original_dst(accepted).ok().map(SocketAddr::V4),
        SocketAddr::V6(_) => sockopt::ipv6_original_dst(accepted).ok().map(SocketAddr::V6),
    }
}

fn canonical(at: SocketAddr) -> SocketAddr {
    SocketAddr::new(at.ip().to_canonical(), at.port())
}

const CLAIM: &[u8] = b"smcgate intercept";
