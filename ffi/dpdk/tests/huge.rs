//! Huge pages that run out. This is a process of its own, because DPDK decides once about memory.
#![allow(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

use std::fs;

use dpdk::{Pages, Port, Wishes};

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";

/// Reserves huge pages until it is dropped.
struct Reservation(String);

impl Reservation {
    fn of(pages: u64) -> Self {
        let before = Self(fs::read_to_string(RESERVED).unwrap());
        fs::write(RESERVED, pages.to_string()).unwrap();
        before
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        fs::write(RESERVED, &self.0).expect("what was written before can be written again");
    }
}

#[test]
#[ignore = "needs root"]
fn a_port_says_that_huge_pages_ran_out() {
    let _reservation = Reservation::of(4);
    assert!(matches!(Pages::of_host(), Pages::Huge(1..)));
    dpdk::start(&[]).expect("a few pages are enough to start");
    let socket = std::env::temp_dir().join(format!("smcgate-huge-{}", std::process::id()));
    let device = |index: u32| {
        let socket = socket.display();
        format!("net_memif{index},role=server,id={index},socket={socket},socket-abstract=no")
    };
    // A port takes 10 MB or so, and there are 8.
    let error = Port::open(&device(0), Wishes::default())
        .map(drop)
        .expect_err("too little memory")
        .to_string();
    assert!(error.contains("too few huge pages") && error.lines().count() == 1, "{error}");
    fs::write(RESERVED, "64").unwrap();
    drop(Port::open(&device(0), Wishes::default()).expect("memory came"));
}
