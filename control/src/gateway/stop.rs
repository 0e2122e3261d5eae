//! How a gateway stops.

use std::time::Duration;

use smcr_proto::Instant;
use smcr_proto::wire::llc::DeleteReason;
use smcr_rnic::Rnic;

use super::Gateway;
use crate::slab::Key;
use crate::termination::Termination;

impl<N: Rnic> Gateway<N> {
    /// Stops accepting; what goes on may finish. Connections that the kernel has completed but
    /// for which nothing was done yet are reset: their applications try elsewhere at once.
    pub(super) fn drain(&mut self, now: Instant) {
        let limit = self.config.drain_timeout;
        tracing::info!(
            connections = self.sessions.len(),
            ms = limit.as_millis(),
            "stopping: no new connections are accepted, open ones may finish"
        );
        self.service.stopping();
        // From now on they go where applications want them to.
        self.interception.cease();
        self.leave_listeners_alone();
        for listener in &mut self.listeners {
            // Whoever has bound it for us has it still: what waits there is left to who comes next.
            let socket = listener.socket.take();
            socket.into_iter().for_each(|socket| self.reactor.forget(socket));
        }
        self.turn_arrived_away(now);
        self.turn_all_away(now);
        for slot in 0..self.listeners.len() {
            self.turn_waiting_away(now, slot);
        }
        self.draining = Some(now + limit);
        self.mind_passed();
        self.endpoint.drain();
        self.close_all_kept(None);
        self.settle(now);
    }

    /// Nothing is left to wait for.
    pub(super) fn is_drained(&mut self) -> bool {
        self.draining.is_some() && self.is_idle(self.clock.now())
    }

    /// Their time is over: resets whatever is left.
    pub(super) fn abort_all(&mut self, now: Instant) {
        self.draining = Some(Instant(u64::MAX));
        let keys: Vec<Key> = self.sessions.iter().map(|(key, _)| key).collect();
        tracing::warn!(connections = keys.len(), "no time is left: resetting the rest");
        for key in keys {
            self.abort(key, Termination::Stopped);
        }
        self.settle(now);
    }

    /// Takes leave of peers, then ends the pollers.
    pub(super) fn close_down(&mut self) {
        let now = self.clock.now();
        let groups: Vec<_> = self.endpoint.groups().iter().map(|(id, _)| id).collect();
        for group in groups {
            // RFC 7609 4.8.3 #1: end connections on graceful shutdown
            self.endpoint.groups_mut().shut_down(now, group, DeleteReason::OPERATOR);
        }
        self.settle(now);
        // DELETE LINK has no answer worth waiting for, but must leave before the queue pair goes.
        let until = now + FAREWELL;
        while !self.endpoint.groups().is_empty() && self.clock.now() < until {
            for poller in self.endpoint.groups_mut().pollers_mut() {
                poller.catch_up();
            }
            self.take_reports(self.clock.now());
            std::thread::sleep(Duration::from_millis(1));
        }
        for poller in self.endpoint.groups_mut().pollers_mut() {
            poller.stop();
        }
        self.farewells.cut_all_short();
        tracing::info!("stopped");
    }
}

/// How long a stop waits for queue pairs to be given up.
const FAREWELL: Duration = Duration::from_millis(500);
