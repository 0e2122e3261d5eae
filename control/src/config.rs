//! The TOML file, parsed into types that cannot be wrong.
//!
//! Every key has a default, except those of listeners that only the operator knows. Each fault is
//! one line that names file, line and key. Nothing is opened, bound or resolved here.

mod access_log;
mod bounds;
mod circles;
mod confine;
mod duration;
mod error;
mod intercept;
mod keepalive;
mod limits;
mod local;
mod network;
mod peers;
mod preference;
mod rnic;
mod schema;
mod section;
mod shown;
mod smc;
mod upstreams;
mod versions;

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

pub use access_log::{AccessLog, Field, LineFormat, LogTarget, Piece, Share};
pub use bounds::{Bandwidth, Bounds, OverLimit, Rate};
pub(crate) use circles::comes_back;
pub use confine::Confine;
pub use error::ConfigError;
pub use intercept::{Intercept, InterceptWay, SourceAddress};
pub use keepalive::TcpKeepalive;
pub use limits::Limits;
pub use local::{Door, LOCAL_ACCEPT, LOCAL_CONNECT, Local, Shortcuts};
pub use network::{Cidr, Upstream};
pub use peers::Peers;
pub use preference::Preference;
use rnic::rnics;
pub use rnic::{DpdkPort, RnicConfig, RnicKind, VerbsPort};
use section::{Placed, Section, Source};
pub use smc::{OptionMode, Smc};
pub use upstreams::{Balance, Check, Upstreams};
pub use versions::Versions;

/// What the gateway shall do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `[admin]`: where operators ask.
    pub admin: Admin,
    /// `[[rnic]]`: the NICs to use. Empty: a soft RNIC on the device that routes to the peer.
    pub rnics: Vec<RnicConfig>,
    /// `[[pnet]]`: which network device goes with which RNIC, where that is not plain.
    pub pnet: Vec<PnetEntry>,
    /// `[[listener]]`: at least one, unless local programs come in by a door.
    pub listeners: Vec<Listener>,
    /// `[poll]`: how polling threads spend their time.
    pub poll: Poll,
    /// `[smc]`: the protocol.
    pub smc: Smc,
    /// `[local]`: connections with applications on this host.
    pub local: Local,
    /// `[dns]`: who is asked what names mean.
    pub dns: Dns,
    /// `[confine]`: what the process gives up once it has started.
    pub confine: Confine,
    /// `[limits]`: bounds of the whole process.
    pub limits: Limits,
    /// `drain_timeout`: how long a graceful stop waits for connections to finish.
    pub drain_timeout: Duration,
    /// `log`: what is worth a line.
    pub log: LogLevel,
    /// `[access_log]`: a line about each connection that is over.
    pub access_log: AccessLog,
}

/// Where operators ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// HTTP: JSON, metrics, page. `listen = "none"` turns it off.
    pub listen: Option<SocketAddr>,
}

/// Who is asked what names mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dns {
    /// Name servers. Empty: those of the host, which also looks into its file of hosts.
    pub servers: Vec<SocketAddr>,
}

/// Who chooses the congestion control of connections with applications on loopback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CongestionControl {
    /// This gateway: one that does not pace, at both ends where it can.
    Auto,
    /// The host.
    Host,
}

/// Connections that use `device` use `rnic`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PnetEntry {
    /// A network device. Unique among the entries.
    pub device: String,
    /// The name of an [`RnicConfig`].
    pub rnic: String,
}

/// One port the gateway serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// What logs and counters call it. Unique.
    pub name: String,
    /// Where it listens. Unique.
    pub bind: SocketAddr,
    /// What it accepts. `Smc`: SMC-R where the SYN offers it, else TCP.
    pub accept: Protocol,
    /// How it connects. `Smc`: try SMC-R, else stay TCP. Not both sides are `Smc`.
    pub connect: Protocol,
    /// Where its connections go.
    pub upstream: Upstreams,
    /// Whether it uses SMC-R where that is slower than TCP.
    pub preference: Preference,
    /// Which connections come to it that are meant for somebody else.
    pub intercept: Option<Intercept>,
    /// Which address its upstreams see.
    pub source: SourceAddress,
    /// Proxies that say by a PROXY header who connected to them.
    pub proxy_from: Vec<Cidr>,
    /// How long the upstream may take to answer a SYN.
    pub connect_timeout: Duration,
    /// What its connections may take.
    pub bounds: Bounds,
    /// Whether small writes leave at once, on both TCP sockets.
    pub tcp_nodelay: bool,
    /// Keepalive of the TCP connections of applications.
    pub tcp_keepalive: TcpKeepalive,
    /// Connections the kernel holds before they are accepted.
    pub backlog: u32,
    /// Size of the RMB elements of its connections, in bytes; none: as `[smc]` says.
    pub rmbe_size: Option<u32>,
    /// Who may be an SMC-R peer of its connections. What it leaves open, `[smc]` says.
    pub peers: Peers,
}

