//! One gateway against a peer that is not ours: it closes early, says too much, or nothing.

use std::time::Duration;

use smcr_engine::handoff::{Ending, PeerElement};
use smcr_engine::{ConnectionId, Established, GroupId, LinkId};
use smcr_memory::{Region, Rmb, SendPool};
use smcr_proto::connection::{CLOSE_WAIT, Connection, ConnectionSetup, Streams};
use smcr_proto::ring::{Ring, Span};
use smcr_proto::wire::cdc::{Cdc, Cursor};
use smcr_proto::wire::llc::{Llc, TestLink};
use smcr_proto::{AlertToken, Gid, Instant, MacAddress, Mtu, Rkey, RmbeSize};
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::{self, Fabric, Network, Odds};
use smcr_rnic::{Completion, Domain, Fabric as _, Opening, Port, QpId, Rnic, Tag, Work};

use crate::KIB;
use crate::application::{Application, Heard, bytes};
use crate::host::{Closed, Host, Sizes};
use crate::tcp;

/// A gateway with one connection, the application behind it, and the peer.
pub(crate) struct Stage {
    network: Network,
    /// Of the gateway's port.
    gid: Gid,
    pub(crate) now: Instant,
    pub(crate) host: Host,
    pub(crate) application: Application,
    id: ConnectionId,
    fabric: Fabric,
    rnic: sim::Rnic,
    domain: Domain,
    /// How the gateway addresses the memory of the peer.
    key: (Rkey, u64),
    qp: QpId,
    pool: SendPool,
    /// What the peer would say if it were honest.
    pub(crate) honest: Connection,
    gateway: PeerElement,
    /// Whether the peer takes in what it hears.
    pub(crate) listens: bool,
    /// What the gateway said.
    pub(crate) heard: Vec<Cdc>,
    /// What the peer has sent of its stream.
    sent: u64,
}

impl Stage {
    pub(crate) fn new() -> Self {
        Self::with_streams([Streams::One; 2])
    }

    /// What the gateway and the peer have agreed on.
    pub(crate) fn with_streams(streams: [Streams; 2]) -> Self {
        let network = Network::new(1, QUIET);
        let mut host = Host::new(&network, 1, Sizes::USUAL);
        let gid = Gid::from_ipv4([10, 9, 0, 2]);
        let (mut rnic, mut fabric) =
            network.rnic(Port { gid, mac: MacAddress::default(), mtu: Mtu::B1024 });
        let memory = Region::new(65_536).unwrap();
        rnic.send_from(&memory).unwrap();
        let domain = rnic.open_domain().unwrap();
        let size = RmbeSize::from_notation(0);
        let rmb = Rmb::carve(Region::new(size.bytes() as usize).unwrap(), size);
        let registration = rnic.register(domain, rmb.region()).unwrap();
        let ring = Ring::new(size.bytes());
        let token = AlertToken(0xabcd_ef01);
        let (rkey, address) = (registration.rkey, registration.address);
        let peer = PeerElement { rkey, address, rmb_address: address, ring, token };

        let (ours, theirs) = (host.open(), rnic.open(domain).unwrap());
        let (here, there) = (ours.address(), theirs.address());
        let key = (registration.rkey, registration.address);
        host.add_link_at(0, LINK, ours, there, Some(key));
        let qp = fabric.adopt(Instant(1), theirs.connect(here).unwrap());
        let element = host.take_element().unwrap();
        let (near, far) = (tcp::connection(40_000), element.id);
        let established = Established::Smc {
            near: near.1,
            link: LINK,
            group: GroupId(1),
            rmbe: element.rmbe,
            peer,
            streams: streams[0],
        };
        host.relay(far, established);
        let setup = ConnectionSetup {
            peer_token: far.token(),
            element: ring,
            peer_element: element.described.ring,
            close_wait: CLOSE_WAIT,
            streams: streams[1],
        };
        Self {
            network,
            gid: here.gid,
            now: Instant(1),
            host,
            application: Application::new(near.0, 0, 1),
            id: far,
            fabric,
            rnic,
            domain,
            key,
            qp,
            pool: SendPool::new(memory, 65_536),
            honest: Connection::new(setup),
            gateway: element.described,
            listens: true,
            heard: Vec::new(),
            sent: 0,
        }
    }

