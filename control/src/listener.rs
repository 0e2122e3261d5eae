//! Listening sockets and what operators say about them; and sockets that connect onwards.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, sockopt};
use rustix::net::{accept_with, connect, socket_with};
use smcr_engine::allowance::Allowance;

use crate::admission::Admission;
use crate::config::{
    self, Bandwidth, Bounds, Config, InterceptWay, Protocol, SourceAddress, TcpKeepalive,
};
use crate::entropy::random;
use crate::loopback::Loopback;
use crate::passed::Passed;
use crate::smc_option::{OptionSource, Ports};
use crate::stats::ByTransport;
use crate::upstreams::Pool;

/// A listener at work.
pub struct Listener {
    /// What the operator wrote.
    pub config: config::Listener,
    /// Where its connections go.
    pub pool: Pool,
    /// The listening socket; none while it takes no connections.
    pub socket: Option<OwnedFd>,
    /// The operator has drained it.
    pub drained: bool,
    /// The configuration has it no more.
    pub retired: bool,
    /// Its connections are those of local programs: it has no address.
    pub local: bool,
    /// Connections accepted.
    pub accepted: u64,
    /// Connections closed at once: a limit, or no upstream.
    pub refused: u64,
    /// Sockets that were accepted and for which nothing else was done yet, oldest first. All others
    /// that were accepted are in use, were refused, or are over.
    pub arrived: VecDeque<OwnedFd>,
    /// Connections now, and those that may not come in.
    pub admission: Admission,
    /// SMC-R connections that it has kept, for other streams or until they are closed.
    pub kept: u32,
    /// How fast its connections may carry bytes, whichever poller has them.
    pub allowance: Arc<Allowance>,
    /// How long connections took that are over.
    pub durations: ByTransport,
    common: Common,
}

/// What all listeners of a gateway have in common.
#[derive(Clone, Debug)]
pub struct Common {
    /// Sockets towards upstreams carry [`OWN_MARK`]: some listener intercepts, and must leave them
    /// alone.
    marks: bool,
    /// Of the TCP connections towards SMC-R peers.
    peer_keepalive: TcpKeepalive,
    loopback: Arc<Loopback>,
    passed: Arc<Passed>,
}

impl Common {
    /// What the listeners of `config` have in common.
    pub fn of(config: &Config, loopback: &Arc<Loopback>, passed: &Arc<Passed>) -> Self {
        Self {
            marks: config.listeners.iter().any(config::Listener::needs_mark),
            peer_keepalive: config.smc.tcp_keepalive,
            loopback: Arc::clone(loopback),
            passed: Arc::clone(passed),
        }
    }

    /// The same for the listeners of `config`, which was read later.
    #[must_use]
    pub fn after(&self, config: &Config) -> Self {
        Self::of(config, &self.loopback, &self.passed)
    }

    /// The sockets that whoever started us has bound.
    pub fn passed(&self) -> &Passed {
        &self.passed
    }

    /// Listens as `config` says: at the socket that was bound to that address for us, or else at a
    /// new one.
    ///
    /// # Errors
    ///
    /// When the address cannot be bound, or the kernel refuses an option.
    pub fn listen(&self, config: &config::Listener, option: &OptionSource) -> io::Result<OwnedFd> {
        let (socket, waiting) = self.listen_at_start(config, option)?;
        // They have come while nobody served them.
        waiting.into_iter().for_each(reset);
        Ok(socket)
    }

    /// The same when the gateway starts. Returns also the connections that wait at a socket on
    /// which somebody else has listened for us until now.
    ///
    /// # Errors
    ///
    /// As [`listen`](Self::listen).
    pub fn listen_at_start(
        &self,
        config: &config::Listener,
        option: &OptionSource,
    ) -> io::Result<(OwnedFd, VecDeque<OwnedFd>)> {
        if let Some(passed) = self.passed.at(config.bind) {
            let socket = passed.try_clone()?;
            let waiting = self.listen_on(&socket, config, option)?;
            return Ok((socket, waiting.unwrap_or_default()));
        }
        let socket = new_socket(config.bind)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        self.prepare(&socket, config)?;
        rustix::net::bind(&socket, &config.bind)?;
        mark(&socket, config, option)?;
        rustix::net::listen(&socket, i32::try_from(config.backlog).unwrap_or(i32::MAX))?;
        Ok((socket, VecDeque::new()))
    }

