//! How fast one connection may carry bytes, and whether it waits because of that.

use std::sync::Arc;

use smcr_proto::Instant;

use crate::allowance::{Allowance, Way};
use crate::names::ConnectionId;
use crate::paced::{Paced, Waited, Waiter};
use crate::turn::Turn;

/// What one connection has carried, as far as that is limited.
#[derive(Debug)]
pub(crate) struct Pace {
    allowance: Option<Arc<Allowance>>,
    /// Whether there was a limit at the last look.
    is_limited: bool,
    /// Until when what it has carried is paid for, by its own bucket.
    paid_until: [Instant; 2],
    /// It is among the [`Paced`].
    waits: [bool; 2],
    /// It has waited in line, this is its turn, and it has carried nothing yet.
    called: [bool; 2],
    /// How often it has left: what still waits there in its name counts no more.
    stay: u16,
}

impl Pace {
    /// The pace of a connection that has carried nothing yet.
    pub(crate) fn new(allowance: Option<Arc<Allowance>>) -> Self {
        let is_limited = allowance.as_ref().is_some_and(|it| it.is_limited());
        let (paid_until, waits, called) = ([Instant(0); 2], [false; 2], [false; 2]);
        Self { allowance, is_limited, paid_until, waits, called, stay: 0 }
    }

    /// Looks whether there is a limit now. Returns whether there is none any more.
    pub(crate) fn refresh(&mut self) -> bool {
        let before = self.is_limited;
        self.is_limited = self.allowance.as_ref().is_some_and(|it| it.is_limited());
        let is_lifted = before && !self.is_limited;
        if is_lifted {
            self.leave();
        }
        is_lifted
    }

    /// The connection waits no more: it leaves the poller, or has no limit.
    pub(crate) fn leave(&mut self) {
        (self.waits, self.called) = ([false; 2], [false; 2]);
        self.stay = self.stay.wrapping_add(1);
    }

    /// The next stream of the connection has carried nothing yet. What still waits in the name of
    /// one before counts no more.
    pub(crate) fn begin_anew(&mut self, allowance: Option<Arc<Allowance>>) {
        let stay = self.stay.wrapping_add(1);
        *self = Self { stay, ..Self::new(allowance) };
    }

    /// Whether it waits until it may carry more in this direction.
    pub(crate) fn waits(&self, way: Way) -> bool {
        self.waits[way as usize]
    }

    /// Whether it waits in any direction: then it has something to carry, as far as it knows.
    pub(crate) fn is_waiting(&self) -> bool {
        self.waits.contains(&true)
    }

    /// Whether it still waits as this one.
    pub(crate) fn waits_as(&self, one: Waiter) -> bool {
        one.stay == self.stay && self.waits(one.way)
    }

    /// Its wait is over. Returns whether it has still waited.
    pub(crate) fn call(&mut self, one: Waiter, waited: Waited) -> bool {
        let has_waited = self.waits_as(one);
        if has_waited {
            self.waits[one.way as usize] = false;
            // Who has waited for its own bucket goes to the end of the line for the other.
            self.called[one.way as usize] |= waited == Waited::InLine;
        }
        has_waited
    }

    /// How many bytes it may carry now. Zero: it waits, and has its turn when that is over.
    #[inline]
    pub(crate) fn grant<S>(&mut self, turn: &mut Turn<'_, S>, id: ConnectionId, way: Way) -> u32 {
        if !self.is_limited {
            return u32::MAX;
        }
        let granted = self.grant_limited(turn.now, (id, way), &mut turn.work.paced);
        granted.unwrap_or_else(|| {
            turn.counters.paced.add(1);
            0
        })
    }

    /// How many bytes it may carry now, zero if it waits already; none if it begins to wait.
    #[cold]
    fn grant_limited(
        &mut self,
        now: Instant,
        (id, way): (ConnectionId, Way),
        paced: &mut Paced,
    ) -> Option<u32> {
        if self.waits(way) {
            return Some(0);
        }
        let allowance = self.allowance.as_ref().expect("whoever is limited has one");
        let is_called = self.called[way as usize];
        let own = allowance
            .each()
            .map_or(Ok(u32::MAX), |rate| rate.grant(now, self.paid_until[way as usize]));
        let shared = match own {
            Ok(_) => paced.grant(now, (allowance, way), is_called),
            Err(_) => Ok(u32::MAX),
        };
        let one = Waiter { id, way, stay: self.stay };
        match (own, shared) {
            (Ok(own), Ok(shared)) => return Some(own.min(shared)),
            (Err(at), _) => paced.wait_until(at, one),
            (Ok(_), Err(at)) => {
                self.called[way as usize] = false;
                paced.join_line((now, at), one, allowance, is_called);
            }
        }
        self.waits[way as usize] = true;
        None
    }

