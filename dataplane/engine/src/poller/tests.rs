use std::io::Write as _;
use std::net::{self, Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileExt as _;
use std::sync::mpsc;

use smcr_os::scheduling;
use smcr_os::udp::{Steering, UdpSocket};
use smcr_proto::{Gid, MacAddress, Mtu};
use smcr_rnic::roce::udp::{self, Config, Place, Udp};
use smcr_rnic::roce::{self, Parameters, Share, join_all};
use smcr_rnic::{Opening as _, Port, Rnic as _, Tag, Work, shm, sim};

use super::*;
use crate::clock::Clock;
use crate::idle::Policy;
use crate::limits::COMMANDS_MAX;
use crate::mail::Neighbours;
use crate::mailbox::mailbox;
use crate::names::{Activity, GroupId, LinkId, LlcBytes};
use crate::near::Near;

/// What the only poller of a process shares with the thread of the test.
fn ends<F: Fabric>(
    commands: Receiver<CommandOf<F, Kernel>>,
    reports: Sender<Report<Near>>,
    waker: &Waker,
) -> Ends<F, Kernel> {
    Ends {
        commands,
        letters: mailbox(1, waker.clone()).1,
        waker: waker.clone(),
        reports,
        neighbours: Arc::new(Neighbours::new(1)),
        index: 0,
        owners: Arc::new(Owners::new()),
        counters: Arc::default(),
        gauges: Arc::new(Gauges::new()),
        observe: Box::new(|_| {}),
    }
}

/// A gateway that was told to stop hung for ever if its poller went to sleep right after the
/// turn that received the command: beside busy programs, or with `spin_us = 0`.
#[test]
fn a_thread_that_never_spins_ends_when_it_is_told_to() {
    let waker = Waker::new().unwrap();
    let (control, commands) = mailbox(COMMANDS_MAX, waker.clone());
    let (reports, _control) = mailbox(1, Waker::new().unwrap());
    let (over, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let kernel = Kernel::new(waker.descriptor(), None, Clock::new()).unwrap();
        let ends = ends::<Option<sim::Fabric>>(commands, reports, &waker);
        let idle = Idle::new(Policy::Adaptive, Duration::ZERO);
        let affinity = Affinity::of_this_thread().unwrap();
        let memory = Region::new(1 << 20).unwrap();
        let priority = Priority::of_this_thread(0, false);
        Poller::new(None, kernel, ends, memory).run(idle, &affinity, priority);
        over.send(()).unwrap();
    });
    control.send(Command::Stop).expect("there is room");
    ended.recv_timeout(Duration::from_secs(20)).expect("the thread ends");
}

/// A UDP port that nobody has at any address. Another process may take it before we do, so the
/// caller cannot rely on it for long.
fn free_port() -> u16 {
    let socket = net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    socket.local_addr().unwrap().port()
}

/// One NIC with two fabrics at `here`. The first gets each second packet of a stream, whoever it is
/// for.
fn shared_nic(here: SocketAddr) -> [(roce::Rnic, roce::Fabric<Udp>); 2] {
    const PSN_LAST_BYTE: u32 = 11;
    let steering = Steering { byte_at: PSN_LAST_BYTE, shares: 2 };
    let sockets = UdpSocket::bind_shares(here, 1 << 20, steering).unwrap();
    let part = |(socket, index): (UdpSocket, u32)| {
        let mut last = 1 + index;
        let setup = Parameters {
            backing: smcr_memory::Backing::Private,
            port: Port { gid: Gid::from_ip(here.ip()), mac: MacAddress([2; 6]), mtu: Mtu::B1024 },
            udp_port: here.port(),
            share: Share { index, count: 2 },
            payload_max: 1024,
            window_max: 1 << 20,
            entropy: Box::new(move || {
                last = last.wrapping_mul(0x9e37_79b1).rotate_left(7);
                last
            }),
            path: Arc::new(|_, _| Ok(1500)),
        };
        (setup, Udp::new(socket))
    };
    let parts = sockets.into_iter().zip(0..).map(part).collect();
    <[_; 2]>::try_from(join_all(parts).unwrap()).unwrap()
}

/// Makes a poller wake without a packet. It is about to sleep again then, or sleeps already.
///
/// The first call may come before it has gone to sleep for the first time, and do nothing. A sleep
/// is counted when it is announced, so the second call ends the one that was counted before.
fn wake_in_vain(waker: &Waker, counters: &Counters, check_time: impl Fn()) {
    for _ in 0..2 {
        let sleeps = counters.sleeps.get();
        waker.wake();
        while counters.sleeps.get() == sleeps {
            check_time();
            std::thread::yield_now();
        }
    }
}

