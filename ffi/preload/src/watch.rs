//! Threads that look at rings before they sleep in `epoll_wait`.
//!
//! Such a thread watches the rings from which it has read last, as long as it is awake. The gateway
//! need not tell it by the sockets what has come: neither side makes a system call for a message.
//! When the thread calls `epoll_wait`, it hears of the rings first, and of all else by the kernel.
//! Before it sleeps, or waits in another way, it ceases to watch, and the sockets tell again. Where
//! that is worth it, it goes on looking for a while before it sleeps (see `patience`).
//!
//! Only what epoll would report as readable is reported here; ends, errors and room for writing are
//! left to the kernel. A socket may be in one epoll set, and not with EPOLLONESHOT or
//! EPOLLEXCLUSIVE nor, if it is level-triggered, with EPOLLOUT. Others are not watched, and neither
//! is anything in a set in which several threads wait: while one of them works, another must hear.
//!
//! A thread that ceases without saying so (it ends, or is killed) costs those who have the same
//! connection some milliseconds each time: the gateway notices that nobody reads.

use std::cell::Cell;
use std::mem::replace;
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::time::Duration;

use libc::{c_int, c_void, epoll_event, pthread_key_t};
use rustix::thread::sched_yield;

use crate::mappings::{Kept, Used};
use crate::places::{Place, Watched, place, waits_alone};
use crate::signals::Signals;
use crate::table::TABLE;
use crate::{patience, sys};

/// A connection that this thread watches.
#[derive(Clone, Copy)]
struct Seat {
    fd: RawFd,
    kept: Kept,
    /// That of its place when it was seated.
    version: u32,
    events: u32,
    data: u64,
    /// What had arrived when it was reported last.
    reported: u32,
}

/// What a thread watches, all of it in one epoll set.
struct Seats {
    epoll: Cell<RawFd>,
    /// The first `count` places are taken.
    count: Cell<usize>,
    all: [Cell<Option<Seat>>; SEATS_MAX],
    /// Where the next report begins, and which seat is given up next.
    hand: Cell<usize>,
    /// How often the rings had something to report.
    turns: Cell<u32>,
    /// A signal handler may have interrupted the thread while it changes this.
    is_busy: Cell<bool>,
    /// That signal handler has forked, and this is the new process.
    is_inherited: Cell<bool>,
}

thread_local! {
    static SEATS: Seats = const {
        Seats {
            epoll: Cell::new(-1),
            count: Cell::new(0),
            all: [const { Cell::new(None) }; SEATS_MAX],
            hand: Cell::new(0),
            turns: Cell::new(0),
            is_busy: Cell::new(false),
            is_inherited: Cell::new(false),
        }
    };
}

/// So often a thread that goes on looking asks the kernel, too: every sixteenth time, which is some
/// ten microseconds if nobody takes the core.
const ASKED_EACH: u32 = 16;
/// As long as the rings have something each time, the kernel is asked every fourth time.
const KERNELS_TURN: u32 = 4;
/// As many as a gateway looks at by itself.
const SEATS_MAX: usize = 64;

/// A socket was put into an epoll set, or is there in another way.
pub(crate) fn note(fd: RawFd, operation: c_int, epoll: RawFd, events: u32, data: u64) {
    let Some(place) = place(fd) else { return };
    let number = u32::try_from(epoll).map_or(0, |epoll| epoll + 1);
    let is_elsewhere = place.number().is_some_and(|there| there != number);
    if is_elsewhere {
        place.spoil();
    }
    match operation {
        libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD => place.set(number, events, data),
        _ => place.set(0, 0, 0),
    }
    unseat(fd);
}

/// The number is closed, or about to be something else.
pub(crate) fn forget(fd: RawFd) {
    if let Some(place) = place(fd) {
        place.clear();
    }
    unseat(fd);
}

/// This thread has read from a connection with rings.
pub(crate) fn has_read(fd: RawFd) {
    let Some(watched) = place(fd).and_then(Place::get) else { return };
    SEATS.with(|seats| seats.unless_busy(|| seats.take(fd, watched)));
}

/// This thread ceases to watch all it watches: it is about to sleep, or to wait for something else.
pub(crate) fn cease() {
    cease_if(|| true);
}

/// The same if that is so.
pub(crate) fn cease_if(waits: impl FnOnce() -> bool) {
    SEATS.with(|seats| {
        if seats.count.get() > 0 && waits() {
            seats.unless_busy(|| seats.clear());
        }
    });
}

