//! The door: a Unix socket at which programs with the preload library ask for SMC-R.
//!
//! Each request comes by a connection of its own, so nothing here outlives a request. What is asked
//! and answered is in [`smcgate_door`]; what becomes of a TCP socket that is brought, the gateway
//! decides.
//!
//! Whoever may connect to the door is a program of this host, but it may be hostile: what it sends
//! is checked, and what it brings is used only if it is a TCP socket.

mod crowd;

use std::fs::{self, Permissions};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, ipproto, listen, recvmsg, sendmsg, shutdown, socket_with,
    socketpair, sockopt,
};
use smcgate_door::{Name, Reply, Request};
use smcr_os::{credentials, passing, quiet};
use smcr_proto::Instant;

use crate::config;
use crate::slab::{Key, Slab};
use crate::stats::Process;

/// Where the door will be: a bound socket. Dropping it removes the socket.
#[derive(Debug)]
pub struct Doorway {
    config: config::Door,
    socket: OwnedFd,
}

/// The door of a running gateway.
#[derive(Debug)]
pub struct Door {
    way: Doorway,
    callers: Slab<Caller>,
    /// For what programs have brought.
    closer: Closer,
    /// For the sockets of callers: what programs bring must not hold these up.
    farewells: Closer,
    /// Sockets of callers that have their answers.
    gone: Vec<OwnedFd>,
    /// When they are closed, at the latest.
    gone_until: Option<Instant>,
    /// Requests that came from those who may not ask, or were none.
    pub refused: u64,
}

/// Who has connected to the door.
#[derive(Debug)]
pub struct Caller {
    socket: OwnedFd,
    /// The program.
    pub process: Process,
    /// When it is given up, unless it has asked for something by then.
    until: Instant,
}

/// A request, and the socket that came with it.
#[derive(Debug)]
pub struct Asked {
    /// What is asked.
    pub request: Request,
    /// The program's TCP socket, if it has brought one.
    pub socket: Option<OwnedFd>,
}

/// A program that never will ask: it is gone, or has sent what is no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

impl Doorway {
    /// Binds the socket, in place of one that a gateway has left that is no more.
    ///
    /// # Errors
    ///
    /// If it cannot be bound: another gateway has it, or the folder is not there.
    pub fn bind(config: &config::Door) -> io::Result<Self> {
        let address = SocketAddrUnix::new(&config.socket)?;
        remove_what_is_left(&config.socket, &address)?;
        let socket = unix_socket()?;
        bind(&socket, &address)?;
        // Who may use it, `uids` and `gids` say.
        fs::set_permissions(&config.socket, Permissions::from_mode(0o666))?;
        listen(&socket, BACKLOG)?;
        Ok(Self { config: config.clone(), socket })
    }
}

impl Door {
    /// Opens the door. That takes a thread, which may do whatever the one that calls this may do.
    ///
    /// # Errors
    ///
    /// If the system has no room for another thread.
    pub fn open(way: Doorway) -> io::Result<Self> {
        let (closer, farewells) = (Closer::start("closer")?, Closer::start("farewell")?);
        let (callers, gone) = (Slab::default(), Vec::new());
        Ok(Self { way, callers, closer, farewells, gone, gone_until: None, refused: 0 })
    }

