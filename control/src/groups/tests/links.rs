//! Several links: how a group becomes redundant, loses links, and gets them back.

use std::time::Duration;

use smcr_engine::{ConnectionId, LinkId};
use smcr_proto::handshake::Agreement;
use smcr_proto::link_group::Symmetry;
use smcr_proto::wire::clc::Offer;
use smcr_proto::wire::llc::rkeys::RkeyOnLink;
use smcr_proto::wire::llc::{AddLink, ConfirmRkey, DeleteLink, DeleteReason, Llc};
use smcr_proto::{Mtu, Psn, Qpn, Rkey, RmbeSize};
use smcr_rnic::dice::Chance;
use smcr_rnic::sim::Odds;

use super::rig::{ADDRESSES, Contact, Host, Pair, SIZE, gid};
use crate::groups::{BadOffer, Event, GroupId, Lan, PortId, Refusal, Taken, Unnamed};
use crate::operate::OperateError;

fn symmetry(host: &Host, group: GroupId) -> Symmetry {
    host.groups
        .at(group)
        .and_then(|group| group.machine())
        .map_or(Symmetry::Single, |it| it.symmetry())
}

pub(super) fn links(host: &Host, group: GroupId) -> usize {
    host.groups.at(group).map_or(0, |group| group.links.len())
}

/// The port that a connection's poller belongs to.
pub(super) fn port(host: &Host, connection: ConnectionId) -> PortId {
    host.groups.member(connection).expect("it is not over").port
}

/// A group whose first connection is relayed on both sides, and what follows from the RNICs.
pub(super) fn established(
    client_nics: u8,
    server_nics: u8,
) -> (Pair, GroupId, GroupId, [ConnectionId; 2]) {
    let mut pair = Pair::new(client_nics, server_nics);
    let (client, server) = pair.first_contact();
    let connections = [client.joined.connection, server.joined.connection];
    let (client_group, server_group) = (client.group, server.group);
    let Contact { joined, .. } = client;
    pair.client.groups.hand_over(joined.connection, (), joined.rmbe, None, false);
    let Contact { joined, .. } = server;
    pair.server.groups.hand_over(joined.connection, (), joined.rmbe, None, false);
    pair.settle();
    (pair, client_group, server_group, connections)
}

/// Two RNICs on each side: a host that loses one of them must have the other in use already.
// RFC 7609 2.2 #1: survive the loss of a link
// RFC 7609 2.2 #4: same RMBs on all links
// RFC 7609 2.2.1 #4: become symmetric with two RNICs each
// RFC 7609 2.2.3 #1: set up further links by LLC
// RFC 7609 2.1 #3: one RToken per RMB and link
// RFC 7609 2.1 #6: one remote peer per RMB
// RFC 7609 3.5.1.6 #2: offer link over second RNIC
// RFC 7609 3.5.1.6.1 #5: answer second RNIC with second RNIC
#[test]
fn two_rnics_on_each_side_make_a_symmetric_group() {
    let (pair, client, server, _) = established(2, 2);
    for (host, group) in [(&pair.client, client), (&pair.server, server)] {
        assert_eq!(symmetry(host, group), Symmetry::Symmetric);
        let group = host.groups.at(group).unwrap();
        let mut ports: Vec<_> = group.links.iter().map(|link| link.port).collect();
        ports.sort_unstable();
        assert_eq!(ports, [PortId(0), PortId(1)]);
    }
}

