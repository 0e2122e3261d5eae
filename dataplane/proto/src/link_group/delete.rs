//! DELETE LINK: one link, or all of them (RFC 3.5.4, 3.5.5.1.3, 3.5.5.1.4, A.3.4).
//!
//! The server deletes links, and a client asks it to. A link that failed is down at once and its
//! connections move; then the peer is told over another link. A link that works is vacated before
//! it is deleted.

use super::exchange::Exchange;
use super::{Action, LinkGroup, Phase, Role, UNNUMBERED};
use crate::limits::{ADD_LINK_WAIT, CONFIRM_ADDED_LINK_WAIT, LINK_EXCHANGE_WAIT};
use crate::link::{Cause, Event};
use crate::time::Instant;
use crate::vocabulary::LinkNumber;
use crate::wire::llc::{DeleteLink, DeleteReason, Llc};

use core::time::Duration;

/// How long a client waits for the deletion that it asked for. The server may have to finish adding
/// a link first, or find out that another link has failed.
pub(super) const ASKED_WAIT: Duration = Duration::from_secs(130);
const _: () = assert!(
    ASKED_WAIT.as_secs() > 3 * LINK_EXCHANGE_WAIT.as_secs() + CONFIRM_ADDED_LINK_WAIT.as_secs()
);

/// How long until a client asks again. A Linux server drops a request that it has no room to queue,
/// and does not say so. A server that has queued the first one ignores the second.
pub(super) const ASK_AGAIN_WAIT: Duration = Duration::from_secs(10);

/// How long a client waits for a deletion during the first contact, while an application waits.
const ASKED_WAIT_FOUNDING: Duration = Duration::from_secs(12);
const _: () = assert!(
    ASKED_WAIT_FOUNDING.as_secs() > 3 * ADD_LINK_WAIT.as_secs() + CONFIRM_ADDED_LINK_WAIT.as_secs()
);

/// How long connections may take to leave a link that works. A server decides on its own; a client
/// has to answer before a Linux server goes on without the answer.
const VACATE_WAIT_SERVER: Duration = Duration::from_secs(10);
pub(super) const VACATE_WAIT_CLIENT: Duration = Duration::from_secs(1);
/// How long a deployed server waits for the answer to its DELETE LINK.
const SERVER_PATIENCE: Duration = Duration::from_secs(2);
const _: () = assert!(VACATE_WAIT_CLIENT.as_secs() < SERVER_PATIENCE.as_secs());
const _: () = assert!(VACATE_WAIT_SERVER.as_secs() < ASKED_WAIT.as_secs());

/// That a link is to be deleted, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) reason: DeleteReason,
    pub(super) orderly: bool,
    pub(super) cause: Cause,
    /// Client: the link over which the server's DELETE LINK came.
    pub(super) on: Option<LinkNumber>,
    /// No connection uses the link any more, or there was no time left.
    pub(super) vacated: bool,
}

impl Order {
    /// An order to delete a link without vacating it.
    pub(super) fn of(reason: DeleteReason, cause: Cause) -> Self {
        Self { reason, orderly: false, cause, on: None, vacated: false }
    }

    /// Whether connections can be moved before the link is deleted. Linux sets the orderly flag for
    /// lost paths, too.
    // RFC 7609 2.3 #14: say whether deletion is orderly
    fn has_time(self) -> bool {
        self.orderly && self.reason != DeleteReason::LOST_PATH && !self.vacated
    }
}

/// Client: the server was asked to delete a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) on: LinkNumber,
    /// When it is asked again.
    again_at: Instant,
    /// When the link over which it was asked counts as failed.
    deadline: Instant,
    order: Order,
}

impl Asked {
    /// When something is due.
    pub(super) fn poll_timeout(self) -> Instant {
        self.again_at.min(self.deadline)
    }
}

impl LinkGroup {
    /// Deletes one link of the group; with the last one the group ends. A server sends DELETE LINK,
    /// a client asks its server to (RFC 3.5.5.1.3, 3.5.5.1.4). If `orderly`, and if there is
    /// another link for them, the connections are moved first.
    pub fn delete_link(
        &mut self,
        now: Instant,
        number: LinkNumber,
        reason: DeleteReason,
        orderly: bool,
    ) {
        let order = Order { orderly, ..Order::of(reason, Cause::DeletedByUs) };
        if self.phase != Phase::Established || self.find(number).is_none() {
            return;
        }
        match self.role {
            Role::Server => self.order_delete(now, number, order),
            Role::Client => self.ask_to_delete(now, number, order),
        }
    }

