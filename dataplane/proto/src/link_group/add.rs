//! ADD LINK and its continuation (RFC 3.5.1.6, 3.5.5.1.1, 3.5.5.1.2, 3.5.5.2.3, C.8).
//!
//! ```text
//!   server  Opening ─ offer ─► Offered ─ reply ─► Connecting ─► Telling ─► Confirming ─► done
//!   client  Opening ─────────────────────────────► Connecting ─ reply ─► Telling ─► Confirming ─► done
//! ```

use super::exchange::Exchange;
use super::members::Doom;
use super::rkeys::{Plan, RmbIndex};
use super::{Action, LinkGroup, Phase, Refusal, Role};
use crate::error::PeerMisbehaved;
use crate::limits::{ADD_LINK_WAIT, CONFIRM_ADDED_LINK_WAIT};
use crate::link::{Cause, Event};
use crate::time::Instant;
use crate::vocabulary::{Gid, LinkNumber, LinkUserId, MacAddress, Mtu, Psn, QpAddress, Qpn, Rkey};
use crate::wire::llc::add_link::{REASON_INVALID_MTU, REASON_NO_ALTERNATE_PATH};
use crate::wire::llc::{AddLink, AddLinkContinuation, DeleteLink, DeleteReason, Llc, RkeyPair};

/// How far the adding of a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The caller opens a queue pair.
    Opening,
    /// Server: the offer is out.
    Offered,
    /// The caller connects the queue pair.
    Connecting,
    /// Both tell what their RMBs are called on the new link.
    Telling,
    /// CONFIRM LINK is under way on the new link.
    Confirming,
}

/// A link that is being added.
#[derive(Clone, Copy, Debug)]
pub(super) struct Adding {
    pub(super) number: LinkNumber,
    /// The link that carries the exchange.
    pub(super) carrier: LinkNumber,
    pub(super) step: Step,
    pub(super) deadline: Option<Instant>,
    /// Client: what the server offered.
    offer: Option<AddLink>,
    /// Our RMBs that are still to be told, as a mask of their indices.
    untold: u64,
    /// How many keys the peer still owes, once it has said so.
    owed: Option<u8>,
}

impl Adding {
    fn new(number: LinkNumber, carrier: LinkNumber, offer: Option<AddLink>) -> Self {
        let step = Step::Opening;
        Self { number, carrier, step, deadline: None, offer, untold: 0, owed: None }
    }
}

/// The end that an ADD LINK describes.
fn end_of(message: &AddLink) -> QpAddress {
    let AddLink { mac, gid, qpn, psn, mtu, .. } = *message;
    QpAddress { gid, mac, qpn, psn, mtu }
}

impl LinkGroup {
    /// Server: a link is wanted, and nothing else is going on.
    pub(super) fn begin_add(&mut self, _now: Instant) {
        let Some(carrier) = self.carrier() else { return };
        self.wants_link = false;
        self.retry_at = None;
        // RFC 7609 3.5.1.6-4
        let number = self.take_number();
        self.exchange = Exchange::Adding(Adding::new(number, carrier, None));
        // RFC 7609 3.5.1.6-2, 3.5.1.6-3, 3.5.5.1.1-1
        self.actions.push(Action::OpenLink { number, peer: None });
    }

    /// Client: tells the server of a port.
    // RFC 7609 3.5.5.1.2-1, 3.5.5.1.2-5, 2.2.2-9
    pub(super) fn ask_for_link(&mut self, _now: Instant) {
        self.wants_link = false;
        self.retry_at = None;
        let (Some(carrier), Some((gid, mac))) = (self.carrier(), self.spare_port) else { return };
        let mtu = self.setup.ours.mtu;
        // RFC 7609 A.3.2-11
        let notice = AddLink {
            reply: false,
            rejected: false,
            reason: 0,
            mac,
            gid,
            qpn: Qpn(0),
            link: super::UNNUMBERED,
            mtu,
            psn: Psn(0),
        };
        self.send(carrier, Llc::AddLink(notice));
    }

