//! Feeds what connections show of their speed to the comparison of SMC-R and TCP.

use std::net::SocketAddr;
use std::time::Duration;

use smcr_engine::handoff::Tally;
use smcr_proto::Instant;
use smcr_proto::wire::clc::Diagnosis;
use smcr_rnic::Rnic;

use super::Gateway;
use super::effects::reading;
use crate::comparison::{Comparisons, Sample};
use crate::config::Protocol;
use crate::listener::Listener;
use crate::sessions::{Open, Session};
use crate::slab::Key;
use crate::stats::{Peer, Transport};

/// Whether SMC-R is faster than TCP, and the open connections that are looked at for that.
#[derive(Debug, Default)]
pub(super) struct Speeds {
    comparisons: Comparisons,
    watched: Vec<Watched>,
    look_at: Instant,
}

/// An open connection that says now and then how fast it is.
#[derive(Debug)]
struct Watched {
    key: Key,
    server: SocketAddr,
    /// When it came.
    came: Instant,
    transport: Transport,
    /// Bytes in both directions at the last look; none before the first one, because the gauges of
    /// a connection are those of the one before it for a moment.
    bytes: Option<[u64; 2]>,
    looked_at: Instant,
    /// Looks in a row at which too few had moved.
    quiet: u32,
}

impl Speeds {
    /// Why a new connection of `listener` to `target` stays TCP; none if speed is no reason.
    pub(super) fn choose(
        &mut self,
        now: Instant,
        listener: &Listener,
        target: SocketAddr,
    ) -> Option<Diagnosis> {
        (listener.config.connect == Protocol::Smc)
            .then(|| self.comparisons.choose(now, target, listener.config.preference))
            .flatten()
    }

    /// A connection of `listener` has ended.
    pub(super) fn ended(
        &mut self,
        now: Instant,
        key: Key,
        listener: &Listener,
        open: &Open,
        tally: &Tally,
    ) {
        if listener.config.connect != Protocol::Smc {
            return;
        }
        self.watched.retain(|watched| watched.key != key);
        let sample = Sample::of(now, open.came, open.since, tally);
        self.comparisons.note((now, open.came), open.target, open.transport.name(), sample);
    }

    /// What is known of the servers that were used last.
    pub(super) fn rows(&self, now: Instant) -> Vec<Peer> {
        self.comparisons.rows(now)
    }

    /// When open connections must be looked at, at the latest.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        (!self.watched.is_empty()).then_some(self.look_at)
    }

    /// Looks at an open connection from now on, unless there are enough like it.
    fn watch(&mut self, now: Instant, key: Key, open: &Open) {
        let (server, transport) = (open.target, open.transport.name());
        let is_alike = |other: &&Watched| other.server == server && other.transport == transport;
        if self.watched.len() >= WATCHED_MAX
            || self.watched.iter().filter(is_alike).count() >= WATCHED_ALIKE_MAX
        {
            return;
        }
        if self.watched.is_empty() {
            self.look_at = now + LOOK_EVERY;
        }
        let (came, looked_at, quiet) = (open.came, now, 0);
        let bytes = None;
        self.watched.push(Watched { key, server, came, transport, bytes, looked_at, quiet });
    }
}

impl Watched {
    /// Takes note of how far the connection is. Returns whether it may be looked at again.
    fn look(&mut self, now: Instant, bytes: [u64; 2], comparisons: &mut Comparisons) -> bool {
        let time = now.since(self.looked_at);
        if time < LOOK_EVERY {
            return true;
        }
        self.looked_at = now;
        let Some(before) = self.bytes.replace(bytes) else { return true };
        let moved = [0, 1].map(|way| bytes[way].saturating_sub(before[way]));
        match Sample::of_open(moved[0].max(moved[1]), time) {
            Some(sample) => {
                self.quiet = 0;
                comparisons.note((now, self.came), self.server, self.transport, sample);
            }
            None => self.quiet += 1,
        }
        self.quiet < QUIET_MAX
    }
}

impl<N: Rnic> Gateway<N> {
    /// A connection has been handed to its poller: it may be looked at from now on.
    pub(super) fn watch_speed(&mut self, now: Instant, key: Key) {
        let Some(Session::Open(open)) = self.sessions.at_mut(key) else {
            panic!("it has just been opened");
        };
        if self.listeners[usize::from(open.listener)].config.connect == Protocol::Smc {
            self.speeds.watch(now, key, open);
        }
    }

    /// Looks at some open connections.
    pub(super) fn look_at_speeds(&mut self, now: Instant) {
        if self.speeds.poll_timeout().is_none_or(|at| now < at) {
            return;
        }
        self.speeds.look_at = now + LOOK_EVERY;
        let Self { sessions, endpoint, speeds, .. } = self;
        let Speeds { comparisons, watched, .. } = speeds;
        watched.retain_mut(|watched| match sessions.at_mut(watched.key) {
            Some(Session::Open(open)) => {
                let reading = reading(endpoint.groups(), open);
                watched.look(now, [reading.bytes_in, reading.bytes_out], comparisons)
            }
            Some(Session::Negotiating(_) | Session::Kept(_)) | None => false,
        });
    }
}

/// How often open connections are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How many are looked at.
const WATCHED_MAX: usize = 64;
/// How many of one server and transport.
const WATCHED_ALIKE_MAX: usize = 4;
/// One on which nothing happens is not looked at for longer, so that others are.
const QUIET_MAX: u32 = 5;
