//! Threads that watch, with real epoll sets and rings.

use std::io::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;

use super::*;
use crate::pair::Pair;
use crate::places::{epoll_made, is_suitable};
use crate::signals::tests::interrupted;
use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};

const ADD: c_int = libc::EPOLL_CTL_ADD;
const IN: u32 = libc::EPOLLIN.cast_unsigned();
const EDGE: u32 = libc::EPOLLET.cast_unsigned();

/// An epoll set, and a connection in it.
struct Set {
    epoll: std::os::fd::OwnedFd,
    pair: Pair,
}

impl Set {
    fn new(connection: u64, events: u32) -> Self {
        patience::fix(Duration::from_millis(2));
        let epoll = create(CreateFlags::CLOEXEC).unwrap();
        epoll_made(epoll.as_raw_fd());
        let pair = Pair::new(connection);
        rustix::io::ioctl_fionbio(&pair.ours, true).unwrap();
        let flags = EventFlags::from_bits_retain(events);
        add(&epoll, &pair.ours, EventData::new_u64(connection), flags).unwrap();
        note(pair.fd(), ADD, epoll.as_raw_fd(), events, connection);
        Self { epoll, pair }
    }

    /// What the program hears: events, and what belongs to them.
    fn hears(&self, timeout: c_int) -> Vec<(u32, u64)> {
        let mut room = room();
        let found = usize::try_from(self.wait(&mut room, timeout)).unwrap();
        room[..found].iter().map(|event| (event.events, event.u64)).collect()
    }

    /// As `epoll_wait`.
    fn wait(&self, room: &mut [epoll_event], timeout: c_int) -> c_int {
        let epoll = self.epoll.as_raw_fd();
        epoll_wait(epoll, room, timeout, |room, timeout| {
            let count = c_int::try_from(room.len()).unwrap();
            // SAFETY: `epoll_wait` asks for room: it is a live slice.
            unsafe { libc::epoll_wait(epoll, room.as_mut_ptr(), count, timeout) }
        })
    }

    /// Whether the gateway need not say what comes.
    fn is_watched(&self) -> bool {
        SEATS.with(|seats| seats.count.get()) > 0
    }
}

fn room() -> [epoll_event; 8] {
    [epoll_event { events: 0, u64: 0 }; 8]
}

#[test]
fn what_comes_while_a_thread_looks_needs_no_token() {
    let set = Set::new(21, IN);
    let pair = &set.pair;
    pair.comes(b"first");
    assert_eq!(set.hears(-1), [(IN, 21)], "by the socket");
    assert_eq!(pair.reads(9, 0).unwrap(), b"first");
    assert!(set.is_watched());
    pair.comes(b"second");
    assert!(!pair.is(rustix::event::PollFlags::IN));
    assert_eq!(set.hears(-1), [(IN, 21)]);
    assert_eq!(set.hears(0), [(IN, 21)], "as long as there is something");
    assert_eq!(pair.reads(3, 0).unwrap(), b"sec");
    assert_eq!(set.hears(0), [(IN, 21)]);
    assert_eq!(pair.reads(9, 0).unwrap(), b"ond");
    assert!(set.hears(0).is_empty());
    assert!(set.hears(10).is_empty() && !set.is_watched(), "it has slept");
    pair.comes(b"third");
    assert_eq!(set.hears(-1), [(IN, 21)], "by the socket");
}

/// Whether the handler says that calls go on does not matter to `epoll_wait`.
#[test]
fn a_signal_ends_the_wait_of_a_thread_that_looks() {
    let set = Set::new(29, IN);
    set.pair.comes(b"x");
    assert_eq!(set.hears(-1), [(IN, 29)]);
    assert_eq!(set.pair.reads(9, 0).unwrap(), b"x");
    patience::fix(Duration::from_secs(20));
    for flags in [0, libc::SA_RESTART] {
        let result = interrupted(flags, || set.wait(&mut room(), -1));
        assert_eq!((result, sys::errno()), (-1, libc::EINTR));
        assert!(set.is_watched(), "it has not slept");
    }
}

