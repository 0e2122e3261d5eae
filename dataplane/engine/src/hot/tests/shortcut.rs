//! Programs that pass their bytes by themselves, and whom the poller wakes for each other.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smcgate_rings::Shortcut;

use super::*;

/// So many pairs of programs, each with a shortcut. Those at the even places and behind them belong
/// together.
fn pairs(kernel: &mut Kernel, count: usize) -> (Vec<Program>, Vec<Near>) {
    let (mut programs, streams): (Vec<_>, Vec<_>) = (0..2 * count).map(|_| pair()).unzip();
    for (stream, slot) in streams.iter().zip(0..) {
        kernel.watch(key(slot), stream).unwrap();
    }
    offer(&streams);
    join(&mut programs, &streams);
    (0..4 * count).for_each(|_| drop(reported(kernel, &streams)));
    (programs, streams)
}

fn offer(streams: &[Near]) {
    for both in streams.chunks(2) {
        let [one, other] = [&both[0], &both[1]].map(|near| near.rings().unwrap());
        Gateway::offer_shortcut(one, other, 0);
    }
}

fn join(programs: &mut [Program], streams: &[Near]) {
    for (program, stream) in programs.iter_mut().zip(streams) {
        let number = program.rings.wants_shortcut(|| 1).unwrap();
        let memory = stream.rings().unwrap().shortcut_memory().unwrap();
        program.rings = program.rings.with(Some(Shortcut::map(memory, number).unwrap()));
        program.rings.join(program.socket.as_fd());
    }
}

fn is_told(program: &Program) -> bool {
    let mut fds = [PollFd::new(&program.socket, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&at_once)).unwrap() > 0
}

fn other(place: usize) -> usize {
    place ^ 1
}

/// Whoever is written to hears of it, however many there are, and whether the poller looks or
/// sleeps. It need not wait until all are checked.
#[test]
fn programs_are_woken_for_each_other() {
    for count in [1, HOT_RINGS_MAX, HOT_RINGS_MAX + 9] {
        let (_waker, mut kernel) = kernel();
        let (programs, streams) = pairs(&mut kernel, count);
        let mut random = 7_usize;
        for round in 0..4_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let from = (random >> 33) % programs.len();
            programs[from].writes(b"x");
            kernel.hot.looks = 0;
            kernel.hot.check_at = Instant(u64::MAX);
            let reader = &programs[other(from)];
            let mut turns = 0;
            while !is_told(reader) {
                let events = match round % 3 {
                    0 => slept(&mut kernel, &streams, Instant(0)),
                    _ => reported(&mut kernel, &streams),
                };
                assert!(events.iter().all(|event| !event.failed));
                turns += 1;
                assert!(turns < 9, "of {count} pairs, {from} is not heard");
            }
            assert_eq!(reader.reads(&mut [0; 9]), 1);
            assert!(!is_told(reader));
        }
    }
}

/// While one program writes and the other only reads, both ends are looked at, and when nobody says
/// anything, none.
#[test]
fn both_ends_are_looked_at_or_none() {
    let (_waker, mut kernel) = kernel();
    let (programs, streams) = pairs(&mut kernel, 1);
    let ms = |count| Instant(0) + Duration::from_millis(count);
    let are_awake = || [0, 1].map(|place: usize| streams[place].rings().unwrap().is_awake());
    for now in 1..40 {
        programs[0].writes(b"x");
        slept(&mut kernel, &streams, ms(now));
        assert_eq!((are_awake(), is_told(&programs[1])), ([true; 2], true));
        assert_eq!(programs[1].reads(&mut [0; 9]), 1);
    }
    programs[1].writes(b"an answer");
    reported(&mut kernel, &streams);
    assert!(is_told(&programs[0]));
    programs[0].reads(&mut [0; 9]);
    for now in [100, 100, 102] {
        kernel.hot.check_at = Instant(u64::MAX);
        kernel.sleep(ms(now), Some(ms(now)));
        reported(&mut kernel, &streams);
    }
    assert_eq!(are_awake(), [false; 2]);
}

/// Nobody wakes the poller for a program that watches, and the thread that does may be gone.
#[test]
fn who_does_not_read_any_more_gets_a_token() {
    for sleeps in [false, true] {
        let (_waker, mut kernel) = kernel();
        let (programs, streams) = pairs(&mut kernel, 3);
        programs[4].rings.watch();
        let clock = kernel.clock();
        // Until nobody looks at them.
        while streams[4].rings().unwrap().is_awake() {
            kernel.sleep(clock.now(), Some(clock.now()));
            reported(&mut kernel, &streams);
        }
        programs[5].writes(b"x");
        let begun = clock.now();
        while !is_told(&programs[4]) {
            if sleeps {
                kernel.sleep(clock.now(), None);
            }
            reported(&mut kernel, &streams);
            assert!(clock.now().since(begun) < TOO_LONG);
        }
        assert_eq!(programs[4].reads(&mut [0; 9]), 1);
    }
}

