//! CRR: 32 at a time, each: connect, 64-byte request, 1 KiB response, the server closes.
//! CRR-beside-STR: the same beside a stream, so that both share everything.
//!
//! Estimate, direct: SYN, SYN-ACK, ACK, request, response, two FINs and a dozen system calls on
//! each side, 55 µs of CPU over two cores: 35 k/s. A HAProxy pair triples the connections: 16 k/s.
//! Beside a stream: half of the processor for each, if nobody is favoured.
//!
//! Budget, in µs of CPU for one connection, as the HAProxy pair needs them and the gateway pair:
//!
//! | | HAProxy | smcgate | system calls of ours |
//! |---|---|---|---|
//! | load and server | 80 | 87 | – |
//! | two `connect`, with the handshakes | 43 | 52 | 2 |
//! | four `close`, two `shutdown` | 52 | 55 | 6 |
//! | data on near sockets: `recv`, `send` | 28 | 20 | 6 |
//! | three CLC messages | – | 26 | 6 |
//! | 7.6 packets of RoCE in 1.6 trains | – | 18 | 2.7 |
//! | `accept4`, `socket`, options, addresses | 17 | 26 | 28 |
//! | eBPF: option 254, loopback | – | 9.5 | 5 |
//! | waiting: `epoll`, signals between threads | 10 | 18 | 9 |
//! | user space | 19 | 42 | – |
//! | entry and exit of calls, the filter of calls | 6 | 16 | – |
//! | sum (shares of a profile that runs beside it) | 255 | 370 | 65 |
//!
//! Calls are those of c5b80e2; since then nine of them, for addresses, options and eBPF, are left
//! out. So a rendezvous makes a connection dearer by its messages (26), packets (18), eBPF (10) and
//! a second thread at each end, whose user space comes on top (23): some 0.69 of HAProxy's rate.
//! Without any of these it would be level with HAProxy, whose three TCP connections it has as well.
//!
//! Since then an SMC-R connection that is over carries the next one, so that most have neither a
//! rendezvous nor a TCP connection between the gateways. Of the table that leaves out the messages
//! (26), half of `connect` (26), of `close` (27) and of `accept4` and options (13), most of eBPF
//! (7) and a third of the packets (6): 265, or 0.96 of HAProxy's 255.
//!
//! The server closes first, as HTTP servers do, so that TIME_WAIT is on its side and the load has
//! enough ports for any rate.
//!
//! In CRR-sustained-client clients close first, and the server echoes the request. Whoever closes
//! first keeps its port for a minute, so with the kernel's defaults it can make 470 connections per
//! second to one address, unless that is on its own host, where ports are used again after a
//! second. A proxy passes the order on, and so is the one who closes first towards the other host.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use super::round_trip::{PATIENCE, WARM_UP};
use super::{LoadResult, begin_connect, stream};
use crate::clock::{now_ns, ns};
use crate::failure::{Failure, Result};
use crate::latency::Recorder;
use crate::readiness::{Interest, Readiness};

/// Bytes of a request.
pub(crate) const REQUEST_BYTES: usize = 64;
/// Bytes of a response.
pub(crate) const RESPONSE_BYTES: usize = 1024;
/// Connections open at a time by default.
pub(crate) const CONCURRENT: u32 = 32;

/// Who closes a connection first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    /// After its answer.
    Server,
}

/// The interval of each rate of a sustained load.
const INTERVAL: Duration = Duration::from_secs(5);

/// How long to wait for a port.
const PORTS_AGAIN: Duration = Duration::from_millis(1);

/// More failed connections than this end the run, since its figures would be meaningless.
const ERRORS_TOLERATED: u64 = 1000;

/// One connection of the load, from connect to the server's close, or to its answer.
struct Exchange {
    stream: TcpStream,
    closes_first: Side,
    started_at: u64,
    received_bytes: usize,
    phase: Phase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Connecting,
    Receiving,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Unfinished,
    Finished,
    Failed,
}

