//! TCP option 254, by which two hosts tell each other in SYN and SYN-ACK that they have SMC-R.
//!
//! No socket call sends an unknown option, so a small eBPF program does it for the sockets that we
//! mark (`bpf/smc_option.bpf.c`). It lives exactly as long as this process: the kernel detaches it
//! when the descriptor of its link is closed, by `Drop` or by the end of the process, however
//! violent. Where eBPF is refused, peers can be listed in the configuration instead.
//!
//! Not here: what to do with the answer (`rendezvous`).
//!
//! # Specification
//!
//! RFC 7609, 3.1.1.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::{Link, MapCore, MapFlags, MapHandle};

use crate::config::{Cidr, OptionMode, Smc};
use crate::ebpf::{self, cgroup};

/// How this gateway and its peers tell each other that they have SMC-R.
#[derive(Debug)]
pub enum OptionSource {
    /// By the TCP option.
    Ebpf(SmcOption),
    /// These peers are taken to have it, and to take us to have it.
    Assume(Vec<Cidr>),
    /// They cannot, for this reason: every connection stays TCP.
    None(String),
}

impl OptionSource {
    /// Chooses what the configuration asks for and the host allows. With `of_others`, it works for
    /// sockets of other processes, too.
    pub fn choose(smc: &Smc, of_others: bool) -> Self {
        match smc.option {
            OptionMode::Assume => Self::Assume(smc.assume_peers.clone()),
            OptionMode::Ebpf | OptionMode::Auto => match SmcOption::load(of_others) {
                Ok(option) => Self::Ebpf(option),
                Err(_) if smc.option == OptionMode::Auto && !smc.assume_peers.is_empty() => {
                    Self::Assume(smc.assume_peers.clone())
                }
                Err(refused) => Self::None(refused.to_string()),
            },
        }
    }

    /// Whether it works for sockets that others have made, as far as that takes anything.
    pub fn is_for_others(&self) -> bool {
        match self {
            Self::Ebpf(option) => option.of_others,
            Self::Assume(_) | Self::None(_) => true,
        }
    }

    /// Makes the connections that `listener` accepts answer the option. Call it between `bind` and
    /// `listen`. Returns where that is.
    ///
    /// # Errors
    ///
    /// As [`SmcOption::mark_listener`].
    pub fn mark_listener(&self, listener: impl AsFd, ports: Ports) -> io::Result<Option<Place>> {
        match self {
            Self::Ebpf(option) => option.mark_listener(listener, ports).map(Some),
            Self::Assume(_) | Self::None(_) => Ok(None),
        }
    }

    /// Makes whatever listens there answer the option no more.
    pub fn forget(&self, place: &Place) {
        match self {
            Self::Ebpf(option) => option.forget(place),
            Self::Assume(_) | Self::None(_) => {}
        }
    }

    /// Makes connections that `listener` accepts answer the option no more, and with it what else
    /// listens at those `ports` in its network namespace.
    pub fn forget_listener(&self, listener: impl AsFd, ports: Ports) {
        if let Ok(place) = place_of(listener.as_fd(), ports) {
            self.forget(&place);
        }
    }

    /// Makes a socket offer SMC-R no more, or the connections that it accepts from when it begins
    /// to listen.
    pub fn unmark(&self, socket: impl AsFd) {
        match self {
            Self::Ebpf(option) => option.unmark(socket.as_fd()),
            Self::Assume(_) | Self::None(_) => {}
        }
    }

    /// Whether a socket that listens already has to begin anew before it answers the option, or
    /// answers it no more: the kernel asks the program only then.
    pub fn has_to_begin_anew(&self, listening: impl AsFd, answers: bool) -> bool {
        match self {
            Self::Ebpf(option) => (option.bits(listening.as_fd()) & MARKED != 0) != answers,
            Self::Assume(_) | Self::None(_) => false,
        }
    }

    /// Makes `client` offer SMC-R in its SYN. Call before `connect`.
    ///
    /// # Errors
    ///
    /// As [`SmcOption::mark_client`].
    pub fn mark_client(&self, client: impl AsFd) -> io::Result<()> {
        match self {
            Self::Ebpf(option) => option.mark_client(client),
            Self::Assume(_) | Self::None(_) => Ok(()),
        }
    }

