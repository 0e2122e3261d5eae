//! Urgent bytes: TCP's out-of-band byte on one side, P and U on the other (RFC 4.7.5, 4.7.6).
//!
//! Our sockets bring urgent bytes in line, so that none is ever lost; a read stops before one, and
//! from there a read of one byte brings it alone. A later urgent byte takes the mark away from one
//! that was not read yet, as between two kernels: the earlier is then an ordinary byte.

use super::socket::Socket;
use crate::streams::{Ahead, Streams};

/// What the next read of `socket` would begin with; none if it would bring nothing.
///
/// The kernel is asked only if an urgent byte has come, or if bytes may be waiting whose event we
/// have not seen: an urgent byte may be the first of them, and a longer read would hide it.
pub(super) fn ahead<S: Streams>(streams: &mut S, socket: &mut Socket<S::Stream>) -> Option<Ahead> {
    if !socket.urgent && !socket.unseen {
        return Some(Ahead::Bytes);
    }
    let ahead = streams.ahead(&socket.stream);
    if ahead == Ahead::Nothing && !socket.ending {
        // An event will report whatever comes from now on.
        socket.readable = false;
        return None;
    }
    socket.urgent |= ahead == Ahead::Urgent;
    Some(ahead)
}

/// Notes that a read of `socket` brought `len` bytes into a buffer of `room` bytes. `ahead` is what
/// the read began with.
pub(super) fn note_read<S>(socket: &mut Socket<S>, ahead: Ahead, len: usize, room: usize) {
    socket.urgent &= ahead != Ahead::Urgent;
    socket.unseen = len == room;
    // A short read emptied the socket, unless it stopped before an urgent byte or the end is in
    // sight: those must still be read.
    socket.readable = len == room || socket.ending || socket.urgent;
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;

    use rustix::net::{SendFlags, send};

    use super::*;
    use crate::clock::Clock;
    use crate::kernel::Kernel;
    use crate::mailbox::Waker;
    use crate::near::Near;
    use crate::streams::Key;

    /// An application's socket, and our end of it, whose events the test never polls.
    fn connection(kernel: &mut Kernel) -> (TcpStream, Socket<Near>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let application = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let near = OwnedFd::from(listener.accept().unwrap().0);
        rustix::net::sockopt::set_socket_oobinline(&near, true).unwrap();
        let near = Near::from(near);
        kernel.watch(Key { slot: 0, generation: 1, far: false, turn: 0 }, &near).unwrap();
        (application, Socket { readable: true, ..Socket::new(near) })
    }

    /// With hundreds of busy sockets an event may come a turn later than its byte. After a read
    /// that filled its buffer, the next one would run over an urgent byte that came meanwhile, and
    /// an interrupt would become an ordinary key.
    // RFC 7609 4.7.5 #1: P and U announce urgent data
    #[test]
    fn an_urgent_byte_is_found_before_its_event() {
        let mut kernel =
            Kernel::new(Waker::new().unwrap().descriptor(), None, Clock::new()).unwrap();
        let (application, mut near) = connection(&mut kernel);
        note_read(&mut near, Ahead::Bytes, 4, 4);
        send(&application, b"!", SendFlags::OOB).unwrap();
        assert_eq!(ahead(&mut kernel, &mut near), Some(Ahead::Urgent));
        assert!(near.urgent);
        let mut room = [0];
        let read = kernel.read_slice(&near.stream, &mut room).unwrap();
        note_read(&mut near, Ahead::Urgent, read, 1);
        assert!(near.readable && !near.urgent);
        (&application).write_all(b"after").unwrap();
        assert_eq!(ahead(&mut kernel, &mut near), Some(Ahead::Bytes));
    }

    /// A socket that was read to the last byte rests until an event, unless its end was reported,
    /// which must still be read.
    #[test]
    fn an_empty_socket_rests_unless_its_end_is_in_sight() {
        let mut kernel =
            Kernel::new(Waker::new().unwrap().descriptor(), None, Clock::new()).unwrap();
        let (_application, mut near) = connection(&mut kernel);
        note_read(&mut near, Ahead::Bytes, 3, 4);
        assert!(!near.readable);
        note_read(&mut near, Ahead::Bytes, 4, 4);
        assert!(near.readable);
        assert_eq!((ahead(&mut kernel, &mut near), near.readable), (None, false));
        near.ending = true;
        note_read(&mut near, Ahead::Bytes, 3, 4);
        assert!(near.readable);
        note_read(&mut near, Ahead::Bytes, 4, 4);
        assert_eq!((ahead(&mut kernel, &mut near), near.readable), (Some(Ahead::Nothing), true));
    }
}
