//! The sending half of a queue pair: requests become packets, packets are acknowledged or repeated.
//!
//! Nothing is kept per packet: a packet can be built again from its request at any time, so going
//! back is moving a cursor. Packets are counted in `u64` from the first one (`sequence`); the 24
//! bits of a PSN exist only on the wire. How large packets may be is found out beside that
//! (`path`).

use std::collections::VecDeque;
use std::time::Duration;

use smcr_proto::{Instant, Psn, Qpn};

use super::congestion::Congestion;
use super::counters::Counters;
use super::path::Path;
use super::psn::PSN_MASK;
use super::request::{Mark, Place, Request, Segments};
use super::wire::{Aeth, Bth, SEND_LAST, SEND_ONLY, Syndrome, build_nothing, nothing_len};
use super::{PACKET_COST, SEND_QUEUE_DEPTH, psn};
use crate::{Cause, Completion, QpId, Status, Work};

mod size;

/// The sending half.
#[derive(Debug)]
pub(super) struct Requester {
    peer: Qpn,
    first_psn: Psn,
    /// Payload of full packets.
    segments: Segments,
    /// Oldest first. Those before `done` are acknowledged and wait for a `poll`.
    queue: VecDeque<Request>,
    done: usize,
    /// The oldest packet that is not acknowledged.
    oldest: Place,
    /// The packet to send next.
    next: Place,
    /// One past the last packet that was ever sent.
    sent_end: u64,
    /// One past the last packet of the last request, and the cost up to there.
    end: Mark,
    congestion: Congestion,
    path: Path,
    /// How often the oldest packet was sent again for nothing.
    attempts: u32,
    /// When a packet of a request last left.
    last_left: Instant,
    /// An acknowledgement is waited for.
    wait: Option<Wait>,
    /// The packet whose round trip is being measured.
    timed: Option<Timed>,
    /// Packets since the last one that asked for an acknowledgement.
    unasked: u32,
    /// How long was waited in vain since the last progress.
    silence: Duration,
    /// Since when the peer has had no room for the oldest message.
    unready_since: Option<Instant>,
    /// The peer has no room for a message before that.
    paused_until: Option<Instant>,
    /// Losses before this sequence belong to a cut that was made.
    recovered: u64,
    /// Where a complaint of the peer made us go back to, and when.
    went_back: Option<(u64, Instant)>,
}

/// A wait for an acknowledgement.
#[derive(Clone, Copy, Debug)]
struct Wait {
    since: Instant,
    until: Instant,
}

/// A packet whose round trip is being measured.
#[derive(Clone, Copy, Debug)]
struct Timed {
    sequence: u64,
    left: Instant,
    /// It was sent again, so an acknowledgement may be for either.
    repeated: bool,
}

impl Requester {
    /// Sends to `peer`, beginning with `first_psn`, packets with up to `ceiling` bytes of payload,
    /// as both ends have agreed. The host takes packets with `known` bytes to the peer.
    pub(super) fn new(
        (peer, first_psn): (Qpn, Psn),
        (ceiling, known): (u32, u32),
        window_max: u32,
    ) -> Self {
        let path = Path::new(ceiling, known);
        let segments = Segments { write: path.payload(), message: ceiling };
        Self {
            peer,
            first_psn,
            segments,
            // Most queue pairs are idle most of the time. It grows with what is asked of it.
            queue: VecDeque::new(),
            done: 0,
            oldest: Place::default(),
            next: Place::default(),
            sent_end: 0,
            end: Mark::default(),
            congestion: Congestion::new(segments.write, window_max),
            path,
            attempts: 0,
            last_left: Instant(0),
            wait: None,
            timed: None,
            unasked: 0,
            silence: Duration::ZERO,
            unready_since: None,
            paused_until: None,
            recovered: 0,
            went_back: None,
        }
    }

    /// How many more requests fit.
    pub(super) fn room(&self) -> usize {
        SEND_QUEUE_DEPTH - self.queue.len()
    }

    /// Whether nothing is queued and nothing is waited for.
    pub(super) fn is_idle(&self) -> bool {
        let asks = self.path.is_asking() || self.path.is_doubted();
        self.queue.is_empty() && !asks && self.wake_at().is_none() && self.paused_until.is_none()
    }