/// A poller does not ask its RNIC after a sleep that something else has ended. And packets for it
/// may come by its own socket, or by the hands of another poller. Whichever it is, and whatever has
/// woken it before, a packet must be taken in while the poller has nothing else to wake for. Nobody
/// retransmits here, so one that is overlooked once is never taken in.
#[test]
fn a_sleeper_takes_in_what_comes_by_its_socket_or_by_another_poller() {
    let port = free_port();
    let [here, there] = [1, 2].map(|host| SocketAddr::from(([127, 12, 1, host], port)));
    let [(_, mut first), (mut rnic, fabric)] = shared_nic(here);
    let config = Config { port, ..Config::on(Place::Address(there.ip())) };
    let (mut far_rnic, mut far) = udp::open(&config).unwrap();
    let (near_domain, far_domain) = (rnic.open_domain().unwrap(), far_rnic.open_domain().unwrap());
    let (near_end, far_end) = (rnic.open(near_domain).unwrap(), far_rnic.open(far_domain).unwrap());
    let (near_address, far_address) = (near_end.address(), far_end.address());

    let (clock, waker) = (Clock::new(), Waker::new().unwrap());
    let (control, commands) = mailbox(COMMANDS_MAX, waker.clone());
    let (report, reports) = mailbox(8, Waker::new().unwrap());
    let ends = ends(commands, report, &waker);
    let counters = Arc::clone(&ends.counters);
    let thread = std::thread::spawn(move || {
        let kernel = Kernel::new(ends.waker.descriptor(), fabric.event_descriptor(), clock);
        let idle = Idle::new(Policy::Block, Duration::ZERO);
        let affinity = Affinity::of_this_thread().unwrap();
        let (memory, priority) =
            (Region::new(1 << 20).unwrap(), Priority::of_this_thread(0, false));
        let mut poller = Poller::new(fabric, kernel.unwrap(), ends, memory);
        poller.run(idle, &affinity, priority);
    });
    let (link, group, activity) = (LinkId(1), GroupId(1), Arc::new(Activity::default()));
    let qp = near_end.connect(far_address).unwrap();
    control.send(Command::AddLink { link, group, qp, activity }).expect("there is room");
    let qp = far.adopt(clock.now(), far_end.connect(near_address).unwrap());

    let mut out = Vec::with_capacity(4);
    for round in 0..ROUNDS {
        let limit = clock.now() + Duration::from_secs(20);
        wake_in_vain(&waker, &counters, || assert!(clock.now() < limit, "{round}: it is awake"));
        // The first byte says that this is an LLC message.
        let message = [1 + round; 44];
        far.post(qp, &mut vec![Work::Send { message, tag: Tag(0) }]);
        far.transmit(clock.now());
        let mut heard = None;
        while heard.is_none() || out.is_empty() {
            assert!(clock.now() < limit, "{round}: heard {heard:?}, acknowledged {out:?}");
            first.poll(clock.now(), &mut Vec::new());
            far.poll(clock.now(), &mut out);
            if let Some(Report::LlcReceived { message, .. }) = reports.receive() {
                heard = Some(message);
            }
            std::thread::yield_now();
        }
        assert_eq!(heard, Some(LlcBytes::Short(message)));
        out.clear();
    }
    assert_eq!(first.counters().strays, u64::from(ROUNDS) / 2, "the others came by its socket");
    control.send(Command::Stop).expect("there is room");
    thread.join().unwrap();
}

