//! The rkeys of RMBs on all links: announced, told for new links, deleted.

use std::vec::Vec;

use super::hosts::{Hosts, key, port};
use super::*;
use crate::limits::RKEY_REPLY_WAIT;
use crate::wire::llc::rkeys::RkeyOnLink;
use crate::wire::llc::{AddLinkContinuation, ConfirmRkeyContinuation, RkeyPair};

/// As many links as there are RNICs on either side.
pub(super) fn links(count: u8) -> Hosts {
    let (server, client): (Vec<u8>, Vec<u8>) = (1..=count).map(|one| (one, 100 + one)).unzip();
    let mut hosts = Hosts::established(&server, &client, count.max(2));
    for number in 3..=count {
        hosts.server.group.want_link(hosts.now, port(number));
        hosts.run();
    }
    assert_eq!(hosts.server.up().len(), usize::from(count));
    hosts.seen.clear();
    hosts.server.told.clear();
    hosts.client.told.clear();
    hosts
}

/// One side has another RMB, and says so.
pub(super) fn announce(hosts: &mut Hosts, role: Role, rmb: u8) {
    let now = hosts.now;
    let host = hosts.host(role);
    host.rmbs.insert(RmbIndex(rmb));
    let keys = host.keys(RmbIndex(rmb));
    host.group.announce_rmb(now, RmbIndex(rmb), &keys);
    hosts.act();
}

fn is_continuation(_: Role, llc: &Llc) -> bool {
    matches!(llc, Llc::ConfirmRkeyContinuation(_))
}

/// Figure 12, with as many links as there can be: no connection uses the RMB before the peer knows
/// it on every link, or a failover would end it.
// RFC 7609 2.1 #3: one RToken per RMB and link
// RFC 7609 3.5.5.2.1 #1: CONFIRM RKEY tells all RTokens
// RFC 7609 3.5.5.2.1 #2: pair RTokens with link numbers
// RFC 7609 3.5.5.2.1 #3: no use before RTokens are known
// RFC 7609 3.5.5.2.1 #5: CLC waits for RMB on demand
// RFC 7609 3.5.5.2 #1: register RMBs on all links
// RFC 7609 2.2 #4: same RMBs on all links
// RFC 7609 A.3.5 #7: further RTokens in CONFIRM RKEY CONTINUATION
// RFC 7609 A.3.5 #11: CONFIRM RKEY over any link
// RFC 7609 A.3.5 #12: at most eight links per group
// RFC 7609 A.3.6 #2: byte 4 counts RTokens left
// RFC 7609 A.3.6 #4: continuation reply repeats the request
// RFC 7609 2.2.2 #1: at most eight symmetric links
// RFC 7609 2.2.2 #2: support at least two links
#[test]
fn an_rmb_is_announced_for_up_to_eight_links() {
    for count in 1..=8u8 {
        for role in [Role::Server, Role::Client] {
            let mut hosts = links(count);
            announce(&mut hosts, role, 7);
            let mut others = Vec::new();
            while let Some((wire, _)) = hosts.wires.iter().next() {
                let wire = *wire;
                assert!(!hosts.host(role).told.contains(&Action::RmbConfirmed(RmbIndex(7))));
                hosts.deliver(wire);
                hosts.act();
            }
            for (_, on, llc) in &hosts.seen {
                assert_eq!(*on, LINK, "all of it on one link");
                if let Llc::ConfirmRkey(one) = llc
                    && !one.reply
                {
                    assert_eq!(one.other_links, count - 1);
                    let brought = usize::from(one.other_links.min(2));
                    others.extend(one.others[..brought].iter().map(|key| key.link.0));
                }
                if let Llc::ConfirmRkeyContinuation(more) = llc
                    && !more.reply
                {
                    let left = usize::from(count) - 1 - others.len();
                    assert_eq!(usize::from(more.remaining), left);
                    let brought = left.min(3);
                    others.extend(more.others[..brought].iter().map(|key| key.link.0));
                }
            }
            others.sort_unstable();
            assert_eq!(others, (2..=count).collect::<Vec<u8>>());
            assert!(hosts.host(role).told.contains(&Action::RmbConfirmed(RmbIndex(7))));
            hosts.assert_rkeys_agree();
        }
    }
}

/// A link is deleted between two messages of an announcement. The rkeys behind its own move up and
/// must not be left out: the peer would give up a healthy link for which it has no rkey.
// RFC 7609 A.3.6 #2: byte 4 counts RTokens left
#[test]
fn a_link_that_goes_hides_no_other() {
    let mut hosts = links(6);
    announce(&mut hosts, Role::Server, 7);
    hosts.deliver(*hosts.wires.keys().next().unwrap());
    hosts.act();
    hosts.server.group.link_broke(hosts.now, SECOND_LINK);
    hosts.run();
    for host in [&hosts.server, &hosts.client] {
        assert_eq!(host.up().len(), 5, "only one link was lost");
    }
    hosts.assert_rkeys_agree();
}

