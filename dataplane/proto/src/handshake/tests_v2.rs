//! Which version is spoken: every combination of what two sides offer.

use super::tests::{CLIENT, SERVER, T0, client_actions, offer, proposal, server_actions};
use super::*;
use crate::vocabulary::{Gid, PeerId};
use crate::wire::clc::v2::{
    Capabilities, Eid, FirstContact, Gids, HostName, OsType, VendorOptions,
};
use crate::wire::clc::{Decline, DeclineV2, Frame, Offer, OfferV2, Proposal, ProposalV2};

/// The client's RoCEv2 port.
const GID: Gid = Gid::from_ipv4([10, 9, 0, 64]);

pub(super) fn policy(eids: &[&str]) -> PolicyV2 {
    let configured: std::vec::Vec<Eid> = eids.iter().map(|name| Eid::new(name).unwrap()).collect();
    PolicyV2 {
        eids: Eid::with_ours(&configured).unwrap(),
        release: 1,
        max_connections: 255,
        max_links: 8,
        host_name: HostName::new("here"),
        many_streams: true,
        dense_packets: true,
    }
}

pub(super) fn proposal_v2(offers_smc_r_v1: bool, v2: Option<PolicyV2>) -> ProposalV2 {
    let v1 = Proposal { offers_smc_r_v1, ..proposal() };
    ProposalV2 { v1, v2: v2.map(|policy| policy.extension(GID)) }
}

/// What a server with this policy makes of a Proposal.
fn answer(policy: Policy, frame: Frame) -> (Server, Result<Agreement, Diagnosis>) {
    let mut server = Server::with_policy(T0, SERVER, policy);
    server.handle_frame(frame).unwrap();
    let actions = server_actions(&mut server);
    assert!(matches!(actions[..], [ServerAction::Provide(_)]), "{actions:?}");
    let answer = match (server.agreement(), server.objection()) {
        (Some(agreement), None) => Ok(*agreement),
        (None, Some(diagnosis)) => Err(diagnosis),
        both => panic!("{both:?}"),
    };
    (server, answer)
}

fn agreed_v2(answer: Result<Agreement, Diagnosis>) -> AgreementV2 {
    let Ok(Agreement::V2(agreement)) = answer else { panic!("{answer:?}") };
    agreement
}

/// A client that has offered version 2, and version 1 as `v1` says.
fn client(v1: bool) -> Client {
    let v1 = Proposal { offers_smc_r_v1: v1, ..proposal() };
    let mut client = Client::with_v2(T0, v1, policy(&["A"]), GID);
    let expected = ProposalV2 { v1, v2: Some(policy(&["A"]).extension(GID)) };
    assert_eq!(client_actions(&mut client), [ClientAction::Send(Frame::ProposalV2(expected))]);
    assert_eq!(client.agreement(), None);
    client
}

/// An Accept of version 2 and release 1.
pub(super) fn accept(first_contact: bool) -> OfferV2 {
    let capabilities =
        Capabilities { max_connections: 100, max_links: 2, ..Capabilities::default() };
    let extension = FirstContact {
        direct: true,
        os: OsType::LINUX,
        release: 1,
        host_name: HostName::new("there"),
        capabilities: Some(capabilities),
    };
    OfferV2 {
        offer: offer(SERVER, first_contact),
        eid: Eid::SMCGATE,
        first_contact: first_contact.then_some(extension),
        gids: Gids::new(),
    }
}

