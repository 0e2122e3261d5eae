//! The workloads, by their usual names, and what each measures.

pub(crate) mod crowd;
pub(crate) mod http;
pub(crate) mod open_loop;
pub(crate) mod programs;
pub(crate) mod round_trip;
pub(crate) mod short_connections;
pub(crate) mod stream;
mod window;

use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::str::FromStr;
use std::time::Duration;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use self::programs::Program;
use self::short_connections::Side;
use crate::failure::{Doing as _, Result};
use crate::latency::Latency;
use crate::readiness::{Interest, Readiness};

/// One workload. Its text form is its name in records and on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scenario {
    /// `RR-n`: n connections, each with one 64-byte request in flight; `RR-nxb`: with one of b
    /// bytes.
    RoundTrip { connections: u32, bytes: usize },
    /// `RRO-n@r`: n connections, r requests per second, however slow the answers are.
    OpenLoop { connections: u32, rate_per_s: u32 },
    /// `STR`: one stream, client to server.
    Stream { congestion: Congestion },
    /// `STR-reverse`: one stream, server to client.
    ReverseStream,
    /// `FANIN-n`: n streams at once, client to server.
    FanIn { connections: u32 },
    /// `CRR-beside-STR`: as CRR, beside a stream.
    ShortConnectionsBesideStream,
    /// `CRR`: 32 at a time: connect, request, response, close.
    ShortConnections,
    /// `CRR-sustained`: the same for at least a minute, as long as a port stays in TIME_WAIT;
    /// `CRR-sustained-client`: and clients close first, as those of databases do.
    SustainedShortConnections { closes_first: Side },
    /// `BURST-n`: n newcomers at once, each with one request.
    Burst { connections: u32 },
    /// `IDLE-n`: as RR-1, beside n idle connections.
    Idle { connections: u32 },
    /// `SCRAPED-n`: the same, while somebody reads the metrics of both gateways each second.
    Scraped { connections: u32 },
    /// `RR-32-http`: wrk against nginx, 32 keep-alive connections.
    HttpRoundTrip,
    /// `CRR-http`: wrk against nginx, 32 at a time, `Connection: close`.
    HttpShortConnections,
    /// `iperf3`, `sockperf`, `redis`, `pgbench`: another program's benchmark.
    Program(Program),
}

/// The TCP congestion control of both namespaces during a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Congestion {
    /// Whatever the host's default is; the record says which.
    HostDefault,
    /// `cubic`, scenario `STR-cubic`.
    Cubic,
}

/// A server in namespace B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    Echo,
    Sink,
    Source,
    Crr,
    Http,
    Iperf3,
    Sockperf,
    Redis,
    Postgres,
}

impl Service {
    /// Every service, in the order of its port offset.
    pub(crate) const ALL: [Self; 9] = [
        Self::Echo,
        Self::Sink,
        Self::Source,
        Self::Crr,
        Self::Http,
        Self::Iperf3,
        Self::Sockperf,
        Self::Redis,
        Self::Postgres,
    ];

    /// The offset to the base port of each program that offers the service.
    pub(crate) fn port_offset(self) -> u16 {
        match self {
            Self::Echo => 0,
            Self::Sink => 1,
            Self::Source => 2,
            Self::Crr => 3,
            Self::Http => 4,
            Self::Iperf3 => 5,
            Self::Sockperf => 6,
            Self::Redis => 7,
            Self::Postgres => 8,
        }
    }

    /// The name in configuration files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Sink => "sink",
            Self::Source => "source",
            Self::Crr => "crr",
            Self::Http => "http",
            Self::Iperf3 => "iperf3",
            Self::Sockperf => "sockperf",
            Self::Redis => "redis",
            Self::Postgres => "postgres",
        }
    }
}

/// The result of a load, in the common form of all workloads.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LoadResult {
    /// Measured time, without warm-up, in seconds.
    pub(crate) elapsed_s: f64,
    /// TCP connections opened, warm-up included.
    pub(crate) connections_opened: u64,
    /// Payload bytes moved in both directions, warm-up included.
    pub(crate) bytes_total: u64,
    /// Requests answered, warm-up included.
    pub(crate) requests_total: u64,
    /// Throughput at the receiver.
    pub(crate) gbit_per_s: Option<f64>,
    /// Answers per measured second.
    pub(crate) requests_per_s: Option<f64>,
    /// Round trips; for short connections, from connect to the server's close.
    pub(crate) latency: Option<Latency>,
    /// Connections that failed.
    pub(crate) errors: u64,
    /// For short connections: how many per second ended in each interval of 5 seconds, in order.
    #[serde(default)]
    pub(crate) per_s_each_5s: Vec<f64>,
    /// For short connections beside a stream: the throughput of the stream.
    #[serde(default)]
    pub(crate) beside_gbit_per_s: Option<f64>,
}

