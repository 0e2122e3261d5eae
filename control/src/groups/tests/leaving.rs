//! Links that connections are leaving or have left, and what is still said about them.

use std::time::Duration;

use smcr_engine::LinkId;
use smcr_proto::handshake::Agreement;
use smcr_proto::limits::RETRY_LINK;
use smcr_proto::wire::clc::Offer;
use smcr_proto::wire::llc::rkeys::RkeyOnLink;
use smcr_proto::wire::llc::{ConfirmRkey, DeleteReason, DeleteRkey, Llc};
use smcr_proto::{LinkNumber, Rkey};

use super::links::{established, links, port};
use super::rig::{Contact, Host, Pair, SIZE};
use crate::groups::{BadOffer, GroupId, Joined, PortId, Taken};

/// The peer tells a host on `link` of an RMB; `elsewhere` is what it is called on the other link.
fn confirm_rkey(
    pair: &mut Pair,
    side: &str,
    link: LinkId,
    (rkey, address): (Rkey, u64),
    elsewhere: Option<RkeyOnLink>,
) {
    let confirm = ConfirmRkey {
        reply: false,
        negative: false,
        retry: false,
        other_links: elsewhere.is_some().into(),
        rkey,
        address,
        others: [elsewhere.unwrap_or_default(), RkeyOnLink::default()],
    };
    let now = pair.now;
    pair.groups_of(side).llc_received(now, link, &Llc::ConfirmRkey(confirm).encode());
}

/// The peer tells a host on `link` that an RMB is gone.
fn delete_rkey(pair: &mut Pair, side: &str, link: LinkId, rkey: Rkey) {
    let mut rkeys = [Rkey(0); 8];
    rkeys[0] = rkey;
    let delete = DeleteRkey { reply: false, negative: false, count: 1, error_mask: 0, rkeys };
    let now = pair.now;
    pair.groups_of(side).llc_received(now, link, &Llc::DeleteRkey(delete).encode());
}

/// The links of a group by port, of those that were not given up.
fn link_on(host: &Host, group: GroupId, port: PortId) -> LinkId {
    let group = host.groups.at(group).unwrap();
    group.links.iter().find(|link| link.port == port && link.is_alive()).unwrap().id
}

/// What the group calls a link.
fn number_of(host: &Host, group: GroupId, link: LinkId) -> LinkNumber {
    host.groups.at(group).unwrap().link(link).unwrap().number
}

/// A later contact on the first link up to the Confirm, which is on its way.
fn confirm_on_its_way(pair: &mut Pair, client: GroupId, server: GroupId) -> (Joined, Joined) {
    let now = pair.now;
    let named = link_on(&pair.server, server, PortId(0));
    let accept = pair.server.groups.join(now, server, named, SIZE).unwrap();
    let link = link_on(&pair.client, client, PortId(0));
    let confirm = pair.client.groups.join(now, client, link, SIZE).unwrap();
    pair.client.groups.accept_offer(now, confirm.connection, &accept.offer).unwrap();
    (confirm, accept)
}

/// A link fails, and the peers agree to delete it while the poller is still moving its connections
/// away. Then the peer deletes the RMB of somebody else, as Linux does whenever a connection ends.
/// It reset all connections on their way, because the keys of their link were forgotten.
// RFC 7609 3.5.5.2.2 #5: find RMB by RKey of one link
// RFC 7609 2.3 #3: move connections of a failed link
#[test]
fn an_rmb_that_goes_concerns_none_of_those_that_leave_a_link() {
    let (mut pair, client, server, [near, far]) = established(2, 2);
    let other = link_on(&pair.client, client, PortId(1));
    pair.client.moves_later = true;
    pair.client.groups.rnic_down(pair.now, "r0", false).unwrap();
    pair.settle();
    assert_eq!(port(&pair.client, near), PortId(0), "it is leaving still");
    confirm_rkey(&mut pair, "client", other, (Rkey(0x77), 0x7000), None);
    delete_rkey(&mut pair, "client", other, Rkey(0x77));
    pair.settle();
    assert_eq!(pair.client.aborted, []);

    // Its own RMB goes: who wrote there would break the link that it comes to.
    let (_, rmbe) = pair.server.relayed.iter().find(|(id, _)| *id == far).unwrap();
    let stock = &pair.server.groups.at(server).unwrap().stock;
    let (rkey, _) = stock.key(rmbe, PortId(1)).expect("a key with each RNIC");
    delete_rkey(&mut pair, "client", other, rkey);
    pair.settle();
    assert_eq!(pair.client.aborted, [near]);
}

