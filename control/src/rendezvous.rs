//! Drives the CLC handshake of `smcr-proto` over a socket, and hands the outcome to a poller.
//!
//! On the client side the socket towards the peer is being connected first; on the server side the
//! socket towards the application is, and Accept is not sent before it is: an upstream that refuses
//! is then a reset, seen by the application at the far end, and nothing has to be undone.
//!
//! - [`conversation`] is what is said, as a value;
//! - `client` and `server` answer what the machines of the two sides ask;
//! - `waiting` is for elements that are not there yet, ours or the peer's;
//! - `outcome` hands sockets over, or closes them;
//! - `path` keeps connections from links that carry nothing.

mod client;
pub mod conversation;
pub(crate) mod outcome;
mod path;
mod server;
mod waiting;

use std::io;
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags, recv, send};
use smcr_engine::{ConnectionId, LinkId};
use smcr_proto::handshake::{Agreement, ClientAction, HandshakeError, ServerAction};
use smcr_proto::limits::CLC_WAIT;
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::{Diagnosis, FRAME_MAX, Frame, Offer};
use smcr_proto::{Instant, RmbeSize};
use smcr_rnic::{Exhausted, Rnic};

use crate::config::Transport;
use crate::gateway::Gateway;
use crate::groups::{GroupId, Peer, PortId, Refusal};
use crate::listener::connect_outcome;
use crate::places::Place;
use crate::reactor::{Event, Key};
use crate::sessions::{Resources, Session, Talk};
use conversation::Effect;

impl<N: Rnic> Gateway<N> {
    /// The socket that a rendezvous connects has an outcome.
    pub(crate) fn connect_event(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at(key) else { return };
        let accepts_smc = matches!(shaking.conversation.talk, Talk::Server(_) | Talk::Pending(..))
            || self.listeners[usize::from(shaking.listener)].config.accept == Transport::Smc;
        let socket = if accepts_smc { &shaking.app } else { &shaking.peer };
        match connect_outcome(socket) {
            Ok(()) => self.connected(now, key),
            Err(error) => self.refuse(key, &error),
        }
    }

    /// Both sockets of a rendezvous are connected.
    pub(crate) fn connected(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        shaking.connected = true;
        shaking.deadline = now + self.config.smc.handshake_timeout;
        match &shaking.conversation.talk {
            Talk::Plain(reason) => {
                let reason = *reason;
                self.relay_tcp(now, key, reason);
            }
            Talk::Connecting => self.propose(now, key),
            Talk::Pending(..) => self.resume(now, key),
            Talk::Client(_) | Talk::Server(_) => {}
        }
    }

    /// Something happened to the peer's socket of a rendezvous.
    pub(crate) fn peer_event(&mut self, now: Instant, key: Key, event: Event) {
        let Some(Session::Shaking(shaking)) = self.sessions.at(key) else { return };
        match &shaking.conversation.talk {
            Talk::Connecting => {
                if let Err(error) = connect_outcome(&shaking.peer) {
                    self.refuse(key, &error);
                } else {
                    self.connected(now, key);
                }
            }
            Talk::Client(_) | Talk::Server(_) | Talk::Pending(..) if event.readable => {
                self.listen(now, key);
            }
            Talk::Client(_) | Talk::Server(_) | Talk::Pending(..) | Talk::Plain(_) => {}
        }
    }

    /// Reads what the peer says until there is no more.
    fn listen(&mut self, now: Instant, key: Key) {
        loop {
            let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
            let mut bytes = [0; FRAME_MAX];
            let room = shaking.conversation.room();
            if room == 0 {
                // What came is looked at when the peer's element is free.
                return;
            }
            match recv(&shaking.peer, &mut bytes[..room], RecvFlags::empty()) {
                Ok((0, _)) => {
                    if shaking.held.is_some() {
                        shaking.conversation.end_in_order();
                    } else {
                        shaking.conversation.end();
                    }
                    self.advance(now, key);
                    return;
                }
                Ok((len, _)) => shaking.conversation.feed(&bytes[..len]),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
                Err(_) => {
                    self.fail(key, "the TCP connection broke during the rendezvous");
                    return;
                }
            }
            self.advance(now, key);
        }
    }

