//! The RToken of each RMB on each link, for our RMBs and for the peer's (RFC 3.5.5.2).

use crate::limits::{LINKS_PER_GROUP_MAX, OUR_RMBS_MAX, RMBS_PER_GROUP_MAX};
use crate::vocabulary::Rkey;
use crate::wire::llc::add_link::RkeyPair;

/// Names an RMB of ours within a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RmbIndex(pub u8);

/// No more RMBs of the peer can be remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// Where an RMB is on one link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token {
    pub(super) rkey: Rkey,
    pub(super) address: u64,
}

/// The RTokens of one RMB, one for each link, by the link's place in the group.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Row {
    /// One bit for each link on which its RToken is known.
    pub(super) present: u8,
    // In arrays of their own: a group has hundreds of rows, and pairs would be padded.
    rkeys: [Rkey; LINKS_PER_GROUP_MAX as usize],
    addresses: [u64; LINKS_PER_GROUP_MAX as usize],
}

impl Row {
    pub(super) const EMPTY: Self = Self {
        present: 0,
        rkeys: [Rkey(0); LINKS_PER_GROUP_MAX as usize],
        addresses: [0; LINKS_PER_GROUP_MAX as usize],
    };

    pub(super) fn set(&mut self, slot: usize, rkey: Rkey, address: u64) {
        self.present |= 1 << slot;
        (self.rkeys[slot], self.addresses[slot]) = (rkey, address);
    }

    pub(super) fn at(&self, slot: usize) -> Option<Token> {
        let token = Token { rkey: self.rkeys[slot], address: self.addresses[slot] };
        (self.present >> slot & 1 == 1).then_some(token)
    }

    pub(super) fn has(&self, slot: usize, rkey: Rkey) -> bool {
        self.at(slot).is_some_and(|token| token.rkey == rkey)
    }

    pub(super) fn clear(&mut self, slot: usize) {
        self.present &= !(1 << slot);
    }
}

/// The RMBs of a peer that we may write to.
#[derive(Clone, Debug)]
pub(super) struct PeerRmbs {
    pub(super) rows: [Row; RMBS_PER_GROUP_MAX as usize],
}

impl PeerRmbs {
    pub(super) const fn new() -> Self {
        Self { rows: [Row::EMPTY; RMBS_PER_GROUP_MAX as usize] }
    }

    /// The RToken of the same RMB on another link.
    pub(super) fn translate(&self, from: usize, rkey: Rkey, to: usize) -> Option<(Rkey, u64)> {
        let row = self.rows.iter().find(|row| row.has(from, rkey))?;
        row.at(to).map(|token| (token.rkey, token.address))
    }

    /// The row of the RMB that has one of these rkeys on one of these links, or a new row.
    pub(super) fn row_of(
        &self,
        mut names: impl Iterator<Item = (usize, Rkey)>,
    ) -> Result<usize, Full> {
        // RFC 7609 2.1 #2: at most 255 RMBs per peer
        let known = names.find_map(|(slot, rkey)| self.find(slot, rkey));
        let free = || self.rows.iter().position(|row| row.present == 0);
        known.or_else(free).ok_or(Full)
    }

    pub(super) fn find(&self, slot: usize, rkey: Rkey) -> Option<usize> {
        self.rows.iter().position(|row| row.has(slot, rkey))
    }

    /// Remembers an RToken of an RMB. Peers confirm an rkey again after they have deleted it, and
    /// sometimes before: then the latest address counts, and no other RMB has that rkey any more.
    pub(super) fn set(&mut self, row: usize, slot: usize, rkey: Rkey, address: u64) {
        for other in self.rows.iter_mut().filter(|row| row.has(slot, rkey)) {
            other.clear(slot);
        }
        self.rows[row].set(slot, rkey, address);
    }

    pub(super) fn learn(&mut self, slot: usize, rkey: Rkey, address: u64) -> Result<usize, Full> {
        let row = self.row_of([(slot, rkey)].into_iter())?;
        self.set(row, slot, rkey, address);
        Ok(row)
    }

