//! The promises of [`Fabric`], as tests of any backend. Numbers are those of its contract.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use smcr_proto::Rkey;
use smcr_rnic::{Domain, Fabric, LONG_MESSAGE_MAX, MESSAGE_LEN, Messages, QpError, QpId, Rnic};

use crate::flow::{self, Flow, WINDOW_BYTES};
use crate::rig::{Harness, Rig, Window};

/// (1, 2, 3, 6) One side must find whatever the other writes and announces: all, once, in order.
pub(crate) fn bytes_are_there_when_their_message_is<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let mut flows = flows(&mut rig, seed, 1);
    flow::run(&mut rig, &mut flows, 60);
    for flow in &flows {
        assert_eq!(rig.sides[1 - flow.sender].end(flow.target).received, 60);
    }
    all_is_quiet(&mut rig);
}

/// (6) Sixteen queue pairs are busy in both directions, and none may starve another for ever.
pub(crate) fn many_queue_pairs_in_both_directions<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let mut flows = flows(&mut rig, seed, 16);
    flow::run(&mut rig, &mut flows, 6);
    all_is_quiet(&mut rig);
}

/// 32 MiB each way, every byte compared.
pub(crate) fn bulk_is_not_altered<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let mut flows = flows(&mut rig, seed, 2);
    while flows.iter().any(|flow| flow.bytes < 16 << 20) {
        for flow in flows.iter_mut().filter(|flow| flow.bytes < 16 << 20) {
            while flow.push(&mut rig) {}
        }
        flow::deliver(&mut rig, &mut flows);
    }
    all_is_quiet_after_delivery(&mut rig, &mut flows);
}

/// (3) Messages without writes, at first as many as fit and then more: none may be lost or arrive
/// twice, whatever the peer's poller does meanwhile. Small connections depend on this.
pub(crate) fn a_thousand_messages_arrive_once_and_in_order<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let domains = rig.domains();
    let [source, target] = rig.connect(domains);
    let (mut sent, mut expected) = (0_u32, 0_u32);
    while expected < 1_000 {
        let room = rig.sides[0].fabric.room(source).min(1_000 - sent as usize);
        let batch = if room == 0 { 0 } else { rig.dice.index(room + 1) };
        let side = &mut rig.sides[0];
        let work = (0..batch).map(|n| side.send(numbered(sent + u32::try_from(n).unwrap())));
        let work: Vec<_> = work.collect();
        sent += u32::try_from(batch).unwrap();
        side.post(source, work);
        for (side, qp, message) in rig.turn() {
            assert_eq!((side, qp, message), (1, target, numbered(expected)));
            expected += 1;
        }
    }
    assert!(rig.settle(0).is_empty());
    assert_eq!(rig.sides[0].end(source).done, 1_000);
    all_is_quiet(&mut rig);
}

/// (1, 2, 3) Long messages of all lengths among short ones must arrive whole, once, and after the
/// writes that were posted before them. Link groups of SMC-Rv2 send their keys in long messages.
pub(crate) fn long_messages_arrive_whole_and_in_order<H: Harness>(seed: u64) {
    const COUNT: u32 = 40;
    let mut rig = Rig::<H>::new(seed);
    let domains = rig.domains();
    let [source, target] = rig.connect_for(domains, Messages::Long);
    let window = rig.window(1, domains[1], 8_192);
    let content = |number: u32, len: usize| -> Vec<u8> {
        let bytes = (0..len).map(|at| number.to_le_bytes()[0] ^ at.to_le_bytes()[0]);
        bytes.collect()
    };
    let mut expected = Vec::new();
    for number in 0..COUNT {
        let len = match number {
            0 => MESSAGE_LEN + 1,
            1 => LONG_MESSAGE_MAX,
            2 => 1024,
            _ => MESSAGE_LEN + 1 + rig.dice.index(LONG_MESSAGE_MAX - MESSAGE_LEN),
        };
        expected.push(content(number, len));
        let mark = [number.to_le_bytes()[0]; 1];
        let side = &mut rig.sides[0];
        let work = vec![
            side.write(&mark, window.rkey(), window.address(number as usize)),
            side.send_long(content(number, len)),
            side.send(numbered(number)),
        ];
        side.post(source, work);
    }
    let mut short = 0;
    while short < COUNT {
        for (side, qp, message) in rig.turn() {
            assert_eq!((side, qp, message), (1, target, numbered(short)));
            short += 1;
            // The long message before it must be here, and so must the write before that.
            assert!(rig.sides[1].long.len() >= short as usize);
            let last = short as usize - 1;
            assert_eq!(window.bytes(last, 1), [last.to_le_bytes()[0]]);
        }
    }
    let received: Vec<_> = rig.sides[1].long.drain(..).map(|(_, bytes)| bytes.to_vec()).collect();
    assert!(received == expected, "altered, lost or in another order");
    assert!(rig.settle(0).is_empty());
    all_is_quiet(&mut rig);
}

