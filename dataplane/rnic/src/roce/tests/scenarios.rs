//! Scenarios that users would notice if they failed, one test each.

use rustix::io::Errno;

use super::sweep::forge;
use super::*;
use crate::roce::responder::ACK_DELAY;
use crate::{ConnectError, Signs};

#[test]
fn a_write_is_there_when_the_message_behind_it_is_received() {
    let mut couple = Couple::new(1, Odds::default());
    let bytes = pattern(10_001, 3);
    couple.write(0, 5, &bytes, 1);
    couple.nodes[0].send([9; 44], 2);
    couple.run_until_quiet();
    assert_eq!(couple.nodes[1].received, [[9; 44]]);
    assert_eq!(couple.nodes[1].read(5, 10_001), bytes);
    assert_eq!(couple.nodes[1].read(0, 5), [0; 5], "nothing before it");
    assert_eq!(couple.nodes[1].read(10_006, 100), [0; 100], "nothing behind it");
    assert_eq!(couple.nodes[0].done, [(Tag(1), Status::Done), (Tag(2), Status::Done)]);
    assert_eq!(couple.nodes[0].pool.leases_out(), 0);
    assert_eq!(couple.counters(0).retransmits, 0);
}

/// A gateway spends its time on packets, so a write and its message must cost one acknowledgement.
#[test]
fn a_write_and_its_message_need_one_acknowledgement() {
    let mut couple = Couple::new(1, Odds::default());
    couple.write(0, 0, &pattern(4096, 1), 1);
    couple.nodes[0].send([1; 44], 2);
    couple.turn();
    assert_eq!(couple.counters(0).packets_out, 5);
    couple.run_until_quiet();
    assert_eq!(couple.counters(1).acks_out, 1);
    assert_eq!(couple.network.carried(), 6);
}

/// A request and its response cost each side one packet train, not two.
#[test]
fn an_acknowledgement_leaves_with_a_run_of_messages() {
    let mut couple = Couple::new(1, Odds::default());
    couple.nodes[0].send([1; 44], 1);
    couple.turn();
    assert_eq!(couple.counters(1).acks_out, 0, "it waits for data to leave with");
    couple.nodes[1].send([2; 44], 1);
    couple.nodes[1].send([3; 44], 2);
    couple.turn();
    assert_eq!(couple.counters(1).acks_out, 1);
    couple.turn();
    assert_eq!(couple.nodes[0].done, [(Tag(1), Status::Done)]);
    assert_eq!(couple.nodes[0].received, [[2; 44], [3; 44]]);
}

/// When no data leaves, the acknowledgement must be sent before the peer's timeout.
#[test]
fn an_acknowledgement_is_held_back_no_longer_than_its_delay() {
    let mut couple = Couple::new(1, Odds::default());
    couple.nodes[0].send([1; 44], 1);
    // Two turns more than the delay: one to get there, and one to get back.
    let end = couple.now + ACK_DELAY + 2 * TURN;
    while couple.now < end {
        assert_eq!(couple.nodes[0].done, []);
        couple.turn();
    }
    assert_eq!(couple.nodes[0].done, [(Tag(1), Status::Done)]);
    assert_eq!(couple.counters(1).acks_out, 1);
}

/// A poller on a contended core sleeps after each packet. If it acknowledged before each sleep,
/// each acknowledgement would cost a system call, and would wake the peer, which sleeps as well.
#[test]
fn pollers_that_sleep_after_each_packet_acknowledge_few_of_them() {
    let mut couple = Couple::new(1, Odds::default());
    let rounds = 100;
    for round in 0..rounds {
        // A request and its answer, as two gateways exchange them, in 80 us.
        for from in [0, 1] {
            couple.write(from, 0, &[2; 64], 2 * round);
            couple.nodes[from].send([1; 44], 2 * round + 1);
            for _ in 0..8 {
                couple.turn();
                let now = couple.now;
                for node in &mut couple.nodes {
                    node.fabric.prepare_sleep(now);
                }
            }
        }
    }
    for node in 0..2 {
        let counters = couple.counters(node);
        assert!((5..=34).contains(&counters.acks_out), "{} for {rounds}", counters.acks_out);
        assert_eq!((counters.retransmits, counters.timeouts), (0, 0));
    }
}