/// A connection that no other stream shall follow on is on its way to another poller, and the one
/// that it has left does nothing about it. It would be kept for ever.
#[test]
fn what_is_to_be_closed_is_closed_where_it_comes_to() {
    let (mut pair, _, _, [near, _]) = established(2, 2);
    pair.client.moves_later = true;
    pair.client.groups.rnic_down(pair.now, "r0", false).unwrap();
    pair.settle();
    pair.client.groups.close_kept(near);
    pair.settle();
    assert_eq!(pair.client.closing, [(PortId(0), near)]);
    pair.client.catch_up(pair.now);
    pair.settle();
    assert_eq!(pair.client.closing, [(PortId(0), near), (PortId(1), near)]);
}

/// A link comes up, and the peer has not said yet what its latest RMB is called there. Connections
/// to that RMB were spread to the link like others, and so were lost.
// RFC 7609 2.3 #12: use a link that comes back
#[test]
fn a_new_link_gets_only_connections_whose_rmb_it_knows() {
    let (mut pair, client, server, _) = established(2, 2);
    pair.client.groups.rnic_down(pair.now, "r1", false).unwrap();
    pair.pass(Duration::from_secs(3));
    let only = link_on(&pair.client, client, PortId(0));
    confirm_rkey(&mut pair, "client", only, (Rkey(0x99), 0x9000), None);
    let later: Vec<_> = (0..3)
        .map(|_| {
            let now = pair.now;
            let accept = pair.server.groups.join(now, server, only, SIZE).unwrap();
            let confirm = pair.client.groups.join(now, client, only, SIZE).unwrap();
            let offer = Offer { rkey: Rkey(0x99), rmb_address: 0x9000, ..accept.offer };
            pair.client.groups.accept_offer(now, confirm.connection, &offer).unwrap();
            pair.client.groups.hand_over(confirm.connection, (), confirm.rmbe, None, false);
            confirm.connection
        })
        .collect();
    pair.settle();
    pair.client.groups.rnic_up(pair.now, "r1").unwrap();
    pair.pass(RETRY_LINK + Duration::from_secs(5));
    assert_eq!(links(&pair.client, client), 2, "the RNIC is in use again");
    for connection in later {
        assert_eq!(pair.client.groups.member(connection).unwrap().link, only);
    }
}

/// A Confirm is on its way for as long as a link can fail, come again, and the other one fail: the
/// connection goes where all others have gone, by two moves.
// RFC 7609 C.1 #7: existing group: later failure breaks TCP
// RFC 7609 2.3 #3: move connections of a failed link
#[test]
fn a_confirm_outlives_two_links() {
    let (mut pair, client, server, [_, far]) = established(2, 2);
    let (confirm, accept) = confirm_on_its_way(&mut pair, client, server);
    for name in ["r0", "r1"] {
        pair.pass(RETRY_LINK + Duration::from_secs(5));
        pair.client.groups.rnic_down(pair.now, name, false).unwrap();
        pair.pass(Duration::from_secs(3));
        if name == "r0" {
            pair.client.groups.rnic_up(pair.now, name).unwrap();
            pair.pass(Duration::from_secs(3));
        }
    }
    let taken = pair.server.groups.member(far).unwrap().peer.unwrap().rmbe_index;
    let now = pair.now;
    let groups = &mut pair.server.groups;
    let conflict = Offer { rmbe_index: taken, ..confirm.offer };
    assert_eq!(groups.accept_offer(now, accept.connection, &conflict), Ok(Taken::Awaited));
    let noted = groups.accept_offer(now, accept.connection, &confirm.offer);
    assert_eq!(noted, Ok(Taken::Noted));
    groups.hand_over(accept.connection, (), accept.rmbe, None, false);
    pair.settle();
    let member = *pair.server.groups.member(accept.connection).unwrap();
    assert_eq!(member.link, pair.server.groups.member(far).unwrap().link, "where the others are");
    let stock = &pair.client.groups.at(client).unwrap().stock;
    let key = stock.key(&confirm.rmbe, PortId(0)).expect("a key with each RNIC");
    let peer = member.peer.expect("it was noted");
    assert_eq!((peer.rkey, peer.rmb_address), key);
    assert!(pair.server.failed.is_empty() && pair.server.aborted.is_empty());
}

