//! What can go wrong, each error answering one question: what must the caller do now?

use crate::ring::OutOfWindow;
use crate::wire::Malformed;

/// The peer broke the protocol.
///
/// The state of whoever returns this is unchanged. What must end is said by the method that
/// returned it: the rendezvous, the link, or one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerMisbehaved {
    /// It sent bytes that are not a message.
    Malformed(Malformed),
    /// A cursor lies where no honest cursor can be (RFC 4.3).
    OutOfWindow,
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
