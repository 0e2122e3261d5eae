//! Who may write an element, and when another connection may have it.
//!
//! An element is given back by its owner and written by its peer. Each scenario here is one way in
//! which the two once disagreed, and the bytes of one connection came into the element of the next.

use std::time::Duration;

use smcgate::groups::{Pollers, PortId};
use smcr_engine::handoff::Ending;
use smcr_engine::{Command, LinkId};
use smcr_proto::RmbeSize;
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::Odds;

use super::World;
use super::gateway::{IDLE_GROUP, Sizes};
use crate::application::Heard;

/// Two gateways with so many RNICs each, and one connection over them.
fn connected(rnics: u8) -> World {
    let world = first_contact(1, Odds::CALM, rnics, 20);
    assert!([CLIENT, SERVER].iter().all(|side| world.was_handed_over(0, *side)));
    world
}

/// Two gateways whose RMBs have so many elements, and their first connection.
fn first_contact(seed: u64, odds: Odds, rnics: u8, elements: u8) -> World {
    let sizes = Sizes {
        rnics,
        max_links: rnics,
        rmbe: RmbeSize::from_notation(0),
        elements,
        rmb_bytes: 1 << 25,
        send_chunks: 8,
        socket_bytes: 100_000,
        reports: 100,
    };
    let mut world = World::new(seed, odds, [sizes.clone(), sizes]);
    world.connect(CLIENT, [PortId(0); 2]);
    world.run_for(Duration::from_secs(1));
    world
}

/// The link that a connection is on, as the gateway of this side calls it.
fn link_of(world: &World, number: usize, side: usize) -> LinkId {
    let (host, id) = world.connections[number].names[side];
    world.hosts[host].groups.member(id.unwrap()).unwrap().link
}

/// Panics unless connection `number` ended well and complete on both sides.
fn assert_ended_well(world: &World, number: usize) {
    let [one, other] = &world.connections[number].applications;
    for (writer, reader) in [(one, other), (other, one)] {
        assert_eq!((reader.heard(), reader.received()), (Heard::End, writer.sent()));
    }
    let endings = [CLIENT, SERVER].map(|side| world.ending(number, side));
    assert_eq!(endings, [Some(Ending::Graceful); 2], "connection {number}");
}

/// Lets what applications of this side wrote be sent, and arrive at once, but be acknowledged late.
fn acknowledge_late(world: &mut World, side: usize) {
    world.applications();
    world.hosts[side].turn(world.now);
    let late = Duration::from_millis(50);
    world.network.change_odds(Odds { latency: late..=late, ..Odds::CALM });
    world.now = world.now + Duration::from_micros(10);
    world.hosts[1 - side].turn(world.now);
    world.network.change_odds(Odds::CALM);
}

/// With one element in each RMB the first connection takes the last one before anybody can be told
/// of another RMB. That other RMB was never announced: each further connection waited for it in
/// vain, as long as the group lived. Found by the swarm with the rendezvous of production.
// RFC 7609 3.5.2.1 #7: CONFIRM RKEY before Accept
#[test]
fn a_group_of_single_elements_grows() {
    let mut world = first_contact(1, Odds::CALM, 1, 1);
    for number in 1..5 {
        world.connect(CLIENT, [PortId(0); 2]);
        world.run_for(Duration::from_millis(100));
        for side in [CLIENT, SERVER] {
            assert!(world.was_handed_over(number, side), "connection {number} waits");
        }
    }
    end(world);
}

/// Lets everything end, and panics if something does not.
fn end(mut world: World) {
    world.connections.iter_mut().for_each(super::Connected::say_goodbye);
    world.run_for(Duration::from_secs(75));
    world.run_for(2 * IDLE_GROUP);
    let World { hosts, network, .. } = &mut world;
    hosts.iter_mut().for_each(|host| host.assert_nothing_is_left(network));
}

/// A gateway loses a link that the other still has: it ends the connection without a word, and the
/// other goes on writing until it hears of it by TCP. Seed 15347 of the swarm: the server had no
/// link left when Confirm came, the client had moved to a link that the server did not use yet.
// RFC 7609 4.4.2 #1: reuse only after both say done
// RFC 7609 4.4.2 #2: reuse element after a timeout
#[test]
fn an_element_whose_peer_knows_nothing_of_the_end_rests() {
    let mut world = connected(1);
    let link = link_of(&world, 0, SERVER);
    let pollers = world.hosts[SERVER].groups.pollers_mut();
    pollers.command(PortId(0), Command::FailConnections { link });
    world.hosts[SERVER].turn(world.now);
    assert_eq!(world.ending(0, SERVER), Some(Ending::LinkLost));

    // Nobody has told the client.
    world.connections[0].applications[CLIENT].write(5_000);
    world.run_for(Duration::from_millis(100));
    assert_eq!(world.hosts[CLIENT].count(|all| all.rdma_out.get()), 5_000);
    assert_eq!(world.ending(0, CLIENT), None);

    // The rendezvous panics if the element of this one is not zero.
    world.connect(CLIENT, [PortId(0); 2]);
    world.run_for(Duration::from_millis(100));
    assert_eq!(world.hosts[SERVER].groups.counts().elements_rested, 2, "and so does this one");
    world.run_for(Duration::from_secs(1));
    assert_eq!(world.connections[0].applications[CLIENT].heard(), Heard::Reset, "TCP was reset");
    end(world);
}

