//! What is said of connections that are over: in the access log, and in the figures of their
//! listeners.

use std::net::SocketAddr;

use smcr_engine::handoff::{Ending, Tally};
use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::Gateway;
use crate::access_log::{Record, first_byte};
use crate::rendezvous::Why;
use crate::sessions::{Negotiating, Open};
use crate::termination::Termination;

impl<N: Rnic> Gateway<N> {
    /// A connection at listener `index` was refused as soon as it was accepted.
    pub(super) fn turned_away(
        &mut self,
        now: Instant,
        index: u16,
        source: Option<SocketAddr>,
        end: Termination,
    ) {
        self.listeners[usize::from(index)].refused += 1;
        self.note_turned_away(now, index, source, end);
    }

    /// The same, where that does not count as refused.
    pub(super) fn note_turned_away(
        &mut self,
        now: Instant,
        index: u16,
        source: Option<SocketAddr>,
        end: Termination,
    ) {
        let name = &self.listeners[usize::from(index)].config.name;
        self.access_log.ended(end, || Record::turned_away(now, name, source, end));
    }

    /// A rendezvous has failed.
    pub(super) fn note_failed(&mut self, now: Instant, one: &Negotiating, why: Why) {
        let is_stopped = why == Why::Aborted && self.draining.is_some();
        let end = if is_stopped { Termination::Stopped } else { why.into() };
        let name = &self.listeners[usize::from(one.listener)].config.name;
        self.access_log.ended(end, || Record::failed(now, name, one, end));
    }

    /// A poller has closed a connection.
    pub(super) fn note_closed(&mut self, now: Instant, open: &Open, ending: Ending, tally: &Tally) {
        let listener = &mut self.listeners[usize::from(open.listener)];
        let end = Termination::of(ending, open.cut);
        let by = end.by_of(open.accepts, ending, tally);
        let (whole, first_byte) = (now.since(open.came), first_byte(open, tally));
        listener.durations.record(open.transport.name(), whole, first_byte);
        let name = &listener.config.name;
        self.access_log.ended(end, || Record::closed(now, name, open, tally, (end, by)));
    }
}
