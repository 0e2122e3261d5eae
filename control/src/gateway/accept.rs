//! Accepts connections of applications and of SMC-R peers, and connects to the upstreams.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::Gateway;
use crate::config::Transport;
use crate::listener::{Listener, local_address, peer_address, reset};
use crate::network::Network;
use crate::reactor::Token;
use crate::rendezvous::{Arrival, Surroundings};
use crate::sessions::Negotiating;
use crate::slab::Key;
use crate::smc_option::OptionSource;

impl<N: Rnic> Gateway<N> {
    /// Accepts the connections that wait at listener `index`.
    pub(super) fn accept(&mut self, now: Instant, index: u16) {
        let mut begun = 0;
        for _ in 0..ACCEPT_MAX {
            if begun == BEGIN_MAX {
                return;
            }
            match self.listeners[usize::from(index)].accept() {
                Ok(accepted) => begun += usize::from(self.accepted(now, index, accepted)),
                Err(Errno::MFILE | Errno::NFILE) => {
                    if !self.refuse_for_want_of_descriptors(now, index) {
                        return;
                    }
                }
                // No connection is left, or one was reset while it waited.
                Err(_) => return,
            }
        }
    }

    /// The process has no descriptor left: resets a connection that waits at a listener, which
    /// would otherwise wait for ever. Returns whether there was one.
    fn refuse_for_want_of_descriptors(&mut self, now: Instant, index: u16) -> bool {
        let listener = &mut self.listeners[usize::from(index)];
        let found = self.overload.with_spare(|| listener.accept().map(reset).is_ok());
        if found {
            listener.refused += 1;
            self.log_limit(now, index, OUT_OF_DESCRIPTORS);
        }
        found
    }

    /// Takes in a connection that was accepted, unless there are too many. Returns whether work was
    /// started for it, beyond putting it into a queue.
    fn accepted(&mut self, now: Instant, index: u16, accepted: OwnedFd) -> bool {
        let listener = &mut self.listeners[usize::from(index)];
        listener.accepted += 1;
        if listener.active >= listener.config.connections_max
            || self.sessions.len() >= self.config.limits.connections_max as usize
        {
            listener.refused += 1;
            reset(accepted);
            self.log_limit(now, index, "connections: new ones are refused");
            return false;
        }
        // A client that has gone already has no address.
        let Some(source) = peer_address(&accepted) else { return false };
        if listener.is_full_for(source.ip()) {
            listener.refused += 1;
            reset(accepted);
            self.log_limit(now, index, "connections of one source: its new ones are refused");
            return false;
        }
        listener.enter(source.ip());
        let negotiating = Negotiating {
            listener: index,
            accepts: listener.config.accept,
            source,
            accepted,
            upstream: None,
            connected: false,
            hears: false,
        };
        let surroundings = match negotiating.accepts {
            Transport::Smc => survey(&self.option, &mut self.network, listener, &negotiating),
            Transport::Tcp => Surroundings::default(),
        };
        let key = self.sessions.insert(negotiating);
        self.endpoint.arrived(now, key, Arrival { listener: index, source }, surroundings);
        self.settle(now);
        self.sessions.negotiating_mut(key).is_none_or(|one| one.upstream.is_some())
    }

    /// Begins to connect a session to its upstream.
    pub(super) fn connect(&mut self, now: Instant, key: Key, offer: bool, hear: bool) {
        let one = self.sessions.negotiating_mut(key).expect("its rendezvous has just begun");
        let index = one.listener;
        let listener = &self.listeners[usize::from(index)];
        match listener.connect(&self.option, offer) {
            Ok((socket, connected)) => {
                one.upstream = Some(socket);
                one.hears = hear;
                if self.watch(key, connected).is_err() {
                    tracing::debug!(session = key.index, "no room to watch its sockets");
                    self.endpoint.abort(key);
                } else if connected {
                    self.connected(now, key);
                }
            }
            Err(error) => {
                self.upstream_failed(index, &error);
                if matches!(Errno::from_io_error(&error), Some(Errno::MFILE | Errno::NFILE)) {
                    self.log_limit(now, index, OUT_OF_DESCRIPTORS);
                }
                self.endpoint.refused(key);
            }
        }
    }

