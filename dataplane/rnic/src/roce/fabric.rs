//! The poller's half: tables of queue pairs and keys, and the two directions of packets.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use smcr_proto::Instant;

use super::batch::{Batch, Train, Wire};
use super::counters::Counters;
use super::icrc::{Flow, Verdict};
use super::inbox::{Event, Inbox};
use super::keys::Keys;
use super::pair::{Filled, News, Pair, State};
use super::pairs::Pairs;
use super::responder::{Occasion, Received};
use super::rnic::Qp;
use super::shared::Shared;
use super::siblings::Siblings;
use super::wire::Packet;
use crate::{Cause, Completion, QpId, Work};

/// A RoCEv2 NIC in software, as its poller sees it.
#[derive(Debug)]
pub struct Fabric<W> {
    local: SocketAddr,
    wire: W,
    shared: Arc<Shared>,
    keys: Keys,
    pairs: Pairs,
    inbox: Inbox,
    batch: Batch,
    /// The wire took no more; it is tried again then at the latest.
    blocked_until: Option<Instant>,
    /// A burst was taken in since the last one that was empty.
    receiving: bool,
    /// The other fabrics of this NIC.
    siblings: Option<Siblings>,
    counters: Counters,
}

impl<W: Wire> Fabric<W> {
    /// The half that shares `shared` with its control thread's half.
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
            siblings: None,
            counters: Counters::default(),
        }
    }

    /// From now on the NIC has other fabrics, too.
    pub(super) fn meet(&mut self, siblings: Siblings) {
        self.siblings = Some(siblings);
    }

    /// What happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Bytes of payload that packets of a queue pair have at most, as its path allows.
    ///
    /// # Panics
    ///
    /// If `qp` is not adopted.
    pub fn payload(&self, qp: QpId) -> u32 {
        self.pairs.get(qp).payload()
    }

    /// What carries the packets.
    pub fn wire(&self) -> &W {
        &self.wire
    }

    /// Tells what waits in the inbox, as far as it fits into `out`.
    fn tell(&mut self, out: &mut Vec<Completion>) {
        while out.len() < out.capacity()
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

    /// Takes in one burst.
    fn receive(&mut self, now: Instant) {
        let trains = self.wire.receive();
        self.receiving = trains > 0;
        // Whoever sent these packets may use every key that was open when they arrived.
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
                let (pairs, counters) = (&mut self.pairs, &mut self.counters);
                let pair = reader.read(bytes, pairs, self.siblings.as_ref(), counters);
                let Some((packet, pair)) = pair else { continue };
                let room = self.inbox.has_room(pair.id);
                let news = pair.handle(now, &packet, &self.keys, room, counters);
                if let Some(event) = event(pair.id, news) {
                    self.inbox.push(event);
                }
            }
        }
    }

    /// Takes in what came to other fabrics of this NIC, which have checked it.
    fn open_mail(&mut self, now: Instant) {
        let Some(siblings) = self.siblings.as_ref().filter(|siblings| siblings.has_mail()) else {
            return;
        };
        self.receiving = true;
        self.keys.catch_up(&self.shared);
        let Self { pairs, keys, inbox, counters, .. } = self;
        siblings.open_mail(|source, bytes| {
            counters.packets_in += 1;
            let packet = Packet::parse(bytes).expect("it was parsed before it was handed over");
            match pairs.from(packet.target, source) {
                Some(pair) => {
                    let room = inbox.has_room(pair.id);
                    let news = pair.handle(now, &packet, keys, room, counters);
                    if let Some(event) = event(pair.id, news) {
                        inbox.push(event);
                    }
                }
                None => counters.unknown_qp += 1,
            }
        });
    }

    /// Sends what the batch holds. Returns whether all of it left.
    fn leave(&mut self, now: Instant) -> bool {
        if self.batch.is_empty() {
            return true;
        }
        let departure = self.batch.leave(&mut self.wire);
        self.counters.packets_out += departure.packets;
        self.counters.runs_refused += departure.refused;
        let left = self.batch.is_empty();
        self.blocked_until = if left { None } else { Some(now + BLOCKED_WAIT) };
        left
    }

    /// Lets every queue pair build what it has to send, beginning with another one each turn.
    /// Returns whether all could.
    fn serve(&mut self, now: Instant, what: Service) -> bool {
        let count = self.pairs.busy.len();
        self.pairs.turn = self.pairs.turn.wrapping_add(1);
        for step in 0..count {
            let slot = self.pairs.busy[self.pairs.turn.wrapping_add(step) % count];
            let mut budget = PACKETS_PER_TURN_MAX;
            loop {
                let pair = self.pairs.slots[slot].pair.as_mut().expect("busy slots are in use");
                let (batch, wire, counters) = (&mut self.batch, &self.wire, &mut self.counters);
                let filled = match what {
                    Service::Everything => pair.fill(now, batch, wire, &mut budget, counters),
                    Service::Answers => {
                        pair.answer(now, Occasion::BeforeSleep, batch, wire, counters)
                    }
                };
                match filled {
                    Filled::All => break,
                    Filled::BatchFull if self.leave(now) => {}
                    Filled::BatchFull => return false,
                }
            }
        }
        true
    }
}

