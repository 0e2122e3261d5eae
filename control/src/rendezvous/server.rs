//! The server's side: what to answer to a Proposal, and when.

use smcr_proto::handshake::Agreement;
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::{Diagnosis, Offer, Proposal};
use smcr_proto::{Gid, Instant};
use smcr_rnic::Rnic;

use super::Shortage;
use crate::gateway::Gateway;
use crate::groups::{Peer, PortId, Taken};
use crate::paths::{Far, Way};
use crate::places::Place;
use crate::reactor::Key;
use crate::sessions::{Session, Talk};

impl<N: Rnic> Gateway<N> {
    /// Answers a Proposal, as soon as the application's side is connected and no first contact with
    /// the same peer is under way.
    pub(crate) fn resume(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at(key) else { return };
        let Talk::Pending(server, proposal) = &shaking.conversation.talk else { return };
        if !shaking.connected {
            return;
        }
        let proposal = *proposal;
        let agreement = match server.objection() {
            Some(diagnosis) => Err(diagnosis),
            None => Ok(server.agreement().copied().unwrap_or(Agreement::V1)),
        };
        let port = self.port_of(key);
        let far = Far::Client(shaking.source.ip(), proposal.gid);
        // RFC 7609 5.5-1
        let protected = self.is_protected(key).then_some(Diagnosis::IPSEC);
        let refusal = protected.or_else(|| self.objection(key, port, &proposal, agreement));
        let refusal = refusal.or_else(|| {
            let closed = self.consult(now, key, far) == Way::Closed;
            closed.then_some(Diagnosis::NO_ROCE_PATH)
        });
        if refusal == Some(Diagnosis::PEER_NOT_LISTED) {
            self.note_unlisted(now, key, proposal.gid);
        }
        let v2 = agreement.is_ok_and(|agreement| agreement != Agreement::V1);
        let Proposal { peer_id: id, gid, mac, .. } = proposal;
        let peer = Peer { id, gid, mac, v2, source: self.peer_address(key) };
        if refusal.is_none() && !self.has_place(now, key) {
            return;
        }
        if refusal.is_none()
            && let Some(group) = port.and_then(|port| self.groups.founding(port, peer))
        {
            self.foundings.entry(group).or_default().waiting.push(key);
            return;
        }
        let answer = match (refusal, port) {
            (Some(diagnosis), _) => Err(diagnosis),
            (None, None) => Err(Diagnosis::NO_SMC_R_DEVICE),
            (None, Some(port)) => match self.offer_to(now, key, port, peer) {
                Ok(ours) => Ok(ours),
                Err(Shortage::Passing(group)) => {
                    // RFC 7609 3.5.2.1-7
                    self.wait_for_element(now, key, group, None);
                    return;
                }
                Err(Shortage::Unproven(group)) => {
                    if self.wait_for_proof(now, key, group, None) {
                        return;
                    }
                    Err(Diagnosis::NO_ROCE_PATH)
                }
                Err(Shortage::NoRoute) => Err(Diagnosis::NO_ROUTE),
                Err(Shortage::NotListed) => Err(Diagnosis::PEER_NOT_LISTED),
                Err(Shortage::Final) => Err(Diagnosis::OUT_OF_MEMORY),
            },
        };
        self.answer_server(now, key, answer);
    }

    /// Accept or Decline.
    pub(crate) fn answer_server(
        &mut self,
        now: Instant,
        key: Key,
        answer: Result<Offer, Diagnosis>,
    ) {
        let direct = self.is_direct(key);
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        let Talk::Pending(server, _) = &mut shaking.conversation.talk else { return };
        match answer {
            Ok(ours) => {
                // It may have waited for others; what follows is its own.
                shaking.deadline = now + self.config.smc.handshake_timeout;
                match server.agreement() {
                    Some(Agreement::V2(_)) => server.provide_v2(now, ours, direct),
                    Some(Agreement::V1) | None => server.provide(now, ours),
                }
            }
            Err(diagnosis) => {
                server.refuse(diagnosis);
                self.fallback_reasons.insert(key, diagnosis);
            }
        }
        shaking.conversation.talk = Talk::Server(server.clone());
        self.advance(now, key);
    }

