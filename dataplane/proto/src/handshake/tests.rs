//! Client and server back to back, and everything that can go wrong between them.

use std::vec;
use std::vec::Vec;

use super::*;
use crate::limits::CLC_WAIT;
use crate::time::Instant;
use crate::vocabulary::{AlertToken, Gid, MacAddress, Mtu, PeerId, Psn, Qpn, Rkey, RmbeSize};
use crate::wire::clc::{Decline, Frame, Ipv4Subnet, Ipv6Prefix, Offer, Proposal};

pub(super) const T0: Instant = Instant(0);
pub(super) const SERVER: PeerId = PeerId([8; 8]);
pub(super) const CLIENT: PeerId = PeerId([64; 8]);

pub(super) fn proposal() -> Proposal {
    Proposal {
        peer_id: CLIENT,
        gid: Gid::from_ipv4([10, 0, 0, 64]),
        mac: MacAddress([2, 0, 0, 0, 0, 64]),
        subnet: Ipv4Subnet { network: [10, 0, 0, 0], prefix_bits: 24 },
        prefixes: [Ipv6Prefix::default(); 8],
        prefix_count: 0,
        offers_smc_r_v1: true,
    }
}

pub(super) fn offer(peer_id: PeerId, first_contact: bool) -> Offer {
    Offer {
        first_contact,
        peer_id,
        gid: Gid::from_ipv4([10, 0, 0, peer_id.0[0]]),
        mac: MacAddress([2, 0, 0, 0, 0, peer_id.0[0]]),
        qpn: Qpn(u32::from(peer_id.0[0])),
        rkey: Rkey(1),
        rmbe_index: 1,
        alert_token: AlertToken(7),
        rmbe_size: RmbeSize::KIB_64,
        mtu: Mtu::B1024,
        rmb_address: 0x1000,
        psn: Psn(0),
    }
}

fn decline(peer_id: PeerId, diagnosis: Diagnosis, out_of_sync: bool) -> Frame {
    Frame::Decline(Decline { out_of_sync, peer_id, diagnosis })
}

pub(super) fn client_actions(client: &mut Client) -> Vec<ClientAction> {
    core::iter::from_fn(|| client.poll_action()).collect()
}

pub(super) fn server_actions(server: &mut Server) -> Vec<ServerAction> {
    core::iter::from_fn(|| server.poll_action()).collect()
}

/// A client that has sent its Proposal.
fn client() -> Client {
    let mut client = Client::new(T0, proposal());
    let sent = [ClientAction::Send(Frame::Proposal(proposal()))];
    assert_eq!(client_actions(&mut client), sent);
    client
}

/// A client that has been asked to provide.
fn accepted_client(first_contact: bool) -> Client {
    let mut client = client();
    client.handle_frame(Frame::Accept(offer(SERVER, first_contact))).unwrap();
    client_actions(&mut client);
    client
}

/// A client of a first contact that has sent its Confirm.
fn committed_client() -> Client {
    let mut client = accepted_client(true);
    client.provide(offer(CLIENT, true));
    client_actions(&mut client);
    client
}

/// A server that has sent its Accept.
fn server(first_contact: bool) -> Server {
    let mut server = Server::new(T0, SERVER);
    server.handle_frame(Frame::Proposal(proposal())).unwrap();
    server.provide(T0, offer(SERVER, first_contact));
    server_actions(&mut server);
    server
}

/// A server of a first contact that has the Confirm.
fn connected_server() -> Server {
    let mut server = server(true);
    server.handle_frame(Frame::Confirm(offer(CLIENT, true))).unwrap();
    server_actions(&mut server);
    server
}

/// RFC 3.5.1: the first connection between two gateways.
// RFC 7609 3.2 #2: client proposes with id, subnet, RNIC
// RFC 7609 3.2 #3: server accepts with QP and RMB
// RFC 7609 3.2 #4: client confirms with QP and RMB
// RFC 7609 3.5.2.2 #2: first contact flag means new group
#[test]
fn first_contact() {
    let mut client = client();
    let mut server = Server::new(T0, SERVER);
    server.handle_frame(Frame::Proposal(proposal())).unwrap();
    assert_eq!(server_actions(&mut server), [ServerAction::Provide(proposal())]);

    server.provide(T0, offer(SERVER, true));
    let accept = Frame::Accept(offer(SERVER, true));
    assert_eq!(server_actions(&mut server), [ServerAction::Send(accept)]);
    client.handle_frame(accept).unwrap();
    assert_eq!(client_actions(&mut client), [ClientAction::OpenLink(offer(SERVER, true))]);

    client.provide(offer(CLIENT, false));
    let confirm = Frame::Confirm(offer(CLIENT, true));
    assert_eq!(client_actions(&mut client), [ClientAction::Send(confirm)], "F is set for us");
    server.handle_frame(confirm).unwrap();
    assert_eq!(server_actions(&mut server), [ServerAction::ConnectLink(offer(CLIENT, true))]);

    assert_eq!((client.poll_timeout(), server.poll_timeout()), (None, None));
    server.link_confirmed();
    client.link_confirmed();
    assert_eq!(server_actions(&mut server), [ServerAction::Done]);
    assert_eq!(client_actions(&mut client), [ClientAction::Done]);
}

