//! The client side: Proposal out, Accept in, Confirm out.

use super::{Agreement, HandshakeError, PolicyV2};
use crate::error::PeerMisbehaved;
use crate::limits::CLC_WAIT;
use crate::outbox::Outbox;
use crate::time::Instant;
use crate::vocabulary::{Gid, MacAddress, PeerId};
use crate::wire::Malformed;
use crate::wire::clc::v2::{Gids, OsType, VERSION};
use crate::wire::clc::{
    Decline, DeclineV2, Diagnosis, Frame, Offer, OfferV2, Proposal, ProposalV2,
};

/// What the caller must do next on behalf of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "there is no heap, and a rendezvous has one of them")]
pub enum ClientAction {
    /// Write this message to the TCP connection.
    Send(Frame),
    /// First contact: create a queue pair for the one in this offer, and a link group, then call
    /// [`Client::provide`] or [`Client::refuse`].
    OpenLink(Offer),
    /// Find the link group that this queue pair belongs to, then call [`Client::provide`], or
    /// [`Client::refuse`] with [`Diagnosis::OUT_OF_SYNC`] if there is none (C.4).
    JoinLink(Offer),
    /// The connection is SMC-R's: hand it to its poller.
    Done,
    /// We have declined: the connection stays TCP.
    FallBack,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// The Proposal is out.
    AwaitingAccept { deadline: Instant },
    /// The caller is looking for a queue pair and an element.
    Providing { first_contact: bool },
    /// The Confirm of a first contact is out; the link group is at work.
    AwaitingLink,
    /// Terminal, whatever the outcome.
    Over,
}

/// The client side of the CLC rendezvous.
///
/// - `handle_frame` feeds what the framer found, `handle_timeout` feeds time.
/// - `provide`, `refuse`, `link_confirmed` and `link_failed` feed the caller's own results.
/// - `poll_action` drains what the caller must do. Call it until `None` after every input.
/// - `poll_timeout` says when to call `handle_timeout`, at the latest.
///
/// After an error the machine is over. Inputs must carry non-decreasing `now`.
#[derive(Clone, Debug)]
pub struct Client {
    peer_id: PeerId,
    /// The port that the Proposal named, as version 1 and as version 2 calls it.
    gids: [Gid; 2],
    mac: MacAddress,
    offers_v1: bool,
    v2: Option<PolicyV2>,
    agreement: Option<Agreement>,
    /// The server answered in version 2.
    heard_v2: bool,
    state: State,
    actions: Outbox<ClientAction, 2>,
}

impl Client {
    /// Begins a rendezvous with `proposal`, in version 1.
    pub fn new(now: Instant, proposal: Proposal) -> Self {
        Self::propose(now, proposal, Gid::default(), None, Frame::Proposal(proposal))
    }

    /// Begins a rendezvous that offers version 2 with the RoCEv2 port `gid`, and version 1 as well
    /// if `proposal` does.
    ///
    /// # Panics
    ///
    /// If no peer would accept `policy`: no EID, fewer than 16 connections, no link, or a release
    /// that we do not know.
    pub fn with_v2(now: Instant, proposal: Proposal, policy: PolicyV2, gid: Gid) -> Self {
        policy.check();
        let frame = ProposalV2 { v1: proposal, v2: Some(policy.extension(gid)) };
        Self::propose(now, proposal, gid, Some(policy), Frame::ProposalV2(frame))
    }

    fn propose(
        now: Instant,
        v1: Proposal,
        gid_v2: Gid,
        v2: Option<PolicyV2>,
        frame: Frame,
    ) -> Self {
        let mut actions = Outbox::new();
        // RFC 7609 3.2 #2: client proposes with id, subnet, RNIC
        actions.push(ClientAction::Send(frame));
        // RFC 7609 C.5 #1: time limit for CLC
        let state = State::AwaitingAccept { deadline: now + CLC_WAIT };
        Self {
            peer_id: v1.peer_id,
            gids: [v1.gid, gid_v2],
            mac: v1.mac,
            offers_v1: v1.offers_smc_r_v1,
            v2,
            agreement: None,
            heard_v2: false,
            state,
            actions,
        }
    }

    /// The port that we proposed, in the version that was agreed on. A first contact must have its
    /// queue pair on this port: a Linux server connects to it, even if the Confirm names another
    /// one.
    pub fn port(&self) -> (Gid, MacAddress) {
        let [v1, v2] = self.gids;
        match self.agreement {
            Some(Agreement::V2(_)) => (v2, self.mac),
            Some(Agreement::V1) | None => (v1, self.mac),
        }
    }

