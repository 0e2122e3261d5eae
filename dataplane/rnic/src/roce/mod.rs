//! RoCEv2 in software: a NIC that sends and receives over a UDP port, or over a port of DPDK.
//!
//! It speaks the protocol of real RNICs and of Linux `rdma_rxe`: reliable connected queue pairs,
//! RDMA writes, sends, acknowledgements, retransmission. The core has no I/O, no clock and no
//! threads; a [`Wire`] carries its packets.
//!
//! ```text
//!   post ─► requester ─► batch ─► Wire ······ Wire ─► responder ─► Region, messages
//!             ▲ window, go-back-N                        │ order, keys, bounds
//!             └──────────── acknowledgements ◄───────────┘
//! ```
//!
//! - A write is sent as a train of WRITE ONLY packets, each complete in itself, all but the last of
//!   one size. Packets of equal size followed by one shorter one leave in one system call
//!   (`batch`), and so do equally long messages to one queue pair.
//! - Between two NICs of this kind several requests may share a packet, and packets may be as large
//!   as the path allows, rather than as large as the next path MTU of InfiniBand (`dense`).
//! - Each queue pair probes which packet size its path carries, and probes again when packets are
//!   lost repeatedly. Unacknowledged requests whose packets were too large are split again into
//!   smaller ones (`path`).
//! - Acknowledgements are delayed and combined: a queue pair sends at most one per turn, together
//!   with data if it can (`responder`).
//! - The control thread's half ([`Rnic`]) and the poller's ([`Fabric`]) share two queues and no
//!   lock. `register` queues the new key before it returns, and the fabric applies queued keys
//!   after it received packets and before it processes them. So a key works for everybody who was
//!   told of it.
//! - A NIC may have several fabrics, each with a poller, its own queue pairs and its own keys.
//!   Peers see one NIC: packets are steered to the right fabric by queue pair number (`siblings`).
//! - RoCE has no authentication. Queue pair numbers, first PSNs and keys are random, the peer's
//!   address is checked, and a packet is processed only if its ICRC is right. Somebody who tries
//!   PSNs in the peer's name is noticed and reported (`guard`).

use std::io;
use std::net::SocketAddr;

mod batch;
mod congestion;
mod counters;
mod dense;
pub mod dpdk;
mod fabric;
mod frame;
mod guard;
mod icrc;
mod inbox;
mod keys;
pub mod lossy;
mod marks;
mod neighbours;
pub mod packet;
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
mod spell;
mod tap;
pub mod udp;
mod wire;

#[cfg(test)]
mod tests;

pub use batch::{Ecn, Run, Sent, Train, Wire};
pub use counters::Counters;
pub use fabric::Fabric;
pub use rnic::{Opening, Parameters, PathMtu, Qp, Rnic};
pub use siblings::Share;
pub(crate) use spell::Speller;
pub use tap::{Record, Selection, Tracer};
pub(crate) use tap::{Tap, tap};
#[cfg(test)]
pub(crate) use {frame::FRAME_MAX, frame::parse, wire::Body, wire::Packet};

/// The most queue pairs of one NIC. It sizes the tables, which never grow.
pub const QUEUE_PAIRS_MAX: u32 = 4096;
/// The most rkeys of one NIC.
pub const KEYS_MAX: usize = 8_192;
/// Depth of a send queue: work requests whose completions were not reported yet.
pub const SEND_QUEUE_DEPTH: usize = 2048;
/// Received messages that may wait for a `poll` with room. When there are more, peers get an RNR
/// NAK (receiver not ready); beyond half of it, those peers do whose messages fill it.
pub const INBOX_MAX: usize = 8192;
/// The UDP port of RoCEv2.
pub const UDP_PORT: u16 = 4791;

/// The bytes that a packet, or a part of a dense one, takes from the window beside its payload:
/// headers here and overhead at the receiver's socket.
const PACKET_COST: u32 = 64;

/// Creates the two halves of a NIC whose packets `wire` carries.
///
/// # Panics
///
/// If the path MTU of the port in `parameters` is a reserved value.
pub fn join<W: Wire>(parameters: Parameters, wire: W) -> (Rnic, Fabric<W>) {
    let local = SocketAddr::new(parameters.port.gid.to_ip(), parameters.udp_port);
    let shared = shared::Shared::new();
    let fabric = Fabric::new(local, wire, std::sync::Arc::clone(&shared));
    (Rnic::new(parameters, shared), fabric)
}

/// Creates one NIC with a fabric for each part. Part i must have share i, and all parts have one
/// address. Peers see one NIC.
///
/// # Errors
///
/// When the process is out of descriptors.
///
/// # Panics
///
/// If one of several wires has no event descriptor, or a share does not match the position of its
/// part.
pub fn join_all<W: Wire>(parts: Vec<(Parameters, W)>) -> io::Result<Vec<(Rnic, Fabric<W>)>> {
    if let [(setup, _)] = parts.as_slice() {
        assert_eq!(setup.share, Share::ALL);
        return Ok(parts.into_iter().map(|(setup, wire)| join(setup, wire)).collect());
    }
    let siblings = {
        let wires = parts.iter().map(|(_, wire)| wire.event_descriptor());
        let wires: Vec<_> = wires.map(|wire| wire.expect("a wire to sleep on")).collect();
        siblings::Siblings::new(&wires)?
    };
    let joined = parts.into_iter().zip(siblings).map(|((setup, wire), siblings)| {
        assert_eq!(setup.share, siblings.share());
        let (rnic, mut fabric) = join(setup, wire);
        fabric.set_siblings(siblings);
        (rnic, fabric)
    });
    Ok(joined.collect())
}
