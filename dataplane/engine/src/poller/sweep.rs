//! Deadlines of connections, none of which is set for less than a quarter of a second: all of them
//! are looked at now and then, some in each turn. Those that are dormant give memory back.

use std::time::Duration;

use smcr_proto::Instant;
use smcr_rnic::Fabric;

use super::Poller;
use crate::names::LinkId;
use crate::relay::Relay;
use crate::streams::Streams;

/// Where the sweep goes on, and when.
#[derive(Debug)]
pub(super) struct Sweep {
    at: Instant,
    /// The first slot of the next part.
    from: u16,
}

impl Default for Sweep {
    fn default() -> Self {
        Self { at: Instant(0), from: 0 }
    }
}

impl Sweep {
    /// When the next part is due.
    pub(super) fn at(&self) -> Instant {
        self.at
    }

    /// Notes that these slots were looked at. `connections` is how many there are.
    fn advance(&mut self, now: Instant, looked_at: &[u16], connections: usize) {
        let goes_on = looked_at.len() == AT_ONCE;
        let from = looked_at.last().filter(|_| goes_on).map_or(0, |last| last + 1);
        let step = EVERY / parts(connections);
        // Who is late is not late again each time.
        let at = if now.since(self.at) < step { self.at + step } else { now + step };
        *self = Self { at, from };
    }
}

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Acts on deadlines that have passed, of the next connections in turn. Returns whether
    /// something moved.
    pub(super) fn sweep(&mut self, now: Instant) -> bool {
        if now < self.sweep.at {
            return false;
        }
        let first = self.sweep.from;
        let mut slots = std::mem::take(&mut self.arrived.swept);
        slots.extend(self.connections.slots_from(first).take(AT_ONCE));
        self.sweep.advance(now, &slots, self.connections.busy());
        if first == 0 {
            self.publish();
        }
        let (mut moved, mut cost) = (false, 0);
        for slot in slots.drain(..) {
            let (relay, mut turn) = self.open(now, slot).expect("each can end itself only");
            relay.note_bypassed(now, turn.streams, turn.counters);
            let (reading, outcome) = (relay.reading(), relay.expire(&mut turn));
            self.shared.gauges.set(slot, reading);
            moved |= self.apply(now, slot, outcome);
            if cost < RELINQUISH_MAX {
                cost += self.relinquish(slot);
            }
        }
        self.arrived.swept = slots;
        if first == 0 {
            let retiring: Vec<LinkId> = self.links.retiring().collect();
            for link in retiring {
                self.retire_link(now, link);
            }
        }
        moved
    }

    /// If the connection is dormant, gives the memory of its element back to the host.
    /// Returns what that has cost: how many bytes, and [`CALL_COST`].
    fn relinquish(&mut self, slot: u16) -> usize {
        // It may just have ended.
        let dormant = self.connections.at(slot).and_then(Relay::dormant_element);
        let bytes =
            dormant.map_or(0, |(element, announced)| self.fabric.relinquish(element, announced));
        if bytes == 0 {
            return 0;
        }
        self.shared.counters.memory_given_back.add(bytes as u64);
        bytes + CALL_COST
    }
}

/// How many parts a sweep over so many connections has.
fn parts(connections: usize) -> u32 {
    u32::try_from(connections / AT_ONCE + 1).expect("CONNECTIONS_MAX fits")
}

/// How often each connection is looked at.
const EVERY: Duration = Duration::from_millis(250);
/// How many in one turn: a few tens of microseconds, for which all others wait. Nine thousand at
/// once were a millisecond.
const AT_ONCE: usize = 256;
/// How much memory these give back, together with [`CALL_COST`] for each: as much as takes another
/// few tens of microseconds. Where more are dormant, the others follow a quarter of a second later.
const RELINQUISH_MAX: usize = 512 << 10;
/// A system call that frees a page takes 2.3 us, and one that frees 64 of them 27.5 us: so much
/// more memory could be freed instead of making a call.
const CALL_COST: usize = 20 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// Deadlines are late by a quarter of a second at most, however many connections there are,
    /// and the others never wait for more than a few of them.
    #[test]
    fn each_connection_has_its_turn_in_time() {
        for count in [0, 1, 255, 256, 257, 511, 512, 9000] {
            // They have every third slot or so.
            let all: Vec<u16> = (0..count).map(|it| it * 3 + it % 2).collect();
            let (mut sweep, start) = (Sweep::default(), Instant(1));
            let (mut now, mut seen) = (start, Vec::new());
            loop {
                let slots = all.iter().copied().filter(|slot| *slot >= sweep.from);
                let slots: Vec<u16> = slots.take(AT_ONCE).collect();
                sweep.advance(now, &slots, all.len());
                seen.extend(slots);
                now = sweep.at();
                if sweep.from == 0 {
                    break;
                }
            }
            assert_eq!(seen, all);
            assert!(now.since(start) <= EVERY, "{count}: {:?}", now.since(start));
        }
    }
}
