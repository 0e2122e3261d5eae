//! The control thread's half of a NIC: it assigns rkeys, queue pair numbers and first PSNs.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use smcr_memory::{Backing, Region};
use smcr_os::carrier::Link;
use smcr_proto::{Gid, Mtu, Psn, Qpn, Rkey};

use super::QUEUE_PAIRS_MAX;
use super::batch::PAYLOAD_MAX;
use super::psn::PSN_MASK;
use super::requester::Sizes;
use super::shared::{KeyUpdate, Shared, Ticket};
use super::siblings::Share;
use crate::{ConnectError, Domain, Event, Exhausted, Messages, Port, QpAddress, Registration};

/// The parameters of a NIC, except its wire.
pub struct Parameters {
    /// The port.
    pub port: Port,
    /// The UDP port, here and at every peer.
    pub udp_port: u16,
    /// The queue pair numbers that this part of the NIC may assign.
    pub share: Share,
    /// The most payload of packets to peers with which [dense](crate::Opening::pack_densely)
    /// packets are agreed on, as far as the path to them allows it: a packet need not be as large
    /// as one of the path MTUs then.
    pub payload_max: u32,
    /// The most bytes that one queue pair may have in flight.
    pub window_max: u32,
    /// Source of rkeys, queue pair numbers and first PSNs. Must not be predictable.
    pub entropy: Box<dyn FnMut() -> u32 + Send>,
    /// Asks the host for the path MTU to a peer.
    pub path: PathMtu,
    /// What regions should be made of.
    pub backing: Backing,
}

/// Returns the size in bytes of the largest IP packet that can go from the first address to the
/// second, as far as the host knows.
///
/// An error means that there is no route, or that the host has no resources to look for one.
pub type PathMtu = Arc<dyn Fn(IpAddr, IpAddr) -> io::Result<u32> + Send + Sync>;

impl fmt::Debug for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parameters").field("port", &self.port).finish_non_exhaustive()
    }
}

impl fmt::Debug for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opening").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The control thread's half of a RoCEv2 NIC in software.
#[derive(Debug)]
pub struct Rnic {
    setup: Parameters,
    shared: Arc<Shared>,
    /// What the user was told last of the wire.
    link: Link,
    /// How often the poller's half had rung before.
    heard: u64,
    /// How many regions are registered in each domain.
    domains: HashMap<Domain, usize>,
    domains_opened: u32,
    keys: HashSet<Rkey>,
    /// Queue pair numbers in use, and the packet payload of each, which its poller publishes.
    numbers: HashMap<Qpn, Arc<AtomicU32>>,
}

/// A queue pair that has its number but no peer yet.
pub struct Opening {
    ticket: Ticket,
    domain: Domain,
    messages: Messages,
    address: QpAddress,
    payload_max: u32,
    dense: bool,
    window_max: u32,
    path: PathMtu,
    payload: Arc<AtomicU32>,
}

/// A connected queue pair that its poller has not adopted yet.
#[derive(Debug)]
pub struct Qp {
    pub(super) ticket: Ticket,
    pub(super) domain: Domain,
    pub(super) messages: Messages,
    pub(super) local: QpAddress,
    pub(super) peer: QpAddress,
    pub(super) sizes: Sizes,
    pub(super) window_max: u32,
    /// Where the poller publishes the payload of full packets.
    pub(super) payload: Arc<AtomicU32>,
}

impl Rnic {
    /// Creates the half that communicates with its fabric through `shared`.
    pub(super) fn new(setup: Parameters, shared: Arc<Shared>) -> Self {
        assert!(setup.port.mtu.bytes().is_some());
        Self {
            setup,
            shared,
            link: Link::Up,
            heard: 0,
            domains: HashMap::new(),
            domains_opened: 0,
            keys: HashSet::new(),
            numbers: HashMap::new(),
        }
    }
}

impl crate::Rnic for Rnic {
    type Opening = Opening;

    fn port(&self) -> Port {
        self.setup.port
    }

    fn packs_densely(&self) -> bool {
        true
    }

    fn backing(&self) -> Backing {
        self.setup.backing
    }

