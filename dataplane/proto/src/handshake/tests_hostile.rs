//! A peer that says anything in any order, in either version.

use std::vec::Vec;

use super::tests::{CLIENT, SERVER, T0, client_actions, offer, proposal, server_actions};
use super::tests_v2::{accept, policy, proposal_v2};
use super::*;
use crate::vocabulary::PeerId;
use crate::wire::clc::v2::{Capabilities, Eid, Gids, OsType};
use crate::wire::clc::{Decline, DeclineV2, Frame, Framer, OfferV2, Proposal};

/// What a peer may say; `peer` is how it calls itself.
fn frames(peer: PeerId) -> Vec<Frame> {
    let eid = Eid::new("A").unwrap();
    let v2 =
        |first_contact| OfferV2 { offer: offer(peer, first_contact), eid, ..accept(first_contact) };
    let with_limits = |max_connections, max_links| {
        let mut extension = v2(true).first_contact.unwrap();
        let capabilities = extension.capabilities.unwrap();
        extension.capabilities = Some(Capabilities { max_connections, max_links, ..capabilities });
        OfferV2 { first_contact: Some(extension), ..v2(true) }
    };
    let decline = Decline { out_of_sync: true, peer_id: peer, diagnosis: Diagnosis::OUT_OF_MEMORY };
    let mut frames = Vec::from([
        Frame::Proposal(Proposal { peer_id: peer, ..proposal() }),
        Frame::ProposalV2(proposal_v2(true, None)),
        Frame::ProposalV2(proposal_v2(true, Some(policy(&["A"])))),
        Frame::ProposalV2(proposal_v2(false, Some(policy(&["A"])))),
        Frame::Decline(decline),
        Frame::DeclineV2(DeclineV2 { decline, os: OsType::ZOS, information: [7; 4] }),
    ]);
    for first_contact in [true, false] {
        let (v1, v2) = (offer(peer, first_contact), v2(first_contact));
        let stranger = OfferV2 { eid: Eid::new("B").unwrap(), ..v2 };
        frames.extend([Frame::Accept(v1), Frame::Confirm(v1)]);
        for message in [v2, stranger] {
            frames.extend([Frame::AcceptV2(message), Frame::ConfirmV2(message)]);
        }
    }
    for message in [with_limits(255, 8), with_limits(0, 0)] {
        frames.extend([Frame::AcceptV2(message), Frame::ConfirmV2(message)]);
    }
    frames.into_iter().map(travelled).collect()
}

/// The message as it comes out of the stream.
fn travelled(frame: Frame) -> Frame {
    let mut framer = Framer::new();
    let encoded = frame.encode();
    assert_eq!(framer.feed(encoded.as_bytes()), encoded.as_bytes().len());
    let decoded = framer.next_frame().unwrap().unwrap();
    assert_eq!(decoded.encode(), encoded);
    decoded
}

/// How a rendezvous ended, and in which version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    V1,
    V2,
    Tcp,
}

impl End {
    fn of(agreement: Option<&Agreement>) -> Self {
        match agreement.expect("there is one") {
            Agreement::V1 => Self::V1,
            Agreement::V2(_) => Self::V2,
        }
    }
}

/// A client that does what its machine wants, and fails to where `luck` has a bit.
fn drive_client(client: &mut Client, luck: u8) -> Option<End> {
    let mut end = None;
    loop {
        let actions = client_actions(client);
        if actions.is_empty() {
            return end;
        }
        assert_eq!(end, None, "{actions:?} behind the end");
        for action in actions {
            match action {
                ClientAction::Send(frame) => drop(travelled(frame)),
                ClientAction::OpenLink(_) | ClientAction::JoinLink(_) if luck & 1 != 0 => {
                    client.refuse(Diagnosis::NO_ROUTE, false);
                }
                ClientAction::OpenLink(theirs) | ClientAction::JoinLink(theirs) => {
                    let first_contact = theirs.first_contact;
                    match client.agreement().unwrap() {
                        Agreement::V1 => client.provide(offer(CLIENT, first_contact)),
                        Agreement::V2(_) => {
                            client.provide_v2(offer(CLIENT, first_contact), Gids::new());
                        }
                    }
                    if first_contact && luck & 2 != 0 {
                        client.link_failed(false).unwrap_err();
                    } else if first_contact && luck & 4 != 0 {
                        client.link_confirmed();
                    }
                }
                ClientAction::Done => end = Some(End::of(client.agreement())),
                ClientAction::FallBack => end = Some(End::Tcp),
            }
        }
    }
}

