//! SMC-R (RFC 7609) as functions of (state, now, input).
//!
//! TCP byte streams travel as RDMA writes into memory that the peer lent us. This crate knows the
//! words of that protocol and its rules, and nothing else: no clock, no socket, no heap, no NIC.
//!
//! - [`wire`]: the messages. CLC over the TCP stream, LLC and CDC over the queue pair.
//! - [`handshake`]: the CLC rendezvous, client and server (RFC 3.5.1, 3.5.2).
//! - [`link`] and [`link_group`]: the queue pairs shared with one peer (RFC 2.2, 3.5).
//! - [`connection`]: one TCP connection on a link: window, cursors, close, abort (RFC 4).
//! - [`ring`]: positions and cursors of wrapping buffers, once for everybody.
//!
//! Every machine is driven the same way: `handle_*` feeds an input, `poll_action` drains what the
//! caller must do, `poll_timeout` says when to call `handle_timeout`.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod connection;
pub mod error;
pub mod handshake;
pub mod limits;
pub mod link;
pub mod link_group;
mod outbox;
pub mod ring;
pub mod time;
pub mod vocabulary;
pub mod wire;

pub use error::PeerMisbehaved;
pub use ring::{OutOfWindow, Position, Ring, Span};
pub use time::Instant;
pub use vocabulary::{
    AlertToken, Gid, LinkNumber, LinkUserId, MacAddress, Mtu, PeerId, Psn, QpAddress, Qpn, Rkey,
    RmbeSize,
};
pub use wire::Malformed;
