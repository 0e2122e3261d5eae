use smcr_memory::{Region, SendPool};
use smcr_proto::Rkey;

use super::super::path::PACKET_LIFE;
use super::super::wire::{Body, Packet, SEND_FIRST, SEND_LAST, SEND_MIDDLE, SEND_ONLY, WRITE_ONLY};
use super::*;
use crate::Tag;
use crate::roce::PACKET_COST;

mod alike;
mod dense;

const MTU: u32 = 1024;
const FIRST: Psn = Psn(0xff_fffe);
const PLAIN: Sizes = Sizes { mtu: MTU, ceiling: MTU, known: MTU, dense: false };

/// A requester, and a reader of its packets.
struct Bench {
    requester: Requester,
    pool: SendPool,
    counters: Counters,
    now: Instant,
}

/// A packet in short: its number from the first one, its payload length, and whether it requests an
/// acknowledgement.
type Seen = (u64, usize, bool);

impl Bench {
    fn new() -> Self {
        Self {
            requester: Requester::new((Qpn(9), FIRST), PLAIN, 1 << 20),
            pool: SendPool::new(Region::new(4 << 20).unwrap(), 1 << 20),
            counters: Counters::default(),
            now: Instant(1_000_000_000),
        }
    }

    fn write(&mut self, len: u32) {
        let bytes: Vec<u8> = (0..len).map(|n| n.to_le_bytes()[0]).collect();
        let filled = self.pool.fill(len, |room| {
            room.copy_in(&bytes);
            Ok::<_, ()>(bytes.len())
        });
        let lease = filled.unwrap().unwrap().unwrap();
        let tag = Tag(len.into());
        self.requester.post(Work::Write { lease, rkey: Rkey(3), address: 5000, tag });
    }

    fn message(&mut self) {
        self.requester.post(Work::Send { message: [4; 44], tag: Tag(0) });
    }

    /// Sends all packets that may be sent, but `max` at most.
    fn send(&mut self, max: usize) -> Vec<Seen> {
        let mut seen = Vec::new();
        let mut next = self.requester.next(self.now);
        while seen.len() < max
            && let Some(packet) = next
        {
            let mut out = vec![0xaa; packet.len()];
            let last = seen.len() + 1 == max;
            next = self.requester.build(
                self.now,
                packet,
                last,
                &mut out,
                &mut self.counters,
                |_, _| {},
            );
            assert_eq!(next, self.requester.next(self.now), "it is what a new question finds");
            let packet = Packet::parse(&out).unwrap();
            assert_eq!(packet.target, Qpn(9));
            let number = psn::distance(FIRST, packet.psn).into();
            let len = payload_len(packet.body);
            seen.push((number, len, packet.ack_request));
        }
        seen
    }

    fn answer(&mut self, syndrome: Syndrome, number: u64) -> Result<(), QpError> {
        let psn = psn::advance(FIRST, number);
        let aeth = Aeth { syndrome, msn: 0 };
        self.requester.handle_answer(self.now, psn, aeth, &mut self.counters)
    }

    fn expire(&mut self) -> Result<(), QpError> {
        self.requester.expire(self.now, &mut self.counters)
    }

    fn completed(&mut self) -> usize {
        let mut out = Vec::with_capacity(64);
        self.requester.complete(QpId(1), &mut out);
        let count = out.len();
        for completion in out {
            if let Completion::Wrote { lease, .. } = completion {
                self.pool.take_back(lease);
            }
        }
        count
    }
}

/// The length of the payload of a packet or a part, whose address must fit its bytes.
fn payload_len(body: Body<'_>) -> usize {
    match body {
        Body::Send { payload, .. } => payload.len(),
        Body::Write { reth, more: false, payload } => {
            assert_eq!((reth.rkey, reth.len as usize), (Rkey(3), payload.len()));
            assert_eq!(u64::from(payload[0]), (reth.address - 5000) % 256);
            payload.len()
        }
        body @ (Body::Write { .. }
        | Body::WriteOn { .. }
        | Body::Dense(_)
        | Body::Acknowledge(_)
        | Body::Congestion
        | Body::Unserved) => panic!("{body:?}"),
    }
}

