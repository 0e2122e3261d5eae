//! What RMBs of the peer are called, and where they begin (RFC 3.5.5.2).

use crate::limits::RMBS_PER_GROUP_MAX;
use crate::vocabulary::Rkey;

/// No more RMBs of the peer can be remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// The RMBs of a peer that we may write to.
#[derive(Clone, Debug)]
pub(super) struct PeerRkeys {
    known: [Option<(Rkey, u64)>; RMBS_PER_GROUP_MAX as usize],
}

impl PeerRkeys {
    pub(super) const fn new() -> Self {
        Self { known: [None; RMBS_PER_GROUP_MAX as usize] }
    }

    /// Where the RMB begins.
    pub(super) fn address(&self, rkey: Rkey) -> Option<u64> {
        let found = self.known.iter().flatten().find(|(known, _)| *known == rkey);
        found.map(|(_, address)| *address)
    }

    /// Remembers an RMB. Peers confirm the same key again after they deleted it, and sometimes
    /// before: the latest address counts.
    pub(super) fn learn(&mut self, rkey: Rkey, address: u64) -> Result<(), Full> {
        let place = match self.position(rkey) {
            Some(place) => place,
            None => self.known.iter().position(Option::is_none).ok_or(Full)?,
        };
        self.known[place] = Some((rkey, address));
        Ok(())
    }

    /// Forgets an RMB. Returns whether it was known.
    pub(super) fn forget(&mut self, rkey: Rkey) -> bool {
        match self.position(rkey) {
            Some(place) => self.known[place].take().is_some(),
            None => false,
        }
    }

    fn position(&self, rkey: Rkey) -> Option<usize> {
        self.known.iter().position(|entry| entry.is_some_and(|(known, _)| known == rkey))
    }
}
