//! What operators see of listeners.

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
        there.map(|one| listener_row(now, one, where_at(one))).collect()
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
    let counts = admission.counts;
    let state = match (listener.retired, listener.drained) {
        (true, _) => "removed",
        (false, true) => "drained",
        (false, false) => "open",
    };
    let name = |protocol: Protocol| match protocol {
        Protocol::Tcp => "tcp".to_owned(),
        Protocol::Smc => "smc".to_owned(),
    };
    Listener {
        name: listener.config.name.clone(),
        bind,
        accept: name(listener.config.accept),
        connect: name(listener.config.connect),
        upstream: listener.config.upstream.to_string(),
        upstreams: listener.pool.targets().map(target).collect(),
        state: state.to_owned(),
        accepted: listener.accepted,
        refused: listener.refused,
        refused_connections: counts.refused(Limit::Connections),
        refused_source: counts.refused(Limit::Source),
        refused_rate: counts.refused(Limit::Rate),
        refused_source_rate: counts.refused(Limit::SourceRate),
        waiting: admission.waiting.len() as u64,
        waited: counts.waited,
        over_limit_tcp: counts.without_smc,
        active: admission.active().into(),
        durations: listener.durations.clone(),
    }
}