/// Packets of one size and a shorter last one can leave in one system call.
#[test]
fn a_write_is_a_train_of_packets_and_the_last_one_requests_an_acknowledgement() {
    let mut bench = Bench::new();
    bench.write(2 * MTU + 77);
    bench.message();
    let expected = [(0, 1024, false), (1, 1024, false), (2, 77, false), (3, 44, true)];
    assert_eq!(bench.send(99), expected);
    assert_eq!(bench.send(99), []);
}

/// A receiver that gets no request for an acknowledgement sends none, and the window stays closed.
#[test]
fn an_acknowledgement_is_requested_every_32_packets_and_when_the_window_closes() {
    let mut bench = Bench::new();
    bench.write(200 * MTU);
    let seen = bench.send(999);
    let asking: Vec<_> =
        seen.iter().filter(|(.., asks)| *asks).map(|(number, ..)| *number).collect();
    let window = 65_536_u64.div_ceil((MTU + PACKET_COST).into());
    assert_eq!(seen.len() as u64, window);
    assert_eq!(asking, [31, window - 1]);
    let mut bench = Bench::new();
    bench.write(200 * MTU);
    assert!(bench.send(7)[6].2, "the end of a turn");
}

#[test]
fn requests_complete_in_order_as_their_last_packet_is_acknowledged() {
    let mut bench = Bench::new();
    bench.write(2 * MTU);
    bench.message();
    bench.write(10);
    bench.send(99);
    for (number, done) in [(0, 0), (1, 1), (1, 0), (0, 0), (3, 2)] {
        bench.answer(Syndrome::ACK, number).unwrap();
        assert_eq!(bench.completed(), done, "after {number}");
    }
    assert_eq!(bench.pool.leases_out(), 0);
    assert_eq!(bench.requester.wake_at(), None, "no timer runs");
}

/// Acknowledgements and NAKs of packets that were never sent are forged. `rdma_rxe` accepts them.
#[test]
fn answers_about_packets_never_sent_are_ignored() {
    let mut bench = Bench::new();
    bench.write(4 * MTU);
    bench.send(2);
    for syndrome in [
        Syndrome::ACK,
        Syndrome::NOT_READY,
        Syndrome::SEQUENCE_ERROR,
        Syndrome::ACCESS_ERROR,
        Syndrome(0x64),
    ] {
        for number in [2, 3, 4, 1 << 23, (1 << 24) - 1] {
            bench.answer(syndrome, number).unwrap();
        }
    }
    assert_eq!(bench.completed(), 0);
    assert_eq!(bench.send(99), [(2, 1024, false), (3, 1024, true)], "goes on where it was");
}

#[test]
fn a_nak_retransmits_from_the_gap_and_acknowledges_all_packets_before_it() {
    let mut bench = Bench::new();
    bench.message();
    bench.write(3 * MTU);
    bench.send(99);
    bench.answer(Syndrome::SEQUENCE_ERROR, 2).unwrap();
    assert_eq!(bench.completed(), 1);
    assert_eq!(bench.send(99), [(2, 1024, false), (3, 1024, true)]);
    assert_eq!(bench.counters.retransmits, 2);
    // The same NAK again, caused by packets in flight behind the gap.
    bench.answer(Syndrome::SEQUENCE_ERROR, 2).unwrap();
    assert_eq!(bench.send(99), []);
    // The same NAK, so late that the retransmission must have been lost.
    bench.now = bench.now + Duration::from_millis(2);
    bench.answer(Syndrome::SEQUENCE_ERROR, 2).unwrap();
    // It may be that the path carries no trains.
    assert_eq!(bench.send(99), [(2, 1024, true)]);
    assert!(bench.requester.splits_trains(bench.now));
    bench.answer(Syndrome::ACK, 2).unwrap();
    assert!(!bench.requester.splits_trains(bench.now));
    assert_eq!(bench.send(99), [(3, 1024, true)]);
    bench.answer(Syndrome::ACK, 3).unwrap();
    assert_eq!(bench.completed(), 1);
}

