//! Both halves, with real sockets and real threads.

use std::os::fd::{AsFd as _, OwnedFd};

use libc::iovec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use smcr_os::Foreign as _;

use super::*;
use crate::layout::FILLER_LEN;
use crate::{Application, Held, thread};

mod ends;
mod hostile;
mod shortcut;

/// A connection: the gateway's socket and rings, and the application's.
struct Pair {
    near: OwnedFd,
    gateway: Gateway,
    app: OwnedFd,
    program: Application,
}

impl Pair {
    fn new() -> Self {
        let (near, app) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        rustix::io::ioctl_fionbio(&near, true).unwrap();
        Gateway::prepare(app.as_fd()).unwrap();
        let gateway = Gateway::create().unwrap();
        let program = Application::map(gateway.memory()).unwrap();
        Self { near, gateway, app, program }
    }

    /// The gateway looks at the rings by itself.
    fn awake() -> Self {
        let pair = Self::new();
        pair.gateway.wake_up();
        pair
    }

    fn app_writes(&self, bytes: &[u8]) -> usize {
        writes(&self.program, &self.app, bytes)
    }

    fn app_reads(&self, most: usize) -> Vec<u8> {
        reads(&self.program, &self.app, most)
    }

    fn gateway_reads(&self, most: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; most];
        let read = self.gateway.read(self.near.as_fd(), most, |span| out(span, &mut bytes))?;
        if self.gateway.must_drain() {
            self.gateway.drain(self.near.as_fd());
        }
        bytes.truncate(read);
        Ok(bytes)
    }

    fn gateway_writes(&self, bytes: &[u8]) -> io::Result<usize> {
        self.gateway.write(self.near.as_fd(), |span| into(span, bytes))
    }

    /// What `poll` says of the application's socket.
    fn app_sees(&self, events: PollFlags) -> PollFlags {
        sees(&self.app, events, 0)
    }
}

fn part(bytes: &[u8]) -> iovec {
    iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

fn writes(program: &Application, app: &OwnedFd, bytes: &[u8]) -> usize {
    let (first, second) = bytes.split_at(bytes.len() / 3);
    // SAFETY: the parts are live slices.
    unsafe { program.write(app.as_fd(), &[part(first), part(second)], thread()) }.unwrap()
}

fn reads(program: &Application, app: &OwnedFd, most: usize) -> Vec<u8> {
    let mut bytes = vec![0_u8; most];
    let (first, second) = bytes.split_at_mut(most / 3);
    let parts = [first, second]
        .map(|part| iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() });
    // SAFETY: the parts are live exclusive slices.
    let read = unsafe { program.read(app.as_fd(), &parts, false) };
    bytes.truncate(read);
    bytes
}

fn sees(socket: &OwnedFd, events: PollFlags, patience_s: i64) -> PollFlags {
    let mut fds = [PollFd::new(socket, events)];
    poll(&mut fds, Some(&Timespec { tv_sec: patience_s, tv_nsec: 0 })).unwrap();
    fds[0].revents()
}

fn out(span: &Span<'_>, bytes: &mut [u8]) -> usize {
    let mut done = 0;
    for piece in span.pieces() {
        let len = piece.len.min(bytes.len() - done);
        // SAFETY: the piece has so many bytes, and so has the slice.
        unsafe { piece.base.as_ptr().copy_to(bytes[done..].as_mut_ptr(), len) };
        done += len;
    }
    done
}

fn into(span: &Span<'_>, bytes: &[u8]) -> usize {
    let mut done = 0;
    for piece in span.pieces() {
        let len = piece.len.min(bytes.len() - done);
        // SAFETY: the piece has so many bytes, and so has the slice.
        unsafe { piece.base.as_ptr().copy_from(bytes[done..].as_ptr(), len) };
        done += len;
    }
    done
}

fn is_blocked<T: fmt::Debug>(result: io::Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

/// Bytes that differ at all places near each other.
fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|at| u8::try_from(at % 251).unwrap()).collect()
}

#[test]
fn bytes_come_as_they_went_and_wrap() {
    let pair = Pair::awake();
    let (mut sent, mut at) = (0, 0);
    for len in [1, 1000, 100_000, 131_072, 7, 99_999, 40_000, 131_071] {
        let bytes = pattern(at, len);
        assert_eq!(pair.app_writes(&bytes), len);
        assert_eq!(pair.gateway_reads(len + 5).unwrap(), bytes);
        assert_eq!(pair.gateway_writes(&bytes).unwrap(), len);
        assert_eq!(pair.program.readable() as usize, len);
        assert_eq!(pair.app_reads(len + 5), bytes);
        (sent, at) = (sent + len, at + len);
    }
    assert!(sent > 2 * RING_LEN as usize);
    assert!(is_blocked(pair.gateway_reads(1)) && pair.app_reads(1).is_empty());
    assert_eq!(sees(&pair.near, PollFlags::IN, 0), PollFlags::empty(), "nobody has kicked");
}

