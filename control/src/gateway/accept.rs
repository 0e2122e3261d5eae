//! Accepts connections of applications and of SMC-R peers, and connects to the upstreams.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use smcr_proto::Instant;
use smcr_proto::wire::clc::Diagnosis;
use smcr_rnic::Rnic;

use super::Gateway;
use super::reload::number;
use crate::admission::{Caller, Standing};
use crate::config::{Cidr, Protocol, SourceAddress, comes_back};
use crate::listener::{Listener, local_address, peer_address, reset};
use crate::network::Network;
use crate::proxy_header;
use crate::reactor::Token;
use crate::rendezvous::{Arrival, Surroundings};
use crate::sessions::{Negotiating, Next};
use crate::slab::Key;
use crate::smc_option::OptionSource;
use crate::termination::Termination;

impl<N: Rnic> Gateway<N> {
    /// Accepts connections that wait at listener `index`, and puts them in its queue. Returns
    /// whether more may wait.
    ///
    /// Whoever finds the backlog of a listener full comes back a second later, or three. To accept
    /// takes little time, compared to what follows, so that comes first: of a crowd of 9,000, a
    /// third came twice.
    pub(super) fn accept(&mut self, now: Instant, index: u16) -> bool {
        // Where there is no room, some are accepted all the same, to be refused.
        for _ in 0..self.room_for_arrivals().clamp(BEGIN_MAX, ACCEPT_MAX) {
            let listener = &mut self.listeners[usize::from(index)];
            match listener.accept() {
                Ok(accepted) => {
                    listener.accepted += 1;
                    listener.arrived.push_back(accepted);
                }
                // Those that have arrived come first.
                Err(Errno::MFILE | Errno::NFILE) if self.arrived() > 0 => return true,
                Err(Errno::MFILE | Errno::NFILE) => {
                    if !self.refuse_for_want_of_descriptors(now, index) {
                        return false;
                    }
                }
                // One was reset while it waited.
                Err(Errno::CONNABORTED) => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// How many more may wait in the queues of listeners, so that all can begin, and others go on:
    /// most connections have two descriptors.
    fn room_for_arrivals(&self) -> usize {
        let by_descriptors = (self.descriptors / 2).saturating_sub(self.sessions.len());
        self.free().min(by_descriptors).saturating_sub(self.arrived())
    }

    /// Begins some of the connections that wait in the queue of each listener.
    pub(super) fn begin_arrived(&mut self) {
        for slot in 0..self.listeners.len() {
            self.begin_some(slot);
        }
    }

    /// Begins some of the connections that wait in the queue of a listener. Returns whether others
    /// wait there still.
    pub(super) fn begin_some(&mut self, slot: usize) -> bool {
        let mut begun = 0;
        for _ in 0..ACCEPT_MAX {
            let Some(accepted) = self.listeners[slot].arrived.pop_front() else { return false };
            // Each has a time of its own, as events have.
            let now = self.clock.now();
            begun += usize::from(self.accepted(now, number(slot), accepted));
            if begun == BEGIN_MAX {
                break;
            }
        }
        !self.listeners[slot].arrived.is_empty()
    }

    /// How many connections wait in the queues of listeners.
    pub(super) fn arrived(&self) -> usize {
        self.listeners.iter().map(|one| one.arrived.len()).sum()
    }

    /// The gateway stops: resets connections that wait in the queues of listeners.
    pub(super) fn turn_arrived_away(&mut self, now: Instant) {
        for slot in 0..self.listeners.len() {
            for accepted in std::mem::take(&mut self.listeners[slot].arrived) {
                let from = peer_address(&accepted);
                reset(accepted);
                self.turned_away(now, number(slot), from, Termination::Stopped);
            }
        }
    }

    /// The process has no descriptor left: resets a connection that waits at a listener, which
    /// would otherwise wait for ever. Returns whether there was one.
    fn refuse_for_want_of_descriptors(&mut self, now: Instant, index: u16) -> bool {
        let listener = &self.listeners[usize::from(index)];
        let found = self.overload.with_spare(|| {
            let accepted = listener.accept().ok()?;
            let source = peer_address(&accepted);
            reset(accepted);
            Some(source)
        });
        let Some(source) = found else { return false };
        self.turned_away(now, index, source, Termination::Limit);
        self.log_limit(now, index, OUT_OF_DESCRIPTORS);
        true
    }

    /// Takes in a connection that was accepted, unless there are too many. Returns whether work was
    /// started for it, beyond putting it into a queue.
    fn accepted(&mut self, now: Instant, index: u16, accepted: OwnedFd) -> bool {
        // A client that has gone already has no address.
        let Some(from) = peer_address(&accepted) else {
            self.note_turned_away(now, index, None, Termination::Gone);
            return false;
        };
        if !self.has_room(now, from.ip()) {
            reset(accepted);
            self.turned_away(now, index, Some(from), Termination::Limit);
            self.log_limit(now, index, "connections of the process: new ones are refused");
            return false;
        }
        let listener = &self.listeners[usize::from(index)];
        let is_proxy = |network: &Cidr| network.contains(from.ip());
        if listener.config.proxy_from.iter().any(is_proxy) {
            return self.await_header(now, index, (accepted, from));
        }
        self.admit(now, index, Caller { accepted, from, source: from, wanted: None })
    }

    /// Lets a connection in. Returns whether work was started for it, beyond putting it into a
    /// queue.
    pub(super) fn let_in(
        &mut self,
        now: Instant,
        index: u16,
        caller: Caller,
        standing: Standing,
    ) -> bool {
        let target = self.target_of(now, index, &caller.accepted, caller.source);
        let Caller { accepted, from, source, wanted } = caller;
        let listener = &mut self.listeners[usize::from(index)];
        let target = match target {
            Ok(target) => target,
            Err((why, end)) => {
                let name = &listener.config.name;
                tracing::debug!(listener = name, source = %from, why, "a connection is reset");
                reset(accepted);
                self.turned_away(now, index, Some(source), end);
                return false;
            }
        };
        let wanted = wanted.or(listener.pool.is_original_dst().then_some(target));
        listener.pool.enter(target);
        if standing == Standing::Within {
            listener.admission.spend(now, &listener.config.bounds, source.ip());
        }
        listener.admission.enter(source.ip(), standing);
        listener.suit(&accepted, from.ip());
        let accepts = listener.config.accept;
        let stays = match standing {
            Standing::Within => self.speeds.choose(now, listener, target),
            Standing::Over => Some(Diagnosis::OVER_LIMIT),
        };
        if stays.is_none()
            && let Some(kept) = self.kept_to(now, index, target)
        {
            self.go_on(now, kept, accepted, Next { standing, source, original: wanted });
            return true;
        }
        let mut arrival = Arrival { stays, ..Arrival::new(index, source, target.ip()) };
        let mut local = None;
        if accepts == Protocol::Smc {
            local = local_address(&accepted);
            arrival.offered = self.option.peer_offered(&accepted, source);
            arrival.port = local.and_then(|local| self.network.port_for(local.ip()));
            if let (true, None, Some(local)) = (arrival.offered, arrival.port, local) {
                self.found_none(local.ip(), source.ip());
            }
        }
        let ends = (source, target);
        let one = Negotiating::new(now, (index, accepts), ends, accepted);
        let key = self.sessions.insert(Negotiating { standing, wanted, local, ..one });
        self.endpoint.arrived(now, key, arrival);
        self.settle(now);
        self.sessions.negotiating_mut(key).is_none_or(|one| one.upstream.is_some())
    }

    /// Where a connection goes.
    ///
    /// # Errors
    ///
    /// Why it goes nowhere.
    fn target_of(
        &mut self,
        now: Instant,
        index: u16,
        accepted: &OwnedFd,
        source: SocketAddr,
    ) -> Result<SocketAddr, (&'static str, Termination)> {
        let listener = &self.listeners[usize::from(index)];
        let (Some(intercept), true) = (&listener.config.intercept, listener.pool.is_original_dst())
        else {
            return self.chosen(now, index, source);
        };
        let own = (index, &listener.config);
        let original = self.interception.original_of(own, intercept.way, accepted);
        self.not_back(index, original.ok_or((NOT_INTERCEPTED, Termination::NotIntercepted))?)
    }

    /// Where a connection of `source` goes if nobody but the operator has a say in it.
    ///
    /// # Errors
    ///
    /// Why it goes nowhere.
    pub(super) fn chosen(
        &mut self,
        now: Instant,
        index: u16,
        source: SocketAddr,
    ) -> Result<SocketAddr, (&'static str, Termination)> {
        let chosen = self.listeners[usize::from(index)].pool.choose(now, source.ip(), &[]);
        self.not_back(index, chosen.map_err(|why| (why.name(), why.into()))?)
    }

    /// Refuses a target that leads back to the listener.
    fn not_back(
        &self,
        index: u16,
        target: SocketAddr,
    ) -> Result<SocketAddr, (&'static str, Termination)> {
        let bind = self.listeners[usize::from(index)].config.bind;
        // What names mean, and the addresses of this host, may change.
        match comes_back(bind, target, |address| self.network.is_here(address)) {
            false => Ok(target),
            true => Err((COMES_BACK, Termination::NoUpstream)),
        }
    }

    /// Begins to connect a session to its upstream.
    pub(super) fn connect(&mut self, now: Instant, key: Key, offer: bool, hear: bool) {
        let one = self.sessions.negotiating_mut(key).expect("its rendezvous has just begun");
        let index = one.listener;
        if self.is_local(index) {
            return self.connect_local(now, key, hear);
        }
        let one = self.sessions.negotiating_mut(key).expect("it was there just now");
        let listener = &self.listeners[usize::from(index)];
        let ends = (one.source, one.target);
        let mut left_alone = Vec::new();
        let announce = |from| {
            // Another port is tried, or the same one again, which must stay left alone.
            left_alone.clear();
            left_alone = self.interception.speaking_for(from, ends.1);
        };
        match listener.connect(ends, &self.option, offer, announce) {
            Ok((socket, connected)) => {
                (one.upstream, one.left_alone) = (Some(socket), left_alone);
                // Where another upstream was tried before, the peer is heard already.
                let hears_already = std::mem::replace(&mut one.hears, hear);
                if self.watch(key, connected, hears_already).is_err() {
                    tracing::debug!(session = key.index, "no room to watch its sockets");
                    self.endpoint.abort(key);
                } else if connected {
                    self.connected(now, key);
                }
            }
            Err(error) => {
                if matches!(Errno::from_io_error(&error), Some(Errno::MFILE | Errno::NFILE)) {
                    self.log_limit(now, index, OUT_OF_DESCRIPTORS);
                }
                self.not_accepted(now, key, &error);
            }
        }
    }

    /// Registers the sockets of a session for the events that its rendezvous waits for first.
    pub(super) fn watch(
        &mut self,
        key: Key,
        connected: bool,
        hears_already: bool,
    ) -> io::Result<()> {
        let one = self.sessions.negotiating_mut(key).expect("its rendezvous has just begun");
        let upstream = one.upstream.as_ref().expect("we have just begun to connect");
        let reactor = &self.reactor;
        match (one.accepts, one.hears) {
            // The same socket reports the end of the connect and the peer's messages.
            (Protocol::Tcp, true) => reactor.watch_edges(upstream, Token::Peer(key)),
            (Protocol::Tcp | Protocol::Smc, hears) => {
                if !connected {
                    reactor.watch_connect(upstream, Token::Application(key))?;
                }
                match hears && !hears_already {
                    true => reactor.watch_edges(&one.accepted, Token::Peer(key)),
                    false => Ok(()),
                }
            }
        }
    }

    /// The upstream of a session has accepted.
    pub(super) fn connected(&mut self, now: Instant, key: Key) {
        let one = self.sessions.negotiating_mut(key).expect("it was there just now");
        one.connected = true;
        let listener = &mut self.listeners[usize::from(one.listener)];
        match introduce(listener, one) {
            Ok(()) => {
                listener.pool.succeeded(one.target);
                self.endpoint.connected(now, key);
            }
            Err(error) => self.not_accepted(now, key, &error),
        }
    }

    /// Tells the rendezvous of a session what there is around the connection to its peer now.
    pub(super) fn survey(&mut self, key: Key) {
        let one = self.sessions.negotiating_mut(key).expect("its rendezvous goes on");
        // It is the same for as long as the connection lasts.
        one.local = one.local.or_else(|| one.peer().and_then(local_address));
        let (index, own, target) = (one.listener, one.local, one.target);
        // An address that is not ours belongs to no device: the route says which one is used.
        let is_foreign = own.is_some_and(|own| self.is_foreign(index, own.ip()));
        let one = self.sessions.negotiating_mut(key).expect("its rendezvous goes on");
        let listener = &self.listeners[usize::from(index)];
        let surroundings = match (one.accepts, listener.config.connect) {
            (Protocol::Smc, _) => at_server(&mut self.network, one, is_foreign),
            (Protocol::Tcp, Protocol::Smc) => {
                let is_foreign = is_foreign || listener.config.source == SourceAddress::Client;
                at_client(&mut self.network, &self.option, one, is_foreign)
            }
            (Protocol::Tcp, Protocol::Tcp) => at_relay(&self.network, one),
        };
        // A socket without an address is broken; the next read or write will report that.
        let surroundings = surroundings.unwrap_or_default();
        if let (true, None, Some(own)) = (surroundings.offered, surroundings.port, own) {
            self.found_none(own.ip(), target.ip());
        }
        self.endpoint.surveyed(key, surroundings);
    }

    /// A connection of an SMC-R peer has found no RNIC. Its own address may be that of another host
    /// in whose name it speaks: then the way to the other end says which device was missing one.
    fn found_none(&mut self, own: IpAddr, other_end: IpAddr) {
        let at =
            if self.network.is_here(own) { Some(own) } else { self.network.towards(other_end) };
        at.into_iter().for_each(|at| self.missing.found_none(at));
    }

    /// Logs what has run out, and the consequence for new connections of listener `index`.
    pub(super) fn log_limit(&mut self, now: Instant, index: u16, what: &str) {
        self.overload.log(now, &self.listeners[usize::from(index)].config.name, what);
    }
}

/// Tells the server that `one` has reached who its client is, if that is wished for.
fn introduce(listener: &Listener, one: &Negotiating) -> io::Result<()> {
    // Where the client wanted to go: the target if it was intercepted, else here.
    let here = || local_address(&one.accepted).unwrap_or(one.target);
    let wanted = || one.wanted.unwrap_or_else(here);
    let Some(header) = proxy_header::header(listener.config.source, one.source, wanted) else {
        return Ok(());
    };
    let upstream = one.upstream.as_ref().expect("it has just been connected");
    // So few bytes always fit an empty send buffer.
    if send(upstream, &header, SendFlags::NOSIGNAL)? == header.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

/// What there is around the connection that a client of SMC-R made to us.
fn at_server(network: &mut Network, one: &Negotiating, is_foreign: bool) -> Option<Surroundings> {
    let local = one.local?;
    let at = if is_foreign { network.towards(one.source.ip())? } else { local.ip() };
    Some(Surroundings {
        port: network.port_for(at),
        networks: network.networks(at),
        protected: network.policies.protect(local, one.source),
        ..Surroundings::default()
    })
}

/// What there is around our connection to a server.
fn at_client(
    network: &mut Network,
    option: &OptionSource,
    one: &mut Negotiating,
    is_foreign: bool,
) -> Option<Surroundings> {
    let server = one.target;
    // What it answered to our SYN does not change. Each question is a system call.
    let offered = match one.offered {
        Some(offered) => offered,
        None => *one.offered.insert(option.peer_offered(one.peer()?, server)),
    };
    let at = one.local.and_then(|local| {
        let at = if is_foreign { network.towards(server.ip())? } else { local.ip() };
        Some((local, at))
    });
    let Some((local, at)) = at else {
        // It awaits a CLC message all the same. Whether it is protected cannot be known.
        return Some(Surroundings { offered, protected: offered, ..Surroundings::default() });
    };
    Some(Surroundings {
        offered,
        port: network.port_for(at),
        subnets: network.subnets(at),
        // Without an offer there will be no SMC-R that could pass by the protection.
        protected: offered && network.policies.protect(local, server),
        ..Surroundings::default()
    })
}

/// What there is around a connection that is relayed without SMC-R.
fn at_relay(network: &Network, one: &Negotiating) -> Option<Surroundings> {
    let local = one.local?;
    Some(Surroundings { port: network.port_for(local.ip()), ..Surroundings::default() })
}

const NOT_INTERCEPTED: &str = "was not intercepted, so nobody knows where it wants to go";
const COMES_BACK: &str = "would come back to this listener for ever";
const OUT_OF_DESCRIPTORS: &str = "file descriptors: new connections are refused";
/// How many connections are accepted in a row, or looked at, before the control thread does
/// something else.
pub(super) const ACCEPT_MAX: usize = 1_024;
/// How many of them may be started at once; queueing one costs less and is not counted.
pub(super) const BEGIN_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::device::Devices;
    use crate::pnet::PnetTable;

    /// The process is out of descriptors, say, so that it cannot ask for the route. A server that
    /// has been offered SMC-R awaits a message all the same; it got the bytes of the application.
    #[test]
    fn a_server_that_was_offered_smc_r_hears_of_it_whatever_is_unknown() {
        let text = "[[listener]]\nname = \"it\"\nbind = \"127.0.0.1:1\"\naccept = \"tcp\"\n\
                    connect = \"smc\"\nupstream = \"127.0.0.1:2\"\n";
        let config = Config::parse(text, "x.toml").unwrap();
        let pnet = PnetTable::new(&config);
        let mut network = Network::new(Devices::read().unwrap(), pnet, Vec::new());
        let server = "127.0.0.1:2".parse().unwrap();
        let (accepted, upstream) = std::os::unix::net::UnixStream::pair().unwrap();
        let came = (0, Protocol::Tcp);
        let mut one = Negotiating::new(Instant::default(), came, (server, server), accepted.into());
        one.upstream = Some(upstream.into());
        for (peers, awaits) in [("127.0.0.0/8", true), ("10.0.0.0/8", false)] {
            one.offered = None;
            let option = OptionSource::Assume(vec![peers.parse().unwrap()]);
            let seen = at_client(&mut network, &option, &mut one, true).unwrap();
            assert_eq!((seen.offered, seen.port), (awaits, None));
        }
    }
}
