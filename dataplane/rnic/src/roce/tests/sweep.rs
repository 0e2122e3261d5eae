//! Somebody who sends from the address of a peer and tries PSNs.

use smcr_proto::Psn;

use super::scenarios::stream;
use super::*;
use crate::Suspicion;
use crate::roce::guard::{ANSWERED_MAX, INTERVAL};
use crate::roce::icrc::Flow;
use crate::roce::psn::PSN_MASK;
use crate::roce::responder::ACK_DELAY;
use crate::roce::wire::{ACKNOWLEDGE, Aeth, Bth, SEND_ONLY, Syndrome};

/// A packet that node `to` takes for one of its peer. It has that identification.
pub(super) fn forge(
    couple: &Couple,
    to: usize,
    (opcode, psn): (u8, Psn),
    rest: &[u8],
    identification: u16,
) {
    let target = couple.nodes[to].address.qpn;
    let bth =
        Bth { opcode, solicited: false, payload_len: rest.len(), target, ack_request: true, psn };
    let mut packet = [&bth.encode()[..], rest, &[0; 4]].concat();
    let [from, to] = [1 - to, to].map(|node| address(u8::try_from(node).unwrap()));
    Flow::new(from, to).seal(identification, &mut packet);
    let (len, range) = (packet.len(), 0..packet.len());
    let run =
        Run { target: to, number: target, reacts: false, range, segment_len: len, segments: 1 };
    couple.network.plug(from).send(Instant::default(), &packet, &[run]);
}

/// All PSNs, in an order without pattern.
#[derive(Default)]
struct Guesses(u32);

impl Guesses {
    fn next(&mut self) -> Psn {
        self.0 += 1;
        Psn(self.0.wrapping_mul(0x9e_3779) & PSN_MASK)
    }

    /// The next that is far from what node 1 expects of a peer that has sent nothing yet.
    fn far(&mut self, couple: &Couple) -> Psn {
        let expected = couple.nodes[0].address.psn;
        std::iter::repeat_with(|| self.next())
            .find(|psn| !psn::is_near(expected, *psn))
            .expect("most are far")
    }
}

/// Node 0 streams to node 1, and `per_turn` guesses come to node 1 in each turn. Returns how many
/// came in all.
fn stream_beside_guesses(couple: &mut Couple, per_turn: u32) -> u32 {
    const LEN: usize = 8192;
    let mut guesses = Guesses::default();
    for round in 0..ROUNDS {
        let salt = u8::try_from(round % 256).unwrap();
        couple.write(0, 0, &pattern(LEN, salt), 2 * round);
        couple.nodes[0].send([salt; 44], 2 * round + 1);
        loop {
            let now = couple.now + TURN;
            couple.now = now;
            couple.nodes[0].take_in(now);
            couple.nodes[0].fabric.transmit(now);
            // They come behind the data of this turn.
            for _ in 0..per_turn {
                forge(couple, 1, (SEND_ONLY, guesses.next()), &[0xee; 44], 0);
            }
            couple.nodes[1].take_in(now);
            couple.nodes[1].fabric.transmit(now);
            if couple.nodes[0].pool.leases_out() <= 8 {
                break;
            }
        }
    }
    couple.run_until_quiet();
    let received: Vec<_> = couple.nodes[1].received.iter().map(|message| message[0]).collect();
    let sent: Vec<_> = (0..ROUNDS).map(|round| u8::try_from(round % 256).unwrap()).collect();
    assert_eq!(received, sent, "nothing is missing, twice there, or forged");
    assert_eq!(couple.nodes[1].read(0, LEN), pattern(LEN, *sent.last().unwrap()));
    assert!(couple.nodes.iter().all(|node| node.broke.is_empty()));
    guesses.0
}

const ROUNDS: u64 = 600;

/// Each guess had us send a NAK or an acknowledgement. The peer went back each time and halved its
/// window, so whoever knew the number of a queue pair could slow it down. And no operator could see
/// it.
#[test]
fn guesses_neither_slow_a_stream_down_nor_stay_unseen() {
    let mut calm = Couple::new(1, Odds::default());
    stream_beside_guesses(&mut calm, 0);
    let mut couple = Couple::new(1, Odds::default());
    let guesses = u64::from(stream_beside_guesses(&mut couple, 8));
    let (sender, receiver) = (couple.counters(0), couple.counters(1));
    assert!(guesses > 4_000, "{guesses}");
    // Of 256 guesses one is near by chance.
    assert!((guesses * 98 / 100..=guesses).contains(&receiver.psn_errors), "{receiver:?}");
    assert!(receiver.naks_out <= u64::from(ANSWERED_MAX), "{receiver:?}");
    assert!(sender.retransmits < 1_000, "{sender:?}");
    assert!(couple.now.0 < calm.now.0 * 11 / 10, "{:?} {:?}", couple.now, calm.now);
}

/// A lost packet is repeated though somebody guesses: some microseconds later, which on this
/// network are a few round trips. No connection stands still.
#[test]
fn a_stream_with_losses_goes_on_beside_guesses() {
    let odds = Odds { loss: Chance::percent(1), ..Odds::default() };
    let mut calm = Couple::new(1, odds);
    stream_beside_guesses(&mut calm, 0);
    let mut couple = Couple::new(1, odds);
    stream_beside_guesses(&mut couple, 8);
    assert!(couple.now.0 < calm.now.0 * 2, "{:?} {:?}", couple.now, calm.now);
}