    /// Listens as `config` says, by a socket that is bound and listens already. What it has
    /// accepted so far is not changed.
    ///
    /// Where connections are to answer the SMC option now and did not before, or the reverse, it
    /// begins to listen anew. Then connections are reset that are being opened, and those are
    /// returned that wait to be accepted.
    ///
    /// # Errors
    ///
    /// When the kernel refuses an option.
    pub fn listen_on(
        &self,
        socket: &OwnedFd,
        config: &config::Listener,
        option: &OptionSource,
    ) -> io::Result<Option<VecDeque<OwnedFd>>> {
        rustix::io::ioctl_fionbio(socket, true)?;
        let mut waiting = None;
        if has_to_begin_anew(socket, config, option) {
            // So shortly before that hardly any comes in between.
            let accepted = std::iter::from_fn(|| accept_from(socket).ok());
            waiting = Some(accepted.take(WAITING_MAX).collect());
            rustix::net::shutdown(socket, Shutdown::Read)?;
        }
        if config.accept == Protocol::Tcp {
            option.unmark(socket);
        }
        let prepared = self.prepare(socket, config).and_then(|()| mark(socket, config, option));
        // Whatever was refused, it has to listen: epoll would report it without end.
        rustix::net::listen(socket, i32::try_from(config.backlog).unwrap_or(i32::MAX))?;
        prepared.map(|()| waiting)
    }

    /// Sets what accepted sockets inherit.
    fn prepare(&self, socket: &OwnedFd, config: &config::Listener) -> io::Result<()> {
        set_options(socket, config, config.accept, self.peer_keepalive)?;
        if config.accept == Protocol::Tcp {
            self.loopback.suit_listener(socket, config.bind);
        }
        if config.intercept.as_ref().is_some_and(|it| it.way == InterceptWay::Tproxy) {
            smcr_os::tcp::set_transparent(socket.as_fd(), config.bind.is_ipv6())?;
        }
        Ok(())
    }
}

impl Listener {
    /// The listener that `config` describes, behind `socket`.
    pub fn new(config: config::Listener, common: Common, socket: Option<OwnedFd>) -> Self {
        let allowance = Arc::new(Allowance::default());
        limit(&allowance, &config.bounds);
        Self {
            pool: Pool::new(config.upstream.clone()),
            config,
            socket,
            drained: false,
            retired: false,
            local: false,
            accepted: 0,
            refused: 0,
            arrived: VecDeque::new(),
            admission: Admission::default(),
            kept: 0,
            allowance,
            durations: ByTransport::default(),
            common,
        }
    }

    /// The same for connections of local programs.
    pub fn local(config: config::Listener, common: Common) -> Self {
        Self { local: true, ..Self::new(config, common, None) }
    }

    /// From now on it does what `config` says.
    pub fn change(&mut self, config: config::Listener, common: Common) {
        self.pool.change(config.upstream.clone());
        limit(&self.allowance, &config.bounds);
        (self.config, self.common) = (config, common);
    }

    /// Does what its configuration says to a socket that was there before. Returns the connections
    /// that waited there, if it has begun to listen anew.
    ///
    /// # Errors
    ///
    /// As [`Common::listen_on`].
    pub(crate) fn take_up(&self, option: &OptionSource) -> io::Result<Option<VecDeque<OwnedFd>>> {
        let socket = self.socket.as_ref();
        socket.map_or(Ok(None), |socket| self.common.listen_on(socket, &self.config, option))
    }

    /// Whether nobody needs its number any more.
    pub fn is_gone(&self) -> bool {
        let has_none = self.admission.active() == 0 && self.admission.waiting.is_empty();
        self.retired && has_none && self.kept == 0
    }

    /// The next connection that waits to be accepted.
    ///
    /// # Errors
    ///
    /// `WOULDBLOCK` if there is none, and whatever else `accept` says.
    pub(crate) fn accept(&self) -> rustix::io::Result<OwnedFd> {
        accept_from(self.socket.as_ref().ok_or(Errno::WOULDBLOCK)?)
    }

    /// Prepares a connection that was accepted from `source` for the path that it takes.
    pub(crate) fn suit(&self, accepted: &OwnedFd, source: IpAddr) {
        // Otherwise it has inherited what it needs.
        if self.config.accept == Protocol::Tcp && !self.config.bind.ip().is_loopback() {
            self.common.loopback.suit_accepted(accepted, source);
        }
    }

    /// Whether either side of it may be SMC-R.
    pub fn speaks_smc(&self) -> bool {
        self.config.accept == Protocol::Smc || self.config.connect == Protocol::Smc
    }