    /// Notes that a rendezvous runs on this socket. Returns whether that is news: a program may
    /// bring a socket twice, and two rendezvous on one would take each other's messages.
    pub fn take(&self, socket: impl AsFd) -> bool {
        match self {
            Self::Ebpf(option) => option.take(socket.as_fd()),
            Self::Assume(_) | Self::None(_) => true,
        }
    }

    /// Whether both ends of an established connection of a marked socket have agreed on SMC-R, so
    /// that a CLC rendezvous must follow on it. `peer` is the address of the other end.
    pub fn peer_offered(&self, connection: impl AsFd, peer: SocketAddr) -> bool {
        match self {
            Self::Ebpf(option) => option.peer_offered(connection),
            Self::Assume(peers) => peers.iter().any(|network| network.contains(peer.ip())),
            Self::None(_) => false,
        }
    }
}

impl fmt::Display for OptionSource {
    /// One sentence for the log and for `doctor`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ebpf(_) => f.write_str("SMC-R is offered by TCP option 254 (eBPF)"),
            Self::Assume(peers) => {
                f.write_str("SMC-R is assumed, without a TCP option, of the peers")?;
                peers.iter().try_for_each(|network| write!(f, " {network}"))
            }
            Self::None(reason) => write!(f, "every connection stays TCP: {reason}"),
        }
    }
}

/// To which ports of this host the connections go that a listener accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ports {
    /// To its own.
    Own,
    /// To any: they are intercepted.
    Any,
}

/// The loaded program. Dropping it detaches the program; established connections do not notice.
pub struct SmcOption {
    sockets: MapHandle,
    /// Where sockets listen that are marked.
    places: MapHandle,
    of_others: bool,
    /// Holds the program in the cgroup.
    _link: Link,
}

impl SmcOption {
    /// Loads the program and attaches it to the cgroup of this process, or with `of_others` to all
    /// that this process can see, beside whatever else is attached there. Sockets that are not
    /// marked are not affected. Where it cannot see the root of all, those of others go without,
    /// with a warning.
    ///
    /// # Errors
    ///
    /// [`OptionUnavailable`]; nothing is left behind.
    pub fn load(of_others: bool) -> Result<Self, OptionUnavailable> {
        let cgroup = if of_others { root_or_own() } else { cgroup::open_own() };
        let cgroup = cgroup.map_err(OptionUnavailable::NoCgroup)?;
        let refused = |error: libbpf_rs::Error| OptionUnavailable::Refused(error.to_string());
        let object = ebpf::open(PROGRAM).and_then(|object| object.load()).map_err(refused)?;
        let sockets = ebpf::map(&object, "sockets").map_err(refused)?;
        let places = ebpf::map(&object, "places").map_err(refused)?;
        let link = ebpf::attach(&object, &cgroup).map_err(refused)?;
        Ok(Self { sockets, places, of_others, _link: link })
    }

    /// Makes connections accepted by `listener` answer the option, and lets
    /// [`SmcOption::peer_offered`] see whether their SYN had it. Call between `bind` and `listen`.
    ///
    /// # Errors
    ///
    /// When the listener has no port, or the kernel is out of memory; it then accepts plain TCP.
    pub fn mark_listener(&self, listener: impl AsFd, ports: Ports) -> io::Result<Place> {
        let listener = listener.as_fd();
        let place = place_of(listener, ports)?;
        smcr_os::tcp::save_syn(listener)?;
        self.mark(listener)?;
        let listed = self.places.update(&place.0, &1_u32.to_ne_bytes(), MapFlags::ANY);
        listed.map_err(io::Error::other)?;
        Ok(place)
    }

    fn forget(&self, place: &Place) {
        // Fails only if it was forgotten before.
        let _ = self.places.delete(&place.0);
    }

    /// Makes `client` offer SMC-R in its SYN. Call before `connect`.
    ///
    /// # Errors
    ///
    /// When the kernel is out of memory; the socket then connects as plain TCP.
    pub fn mark_client(&self, client: impl AsFd) -> io::Result<()> {
        self.mark(client.as_fd())
    }

