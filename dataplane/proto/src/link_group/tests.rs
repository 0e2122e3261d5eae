//! Link groups back to back, and against what Linux peers send.

use std::vec;
use std::vec::Vec;

use super::*;
use crate::error::PeerMisbehaved;
use crate::limits::{
    ADD_LINK_WAIT, CLIENT_GOES_ON, CONFIRM_LINK_REPLY_WAIT, CONFIRM_LINK_WAIT, IDLE_GROUP_CLIENT,
    IDLE_GROUP_SERVER, LINK_EXCHANGE_WAIT, TEST_LINK_IDLE, TEST_LINK_REPLY_WAIT,
};
use crate::vocabulary::{Mtu, Psn, Qpn, Rkey};
use crate::wire::Malformed;
use crate::wire::llc::{
    AddLink, ConfirmLink, ConfirmRkey, DeleteLink, DeleteReason, DeleteRkey, LEN,
};

mod add;
mod collisions;
mod delete;
mod hostile;
mod hosts;
mod links;
mod linux;
mod openings;
mod owner;
mod recovery;
mod rkeys;
mod swarm;
mod version;

const T0: Instant = Instant(0);
const LINK: LinkNumber = LinkNumber(1);
const SECOND: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_secs(100_000);
const SECOND_LINK: LinkNumber = LinkNumber(2);

fn end(qpn: u32) -> QpAddress {
    let last = u8::try_from(qpn).unwrap();
    QpAddress {
        mac: MacAddress([2, 0, 0, 0, 0, last]),
        gid: Gid::from_ipv4([10, 0, 0, last]),
        qpn: Qpn(qpn),
        psn: Psn(qpn * 1000),
        mtu: Mtu::B1024,
    }
}

fn setup(ours: u32, theirs: u32) -> Setup {
    Setup {
        peer_id: PeerId([u8::try_from(theirs).unwrap(); 8]),
        version: Version::V1,
        ours: end(ours),
        theirs: end(theirs),
        user_id: LinkUserId(ours),
        eye_catcher: false,
        keepalive: Keepalive::default(),
        idle_wait: if ours < theirs { IDLE_GROUP_SERVER } else { IDLE_GROUP_CLIENT },
        max_links: 2,
        retry_link: RETRY,
        confirm_wait: None,
    }
}

impl LinkGroup {
    /// What the first RMB of the peer with this rkey on one link is called on another.
    fn peer_rmb(&self, on: LinkNumber, rkey: Rkey, to: LinkNumber) -> Option<(Rkey, u64)> {
        let (on, to) = (self.place_of(on)?, self.place_of(to)?);
        let token = self.peer_rmbs.rows.iter().find(|row| row.has(on, rkey))?.at(to)?;
        Some((token.rkey, token.address))
    }
}

/// Two groups, and what each of them demands beside sending.
struct Pair {
    now: Instant,
    server: LinkGroup,
    client: LinkGroup,
    server_told: Vec<Action>,
    client_told: Vec<Action>,
    /// Everything that was sent, in order.
    wire: Vec<(Role, Llc)>,
}

impl Pair {
    fn new() -> Self {
        let mut server = LinkGroup::new_server(T0, setup(8, 64), LINK);
        let client = LinkGroup::new_client(T0, setup(64, 8));
        assert_eq!(server.poll_timeout(), None, "nothing is under way");
        server.link_connected(T0, LINK);
        let (server_told, client_told, wire) = (Vec::new(), Vec::new(), Vec::new());
        Self { now: T0, server, client, server_told, client_told, wire }
    }

    fn established() -> Self {
        let mut pair = Self::new();
        pair.run();
        assert!(pair.server.is_established() && pair.client.is_established());
        pair.server_told.clear();
        pair.client_told.clear();
        pair.wire.clear();
        pair
    }

    /// Delivers messages until nobody has anything to do.
    fn run(&mut self) {
        loop {
            if let Some(action) = self.server.poll_action() {
                let Action::Send(link, message) = action else {
                    refuse_or_note(self.now, &mut self.server, &mut self.server_told, action);
                    continue;
                };
                self.wire.push((Role::Server, message));
                assert_eq!(link, LINK);
                let link = self.client.links().next().unwrap().number;
                self.client.handle_bytes(self.now, link, &message.encode()).unwrap();
            } else if let Some(action) = self.client.poll_action() {
                let Action::Send(_, message) = action else {
                    refuse_or_note(self.now, &mut self.client, &mut self.client_told, action);
                    continue;
                };
                self.wire.push((Role::Client, message));
                self.server.handle_bytes(self.now, LINK, &message.encode()).unwrap();
            } else {
                return;
            }
        }
    }

