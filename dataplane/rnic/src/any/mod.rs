//! One type for all kinds of NIC that a gateway may have, whatever each of them is.
//!
//! The code that runs on these types is compiled once and serves ports of different kinds at the
//! same time. The price is one `match` per call, and calls are per turn or per burst, never per
//! packet or byte.
//!
//! To add a kind: a variant of [`Kind`], and of [`Nic`], [`Opening`], [`Qp`] and [`Fabric`] unless
//! it is RoCE in software. That needs a variant of [`AnyWire`] only.

use std::net::IpAddr;
use std::num::NonZero;
use std::os::fd::BorrowedFd;

use smcr_memory::{Backing, Region, Rmbe};
use smcr_proto::{Gid, Instant, MacAddress, Mtu, Qpn};

use crate::roce::{self, dpdk, packet, udp};
use crate::shm;
use crate::tracer::{Introduced, Traced, Tracer};
use crate::verbs;
use crate::{
    Completion, ConnectError, Domain, Event, Exhausted, Messages, Port, QpAddress, QpId,
    Registration, Signs, Work,
};

mod error;
mod figures;
mod wire;

pub use error::OpenError;
pub use figures::Figures;
pub use wire::AnyWire;

/// The kinds of NIC, each with what only it needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind<'a> {
    /// RoCEv2 in software, over UDP sockets.
    RoceUdp {
        /// Its address; `None` for the one preferred among those of the device.
        address: Option<IpAddr>,
    },
    /// RoCE in software, over a packet socket, which has one poller.
    RocePacket {
        /// Which of the addresses of the device; `None` for the preferred one.
        address: Option<IpAddr>,
        /// Which RoCE it speaks.
        version: packet::Version,
    },
    /// RoCEv2 in software, over a port of DPDK, which has one poller.
    Dpdk {
        /// The address of the port, which no device of the host has.
        address: IpAddr,
        /// How many bits of it the addresses of its network have in common.
        prefix: u8,
        /// The VLAN of its network, at most 4094, if frames have tags.
        vlan: Option<NonZero<u16>>,
        /// The router to other networks.
        gateway: Option<IpAddr>,
        /// Further arguments of EAL, the same for all ports of a process.
        eal: &'a [String],
    },
    /// Shared memory, between the processes of one host. Its device is the directory in which they
    /// meet.
    Shm,
    /// An RNIC, by libibverbs. Its device is the name of an RDMA device, such as `mlx5_0`.
    Verbs {
        /// Its port, from 1.
        port: u8,
        /// The index of its GID; `None` for that of its first IPv4 address over UDP.
        gid_index: Option<u32>,
    },
}

/// Which NIC to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec<'a> {
    /// Its kind.
    pub kind: Kind<'a>,
    /// The device it stands on, in the words of its kind.
    pub device: &'a str,
    /// How many fabrics it gets, each for a poller of its own: 1 to 256, as its kind allows.
    pub pollers: u32,
    /// The largest path MTU to announce; `None` for the largest that the device allows.
    pub mtu_max: Option<Mtu>,
}

/// Opens a NIC. Its parts, one per poller, have one address: peers see one NIC.
///
/// # Errors
///
/// [`OpenError`], with nothing left open.
///
/// # Panics
///
/// If the number of pollers is not 1 to 256, or more than 1 for a kind that has one poller only.
pub fn open(spec: &Spec<'_>) -> Result<Vec<(Nic, Fabric)>, OpenError> {
    match spec.kind {
        Kind::RoceUdp { address } => {
            let place = match address {
                Some(address) => udp::Place::Address(address),
                None => udp::Place::Device(spec.device),
            };
            let config = udp::Config { mtu_max: spec.mtu_max, ..udp::Config::on(place) };
            let parts = udp::parts(&config, spec.pollers)?.into_iter();
            let parts = parts.map(|(setup, wire)| (setup, AnyWire::Udp(wire)));
            Ok(soft(roce::join_all(parts.collect())?))
        }
        Kind::RocePacket { address, version } => {
            assert_eq!(spec.pollers, 1, "a packet socket has one poller");
            let (device, mtu_max) = (spec.device, spec.mtu_max);
            let config = packet::Config { device, address, version, mtu_max };
            let (setup, wire) = packet::parts(&config)?;
            Ok(soft(vec![roce::join(setup, AnyWire::Packet(Box::new(wire)))]))
        }
        Kind::Dpdk { address, prefix, vlan, gateway, eal } => {
            assert_eq!(spec.pollers, 1, "a port of DPDK has one poller");
            let (device, mtu_max) = (spec.device, spec.mtu_max);
            let config = dpdk::Config { device, address, prefix, vlan, gateway, eal, mtu_max };
            let (setup, wire) = dpdk::parts(&config)?;
            Ok(soft(vec![roce::join(setup, AnyWire::Dpdk(Box::new(wire)))]))
        }
        Kind::Shm => {
            let parts = shm::open(spec.device, spec.pollers)?.into_iter();
            let any = |(rnic, fabric)| (Nic::Shm(rnic), Fabric::Shm(Box::new(Traced::new(fabric))));
            Ok(parts.map(any).collect())
        }
        Kind::Verbs { port, gid_index } => {
            let (device, mtu_max) = (spec.device, spec.mtu_max);
            let config = verbs::Config { device, port, gid_index, mtu_max };
            // Each poller opens the device anew: a queue pair of one is never seen by another.
            let parts = (0..spec.pollers).map(|_| verbs::open(&config));
            let parts = parts.collect::<Result<Vec<_>, _>>()?.into_iter();
            let any =
                |(rnic, fabric)| (Nic::Verbs(rnic), Fabric::Verbs(Box::new(Traced::new(fabric))));
            Ok(parts.map(any).collect())
        }
    }
}