    /// Becomes readable when somebody comes.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.way.socket.as_fd()
    }

    /// The next program that has come; none if there is no other, or if that may not come in.
    ///
    /// # Errors
    ///
    /// As `accept(2)`, if none waits or the process is out of descriptors.
    pub fn accept(&mut self, now: Instant) -> rustix::io::Result<Option<Key>> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = accept_with(&self.way.socket, flags)?;
        let who = credentials::of_peer(socket.as_fd()).ok();
        let who = who.filter(|it| self.way.config.admits(it.uid, it.gid));
        let who = who.filter(|it| self.make_room(it.uid));
        let Some(who) = who else {
            self.refused += 1;
            self.farewells.close(vec![socket]);
            return Ok(None);
        };
        let process = Process { pid: who.pid, uid: who.uid, command: String::new() };
        Ok(Some(self.callers.insert(Caller { socket, process, until: now + PATIENCE })))
    }

    /// What `key` was given for, while it is there.
    pub fn caller(&self, key: Key) -> Option<&Caller> {
        self.callers.at(key)
    }

    /// What a program asks for; none if it has not asked yet.
    ///
    /// # Errors
    ///
    /// If it never will.
    pub fn hear(&mut self, key: Key) -> Result<Option<Asked>, Gone> {
        let Some(caller) = self.callers.at(key) else { return Ok(None) };
        let (request, brought) = match receive(&caller.socket) {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Ok(received) => received,
            Err(_) => (None, Vec::new()),
        };
        let mut brought = brought.into_iter();
        let mut socket = brought.next();
        let unwanted = socket.take_if(|socket| !is_wanted(request, socket));
        let unwanted: Vec<OwnedFd> = unwanted.into_iter().chain(brought).collect();
        if !unwanted.is_empty() {
            self.closer.close(unwanted);
        }
        let Some(request) = request else {
            self.refused += 1;
            return Err(Gone);
        };
        Ok(Some(Asked { request, socket }))
    }

    /// Closes a socket that a program goes on to use, or nobody.
    pub fn close(&self, socket: OwnedFd) {
        let is_quick = is_tcp(&socket) && sockopt::socket_linger(&socket) == Ok(None);
        if !is_quick {
            self.closer.close(vec![socket]);
        }
    }

    /// It has asked for something that takes time, and is not given up before it has an answer.
    pub fn keep(&mut self, key: Key) {
        if let Some(caller) = self.callers.at_mut(key) {
            caller.until = Instant(u64::MAX);
        }
    }

    /// Answers, and says farewell. `socket` goes to the program. Returns whether the answer has
    /// been sent.
    pub fn answer(&mut self, key: Key, reply: Reply, socket: Option<BorrowedFd<'_>>) -> bool {
        self.answer_with(key, reply, socket.as_slice())
    }

    /// The same with at most two descriptors.
    pub fn answer_with(&mut self, key: Key, reply: Reply, all: &[BorrowedFd<'_>]) -> bool {
        let Some(caller) = self.callers.remove(key) else { return false };
        let is_sent = send(&caller.socket, reply, all).is_ok();
        // It hears at once that this is all. What it may have sent beyond its request is closed
        // with the socket: not here, nor one by one.
        let _ = shutdown(&caller.socket, Shutdown::Both);
        self.gone.push(caller.socket);
        if self.gone.len() >= GONE_MAX {
            self.close_gone();
        }
        is_sent
    }

    /// Closes the sockets of callers that have their answers.
    pub fn close_gone(&mut self) {
        self.gone_until = None;
        self.farewells.close(std::mem::take(&mut self.gone));
    }

    /// Says farewell without an answer: the program resets the connection it has asked about.
    pub fn dismiss(&mut self, key: Key) {
        if let Some(caller) = self.callers.remove(key) {
            self.farewells.close(vec![caller.socket]);
        }
    }

    /// Dismisses those who have been silent for too long.
    pub fn expire(&mut self, now: Instant) {
        let is_over = |(key, caller): (Key, &Caller)| (caller.until <= now).then_some(key);
        let over: Vec<Key> = self.callers.iter().filter_map(is_over).collect();
        over.into_iter().for_each(|key| self.dismiss(key));
        if !self.gone.is_empty() && *self.gone_until.get_or_insert(now + GONE_FOR) <= now {
            self.close_gone();
        }
    }

    /// When [`expire`](Self::expire) may have something to do, at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        // It looks at the clock when it is called.
        let gone = (!self.gone.is_empty()).then(|| self.gone_until.unwrap_or(Instant(0)));
        let waiting = self.callers.iter().map(|(_, caller)| caller.until);
        waiting.chain(gone).min().filter(|until| *until < Instant(u64::MAX))
    }

    /// Whether bytes may go by shared memory.
    pub fn offers_rings(&self) -> bool {
        self.way.config.rings
    }

    /// What the operator says of it.
    pub fn config(&self) -> &config::Door {
        &self.way.config
    }

    /// How many connections a process may have.
    pub fn connections_per_process(&self) -> u32 {
        self.way.config.connections_per_process
    }

    /// Makes room for a caller of the user `uid`. If there is none, the user that has most callers
    /// loses the one that has been silent for longest. Returns whether there is room now.
    fn make_room(&mut self, uid: u32) -> bool {
        if self.callers.len() < CALLERS_MAX {
            return true;
        }
        let all = self.callers.iter();
        let all: Vec<_> =
            all.map(|(key, caller)| (key, caller.process.uid, caller.until)).collect();
        let displaced = crowd::displaced(uid, &all);
        displaced.inspect(|key| self.dismiss(*key)).is_some()
    }
}

