//! A peer that has the socket of a NIC, but not its manners.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, SendFlags, SocketFlags, SocketType, accept, listen, send, socketpair,
};
use smcr_memory::Region;
use smcr_proto::{Gid, Mtu, Psn, Qpn};

use super::super::bell::Bell;
use super::super::directory::{Directory, mac_of};
use super::super::line::{Line, Packet};
use super::super::ring::{Ring, State};
use super::super::wire::{Message, Name};
use super::*;
use crate::{Messages, QpAddress};

/// Somebody with an address in the directory.
pub(super) struct Hostile {
    pub(super) directory: Directory,
    pub(super) listener: OwnedFd,
    pub(super) own: Name,
}

/// A queue pair whose other end is in hostile hands.
pub(super) struct Captured {
    pub(super) line: Line,
    pub(super) memory: Region,
    pub(super) bell: Bell,
    pub(super) qp: QpId,
}

impl Hostile {
    /// It is the end that calls, or the end that is called.
    pub(super) fn new(place: &TempDir, calls: bool) -> Self {
        let directory = Directory::open(place.path().to_str().unwrap()).unwrap();
        let mut gid = directory.new_gid().unwrap();
        // Of the addresses of others, chosen by chance, one in so many begins with these.
        gid.0[8..12].fill(if calls { 0 } else { 0xff });
        let listener = directory.listen(gid).unwrap();
        let own = Name { gid, qpn: Qpn(0x1234), psn: Psn(0x5678) };
        Self { directory, listener, own }
    }

    fn address(&self) -> QpAddress {
        let Name { gid, qpn, psn } = self.own;
        QpAddress { gid, mac: mac_of(gid), qpn, psn, mtu: Mtu::B1024 }
    }

    /// Opens a queue pair at the victim. Returns its address.
    pub(super) fn open_at(&self, victim: &mut Nic) -> (QpAddress, QpId) {
        let opening = victim.rnic.open_for(victim.domain, Messages::Long).unwrap();
        let address = opening.address();
        let qp = opening.connect(self.address()).unwrap();
        (address, victim.fabric.adopt(now(), qp))
    }

    pub(super) fn hello_to(&self, victim: QpAddress) -> Message {
        Message::Hello { caller: self.own, qpn: victim.qpn, psn: victim.psn }
    }

    pub(super) fn call(&self, gid: Gid) -> Line {
        Line { socket: self.directory.call(gid).unwrap().into(), token: 0 }
    }

    /// Brings a bell to the victim.
    fn bell_to(&self, victim: QpAddress) -> Bell {
        let line = self.call(victim.gid);
        let (qpn, psn) = (victim.qpn, victim.psn);
        line.send(&Message::Bell { caller: self.own, qpn, psn }, &[]).unwrap();
        Bell::over(line.socket)
    }

    /// Has the victim close something that nobody else has.
    pub(super) fn leave_behind(&self, what: UnixStream, victim: Gid) {
        let line = self.call(victim);
        let stranger = Message::Hello { caller: self.own, qpn: Qpn(0), psn: Psn(0) };
        line.send(&stranger, &[what.as_fd()]).unwrap();
        drop(what);
        // Who says hello twice must go.
        line.send(&stranger, &[]).unwrap();
        assert!(matches!(next(&line), Packet::End));
    }

    /// Calls the victim as an honest peer would.
    pub(super) fn capture(&self, victim: &mut Nic) -> Captured {
        let (address, qp) = self.open_at(victim);
        self.capture_at(address, qp)
    }

    /// The same for a queue pair of which it was told.
    fn capture_at(&self, address: QpAddress, qp: QpId) -> Captured {
        let (line, bell) = (self.call(address.gid), self.bell_to(address));
        let memory = Ring::memory().unwrap();
        line.send(&self.hello_to(address), &[memory.descriptor().unwrap()]).unwrap();
        assert!(matches!(next(&line), Packet::Message(Message::Welcome, _)));
        Captured { line, memory, bell, qp }
    }

    /// The next one who calls.
    pub(super) fn accept(&self) -> Line {
        let socket = accept(&self.listener);
        let socket = (0..1_000).fold(socket, |socket, _| {
            socket.or_else(|_| {
                thread::sleep(Duration::from_millis(1));
                accept(&self.listener)
            })
        });
        Line { socket: socket.unwrap().into(), token: 0 }
    }