/// One RNIC here and two there: redundancy as far as it goes.
// RFC 7609 2.2.1 #3: support asymmetric links
// RFC 7609 2.2 #3: take part with a single RNIC
// RFC 7609 2.2.1 #1: run a group with one link
// RFC 7609 2.2.1 #2: no parallel links between same RNICs
// RFC 7609 3.5.1.6.1 #2: reject ADD LINK for parallel link
// RFC 7609 3.5.1.6.1 #6: single RNIC accepts an asymmetric link
#[test]
fn fewer_rnics_make_asymmetric_and_single_groups() {
    let (pair, client, server, _) = established(1, 2);
    assert_eq!(symmetry(&pair.client, client), Symmetry::AsymmetricLocal);
    assert_eq!(symmetry(&pair.server, server), Symmetry::AsymmetricPeer);
    let (pair, client, server, _) = established(1, 1);
    assert_eq!(symmetry(&pair.client, client), Symmetry::Single);
    assert_eq!((links(&pair.client, client), links(&pair.server, server)), (1, 1));
}

/// An RNIC that fails takes no connection along; when it is back it is used again.
// RFC 7609 2.2 #1: survive the loss of a link
// RFC 7609 2.2.1 #5: replace an asymmetric link when possible
// RFC 7609 2.3 #3: move connections of a failed link
// RFC 7609 2.3 #4: move at once, send DELETE LINK
// RFC 7609 2.3 #5: client reports failure, server deletes link
// RFC 7609 2.3 #12: use a link that comes back
// RFC 7609 C.8 #2: timer for the second link
#[test]
fn connections_outlive_either_rnic() {
    let (mut pair, client, server, [near, far]) = established(2, 2);
    // A link that has served for a while is replaced at once, any other in due time.
    let a_while = smcr_proto::limits::RETRY_LINK + Duration::from_secs(5);
    for name in ["r0", "r1", "r0"] {
        pair.pass(a_while);
        pair.client.groups.rnic_down(pair.now, name, false).unwrap();
        pair.pass(Duration::from_secs(3));
        let other = if name == "r0" { PortId(1) } else { PortId(0) };
        assert_eq!(port(&pair.client, near), other, "{name} is down");
        // The server still has two, and makes the best of it.
        assert_eq!(symmetry(&pair.client, client), Symmetry::AsymmetricLocal);
        assert_eq!(symmetry(&pair.server, server), Symmetry::AsymmetricPeer);
        pair.client.groups.rnic_up(pair.now, name).unwrap();
        pair.pass(Duration::from_secs(3));
        assert_eq!(symmetry(&pair.client, client), Symmetry::Symmetric, "{name} is up");
        assert_eq!(symmetry(&pair.server, server), Symmetry::Symmetric);
    }
    assert!(pair.client.groups.member(near).is_some() && pair.server.groups.member(far).is_some());
    assert!(pair.client.failed.is_empty() && pair.server.failed.is_empty());
    assert_eq!(pair.client.groups.counts().links_failed_over, 3);
    assert_eq!(
        (links(&pair.client, client), links(&pair.server, server)),
        (2, 2),
        "none is left over"
    );
}

/// An RNIC of ours is down. The peer is not asked for links on it until it is back.
// RFC 7609 C.7.1 #36: announce unused RNIC again by timer
#[test]
fn no_link_is_asked_for_on_an_rnic_that_is_down() {
    for is_retired in [false, true] {
        let (mut pair, client, ..) = established(2, 1);
        if is_retired {
            pair.client.groups.retire_port(pair.now, PortId(1));
        } else {
            pair.client.groups.rnic_down(pair.now, "r1", false).unwrap();
        }
        pair.pass(Duration::from_secs(3));
        assert_eq!(links(&pair.client, client), 1);
        pair.stall(smcr_proto::limits::RETRY_LINK);
        let said = pair.client.says(pair.now);
        let asks = |llc: &Llc| matches!(llc, Llc::AddLink(notice) if !notice.reply);
        assert!(!said.iter().any(asks), "retired: {is_retired}, {said:?}");
    }
}

