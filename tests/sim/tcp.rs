//! TCP connections in memory, between an application and a poller, with the edges of epoll.
//!
//! The poller's end behaves as a Linux socket on an edge-triggered epoll does: an edge marks the
//! socket, and the next `poll` tells all that is possible by then; room is an edge only for a
//! writer that was refused, and only once a third of the buffer is free; an error is told once, to
//! a read or to a write, and what was received before it can still be read.
//!
//! Towards the poller there is at most one urgent byte: a later one takes the mark of one that was
//! not read yet, which is then an ordinary byte in its place. A read stops before the marked byte.
//! Towards the application every mark is written down.

use std::collections::VecDeque;
use std::io::{self, Read as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use smcr_engine::limits::EVENTS_PER_TURN_MAX;
use smcr_engine::streams::{Ahead, Event, Key, Streams};
use smcr_memory::Vacant;
use smcr_memory::rmb::Readable;
use smcr_proto::Instant;
use smcr_rnic::Signs;

/// A connection whose buffers hold `capacity` bytes each way: the application's end, the poller's.
pub(crate) fn connection(capacity: usize) -> (Application, Stream) {
    let tcp = Arc::new(Mutex::new(Tcp { capacity, ..Tcp::default() }));
    (Application(Arc::clone(&tcp)), Stream(tcp))
}

/// Both ends.
#[derive(Debug, Default)]
struct Tcp {
    capacity: usize,
    /// From the application.
    inbound: Lane,
    /// To the application.
    outbound: Lane,
    /// RST was sent, by either end.
    reset: bool,
    /// The application's end has sent it, before the poller's end did.
    reset_by_application: bool,
    /// The poller's end was told of the reset; from then on reads say that the stream ended.
    error_told: bool,
    /// The application's end is closed: what still comes is answered by RST.
    application_gone: bool,
    /// That is a reset if the poller's end finds it.
    resets_at_end: bool,
    /// The application's end breaks when the poller's end has read all of it.
    breaks_when_read: bool,
    reset_on_close: bool,
    /// The poller's end is closed: epoll knows nothing of it any more.
    closed: bool,
    /// Something happened that epoll has not told yet.
    edge: bool,
    /// A write found less room than it wanted.
    wants_room: bool,
}

/// One direction.
#[derive(Debug, Default)]
struct Lane {
    bytes: VecDeque<u8>,
    finished: bool,
    /// Where the first of `bytes` stands in the stream.
    start: u64,
    /// Where urgent bytes stand, in order. Those that were read stay only in `outbound`.
    marks: Vec<u64>,
}

impl Lane {
    /// Where the next byte will stand.
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    fn take(&mut self, len: usize) -> Vec<u8> {
        self.start += len as u64;
        let mut taken = vec![0; len];
        // As a whole: byte by byte, swarms would spend an eighth of their time here.
        self.bytes.read_exact(&mut taken).expect("there are so many");
        taken
    }

    /// How many bytes a read may bring: up to the mark, unless it begins there.
    fn until_mark(&self) -> usize {
        let mark = self.marks.last().filter(|mark| **mark > self.start);
        let before = mark.map(|mark| usize::try_from(mark - self.start).expect("it is buffered"));
        before.unwrap_or(self.bytes.len()).min(self.bytes.len())
    }
}

impl Tcp {
    fn room(&self) -> usize {
        self.capacity - self.outbound.bytes.len()
    }

    fn has_useful_room(&self) -> bool {
        self.room() * 3 >= self.capacity
    }

    fn reset(&mut self) {
        self.reset = true;
        self.edge = true;
    }

    fn reset_by_application(&mut self) {
        self.reset_by_application |= !self.reset;
        self.reset();
    }

    fn is_to_reset(&self) -> bool {
        self.application_gone && self.resets_at_end
    }

    fn event(&mut self, key: Key) -> Option<Event> {
        if !std::mem::take(&mut self.edge) {
            return None;
        }
        let failed = self.reset && !self.error_told;
        let ended = self.inbound.finished || self.reset;
        let writable = self.has_useful_room() || failed;
        self.wants_room |= !writable;
        let readable = !self.inbound.bytes.is_empty() || ended;
        let urgent = !self.inbound.marks.is_empty();
        let (ending, by_rings) = (ended, false);
        let event = Event { key, readable, writable, ending, urgent, failed, by_rings };
        (readable || writable).then_some(event)
    }

    fn read(&mut self, len: usize) -> io::Result<Vec<u8>> {
        let len = len.min(self.inbound.until_mark());
        if len > 0 {
            let bytes = self.inbound.take(len);
            let start = self.inbound.start;
            self.inbound.marks.retain(|mark| *mark >= start);
            return Ok(bytes);
        }
        // Behind a FIN, a read finds the end only, unless the socket breaks by something else.
        if self.inbound.finished && !self.breaks_when_read {
            return Ok(Vec::new());
        }
        self.reset |= self.breaks_when_read;
        if self.reset && !std::mem::replace(&mut self.error_told, true) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        if self.inbound.finished || self.reset {
            return Ok(Vec::new());
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn write(&mut self, len: usize, copy: impl FnOnce(&mut [u8])) -> io::Result<usize> {
        assert!(!self.outbound.finished, "nothing is written behind a FIN");
        if self.reset {
            let told = std::mem::replace(&mut self.error_told, true);
            let is_end_known = told || self.inbound.finished;
            return Err(match is_end_known {
                true => io::ErrorKind::BrokenPipe.into(),
                false => io::ErrorKind::ConnectionReset.into(),
            });
        }
        if self.application_gone {
            self.reset_by_application();
            return Ok(len);
        }
        let taken = len.min(self.room());
        self.wants_room |= taken < len;
        if taken == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut bytes = vec![0; taken];
        copy(&mut bytes);
        self.outbound.bytes.extend(bytes);
        Ok(taken)
    }

    fn write_urgent(&mut self, byte: u8) -> io::Result<()> {
        let at = self.outbound.end();
        self.write(1, |target| target[0] = byte)?;
        self.outbound.marks.push(at);
        Ok(())
    }

    fn ahead(&self) -> Ahead {
        match &self.inbound {
            lane if lane.bytes.is_empty() => Ahead::Nothing,
            lane if lane.marks.contains(&lane.start) => Ahead::Urgent,
            _ => Ahead::Bytes,
        }
    }
}

/// What an application reads.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Read {
    Bytes(Vec<u8>),
    Nothing,
    Finished,
    Reset,
}

/// The application's end.
#[derive(Debug)]
pub(crate) struct Application(Arc<Mutex<Tcp>>);

impl Application {
    /// Sends what fits of `bytes`, and says how much that was; `None` after a reset.
    pub(crate) fn write(&self, bytes: &[u8]) -> Option<usize> {
        let mut tcp = lock(&self.0);
        if tcp.reset {
            return None;
        }
        let len = bytes.len().min(tcp.capacity - tcp.inbound.bytes.len());
        tcp.inbound.bytes.extend(&bytes[..len]);
        tcp.edge |= len > 0;
        Some(len)
    }

    /// Sends a byte as urgent if there is room for one.
    pub(crate) fn write_urgent(&self, byte: u8) -> Option<usize> {
        let mark = lock(&self.0).inbound.end();
        let written = self.write(&[byte])?;
        if written == 1 {
            lock(&self.0).inbound.marks = vec![mark];
        }
        Some(written)
    }

    /// Where in the stream the urgent bytes stood that were sent to this application.
    pub(crate) fn marks(&self) -> Vec<u64> {
        lock(&self.0).outbound.marks.clone()
    }

    /// How much can be written at once.
    pub(crate) fn room(&self) -> usize {
        let tcp = lock(&self.0);
        if tcp.reset { 0 } else { tcp.capacity - tcp.inbound.bytes.len() }
    }

    pub(crate) fn read(&self, len: usize) -> Read {
        let mut tcp = lock(&self.0);
        let len = len.min(tcp.outbound.bytes.len());
        if len == 0 && tcp.reset {
            return Read::Reset;
        }
        if len == 0 {
            return if tcp.outbound.finished { Read::Finished } else { Read::Nothing };
        }
        let bytes = tcp.outbound.take(len);
        if tcp.wants_room && tcp.has_useful_room() {
            tcp.wants_room = false;
            tcp.edge = true;
        }
        Read::Bytes(bytes)
    }

    /// Reads up to the next urgent byte, or that one alone. Returns whether it is that.
    pub(crate) fn read_marked(&self, len: usize) -> (Read, bool) {
        let before_mark = {
            let Lane { start, ref marks, .. } = lock(&self.0).outbound;
            let next = marks.iter().find(|mark| **mark >= start);
            next.map(|mark| usize::try_from(mark - start).expect("it is buffered"))
        };
        match before_mark {
            Some(0) => (self.read(1), true),
            Some(before) => (self.read(len.min(before)), false),
            None => (self.read(len), false),
        }
    }

    /// Whether a read would bring anything.
    pub(crate) fn is_readable(&self) -> bool {
        let tcp = lock(&self.0);
        tcp.reset || tcp.outbound.finished || !tcp.outbound.bytes.is_empty()
    }

    /// FIN.
    pub(crate) fn finish(&self) {
        let mut tcp = lock(&self.0);
        tcp.inbound.finished = true;
        tcp.edge = true;
    }

    /// `close`: FIN, or RST if something is unread; and RST for whatever comes later.
    pub(crate) fn close(&self) {
        let mut tcp = lock(&self.0);
        tcp.application_gone = true;
        if tcp.outbound.bytes.is_empty() {
            tcp.inbound.finished = true;
            tcp.edge = true;
        } else {
            tcp.reset_by_application();
        }
    }

    /// A program says that its end is a reset, as `smcr_engine::near::AtEnd` does.
    pub(crate) fn reset_at_end(&self) {
        lock(&self.0).resets_at_end = true;
    }

    /// FIN, and RST as soon as all that was sent was read: between two reads of one turn, say.
    pub(crate) fn finish_and_break(&self) {
        self.finish();
        lock(&self.0).breaks_when_read = true;
    }

    /// RST.
    pub(crate) fn reset(&self) {
        lock(&self.0).reset_by_application();
    }

    /// Whether it is closed, and that is a reset.
    pub(crate) fn is_to_reset(&self) -> bool {
        lock(&self.0).is_to_reset()
    }

    /// Whether this end has sent FIN.
    pub(crate) fn has_finished(&self) -> bool {
        lock(&self.0).inbound.finished
    }

    /// Whether this end has sent RST: because the application wanted it, or closed and left bytes
    /// unread. What the other end resets first does not count.
    pub(crate) fn has_reset(&self) -> bool {
        lock(&self.0).reset_by_application
    }
}

/// The poller's end. Dropping it closes it.
#[derive(Debug)]
pub(crate) struct Stream(Arc<Mutex<Tcp>>);

impl Drop for Stream {
    fn drop(&mut self) {
        let mut tcp = lock(&self.0);
        let unread = !tcp.inbound.bytes.is_empty();
        tcp.reset |= tcp.reset_on_close || unread;
        tcp.outbound.finished = true;
        tcp.closed = true;
    }
}

/// The sockets of one poller. Clones are the same sockets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sockets(Arc<Mutex<Watched>>);

#[derive(Debug, Default)]
struct Watched {
    sockets: Vec<(Key, Weak<Mutex<Tcp>>)>,
    /// Told by the next `poll`, whoever they are for.
    late: Vec<Event>,
    full: bool,
    system_calls: u64,
    /// The bytes of the last write, kept so that the next one need not clear as much memory again.
    copied: Vec<u8>,
}

impl Sockets {
    /// Whether the poller's sleep would end.
    pub(crate) fn has_news(&self) -> bool {
        let watched = lock(&self.0);
        let edge = |socket: &Weak<Mutex<Tcp>>| socket.upgrade().is_some_and(|tcp| lock(&tcp).edge);
        !watched.late.is_empty() || watched.sockets.iter().any(|(_, socket)| edge(socket))
    }

    /// Makes the next `poll` tell this, as if it had been under way for long.
    pub(crate) fn tell_late(&self, event: Event) {
        lock(&self.0).late.push(event);
    }

    /// Whether no further socket can be watched.
    pub(crate) fn set_full(&self, full: bool) {
        lock(&self.0).full = full;
    }

    /// Reads and writes so far.
    pub(crate) fn system_calls(&self) -> u64 {
        lock(&self.0).system_calls
    }

    fn count(&self) {
        lock(&self.0).system_calls += 1;
    }
}

impl Streams for Sockets {
    type Stream = Stream;

    fn watch(&mut self, key: Key, stream: &Stream) -> io::Result<()> {
        let mut watched = lock(&self.0);
        if watched.full {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        watched.sockets.push((key, Arc::downgrade(&stream.0)));
        lock(&stream.0).edge = true;
        Ok(())
    }

    fn unwatch(&mut self, stream: &Stream) {
        let ours = Arc::downgrade(&stream.0);
        lock(&self.0).sockets.retain(|(_, socket)| !socket.ptr_eq(&ours));
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Signs {
        let mut watched = lock(&self.0);
        events.append(&mut watched.late);
        let is_open = |tcp: &Weak<Mutex<Tcp>>| tcp.upgrade().is_some_and(|tcp| !lock(&tcp).closed);
        watched.sockets.retain(|(_, socket)| is_open(socket));
        for (key, socket) in &watched.sockets {
            if events.len() == EVENTS_PER_TURN_MAX {
                break;
            }
            events.extend(socket.upgrade().and_then(|tcp| lock(&tcp).event(*key)));
        }
        Signs::Maybe
    }

    fn sleep(&mut self, _now: Instant, _deadline: Option<Instant>) {
        unreachable!("the cluster sleeps for its pollers");
    }

    fn read(&mut self, stream: &Stream, room: &Vacant<'_>) -> io::Result<usize> {
        self.count();
        let bytes = lock(&stream.0).read(room.len())?;
        room.copy_in(&bytes);
        Ok(bytes.len())
    }

    fn write(&mut self, stream: &Stream, bytes: &Readable<'_>) -> io::Result<usize> {
        self.count();
        let all = &mut lock(&self.0).copied;
        all.resize(WRITE_MAX, 0);
        let len = bytes.copy_out(all);
        lock(&stream.0).write(len, |target| target.copy_from_slice(&all[..target.len()]))
    }

    fn read_slice(&mut self, stream: &Stream, room: &mut [u8]) -> io::Result<usize> {
        self.count();
        let bytes = lock(&stream.0).read(room.len())?;
        room[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    fn write_slice(&mut self, stream: &Stream, bytes: &[u8]) -> io::Result<usize> {
        self.count();
        let len = bytes.len();
        lock(&stream.0).write(len, |target| target.copy_from_slice(&bytes[..target.len()]))
    }

    fn write_urgent(&mut self, stream: &Stream, byte: u8) -> io::Result<()> {
        self.count();
        lock(&stream.0).write_urgent(byte)
    }

    fn time(&self, turn: Instant) -> Instant {
        turn
    }

    fn core_of(&self, _: &Self::Stream) -> Option<usize> {
        None
    }

    fn has_more(&mut self, stream: &Stream) -> bool {
        self.count();
        !lock(&stream.0).inbound.bytes.is_empty()
    }

    fn is_to_reset(&self, stream: &Stream) -> bool {
        lock(&stream.0).is_to_reset()
    }

    fn ahead(&mut self, stream: &Stream) -> Ahead {
        self.count();
        lock(&stream.0).ahead()
    }

    fn finish(&mut self, stream: &Stream) {
        lock(&stream.0).outbound.finished = true;
    }

    fn reset_on_close(&mut self, stream: &Stream) {
        lock(&stream.0).reset_on_close = true;
    }
}

/// More than is written at once.
const WRITE_MAX: usize = 1 << 20;

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere is the failure to look at, not this.
    value.lock().unwrap_or_else(PoisonError::into_inner)
}
