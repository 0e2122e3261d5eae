//! Links break and connections go on: no byte is lost, none is wrong, nobody waits for ever.

use std::time::Duration;

use smcr_engine::handoff::Ending;
use smcr_engine::{Command, LinkId};
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::Odds;

use crate::application::Heard;
use crate::cluster::{Cluster, Side, Transport};
use crate::host::{Host, Sizes};
use crate::{KIB, MIB};
use Side::{Client, Server};

/// Two RNICs per host.
const TWO: Sizes = Sizes { rnics: 2, ..Sizes::USUAL };

/// A cluster with these sizes in which `count` connections use the first of two links, each
/// between RNICs of its own.
fn two_links(
    seed: u64,
    odds: Odds,
    sizes: Sizes,
    count: usize,
) -> (Cluster, [LinkId; 2], Vec<usize>) {
    let mut cluster = Cluster::new(seed, odds, sizes);
    let first = cluster.add_link_between([0, 0]);
    let connections = (0..count).map(|_| cluster.connect(Transport::Smc)).collect();
    let second = cluster.add_link_between([1, 1]);
    (cluster, [first, second], connections)
}

/// So many looks around, with time passing.
fn let_run(cluster: &mut Cluster, steps: usize) {
    for _ in 0..steps {
        cluster.step();
        cluster.pass_time();
    }
}

/// So many looks around that all arrives, but by the first poller of the server.
fn let_run_without_first_poller(cluster: &mut Cluster, connection: usize) {
    for _ in 0..50 {
        cluster.application(Client, connection).act();
        cluster.turn(Client);
        cluster.turn_at(Server, 1);
        cluster.wait(Duration::from_micros(5));
    }
}

/// Every application writes so much.
fn write_both_ways(cluster: &mut Cluster, connections: &[usize], len: usize) {
    for connection in connections {
        cluster.application(Client, *connection).write(len);
        cluster.application(Server, *connection).write(len);
    }
}

/// Everything arrives, everybody ends in order, and nothing is left of it.
fn finish_unharmed(cluster: &mut Cluster, connections: &[usize], len: usize) {
    cluster.run_until_quiet();
    for connection in connections {
        for side in Side::BOTH {
            let application = cluster.application(side, *connection);
            assert_eq!((application.heard(), application.received()), (Heard::Bytes, len as u64));
            application.finish();
        }
    }
    cluster.run_until_quiet();
    for connection in connections {
        assert!(cluster.closed(*connection).iter().all(|end| end.ending == Ending::Graceful));
    }
    cluster.assert_nothing_stalls();
    cluster.assert_nothing_is_left();
}

fn failovers(host: &Host) -> u64 {
    host.sum(|counters| counters.failovers.get())
}

/// A cable is pulled in the middle of everything: the users of ten connections notice nothing.
// RFC 7609 2.3 #2: each side chooses its own link
// RFC 7609 2.3 #3: move connections of a failed link
// RFC 7609 2.3 #9: repeat failed writes in order
// RFC 7609 2.3 #10: repeat uncompleted writes before new data
// RFC 7609 4.6 #1: each side switches links itself
// RFC 7609 4.6.1 #8: validate before resuming
// RFC 7609 4.6.2 #1: repeat pending messages before new data
#[test]
fn a_link_that_breaks_under_load_takes_no_connection_along() {
    let mut replayed = 0;
    for seed in 0..30 {
        let (mut cluster, [first, second], connections) = two_links(seed, Odds::MALICIOUS, TWO, 10);
        write_both_ways(&mut cluster, &connections, MIB / 4);
        let_run(&mut cluster, 20 + 10 * usize::try_from(seed).unwrap());
        cluster.break_this(first);
        finish_unharmed(&mut cluster, &connections, MIB / 4);
        for host in &cluster.hosts {
            assert!(host.vacated.contains(&first) && host.retired.contains(&first));
            assert_eq!(failovers(host), 10);
            assert_eq!(host.counters_of(0).connections_moved_out.get(), 10);
            assert_eq!(host.counters_of(1).connections_moved_in.get(), 10);
            assert!(host.moved.values().all(|link| *link == second));
            replayed += host.sum(|counters| counters.bytes_replayed.get());
        }
    }
    assert!(replayed > 0, "no break hit anything on its way");
}