/// Half of an announcement has come. Links do not change before the other half, or it would leave
/// out a link that nobody told it of; and a peer that never says it does not stop the group.
// RFC 7609 3.5.5.3 #5: one changing exchange at a time
// RFC 7609 3.5.5.3 #8: no RKey exchange beside link changes
#[test]
fn links_wait_for_an_announcement_in_parts() {
    let mut hosts = links(5);
    hosts.server.group.delete_link(hosts.now, LinkNumber(5), DeleteReason::OPERATOR, false);
    hosts.run();
    announce(&mut hosts, Role::Client, 7);
    hosts.run_until(is_continuation);
    hosts.server.group.want_link(hosts.now, port(5));
    hosts.act();
    assert!(!hosts.server.told.iter().any(|one| matches!(one, Action::OpenLink { .. })));
    hosts.run();
    assert_eq!(hosts.server.up().len(), 5);
    hosts.assert_rkeys_agree();

    announce(&mut hosts, Role::Client, 8);
    hosts.run_until(is_continuation);
    hosts.lose(Role::Client);
    hosts.server.group.handle_timeout(hosts.now + RKEY_REPLY_WAIT);
    hosts.act();
    assert_eq!(hosts.server.told.last(), Some(&Action::LinkFailed(LINK, Cause::LlcTimedOut)));
}

/// Counts that do not fit are no message that an honest peer sends: keys would be mixed up.
// RFC 7609 C.7.1 #35: any other LLC error fails link
// RFC 7609 A.3.6 #2: byte 4 counts RTokens left
#[test]
fn a_continuation_that_miscounts_is_an_offence() {
    let mut hosts = links(6);
    announce(&mut hosts, Role::Client, 7);
    hosts.run_until(is_continuation);
    let [(LINK, Llc::ConfirmRkeyContinuation(more))] = hosts.flying(Role::Client)[..] else {
        panic!("{:?}", hosts.flying(Role::Client));
    };
    let wrong = Llc::ConfirmRkeyContinuation(ConfirmRkeyContinuation { remaining: 4, ..more });
    let now = hosts.now;
    let outcome = hosts.server.group.handle_llc(now, LINK, &wrong);
    assert_eq!(outcome, Err(PeerMisbehaved::UnexpectedMessage));
    hosts.act();
    assert!(hosts.server.told.contains(&Action::LinkFailed(LINK, Cause::PeerMisbehaved)));
    assert_eq!(hosts.server.up().len(), 5);
}

/// Link three takes the place of link two. The rkeys of link two mean nothing on link three: with
/// one that is left over we would write where the peer never allowed it.
// RFC 7609 2.1 #3: one RToken per RMB and link
// RFC 7609 3.5.5.2 #1: register RMBs on all links
// RFC 7609 3.5.5.2.3 #1: new RTokens for a joining link
#[test]
fn keys_of_a_link_go_with_it() {
    let mut hosts = links(2);
    let (first, _) = key(Role::Client, RmbIndex(0), LINK);
    let (second, _) = key(Role::Client, RmbIndex(0), SECOND_LINK);
    hosts.break_link(SECOND_LINK);
    hosts.run();
    assert_eq!(hosts.server.group.peer_rmb(LINK, first, SECOND_LINK), None);
    hosts.server.group.want_link(hosts.now, port(2));
    hosts.run_until(|from, llc| from == Role::Client && matches!(llc, Llc::AddLinkContinuation(_)));
    // This client does not tell of its RMB.
    let [(LINK, Llc::AddLinkContinuation(told))] = hosts.flying(Role::Client)[..] else {
        panic!("{:?}", hosts.flying(Role::Client));
    };
    hosts.lose(Role::Client);
    let none = AddLinkContinuation { remaining: 0, pairs: Default::default(), ..told };
    hosts.tell(Role::Server, LINK, Llc::AddLinkContinuation(none));
    hosts.run();
    assert!(hosts.server.up().contains(&told.link));
    assert_eq!(hosts.server.group.peer_rmb(LINK, first, told.link), None);
    assert_eq!(hosts.server.group.peer_rmb(told.link, second, LINK), None);
}

/// And the other way round: for an RMB that has no rkey on the new link we tell none, and not the
/// rkey that it had on the link before.
// RFC 7609 2.1 #3: one RToken per RMB and link
// RFC 7609 3.5.5.2.3 #2: pair known with new RToken
#[test]
fn no_old_key_is_told_of_a_new_link() {
    let mut hosts = links(2);
    hosts.break_link(SECOND_LINK);
    hosts.run();
    hosts.client.rmbs.clear();
    hosts.server.group.want_link(hosts.now, port(2));
    hosts.run_until(|from, llc| from == Role::Client && matches!(llc, Llc::AddLinkContinuation(_)));
    let [(LINK, Llc::AddLinkContinuation(told))] = hosts.flying(Role::Client)[..] else {
        panic!("{:?}", hosts.flying(Role::Client));
    };
    assert_eq!(told.pairs, <[_; 2]>::default());
}

