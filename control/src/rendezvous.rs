//! Drives the CLC handshake of `smcr-proto` over a socket, and hands the outcome to a poller.
//!
//! On the client side the socket towards the peer is being connected first; on the server side the
//! socket towards the application is, and Accept is not sent before it is: an upstream that refuses
//! is then a reset, seen by the application at the far end, and nothing has to be undone.

use std::io;

use rustix::net::{RecvFlags, SendFlags, recv, send};
use smcr_engine::handoff::PeerElement;
use smcr_engine::{Command, ConnectionId, Established};
use smcr_proto::Instant;
use smcr_proto::handshake::{Client, ClientAction, HandshakeError, ServerAction, Verdict};
use smcr_proto::link_group::Role;
use smcr_proto::ring::Ring;
use smcr_proto::wire::clc::{Diagnosis, FRAME_MAX, Frame, Offer, Proposal};
use smcr_rnic::Rnic;

use crate::gateway::Gateway;
use crate::groups::{Peer, Phase};
use crate::listener::{connect_outcome, reset};
use crate::reactor::{Event, Key};
use crate::sessions::{Carried, GroupId, Open, PortId, Rendezvous, Resources, Session, Talk};

/// What one look at the peer's socket brought.
enum Heard {
    /// Nothing, for now.
    Silence,
    /// A message.
    Frame(Frame),
    /// The end of the connection.
    End,
    /// Something that is no CLC message, or one with a fault in it.
    Nonsense(HandshakeError),
}

impl<N: Rnic> Gateway<N> {
    /// The socket that a rendezvous connects has an outcome.
    pub(crate) fn connect_event(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.get(key) else { return };
        let accepts_smc = matches!(shaking.talk, Talk::Server(_) | Talk::Pending(..))
            || self.listeners[usize::from(shaking.listener)].config.accept
                == crate::config::Transport::Smc;
        let socket = if accepts_smc { &shaking.app } else { &shaking.peer };
        match connect_outcome(socket) {
            Ok(()) => self.connected(now, key),
            Err(error) => self.refuse(key, &error),
        }
    }