/// (4) A queue pair of SMC-Rv1 has buffers of 44 bytes: a longer message breaks it, as it does on
/// real NICs, and must break nothing else.
pub(crate) fn a_message_that_is_too_long_is_contained<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let domains = rig.domains();
    let [source, target] = rig.connect(domains);
    let side = &mut rig.sides[0];
    let work = vec![side.send_long(vec![7; MESSAGE_LEN + 1])];
    side.post(source, work);
    let broke = |rig: &mut Rig<H>, side: usize, qp| rig.sides[side].end(qp).broke;
    rig.run_until(|rig| broke(rig, 0, source).is_some() && broke(rig, 1, target).is_some());
    assert_eq!(broke(&mut rig, 0, source), Some(QpError::RemoteError));
    assert_eq!(broke(&mut rig, 1, target), Some(QpError::PeerMisbehaved));
    assert!(rig.sides[1].long.is_empty(), "nobody is told of it");
    let window = rig.window(1, domains[1], 8_192);
    let allowed = rig.connect(domains);
    write_and_announce(&mut rig, allowed, &window);
    all_is_quiet(&mut rig);
}

/// (4) A forbidden write must change no byte and break its own queue pair on both ends. Other queue
/// pairs must not notice, and a new queue pair must work.
pub(crate) fn forbidden_writes_are_contained<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let domains = rig.domains();
    let mut neighbours = neighbours(&mut rig, seed, domains);
    let elsewhere = rig.sides[1].rnic.open_domain().unwrap();
    let window = rig.window(1, domains[1], 8_192);
    let foreign = rig.window(1, elsewhere, 8_192);
    let closed = rig.window(1, domains[1], 8_192);
    let memory = [window.region.clone(), foreign.region.clone(), closed.region.clone()];
    let closed_at = closed.address(0);
    let closed_key = closed.rkey();
    rig.sides[1].rnic.deregister(closed.registration);

    let end = window.address(8_192);
    let wrong_key = Rkey(window.rkey().0 ^ 0x00ff_ff00);
    assert_ne!(wrong_key, foreign.rkey());
    let forbidden = [
        ("wrong key", wrong_key, window.address(0), 100),
        ("key of another domain", foreign.rkey(), foreign.address(0), 100),
        ("deregistered key", closed_key, closed_at, 100),
        ("starts before the region", window.rkey(), window.address(0) - 1, 100),
        ("ends one byte after the region", window.rkey(), end - 99, 100),
        ("a long one ends after the region", window.rkey(), window.address(1), 8_192),
        ("starts at the end", window.rkey(), end, 1),
        ("wraps around the address space", window.rkey(), u64::MAX - 49, 100),
        ("address zero", window.rkey(), 0, 100),
    ];
    for (what, rkey, address, len) in forbidden {
        refused(&mut rig, domains, &mut neighbours, what, (rkey, address, len));
        // If a write is carried in parts, those before the refused one are allowed writes.
        let allowed = if H::CUTS_WRITES && len > 256 { 1..8_192 } else { 0..0 };
        for region in &memory {
            let mut bytes = vec![1; 8_192];
            region.copy_out(0, &mut bytes);
            if region.address() == memory[0].address() {
                bytes[allowed.clone()].fill(0);
            }
            assert!(bytes.iter().all(|byte| *byte == 0), "{what}: bytes were changed");
        }
        memory[0].zero(0, 8_192);
    }
    let target = neighbours.iter().map(Flow::sent).max().expect("neighbours") + 10;
    flow::run(&mut rig, &mut neighbours, target);
    let allowed = rig.connect(domains);
    write_and_announce(&mut rig, allowed, &window);
    all_is_quiet(&mut rig);
}

