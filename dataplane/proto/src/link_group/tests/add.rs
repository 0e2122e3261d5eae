//! Links that are added: how many, how joined, under which number, and when it is tried again.

use std::collections::BTreeSet;
use std::vec::Vec;

use super::hosts::{Hosts, port};
use super::rkeys::announce;
use super::*;
use crate::link_group::openings::OPENING_EVERY;

/// The offers of the server that arrived, and what became of them.
fn offers(hosts: &Hosts) -> Vec<(LinkNumber, bool)> {
    let answer = |(_, _, llc): &(Role, LinkNumber, Llc)| {
        let Llc::AddLink(add) = llc else { return None };
        add.reply.then_some((add.link, !add.rejected))
    };
    hosts.seen.iter().filter_map(answer).collect()
}

/// No byte of an application flows before the second link is up: the first one may fail at any
/// moment, and no other could take over.
// RFC 7609 2.2.3 #1: set up further links by LLC
// RFC 7609 3.5.1.6 #1: try second link before data
// RFC 7609 3 #3: confirm a new link before data
// RFC 7609 A.3.2 #12: ADD LINK right after first link
// RFC 7609 C.2 #1: may decline until CONFIRM LINK is sent
// RFC 7609 C.2 #2: fall back until ADD LINK
// RFC 7609 C.3 #1: server: no fallback after ADD LINK
// RFC 7609 C.3 #2: client: no fallback after ADD LINK reply
#[test]
fn connections_wait_for_the_second_link() {
    let mut hosts = Hosts::new(&[1, 2], &[101, 102], 2);
    // Before CONFIRM LINK has arrived, and when it is answered.
    for role in [Role::Server, Role::Client] {
        hosts.run_until(|from, llc| from == role && matches!(llc, Llc::ConfirmLink(_)));
        assert!(hosts.server.group.may_decline(T0) && hosts.client.group.may_decline(T0));
    }
    hosts.run_until(|from, llc| from == Role::Server && matches!(llc, Llc::AddLink(_)));
    assert!(hosts.server.group.is_committed() && !hosts.client.group.is_committed());
    assert!(!hosts.server.group.may_decline(T0) && hosts.client.group.may_decline(T0));
    assert_eq!(hosts.now, T0, "Linux waits two seconds for it, and serves nobody meanwhile");
    hosts.run_until(|from, llc| from == Role::Client && matches!(llc, Llc::AddLink(_)));
    assert!(hosts.client.group.is_committed(), "the server cannot go back to TCP any more");
    assert!(!hosts.client.group.may_decline(T0));
    let is_last = |from, llc: &Llc| {
        let Llc::ConfirmLink(confirm) = llc else { return false };
        from == Role::Client && confirm.link == SECOND_LINK
    };
    hosts.run_until(is_last);
    assert!(!hosts.server.group.is_established());
    assert!(!hosts.server.told.contains(&Action::LinkConfirmed(LINK)));
    hosts.run();
    assert!(hosts.server.group.is_established() && hosts.client.group.is_established());
}

/// A client that rejects the second link goes on by RDMA at once: it must not decline any more.
// RFC 7609 C.3 #2: client: no fallback after ADD LINK reply
#[test]
fn a_rejection_commits() {
    let mut client = client_of_a_quiet_server();
    drain(&mut client);
    client.handle_llc(T0, LINK, &add_link()).unwrap();
    assert!(!client.is_committed());
    drain(&mut client);
    client.link_refused(T0, SECOND_LINK, NoQueuePair::NoAlternatePath);
    assert!(client.is_committed());
}

