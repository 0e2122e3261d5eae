//! All NICs and queue pairs of a network, and the events that happen to them as time passes.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use smcr_memory::{Pinned, Placer, Region};
use smcr_proto::{Gid, Instant, Qpn, Rkey};

use super::queue_pair::{Arrival, Arrived, Event, Executed, InFlight, QueuePair, Stage};
use super::visibility::Hidden;
use super::{Network, Odds};
use crate::dice::Dice;
use crate::{Completion, Domain, Message, Port, QpError, Work};

/// The whole state of a network.
#[derive(Debug)]
pub(super) struct World {
    pub(super) now: Instant,
    pub(super) dice: Dice,
    pub(super) odds: Odds,
    pub(super) nics: Vec<Nic>,
    pub(super) queue_pairs: QueuePairs,
    pub(super) next_qpn: u32,
    pub(super) losses: Losses,
    pub(super) tap: Option<Tap>,
}

/// All queue pairs by QPN. QPNs are unique in the network and never reused.
#[derive(Debug, Default)]
pub(super) struct QueuePairs {
    by_qpn: BTreeMap<Qpn, QueuePair>,
    /// The next event, if somebody has asked since anything changed: everybody asks all the time.
    next: Cell<Option<Option<(Instant, Qpn, Event)>>>,
}

impl QueuePairs {
    /// The next event, and when it is due. At the same instant, lower QPNs come first.
    fn next_event(&self) -> Option<(Instant, Qpn, Event)> {
        let next = self.next.get().unwrap_or_else(|| {
            let events = self.by_qpn.iter();
            let events =
                events.filter_map(|(qpn, pair)| pair.next_event().map(|(at, e)| (at, *qpn, e)));
            events.min()
        });
        self.next.set(Some(next));
        next
    }

    /// What was written to `nic` and is not visible yet. No event depends on that.
    fn hidden_at(&mut self, nic: usize) -> impl Iterator<Item = &mut Hidden> {
        let pairs = self.by_qpn.values_mut().filter(move |pair| pair.nic == nic);
        pairs.map(|pair| &mut pair.hidden)
    }
}

impl Deref for QueuePairs {
    type Target = BTreeMap<Qpn, QueuePair>;

    fn deref(&self) -> &Self::Target {
        &self.by_qpn
    }
}

impl DerefMut for QueuePairs {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.next.set(None);
        &mut self.by_qpn
    }
}

/// What the network has lost so far.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Messages that were acknowledged and then lost.
    pub(super) messages: u64,
    /// One end of each queue pair whose path failed, oldest first, until somebody asks.
    pub(super) paths: Vec<Qpn>,
    /// Both ends of each queue pair that lost acknowledged messages, oldest first, until somebody
    /// asks.
    pub(super) ends: Vec<[Qpn; 2]>,
}

/// The sender and the receiver of a message that arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parcel {
    /// The port it was sent from.
    pub source: Gid,
    /// The port it arrives at.
    pub target: Gid,
    /// The queue pair it arrives on.
    pub qpn: Qpn,
}

/// The function of a test that sees, and may replace, each message that arrives.
pub(super) struct Tap(pub(super) Box<TapFn>);

type TapFn = dyn FnMut(&Parcel, &mut Vec<Message>) + Send;

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tap")
    }
}

/// One NIC.
#[derive(Debug)]
pub(super) struct Nic {
    pub(super) port: Port,
    pub(super) up: bool,
    /// It pins what it registers.
    pub(super) pins: bool,
    pub(super) domains: BTreeSet<u32>,
    pub(super) next_domain: u32,
    pub(super) registered: BTreeMap<Rkey, Registered>,
    /// What it may be asked to send.
    pub(super) send_memory: Option<Region>,
    /// What the NIC has to say to the control thread.
    pub(super) events: VecDeque<crate::Event>,
    /// The last that it said of its port is that it is down.
    pub(super) has_said_down: bool,
}

/// A region that peers may write.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) domain: Domain,
    pub(super) writer: Arc<Writer>,
}

/// How a NIC writes to a region.
#[derive(Debug)]
pub(super) enum Writer {
    /// As one in software.
    Placer(Placer),
    /// As hardware: to pages that stay where they are. Nobody counts the bytes.
    Pinned(Pinned),
}

