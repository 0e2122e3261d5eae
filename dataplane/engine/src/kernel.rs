//! The kernel's sockets, on one edge-triggered epoll, and the rings of those that have some.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketAddrUnix, sockopt};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use smcgate_rings::{Gateway, Span};
use smcr_memory::rmb::Readable;
use smcr_memory::{Vacant, foreign};
use smcr_proto::Instant;
use smcr_rnic::Signs;

use crate::clock::Clock;
use crate::hot::Hot;
use crate::limits::{EVENTS_PER_TURN_MAX, EVENTS_PER_TURN_MIN};
use crate::near::Near;
use crate::spacing::{Spacer, WORTH_SPACING};
use crate::streams::{Ahead, Event, Key, Streams};

/// An epoll over sockets, and over whatever else must end a sleep.
#[allow(missing_debug_implementations, reason = "epoll events have none")]
pub struct Kernel {
    epoll: OwnedFd,
    /// Ends sleeps.
    timer: OwnedFd,
    /// The clock of all times that callers name.
    clock: Clock,
    /// When the timer rings, or rang.
    rings_at: Option<Instant>,
    /// Of these, `count` were found.
    found: Box<[epoll::Event]>,
    count: usize,
    portion: Portion,
    /// In how many turns the kernel was not asked.
    skipped: u32,
    /// The last sleep found what the next `poll` would ask for.
    fresh: bool,
    /// Whether the RNIC has a descriptor that tells when packets have come.
    has_rnic: bool,
    /// Moves what this thread sends in its page; none where the kernel copies fast.
    spacer: Option<Spacer>,
    pub(crate) hot: Hot,
}

impl Kernel {
    /// An epoll that also wakes when `waker` becomes readable, or `rnic`, which is readable when
    /// packets have come. Callers name times of `clock`.
    ///
    /// # Errors
    ///
    /// When the process is out of descriptors.
    pub fn new(
        waker: BorrowedFd<'_>,
        rnic: Option<BorrowedFd<'_>>,
        clock: Clock,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        use epoll::EventFlags as F;
        let add = |descriptor, data, flags| {
            epoll::add(&epoll, descriptor, epoll::EventData::new_u64(data), flags)
        };
        add(waker, WAKER, F::IN)?;
        // Setting it again is what makes it unreadable, so nobody has to read it.
        add(timer.as_fd(), WAKER, F::IN | F::ET)?;
        if let Some(rnic) = rnic {
            add(rnic, RNIC, F::IN)?;
        }
        let nothing = epoll::Event { flags: F::empty(), data: epoll::EventData::new_u64(0) };
        Ok(Self {
            epoll,
            timer,
            clock,
            rings_at: None,
            found: [nothing; EVENTS_PER_TURN_MAX].into(),
            count: 0,
            portion: Portion::default(),
            skipped: 0,
            fresh: false,
            has_rnic: rnic.is_some(),
            spacer: Spacer::if_useful(),
            hot: Hot::default(),
        })
    }

    /// The clock of all times that callers name.
    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    /// Whether the kernel need not be asked in this turn: it knew of nothing in the last one, and
    /// there are rings, which are looked at in every turn.
    fn skips(&mut self) -> bool {
        let skips = self.count == 0 && !self.hot.is_empty() && self.skipped < SKIPPED_MAX;
        self.skipped = if skips { self.skipped + 1 } else { 0 };
        skips
    }

    fn wait(&mut self, limit: Option<&Timespec>) {
        let room = &mut self.found[..self.portion.size];
        // Interruption by a signal is a sleep that ended early.
        self.count = epoll::wait(&self.epoll, room, limit).unwrap_or(0);
    }

