//! What our eBPF programs have in common: how they are loaded, and how they know our sockets.
//!
//! A program lives exactly as long as this process: the kernel detaches it when the descriptor of
//! its link is closed, by `Drop` or by the end of the process, however violent.

pub(crate) mod cgroup;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, OpenObject};

/// Opens a compiled object. What libbpf has to say of it goes to our log, and not to standard
/// error.
///
/// # Errors
///
/// When it is none, or memory is short.
pub(crate) fn open(object: &[u8]) -> libbpf_rs::Result<OpenObject> {
    libbpf_rs::set_print(Some((libbpf_rs::PrintLevel::Info, |_, line| {
        tracing::debug!(target: "libbpf", "{}", line.trim_end());
    })));
    ObjectBuilder::default().open_memory(object)
}

/// The map of this name, beyond the life of `object`.
///
/// # Errors
///
/// When the process is out of descriptors.
///
/// # Panics
///
/// If the object has no such map.
pub(crate) fn map(object: &Object, name: &str) -> libbpf_rs::Result<MapHandle> {
    let map = object.maps().find(|map| map.name() == name).expect("the program has it");
    MapHandle::try_from(&map)
}

/// Attaches the only program of `object` to a cgroup, beside whatever else is attached there.
///
/// # Errors
///
/// When the kernel refuses.
pub(crate) fn attach(object: &Object, cgroup: impl AsFd) -> libbpf_rs::Result<Link> {
    let program = object.progs_mut().next().expect("the object has one program");
    program.attach_cgroup(cgroup.as_fd().as_raw_fd())
}

/// Sets what a map of sockets says of `socket`.
///
/// # Errors
///
/// When the kernel is out of memory.
pub(crate) fn mark(sockets: &MapHandle, socket: BorrowedFd<'_>, value: u32) -> io::Result<()> {
    let key = socket.as_raw_fd().to_ne_bytes();
    sockets.update(&key, &value.to_ne_bytes(), MapFlags::ANY).map_err(io::Error::other)
}