/// Both sides say how many links they want, once; the smaller number counts. A client that says
/// nothing leaves it to the server.
// RFC 7609 2.2.2 #1: at most eight symmetric links
// RFC 7609 2.2.2 #2: support at least two links
// RFC 7609 2.2.2 #3: link limit between 2 and 8
// RFC 7609 2.2.2 #4: agree limit in first CONFIRM LINK
// RFC 7609 2.2.2 #5: server always states its limit
// RFC 7609 2.2.2 #6: client may omit its limit
// RFC 7609 2.2.2 #7: client limit within the server's
// RFC 7609 2.2.2 #8: use the smaller of both limits
// RFC 7609 A.3.1 #5: link limit at byte 34
#[test]
fn the_smaller_limit_counts() {
    for (server, client, agreed) in [(8, 8, 8), (8, 3, 3), (4, 8, 4), (2, 0, 2), (200, 99, 8)] {
        let of = |side: Setup, max_links| Setup { max_links, ..side };
        let mut pair = Pair::new();
        pair.server = LinkGroup::new_server(T0, of(setup(8, 64), server), LINK);
        pair.server.link_connected(T0, LINK);
        pair.client = LinkGroup::new_client(T0, of(setup(64, 8), client));
        pair.run();
        let said = |role| {
            pair.wire.iter().find_map(|(from, llc)| {
                let Llc::ConfirmLink(confirm) = llc else { return None };
                (*from == role).then_some(confirm.max_links)
            })
        };
        assert_eq!(said(Role::Server), Some(server.clamp(2, 8)));
        assert!(said(Role::Client).is_some_and(|limit| limit <= server.clamp(2, 8)));
        assert_eq!((pair.server.max_links(), pair.client.max_links()), (agreed, agreed));
    }
    for (silent, agreed) in [(0, 6), (1, 6), (9, 6), (2, 2)] {
        let mut server = LinkGroup::new_server(T0, Setup { max_links: 6, ..setup(8, 64) }, LINK);
        server.link_connected(T0, LINK);
        let reply = ConfirmLink { reply: true, max_links: silent, ..confirm_link() };
        server.handle_llc(T0, LINK, &Llc::ConfirmLink(reply)).unwrap();
        assert_eq!(server.max_links(), agreed);
    }
}

/// No link beyond the agreed number is added for further RNICs, whichever side reports them.
// RFC 7609 2.2.2 #9: client requests no link beyond limit
// RFC 7609 2.2.2 #10: server adds no link beyond limit
// RFC 7609 3.5.5.1.1 #4: offer no link beyond limit
// RFC 7609 3.5.5.1.2 #3: may add link despite redundancy
// RFC 7609 3.5.5.1.2 #4: ignore client's ADD LINK at limit
// RFC 7609 3.5.5.1.2 #5: client expects no ADD LINK answer
#[test]
fn nobody_exceeds_the_limit() {
    let mut hosts = Hosts::established(&[1, 2, 3], &[101, 102, 103], 2);
    let now = hosts.now;
    hosts.client.group.want_link(now, port(103));
    hosts.server.group.want_link(now, port(3));
    hosts.run();
    assert!(hosts.seen.is_empty());
    // A client that does not know better is ignored, and a server that does not is refused.
    hosts.tell(Role::Server, LINK, add_link());
    assert!(hosts.flying(Role::Server).is_empty());
    let Llc::AddLink(offer) = add_link() else { unreachable!() };
    let beyond = AddLink { link: LinkNumber(9), ..offer };
    hosts.tell(Role::Client, LINK, Llc::AddLink(beyond));
    let answer = AddLink { reply: true, rejected: true, reason: 1, ..beyond };
    assert_eq!(hosts.flying(Role::Client), [(LINK, Llc::AddLink(answer))]);
    // And a client without an answer waits for nothing: its links live on.
    hosts.lose(Role::Client);
    hosts.sleep(25);
    assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (2, 2));
}