    /// Is called by the victim, and answers as an honest peer would.
    fn be_called(&self, victim: &mut Nic) -> Captured {
        let (address, qp) = self.open_at(victim);
        let [bell, line] = [(); 2].map(|()| self.accept());
        let Packet::Message(Message::Bell { qpn, psn, .. }, _) = next(&bell) else {
            panic!("no bell");
        };
        assert_eq!((qpn, psn), (self.own.qpn, self.own.psn));
        let Packet::Message(Message::Hello { caller, qpn, psn }, given) = next(&line) else {
            panic!("no hello");
        };
        assert_eq!((qpn, psn), (self.own.qpn, self.own.psn));
        assert_eq!((caller.qpn, caller.psn), (address.qpn, address.psn));
        let memory = Ring::given(&given).unwrap();
        line.send(&Message::Welcome, &[]).unwrap();
        Captured { line, memory, bell: Bell::over(bell.socket), qp }
    }
}

/// The next packet, as soon as it comes.
pub(super) fn next(line: &Line) -> Packet {
    for _ in 0..5_000 {
        match line.receive() {
            Packet::None => thread::sleep(Duration::from_millis(1)),
            packet @ (Packet::Message(..) | Packet::Nonsense | Packet::End) => return packet,
        }
    }
    panic!("nothing comes");
}

fn pair_of(kind: SocketType) -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
}

/// Two honest NICs with a queue pair, the second of which is the victim.
pub(super) fn honest(place: &TempDir) -> ([Nic; 2], [QpId; 2]) {
    let mut nics = [Nic::new(place), Nic::new(place)];
    let [a, b] = &mut nics;
    let qps = connect(a, b);
    works([a, b], qps);
    (nics, qps)
}

/// Asserts that the queue pair breaks for this cause, and that its neighbours do not notice.
fn breaks(nics: &mut [Nic; 2], qps: [QpId; 2], captured: QpId, cause: QpError) {
    let [a, b] = nics;
    until(&mut [&mut *a, &mut *b], |nics| nics[1].broke(captured).is_some());
    assert_eq!(b.broke(captured), Some(cause));
    works([&mut *a, &mut *b], qps);
    let next = connect(a, b);
    works([&mut *a, &mut *b], next);
    b.fabric.release(now(), captured);
    works([a, b], qps);
    assert_eq!((a.broke(qps[0]), b.broke(qps[1])), (None, None));
}

/// Whatever is scribbled on the rings breaks their queue pair and nothing else. No byte beside the
/// rings is read or written: `rings` shows it for every index.
#[test]
fn scribbling_on_the_rings_breaks_their_queue_pair_only() {
    const WORD: usize = size_of::<usize>();
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, true);
    // Tail and state of the caller. Garbage in the first slot, and then a tail that goes by it.
    for scribbles in [
        vec![(0, usize::MAX)],
        vec![(0, 100_000)],
        vec![(2 * WORD, 77)],
        vec![(4_096, usize::MAX), (0, 1)],
        vec![(4_096, 8_192), (0, 1)],
        vec![(4_096, 8_193), (0, 512)],
    ] {
        let captured = hostile.capture(&mut nics[1]);
        for (at, value) in &scribbles {
            captured.memory.word(*at).store(*value, Ordering::SeqCst);
        }
        breaks(&mut nics, qps, captured.qp, QpError::PeerMisbehaved);
    }
}

/// What it says of itself counts, also if it rings no bell before it goes.
#[test]
fn who_refuses_in_silence_and_goes_has_refused() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, true);
    let Captured { line, memory, bell: _kept, qp } = hostile.capture(&mut nics[1]);
    // Until nobody looks at it any more.
    for_a_while(&mut [&mut nics[1]]);
    memory.word(2 * size_of::<usize>()).store(State::Refused as usize, Ordering::SeqCst);
    drop(line);
    breaks(&mut nics, qps, qp, QpError::RemoteError);
}

/// A peer fills the ring again and again, so there always is one more message to report before the
/// queue pair breaks. What comes after the reason to break must not delay it.
#[test]
fn a_peer_that_never_stops_does_not_delay_its_end() {
    const WORD: usize = size_of::<usize>();
    const SLOTS: usize = 512;
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, true);
    let captured = hostile.capture(&mut nics[1]);
    let memory = &captured.memory;
    (0..SLOTS).for_each(|slot| {
        memory.word(4_096 + slot * 64).store(MESSAGE_LEN, Ordering::Relaxed);
    });
    let victim = &mut nics[1];
    let start = now();
    let mut has_failed = false;
    while victim.broke(captured.qp).is_none() {
        let read = memory.word(128 + WORD).load(Ordering::SeqCst);
        memory.word(0).store(read + SLOTS, Ordering::SeqCst);
        captured.bell.ring();
        victim.turn();
        if !std::mem::replace(&mut has_failed, read > 2 * SLOTS) && has_failed {
            victim.fabric.fail(now(), captured.qp);
        }
        assert!(now().since(start) < Duration::from_secs(5), "it never breaks");
    }
    breaks(&mut nics, qps, captured.qp, QpError::PortDown);
}

