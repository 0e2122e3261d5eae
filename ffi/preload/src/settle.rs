//! A connection that a program did not wait for: what becomes of it is asked when it is there, at
//! the first use of it.

use std::os::fd::{AsFd as _, BorrowedFd, RawFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::net::{connect_unspec, getpeername};
use smcgate_door::Request;

use crate::debug::say;
use crate::door::{Answer, ask};
use crate::recent::RECENT;
use crate::settings::wants_rings;
use crate::switch::{Kept, switch};
use crate::sys;
use crate::table::{Flag, Kind, TABLE};

/// What a program that reads or writes may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// Go on with what is at the number now.
    GoOn,
    /// The connection is not there yet, and the program does not wait.
    WouldBlock,
    /// The connection was reset.
    Reset,
}

/// Finds out what becomes of the connection at this number, if that can be found out now. Waits for
/// nobody but the gateway.
pub(crate) fn settle(fd: RawFd) {
    match TABLE.of(fd).kind() {
        Kind::Pending => {}
        Kind::Settling => return wait_for_other_thread(fd),
        Kind::Other | Kind::Fresh | Kind::Switched | Kind::Listening | Kind::Suspect => return,
    }
    let Some(socket) = sys::borrow(fd) else { return };
    match getpeername(socket) {
        Ok(_) if TABLE.begin_settling(fd) => run(fd, socket),
        Ok(_) => wait_for_other_thread(fd),
        Err(Errno::NOTCONN) => {}
        // It is no socket any more.
        Err(_) => TABLE.forget(fd),
    }
}

/// The same before something is read or written: not a byte may pass until it is known.
pub(crate) fn before_io(fd: RawFd) -> Settled {
    loop {
        settle(fd);
        match TABLE.of(fd).kind() {
            Kind::Pending => {}
            Kind::Settling => return Settled::WouldBlock,
            Kind::Other | Kind::Fresh | Kind::Switched | Kind::Listening | Kind::Suspect => {
                let is_reset = TABLE.take(fd, Flag::ResetUntold);
                return if is_reset { Settled::Reset } else { Settled::GoOn };
            }
        }
        let Some(socket) = sys::borrow(fd) else { return Settled::GoOn };
        let waits = fcntl_getfl(socket).is_ok_and(|flags| !flags.contains(OFlags::NONBLOCK));
        let state = state(socket, waits);
        if state.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
            // There will be no connection, and the kernel says why.
            return Settled::GoOn;
        }
        if !state.contains(PollFlags::OUT) && !waits {
            return Settled::WouldBlock;
        }
    }
}

/// Whether a connection is there, or has failed.
fn state(socket: BorrowedFd<'_>, waits: bool) -> PollFlags {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    // After a signal the caller looks again.
    poll(&mut fds, if waits { None } else { Some(&at_once) }).ok();
    fds[0].revents()
}

/// Asks about a connection that is there.
fn run(fd: RawFd, socket: BorrowedFd<'_>) {
    let kept = Kept::of(socket);
    let rings = wants_rings();
    let request = Request::Connected { waits: false, rings, shortcut: rings };
    let answer = ask(request, Some(socket));
    if conclude(fd, &kept, answer) == Settled::Reset {
        TABLE.raise(fd, Flag::ResetUntold);
    } else if TABLE.of(fd).kind() == Kind::Switched {
        TABLE.raise(fd, Flag::ConnectUntold);
    }
}

/// Does what the gateway says about a connection that was offered to the peer.
pub(crate) fn conclude(fd: RawFd, kept: &Kept, answer: Answer) -> Settled {
    let Some(socket) = sys::borrow(fd).filter(|socket| kept.is_of(*socket)) else {
        // Whatever has the number now is none of our business.
        TABLE.forget(fd);
        return Settled::GoOn;
    };
    match answer {
        Answer::Switch { unix, memory } => match switch(fd, kept, unix, memory) {
            Ok(()) => {
                say(fd, format_args!("the connection goes through the gateway"));
                return Settled::GoOn;
            }
            Err(error) => say(fd, format_args!("cannot be switched: {error}")),
        },
        Answer::Leave { seconds } => {
            let peer = getpeername(socket).ok().flatten().and_then(|peer| peer.try_into().ok());
            if let Some(peer) = peer {
                RECENT.leave(peer, sys::now().saturating_add(seconds));
            }
            kept.restore(socket);
            TABLE.set(fd, Kind::Other);
            say(fd, format_args!("the connection stays TCP"));
            return Settled::GoOn;
        }
        Answer::Absent | Answer::Silent | Answer::Marked | Answer::Memory(_) | Answer::Done => {
            say(fd, format_args!("the gateway is gone: reset"));
        }
    }
    // A peer that was offered SMC-R may wait for a rendezvous, and would take the program's bytes
    // for it.
    kept.restore(socket);
    connect_unspec(socket.as_fd()).ok();
    TABLE.become_kind(fd, Kind::Fresh);
    Settled::Reset
}