/// An operator has a link deleted in order. While connections leave it, the client, which does not
/// know that yet, announces another RMB for both links; and its Confirm comes when the first link
/// is gone. The keys of the others were noted when they were told to leave, and not this one.
// RFC 7609 C.1 #7: existing group: later failure breaks TCP
// RFC 7609 3.5.5.2.1 #2: pair RTokens with link numbers
#[test]
fn an_rmb_is_known_that_was_announced_while_a_link_was_left() {
    let (mut pair, client, server, _) = established(2, 2);
    let (confirm, accept) = confirm_on_its_way(&mut pair, client, server);
    let [first, second] = [0, 1].map(|port| link_on(&pair.server, server, PortId(port)));
    let links_there = &pair.server.groups.at(server).unwrap().links;
    let number = links_there.iter().find(|link| link.id == second).unwrap().number;
    pair.server.moves_later = true;
    pair.server.groups.delete_link(pair.now, first, true).unwrap();
    pair.settle();
    let elsewhere = RkeyOnLink { link: number, rkey: Rkey(0x88), address: 0x1_7000 };
    confirm_rkey(&mut pair, "server", first, (Rkey(0x77), 0x7000), Some(elsewhere));
    pair.settle();
    pair.server.catch_up(pair.now);
    pair.settle();
    assert_eq!(links(&pair.server, server), 1, "both sides have deleted it");
    let offer = Offer { rkey: Rkey(0x77), rmb_address: 0x7000, ..confirm.offer };
    let groups = &mut pair.server.groups;
    assert_eq!(groups.accept_offer(pair.now, accept.connection, &offer), Ok(Taken::Noted));
    groups.hand_over(accept.connection, (), accept.rmbe, None, false);
    pair.settle();
    let member = pair.server.groups.member(accept.connection).unwrap();
    let peer = member.peer.expect("it was noted");
    assert_eq!((member.link, peer.rkey, peer.rmb_address), (second, Rkey(0x88), 0x1_7000));
}

