//! The contract of [`Fabric`](smcr_rnic::Fabric), asked of every backend.
//!
//! A backend is done when it passes. To add one: implement [`rig::Harness`] for it and add a line
//! at the end of this file.

#[path = "conformance/flow.rs"]
mod flow;
#[path = "conformance/promises.rs"]
mod promises;
#[path = "conformance/rig.rs"]
mod rig;

use std::time::Duration;

use smcr_proto::{Gid, Instant, MacAddress, Mtu};
use smcr_rnic::sim::{self, Network, Odds};
use smcr_rnic::{Fabric, Port};

use rig::Harness;

/// All promises, for one backend, under as many seeds as it can afford.
macro_rules! conformance {
    ($backend:ident, $harness:ty, $seeds:expr) => {
        mod $backend {
            use super::*;

            conformance!(@ $harness, $seeds,
                bytes_are_there_when_their_message_is
                many_queue_pairs_in_both_directions
                bulk_is_not_altered
                a_thousand_messages_arrive_once_and_in_order
                forbidden_writes_are_contained
                writes_up_to_the_edges_are_placed
                breaking_under_load_brings_everything_home
                a_silent_peer_is_given_up
                release_flushes_and_disturbs_nobody
                room_is_what_can_be_posted
                the_first_message_waits_for_the_peer
                queue_pairs_come_and_go
            );
        }
    };
    (@ $harness:ty, $seeds:expr, $($promise:ident)*) => {
        $(#[test]
        fn $promise() {
            for seed in smcgate_tests::seeds($seeds) {
                println!("SMC_SEED={seed}");
                promises::$promise::<$harness>(seed);
            }
        })*
    };
}

/// The two ports of a pair under test.
fn ports() -> [Port; 2] {
    [1, 2].map(|n| Port {
        gid: Gid::from_ipv4([127, 0, 0, n]),
        mac: MacAddress([2, 0, 0, 0, 0, n]),
        mtu: Mtu::B1024,
    })
}

/// The simulated network, on its virtual clock.
struct Sim<const MALICIOUS: bool> {
    network: Network,
    now: Instant,
}

impl<const MALICIOUS: bool> Harness for Sim<MALICIOUS> {
    type Rnic = sim::Rnic;
    type Fabric = sim::Fabric;

    fn new(seed: u64) -> (Self, [(sim::Rnic, sim::Fabric); 2]) {
        let network = Network::new(seed, if MALICIOUS { Odds::MALICIOUS } else { Odds::CALM });
        let nics = ports().map(|port| network.rnic(port));
        (Self { network, now: Instant::default() }, nics)
    }

    fn now(&self) -> Instant {
        self.now
    }

    fn wait(&mut self, until: Option<Instant>) {
        let next = [until, self.network.next_event()].into_iter().flatten().min();
        // A quiet network lets time pass all the same, for tests that wait for nothing to happen.
        self.now = next.unwrap_or(self.now + Duration::from_millis(1)).max(self.now);
    }
}

conformance!(calm_sim, Sim<false>, 3);
conformance!(malicious_sim, Sim<true>, 10);