/// Two gateways, no configuration: both know the other's host, and agree on the smaller numbers.
#[test]
fn first_contact_of_version_2() {
    let ours = PolicyV2 { max_connections: 64, max_links: 2, ..policy(&[]) };
    let mut client = client(true);
    let mut server = Server::with_policy(T0, SERVER, Policy { v1: true, v2: Some(ours) });
    server.handle_frame(Frame::ProposalV2(proposal_v2(true, Some(policy(&["A"]))))).unwrap();
    let expected = Proposal { gid: GID, ..proposal() };
    assert_eq!(server_actions(&mut server), [ServerAction::Provide(expected)], "its RoCEv2 port");

    server.provide_v2(T0, offer(SERVER, true), true);
    let [ServerAction::Send(accept)] = server_actions(&mut server)[..] else { panic!() };
    client.handle_frame(accept).unwrap();
    assert_eq!(client_actions(&mut client), [ClientAction::OpenLink(offer(SERVER, true))]);
    let Some(Agreement::V2(agreement)) = client.agreement() else { panic!() };
    assert_eq!((agreement.eid, agreement.release), (Eid::SMCGATE, 1));
    assert_eq!((agreement.max_connections, agreement.max_links), (64, 2));
    assert_eq!(agreement.peer.unwrap().host_name, HostName::new("here"));

    let gids = Gids::from_items([GID]).unwrap();
    client.provide_v2(Offer { gid: GID, ..offer(CLIENT, false) }, gids);
    let [ClientAction::Send(confirm)] = client_actions(&mut client)[..] else { panic!() };
    server.handle_frame(confirm).unwrap();
    let connect = ServerAction::ConnectLink(Offer { gid: GID, ..offer(CLIENT, true) });
    assert_eq!(server_actions(&mut server), [connect]);
    let Some(Agreement::V2(agreement)) = server.agreement() else { panic!() };
    assert_eq!((agreement.gids, agreement.peer.unwrap().os), (gids, OsType::LINUX));
    server.link_confirmed();
    client.link_confirmed();
    assert_eq!(server_actions(&mut server), [ServerAction::Done]);
    assert_eq!(client_actions(&mut client), [ClientAction::Done]);
}

/// What only our gateways know must not be done unless both have said so: neither with an older
/// one, nor with Linux, nor with a vendor whose options look like ours in part.
#[test]
fn what_only_our_gateways_know_is_agreed_on_by_both_or_not_at_all() {
    let says = |side: &Agreement| match side {
        Agreement::V2(it) => (it.many_streams, it.dense_packets),
        Agreement::V1 => panic!("version 2 was proposed"),
    };
    for bits in 0..16 {
        let [ours, theirs] = [bits & 3, bits >> 2].map(|bits| (bits & 1 != 0, bits & 2 != 0));
        let gids = Gids::from_items([GID]).unwrap();
        let policies = [ours, theirs].map(|(many_streams, dense_packets)| PolicyV2 {
            many_streams,
            dense_packets,
            ..policy(&[])
        });
        let v1 = Proposal { offers_smc_r_v1: true, ..proposal() };
        let mut client = Client::with_v2(T0, v1, policies[0], GID);
        let mut server =
            Server::with_policy(T0, SERVER, Policy { v1: true, v2: Some(policies[1]) });
        let [ClientAction::Send(proposal)] = client_actions(&mut client)[..] else { panic!() };
        server.handle_frame(proposal).unwrap();
        server_actions(&mut server);
        server.provide_v2(T0, offer(SERVER, true), true);
        let [ServerAction::Send(accept)] = server_actions(&mut server)[..] else { panic!() };
        client.handle_frame(accept).unwrap();
        client_actions(&mut client);
        client.provide_v2(Offer { gid: GID, ..offer(CLIENT, false) }, gids);
        let [ClientAction::Send(confirm)] = client_actions(&mut client)[..] else { panic!() };
        server.handle_frame(confirm).unwrap();
        let both = (ours.0 && theirs.0, ours.1 && theirs.1);
        assert_eq!(says(client.agreement().unwrap()), both, "{ours:?} {theirs:?}");
        assert_eq!(says(server.agreement().unwrap()), both, "{ours:?} {theirs:?}");
    }
    for (options, expected) in [
        (0, (false, false)),
        (3, (false, false)),
        (0x5347_0001, (true, false)),
        (0x5347_0002, (false, true)),
        (0x5347_8003, (true, true)),
    ] {
        let options = VendorOptions(options);
        let contain = [VendorOptions::MANY_STREAMS, VendorOptions::DENSE_PACKETS]
            .map(|one| options.contain(one));
        assert_eq!((contain[0], contain[1]), expected, "{options:?}");
    }
}

/// Later connections carry the EID, and no extension: Linux would take one for a first contact.
#[test]
fn subsequent_contact_of_version_2() {
    let mut client = client(false);
    client.handle_frame(Frame::AcceptV2(accept(false))).unwrap();
    assert_eq!(client_actions(&mut client), [ClientAction::JoinLink(offer(SERVER, false))]);
    client.provide_v2(offer(CLIENT, false), Gids::from_items([GID]).unwrap());
    let confirm = OfferV2 { offer: offer(CLIENT, false), ..accept(false) };
    let expected = [ClientAction::Send(Frame::ConfirmV2(confirm)), ClientAction::Done];
    assert_eq!(client_actions(&mut client), expected);
}

