//! Carries bytes between two sockets.

use super::tcp::Reset;
use super::{Far, Outcome, Relay};
use crate::allowance::Way;
use crate::names::Ending;
use crate::streams::Streams;
use crate::turn::Turn;

impl<T> Relay<T> {
    /// Carries bytes both ways between two sockets.
    pub(super) fn pump(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Outcome {
        let Far::Tcp(tcp) = &mut self.far else { panic!("whoever calls has looked") };
        let near = self.near.as_mut().expect("a relay of two sockets that was reset is gone");
        let ways = [(Way::In, &*near, &tcp.socket), (Way::Out, &tcp.socket, &*near)];
        let mut is_cut_off = false;
        let most = ways.map(|(way, source, target)| {
            // Nobody waits for what cannot be carried anyway.
            if !source.readable || source.eof || !target.writable {
                return u32::MAX;
            }
            let granted = self.pace.grant(turn, self.id, way);
            // The error is behind bytes that would have to wait.
            is_cut_off |= source.failed && granted == 0;
            granted
        });
        let pumped = if is_cut_off { Err(Reset) } else { tcp.pump(near, turn, most) };
        let Ok([outbound, inbound]) = pumped else {
            self.tally.note_reset(near.failed, tcp.socket.failed);
            return self.reset(turn, Ending::ResetByApplication);
        };
        self.pace.charge(turn.now, &mut turn.work.paced, Way::In, outbound.bytes);
        self.pace.charge(turn.now, &mut turn.work.paced, Way::Out, inbound.bytes);
        self.tally.note_ends(near.eof, tcp.socket.eof);
        self.tally.count_in(turn.now, outbound.bytes);
        self.tally.count_out(turn.now, inbound.bytes);
        turn.counters.bytes_in.add(outbound.bytes);
        turn.counters.bytes_out.add(inbound.bytes);
        let urgent = u64::from(outbound.urgent) + u64::from(inbound.urgent);
        turn.counters.urgent_in.add(urgent);
        turn.counters.urgent_out.add(urgent);
        if near.is_done() && tcp.socket.is_done() {
            return Outcome::Over;
        }
        let goes_on = |more: bool, way| more && !self.pace.waits(way);
        if goes_on(outbound.more, Way::In) || goes_on(inbound.more, Way::Out) {
            turn.work.queue_fill(&mut self.queued);
        }
        match outbound.bytes + inbound.bytes {
            0 => Outcome::Rests,
            1.. => Outcome::Moved,
        }
    }
}
