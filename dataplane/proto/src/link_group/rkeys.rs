//! The exchanges that tell what RMBs are called (RFC 3.5.5.2, A.3.5 to A.3.7).

use super::exchange::Exchange;
use super::rmbs::{Full, RmbIndex, RmbSet, Row, Standing, Token};
use super::{Action, LinkGroup, Phase, Role};
use crate::error::PeerMisbehaved;
use crate::limits::{LINKS_PER_GROUP_MAX, RKEY_REPLY_WAIT};
use crate::link::Cause;
use crate::time::Instant;
use crate::vocabulary::{LinkNumber, Rkey};
use crate::wire::llc::rkeys::{RKEYS_MAX, RkeyOnLink};
use crate::wire::llc::{ConfirmRkey, ConfirmRkeyContinuation, DeleteRkey, Llc};

use core::time::Duration;

/// The exchange about an RMB of ours that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Announcement {
    pub(super) rmb: RmbIndex,
    pub(super) on: LinkNumber,
    pub(super) deadline: Instant,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// CONFIRM RKEY. The peer was told of the links in these places, one bit each, and knows that
    /// so many more are to come.
    Confirm { slots: u8, left: u8 },
    /// DELETE RKEY.
    Delete,
}

/// An RMB of the peer that CONFIRM RKEY CONTINUATION is to go on about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Continuing {
    on: LinkNumber,
    row: usize,
    /// So many rkeys are to come.
    left: u8,
    pub(super) deadline: Instant,
}

impl LinkGroup {
    /// An RMB that the peer hears of by Accept or Confirm of a first contact: no exchange.
    ///
    /// # Panics
    ///
    /// If `rmb` is not below [`OUR_RMBS_MAX`](crate::limits::OUR_RMBS_MAX).
    pub fn own_rmb(&mut self, rmb: RmbIndex, keys: &[(LinkNumber, Rkey, u64)]) {
        self.note_keys(rmb, keys);
        self.our_rmbs.standings[usize::from(rmb.0)] = Standing::Known;
        self.our_rmbs.told[usize::from(rmb.0)] = self.our_rmbs.rows[usize::from(rmb.0)].present;
    }

    /// Another RMB: tells the peer what it is called on each link. [`Action::RmbConfirmed`] or
    /// [`Action::RmbRefused`] follows.
    ///
    /// # Panics
    ///
    /// If `rmb` is not below [`OUR_RMBS_MAX`](crate::limits::OUR_RMBS_MAX).
    ///
    /// # Specification
    ///
    /// RFC 7609, 3.5.5.2.1.
    pub fn announce_rmb(&mut self, now: Instant, rmb: RmbIndex, keys: &[(LinkNumber, Rkey, u64)]) {
        self.note_keys(rmb, keys);
        self.our_rmbs.standings[usize::from(rmb.0)] = Standing::Unannounced;
        self.rkeys_may_change();
        self.advance(now);
    }

    /// An RMB that no connection uses is to go: tells the peer. [`Action::RmbDeleted`] follows.
    ///
    /// # Specification
    ///
    /// RFC 7609, 3.5.5.2.2.
    pub fn withdraw_rmb(&mut self, now: Instant, rmb: RmbIndex) {
        self.our_rmbs.standings[usize::from(rmb.0)] = Standing::Unwanted;
        self.advance(now);
    }

    fn note_keys(&mut self, rmb: RmbIndex, keys: &[(LinkNumber, Rkey, u64)]) {
        self.our_rmbs.rows[usize::from(rmb.0)] = Row::EMPTY;
        self.our_rmbs.told[usize::from(rmb.0)] = 0;
        for (number, rkey, address) in keys {
            if let Some(slot) = self.slot(*number) {
                self.our_rmbs.set(rmb, slot, *rkey, *address);
            }
        }
    }

    /// Remembers an RMB that the peer told by Accept or Confirm rather than by CONFIRM RKEY.
    ///
    /// # Errors
    ///
    /// [`Full`] if no more can be remembered: decline the connection.
    pub fn learn_rkey(&mut self, on: LinkNumber, rkey: Rkey, address: u64) -> Result<(), Full> {
        // RFC 7609 3.5.2.2-3
        let Some(slot) = self.slot(on) else { return Ok(()) };
        self.peer_rmbs.learn(slot, rkey, address).map(|_| ())
    }