/// A guessed PSN made the peer believe in a gap, and its NAK took the place of an acknowledgement.
#[test]
fn a_nak_behind_all_that_was_sent_acknowledges_it() {
    let mut bench = Bench::new();
    bench.message();
    bench.message();
    bench.send(99);
    bench.answer(Syndrome::SEQUENCE_ERROR, 3).unwrap();
    assert_eq!(bench.completed(), 0, "it is about a packet after that");
    bench.answer(Syndrome::SEQUENCE_ERROR, 2).unwrap();
    assert_eq!((bench.completed(), bench.send(99)), (2, vec![]));
    assert_eq!(bench.counters.retransmits, 0);
}

#[test]
fn a_peer_without_room_is_waited_for() {
    let mut bench = Bench::new();
    bench.message();
    bench.message();
    bench.send(99);
    // Code 14 is 1.28 ms.
    bench.answer(Syndrome(0x2e), 1).unwrap();
    assert_eq!(bench.completed(), 1);
    assert_eq!(bench.send(99), []);
    assert_eq!(bench.requester.wake_at(), Some(bench.now + Duration::from_micros(1280)));
    bench.now = bench.now + Duration::from_micros(1280);
    bench.expire().unwrap();
    assert_eq!(bench.send(99), [(1, 44, true)]);
}

/// Bytes for a peer that never has room would be kept for ever, in memory that all peers share.
#[test]
fn a_peer_that_never_has_room_is_waited_for_ten_seconds() {
    let mut bench = Bench::new();
    bench.message();
    bench.message();
    let mut refuse = |number, times| -> Result<(), QpError> {
        for _ in 0..times {
            assert!(!bench.send(99).is_empty());
            bench.answer(Syndrome(0x20), number)?;
            bench.now = bench.now + Duration::from_millis(656);
            bench.expire()?;
        }
        Ok(())
    };
    assert_eq!(refuse(0, 16), Ok(()));
    // The first was taken: the second has as long.
    assert_eq!(refuse(1, 16), Ok(()));
    assert_eq!(refuse(1, 1), Err(QpError::RetriesExceeded));
}

#[test]
fn a_refusal_completes_all_requests_before_it_and_breaks_the_queue_pair() {
    let fatal = [Syndrome::INVALID_REQUEST, Syndrome::ACCESS_ERROR, Syndrome::OPERATION_ERROR];
    for syndrome in fatal {
        let mut bench = Bench::new();
        bench.message();
        bench.write(100);
        bench.message();
        bench.send(99);
        assert_eq!(bench.answer(syndrome, 1), Err(QpError::RemoteError));
        let mut out = Vec::with_capacity(2);
        assert!(!bench.requester.flush(QpId(1), &mut out), "one completion did not fit");
        assert!(bench.requester.flush(QpId(1), &mut { Vec::with_capacity(9) }));
        let Ok::<[_; 2], _>(
            [
                Completion::Sent { status: Status::Done, .. },
                Completion::Wrote { status: Status::Flushed, lease, .. },
            ],
        ) = out.try_into()
        else {
            panic!("in order, done and flushed")
        };
        bench.pool.take_back(lease);
    }
}

#[test]
fn a_timeout_repeats_a_small_window_from_the_oldest_packet() {
    let mut bench = Bench::new();
    bench.write(40 * MTU);
    assert_eq!(bench.send(99).len(), 40);
    let deadline = bench.requester.wake_at().unwrap();
    bench.expire().unwrap();
    assert_eq!(bench.counters.timeouts, 0, "not yet");
    bench.now = deadline;
    bench.expire().unwrap();
    let again = bench.send(99);
    assert_eq!(again[0], (0, 1024, false));
    assert_eq!(again.len(), 16, "16 KiB");
    assert_eq!(bench.counters.retransmits, 16);
}