/// What the server chooses, for every pair of offers; the reason is what the operator of the other
/// side reads.
#[test]
fn the_server_chooses() {
    let both = Policy { v1: true, v2: Some(policy(&["X"])) };
    let only_v2 = Policy { v1: false, ..both };
    let stranger = {
        let mut stranger = policy(&[]);
        stranger.eids = crate::wire::clc::v2::Eids::from_items([Eid::new("Y").unwrap()]).unwrap();
        Some(stranger)
    };
    let mixed = |v1, v2| Frame::ProposalV2(proposal_v2(v1, v2));
    let friend = Some(policy(&["Z", "X"]));

    let v2 = agreed_v2(answer(both, mixed(true, friend)).1);
    assert_eq!(v2.eid, Eid::new("X").unwrap(), "the client's first that is ours");
    agreed_v2(answer(only_v2, mixed(false, friend)).1);
    for (policy, frame, expected) in [
        (both, mixed(true, stranger), Ok(Agreement::V1)),
        (both, mixed(false, stranger), Err(Diagnosis::NO_COMMON_EID)),
        (only_v2, mixed(true, stranger), Err(Diagnosis::NO_COMMON_EID)),
        (both, mixed(true, None), Ok(Agreement::V1)),
        (only_v2, mixed(true, None), Err(Diagnosis::VERSION_MISMATCH)),
        (both, mixed(false, None), Err(Diagnosis::MODE_MISMATCH)),
        (both, Frame::Proposal(proposal()), Ok(Agreement::V1)),
        (only_v2, Frame::Proposal(proposal()), Err(Diagnosis::VERSION_MISMATCH)),
        (Policy::V1, mixed(true, friend), Ok(Agreement::V1)),
        (Policy::V1, mixed(false, friend), Err(Diagnosis::VERSION_MISMATCH)),
    ] {
        assert_eq!(answer(policy, frame).1, expected, "{policy:?} {frame:?}");
    }
}

/// An old kernel has no numbers to agree on; absurd ones are declined before a link is built.
#[test]
fn releases_and_limits() {
    let both = Policy { v1: false, v2: Some(policy(&[])) };
    let with = |change: &dyn Fn(&mut PolicyV2)| {
        let mut theirs = policy(&[]);
        change(&mut theirs);
        answer(both, Frame::ProposalV2(proposal_v2(false, Some(theirs)))).1
    };
    let old = agreed_v2(with(&|theirs| {
        theirs.release = 0;
        theirs.max_connections = 0;
        theirs.max_links = 0;
    }));
    assert_eq!((old.release, old.max_connections, old.max_links), (0, 255, 8));
    assert_eq!(agreed_v2(with(&|theirs| theirs.release = 9)).release, 1, "newer than we");
    assert_eq!(agreed_v2(with(&|theirs| theirs.max_connections = 16)).max_connections, 16);
    assert_eq!(with(&|theirs| theirs.max_connections = 15), Err(Diagnosis::MAX_CONNECTIONS));
    assert_eq!(with(&|theirs| theirs.max_links = 0), Err(Diagnosis::MAX_LINKS));
}

/// A server that answers what was not asked is declined in its version, and TCP goes on.
#[test]
fn the_client_checks_the_answer() {
    let declined = |change: &dyn Fn(&mut OfferV2, &mut FirstContact)| {
        let mut message = accept(true);
        let mut extension = message.first_contact.unwrap();
        change(&mut message, &mut extension);
        message.first_contact = Some(extension);
        let mut client = client(false);
        let error = client.handle_frame(Frame::AcceptV2(message)).unwrap_err();
        let Verdict::FallBack(Some(diagnosis)) = error.verdict() else { panic!("{error:?}") };
        let decline = Decline { out_of_sync: false, peer_id: CLIENT, diagnosis };
        let frame = DeclineV2 { decline, os: OsType::LINUX, information: [0; 4] };
        assert_eq!(client.decline_frame(diagnosis), Frame::DeclineV2(frame));
        diagnosis
    };
    let limits = |extension: &mut FirstContact, max_connections, max_links| {
        extension.capabilities =
            Some(Capabilities { max_connections, max_links, ..Capabilities::default() });
    };
    assert_eq!(
        declined(&|message, _| message.eid = Eid::new("B").unwrap()),
        Diagnosis::NO_COMMON_EID
    );
    assert_eq!(declined(&|_, extension| extension.release = 2), Diagnosis::RELEASE);
    assert_eq!(declined(&|_, it| limits(it, 15, 2)), Diagnosis::MAX_CONNECTIONS);
    assert_eq!(declined(&|_, it| limits(it, 255, 0)), Diagnosis::MAX_LINKS);
    assert_eq!(declined(&|_, it| limits(it, 255, 9)), Diagnosis::MAX_LINKS);
}

