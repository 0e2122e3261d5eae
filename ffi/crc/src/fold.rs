//! Addition of bytes to others that stand behind them, without changing the CRC-32 of all.
//!
//! V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"
//! (Intel, 2009): what stands so many bits before something else is added to it by two
//! multiplications with constants that depend on the distance alone ([`Fold`]). This shape is ours:
//!
//! ```text
//!   input     ······xx xxxxxxxx xxxxxxxx ...      · is a zero: in front, it changes no CRC
//!   streams   a b c d   a b c d   a b c d         lines of one register; the first may be zeros
//!   join      a ─► d, b ─► d, c ─► d              at once
//!             the 16 bytes of d ─► its last ones  at once
//! ```

use std::arch::x86_64::{
    __m128i, _mm_and_si128, _mm_clmulepi64_si128, _mm_extract_epi32, _mm_set_epi32, _mm_set_epi64x,
    _mm_srli_si128, _mm_xor_si128,
};

/// What bytes are multiplied with to be added to others that stand behind them.
#[derive(Clone, Copy)]
pub(super) struct Fold {
    /// For the first eight of 16 bytes.
    pub(super) first: i64,
    /// For the others.
    pub(super) second: i64,
}

impl Fold {
    /// Over so many bytes, 16 at least.
    pub(super) const fn over(bytes: usize) -> Self {
        let bits = 8 * bytes;
        Self { first: power(bits + 32), second: power(bits - 32) }
    }
}

/// The CRC of 16 bytes, to which all before them were added.
#[inline]
#[target_feature(enable = "pclmulqdq,sse4.1")]
pub(super) fn reduce(bytes: __m128i) -> u32 {
    let low_word = |bits| _mm_and_si128(bits, _mm_set_epi32(0, 0, 0, !0));
    // 128 bits to 96, and to 64: what goes is added to the rest, and to 32 zeros behind it.
    let by = _mm_set_epi64x(const { power(64) }, const { power(96) });
    let low = _mm_clmulepi64_si128::<FIRST_BY_FIRST>(bytes, by);
    let bits = _mm_xor_si128(low, _mm_srli_si128::<8>(bytes));
    let low = _mm_clmulepi64_si128::<FIRST_BY_SECOND>(low_word(bits), by);
    let bits = _mm_xor_si128(low, _mm_srli_si128::<4>(bits));
    // 64 bits to 32 (Barrett): without the multiple of the polynomial that is in them.
    let by = _mm_set_epi64x(QUOTIENT, POLYNOMIAL);
    let multiple = _mm_clmulepi64_si128::<FIRST_BY_SECOND>(low_word(bits), by);
    let multiple = _mm_clmulepi64_si128::<FIRST_BY_FIRST>(low_word(multiple), by);
    !_mm_extract_epi32::<1>(_mm_xor_si128(bits, multiple)).cast_unsigned()
}

/// x to the power of `exponent` modulo the polynomial, as multiplications need it: the lowest
/// coefficient first, and one bit higher, since the product of two reversed numbers has one less.
const fn power(exponent: usize) -> i64 {
    let mut reversed: u32 = 1 << 31;
    let mut left = exponent;
    while left > 0 {
        let carry = if reversed & 1 != 0 { REVERSED } else { 0 };
        reversed = reversed >> 1 ^ carry;
        left -= 1;
    }
    (reversed as i64) << 1
}

/// Bytes that the state of a CRC is added to.
pub(super) const STATE: usize = 4;
/// Registers that are folded side by side, as one multiplication must wait for the one before it.
pub(super) const STREAMS: usize = 4;
/// Which halves are multiplied: the first of the one with the first of the other.
pub(super) const FIRST_BY_FIRST: i32 = 0x00;
const FIRST_BY_SECOND: i32 = 0x10;
pub(super) const SECOND_BY_SECOND: i32 = 0x11;
/// The polynomial without its highest coefficient, the lowest one last.
const REVERSED: u32 = 0xedb8_8320;
/// The whole polynomial, reversed.
const POLYNOMIAL: i64 = 0x1_db71_0641;
/// x to the power of 64 divided by the polynomial, reversed.
const QUOTIENT: i64 = 0x1_f701_1641;

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers that Intel has published, for distances of 64 and 16 bytes, and for the end.
    #[test]
    fn powers_are_those_of_the_paper() {
        let (far, near) = (Fold::over(64), Fold::over(16));
        assert_eq!([far.first, far.second], [0x1_5444_2bd4, 0x1_c6e4_1596]);
        assert_eq!(
            [near.first, near.second, power(64)],
            [0x1_7519_97d0, 0xccaa_009e, 0x1_63cd_6124]
        );
    }
}