    /// Sends `len` bytes of the peer's stream, and announces them.
    pub(crate) fn write(&mut self, len: usize) {
        let span = self.honest.produce(u32::try_from(len).unwrap());
        self.post(len, span);
    }

    /// As [`Self::write`], the last byte being urgent.
    pub(crate) fn write_urgent(&mut self, len: usize) {
        let span = self.honest.produce_urgent(u32::try_from(len).unwrap());
        self.post(len, span);
    }

    fn post(&mut self, len: usize, span: Span) {
        self.write_in_silence(len, span);
        self.say_what_is_due();
    }

    /// Writes, and announces nothing.
    pub(crate) fn write_in_silence(&mut self, len: usize, span: Span) {
        let stream = bytes(1, self.sent, len);
        self.sent += len as u64;
        let [head, _] = span.pieces();
        let filled = self.pool.fill(u32::MAX, |room| {
            room.copy_in(&stream);
            Ok::<_, ()>(len)
        });
        let lease = filled.unwrap().unwrap().unwrap();
        let address = self.gateway.address + u64::from(head.start);
        let write = Work::Write { lease, rkey: self.gateway.rkey, address, tag: Tag(0) };
        self.fabric.post(self.qp, &mut vec![write]);
    }

    /// From now on what is written can be seen at once, whether or not it was announced.
    pub(crate) fn place_at_once(&self) {
        self.network.change_odds(Odds { early: Chance::ALWAYS, ..QUIET });
    }

    /// What the gateway's element holds, `at` bytes from its start.
    pub(crate) fn element(&self, at: u64, len: u32) -> Vec<u8> {
        let PeerElement { rkey, address, .. } = self.gateway;
        self.network.peek(self.gid, rkey, address + at, len).unwrap()
    }

    /// Fills the element to the brim and says D, or C if `closed`, although more is to come: B.
    fn end_blocked(&mut self, closed: bool) {
        self.honest.set_bytes_waiting(true);
        let span = self.honest.produce(16 * 1024);
        self.write_in_silence(16 * KIB, span);
        let end = self.honest.poll_cdc().unwrap();
        self.say(Cdc { sending_done: !closed, connection_closed: closed, ..end });
        self.run();
    }

    /// Breaks the link; there is another one from now on.
    fn change_link(&mut self) {
        let broken = self.fabric.qpn(self.qp);
        let (ours, theirs) = (self.host.open(), self.rnic.open(self.domain).unwrap());
        let (here, there) = (ours.address(), theirs.address());
        self.host.add_link_at(0, LinkId(2), ours, there, Some(self.key));
        self.qp = self.fabric.adopt(self.now, theirs.connect(here).unwrap());
        self.network.break_qp(broken);
    }

    pub(crate) fn say(&mut self, cdc: Cdc) {
        let send = Work::Send { message: cdc.encode(), tag: Tag(0) };
        self.fabric.post(self.qp, &mut vec![send]);
    }

    pub(crate) fn say_what_is_due(&mut self) {
        while let Some(cdc) = self.honest.poll_cdc() {
            self.say(cdc);
        }
    }

    /// Until nobody has anything to do. The peer listens, and says nothing by itself.
    pub(crate) fn run(&mut self) {
        loop {
            let mut moved = self.application.act() | self.host.turn(self.now);
            let mut completions = Vec::with_capacity(16);
            self.fabric.poll(self.now, &mut completions);
            for completion in completions {
                moved = true;
                match completion {
                    Completion::Wrote { lease, .. } => self.pool.take_back(lease),
                    Completion::Received { message, .. } => {
                        let cdc = Cdc::decode(&message).unwrap();
                        if self.listens {
                            self.honest.handle_cdc(self.now, &cdc).unwrap();
                        }
                        self.heard.push(cdc);
                    }
                    Completion::ReceivedLong { message, .. } => panic!("{message:?}"),
                    Completion::Sent { .. } => {}
                    Completion::Broke { qp, cause } => assert_ne!(qp, self.qp, "{cause:?}"),
                }
            }
            self.fabric.transmit(self.now);
            match self.network.next_event() {
                Some(at) => self.now = self.now.max(at),
                None if !moved => break,
                None => {}
            }
        }
    }

