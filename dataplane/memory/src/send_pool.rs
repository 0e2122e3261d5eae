//! Registered memory that sockets fill and NICs empty.
//!
//! A poller has one pool, cut into chunks. Bytes from sockets are appended to the current chunk,
//! and each piece becomes a [`Lease`]. A chunk is free again when all its leases have been taken
//! back. Idle connections hold no memory.

use std::io;

use smcr_os::{Extent, Foreign, Lent, Piece};

use crate::Region;

/// The pool of one poller.
#[derive(Debug)]
pub struct SendPool {
    region: Region,
    chunk_bytes: u32,
    /// How many leases of each chunk were not taken back yet.
    lent: Box<[u32]>,
    free: Vec<u32>,
    current: Option<Current>,
}

#[derive(Debug)]
struct Current {
    chunk: u32,
    used: u32,
}

/// Bytes that the NIC may still read. Comes back with the completion of the write.
///
/// Not `Clone`: whoever holds the lease is the only one who can return the bytes.
#[must_use = "a lease that is dropped leaks its chunk"]
#[derive(Debug)]
pub struct Lease {
    region: Region,
    chunk: u32,
    at: usize,
    len: u32,
}

/// Room at the end of the current chunk.
#[derive(Debug)]
pub struct Vacant<'a> {
    region: &'a Region,
    at: usize,
    len: u32,
}

impl SendPool {
    /// Cuts `region` into chunks of `chunk_bytes`.
    ///
    /// # Panics
    ///
    /// If not even one chunk fits, or if a chunk is empty or larger than 1 GiB.
    pub fn new(region: Region, chunk_bytes: u32) -> Self {
        assert!((1..=CHUNK_BYTES_MAX).contains(&chunk_bytes), "chunks of {chunk_bytes} bytes");
        let chunks = u32::try_from(region.len() / chunk_bytes as usize).expect("under 4 G chunks");
        assert!(chunks > 0);
        Self {
            region,
            chunk_bytes,
            lent: vec![0; chunks as usize].into(),
            free: (0..chunks).rev().collect(),
            current: None,
        }
    }

    /// Lets `read` fill up to `max` bytes, and lends out what it filled.
    ///
    /// `read` returns how many bytes it put at the start of the room it was shown; zero makes no
    /// lease. The room is at most what is left of the current chunk, so it may be less than `max`.
    ///
    /// # Errors
    ///
    /// What `read` returned; nothing is lent then. `None` when no chunk is free.
    ///
    /// # Panics
    ///
    /// If `read` claims more than it was shown.
    pub fn fill<E>(
        &mut self,
        max: u32,
        read: impl FnOnce(&Vacant<'_>) -> Result<usize, E>,
    ) -> Option<Result<Option<Lease>, E>> {
        let (chunk, used) = self.room(max)?;
        let at = chunk as usize * self.chunk_bytes as usize + used as usize;
        let room = max.min(self.chunk_bytes - used);
        let filled = match read(&Vacant { region: &self.region, at, len: room }) {
            Ok(filled) => u32::try_from(filled).expect("no more than the room shown"),
            Err(error) => return Some(Err(error)),
        };
        assert!(filled <= room);
        if filled == 0 {
            return Some(Ok(None));
        }
        self.lent[chunk as usize] += 1;
        let end = (used + filled).next_multiple_of(ALIGN).min(self.chunk_bytes);
        self.current = Some(Current { chunk, used: end });
        let lease = Lease { region: self.region.clone(), chunk, at, len: filled };
        Some(Ok(Some(lease)))
    }

    /// Cuts a lease in two, the first of `len` bytes.
    ///
    /// # Panics
    ///
    /// If `len` is zero or the whole lease.
    #[must_use = "both halves must come home"]
    pub fn split(&mut self, lease: Lease, len: u32) -> (Lease, Lease) {
        assert!(0 < len && len < lease.len);
        self.lent[lease.chunk as usize] += 1;
        let rest = Lease {
            region: lease.region.clone(),
            chunk: lease.chunk,
            at: lease.at + len as usize,
            len: lease.len - len,
        };
        (Lease { len, ..lease }, rest)
    }

    /// The NIC has finished with `lease`.
    ///
    /// # Panics
    ///
    /// If the lease is of another pool.
    #[allow(clippy::needless_pass_by_value, reason = "a lease comes home once")]
    pub fn take_back(&mut self, lease: Lease) {
        assert_eq!(lease.region.address(), self.region.address());
        let lent = &mut self.lent[lease.chunk as usize];
        assert!(*lent > 0);
        *lent -= 1;
        if *lent == 0 {
            match &mut self.current {
                Some(current) if current.chunk == lease.chunk => current.used = 0,
                Some(_) | None => self.free.push(lease.chunk),
            }
        }
    }

    /// How many leases were not taken back yet. Zero when the system is quiet.
    pub fn leases_out(&self) -> u32 {
        self.lent.iter().sum()
    }

    /// Bytes of chunks that hold leases.
    pub fn bytes_in_use(&self) -> u64 {
        let unused = self.current.iter().filter(|one| self.lent[one.chunk as usize] == 0).count();
        let chunks = self.lent.len() - self.free.len() - unused;
        chunks as u64 * u64::from(self.chunk_bytes)
    }

    /// Whether a link that has lent out so many bytes, which stand in so many chunks, may lend
    /// more: it may have as many as are free, and a chunk is not free before the last lease in it
    /// is home. So a link that is alone gets half of the pool, several links get equal shares, and
    /// something is always left for the next one.
    pub fn is_fair(&self, lent: u64, chunks: usize) -> bool {
        let free = self.free.len();
        chunks <= free && lent <= free as u64 * u64::from(self.chunk_bytes)
    }

    /// Whether a [`fill`](Self::fill) finds room, however much it asks for. If not, it may all the
    /// same, if it asks for little.
    pub fn has_room(&self) -> bool {
        let left = |current: &Current| self.chunk_bytes - current.used;
        !self.free.is_empty() || self.current.as_ref().map_or(0, left) >= self.chunk_bytes / 4
    }

    /// The chunk to append to and how much of it is used, with a useful amount of room.
    fn room(&mut self, max: u32) -> Option<(u32, u32)> {
        if let Some(current) = &self.current {
            let left = self.chunk_bytes - current.used;
            if left >= max.min(self.chunk_bytes / 4) {
                return Some((current.chunk, current.used));
            }
        }
        let chunk = self.free.pop()?;
        let retired = self.current.replace(Current { chunk, used: 0 });
        if let Some(retired) = retired
            && self.lent[retired.chunk as usize] == 0
        {
            self.free.push(retired.chunk);
        }
        Some((chunk, 0))
    }
}

impl Lease {
    /// How many bytes.
    #[allow(clippy::len_without_is_empty, reason = "a lease is never empty")]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// The chunk in which the bytes are.
    pub fn chunk(&self) -> u32 {
        self.chunk
    }

