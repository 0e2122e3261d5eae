//! Real RNICs, by libibverbs.
//!
//! The control thread's half creates queue pairs and registers memory. The poller's half posts with
//! one doorbell for each burst and polls completion queues, which takes no system call. Whatever
//! may take long in between (connecting, failing and destroying a queue pair) is done by a worker
//! thread: see `worker`.
//!
//! - `device`: which port and which of its GIDs we use, and what is wrong if none.
//! - `rnic`: the control thread's half.
//! - `fabric`: the poller's half; `pair`: one queue pair there.
//! - `worker`: a thread that fails and destroys; `connects`: threads that connect.

mod connects;
mod device;
mod fabric;
mod pair;
mod rnic;
mod worker;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use rdma_core::{Channel, Library, Missing};

pub use device::{Config, OpenError};
pub use fabric::Fabric;
pub use rnic::{Opening, Qp, Rnic};

use device::Device;
use worker::Shared;

/// Whether libibverbs can be used.
///
/// # Errors
///
/// Why not, in one line.
pub fn available() -> Result<(), Missing> {
    rdma_core::load().map(drop)
}

/// Opens a port of an RNIC, with the libibverbs of the distribution.
///
/// # Errors
///
/// [`OpenError`], whose text names the device and the cause.
pub fn open(config: &Config<'_>) -> Result<(Rnic, Fabric), OpenError> {
    let library = rdma_core::load().map_err(|missing: Missing| {
        OpenError::new(config.device, format!("libibverbs cannot be used: {missing}"))
    })?;
    open_with(library, config)
}

/// The same, with a library that the caller has opened.
///
/// # Errors
///
/// [`OpenError`].
pub fn open_with(
    library: &'static Library,
    config: &Config<'_>,
) -> Result<(Rnic, Fabric), OpenError> {
    let device = Device::open(library, config)?;
    let refused = |error| OpenError::new(config.device, format!("the driver refuses: {error}"));
    let channel = Channel::new(&device.context).map_err(refused)?;
    let shared = Shared::start(&device.context, device.number).map_err(refused)?;
    let fabric = Fabric::new(&channel, &shared).map_err(refused)?;
    Ok((Rnic::new(device, channel, Arc::clone(&shared)), fabric))
}

/// The most requests in a send queue. The engine budgets 384.
const SENDS: u32 = 512;
/// Buffers for messages of 44 bytes.
const SHORT_RECEIVES: u32 = 512;
/// Buffers for messages of up to 8 KiB.
const LONG_RECEIVES: u32 = 64;
/// The most long messages of one queue pair that are on their way; more wait.
const LONG_SENDS: u32 = 4;
/// Bytes that a request may carry itself, from the most that is of use. Drivers refuse what they do
/// not have: those of Broadcom and Intel have about 100. Below 44, a message needs memory.
const INLINE: &[u32] = &[220, 128, 96, 64, 44, 0];
/// A queue pair in error makes an entry for each request and each buffer.
const ENTRIES_PER_PAIR: u32 = SENDS + SHORT_RECEIVES;