    /// Reads from rings. Whoever takes something out of the socket must look at the rings by
    /// himself first: it may have been a kick.
    fn read_rings(
        &mut self,
        rings: &Arc<Gateway>,
        socket: BorrowedFd<'_>,
        most: usize,
        copy: impl FnOnce(&Span<'_>) -> usize,
    ) -> io::Result<usize> {
        if rings.is_ending() {
            self.hot.attend(rings);
        }
        let read = rings.read(socket, most, copy)?;
        if rings.must_drain() {
            self.hot.attend(rings);
            rings.drain(socket);
        }
        Ok(read)
    }

    /// To be called before `len` bytes are offered to a socket.
    fn space(&mut self, stream: &Near, len: usize) {
        let Some(spacer) = &mut self.spacer else { return };
        if len >= WORTH_SPACING && stream.loops_back() && spacer.space().is_err() {
            self.spacer = None;
        }
    }

    /// Sees to it that a sleep that begins at `now` ends at `deadline` at the latest.
    ///
    /// The timer is set to a time, not to a wait: since the caller has read `now`, it may have sent
    /// packets, or lost its core.
    fn set_timer(&mut self, now: Instant, deadline: Instant) {
        if self.rings_at.is_some_and(|at| rings_in_time(at, now, deadline)) {
            return;
        }
        let never_again = Timespec { tv_sec: 0, tv_nsec: 0 };
        // If that time has passed, the timer rings at once.
        let it_value = self.clock.kernel_time(deadline);
        let value = Itimerspec { it_interval: never_again, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &value)
            .expect("it is a timer, and the time is valid");
        self.rings_at = Some(deadline);
    }
}

/// How many events to ask for. A turn ends by sending what it has gathered, and whoever receives
/// that can begin: with a few at a time, the next stage works on some connections while this one
/// works on others. With all at once, a crowd moves from stage to stage as one, and all but one of
/// them wait.
///
/// (Over two cores, 32 connections made 117 k round trips per second with 8 at a time, 98 k with up
/// to 256; with 8 for ever, 1,000 connections made 85 k instead of 115 k.)
#[derive(Debug)]
struct Portion {
    size: usize,
    was_full: bool,
}

impl Default for Portion {
    fn default() -> Self {
        Self { size: EVENTS_PER_TURN_MIN, was_full: false }
    }
}

impl Portion {
    /// So many events were there. Returns whether more may be.
    fn learn(&mut self, count: usize) -> bool {
        let is_full = count == self.size;
        if !is_full {
            self.size = EVENTS_PER_TURN_MIN;
        } else if self.was_full {
            self.size = (2 * self.size).min(EVENTS_PER_TURN_MAX);
        }
        self.was_full = is_full;
        is_full
    }
}

/// Whether a timer that rings `at`, or rang then, can stay as it is for a sleep from `now` to
/// `deadline`.
///
/// One that rings too early stays for the time being: to set it for each sleep costs microseconds
/// each time, because on a virtual machine the host is told. It is set when it would ring soon: the
/// sleep that it ended in vain would cost more. One that rang is set again, also if nobody slept
/// then: a `poll` has taken the ring.
fn rings_in_time(at: Instant, now: Instant, deadline: Instant) -> bool {
    now < at && at <= deadline && (at == deadline || now + SOON < at)
}

impl Streams for Kernel {
    type Stream = Near;

    fn watch(&mut self, key: Key, stream: &Near) -> io::Result<()> {
        use epoll::EventFlags as F;
        let mut flags = F::IN | F::OUT | F::PRI | F::RDHUP | F::ET;
        if let Some(rings) = stream.rings() {
            // What is written to the socket always fits. Each time that the program takes it, it
            // would be reported.
            flags.remove(F::OUT);
            self.hot.adopt(rings, key);
        }
        Ok(epoll::add(&self.epoll, stream, epoll::EventData::new_u64(key.pack()), flags)?)
    }

    fn unwatch(&mut self, stream: &Near) {
        if let Some(rings) = stream.rings() {
            self.hot.remove(rings);
        }
        // Fails only for one that was never watched.
        let _ = epoll::delete(&self.epoll, stream);
    }

