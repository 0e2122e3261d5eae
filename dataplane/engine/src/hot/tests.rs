//! The kernel's streams that have rings, with programs that are threads.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{RecvFlags, recv};
use smcgate_rings::{Application, Gateway, RING_LEN, thread};
use smcr_proto::Instant;

use super::*;
use crate::clock::Clock;
use crate::kernel::Kernel;
use crate::mailbox::Waker;
use crate::near::{AtEnd, Near};
use crate::streams::Streams;

mod shortcut;

const TOO_LONG: Duration = Duration::from_secs(20);

/// A program.
struct Program {
    socket: OwnedFd,
    rings: Application,
}

impl Program {
    fn writes(&self, bytes: &[u8]) {
        let written = self.rings.write_slice(self.socket.as_fd(), bytes, thread());
        assert_eq!(written, Ok(bytes.len()));
    }

    /// Waits as a thread does whose socket blocks.
    fn reads(&self, room: &mut [u8]) -> usize {
        loop {
            let read = self.rings.read_slice(self.socket.as_fd(), room);
            if read > 0 {
                return read;
            }
            match recv(&self.socket, &mut [0; 1][..], RecvFlags::empty()).unwrap().0 {
                0 => return self.rings.read_slice(self.socket.as_fd(), room),
                _ => self.rings.token_taken(),
            }
        }
    }
}

fn key(slot: u16) -> Key {
    Key { slot, generation: 1, far: false, turn: 0 }
}

fn kernel() -> (Waker, Kernel) {
    let waker = Waker::new().unwrap();
    let kernel = Kernel::new(waker.descriptor(), None, Clock::new()).unwrap();
    (waker, kernel)
}

fn pair() -> (Program, Near) {
    let (near, app) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    app.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let gateway = Gateway::create().unwrap();
    Gateway::prepare(app.as_fd()).unwrap();
    let rings = Application::map(gateway.memory()).unwrap();
    let near = Near::of_program(near.into(), AtEnd::default(), Some(Arc::new(gateway)));
    (Program { socket: app.into(), rings }, near)
}

/// What is reported now, without a sleep.
fn reported(kernel: &mut Kernel, streams: &[Near]) -> Vec<Event> {
    let mut events = Vec::new();
    kernel.poll(&mut events);
    for event in &mut events {
        kernel.complete(&streams[usize::from(event.key.slot)], event);
    }
    events
}

/// The same, until the kernel was asked.
fn reported_by_all(kernel: &mut Kernel, streams: &[Near]) -> Vec<Event> {
    (0..4).flat_map(|_| reported(kernel, streams)).collect()
}

/// The same after a sleep that something ends.
fn slept(kernel: &mut Kernel, streams: &[Near], now: Instant) -> Vec<Event> {
    let clock = kernel.clock();
    let begun = clock.now();
    kernel.sleep(now, Some(begun + TOO_LONG));
    assert!(clock.now().since(begun) < TOO_LONG, "nobody has woken the poller");
    reported(kernel, streams)
}

fn all_of(kernel: &mut Kernel, near: &Near) -> Vec<u8> {
    let mut room = [0; 100];
    let mut all = Vec::new();
    while let Ok(len @ 1..) = kernel.read_slice(near, &mut room) {
        all.extend_from_slice(&room[..len]);
    }
    all
}

#[test]
fn a_program_wakes_the_poller_and_then_is_looked_at() {
    let (_waker, mut kernel) = kernel();
    let (program, near) = pair();
    program.writes(b"early");
    kernel.watch(key(0), &near).unwrap();
    let streams = [near];
    let events = slept(&mut kernel, &streams, Instant(0));
    assert!(events.iter().any(|event| event.readable && event.key == key(0)));
    assert_eq!(all_of(&mut kernel, &streams[0]), b"early");
    reported_by_all(&mut kernel, &streams);
    program.writes(b"hot");
    assert!(kernel.has_more(&streams[0]));
    let events = reported(&mut kernel, &streams);
    assert!(events.is_empty(), "somebody has just looked");
    program.writes(b"ter");
    let events = reported(&mut kernel, &streams);
    assert!(events.len() == 1 && events[0].readable && events[0].by_rings);
    assert!(reported(&mut kernel, &streams).is_empty(), "it is news once");
    assert_eq!(all_of(&mut kernel, &streams[0]), b"hotter");
    program.writes(b"late");
    assert_eq!(slept(&mut kernel, &streams, Instant(0)).len(), 1, "it must not sleep");
    assert_eq!(all_of(&mut kernel, &streams[0]), b"late");
    kernel.write_slice(&streams[0], b"answer").unwrap();
    let mut room = [0; 100];
    assert_eq!(program.reads(&mut room), 6);
}

