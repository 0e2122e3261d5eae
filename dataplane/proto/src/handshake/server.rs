//! The server side: Proposal in, Accept out, Confirm in.

use super::{Agreement, HandshakeError, Policy};
use crate::error::PeerMisbehaved;
use crate::limits::CLC_WAIT;
use crate::outbox::Outbox;
use crate::time::Instant;
use crate::vocabulary::PeerId;
use crate::wire::Malformed;
use crate::wire::clc::v2::{Gids, OsType, VERSION};
use crate::wire::clc::{
    Decline, DeclineV2, Diagnosis, Frame, Offer, OfferV2, Proposal, ProposalV2,
};

/// What the caller must do next on behalf of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "there is no heap, and a rendezvous has one of them")]
pub enum ServerAction {
    /// Write this message to the TCP connection.
    Send(Frame),
    /// Choose a link group or open one, find an element, then call [`Server::provide`]; or call
    /// [`Server::refuse`], as [`Server::objection`] may demand. In version 2 the GID is that of the
    /// client's RoCEv2 port; peer ID and MAC may be zero until the Confirm tells them.
    Provide(Proposal),
    /// First contact: bring our queue pair to this one, and start the link group.
    ConnectLink(Offer),
    /// Subsequent contact: this is the client's element. [`ServerAction::Done`] follows.
    JoinLink(Offer),
    /// The connection is SMC-R's: hand it to its poller.
    Done,
    /// We have declined: the connection stays TCP.
    FallBack,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// The TCP connection is up and carries the SMC option.
    AwaitingProposal { deadline: Instant },
    /// The caller is looking for a queue pair and an element.
    Providing { client: PeerId },
    /// The Accept is out.
    AwaitingConfirm { client: PeerId, first_contact: bool, deadline: Instant },
    /// The Confirm of a first contact is in; the link group is at work.
    AwaitingLink,
    /// Terminal, whatever the outcome.
    Over,
}

/// The server side of the CLC rendezvous.
///
/// Driven like [`Client`](super::Client): inputs in, then `poll_action` until `None`; after an
/// error the machine is over.
#[derive(Clone, Debug)]
pub struct Server {
    peer_id: PeerId,
    policy: Policy,
    /// The client proposed in version 2.
    knows_v2: bool,
    /// What to answer, once there is a Proposal.
    answer: Option<Result<Agreement, Diagnosis>>,
    state: State,
    actions: Outbox<ServerAction, 2>,
}

impl Server {
    /// Waits for a Proposal on a TCP connection whose SYN carried the option. `peer_id` is ours.
    /// Version 1 is spoken, and nothing else.
    pub fn new(now: Instant, peer_id: PeerId) -> Self {
        Self::with_policy(now, peer_id, Policy::V1)
    }

    /// As [`Self::new`], with the versions that `policy` allows.
    ///
    /// # Panics
    ///
    /// If no peer would accept `policy`: no EID, fewer than 16 connections, no link, or a release
    /// that we do not know.
    pub fn with_policy(now: Instant, peer_id: PeerId, policy: Policy) -> Self {
        if let Some(v2) = policy.v2 {
            v2.check();
        }
        // RFC 7609 C.5 #1: time limit for CLC
        let state = State::AwaitingProposal { deadline: now + CLC_WAIT };
        Self { peer_id, policy, knows_v2: false, answer: None, state, actions: Outbox::new() }
    }

    /// Which version the connection speaks, once there is a Proposal that allows one.
    pub fn agreement(&self) -> Option<&Agreement> {
        self.answer.as_ref()?.as_ref().ok()
    }

    /// Why the Proposal cannot be accepted, if it offers no version that we speak.
    pub fn objection(&self) -> Option<Diagnosis> {
        self.answer?.err()
    }

