//! Real programs on two hosts, with and without a pair of gateways between them.
//!
//! ```text
//!   host a, 10.8.0.1                                       host b, 10.8.0.2
//!   client ─TCP─► 127.0.0.1:P  gateway A ══ SMC-R ══ gateway B  127.0.0.1:P ─TCP─► server
//! ```
//!
//! The hosts are network namespaces, so everything here needs root: `scripts/test e2e` runs it.
//! Tests whose name begins with `smoke` are the quick part. The logs of the processes of a test
//! stay in `target/e2e/TEST/`.
//!
//! No test waits without a limit, and none compares speeds: a test asserts behaviour, the harness
//! in `perf/` measures.

mod access_log;
mod blocked;
mod browser;
mod capture;
mod captured;
mod clock;
mod confined;
mod congested;
mod cores;
mod crowd;
mod dormant;
mod failover;
mod failure;
mod fastest;
mod fidelity;
mod gateway;
mod hostile;
mod hosts;
mod http;
mod ipv6;
mod keepalive;
mod kinds;
mod lifecycle;
mod limits;
mod loopback;
mod metrics;
mod narrow;
mod page;
mod pattern;
mod peers;
mod preload;
mod process;
mod programs;
mod proxies;
mod reload;
mod router;
mod shm;
mod silence;
mod steady;
mod stranger;
mod streams;
mod time_wait;
mod top;
mod transfer;
mod transparent;
mod unplug;
mod upstreams;
mod wire;
