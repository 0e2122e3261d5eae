//! A program listens and accepts.

use std::os::fd::{BorrowedFd, RawFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::net::{RecvFlags, connect_unspec, getsockname, recv};
use smcgate_door::Request;

use crate::connect::is_tcp;
use crate::debug::say;
use crate::door::{Answer, ask};
use crate::settings::{settings, wants_rings};
use crate::settle::{Settled, conclude};
use crate::switch::Kept;
use crate::syn::{self, EYE_CATCHER};
use crate::sys;
use crate::table::{Flag, Kind, TABLE};

/// A program is about to listen on this socket.
pub(crate) fn listen(fd: RawFd) {
    let Some(socket) = sys::borrow(fd) else { return };
    if !TABLE.covers(fd) || !is_tcp(socket) || !is_chosen(socket) {
        return;
    }
    TABLE.set(fd, Kind::Listening);
    tell(fd, socket);
}

/// Whether a listening socket with this address is one of those that are taken.
pub(crate) fn is_chosen(listener: BorrowedFd<'_>) -> bool {
    let local = getsockname(listener).ok().and_then(|local| local.try_into().ok());
    let takes = |local| settings().is_some_and(|settings| settings.choice.takes_listener(local));
    local.is_some_and(takes)
}

/// A program is about to accept from this socket. A gateway that has been restarted does not know
/// that it listens.
pub(crate) fn before_accept(fd: RawFd) {
    if TABLE.of(fd).kind() == Kind::Listening
        && TABLE.is_due(fd, sys::now())
        && let Some(socket) = sys::borrow(fd)
    {
        tell(fd, socket);
    }
}

/// Tells the gateway that this socket listens.
fn tell(fd: RawFd, socket: BorrowedFd<'_>) {
    let pause = match ask(Request::Listen, Some(socket)) {
        Answer::Marked => AGAIN_S,
        Answer::Leave { seconds } => seconds.max(1),
        Answer::Absent
        | Answer::Silent
        | Answer::Switch { .. }
        | Answer::Memory(_)
        | Answer::Done => {
            say(fd, format_args!("it listens, and there is no gateway"));
            MISSED_S
        }
    };
    TABLE.set_due(fd, sys::now().saturating_add(pause));
}

/// How often a gateway is told.
const AGAIN_S: u32 = 5;
/// How often it is looked for.
const MISSED_S: u32 = 1;

/// What to do with a connection that was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Welcome {
    /// It is the program's.
    Keep,
    /// Close it, and accept the next one.
    Refuse,
}

/// Looks at a connection that was accepted from `listener`.
pub(crate) fn welcome(listener: RawFd, fd: RawFd) -> Welcome {
    TABLE.forget(fd);
    if TABLE.of(listener).kind() != Kind::Listening {
        return Welcome::Keep;
    }
    let Some(socket) = sys::borrow(fd) else { return Welcome::Keep };
    let mut packet = [0; PACKET_MAX];
    let length = sys::socket_option(socket, libc::IPPROTO_TCP, libc::TCP_SAVED_SYN, &mut packet);
    let packet = length.ok().and_then(|length| packet.get(..length)).unwrap_or_default();
    if !syn::offers_smc(packet) {
        return Welcome::Keep;
    }
    let kept = Kept::of(socket);
    let rings = wants_rings();
    let answer = ask(Request::Accepted { rings, shortcut: rings }, Some(socket));
    match answer {
        Answer::Switch { .. } => match conclude(fd, &kept, answer) {
            Settled::GoOn | Settled::WouldBlock => Welcome::Keep,
            Settled::Reset => {
                TABLE.forget(fd);
                Welcome::Refuse
            }
        },
        // The gateway has it, and will do nothing with it.
        Answer::Silent | Answer::Marked | Answer::Memory(_) | Answer::Done => refuse(fd, socket),
        Answer::Leave { .. } | Answer::Absent => {
            kept.restore(socket);
            TABLE.set_due(listener, 0);
            TABLE.set(fd, Kind::Suspect);
            match examine(fd, socket) {
                Begins::WithRendezvous => refuse(fd, socket),
                Begins::WithBytes | Begins::NotYet => Welcome::Keep,
            }
        }
    }
}

fn refuse(fd: RawFd, socket: BorrowedFd<'_>) -> Welcome {
    say(fd, format_args!("the gateway is gone: reset"));
    connect_unspec(socket).ok();
    TABLE.forget(fd);
    Welcome::Refuse
}