/// Whoever sleeps with an acknowledgement to send wakes for it, long before the peer gives it up.
#[test]
fn a_poller_wakes_for_the_acknowledgement_that_it_owes() {
    let mut couple = Couple::new(1, Odds::default());
    couple.nodes[0].send([1; 44], 1);
    couple.turn();
    let came = couple.now;
    couple.turn();
    let now = couple.now;
    let wake = couple.nodes[1].fabric.prepare_sleep(now).expect("it owes one");
    assert_eq!((couple.counters(1).acks_out, wake), (0, came + ACK_DELAY));
    couple.nodes[1].take_in(wake);
    couple.nodes[1].fabric.transmit(wake);
    assert_eq!(couple.counters(1).acks_out, 1);
    assert_eq!(couple.nodes[1].fabric.prepare_sleep(wake), None);
}

/// The last message of a link is DELETE LINK. If its sender does not hear that it has come, it
/// repeats it for one and a half seconds before it gives the queue pair back.
#[test]
fn whoever_releases_a_queue_pair_acknowledges_first() {
    let mut couple = Couple::new(1, Odds::default());
    couple.nodes[0].send([1; 44], 1);
    couple.turn();
    let (now, node) = (couple.now, &mut couple.nodes[1]);
    assert_eq!(node.received.len(), 1);
    node.fabric.fail(now, node.qp);
    node.take_in(now);
    node.fabric.prepare_sleep(now);
    node.fabric.release(now, node.qp);
    node.fabric.transmit(now);
    couple.now = now + TURN;
    let (now, node) = (couple.now, &mut couple.nodes[0]);
    node.take_in(now);
    assert_eq!(node.done, [(Tag(1), Status::Done)]);
}

/// A write that is longer than the packets known to pass waits for answers about the path, and each
/// of them for acknowledgements. If sleepers held those back, it would take a tenth of a second.
#[test]
fn a_long_write_between_sleepers_does_not_wait_for_each_acknowledgement() {
    let mut couple = Couple::with_mtu(1, Odds::default(), Mtu::B4096);
    let begun = couple.now;
    couple.write(0, 0, &pattern(60_000, 3), 1);
    while couple.nodes[0].done.is_empty() {
        let before = couple.packets_out();
        couple.turn();
        let now = couple.now;
        let wake = couple.nodes.each_mut().map(|node| node.fabric.prepare_sleep(now));
        if couple.packets_out() == before {
            let next = wake.into_iter().flatten().min().expect("somebody waits for something");
            couple.now = couple.now.max(next);
        }
    }
    let took = couple.now.since(begun);
    assert!(took < ACK_DELAY * 4, "{took:?}");
}

/// What the caller knows of the wire saves a receive, but only one.
#[test]
fn a_quiet_wire_is_not_asked_once() {
    let mut couple = Couple::new(1, Odds::default());
    couple.nodes[0].send([1; 44], 1);
    let now = couple.now;
    couple.nodes[0].fabric.transmit(now);
    couple.nodes[1].fabric.note_signs(Signs::None);
    couple.nodes[1].take_in(now + TURN);
    assert!(couple.nodes[1].received.is_empty());
    couple.nodes[1].take_in(now + TURN);
    assert_eq!(couple.nodes[1].received, [[1; 44]]);
}

pub(super) fn stream(couple: &mut Couple, rounds: u64, len: usize) {
    for round in 0..rounds {
        let salt = u8::try_from(round % 256).unwrap();
        let at = usize::try_from(round).unwrap() * len % (MEMORY - len);
        couple.write(0, at, &pattern(len, salt), 2 * round);
        couple.nodes[0].send([salt; 44], 2 * round + 1);
        if round % 2 == 0 {
            couple.nodes[1].send([salt; 44], round);
        }
        while couple.nodes[0].pool.leases_out() > 60 {
            couple.turn();
        }
        if round % 7 == 0 {
            couple.turn();
        }
    }
    couple.run_until_quiet();
    assert_stream(couple, rounds, len);
}

