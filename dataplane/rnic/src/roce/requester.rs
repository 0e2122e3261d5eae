//! The sending half of a queue pair: it splits work requests into packets and retransmits packets
//! that are not acknowledged (go-back-N).
//!
//! It keeps no state per packet. A packet can be built again from its request at any time, so going
//! back means moving a cursor. Packets are counted in `u64` from the first one (`sequence`); the
//! 24 bits of a PSN exist only on the wire. `path` decides how large packets may be.

use std::collections::VecDeque;
use std::time::Duration;

use smcr_proto::{Instant, Psn, Qpn};

use super::congestion::Congestion;
use super::counters::Counters;
use super::path::Path;
use super::psn::PSN_MASK;
use super::request::{Mark, Place, Request, Segments};
use super::wire::{Aeth, Syndrome};
use super::{SEND_QUEUE_DEPTH, psn};
use crate::{Completion, QpError, QpId, Status, Work};

mod building;
mod size;
mod timer;
mod trains;

use timer::{SILENCE_MAX, Wait, not_ready_wait};
use trains::{ASKING_AT, ASKING_OF, Evidence, Trains};

/// The sending half.
#[derive(Debug)]
pub(super) struct Requester {
    peer: Qpn,
    first_psn: Psn,
    /// Payload of full packets.
    segments: Segments,
    /// Requests may share a packet.
    dense: bool,
    /// The send queue, oldest first. The first `done` requests are acknowledged and wait for a
    /// `poll` to report them.
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
    trains: Trains,
    /// How often the oldest packet was retransmitted.
    attempts: u32,
    /// When a request packet was last sent.
    last_sent: Instant,
    /// The retransmission timer, while it runs.
    wait: Option<Wait>,
    /// The packet whose round trip is being measured.
    timed: Option<Timed>,
    /// Packets since the last one that requested an acknowledgement.
    unasked: u32,
    /// How long we have waited for acknowledgements since the last progress.
    silence: Duration,
    /// Since when the peer has had no room for the oldest message.
    unready_since: Option<Instant>,
    /// The peer sent an RNR NAK: it wants no packets before this time.
    paused_until: Option<Instant>,
    /// A loss before this sequence has reduced the window already.
    recovered: u64,
    /// The sequence that a NAK made us go back to, and when.
    went_back: Option<(u64, Instant)>,
}

/// What the packets of a queue pair may be like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    /// The path MTU that both ends have agreed on, in bytes of payload.
    pub(super) mtu: u32,
    /// The most payload of packets that need not be of that size.
    pub(super) ceiling: u32,
    /// The payload that the host knows to pass.
    pub(super) known: u32,
    /// Both ends have agreed on [dense](super::dense) packets.
    pub(super) dense: bool,
}

/// A packet whose round trip is being measured.
#[derive(Clone, Copy, Debug)]
struct Timed {
    sequence: u64,
    left: Instant,
    /// It was retransmitted, so an acknowledgement may be for either transmission.
    repeated: bool,
}