impl Scenario {
    /// The server this workload talks to.
    pub(crate) fn service(self) -> Service {
        match self {
            Self::RoundTrip { .. }
            | Self::OpenLoop { .. }
            | Self::Burst { .. }
            | Self::Idle { .. }
            | Self::Scraped { .. } => Service::Echo,
            Self::Stream { .. } | Self::FanIn { .. } => Service::Sink,
            Self::ReverseStream => Service::Source,
            Self::ShortConnections | Self::ShortConnectionsBesideStream => Service::Crr,
            Self::SustainedShortConnections { closes_first } => match closes_first {
                Side::Server => Service::Crr,
                Side::Client => Service::Echo,
            },
            Self::HttpRoundTrip | Self::HttpShortConnections => Service::Http,
            Self::Program(program) => program.service(),
        }
    }

    /// How many connections are open at a time.
    pub(crate) fn connections(self) -> u32 {
        match self {
            Self::RoundTrip { connections, .. }
            | Self::OpenLoop { connections, .. }
            | Self::FanIn { connections }
            | Self::Burst { connections } => connections,
            Self::Idle { connections } | Self::Scraped { connections } => connections + 1,
            Self::Stream { .. } | Self::ReverseStream => 1,
            Self::ShortConnections | Self::SustainedShortConnections { .. } => {
                short_connections::CONCURRENT
            }
            Self::ShortConnectionsBesideStream => short_connections::CONCURRENT + 1,
            Self::HttpRoundTrip | Self::HttpShortConnections => http::CONNECTIONS,
            Self::Program(program) => program.connections(),
        }
    }

    /// How long it is measured if the operator asks for `asked`.
    pub(crate) fn duration(self, asked: Duration) -> Duration {
        if self.is_sustained() { asked.max(SUSTAINED) } else { asked }
    }

    /// Whether it is the same load from its first moments to its end.
    pub(crate) fn is_steady(self) -> bool {
        // Crowds need a while to come, and some programs make so many requests, however long that
        // takes.
        let begins_late = matches!(self, Self::Burst { .. } | Self::Program(_)) || self.is_idle();
        !begins_late && self.connections() < 1_000
    }

    /// Whether almost all connections are idle.
    pub(crate) fn is_idle(self) -> bool {
        matches!(self, Self::Idle { .. } | Self::Scraped { .. })
    }

    /// Whether connections in TIME_WAIT at the end are part of the measurement.
    pub(crate) fn is_sustained(self) -> bool {
        matches!(self, Self::SustainedShortConnections { .. })
    }

    /// Whether half a round trip is a one-way latency, since no other connection delays it.
    pub(crate) fn is_single_round_trip(self) -> bool {
        matches!(self, Self::RoundTrip { connections: 1, .. })
    }

    /// Bytes of one request, or of one write of a stream. `None` for programs of others.
    pub(crate) fn message_bytes(self) -> Option<usize> {
        match self {
            Self::RoundTrip { bytes, .. } => Some(bytes),
            Self::OpenLoop { .. }
            | Self::Burst { .. }
            | Self::Idle { .. }
            | Self::Scraped { .. } => Some(round_trip::MESSAGE_BYTES),
            Self::Stream { .. } | Self::FanIn { .. } | Self::ReverseStream => {
                Some(stream::WRITE_BYTES)
            }
            Self::ShortConnections
            | Self::ShortConnectionsBesideStream
            | Self::SustainedShortConnections { .. } => Some(short_connections::REQUEST_BYTES),
            Self::HttpRoundTrip | Self::HttpShortConnections | Self::Program(_) => None,
        }
    }

    /// The congestion control both namespaces must have for this workload.
    pub(crate) fn congestion(self) -> Congestion {
        match self {
            Self::Stream { congestion } => congestion,
            Self::RoundTrip { .. }
            | Self::OpenLoop { .. }
            | Self::Burst { .. }
            | Self::Idle { .. }
            | Self::Scraped { .. }
            | Self::ReverseStream
            | Self::FanIn { .. }
            | Self::ShortConnections
            | Self::ShortConnectionsBesideStream
            | Self::SustainedShortConnections { .. }
            | Self::HttpRoundTrip
            | Self::HttpShortConnections
            | Self::Program(_) => Congestion::HostDefault,
        }
    }

