//! What is done when somebody does not answer, or says what makes no sense: the rows of RFC C.7.1,
//! and C.8.

use std::vec::Vec;

use super::hosts::{Host, Hosts, port};
use super::rkeys::{announce, links};
use super::*;
use crate::limits::CONFIRM_ADDED_LINK_WAIT;

const THIRD_LINK: LinkNumber = LinkNumber(3);

/// Two links, and a third that is being added over the first, up to the point where a message of
/// this side and kind is on its way. Each side has so many RMBs.
fn adding(rmbs: u8, from: Role, wanted: fn(&Llc) -> bool) -> Hosts {
    let mut hosts = Hosts::established(&[1, 2, 3], &[101, 102, 103], 3);
    for rmb in 1..rmbs {
        for role in [Role::Server, Role::Client] {
            announce(&mut hosts, role, rmb);
            hosts.run();
        }
    }
    // They have served for a while, so that a link that is lost is replaced at once.
    hosts.sleep(21);
    hosts.seen.clear();
    hosts.server.told.clear();
    hosts.client.told.clear();
    hosts.server.group.want_link(hosts.now, port(3));
    hosts.run_until(|role, llc| role == from && wanted(llc));
    hosts
}

fn is_add_link(llc: &Llc) -> bool {
    matches!(llc, Llc::AddLink(_))
}

fn is_rkeys(llc: &Llc) -> bool {
    matches!(llc, Llc::AddLinkContinuation(_))
}

fn is_confirm_link(llc: &Llc) -> bool {
    matches!(llc, Llc::ConfirmLink(_))
}

fn lost(link: LinkNumber) -> Llc {
    Llc::DeleteLink(DeleteLink {
        reply: false,
        all: false,
        orderly: false,
        link,
        reason: DeleteReason::LOST_PATH,
    })
}

/// The links that both sides have in the end, those included that nobody can use.
fn left(hosts: &Hosts) -> Vec<u8> {
    let of = |host: &Host| -> Vec<u8> {
        assert_eq!(host.queue_pairs.len(), host.up().len(), "{:?}", host.role);
        host.queue_pairs.keys().map(|number| number.0).collect()
    };
    assert_eq!(of(&hosts.server), of(&hosts.client));
    of(&hosts.server)
}

/// Whether a host was told to give up this link.
fn gave_up(hosts: &mut Hosts, role: Role, link: LinkNumber) -> bool {
    let failed =
        |action: &Action| matches!(action, Action::LinkFailed(number, _) if *number == link);
    hosts.host(role).told.iter().any(failed)
}

/// First contact, and the second path does not work. Neither side may use the first link before
/// both agree that it is alone: otherwise one of them moves connections to where the other is not.
// RFC 7609 C.7.1 #3: delete unconfirmed second link before data
// RFC 7609 C.7.1 #10: client deletes unconfirmed second link
// RFC 7609 3.5.1.6.2 #3: delete second link if CONFIRM LINK fails
// RFC 7609 3.5.1.6.2 #4: no data before DELETE LINK is answered
// RFC 7609 C.8 #1: go on without second link
#[test]
fn a_second_link_that_fails_at_first_contact_is_agreed_on() {
    for deaf in [None, Some(Role::Server), Some(Role::Client)] {
        let mut hosts = Hosts::new(&[1, 2], &[101, 102], 2);
        hosts.run_until(|from, llc| {
            let Llc::ConfirmLink(confirm) = llc else { return false };
            from == Role::Server && confirm.link == SECOND_LINK
        });
        hosts.cut.insert(SECOND_LINK);
        hosts.lose(Role::Server);
        // Both time out at about the same time; one of them may be first.
        let last = hosts.now + CONFIRM_ADDED_LINK_WAIT;
        let first = if deaf == Some(Role::Server) { Role::Client } else { Role::Server };
        hosts.now = last;
        hosts.host(first).group.handle_timeout(last);
        hosts.act();
        for role in [Role::Server, Role::Client] {
            assert!(!hosts.host(role).told.contains(&Action::LinkConfirmed(LINK)), "{deaf:?}");
        }
        assert_eq!(hosts.flying(first), [(LINK, lost(SECOND_LINK))]);
        hosts.run();
        for role in [Role::Server, Role::Client] {
            assert!(hosts.host(role).told.contains(&Action::LinkConfirmed(LINK)), "{role:?}");
            assert!(gave_up(&mut hosts, role, SECOND_LINK));
        }
        assert_eq!(left(&hosts), [1]);
    }
}