/// The answer to an announcement comes when the second link has gone and a third has come in its
/// place. The peer was told of the second, so it has to be told of the third.
// RFC 7609 3.5.5.2 #1: register RMBs on all links
// RFC 7609 3.5.5.2.1 #1: CONFIRM RKEY tells all RTokens
// RFC 7609 3.5.5.3.3 #3: server's ADD LINK interrupts CONFIRM RKEY
#[test]
fn what_was_told_of_a_link_is_not_told_of_its_successor() {
    let mut hosts = links(2);
    announce(&mut hosts, Role::Client, 7);
    let [(LINK, Llc::ConfirmRkey(request))] = hosts.flying(Role::Client)[..] else {
        panic!("{:?}", hosts.flying(Role::Client));
    };
    hosts.lose(Role::Client);
    hosts.break_link(SECOND_LINK);
    hosts.run();
    hosts.server.group.want_link(hosts.now, port(2));
    hosts.run();
    let third = hosts.client.up().into_iter().next_back().unwrap();
    assert!(third > SECOND_LINK && hosts.client.up().len() == 2);
    let reply = Llc::ConfirmRkey(ConfirmRkey { reply: true, ..request });
    hosts.tell(Role::Client, LINK, reply);
    let [(LINK, Llc::ConfirmRkey(again))] = hosts.flying(Role::Client)[..] else {
        panic!("{:?}", hosts.flying(Role::Client));
    };
    assert_eq!((again.rkey, again.others[0].link), (request.rkey, third));
    hosts.run();
    hosts.assert_rkeys_agree();
}

/// An RMB was refused because links change. As soon as they have, it is announced again: a
/// connection waits for it.
// RFC 7609 3.5.5.3.1 #7: repeat CONFIRM RKEY after ADD LINK
// RFC 7609 3.5.5.3.2 #6: repeat CONFIRM RKEY after DELETE LINK
// RFC 7609 A.3.5 #9: begin again after a retry flag
#[test]
fn an_announcement_follows_the_change_at_once() {
    for deleting in [true, false] {
        let mut hosts = links(2);
        if !deleting {
            hosts.break_link(SECOND_LINK);
            hosts.run();
        }
        announce(&mut hosts, Role::Client, 7);
        for time in [1, 50, 100, 200, 400] {
            hosts.tick(Duration::from_millis(time));
            let [(LINK, Llc::ConfirmRkey(request))] = hosts.flying(Role::Client)[..] else {
                panic!("{:?}", hosts.flying(Role::Client));
            };
            hosts.lose(Role::Client);
            let refusal = ConfirmRkey { reply: true, negative: true, retry: true, ..request };
            hosts.tell(Role::Client, LINK, Llc::ConfirmRkey(refusal));
        }
        assert!(hosts.flying(Role::Client).is_empty(), "it would take 800 ms now");
        if deleting {
            let reason = DeleteReason::OPERATOR;
            hosts.server.group.delete_link(hosts.now, SECOND_LINK, reason, false);
        } else {
            hosts.server.group.want_link(hosts.now, port(2));
        }
        let is_ours = |from, llc: &Llc| match llc {
            Llc::ConfirmRkey(one) => from == Role::Client && !one.reply,
            Llc::ConfirmLink(_) | Llc::AddLink(_) | Llc::AddLinkContinuation(_) => false,
            Llc::DeleteLink(_) | Llc::ConfirmRkeyContinuation(_) => false,
            Llc::DeleteRkey(_) | Llc::TestLink(_) => false,
        };
        hosts.run_until(is_ours);
        hosts.run();
        hosts.sleep(1);
        hosts.assert_rkeys_agree();
    }
}

/// The link that an announcement went over is deleted before the answer comes. There will be none,
/// and nobody waits for it.
// RFC 7609 2.3 #11: restart LLC exchanges, do not replay
#[test]
fn an_announcement_over_a_deleted_link_is_made_again_at_once() {
    let mut hosts = links(2);
    announce(&mut hosts, Role::Client, 7);
    hosts.lose(Role::Client);
    let reason = DeleteReason::OPERATOR;
    let (reply, all, orderly, link) = (false, false, false, LINK);
    let delete = DeleteLink { reply, all, orderly, link, reason };
    hosts.tell(Role::Client, SECOND_LINK, Llc::DeleteLink(delete));
    let again = hosts.flying(Role::Client);
    let is_it =
        |(on, llc): &(LinkNumber, Llc)| *on == SECOND_LINK && matches!(llc, Llc::ConfirmRkey(_));
    assert!(again.iter().any(is_it), "{again:?}");
}

