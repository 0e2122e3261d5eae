//! RMB element to near socket.

use smcr_proto::Instant;
use smcr_rnic::Fabric;

use super::is_reset;
use crate::connections::Far;
use crate::handoff::Ending;
use crate::poller::Poller;
use crate::streams::Streams;

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Writes to sockets what peers announced.
    pub(crate) fn drain(&mut self, now: Instant) -> bool {
        let mut slots =
            std::mem::replace(&mut self.work.drain, std::mem::take(&mut self.work.current));
        let mut moved = false;
        for slot in slots.drain(..) {
            let Some(relay) = self.connections.at(slot) else { continue };
            relay.queued.drain = false;
            moved |= match &relay.far {
                Far::Tcp(_) => self.pump(now, slot),
                Far::Smc(_) => self.drain_smc(now, slot),
            };
        }
        self.work.current = slots;
        moved
    }

    fn drain_smc(&mut self, now: Instant, slot: u16) -> bool {
        let Some(relay) = self.connections.at(slot) else { return false };
        let (Some(near), Far::Smc(smc)) = (&mut relay.near, &mut relay.far) else { return false };
        let readable = smc.connection.readable();
        if readable.is_empty() || !near.writable {
            return false;
        }
        if near.finished {
            // Bytes behind the end of the stream: the application has been told that there are
            // none, so the stream is broken (a peer that gave up flushing; dialect 7).
            self.reset(now, slot, Ending::PeerMisbehaved);
            return true;
        }
        let before_urgent = smc.connection.urgent_position();
        if before_urgent == Some(0) {
            return self.drain_urgent(now, slot);
        }
        let (readable, behind) = readable.split_at(before_urgent.unwrap_or(readable.len()));
        // RFC 7609 5.6-1
        match self.streams.write(&near.stream, &smc.rmbe.readable(readable.pieces())) {
            Ok(written) => {
                let written = u32::try_from(written).expect("no more than was readable");
                smc.connection.consume(written);
                relay.bytes_out += u64::from(written);
                self.ends.counters.bytes_out.add(written.into());
                if written < readable.len() {
                    near.writable = false;
                    self.ends.counters.blocked_on_socket.add(1);
                }
                self.queue_flush(slot);
                if !behind.is_empty() {
                    self.queue_drain(slot);
                }
                self.settle(now, slot);
            }
            Err(error) if is_reset(&error) => self.reset(now, slot, Ending::ResetByApplication),
            Err(_) => {
                near.writable = false;
                self.ends.counters.blocked_on_socket.add(1);
            }
        }
        true
    }

    /// Writes the one byte that is urgent, which is the next one.
    fn drain_urgent(&mut self, now: Instant, slot: u16) -> bool {
        let Some(relay) = self.connections.at(slot) else { return false };
        let (Some(near), Far::Smc(smc)) = (&mut relay.near, &mut relay.far) else { return false };
        let (first, behind) = smc.connection.readable().split_at(1);
        let mut byte = [0];
        smc.rmbe.readable(first.pieces()).copy_out(&mut byte);
        // RFC 7609 4.7.5-2, 4.7.5-3
        match self.streams.write_urgent(&near.stream, byte[0]) {
            Ok(()) => {
                // RFC 7609 4.7.5-4
                smc.connection.consume(1);
                relay.bytes_out += 1;
                self.ends.counters.bytes_out.add(1);
                self.ends.counters.urgent_out.add(1);
                self.queue_flush(slot);
                if !behind.is_empty() {
                    self.queue_drain(slot);
                }
                self.settle(now, slot);
            }
            Err(error) if is_reset(&error) => self.reset(now, slot, Ending::ResetByApplication),
            Err(_) => {
                near.writable = false;
                self.ends.counters.blocked_on_socket.add(1);
            }
        }
        true
    }
}