    /// The queue pair that [`Action::OpenLink`] asked for. `keys` are what each RMB of ours is
    /// called there. A link that is not wanted any more is answered by [`Action::LinkFailed`].
    ///
    /// # Panics
    ///
    /// If an index is not below [`OWN_RMBS_MAX`](crate::limits::OWN_RMBS_MAX).
    pub fn link_opened(
        &mut self,
        now: Instant,
        number: LinkNumber,
        ours: QpAddress,
        user_id: LinkUserId,
        keys: &[(RmbIndex, Rkey, u64)],
    ) {
        let Some(adding) = self.adding(number, Step::Opening) else {
            self.actions.push(Action::LinkFailed(number, Cause::NotWanted));
            return;
        };
        let theirs = adding.offer.map(|offer| end_of(&offer));
        if theirs.is_some_and(|theirs| !self.admits(ours, theirs)) {
            self.actions.push(Action::LinkFailed(number, Cause::NotWanted));
            self.refuse_offer(now, adding, REASON_NO_ALTERNATE_PATH);
            return;
        }
        // The exchange has deadlines of its own; a link that joins does not time out by itself.
        let member = self.new_member(Instant(u64::MAX), number, ours, theirs, user_id);
        let Some(place) = self.admit(member) else {
            self.actions.push(Action::LinkFailed(number, Cause::NotWanted));
            self.link_refused(now, number, Refusal::Exhausted);
            return;
        };
        for (rmb, rkey, address) in keys {
            if let Some(row) = self.own_rmbs.find_mut(*rmb) {
                row.keys.set(place, *rkey, *address);
            }
        }
        if let Some(theirs) = theirs {
            self.add_step(Step::Connecting, None);
            // RFC 7609 3.5.1.6.1-4, 3.5.1.6.1-5
            self.actions.push(Action::ConnectLink { number, theirs });
        } else {
            self.add_step(Step::Offered, Some(now + ADD_LINK_WAIT));
            // RFC 7609 C.3-1
            self.committed = true;
            // RFC 7609 3.5.1.6-5, A.3.2-12
            self.send_add_link(adding.carrier, number, ours, false);
        }
        self.proceed(now);
    }

    /// There is no queue pair for the link that [`Action::OpenLink`] asked for.
    pub fn link_refused(&mut self, now: Instant, number: LinkNumber, refusal: Refusal) {
        let Some(adding) = self.adding(number, Step::Opening) else { return };
        match self.role {
            Role::Client => {
                self.spare_port = None;
                self.refuse_offer(now, adding, REASON_NO_ALTERNATE_PATH);
            }
            Role::Server => {
                self.exchange = Exchange::Idle;
                if matches!(self.phase, Phase::AddingLink { .. }) {
                    self.offer_impossible_link(now, adding);
                }
                // Without a port there is nothing to try again before one appears.
                let again = refusal == Refusal::Exhausted;
                self.retry_at = again.then(|| now + self.setup.retry_link);
            }
        }
        self.proceed(now);
    }

    /// The queue pair is connected: the one of the first link, or that of
    /// [`Action::ConnectLink`].
    pub fn link_connected(&mut self, now: Instant, number: LinkNumber) {
        if self.phase == Phase::Opening {
            self.first_link_connected(now, number);
            return;
        }
        let Some(adding) = self.adding(number, Step::Connecting) else { return };
        let Some(ours) = self.find(number).map(|member| member.ours) else { return };
        self.add_step(Step::Telling, Some(now + ADD_LINK_WAIT));
        self.collect_untold();
        match self.role {
            // RFC 7609 3.5.1.6.2-2, A.3.3-2
            Role::Server => self.send_continuation(false),
            Role::Client => {
                // RFC 7609 C.3-2
                self.committed = true;
                // RFC 7609 3.5.1.6.1-7, A.3.2-8
                self.send_add_link(adding.carrier, number, ours, true);
            }
        }
        self.proceed(now);
    }

