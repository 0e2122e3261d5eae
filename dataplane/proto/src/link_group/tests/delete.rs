//! Links that are deleted: by whom, in what order, over which link, and when nobody answers.

use std::vec::Vec;

use super::hosts::{Hosts, port};
use super::rkeys::announce;
use super::*;
use crate::link_group::delete::{ASK_AGAIN_WAIT, ASKED_WAIT, VACATE_WAIT_CLIENT};

const THIRD_LINK: LinkNumber = LinkNumber(3);

/// Three links, of three RNICs on either side.
fn three_links() -> Hosts {
    let mut hosts = Hosts::established(&[1, 2, 3], &[101, 102, 103], 3);
    hosts.server.group.want_link(hosts.now, port(3));
    hosts.run();
    assert_eq!(hosts.server.up().len(), 3);
    hosts.server.told.clear();
    hosts.client.told.clear();
    hosts.seen.clear();
    hosts
}

fn two_links() -> Hosts {
    Hosts::established(&[1, 2], &[101, 102], 2)
}

fn delete_link(link: LinkNumber, orderly: bool, reason: DeleteReason) -> DeleteLink {
    DeleteLink { reply: false, all: false, orderly, link, reason }
}

fn lost(link: LinkNumber) -> Llc {
    Llc::DeleteLink(delete_link(link, false, DeleteReason::LOST_PATH))
}

/// The DELETE LINKs that arrived.
fn deletes(hosts: &Hosts) -> Vec<(Role, LinkNumber, DeleteLink)> {
    let is_one = |(role, on, llc): &(Role, LinkNumber, Llc)| {
        let Llc::DeleteLink(delete) = llc else { return None };
        Some((*role, *on, *delete))
    };
    hosts.seen.iter().filter_map(is_one).collect()
}

/// An operator takes an RNIC out of service, on either side: connections leave first, then the
/// link goes, and nobody notices.
// RFC 7609 2.3 #14: say whether deletion is orderly
// RFC 7609 3.5.4 #5: ask server on operator's command
// RFC 7609 3.5.5.1.3 #4: move connections of deleted link
// RFC 7609 3.5.5.1.3 #5: DELETE LINK over any usable link
// RFC 7609 3.5.5.1.3 #7: client always agrees to DELETE LINK
// RFC 7609 3.5.5.1.3 #8: free resources when reply was delivered
// RFC 7609 3.5.5.1.4 #2: delete later upon orderly request
// RFC 7609 3.5.5.1.4 #4: answer by own DELETE LINK exchange
// RFC 7609 3.3 #5: other LLC over any active link
// RFC 7609 3.3 #8: answer DELETE LINK over another link
// RFC 7609 2.2.3 #4: only the server changes links
#[test]
fn an_orderly_end_moves_connections_first() {
    use Role::{Client, Server};
    for begins in [Server, Client] {
        let mut hosts = two_links();
        hosts.server.is_quick = false;
        hosts.client.is_quick = false;
        let now = hosts.now;
        hosts.host(begins).group.delete_link(now, LINK, DeleteReason::OPERATOR, true);
        hosts.run();
        assert_eq!(hosts.server.vacating, [LINK]);
        assert!(hosts.client.vacating.is_empty(), "the server leads");
        assert_eq!(hosts.server.up().len(), 1, "no new connection goes there");
        hosts.server.vacate(now);
        hosts.run();
        assert_eq!(hosts.client.vacating, [LINK]);
        assert!(hosts.server.queue_pairs.contains_key(&LINK), "the client has not answered");
        hosts.client.vacate(now);
        hosts.run();
        let request = delete_link(LINK, true, DeleteReason::OPERATOR);
        let mut expected = Vec::from([(Client, SECOND_LINK, request)]);
        expected.push((Server, SECOND_LINK, request));
        expected.push((Client, SECOND_LINK, DeleteLink { reply: true, ..request }));
        assert_eq!(deletes(&hosts), expected[usize::from(begins == Server)..]);
        for host in [&hosts.server, &hosts.client] {
            assert_eq!(host.queue_pairs.keys().collect::<Vec<_>>(), [&SECOND_LINK]);
            assert!(host.group.is_established());
        }
    }
}

