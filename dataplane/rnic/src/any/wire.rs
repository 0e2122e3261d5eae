//! One type for all wires of RoCE in software, so that its core is compiled once.

use std::os::fd::BorrowedFd;

use crate::roce::udp::Udp;
use crate::roce::{Run, Sent, Train, Wire};

/// Any wire. Each call is about a burst; only [`Wire::train`] is called for each train of it.
#[derive(Debug)]
pub enum AnyWire {
    /// A UDP socket of the kernel.
    Udp(Udp),
}

impl Wire for AnyWire {
    fn receive(&mut self) -> usize {
        match self {
            Self::Udp(wire) => wire.receive(),
        }
    }

    fn train(&self, index: usize) -> Train<'_> {
        match self {
            Self::Udp(wire) => wire.train(index),
        }
    }

    fn send(&mut self, bytes: &[u8], runs: &[Run]) -> Sent {
        match self {
            Self::Udp(wire) => wire.send(bytes, runs),
        }
    }

    fn segments_max(&self) -> usize {
        match self {
            Self::Udp(wire) => wire.segments_max(),
        }
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Udp(wire) => wire.event_descriptor(),
        }
    }
}
