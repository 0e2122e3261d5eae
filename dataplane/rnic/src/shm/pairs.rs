//! The queue pairs of a fabric, and the lists of those that a turn looks at.

use std::collections::BTreeMap;
use std::time::Duration;

use smcr_proto::{Instant, Qpn};

use super::nap;
use super::pair::Pair;
use super::rnic::Qp;
use crate::QpId;

/// Queue pairs by slot. A [`QpId`] combines a slot with the number of its earlier uses.
///
/// A turn looks at two lists only, so thousands of queue pairs that rest cost nothing.
///
/// - **Watched** are those whose peer has said something in the last moment, or was told something:
///   we look at their rings in every turn, so the peer need not wake us. Those that are quiet for a
///   while are told that we sleep, as far as they are concerned, and from then on their peer rings
///   the bell.
/// - **Busy** are those that have something to do by themselves. They are watched, too, if they are
///   connected and not broken.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// From the number of a queue pair to its slot.
    by_number: BTreeMap<u32, usize>,
    watched: Vec<usize>,
    busy: Vec<usize>,
    /// Selects the watched queue pair that the next turn serves first.
    turn: usize,
}

#[derive(Debug)]
struct Slot {
    uses: u32,
    pair: Option<Box<Pair>>,
    /// It is in the list of the same name.
    is_watched: bool,
    is_busy: bool,
    /// When something has last come or gone, or was to do.
    active_at: Instant,
}

impl Slot {
    fn pair(&self) -> &Pair {
        self.pair.as_deref().expect("slots in a list are in use")
    }

    /// Nothing has come or gone for a while, and nothing is to do.
    fn is_quiet(&self, now: Instant) -> bool {
        !self.is_busy && now.since(self.active_at) >= QUIET
    }
}

impl Pairs {
    pub(super) fn adopt(&mut self, qp: Qp) -> QpId {
        let at = self.free.pop().unwrap_or_else(|| {
            let (pair, active_at) = (None, Instant(0));
            self.slots.push(Slot { uses: 0, pair, is_watched: false, is_busy: false, active_at });
            self.slots.len() - 1
        });
        let number = u32::try_from(at).ok().filter(|number| *number < SLOTS_MAX);
        let number = number.expect("no poller has so many queue pairs");
        let slot = &mut self.slots[at];
        let id = QpId(slot.uses * SLOTS_MAX + number);
        self.by_number.insert(qp.ticket.qpn.0, at);
        slot.pair = Some(Box::new(Pair::adopt(id, qp)));
        id
    }

    /// Takes a queue pair away.
    pub(super) fn remove(&mut self, id: QpId) -> Box<Pair> {
        let at = Self::at(id);
        assert!(self.get(id).is_some(), "a queue pair is released once");
        let slot = &mut self.slots[at];
        let pair = slot.pair.take().expect("asserted above");
        if std::mem::take(&mut slot.is_watched) {
            self.watched.retain(|other| *other != at);
        }
        if std::mem::take(&mut slot.is_busy) {
            self.busy.retain(|other| *other != at);
        }
        self.by_number.remove(&pair.number().0);
        // An id is never reused. A slot that has used up its ids stays empty.
        slot.uses += 1;
        if slot.uses < u32::MAX / SLOTS_MAX {
            self.free.push(at);
        }
        pair
    }

    fn at(id: QpId) -> usize {
        (id.0 % SLOTS_MAX) as usize
    }

    /// The queue pair `id`, if it was not removed.
    pub(super) fn get(&self, id: QpId) -> Option<&Pair> {
        let pair = self.slots.get(Self::at(id))?.pair.as_deref();
        pair.filter(|pair| pair.id() == id)
    }

    /// The same, to be changed.
    pub(super) fn of(&mut self, id: QpId) -> Option<&mut Pair> {
        let pair = self.slots.get_mut(Self::at(id))?.pair.as_deref_mut();
        pair.filter(|pair| pair.id() == id)
    }

    /// The queue pair with this number.
    pub(super) fn numbered(&self, number: Qpn) -> Option<QpId> {
        self.by_number.get(&number.0).map(|at| self.slots[*at].pair().id())
    }

    /// Everybody's.
    pub(super) fn ids(&self) -> Vec<QpId> {
        self.slots.iter().filter_map(|slot| slot.pair.as_deref().map(Pair::id)).collect()
    }

    #[cfg(test)]
    pub(super) fn watched(&self) -> usize {
        self.watched.len()
    }