/// The RNIC of a Linux client is pulled. Linux calls that orderly; but nothing can leave in good
/// order, and connections that wait for it would hang until the NIC gives up.
// RFC 7609 2.3 #4: move at once, send DELETE LINK
// RFC 7609 3.5.5.1 #1: client may delete on its own
// RFC 7609 3.5.5.1.4 #1: client may ask to delete link
// RFC 7609 3.5.5.1.4 #3: delete at once upon disorderly request
#[test]
fn a_lost_path_is_never_orderly() {
    let mut hosts = two_links();
    let lost = Llc::DeleteLink(delete_link(LINK, true, DeleteReason::LOST_PATH));
    hosts.tell(Role::Server, LINK, lost);
    assert_eq!(hosts.server.told, [Action::LinkFailed(LINK, Cause::DeletedByPeer)]);
    let mut hosts = two_links();
    hosts.tell(Role::Client, SECOND_LINK, lost);
    assert_eq!(hosts.client.told, [Action::LinkFailed(LINK, Cause::DeletedByPeer)]);
    let Llc::DeleteLink(order) = lost else { unreachable!() };
    let reply = Llc::DeleteLink(DeleteLink { reply: true, ..order });
    assert_eq!(hosts.flying(Role::Client), [(SECOND_LINK, reply)]);
}

/// An operator deletes a link at once while connections are still leaving it in good order.
// RFC 7609 3.5.5.1.4 #3: delete at once upon disorderly request
// RFC 7609 2.3 #14: say whether deletion is orderly
#[test]
fn an_orderly_end_can_be_hurried() {
    let mut hosts = two_links();
    hosts.server.is_quick = false;
    let now = hosts.now;
    hosts.server.group.delete_link(now, LINK, DeleteReason::OPERATOR, true);
    hosts.act();
    assert!(hosts.flying(Role::Server).is_empty());
    hosts.server.group.delete_link(now, LINK, DeleteReason::OPERATOR, false);
    hosts.act();
    let request = Llc::DeleteLink(delete_link(LINK, false, DeleteReason::OPERATOR));
    assert_eq!(hosts.flying(Role::Server), [(SECOND_LINK, request)]);
    // The other way round nothing changes.
    hosts.server.group.delete_link(now, LINK, DeleteReason::OPERATOR, true);
    hosts.run();
    assert_eq!(hosts.server.up().into_iter().collect::<Vec<_>>(), [SECOND_LINK]);
}

/// With three links a reply on another one may overtake what came before it, and the server would
/// free a queue pair that the client still writes to.
// RFC 7609 3.3 #6: reply over the request's link
// RFC 7609 3.3 #2: answer each LLC request
#[test]
fn the_reply_takes_the_link_of_its_request() {
    let mut hosts = three_links();
    hosts.client.is_quick = false;
    for (link, on, reason) in [
        (SECOND_LINK, THIRD_LINK, DeleteReason::LOST_PATH),
        (THIRD_LINK, THIRD_LINK, DeleteReason::OPERATOR),
    ] {
        let request = delete_link(link, true, reason);
        hosts.tell(Role::Client, on, Llc::DeleteLink(request));
        let now = hosts.now;
        hosts.client.vacate(now);
        hosts.act();
        let reply = Llc::DeleteLink(DeleteLink { reply: true, ..request });
        assert_eq!(hosts.flying(Role::Client), [(on, reply)]);
        hosts.lose(Role::Client);
    }
}

/// The server forgot a link that its client still has, as Linux does when an exchange failed. The
/// client must delete that link, and keep the one over which it asked: it carries all connections.
// RFC 7609 C.7.1 #29: answer client's DELETE LINK of unknown link
// RFC 7609 A.3.4 #7: reply with reason unknown link
#[test]
fn an_unknown_link_is_let_go() {
    let mut hosts = three_links();
    let now = hosts.now;
    hosts.client.group.link_broke(now, SECOND_LINK);
    hosts.act();
    let [(LINK, Llc::DeleteLink(request))] = hosts.flying(Role::Client)[..] else {
        panic!("{:?}", hosts.flying(Role::Client));
    };
    hosts.lose(Role::Client);
    let reply = DeleteLink { reply: true, reason: DeleteReason::UNKNOWN_LINK, ..request };
    hosts.tell(Role::Client, LINK, Llc::DeleteLink(reply));
    assert_eq!(hosts.client.group.links().count(), 2);
    hosts.work_for(ASKED_WAIT * 2);
    assert!(hosts.client.up().contains(&LINK) && hosts.client.group.is_established());
}

