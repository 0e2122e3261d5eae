//! The fallback: relays between two sockets, when the connection stays TCP.

use smcr_proto::Instant;

use super::crossing::Sieve;
use super::socket::Socket;
use super::urgent::{ahead, note_read};
use crate::limits::{BACKLOG_BYTES_MAX, FILL_WHILE_CROWDED};
use crate::streams::{Ahead, Streams, is_reset};
use crate::turn::Turn;

/// A second socket as the far side.
#[derive(Debug)]
pub(crate) struct Tcp<S> {
    pub(crate) socket: Socket<S>,
    /// Read from the near socket, not yet taken by the far one.
    outbound: Backlog,
    /// Read from the far socket, not yet taken by the near one.
    inbound: Backlog,
    /// How many bytes of both are counted in the poller's sum.
    pub(crate) held: usize,
    /// Looks at what comes first from the far socket, as long as that may be a Decline.
    sieve: Option<Sieve>,
}

/// Bytes that the target socket did not take. Empty, and without memory, in the common case.
#[derive(Debug, Default)]
struct Backlog {
    bytes: Vec<u8>,
    written: usize,
    /// The backlog is a single byte, and urgent.
    urgent: bool,
}

impl Backlog {
    /// Bytes that were read already, to be written first.
    fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, written: 0, urgent: false }
    }
}

/// What one call has moved in one direction.
#[derive(Default)]
pub(super) struct Pumped {
    pub(super) bytes: u64,
    /// An urgent byte was among them.
    pub(super) urgent: bool,
    /// The next call can move more at once.
    pub(super) more: bool,
}

/// One of the two sockets was reset.
pub(super) struct Reset;

impl<T> Tcp<T> {
    /// The far socket of a fallback. Bytes that the rendezvous read beyond its own messages are
    /// written first; `declined` says that what comes from the far socket may begin with a Decline.
    pub(crate) fn new(far: T, from_near: Vec<u8>, from_far: Vec<u8>, declined: bool) -> Self {
        let (inbound, sieve) = match declined {
            false => (Backlog::new(from_far), None),
            true => (Backlog::default(), Some(Sieve::new(from_far))),
        };
        Self {
            socket: Socket::new(far),
            outbound: Backlog::new(from_near),
            inbound,
            held: 0,
            sieve,
        }
    }

    /// Carries bytes both ways between `near` and the far socket, at most so many. Returns what
    /// went out and what came in.
    pub(super) fn pump<S: Streams<Stream = T>>(
        &mut self,
        near: &mut Socket<T>,
        turn: &mut Turn<'_, S>,
        granted: [u32; 2],
    ) -> Result<[Pumped; 2], Reset> {
        let crowded = *turn.backlog_bytes >= BACKLOG_BYTES_MAX;
        let most = if crowded { FILL_WHILE_CROWDED } else { turn.scratch.len() };
        let most = granted.map(|granted| most.min(granted as usize));
        let pumped = self.pump_at_most(near, turn.now, turn.streams, (turn.scratch, most));
        let held = self.outbound.bytes.len() + self.inbound.bytes.len();
        *turn.backlog_bytes = *turn.backlog_bytes - self.held + held;
        self.held = held;
        pumped
    }

    fn pump_at_most<S: Streams<Stream = T>>(
        &mut self,
        near: &mut Socket<T>,
        now: Instant,
        streams: &mut S,
        (scratch, most): (&mut [u8], [usize; 2]),
    ) -> Result<[Pumped; 2], Reset> {
        let sifted = sift(streams, scratch, now, self)?;
        let far = &mut self.socket;
        let room = &mut scratch[..most[0]];
        let outbound = carry(streams, room, near, far, &mut self.outbound)?;
        let room = &mut scratch[..most[1]];
        let mut inbound = match self.sieve {
            None => carry(streams, room, far, near, &mut self.inbound)?,
            Some(_) => {
                let more = far.readable && !far.eof || near.has_last_bytes();
                Pumped { more, ..Pumped::default() }
            }
        };
        inbound.bytes += sifted as u64;
        // One may have failed while it was written to, when its end had been read before.
        let is_cut = |socket: &Socket<T>| socket.failed && socket.eof && !socket.finished;
        // Or it was closed when its end had been read before.
        let is_late = near.eof
            && !near.finished
            && self.outbound.bytes.is_empty()
            && streams.is_to_reset(&near.stream);
        if is_cut(near) || is_cut(far) || is_late { Err(Reset) } else { Ok([outbound, inbound]) }
    }

