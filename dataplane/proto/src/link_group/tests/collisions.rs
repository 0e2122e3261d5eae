//! Every collision of RFC 3.5.5.3.1 to 3.5.5.3.3, at each step of the exchange that it meets.

use std::vec::Vec;

use super::hosts::{Hosts, port};
use super::rkeys::{announce, links};
use super::*;

const THIRD_LINK: LinkNumber = LinkNumber(3);

/// What the server of an exchange waits for when the other message comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    AddLink,
    Rkeys,
    ConfirmLink,
    Vacate,
    DeleteLink,
    ConfirmRkey,
}

const ADDING: [Step; 3] = [Step::AddLink, Step::Rkeys, Step::ConfirmLink];
const DELETING: [Step; 2] = [Step::Vacate, Step::DeleteLink];

/// Two links, and an exchange of the server that has come so far. It goes over the first link; a
/// third link is added, or the second deleted. Everything of the server arrives, no answer does.
fn at(step: Step) -> Hosts {
    let mut hosts = links(2);
    match step {
        Step::AddLink | Step::Rkeys | Step::ConfirmLink => {
            hosts = Hosts::established(&[1, 2, 3, 4], &[101, 102, 103, 104], 4);
            hosts.server.group.want_link(hosts.now, port(3));
            hosts.run_until(|from, llc| match llc {
                Llc::AddLink(_) => from == Role::Client && step == Step::AddLink,
                Llc::AddLinkContinuation(_) => from == Role::Client && step == Step::Rkeys,
                Llc::ConfirmLink(_) => from == Role::Client && step == Step::ConfirmLink,
                Llc::DeleteLink(_) | Llc::TestLink(_) | Llc::ConfirmRkey(_) => false,
                Llc::ConfirmRkeyContinuation(_) | Llc::DeleteRkey(_) => false,
            });
        }
        Step::Vacate | Step::DeleteLink => {
            hosts.server.is_quick = step == Step::DeleteLink;
            let orderly = step == Step::Vacate;
            let reason = DeleteReason::OPERATOR;
            hosts.server.group.delete_link(hosts.now, SECOND_LINK, reason, orderly);
            hosts.act();
        }
        Step::ConfirmRkey => announce(&mut hosts, Role::Server, 7),
    }
    hosts
}

/// Whatever the exchange waited for comes.
fn finish(hosts: &mut Hosts) {
    hosts.server.is_quick = true;
    let now = hosts.now;
    hosts.server.vacate(now);
    hosts.run();
    hosts.sleep(1);
}

/// The numbers of the links that both sides have.
fn left(hosts: &Hosts) -> Vec<u8> {
    assert_eq!(hosts.server.up(), hosts.client.up());
    hosts.server.up().into_iter().map(|number| number.0).collect()
}

fn delete(link: LinkNumber, all: bool, orderly: bool) -> Llc {
    let reason = if orderly { DeleteReason::OPERATOR } else { DeleteReason::LOST_PATH };
    Llc::DeleteLink(DeleteLink { reply: false, all, orderly, link, reason })
}

/// What one side sends because of a message.
fn answers(hosts: &mut Hosts, to: Role, on: LinkNumber, message: Llc) -> Vec<(LinkNumber, Llc)> {
    let before = hosts.flying(to);
    hosts.tell(to, on, message);
    let mut after = hosts.flying(to);
    for message in before {
        let place = after.iter().position(|one| *one == message).unwrap();
        after.remove(place);
    }
    after
}

/// TEST LINK is answered at once during any exchange: a peer that waits too long for the answer
/// gives up a link that works.
// RFC 7609 3.3 #4: TEST LINK on the tested link
// RFC 7609 3.5.5.3 #1: TEST LINK at any time
// RFC 7609 3.5.5.3.1 #1: answer TEST LINK during ADD LINK
// RFC 7609 3.5.5.3.2 #1: answer TEST LINK during DELETE LINK
// RFC 7609 3.5.5.3.3 #1: answer TEST LINK during CONFIRM RKEY
// RFC 7609 A.3.8 #3: TEST LINK from either side
#[test]
fn test_link_is_answered_at_any_time() {
    let steps = [ADDING.as_slice(), DELETING.as_slice(), &[Step::ConfirmRkey]].concat();
    for step in steps {
        let mut hosts = at(step);
        let test = TestLink { reply: false, user_data: [9; 16] };
        let reply = Llc::TestLink(TestLink { reply: true, ..test });
        for on in [LINK, SECOND_LINK] {
            for to in [Role::Server, Role::Client] {
                let answer = answers(&mut hosts, to, on, Llc::TestLink(test));
                assert_eq!(answer, [(on, reply)], "{step:?} {to:?}");
            }
        }
        hosts.lose(Role::Server);
        assert!(hosts.client.group.is_established());
    }
}