    /// Begins the next exchange about an RMB of ours, if there is one to begin.
    pub(super) fn begin_rkeys(&mut self, now: Instant) {
        if self.phase != Phase::Established || self.announcement.is_some() {
            return;
        }
        let Some(on) = self.link_of_use() else { return };
        let slots = self.slots_up();
        self.our_rmbs.complete(slots);
        // Connections wait for what is new; and what the peer has no room for holds nobody up.
        if let Some(rmb) = self.our_rmbs.next(Standing::Unannounced) {
            self.announce(now, rmb, on);
        } else if let Some(rmb) = self.our_rmbs.next(Standing::Unwanted) {
            self.withdraw(now, rmb, on);
        } else if let Some(rmb) = self.our_rmbs.next(Standing::Incomplete) {
            self.announce(now, rmb, on);
        }
    }

    /// The places of all links that may carry connections, one bit each.
    fn slots_up(&self) -> u8 {
        let up = |slot: usize| self.members[slot].is_some_and(|member| member.is_of_use());
        (0..self.members.len()).filter(|slot| up(*slot)).fold(0, |slots, slot| slots | 1 << slot)
    }

    /// The other links on which an RMB of ours is known, and what it is called there: those too
    /// that are to go, of which the peer has not heard.
    fn elsewhere(&self, rmb: RmbIndex, on: LinkNumber) -> impl Iterator<Item = RkeyOnLink> {
        let row = self.our_rmbs.rows[usize::from(rmb.0)];
        self.members.iter().enumerate().filter_map(move |(slot, member)| {
            let member = member.as_ref().filter(|member| member.number != on)?;
            let token = row.at(slot).filter(|_| member.link.is_up())?;
            Some(RkeyOnLink { link: member.number, rkey: token.rkey, address: token.address })
        })
    }

    fn announce(&mut self, now: Instant, rmb: RmbIndex, on: LinkNumber) {
        let slot = self.slot(on);
        let Some(token) = slot.and_then(|slot| self.our_rmbs.rows[usize::from(rmb.0)].at(slot))
        else {
            self.our_rmbs.standings[usize::from(rmb.0)] = Standing::Absent;
            self.actions.push(Action::RmbRefused(rmb));
            return;
        };
        let mut others = [RkeyOnLink::default(); 2];
        for (place, other) in others.iter_mut().zip(self.elsewhere(rmb, on)) {
            *place = other;
        }
        let count = u8::try_from(self.elsewhere(rmb, on).count()).expect("few links");
        let slots = slot.map_or(0, |slot| 1 << slot) | self.slots_of(&others);
        let kind = Kind::Confirm { slots, left: count.saturating_sub(RKEYS_PER_REQUEST) };
        let deadline = now + self.confirm_rkey_wait(on);
        self.announcement = Some(Announcement { rmb, on, deadline, kind });
        let Token { rkey, address } = token;
        let (reply, negative, retry, other_links) = (false, false, false, count);
        // RFC 7609 2.1-3, 2.2-4, 3.5.5.2-1, 3.5.5.2.1-1, 3.5.5.2.1-2
        let request = ConfirmRkey { reply, negative, retry, other_links, rkey, address, others };
        self.send(on, Llc::ConfirmRkey(request));
    }

    /// Another link is tried soon, as connections wait for the RMB. Without one all others depend
    /// on this link, and a peer that is busy may take its time.
    fn confirm_rkey_wait(&self, on: LinkNumber) -> Duration {
        let mut others = self.members().filter(|member| member.number != on && member.is_of_use());
        if others.next().is_some() { RKEY_REPLY_WAIT } else { self.exchange_wait() }
    }

    /// The rkeys on further links.
    fn continue_announcement(&mut self, now: Instant) {
        let Some(Announcement { rmb, on, kind: Kind::Confirm { slots, left }, .. }) =
            self.announcement
        else {
            return;
        };
        let mut others = [RkeyOnLink::default(); 3];
        let untold = |key: &RkeyOnLink| slots & self.slots_of(&[*key]) == 0;
        // A link that went meanwhile leaves its place empty: the count was told already.
        for (place, other) in others.iter_mut().zip(self.elsewhere(rmb, on).filter(untold)) {
            *place = other;
        }
        let slots = slots | self.slots_of(&others);
        let kind = Kind::Confirm { slots, left: left.saturating_sub(RKEYS_PER_CONTINUATION) };
        let deadline = now + self.confirm_rkey_wait(on);
        self.announcement = Some(Announcement { rmb, on, deadline, kind });
        // RFC 7609 A.3.5-7
        let more =
            ConfirmRkeyContinuation { reply: false, negative: false, remaining: left, others };
        self.send(on, Llc::ConfirmRkeyContinuation(more));
    }

