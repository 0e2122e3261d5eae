//! Bytes that were written and that the peer may not know of.
//!
//! They are the last ones of the stream. As long as the link works they stay in the send pool,
//! until the message that announces them is acknowledged. A connection that changes its link takes
//! a copy with it, and gives its leases back to the send pool at once: the bytes are announced
//! again only after all of them were written again, and together they may need more memory than the
//! pool has.

use std::collections::VecDeque;

use smcr_memory::{Lease, SendPool};

/// The bytes of one connection, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// Copies of bytes that were written on other links. In the stream they come before the leases.
    copied: Vec<u8>,
    /// Bytes that the RNIC has written on this link.
    leases: VecDeque<Lease>,
}

impl Kept {
    /// Keeps the bytes of the latest RDMA write.
    pub(crate) fn keep(&mut self, lease: Lease) {
        self.leases.push_back(lease);
    }

    /// How many bytes are kept.
    pub(crate) fn len(&self) -> u64 {
        let leased: u64 = self.leases.iter().map(|lease| u64::from(lease.len())).sum();
        self.copied.len() as u64 + leased
    }

    /// Whether no bytes are kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.copied.is_empty() && self.leases.is_empty()
    }

    /// The bytes that must be written again.
    pub(crate) fn copied(&self) -> &[u8] {
        &self.copied
    }

    /// Drops all bytes: the peer knows of them, or nobody needs them.
    pub(crate) fn release(&mut self, pool: &mut SendPool) {
        self.forget_copies();
        for lease in self.leases.drain(..) {
            pool.take_back(lease);
        }
    }

    /// Drops the copies, which nobody needs.
    pub(crate) fn forget_copies(&mut self) {
        self.copied = Vec::new();
    }

    /// Copies the last `len` bytes, drops all others, and gives the leases back to the pool.
    ///
    /// # Panics
    ///
    /// If fewer are kept.
    pub(crate) fn copy_last(&mut self, len: u32, pool: &mut SendPool) {
        let needless = self.len().checked_sub(len.into()).expect("they are kept");
        let mut needless = usize::try_from(needless).expect("they are in memory");
        let dropped = needless.min(self.copied.len());
        self.copied.drain(..dropped);
        needless -= dropped;
        self.copied.reserve_exact(len as usize - self.copied.len());
        for lease in self.leases.drain(..) {
            let skipped = needless.min(lease.len() as usize);
            needless -= skipped;
            let at = self.copied.len();
            self.copied.resize(at + lease.len() as usize - skipped, 0);
            let skipped = u32::try_from(skipped).expect("no longer than its lease");
            lease.copy_out(skipped, &mut self.copied[at..]);
            pool.take_back(lease);
        }
        assert_eq!(self.copied.len(), len as usize);
    }
}

#[cfg(test)]
mod tests {
    use smcr_memory::Region;

    use super::*;

    fn lease(pool: &mut SendPool, bytes: &[u8]) -> Lease {
        let len = u32::try_from(bytes.len()).unwrap();
        let filled = pool.fill(len, |room| {
            room.copy_in(bytes);
            Ok::<_, ()>(bytes.len())
        });
        filled.unwrap().unwrap().unwrap()
    }

    /// Two links break one after the other: what both have lost is taken along, oldest first, but
    /// for what the peer is known to have read. The pool has everything back.
    // RFC 7609 2.3 #9: repeat failed writes in order
    #[test]
    fn the_last_bytes_are_taken_along_in_their_order() {
        for len in 0..=15_u8 {
            let mut pool = SendPool::new(Region::new(65_536).unwrap(), 65_536);
            let mut kept = Kept::default();
            for bytes in [&[0, 1, 2][..], &[3, 4]] {
                kept.keep(lease(&mut pool, bytes));
            }
            kept.copy_last(5, &mut pool);
            assert_eq!((kept.copied(), pool.leases_out()), (&[0, 1, 2, 3, 4][..], 0));
            for bytes in [&[5][..], &[6, 7, 8, 9, 10, 11, 12], &[13, 14]] {
                kept.keep(lease(&mut pool, bytes));
            }
            assert_eq!((kept.len(), kept.is_empty()), (15, false));
            kept.copy_last(len.into(), &mut pool);
            let last: Vec<u8> = (15 - len..15).collect();
            assert_eq!((kept.copied(), pool.leases_out()), (&last[..], 0));
        }
    }

    #[test]
    fn what_was_heard_goes_back_to_the_pool() {
        let mut pool = SendPool::new(Region::new(65_536).unwrap(), 65_536);
        let mut kept = Kept::default();
        kept.keep(lease(&mut pool, &[1, 2, 3]));
        kept.copy_last(3, &mut pool);
        kept.keep(lease(&mut pool, &[4]));
        kept.release(&mut pool);
        assert!(kept.is_empty() && pool.leases_out() == 0);
    }
}