    /// Begins to connect to `target`, for whoever has connected to us from `source`. Returns
    /// whether that is done already.
    ///
    /// With `offer`, it offers SMC-R. Where it connects from an address that is not ours,
    /// `announce` is told it before.
    ///
    /// # Errors
    ///
    /// When the process is out of descriptors or ports, or the kernel has no route; or when we may
    /// not mark the socket, or connect from another's address.
    pub(crate) fn connect(
        &self,
        (source, target): (SocketAddr, SocketAddr),
        option: &OptionSource,
        offer: bool,
        mut announce: impl FnMut(SocketAddr),
    ) -> io::Result<(OwnedFd, bool)> {
        // An application on this host may have come from loopback, which has no meaning elsewhere.
        let name = Some(source.ip().to_canonical())
            .filter(|ip| self.config.source == SourceAddress::Client && !ip.is_loopback());
        let Some(name) = name else {
            return self.connect_once(target, option, offer, |_| Ok(()));
        };
        let ports = ports_of(self.config.accept);
        let mut outcome = Err(io::ErrorKind::AddrNotAvailable.into());
        for _ in 0..PORTS_TRIED {
            outcome = self.connect_once(target, option, offer, |socket| {
                speak_for(socket, name, target, &ports)?;
                local_address(socket).into_iter().for_each(&mut announce);
                Ok(())
            });
            let error = outcome.as_ref().err().and_then(Errno::from_io_error);
            // The port is taken: by a listener, or by another connection to this target.
            if !matches!(error, Some(Errno::ADDRINUSE | Errno::ADDRNOTAVAIL)) {
                break;
            }
        }
        outcome
    }

    /// Begins to connect to `target` only to see whether somebody answers. Returns whether that is
    /// known already.
    ///
    /// # Errors
    ///
    /// That nobody does, or that we cannot ask.
    pub(crate) fn knock(&self, target: SocketAddr) -> io::Result<(OwnedFd, bool)> {
        let socket = new_socket(target)?;
        if self.common.marks {
            smcr_os::tcp::set_mark(socket.as_fd(), OWN_MARK)?;
        }
        match connect(&socket, &target) {
            Ok(()) => Ok((socket, true)),
            Err(Errno::INPROGRESS) => Ok((socket, false)),
            Err(error) => Err(error.into()),
        }
    }

    /// Begins to connect by a new socket, which is prepared by `bind` last of all.
    fn connect_once(
        &self,
        target: SocketAddr,
        option: &OptionSource,
        offer: bool,
        bind: impl FnOnce(&OwnedFd) -> io::Result<()>,
    ) -> io::Result<(OwnedFd, bool)> {
        let socket = new_socket(target)?;
        set_options(&socket, &self.config, self.config.connect, self.common.peer_keepalive)?;
        if self.config.connect == Protocol::Tcp {
            self.common.loopback.suit_client(&socket, target.ip());
        }
        if offer {
            option.mark_client(&socket)?;
        }
        if self.common.marks {
            smcr_os::tcp::set_mark(socket.as_fd(), OWN_MARK)?;
        }
        bind(&socket)?;
        match connect(&socket, &target) {
            Ok(()) => Ok((socket, true)),
            Err(Errno::INPROGRESS) => Ok((socket, false)),
            Err(error) => Err(error.into()),
        }
    }
}

/// The next connection that waits at `socket`.
///
/// # Errors
///
/// As [`Listener::accept`].
pub(crate) fn accept_from(socket: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    accept_with(socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)
}

/// As [`OptionSource::has_to_begin_anew`], for a socket on which `config` is to listen.
fn has_to_begin_anew(socket: &OwnedFd, config: &config::Listener, option: &OptionSource) -> bool {
    let listens = sockopt::socket_acceptconn(socket).unwrap_or(false);
    listens && option.has_to_begin_anew(socket, config.accept == Protocol::Smc)
}

/// Has the connections that a socket accepts answer the SMC option, if its `config` wants that.
fn mark(socket: &OwnedFd, config: &config::Listener, option: &OptionSource) -> io::Result<()> {
    let way = config.intercept.as_ref().map(|intercept| intercept.way);
    let ports = match way {
        Some(InterceptWay::Tproxy | InterceptWay::Ebpf) => Ports::Any,
        // Rules of NAT give connections the port of the listener.
        Some(InterceptWay::Redirect) | None => Ports::Own,
    };
    match config.accept {
        Protocol::Tcp => Ok(()),
        Protocol::Smc => option.mark_listener(socket, ports).map(drop),
    }
}

