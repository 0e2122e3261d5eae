//! Accepting: plain TCP from applications, rendezvous TCP from peers; and connecting onwards.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::net::{accept_with, connect, socket_with};
use smcr_proto::Instant;
use smcr_proto::handshake::Server;
use smcr_proto::wire::clc::Diagnosis;
use smcr_rnic::Rnic;

use crate::config::{self, TcpKeepalive, Transport};
use crate::gateway::Gateway;
use crate::places::Place;
use crate::reactor::{Key, Token};
use crate::rendezvous::conversation::Conversation;
use crate::sessions::{Newcomer, Rendezvous, Session, Talk};
use crate::smc_option::OptionSource;
use crate::sources::Sources;

/// A listener at work.
pub struct Listener {
    /// What the operator wrote.
    pub config: config::Listener,
    /// Where its connections go, resolved.
    pub upstream: SocketAddr,
    /// The listening socket; gone once the gateway drains.
    pub socket: Option<OwnedFd>,
    /// Connections accepted.
    pub accepted: u64,
    /// Connections closed at once: a limit, or no upstream.
    pub refused: u64,
    /// Connections now.
    pub active: u32,
    /// The same, by who made them.
    sources: Sources,
    /// Of the TCP connections towards SMC-R peers.
    peer_keepalive: TcpKeepalive,
}

impl Listener {
    /// Binds and listens. `peer_keepalive` is for the TCP connections towards SMC-R peers.
    ///
    /// # Errors
    ///
    /// When the address cannot be bound, or the upstream's name has no address.
    pub fn open(
        config: &config::Listener,
        option: &OptionSource,
        peer_keepalive: TcpKeepalive,
    ) -> io::Result<Self> {
        let upstream = *config.upstream.resolve()?.first().ok_or(io::ErrorKind::NotFound)?;
        let socket = new_socket(config.bind)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        // Accepted sockets inherit these.
        set_options(&socket, config, config.accept, peer_keepalive)?;
        if config.accept == Transport::Smc {
            option.mark_listener(&socket)?;
        }
        rustix::net::bind(&socket, &config.bind)?;
        rustix::net::listen(&socket, i32::try_from(config.backlog).unwrap_or(i32::MAX))?;
        Ok(Self {
            config: config.clone(),
            upstream,
            socket: Some(socket),
            accepted: 0,
            refused: 0,
            active: 0,
            sources: Sources::default(),
            peer_keepalive,
        })
    }

    /// Counts a connection that was accepted.
    fn enter(&mut self, source: IpAddr) {
        self.active += 1;
        self.sources.enter(source);
    }

    /// A connection that was accepted is over.
    pub(crate) fn leave(&mut self, source: IpAddr) {
        self.active -= 1;
        self.sources.leave(source);
    }

    /// Whether its upstream may be an SMC-R peer.
    pub(crate) fn seeks_smc(&self) -> bool {
        self.config.connect == Transport::Smc && self.config.peers.admit_source(self.upstream.ip())
    }

    /// Whether either side of it may be SMC-R.
    pub fn speaks_smc(&self) -> bool {
        self.config.accept == Transport::Smc || self.config.connect == Transport::Smc
    }

    /// Begins to connect to the upstream. Returns whether that is done already.
    ///
    /// With `offer`, it offers SMC-R where that is what the operator wants.
    fn connect(&self, option: &OptionSource, offer: bool) -> io::Result<(OwnedFd, bool)> {
        let socket = new_socket(self.upstream)?;
        set_options(&socket, &self.config, self.config.connect, self.peer_keepalive)?;
        if offer && self.config.connect == Transport::Smc {
            option.mark_client(&socket)?;
        }
        match connect(&socket, &self.upstream) {
            Ok(()) => Ok((socket, true)),
            Err(rustix::io::Errno::INPROGRESS) => Ok((socket, false)),
            Err(error) => Err(error.into()),
        }
    }
}

impl<N: Rnic> Gateway<N> {
    /// Accepts what waits at listener `index`.
    pub(crate) fn accept(&mut self, now: Instant, index: u16) {
        let mut begun = 0;
        for _ in 0..ACCEPT_MAX {
            if begun == BEGIN_MAX {
                return;
            }
            let Some(listener) = self.listeners.get_mut(usize::from(index)) else { return };
            let Some(socket) = &listener.socket else { return };
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match accept_with(socket, flags) {
                Ok(accepted) => begun += usize::from(self.accepted(now, index, accepted)),
                Err(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                    if !self.refuse_for_want_of_descriptors(index) {
                        return;
                    }
                }
                // Nobody there any more, or a connection that was reset while it waited.
                Err(_) => return,
            }
        }
    }

