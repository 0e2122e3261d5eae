//! Near socket to peer: one read, at most two RDMA writes, one announcement per turn.

use smcr_memory::{Lease, SendPool};
use smcr_proto::Instant;
use smcr_rnic::{Fabric, Work};

use super::is_reset;
use super::urgent::{ahead, note_read};
use crate::connections::{Far, Smc};
use crate::counters::{Counter, Counters};
use crate::handoff::{ConnectionId, Ending};
use crate::limits::{FILL_PER_TURN_MAX, WORK_PER_FLUSH};
use crate::links::Link;
use crate::poller::Poller;
use crate::reap::tag_of_write;
use crate::streams::{Ahead, Streams};

/// What one fill of one connection came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// Nothing to do until something changes.
    Rests,
    /// Bytes were posted. `more` may be read at once.
    Posted { more: bool },
    /// The pool or the send queue has no room; try again next turn.
    Waits,
    /// The application sends no more.
    Ended,
    /// The application, or its host, reset the connection.
    Reset,
}

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Reads sockets, and gathers the writes of what they brought.
    pub(crate) fn fill(&mut self, now: Instant) -> bool {
        let mut slots =
            std::mem::replace(&mut self.work.fill, std::mem::take(&mut self.work.current));
        let mut moved = false;
        for slot in slots.drain(..) {
            let Some(relay) = self.connections.at(slot) else { continue };
            relay.queued.fill = false;
            moved |= match &relay.far {
                Far::Tcp(_) => self.pump(now, slot),
                Far::Smc(_) => self.fill_smc(now, slot),
            };
        }
        self.work.current = slots;
        moved
    }

    fn fill_smc(&mut self, now: Instant, slot: u16) -> bool {
        if let Some(moved) = self.replay(slot) {
            return moved;
        }
        self.announce_urgent(slot);
        let mut outcome = self.read_near(slot);
        if outcome == (Outcome::Posted { more: true }) && self.is_urgent_pending(slot) {
            // The read stopped before the urgent byte: one message announces both.
            self.queue_flush(slot);
            outcome = match self.read_near(slot) {
                Outcome::Rests | Outcome::Waits => outcome,
                second @ (Outcome::Posted { .. } | Outcome::Ended | Outcome::Reset) => second,
            };
        }
        match outcome {
            Outcome::Rests => {}
            Outcome::Posted { more } => {
                self.queue_flush(slot);
                if more {
                    self.queue_fill(slot);
                }
            }
            Outcome::Waits => self.queue_fill(slot),
            Outcome::Ended => self.settle(now, slot),
            Outcome::Reset => self.reset(now, slot, Ending::ResetByApplication),
        }
        !matches!(outcome, Outcome::Rests | Outcome::Waits)
    }

    /// Reads the near socket of `slot` once, at most as much as the peer has room for.
    fn read_near(&mut self, slot: u16) -> Outcome {
        let Some(relay) = self.connections.at(slot) else { return Outcome::Rests };
        let (Some(near), Far::Smc(smc)) = (&mut relay.near, &mut relay.far) else {
            return Outcome::Rests;
        };
        if near.eof && near.failed && !near.finished {
            // No read will tell: the end of the stream was read before it broke.
            return Outcome::Reset;
        }
        if !near.readable || near.eof || smc.condemned {
            return Outcome::Rests;
        }
        if smc.peer_closed {
            return self.read_for_nobody(slot);
        }
        let window = smc.connection.window();
        if window == 0 {
            if near.failed {
                // The bytes before the error have nowhere to go, perhaps for ever.
                return Outcome::Reset;
            }
            self.ends.counters.blocked_on_peer.add(1);
            return Outcome::Rests;
        }
        let Some(link) = self.links.by_id(smc.link) else { return Outcome::Rests };
        if link.broken {
            return Outcome::Rests;
        }
        if let Some(obstacle) = obstacle(link, &self.pool, &self.ends.counters) {
            obstacle.add(1);
            return Outcome::Waits;
        }
        let Some(ahead) = ahead(&mut self.streams, near) else { return Outcome::Rests };
        let urgent = ahead == Ahead::Urgent;
        let mut room_bytes = 0;
        // RFC 7609 4.5.2-1, 4.5.2-2
        let most = if urgent { 1 } else { window.min(FILL_PER_TURN_MAX) };
        let filled = self.pool.fill(most, |room| {
            room_bytes = room.len();
            self.streams.read(&near.stream, room)
        });
        match filled {
            None => {
                self.ends.counters.blocked_on_pool.add(1);
                Outcome::Waits
            }
            Some(Err(error)) => {
                near.readable = false;
                if is_reset(&error) { Outcome::Reset } else { Outcome::Rests }
            }
            Some(Ok(None)) => {
                near.eof = true;
                Outcome::Ended
            }
            Some(Ok(Some(lease))) => {
                let len = lease.len();
                note_read(near, ahead, len as usize, room_bytes);
                // What stands behind an urgent byte waits for its consumption, not for room.
                let blocked = !urgent && len == window && self.streams.has_more(&near.stream);
                // RFC 7609 4.7.4-4, 4.7.6-4
                smc.connection.set_writer_blocked(blocked);
                relay.bytes_in += u64::from(len);
                self.ends.counters.bytes_in.add(len.into());
                self.ends.counters.rdma_out.add(len.into());
                self.ends.counters.urgent_in.add(urgent.into());
                gather(relay.id, smc, link, lease, urgent, &mut self.pool);
                Outcome::Posted { more: near.readable && smc.connection.window() > 0 }
            }
        }
    }

    /// Reads what the application sends although the peer has closed: its end, or bytes that
    /// nobody will ever read (RFC 4.8.1, 4A).
    fn read_for_nobody(&mut self, slot: u16) -> Outcome {
        let Some(relay) = self.connections.at(slot) else { return Outcome::Rests };
        let Some(near) = &mut relay.near else { return Outcome::Rests };
        match self.streams.read_slice(&near.stream, &mut self.scratch) {
            Ok(0) => {
                near.eof = true;
                Outcome::Ended
            }
            // RFC 7609 4.8.1-15
            Ok(_) => Outcome::Reset,
            Err(error) if is_reset(&error) => Outcome::Reset,
            Err(_) => {
                near.readable = false;
                Outcome::Rests
            }
        }
    }
}

