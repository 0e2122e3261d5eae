//! The control thread's half of an RNIC.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rdma_core::{
    Access, Channel, CompletionQueue, MemoryRegion, Peer, Plan, ProtectionDomain, QueuePair,
};
use smcr_memory::Region;
use smcr_os::interface::path_mtu;
use smcr_proto::{Gid, Psn, Qpn, Rkey};

use super::connects::Connect;
use super::device::{Change, Device};
use super::pair::SHORT_STRIDE;
use super::worker::{Progress, Shared};
use super::{ENTRIES_PER_PAIR, INLINE, LONG_RECEIVES, LONG_SENDS, SENDS, SHORT_RECEIVES};
use crate::{
    ConnectError, Domain, Event, Exhausted, LONG_MESSAGE_MAX, MESSAGE_LEN, Messages, Port,
    QpAddress, Registration,
};

/// The control thread's half of an RNIC.
#[derive(Debug)]
pub struct Rnic {
    /// The device and its channel; `None` once it has gone.
    open: Option<(Device, Arc<Channel>)>,
    port: Port,
    shared: Arc<Shared>,
    send_memory: Option<Region>,
    domains: HashMap<Domain, Arc<Protection>>,
    domains_opened: u32,
    registered: HashMap<Rkey, MemoryRegion>,
    queues: Vec<Queue>,
    /// Events that were noticed with another one.
    pending: Option<Event>,
}

/// What belongs to a domain for as long as a queue pair of it lives.
#[derive(Debug)]
pub(super) struct Protection {
    domain: Arc<ProtectionDomain>,
    /// The memory that leases are cut from.
    pub(super) pool: MemoryRegion,
}

/// A completion queue, and how many queue pairs it serves.
#[derive(Debug)]
struct Queue {
    queue: Arc<CompletionQueue>,
    pairs: Arc<AtomicU32>,
    most: u32,
}

/// The place of one queue pair in its completion queue.
#[derive(Debug)]
pub(super) struct Berth(Arc<AtomicU32>);

/// A queue pair that has its number but no peer yet.
#[derive(Debug)]
pub struct Opening {
    qp: Qp,
    address: QpAddress,
    port: u8,
    gid_index: u8,
    shared: Arc<Shared>,
}

/// A queue pair that is connected, or soon will be, and that its poller has not adopted yet.
#[derive(Debug)]
pub struct Qp {
    pub(super) pair: Arc<QueuePair>,
    pub(super) memory: Region,
    pub(super) messages: Messages,
    pub(super) protection: Arc<Protection>,
    pub(super) progress: Arc<Progress>,
    pub(super) berth: Berth,
}

impl Drop for Berth {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Rnic {
    pub(super) fn new(device: Device, channel: Arc<Channel>, shared: Arc<Shared>) -> Self {
        Self {
            port: device.port,
            open: Some((device, channel)),
            shared,
            send_memory: None,
            domains: HashMap::new(),
            domains_opened: 0,
            registered: HashMap::new(),
            queues: Vec::new(),
            pending: None,
        }
    }

    /// What belongs to an open domain.
    fn protection(&self, domain: Domain) -> Result<Arc<Protection>, Exhausted> {
        let found = self.domains.get(&domain).cloned();
        assert!(found.is_some() || self.open.is_none(), "the caller opened {domain:?}");
        found.ok_or(Exhausted)
    }

    /// The table of GIDs has changed: what that means for ours.
    fn look_at_gids(&mut self) -> Option<Event> {
        let (device, _) = self.open.as_mut()?;
        match device.look_at_gids() {
            Change::None => None,
            Change::Lost => Some(Event::Down),
            Change::Back => Some(Event::Up),
            Change::Moved { was_lost } => {
                self.port = device.port;
                self.pending = was_lost.then_some(Event::Up);
                Some(Event::Readdressed)
            }
        }
    }

    /// Announces from now on the path MTU that the port has now.
    fn look_at_mtu(&mut self) {
        if let Some((device, _)) = &mut self.open {
            device.look_at_mtu();
            self.port = device.port;
        }
    }