    /// Ends the group: sends DELETE LINK for all links, and does not wait for an answer.
    ///
    /// # Specification
    ///
    /// RFC 7609, 3.5.5.1.3 and 4.8.3.
    pub fn shutdown(&mut self, now: Instant, reason: DeleteReason) {
        self.end(now, Cause::DeletedByUs, reason);
    }

    /// Sends DELETE LINK for all links, and ends the group.
    pub(super) fn end(&mut self, now: Instant, cause: Cause, reason: DeleteReason) {
        // RFC 7609 A.3.4 #4: deleted link number, zero for all
        let none = UNNUMBERED;
        let all = DeleteLink { reply: false, all: true, orderly: true, link: none, reason };
        for number in self.numbers().into_iter().flatten() {
            if self.find(number).is_some_and(|group_link| group_link.link.is_up()) {
                // No answer tells whether it arrived, so it goes over each link.
                // RFC 7609 3.5.4 #6: end group by DELETE LINK for all
                // RFC 7609 3.5.4 #10: client asks to end the group
                // RFC 7609 C.7.1 #18: client tries all links, ends group
                self.send(number, Llc::DeleteLink(all));
            }
        }
        for number in self.numbers().into_iter().flatten() {
            // RFC 7609 C.7.1 #19: end group though DELETE LINK undelivered
            self.link_event(now, number, Event::Fail(cause));
        }
        if !self.is_terminated() {
            // All links were down already, and waited for the peer's DELETE LINK.
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
            // RFC 7609 2.3 #5: client reports failure, server deletes link
            // RFC 7609 3.5.5.1 #1: client may delete on its own
            // RFC 7609 3.5.5.1.3 #2: delete link upon errors
            // RFC 7609 3.5.5.1.4 #1: client may ask to delete link
            // RFC 7609 3.5.1.6.2 #3: delete second link if CONFIRM LINK fails
            // RFC 7609 C.7.1 #4: clean up unconfirmed link, retry later
            // RFC 7609 C.7.1 #12: client deletes unconfirmed added link
            let order = Order::of(DeleteReason::LOST_PATH, cause);
            let ordered = self.find(number).and_then(|group_link| group_link.delete);
            match (self.role, ordered) {
                (Role::Server, _) => self.order_delete(now, number, order),
                (Role::Client, None) => self.ask_to_delete(now, number, order),
                // The server waits for our answer.
                (Role::Client, Some(order)) => self.obey_delete(now, number, order),
            }
        }
        self.ask_elsewhere(now, number);
        self.advance(now);
    }

    /// Ends the exchange that `number` carried or was about, if there is one.
    fn exchange_lost(&mut self, now: Instant, number: LinkNumber, cause: Cause) {
        let Some(exchange) = self.exchange else { return };
        let added = exchange.number();
        if added != number && exchange.carrier() != Some(number) {
            return;
        }
        // RFC 7609 2.3 #11: restart LLC exchanges, do not replay
        self.exchange = None;
        if !exchange.adds() {
            // The link notes that it is to be deleted: `advance` sends DELETE LINK over another
            // one.
            return;
        }
        self.retry_later(now);
        if added != number && self.find(added).is_some() {
            self.link_lost(now, added, cause);
        }
    }

    /// Server: notes that a link is to go, and begins if nothing else is under way.
    fn order_delete(&mut self, now: Instant, number: LinkNumber, order: Order) {
        if let Some(group_link) = self.find_mut(number)
            && group_link.delete.is_none_or(|known| known.has_time() && !order.has_time())
        {
            group_link.delete = Some(order);
            let vacates = |exchange: Exchange| exchange.vacates() && exchange.number() == number;
            if !order.has_time() && self.exchange.is_some_and(vacates) {
                // The link has failed: its connections are not moved in good order any more.
                self.exchange = None;
            }
        }
        self.advance(now);
    }