    fn sleep(&mut self, time: Duration) {
        self.now = self.now + time;
        self.server.handle_timeout(self.now);
        self.client.handle_timeout(self.now);
    }
}

/// Hosts with one RNIC each.
fn refuse_or_note(now: Instant, group: &mut LinkGroup, told: &mut Vec<Action>, action: Action) {
    if let Action::OpenLink { number, .. } = action {
        group.link_refused(now, number, NoQueuePair::NoAlternatePath);
    } else {
        told.push(action);
    }
}

/// A server's group whose first link is confirmed, and which has no port for a second one.
fn answered_server() -> LinkGroup {
    let mut server = LinkGroup::new_server(T0, setup(8, 64), LINK);
    server.link_connected(T0, LINK);
    let reply = ConfirmLink { reply: true, ..confirm_link() };
    server.handle_llc(T0, LINK, &Llc::ConfirmLink(reply)).unwrap();
    server.link_refused(T0, SECOND_LINK, NoQueuePair::NoAlternatePath);
    server
}

fn drain(group: &mut LinkGroup) -> Vec<Action> {
    core::iter::from_fn(|| group.poll_action()).collect()
}

/// A client whose server is played by the test.
fn client_of_a_quiet_server() -> LinkGroup {
    let mut client = LinkGroup::new_client(T0, setup(64, 8));
    client.handle_llc(T0, UNNUMBERED, &Llc::ConfirmLink(confirm_link())).unwrap();
    client
}

fn confirm_link() -> ConfirmLink {
    ConfirmLink {
        reply: false,
        no_eyecatcher: true,
        mac: MacAddress::default(),
        gid: Gid::default(),
        qpn: Qpn(8),
        link: LINK,
        user_id: LinkUserId(1),
        max_links: 2,
    }
}

/// The messages of a first contact between two gateways with one RNIC each. If one of them is
/// missing, a Linux peer waits for it for seconds, and serves nobody else meanwhile.
// RFC 7609 2.2 #3: take part with a single RNIC
// RFC 7609 2.2.1 #1: run a group with one link
// RFC 7609 2.2.1 #2: no parallel links between same RNICs
// RFC 7609 2.2.2 #3: link limit between 2 and 8
// RFC 7609 2.2.2 #5: server always states its limit
// RFC 7609 3.3 #3: CONFIRM LINK on the confirmed link
// RFC 7609 3.3 #10: server begins CONFIRM LINK
// RFC 7609 3.5.1.5 #1: send CONFIRM LINK after Confirm
// RFC 7609 3.5.1.5 #2: CONFIRM LINK with identity and limit
// RFC 7609 3.5.1.5 #5: enable sending and answer CONFIRM LINK
// RFC 7609 3.5.1.5 #6: reply repeats the server's link number
// RFC 7609 3.5.1.6 #5: ADD LINK over the existing link
// RFC 7609 3.5.1.6.1 #2: reject ADD LINK for parallel link
// RFC 7609 3.5.1.6.1 #8: reject ADD LINK with a reason
// RFC 7609 A.3.1 #3: link number at byte 29
// RFC 7609 A.3.2 #8: server assigns the new link number
// RFC 7609 A.3.2 #12: ADD LINK right after first link
// RFC 7609 A.3.2 #13: offer invalid MTU for single link
#[test]
fn first_contact_confirms_a_link_and_settles_for_one() {
    let mut pair = Pair::new();
    pair.run();
    let [confirm, confirmed, add, rejected] = pair.wire[..] else {
        panic!("four messages: {:?}", pair.wire);
    };
    let request = ConfirmLink {
        mac: MacAddress([2, 0, 0, 0, 0, 8]),
        gid: Gid::from_ipv4([10, 0, 0, 8]),
        user_id: LinkUserId(8),
        ..confirm_link()
    };
    assert_eq!(confirm, (Role::Server, Llc::ConfirmLink(request)));
    let reply = ConfirmLink {
        reply: true,
        mac: MacAddress([2, 0, 0, 0, 0, 64]),
        gid: Gid::from_ipv4([10, 0, 0, 64]),
        qpn: Qpn(64),
        user_id: LinkUserId(64),
        ..confirm_link()
    };
    assert_eq!(confirmed, (Role::Client, Llc::ConfirmLink(reply)));
    let offer = AddLink {
        reply: false,
        rejected: false,
        reason: 0,
        mac: request.mac,
        gid: request.gid,
        qpn: Qpn(0),
        link: LinkNumber(2),
        mtu: Mtu(0),
        psn: Psn(0),
    };
    assert_eq!(add, (Role::Server, Llc::AddLink(offer)));
    let refusal = AddLink { reply: true, rejected: true, reason: 2, ..offer };
    assert_eq!(rejected, (Role::Client, Llc::AddLink(refusal)));

    assert_eq!(pair.server_told, [Action::LinkConfirmed(LINK)]);
    assert_eq!(pair.client_told, [Action::LinkNumbered(LINK), Action::LinkConfirmed(LINK)]);
    assert_eq!((pair.server.dropped(), pair.client.dropped()), (0, 0));
    assert!(!pair.server.peer_eye_catcher() && !pair.client.peer_eye_catcher());
}

