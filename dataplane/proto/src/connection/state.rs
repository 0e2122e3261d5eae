//! The states of a connection: RFC 7609, Figures 22 and 23, as one table.
//!
//! The figures merge what the peers have *said* (D or C) with who said it first. Where that leaves
//! open what a side may still say, the state carries it as a [`Half`].

/// How much of a connection a side has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Half {
    /// D: it writes no more.
    Done,
    /// C: it neither writes nor reads, and touches the other side's element no more.
    Closed,
}

/// A state of Figure 22 or 23. The names are the RFC's, and those that `smcss` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Both directions are open.
    Active,
    /// We ended first, this much; the peer has said nothing.
    PeerCloseWait1(Half),
    /// We ended first, this much; the peer has said D.
    PeerCloseWait2(Half),
    /// We have said D, the peer C: only our application is missing.
    AppFinCloseWait,
    /// The peer ended first, this much; we have said nothing.
    AppCloseWait1(Half),
    /// The peer said D, then we said D.
    AppCloseWait2,
    /// The peer said D, then we said C: only its C is missing.
    PeerFinCloseWait,
    /// We have said A and wait for the peer's.
    PeerAbortWait,
    /// We owe an A, and nothing is left to wait for.
    ProcessAbort,
    /// Neither side touches the other's element any more.
    Closed,
}

/// What can happen to a connection, as far as its end is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A step of the orderly end.
    Orderly(Orderly),
    /// The application is gone, or must go, and bytes are lost.
    Abort,
    /// A was received, for the first time or again.
    PeerAborted,
    /// A message with our A was handed out.
    AbortSent,
    /// The peer did not do its part in time.
    Timeout,
}

/// The steps of Figure 22, on either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Orderly {
    /// The application writes no more.
    ShutdownWrite,
    /// The application is gone, having read everything.
    Close,
    /// D was received, for the first time or again.
    PeerDone,
    /// C was received, for the first time or again.
    PeerClosed,
}

/// What a transition demands: at most one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Set D in this and all later messages.
    SayDone,
    /// Set C.
    SayClosed,
    /// Set A.
    SayAbort,
    /// Send nothing more, not even what is due.
    GiveUp,
}

impl State {
    /// Whether bytes may still be written to the peer.
    pub fn may_write(self) -> bool {
        match self {
            Self::Active | Self::AppCloseWait1(Half::Done) => true,
            Self::AppCloseWait1(Half::Closed)
            | Self::PeerCloseWait1(_)
            | Self::PeerCloseWait2(_)
            | Self::AppFinCloseWait
            | Self::AppCloseWait2
            | Self::PeerFinCloseWait
            | Self::PeerAbortWait
            | Self::ProcessAbort
            | Self::Closed => false,
        }
    }

    /// Whether our side is through, and only the peer keeps the connection from being closed.
    ///
    /// A half-closed connection (D, not C) does not wait in this sense: its application may go on
    /// reading for days.
    pub fn waits_for_peer(self) -> bool {
        match self {
            Self::PeerCloseWait1(Half::Closed)
            | Self::PeerCloseWait2(Half::Closed)
            | Self::PeerFinCloseWait
            | Self::PeerAbortWait => true,
            Self::Active
            | Self::PeerCloseWait1(Half::Done)
            | Self::PeerCloseWait2(Half::Done)
            | Self::AppFinCloseWait
            | Self::AppCloseWait1(_)
            | Self::AppCloseWait2
            | Self::ProcessAbort
            | Self::Closed => false,
        }
    }

    /// Whether the connection was reset, or is over.
    pub fn is_ending_abnormally(self) -> bool {
        match self {
            Self::PeerAbortWait | Self::ProcessAbort | Self::Closed => true,
            Self::Active
            | Self::PeerCloseWait1(_)
            | Self::PeerCloseWait2(_)
            | Self::AppFinCloseWait
            | Self::AppCloseWait1(_)
            | Self::AppCloseWait2
            | Self::PeerFinCloseWait => false,
        }
    }

    /// The state after `event`, and what it demands. `transitions.txt` lists every outcome.
    ///
    /// # Specification
    ///
    /// RFC 7609, 4.8.2. The comments have the numbers of Figure 23.
    pub(super) fn after(self, event: Event) -> (Self, Option<Action>) {
        use {Action as A, Event as E, Half as H, State as S};
        match (self, event) {
            (_, E::Orderly(step)) => self.after_orderly(step),

            (S::Closed, _) => (S::Closed, None),
            // RFC 7609 4.8.2 #6: peer's A: PeerAbortWait to Closed
            // RFC 7609 4.8.2 #12: both sides may abort at once
            (S::PeerAbortWait, E::PeerAborted) => (S::Closed, None), // 1B
            // RFC 7609 4.8.2 #7: limit PeerAbortWait by a timer
            // RFC 7609 4.4.2 #2: reuse element after a timeout
            // RFC 7609 4.8.1 #23: free element after closing timeout
            (S::PeerAbortWait, E::Timeout) => (S::Closed, Some(A::GiveUp)),
            (S::PeerAbortWait, E::Abort | E::AbortSent) => (self, None),
            // RFC 7609 4.8.2 #10: answer A with A
            (S::ProcessAbort, E::AbortSent) => (S::Closed, None), // 2B
            (S::ProcessAbort, E::Abort | E::PeerAborted | E::Timeout) => (self, None),

            // After our C there is no abort ("any state before"): only the peer's word, whichever
            // it is, or our patience. The C itself still goes out.
            (
                S::PeerCloseWait1(H::Closed) | S::PeerCloseWait2(H::Closed) | S::PeerFinCloseWait,
                E::PeerAborted | E::Abort,
            ) => (S::Closed, None),
            (
                S::PeerCloseWait1(H::Closed) | S::PeerCloseWait2(H::Closed) | S::PeerFinCloseWait,
                E::Timeout,
            ) => (S::Closed, Some(A::GiveUp)),

            // After the peer's C there is no answer to wait for.
            (S::AppFinCloseWait | S::AppCloseWait1(H::Closed), E::Abort) => {
                (S::ProcessAbort, Some(A::SayAbort))
            }
            // RFC 7609 4.8.2 #3: abort sends A: to PeerAbortWait
            (_, E::Abort) => (S::PeerAbortWait, Some(A::SayAbort)), // 1A
            // RFC 7609 4.8.2 #10: answer A with A
            (_, E::PeerAborted) => (S::ProcessAbort, Some(A::SayAbort)), // 2A
            (_, E::AbortSent | E::Timeout) => (self, None),
        }
    }

