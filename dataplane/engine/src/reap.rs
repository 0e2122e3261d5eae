//! Completions: leases home, CDC messages to connections, LLC messages to the control thread.

use smcr_memory::Lease;
use smcr_proto::Instant;
use smcr_proto::wire::cdc::{Cdc, is_cdc};
use smcr_rnic::{Completion, Fabric, Message, QpId, Status, Tag};

use crate::connections::{Far, Slot};
use crate::handoff::{ConnectionId, Ending, Report};
use crate::limits::PARKED_MAX;
use crate::poller::Poller;
use crate::streams::Streams;

/// The mark of requests that belong to no connection.
pub(crate) const LLC: Tag = Tag(u64::MAX);

/// The mark of a write of `id`.
pub(crate) fn tag_of_write(id: ConnectionId) -> Tag {
    Tag(id.token().0.into())
}

/// The mark of the CDC message of `id` with this sequence number.
pub(crate) fn tag_of_cdc(id: ConnectionId, sequence: u16) -> Tag {
    Tag(u64::from(id.token().0) | u64::from(sequence) << 32)
}

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Takes in one completion.
    pub(crate) fn complete(&mut self, now: Instant, completion: Completion) {
        match completion {
            Completion::Wrote { lease, tag, .. } => self.wrote(now, lease, tag),
            Completion::Sent { qp, tag: LLC, .. } => self.llc_sent(now, qp),
            Completion::Sent { tag, status, .. } => self.sent(now, tag, status),
            Completion::Received { qp, message } => self.received(now, qp, message),
            Completion::Broke { qp, cause } => {
                let Some(link) = self.links.by_qp(qp) else { return };
                link.broken = true;
                let link = link.id;
                self.report(Report::LinkBroke { link, cause });
            }
        }
    }

    pub(crate) fn wrote(&mut self, now: Instant, lease: Lease, tag: Tag) {
        self.pool.take_back(lease);
        self.completed(now, connection_of(tag));
    }

    fn llc_sent(&mut self, now: Instant, qp: QpId) {
        let Some(link) = self.links.by_qp(qp) else { return };
        link.llc_outstanding -= 1;
        let link = link.id;
        self.retire_link(now, link);
    }

    pub(crate) fn sent(&mut self, now: Instant, tag: Tag, status: Status) {
        let id = connection_of(tag);
        if status == Status::Done
            && let Some(relay) = self.connections.relay(id)
            && let Far::Smc(smc) = &mut relay.far
        {
            let sequence = u16::try_from(tag.0 >> 32 & 0xffff).expect("sixteen bits were left");
            // RFC 7609 4.6.1-2
            smc.connection.cdc_acknowledged(sequence);
        }
        self.completed(now, id);
    }

    /// One request of `id` is no longer on its way.
    fn completed(&mut self, now: Instant, id: ConnectionId) {
        let Some(relay) = self.connections.relay(id) else { return };
        let Far::Smc(smc) = &mut relay.far else { return };
        assert!(smc.outstanding > 0, "each request completes once");
        smc.outstanding -= 1;
        if smc.outstanding == 0 {
            self.settle(now, id.slot);
        }
    }

    fn received(&mut self, now: Instant, qp: QpId, message: Message) {
        let Some(link) = self.links.by_qp(qp) else { return };
        link.activity.note(now);
        if !is_cdc(&message) {
            let link = link.id;
            self.report(Report::LlcReceived { link, message });
            return;
        }
        self.ends.counters.cdc_in.add(1);
        let Ok(cdc) = Cdc::decode(&message) else {
            self.ends.counters.cdc_malformed.add(1);
            return;
        };
        // RFC 7609 4.7.1-3
        let id = ConnectionId::from_token(cdc.token);
        // The message may have overtaken the command that announced its connection.
        while self.connections.lookup(id).is_none() && self.obey(now) {}
        // RFC 7609 A.4-2
        self.receive_cdc(now, id, &cdc);
    }

    /// Takes in a CDC message of a connection, or keeps it until the rendezvous has ended.
    pub(crate) fn receive_cdc(&mut self, now: Instant, id: ConnectionId, cdc: &Cdc) {
        let counters = &self.ends.counters;
        match self.connections.lookup(id) {
            None | Some(Slot::Free) => counters.cdc_unknown_token.add(1),
            // RFC 7609 3.5.2.4-5
            Some(Slot::Expected { parked, .. }) => {
                if parked.len() < PARKED_MAX {
                    counters.cdc_parked.add(1);
                    parked.push(*cdc);
                } else {
                    // Each message says everything the ones before it said: only the newest must
                    // be kept, or the last bytes would never be announced.
                    counters.cdc_parked_overflow.add(1);
                    parked[PARKED_MAX - 1] = *cdc;
                }
            }
            Some(Slot::Busy(relay)) => {
                let Far::Smc(smc) = &mut relay.far else { return };
                match smc.receive(now, cdc) {
                    Ok(progress) => self.progress(now, id.slot, progress),
                    Err(_) => {
                        counters.cdc_misbehaved.add(1);
                        self.reset(now, id.slot, Ending::PeerMisbehaved);
                    }
                }
            }
        }
    }
}

fn connection_of(tag: Tag) -> ConnectionId {
    let token = u32::try_from(tag.0 & 0xffff_ffff).expect("thirty-two bits were left");
    ConnectionId::from_token(smcr_proto::AlertToken(token))
}