    /// The program that generates the load, and its arguments. `myself` is this binary, and `at`
    /// says where services are reached.
    pub(crate) fn command(
        self,
        myself: &str,
        at: impl Fn(Service) -> SocketAddr,
        duration: Duration,
    ) -> Vec<String> {
        let target = at(self.service());
        let ours = |kind: &str, more: &[String]| {
            let seconds = duration.as_secs_f64().to_string();
            let target = target.to_string();
            let fixed =
                [myself, "load", kind, "--target", &target, "--seconds", &seconds, "--json"];
            fixed.iter().map(|s| (*s).to_owned()).chain(more.iter().cloned()).collect()
        };
        match self {
            Self::RoundTrip { connections, bytes } => ours(
                "rr",
                &[
                    "--connections".into(),
                    connections.to_string(),
                    "--bytes".into(),
                    bytes.to_string(),
                ],
            ),
            Self::OpenLoop { connections, rate_per_s } => ours(
                "rr",
                &[
                    "--connections".into(),
                    connections.to_string(),
                    "--rate".into(),
                    rate_per_s.to_string(),
                ],
            ),
            Self::Burst { connections } => {
                ours("burst", &["--connections".into(), connections.to_string()])
            }
            Self::Idle { connections } | Self::Scraped { connections } => {
                ours("idle", &["--connections".into(), connections.to_string()])
            }
            Self::Stream { .. } => ours("str", &[]),
            Self::ReverseStream => ours("str", &["--reverse".into()]),
            Self::FanIn { connections } => {
                ours("str", &["--connections".into(), connections.to_string()])
            }
            Self::ShortConnectionsBesideStream => {
                ours("crr", &["--beside".into(), at(Service::Sink).to_string()])
            }
            Self::ShortConnections
            | Self::SustainedShortConnections { closes_first: Side::Server } => ours("crr", &[]),
            Self::SustainedShortConnections { closes_first: Side::Client } => {
                ours("crr", &["--closes-first".into()])
            }
            Self::HttpRoundTrip => http::wrk(target, duration, http::KeepAlive::Yes),
            Self::HttpShortConnections => http::wrk(target, duration, http::KeepAlive::No),
            Self::Program(program) => program.load(target, duration),
        }
    }

    /// Parses the output of the program of [`Scenario::command`].
    ///
    /// # Errors
    ///
    /// With a sentence that says what is missing.
    pub(crate) fn parse(self, output: &str) -> std::result::Result<LoadResult, String> {
        match self {
            Self::RoundTrip { .. }
            | Self::OpenLoop { .. }
            | Self::Burst { .. }
            | Self::Idle { .. }
            | Self::Scraped { .. }
            | Self::Stream { .. }
            | Self::ReverseStream
            | Self::FanIn { .. }
            | Self::ShortConnections
            | Self::ShortConnectionsBesideStream
            | Self::SustainedShortConnections { .. } => {
                serde_json::from_str(output.trim()).map_err(|error| error.to_string())
            }
            Self::HttpRoundTrip => http::parse(output, http::KeepAlive::Yes),
            Self::HttpShortConnections => http::parse(output, http::KeepAlive::No),
            Self::Program(program) => program.parse(output),
        }
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RoundTrip { connections, bytes: round_trip::MESSAGE_BYTES } => {
                write!(f, "RR-{connections}")
            }
            Self::RoundTrip { connections, bytes } => write!(f, "RR-{connections}x{bytes}"),
            Self::OpenLoop { connections, rate_per_s } => {
                write!(f, "RRO-{connections}@{rate_per_s}")
            }
            Self::Stream { congestion: Congestion::HostDefault } => f.write_str("STR"),
            Self::Stream { congestion: Congestion::Cubic } => f.write_str("STR-cubic"),
            Self::ReverseStream => f.write_str("STR-reverse"),
            Self::FanIn { connections } => write!(f, "FANIN-{connections}"),
            Self::ShortConnections => f.write_str("CRR"),
            Self::ShortConnectionsBesideStream => f.write_str("CRR-beside-STR"),
            Self::SustainedShortConnections { closes_first: Side::Server } => {
                f.write_str("CRR-sustained")
            }
            Self::SustainedShortConnections { closes_first: Side::Client } => {
                f.write_str("CRR-sustained-client")
            }
            Self::Burst { connections } => write!(f, "BURST-{connections}"),
            Self::Idle { connections } => write!(f, "IDLE-{connections}"),
            Self::Scraped { connections } => write!(f, "SCRAPED-{connections}"),
            Self::HttpRoundTrip => f.write_str("RR-32-http"),
            Self::HttpShortConnections => f.write_str("CRR-http"),
            Self::Program(program) => f.write_str(program.name()),
        }
    }
}

