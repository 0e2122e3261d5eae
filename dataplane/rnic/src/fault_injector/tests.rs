//! The injector over the simulator: it injects faults, but only those that the contract allows.

use super::*;
use crate::sim::{self, Network};
use crate::{Opening as _, Port, Rnic as _, Tag};
use smcr_proto::{Gid, MacAddress, Mtu};

type Injected = FaultInjector<sim::Fabric>;

/// Two fabrics with a queue pair between them. Faults are injected at the first.
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

/// The completions that one end has reported.
#[derive(Default)]
struct Reported {
    done: u64,
    flushed: u64,
    received: u64,
    broke: bool,
}

impl Reported {
    fn record(&mut self, seed: u64, out: &mut Vec<Completion>) {
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

/// Whatever the injector does, all work requests complete in order, and messages that completed as
/// done were received. Otherwise bugs of the injector would look like bugs of the engine.
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
        let mut reported = [Reported::default(), Reported::default()];
        let mut posted = [0; 2];
        let mut now = Instant::default();
        let mut out = Vec::with_capacity(8);
        let mut turns = 0;
        while turns < 60 || (0..2).any(|n| reported[n].done + reported[n].flushed < posted[n]) {
            for (n, (fabric, qp)) in ends.iter_mut().enumerate() {
                fabric.poll(now, &mut out);
                reported[n].record(seed, &mut out);
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
        breaks += u32::from(reported[0].broke);
        assert!(
            reported[1].received >= reported[0].done,
            "seed {seed}: the peer's end did not break"
        );
        let kept = reported[0].received >= reported[1].done;
        assert!(kept || seed % 2 == 1, "seed {seed}: done but not received");
        lost += u32::from(!kept);
        assert!(
            reported[1].received <= posted[0] && reported[0].received <= posted[1],
            "seed {seed}"
        );
    }
    assert!((50..200).contains(&breaks), "{breaks} of 200 seeds broke something");
    assert!(lost > 5, "{lost} of 100 seeds lost messages that had completed as done");
}

#[test]
fn an_idle_queue_pair_breaks_too_and_flushes_later_work_requests() {
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
            Completion::Broke { cause: QpError::RetriesExceeded, .. },
            Completion::Sent { tag: Tag(9), status: Status::Flushed, .. }
        ]
    ));
}

/// A poller must not go to sleep while the injector holds completions back.
#[test]
fn completions_held_back_keep_the_poller_awake() {
    let odds = Odds { hold_back_on_poll: Chance::ALWAYS, ..Odds::default() };
    let (network, [(mut a, qp), (mut b, _)]) = pair(1, odds);
    a.post(qp, &mut vec![Work::Send { message: [0; 44], tag: Tag(0) }]);
    a.transmit(Instant::default());
    let mut out = Vec::with_capacity(8);
    let mut now = Instant::default();
    while out.is_empty() {
        now = network.next_event().expect("a message is in flight");
        b.poll(now, &mut out);
    }
    let now = Instant(now.0 + 1_000_000);
    out.clear();
    a.poll(now, &mut out);
    assert!(out.is_empty());
    assert_eq!(a.prepare_sleep(now), Some(now));
}