/// The client's ADD LINK crosses the server's: the server's is taken for the answer to it, and one
/// link is made of both, not two.
// RFC 7609 3.5.5.3 #2: client's ADD LINK at any time
// RFC 7609 3.5.5.3.1 #2: ignore client's crossing ADD LINK
// RFC 7609 3.5.5.1.2 #4: ignore client's ADD LINK at limit
#[test]
fn add_link_of_the_client_during_add_link_is_ignored() {
    for step in ADDING {
        let mut hosts = at(step);
        let (link, (gid, mac)) = (LinkNumber(0), port(104));
        let Llc::AddLink(notice) = add_link() else { unreachable!() };
        let notice = Llc::AddLink(AddLink { link, gid, mac, ..notice });
        assert_eq!(answers(&mut hosts, Role::Server, LINK, notice), [], "{step:?}");
        assert_eq!(hosts.server.group.dropped(), 1);
        finish(&mut hosts);
        assert_eq!(left(&hosts), [1, 2, 3], "{step:?}");
    }
}

/// Both sides notice at the same time that there are RNICs without a link. The client takes the
/// offer for the answer to what it said, and does not ask again.
// RFC 7609 3.5.5.3.1 #3: take crossing ADD LINK as answer
// RFC 7609 3.5.5.3.1 #2: ignore client's crossing ADD LINK
#[test]
fn an_offer_that_crosses_answers_the_client() {
    let mut hosts = Hosts::established(&[1, 2, 3], &[101, 102, 103], 3);
    let now = hosts.now;
    hosts.server.group.want_link(now, port(3));
    hosts.client.group.want_link(now, port(103));
    hosts.act();
    assert_eq!((hosts.flying(Role::Server).len(), hosts.flying(Role::Client).len()), (1, 1));
    hosts.run();
    assert_eq!(left(&hosts), [1, 2, 3]);
    hosts.sleep(50);
    let notices = hosts.seen.iter().filter(|(from, _, llc)| {
        *from == Role::Client && matches!(llc, Llc::AddLink(one) if !one.reply)
    });
    assert_eq!(notices.count(), 1);
}

/// A client asks for the deletion of a link while another one is added. The server deletes it
/// afterwards; connections of a link that has failed move at once.
// RFC 7609 3.5.5.3 #3: client's DELETE LINK at any time
// RFC 7609 3.5.5.3 #6: one exchange: ADD LINK through CONFIRM LINK
// RFC 7609 3.5.5.3.1 #4: client's DELETE LINK waits for ADD LINK
// RFC 7609 3.5.5.1.4 #2: delete later upon orderly request
// RFC 7609 A.3.4 #9: client's DELETE LINK is a notice
// RFC 7609 A.3.4 #10: finish other work before orderly deletion
#[test]
fn delete_link_of_the_client_during_add_link_waits() {
    for step in ADDING {
        for orderly in [true, false] {
            let mut hosts = at(step);
            let told = hosts.server.told.len();
            let request = delete(SECOND_LINK, false, orderly);
            assert_eq!(answers(&mut hosts, Role::Server, LINK, request), [], "{step:?}");
            let failed = [Action::LinkFailed(SECOND_LINK, Cause::DeletedByPeer)];
            assert_eq!(hosts.server.told[told..], failed[usize::from(orderly)..]);
            finish(&mut hosts);
            assert_eq!(left(&hosts), [1, 3], "{step:?}");
            hosts.assert_rkeys_agree();
        }
    }
}

