//! The client's side: sends the Proposal, and gets a queue pair or an element for the Confirm.

use smcr_proto::handshake::{Agreement, Client};
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::v2::{GIDS_MAX, Gids};
use smcr_proto::wire::clc::{Decline, Diagnosis, Frame, Ipv4Subnet, Offer, Proposal};
use smcr_proto::{Gid, MacAddress};
use smcr_rnic::Rnic;

use super::conversation::Machine;
use super::negotiation::Negotiator;
use super::resources::Shortage;
use super::state::State;
use super::waiting::{Answer, END_WAIT, Held, Wait};
use crate::groups::{GroupId, Peer, Pollers, PortId, Proof, QpOf, Taken, Unnamed};
use crate::paths::Far;

impl<N: Rnic, P: Pollers<QpOf<N>>> Negotiator<'_, N, P> {
    /// The connection to the peer is up: proposes, if the peer offered SMC-R and we have an RNIC.
    /// Returns a Decline that must be sent in place of the Proposal.
    pub(super) fn propose(&mut self) -> Option<Frame> {
        // RFC 7609 3.1 #3: stay on TCP without both options
        // RFC 7609 3.5.1.1 #7: hand over TCP without both options
        // RFC 7609 3.5.1.6.4 #1: plain TCP without both options
        // A server that a program has dialled has offered it, whatever the survey says.
        if !self.one.surroundings.offered && !self.one.dialled {
            let listed = self.is_listed();
            let why = if listed { Diagnosis::NO_SMC_OPTION } else { Diagnosis::PEER_NOT_LISTED };
            self.one.state = State::plain(Some(self.one.reason.unwrap_or(why)));
            return None;
        }
        match self.proposal() {
            Ok(proposal) => {
                let client = self.client(proposal);
                self.one.state = State::talk(Machine::Client(client));
                None
            }
            // The peer waits for a CLC message, so we refuse by a Decline.
            Err(diagnosis) => {
                self.one.state = State::Declined(diagnosis);
                let peer_id = self.shared.settings.peer_id;
                Some(Frame::Decline(Decline { out_of_sync: false, peer_id, diagnosis }))
            }
        }
    }

    /// Whether the server may be an SMC-R peer.
    fn is_listed(&self) -> bool {
        self.terms().offers_to(self.one.upstream)
    }

    /// Makes our Proposal. It reserves nothing, because the server may decline.
    ///
    /// # Errors
    ///
    /// Why we do not propose.
    fn proposal(&mut self) -> Result<Proposal, Diagnosis> {
        if let Some(reason) = self.one.reason {
            return Err(reason);
        }
        if !self.is_listed() {
            return Err(Diagnosis::PEER_NOT_LISTED);
        }
        if self.shared.draining {
            return Err(Diagnosis::TOO_BUSY);
        }
        let groups = &self.shared.groups;
        let port = self.one.surroundings.port.and_then(|port| groups.usable_port(port, None));
        let address = port.and_then(|port| groups.ports()[port.0].address());
        let (gid, mac) = address.ok_or(Diagnosis::NO_SMC_R_DEVICE)?;
        self.check_protection()?;
        if self.one.path.is_closed(self.now, Far::Server(self.one.upstream), &mut self.shared.paths)
        {
            return Err(Diagnosis::NO_ROCE_PATH);
        }
        let subnets = self.one.surroundings.subnets;
        // RFC 7609 3.5.1.2 #2: Proposal with peer id, GID, MAC
        // RFC 7609 3.5.1.2 #3: Proposal with subnet or prefixes
        // RFC 7609 3.5.1.2 #4: Proposal commits no resources
        // RFC 7609 3.5.2 #2: same CLC messages on existing group
        // RFC 7609 3.5.2.1 #1: same Proposal on later contact
        Ok(Proposal {
            peer_id: self.shared.settings.peer_id,
            gid,
            mac,
            subnet: subnets.ipv4,
            prefixes: subnets.prefixes,
            prefix_count: subnets.prefix_count,
            offers_smc_r_v1: true,
        })
    }

    /// The handshake machine that sends this Proposal, in the SMC-R versions that we speak.
    fn client(&self, proposal: Proposal) -> Client {
        let policy = self.shared.policy(self.one.surroundings.port);
        let gid = proposal.gid;
        let proposal = if policy.v1 { proposal } else { without_v1(&proposal) };
        // RFC 7609 3 #1: set up links in band
        // RFC 7609 3 #2: CLC before any application data
        // RFC 7609 3.1 #2: exchange CLC if both set option
        // RFC 7609 3.5.1.2 #1: always send Proposal to capable peers
        match policy.v2 {
            Some(v2) => Client::with_v2(self.now, proposal, v2, gid),
            None => Client::new(self.now, proposal),
        }
    }

    /// What to answer to an Accept.
    pub(super) fn answer_to_accept(&mut self, offer: &Offer) -> Answer {
        if let Err(protected) = self.check_protection() {
            return Answer::Now(Err(protected));
        }
        if offer.first_contact { Answer::Now(self.open_link(offer)) } else { self.join_link(offer) }
    }

    /// Whether the Confirm of this offer may leave, for which an element of the peer had to become
    /// free first. If that is `insisted` on, who still has it is reset; but not for a connection
    /// that stays TCP.
    pub(super) fn confirm(
        &mut self,
        ours: Offer,
        insisted: Option<Offer>,
    ) -> Result<Offer, Diagnosis> {
        self.check_protection()?;
        if let Some(offer) = insisted
            && let Err(offence) = self.insist_on(&offer)
        {
            self.note_bad_offer(offence);
            return Err(Diagnosis::OUT_OF_MEMORY);
        }
        Ok(ours)
    }

    /// First contact: the server has opened a queue pair for us.
    fn open_link(&mut self, offer: &Offer) -> Result<Offer, Diagnosis> {
        let agreement = self.agreement().expect("an Accept settles the version");
        let reach = match agreement {
            Agreement::V1 => Some(offer.gid),
            Agreement::V2(_) => None,
        };
        if !self.terms().peers.admit_gid(offer.gid) {
            self.note_unlisted(offer.gid);
            return Err(Diagnosis::PEER_NOT_LISTED);
        }
        let proposed = self.proposed_port();
        let groups = &self.shared.groups;
        let near = groups.port_sharing_with(offer.gid);
        let [_, _, near_mac @ ..] = self.shared.settings.peer_id.0;
        if near.is_none() && offer.mac.0 == near_mac && offer.mac != proposed.1 {
            // The server means the port that our peer id speaks of, and it is out of use.
            return Err(Diagnosis::NO_ROCE_PATH);
        }
        let port = near.or_else(|| groups.port_at(proposed, reach));
        let port = port.ok_or(Diagnosis::NO_SMC_R_DEVICE)?;
        let address = near.and_then(|near| groups.ports()[near.0].address());
        if let Agreement::V2(terms) = agreement
            && let Some(diagnosis) = terms.objection(groups.ports()[port.0].path_to(offer.gid))
        {
            return Err(diagnosis);
        }
        if let Some(address) = address
            && let Machine::Client(client) = &mut self.handshake().conversation.machine
        {
            client.move_to(address);
        }
        self.found_link(port, offer, agreement)
    }

    /// The RNIC port that our Proposal named for the link of a first contact.
    fn proposed_port(&mut self) -> (Gid, MacAddress) {
        match &self.handshake().conversation.machine {
            Machine::Client(client) => client.port(),
            Machine::Server(_) => panic!("a server proposes nothing"),
        }
    }

    /// Creates a group, takes an element in it, and connects its queue pair to the server's.
    fn found_link(
        &mut self,
        port: PortId,
        offer: &Offer,
        agreement: Agreement,
    ) -> Result<Offer, Diagnosis> {
        let peer = Peer::of(offer, agreement != Agreement::V1, self.peer_address());
        // RFC 7609 3.5.1.3 #2: client ready to receive before Confirm
        // RFC 7609 3.5.1.3 #3: connect client QP from Accept
        // RFC 7609 3.5.3 #4: new client resources for parallel group
        // RFC 7609 3.5.3 #6: parallel group follows first contact flow
        let founded = self.found(port, Role::Client, peer);
        let ours = founded.map_err(|_| Diagnosis::OUT_OF_MEMORY)?;
        if self.connect_to(offer, agreement) {
            Ok(ours)
        } else {
            Err(Diagnosis::QUEUE_PAIR_NOT_READY)
        }
    }

    /// Subsequent contact: the server named a link that we should know.
    fn join_link(&mut self, offer: &Offer) -> Answer {
        // RFC 7609 3.5.1.3 #1: tell new links from existing ones
        let v2 = self.agreement().is_some_and(|agreement| agreement != Agreement::V1);
        let source = self.peer_address();
        let proposed = self.proposed_port();
        let groups = &mut self.shared.groups;
        // Meanwhile the RNIC may have been closed, or have got another address.
        let near = groups.port_sharing_with(offer.gid).or_else(|| groups.port_named(proposed));
        let Some(port) = near else {
            return Answer::Now(Err(Diagnosis::SERVER_LINK_NOT_FOUND));
        };
        let (group, link) = match groups.named_by(self.now, offer, v2, source, port) {
            Ok(found) => found,
            Err(Unnamed::OutOfSync) => return Answer::Now(Err(Diagnosis::OUT_OF_SYNC)),
            Err(Unnamed::LinkGone | Unnamed::NotTheirs) => {
                return Answer::Now(Err(Diagnosis::SERVER_LINK_NOT_FOUND));
            }
        };
        match groups.proof_of(self.now, self.one.path.proof_age(self.now), group, link) {
            Proof::Given => {}
            // Whether another link works says nothing about the path of this one.
            Proof::Awaited => {
                return self.without_element(Shortage::Unproven(group, Some(link)));
            }
            // It is down, or its connections are leaving it: the server will hear of that.
            Proof::Impossible => return Answer::Now(Err(Diagnosis::SERVER_LINK_NOT_FOUND)),
        }
        match self.join(group, link) {
            Ok(ours) => self.take_accepted(group, offer, ours),
            Err(shortage) => self.without_element(shortage),
        }
    }

    /// Notes the element that the server offered in a later contact; `ours` is the offer of our
    /// Confirm.
    fn take_accepted(&mut self, group: GroupId, offer: &Offer, ours: Offer) -> Answer {
        match self.take_offer(offer) {
            Ok(Taken::Noted) => Answer::Now(Ok(ours)),
            Ok(Taken::Awaited) => Answer::Later(Wait::Holder(Held {
                group,
                until: self.now + END_WAIT,
                offer: *offer,
                answer: Some(ours),
            })),
            Err(offence) => {
                self.note_bad_offer(offence);
                Answer::Now(Err(Diagnosis::OUT_OF_MEMORY))
            }
        }
    }

    /// Answers an Accept by Confirm or Decline.
    pub(super) fn reply_to_server(&mut self, answer: Result<Offer, Diagnosis>) {
        let group = self.one.resources.as_ref().map(|resources| resources.group);
        let gids = group.map(|group| self.shared.groups.addresses(group));
        let Machine::Client(client) = &mut self.handshake().conversation.machine else {
            panic!("only a client answers an Accept");
        };
        match (answer, client.agreement()) {
            (Ok(ours), Some(Agreement::V2(_))) => {
                let gids = gids.unwrap_or_default().into_iter().take(GIDS_MAX);
                client.provide_v2(ours, Gids::from_items(gids).expect("no more than fit"));
            }
            (Ok(ours), Some(Agreement::V1) | None) => client.provide(ours),
            (Err(diagnosis), _) => client.refuse(diagnosis, diagnosis == Diagnosis::OUT_OF_SYNC),
        }
    }
}

/// The same Proposal without SMC-Rv1: it still says who we are, but not in which subnets we are.
fn without_v1(proposal: &Proposal) -> Proposal {
    Proposal {
        subnet: Ipv4Subnet::default(),
        prefixes: Default::default(),
        prefix_count: 0,
        offers_smc_r_v1: false,
        ..*proposal
    }
}