/// An Accept of a version that was not offered: of version 1 it can be declined, as Linux does; of
/// version 2 nobody may send it who has not seen an offer.
#[test]
fn accepts_of_the_wrong_version() {
    let mut v2_only = client(false);
    let error = v2_only.handle_frame(Frame::Accept(offer(SERVER, true))).unwrap_err();
    assert_eq!(error.verdict(), Verdict::FallBack(Some(Diagnosis::MODE_MISMATCH)));
    let v1 = Decline { out_of_sync: false, peer_id: CLIENT, diagnosis: Diagnosis::MODE_MISMATCH };
    assert_eq!(v2_only.decline_frame(v1.diagnosis), Frame::Decline(v1));

    let mut v1_only = Client::new(T0, proposal());
    let error = v1_only.handle_frame(Frame::AcceptV2(accept(true))).unwrap_err();
    assert_eq!(error, Malformed::Version(2).into());
    assert_eq!(error.verdict(), Verdict::Close);

    let mut mixed = client(true);
    mixed.handle_frame(Frame::Accept(offer(SERVER, true))).unwrap();
    assert_eq!(mixed.agreement(), Some(&Agreement::V1));
    client_actions(&mut mixed);
    mixed.provide(offer(CLIENT, true));
    let confirm = Frame::Confirm(offer(CLIENT, true));
    assert_eq!(client_actions(&mut mixed), [ClientAction::Send(confirm)]);
}

/// A Linux server connects to the port that the Proposal named, and does not look at the one in the
/// Confirm: a link elsewhere would never come up, which costs its host three seconds.
#[test]
fn a_link_leads_to_the_port_of_the_proposal() {
    let mac = proposal().mac;
    for (frame, port) in [
        (Frame::Accept(offer(SERVER, true)), (proposal().gid, mac)),
        (Frame::AcceptV2(accept(true)), (GID, mac)),
    ] {
        let mut client = client(true);
        client.handle_frame(frame).unwrap();
        assert_eq!(client.port(), port);
    }
}

/// A server that shares memory with us accepts on a port that the one proposed does not reach.
#[test]
fn a_first_contact_moves_to_the_port_that_shares_memory() {
    let mut client = client(true);
    client.handle_frame(Frame::AcceptV2(accept(true))).unwrap();
    let ours = offer(CLIENT, true);
    client.move_to((ours.gid, ours.mac));
    assert_eq!(client.port(), (ours.gid, ours.mac));
    client.provide_v2(ours, Gids::new());
    let actions = client_actions(&mut client);
    let [.., ClientAction::Send(Frame::ConfirmV2(confirm))] = actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(confirm.offer.gid, ours.gid);
}

#[test]
#[should_panic(expected = "not the port proposed")]
fn a_link_from_elsewhere_is_our_bug() {
    let mut client = client(false);
    client.handle_frame(Frame::AcceptV2(accept(true))).unwrap();
    client.provide_v2(offer(CLIENT, true), Gids::new());
}

/// A server that has sent its Accept of version 2, and what a client would confirm.
fn accepting_server() -> (Server, OfferV2) {
    let both = Policy { v1: true, v2: Some(policy(&[])) };
    let mut theirs = proposal_v2(false, Some(policy(&[])));
    theirs.v1.peer_id = PeerId::default();
    let (mut server, _) = answer(both, Frame::ProposalV2(theirs));
    server.provide_v2(T0, offer(SERVER, true), true);
    let [ServerAction::Send(Frame::AcceptV2(sent))] = server_actions(&mut server)[..] else {
        panic!()
    };
    (server, OfferV2 { offer: offer(CLIENT, true), ..sent })
}

