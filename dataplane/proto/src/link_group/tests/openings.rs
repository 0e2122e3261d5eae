//! How often a peer makes us open queue pairs.

use std::vec::Vec;

use super::hosts::{Hosts, port};
use super::*;
use crate::link_group::openings::{OPENING_EVERY, OPENINGS_MAX, Openings};

const V2: Version = Version::V2 { max_connections: 255, direct: true };

const TICK: Duration = Duration::from_millis(10);

/// How often one side was asked for a queue pair.
fn opened(hosts: &mut Hosts, role: Role) -> usize {
    let told = &hosts.host(role).told;
    told.iter().filter(|action| matches!(action, Action::OpenLink { .. })).count()
}

/// A peer does this all the time: 200 times in no time, then for ten seconds.
fn is_paced(hosts: &mut Hosts, role: Role, mut round: impl FnMut(&mut Hosts, u8)) {
    // The first contact may have taken a token.
    hosts.host(role).group.openings = Openings::new();
    for count in 0..200 {
        round(hosts, count);
    }
    assert_eq!(opened(hosts, role), usize::from(OPENINGS_MAX), "{role:?}");
    for count in 0..1000_u16 {
        hosts.tick(TICK);
        round(hosts, u8::try_from(count % 200).unwrap());
    }
    assert_eq!(opened(hosts, role), usize::from(OPENINGS_MAX) + 40, "{role:?}");
    assert!(hosts.host(role).queue_pairs.len() <= 3, "nothing is left over");
}

/// No token is left.
fn spend(openings: &mut Openings, now: Instant) {
    while openings.take(now).is_ok() {}
}

/// A client asks for a link and rejects the offer, again and again.
// RFC 7609 3.5.1.6.2 #1: free resources of rejected link
// RFC 7609 C.8 #5: retry when client announces RNIC
#[test]
fn a_client_that_takes_no_link_is_paced() {
    let mut hosts = Hosts::established(&[1, 2, 3, 4], &[101, 102], 4);
    let reject = |hosts: &mut Hosts| {
        let offers = hosts.flying(Role::Server);
        hosts.lose(Role::Server);
        for (on, llc) in offers {
            let Llc::AddLink(offer) = llc else { continue };
            let no = AddLink { reply: true, rejected: true, reason: 1, ..offer };
            hosts.tell(Role::Server, on, Llc::AddLink(no));
        }
    };
    is_paced(&mut hosts, Role::Server, |hosts, _| {
        reject(hosts);
        hosts.tell(Role::Server, LINK, add_link());
        reject(hosts);
    });
    // An honest one is served the moment after.
    hosts.client.ports.insert(103);
    hosts.client.group.want_link(hosts.now, port(103));
    hosts.run();
    hosts.tick(OPENING_EVERY);
    hosts.run();
    assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (3, 3));
}

/// A server offers links and gives each of them up for the next one. None is rejected: a Linux
/// server does not repeat what was.
#[test]
fn a_server_that_does_not_wait_for_answers_is_paced() {
    let mut hosts = Hosts::established(&[1, 2], &[101, 102], 3);
    let Llc::AddLink(offer) = add_link() else { unreachable!() };
    hosts.client.ports.insert(103);
    is_paced(&mut hosts, Role::Client, |hosts, count| {
        let (link, (gid, mac)) = (LinkNumber(10 + count), port(3));
        hosts.tell(Role::Client, LINK, Llc::AddLink(AddLink { link, gid, mac, ..offer }));
        let said = hosts.flying(Role::Client);
        hosts.lose(Role::Client);
        assert!(!said.iter().any(|(_, llc)| matches!(llc, Llc::AddLink(it) if it.rejected)));
    });
}

/// A client asks for a link, takes it, and has it deleted, again and again. Or a server offers it,
/// and deletes it. The other side has no bounds.
#[test]
fn a_peer_that_keeps_no_link_is_paced() {
    for role in [Role::Server, Role::Client] {
        let mut hosts = Hosts::established(&[1, 2], &[101, 102], 2);
        let other = if role == Role::Server { Role::Client } else { Role::Server };
        is_paced(&mut hosts, role, |hosts, _| {
            hosts.host(other).group.openings = Openings::new();
            let now = hosts.now;
            hosts.run();
            for second in hosts.host(other).up().into_iter().filter(|number| *number != LINK) {
                let reason = DeleteReason::OPERATOR;
                hosts.host(other).group.delete_link(now, second, reason, false);
            }
            hosts.run();
            hosts.tell(Role::Server, LINK, add_link());
            hosts.run();
        });
    }
}