/// A signal handler may fork while its thread changes what it watches.
#[test]
fn a_child_forgets_what_its_parent_was_about_to_change() {
    let set = Set::new(30, IN);
    set.pair.comes(b"x");
    assert_eq!(set.hears(-1), [(IN, 30)]);
    assert_eq!(set.pair.reads(9, 0).unwrap(), b"x");
    SEATS.with(|seats| {
        seats.unless_busy(|| {
            after_fork();
            assert!(set.is_watched(), "somebody goes on with that");
        });
        assert!(!set.is_watched() && !seats.is_busy.get() && !seats.is_inherited.get());
    });
}

/// A thread that has something to do does not sleep, and needs no wake-up either.
#[test]
fn who_has_no_patience_looks_once() {
    let set = Set::new(26, IN);
    patience::fix(Duration::ZERO);
    let pair = &set.pair;
    pair.comes(b"x");
    assert_eq!(set.hears(-1), [(IN, 26)]);
    assert_eq!(pair.reads(9, 0).unwrap(), b"x");
    pair.comes(b"y");
    assert!(!pair.is(rustix::event::PollFlags::IN));
    assert_eq!(set.hears(-1), [(IN, 26)]);
    assert_eq!(pair.reads(9, 0).unwrap(), b"y");
    assert!(set.hears(0).is_empty() && set.is_watched(), "it has not slept");
    assert!(set.hears(10).is_empty() && !set.is_watched());
}

/// While one thread works, another one must hear what comes.
#[test]
fn threads_that_share_a_set_hear_by_the_kernel() {
    let set = Set::new(27, IN);
    let read = || {
        set.pair.comes(b"x");
        assert_eq!(set.hears(-1), [(IN, 27)]);
        assert_eq!(set.pair.reads(9, 0).unwrap(), b"x");
        set.is_watched()
    };
    assert!(read());
    let other = || assert!(set.hears(0).is_empty());
    std::thread::scope(|scope| scope.spawn(other).join().unwrap());
    assert!(set.hears(0).is_empty());
    assert!(!set.is_watched() && !read());
}

/// Many programs read until there is nothing, and are watched all the same. A gateway that has
/// waited long for a thread sends tokens, until that thread is back.
#[test]
fn who_reads_until_there_is_nothing_goes_on_watching() {
    let set = Set::new(25, IN);
    let pair = &set.pair;
    pair.comes(b"x");
    assert_eq!(pair.reads(9, 0).unwrap(), b"x");
    assert_eq!(pair.reads(9, 0), Err(libc::EAGAIN));
    assert!(set.is_watched());
    pair.comes(b"y");
    pair.gateway.miss();
    pair.gateway.serve(pair.near.as_fd());
    assert!(pair.is(rustix::event::PollFlags::IN));
    assert_eq!(set.hears(0), [(IN, 25)]);
    assert_eq!(pair.reads(9, 0).unwrap(), b"y");
    pair.comes(b"z");
    assert!(!pair.is(rustix::event::PollFlags::IN));
    assert_eq!(set.hears(0), [(IN, 25)]);
}

#[test]
fn edges_are_told_once() {
    let set = Set::new(22, IN | EDGE);
    let pair = &set.pair;
    pair.comes(b"a");
    assert_eq!(set.hears(-1), [(IN, 22)]);
    assert_eq!(pair.reads(9, 0).unwrap(), b"a");
    pair.comes(b"bc");
    assert_eq!(set.hears(0), [(IN, 22)]);
    assert!(set.hears(0).is_empty(), "told");
    assert_eq!(pair.reads(1, 0).unwrap(), b"b");
    assert!(set.hears(0).is_empty(), "told");
    pair.comes(b"d");
    assert_eq!(set.hears(0), [(IN, 22)]);
    assert_eq!(pair.reads(9, 0).unwrap(), b"cd");
}