    fn has_route(&self, peer: Gid) -> bool {
        path_to(&self.setup.path, self.setup.port.gid, peer).is_ok()
    }

    fn payload(&self, qpn: Qpn) -> Option<u32> {
        let payload = self.numbers.get(&qpn)?.load(Ordering::Relaxed);
        (payload > 0).then_some(payload)
    }

    fn event(&mut self) -> Option<Event> {
        self.shared.hear(&mut self.heard);
        let link = self.shared.link();
        if std::mem::replace(&mut self.link, link) != link {
            return Some(match link {
                Link::Up => Event::Up,
                Link::Down => Event::Down,
                Link::Gone => Event::Gone,
            });
        }
        self.shared.pop_suspicion().map(Event::Suspicion)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.shared.descriptor()
    }

    /// The CPU reads what is sent, and needs no key for that.
    fn send_from(&mut self, _: &Region) -> Result<(), Exhausted> {
        Ok(())
    }

    fn open_domain(&mut self) -> Result<Domain, Exhausted> {
        let domain = Domain(self.domains_opened);
        self.domains_opened = self.domains_opened.checked_add(1).ok_or(Exhausted)?;
        self.domains.insert(domain, 0);
        Ok(domain)
    }

    fn close_domain(&mut self, domain: Domain) {
        let open = self.domains.remove(&domain);
        assert_eq!(open, Some(0), "{domain:?} must be open and hold no registration");
    }

    fn register(&mut self, domain: Domain, region: &Region) -> Result<Registration, Exhausted> {
        let open = self.domains.get_mut(&domain).expect("the caller opened the domain");
        if !self.shared.count_key() {
            return Err(Exhausted);
        }
        *open += 1;
        let rkey = loop {
            let rkey = Rkey((self.setup.entropy)());
            if self.keys.insert(rkey) {
                break rkey;
            }
        };
        // Made up: where our memory really is helps nobody but who looks for a way in.
        let address = (u64::from((self.setup.entropy)()) + 1) << ADDRESS_SHIFT;
        self.shared.push(KeyUpdate::Open { rkey, domain, placer: region.placer(), address });
        Ok(Registration { domain, rkey, address })
    }

    fn deregister(&mut self, registration: Registration) {
        let open = self.domains.get_mut(&registration.domain).expect("its domain is open");
        *open -= 1;
        assert!(self.keys.remove(&registration.rkey), "a region is deregistered once");
        self.shared.push(KeyUpdate::Close(registration.rkey));
    }

    fn open_for(&mut self, domain: Domain, messages: Messages) -> Result<Opening, Exhausted> {
        assert!(self.domains.contains_key(&domain), "the caller opened the domain");
        while let Some(qpn) = self.shared.pop_retired() {
            assert!(self.numbers.remove(&qpn).is_some());
        }
        if self.numbers.len() >= QUEUE_PAIRS_MAX as usize {
            return Err(Exhausted);
        }
        let payload = Arc::new(AtomicU32::new(0));
        let qpn = loop {
            let qpn = Qpn((self.setup.entropy)() & 0x00ff_ffff);
            let is_ours = QPN_RANGE.contains(&qpn.0) && self.setup.share.has(qpn);
            if is_ours && !self.numbers.contains_key(&qpn) {
                break qpn;
            }
        };
        self.numbers.insert(qpn, Arc::clone(&payload));
        let port = self.setup.port;
        let psn = Psn((self.setup.entropy)() & PSN_MASK);
        Ok(Opening {
            ticket: Ticket::new(qpn, &self.shared),
            domain,
            messages,
            address: QpAddress { gid: port.gid, mac: port.mac, qpn, psn, mtu: port.mtu },
            payload_max: self.setup.payload_max,
            dense: false,
            window_max: self.setup.window_max,
            path: Arc::clone(&self.setup.path),
            payload,
        })
    }
}

impl crate::Opening for Opening {
    type Qp = Qp;

    fn address(&self) -> QpAddress {
        self.address
    }