    /// Whether the SYN (of an accepted connection) or the SYN-ACK (of a connected one) had the
    /// option: both ends then have it, and a CLC rendezvous must follow.
    ///
    /// One system call. `false` for sockets that were not marked, and before `connect` is through.
    pub fn peer_offered(&self, connection: impl AsFd) -> bool {
        let connection = connection.as_fd();
        let bits = self.bits(connection);
        if bits & MARKED == 0 || bits & ESTABLISHED != 0 {
            return bits & PEER_OFFERED != 0;
        }
        // A connection can be accepted, or found writable, a moment before the kernel has shown
        // the program the segment that established it. This waits for the end of that moment.
        let _ = smcr_os::tcp::saved_syn(connection);
        self.bits(connection) & PEER_OFFERED != 0
    }

    fn mark(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        ebpf::mark(&self.sockets, socket, MARKED)
    }

    fn unmark(&self, socket: BorrowedFd<'_>) {
        // The entry stays: the program sees by it that the socket was one of ours. There is none if
        // it was never marked.
        let socket = socket.as_raw_fd().to_ne_bytes();
        let _ = self.sockets.update(&socket, &0_u32.to_ne_bytes(), MapFlags::EXIST);
    }

    fn take(&self, socket: BorrowedFd<'_>) -> bool {
        let bits = self.bits(socket);
        bits & TAKEN == 0 && ebpf::mark(&self.sockets, socket, bits | TAKEN).is_ok()
    }

    /// The program's entry for `socket`; zero if it has none.
    fn bits(&self, socket: BorrowedFd<'_>) -> u32 {
        let key = socket.as_raw_fd().to_ne_bytes();
        let mut value = [0; 4];
        match self.sockets.lookup_into(&key, &mut value, MapFlags::ANY) {
            Ok(true) => u32::from_ne_bytes(value),
            Ok(false) | Err(_) => 0,
        }
    }
}

/// The highest cgroup that this process can see, for sockets that others have made.
fn root_or_own() -> Result<OwnedFd, String> {
    let root = match cgroup::Root::open() {
        Ok(root) => root,
        Err(why) => {
            tracing::warn!(why, "sockets that were made in other cgroups than ours stay TCP");
            return cgroup::open_own();
        }
    };
    if !root.is_of_host() {
        tracing::warn!("sockets that were made outside this container stay TCP");
    }
    Ok(root.into())
}

impl fmt::Debug for SmcOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SmcOption").finish_non_exhaustive()
    }
}

/// A network namespace and a port: the key of `places` in the program. It stays when the listener
/// is gone: only the callbacks of marked sockets look for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place([u8; 16]);

impl Place {
    /// That of a port, zero for all, in the network namespace with this cookie.
    pub fn at(network: u64, port: u32) -> Self {
        let mut place = [0; 16];
        place[..8].copy_from_slice(&network.to_ne_bytes());
        place[8..12].copy_from_slice(&port.to_ne_bytes());
        Self(place)
    }
}

fn place_of(listener: BorrowedFd<'_>, ports: Ports) -> io::Result<Place> {
    let network = smcr_os::tcp::network_cookie(listener)?;
    let port = match ports {
        Ports::Any => 0,
        Ports::Own => {
            let address = SocketAddr::try_from(rustix::net::getsockname(listener)?)?;
            match address.port() {
                0 => return Err(io::Error::new(io::ErrorKind::InvalidInput, "it has no port")),
                port => u32::from(port),
            }
        }
    };
    Ok(Place::at(network, port))
}

/// Why the TCP option cannot be used on this host. Displays as a reason and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionUnavailable {
    /// The cgroup of this process cannot be reached.
    NoCgroup(String),
    /// The kernel refused to load or attach the program.
    Refused(String),
}

impl fmt::Display for OptionUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCgroup(why) => {
                write!(
                    f,
                    "there is no cgroup v2 for the eBPF program of the TCP option ({why}); "
                )?;
                f.write_str("mount one or run as root")
            }
            Self::Refused(why) => {
                write!(f, "the kernel refuses eBPF for the TCP option ({why}); ")?;
                f.write_str("run as root or with CAP_BPF and CAP_NET_ADMIN")
            }
        }?;
        f.write_str(", or list peers in smc.assume_peers")
    }
}

impl std::error::Error for OptionUnavailable {}

/// Compiled by `build.rs`.
const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/smc_option.o"));

// Bits of a socket's entry. `bpf/smc_option.bpf.c` has the same.
const MARKED: u32 = 1;
const ESTABLISHED: u32 = 2;
const PEER_OFFERED: u32 = 4;
// Of this bit the program knows nothing: it is set when that has done its work.
const TAKEN: u32 = 8;

#[cfg(test)]
mod tests;
