//! Tests with real sockets of both address families, over loopback.

use super::*;

fn pair(last: u8) -> (UdpSocket, UdpSocket, SocketAddr) {
    let at = |last| SocketAddr::from(([127, 0, 3, last], 4791));
    let target = at(last + 1);
    let sender = UdpSocket::bind(at(last), 1 << 20).unwrap();
    (sender, UdpSocket::bind(target, 1 << 20).unwrap(), target)
}

/// Waits for a burst and yields to the scheduler meanwhile. Loopback loses no datagrams.
fn receive(ring: &mut ReceiveRing, socket: &UdpSocket) -> usize {
    loop {
        match ring.receive(socket, RECEIVE_BURST).unwrap() {
            0 => std::thread::yield_now(),
            count => return count,
        }
    }
}

/// Without this, each packet would pass the network stack alone, at a tenth of the throughput.
#[test]
fn a_run_is_sent_and_received_whole() {
    let (sender, receiver, target) = pair(1);
    let bytes: Vec<u8> = (0..10_250_u32).map(|n| n.to_le_bytes()[0]).collect();
    let run = Departing { target, bytes: &bytes, segment_len: 1000, traffic_class: 2 };
    let short = Departing { target, bytes: &[1, 2, 3], segment_len: 3, traffic_class: 0 };
    assert_eq!(sender.send([run, short].into_iter()), Ok(2));
    let mut ring = ReceiveRing::new(8);
    assert_eq!(receive(&mut ring, &receiver), 2);
    let arrived = ring.arrived(0);
    assert_eq!(arrived.bytes, bytes);
    assert_eq!(arrived.segment_len, 1000);
    assert_eq!(arrived.source, SocketAddr::from(([127, 0, 3, 1], 4791)));
    let arrived = ring.arrived(1);
    assert_eq!((arrived.bytes, arrived.segment_len), (&[1, 2, 3][..], 3));
    assert_eq!(
        ring.receive(&receiver, RECEIVE_BURST).unwrap(),
        0,
        "an empty socket is not an error"
    );
}

#[test]
fn a_refused_send_says_why() {
    let (sender, _receiver, target) = pair(11);
    let bytes = [0; 65_000];
    let many = Departing { target, bytes: &bytes, segment_len: 100, traffic_class: 2 };
    assert_eq!(sender.send([many].into_iter()), Err(Unsent::Unable), "650 segments");
    let multicast = SocketAddr::from(([255, 255, 255, 255], 4791));
    let nowhere = Departing { target: multicast, bytes: &[1], segment_len: 1, traffic_class: 2 };
    assert_eq!(sender.send([nowhere].into_iter()), Err(Unsent::Unreachable));
}

#[test]
fn the_kernel_grants_some_buffer() {
    let (sender, ..) = pair(21);
    assert!(sender.receive_buffer().unwrap() >= 65_536);
}

/// Over IPv6 the same run must cost the same two system calls.
#[test]
fn a_run_over_ipv6_is_sent_and_received_whole() {
    let at = |port| SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, port));
    let sender = UdpSocket::bind(at(47_911), 1 << 20).unwrap();
    let receiver = UdpSocket::bind(at(47_912), 1 << 20).unwrap();
    let bytes: Vec<u8> = (0..10_250_u32).map(|n| n.to_le_bytes()[0]).collect();
    let run = Departing { target: at(47_912), bytes: &bytes, segment_len: 1000, traffic_class: 2 };
    assert_eq!(sender.send([run].into_iter()), Ok(1));
    let mut ring = ReceiveRing::new(8);
    assert_eq!(receive(&mut ring, &receiver), 1);
    let arrived = ring.arrived(0);
    assert_eq!((arrived.bytes, arrived.segment_len), (&bytes[..], 1000));
    assert_eq!(arrived.source, at(47_911));
    let other_family = SocketAddr::from(([127, 0, 0, 1], 4791));
    let nowhere = Departing { target: other_family, bytes: &[1], segment_len: 1, traffic_class: 2 };
    assert_eq!(sender.send([nowhere].into_iter()), Err(Unsent::Unreachable));
}

/// If steering fails, packets arrive at another poller's socket, and each must be forwarded.
#[test]
fn each_socket_gets_the_datagrams_that_are_steered_to_it() {
    let local = SocketAddr::from(([127, 0, 3, 31], 4791));
    let steering = Steering { byte_at: 2, shares: 3 };
    let sockets = UdpSocket::bind_shares(local, 1 << 20, steering).unwrap();
    let sender = UdpSocket::bind(SocketAddr::from(([127, 0, 3, 32], 4791)), 1 << 20).unwrap();
    let mut ring = ReceiveRing::new(8);
    for byte in [0, 1, 2, 3, 7, 255] {
        let datagram = [9, 9, byte, 9];
        let departing =
            Departing { target: local, bytes: &datagram, segment_len: 4, traffic_class: 1 };
        assert_eq!(sender.send([departing].into_iter()), Ok(1));
        let share = usize::try_from(steering.share_of(byte)).unwrap();
        assert_eq!(receive(&mut ring, &sockets[share]), 1);
        assert_eq!(ring.arrived(0).bytes, datagram);
    }
    assert!(sockets.iter().all(|socket| ring.receive(socket, RECEIVE_BURST).unwrap() == 0));
    let taken = UdpSocket::bind_shares(local, 1 << 20, steering).unwrap_err();
    assert_eq!(taken.kind(), io::ErrorKind::AddrInUse, "another gateway has it");
}