    // RFC 7609 3.5.5.2.2 #5: find RMB by RKey of one link
    /// Forgets an RMB. Returns whether it was known.
    pub(super) fn forget(&mut self, slot: usize, rkey: Rkey) -> bool {
        match self.rows.iter_mut().find(|row| row.has(slot, rkey)) {
            Some(row) => {
                row.present = 0;
                true
            }
            None => false,
        }
    }

    pub(super) fn clear(&mut self, slot: usize) {
        self.rows.iter_mut().for_each(|row| row.clear(slot));
    }
}

/// What the peer knows of an RMB of ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Standing {
    /// There is no such RMB.
    #[default]
    Absent,
    /// The peer is to be told of it.
    Unannounced,
    /// The peer knows it on all links.
    Known,
    /// The peer knows it, but not on all links that there are now.
    Incomplete,
    /// No connection uses it, and it is to be deleted.
    Unwanted,
}

/// Our RMBs.
#[derive(Clone, Debug)]
pub(super) struct OurRmbs {
    pub(super) rows: [Row; OUR_RMBS_MAX as usize],
    pub(super) standings: [Standing; OUR_RMBS_MAX as usize],
    /// The links on which the peer knows each RMB, one bit for each link.
    pub(super) told: [u8; OUR_RMBS_MAX as usize],
}

impl OurRmbs {
    pub(super) const fn new() -> Self {
        Self {
            rows: [Row::EMPTY; OUR_RMBS_MAX as usize],
            standings: [Standing::Absent; OUR_RMBS_MAX as usize],
            told: [0; OUR_RMBS_MAX as usize],
        }
    }

    pub(super) fn set(&mut self, rmb: RmbIndex, slot: usize, rkey: Rkey, address: u64) {
        self.rows[usize::from(rmb.0)].set(slot, rkey, address);
    }

    pub(super) fn clear(&mut self, slot: usize) {
        self.rows.iter_mut().for_each(|row| row.clear(slot));
        self.told.iter_mut().for_each(|told| *told &= !(1 << slot));
    }

    /// The RMBs that the peer knows on the link in `slot`.
    pub(super) fn told_on(&self, slot: usize) -> RmbSet {
        let mut set = RmbSet::default();
        for (index, told) in self.told.iter().enumerate() {
            if told >> slot & 1 == 1 {
                set.insert(index);
            }
        }
        set
    }

    /// The RTokens of an RMB on two links.
    pub(super) fn pair(&self, rmb: usize, on: usize, new: usize) -> Option<RkeyPair> {
        let (existing, token) = (self.rows[rmb].at(on)?.rkey, self.rows[rmb].at(new)?);
        Some(RkeyPair { existing, new: token.rkey, address: token.address })
    }

    /// The peer has been told the RToken of an RMB on the link in `slot`.
    pub(super) fn note_told(&mut self, rmb: usize, slot: usize) {
        self.told[rmb] |= 1 << slot;
    }

    /// RMBs that the peer does not know on one of these links are to be announced again.
    pub(super) fn complete(&mut self, slots: u8) {
        for (standing, told) in self.standings.iter_mut().zip(self.told) {
            if *standing == Standing::Known && told & slots != slots {
                *standing = Standing::Incomplete;
            }
        }
    }

    pub(super) fn next(&self, wanted: Standing) -> Option<RmbIndex> {
        let found = self.standings.iter().position(|standing| *standing == wanted)?;
        u8::try_from(found).ok().map(RmbIndex)
    }
}

/// A set of RMBs of ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RmbSet([u64; 4]);

impl RmbSet {
    pub(super) fn insert(&mut self, rmb: usize) {
        self.0[rmb / 64] |= 1 << (rmb % 64);
    }

    pub(super) fn remove(&mut self, rmb: usize) {
        self.0[rmb / 64] &= !(1 << (rmb % 64));
    }

    pub(super) fn first(&self) -> Option<usize> {
        let word = self.0.iter().position(|word| *word != 0)?;
        Some(word * 64 + self.0[word].trailing_zeros() as usize)
    }

    pub(super) fn len(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }
}
