//! One change of a group at a time: what runs, what waits, what every deadline means
//! (RFC 3.5.5.3, C.7.1, C.8).
//!
//! Nothing is queued as a message. What is wanted is noted where it belongs - a link that must go,
//! an RMB to announce, a link to add - and the next exchange is chosen from that when the last is
//! over. So what waits is bounded by what exists, and a request that has become pointless is
//! never sent.

use super::add::Adding;
use super::members::Doom;
use super::{Action, LinkGroup, Phase, Role};
use crate::link::{Cause, Event};
use crate::time::Instant;
use crate::vocabulary::LinkNumber;
use crate::wire::llc::DeleteLink;

/// The exchange that changes the links of the group, of which there is at most one.
#[derive(Clone, Copy, Debug)]
pub(super) enum Exchange {
    /// None.
    Idle,
    /// A link is being added.
    // RFC 7609 3.5.5.3-6
    Adding(Adding),
    /// Server: DELETE LINK is out over `carrier`.
    // RFC 7609 3.5.5.3-7
    Deleting { link: LinkNumber, carrier: LinkNumber, deadline: Instant },
    /// The caller moves the connections of a link elsewhere. Then a server sends DELETE LINK, and a
    /// client `answer`s the one that it has received.
    Vacating { link: LinkNumber, deadline: Instant, answer: Option<(LinkNumber, DeleteLink)> },
}

impl LinkGroup {
    /// Whether the links of the group are changing.
    pub(super) fn is_changing(&self) -> bool {
        !matches!(self.exchange, Exchange::Idle)
    }

    /// Begins what waits, as far as nothing else is going on.
    pub(super) fn proceed(&mut self, now: Instant) {
        while matches!(self.phase, Phase::AddingLink { .. } | Phase::Established)
            && self.begin_next(now)
        {}
    }

    /// Begins one thing. Returns whether there was one.
    // RFC 7609 3.5.5.3-5, 3.5.5.3-8
    fn begin_next(&mut self, now: Instant) -> bool {
        let quiet = !self.is_changing() && self.rkey_exchange.is_none();
        let doomed = self.present().find(|member| member.doom.is_some_and(|it| it.asked.is_none()));
        let doomed = doomed.map(|member| member.number);
        match (self.role, doomed) {
            // RFC 7609 3.5.5.3.1-4, 3.5.5.3.2-3, 3.5.5.3.3-4
            (Role::Server, Some(number)) if quiet => self.begin_delete(now, number),
            (Role::Client, Some(number)) => return self.ask_to_delete(now, number),
            (Role::Server | Role::Client, _) if !quiet => return false,
            (Role::Server, _) if self.wants_link && self.has_room() => self.begin_add(now),
            (Role::Client, _) if self.wants_link && self.has_room() => self.ask_for_link(now),
            (Role::Server | Role::Client, _) => {
                // RFC 7609 3.5.5.1.2-4
                self.wants_link = false;
                let unsettled = self.present().any(|member| member.doom.is_some());
                if self.phase == (Phase::AddingLink { deadline: None }) && !unsettled {
                    self.establish(now);
                    return true;
                }
                return self.phase == Phase::Established && self.begin_rkeys(now);
            }
        }
        true
    }

    /// When an exchange, or what waits for one, must be looked after.
    pub(super) fn exchange_timeout(&self) -> Option<Instant> {
        let exchange = match self.exchange {
            Exchange::Idle => None,
            Exchange::Adding(adding) => adding.deadline,
            Exchange::Deleting { deadline, .. } | Exchange::Vacating { deadline, .. } => {
                Some(deadline)
            }
        };
        let asked = |doom: Doom| doom.asked.map(|(_, deadline)| deadline);
        let asked = self.present().filter_map(|member| member.doom.and_then(asked)).min();
        let rkeys = self.rkeys_timeout();
        exchange.into_iter().chain(asked).chain(rkeys).chain(self.retry_at).min()
    }

    /// Does what is due in the exchanges.
    pub(super) fn exchange_expired(&mut self, now: Instant) {
        match self.exchange {
            Exchange::Adding(adding) if adding.deadline.is_some_and(|it| it <= now) => {
                self.add_timed_out(now, adding);
            }
            Exchange::Deleting { link, carrier, deadline } if deadline <= now => {
                let doom = self.find(link).and_then(|member| member.doom);
                let cause = match doom {
                    Some(doom) if link == carrier => doom.cause,
                    Some(_) | None => Cause::NoAnswer,
                };
                // RFC 7609 C.7.1-20, C.7.1-21
                self.link_event(now, carrier, Event::Fail(cause));
            }
            Exchange::Vacating { link, deadline, .. } if deadline <= now => {
                self.vacated(now, link);
            }
            Exchange::Idle
            | Exchange::Adding(_)
            | Exchange::Deleting { .. }
            | Exchange::Vacating { .. } => {}
        }
        self.requests_expired(now);
        self.rkeys_expired(now);
        if self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = None;
            // RFC 7609 C.8-3, C.7.1-11
            self.wants_link = self.role == Role::Server || self.spare_port.is_some();
        }
    }

    /// The client's requests that the server did not answer.
    fn requests_expired(&mut self, now: Instant) {
        let late = |doom: Doom| doom.asked.filter(|(_, deadline)| *deadline <= now);
        let mut carriers = self.members.map(|slot| {
            let member = slot.filter(|member| !member.gone)?;
            Some((member.number, member.doom.and_then(late)?.0))
        });
        for (number, carrier) in carriers.iter_mut().filter_map(Option::take) {
            if let Some(doom) = self.find_mut(number).and_then(|member| member.doom.as_mut()) {
                doom.asked = None;
            }
            // RFC 7609 C.7.1-16, C.7.1-17
            self.link_event(now, carrier, Event::Fail(Cause::NoAnswer));
        }
    }

    /// The first contact is over: connections may use the group.
    pub(super) fn establish(&mut self, now: Instant) {
        self.phase = Phase::Established;
        // RFC 7609 2.2-3, 2.2.1-1, C.3-2
        self.committed = true;
        self.connections_counted(now, self.connections);
        let mut up = self.members.map(|slot| slot.filter(|member| member.is_up()));
        up.sort_unstable_by_key(|slot| slot.map(|member| member.serial));
        for member in up.into_iter().flatten() {
            self.actions.push(Action::LinkConfirmed(member.number));
        }
    }
}