/// Who was here, and went, cannot come once more to the same queue pair.
#[test]
fn who_comes_again_is_told_that_nobody_is_there() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, true);
    let (address, qp) = hostile.open_at(&mut nics[1]);
    let first = hostile.capture_at(address, qp);
    until(&mut [&mut nics[1]], |nics| nics[0].fabric.is_connected(qp));
    drop(first);
    for_a_while(&mut [&mut nics[1]]);
    let again = hostile.capture_at(address, qp);
    let state = again.memory.word(128 + 2 * size_of::<usize>());
    until(&mut [&mut nics[1]], |_| state.load(Ordering::SeqCst) == State::Left as usize);
    nics[1].send(qp, HELLO);
    breaks(&mut nics, qps, qp, QpError::RetriesExceeded);
}

/// A caller may come just before our control thread tells us of its queue pair. It was answered
/// twice then, and the second time it was gone.
#[test]
fn a_useless_hello_that_comes_too_early_breaks_its_queue_pair_only() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, true);
    for _ in 0..30 {
        let victim = &mut nics[1];
        let opening = victim.rnic.open_for(victim.domain, Messages::Long).unwrap();
        let address = opening.address();
        let (line, _bell) = (hostile.call(address.gid), hostile.bell_to(address));
        // Both are accepted by then.
        thread::sleep(Duration::from_millis(2));
        line.send(&hostile.hello_to(address), &[]).unwrap();
        let qp = opening.connect(hostile.address()).unwrap();
        let qp = victim.fabric.adopt(now(), qp);
        victim.send(qp, HELLO);
        breaks(&mut nics, qps, qp, QpError::RetriesExceeded);
    }
}

/// Who is to be called lets nobody in, so that the victim has to try again, and meanwhile calls the
/// victim. It got two connections for one queue pair: the first one outlived the queue pair, and
/// what came by it ended the process.
#[test]
fn who_is_to_be_called_cannot_call() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let [caller, hostile] = [true, false].map(|calls| Hostile::new(&place, calls));
    listen(&hostile.listener, 0).unwrap();
    let _in_the_way = hostile.call(hostile.own.gid);
    let (address, qp) = hostile.open_at(&mut nics[1]);
    let (first, _bell) = (hostile.call(address.gid), hostile.bell_to(address));
    let memory = Ring::memory().unwrap();
    first.send(&hostile.hello_to(address), &[memory.descriptor().unwrap()]).unwrap();
    thread::sleep(Duration::from_millis(30));
    // What is closed from now on waits for this.
    let ([slow, _kept], _listener) = slow_to_close(2);
    caller.leave_behind(slow, address.gid);
    listen(&hostile.listener, 8).unwrap();
    let [_, _, second] = [(); 3].map(|()| hostile.accept());
    assert!(matches!(next(&second), Packet::Message(Message::Hello { .. }, _)));
    let was_let_in = !matches!(first.receive(), Packet::None);
    nics[1].fabric.release(now(), qp);
    thread::sleep(Duration::from_millis(30));
    let _ = first.send(&Message::Revoke(Rkey(1)), &[]);
    thread::sleep(Duration::from_millis(30));
    let [a, b] = &mut nics;
    works([&mut *a, &mut *b], qps);
    let next = connect(a, b);
    works([a, b], next);
    assert!(!was_let_in);
}

/// Whoever brings descriptors that nobody has asked for would have us close them, and wait.
#[test]
fn descriptors_that_nobody_has_asked_for_break_their_queue_pair_only() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, true);
    let captured = hostile.capture(&mut nics[1]);
    let (reader, _writer) = pair_of(SocketType::STREAM);
    captured.line.send(&Message::Revoke(Rkey(1)), &[reader.as_fd()]).unwrap();
    breaks(&mut nics, qps, captured.qp, QpError::PeerMisbehaved);
}

