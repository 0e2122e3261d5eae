//! RR(n): n connections, each with one request in flight, of 64 bytes unless the name says
//! otherwise. Every round trip is recorded.
//!
//! Estimate, one connection, direct over veth: write 3 µs + softirq 3 + wake-up of the server 15
//! (74 when its core sleeps deeply) + read 2 + epoll 1, twice = 48 to 150 µs round trip. A HAProxy
//! pair adds two more wake-ups and socket pairs each way: + 20 to 40 µs.
//!
//! Budget of a gateway pair over `roce-udp`, for a request and its answer together:
//!
//! | one connection | system calls | copies | wake-ups | µs |
//! |---|---|---|---|---|
//! | load and server: wait, read, write | 6 | 4 | 2 | 20 to 30 |
//! | gateways, near sockets: 2 `recv`, 2 `send` | 4 | 4 | – | 7 |
//! | gateways, packets: 2 `sendmmsg`, 2 `recvmmsg` | 4 | 8 | – | 12 |
//! | gateways: build, ICRC, place, announce | – | 4 | – | 2 |
//! | gateways: the turn that finds each of these 4 steps | 12 | – | – | 6 |
//! | acknowledgements, one for 12 messages | 0.4 | – | – | 1 |
//! | sum | 26 | 20 | 2 | 48 to 58 |
//!
//! What is counted beyond 26 calls (some 95) is pollers that look for the next step, a turn each
//! 1.3 µs: they wake nobody, and keep both cores busy for as long as the round trip takes. So CPU
//! per request is the round trip times 1.7 cores; beside busy programs, where they sleep, it is
//! what the table says.
//!
//! | 32 connections | system calls | copies | wake-ups | µs of CPU |
//! |---|---|---|---|---|
//! | load and server: read, write, their share of a wait | 5 | 4 | – | 13 |
//! | gateways, near sockets | 4 | 4 | – | 9 |
//! | gateways, packets, in batches of 8 | 0.5 | 8 | – | 8 |
//! | gateways: build, ICRC, place, announce | – | 4 | – | 2 |
//! | gateways, turns for 8 requests each | 1.5 | – | – | 1 |
//! | sum | 11 | 20 | – | 33: 60 k/s on two cores |
//!
//! What is counted beyond that (7.4 to 9.9 calls of the gateways instead of 6) is batches of 3 to 5
//! instead of 8: four threads take turns on two cores, and whoever gets one finds what came
//! meanwhile. A HAProxy pair makes 9.1, 8 of them on sockets.
//!
//! Direct, 32 connections: the two processes never sleep, so 2 × (read + write + epoll share) =
//! 2 × 5 µs over two cores: about 200 k/s. Large requests: twice the time of a stream of as many
//! bytes, since the next request leaves when the answer is complete.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::LoadResult;
use super::window::{LOOK_EVERY, PATIENCE, Tally, Window};
use crate::clock::now_ns;
use crate::failure::{Doing as _, Failure, Result};
use crate::latency::Recorder;
use crate::readiness::{Interest, Readiness};

/// Bytes of a request and of its echo, unless the scenario says otherwise.
pub(crate) const MESSAGE_BYTES: usize = 64;

/// The largest requests.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// One connection of a round-trip load.
pub(super) struct Client {
    stream: TcpStream,
    request: Vec<u8>,
    answer: Vec<u8>,
    sent_bytes: usize,
    received_bytes: usize,
    sequence: u64,
}

impl Client {
    /// Connects, without delay and non-blocking, for requests of `bytes` bytes.
    pub(super) fn connect(target: SocketAddr, bytes: usize) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&target, PATIENCE)
            .doing(|| format!("connecting to {target}"))?;
        stream.set_nodelay(true).doing(|| "TCP_NODELAY".into())?;
        stream.set_nonblocking(true).doing(|| "O_NONBLOCK".into())?;
        Ok(Self {
            stream,
            request: vec![b'.'; bytes],
            answer: vec![0; bytes],
            sent_bytes: bytes,
            received_bytes: 0,
            sequence: 0,
        })
    }

    /// Reports readable answers to `readiness` under `token`.
    pub(super) fn watch(&self, readiness: &Readiness, token: u64) -> Result<()> {
        readiness.add(&self.stream, token, Interest::Read)
    }

    /// Sends the next request, or as much of it as there is room for. The previous one must have
    /// been answered.
    pub(super) fn send(&mut self) -> Result<()> {
        self.sequence += 1;
        let sequence = self.sequence.to_le_bytes();
        let len = sequence.len().min(self.request.len());
        self.request[..len].copy_from_slice(&sequence[..len]);
        (self.sent_bytes, self.received_bytes) = (0, 0);
        self.send_on()
    }

    /// Sends more of the request, if something is left of it and there is room.
    fn send_on(&mut self) -> Result<()> {
        if self.is_sent() {
            return Ok(());
        }
        match self.stream.write(&self.request[self.sent_bytes..]) {
            Ok(sent) => self.sent_bytes += sent,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).doing(|| "sending a request".into()),
        }
        Ok(())
    }

    fn is_sent(&self) -> bool {
        self.sent_bytes == self.request.len()
    }

    /// Reads once. Returns true when the answer is complete; it must equal the request.
    pub(super) fn receive(&mut self) -> Result<bool> {
        match self.stream.read(&mut self.answer[self.received_bytes..]) {
            Ok(0) => return Err(Failure::new("the server closed a connection")),
            Ok(bytes) => self.received_bytes += bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error).doing(|| "reading an answer".into()),
        }
        if self.received_bytes < self.answer.len() {
            return Ok(false);
        }
        if self.answer == self.request {
            Ok(true)
        } else {
            Err(Failure::new("an answer is not its request: the path changed bytes"))
        }
    }
}

