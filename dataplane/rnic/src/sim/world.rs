//! All NICs and queue pairs of a network, and what happens to them as time passes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use smcr_memory::Region;
use smcr_proto::{Gid, Instant, Qpn, Rkey};

use super::Odds;
use super::queue_pair::{Arrival, Arrived, Event, Executed, Flying, QueuePair, Stage};
use crate::dice::Dice;
use crate::{Cause, Completion, Domain, Message, Port, Work};

/// Everything there is.
#[derive(Debug)]
pub(super) struct World {
    pub(super) now: Instant,
    pub(super) dice: Dice,
    pub(super) odds: Odds,
    pub(super) nics: Vec<Nic>,
    /// Numbers are unique in the network and never reused.
    pub(super) queue_pairs: BTreeMap<Qpn, QueuePair>,
    pub(super) next_qpn: u32,
    /// Messages that were acknowledged and then lost.
    pub(super) lost: u64,
    pub(super) tap: Option<Tap>,
}

/// Where a message that arrives comes from and goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parcel {
    /// The port it was sent from.
    pub source: Gid,
    /// The port it arrives at.
    pub target: Gid,
    /// The queue pair it arrives on.
    pub qpn: Qpn,
}

/// Whoever meddles with what arrives.
pub(super) struct Tap(pub(super) Box<Meddler>);

type Meddler = dyn FnMut(&Parcel, &mut Vec<Message>) + Send;

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
    pub(super) domains: BTreeSet<u32>,
    pub(super) next_domain: u32,
    pub(super) registered: BTreeMap<Rkey, Registered>,
}

/// A region that peers may write.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) domain: Domain,
    pub(super) region: Region,
}

/// What a request meets at the other end.
enum Reception {
    /// It was carried out.
    Executed,
    /// Nobody is there, or nobody who listens to this sender.
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

    /// Lets everything happen that is due at `now`, in the order of time.
    pub(super) fn advance(&mut self, now: Instant) {
        while let Some((at, qpn, event)) = self.next_event()
            && at <= now
        {
            self.now = self.now.max(at);
            self.happen(qpn, event);
        }
        self.now = self.now.max(now);
    }

    /// What happens next. At the same instant, lower numbers come first.
    pub(super) fn next_event(&self) -> Option<(Instant, Qpn, Event)> {
        let events = self.queue_pairs.iter();
        let events =
            events.filter_map(|(qpn, pair)| pair.next_event().map(|(at, e)| (at, *qpn, e)));
        events.min()
    }

    /// Brings what was posted onto the wire.
    pub(super) fn transmit(&mut self, qpn: Qpn) {
        if self.dice.roll(self.odds.break_on_transmit) {
            self.break_both(qpn, Cause::RetriesExceeded);
        }
        let Self { now, dice, odds, queue_pairs, .. } = self;
        let pair = queue_pairs.get_mut(&qpn).expect("its fabric has it");
        while let Some(work) = pair.posted.pop_front() {
            let arrives = *now + odds.travel(dice);
            let arrives = pair.flying.back().map_or(arrives, |last| last.arrives.max(arrives));
            pair.flying.push_back(Flying { work, request: pair.requests, arrives });
            pair.requests += 1;
        }
    }

    /// Breaks this end now and the other a moment later.
    pub(super) fn break_both(&mut self, qpn: Qpn, cause: Cause) {
        let Some(peer) = self.queue_pairs.get(&qpn).and_then(QueuePair::peer) else { return };
        self.break_end(qpn, cause);
        self.break_soon(peer, qpn, cause);
    }

    /// The port goes down, and its queue pairs with it. Peers notice when they next send.
    pub(super) fn port_down(&mut self, nic: usize) {
        self.nics[nic].up = false;
        let connected = self.queue_pairs.iter();
        let connected = connected.filter(|(_, pair)| pair.nic == nic && pair.peer().is_some());
        let connected: Vec<_> = connected.map(|(qpn, _)| *qpn).collect();
        for qpn in connected {
            self.break_end(qpn, Cause::PortDown);
        }
    }

    /// One piece of news for the fabric of `nic`, from a queue pair that chance picks.
    pub(super) fn tell(&mut self, nic: usize) -> Option<Completion> {
        let talkers = self.queue_pairs.iter();
        let talkers = talkers.filter(|(_, pair)| pair.nic == nic && pair.has_news());
        let talkers: Vec<Qpn> = talkers.map(|(qpn, _)| *qpn).collect();
        if talkers.is_empty() {
            return None;
        }
        let chosen = talkers[self.dice.index(talkers.len())];
        self.queue_pairs.get_mut(&chosen)?.tell(&mut self.dice)
    }

    /// Whether the fabric of `nic`, or of any, could be told something now.
    pub(super) fn has_news(&self, nic: Option<usize>) -> bool {
        let mut pairs = self.queue_pairs.values();
        pairs.any(|pair| nic.is_none_or(|nic| nic == pair.nic) && pair.has_news())
    }

    /// Lets some of what was written to `nic` appear earlier than it must.
    pub(super) fn reveal_some(&mut self, nic: usize) {
        for pair in self.queue_pairs.values_mut().filter(|pair| pair.nic == nic) {
            pair.hidden.reveal_some(&mut self.dice, self.odds.early);
        }
    }

