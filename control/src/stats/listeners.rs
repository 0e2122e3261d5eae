//! What is said of listeners.

use serde::{Deserialize, Serialize};

use super::ByTransport;

/// One listener of the configuration. What it has counted since the start includes what listeners
/// of its name counted that are gone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Listener {
    /// Its name in the configuration.
    pub name: String,
    /// The address it is bound to; of local programs, the Unix socket by which they come in.
    pub bind: String,
    /// `tcp` or `smc`.
    pub accept: String,
    /// `tcp` or `smc`.
    pub connect: String,
    /// Where it connects to.
    pub upstream: String,
    /// The addresses that this means now.
    pub upstreams: Vec<Upstream>,
    /// `open`; `drained` if an operator has said so; `removed` if the configuration has it no more,
    /// and connections of it go on.
    pub state: String,
    /// Connections accepted.
    pub accepted: u64,
    /// Connections closed at once: a limit, or no upstream.
    pub refused: u64,
    /// Of these, because there were `connections_max`.
    pub refused_connections: u64,
    /// Because their source had `max_per_source`.
    pub refused_source: u64,
    /// Because more came in a second than `rate_max`.
    pub refused_rate: u64,
    /// Because more came of their source than `rate_per_source`.
    pub refused_source_rate: u64,
    /// Connections that exceed a limit and wait now.
    pub waiting: u64,
    /// Connections that came in after they had waited.
    pub waited: u64,
    /// Connections that exceeded a limit and came in without SMC-R.
    pub over_limit_tcp: u64,
    /// Connections now.
    pub active: u64,
    /// How long connections took that are over.
    pub durations: ByTransport,
}

impl Listener {
    /// Adds what another one counted: whatever only grows, and of upstreams only of those that both
    /// have.
    pub fn add_counts(&mut self, other: &Self) {
        self.accepted += other.accepted;
        self.refused += other.refused;
        self.refused_connections += other.refused_connections;
        self.refused_source += other.refused_source;
        self.refused_rate += other.refused_rate;
        self.refused_source_rate += other.refused_source_rate;
        self.waited += other.waited;
        self.over_limit_tcp += other.over_limit_tcp;
        self.durations.add(&other.durations);
        for upstream in &mut self.upstreams {
            let same = other.upstreams.iter().find(|theirs| theirs.address == upstream.address);
            upstream.failed += same.map_or(0, |theirs| theirs.failed);
        }
    }
}

/// One address to which connections of a listener go.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Upstream {
    /// The address.
    pub address: String,
    /// `up`; `down` as checks say; `out` for a while, after connects have failed repeatedly.
    pub state: String,
    /// Connections that have it now.
    pub active: u32,
    /// Connects that failed, since the start.
    pub failed: u64,
}