/// A client's new RNIC makes a third link where three were agreed on; data of the other two flows
/// on meanwhile.
// RFC 7609 A.3.2 #11: client's ADD LINK is a request
// RFC 7609 3.5.5.1.1 #1: offer link when resources appear
// RFC 7609 3.5.5.1.1 #3: data goes on during ADD LINK
// RFC 7609 3.5.5.1.2 #1: client announces a new RNIC
// RFC 7609 3.5.5.1.2 #3: may add link despite redundancy
// RFC 7609 3.3 #7: answer ADD LINK over another link
// RFC 7609 2.3 #1: treat all active links alike
// RFC 7609 2.3 #12: use a link that comes back
#[test]
fn a_new_rnic_of_the_client_gets_a_link() {
    let mut hosts = Hosts::established(&[1, 2, 3], &[101, 102], 3);
    hosts.client.ports.insert(103);
    hosts.client.group.want_link(hosts.now, port(103));
    hosts.act();
    let [(LINK, Llc::AddLink(notice))] = hosts.flying(Role::Client)[..] else {
        panic!("{:?}", hosts.flying(Role::Client));
    };
    assert_eq!((notice.gid, notice.mac, notice.reply), (port(103).0, port(103).1, false));
    while let Some(wire) = hosts.wires.keys().next().copied() {
        hosts.deliver(wire);
        hosts.act();
        assert!(hosts.server.up().is_superset(&BTreeSet::from([LINK, SECOND_LINK])));
    }
    assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (3, 3));
    assert_eq!(hosts.server.group.symmetry(), Symmetry::Symmetric);
}

/// An RNIC that comes up while a link is being added is not forgotten.
// RFC 7609 3.5.5.1.2 #1: client announces a new RNIC
// RFC 7609 3.5.5.3.1 #2: ignore client's crossing ADD LINK
#[test]
fn a_port_is_told_of_when_the_server_has_time() {
    let mut hosts = Hosts::established(&[1, 2, 3], &[101, 102, 103], 4);
    hosts.server.group.want_link(hosts.now, port(3));
    hosts.run_until(|from, llc| from == Role::Client && matches!(llc, Llc::AddLink(_)));
    hosts.server.ports.insert(4);
    hosts.client.ports.insert(104);
    hosts.client.group.want_link(hosts.now, port(104));
    hosts.run();
    hosts.sleep(20);
    assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (4, 4));
}

/// Two RNICs of the client come up together. The server ignores the second notice, because it is
/// adding a link for the first. The client never told of the second RNIC again.
// RFC 7609 3.5.5.1.2 #1: client announces a new RNIC
// RFC 7609 3.5.5.3.1 #2: ignore client's crossing ADD LINK
#[test]
fn two_ports_that_come_up_together_get_links() {
    let mut hosts = Hosts::established(&[1, 2, 3, 4], &[101, 102], 4);
    for number in [103, 104] {
        hosts.client.ports.insert(number);
        hosts.client.group.want_link(hosts.now, port(number));
    }
    hosts.run();
    assert!(hosts.server.up().len() >= 3, "one is added at once");
    hosts.sleep(20);
    assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (4, 4));
}

/// Three come up during the first contact. Each is told of, whichever of them the links go through.
// RFC 7609 3.5.5.1.2 #1: client announces a new RNIC
#[test]
fn ports_that_come_up_during_a_first_contact_get_links() {
    let mut hosts = Hosts::new(&[1, 2, 3, 4], &[101], 4);
    hosts.run_until(|from, llc| from == Role::Server && matches!(llc, Llc::AddLink(_)));
    for number in [102, 103, 104] {
        hosts.client.ports.insert(number);
        hosts.client.group.want_link(hosts.now, port(number));
    }
    hosts.run();
    hosts.sleep(40);
    assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (4, 4));
}

/// A server without a spare RNIC does not answer a client's ADD LINK, and the client does not
/// repeat it all the time.
// RFC 7609 3.5.5.1.2 #3: may add link despite redundancy
// RFC 7609 3.5.5.1.2 #5: client expects no ADD LINK answer
#[test]
fn a_port_is_told_of_once_in_a_while() {
    let mut hosts = Hosts::established(&[1, 2], &[101, 102, 103], 3);
    hosts.client.group.want_link(hosts.now, port(103));
    for rmb in 1..5 {
        announce(&mut hosts, Role::Client, rmb);
        hosts.run();
    }
    let is_notice = |(from, _, llc): &&(Role, LinkNumber, Llc)| {
        *from == Role::Client && matches!(llc, Llc::AddLink(one) if !one.reply)
    };
    assert_eq!(hosts.seen.iter().filter(is_notice).count(), 1);
    hosts.sleep(25);
    assert_eq!(hosts.seen.iter().filter(is_notice).count(), 2);
    assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (2, 2));
}

