//! What a tap shows of packets.

use super::*;
use crate::roce::FRAME_MAX;
use crate::roce::icrc::Flow;
use crate::roce::wire::{Body, Packet};
use crate::roce::{Record, Selection, Tracer};

pub(super) const ALL: Selection = Selection { peer: None, snap_len: FRAME_MAX };

pub(super) fn records(tracer: &Tracer) -> Vec<Record> {
    std::iter::from_fn(|| tracer.take(Record::clone)).collect()
}

pub(super) fn tracers(couple: &mut Couple) -> [Tracer; 2] {
    couple.nodes.each_mut().map(|node| node.fabric.tracer(MacAddress([2, 0, 0, 0, 0, 7])))
}

/// Who looks for a wrong byte wants to see the bytes that went over the wire: both ends show the
/// same packets, with the right ICRC in headers that every tool understands.
#[test]
fn both_ends_show_what_went_over_the_wire() {
    let mut couple = Couple::new(1, Odds::default());
    let mut tracers = tracers(&mut couple);
    couple.run_until_quiet();
    tracers.iter_mut().for_each(|tracer| tracer.start(ALL));
    couple.turn();
    let bytes = pattern(5_000, 3);
    couple.write(0, 100, &bytes, 1);
    couple.nodes[0].send([7; 44], 2);
    couple.nodes[1].send([8; 44], 3);
    couple.run_until_quiet();
    let shown = tracers.each_ref().map(records);
    for (one, other) in [(0, 1), (1, 0)] {
        let sent: Vec<_> = shown[one].iter().filter(|record| record.is_sent).collect();
        let received: Vec<_> = shown[other].iter().filter(|record| !record.is_sent).collect();
        assert_eq!(sent.len() as u64, couple.counters(one).packets_out);
        assert_eq!(sent.len(), received.len());
        for (sent, received) in sent.iter().zip(received) {
            // Each end knows its own MAC address.
            assert_eq!(sent.bytes[12..], received.bytes[12..]);
            assert_eq!(sent.bytes[6..12], [2, 0, 0, 0, 0, 7]);
            assert!(sent.at <= received.at && sent.frame_len == sent.bytes.len());
        }
    }
    let mut written = 0;
    for record in shown[0].iter().filter(|record| record.is_sent) {
        let arrived = parse(&record.bytes).expect("a whole frame");
        assert_eq!((arrived.source, arrived.target), (address(0), address(1)));
        let packet = &record.bytes[arrived.packet];
        let flow = Flow::new(arrived.source, arrived.target);
        assert!(flow.is_intact(arrived.identification, packet));
        if let Body::Write { payload, .. } = Packet::parse(packet).unwrap().body {
            assert_eq!(*payload, bytes[written..written + payload.len()]);
            written += payload.len();
        }
    }
    assert_eq!(written, bytes.len());
}

/// Nobody waits for whoever writes the capture to a disk: what finds no room is counted.
#[test]
fn what_nobody_takes_is_dropped_and_counted() {
    let mut couple = Couple::new(1, Odds::default());
    let mut tracers = tracers(&mut couple);
    tracers[0].start(ALL);
    let bytes = pattern(60_000, 0);
    for tag in 0..100 {
        couple.write(0, 0, &bytes, tag);
        couple.run_until_quiet();
    }
    let counters = couple.counters(0);
    let (kept, all) =
        (records(&tracers[0]).len() as u64, counters.packets_in + counters.packets_out);
    assert!(kept > 1_000 && tracers[0].dropped() > 1_000);
    assert_eq!(kept + tracers[0].dropped(), all);
    assert_eq!(couple.nodes[0].done.len(), 100, "and nobody has waited");
}

#[test]
fn only_what_was_asked_for_is_shown() {
    let mut couple = Couple::new(1, Odds::default());
    let mut tracers = tracers(&mut couple);
    tracers[0].start(Selection { peer: Some(address(0).ip()), ..ALL });
    tracers[1].start(Selection { peer: Some(address(0).ip()), snap_len: 60 });
    couple.nodes[0].send([7; 44], 1);
    couple.run_until_quiet();
    assert_eq!(records(&tracers[0]), [], "it is not its own peer");
    let shown = records(&tracers[1]);
    let message = shown.iter().find(|record| !record.is_sent).unwrap();
    // Ethernet, IP and UDP; BTH, message and ICRC.
    assert_eq!((message.bytes.len(), message.frame_len), (60, 14 + 20 + 8 + 12 + 44 + 4));
    tracers[1].stop();
    couple.nodes[0].send([7; 44], 2);
    couple.run_until_quiet();
    assert_eq!(records(&tracers[1]), []);
}
