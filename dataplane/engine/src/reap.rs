//! Completions: leases home, CDC messages to connections, LLC messages to the control thread.

use std::time::Duration;

use smcr_memory::Lease;
use smcr_proto::Instant;
use smcr_proto::wire::cdc::{Cdc, is_cdc};
use smcr_rnic::{Cause, Completion, Fabric, Message, QpId, Status, Tag};

use crate::connections::{Far, Held, Retained, Slot, Smc};
use crate::forward::Place;
use crate::handoff::{ConnectionId, Ending, LinkId, LlcBytes, Report};
use crate::limits::{LLC_UNHEARD_MAX, PARKED_MAX};
use crate::poller::Poller;
use crate::streams::Streams;

/// The mark of requests that belong to no connection.
pub(crate) const LLC: Tag = Tag(u64::MAX);

/// The mark of a write of `id`, so many bytes behind the beginning of the peer's element.
pub(crate) fn tag_of_write(id: ConnectionId, at: u32) -> Tag {
    Tag(u64::from(id.token().0) | u64::from(at) << 32)
}

/// The mark of a write that repeats what another link lost.
pub(crate) fn tag_of_replay(id: ConnectionId, at: u32) -> Tag {
    Tag(tag_of_write(id, at).0 | REPLAY)
}

/// The mark of a CDC message of `id`.
pub(crate) fn tag_of_cdc(id: ConnectionId, message: &Cdc) -> Tag {
    let validation = if message.failover_validation { VALIDATION } else { 0 };
    Tag(u64::from(id.token().0) | u64::from(message.sequence) << 32 | validation)
}

/// In the mark of a write: somebody else keeps the bytes. No element is so long that this is part
/// of a place in it.
const REPLAY: u64 = 1 << 63;
/// In the mark of a message: it announces nothing.
const VALIDATION: u64 = 1 << 48;

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Takes in one completion.
    pub(crate) fn complete(&mut self, now: Instant, completion: Completion) {
        match completion {
            Completion::Wrote { qp, lease, tag, .. } => {
                if tag.0 & REPLAY == 0
                    && let Some(link) = self.links.by_qp(qp)
                {
                    link.lent -= u64::from(lease.len());
                }
                self.wrote(now, lease, tag);
            }
            Completion::Sent { qp, tag, status } => {
                if status == Status::Done
                    && let Some(link) = self.links.by_qp(qp)
                {
                    link.activity.prove(now);
                }
                match tag {
                    LLC => self.llc_sent(now, qp),
                    _ => self.sent(now, tag, status),
                }
            }
            Completion::Received { qp, message } => self.received(now, qp, message),
            Completion::ReceivedLong { qp, message } => self.received_long(now, qp, message),
            Completion::Broke { qp, cause } => self.broke(now, qp, cause),
        }
    }

    /// A queue pair has said everything.
    fn broke(&mut self, now: Instant, qp: QpId, cause: Cause) {
        let Some(link) = self.links.by_qp(qp) else { return };
        link.emptied = true;
        let (id, was_broken) = (link.id, std::mem::replace(&mut link.broken, true));
        if !was_broken {
            self.report(Report::LinkBroke { link: id, cause });
        }
        self.retire_link(now, id);
    }

    pub(crate) fn wrote(&mut self, now: Instant, lease: Lease, tag: Tag) {
        let id = connection_of(tag);
        if tag.0 & REPLAY == 0
            && let Some(relay) = self.connections.relay(id)
            && let Far::Smc(smc) = &mut relay.far
        {
            let at = u32::try_from(tag.0 >> 32).expect("thirty-two bits were left");
            smc.retained.push_back(Retained { at, lease });
        } else {
            self.pool.take_back(lease);
        }
        self.completed(now, id);
    }

    fn llc_sent(&mut self, now: Instant, qp: QpId) {
        let Some(link) = self.links.by_qp(qp) else { return };
        link.llc_outstanding -= 1;
        let link = link.id;
        self.retire_link(now, link);
    }

    pub(crate) fn sent(&mut self, now: Instant, tag: Tag, status: Status) {
        let id = connection_of(tag);
        if let Some(relay) = self.connections.relay(id)
            && let Far::Smc(smc) = &mut relay.far
        {
            if status == Status::Flushed {
                smc.unheard = true;
            } else if tag.0 & VALIDATION == 0 {
                let sequence = u16::try_from(tag.0 >> 32 & 0xffff).expect("sixteen bits were left");
                // RFC 7609 4.6.1-2
                smc.connection.cdc_acknowledged(sequence);
                // A queue pair completes in order: these writes, and no others, came before.
                smc.repeated.clear();
                for Retained { lease, .. } in smc.retained.drain(..) {
                    self.pool.take_back(lease);
                }
            }
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
            self.depart(now, id.slot);
        }
    }

    /// A message that is too long for CDC.
    fn received_long(&mut self, now: Instant, qp: QpId, message: Box<[u8]>) {
        let Some(link) = self.links.by_qp(qp) else { return };
        link.activity.note(now);
        let link = link.id;
        self.hear(now, link, LlcBytes::Long(message));
    }

    /// Reports an LLC message; or gives the link up, if its peer says more than can be heard.
    fn hear(&mut self, now: Instant, id: LinkId, message: LlcBytes) {
        let Some(link) = self.links.by_id(id) else { return };
        if link.unheard.others() >= LLC_UNHEARD_MAX {
            self.give_up_flooded(now, id);
            return;
        }
        let unheard = link.unheard.clone();
        self.report(Report::LlcReceived { link: id, message, unheard });
    }

    /// Gives up a link whose peer would cost more memory than it is worth.
    pub(crate) fn give_up_flooded(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.by_id(id) else { return };
        if !std::mem::replace(&mut link.broken, true) {
            self.fabric.fail(now, link.qp);
            self.ends.counters.links_flooded.add(1);
            self.report(Report::LinkBroke { link: id, cause: Cause::PeerMisbehaved });
        }
    }

    fn received(&mut self, now: Instant, qp: QpId, message: Message) {
        let Some(link) = self.links.by_qp(qp) else { return };
        link.activity.note(now);
        let group = link.group;
        if !is_cdc(&message) {
            let link = link.id;
            self.hear(now, link, message.into());
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
        while self.place_of(id, group) == Place::Unknown && self.obey(now) {}
        self.deliver(now, group, &cdc);
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
                if smc.holds(now, cdc) {
                    counters.cdc_held.add(1);
                } else {
                    self.take_in(now, id, cdc);
                }
            }
        }
    }

    fn take_in(&mut self, now: Instant, id: ConnectionId, cdc: &Cdc) {
        let Some(relay) = self.connections.relay(id) else { return };
        let Far::Smc(smc) = &mut relay.far else { return };
        match smc.receive(now, cdc) {
            // RFC 7609 2.3-8, 4.6.1-9
            Ok(progress) if progress.reset && cdc.failover_validation => {
                self.reset(now, id.slot, Ending::DataLost);
            }
            Ok(progress) => {
                let filled = smc.is_gap_filled();
                self.progress(now, id.slot, progress);
                if filled {
                    self.release_held(now, id.slot);
                }
            }
            Err(_) => {
                self.ends.counters.cdc_misbehaved.add(1);
                self.reset(now, id.slot, Ending::PeerMisbehaved);
            }
        }
    }

    /// Takes in what was held back: what came before it has come, or never will.
    pub(crate) fn release_held(&mut self, now: Instant, slot: u16) {
        let Some(relay) = self.connections.at(slot) else { return };
        let id = relay.id;
        let Far::Smc(smc) = &mut relay.far else { return };
        let Some(held) = smc.held.take() else { return };
        for (index, cdc) in held.messages.iter().enumerate() {
            self.expect_gap_before(id, index);
            self.take_in(now, id, cdc);
        }
    }

    /// Of messages that are kept, the last that there is room for replaces others: some before it
    /// may be missing. Said no sooner, as a gap before it may be another, that F announces.
    pub(crate) fn expect_gap_before(&mut self, id: ConnectionId, index: usize) {
        if index == PARKED_MAX - 1
            && let Some(relay) = self.connections.relay(id)
            && let Far::Smc(smc) = &mut relay.far
        {
            smc.connection.expect_gap();
        }
    }
}