fn assert_stream(couple: &Couple, rounds: u64, len: usize) {
    let expected: Vec<_> =
        (0..rounds).map(|round| [u8::try_from(round % 256).unwrap(); 44]).collect();
    assert_eq!(couple.nodes[1].received, expected, "each message once, in order");
    let expected: Vec<_> = expected.into_iter().step_by(2).collect();
    assert_eq!(couple.nodes[0].received, expected);
    let tags: Vec<_> = (0..2 * rounds).map(|tag| (Tag(tag), Status::Done)).collect();
    assert_eq!(couple.nodes[0].done, tags);
    let kept = u64::try_from(MEMORY / len / 2).unwrap().min(rounds);
    for round in rounds - kept..rounds {
        let at = usize::try_from(round).unwrap() * len % (MEMORY - len);
        let salt = u8::try_from(round % 256).unwrap();
        assert!(couple.nodes[1].read(at, len) == pattern(len, salt), "round {round}");
    }
    assert_eq!(couple.nodes[0].pool.leases_out(), 0);
    assert!(couple.nodes.iter().all(|node| node.broke.is_empty()));
}

/// Whatever the network does to packets, bytes come out as they went in: only later.
#[test]
fn bad_networks_cost_time_only() {
    let one_percent = Odds { loss: Chance::percent(1), ..Odds::default() };
    let awful = Odds {
        loss: Chance::percent(3),
        repeat: Chance::percent(3),
        overtake: Chance::percent(3),
        mark: Chance::percent(3),
        damage: Chance::percent(1),
        block: Chance::percent(5),
    };
    for seed in 0..6 {
        for odds in [one_percent, awful] {
            let mut couple = Couple::new(seed, odds);
            if seed % 2 == 0 {
                couple.network.hide_identification();
            }
            stream(&mut couple, 150, 8192);
            assert!(couple.counters(0).retransmits > 0);
        }
    }
}

/// NAKs repair losses within microseconds. If some losses waited for a timeout instead, the stream
/// would crawl.
#[test]
fn one_percent_loss_costs_speed_but_no_stall() {
    let mut couple = Couple::new(5, Odds { loss: Chance::percent(1), ..Odds::default() });
    stream(&mut couple, 1000, 16_384);
    let counters = couple.counters(0);
    assert!(counters.naks_in > 5 * counters.timeouts, "{counters:?}");
    assert!(couple.now < Instant(500_000_000), "{:?} {counters:?}", couple.now);
}

#[test]
fn every_path_mtu_carries() {
    for mtu in [Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096] {
        let odds = Odds { loss: Chance(5_000), ..Odds::default() };
        stream(&mut Couple::with_mtu(9, odds, mtu), 40, 12_345);
    }
}

/// Some devices cannot split runs. Only the first run may be lost because of that.
#[test]
fn a_device_without_segmentation_carries_single_packets() {
    let mut couple = Couple::new(2, Odds::default());
    couple.network.refuse_segmentation();
    stream(&mut couple, 30, 12_345);
    assert_eq!(couple.counters(0).runs_refused, 1);
    assert_eq!(couple.counters(1).icrc_errors, 0);
}

/// Between two ends of a `veth` nobody splits runs, and not every receiver can take one.
#[test]
fn a_path_that_loses_trains_carries_single_packets() {
    let mut couple = Couple::new(2, Odds::default());
    couple.network.lose_trains();
    stream(&mut couple, 30, 12_345);
    let Counters { timeouts, path_lowered, .. } = couple.counters(0);
    assert!((1..=6).contains(&timeouts), "{timeouts}");
    assert_eq!(path_lowered, 0, "the packets are not too large");
}

#[test]
fn a_path_may_begin_to_lose_trains() {
    let mut couple = Couple::new(2, Odds::default());
    for salt in 0..30 {
        couple.write_and_tell(0, 12_345, salt);
        if salt == 9 {
            couple.network.lose_trains();
        }
    }
    let Counters { timeouts, path_lowered, .. } = couple.counters(0);
    assert!((1..=20).contains(&timeouts), "{timeouts}");
    assert_eq!(path_lowered, 0, "the packets are not too large");
}

/// A retransmitted packet has another position in its run, and so another identification and ICRC.
#[test]
fn retransmitted_packets_get_a_new_icrc() {
    let mut couple = Couple::new(3, Odds { loss: Chance::percent(10), ..Odds::default() });
    stream(&mut couple, 50, 4000);
    assert_eq!((couple.counters(0).icrc_errors, couple.counters(1).icrc_errors), (0, 0));
}

