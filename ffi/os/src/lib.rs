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

/// Memory lent to a NIC. `smcr-memory` implements it, the bindings to real NICs ask for it.
///
/// # Safety
///
/// While the value lives, the bytes it names stay mapped, in place and registered, and no Rust
/// reference to any of them exists.
///
/// That nobody *changes* them meanwhile is asked of safe code, for the sake of what is sent; safe
/// code can reach them through the region, so memory safety must not depend on it.
pub unsafe trait Lent {
    /// The bytes the NIC may read.
    fn piece(&self) -> Piece;
}
