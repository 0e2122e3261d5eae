//! One question to the gateway, and its answer.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
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
use crate::sys::{self, Own};

/// What came of a question.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The socket is marked.
    Marked,
    /// The connection stays TCP, and so do others for so many seconds.
    Leave { seconds: u32 },
    /// This socket takes the place of the TCP socket. If there is memory, its bytes go by that.
    Switch { unix: Own, memory: Option<Own> },
    /// The memory by which the bytes of a connection go.
    Memory(Own),
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
    // About a connection that exists, the answer decides whether it lives.
    let may_be_left_out = matches!(request, Request::Mark { .. } | Request::Listen);
    if may_be_left_out && RECENT.is_absent(now) {
        return Answer::Absent;
    }
    let begun = sys::now_precise();
    for _ in 0..TRIES {
        match ask_at(&settings.door, request, socket) {
            Ok(answer) => {
                // A gateway that does not answer would hold up the program each time.
                match answer {
                    Answer::Absent => RECENT.missed(now, ABSENT_S),
                    Answer::Silent if may_be_left_out => {
                        let is_slow = sys::now_precise() >= begun + patience(request);
                        RECENT.missed(now, if is_slow { SILENT_S } else { ABSENT_S });
                    }
                    Answer::Silent
                    | Answer::Marked
                    | Answer::Leave { .. }
                    | Answer::Switch { .. }
                    | Answer::Memory(_)
                    | Answer::Done => {}
                }
                return answer;
            }
            Err(_) if may_be_left_out => break,
            // The program is out of descriptors, or the gateway has no time. This may pass.
            Err(_) => sys::pause(),
        }
    }
    Answer::Absent
}

/// Asks for what the program can do without: once, and not for long.
pub(crate) fn ask_in_passing(request: Request, socket: BorrowedFd<'_>) -> Answer {
    let Some(settings) = settings().filter(|_| !RECENT.is_absent(sys::now())) else {
        return Answer::Absent;
    };
    ask_for(&settings.door, request, Some(socket), IN_PASSING).unwrap_or(Answer::Absent)
}

/// So long.
const IN_PASSING: Duration = Duration::from_millis(20);

/// How long no gateway is looked for after one was missed, and after one that did not answer.
const ABSENT_S: u32 = 1;
const SILENT_S: u32 = 10;
/// How often a question is tried that must be asked, with pauses of a millisecond.
const TRIES: u32 = 200;

/// Asks at this door.
///
/// # Errors
///
/// Why the question could not be asked.
fn ask_at(
    door: &SocketAddrUnix,
    request: Request,
    socket: Option<BorrowedFd<'_>>,
) -> Result<Answer, Errno> {
    ask_for(door, request, socket, patience(request))
}

/// The same, for so long.
fn ask_for(
    door: &SocketAddrUnix,
    request: Request,
    socket: Option<BorrowedFd<'_>>,
    patience: Duration,
) -> Result<Answer, Errno> {
    let deadline = sys::now_precise() + patience;
    let connection = match reach(door, patience, deadline) {
        Err(Errno::NOENT | Errno::CONNREFUSED | Errno::ACCESS) => return Ok(Answer::Absent),
        reached => reached?,
    };
    let is_attach = matches!(request, Request::Attach { .. } | Request::Shortcut { .. });
    Ok(match converse(&connection, request, socket, deadline) {
        Ok((Reply::Marked, _)) => Answer::Marked,
        Ok((Reply::Leave { seconds }, _)) => Answer::Leave { seconds },
        Ok((Reply::Done, _)) => Answer::Done,
        Ok((Reply::Switch { rings }, brought)) => match (rings, is_attach, brought) {
            (false, false, [Some(unix), None]) => Answer::Switch { unix, memory: None },
            (true, false, [Some(unix), memory @ Some(_)]) => Answer::Switch { unix, memory },
            (true, true, [Some(memory), None]) => Answer::Memory(memory),
            (_, _, _) => Answer::Silent,
        },
        Err(_) => Answer::Silent,
    })
}