    /// Takes in a message from the client. A client that has set the SMC option but has no RNIC
    /// declines in place of its Proposal, as Linux does.
    ///
    /// # Errors
    ///
    /// [`HandshakeError`] ends the rendezvous.
    ///
    /// # Specification
    ///
    /// RFC 7609, 3.5.1.2 and 3.5.1.4; C.1 and C.2 (Decline), C.6 (protocol errors).
    pub fn handle_frame(&mut self, frame: Frame) -> Result<(), HandshakeError> {
        let result = match (self.state, frame) {
            (
                State::AwaitingProposal { .. }
                | State::AwaitingConfirm { .. }
                | State::AwaitingLink,
                // RFC 7609 3.5.1.6.4 #2: decline in place of CLC message
                // RFC 7609 3.5.1.6.4 #3: decline during CONFIRM LINK before data
                Frame::Decline(Decline { diagnosis, out_of_sync, .. })
                | Frame::DeclineV2(DeclineV2 {
                    decline: Decline { diagnosis, out_of_sync, .. }, ..
                }),
            ) => Err(HandshakeError::Declined { diagnosis, out_of_sync }),
            (State::AwaitingProposal { .. }, Frame::Proposal(proposal)) => {
                self.ask(proposal, self.policy.answer_v1(&proposal));
                Ok(())
            }
            (State::AwaitingProposal { .. }, Frame::ProposalV2(proposal)) => {
                self.handle_proposal_v2(&proposal);
                Ok(())
            }
            (State::AwaitingConfirm { client, first_contact, .. }, Frame::Confirm(offer)) => {
                self.handle_confirm(client, first_contact, offer)
            }
            (State::AwaitingConfirm { client, first_contact, .. }, Frame::ConfirmV2(message)) => {
                self.handle_confirm_v2(client, first_contact, &message)
            }
            (
                State::AwaitingProposal { .. }
                | State::Providing { .. }
                | State::AwaitingConfirm { .. }
                | State::AwaitingLink
                | State::Over,
                Frame::Proposal(_)
                | Frame::Accept(_)
                | Frame::Confirm(_)
                | Frame::Decline(_)
                | Frame::ProposalV2(_)
                | Frame::AcceptV2(_)
                | Frame::ConfirmV2(_)
                | Frame::DeclineV2(_),
            ) => Err(PeerMisbehaved::UnexpectedMessage.into()),
        };
        self.over_if(result)
    }

    /// Our queue pair and element for this connection; `first_contact` says whether a link group
    /// begins with it. The Accept goes out.
    ///
    /// In a subsequent contact the alert token and the element must be ready from then on: the
    /// peer's first message may overtake its Confirm.
    ///
    /// # Panics
    ///
    /// If no [`ServerAction::Provide`] asked for it, or version 1 was not agreed on.
    pub fn provide(&mut self, now: Instant, ours: Offer) {
        self.accept(now, Frame::Accept(ours), ours.first_contact);
        assert_eq!(self.answer, Some(Ok(Agreement::V1)), "what was agreed");
    }

    /// [`Self::provide`] in version 2. `direct` says whether the client's GID is in the subnet of
    /// ours; it counts on first contact only.
    ///
    /// # Panics
    ///
    /// If no [`ServerAction::Provide`] asked for it, or version 2 was not agreed on.
    pub fn provide_v2(&mut self, now: Instant, ours: Offer, direct: bool) {
        let (Some(Ok(Agreement::V2(agreement))), Some(policy)) = (self.answer, self.policy.v2)
        else {
            panic!("agreed on {:?}", self.answer);
        };
        let ours_v2 = agreement.first_contact(policy.host_name, direct);
        let accept = OfferV2 {
            offer: ours,
            eid: agreement.eid,
            first_contact: ours.first_contact.then_some(ours_v2),
            gids: Gids::new(),
        };
        self.accept(now, Frame::AcceptV2(accept), ours.first_contact);
    }

