//! The client side: Proposal out, Accept in, Confirm out.

use super::HandshakeError;
use crate::error::PeerMisbehaved;
use crate::limits::{CLC_WAIT, DECLINE_WAIT};
use crate::outbox::Outbox;
use crate::time::Instant;
use crate::vocabulary::PeerId;
use crate::wire::clc::{Decline, Diagnosis, Frame, Offer, Proposal};

/// What the caller must do next on behalf of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAction {
    /// Write this message to the TCP connection.
    Send(Frame),
    /// First contact: create a queue pair towards this one and a link group, then call
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
    /// The link did not come up. A Decline may explain why.
    AwaitingDecline { deadline: Instant },
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
    state: State,
    actions: Outbox<ClientAction, 2>,
}

impl Client {
    /// Begins a rendezvous with `proposal`.
    pub fn new(now: Instant, proposal: Proposal) -> Self {
        let mut actions = Outbox::new();
        // RFC 7609 3.2-2
        actions.push(ClientAction::Send(Frame::Proposal(proposal)));
        // RFC 7609 C.5-1
        let state = State::AwaitingAccept { deadline: now + CLC_WAIT };
        Self { peer_id: proposal.peer_id, state, actions }
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
                State::AwaitingAccept { .. }
                | State::Providing { .. }
                | State::AwaitingLink
                | State::AwaitingDecline { .. },
                // RFC 7609 3.5.1.6.4-2, 3.5.1.6.4-3
                Frame::Decline(Decline { diagnosis, out_of_sync, .. }),
            ) => Err(HandshakeError::Declined { diagnosis, out_of_sync }),
            (State::AwaitingAccept { .. }, Frame::Accept(offer)) => self.handle_accept(offer),
            (
                State::AwaitingAccept { .. }
                | State::Providing { .. }
                | State::AwaitingLink
                | State::AwaitingDecline { .. }
                | State::Over,
                Frame::Proposal(_) | Frame::Accept(_) | Frame::Confirm(_) | Frame::Decline(_),
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
    /// If no [`ClientAction::OpenLink`] or [`ClientAction::JoinLink`] asked for it.
    pub fn provide(&mut self, ours: Offer) {
        let State::Providing { first_contact } = self.state else {
            panic!("nobody asked for an offer: {:?}", self.state);
        };
        let confirm = Offer { first_contact, ..ours };
        // RFC 7609 3.2-4
        self.actions.push(ClientAction::Send(Frame::Confirm(confirm)));
        if first_contact {
            self.state = State::AwaitingLink;
        } else {
            self.state = State::Over;
            // RFC 7609 3.5.2.2-7, 3.5.2.4-2, 3.5.2.4-3, C.3-4
            self.actions.push(ClientAction::Done);
        }
    }

    /// We cannot go on, for this reason: Decline goes out in place of Confirm (C.1).
    /// `out_of_sync` says that there is no link group such as the server named (C.4).
    ///
    /// # Panics
    ///
    /// If no [`ClientAction::OpenLink`] or [`ClientAction::JoinLink`] asked for an answer. A client
    /// that changes its mind while it waits for the Accept must wait on.
    pub fn refuse(&mut self, diagnosis: Diagnosis, out_of_sync: bool) {
        // RFC 7609 C.1-1, C.1-4, C.1-6
        assert!(matches!(self.state, State::Providing { .. }), "a Decline replaces the Confirm");
        self.state = State::Over;
        self.actions.push(ClientAction::Send(Frame::Decline(Decline {
            out_of_sync,
            peer_id: self.peer_id,
            diagnosis,
        })));
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
            State::AwaitingDecline { .. } | State::Over => {}
            State::AwaitingAccept { .. } | State::Providing { .. } => {
                panic!("no link was opened: {:?}", self.state)
            }
        }
    }

    /// The link of a first contact failed. If the point of no return is behind (`committed`), that
    /// is the end; else the peer gets a little time to say why.
    ///
    /// # Errors
    ///
    /// [`HandshakeError::LinkFailed`] at once if `committed`.
    pub fn link_failed(&mut self, now: Instant, committed: bool) -> Result<(), HandshakeError> {
        match self.state {
            // RFC 7609 C.2-2, C.3-3
            State::AwaitingLink if committed => {
                self.over_if(Err(HandshakeError::LinkFailed { committed }))
            }
            State::AwaitingLink => {
                self.state = State::AwaitingDecline { deadline: now + DECLINE_WAIT };
                Ok(())
            }
            State::AwaitingAccept { .. }
            | State::Providing { .. }
            | State::AwaitingDecline { .. }
            | State::Over => Ok(()),
        }
    }

    /// The message to send for [`Verdict::FallBack`](super::Verdict::FallBack) with a code.
    pub fn decline(&self, diagnosis: Diagnosis) -> Decline {
        Decline { out_of_sync: false, peer_id: self.peer_id, diagnosis }
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
            State::AwaitingAccept { deadline } | State::AwaitingDecline { deadline } => {
                Some(deadline)
            }
            State::Providing { .. } | State::AwaitingLink | State::Over => None,
        }
    }

    /// Gives up waiting, if it is time.
    ///
    /// # Errors
    ///
    /// [`HandshakeError::TimedOut`] or [`HandshakeError::LinkFailed`].
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), HandshakeError> {
        let result = match self.state {
            State::AwaitingAccept { deadline } if deadline <= now => Err(HandshakeError::TimedOut),
            State::AwaitingDecline { deadline } if deadline <= now => {
                Err(HandshakeError::LinkFailed { committed: false })
            }
            State::AwaitingAccept { .. }
            | State::AwaitingDecline { .. }
            | State::Providing { .. }
            | State::AwaitingLink
            | State::Over => Ok(()),
        };
        self.over_if(result)
    }

    fn handle_accept(&mut self, offer: Offer) -> Result<(), HandshakeError> {
        // RFC 7609, C.6: a reserved value means that the peer can more than we, not worse.
        // RFC 7609 A.2.3-12, C.6-5
        if offer.first_contact && offer.mtu.bytes().is_none() {
            return Err(HandshakeError::Unsupported);
        }
        self.state = State::Providing { first_contact: offer.first_contact };
        // RFC 7609 3.5.2.2-2
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
