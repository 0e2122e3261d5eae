//! ADD LINK: a further link (RFC 3.5.1.6, 3.5.5.1.1, 3.5.5.1.2, A.3.2, A.3.3, C.8).
//!
//! ```text
//!   server: Opening ─► Offered ─► Connecting ─► Rkeys ─► Confirming
//!   client: Opening ─► Connecting ─► Rkeys ─► Confirming
//! ```
//! In version 2 the rkeys travel in ADD LINK, and nobody is ever in `Rkeys`.

use super::group_link::{GroupLink, port_of};
use super::{Action, LinkGroup, Phase, Role, UNNUMBERED};
use crate::error::PeerMisbehaved;
use crate::limits::{ADD_LINK_WAIT, CONFIRM_ADDED_LINK_WAIT, LINK_EXCHANGE_WAIT};
use crate::link::{Cause, Link};
use crate::time::Instant;
use crate::vocabulary::{LinkNumber, LinkUserId, Mtu, Psn, QpAddress, Qpn, Rkey};
use crate::wire::llc::add_link::{REASON_INVALID_MTU, REASON_NO_ALTERNATE_PATH};
use crate::wire::llc::{AddLink, DeleteReason, Llc};

use super::delete::Order;
use super::exchange::{Exchange, Pairs};
use super::openings::Wanted;
use super::rmbs::RmbIndex;

use core::time::Duration;

/// Why the caller has no queue pair for a further link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoQueuePair {
    /// No port of ours would make it anything but parallel to a link that is there.
    NoAlternatePath,
    /// The NIC or the host is out of something.
    Exhausted,
}

impl LinkGroup {
    /// Server: asks the caller for a queue pair to offer.
    pub(super) fn begin_add(&mut self, now: Instant) {
        let wanted = core::mem::replace(&mut self.wanted, Wanted::No);
        // RFC 7609 2.2.2 #10: server adds no link beyond limit
        // RFC 7609 3.3 #7: answer ADD LINK over another link
        // RFC 7609 3.5.5.1.1 #4: offer no link beyond limit
        let Some(on) = self.link_of_use().filter(|_| self.may_add()) else {
            self.advance(now);
            return;
        };
        if !self.takes_opening(now, wanted) {
            return;
        }
        let number = self.new_number();
        self.exchange = Some(Exchange::Opening { number, on, theirs: None, at: None });
        self.actions.push(Action::OpenLink { number, peer: None });
    }

    /// The link number whose last use was longest ago.
    fn new_number(&mut self) -> LinkNumber {
        loop {
            // RFC 7609 2.2.4 #1: unique link number in a group
            // RFC 7609 2.2.4 #2: use all link numbers before reuse
            self.last_number = self.last_number.checked_add(1).unwrap_or(1);
            let number = LinkNumber(self.last_number);
            if self.find(number).is_none() {
                return number;
            }
        }
    }

    /// The answer to [`Action::OpenLink`]: a queue pair that knows its own address, and the rkey of
    /// each RMB of ours on it.
    ///
    /// If the link is no longer wanted, [`Action::LinkFailed`] follows.
    pub fn link_opened(
        &mut self,
        now: Instant,
        number: LinkNumber,
        ours: QpAddress,
        user_id: LinkUserId,
        keys: &[(RmbIndex, Rkey, u64)],
    ) {
        let Some((on, theirs)) = self.asked_to_open(number) else {
            self.actions.push(Action::LinkFailed(number, Cause::DeletedByUs));
            return;
        };
        let theirs_known = theirs.unwrap_or_default();
        // RFC 7609 2.2.1 #2: no parallel links between same RNICs
        // RFC 7609 2.2.2 #11: at most one asymmetric link
        // RFC 7609 3.5.5.1.1 #2: never add second asymmetric link
        let bad = theirs.is_some_and(|theirs| {
            let asymmetric = self.is_asymmetric(port_of(ours), port_of(theirs));
            let second = asymmetric && self.group_links().any(|group_link| group_link.asymmetric);
            second || self.is_parallel(port_of(ours), port_of(theirs))
        });
        if bad {
            self.actions.push(Action::LinkFailed(number, Cause::DeletedByUs));
            self.refuse(now, (number, on), theirs, NoQueuePair::NoAlternatePath);
            return;
        }
        let Some(slot) = self.take_place() else {
            self.actions.push(Action::LinkFailed(number, Cause::DeletedByUs));
            self.refuse(now, (number, on), theirs, NoQueuePair::Exhausted);
            return;
        };
        let asymmetric =
            theirs.is_some_and(|theirs| self.is_asymmetric(port_of(ours), port_of(theirs)));
        self.group_links[slot] = Some(GroupLink {
            number,
            // Until CONFIRM LINK the exchange has the deadline.
            link: Link::new(self.setup.keepalive, Instant(u64::MAX)),
            unanswered: 0,
            ours,
            theirs: theirs_known,
            user_id,
            asymmetric,
            confirmed_at: None,
            delete: None,
            asked: None,
        });
        for (rmb, rkey, address) in keys {
            self.our_rmbs.set(*rmb, slot, *rkey, *address);
        }
        self.known_ports.note_used(port_of(ours));
        if let Some(theirs) = theirs {
            // RFC 7609 3.5.1.6.1 #5: answer second RNIC with second RNIC
            // RFC 7609 3.5.1.6.1 #6: single RNIC accepts an asymmetric link
            self.exchange = Some(Exchange::Connecting { number, on });
            self.actions.push(Action::ConnectLink { number, theirs });
        } else {
            self.offer(now, number, on, ours);
        }
    }