    fn accept(&mut self, now: Instant, accept: Frame, first_contact: bool) {
        let State::Providing { client } = self.state else {
            panic!("nobody asked for an offer: {:?}", self.state);
        };
        let deadline = now + CLC_WAIT;
        self.state = State::AwaitingConfirm { client, first_contact, deadline };
        // RFC 7609 3.2 #3: server accepts with QP and RMB
        self.actions.push(ServerAction::Send(accept));
    }

    /// We do not accept, for this reason: a Decline goes out in place of the Accept (C.1).
    ///
    /// # Panics
    ///
    /// If no [`ServerAction::Provide`] asked for an answer.
    pub fn refuse(&mut self, diagnosis: Diagnosis) {
        // RFC 7609 C.1 #1: decline in place of expected CLC
        // RFC 7609 C.1 #4: no Decline after unanswered CLC
        // RFC 7609 C.1 #5: existing group: no Decline after Accept
        assert!(matches!(self.state, State::Providing { .. }), "a Decline replaces the Accept");
        self.state = State::Over;
        // RFC 7609 3.5.1.2 #12: server declines to TCP at once
        self.actions.push(ServerAction::Send(self.decline_frame(diagnosis)));
        self.actions.push(ServerAction::FallBack);
    }

    /// Whether all CLC messages of a first contact are exchanged, and its link is to be confirmed.
    pub fn is_awaiting_link(&self) -> bool {
        matches!(self.state, State::AwaitingLink)
    }

    /// The link group has confirmed the link of a first contact.
    ///
    /// # Panics
    ///
    /// If the link was not opened for this rendezvous.
    pub fn link_confirmed(&mut self) {
        match self.state {
            State::AwaitingLink => {
                self.state = State::Over;
                // RFC 7609 C.3 #4: later contact commits with last CLC
                self.actions.push(ServerAction::Done);
            }
            State::Over => {}
            State::AwaitingProposal { .. }
            | State::Providing { .. }
            | State::AwaitingConfirm { .. } => panic!("no link was opened: {:?}", self.state),
        }
    }

    /// The link of a first contact failed. If it has passed the point of no return (`committed`),
    /// the TCP connection ends. Otherwise we decline at once, because a peer that waits for a
    /// message on the link learns of it in no other way. A Decline of the peer may cross ours,
    /// which the TCP relay expects.
    ///
    /// # Errors
    ///
    /// [`HandshakeError::LinkFailed`], if the rendezvous was waiting for the link.
    pub fn link_failed(&mut self, committed: bool) -> Result<(), HandshakeError> {
        match self.state {
            // RFC 7609 C.3 #3: reset beyond point of no return
            State::AwaitingLink => self.over_if(Err(HandshakeError::LinkFailed { committed })),
            State::AwaitingProposal { .. }
            | State::Providing { .. }
            | State::AwaitingConfirm { .. }
            | State::Over => Ok(()),
        }
    }

    /// The message to send for [`Verdict::FallBack`](super::Verdict::FallBack) with a code: in
    /// version 2 if both sides speak it, even if they agreed on version 1.
    pub fn decline_frame(&self, diagnosis: Diagnosis) -> Frame {
        let decline = Decline { out_of_sync: false, peer_id: self.peer_id, diagnosis };
        if self.knows_v2 && self.policy.v2.is_some() {
            Frame::DeclineV2(DeclineV2 { decline, os: OsType::LINUX, information: [0; 4] })
        } else {
            Frame::Decline(decline)
        }
    }

    /// What the caller must do next, oldest first.
    #[must_use]
    pub fn poll_action(&mut self) -> Option<ServerAction> {
        self.actions.pop()
    }