/// How a connection begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begins {
    WithRendezvous,
    WithBytes,
    NotYet,
}

/// Looks how a connection begins whose client has offered SMC-R, while the gateway is gone, or is
/// another one than when the client came. Whether its offer was answered, nobody knows here. If it
/// was, the client begins with a rendezvous, and what follows is no stream of the application.
fn examine(fd: RawFd, socket: BorrowedFd<'_>) -> Begins {
    let mut first = [0; EYE_CATCHER.len()];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    match recv(socket, &mut first[..], flags) {
        // A proposal comes as a whole.
        Ok(_) if first == EYE_CATCHER => Begins::WithRendezvous,
        Err(Errno::AGAIN) => Begins::NotYet,
        Ok(_) | Err(_) => {
            TABLE.forget(fd);
            Begins::WithBytes
        }
    }
}

/// The program is about to read from a connection of which it is not known how it begins. Waits for
/// that as the program would.
pub(crate) fn before_read(fd: RawFd) -> Settled {
    loop {
        let Some(socket) = sys::borrow(fd) else { return Settled::GoOn };
        match examine(fd, socket) {
            Begins::WithBytes => return Settled::GoOn,
            Begins::WithRendezvous => {
                refuse(fd, socket);
                return Settled::Reset;
            }
            Begins::NotYet => {}
        }
        if fcntl_getfl(socket).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)) {
            return Settled::WouldBlock;
        }
        // Its time-out for reading is passed over: a client speaks soon.
        let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
        poll(&mut fds, None).ok();
    }
}

/// Two headers of at most 60 bytes each, and room for IPv6 extension headers.
const PACKET_MAX: usize = 512;

/// A descriptor has another one now.
pub(crate) fn copied(from: RawFd, to: RawFd) {
    // A child of `vfork` has numbers of its own, and its parent's memory.
    if !TABLE.is_owner() {
        return;
    }
    // Two numbers of a socket that is not connected yet: one of them would not be switched.
    match TABLE.of(from).kind() {
        Kind::Fresh | Kind::Pending | Kind::Settling => TABLE.raise(from, Flag::Shared),
        Kind::Other | Kind::Switched | Kind::Listening | Kind::Suspect => {}
    }
    TABLE.copy(from, to);
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;

    fn accepted() -> (TcpListener, TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let near = listener.accept().unwrap().0;
        (listener, near, far)
    }

    #[test]
    fn a_plain_client_is_welcome() {
        let (listener, near, _far) = accepted();
        TABLE.set(listener.as_raw_fd(), Kind::Listening);
        assert_eq!(welcome(listener.as_raw_fd(), near.as_raw_fd()), Welcome::Keep);
        TABLE.forget(listener.as_raw_fd());
        assert_eq!(welcome(listener.as_raw_fd(), near.as_raw_fd()), Welcome::Keep);
    }

    /// After a gateway was killed, clients go on to offer SMC-R. Only if their offer was answered
    /// before may they be refused.
    #[test]
    fn without_a_gateway_only_a_rendezvous_is_refused() {
        for (bytes, outcome) in [
            (&b"GET / HTTP/1.1\r\n"[..], Settled::GoOn),
            (b"\xe2", Settled::GoOn),
            (b"\xe2\xd4\xc3\xd9\x01", Settled::Reset),
        ] {
            let (_listener, near, mut far) = accepted();
            let fd = near.as_raw_fd();
            TABLE.set(fd, Kind::Suspect);
            near.set_nonblocking(true).unwrap();
            assert_eq!(before_read(fd), Settled::WouldBlock);
            assert_eq!(TABLE.of(fd).kind(), Kind::Suspect);
            near.set_nonblocking(false).unwrap();
            far.write_all(bytes).unwrap();
            assert_eq!(before_read(fd), outcome, "{bytes:?}");
            assert_eq!(TABLE.of(fd).kind(), Kind::Other);
        }
    }

    #[test]
    fn a_socket_with_two_numbers_is_not_marked() {
        let (from, to) = (60_001, 60_002);
        TABLE.set(from, Kind::Fresh);
        copied(from, to);
        assert!(TABLE.of(from).has(Flag::Shared) && TABLE.of(to).has(Flag::Shared));
        TABLE.set(from, Kind::Switched);
        copied(from, to);
        assert_eq!((TABLE.of(to).kind(), TABLE.of(to).has(Flag::Shared)), (Kind::Switched, false));
    }
}