/// A peer that has much to say to the worker keeps nobody waiting who has something to say, too.
#[test]
fn who_talks_without_end_is_heard_once() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, true);
    let captured = hostile.capture(&mut nics[1]);
    for number in 0..500 {
        captured.line.send(&Message::Revoke(Rkey(number)), &[]).unwrap();
        if number % 10 == 0 {
            thread::sleep(Duration::from_millis(1));
        }
    }
    thread::sleep(Duration::from_millis(20));
    assert!(nics[1].fabric.told() <= 1);
    let [a, b] = &mut nics;
    works([&mut *a, &mut *b], qps);
    let next = connect(a, b);
    works([a, b], next);
    assert_eq!((nics[1].fabric.told(), nics[1].broke(captured.qp)), (0, None));
}

/// The same for what the peer says it has read, which matters to who sends.
#[test]
fn a_false_head_breaks_its_queue_pair_only() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, true);
    let captured = hostile.capture(&mut nics[1]);
    captured.memory.word(size_of::<usize>()).store(usize::MAX / 2, Ordering::SeqCst);
    while nics[1].broke(captured.qp).is_none() {
        for _ in 0..nics[1].fabric.room(captured.qp) {
            nics[1].send(captured.qp, HELLO);
        }
        nics[1].turn();
    }
    breaks(&mut nics, qps, captured.qp, QpError::PeerMisbehaved);
}

/// Garbage in all of the memory, all the time, while the victim sends and receives.
#[test]
fn random_garbage_breaks_its_queue_pair_only() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, true);
    let mut dice = crate::dice::Dice::new(7);
    for _ in 0..30 {
        let captured = hostile.capture(&mut nics[1]);
        while nics[1].broke(captured.qp).is_none() {
            for _ in 0..8 {
                let at = dice.index(captured.memory.len() / 8) * 8;
                let value = usize::try_from(dice.next_u64() >> dice.index(64)).unwrap();
                captured.memory.word(at).store(value, Ordering::Relaxed);
                captured.memory.word(dice.index(3) * 8).fetch_add(value % 5, Ordering::Relaxed);
            }
            if nics[1].fabric.room(captured.qp) > 0 {
                nics[1].send(captured.qp, HELLO);
            }
            nics[1].turn();
        }
        nics[1].fabric.release(now(), captured.qp);
        let [a, b] = &mut nics;
        works([a, b], qps);
    }
}

/// A key gives access to peers of its domain only, and one that is guessed to nobody.
#[test]
fn a_region_is_given_to_peers_of_its_domain_only() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, true);
    let (region, open) = nics[1].window(4_096);
    let elsewhere = nics[1].rnic.open_domain().unwrap();
    let foreign = nics[1].rnic.register(elsewhere, &region).unwrap();
    for rkey in [foreign.rkey, Rkey(open.rkey.0 ^ 1)] {
        let captured = hostile.capture(&mut nics[1]);
        captured.line.send(&Message::Ask(open.rkey), &[]).unwrap();
        let Packet::Message(Message::Grant { rkey: granted, .. }, given) = next(&captured.line)
        else {
            panic!("no grant");
        };
        assert_eq!((granted, given.len()), (open.rkey, 1));
        captured.line.send(&Message::Ask(rkey), &[]).unwrap();
        let Packet::Message(Message::Refuse(refused), given) = next(&captured.line) else {
            panic!("not refused");
        };
        assert_eq!((refused, given.len()), (rkey, 0));
        // It gets nothing any more, whatever it asks for.
        captured.line.send(&Message::Ask(open.rkey), &[]).unwrap();
        breaks(&mut nics, qps, captured.qp, QpError::PeerMisbehaved);
        assert!(matches!(next(&captured.line), Packet::End));
    }
}