/// An RNIC of the client goes and comes back before anybody has dealt with the link it carried.
// RFC 7609 3.5.5.1.2 #1: client announces a new RNIC
// RFC 7609 3.5.5.3.2 #2: client's ADD LINK waits for DELETE LINK
// RFC 7609 C.8 #5: retry when client announces RNIC
#[test]
fn a_port_that_flaps_is_told_of() {
    let mut hosts = Hosts::established(&[1, 2], &[101, 102], 2);
    let now = hosts.now;
    hosts.client.group.link_broke(now, SECOND_LINK);
    hosts.client.group.want_link(now, port(102));
    hosts.run();
    assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (2, 2));
    assert_eq!(hosts.client.group.symmetry(), Symmetry::Symmetric);
}

/// Figure 6 and back: the only link that is left of an asymmetric group is like any other. If it
/// were deleted as soon as a second link comes up, the group would never have two.
// RFC 7609 2.2.1 #3: support asymmetric links
// RFC 7609 2.2.1 #4: become symmetric with two RNICs each
// RFC 7609 2.2.1 #7: state reason when deleting asymmetric link
// RFC 7609 2.2.2 #12: do not count the asymmetric link
#[test]
fn a_link_does_not_stay_asymmetric_alone() {
    for lost in [LINK, SECOND_LINK] {
        let mut hosts = Hosts::established(&[1, 2], &[101], 2);
        hosts.break_link(lost);
        hosts.run();
        for host in [&hosts.server, &hosts.client] {
            assert!(host.group.links().all(|view| !view.asymmetric), "{:?}", host.role);
        }
        hosts.client.ports.insert(102);
        hosts.client.group.want_link(hosts.now, port(102));
        hosts.run();
        hosts.sleep(25);
        for host in [&hosts.server, &hosts.client] {
            assert_eq!(host.group.symmetry(), Symmetry::Symmetric);
            assert!(!host.told.iter().any(|action| matches!(action, Action::VacateLink(_))));
        }
    }
}

/// Beside two links, a third one that shares an RNIC costs queue pairs and adds no redundancy.
// RFC 7609 2.2.1 #4: become symmetric with two RNICs each
// RFC 7609 2.2.2 #11: at most one asymmetric link
#[test]
fn an_asymmetric_link_is_for_groups_without_a_spare() {
    let mut hosts = Hosts::established(&[1, 2, 3], &[101, 102], 3);
    hosts.server.group.want_link(hosts.now, port(3));
    hosts.run();
    assert_eq!(offers(&hosts), [(LinkNumber(3), false)]);
    assert_eq!(hosts.server.group.symmetry(), Symmetry::Symmetric);
}

