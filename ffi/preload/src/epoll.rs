//! Where a program waits for a TCP socket by epoll.
//!
//! The kernel ties a registration to the open file, not to the number. When another socket takes
//! the number over, its registrations must be made again.

use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::event::epoll::{self, EventData, EventFlags};

use crate::fdinfo::registration;
use crate::table::DESCRIPTORS_MAX;
use crate::{places, sys, watch};

/// So many are remembered of each socket. What somebody waits for in more places stays TCP.
const PLACES_MAX: usize = 2;

/// All registrations of TCP sockets that may be switched.
pub(crate) struct Registrations<const N: usize> {
    slots: [[Slot; PLACES_MAX]; N],
}

/// Of this process.
pub(crate) static REGISTRATIONS: Registrations<DESCRIPTORS_MAX> = Registrations::new();

/// One registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) epoll: RawFd,
    pub(crate) events: u32,
    /// What the program gets back with an event.
    pub(crate) data: u64,
}

struct Slot {
    /// The number of the epoll descriptor and one, and the events. Zero if there is nothing.
    place: AtomicU64,
    data: AtomicU64,
}

impl Slot {
    const fn new() -> Self {
        Self { place: AtomicU64::new(0), data: AtomicU64::new(0) }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the two halves of a slot are meant")]
    fn load(&self) -> Option<Registration> {
        let place = self.place.load(Relaxed);
        let epoll = ((place >> 32) as u32).checked_sub(1)?.cast_signed();
        Some(Registration { epoll, events: place as u32, data: self.data.load(Relaxed) })
    }

    fn store(&self, registration: Registration) {
        let Registration { epoll, events, data } = registration;
        self.data.store(data, Relaxed);
        let place = u64::from(epoll.cast_unsigned()) + 1;
        self.place.store(place << 32 | u64::from(events), Relaxed);
    }

    fn clear(&self) {
        self.place.store(0, Relaxed);
    }
}

impl<const N: usize> Registrations<N> {
    const fn new() -> Self {
        Self { slots: [const { [const { Slot::new() }; PLACES_MAX] }; N] }
    }

    fn slots(&self, fd: RawFd) -> &[Slot] {
        let slots = usize::try_from(fd).ok().and_then(|fd| self.slots.get(fd));
        slots.map_or(&[], |slots| slots)
    }

    /// A registration was made or changed. Returns whether it is remembered.
    pub(crate) fn note(&self, fd: RawFd, registration: Registration) -> bool {
        let slots = self.slots(fd);
        let is_at = |slot: &&Slot, epoll| slot.load().map(|there| there.epoll) == epoll;
        let same = slots.iter().find(|slot| is_at(slot, Some(registration.epoll)));
        let slot = same.or_else(|| slots.iter().find(|slot| is_at(slot, None)));
        if let Some(slot) = slot {
            slot.store(registration);
        }
        slot.is_some()
    }

    /// The registration in this place was removed.
    pub(crate) fn remove(&self, fd: RawFd, epoll: RawFd) {
        for slot in self.slots(fd) {
            if slot.load().is_some_and(|there| there.epoll == epoll) {
                slot.clear();
            }
        }
    }

    /// The number belongs to a new socket.
    pub(crate) fn clear(&self, fd: RawFd) {
        self.slots(fd).iter().for_each(Slot::clear);
    }