    /// Server: ADD LINK goes out.
    fn offer(&mut self, now: Instant, number: LinkNumber, on: LinkNumber, ours: QpAddress) {
        let QpAddress { gid, mac, qpn, psn, mtu } = ours;
        let (reply, rejected, reason, link) = (false, false, 0, number);
        // RFC 7609 C.3 #1: server: no fallback after ADD LINK
        self.committed = true;
        let deadline = now + self.exchange_wait();
        self.exchange = Some(Exchange::Offered { number, on, deadline });
        if self.is_v2() {
            self.tell_all(on, number);
        }
        // RFC 7609 2.2.3 #1: set up further links by LLC
        // RFC 7609 3.5.1.6 #4: allocate QP, number, RToken for ADD LINK
        // RFC 7609 3.5.1.6 #5: ADD LINK over the existing link
        // RFC 7609 3.5.5.1.1 #1: offer link when resources appear
        // RFC 7609 A.3.2 #12: ADD LINK right after first link
        let offer = AddLink { reply, rejected, reason, mac, gid, qpn, link, mtu, psn };
        self.send(on, Llc::AddLink(offer));
    }

    /// The other answer to [`Action::OpenLink`].
    ///
    /// During the first contact a client waits for ADD LINK, and a Linux client opens no other
    /// connection meanwhile. So a server that has no queue pair to offer sends ADD LINK with an MTU
    /// that does not exist, which every client rejects at once. The message names our port, because
    /// Linux misreads one that names none.
    pub fn link_refused(&mut self, now: Instant, number: LinkNumber, refusal: NoQueuePair) {
        let Some((on, theirs)) = self.asked_to_open(number) else { return };
        if refusal == NoQueuePair::NoAlternatePath {
            self.openings.give_back();
        }
        self.refuse(now, (number, on), theirs, refusal);
    }

    /// There will be no such link, whether or not the caller has opened a queue pair for it.
    fn refuse(
        &mut self,
        now: Instant,
        (number, on): (LinkNumber, LinkNumber),
        theirs: Option<QpAddress>,
        refusal: NoQueuePair,
    ) {
        if let Some(theirs) = theirs {
            self.unreserve();
            // RFC 7609 3.5.1.6.1 #2: reject ADD LINK for parallel link
            // RFC 7609 3.5.1.6.1 #8: reject ADD LINK with a reason
            // RFC 7609 A.3.2 #8: server assigns the new link number
            self.reject(on, number, theirs, REASON_NO_ALTERNATE_PATH);
            self.end_exchange(now);
        } else if let Phase::Founding { .. } = self.phase {
            let ours = self.find(on).map(|group_link| group_link.ours).unwrap_or_default();
            let impossible = QpAddress { qpn: Qpn(0), psn: Psn(0), mtu: Mtu(0), ..ours };
            self.offer(now, number, on, impossible);
        } else {
            if refusal == NoQueuePair::Exhausted {
                self.retry_later(now);
            }
            self.end_exchange(now);
        }
    }

