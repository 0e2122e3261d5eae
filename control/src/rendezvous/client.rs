//! The client's side: Proposal, and a queue pair or an element for the Confirm.

use smcr_proto::Instant;
use smcr_proto::handshake::Client;
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::{Diagnosis, Offer, Proposal};
use smcr_rnic::Rnic;

use crate::gateway::Gateway;
use crate::groups::{Peer, Phase};
use crate::reactor::Key;
use crate::sessions::{PortId, Session, Talk};

impl<N: Rnic> Gateway<N> {
    /// The connection to the peer is up: proposes, if the peer offered SMC-R and we have an RNIC.
    pub(super) fn propose(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        let upstream = self.listeners[usize::from(shaking.listener)].upstream;
        // RFC 7609 3.1-3, 3.5.1.1-7, 3.5.1.6.4-1
        if !self.option.peer_offered(&shaking.peer, upstream) {
            self.relay_tcp(now, key, Some(Diagnosis::NO_SMC_OPTION));
            return;
        }
        // From here on the peer waits for a CLC message, so that a refusal is a Decline.
        if self.is_too_busy() {
            self.decline_first(now, key, Diagnosis::OUT_OF_MEMORY);
            return;
        }
        let Some(proposal) = self.port_of(key).and_then(|port| self.proposal(port)) else {
            self.decline_first(now, key, Diagnosis::NO_SMC_R_DEVICE);
            return;
        };
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        // RFC 7609 3-1, 3-2, 3.1-2, 3.5.1.2-1
        shaking.talk = Talk::Client(Client::new(now, proposal));
        self.advance(now, key);
    }

    /// What we propose on `port`. Nothing is taken for it: the server may decline.
    pub(super) fn proposal(&self, port: PortId) -> Option<Proposal> {
        let port = &self.ports[port.0];
        let address = port.rnic.as_ref()?.port();
        // RFC 7609 3.5.1.2-2, 3.5.1.2-3, 3.5.1.2-4, 3.5.2-2, 3.5.2.1-1
        Some(Proposal {
            peer_id: self.peer_id,
            gid: address.gid,
            mac: address.mac,
            subnet: port.subnet,
            prefixes: Default::default(),
            prefix_count: 0,
            offers_smc_r_v1: true,
        })
    }

    /// First contact: the server has opened a queue pair for us.
    pub(super) fn open_link(&mut self, now: Instant, key: Key, offer: &Offer) {
        let ours = match self.port_of(key) {
            Some(port) => self.found_link(now, key, port, offer),
            None => Err(Diagnosis::NO_SMC_R_DEVICE),
        };
        self.answer_client(key, ours, false);
    }

    /// A group whose queue pair is connected to the server's, and an element in it.
    pub(super) fn found_link(
        &mut self,
        now: Instant,
        key: Key,
        port: PortId,
        offer: &Offer,
    ) -> Result<Offer, Diagnosis> {
        let group = self
            .open_group(now, port, Role::Client, Peer::of(offer), key)
            .map_err(|_| Diagnosis::OUT_OF_MEMORY)?;
        // RFC 7609 3.5.1.3-2, 3.5.1.3-3
        let ours = match self.reserve(now, key, port, group, true) {
            Some(ours) if self.connect_group(now, group, offer).is_ok() => Ok(ours),
            Some(_) => Err(Diagnosis::QUEUE_PAIR_NOT_READY),
            None => Err(Diagnosis::OUT_OF_MEMORY),
        };
        if ours.is_ok() {
            self.learn_peer(key, *offer);
        } else {
            self.release(now, key);
            self.give_up_group(now, key, group);
        }
        ours
    }

    /// Subsequent contact: the server named a link that we should know.
    pub(super) fn join_link(&mut self, now: Instant, key: Key, offer: &Offer) {
        let found = self.groups.iter().find(|(_, group)| {
            let same_link = match &group.phase {
                Phase::Running(_, address) => address.qpn == offer.qpn,
                Phase::Opening(_) | Phase::Ending => false,
            };
            // RFC 7609 3.5.1.3-1, 3.5.2.2-1
            group.role == Role::Client && group.peer == Peer::of(offer) && same_link
        });
        let Some((group, port)) = found.map(|(id, group)| (*id, group.port)) else {
            // RFC 7609 C.4-1
            self.answer_client(key, Err(Diagnosis::OUT_OF_SYNC), true);
            return;
        };
        let ours = self.reserve(now, key, port, group, false).ok_or(Diagnosis::OUT_OF_MEMORY);
        self.learn_peer(key, *offer);
        self.answer_client(key, ours, false);
    }

    pub(super) fn answer_client(
        &mut self,
        key: Key,
        ours: Result<Offer, Diagnosis>,
        out_of_sync: bool,
    ) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        let Talk::Client(client) = &mut shaking.talk else { return };
        match ours {
            Ok(ours) => client.provide(ours),
            Err(diagnosis) => {
                client.refuse(diagnosis, out_of_sync);
                self.fallback_reasons.insert(key, diagnosis);
            }
        }
    }
}
