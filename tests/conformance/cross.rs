//! Two backends at the ends of one wire: real RNICs by libibverbs, and our soft RNIC over UDP.
//!
//! The soft RNIC of Linux has UDP port 4791 of its network namespace, so ours is in another one,
//! `far`. Its routes are only seen from there, so calls that look for one are made from there.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use smcr_memory::Region;
use smcr_proto::{Gid, Instant, QpAddress};
use smcr_rnic::roce::udp::{self, Config, Place, Udp};
use smcr_rnic::{
    Completion, ConnectError, Domain, Exhausted, Messages, Port, QpId, Registration, Work, roce,
    verbs,
};

use crate::RoceOverUdp;
use crate::rig::Harness;

/// A queue pair between `rxe0` and our soft RNIC. The first side is that of libibverbs, or the
/// second one is.
pub(crate) struct Cross<const VERBS_FIRST: bool>;

pub(crate) enum Rnic {
    Verbs(verbs::Rnic),
    Roce(roce::Rnic),
}

pub(crate) enum Opening {
    Verbs(verbs::Opening),
    Roce(roce::Opening),
}

pub(crate) enum Qp {
    Verbs(verbs::Qp),
    Roce(roce::Qp),
}

pub(crate) enum Fabric {
    Verbs(Box<verbs::Fabric>),
    Roce(Box<roce::Fabric<Udp>>),
}

impl<const VERBS_FIRST: bool> Harness for Cross<VERBS_FIRST> {
    type Rnic = Rnic;
    type Fabric = Fabric;
    const CUTS_WRITES: bool = true;
    const RELEASES_LATER: bool = !VERBS_FIRST;

    fn new(_: u64) -> (Self, [(Rnic, Fabric); 2]) {
        let (rnic, fabric) = verbs::open(&verbs::Config::on("rxe0")).unwrap();
        let near = (Rnic::Verbs(rnic), Fabric::Verbs(Box::new(fabric)));
        let place = Place::Address(Ipv4Addr::new(10, 77, 0, 2).into());
        let (rnic, fabric) = in_far(|| udp::open(&Config::on(place)).unwrap());
        let far = (Rnic::Roce(rnic), Fabric::Roce(Box::new(fabric)));
        (Self, if VERBS_FIRST { [near, far] } else { [far, near] })
    }

    fn now(&self) -> Instant {
        RoceOverUdp.now()
    }

    fn wait(&mut self, until: Option<Instant>) {
        RoceOverUdp.wait(until);
    }
}

/// Does `work` in the network namespace `far`.
fn in_far<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let inside = || {
        let namespace = File::open("/run/netns/far").expect("tests/interop made it");
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .expect("entering a network namespace needs root");
        work()
    };
    thread::scope(|scope| scope.spawn(inside).join().unwrap())
}

/// Calls a method of whichever backend it is.
macro_rules! either {
    ($kind:ident, $this:expr, $inner:ident => $call:expr) => {
        match $this {
            $kind::Verbs($inner) => $call,
            $kind::Roce($inner) => $call,
        }
    };
}

impl smcr_rnic::Rnic for Rnic {
    type Opening = Opening;

    fn port(&self) -> Port {
        either!(Rnic, self, rnic => rnic.port())
    }

    fn has_route(&self, peer: Gid) -> bool {
        either!(Rnic, self, rnic => rnic.has_route(peer))
    }

    fn send_from(&mut self, memory: &Region) -> Result<(), Exhausted> {
        either!(Rnic, self, rnic => rnic.send_from(memory))
    }

    fn open_domain(&mut self) -> Result<Domain, Exhausted> {
        either!(Rnic, self, rnic => rnic.open_domain())
    }

    fn close_domain(&mut self, domain: Domain) {
        either!(Rnic, self, rnic => rnic.close_domain(domain));
    }

    fn register(&mut self, domain: Domain, region: &Region) -> Result<Registration, Exhausted> {
        either!(Rnic, self, rnic => rnic.register(domain, region))
    }

    fn deregister(&mut self, registration: Registration) {
        either!(Rnic, self, rnic => rnic.deregister(registration));
    }

    fn open_for(&mut self, domain: Domain, messages: Messages) -> Result<Opening, Exhausted> {
        match self {
            Self::Verbs(rnic) => rnic.open_for(domain, messages).map(Opening::Verbs),
            Self::Roce(rnic) => rnic.open_for(domain, messages).map(Opening::Roce),
        }
    }
}

impl smcr_rnic::Opening for Opening {
    type Qp = Qp;

    fn address(&self) -> QpAddress {
        either!(Opening, self, opening => opening.address())
    }

    fn connect(self, peer: QpAddress) -> Result<Qp, ConnectError> {
        match self {
            Self::Verbs(opening) => opening.connect(peer).map(Qp::Verbs),
            Self::Roce(opening) => in_far(|| opening.connect(peer)).map(Qp::Roce),
        }
    }
}

impl smcr_rnic::Fabric for Fabric {
    type Qp = Qp;

    fn adopt(&mut self, now: Instant, qp: Qp) -> QpId {
        match (self, qp) {
            (Self::Verbs(fabric), Qp::Verbs(qp)) => fabric.adopt(now, qp),
            (Self::Roce(fabric), Qp::Roce(qp)) => fabric.adopt(now, qp),
            (Self::Verbs(_), Qp::Roce(_)) | (Self::Roce(_), Qp::Verbs(_)) => {
                panic!("a queue pair of the other side")
            }
        }
    }

    fn room(&self, qp: QpId) -> usize {
        either!(Fabric, self, fabric => fabric.room(qp))
    }

    fn post(&mut self, qp: QpId, work: &mut Vec<Work>) {
        either!(Fabric, self, fabric => fabric.post(qp, work));
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>) {
        either!(Fabric, self, fabric => fabric.poll(now, out));
    }

    fn transmit(&mut self, now: Instant) {
        either!(Fabric, self, fabric => fabric.transmit(now));
    }

    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        either!(Fabric, self, fabric => fabric.prepare_sleep(now))
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        either!(Fabric, self, fabric => fabric.event_descriptor())
    }

    fn fail(&mut self, now: Instant, qp: QpId) {
        either!(Fabric, self, fabric => fabric.fail(now, qp));
    }

    fn release(&mut self, now: Instant, qp: QpId) {
        either!(Fabric, self, fabric => fabric.release(now, qp));
    }
}
