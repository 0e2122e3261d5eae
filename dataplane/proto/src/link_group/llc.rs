//! The LLC messages of a link group, and its answers to the peer's (RFC 3.5.5, A.3, C.7.1).
//!
//! A reply that no procedure waits for is dropped, as deployed peers drop it. A request that its
//! sender may never make is an offence, and costs the link.

use core::time::Duration;

use super::{Action, LinkGroup, Phase, Role, Setup};
use crate::error::PeerMisbehaved;
use crate::limits::{ADD_LINK_WAIT, RKEY_REPLY_WAIT};
use crate::link::{Cause, Event};
use crate::time::Instant;
use crate::vocabulary::{LinkNumber, Mtu, Psn, Qpn};
use crate::wire::llc::add_link::REASON_NO_ALTERNATE_PATH;
use crate::wire::llc::{
    AddLink, ConfirmLink, ConfirmRkey, DeleteLink, DeleteReason, DeleteRkey, Llc, TestLink,
};

/// The links a peer may ask for in one group, as every deployed peer says.
// RFC 7609 2.2.2-3, 2.2.2-5
const LINKS_WANTED: u8 = 2;

/// How long a DELETE LINK waits for its answer.
pub(super) const DELETE_LINK_WAIT: Duration = RKEY_REPLY_WAIT;

impl LinkGroup {
    pub(super) fn dispatch(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &Llc,
    ) -> Result<(), PeerMisbehaved> {
        match message {
            Llc::ConfirmLink(confirm) => self.handle_confirm_link(now, on, confirm),
            Llc::AddLink(add) => self.handle_add_link(now, on, add),
            Llc::DeleteLink(delete) => {
                self.handle_delete_link(now, on, delete);
                Ok(())
            }
            Llc::ConfirmRkey(confirm) => {
                self.handle_confirm_rkey(on, confirm);
                Ok(())
            }
            Llc::DeleteRkey(delete) => {
                self.handle_delete_rkey(on, delete);
                Ok(())
            }
            Llc::TestLink(test) => self.handle_test_link(on, test),
            // We never add a link, so nothing of a second one can continue.
            Llc::AddLinkContinuation(_) | Llc::ConfirmRkeyContinuation(_) => {
                self.dropped += 1;
                Ok(())
            }
        }
    }

    fn send(&mut self, on: LinkNumber, message: Llc) {
        self.actions.push(Action::Send(on, message));
    }

    /// Sends DELETE LINK for one link and waits for the answer.
    pub(super) fn ask_to_delete(
        &mut self,
        now: Instant,
        link: LinkNumber,
        cause: Cause,
        reason: DeleteReason,
        orderly: bool,
    ) {
        self.phase = Phase::DeletingLink { link, cause, deadline: now + DELETE_LINK_WAIT };
        let request = DeleteLink { reply: false, all: false, orderly, link, reason };
        self.send(link, Llc::DeleteLink(request));
    }

    pub(super) fn send_confirm_link(&mut self, number: LinkNumber, reply: bool) {
        let Setup { mac, gid, qpn, user_id, eye_catcher, .. } = self.setup;
        // RFC 7609 3.5.1.5-2
        let message = ConfirmLink {
            reply,
            no_eyecatcher: !eye_catcher,
            mac,
            gid,
            qpn,
            link: number,
            user_id,
            max_links: LINKS_WANTED,
        };
        self.send(number, Llc::ConfirmLink(message));
    }

    fn handle_confirm_link(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &ConfirmLink,
    ) -> Result<(), PeerMisbehaved> {
        match (self.role, message.reply, self.phase) {
            (Role::Client, false, Phase::Confirming { .. }) => {
                // RFC 7609 C.7.1-24
                if message.qpn != self.setup.peer_qpn {
                    return Err(PeerMisbehaved::WrongLink);
                }
                self.number_link(on, message.link);
                // RFC 7609 3.3-3, 3.5.1.5-5, 3.5.1.5-6, A.3.1-3
                self.send_confirm_link(message.link, true);
                self.first_link_confirmed(now, message);
            }
            // The server repeats itself; so do we.
            (Role::Client, false, Phase::AddingLink { .. } | Phase::Established)
                if message.link == on =>
            {
                self.send_confirm_link(on, true);
            }
            (Role::Server, true, Phase::Confirming { .. }) => {
                if message.link != on {
                    return Err(PeerMisbehaved::WrongLink);
                }
                self.first_link_confirmed(now, message);
                self.offer_impossible_link(on);
            }
            (Role::Server | Role::Client, true, _) => self.dropped += 1,
            (Role::Server | Role::Client, false, _) => {
                return Err(PeerMisbehaved::UnexpectedMessage);
            }
        }
        Ok(())
    }