/// A peer of our kind holds back the acknowledgement of a few packets for up to [`ACK_DELAY`]. What
/// is repeated in that time is repeated in vain. A peer that has received more answers at once, and
/// there a longer timeout would cost a lossy stream half of its throughput.
#[test]
fn the_timeout_allows_for_an_acknowledgement_that_may_be_held_back() {
    use super::super::responder::{ACK_DELAY, may_hold_back};
    let short = Duration::from_millis(1);
    let mut bench = Bench::new();
    let mut sent = 0;
    // A short round trip is known.
    for _ in 0..20 {
        bench.write(20 * MTU);
        sent += 20;
        bench.send(99);
        assert_eq!(
            bench.requester.wake_at(),
            Some(bench.now + bench.requester.congestion.timeout())
        );
        bench.now = bench.now + Duration::from_micros(50);
        bench.answer(Syndrome::ACK, sent - 1).unwrap();
        assert_eq!(bench.requester.wake_at(), None);
    }
    assert_eq!(bench.requester.congestion.timeout(), short);

    for (messages, patient) in [(1, true), (23, true), (24, false), (40, false)] {
        let begun = bench.now;
        for _ in 0..messages {
            bench.message();
        }
        bench.send(99);
        let waits = bench.requester.wake_at().unwrap().since(begun);
        assert!(may_hold_back(messages, 0) == patient && (waits > ACK_DELAY) == patient);
        assert!(patient && waits >= ACK_DELAY + short || waits == short, "{messages}: {waits:?}");
        sent += messages;
        bench.answer(Syndrome::ACK, sent - 1).unwrap();
    }

    // One message waits for its acknowledgement when a stream begins behind it: the peer answers
    // now, so what counts is the time since now.
    bench.message();
    bench.send(99);
    bench.now = bench.now + ACK_DELAY;
    bench.write(20 * MTU);
    bench.send(99);
    assert_eq!(bench.requester.wake_at(), Some(bench.now + short));
    // Its first packets are acknowledged. So few remain that the peer may hold them back.
    bench.answer(Syndrome::ACK, sent + 16).unwrap();
    assert!(bench.requester.wake_at().unwrap() > bench.now + ACK_DELAY);
    bench.now = bench.requester.wake_at().unwrap();
    bench.expire().unwrap();
    assert_eq!((bench.counters.timeouts, bench.send(99)[0].0), (1, sent + 17));
}

/// On a busy machine the peer is sometimes not scheduled for some milliseconds. If the timeout did
/// not learn that, each time would cause needless retransmissions.
#[test]
fn the_timeout_learns_from_spurious_timeouts_but_not_from_ambiguous_samples() {
    let mut bench = Bench::new();
    bench.write(40 * MTU);
    bench.send(99);
    bench.now = bench.now + Duration::from_millis(8);
    bench.expire().unwrap();
    bench.send(3);
    // It acknowledges more than was retransmitted, so it is for the first transmission.
    bench.answer(Syndrome::ACK, 39).unwrap();
    assert_eq!(bench.counters.timeouts_undone, 1);
    assert_eq!(bench.requester.congestion.timeout(), Duration::from_millis(8 + 4 * 4));

    let mut bench = Bench::new();
    bench.message();
    bench.send(99);
    let before = bench.requester.congestion.timeout();
    bench.now = bench.now + Duration::from_millis(8);
    bench.expire().unwrap();
    bench.send(99);
    bench.answer(Syndrome::ACK, 0).unwrap();
    assert_eq!(bench.counters.timeouts_undone, 0);
    assert_eq!(bench.requester.congestion.timeout(), before, "an ambiguous sample");
}

/// When a poller runs again after it lost its core, its timers have long expired, and the
/// acknowledgements may still wait in the socket. If that time counted as silence of the peer, all
/// applications of the link would be reset for nothing.
#[test]
fn time_in_which_we_did_not_run_is_no_silence_of_the_peer() {
    let mut bench = Bench::new();
    bench.message();
    for _ in 0..10 {
        bench.send(99);
        bench.now = bench.now + Duration::from_secs(5);
        assert_eq!(bench.expire(), Ok(()));
    }
    bench.send(99);
    bench.answer(Syndrome::ACK, 0).unwrap();
    assert_eq!(bench.completed(), 1);

    // Now it runs all the time, so the whole wait is silence of the peer.
    let before = bench.now;
    bench.message();
    let broke = loop {
        bench.send(99);
        bench.now = bench.requester.wake_at().unwrap();
        if let Err(cause) = bench.expire() {
            break cause;
        }
    };
    assert_eq!((broke, bench.now.since(before)), (QpError::RetriesExceeded, SILENCE_MAX));
}

