//! Two hosts with all kinds of events in random order, under a seed.

use std::format;
use std::string::String;
use std::vec::Vec;

use super::hosts::{Host, Hosts, port};
use super::*;
use crate::limits::OUR_RMBS_MAX;

/// Numbers that look random and come again with the seed.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % bound
    }
}

/// After any number of links that came and went, ports that flapped, RMBs announced and withdrawn,
/// in whatever order messages of different links arrive: once it is quiet, both hosts have the same
/// links and know each RMB by its name on every one of them. Otherwise a failover would write to
/// the wrong place, or nowhere.
// RFC 7609 2.3 #11: restart LLC exchanges, do not replay
// RFC 7609 3.5.5.2 #1: register RMBs on all links
// RFC 7609 3.5.5.3.1 #7: repeat CONFIRM RKEY after ADD LINK
// RFC 7609 3.5.5.3.2 #6: repeat CONFIRM RKEY after DELETE LINK
// RFC 7609 3.5.5.3.3 #3: server's ADD LINK interrupts CONFIRM RKEY
#[test]
fn whatever_happens_both_sides_agree_in_the_end() {
    let mut ended = 0;
    for seed in 0..5_000 {
        let outcome = std::panic::catch_unwind(|| one_life(seed));
        match outcome {
            Ok(alive) => ended += usize::from(!alive),
            Err(_) => panic!("seed {seed}"),
        }
    }
    assert!((100..4_900).contains(&ended), "{ended} groups ended");
}

fn one_life(seed: u64) -> bool {
    let mut dice = Dice(seed);
    let ports = [&[1u8, 2, 3][..], &[1, 2], &[1], &[1, 2, 3, 4, 5, 6, 7, 8]];
    let clients = [&[101u8, 102, 103][..], &[101, 102], &[101], &[101, 102, 103, 104, 105, 106]];
    let max_links = 2 + u8::try_from(dice.below(7)).unwrap();
    let version = match seed % 2 {
        0 => Version::V1,
        _ => Version::V2 { max_connections: 255, direct: true },
    };
    let (servers, clients) = (ports[dice.below(4)], clients[dice.below(4)]);
    let mut hosts = Hosts::speaking(version, servers, clients, max_links);
    hosts.server.is_quick = dice.below(2) == 0;
    hosts.client.is_quick = dice.below(2) == 0;
    let mut story = Vec::new();
    let mut rmbs = 1;
    for _ in 0..200 {
        hosts.act();
        let role = [Role::Server, Role::Client][dice.below(2)];
        let event = dice.below(100);
        story.push(format!("{role:?} {event}"));
        match event {
            0..70 => {
                let wires: Vec<_> = hosts.wires.keys().copied().collect();
                if !wires.is_empty() {
                    hosts.deliver(wires[dice.below(wires.len())]);
                }
            }
            70..82 => change_rmbs(&mut hosts, role, event, &mut rmbs),
            82..96 => change_links(&mut hosts, role, event, &mut dice),
            _ => {
                hosts.now = hosts.now + SECOND;
                let now = hosts.now;
                for role in [Role::Server, Role::Client] {
                    hosts.host(role).group.handle_timeout(now);
                }
            }
        }
    }
    judge(hosts, &story)
}

/// An RMB comes or goes.
fn change_rmbs(hosts: &mut Hosts, role: Role, event: usize, rmbs: &mut u8) {
    let now = hosts.now;
    let host = hosts.host(role);
    if event < 78 {
        *rmbs += 1;
        let rmb = RmbIndex(*rmbs);
        if host.group.is_established() && *rmbs < OUR_RMBS_MAX {
            host.rmbs.insert(rmb);
            let keys = host.keys(rmb);
            host.group.announce_rmb(now, rmb, &keys);
        }
        return;
    }
    let last = host.rmbs.iter().next_back().copied();
    if let Some(rmb) = last.filter(|rmb| rmb.0 > 0)
        && host.told.contains(&Action::RmbConfirmed(rmb))
    {
        host.group.withdraw_rmb(now, rmb);
    }
}

/// A link breaks or is to go, or a port has come up.
fn change_links(hosts: &mut Hosts, role: Role, event: usize, dice: &mut Dice) {
    let now = hosts.now;
    let up: Vec<_> = hosts.host(role).up().into_iter().collect();
    let host = hosts.host(role);
    match event {
        82..86 => {
            if up.len() > 1 || !up.is_empty() && dice.below(10) == 0 {
                let link = up[dice.below(up.len())];
                if dice.below(2) == 0 {
                    hosts.break_link(link);
                } else {
                    hosts.break_link_at(role, link);
                }
            }
        }
        86..90 => {
            let orderly = dice.below(2) == 0;
            if up.len() > 1 {
                let link = up[dice.below(up.len())];
                host.group.delete_link(now, link, DeleteReason::OPERATOR, orderly);
            }
        }
        90 => host.vacate(now),
        _ => {
            let some = host.ports.iter().nth(dice.below(host.ports.len())).copied().unwrap();
            host.group.want_link(now, port(some));
        }
    }
}

/// Whether the groups are alive, now that it is quiet, and agree about everything.
fn judge(mut hosts: Hosts, story: &[String]) -> bool {
    hosts.run();
    hosts.sleep(60);
    let (server, client) = (&hosts.server, &hosts.client);
    if server.group.is_terminated() || client.group.is_terminated() {
        // Whoever did not notice finds out by TEST LINK.
        assert!(server.group.is_terminated() && client.group.is_terminated(), "{story:?}");
        return false;
    }
    assert_eq!(server.up(), client.up(), "{story:?}");
    let known: Vec<_> = server.queue_pairs.keys().collect();
    assert_eq!(known, client.queue_pairs.keys().collect::<Vec<_>>(), "{story:?}");
    assert_eq!(server.queue_pairs.len(), server.up().len(), "{story:?}");
    hosts.assert_rkeys_agree();
    // Whoever has a spare RNIC has a spare link, a symmetric one if both have.
    let spare = |host: &Host| host.ports.len() > 1;
    let redundant = server.up().len() > 1;
    assert_eq!(redundant, spare(server) || spare(client), "{story:?}");
    let symmetric = server.group.symmetry() == Symmetry::Symmetric;
    assert!(symmetric || !(spare(server) && spare(client)), "{story:?}");
    true
}