/// A server that is adding a link answers late. The link that it was asked over is no worse for it.
// RFC 7609 C.7.1 #16: client repeats DELETE LINK over another link
#[test]
fn a_client_waits_for_an_exchange_of_the_server() {
    let mut hosts = three_links();
    let now = hosts.now;
    hosts.client.group.link_broke(now, THIRD_LINK);
    hosts.act();
    hosts.lose(Role::Client);
    hosts.work_for(ADD_LINK_WAIT * 2 + Duration::from_secs(5));
    assert_eq!(hosts.client.up().len(), 2);
    // The server is deaf on that link, it turns out: another one is asked over, for both.
    hosts.work_for(ASKED_WAIT);
    assert_eq!(hosts.client.up().into_iter().collect::<Vec<_>>(), [SECOND_LINK]);
    assert_eq!(
        hosts.flying(Role::Client),
        [(SECOND_LINK, lost(LINK)), (SECOND_LINK, lost(THIRD_LINK))]
    );
    hosts.lose(Role::Client);
    hosts.work_for(ASKED_WAIT);
    assert!(hosts.client.group.is_terminated(), "and if that one is deaf, all is over");
}

/// A deployed server drops a request that comes while it is at work on two other things. The link
/// would stay dead, and its connections without a second one, until the group ended.
// RFC 7609 3.5.5.1.4 #1: client may ask to delete link
#[test]
fn a_request_that_the_server_drops_is_made_again() {
    let mut hosts = three_links();
    hosts.break_link_at(Role::Client, THIRD_LINK);
    hosts.act();
    assert_eq!(hosts.flying(Role::Client), [(LINK, lost(THIRD_LINK))]);
    hosts.lose(Role::Client);
    hosts.work_for(ASK_AGAIN_WAIT - SECOND);
    assert_eq!(hosts.flying(Role::Client), []);
    hosts.work_for(SECOND);
    assert_eq!(hosts.flying(Role::Client), [(LINK, lost(THIRD_LINK))]);
    // It may also have been late only.
    hosts.tell(Role::Server, LINK, lost(THIRD_LINK));
    hosts.run();
    for host in [&hosts.server, &hosts.client] {
        assert!(!host.queue_pairs.contains_key(&THIRD_LINK) && host.up().len() == 2);
    }
    hosts.work_for(ASK_AGAIN_WAIT * 2);
    assert_eq!(hosts.flying(Role::Client), []);
}

/// A server may take its time for an orderly request of a client. If it does nothing for too long,
/// the link that carried the request counts as failed.
// RFC 7609 3.5.5.1.4 #2: delete later upon orderly request
// RFC 7609 C.7.1 #16: client repeats DELETE LINK over another link
// RFC 7609 C.7.1 #17: no link for client's DELETE LINK: reset
#[test]
fn an_orderly_request_has_time() {
    let mut hosts = two_links();
    let now = hosts.now;
    hosts.client.group.delete_link(now, LINK, DeleteReason::OPERATOR, true);
    hosts.client.group.delete_link(now, LINK, DeleteReason::OPERATOR, true);
    hosts.act();
    assert_eq!(hosts.flying(Role::Client).len(), 1, "asked once");
    hosts.lose(Role::Client);
    hosts.work_for(ASKED_WAIT - SECOND);
    assert_eq!(hosts.client.up().len(), 2);
    hosts.work_for(SECOND);
    assert!(!hosts.client.up().contains(&SECOND_LINK));
    // The only link: nobody is left to ask.
    let mut hosts = Hosts::established(&[1], &[101], 2);
    let now = hosts.now;
    hosts.client.group.delete_link(now, LINK, DeleteReason::OPERATOR, false);
    hosts.act();
    hosts.lose(Role::Client);
    hosts.work_for(ASKED_WAIT);
    assert_eq!(hosts.client.told.last(), Some(&Action::Terminate(Cause::LlcTimedOut)));
}

