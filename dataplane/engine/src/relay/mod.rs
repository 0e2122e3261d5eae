//! A connection: a socket and SMC-R, or two sockets, both directions.
//!
//! `fill` carries bytes away from the near socket, `drain` towards it, and [`settle`] ends what has
//! ended: FIN becomes D, both FINs become C, RST becomes A, and back. Urgent bytes keep their place
//! in the stream and their urgency (see `urgent`).
//!
//! [`settle`]: Poller::settle

pub(crate) mod crossing;
mod drain;
mod fill;
mod replay;
mod tcp;
mod urgent;

use std::collections::VecDeque;
use std::time::Duration;

use smcr_memory::Rmbe;
use smcr_proto::Instant;
use smcr_proto::connection::{CLOSE_WAIT, Connection, Progress, Setup};
use smcr_proto::error::PeerMisbehaved;
use smcr_proto::ring::Ring;
use smcr_proto::wire::cdc::Cdc;
use smcr_rnic::Fabric;

use crate::connections::{Far, Retained, Smc};
use crate::handoff::{Ending, GroupId, LinkId, PeerElement, Report};
use crate::poller::Poller;
use crate::streams::Streams;

impl Smc {
    /// A connection that has carried nothing yet.
    pub(crate) fn new((link, group): (LinkId, GroupId), rmbe: Rmbe, peer: PeerElement) -> Self {
        let connection = Connection::new(Setup {
            peer_token: peer.token,
            element: Ring::new(rmbe.capacity()),
            peer_element: peer.ring,
            close_wait: CLOSE_WAIT,
        });
        Self {
            link,
            group,
            connection,
            rmbe,
            peer,
            outstanding: 0,
            retained: VecDeque::new(),
            replay: VecDeque::new(),
            repeated: VecDeque::new(),
            moving: None,
            unheard: false,
            held: None,
            condemned: false,
            peer_moved: false,
            said_done: false,
            said_closed: false,
            peer_done: false,
            peer_closed: false,
            late_until: None,
        }
    }

    /// Takes in a CDC message, and notes which bytes of our element the peer has written.
    pub(crate) fn receive(&mut self, now: Instant, cdc: &Cdc) -> Result<Progress, PeerMisbehaved> {
        let progress = self.connection.handle_cdc(now, cdc)?;
        self.peer_moved |= cdc.failover_validation;
        if progress.readable_bytes > 0 {
            let [head, tail] = self.connection.readable().pieces();
            self.rmbe.touch(head.end.max(tail.end));
            self.late_until = None;
        }
        if progress.peer_closed {
            // RFC 7609 4.8.1-12
            self.forget_replay();
        }
        self.peer_done |= progress.peer_done;
        self.peer_closed |= progress.peer_closed;
        Ok(progress)
    }

    /// Whether the peer may write behind the end that it has announced. Asked when all is read that
    /// has come; from then on it has a moment.
    fn has_late_bytes(&mut self, now: Instant) -> bool {
        self.connection.is_peer_blocked()
            && now < *self.late_until.get_or_insert(now + LATE_BYTES_WAIT)
    }

    /// Nothing need be written again.
    fn forget_replay(&mut self) {
        self.replay.clear();
        self.repeated.clear();
    }

    /// Whether all that was written has arrived and was announced, so that nothing of it will ever
    /// be written again.
    fn is_delivered(&self) -> bool {
        let kept = self.retained.len() + self.replay.len() + self.repeated.len();
        self.outstanding == 0 && self.moving.is_none() && kept == 0
    }

    /// Whether the peer has promised to write our element no more, and cannot break that promise
    /// by what is still under way: on a link that was left, or because it had no window.
    fn is_settled(&self) -> bool {
        let promised = self.connection.has_peer_left() && !self.condemned;
        promised && !self.peer_moved && !self.connection.is_peer_blocked()
    }