    /// Gives up memory that only a burst needed.
    pub(super) fn shrink(&mut self) {
        if self.queue.capacity() > QUEUE_KEPT {
            self.queue.shrink_to(QUEUE_KEPT);
        }
    }

    /// Queues a request.
    ///
    /// # Panics
    ///
    /// If there is no room.
    pub(super) fn post(&mut self, work: Work) {
        assert!(self.room() > 0, "the caller budgets its requests");
        let request = Request::new(work, self.end, self.segments);
        self.end = request.end();
        self.queue.push_back(request);
    }

    /// Bytes of payload of full packets of new requests.
    pub(super) fn payload(&self) -> u32 {
        self.segments.write
    }

    /// The length of the packet that may be sent next, if one may.
    pub(super) fn next_len(&self, now: Instant) -> Option<usize> {
        if self.path.is_asking() || self.path.is_doubted() {
            if let Some(payload) = self.question(now) {
                return Some(nothing_len(payload));
            }
            // What was sent must be acknowledged before anything is asked, and asked for that.
            let is_new = self.next.mark.sequence >= self.sent_end;
            if self.path.is_doubted() || is_new && self.may_wait() {
                return None;
            }
        }
        if self.next.mark.sequence == self.end.sequence {
            return None;
        }
        let in_flight = self.next.mark.cost - self.oldest.mark.cost;
        let paused = self.paused_until.is_some_and(|until| now < until);
        if paused || in_flight >= u64::from(self.congestion.window()) {
            return None;
        }
        let request = &self.queue[self.next.request];
        Some(request.packet_len(self.next.packet))
    }

    /// Builds the packet that [`next_len`](Self::next_len) told, without its ICRC, and counts it as
    /// sent. `last` says that no other will follow in this burst.
    ///
    /// # Panics
    ///
    /// If `out` has another length.
    pub(super) fn build(
        &mut self,
        now: Instant,
        last: bool,
        out: &mut [u8],
        counters: &mut Counters,
    ) {
        if let Some(payload) = self.question(now) {
            counters.path_questions += 1;
            let repeated = psn::advance(self.first_psn, self.oldest.mark.sequence);
            build_nothing((self.peer, psn::advance(repeated, PSN_MASK.into())), payload, out);
            self.path.asked(now, self.congestion.patience().min(SILENCE_MAX - self.silence));
            return;
        }
        let Place { mark: Mark { sequence, .. }, request: at, packet } = self.next;
        let request = &self.queue[at];
        let payload_len = request.payload_len(packet);
        assert_eq!(out.len(), request.packet_len(packet));

        self.next.mark.sequence += 1;
        self.next.mark.cost += u64::from(payload_len) + u64::from(PACKET_COST);
        self.next.packet += 1;
        if self.next.packet == request.packets {
            self.next.request += 1;
            self.next.packet = 0;
        }
        self.unasked += 1;
        let ask = last || self.unasked >= UNASKED_MAX || self.next_len(now).is_none();
        let request = &self.queue[at];
        let opcode = request.opcode(packet);
        let header = Bth {
            opcode,
            solicited: opcode == SEND_ONLY || opcode == SEND_LAST,
            payload_len: payload_len as usize,
            target: self.peer,
            ack_request: ask,
            psn: psn::advance(self.first_psn, sequence),
        };
        request.build(packet, header, out);
        self.count_sent(now, sequence, ask, counters);
    }

    /// A packet was built that has that sequence, and asks for an acknowledgement or not.
    fn count_sent(&mut self, now: Instant, sequence: u64, ask: bool, counters: &mut Counters) {
        if sequence < self.sent_end {
            counters.retransmits += 1;
        } else {
            self.sent_end = sequence + 1;
            if ask && self.timed.is_none() {
                self.timed = Some(Timed { sequence, left: now, repeated: false });
            }
        }
        if ask {
            self.unasked = 0;
        }
        self.last_left = now;
        if self.wait.is_none() {
            self.wait = Some(self.wait_from(now));
        }
    }

