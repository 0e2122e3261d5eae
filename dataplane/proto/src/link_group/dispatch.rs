//! Takes LLC messages apart, and answers TEST LINK (RFC 3.3, 3.5.5.3, A.3.8).
//!
//! A reply that no exchange waits for is dropped, as deployed peers drop it. A request that its
//! sender may never make is an offence, and costs the link.

use super::LinkGroup;
use crate::error::PeerMisbehaved;
use crate::time::Instant;
use crate::vocabulary::LinkNumber;
use crate::wire::llc::{Llc, TestLink};

impl LinkGroup {
    pub(super) fn dispatch(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &Llc,
    ) -> Result<(), PeerMisbehaved> {
        // RFC 7609 2-6, 3.3-2, A.3.7-8, A.3.8-3
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
            // RFC 7609 3.3-4, 3.3-6, 3.5.5.3-1, 3.5.5.3.1-1, 3.5.5.3.2-1, 3.5.5.3.3-1, A.3.8-2
            self.send(on, Llc::TestLink(TestLink { reply: true, ..*message }));
            return Ok(());
        }
        let Some(member) = self.find_mut(on) else { return Ok(()) };
        let ours = member.ours.gid.0;
        if member.unanswered == 0 {
            self.dropped += 1;
            return Ok(());
        }
        member.unanswered -= 1;
        // RFC 7609 C.7.1-33
        if message.user_data == ours { Ok(()) } else { Err(PeerMisbehaved::WrongEcho) }
    }
}