/// A NIC in memory has done by the end of a turn what the turn has asked of it. Between two
/// applications of one host, that must not wait until others had the core.
#[test]
fn what_a_turn_sends_to_this_host_it_takes_in_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let (mut rnic, fabric) = shm::open(path, 1).unwrap().remove(0);
    let domain = rnic.open_domain().unwrap();
    let (first, second) = (rnic.open(domain).unwrap(), rnic.open(domain).unwrap());
    let (here, there) = (first.address(), second.address());
    let qps = [first.connect(there).unwrap(), second.connect(here).unwrap()];

    let (clock, waker) = (Clock::new(), Waker::new().unwrap());
    let (control, commands) = mailbox(COMMANDS_MAX, waker.clone());
    let (report, reports) = mailbox(8, Waker::new().unwrap());
    let kernel = Kernel::new(waker.descriptor(), fabric.event_descriptor(), clock).unwrap();
    let memory = Region::new(1 << 20).unwrap();
    let mut poller = Poller::new(fabric, kernel, ends(commands, report, &waker), memory);
    let activity = Arc::new(Activity::default());
    for (qp, number) in qps.into_iter().zip(1..) {
        let (link, activity) = (LinkId(number), Arc::clone(&activity));
        let added = Command::AddLink { link, group: GroupId(number), qp, activity };
        control.send(added).expect("there is room");
    }
    let limit = clock.now() + Duration::from_secs(20);
    for round in 0..9_u8 {
        let said = LlcBytes::Short([1 + round; 44]);
        let message = said.clone();
        control.send(Command::SendLlc { link: LinkId(1), message }).expect("there is room");
        assert!(poller.turn(clock.now()));
        // The first time, the two ends have to find each other.
        while round == 0 && reports.is_empty() {
            assert!(clock.now() < limit, "they do not");
            poller.turn(clock.now());
            std::thread::yield_now();
        }
        match reports.receive() {
            Some(Report::LlcReceived { message, .. }) => assert_eq!(message, said),
            other => panic!("not heard in the same turn, but {other:?}"),
        }
    }
}

const ROUNDS: u8 = 100;

/// A poller without an RNIC, to which nobody says anything.
fn without_rnic() -> Poller<Option<sim::Fabric>, Kernel> {
    let waker = Waker::new().unwrap();
    let (_, commands) = mailbox(COMMANDS_MAX, waker.clone());
    let (reports, _) = mailbox(1, Waker::new().unwrap());
    let kernel = Kernel::new(waker.descriptor(), None, Clock::new()).unwrap();
    let ends = ends::<Option<sim::Fabric>>(commands, reports, &waker);
    Poller::new(None, kernel, ends, Region::new(1 << 20).unwrap())
}

/// A poller without a core of its own that carries a stream, may be real-time, and waits for a
/// third of the time leaves its core, if there is another one.
#[test]
fn a_poller_in_a_crowd_takes_its_core_for_contended() {
    let affinity = Affinity::of_this_thread().unwrap();
    let has_choice = affinity.cores().count() > 1;
    for (may_be_realtime, carries, waits_ms, contended) in [
        (true, 1 << 20, 3, has_choice),
        (false, 1 << 20, 3, false),
        (true, 64, 3, false),
        (true, 1 << 20, 2, false),
    ] {
        let mut poller = without_rnic();
        let mut priority = Priority::of_this_thread(0, may_be_realtime);
        let mut idle = Idle::new(Policy::Adaptive, Duration::from_millis(20)).without_core();
        for window in 1..10 {
            assert!(!idle.is_contended());
            let now = Instant(window * 10_000_000);
            let mut schedstat = tempfile::tempfile().unwrap();
            writeln!(schedstat, "0 {} 0", window * waits_ms * 1_000_000).unwrap();
            poller.load.note(0);
            poller.shared.counters.bytes_in.add(carries);
            let place = place::Place::at_first(&idle, &affinity, Waits::told_by(Some(schedstat)));
            poller.set_priority(now, &place, &mut priority, &mut idle);
            if idle.after_turn(now, true) == Advice::Sleep {
                break;
            }
        }
        assert_eq!(idle.is_contended(), contended, "{may_be_realtime}, {carries}, {waits_ms}");
    }
}

/// What a thread is advised and does, after a window of 10 ms.
#[derive(Debug)]
struct After {
    sleeps: bool,
    batch: bool,
    /// Its counters `gathering` and `gatherings`.
    told: [u64; 2],
}

/// A poller in windows of 10 ms in which so many connections come, something moves so often, for
/// another one each time, and its thread waits for so many microseconds: eight of them, and four in
/// which none come.
fn carry_short_connections(came: u64, pieces: u16, waits_us: u64) -> Vec<After> {
    let mut poller = without_rnic();
    let affinity = Affinity::of_this_thread().unwrap();
    let schedstat = tempfile::tempfile().unwrap();
    let waits = Waits::told_by(Some(schedstat.try_clone().unwrap()));
    let mut priority = Priority::of_this_thread(0, false);
    let mut idle = Idle::new(Policy::Adaptive, Duration::from_millis(20));
    let mut place = place::Place::at_first(&idle, &affinity, waits);
    let windows = (1..=12).map(|window| (window, if window <= 8 { came } else { 0 }));
    let carry = |(window, came): (u64, u64)| {
        let now = Instant(window * 10_000_000);
        let line = format!("0 {} 0", window * waits_us * 1000);
        schedstat.write_all_at(line.as_bytes(), 0).unwrap();
        (0..pieces).for_each(|slot| poller.load.note(slot));
        poller.shared.counters.connections_tcp.add(came);
        poller.shared.counters.bytes_in.add(64 * came);
        poller.set_priority(now, &place, &mut priority, &mut idle);
        let advice = idle.after_turn(now, true);
        let sleeps = advice == Advice::Turn && idle.after_turn(now, false) == Advice::Sleep;
        poller.settle(&idle, &mut place, &affinity);
        let counters = &poller.shared.counters;
        let told = [counters.gathering.get(), counters.gatherings.get()];
        After { sleeps, batch: !scheduling::is_ordinary(), told }
    };
    windows.map(carry).collect()
}

