//! What devices and kernels do to the backend of real RNICs, and what it must make of it.

use std::thread;
use std::time::Duration;

use rdma_core_fake::Trouble;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smcr_proto::Gid;
use smcr_rnic::{Completion, Event, Fabric, Opening, QpError, Rnic};

use crate::VerbsOverFake;
use crate::rig::Rig;
use crate::unplug::eventually;

/// The numbers that the headers of libibverbs give these.
const PORT_ERR: i32 = 10;
const GID_CHANGE: i32 = 18;

/// A request that was reported as done, but was flushed, is data that the peer never gets.
#[test]
fn requests_that_are_flushed_together_are_reported_as_flushed() {
    let mut rig = Rig::<VerbsOverFake>::new(0);
    let domains = rig.domains();
    let [source, _] = rig.connect(domains);
    drop(rig.run_for(Duration::from_millis(50)));
    // Nothing is sent any more, but no retries have been exceeded yet.
    rdma_core_fake::report(&rig.harness.devices[0], PORT_ERR);
    let now = rig.now();
    let side = &mut rig.sides[0];
    let work: Vec<_> = (0..10).map(|n| side.send([n; 44])).collect();
    side.post(source, work);
    side.fabric.transmit(now);
    rig.fail(0, source);
    // All their entries are there at the same time.
    thread::sleep(Duration::from_millis(200));
    drop(rig.settle(0));
    let end = rig.sides[0].end(source);
    assert_eq!((end.done, end.flushed, end.broke), (0, 10, Some(QpError::PortDown)));
}

/// A driver that fails to post and does not say where may have posted everything: then the NIC
/// still reads the memory. All must end, and the witness sees when memory comes home too early.
#[test]
fn requests_that_a_driver_denies_end_once() {
    let mut rig = Rig::<VerbsOverFake>::new(0);
    let domains = rig.domains();
    let window = rig.window(1, domains[1], 65_536);
    let [source, _] = rig.connect(domains);
    drop(rig.run_for(Duration::from_millis(50)));
    rdma_core_fake::trouble(&rig.harness.devices[0], Trouble::DeniesPosts, true);
    let side = &mut rig.sides[0];
    let work: Vec<_> =
        (0..10).map(|n| side.write(&[7; 4_000], window.rkey(), window.address(n))).collect();
    side.post(source, work);
    drop(rig.settle(0));
    assert_eq!(rig.sides[0].end(source).broke, Some(QpError::PortDown));
    assert_eq!(rig.sides[0].pool.leases_out(), 0);
}

/// The poller slept although entries were left that it had not looked at: those of released queue
/// pairs, which say nothing, and behind them a message. Nothing woke it.
#[test]
fn nobody_sleeps_while_entries_are_left() {
    let mut rig = Rig::<VerbsOverFake>::new(0);
    let domains = rig.domains();
    let [source, _] = rig.connect(domains);
    let old: Vec<_> = (0..8).map(|_| rig.connect(domains)[1]).collect();
    drop(rig.run_for(Duration::from_millis(100)));
    for qp in old {
        rig.fail(1, qp);
    }
    // Each of them leaves an entry for each of its 512 buffers. Nobody polls meanwhile.
    thread::sleep(Duration::from_millis(300));
    let now = rig.now();
    let side = &mut rig.sides[0];
    let work = vec![side.send([9; 44])];
    side.post(source, work);
    side.fabric.transmit(now);
    thread::sleep(Duration::from_millis(300));

    let side = &mut rig.sides[1];
    for qp in side.ends.keys().skip(1).copied().collect::<Vec<_>>() {
        side.fabric.release(now, qp);
    }
    let (mut out, mut turns) = (Vec::with_capacity(64), 0);
    while !out.iter().any(|one| matches!(one, Completion::Received { .. })) {
        out.clear();
        side.fabric.poll(now, &mut out);
        let may_sleep = side.fabric.prepare_sleep(now).is_none() && out.is_empty();
        assert!(!may_sleep || is_readable(&side.fabric), "asleep in turn {turns}");
        turns += 1;
    }
}

fn is_readable(fabric: &impl Fabric) -> bool {
    let descriptor = fabric.event_descriptor().unwrap();
    let limit = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
    poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&limit)).unwrap() > 0
}

/// One peer that is not there held up the end of everybody else's queue pairs.
#[test]
fn a_slow_connect_delays_nobody_else() {
    let mut rig = Rig::<VerbsOverFake>::new(0);
    let domains = rig.domains();
    let [source, _] = rig.connect(domains);
    drop(rig.run_for(Duration::from_millis(50)));
    let device = rig.harness.devices[0].clone();
    rdma_core_fake::trouble(&device, Trouble::ConnectsLast, true);
    let now = rig.now();
    let peer = rig.sides[1].rnic.open(domains[1]).unwrap().address();
    let side = &mut rig.sides[0];
    let slow: Vec<_> = (0..12)
        .map(|_| {
            let qp = side.rnic.open(domains[0]).unwrap().connect(peer).unwrap();
            side.adopt(now, qp)
        })
        .collect();
    rig.fail(0, source);
    drop(rig.run_until(|rig| rig.sides[0].end(source).broke.is_some()));
    rig.release(0, source);
    // Of those that nobody has begun to connect, none need be waited for either.
    for qp in &slow[8..] {
        rig.release(0, *qp);
    }
    let pairs = || rdma_core_fake::census(&device)["queue pairs"];
    let found = eventually_with(&mut rig, || pairs() == 12);
    rdma_core_fake::trouble(&device, Trouble::ConnectsLast, false);
    assert!(found, "{} queue pairs are left", pairs());
}

/// Takes turns until something is so, or for five seconds.
fn eventually_with(rig: &mut Rig<VerbsOverFake>, is_so: impl Fn() -> bool) -> bool {
    for _ in 0..50 {
        drop(rig.run_for(Duration::from_millis(100)));
        if is_so() {
            return true;
        }
    }
    false
}

/// Every address that anything on the port gets or loses changes the table. Links broke for it.
#[test]
fn only_another_address_of_ours_is_reported() {
    let mut rig = Rig::<VerbsOverFake>::new(0);
    let device = rig.harness.devices[0].clone();
    rdma_core_fake::report(&device, GID_CHANGE);
    thread::sleep(Duration::from_millis(100));
    let rnic = &mut rig.sides[0].rnic;
    assert_eq!(rnic.event(), None, "ours has not changed");

    rdma_core_fake::readdress(&device, [127, 30, 9, 9]);
    let mut event = None;
    eventually(
        || {
            event = rnic.event();
            event.is_some()
        },
        || "no event".to_owned(),
    );
    assert_eq!(event, Some(Event::Readdressed));
    let expected = Gid::from_ip("127.30.9.9".parse().unwrap());
    assert_eq!(rnic.port().gid, expected);
    let domain = rnic.open_domain().unwrap();
    assert_eq!(rnic.open(domain).unwrap().address().gid, expected);
}