/// The peer has no room for an RMB that is in use, on a link that came later. It is told again and
/// again, but nobody with a new RMB waits behind it.
// RFC 7609 3.5.5.2.1 #5: CLC waits for RMB on demand
#[test]
fn an_rmb_that_is_refused_holds_up_no_other() {
    let mut hosts = links(2);
    // The client believes that the server was told for the first link only.
    hosts.client.group.our_rmbs.told[0] = 1;
    announce(&mut hosts, Role::Client, 7);
    for _ in 0..40 {
        let flying = hosts.flying(Role::Client);
        hosts.lose(Role::Client);
        for (on, llc) in flying {
            let Llc::ConfirmRkey(request) = llc else { panic!("{llc:?}") };
            let old = request.rkey == key(Role::Client, RmbIndex(0), LINK).0;
            let reply = ConfirmRkey { reply: true, negative: old, retry: old, ..request };
            hosts.tell(Role::Client, on, Llc::ConfirmRkey(reply));
        }
        hosts.tick(SECOND / 4);
    }
    assert!(hosts.client.told.contains(&Action::RmbConfirmed(RmbIndex(7))));
    announce(&mut hosts, Role::Client, 8);
    let rkey = key(Role::Client, RmbIndex(8), LINK).0;
    let is_it = |llc: &Llc| matches!(llc, Llc::ConfirmRkey(one) if one.rkey == rkey);
    assert!(hosts.flying(Role::Client).iter().any(|(_, llc)| is_it(llc)));
    assert!(!hosts.client.told.contains(&Action::RmbRefused(RmbIndex(0))), "it is in use");
}

/// A continuation that continues nothing is ignored.
#[test]
fn a_continuation_of_nothing_is_dropped() {
    let mut server = Pair::established().server;
    let more = ConfirmRkeyContinuation {
        reply: false,
        negative: false,
        remaining: 3,
        others: Default::default(),
    };
    server.handle_llc(T0, LINK, &Llc::ConfirmRkeyContinuation(more)).unwrap();
    server
        .handle_llc(
            T0,
            LINK,
            &Llc::ConfirmRkeyContinuation(ConfirmRkeyContinuation { reply: true, ..more }),
        )
        .unwrap();
    assert_eq!((drain(&mut server), server.dropped()), (vec![], 2));
}

/// Figure 15: three RMBs here, four there, in twos, until both are through.
// RFC 7609 3.5.1.6.3 #1: exchange RKeys before CONFIRM LINK
// RFC 7609 3.5.5.2.3 #1: new RTokens for a joining link
// RFC 7609 3.5.5.2.3 #2: pair known with new RToken
// RFC 7609 3.5.5.2.3 #3: continue over the link of ADD LINK
// RFC 7609 A.3.3 #2: only server begins ADD LINK CONTINUATION
// RFC 7609 A.3.3 #3: exchange RTokens in step
// RFC 7609 A.3.3 #4: client replies with none left
// RFC 7609 A.3.3 #5: server asks with none left
// RFC 7609 A.3.3 #7: byte 5 counts RTokens left
// RFC 7609 A.3.3 #8: RTokens left fall by two
#[test]
fn rmbs_in_unequal_numbers_are_told_of_on_a_new_link() {
    for (server, client) in [(1, 1), (3, 4), (1, 6), (5, 1), (2, 2)] {
        let mut hosts = Hosts::established(&[1], &[101], 2);
        for rmb in 1..server {
            announce(&mut hosts, Role::Server, rmb);
            hosts.run();
        }
        for rmb in 1..client {
            announce(&mut hosts, Role::Client, rmb);
            hosts.run();
        }
        hosts.seen.clear();
        hosts.server.ports.insert(2);
        hosts.client.ports.insert(102);
        hosts.server.group.want_link(hosts.now, port(2));
        hosts.run();
        let mut told = Vec::new();
        for (role, on, llc) in &hosts.seen {
            let Llc::AddLinkContinuation(AddLinkContinuation { remaining, reply, link, pairs }) =
                llc
            else {
                continue;
            };
            assert_eq!(*link, hosts.server.up().into_iter().next_back().unwrap());
            assert_eq!((*on, *reply), (LINK, *role == Role::Client));
            for pair in &pairs[..usize::from(*remaining).min(2)] {
                let rmb = RmbIndex(u8::try_from(pair.existing.0 >> 8 & 0xff).unwrap());
                assert_eq!(pair.existing, key(*role, rmb, LINK).0);
                assert_eq!((pair.new, pair.address), key(*role, rmb, *link));
            }
            told.push(*remaining);
        }
        let rounds = server.max(client).div_ceil(2);
        let left = |count: u8, round: u8| count.saturating_sub(round * 2);
        let expected: Vec<u8> =
            (0..rounds).flat_map(|round| [left(server, round), left(client, round)]).collect();
        assert_eq!(told, expected);
        hosts.assert_rkeys_agree();
    }
}