/// Data of a peer with eye catchers begins four bytes later; missing that garbles every stream.
#[test]
fn eye_catchers_are_told_in_both_directions() {
    let mut server = LinkGroup::new_server(T0, Setup { eye_catcher: true, ..setup(8, 64) }, LINK);
    server.link_connected(T0, LINK);
    let Some(Action::Send(_, Llc::ConfirmLink(request))) = server.poll_action() else {
        panic!("CONFIRM LINK is first");
    };
    assert!(!request.no_eyecatcher);
    let mut client = LinkGroup::new_client(T0, setup(64, 8));
    client.handle_llc(T0, UNNUMBERED, &Llc::ConfirmLink(request)).unwrap();
    assert!(client.peer_eye_catcher());
    let reply = ConfirmLink { reply: true, no_eyecatcher: true, ..request };
    server.handle_llc(T0, LINK, &Llc::ConfirmLink(reply)).unwrap();
    assert!(!server.peer_eye_catcher());
}

/// RFC C.7, with shorter waits than those of Linux: our Decline must reach a Linux peer before it
/// goes on or declines itself, for it would not say that the path is to blame.
// RFC 7609 3.5.1.3 #4: client timer for first CONFIRM LINK
// RFC 7609 3.5.1.5 #3: server timer for CONFIRM LINK reply
// RFC 7609 C.7 #1: timer for each LLC request
// RFC 7609 C.7 #3: decline while peer reads CLC
#[test]
fn an_unconfirmed_link_fails_in_time_to_decline() {
    let mut server = LinkGroup::new_server(T0, setup(8, 64), LINK);
    server.link_connected(T0, LINK);
    drain(&mut server);
    let mut client = LinkGroup::new_client(T0, setup(64, 8));
    for (group, wait, number) in
        [(&mut server, CONFIRM_LINK_REPLY_WAIT, LINK), (&mut client, CONFIRM_LINK_WAIT, UNNUMBERED)]
    {
        let deadline = T0 + wait;
        if number == LINK {
            group.handle_timeout(T0 + CONFIRM_LINK_REPEAT);
            drain(group);
        }
        assert_eq!(group.poll_timeout(), Some(deadline));
        group.handle_timeout(deadline);
        let cause = Cause::ConfirmTimedOut;
        assert_eq!(drain(group), [Action::LinkFailed(number, cause), Action::Terminate(cause)]);
        assert!(group.may_decline(deadline) && group.is_terminated());
        assert_eq!(group.poll_timeout(), None);
    }
}

/// If a link failed lately, the next attempt is short: an application waits for it.
#[test]
fn doubts_shorten_the_wait() {
    let doubtful = |mut setup: Setup| {
        setup.confirm_wait = Some(SECOND / 50);
        setup
    };
    let mut server = LinkGroup::new_server(T0, doubtful(setup(8, 64)), LINK);
    server.link_connected(T0 + SECOND, LINK);
    let client = LinkGroup::new_client(T0 + SECOND, doubtful(setup(64, 8)));
    for group in [server, client] {
        assert_eq!(group.poll_timeout(), Some(T0 + SECOND + SECOND / 50));
    }
}

/// A gateway that stood still for seconds must not relay over TCP what its client, a Linux kernel
/// that has gone on without it, no longer reads there.
// RFC 7609 C.3 #3: reset beyond point of no return
#[test]
fn a_server_that_comes_too_late_may_not_decline() {
    let mut server = LinkGroup::new_server(T0, setup(8, 64), LINK);
    server.link_connected(T0, LINK);
    assert!(server.may_decline(T0 + CLIENT_GOES_ON / 10 * 9));
    assert!(!server.may_decline(T0 + CLIENT_GOES_ON));
    assert!(LinkGroup::new_client(T0, setup(64, 8)).may_decline(T0 + CLIENT_GOES_ON * 2));
}

