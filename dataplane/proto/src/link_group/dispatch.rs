//! Hands each LLC message to its handler, and answers TEST LINK (RFC 3.3, 3.5.5.3, A.3.8).
//!
//! A reply that no exchange waits for is dropped, as Linux drops it. A request that its sender must
//! never make is an offence, and the link is given up.

use super::LinkGroup;
use super::version::Received;
use crate::error::PeerMisbehaved;
use crate::link::{Cause, Event};
use crate::time::Instant;
use crate::vocabulary::LinkNumber;
use crate::wire::Malformed;
use crate::wire::llc::{Llc, TestLink};

/// Why a handler finds the link of its message.
pub(super) const ARRIVED: &str = "no handler is called for a link that is not there";

impl LinkGroup {
    /// Takes in a message that arrived on a link and is no CDC message.
    ///
    /// # Errors
    ///
    /// As [`Self::handle_llc`]; bytes that are no message, and may not be discarded, are an offence
    /// too (C.7.1, last entry).
    pub fn handle_bytes(
        &mut self,
        now: Instant,
        number: LinkNumber,
        bytes: &[u8],
    ) -> Result<(), PeerMisbehaved> {
        match Received::decode(self.setup.version, bytes) {
            Ok(message) => self.handle(now, number, &message),
            // RFC 7609 3.3 #9: drop unknown optional LLC messages
            // RFC 7609 C.7.1 #34: drop unknown opcode beginning with 10
            Err(Malformed::Ignorable(_)) => {
                self.dropped += 1;
                self.traffic(now, number);
                Ok(())
            }
            // RFC 7609 C.7.1 #35: any other LLC error fails link
            Err(malformed) if self.is_alive(number) => {
                self.link_lost(now, number, Cause::PeerMisbehaved);
                Err(malformed.into())
            }
            Err(_) => Ok(()),
        }
    }

    /// Takes in a message of version 1 that arrived on a link.
    ///
    /// # Errors
    ///
    /// [`PeerMisbehaved`] is for the log: the link is down, as the actions say (C.7.1).
    pub fn handle_llc(
        &mut self,
        now: Instant,
        number: LinkNumber,
        message: &Llc,
    ) -> Result<(), PeerMisbehaved> {
        self.handle(now, number, &Received::V1(*message))
    }

    fn handle(
        &mut self,
        now: Instant,
        number: LinkNumber,
        message: &Received<'_>,
    ) -> Result<(), PeerMisbehaved> {
        if !self.is_alive(number) {
            // Other messages on a link that failed are ignored.
            if message.ends_group() && !self.is_terminated() {
                return self.dispatch_any(now, number, message);
            }
            return Ok(());
        }
        self.link_event(now, number, Event::Traffic);
        let result = self.dispatch_any(now, number, message);
        // RFC 7609 C.7.1 #35: any other LLC error fails link
        if result.is_err() {
            self.link_lost(now, number, Cause::PeerMisbehaved);
        }
        result
    }

    pub(super) fn dispatch(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &Llc,
    ) -> Result<(), PeerMisbehaved> {
        // RFC 7609 2 #6: let the server manage links
        // RFC 7609 3.3 #2: answer each LLC request
        // RFC 7609 A.3.7 #8: DELETE RKEY at any time
        // RFC 7609 A.3.8 #3: TEST LINK from either side
        match message {
            Llc::ConfirmLink(confirm) => self.handle_confirm_link(now, on, confirm)?,
            Llc::AddLink(add) => self.handle_add_link(now, on, add)?,
            Llc::AddLinkContinuation(more) => self.handle_add_link_continuation(now, on, more)?,
            Llc::DeleteLink(delete) => self.handle_delete_link(now, on, delete),
            Llc::ConfirmRkey(confirm) => self.handle_confirm_rkey(now, on, confirm),
            Llc::ConfirmRkeyContinuation(more) => {
                self.handle_confirm_rkey_continuation(now, on, more)?;
            }
            Llc::DeleteRkey(delete) => self.handle_delete_rkey(now, on, delete),
            Llc::TestLink(test) => self.handle_test_link(on, test)?,
        }
        Ok(())
    }

    pub(super) fn send(&mut self, on: LinkNumber, message: Llc) {
        self.actions.push(super::Action::Send(on, message));
    }

    fn handle_test_link(
        &mut self,
        on: LinkNumber,
        message: &TestLink,
    ) -> Result<(), PeerMisbehaved> {
        if !message.reply {
            // RFC 7609 3.3 #4: TEST LINK on the tested link
            // RFC 7609 3.3 #6: reply over the request's link
            // RFC 7609 3.5.5.3 #1: TEST LINK at any time
            // RFC 7609 3.5.5.3.1 #1: answer TEST LINK during ADD LINK
            // RFC 7609 3.5.5.3.2 #1: answer TEST LINK during DELETE LINK
            // RFC 7609 3.5.5.3.3 #1: answer TEST LINK during CONFIRM RKEY
            // RFC 7609 A.3.8 #2: echo TEST LINK at once
            self.send(on, Llc::TestLink(TestLink { reply: true, ..*message }));
            return Ok(());
        }
        let group_link = self.find_mut(on).expect(ARRIVED);
        let ours = group_link.ours.gid.0;
        if group_link.unanswered == 0 {
            self.dropped += 1;
            return Ok(());
        }
        group_link.unanswered -= 1;
        // RFC 7609 C.7.1 #33: changed TEST LINK data fails link
        if message.user_data != ours {
            return Err(PeerMisbehaved::WrongEcho);
        }
        if group_link.unanswered == 0 {
            self.actions.push(super::Action::LinkProven(on));
        }
        Ok(())
    }
}
