//! Connections that exceed a limit of their listener, and those that wait until they do not.

use std::net::IpAddr;

use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::Gateway;
use super::accept::BEGIN_MAX;
use super::reload::number;
use crate::admission::{Caller, Limit, Standing};
use crate::config::OverLimit;
use crate::listener::{Listener, reset};

impl<N: Rnic> Gateway<N> {
    /// Whether the process has as many connections as it may have.
    pub(super) fn is_full(&self) -> bool {
        let waiting = self.listeners.iter().map(|one| one.admission.waiting.len());
        waiting.sum::<usize>() >= self.free()
    }

    /// How many more connections the process may have, if those that wait for their turn did not
    /// have a part of that.
    pub(super) fn free(&self) -> usize {
        // What is kept costs a descriptor, and is there for those that come.
        let all = self.sessions.len() - self.streams.len() + self.introductions.len();
        (self.config.limits.connections_max as usize).saturating_sub(all)
    }

    /// Whether the process has room for one more connection of `source`. Those that wait take up
    /// room as well: if they leave none, the source that has most of them loses its newest.
    pub(super) fn has_room(&mut self, now: Instant, source: IpAddr) -> bool {
        if !self.is_full() {
            return true;
        }
        let Some((busiest, slot)) = self.displaced_by(source) else { return false };
        let waiting = &mut self.listeners[slot].admission.waiting;
        let displaced = waiting.displace(busiest).expect("it has more than one");
        self.give_up(now, number(slot), displaced);
        true
    }

    /// What [`has_room`](Self::has_room) would return, without making the room.
    pub(super) fn may_have_room(&self, source: IpAddr) -> bool {
        !self.is_full() || self.displaced_by(source).is_some()
    }

    /// Which source would lose one that waits, and at which listener, for a connection of `source`.
    fn displaced_by(&self, source: IpAddr) -> Option<(IpAddr, usize)> {
        let waiting = || self.listeners.iter().map(|one| &one.admission.waiting);
        let own: usize = waiting().map(|waiting| waiting.of_source(source)).sum();
        let busiest = waiting().zip(0..).filter_map(|(one, slot)| Some((one.busiest()?, slot)));
        let ((_, busiest), slot) = busiest.max().filter(|((len, _), _)| own + 1 < *len)?;
        Some((busiest, slot))
    }

    /// Lets a connection in, unless it exceeds a limit of listener `index`: then it waits, comes in
    /// without SMC-R, or is refused. Returns whether work was started for it, beyond putting it
    /// into a queue.
    pub(super) fn admit(&mut self, now: Instant, index: u16, caller: Caller) -> bool {
        let Listener { config, admission, .. } = &mut self.listeners[usize::from(index)];
        let bounds = &config.bounds;
        let exceeded = admission.exceeded(now, bounds, caller.source.ip());
        // Those who wait come first, or some of them would wait for ever.
        let crowded = admission.waiting.precede(caller.source.ip());
        match (exceeded, bounds.over_limit) {
            (None, OverLimit::Refuse | OverLimit::Tcp) => {
                self.let_in(now, index, caller, Standing::Within)
            }
            (None, OverLimit::Wait) if !crowded => {
                self.let_in(now, index, caller, Standing::Within)
            }
            (Some(limit), OverLimit::Refuse) => {
                self.refuse(now, index, caller, limit);
                false
            }
            (Some(_), OverLimit::Tcp) => {
                admission.counts.without_smc += 1;
                self.let_in(now, index, caller, Standing::Over)
            }
            (Some(_) | None, OverLimit::Wait) => {
                let (source, until) = (caller.source.ip(), now + bounds.wait_timeout);
                let own = exceeded.is_some_and(Limit::is_of_source);
                if let Some(displaced) = admission.waiting.enter(source, until, own, caller) {
                    self.give_up(now, index, displaced);
                }
                false
            }
        }
    }

    /// Lets those in who have waited, if it is their turn, and refuses those who have waited for
    /// too long.
    pub(super) fn admit_waiting(&mut self, now: Instant) {
        for slot in 0..self.listeners.len() {
            let waiting = &self.listeners[slot].admission.waiting;
            if waiting.poll_timeout().is_some_and(|at| at <= now) {
                self.admit_waiting_at(now, slot);
            }
        }
    }

    fn admit_waiting_at(&mut self, now: Instant, slot: usize) {
        self.listeners[slot].admission.waiting.looked(now);
        let mut begun = 0;
        // They are counted among those that are there.
        while begun < BEGIN_MAX {
            let Listener { config, admission, .. } = &mut self.listeners[slot];
            let Some(caller) = admission.next_waiting(now, &config.bounds) else { break };
            admission.counts.waited += 1;
            begun += usize::from(self.let_in(now, number(slot), caller, Standing::Within));
        }
        for caller in self.listeners[slot].admission.waiting.expire(now) {
            self.give_up(now, number(slot), caller);
        }
    }

    /// When somebody may have waited for long enough, at the latest.
    pub(super) fn next_admission(&self) -> Option<Instant> {
        self.listeners.iter().filter_map(|one| one.admission.waiting.poll_timeout()).min()
    }

    /// Refuses all that wait at a listener, which is no more.
    pub(super) fn turn_waiting_away(&mut self, now: Instant, slot: usize) {
        // A time that no patience reaches.
        for caller in self.listeners[slot].admission.waiting.expire(Instant(u64::MAX)) {
            self.give_up(now, number(slot), caller);
        }
    }

    /// Refuses a connection that has waited in vain.
    fn give_up(&mut self, now: Instant, index: u16, caller: Caller) {
        let Listener { config, admission, .. } = &self.listeners[usize::from(index)];
        let limit = admission.exceeded(now, &config.bounds, caller.source.ip());
        // Otherwise those before it are what it waits for.
        self.refuse(now, index, caller, limit.unwrap_or(Limit::Connections));
    }

    /// Refuses a connection because of this limit.
    pub(super) fn refuse(&mut self, now: Instant, index: u16, caller: Caller, limit: Limit) {
        self.listeners[usize::from(index)].admission.counts.refuse(limit);
        reset(caller.accepted);
        self.turned_away(now, index, Some(caller.source), limit.into());
        self.log_limit(now, index, limit.consequence());
    }
}