/// A peer that counts wrong has lost track of which keys belong together: its link is not used.
// RFC 7609 C.7.1 #28: wrong RToken count fails link
// RFC 7609 A.3.3 #8: RTokens left fall by two
#[test]
fn rkeys_that_are_miscounted_end_the_link() {
    for role in [Role::Server, Role::Client] {
        let mut hosts = links(2);
        for rmb in 1..4 {
            announce(&mut hosts, role, rmb);
            hosts.run();
        }
        hosts.break_link(SECOND_LINK);
        hosts.run();
        hosts.server.group.want_link(hosts.now, port(2));
        let is_second = |from, llc: &Llc| {
            let Llc::AddLinkContinuation(more) = llc else { return false };
            from == role && more.remaining == 2
        };
        hosts.run_until(is_second);
        let [(LINK, Llc::AddLinkContinuation(more))] = hosts.flying(role)[..] else {
            panic!("{:?}", hosts.flying(role));
        };
        let wrong = Llc::AddLinkContinuation(AddLinkContinuation { remaining: 3, ..more });
        let to = if role == Role::Server { Role::Client } else { Role::Server };
        let now = hosts.now;
        let outcome = hosts.host(to).group.handle_llc(now, LINK, &wrong);
        assert_eq!(outcome, Err(PeerMisbehaved::UnexpectedMessage));
        hosts.act();
        assert!(hosts.host(to).told.contains(&Action::LinkFailed(LINK, Cause::PeerMisbehaved)));
    }
}

/// An RMB is withdrawn while a link is added. The peer has forgotten it, or is about to: telling of
/// it on the new link would leave a key behind that leads nowhere.
// RFC 7609 3.5.5.2 #1: register RMBs on all links
// RFC 7609 3.5.5.2.2 #3: free RMB after DELETE RKEY reply
#[test]
fn what_is_being_withdrawn_is_told_of_nowhere() {
    let mut hosts = Hosts::established(&[1], &[101], 2);
    announce(&mut hosts, Role::Client, 1);
    hosts.run();
    hosts.server.ports.insert(2);
    hosts.client.ports.insert(102);
    hosts.server.group.want_link(hosts.now, port(2));
    hosts.client.group.withdraw_rmb(hosts.now, RmbIndex(1));
    hosts.act();
    let [(_, withdrawal @ Llc::DeleteRkey(_))] = hosts.flying(Role::Client)[..] else {
        panic!("{:?}", hosts.flying(Role::Client));
    };
    hosts.lose(Role::Client);
    hosts.run_until(|from, llc| from == Role::Client && matches!(llc, Llc::AddLinkContinuation(_)));
    let [(_, Llc::AddLinkContinuation(told))] = hosts.flying(Role::Client)[..] else {
        panic!("{:?}", hosts.flying(Role::Client));
    };
    assert_eq!(told.remaining, 1, "only the first RMB");
    assert!(!hosts.client.told.contains(&Action::RmbDeleted(RmbIndex(1))), "no answer yet");
    hosts.run();
    hosts.tell(Role::Server, LINK, withdrawal);
    hosts.run();
    assert!(hosts.client.told.contains(&Action::RmbDeleted(RmbIndex(1))));
    hosts.assert_rkeys_agree();
}

/// A peer that does not answer may still write there: the RMB is kept, the link counts as failed,
/// and the peer is told again over another one.
// RFC 7609 3.5.5.2.2 #3: free RMB after DELETE RKEY reply
#[test]
fn an_rmb_stays_until_the_peer_has_let_go_of_it() {
    let mut hosts = links(2);
    announce(&mut hosts, Role::Client, 1);
    hosts.run();
    let deleted = |hosts: &Hosts| hosts.client.told.contains(&Action::RmbDeleted(RmbIndex(1)));
    hosts.client.group.withdraw_rmb(hosts.now, RmbIndex(1));
    hosts.act();
    let [(first, Llc::DeleteRkey(_))] = hosts.flying(Role::Client)[..] else {
        panic!("{:?}", hosts.flying(Role::Client));
    };
    hosts.lose(Role::Client);
    hosts.work_for(LINK_EXCHANGE_WAIT);
    assert!(!deleted(&hosts) && !hosts.client.up().contains(&first));
    let again = |(on, llc): &(LinkNumber, Llc)| *on != first && matches!(llc, Llc::DeleteRkey(_));
    assert!(hosts.flying(Role::Client).iter().any(again), "{:?}", hosts.flying(Role::Client));
    hosts.run();
    assert!(deleted(&hosts));
    hosts.assert_rkeys_agree();
}