/// Tells pollers how fast connections may carry bytes.
fn limit(allowance: &Allowance, bounds: &Bounds) {
    let bytes = |limit: Option<Bandwidth>| limit.map_or(0, |it| it.bytes_per_second().get());
    allowance.set(bytes(bounds.bandwidth_max), bytes(bounds.bandwidth_per_connection));
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

/// Sets what the operator chose for the side of a listener whose `protocol` this is.
fn set_options(
    socket: &OwnedFd,
    config: &config::Listener,
    protocol: Protocol,
    peer_keepalive: TcpKeepalive,
) -> io::Result<()> {
    // Of a socket that listens already, what was set before is taken back.
    sockopt::set_tcp_nodelay(socket, config.tcp_nodelay)?;
    // From the first byte on: the kernel throws an urgent byte away when it is read over, or when
    // another one comes. A poller expects to find it in its place.
    sockopt::set_socket_oobinline(socket, true)?;
    let keepalive = match protocol {
        Protocol::Tcp => config.tcp_keepalive,
        Protocol::Smc => peer_keepalive,
    };
    if !keepalive.idle.is_zero() {
        // RFC 7609 4.5.3 #6: leave TCP keepalive running
        // RFC 7609 4.5.3 #7: configurable TCP keepalive interval
        sockopt::set_tcp_keepidle(socket, keepalive.idle)?;
        sockopt::set_tcp_keepintvl(socket, keepalive.interval)?;
        sockopt::set_tcp_keepcnt(socket, keepalive.count)?;
    }
    Ok(sockopt::set_socket_keepalive(socket, !keepalive.idle.is_zero())?)
}

/// Gives a socket the address of another host, `name`, and one of `ports`, from which it will
/// connect to `target`.
fn speak_for(
    socket: &OwnedFd,
    name: IpAddr,
    target: SocketAddr,
    ports: &Range<u16>,
) -> io::Result<()> {
    if name.is_ipv4() != target.is_ipv4() {
        let why = "a client of IPv4 has no address towards a server of IPv6, nor the reverse";
        return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, why));
    }
    smcr_os::tcp::set_transparent(socket.as_fd(), target.is_ipv6())?;
    // Connections to different targets may share a port.
    sockopt::set_socket_reuseaddr(socket, true)?;
    let port = ports.start + u16::from_ne_bytes(random()) % (ports.end - ports.start);
    Ok(rustix::net::bind(socket, &SocketAddr::new(name, port))?)
}

/// The ports from which a listener that accepts `accept` connects in the name of a host.
///
/// They must not be those from which that host itself, or another gateway in its name, connects to
/// the same target: two connections would have the same name at the server's host. Hosts choose
/// from 32768 on.
fn ports_of(accept: Protocol) -> Range<u16> {
    match accept {
        Protocol::Tcp => 16_384..32_768,
        Protocol::Smc => 1_024..16_384,
    }
}

/// The SO_MARK of our own sockets, which nobody intercepts.
pub const OWN_MARK: u32 = 0x534d_4301;
/// More connections than this do not wait at a socket, by default of the kernel.
const WAITING_MAX: usize = 4096;
/// How many ports are tried.
const PORTS_TRIED: usize = 16;

fn new_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(family, SocketType::STREAM, flags, None)?)
}

/// What to add to `why` if a port to listen at cannot be had.
pub fn who_has_it(why: &io::Error) -> &'static str {
    let is_in_use = why.kind() == io::ErrorKind::AddrInUse;
    if is_in_use { "; `ss -ltnp` shows who has it" } else { "" }
}

/// The far end of a connection, while it is there.
pub(crate) fn peer_address(socket: &OwnedFd) -> Option<SocketAddr> {
    SocketAddr::try_from(rustix::net::getpeername(socket).ok()??).ok()
}

/// Our end of a connection.
pub(crate) fn local_address(socket: &OwnedFd) -> Option<SocketAddr> {
    SocketAddr::try_from(rustix::net::getsockname(socket).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where firewalls forget idle connections, operators rely on this, on either side and with
    /// times of their own; and small writes of interactive applications must not wait for each
    /// other.
    // RFC 7609 4.5.3 #6: leave TCP keepalive running
    // RFC 7609 4.5.3 #7: configurable TCP keepalive interval
    #[test]
    fn sockets_have_the_options_that_the_operator_chose() {
        let path = "/proc/sys/net/ipv4/tcp_congestion_control";
        let host_default = std::fs::read_to_string(path).unwrap();
        let host_default = host_default.trim();
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
                let common = Common::of(&config, &Arc::new(Loopback::Own(None)), &Arc::default());
                let socket = common.listen(&config.listeners[0], &option).unwrap();
                let listener = Listener::new(config.listeners[0].clone(), common, Some(socket));
                let _client = std::net::TcpStream::connect(place).unwrap();
                let accepted =
                    accept_with(listener.socket.as_ref().unwrap(), SocketFlags::CLOEXEC).unwrap();
                let ends = (place, target);
                let (connected, _) = listener.connect(ends, &option, true, |_| {}).unwrap();
                for (socket, side) in [(accepted, accept), (connected, connect)] {
                    // The path to a peer gets the congestion control of the host.
                    let found = sockopt::tcp_congestion(&socket).unwrap();
                    assert_eq!(found == "reno", side == "tcp" || host_default == "reno");
                    let expected = if side == "smc" { (9, 1, 4) } else { (idle_s, 2, 5) };
                    assert!(sockopt::socket_oobinline(&socket).unwrap());
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
