//! What each source of connections has: nobody takes the places of all others.
//!
//! A source is an address; of IPv6 the first 64 bits, because whoever has one address of such a
//! network has them all.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use crate::slab::Key;

/// How many connections each source has.
#[derive(Debug, Default)]
pub struct Sources(HashMap<IpAddr, u32>);

impl Sources {
    /// How many connections it has.
    pub fn of(&self, source: IpAddr) -> u32 {
        self.0.get(&source_of(source)).copied().unwrap_or(0)
    }

    /// It has one more.
    pub fn enter(&mut self, source: IpAddr) {
        *self.0.entry(source_of(source)).or_default() += 1;
    }

    /// It has one less.
    ///
    /// # Panics
    ///
    /// If it had none.
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
/// An honest peer sends it at once. Those that do not hold two descriptors each until they time
/// out, so there is a budget for them, apart from that of connections: beyond it the oldest goes,
/// of the source that has the most.
#[derive(Debug)]
pub struct Silent {
    max: usize,
    count: usize,
    /// How many there ever were: tells who came first.
    entered: u64,
    lines: HashMap<IpAddr, VecDeque<(u64, Key)>>,
}

impl Silent {
    /// A budget of `max` connections.
    pub fn new(max: usize) -> Self {
        Self { max, count: 0, entered: 0, lines: HashMap::new() }
    }

    /// One more. Returns who must go for it, who is in no line any more.
    #[must_use = "who must go has two sockets"]
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

    /// It has sent its Proposal, or is over. Somebody who had to go has left already.
    pub fn leave(&mut self, source: IpAddr, key: Key) {
        let source = source_of(source);
        let Some(line) = self.lines.get_mut(&source) else { return };
        // Most leave soon after they came.
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
fn source_of(address: IpAddr) -> IpAddr {
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

    /// Whoever opens connections by the thousand and says nothing loses his own, oldest first, and
    /// nobody else's, however long those have been there.
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
