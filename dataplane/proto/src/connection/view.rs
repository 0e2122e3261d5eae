//! What a connection shows of itself.

use super::{Connection, Half, State};

impl<R> Connection<R> {
    /// Where the connection is in Figures 22 and 23.
    pub fn state(&self) -> State {
        self.state
    }

    /// How many readable bytes come before the urgent byte, if one has arrived and has not been
    /// consumed.
    pub fn urgent_position(&self) -> Option<u32> {
        self.receiver.urgent_position()
    }

    /// Whether the peer has announced an urgent byte, arrived or not: P.
    pub fn is_urgent_pending(&self) -> bool {
        self.receiver.is_urgent_pending()
    }

    /// Whether the peer had more bytes than window when it spoke last: B. If it has said D or C, it
    /// may be a Linux peer that lost patience, and those bytes follow once there is window.
    pub fn is_peer_blocked(&self) -> bool {
        self.receiver.is_peer_blocked()
    }

    /// Whether the peer has ended this much of its side, or more.
    pub fn has_peer_said(&self, half: Half) -> bool {
        self.heard >= Some(half)
    }

    /// Whether the peer has promised to touch our element no more: by C, or by A.
    pub fn has_peer_left(&self) -> bool {
        self.peer_left
    }

    /// Whether the peer's NIC has acknowledged our last message, or we have given the peer up.
    pub fn is_heard(&self) -> bool {
        self.given_up || self.outgoing.acknowledged.wrapping_add(1) == self.outgoing.next
    }
}