/// A rendezvous ends just after its link has failed: the connection follows those that were on the
/// link. It was reset, because the keys of the link were forgotten already, and an order without
/// keys took the place of the one that the others have.
// RFC 7609 2.3 #3: move connections of a failed link
#[test]
fn a_rendezvous_outlives_its_link() {
    let (mut pair, client, server, [near, far]) = established(2, 2);
    let now = pair.now;
    let link = pair.server.groups.member(far).unwrap().link;
    let accept = pair.server.groups.join(now, server, link, SIZE).unwrap();
    let link = pair.client.groups.member(near).unwrap().link;
    let confirm = pair.client.groups.join(now, client, link, SIZE).unwrap();
    let connection = confirm.connection;
    pair.client.groups.accept_offer(now, connection, &accept.offer).unwrap();
    // The peers have agreed to delete the link before the poller has left it.
    pair.client.moves_later = true;
    pair.client.groups.rnic_down(now, "r0", false).unwrap();
    pair.settle();
    pair.client.groups.hand_over(connection, (), confirm.rmbe, None, false);
    pair.settle();
    pair.client.catch_up(now);
    assert!(pair.client.failed.is_empty());
    assert_eq!([near, connection].map(|id| port(&pair.client, id)), [PortId(1); 2]);
}

/// A client's Confirm is on its way by TCP while the link that it names is deleted. The client
/// believes in SMC-R already: the connection goes on over the other link, and nobody else's element
/// is taken for its own. It was reset, however well the other link was.
// RFC 7609 C.1 #7: existing group: later failure breaks TCP
// RFC 7609 3.5.2.3 #1: check that client's element is free
// RFC 7609 2.3 #3: move connections of a failed link
#[test]
fn a_confirm_outlives_the_link_that_it_names() {
    let (mut pair, client, server, [near, far]) = established(2, 2);
    let now = pair.now;
    let named = pair.server.groups.member(far).unwrap().link;
    let accept = pair.server.groups.join(now, server, named, SIZE).unwrap();
    let link = pair.client.groups.member(near).unwrap().link;
    let confirm = pair.client.groups.join(now, client, link, SIZE).unwrap();
    pair.client.groups.accept_offer(now, confirm.connection, &accept.offer).unwrap();
    pair.server.groups.delete_link(now, named, false).unwrap();
    pair.settle();
    assert_eq!(links(&pair.server, server), 1, "both sides have deleted it");
    // The element of the first connection, as the link saw it.
    let taken = pair.server.groups.member(far).unwrap().peer.unwrap().rmbe_index;
    let conflict = Offer { rmbe_index: taken, ..confirm.offer };
    let groups = &mut pair.server.groups;
    assert_eq!(groups.accept_offer(now, accept.connection, &conflict), Ok(Taken::Awaited));
    let unknown = Offer { rkey: Rkey(confirm.offer.rkey.0 ^ 1), ..confirm.offer };
    let refused = groups.accept_offer(now, accept.connection, &unknown);
    assert_eq!(refused, Err(BadOffer::UnknownRmb));
    let noted = groups.accept_offer(now, accept.connection, &confirm.offer);
    assert_eq!(noted, Ok(Taken::Noted));
    groups.hand_over(accept.connection, (), accept.rmbe, None, false);
    pair.settle();
    let member = pair.server.groups.member(accept.connection).unwrap();
    let group = pair.client.groups.at(client).unwrap();
    let key = group.stock.key(&confirm.rmbe, PortId(1)).expect("a key with each RNIC");
    let peer = member.peer.expect("it was noted");
    assert_eq!((member.port, (peer.rkey, peer.rmb_address)), (PortId(1), key));
    assert!(pair.server.failed.is_empty() && pair.server.aborted.is_empty());
}

/// The other way round: a server is slow to hear that a link was deleted, and names it. The client
/// can still decline, and does: in a Confirm the link would mean nothing to the server.
#[test]
fn no_confirm_names_a_link_that_was_deleted() {
    let (mut pair, _client, server, [near, _]) = established(2, 2);
    let first = pair.server.groups.at(server).unwrap().links[0].id;
    let accept = pair.server.groups.join(pair.now, server, first, SIZE).unwrap();
    pair.client.moves_later = true;
    pair.client.groups.rnic_down(pair.now, "r0", false).unwrap();
    pair.settle();
    let link = pair.client.groups.member(near).unwrap().link;
    assert_eq!(port(&pair.client, near), PortId(0), "connections are leaving {link:?}");
    let named =
        pair.client.groups.named_by(pair.now, &accept.offer, false, ADDRESSES[1], PortId(0));
    assert_eq!(named, Err(Unnamed::LinkGone));
}

