//! The sizes of packets: when they are doubted, and what follows from what the path has come to.

use smcr_proto::Instant;

use super::super::counters::Counters;
use super::super::path::{Outcome, PACKET_LIFE, PAYLOAD_MIN};
use super::super::request::Place;
use super::Requester;

impl Requester {
    /// The oldest packet is sent again, or its size doubted.
    pub(super) fn try_again(&mut self) {
        self.go_back();
        self.attempts += 1;
        let Place { request, packet, .. } = self.oldest;
        let lost = self.queue[request].payload_len(packet);
        if self.attempts >= ATTEMPTS && lost > PAYLOAD_MIN {
            self.attempts = 0;
            self.path.doubt(lost, self.last_left + PACKET_LIFE);
        }
    }

    /// The payload of the question about the path that is to be sent now, if one is.
    pub(super) fn question(&self, now: Instant) -> Option<u32> {
        let payload = self.path.question()?;
        let (oldest, next) = (self.oldest.mark.sequence, self.next.mark.sequence);
        let is_idle = 0 < oldest && oldest == next && next == self.sent_end;
        let is_paused = self.paused_until.is_some_and(|until| now < until);
        (self.path.is_doubted() || is_idle && !is_paused).then_some(payload)
    }

    /// New packets may wait for a question: the peer is there to answer it, and the last packet
    /// that was sent asks for an acknowledgement.
    pub(super) fn may_wait(&self) -> bool {
        0 < self.oldest.mark.sequence && self.unasked == 0
    }

    /// Does what the path has come to.
    pub(super) fn follow(&mut self, outcome: Outcome, counters: &mut Counters) {
        match outcome {
            Outcome::Nothing | Outcome::GoOn => {}
            Outcome::Grown(payload) => {
                counters.path_raised += 1;
                self.segments.write = payload;
                self.congestion.resized(payload);
            }
            Outcome::Cut(payload) => {
                counters.path_lowered += 1;
                self.cut(payload);
            }
        }
    }

    /// Cuts what is not acknowledged anew, for packets with that payload. The peer expects the
    /// oldest packet, and none that was sent is on its way (`path`).
    fn cut(&mut self, payload: u32) {
        assert_eq!(self.oldest, self.next, "in doubt nothing is sent");
        let Place { mark, request: first, mut packet } = self.oldest;
        let mut start = mark;
        for request in self.queue.iter_mut().skip(first) {
            request.cut(packet, start, payload);
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

/// How often a packet is sent again before its size is doubted.
const ATTEMPTS: u32 = 3;