    /// Out of descriptors: whoever waits is told so, instead of waiting for ever. Returns whether
    /// somebody was.
    fn refuse_for_want_of_descriptors(&mut self, index: u16) -> bool {
        self.reserve = None;
        let listener = &mut self.listeners[usize::from(index)];
        let refused = listener
            .socket
            .as_ref()
            .and_then(|socket| accept_with(socket, SocketFlags::CLOEXEC).ok());
        let found = refused.is_some();
        if let Some(refused) = refused {
            listener.refused += 1;
            reset(refused);
            self.log_limit(index, OUT_OF_DESCRIPTORS);
        }
        self.reserve = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).ok();
        found
    }

    /// Takes in a connection that was accepted, unless there are too many. Returns whether more
    /// was begun with it than to let it wait.
    fn accepted(&mut self, now: Instant, index: u16, accepted: OwnedFd) -> bool {
        let listener = &mut self.listeners[usize::from(index)];
        listener.accepted += 1;
        if listener.active >= listener.config.connections_max
            || self.sessions.len() >= self.config.limits.connections_max as usize
        {
            listener.refused += 1;
            reset(accepted);
            self.log_limit(index, "connections: new ones are refused");
            return false;
        }
        let Some(source) = peer_address(&accepted) else { return false };
        if listener.sources.of(source.ip()) >= listener.config.max_per_source {
            listener.refused += 1;
            reset(accepted);
            self.log_limit(index, "connections of one source: its new ones are refused");
            return false;
        }
        listener.enter(source.ip());
        let limited = listener.seeks_smc();
        let newcomer = Newcomer { listener: index, socket: accepted, source };
        if !limited {
            // Where a peer proposes, its Proposal takes a place.
            self.begin(now, newcomer, Place::None);
            true
        } else if self.places.take(index) {
            self.begin(now, newcomer, Place::Taken);
            true
        } else {
            let key = self.sessions.insert(Session::Waiting(newcomer));
            self.places.wait(now, index, key);
            false
        }
    }

    /// Lets those who have waited for places have them, and tells those who have waited for too
    /// long that they stay TCP.
    pub(crate) fn admit(&mut self, now: Instant) {
        while let Some((listener, key)) = self.places.admit() {
            if !self.has_come_up(now, key) {
                self.places.leave(listener);
            }
        }
        while let Some(key) = self.places.give_up(now) {
            self.has_waited_in_vain(now, key);
        }
    }

    /// It is the turn of somebody who waited for a place. Returns whether it still wanted one.
    fn has_come_up(&mut self, now: Instant, key: Key) -> bool {
        match self.sessions.at_mut(key) {
            Some(Session::Waiting(_)) => {
                let Some(Session::Waiting(newcomer)) = self.sessions.remove(key) else {
                    unreachable!("it was there just now");
                };
                self.begin(now, newcomer, Place::Taken);
                true
            }
            Some(Session::Shaking(shaking)) if shaking.place == Place::Wanted => {
                shaking.place = Place::Taken;
                self.resume(now, key);
                self.heed_groups(now);
                true
            }
            // It is over, or an answer was due and it has become TCP.
            Some(Session::Shaking(_) | Session::Open(_)) | None => false,
        }
    }

    /// A connection that waited for a place stays TCP.
    fn has_waited_in_vain(&mut self, now: Instant, key: Key) {
        match self.sessions.at(key) {
            Some(Session::Waiting(_)) => {
                let Some(Session::Waiting(newcomer)) = self.sessions.remove(key) else {
                    unreachable!("it was there just now");
                };
                self.log_limit(newcomer.listener, OUT_OF_PLACES);
                self.begin(now, newcomer, Place::None);
            }
            Some(Session::Shaking(shaking)) if shaking.place == Place::Wanted => {
                self.log_limit_of(key, OUT_OF_PLACES);
                self.answer_server(now, key, Err(Diagnosis::TOO_BUSY));
            }
            Some(Session::Shaking(_) | Session::Open(_)) | None => {}
        }
    }

    /// Begins to connect the two sides of a connection. Without a place it offers no SMC-R.
    fn begin(&mut self, now: Instant, newcomer: Newcomer, place: Place) {
        let Newcomer { listener: index, socket: accepted, source } = newcomer;
        let listener = &mut self.listeners[usize::from(index)];
        let connects_smc = listener.config.connect == Transport::Smc;
        let offers = listener.seeks_smc() && place == Place::Taken;
        let crowded = listener.seeks_smc() && !offers;
        let (connected_socket, connected) = match listener.connect(&self.option, offers) {
            Ok(connecting) => connecting,
            Err(error) => {
                listener.leave(source.ip());
                if place == Place::Taken {
                    self.places.leave(index);
                }
                self.upstream_failed(index, &error);
                reset(accepted);
                let errno = rustix::io::Errno::from_io_error(&error);
                if matches!(errno, Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)) {
                    self.log_limit(index, OUT_OF_DESCRIPTORS);
                }
                return;
            }
        };
        let deadline = now + listener.config.connect_timeout;
        let accepts_smc = listener.config.accept == Transport::Smc;
        let (app, peer) =
            if accepts_smc { (connected_socket, accepted) } else { (accepted, connected_socket) };
        let talk = if crowded {
            Talk::Plain(Some(Diagnosis::TOO_BUSY))
        } else if connects_smc {
            Talk::Connecting
        } else if !accepts_smc {
            Talk::Plain(None)
        } else if !self.option.peer_offered(&peer, source) {
            Talk::Plain(Some(Diagnosis::NO_SMC_OPTION))
        } else {
            Talk::Server(self.new_server(now, &peer))
        };
        let silent = matches!(talk, Talk::Server(_));
        let key = self.sessions.insert(Session::Shaking(Box::new(Rendezvous {
            listener: index,
            app,
            peer,
            source,
            connected,
            deadline,
            conversation: Conversation::new(talk),
            held: None,
            waiting: None,
            answer_by: None,
            resources: None,
            silent,
            place,
            far: None,
            trial: false,
            said_at: now,
            proof_by: None,
        })));
        self.shaking += 1;
        self.shaking_keys.push(key);
        if silent && let Some(oldest) = self.silent.enter(source.ip(), key) {
            self.silent_cut_short += 1;
            self.fail(oldest, "too many peers send no Proposal");
        }
        if self.watch_rendezvous(key).is_err() {
            self.fail(key, "no room to watch its sockets");
        } else if connected {
            self.connected(now, key);
        }
    }

    /// The server's side of a rendezvous with whoever is at the other end of `peer`.
    fn new_server(&self, now: Instant, peer: &OwnedFd) -> Server {
        let local = rustix::net::getsockname(peer).ok();
        let local = local.and_then(|local| SocketAddr::try_from(local).ok());
        let port = local.and_then(|local| self.network.ports_for(local.ip()).first().copied());
        Server::with_policy(now, self.peer_id, self.policy(port))
    }

    /// Watches what the first step of a rendezvous waits for.
    fn watch_rendezvous(&mut self, key: Key) -> io::Result<()> {
        let Some(Session::Shaking(shaking)) = self.sessions.at(key) else { return Ok(()) };
        let reactor = &self.reactor;
        match shaking.conversation.talk {
            Talk::Connecting | Talk::Client(_) => {
                reactor.watch_edges(&shaking.peer, Token::Peer(key))
            }
            Talk::Plain(_) if shaking.connected => Ok(()),
            Talk::Plain(_) => {
                let accepts_smc =
                    self.listeners[usize::from(shaking.listener)].config.accept == Transport::Smc;
                let socket = if accepts_smc { &shaking.app } else { &shaking.peer };
                reactor.watch_connect(socket, Token::Application(key))
            }
            Talk::Server(_) | Talk::Pending(..) => {
                if !shaking.connected {
                    reactor.watch_connect(&shaking.app, Token::Application(key))?;
                }
                reactor.watch_edges(&shaking.peer, Token::Peer(key))
            }
        }
    }

    /// The upstream of listener `index` said no.
    pub(crate) fn upstream_failed(&mut self, index: u16, error: &io::Error) {
        let listener = &mut self.listeners[usize::from(index)];
        listener.refused += 1;
        tracing::debug!(
            listener = listener.config.name,
            upstream = %listener.upstream,
            %error,
            "upstream did not accept; the application is reset"
        );
    }

    /// Says what has run out, and what follows for new connections of listener `index`.
    fn log_limit(&mut self, index: u16, what: &str) {
        let now = self.clock.now();
        if self.limit_logged_at.is_none_or(|at| now.since(at) >= LOG_LIMIT_EVERY) {
            self.limit_logged_at = Some(now);
            let name = &self.listeners[usize::from(index)].config.name;
            tracing::warn!(listener = name, "out of {what}");
        }
    }

    /// As `log_limit`, for the listener of a rendezvous.
    pub(crate) fn log_limit_of(&mut self, key: Key, what: &str) {
        if let Some(Session::Shaking(shaking)) = self.sessions.at(key) {
            let listener = shaking.listener;
            self.log_limit(listener, what);
        }
    }
}