/// The carrier of a request is lost with the request: it is made again at once over a link that is
/// left, not when somebody notices that nothing happens.
// RFC 7609 2.3 #11: restart LLC exchanges, do not replay
#[test]
fn a_request_that_was_lost_is_made_again() {
    let mut hosts = three_links();
    let now = hosts.now;
    hosts.client.group.link_broke(now, THIRD_LINK);
    hosts.act();
    hosts.lose(Role::Client);
    hosts.client.group.link_broke(now, LINK);
    hosts.act();
    assert_eq!(
        hosts.flying(Role::Client),
        [(SECOND_LINK, lost(LINK)), (SECOND_LINK, lost(THIRD_LINK))]
    );
}

/// The link breaks while its connections leave it in good order. The client owes an answer still:
/// without one the server takes the link that it asked over for dead, and that is the last one.
// RFC 7609 3.5.5.1.3 #7: client always agrees to DELETE LINK
#[test]
fn a_link_that_breaks_while_it_is_vacated_is_answered_for() {
    let mut hosts = two_links();
    hosts.client.is_quick = false;
    let now = hosts.now;
    hosts.server.group.delete_link(now, LINK, DeleteReason::OPERATOR, true);
    hosts.run();
    assert_eq!(hosts.client.vacating, [LINK]);
    hosts.client.group.link_broke(now, LINK);
    hosts.run();
    for host in [&hosts.server, &hosts.client] {
        assert_eq!(host.group.links().map(|view| view.number).collect::<Vec<_>>(), [SECOND_LINK]);
    }
    hosts.client.vacate(now);
    hosts.run();
    assert!(hosts.client.group.is_established());
}

/// The server has lost the link that it ordered the deletion over, and says so again over another.
/// Connections are leaving already; the answer takes the link that is left.
// RFC 7609 3.3 #6: reply over the request's link
// RFC 7609 C.7.1 #20: server repeats DELETE LINK over another link
#[test]
fn an_order_that_is_repeated_is_obeyed_once() {
    let mut hosts = three_links();
    hosts.client.is_quick = false;
    let request = delete_link(LINK, true, DeleteReason::OPERATOR);
    for on in [SECOND_LINK, THIRD_LINK] {
        hosts.tell(Role::Client, on, Llc::DeleteLink(request));
    }
    assert_eq!(hosts.client.vacating, [LINK]);
    assert_eq!(hosts.flying(Role::Client), []);
    hosts.client.vacate(hosts.now);
    hosts.act();
    let reply = Llc::DeleteLink(DeleteLink { reply: true, ..request });
    assert_eq!(hosts.flying(Role::Client), [(THIRD_LINK, reply)]);
}

/// Connections that do not leave in time are moved when the link goes; the answer does not wait.
// RFC 7609 3.5.5.1.3 #7: client always agrees to DELETE LINK
// RFC 7609 C.7.1 #20: server repeats DELETE LINK over another link
#[test]
fn nobody_waits_for_ever_for_connections_to_leave() {
    let mut hosts = two_links();
    hosts.client.is_quick = false;
    hosts.server.is_quick = false;
    let now = hosts.now;
    hosts.server.group.delete_link(now, LINK, DeleteReason::OPERATOR, true);
    hosts.act();
    for _ in 0..10 {
        hosts.tick(SECOND);
    }
    hosts.run();
    assert_eq!(hosts.client.vacating, [LINK]);
    hosts.tick(VACATE_WAIT_CLIENT);
    hosts.run();
    assert_eq!(hosts.client.told.last(), Some(&Action::LinkFailed(LINK, Cause::DeletedByPeer)));
    assert!(!hosts.server.queue_pairs.contains_key(&LINK));
}

/// The link that DELETE LINK went over does not answer: it has failed, too, and the next one is
/// told about both.
// RFC 7609 C.7.1 #20: server repeats DELETE LINK over another link
// RFC 7609 C.7.1 #21: no link for server's DELETE LINK: reset
#[test]
fn an_unanswered_delete_is_said_again_over_another_link() {
    let mut hosts = three_links();
    // No RNIC is left for a successor.
    hosts.server.ports.clear();
    let now = hosts.now;
    hosts.server.group.link_broke(now, THIRD_LINK);
    hosts.act();
    assert_eq!(hosts.flying(Role::Server), [(LINK, lost(THIRD_LINK))]);
    hosts.lose(Role::Server);
    hosts.work_for(LINK_EXCHANGE_WAIT);
    assert_eq!(hosts.flying(Role::Server), [(SECOND_LINK, lost(LINK))]);
    hosts.run();
    for host in [&hosts.server, &hosts.client] {
        let left: Vec<_> = host.queue_pairs.keys().copied().collect();
        assert_eq!(left, [SECOND_LINK], "{:?}", deletes(&hosts));
    }
    assert!(deletes(&hosts).iter().all(|(_, on, _)| *on == SECOND_LINK));
    // And if that one does not answer either, all is over.
    hosts.server.group.delete_link(hosts.now, SECOND_LINK, DeleteReason::OPERATOR, true);
    hosts.act();
    hosts.lose(Role::Server);
    hosts.work_for(LINK_EXCHANGE_WAIT);
    assert!(hosts.server.group.is_terminated());
}