impl Drop for Doorway {
    fn drop(&mut self) {
        // Where it is not ours to remove, the next gateway finds that nobody answers there.
        let _ = fs::remove_file(&self.config.socket);
    }
}

impl Caller {
    /// Its socket.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The name of the program with this process id; empty if it is gone, or we may not know.
pub fn command_of(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().chars().filter(|it| !it.is_control()).collect()
}

/// What an application's TCP socket was like before the gateway took it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Before {
    blocks: bool,
    urgent_in_line: bool,
    linger: Option<Duration>,
    options: quiet::Options,
}

impl Before {
    /// Prepares a TCP socket for a rendezvous; returns what it was like.
    ///
    /// # Errors
    ///
    /// If it is none.
    pub fn take(socket: &OwnedFd) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(socket)?;
        let before = Self {
            blocks: !flags.contains(rustix::fs::OFlags::NONBLOCK),
            urgent_in_line: sockopt::socket_oobinline(socket)?,
            linger: sockopt::socket_linger(socket)?,
            options: quiet::Options::take(socket.as_fd()),
        };
        // Whoever closes it last would wait for its bytes to leave.
        sockopt::set_socket_linger(socket, None)?;
        rustix::io::ioctl_fionbio(socket, true)?;
        sockopt::set_socket_oobinline(socket, true)?;
        Ok(before)
    }

    /// The application goes on with it.
    pub fn restore(self, socket: &OwnedFd) {
        // What worked before works again.
        let _ = rustix::io::ioctl_fionbio(socket, !self.blocks);
        let _ = sockopt::set_socket_oobinline(socket, self.urgent_in_line);
        let _ = sockopt::set_socket_linger(socket, self.linger);
        self.options.restore(socket.as_fd());
    }
}

/// Closes what programs have brought, and may take long to close: a file of a file system that a
/// program serves, or a socket that waits for its bytes to leave. One of which not all was read may
/// have such things in it.
#[derive(Debug)]
struct Closer(mpsc::Sender<Vec<OwnedFd>>);

impl Closer {
    fn start(name: &str) -> io::Result<Self> {
        let (closer, closed) = mpsc::channel::<Vec<OwnedFd>>();
        let close = move || closed.into_iter().flatten().for_each(drop);
        thread::Builder::new().name(name.to_owned()).spawn(close)?;
        Ok(Self(closer))
    }

    fn close(&self, descriptors: Vec<OwnedFd>) {
        // The thread ends with this process.
        let _ = self.0.send(descriptors);
    }
}

/// Whether a descriptor is a TCP socket. Programs can bring anything.
pub fn is_tcp(socket: &OwnedFd) -> bool {
    let domain = sockopt::socket_domain(socket);
    matches!(domain, Ok(AddressFamily::INET | AddressFamily::INET6))
        && sockopt::socket_type(socket) == Ok(SocketType::STREAM)
        && sockopt::socket_protocol(socket) == Ok(Some(ipproto::TCP))
}