/// RFC 3.5.2: every later connection is done with three messages.
// RFC 7609 3.5.2.2 #7: no link verification on later contact
// RFC 7609 3.5.2.4 #2: client confirms before first data
// RFC 7609 3.5.2.4 #3: client sends data right after Confirm
// RFC 7609 C.3 #4: later contact commits with last CLC
#[test]
fn subsequent_contact() {
    let (mut client, mut server) = (client(), server(false));
    client.handle_frame(Frame::Accept(offer(SERVER, false))).unwrap();
    assert_eq!(client_actions(&mut client), [ClientAction::JoinLink(offer(SERVER, false))]);
    client.provide(offer(CLIENT, false));
    let confirm = Frame::Confirm(offer(CLIENT, false));
    let done = [ClientAction::Send(confirm), ClientAction::Done];
    assert_eq!(client_actions(&mut client), done);
    server.handle_frame(confirm).unwrap();
    let done = [ServerAction::JoinLink(offer(CLIENT, false)), ServerAction::Done];
    assert_eq!(server_actions(&mut server), done);
    assert_eq!((client.poll_timeout(), server.poll_timeout()), (None, None));
}

/// Old Linux clients leave F clear in the Confirm of a first contact.
// RFC 7609 A.2.4 #2: repeat first contact flag in Confirm
#[test]
fn the_first_contact_bit_of_a_confirm_means_nothing() {
    let mut server = server(true);
    server.handle_frame(Frame::Confirm(offer(CLIENT, false))).unwrap();
    assert_eq!(server_actions(&mut server), [ServerAction::ConnectLink(offer(CLIENT, false))]);
}

/// RFC C.1: a server without resources says so, and the connection is TCP on both sides.
// RFC 7609 3.2 #5: either side may decline to TCP
// RFC 7609 3.5.1.2 #12: server declines to TCP at once
// RFC 7609 3.5.1.6.4 #2: decline in place of CLC message
// RFC 7609 C.1 #1: decline in place of expected CLC
// RFC 7609 C.1 #3: never answer a Decline
#[test]
fn a_server_that_refuses() {
    let mut server = Server::new(T0, SERVER);
    server.handle_frame(Frame::Proposal(proposal())).unwrap();
    server_actions(&mut server);
    server.refuse(Diagnosis::OUT_OF_MEMORY);
    let frame = decline(SERVER, Diagnosis::OUT_OF_MEMORY, false);
    assert_eq!(server_actions(&mut server), [ServerAction::Send(frame), ServerAction::FallBack]);
    assert_eq!(server.poll_timeout(), None);

    let mut client = client();
    let error = client.handle_frame(frame).unwrap_err();
    let diagnosis = Diagnosis::OUT_OF_MEMORY;
    assert_eq!(error, HandshakeError::Declined { diagnosis, out_of_sync: false });
    assert_eq!(error.verdict(), Verdict::FallBack(None), "a Decline is not answered");
    assert_eq!(client.poll_timeout(), None);
}

/// A client whose RNIC is gone has offered SMC-R in its SYN already, and says Decline in place of
/// the Proposal, as Linux does. Its application must keep the connection.
#[test]
fn a_client_that_has_nothing_to_propose() {
    let diagnosis = Diagnosis::NO_SMC_R_DEVICE;
    let mut server = Server::new(T0, SERVER);
    let error = server.handle_frame(decline(CLIENT, diagnosis, false)).unwrap_err();
    assert_eq!(error, HandshakeError::Declined { diagnosis, out_of_sync: false });
    assert_eq!(error.verdict(), Verdict::FallBack(None));
    assert_eq!((server.poll_action(), server.poll_timeout()), (None, None));
}

