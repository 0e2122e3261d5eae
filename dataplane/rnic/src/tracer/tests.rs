use smcr_memory::{Region, SendPool};
use smcr_proto::{Gid, Mtu, Rkey};

use super::*;
use crate::roce::{Body, FRAME_MAX, Packet, parse};
use crate::sim::{Network, Odds};
use crate::{Port, Rnic as _, Tag};

fn port(n: u8) -> Port {
    let mac = MacAddress([2, 0, 0, 0, 0, n]);
    Port { gid: Gid::from_ipv4([10, 0, 0, n]), mac, mtu: Mtu::B1024 }
}

fn records(tracer: &Tracer) -> Vec<Record> {
    std::iter::from_fn(|| tracer.take(Record::clone)).collect()
}

/// The bytes that frames of one write and one message behind it write, if they are as they should:
/// from one queue pair to the other, with this key and address.
fn written(sent: &[Record], ends: [QpAddress; 2], (rkey, address): (Rkey, u64)) -> Vec<u8> {
    let mut written = Vec::new();
    for (number, record) in sent.iter().enumerate() {
        let arrived = parse(&record.bytes).expect("a whole frame");
        assert_eq!(arrived.target.ip(), ends[1].gid.to_ip());
        assert!(record.is_sent && record.at == Instant(5));
        let packet = Packet::parse(&record.bytes[arrived.packet]).unwrap();
        let psn = (ends[0].psn.0 + u32::try_from(number).unwrap()) & 0x00ff_ffff;
        assert_eq!((packet.target, packet.psn.0), (ends[1].qpn, psn));
        match packet.body {
            Body::Write { reth, more: true, payload } if number == 0 => {
                assert_eq!((reth.rkey, reth.address, reth.len), (rkey, address, 10_000));
                written.extend_from_slice(payload);
            }
            Body::WriteOn { more, payload } => {
                assert_eq!(more, number == 1);
                written.extend_from_slice(payload);
            }
            Body::Send { first: true, more: false, payload } => assert_eq!(payload, [7; 44]),
            Body::Write { .. }
            | Body::Dense(_)
            | Body::Send { .. }
            | Body::Acknowledge(_)
            | Body::Congestion
            | Body::Unserved => {
                panic!("{packet:?}")
            }
        }
    }
    written
}

/// A NIC that shows nothing of its packets: whoever captures there sees what it was told to write
/// and send, and what it has received, in packets that other tools read.
#[test]
fn work_requests_are_shown_as_packets() {
    let network = Network::new(1, Odds::CALM);
    let [(mut a, fabric_a), (mut b, fabric_b)] = [1, 2].map(|n| network.rnic(port(n)));
    let mut fabrics = [Traced::new(fabric_a), Traced::new(fabric_b)];
    let own = Region::new(1 << 16).unwrap();
    a.send_from(&own).unwrap();
    let (domain_a, domain_b) = (a.open_domain().unwrap(), b.open_domain().unwrap());
    let memory = Region::new(1 << 16).unwrap();
    let target = b.register(domain_b, &memory).unwrap();
    let (first, second) = (a.open(domain_a).unwrap(), b.open(domain_b).unwrap());
    let (at_a, at_b) = (first.address(), second.address());
    let [qp_a, qp_b] = [Introduced::connect(first, at_b), Introduced::connect(second, at_a)];
    let qp = fabrics[0].adopt(Instant(0), qp_a.unwrap());
    fabrics[1].adopt(Instant(0), qp_b.unwrap());
    let mut tracers = [0, 1].map(|n: u8| fabrics[usize::from(n)].tracer(port(n + 1).mac));
    tracers.iter_mut().for_each(|tracer| {
        tracer.start(Selection { peer: None, snap_len: FRAME_MAX });
    });

    let mut pool = SendPool::new(own, 1 << 16);
    let bytes: Vec<u8> = (0..10_000_u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    let filled = pool.fill(10_000, |room| {
        room.copy_in(&bytes);
        Ok::<_, ()>(bytes.len())
    });
    let lease = filled.unwrap().unwrap().unwrap();
    let mut out = Vec::with_capacity(16);
    fabrics.iter_mut().for_each(|fabric| fabric.poll(Instant(5), &mut out));
    let (rkey, address) = (target.rkey, target.address + 16);
    let write = Work::Write { lease, rkey, address, tag: Tag(1) };
    fabrics[0].post(qp, &mut vec![write, Work::Send { message: [7; 44], tag: Tag(2) }]);
    fabrics[0].transmit(Instant(5));
    let mut now = Instant(5);
    while let Some(at) = network.next_event() {
        now = now.max(at);
        for fabric in &mut fabrics {
            fabric.poll(now, &mut out);
            fabric.transmit(now);
        }
    }
    for completion in out {
        if let Completion::Wrote { lease, .. } = completion {
            pool.take_back(lease);
        }
    }

    let sent = records(&tracers[0]);
    assert_eq!(written(&sent, [at_a, at_b], (rkey, address)), bytes);
    assert_eq!(sent.len(), 4);

    // The message, but nothing of the write: the NIC has not told of it.
    let received = records(&tracers[1]);
    assert_eq!(received.len(), 1);
    assert!(!received[0].is_sent);
    assert_eq!(received[0].bytes[12..14], sent[3].bytes[12..14]);
    let message = parse(&received[0].bytes).unwrap().packet;
    assert_eq!(received[0].bytes[message][12..56], [7; 44]);
}