    /// Removes all registrations of the socket that has this number now.
    ///
    /// What the program has said by the C library is remembered. Other ways (io_uring, system calls
    /// of its own) nobody sees here, nor that a registration for a single event has had it. Then
    /// the kernel is asked, if the connection was awaited: that takes long where many sockets are
    /// registered, so not whenever a connection is made.
    pub(crate) fn lift(&self, fd: RawFd, socket: BorrowedFd<'_>, was_awaited: bool) -> Lifted {
        let asks = was_awaited && !sys::is_sandboxed();
        let mut lifted = Lifted { all: [None; LIFTED_MAX], are_unseen: false };
        for slot in self.slots(fd) {
            let Some(said) = slot.load() else { continue };
            slot.clear();
            let is_doubtful = said.events & EventFlags::ONESHOT.bits() != 0;
            let known = (asks && is_doubtful).then(|| registration(said.epoll, fd, socket));
            lifted.take(known.flatten().unwrap_or(said), socket);
        }
        if asks && lifted.all[0].is_none() {
            lifted.are_unseen = true;
            let all = places::epolls().filter_map(|epoll| registration(epoll, fd, socket));
            all.for_each(|known| lifted.take(known, socket));
        }
        lifted
    }
}

/// Registrations that were removed, to be made again.
pub(crate) struct Lifted {
    all: [Option<Registration>; LIFTED_MAX],
    /// The program may change them without a word to us.
    are_unseen: bool,
}

/// What is registered in more places unseen stays there, for the socket of before.
const LIFTED_MAX: usize = 8;

impl Lifted {
    fn take(&mut self, registration: Registration, socket: BorrowedFd<'_>) {
        let Some(place) = self.all.iter_mut().find(|place| place.is_none()) else { return };
        let Some(epoll) = sys::borrow(registration.epoll) else { return };
        // What cannot be removed was never there, or the number is another socket's by now.
        if epoll::delete(epoll, socket).is_ok() {
            *place = Some(registration);
        }
    }