/// A Linux client drops a CONFIRM LINK that comes before it is ready for one. It needs a second
/// chance, or the first contact fails after four seconds; more than two would confuse it.
#[test]
fn confirm_link_is_said_twice_at_most() {
    let mut server = LinkGroup::new_server(T0, setup(8, 64), LINK);
    server.link_connected(T0, LINK);
    let first = drain(&mut server);
    assert_eq!(server.poll_timeout(), Some(T0 + CONFIRM_LINK_REPEAT));
    server.handle_timeout(T0 + CONFIRM_LINK_REPEAT / 2);
    assert_eq!(drain(&mut server), []);
    server.handle_timeout(T0 + CONFIRM_LINK_REPEAT);
    assert_eq!(drain(&mut server), first);
    server.handle_timeout(T0 + CONFIRM_LINK_REPEAT + SECOND / 2);
    assert_eq!(drain(&mut server), []);
}

/// RFC C.8: without an answer to ADD LINK, or without the ADD LINK, the group goes on with one
/// link after 2 s.
// RFC 7609 3 #3: confirm a new link before data
// RFC 7609 3.5.1.6 #1: try second link before data
// RFC 7609 C.3 #1: server: no fallback after ADD LINK
// RFC 7609 C.3 #2: client: no fallback after ADD LINK reply
// RFC 7609 C.3 #5: commit when ADD LINK is sent
// RFC 7609 C.7.1 #5: client goes on without ADD LINK
// RFC 7609 C.7.1 #6: server goes on without ADD LINK reply
// RFC 7609 C.8 #1: go on without second link
#[test]
fn a_silent_peer_does_not_prevent_the_first_link() {
    let mut client = client_of_a_quiet_server();
    assert!(!client.is_committed());
    let mut server = answered_server();
    assert!(server.is_committed(), "the client may have rejected and gone on");
    for group in [&mut client, &mut server] {
        drain(group);
        assert!(!group.is_established());
        assert_eq!(group.poll_timeout(), Some(T0 + ADD_LINK_WAIT));
        group.handle_timeout(T0 + ADD_LINK_WAIT);
        assert_eq!(drain(group), [Action::LinkConfirmed(LINK)]);
        assert!(group.is_established() && group.is_committed());
    }
}

/// RFC C.7.1: CONFIRM LINK for another queue pair, or for another link, ends the link.
// RFC 7609 C.7.1 #24: wrong CONFIRM LINK brings link down
// RFC 7609 C.7.1 #35: any other LLC error fails link
#[test]
fn confirm_link_must_name_our_link() {
    let mut client = LinkGroup::new_client(T0, setup(64, 8));
    let stranger = Llc::ConfirmLink(ConfirmLink { qpn: Qpn(9), ..confirm_link() });
    let offence = PeerMisbehaved::WrongLink;
    assert_eq!(client.handle_llc(T0, UNNUMBERED, &stranger), Err(offence));
    let cause = Cause::PeerMisbehaved;
    let over = [Action::LinkFailed(UNNUMBERED, cause), Action::Terminate(cause)];
    assert_eq!(drain(&mut client), over);

    let mut server = LinkGroup::new_server(T0, setup(8, 64), LINK);
    server.link_connected(T0, LINK);
    let other = ConfirmLink { reply: true, link: LinkNumber(2), ..confirm_link() };
    assert_eq!(server.handle_llc(T0, LINK, &Llc::ConfirmLink(other)), Err(offence));
    assert!(server.is_terminated());
}

/// A server that repeats CONFIRM LINK has lost our answer; refusing to repeat it kills the link.
#[test]
fn a_repeated_confirm_link_is_answered_again() {
    let mut client = client_of_a_quiet_server();
    drain(&mut client);
    client.handle_llc(T0, LINK, &Llc::ConfirmLink(confirm_link())).unwrap();
    let [Action::Send(LINK, Llc::ConfirmLink(reply))] = drain(&mut client)[..] else {
        panic!("one answer");
    };
    assert!(reply.reply && reply.link == LINK);
}

/// Messages that only a server may send end a link whose client sends them, and the reverse.
// RFC 7609 2 #6: let the server manage links
// RFC 7609 2.2 #5: same server for all links
// RFC 7609 C.7.1 #35: any other LLC error fails link
#[test]
fn requests_out_of_turn_are_offences() {
    let offence = Err(PeerMisbehaved::UnexpectedMessage);
    let mut server = Pair::established().server;
    assert_eq!(server.handle_llc(T0, LINK, &Llc::ConfirmLink(confirm_link())), offence);
    assert!(server.is_terminated());
    let mut client = LinkGroup::new_client(T0, setup(64, 8));
    let add = add_link();
    assert_eq!(client.handle_llc(T0, UNNUMBERED, &add), offence);
    assert!(client.is_terminated());
}

