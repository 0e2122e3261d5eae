//! Bytes that nobody can predict.

/// Numbers that nobody can predict. The kernel is asked for many at once.
pub(crate) fn numbers() -> impl FnMut() -> u32 {
    let mut bytes = [0; 512];
    let mut used = bytes.len();
    move || {
        if used == bytes.len() {
            (bytes, used) = (random(), 0);
        }
        let number = bytes[used..].first_chunk().expect("there are whole numbers only");
        used += size_of::<u32>();
        u32::from_ne_bytes(*number)
    }
}

/// Bytes that nobody can predict.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the kernel has random bytes");
    bytes
}
