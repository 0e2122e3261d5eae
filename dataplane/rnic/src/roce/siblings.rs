//! Several fabrics that form one NIC: they share one address and UDP port and have a socket each.
//!
//! The kernel steers each datagram by its destination queue pair number, and every fabric assigns
//! its queue pairs numbers that are steered to it. But datagrams that the kernel or a device has
//! coalesced go where the first of them goes. The fabric that receives a packet for another one
//! checks its ICRC and forwards it here. Forwarded packets keep their order.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, epoll, eventfd};
use smcr_proto::Qpn;

use super::batch::PACKET_MAX;
use crate::queue::Queue;

/// The queue pair numbers of one fabric of a NIC: those whose last byte modulo `count` is `index`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Which share this is.
    pub index: u32,
    /// How many shares there are: 1 to 256.
    pub count: u32,
}

impl Share {
    /// All numbers, for a NIC with one fabric.
    pub const ALL: Self = Self { index: 0, count: 1 };

    /// The index of the share that `number` belongs to.
    pub(super) fn index_of(self, number: Qpn) -> u32 {
        (number.0 & 0xff) % self.count
    }

    /// Whether `number` belongs to this share.
    pub(super) fn has(self, number: Qpn) -> bool {
        self.index_of(number) == self.index
    }
}

/// A packet with a correct ICRC that is forwarded to the fabric of its queue pair.
#[derive(Debug)]
struct Stray {
    source: SocketAddr,
    len: usize,
    bytes: Buffer,
}

type Buffer = Box<[u8; PACKET_MAX]>;

/// The queue of packets that other fabrics forward to one fabric.
#[derive(Debug)]
struct Mailbox {
    strays: Queue<Stray>,
    /// Free buffers.
    spare: Queue<Buffer>,
    /// A sender has signalled `wakeup`, or is about to.
    signalled: AtomicBool,
    /// An eventfd that is readable while packets wait, so that it wakes a fabric that sleeps.
    wakeup: OwnedFd,
}

/// One fabric's access to the mailboxes of all fabrics of its NIC.
#[derive(Debug)]
pub(super) struct Siblings {
    share: Share,
    mailboxes: Arc<[Mailbox]>,
    /// An epoll descriptor, readable when the wire or our mailbox is.
    events: OwnedFd,
    /// Free buffers of our mailbox for whose place another fabric has not finished with the one
    /// before. They are put back the next time.
    kept: RefCell<Vec<Buffer>>,
}

impl Mailbox {
    fn new() -> io::Result<Self> {
        let spare = Queue::new(STRAYS_MAX);
        while spare.push(Box::new([0; PACKET_MAX])).is_ok() {}
        let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            strays: Queue::new(STRAYS_MAX),
            spare,
            signalled: AtomicBool::new(false),
            wakeup,
        })
    }
}

