//! ADD LINK CONTINUATION: the rkey of each RMB on a new link (RFC 3.5.5.2.3, A.3.3).

use super::exchange::{Exchange, Pairs};
use super::rmbs::{Found, Token};
use super::{LinkGroup, Role};
use crate::error::PeerMisbehaved;
use crate::time::Instant;
use crate::vocabulary::LinkNumber;
use crate::wire::llc::add_link::RkeyPair;
use crate::wire::llc::{AddLinkContinuation, Llc};

impl LinkGroup {
    pub(super) fn handle_add_link_continuation(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &AddLinkContinuation,
    ) -> Result<(), PeerMisbehaved> {
        let Some(Exchange::Rkeys { number, on: carrier, mut pairs, .. }) = self.exchange else {
            self.dropped += 1;
            return Ok(());
        };
        // RFC 7609 A.3.3 #2: only server begins ADD LINK CONTINUATION
        let from_server = !message.reply;
        if carrier != on || from_server != (self.role == Role::Client) {
            self.dropped += 1;
            return Ok(());
        }
        let counted = pairs.peer_left.is_none_or(|left| left == message.remaining);
        // RFC 7609 A.3.3 #8: RTokens left fall by two
        // RFC 7609 C.7.1 #28: wrong RToken count fails link
        if message.link != number || !counted {
            return Err(PeerMisbehaved::UnexpectedMessage);
        }
        let brought = message.remaining.min(PAIRS_PER_MESSAGE);
        for pair in &message.pairs[..usize::from(brought)] {
            if let (Some(on), Some(added)) = (self.slot(on), self.slot(number)) {
                self.learn_pair_at(on, added, pair);
            }
        }
        // RFC 7609 A.3.3 #7: byte 5 counts RTokens left
        pairs.peer_left = Some(message.remaining - brought);
        match self.role {
            // RFC 7609 A.3.3 #5: server asks with none left
            Role::Server if pairs.are_told() => self.confirm_added(now, number),
            Role::Server => self.send_pairs(now, number, on, &mut pairs),
            Role::Client => {
                self.send_pairs(now, number, on, &mut pairs);
                if pairs.are_told() {
                    // RFC 7609 C.7 #1: timer for each LLC request
                    self.await_confirm(now, number);
                }
            }
        }
        Ok(())
    }

    /// Learns the rkeys of an RMB of the peer on the links in two places.
    pub(super) fn learn_pair_at(&mut self, on: usize, added: usize, pair: &RkeyPair) {
        if *pair == RkeyPair::default() {
            return;
        }
        let token = Token { rkey: pair.new, address: pair.address };
        let learnt = match self.peer_rmbs.find(on, pair.existing, pair.address) {
            Found::Row(row) => {
                self.peer_rmbs.set(row, added, token);
                true
            }
            Found::Nothing => self.peer_rmbs.learn(added, token).is_ok(),
            Found::Several => false,
        };
        // The table is full, or it cannot be told which RMB is meant. Connections with this RMB are
        // reset if they have to move there.
        //
        // A peer that uses an rkey again without deleting it brings this upon itself. To drop the
        // older RMB would harm a peer that keeps all its RMBs in one region, under one rkey, and
        // announces them ahead of need: nothing tells the two apart.
        self.dropped += u64::from(!learnt);
    }

    /// Sends the next rkeys of ours, at most two, and takes them out of `pairs`.
    pub(super) fn send_pairs(
        &mut self,
        now: Instant,
        number: LinkNumber,
        on: LinkNumber,
        pairs: &mut Pairs,
    ) {
        let [on_slot, new_slot] = [on, number]
            .map(|link| self.slot(link).expect("both links stay while their rkeys are told"));
        let mut message = AddLinkContinuation {
            reply: self.role == Role::Client,
            link: number,
            // RFC 7609 A.3.3 #4: client replies with none left
            remaining: u8::try_from(pairs.left.len()).expect("a byte can count them"),
            pairs: [RkeyPair::default(); PAIRS_PER_MESSAGE as usize],
        };
        for place in &mut message.pairs {
            let Some(rmb) = pairs.left.first() else { break };
            pairs.left.remove(rmb);
            // An RMB that was withdrawn meanwhile leaves an empty pair.
            *place = self.our_rmbs.pair(rmb, on_slot, new_slot).unwrap_or_default();
            self.our_rmbs.note_told(rmb, new_slot);
        }
        let deadline = now + self.exchange_wait();
        self.exchange = Some(Exchange::Rkeys { number, on, pairs: *pairs, deadline });
        // RFC 7609 3.5.1.6.3 #1: exchange RKeys before CONFIRM LINK
        // RFC 7609 3.5.5.2.3 #1: new RTokens for a joining link
        // RFC 7609 3.5.5.2.3 #2: pair known with new RToken
        // RFC 7609 3.5.5.2.3 #3: continue over the link of ADD LINK
        // RFC 7609 A.3.3 #3: exchange RTokens in step
        self.send(on, Llc::AddLinkContinuation(message));
    }
}

/// RToken pairs in one ADD LINK CONTINUATION.
const PAIRS_PER_MESSAGE: u8 = 2;
