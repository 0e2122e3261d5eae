//! Who waits until a link takes more new data.

use std::collections::VecDeque;

/// The slots of connections that wait for one link, each once, the one that has waited longest
/// first. Some of these may have gone on, or be over; whoever has such a slot next has its place,
/// too.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    slots: VecDeque<u16>,
    /// A bit for each slot, up to the last one that ever waited, which says whether it is there. So
    /// those that come, wait and go do not pile up while the link takes nothing.
    noted: Vec<u64>,
}

impl Waiting {
    /// Notes a slot. Returns false if it is there already.
    pub(crate) fn push(&mut self, slot: u16) -> bool {
        let (word, bit) = place(slot);
        if self.noted.len() <= word {
            self.noted.resize(word + 1, 0);
        }
        let is_new = self.noted[word] & bit == 0;
        if is_new {
            self.noted[word] |= bit;
            self.slots.push_back(slot);
        }
        is_new
    }

    /// Takes the slot that has waited longest.
    pub(crate) fn pop(&mut self) -> Option<u16> {
        let slot = self.slots.pop_front()?;
        let (word, bit) = place(slot);
        self.noted[word] &= !bit;
        Some(slot)
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }
}

/// The word and the bit of a slot.
fn place(slot: u16) -> (usize, u64) {
    (usize::from(slot / 64), 1 << (slot % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However often one comes back, it has one place, the first that it took.
    #[test]
    fn each_has_one_place() {
        let mut waiting = Waiting::default();
        let come = [(7, true), (65_535, true), (7, false), (0, true), (65_535, false)];
        for (slot, is_new) in come {
            assert_eq!(waiting.push(slot), is_new, "{slot}");
        }
        assert_eq!((waiting.pop(), waiting.len()), (Some(7), 2));
        assert!(waiting.push(7), "it has had its turn");
        assert_eq!([(); 4].map(|()| waiting.pop()), [Some(65_535), Some(0), Some(7), None]);
        assert!(waiting.is_empty());
    }
}
