//! Fuzz tests: no packet may cause a panic, or a write that was not allowed.

use proptest::prelude::*;

use super::*;
use crate::roce::icrc::Flow;
use crate::roce::wire;

/// Sends `packet` to node 1, from the address of node 0.
pub(super) fn forge(couple: &Couple, packet: &[u8]) {
    if packet.is_empty() {
        return;
    }
    let len = packet.len();
    let run = Run {
        target: address(1),
        number: Qpn(0),
        reacts: false,
        range: 0..len,
        segment_len: len,
        segments: 1,
    };
    couple.network.plug(address(0)).send(Instant::default(), packet, &[run]);
}

/// Completes a packet of headers and payload with a correct ICRC.
fn seal(mut packet: Vec<u8>) -> Vec<u8> {
    packet.resize(packet.len().next_multiple_of(4) + 4, 0);
    Flow::new(address(0), address(1)).seal(0, &mut packet);
    packet
}

fn header(couple: &Couple, opcode: u8, ahead: u32) -> Vec<u8> {
    let bth = wire::Bth {
        opcode,
        solicited: false,
        payload_len: 0,
        target: couple.nodes[1].address.qpn,
        ack_request: true,
        psn: psn::advance(couple.nodes[0].address.psn, ahead.into()),
    };
    bth.encode().to_vec()
}

fn is_untouched(couple: &Couple) -> bool {
    couple.nodes[1].read(0, MEMORY).iter().all(|byte| *byte == 0)
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 100,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_bytes(
        packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..8),
    ) {
        let mut couple = Couple::new(1, Odds::default());
        for packet in packets {
            forge(&couple, &packet);
        }
        couple.run_until_quiet();
        prop_assert!(is_untouched(&couple));
        // The connection still works.
        couple.nodes[0].send([1; 44], 1);
        couple.run_until_quiet();
        prop_assert_eq!(&couple.nodes[1].received, &[[1; 44]]);
    }

    /// A hostile peer that knows all numbers of the connection, but no rkey.
    #[test]
    fn any_request_of_the_peer_itself(
        opcode in 0..0x20u8,
        ahead in prop_oneof![Just(0u32), Just(1), Just(0x00ff_ffff), any::<u32>()],
        rest in prop::collection::vec(any::<u8>(), 0..1200),
        repeat in 1..3u32,
    ) {
        let mut couple = Couple::new(1, Odds::default());
        couple.nodes[1].send([5; 44], 1);
        for _ in 0..repeat {
            let mut packet = header(&couple, opcode, ahead);
            packet.extend(&rest);
            forge(&couple, &seal(packet));
            couple.turn();
        }
        couple.run_until_quiet();
        prop_assert!(is_untouched(&couple));
        prop_assert_eq!(couple.nodes[1].done.len(), 1, "its own request completed once");
        prop_assert_eq!(couple.counters(1).icrc_errors, 0);
    }

    /// A peer with which dense packets are agreed on sends any, and one end captures them.
    #[test]
    fn any_dense_packet_of_the_peer_itself(
        parts in prop::collection::vec(
            (prop_oneof![Just(wire::SEND_ONLY), Just(wire::WRITE_ONLY), any::<u8>()],
             0..100u8, prop::collection::vec(any::<u8>(), 0..120)),
            0..6,
        ),
        ahead in prop_oneof![Just(0u32), Just(0), Just(1), Just(0x00ff_ffff), any::<u32>()],
    ) {
        let mut couple = Couple::dense(1, Odds::default(), [|_, _| Ok(1500); 2]);
        let mut tracers = tapped::tracers(&mut couple);
        tracers.iter_mut().for_each(|tracer| tracer.start(tapped::ALL));
        couple.nodes[1].send([5; 44], 1);
        let mut packet = header(&couple, wire::DENSE, ahead);
        for (at, (opcode, len, rest)) in parts.iter().enumerate() {
            packet.extend([*opcode, u8::from(at + 1 < parts.len()), 0, *len]);
            packet.extend(rest);
            packet.resize(packet.len().next_multiple_of(4), 0);
        }
        forge(&couple, &seal(packet));
        couple.run_until_quiet();
        prop_assert!(is_untouched(&couple));
        prop_assert_eq!(couple.nodes[1].done.len(), 1, "its own request completed once");
        prop_assert_eq!(couple.counters(1).icrc_errors, 0);
    }

    /// If any bit of a packet flips, the packet must be dropped and no byte of memory written.
    #[test]
    fn any_damage_to_a_write(at in 0..88usize, bit in 0..8u8) {
        // The ICRC does not cover congestion marks, on purpose.
        prop_assume!(at != 4);
        let mut couple = Couple::new(1, Odds::default());
        let registration = &couple.nodes[1].registration;
        let reth = wire::Reth { address: registration.address, rkey: registration.rkey, len: 56 };
        let mut packet = header(&couple, wire::WRITE_ONLY, 0);
        packet.extend(reth.encode());
        packet.extend([0xee; 56]);
        let mut packet = seal(packet);
        prop_assert_eq!(packet.len(), 88);
        packet[at] ^= 1 << bit;
        forge(&couple, &packet);
        couple.run_until_quiet();
        prop_assert!(is_untouched(&couple));
        prop_assert!(couple.nodes[1].broke.is_empty());
        // The same packet is executed when it is undamaged, so only the damage stopped it.
        packet[at] ^= 1 << bit;
        forge(&couple, &packet);
        couple.run_until_quiet();
        prop_assert_eq!(couple.nodes[1].read(0, 57), [vec![0xee; 56], vec![0]].concat());
    }
}
