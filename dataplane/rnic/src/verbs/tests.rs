//! What devices and the kernel do beside queue pairs, over a libibverbs whose devices are in this
//! process.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smcr_memory::Region;

use super::*;
use crate::{Event, Exhausted, Rnic as _};

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
