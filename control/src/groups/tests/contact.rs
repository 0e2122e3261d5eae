//! First and later contact: who joins which group, on which link, with which element.

use std::sync::Arc;
use std::time::Duration;

use smcr_proto::limits::OUR_RMBS_MAX;
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::Offer;
use smcr_proto::wire::llc::rkeys::RkeyOnLink;
use smcr_proto::wire::llc::{ConfirmRkey, DeleteReason, DeleteRkey, Llc, TestLink};
use smcr_proto::{Instant, Qpn, Rkey};

use super::rig::{ADDRESSES, Pair, SIZE, gid};
use crate::groups::group::MEMBERS_MAX;
use crate::groups::{BadOffer, Event, Joined, Lan, Peer, PortId, Refusal, Taken, Unnamed};

/// A later contact up to the point where both sides know both elements.
fn later_contact(pair: &mut Pair) -> (Joined, Joined) {
    pair.settle();
    let now = pair.now;
    let peer = pair.server.groups.iter().next().unwrap().1.peer;
    let group = pair.server.groups.joinable(PortId(0), peer).expect("a group to join");
    let link = pair.server.groups.best_link(group).unwrap();
    let accept = pair.server.groups.join(now, group, link, SIZE).unwrap();
    let (group, link) = pair
        .client
        .groups
        .named_by(pair.now, &accept.offer, false, ADDRESSES[1], PortId(0))
        .expect("a known link");
    let confirm = pair.client.groups.join(now, group, link, SIZE).unwrap();
    pair.client.groups.accept_offer(now, confirm.connection, &accept.offer).unwrap();
    pair.server.groups.accept_offer(now, accept.connection, &confirm.offer).unwrap();
    (confirm, accept)
}

/// The second connection to a peer costs an element, not a queue pair; and no connection is given
/// what another has.
// RFC 7609 2 #4: use existing links for later connections
// RFC 7609 3.5.2.1 #3: allocate only elements on later contact
// RFC 7609 3.5.2.1 #4: take a free element that fits
// RFC 7609 3.5.2.2 #1: recognize later contact by Accept
// RFC 7609 3.5.2.2 #3: new RToken is no first contact
// RFC 7609 3.5.2.2 #5: client allocates its own element
// RFC 7609 3.5.2.3 #1: check that client's element is free
// RFC 7609 2.2.4 #7: recognize peers by peer id
#[test]
fn a_later_contact_uses_what_is_there() {
    let mut pair = Pair::new(1, 1);
    let (client, server) = pair.first_contact();
    assert!(pair.client.events.contains(&Event::Established(client.group)));
    assert!(pair.server.events.contains(&Event::Established(server.group)));
    let mut elements = vec![(server.joined.offer.rkey, server.joined.rmbe.index())];
    for _ in 0..6 {
        let (confirm, accept) = later_contact(&mut pair);
        assert_eq!(accept.offer.qpn, server.joined.offer.qpn);
        assert_eq!(confirm.offer.qpn, client.joined.offer.qpn);
        elements.push((accept.offer.rkey, accept.rmbe.index()));
        pair.server.groups.hand_over(accept.connection, (), accept.rmbe, None, false);
        pair.client.groups.hand_over(confirm.connection, (), confirm.rmbe, None, false);
    }
    elements.sort_unstable();
    elements.dedup();
    assert_eq!(elements.len(), 7, "an element has one connection");
    assert_eq!(pair.server.groups.iter().count(), 1);
    assert_eq!(pair.server.groups.iter().next().unwrap().1.stock.rmbs(), 2, "four elements each");
}

/// A Confirm that leads to a queue pair which is none of ours would have us write into the memory
/// of a stranger.
// RFC 7609 2 #1: identify a link by both ends
// RFC 7609 3.5.2.3 #2: check that Confirm names active link
#[test]
fn a_confirm_must_name_a_link_of_the_group() {
    let mut pair = Pair::new(1, 1);
    let (client, server) = pair.first_contact();
    let accept = {
        let link = pair.server.groups.best_link(server.group).unwrap();
        pair.server.groups.join(pair.now, server.group, link, SIZE).unwrap()
    };
    let right = client.joined.offer;
    for wrong in [
        Offer { qpn: Qpn(right.qpn.0 + 1), ..right },
        Offer { gid: gid(7, 7), ..right },
        Offer { mac: smcr_proto::MacAddress([9; 6]), ..right },
    ] {
        let wrong = Offer { rmbe_index: 9, ..wrong };
        let outcome = pair.server.groups.accept_offer(pair.now, accept.connection, &wrong);
        assert_eq!(outcome, Err(BadOffer::NoSuchLink));
    }
    let right = Offer { rmbe_index: 9, ..right };
    pair.server.groups.accept_offer(pair.now, accept.connection, &right).unwrap();
}