/// What keeps new data from a link for now, if anything: the counter of it.
fn obstacle<'a>(link: &Link, pool: &SendPool, counters: &'a Counters) -> Option<&'a Counter> {
    if link.budget < WORK_PER_FLUSH {
        Some(&counters.blocked_on_queue)
    } else if !pool.is_fair(link.lent) {
        Some(&counters.blocked_on_share)
    } else {
        None
    }
}

/// Plans where the bytes of `lease` belong in the peer's element, and gathers the writes. If
/// `urgent`, the last byte is.
fn gather(
    id: ConnectionId,
    smc: &mut Smc,
    link: &mut Link,
    lease: Lease,
    urgent: bool,
    pool: &mut SendPool,
) {
    let connection = &mut smc.connection;
    let span = match urgent {
        // RFC 7609 4.7.5-1, 4.7.6-3
        true => connection.produce_urgent(lease.len()),
        false => connection.produce(lease.len()),
    };
    let [head, tail] = span.pieces();
    let mut write = |lease: Lease, at: u32| {
        let address = smc.peer.address.wrapping_add(at.into());
        link.lent += u64::from(lease.len());
        link.writes.push(Work::Write {
            lease,
            rkey: smc.peer.rkey,
            address,
            tag: tag_of_write(id, at),
        });
        link.budget -= 1;
        smc.outstanding += 1;
    };
    // RFC 7609 4.7.4-1
    if tail.is_empty() {
        write(lease, head.start);
    } else {
        let (first, second) = pool.split(lease, head.end - head.start);
        write(first, head.start);
        write(second, tail.start);
    }
}
