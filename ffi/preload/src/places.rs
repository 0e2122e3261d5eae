//! In which epoll sets sockets are, and who waits there.
//!
//! What is noted here decides whether rings may be reported in place of the kernel, with what the
//! program has given the kernel for that. So it must not be that of another socket, nor of another
//! set with the same number.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use libc::c_int;

use crate::ringed;
use crate::table::DESCRIPTORS_MAX;

/// In which epoll set a socket is, and how.
pub(crate) struct Place {
    /// Odd while somebody changes it.
    version: AtomicU32,
    /// It is in several sets, or two threads have changed it at once: until it is closed, nobody
    /// knows.
    is_unknown: AtomicBool,
    /// The number of the epoll descriptor and one; zero if there is none.
    epoll: AtomicU32,
    /// How many epoll descriptors with this number there have been.
    generation: AtomicU32,
    events: AtomicU32,
    data: AtomicU64,
}

/// The place of each socket.
static PLACES: [Place; DESCRIPTORS_MAX] = [const { Place::new() }; DESCRIPTORS_MAX];
/// How many epoll descriptors each number has been.
static GENERATIONS: [AtomicU32; DESCRIPTORS_MAX] = [const { AtomicU32::new(0) }; DESCRIPTORS_MAX];
/// The thread that waits at each epoll descriptor; zero if none has yet, [`SEVERAL`] if there are
/// more.
static WAITERS: [AtomicU32; DESCRIPTORS_MAX] = [const { AtomicU32::new(0) }; DESCRIPTORS_MAX];
const SEVERAL: u32 = u32::MAX;
/// Which numbers have ever been those of epoll descriptors, one bit each.
static EPOLLS: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
const WORDS: usize = DESCRIPTORS_MAX / 64;

impl Place {
    const fn new() -> Self {
        Self {
            version: AtomicU32::new(0),
            is_unknown: AtomicBool::new(false),
            epoll: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            events: AtomicU32::new(0),
            data: AtomicU64::new(0),
        }
    }

    pub(crate) fn set(&self, epoll: u32, events: u32, data: u64) {
        let version = self.version.load(Ordering::Relaxed);
        let (odd, acquires, relaxed) = (version | 1, Ordering::Acquire, Ordering::Relaxed);
        if version == odd || self.version.compare_exchange(version, odd, acquires, relaxed).is_err()
        {
            self.is_unknown.store(true, Ordering::Relaxed);
            return;
        }
        fence(Ordering::Release);
        let generation = epoll.checked_sub(1).map_or(0, |number| generation(number.cast_signed()));
        self.epoll.store(epoll, Ordering::Relaxed);
        self.generation.store(generation, Ordering::Relaxed);
        self.events.store(events, Ordering::Relaxed);
        self.data.store(data, Ordering::Relaxed);
        self.version.store(odd.wrapping_add(1), Ordering::Release);
    }

    /// The number of its epoll descriptor and one, if that is still the same one.
    pub(crate) fn number(&self) -> Option<u32> {
        let epoll = self.epoll.load(Ordering::Relaxed);
        let number = epoll.checked_sub(1)?.cast_signed();
        (self.generation.load(Ordering::Relaxed) == generation(number)).then_some(epoll)
    }

    /// How it is to be watched, if it is.
    pub(crate) fn get(&self) -> Option<Watched> {
        let version = self.version.load(Ordering::Acquire);
        let epoll = self.number()?.checked_sub(1)?.cast_signed();
        let events = self.events.load(Ordering::Relaxed);
        let watched = Watched { version, epoll, events, data: self.data.load(Ordering::Relaxed) };
        fence(Ordering::Acquire);
        let is_whole = version.is_multiple_of(2) && self.is_at(version);
        (is_whole && is_suitable(events)).then_some(watched)
    }

    /// Whether nobody has changed it since.
    pub(crate) fn is_at(&self, version: u32) -> bool {
        self.version.load(Ordering::Relaxed) == version && !self.is_unknown.load(Ordering::Relaxed)
    }
}

/// How a socket is watched.
pub(crate) struct Watched {
    pub(crate) version: u32,
    pub(crate) epoll: RawFd,
    pub(crate) events: u32,
    pub(crate) data: u64,
}

pub(crate) fn place(fd: RawFd) -> Option<&'static Place> {
    PLACES.get(usize::try_from(fd).ok()?)
}

fn generation(epoll: RawFd) -> u32 {
    let number = usize::try_from(epoll).ok().and_then(|epoll| GENERATIONS.get(epoll));
    number.map_or(0, |number| number.load(Ordering::Relaxed))
}

/// Whether rings may stand for the kernel.
pub(crate) fn is_suitable(events: u32) -> bool {
    let is = |flag: c_int| events & flag.cast_unsigned() != 0;
    is(libc::EPOLLIN)
        && !is(libc::EPOLLONESHOT)
        && !is(libc::EPOLLEXCLUSIVE)
        && (is(libc::EPOLLET) || !is(libc::EPOLLOUT))
}

/// Whether this thread is the only one that waits there, as far as we know.
pub(crate) fn waits_alone(epoll: RawFd) -> bool {
    let waiter = usize::try_from(epoll).ok().and_then(|epoll| WAITERS.get(epoll));
    let Some(waiter) = waiter else { return false };
    let thread = ringed::thread();
    match waiter.load(Ordering::Relaxed) {
        0 => {
            let (ours, relaxed) = (thread, Ordering::Relaxed);
            waiter.compare_exchange(0, ours, relaxed, relaxed).is_ok()
        }
        there if there == thread => true,
        _ => {
            waiter.store(SEVERAL, Ordering::Relaxed);
            false
        }
    }
}

/// A new epoll descriptor has this number.
pub(crate) fn epoll_made(epoll: RawFd) {
    renew(epoll);
    if let Some((word, bit)) = bit_of(epoll) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// The number `to` is another name of `from` now, which may be an epoll descriptor.
pub(crate) fn copied(from: RawFd, to: RawFd) {
    match bit_of(from) {
        Some((word, bit)) if word.load(Ordering::Relaxed) & bit != 0 => epoll_made(to),
        Some(_) | None => renew(to),
    }
}

/// The numbers of all epoll descriptors that the process has made by the C library. Some may be
/// something else by now.
pub(crate) fn epolls() -> impl Iterator<Item = RawFd> {
    (0..).zip(&EPOLLS).flat_map(|(index, word)| {
        let word = word.load(Ordering::Relaxed);
        (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| index * 64 + bit)
    })
}

fn bit_of(epoll: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(epoll).ok()?;
    Some((EPOLLS.get(number / 64)?, 1 << (number % 64)))
}

/// Whatever has this number now, it is no epoll descriptor of before.
fn renew(epoll: RawFd) {
    let Ok(number) = usize::try_from(epoll) else { return };
    if let (Some(generation), Some(waiter)) = (GENERATIONS.get(number), WAITERS.get(number)) {
        generation.fetch_add(1, Ordering::Relaxed);
        waiter.store(0, Ordering::Relaxed);
    }
}

impl Place {
    /// It is in several sets: until it is closed, nobody knows how.
    pub(crate) fn spoil(&self) {
        self.is_unknown.store(true, Ordering::Relaxed);
    }

    /// The number is closed.
    pub(crate) fn clear(&self) {
        if self.epoll.load(Ordering::Relaxed) != 0 {
            self.set(0, 0, 0);
        }
        self.is_unknown.store(false, Ordering::Relaxed);
    }
}
