//! The receiving half of a queue pair: order, duplicates, placement, and what answer is owed.
//!
//! An answer is owed from the moment a packet asks for one, and at most one at a time, since an
//! acknowledgement speaks for everything before it. It is held back for [`ACK_DELAY`] in the hope
//! that data of our own leaves for the same peer meanwhile.

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
    /// Payload of a full packet.
    mtu: u32,
    expected: Psn,
    /// Messages completed: 24 bits.
    msn: u32,
    /// What is left of a write of several packets.
    writing: Option<Reth>,
    /// What has come of a message of several packets.
    joining: Option<Vec<u8>>,
    hint: Hint,
    /// What broke this queue pair, if it was the peer.
    refused: Option<(Syndrome, Psn)>,
    /// When the present gap was last complained about.
    complained: Option<Instant>,
    owed: Owed,
    /// Since the last answer: packets, and what they cost.
    packets: u32,
    cost: u32,
}

/// The answer that is owed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owed {
    Nothing,
    /// An acknowledgement, asked for at that time.
    Soon(Instant),
    /// An acknowledgement without delay.
    Now,
    /// A negative one without delay.
    Negative(Syndrome, Psn),
}

/// An answer, ready to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// What to say.
    pub(super) aeth: Aeth,
    /// About which packet.
    pub(super) psn: Psn,
}

/// How urgently answers are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Occasion {
    /// Data has left for the peer, and the answer would travel with it for nothing.
    Ride,
    /// Nothing else leaves.
    Turn,
    /// Nobody will ask again for a long time.
    BeforeSleep,
}

/// A message, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// As most are.
    Short(Message),
    /// A longer one.
    Long(Box<[u8]>),
}

/// The peer sent what it must not. The refusal is owed, and the queue pair must break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refused;

impl Responder {
    /// Expects `first` from the peer, in packets of up to `mtu` bytes of payload.
    pub(super) fn new(domain: Domain, messages: Messages, mtu: u32, first: Psn) -> Self {
        Self {
            domain,
            messages,
            mtu,
            expected: first,
            msn: 0,
            writing: None,
            joining: None,
            hint: Hint::default(),
            refused: None,
            complained: None,
            owed: Owed::Nothing,
            packets: 0,
            cost: 0,
        }
    }