fn add_link() -> Llc {
    Llc::AddLink(AddLink {
        reply: false,
        rejected: false,
        reason: 0,
        mac: MacAddress([2; 6]),
        gid: Gid([3; 16]),
        qpn: Qpn(77),
        link: LinkNumber(2),
        mtu: Mtu::B1024,
        psn: Psn(5),
    })
}

/// A server that finds a second RNIC later offers a link. A client without one must answer, or the
/// server takes the link for failed.
// RFC 7609 2.2.1 #2: no parallel links between same RNICs
// RFC 7609 3.5.1.6.1 #8: reject ADD LINK with a reason
// RFC 7609 3.5.5.3 #2: client's ADD LINK at any time
#[test]
fn later_offers_of_links_are_rejected() {
    let mut pair = Pair::established();
    pair.client.handle_llc(T0, LINK, &add_link()).unwrap();
    let [Action::OpenLink { number: SECOND_LINK, peer: Some(_) }] = drain(&mut pair.client)[..]
    else {
        panic!("the caller chooses a port");
    };
    pair.client.link_refused(T0, SECOND_LINK, NoQueuePair::NoAlternatePath);
    let [Action::Send(LINK, Llc::AddLink(reply))] = drain(&mut pair.client)[..] else {
        panic!("one answer");
    };
    assert!(reply.reply && reply.rejected && reply.reason == 1 && reply.qpn == Qpn(77));
    // The client's own news needs no answer (3.5.5.1.2).
    pair.server.handle_llc(T0, LINK, &add_link()).unwrap();
    assert_eq!(drain(&mut pair.server), [Action::OpenLink { number: LinkNumber(3), peer: None }]);
    pair.server.link_refused(T0, LinkNumber(3), NoQueuePair::NoAlternatePath);
    assert_eq!(drain(&mut pair.server), []);
}

/// A client that takes the impossible link must not keep waiting for its CONFIRM LINK.
// RFC 7609 3.5.1.6.2 #4: no data before DELETE LINK is answered
#[test]
fn an_accepted_impossible_link_is_deleted() {
    let mut server = answered_server();
    drain(&mut server);
    let Llc::AddLink(offer) = add_link() else { unreachable!() };
    server.handle_llc(T0, LINK, &Llc::AddLink(AddLink { reply: true, ..offer })).unwrap();
    let [Action::Send(LINK, Llc::DeleteLink(delete))] = drain(&mut server)[..] else {
        panic!("the client has to let go first");
    };
    assert_eq!((delete.link, delete.all, delete.reply), (LinkNumber(2), false, false));
    server.handle_llc(T0, LINK, &Llc::DeleteLink(DeleteLink { reply: true, ..delete })).unwrap();
    assert_eq!(drain(&mut server), [Action::LinkConfirmed(LINK)], "the group goes on");
}

/// Linux does this once per connection; without an answer its next connection fails.
// RFC 7609 A.3.5 #8: CONFIRM RKEY reply repeats the request
// RFC 7609 A.3.7 #4: mark RKeys that were not deleted
// RFC 7609 A.3.7 #6: DELETE RKEY reply repeats the list
// RFC 7609 C.7.1 #32: refuse to delete unknown RKey
// RFC 7609 3.5.5.2.2 #4: delete several RMBs at once
#[test]
fn rkeys_are_confirmed_and_deleted() {
    let mut server = Pair::established().server;
    let rkey = Rkey(0x1234);
    let confirm = ConfirmRkey {
        reply: false,
        negative: false,
        retry: false,
        other_links: 0,
        rkey,
        address: 0x7000,
        others: Default::default(),
    };
    server.handle_llc(T0, LINK, &Llc::ConfirmRkey(confirm)).unwrap();
    let reply = Llc::ConfirmRkey(ConfirmRkey { reply: true, ..confirm });
    assert_eq!(drain(&mut server), [Action::Send(LINK, reply)]);
    assert_eq!(server.peer_rmb(LINK, rkey, LINK), Some((rkey, 0x7000)));
    server.learn_rkey(LINK, Rkey(5), 0x5000).unwrap();

    let mut rkeys = [Rkey(0); 8];
    rkeys[..3].copy_from_slice(&[rkey, Rkey(0xdead), Rkey(5)]);
    let delete = DeleteRkey { reply: false, negative: false, count: 3, error_mask: 0, rkeys };
    server.handle_llc(T0, LINK, &Llc::DeleteRkey(delete)).unwrap();
    let reply = DeleteRkey { reply: true, negative: true, error_mask: 0x40, ..delete };
    let expected = [Action::RkeysDeleted(LINK), Action::Send(LINK, Llc::DeleteRkey(reply))];
    assert_eq!(drain(&mut server), expected);
    assert_eq!(server.peer_rmb(LINK, rkey, LINK), None);
}

