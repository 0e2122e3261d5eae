//! A stream socket of the kernel's SMC or of its TCP; the application cannot tell them apart.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddrV4};
use std::thread;
use std::time::Duration;

use rustix::net::{RecvFlags, recv};
use sha2::{Digest, Sha256};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// Longest silence of a peer: what has not arrived by then will not arrive.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// What kind of socket an application opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Smc,
    Tcp,
}

impl Transport {
    pub(crate) fn of(tcp: bool) -> Self {
        if tcp { Self::Tcp } else { Self::Smc }
    }

    fn socket(self) -> io::Result<Socket> {
        // `AF_SMC` and its protocol for IPv4, which libraries do not name.
        const AF_SMC: i32 = 43;
        const SMC_OVER_IPV4: i32 = 0;
        let (domain, protocol) = match self {
            Self::Smc => (Domain::from(AF_SMC), Protocol::from(SMC_OVER_IPV4)),
            Self::Tcp => (Domain::IPV4, Protocol::TCP),
        };
        Socket::new(domain, Type::STREAM, Some(protocol))
    }

    pub(crate) fn listen(self, at: SocketAddrV4) -> io::Result<Listener> {
        let socket = self.socket()?;
        socket.set_reuse_address(true)?;
        socket.bind(&SockAddr::from(at))?;
        socket.listen(128)?;
        Ok(Listener(socket))
    }

    pub(crate) fn connect(self, to: SocketAddrV4) -> io::Result<Stream> {
        let socket = self.socket()?;
        socket.connect(&SockAddr::from(to))?;
        Stream::new(socket)
    }
}

/// A listening socket.
pub(crate) struct Listener(Socket);

impl Listener {
    pub(crate) fn accept(&self) -> io::Result<Stream> {
        Stream::new(self.0.accept()?.0)
    }
}

/// A connected socket, closed when dropped.
pub(crate) struct Stream(Socket);

impl Stream {
    fn new(socket: Socket) -> io::Result<Self> {
        socket.set_read_timeout(Some(SILENCE_LIMIT))?;
        socket.set_write_timeout(Some(SILENCE_LIMIT))?;
        Ok(Self(socket))
    }

    /// Its own address and its peer's.
    pub(crate) fn addresses(&self) -> io::Result<(SocketAddrV4, SocketAddrV4)> {
        let known = |address: SockAddr| address.as_socket_ipv4().ok_or(io::ErrorKind::InvalidData);
        Ok((known(self.0.local_addr()?)?, known(self.0.peer_addr()?)?))
    }

    /// Sends the first `count` bytes of the pattern: at once, or in small pieces with this pause
    /// between them.
    pub(crate) fn send(&mut self, count: u64, breath: Option<Duration>) -> io::Result<Seen> {
        let mut seen = Seen::default();
        let mut pattern = Pattern::default();
        let mut block = vec![0; if breath.is_some() { LITTLE_BYTES } else { BLOCK_BYTES }];
        while seen.bytes < count {
            let length = length_of_next(count - seen.bytes).min(block.len());
            let block = &mut block[..length];
            pattern.fill(block);
            self.0.write_all(block)?;
            seen.count(block);
            if let Some(breath) = breath {
                thread::sleep(breath);
            }
        }
        Ok(seen)
    }

    /// Receives until there are `count` bytes or no more.
    pub(crate) fn receive(&mut self, count: u64) -> (Seen, io::Result<()>) {
        let mut seen = Seen::default();
        let mut block = vec![0; BLOCK_BYTES];
        while seen.bytes < count {
            match self.0.read(&mut block[..length_of_next(count - seen.bytes)]) {
                Ok(0) => return (seen, Err(io::ErrorKind::UnexpectedEof.into())),
                Ok(received) => seen.count(&block[..received]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (seen, Err(error)),
            }
        }
        (seen, Ok(()))
    }

    /// Sends back what it receives, up to the peer's end.
    pub(crate) fn echo(&mut self) -> io::Result<Seen> {
        let mut seen = Seen::default();
        let mut block = vec![0; BLOCK_BYTES];
        loop {
            let received = self.0.read(&mut block)?;
            if received == 0 {
                return Ok(seen);
            }
            self.0.write_all(&block[..received])?;
            seen.count(&block[..received]);
        }
    }

    pub(crate) fn shut(&self) -> io::Result<()> {
        self.0.shutdown(Shutdown::Write)
    }

    /// Sends one byte out of band.
    pub(crate) fn send_urgent(&self) -> io::Result<()> {
        self.0.send_out_of_band(b"!").map(drop)
    }

    /// Receives the byte that came out of band.
    pub(crate) fn receive_urgent(&self) -> io::Result<u8> {
        let mut byte = [0_u8];
        match recv(&self.0, &mut byte, RecvFlags::OOB)?.0 {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(byte[0]),
        }
    }

    /// Makes the following close an abortive one.
    pub(crate) fn linger_zero(&self) -> io::Result<()> {
        self.0.set_linger(Some(Duration::ZERO))
    }
}

/// Bytes that went one way: how many, and which.
#[derive(Default)]
pub(crate) struct Seen {
    bytes: u64,
    hash: Sha256,
}

impl Seen {
    fn count(&mut self, block: &[u8]) {
        self.bytes += block.len() as u64;
        self.hash.update(block);
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, SHA-256 ", self.bytes)?;
        self.hash.clone().finalize().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The bytes that are sent: a sequence that does not repeat within any ring or window.
struct Pattern(u64);

impl Default for Pattern {
    fn default() -> Self {
        Self(0x9E37_79B9_7F4A_7C15)
    }
}

impl Pattern {
    fn fill(&mut self, block: &mut [u8]) {
        for eight in block.chunks_mut(8) {
            // Marsaglia's xorshift is quick even if each instruction is emulated.
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            eight.copy_from_slice(&self.0.to_le_bytes()[..eight.len()]);
        }
    }
}

/// Bytes that are read or written at once.
const BLOCK_BYTES: usize = 65_536;
const LITTLE_BYTES: usize = 1_000;

fn length_of_next(left: u64) -> usize {
    usize::try_from(left).map_or(BLOCK_BYTES, |left| left.min(BLOCK_BYTES))
}
