//! What listeners have counted that are gone.
//!
//! A reload that changes the roles of a listener makes another one of the same name, and a place in
//! the table is used again. Whoever reads counters takes one that falls for a restart, so the name
//! keeps what was counted under it.

use std::collections::BTreeMap;

use smcr_rnic::Rnic;

use super::Gateway;
use super::answers::counts_of;
use crate::listener::Listener as ListenerAtWork;
use crate::stats::{Listener, Upstream};

/// The counters of listeners that are gone and whose places are used by others.
#[derive(Debug, Default)]
pub(super) struct Former {
    by_name: BTreeMap<String, Listener>,
    /// Connections that they closed at once, also those of names that are forgotten.
    refused: u64,
}

impl Former {
    /// What was counted under a name.
    pub(super) fn of(&self, name: &str) -> Option<&Listener> {
        self.by_name.get(name)
    }

    /// Connections that all of them closed at once.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }

    /// Keeps the counters of one that is gone.
    fn add(&mut self, gone: &Listener) {
        self.refused += gone.refused;
        let sum = self.by_name.entry(gone.name.clone()).or_default();
        for upstream in &gone.upstreams {
            let is_new = sum.upstreams.iter().all(|known| known.address != upstream.address);
            if is_new && sum.upstreams.len() < UPSTREAMS_MAX {
                let address = upstream.address.clone();
                sum.upstreams.push(Upstream { address, ..Upstream::default() });
            }
        }
        sum.add_counts(gone);
    }
}

impl<N: Rnic> Gateway<N> {
    /// Puts a listener in `slot`, where the one before is gone, or at the end of the table.
    pub(super) fn put_listener(&mut self, slot: usize, listener: ListenerAtWork) {
        // What was asked of the one that had this number before.
        self.idle.close_no_more(slot);
        let Some(place) = self.listeners.get_mut(slot) else {
            self.listeners.push(listener);
            return;
        };
        self.former.add(&counts_of(place));
        *place = listener;
        if self.former.by_name.len() > NAMES_MAX {
            let is_used = |name: &String| self.listeners.iter().any(|it| it.config.name == *name);
            self.former.by_name.retain(|name, _| is_used(name));
        }
    }
}

/// How many names are kept before those are forgotten that no listener has.
const NAMES_MAX: usize = 1_024;
/// How many upstreams of a name are kept.
const UPSTREAMS_MAX: usize = 256;