/// A server deletes a link and gives its number to the next one at once, while our poller is still
/// leaving the first. What the poller then reports of the first, and what an operator decides about
/// it, is no news of the second: that one went down with the other, and came again after minutes.
// RFC 7609 2.2.4 #1: unique link number in a group
#[test]
fn what_becomes_of_a_link_does_not_touch_the_next_one_of_its_number() {
    let broke = |pair: &mut Pair, old| {
        let cause = smcr_rnic::QpError::RetriesExceeded;
        pair.client.groups.link_broke(pair.now, old, cause);
    };
    let nonsense = |pair: &mut Pair, old| pair.client.groups.llc_received(pair.now, old, &[0; 44]);
    let deleted = |pair: &mut Pair, old| {
        pair.client.groups.delete_link(pair.now, old, false).expect("it is still there");
    };
    let events: [fn(&mut Pair, LinkId); 3] = [broke, nonsense, deleted];
    for (index, happens) in events.into_iter().enumerate() {
        let (mut pair, client, ..) = established(2, 2);
        let links_of = |pair: &Pair| -> Vec<_> {
            let links = pair.client.groups.at(client).unwrap().links.iter();
            links.map(|link| (link.id, link.number, link.is_alive())).collect()
        };
        let [(first, ..), (old, number, _)] = links_of(&pair)[..] else { panic!("two links") };
        let say = |pair: &mut Pair, llc: Llc| {
            pair.client.groups.llc_received(pair.now, first, &llc.encode());
            let _to_the_server = pair.client.says(pair.now);
        };
        pair.client.moves_later = true;
        let reason = DeleteReason::OPERATOR;
        let (reply, all, orderly, link) = (false, false, false, number);
        say(&mut pair, Llc::DeleteLink(DeleteLink { reply, all, orderly, link, reason }));
        let (gid, mac) = pair.server.groups.ports()[1].address().unwrap();
        let (reply, rejected, reason, qpn, psn) = (false, false, 0, Qpn(4_711), Psn(0));
        let mtu = Mtu::B1024;
        let offer = AddLink { reply, rejected, reason, mac, gid, qpn, link, mtu, psn };
        say(&mut pair, Llc::AddLink(offer));
        let [_, (same, _, false), (new, again, true)] = links_of(&pair)[..] else {
            panic!("{:?}", links_of(&pair))
        };
        assert!(same == old && new != old && again == number);
        happens(&mut pair, old);
        let said = pair.client.says(pair.now);
        assert!(said.is_empty(), "event {index}: {said:?}");
        assert!(links_of(&pair).contains(&(new, number, true)), "event {index}");
    }
}

/// The last RNIC takes the group along: its connections are reset, not left hanging.
// RFC 7609 4.8.3 #3: reset connections without any link
// RFC 7609 2.1 #6: one remote peer per RMB
#[test]
fn without_any_rnic_the_group_ends() {
    let (mut pair, client, _, _) = established(2, 2);
    pair.client.groups.rnic_down(pair.now, "r0", false).unwrap();
    pair.client.groups.rnic_down(pair.now, "r1", false).unwrap();
    pair.pass(Duration::from_secs(1));
    assert!(pair.client.events.contains(&Event::Ended(client)));
    assert!(!pair.client.failed.is_empty());
    let unknown = pair.client.groups.rnic_up(pair.now, "r7");
    assert_eq!(unknown, Err(OperateError::Unknown("RNIC named r7".to_owned())));
}

