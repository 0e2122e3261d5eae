//! Packets with several requests, and of sizes that InfiniBand does not have.

use smcr_proto::Psn;

use super::*;
use crate::roce::icrc::Flow;
use crate::roce::inbox::{Event, Inbox};
use crate::roce::keys::Keys;
use crate::roce::pair::Pair;
use crate::roce::responder::Received;
use crate::roce::wire::{self, Body, Packet};

impl Couple {
    /// Two nodes that have agreed on dense packets, whose hosts know a path MTU of `bytes`.
    pub(super) fn dense(seed: u64, odds: Odds, bytes: [HostPath; 2]) -> Self {
        let network = Network::new(seed, odds);
        let mut made = [0, 1].map(|node| {
            let bits = 0x00ff_ff00;
            let path = bytes[usize::from(node)];
            let device = path(address(0).ip(), address(1).ip()).unwrap();
            let (mtu, payload_max) = rnic::sizes_for(device, None).unwrap();
            let nic = nic_of(&network, (node, bits), (mtu, payload_max), path);
            let (node, mut opening) = Node::of(nic);
            opening.pack_densely();
            (node, Some(opening))
        });
        let addresses = made.each_ref().map(|(node, _)| node.address);
        for (at, (node, opening)) in made.iter_mut().enumerate() {
            let qp = opening.take().unwrap().connect(addresses[1 - at]).unwrap();
            node.qp = node.fabric.adopt(Instant(0), qp);
        }
        Self { network, now: Instant(0), nodes: made.map(|(node, _)| node) }
    }

    fn payloads(&self) -> [u32; 2] {
        self.nodes.each_ref().map(|node| node.fabric.payload(node.qp))
    }
}

fn ethernet(_: IpAddr, _: IpAddr) -> io::Result<u32> {
    Ok(1500)
}

fn tunnel(_: IpAddr, _: IpAddr) -> io::Result<u32> {
    Ok(1400)
}

fn jumbo(_: IpAddr, _: IpAddr) -> io::Result<u32> {
    Ok(9000)
}

/// A dense packet for a node with so many messages.
fn messages(to: &Node, psn: Psn, count: usize) -> Vec<u8> {
    let header = wire::Bth {
        opcode: wire::DENSE,
        solicited: true,
        payload_len: 0,
        target: to.address.qpn,
        ack_request: true,
        psn,
    };
    let part = |more: bool| [&[wire::SEND_ONLY, more.into(), 0, 44][..], &[7; 44]].concat();
    let parts: Vec<_> = (1..=count).flat_map(|number| part(number < count)).collect();
    [header.encode().to_vec(), parts, vec![0; wire::ICRC_LEN]].concat()
}

/// A request of a connection costs each host one packet.
#[test]
fn a_write_and_its_message_share_a_packet() {
    let mut couple = Couple::dense(1, Odds::default(), [ethernet; 2]);
    couple.write(0, 5, &pattern(61, 3), 1);
    couple.nodes[0].send([9; 44], 2);
    couple.turn();
    assert_eq!(couple.counters(0).packets_out, 1);
    couple.run_until_quiet();
    assert_eq!(couple.nodes[1].received, [[9; 44]]);
    assert_eq!(couple.nodes[1].read(5, 62), [pattern(61, 3), vec![0]].concat());
    assert_eq!(couple.nodes[0].done, [(Tag(1), Status::Done), (Tag(2), Status::Done)]);
    let (sender, receiver) = (couple.counters(0), couple.counters(1));
    assert_eq!((sender.packed, sender.retransmits), (1, 0));
    assert_eq!(receiver.acks_out, 1 + sender.path_questions);
}

/// While requests are answered, each of them and each answer is one packet.
#[test]
fn a_dialogue_takes_hardly_more_than_a_packet_each_way() {
    let mut couple = Couple::dense(1, Odds::default(), [ethernet; 2]);
    let rounds = 100;
    for round in 0..rounds {
        for from in [0, 1] {
            couple.write(from, 0, &[2; 64], 2 * round);
            couple.nodes[from].send([1; 44], 2 * round + 1);
            (0..4).for_each(|_| couple.turn());
        }
    }
    for node in 0..2 {
        let counters = couple.counters(node);
        assert!(counters.packets_out < rounds * 12 / 10, "{}", counters.packets_out);
        assert_eq!((counters.retransmits, counters.timeouts), (0, 0));
    }
}

/// Whoever answers a message by another one, such as TEST LINK, acknowledges it with the answer:
/// the peer waits for both.
#[test]
fn a_message_alone_takes_the_acknowledgement_along() {
    let mut couple = Couple::dense(1, Odds::default(), [ethernet; 2]);
    couple.nodes[0].send([1; 44], 1);
    couple.turn();
    couple.nodes[1].send([2; 44], 1);
    couple.turn();
    couple.turn();
    assert_eq!(couple.nodes[0].received, [[2; 44]]);
    assert_eq!(couple.nodes[0].done, [(Tag(1), Status::Done)]);
}

