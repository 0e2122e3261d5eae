//! Copies to and from memory that others may write at the same time.
//!
//! Two pollers may place bytes in one RMB at the same moment, and a peer that breaks the protocol
//! makes one of them write what another reads or clears. Plain copies would then be a data race,
//! which Rust leaves undefined. So every access here is a relaxed atomic one:
//!
//! - **Whole words only.** Each access is of one aligned word. Races between accesses of different
//!   sizes would be undefined, too. Where a range begins or ends within a word, that word is read
//!   whole, or replaced by compare-and-swap, so that the bytes beside the range stay what they are.
//! - **Relaxed.** Bytes become visible to other threads in any order. A thread learns that they are
//!   there through a queue, whose push releases and whose pop acquires.
//! - **The outcome of a race** is, for each word, what one of the writers wrote. Only a peer that
//!   breaks the protocol causes races, and only its own data suffers.
//!
//! System calls and NICs access the memory as well. They are no Rust code: what they write at the
//! same time is seen as written by some other thread, atomically.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A range of contested memory, for one copy.
///
/// # Invariants
///
/// - **WHOLE** Every aligned word that has a byte of the range lies in one allocation, which stays
///   mapped for `'a`.
/// - **ATOMIC** During `'a`, Rust code accesses those words by methods of this type alone.
pub(crate) struct Contested<'a> {
    start: NonNull<u8>,
    len: usize,
    mapped: PhantomData<&'a ()>,
}

