//! Link groups of SMC-Rv2: byte for byte what Linux says, and what version 1 does not have.

use std::vec::Vec;

use super::hosts::Hosts;
use super::*;
use crate::wire::llc::LlcV2;
use crate::wire::llc::v2::{AddLinkExtension, AddLinkV2, DeleteRkeyV2, LEN_MAX, Records};

const V2: Version = Version::V2 { max_connections: 255, direct: true };

/// A first contact of two Linux 6.12 hosts with one RNIC each: `linux-6.12-v2-first-contact.pcap`,
/// frames 10, 12, 14 and 16.
const CONFIRM_LINK: &str = "212c000352540000000a00000000000000000000ffff0a0900010000110100000101\
                            02ff0000000000000000";
const CONFIRM_LINK_REPLY: &str = "212c008352540000000b00000000000000000000ffff0a0900020000110100\
                                  00010102ff0000000000000000";
const ADD_LINK: &str = "2258000052540000000a000000000000000000000000ffff0a0900010000120203b6aa37\
                        0000000000000000800000000000000000000000ffff0a09000100000000000000000100\
                        0000035a00000574ff48160183bb0000";
const ADD_LINK_REJECTED: &str = "222c00c052540000000a000000000000000000000000ffff0a09000100001202\
                                 03b6aa370000000000000000";

