//! A program connects.

use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, RawFd};

use libc::c_int;
use rustix::net::sockopt::{socket_domain, socket_protocol, socket_type};
use rustix::net::{AddressFamily, SocketType, ipproto};
use smcgate_door::Request;

use crate::debug::say;
use crate::door::{Answer, ask};
use crate::recent::RECENT;
use crate::settings::{settings, wants_rings};
use crate::settle::{Settled, conclude, settle};
use crate::switch::Kept;
use crate::table::{Flag, Kind, TABLE};
use crate::{name, sys};

/// Connects `fd`, which `real` does for the kernel's socket. `peer` is where to, if that is an
/// address of IP. The result is that of `connect`.
pub(crate) fn connect(fd: RawFd, peer: Option<SocketAddr>, real: impl FnOnce() -> c_int) -> c_int {
    let (Some(peer), Some(socket)) = (peer, sys::borrow(fd)) else { return real() };
    match TABLE.of(fd).kind() {
        Kind::Pending | Kind::Settling => return connect_again(fd, real),
        Kind::Switched if name::of(socket).is_some() => {
            let is_new = TABLE.take(fd, Flag::ConnectUntold);
            return if is_new { 0 } else { sys::fail(libc::EISCONN) };
        }
        Kind::Switched | Kind::Other | Kind::Fresh | Kind::Listening | Kind::Suspect => {}
    }
    if !is_marked(fd, socket, peer) {
        return real();
    }
    TABLE.raise(fd, Flag::Marked);
    let result = real();
    match (result, if result == 0 { 0 } else { sys::errno() }) {
        (0, _) => connected(fd, socket),
        (_, libc::EINPROGRESS | libc::EINTR) => {
            TABLE.become_kind(fd, Kind::Pending);
            result
        }
        _ => result,
    }
}

/// Has the gateway mark a socket, if it may be marked. Whether the SYN will offer SMC-R.
fn is_marked(fd: RawFd, socket: BorrowedFd<'_>, peer: SocketAddr) -> bool {
    let (entry, now) = (TABLE.of(fd), sys::now());
    let is_chosen = settings().is_some_and(|settings| settings.choice.takes(peer))
        && !RECENT.is_left(peer, now)
        && !entry.has(Flag::Shared)
        && entry.kind() == Kind::Fresh;
    // Once marked, its SYNs carry the offer, until the gateway takes it back.
    if !(is_chosen || entry.has(Flag::Marked)) || !is_tcp(socket) || sends_later(socket) {
        return false;
    }
    match ask(Request::Mark { peer }, Some(socket)) {
        Answer::Marked => true,
        Answer::Leave { seconds } => {
            say(fd, format_args!("{peer} is left alone for {seconds} s"));
            RECENT.leave(peer, now.saturating_add(seconds));
            TABLE.take(fd, Flag::Marked);
            false
        }
        Answer::Absent
        | Answer::Silent
        | Answer::Switch { .. }
        | Answer::Memory(_)
        | Answer::Done => entry.has(Flag::Marked),
    }
}

/// Whether `connect` sends no SYN yet: the first bytes would go with it, before any rendezvous.
fn sends_later(socket: BorrowedFd<'_>) -> bool {
    let mut value = [0; 4];
    let name = libc::TCP_FASTOPEN_CONNECT;
    let length = sys::socket_option(socket, libc::IPPROTO_TCP, name, &mut value);
    length.is_ok() && value != [0; 4]
}

/// The connection is there, and the program has waited for it.
fn connected(fd: RawFd, socket: BorrowedFd<'_>) -> c_int {
    let kept = Kept::of(socket);
    let waits = !kept.is_nonblocking();
    let rings = wants_rings();
    let request = Request::Connected { waits, rings, shortcut: rings };
    match conclude(fd, &kept, ask(request, Some(socket))) {
        Settled::GoOn | Settled::WouldBlock => 0,
        Settled::Reset => sys::fail(libc::ECONNRESET),
    }
}

/// A program asks by a second `connect` what came of the first.
fn connect_again(fd: RawFd, real: impl FnOnce() -> c_int) -> c_int {
    let result = real();
    match (result, if result == 0 { 0 } else { sys::errno() }) {
        (0, _) | (_, libc::EISCONN) => {
            let error = sys::errno();
            settle(fd);
            TABLE.take(fd, Flag::ConnectUntold);
            if TABLE.take(fd, Flag::ResetUntold) {
                return sys::fail(libc::ECONNRESET);
            }
            sys::set_errno(error);
        }
        (_, libc::EALREADY | libc::EINPROGRESS | libc::EINTR) => {}
        _ => TABLE.become_kind(fd, Kind::Fresh),
    }
    result
}

/// Whether this is a TCP socket, and no other kind of socket or file.
pub(crate) fn is_tcp(socket: BorrowedFd<'_>) -> bool {
    let is_ip = |family| matches!(family, AddressFamily::INET | AddressFamily::INET6);
    socket_domain(socket).is_ok_and(is_ip)
        && socket_type(socket) == Ok(SocketType::STREAM)
        && socket_protocol(socket) == Ok(Some(ipproto::TCP))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;

    #[test]
    fn tcp_is_told_from_everything_else() {
        let tcp = TcpListener::bind("[::]:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (unix, _) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(is_tcp(tcp.as_fd()));
        for other in [udp.as_fd(), unix.as_fd(), file.as_fd()] {
            assert!(!is_tcp(other));
        }
    }

    /// No settings, no gateway: nothing happens but what the kernel does.
    #[test]
    fn without_a_gateway_it_is_a_connect() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let fd = near.as_raw_fd();
        let peer = listener.local_addr().ok();
        assert_eq!(connect(fd, peer, || 0), 0);
        assert_eq!(connect(fd, peer, || sys::fail(libc::ECONNREFUSED)), -1);
        assert_eq!(sys::errno(), libc::ECONNREFUSED);
        assert_eq!(TABLE.of(fd).kind(), Kind::Other);
    }

    #[test]
    fn a_second_connect_says_what_came_of_the_first() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (fd, peer) = (near.as_raw_fd(), listener.local_addr().ok());
        TABLE.set(fd, Kind::Pending);
        assert_eq!(connect(fd, peer, || sys::fail(libc::EALREADY)), -1);
        assert_eq!((sys::errno(), TABLE.of(fd).kind()), (libc::EALREADY, Kind::Pending));
        assert_eq!(connect(fd, peer, || sys::fail(libc::ECONNREFUSED)), -1);
        assert_eq!(TABLE.of(fd).kind(), Kind::Fresh);
        TABLE.set(fd, Kind::Pending);
        assert_eq!(connect(fd, peer, || 0), -1, "nobody runs the rendezvous");
        assert_eq!(sys::errno(), libc::ECONNRESET);
        TABLE.forget(fd);
    }
}
