//! The CDC message: two cursors and two flag bytes (RFC A.4).

use crate::vocabulary::AlertToken;

/// A cursor as it travels: how often the ring wrapped, and the offset within it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// How many times the ring has wrapped, modulo 2^16.
    pub wrap: u16,
    /// Offset in bytes within the element.
    pub count: u32,
}

/// One connection data control message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cdc {
    /// Counts messages of the connection; the first is 1, after 65,535 comes 0.
    pub sequence: u16,
    /// The alert token that the receiver chose for this connection.
    pub token: AlertToken,
    /// Where the sender will write next in the receiver's element.
    pub producer: Cursor,
    /// Up to where the sender has consumed its own element.
    pub consumer: Cursor,
    /// B: the sender has more data than the receiver has room.
    pub writer_blocked: bool,
    /// P: urgent data is on its way.
    pub urgent_pending: bool,
    /// U: the byte before the producer cursor is urgent.
    pub urgent_present: bool,
    /// R: answer with your consumer cursor.
    pub update_requested: bool,
    /// F: this message validates a failover and carries no cursors.
    pub failover_validation: bool,
    /// D: no byte follows.
    pub sending_done: bool,
    /// C: the connection is closed, and the receiver's element will not be written again.
    pub connection_closed: bool,
    /// A: the connection is reset.
    pub abnormal_close: bool,
}
