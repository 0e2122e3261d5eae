//! Peers that come in crowds, and others that keep the worker busy.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{accept, listen};

use super::hostile::{Captured, Hostile, honest};
use super::*;
use crate::shm::wire::Message as Said;

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
