//! Rendezvous that wait for an element: one of ours that the peer does not know yet, or the peer's,
//! which another connection still has.

use std::time::Duration;

use smcr_proto::Instant;
use smcr_proto::wire::clc::{Diagnosis, Offer};
use smcr_rnic::Rnic;

use crate::gateway::Gateway;
use crate::groups::{BadOffer, GroupId, Taken};
use crate::reactor::Key;
use crate::sessions::{Held, Session, Waiting};

impl<N: Rnic> Gateway<N> {
    /// Has a rendezvous wait until the peer knows another RMB, or for as long as it may take.
    pub(super) fn wait_for_element(
        &mut self,
        now: Instant,
        key: Key,
        group: GroupId,
        accept: Option<Offer>,
    ) {
        if let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) {
            shaking.waiting =
                Some(Waiting { group, until: now + ELEMENT_WAIT, accept, for_proof: false });
        }
    }

    /// The elements of a group have become more or fewer: those who wait for one try again.
    pub(crate) fn serve_waiting(&mut self, now: Instant, group: GroupId) {
        for key in self.shaking_keys.clone() {
            let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { continue };
            if let Some(held) = shaking.held.take_if(|held| held.group == group) {
                let taken = self.accept_offer(now, key, &held.offer);
                self.offer_taken(key, taken, held);
                self.advance(now, key);
            } else if shaking.waiting.as_ref().is_some_and(|waiting| waiting.group == group) {
                self.try_again(now, key);
            }
        }
    }

    /// What a rendezvous waited for may be there.
    pub(super) fn try_again(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        match shaking.waiting.take().map(|waiting| waiting.accept) {
            Some(Some(accept)) => {
                self.join_link(now, key, &accept);
                self.advance(now, key);
            }
            Some(None) => self.resume(now, key),
            None => {}
        }
    }

    /// The peer took too long to know another RMB: the connection stays TCP.
    pub(super) fn stop_waiting(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        let is_client = shaking.waiting.take().is_some_and(|waiting| waiting.accept.is_some());
        if is_client {
            self.answer_client(key, Err(Diagnosis::OUT_OF_MEMORY), false);
            self.advance(now, key);
        } else {
            self.answer_server(now, key, Err(Diagnosis::OUT_OF_MEMORY));
        }
    }

    /// Takes in what the peer offered.
    pub(super) fn accept_offer(
        &mut self,
        now: Instant,
        key: Key,
        offer: &Offer,
    ) -> Result<Taken, BadOffer> {
        let connection = self.connection_of_session(key).ok_or(BadOffer::NoSuchLink)?;
        self.groups.accept_offer(now, connection, offer)
    }

    /// Takes in what the peer offered in a later contact; `answer` is what a client says then.
    pub(super) fn take_in(
        &mut self,
        now: Instant,
        key: Key,
        group: GroupId,
        offer: Offer,
        answer: Option<Offer>,
    ) {
        let taken = self.accept_offer(now, key, &offer);
        self.offer_taken(key, taken, Held { group, until: now + END_WAIT, offer, answer });
    }

    /// The connection that has the peer's element does not end: the peer has forgotten it.
    pub(super) fn insist(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        let Some(held) = shaking.held.take() else { return };
        let connection = self.connection_of_session(key);
        let connection = connection.expect("who waits for the peer's element has its own");
        let taken = self.groups.insist_on_offer(now, connection, &held.offer);
        self.offer_taken(key, taken.map(|()| Taken::Noted), held);
        self.advance(now, key);
    }

    /// Does what follows from what became of the peer's offer.
    fn offer_taken(&mut self, key: Key, taken: Result<Taken, BadOffer>, held: Held) {
        match (taken, held.answer) {
            (Ok(Taken::Awaited), _) => {
                if let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) {
                    shaking.held = Some(held);
                }
            }
            // The client answers; the server has nothing left to say.
            (Ok(Taken::Noted), Some(ours)) => self.answer_client(key, Ok(ours), false),
            (Ok(Taken::Noted), None) => {}
            (Err(offence), answer) => {
                let source = self.peer_address(key);
                if let Some(left_out) = self.bad_offers.pass(self.clock.now()) {
                    tracing::warn!(%source, ?offence, left_out, "an offer cannot be used");
                }
                if answer.is_some() {
                    self.answer_client(key, Err(Diagnosis::OUT_OF_MEMORY), false);
                } else {
                    // The client writes by RDMA already, or so it believes: too late for TCP.
                    // RFC 7609 C.1-7
                    self.handshakes_failed += 1;
                    self.fail(key, "the Confirm names no link of the group");
                }
            }
        }
    }
}

/// How long a rendezvous waits for the peer to know another RMB: two exchanges of as long as
/// deployed peers give one, and less than the six seconds after which they give up CLC.
const ELEMENT_WAIT: Duration = Duration::from_secs(4);

/// How long a rendezvous waits for the end of a connection that the peer takes to have ended. What
/// is missing is on its way: milliseconds, if our pollers are busy.
const END_WAIT: Duration = Duration::from_millis(200);
