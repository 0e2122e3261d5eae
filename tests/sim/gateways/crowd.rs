//! One gateway with a thousand peers.

use std::fs;
use std::time::Duration;

use smcgate::groups::PortId;
use smcr_proto::RmbeSize;
use smcr_rnic::dice::Chance;
use smcr_rnic::sim::Odds;

use super::World;
use super::gateway::{IDLE_GROUP, Sizes};
use crate::application::Heard;

const PEERS: u16 = 1_000;
/// Connections that come at once.
const AT_ONCE: usize = 50;
/// Connections of the one peer that is busier than others.
const BURST: usize = 200;

/// The 66th peer of a gateway stayed TCP, because each link group reserved what 255 connections
/// need; and a turn of a poller, like anything that woke the control thread, cost time for each
/// peer that was idle. A peer that comes with hundreds of connections at once gets them all,
/// although its first RMB is small.
#[test]
fn a_thousand_peers_are_ordinary() {
    let sizes = Sizes {
        rnics: 1,
        max_links: 2,
        rmbe: RmbeSize::from_notation(0),
        elements: 255,
        // One element for each connection, and few more.
        rmb_bytes: (u64::from(PEERS) + 2 * BURST as u64) << 14,
        send_chunks: 8,
        socket_bytes: 30_000,
        reports: 8_192,
    };
    // What hardware pins counts as a whole, and needs more.
    let odds = Odds { pins: Chance::NEVER, ..Odds::CALM };
    let mut world = World::new(1, odds, [sizes.clone(), sizes]);
    let ports = [PortId(0); 2];
    let before = resident_kib();
    for peer in 0..PEERS {
        world.connect_as(peer, 0, ports);
        if world.talks() >= AT_ONCE {
            world.run_for(Duration::from_millis(20));
        }
    }
    world.run_for(Duration::from_millis(100));
    let each = (resident_kib() - before) as f64 / f64::from(PEERS) / 2.0;
    println!("{each:.1} KiB for each peer at each gateway, with one connection and its test");
    for _ in 0..BURST {
        world.connect_as(7, 0, ports);
    }
    world.run_for(Duration::from_secs(1));
    for one in &mut world.connections {
        one.applications.iter_mut().for_each(|application| application.write(3_000));
    }
    world.run_for(Duration::from_millis(100));
    let last = world.connections.len();
    for number in 0..last {
        let one = &world.connections[number];
        assert!(one.names.iter().all(|(_, id)| id.is_some()), "connection {number} is not SMC-R");
        assert!(one.applications.iter().all(|application| application.received() == 3_000));
    }
    for host in &world.hosts {
        assert_eq!((host.no_memory, host.groups.iter().count()), (0, usize::from(PEERS)));
        assert_eq!(host.groups.counts().groups_lost, 0);
    }
    for one in &mut world.connections {
        one.say_goodbye();
    }
    world.run_for(Duration::from_secs(31));
    for one in &world.connections {
        assert!(one.applications.iter().all(|application| application.heard() == Heard::End));
    }
    world.run_for(2 * IDLE_GROUP);
    let World { hosts, network, .. } = &mut world;
    hosts.iter_mut().for_each(|host| host.assert_nothing_is_left(network));
}

fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
