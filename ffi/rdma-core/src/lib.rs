//! libibverbs, made safe: what reliable-connected queue pairs need, and no more.
//!
//! The types own what C hands out by address. Each `SAFETY` comment of this crate discharges the
//! obligations of a call with one of these invariants, by name:
//!
//! - **LIVE** A `raw` pointer came from the call that makes such an object, and only `Drop` ends
//!   the object. Each object holds an [`Arc`](std::sync::Arc) of those it was made from, so
//!   that they end after it.
//! - **THREADS** libibverbs promises that any thread may make any call at any time. So the types
//!   are `Send` and `Sync`, and their methods take `&self`.
//! - **LENT** The NIC reads only bytes of a [`Lent`](smcr_os::Lent) value that sits in a
//!   [`SendQueue`] until its completion was polled or its queue pair is destroyed, or of memory
//!   that it may also write.
//! - **EXPOSED** The NIC writes only bytes of an [`Exposed`](smcr_os::Exposed) value that a
//!   [`MemoryRegion`] holds until the NIC has forgotten it.
//! - **TABLE** The provider of an open device has filled the table of inline calls in its context.
//!
//! No policy lives here: no retries, no logging, no choice of numbers.

mod completion;
mod context;
mod environment;
mod memory;
mod queue_pair;
mod send;

pub use completion::{Channel, CompletionQueue, Dead, Entry, Outcome};
pub use context::{AsyncEvent, Context, GidEntry, Limits, OpenError, PortEvent, PortState, load};
pub use memory::{Access, MemoryRegion, ProtectionDomain};
pub use queue_pair::{MESSAGE_LEN, Peer, Plan, QueuePair};
pub use rdma_core_sys::{Library, Missing};
pub use send::{Body, Ended, Refused, SendQueue};

use std::io;

/// Whether the NIC has no part in an object any more, by what the call said that should destroy it.
///
/// `EIO` and `ENODEV` come from a kernel that has taken the device from this process. It ends all
/// objects of a device when it takes the device away.
fn has_ended(errno: i32) -> bool {
    [0, libc::EIO, libc::ENODEV].contains(&errno.abs())
}

/// What a call that returns an `errno` means.
fn check(errno: i32) -> io::Result<()> {
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno.abs())) }
}