/// An operator who deletes a link in order wants nobody to notice.
// RFC 7609 2.3 #13: move connections without a failure
// RFC 7609 2.3 #14: say whether deletion is orderly
// RFC 7609 3.5.4 #5: ask server on operator's command
#[test]
fn an_orderly_delete_moves_connections_first() {
    for side in ["client", "server"] {
        let (mut pair, client, server, [near, far]) = established(2, 2);
        let (host, connection) =
            if side == "client" { (&mut pair.client, near) } else { (&mut pair.server, far) };
        let link = host.groups.member(connection).unwrap().link;
        host.groups.delete_link(pair.now, link, true).unwrap();
        pair.pass(Duration::from_secs(3));
        let host = if side == "client" { &pair.client } else { &pair.server };
        assert_ne!(host.groups.member(connection).unwrap().link, link, "by the {side}");
        assert_eq!((links(&pair.client, client), links(&pair.server, server)), (1, 1));
        assert!(pair.client.failed.is_empty() && pair.server.failed.is_empty());
    }
}

/// An operator takes an RNIC out of use in order while a first contact goes on over it. The order
/// was lost, and new connections went on to join the link there.
// RFC 7609 3.5.4 #5: ask server on operator's command
#[test]
fn an_rnic_that_goes_during_a_first_contact_has_no_link_afterwards() {
    for side in ["client", "server"] {
        for (name, nics) in [("r0", 2), ("r1", 2), ("r0", 1)] {
            let mut pair = Pair::new(nics, nics);
            let (client, server) = pair.begin_contact(Agreement::V1);
            let group = if side == "client" { client.group } else { server.group };
            while pair.groups_of(side).at(group).is_some_and(|it| it.links.len() < nics.into()) {
                assert!(pair.talk(), "its links come up");
            }
            let now = pair.now;
            let groups = pair.groups_of(side);
            assert!(!groups.at(group).unwrap().is_established());
            groups.rnic_down(now, name, true).unwrap();
            pair.settle();
            let Contact { joined, group: client } = client;
            pair.client.groups.hand_over(joined.connection, (), joined.rmbe, None, false);
            let Contact { joined, group: server } = server;
            pair.server.groups.hand_over(joined.connection, (), joined.rmbe, None, false);
            pair.pass(Duration::from_secs(3));
            let groups = pair.groups_of(side);
            let gone = if name == "r0" { PortId(0) } else { PortId(1) };
            let left = groups.at(group).into_iter().flat_map(|it| &it.links);
            assert!(left.clone().all(|link| link.port != gone), "{side} {name} of {nics}");
            assert_eq!(left.count(), usize::from(nics) - 1, "{side} {name} of {nics}");
            if nics == 2 {
                assert!(pair.client.failed.is_empty() && pair.server.failed.is_empty());
                assert_eq!((links(&pair.client, client), links(&pair.server, server)), (1, 1));
            }
        }
    }
}

/// Connections are spread over the links, so that two RNICs carry more than one.
// RFC 7609 2.2 #2: spread connections over active links
// RFC 7609 2.3 #1: treat all active links alike
// RFC 7609 2.3 #12: use a link that comes back
// RFC 7609 3.5.2.1 #6: server may choose another link
#[test]
fn connections_are_spread_over_links() {
    let (mut pair, _client, server, _) = established(2, 2);
    let mut held = Vec::new();
    for _ in 0..3 {
        let link = pair.server.groups.best_link(server).unwrap();
        held.push(pair.server.groups.join(pair.now, server, link, SIZE).unwrap());
    }
    let group = pair.server.groups.at(server).unwrap();
    let loads: Vec<_> = group.links.iter().map(|link| group.members_on(link.id)).collect();
    assert_eq!(loads, [2, 2]);
}

