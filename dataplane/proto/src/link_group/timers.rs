//! The deadlines of a link group.

use super::delete::Asked;
use super::exchange::Exchange;
use super::group_link::is_down;
use super::rkeys::{Announcement, Continuing};
use super::{LinkGroup, Phase};
use crate::limits::RKEY_REPLY_WAIT;
use crate::link::{self, Cause, Event};
use crate::time::Instant;
use crate::vocabulary::LinkNumber;
use crate::wire::llc::DeleteReason;

use core::time::Duration;

impl LinkGroup {
    /// When to call [`Self::handle_timeout`], at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let phase = match self.phase {
            Phase::Opening | Phase::Terminated => return None,
            Phase::Confirming { repeat_at: at } | Phase::Founding { deadline: at } => at,
            Phase::Established => None,
        };
        let links = self.group_links().filter_map(|group_link| group_link.link.poll_timeout());
        let asked =
            self.group_links().filter_map(|group_link| group_link.asked).map(Asked::poll_timeout);
        links
            .chain(asked)
            .chain(phase)
            .chain(self.exchange.and_then(Exchange::deadline))
            .chain(self.rkeys_deadline())
            .chain(self.opening_due_at())
            .chain(self.retry_at)
            .chain(self.again_at)
            .chain(self.idle_deadline)
            .filter(|at| *at != NEVER)
            .min()
    }

    /// Does what is due at this time.
    pub fn handle_timeout(&mut self, now: Instant) {
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        match self.phase {
            Phase::Opening | Phase::Terminated => return,
            Phase::Founding { deadline } if due(deadline) => {
                // C.8: the group goes on without a second link.
                // RFC 7609 C.8 #1: go on without second link
                self.phase = Phase::Founding { deadline: None };
                self.advance(now);
            }
            Phase::Confirming { repeat_at } if due(repeat_at) => {
                self.phase = Phase::Confirming { repeat_at: None };
                for number in self.numbers().into_iter().flatten() {
                    self.send_confirm_link(number, false);
                }
            }
            Phase::Founding { .. } | Phase::Confirming { .. } | Phase::Established => {}
        }
        if let Some(exchange) = self.exchange.filter(|exchange| due(exchange.deadline())) {
            self.exchange_timed_out(now, exchange);
        }
        self.rkeys_timed_out(now);
        for number in self.numbers().into_iter().flatten() {
            self.link_timed(now, number);
        }
        self.asked_in_vain(now);
        if due(self.again_at) {
            self.again_at = None;
            self.advance(now);
        }
        self.open_in_time(now);
        if due(self.retry_at) {
            self.retry_at = None;
            self.retry_link(now);
        }
        if due(self.idle_deadline) {
            self.end(now, Cause::Idle, DeleteReason::PROGRAM);
        }
    }

    /// How long a message about rkeys may take on this link. Connections may wait for it, so that
    /// we soon try another link if there is one. Otherwise all connections depend on this link, and
    /// a busy peer gets more time: a Linux peer answers nothing while it frees a queue pair.
    ///
    /// The other link may fail while we wait, so this is asked again whenever time has passed.
    fn rkey_wait(&self, on: LinkNumber) -> Duration {
        let mut others = self
            .group_links()
            .filter(|other| other.number != on && other.is_of_use() && other.asked.is_none());
        if others.next().is_some() { RKEY_REPLY_WAIT } else { self.exchange_wait() }
    }

    /// When the peer is late with its answer about an RMB of ours.
    fn announcement_deadline(&self) -> Option<Instant> {
        let Announcement { on, since, .. } = self.announcement?;
        Some(since + self.rkey_wait(on))
    }

    /// When the peer is late with further rkeys of an RMB of its own.
    fn continuing_deadline(&self) -> Option<Instant> {
        let Continuing { on, since, .. } = self.continuing?;
        Some(since + self.rkey_wait(on))
    }

    /// When the peer is late with any message about rkeys.
    fn rkeys_deadline(&self) -> Option<Instant> {
        [self.announcement_deadline(), self.continuing_deadline()].into_iter().flatten().min()
    }

    /// A link has come up, so that messages about rkeys may take less time from now on. Those that
    /// are under way were not late until now.
    pub(super) fn await_rkeys_anew(&mut self, now: Instant) {
        if let Some(announcement) = &mut self.announcement {
            announcement.since = now;
        }
        if let Some(continuing) = &mut self.continuing {
            continuing.since = now;
        }
    }

    /// The peer did not answer, or did not go on.
    fn rkeys_timed_out(&mut self, now: Instant) {
        let due = |deadline: Option<Instant>| deadline.is_some_and(|deadline| deadline <= now);
        if let Some(Continuing { on, .. }) = self.continuing
            && due(self.continuing_deadline())
        {
            self.link_lost(now, on, Cause::LlcTimedOut);
        }
        // An RMB is not deleted without the peer's answer: if the peer wrote there, its queue pair
        // would break. DELETE RKEY is sent again over another link, or the group ends.
        // RFC 7609 C.7.1 #22: unanswered CONFIRM RKEY fails link
        // RFC 7609 3.5.5.2.2 #3: free RMB after DELETE RKEY reply
        if let Some(Announcement { on, .. }) = self.announcement
            && due(self.announcement_deadline())
        {
            self.link_lost(now, on, Cause::LlcTimedOut);
        }
    }

    /// It may be time for something on one link.
    fn link_timed(&mut self, now: Instant, number: LinkNumber) {
        let was_down = self.find(number).is_none_or(is_down);
        self.link_event(now, number, Event::Timeout);
        if let Some(group_link) = self.find(number)
            && let link::State::Down(cause) = group_link.link.state()
            && !was_down
            && !self.is_terminated()
        {
            self.link_lost(now, number, cause);
        }
    }
}

/// No deadline here; another timer covers this state.
const NEVER: Instant = Instant(u64::MAX);