/// The client waits for CONFIRM LINK of the second link in vain, and the server does not know that
/// link any more: the application gets its connection all the same.
// RFC 7609 C.7.1 #10: client deletes unconfirmed second link
// RFC 7609 C.7.1 #11: client asks again by timer
// RFC 7609 C.8 #1: go on without second link
#[test]
fn a_client_that_asks_about_a_forgotten_link_goes_on() {
    let mut hosts = Hosts::new(&[1, 2], &[101, 102], 2);
    hosts.run_until(|from, llc| from == Role::Client && is_rkeys(llc));
    hosts.lose(Role::Client);
    // For the server the exchange is over without it, as for Linux.
    hosts.tick(ADD_LINK_WAIT);
    assert!(hosts.server.told.contains(&Action::LinkConfirmed(LINK)));
    hosts.tick(CONFIRM_ADDED_LINK_WAIT);
    assert!(!hosts.client.told.contains(&Action::LinkConfirmed(LINK)));
    hosts.run();
    assert!(hosts.client.told.contains(&Action::LinkConfirmed(LINK)));
    assert_eq!(left(&hosts), [1]);
    hosts.sleep(25);
    assert_eq!(left(&hosts).len(), 2, "and is tried again by timer");
}

/// First contact, and the server stops in the middle of the second link: the first one, which has
/// just been confirmed, carries the connection.
// RFC 7609 C.7.1 #13: unanswered ADD LINK CONTINUATION fails link
// RFC 7609 C.8 #1: go on without second link
#[test]
fn a_first_contact_outlives_an_exchange_that_stops() {
    let mut hosts = Hosts::new(&[1, 2], &[101, 102], 2);
    hosts.run_until(|from, llc| from == Role::Server && is_rkeys(llc));
    hosts.lose(Role::Server);
    hosts.tick(ADD_LINK_WAIT);
    for role in [Role::Server, Role::Client] {
        assert!(hosts.host(role).told.contains(&Action::LinkConfirmed(LINK)));
    }
    assert_eq!(left(&hosts), [1]);
}

/// A third link does not carry messages. Both sides destroy its queue pairs, the link that carried
/// the exchange stays up, and the third link is tried again later.
// RFC 7609 C.7.1 #4: clean up unconfirmed link, retry later
// RFC 7609 C.7.1 #11: client asks again by timer
// RFC 7609 C.7.1 #12: client deletes unconfirmed added link
#[test]
fn a_further_link_that_is_not_confirmed_is_given_up() {
    for first in [Role::Server, Role::Client] {
        let mut hosts = adding(1, Role::Server, is_confirm_link);
        hosts.cut.insert(THIRD_LINK);
        hosts.lose(Role::Server);
        hosts.now = hosts.now + CONFIRM_ADDED_LINK_WAIT;
        let now = hosts.now;
        hosts.host(first).group.handle_timeout(now);
        hosts.act();
        assert_eq!(hosts.flying(first), [(LINK, lost(THIRD_LINK))]);
        hosts.run();
        assert_eq!(left(&hosts), [1, 2]);
        for role in [Role::Server, Role::Client] {
            assert!(gave_up(&mut hosts, role, THIRD_LINK));
            assert!(!gave_up(&mut hosts, role, LINK));
        }
    }
    // With one link only, a timer tries again.
    let mut hosts = Hosts::established(&[1], &[101], 2);
    hosts.server.ports.insert(2);
    hosts.client.ports.insert(102);
    hosts.client.group.want_link(hosts.now, port(102));
    hosts.run_until(|from, llc| from == Role::Server && is_confirm_link(llc));
    hosts.lose(Role::Server);
    hosts.sleep(6);
    assert_eq!(left(&hosts), [1]);
    hosts.sleep(25);
    assert_eq!(left(&hosts).len(), 2);
}

/// A client has an RNIC to spare, and the link that it was to have was not confirmed. The server
/// may have nothing that reminds it of that, so the client does.
// RFC 7609 C.7.1 #36: announce unused RNIC again by timer
#[test]
fn a_client_tells_again_of_an_rnic_without_a_link() {
    let mut hosts = Hosts::established(&[1], &[101], 2);
    hosts.server.ports.insert(2);
    hosts.client.ports.insert(102);
    hosts.client.group.want_link(hosts.now, port(102));
    hosts.run_until(|from, llc| from == Role::Server && is_confirm_link(llc));
    hosts.lose(Role::Server);
    hosts.sleep(6);
    assert_eq!(left(&hosts), [1]);
    let tells = |hosts: &Hosts| {
        let said = hosts.flying(Role::Client);
        said.iter().any(|(_, llc)| matches!(llc, Llc::AddLink(notice) if !notice.reply))
    };
    assert!(!tells(&hosts));
    for _ in 0..25 {
        hosts.now = hosts.now + SECOND;
        let now = hosts.now;
        hosts.client.group.handle_timeout(now);
        hosts.act();
    }
    assert!(tells(&hosts));
}