/// A peer that lost track of a connection gives its element to the next one. The old connection
/// would write into the new one's bytes: it is reset, and the new one goes on.
// RFC 7609 3.5.2.2 #4: check that server's element is free
// RFC 7609 3.5.2.3 #1: check that client's element is free
// RFC 7609 4.4.2 #3: abort user of an offered element
// RFC 7609 4.4.2 #6: new connection goes on after conflict
#[test]
fn an_element_that_is_offered_twice_ends_the_first_connection() {
    let mut pair = Pair::new(1, 1);
    let (client, server) = pair.first_contact();
    let old = server.joined.connection;
    let link = pair.server.groups.best_link(server.group).unwrap();
    let accept = pair.server.groups.join(pair.now, server.group, link, SIZE).unwrap();
    let again = client.joined.offer;
    let taken = pair.server.groups.accept_offer(pair.now, accept.connection, &again);
    pair.settle();
    assert_eq!((taken, &pair.server.aborted[..]), (Ok(Taken::Awaited), &[][..]), "it may be over");
    pair.server.groups.insist_on_offer(pair.now, accept.connection, &again).unwrap();
    pair.settle();
    assert_eq!(pair.server.aborted, [old]);
    assert_eq!(pair.server.groups.counts().conflicts, 1);
    assert!(pair.server.groups.member(accept.connection).is_some());
}

/// A peer that registers two RMBs as one region has one key for both. The first element of each is
/// another element: taking the one for the other would cost a connection that is well.
// RFC 7609 3.5.2.2 #4: check that server's element is free
#[test]
fn elements_of_two_rmbs_with_one_key_are_no_conflict() {
    let mut pair = Pair::new(1, 1);
    let (client, server) = pair.first_contact();
    let link = pair.server.groups.best_link(server.group).unwrap();
    let accept = pair.server.groups.join(pair.now, server.group, link, SIZE).unwrap();
    let first = client.joined.offer;
    let second = Offer { rmb_address: first.rmb_address + (1 << 20), ..first };
    let taken = pair.server.groups.accept_offer(pair.now, accept.connection, &second);
    assert_eq!(taken, Ok(Taken::Noted));
}

/// A client that gave up after our Accept may write a moment later. Whoever gets the element at
/// once reads bytes of a stranger.
// RFC 7609 3.5.4 #2: reuse element when both are done
// RFC 7609 4.4.2 #2: reuse element after a timeout
#[test]
fn an_element_that_was_offered_in_vain_rests() {
    let mut pair = Pair::new(1, 1);
    let (_client, server) = pair.first_contact();
    let link = pair.server.groups.best_link(server.group).unwrap();
    let given_up = pair.server.groups.join(pair.now, server.group, link, SIZE).unwrap();
    let element = (given_up.offer.rkey, given_up.rmbe.index());
    pair.server.groups.leave(pair.now, given_up.connection, given_up.rmbe);
    let mut taken = Vec::new();
    for _ in 0..4 {
        let next = pair.server.groups.join(pair.now, server.group, link, SIZE).unwrap();
        assert_ne!((next.offer.rkey, next.rmbe.index()), element);
        taken.push(next);
        pair.settle();
    }
    pair.pass(Duration::from_secs(31));
    let next = pair.server.groups.join(pair.now, server.group, link, SIZE).unwrap();
    assert_eq!((next.offer.rkey, next.rmbe.index()), element, "it comes back in the end");
}