/// What a peer gives us instead of a region must not be mapped: it could go while we write to it.
#[test]
fn what_is_no_region_is_not_written() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, false);
    let unsealed = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&unsealed, 4_096).unwrap();
    let region = Region::shared(4_096).unwrap();
    let (socket, _other) = pair_of(SocketType::STREAM);
    let whole = region.descriptor().unwrap();
    let gifts: [(&[BorrowedFd<'_>], u64); 4] = [
        (&[unsealed.as_fd()], 4_096),
        (&[socket.as_fd()], 4_096),
        (&[], 4_096),
        (&[whole], u64::MAX - 4_095),
    ];
    for (given, address) in gifts {
        let captured = hostile.be_called(&mut nics[1]);
        nics[1].write(captured.qp, &[1; 100], Rkey(5), address);
        nics[1].turn();
        until(&mut [&mut nics[1]], |nics| nics[0].fabric.is_connected(captured.qp));
        nics[1].turn();
        assert!(matches!(next(&captured.line), Packet::Message(Message::Ask(Rkey(5)), _)));
        captured.line.send(&Message::Grant { rkey: Rkey(5), address }, given).unwrap();
        breaks(&mut nics, qps, captured.qp, QpError::RetriesExceeded);
        assert_eq!(nics[1].pool.leases_out(), 0);
    }
    // One that nobody has asked for.
    let captured = hostile.be_called(&mut nics[1]);
    captured.line.send(&Message::Grant { rkey: Rkey(5), address: 0 }, &[whole]).unwrap();
    breaks(&mut nics, qps, captured.qp, QpError::PeerMisbehaved);
}

/// Who was not told of a queue pair cannot take it, and who has no rings to share gets none.
#[test]
fn a_stranger_cannot_take_a_queue_pair() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, _) = honest(&place);
    let hostile = Hostile::new(&place, true);
    let (address, qp) = hostile.open_at(&mut nics[1]);
    let memory = Ring::memory().unwrap();
    let whole = memory.descriptor().unwrap();
    let given = [whole];
    for wrong in [
        QpAddress { psn: Psn(address.psn.0 ^ 1), ..address },
        QpAddress { qpn: Qpn(address.qpn.0 ^ 1), ..address },
    ] {
        let line = hostile.call(address.gid);
        line.send(&hostile.hello_to(wrong), &given).unwrap();
        thread::sleep(Duration::from_millis(20));
        assert!(matches!(line.receive(), Packet::None), "it is kept waiting");
        // It may say hello only once.
        line.send(&hostile.hello_to(address), &given).unwrap();
        assert!(matches!(next(&line), Packet::End));
    }
    let line = hostile.call(address.gid);
    send(&line.socket, &[0; 100], SendFlags::empty()).unwrap();
    assert!(matches!(next(&line), Packet::End), "nonsense");
    // Of an older version, or without a bell.
    let mut older = hostile.hello_to(address).encode();
    older[1] -= 1;
    let line = hostile.call(address.gid);
    send(&line.socket, &older, SendFlags::empty()).unwrap();
    assert!(matches!(next(&line), Packet::End), "older");
    let line = hostile.call(address.gid);
    line.send(&hostile.hello_to(address), &given).unwrap();
    for_a_while(&mut [&mut nics[1]]);
    assert!(!nics[1].fabric.is_connected(qp));

    // It knows the queue pair, but what it brings cannot be used.
    let (_other, packets) = pair_of(SocketType::SEQPACKET);
    let small = Region::shared(4_096).unwrap();
    let gifts: [&[BorrowedFd<'_>]; 3] = [&[], &[packets.as_fd()], &[small.descriptor().unwrap()]];
    for given in gifts {
        let (address, qp) = hostile.open_at(&mut nics[1]);
        nics[1].send(qp, HELLO);
        let (line, _bell) = (hostile.call(address.gid), hostile.bell_to(address));
        line.send(&hostile.hello_to(address), given).unwrap();
        until(&mut [&mut nics[1]], |nics| nics[0].broke(qp).is_some());
        assert_eq!(nics[1].broke(qp), Some(QpError::RetriesExceeded));
        assert!(matches!(next(&line), Packet::End));
    }
}

/// A peer that never listens must not make us wait, nor keep us awake.
#[test]
fn a_deaf_peer_makes_nobody_wait() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, true);
    let captured = hostile.capture(&mut nics[1]);
    for_a_while(&mut [&mut nics[1]]);
    let memory = &captured.memory;
    let start = now();
    for _ in 0..20_000 {
        // It claims to sleep, and to have room, whenever we look.
        memory.word(64).store(3, Ordering::SeqCst);
        memory
            .word(size_of::<usize>())
            .store(memory.word(128).load(Ordering::SeqCst), Ordering::SeqCst);
        if nics[1].fabric.room(captured.qp) > 0 {
            nics[1].send(captured.qp, HELLO);
        }
        nics[1].turn();
    }
    assert!(now().since(start) < Duration::from_secs(20));
    assert_eq!(nics[1].broke(captured.qp), None);
    // It rings once more, and closes its bell: we must be able to sleep again.
    (0..1_000).for_each(|_| captured.bell.ring());
    drop(captured.bell);
    let sleeps = |nic: &mut Nic| {
        let until = nic.fabric.prepare_sleep(now());
        until.is_none() && !readable(nic.fabric.event_descriptor().unwrap())
    };
    let start = now();
    while !sleeps(&mut nics[1]) {
        nics[1].turn();
        assert!(now().since(start) < Duration::from_secs(5), "it never sleeps again");
    }
    let [a, b] = &mut nics;
    works([a, b], qps);
}
