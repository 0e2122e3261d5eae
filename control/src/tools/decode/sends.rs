//! Reassembles messages of several packets. SMC-Rv2 has messages of up to 8 KiB.

use std::collections::HashMap;
use std::net::IpAddr;

use smcr_proto::wire::llc::v2::LEN_MAX;

/// The most incomplete messages that are kept.
const OPEN_MAX: usize = 1024;

/// Packet sequence numbers have 24 bits.
const PSN_MASK: u32 = 0x00ff_ffff;

/// The connection of a packet: source address, target address, and the target's queue pair.
pub(super) type Target = (IpAddr, IpAddr, u32);

/// Which part of a message a packet carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    First,
    Middle,
    Last,
}

/// The incomplete messages.
#[derive(Debug, Default)]
pub(super) struct Sends {
    open: HashMap<Target, Incomplete>,
}

#[derive(Debug)]
struct Incomplete {
    next_psn: u32,
    bytes: Vec<u8>,
}

impl Sends {
    /// Adds one part, and returns the message that it completes. If the capture lacks a packet of a
    /// message, that message is dropped.
    pub(super) fn part(
        &mut self,
        target: Target,
        psn: u32,
        part: Part,
        payload: &[u8],
    ) -> Option<Vec<u8>> {
        let mut open = match (part, self.open.remove(&target)) {
            (Part::First, _) => Incomplete { next_psn: psn, bytes: Vec::new() },
            (Part::Middle | Part::Last, open) => open.filter(|open| open.next_psn == psn)?,
        };
        if open.bytes.len() + payload.len() > LEN_MAX {
            return None;
        }
        open.bytes.extend_from_slice(payload);
        open.next_psn = psn.wrapping_add(1) & PSN_MASK;
        if part == Part::Last {
            return Some(open.bytes);
        }
        if self.open.len() < OPEN_MAX {
            self.open.insert(target, open);
        }
        None
    }
}