    fn release(&mut self, stream: &Near) {
        if let Some(rings) = stream.rings() {
            self.hot.release(rings);
        }
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Signs {
        use epoll::EventFlags as F;
        let slept = std::mem::take(&mut self.fresh);
        if !slept && !self.skips() {
            self.wait(Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        }
        // What did not fit among the events is reported next time.
        let is_full = self.portion.learn(self.count);
        let found = &self.found[..self.count];
        let signs = if !self.has_rnic || is_full || found.iter().any(|it| it.data.u64() == RNIC) {
            Signs::Maybe
        } else if slept {
            Signs::None
        } else {
            Signs::NotYet
        };
        let sockets = found.iter().filter(|event| event.data.u64() < RNIC);
        events.extend(sockets.map(|event| {
            // Copied out, because the kernel's structure is packed.
            let flags = event.flags;
            let failed = flags.contains(F::ERR);
            let over = failed || flags.contains(F::HUP);
            Event {
                key: Key::unpack(event.data.u64()),
                readable: over || flags.intersects(F::IN | F::RDHUP),
                writable: over || flags.contains(F::OUT),
                ending: over || flags.contains(F::RDHUP),
                urgent: flags.contains(F::PRI),
                failed,
                by_rings: false,
            }
        }));
        self.hot.poll(events);
        signs
    }

    fn complete(&mut self, stream: &Near, event: &mut Event) {
        let Some(rings) = stream.rings() else { return };
        if event.by_rings {
            if rings.must_drain() {
                self.hot.attend(rings);
                rings.drain(stream.as_fd());
            }
            rings.serve(stream.as_fd());
            event.failed |= rings.has_lost_bytes(stream.as_fd());
            event.readable |= event.failed;
        } else {
            self.hot.attend(rings);
            event.readable = true;
            event.writable = rings.hear(stream.as_fd(), event.ending);
            // The kernel takes a token that was not read for a byte of the stream.
            event.failed = event.ending && rings.has_dropped_bytes(stream.as_fd());
            event.failed |= rings.has_lost_bytes(stream.as_fd());
        }
        // Who reads must not stop before the end, which nothing else tells of.
        event.ending |= rings.is_finished();
    }

    fn sleep(&mut self, now: Instant, deadline: Option<Instant>) {
        if !self.hot.fall_asleep(now) {
            return;
        }
        let deadline = [deadline, self.hot.deadline(now)].into_iter().flatten().min();
        if let Some(deadline) = deadline {
            self.set_timer(now, deadline);
        }
        self.wait(None);
        self.fresh = true;
        self.hot.wake_up();
    }

    fn read(&mut self, stream: &Near, room: &Vacant<'_>) -> io::Result<usize> {
        let socket = stream.as_fd();
        match stream.rings() {
            None => room.read_from(socket),
            Some(rings) => {
                self.read_rings(rings, socket, room.len(), |span| foreign::copy(span, room))
            }
        }
    }

    fn write(&mut self, stream: &Near, bytes: &Readable<'_>) -> io::Result<usize> {
        let socket = stream.as_fd();
        match stream.rings() {
            None => {
                self.space(stream, bytes.len());
                smcr_os::send(socket, bytes)
            }
            Some(rings) => {
                self.hot.attend(rings);
                rings.write(socket, |span| foreign::copy(bytes, span))
            }
        }
    }

    fn read_slice(&mut self, stream: &Near, room: &mut [u8]) -> io::Result<usize> {
        if let Some(rings) = stream.rings() {
            let most = room.len();
            let copy = |span: &Span<'_>| foreign::copy_out(span, room);
            return self.read_rings(rings, stream.as_fd(), most, copy);
        }
        // A program may share the socket, and let it wait.
        Ok(rustix::net::recv(stream, room, RecvFlags::DONTWAIT)?.0)
    }

    fn write_slice(&mut self, stream: &Near, bytes: &[u8]) -> io::Result<usize> {
        if let Some(rings) = stream.rings() {
            self.hot.attend(rings);
            return rings.write(stream.as_fd(), |span| foreign::copy_in(span, bytes));
        }
        self.space(stream, bytes.len());
        Ok(rustix::net::send(stream, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
    }

    fn write_urgent(&mut self, stream: &Near, byte: u8) -> io::Result<()> {
        if stream.rings().is_some() {
            // It keeps its place, and is an ordinary byte.
            return self.write_slice(stream, &[byte]).map(drop);
        }
        match rustix::net::send(stream, &[byte], URGENT) {
            // Before Linux 5.15, or built without it, the kernel has no urgent bytes for a program
            // of this host. It keeps its place here, too.
            Err(Errno::OPNOTSUPP) => self.write_slice(stream, &[byte]).map(drop),
            sent => {
                assert_eq!(sent?, 1, "one byte is taken or refused");
                Ok(())
            }
        }
    }

    fn bypassed(&self, stream: &Near) -> (u64, u64) {
        // What the other one has sent, this one gets.
        stream.rings().map_or((0, 0), |rings| rings.short_totals())
    }

    fn time(&self, _: Instant) -> Instant {
        self.clock.now()
    }

    fn core_of(&self, stream: &Near) -> Option<usize> {
        if stream.rings().is_some() {
            return None;
        }
        sockopt::socket_incoming_cpu(stream).ok().and_then(|core| core.try_into().ok())
    }

    fn has_more(&mut self, stream: &Near) -> bool {
        match stream.rings() {
            None => rustix::io::ioctl_fionread(stream).is_ok_and(|bytes| bytes > 0),
            // A read says what is wrong.
            Some(rings) => rings.readable() != Ok(0),
        }
    }

    fn is_to_reset(&self, stream: &Near) -> bool {
        if !stream.resets_at_end() {
            return false;
        }
        let mut polled = [PollFd::new(stream, PollFlags::empty())];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let is_found = poll(&mut polled, Some(&at_once)).is_ok_and(|count| count > 0);
        is_found && polled[0].revents().contains(PollFlags::HUP)
    }

    fn ahead(&mut self, stream: &Near) -> Ahead {
        // In this order: whether a byte is urgent is certain once it is there.
        if !self.has_more(stream) {
            Ahead::Nothing
        } else if stream.rings().is_none()
            && smcr_os::tcp::is_at_mark(stream.as_fd()).is_ok_and(|at_mark| at_mark)
        {
            Ahead::Urgent
        } else {
            Ahead::Bytes
        }
    }

    fn finish(&mut self, stream: &Near) {
        if let Some(rings) = stream.rings() {
            rings.finish();
        }
        if stream.is_program() {
            // A program with the preload library tells an end from a reset by this name. Without
            // one, because all are taken, it takes the end for a reset, which loses nothing.
            let _ = rustix::net::bind(stream, &SocketAddrUnix::new_unnamed());
        }
        // Fails only on a socket that is already reset, and says so on the next read.
        let _ = rustix::net::shutdown(stream, rustix::net::Shutdown::Write);
    }

    fn reset_on_close(&mut self, stream: &Near) {
        let _ = sockopt::set_socket_linger(stream, Some(Duration::ZERO));
    }
}

/// How an urgent byte is sent.
const URGENT: SendFlags = SendFlags::OOB.union(SendFlags::NOSIGNAL).union(SendFlags::DONTWAIT);
/// In so many turns the kernel is not asked, while rings are looked at: it takes longer to answer
/// than all of them.
const SKIPPED_MAX: u32 = 3;
/// How soon a timer rings that is worth setting. While messages come and go, most sleeps are
/// shorter. (With a value near the delay of acknowledgements, each of them would need a setting.)
const SOON: Duration = Duration::from_micros(60);
/// Marks descriptors that only end a sleep. No key packs to this or to the next one: it would need
/// more bits.
const WAKER: u64 = u64::MAX;
/// Marks the descriptor of the RNIC.
const RNIC: u64 = u64::MAX - 1;

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use rustix::net::send;
    use rustix::time::timerfd_gettime;

    use smcr_memory::{Region, Rmb};
    use smcr_proto::RmbeSize;

    use super::*;
    use crate::mailbox::Waker;
    use crate::near::AtEnd;

    const KEY: Key = Key { slot: 7, generation: 1, far: false, turn: 0 };

    /// An application's socket, and ours, watched.
    fn connection(kernel: &mut Kernel) -> (TcpStream, Near) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let application = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        let near = OwnedFd::from(near);
        sockopt::set_socket_oobinline(&near, true).unwrap();
        let near = Near::from(near);
        kernel.watch(KEY, &near).unwrap();
        assert!(next_event(kernel).writable);
        (application, near)
    }

    fn next_event(kernel: &mut Kernel) -> Event {
        kernel.sleep(Instant(0), Some(Instant(10_000_000_000)));
        let mut events = Vec::new();
        kernel.poll(&mut events);
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].key, KEY);
        events[0]
    }

