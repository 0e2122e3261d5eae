//! What we write into the peer's element: the window, and what was announced of it (RFC 4.5).

use crate::error::PeerMisbehaved;
use crate::ring::{Position, Ring, Span};
use crate::wire::cdc::Cursor;

/// Our end of one direction.
///
/// ```text
///   consumed        announced        produced        consumed + capacity
///      |-- the peer's --|---- written ----|------ window ------|
/// ```
#[derive(Clone, Debug)]
pub(super) struct Sender {
    ring: Ring,
    /// What the peer has told us it consumed.
    consumed: Position,
    /// What a message has told the peer to be there.
    announced: Position,
    /// What was, or is about to be, written.
    produced: Position,
    /// The application has bytes for which there is no window.
    waiting: bool,
    urgent: Urgent,
}

/// Where the urgent byte of the application is, if any (RFC 4.7.5, 4.7.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Urgent {
    /// There is none, or later bytes have followed it.
    None,
    /// It waits for window: P.
    Pending,
    /// It is the last byte produced, before this position: U, and P in the message that brings it.
    /// Nothing may follow before the peer has consumed it.
    Present(Position),
}

impl Sender {
    pub(super) fn new(ring: Ring) -> Self {
        let start = Position::default();
        Self {
            ring,
            consumed: start,
            announced: start,
            produced: start,
            waiting: false,
            urgent: Urgent::None,
        }
    }

    /// Bytes that may be written, as far as cursors and urgent data go.
    pub(super) fn window(&self) -> u32 {
        match self.urgent {
            // RFC 7609 4.7.5 #5: wait until urgent byte is consumed
            // RFC 7609 4.7.6 #5: hold data behind urgent byte
            Urgent::Present(end) if self.consumed < end => 0,
            Urgent::Present(_) | Urgent::Pending | Urgent::None => {
                // RFC 7609 4.5.1 #1: compute window from both cursors
                // RFC 7609 2.1 #14: write only up to consumer cursor
                // RFC 7609 A.4 #15: equal cursors mean all consumed
                self.ring.capacity() - self.produced.since_u32(self.consumed)
            }
        }
    }

    /// Where the stream ends.
    pub(super) fn produced(&self) -> Position {
        self.produced
    }

    /// Of the last `kept` bytes of the stream, the first that the peer is not known to have read.
    pub(super) fn oldest_unread(&self, kept: u64) -> Position {
        assert!(kept <= self.produced.0, "no more can be kept than was produced");
        Position(self.produced.0 - kept).max(self.consumed)
    }

    /// Where the bytes from `position` to the end of the stream belong.
    pub(super) fn span_from(&self, position: Position) -> Span {
        self.ring.span(position, self.produced.since_u32(position))
    }

    pub(super) fn produce(&mut self, len: u32) -> Span {
        let span = self.ring.span(self.produced, len);
        self.produced += u64::from(len);
        if let Urgent::Present(end) = self.urgent
            && self.produced > end
        {
            // RFC 7609 4.7.5 #6: clear P and U with next data
            self.urgent = Urgent::None;
        }
        assert!(self.produced.since(self.consumed) <= u64::from(self.ring.capacity()));
        span
    }

    pub(super) fn produce_urgent(&mut self, len: u32) -> Span {
        let span = self.produce(len);
        // RFC 7609 4.7.5 #1: P and U announce urgent data
        // RFC 7609 4.7.6 #3: send urgent data when window opens
        self.urgent = Urgent::Present(self.produced);
        span
    }

    /// Returns whether that is news. It is none while an earlier urgent byte is under way: the peer
    /// has been told of that one.
    pub(super) fn announce_urgent(&mut self) -> bool {
        match self.urgent {
            Urgent::Pending => false,
            Urgent::Present(end) if self.consumed < end => false,
            Urgent::Present(_) | Urgent::None => {
                // RFC 7609 4.7.6 #1: P alone while window is closed
                self.urgent = Urgent::Pending;
                true
            }
        }
    }

    /// Whether the peer has consumed all that was produced.
    pub(super) fn is_all_consumed(&self) -> bool {
        self.is_all(self.consumed)
    }

    /// Whether nothing was produced behind this position.
    pub(super) fn is_all(&self, consumed: Position) -> bool {
        consumed == self.produced
    }

    /// Nothing of the stream that has ended waits any more, and none of its bytes is urgent.
    pub(super) fn begin_stream(&mut self) {
        self.waiting = false;
        self.urgent = Urgent::None;
    }

    pub(super) fn set_waiting(&mut self, waiting: bool) {
        self.waiting = waiting;
    }

    pub(super) fn has_waiting(&self) -> bool {
        self.waiting
    }

    /// Whether a byte that comes now would have to wait until the peer tells us what it consumed.
    /// Behind an urgent byte it waits for that one's consumption, which the peer reports anyway.
    pub(super) fn is_full(&self) -> bool {
        match self.urgent {
            Urgent::Present(end) if self.consumed < end => false,
            Urgent::Present(_) | Urgent::Pending | Urgent::None => self.window() == 0,
        }
    }

    /// Whether an urgent byte waits for window.
    pub(super) fn is_urgent_pending(&self) -> bool {
        self.urgent == Urgent::Pending
    }

    /// Whether the next message is the first to bring an urgent byte.
    pub(super) fn is_urgent_news(&self) -> bool {
        self.is_urgent_present() && self.is_due()
    }

    pub(super) fn is_urgent_present(&self) -> bool {
        match self.urgent {
            Urgent::Present(_) => true,
            Urgent::Pending | Urgent::None => false,
        }
    }

    /// Whether bytes were written that the peer does not know of.
    pub(super) fn is_due(&self) -> bool {
        self.announced < self.produced
    }

    /// The producer cursor of a message that goes out now.
    pub(super) fn announce(&mut self) -> Cursor {
        // RFC 7609 4.3 #4: writer sets the producer cursor
        self.announced = self.produced;
        self.announced.to_cursor(self.ring)
    }

    /// What the peer's consumer cursor means. Changes nothing.
    pub(super) fn resolve(&self, cursor: Cursor) -> Result<Position, PeerMisbehaved> {
        let consumed = cursor.resolve(self.consumed, self.ring)?;
        if consumed > self.announced {
            return Err(PeerMisbehaved::ConsumedTheFuture);
        }
        Ok(consumed)
    }

    /// Takes over a position that [`Self::resolve`] returned.
    pub(super) fn peer_consumed(&mut self, consumed: Position) {
        // RFC 7609 4.3 #5: owner sets the consumer cursor
        self.consumed = consumed;
        assert!(self.consumed <= self.announced && self.announced <= self.produced);
    }
}