    /// Takes in a request whose ICRC is right. Returns the message, if it was one.
    ///
    /// `room` says whether there is room for a message.
    ///
    /// # Errors
    ///
    /// [`Refused`]; no byte was placed.
    pub(super) fn handle(
        &mut self,
        now: Instant,
        packet: &Packet<'_>,
        keys: &Keys,
        room: bool,
        counters: &mut Counters,
    ) -> Result<Option<Received>, Refused> {
        match psn::order(self.expected, packet.psn) {
            Order::Expected => {}
            Order::Before => {
                counters.duplicates += 1;
                self.owe_at_once();
                return Ok(None);
            }
            Order::After => {
                counters.out_of_order += 1;
                self.complain(now);
                return Ok(None);
            }
        }
        let outcome = self.carry_out(packet, keys, room);
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
                // What follows it will come too early, for a reason that the peer is told here.
                self.complained = Some(now);
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

    /// The peer has sent something to a queue pair that is broken. If that is because of a refusal,
    /// it may have been lost, and is owed once more: else the peer would only learn from silence.
    pub(super) fn refuse_again(&mut self) {
        if let Some((syndrome, psn)) = self.refused {
            self.owed = Owed::Negative(syndrome, psn);
        }
    }

    /// Whether an answer must or should be sent on this occasion.
    pub(super) fn is_due(&self, now: Instant, occasion: Occasion) -> bool {
        match (self.owed, occasion) {
            (Owed::Nothing, _) => false,
            (Owed::Now | Owed::Negative(..), _) => true,
            (Owed::Soon(_), Occasion::Ride | Occasion::BeforeSleep) => true,
            (Owed::Soon(since), Occasion::Turn) => {
                now.since(since) >= ACK_DELAY
                    || self.packets >= PACKETS_UNANSWERED_MAX
                    || self.cost >= COST_UNANSWERED_MAX
            }
        }
    }

    /// The answer that is owed, which counts as sent; or else an acknowledgement.
    pub(super) fn answer(&mut self) -> Answer {
        let last = Psn(self.expected.0.wrapping_sub(1) & PSN_MASK);
        let (syndrome, psn) = match self.owed {
            Owed::Nothing | Owed::Soon(_) | Owed::Now => (Syndrome::ACK, last),
            Owed::Negative(syndrome, psn) => (syndrome, psn),
        };
        self.owed = Owed::Nothing;
        self.packets = 0;
        self.cost = 0;
        Answer { aeth: Aeth { syndrome, msn: self.msn }, psn }
    }

    /// When an answer is due at the latest.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.owed {
            Owed::Nothing => None,
            Owed::Soon(since) => Some(since + ACK_DELAY),
            Owed::Now | Owed::Negative(..) => Some(Instant(0)),
        }
    }

    fn owe_at_once(&mut self) {
        match self.owed {
            Owed::Nothing | Owed::Soon(_) | Owed::Now => self.owed = Owed::Now,
            Owed::Negative(..) => {}
        }
    }

    /// Something is missing: says so once, and again when the repair seems to have been lost too.
    fn complain(&mut self, now: Instant) {
        let again = self.complained.is_none_or(|before| now.since(before) >= COMPLAIN_AGAIN);
        if again {
            self.complained = Some(now);
            self.owed = Owed::Negative(Syndrome::SEQUENCE_ERROR, self.expected);
        }
    }

    /// The expected packet was carried out.
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
            Body::Acknowledge(_) | Body::Unserved => 0,
        };
        self.packets = self.packets.saturating_add(1);
        // A peer that never asks for an acknowledgement never has it set back.
        let payload = u32::try_from(payload).unwrap_or(self.mtu);
        self.cost = self.cost.saturating_add(PACKET_COST + payload);
        self.complained = None;
        self.owed = match self.owed {
            // The gap closed before we could complain: the packets were only out of order.
            Owed::Negative(..) => Owed::Now,
            Owed::Nothing if packet.ack_request => Owed::Soon(now),
            owed @ (Owed::Nothing | Owed::Soon(_) | Owed::Now) => owed,
        };
    }

    /// Carries the expected packet out, or says why not; then nothing is changed.
    fn carry_out(
        &mut self,
        packet: &Packet<'_>,
        keys: &Keys,
        room: bool,
    ) -> Result<Done, Syndrome> {
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
            Body::Unserved | Body::Acknowledge(_) => Err(Syndrome::INVALID_REQUEST),
        }
    }

    /// Takes in a packet of a long message. Once it has begun there is room for all of it.
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

    /// Places the bytes at the start of `rest`, of which `more` says whether more follow.
    fn write(
        &mut self,
        rest: Reth,
        more: bool,
        payload: &[u8],
        keys: &Keys,
    ) -> Result<Done, Syndrome> {
        let len = u32::try_from(payload.len()).map_err(|_| Syndrome::INVALID_REQUEST)?;
        let fits = if more { len == self.mtu && len < rest.len } else { len == rest.len };
        if !fits || len > self.mtu {
            return Err(Syndrome::INVALID_REQUEST);
        }
        // A write of nothing touches nothing, whatever it names.
        if rest.len != 0 {
            let (hint, domain) = (&mut self.hint, self.domain);
            if more {
                // All of it must be allowed before any of it is placed.
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

/// What a packet that was carried out completed.
#[derive(Debug)]
enum Done {
    Message(Message),
    Long(Box<[u8]>),
    Write,
    /// The write, or the message, goes on.
    Part,
}

/// A message of several packets may still be as short as others.
fn short(message: &[u8]) -> Option<Message> {
    let mut short = [0; MESSAGE_LEN];
    short.get_mut(..message.len())?.copy_from_slice(message);
    Some(short)
}

/// How long an acknowledgement waits for data to ride behind. The peer does not mind: its timeout
/// is twenty times that.
pub(super) const ACK_DELAY: Duration = Duration::from_micros(50);
/// Packets that are acknowledged without delay, so that the peer's window does not close.
const PACKETS_UNANSWERED_MAX: u32 = 32;
/// The same in bytes. A window is full when it has at least this much in flight.
const COST_UNANSWERED_MAX: u32 = WINDOW_MIN;
/// How long a gap may last before it is complained about again. The peer ignores what comes within
/// a round trip.
const COMPLAIN_AGAIN: Duration = Duration::from_micros(200);
/// The longest write of the transport.
const WRITE_MAX: u32 = 1 << 31;

#[cfg(test)]
mod tests;
