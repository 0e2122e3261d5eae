//! A wire in memory that loses, repeats, reorders and damages packets, as a seed dictates.
//!
//! For tests: the same seed and the same calls give the same packets. Neighbouring packets of a run
//! arrive as one train, as the kernel delivers them, unless something happened to one of them. A
//! router may be on the way that drops large packets, and packets may linger somewhere.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use smcr_proto::Instant;

use super::batch::{Run, SEGMENTS_MAX, Sent, Train, Wire};
use crate::dice::{Chance, Dice};

/// What befalls each packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Odds {
    /// It is lost.
    pub loss: Chance,
    /// It arrives twice.
    pub repeat: Chance,
    /// It overtakes what was sent before it and not yet received.
    pub overtake: Chance,
    /// One of its bits flips.
    pub damage: Chance,
    /// The wire takes no more for now. Rolled per call, not per packet.
    pub block: Chance,
}

/// Carries packets between the wires plugged into it.
#[derive(Clone, Debug)]
pub struct Network {
    inner: Arc<Mutex<Inner>>,
}

/// A plug of a [`Network`].
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
    queues: HashMap<SocketAddr, VecDeque<Arrival>>,
    carried: u64,
    /// Longer packets are dropped.
    len_max: usize,
    /// How many packets linger, and for how long at most.
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
    identification: u16,
    shows_identification: bool,
}

impl Network {
    /// A network without plugs.
    pub fn new(seed: u64, odds: Odds) -> Self {
        let inner = Inner {
            dice: Dice::new(seed),
            odds,
            hides_identification: false,
            cannot_segment: false,
            queues: HashMap::new(),
            carried: 0,
            len_max: usize::MAX,
            linger: (Chance::NEVER, Duration::ZERO),
            lingering: Vec::new(),
            now: Instant(0),
        };
        Self { inner: Arc::new(Mutex::new(inner)) }
    }

    /// From now on the receivers do not see IP headers, like UDP sockets.
    pub fn hide_identification(&self) {
        self.lock().hides_identification = true;
    }

    /// From now on runs of more than one packet are refused, as by a device that cannot split them.
    pub fn refuse_segmentation(&self) {
        self.lock().cannot_segment = true;
    }

    /// From now on other odds apply.
    pub fn change_odds(&self, odds: Odds) {
        self.lock().odds = odds;
    }

    /// From now on a router drops IP packets of more than `bytes` bytes, and says nothing.
    pub fn drop_beyond(&self, bytes: usize) {
        self.lock().len_max = bytes - IP_UDP_LEN;
    }

    /// From now on as many packets linger on their way, for up to `longest`, as `chance` says.
    pub fn linger(&self, chance: Chance, longest: Duration) {
        self.lock().linger = (chance, longest);
    }

    /// It is `now`: those that lingered until then arrive. Returns when the next one will.
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

    /// Packets that were sent so far, lost ones included.
    pub fn carried(&self) -> u64 {
        self.lock().carried
    }

    /// A wire whose address is `local`. If another has it too, packets go to whoever is first.
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
        // Whether the packet before this one is the end of the last train of the queue.
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
                identification: u16::try_from(index).unwrap_or(u16::MAX),
                shows_identification: !self.hides_identification,
            };
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
                Some(train) if joins && !overtakes => train.bytes.extend(&arrival.bytes),
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
    fn receive(&mut self) -> usize {
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
            identification: arrival.shows_identification.then_some(arrival.identification),
        }
    }

    fn send(&mut self, bytes: &[u8], runs: &[Run]) -> Sent {
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
            } else {
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

/// Headers of IPv4 and UDP.
const IP_UDP_LEN: usize = 28;
/// How many trains one can overtake.
const OVERTAKE_MAX: usize = 8;
/// Trains that one `receive` takes.
const BURST_MAX: usize = 64;
/// Trains that wait at a plug; what comes on top costs the oldest its place.
const QUEUE_MAX: usize = 4096;
