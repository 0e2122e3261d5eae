//! One type for all wires of RoCE in software, so that its core is compiled once.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use smcr_os::carrier::Link;
use smcr_proto::Instant;

use crate::roce::dpdk::Dpdk;
use crate::roce::packet::Packet;
use crate::roce::udp::Udp;
use crate::roce::{Run, Sent, Train, Wire};

/// Any wire. Each call is about a burst; only [`Wire::train`] is called for each train of it.
#[derive(Debug)]
pub enum AnyWire {
    /// A UDP socket of the kernel.
    Udp(Udp),
    /// A packet socket of the kernel.
    Packet(Box<Packet>),
    /// A port of DPDK.
    Dpdk(Box<Dpdk>),
}

impl Wire for AnyWire {
    fn receive(&mut self, now: Instant) -> usize {
        match self {
            Self::Udp(wire) => wire.receive(now),
            Self::Packet(wire) => wire.receive(now),
            Self::Dpdk(wire) => wire.receive(now),
        }
    }

    fn train(&self, index: usize) -> Train<'_> {
        match self {
            Self::Udp(wire) => wire.train(index),
            Self::Packet(wire) => wire.train(index),
            Self::Dpdk(wire) => wire.train(index),
        }
    }

    fn send(&mut self, now: Instant, bytes: &[u8], runs: &[Run]) -> Sent {
        match self {
            Self::Udp(wire) => wire.send(now, bytes, runs),
            Self::Packet(wire) => wire.send(now, bytes, runs),
            Self::Dpdk(wire) => wire.send(now, bytes, runs),
        }
    }

    fn segments_max(&self) -> usize {
        match self {
            Self::Udp(wire) => wire.segments_max(),
            Self::Packet(wire) => wire.segments_max(),
            Self::Dpdk(wire) => wire.segments_max(),
        }
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Udp(wire) => wire.event_descriptor(),
            Self::Packet(wire) => wire.event_descriptor(),
            Self::Dpdk(wire) => wire.event_descriptor(),
        }
    }

    fn nap(&self) -> Option<Duration> {
        match self {
            Self::Udp(wire) => wire.nap(),
            Self::Packet(wire) => wire.nap(),
            Self::Dpdk(wire) => wire.nap(),
        }
    }

    fn link(&self) -> Link {
        match self {
            Self::Udp(wire) => wire.link(),
            Self::Packet(wire) => wire.link(),
            Self::Dpdk(wire) => wire.link(),
        }
    }
}
