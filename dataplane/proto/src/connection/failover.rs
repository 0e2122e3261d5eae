//! A connection changes its link (RFC 4.6): ours to another one, or the peer's.
//!
//! ```text
//!                leave            depart               F sent              written again
//!   Flowing ──────────► Leaving ──────────► Validating ──────► Replaying ──────────────► Repeating
//!      ▲                                         └── nothing to write again ─────────────►  │
//!      └──────────────────────────────── all that was said is said again ───────────────────┘
//! ```
//!
//! A connection that is ordered to leave may be ordered anew at any time, and may lose its last
//! link at any time. `transitions.txt` lists every outcome.
//!
//! Positions in the stream say which bytes must be written again. The caller keeps those bytes:
//! from the first one that the peer may not have heard of, up to the last one produced.
//!
//! The peer's half: what it sends on a new link may reach us before what it sent on the old one, so
//! some messages wait for others. [`Connection::arrival`] says which.

use super::{Connection, Event as Closing, Progress, is_before};
use crate::limits::CDC_UNDER_WAY_MAX;
use crate::ring::{Position, Span};
use crate::time::Instant;
use crate::wire::cdc::Cdc;

/// What a connection may do on its link. `R` is the way to another link, as the caller describes
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failover<R> {
    /// It uses its link.
    Flowing,
    /// It posts nothing, and goes to another link when no work request of it is outstanding.
    Leaving {
        /// To which.
        route: R,
    },
    /// It has come to a new link, where F must be its first message.
    Validating {
        /// The first byte that must be written again.
        from: Position,
    },
    /// F was sent. Nothing is announced until all is written again.
    Replaying {
        /// The first byte that had to be written again.
        from: Position,
        /// The first byte that still has to be.
        next: Position,
    },
    /// All bytes are there again. The next message repeats all that was said.
    Repeating,
    /// No link is left, and nothing more is said.
    Lost {
        /// To which link it was about to go.
        route: Option<R>,
    },
}

/// What can happen to a connection, as far as its link is concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event<R> {
    /// It shall go to another link.
    Leave(R),
    /// It goes. Bytes from here on must be written again.
    Depart(Position),
    /// A CDC message was handed out.
    Said,
    /// Bytes up to here were written again.
    Written(Position),
    /// Nothing need be written again: nobody would read it.
    Forget,
    /// It has no link any more.
    Lose,
}

/// Bytes to be written again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replay {
    /// How many were written again already, of those that had to be.
    pub done: u32,
    /// Where the others belong in the peer's element.
    pub rest: Span,
}

/// What to do with a CDC message when it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Take it in.
    InOrder,
    /// Keep it behind those that wait already.
    Waits,
    /// Keep it before those that wait already: it explains what they wait for.
    WaitsFirst,
}

impl<R> Failover<R> {
    /// The state after `event`, and the route that is no longer needed. `None` if the caller made a
    /// mistake: the event cannot happen in this state. `produced` is where the stream ends.
    pub(super) fn after(self, event: Event<R>, produced: Position) -> Option<(Self, Option<R>)> {
        use {Event as E, Failover as S};
        let replaying = |from, next| match next < produced {
            true => S::Replaying { from, next },
            false => S::Repeating,
        };
        let next = match (self, event) {
            (S::Lost { .. }, E::Leave(_)) => return None,
            (S::Leaving { route: before }, E::Leave(route)) => {
                return Some((S::Leaving { route }, Some(before)));
            }
            (_, E::Leave(route)) => S::Leaving { route },

            (S::Leaving { route }, E::Depart(from)) => {
                // RFC 7609 4.6.1 #1: always validate at failover
                // RFC 7609 2.3 #7: send failover validation first
                return Some((S::Validating { from }, Some(route)));
            }
            (_, E::Depart(_)) => return None,

            (S::Flowing, E::Said) => S::Flowing,
            // RFC 7609 2.3 #9: repeat failed writes in order
            // RFC 7609 2.3 #10: repeat uncompleted writes before new data
            // RFC 7609 4.6.1 #7: send on, F needs no answer
            // RFC 7609 4.6.2 #1: repeat pending messages before new data
            (S::Validating { from }, E::Said) => replaying(from, from),
            (S::Repeating, E::Said) => S::Flowing,
            (S::Leaving { .. } | S::Replaying { .. } | S::Lost { .. }, E::Said) => return None,

            (S::Replaying { from, next }, E::Written(until)) if next < until => {
                replaying(from, until)
            }
            (_, E::Written(_)) => return None,

            (S::Validating { .. }, E::Forget) => S::Validating { from: produced },
            (S::Replaying { .. }, E::Forget) => S::Repeating,
            (
                state @ (S::Flowing | S::Leaving { .. } | S::Repeating | S::Lost { .. }),
                E::Forget,
            ) => state,

            (S::Leaving { route }, E::Lose) => S::Lost { route: Some(route) },
            (S::Lost { route }, E::Lose) => S::Lost { route },
            (S::Flowing | S::Validating { .. } | S::Replaying { .. } | S::Repeating, E::Lose) => {
                S::Lost { route: None }
            }
        };
        Some((next, None))
    }

