//! CDC messages to one connection, between everything that its owner does.

use std::time::Duration;

use smcr_proto::connection::{AfterStream, Connection, ConnectionSetup, Failover, Streams};
use smcr_proto::ring::Position;
use smcr_proto::wire::cdc::{Cdc, LEN};
use smcr_proto::{AlertToken, Instant, Ring};

use super::Input;

/// Each instruction is a byte, and what it needs behind it.
///
/// # Panics
///
/// If a message changes when it is encoded again, or a connection says what it must not.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let Some(shape) = input.byte() else { return };
    let mut us = Owner::new(shape);
    while let Some(instruction) = input.byte() {
        us.obey(instruction, &mut input);
        us.look();
    }
    us.end();
}

struct Owner {
    connection: Connection<()>,
    now: Instant,
    /// Sizes of our element and of the peer's.
    rings: [Ring; 2],
    /// Messages of ours that the NIC has not acknowledged.
    unacknowledged: Vec<u16>,
    /// What an honest peer would have said last.
    last: Cdc,
    produced: u64,
    consumed: u64,
    /// Bytes of ours.
    written: u64,
    closed: bool,
    begins: bool,
}

impl Owner {
    fn new(shape: u8) -> Self {
        let ring = |bits: u8| match bits & 4 {
            0 => Ring::new(16_384 << (bits & 3)),
            _ => Ring::with_eye_catcher(16_384 << (bits & 3)),
        };
        let rings = [ring(shape), ring(shape >> 3)];
        let streams = match shape >> 6 {
            2 => Streams::Begins,
            3 => Streams::Follows,
            _ => Streams::One,
        };
        let setup = ConnectionSetup {
            peer_token: AlertToken(0x0102_0304),
            element: rings[0],
            peer_element: rings[1],
            close_wait: Duration::from_secs(5),
            streams,
        };
        Self {
            connection: Connection::new(setup),
            now: Instant(1),
            rings,
            unacknowledged: Vec::new(),
            last: Cdc::default(),
            produced: 0,
            consumed: 0,
            written: 0,
            closed: false,
            begins: streams == Streams::Begins,
        }
    }

    fn obey(&mut self, instruction: u8, input: &mut Input<'_>) {
        let us = &mut self.connection;
        // New bytes come behind those that are written again on another link.
        let window = match us.failover() {
            Failover::Flowing | Failover::Repeating => us.window(),
            Failover::Leaving { .. }
            | Failover::Validating { .. }
            | Failover::Replaying { .. }
            | Failover::Lost { .. } => 0,
        };
        match instruction % 14 {
            0 => self.hear_anything(input),
            1..=3 => self.hear_something_likely(input),
            4 if window > 0 => {
                self.written += u64::from(us.produce(window.min(input.word())).len())
            }
            5 if window > 0 => {
                let span = us.produce_urgent(window.min(1 + u32::from(input.short())));
                self.written += u64::from(span.len());
            }
            4 => {}
            5 => us.announce_urgent(),
            6 => us.consume(us.readable().len().min(input.word())),
            7 => us.set_bytes_waiting(input.byte().is_some_and(|blocked| blocked & 1 == 1)),
            8 => {
                us.shutdown_write();
            }
            9 if !self.closed && us.readable().is_empty() => {
                us.close(self.now);
                self.closed = true;
            }
            9 if self.closed => {}
            9 | 10 => {
                us.abort(self.now);
                self.closed = true;
            }
            11 if !us.is_lost() => {
                us.leave(());
                us.depart(u64::from(input.short()).min(self.written));
            }
            11 => us.forget_replay(),
            12 => {
                self.now = self.now + Duration::from_millis(input.short().into());
                us.handle_timeout(self.now);
            }
            _ if self.begins && instruction >= 128 && us.after_stream() == AfterStream::Keep => {
                us.begin_stream();
                self.closed = false;
            }
            _ => self.speak(),
        }
        // What must be written again is, in steps of any size.
        if let Some(replay) = self.connection.replay() {
            self.connection.replayed(replay.rest.len().min(1 + u32::from(input.short())));
        }
    }

