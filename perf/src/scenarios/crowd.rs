//! Many connections at once: bursts of newcomers, and a crowd of idle ones beside a busy one.
//!
//! Estimate of a burst, over a gateway pair: as CRR, 110 µs of CPU over two cores for each
//! connection, without its end; 9,000 take half a second, if no SYN is lost: a lost one comes again
//! after a second. Estimate of idle connections: they cost memory, and nothing else; the round trip
//! beside them takes as long as alone.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::round_trip::{self, MESSAGE_BYTES, result};
use super::window::PATIENCE;
use super::{LoadResult, begin_connect};
use crate::clock::now_ns;
use crate::failure::{Doing as _, Failure, Result};
use crate::latency::Recorder;
use crate::readiness::{Interest, Readiness};

/// One who comes in a burst: it connects, sends a request, and waits for its answer.
struct Newcomer {
    stream: TcpStream,
    started_at: u64,
    asked: bool,
    received_bytes: usize,
}

impl Newcomer {
    fn begin(target: SocketAddr, readiness: &Readiness, token: u64) -> Result<Self> {
        let started_at = now_ns();
        let stream = begin_connect(target, readiness, token)?;
        Ok(Self { stream, started_at, asked: false, received_bytes: 0 })
    }

    /// Goes on. Returns whether the answer is complete.
    fn advance(&mut self, readiness: &Readiness, token: u64) -> Result<bool> {
        if !self.asked {
            // If the connect was refused, this first write returns the error.
            let sent = self.stream.write(&REQUEST).doing(|| "a newcomer's request".into())?;
            if sent < MESSAGE_BYTES {
                return Err(Failure::new("the buffer of a new socket has no room"));
            }
            self.asked = true;
            readiness.change(&self.stream, token, Interest::Read)?;
            return Ok(false);
        }
        let mut answer = [0; MESSAGE_BYTES];
        match self.stream.read(&mut answer[self.received_bytes..]) {
            Ok(0) => return Err(Failure::new("the server closed a newcomer's connection")),
            Ok(bytes) => {
                let range = self.received_bytes..self.received_bytes + bytes;
                if answer[range.clone()] != REQUEST[range] {
                    return Err(Failure::new("an answer is not its request"));
                }
                self.received_bytes += bytes;
            }
            Err(error) => return Err(error).doing(|| "a newcomer's answer".into()),
        }
        Ok(self.received_bytes == MESSAGE_BYTES)
    }
}

/// Opens `connections` connections without waiting for any, each with one request. All stay open
/// until each has its answer. A round trip here begins with the connect.
///
/// # Errors
///
/// When a connection fails, or nothing moves for 5 seconds.
pub(crate) fn burst(target: SocketAddr, connections: u32) -> Result<LoadResult> {
    let (readiness, newcomers, latencies, elapsed_ns) = crowd(target, connections)?;
    drop((readiness, newcomers));
    let all = u64::from(connections);
    let counts = (all, all, all * 2 * MESSAGE_BYTES as u64);
    Ok(result(connections, &latencies, counts, elapsed_ns))
}

/// Measures round trips on one connection for `duration`, beside `connections` that have been idle
/// for as long as `settle`.
///
/// # Errors
///
/// As [`burst`] and [`round_trip::run`]; also when idle connections have ended meanwhile.
pub(crate) fn idle(
    target: SocketAddr,
    connections: u32,
    settle: Duration,
    duration: Duration,
) -> Result<LoadResult> {
    let (mut readiness, newcomers, ..) = crowd(target, connections)?;
    std::thread::sleep(settle);
    let beside = round_trip::run(target, 1, MESSAGE_BYTES, duration)?;
    // Nothing was sent to them, so any event is an end. Figures beside connections that no longer
    // exist would be those of a smaller crowd.
    let mut ended = Vec::new();
    readiness.wait(Duration::ZERO, &mut ended)?;
    if !ended.is_empty() {
        return Err(Failure::new("idle connections were ended meanwhile"));
    }
    drop((readiness, newcomers));
    let all = u64::from(connections);
    Ok(LoadResult {
        connections_opened: beside.connections_opened + all,
        requests_total: beside.requests_total + all,
        bytes_total: beside.bytes_total + all * 2 * MESSAGE_BYTES as u64,
        ..beside
    })
}

/// Opens connections at once, and lets each send a request. Returns them, how long each took, and
/// how long all took.
fn crowd(
    target: SocketAddr,
    connections: u32,
) -> Result<(Readiness, Vec<Newcomer>, Recorder, u64)> {
    let mut readiness = Readiness::new()?;
    let began = now_ns();
    let begin = |token| Newcomer::begin(target, &readiness, token);
    let mut newcomers: Vec<_> = (0..u64::from(connections)).map(begin).collect::<Result<_>>()?;
    let mut latencies = Recorder::new();
    let mut ready = Vec::new();
    let mut left = connections;
    while left > 0 {
        readiness.wait(PATIENCE, &mut ready)?;
        if ready.is_empty() {
            let why = format!("{left} of {connections} newcomers wait after {PATIENCE:?}");
            return Err(Failure::new(why));
        }
        for &token in &ready {
            let index = usize::try_from(token).expect("tokens are our own indexes");
            let newcomer = &mut newcomers[index];
            if newcomer.advance(&readiness, token)? {
                latencies.record(now_ns() - newcomer.started_at);
                left -= 1;
            }
        }
    }
    Ok((readiness, newcomers, latencies, now_ns() - began))
}

const REQUEST: [u8; MESSAGE_BYTES] = [b'n'; MESSAGE_BYTES];
/// How long a crowd is left alone before anything is measured. Proxies may then take memory from
/// idle connections, and those that give way to others forget how busy the crowd has made the host.
pub(crate) const SETTLE: Duration = Duration::from_secs(20);
