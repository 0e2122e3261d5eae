//! How a rendezvous ends: SMC-R, TCP, or not at all; and what is given back.

use std::io;

use smcr_engine::handoff::PeerElement;
use smcr_engine::{Command, ConnectionId, Established};
use smcr_proto::Instant;
use smcr_proto::ring::Ring;
use smcr_proto::wire::clc::Diagnosis;
use smcr_rnic::Rnic;

use crate::gateway::Gateway;
use crate::groups::Phase;
use crate::listener::reset;
use crate::reactor::Key;
use crate::sessions::{Carried, Open, PortId, Session};

impl<N: Rnic> Gateway<N> {
    /// The rendezvous succeeded: the poller takes over.
    pub(super) fn hand_over(&mut self, now: Instant, key: Key) {
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
        // RFC 7609 2.1-1
        let peer = PeerElement {
            rkey: offer.rkey,
            address: offer.rmbe_address(),
            // RFC 7609 2.1-11
            ring: Ring::of_element(offer.rmbe_size, eye_catcher),
            token: offer.alert_token,
        };
        // RFC 7609 3-4
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
            if let Some(Session::Shaking(shaking)) = self.sessions.at(key) {
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
    pub(super) fn take_slot_for_tcp(&mut self, key: Key) -> Option<(PortId, ConnectionId)> {
        let nearest = self.port_of(key);
        let others = (0..self.ports.len()).map(PortId);
        nearest
            .into_iter()
            .chain(others)
            .find_map(|port| Some((port, self.ports[port.0].poller.take_slot()?)))
    }

    /// The upstream refused: whoever connected to us is told so.
    pub(super) fn refuse(&mut self, key: Key, error: &io::Error) {
        if let Some(Session::Shaking(shaking)) = self.sessions.at(key) {
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
    pub(super) fn release(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
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
        // RFC 7609 3.5.1.6.4-4
        self.give_up_group(now, key, group);
    }
}
