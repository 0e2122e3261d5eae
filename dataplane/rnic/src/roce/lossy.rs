//! A wire in memory, for tests, that loses, duplicates, reorders and damages packets, as a seed
//! dictates.
//!
//! The same seed and the same calls give the same packets. Consecutive packets of a run arrive as
//! one train, as the kernel delivers them, unless one of them was affected by a fault. The wire can
//! also drop large packets, as a router would, and delay packets.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use smcr_proto::Instant;

use super::batch::{Ecn, Run, SEGMENTS_MAX, Sent, Train, Wire};
use crate::dice::{Chance, Dice};

/// How likely each fault is, per packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Odds {
    /// It is lost.
    pub loss: Chance,
    /// It arrives twice.
    pub repeat: Chance,
    /// It overtakes packets that were sent before it and not received yet.
    pub overtake: Chance,
    /// It is marked instead of lost, if its sender reacts to marks.
    pub mark: Chance,
    /// One of its bits flips.
    pub damage: Chance,
    /// The wire is full for now. This is rolled per call, not per packet.
    pub block: Chance,
}

/// A network that carries packets between the wires plugged into it.
#[derive(Clone, Debug)]
pub struct Network {
    inner: Arc<Mutex<Inner>>,
}

/// One wire, plugged into a [`Network`].
#[derive(Debug)]
pub struct Lossy {
    local: SocketAddr,
    network: Network,
    burst: Vec<Arrival>,
    segments_max: usize,
}

#[derive(Debug)]
struct Inner {
    dice: Dice,
    odds: Odds,
    hides_identification: bool,
    cannot_segment: bool,
    loses_trains: bool,
    clears_ecn: bool,
    queues: HashMap<SocketAddr, VecDeque<Arrival>>,
    carried: u64,
    /// Longer packets are dropped.
    len_max: usize,
    /// How likely a packet is delayed, and for how long at most.
    linger: (Chance, Duration),
    lingering: Vec<Lingering>,
    now: Instant,
}

#[derive(Debug)]
struct Lingering {
    until: Instant,
    target: SocketAddr,
    arrival: Arrival,
}

#[derive(Clone, Debug)]
struct Arrival {
    source: SocketAddr,
    bytes: Vec<u8>,
    segment_len: usize,
    ecn: Ecn,
    identification: u16,
    shows_identification: bool,
}

impl Network {
    /// Creates a network without wires.
    pub fn new(seed: u64, odds: Odds) -> Self {
        let inner = Inner {
            dice: Dice::new(seed),
            odds,
            hides_identification: false,
            cannot_segment: false,
            loses_trains: false,
            clears_ecn: false,
            queues: HashMap::new(),
            carried: 0,
            len_max: usize::MAX,
            linger: (Chance::NEVER, Duration::ZERO),
            lingering: Vec::new(),
            now: Instant(0),
        };
        Self { inner: Arc::new(Mutex::new(inner)) }
    }

    /// From now on the receivers do not see IP headers, as with UDP sockets.
    pub fn hide_identification(&self) {
        self.lock().hides_identification = true;
    }

    /// From now on all packets arrive as if their senders did not react to marks.
    pub fn clear_ecn(&self) {
        self.lock().clears_ecn = true;
    }

    /// From now on it does so no more.
    pub fn keep_ecn(&self) {
        self.lock().clears_ecn = false;
    }

    /// From now on runs of more than one packet are lost, as where nobody splits them.
    pub fn lose_trains(&self) {
        self.lock().loses_trains = true;
    }

    /// From now on the network refuses runs of more than one packet, as a device does that cannot
    /// split them.
    pub fn refuse_segmentation(&self) {
        self.lock().cannot_segment = true;
    }

    /// Changes the odds from now on.
    pub fn change_odds(&self, odds: Odds) {
        self.lock().odds = odds;
    }

    /// From now on a router drops IP packets of more than `bytes` bytes without reporting it.
    pub fn drop_beyond(&self, bytes: usize) {
        self.lock().len_max = bytes - IP_UDP_LEN;
    }

    /// From now on a packet is delayed with this chance, for up to `longest`.
    pub fn linger(&self, chance: Chance, longest: Duration) {
        self.lock().linger = (chance, longest);
    }

    /// Moves the clock to `now` and delivers the delayed packets that are due. Returns when the
    /// next one is.
    pub fn pass(&self, now: Instant) -> Option<Instant> {
        let mut inner = self.lock();
        inner.now = now;
        let (due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut inner.lingering).into_iter().partition(|it| it.until <= now);
        inner.lingering = later;
        for Lingering { target, arrival, .. } in due {
            if let Some(queue) = inner.queues.get_mut(&target) {
                queue.push_back(arrival);
            }
        }
        inner.lingering.iter().map(|it| it.until).min()
    }

