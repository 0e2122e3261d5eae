//! DELETE LINK: one link, or all of them (RFC 3.5.4, 3.5.5.1.3, 3.5.5.1.4, A.3.4).
//!
//! The server deletes; a client asks it to. A link that failed is down at once and its connections
//! move; what remains is to tell the peer, over another link. A link that is to go in good order
//! is vacated first.

use super::exchange::Exchange;
use super::{Action, LinkGroup, Phase, Role, UNNUMBERED};
use crate::limits::RKEY_REPLY_WAIT;
use crate::link::{Cause, Event};
use crate::time::Instant;
use crate::vocabulary::LinkNumber;
use crate::wire::llc::{DeleteLink, DeleteReason, Llc};

use core::time::Duration;

/// How long a DELETE LINK waits for its answer, or a client for what it asked for.
pub(super) const DELETE_LINK_WAIT: Duration = RKEY_REPLY_WAIT;

/// That a link is to be deleted, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) reason: DeleteReason,
    pub(super) orderly: bool,
    pub(super) cause: Cause,
}

impl Order {
    /// At once.
    pub(super) fn of(reason: DeleteReason, cause: Cause) -> Self {
        Self { reason, orderly: false, cause }
    }
}

impl LinkGroup {
    /// Takes one link out of the group; with the last one the group ends. The server asks its
    /// client, a client asks its server to ask it (RFC 3.5.5.1.3, 3.5.5.1.4). If `orderly`, and
    /// another link can take them, its connections are moved away first.
    pub fn delete_link(
        &mut self,
        now: Instant,
        number: LinkNumber,
        reason: DeleteReason,
        orderly: bool,
    ) {
        let order = Order { reason, orderly, cause: Cause::DeletedByUs };
        if self.phase != Phase::Established || self.find(number).is_none() {
            return;
        }
        match self.role {
            Role::Server => self.order_delete(now, number, order),
            Role::Client => self.ask_to_delete(now, number, order),
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

    /// Tells the peer that all is over, and ends it.
    pub(super) fn end(&mut self, now: Instant, cause: Cause, reason: DeleteReason) {
        if let Some(link) = self.any_link_up() {
            // RFC 7609 3.5.4-6, 3.5.4-10
            // RFC 7609 A.3.4-4
            let none = UNNUMBERED;
            let all = DeleteLink { reply: false, all: true, orderly: true, link: none, reason };
            self.actions.push(Action::Send(link, Llc::DeleteLink(all)));
        }
        for number in self.numbers().into_iter().flatten() {
            // RFC 7609 C.7.1-19
            self.link_event(now, number, Event::Fail(cause));
        }
        if !self.is_terminated() {
            // All links were down already, and only the peer's word about them was missing.
            self.terminate(cause);
        }
    }

    /// A link is down, and the peer has to hear of it.
    pub(super) fn link_lost(&mut self, now: Instant, number: LinkNumber, cause: Cause) {
        self.link_event(now, number, Event::Fail(cause));
        if self.is_terminated() {
            return;
        }
        self.exchange_lost(now, number, cause);
        self.rkeys_lost(number);
        if let Phase::Founding { .. } | Phase::Established = self.phase
            && self.find(number).is_some()
        {
            // RFC 7609 2.3-5, 3.5.5.1.3-2, 3.5.5.1.4-1, C.7.1-8, C.7.1-11, C.7.1-22
            let order = Order::of(DeleteReason::LOST_PATH, cause);
            match self.role {
                Role::Server => self.order_delete(now, number, order),
                Role::Client => self.ask_to_delete(now, number, order),
            }
        }
        self.advance(now);
    }

    /// Ends the exchange that `number` carried or was about.
    fn exchange_lost(&mut self, now: Instant, number: LinkNumber, cause: Cause) {
        let Some(exchange) = self.exchange else { return };
        let added = exchange.number();
        if added != number && exchange.carrier() != Some(number) {
            return;
        }
        self.exchange = None;
        if !exchange.adds() {
            // What was to be deleted still is; `advance` begins anew, over another link.
            return;
        }
        self.retry_later(now);
        if added != number && self.find(added).is_some() {
            self.link_lost(now, added, cause);
        }
    }

    /// Server: notes that a link is to go, and begins if nothing else is under way.
    fn order_delete(&mut self, now: Instant, number: LinkNumber, order: Order) {
        if let Some(member) = self.find_mut(number) {
            member.delete.get_or_insert(order);
        }
        self.advance(now);
    }

    /// Server: DELETE LINK goes out, after the caller has moved the connections if there is time.
    pub(super) fn begin_delete(&mut self, now: Instant, number: LinkNumber) {
        let Some(member) = self.find(number) else { return };
        let Some(order) = member.delete else { return };
        let elsewhere = self.link_of_use();
        if order.orderly && member.link.is_up() && elsewhere.is_some() {
            self.exchange = Some(Exchange::Vacating { number });
            self.actions.push(Action::VacateLink(number));
            return;
        }
        self.say_delete(now, number, order);
    }

    fn say_delete(&mut self, now: Instant, number: LinkNumber, order: Order) {
        // RFC 7609 3.3-8, 3.5.5.1.3-4
        let Some(on) = self.link_of_use().or_else(|| self.any_link_up()) else { return };
        let deadline = now + DELETE_LINK_WAIT;
        self.exchange = Some(Exchange::Deleting { number, on, deadline });
        self.send_delete_link(on, number, order);
    }

    pub(super) fn send_delete_link(&mut self, on: LinkNumber, link: LinkNumber, order: Order) {
        let Order { reason, orderly, .. } = order;
        // RFC 7609 3.5.5.1.3-3
        let request = DeleteLink { reply: false, all: false, orderly, link, reason };
        self.send(on, Llc::DeleteLink(request));
    }

    /// Client: asks the server to delete a link.
    pub(super) fn ask_to_delete(&mut self, now: Instant, number: LinkNumber, order: Order) {
        // RFC 7609 3.5.5.1.4-2
        let on = self.members().find(|member| member.number != number && member.is_of_use());
        let on = on.map(|member| member.number).or_else(|| self.any_link_up());
        let Some(on) = on else { return };
        if let Some(member) = self.find_mut(number) {
            member.asked = Some((on, now + DELETE_LINK_WAIT));
        }
        self.send_delete_link(on, number, order);
    }

    /// Client: whether the server was asked to delete this link. What it says on it is ignored.
    pub(super) fn is_asked_away(&self, number: LinkNumber) -> bool {
        // RFC 7609 C.7.1-28
        self.find(number).is_some_and(|member| member.asked.is_some())
    }

    /// The answer to [`Action::VacateLink`]: no connection uses the link any more.
    pub fn link_vacated(&mut self, now: Instant, number: LinkNumber) {
        if self.exchange != Some(Exchange::Vacating { number }) {
            return;
        }
        self.exchange = None;
        let Some(order) = self.find(number).and_then(|member| member.delete) else { return };
        match self.role {
            Role::Server => self.say_delete(now, number, order),
            Role::Client => self.obey_delete(now, number, order),
        }
    }

    pub(super) fn handle_delete_link(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &DeleteLink,
    ) {
        if message.reply {
            self.delete_answered(now, message);
        } else if message.all {
            // RFC 7609 3.5.4-8, 3.5.4-11, 3.5.5.3-4, 3.5.5.3.1-5, 3.5.5.3.2-4, 3.5.5.3.3-6
            // Answered in kind, as deployed peers do; whoever began is gone already.
            self.end(now, Cause::DeletedByPeer, DeleteReason::PROGRAM);
        } else if self.find(message.link).is_none() {
            // RFC 7609 A.3.4-7, C.7.1-30, C.7.1-31
            let reason = DeleteReason::UNKNOWN_LINK;
            self.send(on, Llc::DeleteLink(DeleteLink { reply: true, reason, ..*message }));
        } else {
            let DeleteLink { link, reason, orderly, .. } = *message;
            let order = Order { reason, orderly, cause: Cause::DeletedByPeer };
            match self.role {
                Role::Client => self.delete_ordered(now, link, order),
                Role::Server => self.delete_asked(now, link, order),
            }
        }
    }

    /// Server: the client has let go of the link.
    fn delete_answered(&mut self, now: Instant, message: &DeleteLink) {
        let Some(Exchange::Deleting { number, .. }) = self.exchange else {
            self.dropped += 1;
            return;
        };
        if self.role == Role::Client || number != message.link {
            self.dropped += 1;
            return;
        }
        // RFC 7609 3.5.5.1.3-5, 3.5.5.1.3-6
        let cause = self.find(number).and_then(|member| member.delete).map(|order| order.cause);
        self.exchange = None;
        self.link_event(now, number, Event::Fail(cause.unwrap_or(Cause::DeletedByUs)));
        if !self.is_terminated() {
            self.remove_member(number);
            self.retry_later(now);
            self.advance(now);
        }
    }

    /// Server: the client wants a link away. If it has failed there, its connections must move now;
    /// the exchange about it waits for whatever is under way.
    fn delete_asked(&mut self, now: Instant, number: LinkNumber, order: Order) {
        let others = self.members().any(|other| other.number != number && other.is_of_use());
        if !order.orderly && others {
            // RFC 7609 2.3-3, 3.5.5.1.4-4
            self.link_event(now, number, Event::Fail(order.cause));
            self.exchange_lost(now, number, order.cause);
            self.rkeys_lost(number);
        }
        // RFC 7609 2.2.3-4, 3.5.5.1.4-3, 3.5.5.3-3, 3.5.5.3.1-3, 3.5.5.3.1-4, 3.5.5.3.2-3
        // RFC 7609 3.5.5.3.3-4, A.3.4-9
        self.order_delete(now, number, order);
    }

    /// Client: the server orders a link away.
    fn delete_ordered(&mut self, now: Instant, number: LinkNumber, order: Order) {
        let others = self.members().any(|other| other.number != number && other.is_of_use());
        let Some(member) = self.find_mut(number) else { return };
        if member.delete.is_some() {
            self.dropped += 1;
            return;
        }
        // What we asked for is our doing.
        let cause = if member.asked.is_some() { Cause::DeletedByUs } else { order.cause };
        let order = Order { cause, ..order };
        member.delete = Some(order);
        let vacate = order.orderly && member.link.is_up() && others;
        // RFC 7609 3.5.5.3.3-5
        self.exchange_lost(now, number, cause);
        if vacate && self.exchange.is_none() {
            self.exchange = Some(Exchange::Vacating { number });
            self.actions.push(Action::VacateLink(number));
        } else {
            self.obey_delete(now, number, order);
        }
    }

    /// Client: answers, and lets go of the link.
    fn obey_delete(&mut self, now: Instant, number: LinkNumber, order: Order) {
        let Order { reason, orderly, cause } = order;
        if let Some(on) = self.link_of_use().or_else(|| self.any_link_up()) {
            // RFC 7609 3.3-6, 3.5.5.1.3-7, 3.5.5.1.3-8
            let answer = DeleteLink { reply: true, all: false, orderly, link: number, reason };
            self.send(on, Llc::DeleteLink(answer));
        }
        self.link_event(now, number, Event::Fail(cause));
        if !self.is_terminated() {
            self.rkeys_lost(number);
            self.remove_member(number);
            self.retry_later(now);
            self.advance(now);
        }
    }

    /// Client: what the server was asked for and did not do in time.
    pub(super) fn asked_in_vain(&mut self, now: Instant) {
        for number in self.numbers().into_iter().flatten() {
            let Some(member) = self.find_mut(number) else { continue };
            let Some((on, deadline)) = member.asked else { continue };
            if deadline > now {
                continue;
            }
            member.asked = None;
            let is_down = !member.link.is_up();
            let order = Order::of(DeleteReason::LOST_PATH, Cause::LlcTimedOut);
            // RFC 7609 C.7.1-16, C.7.1-17
            if on != number {
                self.link_lost(now, on, Cause::LlcTimedOut);
            }
            if !self.is_terminated() && is_down {
                self.ask_to_delete(now, number, order);
            }
        }
    }
}
