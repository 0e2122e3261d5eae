//! What all rendezvous of a gateway share.

use std::collections::VecDeque;
use std::time::Duration;

use smcr_proto::handshake::Policy;
use smcr_proto::limits::CLC_WAIT;
use smcr_rnic::Rnic;

use super::effect::{Counts, Effect, Limit};
use super::facts::{Settings, Terms};
use super::fallbacks::Fallbacks;
use super::first_contacts::FirstContacts;
use crate::groups::{GroupId, Groups, Pollers, PortId, QpOf, Throttle};
use crate::paths::Paths;
use crate::places::Places;
use crate::slab::Key;
use crate::sources::Silent;

/// What all rendezvous share, and one of them borrows while it handles an input.
pub(super) struct Shared<N: Rnic, P: Pollers<QpOf<N>>> {
    pub(super) settings: Settings,
    pub(super) groups: Groups<N, P>,
    pub(super) first_contacts: FirstContacts,
    /// Peers that RoCE packets did not reach lately.
    pub(super) paths: Paths,
    /// Which rendezvous have a place, and which wait for one.
    pub(super) places: Places,
    /// Peers that have not sent a Proposal yet.
    pub(super) silent: Silent,
    /// Rendezvous that wait for something of a link group: a free element of ours or of the peer,
    /// or the proof that a link works. The one that has waited longest comes first.
    pub(super) waiting: Vec<(GroupId, Key)>,
    pub(super) fallbacks: Fallbacks,
    pub(super) counts: Counts,
    pub(super) notices: Notices,
    /// New connections do not become SMC-R any more.
    pub(super) draining: bool,
    /// Effects in addition to those that the steps of rendezvous return.
    pub(super) effects: VecDeque<Effect>,
}

/// Limits how often wrong behaviour of peers is logged.
#[derive(Debug, Default)]
pub(super) struct Notices {
    /// An offer that cannot be used.
    pub(super) bad_offers: Throttle,
    /// A peer that is not listed.
    pub(super) unlisted: Throttle,
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Shared<N, P> {
    pub(super) fn new(settings: Settings, groups: Groups<N, P>) -> Self {
        let Settings { handshakes_max, listeners, .. } = &settings;
        let (contenders, patience) = (settings.contenders(), settings.patience());
        let places = Places::new(*handshakes_max, listeners.len(), contenders, patience);
        let silent = Silent::new(settings.silent_max);
        Self {
            settings,
            groups,
            first_contacts: FirstContacts::default(),
            paths: Paths::default(),
            places,
            silent,
            waiting: Vec::new(),
            fallbacks: Fallbacks::default(),
            counts: Counts::default(),
            notices: Notices::default(),
            draining: false,
            effects: VecDeque::new(),
        }
    }

    /// The operator has decided anew. Rendezvous that go on keep the places that they have.
    pub(super) fn change(&mut self, settings: Settings) {
        let Settings { handshakes_max, listeners, .. } = &settings;
        let (contenders, patience) = (settings.contenders(), settings.patience());
        self.places.change(*handshakes_max, listeners.len(), contenders, patience);
        self.silent.change(settings.silent_max);
        self.settings = settings;
    }

    /// The terms of a listener.
    pub(super) fn terms(&self, listener: u16) -> &Terms {
        &self.settings.listeners[usize::from(listener)]
    }

    /// Something has run out for a connection of a listener: has the owner log that.
    pub(super) fn exhausted(&mut self, listener: u16, limit: Limit) {
        self.effects.push_back(Effect::Exhausted { listener, limit });
    }

    /// Which SMC-R versions we speak over a port, and on which terms.
    pub(super) fn policy(&self, port: Option<PortId>) -> Policy {
        Policy { v1: port.is_some_and(|port| self.settings.v1[port.0]), v2: self.settings.v2 }
    }
}

impl Settings {
    /// How many listeners need places for rendezvous.
    fn contenders(&self) -> usize {
        self.listeners.iter().filter(|terms| terms.contends()).count()
    }

    /// How long a connection waits for a place.
    fn patience(&self) -> Duration {
        self.handshake_timeout.min(ANSWER_WITHIN)
    }
}

/// How long a client waits at most for our answer to its Proposal, which may depend on the first
/// contact of another connection. A second later a Linux client would give up, and its program
/// would get an error instead of TCP.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(CLC_WAIT.as_secs() - 1);
