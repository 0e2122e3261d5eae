//! What the conformance suite cannot ask: sleep, hostile peers, and processes that end.

use std::convert::Infallible;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};
use rustix::time::{ClockId, clock_gettime};
use smcr_memory::{Lease, Region, SendPool};
use smcr_proto::{Instant, Rkey};
use tempfile::TempDir;

use super::bell::Bell;
use super::*;
use crate::{
    Completion, Domain, Event, Fabric as _, MESSAGE_LEN, Message, Opening as _, QpError, QpId,
    Registration, Rnic as _, Signs, Status, Tag, Work,
};

mod crowds;
mod hostile;
mod killed;
mod rests;
mod rings;

/// A NIC and what its poller has.
struct Nic {
    rnic: Rnic,
    fabric: Fabric,
    pool: SendPool,
    domain: Domain,
    seen: Vec<Seen>,
}

impl Nic {
    fn new(directory: &TempDir) -> Self {
        let path = directory.path().to_str().unwrap();
        let (rnic, fabric) = open(path, 1).unwrap().remove(0);
        Self::of(rnic, fabric)
    }

    fn of(mut rnic: Rnic, fabric: Fabric) -> Self {
        let pool = SendPool::new(Region::new(1 << 20).unwrap(), 1 << 16);
        let domain = rnic.open_domain().unwrap();
        Self { rnic, fabric, pool, domain, seen: Vec::new() }
    }

    /// A region that peers of the domain may write.
    fn window(&mut self, len: usize) -> (Region, Registration) {
        let region = Region::shared(len).unwrap();
        let registration = self.rnic.register(self.domain, &region).unwrap();
        (region, registration)
    }

    fn lease(&mut self, bytes: &[u8]) -> Lease {
        let filled = self.pool.fill(u32::try_from(bytes.len()).unwrap(), |room| {
            room.copy_in(bytes);
            Ok::<_, Infallible>(bytes.len())
        });
        filled.unwrap().unwrap().unwrap()
    }

    fn write(&mut self, qp: QpId, bytes: &[u8], rkey: Rkey, address: u64) {
        let lease = self.lease(bytes);
        self.fabric.post(qp, &mut vec![Work::Write { lease, rkey, address, tag: Tag(1) }]);
    }

    fn send(&mut self, qp: QpId, message: Message) {
        self.fabric.post(qp, &mut vec![Work::Send { message, tag: Tag(2) }]);
    }

    /// One turn of its poller. Leases come home.
    fn turn(&mut self) {
        self.turn_with(Signs::Maybe);
    }

    fn turn_with(&mut self, signs: Signs) {
        self.fabric.note_signs(signs);
        let mut out = Vec::with_capacity(64);
        self.fabric.poll(now(), &mut out);
        self.fabric.transmit(now());
        for completion in out {
            self.seen.push(match completion {
                Completion::Wrote { qp, lease, status, .. } => {
                    self.pool.take_back(lease);
                    Seen::Ended(qp, status)
                }
                Completion::Sent { qp, status, .. } => Seen::Ended(qp, status),
                Completion::Received { message, .. } => Seen::Received(message),
                Completion::ReceivedLong { .. } => panic!("nobody sends long messages"),
                Completion::Broke { qp, cause } => Seen::Broke(qp, cause),
            });
        }
    }

    /// Sleeps until it is woken.
    ///
    /// # Panics
    ///
    /// If nobody wakes it for long.
    fn sleep(&mut self) {
        let until = self.fabric.prepare_sleep(now());
        if until.is_some_and(|until| until <= now()) {
            return;
        }
        let descriptor = self.fabric.event_descriptor().unwrap();
        let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
        let woken = poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&patience));
        assert_eq!(woken.unwrap(), 1, "nobody wakes it");
    }

    fn received(&self) -> usize {
        self.seen.iter().filter(|one| matches!(one, Seen::Received(_))).count()
    }

    fn last_received(&self) -> Option<Message> {
        let mut received = self.seen.iter().rev();
        received.find_map(|one| if let Seen::Received(it) = one { Some(*it) } else { None })
    }

    fn broke(&self, id: QpId) -> Option<QpError> {
        let mut broke = self.seen.iter().filter_map(|one| match one {
            Seen::Broke(qp, cause) => (*qp == id).then_some(*cause),
            Seen::Ended(..) | Seen::Received(_) => None,
        });
        broke.next()
    }

    /// How many of its requests have ended.
    fn ended(&self, id: QpId) -> usize {
        self.seen.iter().filter(|one| matches!(one, Seen::Ended(qp, _) if *qp == id)).count()
    }
}