    /// Takes in an answer of the peer.
    ///
    /// # Errors
    ///
    /// When the peer refused a request: the queue pair must break.
    pub(super) fn handle_answer(
        &mut self,
        now: Instant,
        psn: Psn,
        aeth: Aeth,
        counters: &mut Counters,
    ) -> Result<(), Cause> {
        let oldest = self.oldest.mark.sequence;
        let ahead = psn::distance(psn::advance(self.first_psn, oldest), psn);
        let sequence = oldest + u64::from(ahead);
        if aeth.syndrome.0 >> 5 == 0 {
            counters.acks_in += 1;
        } else {
            counters.naks_in += 1;
        }
        let is_last = ahead == PSN_MASK;
        if is_last && self.path.is_asking() && aeth.syndrome.0 >> 5 == 0 {
            let outcome = self.path.answered(now);
            self.follow(outcome, counters);
            return Ok(());
        }
        // About what was acknowledged before, or was never sent: late, or made up.
        if sequence >= self.sent_end {
            return Ok(());
        }
        match aeth.syndrome {
            Syndrome(0x00..=0x1f) => self.acknowledge(now, sequence + 1, counters),
            Syndrome(0x20..=0x3f) => {
                self.acknowledge(now, sequence, counters);
                let since = *self.unready_since.get_or_insert(now);
                if now.since(since) >= UNREADY_MAX {
                    return Err(Cause::RetriesExceeded);
                }
                self.go_back();
                let wait = not_ready_wait(aeth.syndrome);
                self.paused_until = Some(now + wait);
                // The peer lives and says so; this is not the silence that timeouts are for.
                self.silence = Duration::ZERO;
            }
            Syndrome::SEQUENCE_ERROR => {
                self.acknowledge(now, sequence, counters);
                // In doubt nothing is repeated: it is about what was sent before.
                if !self.path.is_doubted() {
                    self.repair(now)?;
                }
            }
            Syndrome::INVALID_REQUEST | Syndrome::ACCESS_ERROR | Syndrome::OPERATION_ERROR => {
                // What came before the offender was carried out.
                self.acknowledge(now, sequence, counters);
                return Err(Cause::RemoteError);
            }
            Syndrome(_) => {}
        }
        Ok(())
    }

