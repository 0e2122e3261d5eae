//! One question to the gateway, and its answer.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, socket_with,
};
use smcgate_door::{Reply, Request};

use crate::recent::RECENT;
use crate::settings::settings;
use crate::sys::{self, Owned};

/// What came of a question.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The socket is marked.
    Marked,
    /// The connection stays TCP, and so do others for so many seconds.
    Leave { seconds: u32 },
    /// This socket takes the place of the TCP socket.
    Switch(Owned),
    /// It was done.
    Done,
    /// There is no gateway. It has not heard the question.
    Absent,
    /// The gateway has heard the question and is gone, does not answer in time, or talks nonsense.
    Silent,
}

/// Asks the gateway of this host. `socket` is what the question is about.
pub(crate) fn ask(request: Request, socket: Option<BorrowedFd<'_>>) -> Answer {
    let Some(settings) = settings() else { return Answer::Absent };
    let now = sys::now();
    // Where the gateway has been asked before about a socket, it must be asked on.
    let is_first = matches!(request, Request::Mark { .. } | Request::Listen);
    if is_first && RECENT.is_absent(now) {
        return Answer::Absent;
    }
    let (answer, is_missed) = ask_at(&settings.door, request, socket);
    if is_first && is_missed {
        RECENT.missed(sys::now());
    }
    answer
}

/// Asks the gateway at `door`. Returns the answer, and whether others should not ask for a while:
/// nobody is there, or nobody who answers in time.
fn ask_at(
    door: &SocketAddrUnix,
    request: Request,
    socket: Option<BorrowedFd<'_>>,
) -> (Answer, bool) {
    let until = sys::moment() + patience(request);
    let connection = match reach(door, patience(request)) {
        Ok(connection) => connection,
        // Otherwise it is this process that is short of something.
        Err(error) => {
            return (Answer::Absent, matches!(error, Errno::NOENT | Errno::CONNREFUSED));
        }
    };
    match converse(&connection, until, request, socket) {
        Ok((Reply::Marked, _)) => (Answer::Marked, false),
        Ok((Reply::Leave { seconds }, _)) => (Answer::Leave { seconds }, false),
        Ok((Reply::Switch, Some(unix))) => (Answer::Switch(unix), false),
        Ok((Reply::Done, _)) => (Answer::Done, false),
        Ok((Reply::Switch, None)) | Err(_) => (Answer::Silent, true),
    }
}

/// How long the answer may take. For the outcome of a rendezvous the gateway takes a part of a
/// second; a program that only connects or listens shall not notice a gateway that hangs.
fn patience(request: Request) -> Duration {
    match request {
        Request::Mark { .. } | Request::Listen => Duration::from_secs(1),
        Request::Connected { .. } | Request::Accepted | Request::Reset { .. } => {
            Duration::from_secs(5)
        }
    }
}

fn reach(door: &SocketAddrUnix, patience: Duration) -> Result<Owned, Errno> {
    let connection =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let connection = Owned::from(connection);
    let until = sys::moment() + patience;
    patiently(&connection, until, || connect(&connection, door))?;
    Ok(connection)
}

/// Makes a system call that may wait until then, however many signals come meanwhile.
fn patiently<T>(
    connection: &Owned,
    until: Duration,
    mut call: impl FnMut() -> Result<T, Errno>,
) -> Result<T, Errno> {
    loop {
        let rest = until.saturating_sub(sys::moment());
        if rest.is_zero() {
            return Err(Errno::TIMEDOUT);
        }
        set_socket_timeout(connection, Timeout::Send, Some(rest))?;
        set_socket_timeout(connection, Timeout::Recv, Some(rest))?;
        match call() {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

fn converse(
    connection: &Owned,
    until: Duration,
    request: Request,
    socket: Option<BorrowedFd<'_>>,
) -> Result<(Reply, Option<Owned>), Errno> {
    let bytes = request.encode();
    let sockets = socket.as_slice();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !sockets.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(sockets)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::NOSIGNAL;
    let parts = [IoSlice::new(&bytes)];
    patiently(connection, until, || sendmsg(connection.as_fd(), &parts, &mut beside, flags))?;

    let mut bytes = [0; Reply::LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let received = patiently(connection, until, || {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        recvmsg(connection.as_fd(), &mut parts, &mut beside, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut brought = None;
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(mut sockets) = message {
            brought = sockets.next().map(Owned::from);
        }
    }
    let reply = bytes.get(..received.bytes).map(Reply::decode);
    match reply {
        Some(Ok(reply)) => Ok((reply, brought)),
        Some(Err(_)) | None => Err(Errno::PROTO),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::thread;

    use rustix::net::{accept, bind, listen, socketpair};

    use super::*;

    fn door(name: &str) -> (OwnedFd, SocketAddrUnix) {
        let name = format!("smcgate-preload-test-{}-{name}", std::process::id());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        bind(&listener, &address).unwrap();
        listen(&listener, 4).unwrap();
        (listener, address)
    }

    /// Answers one question with these bytes, and a socket.
    fn answer(listener: &OwnedFd, bytes: &[u8], brings: bool) -> (Vec<u8>, usize) {
        let connection = accept(listener).unwrap();
        let mut heard = [0; 64];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut heard)];
        let received =
            recvmsg(&connection, &mut parts, &mut beside, RecvFlags::CMSG_CLOEXEC).unwrap();
        let rights = beside.drain().count();
        let (ours, _) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        let ours = [ours.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if brings {
            assert!(beside.push(SendAncillaryMessage::ScmRights(&ours)));
        }
        sendmsg(&connection, &[IoSlice::new(bytes)], &mut beside, SendFlags::empty()).unwrap();
        (heard[..received.bytes].to_vec(), rights)
    }

    #[test]
    fn a_question_brings_a_socket_and_so_may_the_answer() {
        let (listener, address) = door("socket");
        let request = Request::Connected { waits: true };
        let file = std::fs::File::open("/dev/null").unwrap();
        let gateway = thread::spawn(move || answer(&listener, &Reply::Switch.encode(), true));
        let answered = ask_at(&address, request, Some(file.as_fd())).0;
        let Answer::Switch(unix) = answered else { panic!("{answered:?}") };
        assert_eq!(rustix::net::sockopt::socket_domain(&unix).unwrap(), AddressFamily::UNIX);
        assert!(rustix::io::fcntl_getfd(&unix).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        assert_eq!(gateway.join().unwrap(), (request.encode().to_vec(), 1));
    }

    /// Whatever goes wrong, the program must know whether the gateway may have acted.
    #[test]
    fn nonsense_and_silence_are_told_from_absence() {
        let (listener, address) = door("nonsense");
        for (bytes, brings) in
            [(&Reply::Switch.encode()[..], false), (b"SMCg", false), (&[0; 64], true), (b"", true)]
        {
            let answered = thread::scope(|scope| {
                scope.spawn(|| answer(&listener, bytes, brings));
                ask_at(&address, Request::Listen, None).0
            });
            assert!(matches!(answered, Answer::Silent), "{bytes:?}: {answered:?}");
        }
        let answered = thread::scope(|scope| {
            scope.spawn(|| drop(accept(&listener)));
            ask_at(&address, Request::Listen, None).0
        });
        assert!(matches!(answered, Answer::Silent), "{answered:?}");
        drop(listener);
        assert!(matches!(ask_at(&address, Request::Listen, None), (Answer::Absent, true)));
    }

    #[test]
    fn without_settings_nobody_is_asked() {
        assert!(matches!(ask(Request::Listen, None), Answer::Absent));
    }
}
