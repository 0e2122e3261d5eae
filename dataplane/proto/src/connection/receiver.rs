//! What the peer writes into our element, and when we tell it what was consumed (RFC 4.5.1).

use crate::error::PeerMisbehaved;
use crate::ring::{Position, Ring, Span};
use crate::wire::cdc::{Cdc, Cursor};

/// Our end of the other direction.
///
/// ```text
///    told          consumed          produced          told + capacity
///      |-- a secret --|---- readable ----|-- the peer's window --|
/// ```
#[derive(Clone, Debug)]
pub(super) struct Receiver {
    ring: Ring,
    /// What the last message told the peer about our consumption.
    told: Position,
    /// What the application has taken.
    consumed: Position,
    /// What the peer has announced.
    produced: Position,
    /// B of its last message: it has more bytes than window.
    peer_blocked: bool,
    /// R of its last message: it wants to know what we consume.
    update_requested: bool,
    /// P of its last message.
    urgent_pending: bool,
    /// The position behind the last urgent byte; what is not beyond `told` is history.
    urgent_end: Position,
}

impl Receiver {
    pub(super) fn new(ring: Ring) -> Self {
        let start = Position::default();
        Self {
            ring,
            told: start,
            consumed: start,
            produced: start,
            peer_blocked: false,
            update_requested: false,
            urgent_pending: false,
            urgent_end: start,
        }
    }

    /// What was announced and not consumed; nothing, if nobody `wanted` it.
    pub(super) fn readable(&self, wanted: bool) -> Span {
        let len = if wanted { self.produced.since_u32(self.consumed) } else { 0 };
        self.ring.span(self.consumed, len)
    }

    pub(super) fn consume(&mut self, len: u32) {
        self.consumed += u64::from(len);
        assert!(self.consumed <= self.produced);
    }

    /// Bytes before the urgent one, if it is readable.
    pub(super) fn urgent_position(&self) -> Option<u32> {
        (self.urgent_end > self.consumed).then(|| self.urgent_end.since_u32(self.consumed) - 1)
    }

    pub(super) fn is_urgent_pending(&self) -> bool {
        self.urgent_pending
    }

    pub(super) fn is_peer_blocked(&self) -> bool {
        self.peer_blocked
    }

    /// Whether our consumer cursor is worth a message of its own.
    ///
    /// The peer must never wait for something that we keep to ourselves, and must not be bothered
    /// by every small read either. Deployed peers rely on the first half: one that has filled its
    /// window says B at most once, and sleeps until our message.
    ///
    /// # Specification
    ///
    /// RFC 7609, 4.5.1; urgent data, 4.7.5. Half a window still open counts as little, as it does
    /// for Linux.
    pub(super) fn is_update_due(&self) -> bool {
        let gain = self.consumed.since(self.told);
        let capacity = u64::from(self.ring.capacity());
        let window = capacity - self.produced.since(self.told);
        // RFC 7609 4.5.1 #2: update when window is below half
        // RFC 7609 4.5.1 #3: no update above half window
        // RFC 7609 4.5.1 #4: no update below a tenth
        // RFC 7609 4.7.1 #5: no update for unconstrained window
        // RFC 7609 4.7.3 #2: report consumption below half window
        let worthwhile = window * 2 <= capacity && gain * 10 >= capacity;
        // RFC 7609 4.7.5 #4: always report urgent consumption
        let urgent_consumed = self.told < self.urgent_end && self.urgent_end <= self.consumed;
        // RFC 7609 4.5.1 #6: while B holds, report any consumption
        // RFC 7609 4.5.1 #7: without B, ordinary updates again
        // RFC 7609 4.5.1 #8: report next consumption after R
        // RFC 7609 4.5.1 #9: answer R if cursor is old
        // RFC 7609 4.7.4 #7: tell blocked writer at once
        gain > 0 && (self.peer_blocked || self.update_requested || urgent_consumed || worthwhile)
    }

    /// Whether the peer was told that everything is consumed.
    pub(super) fn is_all_told(&self) -> bool {
        self.told == self.produced
    }

    /// The consumer cursor of a message that goes out now.
    pub(super) fn announce(&mut self) -> Cursor {
        // RFC 7609 4.7.2 #2: do not tell a cursor twice
        // RFC 7609 2.1 #16: report consumption by consumer cursor
        self.told = self.consumed;
        self.told.to_cursor(self.ring)
    }

    /// What the peer's producer cursor means. Changes nothing.
    ///
    /// The peer knows of `told` at best, so bytes beyond its window were written over bytes that
    /// it could not know to be consumed. One that changes the link goes back, as Linux does, to
    /// what it knows to be delivered, and writes the same bytes again: until it is where it was,
    /// there is nothing new.
    pub(super) fn resolve(&self, cursor: Cursor) -> Result<Position, PeerMisbehaved> {
        let earliest = Position(self.produced.0.saturating_sub(self.ring.capacity().into()));
        let known = |earlier: Position| earlier <= self.produced;
        if cursor.resolve(earliest, self.ring).is_ok_and(known) {
            return Ok(self.produced);
        }
        let produced = cursor.resolve(self.produced, self.ring)?;
        // RFC 7609 4.7.3 #1: window from last told cursor
        // RFC 7609 A.4 #11: producer stays within consumer cursor
        if produced.since(self.told) > u64::from(self.ring.capacity()) {
            return Err(PeerMisbehaved::OverranOurElement);
        }
        Ok(produced)
    }

    /// Whether bytes up to this position were not announced before.
    pub(super) fn is_news(&self, produced: Position) -> bool {
        produced > self.produced
    }

    /// Takes over a position that [`Self::resolve`] returned, and the flags about data. Returns
    /// whether an urgent byte became known.
    pub(super) fn peer_produced(&mut self, produced: Position, message: &Cdc) -> bool {
        // RFC 7609 4.7.1 #4: producer cursor says what is readable
        // RFC 7609 4.3 #1: store what CDC messages say
        // RFC 7609 2.1 #13: read only up to producer cursor
        let advanced = produced > self.produced;
        self.produced = produced;
        self.peer_blocked = message.writer_blocked;
        self.update_requested = message.update_requested;
        self.urgent_pending = message.urgent_pending;
        let urgent = message.urgent_present && advanced;
        if urgent {
            // RFC 7609 4.7.5 #3: U locates the urgent byte
            self.urgent_end = produced;
        }
        assert!(self.told <= self.consumed && self.consumed <= self.produced);
        assert!(self.urgent_end <= self.produced);
        urgent
    }
}
