//! Faults of our own, planted where the simulator can reach: the judge must notice each.
//!
//! See [`gateways::mutants`](crate::gateways::mutants): the faults are the same, and so is the
//! method. Here those are planted that a hostile host can make use of, and those in which a
//! rendezvous has a part: an element that is given away too early shows when the next connection
//! has it. One shows that urgent bytes are compared. The others show what is no excuse: a failed
//! link where there are others, a loss where the network lost nothing, an application that closed
//! in peace, or an abort that nobody had to obey.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use smcgate_tests::words_of;
use smcr_proto::Qpn;
use smcr_proto::wire::cdc::{Cdc, is_cdc};
use smcr_proto::wire::clc::v2::OfferV2;
use smcr_proto::wire::clc::{Frame, Framer, Offer};
use smcr_rnic::dice::Chance;
use smcr_rnic::sim::Odds;

use super::call::Way;
use super::swarm::{CAREFUL, Kind, Swarm};
use super::{CLIENT, INTRUDER, SERVER, World, address_of};
use crate::KIB;
use crate::gateways::gateway::Sizes;
use crate::hasty::{self, Fault};

/// A fault of both gateways that the world around them imitates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    /// A server that has left a link knows nothing of it any more.
    ForgetsLinks,
    /// A poller that is asked to abort a connection does so although it is TCP.
    AbortsTcp,
    /// A connection is aborted as soon as one of its applications closes.
    CutsOff,
    /// A gateway sees no policy of IPsec.
    SeesNoPolicies,
    /// A gateway sees policies of IPsec where there are none.
    InventsPolicies,
}

/// Without the check that CDC belongs to its link group, one peer resets the connections of
/// another, or forges their bytes.
#[test]
fn a_gateway_that_mixes_groups_is_found_out() {
    let complaints = ["why?", "is not what was sent", "cut short", "both gateways are honest"];
    assert_found_out(Swarm::that_mixes_groups, Swarm::visited, &complaints);
}

/// Where a hostile host has the TCP address of another, as if nobody asked who founded a group, it
/// has the connections of that one reset.
#[test]
fn a_gateway_that_trusts_claims_is_found_out() {
    assert_found_out(|seed| Swarm::visited_from(seed, true), Swarm::visited, &["why?"]);
}

/// Without the rule that an element rests until its peer has said C, what a peer writes again on
/// another link comes into the stream of the next connection.
#[test]
fn a_gateway_that_reuses_elements_after_close_is_found_out() {
    let honest = |seed| Swarm::of_kind(seed, Kind::LateEnds);
    let planted = |seed| honest(seed).with(Fault::ReuseAfterClose);
    assert_found_out(planted, honest, &OTHERS_BYTES);
}

/// The same where a connection was aborted, and its peer has not heard of it.
#[test]
fn a_gateway_that_reuses_elements_after_abort_is_found_out() {
    let honest = |seed| Swarm::of_kind(seed, Kind::Aborts);
    let planted = |seed| honest(seed).with(Fault::ReuseAfterAbort);
    assert_found_out(planted, honest, &OTHERS_BYTES);
}

/// Without the rule that nothing is written behind C, failover writes what the peer has read into
/// the element of another.
#[test]
fn a_gateway_that_writes_again_after_closing_is_found_out() {
    let honest = |seed| Swarm::of_kind(seed, Kind::LateEnds);
    let planted = |seed| honest(seed).with(Fault::ReplayAfterClosed);
    assert_found_out(planted, honest, &OTHERS_BYTES);
}

/// Without failover, a connection ends with its link although its group has others.
#[test]
fn a_gateway_that_does_not_fail_over_is_found_out() {
    let planted = |seed| {
        let mut swarm = Swarm::visited(seed);
        for node in &mut swarm.world.nodes {
            node.endpoint.groups_mut().pollers_mut().never_moves = true;
        }
        swarm
    };
    assert_found_out(planted, Swarm::visited, &["why?"]);
}

/// A client names a link in its Confirm that its server has left meanwhile. A server that forgets
/// such a link resets the connection, although the group has others.
#[test]
fn a_gateway_that_forgets_links_is_found_out() {
    for honest in [Swarm::rough, Swarm::visited] {
        let planted = |seed| honest(seed).planted(Planted::ForgetsLinks);
        assert_found_out(planted, honest, &["why?"]);
    }
}

