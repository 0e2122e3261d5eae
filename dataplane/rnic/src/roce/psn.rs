//! Packet sequence numbers: 24 bits on the wire, compared modulo 2^24.

use smcr_proto::Psn;

/// The bits of a PSN.
pub(super) const PSN_MASK: u32 = 0x00ff_ffff;

/// How a PSN relates to the one that is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// It was received before: a duplicate.
    Before,
    /// It is the expected one.
    Expected,
    /// A packet before it is missing.
    After,
}

/// The PSN `count` packets after `psn`.
pub(super) fn advance(psn: Psn, count: u64) -> Psn {
    // The sum is masked to 24 bits, so the upper half of the count does not matter.
    #[allow(clippy::cast_possible_truncation, reason = "only the low 24 bits count")]
    let count = count as u32;
    Psn(psn.0.wrapping_add(count) & PSN_MASK)
}

/// How many packets `later` comes after `earlier`: 0 to 2^24 - 1.
pub(super) fn distance(earlier: Psn, later: Psn) -> u32 {
    later.0.wrapping_sub(earlier.0) & PSN_MASK
}

/// How `psn` relates to `expected`: half of the number space is before it, half after.
pub(super) fn order(expected: Psn, psn: Psn) -> Order {
    match distance(expected, psn) {
        0 => Order::Expected,
        1..0x80_0000 => Order::After,
        _ => Order::Before,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After 16 million packets the PSNs wrap; a stream must not notice.
    #[test]
    fn numbers_wrap() {
        assert_eq!(advance(Psn(0xff_ffff), 1), Psn(0));
        assert_eq!(advance(Psn(5), 1 << 40 | 3), Psn(8));
        assert_eq!(distance(Psn(0xff_fff0), Psn(0x10)), 0x20);
        assert_eq!(order(Psn(0xff_ffff), Psn(0)), Order::After);
        assert_eq!(order(Psn(0), Psn(0xff_ffff)), Order::Before);
        assert_eq!(order(Psn(0), Psn(0x7f_ffff)), Order::After);
        assert_eq!(order(Psn(0), Psn(0x80_0000)), Order::Before);
        assert_eq!(order(Psn(7), Psn(7)), Order::Expected);
    }
}
