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

use super::window::{LOOK_EVERY, PATIENCE, Tally, WARM_UP, Window, is_late};
use super::{LoadResult, begin_connect, stream};
use crate::clock::{now_ns, ns};
use crate::failure::{Failure, Result};
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

/// Keeps `concurrent` exchanges going for `duration` after a warm-up, then waits for the last ones.
/// One that is not over within 5 seconds is an error.
///
/// # Errors
///
/// When none is over within 5 seconds. When a thousand connections have failed, unless clients
/// close first and some have not: then ports may run out, which is part of the result.
pub(crate) fn run(
    target: SocketAddr,
    closes_first: Side,
    concurrent: u32,
    duration: Duration,
) -> Result<LoadResult> {
    let mut readiness = Readiness::new()?;
    let mut load = ShortConnections {
        target,
        closes_first,
        window: Window::begin(duration),
        exchanges: (0..concurrent).map(|_| None).collect(),
        port_at: 0,
        tally: Tally::new(),
        intervals: Vec::new(),
        opened: 0,
        errors: 0,
        late_in_a_row: 0,
    };
    for index in 0..load.exchanges.len() {
        let exchange = Exchange::begin(target, closes_first, &readiness, index as u64)?;
        load.exchanges[index] = Some(exchange);
        load.opened += 1;
    }
    let mut ready = Vec::new();
    while load.is_waiting() {
        readiness.wait(load.pause(), &mut ready)?;
        for &token in &ready {
            let index = usize::try_from(token).expect("tokens are our own indexes");
            load.advance(&readiness, index)?;
        }
        load.begin_where_none_is(&readiness)?;
        load.give_up_late(&readiness)?;
        load.check()?;
    }
    load.result()
}

/// The state of the load.
struct ShortConnections {
    target: SocketAddr,
    closes_first: Side,
    window: Window,
    /// None where the client waits for a port, and at the end.
    exchanges: Vec<Option<Exchange>>,
    /// When to try again to get a port.
    port_at: u64,
    tally: Tally,
    /// How many were over in each [`INTERVAL`] of the window.
    intervals: Vec<u64>,
    opened: u64,
    errors: u64,
    /// How many were given up since the last one that was answered.
    late_in_a_row: u64,
}

impl ShortConnections {
    fn is_waiting(&self) -> bool {
        self.window.is_open(now_ns()) || self.exchanges.iter().any(Option::is_some)
    }

    /// How long to wait for events.
    fn pause(&self) -> Duration {
        let lacks_port = self.exchanges.iter().any(Option::is_none);
        if lacks_port { PORTS_AGAIN } else { LOOK_EVERY }
    }

    fn advance(&mut self, readiness: &Readiness, index: usize) -> Result<()> {
        let Some(exchange) = &mut self.exchanges[index] else { return Ok(()) };
        match exchange.advance(readiness, index as u64)? {
            Progress::Unfinished => return Ok(()),
            Progress::Failed => self.errors += 1,
            Progress::Finished => {
                let now = now_ns();
                self.tally.count(&self.window, exchange.started_at, now);
                self.late_in_a_row = 0;
                if self.window.measures(now) {
                    count(&mut self.intervals, now - self.window.from());
                }
            }
        }
        self.replace(readiness, index)
    }

    /// Ends an exchange, and begins the next one unless the time is over. A client that closes
    /// first may have to wait for a port.
    fn replace(&mut self, readiness: &Readiness, index: usize) -> Result<()> {
        let now = now_ns();
        if !self.window.is_open(now) || now < self.port_at {
            self.exchanges[index] = None;
            return Ok(());
        }
        let begun = Exchange::begin(self.target, self.closes_first, readiness, index as u64);
        self.exchanges[index] = match begun {
            Err(_) if self.closes_first == Side::Client => {
                self.errors += 1;
                self.port_at = now + ns(PORTS_AGAIN);
                None
            }
            begun => Some(begun?),
        };
        self.opened += u64::from(self.exchanges[index].is_some());
        Ok(())
    }

    fn begin_where_none_is(&mut self, readiness: &Readiness) -> Result<()> {
        for index in 0..self.exchanges.len() {
            if self.exchanges[index].is_none() {
                self.replace(readiness, index)?;
            }
        }
        Ok(())
    }

    /// Counts exchanges that take longer than [`PATIENCE`] as errors, and replaces them.
    fn give_up_late(&mut self, readiness: &Readiness) -> Result<()> {
        let now = now_ns();
        if !self.window.must_look(now) {
            return Ok(());
        }
        for index in 0..self.exchanges.len() {
            let exchange = self.exchanges[index].as_ref();
            if exchange.is_some_and(|exchange| is_late(exchange.started_at, now)) {
                self.errors += 1;
                self.late_in_a_row += 1;
                self.replace(readiness, index)?;
            }
        }
        Ok(())
    }

    /// Fails where figures would be meaningless.
    fn check(&self) -> Result<()> {
        if self.late_in_a_row >= self.exchanges.len() as u64 {
            let late = self.late_in_a_row;
            let why = format!("{late} connections in a row had no answer within {PATIENCE:?}");
            return Err(Failure::new(why));
        }
        let is_meaningless = self.closes_first == Side::Server || self.tally.answered == 0;
        if self.errors > ERRORS_TOLERATED && is_meaningless {
            let Self { errors, opened, .. } = self;
            return Err(Failure::new(format!("{errors} of {opened} connections failed")));
        }
        Ok(())
    }

    fn result(mut self) -> Result<LoadResult> {
        let Tally { latencies, in_window, answered, .. } = &self.tally;
        if *answered == 0 {
            return Err(Failure::new(format!("all of {} connections failed", self.opened)));
        }
        // The rate of an incomplete interval would be too low.
        self.intervals.resize(interval_at(self.window.elapsed_ns()), 0);
        let per_s = |count: u64| count as f64 / INTERVAL.as_secs_f64();
        let elapsed_s = self.window.elapsed_ns() as f64 / 1e9;
        Ok(LoadResult {
            elapsed_s,
            connections_opened: self.opened,
            bytes_total: answered * (REQUEST_BYTES + self.closes_first.response_bytes()) as u64,
            requests_total: *answered,
            requests_per_s: Some(*in_window as f64 / elapsed_s),
            latency: latencies.summary(),
            errors: self.errors,
            per_s_each_5s: self.intervals.into_iter().map(per_s).collect(),
            ..LoadResult::default()
        })
    }
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
