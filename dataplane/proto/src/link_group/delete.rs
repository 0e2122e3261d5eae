//! DELETE LINK: one link or all, in order or not, by either side
//! (RFC 2.3, 3.5.4, 3.5.5.1.3, 3.5.5.1.4, C.7.1).

use core::time::Duration;

use super::exchange::Exchange;
use super::members::Doom;
use super::{Action, LinkGroup, Phase, Role, UNNUMBERED};
use crate::limits::RKEY_REPLY_WAIT;
use crate::link::{Cause, Event};
use crate::time::Instant;
use crate::vocabulary::LinkNumber;
use crate::wire::llc::{DeleteLink, DeleteReason, Llc};

/// How long a DELETE LINK of the server waits for its answer.
pub(super) const DELETE_LINK_WAIT: Duration = RKEY_REPLY_WAIT;

/// How long a client waits for the server to act on its DELETE LINK. The server may first end
/// another exchange, as long as deployed peers let one take.
pub(super) const DELETE_REQUEST_WAIT: Duration = Duration::from_secs(20);

/// How long connections may take to leave a link. The server waits for the client's.
pub(super) const VACATE_WAIT: Duration = Duration::from_secs(1);
const _: () = assert!(VACATE_WAIT.as_nanos() < DELETE_LINK_WAIT.as_nanos());

impl LinkGroup {
    /// Takes one link out of the group; with the last one the group ends. The server asks its
    /// client, a client asks its server to ask it (RFC 3.5.5.1.3, 3.5.5.1.4). `orderly` moves
    /// connections away first; otherwise the link counts as lost.
    pub fn delete_link(
        &mut self,
        now: Instant,
        number: LinkNumber,
        reason: DeleteReason,
        orderly: bool,
    ) {
        if !matches!(self.phase, Phase::Established | Phase::AddingLink { .. }) {
            return;
        }
        // RFC 7609 3.5.5.1.3-3, 3.5.5.1.4-1
        self.doom(now, number, reason, orderly, Cause::DeletedByUs);
        self.proceed(now);
    }

    /// Notes that a link must go. One that is lost is treated so at once.
    fn doom(
        &mut self,
        now: Instant,
        number: LinkNumber,
        reason: DeleteReason,
        orderly: bool,
        cause: Cause,
    ) {
        let beside = self.has_link_beside(number);
        let Some(member) = self.find_mut(number) else { return };
        if member.doom.is_none() {
            member.doom = Some(Doom { reason, orderly, cause, asked: None });
        }
        if !orderly && beside && member.is_up() {
            // RFC 7609 3.5.5.1.4-3
            self.link_event(now, number, Event::Fail(cause));
            if let Some(doom) = self.find_mut(number).and_then(|member| member.doom.as_mut()) {
                doom.reason = reason;
            }
        }
    }

    /// Server: begins the exchange for a link that must go.
    pub(super) fn begin_delete(&mut self, now: Instant, number: LinkNumber) {
        let Some(member) = self.find(number) else { return };
        let Some(doom) = member.doom else { return };
        // RFC 7609 3.5.5.1.4-2, A.3.4-10
        if doom.orderly && member.is_up() && self.has_link_beside(number) {
            self.vacate(now, number, None);
        } else {
            self.send_delete_request(now, number, doom);
        }
    }

    fn vacate(&mut self, now: Instant, link: LinkNumber, answer: Option<(LinkNumber, DeleteLink)>) {
        self.exchange = Exchange::Vacating { link, deadline: now + VACATE_WAIT, answer };
        self.actions.push(Action::VacateLink(link));
    }

    fn send_delete_request(&mut self, now: Instant, link: LinkNumber, doom: Doom) {
        let Some(carrier) = self.carrier_beside(Some(link)) else { return };
        self.exchange = Exchange::Deleting { link, carrier, deadline: now + DELETE_LINK_WAIT };
        let Doom { reason, orderly, .. } = doom;
        let request = DeleteLink { reply: false, all: false, orderly, link, reason };
        // RFC 7609 3.3-8, 3.5.5.1.3-5, A.3.4-8
        self.send(carrier, Llc::DeleteLink(request));
    }