    fn happen(&mut self, qpn: Qpn, event: Event) {
        match event {
            Event::Breaks => {
                let pair = self.queue_pairs.get(&qpn).expect("an event of its own");
                let (_, cause) = pair.breaks.expect("an event of its own");
                self.break_end(qpn, cause);
            }
            Event::GivesUp => self.break_end(qpn, Cause::RetriesExceeded),
            Event::AcknowledgementArrives => {
                self.queue_pairs.get_mut(&qpn).expect("an event of its own").acknowledge();
            }
            Event::RequestArrives => self.request_arrives(qpn),
        }
    }

    fn request_arrives(&mut self, qpn: Qpn) {
        let pair = self.queue_pairs.get_mut(&qpn).expect("an event of its own");
        let flying = pair.flying.pop_front().expect("an event of its own");
        let (nic, peer) = (pair.nic, pair.peer().expect("broken ends have nothing in flight"));
        let reception =
            if self.nics[nic].up { self.receive(qpn, peer, &flying) } else { Reception::Nobody };
        let soon = self.now + self.odds.travel(&mut self.dice);
        let again = self.now + self.odds.retransmit;
        let gives_up = self.now + self.odds.retry_timeout;
        let pair = self.queue_pairs.get_mut(&qpn).expect("receiving removes nothing");
        match reception {
            Reception::Executed => {
                let last = pair.executed.back().map_or(soon, |last| last.acknowledged.max(soon));
                pair.executed.push_back(Executed { work: flying.work, acknowledged: last });
                pair.gives_up = None;
            }
            Reception::NoRoom => {
                pair.flying.push_front(Flying { arrives: again, ..flying });
                pair.gives_up = None;
            }
            Reception::NotReady => {
                pair.flying.push_front(Flying { arrives: again, ..flying });
                pair.gives_up = pair.gives_up.or(Some(gives_up));
            }
            Reception::Nobody => {
                pair.flying.push_front(flying);
                pair.lost = true;
                pair.gives_up = pair.gives_up.or(Some(gives_up));
            }
            Reception::Refused => {
                pair.flying.push_front(flying);
                pair.lost = true;
                pair.breaks = Some((soon, Cause::RemoteError));
                self.break_end(peer, Cause::PeerMisbehaved);
            }
        }
    }

    /// Carries out a request of `sender` at `receiver`, if that is possible.
    fn receive(&mut self, sender: Qpn, receiver: Qpn, flying: &Flying) -> Reception {
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
        match &flying.work {
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
                let request = flying.request;
                let messages = messages.into_iter().map(Arrival::Short);
                pair.inbox.extend(messages.map(|message| Arrived { message, request }));
                Reception::Executed
            }
            Work::SendLong { message, .. } => {
                let message = Arrival::Long(message.clone());
                pair.inbox.push_back(Arrived { message, request: flying.request });
                Reception::Executed
            }
            Work::Write { lease, rkey, address, .. } => {
                let Some((region, at)) =
                    nics[pair.nic].target(pair.domain, *rkey, *address, lease.len())
                else {
                    return Reception::Refused;
                };
                let mut bytes = vec![0; lease.len() as usize];
                lease.copy_out(0, &mut bytes);
                pair.hidden.add(dice, (region, at), &bytes, flying.request);
                pair.hidden.reveal_some(dice, odds.early);
                Reception::Executed
            }
        }
    }

    /// Breaks one end, if it still works. What it had brought to the other end is there to stay:
    /// only an end that itself breaks may lose what it had taken in.
    pub(super) fn break_end(&mut self, qpn: Qpn, cause: Cause) {
        let Self { dice, odds, queue_pairs, lost, .. } = self;
        let Some(pair) = queue_pairs.get_mut(&qpn) else { return };
        let Some(peer) = pair.peer() else { return };
        if dice.roll(odds.lose_on_break) {
            *lost += pair.lose_some(dice) as u64;
        }
        pair.break_now(dice, cause);
        if let Some(peer) = queue_pairs.get_mut(&peer)
            && peer.peer() == Some(qpn)
        {
            peer.hidden.reveal_before(u64::MAX);
        }
    }

    /// Breaks one end a moment from now, if it is connected to `peer`.
    fn break_soon(&mut self, qpn: Qpn, peer: Qpn, cause: Cause) {
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
    /// How long the next request or acknowledgement travels.
    fn travel(&self, dice: &mut Dice) -> Duration {
        let range = if dice.roll(self.straggle) { &self.straggling } else { &self.latency };
        dice.duration(range)
    }
}

impl Nic {
    /// Where a write lands, if `rkey` opens all of its range to queue pairs of `domain`.
    fn target(
        &self,
        domain: Domain,
        rkey: Rkey,
        address: u64,
        len: u32,
    ) -> Option<(&Region, usize)> {
        let Registered { domain: owner, region } = self.registered.get(&rkey)?;
        let at = usize::try_from(address.checked_sub(region.address())?).ok()?;
        let end = at.checked_add(len as usize)?;
        (*owner == domain && end <= region.len()).then_some((region, at))
    }
}