impl Contested<'_> {
    /// The `len` bytes from `start`.
    ///
    /// # Safety
    ///
    /// The caller grants WHOLE and ATOMIC.
    pub(crate) unsafe fn new(start: NonNull<u8>, len: usize) -> Self {
        Self { start, len, mapped: PhantomData }
    }

    /// Replaces all bytes by those of `bytes`.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub(crate) fn store(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len);
        let Cut { head, body } = self.cut();
        let (first, rest) = bytes.split_at(head);
        let (words, last) = rest.split_at(body);
        self.patch(0, first);
        let at_once = bulk::part_of(words.len());
        if at_once > 0 {
            // SAFETY: `bulk::copy` asks for
            // - a source valid for reads of that many bytes: `words` is at least as long;
            // - a target whose words are valid for writes, and accessed by no plain Rust code:
            //   `cut` keeps `head + body` within the range, WHOLE, ATOMIC;
            // - no overlap: `words` is a reference, and by ATOMIC there is none to the range;
            // - whole lines: `part_of`.
            unsafe { bulk::copy(words.as_ptr(), self.byte(head), at_once) };
        }
        for (n, word) in words[at_once..].chunks_exact(WORD).enumerate() {
            let word = usize::from_ne_bytes(word.try_into().expect("chunks of a word"));
            self.word(head + at_once + n * WORD).0.store(word, Ordering::Relaxed);
        }
        self.patch(head + body, last);
    }

    /// Fills `out` with all bytes.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub(crate) fn load(&self, out: &mut [u8]) {
        assert_eq!(out.len(), self.len);
        let Cut { head, body } = self.cut();
        let (first, rest) = out.split_at_mut(head);
        let (words, last) = rest.split_at_mut(body);
        self.peek(0, first);
        let at_once = bulk::part_of(words.len());
        if at_once > 0 {
            // SAFETY: `bulk::copy` asks for
            // - a source whose words are valid for reads, and accessed by no plain Rust code: `cut`
            //   keeps `head + body` within the range, WHOLE, ATOMIC;
            // - a target valid for writes of that many bytes: `words` is at least as long;
            // - no overlap: `words` is a reference, and by ATOMIC there is none to the range;
            // - whole lines: `part_of`.
            unsafe { bulk::copy(self.byte(head), words.as_mut_ptr(), at_once) };
        }
        for (n, out) in words[at_once..].chunks_exact_mut(WORD).enumerate() {
            let (word, _) = self.word(head + at_once + n * WORD);
            out.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        self.peek(head + body, last);
    }

    /// Replaces all bytes by those of `source`.
    ///
    /// # Panics
    ///
    /// If the lengths differ, or if the ranges overlap.
    pub(crate) fn copy(&self, source: &Contested<'_>) {
        assert_eq!(source.len, self.len);
        let distance = (source.start.as_ptr() as usize).abs_diff(self.start.as_ptr() as usize);
        assert!(distance >= self.len, "the ranges overlap");
        let Cut { head, body } = self.cut();
        self.copy_piece(source, 0, head);
        let at_once = bulk::part_of(body);
        if at_once > 0 {
            // SAFETY: `bulk::copy` asks for
            // - a source whose words are valid for reads, and accessed by no plain Rust code: both
            //   ranges are equally long, `cut` keeps `head + body` within them, WHOLE, ATOMIC;
            // - a target whose words are valid for writes, and accessed by no plain Rust code: the
            //   same of this range;
            // - no overlap: the second assertion;
            // - whole lines: `part_of`.
            unsafe { bulk::copy(source.byte(head), self.byte(head), at_once) };
        }
        for at in (head + at_once..self.len).step_by(PIECE) {
            self.copy_piece(source, at, PIECE.min(self.len - at));
        }
    }

    /// Copies up to [`PIECE`] bytes that start `at` bytes into both ranges.
    fn copy_piece(&self, source: &Contested<'_>, at: usize, len: usize) {
        let piece = &mut [0; PIECE][..len];
        source.part(at, len).load(piece);
        self.part(at, len).store(piece);
    }

    /// The `len` bytes from `at`, which are within the range.
    fn part(&self, at: usize, len: usize) -> Self {
        assert!(at <= self.len && len <= self.len - at);
        // SAFETY: `add` asks to stay within the allocation: the assertion, and WHOLE.
        let start = unsafe { self.start.add(at) };
        Self { start, len, mapped: PhantomData }
    }

    /// Sets all bytes to zero.
    pub(crate) fn clear(&self) {
        let Cut { head, body } = self.cut();
        self.patch(0, &ZEROES[..head]);
        let at_once = bulk::part_of(body);
        if at_once > 0 {
            // SAFETY: `bulk::clear` asks for
            // - a target whose words are valid for writes, and accessed by no plain Rust code:
            //   `cut` keeps `head + body` within the range, WHOLE, ATOMIC;
            // - whole lines: `part_of`.
            unsafe { bulk::clear(self.byte(head), at_once) };
        }
        for at in (head + at_once..head + body).step_by(WORD) {
            self.word(at).0.store(0, Ordering::Relaxed);
        }
        self.patch(head + body, &ZEROES[..self.len - head - body]);
    }

    /// How much of the range is whole words.
    fn cut(&self) -> Cut {
        let until_word = (self.start.as_ptr() as usize).wrapping_neg() % WORD;
        let head = until_word.min(self.len);
        Cut { head, body: (self.len - head) / WORD * WORD }
    }

    /// Replaces some bytes of one word.
    fn patch(&self, at: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let (word, from) = self.word(at);
        let patched = |before: usize| {
            let mut whole = before.to_ne_bytes();
            whole[from..from + bytes.len()].copy_from_slice(bytes);
            Some(usize::from_ne_bytes(whole))
        };
        let replaced = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, patched);
        assert!(replaced.is_ok(), "it is always patched");
    }

    /// Copies some bytes of one word.
    fn peek(&self, at: usize, out: &mut [u8]) {
        if out.is_empty() {
            return;
        }
        let (word, from) = self.word(at);
        let whole = word.load(Ordering::Relaxed).to_ne_bytes();
        out.copy_from_slice(&whole[from..from + out.len()]);
    }

    /// The word that has the byte `at` bytes into the range, and which of its bytes that is.
    fn word(&self, at: usize) -> (&AtomicUsize, usize) {
        assert!(at < self.len);
        let byte = self.byte(at);
        let from = byte as usize % WORD;
        let word = byte.wrapping_sub(from).cast::<usize>();
        // SAFETY: `from_ptr` asks for
        // - an aligned address: `from` was what it is beyond a multiple of the word;
        // - memory valid for reads and writes as long as the reference lives: the word has a byte
        //   of the range, and WHOLE outlives `self`;
        // - no races with accesses that are not atomic, or of another size: ATOMIC, and all
        //   methods access it by whole words.
        (unsafe { AtomicUsize::from_ptr(word) }, from)
    }

    /// The address `at` bytes into the range.
    fn byte(&self, at: usize) -> *mut u8 {
        self.start.as_ptr().wrapping_add(at)
    }
}

