//! On which core the thread of a poller runs, and with which priority.

use smcr_proto::Instant;
use smcr_rnic::Fabric;

use super::Poller;
use crate::affinity::Affinity;
use crate::idle::Idle;
use crate::priority::{Gain, Priority};
use crate::streams::Streams;
use crate::waits::Waits;

/// Where a thread is and whether others need the core, as [`Idle`] has last said, and what the
/// kernel says of it.
#[derive(Debug)]
pub(super) struct Place {
    at_home: bool,
    contended: bool,
    refraining: bool,
    /// Whether the thread may run on several cores.
    has_choice: bool,
    waits: Waits,
}

impl Place {
    /// That of a thread that begins.
    pub(super) fn at_first(idle: &Idle, affinity: &Affinity, waits: Waits) -> Self {
        Self {
            at_home: idle.wants_core(),
            contended: idle.is_contended(),
            refraining: idle.is_refraining(),
            has_choice: affinity.cores().nth(1).is_some(),
            waits,
        }
    }
}

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Raises the priority of the thread or gives it back, if that is due, and says what that means
    /// for its place.
    pub(super) fn set_priority(
        &mut self,
        now: Instant,
        place: &Place,
        priority: &mut Priority,
        idle: &mut Idle,
    ) {
        let counters = &self.shared.counters;
        let bytes = [counters.bytes_in.get(), counters.bytes_out.get()];
        // To ask takes some microseconds, on which requests wait.
        let waited = || idle.heeds_waits().then(|| place.waits.so_far());
        let came = counters.connections_smc.get().wrapping_add(counters.connections_tcp.get());
        let in_haste = self.load.gains_by_haste(now, bytes, came, waited);
        let awake = || idle.is_contended().then(|| place.waits.awake()).flatten();
        // To let others go on without a raised priority would leave it little.
        let is_crowd = self.load.is_crowd(now, awake) && priority.is_raised();
        let gain = match (idle.gathers(now), is_crowd, in_haste) {
            (true, _, _) => Gain::Patience,
            (false, true, _) => Gain::Batches,
            (false, false, true) => Gain::Haste,
            (false, false, false) => Gain::Neither,
        };
        let bytes = bytes[0].wrapping_add(bytes[1]);
        let contended = !self.stopping && idle.is_contended();
        for changed in priority.after_turn(now, bytes, contended, gain).into_iter().flatten() {
            counters.priority_raised.set(priority.is_raised().into());
            counters.realtime.set(priority.is_realtime().into());
            counters.priority_refused.add(changed.is_err().into());
        }
        if priority.is_batch() != (counters.gathering.get() == 1) {
            counters.gathering.set(priority.is_batch().into());
            counters.gatherings.add(priority.is_batch().into());
        }
        idle.note_waits(self.load.waits());
        idle.gather(self.load.is_short_connections());
        let apart = self.load.is_stream() && priority.may_be_realtime();
        idle.keep_apart(apart && place.has_choice);
    }

    /// Goes back to the thread's own core, or leaves it to others, if `idle` says so.
    pub(super) fn settle(&self, idle: &Idle, place: &mut Place, affinity: &Affinity) {
        let counters = &self.shared.counters;
        if idle.is_contended() != place.contended {
            place.contended = !place.contended;
            counters.contended.set(place.contended.into());
            counters.contentions.add(place.contended.into());
        }
        if idle.is_refraining() != place.refraining {
            place.refraining = !place.refraining;
            counters.refraining.set(place.refraining.into());
            counters.refrainings.add(place.refraining.into());
        }
        if idle.wants_core() != place.at_home {
            place.at_home = !place.at_home;
            let moved = if place.at_home { affinity.pin() } else { affinity.unpin() };
            // A refusal is only counted: the poller works on any core.
            counters.place_refused.add(moved.is_err().into());
            counters.pinned.set((place.at_home && affinity.has_core() && moved.is_ok()).into());
        }
    }

    /// Moves a thread that has no core to itself to where its applications run, or back.
    pub(super) fn draw_near(&mut self, now: Instant, idle: &Idle, affinity: &Affinity) {
        let Some(core) = self.nearness.decide(now, idle.is_in_retreat(now)) else { return };
        let counters = &self.shared.counters;
        let moved = match core {
            Some(core) => affinity.move_to(core),
            // `settle` has taken it home.
            None if idle.wants_core() && affinity.has_core() => Ok(()),
            None => affinity.unpin(),
        };
        counters.near.set((core.is_some() && moved.is_ok()).into());
        counters.place_refused.add(moved.is_err().into());
    }
}