    /// Says Decline, for a reason that the handshake machine does not know.
    fn decline_first(&mut self, now: Instant, key: Key, diagnosis: Diagnosis) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        shaking.conversation.decline(self.peer_id, diagnosis);
        self.advance(now, key);
    }

    /// Does what the conversation demands.
    fn advance(&mut self, now: Instant, key: Key) {
        while let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key)
            && shaking.held.is_none()
            && let Some(effect) = shaking.conversation.poll_effect()
        {
            match effect {
                Effect::Client(action) => self.act_as_client(now, key, action),
                Effect::Server(action) => self.act_as_server(now, key, action),
                Effect::Say(frame) => self.say(key, &frame),
                Effect::Failed(error) => self.handshake_failed(now, key, error),
                Effect::FallBack(reason) => self.relay_tcp(now, key, reason),
                Effect::Close(why) => self.fail(key, why),
            }
        }
    }

    fn act_as_client(&mut self, now: Instant, key: Key, action: ClientAction) {
        match action {
            ClientAction::Send(frame) => self.say(key, &frame),
            ClientAction::OpenLink(offer) => self.open_link(now, key, &offer),
            ClientAction::JoinLink(offer) => self.join_link(now, key, &offer),
            ClientAction::Done => self.hand_over(now, key),
            ClientAction::FallBack => self.relay_tcp(now, key, None),
        }
    }

    fn act_as_server(&mut self, now: Instant, key: Key, action: ServerAction) {
        match action {
            ServerAction::Send(frame) => self.say(key, &frame),
            ServerAction::Provide(proposal) => {
                if let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key)
                    && let Talk::Server(server) = &shaking.conversation.talk
                {
                    shaking.conversation.talk = Talk::Pending(server.clone(), proposal);
                    shaking.answer_by = Some(now + ANSWER_WITHIN);
                    shaking.silent = false;
                    self.silent.leave(shaking.source.ip(), key);
                }
                self.resume(now, key);
            }
            ServerAction::ConnectLink(offer) => self.connect_link(now, key, &offer),
            ServerAction::JoinLink(offer) => {
                let group = self.group_of_session(key).expect("what was accepted is reserved");
                self.take_in(now, key, group, offer, None);
            }
            ServerAction::Done => self.hand_over(now, key),
            ServerAction::FallBack => self.relay_tcp(now, key, None),
        }
    }

    /// Takes an element and a slot for a rendezvous, and makes the offer that names them.
    fn reserve(
        &mut self,
        now: Instant,
        key: Key,
        group: GroupId,
        link: LinkId,
        first_contact: bool,
    ) -> Result<Offer, Shortage> {
        let peers = self.peers_of(key).clone();
        if !self.groups.admit(group, &peers) {
            return Err(Shortage::NotListed);
        }
        let size = self.element_size(key);
        let joined = match self.groups.join(now, group, link, size) {
            Ok(joined) => joined,
            Err(Refusal::NoMemory) => {
                self.log_limit_of(key, "memory for SMC-R: new connections stay TCP");
                return Err(Shortage::Final);
            }
            Err(Refusal::NotYet) => return Err(Shortage::Passing(group)),
            Err(Refusal::NoSlot | Refusal::NoLink) => return Err(Shortage::Final),
        };
        if !first_contact {
            self.path_worked(key);
        }
        let resources = Resources { group, connection: joined.connection, rmbe: joined.rmbe };
        if let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) {
            shaking.resources = Some(resources);
        }
        Ok(Offer { first_contact, ..joined.offer })
    }

    /// The size of the elements of a session's listener.
    fn element_size(&self, key: Key) -> RmbeSize {
        let of_listener = self.sessions.at(key).and_then(|session| {
            let Session::Shaking(shaking) = session else { return None };
            self.listeners[usize::from(shaking.listener)].config.rmbe_size
        });
        let bytes = of_listener.unwrap_or(self.config.smc.rmbe_size);
        RmbeSize::from_bytes(bytes).expect("the configuration was checked")
    }

    /// Begins a group for the first contact of a rendezvous, with an element in it.
    fn found(
        &mut self,
        now: Instant,
        key: Key,
        port: PortId,
        role: Role,
        peer: Peer,
    ) -> Result<(GroupId, Offer), Shortage> {
        let opened = self.groups.open(now, port, role, peer);
        let group = opened.map_err(|Exhausted| Shortage::Final)?;
        self.foundings.entry(group).or_default().founder = Some(key);
        let link = self.groups.best_link(group).ok_or(Shortage::Final)?;
        let reserved = self.reserve(now, key, group, link, true);
        if reserved.is_err() {
            self.give_up_founding(now, key, group);
        }
        reserved.map(|ours| (group, ours))
    }

    /// A group that this rendezvous was founding is not wanted any more.
    fn give_up_founding(&mut self, now: Instant, key: Key, group: GroupId) {
        if let Some(founding) = self.foundings.get_mut(&group)
            && founding.founder == Some(key)
        {
            founding.founder = None;
            self.groups.give_up(now, group);
        }
    }

    /// The first contact of this rendezvous succeeded.
    pub(crate) fn link_confirmed(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        shaking.conversation.link_confirmed();
        self.advance(now, key);
    }

    /// The first contact of this rendezvous failed.
    pub(crate) fn link_failed(&mut self, now: Instant, key: Key, committed: bool) {
        self.path_failed(now, key);
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        shaking.conversation.link_failed(committed);
        self.advance(now, key);
    }

    /// The handshake ended in an error. What becomes of the connection is another matter.
    fn handshake_failed(&mut self, now: Instant, key: Key, error: HandshakeError) {
        tracing::debug!(session = key.index, ?error, "the rendezvous failed");
        if let HandshakeError::Declined { diagnosis, out_of_sync } = error {
            if out_of_sync && let Some(group) = self.group_of_session(key) {
                self.groups.called_out_of_sync(now, group, self.peer_address(key));
            }
            self.note_decline(now, key, diagnosis);
            self.fallback_reasons.insert(key, diagnosis);
        } else {
            self.handshakes_failed += 1;
        }
    }

    /// Writes a message to the peer.
    fn say(&mut self, key: Key, frame: &Frame) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        tracing::trace!(session = key.index, ?frame, "sent");
        shaking.said_at = self.clock.now();
        let encoded = frame.encode();
        let bytes = encoded.as_bytes();
        // A few dozen bytes always fit an empty send buffer; if not, the connection is no good.
        // RFC 7609 3.2-1
        if send(&shaking.peer, bytes, SendFlags::NOSIGNAL) != Ok(bytes.len()) {
            self.fail(key, "a CLC message could not be sent");
        }
    }

    /// Looks after everything that waits.
    pub(crate) fn expire_rendezvous(&mut self, now: Instant) {
        let sessions = &self.sessions;
        self.shaking_keys.retain(|key| matches!(sessions.at(*key), Some(Session::Shaking(_))));
        for key in self.shaking_keys.clone() {
            let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { continue };
            if shaking.deadline <= now {
                self.rendezvous_timed_out(now, key);
                // Those that waited for this one get time of their own before theirs is over.
                self.heed_groups(now);
                continue;
            }
            let late = shaking.answer_by.is_some_and(|by| by <= now);
            if late && shaking.connected && matches!(shaking.conversation.talk, Talk::Pending(..)) {
                let crowded = shaking.place == Place::Wanted;
                let why = if crowded { Diagnosis::TOO_BUSY } else { Diagnosis::TIMED_OUT };
                self.answer_server(now, key, Err(why));
                continue;
            }
            if shaking.held.as_ref().is_some_and(|held| held.until <= now) {
                self.insist(now, key);
                continue;
            }
            if shaking.waiting.as_ref().is_some_and(|waiting| waiting.until <= now) {
                if shaking.waiting.as_ref().is_some_and(|waiting| waiting.for_proof) {
                    self.try_again(now, key);
                } else {
                    self.stop_waiting(now, key);
                }
                continue;
            }
            shaking.conversation.handle_timeout(now);
            self.advance(now, key);
        }
    }

    /// All the time of a rendezvous has passed.
    fn rendezvous_timed_out(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        if !shaking.connected {
            self.refuse(key, &io::ErrorKind::TimedOut.into());
        } else if matches!(shaking.conversation.talk, Talk::Pending(..)) {
            self.answer_server(now, key, Err(Diagnosis::TIMED_OUT));
        } else {
            shaking.conversation.fail(HandshakeError::TimedOut);
            self.advance(now, key);
        }
    }

    /// Which version a rendezvous has come to.
    fn agreement_of(&self, key: Key) -> Option<Agreement> {
        let Some(Session::Shaking(shaking)) = self.sessions.at(key) else { return None };
        match &shaking.conversation.talk {
            Talk::Client(client) => client.agreement().copied(),
            Talk::Server(server) | Talk::Pending(server, _) => server.agreement().copied(),
            Talk::Plain(_) | Talk::Connecting => None,
        }
    }

    fn group_of_session(&self, key: Key) -> Option<GroupId> {
        Some(self.resources_of(key)?.group)
    }

    fn connection_of_session(&self, key: Key) -> Option<ConnectionId> {
        Some(self.resources_of(key)?.connection)
    }

    fn resources_of(&self, key: Key) -> Option<&Resources> {
        match self.sessions.at(key)? {
            Session::Shaking(shaking) => shaking.resources.as_ref(),
            Session::Waiting(_) | Session::Open(_) => None,
        }
    }
}

/// Why a rendezvous gets no element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shortage {
    /// There will be some in this group, if the peer agrees.
    Passing(GroupId),
    /// The links of this group must show first that they carry.
    Unproven(GroupId),
    /// No packet would get from our RNIC to the peer's: it stays TCP.
    NoRoute,
    /// The peer has a port in this group that is not listed: it stays TCP.
    NotListed,
    /// It stays TCP.
    Final,
}

/// How long a client waits at most for our answer to its Proposal, which may depend on the first
/// contact of another connection. A second later a Linux client would give up, and its program
/// would get an error instead of TCP.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(CLC_WAIT.as_secs() - 1);
