//! Several fabrics that are one NIC to peers: one address, one UDP port, a socket each.
//!
//! The kernel steers each datagram by the number of the queue pair it is for, and every fabric
//! gives its queue pairs numbers that are steered to it. But what the kernel or a device has joined
//! goes where its first packet goes: packets of others among them are handed to their fabrics here,
//! after their ICRC was checked. They keep their order.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_queue::ArrayQueue;
use rustix::event::{EventfdFlags, epoll, eventfd};
use smcr_proto::Qpn;

use super::batch::PACKET_MAX;

/// Which part of the queue pair numbers of a NIC a fabric has: those whose last byte modulo `count`
/// is `index`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Which part.
    pub index: u32,
    /// How many there are: 1 to 256.
    pub count: u32,
}

impl Share {
    /// All numbers: a NIC with one fabric.
    pub const ALL: Self = Self { index: 0, count: 1 };

    /// The part that `number` is in.
    pub(super) fn index_of(self, number: Qpn) -> u32 {
        (number.0 & 0xff) % self.count
    }

    /// Whether `number` is in this part.
    pub(super) fn has(self, number: Qpn) -> bool {
        self.index_of(number) == self.index
    }
}

/// A packet whose ICRC was right, on its way to the fabric it is for.
#[derive(Debug)]
struct Stray {
    source: SocketAddr,
    len: usize,
    bytes: Buffer,
}

type Buffer = Box<[u8; PACKET_MAX]>;

/// Where a fabric finds packets that came to its siblings.
#[derive(Debug)]
struct Letterbox {
    strays: ArrayQueue<Stray>,
    /// Buffers that wait for a packet.
    spare: ArrayQueue<Buffer>,
    /// The bell was rung, or is about to be.
    rung: AtomicBool,
    /// Readable while there is something for a fabric that sleeps.
    bell: OwnedFd,
}

/// The other fabrics of a NIC, as one of them sees them.
#[derive(Debug)]
pub(super) struct Siblings {
    share: Share,
    letterboxes: Arc<[Letterbox]>,
    /// Readable when the wire or the letterbox is.
    events: OwnedFd,
}

impl Letterbox {
    fn new() -> io::Result<Self> {
        let spare = ArrayQueue::new(STRAYS_MAX);
        while spare.push(Box::new([0; PACKET_MAX])).is_ok() {}
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { strays: ArrayQueue::new(STRAYS_MAX), spare, rung: AtomicBool::new(false), bell })
    }
}

impl Siblings {
    /// One for each fabric of a NIC, whose wires have these descriptors.
    ///
    /// # Errors
    ///
    /// When the process is out of descriptors.
    pub(super) fn new(wires: &[BorrowedFd<'_>]) -> io::Result<Vec<Self>> {
        let letterboxes: Vec<_> =
            wires.iter().map(|_| Letterbox::new()).collect::<io::Result<_>>()?;
        let letterboxes: Arc<[Letterbox]> = letterboxes.into();
        let count = u32::try_from(wires.len()).expect("few");
        let join = |(wire, index): (&BorrowedFd<'_>, u32)| {
            let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let bell = &letterboxes[index as usize].bell;
            for descriptor in [*wire, bell.as_fd()] {
                let data = epoll::EventData::new_u64(0);
                epoll::add(&events, descriptor, data, epoll::EventFlags::IN)?;
            }
            let share = Share { index, count };
            Ok(Self { share, letterboxes: Arc::clone(&letterboxes), events })
        };
        wires.iter().zip(0..).map(join).collect()
    }

    /// Our part.
    pub(super) fn share(&self) -> Share {
        self.share
    }

    /// Hands `packet`, which came from `source` for another part, to its fabric. Returns whether it
    /// has room; if not, the packet is as good as lost.
    pub(super) fn hand_over(&self, number: Qpn, source: SocketAddr, packet: &[u8]) -> bool {
        let to = &self.letterboxes[self.share.index_of(number) as usize];
        if packet.len() > PACKET_MAX {
            return false;
        }
        let Some(mut bytes) = to.spare.pop() else { return false };
        bytes[..packet.len()].copy_from_slice(packet);
        let stray = Stray { source, len: packet.len(), bytes };
        assert!(to.strays.push(stray).is_ok(), "there are no more buffers than places");
        if !to.rung.swap(true, Ordering::AcqRel) {
            // A counter that is full is one more way of being readable.
            let _ = rustix::io::write(&to.bell, &1_u64.to_ne_bytes());
        }
        true
    }

    /// Whether packets wait for us.
    pub(super) fn has_mail(&self) -> bool {
        self.own().rung.load(Ordering::Relaxed)
    }

    /// Shows `look` the source and the bytes of each packet that others handed to us.
    pub(super) fn open_mail(&self, mut look: impl FnMut(SocketAddr, &[u8])) {
        let own = self.own();
        // Whoever set `rung` has not yet written, if there is nothing to read: the next turn reads
        // it. Clearing it earlier would leave a bell that nobody silences.
        if rustix::io::read(&own.bell, &mut [0; 8]).is_ok() {
            own.rung.swap(false, Ordering::AcqRel);
        }
        // As many as there are places: senders must not keep us here.
        for _ in 0..STRAYS_MAX {
            let Some(stray) = own.strays.pop() else { return };
            look(stray.source, &stray.bytes[..stray.len]);
            assert!(own.spare.push(stray.bytes).is_ok(), "it came from there");
        }
    }

    /// Readable when the wire or the letterbox is.
    pub(super) fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    fn own(&self) -> &Letterbox {
        &self.letterboxes[self.share.index as usize]
    }
}

/// Packets that wait in one letterbox.
const STRAYS_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(siblings: &Siblings) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let descriptor = siblings.event_descriptor();
        poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    /// A poller that sleeps through its packets stalls every connection on it.
    #[test]
    fn mail_wakes_its_reader_once_and_keeps_its_order() {
        let wires = [(); 3].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let descriptors: Vec<_> = wires.iter().map(AsFd::as_fd).collect();
        let family = Siblings::new(&descriptors).unwrap();
        let source: SocketAddr = "10.0.0.1:4791".parse().unwrap();
        for round in 0..3_u8 {
            for last in [4_u8, 7] {
                let number = Qpn(0x1_0200 | u32::from(last));
                assert!(family[0].hand_over(number, source, &[round, last]));
            }
            let readable = [0, 1, 2].map(|index: usize| is_readable(&family[index]));
            assert_eq!(readable, [false, true, false], "both modulo 3 are 1");
            let mut seen = Vec::new();
            family[1].open_mail(|from, bytes| {
                assert_eq!(from, source);
                seen.push(bytes.to_vec());
            });
            assert_eq!(seen, [[round, 4], [round, 7]]);
            assert!(!family[1].has_mail() && !is_readable(&family[1]), "the bell is silent");
        }
        let lost = (0..STRAYS_MAX + 1)
            .filter(|_| !family[2].hand_over(Qpn(0x1_0000), source, &[1; 60]))
            .count();
        assert_eq!(lost, 1, "a letterbox is bounded");
        assert!(!family[0].hand_over(Qpn(1), source, &[0; PACKET_MAX + 1]));
    }
}