    /// Whether a CDC message may be sent.
    pub fn may_speak(&self) -> bool {
        match self {
            Self::Flowing | Self::Validating { .. } | Self::Repeating => true,
            // RFC 7609 2.3 #9: repeat failed writes in order
            // RFC 7609 2.3 #10: repeat uncompleted writes before new data
            // RFC 7609 4.6.2 #1: repeat pending messages before new data
            Self::Leaving { .. } | Self::Replaying { .. } | Self::Lost { .. } => false,
        }
    }

    /// Whether bytes may be written behind those that were produced before.
    pub(super) fn may_write_on(&self) -> bool {
        match self {
            // RFC 7609 4.6.2 #1: repeat pending messages before new data
            Self::Flowing | Self::Repeating => true,
            Self::Leaving { .. }
            | Self::Validating { .. }
            | Self::Replaying { .. }
            | Self::Lost { .. } => false,
        }
    }

    /// Whether a message is due for no other reason than the change of the link.
    pub(super) fn owes(&self) -> bool {
        match self {
            Self::Validating { .. } | Self::Replaying { .. } | Self::Repeating => true,
            Self::Flowing | Self::Leaving { .. } | Self::Lost { .. } => false,
        }
    }
}

impl<R> Connection<R> {
    /// Where the connection is between two links.
    pub fn failover(&self) -> &Failover<R> {
        &self.failover
    }

    /// The connection shall continue on another link: from now on nothing is due. Returns the route
    /// of an order that this one replaces.
    ///
    /// # Panics
    ///
    /// If the connection was lost.
    pub fn leave(&mut self, route: R) -> Option<R> {
        self.relocate(Event::Leave(route))
    }

    /// Whether the connection has been told to leave its link and has not left it.
    pub fn is_leaving(&self) -> bool {
        matches!(self.failover, Failover::Leaving { .. })
    }

    /// The connection continues on the link to which the returned route leads. F becomes due there,
    /// then the writing of what the peer may not have, then a message with all that was said.
    ///
    /// Of the last `kept` bytes that were produced the caller does not know whether the peer has
    /// heard. Returns how many of them, the last ones, must be written again. Those that the peer
    /// is known to have read are not among them: newer bytes may stand in their place.
    ///
    /// # Panics
    ///
    /// If the connection is not leaving.
    ///
    /// # Specification
    ///
    /// RFC 7609, 4.6.1 and 4.6.2 (combining pending messages).
    pub fn depart(&mut self, kept: u64) -> (R, u32) {
        let from = self.sender.oldest_unread(kept);
        let route = self.relocate(Event::Depart(from)).expect("whoever departs has a route");
        (route, self.sender.produced().since_u32(from))
    }

    /// What must be written again: of everything produced, the last bytes. `None` if there is
    /// nothing, or if it is not time for it.
    pub fn replay(&self) -> Option<Replay> {
        let Failover::Replaying { from, next } = self.failover else { return None };
        Some(Replay { done: next.since_u32(from), rest: self.sender.span_from(next) })
    }

    /// The first `len` bytes that [`Self::replay`] names were written again.
    ///
    /// # Panics
    ///
    /// If there are not so many, or if `len` is zero.
    pub fn replayed(&mut self, len: u32) {
        let Failover::Replaying { next, .. } = self.failover else {
            panic!("nothing is to be written again");
        };
        let until = next + u64::from(len);
        assert!(until <= self.sender.produced());
        self.relocate(Event::Written(until));
    }

    /// Nothing need be written again: nobody would read it.
    pub fn forget_replay(&mut self) {
        self.relocate(Event::Forget);
    }

    /// The connection has no link any more: nothing more will be said.
    pub fn lose(&mut self) {
        self.relocate(Event::Lose);
    }

    /// Whether the connection has no link any more.
    pub fn is_lost(&self) -> bool {
        matches!(self.failover, Failover::Lost { .. })
    }