/// The same for a server.
fn drive_server(server: &mut Server, luck: u8) -> Option<End> {
    let mut end = None;
    loop {
        let actions = server_actions(server);
        if actions.is_empty() {
            return end;
        }
        assert_eq!(end, None, "{actions:?} behind the end");
        for action in actions {
            match action {
                ServerAction::Send(frame) => drop(travelled(frame)),
                ServerAction::Provide(_) if luck & 1 != 0 => server.refuse(Diagnosis::NO_ROUTE),
                ServerAction::Provide(_) => match (server.objection(), server.agreement()) {
                    (Some(diagnosis), _) => server.refuse(diagnosis),
                    (None, Some(Agreement::V2(_))) => {
                        server.provide_v2(T0, offer(SERVER, luck & 8 == 0), true);
                    }
                    (None, _) => server.provide(T0, offer(SERVER, luck & 8 == 0)),
                },
                ServerAction::ConnectLink(_) if luck & 2 != 0 => {
                    server.link_failed(false).unwrap_err();
                }
                ServerAction::ConnectLink(_) if luck & 4 != 0 => server.link_confirmed(),
                ServerAction::ConnectLink(_) => {}
                ServerAction::JoinLink(theirs) => assert_eq!(theirs.peer_id, CLIENT),
                ServerAction::Done => end = Some(End::of(server.agreement())),
                ServerAction::FallBack => end = Some(End::Tcp),
            }
        }
    }
}

/// Says three of `frames` in every order, until the rendezvous is over. Returns how many ended in
/// each version, and how many did not end in SMC-R.
fn everything(frames: &[Frame], mut tell: impl FnMut(&[Frame]) -> Option<End>) -> [usize; 3] {
    let mut ends = [0; 3];
    for first in frames {
        for second in frames {
            for third in frames {
                let kind = match tell(&[*first, *second, *third]) {
                    Some(End::V1) => 0,
                    Some(End::V2) => 1,
                    Some(End::Tcp) | None => 2,
                };
                ends[kind] += 1;
            }
        }
    }
    ends
}

/// Whatever a server says, a gateway neither stops nor speaks another version than both have
/// agreed on, nor one that it did not offer.
#[test]
fn a_client_survives_every_order_of_messages() {
    let offers = [(true, false), (false, true), (true, true)];
    for ((v1, v2), luck) in offers.into_iter().flat_map(|offer| (0..8).map(move |it| (offer, it))) {
        let [in_v1, in_v2, _] = everything(&frames(SERVER), |said| {
            let theirs = Proposal { offers_smc_r_v1: v1, ..proposal() };
            let mut client = match v2 {
                true => Client::with_v2(T0, theirs, policy(&["A"]), offer(CLIENT, true).gid),
                false => Client::new(T0, theirs),
            };
            assert_eq!(drive_client(&mut client, luck), None);
            said.iter().find_map(|frame| match client.handle_frame(*frame) {
                Ok(()) => drive_client(&mut client, luck),
                Err(_) => {
                    assert_eq!(client_actions(&mut client), [], "it is over");
                    Some(End::Tcp)
                }
            })
        });
        let lucky = luck & 1 == 0;
        assert_eq!((in_v1 > 0, in_v2 > 0), (v1 && lucky, v2 && lucky), "{v1} {v2} {luck}");
    }
}

/// The same for a server.
#[test]
fn a_server_survives_every_order_of_messages() {
    let offers = [(true, false), (false, true), (true, true)];
    for ((v1, v2), luck) in offers.into_iter().flat_map(|offer| (0..16).map(move |it| (offer, it)))
    {
        let ours = Policy { v1, v2: v2.then(|| policy(&["A"])) };
        let [in_v1, in_v2, _] = everything(&frames(CLIENT), |said| {
            let mut server = Server::with_policy(T0, SERVER, ours);
            said.iter().find_map(|frame| match server.handle_frame(*frame) {
                Ok(()) => drive_server(&mut server, luck),
                Err(_) => {
                    assert_eq!(server_actions(&mut server), [], "it is over");
                    Some(End::Tcp)
                }
            })
        });
        // A first contact ends when its link is confirmed; a later one with the Confirm.
        let lucky = luck & 1 == 0 && (luck & 8 != 0 || luck & 6 == 4);
        assert_eq!((in_v1 > 0, in_v2 > 0), (v1 && lucky, v2 && lucky), "{v1} {v2} {luck}");
    }
}
