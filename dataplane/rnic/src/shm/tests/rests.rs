//! Queue pairs that rest, and are not looked at until their peer rings the bell.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::dice::Dice;

impl Nic {
    /// One turn of a poller that looks at the descriptor first, as pollers do that do not sleep.
    fn turn_by_signs(&mut self) {
        let is_readable = readable(self.fabric.event_descriptor().unwrap());
        self.turn_with(if is_readable { Signs::Maybe } else { Signs::NotYet });
    }
}

fn are_connected(nics: &[&mut Nic], qps: &[[QpId; 2]]) -> bool {
    qps.iter().all(|ends| (0..2).all(|end| nics[end].fabric.is_connected(ends[end])))
}

/// A poller with thousands of queue pairs must not look at each of them in every turn.
#[test]
fn who_rests_is_not_looked_at() {
    let directory = tempfile::tempdir().unwrap();
    let (mut a, mut b) = (Nic::new(&directory), Nic::new(&directory));
    let qps: Vec<_> = (0..20).map(|_| connect(&mut a, &mut b)).collect();
    works([&mut a, &mut b], qps[0]);
    let all_rest = |nics: &[&mut Nic]| nics.iter().all(|nic| nic.fabric.watched() == 0);
    until(&mut [&mut a, &mut b], |nics| are_connected(nics, &qps) && all_rest(nics));
    let before = b.received();
    a.send(qps[7][0], HELLO);
    assert_eq!(a.fabric.watched(), 1, "the peer will answer");
    a.turn();
    b.turn_by_signs();
    assert_eq!((b.received() - before, b.fabric.watched()), (1, 1));
    // For a while, its peer need not ring.
    a.send(qps[7][0], HELLO);
    a.turn();
    assert!(!readable(b.fabric.event_descriptor().unwrap()));
    b.turn_by_signs();
    assert_eq!(b.received() - before, 2);
    b.send(qps[7][1], HELLO);
    b.turn_by_signs();
    assert!(!readable(a.fabric.event_descriptor().unwrap()), "it has sent, so it looks");
    until(&mut [&mut a, &mut b], all_rest);
    // Nor does one that has gone cost anything, or one that was made in its place.
    for [qp_a, qp_b] in qps {
        a.fabric.release(now(), qp_a);
        b.fabric.release(now(), qp_b);
    }
    let again = connect(&mut a, &mut b);
    works([&mut a, &mut b], again);
    until(&mut [&mut a, &mut b], all_rest);
}

/// To ask the kernel costs as much as to look at many queue pairs.
#[test]
fn the_kernel_is_asked_only_if_there_is_a_sign() {
    let directory = tempfile::tempdir().unwrap();
    let (mut a, mut b) = (Nic::new(&directory), Nic::new(&directory));
    let qps = connect(&mut a, &mut b);
    until(&mut [&mut a, &mut b], |nics| {
        are_connected(nics, &[qps]) && nics[1].fabric.watched() == 0
    });
    b.fabric.note_signs(Signs::Maybe);
    b.fabric.poll(now(), &mut Vec::with_capacity(1));
    a.send(qps[0], HELLO);
    a.turn();
    let mut out = Vec::with_capacity(1);
    b.fabric.poll(now(), &mut out);
    assert!(out.is_empty(), "it has asked in this turn");
    for signs in [Signs::NotYet, Signs::None] {
        b.turn_with(signs);
        assert_eq!(b.received(), 0, "{signs:?}");
    }
    b.turn_with(Signs::Maybe);
    assert_eq!(b.received(), 1);
}