    /// Why a Proposal cannot be accepted, if it cannot.
    pub(super) fn objection(
        &self,
        key: Key,
        port: Option<PortId>,
        proposal: &Proposal,
        agreement: Result<Agreement, Diagnosis>,
    ) -> Option<Diagnosis> {
        let peers = self.peers_of(key);
        if !peers.admit_source(self.peer_address(key)) || !peers.admit_gid(proposal.gid) {
            return Some(Diagnosis::PEER_NOT_LISTED);
        }
        // RFC 7609 C.1-2
        if port.is_none() {
            return Some(Diagnosis::NO_SMC_R_DEVICE);
        }
        let reach = match agreement {
            Err(diagnosis) => return Some(diagnosis),
            Ok(Agreement::V1) => Some(proposal.gid),
            // A router may be between.
            Ok(Agreement::V2(_)) => None,
        };
        let is_shared = |local| self.network.is_shared(proposal, local);
        // RFC 7609 3.5.1.2-6, 3.5.1.2-7, 3.5.1.2-8, 5.2-1
        if reach.is_some() && !self.local_of(key).is_some_and(is_shared) {
            return Some(Diagnosis::NO_COMMON_SUBNET);
        }
        if port.and_then(|port| self.groups.usable_port(port, reach)).is_none() {
            return Some(Diagnosis::NO_SMC_R_DEVICE);
        }
        self.draining.is_some().then_some(Diagnosis::TOO_BUSY)
    }

    /// Somebody who is not listed would like to be a peer.
    pub(super) fn note_unlisted(&mut self, now: Instant, key: Key, gid: Gid) {
        if let Some(left_out) = self.unlisted.pass(now) {
            let source = self.peer_address(key);
            tracing::warn!(%source, %gid, left_out, "a peer that is not listed stays TCP");
        }
    }

    /// Whether this rendezvous has a place. If not, it waits for one, and is resumed with it.
    fn has_place(&mut self, now: Instant, key: Key) -> bool {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return false };
        if shaking.place == Place::None {
            shaking.place = if self.places.take(shaking.listener) {
                Place::Taken
            } else {
                self.places.wait(now, shaking.listener, key);
                Place::Wanted
            };
        }
        shaking.place == Place::Taken
    }

    /// An element in the group that we share with `peer`, or in a new one.
    pub(super) fn offer_to(
        &mut self,
        now: Instant,
        key: Key,
        port: PortId,
        peer: Peer,
    ) -> Result<Offer, Shortage> {
        if let Some(group) = self.groups.joinable(port, peer) {
            self.groups.best_link(group).ok_or(Shortage::Final)?;
            let link = self.groups.proven_link(now, group).ok_or(Shortage::Unproven(group))?;
            // RFC 7609 3.5.2-1, 3.5.2.1-3, 3.5.2.1-5
            return self.reserve(now, key, group, link, false);
        }
        // RFC 7609 2.2.3-3, 3.5.1-1, 3.5.1.2-9, 3.5.1.2-10
        let reach = (!peer.v2).then_some(peer.gid);
        let port = self.groups.usable_port(port, reach).ok_or(Shortage::Final)?;
        if peer.v2 && self.groups.ports()[port.0].path_to(peer.gid).is_none() {
            return Err(Shortage::NoRoute);
        }
        self.found(now, key, port, Role::Server, peer).map(|(_, ours)| ours)
    }

    /// Whether the client's port is in the subnet of ours.
    fn is_direct(&self, key: Key) -> bool {
        let Some(Session::Shaking(shaking)) = self.sessions.at(key) else { return false };
        let Talk::Pending(_, proposal) = &shaking.conversation.talk else { return false };
        let group = shaking.resources.as_ref().map(|resources| resources.group);
        group.is_some_and(|group| self.groups.is_direct(group, proposal.gid))
    }

    /// First contact: the client's queue pair is known now.
    pub(super) fn connect_link(&mut self, now: Instant, key: Key, offer: &Offer) {
        let Some(group) = self.group_of_session(key) else { return };
        // The Confirm may name another port than the Proposal did.
        if !self.peers_of(key).admit_gid(offer.gid) {
            self.note_unlisted(now, key, offer.gid);
            self.decline_first(now, key, Diagnosis::PEER_NOT_LISTED);
            return;
        }
        let agreement = self.agreement_of(key).unwrap_or(Agreement::V1);
        self.hurry_trial(now, key, group);
        let connected = self.groups.connect(now, group, offer, agreement);
        if connected.is_err() || self.accept_offer(now, key, offer) != Ok(Taken::Noted) {
            // Before CONFIRM LINK nothing is decided yet: the connection can stay TCP (C.2).
            self.handshakes_failed += 1;
            self.decline_first(now, key, Diagnosis::QUEUE_PAIR_NOT_READY);
        }
    }
}