/// Our Accept named a link that has gone since, so the client announces its RMB for the other one
/// alone, and names that one in its Confirm. The link that we were to write on has no key for it.
// RFC 7609 3.5.2.3 #3: client may choose another link
// RFC 7609 2.3 #3: move connections of a failed link
#[test]
fn an_rmb_is_known_that_was_announced_after_a_link_was_left() {
    let (mut pair, client, server, _) = established(2, 2);
    let (_confirm, accept) = confirm_on_its_way(&mut pair, client, server);
    let [first, second] = [0, 1].map(|port| link_on(&pair.server, server, PortId(port)));
    pair.server.groups.delete_link(pair.now, first, false).unwrap();
    pair.settle();
    assert_eq!(links(&pair.server, server), 1, "both sides have deleted it");
    confirm_rkey(&mut pair, "server", second, (Rkey(0x88), 0x1_7000), None);
    let theirs = pair.server.groups.at(server).unwrap().links[0].theirs.unwrap();
    let (gid, mac, qpn) = (theirs.gid, theirs.mac, theirs.qpn);
    let (rkey, rmb_address, rmbe_index) = (Rkey(0x88), 0x1_7000, 1);
    let offer = Offer { gid, mac, qpn, rkey, rmb_address, rmbe_index, ..accept.offer };
    let now = pair.now;
    let groups = &mut pair.server.groups;
    assert_eq!(groups.accept_offer(now, accept.connection, &offer), Ok(Taken::Noted));
    // Nobody else gets the element, whatever link it is named on.
    let next = groups.join(now, server, second, SIZE).unwrap();
    assert_eq!(groups.accept_offer(now, next.connection, &offer), Ok(Taken::Awaited));
    groups.leave(now, next.connection, next.rmbe);
    groups.hand_over(accept.connection, (), accept.rmbe, None, false);
    pair.settle();
    let member = pair.server.groups.member(accept.connection).unwrap();
    let peer = member.peer.expect("it was noted");
    assert_eq!((member.link, peer.rkey, peer.rmb_address), (second, rkey, rmb_address));
    assert!(pair.server.failed.is_empty() && pair.server.aborted.is_empty());
}

/// The same while our side still knows the link: its connections have left it, and the peer has not
/// answered that yet. The order to move was given again when the connection came to its poller, and
/// nothing in it led on from the name that the RMB has on the other link alone.
// RFC 7609 3.5.2.3 #3: client may choose another link
// RFC 7609 2.3 #3: move connections of a failed link
#[test]
fn an_rmb_is_known_that_was_announced_before_a_link_was_gone() {
    let (mut pair, client, server, _) = established(2, 2);
    let (_confirm, accept) = confirm_on_its_way(&mut pair, client, server);
    let [first, second] = [0, 1].map(|port| link_on(&pair.server, server, PortId(port)));
    let now = pair.now;
    let link = number_of(&pair.server, server, second);
    let elsewhere = RkeyOnLink { link, rkey: Rkey(0x99), address: 0x1_9000 };
    confirm_rkey(&mut pair, "server", first, (Rkey(0x77), 0x7000), Some(elsewhere));
    pair.server.says(now);
    pair.server.groups.delete_link(now, first, true).unwrap();
    let said = pair.server.says(now);
    assert!(matches!(said[..], [Llc::DeleteLink(_)]), "its answer does not come: {said:?}");
    let (rkey, rmb_address, rmbe_index) = (Rkey(0x88), 0x1_7000, 1);
    let theirs = pair.server.groups.at(server).unwrap().link(second).unwrap().theirs.unwrap();
    let (gid, mac, qpn) = (theirs.gid, theirs.mac, theirs.qpn);
    let offer = Offer { gid, mac, qpn, rkey, rmb_address, rmbe_index, ..accept.offer };
    let groups = &mut pair.server.groups;
    assert_eq!(groups.accept_offer(now, accept.connection, &offer), Ok(Taken::Noted));
    // Nobody else gets the element, whatever link it is named on.
    let next = groups.join(now, server, second, SIZE).unwrap();
    assert_eq!(groups.accept_offer(now, next.connection, &offer), Ok(Taken::Awaited));
    groups.leave(now, next.connection, next.rmbe);
    // The RMB of somebody else goes, which concerns nobody here.
    delete_rkey(&mut pair, "server", second, Rkey(0x99));
    pair.server.says(now);
    assert_eq!(pair.server.aborted, []);
    pair.server.groups.hand_over(accept.connection, (), accept.rmbe, None, false);
    pair.server.says(now);
    let member = pair.server.groups.member(accept.connection).unwrap();
    let peer = member.peer.expect("it was noted");
    assert_eq!((member.link, peer.rkey, peer.rmb_address), (second, rkey, rmb_address));
    delete_rkey(&mut pair, "server", second, rkey);
    pair.server.says(now);
    assert_eq!(pair.server.aborted, [accept.connection], "its own RMB has gone");
}