    /// The places of the links that these keys are for, one bit each.
    fn slots_of(&self, keys: &[RkeyOnLink]) -> u8 {
        let slots = keys.iter().filter_map(|key| self.slot(key.link));
        slots.fold(0, |slots, slot| slots | 1 << slot)
    }

    fn withdraw(&mut self, now: Instant, rmb: RmbIndex, on: LinkNumber) {
        let slot = self.slot(on);
        let Some(token) = slot.and_then(|slot| self.our_rmbs.rows[usize::from(rmb.0)].at(slot))
        else {
            self.rmb_deleted(rmb);
            return;
        };
        let mut rkeys = [Rkey(0); RKEYS_MAX];
        rkeys[0] = token.rkey;
        let deadline = now + RKEY_REPLY_WAIT;
        self.announcement = Some(Announcement { rmb, on, deadline, kind: Kind::Delete });
        // RFC 7609 3.5.5.2.2-5
        let request = DeleteRkey { reply: false, negative: false, count: 1, error_mask: 0, rkeys };
        self.send(on, Llc::DeleteRkey(request));
    }

    fn rmb_deleted(&mut self, rmb: RmbIndex) {
        self.our_rmbs.standings[usize::from(rmb.0)] = Standing::Absent;
        self.our_rmbs.rows[usize::from(rmb.0)] = Row::EMPTY;
        self.actions.push(Action::RmbDeleted(rmb));
    }

    pub(super) fn handle_confirm_rkey(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &ConfirmRkey,
    ) {
        if message.reply {
            self.confirm_rkey_answered(now, on, message);
            return;
        }
        if self.refuses_rkeys() {
            // RFC 7609 3.5.5.3-8, 3.5.5.3.1-6, 3.5.5.3.2-5
            let reply = ConfirmRkey { reply: true, negative: true, retry: true, ..*message };
            self.send(on, Llc::ConfirmRkey(reply));
            return;
        }
        let Some(slot) = self.slot(on) else { return };
        let others = usize::from(message.other_links).min(message.others.len());
        let others = &message.others[..others];
        let elsewhere = others.iter().filter_map(|one| Some((self.slot(one.link)?, one.rkey)));
        let learnt = self.peer_rmbs.row_of([(slot, message.rkey)].into_iter().chain(elsewhere));
        if let Ok(row) = learnt {
            self.peer_rmbs.set(row, slot, message.rkey, message.address);
            self.learn_elsewhere(row, others);
        }
        let full = learnt.is_err();
        // RFC 7609 A.3.5-8
        let reply = ConfirmRkey { reply: true, negative: full, retry: full, ..*message };
        self.send(on, Llc::ConfirmRkey(reply));
        let Ok(row) = learnt else { return };
        let left = message.other_links.saturating_sub(RKEYS_PER_REQUEST);
        self.rkeys_learnt(now, Continuing { on, row, left, deadline: now + RKEY_REPLY_WAIT });
    }

    /// Waits for the rkeys that are to come, or judges those that came.
    fn rkeys_learnt(&mut self, now: Instant, continuing: Continuing) {
        self.continuing = Some(continuing).filter(|continuing| continuing.left > 0);
        if self.continuing.is_none() {
            self.check_row(now, continuing.row);
            self.advance(now);
        }
    }

    /// What was announced in part, by either side, is to be completed before links change.
    pub(super) fn rkeys_are_under_way(&self) -> bool {
        self.announcement.is_some() || self.continuing.is_some()
    }

    /// Server: whether rkeys cannot change now, because links do. While connections leave a link
    /// nobody speaks of it, and refusing would cost new ones their RMB.
    ///
    /// So it does while a link is deleted, which a Linux client may take half a minute for: it does
    /// not ask again, but declines its connection. Version 2 has no RFC to say that we refuse.
    fn refuses_rkeys(&self) -> bool {
        let harmless = |exchange: Exchange| exchange.vacates() || self.is_v2() && !exchange.adds();
        self.role == Role::Server && self.exchange.is_some_and(|exchange| !harmless(exchange))
    }

    fn learn_elsewhere(&mut self, row: usize, others: &[RkeyOnLink]) {
        for other in others {
            // Keys for links that we do not have are of no use, and no offence.
            if let Some(slot) = self.slot(other.link) {
                self.peer_rmbs.set(row, slot, other.rkey, other.address);
            }
        }
    }