/// RoCE in software.
fn soft(parts: Vec<(roce::Rnic, roce::Fabric<AnyWire>)>) -> Vec<(Nic, Fabric)> {
    let any = |(rnic, fabric)| (Nic::Roce(rnic), Fabric::Roce(Box::new(fabric)));
    parts.into_iter().map(any).collect()
}

/// The control thread's half of a NIC.
#[derive(Debug)]
pub enum Nic {
    /// RoCE in software, over any wire.
    Roce(roce::Rnic),
    /// In shared memory.
    Shm(shm::Rnic),
    /// An RNIC.
    Verbs(verbs::Rnic),
}

/// A queue pair that knows no peer yet.
#[derive(Debug)]
pub enum Opening {
    /// Of RoCE in software.
    Roce(roce::Opening),
    /// In shared memory.
    Shm(shm::Opening),
    /// Of an RNIC.
    Verbs(verbs::Opening),
}

/// A connected queue pair that its poller has not adopted yet.
#[derive(Debug)]
pub enum Qp {
    /// Of RoCE in software.
    Roce(roce::Qp),
    /// In shared memory.
    Shm(Introduced<shm::Qp>),
    /// Of an RNIC.
    Verbs(Introduced<verbs::Qp>),
}

/// The poller's half of a NIC.
#[derive(Debug)]
pub enum Fabric {
    /// RoCE in software, over any wire.
    Roce(Box<roce::Fabric<AnyWire>>),
    /// In shared memory.
    Shm(Box<Traced<shm::Fabric>>),
    /// Of an RNIC.
    Verbs(Box<Traced<verbs::Fabric>>),
}

impl Fabric {
    /// The end of its tap where records come out. `mac` is the port's Ethernet address. Call it
    /// once.
    pub fn tracer(&mut self, mac: MacAddress) -> Tracer {
        match self {
            Self::Roce(fabric) => fabric.tracer(mac),
            Self::Shm(fabric) => fabric.tracer(mac),
            Self::Verbs(fabric) => fabric.tracer(mac),
        }
    }

    /// Whether its poller never waits, spinning, for another thread. Drivers have locks, which
    /// threads of their own and our workers take, too.
    pub fn never_spins(&self) -> bool {
        match self {
            Self::Roce(fabric) => !matches!(fabric.wire(), AnyWire::Dpdk(_)),
            // Its queues with the worker are not bounded, and not of the kind that never waits.
            Self::Shm(_) | Self::Verbs(_) => false,
        }
    }
}

impl crate::Rnic for Nic {
    type Opening = Opening;

    fn port(&self) -> Port {
        match self {
            Self::Roce(rnic) => rnic.port(),
            Self::Shm(rnic) => rnic.port(),
            Self::Verbs(rnic) => rnic.port(),
        }
    }

    fn has_route(&self, peer: Gid) -> bool {
        match self {
            Self::Roce(rnic) => rnic.has_route(peer),
            Self::Shm(rnic) => rnic.has_route(peer),
            Self::Verbs(rnic) => rnic.has_route(peer),
        }
    }

    fn payload(&self, qpn: Qpn) -> Option<u32> {
        match self {
            Self::Roce(rnic) => rnic.payload(qpn),
            Self::Shm(rnic) => rnic.payload(qpn),
            Self::Verbs(rnic) => rnic.payload(qpn),
        }
    }

