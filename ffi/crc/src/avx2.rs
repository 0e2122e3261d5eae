//! Streams of 32 bytes, for processors that multiply that wide and have no AVX-512: AMD's of the
//! third generation of Zen, Intel's for desktops since 2021.

use std::arch::x86_64::{
    __m128i, __m256i, _mm_clmulepi64_si128, _mm_set_epi64x, _mm_xor_si128, _mm256_add_epi32,
    _mm256_and_si256, _mm256_castsi256_si128, _mm256_clmulepi64_epi128, _mm256_cmpeq_epi32,
    _mm256_cmpgt_epi32, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_permutevar8x32_epi32,
    _mm256_set_epi64x, _mm256_set1_epi32, _mm256_setr_epi32, _mm256_setzero_si256,
    _mm256_xor_si256,
};

use super::fold::{FIRST_BY_FIRST, Fold, SECOND_BY_SECOND, STREAMS, reduce};

/// Whether the processor has all that [`compute`] uses.
pub(super) fn is_there() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("pclmulqdq")
        && is_x86_feature_detected!("sse4.1")
}

/// The CRC-32 of at least one line, and of a multiple of four bytes.
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.1")]
pub(super) fn compute(crc: u32, bytes: &[u8]) -> u32 {
    let (head, rest) = bytes.split_at((bytes.len() - 1) % LINE + 1);
    let (lines, _) = rest.as_chunks::<LINE>();
    let (few, groups) = lines.split_at(lines.len() % STREAMS);
    let (groups, _) = groups.as_chunks::<STREAMS>();
    let none = _mm256_setzero_si256();
    let first = load_head(!crc, bytes.first_chunk().expect("there is a line"), head.len());
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
    let b = fold(b, d, wide(const { Fold::over(2 * LINE) }));
    let a = fold(a, none, wide(const { Fold::over(3 * LINE) }));
    let c = fold(c, b, wide(const { Fold::over(LINE) }));
    reduce(join(_mm256_xor_si256(a, c)))
}

/// A line that ends with the first `len` bytes of `line`, a multiple of four, to the first four of
/// which the state of the CRC before them is added.
#[inline]
#[target_feature(enable = "avx2")]
fn load_head(state: u32, line: &[u8; LINE], len: usize) -> __m256i {
    let absent = i32::try_from((LINE - len) / 4).expect("a line is short");
    // Which word of `line` each word gets: a negative number is none.
    let words = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let words = _mm256_add_epi32(words, _mm256_set1_epi32(-absent));
    let is_there = _mm256_cmpgt_epi32(words, _mm256_set1_epi32(-1));
    let is_first = _mm256_cmpeq_epi32(words, _mm256_setzero_si256());
    let head = _mm256_and_si256(_mm256_permutevar8x32_epi32(load(line), words), is_there);
    let state = _mm256_and_si256(_mm256_set1_epi32(state.cast_signed()), is_first);
    _mm256_xor_si256(head, state)
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(line: &[u8; LINE]) -> __m256i {
    // SAFETY: `_mm256_loadu_si256` asks for 32 bytes valid for reads: `line` has them.
    unsafe { _mm256_loadu_si256(line.as_ptr().cast()) }
}

/// Adds `earlier` to `later`, which stands as far behind it as `by` says.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
fn fold(earlier: __m256i, later: __m256i, by: __m256i) -> __m256i {
    let first = _mm256_clmulepi64_epi128::<FIRST_BY_FIRST>(earlier, by);
    let second = _mm256_clmulepi64_epi128::<SECOND_BY_SECOND>(earlier, by);
    _mm256_xor_si256(_mm256_xor_si256(first, later), second)
}

/// Adds the first half of a line to the last one.
#[inline]
#[target_feature(enable = "avx2,pclmulqdq")]
fn join(line: __m256i) -> __m128i {
    let Fold { first, second } = const { Fold::over(16) };
    let by = _mm_set_epi64x(second, first);
    let half = _mm256_castsi256_si128(line);
    let first = _mm_clmulepi64_si128::<FIRST_BY_FIRST>(half, by);
    let second = _mm_clmulepi64_si128::<SECOND_BY_SECOND>(half, by);
    let folded = _mm_xor_si128(first, second);
    _mm_xor_si128(folded, _mm256_extracti128_si256::<1>(line))
}

/// The same for each half of a line.
#[inline]
#[target_feature(enable = "avx2")]
fn wide(by: Fold) -> __m256i {
    let Fold { first, second } = by;
    _mm256_set_epi64x(second, first, second, first)
}

/// What one register holds.
pub(super) const LINE: usize = 32;