/// Between hosts with real NICs the kernel coalesces the end of one run with the start of the next,
/// and the rest of runs with lost packets. If a packet were dropped at each seam, the stream would
/// stop there.
#[test]
fn packets_of_several_runs_may_arrive_as_one_train() {
    let mut couple = Couple::new(1, Odds::default());
    couple.network.hide_identification();
    for tag in 0..5 {
        couple.nodes[0].send([u8::try_from(tag).unwrap(); 44], tag);
    }
    let now = couple.now;
    couple.nodes[0].fabric.transmit(now);
    let mut spy = couple.network.plug(address(1));
    assert_eq!(spy.receive(Instant::default()), 1);
    let mut train = spy.train(0).bytes.to_vec();
    let len = spy.train(0).segment_len;
    // Their identifications differ from their positions in the train.
    let flow = icrc::Flow::new(address(0), address(1));
    for (packet, identification) in train.chunks_mut(len).zip([62, 63, 0, 1, 7]) {
        flow.seal(identification, packet);
    }
    let range = 0..train.len();
    let run = Run {
        target: address(1),
        number: Qpn(0),
        reacts: false,
        range,
        segment_len: len,
        segments: 5,
    };
    couple.network.plug(address(0)).send(Instant::default(), &train, &[run]);
    couple.turn();
    assert_eq!(couple.counters(1).icrc_errors, 0);
    let received: Vec<_> = couple.nodes[1].received.iter().map(|message| message[0]).collect();
    assert_eq!(received, [0, 1, 2, 3, 4]);
}

#[test]
fn damaged_packets_are_dropped_and_counted() {
    let mut couple = Couple::new(4, Odds { damage: Chance::percent(5), ..Odds::default() });
    stream(&mut couple, 100, 4000);
    assert!(couple.counters(1).icrc_errors > 10);
    assert_eq!(couple.counters(1).rkey_errors, 0, "no damaged packet was processed");
}

/// A damaged packet can be right with another identification than it had. A gateway counts from 0
/// in each run, so that its packets never have such a one.
#[test]
fn a_packet_with_an_identification_that_the_peer_never_uses_is_damaged() {
    let mut couple = Couple::new(1, Odds::default());
    couple.network.hide_identification();
    let next = |couple: &Couple| {
        let sent = couple.nodes[0].done.len() as u64;
        psn::advance(couple.nodes[0].address.psn, sent)
    };
    for tag in 0..8 {
        couple.nodes[0].send([1; 44], tag);
        couple.run_until_quiet();
    }
    forge(&couple, 1, (wire::SEND_ONLY, next(&couple)), &[2; 44], 0x1234);
    couple.run_until_quiet();
    assert_eq!((couple.counters(1).icrc_errors, couple.nodes[1].received.len()), (1, 8));
    forge(&couple, 1, (wire::SEND_ONLY, next(&couple)), &[3; 44], 63);
    couple.run_until_quiet();
    assert_eq!(couple.nodes[1].received[8..], [[3; 44]], "from anywhere in a run");
}

/// Late acknowledgements are not losses: when the scheduler stops the peer for some milliseconds,
/// the stream must not lose more time than that.
#[test]
fn a_spurious_timeout_is_noticed() {
    let mut couple = Couple::new(1, Odds::default());
    couple.write(0, 0, &pattern(60_000, 1), 1);
    couple.nodes[0].send([1; 44], 2);
    couple.turn();
    let later = couple.now + Duration::from_millis(6);
    couple.nodes[0].fabric.transmit(later);
    assert_eq!(couple.counters(0).timeouts, 1);
    couple.now = later;
    couple.run_until_quiet();
    assert_eq!(couple.counters(0).timeouts_undone, 1);
    assert!(couple.counters(0).retransmits < 30, "only a small window was retransmitted");
}

/// A dead peer must be noticed, so that its connections are reset or move to another link.
#[test]
fn silence_breaks_the_queue_pair_within_two_seconds() {
    let mut couple = Couple::new(1, Odds::default());
    couple.nodes[0].send([1; 44], 1);
    couple.run_until_quiet();
    let before = couple.now;
    couple.network.change_odds(Odds { loss: Chance::ALWAYS, ..Odds::default() });
    couple.write(0, 0, &pattern(5000, 1), 2);
    couple.nodes[0].send([2; 44], 3);
    couple.run_until_quiet();
    let node = &couple.nodes[0];
    assert_eq!(node.broke, [QpError::RetriesExceeded]);
    assert_eq!(node.done[1..], [(Tag(2), Status::Flushed), (Tag(3), Status::Flushed)]);
    assert_eq!(node.pool.leases_out(), 0);
    let took = couple.now.since(before);
    assert!(Duration::from_millis(1500) <= took && took < Duration::from_millis(1510), "{took:?}");
    assert!(couple.counters(0).timeouts >= 8);

    couple.nodes[0].send([4; 44], 9);
    couple.run_until_quiet();
    assert_eq!(couple.nodes[0].done.last(), Some(&(Tag(9), Status::Flushed)));
}

