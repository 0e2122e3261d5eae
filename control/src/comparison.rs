//! Which of SMC-R and TCP is faster towards each server, as far as connections have found out.
//!
//! Acceleration that is slower than what it replaces must not go unnoticed: a switch that drops
//! RoCE, a queue that is too short, a host that is too busy. So each connection that ends says how
//! long its first answer took, and how fast it carried bytes; a few that are open say so once a
//! second. SMC-R counts as slower when even its quickest quarter is slower than three quarters of
//! the connections over TCP. That rarely happens by chance, whatever they are used for.
//!
//! ```text
//!   ended, open ─► note ─► judge ─► standing ─► choose ─► SMC-R, or TCP and why
//! ```
//! Nothing here opens a socket or reads a clock.

mod arm;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use smcr_proto::Instant;
use smcr_proto::wire::clc::Diagnosis;

pub use arm::Sample;
use arm::{Arm, Measure};

use crate::config::Preference;
use crate::stats::{Measured, Peer as PeerRow, Transport};

/// What is known of each server to which SMC-R was used, or was to be used.
#[derive(Debug, Default)]
pub struct Comparisons {
    peers: HashMap<SocketAddr, Peer>,
}

#[derive(Debug, Default)]
struct Peer {
    smc: Arm,
    tcp: Arm,
    /// As long as SMC-R is slower.
    slower: Option<Slower>,
    /// Connections since the last one that stayed TCP to be compared.
    uncompared: u32,
    judged_at: Option<Instant>,
    used_at: Instant,
}

/// SMC-R is slower than TCP.
#[derive(Clone, Copy, Debug)]
struct Slower {
    /// In what.
    measure: Measure,
    /// Only connections that came later say whether it still is.
    since: Instant,
    /// When the next connection tries SMC-R again.
    trial_at: Instant,
    /// How long after that another one does.
    wait: Duration,
}

impl Comparisons {
    /// Why a new connection to `peer` stays TCP; none if nothing here speaks against SMC-R.
    pub fn choose(
        &mut self,
        now: Instant,
        peer: SocketAddr,
        preference: Preference,
    ) -> Option<Diagnosis> {
        let peer = self.peers.get_mut(&peer)?;
        peer.used_at = now;
        match &mut peer.slower {
            Some(slower) if preference.fastest => {
                if now < slower.trial_at {
                    return Some(Diagnosis::TCP_IS_FASTER);
                }
                slower.trial_at = now + slower.wait;
                None
            }
            Some(_) | None => peer.compare(now, preference.compare_every),
        }
    }

    /// A connection to `address` that came at `came` was carried by `transport`, or has been so
    /// far, and has shown this.
    pub fn note(
        &mut self,
        (now, came): (Instant, Instant),
        address: SocketAddr,
        transport: Transport,
        sample: Sample,
    ) {
        if !self.peers.contains_key(&address) {
            // Whoever has no SMC-R is not compared.
            if transport == Transport::Tcp {
                return;
            }
            self.make_room();
        }
        let peer = self.peers.entry(address).or_default();
        peer.used_at = now;
        let is_old = peer.slower.is_some_and(|slower| came < slower.since);
        match transport {
            Transport::SmcR if is_old => return,
            Transport::SmcR => peer.smc.add(now, sample),
            Transport::Tcp => peer.tcp.add(now, sample),
        }
        match peer.slower {
            None if peer.judged_at.is_none_or(|at| now.since(at) >= JUDGE_EVERY) => {
                peer.judged_at = Some(now);
                peer.judge(now, address);
            }
            Some(slower) if transport == Transport::SmcR && slower.measure.is_in(&sample) => {
                peer.judge_trial(now, address, slower);
            }
            None | Some(_) => {}
        }
    }

    /// What is known, of the servers that were used last.
    pub fn rows(&self, now: Instant) -> Vec<PeerRow> {
        let mut peers: Vec<_> = self.peers.iter().collect();
        peers.sort_by_key(|(address, peer)| (std::cmp::Reverse(peer.used_at), **address));
        let row = |(address, peer): (&SocketAddr, &Peer)| PeerRow {
            address: address.to_string(),
            slower: peer.slower.map_or("", |slower| slower.measure.name()).to_owned(),
            smc: peer.smc.measured(now),
            tcp: peer.tcp.measured(now),
        };
        peers.into_iter().take(ROWS_MAX).map(row).collect()
    }

    /// Forgets the server that was not used for longest, if there is no room for another.
    fn make_room(&mut self) {
        if self.peers.len() >= PEERS_MAX
            && let Some((oldest, _)) = self.peers.iter().min_by_key(|(_, peer)| peer.used_at)
        {
            let oldest = *oldest;
            self.peers.remove(&oldest);
        }
    }
}

