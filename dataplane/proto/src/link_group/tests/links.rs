//! Links that are added, deleted and lost.

use std::vec::Vec;

use super::hosts::{Hosts, port};
use super::*;

const THIRD_LINK: LinkNumber = LinkNumber(3);

/// The kinds of messages that arrived, with who sent them and over which link.
pub(super) fn story(hosts: &Hosts) -> Vec<(Role, u8, &'static str, bool)> {
    let name = |llc: &Llc| match llc {
        Llc::ConfirmLink(_) => "CONFIRM LINK",
        Llc::AddLink(_) => "ADD LINK",
        Llc::AddLinkContinuation(_) => "ADD LINK CONTINUATION",
        Llc::DeleteLink(_) => "DELETE LINK",
        Llc::ConfirmRkey(_) => "CONFIRM RKEY",
        Llc::ConfirmRkeyContinuation(_) => "CONFIRM RKEY CONTINUATION",
        Llc::DeleteRkey(_) => "DELETE RKEY",
        Llc::TestLink(_) => "TEST LINK",
    };
    let tell =
        |(role, link, llc): &(Role, LinkNumber, Llc)| (*role, link.0, name(llc), llc.is_reply());
    hosts.seen.iter().map(tell).collect()
}

/// Figure 9: with two RNICs on either side the first contact makes two links, before the first
/// byte of an application flows.
// RFC 7609 2.2 #4: same RMBs on all links
// RFC 7609 2.2.1 #4: become symmetric with two RNICs each
// RFC 7609 2.2.3 #1: set up further links by LLC
// RFC 7609 2.2.4 #1: unique link number in a group
// RFC 7609 3.5.1.6 #2: offer link over second RNIC
// RFC 7609 3.5.1.6 #4: allocate QP, number, RToken for ADD LINK
// RFC 7609 3.5.1.6.1 #1: compare GID and MAC of ADD LINK
// RFC 7609 3.5.1.6.1 #5: answer second RNIC with second RNIC
// RFC 7609 3.5.1.6.1 #7: accept with QP, RKey, link number
// RFC 7609 3.5.1.6.2 #2: connect and confirm accepted link
// RFC 7609 3.5.1.6.3 #1: exchange RKeys before CONFIRM LINK
// RFC 7609 A.3.2 #9: use smaller MTU of ADD LINK
#[test]
fn first_contact_makes_two_links() {
    use Role::{Client, Server};
    let mut hosts = Hosts::new(&[1, 2], &[101, 102], 2);
    hosts.run();
    let expected = [
        (Server, 1, "CONFIRM LINK", false),
        (Client, 1, "CONFIRM LINK", true),
        (Server, 1, "ADD LINK", false),
        (Client, 1, "ADD LINK", true),
        (Server, 1, "ADD LINK CONTINUATION", false),
        (Client, 1, "ADD LINK CONTINUATION", true),
        (Server, 2, "CONFIRM LINK", false),
        (Client, 2, "CONFIRM LINK", true),
    ];
    assert_eq!(story(&hosts), expected);
    for host in [&hosts.server, &hosts.client] {
        assert_eq!(host.group.symmetry(), Symmetry::Symmetric);
        let confirmed = |action: &&Action| matches!(action, Action::LinkConfirmed(_));
        let confirmed: Vec<_> = host.told.iter().filter(confirmed).collect();
        let [first, second] = [LINK, SECOND_LINK].map(Action::LinkConfirmed);
        assert_eq!(confirmed, [&first, &second], "{:?}", host.role);
    }
    hosts.assert_rkeys_agree();
}

/// A cable is pulled. Both sides move their connections, and agree that the link is gone; later it
/// is back under a new number, so that nothing late is taken for something of it.
// RFC 7609 2.2.4 #2: use all link numbers before reuse
// RFC 7609 2.3 #4: move at once, send DELETE LINK
// RFC 7609 2.3 #5: client reports failure, server deletes link
// RFC 7609 3.5.5.1.3 #2: delete link upon errors
// RFC 7609 3.5.5.1.3 #3: delete links of downed RNIC
// RFC 7609 3.5.5.1.3 #4: move connections of deleted link
// RFC 7609 3.5.5.1.4 #1: client may ask to delete link
// RFC 7609 C.8 #2: timer for the second link
// RFC 7609 C.8 #4: retry when server RNIC appears
#[test]
fn a_lost_link_is_deleted_and_comes_back() {
    let mut hosts = Hosts::established(&[1, 2], &[101, 102], 2);
    hosts.server.ports.remove(&1);
    hosts.client.ports.remove(&101);
    hosts.break_link(LINK);
    hosts.run();
    for host in [&hosts.server, &hosts.client] {
        assert_eq!(host.told[0], Action::LinkFailed(LINK, Cause::QueuePairBroke));
        assert_eq!(host.up().into_iter().collect::<Vec<_>>(), [SECOND_LINK]);
        assert_eq!(host.group.symmetry(), Symmetry::Single);
    }
    assert!(hosts.seen.iter().all(|(_, link, _)| *link == SECOND_LINK));
    hosts.server.ports.insert(1);
    hosts.client.ports.insert(101);
    hosts.server.group.want_link(hosts.now, port(1));
    hosts.run();
    for host in [&hosts.server, &hosts.client] {
        let up: Vec<_> = host.up().into_iter().collect();
        assert!(up.len() == 2 && up[0] == SECOND_LINK && up[1] > SECOND_LINK, "{up:?}");
        assert_eq!(host.group.symmetry(), Symmetry::Symmetric);
    }
    hosts.assert_rkeys_agree();
}

