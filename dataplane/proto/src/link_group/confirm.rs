//! CONFIRM LINK: a queue pair proves that it carries messages (RFC 3.5.1.5, A.3.1).

use super::dispatch::ARRIVED;
use super::exchange::Exchange;
use super::{Action, LinkGroup, Phase, Role, UNNUMBERED};
use crate::error::PeerMisbehaved;
use crate::limits::{ADD_LINK_WAIT, LINKS_PER_GROUP_MAX};
use crate::link::Event;
use crate::time::Instant;
use crate::vocabulary::{LinkNumber, QpAddress};
use crate::wire::llc::{ConfirmLink, Llc};

/// The least that `max_links` may say (RFC 2.2.2).
pub(super) const LINKS_MAX_MIN: u8 = 2;

impl LinkGroup {
    pub(super) fn send_confirm_link(&mut self, number: LinkNumber, reply: bool) {
        let group_link = self.find(number).expect("a link stays while it is being confirmed");
        let QpAddress { mac, gid, qpn, .. } = group_link.ours;
        // RFC 7609 2.2.2 #3: link limit between 2 and 8
        // RFC 7609 2.2.2 #4: agree limit in first CONFIRM LINK
        // RFC 7609 2.2.2 #5: server always states its limit
        // RFC 7609 3.5.1.5 #2: CONFIRM LINK with identity and limit
        let message = ConfirmLink {
            reply,
            no_eyecatcher: !self.setup.eye_catcher,
            mac,
            gid,
            qpn,
            link: number,
            user_id: group_link.user_id,
            max_links: self.max_links,
        };
        self.send(number, Llc::ConfirmLink(message));
    }

    pub(super) fn handle_confirm_link(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &ConfirmLink,
    ) -> Result<(), PeerMisbehaved> {
        // The user id may be anything.
        // RFC 7609 2.2.4 #4: only display peer's link user id
        match (self.role, message.reply) {
            (Role::Client, false) => self.confirm_link_requested(now, on, message),
            (Role::Server, true) => self.confirm_link_answered(now, on, message),
            (Role::Client, true) => {
                self.dropped += 1;
                Ok(())
            }
            (Role::Server, false) => Err(PeerMisbehaved::UnexpectedMessage),
        }
    }

    fn confirm_link_requested(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &ConfirmLink,
    ) -> Result<(), PeerMisbehaved> {
        let group_link = self.find(on).expect(ARRIVED);
        let (expected, is_up) = (group_link.theirs.qpn, group_link.link.is_up());
        match self.phase {
            Phase::Confirming { .. } => {
                // RFC 7609 2.2.4 #1: unique link number in a group
                // RFC 7609 C.7.1 #24: wrong CONFIRM LINK brings link down
                if message.qpn != expected || message.link == UNNUMBERED {
                    return Err(PeerMisbehaved::WrongLink);
                }
                self.number_link(on, message.link);
                // RFC 7609 2.2.2 #7: client limit within the server's
                self.agree_on_links(message.max_links);
                // RFC 7609 3.3 #3: CONFIRM LINK on the confirmed link
                // RFC 7609 3.5.1.5 #5: enable sending and answer CONFIRM LINK
                // RFC 7609 3.5.1.5 #6: reply repeats the server's link number
                // RFC 7609 A.3.1 #3: link number at byte 29
                self.send_confirm_link(message.link, true);
                self.first_link_confirmed(now, message);
            }
            Phase::Founding { .. } | Phase::Established => {
                // RFC 7609 C.7.1 #24: wrong CONFIRM LINK brings link down
                if message.link != on || message.qpn != expected {
                    return Err(PeerMisbehaved::WrongLink);
                }
                match self.exchange {
                    Some(Exchange::Confirming { number }) if number == on => {
                        self.send_confirm_link(on, true);
                        self.link_added(now, on);
                    }
                    // The server has sent it again, so we answer again.
                    Some(_) | None if is_up => self.send_confirm_link(on, true),
                    Some(_) | None => self.dropped += 1,
                }
            }
            Phase::Opening | Phase::Terminated => self.dropped += 1,
        }
        Ok(())
    }

    fn confirm_link_answered(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &ConfirmLink,
    ) -> Result<(), PeerMisbehaved> {
        let is_first = matches!(self.phase, Phase::Confirming { .. });
        let is_added = self.exchange == Some(Exchange::Confirming { number: on });
        if !is_first && !is_added {
            self.dropped += 1;
            return Ok(());
        }
        if message.link != on {
            return Err(PeerMisbehaved::WrongLink);
        }
        if is_first {
            self.agree_on_links(message.max_links);
            self.first_link_confirmed(now, message);
            self.begin_add(now);
        } else {
            self.link_added(now, on);
        }
        Ok(())
    }

    /// The server's number for our first link.
    fn number_link(&mut self, old: LinkNumber, new: LinkNumber) {
        if let Some(group_link) = self.find_mut(old) {
            group_link.number = new;
        }
        self.actions.push(Action::LinkNumbered(new));
    }

    /// The peer's limit counts if it is lower than ours. A peer that states none, or one that is
    /// not allowed, gets ours.
    fn agree_on_links(&mut self, wanted: u8) {
        // RFC 7609 2.2.2 #1: at most eight symmetric links
        // RFC 7609 2.2.2 #6: client may omit its limit
        // RFC 7609 2.2.2 #8: use the smaller of both limits
        if (self.setup.version.links_min()..=LINKS_PER_GROUP_MAX).contains(&wanted) {
            self.max_links = self.max_links.min(wanted);
        }
    }

    fn first_link_confirmed(&mut self, now: Instant, message: &ConfirmLink) {
        self.peer_eye_catcher = !message.no_eyecatcher;
        // RFC 7609 3 #3: confirm a new link before data
        // RFC 7609 3.5.1.6 #1: try second link before data
        let waits = self.role == Role::Client && self.max_links > 1;
        let deadline = waits.then(|| now + ADD_LINK_WAIT);
        self.phase = Phase::Founding { deadline };
        if let Some(group_link) = self.find_mut(message.link) {
            group_link.confirmed_at = Some(now);
        }
        // RFC 7609 3.5.1.5 #4: stop client timer at CONFIRM LINK
        // RFC 7609 C.7 #2: answer stops the LLC timer
        self.link_event(now, message.link, Event::Confirmed);
        if self.role == Role::Client && !waits {
            // Nothing will be offered to a group of one link.
            self.advance(now);
        }
    }

    /// A further link carries messages.
    fn link_added(&mut self, now: Instant, number: LinkNumber) {
        self.exchange = None;
        if let Some(group_link) = self.find_mut(number) {
            group_link.confirmed_at = Some(now);
        }
        self.link_event(now, number, Event::Confirmed);
        if self.phase == Phase::Established {
            self.actions.push(Action::LinkConfirmed(number));
        } else {
            self.confirmed_early = Some(number);
        }
        self.retry_at = None;
        self.known_ports.tell_of_new();
        self.rkeys_may_change();
        self.await_rkeys_anew(now);
        self.replace_asymmetric(number);
        self.advance(now);
    }
}