    fn packs_densely(&self) -> bool {
        match self {
            Self::Roce(rnic) => rnic.packs_densely(),
            Self::Shm(rnic) => rnic.packs_densely(),
            Self::Verbs(rnic) => rnic.packs_densely(),
        }
    }

    fn pins(&self) -> bool {
        match self {
            Self::Roce(rnic) => rnic.pins(),
            Self::Shm(rnic) => rnic.pins(),
            Self::Verbs(rnic) => rnic.pins(),
        }
    }

    fn backing(&self) -> Backing {
        match self {
            Self::Roce(rnic) => rnic.backing(),
            Self::Shm(rnic) => rnic.backing(),
            Self::Verbs(rnic) => rnic.backing(),
        }
    }

    fn mark(&self) -> Option<[u8; 8]> {
        match self {
            Self::Roce(rnic) => rnic.mark(),
            Self::Shm(rnic) => rnic.mark(),
            Self::Verbs(rnic) => rnic.mark(),
        }
    }

    fn is_near(&self, mark: [u8; 8]) -> bool {
        match self {
            Self::Roce(rnic) => rnic.is_near(mark),
            Self::Shm(rnic) => rnic.is_near(mark),
            Self::Verbs(rnic) => rnic.is_near(mark),
        }
    }

    fn event(&mut self) -> Option<Event> {
        match self {
            Self::Roce(rnic) => rnic.event(),
            Self::Shm(rnic) => rnic.event(),
            Self::Verbs(rnic) => rnic.event(),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Roce(rnic) => rnic.descriptor(),
            Self::Shm(rnic) => rnic.descriptor(),
            Self::Verbs(rnic) => rnic.descriptor(),
        }
    }

    fn send_from(&mut self, memory: &Region) -> Result<(), Exhausted> {
        match self {
            Self::Roce(rnic) => rnic.send_from(memory),
            Self::Shm(rnic) => rnic.send_from(memory),
            Self::Verbs(rnic) => rnic.send_from(memory),
        }
    }

    fn open_domain(&mut self) -> Result<Domain, Exhausted> {
        match self {
            Self::Roce(rnic) => rnic.open_domain(),
            Self::Shm(rnic) => rnic.open_domain(),
            Self::Verbs(rnic) => rnic.open_domain(),
        }
    }

    fn close_domain(&mut self, domain: Domain) {
        match self {
            Self::Roce(rnic) => rnic.close_domain(domain),
            Self::Shm(rnic) => rnic.close_domain(domain),
            Self::Verbs(rnic) => rnic.close_domain(domain),
        }
    }

    fn register(&mut self, domain: Domain, region: &Region) -> Result<Registration, Exhausted> {
        match self {
            Self::Roce(rnic) => rnic.register(domain, region),
            Self::Shm(rnic) => rnic.register(domain, region),
            Self::Verbs(rnic) => rnic.register(domain, region),
        }
    }

    fn deregister(&mut self, registration: Registration) {
        match self {
            Self::Roce(rnic) => rnic.deregister(registration),
            Self::Shm(rnic) => rnic.deregister(registration),
            Self::Verbs(rnic) => rnic.deregister(registration),
        }
    }

    fn open_for(&mut self, domain: Domain, messages: Messages) -> Result<Opening, Exhausted> {
        match self {
            Self::Roce(rnic) => rnic.open_for(domain, messages).map(Opening::Roce),
            Self::Shm(rnic) => rnic.open_for(domain, messages).map(Opening::Shm),
            Self::Verbs(rnic) => rnic.open_for(domain, messages).map(Opening::Verbs),
        }
    }
}

impl crate::Opening for Opening {
    type Qp = Qp;

    fn address(&self) -> QpAddress {
        match self {
            Self::Roce(opening) => opening.address(),
            Self::Shm(opening) => opening.address(),
            Self::Verbs(opening) => opening.address(),
        }
    }

    fn fit_path_to(&mut self, peer: Gid) {
        match self {
            Self::Roce(opening) => opening.fit_path_to(peer),
            Self::Shm(opening) => opening.fit_path_to(peer),
            Self::Verbs(opening) => opening.fit_path_to(peer),
        }
    }

    fn pack_densely(&mut self) {
        match self {
            Self::Roce(opening) => opening.pack_densely(),
            Self::Shm(opening) => opening.pack_densely(),
            Self::Verbs(opening) => opening.pack_densely(),
        }
    }