/// A Linux server looks for an RNIC other than the one that the news comes to, and a Linux client
/// rejects what the link that an offer comes by has already. On the asymmetric link both would go
/// wrong every time, and users would have no second path any more.
// RFC 7609 2.2.2 #9: client requests no link beyond limit
// RFC 7609 3.5.5.1.2 #1: client announces a new RNIC
#[test]
fn a_port_that_is_back_is_spoken_of_on_the_symmetric_link() {
    let mut hosts = Hosts::established(&[1, 2], &[101, 102], 2);
    hosts.sleep(25);
    hosts.client.ports.remove(&101);
    hosts.break_link(LINK);
    hosts.run();
    assert_eq!(hosts.client.group.symmetry(), Symmetry::AsymmetricLocal);
    hosts.client.ports.insert(101);
    hosts.client.group.want_link(hosts.now, port(101));
    hosts.act();
    let told = hosts.flying(Role::Client);
    assert!(matches!(told[..], [(SECOND_LINK, Llc::AddLink(_))]), "{told:?}");
    hosts.run_until(|from, llc| from == Role::Server && matches!(llc, Llc::AddLink(_)));
    let offered = hosts.flying(Role::Server);
    assert!(matches!(offered[..], [(SECOND_LINK, Llc::AddLink(_))]), "{offered:?}");
}

/// Figure 6: a host with one RNIC shares it between two links, until it has another.
// RFC 7609 2.2.1 #3: support asymmetric links
// RFC 7609 2.2.1 #5: replace an asymmetric link when possible
// RFC 7609 2.2.1 #6: add symmetric link before deleting asymmetric
// RFC 7609 2.2.1 #7: state reason when deleting asymmetric link
// RFC 7609 2.2.2 #9: client requests no link beyond limit
// RFC 7609 2.2.2 #11: at most one asymmetric link
// RFC 7609 2.2.2 #12: do not count the asymmetric link
// RFC 7609 3.5.1.6.1 #6: single RNIC accepts an asymmetric link
// RFC 7609 3.5.1.6.1 #4: accept ADD LINK over another RNIC
// RFC 7609 3.5.5.1.1 #2: never add second asymmetric link
// RFC 7609 3.5.5.1.2 #1: client announces a new RNIC
// RFC 7609 3.5.5.1.2 #2: begin ADD LINK to gain redundancy
#[test]
fn an_asymmetric_link_gives_way_to_a_symmetric_one() {
    let mut hosts = Hosts::established(&[1, 2], &[101], 2);
    assert_eq!(hosts.server.group.symmetry(), Symmetry::AsymmetricPeer);
    assert_eq!(hosts.client.group.symmetry(), Symmetry::AsymmetricLocal);
    hosts.client.ports.insert(102);
    hosts.client.group.want_link(hosts.now, port(102));
    hosts.run();
    for host in [&hosts.server, &hosts.client] {
        assert_eq!(host.group.symmetry(), Symmetry::Symmetric, "{:?}", story(&hosts));
        assert_eq!(host.up().len(), 2);
        assert!(host.told.contains(&Action::LinkConfirmed(THIRD_LINK)));
        assert!(host.told.contains(&Action::VacateLink(SECOND_LINK)), "nothing is cut off");
    }
    let deletes = hosts.seen.iter().filter_map(|(_, _, llc)| match llc {
        Llc::DeleteLink(delete) if !delete.reply => Some(delete.reason),
        Llc::DeleteLink(_)
        | Llc::ConfirmLink(_)
        | Llc::AddLink(_)
        | Llc::AddLinkContinuation(_) => None,
        Llc::ConfirmRkey(_) | Llc::ConfirmRkeyContinuation(_) | Llc::DeleteRkey(_) => None,
        Llc::TestLink(_) => None,
    });
    assert_eq!(deletes.collect::<Vec<_>>(), [DeleteReason::ASYMMETRIC_NOT_NEEDED]);
    hosts.assert_rkeys_agree();
}