    /// Sends so many LLC messages as fast as they are taken, whatever becomes of the link.
    pub(crate) fn flood(&mut self, count: usize) {
        let test = Llc::TestLink(TestLink { reply: false, user_data: [7; 16] });
        let mut left = count;
        for _ in 0..10 * count {
            while left > 0 && self.fabric.room(self.qp) > 0 {
                let send = Work::Send { message: test.encode(), tag: Tag(0) };
                self.fabric.post(self.qp, &mut vec![send]);
                left -= 1;
            }
            self.fabric.poll(self.now, &mut Vec::with_capacity(64));
            self.fabric.transmit(self.now);
            let moved = self.host.turn(self.now);
            match self.network.next_event() {
                Some(at) => self.now = self.now.max(at),
                None if !moved && left == 0 => return,
                None => {}
            }
        }
        panic!("{left} of {count} messages are still to be sent");
    }

    pub(crate) fn last_heard(&self) -> Cdc {
        *self.heard.last().expect("the gateway said something")
    }

    pub(crate) fn closed(&self) -> Option<Closed> {
        self.host.closed.get(&self.id).copied()
    }
}

/// A Linux program that calls `close` ends both directions at once: ours may still be sending.
/// It must be told, as TCP would, and the peer must hear A.
// RFC 7609 4.8.1 #15: reset if C meets pending data
#[test]
fn who_still_writes_to_a_closed_peer_is_reset() {
    for before in [false, true] {
        let mut stage = Stage::new();
        stage.write(3 * KIB);
        stage.run();
        assert_eq!(stage.application.received(), 3 * KIB as u64);
        if before {
            stage.application.write(100);
        }
        stage.honest.close(stage.now);
        stage.say_what_is_due();
        stage.run();
        if !before {
            assert_eq!(stage.application.heard(), Heard::End);
            assert_eq!(stage.closed(), None);
            stage.application.write(100);
            stage.run();
        }
        assert!(stage.application.is_readable());
        assert!(stage.last_heard().abnormal_close || before);
        assert_eq!(stage.closed().is_some(), stage.last_heard().abnormal_close);
    }
}

/// The same `close`, but ours has nothing more to say: that is the usual end of a request.
#[test]
fn a_peer_that_closes_first_ends_gracefully_with_our_close() {
    let mut stage = Stage::new();
    stage.application.write(100);
    stage.run();
    assert!(!stage.last_heard().writer_blocked);
    stage.honest.consume(100);
    stage.write(3 * KIB);
    stage.honest.close(stage.now);
    stage.say_what_is_due();
    stage.run();
    assert_eq!(stage.application.received(), 3 * KIB as u64);
    assert_eq!(stage.application.heard(), Heard::End);

    stage.application.finish();
    stage.run();
    assert!(stage.last_heard().connection_closed);
    let closed = stage.closed().unwrap();
    assert_eq!((closed.ending, closed.bytes_out), (Ending::Graceful, 3 * KIB as u64));
    stage.host.assert_nothing_is_left();
}

/// A window of bytes was written and more wait: the peer is told so by B. If it closes instead of
/// reading, those bytes are lost, and the application must hear that (RFC 4.8.1, 4A).
// RFC 7609 4.8.1 #15: reset if C meets pending data
#[test]
fn a_blocked_writer_is_reset_when_its_peer_closes() {
    let mut stage = Stage::new();
    stage.application.write(100 * KIB);
    stage.run();
    assert!(stage.last_heard().writer_blocked);
    assert_eq!(stage.honest.readable().len(), 16 * 1024);
    stage.honest.consume(16 * 1024);
    stage.honest.close(stage.now);
    let mut close = stage.honest.poll_cdc().unwrap();
    close.consumer = Cursor::default();
    stage.say(close);
    stage.run();
    assert_eq!(stage.application.heard(), Heard::Reset);
    assert!(stage.last_heard().abnormal_close);
}

