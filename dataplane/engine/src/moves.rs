//! Connections that change their link, and with it perhaps their poller (RFC 4.6).
//!
//! ```text
//!   MoveConnections ─► moving ─► nothing outstanding ─► depart ─┬─► settle on the link
//!                   posts nothing                       Adopt ──┘   F, replay, CDC
//! ```
//!
//! What the peer may not have is copied out of the send pool on departure: the memory that a broken
//! link held is free at once, and whoever writes the bytes again takes them from its own pool. Two
//! pollers that hand each other their connections can so never wait for each other's memory.

use std::sync::Arc;

use smcr_proto::Instant;
use smcr_rnic::Fabric;

use crate::connections::{Far, Piece, Queued, Relay, Retained};
use crate::gauges::Reading;
use crate::handoff::{
    Command, ConnectionId, Ending, GroupId, KeyChange, LinkId, PeerElement, Report,
};
use crate::poller::Poller;
use crate::streams::{Key, Streams};

/// A connection between two pollers, with its socket, its element and all that must be repeated.
#[derive(Debug)]
pub struct Migrant<S> {
    relay: Relay<S>,
}

impl<S> Migrant<S> {
    /// Which connection.
    pub(crate) fn id(&self) -> ConnectionId {
        self.relay.id
    }

    /// Of which link group.
    pub(crate) fn group(&self) -> Option<GroupId> {
        self.relay.far.group()
    }
}

/// From which link to which.
#[derive(Debug)]
pub(crate) struct Move {
    from: LinkId,
    to: LinkId,
    to_poller: u8,
    keys: Vec<KeyChange>,
}

impl Move {
    pub(crate) fn new(from: LinkId, to: LinkId, to_poller: u8, keys: Vec<KeyChange>) -> Self {
        Self { from, to, to_poller, keys }
    }

    /// The peer's element as the new link sees it, if its RMB is known there.
    fn translate(&self, peer: PeerElement) -> Option<PeerElement> {
        let known = |key: &&KeyChange| key.old == peer.rkey && key.old_base <= peer.address;
        // Of two RMBs with one key, the element is in the one that begins last before it.
        let key = self.keys.iter().filter(known).max_by_key(|key| key.old_base)?;
        let address = (peer.address - key.old_base).wrapping_add(key.new_base);
        Some(PeerElement { rkey: key.new, address, ..peer })
    }
}

/// The links that were vacated: whoever comes to one later follows the others.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    vacated: Vec<Vacated>,
}

#[derive(Debug)]
struct Vacated {
    order: Arc<Move>,
    /// Connections that have not left yet.
    staying: u32,
    reported: bool,
}

impl Moves {
    fn of(&mut self, link: LinkId) -> Option<&mut Vacated> {
        self.vacated.iter_mut().find(|vacated| vacated.order.from == link)
    }

