//! At which offsets in their pages bytes wait for whoever reads them.
//!
//! The kernel copies with `rep movsb`. Some CPUs, AMD's Zen 3 among them, do that at a fifteenth of
//! their speed if the destination's offset in its page is 1 to 31 bytes above the source's: 32 KiB
//! in 20 µs.
//!
//! All TCP sockets of a thread put what they send into one piece of memory (`current->task_frag`),
//! from its start on. It is filled from the start again as soon as nobody holds anything of it any
//! more, which is when readers have caught up. And a large buffer of `malloc` begins 16 bytes after
//! a page. So whoever reads a stream into one is slow on such a CPU, on its own account and on that
//! of all who wait for it: over `shm`, a stream had two thirds of its speed. A `Spacer` moves what
//! its thread sends away from there.

use std::io;
use std::net::UdpSocket;
use std::sync::LazyLock;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{pread, pwrite};
use rustix::net::{SendFlags, send};
use smcr_os::Placed;

use crate::clock::Clock;

/// Moves the place where the kernel puts what its thread sends next.
///
/// It takes a piece of the thread's memory for a datagram that is never complete. A datagram of
/// some pieces is dropped, and another one begun, so at most [`PIECES_MAX`] times 32 KiB are held.
#[derive(Debug)]
pub(crate) struct Spacer {
    /// Connected to itself.
    socket: UdpSocket,
    pieces: usize,
}

impl Spacer {
    /// One for this thread, if it is of use on this machine.
    pub(crate) fn if_useful() -> Option<Self> {
        // Asked once: a machine that is moved to another CPU keeps what it has.
        static IS_SLOW: LazyLock<bool> =
            LazyLock::new(|| Copies::measure().is_ok_and(|copies| copies.are_slow()));
        if *IS_SLOW { Self::new().ok() } else { None }
    }

    fn new() -> io::Result<Self> {
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        socket.connect(socket.local_addr()?)?;
        let mut spacer = Self { socket, pieces: 0 };
        spacer.begin()?;
        Ok(spacer)
    }

    /// Moves it by one piece.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, which it has no reason to do later if it did not at first.
    pub(crate) fn space(&mut self) -> io::Result<()> {
        if self.pieces == PIECES_MAX {
            self.end();
            self.begin()?;
        }
        self.add(&[0; PIECE])?;
        self.pieces += 1;
        Ok(())
    }

    /// Begins a datagram. Its first piece gets memory of its own, and moves nothing.
    fn begin(&mut self) -> io::Result<()> {
        self.pieces = 0;
        self.add(&[0])
    }

    /// Has the kernel drop the datagram: it never lets one grow beyond 64 KiB. (With as many pieces
    /// as it can hold, it would refuse another one, too, but count that as a packet lost.)
    fn end(&self) {
        static TOO_MUCH: [u8; 65_507] = [0; 65_507];
        let refused = self.add(&TOO_MUCH);
        debug_assert!(refused.is_err(), "it has a byte already");
    }

    fn add(&self, piece: &[u8]) -> io::Result<()> {
        // Nothing is ever sent: each time, more is said to follow.
        send(&self.socket, piece, SendFlags::MORE.union(SendFlags::DONTWAIT))?;
        Ok(())
    }
}

/// Whether pollers may move what they send.
///
/// # Errors
///
/// Why they may not: the loopback device is down, or there are no ports.
pub fn try_it() -> io::Result<()> {
    Spacer::new()?.space()
}

/// How long the kernel takes to copy [`COPIED`] bytes to a program.
#[derive(Clone, Copy, Debug)]
pub struct Copies {
    /// To where the offset in the page is 16 bytes above that of their source.
    pub near: Duration,
    /// To where it is half a page above.
    pub apart: Duration,
}