/// Bytes behind the end of a stream that the application was told to be complete.
#[test]
fn bytes_behind_the_end_reset_the_connection() {
    let mut stage = Stage::new();
    stage.say(Cdc { sequence: 1, token: stage.id.token(), sending_done: true, ..Cdc::default() });
    stage.run();
    assert_eq!(stage.application.heard(), Heard::End);
    let token = stage.id.token();
    let more = Cdc { sequence: 2, token, producer: Cursor { wrap: 0, count: 5 }, ..Cdc::default() };
    stage.say(more);
    stage.run();
    assert!(stage.last_heard().abnormal_close);
    stage.say(Cdc { sequence: 3, abnormal_close: true, ..more });
    stage.run();
    assert_eq!(stage.closed().unwrap().ending, Ending::PeerMisbehaved);
    stage.host.assert_nothing_is_left();
}

/// A Linux program sends more than the other side reads, and closes: its kernel waits two seconds
/// for window, says C, and writes the rest when there is window again. A program that reads slowly
/// must get all of it, not an end in the middle. B beside the C tells that there is more.
#[test]
fn what_a_blocked_peer_writes_behind_its_end_belongs_to_the_stream() {
    for closed in [false, true] {
        let mut stage = Stage::new();
        stage.end_blocked(closed);
        assert_eq!(stage.application.received(), 16 * KIB as u64);
        assert_eq!(stage.last_heard().consumer, Cursor { wrap: 1, count: 0 }, "there is window");
        assert_eq!(stage.application.heard(), Heard::Bytes, "the end is held back");

        stage.now = stage.now + Duration::from_millis(1_900);
        stage.honest.set_bytes_waiting(false);
        let span = stage.honest.produce(100);
        stage.write_in_silence(100, span);
        let rest = stage.honest.poll_cdc().unwrap();
        stage.say(Cdc { sending_done: !closed, connection_closed: closed, ..rest });
        stage.run();
        let told = (stage.application.heard(), stage.application.received());
        assert_eq!(told, (Heard::End, 16 * KIB as u64 + 100));
    }
}

/// B is set also if the last bytes fill the window to the brim, and then nothing follows. The end
/// is late, but it comes.
#[test]
fn a_blocked_peer_without_more_to_write_ends_all_the_same() {
    let mut stage = Stage::new();
    stage.end_blocked(true);
    assert_eq!(stage.application.heard(), Heard::Bytes);
    stage.now = stage.now + Duration::from_millis(2_300);
    stage.run();
    assert_eq!(stage.application.heard(), Heard::End);
    stage.application.finish();
    stage.run();
    assert!(stage.last_heard().connection_closed);
    assert_eq!(stage.closed().unwrap().ending, Ending::Graceful);
    stage.host.assert_nothing_is_left();
}

/// A peer that claims to have read what was never written, or to have written more than fits.
// RFC 7609 A.4 #11: producer stays within consumer cursor
#[test]
fn impossible_cursors_reset_the_connection() {
    let far = Cursor { wrap: 1, count: 1 };
    let consumer = Cdc { consumer: far, ..Cdc::default() };
    let producer = Cdc { producer: far, ..Cdc::default() };
    for lie in [consumer, producer] {
        let mut stage = Stage::new();
        stage.listens = false;
        stage.say(Cdc { sequence: 1, token: stage.id.token(), ..lie });
        stage.run();
        assert_eq!(stage.application.heard(), Heard::Reset);
        assert!(stage.last_heard().abnormal_close);
        assert_eq!(stage.host.counters.cdc_misbehaved.get(), 1);
    }
}

/// A peer that does not answer our A must not keep the slot and the element for ever.
// RFC 7609 4.4.2 #2: reuse element after a timeout
// RFC 7609 4.8.2 #7: limit PeerAbortWait by a timer
#[test]
fn a_peer_that_does_not_answer_is_given_up() {
    let mut stage = Stage::new();
    stage.application.reset();
    stage.run();
    assert!(stage.last_heard().abnormal_close);
    assert_eq!(stage.closed(), None);
    for after in [CLOSE_WAIT - Duration::from_secs(1), Duration::from_secs(2)] {
        assert_eq!(stage.closed(), None);
        stage.now = stage.now + after;
        stage.run();
    }
    assert_eq!(stage.closed().unwrap().ending, Ending::ResetByApplication);
    stage.host.assert_nothing_is_left();
}