    /// Makes them again for the socket that has this number now. One that has had its single event
    /// waits for none, as before; only an end the kernel would tell nevertheless.
    pub(crate) fn put_back(&self, fd: RawFd, socket: BorrowedFd<'_>) {
        for &Registration { epoll, events, data } in self.all.iter().flatten() {
            let Some(epoll) = sys::borrow(epoll) else { continue };
            let events = EventFlags::from_bits_retain(events);
            let is_made = epoll::add(epoll, socket, EventData::new_u64(data), events).is_ok();
            if is_made && !self.are_unseen {
                let number = epoll.as_raw_fd();
                watch::note(fd, libc::EPOLL_CTL_ADD, number, events.bits(), data);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::event::Timespec;
    use rustix::event::epoll::{CreateFlags, Event, create, wait};
    use rustix::io::fcntl_dupfd_cloexec;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    const AT_1: Registration = Registration { epoll: 0, events: 0x8000_0001, data: u64::MAX };
    const AT_2: Registration = Registration { epoll: 9, events: 4, data: 7 };

    fn of<const N: usize>(all: &Registrations<N>, fd: RawFd) -> Vec<Registration> {
        all.slots(fd).iter().filter_map(Slot::load).collect()
    }

    #[test]
    fn registrations_are_remembered_until_they_are_removed() {
        let all = Registrations::<8>::new();
        all.note(3, AT_1);
        all.note(3, AT_2);
        assert!(!all.note(3, Registration { epoll: 10, ..AT_2 }));
        assert_eq!(of(&all, 3), [AT_1, AT_2], "a third one is not remembered");
        all.note(3, Registration { events: 5, ..AT_2 });
        all.remove(3, 0);
        assert_eq!(of(&all, 3), [Registration { events: 5, ..AT_2 }]);
        all.clear(3);
        all.note(8, AT_1);
        all.note(-1, AT_1);
        assert_eq!([of(&all, 3), of(&all, 8)].concat(), []);
    }

    /// A socket whose number another one takes over, and an epoll set in which it is.
    struct Move {
        before: OwnedFd,
        far_before: OwnedFd,
        after: OwnedFd,
        far_after: OwnedFd,
        place: OwnedFd,
        all: Registrations<1024>,
    }

    impl Move {
        fn new() -> Self {
            let pair = || {
                let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
                socketpair(family, SocketType::STREAM, flags, None).unwrap()
            };
            let ((before, far_before), (after, far_after)) = (pair(), pair());
            let place = create(CreateFlags::CLOEXEC).unwrap();
            places::epoll_made(place.as_raw_fd());
            Self { before, far_before, after, far_after, place, all: Registrations::new() }
        }

        /// Registers it, without a word to us.
        fn register(&self, events: EventFlags) {
            epoll::add(&self.place, &self.before, EventData::new_u64(77), events).unwrap();
        }

        fn note(&self, events: EventFlags) {
            let (epoll, events) = (self.place.as_raw_fd(), events.bits());
            self.all.note(self.before.as_raw_fd(), Registration { epoll, events, data: 77 });
        }

        /// Returns the socket of before.
        fn make(&self, was_awaited: bool) -> OwnedFd {
            let (fd, kept) = (self.before.as_raw_fd(), self.before.try_clone().unwrap());
            let lifted = self.all.lift(fd, self.before.as_fd(), was_awaited);
            sys::put_at(self.after.as_fd(), fd, true).unwrap();
            lifted.put_back(fd, self.before.as_fd());
            kept
        }

        /// What there is to wait for.
        fn events(&self) -> Vec<(u64, EventFlags)> {
            let none = Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
            let (mut room, at_once) = ([none; 4], Timespec { tv_sec: 0, tv_nsec: 0 });
            let count = wait(&self.place, &mut room[..], Some(&at_once)).unwrap();
            room[..count].iter().map(|event| ({ event.data }.u64(), event.flags)).collect()
        }

        fn is_heard(&self) -> bool {
            rustix::io::write(&self.far_before, b"x").unwrap();
            assert_eq!(self.events(), [], "no longer");
            rustix::io::write(&self.far_after, b"x").unwrap();
            self.events() == [(77, EventFlags::IN)]
        }
    }

    #[test]
    fn they_move_to_the_socket_that_takes_the_number_over() {
        for was_awaited in [false, true] {
            let it = Move::new();
            it.register(EventFlags::IN);
            it.note(EventFlags::IN);
            let _kept = it.make(was_awaited);
            assert!(it.is_heard());
        }
    }

    /// A program whose registration stayed behind would be told for ever of a socket that it has
    /// no longer, and of nothing else.
    #[test]
    fn so_do_those_that_were_made_unseen() {
        let it = Move::new();
        // A set that is gone, and one where the number is that of another socket.
        let gone = create(CreateFlags::CLOEXEC).unwrap();
        places::epoll_made(gone.as_raw_fd());
        drop(gone);
        let copy = fcntl_dupfd_cloexec(&it.place, 0).unwrap();
        places::copied(it.place.as_raw_fd(), copy.as_raw_fd());
        it.register(EventFlags::IN | EventFlags::OUT);
        epoll::modify(&it.place, &it.before, EventData::new_u64(77), EventFlags::IN).unwrap();
        let _kept = it.make(true);
        assert!(it.is_heard());
    }

    /// Whoever has had its event works on the connection: nobody else must be told of it.
    #[test]
    fn what_has_had_its_single_event_has_no_second_one() {
        let once = EventFlags::OUT | EventFlags::ONESHOT;
        for is_noted in [true, false] {
            let it = Move::new();
            it.register(once);
            if is_noted {
                it.note(once);
            }
            assert_eq!(it.events(), [(77, EventFlags::OUT)]);
            let _kept = it.make(true);
            assert_eq!(it.events(), [], "not again");
            epoll::modify(&it.place, &it.before, EventData::new_u64(78), once).unwrap();
            assert_eq!(it.events(), [(78, EventFlags::OUT)], "it is registered still");
        }
        let it = Move::new();
        it.register(once);
        it.note(once);
        let _kept = it.make(true);
        assert_eq!(it.events(), [(77, EventFlags::OUT)], "it has not had one");
    }

    /// The number was closed, and is that of a socket for which nobody waits.
    #[test]
    fn registrations_of_a_socket_that_is_gone_do_not_come_back() {
        let it = Move::new();
        it.note(EventFlags::OUT);
        let _kept = it.make(true);
        assert_eq!(it.events(), []);
    }
}
