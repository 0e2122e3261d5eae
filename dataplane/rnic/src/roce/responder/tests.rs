use smcr_memory::Region;
use smcr_proto::{Qpn, Rkey};

use super::super::shared::{KeyUpdate, Shared};
use super::*;

/// A responder with one region, and a sender of requests in order.
struct Bench {
    responder: Responder,
    keys: Keys,
    region: Region,
    counters: Counters,
    psn: Psn,
    now: Instant,
    /// Somebody tries PSNs.
    swept: bool,
}

const MTU: usize = 256;
const KEY: Rkey = Rkey(0x1234_5678);
const FIRST: Psn = Psn(0xff_fffe);

/// A message in one packet.
fn whole(payload: &[u8]) -> Body<'_> {
    Body::Send { first: true, more: false, payload }
}

impl Bench {
    fn new() -> Self {
        let region = Region::new(4096).unwrap();
        let shared = Shared::new();
        assert!(shared.count_key());
        let domain = Domain(1);
        let address = region.address();
        shared.push(KeyUpdate::Open { rkey: KEY, domain, placer: region.placer(), address });
        let mut keys = Keys::new();
        keys.catch_up(&shared);
        Self {
            responder: Responder::new((domain, Messages::Short), (256, 256), FIRST),
            keys,
            region,
            counters: Counters::default(),
            psn: FIRST,
            now: Instant(1_000_000_000),
            swept: false,
        }
    }

    fn handle(
        &mut self,
        psn: Psn,
        body: Body<'_>,
        room: bool,
    ) -> Result<Option<Received>, Refused> {
        let packet = Packet { target: Qpn(77), psn, ack_request: true, body };
        let room = (room, self.swept);
        let outcome =
            self.responder.handle(self.now, &packet, &self.keys, room, &mut self.counters);
        self.keys.finish();
        outcome
    }

    /// The next request in order.
    fn next(&mut self, body: Body<'_>) -> Result<Option<Received>, Refused> {
        let psn = self.psn;
        self.psn = psn::advance(psn, 1);
        self.handle(psn, body, true)
    }

    fn ahead(&self, count: u64) -> Psn {
        psn::advance(FIRST, count)
    }

    /// The acknowledgement or NAK that must be sent without delay.
    fn urgent(&mut self) -> Option<(Syndrome, Psn)> {
        self.due(Occasion::Turn)
    }

    fn due(&mut self, occasion: Occasion) -> Option<(Syndrome, Psn)> {
        let due = self.responder.is_due(self.now, occasion);
        due.then(|| self.responder.answer()).map(|answer| (answer.aeth.syndrome, answer.psn))
    }

    fn reth(&self, at: u64, len: u32) -> Reth {
        Reth { address: self.region.address() + at, rkey: KEY, len }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = vec![0; 4096];
        self.region.copy_out(0, &mut out);
        out
    }
}

/// Hardware and `rdma_rxe` send long writes as FIRST, MIDDLE and LAST.
#[test]
fn a_write_of_several_packets_is_one_message() {
    let mut bench = Bench::new();
    let (first, middle, last) = ([1; MTU], [2; MTU], [3; 10]);
    let reth = bench.reth(100, 522);
    assert_eq!(bench.next(Body::Write { reth, more: true, payload: &first }), Ok(None));
    assert_eq!(bench.next(Body::WriteOn { more: true, payload: &middle }), Ok(None));
    assert_eq!(bench.responder.answer().aeth.msn, 0);
    assert_eq!(bench.next(Body::WriteOn { more: false, payload: &last }), Ok(None));
    assert_eq!(bench.responder.answer().aeth.msn, 1);
    let bytes = bench.bytes();
    assert_eq!(bytes[100..622], [&first[..], &middle, &last].concat());
    assert!(bytes[..100].iter().chain(&bytes[622..]).all(|byte| *byte == 0));
}

