//! Which packet is next, and what is in it.

use std::ops::Range;

use smcr_proto::Instant;

use super::super::PACKET_COST;
use super::super::counters::Counters;
use super::super::psn::{self, PSN_MASK};
use super::super::request::Place;
use super::super::wire::{
    BTH_LEN, Bth, DENSE, ICRC_LEN, RETH_LEN, SEND_LAST, SEND_ONLY, build_probe, packet_len,
    probe_len,
};
use super::timer::SILENCE_MAX;
use super::{Requester, Timed};

/// The next packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Next {
    /// A path MTU probe with that payload.
    Probe(u32),
    /// So many packets of the send queue, which leave as one of so many bytes.
    Packets(usize, usize),
}

impl Next {
    /// Its length in bytes.
    pub(in super::super) fn len(self) -> usize {
        match self {
            Self::Probe(payload) => probe_len(payload),
            Self::Packets(_, len) => len,
        }
    }
}

impl Requester {
    /// How many packets may leave one behind the other that are as long as `packet`, which
    /// [`next`](Self::next) has just returned, and that is the first of them; `most` at most, which
    /// is not zero. Only the last one asks, if any does.
    pub(in super::super) fn alike(&self, packet: Next, most: usize) -> usize {
        let Next::Packets(1, _) = packet else { return 1 };
        let Place { request, packet, mark } = self.next;
        let request = &self.queue[request];
        // The last one of the request may be shorter, or share its packet with others.
        let full = request.packets - packet - 1;
        if full < 2 || self.is_asking() {
            return 1;
        }
        let in_flight = mark.cost - self.oldest.mark.cost;
        let room = u64::from(self.congestion.window()).saturating_sub(in_flight);
        let fits = room.div_ceil(u64::from(request.payload_len(packet) + PACKET_COST));
        let fits = u32::try_from(fits).unwrap_or(u32::MAX);
        let count = full.min(fits).min(UNASKED_MAX - self.unasked) as usize;
        count.min(most).max(1)
    }

    /// Builds `packet`, which [`next`](Self::next) has just returned, and those behind it that are
    /// [alike](Self::alike), as many as `out` has room for, and counts them as sent. `seal` gets
    /// each, with its index, to write the ICRC. `last` says that no other packet follows in this
    /// burst. Returns the packet behind them, if one may be sent now.
    ///
    /// # Panics
    ///
    /// If `out` is not as long as packets that are alike.
    pub(in super::super) fn build(
        &mut self,
        now: Instant,
        packet: Next,
        last: bool,
        out: &mut [u8],
        counters: &mut Counters,
        mut seal: impl FnMut(u16, &mut [u8]),
    ) -> Option<Next> {
        let alike = out.len() / packet.len();
        assert!(alike > 0 && out.len() == alike * packet.len());
        let parts = match packet {
            Next::Packets(parts, _) => parts,
            Next::Probe(payload) => {
                self.build_probe(now, payload, out);
                seal(0, out);
                counters.path_questions += 1;
                return self.next(now);
            }
        };
        let first = self.next;
        self.advance();
        self.pass(alike - 1);
        (1..parts).for_each(|_| self.advance());
        self.unasked += u32::try_from(alike * parts).expect("no more than the send queue has");
        let following = self.next(now);
        let ask = last || self.unasked >= UNASKED_MAX || following.is_none();
        if parts == 1 {
            let mut unsealed = None;
            for (index, out) in (0..).zip(out.chunks_exact_mut(packet.len())) {
                let place = first.behind(index);
                self.build_one(place, ask && usize::from(index) + 1 == alike, out);
                // One later: what has just been stored cannot be loaded at once in other pieces.
                if let Some((index, out)) = unsealed.replace((index, out)) {
                    seal(index, out);
                }
            }
            let (index, out) = unsealed.expect("at least one is alike");
            seal(index, out);
        } else {
            assert_eq!(alike, 1, "dense packets differ");
            counters.packed += parts as u64 - 1;
            self.build_dense(first, parts, ask, out);
            seal(0, out);
        }
        let sequences = first.mark.sequence..self.next.mark.sequence;
        let repeated = self.sent_end.min(sequences.end).saturating_sub(sequences.start);
        counters.retransmits += if parts == 1 { repeated } else { repeated.min(1) };
        self.count_sent(now, sequences, ask);
        // Behind a packet that asks, a probe may have to be sent first.
        if ask { self.next(now) } else { following }
    }

    fn build_probe(&mut self, now: Instant, payload: u32, out: &mut [u8]) {
        let repeated = psn::advance(self.oldest_psn(), PSN_MASK.into());
        build_probe((self.peer, repeated), payload, out);
        let wait = self.congestion.base_timeout().min(SILENCE_MAX - self.silence);
        self.path.probe_sent(now, wait);
    }