/// Both links of one RNIC: the connections stay with their poller.
// RFC 7609 2.3 #3: move connections of a failed link
// RFC 7609 4.6.2 #1: repeat pending messages before new data
#[test]
fn a_connection_changes_its_link_and_keeps_its_poller() {
    for seed in 0..20 {
        let mut cluster = Cluster::new(seed, Odds::MALICIOUS, Sizes::USUAL);
        let first = cluster.add_link_between([0, 0]);
        let connections: Vec<_> = (0..5).map(|_| cluster.connect(Transport::Smc)).collect();
        cluster.add_link_between([0, 0]);
        write_both_ways(&mut cluster, &connections, MIB / 4);
        let_run(&mut cluster, 100);
        cluster.break_this(first);
        finish_unharmed(&mut cluster, &connections, MIB / 4);
        assert_eq!(cluster.hosts.each_ref().map(failovers), [5, 5]);
        assert_eq!(cluster.hosts[0].counters.connections_moved_out.get(), 0);
    }
}

/// Rebalancing, over and over: a connection that changes hands fifty times is still one stream.
// RFC 7609 2.3 #12: use a link that comes back
// RFC 7609 2.3 #13: move connections without a failure
#[test]
fn a_connection_moves_to_another_poller_and_back_fifty_times() {
    let (mut cluster, links, connections) = two_links(7, Odds::MALICIOUS, TWO, 3);
    let chosen = &connections[..2];
    write_both_ways(&mut cluster, &connections, 2 * MIB);
    for turn in 0..100 {
        let_run(&mut cluster, 60);
        let [from, to] = if turn % 2 == 0 { links } else { [links[1], links[0]] };
        for (index, side) in Side::BOTH.into_iter().enumerate() {
            let ids = chosen.iter().filter_map(|number| cluster.pairs[*number].ids[index]);
            let ids = ids.collect();
            cluster.host(side).move_connections(from, to, Some(ids));
        }
    }
    finish_unharmed(&mut cluster, &connections, 2 * MIB);
    for host in &cluster.hosts {
        for place in 0..2 {
            let counters = host.counters_of(place);
            assert!(counters.connections_moved_in.get() >= 60, "{counters:?}");
            assert!(counters.connections_moved_out.get() >= 60);
        }
        assert!(!host.vacated.contains(&links[0]), "one connection was not to move");
    }
}

/// An operator takes a link out of service: the gateway leaves it when everything on it has ended,
/// and repeats at most what it had not announced yet. Its peer, for which the link is gone then,
/// follows.
// RFC 7609 2.3 #6: let old writes end before moving
// RFC 7609 2.3 #13: move connections without a failure
#[test]
fn a_link_is_vacated_in_order() {
    for seed in 0..10 {
        let (mut cluster, [first, second], connections) = two_links(seed, Odds::MALICIOUS, TWO, 5);
        write_both_ways(&mut cluster, &connections, MIB / 2);
        let_run(&mut cluster, 200);
        cluster.host(Client).move_connections(first, second, None);
        finish_unharmed(&mut cluster, &connections, MIB / 2);
        for host in &cluster.hosts {
            assert!(host.retired.contains(&first) && failovers(host) == 5);
        }
        let replayed = cluster.host(Client).sum(|counters| counters.bytes_replayed.get());
        assert!(replayed <= 5 * 16 * KIB as u64, "a link that works loses nothing");
    }
}

