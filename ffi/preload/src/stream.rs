//! Reading and writing, and how a stream ends: as TCP says it.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use libc::{c_int, ssize_t};
use rustix::net::sockopt::socket_linger;
use smcgate_door::Request;

use crate::accept::before_read;
use crate::attach::rings_of;
use crate::door::ask;
use crate::end::{Direction, is_hung_up, is_reset, told};
use crate::ringed::is_ringed;
use crate::settle::{Settled, before_io};
use crate::table::{Flag, Kind, TABLE};
use crate::{name, sys};

/// Reads at most `wanted` bytes from a descriptor that is not plain. `switched` reads from a Unix
/// socket, with the flags that it gets in addition; `plain` from anything else.
pub(crate) fn read(
    fd: RawFd,
    wanted: usize,
    switched: impl FnOnce(c_int) -> ssize_t,
    plain: impl FnOnce() -> ssize_t,
) -> ssize_t {
    if is_sandboxed(fd) {
        return switched(0);
    }
    if let Some(error) = unready(fd).or_else(|| unread(fd)) {
        return failed(error);
    }
    let (entry, Some(socket)) = (TABLE.of(fd), sys::borrow(fd)) else { return plain() };
    if entry.kind() != Kind::Switched {
        return plain();
    }
    // The kernel does not know of it, because its other end would.
    let is_shut = entry.has(Flag::ReadingShut) && is_ours(fd);
    let result = switched(if is_shut { libc::MSG_DONTWAIT } else { 0 });
    match (result, if result < 0 { sys::errno() } else { 0 }) {
        // While this thread waited, another one may have shut the connection down.
        (0, _) if wanted > 0 && is_reset(socket, fd, TABLE.of(fd)) => failed(libc::ECONNRESET),
        (0.., _) => result,
        (_, libc::ENOTSOCK) => {
            TABLE.forget(fd);
            plain()
        }
        (_, libc::EAGAIN) if is_shut => 0,
        // The rings of a connection are gone, and the program has heard of that.
        (_, libc::EPIPE) => 0,
        (_, libc::ECONNRESET) => {
            told(socket, fd);
            failed(libc::ECONNRESET)
        }
        _ => result,
    }
}

/// Writes to a descriptor that is not plain. `flags` are those of the program.
pub(crate) fn write(
    fd: RawFd,
    flags: c_int,
    switched: impl FnOnce(c_int) -> ssize_t,
    plain: impl FnOnce() -> ssize_t,
) -> ssize_t {
    if is_sandboxed(fd) {
        return switched(0);
    }
    if let Some(error) = unready(fd) {
        return failed(error);
    }
    if TABLE.of(fd).kind() != Kind::Switched {
        return plain();
    }
    // The signal comes from us, if TCP would send it.
    let result = switched(libc::MSG_NOSIGNAL);
    match (result, if result < 0 { sys::errno() } else { 0 }) {
        (0.., _) => result,
        (_, libc::ENOTSOCK) => {
            TABLE.forget(fd);
            plain()
        }
        (_, libc::EPIPE) => {
            if sys::borrow(fd).is_some_and(|socket| is_reset(socket, fd, TABLE.of(fd))) {
                return failed(libc::ECONNRESET);
            }
            if flags & libc::MSG_NOSIGNAL == 0 {
                sys::raise_sigpipe();
            }
            failed(libc::EPIPE)
        }
        _ => result,
    }
}

/// Lets the kernel move bytes (`sendfile`, `splice`) to and from descriptors, of which some may not
/// be plain.
pub(crate) fn moving(
    from: RawFd,
    to: RawFd,
    wanted: usize,
    real: impl FnOnce() -> ssize_t,
) -> ssize_t {
    for fd in [from, to] {
        if let Some(error) = unready(fd) {
            return failed(error);
        }
    }
    if let Some(error) = unread(from) {
        return failed(error);
    }
    // The kernel would send SIGPIPE where TCP fails with ECONNRESET.
    if was_reset(to) {
        return failed(libc::ECONNRESET);
    }
    let result = real();
    let error = if result < 0 { sys::errno() } else { 0 };
    let is_news = match (result, error) {
        (0, _) => wanted > 0 && was_reset(from),
        (_, libc::EPIPE) => was_reset(to),
        _ => false,
    };
    if is_news { failed(libc::ECONNRESET) } else { result }
}

