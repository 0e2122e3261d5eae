//! What trouble of one kind may cost, and that it costs nothing else.
//!
//! The swarm mixes everything, so its judges must excuse much. Here only one thing goes wrong.

use std::ops::Range;

use smcgate_tests::{run_all, seeds};
use smcr_rnic::dice::Chance;
use smcr_rnic::sim::Odds;

use super::gateway::Sizes;
use super::swarm::{Seen, Swarm};

/// A peer that forgets to answer, or talks nonsense, loses its link or its group with all
/// connections on it, and nobody else notices: least of all customers of other peers.
// RFC 7609 C.7.1 #35: any other LLC error fails link
#[test]
fn nonsense_costs_its_link_or_group_in_the_swarm() {
    let name = "nonsense_costs_its_link_or_group_in_the_swarm";
    run(name, Swarm::noisy, ["an LLC message is lost", "an LLC message is garbled"]);
}

/// An RNIC without room for more costs the connections and links that need more of it. Whoever has
/// what it needs keeps it.
#[test]
fn exhaustion_costs_what_is_new_in_the_swarm() {
    let name = "exhaustion_costs_what_is_new_in_the_swarm";
    run(name, Swarm::exhausted, ["no memory for a connection", "a link is refused"]);
}

/// Runs such swarms, which must meet that trouble.
fn run(name: &str, swarm: impl Fn(u64) -> Swarm + Sync, trouble: [&str; 2]) {
    let Range { start, end } = seeds(60);
    let count = (end - start).min(SEEDS_MAX);
    let mut seen = Seen::default();
    let runs = run_all("sim", name, start..start + count, |seed| swarm(seed).run());
    runs.iter().for_each(|one| seen.add(one));
    println!("{seen:#?}");
    assert!(count < 60 || trouble.into_iter().all(|what| seen.has_met(what)), "{seen:#?}");
}

impl Swarm {
    /// LLC is lost and garbled; nothing else goes wrong.
    fn noisy(seed: u64) -> Self {
        let mut swarm =
            Self::but_for(seed, Odds { straggle: Chance::NEVER, ..Odds::MALICIOUS }, |_| ());
        let noise = [1, 5, 20][swarm.dice.index(3)];
        swarm.world.wire.make_noise(Chance::percent(noise));
        swarm
    }

    /// Opening and registering things fails; nothing else goes wrong.
    fn exhausted(seed: u64) -> Self {
        let never = Chance::NEVER;
        let exhausted = Chance::percent(10);
        Self::but_for(seed, Odds { straggle: never, exhausted, ..Odds::MALICIOUS }, |_| ())
    }

    /// A swarm in which nothing goes wrong but for these odds, at gateways of other sizes.
    pub(super) fn but_for(seed: u64, odds: Odds, adjust: impl Fn(&mut Sizes)) -> Self {
        let mut swarm = Self::sized(seed, adjust);
        swarm.trouble = Chance::NEVER;
        swarm.cautious = true;
        swarm.world.network.change_odds(odds);
        swarm
    }
}

/// One kind of trouble is met by fewer seeds than all kinds in all combinations.
const SEEDS_MAX: u64 = 500;