impl Siblings {
    /// Creates one for each fabric of a NIC. `wires` are the descriptors of their wires.
    ///
    /// # Errors
    ///
    /// When the process is out of descriptors.
    pub(super) fn new(wires: &[BorrowedFd<'_>]) -> io::Result<Vec<Self>> {
        let mailboxes: Vec<_> = wires.iter().map(|_| Mailbox::new()).collect::<io::Result<_>>()?;
        let mailboxes: Arc<[Mailbox]> = mailboxes.into();
        let count = u32::try_from(wires.len()).expect("few");
        let join = |(wire, index): (&BorrowedFd<'_>, u32)| {
            let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let wakeup = &mailboxes[index as usize].wakeup;
            for descriptor in [*wire, wakeup.as_fd()] {
                let data = epoll::EventData::new_u64(0);
                epoll::add(&events, descriptor, data, epoll::EventFlags::IN)?;
            }
            let share = Share { index, count };
            let kept = RefCell::new(Vec::with_capacity(STRAYS_MAX));
            Ok(Self { share, mailboxes: Arc::clone(&mailboxes), events, kept })
        };
        wires.iter().zip(0..).map(join).collect()
    }

    /// Our share of the queue pair numbers.
    pub(super) fn share(&self) -> Share {
        self.share
    }

    /// Forwards `packet`, which came from `source` for another share, to its fabric. Returns false
    /// if that fabric's mailbox is full or the packet is too long: then it is dropped, as if the
    /// network had lost it.
    pub(super) fn forward(&self, number: Qpn, source: SocketAddr, packet: &[u8]) -> bool {
        let to = &self.mailboxes[self.share.index_of(number) as usize];
        if packet.len() > PACKET_MAX {
            return false;
        }
        let Some(mut bytes) = to.spare.pop() else { return false };
        bytes[..packet.len()].copy_from_slice(packet);
        let stray = Stray { source, len: packet.len(), bytes };
        assert!(to.strays.push(stray).is_ok(), "the queue holds as many packets as buffers exist");
        if !to.signalled.swap(true, Ordering::AcqRel) {
            // The write fails only if the eventfd's counter is full. Then it is readable already.
            let _ = rustix::io::write(&to.wakeup, &1_u64.to_ne_bytes());
        }
        true
    }

    /// Whether forwarded packets wait for us, or buffers that nobody else can give back.
    pub(super) fn has_forwarded(&self) -> bool {
        self.own().signalled.load(Ordering::Relaxed) || !self.kept.borrow().is_empty()
    }

    /// Calls `handle` with the source and the bytes of each packet that was forwarded to us.
    pub(super) fn receive_forwarded(&self, mut handle: impl FnMut(SocketAddr, &[u8])) {
        let own = self.own();
        // If the read fails, the sender that set `signalled` has not written yet; a later turn
        // reads it. If we cleared `signalled` before that, the eventfd would stay readable.
        if rustix::io::read(&own.wakeup, &mut [0; 8]).is_ok() {
            own.signalled.swap(false, Ordering::AcqRel);
        }
        let mut kept = self.kept.borrow_mut();
        // The loop is bounded, so that fast senders cannot keep us in it.
        for _ in 0..STRAYS_MAX {
            let Some(stray) = own.strays.pop() else { break };
            handle(stray.source, &stray.bytes[..stray.len]);
            kept.push(stray.bytes);
        }
        while let Some(buffer) = kept.pop() {
            if let Err(buffer) = own.spare.push(buffer) {
                kept.push(buffer);
                break;
            }
        }
    }

    /// A descriptor that is readable when the wire or our mailbox is.
    pub(super) fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    fn own(&self) -> &Mailbox {
        &self.mailboxes[self.share.index as usize]
    }
}

/// The most packets that wait in one mailbox.
const STRAYS_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    /// The wires of three fabrics, their mailboxes, and where packets come from.
    fn family() -> ([UdpSocket; 3], Vec<Siblings>, SocketAddr) {
        let wires = [(); 3].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let siblings = Siblings::new(&wires.each_ref().map(AsFd::as_fd)).unwrap();
        (wires, siblings, "10.0.0.1:4791".parse().unwrap())
    }

    fn is_readable(siblings: &Siblings) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let descriptor = siblings.event_descriptor();
        poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&now)).unwrap() == 1
    }

    /// Buffers come back while another fabric, interrupted, holds the place of one: it has it, but
    /// has not said so.
    #[test]
    fn a_fabric_that_is_interrupted_stops_nobody() {
        let (_wires, family, source) = family();
        let taken = family[2].own().spare.begin_pop().unwrap();
        for round in 0..4_usize {
            let sent = (0..STRAYS_MAX).filter(|_| family[0].forward(Qpn(0x102), source, b"x"));
            let (sent, mut seen) = (sent.count(), 0);
            family[2].receive_forwarded(|_, _| seen += 1);
            assert_eq!(seen, sent);
            assert_eq!(sent, if round == 0 { STRAYS_MAX - 1 } else { 0 });
        }
        assert!(family[2].has_forwarded(), "it looks again");
        let buffer = family[2].own().spare.end_pop(taken).unwrap();
        family[2].receive_forwarded(|_, _| panic!("there is nothing"));
        assert!(!family[2].has_forwarded() && family[2].own().spare.push(buffer).is_ok());
        let sent = (0..=STRAYS_MAX).filter(|_| family[0].forward(Qpn(0x102), source, b"x"));
        assert_eq!(sent.count(), STRAYS_MAX);
    }

    /// A poller that sleeps through its packets stalls every connection on it.
    #[test]
    fn forwarded_packets_wake_their_fabric_once_and_keep_their_order() {
        let (_wires, family, source) = family();
        for round in 0..3_u8 {
            for last in [4_u8, 7] {
                let number = Qpn(0x1_0200 | u32::from(last));
                assert!(family[0].forward(number, source, &[round, last]));
            }
            let readable = [0, 1, 2].map(|index: usize| is_readable(&family[index]));
            assert_eq!(readable, [false, true, false], "both modulo 3 are 1");
            let mut seen = Vec::new();
            family[1].receive_forwarded(|from, bytes| {
                assert_eq!(from, source);
                seen.push(bytes.to_vec());
            });
            assert_eq!(seen, [[round, 4], [round, 7]]);
            assert!(
                !family[1].has_forwarded() && !is_readable(&family[1]),
                "the eventfd is drained"
            );
        }
        let lost = (0..STRAYS_MAX + 1)
            .filter(|_| !family[2].forward(Qpn(0x1_0000), source, &[1; 60]))
            .count();
        assert_eq!(lost, 1, "a mailbox is bounded");
        assert!(!family[0].forward(Qpn(1), source, &[0; PACKET_MAX + 1]));
    }
}
