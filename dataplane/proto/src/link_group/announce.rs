//! CONFIRM RKEY and DELETE RKEY, ours and the peer's (RFC 3.5.5.2, A.3.5 to A.3.7).

use core::time::Duration;

use super::members::PLACES;
use super::rkeys::{Full, Keys, OwnRmb, Plan, RmbIndex};
use super::{Action, LinkGroup, Phase};
use crate::limits::RKEY_REPLY_WAIT;
use crate::link::{Cause, Event};
use crate::time::Instant;
use crate::vocabulary::{LinkNumber, Rkey};
use crate::wire::llc::rkeys::RKEYS_MAX;
use crate::wire::llc::{ConfirmRkey, ConfirmRkeyContinuation, DeleteRkey, Llc, RkeyOnLink};

/// How long a CONFIRM RKEY that was put off rests: the peer's exchange is over soon, and nobody
/// tells us when.
pub(super) const RKEY_RETRY_WAIT: Duration = Duration::from_millis(100);

/// How often a peer may put off one RMB before the caller hears that it will not take it.
pub(super) const RKEY_REFUSALS_MAX: u8 = 20;

/// Our exchange about RMBs, of which there is at most one.
#[derive(Clone, Copy, Debug)]
pub(super) enum RkeyExchange {
    /// CONFIRM RKEY, or a continuation, is out.
    Announcing {
        rmb: RmbIndex,
        carrier: LinkNumber,
        /// The key on the carrier.
        rkey: Rkey,
        /// The places of the other links whose keys were or will be sent, as a mask.
        others: u16,
        /// Those that still will be.
        unsent: u16,
        /// What is out is a continuation.
        continued: bool,
        deadline: Instant,
    },
    /// DELETE RKEY is out.
    Withdrawing { rmbs: [Option<RmbIndex>; RKEYS_MAX], carrier: LinkNumber, deadline: Instant },
}

impl RkeyExchange {
    fn rests_on(&self) -> (LinkNumber, Instant) {
        match *self {
            Self::Announcing { carrier, deadline, .. }
            | Self::Withdrawing { carrier, deadline, .. } => (carrier, deadline),
        }
    }
}

/// A CONFIRM RKEY of the peer that is not complete.
#[derive(Clone, Copy, Debug)]
pub(super) struct Incoming {
    on: LinkNumber,
    rkey: Rkey,
    row: usize,
    owed: u8,
}

impl LinkGroup {
    /// One of our RMBs, known to the peer on these links by Accept or Confirm: no exchange.
    ///
    /// # Panics
    ///
    /// If the index is not below [`OWN_RMBS_MAX`](crate::limits::OWN_RMBS_MAX).
    pub fn own_rmb(&mut self, rmb: RmbIndex, keys: &[(LinkNumber, Rkey, u64)]) {
        let mut row = self.own_row(keys, Plan::Keep);
        row.told = row.keys.known();
        self.own_rmbs.insert(rmb, row);
    }

    /// Tells the peer of one more RMB of ours by CONFIRM RKEY. The first link is the one that the
    /// first connection uses. The answer is [`Action::RmbConfirmed`] or [`Action::RmbRefused`];
    /// until then no connection may use the RMB.
    ///
    /// # Panics
    ///
    /// If the index is not below [`OWN_RMBS_MAX`](crate::limits::OWN_RMBS_MAX).
    pub fn announce_rmb(&mut self, now: Instant, rmb: RmbIndex, keys: &[(LinkNumber, Rkey, u64)]) {
        if self.phase == Phase::Terminated {
            return;
        }
        let told = self.own_rmbs.find(rmb).map_or(0, |row| row.told);
        let row = self.own_row(keys, Plan::Announce { not_before: now, refusals: 0 });
        self.own_rmbs.insert(rmb, OwnRmb { told: told & row.keys.known(), ..row });
        self.proceed(now);
    }

    /// Tells the peer by DELETE RKEY that an RMB of ours goes. No connection may use it any more;
    /// its memory stays until [`Action::RmbDeleted`], or the end of the group.
    // RFC 7609 3.5.5.2.2-1, 3.5.5.2.2-3, A.3.7-8
    pub fn withdraw_rmb(&mut self, now: Instant, rmb: RmbIndex) {
        if self.phase == Phase::Terminated {
            return;
        }
        if let Some(row) = self.own_rmbs.find_mut(rmb) {
            row.plan = Plan::Withdraw;
        }
        self.proceed(now);
    }

