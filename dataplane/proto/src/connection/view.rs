//! What a connection shows of itself.

use super::{Connection, State, is_before};

impl Connection {
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

    /// Whether the failover validation message is due: nothing may be written before it.
    pub fn is_validation_due(&self) -> bool {
        self.validation_due
    }

    /// Whether this message or a later one was taken in: what failover validation asks (4.6.1).
    pub fn has_received(&self, sequence: u16) -> bool {
        !is_before(self.sequence_received, sequence)
    }
}
