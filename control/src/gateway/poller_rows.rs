//! What operators see of polling threads.

use std::time::Duration;

use smcr_engine::counters::DESCRIPTIONS;
use smcr_engine::stages::Times;

use crate::placement::PollerHandle;
use crate::stats::{Poller, Residence};

/// One polling thread.
pub(super) fn poller_row<Qp>((index, poller): (usize, &PollerHandle<Qp>)) -> Poller {
    let counters = &poller.counters;
    Poller {
        index: u32::try_from(index).unwrap_or(u32::MAX),
        core: poller.assignment.core.and_then(|core| u32::try_from(core).ok()),
        pinned: counters.pinned.get() == 1,
        placement: placement(poller),
        turns: counters.turns.get(),
        turns_idle: counters.turns_idle.get(),
        connections: u32::try_from(counters.connections.get()).unwrap_or(u32::MAX),
        counters: DESCRIPTIONS
            .iter()
            .zip(counters.values())
            .map(|(description, value)| (description.name.to_owned(), value))
            .collect(),
        stages: counters
            .stages
            .by_name()
            .map(|(name, stage)| (name.to_owned(), stage_row(&stage.read())))
            .into(),
    }
}

fn stage_row(times: &Times) -> Residence {
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let buckets = times.counts.iter().filter(|(_, count)| *count > 0);
    Residence {
        count: times.count(),
        sum_ns: nanos(times.sum),
        p50_ns: nanos(times.at(500)),
        p99_ns: nanos(times.at(990)),
        p999_ns: nanos(times.at(999)),
        max_ns: nanos(times.most),
        buckets: buckets.map(|(end, count)| (nanos(*end), *count)).collect(),
    }
}

/// Why a poller's thread runs where it does.
fn placement<Qp>(poller: &PollerHandle<Qp>) -> String {
    let reason = &poller.assignment.reason;
    if poller.counters.contended.get() == 1 {
        format!("{reason}; others need the core where it runs")
    } else {
        reason.to_string()
    }
}
