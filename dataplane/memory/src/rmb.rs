//! An RMB: a region carved into elements of one size (RFC 2.1, 4.1).

use std::collections::VecDeque;
use std::ops::Range;

use smcr_os::{Foreign, Piece};
use smcr_proto::RmbeSize;

use crate::{Placer, Region};

/// A region carved into equal elements that come and go by value.
#[derive(Debug)]
pub struct Rmb {
    region: Region,
    size: RmbeSize,
    /// Free elements. The last one that came back is taken first: its pages are still in the cache.
    free: Vec<Rmbe>,
    /// The elements that came back last, oldest first. They are taken after all others. A
    /// connection that has ended here may not have ended at the peer yet; the peer would hold back
    /// a new connection with the same element until then.
    cooling: VecDeque<Rmbe>,
    elements: u8,
}

impl Rmb {
    /// The most elements an RMB can have: their index is a byte and starts at 1 (RFC A.2.3).
    pub const ELEMENTS_MAX: u8 = 255;

    /// Carves `region`; bytes that make no whole element stay unused.
    ///
    /// # Panics
    ///
    /// If not even one element fits.
    pub fn carve(region: Region, size: RmbeSize) -> Self {
        // RFC 7609 2.1 #8: equal element sizes within an RMB
        // RFC 7609 4.2 #1: divide RMB into equal elements
        let fitting = region.len() / size.bytes() as usize;
        let elements =
            u8::try_from(fitting.min(Self::ELEMENTS_MAX.into())).expect("the minimum is a byte");
        assert!(elements > 0);
        let free = (1..=elements)
            .rev()
            .map(|index| Rmbe {
                region: region.clone(),
                index,
                size,
                touched: 0..0,
                anywhere: false,
                before: 0,
            })
            .collect();
        Self { region, size, free, cooling: VecDeque::new(), elements }
    }

    /// The memory, for registration.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The size of every element.
    pub fn size(&self) -> RmbeSize {
        self.size
    }

    /// How many elements there are, free or not.
    pub fn elements(&self) -> u8 {
        self.elements
    }

    /// How many elements are in use.
    pub fn in_use(&self) -> u8 {
        let home = self.free.len() + self.cooling.len();
        self.elements - u8::try_from(home).expect("at most 255 elements")
    }

    /// Takes an element, all zero.
    pub fn take(&mut self) -> Option<Rmbe> {
        // RFC 7609 4.4.1 #1: prepare element before telling peer
        self.free.pop().or_else(|| self.cooling.pop_front())
    }

    /// Takes an element back and zeroes it (RFC 4.4.1).
    ///
    /// # Panics
    ///
    /// If the element is not of this RMB.
    pub fn give_back(&mut self, mut element: Rmbe) {
        assert_eq!(element.region.address(), self.region.address());
        assert_eq!(element.size, self.size, "one region, carved twice");
        // RFC 7609 4.4.1 #3: zero the entire element before use
        element.clear();
        self.cooling.push_back(element);
        if self.cooling.len() > COOLING {
            self.free.extend(self.cooling.pop_front());
        }
        assert!(self.free.len() + self.cooling.len() <= usize::from(self.elements));
    }
}

/// An RMB element: memory that the peer's NIC writes while we run.
///
/// Not `Clone`: whoever holds it is its only reader. On our side, only its RMB can write to it,
/// when it zeroes an element that came back; pages that are given back are zero, too.
// RFC 7609 2.1 #4: only the peer writes an RMB
// RFC 7609 4.4.1 #2: owner only reads the element
#[must_use = "an element that is dropped is lost to its RMB"]
#[derive(Debug)]
pub struct Rmbe {
    region: Region,
    index: u8,
    size: RmbeSize,
    /// The bytes that the peer has written, as far as it has said so, and those between.
    touched: Range<u32>,
    /// It may have written anywhere else, too.
    anywhere: bool,
    /// How many bytes had been placed in it before the present connection got it, modulo 2^32.
    before: u32,
}

impl Rmbe {
    /// Which element of its RMB; the first is 1.
    pub fn index(&self) -> u8 {
        self.index
    }

    /// Its size.
    pub fn size(&self) -> RmbeSize {
        self.size
    }

    /// Length in bytes.
    pub fn capacity(&self) -> u32 {
        self.size.bytes()
    }

    /// The address of the RMB it belongs to.
    pub fn rmb_address(&self) -> u64 {
        self.region.address()
    }

    /// Copies `out.len()` bytes that start `at` bytes into the element.
    ///
    /// # Panics
    ///
    /// If the range leaves the element. Ranges come from our own cursors, so this is our bug.
    pub fn copy_out(&self, at: u32, out: &mut [u8]) {
        assert!(u64::from(at) + out.len() as u64 <= u64::from(self.capacity()));
        self.region.copy_out(self.start() + at as usize, out);
    }

