//! How many connections each source has, so that no source takes the share of all others.
//!
//! A source is an address. Of an IPv6 address the first 64 bits count, because a host that has one
//! address of such a network can have them all.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use crate::slab::Key;

/// How many connections each source has.
#[derive(Debug, Default)]
pub struct Sources(HashMap<IpAddr, u32>);

impl Sources {
    /// How many connections `source` has.
    pub fn of(&self, source: IpAddr) -> u32 {
        self.0.get(&source_of(source)).copied().unwrap_or(0)
    }

    /// Counts a connection of `source`.
    pub fn enter(&mut self, source: IpAddr) {
        *self.0.entry(source_of(source)).or_default() += 1;
    }

    /// A connection of `source` is over.
    ///
    /// # Panics
    ///
    /// If it has none.
    pub fn leave(&mut self, source: IpAddr) {
        let source = source_of(source);
        let count = self.0.get_mut(&source).expect("who leaves has entered");
        *count -= 1;
        if *count == 0 {
            self.0.remove(&source);
        }
    }
}

/// Connections of peers that offered SMC-R in the SYN and have not sent a Proposal.
///
/// An honest peer sends it at once. A peer that does not holds two descriptors until it times out.
/// So these connections have a budget of their own: when it is exceeded, the source that has the
/// most of them loses its oldest.
#[derive(Debug)]
pub struct Silent {
    max: usize,
    count: usize,
    /// How many there have been so far. It orders them by age.
    entered: u64,
    lines: HashMap<IpAddr, VecDeque<(u64, Key)>>,
}

impl Silent {
    /// A budget of `max` connections.
    pub fn new(max: usize) -> Self {
        Self { max, count: 0, entered: 0, lines: HashMap::new() }
    }

    /// From now on the budget is so large; who is in it stays.
    pub fn change(&mut self, max: usize) {
        self.max = max;
    }

    /// Adds a connection. Returns the one that must be reset to make room for it, if the budget is
    /// exceeded; that one is forgotten already.
    #[must_use = "the connection that must be reset has two sockets"]
    pub fn enter(&mut self, source: IpAddr, key: Key) -> Option<Key> {
        self.lines.entry(source_of(source)).or_default().push_back((self.entered, key));
        self.entered += 1;
        self.count += 1;
        if self.count <= self.max {
            return None;
        }
        let rank = |line: &VecDeque<(u64, Key)>| (line.len(), Reverse(line.front().map(|it| it.0)));
        let (busiest, line) = self.lines.iter_mut().max_by_key(|(_, line)| rank(line))?;
        let (_, oldest) = line.pop_front().expect("an empty line is none");
        self.count -= 1;
        if line.is_empty() {
            let busiest = *busiest;
            self.lines.remove(&busiest);
        }
        Some(oldest)
    }

    /// The connection has sent its Proposal, or is over. It may have been forgotten before.
    pub fn leave(&mut self, source: IpAddr, key: Key) {
        let source = source_of(source);
        // It may have been displaced, with nobody else of that source left.
        let Some(line) = self.lines.get_mut(&source) else { return };
        // Most connections leave soon after they came, so the search begins with the newest.
        if let Some(at) = line.iter().rposition(|(_, other)| *other == key) {
            line.remove(at);
            self.count -= 1;
        }
        if line.is_empty() {
            self.lines.remove(&source);
        }
    }
}

/// What counts as one source.
pub fn source_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => {
            let network = u128::from(address) >> 64 << 64;
            IpAddr::V6(network.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(index: u32) -> Key {
        Key { index, generation: 0 }
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn what_leaves_counts_no_more_and_one_network_is_one_source() {
        let mut sources = Sources::default();
        for text in ["10.0.0.1", "::ffff:10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2:1"] {
            sources.enter(address(text));
        }
        let of = |sources: &Sources, text| sources.of(address(text));
        assert_eq!([of(&sources, "10.0.0.1"), of(&sources, "10.0.0.2")], [2, 1]);
        assert_eq!([of(&sources, "fd00::3"), of(&sources, "fd00:0:0:1::1")], [2, 0]);
        sources.leave(address("10.0.0.1"));
        sources.leave(address("10.0.0.2"));
        assert_eq!([of(&sources, "10.0.0.1"), of(&sources, "10.0.0.2")], [1, 0]);
    }

    /// A source that opens thousands of connections and says nothing loses its own, oldest first.
    /// Connections of other sources stay, however old they are.
    #[test]
    fn a_crowd_of_silent_connections_displaces_itself() {
        let mut silent = Silent::new(4);
        assert_eq!(silent.enter(address("10.0.0.1"), key(1)), None);
        for index in 2..5 {
            assert_eq!(silent.enter(address("10.0.0.9"), key(index)), None);
        }
        assert_eq!(silent.enter(address("10.0.0.9"), key(5)), Some(key(2)));
        assert_eq!(silent.enter(address("10.0.0.2"), key(6)), Some(key(3)));
        // Who was displaced, and ends, displaces nobody.
        silent.leave(address("10.0.0.9"), key(2));
        silent.leave(address("10.0.0.1"), key(1));
        assert_eq!(silent.enter(address("10.0.0.3"), key(7)), None);
        assert_eq!(silent.enter(address("10.0.0.3"), key(8)), Some(key(4)), "the oldest of equals");
        for (source, index) in [("10.0.0.9", 5), ("10.0.0.2", 6), ("10.0.0.3", 7), ("10.0.0.3", 8)]
        {
            silent.leave(address(source), key(index));
        }
        assert_eq!((silent.count, silent.lines.len()), (0, 0));
    }
}
