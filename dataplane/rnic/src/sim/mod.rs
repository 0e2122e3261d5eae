//! A network of simulated NICs in one thread, on a virtual clock.
//!
//! It is *malicious within the contract* of [`Fabric`]: bytes of a write appear in random order, at
//! any time before the message that announces them; completions are late; completions of different
//! queue pairs come in any order; and when a queue pair breaks, its host may never see the last
//! messages and bytes that its NIC had acknowledged. Its behaviour depends only on its seed and on
//! the calls made to it.
//!
//! The caller moves the clock: each call with `now` first processes all events that were due by
//! then, everywhere in the network. [`Network::next_event`] says where to move the clock next.
//!
//! What is not simulated: bandwidth, packets, congestion. `roce` over a lossy wire has those.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use smcr_memory::{Region, Rmbe};
use smcr_proto::{Gid, Instant, Psn, Qpn, Rkey};

use crate::dice::Dice;
use crate::{
    Completion, ConnectError, Domain, Event, Exhausted, Message, Messages, Port, QpAddress,
    QpError, QpId, Registration, Work,
};

pub use odds::Odds;
use queue_pair::{QueuePair, Stage};
pub use world::Parcel;
use world::{Losses, Nic, QueuePairs, Registered, Tap, World, Writer};

mod odds;
mod queue_pair;
mod visibility;
mod world;

/// Any number of NICs, all of which reach one another. A clone is a handle to the same network.
#[derive(Clone, Debug)]
pub struct Network {
    world: Arc<Mutex<World>>,
}

impl Network {
    /// An empty network. `seed` determines all its random choices.
    pub fn new(seed: u64, odds: Odds) -> Self {
        let world = World {
            now: Instant::default(),
            dice: Dice::new(seed),
            odds,
            nics: Vec::new(),
            queue_pairs: QueuePairs::default(),
            next_qpn: QPN_FIRST,
            losses: Losses::default(),
            tap: None,
        };
        Self { world: Arc::new(Mutex::new(world)) }
    }

    /// Adds a NIC. Returns the half for the control thread and the half for its one poller.
    ///
    /// # Panics
    ///
    /// If the network has a port with this GID already.
    pub fn rnic(&self, port: Port) -> (Rnic, Fabric) {
        let mut world = self.lock();
        assert!(world.nic_at(port.gid).is_none(), "{} exists", port.gid);
        let nic = world.nics.len();
        let World { dice, odds, .. } = &mut *world;
        let pins = dice.roll(odds.pins);
        world.nics.push(Nic {
            port,
            up: true,
            pins,
            domains: BTreeSet::new(),
            next_domain: 0,
            registered: BTreeMap::new(),
            send_memory: None,
            events: VecDeque::new(),
            has_said_down: false,
        });
        let network = self.clone();
        let fabric = Fabric { network: self.clone(), nic, adopted: BTreeMap::new(), next_id: 0 };
        (Rnic { network, nic }, fabric)
    }

    /// Changes the odds from now on.
    pub fn change_odds(&self, odds: Odds) {
        self.lock().odds = odds;
    }

    /// When the next event is due; not later than now if a fabric has a completion to report
    /// already. `None` when the network is quiet.
    pub fn next_event(&self) -> Option<Instant> {
        let world = self.lock();
        if world.has_completions(None) {
            return Some(world.now);
        }
        world.next_event().map(|(at, _, _)| at)
    }

    /// Each end of the connected queue pairs that work: the GID of its port, and its number.
    pub fn queue_pairs(&self) -> Vec<(Gid, Qpn)> {
        let world = self.lock();
        let working = world.queue_pairs.iter().filter(|(_, pair)| pair.peer().is_some());
        working.map(|(qpn, pair)| (world.nics[pair.nic].port.gid, *qpn)).collect()
    }

    /// Breaks both ends of a queue pair, as if the path between them had failed. `qpn` is either
    /// end. Does nothing if the queue pair is broken already.
    pub fn break_qp(&self, qpn: Qpn) {
        self.lock().break_both(qpn, QpError::RetriesExceeded);
    }

    /// How many messages have arrived on a queue pair and were not returned by a `poll` yet.
    pub fn untold(&self, qpn: Qpn) -> usize {
        self.lock().queue_pairs.get(&qpn).map_or(0, |pair| pair.inbox.len())
    }