/// Somebody tried PSNs and has stopped; the queue pair still counts as swept. Then the first packet
/// of a flight is lost, and the others come at once, as the kernel delivers them. The guesses of
/// [`stream_beside_guesses`] hide what happens in silence: each that is near is a packet behind the
/// gap.
#[test]
fn a_loss_in_silence_after_guesses_costs_no_timeout() {
    for behind in [3, 4, 10] {
        let mut couple = Couple::new(1, Odds::default());
        let mut guesses = Guesses::default();
        for _ in 0..=ANSWERED_MAX {
            forge(&couple, 1, (SEND_ONLY, guesses.far(&couple)), &[0xee; 44], 0);
        }
        couple.nodes[0].send([0xff; 44], 0xff);
        couple.run_until_quiet();
        assert_eq!(couple.counters(1).psn_errors, u64::from(ANSWERED_MAX) + 1);
        let (begun, naks) = (couple.now, couple.counters(0).naks_in);
        couple.network.change_odds(Odds { loss: Chance::ALWAYS, ..Odds::default() });
        couple.nodes[0].send([0; 44], 0);
        couple.nodes[0].fabric.transmit(begun);
        couple.network.change_odds(Odds::default());
        for message in 1..=behind {
            couple.nodes[0].send([message; 44], message.into());
        }
        couple.run_until_quiet();
        let messages: Vec<_> = couple.nodes[1].received.iter().map(|it| it[0]).collect();
        assert_eq!(messages, [vec![0xff], (0..=behind).collect()].concat());
        let (sender, took) = (couple.counters(0), couple.now.since(begun));
        assert_eq!(
            (sender.timeouts, sender.naks_in - naks),
            (0, 1),
            "{behind} behind it: {took:?}"
        );
        // At the end the last acknowledgement is held back.
        let repeated = took.saturating_sub(ACK_DELAY);
        assert!(repeated < Duration::from_micros(500), "{behind} behind it: {took:?}");
    }
}

/// Whoever reads the log must learn which queue pair is meant, and must not drown in lines.
#[test]
fn the_control_thread_hears_of_guesses_once_in_each_interval() {
    let mut couple = Couple::new(1, Odds::default());
    let mut guesses = Guesses::default();
    let about = |couple: &Couple, packets| Suspicion {
        qpn: couple.nodes[1].address.qpn,
        peer: couple.nodes[0].address.gid,
        packets,
    };
    let mut reported = 0;
    for interval in 0..3 {
        // The first ones of an interval may belong to a good peer.
        let first = couple.counters(1).psn_errors + u64::from(ANSWERED_MAX) + 1;
        for _ in 0..100 {
            for _ in 0..10 {
                forge(&couple, 1, (SEND_ONLY, guesses.next()), &[0; 44], 0);
            }
            couple.turn();
        }
        let report = couple.nodes[1].rnic.event().expect("it was told");
        let expected = crate::Event::Suspicion(about(&couple, first - reported));
        assert_eq!(report, expected, "interval {interval}");
        assert_eq!(couple.nodes[1].rnic.event(), None, "once");
        reported = first;
        couple.now = couple.now + INTERVAL;
    }
    assert_eq!(couple.nodes[0].rnic.event(), None, "nobody attacks the other end");
}

/// The answers to our own requests can be forged as well. A NAK that refuses a request breaks the
/// queue pair, if its PSN is one in flight.
#[test]
fn guessed_answers_are_counted_too() {
    let mut couple = Couple::new(1, Odds::default());
    couple.write(0, 0, &pattern(4096, 1), 1);
    couple.nodes[0].send([1; 44], 2);
    let now = couple.now;
    couple.nodes[0].fabric.transmit(now);
    let mut guesses = Guesses::default();
    for _ in 0..1_000 {
        let refusal = Aeth { syndrome: Syndrome::ACCESS_ERROR, msn: 0 };
        forge(&couple, 0, (ACKNOWLEDGE, guesses.next()), &refusal.encode(), 0);
    }
    couple.run_until_quiet();
    assert_eq!(couple.nodes[0].done, [(Tag(1), Status::Done), (Tag(2), Status::Done)]);
    assert!(couple.counters(0).psn_errors > 980, "{:?}", couple.counters(0));
    assert!(couple.nodes[0].rnic.event().is_some());
}

/// A peer with more packets in flight than we know of any must learn where we are, or it would
/// retransmit from there for ever.
#[test]
fn a_peer_that_is_far_behind_is_told_where_we_are() {
    let mut couple = Couple::new(1, Odds::default());
    couple.nodes[0].send([1; 44], 1);
    couple.run_until_quiet();
    let before = couple.counters(1).acks_out;
    let behind = psn::advance(couple.nodes[0].address.psn, (1 << 24) - 100_000);
    for _ in 0..3 {
        forge(&couple, 1, (SEND_ONLY, behind), &[0; 44], 0);
        couple.run_until_quiet();
    }
    assert_eq!(couple.counters(1).acks_out, before + 3);
    assert_eq!((couple.counters(1).psn_errors, couple.nodes[1].received.len()), (3, 1));
}

/// Networks lose, repeat, delay and reorder packets. None of that is an attack. The stream is
/// longer than the distance up to which a PSN is near, so what is near must move with it; and it
/// goes over the end of the number space.
#[test]
fn a_bad_network_is_no_suspect() {
    let odds = Odds {
        loss: Chance::percent(1),
        repeat: Chance::percent(3),
        overtake: Chance::percent(3),
        damage: Chance::percent(1),
        ..Odds::default()
    };
    let mut couple = Couple::with_mtu(1, odds, Mtu::B256);
    couple.network.hide_identification();
    stream(&mut couple, 4_500, 2048);
    for node in 0..2 {
        assert_eq!(couple.counters(node).psn_errors, 0);
        assert_eq!(couple.nodes[node].rnic.event(), None);
    }
    let sent = couple.counters(0);
    assert!(sent.packets_out - sent.retransmits - sent.acks_out > psn::NEAR.into(), "{sent:?}");
    assert!(sent.retransmits > 0);
}