/// A key of any link says which RMB goes, and it goes on all of them: nothing is written there any
/// more, over whatever link.
// RFC 7609 3.5.5.2.2 #4: delete several RMBs at once
// RFC 7609 3.5.5.2.2 #5: find RMB by RKey of one link
#[test]
fn an_rmb_is_withdrawn_from_all_links() {
    let mut hosts = links(3);
    announce(&mut hosts, Role::Client, 1);
    hosts.run();
    let mut rkeys = [Rkey(0); 8];
    rkeys[0] = key(Role::Client, RmbIndex(0), SECOND_LINK).0;
    rkeys[1] = key(Role::Client, RmbIndex(1), SECOND_LINK).0;
    let delete = DeleteRkey { reply: false, negative: false, count: 2, error_mask: 0, rkeys };
    hosts.tell(Role::Server, SECOND_LINK, Llc::DeleteRkey(delete));
    for rmb in [RmbIndex(0), RmbIndex(1)] {
        for from in 1..=3 {
            let (rkey, _) = key(Role::Client, rmb, LinkNumber(from));
            for to in 1..=3 {
                let known = hosts.server.group.peer_rmb(LinkNumber(from), rkey, LinkNumber(to));
                assert_eq!(known, None);
            }
        }
    }
    let reply = Llc::DeleteRkey(DeleteRkey { reply: true, ..delete });
    assert_eq!(hosts.flying(Role::Server), [(SECOND_LINK, reply)]);
}

/// A peer registers two RMBs as one region with each RNIC: one rkey opens both. The second took the
/// place of the first, so that connections with the first wrote into the second, or were reset,
/// when they had to move. The rkey goes with both.
// RFC 7609 2.1 #3: one RToken per RMB and link
// RFC 7609 3.5.5.2.2 #5: find RMB by RKey of one link
#[test]
fn rmbs_with_one_key_stay_apart() {
    let mut hosts = links(2);
    let rmbs = [(0x7000, 0x1_7000), (0x9000, 0x1_9000)];
    for (here, there) in rmbs {
        let elsewhere = RkeyOnLink { link: SECOND_LINK, rkey: Rkey(0x88), address: there };
        let confirm = ConfirmRkey {
            reply: false,
            negative: false,
            retry: false,
            other_links: 1,
            rkey: Rkey(0x77),
            address: here,
            others: [elsewhere, RkeyOnLink::default()],
        };
        // The second message is a repetition, and changes nothing.
        for _ in 0..2 {
            hosts.tell(Role::Server, LINK, Llc::ConfirmRkey(confirm));
        }
    }
    let group = &mut hosts.server.group;
    let changes: Vec<_> = group.peer_rmbs(LINK, SECOND_LINK).collect();
    let told = rmbs.map(|(here, there)| ((Rkey(0x77), here), (Rkey(0x88), there)));
    assert_eq!(changes.iter().filter(|change| told.contains(change)).count(), 2, "{changes:?}");
    for (here, there) in told {
        assert_eq!(group.peer_rmb_at(LINK, here, SECOND_LINK), Some(there));
        assert_eq!(group.peer_rmb_at(SECOND_LINK, there, LINK), Some(here));
    }
    let mut rkeys = [Rkey(0); 8];
    rkeys[0] = Rkey(0x88);
    let delete = DeleteRkey { reply: false, negative: false, count: 1, error_mask: 0, rkeys };
    hosts.tell(Role::Server, SECOND_LINK, Llc::DeleteRkey(delete));
    assert_eq!(hosts.server.group.peer_rmb(LINK, Rkey(0x77), LINK), None);
}

/// A further link comes, and the peer names its RMBs by their rkeys on the first one. Which of two
/// with one rkey it means shows by the address, if that is the same with both RNICs. If it is not,
/// neither can be reached by the new link: a guess would write into the wrong one.
// RFC 7609 3.5.5.2.3 #2: pair known with new RToken
#[test]
fn rmbs_with_one_key_are_not_mixed_up_on_a_new_link() {
    for offset in [0, 0x10_0000] {
        let mut hosts = links(2);
        hosts.break_link(SECOND_LINK);
        hosts.run();
        let group = &mut hosts.server.group;
        for address in [0x7000, 0x9000] {
            group.learn_rkey(LINK, Rkey(0x77), address).unwrap();
        }
        group.want_link(hosts.now, port(2));
        hosts.run_until(|from, llc| {
            from == Role::Client && matches!(llc, Llc::AddLinkContinuation(_))
        });
        let [(LINK, Llc::AddLinkContinuation(told))] = hosts.flying(Role::Client)[..] else {
            panic!("{:?}", hosts.flying(Role::Client));
        };
        hosts.lose(Role::Client);
        let pair = |address: u64| RkeyPair {
            existing: Rkey(0x77),
            new: Rkey(0x88),
            address: address + offset,
        };
        let pairs = [0x9000, 0x7000].map(pair);
        let both = AddLinkContinuation { remaining: 2, pairs, ..told };
        hosts.tell(Role::Server, LINK, Llc::AddLinkContinuation(both));
        hosts.run();
        assert!(hosts.server.up().contains(&told.link));
        for address in [0x7000, 0x9000] {
            let known = hosts.server.group.peer_rmb_at(LINK, (Rkey(0x77), address), told.link);
            assert_eq!(known, (offset == 0).then_some((Rkey(0x88), address)));
        }
    }
}