/// The peer breaks the queue pair of a link as soon as it is there. A link that is lost is replaced
/// at once, if it was not one of many: even if all of them had served for long.
// RFC 7609 C.7.1 #8: try ADD LINK over another link
#[test]
fn a_peer_that_breaks_links_is_paced() {
    for role in [Role::Server, Role::Client] {
        let mut hosts = Hosts::established(&[1, 2], &[101, 102], 2);
        let other = if role == Role::Server { Role::Client } else { Role::Server };
        is_paced(&mut hosts, role, |hosts, _| {
            hosts.host(other).group.openings = Openings::new();
            hosts.server.group.short_lived = 0;
            hosts.run();
            for second in hosts.host(role).up().into_iter().filter(|number| *number != LINK) {
                hosts.break_link(second);
            }
            hosts.run();
            hosts.cut.clear();
        });
    }
}

/// A path that comes and goes once a second is no attack: its link is there in the same instant.
// RFC 7609 2.3 #12: use a link that comes back
#[test]
fn a_path_that_flaps_is_not_paced() {
    let mut hosts = Hosts::established(&[1, 2], &[101, 102], 2);
    for _ in 0..100 {
        hosts.break_link(*hosts.server.up().last().unwrap());
        hosts.run();
        hosts.cut.clear();
        hosts.server.group.want_link(hosts.now, port(2));
        hosts.client.group.want_link(hosts.now, port(102));
        hosts.run();
        for role in [Role::Server, Role::Client] {
            assert_eq!(hosts.host(role).up().len(), 2);
            assert_eq!(hosts.host(role).group.opening_due_at(), None);
        }
        hosts.sleep(1);
    }
}

/// What a server wants itself does not wait, even if its client wants it, too.
#[test]
fn what_we_want_does_not_wait() {
    let mut hosts = Hosts::established(&[1, 2, 3], &[101, 102], 3);
    spend(&mut hosts.server.group.openings, hosts.now);
    hosts.client.ports.insert(103);
    hosts.client.group.want_link(hosts.now, port(103));
    hosts.run();
    assert_eq!(hosts.server.up().len(), 2, "the client waits");
    assert_eq!(hosts.server.group.opening_due_at(), Some(hosts.now + OPENING_EVERY));
    hosts.server.group.want_link(hosts.now, port(3));
    hosts.run();
    assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (3, 3));
    assert_eq!(hosts.server.group.opening_due_at(), None);
}

/// An offer for which we have no RNIC costs nothing, however often it comes. One for which the NIC
/// has no queue pair left does.
#[test]
fn offers_for_which_nothing_is_opened_are_free() {
    let mut client = Pair::established().client;
    let Llc::AddLink(offer) = add_link() else { unreachable!() };
    let mut refuse = |number, refusal| {
        let link = LinkNumber(number);
        client.handle_llc(T0, LINK, &Llc::AddLink(AddLink { link, ..offer })).unwrap();
        let opens = Action::OpenLink { number: link, peer: Some((offer.gid, offer.mac)) };
        assert_eq!(drain(&mut client), [opens]);
        client.link_refused(T0, link, refusal);
        drain(&mut client);
        client.openings.left()
    };
    for number in 2..22 {
        assert_eq!(refuse(number, NoQueuePair::NoAlternatePath), OPENINGS_MAX);
    }
    assert_eq!(refuse(22, NoQueuePair::Exhausted), OPENINGS_MAX - 1);
}

/// An offer that comes when there is no token is accepted as soon as there is one.
#[test]
fn an_offer_that_waits_becomes_a_link() {
    for version in [Version::V1, V2] {
        let mut hosts = Hosts::established_in(version, &[1, 2, 3], &[101, 102, 103], 3);
        spend(&mut hosts.client.group.openings, hosts.now);
        hosts.server.group.want_link(hosts.now, port(3));
        hosts.run();
        assert_eq!(opened(&mut hosts, Role::Client), 0);
        hosts.tick(OPENING_EVERY);
        hosts.run();
        assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (3, 3));
        hosts.assert_rkeys_agree();
    }
}

/// An offer is deleted before there is a token for it, or the link over which it came is lost.
/// Nothing is opened for it, and nothing of it is taken for the next one's.
#[test]
fn an_offer_that_ends_while_it_waits_opens_nothing() {
    for version in [Version::V1, V2] {
        for is_deleted in [true, false] {
            let mut hosts = Hosts::established_in(version, &[1, 2, 3], &[101, 102, 103], 3);
            spend(&mut hosts.client.group.openings, hosts.now);
            hosts.server.group.want_link(hosts.now, port(3));
            hosts.run();
            let carriers: Vec<_> = hosts.seen.iter().map(|(_, on, _)| *on).collect();
            let lost = if is_deleted { LinkNumber(3) } else { carriers[0] };
            hosts.break_link(lost);
            hosts.run();
            hosts.cut.clear();
            hosts.tick(OPENING_EVERY);
            assert_eq!(opened(&mut hosts, Role::Client), 0, "deleted: {is_deleted}");
            hosts.sleep(25);
            hosts.server.group.want_link(hosts.now, port(3));
            hosts.run();
            assert_eq!((hosts.server.up().len(), hosts.client.up().len()), (3, 3));
            hosts.assert_rkeys_agree();
        }
    }
}
