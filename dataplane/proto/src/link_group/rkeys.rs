//! CONFIRM RKEY and DELETE RKEY: peers tell each other their rkeys (RFC 3.5.5.2, A.3.5 to A.3.7).

use super::dispatch::ARRIVED;
use super::exchange::Exchange;
use super::rmbs::{Full, RmbIndex, RmbSet, Row, Standing, Token};
use super::{Action, LinkGroup, Phase, Role};
use crate::error::PeerMisbehaved;
use crate::limits::LINKS_PER_GROUP_MAX;
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
    /// When the last message of it went out.
    pub(super) since: Instant,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// CONFIRM RKEY. `slots` has a bit for each link whose rkey the peer was told; it was also told
    /// that the rkeys of `left` more links follow.
    Confirm { slots: u8, left: u8 },
    /// DELETE RKEY.
    Delete,
}

/// An RMB of the peer of which further rkeys are to come by CONFIRM RKEY CONTINUATION.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Continuing {
    pub(super) on: LinkNumber,
    row: usize,
    /// So many rkeys are to come.
    left: u8,
    /// When the last message of it came.
    pub(super) since: Instant,
}

impl LinkGroup {
    /// Adds an RMB that Accept or Confirm of a first contact names: it needs no CONFIRM RKEY.
    ///
    /// # Panics
    ///
    /// If `rmb` is not below [`OUR_RMBS_MAX`](crate::limits::OUR_RMBS_MAX).
    pub fn own_rmb(&mut self, rmb: RmbIndex, keys: &[(LinkNumber, Rkey, u64)]) {
        self.note_keys(rmb, keys);
        self.our_rmbs.standings[usize::from(rmb.0)] = Standing::Known;
        self.our_rmbs.told[usize::from(rmb.0)] = self.our_rmbs.rows[usize::from(rmb.0)].present;
    }

    /// Adds an RMB, and tells the peer its rkeys. [`Action::RmbConfirmed`] or
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

