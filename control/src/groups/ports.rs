//! The RNICs that link groups stand on, and the pollers behind them.

use smcr_engine::limits::LINKS_PER_POLLER_MAX;
use smcr_engine::{Command, ConnectionId, GroupId};
use smcr_memory::Backing;
use smcr_proto::handshake::Path;
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_proto::{Gid, MacAddress, PeerId};
use smcr_rnic::{Event, Exhausted, Opening, Rnic, Suspicion};

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
    /// The directory in which peers share memory; none on a real network.
    pub directory: Option<String>,
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
    /// The configuration has it no more: it is closed when nothing needs it.
    pub retired: bool,
    /// It is closed, and so is its poller.
    pub closed: bool,
    /// Whether its network is there, as far as the host knows.
    pub carrier: bool,
    /// Whether it works, as far as the NIC itself has said.
    pub alive: bool,
    /// Links that its poller has or will have.
    pub(super) links: usize,
}

impl<N: Rnic> Port<N> {
    /// A port that is up.
    pub fn new(name: String, lan: Lan, subnet: Ipv4Subnet, rnic: Option<N>) -> Self {
        Self {
            name,
            lan,
            subnet,
            rnic,
            wanted: true,
            retired: false,
            closed: false,
            carrier: true,
            alive: true,
            links: 0,
        }
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

    /// The next that the RNIC has to say, if there is one.
    pub(super) fn next_event(&mut self) -> Option<Event> {
        self.rnic.as_mut().and_then(Rnic::event)
    }

    /// Logs that somebody attacks a queue pair. The RNIC reports each such now and then only.
    pub(super) fn log_suspicion(&self, Suspicion { qpn, peer, packets }: Suspicion) {
        tracing::warn!(
            rnic = self.name,
            peer = %peer.to_ip(),
            qpn = qpn.0,
            packets,
            "somebody guesses PSNs of a queue pair, and sends from the address of its peer"
        );
    }

    /// Whether links may use it.
    pub fn is_up(&self) -> bool {
        self.rnic.is_some() && self.wanted && self.carrier && self.alive
    }

    /// Whether links may use it on which the peer sends dense packets.
    pub(super) fn packs_densely(&self) -> bool {
        self.rnic.as_ref().is_some_and(Rnic::packs_densely)
    }

    /// What peers know it by.
    pub fn address(&self) -> Option<(Gid, MacAddress)> {
        self.rnic.as_ref().map(|rnic| (rnic.port().gid, rnic.port().mac))
    }

    /// Whether it shares memory with a NIC of the peer that has this id, so that no network is
    /// needed.
    pub(crate) fn is_near(&self, peer: PeerId) -> bool {
        self.is_up() && self.rnic.as_ref().is_some_and(|rnic| rnic.is_near(peer.0))
    }

    /// Whether it shares memory with the peer's port.
    pub(super) fn shares_with(&self, peer: Gid) -> bool {
        let shares = |rnic: &N| rnic.backing() == Backing::Shared && rnic.has_route(peer);
        self.is_up() && self.rnic.as_ref().is_some_and(shares)
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

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use smcr_proto::{Instant, Mtu, Psn, QpAddress, Qpn};
    use smcr_rnic::roce::lossy::{Lossy, Network, Odds};
    use smcr_rnic::roce::{self, Parameters, Share, UDP_PORT};
    use smcr_rnic::{Fabric as _, Tag, Work};

    use super::*;
    use crate::log::tests::Text;

    /// The RNIC of 10.0.0.`host`. All its numbers are `number`, if that is free.
    fn nic(network: &Network, host: u8, mut number: u32) -> (roce::Rnic, roce::Fabric<Lossy>) {
        let address = Ipv4Addr::new(10, 0, 0, host);
        let entropy = move || {
            number += 1;
            number - 1
        };
        let (gid, mac) = (Gid::from_ipv4(address.octets()), MacAddress([host; 6]));
        let setup = Parameters {
            backing: Backing::Private,
            port: smcr_rnic::Port { gid, mac, mtu: Mtu::B1024 },
            udp_port: UDP_PORT,
            share: Share::ALL,
            payload_max: 1024,
            window_max: 1 << 20,
            entropy: Box::new(entropy),
            path: std::sync::Arc::new(|_, _| Ok(9000)),
        };
        roce::join(setup, network.plug(SocketAddr::from((address, UDP_PORT))))
    }

    /// Somebody who sent in the name of a peer, and tried one PSN after the other, was seen by
    /// nobody.
    #[test]
    fn guessed_psns_are_logged_with_the_address_and_the_queue_pair() {
        let network = Network::new(1, Odds::default());
        let (mut rnic, mut fabric) = nic(&network, 2, 100);
        let domain = rnic.open_domain().unwrap();
        let opening = rnic.open(domain).unwrap();
        let ours = opening.address();
        // Another host has this address too, or writes it into its packets.
        let (mut theirs, mut guesser) = nic(&network, 1, 0x80_0000);
        let domain = theirs.open_domain().unwrap();
        let guessing = theirs.open(domain).unwrap();
        let peer = QpAddress { qpn: Qpn(77), psn: Psn(5), ..guessing.address() };
        fabric.adopt(Instant(0), opening.connect(peer).unwrap());
        let qp = guesser.adopt(Instant(0), guessing.connect(ours).unwrap());
        let guess = |tag| Work::Send { message: [0; 44], tag: Tag(tag) };
        guesser.post(qp, &mut (0..40).map(guess).collect());
        guesser.transmit(Instant(1));
        fabric.poll(Instant(2), &mut Vec::with_capacity(64));

        let subnet = Ipv4Subnet::default();
        let mut port = Port::new("soft0".to_owned(), Lan::default(), subnet, Some(rnic));
        let text = Text::default();
        let out = text.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || out.clone());
        tracing::subscriber::with_default(subscriber.finish(), || {
            while let Some(event) = port.next_event() {
                let Event::Suspicion(suspicion) = event else { panic!("{event:?}") };
                port.log_suspicion(suspicion);
            }
        });
        let text = String::from_utf8(text.0.lock().unwrap().clone()).unwrap();
        let fields = format!("rnic=\"soft0\" peer=10.0.0.1 qpn={} packets=17", ours.qpn.0);
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains("WARN") && text.contains(&fields), "{text}");
    }
}