/// Keeps `concurrent` exchanges going for `duration` after a warm-up.
///
/// # Errors
///
/// When nothing moves for 5 seconds. When a thousand connections have failed, unless clients close
/// first and some have not: then ports may run out, which is part of the result.
pub(crate) fn run(
    target: SocketAddr,
    closes_first: Side,
    concurrent: u32,
    duration: Duration,
) -> Result<LoadResult> {
    let mut readiness = Readiness::new()?;
    let record_from = now_ns() + ns(WARM_UP);
    let until = record_from + ns(duration);
    let mut exchanges = Vec::new();
    for token in 0..u64::from(concurrent) {
        exchanges.push(Exchange::begin(target, closes_first, &readiness, token)?);
    }
    let mut latencies = Recorder::new();
    let mut opened = u64::from(concurrent);
    let (mut finished, mut errors) = (0_u64, 0_u64);
    let mut intervals = Vec::new();
    let mut ready = Vec::new();
    let ended_at = loop {
        readiness.wait(PATIENCE, &mut ready)?;
        if ready.is_empty() {
            return Err(Failure::new(format!("no connection moved within {PATIENCE:?}")));
        }
        for &token in &ready {
            let index = usize::try_from(token).expect("tokens are our own indexes");
            match exchanges[index].advance(&readiness, token)? {
                Progress::Unfinished => continue,
                Progress::Failed => errors += 1,
                Progress::Finished => {
                    finished += 1;
                    let now = now_ns();
                    if now >= record_from {
                        latencies.record(now - exchanges[index].started_at);
                        count(&mut intervals, now - record_from);
                    }
                }
            }
            let (begun, failed) =
                Exchange::begin_by(until, target, closes_first, &readiness, token);
            exchanges[index] = begun?;
            errors += failed;
            opened += 1;
        }
        let is_meaningless = closes_first == Side::Server || finished == 0;
        if errors > ERRORS_TOLERATED && is_meaningless {
            return Err(Failure::new(format!("{errors} of {opened} connections failed")));
        }
        let now = now_ns();
        if now >= until {
            break now;
        }
    };
    let elapsed_s = (ended_at - record_from) as f64 / 1e9;
    let recorded: u64 = intervals.iter().sum();
    // The rate of an incomplete interval would be too low.
    intervals.resize(interval_at(ended_at - record_from), 0);
    let per_s = |count: u64| count as f64 / INTERVAL.as_secs_f64();
    Ok(LoadResult {
        elapsed_s,
        connections_opened: opened,
        bytes_total: finished * (REQUEST_BYTES + closes_first.response_bytes()) as u64,
        requests_total: finished,
        requests_per_s: Some(recorded as f64 / elapsed_s),
        latency: latencies.summary(),
        errors,
        per_s_each_5s: intervals.into_iter().map(per_s).collect(),
        ..LoadResult::default()
    })
}

/// The same beside a stream to `sink`.
///
/// # Errors
///
/// As [`run`] and [`stream::send`].
pub(crate) fn run_beside(
    target: SocketAddr,
    sink: SocketAddr,
    concurrent: u32,
    duration: Duration,
) -> Result<LoadResult> {
    // The stream needs no warm-up, and must not end first.
    let stream = thread::spawn(move || stream::send(sink, None, duration + WARM_UP));
    let short = run(target, Side::Server, concurrent, duration)?;
    let stream = stream.join().expect("it returns its failures")?;
    Ok(LoadResult {
        connections_opened: short.connections_opened + 1,
        bytes_total: short.bytes_total + stream.bytes_total,
        beside_gbit_per_s: stream.gbit_per_s,
        ..short
    })
}

/// Counts a connection that ended `after_ns` nanoseconds after the warm-up.
fn count(intervals: &mut Vec<u64>, after_ns: u64) {
    let interval = interval_at(after_ns);
    intervals.resize(intervals.len().max(interval + 1), 0);
    intervals[interval] += 1;
}

fn interval_at(after_ns: u64) -> usize {
    usize::try_from(after_ns / ns(INTERVAL)).expect("years have fewer intervals")
}

impl Side {
    /// What a client gets: an answer, or its own request.
    fn response_bytes(self) -> usize {
        match self {
            Self::Server => RESPONSE_BYTES,
            Self::Client => REQUEST_BYTES,
        }
    }
}

impl Exchange {
    fn begin(
        target: SocketAddr,
        closes_first: Side,
        readiness: &Readiness,
        token: u64,
    ) -> Result<Self> {
        let started_at = now_ns();
        let stream = begin_connect(target, readiness, token)?;
        let phase = Phase::Connecting;
        Ok(Self { stream, closes_first, started_at, received_bytes: 0, phase })
    }

    /// The same, but a client that closes first waits until `until` for a port. Returns how many
    /// attempts have failed, too.
    fn begin_by(
        until: u64,
        target: SocketAddr,
        closes_first: Side,
        readiness: &Readiness,
        token: u64,
    ) -> (Result<Self>, u64) {
        let mut failed = 0;
        loop {
            match Self::begin(target, closes_first, readiness, token) {
                Err(_) if closes_first == Side::Client && now_ns() < until => {
                    failed += 1;
                    thread::sleep(PORTS_AGAIN);
                }
                begun => return (begun, failed),
            }
        }
    }

    fn advance(&mut self, readiness: &Readiness, token: u64) -> Result<Progress> {
        match self.phase {
            Phase::Connecting => {
                let request = [b'q'; REQUEST_BYTES];
                // If the connect was refused, this first write returns the error.
                match self.stream.write(&request) {
                    Ok(REQUEST_BYTES) => {}
                    Ok(_) | Err(_) => return Ok(Progress::Failed),
                }
                self.phase = Phase::Receiving;
                readiness.change(&self.stream, token, Interest::Read)?;
                Ok(Progress::Unfinished)
            }
            Phase::Receiving => Ok(self.receive()),
        }
    }

    fn receive(&mut self) -> Progress {
        let mut response = [0; 2 * RESPONSE_BYTES];
        let whole = self.closes_first.response_bytes();
        loop {
            if self.closes_first == Side::Client && self.received_bytes == whole {
                return Progress::Finished;
            }
            match self.stream.read(&mut response) {
                Ok(0) if self.received_bytes == whole => return Progress::Finished,
                Ok(0) => return Progress::Failed,
                Ok(bytes) => self.received_bytes += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return Progress::Unfinished;
                }
                Err(_) => return Progress::Failed,
            }
        }
    }
}