/// The peer's NIC saw a message delivered that never came here. What follows on the new link must
/// not reach the program: bytes before it are missing.
// RFC 7609 2.3 #8: reset when failover validation fails
// RFC 7609 4.6.1 #9: wait briefly, then reset on gap
// RFC 7609 A.4 #20: F means failover validation
#[test]
fn bytes_that_were_lost_on_the_old_link_reset_the_connection() {
    let mut stage = Stage::new();
    stage.write(100);
    stage.run();
    assert_eq!(stage.application.received(), 100);
    let token = stage.id.token();
    stage.say(Cdc { sequence: 5, token, failover_validation: true, ..Cdc::default() });
    let more = Cursor { wrap: 0, count: 300 };
    stage.say(Cdc { sequence: 6, token, producer: more, ..Cdc::default() });
    stage.run();
    assert_eq!((stage.application.heard(), stage.application.received()), (Heard::Bytes, 100));
    stage.now = stage.now + Duration::from_secs(1);
    stage.run();
    assert_eq!((stage.application.heard(), stage.application.received()), (Heard::Reset, 100));
    assert!(stage.last_heard().abnormal_close);
    stage.say(Cdc { sequence: 7, token, producer: more, abnormal_close: true, ..Cdc::default() });
    stage.run();
    assert_eq!(stage.closed().unwrap().ending, Ending::DataLost);
    let counters = &stage.host.counters;
    assert_eq!((counters.cdc_held.get(), counters.resets_data_lost.get()), (2, 1));
    stage.host.assert_nothing_is_left();
}

/// What a peer sees of a gateway whose link breaks: the number of the last message that was
/// acknowledged, before anything else and without waiting for an answer; then everything that was
/// not, under a new number.
// RFC 7609 2.3 #1: treat all active links alike
// RFC 7609 2.3 #7: send failover validation first
// RFC 7609 4.6.1 #2: keep SS of delivered writes
// RFC 7609 4.6.1 #4: F message first on new link
// RFC 7609 4.6.1 #5: F message carries SS
// RFC 7609 4.6.1 #7: send on, F needs no answer
// RFC 7609 4.6.2 #1: repeat pending messages before new data
// RFC 7609 4.6.2 #3: combine repeated writes
// RFC 7609 4.6.2 #4: higher number for combined writes
#[test]
fn the_first_message_on_a_new_link_is_the_validation() {
    let mut stage = Stage::new();
    stage.listens = false;
    stage.application.write(1_000);
    stage.run();
    assert_eq!(stage.last_heard().sequence, 1);
    stage.application.write(500);
    while stage.host.counters.cdc_out.get() < 2 {
        stage.application.act();
        stage.host.turn(stage.now);
    }
    stage.change_link();
    stage.run();
    assert_eq!(stage.host.counters.bytes_replayed.get(), 500);
    let [_, validation, combined] = stage.heard[..] else { panic!("{:?}", stage.heard) };
    let token = AlertToken(0xabcd_ef01);
    let expected = Cdc { sequence: 1, token, failover_validation: true, ..Cdc::default() };
    assert_eq!(validation, expected);
    assert_eq!((combined.sequence, combined.producer.count), (3, 1_500));
    assert!(!combined.failover_validation);
}

/// The same check where everything has come: the connection goes on, and what comes late from the
/// old link changes nothing.
// RFC 7609 4.6.1 #6: ignore other fields of F message
// RFC 7609 4.6.1 #8: validate before resuming
#[test]
fn a_peer_that_changes_the_link_and_lost_nothing_goes_on() {
    let mut stage = Stage::new();
    stage.write(100);
    stage.run();
    let token = stage.id.token();
    let far = Cursor { wrap: 7, count: 9_999 };
    let validation = Cdc { sequence: 1, token, failover_validation: true, ..Cdc::default() };
    stage.say(Cdc { producer: far, consumer: far, connection_closed: true, ..validation });
    // Linux goes back to what it knows to be delivered before it writes on.
    let back = Cursor { wrap: 0, count: 60 };
    stage.say(Cdc { sequence: 2, token, producer: back, ..Cdc::default() });
    stage.write(50);
    stage.write(50);
    stage.run();
    stage.say(Cdc { sequence: 2, token, producer: far, ..Cdc::default() });
    stage.run();
    assert_eq!((stage.application.heard(), stage.application.received()), (Heard::Bytes, 200));
    assert_eq!(stage.host.counters.cdc_held.get(), 0);
}

