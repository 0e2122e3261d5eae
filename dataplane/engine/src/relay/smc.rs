//! SMC-R as the far side of a relay.

use std::sync::Arc;
use std::time::Duration;

use smcr_memory::{Lease, Rmbe, SendPool};
use smcr_proto::Instant;
use smcr_proto::connection::{
    CLOSE_WAIT, Connection, ConnectionSetup, Half, Progress, State, Streams,
};
use smcr_proto::error::PeerMisbehaved;
use smcr_proto::ring::Ring;
use smcr_proto::wire::cdc::Cdc;
use smcr_rnic::Work;

use super::between::Between;
use super::dormancy::Dormancy;
use super::held::{Held, hold};
use super::kept::Kept;
use super::route::Route;
use crate::links::Link;
use crate::names::{ConnectionId, Ending, GroupId, LinkId, PeerElement};
use crate::parked::Waiting;
use crate::requests::Request;

/// SMC-R as the far side.
#[derive(Debug)]
pub(crate) struct Smc {
    pub(crate) link: LinkId,
    /// Only links of this group may bring messages about it.
    pub(crate) group: GroupId,
    pub(crate) connection: Connection<Arc<Route>>,
    pub(crate) rmbe: Rmbe,
    pub(crate) peer: PeerElement,
    /// Work requests that have not completed. The slot cannot be reused before they have.
    pub(crate) outstanding: u32,
    /// Bytes that the peer may not know of. After a change of link they are written again.
    pub(crate) kept: Kept,
    /// CDC messages that must wait until earlier ones were taken in.
    pub(crate) held: Option<Held>,
    /// Until when we hold back the end of the stream, because the peer may still have bytes.
    pub(crate) late_until: Option<Instant>,
    /// Until when the last bytes of a program that has reset its connection wait for room.
    pub(crate) room_until: Option<Instant>,
    pub(super) dormancy: Dormancy,
    pub(super) between: Between,
}

impl Smc {
    /// A connection that has carried nothing yet.
    pub(crate) fn new(
        (link, group): (LinkId, GroupId),
        rmbe: Rmbe,
        peer: PeerElement,
        streams: Streams,
    ) -> Self {
        let connection = Connection::new(ConnectionSetup {
            peer_token: peer.token,
            element: Ring::new(rmbe.capacity()),
            peer_element: peer.ring,
            close_wait: CLOSE_WAIT,
            streams,
        });
        Self {
            link,
            group,
            connection,
            rmbe,
            peer,
            outstanding: 0,
            kept: Kept::default(),
            held: None,
            late_until: None,
            room_until: None,
            dormancy: Dormancy::default(),
            between: Between::default(),
        }
    }

    /// Takes in a CDC message, and notes which bytes of our element the peer has written.
    pub(super) fn take_in(&mut self, now: Instant, cdc: &Cdc) -> Result<Progress, PeerMisbehaved> {
        let progress = self.connection.handle_cdc(now, cdc)?;
        if progress.readable_bytes > 0 {
            let [head, tail] = self.connection.readable().pieces();
            self.rmbe.touch(head);
            self.rmbe.touch(tail);
            self.late_until = None;
        }
        if progress.peer_closed {
            // RFC 7609 4.8.1 #12: write nothing after C
            self.forget_replay();
        }
        Ok(progress)
    }

    /// Keeps a message if it came too early. Returns whether it did.
    pub(super) fn holds(&mut self, now: Instant, waiting: Waiting) -> bool {
        hold(&mut self.held, &self.connection, now, waiting)
    }

    /// Whether everything that held messages wait for has come.
    pub(super) fn is_gap_filled(&self) -> bool {
        self.held.as_ref().is_some_and(|held| self.connection.is_gap_filled(held.first()))
    }

    /// Why the connection must be reset instead of waiting any longer, if it must.
    pub(super) fn doomed(&self) -> Option<Ending> {
        self.held.as_ref().and_then(|held| held.messages.doomed())
    }

    /// Whether the peer may write behind the end that it has announced. Call it when everything
    /// received has been read; the first call starts a short wait for late bytes.
    pub(super) fn has_late_bytes(&mut self, now: Instant) -> bool {
        self.connection.is_peer_blocked()
            && now < *self.late_until.get_or_insert(now + LATE_BYTES_WAIT)
    }

