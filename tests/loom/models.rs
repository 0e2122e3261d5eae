//! Every order of events, within a bound, of what threads share in the engine, and processes in
//! shared memory.
#![allow(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

use loom::model::Builder;
use loom::sync::Arc;
use loom::thread;
use smcgate_loom::counters::Counters;
use smcgate_loom::desk::desks;
use smcgate_loom::gauges::{Gauges, Reading, Stage};
use smcgate_loom::mailbox::{Receiver, Waker, mailbox};
use smcgate_loom::names::{ConnectionId, GroupId};
use smcgate_loom::owners::{Owner, Owners};
use smcgate_loom::page::Page;
use smcgate_loom::shm::ring::Ring;
use smcgate_loom::sync::{AtomicU64, Ordering};

/// Tries all orders there are.
fn in_every_order(test: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = None;
    builder.check(test);
}

/// Tries those in which threads are interrupted at most three times: of more threads or steps, all
/// orders would take hours.
fn in_many_orders(test: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(test);
}

/// A thread as pollers and the control thread are: it takes what is there and then sleeps, until it
/// has received `count` values.
fn receive(receiver: &Receiver<u32>, waker: &Waker, count: usize) -> Vec<u32> {
    let mut received = Vec::new();
    while received.len() < count {
        received.extend(std::iter::from_fn(|| receiver.receive()));
        waker.about_to_sleep();
        if receiver.is_empty() && received.len() < count {
            waker.descriptor().wait();
        }
        waker.awake();
    }
    received
}

/// A wake that is lost is a connection that stands still until something else happens: here, for
/// ever, which the checker calls a deadlock.
#[test]
fn no_wake_is_lost() {
    in_many_orders(|| {
        let waker = Waker::new().unwrap();
        let (sender, receiver) = mailbox(2, waker.clone());
        let other = sender.clone();
        let senders = [thread::spawn(move || sender.send(1)), thread::spawn(move || other.send(2))];
        let mut received = receive(&receiver, &waker, 2);
        received.sort_unstable();
        assert_eq!(received, [1, 2]);
        for sender in senders {
            sender.join().unwrap().unwrap();
        }
    });
}

/// The same where a sender tells of several values at once, as pollers do at the end of a turn.
#[test]
fn one_wake_is_enough_for_all_that_came_before() {
    in_every_order(|| {
        let waker = Waker::new().unwrap();
        let (sender, receiver) = mailbox(2, waker.clone());
        let sender = thread::spawn(move || {
            sender.push(1).unwrap();
            sender.push(2).unwrap();
            sender.wake();
        });
        assert_eq!(receive(&receiver, &waker, 2), [1, 2]);
        sender.join().unwrap();
    });
}

/// Who was woken by a slow hand sleeps at most once too short. A bell that nobody silences any more
/// would keep the thread from ever sleeping again.
#[test]
fn a_late_ring_costs_one_sleep_and_no_more() {
    in_every_order(|| {
        let waker = Waker::new().unwrap();
        let (sender, receiver) = mailbox(2, waker.clone());
        let sender = thread::spawn(move || sender.send(1));
        assert_eq!(receive(&receiver, &waker, 1), [1]);
        sender.join().unwrap().unwrap();
        // All that was to ring has rung.
        waker.about_to_sleep();
        waker.awake();
        assert!(!waker.descriptor().is_readable());
    });
}

/// A scrape that meets the poller sees what was true some time ago, never less than before, and in
/// the end all of it.
#[test]
fn counters_only_grow_and_nothing_is_lost() {
    in_every_order(|| {
        let counters = Arc::new(Counters::default());
        let reader = Arc::clone(&counters);
        let reader = thread::spawn(move || [0; 3].map(|_: u8| reader.bytes_in.get()));
        for n in [1, 2, 4] {
            counters.bytes_in.add(n);
        }
        let seen = reader.join().unwrap();
        assert!(seen.is_sorted() && seen.iter().all(|sum| [0, 1, 3, 7].contains(sum)), "{seen:?}");
        assert_eq!(counters.bytes_in.get(), 7);
    });
}

/// A reader may see numbers of a row from before and after a change side by side, but each number
/// is one that was written, and it never goes back.
#[test]
fn gauges_show_nothing_that_was_not_set() {
    let readings = [
        Reading::default(),
        Reading { bytes_in: 1, bytes_out: 10, failovers: 1, stage: Stage::HalfClosed, paced: true },
        Reading { bytes_in: 2, bytes_out: 20, failovers: 2, stage: Stage::Closing, paced: false },
    ];
    let age = move |seen: Reading| {
        let of = |is_it: &dyn Fn(&Reading) -> bool| readings.iter().position(is_it).unwrap();
        [
            of(&|one| one.bytes_in == seen.bytes_in),
            of(&|one| one.bytes_out == seen.bytes_out),
            of(&|one| one.failovers == seen.failovers),
            of(&|one| one.stage == seen.stage),
        ]
    };
    in_many_orders(move || {
        let gauges = Arc::new(Gauges::new());
        let reader = Arc::clone(&gauges);
        let reader = thread::spawn(move || [0; 2].map(|_: u8| reader.read(1)));
        gauges.set(1, readings[1]);
        gauges.set(1, readings[2]);
        let [earlier, later] = reader.join().unwrap().map(age);
        assert!(earlier.iter().zip(&later).all(|(earlier, later)| earlier <= later));
        assert_eq!((gauges.read(1), gauges.read(0)), (readings[2], readings[0]));
    });
}

