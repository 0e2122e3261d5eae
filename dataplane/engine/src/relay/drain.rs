//! Carries bytes from the RMB element to the near socket.

use std::io;

use super::{Far, Outcome, Relay};
use crate::allowance::Way;
use crate::names::Ending;
use crate::streams::{Streams, is_reset};
use crate::turn::{List, Turn};

impl<T> Relay<T> {
    /// Writes to the near socket what the peer has announced.
    pub(crate) fn drain(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Outcome {
        self.queued.take_out(List::Drain);
        let Far::Smc(smc) = &mut self.far else { return self.pump(turn) };
        // After a reset there is nothing to write to.
        let Some(near) = &mut self.near else { return Outcome::Rests };
        let readable = smc.connection.readable();
        if readable.is_empty() || !near.writable {
            return Outcome::Rests;
        }
        if near.finished {
            // Bytes have come behind the end of the stream. The application has already got a FIN,
            // so the stream is broken (a peer that gave up flushing does that; dialect 7).
            return self.reset(turn, Ending::PeerMisbehaved);
        }
        let granted = self.pace.grant(turn, self.id, Way::Out);
        if granted == 0 {
            return Outcome::Rests;
        }
        let before_urgent = smc.connection.urgent_position();
        if before_urgent == Some(0) {
            return self.drain_urgent(turn);
        }
        let (readable, behind) =
            readable.split_at(before_urgent.unwrap_or(readable.len()).min(granted));
        // RFC 7609 5.6 #1: carry TLS bytes unchanged
        match turn.streams.write(&near.stream, &smc.rmbe.readable(readable.pieces())) {
            Ok(written) => {
                let written = u32::try_from(written).expect("no more than was readable");
                if written < readable.len() {
                    near.writable = false;
                    turn.counters.blocked_on_socket.add(1);
                }
                self.drained(turn, written, !behind.is_empty())
            }
            Err(error) => self.not_drained(turn, &error),
        }
    }

    /// Writes the one byte that is urgent, which is the next one.
    fn drain_urgent(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Outcome {
        let smc = self.far.smc();
        let near = self.near.as_ref().expect("it is writable");
        let (first, behind) = smc.connection.readable().split_at(1);
        let mut byte = [0];
        smc.rmbe.readable(first.pieces()).copy_out(&mut byte);
        // RFC 7609 4.7.5 #2: tell application of urgent data
        // RFC 7609 4.7.5 #3: U locates the urgent byte
        match turn.streams.write_urgent(&near.stream, byte[0]) {
            Ok(()) => {
                turn.counters.urgent_out.add(1);
                // RFC 7609 4.7.5 #4: always report urgent consumption
                self.drained(turn, 1, !behind.is_empty())
            }
            Err(error) => self.not_drained(turn, &error),
        }
    }

    /// The near socket took `len` bytes. `more`: further bytes are readable, an urgent byte or
    /// those behind it.
    fn drained(
        &mut self,
        turn: &mut Turn<'_, impl Streams<Stream = T>>,
        len: u32,
        more: bool,
    ) -> Outcome {
        self.far.smc().connection.consume(len);
        self.tally.count_out(turn.now, len.into());
        self.pace.charge(turn.now, &mut turn.work.paced, Way::Out, len.into());
        turn.counters.bytes_out.add(len.into());
        let (written, stages) = ((self.id, self.carried_out()), &turn.counters.stages);
        turn.sampler.written(written, stages, || turn.streams.time(turn.now));
        turn.work.queue_flush(&mut self.queued);
        if more {
            turn.work.queue_drain(&mut self.queued);
        }
        self.settle(turn)
    }

    /// The near socket took nothing.
    fn not_drained(
        &mut self,
        turn: &mut Turn<'_, impl Streams<Stream = T>>,
        error: &io::Error,
    ) -> Outcome {
        let near = self.near.as_mut().expect("it was written to");
        near.writable = false;
        if is_reset(error) {
            if near.eof {
                return self.reset(turn, Ending::ResetByApplication);
            }
            // What the application has sent before comes first. There may be no event to read it: a
            // Unix socket fails without one.
            near.note_error(error);
            turn.work.queue_fill(&mut self.queued);
            return Outcome::Moved;
        }
        turn.counters.blocked_on_socket.add(1);
        Outcome::Moved
    }
}