/// The same for a poller that sleeps: what rests need not be told of each sleep.
#[test]
fn who_sleeps_tells_those_only_that_do_not_rest() {
    let directory = tempfile::tempdir().unwrap();
    let (mut a, mut b) = (Nic::new(&directory), Nic::new(&directory));
    let qps: Vec<_> = (0..20).map(|_| connect(&mut a, &mut b)).collect();
    for pair in &qps {
        works([&mut a, &mut b], *pair);
    }
    assert!(b.fabric.watched() > 0);
    let start = now();
    while b.fabric.watched() > 0 {
        assert!(now().since(start) < Duration::from_secs(5), "they never rest");
        thread::sleep(Duration::from_millis(2));
        assert_eq!(b.fabric.prepare_sleep(now()), None);
    }
    for [qp_a, _] in qps {
        let before = b.received();
        // It has nothing left to report.
        a.turn();
        a.send(qp_a, HELLO);
        let at = now();
        assert_eq!(a.fabric.prepare_sleep(at), Some(at), "it has something to do");
        a.turn();
        b.sleep();
        b.turn_by_signs();
        assert_eq!(b.received() - before, 1);
    }
}

/// Messages come at the very moment at which their queue pair is left alone. (Every order of events
/// is in `tests/loom`.)
#[test]
fn nothing_is_lost_when_one_begins_to_rest() {
    let directory = tempfile::tempdir().unwrap();
    let (mut a, mut b) = (Nic::new(&directory), Nic::new(&directory));
    let [qp_a, qp_b] = connect(&mut a, &mut b);
    until(&mut [&mut a, &mut b], |nics| are_connected(nics, &[[qp_a, qp_b]]));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let over = &over;
        scope.spawn(move || {
            let mut answered = 0;
            while !over.load(Ordering::Acquire) {
                b.turn_by_signs();
                if b.received() > answered {
                    answered += 1;
                    b.send(qp_b, HELLO);
                }
                thread::yield_now();
            }
        });
        let mut dice = Dice::new(1);
        for round in 0..1_500 {
            let start = now();
            // The peer has heard the last message about so long ago.
            let pause = Duration::from_nanos(995_000 + dice.index(10_000) as u64);
            while now().since(start) < pause {
                a.turn_by_signs();
            }
            a.send(qp_a, HELLO);
            while a.received() <= round {
                a.turn_by_signs();
                thread::yield_now();
                if now().since(start) > Duration::from_secs(10) {
                    over.store(true, Ordering::Release);
                    panic!("no answer in round {round}");
                }
            }
        }
        assert_eq!(a.broke(qp_a), None);
        over.store(true, Ordering::Release);
    });
}

/// A peer that keeps the worker talking keeps neither us nor others from hearing it.
#[test]
fn more_is_heard_than_fits_in_a_turn() {
    let directory = tempfile::tempdir().unwrap();
    let (mut a, mut b) = (Nic::new(&directory), Nic::new(&directory));
    // Nobody takes a turn until the worker has said all of it.
    let qps: Vec<_> = (0..200).map(|_| connect(&mut a, &mut b)).collect();
    thread::sleep(Duration::from_millis(100));
    until(&mut [&mut a, &mut b], |nics| are_connected(nics, &qps));
    assert_eq!(b.fabric.prepare_sleep(now()), None, "there is nothing left to hear");
    // More bells than are heard in a turn.
    for_a_while(&mut [&mut a, &mut b]);
    for [qp, _] in &qps {
        a.send(*qp, HELLO);
    }
    a.turn();
    until(&mut [&mut b], |nics| nics[0].received() == qps.len());
}

/// What is left of one that was released is reported under its name, also when another one has its
/// place by then.
#[test]
fn who_comes_next_has_a_name_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let (mut a, mut b) = (Nic::new(&directory), Nic::new(&directory));
    let [first, _] = connect(&mut a, &mut b);
    (0..3).for_each(|_| a.send(first, HELLO));
    a.fabric.release(now(), first);
    a.fabric.transmit(now());
    let [second, second_b] = connect(&mut a, &mut b);
    assert_ne!(first, second);
    assert_eq!(a.fabric.room(second), SENDS);
    works([&mut a, &mut b], [second, second_b]);
    until(&mut [&mut a], |nics| (nics[0].ended(first), nics[0].ended(second)) == (3, 2));
    assert_eq!(a.fabric.room(second), SENDS);
}
