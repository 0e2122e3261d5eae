//! SMC-Rv2: what is negotiated, and what operators see of it.

use smcr_proto::wire::clc::ProposalV2;
use smcr_proto::wire::clc::v2::{
    Eid, Eids, FirstContact, Gids, HostName, OsType, ProposalExtension,
};
use smcr_proto::wire::clc::{Decline, DeclineV2, Diagnosis, Frame, Offer, OfferV2};
use smcr_proto::{Gid, PeerId};

use super::US;
use super::rig::{Peer, Rig, assert_echo, connect};
use crate::rendezvous::fallbacks::UNNAMED_REASONS_MAX;

/// Nobody has said which versions to speak.
const UNTOLD: &str = "[smc]\n# versions are chosen by the gateway\n";

/// Two gateways find each other without configuration, and an operator sees what they agreed on.
#[test]
fn two_gateways_speak_version_2_without_being_told() {
    let far = Rig::server(30, UNTOLD);
    let near = Rig::client(31, UNTOLD);
    let mut open = Vec::new();
    let mut said = Vec::new();
    for _ in 0..2 {
        let mut application = connect(near.gateway);
        let (here, there, frames) = near.overhear_rendezvous(far.gateway);
        let mut server = far.accept();
        assert_echo(&mut application, &mut server);
        open.push((application, here, there, server));
        said.push(frames);
    }
    let [Frame::ProposalV2(proposal), Frame::AcceptV2(accept), Frame::ConfirmV2(confirm)] = said[0]
    else {
        panic!("{said:?}")
    };
    assert!(!proposal.v1.offers_smc_r_v1, "Linux would accept it, and fail three seconds later");
    assert_eq!(proposal.v2.unwrap().eids.as_slice(), [Eid::SMCGATE]);
    let ours = [accept, confirm].map(|offer| offer.first_contact.unwrap());
    assert!(ours.iter().all(|ours| ours.direct && ours.release == 1), "{ours:?}");
    assert_eq!(confirm.gids.as_slice(), [Gid::from_ipv4([127, 77, 31, 1])]);
    let [Frame::ProposalV2(_), Frame::AcceptV2(later), Frame::ConfirmV2(answer)] = said[1] else {
        panic!("{said:?}")
    };
    for (this, that) in [(later, accept), (answer, confirm)] {
        let link = |offer: &Offer| (offer.peer_id, offer.gid, offer.qpn, offer.rkey);
        assert_eq!(link(&this.offer), link(&that.offer));
        assert_eq!((this.offer.first_contact, this.first_contact), (false, None));
    }
    for rig in [&near, &far] {
        let groups = rig.stats().link_groups;
        assert_eq!((groups.len(), groups[0].version), (1, 2));
        let v2 = groups[0].v2.as_ref().unwrap();
        assert_eq!((v2.release, v2.eid.as_str(), v2.direct), (1, "SMCGATE", true));
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        assert_eq!((v2.peer_host.as_str(), v2.peer_os.as_str()), (host.as_str(), "Linux"));
        assert_eq!((v2.max_connections, v2.max_links), (255, 8));
    }
}

/// An operator who wants version 1 between gateways gets it, over any RNIC; offered both, version 2
/// is taken.
#[test]
fn what_both_sides_speak_is_spoken() {
    for (number, near, far, expected) in [
        (32, "versions = [1]", "versions = [1, 2]", Some(1)),
        (34, "versions = [1, 2]", "versions = [1]", Some(1)),
        (36, "versions = [2]", "versions = [1, 2]", Some(2)),
        (38, "versions = [1, 2]", "versions = [1, 2]", Some(2)),
    ] {
        let far = Rig::server(number, &format!("[smc]\n{far}\n"));
        let near = Rig::client(number + 1, &format!("[smc]\n{near}\n"));
        let mut application = connect(near.gateway);
        let (_here, _there) = near.relay_rendezvous(far.gateway);
        assert_echo(&mut application, &mut far.accept());
        let versions = [&near, &far].map(|rig| rig.stats().link_groups[0].version);
        assert_eq!(Some(versions), expected.map(|version| [version; 2]), "{number}");
    }
}

