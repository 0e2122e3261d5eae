//! Connections that have lasted for as long as their listener allows: nothing moves on them, only
//! one direction is left and nothing moves there, or they are too old.
//!
//! How many bytes have moved is read from what the pollers publish several times a second; the
//! pollers are not asked. Bytes that wait because a limit lets them go only later count as moving.

use std::collections::BTreeMap;
use std::time::Duration;

use smcr_engine::gauges::{Reading, Stage};
use smcr_proto::Instant;

use crate::config::Bounds;
use crate::sessions::{Open, Session, Sessions};
use crate::slab::Key;
use crate::termination::Termination;

/// Looks now and then for connections that must end.
#[derive(Debug)]
pub struct IdleWatch {
    /// By listener.
    limits: Vec<Limits>,
    /// Of which listeners idle connections are closed, by number: since when, over which time.
    closing: BTreeMap<usize, (Instant, Duration)>,
    look_at: Instant,
    closed: Closed,
}

/// How long connections of a listener may last; zero for ever.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    idle: Duration,
    half_closed: Duration,
    age: Duration,
}

/// Why a connection must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expired {
    /// Nothing has moved on it.
    Idle,
    /// One direction has ended, and nothing has moved in the other.
    HalfClosed,
    /// It is too old.
    Aged,
}

/// How many connections were reset, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Closed {
    /// For [`Expired::Idle`].
    pub idle: u64,
    /// For [`Expired::HalfClosed`].
    pub half_closed: u64,
    /// For [`Expired::Aged`].
    pub aged: u64,
}

impl Limits {
    /// What the operator says.
    pub fn of(bounds: &Bounds) -> Self {
        let Bounds { idle_timeout, half_closed_timeout, age_max, .. } = *bounds;
        Self { idle: idle_timeout, half_closed: half_closed_timeout, age: age_max }
    }

    fn are_none(self) -> bool {
        self.idle.is_zero() && self.half_closed.is_zero() && self.age.is_zero()
    }
}

impl Expired {
    /// The reason in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::HalfClosed => "half closed",
            Self::Aged => "too old",
        }
    }
}

impl From<Expired> for Termination {
    fn from(why: Expired) -> Self {
        match why {
            Expired::Idle => Self::Idle,
            Expired::HalfClosed => Self::HalfClosed,
            Expired::Aged => Self::Aged,
        }
    }
}

impl IdleWatch {
    /// `limits` are those of the listeners.
    pub fn new(now: Instant, limits: Vec<Limits>) -> Self {
        Self { limits, closing: BTreeMap::new(), look_at: now, closed: Closed::default() }
    }

    /// From now on these are the limits of the listeners.
    pub fn change(&mut self, limits: Vec<Limits>) {
        self.limits = limits;
    }

    /// From now on connections of a listener are closed when nothing moves on them. Each has its
    /// time within `over`, so that not all of their clients come back at once.
    pub fn close_over(&mut self, now: Instant, listener: usize, over: Duration) {
        self.closing.insert(listener, (now, over));
        self.look_at = now;
    }

    /// Connections of a listener are closed no more unless they exceed its limits.
    pub fn close_no_more(&mut self, listener: usize) {
        self.closing.remove(&listener);
    }

    /// How long nothing may move on a connection of `listener`; none: for ever.
    fn idle_limit(&self, now: Instant, key: Key, listener: usize) -> Option<Duration> {
        let limit = Some(self.limits[listener].idle).filter(|limit| !limit.is_zero());
        let closing = self
            .closing
            .get(&listener)
            .and_then(|(from, over)| (now >= *from + over.mul_f64(share(key))).then_some(QUIET));
        limit.into_iter().chain(closing).min()
    }

    /// Connections to be reset because they have lasted for too long, and why. `reading_of` says
    /// how far one has come.
    pub fn expire(
        &mut self,
        now: Instant,
        sessions: &mut Sessions,
        reading_of: impl Fn(&Open) -> Reading,
    ) -> Vec<(Key, Expired)> {
        if self.poll_timeout().is_none_or(|at| now < at) {
            return Vec::new();
        }
        self.look_at = now + LOOK_EVERY;
        let limited = sessions.iter().filter_map(|(key, session)| {
            // A rendezvous has deadlines of its own.
            let Session::Open(open) = session else { return None };
            if open.expired {
                return None;
            }
            let listener = usize::from(open.listener);
            let is_looked_at =
                !self.limits[listener].are_none() || self.closing.contains_key(&listener);
            is_looked_at.then(|| (key, reading_of(open)))
        });
        let limited: Vec<_> = limited.collect();
        let mut expired = Vec::new();
        for (key, reading) in limited {
            let Some(Session::Open(open)) = sessions.at_mut(key) else {
                panic!("it was open just now");
            };
            note(now, open, reading);
            let Some(why) = self.verdict(now, key, open) else { continue };
            // The reset takes its time where the peer does not answer; once is enough.
            open.expired = true;
            match why {
                Expired::Idle => self.closed.idle += 1,
                Expired::HalfClosed => self.closed.half_closed += 1,
                Expired::Aged => self.closed.aged += 1,
            }
            expired.push((key, why));
        }
        expired
    }

    /// Whether a connection has lasted for too long.
    fn verdict(&self, now: Instant, key: Key, open: &Open) -> Option<Expired> {
        let listener = usize::from(open.listener);
        let Limits { half_closed, age, .. } = self.limits[listener];
        let quiet_since = open.moved.1;
        if self.idle_limit(now, key, listener).is_some_and(|limit| now.since(quiet_since) >= limit)
        {
            return Some(Expired::Idle);
        }
        let half_quiet = open.half_closed.map(|since| now.since(since.max(quiet_since)));
        if !half_closed.is_zero() && half_quiet.is_some_and(|quiet| quiet >= half_closed) {
            return Some(Expired::HalfClosed);
        }
        // Up to a tenth earlier: what began at once does not end at once.
        let age_limit = age.mul_f64(1.0 - SPREAD * share(key));
        (!age.is_zero() && now.since(open.since) >= age_limit).then_some(Expired::Aged)
    }

    /// When [`expire`](Self::expire) must be called, at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let limited = self.limits.iter().any(|limits| !limits.are_none());
        (limited || !self.closing.is_empty()).then_some(self.look_at)
    }

    /// How many connections were reset.
    pub fn closed(&self) -> Closed {
        self.closed
    }
}

/// Notes how far a connection has come.
fn note(now: Instant, open: &mut Open, reading: Reading) {
    let bytes = reading.bytes_in + reading.bytes_out;
    if open.moved.0 != bytes || reading.paced {
        open.moved = (bytes, now);
    }
    match reading.stage {
        Stage::HalfClosed => {
            open.half_closed.get_or_insert(now);
        }
        Stage::Active | Stage::Closing => open.half_closed = None,
    }
}

/// A number from 0 to 1 for each connection: neighbours are far from each other.
fn share(key: Key) -> f64 {
    // A multiple of an odd number visits all values.
    f64::from(key.index.wrapping_mul(0x9e37_79b1)) / f64::from(u32::MAX)
}

/// A connection on which nothing has moved for so long may be closed when that is asked for.
const QUIET: Duration = Duration::from_secs(1);
/// How often connections are looked at where a listener limits how long they may last.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The share of `age_max` over which connections of one age end.
const SPREAD: f64 = 0.1;