    /// Both sockets of a rendezvous are connected.
    pub(crate) fn connected(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key) else { return };
        shaking.connected = true;
        shaking.deadline = now + self.config.smc.handshake_timeout;
        match &shaking.talk {
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
        let Some(Session::Shaking(shaking)) = self.sessions.get(key) else { return };
        match &shaking.talk {
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

    /// Reads messages of the peer until there is none.
    fn listen(&mut self, now: Instant, key: Key) {
        loop {
            let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key) else { return };
            let result = match hear(shaking) {
                Heard::Silence => return,
                Heard::End => {
                    self.fail(key, "the peer closed the connection during the rendezvous");
                    return;
                }
                Heard::Nonsense(error) => Err(error),
                Heard::Frame(frame) => {
                    tracing::trace!(session = key.index, ?frame, "received");
                    match &mut shaking.talk {
                        Talk::Client(client) => client.handle_frame(frame),
                        Talk::Server(server) | Talk::Pending(server, _) => {
                            server.handle_frame(frame)
                        }
                        Talk::Plain(_) | Talk::Connecting => return,
                    }
                }
            };
            match result {
                Ok(()) => self.advance(now, key),
                Err(error) => self.handshake_failed(now, key, error),
            }
        }
    }

    /// The connection to the peer is up: proposes, if the peer offered SMC-R and we have an RNIC.
    fn propose(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key) else { return };
        let upstream = self.listeners[usize::from(shaking.listener)].upstream;
        if !self.option.peer_offered(&shaking.peer, upstream) {
            self.relay_tcp(now, key, Some(Diagnosis::NO_SMC_OPTION));
            return;
        }
        // From here on the peer waits for a CLC message, so that a refusal is a Decline.
        if self.is_too_busy() {
            self.decline_first(now, key, Diagnosis::OUT_OF_MEMORY);
            return;
        }
        let Some(proposal) = self.port_of(key).and_then(|port| self.proposal(port)) else {
            self.decline_first(now, key, Diagnosis::NO_SMC_R_DEVICE);
            return;
        };
        let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key) else { return };
        shaking.talk = Talk::Client(Client::new(now, proposal));
        self.advance(now, key);
    }

    /// What we propose on `port`.
    fn proposal(&self, port: PortId) -> Option<Proposal> {
        let port = &self.ports[port.0];
        let address = port.rnic.as_ref()?.port();
        Some(Proposal {
            peer_id: self.peer_id,
            gid: address.gid,
            mac: address.mac,
            subnet: port.subnet,
            prefixes: Default::default(),
            prefix_count: 0,
            offers_smc_r_v1: true,
        })
    }

    /// Says Decline, for a reason that the handshake machine does not know.
    fn decline_first(&mut self, now: Instant, key: Key, diagnosis: Diagnosis) {
        let decline =
            smcr_proto::wire::clc::Decline { out_of_sync: false, peer_id: self.peer_id, diagnosis };
        if self.say(key, &Frame::Decline(decline)) {
            self.relay_tcp(now, key, Some(diagnosis));
        }
    }

    /// Does what the handshake machine demands.
    fn advance(&mut self, now: Instant, key: Key) {
        loop {
            let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key) else { return };
            match &mut shaking.talk {
                Talk::Client(client) => {
                    let Some(action) = client.poll_action() else { return };
                    self.act_as_client(now, key, action);
                }
                Talk::Server(server) | Talk::Pending(server, _) => {
                    let Some(action) = server.poll_action() else { return };
                    self.act_as_server(now, key, action);
                }
                Talk::Plain(_) | Talk::Connecting => return,
            }
        }
    }

    fn act_as_client(&mut self, now: Instant, key: Key, action: ClientAction) {
        match action {
            ClientAction::Send(frame) => {
                self.say(key, &frame);
            }
            ClientAction::OpenLink(offer) => self.open_link(now, key, &offer),
            ClientAction::JoinLink(offer) => self.join_link(now, key, &offer),
            ClientAction::Done => self.hand_over(now, key),
            ClientAction::FallBack => self.relay_tcp(now, key, None),
        }
    }

    fn act_as_server(&mut self, now: Instant, key: Key, action: ServerAction) {
        match action {
            ServerAction::Send(frame) => {
                self.say(key, &frame);
            }
            ServerAction::Provide(proposal) => {
                if let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key)
                    && let Talk::Server(server) = &shaking.talk
                {
                    shaking.talk = Talk::Pending(server.clone(), proposal);
                }
                self.resume(now, key);
            }
            ServerAction::ConnectLink(offer) => self.connect_link(now, key, &offer),
            ServerAction::JoinLink(offer) => self.learn_peer(key, offer),
            ServerAction::Done => self.hand_over(now, key),
            ServerAction::FallBack => self.relay_tcp(now, key, None),
        }
    }

    // --- The client's side ---

    /// First contact: the server has opened a queue pair for us.
    fn open_link(&mut self, now: Instant, key: Key, offer: &Offer) {
        let ours = match self.port_of(key) {
            Some(port) => self.found_link(now, key, port, offer),
            None => Err(Diagnosis::NO_SMC_R_DEVICE),
        };
        self.answer_client(key, ours, false);
    }

    /// A group whose queue pair is connected to the server's, and an element in it.
    fn found_link(
        &mut self,
        now: Instant,
        key: Key,
        port: PortId,
        offer: &Offer,
    ) -> Result<Offer, Diagnosis> {
        let group = self
            .open_group(now, port, Role::Client, Peer::of(offer), key)
            .map_err(|_| Diagnosis::OUT_OF_MEMORY)?;
        let ours = match self.reserve(now, key, port, group, true) {
            Some(ours) if self.connect_group(now, group, offer).is_ok() => Ok(ours),
            Some(_) => Err(Diagnosis::QUEUE_PAIR_NOT_READY),
            None => Err(Diagnosis::OUT_OF_MEMORY),
        };
        if ours.is_ok() {
            self.learn_peer(key, *offer);
        } else {
            self.release(now, key);
            self.give_up_group(now, key, group);
        }
        ours
    }

    /// Subsequent contact: the server named a link that we should know.
    fn join_link(&mut self, now: Instant, key: Key, offer: &Offer) {
        let found = self.groups.iter().find(|(_, group)| {
            let same_link = match &group.phase {
                Phase::Running(_, address) => address.qpn == offer.qpn,
                Phase::Opening(_) | Phase::Ending => false,
            };
            group.role == Role::Client && group.peer == Peer::of(offer) && same_link
        });
        let Some((group, port)) = found.map(|(id, group)| (*id, group.port)) else {
            self.answer_client(key, Err(Diagnosis::OUT_OF_SYNC), true);
            return;
        };
        let ours = self.reserve(now, key, port, group, false).ok_or(Diagnosis::OUT_OF_MEMORY);
        self.learn_peer(key, *offer);
        self.answer_client(key, ours, false);
    }

    fn answer_client(&mut self, key: Key, ours: Result<Offer, Diagnosis>, out_of_sync: bool) {
        let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key) else { return };
        let Talk::Client(client) = &mut shaking.talk else { return };
        match ours {
            Ok(ours) => client.provide(ours),
            Err(diagnosis) => {
                client.refuse(diagnosis, out_of_sync);
                self.fallback_reasons.insert(key, diagnosis);
            }
        }
    }

    // --- The server's side ---

    /// Answers a Proposal, as soon as the application's side is connected and no first contact with
    /// the same peer is under way.
    pub(crate) fn resume(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.get(key) else { return };
        let Talk::Pending(_, proposal) = &shaking.talk else { return };
        if !shaking.connected {
            return;
        }
        let proposal = *proposal;
        let port = self.port_of(key);
        let refusal = self.objection(port, &proposal);
        let peer = Peer { id: proposal.peer_id, gid: proposal.gid, mac: proposal.mac };
        let with_peer = |role: Role, other: &Peer| role == Role::Server && *other == peer;
        let founding = self
            .groups
            .iter_mut()
            .find(|(_, group)| with_peer(group.role, &group.peer) && group.is_founding());
        if refusal.is_none()
            && let Some((_, group)) = founding
        {
            group.waiting.push(key);
            return;
        }
        let answer = match (refusal, port) {
            (Some(diagnosis), _) => Err(diagnosis),
            (None, None) => Err(Diagnosis::NO_SMC_R_DEVICE),
            (None, Some(port)) => {
                self.offer_to(now, key, port, peer).ok_or(Diagnosis::OUT_OF_MEMORY)
            }
        };
        self.answer_server(now, key, answer);
    }

    /// Accept or Decline.
    fn answer_server(&mut self, now: Instant, key: Key, answer: Result<Offer, Diagnosis>) {
        let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key) else { return };
        let Talk::Pending(server, _) = &mut shaking.talk else { return };
        match answer {
            Ok(ours) => {
                // It may have waited for others; what follows is its own.
                shaking.deadline = now + self.config.smc.handshake_timeout;
                server.provide(now, ours);
            }
            Err(diagnosis) => {
                server.refuse(diagnosis);
                self.fallback_reasons.insert(key, diagnosis);
            }
        }
        shaking.talk = Talk::Server(server.clone());
        self.advance(now, key);
    }

    /// Why a Proposal cannot be accepted, if it cannot.
    fn objection(&self, port: Option<PortId>, proposal: &Proposal) -> Option<Diagnosis> {
        let Some(port) = port else { return Some(Diagnosis::NO_SMC_R_DEVICE) };
        if !proposal.offers_smc_r_v1 {
            return Some(Diagnosis::MODE_MISMATCH);
        }
        if proposal.subnet != self.ports[port.0].subnet {
            return Some(Diagnosis::NO_COMMON_SUBNET);
        }
        self.is_too_busy().then_some(Diagnosis::OUT_OF_MEMORY)
    }

    /// Whether new connections stay TCP although their peers have SMC-R.
    fn is_too_busy(&self) -> bool {
        self.draining.is_some() || self.shaking > self.config.limits.handshakes_max as usize
    }

    /// An element in the group that we share with `peer`, or in a new one.
    fn offer_to(&mut self, now: Instant, key: Key, port: PortId, peer: Peer) -> Option<Offer> {
        let shared = self.groups.iter().find(|(_, group)| {
            group.role == Role::Server
                && group.port == port
                && group.peer == peer
                && group.is_established()
        });
        if let Some(group) = shared.map(|(id, _)| *id) {
            return self.reserve(now, key, port, group, false);
        }
        let group = self.open_group(now, port, Role::Server, peer, key).ok()?;
        let ours = self.reserve(now, key, port, group, true);
        if ours.is_none() {
            self.give_up_group(now, key, group);
        }
        ours
    }

    /// First contact: the client's queue pair is known now.
    fn connect_link(&mut self, now: Instant, key: Key, offer: &Offer) {
        self.learn_peer(key, *offer);
        let Some(group) = self.group_of_session(key) else { return };
        if self.connect_group(now, group, offer).is_err() {
            // Before CONFIRM LINK nothing is decided yet: the connection can stay TCP (C.2).
            self.handshakes_failed += 1;
            self.decline_first(now, key, Diagnosis::QUEUE_PAIR_NOT_READY);
        }
    }

    // --- Both sides ---

    /// Takes an element and a slot for a rendezvous, and makes the offer that names them.
    fn reserve(
        &mut self,
        now: Instant,
        key: Key,
        port: PortId,
        group: GroupId,
        first_contact: bool,
    ) -> Option<Offer> {
        let connection = self.ports[port.0].poller.take_slot()?;
        let Ok(element) = self.take_element(now, group) else {
            self.ports[port.0].poller.free_slot(connection);
            self.log_limit_of(key, "memory for SMC-R: new connections stay TCP");
            return None;
        };
        // From the moment the peer knows the token, its messages may come.
        self.ports[port.0].poller.command(Command::Expect { connection });
        let address = self.groups[&group].address;
        let ours = Offer {
            first_contact,
            peer_id: self.peer_id,
            gid: address.gid,
            mac: address.mac,
            qpn: address.qpn,
            rkey: element.rkey,
            rmbe_index: element.rmbe.index(),
            alert_token: connection.token(),
            rmbe_size: element.rmbe.size(),
            mtu: address.mtu,
            rmb_address: element.rmb_address,
            psn: address.psn,
        };
        if let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key) {
            shaking.resources = Some(Resources {
                port,
                group,
                connection,
                rmbe: Some(element.rmbe),
                peer: None,
                expected: true,
            });
        }
        Some(ours)
    }

    fn learn_peer(&mut self, key: Key, offer: Offer) {
        if let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key)
            && let Some(resources) = &mut shaking.resources
        {
            resources.peer = Some(offer);
            let group = resources.group;
            self.learn_rkey(group, &offer);
        }
    }

    /// The first contact of this rendezvous succeeded.
    pub(crate) fn link_confirmed(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key) else { return };
        match &mut shaking.talk {
            Talk::Client(client) => client.link_confirmed(),
            Talk::Server(server) => server.link_confirmed(),
            Talk::Plain(_) | Talk::Connecting | Talk::Pending(..) => return,
        }
        self.advance(now, key);
    }

    /// The first contact of this rendezvous failed.
    pub(crate) fn link_failed(&mut self, now: Instant, key: Key, committed: bool) {
        let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key) else { return };
        let result = match &mut shaking.talk {
            Talk::Client(client) => client.link_failed(now, committed),
            Talk::Server(server) => server.link_failed(now, committed),
            Talk::Plain(_) | Talk::Connecting | Talk::Pending(..) => return,
        };
        match result {
            Ok(()) => self.advance(now, key),
            Err(error) => self.handshake_failed(now, key, error),
        }
    }

    /// The handshake ended in an error: falls back, or closes.
    fn handshake_failed(&mut self, now: Instant, key: Key, error: HandshakeError) {
        tracing::debug!(session = key.index, ?error, "the rendezvous failed");
        if let HandshakeError::Declined { diagnosis, out_of_sync } = error {
            if out_of_sync && let Some(group) = self.group_of_session(key) {
                self.shut_group_down(
                    now,
                    group,
                    smcr_proto::wire::llc::DeleteReason::PROTOCOL_VIOLATION,
                );
            }
            self.fallback_reasons.insert(key, diagnosis);
        } else {
            self.handshakes_failed += 1;
        }
        match error.verdict() {
            Verdict::Close => self.fail(key, "the rendezvous failed"),
            Verdict::FallBack(None) => self.relay_tcp(now, key, None),
            Verdict::FallBack(Some(diagnosis)) => self.decline_first(now, key, diagnosis),
        }
    }

    /// Writes a message to the peer. Returns whether the rendezvous goes on.
    fn say(&mut self, key: Key, frame: &Frame) -> bool {
        let Some(Session::Shaking(shaking)) = self.sessions.get(key) else { return false };
        tracing::trace!(session = key.index, ?frame, "sent");
        let encoded = frame.encode();
        let bytes = encoded.as_bytes();
        // A few dozen bytes always fit an empty send buffer; if not, the connection is no good.
        if send(&shaking.peer, bytes, SendFlags::NOSIGNAL) == Ok(bytes.len()) {
            return true;
        }
        self.fail(key, "a CLC message could not be sent");
        false
    }

    /// The rendezvous succeeded: the poller takes over.
    fn hand_over(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(mut shaking)) = self.sessions.take(key) else { return };
        self.shaking -= 1;
        let resources = shaking.resources.take().expect("what was provided is reserved");
        let offer = resources.peer.expect("what is done was offered from both sides");
        let rmbe = resources.rmbe.expect("an element stays until the poller has it");
        let Some(group) = self.groups.get(&resources.group) else {
            panic!("a group outlives the elements that are out");
        };
        let eye_catcher = match &group.phase {
            Phase::Running(machine, _) => machine.peer_eye_catcher(),
            Phase::Opening(_) | Phase::Ending => false,
        };
        let peer = PeerElement {
            rkey: offer.rkey,
            address: offer.rmbe_address(),
            ring: Ring::of_element(offer.rmbe_size, eye_catcher),
            token: offer.alert_token,
        };
        let established =
            Box::new(Established::Smc { near: shaking.app, link: group.link, rmbe, peer });
        let connection = resources.connection;
        let port = &mut self.ports[resources.port.0];
        port.poller.command(Command::Relay { connection, established });
        port.sessions[usize::from(connection.slot)] = Some(key);
        if matches!(group.phase, Phase::Ending) {
            // The group ended while the last message was on its way.
            port.poller.command(Command::FailConnections { link: group.link });
        }
        self.connections_smc += 1;
        self.sessions.put(
            key,
            Session::Open(Open {
                listener: shaking.listener,
                port: resources.port,
                connection,
                source: shaking.source,
                since: now,
                transport: Carried::Smc { group: resources.group, tcp: shaking.peer },
            }),
        );
    }

    /// The connection stays TCP: the poller relays between the two sockets.
    pub(crate) fn relay_tcp(&mut self, now: Instant, key: Key, reason: Option<Diagnosis>) {
        let reason = self.fallback_reasons.remove(&key).or(reason);
        self.release(now, key);
        let Some((port, connection)) = self.take_slot_for_tcp(key) else {
            self.log_limit_of(key, "room in the pollers: new connections are refused");
            if let Some(Session::Shaking(shaking)) = self.sessions.get(key) {
                self.listeners[usize::from(shaking.listener)].refused += 1;
            }
            self.fail(key, "the pollers serve as many connections as they can");
            return;
        };
        let Some(Session::Shaking(shaking)) = self.sessions.take(key) else { return };
        self.shaking -= 1;
        if let Some(reason) = reason {
            *self.fallbacks.entry(reason).or_default() += 1;
        }
        self.reactor.forget(&shaking.peer);
        self.reactor.forget(&shaking.app);
        let established = Box::new(Established::Tcp {
            near: shaking.app,
            far: shaking.peer,
            from_near: Vec::new(),
            from_far: shaking.framer.leftover().to_vec(),
        });
        let entry = &mut self.ports[port.0];
        entry.poller.command(Command::Relay { connection, established });
        entry.sessions[usize::from(connection.slot)] = Some(key);
        self.connections_tcp += 1;
        self.sessions.put(
            key,
            Session::Open(Open {
                listener: shaking.listener,
                port,
                connection,
                source: shaking.source,
                since: now,
                transport: Carried::Tcp(reason),
            }),
        );
    }

    /// A slot of the poller next to this connection, or of any other: two sockets need no RNIC.
    fn take_slot_for_tcp(&mut self, key: Key) -> Option<(PortId, ConnectionId)> {
        let nearest = self.port_of(key);
        let others = (0..self.ports.len()).map(PortId);
        nearest
            .into_iter()
            .chain(others)
            .find_map(|port| Some((port, self.ports[port.0].poller.take_slot()?)))
    }

    /// The upstream refused: whoever connected to us is told so.
    fn refuse(&mut self, key: Key, error: &io::Error) {
        if let Some(Session::Shaking(shaking)) = self.sessions.get(key) {
            let listener = shaking.listener;
            self.upstream_failed(listener, error);
        }
        self.fail(key, "the upstream refused");
    }

    /// Ends a rendezvous, and resets both of its sockets.
    pub(crate) fn fail(&mut self, key: Key, why: &str) {
        let now = self.clock.now();
        self.release(now, key);
        self.fallback_reasons.remove(&key);
        let Some(Session::Shaking(shaking)) = self.sessions.remove(key) else { return };
        tracing::debug!(session = key.index, source = %shaking.source, why, "rendezvous ended");
        self.shaking -= 1;
        self.listeners[usize::from(shaking.listener)].active -= 1;
        reset(shaking.app);
        reset(shaking.peer);
    }

    /// Gives back what a rendezvous holds.
    fn release(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key) else { return };
        let Some(mut resources) = shaking.resources.take() else { return };
        let group = resources.group;
        let port = &mut self.ports[resources.port.0];
        port.poller.command(Command::Forget { connection: resources.connection });
        port.poller.free_slot(resources.connection);
        if let Some(mut rmbe) = resources.rmbe.take() {
            // The peer may have believed that the rendezvous had succeeded, and written.
            rmbe.touch(rmbe.capacity());
            self.give_back_element(now, group, rmbe);
        }
        self.give_up_group(now, key, group);
    }

    /// Looks after everything that waits.
    pub(crate) fn expire_rendezvous(&mut self, now: Instant) {
        let sessions = &self.sessions;
        self.shaking_keys.retain(|key| matches!(sessions.get(*key), Some(Session::Shaking(_))));
        for key in self.shaking_keys.clone() {
            let Some(Session::Shaking(shaking)) = self.sessions.get_mut(key) else { continue };
            if shaking.deadline <= now {
                self.rendezvous_timed_out(now, key);
                continue;
            }
            let result = match &mut shaking.talk {
                Talk::Client(client) => client.handle_timeout(now),
                Talk::Server(server) | Talk::Pending(server, _) => server.handle_timeout(now),
                Talk::Plain(_) | Talk::Connecting => Ok(()),
            };
            match result {
                Ok(()) => self.advance(now, key),
                Err(error) => self.handshake_failed(now, key, error),
            }
        }
    }

    /// All the time of a rendezvous has passed.
    fn rendezvous_timed_out(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.get(key) else { return };
        if !shaking.connected {
            self.refuse(key, &io::ErrorKind::TimedOut.into());
        } else if matches!(shaking.talk, Talk::Pending(..)) {
            // It waited for the first contact of another. The client waits still.
            self.answer_server(now, key, Err(Diagnosis::TIMED_OUT));
        } else {
            self.handshake_failed(now, key, HandshakeError::TimedOut);
        }
    }

    fn group_of_session(&self, key: Key) -> Option<GroupId> {
        match self.sessions.get(key)? {
            Session::Shaking(shaking) => Some(shaking.resources.as_ref()?.group),
            Session::Open(_) => None,
        }
    }
}

/// Reads the next message of the peer.
fn hear(shaking: &mut Rendezvous) -> Heard {
    loop {
        match shaking.framer.next_frame() {
            Ok(Some(frame)) => return Heard::Frame(frame),
            Ok(None) => {}
            Err(malformed) => return Heard::Nonsense(malformed.into()),
        }
        let mut bytes = [0; FRAME_MAX];
        let room = FRAME_MAX - shaking.framer.leftover().len();
        match recv(&shaking.peer, &mut bytes[..room], RecvFlags::empty()) {
            Ok((0, _)) => return Heard::End,
            Ok((len, _)) => {
                let taken = shaking.framer.feed(&bytes[..len]);
                assert_eq!(taken, len, "no more was read than the framer has room for");
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Heard::Silence,
            Err(_) => return Heard::End,
        }
    }
}
