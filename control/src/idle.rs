//! Connections on which nothing has moved for as long as their listener allows.
//!
//! How many bytes have moved is read from what the pollers publish several times a second; the
//! pollers are not asked.

use std::time::Duration;

use smcr_engine::Command;
use smcr_engine::gauges::Reading;
use smcr_proto::Instant;
use smcr_rnic::Rnic;

use crate::gateway::Gateway;
use crate::groups::{Pollers, PortId};
use crate::reactor::Key;
use crate::sessions::{Carried, Open, Session};

impl<N: Rnic> Gateway<N> {
    /// What the poller of an open connection says of it.
    pub(crate) fn reading(&self, open: &Open) -> Reading {
        let port = match open.transport {
            Carried::Smc { .. } => {
                self.groups.member(open.connection).map_or(PortId(0), |member| member.port)
            }
            Carried::Tcp { port, .. } => port,
        };
        self.groups.pollers()[port.0].gauges.read(open.connection.slot)
    }

    /// Resets connections that have been idle for too long.
    pub(crate) fn expire_idle(&mut self, now: Instant) {
        let limited = self.listeners.iter().any(|one| !one.config.idle_timeout.is_zero());
        if !limited || now < self.idle_at {
            return;
        }
        self.idle_at = now + LOOK_EVERY;
        for key in self.idle_since(now) {
            tracing::debug!(session = key.index, "an idle connection is reset");
            self.idle_closed += 1;
            self.abort_open(key);
        }
    }

    /// Notes which connections have moved since the last look; those that have not for too long.
    fn idle_since(&mut self, now: Instant) -> Vec<Key> {
        let readings = self.sessions.iter().filter_map(|(key, session)| {
            let Session::Open(open) = session else { return None };
            let limit = self.listeners[usize::from(open.listener)].config.idle_timeout;
            let reading = self.reading(open);
            (!limit.is_zero()).then(|| (key, limit, reading.bytes_in + reading.bytes_out))
        });
        let readings: Vec<_> = readings.collect();
        let mut idle = Vec::new();
        for (key, limit, bytes) in readings {
            let Some(Session::Open(open)) = self.sessions.at_mut(key) else { continue };
            if open.moved.0 != bytes {
                open.moved = (bytes, now);
            } else if now.since(open.moved.1) >= limit {
                // The reset takes its time where the peer does not answer; once is enough.
                open.moved.1 = now;
                idle.push(key);
            }
        }
        idle
    }

    /// Resets a connection that a poller relays, on both sides.
    pub(crate) fn abort_open(&mut self, key: Key) {
        let Some(Session::Open(open)) = self.sessions.at(key) else { return };
        let connection = open.connection;
        match open.transport {
            Carried::Smc { .. } => self.groups.abort(connection),
            Carried::Tcp { port, .. } => {
                self.groups.pollers_mut().command(port, Command::Abort { connection });
            }
        }
    }
}

/// How often connections are looked at where a listener limits how long they may be idle.
const LOOK_EVERY: Duration = Duration::from_millis(500);