/// Even the first packet must not be placed if the last one would be outside the region.
#[test]
fn a_long_write_is_checked_as_a_whole() {
    let mut bench = Bench::new();
    let reth = bench.reth(4096 - 500, 501);
    assert_eq!(bench.next(Body::Write { reth, more: true, payload: &[1; MTU] }), Err(Refused));
    assert!(bench.bytes().iter().all(|byte| *byte == 0));
    assert_eq!(bench.urgent(), Some((Syndrome::ACCESS_ERROR, FIRST)));
    assert_eq!(bench.counters.rkey_errors, 1);
}

/// Nobody may read the memory of others over the network, or change it in ways that were not
/// agreed on.
// RFC 7609 2.1 #4: only the peer writes an RMB
#[test]
fn requests_that_break_the_rules_are_refused() {
    let full = [0; MTU];
    let longer = [0; MTU + 4];
    let at = |len| Bench::new().reth(0, len);
    let bad = [
        Body::Unserved,
        whole(&[0; 45]),
        Body::WriteOn { more: false, payload: &full },
        Body::WriteOn { more: true, payload: &full },
        Body::Write { reth: at(300), more: false, payload: &full },
        Body::Write { reth: at(255), more: false, payload: &full },
        Body::Write { reth: at(260), more: false, payload: &longer },
        Body::Write { reth: at(300), more: true, payload: &full[..252] },
        Body::Write { reth: at(256), more: true, payload: &full },
        Body::Write { reth: at(u32::MAX), more: true, payload: &full },
    ];
    for body in bad {
        let mut bench = Bench::new();
        assert_eq!(bench.next(body), Err(Refused), "{body:?}");
        assert_eq!(bench.urgent(), Some((Syndrome::INVALID_REQUEST, FIRST)));
        assert_eq!(bench.counters.invalid_requests, 1);
    }
}

#[test]
fn no_other_request_may_come_between_the_packets_of_a_write() {
    let others = [
        whole(&[0; 44]),
        Body::Write { reth: Bench::new().reth(0, 4), more: false, payload: &[0; 4] },
        Body::WriteOn { more: true, payload: &[0; 44] },
        Body::WriteOn { more: false, payload: &[0; 45] },
    ];
    for body in others {
        let mut bench = Bench::new();
        let reth = bench.reth(0, 300);
        bench.next(Body::Write { reth, more: true, payload: &[1; MTU] }).unwrap();
        assert_eq!(bench.next(body), Err(Refused), "{body:?}");
    }
}

#[test]
fn a_write_of_zero_bytes_succeeds_and_changes_nothing() {
    let mut bench = Bench::new();
    let reth = Reth { address: 1, rkey: Rkey(0), len: 0 };
    assert_eq!(bench.next(Body::Write { reth, more: false, payload: &[] }), Ok(None));
}

/// Executing a write twice would overwrite the bytes of later writes.
#[test]
fn duplicates_are_acknowledged_again_but_not_executed() {
    let mut bench = Bench::new();
    assert_eq!(bench.next(whole(&[5; 44])), Ok(Some(Received::Short([5; 44]))));
    let reth = bench.reth(0, 4);
    bench.next(Body::Write { reth, more: false, payload: &[1; 4] }).unwrap();
    bench.responder.answer();
    for psn in [FIRST, bench.ahead(1), psn::advance(FIRST, (1 << 24) - 5)] {
        let again = Body::Write { reth, more: false, payload: &[2; 4] };
        assert_eq!(bench.handle(psn, again, true), Ok(None));
        assert_eq!(bench.urgent(), Some((Syndrome::ACK, bench.ahead(1))));
    }
    assert_eq!(bench.bytes()[..5], [1, 1, 1, 1, 0]);
    assert_eq!(bench.counters.duplicates, 3);
}