/// The same of one connection.
fn unseat(fd: RawFd) {
    SEATS.with(|seats| {
        if seats.count.get() > 0 {
            seats.unless_busy(|| seats.remove_if(|seat| seat.fd == fd));
        }
    });
}

/// A thread that ends ceases to watch.
extern "C" fn at_end(_: *mut c_void) {
    cease();
}

/// The calling thread is that of a new process, and its parent goes on watching.
pub(crate) fn after_fork() {
    SEATS.with(|seats| {
        if seats.unless_busy(|| seats.disown()).is_none() {
            seats.is_inherited.set(true);
        }
    });
}

impl Seats {
    /// Does it, unless this is a signal handler that has interrupted such a thing.
    fn unless_busy<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        if self.is_busy.replace(true) {
            return None;
        }
        let result = act();
        if self.is_inherited.replace(false) {
            self.disown();
        }
        self.is_busy.set(false);
        Some(result)
    }

    /// Forgets all without a word: others go on watching.
    fn disown(&self) {
        for seat in self.taken().iter().filter_map(Cell::take) {
            seat.kept.release();
        }
        self.count.set(0);
    }

    /// Watches one more, in place of another if there is no room.
    fn take(&self, fd: RawFd, watched: Watched) {
        let Watched { version, epoll, events, data } = watched;
        let is_there = self.taken().iter().any(|seat| seat.get().is_some_and(|it| it.fd == fd));
        if is_there || !waits_alone(epoll) {
            return;
        }
        if self.epoll.get() != epoll {
            self.clear();
            self.epoll.set(epoll);
        }
        let Some(kept) = TABLE.rings(fd).map(Used::keep) else { return };
        if self.count.get() == 0 {
            hear_of_end();
        }
        kept.rings.watch();
        // What has come and was not read is told once more, if need be: it may have come just now,
        // and without a token.
        let reported = kept.rings.arrived().wrapping_sub(kept.rings.readable());
        let seat = Seat { fd, kept, version, events, data, reported };
        let count = self.count.get();
        let index = if count < SEATS_MAX { count } else { self.next() };
        match self.all[index].replace(Some(seat)) {
            Some(displaced) => displaced.leave(),
            None => self.count.set(count + 1),
        }
    }

    /// The places that are taken.
    fn taken(&self) -> &[Cell<Option<Seat>>] {
        &self.all[..self.count.get()]
    }

    /// The next one of them. There is one.
    fn next(&self) -> usize {
        self.hand.set((self.hand.get() + 1) % self.count.get());
        self.hand.get()
    }

    fn clear(&self) {
        self.remove_if(|_| true);
    }

    fn remove_if(&self, condition: impl Fn(&Seat) -> bool) {
        let mut index = 0;
        while let Some(place) = self.taken().get(index) {
            let Some(seat) = place.get().filter(&condition) else {
                index += 1;
                continue;
            };
            let last = self.count.get() - 1;
            place.swap(&self.all[last]);
            self.all[last].set(None);
            self.count.set(last);
            seat.leave();
        }
    }

    /// Whether there is something to report.
    fn has_news(&self, epoll: RawFd) -> bool {
        let has_news = |seat: &Cell<Option<Seat>>| seat.get().is_some_and(|seat| seat.has_news());
        // A signal handler may close what is looked at.
        let look = || self.epoll.get() == epoll && self.taken().iter().any(has_news);
        self.unless_busy(look).unwrap_or(false)
    }

    /// Whether the kernel is to be asked although the rings have something.
    fn is_kernels_turn(&self) -> bool {
        self.turns.set(self.turns.get().wrapping_add(1));
        self.turns.get().is_multiple_of(KERNELS_TURN)
    }

    /// Reports what has come. Returns how many events there are.
    fn collect(&self, epoll: RawFd, room: &mut [epoll_event]) -> usize {
        if self.epoll.get() != epoll {
            self.clear();
        }
        // The kernel says of those that have ended what there is to say.
        self.remove_if(|seat| !seat.is_right() || seat.kept.rings.has_end());
        if self.count.get() == 0 || room.is_empty() {
            return 0;
        }
        let mut count = 0;
        let (before, behind) = self.taken().split_at(self.next());
        for place in behind.iter().chain(before) {
            let Some(seat) = place.get() else { continue };
            let Some(event) = room.get_mut(count) else { break };
            // If the gateway has missed us, it was wrong.
            if !seat.kept.rings.is_watched() {
                seat.kept.rings.watch();
            }
            let arrived = seat.kept.rings.arrived();
            if !seat.has_news() {
                continue;
            }
            place.set(Some(Seat { reported: arrived, ..seat }));
            *event = epoll_event { events: libc::EPOLLIN.cast_unsigned(), u64: seat.data };
            count += 1;
        }
        count
    }
}