/// A shorter stall of the peer must not break the queue pair: on a busy machine it may be without a
/// core for a second.
#[test]
fn a_peer_that_stalls_for_a_second_breaks_nothing() {
    let mut couple = Couple::new(1, Odds::default());
    couple.network.change_odds(Odds { loss: Chance::ALWAYS, ..Odds::default() });
    couple.nodes[0].send([1; 44], 1);
    while couple.now < Instant(1_350_000_000) {
        couple.turn();
    }
    couple.network.change_odds(Odds::default());
    couple.run_until_quiet();
    assert_eq!(couple.nodes[1].received, [[1; 44]]);
    assert!(couple.nodes[0].broke.is_empty());
}

fn assert_both_broke(couple: &mut Couple) {
    couple.nodes[0].send([7; 44], 8);
    couple.run_until_quiet();
    assert_eq!(couple.nodes[0].broke, [QpError::RemoteError]);
    assert_eq!(couple.nodes[1].broke, [QpError::PeerMisbehaved]);
    assert!(couple.nodes[1].received.is_empty());
    assert!(couple.nodes[1].read(0, MEMORY).iter().all(|byte| *byte == 0), "no byte changed");
    assert!(couple.nodes[0].done.iter().all(|(_, status)| *status == Status::Flushed));
    assert_eq!(couple.nodes[0].pool.leases_out(), 0);
    assert_eq!(couple.counters(1).rkey_errors, 1);
}

#[test]
fn a_write_beyond_the_region_breaks_both_ends_and_changes_nothing() {
    let mut couple = Couple::new(1, Odds::default());
    couple.write(0, MEMORY - 10, &[1; 11], 1);
    assert_both_broke(&mut couple);
}

#[test]
fn a_key_of_another_domain_is_refused() {
    let mut couple = Couple::new(1, Odds::default());
    let node = &mut couple.nodes[1];
    let elsewhere = node.rnic.open_domain().unwrap();
    assert_ne!(elsewhere, node.domain);
    let other = node.rnic.register(elsewhere, &node.memory).unwrap();
    couple.write_to(0, other.rkey, other.address, &[1; 11], 1);
    assert_both_broke(&mut couple);
}

#[test]
fn a_deregistered_key_is_refused() {
    let mut couple = Couple::new(1, Odds::default());
    let node = &mut couple.nodes[1];
    let other = node.rnic.register(node.domain, &node.memory).unwrap();
    let (rkey, address) = (other.rkey, other.address);
    node.rnic.deregister(other);
    couple.write_to(0, rkey, address, &[1; 11], 1);
    assert_both_broke(&mut couple);
}

/// If the NAK that refuses a request is lost, it must be repeated; otherwise the peer would keep
/// its connections waiting for a second.
#[test]
fn a_lost_refusal_is_repeated() {
    let mut couple = Couple::new(1, Odds::default());
    couple.write(0, MEMORY - 10, &[1; 11], 1);
    couple.turn();
    assert_eq!(
        couple.network.plug(address(0)).receive(Instant::default()),
        1,
        "the refusal is intercepted"
    );
    assert_both_broke(&mut couple);
    assert!(couple.now < Instant(100_000_000));
}

#[test]
fn a_key_works_as_soon_as_the_peer_knows_it() {
    let mut couple = Couple::new(1, Odds::default());
    let node = &mut couple.nodes[1];
    let fresh = Region::new(4096).unwrap();
    let registration = node.rnic.register(node.domain, &fresh).unwrap();
    couple.write_to(0, registration.rkey, registration.address, &[5; 4096], 1);
    couple.run_until_quiet();
    assert_eq!(couple.nodes[0].done, [(Tag(1), Status::Done)]);
    let mut out = [0; 4096];
    fresh.copy_out(0, &mut out);
    assert_eq!(out, [5; 4096]);
}

/// A caller that takes one completion at a time is slow, but must lose none.
#[test]
fn a_slow_caller_makes_peers_wait() {
    let mut couple = Couple::new(1, Odds::default());
    couple.nodes[1].out = Vec::with_capacity(1);
    for round in 0..300 {
        couple.nodes[0].send([u8::try_from(round % 256).unwrap(); 44], round);
    }
    couple.run_until_quiet();
    assert_eq!(couple.nodes[1].received.len(), 300);
    assert_eq!(couple.nodes[0].done.len(), 300);
}