/// How long the answer may take. A rendezvous for which the program waits takes as long as the
/// peer; everything else is a matter of the two processes.
fn patience(request: Request) -> Duration {
    match request {
        Request::Connected { waits: true, .. } => Duration::from_secs(20),
        Request::Connected { waits: false, .. } | Request::Accepted { .. } => {
            Duration::from_secs(5)
        }
        Request::Mark { .. }
        | Request::Listen
        | Request::Reset { .. }
        | Request::Attach { .. }
        | Request::Shortcut { .. } => Duration::from_secs(1),
    }
}

fn reach(door: &SocketAddrUnix, patience: Duration, deadline: Duration) -> Result<Own, Errno> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let connection = Own::new(socket_with(family, kind, SocketFlags::CLOEXEC, None)?);
    set_socket_timeout(&connection, Timeout::Send, Some(patience))?;
    set_socket_timeout(&connection, Timeout::Recv, Some(patience))?;
    again_until(deadline, || connect(&connection, door))?;
    Ok(connection)
}

/// Calls again what a signal has interrupted, until the deadline: each call has the whole time-out
/// of the socket, and a profiler sends signals for ever.
fn again_until<T>(
    deadline: Duration,
    mut call: impl FnMut() -> Result<T, Errno>,
) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) if sys::now_precise() < deadline => {}
            result => return result,
        }
    }
}

fn converse(
    connection: &Own,
    request: Request,
    socket: Option<BorrowedFd<'_>>,
    deadline: Duration,
) -> Result<(Reply, [Option<Own>; 2]), Errno> {
    let bytes = request.encode();
    let sockets = socket.as_slice();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !sockets.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(sockets)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::NOSIGNAL;
    again_until(deadline, || {
        sendmsg(connection, &[IoSlice::new(&bytes)], &mut beside, flags).map(drop)
    })?;

    let mut bytes = [0; Reply::LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let received = again_until(deadline, || {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        recvmsg(connection, &mut parts, &mut beside, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut brought = [None, None];
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(mut sockets) = message {
            brought = [sockets.next().map(Own::new), sockets.next().map(Own::new)];
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
        let request = Request::Connected { waits: true, rings: false, shortcut: false };
        let file = std::fs::File::open("/dev/null").unwrap();
        let switch = Reply::Switch { rings: false }.encode();
        let gateway = thread::spawn(move || answer(&listener, &switch, true));
        let answered = ask_at(&address, request, Some(file.as_fd())).unwrap();
        let Answer::Switch { unix, memory: None } = answered else { panic!("{answered:?}") };
        assert_eq!(rustix::net::sockopt::socket_domain(&unix).unwrap(), AddressFamily::UNIX);
        assert!(rustix::io::fcntl_getfd(&unix).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        assert_eq!(gateway.join().unwrap(), (request.encode().to_vec(), 1));
    }

    /// Whatever goes wrong, the program must know whether the gateway may have acted.
    #[test]
    fn nonsense_and_silence_are_told_from_absence() {
        let (listener, address) = door("nonsense");
        let switch = Reply::Switch { rings: false }.encode();
        for (bytes, brings) in
            [(&switch[..], false), (b"SMCg", false), (&[0; 64], true), (b"", true)]
        {
            let answered = thread::scope(|scope| {
                scope.spawn(|| answer(&listener, bytes, brings));
                ask_at(&address, Request::Listen, None).unwrap()
            });
            assert!(matches!(answered, Answer::Silent), "{bytes:?}: {answered:?}");
        }
        let answered = thread::scope(|scope| {
            scope.spawn(|| drop(accept(&listener)));
            ask_at(&address, Request::Listen, None).unwrap()
        });
        assert!(matches!(answered, Answer::Silent), "{answered:?}");
        drop(listener);
        assert!(matches!(ask_at(&address, Request::Listen, None), Ok(Answer::Absent)));
    }

    #[test]
    fn without_settings_nobody_is_asked() {
        assert!(matches!(ask(Request::Listen, None), Answer::Absent));
    }
}