/// Whether this is a switched connection of a process that has given up system calls. Then `read`
/// and `write` must not become others.
pub(crate) fn is_sandboxed(fd: RawFd) -> bool {
    sys::is_sandboxed() && TABLE.of(fd).kind() == Kind::Switched && !is_ringed(fd)
}

/// Why nothing can be read or written now, if so.
fn unready(fd: RawFd) -> Option<c_int> {
    if TABLE.of(fd).is_plain() && !TABLE.of(fd).has(Flag::ResetUntold) {
        return None;
    }
    error_of(before_io(fd))
}

/// Why nothing can be read now, if so, from a connection whose client may begin with a rendezvous.
fn unread(fd: RawFd) -> Option<c_int> {
    match TABLE.of(fd).kind() {
        Kind::Suspect => error_of(before_read(fd)),
        Kind::Other
        | Kind::Fresh
        | Kind::Pending
        | Kind::Settling
        | Kind::Switched
        | Kind::Listening => None,
    }
}

fn error_of(settled: Settled) -> Option<c_int> {
    match settled {
        Settled::GoOn => None,
        Settled::WouldBlock => Some(libc::EAGAIN),
        Settled::Reset => Some(libc::ECONNRESET),
    }
}

/// Whether a switched connection was reset, and the program hears it now for the first time.
pub(crate) fn was_reset(fd: RawFd) -> bool {
    let entry = TABLE.of(fd);
    entry.kind() == Kind::Switched
        && sys::borrow(fd).is_some_and(|socket| is_reset(socket, fd, entry))
}

/// Whether addresses mean nothing to a socket: TCP ignores them, a Unix socket refuses them.
pub(crate) fn ignores_addresses(fd: RawFd) -> bool {
    before_io(fd) == Settled::GoOn && TABLE.of(fd).kind() == Kind::Switched && is_ours(fd)
}

/// Shuts down one direction or both; `real` does it with the kernel's socket.
pub(crate) fn shutdown(fd: RawFd, how: c_int, real: impl FnOnce() -> c_int) -> c_int {
    crate::settle::settle(fd);
    if TABLE.of(fd).kind() != Kind::Switched || !is_ours(fd) {
        return real();
    }
    // Who is woken must find that it is no reset.
    if let Some(socket) = sys::borrow(fd) {
        if how == libc::SHUT_RD || how == libc::SHUT_RDWR {
            Direction::Reading.shut(socket, fd);
            ANY_READING_SHUT.store(true, Relaxed);
        }
        if how == libc::SHUT_WR || how == libc::SHUT_RDWR {
            Direction::Writing.shut(socket, fd);
        }
    }
    if is_ringed(fd) {
        return shutdown_ringed(fd, how, real);
    }
    // TCP tells its peer nothing of the end of reading, and still accepts what comes.
    if how == libc::SHUT_RD { 0 } else { real() }
}

/// The kernel wakes who reads, and says that there is nothing to wait for. The gateway hears of the
/// end of writing by the rings: its wake-ups need the socket.
fn shutdown_ringed(fd: RawFd, how: c_int, real: impl FnOnce() -> c_int) -> c_int {
    let ends_reading = how == libc::SHUT_RD || how == libc::SHUT_RDWR;
    let ends_writing = how == libc::SHUT_WR || how == libc::SHUT_RDWR;
    if !ends_reading && !ends_writing {
        return real();
    }
    let (used, socket) = match rings_of(fd) {
        Ok(found) => found,
        // There is nothing left to end.
        Err(_) => return real(),
    };
    if ends_writing {
        used.rings.finish(socket);
    }
    drop(used);
    // What is over is shut down.
    let is_over = is_hung_up(socket);
    if ends_reading && !is_over {
        rustix::net::shutdown(socket, rustix::net::Shutdown::Read).ok();
    }
    0
}

/// Whether any connection was ever shut down for reading, which is rare.
static ANY_READING_SHUT: AtomicBool = AtomicBool::new(false);

/// Whether the program has shut down reading from a switched connection. The kernel does not know,
/// so it does not say that there is nothing to wait for.
pub(crate) fn is_reading_shut(fd: RawFd) -> bool {
    let entry = TABLE.of(fd);
    is_any_reading_shut()
        && entry.kind() == Kind::Switched
        && entry.has(Flag::ReadingShut)
        && is_ours(fd)
}

