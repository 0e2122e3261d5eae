//! The CLC rendezvous: four messages on the TCP connection decide whether it becomes SMC-R
//! (RFC 3.5.1, 3.5.2, appendix C).
//!
//! ```text
//!   Client                                   Server
//!     │ ── Proposal ─────────────────────────► │ Provide: queue pair, element
//!     │ ◄──────────────────────────── Accept ─ │
//!     │ OpenLink or JoinLink                   │
//!     │ ── Confirm ──────────────────────────► │ ConnectLink (first contact)
//!     │ ◄─ · · CONFIRM LINK and ADD LINK · · ► │ link_group, over the queue pair
//!     │ Done                                   │ Done
//! ```
//!
//! Either side may say Decline in place of a message that the other expects, never after one
//! (C.1). In a first contact that remains possible until the link group says that the point of no
//! return is behind (C.3).
//!
//! Which version of SMC-R the connection speaks is part of it: see [`Agreement`]. `Client::new` and
//! `Server::new` speak version 1 only.
//!
//! The caller frames and encodes; see [`wire::clc`](crate::wire::clc). What comes from the TCP
//! stream goes into `handle_frame`; a [`HandshakeError`] ends the rendezvous, and its
//! [`verdict`](HandshakeError::verdict) says what becomes of the TCP connection.

use crate::error::PeerMisbehaved;
use crate::wire::Malformed;
use crate::wire::clc::Diagnosis;

mod agreement;
mod client;
mod server;

pub use agreement::{Agreement, AgreementV2, Path, Policy, PolicyV2};
pub use client::{Client, ClientAction};
pub use server::{Server, ServerAction};

/// Why a rendezvous did not end in an SMC-R connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    /// The peer broke the protocol.
    Peer(PeerMisbehaved),
    /// The peer follows the protocol but said no. With `out_of_sync`, what we take for our link
    /// group does not exist there: end it.
    Declined {
        /// Its reason.
        diagnosis: Diagnosis,
        /// S: the link group the rendezvous was about is gone.
        out_of_sync: bool,
    },
    /// The peer uses a value that was reserved when this was written (C.6).
    Unsupported,
    /// The peer's answer is none that our offer of SMC-Rv2 allows.
    Disagreed(Diagnosis),
    /// A CLC message did not come in time.
    TimedOut,
    /// The link of a first contact was not confirmed, and no Decline explained why.
    LinkFailed {
        /// The point of no return is behind: the peer may already use the link (C.3).
        committed: bool,
    },
}

/// What is left of the TCP connection that carried the rendezvous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Send Decline with this code, if any, and relay over TCP.
    FallBack(Option<Diagnosis>),
    /// The peer's byte stream can no longer be trusted: close it.
    Close,
}

impl HandshakeError {
    /// What the caller must do with the TCP connection.
    ///
    /// # Specification
    ///
    /// RFC 7609, C.5: a connection on which CLC messages do not arrive in time would not carry
    /// data either. C.6: after a protocol error nobody can tell messages from data, except that an
    /// unknown enumerated value is declined. C.7: a link that fails before the point of no return
    /// is declined, as deployed peers do also when its messages time out; after it, the
    /// connection is reset.
    pub fn verdict(self) -> Verdict {
        match self {
            // RFC 7609 C.3 #3: reset beyond point of no return
            // RFC 7609 C.5 #2: end TCP when CLC times out
            // RFC 7609 C.6 #4: protocol error ends TCP
            Self::Peer(_) | Self::TimedOut | Self::LinkFailed { committed: true } => Verdict::Close,
            // RFC 7609 3.2 #5: either side may decline to TCP
            // RFC 7609 C.1 #3: never answer a Decline
            // RFC 7609 C.4 #2: go on as TCP after S
            Self::Declined { .. } => Verdict::FallBack(None),
            Self::Disagreed(diagnosis) => Verdict::FallBack(Some(diagnosis)),
            Self::Unsupported => Verdict::FallBack(Some(Diagnosis::CONFIGURATION)),
            // RFC 7609 C.2 #1: may decline until CONFIRM LINK is sent
            // RFC 7609 C.7 #5: decline if CONFIRM LINK send fails
            // RFC 7609 C.7 #7: decline if CONFIRM LINK reply fails
            Self::LinkFailed { committed: false } => {
                Verdict::FallBack(Some(Diagnosis::CONFIRM_LINK_TIMED_OUT))
            }
        }
    }
}

impl From<PeerMisbehaved> for HandshakeError {
    fn from(offence: PeerMisbehaved) -> Self {
        Self::Peer(offence)
    }
}

impl From<Malformed> for HandshakeError {
    fn from(malformed: Malformed) -> Self {
        Self::Peer(PeerMisbehaved::Malformed(malformed))
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_hostile;
#[cfg(test)]
mod tests_v2;
