//! Connections that wait because a limit is reached: a line for each source.
//!
//! Sources have their turn one after the other, so nobody waits for all connections of another. If
//! there is no room, the source that has most loses its newest.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use smcr_proto::Instant;

use crate::sources::source_of;

/// Those that wait.
#[derive(Debug)]
pub struct Waiting<T> {
    lines: HashMap<IpAddr, VecDeque<(Instant, T)>>,
    /// The sources that have a line, in the order of their turns.
    turns: VecDeque<IpAddr>,
    len: usize,
    max: usize,
    look_at: Instant,
    /// All of them wait because of limits of their own sources, as far as is known.
    by_own_limits: bool,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self::of(WAITING_MAX as usize)
    }
}

impl<T> Waiting<T> {
    /// A queue for `max`.
    fn of(max: usize) -> Self {
        let (lines, turns) = (HashMap::new(), VecDeque::new());
        Self { lines, turns, len: 0, max, look_at: Instant(0), by_own_limits: true }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many of `source` there are.
    pub fn of_source(&self, source: IpAddr) -> usize {
        self.lines.get(&source_of(source)).map_or(0, VecDeque::len)
    }

    /// Whether a newcomer of `source` that exceeds no limit must wait all the same, because others
    /// wait for the same places, or because it is not the first of its source.
    pub fn precede(&self, source: IpAddr) -> bool {
        !self.is_empty() && (!self.by_own_limits || self.of_source(source) > 0)
    }

    /// All of them must wait: a limit is reached that is not their own.
    pub fn hold_all(&mut self) {
        self.by_own_limits = false;
    }

    /// When it is time to look whose turn it is, at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        (!self.is_empty()).then_some(self.look_at)
    }

    /// Somebody looks now, and comes back soon.
    pub fn looked(&mut self, now: Instant) {
        self.look_at = now + LOOK_EVERY;
    }

    /// Adds one of `source`, which waits until `until`, for a limit of its own or of all. Returns
    /// the one that finds no room: it, or the newest of the source that has most.
    #[must_use = "whoever finds no room must be refused"]
    pub fn enter(&mut self, source: IpAddr, until: Instant, own: bool, one: T) -> Option<T> {
        let source = source_of(source);
        let mut displaced = None;
        if self.len >= self.max {
            let room = self.busiest().filter(|(len, _)| self.of_source(source) + 1 < *len);
            let Some((_, busiest)) = room else { return Some(one) };
            displaced = self.displace(busiest);
        }
        // Whoever stands in the line of its source waits for what the first one waits for.
        let own = own || self.lines.contains_key(&source);
        self.by_own_limits = own && (self.is_empty() || self.by_own_limits);
        let line = self.lines.entry(source).or_default();
        if line.is_empty() {
            self.turns.push_back(source);
        }
        line.push_back((until, one));
        self.len += 1;
        displaced
    }

    /// The source that has most, and how many that are.
    pub fn busiest(&self) -> Option<(usize, IpAddr)> {
        self.lines.iter().map(|(source, line)| (line.len(), *source)).max()
    }

    /// Takes the newest of `source` out.
    pub fn displace(&mut self, source: IpAddr) -> Option<T> {
        let line = self.lines.get_mut(&source)?;
        let (_, newest) = line.pop_back()?;
        self.len -= 1;
        if line.is_empty() {
            self.lines.remove(&source);
            self.turns.retain(|other| *other != source);
        }
        Some(newest)
    }

    /// The one whose turn it is, of the sources that `may` have one.
    pub fn next(&mut self, may: impl Fn(IpAddr) -> bool) -> Option<T> {
        for _ in 0..self.turns.len() {
            let source = self.turns.pop_front()?;
            let line = self.lines.get_mut(&source).expect("who has turns has a line");
            let found = if may(source) { line.pop_front() } else { None };
            match line.is_empty() {
                true => drop(self.lines.remove(&source)),
                false => self.turns.push_back(source),
            }
            if let Some((_, one)) = found {
                self.len -= 1;
                // Others may have their turn as well.
                self.by_own_limits = false;
                return Some(one);
            }
        }
        self.by_own_limits = true;
        None
    }

    /// Those that have waited for too long at `now`.
    pub fn expire(&mut self, now: Instant) -> Vec<T> {
        let mut late = Vec::new();
        for line in self.lines.values_mut() {
            while let Some((_, one)) = line.pop_front_if(|(until, _)| *until <= now) {
                late.push(one);
            }
        }
        self.lines.retain(|_, line| !line.is_empty());
        self.turns.retain(|source| self.lines.contains_key(source));
        self.len -= late.len();
        late
    }
}

