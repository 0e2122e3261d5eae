//! The simulator's own promises, which go beyond the contract of every backend.

use std::time::Duration;

use super::*;
use crate::dice::Chance;
use crate::{ConnectError, Fabric as _, Opening as _, Rnic as _, Status, Tag};
use smcr_memory::SendPool;
use smcr_proto::{MacAddress, Mtu};

struct Pair {
    network: Network,
    rnics: [Rnic; 2],
    fabrics: [Fabric; 2],
    qps: [QpId; 2],
    now: Instant,
}

fn port(n: u8) -> Port {
    let mac = MacAddress([2, 0, 0, 0, 0, n]);
    Port { gid: Gid::from_ipv4([10, 0, 0, n]), mac, mtu: Mtu::B1024 }
}

impl Pair {
    fn connected(seed: u64, odds: Odds) -> Self {
        let network = Network::new(seed, odds);
        let [(mut a, mut fabric_a), (mut b, mut fabric_b)] = [1, 2].map(|n| network.rnic(port(n)));
        let (domain_a, domain_b) = (a.open_domain().unwrap(), b.open_domain().unwrap());
        let (first, second) = (a.open(domain_a).unwrap(), b.open(domain_b).unwrap());
        let (at_a, at_b) = (first.address(), second.address());
        let now = Instant::default();
        let qp_a = fabric_a.adopt(now, first.connect(at_b).unwrap());
        let qp_b = fabric_b.adopt(now, second.connect(at_a).unwrap());
        let (rnics, fabrics) = ([a, b], [fabric_a, fabric_b]);
        Self { network, rnics, fabrics, qps: [qp_a, qp_b], now }
    }

    fn send(&mut self, side: usize, tag: u64) {
        let mut work = vec![Work::Send { message: [0; 44], tag: Tag(tag) }];
        self.fabrics[side].post(self.qps[side], &mut work);
        self.fabrics[side].transmit(self.now);
    }

    /// Runs until the network is quiet, and returns the completions of each side, in words.
    fn run_until_quiet(&mut self) -> [Vec<String>; 2] {
        let mut heard = [Vec::new(), Vec::new()];
        while let Some(at) = self.network.next_event() {
            self.now = self.now.max(at);
            for (fabric, heard) in self.fabrics.iter_mut().zip(&mut heard) {
                let mut out = Vec::with_capacity(16);
                fabric.poll(self.now, &mut out);
                heard.extend(out.iter().map(|completion| match completion {
                    Completion::Sent { status: Status::Done, .. } => "sent".to_owned(),
                    Completion::Sent { status: Status::Flushed, .. } => "flushed".to_owned(),
                    Completion::Received { .. } | Completion::ReceivedLong { .. } => {
                        "received".to_owned()
                    }
                    Completion::Broke { cause, .. } => format!("{cause:?}"),
                    Completion::Wrote { .. } => "wrote".to_owned(),
                }));
            }
        }
        heard
    }
}

/// A seed that failed must fail again, or nobody can find the bug.
/// A program that only heard that a port is down would never use it again.
#[test]
fn a_nic_that_says_that_its_port_is_down_says_that_it_is_back() {
    let odds = Odds { port_events: Chance::percent(50), ..Odds::CALM };
    let network = Network::new(1, odds);
    let (mut rnic, _fabric) = network.rnic(port(1));
    let gid = rnic.port().gid;
    let mut said = 0;
    for _ in 0..100 {
        network.port_down(gid);
        network.port_down(gid);
        network.port_up(gid);
        let events: Vec<_> = std::iter::from_fn(|| rnic.event()).collect();
        assert!(events.is_empty() || events == [Event::Down, Event::Up], "{events:?}");
        said += events.len();
    }
    assert!((60..200).contains(&said), "{said}");
}

