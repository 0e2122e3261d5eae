//! Interception of connections from outside to servers on this host, by eBPF.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use libbpf_rs::{Link, MapCore, MapFlags, MapHandle};

use super::connects::{PLACE_LEN, destination, mapped, networks_of, place};
use crate::config::{Cidr, Intercept};
use crate::ebpf;

/// The loaded program. Dropping it detaches it: connections that were intercepted go on, and new
/// ones reach servers themselves.
pub struct Steering {
    intercepted: MapHandle,
    spoken_for: Arc<MapHandle>,
    listener: MapHandle,
    addresses: Addresses,
    led: Vec<(Cidr, u16)>,
    /// Holds the program in the network namespace.
    _link: Link,
}

impl Steering {
    /// Loads the program for the network namespace of this process. What `intercept` says comes to
    /// `listener`, which is bound to `bind`, unless it comes from one of the addresses `here`.
    ///
    /// # Errors
    ///
    /// Why not, in words that continue a sentence; nothing is left behind.
    pub fn load(
        intercept: &Intercept,
        listener: BorrowedFd<'_>,
        bind: SocketAddr,
        here: &[IpAddr],
    ) -> Result<Self, String> {
        let refused = |error: libbpf_rs::Error| error.to_string();
        let failed = |error: io::Error| error.to_string();
        let object = ebpf::open(PROGRAM).and_then(|object| object.load()).map_err(refused)?;
        let intercepted = ebpf::map(&object, "intercepted").map_err(refused)?;
        let spoken_for = Arc::new(ebpf::map(&object, "spoken_for").map_err(refused)?);
        let leads_to = ebpf::map(&object, "listener").map_err(refused)?;
        put(&leads_to, listener).map_err(refused)?;
        let own = ebpf::map(&object, "own").map_err(refused)?;
        let mut led = Vec::new();
        for network in networks_of(intercept) {
            // The kernel does not lead one family to the other, except to a listener of both.
            if network.base().is_ipv4() != bind.is_ipv4() && !bind.ip().is_unspecified() {
                continue;
            }
            for port in intercept.ports.iter().cloned().flatten() {
                let key = destination(network, port);
                intercepted.update(&key, &[0; 4], MapFlags::ANY).map_err(refused)?;
                led.push((network, port));
            }
        }
        let mut addresses = Addresses { own, here: HashSet::new() };
        addresses.are(here);
        let namespace = File::open("/proc/self/ns/net").map_err(failed)?;
        let program = object.progs_mut().next().expect("the object has one program");
        let link = program.attach_netns(namespace.as_raw_fd()).map_err(refused)?;
        Ok(Self { intercepted, spoken_for, listener: leads_to, addresses, led, _link: link })
    }

    /// This host has the addresses `here` now: what comes from them is not intercepted.
    pub fn is_at(&mut self, here: &[IpAddr]) {
        self.addresses.are(here);
    }

    /// The listener listens anew, and the kernel has forgotten it here.
    ///
    /// # Errors
    ///
    /// When the kernel is out of memory; then clients reach servers themselves.
    pub fn listens_anew(&self, listener: BorrowedFd<'_>) -> io::Result<()> {
        put(&self.listener, listener).map_err(io::Error::other)
    }

    /// We are about to connect from `from`, which is an address of a client, to `to`. That is not
    /// intercepted again for as long as the result is there.
    pub fn leave_alone(&self, from: SocketAddr, to: SocketAddr) -> LeftAlone {
        let ends = ends(from, to);
        // The oldest is forgotten when there are too many. Without memory the connection would come
        // back to us, and is refused there.
        drop(self.spoken_for.update(&ends, &[0; 4], MapFlags::ANY));
        LeftAlone { spoken_for: Arc::clone(&self.spoken_for), ends }
    }

    /// Intercepts nothing more. Connections that were intercepted go on.
    pub fn release_all(&mut self) {
        for (network, port) in std::mem::take(&mut self.led) {
            // Fails only if it was never intercepted.
            drop(self.intercepted.delete(&destination(network, port)));
        }
    }
}

/// The addresses of this host, as the program knows them.
struct Addresses {
    own: MapHandle,
    /// What is in the map.
    here: HashSet<IpAddr>,
}

impl Addresses {
    fn are(&mut self, here: &[IpAddr]) {
        let here: HashSet<IpAddr> = here.iter().copied().collect();
        for gone in self.here.difference(&here) {
            drop(self.own.delete(&mapped(*gone).octets()));
        }
        for new in here.difference(&self.here) {
            let noted = self.own.update(&mapped(*new).octets(), &[0; 4], MapFlags::ANY);
            if let Err(error) = noted {
                tracing::warn!(address = %new, %error, "what comes from here is intercepted, too");
            }
        }
        self.here = here;
    }
}

/// Has the program lead to `listener`.
fn put(place: &MapHandle, listener: BorrowedFd<'_>) -> libbpf_rs::Result<()> {
    let socket = u64::try_from(listener.as_raw_fd()).expect("descriptors are not negative");
    place.update(&0_u32.to_ne_bytes(), &socket.to_ne_bytes(), MapFlags::ANY)
}

/// A connection of ours that is not intercepted.
///
/// It lasts as long as the connection does, and not only until that is established: a server that
/// has answered by a SYN cookie is looked for once more when the first bytes come. As soon as the
/// connection is over, the client itself may connect so, and is to be intercepted.
pub struct LeftAlone {
    spoken_for: Arc<MapHandle>,
    ends: [u8; 2 * PLACE_LEN],
}

impl Drop for LeftAlone {
    fn drop(&mut self) {
        // Fails only if it was forgotten because there were too many.
        drop(self.spoken_for.delete(&self.ends));
    }
}

impl fmt::Debug for LeftAlone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeftAlone").finish_non_exhaustive()
    }
}

/// `struct ends` of the program.
fn ends(from: SocketAddr, to: SocketAddr) -> [u8; 2 * PLACE_LEN] {
    let mut out = [0; 2 * PLACE_LEN];
    out[..PLACE_LEN].copy_from_slice(&place(from));
    out[PLACE_LEN..].copy_from_slice(&place(to));
    out
}

impl fmt::Debug for Steering {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Steering").finish_non_exhaustive()
    }
}

/// Compiled by `build.rs`.
const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/steer.o"));
