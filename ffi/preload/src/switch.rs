//! A Unix socket takes the place of a TCP socket.

use std::os::fd::{AsFd, BorrowedFd, RawFd};

use libc::c_int;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::sockopt::socket_cookie;
use smcgate_rings::Application;

use crate::epoll::REGISTRATIONS;
use crate::sys::{self, Own};
use crate::table::{DESCRIPTORS_MAX, Flag, Kind, TABLE};
use crate::{name, options, ringed};

/// What a program has set on a TCP socket, and finds on what takes its place.
///
/// It is read before the gateway gets the socket: the gateway may change it for its own use.
pub(crate) struct Kept {
    status: OFlags,
    is_closed_on_exec: bool,
    /// Options that every kind of socket has, as far as they can be read.
    general: [Option<[u8; VALUE_MAX]>; GENERAL.len()],
    /// The sizes of the buffers, if the program has set them.
    buffers: [Option<c_int>; 2],
    tcp: u64,
    /// Which socket it is.
    cookie: Option<u64>,
}

impl Kept {
    pub(crate) fn of(socket: BorrowedFd<'_>) -> Self {
        let read = |(name, length): (c_int, usize)| {
            let mut value = [0; VALUE_MAX];
            let found =
                sys::socket_option(socket, libc::SOL_SOCKET, name, value.get_mut(..length)?);
            (found == Ok(length)).then_some(value)
        };
        let number = |name| read((name, 4)).and_then(|value| value.first_chunk().copied());
        let number = |name| number(name).map_or(0, c_int::from_ne_bytes);
        let locks = number(SO_BUF_LOCK);
        let buffer = |bit, name| (locks & bit != 0).then(|| number(name) / 2);
        Self {
            status: fcntl_getfl(socket).unwrap_or(OFlags::empty()),
            is_closed_on_exec: fcntl_getfd(socket).is_ok_and(|f| f.contains(FdFlags::CLOEXEC)),
            general: GENERAL.map(read),
            buffers: [buffer(1, libc::SO_SNDBUF), buffer(2, libc::SO_RCVBUF)],
            tcp: options::of_socket(socket),
            cookie: socket_cookie(socket).ok(),
        }
    }

    /// Whether this is the socket still. While the gateway was asked, another thread may have
    /// closed the number, and it may be something else by now.
    pub(crate) fn is_of(&self, socket: BorrowedFd<'_>) -> bool {
        self.cookie.is_some() && socket_cookie(socket).ok() == self.cookie
    }

    pub(crate) fn is_nonblocking(&self) -> bool {
        self.status.contains(OFlags::NONBLOCK)
    }

    /// The gateway has had the socket, and the program keeps it: it blocks, or not, as before.
    pub(crate) fn restore(&self, socket: BorrowedFd<'_>) {
        if fcntl_getfl(socket).is_ok_and(|now| now != self.status) {
            // It is our own socket, and the flags are those that it had.
            fcntl_setfl(socket, self.status).ok();
        }
    }

    /// Gives `socket` what the other one had. It works without, so errors are passed over.
    fn give_to(&self, socket: BorrowedFd<'_>, has_buffers: bool) {
        let set = |name, value: &[u8]| {
            sys::set_socket_option(socket, libc::SOL_SOCKET, name, value).ok();
        };
        if self.is_nonblocking() {
            fcntl_setfl(socket, OFlags::NONBLOCK).ok();
        }
        for ((name, length), value) in GENERAL.into_iter().zip(self.general) {
            let value = value.as_ref().and_then(|value| value.get(..length));
            if let Some(value) = value.filter(|value| value.iter().any(|byte| *byte != 0)) {
                set(name, value);
            }
        }
        // The gateway has sized those of a socket whose bytes go by rings.
        if !has_buffers {
            return;
        }
        for (name, size) in [libc::SO_SNDBUF, libc::SO_RCVBUF].into_iter().zip(self.buffers) {
            if let Some(size) = size {
                set(name, &size.to_ne_bytes());
            }
        }
    }
}

/// Puts `unix` at the number `fd`, where a TCP socket was.
///
/// # Errors
///
/// The kernel has refused, and the TCP socket is still there.
pub(crate) fn switch(
    fd: RawFd,
    kept: &Kept,
    unix: Own,
    memory: Option<Own>,
) -> rustix::io::Result<()> {
    let Some(socket) = sys::borrow(fd) else { return Err(rustix::io::Errno::BADF) };
    let has_rings = memory.is_some();
    // If this process has no room for it now, it is asked for again when it is needed.
    let rings = memory.map(|memory| Application::map(memory.as_fd()));
    kept.give_to(unix.as_fd(), !has_rings);
    let lifted = REGISTRATIONS.lift(fd, socket, was_awaited(fd));
    TABLE.set_options(fd, kept.tcp);
    sys::put_at(unix.as_fd(), fd, kept.is_closed_on_exec)?;
    let is_shared = TABLE.of(fd).has(Flag::Shared);
    TABLE.set(fd, Kind::Switched);
    if let Some(rings) = rings {
        set_ringed(fd, kept, unix.as_fd(), rings.ok());
    }
    lifted.put_back(fd, socket);
    if is_shared {
        twins(kept).for_each(|twin| switch_twin(twin, fd, kept, unix.as_fd()));
    }
    Ok(())
}

/// The other numbers of a TCP socket that was being connected when it was copied.
fn twins(kept: &Kept) -> impl Iterator<Item = RawFd> {
    (0..).take(DESCRIPTORS_MAX).filter(|&fd| {
        TABLE.of(fd).kind() == Kind::Pending && sys::borrow(fd).is_some_and(|it| kept.is_of(it))
    })
}