    /// Server: DELETE LINK goes out, after the caller has moved the connections if there is time.
    pub(super) fn begin_delete(&mut self, now: Instant, number: LinkNumber, order: Order) {
        let is_up = self.find(number).is_some_and(|group_link| group_link.link.is_up());
        let elsewhere = self.link_of_use();
        // RFC 7609 3.5.5.1.4 #2: delete later upon orderly request
        // RFC 7609 3.5.5.1.4 #3: delete at once upon disorderly request
        // RFC 7609 A.3.4 #10: finish other work before orderly deletion
        if order.has_time() && is_up && elsewhere.is_some() {
            self.vacate(number, now + VACATE_WAIT_SERVER);
            return;
        }
        self.say_delete(now, number, order);
    }

    /// Lets the caller move connections away.
    fn vacate(&mut self, number: LinkNumber, deadline: Instant) {
        self.exchange = Some(Exchange::Vacating { number, deadline });
        // RFC 7609 3.5.5.1.3 #4: move connections of deleted link
        self.actions.push(Action::VacateLink(number));
    }

    pub(super) fn say_delete(&mut self, now: Instant, number: LinkNumber, order: Order) {
        let on = self.link_besides(number).expect("a group without a link that is up has ended");
        let deadline = now + self.exchange_wait();
        self.exchange = Some(Exchange::Deleting { number, on, deadline });
        self.send_delete_link(on, number, order);
    }

    /// The link for messages about that one: another one, if there is any.
    fn link_besides(&self, number: LinkNumber) -> Option<LinkNumber> {
        let others = || self.group_links().filter(|group_link| group_link.number != number);
        let of_use =
            others().find(|group_link| group_link.is_of_use() && group_link.asked.is_none());
        let up = || others().find(|group_link| group_link.link.is_up());
        // RFC 7609 3.3 #5: other LLC over any active link
        // RFC 7609 3.3 #8: answer DELETE LINK over another link
        // RFC 7609 3.5.5.1.3 #5: DELETE LINK over any usable link
        // RFC 7609 A.3.4 #8: DELETE LINK avoids the failed link
        let on = of_use.or_else(up).or_else(|| self.group_links().find(|one| one.link.is_up()));
        on.map(|group_link| group_link.number)
    }

    pub(super) fn send_delete_link(&mut self, on: LinkNumber, link: LinkNumber, order: Order) {
        let Order { reason, orderly, .. } = order;
        // RFC 7609 3.5.5.1.3 #3: delete links of downed RNIC
        let request = DeleteLink { reply: false, all: false, orderly, link, reason };
        self.send(on, Llc::DeleteLink(request));
    }

    /// Client: asks the server to delete a link, unless it has asked already.
    pub(super) fn ask_to_delete(&mut self, now: Instant, number: LinkNumber, order: Order) {
        // Without a link that is up the group ends, and nobody can be asked.
        let Some(on) = self.link_besides(number) else { return };
        let founding = matches!(self.phase, Phase::Founding { .. });
        // A link that failed while the server was deleting it is gone by now.
        let Some(group_link) = self.find_mut(number) else { return };
        if group_link.asked.is_some_and(|asked| order.has_time() || !asked.order.has_time()) {
            return;
        }
        let wait = if founding { ASKED_WAIT_FOUNDING } else { ASKED_WAIT };
        let again_at = now + ASK_AGAIN_WAIT;
        group_link.asked = Some(Asked { on, again_at, deadline: now + wait, order });
        // RFC 7609 2.3 #5: client reports failure, server deletes link
        // RFC 7609 3.5.4 #5: ask server on operator's command
        // RFC 7609 3.5.5.1.4 #1: client may ask to delete link
        self.send_delete_link(on, number, order);
    }

    /// Client: repeats, over another link, requests that went over a link that is lost.
    fn ask_elsewhere(&mut self, now: Instant, lost: LinkNumber) {
        for number in self.numbers().into_iter().flatten() {
            let Some(group_link) = self.find_mut(number) else { continue };
            if let Some(Asked { on, order, .. }) = group_link.asked
                && on == lost
                && number != lost
            {
                group_link.asked = None;
                self.ask_to_delete(now, number, order);
            }
        }
    }