    fn fit_path_to(&mut self, peer: Gid) {
        // Hardware RNICs do not probe the path to us but send packets of the agreed size, so the
        // size that we announce must fit.
        let path = path_to(&self.path, self.address.gid, peer).ok().and_then(mtu_for);
        // Forged ICMP messages can make the host believe in a path MTU far below what networks
        // carry.
        let path = path.map(|path| path.max(Mtu::B1024));
        self.address.mtu = path.map_or(self.address.mtu, |path| path.min(self.address.mtu));
    }

    fn pack_densely(&mut self) {
        self.dense = true;
    }

    fn connect(self, peer: QpAddress) -> Result<Qp, ConnectError> {
        let path = path_to(&self.path, self.address.gid, peer.gid)?;
        // RFC 7609 A.2.3 #11: use the smaller MTU
        let agreed = self.address.mtu.min(peer.mtu);
        let mtu = agreed.bytes().ok_or(ConnectError::Unreachable)?;
        let known = mtu_for(path).and_then(Mtu::bytes).ok_or(ConnectError::Unreachable)?;
        let sizes = match self.dense {
            false => Sizes { mtu, ceiling: mtu, known, dense: false },
            true => {
                let known = known.max(payload_for(path));
                // If the peer's path MTU is the next smaller one, its device may carry no more.
                let is_lowest = agreed == self.address.mtu;
                let ceiling = if is_lowest { mtu.max(known.min(self.payload_max)) } else { mtu };
                Sizes { mtu, ceiling, known, dense: true }
            }
        };
        Ok(Qp {
            ticket: self.ticket,
            domain: self.domain,
            messages: self.messages,
            local: self.address,
            peer,
            sizes,
            window_max: self.window_max,
            payload: self.payload,
        })
    }
}

/// The largest IP packet in bytes that can go from one port to the other, as the host knows.
///
/// # Errors
///
/// [`ConnectError`], as the host says.
fn path_to(path: &PathMtu, here: Gid, there: Gid) -> Result<u32, ConnectError> {
    let (here, there) = (here.to_ip(), there.to_ip());
    // A peer that announces a multicast address must not make us send to many hosts.
    let is_one = !there.is_multicast() && !there.is_unspecified();
    if here.is_ipv4() != there.is_ipv4() || !is_one {
        return Err(ConnectError::Unreachable);
    }
    path(here, there).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => ConnectError::Exhausted,
        Some(_) | None => ConnectError::Unreachable,
    })
}

/// The largest path MTU whose packets fit into IP packets of `bytes` bytes. Like Linux, it reserves
/// room for the largest headers.
pub(super) fn mtu_for(bytes: u32) -> Option<Mtu> {
    [Mtu::B4096, Mtu::B2048, Mtu::B1024, Mtu::B512, Mtu::B256]
        .into_iter()
        .find(|mtu| mtu.bytes().is_some_and(|payload| payload + HEADERS_MAX <= bytes))
}

/// What a device with an MTU of `bytes` bytes carries, and `limit` allows: the path MTU to
/// announce, and the [most payload](Parameters::payload_max).
pub(super) fn sizes_for(bytes: u32, limit: Option<Mtu>) -> Option<(Mtu, u32)> {
    let mtu = mtu_for(bytes)?;
    let payload = mtu.bytes()?.max(payload_for(bytes));
    match limit.filter(|limit| *limit <= mtu) {
        Some(limit) => Some((limit, limit.bytes()?)),
        None => Some((mtu, payload)),
    }
}

/// The most payload of packets that fit into IP packets of `bytes` bytes, if both ends take packets
/// of any size: whole cache lines, so that what is copied stays aligned.
pub(super) fn payload_for(bytes: u32) -> u32 {
    (bytes.saturating_sub(HEADERS_MAX) & !63).min(PAYLOAD_MAX)
}

/// Addresses that peers are told begin at multiples of this power of two, as large pages would.
const ADDRESS_SHIFT: u32 = 21;
/// The most bytes beside the payload: 40 IPv6, 8 UDP, 12 BTH, 16 RETH, 4 ICRC.
pub(super) const HEADERS_MAX: u32 = 80;
/// We assign no number below 16, as some are reserved; all ones is the multicast number.
const QPN_RANGE: std::ops::Range<u32> = 16..0x00ff_ffff;