    /// Notes that a link is being vacated, in place of what was said of it before.
    fn note(&mut self, order: Arc<Move>) {
        self.vacated.retain(|vacated| vacated.order.from != order.from);
        if self.vacated.len() >= VACATED_MAX
            && let Some(oldest) = self.vacated.iter().position(|vacated| vacated.staying == 0)
        {
            self.vacated.remove(oldest);
        }
        self.vacated.push(Vacated { order, staying: 0, reported: false });
    }
}

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Begins to move connections from one link to another: its own choice of each side.
    // RFC 7609 2.3-1, 2.3-2, 2.3-3, 2.3-12, 2.3-13, 4.6-1
    pub(crate) fn move_connections(
        &mut self,
        now: Instant,
        order: Move,
        only: Option<Vec<ConnectionId>>,
    ) {
        let order = Arc::new(order);
        let slots: Vec<u16> = match &only {
            None => self.connections.slots().collect(),
            Some(chosen) => {
                let present = |id: &&ConnectionId| self.connections.relay(**id).is_some();
                chosen.iter().filter(present).map(|id| id.slot).collect()
            }
        };
        if only.is_none() {
            self.moves.note(Arc::clone(&order));
        }
        for slot in slots {
            let Some(relay) = self.connections.at(slot) else { continue };
            if matches!(&relay.far, Far::Smc(smc) if smc.link == order.from) {
                self.begin_move(now, slot, &order);
            }
        }
        self.report_vacated(order.from);
    }

    /// Lets a connection leave as soon as nothing of it is outstanding.
    fn begin_move(&mut self, now: Instant, slot: u16, order: &Arc<Move>) {
        let Some(relay) = self.connections.at(slot) else { return };
        let Far::Smc(smc) = &mut relay.far else { return };
        if smc.condemned {
            return;
        }
        if order.translate(smc.peer).is_none() {
            self.condemn(now, slot);
            return;
        }
        let before = smc.moving.replace(Arc::clone(order));
        if let Some(vacated) = self.moves.of(order.from) {
            vacated.staying += 1;
        }
        if let Some(before) = before {
            self.has_left(&before);
        }
        self.depart(now, slot);
    }

    /// One connection that was to leave has left, or ended. Ordered anew, it counts anew.
    pub(crate) fn has_left(&mut self, order: &Arc<Move>) {
        if let Some(vacated) = self.moves.of(order.from)
            && Arc::ptr_eq(&vacated.order, order)
        {
            vacated.staying -= 1;
        }
        self.report_vacated(order.from);
    }

    fn report_vacated(&mut self, link: LinkId) {
        if let Some(vacated) = self.moves.of(link)
            && vacated.staying == 0
            && !std::mem::replace(&mut vacated.reported, true)
        {
            self.report(Report::LinkVacated { link });
        }
    }

    /// Lets the connection in `slot` go, if it is to and nothing keeps it.
    pub(crate) fn depart(&mut self, now: Instant, slot: u16) {
        let Some(relay) = self.connections.at(slot) else { return };
        let Far::Smc(smc) = &mut relay.far else { return };
        // RFC 7609 2.3-6
        if smc.outstanding > 0 || smc.condemned {
            return;
        }
        let Some(order) = smc.moving.take() else { return };
        smc.peer = order.translate(smc.peer).expect("checked when the move began");
        smc.link = order.to;
        // RFC 7609 4.6.1-1, 4.6.1-4, 2.3-7
        smc.connection.failover();
        // What was written again, what was still to be, and what was new behind that.
        let mut replay = std::mem::take(&mut smc.repeated);
        replay.append(&mut smc.replay);
        replay.iter_mut().for_each(|piece| piece.done = 0);
        for Retained { at, lease } in smc.retained.drain(..) {
            // What was reset is not worth repeating. A peer that has closed has taken in all that
            // it wanted, and its element may be another's by now.
            // RFC 7609 4.8.1-12
            if relay.near.is_some() && !smc.peer_closed {
                let mut bytes = vec![0; lease.len() as usize];
                lease.copy_out(0, &mut bytes);
                replay.push_back(Piece { at, bytes, done: 0 });
            }
            self.pool.take_back(lease);
        }
        if smc.peer_closed {
            replay.clear();
        }
        smc.replay = replay;
        relay.failovers += 1;
        self.ends.counters.failovers.add(1);
        if order.to_poller == self.ends.index {
            self.arrived(now, slot);
        } else {
            self.hand_over(slot, order.to_poller);
        }
        self.has_left(&order);
    }

    fn hand_over(&mut self, slot: u16, to: u8) {
        let Some(mut relay) = self.connections.remove(slot) else { return };
        if let Some(near) = &relay.near {
            self.streams.unwatch(&near.stream);
        }
        relay.queued = Queued::default();
        self.ends.counters.connections.set(self.connections.busy() as u64);
        self.ends.counters.connections_moved_out.add(1);
        self.ends.gauges.set(slot, Reading::default());
        self.send_mail(to.into(), Command::Adopt(Box::new(Migrant { relay })));
    }

    /// Takes over a connection from a neighbour.
    pub(crate) fn adopt(&mut self, now: Instant, migrant: Migrant<S::Stream>) {
        let Migrant { relay } = migrant;
        let id = relay.id;
        let key = Key { slot: id.slot, generation: id.generation, far: false };
        let watched = relay.near.as_ref().is_none_or(|near| self.watch(key, &near.stream));
        self.ends.gauges.set(id.slot, relay.reading());
        let parked = self.connections.insert(relay);
        assert!(parked.is_empty(), "messages are kept where they are expected");
        self.ends.counters.connections.set(self.connections.busy() as u64);
        self.ends.counters.connections_moved_in.add(1);
        self.arrived(now, id.slot);
        if !watched {
            // Nothing would ever be read from it.
            self.reset(now, id.slot, Ending::Aborted);
        }
    }

    /// A connection continues here.
    fn arrived(&mut self, now: Instant, slot: u16) {
        let Some(relay) = self.connections.at(slot) else { return };
        let connection = relay.id;
        let Far::Smc(smc) = &relay.far else { return };
        let PeerElement { rkey, address, .. } = smc.peer;
        let link = smc.link;
        self.report(Report::Moved { connection, link, rkey, address });
        self.queue_drain(slot);
        self.queue_fill(slot);
        self.settle_on_link(now, slot);
    }

    /// Lets a connection speak on its link; or follow the others, if they have left it meanwhile.
    pub(crate) fn settle_on_link(&mut self, now: Instant, slot: u16) {
        let Some(relay) = self.connections.at(slot) else { return };
        let Far::Smc(smc) = &relay.far else { return };
        let link = smc.link;
        if let Some(vacated) = self.moves.of(link) {
            let order = Arc::clone(&vacated.order);
            self.begin_move(now, slot, &order);
        } else if self.links.by_id(link).is_none_or(|link| link.failed || link.retire_by.is_some())
        {
            self.condemn(now, slot);
        } else {
            self.queue_flush(slot);
        }
    }
}

/// Vacated links that are remembered: those of a thousand peers whose RNIC has failed. Nobody is
/// sent to a link that is gone for long.
const VACATED_MAX: usize = 1_024;

#[cfg(test)]
mod tests {
    use smcr_proto::ring::Ring;
    use smcr_proto::{AlertToken, Rkey};

    use super::*;

    fn change(old: u32, old_base: u64, new: u32, new_base: u64) -> KeyChange {
        KeyChange { old: Rkey(old), old_base, new: Rkey(new), new_base }
    }

    /// An element keeps its place in its RMB, whatever key and address the RMB has on the new
    /// link. A mistake here writes one connection's bytes into another's element.
    // RFC 7609 2.3-3
    #[test]
    fn an_element_is_found_in_the_same_rmb() {
        let keys = vec![change(1, 1_000, 11, 50_000), change(2, 1_000, 12, 90_000)];
        let order = Move::new(LinkId(1), LinkId(2), 0, keys);
        let (ring, token) = (Ring::new(16_384), AlertToken(5));
        let peer = PeerElement { rkey: Rkey(2), address: 1_300, ring, token };
        let moved = order.translate(peer).unwrap();
        assert_eq!((moved.rkey, moved.address, moved.token), (Rkey(12), 90_300, token));
        assert!(order.translate(PeerElement { rkey: Rkey(3), ..peer }).is_none());
        assert!(order.translate(PeerElement { address: 999, ..peer }).is_none());
    }
}