/// One forbidden write between allowed ones, while other queue pairs are busy.
fn refused<H: Harness>(
    rig: &mut Rig<H>,
    domains: [Domain; 2],
    neighbours: &mut [Flow],
    what: &str,
    (rkey, address, len): (Rkey, u64, usize),
) {
    let [source, target] = rig.connect(domains);
    let side = &mut rig.sides[0];
    let before = side.send(numbered(7));
    let write = side.write(&vec![0xee; len], rkey, address);
    let after = side.send(numbered(8));
    side.post(source, vec![before, write, after]);
    let mut received = Vec::new();
    while rig.sides[0].end(source).outstanding() > 0 || rig.sides[1].end(target).broke.is_none() {
        for flow in neighbours.iter_mut() {
            flow.push(rig);
        }
        for (side, qp, message) in rig.turn() {
            if (side, qp) == (1, target) {
                received.push(message);
            } else {
                let flow = neighbours.iter_mut().find(|flow| flow.target == qp);
                flow.expect("a message of some flow").pull(message);
            }
        }
    }
    let lost = H::LOSES_ON_BREAK && received.is_empty();
    let before = received == [numbered(7)] || lost;
    assert!(before, "{what}: what came before is received, nothing after: {received:?}");
    assert!(rig.sides[0].end(source).flushed >= 2, "{what}: refused, so not done");
    assert_eq!(rig.sides[0].end(source).broke, Some(QpError::RemoteError), "{what}");
    assert_eq!(rig.sides[1].end(target).broke, Some(QpError::PeerMisbehaved), "{what}");
}

/// (4) Writes up to the edges are allowed: whole region, first byte, last byte.
pub(crate) fn writes_up_to_the_edges_are_placed<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let domains = rig.domains();
    let [source, target] = rig.connect(domains);
    let window = rig.window(1, domains[1], 65_536);
    for (at, len, value) in [(0, 65_536, 1), (0, 1, 2), (65_535, 1, 3)] {
        let side = &mut rig.sides[0];
        let write = side.write(&vec![value; len], window.rkey(), window.address(at));
        let send = side.send(numbered(0));
        side.post(source, vec![write, send]);
        let received = rig.settle(0);
        let received = if received.is_empty() { received_next(&mut rig) } else { received };
        assert_eq!(received, [(1, target, numbered(0))]);
        assert!(window.bytes(at, len).iter().all(|byte| *byte == value));
    }
    assert_eq!(window.bytes(0, 2), [2, 1]);
    assert_eq!(window.bytes(65_534, 2), [1, 3]);
}

/// (5) A queue pair breaks under load. Whatever was posted before and after must end, flushed and
/// in order (the witness checks that), and every lease must come home, or connections would hang.
pub(crate) fn breaking_under_load_brings_everything_home<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let domains = rig.domains();
    let mut neighbours = neighbours(&mut rig, seed, domains);
    let qps = rig.connect(domains);
    let window = rig.window(1, domains[1], WINDOW_BYTES);
    let mut flow = [Flow::new(seed, 0, qps, window)];
    for _ in 0..20 {
        while flow[0].push(&mut rig) {}
        flow::deliver(&mut rig, &mut flow);
    }
    // The receiver breaks the pair by a forbidden write of its own, while ours are on their way.
    let side = &mut rig.sides[1];
    let write = side.write(&[1; 1_000], Rkey(0xdead_0000), 4_096);
    side.post(qps[1], vec![write]);
    while rig.sides[0].end(qps[0]).broke.is_none() || rig.sides[1].end(qps[1]).broke.is_none() {
        flow[0].push(&mut rig);
        flow::deliver(&mut rig, &mut flow);
    }
    for (side, qp) in [(0, qps[0]), (1, qps[1])] {
        let late = rig.sides[side].send(numbered(1));
        rig.sides[side].post(qp, vec![late]);
        assert!(rig.settle(side).is_empty(), "received on a broken queue pair");
        assert!(rig.sides[side].end(qp).flushed > 0);
    }
    flow::run(&mut rig, &mut neighbours, 10);
    all_is_quiet(&mut rig);
}

/// (5) The peer is gone silently: the queue pair must break by itself, but not too early.
pub(crate) fn a_silent_peer_is_given_up<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let domains = rig.domains();
    let qps = rig.connect(domains);
    rig.release(1, qps[1]);
    let window = rig.window(1, domains[1], 8_192);
    let limit = rig.now() + Duration::from_secs(20);
    while rig.sides[0].end(qps[0]).broke.is_none() {
        assert!(rig.now() < limit, "a released queue pair answers for ever");
        let side = &mut rig.sides[0];
        let write = side.write(&[1; 5_000], window.rkey(), window.address(0));
        let send = side.send(numbered(1));
        side.post(qps[0], vec![write, send]);
        assert!(rig.settle(0).is_empty());
    }
    let end = rig.sides[0].end(qps[0]);
    assert_eq!((end.broke, end.done % 2 + end.flushed), (Some(QpError::RetriesExceeded), 2));
    assert!(end.done == 0 || H::RELEASES_LATER, "{} requests were answered", end.done);
    all_is_quiet(&mut rig);
}