/// What the client makes of an offer is checked: a parallel link saves nobody when its RNIC fails,
/// and a second asymmetric one is not allowed. The client has to let go of it.
// RFC 7609 2.2.1 #2: no parallel links between same RNICs
// RFC 7609 2.2.2 #11: at most one asymmetric link
// RFC 7609 3.5.5.1.1 #2: never add second asymmetric link
// RFC 7609 C.7.1 #26: delete link that would be parallel
// RFC 7609 A.3.4 #8: DELETE LINK avoids the failed link
// RFC 7609 3.5.1.6.2 #1: free resources of rejected link
#[test]
fn answers_that_make_no_good_link_are_not_accepted() {
    // The client's RNIC of the first link, for an offer through the server's RNIC of that link.
    let mut parallel = Hosts::new(&[1], &[101], 2);
    parallel.run_until(|from, llc| from == Role::Server && matches!(llc, Llc::AddLink(_)));
    // The client's only RNIC a third time.
    let mut second = Hosts::established(&[1, 2, 3], &[101], 3);
    second.server.group.want_link(second.now, port(3));
    second.run_until(|from, llc| from == Role::Server && matches!(llc, Llc::AddLink(_)));
    for hosts in [&mut parallel, &mut second] {
        let [(on, Llc::AddLink(offer))] = hosts.flying(Role::Server)[..] else {
            panic!("{:?}", hosts.flying(Role::Server));
        };
        hosts.lose(Role::Server);
        let (gid, mac) = port(101);
        let answer = AddLink { reply: true, gid, mac, qpn: Qpn(99), ..offer };
        hosts.tell(Role::Server, on, Llc::AddLink(answer));
        let [(carrier, Llc::DeleteLink(delete))] = hosts.flying(Role::Server)[..] else {
            panic!("{:?}", hosts.flying(Role::Server));
        };
        assert_eq!((delete.link, delete.all), (offer.link, false));
        assert_ne!(carrier, offer.link);
        let told = hosts.server.told.last();
        assert_eq!(told, Some(&Action::LinkFailed(offer.link, Cause::PeerMisbehaved)));
        hosts.lose(Role::Server);
        hosts.tell(Role::Server, on, Llc::DeleteLink(DeleteLink { reply: true, ..delete }));
        assert!(hosts.server.group.is_established());
        assert!(hosts.server.group.links().all(|view| view.number != offer.link));
    }
}

/// Link number zero means none in particular; a link of that name would stand for all of them.
// RFC 7609 2.2.4 #1: unique link number in a group
// RFC 7609 C.7.1 #35: any other LLC error fails link
#[test]
fn no_link_has_number_zero() {
    let offence = Err(PeerMisbehaved::WrongLink);
    let mut client = LinkGroup::new_client(T0, setup(64, 8));
    let nameless = Llc::ConfirmLink(ConfirmLink { link: UNNUMBERED, ..confirm_link() });
    assert_eq!(client.handle_llc(T0, UNNUMBERED, &nameless), offence);
    assert!(!client.is_committed(), "so the connection goes on by TCP");
    let Llc::AddLink(offer) = add_link() else { unreachable!() };
    for link in [UNNUMBERED, LINK] {
        let mut client = Pair::established().client;
        let nameless = Llc::AddLink(AddLink { link, ..offer });
        assert_eq!(client.handle_llc(T0, LINK, &nameless), offence);
    }
}

/// A server with one RNIC offers that one again: a client with two has something to fall back to
/// when one of its own fails.
// RFC 7609 3.5.1.6 #3: offer second link over single RNIC
// RFC 7609 3.5.1.6.1 #3: accept same RNIC as asymmetric link
// RFC 7609 2.2.1 #3: support asymmetric links
#[test]
fn a_server_with_one_rnic_offers_it_again() {
    let hosts = Hosts::established(&[1], &[101, 102], 2);
    assert_eq!(hosts.server.group.symmetry(), Symmetry::AsymmetricLocal);
    assert_eq!(hosts.client.group.symmetry(), Symmetry::AsymmetricPeer);
    hosts.assert_rkeys_agree();
}

/// Link user ids are for operators only: two links may have the same one.
// RFC 7609 2.2.4 #4: only display peer's link user id
#[test]
fn user_ids_of_the_peer_mean_nothing() {
    let mut hosts = Hosts::new(&[1, 2], &[101, 102], 2);
    hosts.act();
    while let Some(wire) = hosts.wires.keys().next().copied() {
        for flying in hosts.wires.values_mut().flatten() {
            if let Llc::ConfirmLink(confirm) = &mut flying.message {
                confirm.user_id = LinkUserId(0);
            }
        }
        hosts.deliver(wire);
        hosts.act();
    }
    assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (2, 2));
}

