//! What a message changes.

#[cfg(doc)]
use super::{Connection, Streams};

/// What a CDC message changed. All of it may be zero: messages may repeat cursors that we know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of our element that became readable.
    pub readable_bytes: u32,
    /// Bytes by which the window towards the peer grew.
    pub writable_bytes: u32,
    /// The peer has just said that it writes no more: D, or C. The end of the stream follows what
    /// is readable, and what a Linux peer may still add (see [`Connection::handle_cdc`]).
    pub peer_done: bool,
    /// The peer has just closed: C. Bytes for it have nowhere to go any more.
    pub peer_closed: bool,
    /// The connection has just been reset, by the peer or because it cannot go on.
    pub reset: bool,
    /// The position of an urgent byte has just become known; see [`Connection::urgent_position`].
    pub urgent: bool,
    /// The peer has just begun the next stream: the one before is over, and all else is about the
    /// new one. Only where the peer [begins streams](Streams::Follows).
    pub begun: bool,
}
