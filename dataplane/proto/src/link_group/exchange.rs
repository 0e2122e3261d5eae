//! The exchange about links that is under way, and how far it has come (RFC 3.5.5.3).

use super::rmbs::RmbSet;
use crate::time::Instant;
use crate::vocabulary::{LinkNumber, QpAddress};

/// The exchange about links that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    /// The caller is creating a queue pair, or will be asked to at the time `at`. `theirs` is the
    /// server's offer; a server has none.
    Opening { number: LinkNumber, on: LinkNumber, theirs: Option<QpAddress>, at: Option<Instant> },
    /// Server: ADD LINK is out.
    Offered { number: LinkNumber, on: LinkNumber, deadline: Instant },
    /// The caller connects the queue pair.
    Connecting { number: LinkNumber, on: LinkNumber },
    /// Both sides tell their rkeys by ADD LINK CONTINUATION.
    Rkeys { number: LinkNumber, on: LinkNumber, pairs: Pairs, deadline: Instant },
    /// CONFIRM LINK, or its reply, is awaited. The link itself has the deadline.
    Confirming { number: LinkNumber },
    /// The caller moves connections away from a link that is to be deleted.
    Vacating { number: LinkNumber, deadline: Instant },
    /// Server: DELETE LINK is out.
    Deleting { number: LinkNumber, on: LinkNumber, deadline: Instant },
}

/// How far the exchange of rkeys has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pairs {
    /// Our RMBs whose rkeys were not told yet. The set is fixed when the exchange begins, because
    /// the peer counts them.
    pub(super) left: RmbSet,
    /// How many RMBs the peer still has to tell of; unknown before its first message.
    pub(super) peer_left: Option<u8>,
}

impl Pairs {
    /// Whether neither side has an RMB left to tell of.
    pub(super) fn are_told(self) -> bool {
        self.left == RmbSet::default() && self.peer_left == Some(0)
    }
}

impl Exchange {
    /// The link that it is about.
    pub(super) fn number(self) -> LinkNumber {
        match self {
            Self::Opening { number, .. }
            | Self::Offered { number, .. }
            | Self::Connecting { number, .. }
            | Self::Rkeys { number, .. }
            | Self::Confirming { number }
            | Self::Vacating { number, .. }
            | Self::Deleting { number, .. } => number,
        }
    }

    /// The link that carries its messages, if that is another one.
    pub(super) fn carrier(self) -> Option<LinkNumber> {
        match self {
            Self::Opening { on, .. }
            | Self::Offered { on, .. }
            | Self::Connecting { on, .. }
            | Self::Rkeys { on, .. }
            | Self::Deleting { on, .. } => Some(on),
            Self::Confirming { .. } | Self::Vacating { .. } => None,
        }
    }

    /// When to give up waiting for the peer, or for the caller.
    pub(super) fn deadline(self) -> Option<Instant> {
        match self {
            Self::Offered { deadline, .. }
            | Self::Rkeys { deadline, .. }
            | Self::Vacating { deadline, .. }
            | Self::Deleting { deadline, .. } => Some(deadline),
            Self::Opening { .. } | Self::Connecting { .. } | Self::Confirming { .. } => None,
        }
    }

    /// Whether connections are leaving a link. A server has not sent DELETE LINK yet.
    pub(super) fn vacates(self) -> bool {
        match self {
            Self::Vacating { .. } => true,
            Self::Opening { .. }
            | Self::Offered { .. }
            | Self::Connecting { .. }
            | Self::Rkeys { .. }
            | Self::Confirming { .. }
            | Self::Deleting { .. } => false,
        }
    }

    /// Whether a link is being added, rather than deleted.
    pub(super) fn adds(self) -> bool {
        match self {
            Self::Opening { .. }
            | Self::Offered { .. }
            | Self::Connecting { .. }
            | Self::Rkeys { .. }
            | Self::Confirming { .. } => true,
            Self::Vacating { .. } | Self::Deleting { .. } => false,
        }
    }
}
