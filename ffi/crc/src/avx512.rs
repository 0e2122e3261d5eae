//! Streams of 64 bytes, by AVX-512.

use std::arch::x86_64::{
    __m128i, __m512i, _mm_cvtsi32_si128, _mm_xor_si128, _mm256_castsi256_si128,
    _mm256_extracti128_si256, _mm256_xor_si256, _mm512_castsi128_si512, _mm512_castsi512_si256,
    _mm512_clmulepi64_epi128, _mm512_extracti32x4_epi32, _mm512_extracti64x4_epi64,
    _mm512_loadu_si512, _mm512_maskz_expand_epi8, _mm512_maskz_loadu_epi8, _mm512_set_epi64,
    _mm512_setzero_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512,
};

use super::fold::{FIRST_BY_FIRST, Fold, SECOND_BY_SECOND, STREAMS, reduce};

/// Whether the processor has all that [`compute`] uses.
pub(super) fn is_there() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vbmi2")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("pclmulqdq")
        && is_x86_feature_detected!("sse4.1")
}

/// The CRC-32 of at least one line, the first of which has the four bytes that the state is added
/// to.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,vpclmulqdq,pclmulqdq,sse4.1")]
pub(super) fn compute(crc: u32, bytes: &[u8]) -> u32 {
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
    let by_group = wide(const { Fold::over(STREAMS * LINE) });
    for group in groups {
        for (stream, line) in streams.iter_mut().zip(group) {
            *stream = fold(*stream, load(line), by_group);
        }
    }
    let [a, b, c, d] = streams;
    let a = fold(a, d, wide(const { Fold::over(3 * LINE) }));
    let b = fold(b, none, wide(const { Fold::over(2 * LINE) }));
    let c = fold(c, none, wide(const { Fold::over(LINE) }));
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

/// The same for each quarter of a line.
#[inline]
#[target_feature(enable = "avx512f")]
fn wide(by: Fold) -> __m512i {
    let Fold { first, second } = by;
    _mm512_set_epi64(second, first, second, first, second, first, second, first)
}

/// What one register holds.
pub(super) const LINE: usize = 64;
/// The table of a sum without carry of three bits.
const XOR: i32 = 0x96;