/// A link that has served fails without a word from our RNIC: the path behind it is broken. A Linux
/// server offers another one at once, and if that fails it never tries again, so the client asks.
// RFC 7609 C.7.1 #11: client asks again by timer
// RFC 7609 C.7.1 #36: announce unused RNIC again by timer
#[test]
fn a_client_asks_again_on_a_port_whose_link_has_failed() {
    // The second RNIC comes up later, or serves from the first contact on.
    for is_late in [true, false] {
        let ports: &[u8] = if is_late { &[101] } else { &[101, 102] };
        let mut hosts = Hosts::established(&[1, 2], ports, 2);
        if is_late {
            hosts.client.ports.insert(102);
            hosts.client.group.want_link(hosts.now, port(102));
            hosts.run();
        }
        assert_eq!(hosts.client.group.symmetry(), Symmetry::Symmetric);
        let second = *hosts.client.up().last().unwrap();
        hosts.break_link(second);
        hosts.run();
        assert_eq!(left(&hosts), [1]);
        hosts.server.group.retry_at = None;
        hosts.seen.clear();
        hosts.sleep(21);
        let (gid, mac) = port(102);
        let asks = hosts.seen.iter().any(|(_, _, llc)| {
            matches!(llc, Llc::AddLink(notice) if (notice.gid, notice.mac) == (gid, mac))
        });
        assert!(asks, "late: {is_late}");
        assert_eq!(left(&hosts).len(), 2);
    }
}

/// A port that is down is not told of, though a link has used it.
#[test]
fn a_client_does_not_ask_on_a_port_that_is_down() {
    let mut hosts = Hosts::established(&[1, 2], &[101, 102], 2);
    hosts.client.ports.remove(&102);
    hosts.client.group.forget_ports(|known| known != port(102));
    hosts.break_link(SECOND_LINK);
    hosts.run();
    hosts.server.group.retry_at = None;
    hosts.seen.clear();
    hosts.sleep(41);
    assert!(hosts.seen.iter().all(|(_, _, llc)| !is_add_link(llc)), "{:?}", hosts.seen);
    assert_eq!(left(&hosts), [1]);
}

/// ADD LINK or a message after it is not answered: the link that carried it has failed, and the new
/// link is added over another one. The side that waits notices first.
// RFC 7609 C.7.1 #1: failed LLC send is a timeout
// RFC 7609 C.7.1 #7: unanswered ADD LINK fails its link
// RFC 7609 C.7.1 #8: try ADD LINK over another link
// RFC 7609 C.7.1 #9: missing ADD LINK CONTINUATION fails link
// RFC 7609 C.7.1 #13: unanswered ADD LINK CONTINUATION fails link
// RFC 7609 C.7.1 #15: stopped ADD LINK CONTINUATION fails link
// RFC 7609 3.5.1.6.2 #1: free resources of rejected link
// RFC 7609 2.3 #11: restart LLC exchanges, do not replay
#[test]
fn an_exchange_that_stops_costs_the_link_that_carried_it() {
    type Lost = (Role, fn(&Llc) -> bool, u8, Role);
    let cases: [Lost; 5] = [
        // What is lost, and who waits for what would follow.
        (Role::Server, is_add_link, 1, Role::Server),
        (Role::Client, is_add_link, 1, Role::Server),
        (Role::Server, is_rkeys, 1, Role::Client),
        (Role::Client, is_rkeys, 4, Role::Server),
        (Role::Client, is_rkeys, 4, Role::Client),
    ];
    for (from, wanted, rmbs, waits) in cases {
        let mut hosts = adding(rmbs, from, wanted);
        hosts.cut.insert(LINK);
        hosts.wires.retain(|(_, link), _| *link != LINK);
        hosts.now = hosts.now + LINK_EXCHANGE_WAIT;
        let now = hosts.now;
        for role in [Role::Server, Role::Client] {
            hosts.work_until_now(role);
        }
        hosts.host(waits).group.handle_timeout(now);
        hosts.act();
        let mut flying = hosts.flying(waits).into_iter();
        assert!(flying.all(|(on, _)| on == SECOND_LINK));
        assert!(gave_up(&mut hosts, waits, LINK), "{waits:?}");
        hosts.run();
        hosts.sleep(3);
        let left = left(&hosts);
        assert_eq!((left[0], left.len()), (2, 2), "{from:?} {waits:?}");
        assert!(left[1] > 3, "a number that was not used");
        hosts.assert_rkeys_agree();
    }
}