/// A peer that floods us with messages must not keep those from going on to whom we write.
#[test]
fn a_flood_of_messages_does_not_hide_completions() {
    let mut couple = Couple::new(1, Odds::default());
    couple.nodes[1].out = Vec::with_capacity(16);
    couple.write(1, 0, &pattern(5_000, 1), 7);
    for round in 0..300 {
        while couple.nodes[0].fabric.room(couple.nodes[0].qp) > 0 {
            couple.nodes[0].send([1; 44], round);
        }
        couple.turn();
    }
    assert_eq!(couple.nodes[1].done, [(Tag(7), Status::Done)]);
}

#[test]
fn a_released_queue_pair_flushes_and_its_number_is_free_again() {
    let mut couple = Couple::new(1, Odds::default());
    couple.write(0, 0, &pattern(5000, 1), 1);
    couple.nodes[0].send([1; 44], 2);
    let (qp, now) = (couple.nodes[0].qp, couple.now);
    couple.nodes[0].fabric.release(now, qp);
    couple.run_until_quiet();
    assert_eq!(couple.nodes[0].done, [(Tag(1), Status::Flushed), (Tag(2), Status::Flushed)]);
    assert_eq!(couple.nodes[0].pool.leases_out(), 0);
    assert!(couple.nodes[1].received.is_empty());

    // If tables leaked an entry per queue pair, they would be full after some of these.
    let Node { rnic, fabric, domain, .. } = &mut couple.nodes[0];
    let mut before = qp;
    for _ in 0..2 * QUEUE_PAIRS_MAX {
        let opening = rnic.open(*domain).unwrap();
        let peer = opening.address();
        let qp = fabric.adopt(now, opening.connect(peer).unwrap());
        assert_ne!(qp, before, "an id is never reused");
        fabric.release(now, qp);
        fabric.poll(now, &mut Vec::with_capacity(1));
        before = qp;
    }
}

/// The last number that was looked up is remembered, and the slot of a queue pair that is gone has
/// another one soon.
#[test]
fn packets_for_a_released_queue_pair_are_for_nobody() {
    let mut couple = Couple::new(1, Odds::default());
    couple.nodes[0].send([1; 44], 1);
    couple.turn();
    let (now, Node { rnic, fabric, domain, qp, address, .. }) = (couple.now, &mut couple.nodes[1]);
    assert_eq!(fabric.counters().unknown_qp, 0);
    fabric.release(now, *qp);
    fabric.poll(now, &mut Vec::with_capacity(8));
    let opening = rnic.open(*domain).unwrap();
    assert_ne!(opening.address().qpn, address.qpn);
    let peer = couple.nodes[0].address;
    let next = couple.nodes[1].fabric.adopt(now, opening.connect(peer).unwrap());
    assert_eq!(next.0 % QUEUE_PAIRS_MAX, couple.nodes[1].qp.0 % QUEUE_PAIRS_MAX);
    couple.nodes[0].send([2; 44], 2);
    couple.turn();
    assert_eq!(couple.counters(1).unknown_qp, 1);
    assert_eq!(couple.nodes[1].received, [[1; 44]]);
}

#[test]
fn running_out_of_resources_is_an_error() {
    let network = Network::new(1, Odds::default());
    let (mut rnic, mut fabric) = nic(&network, 0, Mtu::B1024, 0);
    let domain = rnic.open_domain().unwrap();
    let mut open: Vec<_> = (0..QUEUE_PAIRS_MAX).map(|_| rnic.open(domain).unwrap()).collect();
    assert!(rnic.open(domain).is_err());
    open.pop();
    assert!(rnic.open(domain).is_ok());

    let region = Region::new(4096).unwrap();
    let mut keys: Vec<_> = (0..KEYS_MAX).map(|_| rnic.register(domain, &region).unwrap()).collect();
    assert!(rnic.register(domain, &region).is_err());
    rnic.deregister(keys.pop().unwrap());
    assert!(rnic.register(domain, &region).is_err(), "the poller has not removed the key yet");
    fabric.poll(Instant(0), &mut Vec::with_capacity(1));
    keys.push(rnic.register(domain, &region).unwrap());
    keys.drain(..).for_each(|key| rnic.deregister(key));
    rnic.close_domain(domain);
}

