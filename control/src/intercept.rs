//! Connections of applications that know nothing of this gateway, led to one of its listeners.
//!
//! Three ways, each for another place:
//!
//! | `intercept` | by what | for whom |
//! |---|---|---|
//! | `"ebpf"` | programs at `connect`, in a cgroup (`bpf/intercept.bpf.c`) | applications of this host; nothing is left when the gateway is gone |
//! | `"redirect"` | NAT of nftables | applications of this host, and hosts for which it is a router |
//! | `"tproxy"` | TPROXY of nftables and a routing rule | hosts for which it is a router, or clients of servers on this host; addresses stay as they are |
//!
//! Not here: nftables and routing rules, which an operator installs (`smcgate intercept`).

pub mod connects;
