//! The workloads, by their usual names, and what each measures.

pub(crate) mod crowd;
pub(crate) mod http;
pub(crate) mod open_loop;
pub(crate) mod round_trip;
pub(crate) mod short_connections;
pub(crate) mod stream;

use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::str::FromStr;
use std::time::Duration;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

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
    /// `CRR`: 32 at a time: connect, request, response, close.
    ShortConnections,
    /// `CRR-sustained`: the same for at least a minute, as long as a port stays in TIME_WAIT.
    SustainedShortConnections,
    /// `BURST-n`: n newcomers at once, each with one request.
    Burst { connections: u32 },
    /// `IDLE-n`: as RR-1, beside n idle connections.
    Idle { connections: u32 },
    /// `RR-32-http`: wrk against nginx, 32 keep-alive connections.
    HttpRoundTrip,
    /// `CRR-http`: wrk against nginx, 32 at a time, `Connection: close`.
    HttpShortConnections,
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
}

impl Service {
    /// Every service, in the order of its port offset.
    pub(crate) const ALL: [Self; 5] = [Self::Echo, Self::Sink, Self::Source, Self::Crr, Self::Http];

    /// The offset to the base port of each program that offers the service.
    pub(crate) fn port_offset(self) -> u16 {
        match self {
            Self::Echo => 0,
            Self::Sink => 1,
            Self::Source => 2,
            Self::Crr => 3,
            Self::Http => 4,
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
        }
    }
}

/// The result of a load, in the common form of all workloads.
#[derive(Clone, Debug, Serialize, Deserialize)]
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
}

impl Scenario {
    /// The server this workload talks to.
    pub(crate) fn service(self) -> Service {
        match self {
            Self::RoundTrip { .. }
            | Self::OpenLoop { .. }
            | Self::Burst { .. }
            | Self::Idle { .. } => Service::Echo,
            Self::Stream { .. } => Service::Sink,
            Self::ReverseStream => Service::Source,
            Self::ShortConnections | Self::SustainedShortConnections => Service::Crr,
            Self::HttpRoundTrip | Self::HttpShortConnections => Service::Http,
        }
    }

    /// How many connections are open at a time.
    pub(crate) fn connections(self) -> u32 {
        match self {
            Self::RoundTrip { connections, .. }
            | Self::OpenLoop { connections, .. }
            | Self::Burst { connections } => connections,
            Self::Idle { connections } => connections + 1,
            Self::Stream { .. } | Self::ReverseStream => 1,
            Self::ShortConnections | Self::SustainedShortConnections => {
                short_connections::CONCURRENT
            }
            Self::HttpRoundTrip | Self::HttpShortConnections => http::CONNECTIONS,
        }
    }

    /// How long it is measured if the operator asks for `asked`.
    pub(crate) fn duration(self, asked: Duration) -> Duration {
        if self.is_sustained() { asked.max(SUSTAINED) } else { asked }
    }

    /// Whether connections in TIME_WAIT at the end are part of the measurement.
    pub(crate) fn is_sustained(self) -> bool {
        self == Self::SustainedShortConnections
    }

    /// Whether half a round trip is a one-way latency, since no other connection delays it.
    pub(crate) fn is_single_round_trip(self) -> bool {
        matches!(self, Self::RoundTrip { connections: 1, .. })
    }

    /// Bytes of one request, or of one write of a stream. `None` for HTTP.
    pub(crate) fn message_bytes(self) -> Option<usize> {
        match self {
            Self::RoundTrip { bytes, .. } => Some(bytes),
            Self::OpenLoop { .. } | Self::Burst { .. } | Self::Idle { .. } => {
                Some(round_trip::MESSAGE_BYTES)
            }
            Self::Stream { .. } | Self::ReverseStream => Some(stream::WRITE_BYTES),
            Self::ShortConnections | Self::SustainedShortConnections => {
                Some(short_connections::REQUEST_BYTES)
            }
            Self::HttpRoundTrip | Self::HttpShortConnections => None,
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
            | Self::ReverseStream
            | Self::ShortConnections
            | Self::SustainedShortConnections
            | Self::HttpRoundTrip
            | Self::HttpShortConnections => Congestion::HostDefault,
        }
    }

    /// The program that generates the load, and its arguments. `myself` is this binary.
    pub(crate) fn command(
        self,
        myself: &str,
        target: SocketAddr,
        duration: Duration,
    ) -> Vec<String> {
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
            Self::Idle { connections } => {
                ours("idle", &["--connections".into(), connections.to_string()])
            }
            Self::Stream { .. } => ours("str", &[]),
            Self::ReverseStream => ours("str", &["--reverse".into()]),
            Self::ShortConnections | Self::SustainedShortConnections => ours("crr", &[]),
            Self::HttpRoundTrip => http::wrk(target, duration, http::KeepAlive::Yes),
            Self::HttpShortConnections => http::wrk(target, duration, http::KeepAlive::No),
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
            | Self::Stream { .. }
            | Self::ReverseStream
            | Self::ShortConnections
            | Self::SustainedShortConnections => {
                serde_json::from_str(output.trim()).map_err(|error| error.to_string())
            }
            Self::HttpRoundTrip => http::parse(output, http::KeepAlive::Yes),
            Self::HttpShortConnections => http::parse(output, http::KeepAlive::No),
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
            Self::ShortConnections => f.write_str("CRR"),
            Self::SustainedShortConnections => f.write_str("CRR-sustained"),
            Self::Burst { connections } => write!(f, "BURST-{connections}"),
            Self::Idle { connections } => write!(f, "IDLE-{connections}"),
            Self::HttpRoundTrip => f.write_str("RR-32-http"),
            Self::HttpShortConnections => f.write_str("CRR-http"),
        }
    }
}

impl FromStr for Scenario {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let unknown = || {
            format!(
                "unknown scenario {text:?}: RR-<n>, RR-<n>x<bytes>, RRO-<n>@<requests per second>, \
                 BURST-<n>, IDLE-<n>, STR, STR-cubic, STR-reverse, CRR, CRR-sustained, RR-32-http \
                 or CRR-http"
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
            "CRR-sustained" => return Ok(Self::SustainedShortConnections),
            "RR-32-http" => return Ok(Self::HttpRoundTrip),
            "CRR-http" => return Ok(Self::HttpShortConnections),
            _ => {}
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
            "RR-8x1048576",
            "RRO-32@50000",
            "STR",
            "STR-cubic",
            "STR-reverse",
            "CRR",
            "CRR-sustained",
            "RR-32-http",
            "CRR-http",
        ] {
            assert_eq!(name.parse::<Scenario>().unwrap().to_string(), name);
        }
        for wrong in [
            "RR",
            "BURST-",
            "IDLE-0",
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
