//! Options by which a program has made its TCP socket behave in a way that would disturb whoever
//! uses it in between.

use std::os::fd::BorrowedFd;

use libc::c_int;

use crate::option;

/// What such options were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options([Option<c_int>; QUIET.len()]);

impl Options {
    /// Sets them to what disturbs nobody; returns what they were. Options that a socket does not
    /// have are left out.
    pub fn take(socket: BorrowedFd<'_>) -> Self {
        Self(QUIET.map(|(level, name, quiet)| {
            let before = option::get(socket, level, name).ok().filter(|it| *it != quiet)?;
            option::set(socket, level, name, quiet).is_ok().then_some(before)
        }))
    }

    /// Sets them to what they were.
    pub fn restore(self, socket: BorrowedFd<'_>) {
        for ((level, name, _), before) in QUIET.into_iter().zip(self.0) {
            if let Some(before) = before {
                // What the program could set can be set again.
                let _ = option::set(socket, level, name, before);
            }
        }
    }
}

/// Level, name, and the value that disturbs nobody.
const QUIET: [(c_int, c_int, c_int); 7] = [
    // Bytes that have come would not be reported until there are so many.
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1),
    // Messages would wait for more.
    (libc::IPPROTO_TCP, libc::TCP_CORK, 0),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1),
    // Their reports would look like a failure of the connection.
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPING, 0),
    (libc::IPPROTO_IP, libc::IP_RECVERR, 0),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 0),
    // Each read would spin.
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL, 0),
];

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_socket_is_quiet_in_between() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = tcp.as_fd();
        let value = |(level, name, _)| option::get(socket, level, name).ok();
        let set = [
            (libc::SOL_SOCKET, libc::SO_RCVLOWAT, 100),
            (libc::IPPROTO_TCP, libc::TCP_CORK, 1),
            (libc::SOL_SOCKET, libc::SO_TIMESTAMPING, TX_SOFTWARE),
            (libc::IPPROTO_IP, libc::IP_RECVERR, 1),
        ];
        for (level, name, wanted) in set {
            option::set(socket, level, name, wanted).unwrap();
        }
        let before = QUIET.map(value);
        let options = Options::take(socket);
        for one in QUIET {
            assert!(value(one).is_none_or(|it| it == one.2), "{one:?}");
        }
        options.restore(socket);
        assert_eq!(QUIET.map(value), before);
        assert!(set.iter().all(|one| value(*one) == Some(one.2)));
    }

    /// SOF_TIMESTAMPING_TX_SOFTWARE
    const TX_SOFTWARE: c_int = 2;
}