    /// The answer to [`Action::VacateLink`]: no connection uses the link any more.
    pub fn link_vacated(&mut self, now: Instant, number: LinkNumber) {
        let vacates = |exchange: Exchange| exchange.vacates() && exchange.number() == number;
        if !self.exchange.is_some_and(vacates) {
            return;
        }
        self.exchange = None;
        let vacated = self.find_mut(number).and_then(|group_link| group_link.delete.as_mut());
        let order = vacated.expect("connections leave a link that is to be deleted");
        order.vacated = true;
        let order = *order;
        match self.role {
            // An exchange of rkeys may be under way, and ends first.
            Role::Server => self.advance(now),
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
            match self.role {
                Role::Server => self.delete_answered(now, message),
                Role::Client => self.ask_answered(now, message),
            }
        } else if message.all {
            // RFC 7609 3.5.4 #8: client drops deleted group at once
            // RFC 7609 3.5.4 #11: end group when client asks
            // RFC 7609 3.5.5.3 #4: DELETE LINK for group at any time
            // RFC 7609 3.5.5.3.1 #5: end of group interrupts ADD LINK
            // RFC 7609 3.5.5.3.2 #4: end of group interrupts DELETE LINK
            // RFC 7609 3.5.5.3.3 #6: end of group interrupts CONFIRM RKEY
            // We answer by the same message, as Linux does. The sender does not wait for it.
            self.end(now, Cause::DeletedByPeer, DeleteReason::PROGRAM);
        } else if self.is_opening_for_peer(message.link) {
            // The server gave up before the caller had opened a queue pair. When the caller brings
            // it, the caller is told that it is not wanted.
            self.send(on, Llc::DeleteLink(DeleteLink { reply: true, ..*message }));
            self.end_exchange(now);
        } else if self.find(message.link).is_none() {
            // RFC 7609 A.3.4 #7: reply with reason unknown link
            // RFC 7609 C.7.1 #29: answer client's DELETE LINK of unknown link
            // RFC 7609 C.7.1 #30: answer server's DELETE LINK of unknown link
            let reason = DeleteReason::UNKNOWN_LINK;
            self.send(on, Llc::DeleteLink(DeleteLink { reply: true, reason, ..*message }));
        } else {
            let DeleteLink { link, reason, orderly, .. } = *message;
            let order = Order::of(reason, Cause::DeletedByPeer);
            let order = Order { orderly, on: Some(on), ..order };
            match self.role {
                Role::Client => self.delete_ordered(now, link, order),
                Role::Server => self.delete_asked(now, link, order),
            }
        }
    }

    /// Server: the client has deleted the link.
    fn delete_answered(&mut self, now: Instant, message: &DeleteLink) {
        let Some(Exchange::Deleting { number, .. }) = self.exchange else {
            self.dropped += 1;
            return;
        };
        if number != message.link {
            self.dropped += 1;
            return;
        }
        let group_link = self.find(number);
        let order = group_link.and_then(|group_link| group_link.delete);
        let confirmed_at = group_link.and_then(|group_link| group_link.confirmed_at);
        self.exchange = None;
        let cause = order.map_or(Cause::DeletedByUs, |order| order.cause);
        self.link_event(now, number, Event::Fail(cause));
        if !self.is_terminated() {
            self.remove_group_link(number);
            let failed = order.is_some_and(|order| order.reason == DeleteReason::LOST_PATH);
            self.replace_lost(now, confirmed_at.filter(|_| failed));
            self.advance(now);
        }
    }

    /// Client: whether a queue pair is being made for this offer of the server.
    fn is_opening_for_peer(&self, number: LinkNumber) -> bool {
        match self.exchange {
            Some(Exchange::Opening { number: expected, .. }) => {
                self.role == Role::Client && number == expected
            }
            Some(_) | None => false,
        }
    }

    /// Client: the server does not have the link that we asked it to delete.
    fn ask_answered(&mut self, now: Instant, message: &DeleteLink) {
        let asked = self.find(message.link).and_then(|group_link| group_link.asked);
        if let Some(Asked { order, .. }) = asked
            && message.reason == DeleteReason::UNKNOWN_LINK
        {
            self.let_go(now, message.link, order.cause);
        } else {
            self.dropped += 1;
        }
    }