    /// Decides where the bytes of `lease` belong in the peer's element, and queues their RDMA
    /// writes. If `urgent`, the last byte is urgent.
    pub(super) fn gather(
        &mut self,
        id: ConnectionId,
        link: &mut Link,
        lease: Lease,
        urgent: bool,
        pool: &mut SendPool,
    ) {
        let span = match urgent {
            // RFC 7609 4.7.5 #1: P and U announce urgent data
            // RFC 7609 4.7.6 #3: send urgent data when window opens
            true => self.connection.produce_urgent(lease.len()),
            false => self.connection.produce(lease.len()),
        };
        let [head, tail] = span.pieces();
        // RFC 7609 4.7.4 #1: write wrapped data in two pieces
        if tail.is_empty() {
            link.lend(&lease);
            self.write(link, lease, head.start, Request::Write(id));
        } else {
            let (first, second) = pool.split(lease, head.end - head.start);
            link.lend(&first);
            link.lend(&second);
            self.write(link, first, head.start, Request::Write(id));
            self.write(link, second, tail.start, Request::Write(id));
        }
    }

    /// Queues one RDMA write, `at` bytes behind the beginning of the peer's element.
    pub(super) fn write(&mut self, link: &mut Link, lease: Lease, at: u32, request: Request) {
        let address = self.peer.address.wrapping_add(at.into());
        let (rkey, tag) = (self.peer.rkey, request.tag());
        link.writes.push(Work::Write { lease, rkey, address, tag });
        link.budget -= 1;
        self.outstanding += 1;
    }

    /// Drops the bytes that would have to be written again: nobody would read them.
    pub(super) fn forget_replay(&mut self) {
        self.connection.forget_replay();
        self.kept.forget_copies();
    }

    /// Notes that no link is left.
    pub(super) fn lose(&mut self) {
        self.connection.lose();
        self.kept.forget_copies();
        self.touch_all();
    }

    /// Notes that the peer may have written to all of our element.
    pub(super) fn touch_all(&mut self) {
        self.rmbe.touch_all();
    }

    /// Moves the connection to another link, and returns the route. Takes along the bytes that must
    /// be written again there, if they are `wanted`: after a reset they are not.
    pub(super) fn depart(&mut self, wanted: bool, pool: &mut SendPool) -> Arc<Route> {
        // After a reset nobody reads the bytes. A peer that has closed has taken in all that it
        // wanted, and its element may belong to another connection by now.
        // RFC 7609 4.8.1 #12: write nothing after C
        if !wanted || self.connection.has_peer_said(Half::Closed) {
            self.kept.release(pool);
        }
        // RFC 7609 4.6.1 #1: always validate at failover
        // RFC 7609 4.6.1 #4: F message first on new link
        // RFC 7609 2.3 #7: send failover validation first
        let (route, lost) = self.connection.depart(self.kept.len());
        self.kept.copy_last(lost, pool);
        self.peer = route.translate(self.peer).expect("checked when it was told to leave");
        self.link = route.to;
        route
    }

    /// Whether all bytes that were written have arrived and were announced, so that none of them
    /// will ever be written again.
    pub(super) fn is_delivered(&self) -> bool {
        self.outstanding == 0 && !self.connection.is_leaving() && self.kept.is_empty()
    }

    /// Whether the peer has promised to write our element no more, and no earlier write of it can
    /// still come: on a link that it has left, or late because it had no window.
    pub(crate) fn is_settled(&self) -> bool {
        let promised = self.connection.has_peer_left() && !self.connection.is_lost();
        promised && !self.connection.has_peer_moved() && !self.connection.is_peer_blocked()
    }

    /// Closes the connection if the peer has closed it between two streams. Returns whether the
    /// peer is to be told.
    pub(super) fn close_after_peer(&mut self, now: Instant, has_near: bool) -> bool {
        let is_due = !has_near && self.between.is_kept && !self.connection.is_lost();
        is_due
            && self.connection.state() == State::AppFinCloseWait
            && self.connection.readable().is_empty()
            && self.connection.close(now)
    }

    /// Whether no further message will be sent, and no work request is outstanding.
    pub(super) fn is_over(&self) -> bool {
        // The peer must have got our last message, or it could write to our element when another
        // connection has it.
        let settled = self.connection.is_closed() && self.connection.is_heard();
        // RFC 7609 4.8.2 #13: no reuse while peer may write
        (self.connection.is_lost() || settled) && self.outstanding == 0
    }
}

/// How long the end of a stream waits for bytes that the peer could not write before it. A Linux
/// peer ends a stream after two seconds without window, and writes the rest when our update opens
/// it: a round trip later, or as late as any of its answers. A peer also sets B when its last bytes
/// just fit; then the wait is in vain.
const LATE_BYTES_WAIT: Duration = Duration::from_secs(2);