    /// What D and C do, on either side. They are levels in every message, so every state swallows
    /// what it has heard before.
    ///
    /// # Specification
    ///
    /// RFC 7609, 4.8.1. The comments have the numbers of Figure 22.
    fn after_orderly(self, step: Orderly) -> (Self, Option<Action>) {
        use {Action as A, Half as H, Orderly as O, State as S};
        match (self, step) {
            // A peer that says C in place of its A also promises to write no more.
            (S::PeerAbortWait, O::PeerClosed) => (S::Closed, None),
            (S::Closed | S::ProcessAbort | S::PeerAbortWait, _) => (self, None),

            // RFC 7609 4.8.1 #6: end of writing sends D
            // RFC 7609 4.8.1 #7: close or shutdown: to PeerCloseWait1
            (S::Active, O::ShutdownWrite) => (S::PeerCloseWait1(H::Done), Some(A::SayDone)), // 3A
            // RFC 7609 4.8.1 #16: shutdown sends D: to AppCloseWait2
            (S::AppCloseWait1(H::Done), O::ShutdownWrite) => {
                (S::AppCloseWait2, Some(A::SayDone)) // 4B
            }
            (S::AppCloseWait1(H::Closed), O::ShutdownWrite) => {
                (S::AppFinCloseWait, Some(A::SayDone))
            }
            (_, O::ShutdownWrite) => (self, None),

            // RFC 7609 4.8.1 #5: closing both directions sends C
            // RFC 7609 4.8.1 #7: close or shutdown: to PeerCloseWait1
            (S::Active | S::PeerCloseWait1(H::Done), O::Close) => {
                (S::PeerCloseWait1(H::Closed), Some(A::SayClosed)) // 3A
            }
            (S::PeerCloseWait2(H::Done), O::Close) => {
                (S::PeerCloseWait2(H::Closed), Some(A::SayClosed))
            }
            // RFC 7609 4.8.1 #18: close before peer's C: to PeerFinCloseWait
            (S::AppCloseWait1(H::Done) | S::AppCloseWait2, O::Close) => {
                (S::PeerFinCloseWait, Some(A::SayClosed)) // 4C
            }
            // RFC 7609 4.8.1 #11: half-closed waits for application's close
            // RFC 7609 4.8.1 #17: close after peer's C: to Closed
            (S::AppFinCloseWait | S::AppCloseWait1(H::Closed), O::Close) => {
                (S::Closed, Some(A::SayClosed)) // 3D, 4C
            }
            (_, O::Close) => (self, None),

            // RFC 7609 4.8.1 #13: peer's D or C: to AppCloseWait1
            (S::Active, O::PeerDone) => (S::AppCloseWait1(H::Done), None), // 4A
            // RFC 7609 4.8.1 #8: peer's D: to PeerCloseWait2
            (S::PeerCloseWait1(half), O::PeerDone) => (S::PeerCloseWait2(half), None), // 3B
            (_, O::PeerDone) => (self, None),

            // RFC 7609 4.8.1 #13: peer's D or C: to AppCloseWait1
            (S::Active | S::AppCloseWait1(_), O::PeerClosed) => {
                (S::AppCloseWait1(H::Closed), None) // 4A
            }
            (
                S::PeerCloseWait1(H::Done)
                | S::PeerCloseWait2(H::Done)
                | S::AppFinCloseWait
                | S::AppCloseWait2,
                O::PeerClosed,
                // RFC 7609 4.8.1 #11: half-closed waits for application's close
            ) => (S::AppFinCloseWait, None), // 3C, 3D
            (
                S::PeerCloseWait1(H::Closed) | S::PeerCloseWait2(H::Closed) | S::PeerFinCloseWait,
                O::PeerClosed,
                // RFC 7609 4.8.1 #10: peer's C: PeerCloseWait to Closed
                // RFC 7609 4.8.1 #19: peer's C: PeerFinCloseWait to Closed
                // RFC 7609 4.8.1 #24: both sides may close at once
            ) => (S::Closed, None), // 3C, 4D
        }
    }
}

#[cfg(test)]
mod tests;
