//! A queue pair that a fabric has adopted: its requester, its responder and its state.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use smcr_proto::{Gid, Instant};

use super::batch::{Batch, Destination, Ecn, PAYLOAD_MAX, Wire};
use super::counters::Counters;
use super::guard::{Far, Guard};
use super::icrc::{Flow, Identifications};
use super::inbox::{Event, Inbox};
use super::keys::Keys;
use super::marks::Marks;
use super::psn::{self, Order};
use super::requester::{Requester, Sizes};
use super::responder::{Occasion, Received, Refused, Responder};
use super::rnic::Qp;
use super::shared::Ticket;
use super::wire::{
    ACKNOWLEDGE, ACKNOWLEDGE_LEN, AETH_LEN, BTH_LEN, Body, Bth, CONGESTION_LEN, DENSE, Packet,
    build_congestion,
};
use crate::{Completion, QpError, QpId, Work};

/// A queue pair that a fabric has adopted.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) id: QpId,
    /// Reserves the number until the queue pair is destroyed.
    pub(super) ticket: Ticket,
    peer: smcr_proto::Qpn,
    /// The peer's address: packets are sent to it and accepted only from it.
    pub(super) target: SocketAddr,
    flow: Flow,
    requester: Requester,
    /// The packet payload that was last published, and where it is published.
    published: (u32, Arc<AtomicU32>),
    responder: Responder,
    /// Both ends have agreed on dense packets.
    dense: bool,
    guard: Guard,
    marks: Marks,
    pub(super) identifications: Identifications,
    pub(super) state: State,
}

/// The state of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Sends and receives.
    Ready,
    /// Broke, but `Broke` was not reported yet. Nothing is flushed before that. A last NAK may have
    /// to be sent.
    Breaking,
    /// `Broke` was reported. All work requests are flushed.
    Broken,
    /// The caller released it. It is destroyed when everything is flushed.
    Released,
}

/// The result of a packet or of a timer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// Nothing to report.
    None,
    /// A message arrived.
    Message(Received),
    /// The queue pair broke.
    Broke(QpError),
}

/// Whether [`Pair::fill`] is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filled {
    /// Nothing more may be sent this turn.
    All,
    /// The batch must be flushed before more packets are built.
    BatchFull,
}

impl Pair {
    /// Takes over `qp`, whose packets leave from `local`.
    pub(super) fn new(id: QpId, qp: Qp, local: SocketAddr) -> Self {
        let target = SocketAddr::new(qp.peer.gid.to_ip(), local.port());
        let Sizes { mtu, dense, .. } = qp.sizes;
        let write_max = if dense { PAYLOAD_MAX } else { mtu };
        Self {
            id,
            peer: qp.peer.qpn,
            target,
            flow: Flow::new(local, target),
            requester: Requester::new((qp.peer.qpn, qp.local.psn), qp.sizes, qp.window_max),
            published: (0, qp.payload),
            responder: Responder::new((qp.domain, qp.messages), (mtu, write_max), qp.peer.psn),
            dense,
            ticket: qp.ticket,
            guard: Guard::default(),
            marks: Marks::default(),
            identifications: Identifications::default(),
            state: State::Ready,
        }
    }

    /// How many more work requests fit into the send queue.
    pub(super) fn room(&self) -> usize {
        self.requester.room()
    }

    /// The payload of full packets in bytes.
    pub(super) fn payload(&self) -> u32 {
        self.requester.payload()
    }

    /// Queues a work request. If the queue pair is broken, the next `poll` flushes it.
    pub(super) fn post(&mut self, work: Work) {
        self.requester.post(work);
    }

    /// Breaks it. Returns false if it was broken or released before.
    pub(super) fn fail(&mut self) -> bool {
        let is_news = self.state == State::Ready;
        if is_news {
            self.state = State::Breaking;
        }
        is_news
    }

