//! A configuration that shall take the place of the one in force, with everything about it that
//! takes time: the file is read, and the names in it are resolved, before the control thread is
//! asked to act on it.

pub mod socket;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use crate::access_log::AccessLog;
use crate::config::{Config, ConfigError, Listener, Upstream};
use crate::device::Devices;
use crate::measure;
use crate::resolver;

/// A configuration, and what the names in it mean.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// What the operator wrote.
    pub config: Config,
    /// The addresses of names of upstreams, as far as they have any.
    pub names: BTreeMap<String, Vec<IpAddr>>,
    /// Why the access log cannot be written where the configuration wants it; none if it can, or if
    /// what is in the way may pass.
    pub log_mistake: Option<String>,
    /// The how manieth it is that the gateway was to read, 0 for that of the start. A later one was
    /// read later.
    pub order: u64,
}

impl Prepared {
    /// Reads the file at `path`.
    ///
    /// # Errors
    ///
    /// What is wrong with it, in one line.
    pub fn read(path: &Path) -> Result<Self, String> {
        let config = Config::load_at(path, &Devices::addresses_here());
        let config = config.map_err(|error| unreadable(path, &error))?;
        let log_mistake = AccessLog::mistake(&config.access_log);
        Ok(Self { log_mistake, ..Self::of(config) })
    }

    /// Resolves the names in `config`. Those that have no address are looked up again later.
    pub fn of(config: Config) -> Self {
        let all = config.listeners.iter().flat_map(|listener| &listener.upstream.all);
        let mut names = BTreeSet::new();
        for upstream in all {
            match upstream {
                Upstream::Measure => measure::listen(),
                Upstream::Name { host, .. } => drop(names.insert(host.clone())),
                Upstream::Address(_) | Upstream::OriginalDst => {}
            }
        }
        let names = what_they_mean(&config.dns.servers, &names);
        Self { config, names, log_mistake: None, order: 0 }
    }

    /// The addresses to which connections of `listener` may go, as far as they are known.
    pub fn addresses(&self, listener: &Listener) -> Vec<SocketAddr> {
        addresses(&self.names, listener)
    }
}

/// What is wrong with the file at `path`. If it cannot be opened, the reason may be that we have
/// given up its folder.
fn unreadable(path: &Path, error: &ConfigError) -> String {
    let is_denied = |error: std::io::Error| error.kind() == std::io::ErrorKind::PermissionDenied;
    match File::open(path).err().is_some_and(is_denied) {
        true => format!(
            "{error}; a gateway that runs reads its configuration only where it was at the start: \
             restart it"
        ),
        false => error.to_string(),
    }
}

/// What `names` mean, as far as anybody says so now.
fn what_they_mean(
    servers: &[SocketAddr],
    names: &BTreeSet<String>,
) -> BTreeMap<String, Vec<IpAddr>> {
    if names.is_empty() {
        return BTreeMap::new();
    }
    let found = resolver::look_up_now(servers, names);
    for upstream in names.iter().filter(|name| !found.contains_key(*name)) {
        tracing::warn!(
            upstream,
            "has no address yet; connections to it are refused until it has one"
        );
    }
    found
}

/// The addresses to which connections of `listener` may go, if names mean what `names` says.
pub(crate) fn addresses(
    names: &BTreeMap<String, Vec<IpAddr>>,
    listener: &Listener,
) -> Vec<SocketAddr> {
    let of = |upstream: &Upstream| match upstream {
        Upstream::Address(address) => vec![*address],
        Upstream::Name { host, port } => {
            let known = names.get(host).into_iter().flatten();
            known.map(|ip| SocketAddr::new(*ip, *port)).collect()
        }
        // Towards this host there is no RNIC.
        Upstream::OriginalDst | Upstream::Measure => Vec::new(),
    };
    listener.upstream.all.iter().flat_map(of).collect()
}