/// A peer that has heard C frees its element. If the link then breaks before the last writes were
/// acknowledged, failover would write them again, into an element that is another's by now.
// RFC 7609 4.8.1 #4: send pending data before the end
// RFC 7609 4.8.1 #12: write nothing after C
// RFC 7609 4.6.2 #1: repeat pending messages before new data
#[test]
fn nothing_is_written_again_when_both_sides_have_closed() {
    let mut world = connected(2);
    world.connections[0].applications[SERVER].finish();
    world.run_for(Duration::from_secs(5));
    assert_eq!(world.connections[0].applications[CLIENT].heard(), Heard::End);

    // The last bytes and the end go out; they come at once, but their acknowledgements do not.
    world.connections[0].applications[CLIENT].write(5_000);
    world.connections[0].applications[CLIENT].finish();
    acknowledge_late(&mut world, CLIENT);
    world.run_for(Duration::from_millis(10));
    assert_eq!(world.connections[0].applications[SERVER].heard(), Heard::End);

    // Then the link breaks, and the client continues on the other.
    let link = link_of(&world, 0, CLIENT);
    let group = world.hosts[CLIENT].groups.iter().next().unwrap().1;
    let qpn = group.links.iter().find(|one| one.id == link).unwrap().ours.qpn;
    world.network.break_qp(qpn);
    world.run_for(Duration::from_secs(1));
    assert_eq!(world.hosts[CLIENT].groups.counts().connections_moved, 1);

    // The rendezvous panics if the element of this one is not zero.
    world.connect(CLIENT, [PortId(1); 2]);
    world.run_for(Duration::from_secs(1));
    assert_ended_well(&world, 0);
    end(world);
}

/// A link is deleted while a rendezvous names it, and while the client makes an RMB known that it
/// needs for its answer. The connection follows those that left the link before: its RMB was not
/// among those that they were told the new names of. Seed 36078 of the swarm.
// RFC 7609 2.3 #3: move connections of a failed link
// RFC 7609 3.5.2.2 #6: CONFIRM RKEY before Confirm
#[test]
fn a_newcomer_follows_those_that_left_its_link() {
    let mut world = connected(2);
    world.run_for(Duration::from_secs(5));
    world.connect(CLIENT, [PortId(0); 2]);
    world.run_for(Duration::from_secs(1));
    let groups = &mut world.hosts[SERVER].groups;
    let group = groups.iter().next().unwrap().0;
    let link = groups.best_link(group).unwrap();
    // One connection cannot leave the link yet.
    let stays = (0..2).find(|number| link_of(&world, *number, SERVER) == link).unwrap();
    world.connections[stays].applications[SERVER].write(5_000);
    acknowledge_late(&mut world, SERVER);

    // The Proposal, and the Accept, which the client cannot answer before it has announced an RMB.
    world.hosts[CLIENT].element_sizes[0] = RmbeSize::KIB_64;
    world.connect(CLIENT, [PortId(0); 2]);
    world.talk(|_| true);
    world.talk(|_| true);
    world.hosts[SERVER].groups.delete_link(world.now, link, true).unwrap();
    world.run_for(Duration::from_secs(1));
    world.connections.iter_mut().for_each(super::Connected::say_goodbye);
    world.run_for(Duration::from_secs(1));
    assert_eq!(world.hosts[SERVER].groups.counts().connections_moved, 2);
    (0..3).for_each(|number| assert_ended_well(&world, number));
    end(world);
}

/// Short connections use the same few elements again and again. Whoever closes last gives its
/// element to the next connection as soon as it has said so; the offer comes by TCP, and may be
/// there before the poller of the other side has heard the same, or before its own last word was
/// acknowledged. So the next connection waits for the one before, and nobody loses a byte.
// RFC 7609 3.5.2.2 #4: check that server's element is free
// RFC 7609 3.5.2.3 #1: check that client's element is free
// RFC 7609 4.4.2 #1: reuse only after both say done
// RFC 7609 4.8.1 #20: reuse element once Closed
#[test]
fn short_connections_are_no_conflict() {
    let mut held = 0;
    for seed in smcgate_tests::seeds(30) {
        println!("SMC_SEED={seed}");
        let mut dice = Dice::new(seed);
        let odds = Odds { straggle: Chance::NEVER, ..Odds::MALICIOUS };
        let mut world = first_contact(seed, odds, 1, 2);
        for number in 0..60 {
            let one = &mut world.connections[number].applications;
            for application in one {
                application.write(1 + dice.index(20_000));
                application.finish();
            }
            // The next begins while this one ends.
            while dice.index(40) > 0 {
                if !world.step() {
                    world.pass_time(world.now + Duration::from_millis(1));
                }
            }
            world.connect(dice.index(2), [PortId(0); 2]);
        }
        world.connections.iter_mut().for_each(super::Connected::say_goodbye);
        world.run_for(Duration::from_secs(5));
        (0..world.connections.len()).for_each(|number| assert_ended_well(&world, number));
        let counts = world.hosts.each_ref().map(|host| host.groups.counts());
        assert_eq!(counts.map(|counts| counts.conflicts), [0; 2]);
        held += counts.iter().map(|counts| counts.offers_held).sum::<u64>();
        end(world);
    }
    println!("{held} offers waited");
    assert!(held > 0, "each of these was a conflict once");
}

const CLIENT: usize = 0;
const SERVER: usize = 1;
