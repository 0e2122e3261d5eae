//! STR: one stream of 128 KiB writes, measured at the receiver. FANIN-n: n of them, one sender.
//!
//! Estimate, direct over veth: a copy in and a copy out at 10 GB/s each on two cores, plus 1.6 µs
//! per 64 KiB segment: up to 70 Gbit/s with cubic; BBR paces, so about 20. Every userspace relay
//! adds a copy out and a copy in on the same two cores: a HAProxy pair at best a third of that.
//!
//! Budget of a gateway pair over `roce-udp` for 64 KiB, MTU 1500, so 64 packets of 1 KiB:
//!
//! | | system calls | passes over the bytes | µs of CPU |
//! |---|---|---|---|
//! | load and server: write, read | 2 to 4 | 2 | 14 |
//! | the kernel's TCP on loopback, twice | – | – | 12 |
//! | A: `recv`, and the turn around it | 4 | 1 | 9 |
//! | A: 64 × header, copy, ICRC; `sendmmsg` of one to three datagrams in segments | 1 | 3 | 15 |
//! | B: `recvmmsg`, and the turn around it | 3 | 1 | 8 |
//! | B: 64 × parse, ICRC, copy into the element | – | 2 | 9 |
//! | B: `send`; messages and acknowledgements both ways | 3 | 1 | 12 |
//! | sum | 14 | 10 | 79: 1.2 s per GB, 13 Gbit/s on two cores |
//!
//! No wake-up is among them: everybody is awake. 222 calls per megabyte were counted, 14.6 for
//! 64 KiB; a HAProxy pair makes 264. The packets' part falls with the MTU (a third of them at
//! 9000). What is left over `shm` are the first three lines and two copies, 0.9 s per GB.
//!
//! Estimate of many streams: as one, where all are paced, until what waits in buffers no longer
//! fits the caches (4 MB of sockets, and an element of the RMB for each), and then a third less.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use super::LoadResult;
use super::window::WARM_UP;
use crate::clock::{now_ns, ns};
use crate::failure::{Doing as _, Failure, Result};
use crate::readiness::{Interest, Readiness};

/// Bytes of one write.
pub(crate) const WRITE_BYTES: usize = 128 * 1024;

/// A stream that does not move for this long ends the run.
const PATIENCE: Duration = Duration::from_secs(10);

/// The count that the receiver sends to the sender after the sender's FIN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SinkReport {
    /// All bytes that arrived.
    pub(crate) bytes: u64,
    /// From the first byte to the FIN, in nanoseconds.
    pub(crate) elapsed_ns: u64,
}

impl SinkReport {
    /// Encodes it as two big-endian integers.
    pub(crate) fn encode(self) -> [u8; 16] {
        let mut wire = [0; 16];
        wire[..8].copy_from_slice(&self.bytes.to_be_bytes());
        wire[8..].copy_from_slice(&self.elapsed_ns.to_be_bytes());
        wire
    }

    fn decode(wire: [u8; 16]) -> Self {
        let (bytes, elapsed_ns) = wire.split_at(8);
        let number = |half: &[u8]| u64::from_be_bytes(half.try_into().expect("half of 16"));
        Self { bytes: number(bytes), elapsed_ns: number(elapsed_ns) }
    }
}

/// Sends to a sink for `duration`, closes, and reads the sink's count.
///
/// # Errors
///
/// When the connection breaks or stops moving, or bytes are missing at the receiver.
pub(crate) fn send(
    target: SocketAddr,
    congestion: Option<&str>,
    duration: Duration,
) -> Result<LoadResult> {
    let mut stream = connect(target, congestion)?;
    let payload = vec![b's'; WRITE_BYTES];
    let until = now_ns() + ns(duration);
    let mut sent_bytes = 0;
    while now_ns() < until {
        stream.write_all(&payload).doing(|| "sending the stream".into())?;
        sent_bytes += WRITE_BYTES as u64;
    }
    stream.shutdown(Shutdown::Write).doing(|| "ending the stream".into())?;
    let mut wire = [0; 16];
    stream.read_exact(&mut wire).doing(|| "waiting for the receiver's count".into())?;
    let report = SinkReport::decode(wire);
    check(sent_bytes, report)?;
    Ok(result(report, 0))
}