    /// A place in a completion queue, which may be a new one.
    fn moor(&mut self) -> Result<(Arc<CompletionQueue>, Berth), Exhausted> {
        let (device, channel) = self.open.as_ref().ok_or(Exhausted)?;
        let free = |queue: &&Queue| queue.pairs.load(Ordering::Acquire) < queue.most;
        if self.queues.iter().find(free).is_none() {
            let limits = device.limits;
            let entries = limits.completion_entries.min(ENTRIES_PER_PAIR * PAIRS_PER_QUEUE);
            let most = entries / ENTRIES_PER_PAIR;
            let in_use = u32::try_from(self.queues.len()).expect("few");
            if most == 0 || in_use >= limits.completion_queues {
                return Err(Exhausted);
            }
            let queue = CompletionQueue::new(channel, entries).map_err(|_| Exhausted)?;
            self.queues.push(Queue { queue, pairs: Arc::new(AtomicU32::new(0)), most });
        }
        let queue = self.queues.iter().find(free).expect("there was one, or one was made");
        queue.pairs.fetch_add(1, Ordering::AcqRel);
        Ok((Arc::clone(&queue.queue), Berth(Arc::clone(&queue.pairs))))
    }
}

impl Drop for Rnic {
    fn drop(&mut self) {
        self.shared.leave();
    }
}

impl crate::Rnic for Rnic {
    type Opening = Opening;

    fn port(&self) -> Port {
        self.port
    }

    fn has_route(&self, peer: Gid) -> bool {
        self.open.is_some() && is_reachable(self.port.gid, peer)
    }

    fn pins(&self) -> bool {
        true
    }

    /// After [`Event::Gone`] nothing of the device is open here, and nothing can be opened.
    fn event(&mut self) -> Option<Event> {
        if let Some(event) = self.pending.take() {
            return Some(event);
        }
        loop {
            let event = self.shared.take_event()?;
            match event {
                Event::Gone => {
                    self.registered.clear();
                    self.domains.clear();
                    self.queues.clear();
                    self.open = None;
                }
                Event::Readdressed => {
                    let Some(event) = self.look_at_gids() else { continue };
                    return Some(event);
                }
                Event::Up => self.look_at_mtu(),
                Event::Down | Event::Suspicion(_) => {}
            }
            return Some(event);
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.shared.reports())
    }

    fn send_from(&mut self, memory: &Region) -> Result<(), Exhausted> {
        assert!(self.send_memory.is_none(), "one pool, named once");
        let (device, _) = self.open.as_ref().ok_or(Exhausted)?;
        // Each domain registers the pool, at the first contact with a peer. If the limit of locked
        // memory forbids that, every rendezvous would fail. Whoever starts us can still be told.
        register_pool(device, memory)?;
        self.send_memory = Some(memory.clone());
        Ok(())
    }

    fn open_domain(&mut self) -> Result<Domain, Exhausted> {
        let (device, _) = self.open.as_ref().ok_or(Exhausted)?;
        let memory = self.send_memory.clone().expect("send_from comes first");
        let protection = register_pool(device, &memory)?;
        let number = Domain(self.domains_opened);
        self.domains_opened = self.domains_opened.checked_add(1).ok_or(Exhausted)?;
        self.domains.insert(number, Arc::new(protection));
        Ok(number)
    }

    fn close_domain(&mut self, domain: Domain) {
        // Queue pairs that are still being destroyed keep what they need of it.
        let open = self.domains.remove(&domain);
        assert!(open.is_some() || self.open.is_none(), "{domain:?} must be open");
    }

    fn register(&mut self, domain: Domain, region: &Region) -> Result<Registration, Exhausted> {
        let protection = self.protection(domain)?;
        let random = getrandom::u32().map_err(|_| Exhausted)?;
        // Made up: where our memory really is helps nobody but who looks for a way in.
        let address = (u64::from(random) + 1) << ADDRESS_SHIFT;
        let memory = Box::new(region.pin());
        let region = MemoryRegion::new(&protection.domain, memory, Access::Peers, address);
        let region = region.map_err(|_| Exhausted)?;
        let rkey = Rkey(region.rkey());
        assert!(self.registered.insert(rkey, region).is_none(), "the NIC's keys are unique");
        Ok(Registration { domain, rkey, address })
    }

    fn deregister(&mut self, registration: Registration) {
        let region = self.registered.remove(&registration.rkey);
        assert!(region.is_some() || self.open.is_none(), "a region is deregistered once");
    }