/// Whether this request comes with such a descriptor.
fn is_wanted(request: Option<Request>, socket: &OwnedFd) -> bool {
    match request {
        None => false,
        Some(Request::Attach { .. } | Request::Shortcut { .. } | Request::Reset { .. }) => {
            sockopt::socket_domain(socket) == Ok(AddressFamily::UNIX)
                && sockopt::socket_type(socket) == Ok(SocketType::STREAM)
        }
        Some(
            Request::Mark { .. }
            | Request::Connected { .. }
            | Request::Listen
            | Request::Accepted { .. },
        ) => is_tcp(socket),
    }
}

/// A stream that takes the place of a TCP connection: the gateway's end, and the application's.
///
/// # Errors
///
/// If the process is out of descriptors.
pub fn stream() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    let (near, app) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::io::ioctl_fionbio(&near, true)?;
    sockopt::set_socket_oobinline(&near, true)?;
    // Older kernels cannot; SECURITY.md says what that means.
    let _ = passing::refuse(near.as_fd());
    Ok((near, app))
}

/// Says for which connection the application's end stands.
///
/// # Errors
///
/// If somebody else has this name.
pub fn name(app: &OwnedFd, name: &Name) -> io::Result<()> {
    // The kernel writes the zero before it.
    Ok(bind(app, &SocketAddrUnix::new_abstract_name(&name.encode()[1..])?)?)
}

/// How the application sees its own address and that of its peer, if the socket is connected.
pub fn ends(socket: &OwnedFd) -> Option<(SocketAddr, SocketAddr)> {
    Some((crate::listener::local_address(socket)?, crate::listener::peer_address(socket)?))
}

fn unix_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Removes the socket at `path`, if nobody listens there any more.
fn remove_what_is_left(path: &Path, address: &SocketAddrUnix) -> io::Result<()> {
    let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        let why = "something that is no socket has this name; remove it, or write another path";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
    }
    match connect(unix_socket()?, address) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path),
        Ok(()) | Err(Errno::AGAIN) => {
            let why = "another gateway listens there; stop it, or write another path";
            Err(io::Error::new(io::ErrorKind::AddrInUse, why))
        }
        Err(error) => Err(error.into()),
    }
}

/// What a program sends: a request, if it is one, and what came with it.
fn receive(socket: &OwnedFd) -> rustix::io::Result<(Option<Request>, Vec<OwnedFd>)> {
    let mut bytes = [0; Request::LEN + 1];
    // The kernel closes those for which there is no room, while we wait.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BROUGHT_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    let mut brought = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            brought.extend(descriptors);
        }
    }
    Ok((Request::decode(&bytes[..received.bytes]).ok(), brought))
}