/// 255 connections are the most that deployed peers put into one group. The next one begins another
/// group beside it, with queue pairs and memory of its own. The first takes no memory any more for
/// connections that it will not take in: half of what all groups may take would be lost so.
// RFC 7609 2.2.3 #3: server chooses existing or new group
// RFC 7609 2.2.4 #3: unique link user id
// RFC 7609 3.5.3 #1: allow parallel link groups
// RFC 7609 3.5.3 #2: only server opens parallel groups
// RFC 7609 3.5.3 #3: server treats parallel as first contact
// RFC 7609 3.5.3 #4: new client resources for parallel group
// RFC 7609 3.5.3 #5: no RMB in two groups
// RFC 7609 3.5.3 #6: parallel group follows first contact flow
#[test]
fn a_full_group_gets_a_parallel_one() {
    let mut pair = Pair::new(1, 1);
    pair.server.groups.shared.settings.rmb_elements = 5;
    let (client, server) = pair.first_contact();
    let peer = pair.server.groups.at(server.group).unwrap().peer;
    let link = pair.server.groups.best_link(server.group).unwrap();
    let mut held = Vec::new();
    for _ in 1..MEMBERS_MAX {
        assert_eq!(pair.server.groups.joinable(PortId(0), peer), Some(server.group));
        held.push(pair.server.groups.join(pair.now, server.group, link, SIZE).unwrap());
        pair.settle();
    }
    assert_eq!(pair.server.groups.joinable(PortId(0), peer), None);
    let rmbs = pair.server.groups.at(server.group).unwrap().stock.rmbs();
    assert_eq!(rmbs, 51, "five connections each");
    let (second_client, second_server) = pair.first_contact();
    assert_ne!(second_client.group, client.group);
    assert_ne!(second_server.joined.offer.qpn, server.joined.offer.qpn);
    assert_ne!(second_server.joined.offer.rkey, server.joined.offer.rkey);
    let groups = pair.server.groups.iter();
    let mut names: Vec<_> = groups.map(|(_, group)| group.links[0].id).collect();
    names.dedup();
    assert_eq!(names.len(), 2, "link user ids are unique");
    assert_eq!(pair.server.groups.joinable(PortId(0), peer), Some(second_server.group));
}

/// A group has as many RMBs as it can tell its peer of. Connections that would need another one
/// stay TCP, and nobody who has an element notices.
// RFC 7609 2.1 #2: at most 255 RMBs per peer
// RFC 7609 2.1 #12: overflow to TCP or parallel group
#[test]
fn more_rmbs_than_a_group_may_have_are_refused() {
    let mut pair = Pair::new(1, 1);
    pair.server.groups.shared.settings.rmb_elements = 1;
    let (_client, server) = pair.first_contact();
    let link = pair.server.groups.best_link(server.group).unwrap();
    let mut held = Vec::new();
    let refusal = loop {
        assert!(held.len() < usize::from(OUR_RMBS_MAX));
        match pair.server.groups.join(pair.now, server.group, link, SIZE) {
            Ok(joined) => held.push(joined),
            Err(Refusal::NotYet) => pair.pass(Duration::from_secs(1)),
            Err(refusal) => break refusal,
        }
        pair.settle();
        assert!(pair.now < Instant(600_000_000_000), "no RMB comes");
    };
    assert_eq!(refusal, Refusal::NoMemory);
    assert_eq!(held.len() + 1, usize::from(OUR_RMBS_MAX), "one element each");
    let freed = held.pop().expect("there are many");
    pair.server.groups.closed(pair.now, freed.connection, Some(freed.rmbe), true);
    assert!(pair.server.groups.join(pair.now, server.group, link, SIZE).is_ok(), "room again");
}

/// Two groups with one server, and we have lost one of them, unheard by the server. It names that
/// group in each Accept, as the one with fewer connections: if we declined without saying that the
/// group is out of sync, all new connections would be TCP until its TEST LINK fails.
// RFC 7609 C.4 #1: S only without a known group
#[test]
fn a_group_that_is_lost_is_out_of_sync_though_another_lives() {
    let mut pair = Pair::new(1, 1);
    let (lost, named) = pair.first_contact();
    let (alive, _) = pair.first_contact();
    assert_ne!(lost.group, alive.group);
    let link = pair.client.groups.at(lost.group).unwrap().links[0].id;
    pair.client.groups.link_broke(pair.now, link, smcr_rnic::QpError::RetriesExceeded);
    // Whatever the client says of it does not arrive.
    pair.client.says(pair.now);
    let link = pair.server.groups.best_link(named.group).unwrap();
    let accept = pair.server.groups.join(pair.now, named.group, link, SIZE).unwrap().offer;
    let (now, source) = (pair.now, ADDRESSES[1]);
    let found = pair.client.groups.named_by(now, &accept, false, source, PortId(0));
    assert_eq!(found, Err(Unnamed::OutOfSync));
}

