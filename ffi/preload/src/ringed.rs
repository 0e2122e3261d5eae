//! Connections whose bytes go by shared memory: what `recv` and `send` do elsewhere.
//!
//! The Unix socket of such a connection says only when there is something to do. So who finds
//! nothing to read waits in a real `recv` for one byte of it, as the program would, and who finds
//! no room waits for the socket to be writable. Nothing is held meanwhile.

use libc::{c_int, iovec, ssize_t};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::net::sockopt::{Timeout, socket_timeout};
use rustix::thread::sched_yield;
use smcgate_rings::{Application, Held};
use std::cell::Cell;
use std::mem::replace;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

use crate::attach::{rings_of_same, shorten_if_due};
use crate::end::is_hung_up;
use crate::mappings::Used;
use crate::signals::{Signals, do_all_restart};
use crate::table::{Flag, Kind, TABLE};
use crate::{name, patience, real, sys, watch};

/// Whether the bytes of this connection go by shared memory.
#[inline]
pub(crate) fn is_ringed(fd: RawFd) -> bool {
    let entry = TABLE.of(fd);
    entry.kind() == Kind::Switched && entry.has(Flag::Ringed)
}

/// As `recv` on a TCP socket.
///
/// # Safety
///
/// The parts are valid for writes; with MSG_TRUNC, and without MSG_PEEK, they need not be.
pub(crate) unsafe fn receive(fd: RawFd, parts: &[iovec], flags: c_int) -> ssize_t {
    if flags & libc::MSG_OOB != 0 {
        return sys::fail(libc::EINVAL);
    }
    let wanted = length(parts);
    let peek = flags & libc::MSG_PEEK != 0;
    let drops = flags & libc::MSG_TRUNC != 0 && !peek;
    let least = if flags & libc::MSG_WAITALL == 0 { low_water(fd) } else { wanted };
    let (mut done, mut may_spin, mut outcome, mut connection) = (0, true, None, None);
    let mut begins = true;
    loop {
        let (used, socket) = match rings_of_same(fd, &mut connection) {
            Ok(found) => found,
            Err(error) => return many_or(done, error),
        };
        let taken = if drops {
            used.rings.discard(socket, wanted - done)
        } else {
            let (first, rest) = rest_of(parts, if peek { 0 } else { done });
            // SAFETY: the caller promises its parts, and these are what is left of them.
            unsafe { read(&used.rings, socket, (first.as_slice(), rest), peek) }
        };
        done = if peek { taken } else { done + taken };
        // What came while we read makes the socket no more readable than it was: a program that
        // gets less than it wants may wait for that.
        if !peek && taken > 0 && done < wanted && used.rings.readable() > 0 {
            continue;
        }
        let is_enough = done >= least.min(wanted) && (done > 0 || wanted == 0);
        if peek && (is_enough || outcome.is_some()) {
            used.rings.keep_readable(socket);
        }
        match outcome {
            _ if is_enough => {
                shorten_if_due(used, socket);
                watch::has_read(fd);
                return many(done);
            }
            Some((_, error)) if done > 0 || error != 0 => return many_or(done, error),
            Some(_) => return 0,
            None => {}
        }
        let begun = sys::now_precise();
        if may_spin {
            match spins(&used.rings, (socket, flags), begun, begins && done == 0) {
                Spun::InVain => {}
                Spun::Found => {
                    may_spin = false;
                    continue;
                }
                Spun::Interrupted => return many_or(done, libc::EINTR),
            }
        }
        drop(used);
        begins = false;
        watch::cease_if(|| waits(socket, flags));
        outcome = wait_for_bytes(fd, flags, connection);
        let waited = sys::now_precise().saturating_sub(begun);
        let has_byte = outcome.is_none();
        // Who does not wait has learned nothing of waiting.
        if has_byte && sys::borrow(fd).is_some_and(|socket| waits(socket, flags)) {
            patience::learn_found(waited);
        } else if !has_byte {
            patience::learn_ended(waited);
        }
        may_spin = true;
    }
}