/// What a poller has been told.
#[derive(Debug)]
enum Seen {
    Ended(QpId, #[allow(dead_code, reason = "printed where a test fails")] Status),
    Received(Message),
    Broke(QpId, QpError),
}

pub(super) fn now() -> Instant {
    let now = clock_gettime(ClockId::Monotonic);
    Instant(u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).unwrap())
}

fn connect(a: &mut Nic, b: &mut Nic) -> [QpId; 2] {
    let first = a.rnic.open(a.domain).unwrap();
    let second = b.rnic.open(b.domain).unwrap();
    let (to_first, to_second) = (first.address(), second.address());
    let first = first.connect(to_second).unwrap();
    let second = second.connect(to_first).unwrap();
    [a.fabric.adopt(now(), first), b.fabric.adopt(now(), second)]
}

/// Takes turns until something is so.
///
/// # Panics
///
/// If it does not become so.
fn until(nics: &mut [&mut Nic], done: impl Fn(&[&mut Nic]) -> bool) {
    let start = now();
    while !done(nics) {
        nics.iter_mut().for_each(|nic| nic.turn());
        let seen: Vec<_> = nics.iter().map(|nic| &nic.seen).collect();
        assert!(now().since(start) < Duration::from_secs(10), "{seen:?}");
        thread::yield_now();
    }
}

/// Takes turns for a while.
fn for_a_while(nics: &mut [&mut Nic]) {
    let start = now();
    until(nics, |_| now().since(start) > Duration::from_millis(30));
}

const HELLO: Message = [7; MESSAGE_LEN];

/// Asserts that a write and its message arrive.
fn works([a, b]: [&mut Nic; 2], [qp_a, _]: [QpId; 2]) {
    let before = b.received();
    let (region, registration) = b.window(4_096);
    a.write(qp_a, &[9; 100], registration.rkey, registration.address + 50);
    a.send(qp_a, HELLO);
    until(&mut [&mut *a, &mut *b], |nics| nics[1].received() > before);
    let mut out = [0; 102];
    region.copy_out(49, &mut out);
    assert_eq!((out[0], out[1], out[100], out[101]), (0, 9, 9, 0));
    b.rnic.deregister(registration);
}

/// A wake that is lost is a connection that hangs: nobody has a timer for it.
#[test]
fn who_sleeps_is_woken_for_every_message() {
    let directory = tempfile::tempdir().unwrap();
    let (mut a, mut b) = (Nic::new(&directory), Nic::new(&directory));
    let [qp_a, qp_b] = connect(&mut a, &mut b);
    let play = |mut nic: Nic, qp: QpId, mut turn: bool| {
        move || {
            let mut answered = 0;
            while answered < ROUNDS {
                nic.turn();
                let received = nic.received();
                if turn || received > answered {
                    (turn, answered) = (false, received);
                    nic.send(qp, HELLO);
                    nic.turn();
                } else {
                    nic.sleep();
                }
            }
            // The other one may still wait for the last answer.
            (0..100).for_each(|_| nic.turn());
            nic
        }
    };
    thread::scope(|scope| {
        let other = scope.spawn(play(b, qp_b, false));
        let nic = play(a, qp_a, true)();
        assert_eq!(nic.broke(qp_a), None);
        drop(other.join().unwrap());
    });
}

const ROUNDS: usize = 3_000;

/// The ring is full, and the sender sleeps: the receiver that makes room must say so.
#[test]
fn who_sleeps_is_woken_for_room() {
    let directory = tempfile::tempdir().unwrap();
    let (mut a, mut b) = (Nic::new(&directory), Nic::new(&directory));
    let [qp_a, qp_b] = connect(&mut a, &mut b);
    works([&mut a, &mut b], [qp_a, qp_b]);
    let count = 20 * SENDS;
    thread::scope(|scope| {
        scope.spawn(move || {
            while b.received() < count {
                b.sleep();
                b.turn();
            }
            b
        });
        let mut sent = 0;
        while a.fabric.room(qp_a) < SENDS {
            a.turn();
        }
        let before = a.ended(qp_a);
        while a.ended(qp_a) - before < count {
            let room = a.fabric.room(qp_a).min(count - sent);
            (0..room).for_each(|_| a.send(qp_a, HELLO));
            sent += room;
            a.sleep();
            a.turn();
        }
    });
}