/// Closes `socket` with a reset: whoever is at the other end learns at once that it was refused.
pub(crate) fn reset(socket: OwnedFd) {
    let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
    drop(socket);
}

/// How a connect ended.
pub(crate) fn connect_outcome(socket: impl AsFd) -> io::Result<()> {
    sockopt::socket_error(socket)?.map_err(io::Error::from)
}

/// Sets what the operator chose for the side of a listener whose `transport` this is.
fn set_options(
    socket: &OwnedFd,
    config: &config::Listener,
    transport: Transport,
    peer_keepalive: TcpKeepalive,
) -> io::Result<()> {
    if config.tcp_nodelay {
        sockopt::set_tcp_nodelay(socket, true)?;
    }
    let keepalive = match transport {
        Transport::Tcp => config.tcp_keepalive,
        Transport::Smc => peer_keepalive,
    };
    if !keepalive.idle.is_zero() {
        // RFC 7609 4.5.3-6, 4.5.3-7
        sockopt::set_tcp_keepidle(socket, keepalive.idle)?;
        sockopt::set_tcp_keepintvl(socket, keepalive.interval)?;
        sockopt::set_tcp_keepcnt(socket, keepalive.count)?;
        sockopt::set_socket_keepalive(socket, true)?;
    }
    Ok(())
}