/// A server that gave an offer up makes another one while we still work on the first. It has one
/// at a time: ignoring the second would cost the link that it came over.
// RFC 7609 3.5.5.3 #5: one changing exchange at a time
// RFC 7609 3.5.1.6.1 #1: compare GID and MAC of ADD LINK
#[test]
fn a_newer_offer_replaces_an_older_one() {
    let Llc::AddLink(offer) = add_link() else { unreachable!() };
    for opened in [false, true] {
        let mut client = Pair::established().client;
        client.handle_llc(T0, LINK, &add_link()).unwrap();
        drain(&mut client);
        if opened {
            client.link_opened(T0, SECOND_LINK, end(65), LinkUserId(65), &[]);
            drain(&mut client);
        }
        let number = LinkNumber(3);
        client.handle_llc(T0, LINK, &Llc::AddLink(AddLink { link: number, ..offer })).unwrap();
        let open = Action::OpenLink { number, peer: Some((offer.gid, offer.mac)) };
        let failed = Action::LinkFailed(SECOND_LINK, Cause::LlcTimedOut);
        assert_eq!(drain(&mut client), [failed, open][usize::from(!opened)..]);
        if !opened {
            client.link_opened(T0, SECOND_LINK, end(65), LinkUserId(65), &[]);
            let failed = Action::LinkFailed(SECOND_LINK, Cause::DeletedByUs);
            assert_eq!(drain(&mut client), [failed]);
        }
    }
}

/// What is late on a link that is gone must not be taken for something of its successor: a number
/// comes again only after all others.
// RFC 7609 2.2.4 #1: unique link number in a group
// RFC 7609 2.2.4 #2: use all link numbers before reuse
#[test]
fn numbers_are_not_used_again_before_all_others() {
    let mut hosts = Hosts::established(&[1, 2], &[101, 102], 2);
    let mut used = Vec::from([LINK, SECOND_LINK]);
    for _ in 0..600 {
        let last = *used.last().unwrap();
        hosts.break_link(last);
        hosts.run();
        hosts.cut.clear();
        // The server may want so many links at once, but the client would not open them.
        hosts.tick(OPENING_EVERY);
        hosts.server.group.want_link(hosts.now, port(2));
        hosts.run();
        let newest = hosts.server.up().into_iter().find(|number| *number != LINK).unwrap();
        let since = used.iter().rev().position(|number| *number == newest);
        assert!(since.is_none_or(|since| since == 253), "{newest:?} after {since:?}");
        assert!(newest != LINK && newest != UNNUMBERED, "one of them is in use all the time");
        used.push(newest);
    }
}

/// A link fails after an hour, or soon after it came up: another one is offered at once. After
/// several that failed soon, the next is offered by timer.
// RFC 7609 C.8 #1: go on without second link
// RFC 7609 C.8 #2: timer for the second link
// RFC 7609 C.8 #3: retry second link by timer
// RFC 7609 C.7.1 #8: try ADD LINK over another link
#[test]
fn a_spare_rnic_takes_over_at_once() {
    let mut hosts = Hosts::established(&[1, 2, 3], &[101, 102, 103], 2);
    hosts.server.group.short_lived = 0;
    let newest = |hosts: &Hosts| *hosts.server.up().last().expect("one is always left");
    for _ in 0..3 {
        hosts.break_link(newest(&hosts));
        hosts.run();
        assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (2, 2));
    }
    hosts.break_link(newest(&hosts));
    hosts.run();
    assert_eq!(hosts.server.up().len(), 1, "the fourth in a row");
    hosts.sleep(30);
    assert_eq!(hosts.server.up().len(), 2, "the timer");
    hosts.sleep(60);
    // All begins anew with one that has served.
    for _ in 0..4 {
        hosts.break_link(newest(&hosts));
        hosts.run();
        assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (2, 2));
        assert_eq!(hosts.server.group.symmetry(), Symmetry::Symmetric);
    }
}

