//! What can go wrong, each error answering one question: what must the caller do now?

use crate::ring::OutOfWindow;
use crate::wire::Malformed;

/// The peer broke the protocol.
///
/// The method that returns it says what must end: the rendezvous, the link, or one connection. A
/// connection that returns this is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerMisbehaved {
    /// It sent bytes that are not a message.
    Malformed(Malformed),
    /// A cursor lies where no honest cursor can be (RFC 4.3).
    OutOfWindow,
    /// It announced more bytes than its window: it has overwritten bytes that we had not released
    /// (RFC 4.5).
    OverranOurElement,
    /// It announces more bytes of a connection that has begun to end, although messages before that
    /// are missing, and has not said that it changed the link (RFC 4.6.1): bytes may be missing,
    /// too.
    MessagesMissing,
    /// It claims to have consumed bytes that were never announced to it (RFC 4.5).
    ConsumedTheFuture,
    /// It sent a message that the protocol does not allow at this point (RFC C.6, C.7.1).
    UnexpectedMessage,
    /// Proposal and Confirm name different peers.
    IdentityChanged,
    /// CONFIRM LINK names another queue pair or link than the rendezvous did (RFC C.7.1).
    WrongLink,
    /// A reply to TEST LINK brings other bytes than the request carried (RFC C.7.1).
    WrongEcho,
}

impl From<Malformed> for PeerMisbehaved {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed)
    }
}

impl From<OutOfWindow> for PeerMisbehaved {
    fn from(OutOfWindow: OutOfWindow) -> Self {
        Self::OutOfWindow
    }
}