/// Each of them may be moved to another poller, also before their programs know of the shortcut.
#[test]
fn ends_at_two_pollers_are_served_by_both() {
    for is_early in [false, true] {
        let ((_one, mut first), (_other, mut second)) = (kernel(), kernel());
        let (mut programs, streams) = if is_early {
            let (programs, streams): (Vec<_>, Vec<_>) = (0..2).map(|_| pair()).unzip();
            first.watch(key(0), &streams[0]).unwrap();
            offer(&streams);
            first.watch(key(1), &streams[1]).unwrap();
            (programs, streams)
        } else {
            pairs(&mut first, 1)
        };
        first.unwatch(&streams[1]);
        second.watch(key(1), &streams[1]).unwrap();
        if is_early {
            join(&mut programs, &streams);
        }
        let clock = first.clock();
        let mut turn = |limit_ms| {
            for kernel in [&mut first, &mut second] {
                kernel.sleep(clock.now(), Some(clock.now() + Duration::from_millis(limit_ms)));
                reported(kernel, &streams);
            }
        };
        (0..5).for_each(|_| turn(1));
        for place in [0, 1, 0, 1] {
            programs[place].writes(b"x");
            let begun = clock.now();
            while !is_told(&programs[other(place)]) {
                turn(1);
                assert!(clock.now().since(begun) < TOO_LONG, "early: {is_early}, {place}");
            }
            assert_eq!(programs[other(place)].reads(&mut [0; 9]), 1);
        }
        second.unwatch(&streams[1]);
        first.watch(key(1), &streams[1]).unwrap();
        programs[0].writes(b"y");
        assert!(!slept(&mut first, &streams, Instant(0)).is_empty() && is_told(&programs[1]));
    }
}

/// Memory of connections that are over would be missed by those that come.
#[test]
fn nothing_is_kept_of_what_is_over() {
    let (_waker, mut kernel) = kernel();
    let mut first = None;
    for number in 0..300 {
        let (_programs, streams) = pairs(&mut kernel, 1);
        let rings = Arc::downgrade(streams[0].rings().unwrap());
        // One end may be over before the other.
        kernel.release(&streams[number % 2]);
        kernel.hot.attend(streams[1 - number % 2].rings().unwrap());
        match number % 3 {
            0 => kernel.unwatch(&streams[1 - number % 2]),
            _ => kernel.release(&streams[1 - number % 2]),
        }
        drop(streams);
        assert_eq!(rings.strong_count(), 0);
        first.get_or_insert(rings);
        assert!(kernel.hot.shortcuts.len() < 9);
    }
}

/// An entry of which one end is over must not keep the poller awake.
#[test]
fn an_end_that_is_over_is_no_news() {
    let (_waker, mut kernel) = kernel();
    let (programs, mut streams) = pairs(&mut kernel, 1);
    let rings = Arc::clone(streams[0].rings().unwrap());
    programs[1].writes(b"for nobody");
    drop(streams.remove(0));
    assert!(rings.is_closed() && rings.look().is_any());
    let mut events = Vec::new();
    kernel.hot.poll(&mut events);
    assert!(events.iter().all(|event| event.key == key(1)));
}

/// TCP answers by a reset if nobody is there to read.
#[test]
fn bytes_for_a_program_that_is_gone_reset_the_connection() {
    let (_waker, mut kernel) = kernel();
    let (mut programs, streams) = pairs(&mut kernel, 1);
    drop(programs.remove(0));
    let mut events = slept(&mut kernel, &streams, Instant(0));
    events.extend(reported_by_all(&mut kernel, &streams));
    assert!(events.iter().any(|event| event.ending && event.key == key(0)));
    assert!(events.iter().all(|event| !event.failed));
    programs[0].writes(b"x");
    let mut events = slept(&mut kernel, &streams, Instant(0));
    events.extend(reported_by_all(&mut kernel, &streams));
    let failed: Vec<_> = events.iter().filter(|event| event.failed).collect();
    assert!(failed.iter().all(|event| event.key == key(0) && event.readable) && !failed.is_empty());
    assert!(reported_by_all(&mut kernel, &streams).is_empty(), "it is news once");
}

#[test]
fn what_passes_by_is_counted() {
    let (_waker, mut kernel) = kernel();
    let (programs, streams) = pairs(&mut kernel, 1);
    programs[0].writes(b"five!");
    programs[1].writes(b"two");
    assert_eq!([0, 1].map(|place| kernel.bypassed(&streams[place])), [(5, 3), (3, 5)]);
    let (_program, near) = pair();
    assert_eq!(kernel.bypassed(&near), (0, 0));
}
