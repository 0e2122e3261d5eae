//! First and subsequent contact, as a peer with a script sees them.

use std::io::Read;
use std::net::Shutdown;
use std::time::Duration;

use rustix::net::{SendFlags, send};
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_proto::wire::clc::{Decline, Diagnosis, Frame, Offer, Proposal};
use smcr_proto::{Gid, PeerId};

use super::US;
use super::rig::{Peer, Rig, SUBNET, assert_echo, connect, wait_until};

/// The server decides by it whether SMC-R will work at all; and a client that took memory for each
/// Proposal would run out of it on servers that decline.
// RFC 7609 3.5.1.2 #2: Proposal with peer id, GID, MAC
// RFC 7609 3.5.1.2 #3: Proposal with subnet or prefixes
// RFC 7609 3.5.1.2 #4: Proposal commits no resources
#[test]
fn a_proposal_names_us_and_takes_nothing() {
    let rig = Rig::client(20, "");
    let mut application = connect(rig.gateway);
    let mut peer = Peer::new(rig.accept());
    let Some(Frame::Proposal(proposal)) = peer.hear() else { panic!("a Proposal") };
    assert_eq!(proposal.peer_id, PeerId([20; 8]));
    assert_eq!(proposal.gid, Gid::from_ipv4([127, 77, 20, 1]));
    assert_eq!((proposal.subnet, proposal.prefix_count), (SUBNET, 0));
    let stats = rig.stats();
    assert_eq!((stats.memory.rmbes_used, stats.link_groups.len()), (0, 0));
    peer.say(&super::decline(Diagnosis::NO_SMC_R_DEVICE));
    assert_echo(&mut application, &mut peer.socket);
}

/// RoCE crosses no router: with a client of another subnet a link would come up never, and every
/// connection would wait for it to fail.
// RFC 7609 3.5.1.2 #6: check common LAN before Accept
// RFC 7609 3.5.1.2 #7: match IPv4 subnet with an interface
// RFC 7609 5.2 #1: SMC-Rv1 only within layer 2
#[test]
fn a_client_of_another_subnet_stays_tcp() {
    let rig = Rig::server(21, "");
    let mut peer = Peer::new(connect(rig.gateway));
    let mut server = rig.accept();
    let Frame::Proposal(proposal) = peer.proposal() else { panic!("a Proposal") };
    let subnet = Ipv4Subnet { network: [10, 9, 0, 0], prefix_bits: 24 };
    peer.say(&Frame::Proposal(Proposal { subnet, ..proposal }));
    let Some(Frame::Decline(decline)) = peer.hear() else { panic!("a Decline") };
    assert_eq!(decline.diagnosis, Diagnosis::NO_COMMON_SUBNET);
    assert_ne!(decline.peer_id, US);
    assert_echo(&mut peer.socket, &mut server);
}

/// Setting up a link takes round trips and memory: only the first connection between two peers
/// may pay for it. What is said about the later ones is the same, but for the elements.
// RFC 7609 2 #4: use existing links for later connections
// RFC 7609 3 #1: set up links in band
// RFC 7609 3.5.1.2 #5: find group by id and address
// RFC 7609 3.5.1.3 #1: tell new links from existing ones
// RFC 7609 3.5.2 #1: later contact may need new RMB
// RFC 7609 3.5.2 #2: same CLC messages on existing group
// RFC 7609 3.5.2.1 #1: same Proposal on later contact
// RFC 7609 3.5.2.1 #2: find existing group by address too
// RFC 7609 3.5.2.1 #3: allocate only elements on later contact
// RFC 7609 3.5.2.1 #4: take a free element that fits
// RFC 7609 3.5.2.1 #5: Accept without first contact flag
// RFC 7609 3.5.2.2 #1: recognize later contact by Accept
// RFC 7609 3.5.1.3 #2: client ready to receive before Confirm
// RFC 7609 3.5.2.4 #1: send once peer's element is known
#[test]
fn the_second_connection_joins_the_link_of_the_first() {
    let far = Rig::server(22, "");
    let near = Rig::client(23, "");
    let mut open = Vec::new();
    let mut said = Vec::new();
    for count in 1..=3 {
        let mut application = connect(near.gateway);
        let (here, there, frames) = near.overhear_rendezvous(far.gateway);
        let mut server = far.accept();
        assert_echo(&mut application, &mut server);
        for rig in [&near, &far] {
            let stats = rig.stats();
            assert_eq!((stats.link_groups.len(), stats.active.smc), (1, count));
        }
        open.push((application, here, there, server));
        said.push(frames);
    }
    let [Frame::Proposal(first), Frame::Accept(accept), Frame::Confirm(confirm)] = said[0] else {
        panic!("{said:?}")
    };
    assert!(accept.first_contact);
    for (frames, index) in said[1..].iter().zip(2..) {
        let [Frame::Proposal(proposal), Frame::Accept(later), Frame::Confirm(answer)] = frames
        else {
            panic!("{frames:?}")
        };
        assert_eq!(*proposal, first);
        for (this, that) in [(later, &accept), (answer, &confirm)] {
            let link = |offer: &Offer| (offer.peer_id, offer.gid, offer.mac, offer.qpn);
            assert_eq!((link(this), this.rkey), (link(that), that.rkey));
            assert_ne!(this.alert_token, that.alert_token);
            assert_eq!((this.first_contact, this.rmbe_index), (false, index));
        }
    }
}