    /// The queue pair cannot be connected: the one of the first link, or that of
    /// [`Action::ConnectLink`].
    pub fn link_unreachable(&mut self, now: Instant, number: LinkNumber) {
        if let Some(adding) = self.adding(number, Step::Connecting) {
            if self.role == Role::Client {
                self.forget_joining(now, number, Cause::Unreachable);
                self.refuse_offer(now, adding, REASON_NO_ALTERNATE_PATH);
            } else {
                self.abort_add(now, Cause::Unreachable, true);
            }
        } else {
            self.link_event(now, number, Event::Fail(Cause::Unreachable));
        }
        self.proceed(now);
    }

    /// The exchange, if it adds this link and is at this step.
    pub(super) fn adding(&self, number: LinkNumber, step: Step) -> Option<Adding> {
        match self.exchange {
            Exchange::Adding(adding) if adding.number == number && adding.step == step => {
                Some(adding)
            }
            Exchange::Idle
            | Exchange::Adding(_)
            | Exchange::Deleting { .. }
            | Exchange::Vacating { .. } => None,
        }
    }

    fn add_step(&mut self, step: Step, deadline: Option<Instant>) {
        if let Exchange::Adding(adding) = &mut self.exchange {
            (adding.step, adding.deadline) = (step, deadline);
        }
    }

    // RFC 7609 A.3.2-9, A.3.2-10
    fn send_add_link(&mut self, on: LinkNumber, link: LinkNumber, ours: QpAddress, reply: bool) {
        let QpAddress { gid, mac, qpn, psn, mtu } = ours;
        let message = AddLink { reply, rejected: false, reason: 0, mac, gid, qpn, link, mtu, psn };
        self.send(on, Llc::AddLink(message));
    }

    /// Offers a second link on the port of the first, with an MTU that does not exist: every
    /// deployed client rejects that at once, and the group is complete. Silence would cost it
    /// seconds; see the module. The body names our port because Linux mistakes an empty one.
    fn offer_impossible_link(&mut self, now: Instant, adding: Adding) {
        let offer = AddLink {
            reply: false,
            rejected: false,
            reason: 0,
            mac: self.setup.ours.mac,
            gid: self.setup.ours.gid,
            qpn: Qpn(0),
            link: adding.number,
            mtu: Mtu(0),
            psn: Psn(0),
        };
        self.phase = Phase::AddingLink { deadline: Some(now + ADD_LINK_WAIT) };
        // RFC 7609 C.3-1
        self.committed = true;
        self.send(adding.carrier, Llc::AddLink(offer));
    }

    /// Client: there will be no such link.
    fn refuse_offer(&mut self, now: Instant, adding: Adding, reason: u8) {
        self.exchange = Exchange::Idle;
        if let Some(offer) = adding.offer {
            self.reject(adding.carrier, &offer, reason);
        }
        self.proceed(now);
    }

    fn reject(&mut self, on: LinkNumber, offer: &AddLink, reason: u8) {
        // RFC 7609 C.3-2
        self.committed = true;
        // RFC 7609 2.2.1-2, 3.5.1.6.1-2, 3.5.1.6.1-8, A.3.2-8
        self.send(on, Llc::AddLink(AddLink { reply: true, rejected: true, reason, ..*offer }));
    }

    pub(super) fn handle_add_link(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &AddLink,
    ) -> Result<(), PeerMisbehaved> {
        match (self.role, message.reply) {
            (Role::Client, false) => self.handle_offer(on, message),
            (Role::Server, true) => {
                self.handle_offer_reply(now, on, message);
                Ok(())
            }
            (Role::Server, false) => {
                self.handle_notice();
                Ok(())
            }
            (Role::Client, true) => {
                self.dropped += 1;
                Ok(())
            }
        }
    }