#[test]
fn an_unreachable_peer_is_refused() {
    let network = Network::new(1, Odds::default());
    let (mut rnic, _fabric) = nic(&network, 0, Mtu::B1024, 0);
    let domain = rnic.open_domain().unwrap();
    let nobody = Gid::from_ipv4([0; 4]);
    for gid in [Gid([0xfe; 16]), Gid::from_ipv4([224, 0, 0, 1]), nobody] {
        let opening = rnic.open(domain).unwrap();
        let peer = QpAddress { gid, ..opening.address() };
        assert_eq!(opening.connect(peer).err(), Some(ConnectError::Unreachable), "{gid:?}");
    }
    let opening = rnic.open(domain).unwrap();
    let peer = QpAddress { mtu: Mtu(0), ..opening.address() };
    assert_eq!(opening.connect(peer).err(), Some(ConnectError::Unreachable));
}

/// A host that is short of descriptors cannot look for a route. A peer that is told that there is
/// none would not try again.
#[test]
fn a_host_without_descriptors_does_not_call_its_peer_unreachable() {
    let network = Network::new(1, Odds::default());
    let cases: [(HostPath, ConnectError); 3] = [
        (|_, _| Err(Errno::MFILE.into()), ConnectError::Exhausted),
        (|_, _| Err(Errno::NOBUFS.into()), ConnectError::Exhausted),
        (|_, _| Err(Errno::NETUNREACH.into()), ConnectError::Unreachable),
    ];
    for (path, expected) in cases {
        let (mut rnic, _fabric) = nic_on(&network, Mtu::B1024, path);
        let domain = rnic.open_domain().unwrap();
        let opening = rnic.open(domain).unwrap();
        let peer = opening.address();
        assert_eq!(opening.connect(peer).err(), Some(expected));
    }
}

/// A valid packet that comes from another address than the peer's must not affect the connection.
#[test]
fn packets_from_another_address_are_ignored() {
    let mut couple = Couple::new(1, Odds::default());
    couple.nodes[0].send([1; 44], 1);
    let now = couple.now;
    couple.nodes[0].fabric.transmit(now);
    // A copy of the peer's packet, sent from another address.
    let mut spy = couple.network.plug(address(1));
    assert_eq!(spy.receive(Instant::default()), 1);
    let bytes = spy.train(0).bytes;
    let range = 0..bytes.len();
    let run = Run {
        target: address(1),
        number: Qpn(0),
        reacts: false,
        range,
        segment_len: bytes.len(),
        segments: 1,
    };
    couple.network.plug(address(7)).send(Instant::default(), bytes, &[run]);
    couple.turn();
    assert_eq!(couple.counters(1).unknown_qp, 1);
    assert!(couple.nodes[1].received.is_empty());
    couple.run_until_quiet();
    assert_eq!(couple.nodes[1].received, [[1; 44]], "the peer's own came by retransmission");
}

/// A peer drops packets that are larger than it accepts, again and again, until the link breaks.
// RFC 7609 A.2.3 #11: use the smaller MTU
#[test]
fn the_smaller_mtu_of_both_counts() {
    for mtus in [[Mtu::B4096, Mtu::B512], [Mtu::B512, Mtu::B4096]] {
        let mut couple = Couple::with_mtus(1, Odds::default(), mtus);
        couple.write(0, 0, &[7; 2_000], 1);
        couple.run_until_quiet();
        assert_eq!(couple.nodes[1].read(0, 2_000), [7; 2_000]);
        let sent = couple.nodes[0].fabric.counters().packets_out;
        assert!(sent >= 4, "{mtus:?}: {sent} packets");
    }
}

/// Where memory really is helps whoever looks for a way into the process. Each registration is at
/// an address of its own that was made up.
#[test]
fn peers_are_not_told_where_memory_is() {
    let mut couple = Couple::new(1, Odds::default());
    let node = &mut couple.nodes[1];
    assert_ne!(node.registration.address, node.memory.address());
    let again = node.rnic.register(node.domain, &node.memory).unwrap();
    assert_ne!(again.address, node.memory.address());
    couple.write_to(0, again.rkey, again.address + 5, &[5; 7], 1);
    couple.run_until_quiet();
    assert_eq!(couple.nodes[1].read(5, 7), [5; 7]);
}