/// The first connection of a link has nothing on its way and leaves at once, the second has: the
/// link is in use until that one has left, too. Its queue pair was given up before.
// RFC 7609 2.3 #6: let old writes end before moving
#[test]
fn a_link_is_vacated_when_the_last_connection_has_left() {
    let (mut cluster, [first, second], connections) = two_links(1, Odds::CALM, TWO, 2);
    cluster.run_until_quiet();
    cluster.application(Client, connections[1]).write(3 * KIB);
    cluster.application(Client, connections[1]).act();
    cluster.turn(Client);
    cluster.host(Client).move_connections(first, second, None);
    cluster.turn(Client);
    let client = cluster.host(Client);
    assert_eq!(client.moved.len(), 1, "the other one waits for its requests to end");
    assert!(!client.vacated.contains(&first));
    cluster.run_until_quiet();
    let client = cluster.host(Client);
    assert!(client.moved.len() == 2 && client.retired.contains(&first));
    assert_eq!(client.sum(|counters| counters.bytes_replayed.get()), 0);
    assert_eq!(cluster.application(Server, connections[1]).received(), 3 * KIB as u64);
}

/// What was delivered on the old link waits in one poller, what follows on the new one has come to
/// another: nothing is lost, so nobody is reset.
// RFC 7609 4.6.1 #8: validate before resuming
#[test]
fn a_message_on_the_new_link_waits_for_those_of_the_old_one() {
    let (mut cluster, [first, second], connections) = two_links(1, Odds::CALM, TWO, 1);
    cluster.run_until_quiet();
    cluster.application(Client, connections[0]).write(3 * KIB);
    let_run_without_first_poller(&mut cluster, connections[0]);
    cluster.host(Client).move_connections(first, second, None);
    let_run_without_first_poller(&mut cluster, connections[0]);
    assert_eq!(cluster.host(Client).moved.len(), 1);
    cluster.application(Client, connections[0]).write(2 * KIB);
    cluster.application(Server, connections[0]).write(5 * KIB);
    let_run_without_first_poller(&mut cluster, connections[0]);
    finish_unharmed(&mut cluster, &connections, 5 * KIB);
    let server = cluster.host(Server);
    assert!(server.sum(|counters| counters.cdc_held.get()) > 0);
    assert_eq!(server.sum(|counters| counters.resets_data_lost.get()), 0);
}

/// A link is given up while what it brought last waits for a poller that is late: it is taken in,
/// because the peer has been told that it was delivered, and forgotten it. Without that, users are
/// reset now and then when a port goes down, although there is another one.
// RFC 7609 4.6.1 #8: validate before resuming
#[test]
fn what_a_link_brought_is_taken_in_before_it_goes() {
    for fails in [false, true] {
        let (mut cluster, [first, second], connections) = two_links(1, Odds::CALM, TWO, 1);
        cluster.run_until_quiet();
        cluster.application(Client, connections[0]).write(5 * KIB);
        let_run_without_first_poller(&mut cluster, connections[0]);
        let server = cluster.host(Server);
        server.move_connections(first, second, None);
        if fails {
            server.command(Command::FailLink { link: first });
        }
        server.command(Command::RetireLink { link: first });
        cluster.host(Client).move_connections(first, second, None);
        cluster.application(Server, connections[0]).write(5 * KIB);
        finish_unharmed(&mut cluster, &connections, 5 * KIB);
        let server = cluster.host(Server);
        assert!(server.retired.contains(&first));
        assert_eq!(server.sum(|counters| counters.resets_data_lost.get()), 0);
        assert_eq!(server.sum(|counters| counters.cdc_unknown_token.get()), 0);
    }
}

/// Every client writes a little, and it has come to the server's NIC.
fn write_a_little(cluster: &mut Cluster, connections: &[usize]) {
    for connection in connections {
        cluster.application(Client, *connection).write(100);
        cluster.application(Client, *connection).act();
    }
    cluster.turn(Client);
    cluster.wait(Duration::from_micros(5));
}

