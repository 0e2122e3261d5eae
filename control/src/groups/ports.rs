//! The RNICs that link groups stand on, and the pollers behind them.

use smcr_engine::limits::LINKS_PER_POLLER_MAX;
use smcr_engine::{Command, ConnectionId, GroupId};
use smcr_proto::handshake::Path;
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_proto::{Gid, MacAddress};
use smcr_rnic::{Exhausted, Opening, Rnic};

/// The queue pair of an RNIC, as it travels to its poller.
pub type QpOf<N> = <<N as Rnic>::Opening as Opening>::Qp;

/// One RNIC with its poller: an index that never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub usize);

/// Which LAN a port is on. Links of one group join ports of one LAN only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lan {
    /// The physical network, as the operator calls it.
    pub pnet: String,
    /// The VLAN of the device below the port; none on an untagged one. A stream that crossed from
    /// one VLAN into another would be seen by the wrong ones.
    pub vlan: Option<u16>,
}

/// An RNIC as link groups use it.
pub struct Port<N> {
    /// What the operator calls it.
    pub name: String,
    /// The LAN that it is on.
    pub lan: Lan,
    /// Its IPv4 subnet, if it has one: packets of SMC-Rv1 cross no router.
    pub subnet: Ipv4Subnet,
    /// The NIC; none where connections can only be TCP.
    pub rnic: Option<N>,
    /// Whether the operator wants it used.
    pub wanted: bool,
    /// Whether its network is there.
    pub carrier: bool,
    /// Links that its poller has or will have.
    pub(super) links: usize,
}

impl<N: Rnic> Port<N> {
    /// A port that is up.
    pub fn new(name: String, lan: Lan, subnet: Ipv4Subnet, rnic: Option<N>) -> Self {
        Self { name, lan, subnet, rnic, wanted: true, carrier: true, links: 0 }
    }

    /// The NIC, where one more link may be opened.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] without a NIC, and when its poller has as many links as it serves.
    pub(super) fn for_link(&mut self) -> Result<&mut N, Exhausted> {
        match self.links >= LINKS_PER_POLLER_MAX {
            true => Err(Exhausted),
            false => self.rnic.as_mut().ok_or(Exhausted),
        }
    }

    /// Whether links may use it.
    pub fn is_up(&self) -> bool {
        self.rnic.is_some() && self.wanted && self.carrier
    }

    /// What peers know it by.
    pub fn address(&self) -> Option<(Gid, MacAddress)> {
        self.rnic.as_ref().map(|rnic| (rnic.port().gid, rnic.port().mac))
    }

    /// How packets get to the peer's port, if they do. The kernel, below the soft RNIC, knows the
    /// next hop; nobody else has to.
    pub(crate) fn path_to(&self, peer: Gid) -> Option<Path> {
        let has_route = self.rnic.as_ref().is_some_and(|rnic| rnic.has_route(peer));
        has_route.then(|| if self.reaches(peer) { Path::Direct } else { Path::ViaGateway })
    }

    /// Whether packets to the peer's port need no router, as far as its address tells.
    // RFC 7609 5.2 #1: SMC-Rv1 only within layer 2
    pub(crate) fn reaches(&self, peer: Gid) -> bool {
        let Ipv4Subnet { network, prefix_bits } = self.subnet;
        let Some(peer) = peer.to_ipv4() else { return true };
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix_bits)).unwrap_or(0);
        u32::from_be_bytes(peer) & mask == u32::from_be_bytes(network) & mask
    }
}

/// The pollers, one per port, as link groups command them.
///
/// Commands for one poller arrive in the order in which they were given.
pub trait Pollers<Qp> {
    /// What pollers call a socket.
    type Stream;

    /// Says `command` to the poller of `port`.
    fn command(&mut self, port: PortId, command: Command<Qp, Self::Stream>);

    /// Lets every poller know that the poller of `port` will get this connection, and whose links
    /// may bring messages about it. They may come as soon as the peer knows the token.
    fn expect(&mut self, port: PortId, connection: ConnectionId, group: GroupId);

    /// Takes that back: the connection will not come.
    fn forget(&mut self, port: PortId, connection: ConnectionId);
}