/// The link that is to go is the one that carries the exchange. If it works, the exchange goes on;
/// if it has failed, the new link is given up with it, and the group lives on by the third.
// RFC 7609 3.5.5.3.1 #4: client's DELETE LINK waits for ADD LINK
#[test]
fn delete_link_of_the_carrier_during_add_link() {
    for step in ADDING {
        let mut hosts = at(step);
        hosts.tell(Role::Server, SECOND_LINK, delete(LINK, false, true));
        finish(&mut hosts);
        assert_eq!(left(&hosts), [2, 3], "{step:?}");

        let mut hosts = at(step);
        hosts.client.group.link_broke(hosts.now, LINK);
        hosts.cut.insert(LINK);
        hosts.wires.retain(|(_, link), _| *link != LINK);
        finish(&mut hosts);
        let expected = if step == Step::ConfirmLink { &[2, 3][..] } else { &[2] };
        assert_eq!(left(&hosts), expected, "{step:?}");
        hosts.sleep(30);
        assert!(left(&hosts).len() > 1, "tried again");
        hosts.assert_rkeys_agree();
    }
}

/// The end of the group does not wait for anything.
// RFC 7609 3.5.5.3 #4: DELETE LINK for group at any time
// RFC 7609 3.5.5.3.1 #5: end of group interrupts ADD LINK
// RFC 7609 3.5.5.3.2 #4: end of group interrupts DELETE LINK
// RFC 7609 3.5.5.3.3 #6: end of group interrupts CONFIRM RKEY
// RFC 7609 3.5.4 #8: client drops deleted group at once
#[test]
fn the_end_of_the_group_waits_for_nothing() {
    let steps = [ADDING.as_slice(), DELETING.as_slice(), &[Step::ConfirmRkey]].concat();
    for step in steps {
        for to in [Role::Server, Role::Client] {
            let mut hosts = at(step);
            hosts.tell(to, LINK, delete(UNNUMBERED, true, true));
            let group = &hosts.host(to).group;
            assert!(group.is_terminated() && group.poll_timeout().is_none());
            let told = hosts.host(to).told.last();
            assert_eq!(told, Some(&Action::Terminate(Cause::DeletedByPeer)), "{step:?}");
        }
    }
}

/// A client has a new RMB while links change. The server cannot take its keys now; the client
/// begins anew when it knows for which links. Otherwise a failover would find no key.
// RFC 7609 3.5.5.3 #8: no RKey exchange beside link changes
// RFC 7609 3.5.5.3.1 #6: refuse CONFIRM RKEY during ADD LINK
// RFC 7609 3.5.5.3.1 #7: repeat CONFIRM RKEY after ADD LINK
// RFC 7609 3.5.5.3.2 #5: refuse CONFIRM RKEY during DELETE LINK
// RFC 7609 3.5.5.3.2 #6: repeat CONFIRM RKEY after DELETE LINK
// RFC 7609 3.5.5.3.3 #3: server's ADD LINK interrupts CONFIRM RKEY
// RFC 7609 3.5.5.3.3 #5: server's DELETE LINK interrupts CONFIRM RKEY
// RFC 7609 A.3.5 #9: begin again after a retry flag
#[test]
fn confirm_rkey_of_the_client_while_links_change_is_repeated() {
    for step in [Step::AddLink, Step::DeleteLink] {
        let mut hosts = links(2);
        hosts.server.ports.insert(3);
        hosts.client.ports.insert(103);
        announce(&mut hosts, Role::Client, 7);
        // It crosses what the server begins.
        let [(LINK, confirm @ Llc::ConfirmRkey(request))] = hosts.flying(Role::Client)[..] else {
            panic!("{:?}", hosts.flying(Role::Client));
        };
        hosts.lose(Role::Client);
        if step == Step::AddLink {
            hosts.break_link(SECOND_LINK);
            hosts.run();
            hosts.server.group.want_link(hosts.now, port(3));
        } else {
            let reason = DeleteReason::OPERATOR;
            hosts.server.group.delete_link(hosts.now, SECOND_LINK, reason, false);
        }
        hosts.act();
        assert_eq!(hosts.flying(Role::Server).len(), 1, "the exchange of the server");
        let answer = answers(&mut hosts, Role::Server, LINK, confirm);
        let refusal = ConfirmRkey { reply: true, negative: true, retry: true, ..request };
        assert_eq!(answer, [(LINK, Llc::ConfirmRkey(refusal))]);
        finish(&mut hosts);
        assert!(hosts.client.told.contains(&Action::RmbConfirmed(RmbIndex(7))), "{step:?}");
        assert_eq!(left(&hosts).len(), if step == Step::AddLink { 2 } else { 1 });
        hosts.assert_rkeys_agree();
    }
}