impl Listener {
    /// Whether the kernel must be able to tell our sockets from those of others.
    pub fn needs_mark(&self) -> bool {
        self.intercept.is_some() || self.source == SourceAddress::Client
    }
}

/// One side of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Plain TCP.
    Tcp,
    /// SMC-R where the peer has it too, else TCP.
    Smc,
}

/// How polling threads spend their time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Poll {
    /// When they sleep.
    pub policy: IdlePolicy,
    /// How long `Adaptive` goes on looking after the last work.
    pub spin: Duration,
    /// The cores they may use, one thread each. Empty: chosen automatically.
    pub cores: Vec<usize>,
    /// Whether each is tied to its core.
    pub pin: bool,
    /// By how many steps of `nice` one that carries bytes raises its priority, while others need
    /// its core.
    pub boost: u8,
    /// Whether one becomes real-time meanwhile, if what it carries gains by that.
    pub realtime: bool,
}

/// When a polling thread sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdlePolicy {
    /// Never.
    Spin,
    /// After a while without work, sooner on a busy machine.
    Adaptive,
    /// As soon as there is none.
    Block,
}

/// What is worth a line in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Only what an operator must act on.
    Error,
    /// Also what an operator should know.
    Warn,
    /// Also what the control thread does: listeners, link groups, links.
    Info,
    /// Also each connection.
    Debug,
    /// Also each message.
    Trace,
}

impl Config {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    ///
    /// The first fault, in the order of the file where that is possible. Print it and exit with 2.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::load_at(path, &[])
    }

    /// The same, for a host that has the addresses `here`, beyond those of loopback.
    ///
    /// # Errors
    ///
    /// As [`Config::load`], and what is wrong on that host.
    pub fn load_at(path: &Path, here: &[IpAddr]) -> Result<Self, ConfigError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| {
            let kind = error.kind();
            let remedy = match kind == ErrorKind::PermissionDenied {
                true => "; the user of the gateway must be able to read it",
                false if kind == ErrorKind::NotFound => "; give its path with -c",
                false => "",
            };
            ConfigError::new(&name, None, "", format!("cannot be read: {error}{remedy}"))
        })?;
        Self::parse_at(&text, &name, here)
    }

    /// Checks `text`; `file_name` is what complaints call it.
    ///
    /// # Errors
    ///
    /// As [`Config::load`].
    pub fn parse(text: &str, file_name: &str) -> Result<Self, ConfigError> {
        Self::parse_at(text, file_name, &[])
    }

    /// The same, for a host that has the addresses `here`, beyond those of loopback.
    ///
    /// # Errors
    ///
    /// As [`Config::load_at`].
    pub fn parse_at(text: &str, file_name: &str, here: &[IpAddr]) -> Result<Self, ConfigError> {
        Self::read(Source { name: file_name, text, here, learned: None })
    }

    fn read(source: Source<'_>) -> Result<Self, ConfigError> {
        let mut file = Section::parse(source)?;
        let limits = limits::read(file.table("limits")?)?;
        let admin = admin(source, file.table("admin")?)?;
        let rnics = rnics(source, file.tables("rnic")?)?;
        let pnet = pnet(source, file.tables("pnet")?, &rnics)?;
        let local = Local::read(source, file.table("local")?)?;
        let mut listeners = listeners(source, file.tables("listener")?, &limits, &admin, &local)?;
        if listeners.is_empty() && local.door.is_none() {
            let why = "there is none, so nothing would be served; write at least one [[listener]], \
                       or socket under [local]";
            return Err(file.error("listener", why));
        }
        let poll = poll(file.table("poll")?)?;
        let smc = smc::read(source, file.table("smc")?)?;
        let dns = dns(source, file.table("dns")?)?;
        let access_log = AccessLog::read(source, file.table("access_log")?)?;
        let confine = confine::read(file.table("confine")?)?;
        if let Some(rnic) = versions::in_conflict(smc.versions, &rnics) {
            let why = "is 1, but RoCE v1 carries SMC-Rv1 only; write versions = [1] under [smc]";
            return Err(file.error("rnic", format!("version of {} {why}", rnic.name)));
        }
        for listener in &mut listeners {
            listener.peers = listener.peers.or(&smc.peers);
        }
        let drain_timeout = file.duration("drain_timeout", Duration::from_secs(30))?;
        let log = file.word("log", &LOG_LEVELS, LogLevel::Info)?;
        file.finish()?;
        Ok(Self {
            admin,
            rnics,
            pnet,
            listeners,
            poll,
            smc,
            local,
            dns,
            confine,
            limits,
            drain_timeout,
            log,
            access_log,
        })
    }
}

