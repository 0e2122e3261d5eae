//! Spells work requests as packets, for captures of NICs that do not show theirs.

use std::net::SocketAddr;

use smcr_proto::{Psn, Qpn, Rkey};

use super::batch::PAYLOAD_MAX;
use super::icrc::Flow;
use super::psn;
use super::wire::{
    BTH_LEN, Body, Bth, RETH_LEN, Reth, SEND_FIRST, SEND_LAST, SEND_MIDDLE, SEND_ONLY, WRITE_FIRST,
    WRITE_LAST, WRITE_MIDDLE, WRITE_ONLY, packet_len,
};

/// One direction of a queue pair. It counts PSNs of its own, as it sees no acknowledgements and no
/// retransmissions.
#[derive(Debug)]
pub(crate) struct Speller {
    flow: Flow,
    target: Qpn,
    psn: Psn,
}

/// The operations of a message or a write: only, first, middle, last.
type Opcodes = [u8; 4];

impl Speller {
    /// Packets from one address to the other, which are of one family, for the queue pair `target`.
    /// The first one has the PSN `first`.
    pub(crate) fn new(ends: (SocketAddr, SocketAddr), target: Qpn, first: Psn) -> Self {
        Self { flow: Flow::new(ends.0, ends.1), target, psn: first }
    }

    /// Spells a message.
    pub(crate) fn send(&mut self, message: &[u8], show: &mut dyn FnMut(&[u8])) {
        let len = u32::try_from(message.len()).expect("messages are short");
        let bytes = |at: u32, out: &mut [u8]| {
            let at = at as usize;
            out.copy_from_slice(&message[at..at + out.len()]);
        };
        let opcodes = [SEND_ONLY, SEND_FIRST, SEND_MIDDLE, SEND_LAST];
        self.spell(opcodes, None, len, &bytes, show);
    }

    /// Spells a write of `len` bytes, which `bytes` copies from a position on.
    pub(crate) fn write(
        &mut self,
        (rkey, address): (Rkey, u64),
        len: u32,
        bytes: &dyn Fn(u32, &mut [u8]),
        show: &mut dyn FnMut(&[u8]),
    ) {
        let opcodes = [WRITE_ONLY, WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST];
        self.spell(opcodes, Some(Reth { address, rkey, len }), len, bytes, show);
    }

    /// Spells a part of a dense packet.
    pub(super) fn part(&mut self, part: Body<'_>, show: &mut dyn FnMut(&[u8])) {
        match part {
            Body::Send { payload, .. } => self.send(payload, show),
            Body::Write { reth, payload, .. } => {
                let bytes = |at: u32, out: &mut [u8]| {
                    let at = at as usize;
                    out.copy_from_slice(&payload[at..at + out.len()]);
                };
                // What the peer says of it in the RETH may be wrong.
                let len = u32::try_from(payload.len()).expect("it was in a packet");
                self.write((reth.rkey, reth.address), len, &bytes, show);
            }
            Body::WriteOn { .. }
            | Body::Dense(_)
            | Body::Acknowledge(_)
            | Body::Congestion
            | Body::Unserved => unreachable!("no part is {part:?}"),
        }
    }

    fn spell(
        &mut self,
        [only, first, middle, last]: Opcodes,
        reth: Option<Reth>,
        len: u32,
        bytes: &dyn Fn(u32, &mut [u8]),
        show: &mut dyn FnMut(&[u8]),
    ) {
        let mut at = 0;
        loop {
            let part = (len - at).min(PAYLOAD_MAX);
            let (begins, ends) = (at == 0, at + part == len);
            let opcode = match (begins, ends) {
                (true, true) => only,
                (true, false) => first,
                (false, false) => middle,
                (false, true) => last,
            };
            let header = Bth {
                opcode,
                solicited: ends && reth.is_none(),
                payload_len: part as usize,
                target: self.target,
                ack_request: ends,
                psn: self.psn,
            };
            let mut packet = [0; BTH_LEN + RETH_LEN + PAYLOAD_MAX as usize + 4];
            packet[..BTH_LEN].copy_from_slice(&header.encode());
            let mut headers = BTH_LEN;
            if let Some(reth) = reth.filter(|_| begins) {
                packet[BTH_LEN..BTH_LEN + RETH_LEN].copy_from_slice(&reth.encode());
                headers += RETH_LEN;
            }
            bytes(at, &mut packet[headers..headers + part as usize]);
            let packet = &mut packet[..packet_len(headers, part as usize)];
            self.flow.seal(0, packet);
            show(packet);
            self.psn = psn::advance(self.psn, 1);
            at += part;
            if ends {
                return;
            }
        }
    }
}
