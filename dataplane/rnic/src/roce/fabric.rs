//! The poller's half of a NIC: it holds the queue pairs and keys, and receives and sends packets.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use smcr_memory::Rmbe;
use smcr_proto::{Instant, MacAddress};

use super::batch::{Batch, Show, Train, Wire};
use super::counters::Counters;
use super::icrc::{Flow, Identifications, Verdict};
use super::inbox::{Event, Inbox};
use super::keys::Keys;
use super::pair::{Filled, News, Pair, State};
use super::pairs::Pairs;
use super::responder::{Occasion, Received};
use super::rnic::Qp;
use super::shared::Shared;
use super::siblings::Siblings;
use super::tap::{Tap, Tracer};
use super::wire::Packet;
use crate::{Completion, QpError, QpId, Signs, Work};

/// The poller's half of a RoCEv2 NIC in software.
#[derive(Debug)]
pub struct Fabric<W> {
    local: SocketAddr,
    wire: W,
    shared: Arc<Shared>,
    keys: Keys,
    pairs: Pairs,
    /// Events that `poll` has not reported yet, in order.
    inbox: Inbox,
    batch: Batch,
    /// The wire was full. The next attempt to send is at this time at the latest.
    blocked_until: Option<Instant>,
    /// The last receive returned packets, so there may be more.
    receiving: bool,
    /// No packet has come since the last receive.
    quiet: bool,
    /// The other fabrics of this NIC.
    siblings: Option<Siblings>,
    tap: Tap,
    counters: Counters,
}

impl<W: Wire> Fabric<W> {
    /// Creates the half that communicates with the control thread's half through `shared`.
    pub(super) fn new(local: SocketAddr, wire: W, shared: Arc<Shared>) -> Self {
        Self {
            local,
            wire,
            shared,
            keys: Keys::new(),
            pairs: Pairs::new(),
            inbox: Inbox::new(),
            batch: Batch::new(),
            blocked_until: None,
            receiving: false,
            quiet: false,
            siblings: None,
            tap: Tap::default(),
            counters: Counters::default(),
        }
    }

    /// Makes this fabric one of several of its NIC.
    pub(super) fn set_siblings(&mut self, siblings: Siblings) {
        self.siblings = Some(siblings);
    }

    /// The counters of this fabric.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The payload in bytes that full packets of a queue pair have now, as its path allows.
    ///
    /// # Panics
    ///
    /// If `qp` is not adopted.
    pub fn payload(&self, qp: QpId) -> u32 {
        self.pairs.get(qp).payload()
    }

    /// The wire that carries the packets.
    pub fn wire(&self) -> &W {
        &self.wire
    }

    /// The other end of its tap, from which packets come as they are. `mac` is the port's Ethernet
    /// address. Call it once.
    pub fn tracer(&mut self, mac: MacAddress) -> Tracer {
        let (tap, tracer) = super::tap(mac);
        self.tap = tap;
        tracer
    }

    /// The wire, without the rest.
    #[cfg(test)]
    pub(super) fn into_wire(self) -> W {
        self.wire
    }

    /// Moves events from the inbox to `out`, as many as fit beside completions: a peer that floods
    /// us with messages must not keep others from hearing that their requests are done, as what
    /// they may send depends on that.
    fn report(&mut self, out: &mut Vec<Completion>) {
        let capacity = out.capacity();
        let most = capacity - capacity.div_ceil(4).min(capacity.saturating_sub(1));
        while out.len() < most
            && let Some(event) = self.inbox.pop()
        {
            match event {
                Event::Received(qp, message) => {
                    if self.pairs.is_adopted(qp) {
                        out.push(match message {
                            Received::Short(message) => Completion::Received { qp, message },
                            Received::Long(message) => Completion::ReceivedLong { qp, message },
                        });
                    }
                }
                Event::Broke(qp, cause) => {
                    if self.pairs.is_adopted(qp) {
                        self.pairs.of(qp).state = State::Broken;
                        out.push(Completion::Broke { qp, cause });
                    }
                }
            }
        }
    }

    /// Receives one burst.
    fn receive(&mut self, now: Instant, quiet: bool) {
        self.tap.obey(now);
        let trains = if quiet { 0 } else { self.wire.receive(now) };
        self.receiving = trains > 0;
        self.shared.note_link(self.wire.link());
        // The senders may use every key that was registered when these packets arrived.
        self.keys.catch_up(&self.shared);
        for index in 0..trains {
            let train = self.wire.train(index);
            if train.segment_len == 0 || train.source.is_ipv4() != self.local.is_ipv4() {
                self.counters.malformed += 1;
                continue;
            }
            let mut reader = Reader {
                flow: Flow::new(train.source, self.local),
                guess: train.identification.unwrap_or(0),
                train,
            };
            for bytes in train.bytes.chunks(train.segment_len) {
                self.counters.packets_in += 1;
                if self.tap.is_on() {
                    let ends = (self.local, train.source);
                    self.tap.received(now, ends, reader.guess, bytes);
                }
                let (pairs, counters) = (&mut self.pairs, &mut self.counters);
                let pair = reader.read(bytes, pairs, self.siblings.as_ref(), counters);
                let Some((packet, pair)) = pair else { continue };
                let (keys, inbox, ecn) = (&self.keys, &mut self.inbox, Some(train.ecn));
                pair.take_in(now, packet, keys, inbox, ecn, counters);
            }
        }
        self.keys.finish();
    }