/// The only link falls silent in the middle of an exchange: nothing is left to go on with, and
/// connections are reset.
// RFC 7609 C.7.1 #15: stopped ADD LINK CONTINUATION fails link
// RFC 7609 C.7.1 #17: no link for client's DELETE LINK: reset
// RFC 7609 C.7.1 #21: no link for server's DELETE LINK: reset
#[test]
fn without_another_link_the_group_ends() {
    for role in [Role::Server, Role::Client] {
        let mut hosts = Hosts::established(&[1], &[101], 2);
        hosts.server.ports.insert(2);
        hosts.client.ports.insert(102);
        hosts.server.group.want_link(hosts.now, port(2));
        hosts.run_until(|from, llc| from != role && is_rkeys(llc));
        hosts.wires.clear();
        hosts.now = hosts.now + LINK_EXCHANGE_WAIT;
        let now = hosts.now;
        for role in [Role::Server, Role::Client] {
            hosts.work_until_now(role);
        }
        hosts.host(role).group.handle_timeout(now);
        hosts.act();
        let told = hosts.host(role).told.last();
        assert_eq!(told, Some(&Action::Terminate(Cause::LlcTimedOut)), "{role:?}");
    }
}

/// CONFIRM LINK on a further link names another queue pair, or another link: somebody has mixed
/// links up, and whatever would be written there would arrive elsewhere.
// RFC 7609 C.7.1 #24: wrong CONFIRM LINK brings link down
#[test]
fn a_further_link_with_wrong_information_is_brought_down() {
    for wrong_link in [true, false] {
        let mut hosts = adding(1, Role::Server, is_confirm_link);
        let [(THIRD_LINK, Llc::ConfirmLink(confirm))] = hosts.flying(Role::Server)[..] else {
            panic!("{:?}", hosts.flying(Role::Server));
        };
        hosts.lose(Role::Server);
        let link = if wrong_link { SECOND_LINK } else { THIRD_LINK };
        let qpn = if wrong_link { confirm.qpn } else { Qpn(12) };
        let wrong = Llc::ConfirmLink(ConfirmLink { qpn, link, ..confirm });
        let now = hosts.now;
        let outcome = hosts.client.group.handle_llc(now, THIRD_LINK, &wrong);
        assert_eq!(outcome, Err(PeerMisbehaved::WrongLink));
        hosts.act();
        assert_eq!(hosts.flying(Role::Client), [(LINK, lost(THIRD_LINK))]);
        hosts.run();
        assert_eq!(left(&hosts), [1, 2]);
    }
}

/// A path MTU that does not exist: the offer is turned down for that reason, nothing else happens.
// RFC 7609 A.3.2 #6: reason 2: invalid MTU
// RFC 7609 C.7.1 #25: reject reserved MTU with reason 2
#[test]
fn an_offer_with_an_unknown_mtu_is_rejected() {
    let Llc::AddLink(offer) = add_link() else { unreachable!() };
    for mtu in [0, 6, 15] {
        let mut client = Pair::established().client;
        let offer = AddLink { mtu: Mtu(mtu), ..offer };
        client.handle_llc(T0, LINK, &Llc::AddLink(offer)).unwrap();
        let answer = AddLink { reply: true, rejected: true, reason: 2, ..offer };
        assert_eq!(drain(&mut client), [Action::Send(LINK, Llc::AddLink(answer))]);
        assert!(client.is_established());
    }
    // And in the answer to an offer it makes no link.
    let mut hosts = adding(1, Role::Client, is_add_link);
    let [(LINK, Llc::AddLink(answer))] = hosts.flying(Role::Client)[..] else {
        panic!("{:?}", hosts.flying(Role::Client));
    };
    hosts.lose(Role::Client);
    hosts.tell(Role::Server, LINK, Llc::AddLink(AddLink { mtu: Mtu(0), ..answer }));
    assert_eq!(hosts.flying(Role::Server), [(LINK, lost(THIRD_LINK))]);
}

