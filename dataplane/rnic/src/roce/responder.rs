//! The receiving half of a queue pair: it checks order, drops duplicates, places writes, and
//! decides when to acknowledge.
//!
//! At most one acknowledgement is outstanding at a time, since it covers all packets before it. It
//! becomes due when a packet requests it, and is then delayed for up to [`ACK_DELAY`], because data
//! of our own may leave for the same peer meanwhile and take it along.

use std::time::Duration;

use smcr_proto::{Instant, Psn};

use super::PACKET_COST;
use super::congestion::WINDOW_MIN;
use super::counters::Counters;
use super::keys::{Hint, Keys};
use super::psn::{self, Order, PSN_MASK};
use super::wire::{Aeth, Body, Packet, Reth, Syndrome};
use crate::{Domain, LONG_MESSAGE_MAX, MESSAGE_LEN, Message, Messages};

/// The receiving half.
#[derive(Debug)]
pub(super) struct Responder {
    domain: Domain,
    messages: Messages,
    /// The path MTU: the payload of all packets of a long message or write but the last.
    mtu: u32,
    /// The most payload of a write of one packet.
    write_max: u32,
    expected: Psn,
    /// Messages completed: 24 bits.
    msn: u32,
    /// The rest of a write of several packets, of which the first have been placed.
    writing: Option<Reth>,
    /// The received part of a message of several packets.
    joining: Option<Vec<u8>>,
    hint: Hint,
    /// The NAK of the request that broke this queue pair, if the peer broke it.
    refused: Option<(Syndrome, Psn)>,
    /// From when on a packet behind the present gap causes a NAK, if there is a gap.
    nak_from: Option<Instant>,
    /// How many packets came behind the present gap, or what looks like one.
    behind: u32,
    owed: Owed,
    /// Packets since the last acknowledgement or NAK, the messages that they completed, and their
    /// cost in terms of the window.
    packets: u32,
    messages_done: u32,
    cost: u32,
}

/// The acknowledgement or NAK that must be sent next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owed {
    Nothing,
    /// An acknowledgement that was requested at that time and may be delayed.
    Delayed(Instant),
    /// An acknowledgement without delay.
    Now,
    /// A NAK without delay.
    Negative(Syndrome, Psn),
}

/// An acknowledgement or NAK, ready to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// Its AETH.
    pub(super) aeth: Aeth,
    /// The PSN of the packet that it is about.
    pub(super) psn: Psn,
}

/// When an acknowledgement could be sent. It decides whether a delayed one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Occasion {
    /// Data has just been built for the peer, and the acknowledgement can leave in the same run.
    WithData,
    /// Data has just been built for the peer. The acknowledgement would be a packet of its own, but
    /// would need no system call and wake nobody.
    BesideData,
    /// The turn ends without data for the peer.
    Turn,
    /// The queue pair is released, and sends nothing after this.
    Last,
}

/// A complete message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// A message of the usual length.
    Short(Message),
    /// A longer one.
    Long(Box<[u8]>),
}

/// The peer sent a request that it must not send. The caller must break the queue pair; the NAK is
/// queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refused;

impl Responder {
    /// Creates a responder that expects the PSN `first`, packets of up to `mtu` bytes of payload,
    /// and writes of one packet with up to `write_max`.
    pub(super) fn new(
        (domain, messages): (Domain, Messages),
        (mtu, write_max): (u32, u32),
        first: Psn,
    ) -> Self {
        Self {
            domain,
            messages,
            mtu,
            write_max,
            expected: first,
            msn: 0,
            writing: None,
            joining: None,
            hint: Hint::default(),
            refused: None,
            nak_from: None,
            behind: 0,
            owed: Owed::Nothing,
            packets: 0,
            messages_done: 0,
            cost: 0,
        }
    }

