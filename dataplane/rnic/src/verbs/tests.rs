//! What devices and the kernel do beside queue pairs, over a libibverbs whose devices are in this
//! process.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smcr_memory::Region;
use smcr_proto::Mtu;

use super::*;
use crate::{Event, Exhausted, Opening as _, Rnic as _};

/// A device of its own, opened. `host` is the end of its address.
fn open_device(host: u8) -> (String, Rnic, Fabric) {
    let device = rdma_core_fake::device([127, 33, 0, host]);
    let (rnic, fabric) =
        open_with(rdma_core_fake::library(), &Config::on(&device)).expect("it is plugged");
    (device, rnic, fabric)
}

/// The next event, if one comes within `limit`.
fn next_event(rnic: &mut Rnic, limit: Duration) -> Option<Event> {
    let descriptor = rnic.descriptor().expect("a device reports events");
    let limit = Timespec::try_from(limit).unwrap();
    poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&limit)).unwrap();
    rnic.event()
}

/// Of an RNIC with two ports, the cable of the other one was pulled. All links of ours broke.
#[test]
fn events_of_another_port_are_not_ours() {
    let (device, mut rnic, _fabric) = open_device(1);
    for event in [PORT_ERR, PORT_ACTIVE, GID_CHANGE] {
        rdma_core_fake::report_of_port(&device, 2, event);
    }
    rdma_core_fake::report_of_port(&device, 1, PORT_ERR);
    assert_eq!(next_event(&mut rnic, PATIENCE), Some(Event::Down));
    rdma_core_fake::report_of_port(&device, 2, PORT_ACTIVE);
    assert_eq!(next_event(&mut rnic, MOMENT), None, "ours is still down");
    rdma_core_fake::report_of_port(&device, 1, PORT_ACTIVE);
    assert_eq!(next_event(&mut rnic, PATIENCE), Some(Event::Up));
}

/// An operator raised the MTU of the network device, or lowered it: queue pairs went on with the
/// path MTU of the start, which loses every full packet if it is too large.
#[test]
fn the_path_mtu_is_that_of_now() {
    let (device, mut rnic, _fabric) = open_device(2);
    rnic.send_from(&Region::new(4_096).unwrap()).unwrap();
    let domain = rnic.open_domain().unwrap();
    assert_eq!(rnic.port().mtu, Mtu::B1024);
    rdma_core_fake::set_mtu(&device, Mtu::B4096.0.into());
    let opening = rnic.open(domain).unwrap();
    assert_eq!((opening.address().mtu, rnic.port().mtu), (Mtu::B4096, Mtu::B4096));
    rdma_core_fake::set_mtu(&device, Mtu::B512.0.into());
    rdma_core_fake::report(&device, PORT_ACTIVE);
    assert_eq!(next_event(&mut rnic, PATIENCE), Some(Event::Up));
    assert_eq!(rnic.port().mtu, Mtu::B512);
    // A network device that is being taken away has none.
    rdma_core_fake::set_mtu(&device, 0);
    assert_eq!(rnic.open(domain).unwrap().address().mtu, Mtu::B512);
}

/// The operator's limit holds whatever the port has.
#[test]
fn a_path_mtu_that_grows_stays_below_the_limit() {
    let device = rdma_core_fake::device([127, 33, 0, 3]);
    let config = Config { mtu_max: Some(Mtu::B2048), ..Config::on(&device) };
    let (mut rnic, _fabric) = open_with(rdma_core_fake::library(), &config).unwrap();
    assert_eq!(rnic.port().mtu, Mtu::B1024);
    rdma_core_fake::set_mtu(&device, Mtu::B4096.0.into());
    rdma_core_fake::report(&device, PORT_ACTIVE);
    assert_eq!(next_event(&mut rnic, PATIENCE), Some(Event::Up));
    assert_eq!(rnic.port().mtu, Mtu::B2048);
}

/// With the `ulimit -l` of most hosts the gateway started, and then declined every connection.
#[test]
fn memory_that_may_not_be_locked_is_noticed_at_the_start() {
    let (device, mut rnic, _fabric) = open_device(4);
    rdma_core_fake::limit_registrations(&device, 8_191);
    assert_eq!(rnic.send_from(&Region::new(8_192).unwrap()), Err(Exhausted));
    // Nothing was changed, so less is possible, and is registered in domains only.
    rnic.send_from(&Region::new(4_096).unwrap()).unwrap();
    assert_eq!(rdma_core_fake::census(&device)["registrations"], 0);
    assert_eq!(rdma_core_fake::census(&device)["domains"], 0);
    rnic.open_domain().unwrap();
    assert_eq!(rdma_core_fake::census(&device)["registrations"], 1);
}

/// The numbers that the headers of libibverbs give these.
const PORT_ACTIVE: i32 = 9;
const PORT_ERR: i32 = 10;
const GID_CHANGE: i32 = 18;
/// How long a test waits for what must come.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long it waits for what must not come.
const MOMENT: Duration = Duration::from_millis(100);