/// At each step of an exchange about links the server refuses keys, and says that it is for now.
// RFC 7609 3.5.5.3.1 #6: refuse CONFIRM RKEY during ADD LINK
// RFC 7609 3.5.5.3.2 #5: refuse CONFIRM RKEY during DELETE LINK
#[test]
fn confirm_rkey_is_refused_at_every_step() {
    for step in ADDING.into_iter().chain([Step::DeleteLink]) {
        let mut hosts = at(step);
        let request = ConfirmRkey {
            reply: false,
            negative: false,
            retry: false,
            other_links: 1,
            rkey: Rkey(0x77),
            address: 0x7000,
            others: Default::default(),
        };
        let refusal = ConfirmRkey { reply: true, negative: true, retry: true, ..request };
        let answer = answers(&mut hosts, Role::Server, LINK, Llc::ConfirmRkey(request));
        assert_eq!(answer, [(LINK, Llc::ConfirmRkey(refusal))], "{step:?}");
        assert_eq!(hosts.server.group.peer_rmb(LINK, Rkey(0x77), LINK), None);
    }
}

/// Connections leave a link that works, which may take seconds. New connections begin meanwhile,
/// with new RMBs, because no DELETE LINK was sent yet. It is sent when those RMBs are confirmed.
// RFC 7609 3.5.5.3 #5: one changing exchange at a time
// RFC 7609 3.5.5.3 #8: no RKey exchange beside link changes
// RFC 7609 3.5.5.2.1 #5: CLC waits for RMB on demand
#[test]
fn rmbs_are_announced_while_a_link_is_vacated() {
    let mut hosts = links(5);
    hosts.server.is_quick = false;
    let now = hosts.now;
    hosts.server.group.delete_link(now, LinkNumber(5), DeleteReason::OPERATOR, true);
    announce(&mut hosts, Role::Server, 7);
    announce(&mut hosts, Role::Client, 8);
    hosts.run();
    assert_eq!(hosts.server.vacating, [LinkNumber(5)]);
    assert!(hosts.server.told.contains(&Action::RmbConfirmed(RmbIndex(7))));
    assert!(hosts.client.told.contains(&Action::RmbConfirmed(RmbIndex(8))));
    // Another announcement of each side is half through when the link is vacated.
    announce(&mut hosts, Role::Server, 9);
    announce(&mut hosts, Role::Client, 10);
    hosts.run_until(|_, llc| matches!(llc, Llc::ConfirmRkeyContinuation(_)));
    hosts.server.vacate(now);
    hosts.act();
    let deletes = |(_, llc): &(LinkNumber, Llc)| matches!(llc, Llc::DeleteLink(_));
    assert!(!hosts.flying(Role::Server).iter().any(deletes));
    hosts.run();
    assert_eq!(left(&hosts), [1, 2, 3, 4]);
    for host in [&hosts.server, &hosts.client] {
        let failed = host.told.iter().filter(|one| matches!(one, Action::LinkFailed(..)));
        assert_eq!(failed.count(), 1, "{:?}", host.told);
    }
    hosts.sleep(1);
    hosts.assert_rkeys_agree();
}

/// A client's RNIC comes up while a link is deleted, or an RMB announced: it gets its link then.
// RFC 7609 3.5.5.3.2 #2: client's ADD LINK waits for DELETE LINK
// RFC 7609 3.5.5.3.3 #2: client's ADD LINK waits for CONFIRM RKEY
#[test]
fn add_link_of_the_client_waits_for_other_exchanges() {
    for step in [Step::Vacate, Step::DeleteLink, Step::ConfirmRkey] {
        let mut hosts = at(step);
        if step == Step::ConfirmRkey {
            // Two links were agreed on, so one has to go first.
            hosts.run();
            hosts.break_link(SECOND_LINK);
            hosts.run();
            announce(&mut hosts, Role::Server, 8);
        }
        hosts.server.ports.insert(3);
        hosts.client.ports.insert(103);
        let (link, (gid, mac)) = (LinkNumber(0), port(103));
        let Llc::AddLink(notice) = add_link() else { unreachable!() };
        let notice = Llc::AddLink(AddLink { link, gid, mac, ..notice });
        assert_eq!(answers(&mut hosts, Role::Server, LINK, notice), [], "{step:?}");
        let asked = |one: &Action| matches!(one, Action::OpenLink { .. });
        assert!(!hosts.server.told.iter().any(asked), "{step:?}");
        finish(&mut hosts);
        assert!(hosts.server.told.iter().any(asked), "{step:?}");
        assert_eq!(left(&hosts).len(), 2);
        hosts.assert_rkeys_agree();
    }
}