    /// The link to which it was about to go, if it was, when it ended.
    pub fn into_route(self) -> Option<R> {
        match self.failover {
            Failover::Leaving { route } => Some(route),
            Failover::Lost { route } => route,
            Failover::Flowing
            | Failover::Validating { .. }
            | Failover::Replaying { .. }
            | Failover::Repeating => None,
        }
    }

    /// One event through the table.
    pub(super) fn relocate(&mut self, event: Event<R>) -> Option<R> {
        let state = core::mem::replace(&mut self.failover, Failover::Flowing);
        let after = state.after(event, self.sender.produced());
        let (next, route) = after.expect("the caller knows where the connection is");
        self.failover = next;
        route
    }

    /// Notes that we have dropped messages before the next one. They said nothing that it does not
    /// say, so their missing numbers mean no loss.
    pub fn expect_gap(&mut self) {
        self.incoming.gap_expected = true;
    }

    /// What to do with a message of a peer that may have changed the link, where `first` is the one
    /// that has waited longest.
    ///
    /// What the peer's NIC saw delivered on the old link may still be in another completion queue,
    /// or on its way from another poller.
    pub fn arrival(&self, message: &Cdc, first: Option<&Cdc>) -> Arrival {
        let validates = message.failover_validation;
        // RFC 7609 4.6.1 #8: validate before resuming
        let unanswered = validates && !self.has_received(message.sequence);
        match first {
            None if unanswered || self.is_behind_gap(message) => Arrival::Waits,
            None => Arrival::InOrder,
            Some(first) if validates && !first.failover_validation => match unanswered {
                true => Arrival::WaitsFirst,
                false => Arrival::InOrder,
            },
            Some(_) if validates => Arrival::Waits,
            Some(first) => match is_before(first.sequence, message.sequence) {
                true => Arrival::Waits,
                false => Arrival::InOrder,
            },
        }
    }

    /// Whether everything that this message, which waits, must come behind has come.
    pub fn is_gap_filled(&self, first: &Cdc) -> bool {
        match first.failover_validation {
            true => self.has_received(first.sequence),
            false => !self.is_behind_gap(first),
        }
    }

    /// Whether the peer has changed the link: messages that it posted on the old one may come late.
    pub fn has_peer_moved(&self) -> bool {
        self.incoming.moved
    }

    /// Whether this message or a later one was taken in: what failover validation asks (4.6.1).
    fn has_received(&self, sequence: u16) -> bool {
        !is_before(self.incoming.received, sequence)
    }

    /// Whether this message must not be taken in, because one before it may yet come, or bytes that
    /// it announces may be lost: messages are missing, and nobody has said why (F).
    ///
    /// Peers move only connections that have begun to end without a word. Of others a gap is our
    /// own doing: messages that our pollers pass on may overtake each other.
    pub(super) fn is_behind_gap(&self, message: &Cdc) -> bool {
        let ending =
            self.said.done || self.said.closed || message.sending_done || message.connection_closed;
        let produced = self.receiver.resolve(message.producer);
        let brings_news = produced.is_ok_and(|produced| self.receiver.is_news(produced));
        let excused = self.incoming.gap_expected || message.failover_validation;
        ending && brings_news && !excused && self.leaves_gap(message)
    }

    fn leaves_gap(&self, message: &Cdc) -> bool {
        !self.follows(message.sequence)
    }

    /// Whether messages that are missing from now on are no longer those that F was about, or that
    /// we have dropped. What comes late on the old link leaves no gap, and ends nothing.
    pub(super) fn ends_excuse(&self, message: &Cdc) -> bool {
        self.leaves_gap(message) || is_before(self.incoming.last_excused, message.sequence)
    }

    /// Whether no message is missing between those that were taken in and the one with this number.
    pub fn follows(&self, sequence: u16) -> bool {
        // Before the first message, 0 was received: the first number is 1.
        !is_before(self.incoming.received.wrapping_add(1), sequence)
    }

    /// RFC 4.6.1: what the peer's NIC saw delivered must have arrived here.
    pub(super) fn validate_failover(&mut self, now: Instant, delivered: u16) -> Progress {
        // RFC 7609 4.6.1 #8: validate before resuming
        // RFC 7609 2.3 #8: reset when failover validation fails
        let lost = !self.has_received(delivered);
        let reset = lost && !self.state.is_ending_abnormally();
        if lost {
            self.advance(now, Closing::Abort);
        }
        // What was lost on the old link is written again.
        self.incoming.gap_expected = true;
        self.incoming.last_excused = delivered.wrapping_add(CDC_UNDER_WAY_MAX);
        self.incoming.moved = true;
        Progress { reset, ..Progress::default() }
    }
}

#[cfg(test)]
mod tests;