/// A peer that does not know what we withdraw says so. It is gone all the same.
// RFC 7609 A.3.7 #7: log a negative DELETE RKEY reply
#[test]
fn a_withdrawal_that_is_not_understood_is_done() {
    let mut client = Pair::established().client;
    client.announce_rmb(T0, RmbIndex(7), &[(LINK, Rkey(7), 7)]);
    let Some(Action::Send(_, Llc::ConfirmRkey(request))) = client.poll_action() else {
        panic!("CONFIRM RKEY is first");
    };
    let reply = Llc::ConfirmRkey(ConfirmRkey { reply: true, ..request });
    client.handle_llc(T0, LINK, &reply).unwrap();
    drain(&mut client);
    client.withdraw_rmb(T0, RmbIndex(7));
    let Some(Action::Send(_, Llc::DeleteRkey(request))) = client.poll_action() else {
        panic!("DELETE RKEY is next");
    };
    let reply = DeleteRkey { reply: true, negative: true, error_mask: 0x80, ..request };
    client.handle_llc(T0, LINK, &Llc::DeleteRkey(reply)).unwrap();
    assert_eq!(drain(&mut client), [Action::RmbDeleted(RmbIndex(7))]);
}

/// A link for which no key was told cannot carry connections to that RMB: a failover to it would
/// write nowhere. It is treated as failed, and made anew with all keys.
// RFC 7609 C.7.1 #31: missing RKey fails its link
#[test]
fn a_link_without_a_key_is_lost() {
    for role in [Role::Server, Role::Client] {
        let mut hosts = links(2);
        let confirm = ConfirmRkey {
            reply: false,
            negative: false,
            retry: false,
            other_links: 0,
            rkey: Rkey(0x77),
            address: 0x7000,
            others: Default::default(),
        };
        hosts.tell(role, LINK, Llc::ConfirmRkey(confirm));
        let failed = Action::LinkFailed(SECOND_LINK, Cause::PeerMisbehaved);
        assert_eq!(hosts.host(role).told, [failed]);
    }
}

/// A Linux peer that has lost a queue pair answers nothing for up to half a minute while it frees
/// it. All connections depend on the only link, which was given up after two seconds because nobody
/// had answered DELETE RKEY.
// RFC 7609 3.5.5.2.2 #3: free RMB after DELETE RKEY reply
#[test]
fn the_only_link_outlives_a_peer_that_is_slow_to_answer() {
    for role in [Role::Server, Role::Client] {
        let mut hosts = links(1);
        announce(&mut hosts, role, 7);
        hosts.work_for(SECOND * 35);
        hosts.run();
        // The server may have refused it, because it was about to try a second link.
        hosts.sleep(1);
        assert!(hosts.host(role).told.contains(&Action::RmbConfirmed(RmbIndex(7))), "{role:?}");

        let now = hosts.now;
        hosts.host(role).group.withdraw_rmb(now, RmbIndex(7));
        hosts.act();
        hosts.work_for(SECOND * 35);
        assert!(hosts.host(role).group.is_established(), "{role:?}");
        hosts.run();
        assert!(hosts.host(role).told.contains(&Action::RmbDeleted(RmbIndex(7))), "{role:?}");
    }
}

/// The other link fails after the question went out, or is about to be deleted. The peer had two
/// seconds for its answer while connections could move, and the last healthy link was given up when
/// they were over: now all connections depend on it.
// RFC 7609 C.7.1 #22: unanswered CONFIRM RKEY fails link
#[test]
fn the_last_link_has_more_time_for_an_answer_than_one_of_two() {
    let fails = |hosts: &mut Hosts, role| hosts.break_link_at(role, SECOND_LINK);
    let goes = |hosts: &mut Hosts, role| {
        let (now, reason) = (hosts.now, DeleteReason::OPERATOR);
        hosts.host(role).group.delete_link(now, SECOND_LINK, reason, true);
    };
    let events: [fn(&mut Hosts, Role); 2] = [fails, goes];
    for (role, withdraws, event) in [Role::Server, Role::Client]
        .into_iter()
        .flat_map(|role| [false, true].map(|withdraws| (role, withdraws)))
        .flat_map(|(role, withdraws)| events.map(|event| (role, withdraws, event)))
    {
        let mut hosts = links(2);
        announce(&mut hosts, role, 7);
        if withdraws {
            hosts.run();
            let now = hosts.now;
            hosts.host(role).group.withdraw_rmb(now, RmbIndex(7));
            hosts.act();
        }
        let on = hosts.flying(role)[0].0;
        assert_eq!(on, LINK);
        hosts.tick(SECOND);
        event(&mut hosts, role);
        hosts.act();
        hosts.work_for(SECOND * 34);
        assert!(hosts.host(role).up().contains(&LINK), "{role:?} {withdraws}");
        hosts.run();
        let outcome = match withdraws {
            false => Action::RmbConfirmed(RmbIndex(7)),
            true => Action::RmbDeleted(RmbIndex(7)),
        };
        assert!(hosts.host(role).told.contains(&outcome), "{role:?} {withdraws}");
    }
}

