//! How a rendezvous begins: with a connection to the upstream.

use std::net::IpAddr;

use smcr_proto::handshake::Server;
use smcr_proto::wire::clc::Diagnosis;
use smcr_rnic::Rnic;

use super::conversation::Machine;
use super::effect::Effect;
use super::facts::Side;
use super::negotiation::Negotiator;
use super::state::State;
use crate::groups::{Pollers, QpOf};

impl<N: Rnic, P: Pollers<QpOf<N>>> Negotiator<'_, N, P> {
    /// Asks the owner to connect to the upstream. Without a place, the SYN offers no SMC-R.
    pub(super) fn begin(&mut self) -> Effect {
        let terms = self.shared.terms(self.one.listener);
        let side = terms.side;
        // At a server, `arrived` brought what is needed before the Proposal.
        self.one.surveyed = side == Side::Server;
        let seeks = terms.offers_to(self.one.upstream) && self.one.reason.is_none();
        let offer = seeks && self.one.has_place;
        let crowded = seeks && !offer;
        let is_awaited = self.one.dialled || self.shared.settings.is_assumed;
        self.one.state = match (self.one.follows, side) {
            (Some(connection), _) => State::Following(connection),
            // We cannot offer nothing, so what speaks against SMC-R becomes a Decline.
            (None, Side::Client) if is_awaited => {
                if crowded {
                    self.one.reason = Some(Diagnosis::TOO_BUSY);
                }
                State::Connecting
            }
            (None, Side::Client) if crowded => State::plain(Some(Diagnosis::TOO_BUSY)),
            (None, Side::Client) if self.one.reason.is_some() => State::plain(self.one.reason),
            (None, Side::Client) => State::Connecting,
            (None, Side::Neither) => State::plain(None),
            (None, Side::Server) if !self.one.surroundings.offered => {
                State::plain(Some(Diagnosis::NO_SMC_OPTION))
            }
            (None, Side::Server) => {
                let policy = self.shared.policy(self.one.surroundings.port);
                let peer_id = self.shared.settings.peer_id;
                self.one.silent = true;
                State::talk(Machine::Server(Server::with_policy(self.now, peer_id, policy)))
            }
        };
        self.connect(offer)
    }

    /// Asks the owner to connect to another upstream than before.
    pub(super) fn begin_again(&mut self, upstream: IpAddr) -> Effect {
        self.one.upstream = upstream;
        let offers = self.terms().offers_to(upstream) && self.one.reason.is_none();
        let offer = offers && self.one.has_place;
        self.connect(offer)
    }

    fn connect(&mut self, offer: bool) -> Effect {
        self.one.deadline = Some(self.now + self.terms().connect_timeout);
        let hear = !matches!(self.one.state, State::Plain(_) | State::Following(_));
        Effect::Connect { key: self.one.key, offer, hear }
    }
}
