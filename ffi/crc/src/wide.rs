//! CRC-32 by AVX-512: sixteen streams of 16 bytes, four in each register.
//!
//! V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"
//! (Intel, 2009): what stands so many bits before something else is added to it by two
//! multiplications with constants that depend on the distance alone ([`Fold`]). This shape is ours:
//!
//! ```text
//!   input     ······xx xxxxxxxx xxxxxxxx ...      · is a zero: in front, it changes no CRC
//!   streams   a b c d   a b c d   a b c d         lines of 64 bytes; the first ones may be zeros
//!   join      a ─► d, b ─► d, c ─► d              at once
//!             the first three quarters of d ─► the last one, at once
//! ```

use std::arch::x86_64::{
    __m128i, __m512i, _mm_and_si128, _mm_clmulepi64_si128, _mm_cvtsi32_si128, _mm_extract_epi32,
    _mm_set_epi32, _mm_set_epi64x, _mm_srli_si128, _mm_xor_si128, _mm256_castsi256_si128,
    _mm256_extracti128_si256, _mm256_xor_si256, _mm512_castsi128_si512, _mm512_castsi512_si256,
    _mm512_clmulepi64_epi128, _mm512_extracti32x4_epi32, _mm512_extracti64x4_epi64,
    _mm512_loadu_si512, _mm512_maskz_expand_epi8, _mm512_maskz_loadu_epi8, _mm512_set_epi64,
    _mm512_setzero_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512,
};
use std::sync::LazyLock;

/// The CRC-32 as [`super::update`] has it; none if this is not for the processor, or the length.
#[inline]
pub(super) fn update(crc: u32, bytes: &[u8]) -> Option<u32> {
    // The state is added to the first four bytes, which must be in one line. Packets have a
    // multiple of four.
    if bytes.len() < LEN_MIN || matches!(bytes.len() % LINE, 1..STATE) || !*IS_THERE {
        return None;
    }
    // SAFETY: `compute` asks for a processor with the features that it names: `IS_THERE` has asked
    // for each.
    Some(unsafe { compute(crc, bytes) })
}

/// Whether the processor has all that [`compute`] uses.
static IS_THERE: LazyLock<bool> = LazyLock::new(|| {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vbmi2")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("pclmulqdq")
        && is_x86_feature_detected!("sse4.1")
});

/// The CRC-32 of at least one line.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,vpclmulqdq,pclmulqdq,sse4.1")]
fn compute(crc: u32, bytes: &[u8]) -> u32 {
    let (head, rest) = bytes.split_at((bytes.len() - 1) % LINE + 1);
    let (lines, _) = rest.as_chunks::<LINE>();
    let (few, groups) = lines.split_at(lines.len() % STREAMS);
    let (groups, _) = groups.as_chunks::<STREAMS>();
    let (none, first) = (_mm512_setzero_si512(), load_head(!crc, head));
    let mut streams = match few {
        [] => [none, none, none, first],
        [b] => [none, none, first, load(b)],
        [b, c] => [none, first, load(b), load(c)],
        [b, c, d, ..] => [first, load(b), load(c), load(d)],
    };
    let by_group = const { Fold::over(STREAMS * LINE) }.wide();
    for group in groups {
        for (stream, line) in streams.iter_mut().zip(group) {
            *stream = fold(*stream, load(line), by_group);
        }
    }
    let [a, b, c, d] = streams;
    let a = fold(a, d, const { Fold::over(3 * LINE) }.wide());
    let b = fold(b, none, const { Fold::over(2 * LINE) }.wide());
    let c = fold(c, none, const { Fold::over(LINE) }.wide());
    reduce(join(_mm512_ternarylogic_epi64::<XOR>(a, b, c)))
}