    /// How many packets were sent so far, including lost ones.
    pub fn carried(&self) -> u64 {
        self.lock().carried
    }

    /// Creates a wire whose address is `local`. If several wires have the same address, packets go
    /// to the first.
    pub fn plug(&self, local: SocketAddr) -> Lossy {
        self.lock().queues.entry(local).or_default();
        Lossy { local, network: self.clone(), burst: Vec::new(), segments_max: SEGMENTS_MAX }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Carries `run` from `source`, packet by packet.
    fn carry(&mut self, source: SocketAddr, bytes: &[u8], run: &Run) {
        // Whether the packet before this one is the end of the last train in the queue.
        let mut joins = false;
        for (index, packet) in bytes[run.range.clone()].chunks(run.segment_len).enumerate() {
            self.carried += 1;
            if packet.len() > self.len_max || self.dice.roll(self.odds.loss) {
                joins = false;
                continue;
            }
            let mut arrival = Arrival {
                source,
                bytes: packet.to_vec(),
                segment_len: packet.len(),
                ecn: Ecn::NotCapable,
                identification: u16::try_from(index).unwrap_or(u16::MAX),
                shows_identification: !self.hides_identification,
            };
            if run.reacts && !self.clears_ecn {
                let is_marked = self.odds.mark > Chance::NEVER && self.dice.roll(self.odds.mark);
                arrival.ecn = if is_marked { Ecn::Congested } else { Ecn::Capable };
            }
            if self.dice.roll(self.odds.damage) {
                let at = self.dice.index(packet.len());
                arrival.bytes[at] ^= 1 << self.dice.index(8);
            }
            if self.linger.0 > Chance::NEVER && self.dice.roll(self.linger.0) {
                let until = self.now + self.dice.duration(&(Duration::ZERO..=self.linger.1));
                self.lingering.push(Lingering { until, target: run.target, arrival });
                joins = false;
                continue;
            }
            let overtakes = self.dice.roll(self.odds.overtake);
            let repeats = self.dice.roll(self.odds.repeat);
            let Some(queue) = self.queues.get_mut(&run.target) else { return };
            match queue.back_mut() {
                Some(train) if joins && !overtakes && train.ecn == arrival.ecn => {
                    train.bytes.extend(&arrival.bytes);
                }
                Some(_) if overtakes => {
                    let back = 1 + self.dice.index(queue.len().min(OVERTAKE_MAX));
                    queue.insert(queue.len() - back, arrival.clone());
                }
                Some(_) | None => queue.push_back(arrival.clone()),
            }
            if repeats {
                queue.push_back(arrival);
            }
            joins = !overtakes && !repeats;
            if queue.len() > QUEUE_MAX {
                queue.pop_front();
            }
        }
    }
}

impl Wire for Lossy {
    fn receive(&mut self, _: Instant) -> usize {
        let mut inner = self.network.lock();
        self.burst.clear();
        if let Some(queue) = inner.queues.get_mut(&self.local) {
            let count = queue.len().min(BURST_MAX);
            self.burst.extend(queue.drain(..count));
        }
        self.burst.len()
    }

    fn train(&self, index: usize) -> Train<'_> {
        let arrival = &self.burst[index];
        Train {
            source: arrival.source,
            bytes: &arrival.bytes,
            segment_len: arrival.segment_len,
            ecn: arrival.ecn,
            identification: arrival.shows_identification.then_some(arrival.identification),
        }
    }

    fn send(&mut self, _: Instant, bytes: &[u8], runs: &[Run]) -> Sent {
        let mut inner = self.network.lock();
        let mut sent = Sent::default();
        for run in runs {
            let block = inner.odds.block;
            if inner.dice.roll(block) {
                break;
            }
            if inner.cannot_segment && run.segments > 1 {
                self.segments_max = 1;
                sent.refused += 1;
            } else if !inner.loses_trains || run.segments == 1 {
                inner.carry(self.local, bytes, run);
            }
            sent.runs += 1;
        }
        sent
    }

    fn segments_max(&self) -> usize {
        self.segments_max
    }

    fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Bytes of the IPv4 and UDP headers.
const IP_UDP_LEN: usize = 28;
/// The most trains that one can overtake.
const OVERTAKE_MAX: usize = 8;
/// The most trains that one `receive` returns.
const BURST_MAX: usize = 64;
/// The most trains that wait at a wire. When there are more, the oldest are dropped.
const QUEUE_MAX: usize = 4096;