pub(crate) fn is_any_reading_shut() -> bool {
    ANY_READING_SHUT.load(Relaxed)
}

/// Whether the number still is that of a switched connection.
fn is_ours(fd: RawFd) -> bool {
    let is_ours = sys::borrow(fd).is_some_and(|socket| name::of(socket).is_some());
    if !is_ours {
        TABLE.forget(fd);
    }
    is_ours
}

/// The program is about to close a descriptor.
pub(crate) fn before_close(fd: RawFd) {
    before_end(fd);
    TABLE.forget(fd);
}

/// A descriptor is about to be closed, or replaced. If the program has asked for a reset by
/// SO_LINGER, the gateway hears of that: a Unix socket knows no reset.
pub(crate) fn before_end(fd: RawFd) {
    if TABLE.of(fd).kind() == Kind::Switched
        && !sys::is_sandboxed()
        && TABLE.is_owner()
        && let Some(socket) = sys::borrow(fd)
        && socket_linger(socket) == Ok(Some(std::time::Duration::ZERO))
        && let Some(name) = name::of(socket)
    {
        // Without a gateway it is over anyway.
        drop(ask(Request::Reset { connection: name.connection }, Some(socket)));
    }
}

fn failed(error: c_int) -> ssize_t {
    sys::set_errno(error);
    -1
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd, OwnedFd};

    use rustix::io::Errno;
    use rustix::net::{
        AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
        bind, recv, send, socketpair,
    };
    use smcgate_door::Name;

    use super::*;

    /// A switched connection, and the gateway's end.
    fn switched(connection: u64) -> (OwnedFd, OwnedFd) {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        let address = "127.0.0.1:1".parse().unwrap();
        let connection = u64::from(std::process::id()) << 32 | connection;
        let name = Name { connection, local: address, peer: address, rings: false };
        bind(&ours, &SocketAddrUnix::new_abstract_name(&name.encode()[1..]).unwrap()).unwrap();
        TABLE.set(ours.as_raw_fd(), Kind::Switched);
        (ours, theirs)
    }

    fn outcome<T>(result: Result<T, Errno>, size: impl Fn(T) -> usize) -> ssize_t {
        match result {
            Ok(value) => ssize_t::try_from(size(value)).unwrap(),
            Err(error) => failed(error.raw_os_error()),
        }
    }

    /// What the program sees when it reads ten bytes.
    fn reads(ours: &OwnedFd) -> Result<ssize_t, c_int> {
        let kernel = |flags: c_int| {
            let flags = RecvFlags::from_bits_retain(flags.cast_unsigned());
            outcome(recv(ours, &mut [0; 10][..], flags), |(length, _)| length)
        };
        let result = read(ours.as_raw_fd(), 10, kernel, || panic!("it is switched"));
        if result < 0 { Err(sys::errno()) } else { Ok(result) }
    }

    fn writes(ours: &OwnedFd) -> Result<ssize_t, c_int> {
        let kernel = |flags: c_int| {
            let flags = SendFlags::from_bits_retain(flags.cast_unsigned());
            outcome(send(ours, b"x", flags), |length| length)
        };
        let plain = || panic!("it is switched");
        let result = write(ours.as_raw_fd(), libc::MSG_NOSIGNAL, kernel, plain);
        if result < 0 { Err(sys::errno()) } else { Ok(result) }
    }

    #[test]
    fn a_stream_that_ends_in_order_ends() {
        let (ours, theirs) = switched(1);
        send(&theirs, b"last", SendFlags::empty()).unwrap();
        bind(&theirs, &SocketAddrUnix::new_unnamed()).unwrap();
        rustix::net::shutdown(&theirs, Shutdown::Write).unwrap();
        assert_eq!((reads(&ours), reads(&ours), writes(&ours)), (Ok(4), Ok(0), Ok(1)));
        recv(&theirs, &mut [0][..], RecvFlags::empty()).unwrap();
        drop(theirs);
        assert_eq!((reads(&ours), writes(&ours)), (Ok(0), Err(libc::EPIPE)));
        TABLE.forget(ours.as_raw_fd());
    }

    #[test]
    fn a_reset_is_told_once_by_whichever_comes_first() {
        let (reset, pipe) = (Err(libc::ECONNRESET), Err(libc::EPIPE));
        let (ours, theirs) = switched(2);
        send(&theirs, b"last", SendFlags::empty()).unwrap();
        drop(theirs);
        assert_eq!((reads(&ours), reads(&ours), reads(&ours)), (Ok(4), reset, Ok(0)));
        assert_eq!(writes(&ours), pipe);
        let (ours, theirs) = switched(3);
        drop(theirs);
        assert_eq!((writes(&ours), writes(&ours), reads(&ours)), (reset, pipe, Ok(0)));
        // The kernel knows of this one itself.
        for write_first in [false, true] {
            let (ours, theirs) = switched(4);
            assert_eq!(writes(&ours), Ok(1));
            drop(theirs);
            let first = if write_first { writes(&ours) } else { reads(&ours) };
            assert_eq!((first, reads(&ours), writes(&ours)), (reset, Ok(0), pipe));
            TABLE.forget(ours.as_raw_fd());
        }
    }

    /// The gateway must not notice that its program does not read: TCP says nothing either.
    #[test]
    fn shutting_down_reading_concerns_this_side_only() {
        let (ours, theirs) = switched(5);
        let fd = ours.as_raw_fd();
        assert_eq!(shutdown(fd, libc::SHUT_RD, || panic!("the kernel is not told")), 0);
        assert_eq!(reads(&ours), Ok(0), "it does not wait");
        send(&theirs, b"more", SendFlags::NOSIGNAL).unwrap();
        assert_eq!((reads(&ours), reads(&ours), writes(&ours)), (Ok(4), Ok(0), Ok(1)));
        let both = || {
            rustix::net::shutdown(&ours, Shutdown::Both).unwrap();
            0
        };
        assert_eq!(shutdown(fd, libc::SHUT_RDWR, both), 0);
        assert_eq!((reads(&ours), writes(&ours)), (Ok(0), Err(libc::EPIPE)), "no reset");
        TABLE.forget(fd);
    }

    /// Whoever has the connection by another descriptor, or in another process, remembers nothing.
    #[test]
    fn what_a_copy_has_shut_down_is_no_reset() {
        for hows in [&[libc::SHUT_RDWR][..], &[libc::SHUT_WR, libc::SHUT_RD]] {
            let (ours, theirs) = switched(7);
            let copy = ours.try_clone().unwrap();
            let fd = copy.as_raw_fd();
            TABLE.set(fd, Kind::Switched);
            for &how in hows {
                let direction = if how == libc::SHUT_WR { Shutdown::Write } else { Shutdown::Both };
                shutdown(fd, how, || {
                    rustix::net::shutdown(&copy, direction).unwrap();
                    0
                });
            }
            drop(theirs);
            assert_eq!((reads(&ours), writes(&ours)), (Ok(0), Err(libc::EPIPE)), "{hows:?}");
            TABLE.forget(ours.as_raw_fd());
            TABLE.forget(fd);
        }
    }

    #[test]
    fn a_number_that_is_a_file_by_now_is_read_as_one() {
        let file = std::fs::File::open("/dev/zero").unwrap();
        let fd = file.as_raw_fd();
        TABLE.set(fd, Kind::Switched);
        let kernel = |_| outcome(recv(&file, &mut [0; 10][..], RecvFlags::empty()), |r| r.0);
        assert_eq!(read(fd, 10, kernel, || 10), 10);
        assert_eq!(TABLE.of(fd).kind(), Kind::Other);
        assert_eq!(moving(fd, fd, 1, || 1), 1);
    }

    #[test]
    fn what_the_kernel_moves_ends_in_the_same_way() {
        let (ours, theirs) = switched(6);
        let fd = ours.as_raw_fd();
        assert_eq!(moving(-1, fd, 9, || 9), 9);
        drop(theirs);
        assert_eq!(moving(fd, -1, 9, || 0), -1);
        assert_eq!(sys::errno(), libc::ECONNRESET);
        assert_eq!(moving(fd, -1, 9, || 0), 0, "once");
        assert!(name::of(ours.as_fd()).is_some());
        before_close(fd);
        assert_eq!(TABLE.of(fd).kind(), Kind::Other);
    }
}