    /// Client: asks the server to delete a link. Returns whether it could.
    // RFC 7609 2.3-5, 3.5.5.1.4-1
    pub(super) fn ask_to_delete(&mut self, now: Instant, link: LinkNumber) -> bool {
        let Some(carrier) = self.carrier_beside(Some(link)) else { return false };
        let Some(member) = self.find_mut(link) else { return false };
        let Some(doom) = &mut member.doom else { return false };
        doom.asked = Some((carrier, now + DELETE_REQUEST_WAIT));
        let Doom { reason, orderly, .. } = *doom;
        let request = DeleteLink { reply: false, all: false, orderly, link, reason };
        self.send(carrier, Llc::DeleteLink(request));
        true
    }

    /// No connection uses the link any more: answers [`Action::VacateLink`].
    pub fn link_vacated(&mut self, now: Instant, number: LinkNumber) {
        self.vacated(now, number);
        self.proceed(now);
    }

    pub(super) fn vacated(&mut self, now: Instant, number: LinkNumber) {
        let Exchange::Vacating { link, answer, .. } = self.exchange else { return };
        if link != number {
            return;
        }
        self.exchange = Exchange::Idle;
        match answer {
            Some((on, message)) => self.agree_to_delete(now, on, &message),
            None => {
                if let Some(doom) = self.find(number).and_then(|member| member.doom) {
                    self.send_delete_request(now, number, doom);
                }
            }
        }
    }

    /// Ends the group: DELETE LINK for all links goes out, nobody waits for an answer.
    ///
    /// # Specification
    ///
    /// RFC 7609, 3.5.5.1.3 and 4.8.3.
    pub fn shutdown(&mut self, now: Instant, reason: DeleteReason) {
        self.end(now, Cause::DeletedByUs, reason);
    }

    /// Tells the peer that all is over, over every link that may still work, and ends it.
    pub(super) fn end(&mut self, now: Instant, cause: Cause, reason: DeleteReason) {
        for member in self.members.into_iter().flatten().filter(|member| member.is_up()) {
            // RFC 7609 3.5.4-6, 3.5.4-7, 3.5.4-10, 3.5.4-11, 4.8.3-1, C.7.1-18
            // RFC 7609 A.3.4-4
            let link = UNNUMBERED;
            let all = DeleteLink { reply: false, all: true, orderly: true, link, reason };
            self.send(member.number, Llc::DeleteLink(all));
        }
        // RFC 7609 C.7.1-19
        if !self.is_terminated() {
            self.terminate(now, cause);
        }
    }

    pub(super) fn handle_delete_link(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &DeleteLink,
    ) {
        if message.reply {
            self.handle_delete_reply(now, message);
        } else if message.all {
            // RFC 7609 3.5.4-8, 3.5.4-11, 3.5.5.3-4
            // RFC 7609 3.5.5.3.1-5, 3.5.5.3.2-4, 3.5.5.3.3-6
            // Answered in kind, as deployed peers do; whoever began is gone already.
            self.end(now, Cause::DeletedByPeer, DeleteReason::PROGRAM);
        } else if self.find(message.link).is_none() {
            self.deny_link(now, on, message);
        } else {
            match self.role {
                Role::Client => self.handle_delete_order(now, on, message),
                Role::Server => self.handle_delete_wish(now, message),
            }
        }
    }

    /// The peer names a link that is not there. A client may be about to open it.
    fn deny_link(&mut self, now: Instant, on: LinkNumber, message: &DeleteLink) {
        if let Exchange::Adding(adding) = self.exchange
            && adding.number == message.link
            && self.role == Role::Client
        {
            self.abort_add(now, Cause::DeletedByPeer, false);
        }
        // RFC 7609 A.3.4-7, C.7.1-29, C.7.1-30
        let reason = DeleteReason::UNKNOWN_LINK;
        self.send(on, Llc::DeleteLink(DeleteLink { reply: true, reason, ..*message }));
    }