fn send(to: &OwnedFd, reply: Reply, all: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let bytes = reply.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !all.is_empty() && !control.push(SendAncillaryMessage::ScmRights(all)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(to, &[IoSlice::new(&bytes)], &mut control, flags).map(|_| ())
}

/// Programs that the kernel holds until they are let in.
const BACKLOG: i32 = 1_024;
/// Programs that are there at once.
const CALLERS_MAX: usize = 4_096;
/// The most that can come with a packet (the kernel's SCM_MAX_FD).
const BROUGHT_MAX: usize = 253;
/// Sockets of callers that have their answers and are not closed yet: to wake the thread that does
/// it for each of them would take a good part of the time of a request.
const GONE_MAX: usize = 32;
/// For how long they may be there.
const GONE_FOR: Duration = Duration::from_millis(100);
/// How long a program may be there before it asks.
const PATIENCE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn door(folder: &Path) -> io::Result<Door> {
        let socket = folder.join("door");
        let (uids, gids) = (Vec::new(), Vec::new());
        let way = Doorway::bind(&config::Door {
            socket,
            uids,
            gids,
            connections_per_process: 10,
            rings: true,
            shortcuts: config::Shortcuts::SameUser,
            shortcut_after: 32,
        })?;
        Door::open(way)
    }

    /// A program's side of a request.
    fn ask(folder: &Path, bytes: &[u8], socket: Option<BorrowedFd<'_>>) -> OwnedFd {
        ask_with(folder, bytes, socket.as_slice())
    }

    /// The same with up to six sockets.
    fn ask_with(folder: &Path, bytes: &[u8], sockets: &[BorrowedFd<'_>]) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        let caller = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&caller, &SocketAddrUnix::new(folder.join("door")).unwrap()).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(6))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !sockets.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(sockets)));
        }
        sendmsg(&caller, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
        caller
    }

    /// Whoever closes a socket that lingers waits, and so does whoever closes one in which such a
    /// socket was not read. Any program of the host can send them here.
    #[test]
    fn sockets_that_linger_make_nobody_wait() {
        let folder = tempfile::tempdir().unwrap();
        let mut door = door(folder.path()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let lingering = || {
            let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            socket.set_nonblocking(true).unwrap();
            while rustix::io::write(&socket, &[0; 65_536]) != Err(Errno::AGAIN) {}
            sockopt::set_socket_linger(&socket, Some(Duration::from_secs(3))).unwrap();
            socket.set_nonblocking(false).unwrap();
            socket
        };
        let sockets: Vec<TcpStream> = (0..12).map(|_| lingering()).collect();
        let all: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
        // One is answered and had more to say; the other one has nothing to ask.
        let asks = ask_with(folder.path(), &Request::Listen.encode(), &all[..3]);
        sendmsg_again(&asks, &all[3..6]);
        let _other = ask_with(folder.path(), b"nonsense", &all[6..]);
        drop(all);
        drop(sockets);
        let clock = smcr_engine::clock::Clock::new();
        let start = clock.now();
        let [first, second] = [(); 2].map(|()| door.accept(start).unwrap().unwrap());
        if let Some(socket) = door.hear(first).unwrap().unwrap().socket {
            door.close(socket);
        }
        door.answer(first, Reply::Done, None);
        assert!(door.hear(second).is_err());
        door.dismiss(second);
        door.expire(start + GONE_FOR);
        door.expire(start + 2 * GONE_FOR);
        assert!(door.gone.is_empty() && door.poll_timeout().is_none());
        assert!(clock.now().since(start) < Duration::from_secs(2));
    }

    /// It asks for the reset of its connection when it closes it, and for nothing of ours.
    #[test]
    fn a_socket_that_its_program_goes_on_to_use_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let door = door(folder.path()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let linger = Some(Duration::ZERO);
        sockopt::set_socket_linger(&socket, linger).unwrap();
        door.close(socket.try_clone().unwrap().into());
        // The other end of a pipe says when its turn is over.
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        door.close(writer);
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0));
        assert_eq!(sockopt::socket_linger(&socket), Ok(linger));
    }

    fn sendmsg_again(caller: &OwnedFd, sockets: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(6))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(sockets)));
        sendmsg(caller, &[IoSlice::new(b"more")], &mut control, SendFlags::empty()).unwrap();
    }

    #[test]
    fn a_request_brings_a_socket_and_the_answer_another() {
        let folder = tempfile::tempdir().unwrap();
        let mut door = door(folder.path()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let request = Request::Connected { waits: true, rings: false, shortcut: false };
        let caller = ask(folder.path(), &request.encode(), Some(tcp.as_fd()));
        let key = door.accept(Instant(0)).unwrap().unwrap();
        assert_eq!(door.accept(Instant(0)), Err(Errno::AGAIN));
        let asked = door.hear(key).unwrap().unwrap();
        assert_eq!(asked.request, request);
        let socket = asked.socket.unwrap();
        assert!(is_tcp(&socket));
        let (local, peer) = ends(&socket).unwrap();
        assert_eq!(peer, listener.local_addr().unwrap());
        assert_eq!(door.caller(key).unwrap().process.pid, std::process::id());

        let (near, app) = stream().unwrap();
        let stands_for = Name { connection: 7, local, peer, rings: false };
        name(&app, &stands_for).unwrap();
        assert!(door.answer(key, Reply::Switch { rings: false }, Some(app.as_fd())));
        drop(app);
        let mut bytes = [0; 64];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let room = &mut [IoSliceMut::new(&mut bytes)];
        let got = recvmsg(&caller, room, &mut control, RecvFlags::empty()).unwrap();
        assert_eq!(Reply::decode(&bytes[..got.bytes]), Ok(Reply::Switch { rings: false }));
        let Some(RecvAncillaryMessage::ScmRights(mut sockets)) = control.drain().next() else {
            panic!("no socket came");
        };
        let app = sockets.next().unwrap();
        let address = SocketAddrUnix::try_from(rustix::net::getsockname(&app).unwrap()).unwrap();
        let mut path = vec![0];
        path.extend_from_slice(address.abstract_name().unwrap());
        assert_eq!(Name::decode(&path), Some(stands_for));
        let (mut near, mut app) = (UnixStream::from(near), UnixStream::from(app));
        app.write_all(b"hello").unwrap();
        assert_eq!(near.read(&mut bytes).unwrap(), 5);
    }

    /// A program sends a descriptor by its end, and forgets it: whoever reads the bytes would close
    /// it, and wait for what that waits for.
    #[test]
    fn a_program_cannot_leave_descriptors_to_us() {
        let (near, app) = stream().unwrap();
        if passing::refuse(near.as_fd()).is_err() {
            return println!("not tried: this kernel is older than Linux 6.16");
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let sockets = [listener.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&sockets)));
        let sent = sendmsg(&app, &[IoSlice::new(b"x")], &mut control, SendFlags::NOSIGNAL);
        assert_eq!(sent, Err(Errno::PERM));
        let (mut near, mut app) = (UnixStream::from(near), UnixStream::from(app));
        app.write_all(b"hello").unwrap();
        let mut bytes = [0; 5];
        near.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"hello");
    }

    /// Whatever a program sends, the gateway goes on.
    #[test]
    fn what_is_no_request_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut door = door(folder.path()).unwrap();
        for bytes in [&[][..], b"x", &[0; 40], &[0; 41], &[1; 5_000]] {
            let _caller = ask(folder.path(), bytes, None);
            let key = door.accept(Instant(0)).unwrap().unwrap();
            assert!(door.hear(key).is_err(), "{bytes:?}");
            door.dismiss(key);
        }
        assert_eq!(door.refused, 5);
        let _silent = ask(folder.path(), &Request::Listen.encode(), None);
        let key = door.accept(Instant(0)).unwrap().unwrap();
        assert_eq!(door.poll_timeout(), Some(Instant(0) + PATIENCE));
        door.expire(Instant(0) + PATIENCE);
        assert!(door.caller(key).is_none() && door.poll_timeout().is_none());
    }

    /// A gateway that was killed must not keep the next one from starting, and one that runs must.
    #[test]
    fn a_path_belongs_to_one_gateway() {
        let folder = tempfile::tempdir().unwrap();
        let first = door(folder.path()).unwrap();
        let error = door(folder.path()).unwrap_err();
        assert!(error.to_string().contains("another gateway"), "{error}");
        // As if it had been killed: the path is there, and nobody listens.
        let path = first.way.config.socket.clone();
        let aside = folder.path().join("aside");
        fs::rename(&path, &aside).unwrap();
        drop(first);
        fs::rename(&aside, &path).unwrap();
        drop(door(folder.path()).unwrap());
        assert!(!path.exists());
        fs::write(&path, "").unwrap();
        let error = door(folder.path()).unwrap_err();
        assert!(error.to_string().contains("no socket"), "{error}");
    }
}