    fn own_row(&self, keys: &[(LinkNumber, Rkey, u64)], plan: Plan) -> OwnRmb {
        let mut row = OwnRmb { keys: Keys::NONE, told: 0, via: 0, plan };
        for (link, rkey, address) in keys.iter().rev() {
            if let Some(place) = self.place(*link) {
                row.keys.set(place, *rkey, *address);
                row.via = place;
            }
        }
        row
    }

    /// Remembers an RMB that the peer told by Accept or Confirm rather than by CONFIRM RKEY.
    ///
    /// # Errors
    ///
    /// [`Full`] if no more can be remembered: decline the connection.
    pub fn learn_rkey(&mut self, on: LinkNumber, rkey: Rkey, address: u64) -> Result<(), Full> {
        let Some(place) = self.place(on) else { return Ok(()) };
        self.peer_rmbs.learn(place, rkey, address).map(|_| ())
    }

    /// What the peer's RMB with this key on one link is called on another, and where it begins
    /// there. Links that are down are remembered until their place is needed.
    pub fn peer_rmb(&self, on: LinkNumber, rkey: Rkey, to: LinkNumber) -> Option<(Rkey, u64)> {
        self.peer_rmbs.translate(self.place(on)?, rkey, self.place(to)?)
    }

    fn number_at(&self, place: usize) -> Option<LinkNumber> {
        self.members[place].map(|member| member.number)
    }

    /// Begins one exchange about our RMBs. Returns whether anything was done.
    pub(super) fn begin_rkeys(&mut self, now: Instant) -> bool {
        let staying = self.places_staying();
        let due = |row: &OwnRmb| match row.plan {
            Plan::Announce { not_before, .. } => not_before <= now,
            // RFC 7609 3.5.5.3.1-7, 3.5.5.3.2-6, 2.3-11
            Plan::Keep => row.told != 0 && staying & row.keys.known() & !row.told != 0,
            Plan::Withdraw => false,
        };
        let announced = self.own_rmbs.iter().find(|(_, row)| due(row)).map(|(rmb, _)| rmb);
        if let Some(rmb) = announced {
            self.begin_announce(now, rmb);
            return true;
        }
        let withdrawn = self.own_rmbs.iter().find(|(_, row)| row.plan == Plan::Withdraw);
        let Some((rmb, row)) = withdrawn.map(|(rmb, row)| (rmb, *row)) else { return false };
        self.begin_withdraw(now, rmb, row.told);
        true
    }

    // RFC 7609 3.5.5.2.1-1, 3.5.5.2-1, A.3.5-11
    fn begin_announce(&mut self, now: Instant, rmb: RmbIndex) {
        let up = self.places_up();
        let Some(row) = self.own_rmbs.find(rmb).copied() else { return };
        let usable = row.keys.known() & up;
        let via = usable & 1 << row.via;
        let first = if via != 0 { via } else { usable };
        let place = first.trailing_zeros() as usize;
        let named = (usable != 0).then(|| self.number_at(place)).flatten();
        let (Some(carrier), Some((rkey, address))) = (named, row.keys.on(place.min(PLACES - 1)))
        else {
            self.refuse_rmb(rmb, row.plan);
            return;
        };
        let others = usable & !(1 << place);
        let (sent, unsent) = self.others(&row.keys, others);
        let count = u8::try_from(others.count_ones()).expect("at most eight other links");
        let deadline = now + RKEY_REPLY_WAIT;
        let continued = false;
        self.rkey_exchange = Some(RkeyExchange::Announcing {
            rmb,
            carrier,
            rkey,
            others,
            unsent,
            continued,
            deadline,
        });
        // RFC 7609 3.5.5.2.1-2
        let request = ConfirmRkey {
            reply: false,
            negative: false,
            retry: false,
            other_links: count,
            rkey,
            address,
            others: sent,
        };
        self.send(carrier, Llc::ConfirmRkey(request));
    }

