//! Bytes go between a ring and the memory of a program, which may be in several parts.

use std::ptr;

use libc::iovec;

use crate::layout::Run;

/// Which way bytes go between a ring and the program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    IntoRing,
    OutOfRing,
}

/// A part of the program's memory.
pub(crate) struct Part {
    start: *mut u8,
    len: usize,
}

impl Part {
    pub(crate) fn new(start: *mut u8, len: usize) -> Self {
        Self { start, len }
    }
}

/// Copies as many bytes as the runs have.
///
/// # Safety
///
/// The parts have at least as many bytes, and are valid for writes, or for reads if the bytes go
/// into the ring. The runs are valid for both.
pub(crate) unsafe fn copy_between(
    runs: &[Run],
    parts: &mut impl Iterator<Item = Part>,
    direction: Direction,
) {
    let mut part = Part::new(ptr::null_mut(), 0);
    for run in runs {
        let mut done = 0;
        while done < run.len {
            if part.len == 0 {
                let Some(next) = parts.next() else { return };
                part = next;
                continue;
            }
            let count = part.len.min(run.len - done);
            let in_ring = run.base.as_ptr().wrapping_add(done);
            let (source, target) = match direction {
                Direction::IntoRing => (part.start, in_ring),
                Direction::OutOfRing => (in_ring, part.start),
            };
            // SAFETY: `copy_nonoverlapping` asks for `count` valid bytes at both places, which the
            // caller promises: `count` exceeds neither the part nor the run. A ring is no memory of
            // the program's own, so they do not overlap.
            unsafe { ptr::copy_nonoverlapping(source, target, count) };
            part = Part::new(part.start.wrapping_add(count), part.len - count);
            done += count;
        }
    }
}

/// How many bytes there are in all parts.
pub(crate) fn length(parts: &[iovec]) -> usize {
    parts.iter().fold(0, |sum, part| sum.saturating_add(part.iov_len))
}