/// `fail` must end outstanding requests without waiting for a peer that cannot answer, and still
/// deliver what had arrived before. A failover that waits for retries is a pause that users notice;
/// one that loses what the peer knows to be delivered is a reset.
pub(crate) fn a_failed_queue_pair_breaks_at_once<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let domains = rig.domains();
    let qps = rig.connect(domains);
    let sends = (0..8).map(|n| rig.sides[1].send(numbered(n))).collect();
    rig.sides[1].post(qps[1], sends);
    for _ in 0..seed % 8 {
        drop(rig.turn());
    }
    let window = rig.window(1, domains[1], 8_192);
    let side = &mut rig.sides[0];
    let write = side.write(&[1; 5_000], window.rkey(), window.address(0));
    let send = side.send(numbered(9));
    side.post(qps[0], vec![write, send]);
    let before = rig.now();
    rig.fail(0, qps[0]);
    rig.fail(0, qps[0]);
    rig.settle(0);
    assert!(rig.now().since(before) < Duration::from_millis(100));
    let end = rig.sides[0].end(qps[0]);
    assert_eq!((end.broke, end.flushed), (Some(QpError::PortDown), 2));
    rig.settle(1);
    let (done, received) = (rig.sides[1].end(qps[1]).done, rig.sides[0].end(qps[0]).received);
    assert!(done <= received || H::LOSES_ON_BREAK, "done means received");
    rig.release(0, qps[0]);
    rig.release(1, qps[1]);
    all_is_quiet(&mut rig);
}

/// `release` must flush outstanding requests and bring the leases home, while other queue pairs and
/// the next one work. Connections leave a link by it.
pub(crate) fn release_flushes_and_disturbs_nobody<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let domains = rig.domains();
    let mut neighbours = neighbours(&mut rig, seed, domains);
    for round in 0..5 {
        let qps = rig.connect(domains);
        let window = rig.window(1, domains[1], WINDOW_BYTES);
        let mut flow = [Flow::new(seed + round, 0, qps, window)];
        while flow[0].push(&mut rig) {}
        for _ in 0..round * 3 {
            flow::deliver(&mut rig, &mut flow);
        }
        rig.release(0, qps[0]);
        let mut flows: Vec<&mut Flow> = flow.iter_mut().chain(&mut neighbours).collect();
        while rig.sides[0].outstanding() > 0 {
            for (side, qp, message) in rig.turn() {
                let flow = flows.iter_mut().find(|flow| flow.sender != side && flow.target == qp);
                flow.expect("a message of some flow").pull(message);
            }
        }
        assert!(
            catch_unwind(AssertUnwindSafe(|| rig.sides[0].fabric.post(qps[0], &mut vec![])))
                .is_err()
        );
        rig.release(1, qps[1]);
    }
    flow::run(&mut rig, &mut neighbours, 10);
    all_is_quiet(&mut rig);
}

/// `room` is a promise: that many requests can be posted at once, one more is our bug, and all room
/// comes back.
pub(crate) fn room_is_what_can_be_posted<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let domains = rig.domains();
    let [source, target] = rig.connect(domains);
    let room = rig.sides[0].fabric.room(source);
    assert!(room >= 384, "the engine budgets 384 requests, not {room}");
    let side = &mut rig.sides[0];
    let work: Vec<_> = (0..room).map(|n| side.send(numbered(n.try_into().unwrap()))).collect();
    side.post(source, work);
    assert_eq!(side.fabric.room(source), 0);
    let mut one_more = vec![side.send(numbered(0))];
    let overflow = catch_unwind(AssertUnwindSafe(|| side.fabric.post(source, &mut one_more)));
    assert!(overflow.is_err(), "more than fits was accepted");

    let received = rig.run_until(|rig| {
        rig.sides[1].end(target).received == room as u64 && rig.sides[0].outstanding() == 0
    });
    let expected = (0..room).map(|n| (1, target, numbered(n.try_into().unwrap())));
    assert!(received.into_iter().eq(expected));
    assert_eq!(rig.sides[0].fabric.room(source), room);
    all_is_quiet(&mut rig);
}

