//! The control thread's half of a NIC in shared memory.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use smcr_memory::{Backing, Region};
use smcr_proto::{Gid, Mtu, Psn};

use super::REGION_MAX;
use super::directory::{mac_of, mark_of};
use super::shared::{Inbox, Job, Part, Shared, Ticket};
use super::wire::Name;
use crate::{ConnectError, Domain, Event, Exhausted, Messages, Port, QpAddress, Registration};

/// The control thread's half of a NIC in shared memory.
#[derive(Debug)]
pub struct Rnic {
    shared: Arc<Shared>,
    part: usize,
    /// How many regions are registered in each domain.
    domains: HashMap<Domain, usize>,
}

/// A queue pair that has its number but no peer yet.
#[derive(Debug)]
pub struct Opening {
    qp: Qp,
    domain: Domain,
    address: QpAddress,
}

/// A queue pair that is connected, or soon will be, and that its poller has not adopted yet.
#[derive(Debug)]
pub struct Qp {
    pub(super) ticket: Ticket,
    pub(super) part: usize,
    pub(super) messages: Messages,
    pub(super) inbox: Arc<Inbox>,
}

impl Rnic {
    pub(super) fn new(shared: &Arc<Shared>, part: usize) -> Self {
        Self { shared: Arc::clone(shared), part, domains: HashMap::new() }
    }

    fn part(&self) -> &Part {
        &self.shared.parts()[self.part]
    }

    /// Whether anything new can be made.
    fn check(&self) -> Result<(), Exhausted> {
        if self.shared.is_gone() { Err(Exhausted) } else { Ok(()) }
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
        let gid = self.shared.gid;
        // There are no packets. Peers are told the largest size, as they must be told one.
        Port { gid, mac: mac_of(gid), mtu: Mtu::B4096 }
    }

    /// Only NICs in the same directory of the same host can be reached.
    fn has_route(&self, peer: Gid) -> bool {
        self.shared.directory.has(peer)
    }

    /// It sends no packets.
    fn packs_densely(&self) -> bool {
        true
    }

    fn backing(&self) -> Backing {
        Backing::Shared
    }

    fn mark(&self) -> Option<[u8; 8]> {
        Some(mark_of(self.shared.gid))
    }

    fn is_near(&self, mark: [u8; 8]) -> bool {
        !self.shared.is_gone() && self.shared.directory.has_marked(mark)
    }

    fn event(&mut self) -> Option<Event> {
        self.part().take_event()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.part().reports())
    }

    /// The CPU reads what is sent, and needs no key for that.
    fn send_from(&mut self, _: &Region) -> Result<(), Exhausted> {
        Ok(())
    }

    fn open_domain(&mut self) -> Result<Domain, Exhausted> {
        self.check()?;
        let domain = self.shared.new_domain();
        self.domains.insert(domain, 0);
        Ok(domain)
    }

    fn close_domain(&mut self, domain: Domain) {
        let open = self.domains.remove(&domain);
        assert_eq!(open, Some(0), "{domain:?} must be open and hold no registration");
    }

    /// # Panics
    ///
    /// If the region is not [shared](Region::shared), or is larger than any that peers map.
    fn register(&mut self, domain: Domain, region: &Region) -> Result<Registration, Exhausted> {
        assert!(region.descriptor().is_some(), "peers can map only regions that are shared");
        assert!(region.len() <= REGION_MAX);
        self.check()?;
        let open = self.domains.get_mut(&domain).expect("the caller opened the domain");
        // Made up: where our memory really is helps nobody but who looks for a way in.
        let random = getrandom::u32().map_err(|_| Exhausted)?;
        let address = (u64::from(random) + 1) << ADDRESS_SHIFT;
        let rkey = self.shared.new_key().ok_or(Exhausted)?;
        *open += 1;
        self.shared.ask(Job::Register { rkey, domain, region: region.clone(), address });
        Ok(Registration { domain, rkey, address })
    }

    fn deregister(&mut self, registration: Registration) {
        let open = self.domains.get_mut(&registration.domain).expect("its domain is open");
        assert!(*open > 0, "a region is deregistered once");
        *open -= 1;
        self.shared.ask(Job::Deregister(registration.rkey));
    }

    fn open_for(&mut self, domain: Domain, messages: Messages) -> Result<Opening, Exhausted> {
        self.check()?;
        assert!(self.domains.contains_key(&domain), "the caller opened the domain");
        let psn = Psn(getrandom::u32().map_err(|_| Exhausted)? & PSN_MASK);
        let qpn = self.shared.new_number().ok_or(Exhausted)?;
        let ticket = Ticket { qpn, shared: Arc::clone(&self.shared) };
        let Port { gid, mac, mtu } = self.port();
        let address = QpAddress { gid, mac, qpn, psn, mtu };
        let qp = Qp { ticket, part: self.part, messages, inbox: Arc::default() };
        Ok(Opening { qp, domain, address })
    }
}

impl crate::Opening for Opening {
    type Qp = Qp;

    fn address(&self) -> QpAddress {
        self.address
    }

    fn connect(self, peer: QpAddress) -> Result<Qp, ConnectError> {
        let Self { qp, domain, address } = self;
        let shared = &qp.ticket.shared;
        if shared.is_gone() || !shared.directory.has(peer.gid) {
            return Err(ConnectError::Unreachable);
        }
        let [own, peer] =
            [address, peer].map(|end| Name { gid: end.gid, qpn: end.qpn, psn: end.psn });
        let inbox = Arc::clone(&qp.inbox);
        shared.ask(Job::Connect { own, domain, peer, part: qp.part, inbox });
        Ok(qp)
    }
}

/// Addresses that peers are told begin at multiples of this power of two, as large pages would.
const ADDRESS_SHIFT: u32 = 21;
/// PSNs have 24 bits.
const PSN_MASK: u32 = 0x00ff_ffff;
