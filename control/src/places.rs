//! How many rendezvous go on at once, and which connections wait for one of these places.
//!
//! A burst of new connections is over in a second or two, but a connection that stays TCP because
//! of it may last for months. So new connections wait, in one queue per listener. They wait here
//! and not in the kernel's backlog, because that is short (`somaxconn`), and a client repeats a SYN
//! that found no room only a second later. `connections_max` bounds how many wait.
//!
//! A peer that keeps silent takes no place: where we are the server, a connection takes its place
//! when the Proposal has arrived.

use std::collections::VecDeque;
use std::time::Duration;

use smcr_proto::Instant;

use crate::slab::Key;

/// The places of all listeners, and the queues of those who wait for them.
#[derive(Debug)]
pub struct Places {
    max: usize,
    /// Each listener gets so many even when the others have taken all, so that connections to an
    /// upstream that does not answer do not block those to another.
    share: usize,
    taken: usize,
    /// How long a connection waits at most.
    patience: Duration,
    lines: Vec<Queue>,
    /// The queue that is served next.
    turn: usize,
}

#[derive(Debug, Default)]
struct Queue {
    taken: usize,
    waiting: VecDeque<(Instant, Key)>,
}

impl Places {
    /// `max` places for `lines` listeners, of which `contenders` need places at all.
    pub fn new(max: usize, lines: usize, contenders: usize, patience: Duration) -> Self {
        let mut places = Self { max, share: 1, taken: 0, patience, lines: Vec::new(), turn: 0 };
        places.change(max, lines, contenders, patience);
        places
    }

    /// From now on there are so many places, for so many listeners; connections that have one keep
    /// it.
    ///
    /// # Panics
    ///
    /// If there were more listeners before.
    pub fn change(&mut self, max: usize, lines: usize, contenders: usize, patience: Duration) {
        assert!(lines >= self.lines.len(), "a listener may have connections when it is gone");
        self.lines.resize_with(lines, Queue::default);
        self.share = (max / contenders.max(1)).max(1);
        (self.max, self.patience) = (max, patience);
    }

    /// Takes a place for a connection of a listener, if one is free and no other connection of that
    /// listener waits for it.
    pub fn take(&mut self, line: u16) -> bool {
        let line = usize::from(line);
        let free = self.lines[line].waiting.is_empty() && self.is_free(line);
        if free {
            self.count(line);
        }
        free
    }

    /// Puts a connection at the end of the queue of its listener.
    pub fn wait(&mut self, now: Instant, line: u16, key: Key) {
        self.lines[usize::from(line)].waiting.push_back((now, key));
    }

    /// Gives a free place to the next connection that waits; the listeners take turns. If that
    /// connection is over by now, the caller must [`leave`](Self::leave) the place.
    pub fn admit(&mut self) -> Option<(u16, Key)> {
        let lines = self.lines.len();
        let mut order = (0..lines).map(|step| (self.turn + step) % lines);
        let line =
            order.find(|line| !self.lines[*line].waiting.is_empty() && self.is_free(*line))?;
        let (_, key) = self.lines[line].waiting.pop_front().expect("it was found waiting");
        self.turn = (line + 1) % lines;
        self.count(line);
        Some((u16::try_from(line).expect("listeners are numbered so"), key))
    }

    /// Takes a connection that has waited for too long out of its queue. It has no place.
    pub fn give_up(&mut self, now: Instant) -> Option<Key> {
        let patience = self.patience;
        let mut lines = self.lines.iter_mut();
        lines.find_map(|line| {
            let (_, key) = line.waiting.pop_front_if(|(since, _)| now.since(*since) >= patience)?;
            Some(key)
        })
    }

    /// When [`give_up`](Self::give_up) must be called, at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let first = self.lines.iter().filter_map(|line| line.waiting.front()).min();
        first.map(|(since, _)| *since + self.patience)
    }

    /// Gives a place back.
    ///
    /// # Panics
    ///
    /// If more come back than were taken.
    pub fn leave(&mut self, line: u16) {
        let line = &mut self.lines[usize::from(line)];
        assert!(line.taken > 0 && self.taken > 0, "a place is left by who took it");
        line.taken -= 1;
        self.taken -= 1;
    }

    fn is_free(&self, line: usize) -> bool {
        self.taken < self.max || self.lines[line].taken < self.share
    }

    fn count(&mut self, line: usize) {
        self.lines[line].taken += 1;
        self.taken += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);
    const START: Instant = Instant(1);

    fn key(index: u32) -> Key {
        Key { index, generation: 0 }
    }

    /// Newcomers get places in the order in which they came, also when one is free for a moment
    /// while others wait.
    #[test]
    fn a_line_is_served_in_order() {
        let mut places = Places::new(2, 1, 1, PATIENCE);
        assert!(places.take(0) && places.take(0) && !places.take(0));
        places.wait(START, 0, key(1));
        places.wait(START, 0, key(2));
        assert_eq!(places.admit(), None);
        places.leave(0);
        assert!(!places.take(0), "others came first");
        assert_eq!(places.admit(), Some((0, key(1))));
        assert_eq!(places.admit(), None);
        places.leave(0);
        places.leave(0);
        assert_eq!(places.admit(), Some((0, key(2))));
        assert!(places.take(0));
    }

    /// An upstream that does not answer must not keep connections to others from becoming SMC-R,
    /// and a crowd at one listener not those few that come to another.
    #[test]
    fn no_listener_locks_another_out() {
        let mut places = Places::new(4, 3, 2, PATIENCE);
        for _ in 0..4 {
            assert!(places.take(0), "who is alone may have all");
        }
        assert!(!places.take(0));
        assert!(places.take(2) && places.take(2), "its share");
        assert!(!places.take(2));
        for index in 0..4 {
            places.wait(START, 0, key(index));
        }
        places.wait(START, 2, key(9));
        for _ in 0..4 {
            places.leave(0);
        }
        let admitted = [(); 3].map(|()| places.admit());
        let expected = [(0, key(0)), (2, key(9)), (0, key(1))];
        assert_eq!(admitted, expected.map(Some), "they take turns, and each has its share");
        assert_eq!(places.admit(), None);
    }

    /// Nobody waits for ever: the connection stays TCP instead.
    #[test]
    fn who_has_waited_long_enough_is_told_so() {
        let mut places = Places::new(1, 2, 2, PATIENCE);
        assert!(places.take(0) && places.take(1));
        places.wait(START, 0, key(1));
        places.wait(START + PATIENCE / 2, 0, key(2));
        assert_eq!(places.give_up(START + PATIENCE / 2), None);
        assert_eq!(places.give_up(START + PATIENCE), Some(key(1)));
        assert_eq!(places.give_up(START + PATIENCE), None);
        places.leave(0);
        assert_eq!(places.admit(), Some((0, key(2))));
    }
}