    /// Processes a request packet whose ICRC is right. Returns the message that it completes, if
    /// any.
    ///
    /// `room` says whether there is room for a message. `swept` says that somebody tries PSNs in
    /// the peer's name: what looks like a gap may then be a guess.
    ///
    /// # Errors
    ///
    /// [`Refused`] if the request is invalid. No byte of the packet was placed.
    pub(super) fn handle(
        &mut self,
        now: Instant,
        packet: &Packet<'_>,
        keys: &Keys,
        (room, swept): (bool, bool),
        counters: &mut Counters,
    ) -> Result<Option<Received>, Refused> {
        match psn::order(self.expected, packet.psn) {
            Order::Expected => {}
            Order::Before => {
                counters.duplicates += 1;
                self.acknowledge_at_once();
                return Ok(None);
            }
            Order::After => {
                counters.out_of_order += 1;
                self.report_gap(now, swept);
                return Ok(None);
            }
        }
        let outcome = self.execute(packet, keys, room);
        match outcome {
            Ok(done) => {
                self.accept(now, packet, &done);
                Ok(match done {
                    Done::Message(message) => Some(Received::Short(message)),
                    Done::Long(message) => Some(Received::Long(message)),
                    Done::Write | Done::Part => None,
                })
            }
            Err(Syndrome::NOT_READY) => {
                counters.rnr += 1;
                self.owed = Owed::Negative(Syndrome::NOT_READY, packet.psn);
                // The packets behind this one will be out of order. The RNR NAK covers them too.
                self.nak_from = Some(now + NAK_INTERVAL);
                Ok(None)
            }
            Err(syndrome) => {
                match syndrome {
                    Syndrome::ACCESS_ERROR => counters.rkey_errors += 1,
                    _ => counters.invalid_requests += 1,
                }
                self.refused = Some((syndrome, packet.psn));
                self.refuse_again();
                Err(Refused)
            }
        }
    }

    /// Repeats the NAK that broke this queue pair, if one did. The peer still sends, so the NAK may
    /// have been lost; without it the peer would have to wait until its retries are exceeded.
    pub(super) fn refuse_again(&mut self) {
        if let Some((syndrome, psn)) = self.refused {
            self.owed = Owed::Negative(syndrome, psn);
        }
    }

    /// Whether an acknowledgement or NAK should be sent on this occasion.
    pub(super) fn is_due(&self, now: Instant, occasion: Occasion) -> bool {
        match (self.owed, occasion) {
            (Owed::Nothing, _) => false,
            (Owed::Now | Owed::Negative(..), _) => true,
            (Owed::Delayed(since), _) => {
                now.since(since) >= patience(occasion) || self.leaves_much(occasion)
            }
        }
    }

    /// Whether so much is unanswered that an acknowledgement is not delayed on this occasion.
    ///
    /// Beside data, two thirds of it are much. A message that is answered with data then meets an
    /// acknowledgement that leaves beside the answer, at the cost of a packet; at the end of the
    /// turn that receives it, the acknowledgement would need a system call, and would wake the
    /// peer.
    fn leaves_much(&self, occasion: Occasion) -> bool {
        let thirds = match occasion {
            Occasion::WithData | Occasion::Last => 0,
            Occasion::BesideData => 2,
            Occasion::Turn => 3,
        };
        [
            (self.packets, PACKETS_UNANSWERED_MAX),
            (self.messages_done, MESSAGES_UNANSWERED_MAX),
            (self.cost, COST_UNANSWERED_MAX),
        ]
        .into_iter()
        .any(|(count, most)| count.saturating_mul(3) >= most * thirds)
    }

    /// Takes the acknowledgement or NAK to send. If none is due, it is an acknowledgement.
    pub(super) fn answer(&mut self) -> Answer {
        let last = Psn(self.expected.0.wrapping_sub(1) & PSN_MASK);
        let (syndrome, psn) = match self.owed {
            Owed::Nothing | Owed::Delayed(_) | Owed::Now => (Syndrome::ACK, last),
            Owed::Negative(syndrome, psn) => (syndrome, psn),
        };
        self.owed = Owed::Nothing;
        (self.packets, self.messages_done, self.cost) = (0, 0, 0);
        Answer { aeth: Aeth { syndrome, msn: self.msn }, psn }
    }