/// Bytes before the first whole word of a range, and bytes of its whole words.
struct Cut {
    head: usize,
    body: usize,
}

const WORD: usize = size_of::<usize>();
/// Bytes that are copied by way of the stack, where there is no faster way.
const PIECE: usize = 64;
const ZEROES: [u8; WORD] = [0; WORD];

/// Many words per instruction: compilers leave atomic accesses as narrow as they are written.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod bulk {
    use std::arch::asm;

    /// Bytes that one round of a loop moves.
    const LINE: usize = 64;

    /// How many of `len` bytes these functions can do.
    pub(super) fn part_of(len: usize) -> usize {
        len / LINE * LINE
    }

    /// Copies `len` bytes.
    ///
    /// To Rust, this reads and writes each aligned word with one relaxed atomic access. Processors
    /// do as much for each aligned word of what these instructions access.
    ///
    /// # Safety
    ///
    /// `len` is a multiple of [`LINE`] and not zero; `source` is valid for reads and `target` for
    /// writes of as many bytes; the two do not overlap; plain Rust code accesses neither while it
    /// is contested.
    pub(super) unsafe fn copy(source: *const u8, target: *mut u8, len: usize) {
        if is_x86_feature_detected!("avx") {
            // SAFETY: `asm` asks that the code do no more than Rust may: it reads `len` bytes from
            // `source` and writes them to `target`, which the caller grants; it changes no register
            // that a function may not change; it uses no stack; this processor has AVX.
            unsafe {
                asm!(
                    "2:",
                    "vmovups ymm0, [rsi]",
                    "vmovups ymm1, [rsi + 32]",
                    "vmovups [rdi], ymm0",
                    "vmovups [rdi + 32], ymm1",
                    "add rsi, 64",
                    "add rdi, 64",
                    "sub rcx, 64",
                    "jnz 2b",
                    "vzeroupper",
                    inout("rsi") source => _,
                    inout("rdi") target => _,
                    inout("rcx") len => _,
                    clobber_abi("sysv64"),
                    options(nostack),
                );
            }
            return;
        }
        // SAFETY: as above, but that all registers it changes are named, and that every processor
        // of this kind has SSE.
        unsafe {
            asm!(
                "2:",
                "movups {a}, [{source}]",
                "movups {b}, [{source} + 16]",
                "movups {c}, [{source} + 32]",
                "movups {d}, [{source} + 48]",
                "movups [{target}], {a}",
                "movups [{target} + 16], {b}",
                "movups [{target} + 32], {c}",
                "movups [{target} + 48], {d}",
                "add {source}, 64",
                "add {target}, 64",
                "sub {left}, 64",
                "jnz 2b",
                source = inout(reg) source => _,
                target = inout(reg) target => _,
                left = inout(reg) len => _,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack),
            );
        }
    }

    /// Sets `len` bytes to zero, as [`copy`] would copy them.
    ///
    /// # Safety
    ///
    /// `len` is a multiple of [`LINE`] and not zero; `target` is valid for writes of as many bytes;
    /// plain Rust code does not access it while it is contested.
    pub(super) unsafe fn clear(target: *mut u8, len: usize) {
        // SAFETY: `asm` asks that the code do no more than Rust may: it writes `len` bytes from
        // `target`, which the caller grants; all registers it changes are named; it uses no stack.
        unsafe {
            asm!(
                "xorps {zero}, {zero}",
                "2:",
                "movups [{target}], {zero}",
                "movups [{target} + 16], {zero}",
                "movups [{target} + 32], {zero}",
                "movups [{target} + 48], {zero}",
                "add {target}, 64",
                "sub {left}, 64",
                "jnz 2b",
                target = inout(reg) target => _,
                left = inout(reg) len => _,
                zero = out(xmm_reg) _,
                options(nostack),
            );
        }
    }
}

/// Elsewhere word by word.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod bulk {
    pub(super) fn part_of(_len: usize) -> usize {
        0
    }

    /// # Safety
    ///
    /// Never called: it has no part of any copy.
    pub(super) unsafe fn copy(_source: *const u8, _target: *mut u8, _len: usize) {
        unreachable!("it has no part of any copy");
    }

    /// # Safety
    ///
    /// Never called: it has no part of any copy.
    pub(super) unsafe fn clear(_target: *mut u8, _len: usize) {
        unreachable!("it has no part of any copy");
    }
}