    /// Registers the sockets of a session for the events that its rendezvous waits for first.
    fn watch(&mut self, key: Key, connected: bool) -> io::Result<()> {
        let one = self.sessions.negotiating_mut(key).expect("its rendezvous has just begun");
        let upstream = one.upstream.as_ref().expect("we have just begun to connect");
        let reactor = &self.reactor;
        match (one.accepts, one.hears) {
            // The same socket reports the end of the connect and the peer's messages.
            (Transport::Tcp, true) => reactor.watch_edges(upstream, Token::Peer(key)),
            (Transport::Tcp | Transport::Smc, hears) => {
                if !connected {
                    reactor.watch_connect(upstream, Token::Application(key))?;
                }
                if hears { reactor.watch_edges(&one.accepted, Token::Peer(key)) } else { Ok(()) }
            }
        }
    }

    /// The upstream of a session has accepted.
    pub(super) fn connected(&mut self, now: Instant, key: Key) {
        let one = self.sessions.negotiating_mut(key).expect("it was there just now");
        one.connected = true;
        // Where the peer connected to us, we surveyed the connection when we accepted it, and with
        // the Proposal. If that has waited for the upstream, the network may have changed since.
        if one.accepts == Transport::Tcp || !self.endpoint.awaits_proposal(key) {
            self.survey_again(key);
        }
        self.endpoint.connected(now, key);
    }

    /// Tells the rendezvous of a session what is known of the connection to its peer now.
    pub(super) fn survey_again(&mut self, key: Key) {
        let one = self.sessions.negotiating_mut(key).expect("it was there just now");
        let listener = &self.listeners[usize::from(one.listener)];
        let surroundings = survey(&self.option, &mut self.network, listener, one);
        self.endpoint.surveyed(key, surroundings);
    }

    /// The upstream of listener `index` refused, or did not answer.
    pub(super) fn upstream_failed(&mut self, index: u16, error: &io::Error) {
        let listener = &mut self.listeners[usize::from(index)];
        listener.refused += 1;
        tracing::debug!(
            listener = listener.config.name,
            upstream = %listener.upstream,
            %error,
            "upstream did not accept; the application is reset"
        );
    }

    /// Logs what has run out, and the consequence for new connections of listener `index`.
    pub(super) fn log_limit(&mut self, now: Instant, index: u16, what: &str) {
        self.overload.log(now, &self.listeners[usize::from(index)].config.name, what);
    }
}

/// What is known of the connection between a session and its peer.
fn survey(
    option: &OptionSource,
    network: &mut Network,
    listener: &Listener,
    one: &Negotiating,
) -> Surroundings {
    let ends = one.peer().and_then(|peer| Some((peer, local_address(peer)?)));
    // A socket without an address is broken; the next read or write will report that.
    let Some((peer, local)) = ends else { return Surroundings::default() };
    let port = network.ports_for(local.ip()).first().copied();
    let mut surroundings = Surroundings { port, ..Surroundings::default() };
    let far = match (one.accepts, listener.config.connect) {
        (Transport::Smc, _) => {
            surroundings.networks = network.networks(local.ip());
            one.source
        }
        (Transport::Tcp, Transport::Smc) => {
            surroundings.subnets = network.subnets(local.ip());
            listener.upstream
        }
        (Transport::Tcp, Transport::Tcp) => return surroundings,
    };
    surroundings.offered = option.peer_offered(peer, far);
    if surroundings.offered
        && let Some(far) = peer_address(peer)
    {
        let [local, far] = [local, far].map(|end| (end.ip(), Some(end.port())));
        surroundings.protected = network.policies.protect(local, far);
    }
    surroundings
}

const OUT_OF_DESCRIPTORS: &str = "file descriptors: new connections are refused";
/// How many connections are accepted in a row before the control thread does something else.
const ACCEPT_MAX: usize = 1_024;
/// How many of them may be started at once; queueing one costs less and is not counted.
const BEGIN_MAX: usize = 64;