    /// Notes that the peer has written these bytes. The element has pages there, which are cheaper
    /// to zero than to give back, if they are few; see [`Rmb::give_back`].
    ///
    /// # Panics
    ///
    /// If they are beyond the element.
    pub fn touch(&mut self, written: Range<u32>) {
        assert!(written.end <= self.capacity());
        if written.is_empty() {
            return;
        }
        if self.touched.is_empty() {
            self.touched = written;
        } else {
            let start = self.touched.start.min(written.start);
            self.touched = start..self.touched.end.max(written.end);
        }
    }

    /// Notes that the peer may have written anywhere. Most of it will not have pages: those that
    /// there are will be given back, rather than others made in order to zero them.
    pub fn touch_all(&mut self) {
        self.touched = 0..self.capacity();
        self.anywhere = true;
    }

    /// Gives the pages that the peer has used back to the host, if it has announced all that it has
    /// written: `announced` bytes in all, modulo 2^32, since the element was taken, and the caller
    /// has read them. Returns how many bytes the pages had: none, if they stay.
    ///
    /// Of writes that nobody has announced yet, some bytes were placed or will be; the former make
    /// the counts differ, and the latter find new pages. A byte that was written twice makes them
    /// differ for ever. That is right, only a waste of memory: after a failover nobody can say what
    /// is still to be announced.
    ///
    /// # Panics
    ///
    /// If the placer is not of its region.
    pub fn relinquish(&mut self, placer: &Placer, announced: u32) -> usize {
        let home = placer.region().address();
        assert_eq!(home, self.region.address(), "the placer is not of the same region");
        let (used, start) = (self.used(), self.start());
        let (pages, end) = (start + used.start..start + used.end, start + self.capacity() as usize);
        let expected = self.before.wrapping_add(announced);
        if used.is_empty() || !placer.relinquish(pages, start..end, expected) {
            return 0;
        }
        (self.touched, self.anywhere) = (0..0, false);
        used.len()
    }

    /// Two ranges of the element in stream order, for a system call to read.
    ///
    /// # Panics
    ///
    /// If a range leaves the element.
    pub fn readable(&self, ranges: [Range<u32>; 2]) -> Readable<'_> {
        let pieces = ranges.map(|range| {
            assert!(range.start <= range.end && range.end <= self.capacity());
            let len = (range.end - range.start) as usize;
            Piece { base: self.region.pointer(self.start() + range.start as usize, len), len }
        });
        Readable { pieces, element: self }
    }

    fn start(&self) -> usize {
        usize::from(self.index - 1) * self.size.bytes() as usize
    }

    /// Zeroes the whole element. A peer that breaks the protocol may have written anywhere, so
    /// pages behind those that were used are given back: for pages that were never there, that is
    /// one short system call.
    fn clear(&mut self) {
        let (start, len, used) = (self.start(), self.capacity() as usize, self.used().end);
        let by_hand = if self.anywhere || used > ZERO_BY_HAND_MAX { 0 } else { used };
        self.region.zero(start, by_hand);
        self.region.discard(start + by_hand, len - by_hand);
        (self.touched, self.anywhere) = (0..0, false);
        self.before = self.region.placed(start, len);
    }

    /// The pages that the peer has written, as far as it has said so, in bytes from the start.
    fn used(&self) -> Range<usize> {
        let Range { start, end } = self.touched;
        let end = (end as usize).next_multiple_of(PAGE).min(self.capacity() as usize);
        start as usize / PAGE * PAGE..end
    }
}

/// The readable bytes of an element, by address.
#[derive(Debug)]
pub struct Readable<'a> {
    pieces: [Piece; 2],
    element: &'a Rmbe,
}

impl Readable<'_> {
    /// How many bytes these are.
    #[allow(clippy::len_without_is_empty, reason = "nobody writes what is empty")]
    pub fn len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len).sum()
    }

    /// Copies as many bytes as fit to the start of `out`, in stream order, and returns how many:
    /// what `send` does, for sockets that are not the kernel's.
    pub fn copy_out(&self, out: &mut [u8]) -> usize {
        let region = &self.element.region;
        let mut done = 0;
        for piece in &self.pieces {
            let len = piece.len.min(out.len() - done);
            let at = piece.base.as_ptr() as usize - region.pointer(0, 0).as_ptr() as usize;
            region.copy_out(at, &mut out[done..done + len]);
            done += len;
        }
        done
    }
}

