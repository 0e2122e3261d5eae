//! Copies between memory of ours and memory that another process shares.
//!
//! Both are [`Foreign`]: others may write them at the same time, so all accesses are atomic ones.

use std::cell::Cell;
use std::ptr::NonNull;

use smcr_os::{Foreign, Piece};

use crate::contested::Contested;

/// Copies as many bytes as both have, in order. Returns how many.
///
/// # Panics
///
/// If the two overlap.
pub fn copy(source: &impl Foreign, target: &impl Foreign) -> usize {
    each(source, target, |from, to, len| contested(to, len).copy(&contested(from, len)))
}

/// Copies bytes to the start of `out`: as many as fit. Returns how many.
pub fn copy_out(source: &impl Foreign, out: &mut [u8]) -> usize {
    let mut done = 0;
    for piece in source.pieces() {
        let len = piece.len.min(out.len() - done);
        contested(piece.base, len).load(&mut out[done..done + len]);
        done += len;
    }
    done
}

/// Copies the start of `bytes`: as many as fit. Returns how many.
pub fn copy_in(target: &impl Foreign, bytes: &[u8]) -> usize {
    let mut done = 0;
    for piece in target.pieces() {
        let len = piece.len.min(bytes.len() - done);
        contested(piece.base, len).store(&bytes[done..done + len]);
        done += len;
    }
    done
}

/// Calls `act` for runs that lie within one piece of both.
fn each(
    source: &impl Foreign,
    target: &impl Foreign,
    act: impl Fn(NonNull<u8>, NonNull<u8>, usize),
) -> usize {
    let (sources, targets) = (source.pieces().map(Cell::new), target.pieces().map(Cell::new));
    let mut done = 0;
    for from in &sources {
        for to in &targets {
            let (a, b) = (from.get(), to.get());
            let len = a.len.min(b.len);
            act(a.base, b.base, len);
            from.set(behind(a, len));
            to.set(behind(b, len));
            done += len;
        }
    }
    done
}

/// What of a piece follows its first `len` bytes.
fn behind(piece: Piece, len: usize) -> Piece {
    if len == piece.len {
        return Piece::EMPTY;
    }
    // SAFETY: `add` asks to stay within the allocation: `len` is less than the piece has.
    Piece { base: unsafe { piece.base.add(len) }, len: piece.len - len }
}

/// The `len` bytes from `start`, which are within a piece of a `Foreign`.
fn contested<'a>(start: NonNull<u8>, len: usize) -> Contested<'a> {
    // SAFETY: `new` asks for
    // - WHOLE: a piece is valid as long as its `Foreign` is, which outlives the copy, and so are
    //   the words in which it begins and ends, as the trait says;
    // - ATOMIC: nobody has a reference to them, and smcr-memory has no other accesses. What another
    //   process does is no access of Rust code.
    unsafe { Contested::new(start, len) }
}

#[cfg(test)]
mod tests {
    use smcr_os::Mapping;

    use super::*;

    /// Two pieces of a mapping.
    struct Pieces(Mapping, [std::ops::Range<usize>; 2]);

    // SAFETY: `Foreign` asks for valid pieces: they are within the mapping, which lives as long.
    unsafe impl Foreign for Pieces {
        fn pieces(&self) -> [Piece; 2] {
            self.1.clone().map(|range| {
                assert!(range.end <= self.0.len());
                // SAFETY: `add` asks to stay within the mapping: just checked.
                Piece { base: unsafe { self.0.base().add(range.start) }, len: range.len() }
            })
        }
    }

    fn pieces(first: std::ops::Range<usize>, second: std::ops::Range<usize>) -> Pieces {
        Pieces(Mapping::anonymous(8192).unwrap(), [first, second])
    }

    #[test]
    fn bytes_keep_their_order_over_pieces_of_any_size() {
        let bytes: Vec<u8> = (0..=255).cycle().take(700).collect();
        for first in [0, 1, 7, 64, 333, 700] {
            for second in [0, 1, 9, 200, 699, 700] {
                let source = pieces(3..3 + first, 4096..4096 + 700 - first);
                let target = pieces(5..5 + second, 5000..5000 + 700 - second);
                assert_eq!(copy_in(&source, &bytes), 700);
                assert_eq!(copy(&source, &target), 700);
                let mut out = vec![0; 800];
                assert_eq!(copy_out(&target, &mut out), 700);
                assert_eq!(out[..700], bytes, "{first} {second}");
            }
        }
    }

    #[test]
    fn no_more_is_copied_than_both_have() {
        let (few, many) = (pieces(0..10, 20..25), pieces(0..100, 0..0));
        assert_eq!((copy(&few, &many), copy(&many, &few)), (15, 15));
        let mut out = [0; 12];
        assert_eq!((copy_out(&few, &mut out), copy_in(&few, &[1; 100])), (12, 15));
    }
}