/// A line of up to 64 bytes that ends with `head`, to the first four bytes of which the state of
/// the CRC before them is added.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2")]
fn load_head(state: u32, head: &[u8]) -> __m512i {
    let absent = LINE - head.len();
    // SAFETY: `_mm512_maskz_loadu_epi8` asks for as many bytes valid for reads as the mask says:
    // `head` has 1 to 64, and as many bits of the mask are set.
    let head = unsafe { _mm512_maskz_loadu_epi8(!0 >> absent, head.as_ptr().cast()) };
    let head = _mm512_maskz_expand_epi8(!0 << absent, head);
    let state = _mm512_castsi128_si512(_mm_cvtsi32_si128(state.cast_signed()));
    let state = _mm512_maskz_expand_epi8(0xf << absent, state);
    _mm512_xor_si512(head, state)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(line: &[u8; LINE]) -> __m512i {
    // SAFETY: `_mm512_loadu_si512` asks for 64 bytes valid for reads: `line` has them.
    unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
}

/// Adds `earlier` to `later`, which stands as far behind it as `by` says.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold(earlier: __m512i, later: __m512i, by: __m512i) -> __m512i {
    let first = _mm512_clmulepi64_epi128::<FIRST_BY_FIRST>(earlier, by);
    let second = _mm512_clmulepi64_epi128::<SECOND_BY_SECOND>(earlier, by);
    _mm512_ternarylogic_epi64::<XOR>(first, second, later)
}

/// Adds the first three quarters of a line to the last one.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn join(line: __m512i) -> __m128i {
    let [first, second, third] = const { [Fold::over(48), Fold::over(32), Fold::over(16)] };
    let by = _mm512_set_epi64(
        0,
        0,
        third.second,
        third.first,
        second.second,
        second.first,
        first.second,
        first.first,
    );
    // Nothing comes of the last quarter.
    let folded = fold(line, _mm512_setzero_si512(), by);
    let halves = (_mm512_castsi512_si256(folded), _mm512_extracti64x4_epi64::<1>(folded));
    let half = _mm256_xor_si256(halves.0, halves.1);
    let quarter = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
    _mm_xor_si128(quarter, _mm512_extracti32x4_epi32::<3>(line))
}

/// The CRC of 16 bytes, to which all before them were added.
#[inline]
#[target_feature(enable = "pclmulqdq,sse4.1")]
fn reduce(bytes: __m128i) -> u32 {
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

/// What bytes are multiplied with to be added to others that stand behind them.
#[derive(Clone, Copy)]
struct Fold {
    /// For the first eight of 16 bytes.
    first: i64,
    /// For the others.
    second: i64,
}

impl Fold {
    /// Over so many bytes, 16 at least.
    const fn over(bytes: usize) -> Self {
        let bits = 8 * bytes;
        Self { first: power(bits + 32), second: power(bits - 32) }
    }

    /// The same for each quarter of a line.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn wide(self) -> __m512i {
        let Self { first, second } = self;
        _mm512_set_epi64(second, first, second, first, second, first, second, first)
    }
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

/// What one register holds.
const LINE: usize = 64;
/// Registers that are folded side by side, as one multiplication must wait for the one before it.
const STREAMS: usize = 4;
/// Shorter inputs are left to others. Without this, a request and its answer took 13 % longer (0.99
/// to 1.24, ten rounds; `perf/results`), perhaps because processors switch their widest units off
/// where they are needed now and then only.
const LEN_MIN: usize = 512;
/// Bytes that the state of a CRC is added to.
const STATE: usize = 4;
/// The polynomial without its highest coefficient, the lowest one last.
const REVERSED: u32 = 0xedb8_8320;
/// The whole polynomial, reversed.
const POLYNOMIAL: i64 = 0x1_db71_0641;
/// x to the power of 64 divided by the polynomial, reversed.
const QUOTIENT: i64 = 0x1_f701_1641;
/// Which halves are multiplied: the first of the one with the first of the other.
const FIRST_BY_FIRST: i32 = 0x00;
const FIRST_BY_SECOND: i32 = 0x10;
const SECOND_BY_SECOND: i32 = 0x11;
/// The table of a sum without carry of three bits.
const XOR: i32 = 0x96;

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

    #[test]
    fn short_inputs_and_odd_ones_are_left_to_others() {
        for len in [0, 64, 508, 511, 513, 514, 515, 577] {
            assert_eq!(update(0, &vec![0; len]), None, "{len}");
        }
        for len in [512, 516, 576, 1436] {
            assert_eq!(update(0, &vec![0; len]).is_some(), *IS_THERE, "{len}");
        }
    }
}