    /// Watches a queue pair from now on, if that is of use, and if it has something to do, it is
    /// among the busy ones. To be called whenever something is new.
    pub(super) fn attend(&mut self, id: QpId) {
        self.attend_at(Self::at(id));
    }

    fn attend_at(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        let pair = slot.pair.as_deref().expect("the caller has seen it");
        if pair.is_busy() && !std::mem::replace(&mut slot.is_busy, true) {
            self.busy.push(at);
        }
        if pair.can_be_watched() && !std::mem::replace(&mut slot.is_watched, true) {
            pair.awake();
            self.watched.push(at);
        }
    }

    /// We are awake: those that are watched need not wake us.
    pub(super) fn awake(&self) {
        self.watched.iter().for_each(|at| self.slots[*at].pair().awake());
    }

    /// Calls `look` with each queue pair that is busy or has news. Each is the first in turn, so
    /// that those before it cannot use up for ever what all share.
    pub(super) fn look(&mut self, now: Instant, mut look: impl FnMut(&mut Pair)) {
        self.turn = self.turn.wrapping_add(1);
        let (count, mut some_go) = (self.watched.len(), false);
        for step in 0..count {
            let at = self.watched[self.turn.wrapping_add(step) % count];
            let slot = &mut self.slots[at];
            let pair = slot.pair.as_deref_mut().expect("slots in a list are in use");
            if slot.is_busy || pair.has_news() {
                look(pair);
                slot.active_at = now;
                some_go |= !pair.can_be_watched();
                self.attend_at(at);
            } else {
                some_go |= slot.is_quiet(now);
            }
        }
        for at in &self.busy {
            let slot = &mut self.slots[*at];
            if !slot.is_watched {
                look(slot.pair.as_deref_mut().expect("slots in a list are in use"));
            }
        }
        if some_go {
            let leaves = |slot: &&Slot| slot.is_quiet(now);
            self.watched.iter().map(|at| &self.slots[*at]).filter(leaves).for_each(|slot| {
                slot.pair().announce_sleep();
            });
            nap::before_last_look();
            self.let_go(now);
        }
        self.rest();
    }

    /// Watches those no more that are quiet, and have been told so, or that are broken.
    fn let_go(&mut self, now: Instant) {
        let slots = &mut self.slots;
        self.watched.retain(|at| {
            let slot = &mut slots[*at];
            let is_quiet = slot.is_quiet(now);
            let has_news = is_quiet && slot.pair().has_news();
            if has_news {
                slot.pair().awake();
            }
            slot.is_watched = slot.pair().can_be_watched() && (!is_quiet || has_news);
            slot.is_watched
        });
    }

    /// Calls `act` with each queue pair that is busy.
    pub(super) fn work_off(&mut self, now: Instant, mut act: impl FnMut(&mut Pair)) {
        for at in &self.busy {
            let slot = &mut self.slots[*at];
            act(slot.pair.as_deref_mut().expect("slots in a list are in use"));
            slot.active_at = now;
        }
        self.rest();
    }

    /// Removes those from the busy ones that have nothing to do any more.
    fn rest(&mut self) {
        let slots = &mut self.slots;
        self.busy.retain(|at| {
            let slot = &mut slots[*at];
            slot.is_busy = slot.pair().is_busy();
            slot.is_busy
        });
    }

    /// Tells all that are watched that we are about to sleep. Returns until when at most, or `now`
    /// if there is something to do at once.
    pub(super) fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        self.watched.iter().for_each(|at| self.slots[*at].pair().announce_sleep());
        nap::before_last_look();
        let slot = |at: &usize| &self.slots[*at];
        let has_news = self.watched.iter().map(slot).any(|slot| slot.pair().has_news());
        let has_work = self.busy.iter().map(slot).any(|slot| slot.pair().has_work());
        if has_news || has_work {
            return Some(now);
        }
        let deadline = self.busy.iter().map(slot).filter_map(|slot| slot.pair().deadline()).min();
        // They know it, and nothing has come meanwhile.
        let slots = &mut self.slots;
        self.watched.retain(|at| {
            let slot = &mut slots[*at];
            slot.is_watched = !slot.is_quiet(now);
            slot.is_watched
        });
        deadline
    }
}

/// For so long a queue pair is watched after something has come or gone: as long as it takes until
/// that has cost about as much as a bell.
const QUIET: Duration = Duration::from_millis(1);
/// More than there are links that a poller can have.
const SLOTS_MAX: u32 = 1 << 16;