    fn reject(&mut self, on: LinkNumber, link: LinkNumber, theirs: QpAddress, reason: u8) {
        let QpAddress { gid, mac, qpn, psn, mtu } = theirs;
        let (reply, rejected) = (true, true);
        let answer = AddLink { reply, rejected, reason, mac, gid, qpn, link, mtu, psn };
        // RFC 7609 C.3 #2: client: no fallback after ADD LINK reply
        self.committed = true;
        self.send(on, Llc::AddLink(answer));
    }

    /// The answer to [`Action::ConnectLink`]: the queue pair is in RTS and its poller has it.
    ///
    /// Also called for the first link of a server. CONFIRM LINK goes out.
    pub fn link_connected(&mut self, now: Instant, number: LinkNumber) {
        if self.phase == Phase::Opening {
            self.first_link_connected(now);
            return;
        }
        // The caller may answer when the link has been given up.
        let Some(Exchange::Connecting { number: expected, on }) = self.exchange else { return };
        if number != expected {
            return;
        }
        let left = self.slot(on).map(|slot| self.rmbs_to_tell(slot)).unwrap_or_default();
        let mut pairs = Pairs { left, peer_left: None };
        if self.is_v2() {
            self.tell_all(on, number);
        } else {
            let deadline = now + self.exchange_wait();
            self.exchange = Some(Exchange::Rkeys { number, on, pairs, deadline });
        }
        match self.role {
            Role::Server if self.is_v2() => self.confirm_added(now, number),
            Role::Server => self.send_pairs(now, number, on, &mut pairs),
            Role::Client => {
                self.accept_offer(number, on);
                if self.is_v2() {
                    self.await_confirm(now, number);
                }
            }
        }
    }

    /// Client: ADD LINK is answered.
    fn accept_offer(&mut self, number: LinkNumber, on: LinkNumber) {
        let group_link = self.find(number).expect("a link stays while it is being added");
        let QpAddress { gid, mac, qpn, psn, mtu } = group_link.ours;
        let (reply, rejected, reason, link) = (true, false, 0, number);
        let mtu = mtu.min(group_link.theirs.mtu);
        // RFC 7609 C.3 #2: client: no fallback after ADD LINK reply
        self.committed = true;
        // RFC 7609 3.5.1.6.1 #7: accept with QP, RKey, link number
        // RFC 7609 A.3.2 #9: use smaller MTU of ADD LINK
        let answer = AddLink { reply, rejected, reason, mac, gid, qpn, link, mtu, psn };
        self.send(on, Llc::AddLink(answer));
    }

    /// The other answer to [`Action::ConnectLink`]: the peer cannot be reached that way, and the
    /// queue pair is gone.
    pub fn link_unreachable(&mut self, now: Instant, number: LinkNumber) {
        // The caller may answer when the link has been given up.
        let Some(Exchange::Connecting { number: expected, on }) = self.exchange else { return };
        if number != expected {
            return;
        }
        match self.role {
            // The client has a queue pair for it.
            Role::Server => self.link_lost(now, number, Cause::QueuePairBroke),
            Role::Client => {
                let theirs =
                    self.find(number).map(|group_link| group_link.theirs).unwrap_or_default();
                self.reject(on, number, theirs, REASON_NO_ALTERNATE_PATH);
                self.remove_group_link(number);
                self.end_exchange(now);
            }
        }
    }

    pub(super) fn handle_add_link(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &AddLink,
    ) -> Result<(), PeerMisbehaved> {
        match (self.role, message.reply) {
            (Role::Client, false) => self.add_link_offered(now, on, message),
            (Role::Server, true) => {
                self.add_link_answered(now, on, message);
                Ok(())
            }
            (Role::Server, false) => {
                self.client_has_port(now);
                Ok(())
            }
            (Role::Client, true) => {
                self.dropped += 1;
                Ok(())
            }
        }
    }