impl Smc {
    /// Keeps a message that must wait for one which another completion queue still has, or which
    /// another poller is about to pass on: what the peer's NIC saw delivered on the old link may
    /// reach us behind what follows on the new one.
    fn holds(&mut self, now: Instant, cdc: &Cdc) -> bool {
        let validates = cdc.failover_validation;
        // RFC 7609 4.6.1-8
        let unanswered = validates && !self.connection.has_received(cdc.sequence);
        let Some(held) = &mut self.held else {
            let early = unanswered || self.connection.is_behind_gap(cdc);
            if early {
                self.held = Some(Held { messages: vec![*cdc], until: now + HOLD });
            }
            return early;
        };
        let first = held.messages[0];
        let overtaken = match (validates, first.failover_validation) {
            (false, _) => !smcr_proto::connection::is_before(first.sequence, cdc.sequence),
            // It explains the gap that the others wait behind.
            (true, false) => !unanswered,
            (true, true) => false,
        };
        if overtaken {
            return false;
        }
        if validates && !first.failover_validation {
            held.messages.insert(0, *cdc);
            held.messages.truncate(PARKED_MAX);
        } else if held.messages.len() < PARKED_MAX {
            held.messages.push(*cdc);
        } else {
            held.messages[PARKED_MAX - 1] = *cdc;
        }
        true
    }

    /// Whether everything that held messages wait for has come.
    fn is_gap_filled(&self) -> bool {
        let Some(held) = &self.held else { return false };
        let first = &held.messages[0];
        match first.failover_validation {
            true => self.connection.has_received(first.sequence),
            false => !self.connection.is_behind_gap(first),
        }
    }
}

/// How long messages on a new link wait for what was delivered on the old one: far longer than any
/// poller needs to empty its completion queue and its mailbox, far shorter than users wait.
const HOLD: Duration = Duration::from_millis(250);

fn connection_of(tag: Tag) -> ConnectionId {
    let token = u32::try_from(tag.0 & 0xffff_ffff).expect("thirty-two bits were left");
    ConnectionId::from_token(smcr_proto::AlertToken(token))
}