    /// Kernels without urgent bytes in Unix sockets refuse one. It was taken for the end of the
    /// program, and the connection stood still. No socket of packets has them.
    #[test]
    fn an_urgent_byte_is_an_ordinary_one_where_the_kernel_has_none() {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let waker = Waker::new().unwrap();
        let mut kernel = Kernel::new(waker.descriptor(), None, Clock::new()).unwrap();
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (near, program) = socketpair(family, kind, SocketFlags::NONBLOCK, None).unwrap();
        assert_eq!(send(&near, b"!", URGENT), Err(Errno::OPNOTSUPP), "as on those kernels");
        kernel.write_urgent(&Near::from(near), b'!').unwrap();
        let mut room = [0; 2];
        let read = rustix::io::read(&program, &mut room).unwrap();
        assert_eq!(&room[..read], b"!");
    }

    /// A program's end is a reset when it has said so, and nobody has its socket any more. Of TCP
    /// sockets the kernel says it.
    #[test]
    fn a_program_that_resets_at_its_end_has_to_close_all_of_it() {
        let waker = Waker::new().unwrap();
        let mut kernel = Kernel::new(waker.descriptor(), None, Clock::new()).unwrap();
        for resets in [false, true] {
            let (near, program) = std::os::unix::net::UnixStream::pair().unwrap();
            let at_end = AtEnd::default();
            let near = Near::of_program(near.into(), at_end.clone(), None);
            let copy = program.try_clone().unwrap();
            if resets {
                at_end.reset();
            }
            assert!(!kernel.is_to_reset(&near), "it is open");
            program.shutdown(std::net::Shutdown::Write).unwrap();
            assert!(!kernel.is_to_reset(&near), "it only sends no more");
            drop(program);
            assert!(!kernel.is_to_reset(&near), "somebody has a copy");
            drop(copy);
            assert_eq!(kernel.is_to_reset(&near), resets);
        }
        let (application, near) = connection(&mut kernel);
        drop(application);
        assert!(!kernel.is_to_reset(&near));
    }