/// If each packet behind a gap caused a NAK, the peer would retransmit over and over. If only one
/// NAK were sent and the retransmission was lost too, the peer would wait for a timeout.
#[test]
fn a_gap_causes_one_nak_per_round_trip() {
    let mut bench = Bench::new();
    let message = whole(&[0; 44]);
    for ahead in 1..5 {
        assert_eq!(bench.handle(bench.ahead(ahead), message, true), Ok(None));
    }
    assert_eq!(bench.urgent(), Some((Syndrome::SEQUENCE_ERROR, FIRST)));
    bench.handle(bench.ahead(5), message, true).unwrap();
    assert_eq!(bench.urgent(), None);
    bench.now = bench.now + NAK_INTERVAL;
    bench.handle(bench.ahead(6), message, true).unwrap();
    assert_eq!(bench.urgent(), Some((Syndrome::SEQUENCE_ERROR, FIRST)));
    assert_eq!(bench.counters.out_of_order, 6);

    // This gap is a new one, so it causes a NAK at once.
    bench.next(message).unwrap();
    bench.handle(bench.ahead(3), message, true).unwrap();
    assert_eq!(bench.urgent(), Some((Syndrome::SEQUENCE_ERROR, bench.ahead(1))));
}

/// Somebody who tries PSNs in the peer's name hits some that are a little ahead. If each of them
/// caused a NAK, the peer would go back each time, and its window would stay at its minimum. A gap
/// that lasts is one, whoever else sends.
#[test]
fn while_psns_are_tried_only_a_gap_with_packets_behind_it_causes_a_nak() {
    let mut bench = Bench { swept: true, ..Bench::new() };
    let message = whole(&[0; 44]);
    for count in 0..100 {
        for guess in 1..BEHIND_MIN {
            bench.handle(bench.ahead(u64::from(count + 2 * guess)), message, true).unwrap();
            // However long the peer is silent.
            bench.now = bench.now + Duration::from_millis(1);
            assert_eq!(bench.urgent(), None);
        }
        bench.next(message).unwrap();
        let acknowledged = Some((Syndrome::ACK, bench.ahead(count.into())));
        assert_eq!(bench.due(Occasion::WithData), acknowledged, "guesses do not replace it");
    }
    // All at once, and nothing follows.
    for ahead in 101..101 + u64::from(BEHIND_MIN) {
        assert_eq!(bench.urgent(), None);
        bench.handle(bench.ahead(ahead), message, true).unwrap();
    }
    assert_eq!(bench.urgent(), Some((Syndrome::SEQUENCE_ERROR, bench.ahead(100))));
    bench.handle(bench.ahead(110), message, true).unwrap();
    assert_eq!(bench.urgent(), None, "once");
}

/// A guess takes nothing away from the peer: the acknowledgement that it waits for is sent in time.
#[test]
fn while_psns_are_tried_a_guess_leaves_the_acknowledgement_alone() {
    let mut bench = Bench { swept: true, ..Bench::new() };
    bench.next(whole(&[0; 44])).unwrap();
    let due = bench.responder.deadline();
    bench.handle(bench.ahead(5), whole(&[0; 44]), true).unwrap();
    assert_eq!(bench.responder.deadline(), due);
    assert_eq!(bench.due(Occasion::Last), Some((Syndrome::ACK, FIRST)));
}

#[test]
fn reordered_packets_cause_no_nak() {
    let mut bench = Bench::new();
    bench.handle(bench.ahead(1), whole(&[0; 44]), true).unwrap();
    bench.next(whole(&[0; 44])).unwrap();
    assert_eq!(bench.urgent(), Some((Syndrome::ACK, FIRST)));
}

#[test]
fn without_room_the_peer_is_told_to_wait_and_may_try_again() {
    let mut bench = Bench::new();
    let message = whole(&[9; 44]);
    assert_eq!(bench.handle(FIRST, message, false), Ok(None));
    // A sequence NAK for the packets behind it would make the peer retransmit at once.
    assert_eq!(bench.handle(bench.ahead(1), message, true), Ok(None));
    assert_eq!(bench.urgent(), Some((Syndrome::NOT_READY, FIRST)));
    assert_eq!(bench.handle(FIRST, message, true), Ok(Some(Received::Short([9; 44]))));
    assert_eq!(bench.counters.rnr, 1);
}