/// A rendezvous must not wait for memory: before the last element is taken the peer knows the next
/// RMB, on every link. What is idle stays for the next crowd, but not for ever, and what is in use
/// as long as it is.
// RFC 7609 3.5.5.2 #1: register RMBs on all links
// RFC 7609 3.5.5.2.1 #4: add RMBs ahead of need
// RFC 7609 3.5.2.1 #7: CONFIRM RKEY before Accept
// RFC 7609 3.5.2.2 #6: CONFIRM RKEY before Confirm
// RFC 7609 3.5.5.2.2 #1: delete only unused RMBs
// RFC 7609 3.5.5.2.2 #2: keep unused RMB for a while
#[test]
fn the_next_rmb_is_known_before_it_is_needed() {
    for side in ["client", "server"] {
        let (mut pair, client, server, _) = established(2, 2);
        let group = if side == "client" { client } else { server };
        let mut held = Vec::new();
        for _ in 0..10 {
            let now = pair.now;
            let groups = pair.groups_of(side);
            let link = groups.best_link(group).unwrap();
            held.push(groups.join(now, group, link, SIZE).expect("no wait"));
            pair.settle();
        }
        let rmbs = |pair: &mut Pair| pair.groups_of(side).at(group).unwrap().stock.rmbs();
        assert_eq!(rmbs(&mut pair), 3);
        let last = held.pop().unwrap();
        for joined in held {
            let now = pair.now;
            pair.groups_of(side).closed(now, joined.connection, Some(joined.rmbe), true);
        }
        pair.pass(Duration::from_secs(60));
        assert_eq!(rmbs(&mut pair), 3, "it stays a while");
        pair.pass(Duration::from_secs(240));
        assert_eq!(rmbs(&mut pair), 2, "one is in use");
        let now = pair.now;
        pair.groups_of(side).closed(now, last.connection, Some(last.rmbe), true);
        pair.pass(Duration::from_secs(300));
        assert_eq!(rmbs(&mut pair), 1);
    }
}

/// When a crowd comes, newcomers get smaller elements, and when it has left, larger ones. Nobody
/// waits for a size: what is there serves meanwhile.
#[test]
fn a_crowd_makes_elements_smaller_and_nobody_wait() {
    let (mut pair, client, _, _) = established(1, 1);
    let take = |pair: &mut Pair, count: usize| {
        let join = |_| {
            let (now, groups) = (pair.now, &mut pair.client.groups);
            let link = groups.best_link(client).unwrap();
            let joined = groups.join(now, client, link, RmbeSize::KIB_64);
            pair.settle();
            joined.expect("no wait").rmbe.capacity() >> 10
        };
        (0..count).map(join).collect::<Vec<_>>()
    };
    let crowd = |pair: &mut Pair, count: i32| {
        let shared = &mut pair.client.groups.shared;
        (0..count).for_each(|_| shared.connection_came(PortId(0)));
        (count..0).for_each(|_| shared.connection_went(PortId(0)));
    };
    // The RMB of the first contact has four elements of 16 KiB, one of which is taken.
    assert_eq!(take(&mut pair, 3), [16, 64, 64], "the first of full size were announced meanwhile");
    crowd(&mut pair, 600);
    assert_eq!(take(&mut pair, 3), [64, 64, 32], "what is there is used up first");
    crowd(&mut pair, 3000);
    assert_eq!(take(&mut pair, 2), [16, 16]);
    crowd(&mut pair, -3600);
    assert_eq!(take(&mut pair, 2), [32, 64]);
}

/// Where there is memory for small elements only, an RMB of such is announced, once; and when that
/// memory is taken, connections stay TCP.
#[test]
fn short_memory_is_good_for_smaller_elements() {
    let (mut pair, client, _, _) = established(1, 1);
    let groups = &mut pair.client.groups;
    // One element of 16 KiB is taken, three are home, and there are not 64 KiB left.
    groups.shared.budget.change(4 * 16_384 + 10_000);
    let link = groups.best_link(client).unwrap();
    let mut join = |now| groups.join(now, client, link, RmbeSize::KIB_64);
    let capacities: Vec<_> = (0..3).map(|_| join(pair.now).unwrap().rmbe.capacity()).collect();
    assert_eq!(capacities, [16_384; 3]);
    assert_eq!(join(pair.now).err(), Some(Refusal::NotYet), "one of 32 KiB is under way");
    assert_eq!(pair.client.groups.at(client).unwrap().stock.rmbs(), 2);
    pair.settle();
    let refused = pair.client.groups.join(pair.now, client, link, RmbeSize::KIB_64).err();
    assert_eq!(refused, Some(Refusal::NoMemory));
}