/// The PSNs wrap after 16 million packets, and the sequence must not.
#[test]
fn psns_wrap_and_the_stream_continues() {
    let mut bench = Bench::new();
    for number in 0..10 {
        bench.message();
        assert_eq!(bench.send(99), [(number, 44, true)]);
        bench.answer(Syndrome::ACK, number).unwrap();
        assert_eq!(bench.completed(), 1);
    }
}

/// Linux arms its completion queue for solicited events only. It would acknowledge a message
/// without one but not process it until another event came, so that CONFIRM LINK would time out on
/// a wire that looks perfect. Writes must not cause events: the message behind announces them.
#[test]
fn every_message_causes_a_solicited_event_and_nothing_else_does() {
    let mut bench = Bench::new();
    bench.write(2 * MTU);
    bench.message();
    let long = vec![5; 2 * MTU as usize + 1].into();
    bench.requester.post(Work::SendLong { message: long, tag: Tag(0) });
    let short = vec![6; 44].into();
    bench.requester.post(Work::SendLong { message: short, tag: Tag(0) });
    let mut seen = Vec::new();
    while let Some(next) = bench.requester.next(bench.now) {
        let mut out = vec![0; next.len()];
        bench.requester.build(bench.now, next, false, &mut out, &mut bench.counters, |_, _| {});
        seen.push((out[0], out[1] & 0x80 != 0));
    }
    let expected = [
        (WRITE_ONLY, false),
        (WRITE_ONLY, false),
        (SEND_ONLY, true),
        (SEND_FIRST, false),
        (SEND_MIDDLE, false),
        (SEND_LAST, true),
        (SEND_ONLY, true),
    ];
    assert_eq!(seen, expected);
}

impl Bench {
    /// Sends the probe that waits, and checks that it is a duplicate of the packet before `oldest`.
    /// Returns its payload.
    fn take_probe(&mut self, oldest: u64) -> u32 {
        let next = self.requester.next(self.now).expect("a probe waits");
        let mut out = vec![0xaa; next.len()];
        self.requester.build(self.now, next, false, &mut out, &mut self.counters, |_, _| {});
        let packet = Packet::parse(&out).unwrap();
        assert_eq!(psn::advance(packet.psn, 1), psn::advance(FIRST, oldest));
        assert!(packet.ack_request);
        let Body::Write { reth, more: false, payload } = packet.body else { panic!("{packet:?}") };
        assert_eq!((reth.address, reth.rkey, reth.len as usize), (0, Rkey(0), payload.len()));
        reth.len
    }

    fn answer_probe(&mut self, oldest: u64) {
        let psn = psn::advance(psn::advance(FIRST, oldest), 0x00ff_ffff);
        let aeth = Aeth { syndrome: Syndrome::ACK, msn: 0 };
        self.requester.handle_answer(self.now, psn, aeth, &mut self.counters).unwrap();
    }

    /// Lets timeouts pass until black hole detection starts.
    fn doubt(&mut self) {
        while !self.requester.path.is_doubted() {
            self.send(999);
            self.now = self.requester.wake_at().unwrap();
            self.expire().unwrap();
        }
    }

    /// Answers probes as a path that carries `carries` bytes and a responder that expects `oldest`,
    /// until the unacknowledged requests are split again.
    fn resegment(&mut self, carries: u32, oldest: u64) {
        self.doubt();
        while self.requester.path.is_doubted() {
            if self.requester.next(self.now).is_some() {
                if self.take_probe(oldest) <= carries {
                    self.answer_probe(oldest);
                }
            } else {
                self.now = self.requester.wake_at().unwrap();
                self.expire().unwrap();
            }
        }
    }
}

