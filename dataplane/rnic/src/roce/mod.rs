//! RoCEv2 in software: a NIC that is a UDP port.
//!
//! Its packets are those of real RNICs and of Linux `rdma_rxe`: reliable connected queue pairs,
//! RDMA writes and messages, acknowledgement, retransmission. The core has no I/O, no clock and no
//! threads; what carries its packets is a [`Wire`].
//!
//! ```text
//!   post ─► requester ─► batch ─► Wire ······ Wire ─► responder ─► Region, messages
//!             ▲ window, go-back-N                        │ order, keys, bounds
//!             └──────────── acknowledgements ◄───────────┘
//! ```
//!
//! - A write travels as a train of WRITE ONLY packets, each complete in itself, all but the last of
//!   one size. Equal packets followed by one shorter one leave in one system call
//!   (`batch`), and so do the equal messages of many connections.
//! - How large packets may be is found out by asking, and again when they do not come across; what
//!   was cut too large is cut anew (`path`).
//! - Acknowledgements are owed, not sent: at most one per queue pair and turn, and it rides behind
//!   data where it can (`responder`).
//! - The control thread's half ([`Rnic`]) and the poller's ([`Fabric`]) share two queues and no
//!   lock. Keys are pushed before `register` returns, and the fabric takes them after it received
//!   packets and before it looks at them: whoever heard of a key can use it.
//! - A NIC may have several fabrics, each with a poller, its own queue pairs and its own keys. To
//!   peers they are one: packets find their fabric by queue pair number (`siblings`).
//! - RoCE has no authentication. Queue pair numbers, first PSNs and keys are random, the peer's
//!   address is checked, and nothing a packet says is believed before its ICRC is.

use std::io;
use std::net::SocketAddr;

mod batch;
mod congestion;
mod counters;
mod fabric;
mod icrc;
mod inbox;
mod keys;
pub mod lossy;
mod pair;
mod pairs;
mod path;
mod psn;
mod request;
mod requester;
mod responder;
mod rnic;
mod shared;
mod siblings;
pub mod udp;
mod wire;

#[cfg(test)]
mod tests;

pub use batch::{Run, Sent, Train, Wire};
pub use counters::Counters;
pub use fabric::Fabric;
pub use rnic::{Opening, PathMtu, Qp, Rnic, Setup};
pub use siblings::Share;

/// Queue pairs of one NIC. Sizes its tables, which never grow.
pub const QUEUE_PAIRS_MAX: u32 = 4096;
/// Keys of one NIC.
pub const KEYS_MAX: usize = 8_192;
/// Requests that one queue pair takes before the first of them has completed.
pub const SEND_QUEUE_DEPTH: usize = 2048;
/// Messages that were received and wait for a `poll` with room. Beyond it, peers are told to wait;
/// and beyond half of it those that have many there.
pub const INBOX_MAX: usize = 8192;
/// The port of RoCEv2.
pub const UDP_PORT: u16 = 4791;

/// What a packet costs beside its payload, in the currency of windows: headers here and at the
/// receiver's socket.
const PACKET_COST: u32 = 64;

/// Joins the two halves of a NIC whose packets `wire` carries.
///
/// # Panics
///
/// If the port of `setup` has a path MTU that has no size.
pub fn join<W: Wire>(setup: Setup, wire: W) -> (Rnic, Fabric<W>) {
    let local = SocketAddr::new(setup.port.gid.to_ip(), setup.udp_port);
    let shared = shared::Shared::new();
    let fabric = Fabric::new(local, wire, std::sync::Arc::clone(&shared));
    (Rnic::new(setup, shared), fabric)
}

/// As [`join`], with several fabrics: each setup has its share, in order, and all have one address.
/// To peers they are one NIC.
///
/// # Errors
///
/// When the process is out of descriptors.
///
/// # Panics
///
/// If a wire has no event descriptor, or a setup another share than its place.
pub fn join_all<W: Wire>(parts: Vec<(Setup, W)>) -> io::Result<Vec<(Rnic, Fabric<W>)>> {
    let siblings = {
        let wires = parts.iter().map(|(_, wire)| wire.event_descriptor());
        let wires: Vec<_> = wires.map(|wire| wire.expect("a wire to sleep on")).collect();
        siblings::Siblings::new(&wires)?
    };
    let joined = parts.into_iter().zip(siblings).map(|((setup, wire), siblings)| {
        assert_eq!(setup.share, siblings.share());
        let (rnic, mut fabric) = join(setup, wire);
        fabric.meet(siblings);
        (rnic, fabric)
    });
    Ok(joined.collect())
}