/// A group that is over leaves nothing registered with any RNIC: memory that stayed open to writes
/// would be somebody else's tomorrow. (Closing a domain with something in it panics.)
// RFC 7609 2.1 #6: one remote peer per RMB
// RFC 7609 3.5.4 #8: client drops deleted group at once
#[test]
fn a_group_that_ends_leaves_every_rnic() {
    let (mut pair, client, server, [near, far]) = established(2, 2);
    pair.client.groups.shut_down(pair.now, client, DeleteReason::OPERATOR);
    pair.pass(Duration::from_secs(1));
    assert!(pair.server.events.contains(&Event::Ended(server)));
    for (host, connection) in [(&mut pair.client, near), (&mut pair.server, far)] {
        let place = host.relayed.iter().position(|(id, _)| *id == connection).unwrap();
        let (_, rmbe) = host.relayed.swap_remove(place);
        host.groups.closed(pair.now, connection, Some(rmbe), true);
        assert!(host.groups.is_empty());
    }
}

/// A server names a link that has just failed at its client. The connection stays TCP; the group,
/// which has another link, and all who are on it go on. (Said to be out of sync, a server gives its
/// group up.)
// RFC 7609 C.4 #1: S only without a known group
// RFC 7609 2.3 #3: move connections of a failed link
#[test]
fn a_link_that_has_just_gone_does_not_cost_the_group() {
    let (mut pair, client, server, [near, _]) = established(2, 2);
    let first = pair.server.groups.at(server).unwrap().links[0].id;
    let accept = pair.server.groups.join(pair.now, server, first, SIZE).unwrap();
    pair.client.groups.rnic_down(pair.now, "r0", false).unwrap();
    pair.settle();
    assert_eq!(
        pair.client.groups.named_by(pair.now, &accept.offer, false, ADDRESSES[1], PortId(0)),
        Err(Unnamed::LinkGone)
    );
    assert!(pair.client.groups.at(client).unwrap().is_established());
    assert!(pair.client.groups.member(near).is_some());
}

/// RoCE crosses no router: an RNIC of another LAN would be offered, and never come up.
// RFC 7609 3.5.5.1.1 #5: offer RNIC only on its LAN
// RFC 7609 2 #2: keep a group in one VLAN
#[test]
fn an_rnic_of_another_lan_is_not_offered() {
    let mut pair = Pair::new(2, 2);
    let lan = Lan { pnet: "other".to_owned(), ..Lan::default() };
    pair.server.groups.shared.put_on(PortId(1), lan);
    let (_client, server) = pair.first_contact();
    pair.settle();
    pair.server.groups.rnic_down(pair.now, "r1", false).unwrap();
    pair.server.groups.rnic_up(pair.now, "r1").unwrap();
    pair.pass(Duration::from_secs(60));
    let group = pair.server.groups.at(server.group).unwrap();
    assert!(group.links.iter().all(|link| link.port == PortId(0)));
}

/// Not every port has a network device that could lose its carrier. What its RNIC says must move
/// connections just as well, and bring links back.
#[test]
fn an_rnic_that_says_that_it_is_down_has_no_links_until_it_is_back() {
    let (mut pair, _client, server, _) = established(2, 2);
    pair.network.change_odds(Odds { port_events: Chance::percent(100), ..Odds::CALM });
    let links_there = |pair: &Pair| {
        let group = pair.server.groups.at(server).unwrap();
        group.links.iter().filter(|link| link.port == PortId(1)).count()
    };
    assert_eq!(links_there(&pair), 1);
    pair.network.port_down(gid(2, 1));
    assert_eq!(pair.server.groups.hear_rnics(pair.now), []);
    assert!(!pair.server.groups.ports()[1].is_up());
    pair.pass(Duration::from_secs(60));
    assert_eq!(links_there(&pair), 0);

    pair.network.port_up(gid(2, 1));
    assert_eq!(pair.server.groups.hear_rnics(pair.now), []);
    assert!(pair.server.groups.ports()[1].is_up());
    pair.pass(Duration::from_secs(60));
    assert_eq!(links_there(&pair), 1);
}

