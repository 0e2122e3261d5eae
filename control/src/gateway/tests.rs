//! Gateways on loopback addresses, and peers that read from a script.

mod arrivals;
mod confined;
mod contact;
mod counts;
mod crossing;
mod limits;
mod listed;
mod missing;
mod rig;
mod second;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use smcr_proto::wire::clc::{Decline, Diagnosis, Frame, Ipv4Subnet, Proposal};
use smcr_proto::{Gid, PeerId};

use rig::{Peer, Rig, assert_echo, connect, reset, wait_until};

const US: PeerId = PeerId([7; 8]);

fn decline(diagnosis: Diagnosis) -> Frame {
    Frame::Decline(Decline { out_of_sync: false, peer_id: US, diagnosis })
}

/// A client host whose RNIC is gone still offers SMC-R in its SYN: its applications must not be
/// reset by our side of the rendezvous.
// RFC 7609 C.1 #1: decline in place of expected CLC
#[test]
fn a_client_may_decline_before_it_proposes() {
    let rig = Rig::server(1, "");
    let mut peer = Peer::new(connect(rig.gateway));
    let mut server = rig.accept();
    peer.say(&decline(Diagnosis::NO_SMC_R_DEVICE));
    assert_echo(&mut peer.socket, &mut server);
    let stats = rig.stats();
    assert_eq!((stats.totals.connections_tcp, stats.totals.handshakes_failed), (1, 0));
    assert_eq!(stats.fallbacks[0].code, Diagnosis::NO_SMC_R_DEVICE.0);
}

/// A burst of connections must not stay TCP for as long as they live, only because they came within
/// the same second.
#[test]
fn newcomers_wait_for_a_place_instead_of_staying_tcp() {
    let rig = Rig::client(2, "[limits]\nhandshakes_max = 1\n");
    let mut applications = [connect(rig.gateway), connect(rig.gateway), connect(rig.gateway)];
    for (waiting, application) in [2, 1, 0].into_iter().zip(&mut applications) {
        let mut peer = Peer::new(rig.accept());
        assert!(matches!(peer.hear(), Some(Frame::Proposal(_))));
        let active = rig.stats().active;
        assert_eq!((active.connecting, active.waiting), (1, waiting));
        peer.say(&decline(Diagnosis::NO_COMMON_SUBNET));
        assert_echo(application, &mut peer.socket);
    }
    assert_eq!(rig.stats().totals.refused_smc, 0);
}

/// Peers that do not answer must not keep others waiting for ever. These stay TCP, which servers
/// hear that are assumed to await a word of SMC-R, and the operator reads that there were too many
/// at once.
#[test]
fn who_has_waited_in_vain_stays_tcp_and_the_reason_has_a_name() {
    let more = "[limits]\nhandshakes_max = 1\n[smc]\nhandshake_timeout = \"300ms\"\n";
    let rig = Rig::client(11, more);
    let _silent: Vec<_> = (0..2).map(|_| connect(rig.gateway)).collect();
    let mut application = connect(rig.gateway);
    let _peers: Vec<_> = (0..2).map(|_| rig.accept()).collect();
    let mut server = Peer::new(rig.accept());
    let Some(Frame::Decline(decline)) = server.hear() else { panic!("no Decline") };
    assert_eq!(decline.diagnosis, Diagnosis::TOO_BUSY);
    assert_echo(&mut application, &mut server.socket);
    let stats = rig.stats();
    let name = format!("{:?}", Diagnosis::TOO_BUSY);
    assert!(stats.fallbacks.iter().any(|row| row.name == name && row.count == 1), "{stats:?}");
    assert_eq!(stats.totals.refused_smc, 1);
}

/// Hosts that connect and then say nothing, or propose and then say nothing, are a nuisance to
/// nobody else: the former take no place, the latter lose it when their time is over.
#[test]
fn silent_peers_lock_nobody_out() {
    let more = "[limits]\nhandshakes_max = 1\n[smc]\nhandshake_timeout = \"300ms\"\n";
    let rig = Rig::server(12, more);
    let _silent: Vec<_> = (0..20).map(|_| connect(rig.gateway)).collect();
    let mut first = Peer::new(connect(rig.gateway));
    first.say(&first.proposal());
    assert!(matches!(first.hear(), Some(Frame::Accept(_))));
    let mut second = Peer::new(connect(rig.gateway));
    second.say(&second.proposal());
    assert!(matches!(second.hear(), Some(Frame::Accept(_) | Frame::Decline(_))));
}

