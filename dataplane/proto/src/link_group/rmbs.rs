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

/// Where an RMB is on one link. Two RMBs of one memory region have one rkey, and are told apart by
/// their addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) rkey: Rkey,
    pub(super) address: u64,
}

/// Which RMB an rkey names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// None that is known.
    Nothing,
    /// The one in this row.
    Row(usize),
    /// One of several, and it cannot be told which.
    Several,
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

    fn is(&self, slot: usize, token: Token) -> bool {
        self.at(slot) == Some(token)
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

    /// The RToken on another link of the RMB with this RToken.
    pub(super) fn translate(&self, from: usize, token: Token, to: usize) -> Option<Token> {
        self.rows.iter().find(|row| row.is(from, token))?.at(to)
    }

    /// The row of the RMB that has one of these RTokens on one of these links, or a new row.
    ///
    /// If there is no new row, an RMB with one of these rkeys goes: a peer that never deletes an
    /// rkey before it uses it again must not run out of rows.
    pub(super) fn row_of(
        &mut self,
        names: impl Iterator<Item = (usize, Token)> + Clone,
    ) -> Result<usize, Full> {
        // RFC 7609 2.1 #2: at most 255 RMBs per peer
        let row_with = |(slot, token)| self.rows.iter().position(|row| row.is(slot, token));
        let known = names.clone().find_map(row_with);
        let free = || self.rows.iter().position(|row| row.present == 0);
        if let Some(row) = known.or_else(free) {
            return Ok(row);
        }
        let with_rkey = |(slot, token): (usize, Token)| {
            self.rows.iter().position(|row| row.has(slot, token.rkey))
        };
        let row = names.clone().find_map(with_rkey).ok_or(Full)?;
        self.rows[row] = Row::EMPTY;
        Ok(row)
    }

    /// The RMB that the peer means by this rkey in ADD LINK CONTINUATION. Of several it is the one
    /// that has the address of the new RToken on this link, too.
    pub(super) fn find(&self, slot: usize, rkey: Rkey, address: u64) -> Found {
        let with_rkey = || (0..self.rows.len()).filter(|row| self.rows[*row].has(slot, rkey));
        let token = Token { rkey, address };
        let exact = || with_rkey().find(|row| self.rows[*row].is(slot, token));
        match (with_rkey().count(), with_rkey().next()) {
            (0, _) | (_, None) => Found::Nothing,
            (1, Some(row)) => Found::Row(row),
            (_, Some(_)) => exact().map_or(Found::Several, Found::Row),
        }
    }

    /// Remembers an RToken of an RMB, which is that of no other RMB any more.
    pub(super) fn set(&mut self, row: usize, slot: usize, token: Token) {
        for other in self.rows.iter_mut().filter(|row| row.is(slot, token)) {
            other.clear(slot);
        }
        self.rows[row].set(slot, token.rkey, token.address);
    }

    pub(super) fn learn(&mut self, slot: usize, token: Token) -> Result<(), Full> {
        let row = self.row_of([(slot, token)].into_iter())?;
        self.set(row, slot, token);
        Ok(())
    }

    // RFC 7609 3.5.5.2.2 #5: find RMB by RKey of one link
    /// Forgets all RMBs with this rkey: it opens none of them any more. Returns whether there were
    /// any.
    pub(super) fn forget(&mut self, slot: usize, rkey: Rkey) -> bool {
        let mut known = false;
        for row in self.rows.iter_mut().filter(|row| row.has(slot, rkey)) {
            row.present = 0;
            known = true;
        }
        known
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
