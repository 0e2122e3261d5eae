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
//!
//! # Tags
//!
//! Comments here and in the other crates have *tags*, such as
//! `RFC 7609 4.6.1 #8: validate before resuming`. A tag names one entry of the register, which is
//! `tests/spec/requirements/*.toml`: first the section of the RFC, then the number that we gave to
//! one rule of this section, then the title of the entry, which says what our code has to do. The
//! entry itself says in our own words what the RFC requires. Where we do otherwise, it is an
//! exception: the title says what our code does instead, and the entry says why.
//!
//! In production code a tag marks the line that obeys the rule. On a test it says that the test
//! proves it. A tag is one line. `cargo test -p smcgate-tests --test spec` fails if an entry lacks
//! one of the two, if a tag names no entry, or if its title is not that of the register. A
//! reference without such a number, such as "RFC 3.5.1", is an ordinary mention of a section and
//! claims nothing.
#![no_std]
#![forbid(unsafe_code)]

// Some files of tests are part of other crates, too, and call this one by its name.
#[cfg(test)]
extern crate self as smcr_proto;
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
