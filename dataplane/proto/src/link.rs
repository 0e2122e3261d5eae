//! One link: confirm, probe, fail (RFC 3.5.1.5, 4.5.3).
//!
//! A link is one reliable queue pair. It must prove once that it carries messages (CONFIRM LINK);
//! after that, silence makes it suspect, and TEST LINK settles the matter. This machine knows when
//! to ask and when to give up; which messages that takes is the [`link group`](crate::link_group)'s
//! business.

use core::time::Duration;

use crate::limits::{TEST_LINK_IDLE, TEST_LINK_REPLY_WAIT};
use crate::time::Instant;

/// When a link asks whether its peer lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// How long a link may be silent before TEST LINK; `None` never asks.
    pub idle: Option<Duration>,
    /// How long the answer may take. Any traffic counts as the answer.
    pub reply_wait: Duration,
}

impl Default for Keepalive {
    /// What deployed peers do.
    fn default() -> Self {
        Self { idle: Some(TEST_LINK_IDLE), reply_wait: TEST_LINK_REPLY_WAIT }
    }
}

/// Why a link is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// CONFIRM LINK, or the answer to it, did not come in time.
    ConfirmTimedOut,
    /// TEST LINK was not answered.
    TestTimedOut,
    /// The NIC reported a failure.
    QueuePairBroke,
    /// The peer ended the link, or the whole group.
    DeletedByPeer,
    /// We ended it.
    DeletedByUs,
    /// No connection used the group for long.
    Idle,
    /// The peer broke the LLC protocol.
    PeerMisbehaved,
    /// The peer did not answer an LLC message in time.
    LlcTimedOut,
    /// The peer does not want the link that we offered.
    Rejected,
}

/// What can happen to a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// CONFIRM LINK was answered: by the client, or by us as the client.
    Confirmed,
    /// Something arrived on the link, whatever it was. This may be reported late, with the time at
    /// which it arrived.
    Traffic,
    /// Somebody suspects the peer to be dead: ask now, and wait no longer than this.
    Probe(Duration),
    /// The link ends, for this reason.
    Fail(Cause),
    /// It may be time for something.
    Timeout,
}

/// What the caller must do on behalf of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send TEST LINK.
    SendTestLink,
    /// The link is down: move or reset its connections, destroy its queue pair.
    Fail(Cause),
}

/// Where a link is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// CONFIRM LINK is under way until `deadline`.
    Confirming {
        /// When to give up.
        deadline: Instant,
    },
    /// Carries messages. After `probe_at` of silence we send TEST LINK.
    Active {
        /// When to ask; `None` if never.
        probe_at: Option<Instant>,
    },
    /// TEST LINK is out.
    Probing {
        /// When it went out. What arrived before is no answer.
        since: Instant,
        /// When to give up.
        deadline: Instant,
    },
    /// Terminal.
    Down(Cause),
}

/// One link of a group.
///
/// - `handle` feeds an event; one event causes at most one action.
/// - `poll_timeout` says when to feed [`Event::Timeout`], at the latest.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    keepalive: Keepalive,
    state: State,
}

impl Link {
    /// A link that must be confirmed until `deadline`.
    pub fn new(keepalive: Keepalive, deadline: Instant) -> Self {
        Self { keepalive, state: State::Confirming { deadline } }
    }

    /// Where the link is in its life.
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether the link has been confirmed and has not failed.
    pub fn is_up(&self) -> bool {
        match self.state {
            State::Active { .. } | State::Probing { .. } => true,
            State::Confirming { .. } | State::Down(_) => false,
        }
    }

    /// When to feed [`Event::Timeout`], at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self.state {
            State::Confirming { deadline } | State::Probing { deadline, .. } => Some(deadline),
            State::Active { probe_at } => probe_at,
            State::Down(_) => None,
        }
    }

    /// Advances by one event, and says what to do about it.
    ///
    /// A link that is down swallows everything: completions of a broken queue pair keep arriving.
    /// A timeout that comes too early changes nothing.
    pub fn handle(&mut self, now: Instant, event: Event) -> Option<Action> {
        use {Action as A, Cause as C, Event as E, State as S};
        let alive = S::Active { probe_at: self.keepalive.idle.map(|idle| now + idle) };
        let fail = |cause| (S::Down(cause), Some(A::Fail(cause)));
        let (next, action) = match (self.state, event) {
            (S::Down(_), _) => (self.state, None),
            (_, E::Fail(cause)) => fail(cause),

            (S::Confirming { .. }, E::Confirmed) => (alive, None),
            // RFC 7609 C.7 #4: expired timer starts recovery
            (S::Confirming { deadline }, E::Timeout) if deadline <= now => fail(C::ConfirmTimedOut),
            // Nothing but the answer confirms a link; the deadline is probe enough.
            (S::Confirming { .. }, E::Traffic | E::Probe(_) | E::Timeout) => (self.state, None),

            // RFC 7609 4.5.3 #2: no probe on a busy link
            (S::Active { .. }, E::Confirmed | E::Traffic) => (alive, None),
            (S::Active { .. }, E::Probe(wait)) => {
                (S::Probing { since: now, deadline: now + wait }, Some(A::SendTestLink))
            }
            // RFC 7609 4.5.3 #1: probe idle link by TEST LINK
            (S::Active { probe_at: Some(probe_at) }, E::Timeout) if probe_at <= now => {
                let deadline = now + self.keepalive.reply_wait;
                (S::Probing { since: now, deadline }, Some(A::SendTestLink))
            }
            (S::Active { .. }, E::Timeout) => (self.state, None),

            (S::Probing { since, .. }, E::Traffic) if now < since => (self.state, None),
            // RFC 7609 4.5.3 #3: TEST LINK answer shows viable link
            (S::Probing { .. }, E::Confirmed | E::Traffic) => (alive, None),
            (S::Probing { since, deadline }, E::Probe(wait)) => {
                (S::Probing { since, deadline: deadline.min(now + wait) }, None)
            }
            // RFC 7609 C.7.1 #23: unanswered TEST LINK fails link
            // RFC 7609 4.8.3 #2: detect dead peer by its links
            (S::Probing { deadline, .. }, E::Timeout) if deadline <= now => fail(C::TestTimedOut),
            (S::Probing { .. }, E::Timeout) => (self.state, None),
        };
        self.state = next;
        action
    }
}

#[cfg(test)]
mod tests;