    /// What a write says of a program that has crashed, and a read behind it. The end of a stream
    /// looks the same to the read, but the write tells the two apart.
    #[test]
    fn a_write_takes_the_error_and_says_whether_there_was_an_end() {
        let waker = Waker::new().unwrap();
        let mut kernel = Kernel::new(waker.descriptor(), None, Clock::new()).unwrap();
        let cases = [(false, io::ErrorKind::ConnectionReset), (true, io::ErrorKind::BrokenPipe)];
        for (finishes, error) in cases {
            let (mut application, near) = connection(&mut kernel);
            application.write_all(b"last").unwrap();
            if finishes {
                application.shutdown(std::net::Shutdown::Write).unwrap();
            }
            sockopt::set_socket_linger(&application, Some(Duration::ZERO)).unwrap();
            drop(application);
            assert_eq!(kernel.write_slice(&near, b"x").unwrap_err().kind(), error);
            let mut room = [0; 8];
            assert_eq!(kernel.read_slice(&near, &mut room).unwrap(), 4);
            assert_eq!(kernel.read_slice(&near, &mut room).unwrap(), 0);
            kernel.unwatch(&near);
        }
    }

    /// Where copies are fast, there is no spacer, so this one is put there.
    #[test]
    fn what_is_long_and_for_a_program_on_this_host_is_moved() {
        let mut kernel =
            Kernel::new(Waker::new().unwrap().descriptor(), None, Clock::new()).unwrap();
        let (_application, near) = connection(&mut kernel);
        let (unix, _program) = std::os::unix::net::UnixStream::pair().unwrap();
        let program = Near::of_program(unix.into(), AtEnd::default(), None);
        kernel.spacer = Some(Spacer::anywhere());
        for (stream, len, moves) in [
            (&near, WORTH_SPACING - 1, false),
            (&near, WORTH_SPACING, true),
            (&program, WORTH_SPACING, false),
        ] {
            let before = kernel.spacer.as_ref().unwrap().pending();
            kernel.write_slice(stream, &vec![0; len]).unwrap();
            let after = kernel.spacer.as_ref().unwrap().pending();
            assert_eq!(after > before, moves, "{len} bytes to {stream:?}");
        }
        let element = Rmb::carve(Region::new(65_536).unwrap(), RmbeSize::KIB_64).take().unwrap();
        let len = u32::try_from(WORTH_SPACING).unwrap();
        let before = kernel.spacer.as_ref().unwrap().pending();
        kernel.write(&near, &element.readable([0..len, 0..0])).unwrap();
        assert!(kernel.spacer.as_ref().unwrap().pending() > before, "bytes of an element");
    }

