//! Safe wrappers of the system calls that the data plane needs.
//!
//! Only this crate and its siblings below `ffi/` make `extern "C"` calls. Each precondition of such
//! a call is either checked here or promised by an `unsafe trait` that `smcr-memory` implements. No
//! policy lives here: no retries, no buffering, no logging.

pub mod broken_pipe;
pub mod carrier;
pub mod counting;
pub mod credentials;
pub mod epoll;
pub mod interface;
pub mod lent;
pub mod mapping;
pub mod netdev;
pub mod offload;
mod option;
pub mod packet;
pub mod passing;
pub mod placed;
pub mod quiet;
pub mod scheduling;
pub mod seccomp;
pub mod tcp;
pub mod udp;
pub mod vectored;

pub use lent::{Exposed, Extent, Lent};
pub use mapping::{HUGE_PAGE, Mapping};
pub use placed::Placed;
pub use vectored::{Foreign, Piece, receive, send};
