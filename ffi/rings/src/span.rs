//! A part of a ring, as the gateway has it.

use std::marker::PhantomData;

use smcr_os::{Foreign, Piece};

use crate::gateway::Gateway;
use crate::layout::Run;

/// A part of a ring: bytes to read, or room.
#[derive(Debug)]
pub struct Span<'a> {
    pieces: [Piece; 2],
    rings: PhantomData<&'a Gateway>,
}

impl Span<'_> {
    /// These runs, which are within the mapping that the borrow keeps.
    pub(crate) fn new(runs: [Run; 2]) -> Self {
        let pieces = runs.map(|Run { base, len }| Piece { base, len });
        Self { pieces, rings: PhantomData }
    }

    /// How many bytes it has.
    #[allow(clippy::len_without_is_empty, reason = "a ring that is empty gives out none")]
    pub fn len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len).sum()
    }
}

// SAFETY: `Foreign` asks for pieces that stay valid for the life of the value and that no reference
// names: they are within the mapping, which the borrow of the `Gateway` keeps, and which begins and
// ends with pages; by ALIEN nobody has a reference to it.
unsafe impl Foreign for Span<'_> {
    fn pieces(&self) -> [Piece; 2] {
        self.pieces
    }
}