    /// It has carried so many bytes.
    #[inline]
    pub(crate) fn charge(&mut self, now: Instant, paced: &mut Paced, way: Way, bytes: u64) {
        if self.is_limited && bytes > 0 {
            self.charge_limited(now, paced, way, bytes);
        }
    }

    #[cold]
    fn charge_limited(&mut self, now: Instant, paced: &mut Paced, way: Way, bytes: u64) {
        let allowance = self.allowance.as_ref().expect("whoever is limited has one");
        self.called[way as usize] = false;
        paced.charge(now, (allowance, way), bytes);
        if let Some(rate) = allowance.each() {
            let paid_until = &mut self.paid_until[way as usize];
            *paid_until = rate.charge(now, *paid_until, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(micros: u64) -> Instant {
        Instant(micros * 1_000)
    }

    /// A connection that always has something to carry.
    struct Stream {
        id: ConnectionId,
        pace: Pace,
        carried: u64,
    }

    impl Stream {
        fn new(slot: u16, allowance: &Arc<Allowance>) -> Self {
            let pace = Pace::new(Some(Arc::clone(allowance)));
            Self { id: ConnectionId { slot, generation: 1 }, pace, carried: 0 }
        }

        /// Carries once, if it may.
        fn carry(&mut self, now: Instant, paced: &mut Paced) -> bool {
            let granted = self.pace.grant_limited(now, (self.id, Way::In), paced).unwrap_or(0);
            let len = u64::from(granted.min(READ));
            self.pace.charge(now, paced, Way::In, len);
            self.carried += len;
            len > 0
        }
    }

    /// A poller that sees what it waits for so much too late, and its streams.
    struct Poller {
        paced: Paced,
        streams: Vec<Stream>,
        late: Duration,
        wakes_at: Instant,
    }

    impl Poller {
        fn turn(&mut self, now: Instant) {
            for stream in &mut self.streams {
                stream.carry(now, &mut self.paced);
            }
            while let Some((one, waited)) = self.paced.next(now) {
                let stream = self.streams.iter_mut().find(|it| it.id == one.id).unwrap();
                if stream.pace.call(one, waited) {
                    stream.carry(now, &mut self.paced);
                }
            }
            let is_busy = self.streams.iter().any(|it| !it.pace.is_waiting());
            let wakes_at = if is_busy { None } else { self.paced.next_deadline() };
            self.wakes_at = match wakes_at {
                Some(at) => at.max(now) + self.late,
                None => now + Duration::from_micros(20),
            };
        }
    }

    const READ: u32 = 131_072;

    /// Two pollers share what a listener may carry: the one that is a little faster, because it
    /// spins or has its core alone, took all of it.
    #[test]
    fn a_slow_poller_has_its_part() {
        for (rate, seconds) in [(8_000, 600), (1_000_000, 20), (100_000_000, 4), (2_500_000_000, 2)]
        {
            for crowds in [[1, 1], [9, 1], [1, 9]] {
                let allowance = Arc::new(Allowance::default());
                allowance.set(rate, 0);
                let mut slot = 0..;
                let mut pollers = [(crowds[0], 0), (crowds[1], 70)].map(|(crowd, late)| Poller {
                    paced: Paced::default(),
                    streams: slot
                        .by_ref()
                        .take(crowd)
                        .map(|it| Stream::new(it, &allowance))
                        .collect(),
                    late: Duration::from_micros(late),
                    wakes_at: at(1_000_000),
                });
                let end = at(1_000_000 * (seconds + 1));
                loop {
                    let next = pollers.iter_mut().min_by_key(|it| it.wakes_at).unwrap();
                    let now = next.wakes_at;
                    if now >= end {
                        break;
                    }
                    next.turn(now);
                }
                let carried = pollers.iter().flat_map(|it| &it.streams).map(|it| it.carried);
                let carried: Vec<u64> = carried.collect();
                let (sum, each) = (carried.iter().sum::<u64>(), rate * seconds / 10);
                let each = if crowds == [1, 1] { 5 * each } else { each };
                let fair = each * 2 / 3..=each * 3 / 2;
                assert!(carried.iter().all(|one| fair.contains(one)), "{rate} {carried:?}");
                assert!(sum >= rate * seconds * 98 / 100, "{rate} {crowds:?}: {sum}");
            }
        }
    }

    /// Somebody who could not carry anything when its turn had come, because a link was busy, had
    /// to wait for all others once more.
    #[test]
    fn a_turn_lasts_until_it_is_used() {
        let allowance = Arc::new(Allowance::default());
        allowance.set(1_000_000, 0);
        let (mut paced, now) = (Paced::default(), at(1_000_000));
        let mut streams = [1, 2, 3].map(|slot| Stream::new(slot, &allowance));
        while streams[0].carry(now, &mut paced) {}
        streams[1..].iter_mut().for_each(|it| assert!(!it.carry(now, &mut paced)));
        let now = paced.next_deadline().unwrap();
        let (one, waited) = paced.next(now).unwrap();
        assert!(one.id == streams[0].id && streams[0].pace.call(one, waited));
        for _ in 0..3 {
            let granted = streams[0].pace.grant_limited(now, (one.id, Way::In), &mut paced);
            assert!(granted > Some(0), "there was an obstacle: it tries again");
        }
        // Another poller has used up what there was: it stays the first.
        allowance.charge(now, Way::In, 10_000);
        assert!(!streams[0].carry(now, &mut paced));
        let now = allowance.grant(now, Way::In).unwrap_err();
        assert_eq!(paced.next(now).map(|(one, _)| one.id), Some(streams[0].id));
        assert!(streams[0].pace.call(one, waited) && streams[0].carry(now, &mut paced));
        assert!(!streams[0].carry(now, &mut paced), "once it has used it, others follow");
        let (one, _) = paced.next(now + Duration::from_millis(20)).unwrap();
        assert_eq!(one.id, streams[1].id);
    }

    /// A link that fails and comes back takes a connection to another poller and home again. Each
    /// time it had one more place in the line.
    #[test]
    fn who_comes_back_has_one_place() {
        let allowance = Arc::new(Allowance::default());
        allowance.set(8_000, 0);
        let (mut paced, mut now) = (Paced::default(), at(1_000_000));
        let mut streams = [1, 2].map(|slot| Stream::new(slot, &allowance));
        for stream in &mut streams {
            while stream.carry(now, &mut paced) {}
        }
        for _ in 0..3 {
            streams[0].pace.leave();
            assert!(!streams[0].carry(now, &mut paced) && streams[0].pace.is_waiting());
        }
        let turns = [(); 6].map(|()| {
            now = now + Duration::from_secs(1);
            let stream = std::iter::from_fn(|| paced.next(now)).find_map(|(one, waited)| {
                let index = streams.iter().position(|it| it.id == one.id).unwrap();
                streams[index].pace.call(one, waited).then_some(index)
            });
            let stream = &mut streams[stream.unwrap()];
            while stream.carry(now, &mut paced) {}
            stream.id.slot
        });
        assert_eq!(turns, [2, 1, 2, 1, 2, 1]);
    }

    /// A connection has a rate of its own and shares one with others: while it waits for its own,
    /// it keeps no place before them.
    #[test]
    fn who_has_waited_alone_goes_to_the_end_of_the_line() {
        let allowance = Arc::new(Allowance::default());
        allowance.set(1_000_000, 100_000);
        let (mut paced, now) = (Paced::default(), at(1_000_000));
        let mut first = Stream::new(1, &allowance);
        while first.carry(now, &mut paced) {}
        assert!(first.pace.is_waiting());
        allowance.charge(now, Way::In, 1_000_000);
        let mut second = Stream::new(2, &allowance);
        assert!(!second.carry(now, &mut paced));
        let due = now + Duration::from_millis(500);
        let (one, waited) = paced.next(due).unwrap();
        assert_eq!((one.id, waited), (first.id, Waited::Alone));
        assert!(first.pace.call(one, waited) && !first.carry(due, &mut paced));
        let later = now + Duration::from_secs(2);
        let order = [(); 2].map(|()| paced.next(later).unwrap());
        assert_eq!(order.map(|(one, _)| one.id), [second.id, first.id]);
        assert!(order.iter().all(|(_, waited)| *waited == Waited::InLine));
    }
}