/// Servers that have said their end move while their clients go on writing: what one poller passes
/// on comes behind what the other hears itself. Nothing is missing, so nobody is reset.
// RFC 7609 4.6.1 #8: validate before resuming
// RFC 7609 4.8.1 #1: begin and end as Closed
#[test]
fn half_closed_connections_move_between_pollers() {
    let mut held = 0;
    for (seed, letters) in (0..60).zip([4_096, 16].into_iter().cycle()) {
        let sizes = Sizes { letters, ..TWO };
        let mut cluster = Cluster::new(seed, Odds::CALM, sizes);
        let mut links = vec![cluster.add_link_between([0; 2])];
        let mut connections = Vec::new();
        for _ in 0..30 {
            connections.push(cluster.connect(Transport::Smc));
            cluster.run_until_quiet();
            cluster.application(Server, *connections.last().unwrap()).finish();
            cluster.run_until_quiet();
        }
        links.extend([1, 0, 1, 0].map(|place| cluster.add_link_between([place; 2])));
        let turns = |turn: u64| (turn + seed) % 4;
        let written = 4 * 100 * (0..40).map(|turn| turns(turn) + 1).sum::<u64>();
        for (place, from_to) in [0, 1, 0, 1].into_iter().zip(links.windows(2)) {
            cluster.host(Server).move_connections(from_to[0], from_to[1], None);
            cluster.host(Client).move_connections(from_to[0], from_to[1], None);
            for turn in 0..40 {
                // The poller that has them is late; the other one hears and passes on.
                for _ in 0..turns(turn) {
                    write_a_little(&mut cluster, &connections);
                    cluster.turn_at(Server, 1 - place);
                }
                write_a_little(&mut cluster, &connections);
                cluster.turn_at(Server, place);
                cluster.turn_at(Server, 1 - place);
            }
        }
        cluster.run_until_quiet();
        for one in &connections {
            let application = cluster.application(Server, *one);
            assert_eq!(application.received(), written, "seed {seed}");
            cluster.application(Client, *one).finish();
        }
        cluster.run_until_quiet();
        for one in &connections {
            let graceful = |ending| ending == Ending::Graceful;
            assert!(cluster.closed(*one).iter().all(|end| graceful(end.ending)), "seed {seed}");
        }
        held += cluster.host(Server).sum(|counters| counters.cdc_held.get());
    }
    assert!(held > 0, "no message came too early");
}

/// Each side chooses its link: what one receives on one RNIC belongs to a poller of the other.
// RFC 7609 2.3 #2: each side chooses its own link
// RFC 7609 4.6 #1: each side switches links itself
// RFC 7609 A.4 #2: process CDC on the data path
#[test]
fn both_sides_move_to_different_links() {
    for (seed, letters) in (0..20).zip([4_096, 16].into_iter().cycle()) {
        let sizes = Sizes { letters, ..TWO };
        let mut cluster = Cluster::new(seed, Odds::MALICIOUS, sizes);
        let first = cluster.add_link_between([0, 0]);
        let mut connections = Vec::new();
        for _ in 0..5 {
            connections.push(cluster.connect(Transport::Smc));
            cluster.run_until_quiet();
        }
        let [second, third] = [[1, 1], [0, 0]].map(|places| cluster.add_link_between(places));
        cluster.host(Server).prefers_newest = true;
        write_both_ways(&mut cluster, &connections, MIB / 4);
        let_run(&mut cluster, 100);
        cluster.break_this(first);
        finish_unharmed(&mut cluster, &connections, MIB / 4);
        assert!(cluster.hosts[0].moved.values().all(|link| *link == second));
        assert!(cluster.hosts[1].moved.values().all(|link| *link == third));
        for host in &cluster.hosts {
            assert!(host.sum(|counters| counters.cdc_forwarded.get()) > 0);
            assert_eq!(host.sum(|counters| counters.cdc_unknown_token.get()), 0);
        }
    }
}

