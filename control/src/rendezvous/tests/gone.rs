//! RNICs that go while a rendezvous is under way.

use smcr_proto::wire::clc::Offer;
use smcr_proto::{AlertToken, Psn, Qpn, Rkey};

use super::*;

/// Where nothing is left of the second RNIC.
fn close_second(endpoint: &mut Tested) {
    let groups = endpoint.groups_mut();
    groups.retire_port(START, PortId(1));
    assert_eq!(groups.retired_at_rest(), [PortId(1)]);
    groups.close_port(PortId(1));
}

/// The server has a link group with us over another RNIC, or says so. Nothing is known of the one
/// that the Proposal named, and the process was gone for want of it.
#[test]
fn an_accept_that_follows_a_closed_rnic_is_declined() {
    let mut client = endpoint_in(&Network::new(1, Odds::CALM), (1, 2), Side::Client, |_| {});
    let second = Surroundings { port: Some(PortId(1)), ..surroundings() };
    client.arrived(START, key(1), arrival(9));
    assert_eq!(drain_amid(&mut client, START, &second).len(), 1);
    client.connected(START, key(1));
    let effects = drain_amid(&mut client, START, &second);
    let [Effect::Send { frame: Frame::Proposal(proposal), .. }] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!(proposal.gid, Gid::from_ipv4([10, 0, 1, 1]));
    close_second(&mut client);
    let accept = Frame::Accept(Offer {
        first_contact: false,
        peer_id: PeerId([2; 8]),
        gid: Gid::from_ipv4([10, 0, 0, 2]),
        mac: MacAddress([2, 0, 0, 0, 0, 2]),
        qpn: Qpn(7),
        rkey: Rkey(1),
        rmbe_index: 1,
        alert_token: AlertToken(1),
        rmbe_size: RmbeSize::KIB_64,
        mtu: Mtu::B1024,
        rmb_address: 0,
        psn: Psn(0),
    });
    client.received(key(1), accept.encode().as_bytes());
    let effects = drain_amid(&mut client, START, &second);
    assert_eq!(declined(&effects), Some(Diagnosis::SERVER_LINK_NOT_FOUND), "{effects:?}");
    assert!(matches!(effects[1], Effect::StayTcp { port: PortId(0), .. }), "{effects:?}");
}

/// The poller of a closed RNIC reads no commands any more: both applications would hang, and the
/// gateway could not stop.
#[test]
fn what_stays_tcp_goes_to_a_poller_that_runs() {
    let mut server = endpoint_in(&Network::new(1, Odds::CALM), (1, 2), Side::Server, |_| {});
    let second = Arrival { offered: false, port: Some(PortId(1)), ..arrival(9) };
    server.arrived(START, key(1), second);
    assert!(matches!(drain(&mut server, START)[..], [Effect::Connect { .. }]));
    close_second(&mut server);
    server.connected(START, key(1));
    let effects = drain(&mut server, START);
    assert!(matches!(effects[..], [Effect::StayTcp { port: PortId(0), .. }]), "{effects:?}");
}
