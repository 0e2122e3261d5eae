//! Who is believed what about a link group: two hosts, and strangers who have learned all about
//! them.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::Offer;
use smcr_proto::{Gid, PeerId, Rkey, RmbeSize};
use smcr_rnic::Exhausted;

use super::rig::{ADDRESSES, Contact, Pair, SIZE, gid};
use crate::config::{Config, Peers};
use crate::groups::{BadOffer, Event, Joined, Lan, Peer, PortId, Taken, Unnamed};

const STRANGER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 66));

/// A group with a connection on it, at both hosts.
fn founded() -> (Pair, Contact, Contact) {
    let mut pair = Pair::new(1, 1);
    let (client, server) = pair.first_contact();
    (pair, client, server)
}

/// The next connection in the group of the server, as far as the Accept.
fn accept(pair: &mut Pair, server: &Contact) -> Joined {
    let link = pair.server.groups.best_link(server.group).unwrap();
    pair.server.groups.join(pair.now, server.group, link, SIZE).unwrap()
}

/// A third host sent the Proposal of another from its own address, was told the keys of that
/// host's group, called it out of sync, and all connections of the other were reset.
// RFC 7609 3.5.1.2 #5: find group by id and address
// RFC 7609 3.5.2.1 #2: find existing group by address too
#[test]
fn a_group_belongs_to_the_address_that_founded_it() {
    let (mut pair, _client, server) = founded();
    let groups = &mut pair.server.groups;
    let peer = groups.at(server.group).unwrap().peer;
    assert_eq!(peer.source, ADDRESSES[0]);
    assert_eq!(groups.joinable(PortId(0), peer), Some(server.group));
    let forged = Peer { source: STRANGER, ..peer };
    assert_eq!(groups.joinable(PortId(0), forged), None);
    // It gets a group of its own; and who waits for a first contact waits for his own.
    let own = groups.open(pair.now, PortId(0), Role::Server, forged).unwrap();
    assert_eq!(groups.founding(PortId(0), forged), Some(own));
    assert_eq!(groups.founding(PortId(0), peer), None);
    assert_eq!(groups.counts().foreign_claims, 1);

    groups.called_out_of_sync(pair.now, server.group, STRANGER);
    assert_eq!((groups.counts().foreign_claims, groups.counts().out_of_sync), (2, 0));
    assert_eq!(groups.joinable(PortId(0), peer), Some(server.group));
}

/// A Decline with S costs nothing while the links answer: connections on them are well. But the
/// peer does not know the group, so no more are offered it, and it ends with the last.
// RFC 7609 A.2.5 #3: test the links upon S
#[test]
fn a_group_that_answers_outlives_being_called_out_of_sync() {
    let (mut pair, client, server) = founded();
    let peer = pair.server.groups.at(server.group).unwrap().peer;
    let declined = accept(&mut pair, &server);
    pair.server.groups.called_out_of_sync(pair.now, server.group, peer.source);
    pair.server.groups.leave(pair.now, declined.connection, declined.rmbe);
    pair.pass(Duration::from_secs(60));
    assert_eq!(pair.server.failed, []);
    assert!(pair.server.groups.member(server.joined.connection).is_some());
    assert!(pair.client.groups.member(client.joined.connection).is_some());
    assert_eq!(pair.server.groups.joinable(PortId(0), peer), None);
    assert_eq!(pair.server.groups.counts().out_of_sync, 1);

    let Joined { connection, rmbe, .. } = server.joined;
    pair.server.groups.closed(pair.now, connection, Some(rmbe), true);
    pair.settle();
    assert!(pair.server.groups.is_empty());
}

/// A peer that has lost its group does not answer on its links either: whoever is on the group
/// learns of it within the time of an answer, and not when something is next sent.
// RFC 7609 A.2.5 #3: test the links upon S
// RFC 7609 C.4 #2: go on as TCP after S
#[test]
fn a_group_that_is_out_of_sync_ends_where_nobody_answers() {
    let (mut pair, _client, server) = founded();
    let peer = pair.server.groups.at(server.group).unwrap().peer;
    let declined = accept(&mut pair, &server);
    pair.server.groups.called_out_of_sync(pair.now, server.group, peer.source);
    pair.server.groups.leave(pair.now, declined.connection, declined.rmbe);
    assert_eq!(pair.server.groups.joinable(PortId(0), peer), None, "nobody else runs into it");
    pair.stall(Duration::from_millis(2_100));
    let _lost = pair.server.says(pair.now);
    assert!(!pair.server.failed.is_empty());
    pair.settle();
    assert!(pair.server.events.contains(&Event::Ended(server.group)));
}