/// A client says that it knows nothing of the link group: the connection that brought it to light
/// goes on as TCP. But the client is still there on the link, so who is on the group goes on; and
/// the next connection is not offered what the client does not know.
// RFC 7609 A.2.5 #3: test the links upon S
// RFC 7609 C.4 #2: go on as TCP after S
#[test]
fn a_group_that_is_called_out_of_sync_is_offered_no_more() {
    let far = Rig::server(24, "");
    let near = Rig::client(25, "");
    let mut application = connect(near.gateway);
    let (_here, _there, [proposal, ..]) = near.overhear_rendezvous(far.gateway);
    let mut server = far.accept();
    assert_echo(&mut application, &mut server);

    let mut peer = Peer::new(connect(far.gateway));
    let mut other_server = far.accept();
    peer.say(&proposal);
    let Some(Frame::Accept(accept)) = peer.hear() else { panic!("an Accept") };
    assert!(!accept.first_contact, "it means the group that is there");
    let Frame::Proposal(Proposal { peer_id, .. }) = proposal else { panic!("a Proposal") };
    let diagnosis = Diagnosis::OUT_OF_SYNC;
    peer.say(&Frame::Decline(Decline { out_of_sync: true, peer_id, diagnosis }));
    assert_echo(&mut peer.socket, &mut other_server);
    assert_echo(&mut application, &mut server);
    assert_eq!(far.stats().totals.groups_out_of_sync, 1);

    let mut peer = Peer::new(connect(far.gateway));
    let _third_server = far.accept();
    peer.say(&proposal);
    let Some(Frame::Accept(accept)) = peer.hear() else { panic!("an Accept") };
    assert!(accept.first_contact, "another group");
    assert_echo(&mut application, &mut server);
}

/// A Linux program that connects, sends its question and half-closes, as `nc -N` does: its kernel
/// ends the TCP connection at once, which overtakes the last words of the first contact. Taken for
/// the end of the rendezvous, that would reset a program that did nothing unusual. In later
/// contacts it comes with the Confirm.
#[test]
fn tcp_may_end_while_the_link_is_confirmed() {
    let far = Rig::server(26, "");
    let near = Rig::client(27, "");
    let mut open = Vec::new();
    for count in 1..=2 {
        let mut application = connect(near.gateway);
        let here = near.accept();
        let there = connect(far.gateway);
        let (mut client, mut server) =
            (Peer::new(here.try_clone().unwrap()), Peer::new(there.try_clone().unwrap()));
        server.say(&client.hear().unwrap());
        client.say(&server.hear().unwrap());
        let Some(Frame::Confirm(confirm)) = client.hear() else { panic!("a Confirm") };
        assert_eq!(confirm.first_contact, count == 1);
        // One segment, so that nothing happens between the Confirm and the end.
        let encoded = Frame::Confirm(confirm).encode();
        assert_eq!(send(&there, encoded.as_bytes(), SendFlags::MORE).unwrap(), 68);
        there.shutdown(Shutdown::Write).unwrap();
        let mut upstream = far.accept();
        assert_echo(&mut application, &mut upstream);
        let stats = far.stats();
        assert_eq!((stats.active.smc, stats.totals.handshakes_failed), (count, 0));
        open.push((application, here, there, upstream));
    }
}