/// A client asks for the deletion of a link while another one is deleted, or an RMB announced: the
/// server does one after the other.
// RFC 7609 3.5.5.3 #3: client's DELETE LINK at any time
// RFC 7609 3.5.5.3 #7: one exchange: DELETE LINK and reply
// RFC 7609 3.5.5.3.2 #3: client's DELETE LINK waits for server's
// RFC 7609 3.5.5.3.3 #4: client's DELETE LINK waits for CONFIRM RKEY
#[test]
fn delete_link_of_the_client_waits_for_other_exchanges() {
    for step in [Step::Vacate, Step::DeleteLink, Step::ConfirmRkey] {
        for orderly in [true, false] {
            let mut hosts = links(3);
            hosts.server.is_quick = step != Step::Vacate;
            if step == Step::ConfirmRkey {
                announce(&mut hosts, Role::Server, 7);
            } else {
                let (now, reason) = (hosts.now, DeleteReason::OPERATOR);
                let first = step == Step::Vacate;
                hosts.server.group.delete_link(now, SECOND_LINK, reason, first);
                hosts.act();
            }
            let request = delete(THIRD_LINK, false, orderly);
            assert_eq!(answers(&mut hosts, Role::Server, LINK, request), [], "{step:?}");
            finish(&mut hosts);
            let expected = if step == Step::ConfirmRkey { &[1, 2][..] } else { &[1] };
            assert_eq!(left(&hosts), expected, "{step:?}");
            hosts.assert_rkeys_agree();
        }
    }
}

/// Both sides announce RMBs, or withdraw them, at the same time: neither waits for the other.
// RFC 7609 3.5.5.3 #9: RKey exchanges of both may overlap
// RFC 7609 A.3.7 #8: DELETE RKEY at any time
#[test]
fn rkeys_of_both_sides_change_independently() {
    let mut hosts = links(2);
    announce(&mut hosts, Role::Server, 7);
    announce(&mut hosts, Role::Client, 8);
    assert_eq!((hosts.flying(Role::Server).len(), hosts.flying(Role::Client).len()), (1, 1));
    hosts.run();
    assert!(hosts.server.told.contains(&Action::RmbConfirmed(RmbIndex(7))));
    assert!(hosts.client.told.contains(&Action::RmbConfirmed(RmbIndex(8))));
    hosts.server.group.withdraw_rmb(hosts.now, RmbIndex(7));
    announce(&mut hosts, Role::Client, 9);
    hosts.run();
    assert!(hosts.server.told.contains(&Action::RmbDeleted(RmbIndex(7))));
    assert!(hosts.client.told.contains(&Action::RmbConfirmed(RmbIndex(9))));
    hosts.assert_rkeys_agree();
}

/// A server with several exchanges to begin begins one after the other, and forgets none.
// RFC 7609 3.5.5.3 #5: one changing exchange at a time
// RFC 7609 3.5.5.3 #6: one exchange: ADD LINK through CONFIRM LINK
// RFC 7609 3.5.5.3 #7: one exchange: DELETE LINK and reply
// RFC 7609 3.5.5.3 #8: no RKey exchange beside link changes
#[test]
fn exchanges_of_the_server_stand_in_line() {
    let mut hosts = links(3);
    let now = hosts.now;
    announce(&mut hosts, Role::Server, 7);
    hosts.server.group.delete_link(now, SECOND_LINK, DeleteReason::OPERATOR, false);
    hosts.server.group.delete_link(now, THIRD_LINK, DeleteReason::OPERATOR, false);
    hosts.server.group.want_link(now, port(2));
    announce(&mut hosts, Role::Server, 8);
    while let Some(wire) = hosts.wires.keys().next().copied() {
        let requests = hosts.flying(Role::Server);
        assert!(requests.len() <= 1, "{requests:?}");
        hosts.deliver(wire);
        hosts.act();
    }
    assert_eq!(left(&hosts), [1, 4]);
    for rmb in [7, 8] {
        assert!(hosts.server.told.contains(&Action::RmbConfirmed(RmbIndex(rmb))));
    }
    hosts.assert_rkeys_agree();
}