fn new_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(family, SocketType::STREAM, flags, None)?)
}

fn peer_address(socket: &OwnedFd) -> Option<SocketAddr> {
    SocketAddr::try_from(rustix::net::getpeername(socket).ok()??).ok()
}

const OUT_OF_PLACES: &str = "places for rendezvous: connections that waited stay TCP";
const OUT_OF_DESCRIPTORS: &str = "file descriptors: new connections are refused";
/// Connections accepted before the control thread looks at something else.
const ACCEPT_MAX: usize = 1_024;
/// Of these, such that are more work than to let them wait.
const BEGIN_MAX: usize = 64;
/// A limit that is reached is reached often; once in a while is enough to know.
const LOG_LIMIT_EVERY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    /// Where firewalls forget idle connections, operators rely on this, on either side and with
    /// times of their own; and small writes of interactive applications must not wait for each
    /// other.
    // RFC 7609 4.5.3-6, 4.5.3-7
    #[test]
    fn sockets_have_the_options_that_the_operator_chose() {
        for (accept, connect) in [("tcp", "smc"), ("smc", "tcp"), ("tcp", "tcp")] {
            for idle_s in [0, 7] {
                let upstream = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
                let place = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
                let (place, target) = (place.unwrap(), upstream.local_addr().unwrap());
                let text = format!(
                    "[[listener]]\nname='a'\nbind='{place}'\nupstream='{target}'\n\
                     accept='{accept}'\nconnect='{connect}'\n\
                     tcp_keepalive = {{ idle = '{idle_s}s', interval = '2s', count = 5 }}\n\
                     [smc]\ntcp_keepalive = {{ idle = '9s', interval = '1s', count = 4 }}\n"
                );
                let config = Config::parse(&text, "a.toml").unwrap();
                let option = OptionSource::None(String::new());
                let chosen = config.smc.tcp_keepalive;
                let listener = Listener::open(&config.listeners[0], &option, chosen).unwrap();
                let _client = std::net::TcpStream::connect(place).unwrap();
                let accepted =
                    accept_with(listener.socket.as_ref().unwrap(), SocketFlags::CLOEXEC).unwrap();
                let (connected, _) = listener.connect(&option, true).unwrap();
                for (socket, side) in [(accepted, accept), (connected, connect)] {
                    let expected = if side == "smc" { (9, 1, 4) } else { (idle_s, 2, 5) };
                    assert!(sockopt::tcp_nodelay(&socket).unwrap());
                    assert_eq!(sockopt::socket_keepalive(&socket).unwrap(), expected.0 > 0);
                    if expected.0 > 0 {
                        let found = (
                            sockopt::tcp_keepidle(&socket).unwrap().as_secs(),
                            sockopt::tcp_keepintvl(&socket).unwrap().as_secs(),
                            sockopt::tcp_keepcnt(&socket).unwrap(),
                        );
                        assert_eq!(found, expected);
                    }
                }
            }
        }
    }
}