    /// Processes packets for us that other fabrics of this NIC received, checked and forwarded.
    fn receive_forwarded(&mut self, now: Instant) {
        let siblings = self.siblings.as_ref().filter(|siblings| siblings.has_forwarded());
        let Some(siblings) = siblings else {
            return;
        };
        self.receiving = true;
        self.keys.catch_up(&self.shared);
        let Self { pairs, keys, inbox, counters, .. } = self;
        siblings.receive_forwarded(|source, bytes| {
            counters.packets_in += 1;
            let packet = Packet::parse(bytes).expect("the other fabric parsed it before");
            match pairs.from(packet.target, source) {
                Some(pair) => pair.take_in(now, packet, keys, inbox, None, counters),
                None => counters.unknown_qp += 1,
            }
        });
        keys.finish();
    }

    /// Sends the packets in the batch. Returns whether the wire took all of them.
    fn flush(&mut self, now: Instant) -> bool {
        if self.batch.is_empty() {
            return true;
        }
        let (tap, local) = (&self.tap, self.local);
        let show = |target, identification, packet: &[u8]| {
            tap.sent(now, (local, target), identification, packet);
        };
        let show = tap.is_on().then_some(&show as Show<'_>);
        let flushed = self.batch.flush(now, &mut self.wire, show);
        self.counters.packets_out += flushed.packets;
        self.counters.runs_refused += flushed.refused;
        let left = self.batch.is_empty();
        self.blocked_until = if left { None } else { Some(now + BLOCKED_WAIT) };
        left
    }

    /// Lets every busy queue pair build its packets. Each turn starts with another queue pair, so
    /// that none is always last. Returns false if the wire was full before all were served.
    fn serve(&mut self, now: Instant) -> bool {
        let count = self.pairs.busy.len();
        self.pairs.turn = self.pairs.turn.wrapping_add(1);
        for step in 0..count {
            let slot = self.pairs.busy[self.pairs.turn.wrapping_add(step) % count];
            let mut budget = PACKETS_PER_TURN_MAX;
            loop {
                let pair = self.pairs.slots[slot].pair.as_mut().expect("busy slots are in use");
                let (batch, wire, counters) = (&mut self.batch, &self.wire, &mut self.counters);
                match pair.fill(now, batch, wire, &mut budget, counters) {
                    Filled::All => break,
                    Filled::BatchFull if self.flush(now) => {}
                    Filled::BatchFull => return false,
                }
            }
        }
        true
    }
}

impl<W: Wire> crate::Fabric for Fabric<W> {
    type Qp = Qp;

    fn adopt(&mut self, _: Instant, qp: Qp) -> QpId {
        self.pairs.adopt(qp, self.local)
    }

    fn room(&self, qp: QpId) -> usize {
        self.pairs.get(qp).room()
    }

    fn post(&mut self, qp: QpId, work: &mut Vec<Work>) {
        let pair = self.pairs.of(qp);
        assert!(work.len() <= pair.room(), "the caller keeps within `room`");
        work.drain(..).for_each(|work| pair.post(work));
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>) {
        // What the caller has seen counts for this call only.
        let quiet = std::mem::take(&mut self.quiet);
        self.report(out);
        // If events remain, `out` has no room for them. Further packets then wait in the socket.
        if self.inbox.is_empty() {
            self.receive(now, quiet);
            self.receive_forwarded(now);
            self.report(out);
        }
        self.pairs.complete(out);
    }

    fn note_signs(&mut self, signs: Signs) {
        // Otherwise a packet that comes a moment later would wait for the next turn.
        self.quiet = signs == Signs::None;
    }