/// A client that has ended TCP behind its Confirm believes that SMC-R carries all its bytes. If the
/// link is never confirmed, it must not go on over TCP: its application would seem to have sent
/// nothing. The end may come with the Confirm, in one event, or by itself, when the Confirm has
/// emptied the socket.
// RFC 7609 C.1 #7: existing group: later failure breaks TCP
#[test]
fn the_end_of_tcp_is_seen_with_the_confirm_and_behind_it() {
    for (number, apart) in [(172, false), (173, true)] {
        let far = Rig::server(number, "");
        let mut peer = Peer::new(connect(far.gateway));
        let mut server = far.accept();
        peer.say(&peer.proposal());
        assert!(matches!(peer.hear(), Some(Frame::Accept(_))));
        let confirm = Frame::Confirm(peer.offer(Gid::from_ipv4([127, 77, 0, 1]))).encode();
        if apart {
            send(&peer.socket, confirm.as_bytes(), SendFlags::empty()).unwrap();
            // Nothing tells when it was read. Later the link would count as failed.
            std::thread::sleep(Duration::from_millis(100));
        } else {
            // One segment, so that nothing happens between the Confirm and the end.
            send(&peer.socket, confirm.as_bytes(), SendFlags::MORE).unwrap();
        }
        peer.socket.shutdown(Shutdown::Write).unwrap();
        assert!(peer.hear().is_none(), "no Decline: {apart}");
        assert!(server.read(&mut [0]).is_err(), "reset, and not the end of a stream: {apart}");
        let stats = far.stats();
        assert_eq!((stats.active.smc, stats.active.tcp), (0, 0));
    }
}

/// An upstream that does not answer at first, and then refuses: the event of the connect has no
/// more than its flags to tell a refusal from a success, on either side of SMC-R.
#[test]
fn a_late_refusal_is_told_from_a_success() {
    for rig in [Rig::server(174, ""), Rig::client(175, "")] {
        let _queued = rig.crowd_upstream();
        let mut application = connect(rig.gateway);
        wait_until("it is connecting", || rig.stats().active.connecting == 1);
        rig.close_upstream();
        let error = application.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        let stats = rig.stats();
        assert_eq!((stats.active.smc, stats.active.tcp, stats.listeners[0].refused), (0, 0, 1));
    }
}

/// A Linux client that cannot go on after our Accept (out of queue pairs, or of memory for its
/// element) says so in place of its Confirm. Its program keeps the connection, and the group that
/// others use is no worse for it.
// RFC 7609 C.1 #6: existing group: no Decline after Confirm
// RFC 7609 3.5.1.6.4 #3: decline during CONFIRM LINK before data
#[test]
fn a_client_may_decline_our_accept() {
    let far = Rig::server(28, "");
    let decline = |peer: &mut Peer, server: &mut std::net::TcpStream| {
        let Some(Frame::Accept(accept)) = peer.hear() else { panic!("an Accept") };
        peer.say(&super::decline(Diagnosis::RKEY_REGISTRATION));
        assert_echo(&mut peer.socket, server);
        accept.first_contact
    };
    let mut first = Peer::new(connect(far.gateway));
    let mut first_server = far.accept();
    first.say(&first.proposal());
    assert!(decline(&mut first, &mut first_server));
    assert_eq!(far.stats().link_groups.len(), 0);

    let near = Rig::client(29, "");
    let mut application = connect(near.gateway);
    let (_here, _there, [proposal, ..]) = near.overhear_rendezvous(far.gateway);
    let mut server = far.accept();
    let mut later = Peer::new(connect(far.gateway));
    let mut later_server = far.accept();
    later.say(&proposal);
    assert!(!decline(&mut later, &mut later_server));
    assert_echo(&mut application, &mut server);
    let stats = far.stats();
    assert_eq!((stats.active.smc, stats.active.tcp, stats.link_groups.len()), (1, 2, 1));
    assert_eq!(stats.fallbacks[0].code, Diagnosis::RKEY_REGISTRATION.0);
}