    /// The keys on the first `N` of these places, and the places that are left.
    fn others<const N: usize>(&self, keys: &Keys, places: u16) -> ([RkeyOnLink; N], u16) {
        let mut left = places;
        let chunk = core::array::from_fn(|_| {
            if left == 0 {
                return RkeyOnLink::default();
            }
            let place = left.trailing_zeros() as usize;
            left &= left - 1;
            let (rkey, address) = keys.on(place).unwrap_or_default();
            RkeyOnLink { link: self.number_at(place).unwrap_or_default(), rkey, address }
        });
        (chunk, left)
    }

    /// The peer does not take an RMB; one that it knows elsewhere is kept.
    fn refuse_rmb(&mut self, rmb: RmbIndex, plan: Plan) {
        if let Some(row) = self.own_rmbs.find_mut(rmb) {
            row.plan = Plan::Keep;
            if row.told == 0 {
                self.own_rmbs.remove(rmb);
            } else {
                // What the peer refused on one link it need not be asked again.
                row.keys = row.keys.only(row.told);
            }
        }
        if let Plan::Announce { .. } = plan {
            self.actions.push(Action::RmbRefused(rmb));
        }
    }

    pub(super) fn handle_confirm_reply(
        &mut self,
        now: Instant,
        on: LinkNumber,
        reply: &ConfirmRkey,
    ) {
        let Some(RkeyExchange::Announcing {
            rmb,
            carrier,
            rkey,
            others,
            unsent,
            continued: false,
            ..
        }) = self.rkey_exchange
        else {
            self.dropped += 1;
            return;
        };
        if (carrier, rkey) != (on, reply.rkey) {
            self.dropped += 1;
        } else if reply.negative {
            self.put_off(now, rmb, reply.retry);
        } else {
            self.announce_rest(now, rmb, others, unsent);
        }
    }

    pub(super) fn handle_continuation_reply(
        &mut self,
        now: Instant,
        on: LinkNumber,
        reply: &ConfirmRkeyContinuation,
    ) {
        match self.rkey_exchange {
            Some(RkeyExchange::Announcing {
                rmb,
                carrier,
                others,
                unsent,
                continued: true,
                ..
            }) if carrier == on => {
                if reply.negative {
                    self.put_off(now, rmb, true);
                } else {
                    self.announce_rest(now, rmb, others, unsent);
                }
            }
            Some(_) | None => self.dropped += 1,
        }
    }

    /// Sends what did not fit, or notes that the peer knows it all.
    // RFC 7609 A.3.5-7, A.3.6-2, A.3.6-3
    fn announce_rest(&mut self, now: Instant, rmb: RmbIndex, places: u16, left: u16) {
        let Some(row) = self.own_rmbs.find(rmb).copied() else {
            self.rkey_exchange = None;
            return;
        };
        if left != 0
            && let Some(RkeyExchange::Announcing { carrier, rkey, .. }) = self.rkey_exchange
        {
            let remaining = u8::try_from(left.count_ones()).expect("at most eight other links");
            let (others, unsent) = self.others(&row.keys, left);
            let deadline = now + RKEY_REPLY_WAIT;
            self.rkey_exchange = Some(RkeyExchange::Announcing {
                rmb,
                carrier,
                rkey,
                others: places,
                unsent,
                continued: true,
                deadline,
            });
            let negative = false;
            let request = ConfirmRkeyContinuation { reply: false, negative, remaining, others };
            self.send(carrier, Llc::ConfirmRkeyContinuation(request));
            return;
        }
        self.announced(rmb, places);
    }

    fn announced(&mut self, rmb: RmbIndex, places: u16) {
        let carrier = self.rkey_exchange.take().map(|exchange| exchange.rests_on().0);
        let via = carrier.and_then(|carrier| self.place(carrier)).map_or(0, |place| 1 << place);
        let staying = self.places_staying();
        let Some(row) = self.own_rmbs.find_mut(rmb) else { return };
        row.told |= (places | via) & row.keys.known();
        let complete = staying & row.keys.known() & !row.told == 0;
        // RFC 7609 3.5.5.2.1-3
        if matches!(row.plan, Plan::Announce { .. }) && complete {
            row.plan = Plan::Keep;
            self.actions.push(Action::RmbConfirmed(rmb));
        }
    }