fn admin(source: Source<'_>, mut table: Section<'_>) -> Result<Admin, ConfigError> {
    let listen = match table.text("listen")? {
        None => Some(SocketAddr::from(([127, 0, 0, 1], 9180))),
        Some(text) if text.value == "none" => None,
        Some(text) => {
            Some(network::bind_address(&text.value).map_err(|why| text.error(source, why))?)
        }
    };
    table.finish()?;
    Ok(Admin { listen })
}

fn dns(source: Source<'_>, mut table: Section<'_>) -> Result<Dns, ConfigError> {
    let mut servers = Vec::new();
    for text in table.texts("servers")? {
        let with_port = text.value.parse::<SocketAddr>();
        let server = with_port.or_else(|_| text.value.parse().map(|ip| SocketAddr::new(ip, 53)));
        servers.push(server.map_err(|_| {
            let why = format!("\"{}\" is no address; write \"10.8.0.53\"", text.value);
            text.error(source, why)
        })?);
    }
    table.finish()?;
    Ok(Dns { servers })
}

fn pnet(
    source: Source<'_>,
    tables: Vec<Section<'_>>,
    rnics: &[RnicConfig],
) -> Result<Vec<PnetEntry>, ConfigError> {
    let mut devices = Unique::new("another pnet entry");
    let mut found = Vec::new();
    for mut table in tables {
        let device = table.required("device")?;
        table.rename(format!("pnet.{}", device.value));
        let rnic = table.required("rnic")?;
        table.finish()?;
        devices.insert(source, &device)?;
        if !rnics.iter().any(|known| known.name == rnic.value) {
            let why =
                format!("there is no [[rnic]] named \"{}\"; add it or correct this", rnic.value);
            return Err(rnic.error(source, why));
        }
        found.push(PnetEntry { device: device.value, rnic: rnic.value });
    }
    Ok(found)
}