    /// Client: the server offers a link. One that crosses our own notice is the answer to it.
    // RFC 7609 3.5.5.3.1-3, 3.5.5.3.3-3
    fn handle_offer(&mut self, on: LinkNumber, offer: &AddLink) -> Result<(), PeerMisbehaved> {
        match self.phase {
            Phase::AddingLink { .. } => self.phase = Phase::AddingLink { deadline: None },
            Phase::Established => {}
            Phase::Opening | Phase::Confirming { .. } | Phase::Terminated => {
                return Err(PeerMisbehaved::UnexpectedMessage);
            }
        }
        let reason = match (self.is_changing(), offer.mtu.bytes(), self.links_limit) {
            // RFC 7609 C.7.1-25
            (false, None, _) => Some(REASON_INVALID_MTU),
            (false, Some(_), 2..) if self.find(offer.link).is_none() => None,
            (false, Some(_), _) => Some(REASON_NO_ALTERNATE_PATH),
            // RFC 7609 3.5.5.3-5
            (true, _, _) => {
                self.dropped += 1;
                return Ok(());
            }
        };
        // A rejected offer needs an answer at once: see `offer_impossible_link`.
        if let Some(reason) = reason {
            self.reject(on, offer, reason);
            return Ok(());
        }
        self.wants_link = false;
        self.exchange = Exchange::Adding(Adding::new(offer.link, on, Some(*offer)));
        let peer = Some((offer.gid, offer.mac));
        self.actions.push(Action::OpenLink { number: offer.link, peer });
        Ok(())
    }

    /// Server: the client has a port for one more link.
    fn handle_notice(&mut self) {
        // RFC 7609 3.5.5.3-2, 3.5.5.3.1-2
        if matches!(self.exchange, Exchange::Adding(_)) || self.phase != Phase::Established {
            self.dropped += 1;
        } else {
            // RFC 7609 3.5.5.1.2-2, 3.5.5.1.2-3, 3.5.5.3.2-2, 3.5.5.3.3-2, C.8-5, 3.3-7
            self.wants_link = true;
        }
    }

    /// Server: the client has answered our offer.
    fn handle_offer_reply(&mut self, now: Instant, on: LinkNumber, reply: &AddLink) {
        let expected = self.adding(reply.link, Step::Offered).filter(|it| it.carrier == on);
        let Some(_) = expected else {
            self.handle_stray_reply(on, reply);
            return;
        };
        if reply.rejected {
            // RFC 7609 3.5.1.6.2-1, C.8-1
            self.abort_add(now, Cause::Rejected, false);
            return;
        }
        let Some(ours) = self.find(reply.link).map(|member| member.ours) else { return };
        let theirs = end_of(reply);
        if !self.admits(ours, theirs) || theirs.mtu.bytes().is_none() {
            // RFC 7609 C.7.1-26
            self.abort_add(now, Cause::PeerMisbehaved, true);
            return;
        }
        if let Some(member) = self.find_mut(reply.link) {
            member.theirs = Some(theirs);
        }
        self.add_step(Step::Connecting, None);
        // RFC 7609 3.5.1.6.2-2
        self.actions.push(Action::ConnectLink { number: reply.link, theirs });
    }

    /// The answer to an impossible offer, or one that comes too late.
    fn handle_stray_reply(&mut self, on: LinkNumber, reply: &AddLink) {
        let waiting = matches!(self.phase, Phase::AddingLink { deadline: Some(_) });
        if waiting {
            self.phase = Phase::AddingLink { deadline: None };
        } else {
            self.dropped += 1;
        }
        if !reply.rejected && self.find(reply.link).is_none() {
            // Whatever the client believes to have accepted does not exist.
            let (link, reason) = (reply.link, DeleteReason::LOST_PATH);
            let delete = DeleteLink { reply: false, all: false, orderly: false, link, reason };
            self.send(on, Llc::DeleteLink(delete));
        }
    }

