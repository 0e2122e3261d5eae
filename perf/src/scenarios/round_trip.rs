//! RR(n): n connections, each with one 64-byte request in flight. Every round trip is recorded.
//!
//! Estimate, one connection, direct over veth: write 3 µs + softirq 3 + wake-up of the server 15
//! (74 when its core sleeps deeply) + read 2 + epoll 1, twice = 48 to 150 µs round trip. A HAProxy
//! pair adds two more wake-ups and socket pairs each way: + 20 to 40 µs. A spinning gateway pair
//! replaces wake-ups by turns (4 µs) but shares its core with the applications here.
//! Estimate, 32 connections, direct: the two processes never sleep, so 2 × (read + write + epoll
//! share) = 2 × 5 µs over two cores: about 200 k/s.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::sockopt;

use super::LoadResult;
use crate::clock::{now_ns, ns};
use crate::failure::{Doing as _, Failure, Result};
use crate::latency::Recorder;
use crate::readiness::{Interest, Readiness};

/// Bytes of a request and of its echo.
pub(crate) const MESSAGE_BYTES: usize = 64;

/// Round trips before this much time has passed are not recorded.
pub(super) const WARM_UP: Duration = Duration::from_millis(250);

/// An answer that takes longer than this ends the run.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// One connection of a round-trip load.
pub(super) struct Client {
    stream: TcpStream,
    request: [u8; MESSAGE_BYTES],
    answer: [u8; MESSAGE_BYTES],
    received_bytes: usize,
    sequence: u64,
}

impl Client {
    /// Connects, without delay and non-blocking.
    pub(super) fn connect(target: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&target, PATIENCE)
            .doing(|| format!("connecting to {target}"))?;
        sockopt::set_tcp_nodelay(&stream, true).doing(|| "TCP_NODELAY".into())?;
        stream.set_nonblocking(true).doing(|| "O_NONBLOCK".into())?;
        Ok(Self {
            stream,
            request: [b'.'; MESSAGE_BYTES],
            answer: [0; MESSAGE_BYTES],
            received_bytes: 0,
            sequence: 0,
        })
    }

    /// Reports readable answers to `readiness` under `token`.
    pub(super) fn watch(&self, readiness: &Readiness, token: u64) -> Result<()> {
        readiness.add(&self.stream, token, Interest::Read)
    }

    /// Sends the next request. The previous one must have been answered.
    pub(super) fn send(&mut self) -> Result<()> {
        self.sequence += 1;
        self.request[..8].copy_from_slice(&self.sequence.to_be_bytes());
        self.received_bytes = 0;
        let sent = self.stream.write(&self.request).doing(|| "sending a request".into())?;
        // With one small message in flight, the buffer of a TCP socket always has room.
        if sent == MESSAGE_BYTES {
            Ok(())
        } else {
            Err(Failure::new(format!("only {sent} bytes of a request were accepted")))
        }
    }

    /// Reads once. Returns true when the answer is complete; it must equal the request.
    pub(super) fn receive(&mut self) -> Result<bool> {
        match self.stream.read(&mut self.answer[self.received_bytes..]) {
            Ok(0) => return Err(Failure::new("the server closed a connection")),
            Ok(bytes) => self.received_bytes += bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error).doing(|| "reading an answer".into()),
        }
        if self.received_bytes < MESSAGE_BYTES {
            return Ok(false);
        }
        if self.answer == self.request {
            Ok(true)
        } else {
            Err(Failure::new("an answer is not its request: the path changed bytes"))
        }
    }
}

/// Runs the closed loop for `duration` after a warm-up.
///
/// # Errors
///
/// When a connection cannot be made or breaks, an answer is wrong, or none comes for 5 seconds.
pub(crate) fn run(target: SocketAddr, connections: u32, duration: Duration) -> Result<LoadResult> {
    let mut readiness = Readiness::new()?;
    let mut clients = connect_all(target, connections, &readiness)?;
    let record_from = now_ns() + ns(WARM_UP);
    let until = record_from + ns(duration);
    let mut sent_at = vec![0; clients.len()];
    for (client, sent_at) in clients.iter_mut().zip(&mut sent_at) {
        *sent_at = now_ns();
        client.send()?;
    }
    let mut latencies = Recorder::new();
    let (mut recorded, mut answered) = (0_u64, 0_u64);
    let mut ready = Vec::new();
    let ended_at = loop {
        readiness.wait(PATIENCE, &mut ready)?;
        if ready.is_empty() {
            return Err(Failure::new(format!("no answer within {PATIENCE:?}")));
        }
        for &token in &ready {
            let index = usize::try_from(token).expect("tokens are our own indexes");
            if !clients[index].receive()? {
                continue;
            }
            let now = now_ns();
            answered += 1;
            if now >= record_from {
                latencies.record(now - sent_at[index]);
                recorded += 1;
            }
            sent_at[index] = now;
            clients[index].send()?;
        }
        let now = now_ns();
        if now >= until {
            break now;
        }
    };
    Ok(result(connections, &latencies, recorded, answered, ended_at - record_from))
}

/// Connects and watches `connections` clients; tokens are their indexes.
pub(super) fn connect_all(
    target: SocketAddr,
    connections: u32,
    readiness: &Readiness,
) -> Result<Vec<Client>> {
    let mut clients = Vec::new();
    for token in 0..u64::from(connections) {
        let client = Client::connect(target)?;
        client.watch(readiness, token)?;
        clients.push(client);
    }
    Ok(clients)
}

/// The result of a round-trip load in its common form.
pub(super) fn result(
    connections: u32,
    latencies: &Recorder,
    recorded: u64,
    answered: u64,
    elapsed_ns: u64,
) -> LoadResult {
    let elapsed_s = elapsed_ns as f64 / 1e9;
    LoadResult {
        elapsed_s,
        connections_opened: u64::from(connections),
        bytes_total: answered * 2 * MESSAGE_BYTES as u64,
        requests_total: answered,
        gbit_per_s: None,
        requests_per_s: Some(recorded as f64 / elapsed_s),
        latency: latencies.summary(),
        errors: 0,
        per_s_each_5s: Vec::new(),
    }
}