fn listeners(
    source: Source<'_>,
    tables: Vec<Section<'_>>,
    limits: &Limits,
    admin: &Admin,
    local: &Local,
) -> Result<Vec<Listener>, ConfigError> {
    let mut names = Unique::new("another listener");
    let mut binds = Unique::new("another listener");
    if local.door.is_some() {
        names.hold([LOCAL_CONNECT, LOCAL_ACCEPT], "the programs that come by local.socket");
    }
    // Of port 0, each has one of its own.
    let admin = admin.listen.filter(|listen| listen.port() != 0);
    binds.hold(admin.map(|listen| listen.to_string()), "admin.listen");
    let mut found = Vec::new();
    for mut table in tables {
        let name = table.required("name")?;
        table.rename(format!("listener.{}", name.value));
        names.insert(source, &name)?;
        let bind_text = table.required("bind")?;
        let bind =
            network::bind_address(&bind_text.value).map_err(|why| bind_text.error(source, why))?;
        binds.insert(source, &Placed { value: bind.to_string(), ..bind_text })?;
        let accept = table.word("accept", &TRANSPORTS, Protocol::Tcp)?;
        let connect = table.word("connect", &TRANSPORTS, Protocol::Tcp)?;
        if (accept, connect) == (Protocol::Smc, Protocol::Smc) {
            let why = "relaying SMC-R to SMC-R is not supported; make accept or connect \"tcp\"";
            return Err(table.error("connect", why));
        }
        let (upstream, first) = Upstreams::read(source, &mut table, bind)?;
        let preference = Preference::read(&mut table, connect)?;
        let intercept = Intercept::read(source, &mut table, &first, (bind, accept))?;
        let speaks_for = table.word("source", &intercept::SOURCES, SourceAddress::Gateway)?;
        let has_header = matches!(speaks_for, SourceAddress::ProxyV1 | SourceAddress::ProxyV2);
        if has_header && connect == Protocol::Smc {
            let why = "a PROXY header goes to a server by TCP; write connect = \"tcp\", or have \
                       the gateway at the server's host send it";
            return Err(table.error("source", why));
        }
        found.push(Listener {
            name: name.value,
            bind,
            accept,
            connect,
            upstream,
            preference,
            intercept,
            source: speaks_for,
            proxy_from: intercept::proxies(source, &mut table, accept)?,
            connect_timeout: table.duration_from(
                "connect_timeout",
                (Duration::from_millis(1), "reset every connection"),
                Duration::from_secs(5),
            )?,
            bounds: Bounds::read(source, &mut table, limits)?,
            tcp_nodelay: table.boolean("tcp_nodelay", true)?,
            tcp_keepalive: TcpKeepalive::read(&mut table)?,
            rmbe_size: smc::rmbe_size("rmbe_size", source, &mut table)?,
            backlog: table.count("backlog", 1..65_536, 4096)?,
            peers: Peers::read(source, &mut table)?,
        });
        table.finish()?;
    }
    Ok(found)
}

fn poll(mut table: Section<'_>) -> Result<Poll, ConfigError> {
    let policy = table.word("policy", &IDLE_POLICIES, IdlePolicy::Adaptive)?;
    let spin = Duration::from_micros(table.number("spin_us", 0..1_000_001, 50)?.value);
    let cores = table.numbers("cores", &(0..CORES_MAX))?;
    let cores = cores.iter().filter_map(|core| usize::try_from(core.value).ok()).collect();
    let pin = table.boolean("pin", true)?;
    let boost = table.number("boost", 0..21, BOOST.into())?.value;
    let boost = u8::try_from(boost).expect("its range was checked");
    let realtime = table.boolean("realtime", true)?;
    table.finish()?;
    Ok(Poll { policy, spin, cores, pin, boost, realtime })
}

/// Values that may occur once in the file.
struct Unique {
    /// Who has them.
    others: &'static str,
    /// Each, and who has it.
    seen: Vec<(String, &'static str)>,
}

impl Unique {
    fn new(others: &'static str) -> Self {
        Self { others, seen: Vec::new() }
    }

    /// Something else has these values.
    fn hold(&mut self, values: impl IntoIterator<Item: Into<String>>, who: &'static str) {
        self.seen.extend(values.into_iter().map(|value| (value.into(), who)));
    }

    fn insert(&mut self, source: Source<'_>, text: &Placed<String>) -> Result<(), ConfigError> {
        if let Some((value, who)) = self.seen.iter().find(|(value, _)| *value == text.value) {
            let why = format!("\"{value}\" is taken by {who}; change one of them");
            return Err(text.error(source, why));
        }
        self.seen.push((text.value.clone(), self.others));
        Ok(())
    }
}

/// More than any machine has; catches slips of the pen.
const CORES_MAX: u64 = 4096;
/// The default of `poll.boost`.
pub(crate) const BOOST: u8 = 10;
const TRANSPORTS: [(&str, Protocol); 2] = [("tcp", Protocol::Tcp), ("smc", Protocol::Smc)];
const IDLE_POLICIES: [(&str, IdlePolicy); 3] =
    [("spin", IdlePolicy::Spin), ("adaptive", IdlePolicy::Adaptive), ("block", IdlePolicy::Block)];
const CONGESTION_CONTROLS: [(&str, CongestionControl); 2] =
    [("auto", CongestionControl::Auto), ("host", CongestionControl::Host)];
const LOG_LEVELS: [(&str, LogLevel); 5] = [
    ("error", LogLevel::Error),
    ("warn", LogLevel::Warn),
    ("info", LogLevel::Info),
    ("debug", LogLevel::Debug),
    ("trace", LogLevel::Trace),
];

#[cfg(test)]
mod tests;