    fn transmit(&mut self, now: Instant) {
        for slot in &self.pairs.busy {
            let pair = self.pairs.slots[*slot].pair.as_mut().expect("busy slots are in use");
            match pair.expire(now, &mut self.counters) {
                News::None => {}
                News::Message(_) => unreachable!("only packets bring messages"),
                News::Broke(cause) => self.inbox.push(Event::Broke(pair.id, cause)),
            }
        }
        if self.flush(now) && self.serve(now) {
            self.flush(now);
        }
        self.pairs.rest();
    }

    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        let forwarded = self.siblings.as_ref().is_some_and(Siblings::has_forwarded);
        // A wire without a descriptor cannot wake the caller, so it must be empty before a sleep.
        let unseen = self.receiving && self.wire.event_descriptor().is_none();
        if !self.inbox.is_empty() || unseen || forwarded || self.pairs.has_completions() {
            return Some(now);
        }
        // What a queue pair said last, if one was released since the last turn.
        self.flush(now);
        let pairs = self.pairs.busy.iter().filter_map(|slot| {
            self.pairs.slots[*slot].pair.as_ref().and_then(|pair| pair.wake_at(now))
        });
        let due = match self.blocked_until {
            // Everything that is due needs the wire, which takes no packets until then.
            Some(until) => Some(until),
            None => pairs.min(),
        };
        // Nothing wakes the caller when packets come, so it looks for them now and then. Peers that
        // ask where we are want an answer also before there is a queue pair.
        let nap =
            self.wire.nap().map(|nap| now + if self.pairs.is_empty() { IDLE_NAP } else { nap });
        [due, nap].into_iter().flatten().min()
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.siblings {
            Some(siblings) => Some(siblings.event_descriptor()),
            None => self.wire.event_descriptor(),
        }
    }

    fn fail(&mut self, _: Instant, qp: QpId) {
        let pair = self.pairs.of(qp);
        if pair.fail() {
            self.inbox.push(Event::Broke(qp, QpError::PortDown));
        }
    }

    fn release(&mut self, now: Instant, qp: QpId) {
        // Otherwise what the peer sent last, its farewell perhaps, would never be acknowledged, and
        // the peer would repeat it until it gives up.
        let (batch, wire, counters) = (&mut self.batch, &self.wire, &mut self.counters);
        let pair = self.pairs.of(qp);
        // In a full batch there is no room for it: then it is one of the packets that get lost.
        let _ = pair.answer(now, Occasion::Last, batch, wire, counters);
        self.pairs.release(qp);
    }

    fn relinquish(&mut self, element: &mut Rmbe, announced: u32) -> usize {
        self.keys.relinquish(element, announced)
    }
}

/// Reads the packets of one train.
struct Reader<'a> {
    flow: Flow,
    train: Train<'a>,
    /// The IP identification that the next packet should have.
    guess: u16,
}

impl Reader<'_> {
    /// Parses a packet, checks its ICRC and finds its queue pair. Packets for other fabrics of the
    /// NIC are forwarded to them.
    fn read<'a, 'p>(
        &mut self,
        bytes: &'a [u8],
        pairs: &'p mut Pairs,
        siblings: Option<&Siblings>,
        counters: &mut Counters,
    ) -> Option<(Packet<'a>, &'p mut Pair)> {
        let guess = self.guess;
        self.guess = guess.wrapping_add(1);
        let Ok(packet) = Packet::parse(bytes) else {
            counters.malformed += 1;
            return None;
        };
        let source = self.train.source;
        if let Some(siblings) = siblings.filter(|siblings| !siblings.share().has(packet.target)) {
            counters.strays += 1;
            // The fabric that has its queue pair knows more about the peer's identifications; but
            // only few packets come this way.
            if self.is_intact(guess, bytes, &mut Identifications::default()) {
                siblings.forward(packet.target, source, bytes);
            } else {
                counters.icrc_errors += 1;
            }
            return None;
        }
        let Some(pair) = pairs.from(packet.target, source) else {
            counters.unknown_qp += 1;
            return None;
        };
        if !self.is_intact(guess, bytes, &mut pair.identifications) {
            counters.icrc_errors += 1;
            return None;
        }
        Some((packet, pair))
    }

    /// Checks the ICRC. `identifications` is what the peer's packets have shown so far.
    fn is_intact(
        &mut self,
        guess: u16,
        bytes: &[u8],
        identifications: &mut Identifications,
    ) -> bool {
        if self.train.identification.is_some() {
            return self.flow.is_intact(guess, bytes);
        }
        match self.flow.identify(guess, bytes) {
            Verdict::Wrong => false,
            Verdict::Right(found) if found == guess => {
                identifications.note(found);
                true
            }
            // Kernels before 6.10 coalesce packets without regard to their identifications: a train
            // may begin anywhere in a run, lack some of its packets, and continue with the next
            // run. The ICRC then detects errors with less than 32 bits; the kernel has also checked
            // the UDP checksum, as it does for all packets that it coalesces.
            Verdict::Right(found) => {
                let believed = identifications.admit(found);
                if believed {
                    self.guess = found.wrapping_add(1);
                }
                believed
            }
        }
    }
}

/// The most packets that one `transmit` sends for one queue pair.
const PACKETS_PER_TURN_MAX: usize = 256;
/// How long at most to sleep without a queue pair, where nothing wakes the caller.
const IDLE_NAP: Duration = Duration::from_millis(1);
/// How long to wait before trying a full wire again.
const BLOCKED_WAIT: Duration = Duration::from_micros(100);