    /// When [`expire`](Self::expire) has something to do, or a pause ends.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        let pause = self.paused_until.filter(|_| self.next.mark != self.end);
        let answer = self.wait.map(|wait| wait.until);
        [pause, answer, self.path.wake_at()].into_iter().flatten().min()
    }

    /// Goes back if an acknowledgement has not come in time.
    ///
    /// # Errors
    ///
    /// When the peer has been silent for too long: the queue pair must break.
    pub(super) fn expire(&mut self, now: Instant, counters: &mut Counters) -> Result<(), Cause> {
        if self.paused_until.is_some_and(|until| now >= until) {
            self.paused_until = None;
        }
        if let Some(waited) = self.path.waited(now).filter(|_| self.path.is_doubted()) {
            self.silence += waited;
            if self.silence >= SILENCE_MAX {
                return Err(Cause::RetriesExceeded);
            }
        }
        let outcome = self.path.expire(now, self.next.mark.sequence < self.end.sequence);
        self.follow(outcome, counters);
        if self.wait.is_none_or(|wait| now < wait.until) {
            return Ok(());
        }
        counters.timeouts += 1;
        self.give_up_waiting(now)?;
        self.congestion.timed_out();
        self.recovered = self.sent_end;
        self.try_again();
        Ok(())
    }

    /// Appends the completions of acknowledged requests to `out`, as many as fit.
    pub(super) fn complete(&mut self, qp: QpId, out: &mut Vec<Completion>) {
        while self.done > 0 && out.len() < out.capacity() {
            out.extend(self.pop(qp, Status::Done));
            self.done -= 1;
            self.oldest.request -= 1;
            self.next.request -= 1;
        }
    }

    /// Appends the completions of all requests to `out`, as many as fit: the acknowledged ones as
    /// done, the others as flushed. Returns whether none is left.
    pub(super) fn flush(&mut self, qp: QpId, out: &mut Vec<Completion>) -> bool {
        self.complete(qp, out);
        while out.len() < out.capacity() {
            match self.pop(qp, Status::Flushed) {
                Some(completion) => out.push(completion),
                None => break,
            }
        }
        self.queue.is_empty()
    }

    /// Requests that have completed but were not yet told.
    pub(super) fn has_completed(&self) -> bool {
        self.done > 0
    }

    fn pop(&mut self, qp: QpId, status: Status) -> Option<Completion> {
        self.queue.pop_front().map(|request| request.complete(qp, status))
    }

    /// Everything before `sequence` has arrived.
    fn acknowledge(&mut self, now: Instant, sequence: u64, counters: &mut Counters) {
        let before = self.oldest.mark;
        assert!(before.sequence <= sequence && sequence <= self.sent_end);
        if before.sequence == sequence {
            return;
        }
        while self.queue.get(self.done).is_some_and(|request| request.end().sequence <= sequence) {
            self.done += 1;
        }
        self.oldest = match self.queue.get(self.done) {
            Some(request) => request.place(self.done, sequence),
            None => Place { mark: self.end, request: self.done, packet: 0 },
        };
        let mut hasty = false;
        if self.next.mark.sequence < sequence {
            // What we went back for had arrived after all.
            self.next = self.oldest;
            hasty = self.congestion.was_hasty();
            counters.timeouts_undone += u64::from(hasty);
        }
        let gained = self.oldest.mark.cost - before.cost;
        self.congestion.acknowledged(u32::try_from(gained).unwrap_or(u32::MAX));
        if let Some(timed) = self.timed
            && timed.sequence < sequence
        {
            // Of what was sent twice, only a hasty timeout tells which one was answered: the first.
            // It must count, or the timeout would never learn how slow the peer can be.
            if hasty || !timed.repeated {
                self.congestion.measured(now.since(timed.left));
            }
            self.timed = None;
        }
        self.silence = Duration::ZERO;
        self.unready_since = None;
        self.attempts = 0;
        self.path.progress(now);
        self.paused_until = None;
        let waits = self.next.mark.sequence > sequence;
        self.wait = waits.then(|| self.wait_from(now));
    }

    fn wait_from(&self, now: Instant) -> Wait {
        let patience = SILENCE_MAX - self.silence;
        Wait { since: now, until: now + self.congestion.timeout().min(patience) }
    }

    /// The oldest packet has not come across: ends the wait for it, and says whether to try again.
    fn give_up_waiting(&mut self, now: Instant) -> Result<(), Cause> {
        if let Some(wait) = self.wait.take() {
            // What exceeds the timeout is time in which we did not run. The peer's answer may have
            // been here all the while; it is not the peer's silence.
            self.silence += now.min(wait.until).since(wait.since);
        }
        if self.silence >= SILENCE_MAX { Err(Cause::RetriesExceeded) } else { Ok(()) }
    }

    /// The peer misses the oldest packet.
    fn repair(&mut self, now: Instant) -> Result<(), Cause> {
        let oldest = self.oldest.mark.sequence;
        // What follows the gap makes the peer complain again before the repair can have arrived.
        if let Some((there, before)) = self.went_back
            && there == oldest
            && now.since(before) < self.congestion.round_trip()
        {
            return Ok(());
        }
        self.give_up_waiting(now)?;
        self.went_back = Some((oldest, now));
        if oldest >= self.recovered {
            self.congestion.lost();
            self.recovered = self.sent_end;
        }
        self.try_again();
        Ok(())
    }

    fn go_back(&mut self) {
        self.next = self.oldest;
        self.wait = None;
        if let Some(timed) = &mut self.timed {
            timed.repeated = true;
        }
        self.unasked = 0;
    }
}

/// How long a peer without room wants us to wait: the code's time (IBTA 9.7.5.2.8).
fn not_ready_wait(syndrome: Syndrome) -> Duration {
    const HUNDREDTHS_MS: [u32; 32] = [
        65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
    ];
    10 * Duration::from_micros(HUNDREDTHS_MS[usize::from(syndrome.0 & 0x1f)].into())
}

/// Requests whose memory an idle queue pair keeps: what many connections in dialogue have under way
/// at once, so that the common case allocates once.
const QUEUE_KEPT: usize = 128;
/// Packets after which an acknowledgement is asked for even if more follow.
const UNASKED_MAX: u32 = 32;
/// How long may be waited in vain before a queue pair breaks. Hardware NICs of Linux SMC wait 8
/// times 134 ms; but a process on a busy machine may not run for a second, and breaking resets all
/// applications on the link. A peer that was killed must be noticed within two seconds.
const SILENCE_MAX: Duration = Duration::from_millis(1500);
/// How long a peer may have no room for one message before the queue pair breaks. Longer than any
/// host is busy that is well; and what waits for it holds memory that others need.
const UNREADY_MAX: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
