//! Carries bytes from the near socket to the peer. A read causes at most two RDMA writes, and one
//! CDC message per turn announces them.

use std::time::Duration;

use smcr_proto::connection::{Failover, Half};

use super::socket::Socket;
use super::urgent::{ahead, note_read};
use super::{Far, Outcome, Relay};
use crate::allowance::Way;
use crate::limits::FILL_PER_TURN_MAX;
use crate::links::Obstacle;
use crate::names::Ending;
use crate::streams::{Ahead, Streams, is_reset};
use crate::turn::{List, Turn};

/// The outcome of one read of the near socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Filled {
    /// Nothing to do until something changes.
    Rests,
    /// Bytes were posted. `more` may be read at once.
    Posted { more: bool },
    /// The link takes no more for now.
    Waits(Obstacle),
    /// The application sends no more.
    Ended,
    /// The application, or its host, reset the connection.
    Reset,
}

impl<T> Relay<T> {
    /// Reads the near socket, and queues RDMA writes of the bytes for the flush of this turn.
    pub(crate) fn fill(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Outcome {
        self.queued.take_out(List::Fill);
        let Far::Smc(smc) = &mut self.far else { return self.pump(turn) };
        match smc.connection.failover() {
            Failover::Flowing | Failover::Repeating => {}
            Failover::Replaying { .. } => {
                let posted = smc.replay(self.id, turn);
                let link = turn.links.by_id(smc.link).filter(|_| posted == Some(0));
                if let Some(obstacle) = link.and_then(|link| link.obstacle(turn.pool)) {
                    // Like others: whoever asked in every turn would have the room before them.
                    self.wait_for_link(turn, obstacle);
                    return Outcome::Rests;
                }
                if posted.is_some() {
                    // More bytes to write again or new ones follow, then the message about them.
                    turn.work.queue_fill(&mut self.queued);
                    turn.work.queue_flush(&mut self.queued);
                }
                return if posted.is_some() { Outcome::Moved } else { Outcome::Rests };
            }
            // It may write again on the new link, after the message with the F flag.
            Failover::Leaving { .. } | Failover::Validating { .. } | Failover::Lost { .. } => {
                return Outcome::Rests;
            }
        }
        if self.near.as_ref().is_some_and(|near| near.urgent) {
            // The peer learns of the urgent byte before there is room to write it.
            // RFC 7609 4.7.6 #1: P alone while window is closed
            smc.connection.announce_urgent();
            turn.work.queue_flush(&mut self.queued);
        }
        let mut filled = self.read_near(turn);
        if filled == (Filled::Posted { more: true })
            && self.near.as_ref().is_some_and(Socket::is_worth_another_read)
        {
            filled = self.read_on(turn);
        }
        match filled {
            Filled::Rests => return Outcome::Rests,
            Filled::Posted { more } => {
                turn.sampler.read(turn.now, self.id, || turn.streams.time(turn.now));
                turn.work.queue_flush(&mut self.queued);
                if more {
                    turn.work.queue_fill(&mut self.queued);
                }
            }
            Filled::Waits(obstacle) => {
                self.wait_for_link(turn, obstacle);
                return Outcome::Rests;
            }
            Filled::Ended => {
                if self.near.as_ref().is_some_and(|near| near.failed) {
                    // The peer hears of the end first, then of the error behind it.
                    turn.work.queue_fill(&mut self.queued);
                }
                return self.settle(turn);
            }
            Filled::Reset => return self.reset(turn, Ending::ResetByApplication),
        }
        Outcome::Moved
    }

    /// Waits until the link takes more, and counts that once.
    fn wait_for_link<S>(&mut self, turn: &mut Turn<'_, S>, obstacle: Obstacle) {
        let link = self.far.smc().link;
        if let Some(slot) = self.queued.wait_for(link) {
            turn.links.wait_for(link, slot);
            match obstacle {
                Obstacle::Queue => turn.counters.blocked_on_queue.add(1),
                Obstacle::Share => turn.counters.blocked_on_share.add(1),
                Obstacle::Pool => turn.counters.blocked_on_pool.add(1),
            }
        }
    }

    /// Reads the near socket once more after a read that stopped before an urgent byte, or before
    /// the end of the stream: one message announces both.
    fn read_on(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Filled {
        match self.read_near(turn) {
            Filled::Ended => {
                turn.sampler.read(turn.now, self.id, || turn.streams.time(turn.now));
                turn.work.queue_flush(&mut self.queued);
                Filled::Ended
            }
            Filled::Reset => {
                // A peer throws away what an abort comes with, so the bytes leave first. No other
                // read will report the error.
                let near = self.near.as_mut().expect("it was read");
                (near.failed, near.readable, near.told) = (true, true, true);
                Filled::Posted { more: true }
            }
            Filled::Rests | Filled::Waits(_) => Filled::Posted { more: true },
            posted @ Filled::Posted { .. } => posted,
        }
    }

    /// How many bytes may be read of the near socket now.
    ///
    /// # Errors
    ///
    /// What has happened instead.
    #[inline]
    fn may_read(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Result<u32, Filled> {
        let smc = self.far.smc();
        // After a reset there is nothing to read from.
        let Some(near) = &mut self.near else { return Err(Filled::Rests) };
        if near.eof && near.failed && !near.finished {
            // No read will report the error: the end of the stream was read before the socket
            // broke.
            return Err(Filled::Reset);
        }
        if near.eof && !near.finished && turn.streams.is_to_reset(&near.stream) {
            return Err(Filled::Reset);
        }
        if !near.readable || near.eof {
            return Err(Filled::Rests);
        }
        if smc.connection.has_peer_said(Half::Closed) {
            return Err(self.read_for_nobody(turn));
        }
        let window = smc.connection.window();
        if window == 0 {
            // The peer has no room for the bytes before the reset, and may never have.
            if near.failed && smc.room_until.is_none_or(|until| until <= turn.now) {
                return Err(Filled::Reset);
            }
            if !near.finished && turn.streams.is_to_reset(&near.stream) {
                // No error tells of this one: it is that of a program's socket.
                let until = *smc.room_until.get_or_insert(turn.now + ROOM_WAIT);
                if until <= turn.now {
                    return Err(Filled::Reset);
                }
            }
            turn.counters.blocked_on_peer.add(1);
            return Err(Filled::Rests);
        }
        let granted = self.pace.grant(turn, self.id, Way::In);
        match window.min(FILL_PER_TURN_MAX).min(granted) {
            // The error is behind its bytes, which would have to wait.
            0 if near.failed => Err(Filled::Reset),
            0 => Err(Filled::Rests),
            most => Ok(most),
        }
    }

    /// Reads the near socket once, at most as much as the peer has room for.
    fn read_near(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Filled {
        let most = match self.may_read(turn) {
            Ok(most) => most,
            Err(instead) => return instead,
        };
        let (smc, near) = (self.far.smc(), self.near.as_mut().expect("it may be read"));
        let window = smc.connection.window();
        // A broken link takes no work requests; its connections wait until they are moved or ended.
        let Some(link) = turn.links.by_id(smc.link).filter(|link| !link.broken) else {
            return Filled::Rests;
        };
        if let Some(obstacle) = link.obstacle(turn.pool) {
            return Filled::Waits(obstacle);
        }
        // The event that made it readable has been served by an earlier read.
        let Some(ahead) = ahead(turn.streams, near) else { return Filled::Rests };
        let urgent = ahead == Ahead::Urgent;
        let mut room_bytes = 0;
        // RFC 7609 4.5.2 #1: send at once, whatever the size
        // RFC 7609 4.5.2 #2: combine small sends
        let most = if urgent { 1 } else { most };
        let filled = turn.pool.fill(most, |room| {
            room_bytes = room.len();
            turn.streams.read(&near.stream, room)
        });
        match filled.expect("without an obstacle, the pool has room") {
            Err(error) => {
                near.readable = false;
                if is_reset(&error) { Filled::Reset } else { Filled::Rests }
            }
            Ok(None) if near.told || turn.streams.is_to_reset(&near.stream) => Filled::Reset,
            Ok(None) => {
                near.eof = true;
                Filled::Ended
            }
            Ok(Some(lease)) => {
                let len = lease.len();
                note_read(near, ahead, len as usize, room_bytes);
                // Bytes behind an urgent byte wait until the peer has consumed that byte, not for
                // window.
                let waits = !urgent && len == window && turn.streams.has_more(&near.stream);
                // RFC 7609 4.7.4 #4: set B when bytes are left
                // RFC 7609 4.7.6 #4: clear B when nothing waits
                smc.connection.set_bytes_waiting(waits);
                self.tally.count_in(turn.now, len.into());
                self.pace.charge(turn.now, &mut turn.work.paced, Way::In, len.into());
                turn.counters.bytes_in.add(len.into());
                turn.counters.rdma_out.add(len.into());
                turn.counters.urgent_in.add(urgent.into());
                smc.gather(self.id, link, lease, urgent, turn.pool);
                let has_room = smc.connection.window() > 0;
                let waits_for_room = near.failed && !has_room;
                smc.room_until = waits_for_room.then_some(turn.now + ROOM_WAIT);
                Filled::Posted { more: near.readable && has_room }
            }
        }
    }

    /// Reads what the application sends although the peer has closed: its end, or bytes that
    /// nobody will ever read (RFC 4.8.1, 4A).
    fn read_for_nobody(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Filled {
        let near = self.near.as_mut().expect("it is readable");
        match turn.streams.read_slice(&near.stream, turn.scratch) {
            Ok(0) if near.told => Filled::Reset,
            Ok(0) => {
                near.eof = true;
                Filled::Ended
            }
            // RFC 7609 4.8.1 #15: reset if C meets pending data
            Ok(_) => Filled::Reset,
            Err(error) if is_reset(&error) => Filled::Reset,
            Err(_) => {
                near.readable = false;
                Filled::Rests
            }
        }
    }
}

/// How long the last bytes of a program that has reset its connection wait for room, behind bytes
/// that took the last of it. Whoever reads all the time makes room long before. Of others the last
/// bytes are lost, as TCP may lose what a reset overtakes: where nobody reads, it must not wait.
const ROOM_WAIT: Duration = Duration::from_millis(250);
