//! Faults of our own, planted where the simulator can reach: the judge must notice each.
//!
//! See [`gateways::mutants`](crate::gateways::mutants): the faults are the same, and so is the
//! method. Here those are planted that a hostile host can make use of.

use std::panic::{AssertUnwindSafe, catch_unwind};

use smcgate_tests::words_of;

use super::swarm::Swarm;

/// Without the check that CDC belongs to its link group, one peer resets the connections of
/// another, or forges their bytes.
#[test]
fn a_gateway_that_mixes_groups_is_found_out() {
    assert_found_out(Swarm::that_mixes_groups, &["why?", "is not what was sent", "cut short"]);
}

/// Where a hostile host has the TCP address of another, as if nobody asked who founded a group, it
/// has the connections of that one reset.
#[test]
fn a_gateway_that_trusts_claims_is_found_out() {
    assert_found_out(|seed| Swarm::visited_from(seed, true), &["why?"]);
}

/// Panics unless the judge says one of these of a swarm with this fault, under a seed that passes
/// without it.
fn assert_found_out(swarm: impl Fn(u64) -> Swarm, complaints: &[&str]) {
    for seed in 0..SEEDS_MAX {
        let planted = catch_unwind(AssertUnwindSafe(|| swarm(seed).run()));
        let Err(panic) = planted else { continue };
        let words = words_of(&*panic);
        println!("found out by seed {seed}: {words}");
        let honest = catch_unwind(AssertUnwindSafe(|| Swarm::visited(seed).run()));
        assert!(honest.is_ok(), "seed {seed} fails without the fault");
        if complaints.iter().any(|complaint| words.contains(complaint)) {
            return;
        }
    }
    panic!("{SEEDS_MAX} seeds do not find it");
}

impl Swarm {
    /// A hostile host is about, and pollers take all links and connections for one group.
    fn that_mixes_groups(seed: u64) -> Self {
        let mut swarm = Self::visited(seed);
        for node in &mut swarm.world.nodes {
            node.endpoint.groups_mut().pollers_mut().mixes_groups = true;
        }
        swarm
    }
}

/// Seeds within which each fault must be found.
const SEEDS_MAX: u64 = 2_000;
