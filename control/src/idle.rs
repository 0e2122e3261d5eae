//! Connections on which nothing has moved for as long as their listener allows.
//!
//! How many bytes have moved is read from what the pollers publish several times a second; the
//! pollers are not asked.

use std::time::Duration;

use smcr_proto::Instant;

use crate::sessions::{Open, Session, Sessions};
use crate::slab::Key;

/// Looks for idle connections now and then.
#[derive(Debug)]
pub struct IdleWatch {
    /// By listener; zero for none.
    limits: Vec<Duration>,
    look_at: Instant,
    closed: u64,
}

impl IdleWatch {
    /// `limits` are those of the listeners; zero for none.
    pub fn new(now: Instant, limits: Vec<Duration>) -> Self {
        Self { limits, look_at: now, closed: 0 }
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
            let limit = self.limits[usize::from(open.listener)];
            (!limit.is_zero()).then(|| (key, limit, bytes_of(open)))
        });
        let limited: Vec<_> = limited.collect();
        let mut idle = Vec::new();
        for (key, limit, bytes) in limited {
            let Some(Session::Open(open)) = sessions.at_mut(key) else {
                panic!("it was open just now");
            };
            if open.moved.0 != bytes {
                open.moved = (bytes, now);
            } else if now.since(open.moved.1) >= limit {
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
        limited.then_some(self.look_at)
    }

    /// How many connections were reset for being idle.
    pub fn closed(&self) -> u64 {
        self.closed
    }
}

/// How often connections are looked at where a listener limits how long they may be idle.
const LOOK_EVERY: Duration = Duration::from_millis(500);