/// Hardware refuses to read memory that it has no key for, or reads what is not meant: an engine
/// that posts a lease of another poller's pool must not pass here.
#[test]
#[should_panic(expected = "a lease of memory that the NIC cannot read")]
fn a_lease_of_another_pool_is_our_bug() {
    let network = Network::new(1, Odds::CALM);
    let [(mut rnic, mut fabric), (mut far, _far_fabric)] = [1, 2].map(|n| network.rnic(port(n)));
    let [own, foreign] = [(); 2].map(|()| Region::new(4096).unwrap());
    rnic.send_from(&own).unwrap();
    let (domain, far_domain) = (rnic.open_domain().unwrap(), far.open_domain().unwrap());
    let (near, far) = (rnic.open(domain).unwrap(), far.open(far_domain).unwrap());
    let qp = fabric.adopt(Instant::default(), near.connect(far.address()).unwrap());
    for memory in [own, foreign] {
        let lease = SendPool::new(memory, 4096).fill(8, |_| Ok::<_, ()>(8));
        let lease = lease.unwrap().unwrap().unwrap();
        let write = Work::Write { lease, rkey: Rkey(1), address: 0, tag: Tag(0) };
        fabric.post(qp, &mut vec![write]);
    }
}

#[test]
fn the_same_seed_and_calls_give_the_same_history() {
    let history = |seed| {
        let mut pair = Pair::connected(seed, Odds::MALICIOUS);
        (0..20).for_each(|tag| pair.send(0, tag));
        let heard = pair.run_until_quiet();
        (heard, pair.now)
    };
    assert_eq!(history(1), history(1));
    assert_ne!(history(1), history(2));
}

#[test]
fn a_port_that_goes_down_breaks_its_own_end_now_and_the_other_when_it_sends() {
    let mut pair = Pair::connected(1, Odds::CALM);
    pair.network.port_down(port(1).gid);
    assert_eq!(pair.run_until_quiet(), [vec!["PortDown"], vec![]]);
    pair.send(1, 1);
    assert_eq!(pair.run_until_quiet(), [vec![], vec!["RetriesExceeded", "flushed"]]);
    assert!(pair.now.since(Instant::default()) >= Odds::CALM.retry_timeout);
}

#[test]
fn nothing_connects_from_a_port_that_is_down_until_it_is_up_again() {
    let mut pair = Pair::connected(1, Odds::CALM);
    let domain = pair.rnics[0].open_domain().unwrap();
    pair.network.port_down(port(1).gid);
    let opening = pair.rnics[0].open(domain).unwrap();
    let peer = opening.address();
    assert_eq!(opening.connect(peer).err(), Some(ConnectError::Unreachable));
    pair.network.port_up(port(1).gid);
    assert!(pair.rnics[0].open(domain).unwrap().connect(peer).is_ok());
}

#[test]
fn a_pair_broken_on_request_breaks_at_both_ends_and_is_not_listed_any_more() {
    let mut pair = Pair::connected(1, Odds::CALM);
    let (_, qpn) = pair.network.queue_pairs()[0];
    assert_eq!(pair.network.queue_pairs().len(), 2);
    pair.send(0, 1);
    pair.network.break_qp(qpn);
    let heard = pair.run_until_quiet();
    assert_eq!(heard, [vec!["RetriesExceeded", "flushed"], vec!["RetriesExceeded"]]);
    assert!(pair.network.queue_pairs().is_empty());
}

/// Tests must be able to run a NIC out of memory during a rendezvous, which must end in a Decline.
#[test]
fn a_nic_may_run_out_of_everything() {
    let mut pair = Pair::connected(1, Odds::CALM);
    let domain = pair.rnics[0].open_domain().unwrap();
    pair.network.change_odds(Odds { exhausted: Chance::ALWAYS, ..Odds::CALM });
    assert!(pair.rnics[0].open_domain().is_err());
    assert!(pair.rnics[0].open(domain).is_err());
    assert!(pair.rnics[0].register(domain, &Region::new(4096).unwrap()).is_err());
}

/// The case that section 4.6.1 guards against: the sender's NIC reported success, but the last
/// messages are lost. A failover that trusted the completions would leave a hole in a file.
#[test]
fn an_end_that_breaks_may_lose_the_last_acknowledged_messages_and_no_others() {
    let odds = Odds { lose_on_break: Chance::percent(50), ..Odds::CALM };
    let mut heard = [0; 4];
    for seed in 0..100 {
        let mut pair = Pair::connected(seed, odds.clone());
        (0..3).for_each(|tag| pair.send(0, tag));
        let mut out = Vec::with_capacity(16);
        while out.len() < 3 {
            pair.now = pair.now + Duration::from_micros(1);
            pair.fabrics[0].poll(pair.now, &mut out);
        }
        let done = |one: &Completion| matches!(one, Completion::Sent { status: Status::Done, .. });
        assert!(out.iter().all(done));
        let [far, near] = [0, 1].map(|side: usize| pair.fabrics[side].qpn(pair.qps[side]));
        pair.network.break_qp(near);
        let [_, reported] = pair.run_until_quiet();
        let received = reported.len() - 1;
        let lossy: &[_] = if received < 3 { &[[near, far]] } else { &[] };
        assert_eq!(pair.network.lossy_pairs(), lossy);
        assert!(pair.network.lossy_pairs().is_empty(), "each loss is told once");
        assert_eq!(reported[received], "RetriesExceeded");
        assert_eq!(pair.network.messages_lost(), 3 - received as u64);
        heard[received] += 1;
    }
    assert!(heard.iter().all(|count| *count > 0), "{heard:?}");
}