/// Nothing is heard on one of two links, and TEST LINK is not answered there: its connections go on
/// over the other one. With one link they are reset.
// RFC 7609 4.5.3 #4: move connections if probe fails
// RFC 7609 4.5.3 #5: reset connections without another link
// RFC 7609 C.7.1 #23: unanswered TEST LINK fails link
// RFC 7609 2.2 #1: survive the loss of a link
// RFC 7609 2.3 #3: move connections of a failed link
// RFC 7609 2.3 #4: move at once, send DELETE LINK
#[test]
fn a_link_that_does_not_answer_test_link_is_left() {
    for role in [Role::Server, Role::Client] {
        let mut hosts = links(2);
        hosts.cut.insert(SECOND_LINK);
        let now = hosts.now;
        hosts.host(role).group.probe(now, SECOND_LINK, SECOND);
        hosts.act();
        hosts.now = hosts.now + SECOND;
        let now = hosts.now;
        hosts.host(role).group.handle_timeout(now);
        hosts.act();
        let failed = Action::LinkFailed(SECOND_LINK, Cause::TestTimedOut);
        assert_eq!(hosts.host(role).told, [failed]);
        hosts.run();
        assert_eq!(left(&hosts), [1]);
        assert!(hosts.server.group.is_established() && hosts.client.group.is_established());
    }
}

/// A peer with as many links as there can be dies, in the middle of whatever was under way. All of
/// them fail in the same moment, each with all that follows: the gateway must have room for that.
// RFC 7609 C.7.1 #17: no link for client's DELETE LINK: reset
// RFC 7609 C.7.1 #21: no link for server's DELETE LINK: reset
// RFC 7609 4.5.3 #5: reset connections without another link
// RFC 7609 4.8.3 #2: detect dead peer by its links
#[test]
fn a_peer_with_eight_links_dies() {
    for role in [Role::Server, Role::Client] {
        for busy in [false, true] {
            let mut hosts = links(8);
            let now = hosts.now;
            if busy {
                announce(&mut hosts, role, 7);
                hosts.host(role).group.want_link(now, port(50));
                hosts.host(role).group.delete_link(now, LINK, DeleteReason::OPERATOR, true);
                hosts.act();
            }
            hosts.lose(role);
            for number in 1..=8 {
                hosts.host(role).group.probe(now, LinkNumber(number), SECOND * 2);
            }
            hosts.act();
            hosts.lose(role);
            let host = hosts.host(role);
            host.group.handle_timeout(now + SECOND * 2);
            let last = core::iter::from_fn(|| host.group.poll_action()).last();
            assert!(matches!(last, Some(Action::Terminate(_))), "{role:?}: {last:?}");
            assert!(host.group.is_terminated());
        }
    }
}

/// The NIC reports that a message was not delivered: that is its timeout, only sooner.
// RFC 7609 C.7.1 #1: failed LLC send is a timeout
// RFC 7609 2.3 #11: restart LLC exchanges, do not replay
#[test]
fn a_send_that_fails_is_a_timeout() {
    for role in [Role::Server, Role::Client] {
        let mut hosts = links(2);
        announce(&mut hosts, role, 7);
        hosts.break_link(LINK);
        hosts.run();
        hosts.sleep(1);
        assert!(hosts.host(role).told.contains(&Action::RmbConfirmed(RmbIndex(7))));
        assert_eq!(left(&hosts), [2]);
        hosts.assert_rkeys_agree();
    }
}

/// DELETE LINK names a link that does not exist: either side answers with that reason.
// RFC 7609 C.7.1 #29: answer client's DELETE LINK of unknown link
// RFC 7609 C.7.1 #30: answer server's DELETE LINK of unknown link
#[test]
fn an_unknown_link_is_answered_for_and_one_that_goes_is_not() {
    let mut hosts = links(2);
    hosts.server.group.link_broke(hosts.now, SECOND_LINK);
    hosts.act();
    let before = hosts.flying(Role::Server);
    // The client's notice crosses the server's: no answer, the exchange is under way.
    hosts.tell(Role::Server, LINK, lost(SECOND_LINK));
    assert_eq!(hosts.flying(Role::Server), before);
    hosts.run();
    let Llc::DeleteLink(request) = lost(SECOND_LINK) else { unreachable!() };
    let reason = DeleteReason::UNKNOWN_LINK;
    let reply = Llc::DeleteLink(DeleteLink { reply: true, reason, ..request });
    for role in [Role::Server, Role::Client] {
        hosts.tell(role, LINK, lost(SECOND_LINK));
        assert_eq!(hosts.flying(role), [(LINK, reply)]);
        hosts.lose(role);
    }
}
