//! How a stream has ended: in order, or by a reset.

use std::os::fd::BorrowedFd;

use libc::c_int;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::table::{Entry, Flag, TABLE};
use crate::{name, sys};

/// What is known of a stream over which nothing comes, or nothing goes, any more.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    /// The gateway's end has a name: the gateway has ended the stream in order.
    pub(crate) is_named: bool,
    /// Nobody has the gateway's end any more, or both directions were shut down.
    pub(crate) is_hung_up: bool,
    /// The program has shut down both directions.
    pub(crate) is_shut: bool,
    /// The program knows of a reset.
    pub(crate) is_told: bool,
}

impl Seen {
    /// Whether this is a reset that the program does not know of. A gateway that dies resets its
    /// connections, too.
    pub(crate) fn is_news(self) -> bool {
        self.is_hung_up && !self.is_named && !self.is_shut && !self.is_told
    }
}

/// What the program may shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Reading,
    Writing,
}

impl Direction {
    const ALL: [Self; 2] = [Self::Reading, Self::Writing];

    /// Notes that the program shuts it down: in our memory, and in the socket for those who have it
    /// by another descriptor (`dup`), or in another process (`fork`, `exec`).
    pub(crate) fn shut(self, socket: BorrowedFd<'_>, fd: i32) {
        TABLE.raise(fd, self.flag());
        if !sys::is_sandboxed() {
            let value = 1_i32.to_ne_bytes();
            // Without it only they would take the end for a reset.
            sys::set_socket_option(socket, libc::SOL_SOCKET, self.mark(), &value).ok();
        }
    }

    fn is_shut(self, socket: BorrowedFd<'_>, entry: Entry) -> bool {
        let is_marked = || {
            let mut value = [0; 4];
            let length = sys::socket_option(socket, libc::SOL_SOCKET, self.mark(), &mut value);
            length.is_ok() && value != [0; 4]
        };
        entry.has(self.flag()) || (!sys::is_sandboxed() && is_marked())
    }

    fn flag(self) -> Flag {
        match self {
            Self::Reading => Flag::ReadingShut,
            Self::Writing => Flag::WritingShut,
        }
    }

    /// An option that a Unix socket keeps, and that means nothing to it nor to TCP.
    const fn mark(self) -> c_int {
        match self {
            Self::Reading => libc::SO_BROADCAST,
            Self::Writing => libc::SO_NO_CHECK,
        }
    }
}

/// Where the program's own value of an option is, if the one in the socket is ours.
pub(crate) fn instead_of(level: c_int, option: c_int) -> Option<Flag> {
    const READING: c_int = Direction::Reading.mark();
    const WRITING: c_int = Direction::Writing.mark();
    match (level, option) {
        (libc::SOL_SOCKET, READING) => Some(Flag::Broadcast),
        (libc::SOL_SOCKET, WRITING) => Some(Flag::NoCheck),
        _ => None,
    }
}

/// Whether the connection at this number was reset, and the program hears it now for the first
/// time. It does not hear it again: `ECONNRESET` comes once.
pub(crate) fn is_reset(socket: BorrowedFd<'_>, fd: i32, entry: Entry) -> bool {
    if name::of(socket).is_none() {
        TABLE.forget(fd);
        return false;
    }
    let seen = Seen {
        is_named: name::is_peer_named(socket),
        is_hung_up: is_hung_up(socket),
        is_shut: Direction::ALL.iter().all(|direction| direction.is_shut(socket, entry)),
        is_told: entry.has(Flag::ResetTold),
    };
    if seen.is_news() {
        told(socket, fd);
        return true;
    }
    false
}

/// The program has been told of a reset.
pub(crate) fn told(socket: BorrowedFd<'_>, fd: i32) {
    TABLE.raise(fd, Flag::ResetTold);
    // What the kernel knows of it would be heard as a second one.
    rustix::net::sockopt::socket_error(socket).ok();
}

/// Whether the far end is gone.
pub(crate) fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    events(socket).contains(PollFlags::HUP)
}

/// How far a stream has come to its end, as TCP says it in `struct tcp_info`.
pub(crate) fn state(socket: BorrowedFd<'_>, entry: Entry) -> u8 {
    let events = events(socket);
    // The kernel knows of the end of reading by the program itself where bytes go by rings.
    let is_our_own = entry.has(Flag::Ringed) && entry.has(Flag::ReadingShut);
    let has_ended = events.contains(PollFlags::RDHUP) && !is_our_own;
    match (has_ended, Direction::Writing.is_shut(socket, entry)) {
        _ if events.contains(PollFlags::HUP) => CLOSE,
        (false, false) => ESTABLISHED,
        (false, true) => FIN_WAIT2,
        (true, false) => CLOSE_WAIT,
        (true, true) => CLOSE,
    }
}

const ESTABLISHED: u8 = 1;
const FIN_WAIT2: u8 = 5;
pub(crate) const CLOSE: u8 = 7;
const CLOSE_WAIT: u8 = 8;

/// What the kernel says of the ends of a stream.
fn events(socket: BorrowedFd<'_>) -> PollFlags {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut fds, Some(&now)) {
        Ok(_) => fds[0].revents(),
        Err(_) => PollFlags::empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ended_without_a_name_was_reset() {
        let gone = Seen { is_hung_up: true, ..Seen::default() };
        assert!(gone.is_news());
        assert!(!Seen { is_named: true, ..gone }.is_news(), "in order");
        assert!(!Seen { is_told: true, ..gone }.is_news(), "once");
        assert!(!Seen { is_shut: true, ..gone }.is_news(), "by ourselves");
        assert!(!Seen { is_hung_up: false, ..gone }.is_news(), "the peer goes on reading");
    }
}
