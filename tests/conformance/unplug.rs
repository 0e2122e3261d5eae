//! What a real RNIC reports by itself: its port goes down and up, or the device goes for good.

use std::process::Command;
use std::thread;
use std::time::Duration;

use rdma_core_fake::Trouble;
use smcr_rnic::{Event, Rnic, verbs};

use crate::rig::{Harness, Rig};
use crate::{VerbsOnRxe, VerbsOverFake};

/// The numbers that the headers of libibverbs give these.
const DEVICE_FATAL: i32 = 8;
const PORT_ACTIVE: i32 = 9;
const PORT_ERR: i32 = 10;

/// An operator pulls the cable. Whoever is not told of it sends to nobody until retries end.
#[test]
fn a_port_that_goes_down_and_up_is_reported() {
    let mut rig = Rig::<VerbsOverFake>::new(0);
    let device = rig.harness.devices[0].clone();
    rdma_core_fake::report(&device, PORT_ERR);
    rdma_core_fake::report(&device, PORT_ACTIVE);
    let mut seen = Vec::new();
    let end = rig.now() + PATIENCE;
    while seen.len() < 2 && rig.now() < end {
        seen.extend(rig.sides[0].rnic.event());
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(seen, [Event::Down, Event::Up]);
    assert_eq!(rig.sides[1].rnic.event(), None, "the other device is well");
}

/// A driver with hot removal says that the device is dead. Everything must come home, or
/// connections hang, and nothing may stay open, or the kernel does not let the device go.
#[test]
fn a_device_that_dies_is_given_up() {
    let mut devices = Vec::new();
    let rig = gone(|rig: &mut Rig<VerbsOverFake>| {
        devices.extend(rig.harness.devices.clone());
        devices.iter().for_each(|device| rdma_core_fake::report(device, DEVICE_FATAL));
    });
    for device in devices {
        let open = || rdma_core_fake::census(&device).into_values().sum::<usize>();
        eventually(|| open() == 0, || format!("{:?}", rdma_core_fake::census(&device)));
    }
    drop(rig);
}

/// When a device is pulled out, all calls fail, also those that destroy. This ended the process.
#[test]
fn a_device_that_is_pulled_out_is_given_up() {
    let mut devices = Vec::new();
    let rig = gone(|rig: &mut Rig<VerbsOverFake>| {
        devices.extend(rig.harness.devices.clone());
        for device in &devices {
            rdma_core_fake::trouble(device, Trouble::Gone, true);
            rdma_core_fake::report(device, DEVICE_FATAL);
        }
    });
    for device in devices {
        // The kernel has ended everything else.
        let is_open = || rdma_core_fake::census(&device)["contexts"] > 0;
        eventually(|| !is_open(), || "the device stays open".to_owned());
    }
    drop(rig);
}

/// A completion queue that overran cannot be polled, and its queue pairs are lost. This ended the
/// process.
#[test]
fn a_device_whose_completions_cannot_be_polled_is_given_up() {
    drop(gone(|rig: &mut Rig<VerbsOverFake>| {
        let devices = &rig.harness.devices;
        devices.iter().for_each(|one| rdma_core_fake::trouble(one, Trouble::CannotBePolled, true));
    }));
}

/// The soft RNIC of Linux has no hot removal: the kernel waits until nobody has the device open,
/// and reports nothing. We must let it go while we run.
#[test]
#[ignore = "needs rxe0: tests/interop runs it in its guest"]
fn a_soft_rnic_is_let_go() {
    let mut removal = None;
    let rig = gone(|_: &mut Rig<VerbsOnRxe>| {
        let words = ["5", "rdma", "link", "delete", "rxe0"];
        removal = Some(Command::new("timeout").args(words).spawn().unwrap());
    });
    let status = removal.unwrap().wait().unwrap();
    assert!(status.success(), "the kernel still waits for us: {status}");
    drop(rig);
}

/// Waits until something is so.
pub(crate) fn eventually(mut is_so: impl FnMut() -> bool, state: impl Fn() -> String) {
    for _ in 0..PATIENCE.as_millis() {
        if is_so() {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("after {PATIENCE:?}: {}", state());
}

/// Unplugs the devices of both sides under load, and returns when both have given up.
fn gone<H>(unplug: impl FnOnce(&mut Rig<H>)) -> Rig<H>
where
    H: Harness<Rnic = verbs::Rnic, Fabric = verbs::Fabric>,
{
    let mut rig = Rig::<H>::new(0);
    let domains = rig.domains();
    let window = rig.window(1, domains[1], 65_536);
    let pairs: Vec<_> = (0..4).map(|_| rig.connect(domains)).collect();
    for [source, _] in &pairs {
        let side = &mut rig.sides[0];
        let work = (0..100).flat_map(|n| {
            let write = side.write(&[7; 4_000], window.rkey(), window.address(n * 100));
            [write, side.send([7; 44])]
        });
        let work: Vec<_> = work.collect();
        side.post(*source, work);
    }
    drop(rig.turn());
    unplug(&mut rig);
    let mut told = [false; 2];
    let finished = |rig: &Rig<H>| {
        let broke = |side: usize| rig.sides[side].ends.values().all(|end| end.broke.is_some());
        rig.sides.iter().all(|side| side.outstanding() == 0) && broke(0) && broke(1)
    };
    let end = rig.now() + PATIENCE;
    while told != [true; 2] || !finished(&rig) {
        assert!(rig.now() < end, "told: {told:?}, all has ended: {}", finished(&rig));
        for (side, told) in rig.sides.iter_mut().zip(&mut told) {
            *told |= side.rnic.event() == Some(Event::Gone);
        }
        drop(rig.turn());
    }
    for side in &mut rig.sides {
        assert_eq!(side.pool.leases_out(), 0, "leases that did not come home");
        assert!(side.rnic.open_domain().is_err(), "there is no device");
    }
    // The engine still posts, releases and deregisters what it had.
    for [source, target] in pairs {
        let late = rig.sides[0].send([1; 44]);
        rig.sides[0].post(source, vec![late]);
        assert!(rig.settle(0).is_empty());
        rig.release(0, source);
        rig.release(1, target);
    }
    rig.sides[1].rnic.deregister(window.registration);
    for (side, domain) in rig.sides.iter_mut().zip(domains) {
        side.rnic.close_domain(domain);
    }
    rig
}

/// How long a test waits for what must come.
const PATIENCE: Duration = Duration::from_secs(20);
