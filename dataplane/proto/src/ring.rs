//! Positions and cursors of wrapping buffers, once for everybody (RFC 4.3).
//!
//! The RFC's cursors wrap twice, by offset and by a 16-bit lap count; code that compares them
//! directly is code with bugs. Everybody counts bytes from the start of the connection, and only
//! [`Cursor`] in a CDC message wraps. This module knows no memory: it says which bytes, never
//! where they are.

use core::ops::{Add, AddAssign, Range};

use crate::vocabulary::RmbeSize;
use crate::wire::cdc::Cursor;

/// Bytes of the eye catcher that may stand at the beginning of an RMB element (RFC 4.2).
pub const EYE_CATCHER_BYTES: u32 = 4;

/// How many bytes have ever passed one point of one direction of a connection.
///
/// Never wraps: at 400 Gbit/s a `u64` of bytes lasts eleven years. All arithmetic is done on
/// positions; the `(wrap, count)` pairs of the RFC exist only in CDC messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

impl Position {
    /// The bytes from `earlier` to here.
    ///
    /// # Panics
    ///
    /// If `earlier` is later. Compare positions first where a peer had a say.
    pub fn since(self, earlier: Self) -> u64 {
        assert!(earlier <= self, "{earlier:?} is later than {self:?}");
        self.0 - earlier.0
    }

    /// The bytes from `earlier` to here, where both lie within one ring.
    ///
    /// # Panics
    ///
    /// If `earlier` is later, or more than `u32::MAX` bytes ago: no ring is that long.
    pub fn since_u32(self, earlier: Self) -> u32 {
        u32::try_from(self.since(earlier)).expect("two positions within one ring")
    }

    /// How this position is told to the peer.
    ///
    /// # Specification
    ///
    /// RFC 7609, A.4: the wrap count is that of the laps completed, modulo 2^16; the count skips
    /// the eye catcher, and never equals the end of the ring.
    #[expect(clippy::cast_possible_truncation, reason = "laps travel modulo 2^16")]
    pub fn to_cursor(self, ring: Ring) -> Cursor {
        // RFC 7609 A.4 #13: wrap cursor at element size
        // RFC 7609 A.4 #14: wrap count is two bytes
        // RFC 7609 4.7.4 #3: count wraps of producer cursor
        // RFC 7609 4.3 #6: count wraps of each cursor
        let lap = self.0 / u64::from(ring.capacity);
        Cursor { wrap: lap as u16, count: ring.origin + ring.offset(self) }
    }
}

impl Add<u64> for Position {
    type Output = Self;

    fn add(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl AddAssign<u64> for Position {
    fn add_assign(&mut self, bytes: u64) {
        *self = *self + bytes;
    }
}

/// A cursor that no honest peer can send, given what it sent before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfWindow;

impl Cursor {
    /// The position this cursor means, given the last one we knew.
    ///
    /// Between two CDC messages a cursor gains at most one full ring, so `wrap` is that of
    /// `floor` or the next. A count at the very end of the ring is taken for the beginning of the
    /// next lap, as Linux takes it.
    ///
    /// # Errors
    ///
    /// [`OutOfWindow`] if the cursor lies before `floor`, more than a ring beyond it, or outside
    /// the ring. Messages that a failover delivers late must be dropped by sequence number first.
    ///
    /// # Specification
    ///
    /// RFC 7609, 4.3 and A.4.
    pub fn resolve(self, floor: Position, ring: Ring) -> Result<Position, OutOfWindow> {
        let capacity = u64::from(ring.capacity);
        let offset = self.count.checked_sub(ring.origin).ok_or(OutOfWindow)?;
        if offset > ring.capacity {
            return Err(OutOfWindow);
        }
        let (wrap, offset) = match offset == ring.capacity {
            true => (self.wrap.wrapping_add(1), 0),
            false => (self.wrap, offset),
        };
        let laps_gained = wrap.wrapping_sub(floor.to_cursor(ring).wrap);
        let position = (floor.0 / capacity)
            .checked_add(u64::from(laps_gained))
            .and_then(|lap| lap.checked_mul(capacity))
            .and_then(|start| start.checked_add(u64::from(offset)))
            .map(Position)
            .ok_or(OutOfWindow)?;
        // RFC 7609 4.7.4 #5: equal cursors, other wrap: full
        // RFC 7609 A.4 #11: producer stays within consumer cursor
        match position >= floor && position.since(floor) <= capacity {
            true => Ok(position),
            false => Err(OutOfWindow),
        }
    }
}

/// The shape of a wrapping buffer: where its data area begins, and how long that is.
///
/// RMB elements of deployed peers are data from the first byte to the last. Where RMBE eye
/// catchers are in use, the data area begins behind one, and cursors skip it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    capacity: u32,
    origin: u32,
}

impl Ring {
    /// A buffer of `bytes`, all of them data.
    ///
    /// # Panics
    ///
    /// If `bytes` is zero.
    pub const fn new(bytes: u32) -> Self {
        assert!(bytes > 0, "a ring holds something");
        Self { capacity: bytes, origin: 0 }
    }