    /// The next packet, if one may be sent now.
    pub(in super::super) fn next(&self, now: Instant) -> Option<Next> {
        if self.path.is_probing() || self.path.is_doubted() {
            if let Some(payload) = self.probe(now) {
                return Some(Next::Probe(payload));
            }
            // Before a probe may be sent, all earlier packets must be acknowledged, and the last of
            // them must have requested that.
            let is_new = self.next.mark.sequence >= self.sent_end;
            if self.path.is_doubted() || is_new && self.may_wait() {
                return None;
            }
        }
        if self.next.mark.sequence == self.end.sequence {
            return None;
        }
        let in_flight = self.next.mark.cost - self.oldest.mark.cost;
        if in_flight > 0 && self.is_asking() {
            return None;
        }
        let paused = self.paused_until.is_some_and(|until| now < until);
        if paused || in_flight >= u64::from(self.congestion.window()) {
            return None;
        }
        let (count, len) = self.fitting(self.next);
        Some(Next::Packets(count, len))
    }

    /// How many packets, from that one on, leave as one, and how long it is.
    fn fitting(&self, from: Place) -> (usize, usize) {
        // Of a write of several packets only the last is not full.
        if !self.dense || from.packet + 1 < self.queue[from.request].packets {
            return self.alone(from);
        }
        let most = packet_len(BTH_LEN + RETH_LEN, self.segments.write as usize);
        let mut fitting = (0, BTH_LEN + ICRC_LEN);
        let mut packet = from.packet;
        for request in self.queue.range(from.request..) {
            let Some(part) = request.part_len(packet).filter(|_| packet + 1 == request.packets)
            else {
                break;
            };
            if fitting.1 + part > most {
                break;
            }
            fitting = (fitting.0 + 1, fitting.1 + part);
            packet = 0;
        }
        if fitting.0 > 1 { fitting } else { self.alone(from) }
    }

    fn alone(&self, place: Place) -> (usize, usize) {
        (1, self.queue[place.request].packet_len(place.packet))
    }

    /// The payload of a full packet that would be as long as the oldest one is now.
    pub(super) fn oldest_payload(&self) -> u32 {
        let Place { request, packet, .. } = self.oldest;
        match self.fitting(self.oldest) {
            (1, _) => self.queue[request].payload_len(packet),
            (_, len) => {
                let payload = len.saturating_sub(BTH_LEN + RETH_LEN + ICRC_LEN);
                u32::try_from(payload).expect("at most the MTU")
            }
        }
    }

    /// Goes on to the packet behind the next one.
    fn advance(&mut self) {
        let Place { mark, request, packet } = &mut self.next;
        let of = &self.queue[*request];
        mark.sequence += 1;
        mark.cost += u64::from(of.payload_len(*packet)) + u64::from(PACKET_COST);
        *packet += 1;
        if *packet == of.packets {
            *request += 1;
            *packet = 0;
        }
    }

    /// Goes on behind so many packets that are [alike](Self::alike), of which none is the last of
    /// its request.
    fn pass(&mut self, count: usize) {
        let Place { mark, request, packet } = &mut self.next;
        let Some(of) = self.queue.get(*request).filter(|_| count > 0) else { return };
        let each = u64::from(of.payload_len(*packet)) + u64::from(PACKET_COST);
        mark.sequence += count as u64;
        mark.cost += count as u64 * each;
        *packet += u32::try_from(count).expect("no more than the request has");
    }

    fn build_one(&self, place: Place, ask: bool, out: &mut [u8]) {
        let request = &self.queue[place.request];
        let opcode = request.opcode(place.packet);
        let header = Bth {
            opcode,
            solicited: opcode == SEND_ONLY || opcode == SEND_LAST,
            payload_len: request.payload_len(place.packet) as usize,
            target: self.peer,
            ack_request: ask,
            psn: psn::advance(self.first_psn, place.mark.sequence),
        };
        request.build(place.packet, header, out);
    }

    fn build_dense(&self, first: Place, count: usize, ask: bool, out: &mut [u8]) {
        let (head, mut rest) = out.split_at_mut(BTH_LEN);
        let mut packet = first.packet;
        let mut solicited = false;
        for (at, request) in self.queue.range(first.request..).take(count).enumerate() {
            solicited |= request.opcode(packet) == SEND_ONLY;
            rest = request.build_part(packet, at + 1 < count, rest);
            packet = 0;
        }
        rest.fill(0);
        let header = Bth {
            opcode: DENSE,
            solicited,
            // Each part has its own padding.
            payload_len: 0,
            target: self.peer,
            ack_request: ask,
            psn: psn::advance(self.first_psn, first.mark.sequence),
        };
        head.copy_from_slice(&header.encode());
    }

    /// Counts packets as sent, which are alike or share one, and starts the timers. `ask` says that
    /// the last one requests an acknowledgement.
    fn count_sent(&mut self, now: Instant, sequences: Range<u64>, ask: bool) {
        if self.sent_end < sequences.end {
            self.sent_end = sequences.end;
            if ask && self.timed.is_none() {
                let sequence = sequences.end - 1;
                self.timed = Some(Timed { sequence, left: now, repeated: false });
            }
        }
        if ask {
            self.unasked = 0;
        }
        self.last_sent = now;
        self.wait_for_answer(now);
    }
}

/// At least one packet in this many requests an acknowledgement.
const UNASKED_MAX: u32 = 32;
