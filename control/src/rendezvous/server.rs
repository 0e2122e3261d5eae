//! The server's side: what to answer to a Proposal, and what follows from the Confirm.

use smcr_proto::Gid;
use smcr_proto::handshake::{Agreement, Server};
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::{Diagnosis, Offer, Proposal};
use smcr_rnic::Rnic;

use super::conversation::Machine;
use super::negotiation::Negotiator;
use super::resources::Shortage;
use super::shared::ANSWER_WITHIN;
use super::waiting::{Answer, Asked, END_WAIT, Held, Wait};
use crate::groups::{BadOffer, Peer, Pollers, PortId, QpOf};
use crate::paths::Far;

impl<N: Rnic, P: Pollers<QpOf<N>>> Negotiator<'_, N, P> {
    /// The client has proposed.
    pub(super) fn proposed(&mut self, proposal: Proposal) {
        if std::mem::take(&mut self.one.silent) {
            self.shared.silent.leave(self.one.source.ip(), self.one.key);
        }
        self.ask(Asked::Proposal(proposal, self.now + ANSWER_WITHIN));
    }

    /// What to answer to a Proposal, asked when the application's side is connected. The answer may
    /// have to wait: for a place, for another first contact with the same peer, or for an element.
    pub(super) fn answer_to_proposal(&mut self, proposal: &Proposal) -> Answer {
        let (port, agreement) = match self.objection(proposal) {
            Ok(agreed) => agreed,
            Err(diagnosis) => {
                if diagnosis == Diagnosis::PEER_NOT_LISTED {
                    self.note_unlisted(proposal.gid);
                }
                return Answer::Now(Err(diagnosis));
            }
        };
        if !self.has_place() {
            return Answer::Later(Wait::Place);
        }
        let v2 = agreement != Agreement::V1;
        let Proposal { peer_id: id, gid, mac, .. } = *proposal;
        let peer = Peer { id, gid, mac, v2, source: self.peer_address() };
        if let Some(group) = self.shared.groups.founding(port, peer) {
            return Answer::Later(Wait::FirstContact(group));
        }
        match self.offer_to(port, peer) {
            Ok(ours) => Answer::Now(Ok(ours)),
            Err(shortage) => self.without_element(shortage),
        }
    }

    /// The port and the SMC-R version with which a Proposal may be accepted.
    ///
    /// # Errors
    ///
    /// Why it cannot be.
    fn objection(&mut self, proposal: &Proposal) -> Result<(PortId, Agreement), Diagnosis> {
        if let Some(reason) = self.one.reason {
            return Err(reason);
        }
        self.check_protection()?;
        let peers = &self.terms().peers;
        if !peers.admit_source(self.peer_address()) || !peers.admit_gid(proposal.gid) {
            return Err(Diagnosis::PEER_NOT_LISTED);
        }
        let near = self.near_port(proposal);
        // RFC 7609 C.1 #2: decline for RNIC, policy, subnet, resources
        let port = near.or(self.one.surroundings.port).ok_or(Diagnosis::NO_SMC_R_DEVICE)?;
        let server = self.server();
        if let Some(diagnosis) = server.objection() {
            return Err(diagnosis);
        }
        let agreement = server.agreement().copied().expect("without an objection there is one");
        let reach = match agreement {
            Agreement::V1 => Some(proposal.gid),
            // SMC-Rv2 packets may be routed, so the port need not reach the peer directly.
            Agreement::V2(_) => None,
        };
        // RFC 7609 3.5.1.2 #6: check common LAN before Accept
        // RFC 7609 3.5.1.2 #7: match IPv4 subnet with an interface
        // RFC 7609 3.5.1.2 #8: match one of the IPv6 prefixes
        // RFC 7609 5.2 #1: SMC-Rv1 only within layer 2
        let networks = &self.one.surroundings.networks;
        if reach.is_some() && near.is_none() && !networks.are_shared_with(proposal) {
            return Err(Diagnosis::NO_COMMON_SUBNET);
        }
        if self.shared.groups.usable_port(port, reach).is_none() {
            return Err(Diagnosis::NO_SMC_R_DEVICE);
        }
        if self.shared.draining {
            return Err(Diagnosis::TOO_BUSY);
        }
        let far = Far::Client(self.one.source.ip(), proposal.gid);
        if near.is_none() && self.one.path.is_closed(self.now, far, &mut self.shared.paths) {
            return Err(Diagnosis::NO_ROCE_PATH);
        }
        Ok((port, agreement))
    }

    /// The port that shares memory with the client. One on this host says by its peer id that it is
    /// near, whatever port it proposes; but it may have taken that port out of use.
    fn near_port(&mut self, proposal: &Proposal) -> Option<PortId> {
        let port = self.shared.groups.port_near(proposal.peer_id)?;
        let (gid, _) = self.shared.groups.ports()[port.0].address()?;
        let far = Far::Client(self.one.source.ip(), gid);
        let is_closed = self.one.path.is_closed(self.now, far, &mut self.shared.paths);
        (!is_closed).then_some(port)
    }

    /// The handshake machine, which is a server's.
    fn server(&mut self) -> &mut Server {
        match &mut self.handshake().conversation.machine {
            Machine::Server(server) => server,
            Machine::Client(_) => panic!("only a server is proposed to"),
        }
    }

    /// Takes a free place, unless this rendezvous has one. Returns whether it has one now.
    fn has_place(&mut self) -> bool {
        if !self.one.has_place {
            self.one.has_place = self.shared.places.take(self.one.listener);
        }
        self.one.has_place
    }

    /// Takes an element in the group that we share with `peer`, or in a new one.
    fn offer_to(&mut self, port: PortId, peer: Peer) -> Result<Offer, Shortage> {
        let groups = &self.shared.groups;
        if let Some(group) = groups.joinable(port, peer) {
            let short = Shortage::Final(Diagnosis::OUT_OF_MEMORY);
            groups.best_link(group).ok_or(short)?;
            let link = groups.proven_link(self.now, self.one.path.proof_age(self.now), group);
            let link = link.ok_or(Shortage::Unproven(group, None))?;
            // RFC 7609 3.5.2 #1: later contact may need new RMB
            // RFC 7609 3.5.2.1 #3: allocate only elements on later contact
            // RFC 7609 3.5.2.1 #5: Accept without first contact flag
            return self.join(group, link);
        }
        // RFC 7609 2.2.3 #3: server chooses existing or new group
        // RFC 7609 3.5.1 #1: new group on first contact
        // RFC 7609 3.5.1.2 #9: allocate QP and element to accept
        // RFC 7609 3.5.1.2 #10: first contact flag in Accept
        // One that needs no router, if there is any: another RNIC of the peer may stand in, which
        // is on another subnet. SMC-Rv1 requires that.
        let direct = groups.usable_port(port, Some(peer.gid));
        let port = direct.or_else(|| groups.usable_port(port, None).filter(|_| peer.v2));
        let port = port.expect("the Proposal was refused otherwise");
        let chosen = &groups.ports()[port.0];
        if peer.v2 && !chosen.is_near(peer.id) && chosen.path_to(peer.gid).is_none() {
            return Err(Shortage::Final(Diagnosis::NO_ROUTE));
        }
        self.found(port, Role::Server, peer)
    }

    /// Answers a Proposal by Accept or Decline.
    pub(super) fn reply_to_client(
        &mut self,
        proposal: &Proposal,
        answer: Result<Offer, Diagnosis>,
    ) {
        let now = self.now;
        let group = self.one.resources.as_ref().map(|resources| resources.group);
        let direct = group.is_some_and(|group| self.shared.groups.is_direct(group, proposal.gid));
        if answer.is_ok() {
            // It may have waited for other rendezvous; from now on it has its full time.
            self.one.deadline = Some(now + self.shared.settings.handshake_timeout);
        }
        let server = self.server();
        match (answer, server.agreement()) {
            (Ok(ours), Some(Agreement::V2(_))) => server.provide_v2(now, ours, direct),
            (Ok(ours), Some(Agreement::V1) | None) => server.provide(now, ours),
            (Err(diagnosis), _) => server.refuse(diagnosis),
        }
    }

    /// First contact: connects our queue pair to the one that the client's Confirm names.
    pub(super) fn connect_link(&mut self, offer: &Offer) {
        // The Confirm may name another port than the Proposal did.
        if !self.terms().peers.admit_gid(offer.gid) {
            self.note_unlisted(offer.gid);
            self.handshake().conversation.decline(Diagnosis::PEER_NOT_LISTED);
            return;
        }
        let agreement = self.agreement().expect("what was accepted was agreed on");
        if !self.connect_to(offer, agreement) {
            // Before CONFIRM LINK nothing is decided yet: the connection can stay TCP (C.2).
            self.shared.counts.handshakes_failed += 1;
            self.handshake().conversation.decline(Diagnosis::QUEUE_PAIR_NOT_READY);
        }
    }

    /// Subsequent contact: the client offers this element, and may already write to ours.
    pub(super) fn confirmed(&mut self, offer: Offer) {
        let group = self.one.resources.as_ref().expect("what was accepted is reserved").group;
        let taken = self.take_offer(&offer);
        self.taken(taken, Held { group, until: self.now + END_WAIT, offer, answer: None });
    }

    pub(super) fn note_bad_offer(&mut self, offence: BadOffer) {
        if let Some(left_out) = self.shared.notices.bad_offers.pass(self.now) {
            let source = self.peer_address();
            tracing::warn!(%source, ?offence, left_out, "an offer cannot be used");
        }
    }

    /// Logs that a host that is not listed asked to be a peer.
    pub(super) fn note_unlisted(&mut self, gid: Gid) {
        if let Some(left_out) = self.shared.notices.unlisted.pass(self.now) {
            let source = self.peer_address();
            tracing::warn!(%source, %gid, left_out, "a peer that is not listed stays TCP");
        }
    }
}
