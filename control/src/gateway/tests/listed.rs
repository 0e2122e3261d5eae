//! Who may be a peer: those that the operator listed, by TCP address and by RNIC.

use smcr_proto::Gid;
use smcr_proto::wire::clc::{Diagnosis, Frame, Offer};

use super::rig::{Peer, Rig, assert_echo, connect};

/// The Decline of a gateway.
fn declined(peer: &mut Peer) -> Diagnosis {
    let Some(Frame::Decline(decline)) = peer.hear() else { panic!("a Decline") };
    decline.diagnosis
}

/// Proposes to a gateway with these keys, and returns the answer and who gave it.
fn propose(number: u8, keys: &str) -> (Rig, Peer, Option<Frame>) {
    let rig = Rig::server(number, keys);
    let mut peer = Peer::new(connect(rig.gateway));
    let _server = rig.accept();
    peer.say(&peer.proposal());
    let answer = peer.hear();
    (rig, peer, answer)
}

/// Anybody who reached a listener was told the keys of our memory, and that the port takes SMC-R
/// from him. Whoever is not listed is served over TCP, and the operator sees why.
#[test]
fn a_client_that_is_not_listed_stays_tcp() {
    for (number, keys) in [
        (80, "[smc]\npeers = [\"127.77.0.0/16\"]\n"),
        (81, "[smc]\ngids = [\"127.78.0.0/16\"]\n"),
        (82, "peers = []\n[smc]\npeers = [\"127.0.0.0/8\"]\n"),
    ] {
        let rig = Rig::server(number, keys);
        let mut peer = Peer::new(connect(rig.gateway));
        let mut server = rig.accept();
        peer.say(&peer.proposal());
        assert_eq!(declined(&mut peer), Diagnosis::PEER_NOT_LISTED, "{keys}");
        assert_echo(&mut peer.socket, &mut server);
        let stats = rig.stats();
        assert_eq!(stats.fallbacks[0].name, "PEER_NOT_LISTED", "{keys}");
        assert_eq!((stats.link_groups.len(), stats.memory.rmbes), (0, 0), "nothing is taken");
    }
}

/// The lists of a listener count for its connections, and not those of the gateway.
#[test]
fn a_client_that_its_listener_lists_is_a_peer() {
    let keys = "peers = [\"127.0.0.1\"]\ngids = [\"127.77.0.1\"]\n[smc]\npeers = []\ngids = []\n";
    let (_rig, _peer, answer) = propose(83, keys);
    assert!(matches!(answer, Some(Frame::Accept(_))), "{answer:?}");
}

/// The Confirm may name another port than the Proposal: a listed peer could have us send packets to
/// anybody.
#[test]
fn a_confirm_names_no_rnic_that_is_not_listed() {
    let (rig, mut peer, answer) = propose(84, "[smc]\ngids = [\"127.77.0.1\"]\n");
    assert!(matches!(answer, Some(Frame::Accept(_))), "{answer:?}");
    peer.say(&Frame::Confirm(peer.offer(Gid::from_ipv4([127, 77, 0, 2]))));
    assert_eq!(declined(&mut peer), Diagnosis::PEER_NOT_LISTED);
    assert_eq!(rig.stats().rnics[0].packets_out, 0);
}

/// The same the other way round: what a server names in its Accept.
#[test]
fn an_accept_names_no_rnic_that_is_not_listed() {
    for (number, gid, refused) in [(85, [127, 77, 0, 2], true), (86, [127, 77, 0, 1], false)] {
        let rig = Rig::client(number, "[smc]\ngids = [\"127.77.0.1\"]\n");
        let _application = connect(rig.gateway);
        let mut peer = Peer::new(rig.accept());
        assert!(matches!(peer.hear(), Some(Frame::Proposal(_))));
        let offer = peer.offer(Gid::from_ipv4(gid));
        peer.say(&Frame::Accept(Offer { first_contact: true, ..offer }));
        let answer = peer.hear();
        let declined = match answer {
            Some(Frame::Decline(decline)) => decline.diagnosis == Diagnosis::PEER_NOT_LISTED,
            _ => false,
        };
        assert_eq!(declined, refused, "{answer:?}");
    }
}

/// A server that is not listed is told so in place of a Proposal: it may wait for one.
#[test]
fn a_server_that_is_not_listed_stays_tcp() {
    let rig = Rig::client(87, "[smc]\npeers = [\"127.77.0.1\"]\n");
    let mut application = connect(rig.gateway);
    let mut peer = Peer::new(rig.accept());
    assert_eq!(declined(&mut peer), Diagnosis::PEER_NOT_LISTED);
    assert_echo(&mut application, &mut peer.socket);
    assert_eq!(rig.stats().fallbacks[0].name, "PEER_NOT_LISTED");
}