/// The same for a peer that is about to continue an announcement of its own.
// RFC 7609 A.3.6 #2: byte 4 counts RTokens left
#[test]
fn the_last_link_has_time_for_a_continuation() {
    let mut hosts = links(5);
    announce(&mut hosts, Role::Client, 7);
    hosts.run_until(is_continuation);
    for number in 2..=5 {
        hosts.break_link_at(Role::Server, LinkNumber(number));
    }
    hosts.server.group.handle_timeout(hosts.now + RKEY_REPLY_WAIT);
    assert!(hosts.server.group.is_established());
    assert_eq!(hosts.server.up(), [LINK].into());
}

/// A link comes up while the peer takes its time over the only one. Then the two seconds of a group
/// with two links begin: the old link did not fail before.
// RFC 7609 C.7.1 #22: unanswered CONFIRM RKEY fails link
#[test]
fn an_answer_that_is_awaited_when_a_link_comes_is_not_late_at_once() {
    let mut hosts = Hosts::established(&[1], &[101], 2);
    announce(&mut hosts, Role::Client, 7);
    let question = hosts.flying(Role::Client);
    hosts.lose(Role::Client);
    hosts.work_for(SECOND * 20);
    hosts.server.ports.insert(2);
    hosts.client.ports.insert(102);
    hosts.server.group.want_link(hosts.now, port(2));
    hosts.run();
    assert_eq!(hosts.client.up().len(), 2);
    hosts.tick(SECOND);
    let [(LINK, Llc::ConfirmRkey(request))] = question[..] else { panic!("{question:?}") };
    let reply = Llc::ConfirmRkey(ConfirmRkey { reply: true, ..request });
    hosts.tell(Role::Client, LINK, reply);
    assert!(hosts.client.told.contains(&Action::RmbConfirmed(RmbIndex(7))));
    assert_eq!(hosts.client.up().len(), 2);
}

/// The peer does not answer CONFIRM RKEY: the link it went over has failed, and the RMB is
/// announced over the other one, so that the connection that waits for it can begin.
// RFC 7609 C.7.1 #22: unanswered CONFIRM RKEY fails link
// RFC 7609 2.3 #11: restart LLC exchanges, do not replay
#[test]
fn an_unanswered_announcement_is_made_again_over_another_link() {
    for role in [Role::Server, Role::Client] {
        let mut hosts = links(2);
        announce(&mut hosts, role, 7);
        hosts.lose(role);
        hosts.tick(RKEY_REPLY_WAIT);
        let failed = Action::LinkFailed(LINK, Cause::LlcTimedOut);
        assert_eq!(hosts.host(role).told, [failed]);
        hosts.run();
        hosts.sleep(1);
        assert!(hosts.host(role).told.contains(&Action::RmbConfirmed(RmbIndex(7))));
        assert!(hosts.seen.iter().all(|(_, on, _)| *on == SECOND_LINK));
        hosts.assert_rkeys_agree();
    }
}

/// A peer that is busy with links, or out of room, for seconds: a new RMB is given up in time for
/// its connection to go by TCP; one that is in use is announced until the peer knows it.
// RFC 7609 A.3.5 #9: begin again after a retry flag
// RFC 7609 A.3.5 #10: without retry flag, await next occasion
// RFC 7609 3.5.5.3.1 #7: repeat CONFIRM RKEY after ADD LINK
#[test]
fn refused_rmbs_are_announced_again_with_patience() {
    let mut client = Pair::established().client;
    let negative = |group: &mut LinkGroup, now: Instant, retry: bool| -> bool {
        let actions = drain(group);
        let asked = actions.iter().find_map(|action| {
            let Action::Send(_, Llc::ConfirmRkey(request)) = action else { return None };
            Some(*request)
        });
        let Some(request) = asked else { return false };
        let reply = ConfirmRkey { reply: true, negative: true, retry, ..request };
        group.handle_llc(now, LINK, &Llc::ConfirmRkey(reply)).unwrap();
        true
    };
    client.announce_rmb(T0, RmbIndex(7), &[(LINK, Rkey(7), 7)]);
    let mut now = T0;
    let mut times = 0;
    while negative(&mut client, now, true) {
        times += 1;
        if let Some(next) = client.poll_timeout().filter(|next| *next < T0 + TEST_LINK_IDLE) {
            now = next;
            client.handle_timeout(now);
        }
    }
    assert!(now > T0 + SECOND * 2 && now < T0 + SECOND * 6, "{now:?}");
    assert_eq!(times, 7, "not more often than need be");
    // A final refusal is not followed by another attempt.
    client.announce_rmb(now, RmbIndex(8), &[(LINK, Rkey(8), 8)]);
    assert!(negative(&mut client, now, false));
    assert_eq!(drain(&mut client), [Action::RmbRefused(RmbIndex(8))]);
}
