//! One request of a send queue, and the packets it becomes.
//!
//! A write becomes a train of WRITE ONLY packets, each with its own address, so that all but the
//! last are of one size: FIRST, MIDDLE and LAST differ in length, and would not leave in one system
//! call. A long message has no other way: the receiver joins FIRST, MIDDLE and LAST, and demands
//! that all but the last are as long as both ends have agreed on.
//!
//! A write may be cut anew, for smaller packets, from the first on that is not acknowledged.

use smcr_memory::Lease;
use smcr_proto::Rkey;

use super::PACKET_COST;
use super::wire::{
    BTH_LEN, Bth, RETH_LEN, Reth, SEND_FIRST, SEND_LAST, SEND_MIDDLE, SEND_ONLY, WRITE_ONLY,
    packet_len,
};
use crate::{Completion, LONG_MESSAGE_MAX, MESSAGE_LEN, Message, QpId, Status, Tag, Work};

/// A point in the stream of packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark {
    /// Packets before it.
    pub(super) sequence: u64,
    /// What all packets before it cost, in the currency of windows.
    pub(super) cost: u64,
}

/// A packet, found in the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// Where it is in the stream.
    pub(super) mark: Mark,
    /// Of its request in the queue; the length of the queue if nothing is there.
    pub(super) request: usize,
    /// Which packet of the request.
    pub(super) packet: u32,
}

/// One request.
#[derive(Debug)]
pub(super) struct Request {
    /// Where its first packet is.
    start: Mark,
    /// Bytes before its first packet, acknowledged before it was cut anew.
    skipped: u32,
    /// How many packets it is.
    pub(super) packets: u32,
    /// Payload of each but the last.
    segment: u32,
    tag: Tag,
    body: Outgoing,
}

#[derive(Debug)]
enum Outgoing {
    Write { lease: Lease, rkey: Rkey, address: u64 },
    Send(Message),
    SendLong(Box<[u8]>),
}

/// Payload of full packets, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segments {
    /// What fits the path.
    pub(super) write: u32,
    /// What both ends have agreed on, never less.
    pub(super) message: u32,
}

impl Request {
    /// The request that `work` asks for, behind all others.
    ///
    /// # Panics
    ///
    /// If a long message is longer than any may be: our bug.
    pub(super) fn new(work: Work, start: Mark, segments: Segments) -> Self {
        let (tag, body) = match work {
            Work::Write { lease, rkey, address, tag } => {
                (tag, Outgoing::Write { lease, rkey, address })
            }
            Work::Send { message, tag } => (tag, Outgoing::Send(message)),
            Work::SendLong { message, tag } => {
                assert!(message.len() <= LONG_MESSAGE_MAX, "{} bytes", message.len());
                (tag, Outgoing::SendLong(message))
            }
        };
        let segment = match body {
            Outgoing::Write { .. } | Outgoing::Send(_) => segments.write,
            Outgoing::SendLong(_) => segments.message,
        };
        let packets = body.len().div_ceil(segment).max(1);
        Self { start, skipped: 0, packets, segment, tag, body }
    }

    /// Cuts what comes after its first `acknowledged` packets anew, from `start` on. A message of
    /// several packets stays as it is: its receiver demands the size that was agreed on.
    pub(super) fn cut(&mut self, acknowledged: u32, start: Mark, segment: u32) {
        assert!(acknowledged < self.packets);
        match self.body {
            Outgoing::Write { .. } | Outgoing::Send(_) => {
                self.skipped += acknowledged * self.segment;
                self.segment = segment;
                self.packets = self.rest().div_ceil(segment).max(1);
                self.start = start;
            }
            Outgoing::SendLong(_) => {
                let before = u64::from(acknowledged);
                let cost = before * u64::from(self.segment + PACKET_COST);
                self.start = Mark { sequence: start.sequence - before, cost: start.cost - cost };
            }
        }
    }