/// With nobody else on it, a group that is out of sync is of no use.
// RFC 7609 A.2.5 #3: test the links upon S
#[test]
fn an_empty_group_that_is_out_of_sync_ends_at_once() {
    let (mut pair, _client, server) = founded();
    let Contact { group, joined: Joined { connection, rmbe, .. } } = server;
    pair.server.groups.closed(pair.now, connection, Some(rmbe), true);
    let link = pair.server.groups.best_link(group).unwrap();
    let declined = pair.server.groups.join(pair.now, group, link, SIZE).unwrap();
    pair.server.groups.called_out_of_sync(pair.now, group, ADDRESSES[0]);
    pair.server.groups.leave(pair.now, declined.connection, declined.rmbe);
    pair.pass(Duration::from_secs(31));
    assert!(pair.server.groups.is_empty());
}

/// A server at another address names a link of a group with somebody else, and an element of its
/// own choice: a client that joined would write there by that link, and lose it for all. A server
/// with several addresses is known by what only it was told: an RMB that was announced on the link.
// RFC 7609 3.5.2.2 #1: recognize later contact by Accept
#[test]
fn a_server_at_another_address_proves_that_it_is_the_same() {
    let (mut pair, client, server) = founded();
    let next = accept(&mut pair, &server);
    let named = |pair: &mut Pair, offer: &Offer, source| {
        pair.client
            .groups
            .named_by(pair.now, offer, false, source, PortId(0))
            .map(|(group, _)| group)
    };
    assert_eq!(named(&mut pair, &next.offer, ADDRESSES[1]), Ok(client.group));
    assert_eq!(named(&mut pair, &next.offer, STRANGER), Ok(client.group), "it knows the RMB");
    for forged in [
        Offer { rkey: Rkey(next.offer.rkey.0 ^ 1), ..next.offer },
        Offer { rmb_address: next.offer.rmb_address + 4_096, ..next.offer },
    ] {
        assert_eq!(named(&mut pair, &forged, STRANGER), Err(Unnamed::NotTheirs));
    }
    assert_eq!(pair.client.groups.counts().foreign_claims, 2);
}

/// A server that is on two VLANs, or somebody who pretends to be, names a link of another one. A
/// stream that crossed over would be seen by those whom it was kept from.
// RFC 7609 3.5.1.3 #1: tell new links from existing ones
#[test]
fn a_connection_of_one_vlan_joins_no_link_of_another() {
    let mut pair = Pair::new(2, 2);
    for (port, vlan) in [(0, 10), (1, 20)] {
        let lan = Lan { vlan: Some(vlan), ..Lan::default() };
        pair.client.groups.shared.put_on(PortId(port), lan);
    }
    let (client, server) = pair.first_contact();
    let next = accept(&mut pair, &server);
    let named = [0, 1].map(|proposed| {
        let (now, source) = (pair.now, ADDRESSES[1]);
        pair.client.groups.named_by(now, &next.offer, false, source, PortId(proposed))
    });
    assert_eq!(named[0].map(|(group, _)| group), Ok(client.group));
    assert_eq!(named[1], Err(Unnamed::LinkGone));
    // Nor does the group itself grow a link there.
    pair.pass(Duration::from_secs(60));
    let group = pair.client.groups.at(client.group).unwrap();
    assert!(group.links.iter().all(|link| link.port == PortId(0)));
}