/// A host is in two networks by two RNICs, and one peer is, too. Each connection is told the RNIC
/// of its own network: the peer could not reach the other one, or should not.
// RFC 7609 3.5.1.2 #11: Accept names RNIC on shared subnet
// RFC 7609 3.5.1.2 #13: match group by id and subnet
#[test]
fn a_connection_is_offered_the_rnic_of_its_own_network() {
    let mut pair = Pair::new(1, 2);
    let lan = Lan { pnet: "another".to_owned(), ..Lan::default() };
    pair.server.groups.shared.put_on(PortId(1), lan);
    let (_client, server) = pair.first_contact();
    assert_eq!(server.joined.offer.gid, gid(2, 0));
    let groups = &mut pair.server.groups;
    let peer = groups.at(server.group).unwrap().peer;
    assert_eq!(groups.joinable(PortId(0), peer), Some(server.group));
    assert_eq!(groups.joinable(PortId(1), peer), None, "that group is in the first network");
    let second = groups.open(pair.now, PortId(1), Role::Server, peer).unwrap();
    let link = groups.best_link(second).unwrap();
    let offer = groups.join(pair.now, second, link, SIZE).unwrap().offer;
    let address = groups.ports()[1].address().unwrap();
    assert_eq!((offer.gid, offer.mac), address);
    assert_ne!((offer.qpn, offer.rkey), (server.joined.offer.qpn, server.joined.offer.rkey));
}

/// Who connects decides who leads. A group in which both sides believed to lead would never agree.
// RFC 7609 2.2.3 #2: separate group for reverse connections
#[test]
fn the_reverse_direction_gets_a_group_of_its_own() {
    let mut pair = Pair::new(1, 1);
    let (client, server) = pair.first_contact();
    let of_server = Peer::of(&server.joined.offer, false, ADDRESSES[1]);
    assert_eq!(pair.client.groups.joinable(PortId(0), of_server), None);
    assert_eq!(
        pair.server.groups.named_by(pair.now, &client.joined.offer, false, ADDRESSES[0], PortId(0)),
        Err(Unnamed::OutOfSync)
    );
    let reverse = pair.client.groups.open(pair.now, PortId(0), Role::Server, of_server).unwrap();
    assert_ne!(reverse, client.group);
}

/// A group that ended is not joined, and leaves no memory registered with an RNIC.
// RFC 7609 C.4 #1: S only without a known group
// RFC 7609 3.5.4 #8: client drops deleted group at once
// RFC 7609 3.5.4 #9: end connections of deleted group
// RFC 7609 2.1 #6: one remote peer per RMB
#[test]
fn a_group_that_is_over_is_out_of_sync() {
    let mut pair = Pair::new(1, 1);
    let (client, server) = pair.first_contact();
    pair.server.groups.shut_down(pair.now, server.group, DeleteReason::OPERATOR);
    pair.settle();
    assert!(pair.client.events.contains(&Event::Ended(client.group)));
    assert_eq!(
        pair.client.groups.named_by(pair.now, &server.joined.offer, false, ADDRESSES[1], PortId(0)),
        Err(Unnamed::OutOfSync)
    );
    assert_eq!((pair.client.failed.len(), pair.server.failed.len()), (1, 1));
    let Joined { connection, rmbe, .. } = client.joined;
    pair.client.groups.closed(pair.now, connection, Some(rmbe), true);
    let Joined { connection, rmbe, .. } = server.joined;
    pair.server.groups.closed(pair.now, connection, Some(rmbe), true);
    assert!(pair.client.groups.is_empty() && pair.server.groups.is_empty());
}

/// A Linux server connects to the port that our Proposal named, whatever the Confirm says. If that
/// port goes down while the Accept is under way, another of ours is none for this connection.
#[test]
fn a_port_that_was_proposed_has_no_stand_in() {
    let mut pair = Pair::new(2, 1);
    let groups = &mut pair.client.groups;
    let proposed = groups.ports()[0].address().unwrap();
    assert_eq!(groups.port_at(proposed, Some(gid(2, 0))), Some(PortId(0)));
    groups.carrier_changed(pair.now, PortId(0), false);
    assert_eq!(groups.usable_port(PortId(0), Some(gid(2, 0))), Some(PortId(1)));
    assert_eq!(groups.port_at(proposed, Some(gid(2, 0))), None);
}

/// A gateway without RNICs has a port all the same, for TCP. At each start it warned that the
/// network of an RNIC was gone.
#[test]
fn a_port_without_an_rnic_has_no_network_to_lose() {
    let mut pair = Pair::new(1, 1);
    let groups = &mut pair.client.groups;
    groups.shared.ports[0].rnic = None;
    groups.carrier_changed(pair.now, PortId(0), false);
    assert!(groups.ports()[0].carrier && !groups.ports()[0].is_up());
}

