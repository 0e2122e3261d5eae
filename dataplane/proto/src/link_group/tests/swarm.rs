//! Two hosts to whom everything happens, in any order, under a seed.

use std::format;
use std::vec::Vec;

use super::hosts::{Hosts, port};
use super::*;

/// Numbers that look random and come again with the seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % bound
    }
}

/// After any number of links that came and went, ports that flapped, RMBs announced and withdrawn,
/// in whatever order messages of different links arrive: once it is quiet, both hosts have the same
/// links and know each RMB by its name on every one of them. Otherwise a failover would write to
/// the wrong place, or nowhere.
// RFC 7609 2.3-6, 3.5.5.2-1, 3.5.5.3.1-7, 3.5.5.3.2-6, 3.5.5.3.3-3
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

/// Two hosts, and what happens to them.
struct Life {
    dice: Dice,
    hosts: Hosts,
    /// RMBs that either of them ever had.
    rmbs: u8,
}

/// Whether the group is alive at the end.
fn one_life(seed: u64) -> bool {
    let mut dice = Dice(seed);
    let ports = [&[1u8, 2, 3][..], &[1, 2], &[1]];
    let clients = [&[101u8, 102, 103][..], &[101, 102], &[101]];
    let max_links = 2 + u8::try_from(dice.below(4)).unwrap();
    let hosts = Hosts::new(ports[dice.below(3)], clients[dice.below(3)], max_links);
    let mut life = Life { dice, hosts, rmbs: 1 };
    let mut story = Vec::new();
    for _ in 0..200 {
        life.hosts.act();
        let role = [Role::Server, Role::Client][life.dice.below(2)];
        let event = life.dice.below(100);
        story.push(format!("{role:?} {event}"));
        life.happen(role, event);
    }
    let Life { mut hosts, .. } = life;
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
    true
}

impl Life {
    fn happen(&mut self, role: Role, event: usize) {
        let now = self.hosts.now;
        match event {
            0..70 => {
                let wires: Vec<_> = self.hosts.wires.keys().copied().collect();
                if !wires.is_empty() {
                    self.hosts.deliver(wires[self.dice.below(wires.len())]);
                }
            }
            70..78 => self.announce(role),
            78..82 => self.withdraw(role),
            82..90 => self.lose(role, event),
            90..96 => {
                let ports: Vec<_> = self.hosts.host(role).ports.iter().copied().collect();
                let some = port(ports[self.dice.below(ports.len())]);
                self.hosts.host(role).group.want_link(now, some);
            }
            _ => {
                self.hosts.now = now + SECOND;
                for role in [Role::Server, Role::Client] {
                    self.hosts.host(role).group.handle_timeout(now + SECOND);
                }
            }
        }
    }

    fn announce(&mut self, role: Role) {
        let now = self.hosts.now;
        let host = self.hosts.host(role);
        if host.group.is_established() && self.rmbs < 250 {
            self.rmbs += 1;
            let rmb = RmbIndex(self.rmbs);
            host.rmbs.insert(rmb);
            let keys = host.keys(rmb);
            host.group.announce_rmb(now, rmb, &keys);
        }
    }

    fn withdraw(&mut self, role: Role) {
        let now = self.hosts.now;
        let host = self.hosts.host(role);
        let last = host.rmbs.iter().next_back().copied();
        if let Some(rmb) = last.filter(|rmb| rmb.0 > 0)
            && host.told.contains(&Action::RmbConfirmed(rmb))
        {
            host.group.withdraw_rmb(now, rmb);
        }
    }

    /// A link breaks, or an operator does not want it; the last one only now and then.
    fn lose(&mut self, role: Role, event: usize) {
        let now = self.hosts.now;
        let up: Vec<_> = self.hosts.host(role).up().into_iter().collect();
        let may = up.len() > 1 || !up.is_empty() && self.dice.below(10) == 0;
        if !may {
            return;
        }
        let link = up[self.dice.below(up.len())];
        if event < 86 {
            self.hosts.break_link(link);
        } else if up.len() > 1 {
            let orderly = self.dice.below(2) == 0;
            let group = &mut self.hosts.host(role).group;
            group.delete_link(now, link, DeleteReason::OPERATOR, orderly);
        }
    }
}
