//! Faults of our own, planted where the simulator can reach: the judges must notice each.
//!
//! A swarm that finds nothing may be one that cannot find anything. So each of these is run under
//! one seed after another until a judge complains; the same seed without the fault must pass, or
//! the complaint was about something else.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use smcgate::groups::{Joined, Pollers};
use smcgate_tests::words_of;
use smcr_proto::wire::cdc::{Cdc, is_cdc};
use smcr_proto::wire::llc::{AddLink, ConfirmLink, ConfirmRkey, Llc};
use smcr_proto::{Gid, Instant};
use smcr_rnic::Message;
use smcr_rnic::sim::Parcel;

use super::gateway::Gateway;
use super::swarm::Swarm;
use crate::hasty::{self, Fault};

/// A planted fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// What failover validation messages ask for is always there (RFC 4.6.1).
    TrustAcknowledgements,
    /// An element that a peer may still write is given to the next connection (RFC 4.4.2).
    ReuseEarly,
    /// Connections end too hastily.
    Hasty(Fault),
    /// A server does not answer CONFIRM RKEY while it adds a link (RFC 3.5.5.3.1).
    IgnoreCollision,
}

/// Without this check, a hole in a file that was in no one's memory when an RNIC died.
#[test]
fn a_gateway_that_trusts_acknowledgements_is_found_out() {
    assert_found_out(Mutant::TrustAcknowledgements, &["is not what was sent"]);
}

/// Without this rule, one customer's bytes in the stream of another.
#[test]
fn a_gateway_that_reuses_elements_early_is_found_out() {
    assert_found_out(Mutant::ReuseEarly, &["is not zero", "is not what was sent"]);
}

/// Without this rule, what a peer writes again on another link comes into the stream of the next
/// connection.
#[test]
fn a_gateway_that_reuses_elements_early_after_close_is_found_out() {
    assert_found_out(
        Mutant::Hasty(Fault::ReuseAfterClose),
        &["is not zero", "is not what was sent"],
    );
}

/// Without this rule, a peer that has not heard of the end writes to the next connection.
#[test]
fn a_gateway_that_reuses_elements_early_after_abort_is_found_out() {
    assert_found_out(
        Mutant::Hasty(Fault::ReuseAfterAbort),
        &["is not zero", "is not what was sent"],
    );
}

/// Without this rule, failover writes what the peer has read into the element of another.
#[test]
fn a_gateway_that_writes_again_after_closing_is_found_out() {
    assert_found_out(
        Mutant::Hasty(Fault::ReplayAfterClosed),
        &["is not zero", "is not what was sent"],
    );
}

/// Without this rule, links that are well go down now and then, and nobody knows why.
#[test]
fn a_gateway_that_ignores_a_collision_is_found_out() {
    assert_found_out(Mutant::IgnoreCollision, &["nobody broke"]);
}

/// Panics unless a judge says one of these of a swarm with this fault. What others say of it
/// meanwhile is welcome, and not enough: peers notice some of what it does, and reset connections.
fn assert_found_out(mutant: Mutant, complaints: &[&str]) {
    for seed in 0..SEEDS_MAX {
        let run = |planted| {
            let swarm = mutant.swarm(seed).with(planted);
            catch_unwind(AssertUnwindSafe(|| swarm.run()))
        };
        if let Err(panic) = run(Some(mutant)) {
            let words = words_of(&*panic);
            println!("{mutant:?} is found out by seed {seed}: {words}");
            assert!(run(None).is_ok(), "seed {seed} fails without {mutant:?}");
            if complaints.iter().any(|complaint| words.contains(complaint)) {
                return;
            }
        }
    }
    panic!("{SEEDS_MAX} seeds do not find {mutant:?}");
}

impl Mutant {
    /// A swarm in which it may be met.
    fn swarm(self, seed: u64) -> Swarm {
        match self {
            Self::TrustAcknowledgements => {
                let mut swarm = Swarm::new(seed);
                swarm.lose_often();
                swarm
            }
            Self::Hasty(Fault::ReuseAfterClose | Fault::ReplayAfterClosed) => {
                let mut swarm = Swarm::sized(seed, |sizes| {
                    (sizes.elements, sizes.rnics) = (3, sizes.rnics.max(2));
                });
                swarm.lose_often();
                swarm.ends_late = true;
                swarm
            }
            Self::ReuseEarly | Self::Hasty(Fault::ReuseAfterAbort) | Self::IgnoreCollision => {
                Swarm::new(seed)
            }
        }
    }
}

impl Swarm {
    fn with(mut self, mutant: Option<Mutant>) -> Self {
        let swarm = &mut self;
        for host in &mut swarm.world.hosts {
            host.mutant = mutant;
        }
        match mutant {
            Some(Mutant::TrustAcknowledgements) => swarm.world.network.tap(|_, messages| {
                for message in messages.iter_mut().filter(|message| is_cdc(message)) {
                    let cdc = Cdc::decode(message).expect("we make no nonsense");
                    if cdc.failover_validation {
                        *message = Cdc { sequence: 0, ..cdc }.encode();
                    }
                }
            }),
            Some(Mutant::IgnoreCollision) => {
                let mut adding = BTreeSet::new();
                swarm.world.network.tap(move |parcel, messages| {
                    messages.retain(|message| is_heard(&mut adding, parcel, message));
                });
            }
            Some(Mutant::Hasty(fault)) => {
                hasty::plant(&swarm.world.network, fault, &swarm.world.tokens);
            }
            Some(Mutant::ReuseEarly) | None => {}
        }
        self
    }
}

/// Whether a server that is deaf to CONFIRM RKEY while it adds a link hears this. `adding` are the
/// hosts that add one.
fn is_heard(adding: &mut BTreeSet<u8>, parcel: &Parcel, message: &Message) -> bool {
    let Parcel { source: Gid([.., from]), target: Gid([.., to]), .. } = *parcel;
    match Llc::decode(message) {
        Ok(Llc::AddLink(AddLink { reply: false, .. })) => {
            adding.insert(from);
        }
        Ok(Llc::AddLink(AddLink { rejected: true, .. })) => {
            adding.remove(&to);
        }
        Ok(Llc::ConfirmLink(ConfirmLink { reply: true, .. })) => {
            adding.remove(&to);
        }
        Ok(Llc::ConfirmRkey(ConfirmRkey { reply: false, .. })) => return !adding.contains(&to),
        Ok(_) | Err(_) => {}
    }
    true
}

impl Gateway {
    /// What [`leave`](smcgate::groups::Groups::leave) does, but for the rest of the element.
    pub(super) fn reuse_early(&mut self, now: Instant, joined: Joined) {
        let Joined { connection, mut rmbe, .. } = joined;
        rmbe.touch(0..rmbe.capacity());
        if let Some(port) = self.groups.member(connection).map(|member| member.port) {
            self.groups.pollers_mut().forget(port, connection);
        }
        self.groups.closed(now, connection, Some(rmbe), true);
    }
}

/// Seeds within which each fault must be found.
const SEEDS_MAX: u64 = 2_000;