/// To every kind of poll the socket must look as if the bytes went by it.
#[test]
fn the_socket_is_readable_as_long_as_bytes_are() {
    let pair = Pair::awake();
    let readable = || pair.app_sees(PollFlags::IN) == PollFlags::IN;
    assert!(!readable());
    pair.gateway_writes(b"abc").unwrap();
    pair.gateway_writes(b"def").unwrap();
    assert!(readable());
    assert_eq!(pair.app_reads(2), b"ab");
    assert!(readable());
    assert_eq!(pair.app_reads(9), b"cdef");
    assert!(!readable());
    // A thread that has waited in `recv` has taken the token.
    pair.gateway_writes(b"ghi").unwrap();
    assert_eq!(recv(&pair.app, &mut [0; 1][..], RecvFlags::empty()).unwrap().0, 1);
    pair.program.token_taken();
    assert_eq!(pair.app_reads(1), b"g");
    assert!(pair.gateway.look().wants_token && !readable());
    pair.gateway.serve(pair.near.as_fd());
    assert!(readable() && !pair.gateway.look().wants_token);
    assert_eq!(pair.app_reads(9), b"hi");
    assert!(!readable());
}

#[test]
fn whoever_watches_the_ring_needs_no_token() {
    let pair = Pair::awake();
    pair.gateway.word(Word::Spinning).store(1, SeqCst);
    pair.gateway_writes(b"abc").unwrap();
    assert_eq!(pair.app_sees(PollFlags::IN), PollFlags::empty());
    assert!(pair.gateway.has_unread(), "if it was killed meanwhile");
    pair.gateway.word(Word::Spinning).store(0, SeqCst);
    let looks = |times: u32| {
        let mut left = times;
        pair.program.spin(|| {
            left = left.saturating_sub(1);
            left > 0
        })
    };
    assert!(looks(0));
    assert_eq!(pair.app_reads(9), b"abc");
    assert!(!looks(9));
    assert!(pair.program.spin(|| pair.gateway_writes(b"d").is_ok()), "after one offer");
    assert_eq!(pair.app_reads(9), b"d");
    pair.gateway.finish();
    assert!(looks(0));
}

/// While the gateway looks, nobody makes a system call; when it sleeps, each change wakes it.
#[test]
fn a_kick_comes_only_when_it_is_needed() {
    let pair = Pair::new();
    let kicked = || {
        let mut room = [0; 100];
        recv(&pair.near, &mut room[..], RecvFlags::DONTWAIT).map_or(0, |(len, _)| len)
    };
    pair.app_writes(b"first");
    pair.app_writes(b"second");
    assert_eq!(kicked(), 1, "one for each sleep");
    pair.gateway.wake_up();
    pair.app_writes(b"third");
    assert_eq!(kicked(), 0);
    assert!(pair.gateway.look().readable && !pair.gateway.look().is_any());
    pair.gateway.fall_asleep();
    assert!(!pair.gateway.look().is_any());
    pair.app_writes(b"fourth");
    assert_eq!((kicked(), pair.gateway.look().readable), (1, true));
    assert_eq!(pair.gateway_reads(100).unwrap(), b"firstsecondthirdfourth");
}

#[test]
fn a_full_ring_makes_the_socket_unwritable_until_half_is_free() {
    let pair = Pair::awake();
    let writable = || pair.app_sees(PollFlags::OUT) == PollFlags::OUT;
    let len = RING_LEN as usize;
    assert_eq!(pair.app_writes(&pattern(0, len + 1)), len);
    assert!(writable(), "nobody has said that it is full");
    for _ in 0..50 {
        assert_eq!(pair.app_writes(b"x"), 0);
        assert!(pair.program.make_unwritable(pair.app.as_fd()));
        assert!(!writable());
    }
    pair.gateway.hear(pair.near.as_fd(), false);
    assert!(!writable());
    assert_eq!(pair.gateway_reads(len / 2 - 1).unwrap().len(), len / 2 - 1);
    assert!(!writable());
    assert_eq!(pair.gateway_reads(1).unwrap().len(), 1);
    assert!(writable());
    assert_eq!(pair.app_writes(&pattern(0, len)), len / 2);
    pair.gateway_reads(len / 2).unwrap();
    assert!(!pair.program.make_unwritable(pair.app.as_fd()), "there is room by now");
    assert!(!writable(), "but filler has come late");
    pair.gateway.hear(pair.near.as_fd(), false);
    assert!(writable());
    // Kicks still arrive.
    pair.gateway.fall_asleep();
    assert_eq!(pair.app_writes(b"x"), 1);
    assert_eq!(pair.gateway.word(Word::Asleep).load(SeqCst), 0);
}

#[test]
fn a_gateway_that_waits_for_room_hears_of_it() {
    let pair = Pair::awake();
    let len = RING_LEN as usize;
    assert_eq!(pair.gateway_writes(&pattern(0, 2 * len)).unwrap(), len);
    assert!(is_blocked(pair.gateway_writes(b"x")));
    pair.app_reads(len / 2 - 1);
    assert!(!pair.gateway.look().writable);
    pair.gateway.fall_asleep();
    pair.app_reads(1);
    assert_eq!(sees(&pair.near, PollFlags::IN, 0), PollFlags::IN, "a kick");
    assert!(pair.gateway.hear(pair.near.as_fd(), false));
    assert_eq!(pair.gateway_writes(&pattern(0, len)).unwrap(), len / 2);
}

