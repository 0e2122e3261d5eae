//! The servers for the loads: one thread, one epoll instance, one behaviour per server.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use clap::ValueEnum;

use crate::clock::now_ns;
use crate::failure::{Doing as _, Result};
use crate::readiness::{Interest, Readiness};
use crate::scenarios::short_connections::{REQUEST_BYTES, RESPONSE_BYTES};
use crate::scenarios::stream::{SinkReport, WRITE_BYTES};

/// What a server does with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Behaviour {
    /// Sends back all bytes that it receives.
    Echo,
    /// Counts bytes until the client's FIN, then sends the count and the time.
    Sink,
    /// Sends as fast as the client reads, until the client closes.
    Source,
    /// Reads a request of 64 bytes, answers 1 KiB and closes first, as an HTTP server does.
    Crr,
}

const LISTENER: u64 = u64::MAX;
const READ_BYTES: usize = 256 * 1024;

struct Peer {
    stream: TcpStream,
    /// The bytes to be written, of which those before `unsent_from` have been sent.
    unsent: Vec<u8>,
    unsent_from: usize,
    received_bytes: u64,
    first_byte_at_ns: u64,
    watched: Interest,
    /// Close when all bytes are sent.
    closing: bool,
}

struct Server {
    behaviour: Behaviour,
    readiness: Readiness,
    peers: Vec<Option<Peer>>,
    free: Vec<usize>,
    scratch: Vec<u8>,
}

/// Opens a listener on `address`, whose backlog takes bursts of short connections.
///
/// # Errors
///
/// When the address is in use or not ours.
pub(crate) fn listen(address: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).doing(|| format!("binding {address}"))?;
    socket2::SockRef::from(&listener).listen(4096).doing(|| "listen".into())?;
    listener.set_nonblocking(true).doing(|| "listener".into())?;
    Ok(listener)
}

/// Serves `behaviour` on `listener` until the process is killed.
///
/// # Errors
///
/// When the kernel runs out of something. What a client does to its connection ends that
/// connection only.
pub(crate) fn serve(behaviour: Behaviour, listener: &TcpListener) -> Result<()> {
    let mut server = Server::new(behaviour)?;
    server.readiness.add(listener, LISTENER, Interest::Read)?;
    let mut ready = Vec::new();
    loop {
        server.readiness.wait(Duration::from_secs(1), &mut ready)?;
        for &token in &ready {
            if token == LISTENER {
                server.accept(listener)?;
            } else {
                server.handle(usize::try_from(token).expect("tokens are our own indexes"))?;
            }
        }
    }
}

impl Server {
    fn new(behaviour: Behaviour) -> Result<Self> {
        Ok(Self {
            behaviour,
            readiness: Readiness::new()?,
            peers: Vec::new(),
            free: Vec::new(),
            scratch: vec![0; READ_BYTES],
        })
    }

    fn accept(&mut self, listener: &TcpListener) -> Result<()> {
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error).doing(|| "accept".into()),
            };
            stream.set_nonblocking(true).doing(|| "accepted socket".into())?;
            stream.set_nodelay(true).doing(|| "accepted socket".into())?;
            let index = self.free.pop().unwrap_or_else(|| {
                self.peers.push(None);
                self.peers.len() - 1
            });
            let watched = match self.behaviour {
                Behaviour::Echo | Behaviour::Sink | Behaviour::Crr => Interest::Read,
                Behaviour::Source => Interest::Write,
            };
            self.readiness.add(&stream, index as u64, watched)?;
            self.peers[index] = Some(Peer {
                stream,
                unsent: Vec::new(),
                unsent_from: 0,
                received_bytes: 0,
                first_byte_at_ns: 0,
                watched,
                closing: false,
            });
        }
    }

    fn handle(&mut self, index: usize) -> Result<()> {
        let Some(peer) = self.peers[index].as_mut() else { return Ok(()) };
        let alive = match peer.watched {
            Interest::Read => peer.read(self.behaviour, &mut self.scratch),
            Interest::Write | Interest::Both => peer.write(self.behaviour),
        };
        if !alive {
            // Dropping the stream closes it, which also ends its watch.
            self.peers[index] = None;
            self.free.push(index);
            return Ok(());
        }
        let wanted = peer.interest(self.behaviour);
        if wanted != peer.watched {
            peer.watched = wanted;
            self.readiness.change(&peer.stream, index as u64, wanted)?;
        }
        Ok(())
    }
}

impl Peer {
    fn interest(&self, behaviour: Behaviour) -> Interest {
        match behaviour {
            Behaviour::Source => Interest::Write,
            Behaviour::Echo | Behaviour::Sink | Behaviour::Crr if self.unsent.is_empty() => {
                Interest::Read
            }
            Behaviour::Echo | Behaviour::Sink | Behaviour::Crr => Interest::Write,
        }
    }

    /// Reads once and answers. Returns false when the connection is over.
    fn read(&mut self, behaviour: Behaviour, scratch: &mut [u8]) -> bool {
        let bytes = match self.stream.read(scratch) {
            Ok(bytes) => bytes,
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        };
        if bytes == 0 {
            return self.end_of_stream(behaviour);
        }
        if self.received_bytes == 0 {
            self.first_byte_at_ns = now_ns();
        }
        self.received_bytes += bytes as u64;
        match behaviour {
            Behaviour::Echo => self.send(&scratch[..bytes]),
            Behaviour::Crr if self.received_bytes >= REQUEST_BYTES as u64 => {
                self.closing = true;
                self.send(&[b'r'; RESPONSE_BYTES])
            }
            Behaviour::Sink | Behaviour::Source | Behaviour::Crr => true,
        }
    }

    fn end_of_stream(&mut self, behaviour: Behaviour) -> bool {
        match behaviour {
            Behaviour::Sink => {
                let elapsed_ns = now_ns() - self.first_byte_at_ns;
                let report = SinkReport { bytes: self.received_bytes, elapsed_ns };
                self.closing = true;
                self.send(&report.encode())
            }
            Behaviour::Echo | Behaviour::Source | Behaviour::Crr => false,
        }
    }

    fn send(&mut self, bytes: &[u8]) -> bool {
        assert!(self.unsent.is_empty(), "reads stop while a write is pending");
        match self.stream.write(bytes) {
            Ok(sent) => self.unsent.extend_from_slice(&bytes[sent..]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.unsent.extend_from_slice(bytes);
            }
            Err(_) => return false,
        }
        !(self.closing && self.unsent.is_empty())
    }

    fn write(&mut self, behaviour: Behaviour) -> bool {
        if behaviour == Behaviour::Source {
            return match self.stream.write(&[b's'; WRITE_BYTES]) {
                Ok(_) => true,
                Err(error) => error.kind() == ErrorKind::WouldBlock,
            };
        }
        match self.stream.write(&self.unsent[self.unsent_from..]) {
            Ok(sent) => self.unsent_from += sent,
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
        if self.unsent_from == self.unsent.len() {
            self.unsent.clear();
            self.unsent_from = 0;
            return !self.closing;
        }
        true
    }
}

#[cfg(test)]
mod tests;