impl Copies {
    /// Measures both, which takes less than a millisecond. What is read is a file in memory; the
    /// kernel copies what sockets have received in the same way.
    ///
    /// # Errors
    ///
    /// When there is no memory for it.
    pub fn measure() -> io::Result<Self> {
        let file = memfd_create("smcgate", MemfdFlags::CLOEXEC)?;
        let mut rooms = [NEAR, HALF_A_PAGE].map(|offset| Placed::new(COPIED, offset));
        // Zeroes that were written; what never was would not be copied.
        if pwrite(&file, &rooms[0], 0)? != COPIED {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let clock = Clock::new();
        let copy = |room: &mut [u8]| -> io::Result<Duration> {
            let begun = clock.now();
            let copied = pread(&file, room, 0)?;
            let took = clock.now().since(begun);
            assert_eq!(copied, COPIED, "so many were written, and nobody else has the file");
            Ok(took)
        };
        let [near, apart] = &mut rooms;
        let mut least = Self { near: Duration::MAX, apart: Duration::MAX };
        for _ in 0..TRIALS {
            // Whoever loses its core, or has no pages yet, takes longer; nothing takes less.
            least.near = least.near.min(copy(near)?);
            least.apart = least.apart.min(copy(apart)?);
        }
        Ok(least)
    }

    /// Whether it matters at which offsets bytes wait.
    pub fn are_slow(&self) -> bool {
        self.near > SLOW * self.apart
    }
}

/// How many bytes [`Copies`] is about.
pub const COPIED: usize = 32_768;

/// For fewer bytes, moving them costs more, which is up to 1 µs, than their reader may save.
pub(crate) const WORTH_SPACING: usize = 32_768;
/// After k pieces and n segments of loopback, which are 53 bytes shorter than 64 KiB, bytes wait at
/// an offset of 176 k − 53 n. For n up to 4 this is far from 0, where buffers begin, and from 16.
/// While readers lag, k grows, and every 256th send is at 0 again.
const PIECE: usize = 176;
/// Each piece may be all that holds 32 KiB of the kernel's memory.
const PIECES_MAX: usize = 8;
/// As far behind a page as `malloc` begins.
const NEAR: usize = 16;
const HALF_A_PAGE: usize = 2_048;
const TRIALS: u32 = 8;
/// Where it matters, copies take ten times as long; where it does not, nearly the same.
const SLOW: u32 = 3;

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    impl Spacer {
        /// One wherever it is of use or not.
        pub(crate) fn anywhere() -> Self {
            Self::new().unwrap()
        }

        /// How many bytes its datagram has, as the kernel counts them.
        pub(crate) fn pending(&self) -> usize {
            let port = format!(":{:04X} ", self.socket.local_addr().unwrap().port());
            let queued = || {
                let sockets = fs::read_to_string("/proc/thread-self/net/udp").unwrap();
                let line = sockets.lines().find(|line| line.contains(&port))?;
                // sl local_address rem_address st tx_queue:rx_queue
                let queues = line.split_whitespace().nth(4).unwrap();
                Some(usize::from_str_radix(queues.split(':').next().unwrap(), 16).unwrap())
            };
            // The kernel prints the list in parts, and passes over some if others close meanwhile.
            (0..100).find_map(|_| queued()).expect("it is open")
        }
    }

    /// How many packets this host has dropped before it sent them.
    fn discarded() -> u64 {
        let counters = fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
        let mut ip = counters.lines().filter(|line| line.starts_with("Ip: "));
        let (names, values) = (ip.next().unwrap(), ip.next().unwrap());
        let mut both = names.split(' ').zip(values.split(' '));
        both.find(|(name, _)| *name == "OutDiscards").unwrap().1.parse().unwrap()
    }

    #[test]
    fn copies_between_near_offsets_take_no_less() {
        let copies = Copies::measure().unwrap();
        assert!(copies.near * 4 > copies.apart && copies.apart > Duration::ZERO, "{copies:?}");
    }

    #[test]
    fn what_counts_is_how_much_longer_near_copies_take() {
        let micros = Duration::from_micros;
        for (near, apart, are_slow) in [(2, 2, false), (1, 2, false), (6, 2, false), (7, 2, true)] {
            let copies = Copies { near: micros(near), apart: micros(apart) };
            assert_eq!(copies.are_slow(), are_slow, "{copies:?}");
        }
    }

    /// With bytes of a stream between the pieces, each of them is one of its own to the kernel.
    #[test]
    fn any_number_of_pieces_is_taken_and_few_are_kept() {
        let mut spacer = Spacer::anywhere();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        let (empty, before) = (spacer.pending(), discarded());
        for round in 0..1_000 {
            spacer.space().unwrap();
            let pieces = round % PIECES_MAX + 1;
            assert_eq!(spacer.pending(), empty + pieces * PIECE, "in round {round}");
            let sent: Vec<u8> = (0..=u8::MAX).cycle().skip(round).take(5_000).collect();
            sender.write_all(&sent).unwrap();
            let mut received = vec![0; sent.len()];
            receiver.read_exact(&mut received).unwrap();
            assert!(received == sent, "in round {round}");
        }
        assert!(discarded() - before < 10, "these would be taken for packets lost");
    }

    #[test]
    fn no_piece_reaches_a_receiver() {
        let mut spacer = Spacer::anywhere();
        for _ in 0..1_000 {
            spacer.space().unwrap();
        }
        spacer.socket.set_nonblocking(true).unwrap();
        let error = spacer.socket.recv(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