impl Writer {
    pub(super) fn region(&self) -> &Region {
        match self {
            Self::Placer(placer) => placer.region(),
            Self::Pinned(pinned) => pinned.region(),
        }
    }

    pub(super) fn write(&self, at: usize, bytes: &[u8]) {
        match self {
            Self::Placer(placer) => placer.place(at, bytes),
            Self::Pinned(pinned) => pinned.region().copy_in(at, bytes),
        }
    }
}

/// The outcome of a request at the other end.
enum Reception {
    /// It was executed.
    Executed,
    /// The queue pair does not exist there, is broken, or has another peer. No answer is sent.
    Nobody,
    /// The other end is not connected or adopted yet.
    NotReady,
    /// The other end has no room for another message.
    NoRoom,
    /// The other end refused it: the key, the domain or the range is wrong.
    Refused,
}

impl World {
    pub(super) fn nic_at(&self, gid: Gid) -> Option<usize> {
        self.nics.iter().position(|nic| nic.port.gid == gid)
    }

    /// Processes all events that are due at `now`, in the order of time.
    pub(super) fn advance(&mut self, now: Instant) {
        while let Some((at, qpn, event)) = self.next_event()
            && at <= now
        {
            self.now = self.now.max(at);
            self.process(qpn, event);
        }
        self.now = self.now.max(now);
    }

    /// The next event, and when it is due.
    pub(super) fn next_event(&self) -> Option<(Instant, Qpn, Event)> {
        self.queue_pairs.next_event()
    }

    /// Sends the work requests that were posted.
    pub(super) fn transmit(&mut self, qpn: Qpn) {
        if self.dice.roll(self.odds.break_on_transmit) {
            self.break_both(qpn, QpError::RetriesExceeded);
        }
        let Self { now, dice, odds, queue_pairs, .. } = self;
        let pair = queue_pairs.get_mut(&qpn).expect("an adopted queue pair exists");
        while let Some(work) = pair.posted.pop_front() {
            let arrives = *now + odds.latency(dice);
            let arrives = pair.in_flight.back().map_or(arrives, |last| last.arrives.max(arrives));
            pair.in_flight.push_back(InFlight { work, request: pair.requests, arrives });
            pair.requests += 1;
        }
    }

    /// Breaks this end now and the other one a moment later.
    pub(super) fn break_both(&mut self, qpn: Qpn, cause: QpError) {
        let Some(peer) = self.queue_pairs.get(&qpn).and_then(QueuePair::peer) else { return };
        self.losses.paths.push(qpn);
        self.break_end(qpn, cause);
        self.break_soon(peer, qpn, cause);
    }

    /// Takes a port down and breaks its queue pairs. Peers notice when they next send.
    pub(super) fn port_down(&mut self, nic: usize) {
        let Nic { up, events, has_said_down, .. } = &mut self.nics[nic];
        *up = false;
        if !*has_said_down && self.dice.roll(self.odds.port_events) {
            *has_said_down = true;
            events.push_back(crate::Event::Down);
        }
        let connected = self.queue_pairs.iter();
        let connected = connected.filter(|(_, pair)| pair.nic == nic && pair.peer().is_some());
        let connected: Vec<_> = connected.map(|(qpn, _)| *qpn).collect();
        for qpn in connected {
            self.break_end(qpn, QpError::PortDown);
        }
    }

    /// Brings a port up again.
    pub(super) fn port_up(&mut self, nic: usize) {
        let Nic { up, events, has_said_down, .. } = &mut self.nics[nic];
        *up = true;
        if std::mem::take(has_said_down) {
            events.push_back(crate::Event::Up);
        }
    }

    /// The next completion for the fabric of `nic`, from a queue pair chosen at random.
    pub(super) fn next_completion(&mut self, nic: usize) -> Option<Completion> {
        let Self { dice, queue_pairs, .. } = self;
        let ready = queue_pairs.iter();
        let ready = ready.filter(|(_, pair)| pair.nic == nic && pair.has_completions());
        let mut ready = ready.map(|(qpn, _)| *qpn);
        let chosen = match ready.clone().count() {
            0 => return None,
            several => ready.nth(dice.index(several))?,
        };
        queue_pairs.get_mut(&chosen)?.next_completion(dice)
    }

