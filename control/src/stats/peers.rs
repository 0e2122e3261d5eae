//! How fast SMC-R and TCP are towards servers.

use serde::{Deserialize, Serialize};

/// How fast SMC-R and TCP are towards one server, as connections of late have shown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Peer {
    /// The server.
    pub address: String,
    /// In what SMC-R is slower: `first byte` or `throughput`; empty if it is not, or if nobody
    /// knows.
    pub slower: String,
    /// Of connections over SMC-R.
    pub smc: Measured,
    /// Of connections over TCP.
    pub tcp: Measured,
}

/// What connections over one transport have shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Measured {
    /// How many measurements there were, since the start.
    pub samples: u64,
    /// The middle time until the first answer, in the last two minutes; zero if too few are known.
    pub first_byte_ns: u64,
    /// The middle throughput of connections that carried much; zero if too few are known.
    pub bytes_per_s: u64,
}