/// What a Linux client over `rdma_rxe` proposes: version 2 alone, without saying who it is.
fn linux_proposal(eid: &str) -> Frame {
    linux_proposal_from(Gid::from_ipv4([127, 77, 0, 1]), eid)
}

/// The same, with its RoCEv2 port at `gid`.
fn linux_proposal_from(gid: Gid, eid: &str) -> Frame {
    let extension = ProposalExtension {
        release: 1,
        gid,
        max_connections: 255,
        max_links: 2,
        features: 0,
        eids: Eids::from_items([Eid::new(eid).unwrap()]).unwrap(),
    };
    Frame::ProposalV2(ProposalV2 { v1: Peer::nobody(), v2: Some(extension) })
}

/// A host whose operator changes the versions it speaks, while connections of the other one are
/// there, gets what it asks for: each version has link groups of its own.
#[test]
fn a_group_of_one_version_takes_in_no_connection_of_the_other() {
    let rig = Rig::server(46, "[smc]\nversions = [1, 2]\n");
    let hear = |said: &dyn Fn(&Peer) -> Frame| {
        let mut peer = Peer::new(connect(rig.gateway));
        let server = rig.accept();
        peer.say(&said(&peer));
        let heard = peer.hear();
        (peer, server, heard)
    };
    // Neither has confirmed anything yet: the second does not wait for the first, either.
    let first = hear(&|_| linux_proposal("SMCGATE"));
    let second = hear(&Peer::proposal);
    let (Some(Frame::AcceptV2(v2)), Some(Frame::Accept(v1))) = (first.2, second.2) else {
        panic!("{:?} {:?}", first.2, second.2)
    };
    assert!(v1.first_contact && v2.offer.first_contact);
    assert_ne!((v1.qpn, v1.rkey), (v2.offer.qpn, v2.offer.rkey));
    let mut versions: Vec<_> = rig.stats().link_groups.iter().map(|it| it.version).collect();
    versions.sort_unstable();
    assert_eq!(versions, [1, 2]);
}

/// Without an EID in common the connection stays TCP, and both sides read why.
#[test]
fn a_stranger_stays_tcp_and_is_told_why() {
    let rig = Rig::server(40, "[smc]\nversions = [2]\neids = [\"fleet-1\"]\n");
    let mut peer = Peer::new(connect(rig.gateway));
    let mut server = rig.accept();
    peer.say(&linux_proposal("OTHERS"));
    assert_eq!(declined(&mut peer), Diagnosis::NO_COMMON_EID);
    assert_echo(&mut peer.socket, &mut server);
    assert_eq!(rig.stats().fallbacks[0].code, Diagnosis::NO_COMMON_EID.0);
}

/// A Linux client that shares an EID gets an Accept, though it has not said its name; and the
/// limits it named hold. Two queue pairs for it would be one too many.
#[test]
fn a_linux_client_gets_an_accept() {
    let rig = Rig::server(41, "[smc]\nversions = [2]\neids = [\"fleet-1\"]\n");
    let mut peer = Peer::new(connect(rig.gateway));
    let _server = rig.accept();
    peer.say(&linux_proposal("FLEET-1"));
    let Some(Frame::AcceptV2(OfferV2 { offer, eid, first_contact, .. })) = peer.hear() else {
        panic!("an Accept of version 2")
    };
    assert_eq!((offer.first_contact, eid.to_string().as_str()), (true, "FLEET-1"));
    assert_ne!(offer.peer_id, PeerId::default());
    let terms = first_contact.unwrap().capabilities.unwrap();
    assert_eq!((terms.max_connections, terms.max_links), (255, 2));
    // Another one waits for the first contact, as it belongs to the same host.
    let mut second = Peer::new(connect(rig.gateway));
    let _second_server = rig.accept();
    second.say(&linux_proposal("FLEET-1"));
    super::rig::wait_until("it waits", || rig.stats().active.connecting == 2);
    assert_eq!(rig.stats().link_groups.len(), 1);
}