/// Each acknowledgement costs a packet and perhaps a system call, but a peer that waits for one is
/// slow.
#[test]
fn an_acknowledgement_waits_a_little_but_not_for_a_full_window() {
    let mut bench = Bench::new();
    let message = whole(&[0; 44]);
    bench.next(message).unwrap();
    assert_eq!(bench.urgent(), None);
    assert_eq!(bench.due(Occasion::WithData), Some((Syndrome::ACK, FIRST)));
    assert_eq!(bench.due(Occasion::Turn), None, "everything is acknowledged");

    bench.next(message).unwrap();
    assert_eq!(bench.responder.deadline(), Some(bench.now + ACK_DELAY));
    bench.now = bench.now + ACK_DELAY;
    assert_eq!(bench.urgent(), Some((Syndrome::ACK, bench.ahead(1))));

    // Data that leaves for the peer anyway takes it along once it has waited for half of that.
    bench.next(message).unwrap();
    let soon = Duration::from_nanos(1);
    bench.now = bench.now + (ACK_DELAY / 2 - soon);
    assert_eq!((bench.urgent(), bench.due(Occasion::BesideData)), (None, None));
    bench.now = bench.now + soon;
    assert_eq!(bench.urgent(), None);
    assert_eq!(bench.due(Occasion::BesideData), Some((Syndrome::ACK, bench.ahead(2))));
    bench.next(message).unwrap();
    assert!(bench.due(Occasion::Last).is_some(), "nobody will ask again");
}

/// A Linux peer has few messages on their way. An acknowledgement that becomes due by their number
/// waits for the data that answers them, for another half of what came before.
#[test]
fn many_messages_are_acknowledged_beside_the_next_data_or_soon() {
    let message = whole(&[0; 44]);
    let write = |bench: &Bench| Body::Write { reth: bench.reth(0, 1), more: false, payload: &[1] };
    for with_writes in [false, true] {
        let mut bench = Bench::new();
        for count in 1..=12 {
            if with_writes {
                bench.next(write(&bench)).unwrap();
            }
            bench.next(message).unwrap();
            let due = |occasion| bench.responder.is_due(bench.now, occasion);
            assert_eq!(due(Occasion::BesideData), count >= 8, "{count}");
            assert_eq!(due(Occasion::Turn), count >= 12, "{count}");
        }
        assert!(bench.urgent().is_some());
        assert!(!bench.responder.is_due(bench.now, Occasion::BesideData));
    }
    let mut bench = Bench::new();
    for count in 1..=PACKETS_UNANSWERED_MAX {
        bench.next(write(&bench)).unwrap();
        let due = bench.responder.is_due(bench.now, Occasion::Turn);
        assert_eq!(due, count == PACKETS_UNANSWERED_MAX, "{count} writes");
    }
}

/// An acknowledgement that leaves beside data needs no system call of its own and wakes nobody. So
/// data that leaves regularly must take it along, at whatever interval up to half the delay,
/// whenever the first leaves; and at longer ones if the first leaves when the acknowledgement
/// becomes due.
#[test]
fn regular_data_takes_the_acknowledgement_along_before_its_time_is_over() {
    let delay = u64::try_from(ACK_DELAY.as_micros()).unwrap();
    for interval in (1..delay).step_by(3) {
        let phases = if interval <= delay / 2 { 0..interval } else { 0..1 };
        for phase in phases {
            let mut bench = Bench::new();
            bench.next(whole(&[0; 44])).unwrap();
            let deadline = bench.responder.deadline().unwrap();
            bench.now = bench.now + Duration::from_micros(phase);
            let mut departures = 0;
            while bench.due(Occasion::BesideData).is_none() {
                departures += 1;
                bench.now = bench.now + Duration::from_micros(interval);
                assert!(bench.now < deadline, "{phase} us, then every {interval} us");
            }
            assert!(departures > 0, "it waits for the packets that may follow");
        }
    }
}

/// The sender's window may be as small as 16 KiB, which a few large packets fill.
#[test]
fn a_small_window_of_large_packets_is_acknowledged_at_once() {
    let mut bench = Bench::new();
    bench.responder = Responder::new((Domain(1), Messages::Short), (4096, 4096), FIRST);
    let reth = bench.reth(0, 4096);
    for count in 1..=4 {
        bench.next(Body::Write { reth, more: false, payload: &[1; 4096] }).unwrap();
        assert_eq!(bench.urgent().is_some(), count == 4);
    }
}