/// One end may be adopted and post before the poller of the other end knows its queue pair: the
/// first message of a link (CONFIRM LINK) races with the adoption at the peer.
pub(crate) fn the_first_message_waits_for_the_peer<H: Harness>(seed: u64) {
    use smcr_rnic::Opening;
    let mut rig = Rig::<H>::new(seed);
    let domains = rig.domains();
    let first = rig.sides[0].rnic.open(domains[0]).unwrap();
    let second = rig.sides[1].rnic.open(domains[1]).unwrap();
    let (address_a, address_b) = (first.address(), second.address());
    let first = first.connect(address_b).unwrap();
    let now = rig.now();
    let source = rig.sides[0].adopt(now, first);
    let send = rig.sides[0].send(numbered(1));
    rig.sides[0].post(source, vec![send]);
    assert!(rig.run_for(Duration::from_millis(50)).is_empty());
    let second = second.connect(address_a).unwrap();
    let now = rig.now();
    let target = rig.sides[1].adopt(now, second);
    let received = rig
        .run_until(|rig| rig.sides[1].end(target).received == 1 && rig.sides[0].outstanding() == 0);
    assert_eq!(received, [(1, target, numbered(1))]);
    all_is_quiet(&mut rig);
}

/// Hundreds of queue pairs, one after another: numbers must not be reused, and nothing may be left
/// behind that disturbs the next one.
pub(crate) fn queue_pairs_come_and_go<H: Harness>(seed: u64) {
    let mut rig = Rig::<H>::new(seed);
    let domains = rig.domains();
    for _ in 0..100 {
        let qps = rig.connect(domains);
        let window = rig.window(1, domains[1], 8_192);
        write_and_announce(&mut rig, qps, &window);
        rig.release(0, qps[0]);
        rig.release(1, qps[1]);
        rig.sides[1].rnic.deregister(window.registration);
    }
    all_is_quiet(&mut rig);
}

/// Asserts that a write and its message arrive.
fn write_and_announce<H: Harness>(rig: &mut Rig<H>, [source, target]: [QpId; 2], window: &Window) {
    let side = &mut rig.sides[0];
    let write = side.write(&[0xab; 3_000], window.rkey(), window.address(5_000));
    let send = side.send(numbered(3));
    side.post(source, vec![write, send]);
    let before = rig.sides[1].end(target).received;
    let received = rig.run_until(|rig| {
        rig.sides[1].end(target).received > before && rig.sides[0].end(source).done >= 2
    });
    assert_eq!(received, [(1, target, numbered(3))]);
    assert!(window.bytes(5_000, 3_000).iter().all(|byte| *byte == 0xab));
}

/// Two queue pairs with traffic of their own.
fn neighbours<H: Harness>(rig: &mut Rig<H>, seed: u64, domains: [Domain; 2]) -> Vec<Flow> {
    (0..2).map(|n| flow(rig, seed ^ (n << 32), domains, 0)).collect()
}

/// A flow in each direction on each of `count` queue pairs.
fn flows<H: Harness>(rig: &mut Rig<H>, seed: u64, count: u64) -> Vec<Flow> {
    let domains = rig.domains();
    (0..count)
        .flat_map(|n| {
            let qps = rig.connect(domains);
            [0, 1].map(|sender| {
                let window = rig.window(1 - sender, domains[1 - sender], WINDOW_BYTES);
                Flow::new(seed ^ (n << 32) ^ ((sender as u64) << 48), sender, qps, window)
            })
        })
        .collect()
}

fn flow<H: Harness>(rig: &mut Rig<H>, seed: u64, domains: [Domain; 2], sender: usize) -> Flow {
    let qps = rig.connect(domains);
    let window = rig.window(1 - sender, domains[1 - sender], WINDOW_BYTES);
    Flow::new(seed, sender, qps, window)
}

fn received_next<H: Harness>(rig: &mut Rig<H>) -> Vec<(usize, QpId, smcr_rnic::Message)> {
    loop {
        let received = rig.turn();
        if !received.is_empty() {
            return received;
        }
    }
}

/// Ends the flows: everything that was sent must arrive, and nothing more.
fn all_is_quiet_after_delivery<H: Harness>(rig: &mut Rig<H>, flows: &mut [Flow]) {
    while rig.sides.iter().any(|side| side.outstanding() > 0)
        || flows.iter().any(|flow| flow.in_flight() > 0)
    {
        flow::deliver(rig, flows);
    }
    all_is_quiet(rig);
}

/// Asserts that everything has ended, every lease is home, and nothing more arrives.
fn all_is_quiet<H: Harness>(rig: &mut Rig<H>) {
    (0..2).for_each(|side| assert!(rig.settle(side).is_empty(), "received more than was sent"));
    assert!(rig.run_for(Duration::from_millis(20)).is_empty(), "received more than was sent");
    for side in &rig.sides {
        assert_eq!(side.pool.leases_out(), 0, "leases that did not come home");
    }
}

fn numbered(n: u32) -> [u8; MESSAGE_LEN] {
    let mut message = [0; MESSAGE_LEN];
    message[40..].copy_from_slice(&n.to_be_bytes());
    message
}
