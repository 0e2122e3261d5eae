//! Where a program waits for a TCP socket by epoll.
//!
//! The kernel ties a registration to the open file, not to the number. When another socket takes
//! the number over, its registrations must be made again.

use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::event::epoll::{self, EventData, EventFlags};

use crate::table::DESCRIPTORS_MAX;
use crate::{sys, watch};

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

    fn of(&self, fd: RawFd) -> impl Iterator<Item = Registration> {
        self.slots(fd).iter().filter_map(Slot::load)
    }

    /// Removes all registrations of the socket that has this number now.
    pub(crate) fn lift(&self, fd: RawFd, socket: BorrowedFd<'_>) {
        for slot in self.slots(fd) {
            let epoll = slot.load().and_then(|there| sys::borrow(there.epoll));
            // What cannot be removed was never there, or the number is another socket's by now.
            if epoll.is_none_or(|epoll| epoll::delete(epoll, socket).is_err()) {
                slot.clear();
            }
        }
    }

    /// Makes them again for the socket that has this number now.
    pub(crate) fn put_back(&self, fd: RawFd, socket: BorrowedFd<'_>) {
        for Registration { epoll, events, data } in self.of(fd) {
            if let Some(epoll) = sys::borrow(epoll) {
                let events = EventFlags::from_bits_retain(events);
                if epoll::add(epoll, socket, EventData::new_u64(data), events).is_ok() {
                    let number = epoll.as_raw_fd();
                    watch::note(fd, libc::EPOLL_CTL_ADD, number, events.bits(), data);
                }
            }
        }
        self.clear(fd);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use rustix::event::Timespec;
    use rustix::event::epoll::{CreateFlags, Event, create, wait};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    const AT_1: Registration = Registration { epoll: 0, events: 0x8000_0001, data: u64::MAX };
    const AT_2: Registration = Registration { epoll: 9, events: 4, data: 7 };

    #[test]
    fn registrations_are_remembered_until_they_are_removed() {
        let all = Registrations::<8>::new();
        all.note(3, AT_1);
        all.note(3, AT_2);
        assert!(!all.note(3, Registration { epoll: 10, ..AT_2 }));
        assert_eq!(all.of(3).collect::<Vec<_>>(), [AT_1, AT_2], "a third one is not remembered");
        all.note(3, Registration { events: 5, ..AT_2 });
        all.remove(3, 0);
        assert_eq!(all.of(3).collect::<Vec<_>>(), [Registration { events: 5, ..AT_2 }]);
        all.clear(3);
        all.note(8, AT_1);
        all.note(-1, AT_1);
        assert_eq!(all.of(3).chain(all.of(8)).count(), 0);
    }

    #[test]
    fn they_move_to_the_socket_that_takes_the_number_over() {
        let pair = || {
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
        };
        let ((before, far_before), (after, far_after)) = (pair(), pair());
        let all = Registrations::<1024>::new();
        let place = create(CreateFlags::CLOEXEC).unwrap();
        let (data, fd) = (EventData::new_u64(77), before.as_raw_fd());
        epoll::add(&place, &before, data, EventFlags::IN).unwrap();
        let events = EventFlags::IN.bits();
        all.note(fd, Registration { epoll: place.as_raw_fd(), events, data: 77 });
        let kept = before.try_clone().unwrap();
        all.lift(fd, before.as_fd());
        sys::put_at(after.as_fd(), fd, true).unwrap();
        all.put_back(fd, before.as_fd());
        rustix::io::write(&far_before, b"x").unwrap();
        let mut room = [Event { flags: EventFlags::empty(), data }; 4];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(wait(&place, &mut room[..], Some(&at_once)).unwrap(), 0, "no longer");
        rustix::io::write(&far_after, b"x").unwrap();
        assert_eq!(wait(&place, &mut room[..], Some(&at_once)).unwrap(), 1);
        assert_eq!({ room[0].data }.u64(), 77);
        drop(kept);
    }

    /// The number was closed, and is that of a socket for which nobody waits.
    #[test]
    fn registrations_of_a_socket_that_is_gone_do_not_come_back() {
        let (socket, _far) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        let (all, place) = (Registrations::<1024>::new(), create(CreateFlags::CLOEXEC).unwrap());
        let fd = socket.as_raw_fd();
        all.note(fd, Registration { epoll: place.as_raw_fd(), events: 4, data: 77 });
        all.lift(fd, socket.as_fd());
        all.put_back(fd, socket.as_fd());
        let mut room = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 4];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(wait(&place, &mut room[..], Some(&at_once)).unwrap(), 0);
    }
}
