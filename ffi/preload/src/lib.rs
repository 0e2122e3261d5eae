//! `libsmcgate.so`: preloaded into a program, it lets the gateway of this host turn the program's
//! TCP connections into SMC-R, without a hop over local TCP.
//!
//! ```text
//!   calls    what the program calls, by the names of the C library; nothing but translation
//!     │
//!   connect, accept, settle    when the gateway is asked     stream, name, options, epoll
//!     │                                                        what a Unix socket says differently
//!   door     one question to the gateway, one answer
//!   switch   a Unix socket takes the place of a TCP socket
//!   table    what we believe of each descriptor number
//!
//!   with rings:  ringed, copying   reading and writing      mappings   which number has which
//!                watch, places     who looks instead of sleeping in epoll_wait; signals
//! ```
//!
//! A TCP socket stays the program's own until its connection has become SMC-R. Then a Unix stream
//! socket gets its descriptor number; its other end is the gateway's. Bytes, readiness, `fork` and
//! `exec` work by themselves; only what the two kinds of socket say differently is answered here.
//!
//! # Rules
//!
//! - What we believe of a descriptor may be outdated: numbers are closed and used again behind our
//!   back. So it decides only where to look closer; the kernel says what the descriptor is.
//! - No heap, no locks: programs call these functions in signal handlers, after `fork`, and in
//!   many threads.
//! - Other descriptors cost one look at the table.
//! - A function that may be cancelled (`pthread_cancel`) is unwound through. So nothing that a
//!   frame owns may need to be dropped while it waits in a function of the C library.
#![cfg_attr(test, allow(dead_code, reason = "tests are not called by the names of the C library"))]

mod accept;
mod address;
mod adopt;
mod attach;
#[cfg(not(test))]
mod calls;
mod connect;
mod copying;
mod debug;
mod door;
mod end;
mod epoll;
mod fdinfo;
#[cfg(test)]
mod heap;
mod mappings;
mod messages;
mod name;
mod options;
#[cfg(test)]
mod pair;
mod patience;
mod places;
mod real;
mod recent;
mod ringed;
mod settings;
mod settle;
mod signals;
mod stream;
mod switch;
mod syn;
mod sys;
mod table;
#[cfg(all(target_env = "musl", not(test)))]
mod unwinding;
mod watch;
