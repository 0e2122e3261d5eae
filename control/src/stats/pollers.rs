//! What `/stats` says of polling threads.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One polling thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Poller {
    /// Its number, which no other has for as long as the process runs.
    pub index: u32,
    /// The core that was chosen for it, if one was.
    pub core: Option<u32>,
    /// Whether it is pinned to that core now.
    pub pinned: bool,
    /// Why it has this core, or none.
    pub placement: String,
    /// Turns of its loop.
    pub turns: u64,
    /// Turns in which nothing moved.
    pub turns_idle: u64,
    /// Connections it serves now.
    pub connections: u32,
    /// Everything else it counts, by name, as `smcr_engine::counters` has it.
    pub counters: BTreeMap<String, u64>,
    /// How long bytes stay in each stage of their way: `read_to_posted`, `posted_to_acknowledged`
    /// by the peer's RNIC, and `announced_to_written`.
    pub stages: BTreeMap<String, Residence>,
}

/// How long sampled bytes stayed in a stage of their way through a gateway. Times are in
/// nanoseconds, and zero while there are none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Residence {
    /// How many times were measured.
    pub count: u64,
    /// Their sum.
    pub sum_ns: u64,
    /// What half of them do not exceed.
    pub p50_ns: u64,
    /// What 99 of 100 do not exceed.
    pub p99_ns: u64,
    /// What 999 of 1,000 do not exceed.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// How many were below each time, but not below the one before it. Intervals that have none are
    /// left out.
    pub buckets: Vec<(u64, u64)>,
}