    /// Client: the server offers a link.
    fn add_link_offered(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &AddLink,
    ) -> Result<(), PeerMisbehaved> {
        match self.phase {
            Phase::Opening | Phase::Confirming { .. } | Phase::Terminated => {
                return Err(PeerMisbehaved::UnexpectedMessage);
            }
            Phase::Founding { .. } => self.phase = Phase::Founding { deadline: None },
            Phase::Established => {}
        }
        let AddLink { gid, mac, qpn, psn, mtu, link: number, .. } = *message;
        let theirs = QpAddress { gid, mac, qpn, psn, mtu };
        if let Some(stale) = self.exchange.filter(|exchange| exchange.adds()) {
            // A server has one offer under way at a time: it has given up the one before.
            self.forget_offer(stale.number());
        } else if self.exchange.is_some() {
            self.dropped += 1;
            return Ok(());
        }
        if mtu.bytes().is_none() {
            // RFC 7609 A.3.2 #6: reason 2: invalid MTU
            // RFC 7609 C.7.1 #25: reject reserved MTU with reason 2
            self.reject(on, number, theirs, REASON_INVALID_MTU);
            self.advance(now);
            return Ok(());
        }
        // RFC 7609 2.2.4 #1: unique link number in a group
        // RFC 7609 C.7.1 #35: any other LLC error fails link
        if number == UNNUMBERED || self.find(number).is_some() {
            return Err(PeerMisbehaved::WrongLink);
        }
        if !self.may_add() {
            self.reject(on, number, theirs, REASON_NO_ALTERNATE_PATH);
            self.advance(now);
            return Ok(());
        }
        // An earlier offer may have come with rkeys, and ended before there was a token for it.
        self.unreserve();
        // If a CONFIRM RKEY of ours crosses this, the server refuses it, and we send it again.
        // RFC 7609 3.5.1.6.1 #1: compare GID and MAC of ADD LINK
        // RFC 7609 3.5.5.3.1 #3: take crossing ADD LINK as answer
        // RFC 7609 3.5.5.3.3 #3: server's ADD LINK interrupts CONFIRM RKEY
        self.open_offered(now, number, on, theirs);
        Ok(())
    }

    /// A link that was being added is not to be.
    fn forget_offer(&mut self, number: LinkNumber) {
        self.exchange = None;
        self.unreserve();
        // RFC 7609 3.5.1.6.2 #1: free resources of rejected link
        if self.find(number).is_some() {
            self.actions.push(Action::LinkFailed(number, Cause::LlcTimedOut));
            self.remove_group_link(number);
        }
    }

    /// Server: the client accepts or rejects what we offered.
    fn add_link_answered(&mut self, now: Instant, on: LinkNumber, message: &AddLink) {
        let offered = match self.exchange {
            Some(Exchange::Offered { number, on: carrier, .. }) if carrier == on => Some(number),
            Some(_) | None => None,
        };
        let Some(number) = offered.filter(|number| *number == message.link) else {
            self.dropped += 1;
            if !message.rejected && self.find(message.link).is_none() {
                // We have given the link up. The client has accepted it, and waits for CONFIRM
                // LINK.
                let order = Order::of(DeleteReason::LOST_PATH, Cause::LlcTimedOut);
                self.send_delete_link(on, message.link, order);
            }
            return;
        };
        let exists = self.find(number).is_some();
        if message.rejected {
            // RFC 7609 3.5.1.6.2 #1: free resources of rejected link
            // RFC 7609 C.8 #2: timer for the second link
            if exists {
                self.actions.push(Action::LinkFailed(number, Cause::Rejected));
                self.remove_group_link(number);
            }
            self.retry_later(now);
            self.end_exchange(now);
            return;
        }
        let AddLink { gid, mac, qpn, psn, mtu, .. } = *message;
        let theirs = QpAddress { gid, mac, qpn, psn, mtu };
        let ours = self.find(number).map(|group_link| group_link.ours).unwrap_or_default();
        let parallel = self.is_parallel_but(number, port_of(ours), port_of(theirs));
        let asymmetric = self.is_asymmetric_but(number, port_of(ours), port_of(theirs));
        let second = asymmetric && self.group_links().any(|group_link| group_link.asymmetric);
        // RFC 7609 2.2.1 #2: no parallel links between same RNICs
        // RFC 7609 2.2.2 #11: at most one asymmetric link
        // RFC 7609 3.5.5.1.1 #2: never add second asymmetric link
        // RFC 7609 C.7.1 #26: delete link that would be parallel
        if !exists || parallel || second || mtu.bytes().is_none() {
            // The client may believe that it has accepted this link, so it is told to delete it.
            self.abandon(now, number, Cause::PeerMisbehaved);
            return;
        }
        if let Some(group_link) = self.find_mut(number) {
            group_link.theirs = theirs;
            group_link.asymmetric = asymmetric;
        }
        // RFC 7609 3.5.1.6.2 #2: connect and confirm accepted link
        self.exchange = Some(Exchange::Connecting { number, on });
        self.actions.push(Action::ConnectLink { number, theirs });
    }