/// A program at a peer half-closes: that looks as if its host had died, so it is asked. A Linux
/// host that is busy may take two seconds for its answer at any time; with less, all connections
/// to it would be reset because one of them was half-closed.
#[test]
fn a_peer_that_is_suspected_has_time_to_answer() {
    let mut pair = Pair::new(1, 1);
    let (client, _server) = pair.first_contact();
    let ended = Event::Ended(client.group);
    pair.client.groups.probe(pair.now, client.group);
    pair.stall(Duration::from_millis(1_900));
    pair.settle();
    pair.pass(Duration::from_secs(3));
    assert!(!pair.client.events.contains(&ended), "it has answered");

    pair.client.groups.probe(pair.now, client.group);
    pair.stall(Duration::from_millis(2_100));
    pair.settle();
    assert!(pair.client.events.contains(&ended));
}

/// Data came just before the peer's host died, and nobody had looked at the link since. It was
/// taken for the answer to TEST LINK, and connections hung for half a minute more.
#[test]
fn data_from_before_a_probe_is_no_answer() {
    let mut pair = Pair::new(1, 1);
    let (client, _server) = pair.first_contact();
    pair.stall(Duration::from_secs(5));
    let link = &pair.client.groups.at(client.group).unwrap().links[0];
    let activity = Arc::clone(&link.activity);
    activity.note(pair.now);
    pair.now = pair.now + Duration::from_secs(1);
    let asked = pair.now;
    pair.client.groups.probe(asked, client.group);
    // The poller reports late what came before the question.
    activity.note(Instant(asked.0 - 1));
    pair.stall(Duration::from_millis(2_100));
    pair.settle();
    assert!(pair.client.events.contains(&Event::Ended(client.group)));
}

/// What a Linux peer asks on a link while CLC waits for its next message, between our Accept and
/// its Confirm: keys of the element that the Confirm will name, keys of a connection that has just
/// ended, and whether we live. It waits with the Confirm for the first answer, and declines the
/// connection after two seconds without.
#[test]
fn a_link_is_served_while_clc_waits() {
    let mut pair = Pair::new(1, 1);
    let (_client, server) = pair.first_contact();
    let link = pair.server.groups.best_link(server.group).unwrap();
    let accept = pair.server.groups.join(pair.now, server.group, link, SIZE).unwrap();
    pair.settle();
    let (rkey, address, others) = (Rkey(0x35f), 0xff3a_aaf7_c4af_0000, [RkeyOnLink::default(); 2]);
    let (reply, negative, retry, other_links) = (false, false, false, 0);
    let confirm = ConfirmRkey { reply, negative, retry, other_links, rkey, address, others };
    let mut rkeys = [Rkey(0); 8];
    rkeys[0] = rkey;
    let delete = DeleteRkey { reply, negative, count: 1, error_mask: 0, rkeys };
    let test = TestLink { reply, user_data: [7; 16] };
    for _ in 0..3 {
        for (asked, answer) in [
            (Llc::ConfirmRkey(confirm), Llc::ConfirmRkey(ConfirmRkey { reply: true, ..confirm })),
            (Llc::TestLink(test), Llc::TestLink(TestLink { reply: true, ..test })),
            (Llc::DeleteRkey(delete), Llc::DeleteRkey(DeleteRkey { reply: true, ..delete })),
        ] {
            pair.server.groups.llc_received(pair.now, link, &asked.encode());
            assert_eq!(pair.server.says(pair.now), [answer]);
        }
    }
    assert!(pair.server.groups.member(accept.connection).is_some());
    assert_eq!(pair.server.aborted, []);
}

/// With RMBs of one element the first connection takes all there is, before its peer can be told of
/// another RMB. The second connection waited for one that nobody had announced.
// RFC 7609 3.5.2.2 #6: CONFIRM RKEY before Confirm
#[test]
fn a_group_grows_from_an_rmb_of_one_element() {
    let mut pair = Pair::new(1, 1);
    pair.server.groups.shared.settings.rmb_elements = 1;
    let (_client, server) = pair.first_contact();
    let link = pair.server.groups.best_link(server.group).unwrap();
    let refused = pair.server.groups.join(pair.now, server.group, link, SIZE).err();
    assert_eq!(refused, Some(Refusal::NotYet), "its RMB is being announced");
    pair.settle();
    assert!(pair.server.events.contains(&Event::ElementsChanged(server.group)));
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(pair.server.groups.join(pair.now, server.group, link, SIZE).unwrap());
        pair.settle();
    }
}