    /// Whether bytes have been held back for long enough.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.sieve.as_ref().is_some_and(|sieve| sieve.is_due(now))
    }
}

/// Reads the first bytes of the far socket, if they may be a Decline. Returns how many bytes turned
/// out to be the application's.
fn sift<S: Streams>(
    streams: &mut S,
    scratch: &mut [u8],
    now: Instant,
    tcp: &mut Tcp<S::Stream>,
) -> Result<usize, Reset> {
    // We did not decline, or the first bytes have shown what they are.
    let Some(sieve) = &mut tcp.sieve else { return Ok(0) };
    let far = &mut tcp.socket;
    let mut found = sieve.sift(now, &[]);
    if found.is_none() && far.readable && !far.eof {
        // A Decline is never sent as urgent data.
        if ahead(streams, far) == Some(Ahead::Urgent) {
            found = Some(sieve.release());
        } else {
            let (len, _) = read(streams, scratch, far)?;
            found = sieve.sift(now, &scratch[..len]);
            if far.eof && found.is_none() {
                found = Some(sieve.release());
            }
        }
    }
    // More bytes must come, or time must pass, before it shows what they are.
    let Some(found) = found else { return Ok(0) };
    let len = found.len();
    tcp.sieve = None;
    tcp.inbound = Backlog::new(found);
    Ok(len)
}

/// Reads `source` once, unless `scratch` has no room, and writes the bytes to `target`; passes on
/// the end of the stream when it comes.
fn carry<S: Streams>(
    streams: &mut S,
    scratch: &mut [u8],
    source: &mut Socket<S::Stream>,
    target: &mut Socket<S::Stream>,
    backlog: &mut Backlog,
) -> Result<Pumped, Reset> {
    let blocked = !write_backlog(streams, target, backlog)? || !target.writable;
    if blocked && !source.finished && streams.is_to_reset(&source.stream) {
        // The bytes before this reset may wait for ever, and no error tells of it.
        return Err(Reset);
    }
    if source.failed && !source.is_done() && (blocked || source.eof) {
        // No read will report the error, or not before the target takes more, which may be never.
        return Err(Reset);
    }
    if !backlog.bytes.is_empty() {
        return Ok(Pumped { more: target.has_last_bytes(), ..Pumped::default() });
    }
    let mut pumped = Pumped::default();
    if source.readable && !source.eof && target.writable && !scratch.is_empty() {
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
    let more = source.readable && !source.eof && target.writable;
    pumped.more = more || target.has_last_bytes();
    Ok(pumped)
}

/// Reads once. Returns how many bytes came, and whether that is the urgent byte.
fn read<S: Streams>(
    streams: &mut S,
    scratch: &mut [u8],
    source: &mut Socket<S::Stream>,
) -> Result<(usize, bool), Reset> {
    // The event that made it readable has been served by an earlier read.
    let Some(ahead) = ahead(streams, source) else { return Ok((0, false)) };
    let urgent = ahead == Ahead::Urgent;
    let room = if urgent { &mut scratch[..1] } else { scratch };
    match streams.read_slice(&source.stream, room) {
        Ok(0) if source.told || streams.is_to_reset(&source.stream) => Err(Reset),
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
        Err(error) if is_reset(&error) && target.eof => Err(Reset),
        Err(error) if is_reset(&error) => {
            // What it has sent before comes first; the error is behind that.
            target.note_error(&error);
            Ok(0)
        }
        Err(_) => {
            target.writable = false;
            Ok(0)
        }
    }
}