/// Has the thread cease when it ends.
fn hear_of_end() {
    static KEY: OnceLock<Option<pthread_key_t>> = OnceLock::new();
    let make = || {
        let mut key = 0;
        // SAFETY: `pthread_key_create` asks for a place for a number, and a function that may be
        // called when a thread ends.
        let result = unsafe { libc::pthread_key_create(&raw mut key, Some(at_end)) };
        (result == 0).then_some(key)
    };
    if let Some(key) = *KEY.get_or_init(make) {
        let anything = (&raw const KEY).cast();
        // SAFETY: `pthread_setspecific` asks for a key, and any address but null.
        unsafe { libc::pthread_setspecific(key, anything) };
    }
}

impl Seat {
    /// Whether epoll would report that it is readable.
    fn has_news(&self) -> bool {
        let is_edge = self.events & libc::EPOLLET.cast_unsigned() != 0;
        let rings = self.kept.rings;
        rings.readable() > 0 && !(is_edge && rings.arrived() == self.reported)
    }

    /// Whether the number is that of the connection still, and in the same epoll set as before.
    fn is_right(&self) -> bool {
        TABLE.is_at(self.fd, &self.kept)
            && place(self.fd).is_some_and(|place| place.is_at(self.version))
    }

    /// Ceases to watch. If there are bytes, the socket says so.
    fn leave(self) {
        self.kept.rings.cease_to_watch();
        let is_there = TABLE.is_at(self.fd, &self.kept);
        if let Some(socket) = sys::borrow(self.fd).filter(|_| is_there) {
            self.kept.rings.keep_readable(socket);
        }
        self.kept.release();
    }
}

/// As `epoll_wait`; `real` is it, for a part of the room, and a time-out in milliseconds.
pub(crate) fn epoll_wait(
    epoll: RawFd,
    room: &mut [epoll_event],
    timeout: c_int,
    real: impl FnOnce(&mut [epoll_event], c_int) -> c_int,
) -> c_int {
    if !waits_alone(epoll) {
        cease();
        return real(room, timeout);
    }
    let is_watched = |seats: &Seats| seats.epoll.get() == epoll && seats.count.get() > 0;
    if !SEATS.with(is_watched) {
        // Not what belongs to another set either.
        if timeout != 0 {
            cease();
        }
        return real(room, timeout);
    }
    let begun = sys::now_precise();
    let span = patience::span(begun);
    let has_news = SEATS.with(|seats| seats.has_news(epoll));
    if has_news || timeout == 0 || !span.is_zero() {
        // What the kernel has must not wait for what may come.
        let asks =
            !has_news || (timeout == 0 && room.len() > 1) || SEATS.with(Seats::is_kernels_turn);
        let found = SEATS.with(|seats| look(seats, epoll, room, asks));
        if timeout == 0 {
            return found.unwrap_or(0);
        }
        if let Some(found) = found {
            return found;
        }
    }
    if span.is_zero() {
        cease();
        return learn(begun, || real(room, timeout));
    }
    let limit = u64::try_from(timeout).map_or(span, |ms| Duration::from_millis(ms).min(span));
    let mut signals = Signals::watch();
    let mut now = begun;
    for step in 1_u32.. {
        if now.saturating_sub(begun) >= limit {
            break;
        }
        sched_yield();
        let before = replace(&mut now, sys::now_precise());
        patience::learn_offer(before, now);
        let look_now = |seats: &Seats| {
            // A look at the rings costs nothing, to ask the kernel costs a system call.
            let asks = step.is_multiple_of(ASKED_EACH);
            let has_news = seats.has_news(epoll);
            let asks = asks || (has_news && seats.is_kernels_turn());
            (asks || has_news).then(|| look(seats, epoll, room, asks)).flatten()
        };
        if let Some(result) = SEATS.with(look_now) {
            return result;
        }
        if signals.has_one_come() {
            drop(signals);
            return sys::fail(libc::EINTR);
        }
    }
    cease();
    let is_interrupted = signals.has_one_come_now();
    drop(signals);
    if is_interrupted {
        return sys::fail(libc::EINTR);
    }
    learn(begun, || real(room, rest_of(timeout, now.saturating_sub(begun))))
}