    /// The peer said no. Nothing of the exchange counts: it begins anew.
    fn put_off(&mut self, now: Instant, rmb: RmbIndex, retry: bool) {
        self.rkey_exchange = None;
        let Some(row) = self.own_rmbs.find_mut(rmb) else { return };
        let plan = row.plan;
        let refusals = match plan {
            Plan::Announce { refusals, .. } => refusals,
            Plan::Keep => 0,
            Plan::Withdraw => return,
        };
        if retry && refusals < RKEY_REFUSALS_MAX {
            // RFC 7609 3.5.5.3.3-3, 3.5.5.3.3-5, A.3.5-9
            let not_before = now + RKEY_RETRY_WAIT;
            row.plan = Plan::Announce { not_before, refusals: refusals + 1 };
        } else {
            // RFC 7609 A.3.5-10
            self.refuse_rmb(rmb, plan);
        }
    }

    /// Sends DELETE RKEY for this RMB and others that may go with it.
    // RFC 7609 3.5.5.2.2-4, 3.5.5.2.2-5
    fn begin_withdraw(&mut self, now: Instant, first: RmbIndex, told: u16) {
        let usable = told & self.places_up();
        let place = usable.trailing_zeros() as usize;
        let carrier = (usable != 0).then(|| self.number_at(place)).flatten();
        let Some(carrier) = carrier else {
            // The peer knows it on no link that is left.
            self.own_rmbs.remove(first);
            self.actions.push(Action::RmbDeleted(first));
            return;
        };
        let mut rmbs = [None; RKEYS_MAX];
        let mut rkeys = [Rkey(0); RKEYS_MAX];
        let mut count = 0;
        let leaving = self
            .own_rmbs
            .iter()
            .filter(|(_, row)| row.plan == Plan::Withdraw && row.told & 1 << place != 0);
        for ((rmb, row), slot) in leaving.zip(0..RKEYS_MAX) {
            if let Some((rkey, _)) = row.keys.on(place) {
                (rmbs[slot], rkeys[slot]) = (Some(rmb), rkey);
                count += 1;
            }
        }
        let deadline = now + RKEY_REPLY_WAIT;
        self.rkey_exchange = Some(RkeyExchange::Withdrawing { rmbs, carrier, deadline });
        let request = DeleteRkey { reply: false, negative: false, count, error_mask: 0, rkeys };
        self.send(carrier, Llc::DeleteRkey(request));
    }

    /// The peer agreed. Keys that it did not know are as good as deleted.
    // RFC 7609 A.3.7-7
    pub(super) fn handle_delete_rkey_reply(&mut self, on: LinkNumber, reply: &DeleteRkey) {
        match self.rkey_exchange {
            Some(RkeyExchange::Withdrawing { rmbs, carrier, .. }) if carrier == on => {
                self.rkey_exchange = None;
                self.keys_unknown += u64::from(reply.error_mask.count_ones());
                for rmb in rmbs.into_iter().flatten() {
                    self.own_rmbs.remove(rmb);
                    self.actions.push(Action::RmbDeleted(rmb));
                }
            }
            Some(_) | None => self.dropped += 1,
        }
    }

    /// When an exchange about RMBs must be looked after.
    pub(super) fn rkeys_timeout(&self) -> Option<Instant> {
        let exchange = self.rkey_exchange.map(|exchange| exchange.rests_on().1);
        let may_begin =
            self.phase == Phase::Established && self.rkey_exchange.is_none() && !self.is_changing();
        let resting = self.own_rmbs.iter().filter_map(|(_, row)| match row.plan {
            Plan::Announce { not_before, .. } if may_begin => Some(not_before),
            Plan::Announce { .. } | Plan::Keep | Plan::Withdraw => None,
        });
        resting.chain(exchange).min()
    }

    /// The peer did not answer: the link is broken, and the exchange begins anew on another.
    // RFC 7609 C.7.1-22
    pub(super) fn rkeys_expired(&mut self, now: Instant) {
        let Some((carrier, deadline)) = self.rkey_exchange.map(|exchange| exchange.rests_on())
        else {
            return;
        };
        if deadline <= now {
            self.rkey_exchange = None;
            self.link_event(now, carrier, Event::Fail(Cause::NoAnswer));
        }
    }

    /// A link is down: what it carried begins anew.
    // RFC 7609 2.3-11
    pub(super) fn undo_rkeys_on(&mut self, number: LinkNumber) {
        if self.rkey_exchange.is_some_and(|exchange| exchange.rests_on().0 == number) {
            self.rkey_exchange = None;
        }
        if let Some(incoming) = self.incoming.filter(|incoming| incoming.on == number) {
            self.forget_incoming(incoming);
        }
    }