/// Sends to a sink on `connections` connections for `duration`, closes, and reads the counts. The
/// throughput is that of all, until the last has ended.
///
/// # Errors
///
/// As [`send`].
pub(crate) fn fan_in(
    target: SocketAddr,
    connections: u32,
    duration: Duration,
) -> Result<LoadResult> {
    let mut readiness = Readiness::new()?;
    let mut streams = Vec::new();
    for token in 0..u64::from(connections) {
        let stream = connect(target, None)?;
        stream.set_nonblocking(true).doing(|| "a stream".into())?;
        readiness.add(&stream, token, Interest::Write)?;
        streams.push((stream, 0));
    }
    let payload = vec![b's'; WRITE_BYTES];
    let until = now_ns() + ns(duration);
    let mut ready = Vec::new();
    while now_ns() < until {
        readiness.wait(PATIENCE, &mut ready)?;
        if ready.is_empty() {
            return Err(Failure::new(format!("no stream moved within {PATIENCE:?}")));
        }
        for &token in &ready {
            let index = usize::try_from(token).expect("tokens are our own indexes");
            let (stream, sent_bytes) = &mut streams[index];
            match stream.write(&payload) {
                Ok(bytes) => *sent_bytes += bytes as u64,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).doing(|| "sending a stream".into()),
            }
        }
    }
    for (stream, _) in &streams {
        stream.set_nonblocking(false).doing(|| "a stream".into())?;
        stream.shutdown(Shutdown::Write).doing(|| "ending a stream".into())?;
    }
    let mut all = SinkReport { bytes: 0, elapsed_ns: 0 };
    for (stream, sent_bytes) in &mut streams {
        let mut wire = [0; 16];
        stream.read_exact(&mut wire).doing(|| "waiting for a receiver's count".into())?;
        let report = SinkReport::decode(wire);
        check(*sent_bytes, report)?;
        all.bytes += report.bytes;
        all.elapsed_ns = all.elapsed_ns.max(report.elapsed_ns);
    }
    Ok(LoadResult { connections_opened: u64::from(connections), ..result(all, 0) })
}

fn check(sent_bytes: u64, report: SinkReport) -> Result<()> {
    if report.bytes == sent_bytes {
        return Ok(());
    }
    Err(Failure::new(format!("{sent_bytes} bytes were sent but {} arrived", report.bytes)))
}

/// Receives from a source for `duration` after a warm-up.
///
/// # Errors
///
/// When the connection breaks or stops moving.
pub(crate) fn receive(
    target: SocketAddr,
    congestion: Option<&str>,
    duration: Duration,
) -> Result<LoadResult> {
    let mut stream = connect(target, congestion)?;
    let mut buffer = vec![0; 256 * 1024];
    let count_from = now_ns() + ns(WARM_UP);
    let until = count_from + ns(duration);
    let mut counted = SinkReport { bytes: 0, elapsed_ns: 0 };
    let mut warm_up_bytes = 0;
    loop {
        let bytes = stream.read(&mut buffer).doing(|| "receiving the stream".into())?;
        if bytes == 0 {
            return Err(Failure::new("the source closed the stream"));
        }
        let now = now_ns();
        if now < count_from {
            warm_up_bytes += bytes as u64;
            continue;
        }
        counted.bytes += bytes as u64;
        counted.elapsed_ns = now - count_from;
        if now >= until {
            return Ok(result(counted, warm_up_bytes));
        }
    }
}

fn connect(target: SocketAddr, congestion: Option<&str>) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&target, PATIENCE)
        .doing(|| format!("connecting to {target}"))?;
    if let Some(algorithm) = congestion {
        socket2::SockRef::from(&stream)
            .set_tcp_congestion(algorithm.as_bytes())
            .doing(|| format!("congestion control {algorithm}"))?;
    }
    stream.set_read_timeout(Some(PATIENCE)).doing(|| "SO_RCVTIMEO".into())?;
    stream.set_write_timeout(Some(PATIENCE)).doing(|| "SO_SNDTIMEO".into())?;
    Ok(stream)
}

fn result(report: SinkReport, warm_up_bytes: u64) -> LoadResult {
    let elapsed_s = report.elapsed_ns as f64 / 1e9;
    LoadResult {
        elapsed_s,
        connections_opened: 1,
        bytes_total: warm_up_bytes + report.bytes,
        gbit_per_s: Some(report.bytes as f64 * 8.0 / report.elapsed_ns as f64),
        ..LoadResult::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published Gbit/s come from this report, so a swapped field would publish nonsense.
    #[test]
    fn the_receivers_count_survives_the_way_back() {
        let report = SinkReport { bytes: 1_250_000_000, elapsed_ns: 1_000_000_000 };
        assert_eq!(SinkReport::decode(report.encode()), report);
        let gbit_per_s = result(report, 0).gbit_per_s.unwrap();
        assert!((gbit_per_s - 10.0).abs() < 1e-9, "{gbit_per_s}");
    }
}
