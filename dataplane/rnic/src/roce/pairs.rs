//! The queue pairs of a fabric, by slot and by number, and the list of those that are busy.

use std::net::SocketAddr;

use smcr_proto::Qpn;

use super::QUEUE_PAIRS_MAX;
use super::keys::Index;
use super::pair::{Pair, State};
use super::rnic::Qp;
use crate::{Completion, QpId};

/// Queue pairs by slot. A [`QpId`] combines a slot with the number of its earlier uses.
#[derive(Debug)]
pub(super) struct Pairs {
    pub(super) slots: Vec<Slot>,
    /// Slots whose queue pairs have something to do or a timer running, each once, in no order. A
    /// turn visits only these, so that a thousand idle queue pairs cost nothing.
    pub(super) busy: Vec<usize>,
    free: Vec<usize>,
    /// From queue pair number to slot.
    by_number: Index<usize>,
    /// What was last found there: the packets of a train are for one queue pair.
    found: Option<(Qpn, usize)>,
    /// Selects the busy queue pair that the next turn serves first.
    pub(super) turn: usize,
}

#[derive(Debug, Default)]
pub(super) struct Slot {
    uses: u32,
    pub(super) pair: Option<Box<Pair>>,
    /// The slot is in the list of busy ones.
    busy: bool,
}

impl Pairs {
    pub(super) fn new() -> Self {
        let max = QUEUE_PAIRS_MAX as usize;
        Self {
            slots: Vec::with_capacity(max),
            busy: Vec::with_capacity(max),
            free: Vec::with_capacity(max),
            by_number: Index::with_capacity_and_hasher(max, Default::default()),
            found: None,
            turn: 0,
        }
    }

    pub(super) fn adopt(&mut self, qp: Qp, local: SocketAddr) -> QpId {
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        assert!(at < QUEUE_PAIRS_MAX as usize, "there are as many slots as tickets");
        let slot = &mut self.slots[at];
        let number = u32::try_from(at).expect("asserted above");
        let id = QpId(slot.uses * QUEUE_PAIRS_MAX + number);
        self.by_number.insert(qp.ticket.qpn().0, at);
        slot.pair = Some(Box::new(Pair::new(id, qp, local)));
        id
    }

    /// Whether no queue pair is adopted.
    pub(super) fn is_empty(&self) -> bool {
        self.by_number.is_empty()
    }

    pub(super) fn at(id: QpId) -> usize {
        (id.0 % QUEUE_PAIRS_MAX) as usize
    }

    /// Whether `id` is adopted and not released.
    pub(super) fn is_adopted(&self, id: QpId) -> bool {
        let pair = self.slots[Self::at(id)].pair.as_ref();
        pair.is_some_and(|pair| pair.id == id && pair.state != State::Released)
    }

    pub(super) fn get(&self, id: QpId) -> &Pair {
        assert!(self.is_adopted(id), "{id:?} is adopted");
        self.slots[Self::at(id)].pair.as_ref().expect("asserted above")
    }

    /// The queue pair `id`, to be changed. This puts it among the busy ones.
    pub(super) fn of(&mut self, id: QpId) -> &mut Pair {
        assert!(self.is_adopted(id), "{id:?} is adopted");
        self.wake(Self::at(id)).expect("asserted above")
    }

    /// Puts a slot among the busy ones, and returns its queue pair, if there is one.
    pub(super) fn wake(&mut self, at: usize) -> Option<&mut Pair> {
        let slot = &mut self.slots[at];
        let pair = slot.pair.as_deref_mut()?;
        if !std::mem::replace(&mut slot.busy, true) {
            self.busy.push(at);
        }
        Some(pair)
    }

    /// Removes idle queue pairs from the busy ones.
    pub(super) fn rest(&mut self) {
        let slots = &mut self.slots;
        self.busy.retain(|at| {
            let slot = &mut slots[*at];
            let pair = slot.pair.as_mut().expect("busy slots are in use");
            slot.busy = !pair.rest();
            slot.busy
        });
    }

    /// The queue pair with that number, unless it was released or has another peer.
    pub(super) fn from(&mut self, number: Qpn, source: SocketAddr) -> Option<&mut Pair> {
        let at = match self.found {
            Some((same, at)) if same == number => at,
            _ => *self.by_number.get(&number.0)?,
        };
        self.found = Some((number, at));
        let pair = self.slots[at].pair.as_deref()?;
        if pair.target.ip() == source.ip() { self.wake(at) } else { None }
    }

    pub(super) fn release(&mut self, id: QpId) {
        let pair = self.of(id);
        pair.state = State::Released;
        let number = pair.ticket.qpn().0;
        self.by_number.remove(&number);
        self.found = None;
    }

    pub(super) fn has_completions(&self) -> bool {
        let mut busy = self.busy.iter().filter_map(|at| self.slots[*at].pair.as_ref());
        busy.any(|pair| pair.has_completions())
    }

    /// Appends completions to `out`, as many as fit, and forgets queue pairs that are gone.
    pub(super) fn complete(&mut self, out: &mut Vec<Completion>) {
        let mut index = 0;
        while let Some(&at) = self.busy.get(index) {
            let slot = &mut self.slots[at];
            let pair = slot.pair.as_mut().expect("busy slots are in use");
            if !pair.has_completions() || !pair.complete(out) {
                index += 1;
                continue;
            }
            slot.pair = None;
            slot.busy = false;
            slot.uses += 1;
            self.busy.swap_remove(index);
            // An id is never reused. A slot that has used up its ids stays empty.
            if slot.uses < u32::MAX / QUEUE_PAIRS_MAX {
                self.free.push(at);
            }
        }
    }
}