    /// The server has accepted on a port that shares memory with this port of ours: the queue pair
    /// of a first contact is here, and the Confirm says so. The server knew by our peer id that it
    /// would be. It is none that connects to the port of the Proposal.
    pub fn move_to(&mut self, (gid, mac): (Gid, MacAddress)) {
        self.gids = [gid; 2];
        self.mac = mac;
    }

    /// Which version the connection speaks, once the server has chosen.
    pub fn agreement(&self) -> Option<&Agreement> {
        self.agreement.as_ref()
    }

    /// Takes in a message from the server.
    ///
    /// # Errors
    ///
    /// [`HandshakeError`] ends the rendezvous.
    ///
    /// # Specification
    ///
    /// RFC 7609, 3.5.1.3; C.1 and C.2 (Decline), C.6 (protocol errors).
    pub fn handle_frame(&mut self, frame: Frame) -> Result<(), HandshakeError> {
        let result = match (self.state, frame) {
            (
                State::AwaitingAccept { .. } | State::Providing { .. } | State::AwaitingLink,
                // RFC 7609 3.5.1.6.4 #2: decline in place of CLC message
                // RFC 7609 3.5.1.6.4 #3: decline during CONFIRM LINK before data
                Frame::Decline(Decline { diagnosis, out_of_sync, .. })
                | Frame::DeclineV2(DeclineV2 {
                    decline: Decline { diagnosis, out_of_sync, .. }, ..
                }),
            ) => Err(HandshakeError::Declined { diagnosis, out_of_sync }),
            (State::AwaitingAccept { .. }, Frame::Accept(offer)) => self.handle_accept(offer),
            (State::AwaitingAccept { .. }, Frame::AcceptV2(message)) => {
                self.handle_accept_v2(&message)
            }
            (
                State::AwaitingAccept { .. }
                | State::Providing { .. }
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

    /// Our queue pair and element for this connection. The Confirm goes out.
    ///
    /// In a subsequent contact the connection is SMC-R's from then on: the alert token and the
    /// element must be ready for the peer (C.3).
    ///
    /// # Panics
    ///
    /// If no [`ClientAction::OpenLink`] or [`ClientAction::JoinLink`] asked for it, version 1 was
    /// not agreed on, or a first contact is not over the port that was proposed.
    pub fn provide(&mut self, ours: Offer) {
        let first_contact = self.asked_for_first_contact(&ours);
        assert_eq!(self.agreement, Some(Agreement::V1), "what was agreed");
        let confirm = Offer { first_contact, ..ours };
        self.confirm(Frame::Confirm(confirm), first_contact);
    }

    /// [`Self::provide`] in version 2. `gids` are those of our ports over which the server may have
    /// further links, the one of `ours` among them; they count on first contact only.
    ///
    /// # Panics
    ///
    /// If no [`ClientAction::OpenLink`] or [`ClientAction::JoinLink`] asked for it, version 2 was
    /// not agreed on, or a first contact is not over the port that was proposed.
    pub fn provide_v2(&mut self, ours: Offer, gids: Gids) {
        let first_contact = self.asked_for_first_contact(&ours);
        let (Some(Agreement::V2(agreement)), Some(policy)) = (self.agreement, self.v2) else {
            panic!("agreed on {:?}", self.agreement);
        };
        let direct = agreement.peer.is_none_or(|peer| peer.direct);
        let ours_v2 = agreement.first_contact(policy.host_name, direct);
        let confirm = OfferV2 {
            offer: Offer { first_contact, ..ours },
            eid: agreement.eid,
            first_contact: first_contact.then_some(ours_v2),
            gids: if first_contact { gids } else { Gids::new() },
        };
        self.confirm(Frame::ConfirmV2(confirm), first_contact);
    }

    fn asked_for_first_contact(&self, ours: &Offer) -> bool {
        let State::Providing { first_contact } = self.state else {
            panic!("nobody asked for an offer: {:?}", self.state);
        };
        assert!(!first_contact || (ours.gid, ours.mac) == self.port(), "not the port proposed");
        first_contact
    }

    fn confirm(&mut self, confirm: Frame, first_contact: bool) {
        // RFC 7609 3.2 #4: client confirms with QP and RMB
        self.actions.push(ClientAction::Send(confirm));
        if first_contact {
            self.state = State::AwaitingLink;
        } else {
            self.state = State::Over;
            // RFC 7609 3.5.2.2 #7: no link verification on later contact
            // RFC 7609 3.5.2.4 #2: client confirms before first data
            // RFC 7609 3.5.2.4 #3: client sends data right after Confirm
            // RFC 7609 C.3 #4: later contact commits with last CLC
            self.actions.push(ClientAction::Done);
        }
    }

    /// We cannot go on, for this reason: a Decline goes out in place of the Confirm (C.1).
    /// `out_of_sync` says that we know no link group such as the server named (C.4).
    ///
    /// # Panics
    ///
    /// If no [`ClientAction::OpenLink`] or [`ClientAction::JoinLink`] asked for an answer. A client
    /// must not decline while it waits for the Accept.
    pub fn refuse(&mut self, diagnosis: Diagnosis, out_of_sync: bool) {
        // RFC 7609 C.1 #1: decline in place of expected CLC
        // RFC 7609 C.1 #4: no Decline after unanswered CLC
        // RFC 7609 C.1 #6: existing group: no Decline after Confirm
        assert!(matches!(self.state, State::Providing { .. }), "a Decline replaces the Confirm");
        self.state = State::Over;
        self.actions.push(ClientAction::Send(self.decline(diagnosis, out_of_sync)));
        self.actions.push(ClientAction::FallBack);
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
                self.actions.push(ClientAction::Done);
            }
            State::Over => {}
            State::AwaitingAccept { .. } | State::Providing { .. } => {
                panic!("no link was opened: {:?}", self.state)
            }
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
            State::AwaitingAccept { .. } | State::Providing { .. } | State::Over => Ok(()),
        }
    }

    /// A Decline in the version of the Accept, or in version 1 if no Accept has come.
    fn decline(&self, diagnosis: Diagnosis, out_of_sync: bool) -> Frame {
        let decline = Decline { out_of_sync, peer_id: self.peer_id, diagnosis };
        if self.heard_v2 {
            Frame::DeclineV2(DeclineV2 { decline, os: OsType::LINUX, information: [0; 4] })
        } else {
            Frame::Decline(decline)
        }
    }

    /// The message to send for [`Verdict::FallBack`](super::Verdict::FallBack) with a code.
    pub fn decline_frame(&self, diagnosis: Diagnosis) -> Frame {
        self.decline(diagnosis, false)
    }

    /// What the caller must do next, oldest first.
    #[must_use]
    pub fn poll_action(&mut self) -> Option<ClientAction> {
        self.actions.pop()
    }

    /// When to call [`Self::handle_timeout`], at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self.state {
            State::AwaitingAccept { deadline } => Some(deadline),
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
            State::AwaitingAccept { deadline } if deadline <= now => Err(HandshakeError::TimedOut),
            State::AwaitingAccept { .. }
            | State::Providing { .. }
            | State::AwaitingLink
            | State::Over => Ok(()),
        };
        self.over_if(result)
    }

    fn handle_accept(&mut self, offer: Offer) -> Result<(), HandshakeError> {
        if !self.offers_v1 {
            return Err(HandshakeError::Disagreed(Diagnosis::MODE_MISMATCH));
        }
        self.agree(Agreement::V1, offer)
    }

    fn handle_accept_v2(&mut self, message: &OfferV2) -> Result<(), HandshakeError> {
        let policy = self.v2.ok_or(Malformed::Version(VERSION))?;
        self.heard_v2 = true;
        let agreement = policy.accept(message)?;
        self.agree(Agreement::V2(agreement), message.offer)
    }

    fn agree(&mut self, agreement: Agreement, offer: Offer) -> Result<(), HandshakeError> {
        self.agreement = Some(agreement);
        // RFC 7609, C.6: a peer that sends a reserved value is newer than we are, and not broken.
        // RFC 7609 A.2.3 #12: read Accept's MTU on first contact
        // RFC 7609 C.6 #5: decline reserved enumerated values
        if offer.first_contact && offer.mtu.bytes().is_none() {
            return Err(HandshakeError::Unsupported);
        }
        self.state = State::Providing { first_contact: offer.first_contact };
        // RFC 7609 3.5.2.2 #2: first contact flag means new group
        self.actions.push(if offer.first_contact {
            ClientAction::OpenLink(offer)
        } else {
            ClientAction::JoinLink(offer)
        });
        Ok(())
    }

    fn over_if(&mut self, result: Result<(), HandshakeError>) -> Result<(), HandshakeError> {
        if result.is_err() {
            self.state = State::Over;
        }
        result
    }
}