/// A Linux kernel loses an RNIC and does not answer for half a minute, while data goes on over the
/// link that is left. Users would lose all connections if we took its silence for the end.
// RFC 7609 C.7.1 #7: unanswered ADD LINK fails its link
// RFC 7609 C.7.1 #16: client repeats DELETE LINK over another link
// RFC 7609 C.7.1 #20: server repeats DELETE LINK over another link
#[test]
fn a_peer_that_is_busy_is_waited_for() {
    let busy = SECOND * 35;
    // Asked to delete.
    let mut hosts = two_links();
    hosts.client.group.link_broke(hosts.now, SECOND_LINK);
    hosts.act();
    hosts.work_for(busy);
    assert!(hosts.client.up().contains(&LINK));
    hosts.run();
    assert_eq!(hosts.client.up().len(), 2, "answered, and replaced");

    // Asked to learn a key.
    for role in [Role::Server, Role::Client] {
        let mut hosts = Hosts::established(&[1], &[101], 1);
        announce(&mut hosts, role, 7);
        hosts.work_for(busy);
        assert!(hosts.host(role).up().contains(&LINK), "{role:?}");
        // The server was offering a link just then: a client is asked to try again.
        hosts.sleep(2);
        let known = Action::RmbConfirmed(RmbIndex(7));
        assert!(hosts.host(role).told.contains(&known), "{role:?}: {:?}", hosts.seen);
    }

    // Told to delete, and offered the successor.
    let mut hosts = two_links();
    hosts.server.group.short_lived = 0;
    hosts.server.group.link_broke(hosts.now, SECOND_LINK);
    for message in ["DELETE LINK", "ADD LINK"] {
        hosts.act();
        assert_eq!(hosts.flying(Role::Server).len(), 1, "{message}");
        hosts.work_for(busy);
        assert!(hosts.server.up().contains(&LINK), "{message}");
        hosts.deliver((Role::Server.into(), LINK));
        hosts.act();
        hosts.deliver((Role::Client.into(), LINK));
    }
    hosts.run();
    assert_eq!(hosts.server.up().len(), 2);
}

/// Both links are to go at the same time, and the first DELETE LINK is not answered: the other link
/// is tried, and time goes on.
// RFC 7609 C.7.1 #20: server repeats DELETE LINK over another link
#[test]
fn two_deletes_do_not_stand_in_each_others_way() {
    let mut hosts = two_links();
    let now = hosts.now;
    for link in [LINK, SECOND_LINK] {
        hosts.server.group.delete_link(now, link, DeleteReason::OPERATOR, false);
    }
    hosts.act();
    hosts.lose(Role::Server);
    let mut last = hosts.now;
    while !hosts.server.group.is_terminated() {
        let next = hosts.server.group.poll_timeout().expect("somebody waits for something");
        assert!(next > last, "a timeout that is due again at once would never end");
        last = next;
        hosts.tick(Duration::from_nanos(next.0 - hosts.now.0));
        hosts.lose(Role::Server);
        assert!(hosts.now < now + LINK_EXCHANGE_WAIT * 2);
    }
}

/// Both sides see the same failure: one exchange, not two. Linux mistakes the second DELETE LINK.
// RFC 7609 3.5.5.3.2 #3: client's DELETE LINK waits for server's
#[test]
fn a_failure_that_both_sides_saw_is_one_exchange() {
    let mut hosts = two_links();
    hosts.break_link(SECOND_LINK);
    hosts.run();
    let requests = deletes(&hosts);
    let of_server = requests.iter().filter(|(role, _, one)| *role == Role::Server && !one.reply);
    assert_eq!(of_server.count(), 1, "{requests:?}");
}