/// Whoever waits for a place when the gateway stops has not been served yet: it is told at once, so
/// that it can try elsewhere.
#[test]
fn who_waits_when_the_gateway_stops_is_reset() {
    let rig = Rig::client(13, "[limits]\nhandshakes_max = 1\n");
    let _first = connect(rig.gateway);
    let mut peer = Peer::new(rig.accept());
    assert!(matches!(peer.hear(), Some(Frame::Proposal(_))));
    let mut waiting = connect(rig.gateway);
    wait_until("it waits", || rig.stats().active.waiting == 1);
    drop(rig);
    let error = waiting.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

/// Where SMC-R is not possible, or not wanted, the application has its connection all the same; and
/// the operators of both hosts read why it is TCP.
// RFC 7609 C.1 #2: decline for RNIC, policy, subnet, resources
#[test]
fn each_reason_against_smc_r_leaves_the_connection_tcp() {
    let elsewhere = Ipv4Subnet { network: [10, 9, 0, 0], prefix_bits: 24 };
    for (rig, subnet, reason) in [
        (Rig::server_whose_rnic_is_down(150), rig::SUBNET, Diagnosis::NO_SMC_R_DEVICE),
        (Rig::server(151, "[smc]\npeers = []\n"), rig::SUBNET, Diagnosis::PEER_NOT_LISTED),
        (Rig::server(152, ""), elsewhere, Diagnosis::NO_COMMON_SUBNET),
        (Rig::server(153, "[limits]\nrmb_bytes = 0\n"), rig::SUBNET, Diagnosis::OUT_OF_MEMORY),
    ] {
        let mut peer = Peer::new(connect(rig.gateway));
        let mut server = rig.accept();
        let Frame::Proposal(proposal) = peer.proposal() else { panic!("a Proposal") };
        peer.say(&Frame::Proposal(Proposal { subnet, ..proposal }));
        let answer = peer.hear();
        let Some(Frame::Decline(decline)) = answer else { panic!("{reason:?}: {answer:?}") };
        assert_eq!(decline.diagnosis, reason);
        assert_echo(&mut peer.socket, &mut server);
        let fallbacks = rig.stats().fallbacks;
        assert_eq!((fallbacks.len(), fallbacks[0].code), (1, reason.0));
    }
}

/// TCP gets through where RoCE does not: the connection stays TCP, and nothing is leaked.
// RFC 7609 3.5.1.6.4 #4: release group resources on fallback
// RFC 7609 3.5.1 #1: new group on first contact
// RFC 7609 3.5.1.2 #9: allocate QP and element to accept
// RFC 7609 3.5.1.2 #10: first contact flag in Accept
#[test]
fn a_queue_pair_that_cannot_be_reached_costs_speed_only() {
    let rig = Rig::server(3, "");
    let mut peer = Peer::new(connect(rig.gateway));
    let mut server = rig.accept();
    peer.say(&peer.proposal());
    let Some(Frame::Accept(accept)) = peer.hear() else { panic!("an Accept") };
    assert!(accept.first_contact);
    assert_eq!(rig.stats().memory.rmbes_used, 1);
    peer.say(&Frame::Confirm(peer.offer(Gid([0xfd; 16]))));
    let Some(Frame::Decline(decline)) = peer.hear() else { panic!("a Decline") };
    assert_eq!(decline.diagnosis, Diagnosis::QUEUE_PAIR_NOT_READY);
    assert_echo(&mut peer.socket, &mut server);
    let stats = rig.stats();
    assert_eq!((stats.totals.connections_tcp, stats.totals.handshakes_failed), (1, 1));
    assert_eq!((stats.memory.rmbes_used, stats.link_groups.len()), (0, 0));
}

/// A client host that dies after the Accept would hold up every other connection of that host, each
/// of which waits for the outcome of the first contact.
// RFC 7609 3.5.1.6.4 #5: try first contact again next time
#[test]
fn a_silent_client_holds_nothing_up_for_longer_than_the_operator_allows() {
    let rig = Rig::server(4, "[smc]\nhandshake_timeout = \"300ms\"\n");
    let mut silent = Peer::new(connect(rig.gateway));
    let _first = rig.accept();
    silent.say(&silent.proposal());
    assert!(matches!(silent.hear(), Some(Frame::Accept(_))));
    let mut waiting = Peer::new(connect(rig.gateway));
    let _second = rig.accept();
    waiting.say(&waiting.proposal());
    assert!(silent.hear().is_none(), "closed, long before the 6 s of a CLC message are over");
    // Another first contact, now that the first has failed.
    assert!(matches!(waiting.hear(), Some(Frame::Accept(_))));
    drop(waiting);
    wait_until("everything is given back", || {
        let stats = rig.stats();
        stats.memory.rmbes_used == 0 && stats.link_groups.is_empty() && stats.active.connecting == 0
    });
    assert_eq!(rig.stats().totals.handshakes_failed, 1);
}

/// A client that goes away at any step of the rendezvous leaves nothing behind.
// RFC 7609 3.5.1.6.4 #4: release group resources on fallback
#[test]
fn a_client_that_vanishes_leaves_nothing() {
    let rig = Rig::server(5, "");
    for steps in 0..3 {
        let mut peer = Peer::new(connect(rig.gateway));
        let mut server = rig.accept();
        if steps > 0 {
            peer.say(&peer.proposal());
        }
        if steps > 1 {
            assert!(matches!(peer.hear(), Some(Frame::Accept(_))));
        }
        drop(peer);
        let outcome = server.read(&mut [0]);
        assert!(outcome.is_err(), "step {steps}: the server is told, by a reset: {outcome:?}");
        wait_until("everything is given back", || {
            let stats = rig.stats();
            stats.memory.rmbes_used == 0 && stats.link_groups.is_empty()
        });
    }
    let active = rig.stats().active;
    assert_eq!((active.connecting, active.smc, active.tcp), (0, 0, 0));
}

/// RFC 4.8.2: a peer that resets the TCP connection has given the connection up, even if no CDC
/// message could say so. One that only ends it is asked whether it lives, and goes on.
// RFC 7609 4.8.2 #11: peer's TCP reset without A aborts
// RFC 7609 2.1 #17: state flags only in CDC messages
#[test]
fn a_reset_beside_smc_r_resets_an_end_does_not() {
    let far = Rig::server(6, "");
    let near = Rig::client(7, "");
    let connected = || {
        let application = connect(near.gateway);
        let (here, there) = near.relay_rendezvous(far.gateway);
        (application, far.accept(), here, there)
    };
    let (mut kept, mut kept_server, ended, _there) = connected();
    assert_echo(&mut kept, &mut kept_server);
    assert_eq!((near.stats().active.smc, far.stats().active.smc), (1, 1));
    ended.shutdown(Shutdown::Write).unwrap();

    let (mut application, mut server, here, _there) = connected();
    assert_echo(&mut application, &mut server);
    reset(here);
    let error = application.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert_echo(&mut kept, &mut kept_server);
    wait_until("the slot is free", || near.stats().active.smc == 1);
}

/// Who ends TCP first has the ports in TIME_WAIT. A gateway that connects a few thousand times per
/// second would run out of them, so it lets the peer go first, who only listens; and does not wait
/// for ever.
// RFC 7609 4.8 #1: end by SMC-R messages and TCP
#[test]
fn the_side_that_connected_ends_tcp_last() {
    let far = Rig::server(14, "");
    let near = Rig::client(15, "");
    for polite in [true, false] {
        let mut application = connect(near.gateway);
        let (mut here, mut there) = near.relay_rendezvous(far.gateway);
        let mut server = far.accept();
        assert_echo(&mut application, &mut server);
        drop((application, server));
        assert_eq!(there.read(&mut [0]).unwrap(), 0);
        wait_until("the connection is over but for TCP", || {
            let active = near.stats().active;
            (active.smc, active.farewells) == (0, 1)
        });
        if polite {
            here.shutdown(Shutdown::Write).unwrap();
            assert_eq!(here.read(&mut [0]).unwrap(), 0, "in good order");
        } else {
            let error = here.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        }
        wait_until("nothing is left", || near.stats().active.farewells == 0);
        assert_eq!(near.stats().totals.tcp_cut_short, u64::from(!polite));
    }
    assert_eq!(far.stats().totals.tcp_cut_short, 0);
}

/// An application half-closes, and goes on reading: for SMC-R that is D. If the gateway ended TCP
/// by it, a firewall on the path would forget the connection, and a Linux peer would take it for
/// dead. TCP ends when SMC-R has.
// RFC 7609 3.5.4 #1: end SMC-R before TCP
#[test]
fn tcp_does_not_end_before_smc_r_has() {
    let far = Rig::server(154, "");
    let near = Rig::client(155, "");
    let mut application = connect(near.gateway);
    let (mut here, mut there) = near.relay_rendezvous(far.gateway);
    let mut server = far.accept();
    assert_echo(&mut application, &mut server);
    application.shutdown(Shutdown::Write).unwrap();
    assert_eq!(server.read(&mut [0]).unwrap(), 0, "the far application hears of it by SMC-R");
    assert_silent([&mut here, &mut there]);
    server.write_all(b"later").unwrap();
    application.read_exact(&mut [0; 5]).unwrap();
    assert_silent([&mut here, &mut there]);
    drop(server);
    assert_eq!(there.read(&mut [0]).unwrap(), 0, "both sides are done");
}

/// Neither bytes nor the end have come on these connections.
fn assert_silent(connections: [&mut TcpStream; 2]) {
    for tcp in connections {
        tcp.set_nonblocking(true).unwrap();
        let error = tcp.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        tcp.set_nonblocking(false).unwrap();
    }
}

/// Operators choose how long an idle group keeps its memory.
// RFC 7609 2 #5: end idle link groups
// RFC 7609 3.5.4 #4: keep an empty group by timer
// RFC 7609 4.8 #1: end by SMC-R messages and TCP
#[test]
fn an_idle_group_ends_when_the_operator_says() {
    let far = Rig::server(8, "[smc]\nidle_group_server = \"200ms\"\n");
    let near = Rig::client(9, "");
    let mut application = connect(near.gateway);
    let (mut here, mut there) = near.relay_rendezvous(far.gateway);
    let mut server = far.accept();
    assert_echo(&mut application, &mut server);
    assert_eq!((near.stats().link_groups.len(), far.stats().link_groups.len()), (1, 1));
    drop((application, server));
    assert_eq!(there.read(&mut [0]).unwrap(), 0, "the TCP connection beside it ends too");
    here.shutdown(Shutdown::Write).unwrap();
    assert_eq!(here.read(&mut [0]).unwrap(), 0, "and then on the side that connected");
    wait_until("both sides have let go of the group", || {
        near.stats().link_groups.is_empty() && far.stats().link_groups.is_empty()
    });
}

/// What cannot be read as the CLC message that is due may be bytes of an application. They must not
/// be answered, nor reach the other application: nobody can tell where they begin.
// RFC 7609 C.6 #3: malformed CLC is a protocol error
// RFC 7609 C.6 #4: protocol error ends TCP
#[test]
fn a_malformed_message_ends_the_connection() {
    let proposal = {
        let rig = Rig::server(156, "");
        let peer = Peer::new(connect(rig.gateway));
        peer.proposal().encode().as_bytes().to_vec()
    };
    let length = usize::from(u16::from_be_bytes([proposal[5], proposal[6]]));
    assert_eq!(length, proposal.len());
    let changed = |at: usize, byte: u8| {
        let mut bytes = proposal.clone();
        bytes[at] = byte;
        bytes
    };
    let wrong = [
        ("eye catcher at the beginning", changed(0, b'G')),
        ("eye catcher at the end", changed(proposal.len() - 1, 0)),
        ("too short a length", changed(6, proposal[6] - 1)),
        ("too large a length", changed(5, 0xff)),
        ("an offset beyond the message", changed(39, 0xf0)),
        ("a message of no type", changed(4, 9)),
    ];
    for (number, (what, bytes)) in (157..).zip(wrong) {
        let rig = Rig::server(number, "");
        let mut peer = connect(rig.gateway);
        let mut server = rig.accept();
        peer.write_all(&bytes).unwrap();
        for (who, stream) in [("the peer", &mut peer), ("the application", &mut server)] {
            let heard = stream.read(&mut [0; 100]).map_err(|error| error.kind());
            let over = matches!(heard, Ok(0) | Err(std::io::ErrorKind::ConnectionReset));
            assert!(over, "{what}: {who} hears {heard:?}");
        }
        wait_until(what, || rig.stats().totals.handshakes_failed == 1);
        assert_eq!(rig.stats().totals.connections_tcp, 0, "{what}");
    }
}

/// Bytes of an application that speaks first are no CLC message. It is told so, and counted.
// RFC 7609 C.6 #1: application data instead of CLC: error
// RFC 7609 C.6 #4: protocol error ends TCP
#[test]
fn nonsense_is_closed_and_counted() {
    let rig = Rig::server(10, "");
    let mut stray: TcpStream = connect(rig.gateway);
    stray.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let heard = stray.read(&mut [0]).map_err(|error| error.kind());
    assert!(matches!(heard, Ok(0) | Err(std::io::ErrorKind::ConnectionReset)), "{heard:?}");
    wait_until("it is counted", || rig.stats().totals.handshakes_failed == 1);
}