    /// Nothing more will be said, and nothing is on its way.
    fn is_over(&self) -> bool {
        // The peer must have heard the last word, or it would write to an element in other hands.
        let settled = self.connection.is_closed() && !self.unheard;
        // RFC 7609 4.8.2-13
        (self.condemned || settled) && self.outstanding == 0
    }
}

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Acts on what a CDC message brought to the connection in `slot`.
    pub(crate) fn progress(&mut self, now: Instant, slot: u16, progress: Progress) {
        self.ends.counters.rdma_in.add(progress.readable_bytes.into());
        if progress.reset {
            self.reset(now, slot, Ending::ResetByPeer);
            return;
        }
        // RFC 7609 4.7.1-2
        if progress.readable_bytes > 0 {
            self.queue_drain(slot);
        }
        // RFC 7609 4.7.4-8
        if progress.writable_bytes > 0 || progress.peer_closed {
            self.queue_fill(slot);
        }
        // An update may be owed, or our own close may have been waiting for this message.
        self.queue_flush(slot);
        self.settle(now, slot);
    }

    /// Ends what has ended. Called after anything that may have been the last of its kind.
    pub(crate) fn settle(&mut self, now: Instant, slot: u16) {
        let Some(relay) = self.connections.at(slot) else { return };
        let Far::Smc(smc) = &mut relay.far else { return };
        let mut speaks = false;
        if let Some(near) = &mut relay.near
            && !smc.condemned
        {
            let drained = smc.connection.readable().is_empty();
            if smc.peer_done && drained && !near.finished && !smc.has_late_bytes(now) {
                // RFC 7609 4.8.1-9, 4.8.1-14
                self.streams.finish(&near.stream);
                near.finished = true;
            }
            // Only a FIN ends a direction: that an application reads no more (SHUT_RD) stays with
            // its kernel, until a byte comes that nobody reads.
            // RFC 7609 4.8.1-6, 4.8.1-25
            if near.eof && !smc.said_done {
                smc.said_done = true;
                smc.connection.shutdown_write();
                speaks = true;
            }
            // The peer may free its element when it hears C: no byte may be left to be written
            // again, whatever becomes of the link. D needs no such care, as it comes behind its
            // bytes and frees nothing.
            // RFC 7609 4.8.1-4, 4.8.1-12
            if near.is_done() && drained && !smc.said_closed && smc.is_delivered() {
                smc.said_closed = true;
                smc.connection.close(now);
                speaks = true;
            }
        }
        if smc.is_over() {
            self.retire(slot);
        } else if speaks {
            self.queue_flush(slot);
        }
    }

    /// Resets the connection in `slot` on both sides.
    pub(crate) fn reset(&mut self, now: Instant, slot: u16, ending: Ending) {
        let Some(relay) = self.connections.at(slot) else { return };
        relay.ending.get_or_insert(ending);
        // RFC 7609 4.4.2-5, 4.8.2-5, 4.8.2-8, 4.8.2-9, A.4-24
        if let Some(near) = relay.near.take()
            // Who has said and heard the end of both directions has lost nothing.
            && !near.is_done()
        {
            self.streams.reset_on_close(&near.stream);
        }
        match &mut relay.far {
            Far::Smc(smc) => {
                // After a reset nothing bounds what the peer may still write of its window.
                let capacity = smc.rmbe.capacity();
                smc.rmbe.touch(capacity);
                smc.forget_replay();
                // RFC 7609 4.4.2-4, 4.8.2-1
                smc.connection.abort(now);
                self.queue_flush(slot);
                self.settle(now, slot);
            }
            Far::Tcp(tcp) => {
                self.streams.reset_on_close(&tcp.socket.stream);
                self.retire(slot);
            }
        }
    }

    /// Ends every connection of a link that is lost, without a word to the peer.
    pub(crate) fn fail_connections(&mut self, now: Instant, link: LinkId) {
        if let Some(link) = self.links.by_id(link) {
            link.failed = true;
        }
        let slots: Vec<u16> = self.connections.slots().collect();
        for slot in slots {
            let Some(relay) = self.connections.at(slot) else { continue };
            if matches!(&relay.far, Far::Smc(smc) if smc.link == link) {
                self.condemn(now, slot);
            }
        }
    }

    /// Ends a connection that has no link, without a word to the peer.
    pub(crate) fn condemn(&mut self, now: Instant, slot: u16) {
        let Some(relay) = self.connections.at(slot) else { return };
        let Far::Smc(smc) = &mut relay.far else { return };
        // RFC 7609 4.8.3-3
        smc.condemned = true;
        smc.forget_replay();
        let capacity = smc.rmbe.capacity();
        smc.rmbe.touch(capacity);
        relay.ending.get_or_insert(Ending::LinkLost);
        if let Some(near) = relay.near.take()
            && !near.is_done()
        {
            self.streams.reset_on_close(&near.stream);
        }
        self.settle(now, slot);
    }

    /// Looks after the timers of the connection in `slot`. Returns whether one has run out.
    pub(crate) fn expire_connection(&mut self, now: Instant, slot: u16) -> bool {
        let Some(relay) = self.connections.at(slot) else { return false };
        self.ends.gauges.set(slot, relay.reading());
        let smc = match &mut relay.far {
            Far::Smc(smc) => smc,
            Far::Tcp(tcp) => {
                let due = tcp.sieve.as_ref().is_some_and(|sieve| sieve.is_due(now));
                if due {
                    self.queue_fill(slot);
                }
                return due;
            }
        };
        if smc.held.as_ref().is_some_and(|held| held.until <= now) {
            self.release_held(now, slot);
            return true;
        }
        let waits = relay.near.as_ref().is_some_and(|near| !near.finished);
        if waits && smc.late_until.is_some_and(|until| until <= now) {
            self.settle(now, slot);
            return true;
        }
        let given_up = smc.connection.handle_timeout(now);
        if given_up {
            smc.unheard = false;
            // Given up: nobody may write our element any more, or so RFC 4.8.1 has it.
            // RFC 7609 4.8.2-2
            let capacity = smc.rmbe.capacity();
            smc.rmbe.touch(capacity);
            relay.ending.get_or_insert(Ending::Stalled);
            self.settle(now, slot);
        }
        given_up
    }

    /// Frees the slot and tells the control thread.
    pub(crate) fn retire(&mut self, slot: u16) {
        let Some(relay) = self.connections.remove(slot) else { return };
        let counters = &self.ends.counters;
        counters.connections.set(self.connections.busy() as u64);
        let ending = relay.ending.unwrap_or(Ending::Graceful);
        match ending {
            Ending::Graceful | Ending::Aborted => {}
            Ending::ResetByApplication => counters.resets_application.add(1),
            Ending::ResetByPeer | Ending::PeerMisbehaved => counters.resets_peer.add(1),
            Ending::DataLost => counters.resets_data_lost.add(1),
            Ending::LinkLost => counters.resets_link.add(1),
            Ending::Stalled => counters.closes_stalled.add(1),
        }
        let (rmbe, settled, far) = match relay.far {
            Far::Smc(smc) => {
                let settled = smc.is_settled();
                for Retained { lease, .. } in smc.retained {
                    self.pool.take_back(lease);
                }
                if let Some(order) = smc.moving {
                    self.has_left(&order);
                }
                (Some(smc.rmbe), settled, None)
            }
            Far::Tcp(tcp) => {
                self.backlog_bytes -= tcp.held;
                (None, true, Some(tcp.socket.stream))
            }
        };
        self.report(Report::Closed {
            connection: relay.id,
            ending,
            bytes_in: relay.bytes_in,
            bytes_out: relay.bytes_out,
            rmbe,
            settled,
            streams: [relay.near.map(|near| near.stream), far],
        });
    }
}

/// How long the end of a stream waits for bytes that the peer could not write before it. A Linux
/// peer ends a stream after two seconds without window, and writes the rest when our update opens
/// it: a round trip later, or as late as any of its answers. B is also said when the last bytes
/// just fit; then this is lost time.
const LATE_BYTES_WAIT: Duration = Duration::from_secs(2);

/// What an error on a socket means: nothing to read or write now, or the end of the connection.
pub(crate) fn is_reset(error: &std::io::Error) -> bool {
    use std::io::ErrorKind as E;
    !matches!(error.kind(), E::WouldBlock | E::Interrupted)
}