    fn open_for(&mut self, domain: Domain, messages: Messages) -> Result<Opening, Exhausted> {
        let protection = self.protection(domain)?;
        // The peer is told an MTU with the queue pair's address: it must be that of now.
        self.look_at_mtu();
        let (completions, berth) = self.moor()?;
        let plan = plan_for(messages);
        let memory = Region::new(memory_len(plan)).map_err(|_| Exhausted)?;
        let own = Box::new(memory.pin());
        let known_as = memory.address();
        let own = MemoryRegion::new(&protection.domain, own, Access::Local, known_as);
        let own = own.map_err(|_| Exhausted)?;
        let (device, _) = self.open.as_ref().ok_or(Exhausted)?;
        let number = device.number;
        let pair = QueuePair::new(&completions, &protection.domain, own, number, plan);
        let pair = pair.map_err(|_| Exhausted)?;
        let psn = Psn(getrandom::u32().map_err(|_| Exhausted)? & PSN_MASK);
        let port = self.port;
        let qpn = Qpn(pair.number());
        let progress = Arc::new(Progress::default());
        Ok(Opening {
            qp: Qp { pair, memory, messages, protection, progress, berth },
            address: QpAddress { gid: port.gid, mac: port.mac, qpn, psn, mtu: port.mtu },
            port: number,
            gid_index: device.gid_index,
            shared: Arc::clone(&self.shared),
        })
    }
}

impl crate::Opening for Opening {
    type Qp = Qp;

    fn address(&self) -> QpAddress {
        self.address
    }

    fn connect(self, peer: QpAddress) -> Result<Qp, ConnectError> {
        if !is_reachable(self.address.gid, peer.gid) {
            return Err(ConnectError::Unreachable);
        }
        // RFC 7609 A.2.3 #11: use the smaller MTU
        let mtu = self.address.mtu.min(peer.mtu);
        mtu.bytes().ok_or(ConnectError::Unreachable)?;
        let peer = Peer {
            gid: peer.gid.0,
            number: peer.qpn.0,
            their_psn: peer.psn.0,
            our_psn: self.address.psn.0,
            mtu: mtu.0,
            port: self.port,
            gid_index: self.gid_index,
            hop_limit: HOP_LIMIT,
        };
        let (pair, progress) = (Arc::clone(&self.qp.pair), Arc::clone(&self.qp.progress));
        self.shared.connect(Connect { pair, peer, progress })?;
        Ok(self.qp)
    }
}

/// A new domain, in which the memory that leases are cut from is registered.
fn register_pool(device: &Device, memory: &Region) -> Result<Protection, Exhausted> {
    let domain = ProtectionDomain::new(&device.context).map_err(|_| Exhausted)?;
    let known_as = memory.address();
    let pool = MemoryRegion::new(&domain, Box::new(memory.pin()), Access::Local, known_as);
    Ok(Protection { domain, pool: pool.map_err(|_| Exhausted)? })
}

/// Whether the host has a route between the two ports now.
fn is_reachable(here: Gid, there: Gid) -> bool {
    let (here, there) = (here.to_ip(), there.to_ip());
    // A peer that announces a multicast address must not make us send to many hosts.
    let is_one = !there.is_multicast() && !there.is_unspecified();
    here.is_ipv4() == there.is_ipv4() && is_one && path_mtu(here, there).is_ok()
}

/// The sizes of a queue pair that accepts these messages.
fn plan_for(messages: Messages) -> Plan {
    let short = u32::try_from(MESSAGE_LEN).expect("small");
    let long = u32::try_from(LONG_MESSAGE_MAX).expect("small");
    let (receives, receive_len, stride) = match messages {
        // A longer buffer would accept what must be refused.
        Messages::Short => (SHORT_RECEIVES, short, 64),
        Messages::Long => (LONG_RECEIVES, long, long),
    };
    Plan { sends: SENDS, receives, receive_len, stride, inline: INLINE }
}

/// Receive buffers, behind them the long messages that are sent, and then the short ones.
fn memory_len(plan: Plan) -> usize {
    let received = plan.receives as usize * plan.stride as usize;
    let long = LONG_SENDS as usize * LONG_MESSAGE_MAX;
    received + long + SENDS as usize * SHORT_STRIDE as usize
}

/// The most queue pairs that share a completion queue.
const PAIRS_PER_QUEUE: u32 = 16;
/// Addresses that peers are told begin at multiples of this power of two, as large pages would.
const ADDRESS_SHIFT: u32 = 21;
/// PSNs have 24 bits.
const PSN_MASK: u32 = 0x00ff_ffff;
/// How many routers a packet may pass, and one.
const HOP_LIMIT: u8 = 64;
