//! Where listening sockets of local programs are marked.
//!
//! Nobody says when such a socket is gone, and the eBPF program has room for so many places. So
//! these have a budget that leaves room for the listeners of the operator, and the user that has
//! most of them loses the oldest when it is used up. A program that goes on to accept there asks
//! again within seconds, and until then its clients connect by TCP.

use std::collections::HashMap;

use smcr_proto::Instant;

use crate::smc_option::Place;

/// Where listening sockets of local programs are marked.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// Whose, and when they have last asked.
    all: HashMap<Place, (u32, Instant)>,
}

impl Places {
    /// Whether there is room for another.
    pub(super) fn have_room(&self) -> bool {
        self.all.len() < PLACES_MAX
    }

    /// A program of the user `uid` listens at `place`.
    pub(super) fn note(&mut self, now: Instant, place: Place, uid: u32) {
        self.all.insert(place, (uid, now));
    }

    /// The oldest places of the user that has most of them: a part of them, so that the next ones
    /// need not look for room again.
    pub(super) fn displace(&mut self) -> Vec<Place> {
        let mut counts = HashMap::<u32, usize>::new();
        self.all.values().for_each(|(uid, _)| *counts.entry(*uid).or_default() += 1);
        let Some((busiest, count)) = counts.into_iter().max_by_key(|(_, count)| *count) else {
            return Vec::new();
        };
        let of_busiest = self.all.iter().filter(|(_, (uid, _))| *uid == busiest);
        let mut by_age: Vec<_> = of_busiest.map(|(place, (_, asked))| (*asked, *place)).collect();
        by_age.sort_unstable_by_key(|(asked, _)| *asked);
        by_age.truncate(count.div_ceil(DISPLACED_PART));
        let gone: Vec<Place> = by_age.into_iter().map(|(_, place)| place).collect();
        for place in &gone {
            self.all.remove(place);
        }
        gone
    }

    /// All of them; then there is none.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Place> {
        self.all.drain().map(|(place, _)| place)
    }
}

/// Half of what the eBPF program has room for (`places` in `bpf/smc_option.bpf.c`).
const PLACES_MAX: usize = 32_768;
/// Of the places of a user, one in so many makes room.
const DISPLACED_PART: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn place(number: u32) -> Place {
        Place::at(7, number)
    }

    /// A user that listens everywhere must not silence the listeners of others, nor those of the
    /// operator.
    #[test]
    fn who_listens_everywhere_makes_room() {
        let mut places = Places::default();
        let at = |number: u32| Instant(u64::from(number));
        places.note(at(0), place(0), 1000);
        let mut next = 1;
        while places.have_room() {
            places.note(at(next), place(next), 1001);
            next += 1;
        }
        // It still accepts there.
        places.note(at(next), place(1), 1001);
        let gone = places.displace();
        assert_eq!(gone.len(), (PLACES_MAX - 1).div_ceil(DISPLACED_PART));
        assert!(places.have_room() && places.all.len() + gone.len() == PLACES_MAX);
        assert_eq!(gone[..2], [place(2), place(3)], "the oldest first");
        assert!(places.all.contains_key(&place(0)) && places.all.contains_key(&place(1)));
        assert_eq!(places.drain().count(), PLACES_MAX - gone.len());
        assert!(places.displace().is_empty());
    }
}