    /// A poller that asks its RNIC for packets each time it wakes makes a system call in vain for
    /// every message of an application.
    #[test]
    fn the_rnic_is_heard_of_when_it_has_packets() {
        let (rnic, wire) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let waker = Waker::new().unwrap();
        let mut kernel = Kernel::new(waker.descriptor(), Some(rnic.as_fd()), Clock::new()).unwrap();
        let (mut application, _near) = connection(&mut kernel);
        let mut events = Vec::new();
        application.write_all(b"a request").unwrap();
        kernel.sleep(Instant(0), None);
        assert_eq!((kernel.poll(&mut events), events.len()), (Signs::None, 1));
        wire.send(b"a packet").unwrap();
        for _ in 0..2 {
            kernel.sleep(Instant(0), None);
            let signs = kernel.poll(&mut events);
            assert_eq!((signs, events.len()), (Signs::Maybe, 1), "as long as it is there");
        }
        rnic.recv(&mut [0; 100]).unwrap();
        application.write_all(b"another").unwrap();
        kernel.sleep(Instant(0), None);
        assert_eq!((kernel.poll(&mut events), events.len()), (Signs::None, 2));
        assert_eq!(kernel.poll(&mut events), Signs::NotYet, "without a sleep");
        wire.send(b"a packet").unwrap();
        assert_eq!(kernel.poll(&mut events), Signs::Maybe, "without a sleep");
        let mut blind = Kernel::new(waker.descriptor(), None, Clock::new()).unwrap();
        assert_eq!(blind.poll(&mut events), Signs::Maybe, "who knows");
    }

    /// A few are served at a time, and a crowd is not kept waiting for that.
    #[test]
    fn a_crowd_is_served_in_growing_portions() {
        let (mut portion, min) = (Portion::default(), EVENTS_PER_TURN_MIN);
        let sizes = |portion: &mut Portion, waiting: &[usize]| -> Vec<usize> {
            let mut ask = |waiting: usize| {
                let asked = portion.size;
                assert_eq!(portion.learn(waiting.min(asked)), waiting >= asked);
                asked
            };
            waiting.iter().map(|&waiting| ask(waiting)).collect()
        };
        // Thirty-two connections, as often as they come.
        for _ in 0..3 {
            assert_eq!(sizes(&mut portion, &[32, 24, 16, 0]), [min, min, 2 * min, 4 * min]);
        }
        assert_eq!(sizes(&mut portion, &[min, 0, min, 1, 0]), [min; 5]);
        let crowd = sizes(&mut portion, &[9_000; 12]);
        assert_eq!(crowd.last(), Some(&EVENTS_PER_TURN_MAX));
        assert!(crowd.iter().sum::<usize>() > 4 * EVENTS_PER_TURN_MAX);
    }

