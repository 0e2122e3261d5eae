//! Peers that come in crowds, and others that keep the worker busy.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{accept, listen};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::hostile::{Captured, Hostile, honest};
use super::*;
use crate::shm::wire::Message as Said;
use crate::shm::worker::Worker;

/// Whether the tests, which share them, may have so many descriptors; they may from now on.
fn may_have_descriptors(count: u64) -> bool {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    limit.maximum.is_none_or(|maximum| maximum >= count)
}

/// A peer that always has something to say must not keep the worker from trying again what did not
/// work at first.
#[test]
fn time_goes_on_while_somebody_talks_without_end() {
    let place = tempfile::tempdir().unwrap();
    let (mut nics, _) = honest(&place);
    let [talks, is_full] = [true, false].map(|calls| Hostile::new(&place, calls));
    let captured = [(); 4].map(|()| talks.capture(&mut nics[1]));
    listen(&is_full.listener, 0).unwrap();
    let _in_the_way = is_full.call(is_full.own.gid);
    let _ = is_full.open_at(&mut nics[1]);
    let is_over = AtomicBool::new(false);
    let called = thread::scope(|scope| {
        for Captured { line, .. } in &captured {
            let is_over = &is_over;
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = line.send(&Said::Revoke(Rkey(1)), &[]);
                }
            });
        }
        thread::sleep(Duration::from_millis(50));
        let gone = accept(&is_full.listener);
        let start = now();
        let mut called = None;
        while called.is_none() && now().since(start) < Duration::from_secs(3) {
            nics[1].turn();
            called = accept(&is_full.listener).ok();
        }
        is_over.store(true, Ordering::Relaxed);
        gone.and(Ok(called)).unwrap()
    });
    assert!(called.is_some(), "it is not tried again");
}

/// One descriptor takes for ever to close, and then thousands of connections come and go. Those of
/// others must be closed, and new ones come.
#[test]
fn what_never_closes_keeps_nobody_out() {
    if !may_have_descriptors(12_000) {
        return println!("not tried: it takes many descriptors");
    }
    let place = tempfile::tempdir().unwrap();
    let (mut nics, qps) = honest(&place);
    let hostile = Hostile::new(&place, true);
    let gid = nics[1].rnic.port().gid;
    let ([slow, _kept], _listener) = slow_to_close(30);
    hostile.leave_behind(slow, gid);
    let (start, mut count) = (now(), 0);
    let mut last = Vec::new();
    while count < 5_400 && now().since(start) < Duration::from_secs(10) {
        match hostile.directory.call(gid) {
            Ok(socket) => {
                // It hears that it must go, or is about to.
                last.push(socket);
                last.drain(..last.len().saturating_sub(500));
                count += 1;
            }
            Err(error) => {
                assert_eq!(error, Errno::AGAIN);
                thread::yield_now();
            }
        }
    }
    let [a, b] = &mut nics;
    works([&mut *a, &mut *b], qps);
    let next = connect(a, b);
    works([a, b], next);
    assert_eq!(count, 5_400);
}

/// A peer that comes first is heard, also if more others wait behind it than may wait here.
#[test]
fn who_calls_is_heard_whoever_comes_next() {
    if !may_have_descriptors(4_000) {
        return println!("not tried: it takes many descriptors");
    }
    let place = tempfile::tempdir().unwrap();
    // First: it looks whether those whom it finds in the directory are alive.
    let mut a = Nic::new(&place);
    let directory = Directory::open(place.path().to_str().unwrap()).unwrap();
    let mut gid = directory.new_gid().unwrap();
    // It does not call the other one.
    gid.0[8..12].fill(0xff);
    let listener = directory.listen(gid).unwrap();
    listen(&listener, 1_000).unwrap();
    let shared = Arc::new(Shared::new(directory, gid, 1).unwrap());
    let mut b = Nic::of(Rnic::new(&shared, 0), Fabric::new(&shared, 0).unwrap());
    let qps = connect(&mut a, &mut b);
    let start = now();
    while !readable(listener.as_fd()) {
        assert!(now().since(start) < Duration::from_secs(10), "nobody calls");
    }
    let others: Vec<_> = (0..600).map(|_| shared.directory.call(gid).unwrap()).collect();
    Worker::start(&shared, listener).unwrap();
    works([&mut a, &mut b], qps);
    drop(others);
}