// SAFETY: `Foreign` asks for pieces that stay valid for the life of the value and that no
// reference names: `Rmbe::readable` checked them against the element, whose region the borrow
// keeps mapped, and regions are never referenced (see `Mapping`, ALIEN).
unsafe impl Foreign for Readable<'_> {
    fn pieces(&self) -> [Piece; 2] {
        self.pieces
    }
}

/// How many elements are not used again while others are free. With a thousand short connections
/// per second each of them rests for some milliseconds, and the peer needs less than one.
const COOLING: usize = 16;
/// Up to here clearing by hand is cheaper than asking the kernel for new pages.
const ZERO_BY_HAND_MAX: usize = 32_768;
/// The kernel gives memory in units of this size.
const PAGE: usize = 4096;

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    // RFC 7609 2.1 #8: equal element sizes within an RMB
    // RFC 7609 4.2 #1: divide RMB into equal elements
    // RFC 7609 4.4.1 #3: zero the entire element before use
    // RFC 7609 4.4.1 #1: prepare element before telling peer
    // RFC 7609 4.4.1 #2: owner only reads the element
    #[test]
    fn elements_are_numbered_from_one_and_come_back_zeroed() {
        let region = Region::new(3 * 65_536).unwrap();
        let mut rmb = Rmb::carve(region.clone(), RmbeSize::KIB_64);
        let first = rmb.take().unwrap();
        let mut second = rmb.take().unwrap();
        assert_eq!((first.index(), second.index()), (1, 2));
        assert_eq!(rmb.in_use(), 2);

        region.copy_in(65_536, &[9; 65_536]);
        second.touch(0..65_536);
        rmb.give_back(second);
        let third = rmb.take().unwrap();
        assert_eq!(third.index(), 3);
        let second = rmb.take().unwrap();
        assert_eq!(second.index(), 2);
        let mut out = vec![1; 65_536];
        second.copy_out(0, &mut out);
        assert!(out.iter().all(|byte| *byte == 0));
        assert!(rmb.take().is_none());
        for element in [first, second, third] {
            rmb.give_back(element);
        }
        assert_eq!(rmb.in_use(), 0);
    }

    /// An element that has just come home is the last that another connection gets; of others, the
    /// one whose pages are warm is the first.
    #[test]
    fn elements_cool_down_before_they_are_used_again() {
        let count = 2 * COOLING;
        let mut rmb = Rmb::carve(Region::new(count * 16_384).unwrap(), RmbeSize::from_notation(0));
        let mut out: VecDeque<_> = std::iter::from_fn(|| rmb.take()).collect();
        assert_eq!(out.len(), count);
        let all: Vec<_> = out.iter().map(Rmbe::index).collect();
        out.drain(..).for_each(|one| rmb.give_back(one));
        assert_eq!(rmb.in_use(), 0);
        let (warm, cooling) = all.split_at(count - COOLING);
        let expected: Vec<_> = warm.iter().rev().chain(cooling).copied().collect();
        out.extend(std::iter::from_fn(|| rmb.take()));
        assert_eq!(out.iter().map(Rmbe::index).collect::<Vec<_>>(), expected);
        out.into_iter().for_each(|one| rmb.give_back(one));
    }

    /// The next connection must find nothing of this one, wherever the peer wrote and whatever it
    /// said of that; and the neighbours must find their bytes.
    // RFC 7609 4.4.1 #3: zero the entire element before use
    #[test]
    fn a_whole_element_is_cleared_and_nothing_of_its_neighbours() {
        for touched in [0, 1, 4_095, 4_097, 32_768, 32_769, 40_001, 65_536] {
            let region = Region::new(3 * 65_536).unwrap();
            let mut rmb = Rmb::carve(region.clone(), RmbeSize::KIB_64);
            let (first, mut second) = (rmb.take().unwrap(), rmb.take().unwrap());
            region.copy_in(0, &[9; 3 * 65_536]);
            second.touch(0..touched);
            rmb.give_back(second);
            let mut out = vec![1; 3 * 65_536];
            region.copy_out(0, &mut out);
            let cleared = 65_536..2 * 65_536;
            let wrong =
                out.iter().enumerate().find(|(at, byte)| (**byte == 0) != cleared.contains(at));
            assert_eq!(wrong, None, "{touched}");
            rmb.give_back(first);
        }
    }

    /// The bytes of the connection before count for it, not for the present one.
    #[test]
    fn an_element_gives_its_memory_back_once() {
        let region = Region::new(2 * 65_536).unwrap();
        let placer = region.placer();
        let mut rmb = Rmb::carve(region, RmbeSize::KIB_64);
        for round in 0..3 {
            let (mut first, mut second) = (rmb.take().unwrap(), rmb.take().unwrap());
            assert_eq!(first.relinquish(&placer, 0), 0, "it has none");
            placer.place(first.start() + 100, &[7; 50]);
            placer.place(second.start(), &[7; 9]);
            first.touch(100..150);
            second.touch(0..9);
            for other in [49, 51, 0] {
                assert_eq!(first.relinquish(&placer, other), 0, "round {round}, {other} bytes");
            }
            assert_eq!(first.relinquish(&placer, 50), 4_096);
            let mut out = [1; 150];
            first.copy_out(0, &mut out);
            assert_eq!(out, [0; 150]);
            assert_eq!(first.relinquish(&placer, 50), 0, "nothing was written since");
            second.copy_out(0, &mut out);
            assert_eq!(out[..10], [7, 7, 7, 7, 7, 7, 7, 7, 7, 0], "the neighbour keeps its own");
            placer.place(first.start() + 8_000, &[7; 200]);
            first.touch(8_000..8_200);
            assert_eq!(first.relinquish(&placer, 250), 8_192, "of three pages, two have it");
            rmb.give_back(first);
            rmb.give_back(second);
        }
    }

    /// A reset connection has used a page or two of its element, and its peer may write anywhere.
    /// Where thousands were reset at once, zeroing the whole of each by hand took memory for all.
    #[test]
    fn an_element_that_may_have_been_written_anywhere_gets_no_new_pages() {
        let region = Region::new(2 * 32_768).unwrap();
        let mut rmb = Rmb::carve(region.clone(), RmbeSize::from_notation(1));
        let mut element = rmb.take().unwrap();
        region.copy_in(element.start() + 100, &[9; 50]);
        assert_eq!(pages_of(&region), 1);
        element.touch_all();
        rmb.give_back(element);
        assert_eq!(pages_of(&region), 0);
    }

    /// How many pages of a region have memory.
    fn pages_of(region: &Region) -> usize {
        let map = File::open("/proc/self/pagemap").unwrap();
        let first = region.address() / PAGE as u64;
        let pages = first..first + (region.len() / PAGE) as u64;
        let is_present = |page: &u64| {
            let mut entry = [0; 8];
            map.read_exact_at(&mut entry, page * 8).unwrap();
            u64::from_ne_bytes(entry) >> 63 == 1
        };
        pages.filter(is_present).count()
    }

    #[test]
    #[should_panic(expected = "is not of")]
    fn an_element_is_given_back_by_placers_of_its_region() {
        let mut rmb = Rmb::carve(Region::new(65_536).unwrap(), RmbeSize::KIB_64);
        let other = Region::new(65_536).unwrap().placer();
        let _ = rmb.take().unwrap().relinquish(&other, 0);
    }

    #[test]
    #[should_panic(expected = "carved twice")]
    fn an_element_of_another_carving_is_our_bug() {
        let region = Region::new(65_536).unwrap();
        let mut small = Rmb::carve(region.clone(), RmbeSize::from_notation(0));
        let mut large = Rmb::carve(region, RmbeSize::KIB_64);
        small.give_back(large.take().unwrap());
    }

    /// A system call must see the two halves of a wrapped stream in order, and nothing beyond.
    #[test]
    fn readable_ranges_are_those_of_the_element() {
        let region = Region::new(2 * 65_536).unwrap();
        let mut rmb = Rmb::carve(region.clone(), RmbeSize::KIB_64);
        let (first, second) = (rmb.take().unwrap(), rmb.take().unwrap());
        let pieces = second.readable([65_530..65_536, 0..4]).pieces();
        let at = pieces.map(|piece| (piece.base.as_ptr() as u64 - region.address(), piece.len));
        assert_eq!(at, [(131_066, 6), (65_536, 4)]);

        region.copy_in(131_066, &[1, 2, 3, 4, 5, 6]);
        region.copy_in(65_536, &[7, 8, 9, 10]);
        let mut out = [0; 12];
        let wrapped = second.readable([65_530..65_536, 0..4]);
        assert_eq!((wrapped.copy_out(&mut out[..8]), wrapped.copy_out(&mut out)), (8, 10));
        assert_eq!(out, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]);
        for element in [first, second] {
            rmb.give_back(element);
        }
    }

    #[test]
    #[should_panic(expected = "range.end <= self.capacity()")]
    fn a_readable_range_beyond_the_element_is_our_bug() {
        let mut rmb = Rmb::carve(Region::new(2 * 65_536).unwrap(), RmbeSize::KIB_64);
        let first = rmb.take().unwrap();
        let _ = first.readable([0..65_537, 0..0]);
    }
}