    fn handle_delete_reply(&mut self, now: Instant, message: &DeleteLink) {
        let doom = self.find(message.link).and_then(|member| member.doom);
        match (self.role, self.exchange, doom) {
            // RFC 7609 3.5.5.1.3-6
            (Role::Server, Exchange::Deleting { link, .. }, Some(doom)) if link == message.link => {
                self.exchange = Exchange::Idle;
                self.bury(now, link, doom.cause);
                let replaced = doom.reason == DeleteReason::ASYMMETRIC_NOT_NEEDED;
                let told = doom.reason == DeleteReason::OPERATOR;
                let asymmetric = self.asymmetric().is_some();
                // A link that failed before it carried anything waits for its timer.
                let lost = !matches!(
                    doom.cause,
                    Cause::ConfirmTimedOut
                        | Cause::ExchangeFailed
                        | Cause::Unreachable
                        | Cause::NoAnswer
                        | Cause::PeerMisbehaved
                );
                let lacking = self.lacks_redundancy() && !asymmetric;
                self.wants_link |= lacking && lost && !replaced && !told;
            }
            // The server knows no such link: what we asked for is done.
            (Role::Client, _, Some(doom))
                if doom.asked.is_some() && message.reason == DeleteReason::UNKNOWN_LINK =>
            {
                self.bury(now, message.link, doom.cause);
            }
            (Role::Server | Role::Client, _, _) => self.dropped += 1,
        }
    }

    /// Client: the server deletes a link. It is always obeyed.
    fn handle_delete_order(&mut self, now: Instant, on: LinkNumber, message: &DeleteLink) {
        let link = message.link;
        match self.exchange {
            Exchange::Adding(adding) if adding.number == link => self.exchange = Exchange::Idle,
            // It was ordered twice; the first answer is due.
            Exchange::Vacating { link: vacating, .. } if vacating == link => {
                self.exchange = Exchange::Idle;
            }
            Exchange::Idle
            | Exchange::Adding(_)
            | Exchange::Deleting { .. }
            | Exchange::Vacating { .. } => {
                let up = self.find(link).is_some_and(|member| member.is_up());
                if message.orderly && up && self.has_link_beside(link) && !self.is_changing() {
                    self.vacate(now, link, Some((on, *message)));
                    return;
                }
            }
        }
        self.agree_to_delete(now, on, message);
    }

    /// Client: the link is over. Any indication that the reply arrived will do; the caller frees
    /// nothing before it has gone out.
    // RFC 7609 3.5.5.1.3-7, 3.5.5.1.3-8, 3.3-6
    fn agree_to_delete(&mut self, now: Instant, on: LinkNumber, message: &DeleteLink) {
        let doom = self.find(message.link).and_then(|member| member.doom);
        let cause = doom.map_or(Cause::DeletedByPeer, |doom| doom.cause);
        self.send(on, Llc::DeleteLink(DeleteLink { reply: true, ..*message }));
        self.bury(now, message.link, cause);
    }

    /// Server: the client wants a link deleted, and we begin the exchange when nothing else goes
    /// on.
    // RFC 7609 2.2.3-4, 2.3-5, 3.5.5.1.4-4, 3.5.5.3-3, A.3.4-9
    fn handle_delete_wish(&mut self, now: Instant, message: &DeleteLink) {
        let DeleteLink { link, reason, orderly, .. } = *message;
        let doomed = self.find(link).is_some_and(|member| member.doom.is_some());
        if doomed {
            // RFC 7609 C.7.1-29
            self.dropped += 1;
        }
        let joining = matches!(self.exchange, Exchange::Adding(adding) if adding.number == link);
        if joining {
            // The exchange fails by its own deadline, and the link goes then.
            return;
        }
        self.doom(now, link, reason, orderly, Cause::DeletedByPeer);
    }
}