/// Whoever waits in another way must hear what has come while nobody said so.
#[test]
fn who_ceases_leaves_the_socket_as_it_would_be() {
    let set = Set::new(23, IN);
    let pair = &set.pair;
    for cease_by in [cease as fn(), || forget_all(), after_fork] {
        pair.comes(b"x");
        assert_eq!(set.hears(-1).len(), 1);
        assert_eq!(pair.reads(9, 0).unwrap(), b"x");
        assert!(set.is_watched());
        pair.comes(b"y");
        cease_by();
        assert!(!set.is_watched());
        pair.gateway.fall_asleep();
        pair.gateway.serve(pair.near.as_fd());
        assert!(pair.is(rustix::event::PollFlags::IN));
        pair.gateway.wake_up();
        assert_eq!(pair.reads(9, 0).unwrap(), b"y");
        cease();
    }
}

fn forget_all() {
    SEATS.with(Seats::clear);
}

#[test]
fn sockets_that_the_kernel_must_report_are_not_watched() {
    let flag = c_int::cast_unsigned;
    for events in [
        flag(libc::EPOLLOUT),
        IN | flag(libc::EPOLLONESHOT),
        IN | flag(libc::EPOLLEXCLUSIVE),
        IN | flag(libc::EPOLLOUT),
    ] {
        assert!(!is_suitable(events), "{events:x}");
    }
    assert!(is_suitable(IN | EDGE | flag(libc::EPOLLOUT)) && is_suitable(IN));
    let set = Set::new(24, IN);
    let read = || {
        set.pair.comes(b"x");
        assert_eq!(set.pair.reads(9, 0).unwrap(), b"x");
        let is_watched = set.is_watched();
        cease();
        is_watched
    };
    assert!(read());
    note(set.pair.fd(), libc::EPOLL_CTL_MOD, set.epoll.as_raw_fd(), IN | EDGE, 5);
    assert!(read());
    // A socket in two sets, of which one is not to be watched.
    note(set.pair.fd(), libc::EPOLL_CTL_MOD, set.epoll.as_raw_fd(), flag(libc::EPOLLONESHOT), 5);
    note(set.pair.fd(), ADD, set.epoll.as_raw_fd() + 1, IN, 5);
    assert!(!read());
    note(set.pair.fd(), libc::EPOLL_CTL_DEL, set.epoll.as_raw_fd() + 1, 0, 0);
    note(set.pair.fd(), libc::EPOLL_CTL_MOD, set.epoll.as_raw_fd(), IN, 5);
    assert!(!read(), "nobody knows any more");
    forget(set.pair.fd());
    note(set.pair.fd(), ADD, set.epoll.as_raw_fd(), IN, 5);
    assert!(read());
    // Another set with the number of the first one.
    epoll_made(set.epoll.as_raw_fd());
    assert!(!read());
    note(set.pair.fd(), ADD, set.epoll.as_raw_fd(), IN, 5);
    note(set.pair.fd(), libc::EPOLL_CTL_DEL, set.epoll.as_raw_fd(), 0, 0);
    assert!(!read());
}

/// A program frees what belongs to a socket when it has closed the socket, or taken it out of
/// the set; also if another thread does so.
#[test]
fn nothing_is_told_of_what_was_taken_out() {
    let take_out: [fn(&Set); 4] = [
        |set| note(set.pair.fd(), libc::EPOLL_CTL_DEL, set.epoll.as_raw_fd(), 0, 0),
        |set| note(set.pair.fd(), libc::EPOLL_CTL_MOD, set.epoll.as_raw_fd(), 0, 0),
        |set| TABLE.forget(set.pair.fd()),
        |set| TABLE.copy(0, set.pair.fd()),
    ];
    for (take_out, number) in take_out.into_iter().zip(30..) {
        for by_another in [false, true] {
            let set = Set::new(number, IN);
            set.pair.comes(b"x");
            assert_eq!(set.pair.reads(9, 0).unwrap(), b"x");
            assert!(set.is_watched());
            set.pair.comes(b"y");
            let act = || {
                patience::fix(Duration::from_millis(2));
                take_out(&set);
            };
            if by_another {
                std::thread::scope(|scope| scope.spawn(act).join().unwrap());
            } else {
                act();
            }
            let mut room = [epoll_event { events: 0, u64: 0 }; 8];
            let collect = |seats: &Seats| seats.collect(set.epoll.as_raw_fd(), &mut room);
            assert_eq!(SEATS.with(collect), 0, "{number} {by_another}");
            assert!(!set.is_watched());
        }
    }
}

