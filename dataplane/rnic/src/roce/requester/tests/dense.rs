//! Requests that share packets.

use super::*;
use crate::LONG_MESSAGE_MAX;
use crate::roce::wire::{self, probe_len};

const DENSE: Sizes = Sizes { dense: true, ..PLAIN };

/// A packet in short: the number of its first part, the payload of each part, and whether it
/// requests an acknowledgement.
type Seen = (u64, Vec<usize>, bool);

impl Bench {
    fn dense() -> Self {
        Self { requester: Requester::new((Qpn(9), FIRST), DENSE, 1 << 20), ..Self::new() }
    }

    /// Sends all packets that may be sent.
    fn send_dense(&mut self) -> Vec<Seen> {
        let mut seen = Vec::new();
        while let Some(next) = self.requester.next(self.now) {
            let mut out = vec![0xaa; next.len()];
            self.requester.build(self.now, next, false, &mut out, &mut self.counters, |_, _| {});
            assert!(next.len() <= probe_len(self.requester.payload()), "{next:?}");
            let packet = Packet::parse(&out).unwrap();
            let parts = if let Body::Dense(parts) = packet.body {
                parts.map(payload_len).collect()
            } else {
                vec![payload_len(packet.body)]
            };
            seen.push((psn::distance(FIRST, packet.psn).into(), parts, packet.ack_request));
        }
        seen
    }
}

/// A packet is no longer than a full one; what does not fit leaves as it always did.
#[test]
fn requests_share_a_packet_as_far_as_they_fit() {
    let mut bench = Bench::dense();
    for len in [972, 976, MTU] {
        bench.write(len);
        bench.message();
    }
    let expected = [
        (0, vec![972, 44], false),
        (2, vec![976], false),
        (3, vec![44], false),
        (4, vec![1024], false),
        (5, vec![44], true),
    ];
    assert_eq!(bench.send_dense(), expected);
    let mut bench = Bench::dense();
    bench.write(2 * MTU + 10);
    bench.message();
    bench.write(20);
    bench.message();
    let expected =
        [(0, vec![1024], false), (1, vec![1024], false), (2, vec![10, 44, 20, 44], true)];
    assert_eq!(bench.send_dense(), expected);
    assert_eq!(bench.counters.packed, 3);
}

/// A message of several packets has packets of the agreed size, and so has its end.
#[test]
fn long_messages_share_no_packet() {
    let mut bench = Bench::dense();
    bench.write(10);
    let message = vec![5; LONG_MESSAGE_MAX].into();
    bench.requester.post(Work::SendLong { message, tag: Tag(0) });
    bench.write(10);
    bench.message();
    let mut lens = Vec::new();
    while let Some(next) = bench.requester.next(bench.now) {
        let mut out = vec![0; next.len()];
        bench.requester.build(bench.now, next, false, &mut out, &mut bench.counters, |_, _| {});
        lens.push((out[0], next.len()));
    }
    assert_eq!((lens[0].0, lens[1].0, lens[8].0), (WRITE_ONLY, SEND_FIRST, SEND_LAST));
    assert_eq!((lens.len(), lens[9].0), (10, wire::DENSE));
}

/// An acknowledgement may be for some parts only. The others then share packets with what came
/// since.
#[test]
fn what_is_repeated_begins_where_the_receiver_is() {
    let mut bench = Bench::dense();
    for _ in 0..2 {
        bench.write(64);
        bench.message();
    }
    assert_eq!(bench.send_dense(), [(0, vec![64, 44, 64, 44], true)]);
    bench.answer(Syndrome::ACK, 0).unwrap();
    bench.write(7);
    bench.answer(Syndrome::SEQUENCE_ERROR, 1).unwrap();
    assert_eq!(bench.send_dense(), [(1, vec![44, 64, 44, 7], true)]);
    assert_eq!((bench.counters.retransmits, bench.completed()), (1, 1));
    bench.answer(Syndrome::ACK, 4).unwrap();
    assert_eq!((bench.completed(), bench.requester.wake_at()), (4, None));
}

/// A peer without room for one message repeats nothing that it has executed.
#[test]
fn a_peer_without_room_gets_the_rest_later() {
    let mut bench = Bench::dense();
    bench.write(64);
    bench.message();
    bench.message();
    bench.send_dense();
    bench.answer(Syndrome::NOT_READY, 2).unwrap();
    assert_eq!((bench.completed(), bench.send_dense()), (2, vec![]));
    bench.now = bench.requester.wake_at().unwrap();
    bench.expire().unwrap();
    assert_eq!(bench.send_dense(), [(2, vec![44], true)]);
}

/// Many small requests in one packet may be too large for the path where each alone would pass.
#[test]
fn a_dense_packet_may_be_too_large_for_the_path() {
    let mut bench = Bench::dense();
    (0..22).for_each(|_| bench.message());
    while !bench.requester.path.is_doubted() {
        let sent = bench.send_dense();
        assert_eq!(sent[0].1.len(), 21);
        bench.now = bench.requester.wake_at().unwrap();
        bench.expire().unwrap();
    }
    bench.resegment(700, 0);
    assert_eq!((bench.counters.path_lowered, bench.requester.payload()), (1, 512));
    let sent: Vec<_> =
        bench.send_dense().into_iter().map(|(at, parts, _)| (at, parts.len())).collect();
    assert_eq!(sent, [(0, 11), (11, 11)]);
}

/// Where trains are lost and packets alone pass, that shows in the answer to one packet alone,
/// however many requests it holds.
#[test]
fn a_dense_packet_alone_tells_that_trains_are_lost() {
    let mut bench = Bench::dense();
    let mut at = 0;
    while !bench.requester.splits_trains(bench.now) {
        (0..60).for_each(|_| bench.message());
        for attempt in 0..3 {
            let sent = bench.send_dense().len();
            assert_eq!(sent, if attempt == 2 { 1 } else { 3 });
            if attempt < 2 {
                bench.now = bench.requester.wake_at().unwrap();
                bench.expire().unwrap();
            }
        }
        at += 21;
        bench.answer(Syndrome::ACK, at - 1).unwrap();
        at += 39;
        bench.send_dense();
        bench.answer(Syndrome::ACK, at - 1).unwrap();
        bench.completed();
        assert!(at < 600, "it is never noticed");
    }
}