    /// A buffer of `bytes` that begins with an eye catcher (RFC 4.2).
    ///
    /// # Panics
    ///
    /// If nothing remains behind the eye catcher.
    pub const fn with_eye_catcher(bytes: u32) -> Self {
        assert!(bytes > EYE_CATCHER_BYTES, "a ring holds something");
        Self { capacity: bytes - EYE_CATCHER_BYTES, origin: EYE_CATCHER_BYTES }
    }

    /// An RMB element of a peer that does, or does not, use eye catchers.
    pub const fn of_element(size: RmbeSize, eye_catcher: bool) -> Self {
        match eye_catcher {
            true => Self::with_eye_catcher(size.bytes()),
            false => Self::new(size.bytes()),
        }
    }

    /// The length of the data area in bytes.
    pub const fn capacity(self) -> u32 {
        self.capacity
    }

    /// Where the data area begins within the buffer, in bytes.
    pub const fn origin(self) -> u32 {
        self.origin
    }

    /// The `len` bytes from `position` on.
    ///
    /// # Panics
    ///
    /// If `len` exceeds the capacity.
    pub fn span(self, position: Position, len: u32) -> Span {
        assert!(len <= self.capacity, "{len} bytes in a ring of {}", self.capacity);
        Span { ring: self, start: self.offset(position), len }
    }

    /// Where `position` lies within the data area.
    #[expect(clippy::cast_possible_truncation, reason = "a remainder is below the capacity")]
    fn offset(self, position: Position) -> u32 {
        (position.0 % u64::from(self.capacity)) as u32
    }
}

/// Consecutive bytes of a ring, which may cross its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    ring: Ring,
    /// Within the data area; below the capacity.
    start: u32,
    /// At most the capacity.
    len: u32,
}

impl Span {
    /// How many bytes these are.
    pub const fn len(self) -> u32 {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Offsets in the buffer of the bytes before the wrap, and of those after it (empty if there
    /// is no wrap). The eye catcher is never among them.
    pub fn pieces(self) -> [Range<u32>; 2] {
        let Ring { capacity, origin } = self.ring;
        // RFC 7609 4.2 #4: use the element as a ring
        // RFC 7609 4.7.4 #1: write wrapped data in two pieces
        // RFC 7609 4.7.4 #6: read a full element in order
        let head = self.len.min(capacity - self.start);
        let start = origin + self.start;
        [start..start + head, origin..origin + (self.len - head)]
    }

    /// The first `len` bytes, and the rest.
    ///
    /// # Panics
    ///
    /// If there are fewer than `len` bytes.
    pub fn split_at(self, len: u32) -> (Self, Self) {
        assert!(len <= self.len, "{len} of {} bytes", self.len);
        let until_end = self.ring.capacity - self.start;
        let start = if len < until_end { self.start + len } else { len - until_end };
        (Self { len, ..self }, Self { start, len: self.len - len, ..self })
    }
}

#[cfg(test)]
mod tests;