/// The second link breaks while connections are still coming over from the first: they follow to
/// the third, wherever they are just then.
// RFC 7609 2.3 #3: move connections of a failed link
// RFC 7609 4.6.2 #1: repeat pending messages before new data
#[test]
fn a_second_break_catches_connections_on_the_move() {
    for seed in 0..40 {
        let (mut cluster, [first, second], connections) = two_links(seed, Odds::MALICIOUS, TWO, 8);
        let third = cluster.add_link_between([0, 1]);
        write_both_ways(&mut cluster, &connections, MIB / 8);
        let_run(&mut cluster, 100);
        cluster.break_this(first);
        let_run(&mut cluster, usize::try_from(seed).unwrap());
        cluster.break_this(second);
        finish_unharmed(&mut cluster, &connections, MIB / 8);
        assert!(cluster.hosts[0].moved.values().all(|link| *link == third));
    }
}

/// No link is left: every program hears of it, also on connections that were on their way.
// RFC 7609 4.8.3 #3: reset connections without any link
#[test]
fn without_a_link_connections_are_reset_wherever_they_are() {
    for seed in 0..40 {
        let (mut cluster, [first, second], connections) = two_links(seed, Odds::MALICIOUS, TWO, 8);
        write_both_ways(&mut cluster, &connections, MIB);
        let_run(&mut cluster, 100);
        cluster.break_this(first);
        let_run(&mut cluster, usize::try_from(seed).unwrap());
        cluster.break_this(second);
        cluster.run_until_quiet();
        for connection in connections {
            for side in Side::BOTH {
                assert_eq!(cluster.application(side, connection).heard(), Heard::Reset);
            }
        }
        cluster.assert_nothing_is_left();
    }
}

/// Programs that end while their connection moves end as they would have.
// RFC 7609 4.4.2 #1: reuse only after both say done
#[test]
fn a_connection_ends_while_it_moves() {
    // What a link loses that it had acknowledged ends a connection, rightly.
    let odds = Odds { lose_on_break: Chance::NEVER, ..Odds::MALICIOUS };
    for seed in 0..40 {
        let (mut cluster, [first, _], connections) = two_links(seed, odds.clone(), TWO, 9);
        write_both_ways(&mut cluster, &connections, 40 * KIB);
        let_run(&mut cluster, 3 * usize::try_from(seed).unwrap());
        for (index, connection) in connections.iter().enumerate() {
            match index % 3 {
                0 => cluster.application(Client, *connection).finish(),
                1 => cluster.application(Server, *connection).reset(),
                _ => Side::BOTH.into_iter().for_each(|side| {
                    cluster.application(side, *connection).finish();
                }),
            }
        }
        let_run(&mut cluster, 5);
        cluster.break_this(first);
        cluster.run_until_quiet();
        for (index, connection) in connections.iter().enumerate() {
            if index % 3 == 0 {
                cluster.application(Server, *connection).finish();
            }
            if index % 3 == 1 {
                assert_eq!(cluster.application(Client, *connection).heard(), Heard::Reset);
            }
        }
        cluster.run_until_quiet();
        for (_, connection) in connections.iter().enumerate().filter(|(index, _)| index % 3 != 1) {
            for side in Side::BOTH {
                let application = cluster.application(side, *connection);
                let came = (application.heard(), application.received());
                assert_eq!(came, (Heard::End, 40 * KIB as u64), "seed {seed} {connection}");
            }
        }
        cluster.assert_nothing_stalls();
        cluster.assert_nothing_is_left();
    }
}

