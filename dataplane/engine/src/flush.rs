//! The only place that posts.
//!
//! During a turn, writes and messages gather per link. Here they are posted: first all writes of
//! all connections, then all messages. A queue pair keeps that order, so each message still comes
//! after the bytes it announces; and equal packets stand together, which is what lets a NIC in
//! software send many of them in one system call.

use smcr_proto::Instant;
use smcr_rnic::{Fabric, Work};

use crate::connections::Far;
use crate::handoff::{LinkId, LlcBytes};
use crate::limits::LLC_OUTSTANDING_MAX;
use crate::poller::Poller;
use crate::reap::{LLC, tag_of_cdc};
use crate::streams::Streams;

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Makes the CDC messages that are due, and posts what gathered.
    pub(crate) fn flush(&mut self, now: Instant) -> bool {
        // First, and of the last request that fills leave: on a busy link there is no other.
        if self.links.send_llc(LLC) {
            self.ends.counters.blocked_on_queue.add(1);
        }
        let mut slots =
            std::mem::replace(&mut self.work.flush, std::mem::take(&mut self.work.current));
        for slot in slots.drain(..) {
            self.announce(slot);
        }
        self.work.current = slots;

        let mut moved = false;
        for link in self.links.busy() {
            if !link.writes.is_empty() {
                self.fabric.post(link.qp, &mut link.writes);
                moved = true;
            }
            if !link.sends.is_empty() {
                // RFC 7609 2.1-15
                self.fabric.post(link.qp, &mut link.sends);
                moved = true;
            }
        }
        self.fabric.transmit(now);
        for link in self.links.busy() {
            link.budget = self.fabric.room(link.qp);
        }
        self.links.rest();
        moved
    }

    /// Posts an LLC message with this turn's flush, or the first that has room for it. A link whose
    /// peer does not take in what it asked for is given up instead.
    pub(crate) fn send_llc(&mut self, now: Instant, id: LinkId, message: LlcBytes) {
        let Some(link) = self.links.by_id(id) else { return };
        if link.llc_outstanding >= LLC_OUTSTANDING_MAX {
            self.give_up_flooded(now, id);
            return;
        }
        link.llc_outstanding += 1;
        link.llc.push_back(message);
    }

    /// Makes the CDC message that the connection in `slot` owes, if any.
    fn announce(&mut self, slot: u16) {
        let Some(relay) = self.connections.at(slot) else { return };
        relay.queued.flush = false;
        let id = relay.id;
        let Far::Smc(smc) = &mut relay.far else { return };
        let Some(link) = self.links.by_id(smc.link) else { return };
        if smc.condemned || smc.moving.is_some() || link.broken {
            return;
        }
        // RFC 7609 2.3-9, 2.3-10, 4.6.2-1
        if !smc.replay.is_empty() && !smc.connection.is_validation_due() {
            return;
        }
        if link.budget == 0 {
            self.ends.counters.blocked_on_queue.add(1);
            self.queue_flush(slot);
            return;
        }
        if let Some(cdc) = smc.connection.poll_cdc() {
            link.budget -= 1;
            smc.outstanding += 1;
            smc.unheard = false;
            link.sends.push(Work::Send { message: cdc.encode(), tag: tag_of_cdc(id, &cdc) });
            self.ends.counters.cdc_out.add(1);
            if cdc.failover_validation {
                // RFC 7609 4.6.1-7
                self.queue_fill(slot);
                self.queue_flush(slot);
            }
        }
    }
}