/// A peer with more RMBs than we can remember is told so, and tries another group.
// RFC 7609 2.1 #2: at most 255 RMBs per peer
#[test]
fn too_many_rkeys_are_refused_politely() {
    let mut server = Pair::established().server;
    for rkey in 0..255 {
        server.learn_rkey(LINK, Rkey(rkey), 0).unwrap();
    }
    server.learn_rkey(LINK, Rkey(7), 1).expect("known keys need no room");
    assert_eq!(server.learn_rkey(LINK, Rkey(255), 0), Err(Full));
    let confirm = ConfirmRkey {
        reply: false,
        negative: false,
        retry: false,
        other_links: 0,
        rkey: Rkey(255),
        address: 0,
        others: Default::default(),
    };
    server.handle_llc(T0, LINK, &Llc::ConfirmRkey(confirm)).unwrap();
    let reply = ConfirmRkey { reply: true, negative: true, retry: true, ..confirm };
    assert_eq!(drain(&mut server), [Action::Send(LINK, Llc::ConfirmRkey(reply))]);
}

/// After 30 s of silence each side sends TEST LINK, and the answer keeps the link up.
// RFC 7609 3.3 #4: TEST LINK on the tested link
// RFC 7609 3.5.5.3 #1: TEST LINK at any time
// RFC 7609 4.5.3 #1: probe idle link by TEST LINK
// RFC 7609 4.5.3 #3: TEST LINK answer shows viable link
// RFC 7609 A.3.8 #2: echo TEST LINK at once
// RFC 7609 3.5.1.5 #4: stop client timer at CONFIRM LINK
// RFC 7609 C.7 #2: answer stops the LLC timer
#[test]
fn idle_links_are_tested_and_live_on() {
    let mut pair = Pair::established();
    pair.server.traffic(T0 + SECOND, LINK);
    assert_eq!(pair.client.poll_timeout(), Some(T0 + TEST_LINK_IDLE));
    pair.sleep(TEST_LINK_IDLE);
    pair.run();
    let kinds: Vec<_> = pair.wire.iter().map(|(role, llc)| (*role, llc.is_reply())).collect();
    assert_eq!(kinds, [(Role::Client, false), (Role::Server, true)]);
    assert_eq!(pair.client_told, [Action::LinkProven(LINK)]);
    assert_eq!(pair.client.dropped(), 0);
    pair.sleep(TEST_LINK_REPLY_WAIT * 2);
    pair.run();
    assert!(pair.client.is_established());
}

/// `kill -9` of the peer: a probe finds out within the time asked for, and applications see a
/// reset.
// RFC 7609 4.5.3 #5: reset connections without another link
// RFC 7609 C.7.1 #23: unanswered TEST LINK fails link
#[test]
fn a_dead_peer_is_found_out() {
    let mut client = Pair::established().client;
    client.connections_changed(T0, 1);
    client.probe(T0, LINK, SECOND);
    assert_eq!(client.poll_timeout(), Some(T0 + SECOND));
    client.handle_timeout(T0 + SECOND);
    let cause = Cause::TestTimedOut;
    let actions = drain(&mut client);
    assert!(matches!(actions[0], Action::Send(LINK, Llc::TestLink(_))));
    assert_eq!(actions[1..], [Action::LinkFailed(LINK, cause), Action::Terminate(cause)]);
}

/// RFC C.7.1: an echo of other bytes is a protocol error; one that nobody asked for is noise.
// RFC 7609 C.7.1 #33: changed TEST LINK data fails link
#[test]
fn echoes_are_compared() {
    let mut client = Pair::established().client;
    let wrong = Llc::TestLink(TestLink { reply: true, user_data: [9; 16] });
    client.handle_llc(T0, LINK, &wrong).unwrap();
    assert_eq!((client.dropped(), client.is_established()), (1, true));
    client.probe(T0, LINK, SECOND);
    let user_data = setup(64, 8).ours.gid.0;
    let right = Llc::TestLink(TestLink { reply: true, user_data });
    drain(&mut client);
    client.handle_llc(T0, LINK, &right).unwrap();
    client.handle_llc(T0, LINK, &right).unwrap();
    assert_eq!((client.dropped(), client.is_established()), (2, true), "answered once");
    assert_eq!(drain(&mut client), [Action::LinkProven(LINK)]);
    client.probe(T0, LINK, SECOND);
    assert_eq!(client.handle_llc(T0, LINK, &wrong), Err(PeerMisbehaved::WrongEcho));
    assert!(client.is_terminated());
}