/// Acknowledged bytes are not sent again. The others are sent from where they were, beginning with
/// the PSN that the responder expects.
#[test]
fn unacknowledged_requests_are_split_again() {
    let mut bench = Bench::new();
    bench.write(3 * MTU + 100);
    bench.message();
    bench.write(700);
    bench.send(99);
    // The first packet of the write has arrived; the path shrinks behind it.
    bench.answer(Syndrome::ACK, 0).unwrap();
    let begun = bench.now;
    bench.resegment(700, 1);
    assert!(bench.now.since(begun) >= PACKET_LIFE, "no old packet is in flight");
    assert_eq!((bench.counters.path_lowered, bench.requester.payload()), (1, 512));
    // The helper checks that each packet's address fits its bytes.
    let expected = [(1, 512), (2, 512), (3, 512), (4, 512), (5, 100), (6, 44), (7, 512), (8, 188)];
    let sent: Vec<_> = bench.send(99).into_iter().map(|(number, len, _)| (number, len)).collect();
    assert_eq!(sent, expected);
    bench.answer(Syndrome::ACK, 5).unwrap();
    assert_eq!(bench.completed(), 1);
    bench.answer(Syndrome::ACK, 8).unwrap();
    assert_eq!(bench.completed(), 2);
    assert_eq!(bench.requester.wake_at(), None);
}

/// A late answer to an old packet would acknowledge new packets that were never sent.
#[test]
fn answers_to_packets_from_before_the_split_are_ignored() {
    let mut bench = Bench::new();
    bench.write(4 * MTU);
    bench.send(99);
    bench.resegment(700, 0);
    for number in 0..4 {
        bench.answer(Syndrome::ACK, number).unwrap();
        bench.answer(Syndrome::SEQUENCE_ERROR, number).unwrap();
    }
    assert_eq!(bench.send(99).len(), 8);
}

/// If the acknowledgement was lost and not the packet, the answer to the probe is progress, and the
/// packets stay as they were.
#[test]
fn a_responder_that_is_further_than_we_knew_keeps_the_packets_as_they_are() {
    let mut bench = Bench::new();
    bench.write(4 * MTU);
    bench.send(99);
    bench.doubt();
    bench.take_probe(0);
    bench.answer(Syndrome::ACK, 2).unwrap();
    assert!(!bench.requester.path.is_doubted());
    assert_eq!(bench.send(99), [(3, 1024, true)]);
    assert_eq!(bench.counters.path_lowered, 0);
}

/// The receiver of a message of several packets requires the agreed size. So such a message keeps
/// its packets even if the requests around it are split again.
#[test]
fn a_message_of_several_packets_keeps_its_packets() {
    let mut bench = Bench::new();
    bench.write(MTU);
    bench
        .requester
        .post(Work::SendLong { message: vec![5; 2 * MTU as usize + 1].into(), tag: Tag(0) });
    bench.write(600);
    for _ in 0..4 {
        let next = bench.requester.next(bench.now).unwrap();
        let mut out = vec![0; next.len()];
        bench.requester.build(bench.now, next, true, &mut out, &mut bench.counters, |_, _| {});
    }
    // One of its packets has arrived.
    bench.answer(Syndrome::ACK, 1).unwrap();
    assert_eq!(bench.completed(), 1);
    bench.resegment(512, 2);
    let mut seen = Vec::new();
    while let Some(next) = bench.requester.next(bench.now) {
        let mut out = vec![0; next.len()];
        bench.requester.build(bench.now, next, true, &mut out, &mut bench.counters, |_, _| {});
        let packet = Packet::parse(&out).unwrap();
        seen.push((out[0], psn::distance(FIRST, packet.psn)));
    }
    assert_eq!(seen, [(SEND_MIDDLE, 2), (SEND_LAST, 3), (WRITE_ONLY, 4), (WRITE_ONLY, 5)]);
}

/// While a probe waits until all is acknowledged, nothing new follows a packet that asks: not even
/// behind packets that are repeated.
#[test]
fn new_packets_wait_for_a_probe_behind_repeated_ones() {
    let sizes = Sizes { ceiling: 4 * MTU, ..PLAIN };
    let mut bench =
        Bench { requester: Requester::new((Qpn(9), FIRST), sizes, 1 << 20), ..Bench::new() };
    bench.write(20 * MTU);
    assert_eq!(bench.send(99).len(), 20);
    bench.answer(Syndrome(0), 4).unwrap();
    assert!(bench.requester.path.is_probing());
    bench.write(60 * MTU);
    assert_eq!(bench.send(99), [], "the last packet has asked");
    bench.answer(Syndrome::SEQUENCE_ERROR, 5).unwrap();
    let seen = bench.send(99);
    assert_eq!((seen.len(), seen.last().unwrap().2), (32, true), "{seen:?}");
}