/// A gateway that misses bytes after failover, although its NIC lost none, has lost them itself.
#[test]
fn a_gateway_that_invents_losses_is_found_out() {
    let planted = |seed| {
        let swarm = Swarm::visited(seed);
        swarm.world.network.tap(|_, messages| {
            for message in messages.iter_mut().filter(|message| is_cdc(message)) {
                let cdc = Cdc::decode(message).expect("we make no nonsense");
                if cdc.failover_validation {
                    *message = Cdc { sequence: cdc.sequence.wrapping_add(1_000), ..cdc }.encode();
                }
            }
        });
        swarm
    };
    assert_found_out(planted, Swarm::visited, &["why?"]);
}

/// An abort of what the control thread took for SMC-R is no excuse for a connection that is TCP.
#[test]
fn a_gateway_that_aborts_tcp_is_found_out() {
    let planted = |seed| Swarm::rough(seed).planted(Planted::AbortsTcp);
    assert_found_out(planted, Swarm::rough, &["why?"]);
}

/// An application that has read everything closes: the other side must get all that it wrote.
#[test]
fn a_gateway_that_cuts_off_who_has_closed_is_found_out() {
    let planted = |seed| Swarm::rough(seed).planted(Planted::CutsOff);
    assert_found_out(planted, Swarm::rough, &["why?"]);
}

/// RDMA passes IPsec by, so bytes that a policy protects would leave in the clear.
#[test]
fn a_gateway_that_does_not_look_for_policies_is_found_out() {
    let planted = |seed| Swarm::rough(seed).planted(Planted::SeesNoPolicies);
    assert_found_out(planted, Swarm::rough, &["IPsec protects it, and yet"]);
}

/// IPsec is no excuse for staying TCP where no policy is.
#[test]
fn a_gateway_that_invents_policies_is_found_out() {
    let planted = |seed| Swarm::rough(seed).planted(Planted::InventsPolicies);
    assert_found_out(planted, Swarm::rough, &["nobody's IPsec protects it"]);
}

/// Without the flags P and U, an interrupt is a byte among others.
#[test]
fn a_gateway_that_forgets_what_is_urgent_is_found_out() {
    let planted = |seed| {
        let swarm = Swarm::rough(seed);
        swarm.world.network.tap(|_, messages| {
            for message in messages.iter_mut().filter(|message| is_cdc(message)) {
                let cdc = Cdc::decode(message).expect("we make no nonsense");
                *message = Cdc { urgent_pending: false, urgent_present: false, ..cdc }.encode();
            }
        });
        swarm
    };
    assert_found_out(planted, Swarm::rough, &["were urgent"]);
}