/// RFC C.4: the server believes in a link group that died. The client says so with S, and the
/// server must forget the group.
// RFC 7609 A.2.5 #2: S means out of sync
// RFC 7609 C.4 #1: S only without a known group
// RFC 7609 C.4 #2: go on as TCP after S
#[test]
fn a_client_that_knows_no_such_link_group() {
    let mut client = accepted_client(false);
    client.refuse(Diagnosis::OUT_OF_SYNC, true);
    let frame = decline(CLIENT, Diagnosis::OUT_OF_SYNC, true);
    assert_eq!(client_actions(&mut client), [ClientAction::Send(frame), ClientAction::FallBack]);

    let error = server(false).handle_frame(frame).unwrap_err();
    let diagnosis = Diagnosis::OUT_OF_SYNC;
    assert_eq!(error, HandshakeError::Declined { diagnosis, out_of_sync: true });
    assert_eq!(error.verdict(), Verdict::FallBack(None));
}

/// RFC C.5: a TCP connection that cannot carry CLC messages in time would not carry data either.
// RFC 7609 C.5 #1: time limit for CLC
// RFC 7609 C.5 #2: end TCP when CLC times out
#[test]
fn clc_timeouts_close_the_connection() {
    let early = T0 + CLC_WAIT / 2;
    let late = T0 + CLC_WAIT;
    let mut client = client();
    assert_eq!(client.poll_timeout(), Some(late));
    assert_eq!(client.handle_timeout(early), Ok(()));
    assert_eq!(client.handle_timeout(late), Err(HandshakeError::TimedOut));
    assert_eq!(client.poll_timeout(), None);
    for mut server in [Server::new(T0, SERVER), server(true), server(false)] {
        assert_eq!(server.poll_timeout(), Some(late));
        assert_eq!(server.handle_timeout(early), Ok(()));
        assert_eq!(server.handle_timeout(late), Err(HandshakeError::TimedOut));
        assert_eq!(server.poll_timeout(), None);
    }
    assert_eq!(HandshakeError::TimedOut.verdict(), Verdict::Close);
}

/// RFC C.2: the peer may find out first that the link will not come up.
// RFC 7609 3.5.1.6.4 #3: decline during CONFIRM LINK before data
#[test]
fn a_decline_during_the_confirmation_of_the_link() {
    let diagnosis = Diagnosis::QUEUE_PAIR_NOT_READY;
    let declined = Err(HandshakeError::Declined { diagnosis, out_of_sync: false });
    let frame = decline(SERVER, diagnosis, false);
    assert_eq!(committed_client().handle_frame(frame), declined);
    assert_eq!(accepted_client(true).handle_frame(frame), declined);
    assert_eq!(connected_server().handle_frame(frame), declined);
}

/// Who finds out declines at once: the application keeps its connection, and a peer that waits for
/// our word on the link listens for a Decline no longer than a second or two.
// RFC 7609 C.2 #1: may decline until CONFIRM LINK is sent
// RFC 7609 C.7 #6: client declines without first CONFIRM LINK
// RFC 7609 C.7 #7: decline if CONFIRM LINK reply fails
// RFC 7609 C.7 #8: server declines without CONFIRM LINK reply
// RFC 7609 C.7.1 #2: decline when first CONFIRM LINK unanswered
#[test]
fn a_failed_link_falls_back() {
    let failed = HandshakeError::LinkFailed { committed: false };
    let (mut client, mut server) = (committed_client(), connected_server());
    assert_eq!(client.link_failed(false), Err(failed));
    assert_eq!(server.link_failed(false), Err(failed));
    assert_eq!((client.link_failed(false), server.link_failed(false)), (Ok(()), Ok(())), "once");
    assert_eq!((client.poll_timeout(), server.poll_timeout()), (None, None));

    let code = Diagnosis::CONFIRM_LINK_TIMED_OUT;
    assert_eq!(failed.verdict(), Verdict::FallBack(Some(code)));
    assert_eq!(client.decline_frame(code), decline(CLIENT, code, false));
    assert_eq!(server.decline_frame(code), decline(SERVER, code, false));
}

/// RFC C.3: beyond the point of no return the peer may take our Decline for data.
// RFC 7609 C.3 #3: reset beyond point of no return
#[test]
fn a_link_that_fails_late_closes_the_connection() {
    let failed = HandshakeError::LinkFailed { committed: true };
    assert_eq!(committed_client().link_failed(true), Err(failed));
    assert_eq!(connected_server().link_failed(true), Err(failed));
    assert_eq!(failed.verdict(), Verdict::Close);
}

