//! How a rendezvous ends: SMC-R, TCP, or not at all; and what is given back.

use std::io;
use std::net::IpAddr;

use smcr_engine::{Command, ConnectionId, Established};
use smcr_proto::Instant;
use smcr_proto::wire::clc::Diagnosis;
use smcr_rnic::Rnic;

use crate::config::{Peers, Transport};
use crate::gateway::Gateway;
use crate::groups::{Pollers, PortId};
use crate::listener::reset;
use crate::places::Place;
use crate::reactor::Key;
use crate::sessions::{Carried, Open, Rendezvous, Session};

impl<N: Rnic> Gateway<N> {
    /// Where the peer's end of the TCP connection of a rendezvous is.
    pub(super) fn peer_address(&self, key: Key) -> IpAddr {
        let Some(Session::Shaking(shaking)) = self.sessions.at(key) else {
            panic!("asked of a rendezvous that is going on");
        };
        let listener = &self.listeners[usize::from(shaking.listener)];
        let address = match listener.config.accept {
            Transport::Smc => shaking.source,
            Transport::Tcp => listener.upstream,
        };
        address.ip().to_canonical()
    }

    /// Who may be the peer of a rendezvous.
    pub(super) fn peers_of(&self, key: Key) -> &Peers {
        let Some(Session::Shaking(shaking)) = self.sessions.at(key) else {
            panic!("asked of a rendezvous that is going on");
        };
        &self.listeners[usize::from(shaking.listener)].config.peers
    }

    /// The rendezvous succeeded: the poller takes over.
    // RFC 7609 3.5.2.4-1
    pub(super) fn hand_over(&mut self, now: Instant, key: Key) {
        self.end_trial(now, key);
        let Some(Session::Shaking(mut shaking)) = self.sessions.take(key) else { return };
        self.leave_place(key, &shaking);
        let resources = shaking.resources.take().expect("what was provided is reserved");
        let connection = resources.connection;
        self.session_of[usize::from(connection.slot)] = Some(key);
        self.groups.hand_over(connection, shaking.app, resources.rmbe);
        if shaking.conversation.has_ended() {
            self.suspects.push_back((now, key));
        }
        self.connections_smc += 1;
        self.sessions.put(
            key,
            Session::Open(Open {
                listener: shaking.listener,
                connection,
                source: shaking.source,
                since: now,
                moved: (0, now),
                transport: Carried::Smc {
                    group: resources.group,
                    tcp: shaking.peer,
                    ended: shaking.conversation.has_ended(),
                },
            }),
        );
    }

    /// The connection stays TCP: the poller relays between the two sockets.
    pub(crate) fn relay_tcp(&mut self, now: Instant, key: Key, reason: Option<Diagnosis>) {
        let reason = self.fallback_reasons.remove(&key).or(reason);
        self.end_trial(now, key);
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
        self.leave_place(key, &shaking);
        if let Some(reason) = reason {
            self.count_fallback(reason);
        }
        self.reactor.forget(&shaking.peer);
        self.reactor.forget(&shaking.app);
        let established = Box::new(Established::Tcp {
            near: shaking.app,
            far: shaking.peer,
            from_near: Vec::new(),
            from_far: shaking.conversation.leftover().to_vec(),
            declined: shaking.conversation.has_declined(),
        });
        self.groups.pollers_mut().command(port, Command::Relay { connection, established });
        self.session_of[usize::from(connection.slot)] = Some(key);
        self.connections_tcp += 1;
        self.sessions.put(
            key,
            Session::Open(Open {
                listener: shaking.listener,
                connection,
                source: shaking.source,
                since: now,
                moved: (0, now),
                transport: Carried::Tcp { port, reason },
            }),
        );
    }

    /// Counts a connection that stayed TCP. Peers may say whatever they like: of codes without a
    /// name only so many are told apart.
    fn count_fallback(&mut self, reason: Diagnosis) {
        let unnamed = || self.fallbacks.keys().filter(|code| code.name().is_none()).count();
        let told_apart = reason.name().is_some()
            || self.fallbacks.contains_key(&reason)
            || unnamed() < UNNAMED_REASONS_MAX;
        let reason = if told_apart { reason } else { Diagnosis::PEER_DECLINED };
        *self.fallbacks.entry(reason).or_default() += 1;
    }

    /// A slot, and the poller next to this connection: two sockets need no RNIC, so any does.
    pub(super) fn take_slot_for_tcp(&mut self, key: Key) -> Option<(PortId, ConnectionId)> {
        let port = self.port_of(key).unwrap_or(PortId(0));
        Some((port, self.groups.slots_mut().take()?))
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
        self.end_trial(now, key);
        self.release(now, key);
        self.fallback_reasons.remove(&key);
        let Some(Session::Shaking(shaking)) = self.sessions.remove(key) else { return };
        tracing::debug!(session = key.index, source = %shaking.source, why, "rendezvous ended");
        self.leave_place(key, &shaking);
        self.listeners[usize::from(shaking.listener)].leave(shaking.source.ip());
        reset(shaking.app);
        reset(shaking.peer);
    }

    /// This rendezvous is over: another may have its place.
    fn leave_place(&mut self, key: Key, shaking: &Rendezvous) {
        self.shaking -= 1;
        if shaking.silent {
            self.silent.leave(shaking.source.ip(), key);
        }
        if shaking.place == Place::Taken {
            self.places.leave(shaking.listener);
        }
    }

    /// Gives back what a rendezvous holds of a link group.
    pub(super) fn release(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        let Some(resources) = shaking.resources.take() else { return };
        self.groups.leave(now, resources.connection, resources.rmbe);
        // RFC 7609 3.5.1.6.4-4
        self.give_up_founding(now, key, resources.group);
    }
}

/// Codes without a name that are counted each by itself: more than any peer has that means them.
pub(crate) const UNNAMED_REASONS_MAX: usize = 32;