    /// The address of the first byte, as a NIC is told it.
    pub fn address(&self) -> u64 {
        self.region.address() + self.at as u64
    }

    /// Copies `out.len()` bytes that start `at` bytes into the lease.
    ///
    /// # Panics
    ///
    /// If the range leaves the lease.
    pub fn copy_out(&self, at: u32, out: &mut [u8]) {
        assert!(u64::from(at) + out.len() as u64 <= u64::from(self.len));
        self.region.copy_out(self.at + at as usize, out);
    }

    /// Copies all bytes to `at` bytes into `target`.
    ///
    /// # Panics
    ///
    /// If they do not fit, or if the lease is of that region.
    pub fn copy_to(&self, target: &Region, at: usize) {
        target.copy_from(at, &self.region, self.at, self.len as usize);
    }
}

impl Vacant<'_> {
    /// How many bytes fit.
    #[allow(clippy::len_without_is_empty, reason = "emptiness has no meaning of its own here")]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Copies `bytes` to the start of the room.
    ///
    /// # Panics
    ///
    /// If they do not fit.
    pub fn copy_in(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len());
        self.region.copy_in(self.at, bytes);
    }

    /// As [`smcr_os::receive`], from a socket into the room.
    ///
    /// # Errors
    ///
    /// As `recv(2)`.
    pub fn read_from(&self, socket: std::os::fd::BorrowedFd<'_>) -> io::Result<usize> {
        smcr_os::receive(socket, self)
    }
}

// SAFETY: `Foreign` asks for pieces that stay valid for the life of the value and that no
// reference names: the borrow keeps the region, `pointer` checks the range, and regions are never
// referenced (see `Mapping`, ALIEN).
unsafe impl Foreign for Vacant<'_> {
    fn pieces(&self) -> [Piece; 2] {
        let base = self.region.pointer(self.at, self.len as usize);
        [Piece { base, len: self.len as usize }, Piece::EMPTY]
    }
}

// SAFETY: `Lent` asks for bytes that stay mapped, which MAPPED of the region's mapping promises,
// and that nobody writes: the pool appends behind them, and uses their chunk again only after
// `take_back` has consumed the lease.
unsafe impl Lent for Lease {
    fn extent(&self) -> Extent {
        let len = self.len as usize;
        let start = self.region.pointer(self.at, len);
        Extent { address: start.as_ptr() as u64, len }
    }
}

