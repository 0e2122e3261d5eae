//! The client's side: Proposal, and a queue pair or an element for the Confirm.

use smcr_proto::handshake::{Agreement, Client};
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::v2::{GIDS_MAX, Gids};
use smcr_proto::wire::clc::{Diagnosis, Ipv4Subnet, Offer, Proposal};
use smcr_proto::{Gid, Instant, MacAddress};
use smcr_rnic::Rnic;

use super::Shortage;
use crate::gateway::Gateway;
use crate::groups::{Peer, PortId, Taken, Unnamed};
use crate::paths::{Far, Way};
use crate::reactor::Key;
use crate::sessions::{Session, Talk};

impl<N: Rnic> Gateway<N> {
    /// The connection to the peer is up: proposes, if the peer offered SMC-R and we have an RNIC.
    pub(super) fn propose(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        let listener = &self.listeners[usize::from(shaking.listener)];
        let (upstream, listed) = (listener.upstream, listener.seeks_smc());
        // RFC 7609 3.1-3, 3.5.1.1-7, 3.5.1.6.4-1
        if !self.option.peer_offered(&shaking.peer, upstream) {
            let asked = if listed { Diagnosis::NO_SMC_OPTION } else { Diagnosis::PEER_NOT_LISTED };
            self.relay_tcp(now, key, Some(asked));
            return;
        }
        // From here on the peer waits for a CLC message, so that a refusal is a Decline.
        if !listed {
            self.decline_first(now, key, Diagnosis::PEER_NOT_LISTED);
            return;
        }
        if self.draining.is_some() {
            self.decline_first(now, key, Diagnosis::TOO_BUSY);
            return;
        }
        let Some(proposal) = self.proposal(key) else {
            self.decline_first(now, key, Diagnosis::NO_SMC_R_DEVICE);
            return;
        };
        // RFC 7609 5.5-1
        if self.is_protected(key) {
            self.decline_first(now, key, Diagnosis::IPSEC);
            return;
        }
        if self.consult(now, key, Far::Server(upstream.ip())) == Way::Closed {
            self.decline_first(now, key, Diagnosis::NO_ROCE_PATH);
            return;
        }
        let policy = self.policy(self.port_of(key));
        let gid = proposal.gid;
        let proposal = if policy.v1 { proposal } else { without_v1(&proposal) };
        // RFC 7609 3-1, 3-2, 3.1-2, 3.5.1.2-1
        let client = match policy.v2 {
            Some(v2) => Client::with_v2(now, proposal, v2, gid),
            None => Client::new(now, proposal),
        };
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        shaking.conversation.talk = Talk::Client(client);
        self.advance(now, key);
    }

    /// What we propose, if there is an RNIC for it that is up. Nothing is taken for it: the server
    /// may decline.
    pub(super) fn proposal(&self, key: Key) -> Option<Proposal> {
        let port = self.groups.usable_port(self.port_of(key)?, None)?;
        let subnets = self.network.subnets(self.local_of(key)?);
        let (gid, mac) = self.groups.ports()[port.0].address()?;
        // RFC 7609 3.5.1.2-2, 3.5.1.2-3, 3.5.1.2-4, 3.5.2-2, 3.5.2.1-1
        Some(Proposal {
            peer_id: self.peer_id,
            gid,
            mac,
            subnet: subnets.ipv4,
            prefixes: subnets.prefixes,
            prefix_count: subnets.prefix_count,
            offers_smc_r_v1: true,
        })
    }

    /// First contact: the server has opened a queue pair for us.
    pub(super) fn open_link(&mut self, now: Instant, key: Key, offer: &Offer) {
        let ours = match self.agreement_of(key) {
            Some(agreement) => self.open_link_in(now, key, offer, agreement),
            None => Err(Diagnosis::VERSION_MISMATCH),
        };
        self.answer_client(key, ours, false);
    }

    fn open_link_in(
        &mut self,
        now: Instant,
        key: Key,
        offer: &Offer,
        agreement: Agreement,
    ) -> Result<Offer, Diagnosis> {
        let reach = match agreement {
            Agreement::V1 => Some(offer.gid),
            Agreement::V2(_) => None,
        };
        if !self.peers_of(key).admit_gid(offer.gid) {
            self.note_unlisted(now, key, offer.gid);
            return Err(Diagnosis::PEER_NOT_LISTED);
        }
        let proposed = self.proposed_port(key).ok_or(Diagnosis::NO_SMC_R_DEVICE)?;
        let port = self.groups.port_at(proposed, reach).ok_or(Diagnosis::NO_SMC_R_DEVICE)?;
        if let Agreement::V2(terms) = agreement
            && let Some(diagnosis) = terms.objection(self.groups.ports()[port.0].path_to(offer.gid))
        {
            return Err(diagnosis);
        }
        self.found_link(now, key, port, offer, agreement)
    }

