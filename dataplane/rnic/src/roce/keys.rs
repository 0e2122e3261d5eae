//! The poller's table of rkeys, which says what memory peers may write.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use smcr_memory::Region;
use smcr_proto::Rkey;

use super::KEYS_MAX;
use super::shared::{KeyUpdate, Shared};
use super::wire::Reth;
use crate::Domain;

/// Open keys. Each stays in its slot until it is closed; an index finds the slot by rkey.
#[derive(Debug)]
pub(super) struct Keys {
    slots: Vec<Option<Key>>,
    free: Vec<usize>,
    index: Index<usize>,
}

/// A hash table whose keys we chose at random, so that it needs no protection against collisions.
pub(super) type Index<T> = HashMap<u32, T, BuildHasherDefault<Spread>>;

#[derive(Debug)]
struct Key {
    rkey: Rkey,
    domain: Domain,
    region: Region,
    /// What the peer was told to be the address of its first byte.
    address: u64,
}

/// The rkey is unknown or of another domain, or the range is outside its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Denied;

/// The slot of the key that the last write used. The next write tries it first, to save a lookup.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hint(usize);

impl Keys {
    /// Creates an empty table.
    pub(super) fn new() -> Self {
        Self {
            slots: Vec::with_capacity(KEYS_MAX),
            free: Vec::with_capacity(KEYS_MAX),
            index: Index::with_capacity_and_hasher(KEYS_MAX, BuildHasherDefault::default()),
        }
    }

    /// Applies the changes that the control thread has queued.
    pub(super) fn catch_up(&mut self, shared: &Shared) {
        while let Some(change) = shared.pop() {
            match change {
                KeyUpdate::Open { rkey, domain, region, address } => {
                    self.open(Key { rkey, domain, region, address });
                }
                KeyUpdate::Close(rkey) => {
                    self.close(rkey);
                    shared.uncount_key();
                }
            }
        }
    }

    fn open(&mut self, key: Key) {
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        assert!(self.slots.len() <= KEYS_MAX);
        let before = self.index.insert(key.rkey.0, at);
        assert!(before.is_none(), "two open keys are never equal");
        self.slots[at] = Some(key);
    }

    fn close(&mut self, rkey: Rkey) {
        let at = self.index.remove(&rkey.0).expect("a key is opened before it is closed");
        self.slots[at] = None;
        self.free.push(at);
    }

    /// Whether queue pairs of `domain` may execute the write of `reth`. Places no byte.
    pub(super) fn check(&self, hint: &mut Hint, domain: Domain, reth: Reth) -> Result<(), Denied> {
        self.find(hint, domain, reth, reth.len as usize).map(drop)
    }

    /// Places `bytes` where `reth` says.
    ///
    /// # Errors
    ///
    /// [`Denied`], with nothing placed.
    pub(super) fn place(
        &self,
        hint: &mut Hint,
        domain: Domain,
        reth: Reth,
        bytes: &[u8],
    ) -> Result<(), Denied> {
        let (region, at) = self.find(hint, domain, reth, bytes.len())?;
        region.copy_in(at, bytes);
        Ok(())
    }

    /// The region that the rkey in `reth` belongs to, and the offset of the write in it.
    fn find(
        &self,
        hint: &mut Hint,
        domain: Domain,
        reth: Reth,
        len: usize,
    ) -> Result<(&Region, usize), Denied> {
        let hinted = self.slots.get(hint.0).and_then(Option::as_ref);
        let key = match hinted.filter(|key| key.rkey == reth.rkey) {
            Some(key) => key,
            None => {
                hint.0 = *self.index.get(&reth.rkey.0).ok_or(Denied)?;
                self.slots[hint.0].as_ref().expect("the index names open keys")
            }
        };
        let at = reth.address.checked_sub(key.address).ok_or(Denied)?;
        let at = usize::try_from(at).map_err(|_| Denied)?;
        let fits = len <= key.region.len() && at <= key.region.len() - len;
        if key.domain == domain && fits { Ok((&key.region, at)) } else { Err(Denied) }
    }
}

/// A hasher that spreads a `u32` over 64 bits by a multiplication.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32((*byte).into());
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Domain = Domain(1);

    fn table() -> (Keys, Region) {
        let region = Region::new(4096).unwrap();
        let mut keys = Keys::new();
        let address = region.address();
        keys.open(Key { rkey: Rkey(7), domain: OURS, region: region.clone(), address });
        (keys, region)
    }

    fn reth(region: &Region, at: i64, len: u32) -> Reth {
        Reth { address: region.address().wrapping_add_signed(at), rkey: Rkey(7), len }
    }

    /// A peer may write the region that it was given, and not one byte beside it.
    #[test]
    fn a_write_stays_within_its_region() {
        let (keys, region) = table();
        let check = |at, len| keys.check(&mut Hint::default(), OURS, reth(&region, at, len));
        for (at, len) in [(0, 4096), (0, 1), (4095, 1), (4096, 0), (100, 3996)] {
            assert_eq!(check(at, len), Ok(()), "{at} {len}");
        }
        for (at, len) in [(-1, 1), (-1, 4096), (0, 4097), (4096, 1), (1, u32::MAX), (i64::MIN, 1)] {
            assert_eq!(check(at, len), Err(Denied), "{at} {len}");
        }
    }

    #[test]
    fn a_key_opens_nothing_to_another_domain_or_after_it_was_closed() {
        let (mut keys, region) = table();
        let mut hint = Hint::default();
        let reth = reth(&region, 0, 4);
        assert_eq!(keys.place(&mut hint, Domain(2), reth, &[9; 4]), Err(Denied));
        assert_eq!(
            keys.place(&mut hint, OURS, Reth { rkey: Rkey(8), ..reth }, &[9; 4]),
            Err(Denied)
        );
        let mut out = [1; 4];
        region.copy_out(0, &mut out);
        assert_eq!(out, [0; 4], "nothing was placed");
        keys.place(&mut hint, OURS, reth, &[9; 4]).unwrap();
        region.copy_out(0, &mut out);
        assert_eq!(out, [9; 4]);

        // Another key in the same slot: the hint must not confuse them.
        keys.close(Rkey(7));
        let other = Region::new(4096).unwrap();
        let address = other.address();
        keys.open(Key { rkey: Rkey(9), domain: OURS, region: other.clone(), address });
        assert_eq!(keys.place(&mut hint, OURS, reth, &[8; 4]), Err(Denied));
        let there = Reth { address: other.address(), rkey: Rkey(9), len: 4 };
        assert_eq!(keys.place(&mut hint, OURS, there, &[8; 4]), Ok(()));
    }
}
