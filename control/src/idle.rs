//! Connections on which nothing has moved for as long as their listener allows.
//!
//! How many bytes have moved is read from what the pollers publish several times a second; the
//! pollers are not asked.

use std::collections::BTreeMap;
use std::time::Duration;

use smcr_proto::Instant;

use crate::sessions::{Open, Session, Sessions};
use crate::slab::Key;

/// Looks for idle connections now and then.
#[derive(Debug)]
pub struct IdleWatch {
    /// By listener; zero for none.
    limits: Vec<Duration>,
    /// Of which listeners idle connections are closed, by number: since when, over which time.
    closing: BTreeMap<usize, (Instant, Duration)>,
    look_at: Instant,
    closed: u64,
}

impl IdleWatch {
    /// `limits` are those of the listeners; zero for none.
    pub fn new(now: Instant, limits: Vec<Duration>) -> Self {
        Self { limits, closing: BTreeMap::new(), look_at: now, closed: 0 }
    }

    /// From now on these are the limits of the listeners.
    pub fn change(&mut self, limits: Vec<Duration>) {
        self.limits = limits;
    }

    /// From now on connections of a listener are closed when nothing moves on them. Each has its
    /// time within `over`, so that not all of their clients come back at once.
    pub fn close_over(&mut self, now: Instant, listener: usize, over: Duration) {
        self.closing.insert(listener, (now, over));
        self.look_at = now;
    }

    /// Connections of a listener are closed no more unless they exceed its limit.
    pub fn close_no_more(&mut self, listener: usize) {
        self.closing.remove(&listener);
    }

    /// How long nothing may move on a connection of `listener`; none: for ever.
    fn limit(&self, now: Instant, key: Key, listener: usize) -> Option<Duration> {
        let limit = Some(self.limits[listener]).filter(|limit| !limit.is_zero());
        let closing = self.closing.get(&listener).and_then(|(from, over)| {
            // A multiple of an odd number visits all values, neighbours far from each other.
            let share = f64::from(key.index.wrapping_mul(0x9e37_79b1)) / f64::from(u32::MAX);
            (now >= *from + over.mul_f64(share)).then_some(QUIET)
        });
        limit.into_iter().chain(closing).min()
    }

    /// Connections to be reset because nothing has moved on them for too long. `bytes_of` says how
    /// many bytes have moved on one so far.
    pub fn expire(
        &mut self,
        now: Instant,
        sessions: &mut Sessions,
        bytes_of: impl Fn(&Open) -> u64,
    ) -> Vec<Key> {
        if self.poll_timeout().is_none_or(|at| now < at) {
            return Vec::new();
        }
        self.look_at = now + LOOK_EVERY;
        let limited = sessions.iter().filter_map(|(key, session)| {
            // A rendezvous has deadlines of its own.
            let Session::Open(open) = session else { return None };
            let listener = usize::from(open.listener);
            let is_looked_at =
                !self.limits[listener].is_zero() || self.closing.contains_key(&listener);
            is_looked_at.then(|| (key, self.limit(now, key, listener), bytes_of(open)))
        });
        let limited: Vec<_> = limited.collect();
        let mut idle = Vec::new();
        for (key, limit, bytes) in limited {
            let Some(Session::Open(open)) = sessions.at_mut(key) else {
                panic!("it was open just now");
            };
            if open.moved.0 != bytes {
                open.moved = (bytes, now);
            } else if limit.is_some_and(|limit| now.since(open.moved.1) >= limit) {
                // The reset takes its time where the peer does not answer; once is enough.
                open.moved.1 = now;
                idle.push(key);
            }
        }
        self.closed += idle.len() as u64;
        idle
    }

    /// When [`expire`](Self::expire) must be called, at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let limited = self.limits.iter().any(|limit| !limit.is_zero());
        (limited || !self.closing.is_empty()).then_some(self.look_at)
    }

    /// How many connections were reset for being idle.
    pub fn closed(&self) -> u64 {
        self.closed
    }
}

/// A connection on which nothing has moved for so long may be closed when that is asked for.
const QUIET: Duration = Duration::from_secs(1);
/// How often connections are looked at where a listener limits how long they may be idle.
const LOOK_EVERY: Duration = Duration::from_millis(500);