/// What a poller has taken in from many connections in a turn is written first, and announced then.
#[test]
fn requests_of_many_connections_fill_packets() {
    let mut couple = Couple::dense(1, Odds::default(), [ethernet; 2]);
    couple.write(0, 0, &[1], 0);
    couple.run_until_quiet();
    let before = couple.counters(0).packets_out;
    for number in 0..20_u8 {
        couple.write(0, usize::from(number) * 100, &pattern(64, number), number.into());
    }
    for number in 0..20 {
        couple.nodes[0].send([number; 44], number.into());
    }
    couple.run_until_quiet();
    // 84 bytes for each write and 48 for each message.
    assert_eq!(couple.counters(0).packets_out - before, 2);
    let expected: Vec<_> = (0..20).map(|number| [number; 44]).collect();
    assert_eq!(couple.nodes[1].received, expected);
    for number in 0..20_u8 {
        let at = usize::from(number) * 100;
        assert_eq!(couple.nodes[1].read(at, 64), pattern(64, number));
    }
}

/// The packets of a stream are as large as the path allows, once that is proven.
#[test]
fn packets_are_as_large_as_the_path_allows() {
    for (paths, expected) in [
        ([ethernet as HostPath; 2], [1408; 2]),
        // Both announce an MTU of 1,024 bytes.
        ([ethernet, tunnel], [1408, 1280]),
        // The larger one knows no more of the other's device than its path MTU.
        ([jumbo, ethernet], [1024, 1408]),
        ([jumbo; 2], [4096; 2]),
    ] {
        let mut couple = Couple::dense(1, Odds::default(), paths);
        for round in 0..8 {
            for from in 0..2 {
                couple.write(from, 0, &pattern(50_000, 3), 2 * round);
                couple.nodes[from].send([9; 44], 2 * round + 1);
            }
            couple.run_until_quiet();
        }
        assert_eq!(couple.payloads(), expected);
        for node in &couple.nodes {
            assert_eq!(node.read(0, 50_000), pattern(50_000, 3));
            assert!(node.broke.is_empty());
        }
    }
}

/// The device at the other end may carry less than this one, though both announce the same.
#[test]
fn packets_that_the_other_end_does_not_take_are_not_sent_twice() {
    let mut couple = Couple::dense(1, Odds::default(), [ethernet, tunnel]);
    couple.network.drop_beyond(1400);
    for round in 0..8 {
        couple.write(0, 0, &pattern(50_000, 3), 2 * round);
        couple.nodes[0].send([9; 44], 2 * round + 1);
        couple.run_until_quiet();
    }
    assert_eq!(couple.nodes[1].read(0, 50_000), pattern(50_000, 3));
    let counters = couple.counters(0);
    assert_eq!((counters.retransmits, counters.path_lowered), (0, 0));
    assert!(couple.payloads()[0] < 1408 && couple.payloads()[0] >= 1024);
}

#[test]
fn an_operator_who_limits_packets_limits_what_is_sent() {
    assert_eq!(rnic::sizes_for(1500, Some(Mtu::B4096)), Some((Mtu::B1024, 1408)));
    assert_eq!(rnic::sizes_for(1500, Some(Mtu::B512)), Some((Mtu::B512, 512)));
    let limited = rnic::sizes_for(1500, Some(Mtu::B1024));
    assert_eq!(limited, Some((Mtu::B1024, 1024)));
    assert_eq!(rnic::sizes_for(9000, None), Some((Mtu::B4096, 4096)));
    assert_eq!(rnic::sizes_for(335, None), None);
}

/// A peer's packet may hold more messages than there is room for: it hears from which one on to
/// repeat them.
#[test]
fn a_packet_is_taken_in_as_far_as_there_is_room() {
    let network = Network::new(1, Odds::default());
    let (near, far) = (nic_on(&network, Mtu::B1024, ethernet), address(1));
    let (mut node, mut opening) = Node::of(near);
    opening.pack_densely();
    let peer = QpAddress { gid: Gid::from_ip(far.ip()), qpn: Qpn(99), ..node.address };
    let mut pair = Pair::new(QpId(7), opening.connect(peer).unwrap(), address(0));
    let mut inbox = Inbox::new();
    while inbox.has_room(QpId(7)) {
        inbox.push(Event::Received(QpId(7), Received::Short([0; 44])));
    }
    inbox.pop();
    let bytes = messages(&node, peer.psn, 3);
    let packet = Packet::parse(&bytes).unwrap();
    let (keys, mut counters) = (Keys::new(), Counters::default());
    pair.take_in(Instant(1), packet, &keys, &mut inbox, None, &mut counters);
    assert_eq!((counters.rnr, counters.out_of_order), (1, 0), "of two, one had to be told");
    assert!(!inbox.has_room(QpId(7)), "one message came in");
    (0..2).for_each(|_| drop(inbox.pop()));
    let bytes = messages(&node, psn::advance(peer.psn, 1), 2);
    let packet = Packet::parse(&bytes).unwrap();
    pair.take_in(Instant(2), packet, &keys, &mut inbox, None, &mut counters);
    assert_eq!((counters.rnr, counters.duplicates, counters.out_of_order), (1, 0, 0));
    assert!(!inbox.has_room(QpId(7)), "the others came in");
    node.take_in(Instant(3));
}

