//! RNICs that nobody has listed, and that turn out to be missing while the gateway runs: a name has
//! an address only now, a device or a route has come, or SMC-R goes by a device that has none.
//!
//! A gateway that starts before the network is there would else stay at TCP until somebody reloads.

use std::collections::BTreeSet;
use std::mem;
use std::net::IpAddr;
use std::time::Duration;

use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::Gateway;
use super::rnics::{Arrivals, Names};

/// What says that RNICs may be missing.
#[derive(Debug, Default)]
pub(super) struct Missing {
    /// Names or devices are not what they were.
    is_news: bool,
    /// Addresses of ours at which a connection found none, although its peer has SMC-R.
    at: BTreeSet<IpAddr>,
    /// When was looked for them last.
    looked: Option<Instant>,
    /// Why some could not be opened then. The log has it already.
    obstacles: BTreeSet<String>,
    /// How long connections wait until it is tried again.
    again_after: Duration,
}

impl Missing {
    /// A name means something else now, or devices have changed.
    pub(super) fn heard_news(&mut self) {
        self.is_news = true;
    }

    /// A connection whose peer has SMC-R found no RNIC at this address of ours. The kernel does not
    /// tell us of routes, so this may be the first sign of one.
    pub(super) fn found_none(&mut self, at: IpAddr) {
        self.at.insert(at);
    }

    fn is_due(&self, now: Instant) -> bool {
        let rested = |rest| self.looked.is_none_or(|looked| looked + rest <= now);
        (self.is_news && rested(NEWS_REST)) || (!self.at.is_empty() && rested(self.again_after))
    }
}

impl<N: Rnic> Gateway<N> {
    /// Opens RNICs that are missing, where the operator has listed none.
    pub(super) fn open_missing_rnics(&mut self, now: Instant) {
        if !self.missing.is_due(now) {
            return;
        }
        self.missing.looked = Some(now);
        self.missing.is_news = false;
        let at = mem::take(&mut self.missing.at);
        if !self.config.rnics.is_empty() || self.draining.is_some() {
            return;
        }
        let (mut config, mut obstacles) = (self.config.clone(), Vec::new());
        let wanted = self.opener.wanted(&config, &self.names(), Arrivals::At(&at));
        let opened = self.open_these(wanted, &mut config, &mut obstacles);
        let mut notes = Vec::new();
        match opened {
            Ok(change) => self.change_rnics(now, change, &mut notes),
            Err(why) => obstacles.push(why),
        }
        for note in notes {
            tracing::info!(note, "the network needs it now");
        }
        let known = mem::take(&mut self.missing.obstacles);
        for why in obstacles.iter().filter(|why| !known.contains(*why)) {
            tracing::warn!(why, "connections that need it stay TCP");
        }
        self.missing.again_after = if obstacles.is_empty() { REST } else { REST_AFTER_FAILURE };
        self.missing.obstacles = obstacles.into_iter().collect();
    }

    /// What names of upstreams mean, as far as they mean anything.
    fn names(&self) -> Names {
        let listeners = self.listeners.iter().filter(|one| !one.retired);
        let known = listeners.flat_map(|one| one.pool.known());
        known.map(|(name, addresses)| (name.to_owned(), addresses.to_vec())).collect()
    }
}

/// To look takes some system calls for each upstream, and devices of containers change often.
const NEWS_REST: Duration = Duration::from_secs(1);
/// Connections may come all the time by a device that cannot have an RNIC.
const REST: Duration = Duration::from_secs(5);
/// What could not be opened hardly can a moment later, and to try may start a poller.
const REST_AFTER_FAILURE: Duration = Duration::from_secs(60);
