//! CRC-32 of packets, by the widest carry-less multiplication that the processor has.
//!
//! `crc32fast` is made for long inputs. Below 2 KiB it leaves half of the width unused, and of a
//! packet of 1.5 kB it takes a good part of the time for what comes behind the last wide step: it
//! joins streams one after the other, and adds what is left in pieces of 16 bytes. Here neither
//! exists (`fold`), and such a packet takes 28 ns instead of 49 where it is in the caches nearby.
//! Short inputs, and processors that multiply no more than 16 bytes at once, are for `crc32fast`.

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx2;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx512;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod fold;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod wide;

/// The CRC-32 (ISO-HDLC, that of Ethernet) of some bytes followed by `bytes`, given the CRC-32 of
/// the former. That of no bytes is 0.
#[must_use]
pub fn update(crc: u32, bytes: &[u8]) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if let Some(crc) = wide::update(crc, bytes) {
        return crc;
    }
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(bytes);
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn some_bytes(len: u32) -> Vec<u8> {
        (0..len).map(|at| at.wrapping_mul(0x9e37_79b1).to_be_bytes()[1]).collect()
    }

    /// By the definition: one bit after the other.
    pub(crate) fn bit_by_bit(crc: u32, bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!crc, |state, byte| {
            (0..8).fold(state ^ u32::from(*byte), |state, _| {
                state >> 1 ^ if state & 1 == 0 { 0 } else { 0xedb8_8320 }
            })
        })
    }

    #[test]
    fn the_check_value_is_right() {
        assert_eq!(update(0, b"123456789"), 0xcbf4_3926);
        assert_eq!(bit_by_bit(0, b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn every_length_and_offset_has_the_crc_of_another_program() {
        let bytes = some_bytes(5_000);
        for len in 0..4_400 {
            for offset in [0, 1, 31, 64, 77] {
                let bytes = &bytes[offset..offset + len];
                for before in [0, 1, 0x8000_0000, 0x0123_4567, u32::MAX] {
                    let mut expected = crc32fast::Hasher::new_with_initial(before);
                    expected.update(bytes);
                    let crc = update(before, bytes);
                    assert_eq!(crc, expected.finalize(), "{len} bytes at {offset}");
                }
            }
        }
    }

    /// A packet and what precedes it may be taken together or apart.
    #[test]
    fn pieces_have_the_crc_of_the_whole() {
        let bytes = some_bytes(3_000);
        let whole = update(0, &bytes);
        for cut in 0..bytes.len() {
            let (first, rest) = bytes.split_at(cut);
            assert_eq!(update(update(0, first), rest), whole, "cut at {cut}");
        }
    }
}
