//! Programs wait for sockets.
//!
//! A program that hears that a socket is ready often knows by that alone that it is connected. So
//! what becomes of the connection is asked before the program goes on.

use std::slice;

use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

use crate::epoll::{REGISTRATIONS, Registration};
use crate::ringed::is_ringed;
use crate::settle::settle;
use crate::table::{Flag, Kind, TABLE};
use crate::{places, real, stream, sys, watch};

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the caller promises so many descriptors.
    let timeout = if unsafe { is_any_ready(fds, count) } { 0 } else { timeout };
    // SAFETY: the caller promises what `poll` asks for.
    let result = unsafe { real::poll(fds, count, timeout) };
    // SAFETY: the kernel has read and written all of them.
    unsafe { settle_polled(fds, count, result) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    room: size_t,
) -> c_int {
    // SAFETY: the caller promises so many descriptors.
    let timeout = if unsafe { is_any_ready(fds, count) } { 0 } else { timeout };
    // SAFETY: the caller promises what it asks for.
    let result = unsafe { real::__poll_chk(fds, count, timeout, room) };
    // SAFETY: the kernel has read and written all of them.
    unsafe { settle_polled(fds, count, result) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the caller promises so many descriptors.
    let timeout = if unsafe { is_any_ready(fds, count) } { &raw const AT_ONCE } else { timeout };
    // SAFETY: the caller promises what `ppoll` asks for.
    let result = unsafe { real::ppoll(fds, count, timeout, mask) };
    // SAFETY: the kernel has read and written all of them.
    unsafe { settle_polled(fds, count, result) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    room: size_t,
) -> c_int {
    // SAFETY: the caller promises so many descriptors.
    let timeout = if unsafe { is_any_ready(fds, count) } { &raw const AT_ONCE } else { timeout };
    // SAFETY: the caller promises what it asks for.
    let result = unsafe { real::__ppoll_chk(fds, count, timeout, mask, room) };
    // SAFETY: the kernel has read and written all of them.
    unsafe { settle_polled(fds, count, result) }
}

static AT_ONCE: timespec = timespec { tv_sec: 0, tv_nsec: 0 };

/// Whether a read from one of these would not wait, of which the kernel does not know.
///
/// # Safety
///
/// There are `count` descriptors, or none at null.
unsafe fn is_any_ready(fds: *mut pollfd, count: nfds_t) -> bool {
    watch::cease();
    if fds.is_null() || !stream::is_any_reading_shut() {
        return false;
    }
    // SAFETY: the caller promises them.
    let fds = unsafe { slice::from_raw_parts(fds, usize::try_from(count).unwrap_or(0)) };
    fds.iter().any(|it| it.events & libc::POLLIN != 0 && stream::is_reading_shut(it.fd))
}

/// Settles the descriptors that something is said of, and adds what the kernel does not know.
///
/// # Safety
///
/// If `result` is not negative, there are `count` descriptors, or none at null.
unsafe fn settle_polled(fds: *mut pollfd, count: nfds_t, result: c_int) -> c_int {
    if result < 0 || fds.is_null() {
        return result;
    }
    // SAFETY: the caller promises them.
    let fds = unsafe { slice::from_raw_parts_mut(fds, usize::try_from(count).unwrap_or(0)) };
    let mut result = result;
    for pollfd in fds {
        if stream::is_reading_shut(pollfd.fd) {
            result += c_int::from(pollfd.revents == 0 && pollfd.events & libc::POLLIN != 0);
            pollfd.revents |= pollfd.events & (libc::POLLIN | libc::POLLRDHUP);
        }
        if pollfd.revents != 0 && TABLE.of(pollfd.fd).kind() == Kind::Pending {
            settle(pollfd.fd);
        }
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn select(
    count: c_int,
    reading: *mut fd_set,
    writing: *mut fd_set,
    urgent: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    watch::cease();
    // SAFETY: the caller promises what `select` asks for.
    let result = unsafe { real::select(count, reading, writing, urgent, timeout) };
    // SAFETY: the kernel has read and written all sets.
    unsafe { settle_selected(count, [reading, writing], result) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn pselect(
    count: c_int,
    reading: *mut fd_set,
    writing: *mut fd_set,
    urgent: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    watch::cease();
    // SAFETY: the caller promises what `pselect` asks for.
    let result = unsafe { real::pselect(count, reading, writing, urgent, timeout, mask) };
    // SAFETY: the kernel has read and written all sets.
    unsafe { settle_selected(count, [reading, writing], result) }
}

/// Settles the descriptors that are in one of the sets.
///
/// # Safety
///
/// If `result` is positive, sets that are not null have `count` bits.
unsafe fn settle_selected(count: c_int, sets: [*mut fd_set; 2], result: c_int) -> c_int {
    if result <= 0 {
        return result;
    }
    for set in sets {
        let each = |fd| {
            if TABLE.of(fd).kind() == Kind::Pending {
                settle(fd);
            }
        };
        // SAFETY: the caller promises the bits.
        unsafe { sys::each_in_set(set.cast(), count, each) };
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_ctl(
    epoll: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    settle(fd);
    // SAFETY: the caller promises what `epoll_ctl` asks for.
    let result = unsafe { real::epoll_ctl(epoll, operation, fd, event) };
    let may_be_switched = match TABLE.of(fd).kind() {
        Kind::Fresh | Kind::Pending => true,
        Kind::Other | Kind::Settling | Kind::Switched | Kind::Listening | Kind::Suspect => false,
    };
    if result != 0 {
        return result;
    }
    if is_ringed(fd) {
        // SAFETY: the kernel has read it, if it asks for one.
        let (events, data) = match unsafe { event.as_ref() } {
            Some(event) => (event.events, event.u64),
            None => (0, 0),
        };
        watch::note(fd, operation, epoll, events, data);
    }
    if operation == libc::EPOLL_CTL_DEL || event.is_null() {
        REGISTRATIONS.remove(fd, epoll);
    } else if may_be_switched {
        // SAFETY: the kernel has read it.
        let epoll_event { events, u64: data } = unsafe { *event };
        if !REGISTRATIONS.note(fd, Registration { epoll, events, data }) {
            TABLE.raise(fd, Flag::Shared);
        }
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_create(size: c_int) -> c_int {
    // SAFETY: it asks for nothing.
    let epoll = unsafe { real::epoll_create(size) };
    places::epoll_made(epoll);
    epoll
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_create1(flags: c_int) -> c_int {
    // SAFETY: it asks for nothing.
    let epoll = unsafe { real::epoll_create1(flags) };
    places::epoll_made(epoll);
    epoll
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_wait(
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
) -> c_int {
    let length = usize::try_from(count).unwrap_or(0);
    if !TABLE.has_rings() || events.is_null() || length == 0 {
        // SAFETY: the caller promises what `epoll_wait` asks for.
        return unsafe { real::epoll_wait(epoll, events, count, timeout) };
    }
    // SAFETY: the caller promises room for so many events, which are numbers.
    let room = unsafe { slice::from_raw_parts_mut(events, length) };
    watch::epoll_wait(epoll, room, timeout, |room, timeout| {
        let count = c_int::try_from(room.len()).unwrap_or(c_int::MAX);
        // SAFETY: `epoll_wait` asks for room: it is a live slice.
        unsafe { real::epoll_wait(epoll, room.as_mut_ptr(), count, timeout) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_pwait(
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    if mask.is_null() {
        // SAFETY: the caller promises what `epoll_pwait` asks for, which is the same then.
        return unsafe { epoll_wait(epoll, events, count, timeout) };
    }
    watch::cease();
    // SAFETY: the caller promises what `epoll_pwait` asks for.
    unsafe { real::epoll_pwait(epoll, events, count, timeout, mask) }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn epoll_pwait2(
    epoll: c_int,
    events: *mut epoll_event,
    count: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    watch::cease();
    // SAFETY: the caller promises what `epoll_pwait2` asks for.
    unsafe { real::epoll_pwait2(epoll, events, count, timeout, mask) }
}