/// A gateway stops while one of its links is broken unnoticed: the peer hears of the end over the
/// other link.
// RFC 7609 C.7.1 #18: client tries all links, ends group
// RFC 7609 C.7.1 #19: end group though DELETE LINK undelivered
// RFC 7609 3.5.4 #7: clean up once DELETE LINK is sent
// RFC 7609 3.5.4 #9: end connections of deleted group
// RFC 7609 3.5.4 #11: end group when client asks
// RFC 7609 3.5.4 #12: reset connections when client ends group
#[test]
fn all_links_are_told_that_all_is_over() {
    for begins in [Role::Server, Role::Client] {
        let mut hosts = two_links();
        hosts.cut.insert(LINK);
        let now = hosts.now;
        hosts.host(begins).group.shutdown(now, DeleteReason::OPERATOR);
        hosts.run();
        for host in [&hosts.server, &hosts.client] {
            assert!(host.group.is_terminated() && host.queue_pairs.is_empty());
        }
    }
}

/// What arrives late on a link that failed starts nothing, whatever it is; but the end of the group
/// is true wherever it is heard.
// RFC 7609 C.7.1 #27: ignore commands only on failed link
// RFC 7609 3.5.4 #8: client drops deleted group at once
#[test]
fn a_failed_link_says_nothing_but_the_end() {
    let mut hosts = two_links();
    hosts.client.group.link_broke(hosts.now, SECOND_LINK);
    hosts.run_until(|from, llc| from == Role::Client && matches!(llc, Llc::DeleteLink(_)));
    let told = hosts.client.told.len();
    let before = hosts.flying(Role::Client);
    let now = hosts.now;
    let group = &mut hosts.client.group;
    assert_eq!(group.handle_bytes(now, SECOND_LINK, &[0x45; LEN]), Ok(()), "garbage");
    for message in [lost(LINK), add_link()] {
        assert_eq!(group.handle_llc(now, SECOND_LINK, &message), Ok(()));
    }
    hosts.act();
    assert_eq!((hosts.client.told.len(), hosts.flying(Role::Client)), (told, before));
    let all = DeleteLink { all: true, ..delete_link(UNNUMBERED, true, DeleteReason::OPERATOR) };
    hosts.tell(Role::Client, SECOND_LINK, Llc::DeleteLink(all));
    assert!(hosts.client.group.is_terminated());
}

/// A client that wants its only link away before it is confirmed must not leave a server waiting
/// for ever, and the application with it.
// RFC 7609 A.3.4 #9: client's DELETE LINK is a notice
#[test]
fn a_first_link_can_be_deleted_before_its_time() {
    let mut server = LinkGroup::new_server(T0, setup(8, 64), LINK);
    server.link_connected(T0, LINK);
    drain(&mut server);
    server.handle_llc(T0, LINK, &lost(LINK)).unwrap();
    let reply = ConfirmLink { reply: true, ..confirm_link() };
    server.handle_llc(T0, LINK, &Llc::ConfirmLink(reply)).unwrap();
    assert_eq!(drain(&mut server), [Action::Send(LINK, lost(LINK))]);
    server.handle_timeout(T0 + LINK_EXCHANGE_WAIT);
    assert!(server.is_terminated());
}

/// The server gives up an offer while the client's caller opens the queue pair. The client must not
/// accept the offer later, or the server takes the link that carried the answer for failed.
// RFC 7609 C.7.1 #4: clean up unconfirmed link, retry later
#[test]
fn an_offer_can_be_withdrawn() {
    let mut client = Pair::established().client;
    client.handle_llc(T0, LINK, &add_link()).unwrap();
    drain(&mut client);
    client.handle_llc(T0, LINK, &lost(SECOND_LINK)).unwrap();
    let Llc::DeleteLink(request) = lost(SECOND_LINK) else { unreachable!() };
    let reply = Llc::DeleteLink(DeleteLink { reply: true, ..request });
    assert_eq!(drain(&mut client), [Action::Send(LINK, reply)]);
    client.link_opened(T0, SECOND_LINK, end(65), LinkUserId(65), &[]);
    assert_eq!(drain(&mut client), [Action::LinkFailed(SECOND_LINK, Cause::DeletedByUs)]);
}
