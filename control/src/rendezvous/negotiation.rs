//! The next step of a rendezvous, and how it ends: SMC-R, TCP, or a reset.

use std::mem;
use std::net::IpAddr;

use smcr_engine::LinkId;
use smcr_proto::Instant;
use smcr_proto::handshake::{Agreement, ClientAction, HandshakeError, ServerAction};
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::{Diagnosis, Frame, Offer};
use smcr_rnic::Rnic;

use super::conversation::{Demand, Ended, Machine};
use super::effect::{Effect, Limit, Why};
use super::facts::{Side, Surroundings, Terms};
use super::path::PROOF_LOOK;
use super::resources::{Resources, Shortage};
use super::shared::Shared;
use super::state::{PlainTcp, Rendezvous, State, Talking};
use super::waiting::{Answer, Asked, ELEMENT_WAIT, Held, Wait};
use crate::groups::{BadOffer, GroupId, Peer, Pollers, PortId, Proof, QpOf, Taken};

/// One rendezvous and what all of them share, borrowed while one input is handled.
pub(super) struct Negotiator<'a, N: Rnic, P: Pollers<QpOf<N>>> {
    pub(super) now: Instant,
    pub(super) one: &'a mut Rendezvous,
    pub(super) shared: &'a mut Shared<N, P>,
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Negotiator<'_, N, P> {
    /// Does what can be done without another input. Returns the first thing that the owner must do
    /// about it; none if the rendezvous waits for an input.
    pub(super) fn step(&mut self) -> Option<Effect> {
        loop {
            match &mut self.one.state {
                State::Queued => return None,
                State::Plain(_) | State::Connecting if !self.one.connected => return None,
                State::Plain(_) | State::Connecting if !self.one.surveyed => {
                    return Some(Effect::Survey { key: self.one.key });
                }
                State::Following(_) if !self.one.connected => return None,
                State::Following(connection) => {
                    let connection = *connection;
                    self.give_all_back();
                    self.shared.counts.connections_smc += 1;
                    self.shared.counts.streams_followed += 1;
                    return Some(Effect::NextStream { key: self.one.key, connection });
                }
                State::Plain(plain) => {
                    let plain = mem::take(plain);
                    return Some(self.stay_tcp(plain));
                }
                State::Declined(diagnosis) => {
                    let reason = Some(*diagnosis);
                    let plain = PlainTcp { reason, leftover: Vec::new(), declined: true };
                    return Some(self.stay_tcp(plain));
                }
                State::Failed(why) => {
                    let why = *why;
                    self.give_all_back();
                    return Some(Effect::Reset { key: self.one.key, why });
                }
                State::Connecting => {
                    if let Some(frame) = self.propose() {
                        return Some(self.say(frame));
                    }
                }
                State::Talking(talking) => {
                    if talking.must_answer() && self.one.connected {
                        if !self.one.surveyed {
                            return Some(Effect::Survey { key: self.one.key });
                        }
                        self.answer();
                        continue;
                    }
                    // The peer has sent all its CLC messages: nothing is to be done before its
                    // element is free.
                    if matches!(talking.wait, Some(Wait::Holder(_))) {
                        return None;
                    }
                    let demand = talking.conversation.poll_demand()?;
                    if let Some(effect) = self.obey(demand) {
                        return Some(effect);
                    }
                }
            }
        }
    }

    fn obey(&mut self, demand: Demand) -> Option<Effect> {
        match demand {
            Demand::Say(frame)
            | Demand::Client(ClientAction::Send(frame))
            | Demand::Server(ServerAction::Send(frame)) => return Some(self.say(frame)),
            Demand::Client(ClientAction::Done) | Demand::Server(ServerAction::Done) => {
                return Some(self.hand_over());
            }
            Demand::Client(ClientAction::FallBack) | Demand::Server(ServerAction::FallBack) => {
                self.fall_back(None);
            }
            Demand::FallBack(reason) => self.fall_back(reason),
            Demand::Client(ClientAction::OpenLink(offer) | ClientAction::JoinLink(offer)) => {
                self.ask(Asked::Accept(offer));
            }
            Demand::Server(ServerAction::Provide(proposal)) => self.proposed(proposal),
            Demand::Server(ServerAction::ConnectLink(offer)) => self.connect_link(&offer),
            Demand::Server(ServerAction::JoinLink(offer)) => self.confirmed(offer),
            Demand::Failed(error) => self.handshake_failed(error),
            Demand::Close(Ended::Failed) => self.one.state = State::Failed(Why::Failed),
            Demand::Close(Ended::ByPeer) => self.one.state = State::Failed(Why::Ended),
        }
        None
    }

    /// The handshake machine asks a question. It is answered at once, or when that is possible.
    pub(super) fn ask(&mut self, asked: Asked) {
        self.handshake().asked = Some(asked);
        // The network may have changed since it was last looked at.
        self.one.surveyed = false;
    }

    /// The handshake, which must be under way.
    pub(super) fn handshake(&mut self) -> &mut Talking {
        self.one.talking_mut().expect("only a machine at work asks and is answered")
    }

    /// Answers the machine's question, or waits for what the answer needs.
    fn answer(&mut self) {
        let asked = self.handshake().asked.expect("something was asked");
        let answer = match asked {
            Asked::Proposal(proposal, _) => self.answer_to_proposal(&proposal),
            Asked::Accept(offer) => self.answer_to_accept(&offer),
            Asked::Confirm { ours, insisted } => Answer::Now(self.confirm(ours, insisted)),
        };
        match answer {
            Answer::Now(answer) => self.reply(answer),
            Answer::Later(wait) => self.wait_for(wait),
        }
    }

    /// Gives the machine this answer to its question.
    pub(super) fn reply(&mut self, answer: Result<Offer, Diagnosis>) {
        if let Err(diagnosis) = answer {
            self.one.reason = Some(diagnosis);
        }
        let talking = self.handshake();
        talking.wait = None;
        let asked = talking.asked.take().expect("an answer follows a question");
        match asked {
            Asked::Proposal(proposal, _) => self.reply_to_client(&proposal, answer),
            Asked::Accept(_) | Asked::Confirm { .. } => self.reply_to_server(answer),
        }
    }

    /// Lets the rendezvous wait for this.
    pub(super) fn wait_for(&mut self, wait: Wait) {
        let (key, listener) = (self.one.key, self.one.listener);
        match &wait {
            Wait::Place => self.shared.places.wait(self.now, listener, key),
            Wait::FirstContact(group) => self.shared.first_contacts.wait(*group, key),
            Wait::Element { group, .. } | Wait::Proof { group, .. } => {
                self.shared.waiting.push((*group, key));
            }
            Wait::Holder(held) => self.shared.waiting.push((held.group, key)),
        }
        self.handshake().wait = Some(wait);
        // The network may have changed when the wait is over.
        self.one.surveyed = false;
    }

    /// The answer if a group has no element for this rendezvous now.
    pub(super) fn without_element(&mut self, shortage: Shortage) -> Answer {
        match shortage {
            Shortage::Passing(group) => {
                // RFC 7609 3.5.2.1 #7: CONFIRM RKEY before Accept
                // RFC 7609 3.5.2.2 #6: CONFIRM RKEY before Confirm
                Answer::Later(Wait::Element { group, until: self.now + ELEMENT_WAIT })
            }
            Shortage::Unproven(group, link) => self.await_proof(group, link),
            Shortage::Final(diagnosis) => Answer::Now(Err(diagnosis)),
        }
    }

    /// Probes the links of a group, which proves whether they work, if there is still time for
    /// that. The answer waits for the proof of `link`, or of any link if none is named.
    fn await_proof(&mut self, group: GroupId, link: Option<LinkId>) -> Answer {
        let until = self.one.path.proof_by(self.now);
        if until <= self.now {
            self.one.path.failed(self.now, &mut self.shared.paths);
            return Answer::Now(Err(Diagnosis::NO_ROCE_PATH));
        }
        self.shared.groups.probe(self.now, group);
        // The acknowledgement is a proof, too, and says nothing to us. The answer does, but the
        // peer may be too busy to send it in time.
        let until = until.min(self.now + PROOF_LOOK);
        Answer::Later(Wait::Proof { group, link, until })
    }

    /// Takes an element in an existing group.
    pub(super) fn join(&mut self, group: GroupId, link: LinkId) -> Result<Offer, Shortage> {
        let listener = self.one.listener;
        let (own, ours) = Resources::reserve(self.now, self.shared, listener, (group, link))?;
        self.one.hold(own);
        self.one.path.worked(&mut self.shared.paths);
        Ok(ours)
    }

    /// Creates a group for a first contact, and takes an element in it.
    pub(super) fn found(
        &mut self,
        port: PortId,
        role: Role,
        peer: Peer,
    ) -> Result<Offer, Shortage> {
        let who = (self.one.listener, self.one.key);
        let (own, ours) = Resources::found(self.now, self.shared, who, (port, role, peer))?;
        self.one.hold(own);
        Ok(ours)
    }

    /// Connects the queue pair of a first contact to the peer's, and notes the element that the
    /// peer offers with it. Returns whether both can be used.
    pub(super) fn connect_to(&mut self, offer: &Offer, agreement: Agreement) -> bool {
        let is_client = matches!(self.handshake().conversation.machine, Machine::Client(_));
        let group = self.one.resources.as_ref().expect("whoever founds a group is in it").group;
        let within = self.one.path.hurry(self.now, is_client);
        let connected = self.shared.groups.connect(self.now, group, offer, agreement, within);
        connected.is_ok() && self.take_offer(offer) == Ok(Taken::Noted)
    }

    /// Notes the element that the peer offers.
    pub(super) fn take_offer(&mut self, offer: &Offer) -> Result<Taken, BadOffer> {
        let own = self.one.resources.as_ref().expect("whoever is offered one has its own");
        own.take_offer(self.now, self.shared, offer)
    }

    /// Tries again to take the element that the peer offered, which may be free now.
    pub(super) fn retry_offer(&mut self) {
        if let Some(held) = self.take_held() {
            let taken = self.take_offer(&held.offer);
            self.taken(taken, held);
        }
    }

    /// Takes the peer's element although another connection still has it: that one does not end, so
    /// the peer must have forgotten it. A client first looks whether its Confirm may still leave.
    pub(super) fn insist(&mut self) {
        let Some(held) = self.take_held() else { return };
        if let Some(ours) = held.answer {
            self.ask(Asked::Confirm { ours, insisted: Some(held.offer) });
        } else {
            let taken = self.insist_on(&held.offer);
            self.taken(taken, held);
        }
    }

    /// Takes an element of the peer from whoever has it.
    pub(super) fn insist_on(&mut self, offer: &Offer) -> Result<Taken, BadOffer> {
        let own = self.one.resources.as_ref().expect("whoever waits has its own");
        own.insist_on_offer(self.now, self.shared, offer)
    }

    /// Refuses to let RDMA carry what IPsec protects by the last survey; and where nobody could
    /// say, at a client: its survey then finds no offer of SMC-R either.
    pub(super) fn check_protection(&self) -> Result<(), Diagnosis> {
        let Surroundings { offered, protected, .. } = self.one.surroundings;
        let unknown = !offered && self.terms().side == Side::Client;
        // RFC 7609 5.5 #1: no SMC-R under IPsec
        if protected || unknown { Err(Diagnosis::IPSEC) } else { Ok(()) }
    }

    fn take_held(&mut self) -> Option<Held> {
        let talking = self.one.talking_mut()?;
        let held = match talking.wait {
            Some(Wait::Holder(held)) => held,
            Some(
                Wait::Place | Wait::FirstContact(_) | Wait::Element { .. } | Wait::Proof { .. },
            )
            | None => return None,
        };
        talking.wait = None;
        Some(held)
    }

    /// Goes on after the peer's offer was noted, must wait, or was refused.
    pub(super) fn taken(&mut self, taken: Result<Taken, BadOffer>, held: Held) {
        match (taken, held.answer) {
            (Ok(Taken::Awaited), _) => self.wait_for(Wait::Holder(held)),
            // The client answers; the server has nothing left to say.
            (Ok(Taken::Noted), Some(ours)) => self.ask(Asked::Confirm { ours, insisted: None }),
            (Ok(Taken::Noted), None) => {}
            (Err(offence), Some(_)) => {
                self.note_bad_offer(offence);
                self.reply(Err(Diagnosis::OUT_OF_MEMORY));
            }
            (Err(offence), None) => {
                self.note_bad_offer(offence);
                // The client believes that the connection is SMC-R, and may already write by RDMA:
                // it is too late for TCP.
                // RFC 7609 C.1 #7: existing group: later failure breaks TCP
                self.shared.counts.handshakes_failed += 1;
                self.one.state = State::Failed(Why::BadConfirm);
            }
        }
    }

    /// Notes an error that ended the handshake. The next demand says what becomes of the
    /// connection.
    fn handshake_failed(&mut self, error: HandshakeError) {
        tracing::debug!(session = self.one.key.index, ?error, "the rendezvous failed");
        let HandshakeError::Declined { diagnosis, out_of_sync } = error else {
            self.shared.counts.handshakes_failed += 1;
            return;
        };
        if out_of_sync && let Some(resources) = &self.one.resources {
            let (group, peer) = (resources.group, self.peer_address());
            self.shared.groups.called_out_of_sync(self.now, group, peer);
        }
        // We take over what the peer has found out about the RoCE path.
        match diagnosis {
            Diagnosis::NO_ROCE_PATH => self.one.path.doubted(self.now, &mut self.shared.paths),
            Diagnosis::CONFIRM_LINK_TIMED_OUT => {
                self.one.path.failed(self.now, &mut self.shared.paths);
            }
            _ => {}
        }
        self.one.reason = Some(diagnosis);
    }

    fn say(&mut self, frame: Frame) -> Effect {
        tracing::trace!(session = self.one.key.index, ?frame, "sent");
        self.one.path.said_at = self.now;
        Effect::Send { key: self.one.key, frame }
    }

    /// The rendezvous succeeded: the poller takes over.
    // RFC 7609 3.5.2.4 #1: send once peer's element is known
    fn hand_over(&mut self) -> Effect {
        let ended = self.handshake().conversation.has_ended();
        let held = self.one.resources.take().expect("what was provided is reserved");
        self.give_all_back();
        self.shared.counts.connections_smc += 1;
        let Resources { group, connection, rmbe } = held;
        Effect::HandOver { key: self.one.key, connection, group, rmbe, ended }
    }

    fn fall_back(&mut self, reason: Option<Diagnosis>) {
        let conversation = &self.handshake().conversation;
        let (leftover, declined) = (conversation.leftover().to_vec(), conversation.has_declined());
        self.give_all_back();
        // What was last seen of the network is good enough to choose a poller.
        self.one.surveyed = true;
        self.one.state = State::Plain(PlainTcp { reason, leftover, declined });
    }

    /// The connection stays TCP, on the poller of its port. If it has no port, the first poller
    /// takes it, because two sockets need no RNIC.
    fn stay_tcp(&mut self, plain: PlainTcp) -> Effect {
        let PlainTcp { reason, leftover, declined } = plain;
        self.give_all_back();
        let Some(connection) = self.shared.groups.slots_mut().take() else {
            self.one.state = State::Failed(Why::NoSlot);
            return Effect::Exhausted { listener: self.one.listener, limit: Limit::Slots };
        };
        let reason = self.one.reason.or(reason);
        if let Some(reason) = reason {
            self.shared.fallbacks.count(reason);
        }
        self.shared.counts.connections_tcp += 1;
        let groups = &self.shared.groups;
        // What was seen of the network may be old: nobody reads what a closed port is told.
        let port = self.one.surroundings.port.filter(|port| !groups.ports()[port.0].closed);
        let port = port.unwrap_or_else(|| groups.any_port());
        Effect::StayTcp { key: self.one.key, connection, port, reason, leftover, declined }
    }

    /// Gives back what the rendezvous holds: its place, its element and its slot.
    fn give_all_back(&mut self) {
        self.one.path.end_trial(self.now, &mut self.shared.paths);
        if let Some(resources) = self.one.resources.take() {
            resources.release(self.now, self.shared, self.one.key);
        }
        let key = self.one.key;
        if mem::take(&mut self.one.silent) {
            self.shared.silent.leave(self.one.source.ip(), key);
        }
        if mem::take(&mut self.one.has_place) {
            self.shared.places.leave(self.one.listener);
        }
        self.shared.waiting.retain(|(_, other)| *other != key);
    }

    /// The first contact of this rendezvous succeeded.
    pub(super) fn link_confirmed(&mut self) {
        self.one.path.worked(&mut self.shared.paths);
        if let Some(talking) = self.one.talking_mut() {
            talking.conversation.link_confirmed();
        }
    }

    /// The first contact of this rendezvous failed.
    pub(super) fn link_failed(&mut self, committed: bool) {
        self.one.path.failed(self.now, &mut self.shared.paths);
        if let Some(talking) = self.one.talking_mut() {
            talking.conversation.link_failed(committed);
        }
    }

    /// The link that the rendezvous waits for has proved that it works, or never will: ends the
    /// wait and, with a proof, the doubt about the path.
    pub(super) fn proof_over(&mut self, proof: Proof) {
        if proof == Proof::Given {
            self.one.path.worked(&mut self.shared.paths);
        }
        self.end_wait(|wait| matches!(wait, Wait::Proof { .. }));
    }

    /// Ends the wait of the rendezvous, if `is_this` accepts it.
    pub(super) fn end_wait(&mut self, is_this: impl FnOnce(&Wait) -> bool) {
        if let Some(talking) = self.one.talking_mut() {
            talking.wait.take_if(|wait| is_this(wait));
        }
    }

    /// Acts on a deadline that has passed.
    pub(super) fn expire(&mut self) {
        let now = self.now;
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_due(self.one.deadline) {
            self.time_out();
            return;
        }
        let connected = self.one.connected;
        let talking = self.one.talking_mut().expect("all other deadlines are of a handshake");
        if connected
            && let Some(Asked::Proposal(_, by)) = talking.asked
            && by <= now
        {
            let crowded = matches!(talking.wait, Some(Wait::Place));
            let why = if crowded { Diagnosis::TOO_BUSY } else { Diagnosis::TIMED_OUT };
            self.reply(Err(why));
        } else if is_due(talking.wait.as_ref().and_then(Wait::until)) {
            match &talking.wait {
                Some(Wait::Holder(_)) => self.insist(),
                // The peer took too long to confirm another RMB.
                Some(Wait::Element { .. }) => self.reply(Err(Diagnosis::OUT_OF_MEMORY)),
                // Forget the wait; the next step checks again whether the links work.
                Some(Wait::Proof { .. }) => talking.wait = None,
                Some(Wait::Place | Wait::FirstContact(_)) | None => {
                    unreachable!("these waits have no end of their own")
                }
            }
        } else {
            talking.conversation.handle_timeout(now);
        }
    }

    /// The time limit of the connect, or of the whole rendezvous, has passed.
    fn time_out(&mut self) {
        if !self.one.connected {
            // The owner says what becomes of it.
            self.one.deadline = None;
            self.shared.effects.push_back(Effect::Unanswered { key: self.one.key });
            return;
        }
        let talking = self.one.talking_mut().expect("whoever is connected talks, or is over");
        if matches!(talking.asked, Some(Asked::Proposal(..))) {
            self.reply(Err(Diagnosis::TIMED_OUT));
        } else {
            (talking.asked, talking.wait) = (None, None);
            talking.conversation.fail(HandshakeError::TimedOut);
        }
    }

    /// The SMC-R version that the two sides have agreed on.
    pub(super) fn agreement(&self) -> Option<Agreement> {
        self.one.talking()?.conversation.machine.agreement()
    }

    /// The terms of the listener of this rendezvous.
    pub(super) fn terms(&self) -> &Terms {
        self.shared.terms(self.one.listener)
    }

    /// The IP address of the peer's end of the TCP connection.
    pub(super) fn peer_address(&self) -> IpAddr {
        match self.terms().side {
            Side::Client => self.one.upstream.to_canonical(),
            Side::Server | Side::Neither => self.one.source.ip().to_canonical(),
        }
    }
}