/// Another thread asks. If a signal has interrupted the very thread that asks, it never ends.
fn wait_for_other_thread(fd: RawFd) {
    for _ in 0..OTHER_THREAD_MS {
        if TABLE.of(fd).kind() != Kind::Settling {
            return;
        }
        sys::pause();
    }
}

/// As long as the gateway may take to answer.
const OTHER_THREAD_MS: u32 = 5_000;

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, socketpair};

    use super::*;

    fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    /// Without a gateway, a peer that may wait for a rendezvous must see a reset.
    #[test]
    fn a_connection_whose_gateway_is_gone_is_reset() {
        use std::io::Read as _;
        let (near, mut far) = connected();
        let fd = near.as_raw_fd();
        TABLE.set(fd, Kind::Pending);
        settle(fd);
        assert_eq!(TABLE.of(fd).kind(), Kind::Fresh);
        assert_eq!(before_io(fd), Settled::Reset, "the program hears of it");
        assert_eq!(before_io(fd), Settled::GoOn, "once");
        let error = far.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        TABLE.forget(fd);
    }

    #[test]
    fn what_the_gateway_says_is_done() {
        let (near, _far) = connected();
        let fd = near.as_raw_fd();
        let kept = Kept::of(near.as_fd());
        near.set_nonblocking(true).unwrap();
        assert_eq!(conclude(fd, &kept, Answer::Leave { seconds: 1 }), Settled::GoOn);
        assert!(!fcntl_getfl(&near).unwrap().contains(OFlags::NONBLOCK), "as it was");
        assert_eq!(TABLE.of(fd).kind(), Kind::Other);
        let (unix, _) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        let unix = sys::Own::new(unix);
        let answer = Answer::Switch { unix, memory: None };
        assert_eq!(conclude(fd, &kept, answer), Settled::GoOn);
        assert_eq!(TABLE.of(fd).kind(), Kind::Switched);
        TABLE.forget(fd);
    }

    /// While the gateway is asked, another thread may close the socket and open something else,
    /// which must not be replaced.
    #[test]
    fn what_has_the_number_by_now_stays() {
        let (near, _far) = connected();
        let fd = near.as_raw_fd();
        let kept = Kept::of(near.as_fd());
        let file = std::fs::File::open("/dev/null").unwrap();
        sys::put_at(file.as_fd(), fd, true).unwrap();
        for is_reset in [false, true] {
            let (unix, _) =
                socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                    .unwrap();
            let unix = sys::Own::new(unix);
            let switch = Answer::Switch { unix, memory: None };
            let answer = if is_reset { Answer::Silent } else { switch };
            assert_eq!(conclude(fd, &kept, answer), Settled::GoOn);
            let is_socket = rustix::net::sockopt::socket_type(&near).is_ok();
            assert!(!is_socket && TABLE.of(fd).kind() == Kind::Other, "{is_reset}");
        }
    }

    /// A byte that is written before it is known would go to the peer as a message of the
    /// rendezvous.
    #[test]
    fn nothing_is_written_before_the_connection_is_there() {
        let tcp = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::NONBLOCK, None)
            .unwrap();
        let fd = tcp.as_raw_fd();
        let listener = full_listener();
        let error = connect(&tcp, &listener.0.local_addr().unwrap()).unwrap_err();
        assert_eq!(error, Errno::INPROGRESS);
        TABLE.set(fd, Kind::Pending);
        assert_eq!(before_io(fd), Settled::WouldBlock);
        TABLE.forget(fd);
    }

    /// A listener whose queue is full, so that nobody else gets an answer.
    fn full_listener() -> (TcpListener, Vec<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap();
        let limit = std::time::Duration::from_millis(100);
        let connect = || TcpStream::connect_timeout(&address, limit).ok();
        let waiting = std::iter::from_fn(connect).take(8).collect();
        (listener, waiting)
    }

    #[test]
    fn a_number_that_is_something_else_by_now_is_forgotten() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let fd = file.as_raw_fd();
        TABLE.set(fd, Kind::Pending);
        assert_eq!(before_io(fd), Settled::GoOn);
        assert_eq!(TABLE.of(fd).kind(), Kind::Other);
    }
}
