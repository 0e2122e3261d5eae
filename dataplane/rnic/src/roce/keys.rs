//! The poller's table of rkeys, which says what memory peers may write.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use smcr_memory::{Placer, Rmbe, Unfinished};
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
    /// Finds the slot by the address of the region. Of several keys for one region, it finds one.
    homes: HashMap<u64, usize, BuildHasherDefault<Spread>>,
    /// What was placed last, and the slot of its key.
    unfinished: RefCell<(usize, Unfinished)>,
}

/// A hash table whose keys we chose at random, so that it needs no protection against collisions.
pub(super) type Index<T> = HashMap<u32, T, BuildHasherDefault<Spread>>;

#[derive(Debug)]
struct Key {
    rkey: Rkey,
    domain: Domain,
    placer: Placer,
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
            homes: HashMap::with_capacity_and_hasher(KEYS_MAX, BuildHasherDefault::default()),
            unfinished: RefCell::default(),
        }
    }

    /// Applies the changes that the control thread has queued.
    ///
    /// # Panics
    ///
    /// If what was placed is not [finished](Self::finish).
    pub(super) fn catch_up(&mut self, shared: &Shared) {
        assert!(self.unfinished.get_mut().1.is_finished(), "its key may be closed");
        while let Some(change) = shared.pop() {
            match change {
                KeyUpdate::Open { rkey, domain, placer, address } => {
                    self.open(Key { rkey, domain, placer, address });
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
        self.homes.insert(key.placer.region().address(), at);
        self.slots[at] = Some(key);
    }

    fn close(&mut self, rkey: Rkey) {
        let at = self.index.remove(&rkey.0).expect("a key is opened before it is closed");
        let key = self.slots[at].take().expect("the index names open keys");
        let home = key.placer.region().address();
        if self.homes.get(&home) == Some(&at) {
            self.homes.remove(&home);
        }
        self.free.push(at);
    }

    /// Whether queue pairs of `domain` may execute the write of `reth`. Places no byte.
    pub(super) fn check(&self, hint: &mut Hint, domain: Domain, reth: Reth) -> Result<(), Denied> {
        self.find(hint, domain, reth, reth.len as usize).map(drop)
    }

    /// Places `bytes` where `reth` says. When the caller has placed all that came with them, it
    /// [finishes](Self::finish) that.
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
        let (placer, at) = self.find(hint, domain, reth, bytes.len())?;
        if self.unfinished.borrow().0 != hint.0 {
            self.finish();
        }
        // Changed where it is: a copy would have to wait until all bytes of the last packet are
        // stored.
        let (slot, unfinished) = &mut *self.unfinished.borrow_mut();
        *slot = hint.0;
        placer.place_on(unfinished, at, bytes);
        Ok(())
    }

    /// Finishes what was placed, before anybody hears of it.
    pub(super) fn finish(&self) {
        let (slot, unfinished) = &mut *self.unfinished.borrow_mut();
        if !unfinished.is_finished() {
            let key = self.slots[*slot].as_ref().expect("keys are closed when all is finished");
            key.placer.finish(unfinished);
        }
    }

    /// Gives the memory of an element back to the host; see [`crate::Fabric::relinquish`].
    pub(super) fn relinquish(&self, element: &mut Rmbe, announced: u32) -> usize {
        let at = self.homes.get(&element.rmb_address());
        let key = at.and_then(|at| self.slots[*at].as_ref());
        key.map_or(0, |key| element.relinquish(&key.placer, announced))
    }

    /// What writes to the region of the rkey in `reth`, and the offset of the write in it.
    fn find(
        &self,
        hint: &mut Hint,
        domain: Domain,
        reth: Reth,
        len: usize,
    ) -> Result<(&Placer, usize), Denied> {
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
        let room = key.placer.region().len();
        let fits = len <= room && at <= room - len;
        if key.domain == domain && fits { Ok((&key.placer, at)) } else { Err(Denied) }
    }
}

/// A hasher that spreads a number over 64 bits by a multiplication.
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
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

#[cfg(test)]
mod tests {
    use smcr_memory::{Region, Rmb};
    use smcr_proto::RmbeSize;

    use super::*;

    const OURS: Domain = Domain(1);

    fn table() -> (Keys, Region) {
        let region = Region::new(4096).unwrap();
        let mut keys = Keys::new();
        let address = region.address();
        keys.open(Key { rkey: Rkey(7), domain: OURS, placer: region.placer(), address });
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
        keys.finish();
        region.copy_out(0, &mut out);
        assert_eq!(out, [9; 4]);

        // Another key in the same slot: the hint must not confuse them.
        keys.close(Rkey(7));
        let other = Region::new(4096).unwrap();
        let address = other.address();
        keys.open(Key { rkey: Rkey(9), domain: OURS, placer: other.placer(), address });
        assert_eq!(keys.place(&mut hint, OURS, reth, &[8; 4]), Err(Denied));
        let there = Reth { address: other.address(), rkey: Rkey(9), len: 4 };
        assert_eq!(keys.place(&mut hint, OURS, there, &[8; 4]), Ok(()));
    }

    /// An element is found by its region, whichever of two keys came last and goes first; while
    /// both are open, each may be written by.
    #[test]
    fn an_element_is_given_back_by_the_only_key_of_its_region() {
        let region = Region::new(65_536).unwrap();
        let mut element = Rmb::carve(region.clone(), RmbeSize::KIB_64).take().unwrap();
        let mut keys = Keys::new();
        let key = |rkey| Key { rkey, domain: OURS, placer: region.placer(), address: 0 };
        let write = |keys: &Keys, rkey| {
            let reth = Reth { address: 0, rkey, len: 4 };
            keys.place(&mut Hint::default(), OURS, reth, &[9; 4]).unwrap();
            keys.finish();
        };
        assert_eq!(keys.relinquish(&mut element, 0), 0, "no key at all");
        keys.open(key(Rkey(7)));
        keys.open(key(Rkey(8)));
        write(&keys, Rkey(7));
        write(&keys, Rkey(8));
        element.touch(0..4);
        assert_eq!(keys.relinquish(&mut element, 8), 0, "two keys");
        keys.close(Rkey(7));
        assert_eq!(keys.relinquish(&mut element, 4), 0, "half of the bytes");
        assert_eq!(keys.relinquish(&mut element, 8), 4_096);
        keys.close(Rkey(8));
        assert!(keys.homes.is_empty());
        // The one that came last goes first; the other one is not found, and nothing is lost.
        keys.open(key(Rkey(7)));
        keys.open(key(Rkey(8)));
        keys.close(Rkey(8));
        write(&keys, Rkey(7));
        element.touch(0..4);
        assert_eq!(keys.relinquish(&mut element, 12), 0);
        keys.close(Rkey(7));
    }

    /// What comes in one train is counted together, for each element by itself: they are given back
    /// when all that was placed in them is known, and not before.
    #[test]
    fn what_is_placed_for_several_elements_is_counted_for_each() {
        let mut keys = Keys::new();
        let mut elements = Vec::new();
        for rkey in [7, 8] {
            let region = Region::new(32_768).unwrap();
            let placer = region.placer();
            keys.open(Key { rkey: Rkey(rkey), domain: OURS, placer, address: 0 });
            let mut rmb = Rmb::carve(region, RmbeSize::from_notation(0));
            elements.extend([(); 2].map(|()| rmb.take().unwrap()));
        }
        let mut hint = Hint::default();
        for (element, len) in [(0, 100), (0, 30), (1, 9), (0, 1), (2, 50), (3, 8), (3, 7), (2, 2)] {
            let address = 16_384 * (element % 2);
            let reth = Reth { address, rkey: Rkey(if element < 2 { 7 } else { 8 }), len };
            keys.place(&mut hint, OURS, reth, &[9; 100][..len as usize]).unwrap();
        }
        elements.iter_mut().for_each(|element| element.touch(0..100));
        assert_eq!(keys.relinquish(&mut elements[2], 52), 0, "not finished yet");
        keys.finish();
        for (element, placed) in elements.iter_mut().zip([131, 9, 52, 15]) {
            assert_eq!(keys.relinquish(element, placed - 1), 0, "{placed}");
            assert_eq!(keys.relinquish(element, placed), 4_096, "{placed}");
        }
    }
}