/// A client's Confirm names a link that the group does not have. The client believes to speak SMC-R
/// by now, so that a Decline would reach its application as data.
// RFC 7609 C.1 #5: existing group: no Decline after Accept
// RFC 7609 C.1 #7: existing group: later failure breaks TCP
#[test]
fn a_later_contact_that_fails_behind_the_accept_is_reset() {
    let far = Rig::server(170, "");
    let near = Rig::client(171, "");
    let mut application = connect(near.gateway);
    let (_here, _there, [proposal, _, confirm]) = near.overhear_rendezvous(far.gateway);
    let mut server = far.accept();
    assert_echo(&mut application, &mut server);
    let mut joining = Peer::new(connect(far.gateway));
    let mut joined = far.accept();
    joining.say(&proposal);
    assert!(matches!(joining.hear(), Some(Frame::Accept(Offer { first_contact: false, .. }))));
    let Frame::Confirm(confirm) = confirm else { panic!("a Confirm") };
    let qpn = smcr_proto::Qpn(confirm.qpn.0 ^ 1);
    joining.say(&Frame::Confirm(Offer { first_contact: false, rmbe_index: 3, qpn, ..confirm }));
    let error = joining.socket.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "no Decline");
    assert!(joined.read(&mut [0]).is_err());
    assert_echo(&mut application, &mut server);
}

/// A client host stops, by DELETE LINK for all links, while another connection of it is between
/// Accept and Confirm. It believes to write by RDMA already: those bytes are lost, so it is reset.
// RFC 7609 3.5.4 #8: client drops deleted group at once
#[test]
fn a_group_may_end_between_accept_and_confirm() {
    let far = Rig::server(50, "");
    let near = Rig::client(51, "");
    let mut application = connect(near.gateway);
    let (_here, _there, [proposal, _, confirm]) = near.overhear_rendezvous(far.gateway);
    assert_echo(&mut application, &mut far.accept());
    let mut joining = Peer::new(connect(far.gateway));
    let mut server = far.accept();
    joining.say(&proposal);
    assert!(matches!(joining.hear(), Some(Frame::Accept(Offer { first_contact: false, .. }))));
    drop(near);
    wait_until("it has heard", || far.stats().active.smc == 0);
    let Frame::Confirm(confirm) = confirm else { panic!("a Confirm") };
    joining.say(&Frame::Confirm(Offer { first_contact: false, rmbe_index: 3, ..confirm }));
    assert!(server.read(&mut [0]).is_err() && joining.hear().is_none(), "reset");
}

/// A server has stopped, and names a link of the group that ended with it: it does not know yet
/// that we have heard. We say so by S, and the connection goes on over TCP.
// RFC 7609 C.4 #1: S only without a known group
// RFC 7609 3.5.4 #8: client drops deleted group at once
#[test]
fn a_group_that_has_ended_is_out_of_sync() {
    let far = Rig::server(52, "");
    let near = Rig::client(53, "");
    let mut application = connect(near.gateway);
    let (_here, _there, [_, accept, _]) = near.overhear_rendezvous(far.gateway);
    assert_echo(&mut application, &mut far.accept());
    drop(far);
    wait_until("it has heard", || near.stats().active.smc == 0);
    let Frame::Accept(accept) = accept else { panic!("an Accept") };
    let mut application = connect(near.gateway);
    let mut peer = Peer::new(near.accept());
    assert!(matches!(peer.hear(), Some(Frame::Proposal(_))));
    peer.say(&Frame::Accept(Offer { first_contact: false, rmbe_index: 3, ..accept }));
    let Some(Frame::Decline(decline)) = peer.hear() else { panic!("a Decline") };
    assert_eq!((decline.diagnosis, decline.out_of_sync), (Diagnosis::OUT_OF_SYNC, true));
    assert_echo(&mut application, &mut peer.socket);
}

/// The first connection of a host stands still after our Accept. Others of that host wait for the
/// outcome; but a Linux client waits six seconds for an answer, and then its program gets an error.
/// So it is told before that to go on over TCP.
// RFC 7609 C.1 #1: decline in place of expected CLC
#[test]
fn a_client_that_waits_for_another_is_answered_in_time() {
    let rig = Rig::server(54, "");
    let mut silent = Peer::new(connect(rig.gateway));
    let _first = rig.accept();
    silent.say(&silent.proposal());
    assert!(matches!(silent.hear(), Some(Frame::Accept(_))));
    let mut waiting = Peer::new(connect(rig.gateway));
    let mut second = rig.accept();
    waiting.say(&waiting.proposal());
    waiting.socket.set_read_timeout(Some(Duration::from_millis(5_800))).unwrap();
    let Some(Frame::Decline(decline)) = waiting.hear() else { panic!("a Decline") };
    assert_eq!(decline.diagnosis, Diagnosis::TIMED_OUT);
    assert_echo(&mut waiting.socket, &mut second);
}