    /// What our Proposal says the link of a first contact would go through.
    fn proposed_port(&self, key: Key) -> Option<(Gid, MacAddress)> {
        let Some(Session::Shaking(shaking)) = self.sessions.at(key) else { return None };
        let Talk::Client(client) = &shaking.conversation.talk else { return None };
        Some(client.port())
    }

    /// A group whose queue pair is connected to the server's, and an element in it.
    pub(super) fn found_link(
        &mut self,
        now: Instant,
        key: Key,
        port: PortId,
        offer: &Offer,
        agreement: Agreement,
    ) -> Result<Offer, Diagnosis> {
        let peer = Peer::of(offer, agreement != Agreement::V1, self.peer_address(key));
        // RFC 7609 3.5.1.3-2, 3.5.1.3-3, 3.5.3-4, 3.5.3-6
        let founded = self.found(now, key, port, Role::Client, peer);
        let (group, ours) = founded.map_err(|_| Diagnosis::OUT_OF_MEMORY)?;
        self.hurry_trial(now, key, group);
        if self.groups.connect(now, group, offer, agreement).is_err() {
            self.release(now, key);
            return Err(Diagnosis::QUEUE_PAIR_NOT_READY);
        }
        if self.accept_offer(now, key, offer) != Ok(Taken::Noted) {
            return Err(Diagnosis::QUEUE_PAIR_NOT_READY);
        }
        Ok(ours)
    }

    /// Subsequent contact: the server named a link that we should know.
    pub(super) fn join_link(&mut self, now: Instant, key: Key, offer: &Offer) {
        // RFC 7609 3.5.1.3-1
        let v2 = self.agreement_of(key).is_some_and(|agreement| agreement != Agreement::V1);
        let source = self.peer_address(key);
        let proposed = self.proposed_port(key).expect("a client has proposed");
        let proposed = self.groups.port_named(proposed).expect("no port is ever forgotten");
        let (group, link) = match self.groups.named_by(now, offer, v2, source, proposed) {
            Ok(found) => found,
            Err(Unnamed::OutOfSync) => {
                self.answer_client(key, Err(Diagnosis::OUT_OF_SYNC), true);
                return;
            }
            Err(Unnamed::LinkGone | Unnamed::NotTheirs) => {
                self.answer_client(key, Err(Diagnosis::SERVER_LINK_NOT_FOUND), false);
                return;
            }
        };
        if !self.groups.is_proven(now, group, link) {
            if !self.wait_for_proof(now, key, group, Some(*offer)) {
                self.answer_client(key, Err(Diagnosis::NO_ROCE_PATH), false);
            }
            return;
        }
        let refusal = match self.reserve(now, key, group, link, false) {
            Err(Shortage::Passing(group)) => {
                // RFC 7609 3.5.2.2-6
                self.wait_for_element(now, key, group, Some(*offer));
                return;
            }
            Ok(ours) => {
                self.take_in(now, key, group, *offer, Some(ours));
                return;
            }
            Err(Shortage::NoRoute) => Diagnosis::NO_ROUTE,
            Err(Shortage::NotListed) => Diagnosis::PEER_NOT_LISTED,
            Err(Shortage::Final | Shortage::Unproven(_)) => Diagnosis::OUT_OF_MEMORY,
        };
        self.answer_client(key, Err(refusal), false);
    }

    pub(super) fn answer_client(
        &mut self,
        key: Key,
        ours: Result<Offer, Diagnosis>,
        out_of_sync: bool,
    ) {
        let gids = self.group_of_session(key).map(|group| self.groups.addresses(group));
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        let Talk::Client(client) = &mut shaking.conversation.talk else { return };
        match ours {
            Ok(ours) => match client.agreement() {
                Some(Agreement::V2(_)) => {
                    let gids = gids.unwrap_or_default().into_iter().take(GIDS_MAX);
                    let gids = Gids::from_items(gids).expect("no more than fit");
                    client.provide_v2(ours, gids);
                }
                Some(Agreement::V1) | None => client.provide(ours),
            },
            Err(diagnosis) => {
                client.refuse(diagnosis, out_of_sync);
                self.fallback_reasons.insert(key, diagnosis);
            }
        }
    }
}

/// What is left of a Proposal that does not offer version 1: who we are.
fn without_v1(proposal: &Proposal) -> Proposal {
    Proposal {
        subnet: Ipv4Subnet::default(),
        prefixes: Default::default(),
        prefix_count: 0,
        offers_smc_r_v1: false,
        ..*proposal
    }
}
