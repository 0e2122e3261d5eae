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
            let count = part.len.min(run.len - done).min(AT_ONCE);
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

/// For more bytes, the C library may use `rep movsb`. On some CPUs (AMD's Zen 3) that has a
/// fifteenth of its speed if the offset of the target in its page is 1 to 31 bytes above that of
/// the source, and large buffers of `malloc` begin at 16, bytes of a ring at 0. Pieces as short as
/// this are copied by wide registers, as fast as `rep movsb` at its best.
const AT_ONCE: usize = 1_024;

/// How many bytes there are in all parts.
pub(crate) fn length(parts: &[iovec]) -> usize {
    parts.iter().fold(0, |sum, part| sum.saturating_add(part.iov_len))
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use super::*;

    #[test]
    fn long_runs_and_parts_of_any_length_keep_their_order() {
        let sent: Vec<u8> = (0..=u8::MAX).cycle().take(8_000).collect();
        let mut ring = vec![0_u8; 8_000];
        let mut received = vec![0_u8; 8_000];
        for (lens, run_lens, direction) in [
            ([1, 2_000, 5_999], [5_000, 3_000], Direction::IntoRing),
            ([1_023, 1_025, 5_952], [2_049, 5_951], Direction::OutOfRing),
        ] {
            let mut at = 0;
            let runs = run_lens.map(|len| {
                let base = NonNull::new(ring.as_mut_ptr().wrapping_add(at)).unwrap();
                at += len;
                Run { base, len }
            });
            let memory = match direction {
                Direction::IntoRing => sent.as_ptr().cast_mut(),
                Direction::OutOfRing => received.as_mut_ptr(),
            };
            let mut at = 0;
            let mut parts = lens.into_iter().map(|len| {
                at += len;
                Part::new(memory.wrapping_add(at - len), len)
            });
            // SAFETY: parts and runs have 8,000 bytes each, all of live vectors; what is read from
            // `sent` is not written.
            unsafe { copy_between(&runs, &mut parts, direction) };
        }
        assert!(received == sent);
    }
}