    /// How many messages were acknowledged and then lost because of [`Odds::lose_on_break`].
    pub fn messages_lost(&self) -> u64 {
        self.lock().losses.messages
    }

    /// From now on `tap` sees every message that arrives anywhere, and may replace it. It need not
    /// keep the contract: tests use it to imitate a hostile peer, or a bug of our own, which an
    /// honest network would never show.
    pub fn tap(&self, tap: impl FnMut(&Parcel, &mut Vec<Message>) + Send + 'static) {
        self.lock().tap = Some(Tap(Box::new(tap)));
    }

    /// Counts the objects that are open at a port, so that a test finds leaks.
    ///
    /// # Panics
    ///
    /// If there is no such port.
    pub fn open_at(&self, gid: Gid) -> Open {
        let world = self.lock();
        let nic = world.nic_at(gid).expect("a port of this network");
        let queue_pairs = world.queue_pairs.values().filter(|pair| pair.nic == nic).count();
        let Nic { registered, domains, .. } = &world.nics[nic];
        Open { domains: domains.len(), registrations: registered.len(), queue_pairs }
    }

    /// Takes a port down. Its queue pairs break at once; those of its peers break after they next
    /// send.
    ///
    /// # Panics
    ///
    /// If there is no such port.
    pub fn port_down(&self, gid: Gid) {
        let mut world = self.lock();
        let nic = world.nic_at(gid).expect("a port of this network");
        world.port_down(nic);
    }