    /// Server: gives up a link that the client may have, and tells it so.
    fn abandon(&mut self, now: Instant, number: LinkNumber, cause: Cause) {
        if self.find(number).is_some() {
            self.link_lost(now, number, cause);
            return;
        }
        self.say_delete(now, number, Order::of(DeleteReason::LOST_PATH, cause));
    }

    /// Server: sends CONFIRM LINK on the new link.
    pub(super) fn confirm_added(&mut self, now: Instant, number: LinkNumber) {
        self.await_confirm(now, number);
        // RFC 7609 3.5.1.6.2 #2: connect and confirm accepted link
        self.send_confirm_link(number, false);
    }

    pub(super) fn await_confirm(&mut self, now: Instant, number: LinkNumber) {
        let keepalive = self.setup.keepalive;
        if let Some(group_link) = self.find_mut(number) {
            group_link.link = Link::new(keepalive, now + CONFIRM_ADDED_LINK_WAIT);
        }
        self.exchange = Some(Exchange::Confirming { number });
    }

    /// How long the peer may take for its next message: less during the first contact, because an
    /// application waits for the outcome.
    pub(super) fn exchange_wait(&self) -> Duration {
        match self.phase {
            Phase::Established => LINK_EXCHANGE_WAIT,
            Phase::Opening
            | Phase::Confirming { .. }
            | Phase::Founding { .. }
            | Phase::Terminated => ADD_LINK_WAIT,
        }
    }

    /// The peer did not answer in time.
    pub(super) fn exchange_timed_out(&mut self, now: Instant, exchange: Exchange) {
        let Some(carrier) = exchange.carrier() else {
            // Connections that did not leave in good order are moved when the link goes.
            self.link_vacated(now, exchange.number());
            return;
        };
        if let Phase::Founding { .. } = self.phase
            && exchange.adds()
        {
            // The group goes on without a second link, as C.8 has it.
            // RFC 7609 C.8 #1: go on without second link
            self.forget_offer(exchange.number());
            self.retry_later(now);
            self.end_exchange(now);
            return;
        }
        if let Some(order) = self.find(carrier).and_then(|group_link| group_link.delete)
            && exchange.number() == carrier
        {
            // RFC 7609 C.7.1 #21: no link for server's DELETE LINK: reset
            self.link_lost(now, carrier, order.cause);
            return;
        }
        // RFC 7609 C.7.1 #7: unanswered ADD LINK fails its link
        // RFC 7609 C.7.1 #9: missing ADD LINK CONTINUATION fails link
        // RFC 7609 C.7.1 #13: unanswered ADD LINK CONTINUATION fails link
        // RFC 7609 C.7.1 #15: stopped ADD LINK CONTINUATION fails link
        // RFC 7609 C.7.1 #20: server repeats DELETE LINK over another link
        self.link_lost(now, carrier, Cause::LlcTimedOut);
    }

    /// The exchange is over; whatever waited for it may begin.
    pub(super) fn end_exchange(&mut self, now: Instant) {
        self.exchange = None;
        self.advance(now);
    }

    /// Server: a symmetric link makes the asymmetric one superfluous.
    pub(super) fn replace_asymmetric(&mut self, added: LinkNumber) {
        let symmetric = self.find(added).is_some_and(|group_link| !group_link.asymmetric);
        if self.role == Role::Client || !symmetric {
            return;
        }
        // RFC 7609 2.2.1 #5: replace an asymmetric link when possible
        // RFC 7609 2.2.1 #6: add symmetric link before deleting asymmetric
        // RFC 7609 2.2.1 #7: state reason when deleting asymmetric link
        let reason = DeleteReason::ASYMMETRIC_NOT_NEEDED;
        let order = Order { orderly: true, ..Order::of(reason, Cause::DeletedByUs) };
        for group_link in
            self.group_links.iter_mut().flatten().filter(|group_link| group_link.asymmetric)
        {
            group_link.delete.get_or_insert(order);
        }
    }
}
