//! What a connection shows of itself.

use super::{Connection, State, is_before};
use crate::wire::cdc::Cdc;

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

    /// Whether the peer has promised to touch our element no more: by C, or by A.
    pub fn has_peer_left(&self) -> bool {
        self.peer_left
    }

    /// Whether the failover validation message is due: nothing may be written before it.
    pub fn is_validation_due(&self) -> bool {
        self.validation_due
    }

    /// Whether this message or a later one was taken in: what failover validation asks (4.6.1).
    pub fn has_received(&self, sequence: u16) -> bool {
        !is_before(self.sequence_received, sequence)
    }

    /// Whether this message must not be taken in, because one before it may yet come, or bytes that
    /// it announces may be lost: messages are missing, and nobody has said why (F).
    ///
    /// Peers move only connections that have begun to end without a word. Of others a gap is our
    /// own doing: messages that our pollers pass on may overtake each other.
    pub fn is_behind_gap(&self, message: &Cdc) -> bool {
        let ending = self.done || self.closed || message.sending_done || message.connection_closed;
        let produced = self.receiver.resolve(message.producer);
        let brings_news = produced.is_ok_and(|produced| self.receiver.is_news(produced));
        let excused = self.gap_expected || message.failover_validation;
        ending && brings_news && !excused && self.leaves_gap(message)
    }

    pub(super) fn leaves_gap(&self, message: &Cdc) -> bool {
        let heard = self.sequence_received;
        heard != 0 && is_before(heard.wrapping_add(1), message.sequence)
    }
}
