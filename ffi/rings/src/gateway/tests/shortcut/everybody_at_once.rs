//! Both programs and the gateway do all they can at the same time.

use std::os::unix::net::UnixStream;

use super::*;

/// A poller that has nothing else to do, until `over` ends.
fn serves(parties: [&Party; 2], over: &UnixStream) {
    let (mut forth, mut back) = (Vec::new(), Vec::new());
    let mut moved = || {
        let [one, other] = parties;
        let counts = [relay_held(one, other, &mut forth), relay_held(other, one, &mut back)];
        for party in parties {
            if party.gateway.must_drain() {
                party.gateway.drain(party.near.as_fd());
            }
            party.gateway.serve(party.near.as_fd());
        }
        counts.iter().any(|(read, put)| read + put > 0)
    };
    let mut is_over = false;
    while !is_over {
        parties.iter().for_each(|party| party.gateway.fall_asleep());
        fence(SeqCst);
        if !parties.iter().any(|party| party.gateway.look().is_any()) {
            let [one, other] = parties;
            let mut fds = [one.near.as_fd(), other.near.as_fd(), over.as_fd()]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            poll(&mut fds, None).unwrap();
            is_over = !fds[2].revents().is_empty();
        }
        parties.iter().for_each(|party| party.gateway.wake_up());
        for party in parties {
            party.gateway.hear(party.near.as_fd(), false);
            party.gateway.drain(party.near.as_fd());
        }
        while moved() {}
    }
}

/// Both programs write and read as much as they can, join at some time, and sleep whenever they
/// have nothing to do. A wake-up that is lost, or a byte at a wrong place, ends the test.
#[test]
fn nobody_sleeps_while_the_other_has_something_to_say() {
    for round in 0_u32..8 {
        let parties = offered();
        let (ends_it, over) = UnixStream::pair().unwrap();
        let [one, other] = &parties;
        std::thread::scope(|scope| {
            let ends: Vec<_> = [one, other]
                .into_iter()
                .enumerate()
                .flat_map(|(place, party)| {
                    let late = 30 * round * (1 + u32::try_from(place).unwrap());
                    let program = joins_later(party, late);
                    let (reads, writes) = (program.clone(), program);
                    [
                        scope.spawn(move || read_all(&*reads, &party.app)),
                        scope.spawn(move || write_all_of(&*writes, &party.app)),
                    ]
                })
                .collect();
            scope.spawn(move || serves([one, other], &over));
            let results: Vec<_> =
                ends.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            drop(ends_it);
            assert!(results.iter().all(Result::is_ok), "round {round}");
        });
        let totals = one.gateway.short_totals();
        assert!(totals.0 > 0 && totals.1 > 0, "they have turned: {totals:?}");
    }
}

type Rings = dyn Fn(usize) -> Application + Send + Sync;

/// What a program has of its rings when so much has come or gone: when it was asked `late` times,
/// it has a shortcut. Threads that wait for each other in large steps ask seldom, so it has one at
/// half-time in any case: enough is left then to go by it.
fn joins_later(party: &Party, late: u32) -> Arc<Rings> {
    let (gateway, program) = (Arc::clone(&party.gateway), party.program);
    let app = party.app.try_clone().unwrap();
    let (shortcut, asked) = (OnceLock::new(), AtomicU32::new(0));
    Arc::new(move |done| {
        let is_early = || done < TOTAL / 2 && asked.fetch_add(1, SeqCst) < late;
        if shortcut.get().is_none() && is_early() {
            return program;
        }
        let map = || {
            let number = program.word(Word::Offered).load(SeqCst);
            let shortcut = Shortcut::map(gateway.shortcut_memory().unwrap(), number).unwrap();
            program.with(Some(shortcut)).join(app.as_fd());
            shortcut
        };
        program.with(Some(*shortcut.get_or_init(map)))
    })
}

fn write_all_of(rings: &Rings, app: &OwnedFd) {
    let (mut sent, mut lens) = (0, [1, 64, 5000, 200_000].into_iter().cycle());
    while sent < TOTAL {
        let len = lens.next().unwrap();
        let bytes = pattern(sent, usize::min(len, TOTAL - sent));
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let written = rings(sent).write_slice(app.as_fd(), rest, thread());
            // Another thread has just joined.
            rest = &rest[written.unwrap_or(0)..];
            if !rest.is_empty() && rings(sent).make_unwritable(app.as_fd()) {
                let seen = sees(app, PollFlags::OUT, 20);
                assert!(seen.contains(PollFlags::OUT), "room, at {sent}");
            }
        }
        sent += bytes.len();
    }
}