/// A client without a second RNIC is asked again now and then: it may have one by now. News of the
/// RNIC, from either side, is acted on at once.
// RFC 7609 3.5.1.6 #2: offer link over second RNIC
// RFC 7609 3.5.1.6.2 #1: free resources of rejected link
// RFC 7609 C.8 #2: timer for the second link
// RFC 7609 C.8 #3: retry second link by timer
// RFC 7609 C.8 #4: retry when server RNIC appears
// RFC 7609 C.8 #5: retry when client announces RNIC
// RFC 7609 3.5.5.1.1 #1: offer link when resources appear
#[test]
fn the_second_link_is_tried_again() {
    for news in [None, Some(Role::Server), Some(Role::Client)] {
        let mut hosts = Hosts::established(&[1], &[101], 2);
        hosts.sleep(45);
        assert_eq!(offers(&hosts), [(LinkNumber(3), false), (LinkNumber(4), false)]);
        hosts.client.ports.insert(102);
        hosts.server.ports.insert(2);
        match news {
            None => hosts.sleep(20),
            Some(Role::Server) => hosts.server.group.want_link(hosts.now, port(2)),
            Some(Role::Client) => hosts.client.group.want_link(hosts.now, port(102)),
        }
        hosts.run();
        assert_eq!(offers(&hosts).last(), Some(&(LinkNumber(5), true)), "{news:?}");
        hosts.sleep(60);
        assert_eq!(offers(&hosts).len(), 3, "and then no more");
    }
}

/// A group whose links share an RNIC is not fully redundant: another link is tried by timer, too.
// RFC 7609 2.2.1 #5: replace an asymmetric link when possible
// RFC 7609 2.2.1 #6: add symmetric link before deleting asymmetric
// RFC 7609 C.8 #2: timer for the second link
// RFC 7609 C.8 #3: retry second link by timer
#[test]
fn an_asymmetric_group_is_tried_again() {
    let mut hosts = Hosts::established(&[1, 2], &[101], 2);
    hosts.server.group.want_link(hosts.now, port(2));
    hosts.run();
    assert_eq!(offers(&hosts), [(LinkNumber(3), false)]);
    hosts.client.ports.insert(102);
    hosts.sleep(19);
    assert_eq!(hosts.server.group.symmetry(), Symmetry::AsymmetricPeer);
    hosts.sleep(1);
    assert_eq!(hosts.server.group.symmetry(), Symmetry::Symmetric);
}

/// Out of queue pairs: the group goes on with one link, and tries again.
// RFC 7609 C.8 #1: go on without second link
// RFC 7609 C.8 #2: timer for the second link
// RFC 7609 C.8 #3: retry second link by timer
#[test]
fn a_server_out_of_queue_pairs_tries_again() {
    let mut server = answered_server();
    server.connections_changed(T0, 1);
    drain(&mut server);
    server.handle_timeout(T0 + ADD_LINK_WAIT);
    drain(&mut server);
    let mut now = T0 + ADD_LINK_WAIT;
    for _ in 0..3 {
        now = now + RETRY;
        server.traffic(now, LINK);
        server.handle_timeout(now);
        let Some(Action::OpenLink { number, .. }) = server.poll_action() else {
            panic!("another attempt");
        };
        server.link_refused(now, number, NoQueuePair::Exhausted);
        assert_eq!(drain(&mut server), [], "the client is not bothered");
    }
}

/// The client answers an offer when the server has given it up: a host that was busy for two
/// seconds. The link that it believes to have is deleted, instead of the one that carries all
/// connections.
// RFC 7609 C.8 #1: go on without second link
#[test]
fn an_answer_that_comes_too_late_is_taken_back() {
    let mut hosts = Hosts::new(&[1, 2], &[101, 102], 2);
    hosts.run_until(|from, llc| from == Role::Server && matches!(llc, Llc::AddLink(_)));
    hosts.now = hosts.now + ADD_LINK_WAIT;
    let now = hosts.now;
    for role in [Role::Server, Role::Client] {
        hosts.host(role).group.handle_timeout(now);
        hosts.act();
        assert!(hosts.host(role).group.is_established());
    }
    hosts.run();
    hosts.sleep(5);
    assert_eq!(hosts.server.up().into_iter().collect::<Vec<_>>(), [LINK]);
    assert_eq!(hosts.client.up().into_iter().collect::<Vec<_>>(), [LINK]);
    hosts.sleep(40);
    assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (2, 2), "it is tried again");
}