/// Connections of one listener that wait, at most; each holds a descriptor.
pub(super) const WAITING_MAX: u32 = 1_024;
/// How often somebody looks whose turn it is.
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    fn source(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    const NEVER: Instant = Instant(u64::MAX);

    /// Somebody who opens a thousand connections at once waits for them, and nobody else does.
    #[test]
    fn sources_have_their_turn_one_after_the_other() {
        let mut waiting = Waiting::of(10);
        for one in 0..4 {
            assert_eq!(waiting.enter(source(1), NEVER, false, one), None);
        }
        assert_eq!(waiting.enter(source(2), NEVER, false, 10), None);
        assert_eq!(waiting.enter(source(3), NEVER, false, 20), None);
        let mut order = Vec::new();
        while let Some(one) = waiting.next(|_| true) {
            order.push(one);
        }
        assert_eq!(order, [0, 10, 20, 1, 2, 3]);
        assert!(waiting.is_empty() && waiting.lines.is_empty() && waiting.turns.is_empty());
    }

    /// Who exceeds a limit of its own is passed over.
    #[test]
    fn a_source_that_must_wait_longer_blocks_nobody() {
        let mut waiting = Waiting::of(10);
        for (last, one) in [(1, 1), (2, 2), (1, 3)] {
            assert_eq!(waiting.enter(source(last), NEVER, false, one), None);
        }
        assert_eq!(waiting.next(|from| from != source(1)), Some(2));
        assert_eq!(waiting.next(|from| from != source(1)), None);
        assert_eq!((waiting.len(), waiting.next(|_| true)), (2, Some(1)));
    }

    /// A crowd of one source must not take the places of all others.
    #[test]
    fn without_room_the_source_that_has_most_loses_its_newest() {
        let mut waiting = Waiting::of(3);
        for one in 0..3 {
            assert_eq!(waiting.enter(source(1), NEVER, false, one), None);
        }
        assert_eq!(waiting.enter(source(1), NEVER, false, 3), Some(3), "its own crowd");
        assert_eq!(waiting.enter(source(2), NEVER, false, 10), Some(2));
        assert_eq!(waiting.enter(source(3), NEVER, false, 20), Some(1));
        assert_eq!(
            waiting.enter(source(4), NEVER, false, 30),
            Some(30),
            "nobody has more than its share"
        );
        assert_eq!((waiting.len(), waiting.next(|_| true)), (3, Some(0)));
    }

    /// One client that had as many connections as it may have, and one more, delayed everybody.
    #[test]
    fn who_waits_for_a_limit_of_its_own_precedes_nobody_else() {
        let mut waiting = Waiting::of(10);
        assert!(!waiting.precede(source(1)));
        assert_eq!(waiting.enter(source(1), NEVER, true, 1), None);
        assert_eq!([1, 2].map(|last| waiting.precede(source(last))), [true, false]);
        // Somebody waits for what all want.
        assert_eq!(waiting.enter(source(2), NEVER, false, 2), None);
        assert_eq!(waiting.enter(source(1), NEVER, true, 3), None);
        assert!(waiting.precede(source(3)));
        // As long as somebody has its turn, more may have.
        assert_eq!(waiting.next(|from| from == source(2)), Some(2));
        assert!(waiting.precede(source(3)));
        assert_eq!(waiting.next(|from| from == source(2)), None);
        assert!(!waiting.precede(source(3)) && waiting.precede(source(1)));
        waiting.hold_all();
        assert!(waiting.precede(source(3)));
        assert_eq!(waiting.expire(NEVER).len(), 2);
        assert!(!waiting.precede(source(3)) && !waiting.precede(source(1)));
    }

    #[test]
    fn the_newest_of_the_busiest_goes_first() {
        let mut waiting = Waiting::of(10);
        assert_eq!(waiting.busiest(), None);
        for (last, one) in [(1, 1), (2, 2), (1, 3)] {
            assert_eq!(waiting.enter(source(last), NEVER, false, one), None);
        }
        assert_eq!(waiting.busiest(), Some((2, source(1))));
        assert_eq!([3, 1].map(|_| waiting.displace(source(1))), [Some(3), Some(1)]);
        assert_eq!((waiting.displace(source(1)), waiting.of_source(source(1))), (None, 0));
        assert_eq!((waiting.len(), waiting.turns.len()), (1, 1));
        assert_eq!(waiting.next(|_| true), Some(2));
    }

    #[test]
    fn who_waits_too_long_is_found() {
        let mut waiting = Waiting::of(3);
        assert_eq!(waiting.poll_timeout(), None);
        for (until, one) in [(5, 1), (9, 2)] {
            assert_eq!(waiting.enter(source(1), Instant(until), false, one), None);
        }
        assert_eq!(waiting.enter(source(2), Instant(5), false, 3), None);
        waiting.looked(Instant(0));
        assert_eq!(waiting.poll_timeout(), Some(Instant(10_000_000)));
        let mut late = waiting.expire(Instant(5));
        late.sort_unstable();
        assert_eq!((late, waiting.len(), waiting.turns.len()), (vec![1, 3], 1, 1));
        assert_eq!(waiting.expire(Instant(9)), [2]);
        assert_eq!(waiting.poll_timeout(), None);
    }
}
