//! DPDK made safe: its environment, and ports that send and receive Ethernet frames in bursts.
//!
//! ```text
//!   start ─► Port::open ─► receive, frame ─► …           one thread at a time uses a port
//!                          vacate, room, transmit        nothing here blocks but open and drop
//! ```
//!
//! A port has one queue in each direction. It is what EAL takes after `--vdev`, as
//! `net_memif0,role=server`, or a PCI address. One process has a port at a time (`lock`).

mod eal;
mod error;
mod lock;
mod port;

pub use dpdk_sys::{BURST_MAX, Figures, Unavailable};
pub use eal::{Pages, start, version};
pub use error::Error;
pub use port::{Port, Wishes, interface_below, is_privileged};
pub use smcr_os::carrier::Link;
