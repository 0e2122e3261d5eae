//! Makes written bytes visible as late and in as random an order as the contract allows.
//!
//! A real NIC may place the packets of a write in any order, and promises only that all are visible
//! when a later message is received. Code that reads memory before the message arrives works on
//! most machines most of the time. Here it fails: a write is split into pieces, and each becomes
//! visible at a random moment before the message that announces it, the last byte perhaps first.

use std::sync::Arc;

use smcr_memory::Region;

use super::world::Writer;
use crate::dice::{Chance, Dice};

/// Pieces of writes that one queue pair has accepted and that are not visible yet.
#[derive(Debug, Default)]
pub(super) struct Hidden {
    pieces: Vec<Pending>,
}

#[derive(Debug)]
struct Pending {
    writer: Arc<Writer>,
    at: usize,
    bytes: Vec<u8>,
    /// The number of the write among the requests of its sender.
    request: u64,
}

impl Hidden {
    /// Accepts a write of `bytes` at offset `at` of a region, which the caller has checked.
    ///
    /// Hidden pieces that it overlaps become visible first, because the last write to a byte wins.
    pub(super) fn add(
        &mut self,
        dice: &mut Dice,
        (writer, at): (&Arc<Writer>, usize),
        bytes: &[u8],
        request: u64,
    ) {
        let end = at + bytes.len();
        self.reveal_where(|old| old.is_in(writer.region()) && old.at < end && at < old.end());
        let mut done = 0;
        while done < bytes.len() {
            let left = bytes.len() - done;
            let len = if dice.roll(SPLIT) { 1 + dice.index(left) } else { left };
            let bytes = bytes[done..done + len].to_vec();
            let writer = Arc::clone(writer);
            self.pieces.push(Pending { writer, at: at + done, bytes, request });
            done += len;
        }
    }

    /// Makes each piece visible with the chance `early`, in random order.
    pub(super) fn reveal_some(&mut self, dice: &mut Dice, early: Chance) {
        let mut index = self.pieces.len();
        while index > 0 {
            index -= 1;
            if dice.roll(early) {
                self.pieces.swap_remove(index).place();
            }
        }
    }

    /// Makes all writes with a lower number than `request` visible.
    pub(super) fn reveal_before(&mut self, request: u64) {
        self.reveal_where(|piece| piece.request < request);
    }

    /// Makes all writes to `region` visible.
    pub(super) fn reveal_region(&mut self, region: &Region) {
        self.reveal_where(|piece| piece.is_in(region));
    }

    /// The queue pair broke: each piece becomes visible now or never.
    pub(super) fn settle(&mut self, dice: &mut Dice) {
        self.reveal_some(dice, Chance::percent(50));
        self.pieces.clear();
    }

    fn reveal_where(&mut self, mut due: impl FnMut(&Pending) -> bool) {
        self.pieces.retain(|piece| {
            let due = due(piece);
            if due {
                piece.place();
            }
            !due
        });
    }
}

impl Pending {
    fn end(&self) -> usize {
        self.at + self.bytes.len()
    }

    fn is_in(&self, region: &Region) -> bool {
        self.writer.region().address() == region.address()
    }

    fn place(&self) {
        self.writer.write(self.at, &self.bytes);
    }
}

/// How likely the rest of a write is split once more.
const SPLIT: Chance = Chance::percent(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(region: &Region, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        region.copy_out(0, &mut out);
        out
    }

    /// The last write to a byte wins, however late the first one becomes visible.
    #[test]
    fn an_overwritten_byte_does_not_come_back() {
        for seed in 0..100 {
            let (mut dice, mut hidden) = (Dice::new(seed), Hidden::default());
            let region = Region::new(4096).unwrap();
            let writer = Arc::new(Writer::Placer(region.placer()));
            hidden.add(&mut dice, (&writer, 0), &[1; 100], 0);
            hidden.add(&mut dice, (&writer, 50), &[2; 100], 1);
            hidden.reveal_some(&mut dice, Chance::percent(50));
            hidden.reveal_before(2);
            assert_eq!(bytes_of(&region, 150), [[1; 50], [2; 50], [2; 50]].concat());
        }
    }

    #[test]
    fn a_write_may_stay_hidden_until_its_message_and_later_ones_stay_hidden_then() {
        let (mut dice, mut hidden) = (Dice::new(3), Hidden::default());
        let region = Region::new(4096).unwrap();
        let writer = Arc::new(Writer::Placer(region.placer()));
        hidden.add(&mut dice, (&writer, 0), &[1; 10], 0);
        hidden.add(&mut dice, (&writer, 10), &[2; 10], 2);
        hidden.reveal_some(&mut dice, Chance::NEVER);
        assert_eq!(bytes_of(&region, 20), [0; 20]);
        hidden.reveal_before(1);
        assert_eq!(bytes_of(&region, 20), [[1; 10], [0; 10]].concat());
        hidden.reveal_region(&region);
        assert_eq!(bytes_of(&region, 20), [[1; 10], [2; 10]].concat());
    }

    /// A reader that looks too early must be able to see the end of a write without its start.
    #[test]
    fn the_end_of_a_write_may_appear_before_its_start() {
        let torn = (0..100).any(|seed| {
            let (mut dice, mut hidden) = (Dice::new(seed), Hidden::default());
            let region = Region::new(4096).unwrap();
            let writer = Arc::new(Writer::Placer(region.placer()));
            hidden.add(&mut dice, (&writer, 0), &[1; 100], 0);
            hidden.reveal_some(&mut dice, Chance::percent(50));
            let seen = bytes_of(&region, 100);
            seen[0] == 0 && seen[99] == 1
        });
        assert!(torn);
    }
}