    /// Each sleep has a deadline, usually that of the retransmission timer, and nearly all of them
    /// end before it.
    #[test]
    fn a_timer_that_rings_in_time_is_not_set_again() {
        let at = |us| Instant(1_000_000_000 + us * 1_000);
        let soon = u64::try_from(SOON.as_micros()).unwrap();
        for (rings, now, deadline, stays, why) in [
            (900, 100, 900, true, "at the deadline"),
            (900, 899, 900, true, "soon, but not in vain"),
            (900, 100, 5_000, true, "early, but not soon"),
            (900, 900 - soon - 1, 5_000, true, "early, and hardly soon"),
            (900, 900 - soon, 5_000, false, "soon, and in vain"),
            (900, 100, 899, false, "too late"),
            (900, 900, 900, false, "it rang just now"),
            (900, 901, 5_000, false, "it rang long ago"),
            (900, 901, 900, false, "it rang, and so has the deadline passed"),
        ] {
            assert_eq!(rings_in_time(at(rings), at(now), at(deadline)), stays, "{why}");
        }
        let clock = Clock::new();
        let mut kernel = Kernel::new(Waker::new().unwrap().descriptor(), None, clock).unwrap();
        let (zero, ms) = (Instant(0), Duration::from_millis);
        kernel.sleep(zero, Some(zero + ms(40)));
        assert!(clock.now() >= zero + ms(40));
        kernel.set_timer(zero + ms(41), zero + ms(60));
        kernel.set_timer(zero + ms(41), zero + ms(50));
        assert_eq!(kernel.rings_at, Some(zero + ms(50)), "the earlier one counts");
        kernel.sleep(zero + ms(41), Some(zero + ms(60_000)));
        assert_eq!(kernel.rings_at, Some(zero + ms(50)));
        assert!(clock.now() < zero + ms(10_000), "it ends a sleep early");
        kernel.sleep(zero + ms(100), Some(zero));
    }

    /// Between the moment at which a poller looks at the clock and the one at which it sets its
    /// timer it sends packets, and it may lose its core. A timer that was set to a wait would ring
    /// later than we know by that time.
    #[test]
    fn a_timer_rings_at_its_deadline_however_late_it_is_set() {
        let at = |ms| Instant(0) + Duration::from_millis(ms);
        let clock = Clock::started_before(Duration::from_millis(50));
        let mut kernel = Kernel::new(Waker::new().unwrap().descriptor(), None, clock).unwrap();
        let rest = |kernel: &Kernel| timerfd_gettime(&kernel.timer).unwrap().it_value;
        kernel.set_timer(at(0), at(40));
        assert_eq!((rest(&kernel).tv_sec, rest(&kernel).tv_nsec), (0, 0), "it is to have rung");
        kernel.set_timer(at(40), at(100_000));
        let rest = rest(&kernel);
        let rest = Duration::from_secs(rest.tv_sec.try_into().unwrap())
            + Duration::from_nanos(rest.tv_nsec.try_into().unwrap());
        let left = Duration::from_millis(100_000 - 50);
        assert!(!rest.is_zero() && rest <= left, "{rest:?} from now on");
    }