    /// When to call [`Self::handle_timeout`], at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self.state {
            State::AwaitingProposal { deadline } | State::AwaitingConfirm { deadline, .. } => {
                Some(deadline)
            }
            State::Providing { .. } | State::AwaitingLink | State::Over => None,
        }
    }

    /// Gives up waiting, if it is time.
    ///
    /// # Errors
    ///
    /// [`HandshakeError::TimedOut`].
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), HandshakeError> {
        let result = match self.state {
            State::AwaitingProposal { deadline } | State::AwaitingConfirm { deadline, .. }
                if deadline <= now =>
            {
                Err(HandshakeError::TimedOut)
            }
            State::AwaitingProposal { .. }
            | State::AwaitingConfirm { .. }
            | State::Providing { .. }
            | State::AwaitingLink
            | State::Over => Ok(()),
        };
        self.over_if(result)
    }

    fn ask(&mut self, proposal: Proposal, answer: Result<Agreement, Diagnosis>) {
        self.answer = Some(answer);
        self.state = State::Providing { client: proposal.peer_id };
        self.actions.push(ServerAction::Provide(proposal));
    }

    fn handle_proposal_v2(&mut self, proposal: &ProposalV2) {
        self.knows_v2 = true;
        let answer = self.policy.answer(proposal);
        let gid = match (answer, proposal.v2) {
            (Ok(Agreement::V2(_)), Some(extension)) => extension.gid,
            (Ok(_) | Err(_), _) => proposal.v1.gid,
        };
        self.ask(Proposal { gid, ..proposal.v1 }, answer);
    }

    /// Linux leaves the peer ID of a Proposal zero if that offers version 2 only.
    fn handle_confirm_v2(
        &mut self,
        client: PeerId,
        first_contact: bool,
        message: &OfferV2,
    ) -> Result<(), HandshakeError> {
        let Some(Ok(Agreement::V2(agreement))) = &mut self.answer else {
            return Err(Malformed::Version(VERSION).into());
        };
        if message.offer.first_contact != first_contact {
            return Err(PeerMisbehaved::UnexpectedMessage.into());
        }
        let confirmed = agreement.confirm(message);
        // RFC 7609 C.3 #4: later contact commits with last CLC
        // A client that joins a link group may write by RDMA as soon as it has sent its Confirm, so
        // it is too late to decline.
        if !first_contact && matches!(confirmed, Err(HandshakeError::Disagreed(_))) {
            return Err(PeerMisbehaved::UnexpectedMessage.into());
        }
        confirmed?;
        let client = if client == PeerId::default() { message.offer.peer_id } else { client };
        self.join_or_connect(client, first_contact, message.offer)
    }

    /// The F bit of a Confirm of version 1 is ignored, because old clients leave it clear. The F
    /// bit of our Accept decides.
    fn handle_confirm(
        &mut self,
        client: PeerId,
        first_contact: bool,
        offer: Offer,
    ) -> Result<(), HandshakeError> {
        if self.agreement() != Some(&Agreement::V1) {
            return Err(PeerMisbehaved::UnexpectedMessage.into());
        }
        self.join_or_connect(client, first_contact, offer)
    }

    fn join_or_connect(
        &mut self,
        client: PeerId,
        first_contact: bool,
        offer: Offer,
    ) -> Result<(), HandshakeError> {
        if offer.peer_id != client {
            return Err(PeerMisbehaved::IdentityChanged.into());
        }
        if !first_contact {
            self.state = State::Over;
            self.actions.push(ServerAction::JoinLink(offer));
            self.actions.push(ServerAction::Done);
            return Ok(());
        }
        // RFC 7609, C.6: a peer that sends a reserved value is newer than we are, and not broken.
        // RFC 7609 A.2.4 #4: read Confirm's MTU on first contact
        // RFC 7609 C.6 #5: decline reserved enumerated values
        if offer.mtu.bytes().is_none() {
            return Err(HandshakeError::Unsupported);
        }
        self.state = State::AwaitingLink;
        self.actions.push(ServerAction::ConnectLink(offer));
        Ok(())
    }

    fn over_if(&mut self, result: Result<(), HandshakeError>) -> Result<(), HandshakeError> {
        if result.is_err() {
            self.state = State::Over;
        }
        result
    }
}
