//! The fallback: socket to socket, when the rendezvous said no.

use smcr_proto::Instant;
use smcr_rnic::Fabric;

use super::crossing::sift;
use super::is_reset;
use super::urgent::{ahead, note_read};
use crate::connections::{Backlog, Far, Socket};
use crate::handoff::Ending;
use crate::limits::{BACKLOG_BYTES_MAX, FILL_WHILE_CROWDED};
use crate::poller::Poller;
use crate::streams::{Ahead, Streams};

/// What one direction came to.
#[derive(Default)]
struct Pumped {
    bytes: u64,
    /// An urgent byte was among them.
    urgent: bool,
    /// Both ends would take more at once.
    more: bool,
}

/// One of the two sockets was reset.
pub(super) struct Reset;

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Carries bytes both ways between the two sockets of `slot`.
    pub(crate) fn pump(&mut self, now: Instant, slot: u16) -> bool {
        let Some(relay) = self.connections.at(slot) else { return false };
        let (Some(near), Far::Tcp(tcp)) = (&mut relay.near, &mut relay.far) else { return false };
        let crowded = self.backlog_bytes >= BACKLOG_BYTES_MAX;
        let most = if crowded { FILL_WHILE_CROWDED } else { self.scratch.len() };
        let (streams, scratch) = (&mut self.streams, &mut self.scratch[..most]);
        let both = sift(streams, scratch, now, tcp).and_then(|sifted| {
            let far = &mut tcp.socket;
            let outbound = carry(streams, scratch, near, far, &mut tcp.outbound)?;
            let mut inbound = match tcp.sieve {
                None => carry(streams, scratch, far, near, &mut tcp.inbound)?,
                Some(_) => Pumped { more: far.readable && !far.eof, ..Pumped::default() },
            };
            inbound.bytes += sifted as u64;
            Ok((outbound, inbound))
        });
        let held = tcp.outbound.bytes.len() + tcp.inbound.bytes.len();
        self.backlog_bytes = self.backlog_bytes - tcp.held + held;
        tcp.held = held;
        let Ok((outbound, inbound)) = both else {
            self.reset(now, slot, Ending::ResetByApplication);
            return true;
        };
        relay.bytes_in += outbound.bytes;
        relay.bytes_out += inbound.bytes;
        self.ends.counters.bytes_in.add(outbound.bytes);
        self.ends.counters.bytes_out.add(inbound.bytes);
        let urgent = u64::from(outbound.urgent) + u64::from(inbound.urgent);
        self.ends.counters.urgent_in.add(urgent);
        self.ends.counters.urgent_out.add(urgent);
        let done = near.is_done() && tcp.socket.is_done();
        if done {
            self.retire(slot);
        } else if outbound.more || inbound.more {
            self.queue_fill(slot);
        }
        done || outbound.bytes + inbound.bytes > 0
    }
}

/// Carries what `source` brings to `target`, once, and the end of the stream when it comes.
fn carry<S: Streams>(
    streams: &mut S,
    scratch: &mut [u8],
    source: &mut Socket<S::Stream>,
    target: &mut Socket<S::Stream>,
    backlog: &mut Backlog,
) -> Result<Pumped, Reset> {
    let blocked = !write_backlog(streams, target, backlog)? || !target.writable;
    if source.failed && !source.is_done() && (blocked || source.eof) {
        // No read will tell, or not before the target takes more, which may be never.
        return Err(Reset);
    }
    if !backlog.bytes.is_empty() {
        return Ok(Pumped::default());
    }
    let mut pumped = Pumped::default();
    if source.readable && !source.eof && target.writable {
        let (len, urgent) = read(streams, scratch, source)?;
        pumped = Pumped { bytes: len as u64, urgent, more: false };
        let written = write(streams, target, &scratch[..len], urgent)?;
        if written < len {
            backlog.bytes.extend_from_slice(&scratch[written..len]);
            backlog.urgent = urgent;
        }
    }
    if source.eof && backlog.bytes.is_empty() && !target.finished {
        streams.finish(&target.stream);
        target.finished = true;
    }
    pumped.more = source.readable && !source.eof && target.writable;
    Ok(pumped)
}

/// Reads once. Returns how many bytes came, and whether it is the urgent one.
pub(super) fn read<S: Streams>(
    streams: &mut S,
    scratch: &mut [u8],
    source: &mut Socket<S::Stream>,
) -> Result<(usize, bool), Reset> {
    let Some(ahead) = ahead(streams, source) else { return Ok((0, false)) };
    let urgent = ahead == Ahead::Urgent;
    let room = if urgent { &mut scratch[..1] } else { scratch };
    match streams.read_slice(&source.stream, room) {
        Ok(0) => {
            source.eof = true;
            Ok((0, false))
        }
        Ok(len) => {
            note_read(source, ahead, len, room.len());
            Ok((len, urgent))
        }
        Err(error) if is_reset(&error) => Err(Reset),
        Err(_) => {
            source.readable = false;
            Ok((0, false))
        }
    }
}

/// Writes what is left from before. Returns whether nothing is left.
fn write_backlog<S: Streams>(
    streams: &mut S,
    target: &mut Socket<S::Stream>,
    backlog: &mut Backlog,
) -> Result<bool, Reset> {
    if backlog.bytes.is_empty() {
        return Ok(true);
    }
    let rest = &backlog.bytes[backlog.written..];
    backlog.written += write(streams, target, rest, backlog.urgent)?;
    if backlog.written < backlog.bytes.len() {
        return Ok(false);
    }
    // The memory goes too: an idle connection holds none.
    *backlog = Backlog::default();
    Ok(true)
}

/// Writes as much as `target` takes. If `urgent`, that is one byte.
fn write<S: Streams>(
    streams: &mut S,
    target: &mut Socket<S::Stream>,
    bytes: &[u8],
    urgent: bool,
) -> Result<usize, Reset> {
    if !target.writable || bytes.is_empty() {
        return Ok(0);
    }
    let result = match urgent {
        true => streams.write_urgent(&target.stream, bytes[0]).map(|()| 1),
        false => streams.write_slice(&target.stream, bytes),
    };
    match result {
        Ok(written) => {
            target.writable = written == bytes.len();
            Ok(written)
        }
        Err(error) if is_reset(&error) => Err(Reset),
        Err(_) => {
            target.writable = false;
            Ok(0)
        }
    }
}