/// What is left of a time-out after so long; none is none.
fn rest_of(timeout: c_int, waited: Duration) -> c_int {
    let waited = c_int::try_from(waited.as_millis()).unwrap_or(c_int::MAX);
    if timeout < 0 { timeout } else { (timeout - waited).max(0) }
}

/// Sleeps. How long the whole wait was that began at `begun` says what looking is worth.
fn learn(begun: Duration, sleep: impl FnOnce() -> c_int) -> c_int {
    let result = sleep();
    let waited = sys::now_precise().saturating_sub(begun);
    if result > 0 {
        patience::learn_found(waited);
    } else {
        patience::learn_ended(waited);
    }
    result
}

/// Looks at the rings, and at all else if `asks` or if they have nothing. Returns what epoll would,
/// unless there is nothing.
fn look(seats: &Seats, epoll: RawFd, room: &mut [epoll_event], asks: bool) -> Option<c_int> {
    if asks && room.len() == 1 {
        let found = sys::epoll_now(epoll, room);
        return (found != 0).then_some(found).or_else(|| look(seats, epoll, room, false));
    }
    // However busy the rings are, a part of the room is the kernel's.
    let ours = if asks { room.len().div_ceil(2) } else { room.len() };
    let count = seats.unless_busy(|| seats.collect(epoll, &mut room[..ours])).unwrap_or(0);
    let (ours, rest) = room.split_at_mut(count);
    if rest.is_empty() || (count > 0 && !asks) {
        return Some(c_int::try_from(count).unwrap_or(c_int::MAX));
    }
    let Ok(found) = usize::try_from(sys::epoll_now(epoll, rest)) else {
        // The kernel's error, unless there is something to report.
        return Some(if count > 0 { c_int::try_from(count).unwrap_or(0) } else { -1 });
    };
    let total = count + merge(ours, &mut rest[..found]);
    (total > 0).then(|| c_int::try_from(total).unwrap_or(c_int::MAX))
}

/// What the kernel says of a socket of which we have said something becomes one event. Returns how
/// many others there are, which come first.
fn merge(ours: &mut [epoll_event], others: &mut [epoll_event]) -> usize {
    let mut kept = 0;
    for index in 0..others.len() {
        let other = others[index];
        let data = other.u64;
        match ours.iter_mut().find(|event| event.u64 == data) {
            Some(event) => event.events |= other.events,
            None => {
                others[kept] = other;
                kept += 1;
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, AsRawFd as _};

    use super::*;
    use crate::pair::Pair;
    use crate::places::{epoll_made, is_suitable};
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
            let mut room = [epoll_event { events: 0, u64: 0 }; 8];
            let epoll = self.epoll.as_raw_fd();
            let found = epoll_wait(epoll, &mut room, timeout, |room, timeout| {
                let count = c_int::try_from(room.len()).unwrap();
                // SAFETY: `epoll_wait` asks for room: it is a live slice.
                unsafe { libc::epoll_wait(epoll, room.as_mut_ptr(), count, timeout) }
            });
            let found = usize::try_from(found).unwrap();
            room[..found].iter().map(|event| (event.events, event.u64)).collect()
        }

        /// Whether the gateway need not say what comes.
        fn is_watched(&self) -> bool {
            SEATS.with(|seats| seats.count.get()) > 0
        }
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
        note(
            set.pair.fd(),
            libc::EPOLL_CTL_MOD,
            set.epoll.as_raw_fd(),
            flag(libc::EPOLLONESHOT),
            5,
        );
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

    /// However busy rings are, a listening socket is heard.
    #[test]
    fn the_kernel_has_its_turn() {
        let set = Set::new(42, IN);
        let (other, far) = std::os::unix::net::UnixStream::pair().unwrap();
        add(&set.epoll, &other, EventData::new_u64(7), EventFlags::IN).unwrap();
        set.pair.comes(b"xx");
        assert_eq!(set.pair.reads(1, 0).unwrap(), b"x");
        std::io::Write::write_all(&mut &far, b"!").unwrap();
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
        let set = Set::new(43, IN);
        let (other, far) = std::os::unix::net::UnixStream::pair().unwrap();
        add(&set.epoll, &other, EventData::new_u64(7), EventFlags::IN).unwrap();
        set.pair.comes(b"xx");
        assert_eq!(set.pair.reads(1, 0).unwrap(), b"x");
        std::io::Write::write_all(&mut &far, b"!").unwrap();
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
        let (other, far) = std::os::unix::net::UnixStream::pair().unwrap();
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
}
