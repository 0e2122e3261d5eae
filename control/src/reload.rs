//! A configuration that shall take the place of the one in force, with everything about it that
//! takes time: the file is read, and the names in it are resolved, before the control thread is
//! asked to act on it.

use std::net::SocketAddr;
use std::path::Path;

use crate::config::Config;

/// A configuration, and where its listeners lead.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// What the operator wrote.
    pub config: Config,
    /// Where the connections of each listener go; none if each has its own target.
    pub upstreams: Vec<Option<SocketAddr>>,
}

impl Prepared {
    /// Reads the file at `path`.
    ///
    /// # Errors
    ///
    /// What is wrong with it, in one line.
    pub fn read(path: &Path) -> Result<Self, String> {
        Self::of(Config::load(path).map_err(|error| error.to_string())?)
    }

    /// Resolves the names in `config`.
    ///
    /// # Errors
    ///
    /// Which name has no address, and what the resolver says.
    pub fn of(config: Config) -> Result<Self, String> {
        let resolve = |listener: &crate::config::Listener| match listener.upstream.resolve() {
            Ok(found) => Ok(found.first().copied()),
            Err(error) => {
                let (name, upstream) = (&listener.name, &listener.upstream);
                Err(format!("listener {name}: upstream {upstream} cannot be resolved: {error}"))
            }
        };
        let upstreams = config.listeners.iter().map(resolve).collect::<Result<_, _>>()?;
        Ok(Self { config, upstreams })
    }
}