    /// A message as it came from the wire.
    fn hear_anything(&mut self, input: &mut Input<'_>) {
        let Some(bytes) = input.bytes(LEN).first_chunk::<LEN>() else { return };
        let Ok(message) = Cdc::decode(bytes) else { return };
        assert_eq!(Cdc::decode(&message.encode()), Ok(message));
        self.hear(&message);
    }

    /// A message that goes on from the last one: what is wrong about it, if anything, is little.
    fn hear_something_likely(&mut self, input: &mut Input<'_>) {
        let [flags, steps] = [(); 2].map(|()| input.byte().unwrap_or(0));
        let (more, less) = (u64::from(input.short()), u64::from(input.short()));
        self.produced += more;
        self.consumed += less;
        let mut message = Cdc {
            sequence: self.last.sequence.wrapping_add(u16::from(steps & 3)),
            token: AlertToken(7),
            producer: Position(self.produced).to_cursor(self.rings[0]),
            consumer: Position(self.consumed).to_cursor(self.rings[1]),
            ..self.last
        };
        message.writer_blocked = flags & 1 != 0;
        message.urgent_pending = flags & 2 != 0;
        message.urgent_present = flags & 4 != 0;
        message.update_requested = flags & 8 != 0;
        message.failover_validation = flags & 16 != 0;
        // Levels, which an honest peer never takes back; steps have room for one who does.
        message.sending_done = flags & 32 != 0 || (self.last.sending_done && steps & 4 == 0);
        message.connection_closed =
            flags & 64 != 0 || (self.last.connection_closed && steps & 8 == 0);
        message.abnormal_close = flags & 128 != 0;
        message.odd_stream = self.last.odd_stream ^ (steps & 16 != 0);
        message.keeps = steps & 32 == 0;
        if !self.hear(&message) {
            self.produced -= more;
            self.consumed -= less;
        }
    }

    /// Whether the message was believed.
    fn hear(&mut self, message: &Cdc) -> bool {
        let before = (self.connection.readable().len(), self.connection.window());
        match self.connection.handle_cdc(self.now, message) {
            Ok(progress) => {
                let readable = self.connection.readable().len();
                assert_eq!(readable.saturating_sub(before.0), progress.readable_bytes);
                assert!(readable <= self.rings[0].capacity());
                self.last = *message;
                // Whoever closed it has another stream now.
                self.closed &= !progress.begun;
                true
            }
            Err(_) => {
                let after = (self.connection.readable().len(), self.connection.window());
                assert_eq!(after, before, "an offence changes nothing");
                false
            }
        }
    }

    fn speak(&mut self) {
        if let Some(message) = self.connection.poll_cdc() {
            assert_eq!(Cdc::decode(&message.encode()), Ok(message));
            if !message.failover_validation {
                self.unacknowledged.push(message.sequence);
            }
        } else if !self.unacknowledged.is_empty() {
            self.connection.cdc_acknowledged(self.unacknowledged.remove(0));
        }
    }

    /// What others ask of a connection at any time.
    fn look(&self) {
        let us = &self.connection;
        assert!(us.window() <= self.rings[1].capacity());
        if let Some(urgent) = us.urgent_position() {
            assert!(urgent <= self.rings[0].capacity());
        }
    }

    /// Once its owner has let go, a connection ends by itself, with whatever peer.
    fn end(&mut self) {
        if !self.closed {
            self.connection.abort(self.now);
        }
        loop {
            // Messages wait until everything that must be written again is.
            if let Some(replay) = self.connection.replay() {
                self.connection.replayed(replay.rest.len());
            } else if self.connection.poll_cdc().is_none() {
                break;
            }
        }
        if let Some(at) = self.connection.poll_timeout() {
            assert!(self.connection.handle_timeout(at.max(self.now)));
        }
        assert!(self.connection.is_closed(), "{:?}", self.connection.state());
    }
}