/// Send memory for one connection at a time: those that come over wait for it, and lose nothing.
// RFC 7609 4.6.2 #1: repeat pending messages before new data
#[test]
fn a_full_pool_delays_what_is_repeated() {
    let mut delayed = 0;
    for seed in 0..10 {
        let sizes = Sizes { send_chunks: 1, ..TWO };
        let (mut cluster, [first, _], connections) = two_links(seed, Odds::MALICIOUS, sizes, 40);
        let residents: Vec<_> = (0..20).map(|_| cluster.connect(Transport::Smc)).collect();
        let all = [connections, residents].concat();
        write_both_ways(&mut cluster, &all, 100 * KIB);
        let_run(&mut cluster, 100);
        cluster.break_this(first);
        finish_unharmed(&mut cluster, &all, 100 * KIB);
        delayed += cluster.hosts[0].counters_of(1).blocked_on_pool.get();
    }
    assert!(delayed > 0, "the pool was never full");
}

/// Nothing but room in the send pool lets them go on who have something to repeat: neither their
/// applications nor their peers say more.
#[test]
fn what_is_repeated_waits_for_room_by_itself() {
    let (mut repeated, mut waited) = (0, 0);
    for seed in 0..10 {
        let sizes = Sizes { send_chunks: 3, ..TWO };
        let (mut cluster, [first, _], connections) = two_links(seed, Odds::MALICIOUS, sizes, 40);
        let mut residents: Vec<_> = (0..20).map(|_| cluster.connect(Transport::Smc)).collect();
        // Two links that take all of the memory of their poller together.
        cluster.add_link_between([1, 1]);
        residents.extend((0..20).map(|_| cluster.connect(Transport::Smc)));
        write_both_ways(&mut cluster, &residents, 500 * KIB);
        let_run(&mut cluster, 100);
        for connection in &connections {
            cluster.application(Client, *connection).write(8 * KIB);
            cluster.application(Client, *connection).act();
        }
        for _ in 0..30 {
            cluster.turn_at(Client, 0);
        }
        cluster.break_this(first);
        cluster.run_until_quiet();
        for connection in &connections {
            assert_eq!(cluster.application(Server, *connection).received(), 8 * KIB as u64);
        }
        let counters = cluster.hosts[0].counters_of(1);
        repeated += counters.bytes_replayed.get();
        waited += counters.blocked_on_pool.get();
    }
    assert!(repeated > 0, "nothing was on its way");
    assert!(waited > 0, "the pool was never full");
}

/// The rendezvous ends when its link is gone already: the connection follows the others.
// RFC 7609 2.3 #3: move connections of a failed link
// RFC 7609 3.5.2.4 #5: keep data that precedes Confirm
#[test]
fn a_connection_that_comes_to_a_vacated_link_follows() {
    let mut cluster = Cluster::new(3, Odds::MALICIOUS, TWO);
    let first = cluster.add_link_between([0, 0]);
    let late = cluster.connect_at(Client).unwrap();
    cluster.add_link_between([1, 1]);
    cluster.application(Client, late).write(10 * KIB);
    cluster.application(Server, late).write(10 * KIB);
    cluster.run_until_quiet();
    cluster.break_this(first);
    cluster.run_until_quiet();
    assert!(cluster.host(Server).retired.contains(&first));
    assert_eq!(cluster.application(Server, late).received(), 0);
    cluster.establish(Server, late);
    finish_unharmed(&mut cluster, &[late], 10 * KIB);
}

/// An element of an RMB that the new link has no key for cannot be written: a reset is better than
/// silence.
#[test]
fn without_a_key_on_the_new_link_a_connection_is_reset() {
    let mut cluster = Cluster::new(1, Odds::CALM, TWO);
    let keyless = cluster.newest_link();
    let connection = cluster.connect(Transport::Smc);
    cluster.run_until_quiet();
    let other = cluster.add_link_between([1, 1]);
    for side in Side::BOTH {
        cluster.host(side).move_connections(keyless, other, None);
    }
    cluster.run_until_quiet();
    for side in Side::BOTH {
        assert_eq!(cluster.application(side, connection).heard(), Heard::Reset);
    }
    assert!(cluster.closed(connection).iter().all(|end| end.ending == Ending::LinkLost));
    cluster.assert_nothing_is_left();
}