/// A request that does not request an acknowledgement gets none. Hardware NICs rely on this.
#[test]
fn a_request_without_the_ack_request_bit_is_not_acknowledged() {
    let mut bench = Bench::new();
    let body = whole(&[0; 44]);
    let packet = Packet { target: Qpn(77), psn: FIRST, ack_request: false, body };
    let (now, keys) = (bench.now, &bench.keys);
    let room = (true, false);
    bench.responder.handle(now, &packet, keys, room, &mut bench.counters).unwrap();
    assert_eq!(bench.due(Occasion::Turn), None);
}

/// Some LLC messages of SMC-Rv2 take several packets. If they were truncated or joined wrongly,
/// first contacts with Linux would fail.
#[test]
fn joins_a_message_of_several_packets() {
    let mut bench = Bench::new();
    bench.responder.messages = Messages::Long;
    let bytes: Vec<u8> = (0..600_u32).map(|n| n.to_le_bytes()[0]).collect();
    let part =
        |first, more, at: std::ops::Range<usize>| Body::Send { first, more, payload: &bytes[at] };
    for _ in 0..2 {
        assert_eq!(bench.next(part(true, true, 0..256)), Ok(None));
        assert_eq!(bench.next(part(false, true, 256..512)), Ok(None));
        let joined = bench.next(part(false, false, 512..600));
        assert_eq!(joined, Ok(Some(Received::Long(bytes.clone().into()))));
    }
    assert_eq!(bench.next(part(true, false, 0..88)), Ok(Some(Received::Long(bytes[..88].into()))));
    assert_eq!(bench.next(whole(&[5; 44])), Ok(Some(Received::Short([5; 44]))));
}

/// A peer must not make us buffer without limit, nor place a write inside a message.
#[test]
fn refuses_packets_that_do_not_belong_to_a_long_message() {
    let begin = Body::Send { first: true, more: true, payload: &[1; 256] };
    let middle = Body::Send { first: false, more: true, payload: &[1; 256] };
    let write =
        Body::Write { reth: Reth { address: 0, rkey: KEY, len: 0 }, more: false, payload: &[] };
    let last = Body::Send { first: false, more: false, payload: &[1; 9] };
    let short = Body::Send { first: true, more: true, payload: &[1; 255] };
    for (name, bodies) in [
        ("another message", vec![begin, whole(&[0; 44])]),
        ("another FIRST", vec![begin, begin]),
        ("a write", vec![begin, write]),
        ("LAST without FIRST", vec![last]),
        ("a FIRST that is not full", vec![short]),
        ("too many bytes", [vec![begin], vec![middle; 32]].concat()),
    ] {
        let mut bench = Bench::new();
        bench.responder.messages = Messages::Long;
        let (end, before) = bodies.split_last().unwrap();
        for body in before {
            assert_eq!(bench.next(*body), Ok(None), "{name}");
        }
        assert_eq!(bench.next(*end), Err(Refused), "{name}");
    }
    let mut bench = Bench::new();
    assert_eq!(bench.next(begin), Err(Refused), "a queue pair that takes short messages only");
}

/// A peer that never asks for an acknowledgement is no reason to end the process of whoever checks
/// for overflows.
#[test]
fn what_is_never_acknowledged_is_counted_up_to_the_end() {
    let mut bench = Bench::new();
    bench.responder.cost = u32::MAX - 1;
    bench.responder.packets = u32::MAX;
    let (psn, body) = (bench.psn, whole(&[0; 44]));
    let packet = Packet { target: Qpn(77), psn, ack_request: false, body };
    let (now, keys, room) = (bench.now, &bench.keys, (true, false));
    let outcome = bench.responder.handle(now, &packet, keys, room, &mut bench.counters);
    assert_eq!(outcome, Ok(Some(Received::Short([0; 44]))));
}