/// Tests need to forge, alter and drop messages, to see that the engine detects it.
#[test]
fn a_tap_sees_every_message_and_may_replace_it() {
    let mut pair = Pair::connected(1, Odds::CALM);
    let target = pair.fabrics[1].qpn(pair.qps[1]);
    pair.network.tap(move |parcel, messages| {
        let ports = (parcel.source, parcel.target, parcel.qpn);
        assert_eq!(ports, (port(1).gid, port(2).gid, target));
        match messages[0][0] {
            0 => messages.clear(),
            _ => messages.push([9; 44]),
        }
    });
    for first in [0, 1] {
        let mut work = vec![Work::Send { message: [first; 44], tag: Tag(0) }];
        pair.fabrics[0].post(pair.qps[0], &mut work);
    }
    pair.fabrics[0].transmit(pair.now);
    let mut received = Vec::new();
    while let Some(at) = pair.network.next_event() {
        pair.now = pair.now.max(at);
        let mut out = Vec::with_capacity(16);
        pair.fabrics[1].poll(pair.now, &mut out);
        received.extend(out.into_iter().filter_map(|completion| match completion {
            Completion::Received { message, .. } => Some(message[0]),
            Completion::Sent { .. }
            | Completion::ReceivedLong { .. }
            | Completion::Wrote { .. }
            | Completion::Broke { .. } => None,
        }));
        pair.fabrics[0].poll(pair.now, &mut Vec::with_capacity(16));
    }
    assert_eq!(received, [1, 9]);
}

/// Tests must see objects that a gateway forgot to close, or a leak of one queue pair per failover
/// would only show after weeks.
#[test]
fn objects_open_at_a_port_are_counted() {
    let mut pair = Pair::connected(1, Odds::CALM);
    let domain = pair.rnics[0].open_domain().unwrap();
    let region = Region::new(4096).unwrap();
    let registration = pair.rnics[0].register(domain, &region).unwrap();
    let open = |pair: &Pair| pair.network.open_at(port(1).gid);
    assert_eq!(open(&pair), Open { domains: 2, registrations: 1, queue_pairs: 1 });
    pair.rnics[0].deregister(registration);
    pair.rnics[0].close_domain(domain);
    pair.fabrics[0].release(pair.now, pair.qps[0]);
    pair.run_until_quiet();
    pair.fabrics[0].poll(pair.now, &mut Vec::with_capacity(4));
    assert_eq!(open(&pair), Open { domains: 1, ..Open::default() });
}

/// When a peer's process dies, its queue pairs are gone, and ours exceed their retries.
#[test]
fn a_fabric_that_is_dropped_takes_its_queue_pairs_along() {
    let Pair { network, rnics: _, fabrics: [mut a, b], qps: [qp, _], now } =
        Pair::connected(1, Odds::CALM);
    drop(b);
    a.post(qp, &mut vec![Work::Send { message: [0; 44], tag: Tag(1) }]);
    a.transmit(now);
    let mut out = Vec::with_capacity(4);
    while let Some(at) = network.next_event() {
        a.poll(at, &mut out);
    }
    assert!(matches!(out[0], Completion::Broke { cause: QpError::RetriesExceeded, .. }), "{out:?}");
    assert!(matches!(out[1], Completion::Sent { status: Status::Flushed, .. }), "{out:?}");
}

#[test]
#[should_panic(expected = "regions registered in Domain(1)")]
fn a_domain_is_closed_when_it_is_empty() {
    let mut pair = Pair::connected(1, Odds::CALM);
    let registration = pair.rnics[0].register(Domain(1), &Region::new(4096).unwrap()).unwrap();
    pair.rnics[0].close_domain(registration.domain);
}