    /// A poller that spins takes the ring of its timer without a sleep. If it then believed that
    /// the timer will ring, its next sleep would not end.
    #[test]
    fn a_ring_that_ended_no_sleep_is_not_waited_for() {
        let (over, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let at = |ms| Instant(0) + Duration::from_millis(ms);
            let clock = Clock::started_before(Duration::from_millis(50));
            let mut kernel = Kernel::new(Waker::new().unwrap().descriptor(), None, clock).unwrap();
            kernel.set_timer(at(0), at(10));
            while !kernel.found.iter().any(|event| event.data.u64() == WAKER) {
                kernel.poll(&mut Vec::new());
            }
            kernel.sleep(at(20), Some(at(30)));
            over.send(()).unwrap();
        });
        ended.recv_timeout(Duration::from_secs(20)).expect("the sleep ends");
    }

    /// An urgent byte keeps its place: what `telnet` throws away up to its interrupt is what was
    /// typed before it, and no byte is lost, not even the urgent one.
    // RFC 7609 4.7.5 #1: P and U announce urgent data
    #[test]
    fn an_urgent_byte_is_found_in_its_place() {
        let mut kernel =
            Kernel::new(Waker::new().unwrap().descriptor(), None, Clock::new()).unwrap();
        let (application, near) = connection(&mut kernel);
        send(&application, b"before", SendFlags::empty()).unwrap();
        send(&application, b"!", SendFlags::OOB).unwrap();
        send(&application, b"after", SendFlags::empty()).unwrap();
        let event = next_event(&mut kernel);
        assert!(event.readable && event.urgent && !event.ending && !event.failed);
        let mut room = [0; 100];
        assert_eq!(kernel.ahead(&near), Ahead::Bytes);
        assert_eq!(kernel.read_slice(&near, &mut room).unwrap(), 6);
        assert_eq!(kernel.ahead(&near), Ahead::Urgent);
        assert_eq!(kernel.read_slice(&near, &mut room[..1]).unwrap(), 1);
        assert_eq!((room[0], kernel.ahead(&near)), (b'!', Ahead::Bytes));
        assert_eq!(kernel.read_slice(&near, &mut room).unwrap(), 5);
        assert_eq!(kernel.ahead(&near), Ahead::Nothing);
    }

    /// The other application must find the byte out of band, and the mark where it was put.
    // RFC 7609 4.7.5 #2: tell application of urgent data
    #[test]
    fn an_urgent_byte_is_written_as_urgent() {
        let mut kernel =
            Kernel::new(Waker::new().unwrap().descriptor(), None, Clock::new()).unwrap();
        let (application, near) = connection(&mut kernel);
        kernel.write_slice(&near, b"before").unwrap();
        kernel.write_urgent(&near, b'!').unwrap();
        kernel.write_slice(&near, b"after").unwrap();
        let mut room = [0; 100];
        let out_of_band = rustix::net::recv(&application, &mut room, RecvFlags::OOB).unwrap();
        assert_eq!((out_of_band.0, room[0]), (1, b'!'));
        assert_eq!(rustix::io::read(&application, &mut room).unwrap(), 6);
        assert!(smcr_os::tcp::is_at_mark(application.as_fd()).unwrap());
        assert_eq!(rustix::io::read(&application, &mut room).unwrap(), 5);
    }

    /// The end of a stream is no failure, a reset is.
    #[test]
    fn a_reset_is_told_from_the_end_of_the_stream() {
        let mut kernel =
            Kernel::new(Waker::new().unwrap().descriptor(), None, Clock::new()).unwrap();
        let (application, _near) = connection(&mut kernel);
        application.shutdown(std::net::Shutdown::Write).unwrap();
        let event = next_event(&mut kernel);
        assert!(event.readable && event.ending && !event.failed);
        let application = Near::from(OwnedFd::from(application));
        kernel.reset_on_close(&application);
        drop(application);
        let event = next_event(&mut kernel);
        assert!(event.readable && event.writable && event.ending && event.failed);
    }

    #[test]
    fn a_key_survives_the_kernel() {
        for far in [false, true] {
            let key = Key { slot: 0xabcd, generation: 0xffff, far, turn: 0xab };
            assert_eq!(Key::unpack(key.pack()), key);
            assert_ne!(key.pack(), WAKER);
        }
    }
}