    /// Whether a completion waits for the fabric of `nic`, or for any fabric if `nic` is `None`.
    pub(super) fn has_completions(&self, nic: Option<usize>) -> bool {
        let mut pairs = self.queue_pairs.values();
        pairs.any(|pair| nic.is_none_or(|nic| nic == pair.nic) && pair.has_completions())
    }

    /// Makes some of the bytes written to `nic` visible earlier than they must be.
    pub(super) fn reveal_some(&mut self, nic: usize) {
        for hidden in self.queue_pairs.hidden_at(nic) {
            hidden.reveal_some(&mut self.dice, self.odds.early);
        }
    }

    fn process(&mut self, qpn: Qpn, event: Event) {
        match event {
            Event::Breaks => {
                let pair = self.queue_pairs.get(&qpn).expect("the event is about it");
                let (_, cause) = pair.breaks.expect("the event comes from this field");
                self.break_end(qpn, cause);
            }
            Event::RetriesEnd => self.break_end(qpn, QpError::RetriesExceeded),
            Event::AcknowledgementArrives => {
                self.queue_pairs.get_mut(&qpn).expect("the event is about it").acknowledge();
            }
            Event::RequestArrives => self.request_arrives(qpn),
        }
    }

    fn request_arrives(&mut self, qpn: Qpn) {
        let pair = self.queue_pairs.get_mut(&qpn).expect("the event is about it");
        let request = pair.in_flight.pop_front().expect("the event is about it");
        let (nic, peer) = (pair.nic, pair.peer().expect("broken ends have nothing in flight"));
        let reception =
            if self.nics[nic].up { self.receive(qpn, peer, &request) } else { Reception::Nobody };
        let soon = self.now + self.odds.latency(&mut self.dice);
        let again = self.now + self.odds.retransmit;
        let retries_end = self.now + self.odds.retry_timeout;
        let pair = self.queue_pairs.get_mut(&qpn).expect("receiving removes nothing");
        match reception {
            Reception::Executed => {
                let last = pair.executed.back().map_or(soon, |last| last.acknowledged.max(soon));
                pair.executed.push_back(Executed { work: request.work, acknowledged: last });
                pair.retries_end = None;
            }
            Reception::NoRoom => {
                pair.in_flight.push_front(InFlight { arrives: again, ..request });
                pair.retries_end = None;
            }
            Reception::NotReady => {
                pair.in_flight.push_front(InFlight { arrives: again, ..request });
                pair.retries_end = pair.retries_end.or(Some(retries_end));
            }
            Reception::Nobody => {
                pair.in_flight.push_front(request);
                pair.lost = true;
                pair.retries_end = pair.retries_end.or(Some(retries_end));
            }
            Reception::Refused => {
                pair.in_flight.push_front(request);
                pair.lost = true;
                pair.breaks = Some((soon, QpError::RemoteError));
                self.break_end(peer, QpError::PeerMisbehaved);
            }
        }
    }

    /// Executes a request of `sender` at `receiver`, if that is possible.
    fn receive(&mut self, sender: Qpn, receiver: Qpn, request: &InFlight) -> Reception {
        let Self { dice, odds, nics, queue_pairs, tap, .. } = self;
        let source = queue_pairs.get(&sender).map(|pair| nics[pair.nic].port.gid);
        let Some(pair) = queue_pairs.get_mut(&receiver) else { return Reception::Nobody };
        if !nics[pair.nic].up {
            return Reception::Nobody;
        }
        match pair.stage {
            Stage::Connected { peer } if peer == sender && pair.id.is_some() => {}
            Stage::Connected { peer } if peer == sender => return Reception::NotReady,
            Stage::Opened => return Reception::NotReady,
            Stage::Connected { .. } | Stage::Broken | Stage::Released => return Reception::Nobody,
        }
        match &request.work {
            Work::SendLong { message, .. } if !pair.takes_long(message.len()) => Reception::Refused,
            Work::Send { .. } | Work::SendLong { .. }
                if pair.inbox.len() >= QueuePair::INBOX_MAX =>
            {
                Reception::NoRoom
            }
            Work::Send { message, .. } => {
                let mut messages = vec![*message];
                if let (Some(Tap(tap)), Some(source)) = (tap, source) {
                    let target = nics[pair.nic].port.gid;
                    tap(&Parcel { source, target, qpn: receiver }, &mut messages);
                }
                let request = request.request;
                let messages = messages.into_iter().map(Arrival::Short);
                pair.inbox.extend(messages.map(|message| Arrived { message, request }));
                Reception::Executed
            }
            Work::SendLong { message, .. } => {
                let message = Arrival::Long(message.clone());
                pair.inbox.push_back(Arrived { message, request: request.request });
                Reception::Executed
            }
            Work::Write { lease, rkey, address, .. } => {
                let Some((writer, at)) =
                    nics[pair.nic].target(pair.domain, *rkey, *address, lease.len())
                else {
                    return Reception::Refused;
                };
                let mut bytes = vec![0; lease.len() as usize];
                lease.copy_out(0, &mut bytes);
                pair.hidden.add(dice, (writer, at), &bytes, request.request);
                pair.hidden.reveal_some(dice, odds.early);
                Reception::Executed
            }
        }
    }