/// Reads into one part, if there is one, and into those behind it.
///
/// # Safety
///
/// The parts are valid for writes.
unsafe fn read(
    rings: &Application,
    socket: BorrowedFd<'_>,
    (first, rest): (&[iovec], &[iovec]),
    peek: bool,
) -> usize {
    let taken = if first.is_empty() {
        0
    } else {
        // SAFETY: the caller promises it.
        unsafe { rings.read(socket, first, peek) }
    };
    if rest.is_empty() || taken < length(first) {
        return taken;
    }
    // SAFETY: the caller promises them.
    taken + unsafe { rings.read(socket, rest, peek) }
}

/// Waits as the program would. Returns what the kernel says if no byte has come: a result and an
/// error. The rings must be looked at once more then.
fn wait_for_bytes(
    fd: RawFd,
    flags: c_int,
    mut connection: Option<u64>,
) -> Option<(ssize_t, c_int)> {
    let mut byte = 0_u8;
    let place = (&raw mut byte).cast();
    // SAFETY: `recv` asks for a buffer of one byte: it is a live local.
    let result = unsafe { real::recv(fd, place, 1, flags & libc::MSG_DONTWAIT) };
    match result {
        1.. => {
            if let Ok((used, _)) = rings_of_same(fd, &mut connection) {
                used.rings.token_taken();
            }
            None
        }
        0 => Some((0, 0)),
        // If the gateway has left wake-ups unread, the kernel takes them for bytes.
        _ if sys::errno() == libc::ECONNRESET && has_ended(fd) => Some((0, 0)),
        _ => Some((-1, sys::errno())),
    }
}

/// Whether the gateway has ended the stream in order.
fn has_ended(fd: RawFd) -> bool {
    sys::borrow(fd).is_some_and(name::is_peer_named)
}

/// What became of a while in which a thread has watched its rings.
enum Spun {
    /// There may be something.
    Found,
    InVain,
    /// A signal has come, for which a sleep would have ended.
    Interrupted,
}

