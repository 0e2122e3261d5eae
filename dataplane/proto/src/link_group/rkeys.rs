//! What RMBs are called on each link, ours and the peer's (RFC 2.1, 3.5.5.2).

use super::members::PLACES;
use crate::limits::{OWN_RMBS_MAX, RMBS_PER_GROUP_MAX};
use crate::time::Instant;
use crate::vocabulary::Rkey;

/// No more RMBs of the peer can be remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// One of our RMBs, by the caller's own numbering: below
/// [`OWN_RMBS_MAX`](crate::limits::OWN_RMBS_MAX).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RmbIndex(pub u8);

impl RmbIndex {
    pub(super) fn place(self) -> usize {
        assert!(self.0 < OWN_RMBS_MAX, "RMBs are numbered below OWN_RMBS_MAX");
        usize::from(self.0)
    }
}

/// What one RMB is called on the links of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keys {
    /// The places of the links where it has a name, as a mask.
    known: u16,
    rkeys: [Rkey; PLACES],
    addresses: [u64; PLACES],
}

impl Keys {
    pub(super) const NONE: Self =
        Self { known: 0, rkeys: [Rkey(0); PLACES], addresses: [0; PLACES] };

    pub(super) fn on(&self, place: usize) -> Option<(Rkey, u64)> {
        let known = self.known & 1 << place != 0;
        known.then(|| (self.rkeys[place], self.addresses[place]))
    }

    pub(super) fn set(&mut self, place: usize, rkey: Rkey, address: u64) {
        self.known |= 1 << place;
        (self.rkeys[place], self.addresses[place]) = (rkey, address);
    }

    pub(super) fn known(&self) -> u16 {
        self.known
    }

    /// The names on these places only.
    pub(super) fn only(&self, places: u16) -> Self {
        Self { known: self.known & places, ..*self }
    }

    fn clear(&mut self, place: usize) {
        self.known &= !(1 << place);
    }
}

/// The RMBs of a peer that we may write to.
#[derive(Clone, Debug)]
pub(super) struct PeerRmbs {
    rows: [Keys; RMBS_PER_GROUP_MAX as usize],
}

impl PeerRmbs {
    pub(super) const fn new() -> Self {
        Self { rows: [Keys::NONE; RMBS_PER_GROUP_MAX as usize] }
    }

    pub(super) fn row(&self, place: usize, rkey: Rkey) -> Option<usize> {
        let named = |keys: &Keys| keys.on(place).is_some_and(|(known, _)| known == rkey);
        self.rows.iter().position(named)
    }

    /// What the RMB with this key on one link is called on another.
    pub(super) fn translate(&self, on: usize, rkey: Rkey, to: usize) -> Option<(Rkey, u64)> {
        self.rows[self.row(on, rkey)?].on(to)
    }

    /// Remembers an RMB. Peers confirm the same key again after they deleted it, and sometimes
    /// before: the latest address counts.
    pub(super) fn learn(&mut self, place: usize, rkey: Rkey, address: u64) -> Result<usize, Full> {
        let unused = || self.rows.iter().position(|keys| keys.known == 0);
        let row = self.row(place, rkey).or_else(unused).ok_or(Full)?;
        self.rows[row].set(place, rkey, address);
        Ok(row)
    }

    /// Remembers what a known RMB is called on one more link.
    pub(super) fn add(&mut self, row: usize, place: usize, rkey: Rkey, address: u64) {
        self.rows[row].set(place, rkey, address);
    }

    /// The places where this RMB has a name.
    pub(super) fn known(&self, row: usize) -> u16 {
        self.rows[row].known
    }

    /// Forgets an RMB on all links. Returns whether it was known.
    // RFC 7609 3.5.5.2.2-5
    pub(super) fn forget(&mut self, place: usize, rkey: Rkey) -> bool {
        let row = self.row(place, rkey);
        if let Some(row) = row {
            self.rows[row] = Keys::NONE;
        }
        row.is_some()
    }

    /// Forgets the names on one link.
    pub(super) fn clear(&mut self, place: usize) {
        self.rows.iter_mut().for_each(|keys| keys.clear(place));
    }
}

/// What is to be done about one of our RMBs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// Nothing, unless a link appears on which the peer does not know it.
    Keep,
    /// CONFIRM RKEY, and the caller waits for the outcome. Not before `not_before`; the peer has
    /// put us off `refusals` times.
    Announce { not_before: Instant, refusals: u8 },
    /// DELETE RKEY, and the caller waits for the outcome.
    Withdraw,
}

/// One of our RMBs.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnRmb {
    pub(super) keys: Keys,
    /// The places of the links on which the peer knows it, as a mask.
    pub(super) told: u16,
    /// The place of the link that its first connection uses.
    pub(super) via: usize,
    pub(super) plan: Plan,
}

/// Our RMBs.
#[derive(Clone, Debug)]
pub(super) struct OwnRmbs {
    rows: [Option<OwnRmb>; OWN_RMBS_MAX as usize],
}

impl OwnRmbs {
    pub(super) const fn new() -> Self {
        Self { rows: [None; OWN_RMBS_MAX as usize] }
    }

    pub(super) fn find(&self, rmb: RmbIndex) -> Option<&OwnRmb> {
        self.rows[rmb.place()].as_ref()
    }

    pub(super) fn find_mut(&mut self, rmb: RmbIndex) -> Option<&mut OwnRmb> {
        self.rows[rmb.place()].as_mut()
    }

    pub(super) fn insert(&mut self, rmb: RmbIndex, row: OwnRmb) {
        self.rows[rmb.place()] = Some(row);
    }

    pub(super) fn remove(&mut self, rmb: RmbIndex) {
        self.rows[rmb.place()] = None;
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (RmbIndex, &OwnRmb)> {
        let numbered = (0..OWN_RMBS_MAX).map(RmbIndex).zip(&self.rows);
        numbered.filter_map(|(index, row)| Some((index, row.as_ref()?)))
    }

    /// Forgets the names on one link.
    pub(super) fn clear(&mut self, place: usize) {
        for row in self.rows.iter_mut().flatten() {
            row.keys.clear(place);
            row.told &= !(1 << place);
        }
    }
}