/// With more programs than are looked at, none is forgotten.
#[test]
fn those_that_are_left_alone_wake_the_poller() {
    let (_waker, mut kernel) = kernel();
    let count = HOT_RINGS_MAX + 9;
    let (programs, streams): (Vec<_>, Vec<_>) = (0..count).map(|_| pair()).unzip();
    for (stream, slot) in streams.iter().zip(0..) {
        kernel.watch(key(slot), stream).unwrap();
        programs[usize::from(slot)].writes(b"x");
    }
    let mut heard = vec![0; count];
    for round in 1..=5 {
        while heard.iter().sum::<usize>() < round * count {
            for event in slept(&mut kernel, &streams, Instant(0)) {
                let slot = usize::from(event.key.slot);
                heard[slot] += all_of(&mut kernel, &streams[slot]).len();
            }
        }
        assert!(heard.iter().all(|bytes| *bytes == round));
        programs.iter().for_each(|program| program.writes(b"y"));
    }
}

#[test]
fn after_a_quiet_while_nobody_looks() {
    let (waker, mut kernel) = kernel();
    let (program, near) = pair();
    kernel.watch(key(0), &near).unwrap();
    let streams = [near];
    let ms = |count| Instant(0) + Duration::from_millis(count);
    waker.wake();
    for now in [1, 1, 3] {
        kernel.sleep(ms(now), Some(ms(now)));
        assert!(reported(&mut kernel, &streams).iter().all(|event| !event.readable));
    }
    let rings = Arc::clone(streams[0].rings().unwrap());
    assert!(!rings.is_awake());
    program.writes(b"x");
    let events = slept(&mut kernel, &streams, ms(4));
    assert!(events.len() == 1 && rings.is_awake());
}

/// A window or a timer may let the poller read from rings that it does not look at. What it takes
/// out of the socket then may be a kick, which comes no more.
#[test]
fn whoever_takes_a_kick_looks_by_himself() {
    let (_waker, mut kernel) = kernel();
    let (program, near) = pair();
    kernel.watch(key(0), &near).unwrap();
    let streams = [near];
    reported(&mut kernel, &streams);
    let rings = Arc::clone(streams[0].rings().unwrap());
    program.writes(&[7; RING_LEN as usize]);
    assert!(program.rings.make_unwritable(program.socket.as_fd()));
    reported(&mut kernel, &streams);
    kernel.hot.remove(&rings);
    let mut room = vec![0; RING_LEN as usize - 1];
    kernel.read_slice(&streams[0], &mut room[..9]).unwrap();
    assert!(!rings.is_awake());
    program.writes(b"kick");
    kernel.read_slice(&streams[0], &mut room).unwrap();
    program.writes(b"more");
    assert!(slept(&mut kernel, &streams, Instant(0)).iter().any(|event| event.readable));
    assert_eq!(all_of(&mut kernel, &streams[0]), b"more");
}

/// The kernel takes longer to answer than all rings, so it is not asked in each turn. What it knows
/// is heard all the same, and soon.
#[test]
fn the_kernel_is_asked_beside_rings() {
    let (_waker, mut kernel) = kernel();
    let (program, near) = pair();
    let (other, far) = UnixStream::pair().unwrap();
    other.set_nonblocking(true).unwrap();
    let streams = [near, Near::from(OwnedFd::from(other))];
    kernel.watch(key(0), &streams[0]).unwrap();
    kernel.watch(key(1), &streams[1]).unwrap();
    program.writes(b"x");
    while !slept(&mut kernel, &streams, Instant(0)).iter().any(|event| event.readable) {}
    for _ in 0..3 {
        // Whatever the kernel has to say of what was.
        while !reported(&mut kernel, &streams).is_empty() {}
        rustix::io::write(&far, b"!").unwrap();
        let mut turns = (1..100).filter(|turn| {
            program.writes(&[*turn]);
            let events = reported(&mut kernel, &streams);
            assert!(events.iter().any(|event| event.by_rings), "in each turn");
            events.iter().any(|event| event.key == key(1) && event.readable)
        });
        assert!(turns.next().is_some_and(|turn| turn <= 4));
        all_of(&mut kernel, &streams[0]);
        all_of(&mut kernel, &streams[1]);
    }
}

/// A thread that has said that it watches the ring may be gone. Others wait for the socket.
#[test]
fn who_does_not_read_gets_a_token() {
    let (_waker, mut kernel) = kernel();
    let (program, near) = pair();
    kernel.watch(key(0), &near).unwrap();
    let streams = [near];
    let is_told = || {
        let mut fds = [rustix::event::PollFd::new(&program.socket, rustix::event::PollFlags::IN)];
        let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&at_once)).unwrap() > 0
    };
    for sleeps in [false, true] {
        program.rings.watch();
        kernel.write_slice(&streams[0], b"x").unwrap();
        assert!(!is_told());
        let clock = kernel.clock();
        for _ in 0..2 * CHECKED_EACH {
            if sleeps {
                kernel.sleep(clock.now(), None);
            }
            reported(&mut kernel, &streams);
            if is_told() {
                break;
            }
        }
        assert!(is_told(), "sleeps: {sleeps}");
        assert_eq!(program.reads(&mut [0; 9]), 1);
        assert!(!is_told());
    }
}