/// Each thread of a program may find the ring full at the same time.
#[test]
fn much_filler_leaves_room_for_kicks() {
    let pair = Pair::awake();
    pair.app_writes(&pattern(0, RING_LEN as usize));
    while send(&pair.app, &[0; FILLER_LEN], SendFlags::DONTWAIT).is_ok() {
        pair.gateway.hear(pair.near.as_fd(), false);
        assert!(send(&pair.app, &[0], SendFlags::DONTWAIT).is_ok(), "a kick");
        if pair.gateway.readable() == Ok(0) {
            break;
        }
        pair.gateway_reads(1000).unwrap();
    }
    assert_eq!(pair.gateway.readable(), Ok(0));
}

/// Many sleeps put many kicks into the socket, which must not become unwritable by them. Nor may a
/// kick be missing because others were left there.
#[test]
fn kicks_are_taken_away() {
    let len = RING_LEN as usize;
    for filled in [0, len / 2 + 1] {
        let pair = Pair::awake();
        pair.app_writes(&pattern(0, filled));
        for _ in 0..1000 {
            pair.gateway.fall_asleep();
            pair.app_writes(b"x");
            assert_eq!(sees(&pair.near, PollFlags::IN, 0), PollFlags::IN, "a kick");
            pair.gateway.hear(pair.near.as_fd(), false);
            assert_eq!(pair.app_sees(PollFlags::OUT), PollFlags::OUT);
            pair.gateway_reads(1).unwrap();
        }
    }
}

/// How much goes each way when everything happens at once.
const TOTAL: usize = 6 << 20;

fn write_all(program: Application, app: &OwnedFd) {
    let (mut sent, mut lens) = (0, [1, 64, 5000, 200_000].into_iter().cycle());
    while sent < TOTAL {
        let len = lens.next().unwrap();
        let bytes = pattern(sent, usize::min(len, TOTAL - sent));
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            rest = &rest[writes(&program, app, rest)..];
            if !rest.is_empty() && program.make_unwritable(app.as_fd()) {
                let seen = sees(app, PollFlags::OUT, 20);
                assert!(seen.contains(PollFlags::OUT), "room, at {sent}");
            }
        }
        sent += bytes.len();
    }
    program.finish(app.as_fd());
}

/// What the program has of its rings may change meanwhile: `rings` is told how much has come.
fn read_all(rings: impl Fn(usize) -> Application, app: &OwnedFd) {
    let (mut came, mut lens) = (0, [3, 100, 70_000].into_iter().cycle());
    while came < TOTAL {
        let program = rings(came);
        let bytes = reads(&program, app, lens.next().unwrap());
        assert_eq!(bytes, pattern(came, bytes.len()), "at {came}");
        came += bytes.len();
        let mut looks = came % 3;
        let offer = || {
            looks = looks.saturating_sub(1);
            std::thread::yield_now();
            looks > 0
        };
        if bytes.is_empty() && !program.spin(offer) {
            assert!(sees(app, PollFlags::IN, 20).contains(PollFlags::IN), "at {came}");
            if recv(app, &mut [0; 1][..], RecvFlags::DONTWAIT).is_ok() {
                program.token_taken();
            }
        }
    }
}

/// Sleeps as a poller does, unless something has come.
fn sleep(pair: &Pair) {
    pair.gateway.fall_asleep();
    fence(SeqCst);
    if !pair.gateway.look().is_any() {
        assert!(sees(&pair.near, PollFlags::IN, 20).contains(PollFlags::IN), "a kick");
        pair.gateway.hear(pair.near.as_fd(), false);
        // This one waits by level, so nothing may be left.
        pair.gateway.drain(pair.near.as_fd());
    }
    pair.gateway.wake_up();
    pair.gateway.serve(pair.near.as_fd());
}

/// Both sides sleep whenever they have nothing to do, in both directions, with a few bytes at a
/// time and more than fit. A wake-up that is lost ends the test.
#[test]
fn nobody_sleeps_while_there_is_something_to_do() {
    let pair = Pair::new();
    let (app, program) = (&pair.app, pair.program);
    std::thread::scope(|scope| {
        scope.spawn(move || write_all(program, app));
        scope.spawn(move || read_all(|_| program, app));
        // The gateway sends back what comes.
        let (mut held, mut has_end, mut sent) = (Vec::new(), false, 0);
        while !has_end || sent < TOTAL {
            let mut moved = false;
            if held.len() < 300_000
                && !has_end
                && let Ok(bytes) = pair.gateway_reads(50_000)
            {
                (has_end, moved) = (bytes.is_empty(), true);
                held.extend(bytes);
            }
            if !held.is_empty()
                && let Ok(written) = pair.gateway_writes(&held)
            {
                held.drain(..written);
                (sent, moved) = (sent + written, true);
            }
            if !moved {
                sleep(&pair);
            }
        }
    });
}