    /// A link for which no key was told is of no use to whoever would have to move there.
    fn check_row(&mut self, now: Instant, row: usize) {
        let without = |slot: usize| self.peer_rmbs.rows[row].at(slot).is_none();
        let mut missing = [None; LINKS_PER_GROUP_MAX as usize];
        for (slot, member) in self.members.iter().enumerate() {
            missing[slot] = member
                .filter(|member| member.is_of_use() && without(slot))
                .map(|member| member.number);
        }
        for number in missing.into_iter().flatten() {
            // RFC 7609 C.7.1-31
            self.link_lost(now, number, Cause::PeerMisbehaved);
        }
    }

    pub(super) fn handle_confirm_rkey_continuation(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &ConfirmRkeyContinuation,
    ) -> Result<(), PeerMisbehaved> {
        if message.reply {
            let ours = self.announcement.filter(|announcement| announcement.on == on);
            match ours.map(|announcement| announcement.kind) {
                Some(Kind::Confirm { .. }) if message.negative => self.rmb_refused(now, true),
                Some(Kind::Confirm { .. }) => self.rkeys_answered(now),
                Some(Kind::Delete) | None => self.dropped += 1,
            }
            return Ok(());
        }
        let Some(continuing) = self.continuing.filter(|continuing| continuing.on == on) else {
            self.dropped += 1;
            return Ok(());
        };
        let Continuing { row, left, .. } = continuing;
        // RFC 7609 A.3.6-2, C.7.1-35
        if message.remaining != left {
            return Err(PeerMisbehaved::UnexpectedMessage);
        }
        let brought = left.min(RKEYS_PER_CONTINUATION);
        self.learn_elsewhere(row, &message.others[..usize::from(brought)]);
        // RFC 7609 A.3.6-4
        let reply = ConfirmRkeyContinuation { reply: true, ..*message };
        self.send(on, Llc::ConfirmRkeyContinuation(reply));
        let (left, deadline) = (left - brought, now + RKEY_REPLY_WAIT);
        self.rkeys_learnt(now, Continuing { left, deadline, ..continuing });
        Ok(())
    }

    fn confirm_rkey_answered(&mut self, now: Instant, on: LinkNumber, message: &ConfirmRkey) {
        let ours = self.announcement.filter(|announcement| announcement.on == on);
        match ours.map(|announcement| announcement.kind) {
            // RFC 7609 A.3.5-9, A.3.5-10
            Some(Kind::Confirm { .. }) if message.negative => self.rmb_refused(now, message.retry),
            Some(Kind::Confirm { .. }) => self.rkeys_answered(now),
            Some(Kind::Delete) | None => self.dropped += 1,
        }
    }

    /// The peer has taken one message of an announcement in.
    fn rkeys_answered(&mut self, now: Instant) {
        let Some(announcement) = self.announcement else { return };
        if let Kind::Confirm { left, .. } = announcement.kind
            && left > 0
        {
            self.continue_announcement(now);
            return;
        }
        self.announcement = None;
        let rmb = announcement.rmb;
        self.retries = 0;
        let index = usize::from(rmb.0);
        if let Kind::Confirm { slots, .. } = announcement.kind {
            self.our_rmbs.told[index] |= slots & self.our_rmbs.rows[index].present;
        }
        let standing = &mut self.our_rmbs.standings[index];
        let is_news = *standing == Standing::Unannounced;
        match standing {
            Standing::Absent | Standing::Unwanted => {}
            Standing::Unannounced | Standing::Known | Standing::Incomplete => {
                *standing = Standing::Known;
            }
        }
        // RFC 7609 3.5.5.2.1-3, 3.5.5.2.1-5
        if is_news {
            self.actions.push(Action::RmbConfirmed(rmb));
        }
        self.advance(now);
    }

    /// The peer cannot take an RMB: for now, or at all.
    fn rmb_refused(&mut self, now: Instant, retry: bool) {
        let Some(Announcement { rmb, .. }) = self.announcement.take() else { return };
        let standing = &mut self.our_rmbs.standings[usize::from(rmb.0)];
        let refused = !retry || self.retries >= RETRIES_MAX;
        if refused && *standing == Standing::Unannounced {
            self.retries = 0;
            *standing = Standing::Absent;
            self.actions.push(Action::RmbRefused(rmb));
        } else {
            // What is under way at the peer ends soon; a client will have seen it by then. And an
            // RMB that connections use has to be known wherever they may have to move.
            // RFC 7609 3.5.5.3.1-7, 3.5.5.3.2-6, 3.5.5.3.3-3, 3.5.5.3.3-5, A.3.5-9
            self.again_at = Some(now + AGAIN_AFTER * (1 << self.retries.min(RETRIES_MAX)));
            self.retries += 1;
        }
        self.advance(now);
    }