    fn forget_incoming(&mut self, incoming: Incoming) {
        self.incoming = None;
        if let Some(place) = self.place(incoming.on) {
            self.peer_rmbs.forget(place, incoming.rkey);
        }
    }

    pub(super) fn handle_confirm_rkey(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &ConfirmRkey,
    ) {
        if message.reply {
            self.handle_confirm_reply(now, on, message);
            return;
        }
        let learned = match self.place(on) {
            // RFC 7609 3.5.5.3.1-6, 3.5.5.3.2-5
            Some(place) if !self.is_changing() => {
                self.peer_rmbs.learn(place, message.rkey, message.address).ok()
            }
            Some(_) | None => None,
        };
        let negative = learned.is_none();
        // RFC 7609 A.3.5-8, 3.5.5.3-9
        let reply = ConfirmRkey { reply: true, negative, retry: negative, ..*message };
        self.send(on, Llc::ConfirmRkey(reply));
        let Some(row) = learned else { return };
        self.learn_others(row, &message.others, message.other_links);
        let owed = message.other_links.saturating_sub(2);
        self.incoming = Some(Incoming { on, rkey: message.rkey, row, owed });
        if owed == 0 {
            self.check_complete(now);
        }
    }

    pub(super) fn handle_confirm_rkey_continuation(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &ConfirmRkeyContinuation,
    ) {
        if message.reply {
            self.handle_continuation_reply(now, on, message);
            return;
        }
        let expected = self.incoming.filter(|it| it.on == on && it.owed == message.remaining);
        let Some(incoming) = expected else {
            self.dropped += 1;
            return;
        };
        if self.is_changing() {
            self.forget_incoming(incoming);
        } else {
            self.learn_others(incoming.row, &message.others, message.remaining);
            self.incoming =
                Some(Incoming { owed: message.remaining.saturating_sub(3), ..incoming });
        }
        let negative = self.incoming.is_none();
        // RFC 7609 A.3.6-4
        let reply = ConfirmRkeyContinuation { reply: true, negative, ..*message };
        self.send(on, Llc::ConfirmRkeyContinuation(reply));
        if self.incoming.is_some_and(|incoming| incoming.owed == 0) {
            self.check_complete(now);
        }
    }

    /// Keys for links that we do not have are of no use, and no offence.
    fn learn_others(&mut self, row: usize, others: &[RkeyOnLink], count: u8) {
        for other in others.iter().take(usize::from(count)) {
            if let Some(place) = self.place(other.link) {
                self.peer_rmbs.add(row, place, other.rkey, other.address);
            }
        }
    }

    /// A link on which the peer gave its RMB no name is of no use.
    // RFC 7609 C.7.1-31
    fn check_complete(&mut self, now: Instant) {
        let Some(incoming) = self.incoming.take() else { return };
        let missing = self.places_staying() & !self.peer_rmbs.known(incoming.row);
        for place in (0..PLACES).filter(|place| missing & 1 << place != 0) {
            if let Some(number) = self.number_at(place) {
                self.link_event(now, number, Event::Fail(Cause::PeerMisbehaved));
            }
        }
    }

    pub(super) fn handle_delete_rkey(&mut self, on: LinkNumber, message: &DeleteRkey) {
        if message.reply {
            self.handle_delete_rkey_reply(on, message);
            return;
        }
        let mut error_mask = 0;
        // RFC 7609 3.5.5.2.2-4
        for (index, rkey) in message.rkeys.iter().take(usize::from(message.count)).enumerate() {
            let known = self.place(on).is_some_and(|place| self.peer_rmbs.forget(place, *rkey));
            if known {
                self.actions.push(Action::RkeyDeleted(on, *rkey));
            } else {
                // RFC 7609 A.3.7-4, C.7.1-32
                error_mask |= 0x80 >> index;
            }
        }
        let negative = error_mask != 0;
        // RFC 7609 A.3.7-6, 3.5.5.3-9
        let reply = DeleteRkey { reply: true, negative, error_mask, ..*message };
        self.send(on, Llc::DeleteRkey(reply));
    }
}