    /// The server's number for our first link.
    fn number_link(&mut self, old: LinkNumber, new: LinkNumber) {
        if let Some(member) = self.find_mut(old) {
            member.number = new;
        }
        self.actions.push(Action::LinkNumbered(new));
    }

    fn first_link_confirmed(&mut self, now: Instant, message: &ConfirmLink) {
        self.peer_eye_catcher = !message.no_eyecatcher;
        // RFC 7609 3-3, 3.5.1.6-1
        self.phase = Phase::AddingLink { deadline: now + ADD_LINK_WAIT };
        // RFC 7609 3.5.1.5-4, C.7-2
        self.link_event(now, message.link, Event::Confirmed);
    }

    /// Offers a second link on the port of the first, with an MTU that does not exist: every
    /// deployed client rejects that at once, and the group is complete. Silence would cost it
    /// seconds; see the module. The body names our port because Linux mistakes an empty one.
    fn offer_impossible_link(&mut self, on: LinkNumber) {
        let offer = AddLink {
            reply: false,
            rejected: false,
            reason: 0,
            mac: self.setup.mac,
            gid: self.setup.gid,
            qpn: Qpn(0),
            link: LinkNumber(on.0.wrapping_add(1)),
            mtu: Mtu(0),
            psn: Psn(0),
        };
        // RFC 7609 C.3-1
        self.committed = true;
        // RFC 7609 3.5.1.6-5, A.3.2-12
        self.send(on, Llc::AddLink(offer));
    }

    fn handle_add_link(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &AddLink,
    ) -> Result<(), PeerMisbehaved> {
        match (self.role, message.reply, self.phase) {
            (Role::Client, false, Phase::AddingLink { .. }) => {
                self.reject_link(on, message);
                self.establish(now);
            }
            (Role::Client, false, Phase::Established | Phase::DeletingLink { .. }) => {
                self.reject_link(on, message);
            }
            (
                Role::Client,
                false,
                Phase::Opening | Phase::Confirming { .. } | Phase::Terminated,
            ) => {
                return Err(PeerMisbehaved::UnexpectedMessage);
            }
            (Role::Server, true, Phase::AddingLink { .. }) => {
                self.establish(now);
                if !message.rejected {
                    // Whatever the client believes to have accepted does not exist.
                    let reason = DeleteReason::LOST_PATH;
                    let link = message.link;
                    let delete =
                        DeleteLink { reply: false, all: false, orderly: false, link, reason };
                    self.send(on, Llc::DeleteLink(delete));
                }
            }
            // RFC 7609 3.5.5.3-2
            // A client has another RNIC; we have none to go with it, and need not answer.
            (Role::Server, false, _) | (Role::Server | Role::Client, true, _) => self.dropped += 1,
        }
        Ok(())
    }

    /// Our only RNIC carries the first link, and parallel links are not allowed (3.5.1.6.1).
    fn reject_link(&mut self, on: LinkNumber, offer: &AddLink) {
        let reason = REASON_NO_ALTERNATE_PATH;
        // RFC 7609 2.2.1-2, 3.5.1.6.1-2, 3.5.1.6.1-8, A.3.2-8
        self.send(on, Llc::AddLink(AddLink { reply: true, rejected: true, reason, ..*offer }));
    }

