//! CONFIRM LINK: the first link, and every later one (RFC 3.5.1.5, 3.5.1.6.2, 2.2.2).

use core::time::Duration;

use super::add::Step;
use super::{Action, LinkGroup, Phase, Role};
use crate::error::PeerMisbehaved;
use crate::limits::{ADD_LINK_WAIT, CONFIRM_LINK_REPLY_WAIT, LINKS_MAX, LINKS_MIN};
use crate::link::{Event, Link};
use crate::time::Instant;
use crate::vocabulary::LinkNumber;
use crate::wire::llc::{ConfirmLink, Llc};

/// When the server repeats a CONFIRM LINK that was not answered. A Linux client that has just sent
/// its Confirm drops one that comes too early, and waits in vain.
pub(super) const CONFIRM_LINK_REPEAT: Duration = Duration::from_secs(1);
const _: () = assert!(CONFIRM_LINK_REPEAT.as_secs() < CONFIRM_LINK_REPLY_WAIT.as_secs());

/// The limit that goes out: a group that wants a single link says two, as everybody must.
// RFC 7609 2.2.2-2, 2.2.2-3, 2.2.2-5
fn stated(limit: u8) -> u8 {
    limit.clamp(LINKS_MIN, LINKS_MAX)
}

/// The limit of the group: the lower one of both, none if zero.
// RFC 7609 2.2.2-4, 2.2.2-6, 2.2.2-8
fn agreed(ours: u8, theirs: u8) -> u8 {
    match theirs {
        0 => ours,
        _ => ours.min(theirs.max(LINKS_MIN)),
    }
}

impl LinkGroup {
    /// Server: the queue pair of the first link is connected, so CONFIRM LINK goes out.
    pub(super) fn first_link_connected(&mut self, now: Instant, number: LinkNumber) {
        let keepalive = self.setup.keepalive;
        let Some(member) = self.find_mut(number) else { return };
        // RFC 7609 3.5.1.5-3, C.7-1
        member.link = Link::new(keepalive, now + CONFIRM_LINK_REPLY_WAIT);
        self.phase = Phase::Confirming { repeat_at: Some(now + CONFIRM_LINK_REPEAT) };
        // RFC 7609 3.3-10, 3.5.1.5-1
        self.send_confirm_link(number, false);
    }

    pub(super) fn send_confirm_link(&mut self, number: LinkNumber, reply: bool) {
        let Some(member) = self.find(number) else { return };
        // RFC 7609 3.5.1.5-2
        let message = ConfirmLink {
            reply,
            no_eyecatcher: !self.setup.eye_catcher,
            mac: member.ours.mac,
            gid: member.ours.gid,
            qpn: member.ours.qpn,
            link: number,
            user_id: member.user_id,
            // RFC 7609 2.2.2-7
            max_links: stated(self.links_limit),
        };
        // RFC 7609 3.3-3
        self.send(number, Llc::ConfirmLink(message));
    }

    pub(super) fn handle_confirm_link(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &ConfirmLink,
    ) -> Result<(), PeerMisbehaved> {
        let joining = self.adding(on, Step::Confirming).is_some();
        let confirming = matches!(self.phase, Phase::Confirming { .. });
        let settled = matches!(self.phase, Phase::AddingLink { .. } | Phase::Established);
        match (self.role, message.reply) {
            (Role::Client, false) if confirming => self.handle_first_request(now, on, message)?,
            (Role::Client, false) if joining => {
                self.check_request(on, message)?;
                // RFC 7609 3.3-3, 3.5.1.6.2-2
                self.send_confirm_link(on, true);
                self.finish_add(now, on);
            }
            // The server repeats itself; so do we.
            (Role::Client, false) if settled && message.link == on => {
                self.send_confirm_link(on, true);
            }
            (Role::Server, true) if confirming => {
                if message.link != on {
                    return Err(PeerMisbehaved::WrongLink);
                }
                self.first_link_confirmed(now, message);
                // RFC 7609 3.5.1.6-1, A.3.2-12
                self.phase = Phase::AddingLink { deadline: None };
                self.wants_link = true;
            }
            (Role::Server, true) if joining => {
                if message.link != on {
                    return Err(PeerMisbehaved::WrongLink);
                }
                self.finish_add(now, on);
            }
            (Role::Server | Role::Client, true) => self.dropped += 1,
            (Role::Server | Role::Client, false) => {
                return Err(PeerMisbehaved::UnexpectedMessage);
            }
        }
        Ok(())
    }

    /// Client: the server names our first link.
    fn handle_first_request(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &ConfirmLink,
    ) -> Result<(), PeerMisbehaved> {
        if self.find(on).and_then(|member| member.theirs).map(|theirs| theirs.qpn)
            != Some(message.qpn)
        {
            return Err(PeerMisbehaved::WrongLink);
        }
        let Some(member) = self.find_mut(on) else { return Ok(()) };
        member.number = message.link;
        self.actions.push(Action::LinkNumbered(message.link));
        self.first_link_confirmed(now, message);
        // RFC 7609 3.3-3, 3.5.1.5-5, 3.5.1.5-6, A.3.1-3
        self.send_confirm_link(message.link, true);
        // RFC 7609 3-3, 3.5.1.6-1
        self.phase = Phase::AddingLink { deadline: Some(now + ADD_LINK_WAIT) };
        Ok(())
    }

    // RFC 7609 C.7.1-24
    fn check_request(&self, on: LinkNumber, message: &ConfirmLink) -> Result<(), PeerMisbehaved> {
        let theirs = self.find(on).and_then(|member| member.theirs);
        let right = theirs.is_some_and(|it| (it.qpn, it.gid) == (message.qpn, message.gid));
        if right && message.link == on { Ok(()) } else { Err(PeerMisbehaved::WrongLink) }
    }

    fn first_link_confirmed(&mut self, now: Instant, message: &ConfirmLink) {
        self.peer_eye_catcher = !message.no_eyecatcher;
        self.links_limit = agreed(self.links_limit, message.max_links);
        self.last_number = message.link.0;
        // RFC 7609 3.5.1.5-4, C.7-2
        self.link_event(now, message.link, Event::Confirmed);
    }
}
