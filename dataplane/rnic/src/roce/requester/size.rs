//! Packet sizes: when the requester suspects that its packets are too large for the path, and how
//! it changes their size.

use smcr_proto::Instant;

use super::super::counters::Counters;
use super::super::path::{Outcome, PACKET_LIFE, PAYLOAD_MIN};
use super::super::request::Place;
use super::Requester;

impl Requester {
    /// Goes back to the oldest packet. After several attempts in vain it starts black hole
    /// detection instead, since the packet may be too large for the path.
    pub(super) fn try_again(&mut self) {
        self.go_back();
        self.attempts += 1;
        let lost = self.oldest_payload();
        if self.attempts >= ATTEMPTS && lost > PAYLOAD_MIN {
            self.attempts = 0;
            self.path.doubt(lost, self.last_sent + PACKET_LIFE);
        }
    }

    /// The payload of the path MTU probe that must be sent now, if any.
    pub(super) fn probe(&self, now: Instant) -> Option<u32> {
        let payload = self.path.probe()?;
        let (oldest, next) = (self.oldest.mark.sequence, self.next.mark.sequence);
        let is_idle = 0 < oldest && oldest == next && next == self.sent_end;
        let is_paused = self.paused_until.is_some_and(|until| now < until);
        (self.path.is_doubted() || is_idle && !is_paused).then_some(payload)
    }

    /// Whether new packets may wait for a probe: the peer has answered before, and the last packet
    /// sent requested an acknowledgement.
    pub(super) fn may_wait(&self) -> bool {
        0 < self.oldest.mark.sequence && self.unasked == 0
    }

    /// Applies an outcome of path MTU discovery.
    pub(super) fn follow(&mut self, outcome: Outcome, counters: &mut Counters) {
        match outcome {
            Outcome::Nothing | Outcome::GoOn => {}
            Outcome::Grown(payload) => {
                counters.path_raised += 1;
                self.segments.write = payload;
                self.congestion.resized(payload);
            }
            Outcome::Resegment(payload) => {
                counters.path_lowered += 1;
                self.resegment(payload);
            }
        }
    }

    /// Splits all unacknowledged requests again, into packets with that payload. The peer expects
    /// the oldest packet, and no packet sent before is still in flight (`path`).
    fn resegment(&mut self, payload: u32) {
        assert_eq!(self.oldest, self.next, "black hole detection has stopped retransmission");
        let Place { mark, request: first, mut packet } = self.oldest;
        let mut start = mark;
        for request in self.queue.iter_mut().skip(first) {
            request.resegment(packet, start, payload);
            start = request.end();
            packet = 0;
        }
        self.end = start;
        self.oldest = self.queue[first].place(first, mark.sequence);
        self.next = self.oldest;
        self.sent_end = mark.sequence;
        self.recovered = mark.sequence;
        self.went_back = None;
        self.timed = None;
        self.segments.write = payload;
        self.congestion.resized(payload);
    }
}

/// How often a packet is retransmitted before its size is suspected.
const ATTEMPTS: u32 = 3;