/// Watches the rings for a while from `begun`, if that is worth it and the program would wait.
/// `begins`: its call has done nothing so far.
fn spins(
    rings: &Application,
    (socket, flags): (BorrowedFd<'_>, c_int),
    begun: Duration,
    begins: bool,
) -> Spun {
    let span = patience::span(begun);
    if span.is_zero() || !waits(socket, flags) {
        return Spun::InVain;
    }
    let until = begun + span;
    let (mut signals, mut handled, mut now) = (Signals::watch(begins), None, begun);
    let has_news = rings.spin(|| {
        handled = signals.has_one_come();
        if handled.is_some() || now >= until {
            return false;
        }
        sched_yield();
        let before = replace(&mut now, sys::now_precise());
        patience::learn_offer(before, now);
        true
    });
    if has_news {
        return Spun::Found;
    }
    handled = handled.or_else(|| signals.has_one_come_now());
    drop(signals);
    let has_limit = || socket_timeout(socket, Timeout::Recv).is_ok_and(|limit| limit.is_some());
    match handled {
        // With a time-out no `recv` does (signal(7)).
        Some(handled) if !handled.restarts || has_limit() => Spun::Interrupted,
        _ => Spun::InVain,
    }
}

/// As `send` on a TCP socket, but that nothing here raises SIGPIPE.
///
/// # Safety
///
/// The parts are valid for reads.
pub(crate) unsafe fn send(fd: RawFd, parts: &[iovec], flags: c_int) -> ssize_t {
    let (wanted, mut done, mut connection) = (length(parts), 0, None);
    loop {
        let (used, socket) = match rings_of_same(fd, &mut connection) {
            Ok(found) => found,
            Err(error) => return many_or(done, error),
        };
        if used.rings.is_closed() || used.rings.is_finished() {
            let is_finished = used.rings.is_finished();
            drop(used);
            return many_or(done, if is_finished { libc::EPIPE } else { refusal(socket) });
        }
        let (first, rest) = rest_of(parts, done);
        for part in [first.as_slice(), rest] {
            // SAFETY: the caller promises its parts, and these are what is left of them. Behind a
            // part that found no room, nothing may be written.
            let taken = match unsafe { used.rings.write(socket, part, thread()) } {
                Ok(taken) => taken,
                // Another process of the program has just turned to it.
                Err(Held::Unmapped) => break,
                Err(held) => return many_or(done, held_back(held, socket, flags)),
            };
            done += taken;
            if taken < length(part) {
                break;
            }
        }
        if done >= wanted {
            shorten_if_due(used, socket);
            return many(done);
        }
        if used.rings.lacked_shortcut().is_some() {
            continue;
        }
        match await_room(used, socket, fd, flags) {
            Ok(()) => {}
            Err(error) => return many_or(done, error),
        }
    }
}

/// What to say to a program that cannot write because of somebody who is about to.
fn held_back(held: Held, socket: BorrowedFd<'_>, flags: c_int) -> c_int {
    match held {
        Held::ByThisThread if waits(socket, flags) => libc::EINTR,
        Held::ByThisThread => libc::EAGAIN,
        Held::ForEver | Held::Unmapped => libc::ECONNRESET,
    }
}

/// There is no room in the ring: waits until there is some, if the program would wait.
///
/// # Errors
///
/// Why there is none.
pub(crate) fn await_room(
    used: Used<'_>,
    socket: BorrowedFd<'_>,
    fd: RawFd,
    flags: c_int,
) -> Result<(), c_int> {
    let waits = waits(socket, flags);
    for _ in 0..if waits { YIELDS } else { 0 } {
        if used.rings.room() > 0 {
            return Ok(());
        }
        sched_yield();
    }
    if !used.rings.make_unwritable(socket) {
        return Ok(());
    }
    drop(used);
    if is_hung_up(socket) {
        return Err(refusal(socket));
    }
    if !waits {
        return Err(libc::EAGAIN);
    }
    let limit = socket_timeout(socket, Timeout::Send).ok().flatten();
    let limit = limit.and_then(|limit| c_int::try_from(limit.as_millis()).ok());
    let mut pollfd = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: `poll` asks for one descriptor, which is a live local.
    let result = unsafe { real::poll(&raw mut pollfd, 1, limit.map_or(-1, |ms| ms.max(1))) };
    match result {
        0 => Err(libc::EAGAIN),
        1.. => Ok(()),
        _ if sys::errno() == libc::EINTR && do_all_restart() => Ok(()),
        _ => Err(sys::errno()),
    }
}

/// How often to let the gateway go first before the socket is made unwritable, which costs more.
const YIELDS: u32 = 64;

/// Why the kernel takes nothing any more for this socket, whose far end is closed or about to be.
pub(crate) fn refusal(socket: BorrowedFd<'_>) -> c_int {
    for _ in 0..CLOSING_MS {
        if is_hung_up(socket) {
            break;
        }
        sys::pause();
    }
    let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
    match rustix::net::send(socket, &[0], flags) {
        Ok(_) | Err(rustix::io::Errno::AGAIN) => libc::EPIPE,
        Err(error) => error.raw_os_error(),
    }
}

/// So long a gateway may take to close a socket, after it has said so.
const CLOSING_MS: u32 = 100;

/// How many bytes a `recv` waits for, if there is not less room.
fn low_water(fd: RawFd) -> usize {
    if !TABLE.of(fd).has(Flag::LowWater) {
        return 1;
    }
    let mut value = [0; 4];
    let level = libc::SOL_SOCKET;
    let set = sys::borrow(fd)
        .map(|socket| sys::socket_option(socket, level, libc::SO_RCVLOWAT, &mut value));
    let number = usize::try_from(i32::from_ne_bytes(value)).unwrap_or(1);
    if set == Some(Ok(value.len())) { number.max(1) } else { 1 }
}

/// The program may have set SO_RCVLOWAT, which the Unix socket has, and needs not look for it
/// otherwise.
pub(crate) fn note_low_water(fd: RawFd) {
    TABLE.raise(fd, Flag::LowWater);
    if low_water(fd) == 1 {
        TABLE.take(fd, Flag::LowWater);
    }
}

/// The size of a buffer that the program has set, as Linux says it: doubled. None if it has not.
pub(crate) fn buffer(fd: RawFd, option: c_int) -> Option<c_int> {
    let size = TABLE.buffers(fd) >> shift_of(option)? & u64::from(u32::MAX);
    (size != 0).then(|| c_int::try_from(size * 2).unwrap_or(c_int::MAX))
}

/// Remembers the size of a buffer. Returns whether this option is one.
pub(crate) fn set_buffer(fd: RawFd, option: c_int, value: &[u8]) -> bool {
    let (Some(shift), Some(value)) = (shift_of(option), value.first_chunk()) else { return false };
    let size = u64::from(i32::from_ne_bytes(*value).max(LEAST_BUFFER).cast_unsigned());
    let others = TABLE.buffers(fd) & !(u64::from(u32::MAX) << shift);
    TABLE.set_buffers(fd, others | size << shift);
    true
}

fn shift_of(option: c_int) -> Option<u32> {
    match option {
        libc::SO_SNDBUF => Some(32),
        libc::SO_RCVBUF => Some(0),
        _ => None,
    }
}

/// Half of `SOCK_MIN_RCVBUF` of Linux, about.
const LEAST_BUFFER: i32 = 1152;

/// Whether a call with these flags waits.
pub(crate) fn waits(socket: BorrowedFd<'_>, flags: c_int) -> bool {
    flags & libc::MSG_DONTWAIT == 0
        && fcntl_getfl(socket).is_ok_and(|status| !status.contains(OFlags::NONBLOCK))
}

/// What is left of the parts behind so many bytes: what is left of one, and those behind it.
fn rest_of(parts: &[iovec], done: usize) -> (Option<iovec>, &[iovec]) {
    if done == 0 {
        return (None, parts);
    }
    let mut left = done;
    for (index, part) in parts.iter().enumerate() {
        if left < part.iov_len {
            let base = part.iov_base.cast::<u8>().wrapping_add(left).cast();
            let first = iovec { iov_base: base, iov_len: part.iov_len - left };
            return (Some(first), parts.get(index + 1..).unwrap_or_default());
        }
        left -= part.iov_len;
    }
    (None, &[])
}

/// How many bytes there are in all parts. The kernel moves no more at once either.
fn length(parts: &[iovec]) -> usize {
    parts.iter().fold(0, |sum: usize, part| sum.saturating_add(part.iov_len)).min(MOVED_MAX)
}

/// `MAX_RW_COUNT` of Linux.
const MOVED_MAX: usize = 0x7fff_f000;

/// A result of so many bytes.
pub(crate) fn many(count: usize) -> ssize_t {
    ssize_t::try_from(count).unwrap_or(ssize_t::MAX)
}

/// The same, or an error if there are none.
pub(crate) fn many_or(count: usize, error: c_int) -> ssize_t {
    if count > 0 { many(count) } else { sys::fail(error) }
}

thread_local! {
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

/// The number of this thread, never zero.
pub(crate) fn thread() -> u32 {
    THREAD.with(|thread| {
        if thread.get() == 0 {
            thread.set(smcgate_rings::thread());
        }
        thread.get()
    })
}

/// The calling thread is that of a new process.
pub(crate) fn after_fork() {
    THREAD.with(|thread| thread.set(0));
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::time::Duration;

    use rustix::event::PollFlags;
    use rustix::net::Shutdown;
    use rustix::net::sockopt::set_socket_timeout;

    use super::*;
    use crate::pair::Pair;
    use crate::signals::tests::interrupted;

    const NOW: c_int = libc::MSG_DONTWAIT;

    #[test]
    fn what_came_is_read_and_nothing_waits_for_more() {
        let pair = Pair::new(1);
        assert_eq!(pair.reads(10, NOW), Err(libc::EAGAIN));
        pair.comes(b"first and second");
        assert!(pair.is(PollFlags::IN));
        assert_eq!(pair.reads(3, libc::MSG_PEEK).unwrap(), b"fir");
        assert_eq!(pair.reads(6, 0).unwrap(), b"first ");
        pair.gateway.serve(pair.near.as_fd());
        assert!(pair.is(PollFlags::IN), "there is more");
        assert_eq!(pair.reads(100, 0).unwrap(), b"and second");
        assert!(!pair.is(PollFlags::IN));
        assert_eq!(pair.reads(10, NOW), Err(libc::EAGAIN));
        assert_eq!(pair.reads(0, 0).unwrap(), b"");
        assert_eq!(pair.reads(1, libc::MSG_OOB), Err(libc::EINVAL));
    }

    /// `poll` must go on to say that there is something.
    #[test]
    fn who_waits_and_looks_leaves_the_socket_readable() {
        let pair = Pair::new(2);
        std::thread::scope(|scope| {
            let looker = scope.spawn(|| pair.reads(10, libc::MSG_PEEK));
            std::thread::sleep(Duration::from_millis(20));
            pair.comes(b"there");
            assert_eq!(looker.join().unwrap().unwrap(), b"there");
        });
        pair.gateway.serve(pair.near.as_fd());
        assert!(pair.is(PollFlags::IN));
        let part = iovec { iov_base: std::ptr::null_mut(), iov_len: 4 };
        // SAFETY: with MSG_TRUNC nothing is written.
        assert_eq!(unsafe { receive(pair.fd(), &[part], libc::MSG_TRUNC) }, 4);
        assert_eq!(pair.reads(10, NOW).unwrap(), b"e");
    }

    /// As the kernel would end the wait, or not.
    #[test]
    fn a_signal_may_end_the_wait_of_a_thread_that_looks() {
        let pair = Pair::new(13);
        patience::fix(Duration::from_secs(20));
        let begun = sys::now_precise();
        assert_eq!(interrupted(0, || pair.reads(9, 0)), Err(libc::EINTR));
        let read = interrupted(libc::SA_RESTART, || {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(50));
                    pair.comes(b"later");
                });
                pair.reads(9, 0)
            })
        });
        assert_eq!(read.unwrap(), b"later");
        set_socket_timeout(&pair.ours, Timeout::Recv, Some(Duration::from_secs(60))).unwrap();
        let read = interrupted(libc::SA_RESTART, || pair.reads(9, 0));
        assert_eq!(read, Err(libc::EINTR), "with a time-out");
        pair.comes(b"some");
        let read = interrupted(0, || pair.reads(9, libc::MSG_WAITALL));
        assert_eq!(read.unwrap(), b"some");
        assert!(sys::now_precise() < begun + Duration::from_secs(10), "looking has gone on");
    }

    #[test]
    fn who_wants_all_waits_for_all_or_the_end() {
        let pair = Pair::new(3);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| pair.reads(10, libc::MSG_WAITALL));
            for byte in b"0123456789" {
                std::thread::sleep(Duration::from_millis(2));
                pair.comes(&[*byte]);
            }
            assert_eq!(reader.join().unwrap().unwrap(), b"0123456789");
            let reader = scope.spawn(|| pair.reads(10, libc::MSG_WAITALL));
            pair.comes(b"last");
            std::thread::sleep(Duration::from_millis(20));
            pair.gateway.finish();
            rustix::net::shutdown(&pair.near, Shutdown::Write).unwrap();
            assert_eq!(reader.join().unwrap().unwrap(), b"last");
        });
        assert_eq!(pair.reads(10, 0).unwrap(), b"");
    }

    #[test]
    fn a_full_ring_stops_who_does_not_wait_and_holds_who_does() {
        let pair = Pair::new(4);
        let bytes = vec![7; 1 << 20];
        let taken = pair.writes(&bytes, NOW).unwrap();
        assert!(taken > 0 && taken < bytes.len());
        assert_eq!(pair.writes(&bytes, NOW), Err(libc::EAGAIN));
        assert!(!pair.is(PollFlags::OUT));
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| pair.writes(&bytes, 0));
            let mut got = 0;
            while got < taken + bytes.len() {
                got += match pair.gateway.readable().unwrap() {
                    0 => {
                        std::thread::yield_now();
                        0
                    }
                    _ => pair.goes(1 << 16),
                };
            }
            assert_eq!(writer.join().unwrap(), Ok(bytes.len()));
        });
        assert!(pair.is(PollFlags::OUT));
    }

    #[test]
    fn a_gateway_that_is_gone_ends_waiting() {
        let pair = Pair::new(5);
        let bytes = vec![7; 1 << 20];
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| pair.reads(10, 0));
            let writer = scope.spawn(|| pair.writes(&bytes, 0));
            std::thread::sleep(Duration::from_millis(20));
            rustix::net::shutdown(&pair.near, Shutdown::Both).unwrap();
            assert_eq!(reader.join().unwrap().unwrap(), b"");
            assert!(writer.join().unwrap().unwrap() < bytes.len());
        });
        assert_eq!(pair.writes(&bytes, 0), Err(libc::EPIPE));
    }

    /// `fclose` of the C library is not seen everywhere.
    #[test]
    fn a_number_that_is_something_else_by_now_is_not_written_to() {
        let pair = Pair::new(6);
        let file = std::fs::File::open("/dev/null").unwrap();
        sys::put_at(file.as_fd(), pair.fd(), true).unwrap();
        pair.gateway.close(pair.near.as_fd());
        assert_eq!(pair.writes(b"x", 0), Err(libc::ENOTSOCK));
        assert!(TABLE.rings(pair.fd()).is_none());
    }

    /// Without a gateway that gives the rings again, nothing that is read would be a stream.
    #[test]
    fn a_socket_without_its_rings_is_reset() {
        let pair = Pair::new(7);
        TABLE.forget(pair.fd());
        crate::adopt::adopt(pair.fd());
        assert!(is_ringed(pair.fd()) && TABLE.rings(pair.fd()).is_none());
        assert_eq!(pair.reads(10, 0), Err(libc::ECONNRESET));
        TABLE.raise(pair.fd(), Flag::ResetTold);
        assert_eq!(pair.writes(b"x", 0), Err(libc::EPIPE));
    }

    #[test]
    fn a_low_water_mark_and_sizes_of_buffers_are_remembered() {
        let pair = Pair::new(8);
        let low = i32::to_ne_bytes(4);
        let level = libc::SOL_SOCKET;
        sys::set_socket_option(pair.ours.as_fd(), level, libc::SO_RCVLOWAT, &low).unwrap();
        note_low_water(pair.fd());
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| pair.reads(10, 0));
            pair.comes(b"abc");
            std::thread::sleep(Duration::from_millis(20));
            pair.comes(b"d");
            assert_eq!(reader.join().unwrap().unwrap(), b"abcd");
        });
        assert_eq!(buffer(pair.fd(), libc::SO_SNDBUF), None);
        assert!(set_buffer(pair.fd(), libc::SO_SNDBUF, &i32::to_ne_bytes(50_000)));
        assert!(set_buffer(pair.fd(), libc::SO_RCVBUF, &i32::to_ne_bytes(1)));
        assert!(!set_buffer(pair.fd(), libc::SO_LINGER, &[0; 8]));
        let sizes = [libc::SO_SNDBUF, libc::SO_RCVBUF].map(|option| buffer(pair.fd(), option));
        assert_eq!(sizes, [Some(100_000), Some(2304)]);
    }
}
