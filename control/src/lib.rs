//! The gateway: everything slow.
//!
//! One control thread ([`gateway`]) accepts connections, talks them into SMC-R or lets them stay
//! TCP, and hands them to polling threads, of which there is one per RNIC. One admin thread
//! ([`admin`]) answers operators. Protocol lives below, in `smcr-proto`; this crate drives it.
//!
//! ```text
//!   gateway: accept ─► rendezvous ─► groups ─► placement ─► (poller) ─► closed
//! ```
#![forbid(unsafe_code)]

pub mod access_log;
pub mod admin;
pub mod admission;
pub mod capture;
pub mod cli;
pub mod comparison;
pub mod config;
pub mod confine;
pub mod cores;
mod deadlines;
pub mod device;
pub(crate) mod ebpf;
mod entropy;
pub mod farewells;
pub mod gateway;
pub mod groups;
pub mod host_memory;
pub mod idle;
pub mod intercept;
pub mod ipsec;
pub mod listener;
pub mod local;
pub mod log;
pub mod loopback;
pub mod measure;
pub mod network;
pub mod operate;
pub mod passed;
pub mod paths;
pub mod placement;
pub mod places;
pub mod pnet;
mod proxy_header;
pub mod rdma;
pub mod reactor;
pub mod reasons;
pub mod reload;
pub mod rendezvous;
pub mod resolver;
mod service;
pub mod sessions;
pub mod signals;
pub mod slab;
pub mod smc_option;
pub mod sources;
pub mod start;
pub mod stats;
pub mod status;
pub mod supervise;
pub mod termination;
pub mod tools;
pub mod upstreams;