/// A peer must not be able to write where another connection lives by now.
#[test]
fn a_deregistered_region_is_not_written_any_more() {
    let directory = tempfile::tempdir().unwrap();
    let (mut a, mut b) = (Nic::new(&directory), Nic::new(&directory));
    let qps = connect(&mut a, &mut b);
    let (region, registration) = b.window(4_096);
    let (rkey, address) = (registration.rkey, registration.address);
    a.write(qps[0], &[1; 10], rkey, address);
    a.send(qps[0], HELLO);
    until(&mut [&mut a, &mut b], |nics| nics[1].received() == 1);
    b.rnic.deregister(registration);
    for_a_while(&mut [&mut a, &mut b]);
    a.write(qps[0], &[2; 10], rkey, address);
    until(&mut [&mut a, &mut b], |nics| {
        nics[0].broke(qps[0]).is_some() && nics[1].broke(qps[1]).is_some()
    });
    assert_eq!(a.broke(qps[0]), Some(QpError::RemoteError));
    assert_eq!(b.broke(qps[1]), Some(QpError::PeerMisbehaved));
    let mut out = [0; 10];
    region.copy_out(0, &mut out);
    assert_eq!(out, [1; 10]);
}

/// Whoever removes the directory unplugs all NICs in it. Everything must come home.
#[test]
fn a_nic_whose_directory_goes_is_gone() {
    let directory = tempfile::tempdir().unwrap();
    let (mut a, mut b) = (Nic::new(&directory), Nic::new(&directory));
    let qps = connect(&mut a, &mut b);
    works([&mut a, &mut b], qps);
    let late = a.rnic.open(a.domain).unwrap();
    let peer = b.rnic.port();
    directory.close().unwrap();
    for (nic, qp) in [(&mut a, qps[0]), (&mut b, qps[1])] {
        let start = now();
        while nic.broke(qp).is_none() {
            if nic.fabric.room(qp) > 0 {
                nic.send(qp, HELLO);
            }
            nic.turn();
            assert!(now().since(start) < Duration::from_secs(10));
        }
        // The other one may have been told first, and have left.
        let cause = nic.broke(qp).unwrap();
        assert!([QpError::PortDown, QpError::RetriesExceeded].contains(&cause), "{cause:?}");
        while !nic.rnic.descriptor().is_some_and(readable) {
            assert!(now().since(start) < Duration::from_secs(10));
        }
        assert_eq!(nic.rnic.event(), Some(Event::Gone));
        assert_eq!(nic.rnic.event(), None);
        assert!(nic.rnic.open_domain().is_err() && !nic.rnic.has_route(peer.gid));
        while nic.fabric.room(qp) < SENDS {
            nic.turn();
        }
        assert_eq!(nic.pool.leases_out(), 0);
    }
    let address = crate::QpAddress { gid: peer.gid, ..late.address() };
    assert!(late.connect(address).is_err());
}

pub(super) fn readable(descriptor: BorrowedFd<'_>) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&at_once)).unwrap() == 1
}

/// Both ends of a bell.
pub(super) fn bells() -> [Bell; 2] {
    let ends = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (one, other) = ends.unwrap();
    [one, other].map(|end| Bell::over(end.into()))
}

/// Whoever closes the first one waits so long for a peer that does not read: it is a socket in
/// which nobody has read that another one came, which lingers.
pub(super) fn slow_to_close(seconds: u64) -> ([UnixStream; 2], TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let lingering = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    lingering.set_nonblocking(true).unwrap();
    while rustix::io::write(&lingering, &[0; 65_536]) != Err(Errno::AGAIN) {}
    set_socket_linger(&lingering, Some(Duration::from_secs(seconds))).unwrap();
    lingering.set_nonblocking(false).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let given = [lingering.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&given)));
    sendmsg(&theirs, &[IoSlice::new(&[1])], &mut control, SendFlags::empty()).unwrap();
    ([ours, theirs], listener)
}

/// The operator must see which directory, and why.
#[test]
fn a_directory_that_cannot_be_used_is_named() {
    let error = open("/no/such/place", 1).unwrap_err().to_string();
    assert!(
        error.contains("/no/such/place") && error.contains("there is no such directory"),
        "{error}"
    );
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = open(file.path().to_str().unwrap(), 1).unwrap_err().to_string();
    assert!(error.contains("Not a directory"), "{error}");
}
