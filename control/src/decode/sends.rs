//! Messages that are longer than a packet: those of SMC-Rv2 have up to 8 KiB.

use std::collections::HashMap;
use std::net::IpAddr;

use smcr_proto::wire::llc::v2::LEN_MAX;

/// Messages in the middle of which a capture may be, at once.
const OPEN_MAX: usize = 1024;

/// Packet sequence numbers have 24 bits.
const PSN_MASK: u32 = 0x00ff_ffff;

/// To whom a packet goes: the source's address, the target's, and the target's queue pair.
pub(super) type Target = (IpAddr, IpAddr, u32);

/// Which part of a message a packet carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    First,
    Middle,
    Last,
}

/// The messages that have begun and not ended.
#[derive(Debug, Default)]
pub(super) struct Sends {
    open: HashMap<Target, Open>,
}

#[derive(Debug)]
struct Open {
    next_psn: u32,
    bytes: Vec<u8>,
}

impl Sends {
    /// Takes one part in, and returns the message that it ends. Parts that do not follow each
    /// other, for want of a packet in the capture, make none.
    pub(super) fn part(
        &mut self,
        target: Target,
        psn: u32,
        part: Part,
        payload: &[u8],
    ) -> Option<Vec<u8>> {
        let mut open = match (part, self.open.remove(&target)) {
            (Part::First, _) => Open { next_psn: psn, bytes: Vec::new() },
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