/// Linux repeats what was settled, and tells its peer ID only here. Who does not is declined.
#[test]
fn the_server_checks_the_confirm() {
    let outcome = |change: &dyn Fn(&mut OfferV2)| {
        let (mut server, mut confirm) = accepting_server();
        change(&mut confirm);
        let result = server.handle_frame(Frame::ConfirmV2(confirm));
        result.map_err(HandshakeError::verdict)
    };
    let with = |message: &mut OfferV2, release, capabilities| {
        let extension = message.first_contact.unwrap();
        message.first_contact = Some(FirstContact { release, capabilities, ..extension });
    };
    let limits = |max_connections, max_links| {
        Some(Capabilities { max_connections, max_links, ..Capabilities::default() })
    };
    let falls_back = |diagnosis| Err(Verdict::FallBack(Some(diagnosis)));
    assert_eq!(outcome(&|_| ()), Ok(()));
    assert_eq!(outcome(&|it| with(it, 0, None)), falls_back(Diagnosis::RELEASE));
    assert_eq!(outcome(&|it| with(it, 1, limits(254, 8))), falls_back(Diagnosis::MAX_CONNECTIONS));
    assert_eq!(outcome(&|it| with(it, 1, limits(255, 2))), falls_back(Diagnosis::MAX_LINKS));
    assert_eq!(outcome(&|it| it.eid = Eid::default()), Err(Verdict::Close));
    assert_eq!(outcome(&|it| it.offer.first_contact = false), Err(Verdict::Close));
    let (mut server, _) = accepting_server();
    let v1 = server.handle_frame(Frame::Confirm(offer(CLIENT, true)));
    assert_eq!(v1.map_err(HandshakeError::verdict), Err(Verdict::Close));
}

/// A client of version 2 hears a Decline of version 2, unless we speak version 1 only: then all is
/// as it was.
#[test]
fn declines_have_the_version_of_the_proposal() {
    let diagnosis = Diagnosis::OUT_OF_MEMORY;
    let v1 = Frame::Decline(Decline { out_of_sync: false, peer_id: SERVER, diagnosis });
    let v2 =
        |frame: Frame| matches!(frame, Frame::DeclineV2(it) if it.decline.diagnosis == diagnosis);
    let both = Policy { v1: true, v2: Some(policy(&[])) };
    let mixed = Frame::ProposalV2(proposal_v2(true, Some(policy(&[]))));
    assert!(v2(answer(both, mixed).0.decline_frame(diagnosis)));
    assert_eq!(answer(Policy::V1, mixed).0.decline_frame(diagnosis), v1);
    assert_eq!(answer(both, Frame::Proposal(proposal())).0.decline_frame(diagnosis), v1);
    let mut server = answer(both, mixed).0;
    let Frame::DeclineV2(decline) = server.decline_frame(diagnosis) else { panic!() };
    server.refuse(diagnosis);
    let expected = [ServerAction::Send(Frame::DeclineV2(decline)), ServerAction::FallBack];
    assert_eq!(server_actions(&mut server), expected);
    // And one that comes ends the rendezvous, whatever its version.
    let mut client = client(true);
    let error = client.handle_frame(Frame::DeclineV2(decline)).unwrap_err();
    assert_eq!(error, HandshakeError::Declined { diagnosis, out_of_sync: false });
}

/// A route that the peers see differently would lose every packet; they say so, and stay on TCP.
#[test]
fn paths_that_do_not_fit_are_declined() {
    let agreed = |direct| {
        let mut client = client(false);
        let mut message = accept(true);
        message.first_contact = message.first_contact.map(|it| FirstContact { direct, ..it });
        client.handle_frame(Frame::AcceptV2(message)).unwrap();
        client_actions(&mut client);
        let Some(Agreement::V2(agreement)) = client.agreement().copied() else { panic!() };
        client.provide_v2(Offer { gid: GID, ..offer(CLIENT, true) }, Gids::new());
        let [ClientAction::Send(Frame::ConfirmV2(confirm))] = client_actions(&mut client)[..]
        else {
            panic!()
        };
        assert_eq!(confirm.first_contact.unwrap().direct, direct, "the client repeats it");
        agreement
    };
    let router = Path::ViaGateway;
    assert_eq!(agreed(true).objection(None), Some(Diagnosis::NO_ROUTE));
    assert_eq!(agreed(true).objection(Some(Path::Direct)), None);
    assert_eq!(agreed(true).objection(Some(router)), None);
    assert_eq!(agreed(false).objection(None), Some(Diagnosis::NO_ROUTE));
    assert_eq!(agreed(false).objection(Some(Path::Direct)), Some(Diagnosis::INDIRECT_MISMATCH));
    assert_eq!(agreed(false).objection(Some(router)), None);
}

#[test]
#[should_panic(expected = "what was agreed")]
fn an_accept_of_the_version_that_was_not_agreed_is_our_bug() {
    let only_v2 = Policy { v1: false, v2: Some(policy(&[])) };
    let mut server = answer(only_v2, Frame::Proposal(proposal())).0;
    server.provide(T0, Offer { ..offer(SERVER, true) });
}
