//! Handles completions: takes leases back, and passes CDC messages to connections and LLC messages
//! to the control thread.

use smcr_proto::Instant;
use smcr_proto::wire::cdc::{Cdc, is_cdc};
use smcr_rnic::{Completion, Fabric, Message, QpError, QpId, Status};

use super::Poller;
use crate::handoff::Report;
use crate::limits::LLC_UNHEARD_MAX;
use crate::mail::{Flooded, Place};
use crate::names::{ConnectionId, GroupId, LinkId, LlcBytes};
use crate::parked::Waiting;
use crate::requests::Request;
use crate::streams::Streams;

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Takes in one completion.
    pub(super) fn complete(&mut self, now: Instant, completion: Completion) {
        match completion {
            Completion::Wrote { qp, lease, tag, .. } => {
                let request = Request::of(tag);
                if let Request::Write(_) = request
                    && let Some(link) = self.links.by_qp(qp)
                {
                    link.came_home(&lease);
                }
                let (Request::Write(id) | Request::Replay(id)) = request else {
                    panic!("a message has no lease");
                };
                let (connections, mut turn) = self.lend(now);
                let relay = connections.relay(id).expect(OUTSTANDING);
                let outcome = relay.wrote(&mut turn, request, lease);
                self.apply(now, id.slot, outcome);
            }
            Completion::Sent { qp, tag, status } => {
                // The link may be gone: work requests that it left behind complete as flushed.
                if status == Status::Done
                    && let Some(link) = self.links.by_qp(qp)
                {
                    link.activity.prove(now);
                }
                match Request::of(tag) {
                    Request::Llc => self.llc_sent(now, qp),
                    Request::Cdc(id, said) => {
                        let (connections, mut turn) = self.lend(now);
                        let relay = connections.relay(id).expect(OUTSTANDING);
                        let outcome = relay.sent(&mut turn, said, status);
                        self.apply(now, id.slot, outcome);
                    }
                    Request::Write(_) | Request::Replay(_) => panic!("a write is no message"),
                }
            }
            Completion::Received { qp, message } => self.received(now, qp, &message),
            Completion::ReceivedLong { qp, message } => {
                let (link, _) = self.heard_on(now, qp);
                self.hear(now, link, LlcBytes::Long(message));
            }
            Completion::Broke { qp, cause } => self.broke(now, qp, cause),
        }
    }

    /// A queue pair broke, and everything that it had received is taken in.
    fn broke(&mut self, now: Instant, qp: QpId, cause: QpError) {
        let link = self.links.by_qp(qp).expect(ALIVE);
        link.emptied = true;
        let (id, was_broken) = (link.id, std::mem::replace(&mut link.broken, true));
        if !was_broken {
            self.report(Report::LinkBroke { link: id, cause });
        }
        self.retire_link(now, id);
    }

    fn llc_sent(&mut self, now: Instant, qp: QpId) {
        // The link may be gone: work requests that it left behind complete as flushed.
        let Some(link) = self.links.by_qp(qp) else { return };
        link.llc_outstanding -= 1;
        let link = link.id;
        self.retire_link(now, link);
    }

    /// Notes that a message came by this queue pair. Returns its link and link group.
    fn heard_on(&mut self, now: Instant, qp: QpId) -> (LinkId, GroupId) {
        let link = self.links.by_qp(qp).expect(ALIVE);
        link.activity.note(now);
        (link.id, link.group)
    }

    /// Reports an LLC message. If too many wait for the control thread already, gives the link up.
    fn hear(&mut self, now: Instant, id: LinkId, message: LlcBytes) {
        let link = self.links.by_id(id).expect(ALIVE);
        if link.unheard.others() >= LLC_UNHEARD_MAX {
            self.give_up_flooded(now, id);
            return;
        }
        let unheard = link.unheard.clone();
        self.report(Report::LlcReceived { link: id, message, unheard });
    }

    /// Gives up a link whose peer would use up our memory.
    pub(super) fn give_up_flooded(&mut self, now: Instant, id: LinkId) {
        let link = self.links.by_id(id).expect("whoever calls has found it");
        if !std::mem::replace(&mut link.broken, true) {
            self.fabric.fail(now, link.qp);
            self.shared.counters.links_flooded.add(1);
            self.report(Report::LinkBroke { link: id, cause: QpError::PeerMisbehaved });
        }
    }

    fn received(&mut self, now: Instant, qp: QpId, message: &Message) {
        let (link, group) = self.heard_on(now, qp);
        if !is_cdc(message) {
            self.hear(now, link, (*message).into());
            return;
        }
        self.shared.counters.cdc_in.add(1);
        let Ok(cdc) = Cdc::decode(message) else {
            self.shared.counters.cdc_malformed.add(1);
            return;
        };
        self.deliver(now, group, cdc.into());
    }

    /// Which poller has connection `id`, as far as a link of `group` may know.
    ///
    /// A message counts only if a link of the connection's own link group brought it: the peer of
    /// another group must not be able to touch the connection, even if it knows the token.
    fn place_of(&mut self, id: ConnectionId, group: GroupId) -> Place {
        match self.connections.relay(id) {
            Some(relay) if relay.far.group() == Some(group) => Place::Here,
            Some(_) => Place::Foreign,
            None => self.mail.place_of(id, group),
        }
    }

    /// Delivers a CDC message, which came on a link of `group`, here or at another poller.
    pub(super) fn deliver(&mut self, now: Instant, group: GroupId, message: Waiting) {
        // RFC 7609 4.7.1 #3: find connection by alert token
        let id = ConnectionId::from_token(message.message.token);
        match self.place_of(id, group) {
            // RFC 7609 A.4 #2: process CDC on the data path
            Place::Here => self.receive_cdc(now, id, message),
            // RFC 7609 3.5.2.4 #5: keep data that precedes Confirm
            Place::Coming => self.park(id, message),
            Place::At(neighbour) => {
                self.shared.counters.cdc_forwarded.add(1);
                if self.mail.pass_on(neighbour, group, message) == Err(Flooded) {
                    self.shared.counters.cdc_flooded.add(1);
                }
            }
            Place::Foreign => self.shared.counters.cdc_foreign.add(1),
            Place::Unknown => self.shared.counters.cdc_unknown_token.add(1),
        }
    }

    /// Takes in a CDC message about a connection in the table.
    fn receive_cdc(&mut self, now: Instant, id: ConnectionId, message: Waiting) {
        let (connections, mut turn) = self.lend(now);
        let relay = connections.relay(id).expect("it is here");
        let outcome = relay.receive(&mut turn, message);
        self.apply(now, id.slot, outcome);
    }

    /// Keeps a CDC message until its connection comes to this poller, from its rendezvous or from a
    /// neighbour.
    fn park(&mut self, id: ConnectionId, message: Waiting) {
        let kept = self.connections.expect(id).push(message);
        self.shared.counters.cdc_parked.add(kept.into());
        self.shared.counters.cdc_parked_overflow.add((!kept).into());
    }
}

/// Why the connection of a work request that has completed is there.
const OUTSTANDING: &str = "a connection neither ends nor leaves before its work requests complete";
/// Why the link of a queue pair that received something, or broke, is there.
const ALIVE: &str = "a link stays in the table until its queue pair has reported that it broke";
