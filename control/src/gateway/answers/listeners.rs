//! What operators see of listeners.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::Gateway;
use crate::admission::Limit;
use crate::config::Protocol;
use crate::listener::Listener as ListenerAtWork;
use crate::stats::{Listener, Upstream};
use crate::upstreams::Target;

impl<N: Rnic> Gateway<N> {
    /// One row for each listener that has connections or may have some.
    pub(super) fn listener_rows(&self, now: Instant) -> Vec<Listener> {
        let there = self.listeners.iter().filter(|one| !one.is_gone());
        // Programs with the preload library come in by a door, and by no address.
        let door = self.config.local.door.as_ref().map(|door| door.socket.display().to_string());
        let where_at = |one: &ListenerAtWork| match &door {
            Some(door) if one.local => door.clone(),
            Some(_) | None => one.config.bind.to_string(),
        };
        let mut rows: Vec<_> = there.map(|one| listener_row(now, one, where_at(one))).collect();
        self.add_former(&mut rows);
        rows
    }

    /// Adds what was counted by listeners that are gone to the row that has their name now.
    fn add_former(&self, rows: &mut [Listener]) {
        let mut heirs: BTreeMap<String, usize> = BTreeMap::new();
        for (place, row) in rows.iter().enumerate() {
            let heir = heirs.entry(row.name.clone()).or_insert(place);
            // It stays for longer than those that only wait for the end of their connections.
            if row.state != REMOVED {
                *heir = place;
            }
        }
        for (name, place) in &heirs {
            if let Some(counts) = self.former.of(name) {
                rows[*place].add_counts(counts);
            }
        }
        for gone in self.listeners.iter().filter(|one| one.is_gone()) {
            if let Some(place) = heirs.get(&gone.config.name) {
                rows[*place].add_counts(&counts_of(gone));
            }
        }
    }
}

fn listener_row(now: Instant, listener: &ListenerAtWork, bind: String) -> Listener {
    let target = |target: &Target| Upstream {
        address: target.address.to_string(),
        state: target.state(now).to_owned(),
        active: target.active,
        failed: target.failed,
    };
    let admission = &listener.admission;
    let state = match (listener.retired, listener.drained) {
        (true, _) => REMOVED,
        (false, true) => "drained",
        (false, false) => "open",
    };
    let name = |protocol: Protocol| match protocol {
        Protocol::Tcp => "tcp".to_owned(),
        Protocol::Smc => "smc".to_owned(),
    };
    Listener {
        bind,
        accept: name(listener.config.accept),
        connect: name(listener.config.connect),
        upstream: listener.config.upstream.to_string(),
        upstreams: listener.pool.targets().map(target).collect(),
        state: state.to_owned(),
        waiting: admission.waiting.len() as u64,
        active: admission.active().into(),
        ..counts_of(listener)
    }
}

/// The name of a listener and what it has counted, also of upstreams that it has no more.
pub(in crate::gateway) fn counts_of(listener: &ListenerAtWork) -> Listener {
    let counts = listener.admission.counts;
    let failed = |(address, failed): (SocketAddr, u64)| Upstream {
        address: address.to_string(),
        failed,
        ..Upstream::default()
    };
    Listener {
        name: listener.config.name.clone(),
        upstreams: listener.pool.failures().map(failed).collect(),
        accepted: listener.accepted,
        refused: listener.refused,
        refused_connections: counts.refused(Limit::Connections),
        refused_source: counts.refused(Limit::Source),
        refused_rate: counts.refused(Limit::Rate),
        refused_source_rate: counts.refused(Limit::SourceRate),
        waited: counts.waited,
        over_limit_tcp: counts.without_smc,
        durations: listener.durations.clone(),
        ..Listener::default()
    }
}

/// The state of a listener that the configuration has no more.
const REMOVED: &str = "removed";
