//! How fast one connection may carry bytes, and whether it waits because of that.

use std::sync::Arc;

use smcr_proto::Instant;

use crate::allowance::{Allowance, Way};
use crate::names::ConnectionId;
use crate::paced::Paced;
use crate::turn::Turn;

/// What one connection has carried, as far as that is limited.
#[derive(Debug)]
pub(crate) struct Pace {
    allowance: Option<Arc<Allowance>>,
    /// Whether there was a limit at the last look.
    is_limited: bool,
    /// Until when what it has carried is paid for, by its own bucket.
    paid_until: [Instant; 2],
    /// It is among the [`Paced`].
    waits: [bool; 2],
    /// It has waited in line, and this is its turn.
    called: Option<Way>,
}

impl Pace {
    /// The pace of a connection that has carried nothing yet.
    pub(crate) fn new(allowance: Option<Arc<Allowance>>) -> Self {
        let is_limited = allowance.as_ref().is_some_and(|it| it.is_limited());
        let paid_until = [Instant(0); 2];
        Self { allowance, is_limited, paid_until, waits: [false; 2], called: None }
    }

    /// Looks whether there is a limit now. Returns whether there is none any more.
    pub(crate) fn refresh(&mut self) -> bool {
        let before = self.is_limited;
        self.is_limited = self.allowance.as_ref().is_some_and(|it| it.is_limited());
        let is_lifted = before && !self.is_limited;
        if is_lifted {
            self.leave();
        }
        is_lifted
    }

    /// The connection waits no more: it leaves the poller, or has no limit.
    pub(crate) fn leave(&mut self) {
        (self.waits, self.called) = ([false; 2], None);
    }

    /// Whether it waits until it may carry more in this direction.
    pub(crate) fn waits(&self, way: Way) -> bool {
        self.waits[way as usize]
    }

    /// Whether it waits in any direction: then it has something to carry, as far as it knows.
    pub(crate) fn is_waiting(&self) -> bool {
        self.waits.contains(&true)
    }

    /// Its wait in this direction is over. Returns whether it has waited at all.
    pub(crate) fn call(&mut self, way: Way) -> bool {
        let has_waited = std::mem::take(&mut self.waits[way as usize]);
        if has_waited {
            self.called = Some(way);
        }
        has_waited
    }

    /// How many bytes it may carry now. Zero: it waits, and has its turn when that is over.
    #[inline]
    pub(crate) fn grant<S>(&mut self, turn: &mut Turn<'_, S>, id: ConnectionId, way: Way) -> u32 {
        if !self.is_limited {
            return u32::MAX;
        }
        let granted = self.grant_limited(turn.now, (id, way), &mut turn.work.paced);
        granted.unwrap_or_else(|| {
            turn.counters.paced.add(1);
            0
        })
    }

    /// How many bytes it may carry now, zero if it waits already; none if it begins to wait.
    #[cold]
    fn grant_limited(
        &mut self,
        now: Instant,
        (id, way): (ConnectionId, Way),
        paced: &mut Paced,
    ) -> Option<u32> {
        if self.waits(way) {
            return Some(0);
        }
        let allowance = self.allowance.as_ref().expect("whoever is limited has one");
        let is_called = self.called.take_if(|called| *called == way).is_some();
        let own = allowance
            .each()
            .map_or(Ok(u32::MAX), |rate| rate.grant(now, self.paid_until[way as usize]));
        let shared = match own {
            Ok(_) if !is_called && paced.has_line(allowance, way) => Err(now),
            Ok(_) => allowance.grant(now, way),
            Err(_) => Ok(u32::MAX),
        };
        match (own, shared) {
            (Ok(own), Ok(shared)) => return Some(own.min(shared)),
            (Err(at), _) => paced.wait_until(at, id, way),
            (Ok(_), Err(at)) => paced.join_line(at, id, way, allowance),
        }
        self.waits[way as usize] = true;
        None
    }

    /// It has carried so many bytes.
    #[inline]
    pub(crate) fn charge(&mut self, now: Instant, way: Way, bytes: u64) {
        if self.is_limited {
            self.charge_limited(now, way, bytes);
        }
    }

    #[cold]
    fn charge_limited(&mut self, now: Instant, way: Way, bytes: u64) {
        let allowance = self.allowance.as_ref().expect("whoever is limited has one");
        allowance.charge(now, way, bytes);
        if let Some(rate) = allowance.each() {
            let paid_until = &mut self.paid_until[way as usize];
            *paid_until = rate.charge(now, *paid_until, bytes);
        }
    }
}