    /// Processes a packet for this queue pair whose ICRC is right, and tells `inbox` what the
    /// caller must hear of. What its IP header says of congestion may be unknown.
    pub(super) fn take_in(
        &mut self,
        now: Instant,
        packet: Packet<'_>,
        keys: &Keys,
        inbox: &mut Inbox,
        ecn: Option<Ecn>,
        counters: &mut Counters,
    ) {
        let mut one = |pair: &mut Self, packet: &Packet<'_>, ecn| {
            let room = inbox.has_room(pair.id);
            match pair.handle(now, packet, keys, (room, ecn), counters) {
                News::None => {}
                News::Message(message) => inbox.push(Event::Received(pair.id, message)),
                News::Broke(cause) => inbox.push(Event::Broke(pair.id, cause)),
            }
        };
        let Body::Dense(mut parts) = packet.body else { return one(self, &packet, ecn) };
        if !self.dense {
            counters.malformed += 1;
            return;
        }
        let mut part = Packet { ack_request: false, ..packet };
        let mut ecn = ecn;
        let expected = self.responder.expected();
        let begins = psn::order(expected, packet.psn) == Order::Expected;
        let count = u64::try_from(parts.count()).expect("few fit");
        while let Some(body) = parts.next() {
            part.body = body;
            part.ack_request = packet.ack_request && parts.is_empty();
            one(self, &part, ecn.take());
            part.psn = psn::advance(part.psn, 1);
            // One that was not executed tells all that those behind it would.
            if !begins || self.responder.expected() != part.psn {
                break;
            }
        }
        // Its first part is a duplicate, and others are not: the peer has not heard how far we are.
        let end = psn::advance(packet.psn, count);
        if self.state == State::Ready
            && psn::order(expected, packet.psn) == Order::Before
            && psn::order(expected, end) == Order::After
        {
            self.responder.report_gap(now, self.guard.is_swept(now));
        }
    }

    /// Processes a packet. `room` says whether there is room for a message.
    fn handle(
        &mut self,
        now: Instant,
        packet: &Packet<'_>,
        keys: &Keys,
        (room, ecn): (bool, Option<Ecn>),
        counters: &mut Counters,
    ) -> News {
        if !self.admits(now, packet, counters) {
            return News::None;
        }
        if let Some(ecn) = ecn {
            counters.marked_in += u64::from(ecn == Ecn::Congested);
            self.marks.note(now, ecn);
        }
        let is_ready = self.state == State::Ready;
        let broke = match packet.body {
            Body::Acknowledge(_) | Body::Congestion if !is_ready => return News::None,
            Body::Congestion => {
                counters.cnps_in += 1;
                self.requester.slow_down(now);
                return News::None;
            }
            Body::Acknowledge(aeth) => {
                match self.requester.handle_answer(now, packet.psn, aeth, counters) {
                    Ok(()) => return News::None,
                    Err(cause) => cause,
                }
            }
            Body::Send { .. }
            | Body::Write { .. }
            | Body::WriteOn { .. }
            | Body::Dense(_)
            | Body::Unserved => {
                if !is_ready {
                    self.responder.refuse_again();
                    return News::None;
                }
                let swept = self.guard.is_swept(now);
                match self.responder.handle(now, packet, keys, (room, swept), counters) {
                    Ok(Some(message)) => return News::Message(message),
                    Ok(None) => return News::None,
                    Err(Refused) => QpError::PeerMisbehaved,
                }
            }
        };
        self.state = State::Breaking;
        News::Broke(broke)
    }

    /// Whether a packet may be processed as far as its PSN is concerned. See [`super::guard`].
    fn admits(&mut self, now: Instant, packet: &Packet<'_>, counters: &mut Counters) -> bool {
        let expected = match packet.body {
            Body::Acknowledge(_) => self.requester.oldest_psn(),
            // It has no PSN. Whoever forges it slows us down, but does not stop us.
            Body::Congestion => return true,
            Body::Send { .. }
            | Body::Write { .. }
            | Body::WriteOn { .. }
            | Body::Dense(_)
            | Body::Unserved => self.responder.expected(),
        };
        if psn::is_near(expected, packet.psn) {
            return true;
        }
        counters.psn_errors += 1;
        match self.guard.note(now) {
            Far::Answer => true,
            Far::Drop => false,
            Far::Report => {
                let peer = Gid::from_ip(self.target.ip());
                if self.ticket.suspect(peer, self.guard.unreported()) {
                    self.guard.reported();
                }
                false
            }
        }
    }

    /// Handles timers: retransmission, the end of an RNR wait, and retries exceeded.
    pub(super) fn expire(&mut self, now: Instant, counters: &mut Counters) -> News {
        self.publish();
        let timeouts = counters.timeouts;
        match self.state {
            State::Ready => match self.requester.expire(now, counters) {
                Ok(()) => {
                    if counters.timeouts > timeouts {
                        self.marks.timed_out();
                    }
                    News::None
                }
                Err(cause) => {
                    self.state = State::Breaking;
                    News::Broke(cause)
                }
            },
            State::Breaking | State::Broken | State::Released => News::None,
        }
    }

    /// Builds packets into `batch`: up to `budget` request packets, and then the acknowledgement or
    /// NAK, if one is due. Reduces `budget` by the number of request packets.
    pub(super) fn fill<W: Wire>(
        &mut self,
        now: Instant,
        batch: &mut Batch,
        wire: &W,
        budget: &mut usize,
        counters: &mut Counters,
    ) -> Filled {
        let segments_max = self.segments_max(now, wire);
        let mut occasion = Occasion::Turn;
        let mut is_dense = false;
        if self.state == State::Ready {
            let mut next = self.requester.next(now);
            while *budget > 0
                && let Some(packet) = next
            {
                let (to, alike) = (self.destination(), self.requester.alike(packet, *budget));
                let Some(slot) = batch.slots(to, packet.len(), alike, segments_max) else {
                    return Filled::BatchFull;
                };
                *budget -= slot.count;
                // While the caches still hold it.
                let seal = |index, bytes: &mut [u8]| {
                    self.flow.seal(slot.identification + index, bytes);
                };
                let (bytes, last) = (&mut *slot.bytes, *budget == 0);
                next = self.requester.build(now, packet, last, bytes, counters, seal);
                is_dense = slot.bytes[0] == DENSE;
                occasion = Occasion::WithData;
            }
        }
        // Sending it behind data saves a system call only if it becomes part of the same run. But a
        // dense packet alone, such as a request or its answer, costs less than a run of two.
        let joins = batch.joins(self.destination(), ACKNOWLEDGE_LEN, segments_max);
        if occasion == Occasion::WithData && (!joins || is_dense && !batch.ends_in_train()) {
            occasion = Occasion::BesideData;
        }
        self.answer(now, occasion, batch, wire, counters)
    }

    /// Builds the notice of congestion, and the acknowledgement or NAK, into `batch`, if they are
    /// due.
    pub(super) fn answer<W: Wire>(
        &mut self,
        now: Instant,
        occasion: Occasion,
        batch: &mut Batch,
        wire: &W,
        counters: &mut Counters,
    ) -> Filled {
        let segments_max = self.segments_max(now, wire);
        if self.may_answer() && self.marks.is_owed() {
            let slot = batch.slot(self.destination(), CONGESTION_LEN, segments_max);
            let Some(slot) = slot else { return Filled::BatchFull };
            self.marks.told(now);
            counters.cnps_out += 1;
            build_congestion(self.peer, slot.bytes);
            self.flow.seal(slot.identification, slot.bytes);
        }
        if !self.may_answer() || !self.responder.is_due(now, occasion) {
            return Filled::All;
        }
        let slot = batch.slot(self.destination(), ACKNOWLEDGE_LEN, segments_max);
        let Some(slot) = slot else { return Filled::BatchFull };
        let answer = self.responder.answer();
        if answer.aeth.syndrome == super::wire::Syndrome::ACK {
            counters.acks_out += 1;
        } else {
            counters.naks_out += 1;
        }
        let header = Bth {
            opcode: ACKNOWLEDGE,
            solicited: false,
            payload_len: 0,
            target: self.peer,
            ack_request: false,
            psn: psn::advance(answer.psn, 0),
        };
        slot.bytes[..BTH_LEN].copy_from_slice(&header.encode());
        slot.bytes[BTH_LEN..BTH_LEN + AETH_LEN].copy_from_slice(&answer.aeth.encode());
        self.flow.seal(slot.identification, slot.bytes);
        Filled::All
    }

    /// When the queue pair must be served at the latest; not later than `now` if at once.
    pub(super) fn wake_at(&self, now: Instant) -> Option<Instant> {
        if self.may_answer() && self.marks.is_owed() {
            return Some(now);
        }
        let answer = if self.may_answer() { self.responder.deadline() } else { None };
        if self.state != State::Ready {
            return answer;
        }
        let work = self.requester.next(now).map(|_| now);
        [answer, work, self.requester.wake_at()].into_iter().flatten().min()
    }

    /// Whether [`complete`](Self::complete) has completions to report.
    pub(super) fn has_completions(&self) -> bool {
        match self.state {
            State::Ready | State::Breaking => self.requester.has_completed(),
            State::Broken => self.requester.room() < super::SEND_QUEUE_DEPTH,
            State::Released => true,
        }
    }

    /// Appends completions to `out`, as many as fit. Returns whether the queue pair can be
    /// destroyed.
    pub(super) fn complete(&mut self, out: &mut Vec<Completion>) -> bool {
        match self.state {
            State::Ready | State::Breaking => {
                self.requester.complete(self.id, out);
                false
            }
            State::Broken => {
                self.requester.flush(self.id, out);
                false
            }
            State::Released => self.requester.flush(self.id, out),
        }
    }

    fn publish(&mut self) {
        let (published, place) = &mut self.published;
        let payload = self.requester.payload();
        if *published != payload {
            *published = payload;
            place.store(payload, Ordering::Relaxed);
        }
    }

    /// Whether the queue pair is idle: it has nothing to do and no timer until the caller posts a
    /// work request or a packet arrives. If so, it also frees memory that only a burst needed.
    pub(super) fn rest(&mut self) -> bool {
        let rests = self.state == State::Ready
            && self.requester.is_idle()
            && self.responder.deadline().is_none()
            && !self.marks.is_owed();
        if rests {
            self.requester.shrink();
        }
        rests
    }

    /// How many packets may leave as one train.
    fn segments_max<W: Wire>(&self, now: Instant, wire: &W) -> usize {
        if self.requester.splits_trains(now) { 1 } else { wire.segments_max() }
    }

    fn destination(&self) -> Destination {
        Destination { target: self.target, number: self.peer, reacts: self.marks.reacts() }
    }

    /// Whether it may send acknowledgements and NAKs. A queue pair that is breaking still sends the
    /// NAK that tells the peer why.
    fn may_answer(&self) -> bool {
        match self.state {
            State::Ready | State::Breaking | State::Broken => true,
            State::Released => false,
        }
    }
}
