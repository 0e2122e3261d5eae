//! The injector over the simulator: trouble, but never more than the contract allows.

use super::*;
use crate::sim::{self, Network};
use crate::{Opening as _, Port, Rnic as _, Tag};
use smcr_proto::{Gid, MacAddress, Mtu};

type Injected = FaultInjector<sim::Fabric>;

/// Two fabrics with a queue pair between them; the first has trouble.
fn pair(seed: u64, odds: Odds) -> (Network, [(Injected, QpId); 2]) {
    let network = Network::new(seed, sim::Odds::MALICIOUS);
    let ends = [1, 2].map(|n| {
        let gid = Gid::from_ipv4([10, 0, 0, n]);
        let port = Port { gid, mac: MacAddress([2, 0, 0, 0, 0, n]), mtu: Mtu::B1024 };
        let (mut rnic, fabric) = network.rnic(port);
        let domain = rnic.open_domain().unwrap();
        (rnic.open(domain).unwrap(), fabric)
    });
    let [(first, a), (second, b)] = ends;
    let (at_a, at_b) = (first.address(), second.address());
    let (mut a, mut b) = (Injected::new(a, seed, odds), Injected::new(b, seed, Odds::default()));
    let qp_a = a.adopt(Instant::default(), first.connect(at_b).unwrap());
    let qp_b = b.adopt(Instant::default(), second.connect(at_a).unwrap());
    (network, [(a, qp_a), (b, qp_b)])
}

/// What one end has told.
#[derive(Default)]
struct Told {
    done: u64,
    flushed: u64,
    received: u64,
    broke: bool,
}

impl Told {
    fn hear(&mut self, seed: u64, out: &mut Vec<Completion>) {
        for completion in out.drain(..) {
            match completion {
                Completion::Sent { tag, status, .. } => {
                    assert_eq!(tag.0, self.done + self.flushed, "seed {seed}: in order");
                    let done = status == Status::Done;
                    assert!(if done { !self.broke } else { self.broke }, "seed {seed}");
                    if done { self.done += 1 } else { self.flushed += 1 }
                }
                Completion::Received { .. } | Completion::ReceivedLong { .. } => {
                    assert!(!self.broke, "seed {seed}: received after Broke");
                    self.received += 1;
                }
                Completion::Broke { .. } => {
                    assert!(!self.broke, "seed {seed}: broke twice");
                    self.broke = true;
                }
                Completion::Wrote { .. } => unreachable!("nothing is written here"),
            }
        }
    }
}

/// Whatever the injector does: all that is posted ends in order, and what was done was received.
/// Otherwise the engine would be blamed for lies of its test tool.
#[test]
fn a_broken_queue_pair_keeps_the_contract() {
    let mut breaks = 0;
    let mut lost = 0;
    for seed in 0..200 {
        let loses = if seed % 2 == 0 { Chance::NEVER } else { Chance::ALWAYS };
        let odds = Odds {
            break_on_post: Chance::percent(2),
            hold_back_on_poll: Chance::percent(30),
            lose_on_break: loses,
        };
        let (network, mut ends) = pair(seed, odds);
        let mut told = [Told::default(), Told::default()];
        let mut posted = [0; 2];
        let mut now = Instant::default();
        let mut out = Vec::with_capacity(8);
        let mut turns = 0;
        while turns < 60 || (0..2).any(|n| told[n].done + told[n].flushed < posted[n]) {
            for (n, (fabric, qp)) in ends.iter_mut().enumerate() {
                fabric.poll(now, &mut out);
                told[n].hear(seed, &mut out);
                if turns < 60 && fabric.room(*qp) >= 3 {
                    let tags = posted[n]..posted[n] + 3;
                    let message = [0; 44];
                    let work = tags.map(|tag| Work::Send { message, tag: Tag(tag) });
                    fabric.post(*qp, &mut work.collect());
                    posted[n] += 3;
                }
                fabric.transmit(now);
            }
            now = network.next_event().map_or(now, |at| now.max(at));
            turns += 1;
            assert!(turns < 1_000_000, "seed {seed}: stalled");
        }
        breaks += u32::from(told[0].broke);
        assert!(told[1].received >= told[0].done, "seed {seed}: the peer's end did not break");
        let kept = told[0].received >= told[1].done;
        assert!(kept || seed % 2 == 1, "seed {seed}: done but not received");
        lost += u32::from(!kept);
        assert!(told[1].received <= posted[0] && told[0].received <= posted[1], "seed {seed}");
    }
    assert!((50..200).contains(&breaks), "{breaks} of 200 seeds broke something");
    assert!(lost > 5, "{lost} of 100 seeds lost what their peer believed to be delivered");
}

#[test]
fn a_queue_pair_that_is_idle_breaks_too_and_answers_what_is_posted_later() {
    let (_, [(mut fabric, qp), _]) = pair(1, Odds::default());
    let now = Instant::default();
    fabric.break_qp(qp);
    fabric.transmit(now);
    fabric.post(qp, &mut vec![Work::Send { message: [0; 44], tag: Tag(9) }]);
    let mut out = Vec::with_capacity(8);
    fabric.poll(now, &mut out);
    assert!(matches!(
        out[..],
        [
            Completion::Broke { cause: Cause::RetriesExceeded, .. },
            Completion::Sent { tag: Tag(9), status: Status::Flushed, .. }
        ]
    ));
}

/// A poller that sleeps must not miss what was held back.
#[test]
fn what_was_held_back_is_work_already() {
    let odds = Odds { hold_back_on_poll: Chance::ALWAYS, ..Odds::default() };
    let (network, [(mut a, qp), (mut b, _)]) = pair(1, odds);
    a.post(qp, &mut vec![Work::Send { message: [0; 44], tag: Tag(0) }]);
    a.transmit(Instant::default());
    let mut out = Vec::with_capacity(8);
    let mut now = Instant::default();
    while out.is_empty() {
        now = network.next_event().expect("a message is on its way");
        b.poll(now, &mut out);
    }
    let now = Instant(now.0 + 1_000_000);
    out.clear();
    a.poll(now, &mut out);
    assert!(out.is_empty());
    assert_eq!(a.prepare_sleep(now), Some(now));
}
