//! For tests: a libibverbs whose devices are in this process, and a network between them.
//!
//! It is an adversary within what libibverbs promises: a thread of its own carries out requests
//! late, so memory that comes back too early is seen to change; completions of many queue pairs
//! come mixed; a queue pair that is destroyed leaves its entries behind. It stops the process if a
//! completion queue overruns, if a key is wrong, or if an object outlives what it was made from.
//!
//! The devices are called `fake0`, `fake1` and so on; one comes into being when it is asked for.
#![allow(clippy::missing_safety_doc, reason = "the functions are called as libibverbs is")]

mod calls;
mod network;
mod objects;
mod trouble;

use std::collections::HashMap;
use std::sync::OnceLock;

use rdma_core_sys::Library;

pub use trouble::Trouble;

/// The library. It knows the devices that [`device`] has made.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    // SAFETY: `new` asks for functions that keep the promises of libibverbs: ours do.
    LIBRARY.get_or_init(|| unsafe { Library::new(calls::functions()) })
}

/// Makes a device with this IPv4 address, and returns its name.
pub fn device(address: [u8; 4]) -> String {
    network::with(|network| network.plug(address))
}

/// Reports an event of a device to whoever has it open, by the number of the C headers. It is about
/// the first port, which is up after `IBV_EVENT_PORT_ACTIVE`, and down after `IBV_EVENT_PORT_ERR`.
pub fn report(device: &str, event: i32) {
    report_of_port(device, 1, event);
}

/// The same about port 1 or 2.
pub fn report_of_port(device: &str, port: u8, event: i32) {
    network::with(|network| network.report(device, event, port));
}

/// Lets a device have a trouble from now on, or no longer.
pub fn trouble(device: &str, trouble: Trouble, is_on: bool) {
    network::with(|network| network.trouble(device, trouble, is_on));
}

/// Sets how many bytes a request of a device may carry itself. It refuses queue pairs that want
/// more.
pub fn limit_inline(device: &str, bytes: u32) {
    network::with(|network| network.device(device).inline_max = bytes);
}

/// Sets how many bytes may be registered at a device at the same time, as `ulimit -l` does.
pub fn limit_registrations(device: &str, bytes: u64) {
    network::with(|network| network.device(device).registered_max = bytes);
}

/// Sets the path MTU of the first port, by the number of the C headers. Reports nothing.
pub fn set_mtu(device: &str, mtu: i32) {
    network::with(|network| network.device(device).ports[0].mtu = mtu);
}

/// Gives a device another IPv4 address, and reports that its GIDs have changed.
pub fn readdress(device: &str, address: [u8; 4]) {
    network::with(|network| {
        network.device(device).address = address;
        network.report(device, rdma_core_sys::IBV_EVENT_GID_CHANGE, 1);
    });
}

/// What is open on a device: contexts, domains, registrations, completion queues, queue pairs.
pub fn census(device: &str) -> HashMap<&'static str, usize> {
    network::with(|network| network.census(device))
}