    /// Brings a port up again. New queue pairs can connect; broken ones stay broken.
    ///
    /// # Panics
    ///
    /// If there is no such port.
    pub fn port_up(&self, gid: Gid) {
        let mut world = self.lock();
        let nic = world.nic_at(gid).expect("a port of this network");
        world.port_up(nic);
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        // A test that expects a panic uses the network afterwards, so poisoning is ignored.
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The objects that are open at a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Open {
    /// Protection domains.
    pub domains: usize,
    /// Registered regions.
    pub registrations: usize,
    /// Queue pairs, including those that are broken or being released.
    pub queue_pairs: usize,
}

/// A simulated NIC, as the control thread sees it.
#[derive(Debug)]
pub struct Rnic {
    network: Network,
    nic: usize,
}

impl Rnic {
    fn exhausted(&self) -> Result<(), Exhausted> {
        let mut world = self.network.lock();
        let World { dice, odds, .. } = &mut *world;
        if dice.roll(odds.exhausted) { Err(Exhausted) } else { Ok(()) }
    }
}

impl crate::Rnic for Rnic {
    type Opening = Opening;

    fn port(&self) -> Port {
        self.network.lock().nics[self.nic].port
    }

    fn pins(&self) -> bool {
        self.network.lock().nics[self.nic].pins
    }

    fn event(&mut self) -> Option<Event> {
        self.network.lock().nics[self.nic].events.pop_front()
    }

    fn send_from(&mut self, memory: &Region) -> Result<(), Exhausted> {
        let nic = &mut self.network.lock().nics[self.nic];
        assert!(nic.send_memory.is_none() && nic.next_domain == 0, "once, before any domain");
        nic.send_memory = Some(memory.clone());
        Ok(())
    }

    fn open_domain(&mut self) -> Result<Domain, Exhausted> {
        self.exhausted()?;
        let nic = &mut self.network.lock().nics[self.nic];
        nic.next_domain += 1;
        let domain = Domain(nic.next_domain);
        nic.domains.insert(domain.0);
        Ok(domain)
    }

    fn close_domain(&mut self, domain: Domain) {
        let nic = &mut self.network.lock().nics[self.nic];
        let registered = nic.registered.values();
        let left = registered.filter(|registered| registered.domain == domain).count();
        assert_eq!(left, 0, "regions registered in {domain:?}");
        assert!(nic.domains.remove(&domain.0), "{domain:?} is open");
    }

    fn register(&mut self, domain: Domain, region: &Region) -> Result<Registration, Exhausted> {
        self.exhausted()?;
        let mut world = self.network.lock();
        let World { dice, nics, .. } = &mut *world;
        let Nic { registered, pins, .. } = &mut nics[self.nic];
        let rkey = loop {
            let rkey = Rkey(u32::try_from(dice.below(1 << 32)).expect("32 bits"));
            if !registered.contains_key(&rkey) {
                break rkey;
            }
        };
        let writer = match pins {
            true => Writer::Pinned(region.pin()),
            false => Writer::Placer(region.placer()),
        };
        registered.insert(rkey, Registered { domain, writer: Arc::new(writer) });
        Ok(Registration { domain, rkey, address: region.address() })
    }

    fn deregister(&mut self, registration: Registration) {
        let mut world = self.network.lock();
        let World { nics, queue_pairs, .. } = &mut *world;
        let registered = nics[self.nic].registered.remove(&registration.rkey);
        let registered = registered.expect("a registration of this NIC");
        for pair in queue_pairs.values_mut().filter(|pair| pair.nic == self.nic) {
            pair.hidden.reveal_region(registered.writer.region());
        }
    }

    /// All ports of a simulated network reach one another.
    fn has_route(&self, _peer: Gid) -> bool {
        true
    }

    fn open_for(&mut self, domain: Domain, messages: Messages) -> Result<Opening, Exhausted> {
        self.exhausted()?;
        let mut world = self.network.lock();
        let psn = Psn(u32::try_from(world.dice.below(1 << 24)).expect("24 bits"));
        let qpn = Qpn(world.next_qpn);
        world.next_qpn += 1;
        assert!(world.next_qpn < 1 << 24, "queue pair numbers are never reused");
        world.queue_pairs.insert(qpn, QueuePair::new(self.nic, domain, messages, psn));
        Ok(Opening { end: End { network: self.network.clone(), qpn } })
    }
}

/// Owns one end of a queue pair. Dropping it destroys the end.
#[derive(Debug)]
struct End {
    network: Network,
    qpn: Qpn,
}

impl Drop for End {
    fn drop(&mut self) {
        self.network.lock().queue_pairs.remove(&self.qpn);
    }
}

/// A simulated queue pair without a peer.
#[derive(Debug)]
pub struct Opening {
    end: End,
}

impl crate::Opening for Opening {
    type Qp = Qp;

    fn address(&self) -> QpAddress {
        let world = self.end.network.lock();
        let pair = &world.queue_pairs[&self.end.qpn];
        let Port { gid, mac, mtu } = world.nics[pair.nic].port;
        QpAddress { gid, mac, qpn: self.end.qpn, psn: pair.psn, mtu }
    }

    fn connect(self, peer: QpAddress) -> Result<Qp, ConnectError> {
        let mut world = self.end.network.lock();
        let World { nics, queue_pairs, .. } = &mut *world;
        let pair = queue_pairs.get_mut(&self.end.qpn).expect("self owns this queue pair");
        let reachable = nics[pair.nic].up && nics.iter().any(|nic| nic.port.gid == peer.gid);
        if !reachable {
            // Dropping `self` locks the network again.
            drop(world);
            return Err(ConnectError::Unreachable);
        }
        pair.stage = Stage::Connected { peer: peer.qpn };
        drop(world);
        Ok(Qp { end: self.end })
    }
}

/// A simulated queue pair, connected.
#[derive(Debug)]
pub struct Qp {
    end: End,
}

/// A simulated NIC, as its poller sees it.
#[derive(Debug)]
pub struct Fabric {
    network: Network,
    nic: usize,
    adopted: BTreeMap<QpId, End>,
    next_id: u32,
}

impl Fabric {
    /// The QPN of an adopted queue pair.
    ///
    /// # Panics
    ///
    /// If `qp` is not adopted.
    pub fn qpn(&self, qp: QpId) -> Qpn {
        self.adopted.get(&qp).expect("an adopted queue pair").qpn
    }

    /// Calls `f` with an adopted queue pair that was not released.
    fn with<T>(&self, qp: QpId, f: impl FnOnce(&mut QueuePair) -> T) -> T {
        let qpn = self.qpn(qp);
        let mut world = self.network.lock();
        let pair = world.queue_pairs.get_mut(&qpn).expect("this fabric owns the queue pair");
        assert_ne!(pair.stage, Stage::Released, "{qp:?} was released");
        f(pair)
    }

    /// Hardware would not read the bytes of a lease that its key does not cover, or others than
    /// those.
    fn check_leases(&self, work: &[Work]) {
        let world = self.network.lock();
        let memory = world.nics[self.nic].send_memory.as_ref();
        for work in work {
            let Work::Write { lease, .. } = work else { continue };
            let is_ours = memory.is_some_and(|memory| {
                let end = lease.address() + u64::from(lease.len());
                memory.address() <= lease.address() && end <= memory.address() + memory.len() as u64
            });
            assert!(is_ours, "a lease of memory that the NIC cannot read");
        }
    }

    /// Destroys released queue pairs whose completions have all been reported.
    fn forget(&mut self) {
        let mut gone = Vec::new();
        {
            let world = self.network.lock();
            for (id, end) in &self.adopted {
                let pair = &world.queue_pairs[&end.qpn];
                if pair.stage == Stage::Released && !pair.has_completions() {
                    gone.push(*id);
                }
            }
        }
        for id in gone {
            self.adopted.remove(&id);
        }
    }
}

impl crate::Fabric for Fabric {
    type Qp = Qp;

    fn adopt(&mut self, now: Instant, qp: Qp) -> QpId {
        let id = QpId(self.next_id);
        self.next_id += 1;
        let mut world = self.network.lock();
        world.advance(now);
        let pair = world.queue_pairs.get_mut(&qp.end.qpn).expect("`qp` owns this queue pair");
        assert_eq!(pair.nic, self.nic, "a queue pair of this NIC");
        pair.id = Some(id);
        drop(world);
        self.adopted.insert(id, qp.end);
        id
    }

    fn room(&self, qp: QpId) -> usize {
        self.with(qp, |pair| pair.room())
    }

    fn post(&mut self, qp: QpId, work: &mut Vec<Work>) {
        self.check_leases(work);
        self.with(qp, |pair| {
            assert!(work.len() <= pair.room(), "{} requests, room {}", work.len(), pair.room());
            work.drain(..).for_each(|work| pair.post(work));
        });
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>) {
        let mut world = self.network.lock();
        world.advance(now);
        world.reveal_some(self.nic);
        let room = (out.capacity() - out.len()).min(POLL_MAX);
        for _ in 0..room {
            let World { dice, odds, .. } = &mut *world;
            if dice.roll(odds.hold_back) {
                break;
            }
            let Some(completion) = world.next_completion(self.nic) else { break };
            out.push(completion);
        }
        drop(world);
        self.forget();
    }

    fn transmit(&mut self, now: Instant) {
        let mut world = self.network.lock();
        world.advance(now);
        for end in self.adopted.values() {
            if !world.queue_pairs[&end.qpn].posted.is_empty() {
                world.transmit(end.qpn);
            }
        }
    }

    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        let mut world = self.network.lock();
        world.advance(now);
        if world.has_completions(Some(self.nic)) {
            return Some(now);
        }
        world.next_event().map(|(at, _, _)| at)
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn fail(&mut self, now: Instant, qp: QpId) {
        let qpn = self.qpn(qp);
        let mut world = self.network.lock();
        world.advance(now);
        world.break_end(qpn, QpError::PortDown);
    }

    fn release(&mut self, now: Instant, qp: QpId) {
        self.network.lock().advance(now);
        let qpn = self.qpn(qp);
        let mut world = self.network.lock();
        let World { dice, queue_pairs, .. } = &mut *world;
        let pair = queue_pairs.get_mut(&qpn).expect("this fabric owns the queue pair");
        assert_ne!(pair.stage, Stage::Released, "{qp:?} was released before");
        pair.release(dice);
    }

    fn relinquish(&mut self, element: &mut Rmbe, announced: u32) -> usize {
        let world = self.network.lock();
        let mut registered = world.nics[self.nic].registered.values();
        let home = element.rmb_address();
        match registered.find(|one| one.writer.region().address() == home).map(|one| &*one.writer) {
            Some(Writer::Placer(placer)) => element.relinquish(placer, announced),
            Some(Writer::Pinned(_)) | None => 0,
        }
    }
}

/// Completions that one poll reports at most.
const POLL_MAX: usize = 256;
/// The first QPN that a network assigns. Real ports reserve some lower numbers.
const QPN_FIRST: u32 = 0x100;

#[cfg(test)]
mod tests;