/// Notes that the bytes of this connection go by these rings.
fn set_ringed(fd: RawFd, kept: &Kept, unix: BorrowedFd<'_>, rings: Option<Application>) {
    let connection = name::of(unix).map_or(0, |name| name.connection);
    TABLE.set_ringed(fd, rings, connection);
    let size = |size: Option<c_int>| u64::from(size.map_or(0, c_int::cast_unsigned));
    TABLE.set_buffers(fd, size(kept.buffers[0]) << 32 | size(kept.buffers[1]));
    ringed::note_low_water(fd);
}

fn switch_twin(fd: RawFd, first: RawFd, kept: &Kept, unix: BorrowedFd<'_>) {
    let Some(socket) = sys::borrow(fd) else { return };
    let is_closed_on_exec = fcntl_getfd(socket).is_ok_and(|f| f.contains(FdFlags::CLOEXEC));
    let lifted = REGISTRATIONS.lift(fd, socket, was_awaited(fd));
    TABLE.set_options(fd, kept.tcp);
    if sys::put_at(unix, fd, is_closed_on_exec).is_ok() {
        TABLE.copy(first, fd);
        lifted.put_back(fd, socket);
    }
}

/// Whether the program may have waited for this connection by epoll: it was not held up by
/// `connect`. What it accepts, nobody waits for yet.
fn was_awaited(fd: RawFd) -> bool {
    matches!(TABLE.of(fd).kind(), Kind::Pending | Kind::Settling)
}

/// The longest of these options, a time.
const VALUE_MAX: usize = 16;

/// Names and lengths.
const GENERAL: [(c_int, usize); 8] = [
    (libc::SO_RCVTIMEO, 16),
    (libc::SO_SNDTIMEO, 16),
    (libc::SO_LINGER, 8),
    (libc::SO_KEEPALIVE, 4),
    (libc::SO_OOBINLINE, 4),
    (libc::SO_RCVLOWAT, 4),
    (libc::SO_PRIORITY, 4),
    // It says nothing to a Unix socket, but the program may ask for it. (So it may for the device,
    // which may be one of another network namespace than that of the Unix socket.)
    (libc::SO_MARK, 4),
];

/// Which buffers the program has set: 1 for sending, 2 for receiving (`asm-generic/socket.h`).
const SO_BUF_LOCK: c_int = 72;

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};

    use super::*;

    #[test]
    fn the_new_socket_is_as_the_program_has_set_the_old_one() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        tcp.set_nonblocking(true).unwrap();
        tcp.set_read_timeout(Some(Duration::from_secs(7))).unwrap();
        sockopt::set_socket_linger(&tcp, Some(Duration::ZERO)).unwrap();
        sockopt::set_socket_keepalive(&tcp, true).unwrap();
        sockopt::set_socket_send_buffer_size(&tcp, 50_000).unwrap();
        let priority = (libc::SOL_SOCKET, libc::SO_PRIORITY);
        let value = 5_i32.to_ne_bytes();
        sys::set_socket_option(tcp.as_fd(), priority.0, priority.1, &value).unwrap();
        let kept = Kept::of(tcp.as_fd());
        tcp.set_nonblocking(false).unwrap();
        let (unix, _far) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        let fd = tcp.as_raw_fd();
        switch(fd, &kept, Own::new(unix), None).unwrap();
        assert_eq!(TABLE.of(fd).kind(), Kind::Switched);
        assert_eq!(sockopt::socket_domain(&tcp).unwrap(), AddressFamily::UNIX);
        assert!(fcntl_getfl(&tcp).unwrap().contains(OFlags::NONBLOCK));
        assert!(fcntl_getfd(&tcp).unwrap().contains(FdFlags::CLOEXEC), "std sets it");
        assert_eq!(tcp.read_timeout().unwrap(), Some(Duration::from_secs(7)));
        assert_eq!(sockopt::socket_linger(&tcp).unwrap(), Some(Duration::ZERO));
        assert!(sockopt::socket_keepalive(&tcp).unwrap());
        assert_eq!(sockopt::socket_send_buffer_size(&tcp).unwrap(), 100_000, "doubled once");
        let mut found = [0; 4];
        sys::socket_option(tcp.as_fd(), priority.0, priority.1, &mut found).unwrap();
        assert_eq!(found, value);
        TABLE.forget(fd);
    }

    #[test]
    fn all_numbers_of_a_socket_are_switched_and_no_other() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (tcp, other) = (connect(), connect());
        let copy = tcp.try_clone().unwrap();
        for socket in [&tcp, &copy, &other] {
            TABLE.set(socket.as_raw_fd(), Kind::Pending);
        }
        TABLE.raise(tcp.as_raw_fd(), Flag::Shared);
        let kept = Kept::of(tcp.as_fd());
        assert!(kept.is_of(copy.as_fd()) && !kept.is_of(other.as_fd()));
        let (unix, _far) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        switch(tcp.as_raw_fd(), &kept, Own::new(unix), None).unwrap();
        let domain = |socket: &TcpStream| sockopt::socket_domain(socket).unwrap();
        assert_eq!([&tcp, &copy].map(domain), [AddressFamily::UNIX; 2]);
        assert_eq!(domain(&other), AddressFamily::INET);
        for socket in [&tcp, &copy, &other] {
            TABLE.forget(socket.as_raw_fd());
        }
    }

    #[test]
    fn a_socket_that_comes_back_blocks_as_before() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let kept = Kept::of(listener.as_fd());
        listener.set_nonblocking(true).unwrap();
        kept.restore(listener.as_fd());
        assert!(!fcntl_getfl(&listener).unwrap().contains(OFlags::NONBLOCK));
    }
}