/// What comes between a read and the seat comes without a token, or with one.
#[test]
fn what_was_not_read_before_a_thread_watched_is_told() {
    let set = Set::new(40, IN | EDGE);
    set.pair.comes(b"xy");
    assert_eq!(set.pair.reads(1, 0).unwrap(), b"x");
    assert!(set.is_watched());
    let mut room = [epoll_event { events: 0, u64: 0 }; 1];
    let mut collect = || SEATS.with(|seats| seats.collect(set.epoll.as_raw_fd(), &mut room));
    assert_eq!((collect(), collect()), (1, 0));
}

/// A thread that ends does not watch any more.
#[test]
fn a_thread_that_ends_ceases() {
    let set = std::thread::spawn(|| {
        let set = Set::new(41, IN);
        set.pair.comes(b"x");
        set.pair.reads(9, 0).unwrap();
        assert!(set.is_watched());
        set
    });
    let set = set.join().unwrap();
    set.pair.comes(b"y");
    assert!(set.pair.is(rustix::event::PollFlags::IN), "by a token");
}

/// A set in which a connection that is watched has a byte, and a stream of the kernel, number 7.
fn both_have_something(connection: u64) -> (Set, [UnixStream; 2]) {
    let set = Set::new(connection, IN);
    let (other, far) = UnixStream::pair().unwrap();
    add(&set.epoll, &other, EventData::new_u64(7), EventFlags::IN).unwrap();
    set.pair.comes(b"xx");
    assert_eq!(set.pair.reads(1, 0).unwrap(), b"x");
    (&far).write_all(b"!").unwrap();
    (set, [other, far])
}

/// However busy rings are, a listening socket is heard.
#[test]
fn the_kernel_has_its_turn() {
    let (set, _streams) = both_have_something(42);
    let mut heard = [0; 43];
    for _ in 0..2 * KERNELS_TURN {
        let mut room = [epoll_event { events: 0, u64: 0 }; 1];
        let found = epoll_wait(set.epoll.as_raw_fd(), &mut room, 0, |_, _| unreachable!());
        assert_eq!(found, 1);
        heard[usize::try_from(room[0].u64).unwrap()] += 1;
    }
    assert!(heard[7] >= 1 && heard[42] >= 1);
}

/// The same of a program that waits, and has room for more than one event.
#[test]
fn the_kernel_has_its_turn_beside_rings() {
    let (set, _streams) = both_have_something(43);
    let heard: Vec<_> = (0..KERNELS_TURN).map(|_| set.hears(-1)).collect();
    assert!(heard.iter().all(|events| events.contains(&(IN, 43))));
    assert_eq!(heard.iter().filter(|events| events.contains(&(IN, 7))).count(), 1);
    assert_eq!(set.hears(0).len(), 2, "who does not wait hears all");
}

/// With room for one event each has its turn, and nobody sleeps over what is there.
#[test]
fn who_has_room_for_one_event_does_not_sleep_over_another() {
    let set = Set::new(44, IN);
    set.pair.comes(b"x");
    assert_eq!(set.pair.reads(9, 0).unwrap(), b"x");
    set.pair.comes(b"y");
    assert!(!set.pair.is(rustix::event::PollFlags::IN), "the kernel knows nothing");
    for patience in [Duration::ZERO, Duration::from_secs(20)] {
        patience::fix(patience);
        for _ in 0..2 * KERNELS_TURN {
            let mut room = [epoll_event { events: 0, u64: 0 }; 1];
            let found = epoll_wait(set.epoll.as_raw_fd(), &mut room, -1, |_, _| unreachable!());
            assert_eq!((found, { room[0].u64 }), (1, 44));
        }
    }
}

