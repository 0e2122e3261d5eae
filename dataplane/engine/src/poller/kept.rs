//! Connections that carry one stream after another.

use std::sync::Arc;

use smcr_proto::Instant;
use smcr_rnic::Fabric;

use super::Poller;
use crate::allowance::Allowance;
use crate::gauges::Reading;
use crate::handoff::Report;
use crate::mail::Letter;
use crate::names::{ConnectionId, Ending};
use crate::owners::Owner;
use crate::streams::{Key, Streams};

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Takes over the socket of the next stream of a connection.
    pub(super) fn next_stream(
        &mut self,
        now: Instant,
        id: ConnectionId,
        near: S::Stream,
        allowance: Option<Arc<Allowance>>,
    ) {
        let relay = self.connections.relay(id);
        let (is_here, turn) =
            (relay.is_some(), relay.filter(|it| it.may_go_on()).map(|it| it.turn()));
        let Some(turn) = turn else {
            let moved = !is_here && self.mail.owner_of(id).is_some();
            return self.report(Report::StreamRefused { connection: id, near, moved });
        };
        let key = Key { slot: id.slot, generation: id.generation, far: false, turn };
        let watched = self.watch(key, &near);
        self.shared.counters.connections_smc.add(1);
        let (relay, mut turn) = self.open(now, id.slot).expect("it was there just now");
        let mut outcome = relay.go_on(&mut turn, near, allowance);
        if !watched {
            // No event would ever tell us to read its socket.
            outcome = relay.reset(&mut turn, Ending::Aborted);
        }
        self.apply(now, id.slot, outcome);
    }

    /// Closes a connection on which no other stream shall follow, or has the neighbour close it
    /// that has it. It may have ended by itself.
    pub(super) fn close_kept(&mut self, now: Instant, id: ConnectionId) {
        let (connections, mut turn) = self.lend(now);
        if let Some(relay) = connections.relay(id) {
            let outcome = relay.close_kept(&mut turn);
            self.apply(now, id.slot, outcome);
            return;
        }
        match self.mail.owner_of(id) {
            // It is on its way to this poller. When it has come, it is closed by another command.
            Some(Owner { poller, .. }) if self.mail.is_own(poller) => {}
            Some(Owner { poller, .. }) => {
                self.mail.send(poller.into(), Letter::CloseKept { connection: id });
            }
            None => {}
        }
    }

    /// Tells the control thread which stream of a connection has ended, and whether another one has
    /// begun.
    pub(super) fn tell_news(&mut self, slot: u16) {
        let Some(relay) = self.connections.at(slot) else { return };
        let (connection, (last, begun)) = (relay.id, relay.take_news());
        if let Some(last) = last {
            self.shared.gauges.set(slot, Reading::default());
            let (near, tally) = (last.near, last.tally);
            self.report(Report::StreamEnded { connection, tally, near });
        }
        if begun {
            self.report(Report::StreamBegun { connection });
        }
    }
}