    /// When an acknowledgement or NAK must be sent at the latest.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.owed {
            Owed::Nothing => None,
            Owed::Delayed(since) => Some(since + ACK_DELAY),
            Owed::Now | Owed::Negative(..) => Some(Instant(0)),
        }
    }

    /// The PSN of the next request.
    pub(super) fn expected(&self) -> Psn {
        self.expected
    }

    fn acknowledge_at_once(&mut self) {
        match self.owed {
            Owed::Nothing | Owed::Delayed(_) | Owed::Now => self.owed = Owed::Now,
            Owed::Negative(..) => {}
        }
    }

    /// Reports a gap with a NAK, and again after [`NAK_INTERVAL`] if it was not closed: then the
    /// NAK or the retransmission was lost.
    ///
    /// While somebody tries PSNs, a guess that is near looks like a packet behind a gap, and a NAK
    /// would halve the peer's window. So it takes [`BEHIND_MIN`] packets behind the same gap to
    /// believe in it: the peer's next packet shows that there was none. It takes no time, as all
    /// that the peer's window allows may have come at once. Of a shorter flight the peer repeats
    /// what was lost after its timeout.
    pub(super) fn report_gap(&mut self, now: Instant, swept: bool) {
        self.behind = self.behind.saturating_add(1);
        let believed = !swept || self.behind >= BEHIND_MIN;
        if believed && self.nak_from.is_none_or(|from| now >= from) {
            self.nak_from = Some(now + NAK_INTERVAL);
            self.owed = Owed::Negative(Syndrome::SEQUENCE_ERROR, self.expected);
        }
    }

    /// Advances after the expected packet was executed.
    fn accept(&mut self, now: Instant, packet: &Packet<'_>, done: &Done) {
        self.expected = psn::advance(self.expected, 1);
        match done {
            Done::Message(_) | Done::Long(_) | Done::Write => self.msn = (self.msn + 1) & PSN_MASK,
            Done::Part => {}
        }
        let payload = match packet.body {
            Body::Send { payload, .. }
            | Body::Write { payload, .. }
            | Body::WriteOn { payload, .. } => payload.len(),
            Body::Dense(_) | Body::Acknowledge(_) | Body::Congestion | Body::Unserved => 0,
        };
        self.packets = self.packets.saturating_add(1);
        let is_message = matches!(done, Done::Message(_) | Done::Long(_));
        self.messages_done = self.messages_done.saturating_add(is_message.into());
        // A peer that never asks for an acknowledgement never has it set back.
        let payload = u32::try_from(payload).unwrap_or(self.mtu);
        self.cost = self.cost.saturating_add(PACKET_COST + payload);
        self.nak_from = None;
        self.behind = 0;
        // Where nothing changes, nothing is copied: compilers copy it in pieces that overlap, which
        // must wait until all bytes of the packet are stored.
        match self.owed {
            // The gap closed before the NAK was sent: the packets were only reordered.
            Owed::Negative(..) => self.owed = Owed::Now,
            Owed::Nothing if packet.ack_request => self.owed = Owed::Delayed(now),
            Owed::Nothing | Owed::Delayed(_) | Owed::Now => {}
        }
    }

    /// Executes the expected packet. If it cannot, it returns the syndrome and changes nothing.
    fn execute(&mut self, packet: &Packet<'_>, keys: &Keys, room: bool) -> Result<Done, Syndrome> {
        match packet.body {
            Body::Send { first: true, more: false, payload } if payload.len() <= MESSAGE_LEN => {
                if self.writing.is_some() || self.joining.is_some() {
                    return Err(Syndrome::INVALID_REQUEST);
                }
                let mut message = [0; MESSAGE_LEN];
                message[..payload.len()].copy_from_slice(payload);
                if room { Ok(Done::Message(message)) } else { Err(Syndrome::NOT_READY) }
            }
            Body::Send { first, more, payload } => self.join(first, more, payload, room),
            Body::Write { .. } if self.joining.is_some() => Err(Syndrome::INVALID_REQUEST),
            Body::Write { reth, more, payload } => {
                if self.writing.is_some() || reth.len > WRITE_MAX {
                    return Err(Syndrome::INVALID_REQUEST);
                }
                self.write(reth, more, payload, keys)
            }
            Body::WriteOn { more, payload } => {
                let reth = self.writing.ok_or(Syndrome::INVALID_REQUEST)?;
                self.write(reth, more, payload, keys)
            }
            Body::Unserved | Body::Dense(_) | Body::Acknowledge(_) | Body::Congestion => {
                Err(Syndrome::INVALID_REQUEST)
            }
        }
    }

    /// Appends a packet to a long message. Only the first packet needs room: the others must then
    /// be accepted.
    fn join(
        &mut self,
        first: bool,
        more: bool,
        payload: &[u8],
        room: bool,
    ) -> Result<Done, Syndrome> {
        let before = self.joining.as_ref().map_or(0, Vec::len);
        let fits = match (more, u32::try_from(payload.len())) {
            (true, Ok(len)) => len == self.mtu,
            (false, Ok(len)) => len <= self.mtu && (first || len > 0),
            (_, Err(_)) => false,
        };
        let expected = first == self.joining.is_none() && self.writing.is_none();
        let long = self.messages == Messages::Long && before + payload.len() <= LONG_MESSAGE_MAX;
        if !fits || !expected || !long {
            return Err(Syndrome::INVALID_REQUEST);
        }
        if first && !room {
            return Err(Syndrome::NOT_READY);
        }
        let mut message = self.joining.take().unwrap_or_default();
        message.extend_from_slice(payload);
        if more {
            self.joining = Some(message);
            return Ok(Done::Part);
        }
        Ok(match short(&message) {
            Some(short) => Done::Message(short),
            None => Done::Long(message.into()),
        })
    }

    /// Places `payload` at the start of `rest`. `more` says whether more packets of the write
    /// follow.
    fn write(
        &mut self,
        rest: Reth,
        more: bool,
        payload: &[u8],
        keys: &Keys,
    ) -> Result<Done, Syndrome> {
        let len = u32::try_from(payload.len()).map_err(|_| Syndrome::INVALID_REQUEST)?;
        let fits = if more { len == self.mtu && len < rest.len } else { len == rest.len };
        if !fits || len > self.write_max {
            return Err(Syndrome::INVALID_REQUEST);
        }
        // A write of zero bytes succeeds with any key and address.
        if rest.len != 0 {
            let (hint, domain) = (&mut self.hint, self.domain);
            if more {
                // The whole write must be allowed before any of it is placed.
                keys.check(hint, domain, rest).map_err(|_| Syndrome::ACCESS_ERROR)?;
            }
            keys.place(hint, domain, rest, payload).map_err(|_| Syndrome::ACCESS_ERROR)?;
        }
        if more {
            let address = rest.address + u64::from(len);
            self.writing = Some(Reth { address, len: rest.len - len, ..rest });
            Ok(Done::Part)
        } else {
            self.writing = None;
            Ok(Done::Write)
        }
    }
}

