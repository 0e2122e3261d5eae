//! Gives connections their turn that waited until they may carry more.

use smcr_proto::Instant;
use smcr_rnic::Fabric;

use super::Poller;
use crate::allowance::Way;
use crate::limits::PACED_PER_TURN_MAX;
use crate::paced::Waiter;
use crate::streams::Streams;

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Gives those their turn who have waited for long enough. Returns whether anything moved.
    pub(super) fn resume_paced(&mut self, now: Instant) -> bool {
        if self.work.paced.len() == 0 {
            return false;
        }
        let mut moved = false;
        for _ in 0..PACED_PER_TURN_MAX {
            let Some((one, waited)) = self.work.paced.next(now) else { break };
            let Waiter { id, way, .. } = one;
            let (connections, mut turn) = self.lend(now);
            // It may have ended or left this poller since it began to wait.
            let Some(relay) = connections.relay(id) else { continue };
            if !relay.pace.call(one, waited) {
                continue;
            }
            let outcome = match way {
                // It stands in the list of the next turn already.
                Way::In if relay.queued.is_in_fill() => continue,
                Way::Out if relay.queued.is_in_drain() => continue,
                Way::In => relay.fill(&mut turn),
                Way::Out => relay.drain(&mut turn),
            };
            moved |= self.conclude(now, id.slot, outcome);
        }
        // Entries of connections that are gone must not become many.
        if self.work.paced.len() > 4 * self.connections.busy() + PACED_PER_TURN_MAX {
            let connections = &mut self.connections;
            self.work.paced.retain(|one| {
                connections.relay(one.id).is_some_and(|relay| relay.pace.waits_as(one))
            });
        }
        moved
    }
}
