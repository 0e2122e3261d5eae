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
//! connection some milliseconds each time: the gateway notices that nobody reads. Where it is left
//! out by a shortcut, it looks only now and then, and it takes a tenth of a second.

use std::cell::Cell;
use std::mem::replace;
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence};
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
    /// A signal handler may have interrupted the thread while it changes this. If the handler jumps
    /// out (`siglongjmp`), the thread goes on as it is, and watches nothing else until it ends.
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
        loop {
            compiler_fence(Ordering::SeqCst);
            if self.is_inherited.replace(false) {
                self.disown();
            }
            self.is_busy.set(false);
            compiler_fence(Ordering::SeqCst);
            // It may have come just in between.
            if !self.is_inherited.get() {
                return Some(result);
            }
            self.is_busy.set(true);
        }
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
        let rings = kept.rings();
        rings.watch();
        // What has come and was not read is told once more, if need be: it may have come just now,
        // and without a token.
        let reported = rings.arrived().wrapping_sub(rings.readable());
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
        self.remove_if(|seat| !seat.is_right() || seat.kept.rings().has_end());
        if self.count.get() == 0 || room.is_empty() {
            return 0;
        }
        let mut count = 0;
        let (before, behind) = self.taken().split_at(self.next());
        for place in behind.iter().chain(before) {
            let Some(seat) = place.get() else { continue };
            let Some(event) = room.get_mut(count) else { break };
            // If the gateway has missed us, it was wrong.
            let rings = seat.kept.rings();
            if !rings.is_watched() {
                rings.watch();
            }
            let arrived = rings.arrived();
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
        let rings = self.kept.rings();
        // Of what comes by a shortcut that is not mapped, only a read can find out.
        rings.lacked_shortcut().is_some()
            || (rings.readable() > 0 && !(is_edge && rings.arrived() == self.reported))
    }

    /// Whether the number is that of the connection still, and in the same epoll set as before.
    fn is_right(&self) -> bool {
        TABLE.is_at(self.fd, &self.kept)
            && place(self.fd).is_some_and(|place| place.is_at(self.version))
    }

    /// Ceases to watch. If there are bytes, the socket says so.
    fn leave(self) {
        let rings = self.kept.rings();
        rings.cease_to_watch();
        let is_there = TABLE.is_at(self.fd, &self.kept);
        if let Some(socket) = sys::borrow(self.fd).filter(|_| is_there) {
            rings.keep_readable(socket);
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
    let mut signals = Signals::watch(true);
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
        if signals.has_one_come().is_some() {
            drop(signals);
            return sys::fail(libc::EINTR);
        }
    }
    cease();
    let is_interrupted = signals.has_one_come_now().is_some();
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
mod tests;