/// Cables are pulled and put back, operators move what they like, programs come and go: as long as
/// one link works at any time, every byte arrives and every connection ends in order.
// RFC 7609 2.3 #3: move connections of a failed link
// RFC 7609 2.3 #12: use a link that comes back
// RFC 7609 4.6.1 #8: validate before resuming
// RFC 7609 4.6.2 #1: repeat pending messages before new data
#[test]
fn links_come_and_go() {
    for seed in smcgate_tests::seeds(700) {
        println!("SMC_SEED={seed}");
        let mut dice = Dice::new(seed);
        let odds = if dice.index(4) == 0 { Odds::CALM } else { Odds::MALICIOUS };
        let send_chunks = [1, 2, 16][dice.index(3)];
        let mut cluster = Cluster::new(seed, odds, Sizes { send_chunks, ..TWO });
        cluster.host(Server).prefers_newest = dice.index(2) == 0;
        let mut links = Vec::new();
        let mut expected = Vec::new();
        for round in 0..40 {
            if round == 0 || dice.index(6) == 0 {
                links.push(cluster.add_link_between([dice.index(2), dice.index(2)]));
            }
            let early = Side::BOTH[dice.index(2)];
            if expected.len() < 20
                && let Some(number) = cluster.connect_at(early)
            {
                assert_eq!(number, expected.len());
                expected.push(0);
            }
            let number = dice.index(expected.len());
            if dice.index(2) == 0 {
                for side in Side::BOTH {
                    cluster.establish(side, number);
                }
            }
            let len = 1 + dice.index(60 * KIB);
            expected[number] += len as u64;
            write_both_ways(&mut cluster, &[number], len);
            let_run(&mut cluster, dice.index(60));
            if links.len() > 1 && dice.index(3) == 0 {
                trouble(&mut cluster, &mut dice, &mut links);
            }
        }
        cluster.run_until_quiet();
        for (number, len) in expected.iter().enumerate() {
            for side in Side::BOTH {
                cluster.establish(side, number);
                cluster.run_until_quiet();
                cluster.application(side, number).finish();
            }
            cluster.run_until_quiet();
            if lost_what_was_acknowledged(&mut cluster, number) {
                continue;
            }
            for side in Side::BOTH {
                let application = cluster.application(side, number);
                let came = (application.heard(), application.received());
                assert_eq!(came, (Heard::End, *len), "seed {seed}, pair {number}");
            }
        }
        cluster.assert_nothing_is_left();
    }
}

/// Whether this connection was reset because an RNIC lost what it had acknowledged: nobody can
/// repeat that. The reset comes when it is certain that the message is not still on its way.
fn lost_what_was_acknowledged(cluster: &mut Cluster, number: usize) -> bool {
    if cluster.is_closed(number) || cluster.network.messages_lost() == 0 {
        return false;
    }
    cluster.wait(Duration::from_secs(1));
    cluster.run_until_quiet();
    let mut ends = cluster.closed(number).into_iter();
    ends.any(|end| end.ending == Ending::DataLost)
}

/// One link goes, or some of its connections do.
fn trouble(cluster: &mut Cluster, dice: &mut Dice, links: &mut Vec<LinkId>) {
    let from = links[dice.index(links.len())];
    let to = *links.iter().rev().find(|link| **link != from).expect("two links");
    // The first link never breaks, so that there is always one to go to.
    if from != links[0] && dice.index(2) == 0 {
        cluster.break_this(from);
        links.retain(|link| *link != from);
        return;
    }
    let index = dice.index(2);
    let ids: Vec<_> = cluster.pairs.iter().filter_map(|pair| pair.ids[index]).collect();
    let chosen = ids.into_iter().filter(|_| dice.index(2) == 0).collect();
    cluster.host(Side::BOTH[index]).move_connections(from, to, Some(chosen));
}