impl Requester {
    /// Creates a requester that sends to `peer`, beginning with `first_psn`.
    pub(super) fn new((peer, first_psn): (Qpn, Psn), sizes: Sizes, window_max: u32) -> Self {
        let path = Path::new(sizes.ceiling, sizes.known);
        let segments = Segments { write: path.payload(), message: sizes.mtu };
        Self {
            peer,
            first_psn,
            segments,
            dense: sizes.dense,
            // It grows on demand, as most queue pairs are idle most of the time.
            queue: VecDeque::new(),
            done: 0,
            oldest: Place::default(),
            next: Place::default(),
            sent_end: 0,
            end: Mark::default(),
            congestion: Congestion::new(segments.write, window_max),
            path,
            trains: Trains::default(),
            attempts: 0,
            last_sent: Instant(0),
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

    /// The PSN of the oldest packet that is not acknowledged, or of the next one.
    pub(super) fn oldest_psn(&self) -> Psn {
        psn::advance(self.first_psn, self.oldest.mark.sequence)
    }

    /// How many more work requests fit.
    pub(super) fn room(&self) -> usize {
        SEND_QUEUE_DEPTH - self.queue.len()
    }

    /// Whether the send queue is empty and no timer runs.
    pub(super) fn is_idle(&self) -> bool {
        let probes = self.path.is_probing() || self.path.is_doubted();
        self.queue.is_empty() && !probes && self.wake_at().is_none() && self.paused_until.is_none()
    }

    /// Frees memory that only a burst needed.
    pub(super) fn shrink(&mut self) {
        if self.queue.capacity() > QUEUE_KEPT {
            self.queue.shrink_to(QUEUE_KEPT);
        }
    }

    /// Queues a work request.
    ///
    /// # Panics
    ///
    /// If there is no room.
    pub(super) fn post(&mut self, work: Work) {
        assert!(self.room() > 0, "the caller keeps within `room`");
        let request = Request::new(work, self.end, self.segments);
        self.end = request.end();
        self.queue.push_back(request);
    }

    /// The payload in bytes that full packets of new requests have.
    pub(super) fn payload(&self) -> u32 {
        self.segments.write
    }

    /// Whether packets must leave alone, rather than in trains.
    pub(super) fn splits_trains(&self, now: Instant) -> bool {
        self.is_asking() || self.trains.are_split(now)
    }

    /// Whether only the oldest packet is sent, until it is acknowledged, because it did not pass
    /// several times.
    fn is_asking(&self) -> bool {
        self.trains.may_ask(self.silence) && self.attempts % ASKING_OF == ASKING_AT
    }

    /// Processes an acknowledgement or NAK of the peer.
    ///
    /// # Errors
    ///
    /// When the peer refused a request. The caller must break the queue pair.
    pub(super) fn handle_answer(
        &mut self,
        now: Instant,
        psn: Psn,
        aeth: Aeth,
        counters: &mut Counters,
    ) -> Result<(), QpError> {
        let oldest = self.oldest.mark.sequence;
        let ahead = psn::distance(self.oldest_psn(), psn);
        let sequence = oldest + u64::from(ahead);
        if aeth.syndrome.0 >> 5 == 0 {
            counters.acks_in += 1;
        } else {
            counters.naks_in += 1;
        }
        let is_last = ahead == PSN_MASK;
        if is_last && self.path.is_probing() && aeth.syndrome.0 >> 5 == 0 {
            let outcome = self.path.answered(now);
            self.follow(outcome, counters);
            return Ok(());
        }
        // It is about a packet that was acknowledged before or never sent: late or forged. But a
        // guessed PSN can make the peer believe in a gap behind all that we have sent.
        let is_gap = aeth.syndrome == Syndrome::SEQUENCE_ERROR;
        if sequence >= self.sent_end + u64::from(is_gap) {
            return Ok(());
        }
        match aeth.syndrome {
            Syndrome(0x00..=0x1f) => self.acknowledge(now, sequence + 1, counters),
            Syndrome(0x20..=0x3f) => {
                self.acknowledge(now, sequence, counters);
                let since = *self.unready_since.get_or_insert(now);
                if now.since(since) >= UNREADY_MAX {
                    return Err(QpError::RetriesExceeded);
                }
                self.go_back();
                let wait = not_ready_wait(aeth.syndrome);
                self.paused_until = Some(now + wait);
                // The peer is alive and has answered, so the retry timeout starts again.
                self.silence = Duration::ZERO;
            }
            Syndrome::SEQUENCE_ERROR => {
                self.acknowledge(now, sequence, counters);
                // During black hole detection nothing is retransmitted: it is about old packets.
                if sequence < self.sent_end && !self.path.is_doubted() {
                    self.handle_gap(now)?;
                }
            }
            Syndrome::INVALID_REQUEST | Syndrome::ACCESS_ERROR | Syndrome::OPERATION_ERROR => {
                // The peer executed all packets before the refused one.
                self.acknowledge(now, sequence, counters);
                return Err(QpError::RemoteError);
            }
            Syndrome(_) => {}
        }
        Ok(())
    }

    /// When [`expire`](Self::expire) has something to do, or an RNR wait ends.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        let pause = self.paused_until.filter(|_| self.next.mark != self.end);
        let answer = self.wait.map(|wait| wait.until);
        [pause, answer, self.path.wake_at()].into_iter().flatten().min()
    }

    /// Handles timers: goes back to the oldest unacknowledged packet if the retransmission timer
    /// has expired.
    ///
    /// # Errors
    ///
    /// When the peer has been silent for too long. The caller must break the queue pair.
    pub(super) fn expire(&mut self, now: Instant, counters: &mut Counters) -> Result<(), QpError> {
        if self.paused_until.is_some_and(|until| now >= until) {
            self.paused_until = None;
        }
        if let Some(waited) = self.path.waited(now).filter(|_| self.path.is_doubted()) {
            self.silence += waited;
            if self.silence >= SILENCE_MAX {
                return Err(QpError::RetriesExceeded);
            }
        }
        let outcome = self.path.expire(now, self.next.mark.sequence < self.end.sequence);
        self.follow(outcome, counters);
        if self.wait.is_none_or(|wait| now < wait.until) {
            return Ok(());
        }
        counters.timeouts += 1;
        self.stop_waiting(now)?;
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

    /// Whether acknowledged requests wait to be reported.
    pub(super) fn has_completed(&self) -> bool {
        self.done > 0
    }

    fn pop(&mut self, qp: QpId, status: Status) -> Option<Completion> {
        self.queue.pop_front().map(|request| request.complete(qp, status))
    }

    /// Processes an acknowledgement of all packets before `sequence`.
    fn acknowledge(&mut self, now: Instant, sequence: u64, counters: &mut Counters) {
        let before = self.oldest.mark;
        assert!(before.sequence <= sequence && sequence <= self.sent_end);
        if before.sequence == sequence {
            return;
        }
        let passed_alone = self.passed_alone(sequence);
        while self.queue.get(self.done).is_some_and(|request| request.end().sequence <= sequence) {
            self.done += 1;
        }
        self.oldest = match self.queue.get(self.done) {
            Some(request) => request.place(self.done, sequence),
            None => Place { mark: self.end, request: self.done, packet: 0 },
        };
        let gained = self.oldest.mark.cost - before.cost;
        let evidence = match passed_alone {
            true => Evidence::OnlyAlone,
            false => self.evidence(sequence - before.sequence, gained),
        };
        self.trains.progress(now, evidence);
        let mut spurious = false;
        if self.next.mark.sequence < sequence {
            // The packets that we were about to retransmit had arrived: the timeout was spurious.
            self.next = self.oldest;
            spurious = self.congestion.undo_timeout();
            counters.timeouts_undone += u64::from(spurious);
        }
        self.congestion.acknowledged(u32::try_from(gained).unwrap_or(u32::MAX));
        if let Some(timed) = self.timed
            && timed.sequence < sequence
        {
            // For a packet that was sent twice, only a spurious timeout tells which transmission
            // was acknowledged: the first. That sample must count, or the timeout would never learn
            // how slow the peer can be.
            if spurious || !timed.repeated {
                self.congestion.measured(now.since(timed.left));
            }
            self.timed = None;
        }
        self.silence = Duration::ZERO;
        self.unready_since = None;
        self.attempts = 0;
        self.path.progress(now);
        self.paused_until = None;
        self.wait = None;
        if self.next.mark.sequence > sequence {
            self.restart_wait(now);
        }
    }

    /// Processes a NAK for the oldest packet: the peer has not received it.
    fn handle_gap(&mut self, now: Instant) -> Result<(), QpError> {
        let oldest = self.oldest.mark.sequence;
        // The packets behind the gap cause further NAKs until the retransmission arrives. The round
        // trip is longer than it needs to be here, since NAKs are not delayed as acknowledgements
        // are: a NAK that tells of a lost retransmission may be ignored, and the timeout repeats
        // it. But if the time was too short on a long path, each of these NAKs would repeat a whole
        // window, and after a few of them the packets would seem too large for the path.
        if let Some((there, before)) = self.went_back
            && there == oldest
            && now.since(before) < self.congestion.round_trip()
        {
            return Ok(());
        }
        self.stop_waiting(now)?;
        self.went_back = Some((oldest, now));
        if oldest >= self.recovered {
            self.congestion.lost();
            self.recovered = self.sent_end;
        }
        self.try_again();
        Ok(())
    }

    /// The peer says that routers have marked our packets.
    pub(super) fn slow_down(&mut self, now: Instant) {
        self.congestion.notified(now);
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

/// The capacity that an idle send queue keeps: the requests that many interactive connections have
/// outstanding at once, so that the queue allocates once in the common case.
const QUEUE_KEPT: usize = 128;
/// How long a peer may have no room for one message before the queue pair breaks. Longer than any
/// host is busy that is well; and what waits for it holds memory that others need.
const UNREADY_MAX: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