impl FromStr for Scenario {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let unknown = || {
            format!(
                "unknown scenario {text:?}: RR-<n>, RR-<n>x<bytes>, RRO-<n>@<requests per second>, \
                 BURST-<n>, IDLE-<n>, SCRAPED-<n>, STR, STR-cubic, STR-reverse, FANIN-<n>, CRR, \
                 CRR-beside-STR, CRR-sustained, CRR-sustained-client, RR-32-http, CRR-http, \
                 iperf3, sockperf, redis or pgbench"
            )
        };
        let positive = |digits: &str| match digits.parse() {
            Ok(0) | Err(_) => Err(unknown()),
            Ok(number) => Ok(number),
        };
        match text {
            "STR" => return Ok(Self::Stream { congestion: Congestion::HostDefault }),
            "STR-cubic" => return Ok(Self::Stream { congestion: Congestion::Cubic }),
            "STR-reverse" => return Ok(Self::ReverseStream),
            "CRR" => return Ok(Self::ShortConnections),
            "CRR-beside-STR" => return Ok(Self::ShortConnectionsBesideStream),
            "CRR-sustained" => {
                return Ok(Self::SustainedShortConnections { closes_first: Side::Server });
            }
            "CRR-sustained-client" => {
                return Ok(Self::SustainedShortConnections { closes_first: Side::Client });
            }
            "RR-32-http" => return Ok(Self::HttpRoundTrip),
            "CRR-http" => return Ok(Self::HttpShortConnections),
            _ => {}
        }
        if let Some(program) = Program::ALL.into_iter().find(|program| program.name() == text) {
            return Ok(Self::Program(program));
        }
        if let Some(rest) = text.strip_prefix("RR-") {
            let (connections, bytes) = match rest.split_once('x') {
                None => (rest, round_trip::MESSAGE_BYTES),
                Some((connections, bytes)) => match bytes.parse() {
                    Ok(bytes @ 1..=round_trip::MESSAGE_BYTES_MAX) => (connections, bytes),
                    Ok(_) | Err(_) => return Err(unknown()),
                },
            };
            return Ok(Self::RoundTrip { connections: positive(connections)?, bytes });
        }
        if let Some(connections) = text.strip_prefix("BURST-") {
            return Ok(Self::Burst { connections: positive(connections)? });
        }
        if let Some(connections) = text.strip_prefix("FANIN-") {
            return Ok(Self::FanIn { connections: positive(connections)? });
        }
        if let Some(connections) = text.strip_prefix("SCRAPED-") {
            return Ok(Self::Scraped { connections: positive(connections)? });
        }
        if let Some(connections) = text.strip_prefix("IDLE-") {
            return Ok(Self::Idle { connections: positive(connections)? });
        }
        let (connections, rate) =
            text.strip_prefix("RRO-").and_then(|rest| rest.split_once('@')).ok_or_else(unknown)?;
        Ok(Self::OpenLoop { connections: positive(connections)?, rate_per_s: positive(rate)? })
    }
}

/// Begins to connect to `target`, and watches for the end of that: the socket is writable then.
fn begin_connect(target: SocketAddr, readiness: &Readiness, token: u64) -> Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(target), Type::STREAM.nonblocking(), None)
        .doing(|| "socket".into())?;
    match socket.connect(&target.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {}
        Err(error) => return Err(error).doing(|| format!("connecting to {target}")),
    }
    let stream = TcpStream::from(socket);
    readiness.add(&stream, token, Interest::Write)?;
    Ok(stream)
}

/// Linux keeps a port in TIME_WAIT for this long. After that, as many ports become free as are
/// used.
const SUSTAINED: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    /// A name in a record, given to `--scenarios`, must repeat that measurement.
    #[test]
    fn names_parse_back_to_the_same_value() {
        for name in [
            "RR-1",
            "RR-32",
            "RR-1x1",
            "BURST-9000",
            "IDLE-9000",
            "SCRAPED-9000",
            "RR-8x1048576",
            "RRO-32@50000",
            "STR",
            "STR-cubic",
            "STR-reverse",
            "CRR",
            "CRR-sustained",
            "CRR-sustained-client",
            "RR-32-http",
            "CRR-http",
            "FANIN-100",
            "CRR-beside-STR",
            "iperf3",
            "sockperf",
            "redis",
            "pgbench",
        ] {
            assert_eq!(name.parse::<Scenario>().unwrap().to_string(), name);
        }
        for wrong in [
            "RR",
            "BURST-",
            "IDLE-0",
            "SCRAPED-0",
            "RR-0",
            "RR-x",
            "RR-1x0",
            "RR-1x1048577",
            "RRO-3",
            "RRO-3@0",
            "str",
            "",
        ] {
            assert!(wrong.parse::<Scenario>().is_err(), "{wrong}");
        }
    }

    /// Two services on one port would measure the wrong server.
    #[test]
    fn services_have_ports_of_their_own() {
        for (index, service) in Service::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(service.port_offset()), index);
        }
    }
}