/// A client that knows version 1 only is declined in version 1: it would not understand the other.
#[test]
fn a_client_of_version_1_is_declined_in_its_own_words() {
    let rig = Rig::server(42, "[smc]\nversions = [2]\n");
    let mut peer = Peer::new(connect(rig.gateway));
    let mut server = rig.accept();
    peer.say(&peer.proposal());
    let Some(Frame::Decline(decline)) = peer.hear() else { panic!("a Decline of version 1") };
    assert_eq!(decline.diagnosis, Diagnosis::VERSION_MISMATCH);
    assert_echo(&mut peer.socket, &mut server);
}

/// An RNIC that the kernel knows no way to: the loopback device has IPv4 here.
const UNREACHABLE: Gid = Gid([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7]);

/// A server whose RNIC no route leads to is declined for that reason, whether it believes that a
/// router is between or not; the operator would look for a broken queue pair otherwise. The
/// connection is TCP at once.
#[test]
fn a_server_without_a_route_is_declined_by_name() {
    for (number, direct) in [(43, true), (44, false)] {
        let rig = Rig::client(number, "[smc]\nversions = [2]\n");
        let mut application = connect(rig.gateway);
        let mut peer = Peer::new(rig.accept());
        let Some(Frame::ProposalV2(_)) = peer.hear() else { panic!("a Proposal of version 2") };
        let extension = FirstContact {
            direct,
            os: OsType::LINUX,
            release: 0,
            host_name: HostName::new("far"),
            capabilities: None,
        };
        peer.say(&Frame::AcceptV2(OfferV2 {
            offer: peer.offer(UNREACHABLE),
            eid: Eid::SMCGATE,
            first_contact: Some(extension),
            gids: Gids::new(),
        }));
        assert_eq!(declined(&mut peer), Diagnosis::NO_ROUTE);
        assert_echo(&mut application, &mut peer.socket);
        assert_eq!(rig.stats().fallbacks[0].code, Diagnosis::NO_ROUTE.0);
    }
}

/// The same where the gateway is the server: no Accept names a queue pair that cannot be used.
#[test]
fn a_client_without_a_route_is_declined_by_name() {
    let rig = Rig::server(45, "[smc]\nversions = [2]\n");
    let mut peer = Peer::new(connect(rig.gateway));
    let mut server = rig.accept();
    peer.say(&linux_proposal_from(UNREACHABLE, "SMCGATE"));
    assert_eq!(declined(&mut peer), Diagnosis::NO_ROUTE);
    assert_echo(&mut peer.socket, &mut server);
    assert_eq!(rig.stats().link_groups.len(), 0);
}

/// A peer may invent a reason for each Decline; counting each would take memory, and a time series
/// of whoever scrapes. Reasons that have names are counted all the same.
#[test]
fn invented_reasons_are_counted_together() {
    let rig = Rig::server(47, "");
    let named = [Diagnosis::IPSEC];
    for diagnosis in (0..60).map(|code| Diagnosis(0xdead_0000 + code)).chain(named) {
        let mut peer = Peer::new(connect(rig.gateway));
        let mut server = rig.accept();
        peer.say(&Frame::Decline(Decline { out_of_sync: false, peer_id: US, diagnosis }));
        assert_echo(&mut peer.socket, &mut server);
    }
    let rows = rig.stats().fallbacks;
    let count = |code: Diagnosis| rows.iter().find(|row| row.code == code.0).map(|row| row.count);
    assert_eq!(count(Diagnosis(0xdead_0000)), Some(1));
    assert_eq!(count(Diagnosis::IPSEC), Some(1));
    let others = u64::try_from(60 - UNNAMED_REASONS_MAX).unwrap();
    assert_eq!(count(Diagnosis::PEER_DECLINED), Some(others));
    assert_eq!(rows.len(), UNNAMED_REASONS_MAX + 2);
}

/// Why the gateway declines, which it does next.
fn declined(peer: &mut Peer) -> Diagnosis {
    match peer.hear() {
        Some(Frame::DeclineV2(DeclineV2 { decline, .. })) => decline.diagnosis,
        other => panic!("a Decline of version 2, not {other:?}"),
    }
}