/// A gateway that stops: the peer hears of it and resets what is left, at once.
// RFC 7609 3.5.4 #6: end group by DELETE LINK for all
// RFC 7609 3.5.4 #8: client drops deleted group at once
// RFC 7609 3.5.4 #10: client asks to end the group
// RFC 7609 3.5.5.3 #4: DELETE LINK for group at any time
// RFC 7609 C.7.1 #19: end group though DELETE LINK undelivered
#[test]
fn shutdown_ends_both_sides() {
    for server_begins in [true, false] {
        let mut pair = Pair::established();
        let begins = if server_begins { &mut pair.server } else { &mut pair.client };
        begins.shutdown(T0, DeleteReason::OPERATOR);
        pair.run();
        let Some((_, Llc::DeleteLink(delete))) = pair.wire.first() else {
            panic!("{:?}", pair.wire);
        };
        // RFC 7609 A.3.4 #4: deleted link number, zero for all
        assert_eq!(delete.link, UNNUMBERED, "all links are none in particular");
        assert!(delete.all && !delete.reply && delete.reason == DeleteReason::OPERATOR);
        let over = |cause| vec![Action::LinkFailed(LINK, cause), Action::Terminate(cause)];
        let (us, them) = (over(Cause::DeletedByUs), over(Cause::DeletedByPeer));
        let (server, client) = if server_begins { (us, them) } else { (them, us) };
        assert_eq!((pair.server_told, pair.client_told), (server, client));
    }
}

/// RFC 3.5.5.1.3 and 3.5.5.1.4: the server deletes and the client answers, whoever asked for it.
// RFC 7609 2.2.3 #4: only the server changes links
// RFC 7609 2.3 #5: client reports failure, server deletes link
// RFC 7609 3.5.5.1.3 #7: client always agrees to DELETE LINK
// RFC 7609 3.5.5.1.4 #4: answer by own DELETE LINK exchange
// RFC 7609 3.5.5.3 #3: client's DELETE LINK at any time
// RFC 7609 A.3.4 #9: client's DELETE LINK is a notice
#[test]
fn deleting_the_only_link_ends_the_group() {
    for server_begins in [true, false] {
        let mut pair = Pair::established();
        let begins = if server_begins { &mut pair.server } else { &mut pair.client };
        begins.delete_link(T0, LINK, DeleteReason::OPERATOR, false);
        pair.run();
        let order = [(Role::Client, false), (Role::Server, false), (Role::Client, true)];
        let seen: Vec<_> = pair.wire.iter().map(|(role, llc)| (*role, llc.is_reply())).collect();
        assert_eq!(seen, order[usize::from(server_begins)..]);
        let over = |cause| vec![Action::LinkFailed(LINK, cause), Action::Terminate(cause)];
        let (us, them) = (over(Cause::DeletedByUs), over(Cause::DeletedByPeer));
        let (server, client) = if server_begins { (us, them) } else { (them, us) };
        assert_eq!((pair.server_told, pair.client_told), (server, client));
    }
}

/// A peer that does not answer DELETE LINK is gone as well.
// RFC 7609 C.7.1 #21: no link for server's DELETE LINK: reset
// RFC 7609 3.5.5.1.3 #6: free a failed link before reply
#[test]
fn an_unanswered_delete_ends_the_link_all_the_same() {
    let mut server = Pair::established().server;
    server.delete_link(T0, LINK, DeleteReason::OPERATOR, false);
    // Data flows until then; else TEST LINK would find out.
    server.traffic(T0 + SECOND * 20, LINK);
    assert_eq!(server.poll_timeout(), Some(T0 + LINK_EXCHANGE_WAIT));
    server.handle_timeout(T0 + LINK_EXCHANGE_WAIT);
    let actions = drain(&mut server);
    assert_eq!(actions.last(), Some(&Action::Terminate(Cause::DeletedByUs)));
}

/// RFC C.7.1: a link that does not exist cannot be deleted, and the others do not suffer.
// RFC 7609 A.3.4 #7: reply with reason unknown link
// RFC 7609 C.7.1 #30: answer server's DELETE LINK of unknown link
#[test]
fn deleting_an_unknown_link_says_so() {
    let mut pair = Pair::established();
    for group in [&mut pair.server, &mut pair.client] {
        let delete = DeleteLink {
            reply: false,
            all: false,
            orderly: false,
            link: LinkNumber(9),
            reason: DeleteReason::LOST_PATH,
        };
        group.handle_llc(T0, LINK, &Llc::DeleteLink(delete)).unwrap();
        let reply = DeleteLink { reply: true, reason: DeleteReason::UNKNOWN_LINK, ..delete };
        assert_eq!(drain(group), [Action::Send(LINK, Llc::DeleteLink(reply))]);
        assert!(group.is_established());
    }
}

