//! The protocol between the agent in a guest and its callers: one TCP connection per program.
//!
//! ```text
//!   caller  program and arguments, as a JSON list, on one line; then nothing, until it closes
//!   agent   | kind | length (4) | bytes |   as often as the program says something
//!           |  3   | 4          | code  |   and once at its end
//! ```
//!
//! If a caller goes away, the agent kills its program.

use std::io::{self, BufRead, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Kinds of frames.
pub(crate) const STDOUT: u8 = 1;
pub(crate) const STDERR: u8 = 2;
pub(crate) const ENDED: u8 = 3;

/// The exit code that is reported for a program that was ended by a signal.
pub(crate) const KILLED: u32 = 137;

/// Where the agent of a guest listens, on the network between rig and guests.
fn agent_of(guest: u8) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::new(10, 99, 0, guest), 7000)
}

/// Runs `command` in a guest, and passes on what it says and how it ends.
pub(crate) fn run_on(guest: u8, command: &[String], patience: Duration) -> io::Result<ExitCode> {
    let mut agent = reach(agent_of(guest), patience)?;
    write_request(&mut agent, command)?;
    loop {
        let (kind, bytes) = read_frame(&mut agent)?;
        match kind {
            STDOUT => io::stdout().write_all(&bytes)?,
            STDERR => io::stderr().write_all(&bytes)?,
            ENDED => {
                let code = bytes.first_chunk().map(|bytes| u32::from_be_bytes(*bytes));
                let code = code.and_then(|code| u8::try_from(code).ok());
                io::stdout().flush()?;
                return Ok(ExitCode::from(code.unwrap_or(u8::MAX)));
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Connects to `agent`, which may not be there yet.
fn reach(agent: SocketAddrV4, patience: Duration) -> io::Result<TcpStream> {
    let deadline = now() + patience;
    loop {
        match TcpStream::connect_timeout(&agent.into(), Duration::from_secs(2)) {
            Err(_) if now() < deadline => thread::sleep(Duration::from_millis(100)),
            outcome => return outcome,
        }
    }
}

fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::from_secs(u64::try_from(time.tv_sec).expect("monotonic time is positive"))
}

fn write_request(agent: &mut TcpStream, command: &[String]) -> io::Result<()> {
    let mut line = serde_json::to_string(command)?;
    line.push('\n');
    agent.write_all(line.as_bytes())
}

/// Reads which program to run, with its arguments.
pub(crate) fn read_request(caller: &mut impl BufRead) -> io::Result<Vec<String>> {
    let mut line = String::new();
    caller.read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

fn read_frame(agent: &mut impl Read) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    agent.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let mut bytes = Vec::new();
    let length = u64::from(u32::from_be_bytes(length));
    if agent.take(length).read_to_end(&mut bytes)? as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((kind, bytes))
}

/// Writes one frame.
pub(crate) fn write_frame(caller: &mut impl Write, kind: u8, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut frame = vec![kind];
    frame.extend(length.to_be_bytes());
    frame.extend(bytes);
    caller.write_all(&frame)
}