/// A client has two RMBs in one memory region: one rkey opens both. The server writes on another
/// link than the one that the Confirm names, and into the RMB that it names: it wrote into the one
/// that was announced last.
// RFC 7609 2.1 #3: one RToken per RMB and link
#[test]
fn an_element_is_in_the_rmb_that_was_named() {
    let (mut pair, _client, server, _) = established(2, 2);
    let (now, groups) = (pair.now, &mut pair.server.groups);
    let [first, second] = &groups.at(server).unwrap().links[..] else { panic!("two links") };
    let (first, second, number) = (first.id, second.id, second.number);
    let offer = pair.client.groups.iter().next().unwrap().1.links[0].ours;
    for (here, there) in [(0x7000, 0x1_7000), (0x9000, 0x1_9000)] {
        let elsewhere = RkeyOnLink { link: number, rkey: Rkey(0x88), address: there };
        let confirm = ConfirmRkey {
            reply: false,
            negative: false,
            retry: false,
            other_links: 1,
            rkey: Rkey(0x77),
            address: here,
            others: [elsewhere, RkeyOnLink::default()],
        };
        groups.llc_received(now, first, &Llc::ConfirmRkey(confirm).encode());
    }
    let accept = groups.join(now, server, second, SIZE).unwrap();
    let (rkey, rmb_address, rmbe_index) = (Rkey(0x77), 0x7000, 1);
    let (gid, mac, qpn) = (offer.gid, offer.mac, offer.qpn);
    let confirm = Offer { gid, mac, qpn, rkey, rmb_address, rmbe_index, ..accept.offer };
    assert_eq!(groups.accept_offer(now, accept.connection, &confirm), Ok(Taken::Noted));
    let peer = groups.member(accept.connection).unwrap().peer.expect("it was noted");
    assert_eq!((peer.rkey, peer.rmb_address), (Rkey(0x88), 0x1_7000));
}

/// The client has a better link than the one that the server named, and says so in its Confirm:
/// each side writes on the link of its own choice.
// RFC 7609 3.5.2.3 #3: client may choose another link
// RFC 7609 3.5.2.3 #2: check that Confirm names active link
#[test]
fn each_side_chooses_the_link_that_it_writes_on() {
    let (mut pair, client, server, _) = established(2, 2);
    let [here, there] = [&pair.client, &pair.server].map(|host| {
        let group = host.groups.iter().next().unwrap().1;
        [0, 1].map(|port| group.links.iter().find(|link| link.port == PortId(port)).unwrap().id)
    });
    let accept = pair.server.groups.join(pair.now, server, there[0], SIZE).unwrap();
    let confirm = pair.client.groups.join(pair.now, client, here[1], SIZE).unwrap();
    pair.client.groups.accept_offer(pair.now, confirm.connection, &accept.offer).unwrap();
    pair.server.groups.accept_offer(pair.now, accept.connection, &confirm.offer).unwrap();
    for (host, joined, theirs) in
        [(&pair.server, &accept, &confirm), (&pair.client, &confirm, &accept)]
    {
        let member = host.groups.member(joined.connection).unwrap();
        let peer = member.peer.expect("it was accepted");
        assert_eq!(peer.rmbe_index, theirs.offer.rmbe_index);
        assert_ne!(peer.rkey, theirs.offer.rkey, "what the RMB is called on our own link");
    }
}