/// The server ends a group that nobody used for 600 s; the client's 610 s never come.
// RFC 7609 2 #5: end idle link groups
// RFC 7609 3.5.4 #3: server ends an empty group
// RFC 7609 3.5.4 #4: keep an empty group by timer
// RFC 7609 3.5.4 #6: end group by DELETE LINK for all
#[test]
fn idle_groups_are_ended_by_the_server() {
    let mut pair = Pair::established();
    pair.server.connections_changed(T0, 1);
    pair.client.connections_changed(T0, 1);
    let quarter = Duration::from_secs(15);
    let keep_alive = |pair: &mut Pair, time: Duration| {
        for _ in 0..time.as_secs() / quarter.as_secs() {
            pair.sleep(quarter);
            pair.run();
        }
    };
    keep_alive(&mut pair, Duration::from_secs(900));
    assert!(pair.server.is_established(), "in use");
    pair.server.connections_changed(pair.now, 0);
    pair.client.connections_changed(pair.now, 0);
    keep_alive(&mut pair, Duration::from_secs(585));
    assert!(pair.server.is_established());
    pair.server.connections_changed(pair.now, 1);
    pair.server.connections_changed(pair.now, 0);
    keep_alive(&mut pair, Duration::from_secs(15));
    assert!(pair.server.is_established(), "a connection came and went");
    pair.client.connections_changed(pair.now, 0);
    keep_alive(&mut pair, Duration::from_secs(585));
    assert_eq!(pair.server_told.last(), Some(&Action::Terminate(Cause::Idle)));
    assert_eq!(pair.client_told.last(), Some(&Action::Terminate(Cause::DeletedByPeer)));
    let last = pair.wire.iter().rev().find(|(role, _)| *role == Role::Server);
    let Some((_, Llc::DeleteLink(delete))) = last else { panic!("{last:?}") };
    assert!(delete.all && delete.orderly && delete.reason == DeleteReason::PROGRAM);
}

/// Completions of a broken queue pair keep arriving; none of them may start anything.
// RFC 7609 3.5.5.1.3 #2: delete link upon errors
// RFC 7609 C.7.1 #1: failed LLC send is a timeout
#[test]
fn a_terminated_group_swallows_everything() {
    let mut server = Pair::established().server;
    server.link_broke(T0, LINK);
    let cause = Cause::QueuePairBroke;
    let over = [Action::LinkFailed(LINK, cause), Action::Terminate(cause)];
    assert_eq!(drain(&mut server), over);
    server.link_broke(T0, LINK);
    server.traffic(T0, LINK);
    server.probe(T0, LINK, SECOND);
    server.connections_changed(T0, 0);
    server.shutdown(T0, DeleteReason::OPERATOR);
    server.delete_link(T0, LINK, DeleteReason::OPERATOR, false);
    server.handle_timeout(T0 + SECOND * 9999);
    server.handle_llc(T0, LINK, &Llc::ConfirmLink(confirm_link())).unwrap();
    assert_eq!((drain(&mut server), server.poll_timeout()), (vec![], None));
}

/// Replies nobody waits for are dropped and counted, as Linux drops them.
#[test]
fn replies_without_a_procedure_are_dropped() {
    let mut client = Pair::established().client;
    let Llc::AddLink(add) = add_link() else { unreachable!() };
    for (count, message) in [
        Llc::ConfirmLink(ConfirmLink { reply: true, ..confirm_link() }),
        Llc::AddLink(AddLink { reply: true, ..add }),
    ]
    .iter()
    .enumerate()
    {
        client.handle_llc(T0, LINK, message).unwrap();
        assert_eq!(client.dropped(), count as u64 + 1);
    }
    assert!(client.is_established());
    assert_eq!(drain(&mut client), []);
}

/// Optional messages of newer peers are discarded; any other unknown one breaks the link.
// RFC 7609 3.3 #9: drop unknown optional LLC messages
// RFC 7609 C.7.1 #34: drop unknown opcode beginning with 10
// RFC 7609 C.7.1 #35: any other LLC error fails link
#[test]
fn unknown_messages() {
    let mut client = Pair::established().client;
    let mut bytes = [0; LEN];
    (bytes[0], bytes[1]) = (0x85, 44);
    client.handle_bytes(T0, LINK, &bytes).unwrap();
    assert_eq!((client.dropped(), client.is_established()), (1, true));
    bytes[0] = 0x45;
    let offence = PeerMisbehaved::Malformed(Malformed::UnknownType(0x45));
    assert_eq!(client.handle_bytes(T0, LINK, &bytes), Err(offence));
    assert!(client.is_terminated());
}