    /// Server: the client asks for the deletion of a link. If the link has failed at the client,
    /// its connections move at once. The DELETE LINK exchange waits for the one under way.
    fn delete_asked(&mut self, now: Instant, number: LinkNumber, order: Order) {
        let others = self.group_links().any(|other| other.number != number && other.is_of_use());
        if !order.has_time() && others {
            // RFC 7609 2.3 #4: move at once, send DELETE LINK
            // RFC 7609 3.5.5.1.4 #3: delete at once upon disorderly request
            self.link_event(now, number, Event::Fail(order.cause));
            let deleted_already = match self.exchange {
                Some(Exchange::Deleting { number: already, on, .. }) => {
                    already == number && on != number
                }
                Some(_) | None => false,
            };
            if !deleted_already {
                self.exchange_lost(now, number, order.cause);
            }
            self.rkeys_lost(number);
        }
        // RFC 7609 2.2.3 #4: only the server changes links
        // RFC 7609 3.5.5.1.4 #4: answer by own DELETE LINK exchange
        // RFC 7609 3.5.5.3 #3: client's DELETE LINK at any time
        // RFC 7609 3.5.5.3.1 #4: client's DELETE LINK waits for ADD LINK
        // RFC 7609 3.5.5.3.2 #3: client's DELETE LINK waits for server's
        // RFC 7609 3.5.5.3.3 #4: client's DELETE LINK waits for CONFIRM RKEY
        // RFC 7609 A.3.4 #9: client's DELETE LINK is a notice
        self.order_delete(now, number, order);
    }

    /// Client: the server deletes a link.
    fn delete_ordered(&mut self, now: Instant, number: LinkNumber, order: Order) {
        let others = self.group_links().any(|other| other.number != number && other.is_of_use());
        let group_link = self.find_mut(number).expect("the caller has found the link");
        // The log names us as the cause if we asked for it.
        let cause = group_link.asked.map_or(order.cause, |asked| asked.order.cause);
        let order = Order { cause, ..order };
        let again = group_link.delete.replace(order).is_some();
        let vacate = order.has_time() && group_link.link.is_up() && others;
        if again && vacate {
            // The server repeats it over another link, because the first one failed. We answer
            // there.
            return;
        }
        // RFC 7609 3.5.5.3.3 #5: server's DELETE LINK interrupts CONFIRM RKEY
        self.exchange_lost(now, number, cause);
        if vacate && self.exchange.is_none() {
            self.vacate(number, now + VACATE_WAIT_CLIENT);
        } else {
            self.obey_delete(now, number, order);
        }
    }

    /// Client: answers, and deletes the link.
    fn obey_delete(&mut self, now: Instant, number: LinkNumber, order: Order) {
        let Order { reason, orderly, cause, on, .. } = order;
        let on = on.filter(|on| self.find(*on).is_some_and(|group_link| group_link.link.is_up()));
        if let Some(on) = on.or_else(|| self.link_besides(number)) {
            // RFC 7609 3.3 #6: reply over the request's link
            // RFC 7609 3.5.5.1.3 #7: client always agrees to DELETE LINK
            let answer = DeleteLink { reply: true, all: false, orderly, link: number, reason };
            self.send(on, Llc::DeleteLink(answer));
        }
        self.let_go(now, number, cause);
    }

    /// Client: both sides have deleted the link.
    fn let_go(&mut self, now: Instant, number: LinkNumber, cause: Cause) {
        // RFC 7609 3.5.5.1.3 #8: free resources when reply was delivered
        self.link_event(now, number, Event::Fail(cause));
        if !self.is_terminated() {
            self.exchange_lost(now, number, cause);
            self.rkeys_lost(number);
            self.remove_group_link(number);
            self.ask_elsewhere(now, number);
            self.rkeys_may_change();
            self.retry_later(now);
            self.advance(now);
        }
    }

    /// Client: acts on requests that the server has not followed.
    pub(super) fn asked_in_vain(&mut self, now: Instant) {
        for number in self.numbers().into_iter().flatten() {
            let Some(group_link) = self.find_mut(number) else { continue };
            let Some(asked) = &mut group_link.asked else { continue };
            let Asked { on, deadline, order, .. } = *asked;
            if deadline > now {
                if asked.again_at <= now {
                    asked.again_at = now + ASK_AGAIN_WAIT;
                    self.send_delete_link(on, number, order);
                }
                continue;
            }
            group_link.asked = None;
            // RFC 7609 C.7.1 #16: client repeats DELETE LINK over another link
            // RFC 7609 C.7.1 #17: no link for client's DELETE LINK: reset
            self.link_lost(now, on, Cause::LlcTimedOut);
            if !self.is_terminated() {
                self.ask_to_delete(now, number, order);
            }
        }
    }
}
