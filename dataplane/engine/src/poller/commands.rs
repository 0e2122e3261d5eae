//! Handles commands of the control thread and letters of other pollers, and moves connections from
//! one link to another.

use std::sync::Arc;
use std::time::Duration;

use smcr_proto::Instant;
use smcr_rnic::Fabric;

use super::{CommandOf, Poller};
use crate::gauges::Reading;
use crate::handoff::{Command, Established, Report};
use crate::limits::{LETTERS_PER_TURN_MAX, LLC_OUTSTANDING_MAX, OBEY_PER_TURN_MAX};
use crate::mail::Letter;
use crate::names::{ConnectionId, Ending, LinkId, LlcBytes};
use crate::owners::Owner;
use crate::relay::pace::Pace;
use crate::relay::route::Route;
use crate::relay::smc::Smc;
use crate::relay::tcp::Tcp;
use crate::relay::{Far, Migrant, Outcome, Relay};
use crate::streams::{Key, Streams};
use crate::turn::Queued;

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Obeys commands of the control thread. Returns whether there were any.
    pub(super) fn obey(&mut self, now: Instant) -> bool {
        let mut moved = false;
        for _ in 0..OBEY_PER_TURN_MAX {
            // The queue is empty: the control thread rings when it says more.
            let Some(command) = self.shared.commands.receive() else { break };
            self.obey_one(now, command);
            moved = true;
        }
        moved
    }

    /// Handles letters of other pollers. Returns whether there were any.
    pub(super) fn read(&mut self, now: Instant) -> bool {
        let mut moved = false;
        for _ in 0..LETTERS_PER_TURN_MAX {
            // The queue is empty, as above.
            let Some(letter) = self.mail.receive() else { break };
            match letter {
                Letter::Adopt(migrant) => self.adopt(now, migrant),
                Letter::Deliver { group, message } => self.deliver(now, group, message),
                Letter::Abort { connection } => self.abort(now, connection),
                Letter::CloseKept { connection } => self.close_kept(now, connection),
            }
            moved = true;
        }
        moved
    }

    fn obey_one(&mut self, now: Instant, command: CommandOf<F, S>) {
        match command {
            Command::AddLink { link, group, qp, activity } => {
                activity.note(now);
                let qp = self.fabric.adopt(now, qp);
                self.links.add((link, group), qp, activity, self.fabric.room(qp));
            }
            Command::SendLlc { link, message } => self.send_llc(now, link, message),
            Command::FailConnections { link } => self.fail_connections(now, link),
            Command::RetireLink { link } => {
                // If it is gone, it went by an earlier command of this kind.
                if let Some(link) = self.links.by_id(link) {
                    link.retire_by.get_or_insert(now + LAST_WORDS_WAIT);
                }
                self.retire_link(now, link);
            }
            Command::Forget { connection } => self.connections.forget(connection),
            Command::Relay { connection, established, allowance } => {
                self.admit(now, connection, *established, Pace::new(allowance));
            }
            Command::Abort { connection } => self.abort(now, connection),
            Command::FailLink { link } => self.fail_link(now, link),
            Command::MoveConnections { from, to, to_poller, keys, only } => {
                let route = Arc::new(Route::new(from, to, to_poller, keys));
                self.move_connections(now, &route, only);
            }
            Command::NextStream { connection, near, allowance } => {
                self.next_stream(now, connection, near, allowance);
            }
            Command::CloseKept { connection } => self.close_kept(now, connection),
            Command::Stop => self.stopping = true,
        }
    }

    /// Takes over a connection from the rendezvous.
    fn admit(
        &mut self,
        now: Instant,
        id: ConnectionId,
        established: Established<S::Stream>,
        pace: Pace,
    ) {
        let key = Key { slot: id.slot, generation: id.generation, far: false, turn: 0 };
        let mut watched = true;
        let (near, far) = match established {
            Established::Smc { near, link, group, rmbe, peer, streams } => {
                self.shared.counters.connections_smc.add(1);
                (near, Far::Smc(Smc::new((link, group), rmbe, peer, streams)))
            }
            Established::Tcp { near, far, from_near, from_far, declined } => {
                self.shared.counters.connections_tcp.add(1);
                watched &= self.watch(Key { far: true, ..key }, &far);
                (near, Far::Tcp(Tcp::new(far, from_near, from_far, declined)))
            }
        };
        watched &= self.watch(key, &near);
        let group = far.group();
        let parked = self.connections.insert(Box::new(Relay::new(id, near, far, pace)));
        self.shared.counters.connections.set(self.connections.busy() as u64);
        self.shared.gauges.set(id.slot, Reading::default());
        let (relay, mut turn) = self.open(now, id.slot).expect("it was just put there");
        let mut outcome = match group {
            Some(_) => relay.receive_parked(&mut turn, parked),
            None => Outcome::Moved,
        };
        if matches!(outcome, Outcome::Over) {
            // The peer has reset the connection before it began.
        } else if !watched {
            // No event would ever tell us to read its socket.
            outcome = relay.reset(&mut turn, Ending::Aborted);
        } else if group.is_some() {
            outcome = self.settle_on_link(now, id.slot);
        } else {
            // The rendezvous may have read all bytes that will ever come: then no event follows.
            turn.work.queue_fill(&mut relay.queued);
        }
        self.apply(now, id.slot, outcome);
    }

    /// Takes over a connection from a neighbour.
    fn adopt(&mut self, now: Instant, migrant: Migrant<S::Stream>) {
        let Migrant { relay } = migrant;
        let id = relay.id;
        let (slot, generation, turn) = (id.slot, id.generation, relay.turn());
        let key = Key { slot, generation, far: false, turn };
        let watched = relay.near.as_ref().is_none_or(|near| self.watch(key, &near.stream));
        self.shared.gauges.set(id.slot, relay.reading());
        let parked = self.connections.insert(relay);
        self.shared.counters.connections.set(self.connections.busy() as u64);
        self.shared.counters.connections_moved_in.add(1);
        let (relay, mut turn) = self.open(now, id.slot).expect("it was just put there");
        let mut outcome = relay.receive_parked(&mut turn, parked);
        if !matches!(outcome, Outcome::Over) {
            outcome = self.arrive(now, id.slot);
        }
        self.apply(now, id.slot, outcome);
        // The connection may have ended, or moved on to a neighbour, which watches it by itself.
        if !watched && let Some((relay, mut turn)) = self.open(now, id.slot) {
            // No event would ever tell us to read its socket.
            let outcome = relay.reset(&mut turn, Ending::Aborted);
            self.apply(now, id.slot, outcome);
        }
    }

    pub(super) fn watch(&mut self, key: Key, stream: &S::Stream) -> bool {
        let watched = self.streams.watch(key, stream).is_ok();
        self.shared.counters.watch_failures.add((!watched).into());
        watched
    }

    /// Resets a connection, or tells the neighbour that has it. It may have ended by itself.
    fn abort(&mut self, now: Instant, id: ConnectionId) {
        let (connections, mut turn) = self.lend(now);
        if let Some(relay) = connections.relay(id) {
            let outcome = relay.reset(&mut turn, Ending::Aborted);
            self.apply(now, id.slot, outcome);
            return;
        }
        match self.mail.owner_of(id) {
            None => {}
            // It is on its way to this poller, which resets it on arrival.
            Some(Owner { poller, .. }) if self.mail.is_own(poller) => {
                self.connections.expect(id).doom(Ending::Aborted);
            }
            Some(Owner { poller, .. }) => {
                self.mail.send(poller.into(), Letter::Abort { connection: id });
            }
        }
    }

    /// Begins to move connections from one link to another. Each side chooses its link itself.
    // RFC 7609 2.3 #1: treat all active links alike
    // RFC 7609 2.3 #2: each side chooses its own link
    // RFC 7609 2.3 #3: move connections of a failed link
    // RFC 7609 2.3 #12: use a link that comes back
    // RFC 7609 2.3 #13: move connections without a failure
    // RFC 7609 4.6 #1: each side switches links itself
    fn move_connections(
        &mut self,
        now: Instant,
        route: &Arc<Route>,
        only: Option<Vec<ConnectionId>>,
    ) {
        let slots: Vec<u16> = match &only {
            None => self.connections.slots().collect(),
            Some(chosen) => {
                let present = |id: &&ConnectionId| self.connections.relay(**id).is_some();
                chosen.iter().filter(present).map(|id| id.slot).collect()
            }
        };
        if only.is_none() {
            self.moves.note(Arc::clone(route));
        }
        // This loop counts as one that has not left yet, so that the link is not reported as
        // vacated when only the first connection has left.
        self.moves.stays(route);
        for slot in slots {
            // A connection that the command names twice has left already.
            let Some(relay) = self.connections.at(slot) else { continue };
            if matches!(&relay.far, Far::Smc(smc) if smc.link == route.from) {
                let outcome = self.leave(now, slot, route);
                self.apply(now, slot, outcome);
            }
        }
        self.left(route);
    }

    /// Takes a connection that has left its link to the one at the other end of `route`.
    pub(super) fn follow(&mut self, now: Instant, slot: u16, route: &Arc<Route>) -> Outcome {
        let outcome = if self.mail.is_own(route.to_poller) {
            self.arrive(now, slot)
        } else {
            self.hand_over(slot, route.to_poller);
            Outcome::Moved
        };
        self.left(route);
        outcome
    }

    fn hand_over(&mut self, slot: u16, to: u8) {
        let mut relay = self.connections.remove(slot).expect("it has just had its turn");
        if let Some(near) = &relay.near {
            self.streams.unwatch(&near.stream);
        }
        relay.queued = Queued::nowhere(slot);
        relay.pace.leave();
        self.shared.counters.connections.set(self.connections.busy() as u64);
        self.shared.counters.connections_moved_out.add(1);
        self.shared.gauges.set(slot, Reading::default());
        let (id, group) = (relay.id, relay.far.smc().group);
        self.mail.hand_over(id, group, to, Migrant { relay });
    }

    /// A connection continues here, on a link that it has not used before.
    fn arrive(&mut self, now: Instant, slot: u16) -> Outcome {
        let (relay, turn) = self.open(now, slot).expect("it has just come");
        turn.work.queue_drain(&mut relay.queued);
        turn.work.queue_fill(&mut relay.queued);
        let connection = relay.id;
        let smc = relay.far.smc();
        let (link, rkey, address) = (smc.link, smc.peer.rkey, smc.peer.address);
        self.report(Report::Moved { connection, link, rkey, address });
        self.settle_on_link(now, slot)
    }

    /// Lets a connection send on its link. If the other connections were told to leave that link
    /// meanwhile, it follows them; if the link has failed or is being retired, it ends.
    fn settle_on_link(&mut self, now: Instant, slot: u16) -> Outcome {
        let (relay, turn) = self.open(now, slot).expect("it has just come");
        let link = relay.far.smc().link;
        turn.work.queue_flush(&mut relay.queued);
        if let Some(route) = self.moves.route_from(link) {
            return self.leave(now, slot, &route);
        }
        if self.links.by_id(link).is_some_and(|link| !link.failed && link.retire_by.is_none()) {
            return Outcome::Moved;
        }
        let (relay, mut turn) = self.open(now, slot).expect("it has just come");
        relay.lose(&mut turn)
    }

    /// Tells a connection to leave its link, which it does as soon as nothing of it is outstanding.
    fn leave(&mut self, now: Instant, slot: u16, route: &Arc<Route>) -> Outcome {
        let (relay, mut turn) = self.open(now, slot).expect("whoever calls has found it");
        let smc = relay.far.smc();
        if smc.connection.is_lost() {
            return Outcome::Rests;
        }
        if route.translate(smc.peer).is_none() {
            return relay.lose(&mut turn);
        }
        let before = smc.connection.leave(Arc::clone(route));
        let outcome = relay.depart(&mut turn);
        self.moves.stays(route);
        if let Some(before) = before {
            self.left(&before);
        }
        outcome
    }

    /// Counts one less of those that were told to leave by this route, and reports the link as
    /// vacated if that was the last one.
    pub(super) fn left(&mut self, route: &Arc<Route>) {
        self.moves.left(route);
        self.report_vacated(route.from);
    }

    fn report_vacated(&mut self, link: LinkId) {
        if self.moves.is_news_that_all_left(link) {
            self.report(Report::LinkVacated { link });
        }
    }

    /// Ends every connection of a link that is lost, without telling the peer.
    fn fail_connections(&mut self, now: Instant, id: LinkId) {
        if let Some(link) = self.links.by_id(id) {
            link.failed = true;
        }
        let slots: Vec<u16> = self.connections.slots().collect();
        for slot in slots {
            let (relay, mut turn) = self.open(now, slot).expect("each can end itself only");
            if matches!(&relay.far, Far::Smc(smc) if smc.link == id) {
                let outcome = relay.lose(&mut turn);
                self.apply(now, slot, outcome);
            }
        }
    }

    /// Posts an LLC message with this turn's flush, or with the first one that has room for it. If
    /// the peer does not take in the answers that it asks for, the link is given up instead.
    fn send_llc(&mut self, now: Instant, id: LinkId, message: LlcBytes) {
        // The link may be gone: the control thread learns that from a report.
        let Some(link) = self.links.by_id(id) else { return };
        if link.llc_outstanding >= LLC_OUTSTANDING_MAX {
            self.give_up_flooded(now, id);
            return;
        }
        link.llc_outstanding += 1;
        link.llc.push_back(message);
    }

    /// Breaks the queue pair of a link that the control thread knows to be down.
    fn fail_link(&mut self, now: Instant, id: LinkId) {
        if let Some(link) = self.links.by_id(id) {
            link.broken = true;
            self.fabric.fail(now, link.qp);
        }
    }

    /// Releases the queue pair of a link that is to be retired, once its last LLC messages are
    /// delivered and everything that it received is taken in: the peer does not repeat messages
    /// that our RNIC has acknowledged.
    pub(super) fn retire_link(&mut self, now: Instant, id: LinkId) {
        // Callers ask after every event that may be the last one. Most links are not to be retired.
        let Some(link) = self.links.by_id(id) else { return };
        let Some(by) = link.retire_by else { return };
        // The wait is limited, because a peer that never takes a message also keeps our queue pair
        // from breaking.
        // RFC 7609 3.5.4 #7: clean up once DELETE LINK is sent
        if link.llc_outstanding > 0 && !link.broken && now < by {
            return;
        }
        if !link.emptied {
            self.fail_link(now, id);
            return;
        }
        // Work requests are gathered after commands and completions, and flush posts all of them.
        assert!(link.writes.is_empty() && link.sends.is_empty());
        let link = self.links.remove(id).expect("it was just found");
        self.fabric.release(now, link.qp);
        self.report(Report::LinkRetired { link: id });
    }
}

/// How long the delivery of the last LLC messages of a link may take.
const LAST_WORDS_WAIT: Duration = Duration::from_secs(2);