    /// Bytes that its packets carry.
    fn rest(&self) -> u32 {
        self.body.len() - self.skipped
    }

    /// What the caller is told when it has ended.
    pub(super) fn complete(self, qp: QpId, status: Status) -> Completion {
        let tag = self.tag;
        match self.body {
            Outgoing::Write { lease, .. } => Completion::Wrote { qp, lease, tag, status },
            Outgoing::Send(_) | Outgoing::SendLong(_) => Completion::Sent { qp, tag, status },
        }
    }

    /// One past its last packet.
    pub(super) fn end(&self) -> Mark {
        let packets = u64::from(self.packets);
        let cost = u64::from(self.rest()) + packets * u64::from(PACKET_COST);
        Mark { sequence: self.start.sequence + packets, cost: self.start.cost + cost }
    }

    /// Its packet with that sequence.
    pub(super) fn place(&self, request: usize, sequence: u64) -> Place {
        let packet = sequence.saturating_sub(self.start.sequence);
        assert!(packet < u64::from(self.packets));
        // All packets before another one are full.
        let cost = self.start.cost + packet * u64::from(self.segment + PACKET_COST);
        let packet = u32::try_from(packet).expect("less than the number of packets");
        Place { mark: Mark { sequence, cost }, request, packet }
    }

    /// The opcode of one of its packets.
    pub(super) fn opcode(&self, packet: u32) -> u8 {
        match self.body {
            Outgoing::Write { .. } => WRITE_ONLY,
            Outgoing::Send(_) => SEND_ONLY,
            Outgoing::SendLong(_) => match (packet == 0, packet + 1 == self.packets) {
                (true, true) => SEND_ONLY,
                (true, false) => SEND_FIRST,
                (false, false) => SEND_MIDDLE,
                (false, true) => SEND_LAST,
            },
        }
    }

    /// Bytes of payload of one of its packets.
    pub(super) fn payload_len(&self, packet: u32) -> u32 {
        self.segment.min(self.rest() - packet * self.segment)
    }

    /// Bytes of one of its packets.
    pub(super) fn packet_len(&self, packet: u32) -> usize {
        packet_len(self.body.headers_len(), self.payload_len(packet) as usize)
    }

    /// Builds one of its packets; the ICRC is left open.
    pub(super) fn build(&self, packet: u32, header: Bth, out: &mut [u8]) {
        out[..BTH_LEN].copy_from_slice(&header.encode());
        let payload_at = self.body.headers_len();
        let payload_end = payload_at + header.payload_len;
        match &self.body {
            Outgoing::Write { lease, rkey, address } => {
                let at = self.skipped + packet * self.segment;
                let address = address.wrapping_add(at.into());
                let len = u32::try_from(header.payload_len).expect("at most the MTU");
                let reth = Reth { address, rkey: *rkey, len };
                out[BTH_LEN..payload_at].copy_from_slice(&reth.encode());
                lease.copy_out(at, &mut out[payload_at..payload_end]);
            }
            Outgoing::Send(message) => out[payload_at..payload_end].copy_from_slice(message),
            Outgoing::SendLong(message) => {
                let at = (packet * self.segment) as usize;
                let piece = &message[at..at + header.payload_len];
                out[payload_at..payload_end].copy_from_slice(piece);
            }
        }
        out[payload_end..].fill(0);
    }
}

impl Outgoing {
    fn len(&self) -> u32 {
        match self {
            Self::Write { lease, .. } => lease.len(),
            Self::Send(_) => MESSAGE_BYTES,
            Self::SendLong(message) => u32::try_from(message.len()).expect("asserted at first"),
        }
    }

    fn headers_len(&self) -> usize {
        match self {
            Self::Write { .. } => BTH_LEN + RETH_LEN,
            Self::Send(_) | Self::SendLong(_) => BTH_LEN,
        }
    }
}

const MESSAGE_BYTES: u32 = 44;
const _: () = assert!(MESSAGE_BYTES as usize == MESSAGE_LEN);