/// A poller that has just taken a half-closed connection over hears what is new before the last
/// owner has passed on the rest: that is waited for, and users notice nothing. If it never comes,
/// as from a Linux peer that changed the link without a word, they must not get what follows. It is
/// the same if the peer has said nothing before.
// RFC 7609 4.6.1 #9: wait briefly, then reset on gap
#[test]
fn what_is_behind_a_gap_waits_for_the_rest() {
    for (before, comes) in [(100, true), (100, false), (0, true), (0, false)] {
        let mut stage = Stage::new();
        if before > 0 {
            stage.write(before);
        }
        stage.application.finish();
        stage.run();
        let [skipped, early] = [50, 70].map(|len| {
            let span = stage.honest.produce(len);
            stage.write_in_silence(len as usize, span);
            stage.honest.poll_cdc().unwrap()
        });
        stage.say(early);
        stage.run();
        let before = before as u64;
        let seen = |stage: &Stage| (stage.application.heard(), stage.application.received());
        assert_eq!(seen(&stage), (Heard::Bytes, before));
        assert_eq!(stage.host.counters.cdc_held.get(), 1);
        if comes {
            stage.say(skipped);
        }
        stage.run();
        stage.now = stage.now + Duration::from_secs(1);
        stage.run();
        let all = before + 120;
        let expected = if comes { (Heard::Bytes, all) } else { (Heard::Reset, before) };
        assert_eq!(seen(&stage), expected);
        assert_eq!(stage.host.counters.cdc_misbehaved.get(), u64::from(!comes));
    }
}

/// The peer said D, and never C: an end that stalls becomes a reset, lest slot and element be lost.
// RFC 7609 4.8.1 #21: limit closing by a timer
// RFC 7609 4.8.1 #23: free element after closing timeout
// RFC 7609 4.8.2 #2: abort an end that stalls
#[test]
fn an_end_that_stalls_is_given_up() {
    let mut stage = Stage::new();
    stage.honest.shutdown_write();
    stage.say_what_is_due();
    stage.run();
    stage.application.finish();
    stage.run();
    assert!(stage.last_heard().connection_closed);
    let messages = stage.heard.len();
    stage.now = stage.now + (CLOSE_WAIT - Duration::from_secs(1));
    stage.run();
    assert_eq!(stage.closed(), None);
    stage.now = stage.now + Duration::from_secs(2);
    stage.run();
    assert_eq!(stage.closed().unwrap().ending, Ending::Stalled);
    assert_eq!(stage.host.counters.closes_stalled.get(), 1);
    assert_eq!(stage.heard.len(), messages, "nothing is said any more");
    stage.host.assert_nothing_is_left();
}

/// No message of a peer may stop the gateway, whatever it says to whom.
#[test]
fn nonsense_is_survived() {
    for seed in smcgate_tests::seeds(100) {
        let mut dice = Dice::new(seed);
        let mut stage = Stage::new();
        stage.listens = false;
        stage.application.sleep();
        stage.application.write(10 * KIB);
        for _ in 0..20 {
            let mut message = [0; 44];
            dice.fill(&mut message);
            message[..2].copy_from_slice(&[0xfe, 44]);
            let token = if dice.index(4) == 0 { AlertToken(7) } else { stage.id.token() };
            let mut cdc = Cdc::decode(&message).unwrap();
            cdc.token = token;
            if dice.index(3) > 0 {
                let count = u32::try_from(dice.below(20_000)).unwrap();
                cdc.producer = Cursor { wrap: 0, count };
                cdc.consumer = Cursor { wrap: 0, count: count / 2 };
                cdc.sequence = 1 + cdc.sequence % 4;
            }
            stage.say(cdc);
            stage.run();
        }
        stage.now = stage.now + CLOSE_WAIT;
        stage.application.reset();
        stage.run();
        stage.now = stage.now + CLOSE_WAIT;
        stage.run();
        stage.host.assert_nothing_is_left();
    }
}

pub(crate) const LINK: LinkId = LinkId(1);
/// NICs in software, with calm between them.
const QUIET: Odds = Odds { pins: Chance::NEVER, ..Odds::CALM };