/// The name that an RMB has on the other link is one of another RMB on the link that was left. Who
/// came to that link by one name would be led to either of them, so the second is refused.
// RFC 7609 3.5.5.2.2 #5: find RMB by RKey of one link
#[test]
fn no_name_leads_to_two_rmbs() {
    for told_first in [true, false] {
        let (mut pair, client, server, _) = established(2, 2);
        let (_confirm, accept) = confirm_on_its_way(&mut pair, client, server);
        let [first, second] = [0, 1].map(|port| link_on(&pair.server, server, PortId(port)));
        let now = pair.now;
        let other = pair.server.groups.join(now, server, first, SIZE).unwrap();
        pair.server.moves_later = true;
        pair.server.groups.delete_link(now, first, true).unwrap();
        pair.server.says(now);
        let token = (Rkey(0x88), 0x1_7000);
        let link = number_of(&pair.server, server, second);
        let elsewhere = RkeyOnLink { link, rkey: Rkey(0x99), address: 0x1_9000 };
        let offer_on = |pair: &Pair, link, rmbe_index| {
            let group = pair.server.groups.at(server).unwrap();
            let theirs = group.link(link).unwrap().theirs.unwrap();
            let (gid, mac, qpn, (rkey, rmb_address)) = (theirs.gid, theirs.mac, theirs.qpn, token);
            Offer { gid, mac, qpn, rkey, rmb_address, rmbe_index, ..accept.offer }
        };
        let [on_first, on_second] = [(first, 1), (second, 2)].map(|(l, i)| offer_on(&pair, l, i));
        if told_first {
            confirm_rkey(&mut pair, "server", first, token, Some(elsewhere));
        }
        let late = pair.server.groups.accept_offer(now, accept.connection, &on_second);
        if told_first {
            assert_eq!(late, Err(BadOffer::UnknownRmb));
            continue;
        }
        assert_eq!(late, Ok(Taken::Noted));
        confirm_rkey(&mut pair, "server", first, token, Some(elsewhere));
        let named = pair.server.groups.accept_offer(now, other.connection, &on_first);
        assert_eq!(named, Err(BadOffer::UnknownRmb));
    }
}

/// A group that ends while its second link is being added may stay for seconds, until its last
/// element is back. Its RNIC there may be closed meanwhile, and then there was nothing from which
/// the group could be withdrawn.
#[test]
fn a_group_that_ends_has_nothing_where_it_has_no_link() {
    let mut pair = Pair::new(2, 2);
    let (_, Contact { group, joined }) = pair.begin_contact(Agreement::V1);
    while links(&pair.server, group) < 2 {
        assert!(pair.talk(), "the server offers another link");
    }
    let (now, groups) = (pair.now, &mut pair.server.groups);
    groups.shut_down(now, group, DeleteReason::OPERATOR);
    let ending = groups.at(group).expect("an element is out");
    let has_link = |port: &PortId| ending.links.iter().any(|link| link.port == *port);
    assert!(ending.domains.keys().all(has_link));
    groups.retire_port(now, PortId(1));
    assert_eq!(groups.retired_at_rest(), [PortId(1)]);
    groups.close_port(PortId(1));
    groups.closed(now, joined.connection, Some(joined.rmbe), true);
    pair.pass(Duration::from_secs(5));
    assert!(pair.server.groups.at(group).is_none());
}

/// What needs no RNIC must not keep one that the operator has taken away.
#[test]
fn what_needs_no_rnic_goes_where_one_stays() {
    let mut pair = Pair::new(1, 2);
    let (now, groups) = (pair.now, &mut pair.server.groups);
    assert_eq!(groups.any_port(), PortId(0));
    groups.retire_port(now, PortId(0));
    assert_eq!(groups.any_port(), PortId(1));
    groups.retire_port(now, PortId(1));
    groups.close_port(PortId(0));
    assert_eq!(groups.any_port(), PortId(1), "it runs still");
}