    fn handle_delete_link(&mut self, now: Instant, on: LinkNumber, message: &DeleteLink) {
        if message.reply {
            match (self.role, self.phase) {
                // RFC 7609 3.5.5.1.3-6
                (Role::Server, Phase::DeletingLink { link, cause, .. }) if link == message.link => {
                    self.link_event(now, link, Event::Fail(cause));
                }
                (Role::Server | Role::Client, _) => self.dropped += 1,
            }
        } else if message.all {
            // RFC 7609 3.5.4-8, 3.5.4-11, 3.5.5.3-4
            // Answered in kind, as deployed peers do; whoever began is gone already.
            self.end(now, Cause::DeletedByPeer, DeleteReason::PROGRAM);
        } else if self.find(message.link).is_none() {
            // RFC 7609 A.3.4-7, C.7.1-30
            let reason = DeleteReason::UNKNOWN_LINK;
            self.send(on, Llc::DeleteLink(DeleteLink { reply: true, reason, ..*message }));
        } else {
            self.handle_delete_request(now, on, message);
        }
    }

    /// A client obeys; a server that is asked orders it (3.5.5.1.3, 3.5.5.1.4).
    fn handle_delete_request(&mut self, now: Instant, on: LinkNumber, message: &DeleteLink) {
        let DeleteLink { link, reason, orderly, .. } = *message;
        match (self.role, self.phase) {
            // RFC 7609 3.5.5.1.3-7
            (Role::Client, phase) => {
                let cause = match phase {
                    Phase::DeletingLink { cause, .. } => cause,
                    Phase::Opening
                    | Phase::Confirming { .. }
                    | Phase::AddingLink { .. }
                    | Phase::Established
                    | Phase::Terminated => Cause::DeletedByPeer,
                };
                self.send(on, Llc::DeleteLink(DeleteLink { reply: true, ..*message }));
                self.link_event(now, link, Event::Fail(cause));
            }
            // Ours is under way.
            (Role::Server, Phase::DeletingLink { .. }) => self.dropped += 1,
            (
                Role::Server,
                Phase::Opening
                | Phase::Confirming { .. }
                | Phase::AddingLink { .. }
                | Phase::Established
                | Phase::Terminated,
                // RFC 7609 2.2.3-4, 2.3-5, 3.5.5.1.4-3, 3.5.5.1.4-4, 3.5.5.3-3, A.3.4-9
            ) => self.ask_to_delete(now, link, Cause::DeletedByPeer, reason, orderly),
        }
    }

    /// Keys for links that we do not have are of no use, and no offence.
    fn handle_confirm_rkey(&mut self, on: LinkNumber, message: &ConfirmRkey) {
        if message.reply {
            self.dropped += 1;
            return;
        }
        let full = self.peer_rkeys.learn(message.rkey, message.address).is_err();
        if !full {
            self.actions.push(Action::RkeyAdded(message.rkey, message.address));
        }
        // RFC 7609 A.3.5-8
        let reply = ConfirmRkey { reply: true, negative: full, retry: full, ..*message };
        self.send(on, Llc::ConfirmRkey(reply));
    }

    fn handle_delete_rkey(&mut self, on: LinkNumber, message: &DeleteRkey) {
        if message.reply {
            self.dropped += 1;
            return;
        }
        let mut error_mask = 0;
        // RFC 7609 3.5.5.2.2-4
        for (index, rkey) in message.rkeys.iter().take(usize::from(message.count)).enumerate() {
            if self.peer_rkeys.forget(*rkey) {
                self.actions.push(Action::RkeyDeleted(*rkey));
            } else {
                // RFC 7609 A.3.7-4, C.7.1-32
                error_mask |= 0x80 >> index;
            }
        }
        let negative = error_mask != 0;
        // RFC 7609 A.3.7-6
        let reply = DeleteRkey { reply: true, negative, error_mask, ..*message };
        self.send(on, Llc::DeleteRkey(reply));
    }

    fn handle_test_link(
        &mut self,
        on: LinkNumber,
        message: &TestLink,
    ) -> Result<(), PeerMisbehaved> {
        if !message.reply {
            // RFC 7609 3.3-4, 3.5.5.3-1, A.3.8-2
            self.send(on, Llc::TestLink(TestLink { reply: true, ..*message }));
            return Ok(());
        }
        let ours = self.setup.gid.0;
        let Some(member) = self.find_mut(on) else { return Ok(()) };
        if member.unanswered == 0 {
            self.dropped += 1;
            return Ok(());
        }
        member.unanswered -= 1;
        // RFC 7609 C.7.1-33
        if message.user_data == ours { Ok(()) } else { Err(PeerMisbehaved::WrongEcho) }
    }
}