    /// Deletes an RMB that no connection uses. [`Action::RmbDeleted`] follows the peer's answer.
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
        // RFC 7609 3.5.2.2 #3: new RToken is no first contact
        // The link may have been deleted while Accept or Confirm was on its way.
        let Some(slot) = self.slot(on) else { return Ok(()) };
        self.peer_rmbs.learn(slot, Token { rkey, address })
    }

    /// Begins the next exchange about an RMB of ours, if there is one to begin.
    pub(super) fn begin_rkeys(&mut self, now: Instant) {
        if self.phase != Phase::Established || self.announcement.is_some() {
            return;
        }
        // All links may be about to be deleted.
        let Some(on) = self.link_of_use() else { return };
        let slots = self.slots_up();
        self.our_rmbs.complete(slots);
        // New RMBs go first, because connections wait for them.
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
        let up =
            |slot: usize| self.group_links[slot].is_some_and(|group_link| group_link.is_of_use());
        (0..self.group_links.len())
            .filter(|slot| up(*slot))
            .fold(0, |slots, slot| slots | 1 << slot)
    }

    /// The rkeys of an RMB of ours on all links but `on`. Links that are to be deleted are among
    /// them as long as the peer does not know that.
    fn elsewhere(&self, rmb: RmbIndex, on: LinkNumber) -> impl Iterator<Item = RkeyOnLink> {
        let row = self.our_rmbs.rows[usize::from(rmb.0)];
        self.group_links.iter().enumerate().filter_map(move |(slot, group_link)| {
            let group_link = group_link.as_ref().filter(|group_link| group_link.number != on)?;
            let token = row.at(slot).filter(|_| group_link.link.is_up())?;
            Some(RkeyOnLink { link: group_link.number, rkey: token.rkey, address: token.address })
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
        self.announcement = Some(Announcement { rmb, on, since: now, kind });
        let Token { rkey, address } = token;
        let (reply, negative, retry, other_links) = (false, false, false, count);
        // RFC 7609 2.1 #3: one RToken per RMB and link
        // RFC 7609 2.2 #4: same RMBs on all links
        // RFC 7609 3.5.5.2 #1: register RMBs on all links
        // RFC 7609 3.5.5.2.1 #1: CONFIRM RKEY tells all RTokens
        // RFC 7609 3.5.5.2.1 #2: pair RTokens with link numbers
        let request = ConfirmRkey { reply, negative, retry, other_links, rkey, address, others };
        self.send(on, Llc::ConfirmRkey(request));
    }

    /// The rkeys on further links.
    fn continue_announcement(
        &mut self,
        now: Instant,
        (rmb, on): (RmbIndex, LinkNumber),
        (slots, left): (u8, u8),
    ) {
        let mut others = [RkeyOnLink::default(); 3];
        let untold = |key: &RkeyOnLink| slots & self.slots_of(&[*key]) == 0;
        // A link that was deleted meanwhile leaves an empty entry: the peer knows the count.
        for (place, other) in others.iter_mut().zip(self.elsewhere(rmb, on).filter(untold)) {
            *place = other;
        }
        let slots = slots | self.slots_of(&others);
        let kind = Kind::Confirm { slots, left: left.saturating_sub(RKEYS_PER_CONTINUATION) };
        self.announcement = Some(Announcement { rmb, on, since: now, kind });
        // RFC 7609 A.3.5 #7: further RTokens in CONFIRM RKEY CONTINUATION
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
        self.announcement = Some(Announcement { rmb, on, since: now, kind: Kind::Delete });
        // RFC 7609 3.5.5.2.2 #5: find RMB by RKey of one link
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
            // RFC 7609 A.3.5 #9: begin again after a retry flag
            // RFC 7609 A.3.5 #10: without retry flag, await next occasion
            self.confirm_rkey_answered(now, on, message.negative, message.retry);
            return;
        }
        if self.refuses_rkeys() {
            // RFC 7609 3.5.5.3 #8: no RKey exchange beside link changes
            // RFC 7609 3.5.5.3.1 #6: refuse CONFIRM RKEY during ADD LINK
            // RFC 7609 3.5.5.3.2 #5: refuse CONFIRM RKEY during DELETE LINK
            let reply = ConfirmRkey { reply: true, negative: true, retry: true, ..*message };
            self.send(on, Llc::ConfirmRkey(reply));
            return;
        }
        let slot = self.slot(on).expect(ARRIVED);
        let others = usize::from(message.other_links).min(message.others.len());
        let others = &message.others[..others];
        let token = Token { rkey: message.rkey, address: message.address };
        let mut names = [Some((slot, token)), None, None];
        for (name, other) in names[1..].iter_mut().zip(others) {
            let token = Token { rkey: other.rkey, address: other.address };
            *name = self.slot(other.link).map(|slot| (slot, token));
        }
        let learnt = self.peer_rmbs.row_of(names.into_iter().flatten());
        if let Ok(row) = learnt {
            self.peer_rmbs.set(row, slot, token);
            self.learn_elsewhere(row, others);
        }
        let full = learnt.is_err();
        // RFC 7609 A.3.5 #8: CONFIRM RKEY reply repeats the request
        let reply = ConfirmRkey { reply: true, negative: full, retry: full, ..*message };
        self.send(on, Llc::ConfirmRkey(reply));
        // There is no room for the RMB, as the reply says: nothing is to be continued.
        let Ok(row) = learnt else { return };
        let left = message.other_links.saturating_sub(RKEYS_PER_REQUEST);
        self.rkeys_learnt(now, Continuing { on, row, left, since: now });
    }

    /// Waits for further rkeys of an RMB, or checks it when all have come.
    fn rkeys_learnt(&mut self, now: Instant, continuing: Continuing) {
        self.continuing = Some(continuing).filter(|continuing| continuing.left > 0);
        if self.continuing.is_none() {
            self.check_row(now, continuing.row);
            self.advance(now);
        }
    }

    /// Whether either side has told a part of an RMB's rkeys. Links do not change meanwhile.
    pub(super) fn rkeys_are_under_way(&self) -> bool {
        self.announcement.is_some() || self.continuing.is_some()
    }

    /// Server: whether CONFIRM RKEY is refused, because an exchange changes links. While
    /// connections leave a link, that exchange has sent nothing yet, so rkeys are accepted: a new
    /// connection may need them.
    ///
    /// In version 2 they are also accepted while a link is deleted. A Linux client may take half a
    /// minute for that, and one whose CONFIRM RKEY is refused declines its connection.
    fn refuses_rkeys(&self) -> bool {
        let harmless = |exchange: Exchange| exchange.vacates() || self.is_v2() && !exchange.adds();
        self.role == Role::Server && self.exchange.is_some_and(|exchange| !harmless(exchange))
    }

    fn learn_elsewhere(&mut self, row: usize, others: &[RkeyOnLink]) {
        for other in others {
            // An rkey for a link that we do not have is ignored.
            if let Some(slot) = self.slot(other.link) {
                let token = Token { rkey: other.rkey, address: other.address };
                self.peer_rmbs.set(row, slot, token);
            }
        }
    }

    /// Gives up links for which the peer told no rkey: no connection could move there.
    fn check_row(&mut self, now: Instant, row: usize) {
        let without = |slot: usize| self.peer_rmbs.rows[row].at(slot).is_none();
        let mut missing = [None; LINKS_PER_GROUP_MAX as usize];
        for (slot, group_link) in self.group_links.iter().enumerate() {
            missing[slot] = group_link
                .filter(|group_link| group_link.is_of_use() && without(slot))
                .map(|group_link| group_link.number);
        }
        for number in missing.into_iter().flatten() {
            // RFC 7609 C.7.1 #31: missing RKey fails its link
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
            self.confirm_rkey_answered(now, on, message.negative, true);
            return Ok(());
        }
        let Some(continuing) = self.continuing.filter(|continuing| continuing.on == on) else {
            self.dropped += 1;
            return Ok(());
        };
        let Continuing { row, left, .. } = continuing;
        // RFC 7609 A.3.6 #2: byte 4 counts RTokens left
        // RFC 7609 C.7.1 #35: any other LLC error fails link
        if message.remaining != left {
            return Err(PeerMisbehaved::UnexpectedMessage);
        }
        let brought = left.min(RKEYS_PER_CONTINUATION);
        self.learn_elsewhere(row, &message.others[..usize::from(brought)]);
        // RFC 7609 A.3.6 #4: continuation reply repeats the request
        let reply = ConfirmRkeyContinuation { reply: true, ..*message };
        self.send(on, Llc::ConfirmRkeyContinuation(reply));
        self.rkeys_learnt(now, Continuing { left: left - brought, since: now, ..continuing });
        Ok(())
    }

    /// The peer answers CONFIRM RKEY or a continuation of it.
    fn confirm_rkey_answered(&mut self, now: Instant, on: LinkNumber, negative: bool, retry: bool) {
        let ours = self.announcement.filter(|announcement| announcement.on == on);
        match ours.map(|announcement| (announcement.rmb, announcement.kind)) {
            Some((rmb, Kind::Confirm { .. })) if negative => self.rmb_refused(now, rmb, retry),
            Some((rmb, Kind::Confirm { slots, left })) if left > 0 => {
                self.continue_announcement(now, (rmb, on), (slots, left));
            }
            Some((rmb, Kind::Confirm { slots, .. })) => self.rkeys_answered(now, rmb, slots),
            Some((_, Kind::Delete)) | None => self.dropped += 1,
        }
    }

    /// The peer has taken in the last message of an announcement.
    fn rkeys_answered(&mut self, now: Instant, rmb: RmbIndex, slots: u8) {
        self.announcement = None;
        self.retries = 0;
        let index = usize::from(rmb.0);
        self.our_rmbs.told[index] |= slots & self.our_rmbs.rows[index].present;
        let standing = &mut self.our_rmbs.standings[index];
        let is_news = *standing == Standing::Unannounced;
        match standing {
            Standing::Absent | Standing::Unwanted => {}
            Standing::Unannounced | Standing::Known | Standing::Incomplete => {
                *standing = Standing::Known;
            }
        }
        // RFC 7609 3.5.5.2.1 #3: no use before RTokens are known
        // RFC 7609 3.5.5.2.1 #5: CLC waits for RMB on demand
        if is_news {
            self.actions.push(Action::RmbConfirmed(rmb));
        }
        self.advance(now);
    }

    /// The peer cannot take an RMB: for now, or at all.
    fn rmb_refused(&mut self, now: Instant, rmb: RmbIndex, retry: bool) {
        self.announcement = None;
        let standing = &mut self.our_rmbs.standings[usize::from(rmb.0)];
        let refused = !retry || self.retries >= RETRIES_MAX;
        if refused && *standing == Standing::Unannounced {
            self.retries = 0;
            *standing = Standing::Absent;
            self.actions.push(Action::RmbRefused(rmb));
        } else {
            // The peer refuses because of an exchange, which ends soon. An RMB that connections use
            // must be known on every link to which they may have to move.
            // RFC 7609 3.5.5.3.1 #7: repeat CONFIRM RKEY after ADD LINK
            // RFC 7609 3.5.5.3.2 #6: repeat CONFIRM RKEY after DELETE LINK
            // RFC 7609 3.5.5.3.3 #3: server's ADD LINK interrupts CONFIRM RKEY
            // RFC 7609 3.5.5.3.3 #5: server's DELETE LINK interrupts CONFIRM RKEY
            // RFC 7609 A.3.5 #9: begin again after a retry flag
            self.again_at = Some(now + AGAIN_AFTER * (1 << self.retries.min(RETRIES_MAX)));
            self.retries += 1;
        }
        self.advance(now);
    }

    /// An exchange has ended: what the peer refused because of it is announced again at once.
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
        let slot = self.slot(on).expect(ARRIVED);
        let (mut error_mask, mut known) = (0, false);
        // RFC 7609 3.5.5.2.2 #4: delete several RMBs at once
        for (index, rkey) in message.rkeys.iter().take(usize::from(message.count)).enumerate() {
            if self.peer_rmbs.forget(slot, *rkey) {
                known = true;
            } else {
                // RFC 7609 A.3.7 #4: mark RKeys that were not deleted
                // RFC 7609 C.7.1 #32: refuse to delete unknown RKey
                error_mask |= 0x80 >> index;
            }
        }
        if known {
            self.actions.push(Action::RkeysDeleted(on));
        }
        let negative = error_mask != 0;
        // RFC 7609 A.3.7 #6: DELETE RKEY reply repeats the list
        let reply = DeleteRkey { reply: true, negative, error_mask, ..*message };
        self.send(on, Llc::DeleteRkey(reply));
    }

    fn withdrawn(&mut self, now: Instant) {
        if let Some(Announcement { rmb, .. }) = self.announcement.take() {
            // RFC 7609 3.5.5.2.2 #3: free RMB after DELETE RKEY reply
            // RFC 7609 A.3.7 #7: log a negative DELETE RKEY reply
            self.rmb_deleted(rmb);
            self.advance(now);
        }
    }

    /// The RMBs of ours whose rkeys on a new link the peer is to be told: those that it knows on
    /// the link in `slot`, except one that is being deleted.
    pub(super) fn rmbs_to_tell(&self, slot: usize) -> RmbSet {
        let mut told = self.our_rmbs.told_on(slot);
        if let Some(Announcement { rmb, kind: Kind::Delete, .. }) = self.announcement {
            told.remove(usize::from(rmb.0));
        }
        told
    }

    /// The link in this place is gone: the peer knows no rkey for the next link there.
    pub(super) fn place_lost(&mut self, slot: usize) {
        if let Some(Announcement { kind: Kind::Confirm { slots, .. }, .. }) = &mut self.announcement
        {
            *slots &= !(1 << slot);
        }
    }

    /// A link is gone: exchanges of rkeys that it carried begin anew on another one.
    // RFC 7609 2.3 #11: restart LLC exchanges, do not replay
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

/// How long to wait at first before announcing again an RMB that the peer refused because of
/// another exchange.
const AGAIN_AFTER: Duration = Duration::from_millis(50);