    fn connect(self, peer: QpAddress) -> Result<Qp, ConnectError> {
        match self {
            Self::Roce(opening) => opening.connect(peer).map(Qp::Roce),
            Self::Shm(opening) => Introduced::connect(opening, peer).map(Qp::Shm),
            Self::Verbs(opening) => Introduced::connect(opening, peer).map(Qp::Verbs),
        }
    }
}

impl crate::Fabric for Fabric {
    type Qp = Qp;

    /// # Panics
    ///
    /// If the queue pair is of another kind: a queue pair comes to the fabric of its own NIC.
    fn adopt(&mut self, now: Instant, qp: Qp) -> QpId {
        match (self, qp) {
            (Self::Roce(fabric), Qp::Roce(qp)) => fabric.adopt(now, qp),
            (Self::Shm(fabric), Qp::Shm(qp)) => fabric.adopt(now, qp),
            (Self::Verbs(fabric), Qp::Verbs(qp)) => fabric.adopt(now, qp),
            (Self::Roce(_) | Self::Shm(_) | Self::Verbs(_), _) => {
                panic!("a queue pair of another kind")
            }
        }
    }

    fn room(&self, qp: QpId) -> usize {
        match self {
            Self::Roce(fabric) => fabric.room(qp),
            Self::Shm(fabric) => fabric.room(qp),
            Self::Verbs(fabric) => fabric.room(qp),
        }
    }

    fn post(&mut self, qp: QpId, work: &mut Vec<Work>) {
        match self {
            Self::Roce(fabric) => fabric.post(qp, work),
            Self::Shm(fabric) => fabric.post(qp, work),
            Self::Verbs(fabric) => fabric.post(qp, work),
        }
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>) {
        match self {
            Self::Roce(fabric) => fabric.poll(now, out),
            Self::Shm(fabric) => fabric.poll(now, out),
            Self::Verbs(fabric) => fabric.poll(now, out),
        }
    }

    fn has_completions(&self) -> bool {
        match self {
            Self::Roce(fabric) => fabric.has_completions(),
            Self::Shm(fabric) => fabric.has_completions(),
            Self::Verbs(fabric) => fabric.has_completions(),
        }
    }

    fn note_signs(&mut self, signs: Signs) {
        match self {
            Self::Roce(fabric) => fabric.note_signs(signs),
            Self::Shm(fabric) => fabric.note_signs(signs),
            Self::Verbs(fabric) => fabric.note_signs(signs),
        }
    }

    fn transmit(&mut self, now: Instant) {
        match self {
            Self::Roce(fabric) => fabric.transmit(now),
            Self::Shm(fabric) => fabric.transmit(now),
            Self::Verbs(fabric) => fabric.transmit(now),
        }
    }

    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        match self {
            Self::Roce(fabric) => fabric.prepare_sleep(now),
            Self::Shm(fabric) => fabric.prepare_sleep(now),
            Self::Verbs(fabric) => fabric.prepare_sleep(now),
        }
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Roce(fabric) => fabric.event_descriptor(),
            Self::Shm(fabric) => fabric.event_descriptor(),
            Self::Verbs(fabric) => fabric.event_descriptor(),
        }
    }

    fn fail(&mut self, now: Instant, qp: QpId) {
        match self {
            Self::Roce(fabric) => fabric.fail(now, qp),
            Self::Shm(fabric) => fabric.fail(now, qp),
            Self::Verbs(fabric) => fabric.fail(now, qp),
        }
    }

    fn release(&mut self, now: Instant, qp: QpId) {
        match self {
            Self::Roce(fabric) => fabric.release(now, qp),
            Self::Shm(fabric) => fabric.release(now, qp),
            Self::Verbs(fabric) => fabric.release(now, qp),
        }
    }

    fn relinquish(&mut self, element: &mut Rmbe, announced: u32) -> usize {
        match self {
            Self::Roce(fabric) => fabric.relinquish(element, announced),
            Self::Shm(fabric) => fabric.relinquish(element, announced),
            Self::Verbs(fabric) => fabric.relinquish(element, announced),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever this host lacks, libibverbs or the device, the operator reads one line that names
    /// what was asked for.
    #[test]
    fn an_rnic_that_is_not_there_is_named_in_one_line() {
        let kind = Kind::Verbs { port: 1, gid_index: None };
        let spec = Spec { kind, device: "nobody0", pollers: 1, mtu_max: None };
        let line = open(&spec).map(drop).unwrap_err().to_string();
        assert!(line.starts_with("RDMA device nobody0: ") && line.lines().count() == 1, "{line}");
    }
}