/// A poller that is told of a connection sees one owner or the next, never half of each, and with
/// the owner all that was done before it was named.
#[test]
fn an_owner_is_named_whole_and_after_what_makes_it_one() {
    in_every_order(|| {
        let (owners, told) = (Arc::new(Owners::new()), Arc::new(AtomicU64::new(0)));
        let [first, second] = [(1, 5, 7), (2, 6, 8)].map(|(poller, generation, group)| Owner {
            poller,
            generation,
            group: GroupId(group),
        });
        let [one, other] =
            [first, second].map(|owner| ConnectionId { slot: 1, generation: owner.generation });
        let reader = (Arc::clone(&owners), Arc::clone(&told));
        let reader = thread::spawn(move || {
            let (owners, told) = reader;
            // In this order: a look that finds nothing must not hide what comes between the two.
            let owner = owners.of(one).or_else(|| owners.of(other));
            (owner, told.load(Ordering::Relaxed))
        });
        for (order, owner) in [(1, first), (2, second)] {
            told.store(order, Ordering::Relaxed);
            let connection = ConnectionId { slot: 1, generation: owner.generation };
            owners.set(connection, owner.group, owner.poller);
        }
        match reader.join().unwrap() {
            (Some(owner), told) if owner == first => assert!(told >= 1),
            (Some(owner), told) => assert_eq!((owner, told), (second, 2)),
            // It looked for each of them before that one was named.
            (None, _) => {}
        }
        assert_eq!(owners.of(other), Some(second));
    });
}

/// A neighbour hands a connection back at once, while the poller that gave it away is interrupted:
/// who has the connection must not be overwritten by who had it. If it were, every message on the
/// wrong link would be dropped from then on, and the connection would stand still.
#[test]
fn a_connection_that_comes_back_at_once_is_found() {
    in_every_order(|| {
        let [mut here, mut there] = desks();
        let other = thread::spawn(move || {
            if there.read() {
                there.hand_over(0);
            }
            there
        });
        here.hand_over(1);
        let mut there = other.join().unwrap();
        if there.read() {
            there.hand_over(0);
        }
        assert!(here.read() && here.has_connection());
        there.hear();
        here.hear();
        while here.read() || there.read() {}
        assert_eq!((here.taken_in, there.taken_in), (2, 0));
    });
}

/// A message comes by a link of a third poller while the connection changes hands twice: wherever
/// it is passed on to, it comes to the connection.
#[test]
fn a_message_finds_a_connection_that_moves() {
    in_many_orders(|| {
        let [mut first, mut second, mut third] = desks();
        let mover = thread::spawn(move || {
            first.hand_over(1);
            first
        });
        let listener = thread::spawn(move || {
            third.hear();
            third
        });
        while second.read() {
            if second.has_connection() {
                second.hand_over(2);
                break;
            }
        }
        let mut all = [mover.join().unwrap(), second, listener.join().unwrap()];
        loop {
            let moved = all.iter_mut().fold(false, |moved, desk| moved | desk.read());
            if all[1].has_connection() {
                all[1].hand_over(2);
            } else if !moved {
                break;
            }
        }
        assert!(all[2].has_connection());
        assert_eq!(all.iter().map(|desk| desk.taken_in).sum::<usize>(), 1);
    });
}

/// A peer on this host that is not woken is a connection that stands still for ever. Each end may
/// sleep, one for messages and one for room.
#[test]
fn neither_end_of_a_ring_sleeps_through_what_it_waits_for() {
    for (slots, messages) in [(1, 3), (2, 3)] {
        in_many_orders(move || {
            let ring = Arc::new(Ring::new(slots));
            let other = Arc::clone(&ring);
            let sender = thread::spawn(move || other.send(messages));
            ring.receive(messages);
            sender.join().unwrap();
        });
    }
}

/// Who waits for room, and then for a message only, is woken for that message: a peer that was
/// interrupted when it was to wake it for the room must not take that announcement away unheard.
#[test]
fn who_waits_for_something_else_by_now_is_woken() {
    in_many_orders(|| {
        let ring = Arc::new(Ring::new(1));
        let other = Arc::clone(&ring);
        let peer = thread::spawn(move || other.answer());
        ring.ask();
        peer.join().unwrap();
    });
}

/// A page is given back while another RNIC comes to know of it: what a peer then writes through
/// that one is not thrown away with the page.
#[test]
fn whoever_comes_finds_a_page_that_stays() {
    for pins in [false, true] {
        in_every_order(move || {
            let page = Arc::new(Page::new());
            let other = Arc::clone(&page);
            let newcomer = thread::spawn(move || {
                if pins {
                    other.pin();
                    other.write(7);
                } else {
                    other.admit();
                    other.place(7);
                }
            });
            page.relinquish(0);
            newcomer.join().unwrap();
            assert_eq!(page.read(), 7);
            assert!(!page.relinquish(if pins { 0 } else { 1 }), "it is not alone");
        });
    }
}

/// A page is given back while another RNIC leaves: only after the last byte that came by that one,
/// and all of them count.
#[test]
fn what_came_by_an_rnic_that_left_still_counts() {
    for announced in [0, 1] {
        in_every_order(move || {
            let page = Arc::new(Page::new());
            page.admit();
            let other = Arc::clone(&page);
            let leaver = thread::spawn(move || {
                other.place(7);
                other.dismiss();
            });
            let gone = page.relinquish(announced);
            leaver.join().unwrap();
            assert_eq!(page.read(), if gone { 0 } else { 7 });
            assert!(!gone || announced == 1, "one byte is still to be announced");
        });
    }
}
