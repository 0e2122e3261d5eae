//! The system calls the data plane needs, made safe.
//!
//! This crate and its siblings below `ffi/` hold the only `extern "C"` calls of the project. What a
//! call asks for is either checked here or promised by an `unsafe trait` whose implementor is
//! `smcr-memory`. No policy lives here: no retries, no buffering, no logging.

pub mod interface;
pub mod mapping;
pub mod netdev;
pub mod offload;
mod option;
pub mod tcp;
pub mod udp;
pub mod vectored;

pub use mapping::Mapping;
pub use vectored::{Foreign, Piece, readv, writev};