/// What [`Fabric::serve`] sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    Everything,
    Answers,
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
        assert!(work.len() <= pair.room(), "the caller budgets its requests");
        work.drain(..).for_each(|work| pair.post(work));
    }

    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>) {
        self.tell(out);
        // With the inbox not empty the caller has no room: the socket is the better place to wait.
        if self.inbox.is_empty() {
            self.receive(now);
            self.open_mail(now);
            self.tell(out);
        }
        self.pairs.complete(out);
    }

    fn transmit(&mut self, now: Instant) {
        for slot in &self.pairs.busy {
            let pair = self.pairs.slots[*slot].pair.as_mut().expect("busy slots are in use");
            match pair.expire(now, &mut self.counters) {
                News::None => {}
                News::Message(_) => unreachable!("time brings no messages"),
                News::Broke(cause) => self.inbox.push(Event::Broke(pair.id, cause)),
            }
        }
        if self.leave(now) && self.serve(now, Service::Everything) {
            self.leave(now);
        }
        self.pairs.rest();
    }

    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        if self.leave(now) && self.serve(now, Service::Answers) {
            self.leave(now);
        }
        let has_mail = self.siblings.as_ref().is_some_and(Siblings::has_mail);
        // A wire without a descriptor wakes nobody: it must be found empty first.
        let unseen = self.receiving && self.wire.event_descriptor().is_none();
        if !self.inbox.is_empty() || unseen || has_mail || self.pairs.has_completions() {
            return Some(now);
        }
        let pairs = self.pairs.busy.iter().filter_map(|slot| {
            self.pairs.slots[*slot].pair.as_ref().and_then(|pair| pair.wake_at(now))
        });
        match self.blocked_until {
            // Until the wire takes packets again, nothing that is due can be done.
            Some(until) => Some(until),
            None => pairs.min(),
        }
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
            self.inbox.push(Event::Broke(qp, Cause::PortDown));
        }
    }

    fn release(&mut self, _: Instant, qp: QpId) {
        self.pairs.release(qp);
    }
}

/// What a poller is told of `news` about a queue pair.
fn event(id: QpId, news: News) -> Option<Event> {
    match news {
        News::None => None,
        News::Message(message) => Some(Event::Received(id, message)),
        News::Broke(cause) => Some(Event::Broke(id, cause)),
    }
}

/// Reads the packets of one train.
struct Reader<'a> {
    flow: Flow,
    train: Train<'a>,
    /// The identification that the next packet should have.
    guess: u16,
}

impl Reader<'_> {
    /// Takes a packet apart and finds its queue pair, if it is for one and intact. Those of other
    /// fabrics of the NIC are handed over.
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
            if self.is_intact(guess, bytes) {
                siblings.hand_over(packet.target, source, bytes);
            } else {
                counters.icrc_errors += 1;
            }
            return None;
        }
        let Some(pair) = pairs.from(packet.target, source) else {
            counters.unknown_qp += 1;
            return None;
        };
        if !self.is_intact(guess, bytes) {
            counters.icrc_errors += 1;
            return None;
        }
        Some((packet, pair))
    }

    fn is_intact(&mut self, guess: u16, bytes: &[u8]) -> bool {
        if self.train.identification.is_some() {
            return self.flow.is_intact(guess, bytes);
        }
        match self.flow.identify(guess, bytes) {
            Verdict::Wrong => false,
            Verdict::Right(found) if found == guess => true,
            // Kernels before 6.10 join packets whatever their identifications: a train may begin
            // anywhere in a run, miss some of it, and go on into the next. Such a packet has been
            // checked with 16 bits less, and like all that are joined by its UDP checksum.
            Verdict::Right(found) => {
                self.guess = found.wrapping_add(1);
                true
            }
        }
    }
}

/// Packets of one queue pair that one `transmit` sends.
const PACKETS_PER_TURN_MAX: usize = 256;
/// How long to wait for a wire that takes no more.
const BLOCKED_WAIT: Duration = Duration::from_micros(100);