/// Leases begin on a cache line of their own.
const ALIGN: u32 = 64;
/// Rounding up within a chunk must not leave a `u32`: what is used would read as free.
const CHUNK_BYTES_MAX: u32 = 1 << 30;
const _: () = assert!(CHUNK_BYTES_MAX < u32::MAX - ALIGN);

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(pool: &mut SendPool, bytes: &[u8]) -> Option<Lease> {
        let max = u32::try_from(bytes.len()).unwrap();
        let filled = pool.fill(max, |room| {
            let len = bytes.len().min(room.len());
            room.copy_in(&bytes[..len]);
            Ok::<_, ()>(len)
        });
        filled.map(|filled| filled.unwrap().unwrap())
    }

    #[test]
    fn small_leases_share_a_chunk_and_it_is_free_when_the_last_is_home() {
        let mut pool = SendPool::new(Region::new(2 * 4096).unwrap(), 4096);
        let leases: Vec<_> = (0..32u8).map(|n| fill(&mut pool, &[n; 100]).unwrap()).collect();
        assert_eq!(pool.leases_out(), 32);
        let big = fill(&mut pool, &[77; 4096]).unwrap();
        assert_eq!(big.len(), 4096);
        assert!(fill(&mut pool, &[1]).is_none(), "both chunks are in use");
        for (n, lease) in leases.into_iter().enumerate() {
            let mut out = [0; 100];
            lease.copy_out(0, &mut out);
            assert_eq!(out, [u8::try_from(n).unwrap(); 100]);
            pool.take_back(lease);
        }
        let again = fill(&mut pool, &[1]).unwrap();
        pool.take_back(again);
        pool.take_back(big);
        assert_eq!(pool.leases_out(), 0);
    }

    #[test]
    fn halves_of_a_lease_come_home_one_by_one() {
        let mut pool = SendPool::new(Region::new(4096).unwrap(), 4096);
        let lease = fill(&mut pool, &[1, 2, 3, 4, 5]).unwrap();
        let (head, tail) = pool.split(lease, 2);
        assert_eq!(tail.address(), head.address() + 2);
        let mut out = [0; 3];
        tail.copy_out(0, &mut out);
        assert_eq!(out, [3, 4, 5]);
        pool.take_back(head);
        assert_eq!(pool.leases_out(), 1);
        pool.take_back(tail);
        assert_eq!(pool.leases_out(), 0);
    }

    /// Bytes that the NIC still reads must not be overwritten: the peer would see another
    /// connection's data. Any order of lending and returning, against a model of what is lent.
    #[test]
    fn what_is_lent_is_never_overwritten() {
        let mut state = 1_u64;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(state >> 33).unwrap() % below
        };
        let mut pool = SendPool::new(Region::new(4 * 1024).unwrap(), 1024);
        let mut out: Vec<(Lease, u8)> = Vec::new();
        for turn in 0..20_000 {
            let value = u8::try_from(turn % 251).unwrap();
            if random(3) > 0 {
                out.extend(fill(&mut pool, &vec![value; 1 + random(1024)]).map(|l| (l, value)));
            } else if !out.is_empty() {
                let (lease, value) = out.swap_remove(random(out.len()));
                let mut bytes = vec![0; lease.len() as usize];
                lease.copy_out(0, &mut bytes);
                assert!(bytes.iter().all(|byte| *byte == value), "turn {turn}");
                pool.take_back(lease);
            }
            assert_eq!(pool.leases_out() as usize, out.len());
        }
        out.drain(..).for_each(|(lease, _)| pool.take_back(lease));
        let whole: Vec<_> = (0..4).map(|_| fill(&mut pool, &[1; 1024]).unwrap()).collect();
        assert!(whole.iter().all(|lease| lease.len() == 1024), "all chunks are free again");
    }

    #[test]
    #[should_panic(expected = "chunks of 4294967295 bytes")]
    fn a_chunk_whose_size_would_wrap_is_our_bug() {
        SendPool::new(Region::new(4096).unwrap(), u32::MAX);
    }

    #[test]
    fn a_failed_read_lends_nothing() {
        let mut pool = SendPool::new(Region::new(4096).unwrap(), 4096);
        assert!(matches!(pool.fill(10, |_| Err::<usize, _>("no")), Some(Err("no"))));
        assert!(pool.fill(10, |_| Ok::<_, ()>(0)).unwrap().unwrap().is_none());
        assert_eq!(pool.leases_out(), 0);
    }
}