/// Whoever tries PSNs in the peer's name tries one with each packet, however many parts it has.
#[test]
fn a_packet_is_executed_from_its_first_part_or_not_at_all() {
    for (first, naks) in [(-3, 1), (-2, 1), (-4, 0), (-40, 0), (1, 1), (20, 1), (-100_000, 0)] {
        let mut couple = Couple::dense(1, Odds::default(), [ethernet; 2]);
        let peer = couple.nodes[0].address.psn;
        let psn = Psn(peer.0.wrapping_add_signed(first) & 0x00ff_ffff);
        let mut packet = messages(&couple.nodes[1], psn, 4);
        Flow::new(address(0), address(1)).seal(0, &mut packet);
        fuzz::forge(&couple, &packet);
        couple.run_until_quiet();
        let counters = couple.counters(1);
        assert_eq!(couple.nodes[1].received, [[0; 44]; 0], "{first}");
        assert_eq!(counters.naks_out, naks, "{first}");
        assert!(counters.duplicates + counters.out_of_order == 1 && counters.psn_errors <= 1);
        couple.nodes[0].send([1; 44], 1);
        couple.run_until_quiet();
        assert_eq!(couple.nodes[1].received, [[1; 44]], "the peer is not disturbed");
    }
}

/// An acknowledgement was lost, and what is repeated shares its packet with what came since: the
/// receiver says what it expects, and the sender waits for no timeout.
#[test]
fn a_lost_acknowledgement_costs_no_second_timeout() {
    let mut couple = Couple::dense(1, Odds::default(), [ethernet; 2]);
    couple.write(0, 0, &[1], 0);
    couple.run_until_quiet();
    couple.nodes[0].send([1; 44], 1);
    couple.turn();
    couple.network.change_odds(Odds { loss: Chance::percent(100), ..Odds::default() });
    let acks = couple.counters(1).acks_out;
    while couple.counters(1).acks_out == acks {
        couple.turn();
    }
    couple.nodes[0].send([2; 44], 2);
    couple.turn();
    couple.network.change_odds(Odds::default());
    let timeouts = couple.counters(0).timeouts;
    couple.run_until_quiet();
    assert_eq!(couple.nodes[1].received, [[1; 44], [2; 44]]);
    assert_eq!(couple.counters(1).naks_out, 1);
    assert!(couple.counters(0).timeouts <= timeouts + 1);
}

/// Whoever captures sees packets that tools know, with the PSNs that they have.
#[test]
fn a_tap_shows_the_parts() {
    let mut couple = Couple::dense(1, Odds::default(), [ethernet; 2]);
    couple.write(0, 0, &[1], 0);
    couple.run_until_quiet();
    let mut tracers = tapped::tracers(&mut couple);
    tracers.iter_mut().for_each(|tracer| tracer.start(tapped::ALL));
    couple.turn();
    for number in 0..3_u8 {
        couple.write(0, 0, &pattern(61, number), number.into());
        couple.nodes[0].send([number; 44], number.into());
    }
    couple.run_until_quiet();
    for (at, tracer) in tracers.iter().enumerate() {
        let mut psns = Vec::new();
        for record in tapped::records(tracer).iter().filter(|it| it.is_sent == (at == 0)) {
            let arrived = parse(&record.bytes).expect("a whole frame");
            let packet = &record.bytes[arrived.packet];
            let flow = Flow::new(arrived.source, arrived.target);
            assert!(flow.is_intact(arrived.identification, packet));
            let packet = Packet::parse(packet).unwrap();
            let number = u8::try_from(psns.len() / 2).unwrap();
            match packet.body {
                Body::Write { payload, .. } => assert_eq!(payload, pattern(61, number)),
                Body::Send { payload, .. } => assert_eq!(payload, [number; 44]),
                body @ (Body::WriteOn { .. }
                | Body::Dense(_)
                | Body::Acknowledge(_)
                | Body::Congestion
                | Body::Unserved) => panic!("{body:?}"),
            }
            psns.push(packet.psn);
        }
        let first = psns[0];
        let following: Vec<_> = (0..6).map(|ahead| psn::advance(first, ahead)).collect();
        assert_eq!(psns, following);
    }
}

/// Nobody who has not agreed gets one, and from such a peer none is taken.
#[test]
fn only_those_who_have_agreed_take_them() {
    let mut couple = Couple::new(1, Odds::default());
    let mut packet = messages(&couple.nodes[1], couple.nodes[0].address.psn, 2);
    Flow::new(address(0), address(1)).seal(0, &mut packet);
    fuzz::forge(&couple, &packet);
    couple.run_until_quiet();
    assert_eq!((couple.counters(1).malformed, couple.counters(1).acks_out), (1, 0));
    assert!(couple.nodes[1].received.is_empty() && couple.nodes[1].broke.is_empty());
}