/// A client that begins first contacts, each in another name, took every queue pair there is. It
/// gets a few; what it has without a connection goes for them, and nobody else's does.
#[test]
fn a_client_has_few_groups_that_carry_nothing() {
    let (mut pair, _client, server) = founded();
    let Contact { group, joined: Joined { connection, rmbe, .. } } = server;
    let peer = pair.server.groups.at(group).unwrap().peer;
    let now = pair.now;
    let begin = |pair: &mut Pair, source, name| {
        let peer = Peer { id: PeerId([name; 8]), gid: Gid([name; 16]), source, ..peer };
        pair.server.groups.open(now, PortId(0), Role::Server, peer)
    };
    // Its connection is not relayed yet, so this one counts, too.
    for name in 100..115 {
        assert!(begin(&mut pair, ADDRESSES[0], name).is_ok(), "{name}");
    }
    assert_eq!(begin(&mut pair, ADDRESSES[0], 115), Err(Exhausted));
    assert!(begin(&mut pair, STRANGER, 116).is_ok(), "somebody else");
    assert_eq!(pair.server.groups.counts().crowded_sources, 1);
    // An idle group is of less use than a new one.
    pair.server.groups.closed(pair.now, connection, Some(rmbe), true);
    assert!(begin(&mut pair, ADDRESSES[0], 117).is_ok());
    pair.settle();
    assert!(pair.server.groups.at(group).is_none());
    assert_eq!(pair.server.groups.counts().crowded_sources, 2);
}

/// A connection in use shows that its peer is one: it does not count against it.
#[test]
fn a_group_with_a_connection_is_no_spare_one() {
    let (mut pair, _client, server) = founded();
    let Contact { group, joined: Joined { connection, rmbe, .. } } = server;
    let peer = pair.server.groups.at(group).unwrap().peer;
    pair.server.groups.hand_over(connection, (), rmbe, None, false);
    for name in 100..116 {
        let peer = Peer { id: PeerId([name; 8]), gid: Gid([name; 16]), ..peer };
        assert!(pair.server.groups.open(pair.now, PortId(0), Role::Server, peer).is_ok());
    }
}

/// How much may be on its way to a peer follows from how large it says its element is: half a
/// gigabyte is not believed.
#[test]
fn an_element_that_is_too_large_is_refused() {
    let (mut pair, client, server) = founded();
    let next = accept(&mut pair, &server);
    let theirs = pair.client.groups.best_link(client.group).unwrap();
    let confirm = pair.client.groups.join(pair.now, client.group, theirs, SIZE).unwrap();
    let mut take = |notation| {
        let offer = Offer { rmbe_size: RmbeSize::from_notation(notation), ..confirm.offer };
        pair.server.groups.accept_offer(pair.now, next.connection, &offer)
    };
    for notation in [13, 15] {
        assert_eq!(take(notation), Err(BadOffer::TooLarge), "{notation}");
    }
    assert_eq!(take(12), Ok(Taken::Noted));
}

/// Whom the operator admits, by the addresses of RNICs.
fn only(gids: &[Gid]) -> Peers {
    let gids: Vec<_> = gids.iter().map(|gid| format!("'{}'", gid.to_ip())).collect();
    let gids = gids.join(", ");
    let listener = "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n";
    Config::parse(&format!("{listener}gids=[{gids}]"), "a.toml").unwrap().listeners[0].peers.clone()
}

/// A peer that was admitted for one RNIC names another in ADD LINK or its answer: a host that
/// nobody listed would get our packets, and could be handed every connection of the group.
#[test]
fn a_further_link_leads_to_no_rnic_that_is_not_listed() {
    for side in ["client", "server"] {
        let (ours, theirs) = if side == "client" { (0, 2) } else { (1, 1) };
        for (listed, links) in
            [(vec![gid(theirs, 0)], 1), (vec![gid(theirs, 0), gid(theirs, 1)], 2)]
        {
            let mut pair = Pair::new(2, 2);
            pair.admitted[ours] = only(&listed);
            let (client, server) = pair.first_contact();
            let group = if side == "client" { client.group } else { server.group };
            let groups = pair.groups_of(side);
            let up = groups.at(group).unwrap().links.iter().filter(|link| link.is_alive()).count();
            let refused = groups.counts().links_not_listed > 0;
            assert_eq!((up, refused), (links, links == 1), "{side} {listed:?}");
        }
    }
}

/// A listener with a list of its own does not use a group whose links lead elsewhere.
#[test]
fn a_connection_uses_no_group_that_leads_to_others_than_its_listener_lists() {
    let mut pair = Pair::new(2, 2);
    let (_client, server) = pair.first_contact();
    let groups = &mut pair.server.groups;
    assert!(!groups.admit(server.group, &only(&[gid(1, 0)])), "its second link is not listed");
    assert!(groups.admit(server.group, &only(&[gid(1, 0), gid(1, 1)])));
    assert!(!groups.admit(server.group, &only(&[gid(1, 1)])));
}
