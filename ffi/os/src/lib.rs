//! Safe wrappers of the system calls that the data plane needs.
//!
//! Only this crate and its siblings below `ffi/` make `extern "C"` calls. Each precondition of such
//! a call is either checked here or promised by an `unsafe trait` that `smcr-memory` implements. No
//! policy lives here: no retries, no buffering, no logging.

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

/// Memory lent to a NIC. `smcr-memory` implements it; the bindings to real NICs require it.
///
/// # Safety
///
/// While the value lives, its bytes stay mapped, in place and registered, and no Rust reference to
/// any of them exists.
///
/// Nobody should *change* them meanwhile either, or the NIC sends wrong bytes. But safe code can
/// change them through the region, so memory safety must not depend on it.
pub unsafe trait Lent {
    /// The bytes the NIC may read.
    fn piece(&self) -> Piece;
}