/// A poller that carries many short connections, and waits for its core meanwhile, lets others go
/// on: it sleeps as soon as nothing moves, and does not interrupt anybody when it wakes up.
#[test]
fn a_poller_with_short_connections_lets_others_go_on() {
    for (came, pieces, waits_us, gathers) in
        [(10, 20, 1000, true), (9, 20, 1000, false), (10, 81, 1000, false), (10, 20, 999, false)]
    {
        // The class of a thread is its own.
        let carry = move || carry_short_connections(came, pieces, waits_us);
        let seen = std::thread::spawn(carry).join().unwrap();
        let [.., then, _, _, _, last] = &*seen else { panic!("twelve windows") };
        let count = u64::from(gathers);
        // Three windows say what the load is, three more for how much of them the thread waits.
        assert!(seen.iter().take(5).all(|after| after.told == [0, 0]), "{seen:?}");
        assert_eq!((then.batch, then.told), (gathers, [count; 2]), "{seen:?}");
        assert_eq!(then.sleeps, gathers, "{seen:?}");
        assert_eq!((last.batch, last.told), (false, [0, count]), "it is over: {seen:?}");
    }
}

/// In windows of 100 ms a poller carries this many connections, and its thread is awake for so much
/// of the time, while a program keeps its core, or does not. Returns how it is scheduled after
/// each of six: whether as a batch thread, and whether its nice value is raised.
fn carry_crowd(connections: u16, awake: u64, boost: u8, contended: bool) -> Vec<(bool, bool)> {
    let mut poller = without_rnic();
    let affinity = Affinity::of_this_thread().unwrap();
    let schedstat = tempfile::tempfile().unwrap();
    let waits = Waits::told_by(Some(schedstat.try_clone().unwrap()));
    let mut priority = Priority::of_this_thread(boost, false);
    let mut idle = Idle::new(Policy::Adaptive, Duration::from_millis(20));
    let place = place::Place::at_first(&idle, &affinity, waits);
    let mut now = Instant(1_000_000_000);
    for _ in 0..if contended { 3 } else { 0 } {
        assert_eq!(idle.after_turn(now, true), Advice::Yield);
        now = now + Duration::from_millis(4);
        idle.after_offer(now);
    }
    assert_eq!(idle.is_contended(), contended);
    let window = |at: u64| {
        let line = format!("{} {} 0", at * awake * 400_000, at * awake * 600_000);
        schedstat.write_all_at(line.as_bytes(), 0).unwrap();
        (0..connections).for_each(|slot| poller.load.note(slot));
        poller.shared.counters.bytes_in.add(64);
        poller.set_priority(now, &place, &mut priority, &mut idle);
        now = now + Duration::from_millis(100);
        // To raise it is refused to whoever may not.
        (priority.is_batch(), priority.is_raised())
    };
    (1..=6).map(window).collect()
}

/// Where others need its core, a poller with a crowd that always has something for it lets them go
/// on when it wakes up, if it could raise its nice value.
#[test]
fn a_poller_with_a_crowd_lets_others_go_on() {
    let may_raise = std::thread::spawn(|| carry_crowd(1, 50, 1, true)).join().unwrap()[0].1;
    for (connections, awake, boost, contended, batch) in [
        (512, 85, 1, true, true),
        (512, 85, 0, true, false),
        (512, 85, 1, false, false),
        (512, 50, 1, true, false),
        (128, 100, 1, true, false),
    ] {
        // The class of a thread is its own.
        let carry = move || carry_crowd(connections, awake, boost, contended);
        let seen = std::thread::spawn(carry).join().unwrap();
        let raised = contended && boost > 0 && may_raise;
        let batch = batch && may_raise;
        // What came before the first look is none; the next one says since when to count, and four
        // later it is known how much it was.
        let expected = [false, false, false, false, false, batch].map(|batch| (batch, raised));
        assert_eq!(seen, expected, "{:?}", (connections, awake, boost, contended));
    }
}