impl Peer {
    /// Has a few connections stay TCP, so that SMC-R can be compared: one of `every`, more often
    /// while nothing is known of TCP.
    fn compare(&mut self, now: Instant, every: u32) -> Option<Diagnosis> {
        if every == 0 || !Measure::ALL.iter().any(|it| self.smc.of(*it).is_telling(now)) {
            return None;
        }
        let known = Measure::ALL.iter().all(|measure| {
            let needed = self.smc.of(*measure).is_telling(now);
            !needed || self.tcp.of(*measure).is_telling(now)
        });
        let every = if known { every } else { every.min(COMPARE_FIRST) };
        self.uncompared += 1;
        if self.uncompared < every {
            return None;
        }
        self.uncompared = 0;
        Some(Diagnosis::TCP_TO_COMPARE)
    }

    /// Decides whether SMC-R is slower.
    fn judge(&mut self, now: Instant, address: SocketAddr) {
        let Some(measure) = self.finds_slower(now) else { return };
        let [smc, tcp] = self.figures(now, measure);
        let what = measure.name();
        tracing::warn!(peer = %address, what, smc, tcp, "SMC-R is slower than TCP");
        // What follows is of connections that try whether it still is.
        self.smc.forget();
        let (trial_at, wait) = (now + TRIAL_FIRST, TRIAL_FIRST);
        self.slower = Some(Slower { measure, since: now, trial_at, wait });
    }

    /// Decides whether SMC-R still is slower, after another connection has tried it.
    fn judge_trial(&mut self, now: Instant, address: SocketAddr, mut slower: Slower) {
        let good = self.good_trials(now, slower.measure);
        if good == TRIALS {
            let [smc, tcp] = self.figures(now, slower.measure);
            tracing::info!(peer = %address, smc, tcp, "SMC-R is no slower than TCP any more");
            self.slower = None;
            return;
        }
        // A good one is confirmed soon.
        slower.wait = if good > 0 { TRIAL_FIRST } else { TRIAL_MAX.min(slower.wait * 2) };
        slower.trial_at = now + slower.wait;
        self.slower = Some(slower);
    }

    /// In what SMC-R is slower, unless it makes up for that.
    fn finds_slower(&self, now: Instant) -> Option<Measure> {
        let slower = |measure: Measure| {
            let (smc, tcp) = (self.smc.of(measure), self.tcp.of(measure));
            match (smc.quick(now), tcp.slow(now)) {
                (Some(smc), Some(tcp)) => smc > measure.tolerance(tcp),
                (_, _) => false,
            }
        };
        // Bytes per second count for more than the first of them.
        let carries_more = || {
            let (smc, tcp) = (self.smc.of(Measure::Throughput), self.tcp.of(Measure::Throughput));
            match (smc.middle(now), tcp.quick(now)) {
                (Some(smc), Some(tcp)) => tcp > Measure::Throughput.tolerance(smc),
                (_, _) => false,
            }
        };
        if slower(Measure::Throughput) {
            Some(Measure::Throughput)
        } else if slower(Measure::FirstByte) && !carries_more() {
            Some(Measure::FirstByte)
        } else {
            None
        }
    }

    /// How many of the last trials over SMC-R were as good as TCP.
    fn good_trials(&self, now: Instant, measure: Measure) -> usize {
        // Without anything to compare it with, SMC-R is what the operator wants.
        let limit = self.tcp.of(measure).middle(now).map(|tcp| measure.tolerance(tcp));
        let last = self.smc.of(measure).newest(TRIALS);
        last.take_while(|cost| limit.is_none_or(|limit| *cost <= limit)).count()
    }

    /// What a person reads in the log: the middle of both arms.
    fn figures(&self, now: Instant, measure: Measure) -> [String; 2] {
        [&self.smc, &self.tcp].map(|arm| measure.words(arm.of(measure).middle(now).unwrap_or(0)))
    }
}

impl Arm {
    fn measured(&self, now: Instant) -> Measured {
        let [first_byte, throughput] = Measure::ALL.map(|measure| self.of(measure).middle(now));
        Measured {
            samples: self.samples,
            first_byte_ns: first_byte.unwrap_or(0),
            bytes_per_s: throughput.map_or(0, Measure::bytes_per_s),
        }
    }
}

/// How often the standing of a server is judged anew, at most.
const JUDGE_EVERY: Duration = Duration::from_millis(100);
/// One connection of so many stays TCP while nothing is known of TCP.
const COMPARE_FIRST: u32 = 8;
/// So many trials in a row must be good before SMC-R is used again.
const TRIALS: usize = 3;
/// How soon SMC-R is tried again; each time in vain it is twice as long.
const TRIAL_FIRST: Duration = Duration::from_millis(500);
/// The longest time between two trials.
const TRIAL_MAX: Duration = Duration::from_secs(8);
/// Servers that are remembered at most.
const PEERS_MAX: usize = 1_024;
/// Servers that operators see at most.
const ROWS_MAX: usize = 64;

#[cfg(test)]
mod tests;