/// Panics unless the judge says one of these of a swarm with this fault, under a seed that passes
/// without it.
fn assert_found_out(
    planted: impl Fn(u64) -> Swarm,
    honest: impl Fn(u64) -> Swarm,
    complaints: &[&str],
) {
    for seed in 0..SEEDS_MAX {
        let planted = catch_unwind(AssertUnwindSafe(|| planted(seed).run()));
        let Err(panic) = planted else { continue };
        let words = words_of(&*panic);
        println!("found out by seed {seed}: {words}");
        let passes = catch_unwind(AssertUnwindSafe(|| honest(seed).run())).is_ok();
        assert!(passes, "seed {seed} fails without the fault");
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

    /// Two gateways that have few elements and several links, with much trouble of one kind.
    fn of_kind(seed: u64, kind: Kind) -> Self {
        let odds = Odds { straggle: Chance::NEVER, ..Odds::MALICIOUS };
        let adjust = |sizes: &mut Sizes| (sizes.elements, sizes.rnics) = (3, sizes.rnics.max(2));
        let intruder = [address_of(INTRUDER); 2];
        let mut swarm = Self::sized(seed, odds, Chance::percent(15), intruder, adjust);
        swarm.world.slow = Duration::from_micros(100);
        swarm.kind = kind;
        swarm
    }

    fn planted(mut self, fault: Planted) -> Self {
        self.world.planted = Some(fault);
        self
    }

    fn with(self, fault: Fault) -> Self {
        hasty::plant(&self.world.network, fault, &self.world.tokens);
        self
    }

    /// A connection on which both sides send much is aborted, and somebody else connects.
    pub(super) fn abort_busy(&mut self) {
        let (number, side) = (self.dice.index(self.world.calls.len()), self.dice.index(2));
        let call = &mut self.world.calls[number];
        if call.sides[side].connection.is_none() {
            return;
        }
        for side in [CLIENT, SERVER] {
            let application = call.application(side).expect("there is no other host");
            if !application.is_gone() && !application.will_finish() {
                application.wake();
                application.write(100 * KIB);
            }
        }
        for _ in 0..self.dice.below(8) {
            self.world.step();
            self.world.pass_time(self.world.now + Duration::from_millis(1));
        }
        self.world.abort(number, side);
        self.connect();
    }

    /// One side of a connection says its last. That arrives and is answered, but before it is
    /// acknowledged the path fails; meanwhile somebody else connects.
    pub(super) fn end_late(&mut self) {
        let number = self.dice.index(self.world.calls.len());
        let (late, len) = (self.dice.index(2), 1 + self.dice.index(2 * KIB));
        let call = &mut self.world.calls[number];
        let (host, id) = (call.hosts[late], call.sides[late].connection);
        if !call.sides.iter().all(|side| matches!(side.way, Way::Smc)) {
            return;
        }
        for side in [CLIENT, SERVER] {
            let application = call.application(side).expect("there is no other host");
            if application.is_gone() || application.will_finish() {
                return;
            }
            application.wake();
        }
        call.application(1 - late).expect("it is honest").finish();
        self.world.run_for(Duration::from_millis(100));
        let last = self.world.calls[number].application(late).expect("it is honest");
        last.write(len);
        last.finish();
        // Bytes, then their end.
        for _ in 0..4 {
            self.world.programs();
            self.world.nodes[host].turn_pollers(self.world.now);
        }
        let long = Duration::from_millis(50);
        self.world.network.change_odds(Odds { latency: long..=long, ..CAREFUL });
        self.world.now = self.world.now + Duration::from_millis(1);
        self.world.nodes[1 - host].turn_pollers(self.world.now);
        self.world.network.change_odds(CAREFUL);
        let millisecond = Duration::from_millis(1);
        for _ in 0..40 {
            self.world.programs();
            self.world.nodes[1 - host].turn_pollers(self.world.now);
            self.world.control(1 - host);
            self.world.pass_time(self.world.now + millisecond);
        }
        self.connect();
        for _ in 0..60 {
            self.world.carry();
            for host in 0..2 {
                self.world.control(host);
            }
            self.world.pass_time(self.world.now + millisecond / 10);
        }
        let groups = self.world.nodes[host].endpoint.groups();
        let Some(link) = id.and_then(|id| groups.member(id)).map(|member| member.link) else {
            return;
        };
        let mut links = groups.iter().flat_map(|(_, group)| &group.links);
        let qpn = links.find(|one| one.id == link).map(|link| link.ours.qpn);
        drop(links);
        if let Some(qpn) = qpn {
            self.world.network.break_qp(qpn);
            self.world.note_failed_links();
        }
    }
}

impl World {
    /// A Confirm is about to arrive: if its server has given up the link that it names, it names
    /// one that nobody knows.
    pub(super) fn forget_links(&mut self, number: usize) {
        let call = &mut self.calls[number];
        let Some(server) = self.nodes.get(call.hosts[SERVER]) else { return };
        let is_forgotten = |offer: &Offer| !offer.first_contact && !server.knows_link(offer.qpn);
        let astray = |offer: Offer| Offer { qpn: Qpn(offer.qpn.0 ^ 1 << 23), ..offer };
        call.lanes[CLIENT].tap(self.now, |bytes| {
            let mut framer = Framer::new();
            // More bytes than a message can have are not a Confirm.
            if framer.feed(bytes) < bytes.len() {
                return;
            }
            let frame = match framer.next_frame() {
                Ok(Some(Frame::Confirm(offer))) if is_forgotten(&offer) => {
                    Frame::Confirm(astray(offer))
                }
                Ok(Some(Frame::ConfirmV2(confirm))) if is_forgotten(&confirm.offer) => {
                    Frame::ConfirmV2(OfferV2 { offer: astray(confirm.offer), ..confirm })
                }
                Ok(_) | Err(_) => return,
            };
            *bytes = frame.encode().as_bytes().to_vec();
        });
    }

    /// A gateway aborts a connection, which is no trouble that anybody made.
    pub(super) fn cut_off(&mut self, number: usize, side: usize) {
        let call = &self.calls[number];
        if let Some(connection) = call.sides[side].connection {
            self.nodes[call.hosts[side]].endpoint.groups_mut().abort(connection);
        }
    }
}

/// What is said of a connection that got bytes of another.
const OTHERS_BYTES: [&str; 2] = ["is not zero", "is not what was sent"];
/// Seeds within which each fault must be found.
const SEEDS_MAX: u64 = 2_000;
