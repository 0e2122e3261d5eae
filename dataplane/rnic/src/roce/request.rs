//! One work request of a send queue, and the packets that it is split into.
//!
//! A write becomes a train of WRITE ONLY packets, each with its own address, so that all but the
//! last have one size. FIRST, MIDDLE and LAST packets differ in length and could not leave in one
//! system call. A long message must use them: the receiver joins FIRST, MIDDLE and LAST, and
//! requires that all but the last have the payload that both ends have agreed on.
//!
//! A write can be split again into smaller packets, from the first unacknowledged one on.

use smcr_memory::Lease;
use smcr_proto::Rkey;

use super::PACKET_COST;
use super::dense::{part_len, write_head};
use super::wire::{
    BTH_LEN, Bth, RETH_LEN, Reth, SEND_FIRST, SEND_LAST, SEND_MIDDLE, SEND_ONLY, WRITE_ONLY,
    packet_len,
};
use crate::{Completion, LONG_MESSAGE_MAX, MESSAGE_LEN, Message, QpId, Status, Tag, Work};

/// A position in the stream of packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark {
    /// Packets before it.
    pub(super) sequence: u64,
    /// The bytes of the window that all packets before it take.
    pub(super) cost: u64,
}

/// The place of a packet in the send queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// Its position in the stream.
    pub(super) mark: Mark,
    /// The index of its request in the queue; the length of the queue if there is none.
    pub(super) request: usize,
    /// Its index among the packets of the request.
    pub(super) packet: u32,
}

impl Place {
    /// The place `count` packets behind this one, in the same request. What is before it is not
    /// counted anew.
    pub(super) fn behind(self, count: u16) -> Self {
        let sequence = self.mark.sequence + u64::from(count);
        let mark = Mark { sequence, ..self.mark };
        Self { mark, packet: self.packet + u32::from(count), ..self }
    }
}

/// A work request in the send queue.
#[derive(Debug)]
pub(super) struct Request {
    /// The position of its first packet.
    start: Mark,
    /// Bytes before its first packet that were acknowledged before it was split again.
    skipped: u32,
    /// How many packets it has.
    pub(super) packets: u32,
    /// Payload of each packet but the last.
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
    /// For writes and short messages: the payload that fits the path.
    pub(super) write: u32,
    /// For long messages: the payload that both ends have agreed on, even if it is too large for
    /// the path.
    pub(super) message: u32,
}

impl Request {
    /// Creates the request for `work`. Its first packet is at `start`.
    ///
    /// # Panics
    ///
    /// If a message exceeds [`LONG_MESSAGE_MAX`], which would be our bug.
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

    /// Splits the request again behind its first `acknowledged` packets, into packets with
    /// `segment` bytes that begin at `start`. A message of several packets keeps its packets,
    /// because its receiver requires the agreed size.
    pub(super) fn resegment(&mut self, acknowledged: u32, start: Mark, segment: u32) {
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

    /// The bytes that its packets carry.
    fn rest(&self) -> u32 {
        self.body.len() - self.skipped
    }

    /// The completion of this request.
    pub(super) fn complete(self, qp: QpId, status: Status) -> Completion {
        let tag = self.tag;
        match self.body {
            Outgoing::Write { lease, .. } => Completion::Wrote { qp, lease, tag, status },
            Outgoing::Send(_) | Outgoing::SendLong(_) => Completion::Sent { qp, tag, status },
        }
    }

    /// The position one past its last packet.
    pub(super) fn end(&self) -> Mark {
        let packets = u64::from(self.packets);
        let cost = u64::from(self.rest()) + packets * u64::from(PACKET_COST);
        Mark { sequence: self.start.sequence + packets, cost: self.start.cost + cost }
    }

    /// The place of its packet with that sequence.
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
        self.build_rest(packet, header.payload_len, &mut out[BTH_LEN..]);
    }

    /// The length of one of its packets as a part of a dense one, if it can be.
    pub(super) fn part_len(&self, packet: u32) -> Option<usize> {
        match self.body {
            Outgoing::Write { .. } | Outgoing::Send(_) => {
                Some(part_len(self.opcode(packet), self.payload_len(packet) as usize))
            }
            Outgoing::SendLong(_) => None,
        }
    }

    /// Builds one of its packets as a part of a dense one, at the beginning of `out`, and returns
    /// the rest. `more` says that another part follows.
    pub(super) fn build_part<'a>(
        &self,
        packet: u32,
        more: bool,
        out: &'a mut [u8],
    ) -> &'a mut [u8] {
        let len = self.part_len(packet).expect("the caller asked before");
        let (part, rest) = out.split_at_mut(len);
        let payload = self.payload_len(packet) as usize;
        self.build_rest(packet, payload, write_head(self.opcode(packet), more, payload, part));
        rest
    }

    /// Fills `out` with what follows the BTH of a packet, and zeros.
    fn build_rest(&self, packet: u32, payload_len: usize, out: &mut [u8]) {
        let payload_at = self.body.headers_len() - BTH_LEN;
        let payload_end = payload_at + payload_len;
        match &self.body {
            Outgoing::Write { lease, rkey, address } => {
                let at = self.skipped + packet * self.segment;
                let address = address.wrapping_add(at.into());
                let len = u32::try_from(payload_len).expect("at most the MTU");
                let reth = Reth { address, rkey: *rkey, len };
                out[..payload_at].copy_from_slice(&reth.encode());
                lease.copy_out(at, &mut out[payload_at..payload_end]);
            }
            Outgoing::Send(message) => out[payload_at..payload_end].copy_from_slice(message),
            Outgoing::SendLong(message) => {
                let at = (packet * self.segment) as usize;
                let piece = &message[at..at + payload_len];
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
            Self::SendLong(message) => u32::try_from(message.len()).expect("`new` asserted it"),
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