    /// Breaks one end, if it is not broken yet. Its writes become visible at the other end: only
    /// the end that breaks may lose messages and bytes that it had received.
    pub(super) fn break_end(&mut self, qpn: Qpn, cause: QpError) {
        let Self { dice, odds, queue_pairs, losses, .. } = self;
        let Some(pair) = queue_pairs.get_mut(&qpn) else { return };
        let Some(peer) = pair.peer() else { return };
        if dice.roll(odds.lose_on_break) {
            let lost = pair.lose_some(dice);
            losses.messages += lost as u64;
            losses.ends.extend((lost > 0).then_some([qpn, peer]));
        }
        pair.break_now(dice, cause);
        if let Some(peer) = queue_pairs.get_mut(&peer)
            && peer.peer() == Some(qpn)
        {
            peer.hidden.reveal_before(u64::MAX);
        }
    }

    /// Breaks the end `qpn` a moment from now, if it is connected to `peer`.
    fn break_soon(&mut self, qpn: Qpn, peer: Qpn, cause: QpError) {
        let soon = self.now + self.dice.duration(&self.odds.latency);
        if let Some(pair) = self.queue_pairs.get_mut(&qpn)
            && pair.peer() == Some(peer)
            && pair.breaks.is_none()
        {
            pair.breaks = Some((soon, cause));
        }
    }
}

impl Odds {
    /// How long the next request or acknowledgement is in flight.
    fn latency(&self, dice: &mut Dice) -> Duration {
        let range = if dice.roll(self.straggle) { &self.straggling } else { &self.latency };
        dice.duration(range)
    }
}

impl Nic {
    /// The region and offset that a write targets, if queue pairs of `domain` may write the whole
    /// range with `rkey`.
    fn target(
        &self,
        domain: Domain,
        rkey: Rkey,
        address: u64,
        len: u32,
    ) -> Option<(&Arc<Writer>, usize)> {
        let Registered { domain: owner, writer } = self.registered.get(&rkey)?;
        let region = writer.region();
        let at = usize::try_from(address.checked_sub(region.address())?).ok()?;
        let end = at.checked_add(len as usize)?;
        (*owner == domain && end <= region.len()).then_some((writer, at))
    }
}

impl Network {
    /// One end of each queue pair whose path has failed since the last call: by
    /// [`break_qp`](Self::break_qp), or by [`Odds::break_on_transmit`]. What breaks because of
    /// that, or of a port, is not among them.
    pub fn failed_paths(&self) -> Vec<Qpn> {
        std::mem::take(&mut self.lock().losses.paths)
    }

    /// Both ends of each queue pair that has lost acknowledged messages since the last call: first
    /// the end that had received them, then its peer.
    pub fn lossy_pairs(&self) -> Vec<[Qpn; 2]> {
        std::mem::take(&mut self.lock().losses.ends)
    }

    /// The bytes that a write with this key to this address would change at a port: what its host
    /// reads there now. `None` if such a write would be refused.
    pub fn peek(&self, gid: Gid, rkey: Rkey, address: u64, len: u32) -> Option<Vec<u8>> {
        let world = self.lock();
        let nic = &world.nics[world.nic_at(gid)?];
        let domain = nic.registered.get(&rkey)?.domain;
        let (writer, at) = nic.target(domain, rkey, address, len)?;
        let mut bytes = vec![0; len as usize];
        writer.region().copy_out(at, &mut bytes);
        Some(bytes)
    }
}
