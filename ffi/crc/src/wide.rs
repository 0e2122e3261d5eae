//! The widest multiplication that the processor has, for what is long enough.

use std::sync::LazyLock;

use super::fold::STATE;
use super::{avx2, avx512};

/// What the processor multiplies at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    /// Four times 16 bytes.
    Avx512,
    /// Twice 16 bytes.
    Avx2,
    /// No more than 16 bytes.
    Narrow,
}

static WIDTH: LazyLock<Width> = LazyLock::new(|| match (avx512::is_there(), avx2::is_there()) {
    (true, _) => Width::Avx512,
    (false, true) => Width::Avx2,
    (false, false) => Width::Narrow,
});

/// The CRC-32 as [`super::update`] has it; none if this is not for the processor, or the length.
#[inline]
pub(super) fn update(crc: u32, bytes: &[u8]) -> Option<u32> {
    if bytes.len() < LEN_MIN {
        return None;
    }
    match *WIDTH {
        // The state is added to the first four bytes, which must be in one line.
        Width::Avx512 if !matches!(bytes.len() % avx512::LINE, 1..STATE) => {
            // SAFETY: `compute` asks for a processor with the features that it names: `WIDTH` has
            // asked for each.
            Some(unsafe { avx512::compute(crc, bytes) })
        }
        // Packets have a multiple of four bytes.
        Width::Avx2 if bytes.len().is_multiple_of(STATE) => {
            // SAFETY: as above.
            Some(unsafe { avx2::compute(crc, bytes) })
        }
        Width::Avx512 | Width::Avx2 | Width::Narrow => None,
    }
}

/// Shorter inputs are left to others. Without this, a request and its answer took 13 % longer (0.99
/// to 1.24, ten rounds; `perf/results`), perhaps because processors switch their widest units off
/// where they are needed now and then only.
const LEN_MIN: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{bit_by_bit, some_bytes};

    /// Each way that this processor has, whichever it is that packets take; every length has its
    /// own number of lines, and of bytes before the first whole one.
    #[test]
    fn every_width_has_the_same_crc() {
        let bytes = some_bytes(1_500);
        for before in [0, 1, 0x8000_0000, 0x0123_4567, u32::MAX] {
            for len in (64..1_480).step_by(STATE) {
                let bytes = &bytes[len % 31..][..len];
                let expected = bit_by_bit(before, bytes);
                if avx512::is_there() {
                    // SAFETY: the processor was asked just now.
                    let crc = unsafe { avx512::compute(before, bytes) };
                    assert_eq!(crc, expected, "AVX-512, {len} bytes");
                }
                if avx2::is_there() {
                    // SAFETY: the processor was asked just now.
                    let crc = unsafe { avx2::compute(before, bytes) };
                    assert_eq!(crc, expected, "AVX2, {len} bytes");
                }
            }
        }
    }

    #[test]
    fn short_inputs_and_odd_ones_are_left_to_others() {
        let is_taken = |len: usize| update(0, &vec![0; len]).is_some();
        for len in [0, 64, 508, 511, 513, 514, 515, 577] {
            assert!(!is_taken(len), "{len}");
        }
        for len in [512, 516, 576, 1436] {
            assert_eq!(is_taken(len), *WIDTH != Width::Narrow, "{len}");
        }
    }
}