fn bytes(hex: &str) -> Vec<u8> {
    let digit = |digit: u8| u8::try_from(char::from(digit).to_digit(16).unwrap()).unwrap();
    hex.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

/// The end that host 1 or 2 of the capture has.
fn end_of(host: u8, qpn: u32, psn: u32) -> QpAddress {
    QpAddress {
        gid: Gid::from_ipv4([10, 9, 0, host]),
        mac: MacAddress([0x52, 0x54, 0, 0, 0, 9 + host]),
        qpn: Qpn(qpn),
        psn: Psn(psn),
        mtu: Mtu::B1024,
    }
}

fn linux_setup(ours: u8, theirs: u8) -> Setup {
    Setup {
        version: V2,
        ours: end_of(ours, 0x11, 1),
        theirs: end_of(theirs, 0x11, 2),
        user_id: LinkUserId(0x101),
        max_links: 2,
        ..setup(1, 2)
    }
}

/// What the group says next.
fn said(group: &mut LinkGroup) -> Vec<u8> {
    loop {
        let action = group.poll_action().expect("it says something");
        if let Action::Send(on, message) = action {
            return group.encode(on, &message, &mut [0; LEN_MAX]).to_vec();
        }
    }
}

/// A Linux client takes nothing else for a first contact; anything missing costs it seconds, in
/// which it serves nobody.
#[test]
fn a_server_says_what_linux_says() {
    let mut server = LinkGroup::new_server(T0, linux_setup(1, 2), LINK);
    server.own_rmb(RmbIndex(0), &[(LINK, Rkey(0x35a), 0xff48_1601_83bb_0000)]);
    server.link_connected(T0, LINK);
    assert_eq!(said(&mut server), bytes(CONFIRM_LINK));
    server.handle_bytes(T0, LINK, &bytes(CONFIRM_LINK_REPLY)).unwrap();
    let number = SECOND_LINK;
    assert_eq!(server.poll_action(), Some(Action::OpenLink { number, peer: None }));
    let keys = [(RmbIndex(0), Rkey(0x574), 0xff48_1601_83bb_0000)];
    let ours = end_of(1, 0x12, 0x00b6_aa37);
    server.link_opened(T0, number, ours, LinkUserId(0x102), &keys);
    assert_eq!(said(&mut server), bytes(ADD_LINK));
    server.handle_bytes(T0, LINK, &bytes(ADD_LINK_REJECTED)).unwrap();
    assert_eq!(
        drain(&mut server),
        [Action::LinkFailed(number, Cause::Rejected), Action::LinkConfirmed(LINK)]
    );
    assert!(server.is_established());
}

/// A Linux server is answered as another Linux would answer: with one RNIC, no second link.
#[test]
fn a_client_says_what_linux_says() {
    let mut client = LinkGroup::new_client(T0, linux_setup(2, 1));
    client.handle_bytes(T0, UNNUMBERED, &bytes(CONFIRM_LINK)).unwrap();
    assert_eq!(said(&mut client), bytes(CONFIRM_LINK_REPLY));
    client.handle_bytes(T0, LINK, &bytes(ADD_LINK)).unwrap();
    let peer = Some((end_of(1, 0, 0).gid, end_of(1, 0, 0).mac));
    assert_eq!(client.poll_action(), Some(Action::OpenLink { number: SECOND_LINK, peer }));
    client.link_refused(T0, SECOND_LINK, NoQueuePair::NoAlternatePath);
    assert_eq!(said(&mut client), bytes(ADD_LINK_REJECTED));
    assert!(client.is_established());
}

/// Two RNICs on each side: the second link comes up without continuations, and each side knows at
/// once what the other's RMBs are called there. A failover would else write to the wrong place.
#[test]
fn rkeys_travel_with_the_new_link() {
    let hosts = Hosts::established_in(V2, &[1, 2], &[101, 102], 2);
    assert_eq!(hosts.server.up().len(), 2);
    hosts.assert_rkeys_agree();
    let mut hosts = Hosts::speaking(V2, &[1, 2], &[101, 102], 2);
    hosts.run();
    let continued = |llc: &Llc| matches!(llc, Llc::AddLinkContinuation(_));
    assert!(!hosts.seen.iter().any(|(_, _, llc)| continued(llc)));
}

/// More keys than version 1 gets into many messages fit into one, and all of them are known on the
/// link that is added later.
#[test]
fn sixty_rmbs_are_told_in_one_message() {
    let mut hosts = Hosts::established_in(V2, &[1], &[101], 2);
    for rmb in (1..=60).map(RmbIndex) {
        for role in [Role::Server, Role::Client] {
            let now = hosts.now;
            let host = hosts.host(role);
            host.rmbs.insert(rmb);
            let keys = host.keys(rmb);
            host.group.announce_rmb(now, rmb, &keys);
        }
        hosts.run();
    }
    hosts.server.ports.insert(2);
    hosts.client.ports.insert(102);
    let now = hosts.now;
    hosts.server.group.want_link(now, hosts::port(2));
    hosts.run();
    assert_eq!(hosts.server.up().len(), 2);
    hosts.assert_rkeys_agree();
}

/// A client that has another RNIC says REQUEST ADD LINK, which is a message of its own.
#[test]
fn a_client_asks_for_a_link() {
    let mut hosts = Hosts::established_in(V2, &[1, 2], &[101], 2);
    let now = hosts.now;
    hosts.client.ports.insert(102);
    hosts.client.group.want_link(now, hosts::port(102));
    let bytes = said(&mut hosts.client.group);
    assert_eq!((bytes[0], bytes.len()), (0x25, 44));
    let LlcV2::RequestAddLink(request) = LlcV2::decode(&bytes).unwrap() else { panic!() };
    assert_eq!(request.gids.iter().collect::<Vec<_>>(), [hosts::port(102).0]);
    hosts.server.group.handle_bytes(now, LINK, &bytes).unwrap();
    hosts.run();
    assert_eq!(hosts.server.up().len(), 2);
}

/// Peers that agreed on one link do not wait for an offer that nobody makes.
#[test]
fn a_group_of_one_link_is_established_at_once() {
    let mut hosts = Hosts::speaking(V2, &[1, 2], &[101, 102], 1);
    hosts.run();
    assert!(hosts.server.group.is_established() && hosts.client.group.is_established());
    assert_eq!((hosts.server.up().len(), hosts.seen.len()), (1, 2));
}

/// A peer may delete more RMBs at once than version 1 has room for; the answer counts those that
/// nobody knew.
#[test]
fn many_rkeys_are_deleted_at_once() {
    let mut server = LinkGroup::new_server(T0, linux_setup(1, 2), LINK);
    server.link_connected(T0, LINK);
    drain(&mut server);
    for rkey in 1..=200 {
        server.learn_rkey(LINK, Rkey(rkey), 7).unwrap();
    }
    let rkeys: Vec<Rkey> = (1..=203).map(Rkey).collect();
    let request = LlcV2::DeleteRkey(DeleteRkeyV2::Request(Records::ours(&rkeys)));
    let mut into = [0; LEN_MAX];
    server.handle_bytes(T0, LINK, request.encode(&mut into)).unwrap();
    assert_eq!(server.poll_action(), Some(Action::RkeysDeleted(LINK)));
    let answer = said(&mut server);
    let answer = LlcV2::decode(&answer).unwrap();
    let expected = DeleteRkeyV2::Reply { negative: true, count: 203, invalid: 3 };
    assert_eq!(answer, LlcV2::DeleteRkey(expected));
    assert_eq!(server.peer_rmb(LINK, Rkey(100), LINK), None);
}

/// An offer that is given up leaves nothing behind: the next one finds the place, and the keys of
/// the first are forgotten.
#[test]
fn keys_of_a_link_that_never_was_are_forgotten() {
    let mut client = LinkGroup::new_client(T0, linux_setup(2, 1));
    client.learn_rkey(UNNUMBERED, Rkey(0x35a), 1).unwrap();
    client.handle_bytes(T0, UNNUMBERED, &bytes(CONFIRM_LINK)).unwrap();
    for number in 2..=9 {
        let link = AddLink {
            reply: false,
            rejected: false,
            reason: 0,
            mac: end_of(3, 0, 0).mac,
            gid: end_of(3, 0, 0).gid,
            qpn: Qpn(0x20),
            link: LinkNumber(number),
            mtu: Mtu::B1024,
            psn: Psn(1),
        };
        let (existing, new) = (Rkey(0x35a), Rkey(0x1000 + u32::from(number)));
        let pairs = [crate::wire::llc::RkeyPair { existing, new, address: 2 }];
        let rkeys = Records::ours(&pairs);
        let extension = AddLinkExtension { direct: true, target: link.gid, rkeys };
        let offer = LlcV2::AddLink(AddLinkV2 { link, extension: Some(extension) });
        let mut into = [0; LEN_MAX];
        client.handle_bytes(T0, LINK, offer.encode(&mut into)).unwrap();
        client.link_refused(T0, link.link, NoQueuePair::Exhausted);
        assert_eq!(client.peer_rmbs.rows.iter().filter(|row| row.present != 0).count(), 1);
    }
    assert_eq!(client.peer_rmb(LINK, Rkey(0x35a), LINK), Some((Rkey(0x35a), 1)));
}

/// In a group of version 2 nobody says anything of version 1, nor the reverse.
#[test]
fn the_other_version_costs_the_link() {
    let mut server = LinkGroup::new_server(T0, linux_setup(1, 2), LINK);
    server.link_connected(T0, LINK);
    let test = Llc::TestLink(TestLink { reply: false, user_data: [1; 16] });
    assert!(server.handle_bytes(T0, LINK, &test.encode()).is_err());
    assert!(server.is_terminated());
    let mut elder = Pair::established().server;
    let message = LlcV2::TestLink(TestLink { reply: false, user_data: [1; 16] });
    let mut into = [0; LEN_MAX];
    assert!(elder.handle_bytes(T0, LINK, message.encode(&mut into)).is_err());
    assert!(elder.is_terminated());
}