    /// Notes which RMBs must be told: those that the peer knows on the carrier.
    // RFC 7609 3.5.5.2-1, 3.5.5.2.3-1
    fn collect_untold(&mut self) {
        let Exchange::Adding(adding) = self.exchange else { return };
        let (Some(old), Some(new)) = (self.place(adding.carrier), self.place(adding.number)) else {
            return;
        };
        let known = |told: u16| told & 1 << old != 0;
        let rows = self.own_rmbs.iter().filter(|(_, row)| {
            known(row.told) && row.keys.on(new).is_some() && row.plan != Plan::Withdraw
        });
        let untold = rows.fold(0, |mask, (rmb, _)| mask | 1 << rmb.0);
        if let Exchange::Adding(adding) = &mut self.exchange {
            adding.untold = untold;
        }
    }

    /// Sends the next two keys, or none.
    // RFC 7609 3.5.1.6.3-1, 3.5.5.2.3-2, 3.5.5.2.3-3, A.3.3-3, A.3.3-4, A.3.3-5
    fn send_continuation(&mut self, reply: bool) {
        let Exchange::Adding(mut adding) = self.exchange else { return };
        let (Some(old), Some(new)) = (self.place(adding.carrier), self.place(adding.number)) else {
            return;
        };
        let remaining = adding.untold.count_ones();
        let remaining = u8::try_from(remaining).expect("a mask of 64 bits");
        let mut pairs = [RkeyPair::default(); 2];
        for pair in &mut pairs {
            if adding.untold == 0 {
                break;
            }
            let index = adding.untold.trailing_zeros();
            adding.untold &= adding.untold - 1;
            let rmb = RmbIndex(u8::try_from(index).expect("a bit of 64"));
            let Some(row) = self.own_rmbs.find_mut(rmb) else { continue };
            if let (Some((existing, _)), Some((key, address))) =
                (row.keys.on(old), row.keys.on(new))
            {
                row.told |= 1 << new;
                *pair = RkeyPair { existing, new: key, address };
            }
        }
        self.exchange = Exchange::Adding(adding);
        // RFC 7609 A.3.3-7, A.3.3-8
        let message = AddLinkContinuation { reply, link: adding.number, remaining, pairs };
        self.send(adding.carrier, Llc::AddLinkContinuation(message));
    }

    pub(super) fn handle_continuation(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &AddLinkContinuation,
    ) -> Result<(), PeerMisbehaved> {
        let expected = self.adding(message.link, Step::Telling).filter(|it| it.carrier == on);
        let Some(mut adding) = expected else {
            self.dropped += 1;
            return Ok(());
        };
        if message.reply != (self.role == Role::Server) {
            return Err(PeerMisbehaved::UnexpectedMessage);
        }
        // RFC 7609 C.7.1-28
        if adding.owed.is_some_and(|owed| owed != message.remaining) {
            return Err(PeerMisbehaved::WrongKeyCount);
        }
        let owed = message.remaining.saturating_sub(2);
        adding.owed = Some(owed);
        self.exchange = Exchange::Adding(adding);
        self.learn_pairs(on, message);
        if self.role == Role::Client {
            self.send_continuation(true);
        }
        let untold = match self.exchange {
            Exchange::Adding(adding) => adding.untold,
            Exchange::Idle | Exchange::Deleting { .. } | Exchange::Vacating { .. } => 0,
        };
        if owed == 0 && untold == 0 {
            self.add_step(Step::Confirming, Some(now + CONFIRM_ADDED_LINK_WAIT));
            if self.role == Role::Server {
                // RFC 7609 3.5.1.6.2-2
                self.send_confirm_link(message.link, false);
            }
        } else {
            self.add_step(Step::Telling, Some(now + ADD_LINK_WAIT));
            if self.role == Role::Server {
                self.send_continuation(false);
            }
        }
        Ok(())
    }

    fn learn_pairs(&mut self, on: LinkNumber, message: &AddLinkContinuation) {
        let (Some(old), Some(new)) = (self.place(on), self.place(message.link)) else { return };
        for pair in message.pairs.iter().take(usize::from(message.remaining)) {
            match self.peer_rmbs.row(old, pair.existing) {
                Some(row) => self.peer_rmbs.add(row, new, pair.new, pair.address),
                // Deleted in the meantime, or never told.
                None => self.dropped += 1,
            }
        }
    }

