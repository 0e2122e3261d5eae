//! How often a peer makes us open queue pairs for further links.
//!
//! A client asks for links, and a server offers them; either can give each of them up at once and
//! begin again. Every time the one control thread opens a queue pair and may register all RMBs with
//! an RNIC. A path that comes and goes looks just the same, so that such links are neither counted
//! nor rejected. Only their rate is bounded: an opening that the peer causes takes a token, and
//! waits for a fraction of a second if there is none. What we want ourselves never waits.

use super::exchange::Exchange;
use super::group_link::port_of;
use super::{Action, LinkGroup};
use crate::time::Instant;
use crate::vocabulary::{LinkNumber, QpAddress};

use core::time::Duration;

/// How many queue pairs a peer can make us open without a pause.
pub(super) const OPENINGS_MAX: u8 = 16;

/// How long until it can make us open another one.
pub(super) const OPENING_EVERY: Duration = Duration::from_millis(250);

/// Server: whether a further link is to be offered, and who causes that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wanted {
    No,
    /// The client asks for it, or has given up the link that it replaces.
    ByPeer,
    /// A port of ours came up, an operator asks for it, or it is time for another attempt.
    ByUs,
}

/// A bucket of tokens, one for each opening that the peer may cause.
#[derive(Clone, Copy, Debug)]
pub(super) struct Openings {
    tokens: u8,
    /// When the latest token came, unless the bucket is full.
    refilled_at: Instant,
}

impl Openings {
    pub(super) fn new() -> Self {
        Self { tokens: OPENINGS_MAX, refilled_at: Instant::default() }
    }

    /// Takes a token.
    ///
    /// # Errors
    ///
    /// When the next one comes, if there is none.
    pub(super) fn take(&mut self, now: Instant) -> Result<(), Instant> {
        let every = OPENING_EVERY.as_nanos();
        let come = now.since(self.refilled_at).as_nanos() / every;
        let come = u8::try_from(come).unwrap_or(u8::MAX);
        self.tokens = self.tokens.saturating_add(come).min(OPENINGS_MAX);
        self.refilled_at = if self.tokens == OPENINGS_MAX {
            now
        } else {
            self.refilled_at + OPENING_EVERY * u32::from(come)
        };
        let left = self.tokens.checked_sub(1).ok_or(self.refilled_at + OPENING_EVERY)?;
        self.tokens = left;
        Ok(())
    }

    /// Nothing was opened after all.
    pub(super) fn give_back(&mut self) {
        self.tokens = (self.tokens + 1).min(OPENINGS_MAX);
    }

    #[cfg(test)]
    pub(super) fn left(self) -> u8 {
        self.tokens
    }
}

impl LinkGroup {
    /// Server: a further link is to be offered as soon as there is time.
    pub(super) fn want(&mut self, by: Wanted) {
        // What we want does not wait for a token only because the peer wants it, too.
        self.wanted = self.wanted.max(by);
    }

    /// Server: takes note that a link is about to be offered. Returns whether it may be now; if
    /// not, it is still wanted.
    pub(super) fn takes_opening(&mut self, now: Instant, wanted: Wanted) -> bool {
        let taken = if wanted == Wanted::ByPeer { self.openings.take(now) } else { Ok(()) };
        self.open_at = taken.err();
        if self.open_at.is_some() {
            self.want(wanted);
        }
        self.open_at.is_none()
    }

    /// Client: asks the caller for a queue pair, now or as soon as there is a token for it. Another
    /// offer that takes the place of this one waits for the same token.
    pub(super) fn open_offered(
        &mut self,
        now: Instant,
        number: LinkNumber,
        on: LinkNumber,
        theirs: QpAddress,
    ) {
        let at = self.openings.take(now).err();
        self.exchange = Some(Exchange::Opening { number, on, theirs: Some(theirs), at });
        if at.is_none() {
            let peer = Some(port_of(theirs));
            self.actions.push(Action::OpenLink { number, peer });
        }
    }

    /// What the caller was asked to open under this number: the link that carries the exchange, and
    /// the server's offer if we are the client.
    pub(super) fn asked_to_open(
        &self,
        number: LinkNumber,
    ) -> Option<(LinkNumber, Option<QpAddress>)> {
        match self.exchange {
            Some(Exchange::Opening { number: asked, on, theirs, at: None }) => {
                (number == asked).then_some((on, theirs))
            }
            Some(_) | None => None,
        }
    }

    /// When there is a token for what waits for one.
    pub(super) fn opening_due_at(&self) -> Option<Instant> {
        match self.exchange {
            Some(Exchange::Opening { at: Some(at), .. }) => Some(at),
            Some(_) | None => self.open_at,
        }
    }

    /// Opens what has waited for a token.
    pub(super) fn open_in_time(&mut self, now: Instant) {
        let is_due = |at: Instant| at <= now;
        if self.open_at.is_some_and(is_due) {
            self.open_at = None;
            self.advance(now);
        }
        if let Some(Exchange::Opening { number, on, theirs: Some(theirs), at: Some(at) }) =
            self.exchange
            && is_due(at)
        {
            self.open_offered(now, number, on, theirs);
        }
    }
}