/// What the kernel has does not wait until a thread has looked at its rings.
#[test]
fn the_kernel_is_asked_before_the_core_is_offered() {
    let set = Set::new(45, IN);
    let (other, far) = UnixStream::pair().unwrap();
    add(&set.epoll, &other, EventData::new_u64(7), EventFlags::IN).unwrap();
    set.pair.comes(b"x");
    assert_eq!(set.pair.reads(1, 0).unwrap(), b"x");
    std::io::Write::write_all(&mut &far, b"!").unwrap();
    // Once this is over, nobody looks any more.
    patience::fix(Duration::from_nanos(1));
    assert!(set.is_watched());
    assert_eq!(set.hears(-1), [(IN, 7)]);
    assert!(set.is_watched(), "it has not slept");
}

/// A thread that has nothing to look at sleeps as it always did.
#[test]
fn who_watches_nothing_does_not_look() {
    let set = Set::new(46, IN);
    patience::fix(Duration::from_secs(20));
    let mut room = [epoll_event { events: 0, u64: 0 }; 1];
    assert_eq!(epoll_wait(set.epoll.as_raw_fd(), &mut room, -1, |_, timeout| timeout), -1);
}

/// The waits of a thread say how long it looks.
#[test]
fn a_thread_learns_from_its_waits() {
    let set = Set::new(47, IN);
    patience::free();
    let wait = |sleep: Duration| {
        set.pair.comes(b"x");
        assert_eq!(set.pair.reads(9, 0).unwrap(), b"x");
        assert!(set.is_watched());
        let mut room = [epoll_event { events: 0, u64: 0 }; 1];
        epoll_wait(set.epoll.as_raw_fd(), &mut room, -1, |_, _| {
            std::thread::sleep(sleep);
            1
        });
        !patience::span(sys::now_precise()).is_zero()
    };
    // Somebody may take the core for long.
    assert!((0..100).any(|_| wait(Duration::ZERO)));
    assert!((0..100).any(|_| !wait(Duration::from_millis(2))));
}

/// Each event is told once, whoever has found it.
#[test]
fn what_both_say_becomes_one() {
    let event = |events, u64| epoll_event { events, u64 };
    let mut ours = [event(IN, 1), event(IN, 2)];
    let mut others = [event(8, 3), event(16, 2), event(4, 9)];
    assert_eq!(merge(&mut ours, &mut others), 2);
    let all: Vec<_> = ours.iter().chain(&others[..2]).map(|it| (it.events, it.u64)).collect();
    assert_eq!(all, [(IN, 1), (IN | 16, 2), (8, 3), (4, 9)]);
}

/// With more connections than a thread watches, all are heard.
#[test]
fn a_crowd_is_heard() {
    let first = Set::new(100, IN);
    let more: Vec<_> = (101..100 + SEATS_MAX as u64 + 20)
        .map(|connection| {
            let pair = Pair::new(connection);
            rustix::io::ioctl_fionbio(&pair.ours, true).unwrap();
            let data = EventData::new_u64(connection);
            add(&first.epoll, &pair.ours, data, EventFlags::IN).unwrap();
            note(pair.fd(), ADD, first.epoll.as_raw_fd(), IN, connection);
            pair
        })
        .collect();
    let all: Vec<_> = [&first.pair].into_iter().chain(&more).collect();
    for round in 0..3 {
        all.iter().for_each(|pair| pair.comes(b"x"));
        let mut heard = vec![0; all.len()];
        while heard.contains(&0) {
            for (events, connection) in first.hears(1000) {
                assert_eq!(events, IN);
                let index = usize::try_from(connection - 100).unwrap();
                if let Ok(bytes) = all[index].reads(9, 0) {
                    heard[index] += bytes.len();
                }
            }
            // As the gateway does for those that miss a token.
            all.iter().for_each(|pair| {
                pair.gateway.serve(pair.near.as_fd());
            });
        }
        assert!(heard.iter().all(|count| *count == 1), "round {round}");
    }
}