    /// There is reason to believe that rkeys are not refused now.
    pub(super) fn rkeys_may_change(&mut self) {
        self.again_at = None;
        self.retries = 0;
    }

    pub(super) fn handle_delete_rkey(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &DeleteRkey,
    ) {
        if message.reply {
            let ours = self.announcement.filter(|announcement| announcement.on == on);
            match ours.map(|announcement| announcement.kind) {
                Some(Kind::Delete) => self.withdrawn(now),
                Some(Kind::Confirm { .. }) | None => self.dropped += 1,
            }
            return;
        }
        let Some(slot) = self.slot(on) else { return };
        let (mut error_mask, mut known) = (0, false);
        // RFC 7609 3.5.5.2.2-4
        for (index, rkey) in message.rkeys.iter().take(usize::from(message.count)).enumerate() {
            if self.peer_rmbs.forget(slot, *rkey) {
                known = true;
            } else {
                // RFC 7609 A.3.7-4, C.7.1-32
                error_mask |= 0x80 >> index;
            }
        }
        if known {
            self.actions.push(Action::RkeysDeleted(on));
        }
        let negative = error_mask != 0;
        // RFC 7609 A.3.7-6
        let reply = DeleteRkey { reply: true, negative, error_mask, ..*message };
        self.send(on, Llc::DeleteRkey(reply));
    }

    fn withdrawn(&mut self, now: Instant) {
        if let Some(Announcement { rmb, .. }) = self.announcement.take() {
            // RFC 7609 3.5.5.2.2-3, A.3.7-7
            self.rmb_deleted(rmb);
            self.advance(now);
        }
    }

    /// The peer did not answer.
    pub(super) fn rkeys_timed_out(&mut self, now: Instant) {
        let due = |deadline: &Instant| *deadline <= now;
        let continuing = self.continuing.filter(|continuing| due(&continuing.deadline));
        if let Some(Continuing { on, .. }) = continuing {
            self.link_lost(now, on, Cause::LlcTimedOut);
        }
        let announcement = self.announcement.filter(|announcement| due(&announcement.deadline));
        // An RMB that is to go stays until the peer has let go of it: what it wrote there would
        // break its queue pair. It is withdrawn again over another link, or ends with the group.
        // RFC 7609 C.7.1-22, 3.5.5.2.2-3
        if let Some(Announcement { on, .. }) = announcement {
            self.link_lost(now, on, Cause::LlcTimedOut);
        }
    }

    /// The RMBs of ours that a new link is to be told of: those that the peer knows on the link in
    /// `slot`, but for one that it is just being told to forget.
    pub(super) fn rmbs_to_tell(&self, slot: usize) -> RmbSet {
        let mut told = self.our_rmbs.told_on(slot);
        if let Some(Announcement { rmb, kind: Kind::Delete, .. }) = self.announcement {
            told.remove(usize::from(rmb.0));
        }
        told
    }

    /// A link has lost its place, and whoever takes it was not told of.
    pub(super) fn place_lost(&mut self, slot: usize) {
        if let Some(Announcement { kind: Kind::Confirm { slots, .. }, .. }) = &mut self.announcement
        {
            *slots &= !(1 << slot);
        }
    }

    /// A link is gone: what was under way on it begins anew on another.
    // RFC 7609 2.3-11
    pub(super) fn rkeys_lost(&mut self, number: LinkNumber) {
        if self.announcement.is_some_and(|announcement| announcement.on == number) {
            self.announcement = None;
        }
        if self.continuing.is_some_and(|continuing| continuing.on == number) {
            self.continuing = None;
        }
    }
}

/// RTokens of other links in one CONFIRM RKEY, and in one CONFIRM RKEY CONTINUATION.
const RKEYS_PER_REQUEST: u8 = 2;
const RKEYS_PER_CONTINUATION: u8 = 3;

/// How often a refused RMB is announced again, each time after twice as long.
const RETRIES_MAX: u32 = 6;

/// How long whatever the peer refused it for may take.
const AGAIN_AFTER: Duration = Duration::from_millis(50);