/// How long a delayed acknowledgement may have waited and need not be sent on this occasion.
///
/// Beside data that is half of its delay. Data that leaves at regular intervals of up to half the
/// delay then takes the acknowledgement along before the delay is over, and so does data at longer
/// ones that answers what is acknowledged. Other data does so if it happens to leave in the second
/// half. With more than half, more acknowledgements would need a system call for themselves, and
/// wake the peer once more; with less, more packets leave.
fn patience(occasion: Occasion) -> Duration {
    match occasion {
        Occasion::WithData | Occasion::Last => Duration::ZERO,
        Occasion::BesideData => ACK_DELAY / 2,
        Occasion::Turn => ACK_DELAY,
    }
}

/// What the execution of a packet completed.
#[derive(Debug)]
enum Done {
    Message(Message),
    Long(Box<[u8]>),
    Write,
    /// Nothing: more packets of the write or the message follow.
    Part,
}

/// Whether the acknowledgement of so many packets, of this cost in all, may wait for
/// [`ACK_DELAY`], as far as whoever has sent them can tell.
pub(super) fn may_hold_back(packets: u64, cost: u64) -> bool {
    packets < u64::from(PACKETS_UNANSWERED_MAX) && cost < u64::from(COST_UNANSWERED_MAX)
}

/// Converts a message of several packets to a short message, if it is short enough.
fn short(message: &[u8]) -> Option<Message> {
    let mut short = [0; MESSAGE_LEN];
    short.get_mut(..message.len())?.copy_from_slice(message);
    Some(short)
}

/// How long an acknowledgement waits for data that leaves with it. Whoever waits for it knows that:
/// its timeout is longer while so little is in flight that it may be held back ([`may_hold_back`]).
/// Hardware has longer timeouts. (An eighth of it was tried, before there were dense packets. A
/// request and its answer then took 2.34 packets in each direction, and 2.13 with this; each costs
/// the sender 5 us, and the receiver a wake-up if it sleeps.)
pub(super) const ACK_DELAY: Duration = Duration::from_millis(2);
/// After this many packets an acknowledgement is not delayed: as many as messages may be, each with
/// a write before it. (With a third of it, 32 connections that exchange messages took 4 % more
/// processor time for each.)
const PACKETS_UNANSWERED_MAX: u32 = 2 * MESSAGES_UNANSWERED_MAX;
/// After this many messages it is not delayed. A Linux peer has sixteen on their way at most, and
/// must not wait for room.
const MESSAGES_UNANSWERED_MAX: u32 = 12;
/// After packets of this cost it is not delayed, so that the peer's window does not close: this is
/// the smallest window a peer may have.
const COST_UNANSWERED_MAX: u32 = WINDOW_MIN;
/// How long a gap may last before another NAK is sent. The peer ignores NAKs that come within a
/// round trip of the last one.
const NAK_INTERVAL: Duration = Duration::from_micros(200);
/// How many packets behind a gap it takes to believe in it while somebody tries PSNs. At a hundred
/// thousand guesses per second, three near ones come in 15 ms.
const BEHIND_MIN: u32 = 3;
/// The longest write that the transport allows.
const WRITE_MAX: u32 = 1 << 31;

#[cfg(test)]
mod tests;