    /// The new link is confirmed on both sides.
    pub(super) fn finish_add(&mut self, now: Instant, number: LinkNumber) {
        self.exchange = Exchange::Idle;
        self.link_event(now, number, Event::Confirmed);
        let ours = self.find(number).map(|member| (member.ours.gid, member.ours.mac));
        if self.spare_port == ours {
            self.spare_port = None;
        }
        if self.phase == Phase::Established {
            self.actions.push(Action::LinkConfirmed(number));
        }
        self.replace_asymmetric();
        if self.role == Role::Server && self.lacks_redundancy() {
            self.retry_at = Some(now + self.setup.retry_link);
        }
    }

    /// Server: an asymmetric link has done its duty once two symmetric ones are there.
    // RFC 7609 2.2.1-4, 2.2.1-5, 2.2.1-6
    fn replace_asymmetric(&mut self) {
        if self.role == Role::Client || self.lacks_redundancy() {
            return;
        }
        let Some(number) = self.asymmetric() else { return };
        if let Some(member) = self.find_mut(number) {
            // RFC 7609 2.2.1-7
            let reason = DeleteReason::ASYMMETRIC_NOT_NEEDED;
            let cause = Cause::DeletedByUs;
            member.doom = Some(Doom { reason, orderly: true, cause, asked: None });
        }
    }

    /// The link will not be added. `tell` if the peer may believe that it exists.
    pub(super) fn abort_add(&mut self, now: Instant, cause: Cause, tell: bool) {
        let Exchange::Adding(adding) = self.exchange else { return };
        self.exchange = Exchange::Idle;
        if tell {
            // RFC 7609 3.5.1.6.2-3, C.7.1-3, C.7.1-4, C.7.1-10, C.7.1-12
            self.link_event(now, adding.number, Event::Fail(cause));
        } else {
            self.forget_joining(now, adding.number, cause);
        }
        let useful = self.role == Role::Server || self.spare_port.is_some();
        if self.phase != Phase::Terminated && useful && self.has_room() {
            // RFC 7609 C.8-2, C.7.1-11
            self.retry_at = Some(now + self.setup.retry_link);
        }
    }

    /// Drops a link that was being added, without a word to the peer.
    fn forget_joining(&mut self, now: Instant, number: LinkNumber, cause: Cause) {
        self.exchange = Exchange::Idle;
        self.link_event(now, number, Event::Fail(cause));
        if let Some(member) = self.find_mut(number) {
            member.gone = true;
        }
    }

    /// The peer did not say in time what the exchange waits for.
    pub(super) fn add_timed_out(&mut self, now: Instant, adding: Adding) {
        let founding = matches!(self.phase, Phase::AddingLink { .. });
        match adding.step {
            Step::Opening | Step::Connecting => {}
            // Deployed servers go on with one link.
            Step::Offered if founding => self.abort_add(now, Cause::NoAnswer, false),
            // RFC 7609 C.7.1-7, C.7.1-8, C.7.1-9, C.7.1-13, C.7.1-14, C.7.1-15
            Step::Offered | Step::Telling => {
                let tell = adding.step == Step::Telling;
                self.abort_add(now, Cause::NoAnswer, tell);
                self.link_event(now, adding.carrier, Event::Fail(Cause::NoAnswer));
                self.wants_link = self.role == Role::Server;
            }
            Step::Confirming => self.abort_add(now, Cause::ConfirmTimedOut, true),
        }
    }

    /// A port of ours came up, or is not used by the group: a server offers it, a client tells its
    /// server of it. What cannot be now is done when it can.
    pub fn want_link(&mut self, now: Instant, port: (Gid, MacAddress)) {
        if self.phase == Phase::Terminated {
            return;
        }
        self.spare_port = Some(port);
        // RFC 7609 C.8-4, 3.5.5.1.1-1
        self.wants_link = true;
        self.proceed(now);
    }
}