/// A poller that takes a connection over must find what came while it belonged to nobody.
#[test]
fn bytes_that_come_between_two_pollers_are_found() {
    let ((_one, mut first), (_other, mut second)) = (kernel(), kernel());
    let (program, near) = pair();
    let streams = [near];
    first.watch(key(0), &streams[0]).unwrap();
    program.writes(b"before ");
    first.unwatch(&streams[0]);
    program.writes(b"between");
    second.watch(key(0), &streams[0]).unwrap();
    let events = slept(&mut second, &streams, Instant(0));
    assert!(events.iter().any(|event| event.readable));
    assert_eq!(all_of(&mut second, &streams[0]), b"before between");
    assert!(reported(&mut first, &streams).is_empty());
}

/// A poller that sleeps for hours must not keep the memory of connections that are over.
#[test]
fn nothing_is_kept_of_a_stream_that_is_over() {
    let (_waker, mut kernel) = kernel();
    let (program, near) = pair();
    let rings = Arc::downgrade(near.rings().unwrap());
    kernel.watch(key(0), &near).unwrap();
    program.writes(b"looked at");
    let streams = [near];
    assert!(!slept(&mut kernel, &streams, Instant(0)).is_empty());
    kernel.release(&streams[0]);
    drop(streams);
    assert_eq!(rings.strong_count(), 0);
    assert!(kernel.hot.is_empty());
}

#[test]
fn a_program_that_dies_ends_or_resets_its_stream() {
    for unread in [false, true] {
        let (_waker, mut kernel) = kernel();
        let (program, near) = pair();
        kernel.watch(key(0), &near).unwrap();
        let streams = [near];
        program.writes(b"last words");
        kernel.write_slice(&streams[0], b"?").unwrap();
        if !unread {
            program.reads(&mut [0; 9]);
        }
        drop(program);
        let mut events = slept(&mut kernel, &streams, Instant(0));
        events.extend(reported_by_all(&mut kernel, &streams));
        assert!(events.iter().any(|event| event.ending && event.failed == unread));
        let mut room = [0; 10];
        assert_eq!(kernel.read_slice(&streams[0], &mut room).unwrap(), 10);
        let end = kernel.read_slice(&streams[0], &mut room);
        assert_eq!(end.map_err(|error| error.kind() == std::io::ErrorKind::ConnectionReset), {
            if unread { Err(true) } else { Ok(0) }
        });
    }
}

#[test]
fn a_gateway_that_ends_a_stream_says_so() {
    let (_waker, mut kernel) = kernel();
    let (program, near) = pair();
    kernel.watch(key(0), &near).unwrap();
    kernel.write_slice(&near, b"last").unwrap();
    kernel.finish(&near);
    let mut room = [0; 9];
    assert_eq!((program.reads(&mut room), program.reads(&mut room)), (4, 0));
    assert!(!program.rings.is_closed());
    let rings = Arc::clone(near.rings().unwrap());
    drop(near);
    assert!(program.rings.is_closed() && rings.is_closed());
    kernel.poll(&mut Vec::new());
    assert_eq!(Arc::strong_count(&rings), 1, "the memory is free");
}

/// Programs that wait for each answer, and a poller that sleeps whenever it can.
#[test]
fn a_crowd_is_answered() {
    const PROGRAMS: u16 = 80;
    const ROUNDS: usize = 200;
    let (_waker, mut kernel) = kernel();
    let (programs, streams): (Vec<_>, Vec<_>) = (0..PROGRAMS).map(|_| pair()).unzip();
    for (stream, slot) in streams.iter().zip(0..) {
        kernel.watch(key(slot), stream).unwrap();
    }
    let clock = kernel.clock();
    std::thread::scope(|scope| {
        for some in programs.chunks(10) {
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let bytes = vec![7; 1 + round * 37 % 3000];
                    some.iter().for_each(|program| program.writes(&bytes));
                    for program in some {
                        let (mut left, mut room) = (bytes.len(), [0; 5000]);
                        while left > 0 {
                            left -= program.reads(&mut room[..left]);
                        }
                    }
                }
            });
        }
        let (mut events, mut room, mut served) = (Vec::new(), [0; 5000], 0);
        let wanted = (0..ROUNDS).map(|round| 1 + round * 37 % 3000).sum::<usize>();
        while served < wanted * usize::from(PROGRAMS) {
            kernel.poll(&mut events);
            if events.is_empty() {
                kernel.sleep(clock.now(), Some(clock.now() + Duration::from_secs(20)));
            }
            for mut event in events.drain(..) {
                let stream = &streams[usize::from(event.key.slot)];
                kernel.complete(stream, &mut event);
                while let Ok(len @ 1..) = kernel.read_slice(stream, &mut room) {
                    assert_eq!(kernel.write_slice(stream, &room[..len]).unwrap(), len);
                    served += len;
                }
            }
        }
    });
}