/// A link confirmed after we gave it up must not hand the connection to a poller and to the TCP
/// relay at the same time.
#[test]
fn a_link_that_comes_too_late_changes_nothing() {
    let (mut client, mut server) = (committed_client(), connected_server());
    client.link_failed(false).unwrap_err();
    server.link_failed(false).unwrap_err();
    client.link_confirmed();
    server.link_confirmed();
    assert_eq!((client_actions(&mut client), server_actions(&mut server)), (vec![], vec![]));
}

/// RFC C.6: whatever is not expected may be data of the application; nobody can tell any more.
// RFC 7609 C.6 #4: protocol error ends TCP
#[test]
fn messages_out_of_turn_close_the_connection() {
    let unexpected = HandshakeError::Peer(PeerMisbehaved::UnexpectedMessage);
    assert_eq!(unexpected.verdict(), Verdict::Close);
    let accept = Frame::Accept(offer(SERVER, true));
    let confirm = Frame::Confirm(offer(CLIENT, true));
    let propose = Frame::Proposal(proposal());
    let declined = decline(CLIENT, Diagnosis::TIMED_OUT, false);

    for mut client in [client(), accepted_client(true), committed_client()] {
        for frame in [propose, confirm] {
            assert_eq!(client.clone().handle_frame(frame), Err(unexpected));
        }
        assert_eq!(client.handle_frame(propose), Err(unexpected));
        assert_eq!(client.handle_frame(accept), Err(unexpected), "it is over");
        assert_eq!((client.poll_action(), client.poll_timeout()), (None, None));
    }
    assert_eq!(committed_client().handle_frame(accept), Err(unexpected));

    for frame in [accept, confirm] {
        assert_eq!(Server::new(T0, SERVER).handle_frame(frame), Err(unexpected));
    }
    for server in [server(true), server(false), connected_server()] {
        for frame in [accept, propose] {
            assert_eq!(server.clone().handle_frame(frame), Err(unexpected));
        }
    }
    let mut server = server(false);
    server.handle_frame(confirm).unwrap();
    assert_eq!(server.handle_frame(declined), Err(unexpected), "a Decline cannot chase");
}

/// Somebody who injects a Confirm into another client's connection gets nothing.
#[test]
fn proposal_and_confirm_come_from_one_peer() {
    let error = server(true).handle_frame(Frame::Confirm(offer(SERVER, true))).unwrap_err();
    assert_eq!(error, HandshakeError::Peer(PeerMisbehaved::IdentityChanged));
}

/// RFC C.6: an MTU of the future is declined, not punished. Without a new queue pair it does not
/// even matter.
// RFC 7609 A.2.3 #12: read Accept's MTU on first contact
// RFC 7609 A.2.4 #4: read Confirm's MTU on first contact
// RFC 7609 C.6 #5: decline reserved enumerated values
#[test]
fn reserved_mtus_are_declined() {
    for first_contact in [true, false] {
        let expected = if first_contact { Err(HandshakeError::Unsupported) } else { Ok(()) };
        let accept = Offer { mtu: Mtu(6), ..offer(SERVER, first_contact) };
        assert_eq!(client().handle_frame(Frame::Accept(accept)), expected);
        let confirm = Offer { mtu: Mtu(0), ..offer(CLIENT, first_contact) };
        assert_eq!(server(first_contact).handle_frame(Frame::Confirm(confirm)), expected);
    }
    let verdict = Verdict::FallBack(Some(Diagnosis::CONFIGURATION));
    assert_eq!(HandshakeError::Unsupported.verdict(), verdict);
}

/// What the framer cannot read is an offence like any other.
#[test]
fn malformed_messages_close_the_connection() {
    assert_eq!(HandshakeError::from(Malformed::Trailer).verdict(), Verdict::Close);
}

#[test]
#[should_panic(expected = "nobody asked")]
fn providing_unasked_is_our_bug() {
    client().provide(offer(CLIENT, true));
}

// RFC 7609 C.1 #4: no Decline after unanswered CLC
// RFC 7609 C.1 #6: existing group: no Decline after Confirm
#[test]
#[should_panic(expected = "replaces the Confirm")]
fn a_decline_that_chases_a_proposal_is_our_bug() {
    client().refuse(Diagnosis::OUT_OF_MEMORY, false);
}

// RFC 7609 C.1 #5: existing group: no Decline after Accept
#[test]
#[should_panic(expected = "replaces the Accept")]
fn a_decline_that_chases_an_accept_is_our_bug() {
    server(false).refuse(Diagnosis::OUT_OF_MEMORY);
}