/// The state of the load.
struct ClosedLoop {
    /// None where it was given up.
    clients: Vec<Option<Client>>,
    watched: Vec<Interest>,
    /// When the request in flight on each connection was sent.
    sent_at: Vec<Option<u64>>,
    window: Window,
    tally: Tally,
}

impl ClosedLoop {
    fn send(&mut self, readiness: &Readiness, index: usize) -> Result<()> {
        self.sent_at[index] = Some(now_ns());
        self.client(index).send()?;
        self.watch(readiness, index)
    }

    /// A connection that has a request in flight.
    fn client(&mut self, index: usize) -> &mut Client {
        self.clients[index].as_mut().expect("one that is given up has no request")
    }

    /// Closes connections without an answer. They are not replaced: what has not been served would
    /// come back as new load.
    fn give_up_late(&mut self) {
        for index in self.window.late(&self.sent_at) {
            let sent_at = self.sent_at[index].take().expect("it is late");
            self.tally.give_up(sent_at, now_ns());
            self.clients[index] = None;
        }
    }

    /// Goes on with a connection that is ready.
    fn advance(&mut self, readiness: &Readiness, index: usize) -> Result<()> {
        // At the end, those that have their last answer may be closed while others still wait.
        let Some(sent_at) = self.sent_at[index] else { return Ok(()) };
        let client = self.client(index);
        client.send_on()?;
        if client.receive()? {
            let now = now_ns();
            self.sent_at[index] = None;
            self.tally.count(&self.window, sent_at, now);
            if self.window.is_open(now) {
                return self.send(readiness, index);
            }
        }
        self.watch(readiness, index)
    }

    /// Waits for room only while a request is not sent completely.
    fn watch(&mut self, readiness: &Readiness, index: usize) -> Result<()> {
        let wanted = if self.client(index).is_sent() { Interest::Read } else { Interest::Both };
        if std::mem::replace(&mut self.watched[index], wanted) != wanted {
            readiness.change(&self.client(index).stream, index as u64, wanted)?;
        }
        Ok(())
    }

    fn is_waiting(&self) -> bool {
        // Before the window ends, the first connection says so already.
        self.sent_at.iter().any(Option::is_some)
    }
}

/// Runs the closed loop for `duration` after a warm-up, then waits for the last answers. A
/// connection without an answer for 5 seconds is an error of the result.
///
/// # Errors
///
/// When a connection cannot be made or breaks, an answer is wrong, or there is none on all of them.
pub(crate) fn run(
    target: SocketAddr,
    connections: u32,
    bytes: usize,
    duration: Duration,
) -> Result<LoadResult> {
    let mut readiness = Readiness::new()?;
    let clients = connect_all(target, connections, bytes, &readiness)?;
    let mut load = ClosedLoop {
        watched: vec![Interest::Read; clients.len()],
        sent_at: vec![None; clients.len()],
        clients: clients.into_iter().map(Some).collect(),
        window: Window::begin(duration),
        tally: Tally::new(),
    };
    for index in 0..load.clients.len() {
        load.send(&readiness, index)?;
    }
    let mut ready = Vec::new();
    while load.is_waiting() {
        readiness.wait(LOOK_EVERY, &mut ready)?;
        for &token in &ready {
            let index = usize::try_from(token).expect("tokens are our own indexes");
            load.advance(&readiness, index)?;
        }
        load.give_up_late();
    }
    result_of_loop(connections, &load.tally, bytes, load.window.elapsed_ns())
}

/// Connects and watches `connections` clients; tokens are their indexes.
pub(super) fn connect_all(
    target: SocketAddr,
    connections: u32,
    bytes: usize,
    readiness: &Readiness,
) -> Result<Vec<Client>> {
    let mut clients = Vec::new();
    for token in 0..u64::from(connections) {
        let client = Client::connect(target, bytes)?;
        client.watch(readiness, token)?;
        clients.push(client);
    }
    Ok(clients)
}

/// The result of a loop with requests of `bytes` bytes. What it has given up are errors.
///
/// # Errors
///
/// When nothing was answered.
pub(super) fn result_of_loop(
    connections: u32,
    tally: &Tally,
    bytes: usize,
    elapsed_ns: u64,
) -> Result<LoadResult> {
    tally.check(connections)?;
    let counts = (tally.in_window, tally.answered, tally.answered * 2 * bytes as u64);
    let result = result(connections, &tally.latencies, counts, elapsed_ns);
    Ok(LoadResult { errors: tally.given_up, ..result })
}

/// The result of a round-trip load in its common form.
pub(super) fn result(
    connections: u32,
    latencies: &Recorder,
    (recorded, answered, moved): (u64, u64, u64),
    elapsed_ns: u64,
) -> LoadResult {
    let elapsed_s = elapsed_ns as f64 / 1e9;
    LoadResult {
        elapsed_s,
        connections_opened: u64::from(connections),
        bytes_total: moved,
        requests_total: answered,
        requests_per_s: Some(recorded as f64 / elapsed_s),
        latency: latencies.summary(),
        ..LoadResult::default()
    }
}
