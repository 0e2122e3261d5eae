//! A NIC between the processes of one host, which meet in a directory.
//!
//! An RDMA write is a copy into the peer's memory, and a message goes into a ring that both ends of
//! a queue pair map. No kernel is in the path, unless a poller sleeps or the queue pair has rested:
//! then a bell is rung.
//!
//! - **Where peers meet.** Each NIC listens on a Unix socket in a directory. Such sockets belong to
//!   the file system and not to a network, so containers with networks of their own meet there, if
//!   they share the directory. Its permissions say who may be a peer.
//! - **Who is near.** The first half of a GID is made from the directory and from this boot of the
//!   host. Where it is the same, both NICs are on one host and in one directory: see `directory`.
//! - **A queue pair** is a connection of such sockets, a ring in each direction (`ring`) in a
//!   shared region, and a second connection by which the ends wake each other (`bell`).
//! - **A registered region** is shared by its descriptor. The peer asks for it, with the rkey, when
//!   it first writes there, and gets it if its queue pair is of the same domain: see `worker`.
//!
//! A peer is trusted no more than one behind a wire. It can write whatever it likes to the rings
//! and to the regions that it was given, at any time, and send whatever it likes by its sockets.
//! So regions are mapped only if they cannot shrink, and indexes and lengths in a ring are read
//! once and then checked. Nothing that the peer has a hold on can make a poller or the worker wait:
//! see `bell` and `doubtful`. Who breaks the rules, or dies, breaks his queue pair and no other.
//!
//! One thing is different from a wire. Whoever was given a region keeps it: it can read the region
//! as well, and go on writing after the region was deregistered. An RMB has the data of one peer
//! only, who wrote it, so a peer learns nothing by that, and disturbs only itself. Memory of
//! several peers must not be registered as one region.
//!
//! - `rnic`: the control thread's half. `fabric`: the poller's half; `pairs`: the queue pairs
//!   there; `pair`: one of them.
//! - `worker`: a thread that does whatever may take long: it connects sockets and maps memory.
//!   `entrance`: where others call; `callers`: those that are of no queue pair yet; `line`: one
//!   connection; `end`: what the worker knows of a queue pair.

mod bell;
mod callers;
mod directory;
mod doubtful;
mod end;
mod entrance;
mod fabric;
mod line;
mod nap;
mod pair;
mod pairs;
mod ring;
mod rnic;
mod shared;
mod sync;
mod wire;
mod worker;

#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use smcr_proto::Gid;

pub use fabric::{Counters, Fabric};
pub use rnic::{Opening, Qp, Rnic};

use directory::Directory;
use shared::Shared;
use worker::Worker;

/// Why a NIC cannot be opened, in one line that names the directory.
#[derive(Debug)]
pub struct OpenError {
    directory: String,
    what: &'static str,
    why: io::Error,
}

impl OpenError {
    /// What the kernel said.
    pub fn why(&self) -> &io::Error {
        &self.why
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { directory, what, why } = self;
        if why.kind() == io::ErrorKind::NotFound {
            return write!(f, "directory {directory}: there is no such directory");
        }
        write!(f, "directory {directory}: {what}: {why}")
    }
}

impl std::error::Error for OpenError {}

/// Opens a NIC in a directory. It gets as many fabrics as there are pollers; peers see one NIC.
///
/// # Errors
///
/// [`OpenError`], with nothing left open.
///
/// # Panics
///
/// If there are no pollers.
pub fn open(directory: &str, pollers: u32) -> Result<Vec<(Rnic, Fabric)>, OpenError> {
    assert!(pollers > 0);
    let fail = |what| move |why| OpenError { directory: directory.to_owned(), what, why };
    let place = Directory::open(directory).map_err(fail("it cannot be used"))?;
    let (gid, listener) = settle_in(&place).map_err(fail("no socket can be made in it"))?;
    let resources = "no descriptors or threads are left";
    let shared = Shared::new(place, gid, pollers).map_err(fail(resources))?;
    let shared = Arc::new(shared);
    let opened = (0..shared.parts().len()).map(|part| {
        let fabric = Fabric::new(&shared, part)?;
        Ok((Rnic::new(&shared, part), fabric))
    });
    let opened: io::Result<Vec<_>> = opened.collect();
    let opened = opened.map_err(fail(resources))?;
    Worker::start(&shared, listener).map_err(fail(resources))?;
    Ok(opened)
}

/// An address in the directory, and a socket there.
fn settle_in(place: &Directory) -> io::Result<(Gid, OwnedFd)> {
    loop {
        let gid = place.new_gid()?;
        match place.listen(gid) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            listener => return Ok((gid, listener?)),
        }
    }
}

/// The most requests in a send queue. The engine budgets 384.
const SENDS: usize = 512;
/// The largest region of a peer that is mapped.
const REGION_MAX: usize = 1 << 32;
